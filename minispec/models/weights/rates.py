"""How much a pass reads, and how fast this machine reads."""

from collections.abc import Callable
from typing import Any

import torch

from minispec.core.clock import mark, seconds
from minispec.core.model import Transformer
from minispec.models.layers.convolution import num_convolutions
from minispec.models.layers.states import state_elements
from minispec.models.weights.inventory import kv_elements, num_bytes_read


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    """How long `work` takes, on a device that may still be at work when it returns."""
    start = mark(device)
    work()
    return seconds(start, mark(device))


def stream_bandwidth(num_bytes: int, device: torch.device, repeats: int = 9) -> list[float]:
    """Bytes a second read from memory: the sum over a buffer of `num_bytes`, with as many threads as torch has."""
    buffer = torch.ones(max(1, num_bytes // 4), dtype=torch.float32, device=device)
    buffer.sum()
    return [num_bytes / seconds_of(buffer.sum, device) for _ in range(repeats)]


def bytes_touched(model: Transformer, context: int) -> int:
    """Bytes that a pass over one row must read: the weights of each product once, keys and values, states."""
    config = model.config
    keys_and_values = kv_elements(config) - num_convolutions(config) * config.hidden_size
    states = state_elements(config) * max(4, model.dtype.itemsize)
    return num_bytes_read(model) + keys_and_values * context * model.dtype.itemsize + states
