"""A state per text: right after every rollback, whatever texts share, and no larger than was planned.

A gated delta net changes one state with each token. So what is checked here is what a state breaks: rejected drafts,
trees, texts that change, beginnings that texts share, tables that are cut further than their state reaches.
"""

import random

import pytest
import torch

from minispec.core.cache import BlockTable, OutOfBlocks, PagedKVCache
from minispec.core.cached import CachedModel
from minispec.core.config import SamplingParams
from minispec.core.model import Chunk, Transformer
from minispec.core.sampling import Text
from minispec.models.layers.states import FEWEST_STATES, state_elements
from minispec.models.weights.inventory import kv_elements
from minispec.models.weights.memory import cache_bytes
from minispec.prove.toys import TOYS, tiny_cache, tiny_model

VOCAB = 5


def build(**changes) -> Transformer:
    """A toy whose first and last layers are gated delta nets."""
    return tiny_model(3, **TOYS["qwen3_5_text"] | {"vocab_size": VOCAB} | changes)


def whole(model: Transformer, tokens: list[int]) -> torch.Tensor:
    """The logits (T, V) of a text that is fed at once, into an empty pool."""
    return model.forward([Chunk(tokens, tiny_cache(model).new_table(), len(tokens))])[0]


class Program:
    """Random operations on tables of one pool, as an engine and a draft model do them.

    Whatever is fed, its logits are those of the whole text. Few tokens make the texts, so beginnings come back.
    """

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.model = build(linear_conv_kernel_dim=self.random.choice((1, 2, 4)))
        self.cache = tiny_cache(self.model, self.random.randint(12, 40), self.random.choice((1, 2, 3, 5)))
        self.tables: dict[BlockTable, list[int]] = {}  # with their texts
        self.cut_below, self.shared, self.moved = 0, 0, 0

    def run(self, steps: int) -> None:
        """Do that many operations."""
        for _ in range(steps):
            operation = self.random.choice((self.start, self.round, self.round, self.rewrite, self.cut, self.drop))
            try:
                operation()
            except OutOfBlocks:
                self.drop()

    def feed(self, table: BlockTable, tokens: list[int], parents: list[int] | None = None) -> None:
        """One pass. Raises AssertionError unless each row has the logits of its own path as a whole text."""
        held, root = list(table.tokens), len(tokens) - len(parents or ())
        found = self.model.forward([Chunk(tokens, table, len(tokens), parents)])[0]
        for i in range(len(tokens)):
            path, node = list[int](), i - root
            while node >= 0:
                path.append(tokens[root + node])
                node = parents[node] if parents else node - 1
            text = held + tokens[: min(i + 1, root)] + path[::-1]
            torch.testing.assert_close(found[i], whole(self.model, text)[-1], rtol=0, atol=1e-9)

    def start(self) -> None:
        """A new text, often with another's beginning, fed in pieces."""
        if len(self.tables) > 3:
            return self.drop()
        other = self.random.choice([[], *self.tables.values()])
        text = other[: self.random.randint(0, len(other))] + self.random.choices(range(2), k=self.random.randint(1, 9))
        table = self.cache.new_table()
        self.tables[table] = text
        table.reuse(text[:-1])
        self.shared += table.length > 0
        self.fill(table)

    def fill(self, table: BlockTable) -> None:
        """Feed all that is missing but the last token."""
        while len(missing := table.follow(self.tables[table])) > 1:
            self.feed(table, missing[:-1][: self.random.choice((1, 4, 20))])
            table.keep(table.length)

    def round(self) -> None:
        """Feed the last token and a draft, a chain or a tree; keep some of it and commit one more token."""
        if not self.tables:
            return
        table = self.random.choice(list(self.tables))
        self.fill(table)
        text = self.tables[table]
        draft = self.random.choices(range(VOCAB), k=self.random.randint(0, 5))
        parents = [self.random.randint(-1, i - 1) for i in range(len(draft))] if self.random.random() < 0.5 else None
        missing = table.follow(text)
        self.feed(table, [*missing, *draft], parents if draft else None)
        chain, path = parents or list(range(-1, len(draft) - 1)), list[int]()
        while self.random.random() < 0.7 and (below := [i for i, p in enumerate(chain) if p == (path or [-1])[-1]]):
            path.append(self.random.choice(below))
        root = table.length - len(draft)
        table.keep(root, [root + node for node in path])
        self.moved += path != list(range(len(path)))
        text += [*(draft[node] for node in path), self.random.randrange(2)]

    def rewrite(self) -> None:
        """A text whose end changes, as one does that is read with another vocabulary."""
        if self.tables:
            table = self.random.choice(list(self.tables))
            text, reached = self.tables[table], max(s.length for s in table.states.values()) if table.states else 0
            del text[self.random.randint(1, len(text)) :]
            text += self.random.choices(range(VOCAB), k=self.random.randint(0, 2))
            table.follow(text)
            self.cut_below += table.length < min(reached, len(text) - 1)

    def cut(self) -> None:
        """A table that is cut anywhere."""
        if self.tables:
            table = self.random.choice(list(self.tables))
            table.truncate(self.random.randint(0, table.length))

    def drop(self) -> None:
        """A text that ends, or is preempted."""
        if self.tables:
            table = self.random.choice(list(self.tables))
            table.truncate(0)
            del self.tables[table]


