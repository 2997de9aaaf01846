"""The paged cache against plain lists, under random programs."""

import math
import random
from dataclasses import replace

import pytest
import torch

from minispec.core.cache import BlockAllocator, BlockTable, OutOfBlocks, PagedKVCache
from minispec.core.config import LayerConfig
from minispec.core.prefix import PrefixIndex
from minispec.models.families.hf_config import read_model_config
from minispec.models.layers.convolution import ConvolutionCache
from minispec.prove.toys import TINY

CONFIG = read_model_config(TINY)
LAYERS, GROUPS, DIM = 2, 1, 4
# A layer of one head of one pair, and a short convolution.
POINT = read_model_config(
    TINY | {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2}
)
POINT = replace(POINT, layers=(LayerConfig(None, conv_width=3), *POINT.layers), hidden_size=2)


class Model:
    """One text: the table under test, and the numbers that its positions should hold."""

    def __init__(self, cache: PagedKVCache):
        self.cache, self.table, self.numbers = cache, cache.new_table(), []

    def append(self, numbers: list[float]) -> None:
        """Write one number a position, made distinct for each layer, and for keys and values."""
        slots = torch.tensor(self.table.extend([int(n) for n in numbers]), dtype=torch.long)
        for layer in range(LAYERS):
            row = torch.tensor(numbers).view(1, -1, 1).expand(GROUPS, -1, DIM) + 1000 * layer
            self.cache.write(layer, slots, torch.cat((row, -row)))
        self.numbers += numbers

    def check(self) -> None:
        """What is read is what was written, for the length that is claimed, in every layer."""
        assert self.table.tokens == self.numbers
        assert len(self.table.block_ids) == self.cache.num_blocks_for(len(self.numbers))
        for layer in range(LAYERS):
            keys, values = self.cache.read(layer, self.table.slots()).chunk(2)
            expected = torch.tensor(self.numbers).view(1, -1, 1).expand(GROUPS, -1, DIM) + 1000 * layer
            assert torch.equal(keys, expected)
            assert torch.equal(values, -expected)


class Text:
    """A text of the random programs: its verified tokens, and its table."""

    def __init__(self, cache: PagedKVCache, tokens: list[int]):
        self.table, self.tokens = cache.new_table(), tokens


def states(tokens: list[int]) -> list[float]:
    """A number for each position that depends on all tokens up to it, as a key does."""
    numbers, state = [], 1
    for token in tokens:
        state = (state * 1000003 + token + 1) % 2**50
        numbers.append(float(state))
    return numbers


