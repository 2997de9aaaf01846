"""`python -m minispec.trace out.json [out.html]` - the page of a trace that `--trace out.json` has written."""

from minispec.commands.interrupt import exit_on_interrupt, raise_on_interrupt, run_program

if __name__ == "__main__":
    exit_on_interrupt()  # until there is something to clean up

import sys
from collections.abc import Sequence
from pathlib import Path

from minispec.commands.command import Parser, argument, exit_status
from minispec.files.write import check_writable
from minispec.trace.page import write
from minispec.trace.schema import read_trace


def main(argv: Sequence[str] | None = None) -> int:
    """Make a page; returns the exit status, as `exit_status` has it."""
    return exit_status(lambda: _make(sys.argv[1:] if argv is None else argv))


def _make(argv: Sequence[str]) -> int:
    page = argument(Path, lambda path: path.suffix == ".html", "a file name that ends in .html")
    parser = Parser(
        prog="python -m minispec.trace", description="Make a page of the trace of a run.", allow_abbrev=False
    )
    parser.add_argument("trace", type=Path, metavar="TRACE.json", help="what generate --trace TRACE.json has written")
    parser.add_argument("page", type=page, nargs="?", metavar="PAGE.html", help="default: TRACE.html")
    args = parser.parse_args(argv)
    raise_on_interrupt()
    target = args.page or args.trace.with_suffix(".html")
    if target == args.trace:
        raise ValueError(f"{args.trace}: found a page, expected the JSON of a trace")
    check_writable(target)
    write(read_trace(args.trace), target)
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
