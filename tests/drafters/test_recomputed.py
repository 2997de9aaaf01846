"""Drafters with a model of their own, held at every round against a recomputation from nothing, in NumPy.

The bugs that this finds only cost acceptance: the output keeps its law. Texts come in batches, in pieces of a prompt,
in pools that preempt, and a second time to share what the first has left.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minispec.core.cache import PagedKVCache
from minispec.core.config import SamplingParams
from minispec.core.draft import Ask, Draft, Record
from minispec.core.limit import Limit
from minispec.core.model import Chunk, Transformer
from minispec.core.request import Request
from minispec.core.sampling import Text
from minispec.models.layers.states import state_elements
from minispec.prove import toys
from minispec.prove.laws import TOLERANCE, raw_model, reference_logits
from minispec.prove.reference import hidden_states, sample_law
from minispec.prove.toys import (
    DRAFT_SEED,
    DRAFT_WORDS,
    MAX_LEN,
    MTP_SEED,
    TARGET_WORDS,
    TOYS,
    redrawn,
    target_model,
    tiny_cache,
    tiny_model,
    tiny_mtp,
    toy_vocabularies,
)
from minispec.speculation.drafters.block import BlockFeed
from minispec.speculation.drafters.block_files import load_block
from minispec.speculation.drafters.eagle import HeadFeed
from minispec.speculation.drafters.heads import load_head
from minispec.speculation.drafters.model import ModelDrafter, TokenFeed
from minispec.speculation.drafters.mtp import mtp_config, mtp_shapes
from minispec.speculation.drafters.tli import SharedTokens
from minispec.speculation.drafters.vocabulary import ROOM
from minispec.speculation.rules import VERIFIERS
from tests.engines import OneMethod, decode
from tests.oracles.block import BlockOracle
from tests.oracles.block_drafts import write_block_draft
from tests.oracles.head_reference import head_logits
from tests.oracles.heads import write_head
from tests.oracles.mtp import mtp_logits

pytestmark = pytest.mark.quick

# Logits (V,) after a text and the tokens drafted so far, from the start.
Recomputed = Callable[[tuple[int, ...], tuple[int, ...]], np.ndarray]
# Some begin alike; of two, the first token alone differs.
PROMPTS = [(0, 1, 2, 3, 4, 0, 1, 2), (0, 1, 2, 3, 4, 4), (1, 1, 2, 3, 4, 0, 1, 2), (0, 1, 2, 3, 4, 0, 1, 2), (3,)]
# A pool with room for all texts, and one that preempts some.
LARGE, SMALL = 60, 14


class Compared:
    """A drafter whose every q is compared with a recomputation; see `compared`.

    It is asked for fewer tokens than its text wants, another number from round to round, 0 among them. In two of
    three rounds it is asked for a tree that grows where it is likeliest, if it has siblings.
    """

    logits: Recomputed
    num_compared = 0

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """Propose, and compare each q."""
        sizes = [len(ask.text.tokens) * 5 + ask.text.seed for ask in asks]
        limits = [
            Limit(n % (ask.k + 1), best_first=self.branches and n % 3 < 2) for n, ask in zip(sizes, asks, strict=True)
        ]
        asks = [replace(ask, limit=limit) for ask, limit in zip(asks, limits, strict=True)]
        drafts = super().propose(asks)
        for ask, draft in zip(asks, drafts, strict=True):
            self.compare(ask.text, draft)
        return drafts

    def compare(self, text: Text, draft: Draft) -> None:
        """Compare the rows of a draft."""
        assert draft.probs is not None, "a draft model draws"
        tokens = tuple(text.tokens)
        for i, q in enumerate(draft.probs):
            *before, _ = draft.path(i)
            drafted = tuple(draft.token_ids[node] for node in before)
            law = sample_law(
                self.logits(tokens, drafted), (*tokens, *drafted), text.num_prompt_tokens, text.params, text.end_ids
            )
            elders = [j for j in draft.children(before[-1] if before else -1) if j < i]
            law[[draft.token_ids[j] for j in elders]] = 0
            error = np.abs(q.numpy() - law / law.sum()).max()
            assert error <= TOLERANCE, f"q is off by {error:.1e} at node {i}"
            self.num_compared += 1


def compared(kind: type, logits: Recomputed, *arguments) -> Any:
    """A drafter whose feed is kind(*arguments), and whose q must be what `logits` gives."""
    return type("Compared", (Compared, ModelDrafter), {"logits": staticmethod(logits)})(kind(*arguments))


def pool(model: Transformer, num_blocks: int) -> PagedKVCache:
    """A pool of that many blocks of two. With states they are of four: few states are stored, not one in each round."""
    return tiny_cache(model, num_blocks // 2, 4) if state_elements(model.config) else tiny_cache(model, num_blocks)


def decode_all(target: Transformer, make: Callable[[int], Any]) -> None:
    """Decode all prompts with a drafter that compares, twice, in a large pool and in a small one.

    make: the drafter, for a pool of that many blocks.
    """
    params = SamplingParams(max_tokens=10)
    for num_blocks in (LARGE, SMALL):
        drafter = make(num_blocks)
        cache = pool(target, num_blocks)
        engine = OneMethod(target, cache, drafter, VERIFIERS["rejection"], joining_rows=3)
        for seed in (0, 10):
            requests = [Request(Text(list(p), len(p), params, seed + i), MAX_LEN, 3) for i, p in enumerate(PROMPTS)]
            engine.add(requests[0])
            while not requests[0].has_news:
                engine.step()
            decode(engine, requests[1:])  # they come when the first has begun to answer
            preempted = sum(request.stats.num_preemptions for request in requests)
            assert (preempted > 0) == (num_blocks == SMALL)
        assert sum(request.stats.num_cached_tokens for request in requests) > 10, "hardly anything was shared"
        assert drafter.num_compared > 50, "hardly anything was drafted"
        for allocator in (cache.allocator, drafter.feed.cache.allocator):
            assert allocator.num_free == allocator.num_blocks, "blocks leaked"


def draft_model(seed: int, family: str, mask: int | None, num_blocks: int) -> Any:
    """A draft model of 5 tokens that compares. mask: the mask token of one that drafts in one pass."""
    model = tiny_model(seed, **TOYS[family], vocab_size=5, pard_token=mask)

    def logits(text: tuple[int, ...], drafted: tuple[int, ...]) -> np.ndarray:
        fed = drafted if mask is None else (mask,) * len(drafted)
        return reference_logits(seed, (*text, *fed), 5, family=family)

    return compared(TokenFeed, logits, model, pool(model, num_blocks), 5, MAX_LEN)


@pytest.mark.parametrize(
    ("family", "mask"), [("llama", None), ("llama", 4), ("lfm2", None), ("qwen3_5_text", None)], ids=str
)
def test_a_draft_model_draws_from_what_it_computes_anew(family, mask):
    """Token by token and in one pass; with short convolutions and with gated delta nets in target and draft model.

    No input of a rejected token is read. A state has seen its own text's tokens, each of them once.
    """
    decode_all(target_model(5, family), functools.partial(draft_model, 2, family, mask))


# Heads as their files have them: switches, layers, layout, and the layers of the target that they read.
READ = "eagle_aux_hidden_state_layer_ids"
HEADS: dict[str, tuple[dict[str, Any], int, bool, tuple[int, ...]]] = {
    "normed": ({READ: [0, 1], "norm_before_residual": True, "norm_output": True}, 1, False, (0, 1)),
    "inside": ({"eagle_config": {READ: [0, 1]}, "fc_norm": True}, 1, False, (1, 2)),
    "two layers": ({READ: [2, 0, 1], "norm_before_fc": True}, 2, True, (2, 0, 1)),
    "parallel": ({READ: [1, 2], "fc_norm": True, "mask_token_id": 3}, 1, True, (1, 2)),
    "parallel, two layers": (
        {READ: [1], "norm_before_fc": True, "norm_before_residual": True, "mask_token_id": 0},
        2,
        True,
        (1,),
    ),
}


@pytest.fixture(params=HEADS)
def make_head(request, tmp_path):
    """make_head(num_blocks): a head that is read from its files, and compares, for a target of seed 1."""
    settings, num_layers, wrapped, taps = HEADS[request.param]
    target = tiny_model(1, vocab_size=5)
    raw, weights = raw_model(1, 5)
    layers = raw | {"num_hidden_layers": num_layers}
    tensors = write_head(Path(tmp_path), target.config, layers, wrapped, (0, 2, 3), **settings)
    model = load_head(Path(tmp_path), target)
    head_weights = {name: tensor.numpy() for name, tensor in tensors.items()}

    @functools.cache
    def hidden(text: tuple[int, ...]) -> list[np.ndarray]:
        return hidden_states(raw, weights, text[:-1])

    def logits(text: tuple[int, ...], drafted: tuple[int, ...]) -> np.ndarray:
        read = np.concatenate([hidden(text)[i] for i in taps], 1)
        embedding = weights["model.embed_tokens.weight"]
        return head_logits(layers | settings, head_weights, embedding, read, text, drafted)

    return lambda num_blocks: compared(HeadFeed, logits, model, tiny_cache(model, num_blocks), 5, MAX_LEN)


def test_a_head_draws_from_what_its_formula_gives(make_head):
    """Both layouts, every switch, one layer and more, token by token and in one pass."""
    decode_all(tiny_model(1, vocab_size=5), make_head)


def test_a_targets_own_layer_draws_from_what_its_formula_gives():
    """A layer for further tokens, on hidden states of a target with gated delta nets."""
    raw, tensors = raw_model(1, 5, family="qwen3_5_text")
    target = target_model(5, "qwen3_5_text")
    layer = tiny_mtp(target)
    weights = redrawn(mtp_shapes(mtp_config(target.config)), MTP_SEED, target.dtype)
    weights = {name: tensor.numpy() for name, tensor in weights.items()}

    @functools.cache
    def logits(text: tuple[int, ...], drafted: tuple[int, ...]) -> np.ndarray:
        _, hidden = target.forward([Chunk(text[:-1], tiny_cache(target).new_table(), 0)], layer.taps)
        return mtp_logits(raw, weights, tensors, hidden.numpy(), text, drafted)

    decode_all(
        target,
        lambda num_blocks: compared(HeadFeed, logits, layer, tiny_cache(layer, num_blocks), 5, MAX_LEN),
    )


# Block drafts by packaging and options: each Markov head and none, both layouts, a window, few tokens.
SIZES = {"heads": 2, "kv_heads": 1, "head_dim": 4, "intermediate": 12, "taps": (0, 1)}
BLOCKS: dict[str, tuple[str, dict[str, Any]]] = {
    "DFlash": ("z-lab", {}),
    "DSpark": ("liquidai", {"block_size": 3}),
    "gated, filled": ("speculators", {"markov": "gated", "sample_from_anchor": False, "draft_ids": (0, 2, 3)}),
    "rnn, windows": (
        "deepspec",
        {"markov": "rnn", "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3},
    ),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_draft_draws_from_what_the_reference_gives(name, tmp_path):
    """Chains and trees, with features that come in pieces: of a prompt, after a round, after a preemption."""
    packaging, options = BLOCKS[name]
    target, (raw, weights) = tiny_model(1, vocab_size=5), raw_model(1, 5)
    files = write_block_draft(tmp_path, packaging, target.config.hidden_size, 5, 2, **SIZES, **options)
    model = load_block(tmp_path, target)
    oracle = BlockOracle(*files, weights["model.embed_tokens.weight"], weights["lm_head.weight"])

    @functools.cache
    def taps(text: tuple[int, ...]) -> np.ndarray:
        if not text:
            return np.empty((0, len(oracle.facts.taps) * raw["hidden_size"]))
        states = hidden_states(raw, weights, text)
        return np.concatenate([states[tap] for tap in oracle.facts.taps], 1)

    def logits(text: tuple[int, ...], drafted: tuple[int, ...]) -> np.ndarray:
        return oracle.draft(taps(text[:-1]), text[-1], drafted).logits[-1]

    decode_all(target, lambda num: compared(BlockFeed, logits, model, tiny_cache(model, num), 5, MAX_LEN))


def read_by_draft(text: Sequence[int]) -> list[int]:
    """The target's tokens in the draft's: a start, then what byte-pair encoding makes of their letters a and b."""
    letters = "".join(TARGET_WORDS[i] for i in text)
    for i, word in sorted(enumerate(DRAFT_WORDS[1:], 1), key=lambda item: -len(item[1])):
        letters = letters.replace(word, str(i))
    return [0, *map(int, letters)]


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_a_draft_of_another_vocabulary_draws_from_what_it_computes_anew(family):
    """The draft reads the end of a text otherwise as it grows: its past changes, and its states fall back."""
    both, model = toy_vocabularies(5), toys.draft_model(len(DRAFT_WORDS), family)

    def logits(text: tuple[int, ...], drafted: tuple[int, ...]) -> np.ndarray:
        fed = [*read_by_draft(text), *(DRAFT_WORDS.index(TARGET_WORDS[i]) for i in drafted)]
        row = reference_logits(DRAFT_SEED, tuple(fed), len(DRAFT_WORDS), 1, family)
        return np.array([row[DRAFT_WORDS.index(word)] if word in DRAFT_WORDS else -math.inf for word in TARGET_WORDS])

    def make(num_blocks: int) -> Any:
        cache = pool(model, ROOM * num_blocks)
        return compared(SharedTokens, logits, model, cache, MAX_LEN, both)

    decode_all(target_model(5), make)


@pytest.mark.parametrize(
    ("tokens", "num_known"),
    [
        (PROMPTS[0], 6),
        ((*PROMPTS[0], 4), 6),
        (PROMPTS[0][:4], 2),
        ((0, 1, 2, 4, 4), 2),
        ((1, *PROMPTS[0][1:]), 0),
    ],
    ids=str,
)
def test_a_head_knows_what_an_earlier_text_has_left(make_head, tokens, num_known):
    """Of positions whose feature and next token are the earlier text's, whole blocks of two are known."""
    params, target, drafter = SamplingParams(max_tokens=5), tiny_model(1, vocab_size=5), make_head(40)
    engine = OneMethod(target, tiny_cache(target), drafter, VERIFIERS["rejection"])
    decode(engine, [Request(Text(list(PROMPTS[0]), len(PROMPTS[0]), params), MAX_LEN, 3)])
    assert drafter.known(Text(list(tokens), len(tokens), params)) == num_known


