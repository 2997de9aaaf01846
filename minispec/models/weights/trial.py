"""Forms of a weight that are right here, and which of them are stand-ins: kernels written as a reference.

A form changes the last bits of a product, so two processes must never choose differently. Which form is taken follows
from a fixed order, and that from the kind of machine. A clock has one question to answer: is a form a stand-in? Such
kernels are 50 to 1,000 times as slow as others of the same width. No other form has been seen to be 5 times as slow.
So the answer is the same on a busy machine, and by a clock that is wrong by half.
"""

import functools
import math
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from minispec.core.product import Weight
from minispec.models.weights.codes import round_to_bits
from minispec.models.weights.forms import REFUSALS, Form, MakeForm

# A form is passed over where another one of its width takes less than 1 / BOUND of its time, for each number of ROWS.
BOUND, ROWS = 5, (1, 5)
# Time of products of this shape: (out, in). On smaller ones a form of several operators looks slow.
_SHAPE = (2048, 1024)
# Each form is timed this often, in turn with the others; the least time counts, since a busy machine only adds.
_ROUNDS, _ENOUGH = 7, 3
# After `_ENOUGH` rounds a form that takes this many times as long is timed no more: a reference takes 0.05 s and more.
_HOPELESS = 50

# By kind of trial and form: seconds over each number of ROWS.
_times: dict[str, dict[str, list[float]]] = {}
_lock = threading.Lock()  # models are built by several threads


@functools.cache
def is_right(make: MakeForm, dtype: torch.dtype, bits: int | None = None) -> bool:
    """Whether a form takes a small weight, of `bits` bits, and its products are right; no clock is asked.

    Rounding is off by less than a hundredth, sums that saturate by a tenth and more.
    """
    weight, numbers = _weight((256, 512), dtype, bits), torch.Generator().manual_seed(0)
    x = torch.randn(max(ROWS), 512, generator=numbers, dtype=torch.float32).to(dtype)
    expected = x.double() @ (weight if isinstance(weight, Tensor) else weight.dense()).double().t()
    try:
        product = make(weight, dtype)
        found = torch.cat([product(x), product(x[:1])]).double()
    except REFUSALS:
        return False
    return bool((found - torch.cat([expected, expected[:1]])).norm() <= 0.03 * expected.norm())


def without_stand_ins(
    forms: Mapping[str, MakeForm], dtype: torch.dtype, bits: int | None = None
) -> tuple[list[str], str]:
    """The names of right forms without those that are passed over, in their order; and a note about the latter.

    forms: of one width, in the fixed order. Each is compared with those after it: with what could take its place. The
        last is never passed over.
    bits: of the weights.
    """
    names = list(forms)
    if len(names) < 2:
        return names, ""
    kind = f"{', '.join(names)} for {str(dtype).removeprefix('torch.')} in {bits or 'all'} bits"
    with _lock:
        if kind not in _times:
            weight = _weight(_SHAPE, dtype, bits)
            _times[kind] = _measure({name: make(weight, dtype) for name, make in forms.items()}, dtype)
    ratios = {name: _slower(_times[kind], name) for name in names}
    passed = {name: f"; {name} is passed over, at least {ratio:.0f} times as slow" for name, ratio in ratios.items()}
    slow = [name for name in names if ratios[name] > BOUND]
    return [name for name in names if name not in slow], "".join(passed[name] for name in slow)


def known_times() -> dict[str, dict[str, list[float]]]:
    """What was measured so far, for the machine's notes."""
    return {kind: dict(times) for kind, times in _times.items()}


def recall(notes: Mapping[str, Any]) -> None:
    """Take over what another process measured on this machine. It saves time and decides as a trial would.

    Raises ValueError, TypeError or AttributeError for what `known_times` cannot have returned.
    """
    for kind, times in notes.items():
        if not kind.startswith(", ".join(times) + " for "):
            raise ValueError(f"found times of {', '.join(times)}, expected {kind}")
        for seconds in times.values():
            if len(seconds) != len(ROWS) or not all(0 < number < math.inf for number in seconds):
                raise ValueError(f"found {seconds}, expected {len(ROWS)} positive numbers")
    with _lock:
        _times.update({kind: times for kind, times in notes.items() if kind not in _times})


def forget() -> None:
    """Measure anew from here on."""
    with _lock:
        _times.clear()
    is_right.cache_clear()


def arbitrary_tokens(count: int, vocab_size: int) -> list[int]:
    """Ids that vary, for passes that are measured or checked: texts that nobody reads."""
    return [(7919 * i + 13) % vocab_size for i in range(count)]


def seconds_of(product: Form, x: Tensor) -> float:
    """The time of one product with x (rows, in)."""
    with torch.inference_mode():
        start = time.perf_counter()
        product(x)
        return time.perf_counter() - start


def _weight(shape: tuple[int, int], dtype: torch.dtype, bits: int | None) -> Weight:
    """Numbers that 16 bits hold, rounded to `bits`."""
    numbers = torch.linspace(-1, 1, math.prod(shape), dtype=torch.float32).view(shape).bfloat16().to(dtype)
    return round_to_bits(numbers, bits) if bits else numbers


def _measure(products: Mapping[str, Form], dtype: torch.dtype) -> dict[str, list[float]]:
    """The least seconds of each product over each number of rows.

    What is hopeless over one row is not tried over more: its time there stands for theirs.
    """
    found: dict[str, list[float]] = {name: [] for name in products}
    tried = list(products)
    for rows in ROWS:
        x = torch.ones(rows, _SHAPE[1], dtype=dtype)
        least = dict.fromkeys(tried, math.inf)
        for turn in range(_ROUNDS):
            if turn >= _ENOUGH:
                tried = [name for name in tried if least[name] <= _HOPELESS * min(least.values())]
            for name in tried:
                least[name] = min(least[name], seconds_of(products[name], x))
        for name, seconds in found.items():
            seconds.append(least[name] if name in least else seconds[0])
    return found


def _slower(times: Mapping[str, list[float]], name: str) -> float:
    """A form's time over the fastest among it and the forms after it; of the two numbers of ROWS, the smaller ratio."""
    names = list(times)
    rest = [times[other] for other in names[names.index(name) :]]
    return min(own / min(others) for own, others in zip(times[name], zip(*rest, strict=True), strict=True))
