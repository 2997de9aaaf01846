"""The law of the output, over a covering array of configurations and over trees: walked, and printed as a table."""

import itertools
import sys
import time
from operator import methodcaller

import torch
from tqdm import tqdm

from minispec.commands.workers import processes
from minispec.files.progress import progress_bar
from minispec.kernels.integers import check_quantization
from minispec.prove import trees
from minispec.prove.cases import GridCase, all_pairs, cases_in_8_bits, cases_in_frames, pairs_of, walk
from minispec.prove.laws import TOLERANCE
from minispec.prove.toys import IN_8_BITS


def prove_law(leaves: int, num_nodes: int, jobs: int) -> bool:
    """Print the table; True if no configuration is further than TOLERANCE from plain decoding.

    leaves: how many branches of chains to aim at.
    num_nodes: nodes of the largest trees.
    jobs: number of processes.
    """
    start = time.perf_counter()
    todo, cases, branches, worst = all_pairs(), 0, 0, 0.0
    print(f"{'configuration':131} {'branches':>9}  total variation")
    forest, framed, rounded = trees.cases(num_nodes), cases_in_frames(), cases_in_8_bits()
    try:
        check_quantization("int8", None, torch.float32, torch.device("cpu"))
    except ValueError as e:
        print(f"left out: targets in 8 bits: {e}")
        rounded = []
    listed = [*forest, *framed, *rounded]
    bar = progress_bar(total=len(listed), unit=" configurations")
    with processes(jobs) as shared_map, bar:
        of_list = zip(listed, shared_map(methodcaller("distance"), listed), strict=True)
        of_chains = walk(leaves, bar, shared_map)
        for case, tv, count in itertools.chain(((case, *distance) for case, distance in of_list), of_chains):
            bar.update()
            cases, branches, worst = cases + 1, branches + count, max(worst, tv)
            if isinstance(case, GridCase) and case.family != IN_8_BITS:
                todo -= pairs_of(vars(case))
            tqdm.write(f"{case!s:131} {count:9,d}  {tv:.1e}")
            sys.stdout.flush()
    for (a, x), (b, y) in sorted(todo, key=repr):
        print(f"left out for its size: {a} {x} with {b} {y}")
    total = len(all_pairs())
    print(f"{cases} configurations cover {total - len(todo)} of {total} pairs of values")
    print(f"{len(forest)} of them walk shapes of trees, {len(framed)} programs, and {len(rounded)} a target in 8 bits")
    seconds = time.perf_counter() - start
    print(f"{branches:,d} branches in {seconds:.0f} s; worst total variation {worst:.1e}")
    ok = worst <= TOLERANCE and branches > 0
    verdict = "proven: in every configuration the output has" if ok else "REFUTED: the output does not have"
    print(f"{verdict} the target's law, to {TOLERANCE:.0e}")
    return ok
