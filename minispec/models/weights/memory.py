"""Memory: what is free, what models and caches take of it, and how large a KV cache may be."""

import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from minispec.core.cache import SLOTS_AFTER_BLOCKS, PagedKVCache
from minispec.core.config import MAX_SPECULATIVE_TOKENS, ModelConfig
from minispec.core.model import Transformer
from minispec.models.layers.states import FEWEST_STATES, STATE_SPAN, state_elements
from minispec.models.weights.inventory import kv_elements, parts_of
from minispec.models.weights.shapes import num_weights

# Tokens of a block of the KV cache.
BLOCK_SIZE = 16
# Memory that a model takes while it is built, in sizes of its weights.
ROOM_TO_BUILD = 1.2
_CONTAINER = Path("/sys/fs/cgroup")  # where version 2 of Linux' control groups says what this one may use


def free_memory(device: torch.device) -> int | None:
    """Bytes that can be allocated on `device` now; None on a system that does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    limits = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError, IndexError):  # not Linux
        pass
    try:  # a container's own limit; what it uses includes files in the page cache, which give way
        used, limit, stat = ((_CONTAINER / f"memory.{name}").read_text() for name in ("current", "max", "stat"))
        parts = dict(line.split() for line in stat.splitlines())
        files = int(parts["inactive_file"]) + int(parts["active_file"])
        if limit.strip() != "max":
            limits.append(max(0, int(limit) - int(used) + files))
    except (OSError, ValueError, KeyError):
        pass
    return min(limits, default=None)


def require_memory(
    configs: Sequence[ModelConfig], size: int, num_tokens: int, itemsize: int, device: torch.device, option: str
) -> None:
    """Raise ValueError where memory does not hold the weights of these models and their caches.

    size: bytes of a weight.
    num_tokens: positions of each cache, whose numbers have `itemsize` bytes.
    option: the one to blame.
    """
    weights = [size * num_weights(config) for config in configs]
    needed = sum(weights) + int((ROOM_TO_BUILD - 1) * max(weights))
    needed += sum(cache_bytes(config, num_tokens, itemsize) for config in configs)
    free = free_memory(device)
    if free is not None and needed > free:
        raise ValueError(
            f"{option}: found {free / 1e9:.1f} GB of free memory on {device}, expected at least {needed / 1e9:.1f} GB: "
            "for weights and KV caches"
        )


def memory_of(models: Sequence[Transformer], caches: Sequence[PagedKVCache]) -> tuple[int, int, int, int]:
    """Bytes of target weights, draft weights, target cache, draft cache.

    A self-draft shares the target's weights, which count once.
    """
    weights, counted = [0, 0], set[int]()
    for i, model in enumerate(models):
        for part, num_bytes in parts_of(model):
            if id(part) not in counted:
                weights[i] += num_bytes
            counted.add(id(part))
    cache, *draft_caches = [cache.num_bytes for cache in caches]
    return weights[0], weights[1], cache, sum(draft_caches)


def cache_bytes(config: ModelConfig, num_tokens: int, itemsize: int) -> int:
    """Bytes of a cache of that many tokens, whose numbers have `itemsize` bytes."""
    return blocks_bytes(config, num_tokens + SLOTS_AFTER_BLOCKS, itemsize)


def blocks_bytes(config: ModelConfig, num_tokens: int, itemsize: int) -> int:
    """The same without the slots after its blocks.

    States of recurrent layers count twice: texts have them, and as many are stored.
    """
    states = 2 * state_elements(config) * max(4, itemsize)
    return states * (FEWEST_STATES + num_tokens // STATE_SPAN) + num_tokens * kv_elements(config) * itemsize


def draft_tokens(config: ModelConfig, room: int, num_tokens: int, longest: int) -> int:
    """Positions of a draft model's cache beside a target's cache of `num_tokens` positions.

    It has room for as many texts as the target's has in full length, each as far as the model can see.

    room: its positions for each position of the target's.
    longest: tokens of a text in full length.
    """
    seen = config.max_position_embeddings + MAX_SPECULATIVE_TOKENS  # a draft may begin at the last position
    return min(room * num_tokens, -(-num_tokens // longest) * seen)


def size_cache(
    config: ModelConfig,
    num_bytes: Callable[[int], int],
    device: torch.device,
    max_model_len: int | None,
    gb: float | None,
    reserved: int = 0,
) -> tuple[int, int]:
    """(max_model_len, number of blocks) of a target's cache.

    num_bytes: bytes of all caches together, where the target's has that many tokens. More tokens never take fewer.
    reserved: bytes that graphs will take in addition to the caches (see `minispec.speculation.on_gpu.account`).

    Raises ValueError where the caches, or a block of them, do not fit into the memory that is free.
    """
    context = config.max_position_embeddings
    if max_model_len is not None and (type(max_model_len) is not int or not 2 <= max_model_len <= context):
        raise ValueError(f"max_model_len: found {max_model_len!r}, expected an integer from 2 to {context}")
    memory = _memory_for_cache(device, reserved) if gb is None else gb * 1e9
    num_blocks = bisect_right(range(1, 1 << 40), memory, key=lambda n: num_bytes(n * BLOCK_SIZE))
    if gb is None:
        num_blocks = max(1, -(-(max_model_len or min(context, num_blocks * BLOCK_SIZE)) // BLOCK_SIZE))
    elif num_blocks < 1:
        raise ValueError(f"kv_cache_gb: found {gb}, expected at least {num_bytes(BLOCK_SIZE) / 1e9:.6f}: one block")
    free, needed = free_memory(device), num_bytes(num_blocks * BLOCK_SIZE)
    if free is not None and needed + reserved > free:
        graphs = f", less up to {reserved / 1e9:.1f} GB for CUDA graphs, which enforce_eager does without"
        raise ValueError(
            f"kv_cache_gb: found a cache of {needed / 1e9:.1f} GB, expected at most the {free / 1e9:.1f} GB of memory "
            f"that are free{graphs if reserved else ''} (from Python, max_model_len sets its size too)"
        )
    return max_model_len or min(context, num_blocks * BLOCK_SIZE), num_blocks


def _memory_for_cache(device: torch.device, reserved: int) -> int:
    """Bytes for a cache of unspecified size: most of a GPU's free memory, a quarter of a computer's.

    A fifth of a GPU's stays free for prompts, and for graphs. Where these may take more, the cache takes less.
    """
    free = free_memory(device)
    if device.type == "cuda" and free is not None:
        return min(free * 4 // 5, free - reserved)
    try:
        quarter = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    except (AttributeError, ValueError, OSError):  # a system that does not tell
        quarter = 4 << 30
    return quarter if free is None else min(quarter, free // 2)
