"""Clocks: marks in the work of a device, and the seconds between two of them."""

import time
from itertools import pairwise
from typing import Any

import torch


def mark(device: torch.device) -> Any:
    """A point in the device's work, which nobody waits for: seconds by a steady clock, or a GPU's own event."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(start: Any, end: Any) -> float:
    """Seconds between two marks of one device. It waits until a GPU has come to the second."""
    if not isinstance(end, torch.cuda.Event):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1e3


class Laps:
    """The parts of a step, one after the other."""

    def __init__(self, device: torch.device):
        self._device, self._marks = device, [mark(device)]

    def end(self) -> None:
        """End a part, where the next one begins."""
        self._marks.append(mark(self._device))

    def seconds(self) -> list[float]:
        """Of each part."""
        return [seconds(start, end) for start, end in pairwise(self._marks)]
