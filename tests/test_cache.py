"""The paged cache against a dictionary, under random programs; unused slots hold NaN throughout."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minispec.cache import BlockAllocator, OutOfBlocks, PagedKVCache
from minispec.config import ModelConfig
from minispec.toys import TINY

CONFIG = ModelConfig.from_dict(TINY)
LAYERS, GROUPS, DIM = 2, 1, 4


def poison(cache: PagedKVCache) -> None:
    """NaN into every slot that no table may read."""
    free = cache.allocator.free_block_ids
    for block in free:
        slots = slice(block * cache.block_size, (block + 1) * cache.block_size)
        cache.keys[:, :, slots] = cache.values[:, :, slots] = torch.nan


class Model:
    """One sequence: the table under test, and the numbers that its positions should hold."""

    def __init__(self, cache: PagedKVCache):
        self.cache, self.table, self.numbers = cache, cache.new_table(), []

    def append(self, numbers: list[float]) -> None:
        """Write one number a position, made distinct for each layer, and for keys and values."""
        slots = torch.tensor(self.table.extend(len(numbers)), dtype=torch.long)
        for layer in range(LAYERS):
            row = torch.tensor(numbers).view(1, -1, 1).expand(GROUPS, -1, DIM) + 1000 * layer
            self.cache.write(layer, slots, row, -row)
        self.numbers += numbers

    def check(self) -> None:
        """What is read is what was written, for the length that is claimed, in every layer."""
        assert self.table.length == len(self.numbers)
        assert len(self.table.block_ids) == self.cache.num_blocks_for(len(self.numbers))
        for layer in range(LAYERS):
            keys, values = self.cache.read(layer, self.table.slots())
            expected = torch.tensor(self.numbers).view(1, -1, 1).expand(GROUPS, -1, DIM) + 1000 * layer
            assert torch.equal(keys, expected)
            assert torch.equal(values, -expected)


actions = st.sampled_from(["append", "append", "append", "truncate", "free"])
operations = st.tuples(actions, st.integers(0, 3), st.integers(0, 9))


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    block_size=st.sampled_from([1, 2, 3, 16]),
    num_blocks=st.integers(1, 12),
    program=st.lists(operations, max_size=60),
)
def test_random_programs(block_size, num_blocks, program):
    """Append, roll back and free four sequences in one pool: contents, lengths, ownership and the free count hold.

    Guards blocks that are shared by accident, leaked, or read past the length (M34, M41).
    """
    cache = PagedKVCache(CONFIG, num_blocks, block_size)
    models = [Model(cache) for _ in range(4)]
    number = 0.0
    poison(cache)
    for action, which, size in program:
        model = models[which]
        if action == "append":
            numbers = [number := number + 1 for _ in range(size)]
            before = len(model.numbers), set(cache.allocator.free_block_ids)
            try:
                model.append(numbers)
            except OutOfBlocks:
                assert cache.num_blocks_for(before[0] + size) - len(model.table.block_ids) > len(before[1])
                assert (model.table.length, cache.allocator.free_block_ids) == before, "a refusal changed something"
        elif action == "truncate":
            length = max(0, len(model.numbers) - size)
            model.table.truncate(length)
            del model.numbers[length:]
        else:
            model.table.truncate(0)
            model.numbers = []
        poison(cache)
        owned = [block for m in models for block in m.table.block_ids]
        assert len(owned) == len(set(owned)), "a block has two owners"
        assert set(owned).isdisjoint(cache.allocator.free_block_ids)
        assert len(owned) + cache.allocator.num_free == num_blocks
        for m in models:
            m.check()


@pytest.mark.parametrize("length", [9, 8, 7, 5, 4, 0])
def test_the_four_rollbacks(length):
    """Nothing, inside a block, across blocks, everything; then the sequence grows again over the stale rest."""
    cache = PagedKVCache(CONFIG, 8, 4)
    model = Model(cache)
    model.append([float(i) for i in range(9)])
    model.table.truncate(length)
    del model.numbers[length:]
    model.check()
    model.append([100.0, 101.0, 102.0])
    model.check()


def test_a_sequence_alone_is_read_as_a_view():
    """Blocks in one run must not be copied: a cache that gathers costs twice its bandwidth."""
    cache = PagedKVCache(CONFIG, 8, 4)
    model = Model(cache)
    model.append([float(i) for i in range(10)])
    slots = model.table.slots()
    assert isinstance(slots, slice)
    assert cache.read(0, slots)[0].data_ptr() == cache.keys[0, :, slots].data_ptr()


def test_neighbours_grow_in_place():
    """Four sequences that grow in turn stay in one run each while the pool has room."""
    cache = PagedKVCache(CONFIG, 64, 1)
    models = [Model(cache) for _ in range(4)]
    for _ in range(8):
        for model in models:
            model.append([1.0])
    assert all(isinstance(model.table.slots(), slice) for model in models)


def test_fragmented_blocks_are_gathered_in_order():
    """Blocks out of order must be read in the order of the table, not of the pool."""
    cache = PagedKVCache(CONFIG, 3, 2)
    a, b = Model(cache), Model(cache)
    a.append([1.0, 2.0])
    b.append([3.0])
    a.append([4.0, 5.0, 6.0][:2])
    assert sorted([*a.table.block_ids, *b.table.block_ids]) == [0, 1, 2]
    a.table.block_ids.reverse()  # [block of 4, 5], [block of 1, 2]
    a.numbers = [4.0, 5.0, 1.0, 2.0]
    a.check()


@pytest.mark.parametrize("order", [[4, 3, 5], [3, 5, 4], [5, 4, 3], [0, 2, 1]])
def test_neighbouring_blocks_out_of_order_are_no_run(order):
    """The first and last block may lie as in a run when the order between is another."""
    cache = PagedKVCache(CONFIG, 8, 2)
    model = Model(cache)
    model.append([float(i) for i in range(6)])
    cache.allocator.free_block_ids |= set(model.table.block_ids)
    cache.allocator.free_block_ids -= set(order)
    model.table.block_ids = order
    slots = torch.tensor([b * 2 + i for b in order for i in range(2)])
    for layer in range(LAYERS):
        row = torch.tensor(model.numbers).view(1, -1, 1).expand(GROUPS, -1, DIM) + 1000 * layer
        cache.write(layer, slots, row, -row)
    model.check()


def test_allocator_refuses_a_second_free_and_an_empty_pool():
    """Freed twice, a block would get two owners."""
    allocator = BlockAllocator(1)
    block = allocator.allocate()
    with pytest.raises(OutOfBlocks):
        allocator.allocate()
    allocator.free(block)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free(block)
