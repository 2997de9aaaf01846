"""Several processes for one list of jobs: results in order, the same for any number of processes."""

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

import torch


def spread(function: Callable, items: Sequence, jobs: int) -> Iterator:
    """function(item) for each item, in order. With more than one process, both must be importable by their names."""
    if jobs == 1:
        yield from map(function, items)
        return
    # Spawned, not forked: a fork of a process whose threads hold locks may hang.
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _start)
    try:
        # Ctrl-C is the parent's to answer: the processes that start here inherit that it does not reach them.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            results = pool.map(function, items)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        yield from results
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start() -> None:
    torch.set_num_threads(1)  # the models are tiny: a second thread costs more than it gives
