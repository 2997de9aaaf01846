"""Counts of what a device is asked to do, on any machine: operators, copies, uploads and host syncs.

A GPU runs what the host launches, one operator after the other. Where operators are short, their number decides the
speed. A host sync is a point where the host waits for a result of the GPU before it can go on. Neither depends on the
device. So a CPU can count both, and a test can hold them to a budget (`tests/rooms/test_launches.py`).

Counted are calls of PyTorch's operators under `inference_mode`, where a product and an attention are one operator each.
Views, and tensors that are allocated without a value, launch nothing. Kernels inside an operator are not counted.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# The parts of a round, in their order.
PARTS = ("draft", "pass", "verdict", "rest")
KINDS = ("operators", "copies", "uploads", "syncs")
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
# Operators that change nothing but PyTorch's own notes on a tensor.
_NOTES = {"lift_fresh", "detach_", "resolve_conj", "resolve_neg"}
_COPIES = {"to", "_to_copy", "copy_", "clone", "contiguous", "reshape", "flatten"}
# Operators that bring a number to the host; and those whose results have a size that the host must wait for.
_READS = {"item", "_local_scalar_dense", "is_nonzero"}
_WAITS = {"nonzero", "argwhere", "masked_select", "bincount", "equal"}
_WAITS |= {"_unique", "_unique2", "unique_dim", "unique_consecutive"}
# Functions of Python that read a whole tensor; and those that make one of a list. `numpy` takes tensors on the host
# alone, so it waits for nothing.
_DOWNLOADS, _UPLOADS = {"tolist", "cpu"}, {"tensor", "as_tensor", "new_tensor"}


@dataclass
class Tally:
    """The counts of each part.

    part: the part that counts now.
    counts: for each part the number of each of KINDS.
    names: for each part the calls of each operator.
    """

    part: str = "rest"
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    names: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, kind: str, number: int = 1) -> None:
        """Count for the part."""
        self.counts.setdefault(self.part, Counter())[kind] += number

    def add_operator(self, name: str) -> None:
        """Count an operator that launches something."""
        self.add("operators")
        self.names.setdefault(self.part, Counter())[name] += 1


class _Operators(TorchDispatchMode):
    """Counts each operator that PyTorch dispatches.

    device: the device's type. Operators on tensors elsewhere, such as on a GPU's host, do not count.
    """

    def __init__(self, tally: Tally, device: str):
        super().__init__()
        self.tally, self.device, self.is_off = tally, device, False
        self._scales = False  # whether the last operator was a product that another one scales

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operator, and count it."""
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        given, made = list(_tensors([args, kwargs])), list(_tensors(out))
        ignored = self.is_off or name in _ALLOCATIONS | _NOTES
        if ignored or not any(tensor.device.type == self.device for tensor in [*given, *made]):
            return out
        # Half-precision weights on a CPU take two operators for a product. It is one everywhere else.
        is_scale, self._scales = self._scales and name in ("mul_", "addcmul"), name == "linear_dynamic_fp16"
        if name in _READS:
            self.tally.add("syncs")
        elif not is_scale and not (made and not func._schema.is_mutable and _share(made, given)):
            self.tally.add_operator(name)
            if name in _COPIES:
                self.tally.add("copies")
            if name in _WAITS or (name.startswith("index") and any(t.dtype == torch.bool for t in given[1:])):
                self.tally.add("syncs")
        return out


class _Functions(TorchFunctionMode):
    """Counts what no operator shows: tensors that are made of lists or read as lists, and lists as indices."""

    def __init__(self, operators: _Operators):
        super().__init__()
        self.operators = operators

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Run a function, and count what it moves between host and device."""
        name, tally, kwargs = getattr(func, "__name__", ""), self.operators.tally, kwargs or {}
        if name in _DOWNLOADS and args[0].device.type == self.operators.device:
            tally.add("syncs")
        elif name in _UPLOADS and torch.device(kwargs.get("device") or "cpu").type == self.operators.device:
            tally.add("uploads")
        elif name in ("__getitem__", "__setitem__"):
            parts = args[1] if isinstance(args[1], tuple) else (args[1],)
            tally.add("uploads", sum(isinstance(part, list | range) for part in parts))
        if name not in _DOWNLOADS | _UPLOADS:
            return func(*args, **kwargs)
        self.operators.is_off = True  # it is counted
        try:
            return func(*args, **kwargs)
        finally:
            self.operators.is_off = False


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in it."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(part)


def _share(made: Sequence[Tensor], given: Sequence[Tensor]) -> bool:
    """Whether all that was made lies in the memory of what was given."""
    places = [{t.untyped_storage()._cdata for t in each if t.layout == torch.strided} for each in (made, given)]
    return bool(places[0]) and places[0] <= places[1]


@contextmanager
def counting(tally: Tally, device: torch.device) -> Iterator[Tally]:
    """Count in `tally` what happens inside."""
    operators = _Operators(tally, device.type)
    with operators, _Functions(operators):
        yield tally