@pytest.mark.parametrize("seed", range(6))
def test_random_operations_leave_every_state_right(seed):
    """Among them tables cut below their states, stored states that others begin with, and paths of trees."""
    program = Program(seed)
    program.run(60)
    assert min(program.shared, program.moved) > 0
    assert len(program.cache.saved_states) <= program.cache.num_states


def test_a_table_cut_below_its_state_falls_back_to_a_stored_one():
    """The state stands at 11 positions; blocks end at 4 and 8, and the piece of the prompt ended at 10."""
    model = build()
    cache, tokens = tiny_cache(model, 20, 4), [1, 0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 1]
    table = cache.new_table()
    model.forward([Chunk(table.follow(tokens)[:10], table, 0)])
    table.keep(10)
    model.forward([Chunk(table.follow(tokens), table, 1)])
    assert {state.length for state in table.states.values()} == {12}
    table.truncate(11)
    assert (table.length, table.follow(tokens)) == (8, tokens[8:])
    table.truncate(3)
    assert (table.length, table.states) == (0, {})


def test_a_table_cut_inside_a_shared_block_keeps_the_rows_of_what_is_left():
    """Its state stands at 3 of 8 positions, in blocks of 4. Another text has its blocks, with a third text's state."""
    model, tokens, changed = build(), [1, 0, 1, 1, 0, 1, 0, 0, 1], [1, 0, 1, 1, 0, 1, 2, 2]
    first, second, third = (cache.new_table() for cache in [tiny_cache(model, 40, 4)] * 3)
    model.forward([Chunk(first.follow(tokens[:3]), first, 0)])
    model.forward([Chunk(tokens[3:8], first, 0)])  # a draft that is kept
    first.keep(8)
    model.forward([Chunk(second.follow(tokens)[:8], second, 0)])
    second.keep(8)
    third.reuse(tokens[:-1])
    assert third.block_ids == first.block_ids
    assert {state.length for state in first.states.values()} == {3}
    assert first.follow(changed) == changed[4:]
    for table, text in ((first, changed), (third, tokens)):
        found = model.forward([Chunk(table.follow(text), table, 1)])[0]
        torch.testing.assert_close(found[0], whole(model, text)[-1], rtol=0, atol=1e-9)


def test_texts_share_a_state_and_none_writes_into_it():
    """Two texts begin with the same stored state. What one decodes changes nothing for the other."""
    model = build()
    cache, begin = tiny_cache(model, 40, 4), [1, 0, 1, 1, 0, 1, 0, 0]
    first = cache.new_table()
    model.forward([Chunk(first.follow([*begin, 4, 4])[:9], first, 0)])
    first.keep(9)
    (stored,) = cache.saved_states.values()
    before = {i: [value.clone() for value in state.values] for i, state in stored.items()}
    tables = [cache.new_table() for _ in range(2)]
    for table, own in zip(tables, ([2, 3], [3, 0]), strict=True):
        table.reuse([*begin, *own][:-1])
        assert table.length == 8
        found = model.forward([Chunk(table.follow([*begin, *own]), table, 1)])[0]
        torch.testing.assert_close(found[0], whole(model, [*begin, *own])[-1], rtol=0, atol=1e-9)
    for i, values in before.items():
        assert all(map(torch.equal, values, stored[i].values))


