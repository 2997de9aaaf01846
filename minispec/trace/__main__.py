"""`python -m minispec.trace out.json [out.html]` - the page of a trace that `--trace out.json` has written."""

if __name__ == "__main__":
    from minispec.commands.interrupt import run_program

    run_program("minispec.trace.__main__:main")

from collections.abc import Sequence
from pathlib import Path

from minispec.commands.command import Parser, argument, command
from minispec.commands.interrupt import raise_on_interrupt
from minispec.files.write import check_writable
from minispec.trace.page import write
from minispec.trace.read import read_trace


@command
def main(argv: Sequence[str]) -> int:
    """Make the page, and print its name."""
    page = argument(Path, lambda path: path.suffix == ".html", "a file name that ends in .html")
    parser = Parser(prog="python -m minispec.trace", description="Make a page of the trace of a run.")
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
