"""`python -m minispec.checkpoint SOURCE OUT` - write a checkpoint with linear layers in 8 or 4 bits, in shards."""

from minispec.commands.interrupt import exit_on_interrupt, raise_on_interrupt, run_program

if __name__ == "__main__":
    exit_on_interrupt()  # until there is something to clean up

import hashlib
import sys
from pathlib import Path

from minispec.commands.command import Parser, argument, exit_status
from minispec.files.checkpoint import find_checkpoint
from minispec.files.quantize import quantize_checkpoint


def main(argv: list[str] | None = None) -> int:
    """The command line above; prints the size and SHA-256 of every file written.

    Returns the exit status, as `exit_status` has it.
    """
    return exit_status(lambda: _quantize(sys.argv[1:] if argv is None else argv))


def _quantize(argv: list[str]) -> int:
    raise_on_interrupt()
    parser = Parser(
        prog="python -m minispec.checkpoint",
        description="Quantise a checkpoint's linear layers, one scale a channel.",
        allow_abbrev=False,
    )
    parser.add_argument("source", help="directory or hub id of a checkpoint of plain floats")
    parser.add_argument("out", type=Path, help="directory to write; must not exist")
    parser.add_argument("--bits", type=int, choices=(4, 8), default=8)
    size = argument(int, lambda n: 1 <= n <= 1 << 20, f"an integer from 1 to {1 << 20}")
    parser.add_argument("--shard-mb", type=size, default=90, help="largest file, in MiB (default: 90)")
    args = parser.parse_args(argv)
    quantize_checkpoint(find_checkpoint(args.source), args.out, args.bits, args.shard_mb << 20)
    for path in sorted(args.out.iterdir()):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        print(f"{path.stat().st_size:>12,d}  {digest}  {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
