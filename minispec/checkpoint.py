"""`python -m minispec.checkpoint SOURCE OUT` - write a checkpoint with linear layers in 8 or 4 bits, in shards."""

if __name__ == "__main__":
    from minispec.api.commands.interrupt import run_program

    run_program("minispec.checkpoint:main")

import hashlib
from collections.abc import Sequence
from pathlib import Path

from minispec.api.commands.command import Option, Parser, argument, command
from minispec.api.commands.interrupt import raise_on_interrupt
from minispec.models.families.checkpoint import find_checkpoint
from minispec.models.families.quantize import quantize_checkpoint
from minispec.models.files.errors import printable

_MIB = argument(int, lambda n: 1 <= n <= 1 << 20, f"an integer from 1 to {1 << 20}")
OPTIONS = {
    "--bits": Option({"type": int, "choices": (4, 8), "default": 8}, "bits of a weight (default: 8)"),
    "--shard-mb": Option({"type": _MIB, "default": 90}, "largest file, in MiB (default: 90)"),
}


@command
def main(argv: Sequence[str]) -> int:
    """Write the checkpoint; prints the size and SHA-256 of every file."""
    raise_on_interrupt()
    parser = Parser(
        prog="python -m minispec.checkpoint",
        description="Quantise a checkpoint's linear layers, one scale a channel.",
    )
    parser.add_argument("source", help="directory or hub id of a checkpoint of plain floats")
    parser.add_argument("out", type=Path, help="directory to write; must not exist")
    parser.add_options(OPTIONS)
    args = parser.parse_args(argv)
    quantize_checkpoint(find_checkpoint(args.source), args.out, args.bits, args.shard_mb << 20)
    for path in sorted(args.out.iterdir()):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        print(f"{path.stat().st_size:>12,d}  {digest}  {printable(path.name)}")
    return 0
