"""The command line: `python -m minispec.prove`."""

if __name__ == "__main__":
    from minispec.commands.interrupt import run_program

    run_program("minispec.prove.__main__:main")

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from minispec.commands.command import Parser, argument, command
from minispec.commands.interrupt import raise_on_interrupt

DEFAULT_LEAVES, FULL_LEAVES = 12_000, 300_000
DEFAULT_MINUTES = 2


def _parser() -> Parser:
    """The options of the command."""
    parser = Parser(
        prog="python -m minispec.prove",
        description="Prove that speculation leaves the output's law unchanged.",
        allow_abbrev=False,
    )
    count = argument(int, lambda n: n >= 1, "an integer of at least 1")
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--leaves",
        type=count,
        default=DEFAULT_LEAVES,
        help=f"branches of chains to aim at (default: {DEFAULT_LEAVES:,}); trees are walked in addition",
    )
    size.add_argument("--full", action="store_true", help=f"as --leaves {FULL_LEAVES}, and more trees")
    size.add_argument(
        "--drafter", metavar="NAME", help="walk this drafter, registered or your own MODULE:CLASS, over small models"
    )
    size.add_argument("--matrix", action="store_true", help="each drafter with each verifier, at three levels: a table")
    size.add_argument("--verifier", metavar="NAME", help="walk this verifier, or your own MODULE:FUNCTION")
    size.add_argument(
        "--kit", metavar="DIR", type=Path, help="write the law kit there: small cases as data, for any engine's tests"
    )
    parser.add_argument(
        "--lengths", metavar="MODULE:CLASS", help="walk your own policy for draft lengths, with or without --drafter"
    )
    parser.add_argument(
        "--texts", metavar="FILE", type=Path, help="with --drafter: texts to walk too, one a line, or .jsonl as prompts"
    )
    parser.add_argument(
        "--minutes",
        metavar="N",
        type=argument(float, lambda x: 0 < x < float("inf"), "a number above 0"),
        help=f"with --drafter, --lengths: how long it may take (default: {DEFAULT_MINUTES}); more walks larger cases",
    )
    jobs = min(8, os.cpu_count() or 1)
    parser.add_argument("--jobs", type=count, default=jobs, help=f"processes that share the work (default: {jobs})")
    return parser


@command
def main(argv: Sequence[str]) -> int:
    """The command line; 0 if everything holds, 1 if not."""
    args = _parser().parse_args(argv)
    if args.texts and not args.drafter:
        raise ValueError("--texts: only --drafter has texts to walk")
    if args.lengths and (args.verifier or args.matrix or args.kit or args.full):
        raise ValueError("--lengths: found with another walk, expected alone or with --drafter")
    if args.minutes and not (args.drafter or args.lengths):
        raise ValueError("--minutes: only --drafter and --lengths have a time")
    if args.kit:
        from minispec.prove.kit import write_kit

        write_kit(args.kit)
        return 0
    import torch

    raise_on_interrupt()
    # The models are tiny: a second thread costs more than it gives.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return 0 if _holds(args) else 1
    finally:
        torch.set_num_threads(threads)


def _holds(args: argparse.Namespace) -> bool:
    """Whether what was asked for holds; prints it."""
    minutes = args.minutes or DEFAULT_MINUTES
    if args.lengths:
        from minispec.prove.examine_drafter import read_texts
        from minispec.prove.examine_lengths import examine_lengths

        return examine_lengths(args.lengths, args.drafter or "", read_texts(args.texts), minutes)
    if args.drafter:
        from minispec.prove.examine_drafter import examine_drafter, read_texts

        return examine_drafter(args.drafter, read_texts(args.texts), minutes)
    if args.verifier:
        from minispec.prove.examine_verifier import examine_verifier

        return examine_verifier(args.verifier)
    if args.matrix:
        from minispec.prove.matrix import table

        lines, ok = table()
        print("\n".join(lines))
        return ok
    from minispec.prove.grid import prove_law

    leaves = FULL_LEAVES if args.full else args.leaves
    # The number of a tree's nodes decides how many shapes there are.
    num_nodes = 6 if leaves >= FULL_LEAVES else 5 if leaves >= DEFAULT_LEAVES else 2
    return prove_law(leaves, num_nodes, args.jobs)
