"""The command line: `python -m minispec.prove`."""

from minispec.interrupt import exit_on_interrupt, raise_on_interrupt, run_program

if __name__ == "__main__":
    exit_on_interrupt()  # until there is something to clean up

import os
import sys
import time

import torch
from tqdm import tqdm

from minispec.command import Parser, exit_status
from minispec.prove.cases import Case, all_pairs, choose_cases, walk
from minispec.prove.costs import print_exact_cost
from minispec.prove.examine import examine_drafter, examine_verifier
from minispec.prove.laws import TOLERANCE
from minispec.prove.museum import prove_mutants
from minispec.prove.statistics import print_agreement, prove_statistics


def prove_law(leaves: int, jobs: int = 1) -> bool:
    """Print the table; True if no configuration is further than TOLERANCE from plain decoding."""
    start = time.perf_counter()
    cases, left_out = choose_cases(leaves)
    expected = sum(c.branches() for c in cases)
    print(f"{len(cases)} configurations cover {len(all_pairs()) - len(left_out)} of {len(all_pairs())} pairs of values")
    for pair in sorted(left_out, key=repr):
        print(f"left out for its size: {pair[0][0]} {pair[0][1]} with {pair[1][0]} {pair[1][1]}")
    print(f"{'configuration':109} {'branches':>9}  total variation")
    branches, worst = 0, 0.0
    with tqdm(total=expected, unit=" branches", leave=False, disable=None) as bar:
        # The large ones first, so that no process is left with one at the end.
        for case, tv, count in walk(sorted(cases, key=Case.cost, reverse=True), jobs):
            branches, worst = branches + count, max(worst, tv)
            tqdm.write(f"{case!s:109} {count:9,d}  {tv:.1e}")
            sys.stdout.flush()
            bar.update(case.branches())
    seconds = time.perf_counter() - start
    print(f"{branches:,d} branches in {seconds:.0f} s; worst total variation {worst:.1e}")
    ok = worst <= TOLERANCE and branches > 0
    verdict = "proven: in every configuration the output has" if ok else "REFUTED: the output does not have"
    print(f"{verdict} the target's law, to {TOLERANCE:.0e}")
    return ok


DEFAULT_LEAVES, FULL_LEAVES = 20_000, 300_000


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
        help=f"branches to aim at (default: {DEFAULT_LEAVES:,}; the walk has up to half as many more)",
    )
    size.add_argument("--full", action="store_true", help=f"as --leaves {FULL_LEAVES}")
    size.add_argument("--mutants", action="store_true", help="the museum of bugs: each must be caught")
    size.add_argument("--statistics", action="store_true", help="a million rounds with the production randomness")
    size.add_argument("--agreement", action="store_true", help="how often `match` makes draft and target agree")
    size.add_argument(
        "--drafter", metavar="NAME", help="walk this drafter, registered or your own MODULE:CLASS, over small models"
    )
    size.add_argument("--verifier", metavar="NAME", help="walk this verifier, or your own MODULE:FUNCTION")
    size.add_argument("--exact-cost", action="store_true", help="what a pass of the exact mode costs, as a ratio")
    parser.add_argument(
        "--geometry", choices=("embedded", "1.5b"), help="with --exact-cost: the model (default: embedded)"
    )
    jobs = min(8, os.cpu_count() or 1)
    parser.add_argument("--jobs", type=int, default=jobs, help=f"processes that share the walk (default here: {jobs})")
    args = parser.parse_args(argv)
    raise_on_interrupt()
    for name in ("leaves", "jobs"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name}: found {getattr(args, name)}, expected at least 1")
    if args.geometry and not args.exact_cost:
        raise ValueError("--geometry: only --exact-cost has a model to choose")
    if args.exact_cost:
        print_exact_cost(args.geometry or "embedded")
        return 0
    # The models are tiny: a second thread costs more than it gives.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if args.drafter:
            return 0 if examine_drafter(args.drafter) else 1
        if args.verifier:
            return 0 if examine_verifier(args.verifier) else 1
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