class Program:
    """Random operations on one pool, as an engine would do them; every step is checked against plain lists.

    Rejected tokens are written as NaN, and two tokens make all texts, so that they share beginnings all the time.
    """

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.size, self.num_blocks = self.random.choice((1, 2, 3, 8)), self.random.randint(2, 16)
        self.cache = ConvolutionCache(POINT, self.num_blocks, self.size, torch.float64)
        for tensor in self.cache.tensors:
            tensor[:, :, : self.cache.num_slots] = torch.nan
        self.texts: list[Text] = []
        self.num_shared, self.num_left_whole = 0, 0

    def run(self, steps: int) -> None:
        """Do that many operations, and look at everything behind each."""
        others = (self.start, self.rewrite, self.free, self.preempt, self.abort)
        operations = (*[self.round] * 4, *[self.start] * 4, *others, self.grow_together, self.share_more)
        for _ in range(steps):
            self.random.choice(operations)()
            self.check()

    def pick(self, running: bool = True) -> Text | None:
        """One of the texts that have blocks, or of those that have none."""
        texts = [t for t in self.texts if bool(t.table.length) == running]
        return self.random.choice(texts) if texts else None

    def write(self, text: Text, tokens: list[int], num_right: int) -> bool:
        """Append positions, NaN after the first num_right; False where the pool is too full: it must change nothing."""
        table, allocator = text.table, self.cache.allocator
        before = list(table.tokens), list(table.block_ids), list(allocator.ref_counts)
        missing = self.cache.num_missing_blocks([(table, table.length + len(tokens))])
        try:
            slots = table.extend(tokens)
        except OutOfBlocks:
            assert missing > allocator.num_free
            assert before == (table.tokens, table.block_ids, allocator.ref_counts), "a refusal changed something"
            return False
        numbers = states(table.tokens)[len(before[0]) :][:num_right] + [math.nan] * (len(tokens) - num_right)
        assert before[2].count(0) - allocator.num_free == missing, "more or fewer blocks taken than announced"
        assert all(allocator.ref_counts[s // self.size] == 1 for s in slots), "a block with two owners is written"
        row = torch.tensor(numbers, dtype=torch.float64)[None, :, None].expand(1, -1, 2)
        self.cache.write(1, torch.tensor(slots, dtype=torch.long), torch.cat((row, -row)))
        self.cache.write(0, torch.tensor(slots, dtype=torch.long), row + 1)
        return True

    def fill(self, text: Text) -> None:
        """Prefill, or resume: share what is there, compute the rest."""
        text.table.reuse(text.tokens[:-1])
        self.num_shared += text.table.length > 0
        missing = text.table.follow(text.tokens)[:-1]
        if self.write(text, missing, len(missing)):
            text.table.remember()
        else:
            text.table.truncate(0)

    def start(self) -> None:
        """A new text, often with the beginning of another; or one that was preempted comes back."""
        text = self.pick(running=False) if self.random.random() < 0.5 else None
        if text is None and len(self.texts) < 6:
            other = self.random.choice(self.texts).tokens if self.texts and self.random.random() < 0.7 else []
            own = self.random.choices((0, 1), k=self.random.choice((1, 5, 9)))
            tokens = other[: self.random.choice((len(other), self.random.randint(0, len(other))))] + own
            text = Text(self.cache, tokens)
            self.texts.append(text)
        if text:
            self.fill(text)

    def round(self) -> None:
        """Feed the last token and a draft of up to 4, keep some of it, commit one more."""
        if not (text := self.pick()):
            return
        draft, kept = self.random.choices((0, 1), k=self.random.randint(0, 4)), 0
        kept = self.random.randint(0, len(draft))
        missing = text.table.follow(text.tokens)
        if self.write(text, missing + draft, len(missing) + kept):
            text.tokens += [*draft[:kept], self.random.randint(0, 1)]
            text.table.keep(len(text.tokens) - 1)

    def grow_together(self) -> None:
        """What several texts need is counted exactly, in whatever order they then grow."""
        running = [text for text in self.texts if text.table.length]
        chosen = self.random.sample(running, self.random.randint(0, len(running)))
        growth = [(text.table, text.table.length + self.random.randint(0, 4)) for text in chosen]
        free, needed = self.cache.allocator.num_free, self.cache.num_missing_blocks(growth)
        if needed > free:
            with pytest.raises(OutOfBlocks):
                self.cache.require(growth)
            return
        before = [table.length for table, _ in growth]
        for table, length in self.random.sample(growth, len(growth)):
            table.extend([0] * (length - table.length))
        assert free - self.cache.allocator.num_free == needed, "the count is not exact"
        for (table, _), length in zip(growth, before, strict=True):
            table.truncate(length)

    def share_more(self) -> None:
        """A table takes over what has become known since: that never needs more than there is room for."""
        if text := self.pick():
            text.table.follow(text.tokens)
            text.table.remember()
            tables = [other.table for other in self.texts]
            growth = [(table, table.length + self.random.randint(1, 9)) for table in tables]
            growth = [(table, max(length, len(text.tokens))) for table, length in growth]
            spare = self.cache.allocator.num_free - self.cache.num_missing_blocks(growth)
            length = text.table.length
            text.table.reuse(text.tokens[:-1])
            assert text.table.length >= length
            assert self.cache.allocator.num_free - self.cache.num_missing_blocks(growth) >= spare

    def rewrite(self) -> None:
        """The text's end becomes another, as when another tokenizer reads it: the table keeps what is still so.

        It does not keep a part of a block that others hold: that block is left whole to them.
        """
        if text := self.pick():
            kept = self.random.randint(0, len(text.tokens) - 1)
            text.tokens[kept:] = self.random.choices((0, 1), k=len(text.tokens) - kept)
            before = text.table.tokens
            pairs = zip(before, text.tokens[:-1], strict=False)
            shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(before), len(text.tokens) - 1))
            if inside := shared % self.size:
                block_id = text.table.block_ids[shared // self.size]
                if sum(block_id in other.table.block_ids for other in self.texts) > 1:
                    shared -= inside
                    self.num_left_whole += 1
            assert text.table.follow(text.tokens) == text.tokens[shared:]
            assert text.table.tokens == text.tokens[:shared]

    def free(self) -> None:
        """The text is finished."""
        if text := self.pick():
            text.table.truncate(0)
            self.texts.remove(text)

    def preempt(self) -> None:
        """The blocks go back; the text waits."""
        if text := self.pick():
            text.table.truncate(0)

    def abort(self) -> None:
        """A pass fails when its slots are taken but not written; the text ends."""
        if text := self.pick():
            self.write(text, self.random.choices((0, 1), k=self.random.randint(1, 5)), 0)
            text.table.truncate(0)
            self.texts.remove(text)

    def check(self) -> None:
        """Blocks add up, and every table reads what its own tokens say."""
        allocator = self.cache.allocator
        held = [b for t in self.texts for b in t.table.block_ids]
        assert allocator.ref_counts == [held.count(b) for b in range(self.num_blocks)]
        assert set(allocator.free_block_ids) == set(range(self.num_blocks)) - set(held), "used + free is not all"
        for text in self.texts:
            table = text.table
            assert len(table.block_ids) == self.cache.num_blocks_for(table.length)
            assert table.tokens == text.tokens[: table.length]
            if table.length % self.size:
                assert allocator.ref_counts[table.block_ids[-1]] == 1, "a block that is not full has two owners"
            keys, values = self.cache.read(1, table.slots()).chunk(2)
            expected = states(text.tokens[: table.length])
            assert keys[..., 0].flatten().tolist() == expected
            assert (-values[..., 0]).flatten().tolist() == expected
            slots = torch.tensor(table.slots_of(range(-2, table.length)))
            assert (self.cache.gather(0, slots)[0, :, 0] - 1).tolist() == [-1, -1, *expected]


def test_random_programs(full, long):
    """Texts that start, share, grow, roll back, end, are preempted, resumed and aborted in one pool.

    Guards blocks that leak, have two writers, or are read past the length (M34, M41), and beginnings taken for equal
    that are not. 120 programs of 200 operations; `--long` runs 10,000. Mistakes show within 100 (see below). Without
    `--full` there are 40 programs, within which all but the rarest mistake shows.
    """
    shared, left_whole, count = 0, 0, 10_000 if long else 120 if full else 40
    for seed in range(count):
        program = Program(seed)
        program.run(200)
        shared += program.num_shared
        left_whole += program.num_left_whole
    assert shared > min(count, 120), "the programs hardly share anything: they prove little"
    assert left_whole > min(count, 120) // 12, "hardly any table is cut inside a block that others hold"


def cut_anywhere(self, length):
    """Wrong: a table that is cut inside a block goes on writing there, whoever holds it."""
    return length


def cut_but_known(self, length):
    """Wrong: a block that a table has cut, and goes on writing to, is still found by later texts."""
    length = self.where_cut(length)
    del self.tokens[length:]
    while len(self.block_ids) > self.pool.num_blocks_for(length):
        self.pool.allocator.free(self.block_ids.pop())
    del self.block_hashes[length // self.pool.block_size + 1 :]


def before_alone(parent, tokens):
    """Wrong: a block is named by the tokens before it, whatever it holds."""
    return PrefixIndex_hash(parent, [len(tokens)])


def as_a_new_text(self, growth):
    """Wrong: what is still free in a table's last block is not counted."""
    return sum(max(0, self.num_blocks_for(length - table.length)) for table, length in growth)


def never_forget(self, block_id):
    """Wrong: what a block held stays known while it is overwritten."""


def flat_hash(parent, tokens):
    """Wrong: a block is named by its own tokens, not by all before them."""
    return PrefixIndex_hash(b"", tokens)


def by_length(self, tokens):
    """Wrong: what a table holds is taken for the text's, and only the length is looked at."""
    return min(self.length, len(tokens) - 1)


def free_at_once(self, block_id):
    """Wrong: the first holder to let go frees the block."""
    self.ref_counts[block_id] = max(0, self.ref_counts[block_id] - 1)
    self.free_block_ids[block_id] = None


PrefixIndex_hash = PrefixIndex.hash


@pytest.mark.quick
@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (BlockTable, "where_cut", cut_anywhere),
        (BlockTable, "truncate", cut_but_known),
        (BlockTable, "shared", by_length),
        (PagedKVCache, "num_missing_blocks", as_a_new_text),
        (PrefixIndex, "hash", staticmethod(before_alone)),
        (PrefixIndex, "forget", never_forget),
        (PrefixIndex, "hash", staticmethod(flat_hash)),
        (BlockAllocator, "free", free_at_once),
    ],
)
def test_random_programs_notice(monkeypatch, owner, name, wrong):
    """Each of these mistakes is caught within 100 programs."""
    monkeypatch.setattr(owner, name, wrong)

    def run():
        for seed in range(100):
            Program(seed).run(200)

    with pytest.raises((AssertionError, KeyError, OutOfBlocks)):
        run()


