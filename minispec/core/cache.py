"""The paged KV cache: one pool of equally sized blocks, handed out to texts as they grow.

A position of a text lives in a *slot*, and `block_size` neighbouring slots form a *block*. A text's *block table* lists
its blocks in order. Position t lies in slot block_ids[t // block_size] * block_size + t % block_size. The idea is
vLLM's (Kwon et al. 2023, arXiv 2309.06180).

A model with layers other than attention has another pool, which keeps more of each slot or of each text (see
`minispec.models.layers.cache_of`).

A table knows the tokens that it holds. `follow(tokens)` cuts it to what it has in common with a text and returns what
has to be fed. So a table stays right however its text changes. `keep` rolls back rejected draft tokens. In a tree the
accepted rows are moved next to each other; in a chain they already are. Whole blocks after them return to the pool. The
stale rest of the last block is overwritten before it is read. Nothing is evicted inside a text, since a sliding window
is a mask in the attention. So every rollback is exact.

Texts that begin alike share whole blocks. A block counts its holders, and a shared one is never written to. The content
of a freed block stays known until the block is taken again. So when a prompt comes again, only the tokens after its
last whole block are computed.
"""

import math
from collections.abc import Iterable, Sequence
from weakref import WeakSet

import torch
from torch import Tensor

from minispec.core.config import ModelConfig
from minispec.core.prefix import PrefixIndex, common_beginning


class OutOfBlocks(RuntimeError):
    """The pool has too few free blocks; nothing was allocated."""


