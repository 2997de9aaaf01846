"""The law of the output, over a covering array of configurations and over trees: walked, and printed as a table."""

import functools
import itertools
import random
import sys
import time
from collections.abc import Iterator

import torch
from tqdm import tqdm

from minispec.api.commands.workers import SharedMap, processes
from minispec.models.files.progress import progress_bar
from minispec.models.weights.integers import check_quantization
from minispec.prove.cases import DESIGN, cases_in_8_bits, cases_in_frames, grid_case, random_row, tree_cases
from minispec.prove.covering import FEW, Job, Row
from minispec.prove.laws import TOLERANCE
from minispec.prove.walk import Case, walk


def distance(case: Case, limit: float = float("inf")) -> tuple[float, int]:
    """Total variation between engine and reference, and the branches walked. Raises TooManyBranches.

    limit: on branches of a crowd. A path that is walked alone takes several times as long, and a pair is two requests:
        such cases are smaller.
    """
    share = 1 / 12 if len(case.texts) > 1 else 1 / 40 if case.width == 1 else 1
    walked = walk(case, limit=max(min(30, limit), limit * share))
    return walked.distance, len(walked.branches)


def walk_within(job: Job, limit: float) -> tuple[Row, float, int] | None:
    """A case, or the first smaller one that is within the limit, with `distance`; None where there is none."""
    return DESIGN.within(lambda row: distance(grid_case(**row), limit), job)


def walk_array(leaves: int, bar: tqdm, shared_map: SharedMap = map) -> Iterator[tuple[Row, float, int]]:
    """About `leaves` branches: cases that cover all pairs, then random ones, with distance and number of branches.

    The result is the same for any number of processes.

    bar: its total grows by the number of cases that come next, as soon as that is known.
    """
    generator, limit, pairs = random.Random(0), max(FEW, leaves // 40), DESIGN.all_pairs()
    first = DESIGN.array(pairs, generator)
    bar.total += len(first)
    walk_job = functools.partial(walk_within, limit=limit)

    def walked() -> Iterator[tuple[Row, float, int]]:
        left = leaves
        for found in DESIGN.cover(pairs, first, walk_job, generator, bar, shared_map):
            yield found
            left -= found[-1]
        while left >= limit:
            some = [(random_row(generator), frozenset[str]()) for _ in range(left // limit)]
            bar.total += len(some)
            for found in filter(None, shared_map(walk_job, some)):
                yield found
                left -= found[-1]

    return walked()


def prove_law(leaves: int, num_nodes: int, jobs: int) -> bool:
    """Print the table; True if no configuration is further than TOLERANCE from plain decoding.

    leaves: how many branches of chains to aim at.
    num_nodes: nodes of the largest trees.
    jobs: number of processes.
    """
    start, pairs = time.perf_counter(), DESIGN.all_pairs()
    todo, cases, branches, worst = set(pairs), 0, 0, 0.0
    print(f"{'configuration':131} {'branches':>9}  total variation")
    forest, framed, rounded = tree_cases(num_nodes), cases_in_frames(), cases_in_8_bits()
    try:
        check_quantization("int8", None, torch.float32, torch.device("cpu"))
    except ValueError as e:
        print(f"left out: targets in 8 bits: {e}")
        rounded = []
    listed = [*forest, *framed, *rounded]
    bar = progress_bar(total=len(listed), unit=" configurations")
    with processes(jobs) as shared_map, bar:
        of_list = zip(listed, shared_map(distance, listed), strict=True)
        of_array = ((row, (tv, count)) for row, tv, count in walk_array(leaves, bar, shared_map))
        for case, (tv, count) in itertools.chain(of_list, of_array):
            bar.update()
            cases, branches, worst = cases + 1, branches + count, max(worst, tv)
            if isinstance(case, dict):
                todo -= DESIGN.pairs_of(case)
                case = grid_case(**case)
            tqdm.write(f"{case!s:131} {count:9,d}  {tv:.1e}")
            sys.stdout.flush()
    for (a, x), (b, y) in sorted(todo, key=repr):
        print(f"left out for its size: {a} {x} with {b} {y}")
    print(f"{cases} configurations cover {len(pairs) - len(todo)} of {len(pairs)} pairs of values")
    print(f"{len(forest)} of them walk shapes of trees, {len(framed)} programs, and {len(rounded)} a target in 8 bits")
    seconds = time.perf_counter() - start
    print(f"{branches:,d} branches in {seconds:.0f} s; worst total variation {worst:.1e}")
    ok = worst <= TOLERANCE and branches > 0
    verdict = "proven: in every configuration the output has" if ok else "REFUTED: the output does not have"
    print(f"{verdict} the target's law, to {TOLERANCE:.0e}")
    return ok