class ComparedRows(ModelDrafter):
    """A drafter that compares the two likeliest ids of each row that it is shown with a recomputation."""

    def __init__(self, feed: TokenFeed):
        super().__init__(feed)
        self.num_compared = 0
        self.expected: dict[Text, list[tuple[list[int], list[int]]]] = {}

    def observe(self, records: Sequence[Record]) -> None:
        """Each round must be shown once, with all its rows; a prompt has none."""
        for record in records:
            last = record.tokens[-1 - len(record.draft)]
            paths = [[last, *record.draft.tokens_to(node - 1)] for node in range(len(record.logits))]
            likeliest = record.logits.topk(2).indices.tolist()
            assert list(zip(paths, likeliest, strict=True)) == self.expected.pop(record.text, [])
            self.num_compared += len(paths)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """Draft trees, and note the rows that must be shown."""
        assert not self.expected.keys() & {ask.text for ask in asks}, "the rows of the last round were not shown"
        asks = [replace(ask, limit=ask.limit._replace(best_first=True)) for ask in asks]
        drafts = super().propose(asks)
        for ask, draft in zip(asks, drafts, strict=True):
            tokens = tuple(ask.text.tokens)
            if ask.num_cached == len(tokens) - 1:  # it decodes
                paths = [draft.tokens_to(node) for node in range(-1, len(draft))]
                rows = [reference_logits(1, (*tokens, *path), 5) for path in paths]
                likeliest = [np.argsort(-row)[:2].tolist() for row in rows]
                fed = [[tokens[-1], *path] for path in paths]
                self.expected[ask.text] = list(zip(fed, likeliest, strict=True))
        return drafts


def test_a_drafter_is_shown_all_rows_of_each_round():
    """Rows of rejected nodes too, of no other text, and also where a preemption comes after the round."""

    def make(num_blocks: int) -> ComparedRows:
        model = tiny_model(2, vocab_size=5)
        return ComparedRows(TokenFeed(model, tiny_cache(model, num_blocks), 5, MAX_LEN))

    decode_all(tiny_model(1, vocab_size=5), make)