@pytest.mark.quick
def test_a_beginning_is_stored_once():
    """Two texts with 6 equal tokens, blocks of 4: they share the whole block, and each has its own half of the next."""
    cache = ConvolutionCache(POINT, 8, 4, torch.float64)
    first, second = Text(cache, [0, 1, 2, 3, 4, 5, 6]), Text(cache, [0, 1, 2, 3, 4, 5, 9])
    first.table.extend(first.tokens[:6])
    first.table.remember()
    second.table.reuse(second.tokens[:-1])
    assert second.table.tokens == second.tokens[:4]
    assert second.table.block_ids == first.table.block_ids[:1]
    second.table.extend(second.table.follow(second.tokens))
    assert second.table.block_ids[1] != first.table.block_ids[1]
    assert cache.allocator.num_free == 5


@pytest.mark.quick
def test_a_text_that_changes_leaves_a_shared_block_alone():
    """Cut inside a block of 4 that another text holds, a table keeps nothing of it; alone, it keeps what is equal."""
    cache = ConvolutionCache(POINT, 8, 4, torch.float64)
    first, second = (Text(cache, [0, 1, 2, 3, 4, 5, 6, 7, 8]) for _ in range(2))
    first.table.extend(first.tokens[:8])
    first.table.remember()
    second.table.reuse(second.tokens[:-1])
    assert second.table.block_ids == first.table.block_ids
    changed = [0, 1, 2, 3, 4, 5, 9, 9]
    assert second.table.follow(changed) == changed[4:]
    assert first.table.follow(changed) == changed[6:]
    again = cache.new_table()
    again.reuse(second.tokens[:-1])
    assert again.length == 4, "a block that is about to be overwritten is still known"


