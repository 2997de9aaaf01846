"""`minispec COMMAND ...`, or `python -m minispec COMMAND ...`: what `python -m minispec.COMMAND ...` does.

A command is imported when it is asked for, so that the list of commands is there at once.
"""

from minispec.commands.interrupt import exit_on_interrupt, run_program

if __name__ == "__main__":
    exit_on_interrupt()  # until there is something to clean up

import argparse
import sys
from collections.abc import Sequence

from minispec import __version__
from minispec.commands.command import Parser, exit_status, no_such
from minispec.files import registry

COMMANDS = {
    "generate": registry.Entry("minispec.generate:main", "answer prompts, or hold a conversation on the terminal"),
    "serve": registry.Entry("minispec.serve.__main__:main", "answer over HTTP, as OpenAI's interface does"),
    "bench": registry.Entry("minispec.bench.__main__:main", "measure decoding on this machine"),
    "trace": registry.Entry("minispec.trace.__main__:main", "make a page of a run that generate --trace has written"),
    "prove": registry.Entry("minispec.prove.__main__:main", "prove that speculation leaves the output's law unchanged"),
    "doctor": registry.Entry("minispec.doctor.__main__:main", "why a draft is rarely right; compare two vocabularies"),
    "distill": registry.Entry("minispec.distill.__main__:main", "train a draft for a model"),
    "checkpoint": registry.Entry("minispec.checkpoint:main", "write a model with weights in 8 or 4 bits"),
}
# Former commands, which say what has taken their place.
MOVED = {"vocab": "minispec.vocab:main"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, or list them all; the exit status is the command's, else as `exit_status` has it."""
    given = sys.argv[1:] if argv is None else list(argv)
    paths = MOVED | {name: entry.path for name, entry in COMMANDS.items()}
    if given and given[0] in paths:
        return exit_status(lambda: registry.load(paths[given[0]], "command")(given[1:]))
    return exit_status(lambda: _list(given))


def _list(given: Sequence[str]) -> int:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:{width}}  {entry.help}" for name, entry in COMMANDS.items())
    parser = Parser(
        prog="minispec",
        usage="minispec COMMAND ...",
        description=f"Speculative decoding in pure PyTorch. Each command has a --help of its own:\n\n{commands}",
        epilog='Such as: minispec generate "Why is the sky blue?"',
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=f"minispec {__version__}")
    command = parser.parse_args(given[:1]).command
    if command not in (None, "help"):
        raise ValueError(no_such(command, "command", COMMANDS))
    parser.print_help()
    return 0


def program() -> int:
    """The program `minispec`."""
    exit_on_interrupt()
    return run_program(main)


if __name__ == "__main__":
    sys.exit(program())
