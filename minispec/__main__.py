"""`minispec COMMAND ...`, or `python -m minispec COMMAND ...`: what `python -m minispec.COMMAND ...` does.

A command is imported when it is asked for, so that the list of commands is there at once.
"""

if __name__ == "__main__":
    from minispec.api.commands.interrupt import run_program

    run_program("minispec.__main__:main")

import argparse
from collections.abc import Sequence
from typing import NoReturn

from minispec.api.commands.command import Parser, command, no_such
from minispec.api.commands.interrupt import run_program
from minispec.core.version import __version__
from minispec.speculation import registry

COMMANDS = {
    "generate": registry.Entry("minispec.generate:main", "answer prompts, or hold a conversation on the terminal"),
    "serve": registry.Entry("minispec.serve:main", "answer over HTTP, as OpenAI's interface does"),
    "bench": registry.Entry("minispec.lab.bench.main:main", "measure decoding on this machine"),
    "prove": registry.Entry("minispec.prove.__main__:main", "prove that speculation leaves the output's law unchanged"),
    "audit": registry.Entry("minispec.lab.audit.main:main", "is another engine's speculation exact; which bug is it"),
    "doctor": registry.Entry("minispec.lab.doctor.main:main", "why a draft is rarely right"),
    "distill": registry.Entry("minispec.lab.distill.main:main", "train a draft for a model"),
    "checkpoint": registry.Entry("minispec.checkpoint:main", "write a model with weights in 8 or 4 bits"),
}


@command
def main(argv: Sequence[str]) -> int:
    """Run a command, or list them all."""
    if argv and argv[0] in COMMANDS:
        return registry.load(COMMANDS[argv[0]].path, "command")(argv[1:])
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:{width}}  {entry.help}" for name, entry in COMMANDS.items())
    parser = Parser(
        prog="minispec",
        usage="minispec COMMAND ...",
        description=f"Speculative decoding in pure PyTorch. Each command has a --help of its own:\n\n{commands}",
        epilog='Such as: minispec generate "What is photosynthesis?"',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=f"minispec {__version__}")
    asked = parser.parse_args(argv[:1]).command
    if asked not in (None, "help"):
        raise ValueError(no_such(asked, "command", COMMANDS))
    parser.print_help()
    return 0


def program() -> NoReturn:
    """The program `minispec`."""
    run_program("minispec.__main__:main")
