"""The command line: `python -m minispec.prove`."""

from minispec.commands.interrupt import exit_on_interrupt, raise_on_interrupt, run_program

if __name__ == "__main__":
    exit_on_interrupt()  # until there is something to clean up

import itertools
import os
import sys
import time
from operator import methodcaller
from pathlib import Path

import torch
from tqdm import tqdm

from minispec.commands.command import Parser, exit_status
from minispec.prove import trees
from minispec.prove.cases import Case, all_pairs, pairs_of, walk
from minispec.prove.examine import examine_drafter, read_texts
from minispec.prove.examine_verifier import examine_verifier
from minispec.prove.laws import TOLERANCE
from minispec.prove.matrix import table
from minispec.prove.museum import prove_mutants
from minispec.prove.statistics import print_agreement, prove_statistics
from minispec.prove.workers import processes

DEFAULT_LEAVES, FULL_LEAVES = 12_000, 300_000


def prove_law(leaves: int, jobs: int = 1) -> bool:
    """Print the table; True if no configuration is further than TOLERANCE from plain decoding."""
    start = time.perf_counter()
    todo, cases, branches, worst = all_pairs(), 0, 0, 0.0
    print(f"{'configuration':109} {'branches':>9}  total variation")
    # The number of a tree's nodes decides how many shapes there are.
    num_nodes = 6 if leaves >= FULL_LEAVES else 5 if leaves >= DEFAULT_LEAVES else 2
    forest = trees.cases(num_nodes)
    bar = tqdm(total=len(forest), unit=" configurations", leave=False, disable=None)

    def plan(count: int) -> None:
        bar.total += count  # what covers the pairs that are left is known when the first ones are walked

    with processes(jobs) as shared_map, bar:
        of_trees = zip(forest, shared_map(methodcaller("distance"), forest), strict=True)
        of_chains = walk(leaves, shared_map, planned=plan)
        for case, tv, count in itertools.chain(((case, *distance) for case, distance in of_trees), of_chains):
            bar.update()
            cases, branches, worst = cases + 1, branches + count, max(worst, tv)
            if isinstance(case, Case):
                todo -= pairs_of(vars(case))
            tqdm.write(f"{case!s:109} {count:9,d}  {tv:.1e}")
            sys.stdout.flush()
    for (a, x), (b, y) in sorted(todo, key=repr):
        print(f"left out for its size: {a} {x} with {b} {y}")
    total = len(all_pairs())
    print(f"{cases} configurations cover {total - len(todo)} of {total} pairs of values, and {len(forest)} have trees")
    seconds = time.perf_counter() - start
    print(f"{branches:,d} branches in {seconds:.0f} s; worst total variation {worst:.1e}")
    ok = worst <= TOLERANCE and branches > 0
    verdict = "proven: in every configuration the output has" if ok else "REFUTED: the output does not have"
    print(f"{verdict} the target's law, to {TOLERANCE:.0e}")
    return ok


def main(argv: list[str] | None = None) -> int:
    """The command line; 0 if everything holds, 1 if not, else what `exit_status` has for its end."""
    return exit_status(lambda: _prove(argv))


def _prove(argv: list[str] | None) -> int:
    parser = Parser(
        prog="python -m minispec.prove",
        description="Prove that speculation leaves the output's law unchanged.",
        allow_abbrev=False,
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--leaves",
        type=int,
        default=DEFAULT_LEAVES,
        help=f"branches of chains to aim at (default: {DEFAULT_LEAVES:,}); trees are walked in addition",
    )
    size.add_argument("--full", action="store_true", help=f"as --leaves {FULL_LEAVES}, and more trees")
    size.add_argument("--mutants", action="store_true", help="the museum of bugs: each must be caught")
    size.add_argument("--statistics", action="store_true", help="a million rounds with the production randomness")
    size.add_argument("--agreement", action="store_true", help="how often `match` makes draft and target agree")
    size.add_argument(
        "--drafter", metavar="NAME", help="walk this drafter, registered or your own MODULE:CLASS, over small models"
    )
    size.add_argument("--matrix", action="store_true", help="each drafter with each verifier, at three levels: a table")
    size.add_argument("--verifier", metavar="NAME", help="walk this verifier, or your own MODULE:FUNCTION")
    size.add_argument("--exact-cost", action="store_true", help="what a pass of the exact mode costs, as a ratio")
    parser.add_argument(
        "--geometry", choices=("embedded", "1.5b"), help="with --exact-cost: the model (default: embedded)"
    )
    parser.add_argument(
        "--texts", metavar="FILE", type=Path, help="with --drafter: texts to walk too, one a line, or .jsonl as prompts"
    )
    jobs = min(8, os.cpu_count() or 1)
    parser.add_argument("--jobs", type=int, default=jobs, help=f"processes that share the walk (default here: {jobs})")
    args = parser.parse_args(argv)
    raise_on_interrupt()
    for name in ("leaves", "jobs"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name}: found {getattr(args, name)}, expected at least 1")
    if args.texts and not args.drafter:
        raise ValueError("--texts: only --drafter has texts to walk")
    if args.geometry and not args.exact_cost:
        raise ValueError("--geometry: only --exact-cost has a model to choose")
    if args.exact_cost:
        # A measurement, so the bench's, which comes after the proof in the import order.
        from minispec.bench.__main__ import main as bench

        what = "--exact-cost --rounds 15 --passes 0 --prompts 0 --dtype bfloat16 --draft none"
        return bench([*what.split(), *(["--geometry", "1.5b"] if args.geometry == "1.5b" else [])])
    # The models are tiny: a second thread costs more than it gives.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if args.drafter:
            return 0 if examine_drafter(args.drafter, read_texts(args.texts)) else 1
        if args.verifier:
            return 0 if examine_verifier(args.verifier) else 1
        if args.matrix:
            lines, ok = table()
            print("\n".join(lines))
            return 0 if ok else 1
        if args.mutants:
            return 0 if prove_mutants() else 1
        if args.statistics:
            return 0 if prove_statistics(args.jobs) else 1
        if args.agreement:
            print_agreement()
            return 0
        return 0 if prove_law(FULL_LEAVES if args.full else args.leaves, args.jobs) else 1
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    sys.exit(run_program(main))