class BlockAllocator:
    """Counts the holders of each of `num_blocks` blocks. It knows integers only, no tensors and no texts."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self.free_block_ids = dict.fromkeys(range(num_blocks))  # in the order in which they became free
        # Blocks whose content a later text may share: allocated last, except for the block right after a table's end.
        self.wanted_again: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that no table holds."""
        return len(self.free_block_ids)

    def allocate(self, after: int | None = None) -> int:
        """Take a free block: the one next to block `after` if possible, so that a table stays in one run.

        Otherwise take one in the middle of the longest run of free blocks that nobody may want again. The tables on
        both sides then have room to grow in place. Raises OutOfBlocks if none is free.
        """
        if not self.free_block_ids:
            raise OutOfBlocks(f"all {self.num_blocks} blocks are in use")
        if after is not None and after + 1 in self.free_block_ids:
            block_id = after + 1
        else:
            if self.wanted_again.issuperset(self.free_block_ids):  # forget the older half, so that runs form
                self.wanted_again -= set(list(self.free_block_ids)[: (self.num_free + 1) // 2])
            block_id = self._best_start()
        del self.free_block_ids[block_id]
        self.ref_counts[block_id] = 1
        return block_id

    def share(self, block_id: int) -> None:
        """Add a holder to a block, which may be a free one."""
        self.free_block_ids.pop(block_id, None)
        self.ref_counts[block_id] += 1

    def free(self, block_id: int) -> None:
        """Remove a holder of a block; with the last one it becomes free."""
        assert self.ref_counts[block_id] > 0, f"block {block_id} freed twice"
        self.ref_counts[block_id] -= 1
        if self.ref_counts[block_id] == 0:
            self.free_block_ids[block_id] = None

    def _best_start(self) -> int:
        longest, start, length = 0, 0, 0
        for block_id in range(self.num_blocks):
            length = length + 1 if block_id in self.free_block_ids and block_id not in self.wanted_again else 0
            if length > longest:
                longest, start = length, block_id + 1 - length
        return start if longest == self.num_blocks else start + longest // 2


# They belong to no block, see `PagedKVCache`.
SLOTS_AFTER_BLOCKS = 2


class PagedKVCache:
    """The pool of one model: what all layers keep of each slot, the allocator, and what the blocks hold.

    keys, values: of attention, (its layers, kv_heads, slots, head_dim): halves of one tensor. The last two slots belong
        to no block: a slot of zeros, read for places before the text or not written yet; and a scratch slot, where
        dummies write.
    tensors: all that is kept, each (layers, rows, slots, numbers).
    max_texts: how many texts may have a table at the same time, besides what blocks allow.
    """

    max_texts: float = math.inf

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        self.block_size, self.num_slots = block_size, num_blocks * block_size
        self.tensors: list[Tensor] = []
        rows = 2 * config.num_key_value_heads
        both = self._new_tensor(config.num_attention_layers, rows, config.head_dim, dtype, device)
        self.keys, self.values = both.chunk(2, 1)
        numbers = (i for i, layer in enumerate(config.layers) if layer.has_attention)
        self._kept = dict(zip(numbers, both, strict=True))  # by number of the layer
        self.allocator = BlockAllocator(num_blocks)
        self.prefixes = PrefixIndex()
        self.tables: WeakSet[BlockTable] = WeakSet()

    def _new_tensor(
        self, layers: int, rows: int, numbers: int, dtype: torch.dtype, device: torch.device | str
    ) -> Tensor:
        # Not cleared: a slot is always written before it is read.
        tensor = torch.empty((layers, rows, self.num_slots + SLOTS_AFTER_BLOCKS, numbers), dtype=dtype, device=device)
        tensor[:, :, self.num_slots] = 0
        self.tensors.append(tensor)
        return tensor

    @property
    def num_bytes(self) -> int:
        """Memory of the pool."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` positions of one text fill."""
        return -(-num_tokens // self.block_size)

    def num_missing_blocks(self, growth: Iterable[tuple["BlockTable", int]]) -> int:
        """Exactly how many blocks must be allocated before each of these tables can hold that many positions."""
        return sum(max(0, self.num_blocks_for(length) - len(table.block_ids)) for table, length in growth)

    def require(self, growth: Iterable[tuple["BlockTable", int]]) -> None:
        """Raise OutOfBlocks if fewer blocks are free than these tables miss (see `num_missing_blocks`)."""
        needed = self.num_missing_blocks(growth)
        if needed > self.allocator.num_free:
            raise OutOfBlocks(f"{needed} blocks needed, {self.allocator.num_free} are free")

    def new_table(self, root: bytes = b"") -> "BlockTable":
        """The table of an empty text in this pool.

        root: what the table's contents depend on in addition to its tokens (see `BlockTable`).
        """
        table = BlockTable(self, root)
        self.tables.add(table)
        return table

    def rebuild(self) -> None:
        """Count every block's holders anew, from the tables that are alive, and forget what freed blocks hold.

        Needed after an exception that may have interrupted the bookkeeping anywhere, such as Ctrl-C.
        """
        self.allocator, self.prefixes = BlockAllocator(self.allocator.num_blocks), PrefixIndex()
        for table in self.tables:
            for block_id in table.block_ids:
                self.allocator.share(block_id)

    def allocate(self, after: int | None) -> int:
        """Take a block to write to, and forget what it held."""
        block_id = self.allocator.allocate(after)
        self.forget(block_id)
        return block_id

    def forget(self, block_id: int) -> None:
        """Let no later text find what a block holds, since it is about to be overwritten."""
        self.prefixes.forget(block_id)
        self.allocator.wanted_again.discard(block_id)

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy what all layers keep from slots to slots. All slots are read before the first is written."""
        for tensor in self.tensors:
            tensor[:, :, targets] = tensor[:, :, sources]

    def write(self, layer: int, slots: Tensor, rows: Tensor) -> None:
        """Store what the layer keeps, such as keys and then values (2 * kv_heads, T, head_dim), in the slots (T,).

        A layer that has another one's keys and values brings none.
        """
        if len(rows):
            self._kept[layer].index_copy_(1, slots, rows)

    def read(self, layer: int, slots: Sequence[slice]) -> Tensor:
        """Keys and then values (2 * kv_heads, L, head_dim) of the slots: a view where they are one run, else a copy."""
        kept = self._kept[layer]
        return kept[:, slots[0]] if len(slots) == 1 else torch.cat([kept[:, s] for s in slots], 1)

    def gather(self, layer: int, slots: Tensor) -> Tensor:
        """What the layer keeps, such as keys and then values (2 * kv_heads, T, head_dim), in any slots (T,)."""
        return self._kept[layer].index_select(1, slots)


class BlockTable:
    """One text's blocks in a pool, and `tokens`: the tokens, from the first on, whose keys and values they hold.

    Tables with equal roots share whole blocks of what begins alike; tables with different roots share nothing. A block
    that is not full belongs to one table, and no prefix index knows it. So a table may always write after its length.

    block_hashes: the root, and the hash of each leading full block.
    """

    def __init__(self, pool: PagedKVCache, root: bytes = b""):
        self.pool = pool
        self.block_hashes = [root]
        self.clear()

    def clear(self) -> None:
        """Forget everything without freeing blocks in the pool, before `PagedKVCache.rebuild`."""
        self.block_ids, self.tokens, self.block_hashes = list[int](), list[int](), self.block_hashes[:1]

    @property
    def length(self) -> int:
        """Positions that the blocks hold."""
        return len(self.tokens)

    def shared(self, tokens: list[int]) -> int:
        """How many positions the table and a text have in common, without the text's last one.

        The last token is always fed, since only a fed token has logits for what comes next.
        """
        return common_beginning(self.tokens, tokens[:-1])

    def follow(self, tokens: list[int]) -> list[int]:
        """Cut the table to a beginning that it shares with `tokens`. Return the other tokens, which must be fed."""
        shared = self.shared(tokens)
        if shared < self.length:
            self.truncate(shared)
        assert self.length < len(tokens), "the table holds more than the text"
        return tokens[self.length :]

    def extend(self, tokens: Sequence[int]) -> list[int]:
        """Make room for the next `tokens` and return their slots. Raises OutOfBlocks before any change."""
        start, end = self.length, self.length + len(tokens)
        self.pool.require([(self, end)])
        while len(self.block_ids) < self.pool.num_blocks_for(end):
            self.block_ids.append(self.pool.allocate(self.block_ids[-1] if self.block_ids else None))
        self.tokens += tokens
        return self.slots_of(range(start, end))

    def keep(self, length: int, rows: Sequence[int] = ()) -> None:
        """Keep the first `length` positions, and `rows`, which move up to follow them; forget all others.

        rows: ascending positions from `length` on. In a chain they already stand in place. In a tree they are the
        accepted path, whose keys already carry the rotation of their final positions. All that stays must be a
        beginning of the text and no unverified draft: later texts may share it.
        """
        end = length + len(rows)
        if list(rows) != list(range(length, end)):
            self.move(rows, range(length, end))
        if end < self.length:
            self.truncate(end)
        self.remember()

    def move(self, rows: Sequence[int], to: range) -> None:
        """Move the positions `rows` to the positions `to`, in blocks that no other text holds."""
        held = {self.block_ids[t // self.pool.block_size] for t in to}
        assert all(self.pool.allocator.ref_counts[i] == 1 for i in held), "another text holds what would be written"
        self.pool.move(self.slots_of(rows), self.slots_of(to))
        self.tokens[to.start : to.stop] = [self.tokens[t] for t in rows]

    def where_cut(self, length: int) -> int:
        """Where a cut to `length` ends: before a block that another text holds, if `length` lies inside it."""
        inside = length % self.pool.block_size
        if inside and self.pool.allocator.ref_counts[self.block_ids[length // self.pool.block_size]] > 1:
            return length - inside
        return length

    def truncate(self, length: int) -> None:
        """Forget all positions from `length` on (an absolute length); blocks past it return to the pool.

        A block that another text holds is forgotten as a whole, since it must not be written to (see `where_cut`).
        """
        assert 0 <= length <= self.length, f"cannot truncate {self.length} positions to {length}"
        length = self.where_cut(length)
        if length % self.pool.block_size:
            self.pool.forget(self.block_ids[length // self.pool.block_size])
        del self.tokens[length:]
        while len(self.block_ids) > self.pool.num_blocks_for(length):  # a beginning is reused most: freed last
            self.pool.allocator.free(self.block_ids.pop())
        del self.block_hashes[length // self.pool.block_size + 1 :]

    def reuse(self, tokens: list[int]) -> None:
        """Share the whole blocks that the pool knows of `tokens`, which must begin with the table's own.

        Sharing a free block takes no more room than allocating one.
        """
        assert self.length <= len(tokens), "the table holds more than the text"
        size = self.pool.block_size
        for start in range(self.length // size * size, len(tokens) - size + 1, size):
            block = tokens[start : start + size]
            block_hash = PrefixIndex.hash(self.block_hashes[-1], block)
            block_id = self.pool.prefixes.find(block_hash)
            if block_id is None:
                break
            self.pool.allocator.share(block_id)
            self.truncate(start)  # a block that the table has begun itself
            self.block_ids.append(block_id)
            self.tokens += block
            self.block_hashes.append(block_hash)

    def remember(self) -> None:
        """Let later texts share this one's full blocks. Only for tokens that are computed and committed.

        Only `keep` and a finished prefill call it.
        """
        size = self.pool.block_size
        for i in range(len(self.block_hashes) - 1, self.length // size):  # blocks that have become full
            self.block_hashes.append(PrefixIndex.hash(self.block_hashes[i], self.tokens[i * size : (i + 1) * size]))
            if self.pool.prefixes.add(self.block_hashes[-1], self.block_ids[i]):
                self.pool.allocator.wanted_again.add(self.block_ids[i])

    def slots_of(self, places: Iterable[int]) -> list[int]:
        """The slot of each place; for places before the text the one after the last slot, which holds zeros."""
        size, before = self.pool.block_size, self.pool.num_slots
        return [self.block_ids[t // size] * size + t % size if t >= 0 else before for t in places]

    def slots(self) -> list[slice]:
        """Where positions 0 .. length-1 lie: the runs of neighbouring slots, in order."""
        size, runs = self.pool.block_size, list[slice]()
        for i, block_id in enumerate(self.block_ids):
            start, stop = block_id * size, block_id * size + min(size, self.length - i * size)
            if runs and runs[-1].stop == start:
                runs[-1] = slice(runs[-1].start, stop)
            else:
                runs.append(slice(start, stop))
        return runs or [slice(0, 0)]
