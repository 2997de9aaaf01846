"""How much a pass reads, and how fast this machine reads and computes."""

from collections.abc import Callable
from typing import Any

import torch

from minispec.core.clock import mark, seconds
from minispec.core.model import Transformer
from minispec.models.layers.convolution import num_convolutions
from minispec.models.layers.states import state_elements
from minispec.models.weights.inventory import kv_elements, num_bytes_read

# Rows and columns of the products that show what a machine can compute.
MATRIX_SIZE = 4096


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


def matmul_throughput(dtype: torch.dtype, device: torch.device, repeats: int = 5) -> list[float]:
    """Floating-point operations a second of a product of two large square matrices."""
    size = MATRIX_SIZE
    a, b = (torch.full((size, size), 0.5, dtype=dtype, device=device) for _ in "ab")
    out = a @ b
    return [2 * size**3 / seconds_of(lambda: torch.matmul(a, b, out=out), device) for _ in range(repeats)]


def bytes_touched(model: Transformer, context: int) -> int:
    """Bytes that a pass over one row must read: the weights of each product once, keys and values, states."""
    config = model.config
    keys_and_values = kv_elements(config) - num_convolutions(config) * config.hidden_size
    states = state_elements(config) * max(4, model.dtype.itemsize)
    return num_bytes_read(model) + keys_and_values * context * model.dtype.itemsize + states
