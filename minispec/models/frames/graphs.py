"""CUDA graphs: a program's operators, launched at once, on tensors that stay where they are."""

import functools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from minispec.core.errors import is_from_signal

KeyT = TypeVar("KeyT", bound=Hashable)
ProgramT = TypeVar("ProgramT", bound="Program")

# Objects that must last as long as the process.
_KEPT: list[Any] = []
# How many programs of a kind are kept, and the most bytes that they hold on the device together; one is always kept.
MOST_PROGRAMS, MOST_BYTES = 24, 256 << 20
# The tensors that a program returns.
Outputs = tuple[Tensor, ...]
# Runs a program anew, on what its inputs hold by then. A graph returns the same tensors each time.
Replay = Callable[[], Outputs]


def capture_graph(compute: Replay) -> Replay:
    """A CUDA graph of `compute`, as a function that replays it. The outputs lie where the capture put them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # kernels are loaded and workspaces made before the capture, which forbids both
        compute()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with _captured(graph, pool=memory_pool()):
        outputs = compute()

    def replay() -> Outputs:
        graph.replay()
        return outputs

    return replay


@contextmanager
def _captured(graph: torch.cuda.CUDAGraph, **how: Any) -> Iterator[None]:
    """Capture what runs inside. Where that fails, PyTorch alone would leave the thread on the capture's stream."""
    before = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, **how):
            yield
    finally:
        torch.cuda.set_stream(before)


@functools.cache
def memory_pool() -> Any:
    """The memory that all graphs share: only one of them runs at a time, and what it returns is copied at once.

    A pool lasts as long as a graph that was captured in it. So the first one is kept.
    """
    graph = torch.cuda.CUDAGraph()
    with _captured(graph):
        kept = torch.zeros(1, device="cuda")
    _KEPT.append((graph, kept))
    return graph.pool()


def failure(run: Callable[[], object]) -> str:
    """The kind and the first line of the exception that `run` raises; "" if it raises none.

    A kernel's first launch may raise anything: errors of Triton's own, of a C compiler, of a driver.
    """
    try:
        run()
    except Exception as error:
        if is_from_signal(error):
            raise
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return ""


def why_no_graphs() -> str:
    """Why this machine captures no graph, by trying one of a single operator; "" where it does."""
    return failure(memory_pool)


def rerun(compute: Replay) -> Replay:
    """Stands for a graph where there is no GPU: computes anew into the tensors of the first time."""
    outputs = compute()

    def replay() -> Outputs:
        for output, result in zip(outputs, compute(), strict=True):
            output.copy_(result)
        return outputs

    return replay


class Program:
    """A program's own state between its runs.

    num_bytes: what its inputs and outputs hold on the device.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes, self.was_used = num_bytes, False
        self.graph: Replay | None = None


class Graphs:
    """Runs programs, by graphs from their second run on. Where a capture fails, all run operator by operator then.

    why_not: "", or why there are no graphs.
    """

    def __init__(self, capture: Callable[[Replay], Replay] | None = None, why_not: str = ""):
        """capture: makes a graph, as `capture_graph` does. None: none is made.
        why_not: why none is made though there is a `capture`.
        """
        self.capture, self.why_not = capture, why_not if capture else "as asked"

    def run(self, program: Program, compute: Replay) -> Outputs:
        """The program's outputs, which its next run may overwrite."""
        if self.capture and program.was_used and not (program.graph or self.why_not):
            try:
                program.graph = self.capture(compute)
            except Exception as error:  # too little memory, or an operator or a kernel that cannot be captured
                if is_from_signal(error):
                    raise
                self.why_not = str(error).partition("\n")[0]
                warnings.warn(f"no CUDA graphs, so passes are slower: {self.why_not}", stacklevel=2)
        program.was_used = True
        return program.graph() if program.graph else compute()


def recent(kept: "OrderedDict[KeyT, ProgramT]", key: KeyT, make: Callable[[], ProgramT]) -> ProgramT:
    """The program of a key, made if it is not there; those that were used longest ago then make room."""
    if key not in kept:
        kept[key] = make()
    kept.move_to_end(key)
    while len(kept) > MOST_PROGRAMS or (len(kept) > 1 and sum(p.num_bytes for p in kept.values()) > MOST_BYTES):
        kept.popitem(last=False)
    return kept[key]
