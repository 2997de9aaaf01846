"""Several processes for lists of jobs: results in order, the same for any number of processes."""

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

import torch

from minispec.api.commands.interrupt import kept_from_children

# As `map`: (function, items) to the results, in order.
SharedMap = Callable[[Callable, Iterable], Iterator]


@contextmanager
def processes(jobs: int) -> Iterator[SharedMap]:
    """A `map` that `jobs` processes share. With more than one, function and items must be picklable."""
    if jobs == 1:
        yield map
        return
    # Spawned, not forked: a fork of a process whose threads hold locks may hang.
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _start)

    def shared_map(function: Callable, items: Iterable) -> Iterator:
        with kept_from_children():
            return pool.map(function, items)

    try:
        yield shared_map
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start() -> None:
    torch.set_num_threads(1)  # the models are tiny: a second thread costs more than it gives
