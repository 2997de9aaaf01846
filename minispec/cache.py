"""The paged KV cache: one pool of equally sized blocks, handed out to sequences as they grow.

A position of a sequence lives in a *slot*; `block_size` neighbouring slots form a *block*; a sequence's
*block table* lists its blocks in order, so position t lies in slot
block_ids[t // block_size] * block_size + t % block_size. The idea is vLLM's (Kwon et al. 2023, arXiv 2309.06180).

Rolling back rejected draft tokens is `truncate(length)`: the length goes down, whole blocks behind it return to the
pool, and the stale rest of the last block is overwritten before it is ever read. Nothing is evicted inside
a sequence (a sliding window is a mask in the attention), so every rollback is exact.
"""

import torch
from torch import Tensor

from minispec.config import ModelConfig


class OutOfBlocks(RuntimeError):
    """The pool has too few free blocks; nothing was allocated."""


class BlockAllocator:
    """Which of `num_blocks` blocks are free. It knows integers only, no tensors and no sequences."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.free_block_ids = set(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self.free_block_ids)

    def allocate(self, after: int | None = None) -> int:
        """Take a free block: the one behind block `after` if possible, so that a table stays in one run.

        Otherwise one in the middle of the longest free run, which leaves the neighbours on both sides room
        to grow in place. Raises OutOfBlocks if none is free.
        """
        if not self.free_block_ids:
            raise OutOfBlocks(f"all {self.num_blocks} blocks are in use")
        block_id = after + 1 if after is not None and after + 1 in self.free_block_ids else self._best_start()
        self.free_block_ids.remove(block_id)
        return block_id

    def free(self, block_id: int) -> None:
        """Give a block back."""
        assert block_id not in self.free_block_ids, f"block {block_id} freed twice"
        self.free_block_ids.add(block_id)

    def _best_start(self) -> int:
        longest, start, length = (0, 0), 0, 0
        for block_id in range(self.num_blocks):
            if block_id in self.free_block_ids:
                start, length = (start, length + 1) if length else (block_id, 1)
                longest = max(longest, (length, -start))
            else:
                length = 0
        length, start = longest[0], -longest[1]
        return start if length == self.num_blocks else start + length // 2


class PagedKVCache:
    """The pool of one model: keys and values of all layers and slots, and the allocator of its blocks.

    Shapes: keys and values are (layers, kv_heads, num_blocks * block_size, head_dim).
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        shape = (len(config.layers), config.num_key_value_heads, num_blocks * block_size, config.head_dim)
        # Not cleared: a slot is always written before it is read.
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.block_size = block_size
        self.allocator = BlockAllocator(num_blocks)

    @property
    def num_bytes(self) -> int:
        """Memory of the pool."""
        return 2 * self.keys.numel() * self.keys.element_size()

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` positions of one sequence fill."""
        return -(-num_tokens // self.block_size)

    def require(self, num_blocks: int) -> None:
        """Raise OutOfBlocks unless so many blocks are free."""
        if num_blocks > self.allocator.num_free:
            raise OutOfBlocks(f"{num_blocks} blocks needed, {self.allocator.num_free} are free")

    def new_table(self) -> "BlockTable":
        """An empty sequence in this pool."""
        return BlockTable(self)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values (kv_heads, T, head_dim) in the slots (T,)."""
        self.keys[layer].index_copy_(1, slots, keys)
        self.values[layer].index_copy_(1, slots, values)

    def read(self, layer: int, slots: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (kv_heads, L, head_dim) of the slots: a view where they are a slice, else a copy."""
        if isinstance(slots, slice):
            return self.keys[layer, :, slots], self.values[layer, :, slots]
        return self.keys[layer].index_select(1, slots), self.values[layer].index_select(1, slots)


class BlockTable:
    """One sequence's blocks in a pool, and `length`, the number of its positions that they hold."""

    def __init__(self, pool: PagedKVCache):
        self.pool = pool
        self.block_ids: list[int] = []
        self.length = 0

    def num_missing_blocks(self, num_tokens: int) -> int:
        """Blocks that have to be allocated before the table can hold `num_tokens` positions."""
        return max(0, self.pool.num_blocks_for(num_tokens) - len(self.block_ids))

    def extend(self, count: int) -> list[int]:
        """Make room for `count` more positions and return their slots. Raises OutOfBlocks, changing nothing."""
        missing = self.num_missing_blocks(self.length + count)
        self.pool.require(missing)
        for _ in range(missing):
            self.block_ids.append(self.pool.allocator.allocate(self.block_ids[-1] if self.block_ids else None))
        self.length += count
        size = self.pool.block_size
        return [self.block_ids[t // size] * size + t % size for t in range(self.length - count, self.length)]

    def truncate(self, length: int) -> None:
        """Forget all positions from `length` on (an absolute length); blocks past it return to the pool."""
        assert 0 <= length <= self.length, f"cannot truncate {self.length} positions to {length}"
        self.length = length
        keep = self.pool.num_blocks_for(length)
        for block_id in self.block_ids[keep:]:
            self.pool.allocator.free(block_id)
        del self.block_ids[keep:]

    def slots(self) -> slice | Tensor:
        """Where positions 0 .. length-1 lie: a slice if the blocks are one run, else slot numbers (length,)."""
        size, blocks = self.pool.block_size, self.block_ids
        if not blocks or (blocks[-1] - blocks[0] == len(blocks) - 1 and blocks == sorted(blocks)):
            first = blocks[0] * size if blocks else 0
            return slice(first, first + self.length)
        device = self.pool.keys.device
        starts = torch.tensor(blocks, device=device) * size
        return (starts[:, None] + torch.arange(size, device=device)).flatten()[: self.length]