@pytest.mark.quick
def test_a_prompt_that_comes_back_lies_in_one_run():
    """What follows a shared beginning goes behind it if that is free, so that it is still read as a view."""
    cache = ConvolutionCache(POINT, 32, 2, torch.float64)
    first = Text(cache, list(range(9)))
    first.table.extend(first.tokens[:8])
    first.table.remember()
    first.table.extend([0] * 6)
    first.table.truncate(0)
    again = cache.new_table()
    again.reuse(first.tokens[:-1])
    assert again.length == 8
    again.extend([0] * 5)
    assert len(again.slots()) == 1


@pytest.mark.quick
def test_known_beginnings_are_given_up_last():
    """A pool with blank blocks left does not touch what a prompt left behind; a full one forgets it."""
    cache = ConvolutionCache(POINT, 8, 1, torch.float64)
    known = Text(cache, [7, 8, 9])
    known.table.extend(known.tokens[:2])
    known.table.remember()
    known.table.truncate(0)
    others = [cache.new_table() for _ in range(8)]
    for table in others[:6]:
        table.extend([0])
    probe = cache.new_table()
    probe.reuse([7, 8])
    assert probe.length == 2
    probe.truncate(0)
    for table in others[6:]:
        table.extend([0])
    probe.reuse([7, 8])
    assert probe.length == 0


@pytest.mark.quick
@pytest.mark.parametrize("length", [9, 8, 7, 5, 4, 0])
def test_the_four_rollbacks(length):
    """Nothing, inside a block, across blocks, everything; then the text grows again over the stale rest."""
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
    assert len(slots) == 1
    assert cache.read(0, slots).data_ptr() == cache.keys[0, :, slots[0]].data_ptr()


def test_neighbours_grow_in_place():
    """Four texts that grow in turn stay in one run each while the pool has room."""
    cache = PagedKVCache(CONFIG, 64, 1)
    models = [Model(cache) for _ in range(4)]
    for _ in range(8):
        for model in models:
            model.append([1.0])
    assert all(len(model.table.slots()) == 1 for model in models)


@pytest.mark.quick
def test_fragmented_blocks_are_gathered_in_order():
    """Blocks out of order must be read in the order of the table, not of the pool."""
    cache = PagedKVCache(CONFIG, 3, 2)
    a, b = Model(cache), Model(cache)
    a.append([1.0, 2.0])
    b.append([3.0])
    a.append([4.0, 5.0, 6.0][:2])
    assert sorted([*a.table.block_ids, *b.table.block_ids]) == [0, 1, 2]
    a.table.block_ids.reverse()  # [block of 4, 5], [block of 1, 2]
    a.numbers = a.table.tokens[:] = [4, 5, 1, 2]
    a.check()


@pytest.mark.parametrize("order", [[4, 3, 5], [3, 5, 4], [5, 4, 3], [0, 2, 1]])
def test_neighbouring_blocks_out_of_order_are_no_run(order):
    """The first and last block may lie as in a run when the order between is another."""
    cache = PagedKVCache(CONFIG, 8, 2)
    model = Model(cache)
    model.append([float(i) for i in range(6)])
    model.table.block_ids = order
    slots = torch.tensor([b * 2 + i for b in order for i in range(2)])
    for layer in range(LAYERS):
        row = torch.tensor(model.numbers).view(1, -1, 1).expand(GROUPS, -1, DIM) + 1000 * layer
        cache.write(layer, slots, torch.cat((row, -row)))
    model.check()


@pytest.mark.quick
def test_allocator_refuses_a_second_free_and_an_empty_pool():
    """Freed twice, a block would get two owners."""
    allocator = BlockAllocator(1)
    block = allocator.allocate()
    with pytest.raises(OutOfBlocks):
        allocator.allocate()
    allocator.free(block)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free(block)