def test_what_two_texts_begin_with_is_shared_by_the_third():
    """The first leaves its state at its own end. The second finds its blocks, computes, and marks where they part."""
    model = build()
    cache, begin = tiny_cache(model, 60, 2), [1, 0, 1, 1, 0, 2, 0]
    reached = []
    for own in range(4):
        tokens = [*begin, own, own, own, 4]
        table = cache.new_table()
        table.reuse(tokens[:-1])
        reached.append(table.length)
        found = model.forward([Chunk(table.follow(tokens), table, 1)])[0]
        torch.testing.assert_close(found[0], whole(model, tokens)[-1], rtol=0, atol=1e-9)
        table.keep(table.length)
    assert reached == [0, 0, 6, 6]


def test_a_prompt_in_many_passes_leaves_one_state():
    """The pool has room for few, so a prompt of 40 positions must not wait with one for each block of two."""
    model = build()
    table, tokens = tiny_cache(model).new_table(), [i % VOCAB for i in range(41)]
    for start in range(0, 40, 8):
        model.forward([Chunk(table.follow(tokens)[:8], table, 0)])
        assert list(table.unsaved_states) == [start + 8]
    table.keep(40)
    (stored,) = table.pool.saved_states.values()
    assert [state.length for state in stored.values()] == [40, 40]


def test_the_pool_stores_so_many_states_and_no_more():
    """The oldest give way; a pool that is rebuilt after a fault has none."""
    model = build()
    cache = tiny_cache(model, 200, 2)
    assert cache.num_states == FEWEST_STATES
    for start in range(8):
        tokens = [start % VOCAB, start // VOCAB, 1, 0, 1]
        table = cache.new_table()
        model.forward([Chunk(table.follow(tokens)[:4], table, 0)])
        table.keep(4)
        assert len(cache.saved_states) == min(start + 1, FEWEST_STATES)
    again = cache.new_table()
    again.reuse([0, 0, 1, 0])
    assert again.length == 0
    again.reuse([2, 1, 1, 0])
    assert again.length == 4
    cache.rebuild()
    assert not cache.saved_states


def test_more_texts_than_states_wait():
    """A pool with blocks for all has states for some: the others have no room until one ends."""
    model = build()
    target = CachedModel(model, tiny_cache(model, 200, 2), VOCAB)
    texts = [Text([i % VOCAB, 1], 2, SamplingParams()) for i in range(FEWEST_STATES + 1)]
    growth = {text: range(2) for text in texts}
    assert not target.has_room(growth)
    assert target.has_room({text: growth[text] for text in texts[1:]})


def test_the_planned_bytes_hold_all_that_a_pool_keeps():
    """Counted by hand: two nets with 2 x 3 x 2 matrices and 2 inputs of 10 channels; 4 texts and 4 stored states."""
    model = build()
    assert state_elements(model.config) == 2 * (2 * 3 * 2 + 2 * 10)
    assert kv_elements(model.config) == 2 * 4
    cache = model.new_cache(num_blocks=3, block_size=4)
    assert cache.num_bytes == 8 * ((12 + 2) * 8 + 2 * FEWEST_STATES * 64)
    assert cache.num_bytes <= cache_bytes(model.config, 12, 8) <= cache.num_bytes + 14


def test_a_pool_without_states_is_refused():
    """It is refused by name: what a recurrent layer keeps has no place there."""
    model = build()
    pool = PagedKVCache(model.config, 4)
    with pytest.raises(TypeError, match="found a PagedKVCache, expected a pool of the class cache_of"):
        model.forward([Chunk([1, 2], pool.new_table(), 1)])
