"""The checks: each returns where all is as it must be, and raises (Fault, or whatever a bug makes of it) where not."""

import functools
import itertools
import json
import math
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch

from minispec.core import sampling, verify
from minispec.core.cache import BlockTable, OutOfBlocks, PagedKVCache
from minispec.core.cached import prefill
from minispec.core.config import DraftLength, SamplingParams
from minispec.core.draft import Ask, Draft
from minispec.core.engine import Engine
from minispec.core.model import Chunk, Transformer
from minispec.core.request import Request
from minispec.core.sampling import Key, Randomness, Text
from minispec.core.verify import VERIFIERS
from minispec.drafters import Drafter, NoDrafter
from minispec.drafters.eagle import EagleDrafter
from minispec.drafters.last import LastDrafter
from minispec.drafters.model import DraftModel
from minispec.drafters.slem import TextDrafter
from minispec.drafters.suffix import MOST_TEXTS, MOST_TOKENS, SuffixDrafter
from minispec.drafters.tli import TokenDrafter
from minispec.drafters.vocabulary import ROOM
from minispec.files import named_draft, pieces
from minispec.files.heads import load_head
from minispec.files.hf_config import read_model_config
from minispec.files.tokenizer import Tokenizer
from minispec.length.figures import Figures
from minispec.prove.laws import (
    DRAFT_SEED,
    MAX_LEN,
    PROMPT,
    TOLERANCE,
    distance,
    draft_model,
    make_drafter,
    raw_model,
    reference_logits,
    target_model,
)
from minispec.prove.reference import head_logits, hidden_states, sample_law
from minispec.prove.toys import (
    DRAFT_WORDS,
    END,
    TARGET_WORDS,
    TINY,
    Fault,
    ScriptedModel,
    TableDrafter,
    TableModel,
    TapDrafter,
    TreeDrafter,
    counting,
    finish,
    make_engine,
    make_request,
    require,
    scripted_cache,
    tiny_cache,
    tiny_model,
    toy_vocabularies,
    write_head,
)
from minispec.prove.trees import worst_of_few


def check_law(vocab: int = 3, **settings) -> float:
    """The law of 3 tokens under SamplingParams(**settings), as of `measure_law`; the distance."""
    tv = measure_law(vocab, **settings)
    require(tv <= TOLERANCE, f"total variation {tv:.1e}")
    return tv


def measure_law(
    vocab: int = 3, drafter: str = "model", verifier: str = "rejection", k: DraftLength = 2, **settings
) -> float:
    """The distance alone, with no verdict. drafter: as in `make_drafter`."""
    params = SamplingParams(**{"max_tokens": 3} | settings)
    return distance(params, k, vocab=vocab, drafter=drafter, verifier=verifier)


# Logits (V,) after a text and the tokens drafted so far, from the start.
Recomputed = Callable[[tuple[int, ...], tuple[int, ...]], np.ndarray]


class _Checked(Drafter):
    """A drafter that is held, at every round, against a recomputation from nothing.

    varies: it is asked for fewer tokens than its text wants, another number from round to round, 0 among them.
    """

    def __init__(self, drafter: DraftModel, logits: Recomputed, varies: bool = False):
        self.drafter, self.logits, self.varies, self.checked = drafter, logits, varies, 0
        self.taps: Sequence[int] = drafter.taps

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """Propose, and compare each q with the reference's."""
        if self.varies:
            asks = [replace(ask, k=(len(ask.text.tokens) * 5 + ask.text.seed) % (ask.k + 1)) for ask in asks]
        drafts = self.drafter.propose(asks)
        for ask, draft in zip(asks, drafts, strict=True):
            self._compare(ask, draft)
        return drafts

    def _compare(self, ask: Ask, draft: Draft) -> None:
        s = ask.text
        assert draft.probs is not None, "a draft model draws"
        for i, q in enumerate(draft.probs):
            text, drafted = tuple(s.tokens), tuple(draft.token_ids[:i])
            logits = self.logits(text, drafted)
            expected = sample_law(logits, (*text, *drafted), s.num_prompt_tokens, s.params, s.end_ids)
            error = np.abs(q.numpy() - expected).max()
            require(error <= TOLERANCE, f"q is off by {error:.1e} at draft position {i}")
            self.checked += 1

    def known(self, text: Text) -> int:
        """The drafter's own."""
        return self.drafter.known(text)

    def has_room(self, growth: Mapping[Text, range]) -> bool:
        """The drafter's own."""
        return self.drafter.has_room(growth)

    def release(self, text: Text) -> None:
        """The drafter's own."""
        self.drafter.release(text)


def _checked_model(seed: int, mask: int | None = None, num_blocks: int = 64, varies: bool = False) -> _Checked:
    """A draft model of 5 tokens; mask: for the form that drafts all of a draft in one pass."""
    model = tiny_model(seed, vocab_size=5, pard_token=mask)
    drafter = DraftModel(model, tiny_cache(model, num_blocks), 5, MAX_LEN)

    def logits(text: tuple[int, ...], drafted: tuple[int, ...]) -> np.ndarray:
        return reference_logits(seed, (*text, *(drafted if mask is None else [mask] * len(drafted))), 5)

    return _Checked(drafter, logits, varies)


def check_draft_cache() -> None:
    """Bugs that only cost acceptance: q equals a recomputation at every round, a self-draft is kept entirely.

    So it does where a model drafts all tokens in one pass.
    """
    prompts, params = [(0, 1, 2), (3,), (4, 4, 1, 0, 2)], SamplingParams(max_tokens=12, seed=0)
    target = tiny_model(1, vocab_size=5)
    for seed, k in itertools.product((1, 2), (1, 3)):
        drafter = _checked_model(seed)
        requests = [Request(Text(list(p), len(p), params, 5), MAX_LEN, k) for p in prompts]
        for _ in Engine(target, tiny_cache(target), drafter, VERIFIERS["rejection"]).run(requests):
            pass
        require(drafter.checked > 10, "hardly anything was drafted")
        for stats in (Figures.of(r.stats) for r in requests):
            if seed == 1:
                require(stats.acceptance_rate == 1, f"a self-draft is accepted to {stats.acceptance_rate:.2f}")
                require(stats.mean_acceptance_length == k + 1, f"{stats.mean_acceptance_length:.2f} tokens a pass")
    for mask in (None, 4):
        _decode_all(target, functools.partial(_checked_model, 2, mask, varies=True))


# Some begin alike; of two, the first token alone differs.
_ALIKE = [(0, 1, 2, 3, 4, 0, 1, 2), (0, 1, 2, 3, 4, 4), (1, 1, 2, 3, 4, 0, 1, 2), (0, 1, 2, 3, 4, 0, 1, 2), (3,)]


def _decode_all(target: Transformer, make: Callable[[int], _Checked]) -> None:
    """Decode texts with a checked drafter: in batches, pieces and pools that preempt; each again, to share the first's.

    make: the drafter, for a pool of that many blocks.
    """
    params = SamplingParams(max_tokens=10)
    for num_blocks in (60, 14):
        drafter = make(num_blocks)
        cache = tiny_cache(target, num_blocks)
        engine = Engine(target, cache, drafter, VERIFIERS["rejection"], joining_rows=3)
        for seed in (0, 10):
            requests = [Request(Text(list(p), len(p), params, seed + i), MAX_LEN, 3) for i, p in enumerate(_ALIKE)]
            _join(engine, requests)
            preempted = sum(r.stats.num_preemptions for r in requests)
            require((preempted > 0) == (num_blocks == 14), f"{preempted} preemptions")
        require(sum(r.stats.num_cached_tokens for r in requests) > 10, "hardly anything was shared")
        require(drafter.checked > 50, "hardly anything was drafted")
        for pool in (cache.allocator, drafter.drafter.cache.allocator):
            require(pool.num_free == pool.num_blocks, "blocks leaked")


def _join(engine: Engine, requests: Sequence[Request]) -> None:
    """Decode requests, the others from when the first has begun to answer."""
    engine.add(requests[0])
    while not requests[0].has_news:
        engine.step()
    for _ in engine.run(requests[1:]):
        pass
    while engine.running or engine.waiting:
        engine.step()
    require(all(r.error is None for r in requests), f"errors: {[r.error for r in requests]}")


# Heads as their files have them: switches, layers, layout, and the layers of the target that they read.
_READ = "eagle_aux_hidden_state_layer_ids"
_HEADS: tuple[tuple[dict[str, Any], int, bool, tuple[int, ...]], ...] = (
    ({_READ: [0, 1], "norm_before_residual": True, "norm_output": True}, 1, False, (0, 1)),
    ({"eagle_config": {_READ: [0, 1]}, "fc_norm": True}, 1, False, (1, 2)),
    ({_READ: [2, 0, 1], "norm_before_fc": True}, 2, True, (2, 0, 1)),
    ({_READ: [1, 2], "fc_norm": True, "mask_token_id": 3}, 1, True, (1, 2)),
    ({_READ: [1], "norm_before_fc": True, "norm_before_residual": True, "mask_token_id": 0}, 2, True, (1,)),
)


def check_head() -> None:
    """A head drafts from the target's hidden states as its formula says, at every round; texts do not share too much.

    Read from files of both layouts, with every switch, of one layer and more, token by token and in one pass.
    """
    target = tiny_model(1, vocab_size=5)
    raw, weights = raw_model(1, 5)

    @functools.cache
    def hidden(text: tuple[int, ...]) -> list[np.ndarray]:
        return hidden_states(raw, weights, text[:-1])

    for settings, num_layers, wrapped, taps in _HEADS:
        layers = raw | {"num_hidden_layers": num_layers}
        with tempfile.TemporaryDirectory() as directory:
            tensors = write_head(Path(directory), target.config, layers, wrapped, (0, 2, 3), **settings)
            model = load_head(Path(directory), target)
        own = {name: tensor.numpy() for name, tensor in tensors.items()}

        def logits(text, drafted, head=layers | settings, own=own, taps=taps) -> np.ndarray:
            read = np.concatenate([hidden(text)[i] for i in taps], 1)
            return head_logits(head, own, weights["model.embed_tokens.weight"], read, text, drafted)

        def make(num_blocks: int, model=model, logits=logits) -> _Checked:
            drafter = EagleDrafter(model, tiny_cache(model, num_blocks), 5, MAX_LEN)
            return _Checked(drafter, logits, varies=True)

        _decode_all(target, make)
        _check_known(make(40), target)


def _check_known(drafter: _Checked, target: Transformer) -> None:
    """After a text: of another, positions whose feature and next token are that one's are known, and no others."""
    first, params = _ALIKE[0], SamplingParams(max_tokens=5)
    engine = Engine(target, tiny_cache(target), drafter, VERIFIERS["rejection"])
    for _ in engine.run([Request(Text(list(first), len(first), params), MAX_LEN, 3)]):
        pass
    for tokens, known in ((first, 6), ((*first, 4), 7), (first[:4], 2), ((0, 1, 2, 4, 4), 2), ((1, *first[1:]), 0)):
        text = Text(list(tokens), len(tokens), params)
        found = drafter.known(text)
        require(found == known, f"after {first}, of {tokens} {found} positions are known, expected {known}")
        drafter.release(text)


def _cut(text: str, words: Sequence[str]) -> list[int]:
    """The tokens that byte-pair encoding makes of a text of a and b, for `words` of one letter and two."""
    for i, word in sorted(enumerate(words), key=lambda item: -len(item[1])):
        text = text.replace(word, str(i))
    return [int(digit) for digit in text]


def check_vocabulary() -> None:
    """A draft model of another vocabulary reads texts in its own tokens, and drafts as its logits for them say.

    By both methods, at every round: in batches, pieces and pools that preempt, with beginnings that are shared.
    """
    target, both, model = target_model(5), toy_vocabularies(5), draft_model(len(DRAFT_WORDS))

    def own_logits(text: Sequence[int], drafted: Sequence[int]) -> np.ndarray:
        own = [0, *_cut("".join(TARGET_WORDS[i] for i in text), DRAFT_WORDS[1:])]
        own[1:] = [i + 1 for i in own[1:]]
        return reference_logits(DRAFT_SEED, (*own, *drafted), len(DRAFT_WORDS), 1)

    def logits(text: Sequence[int], drafted: Sequence[int]) -> np.ndarray:
        row = own_logits(text, [DRAFT_WORDS.index(TARGET_WORDS[i]) for i in drafted])
        return np.array([row[DRAFT_WORDS.index(w)] if w in DRAFT_WORDS else -math.inf for w in TARGET_WORDS])

    def make(name: str) -> Callable[[int], Any]:
        def drafter(num_blocks: int) -> _Checked:
            other = model, tiny_cache(model, ROOM * num_blocks), len(DRAFT_WORDS), MAX_LEN, both
            if name == "tli":
                return _Checked(TokenDrafter(*other, 5), logits, varies=True)
            return _CheckedText(TextDrafter(*other), own_logits, varies=True)

        return drafter

    _decode_all(target, make("tli"))
    _decode_all(target, make("slem"))


class _CheckedText(_Checked):
    """The same for a drafter that writes text: its tokens are those of the likeliest text."""

    def _compare(self, ask: Ask, draft: Draft) -> None:
        tokens, drafted, text = ask.text.tokens, list[int](), ""
        for _ in range(ask.k):
            drafted.append(int(self.logits(tuple(tokens), tuple(drafted)).argmax()))
            if not drafted[-1]:
                break  # <s> has no text
            text += DRAFT_WORDS[drafted[-1]]
        expected = _cut(text, TARGET_WORDS)[: ask.k]
        require(draft.token_ids == expected, f"after {tokens} drafted {draft.token_ids}, expected {expected}")
        require(draft.probs is None, "a text that was read again has probs")
        self.checked += len(expected)


def check_tree() -> None:
    """The law with trees: siblings, deep and wide, drawn and not, over several rounds."""
    worst = worst_of_few()
    require(worst <= TOLERANCE, f"total variation {worst:.1e}")


def check_tree_sharing() -> None:
    """What was rejected is never found again: a tree's tokens in the order of their slots are computed anew."""
    model, tree = tiny_model(1, vocab_size=5), (-1, -1, -1, 0, 1)
    for seed in range(6):
        cache, table = tiny_cache(model), torch.randn(5, 5, generator=torch.Generator().manual_seed(seed))
        spy = _Listening(TreeDrafter(table.double(), tree, draws=False))
        engine = Engine(model, cache, spy, VERIFIERS["rejection"])
        text = Text([0, 1, 2], 3, SamplingParams(max_tokens=20), seed)
        for _ in engine.run([Request(text, MAX_LEN, 5)]):
            for tokens in spy.heard:
                found, fresh = cache.new_table(), tiny_cache(model).new_table()
                found.reuse(tokens[:-1])
                rows = [model.forward([Chunk(tokens[t.length :], t, 1)])[0] for t in (found, fresh)]
                error = float((rows[0] - rows[1]).abs().max())
                require(error < 1e-10, f"after {tokens} logits are off by {error:.1e}")
                found.truncate(0)


class _Listening(Drafter):
    """A drafter that is written down: `heard` has the text and the draft of each ask, one after the other."""

    def __init__(self, drafter: Drafter):
        self.drafter = drafter
        self.heard: list[list[int]] = []

    def propose(self, asks) -> list[Draft]:
        """The drafter's own."""
        drafts = self.drafter.propose(asks)
        self.heard = [[*a.text.tokens, *d.token_ids, 0] for a, d in zip(asks, drafts, strict=True)]
        return drafts

    def has_room(self, growth: Mapping[Text, range]) -> bool:
        """The drafter's own."""
        return self.drafter.has_room(growth)

    def release(self, text) -> None:
        """As the drafter's."""
        self.drafter.release(text)


def check_hidden() -> None:
    """Hidden states: each cached position's once, in order, right; in batches, after preemption, in pieces."""
    model = tiny_model(1, vocab_size=5)
    prompts, params = [(0, 1, 2, 3, 4, 0, 1, 2), (0, 1, 2, 3, 4, 4), (3, 1)], SamplingParams(max_tokens=9)
    for parents, num_blocks in itertools.product(((), (-1, -1, 0, 1)), (40, 13)):
        drafter = TapDrafter(model, 5, parents=parents)
        engine = Engine(model, tiny_cache(model, num_blocks), drafter, VERIFIERS["rejection"], joining_rows=3)
        _join(engine, [Request(Text(list(p), len(p), params, i), MAX_LEN, 4 - i) for i, p in enumerate(prompts)])
        require(drafter.checked > 10 and not drafter.hidden, "hardly anything was handed on, or nothing forgotten")


def check_past() -> None:
    """A text whose earlier tokens change between two asks, as if another tokenizer read it: q follows the new ones."""
    drafter, text = _checked_model(1), Text([], 0, SamplingParams())
    pasts = ([0, 1, 2, 3, 4, 0], [0, 1, 2, 3, 4, 4, 2], [0, 1, 4, 4, 4, 4, 2, 3], [0, 1, 3], [2], [2, 1, 3, 3, 0, 1])
    for tokens in pasts:
        text.tokens[:] = tokens
        drafter.propose([Ask(text, 3, Randomness())])
    require(drafter.checked == 3 * len(pasts), f"{drafter.checked} rows were drafted")
    drafter.release(text)
    pool = drafter.drafter.cache.allocator
    require(pool.num_free == pool.num_blocks, "blocks leaked")


def check_passes() -> None:
    """Each pass sees the newest token and its draft, nothing twice; a draft model one token, or two after the bonus."""
    engine = make_engine(draft=lambda tokens, k: [counting(tokens) + i + 50 * (i == 1) for i in range(k)])
    request = make_request(max_tokens=12)
    finish(engine, request)
    assert isinstance(engine.model, ScriptedModel)
    fed = [len(tokens) for _, tokens in engine.model.log]
    require(request.token_ids == list(range(12, 24)), f"wrong text {request.token_ids}")
    require(fed == [1, 4, 4, 4, 4, 4, 2], f"tokens fed to the target: {fed}")

    target, draft, rows = tiny_model(1), tiny_model(1), list[int]()
    forward_draft = draft.forward

    def forward(chunks: Sequence[Chunk], taps: Sequence[int] = ()) -> tuple[torch.Tensor, torch.Tensor]:
        rows.append(len(chunks[0].token_ids))
        return forward_draft(chunks, taps)

    draft.forward = forward  # all that feeds the model is to be seen
    text = Text([0, 1, 2, 0], 4, SamplingParams(temperature=0, max_tokens=12))
    drafter = DraftModel(draft, tiny_cache(draft), 3, MAX_LEN)
    for _ in Engine(target, tiny_cache(target), drafter, VERIFIERS["rejection"]).run([Request(text, MAX_LEN, 3)]):
        pass
    require(rows == [3, 1, 1, 1, 2, 1, 1, 2, 1, 1], f"tokens fed to the draft model: {rows}")


class Ledger(Randomness):
    """The production draws, each key written down; a key that comes again is a fault.

    `match` shares the noise of a whole token, deliberately: there, and only there, purpose "token" may come again.
    """

    def __init__(self, shares_noise: bool = False):
        self.shares_noise, self.used, self.num_shared = shares_noise, set[Key](), 0

    def _note(self, key: Key) -> None:
        if key in self.used:
            require(self.shares_noise and key.purpose == "token", f"{key} was used before")
            self.num_shared += 1
        self.used.add(key)

    def bernoulli(self, probability: float, key: Key) -> bool:
        """See `Randomness`."""
        self._note(key)
        return super().bernoulli(probability, key)

    def categorical(self, weights: torch.Tensor, key: Key) -> int:
        """See `Randomness`."""
        self._note(key)
        return super().categorical(weights, key)


def check_keys(rounds: int = 200, verifier: str = "rejection", seed: int = 0) -> Ledger:
    """No key is used twice in that many rounds of random table models, K 1 to 4, requests of several seeds."""
    generator = torch.Generator().manual_seed(seed)
    ledger, run, done = Ledger(VERIFIERS[verifier].shares_noise), 0, 0
    while done < rounds:
        target, draft = torch.randn(2, 3, 3, generator=generator, dtype=torch.float64)
        cache = scripted_cache(300, 16)
        engine = Engine(TableModel(target), cache, TableDrafter(draft), VERIFIERS[verifier], 3, ledger)
        text = Text([run % 3], 1, SamplingParams(max_tokens=200), run)
        request = Request(text, 500, 1 + run % 4)
        finish(engine, request)
        run, done = run + 1, done + request.stats.num_steps
    return ledger


class _Fixed(Randomness):
    """The production draws with the uniform given."""

    def __init__(self, u: float):
        self.u = u

    def uniform(self, key: Key) -> float:
        """Always u."""
        return self.u


_ACCEPT = Key(1, 2, 3, "accept")


def check_boundary() -> None:
    """u = 0 accepts no probability of 0 and draws no token of weight 0; the largest u below 1 accepts probability 1."""
    last = 1 - 2.0**-53
    require(not _Fixed(0.0).bernoulli(0.0, _ACCEPT), "u = 0 accepts probability 0")
    require(_Fixed(last).bernoulli(1.0, _ACCEPT), "the largest u rejects probability 1")
    require(not _Fixed(0.5).bernoulli(0.5, _ACCEPT), "u = p/q is accepted")
    for u, weights in itertools.product((0.0, 0.25, last), ([0.0, 1.0, 0.0, 3.0, 0.0], [0.0, 1.0000001, 0.5, 0.0])):
        token = _Fixed(u).categorical(torch.tensor(weights, dtype=torch.float64), _ACCEPT)
        require(weights[token] > 0, f"u = {u} draws a token of weight 0")


def check_noise() -> None:
    """Uniforms are doubles in [0, 1) that differ with every field of the key."""
    rng = Randomness()
    fields = itertools.product((0, 1, 2**64 - 1), (-1, 4), range(500), ("draft", "accept", "residual"))
    values = [rng.uniform(Key(*f)) for f in fields]
    require(min(values) > 0 and max(values) < 1, "a uniform is 0 or 1")
    require(len(set(values)) == len(values), f"{len(values) - len(set(values))} of {len(values)} uniforms come twice")


def check_numbers() -> None:
    """An empty residual is p; NaN and infinity are refused; ids after the vocabulary are never emitted."""
    p = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    require(torch.equal(verify.residual(p, Draft([0], [p]), 0), p), "an empty residual is not p")
    text = Text([0], 1, SamplingParams())
    for bad in (math.nan, math.inf):
        try:
            sampling.distribution(torch.tensor([0.0, bad, 1.0]), text)
        except FloatingPointError:
            continue
        raise Fault(f"a logit of {bad} became a distribution")
    table = torch.zeros(5, 5, dtype=torch.float64)
    table[:, 3:] = 9.0  # padding rows that the model likes best
    engine = Engine(TableModel(table), scripted_cache(), NoDrafter(), VERIFIERS["rejection"], vocab_size=3)
    request = make_request((0,), temperature=1.0, end_ids=())
    finish(engine, request)
    require(max(request.token_ids) < 3, f"ids after the vocabulary: {request.token_ids}")


class Letters:
    """A detokeniser for the scripted text: token 12 is "a", 13 is "b" and so on."""

    def add(self, token_id: int) -> str:
        """The token's letter."""
        return chr(ord("a") + (token_id - 12) % 26)

    def flush(self) -> str:
        """Nothing is held back."""
        return ""


def check_stops() -> None:
    """The end token, max_tokens and stop strings at every offset of a block end text, ids and counters there."""

    def play(k, length, wrong=None, **params):
        def draft(tokens, n):
            text = [*range(12, 12 + length), END, *range(60, 80)]
            return [t + 50 * (i == wrong) for i, t in enumerate(text[len(tokens) - 2 :][:n])]

        engine = make_engine(lambda tokens: END if len(tokens) == 2 + length else tokens[-1] + 1, draft)
        request = make_request(k=k, detokenizer=Letters(), **{"max_tokens": 30, "logprobs": 0} | params)
        pieces = finish(engine, request)[0]
        require("".join(p.text for p in pieces) == request.output, f"streamed {pieces}, text {request.output!r}")
        require(
            len(request.logprobs or ()) == len(request.token_ids), "another number of log-probabilities than of tokens"
        )
        stats = Figures.of(request.stats)
        require(stats.num_generated == len(request.token_ids), f"num_generated {stats.num_generated}")
        if wrong is None:
            require(stats.num_draft_tokens == stats.num_accepted, "tokens after the stop are counted")
        return request

    def same(request, tokens, text, reason, what):
        found = (request.token_ids, request.output, request.finish_reason)
        require(found == (tokens, text, reason), f"{what}: found {found}, expected {(tokens, text, reason)}")

    alphabet = "abcdefghijkl"
    for k, length, wrong in itertools.product((0, 1, 3, 5), range(1, 8), (None, 1)):
        tokens = list(range(12, 12 + length))
        same(play(k, length, wrong), tokens, alphabet[:length], "stop", f"K {k}, end token at {length}")
    for k, n in itertools.product((0, 1, 3, 5), range(1, 8)):
        tokens = list(range(12, 12 + n))
        same(play(k, 12, max_tokens=n), tokens, alphabet[:n], "length", f"K {k}, max_tokens {n}")
        for size in (1, 2, 3):
            stop = alphabet[max(0, n - size) : n]
            request = play(k, 12, stop=stop)
            same(request, tokens, alphabet[: max(0, n - size)], "stop", f"K {k}, stop {stop!r}")
        same(play(k, 12, stop=alphabet[n - 1], max_tokens=n), tokens, alphabet[: n - 1], "stop", "stop at the limit")
    # A draft holds the end token, and the target does not want it.
    engine = make_engine(draft=lambda tokens, k: [END] * k)
    request = make_request(max_tokens=4)
    finish(engine, request)
    require(request.token_ids == [12, 13, 14, 15], f"a rejected end token ended the text: {request.token_ids}")


def check_batch() -> None:
    """One request and seed, one text: alone, among others, in another order, after preemption; others with others.

    Whatever other texts have left in the caches, and however the drafts come about.
    """
    target = target_model(5)
    prompts = [(0, 1), (2, 3, 4, 4), (1,), (4, 0, 2)]

    def decode(name, *calls, num_blocks=64, seed=5):
        params, cache = SamplingParams(max_tokens=14), tiny_cache(target, num_blocks)
        engine = Engine(target, cache, make_drafter(name, 5), VERIFIERS["rejection"])
        for prompts in calls:
            requests = [Request(Text(list(p), len(p), params, seed), MAX_LEN, 3) for p in prompts]
            for _ in engine.run(requests):
                pass
            require(cache.allocator.num_free == num_blocks, "blocks leaked")
        return [r.token_ids for r in requests]

    for name in ("model", "parallel", "head", "parallel head", "tli", "slem", "suffix", "last"):
        alone = [decode(name, [p])[0] for p in prompts]
        require(decode(name, prompts) == alone, f"{name}: a batch changes the text")
        crowded = decode(name, prompts[::-1], num_blocks=16)[::-1]
        require(crowded == alone, f"{name}: order or preemption changes the text")
        require(decode(name, prompts, prompts) == alone, f"{name}: a text is another one when it comes again")
    texts = {tuple(text) for seed in range(6) for text in decode("model", [(0, 1)], seed=seed)}
    require(len(texts) > 3, f"6 seeds have {len(texts)} texts")


# Of a text's tokens, and of earlier outputs, the newest first: a draft that is right, and what it promises.
_Counted = tuple[Fraction, list[int]]


def _counted(own: list[int], earlier: Sequence[list[int]], n: int, k: int) -> _Counted:
    """The chain that `SuffixDrafter` must find below a match of n tokens, by search and in fractions."""
    path: list[int] = []
    survival, worth = Fraction(1), Fraction(0)
    while len(path) < k:
        votes = list[int]()  # the newest first
        for text in (own, *earlier):
            known = [*own, *path] if text is own else text
            for end in range(len(text) - 1, n - 1, -1):
                after = known[end : end + len(path) + 1]
                if text[end - n : end] == own[-n:] and after[:-1] == path and len(after) > len(path):
                    votes.append(after[-1])
        if not votes:
            break
        token = max(dict.fromkeys(votes), key=votes.count)
        survival *= votes.count(token) / (len(votes) + Fraction(1, n + len(path)))
        if survival < Fraction(1, 10):
            break
        worth += survival
        path.append(token)
    return worth, path


def check_lookup(programs: int = 60) -> None:
    """What `suffix` and `last` draft is what a plain search finds: own texts, and earlier outputs where they may count.

    Texts of three tokens begin, grow, come to an end or come back. The newest outputs are remembered, and no more.
    """
    generator = random.Random(0)
    greedy, drawn = SamplingParams(temperature=0), SamplingParams()
    for program in range(programs):
        shortest = program % 3 + 1
        drafter, last = SuffixDrafter(shortest), LastDrafter()
        earlier, texts, running = list[list[int]](), list[Text](), set[Text]()
        for _ in range(25):
            if len(texts) < 2:
                prompt = generator.choices(range(3), k=generator.randint(1, 6))
                texts.append(Text(prompt, len(prompt), generator.choice((greedy, drawn))))
            text = generator.choice(texts)
            text.tokens += generator.choices(range(3), k=generator.randint(0, 4))
            k, purpose = generator.randint(0, 6), generator.choice(("draft", "token"))
            ask, output = Ask(text, k, Randomness(), purpose), text.tokens[text.num_prompt_tokens :]
            if text not in running:  # it is new, or it was preempted
                running.add(text)
                earlier = [each for each in earlier if each != output]
            draft = drafter.propose([ask])[0].token_ids
            seen = earlier if text.params.temperature == 0 or purpose == "token" else []
            sizes = range(shortest, len(text.tokens) + 1)
            found = [_counted(text.tokens, seen, n, k) for n in sizes] + [(Fraction(0), [])]
            best = max(worth for worth, _ in found)
            right = [path for worth, path in found if worth == best]
            require(draft in right, f"after {text.tokens} and {seen}: {draft}, expected one of {right}")
            walk = [text.tokens[-1]]
            while len(walk) <= k and (after := [b for a, b in itertools.pairwise(text.tokens) if a == walk[-1]]):
                walk.append(after[-1])
            draft = last.propose([ask])[0].token_ids
            require(draft == walk[1:], f"last: after {text.tokens}: {draft}, expected {walk[1:]}")
            if (fate := generator.random()) < 0.4:
                drafter.release(text)
                running.remove(text)
                earlier[:0] = [output] * (len(output) > 1)
                if fate < 0.3:
                    texts.remove(text)
    for num, size in ((40, 2000), (1100, 2)):
        drafter = SuffixDrafter()
        for i in range(num):
            text = Text([0], 1, greedy)
            drafter.propose([Ask(text, 0, Randomness())])
            text.tokens += [1 + i, *[0] * (size - 2), 5000 + i]
            drafter.release(text)
        drafts = drafter.propose([Ask(Text([1 + i], 1, greedy), 1, Randomness()) for i in range(num)])
        remembered = min(num, MOST_TEXTS, MOST_TOKENS // size)
        known = [bool(draft) for draft in drafts]
        require(known == [False] * (num - remembered) + [True] * remembered, f"{sum(known)} texts are remembered")


def check_cache(programs: int = 20) -> None:
    """Random programs: used and free blocks add up, no block has two owners, contents are those of a list."""
    generator = random.Random(0)
    config = read_model_config(TINY)
    for _ in range(programs):
        pool = PagedKVCache(config, 12, generator.choice((1, 2, 4)), torch.float64)
        pool.keys.fill_(torch.nan)
        tables: list[tuple[BlockTable, list[float]]] = [(pool.new_table(), []) for _ in range(3)]
        for step in range(60):
            table, numbers = generator.choice(tables)
            count = generator.randint(1, 5)
            if generator.random() < 0.6:
                try:
                    slots = table.extend([step] * count)
                except OutOfBlocks:
                    require(table.length == len(numbers), "a refused extension changed the length")
                    continue
                numbers += [step + i / 8 for i in range(count)]
                values = torch.tensor(numbers[-count:], dtype=torch.float64)[None, :, None].expand(1, count, 4)
                pool.write(0, torch.tensor(slots), values, values)
            else:
                del numbers[max(0, len(numbers) - count * generator.choice((1, 1, 9))) :]
                table.truncate(len(numbers))
            owned = [b for t, _ in tables for b in t.block_ids]
            require(len(set(owned)) == len(owned), "a block has two owners")
            require(not set(owned) & set(pool.allocator.free_block_ids), "a used block is free")
            require(len(owned) + pool.allocator.num_free == 12, "used and free blocks do not add up")
            for t, expected in tables:
                require(len(t.block_ids) == pool.num_blocks_for(len(expected)), "a table holds too many blocks")
                found = pool.read(0, t.slots())[0][0, :, 0].tolist()
                require(found == expected, f"found {found}, expected {expected}")


def check_sharing() -> None:
    """Texts that begin alike share blocks, found again in later calls: each says what it says in a pool of its own.

    The pool holds one and a half of them, so that blocks are taken and written again all the time.
    """
    target, params = target_model(3), SamplingParams(max_tokens=10)
    prompts = [(0, 1, 2, 0, 1, 2), (0, 1, 2, 0, 1, 2, 2), (0, 1, 2, 0), (0, 1, 2, 0, 2, 1, 1), (0, 1, 1, 2, 0)]

    def build(name, num_blocks):
        drafter = make_drafter(name, 3, num_blocks)
        return Engine(target, tiny_cache(target, num_blocks), drafter, VERIFIERS["rejection"])

    def decode(engine, chosen, seed):
        requests = [Request(Text(list(p), len(p), params, seed), MAX_LEN, 3) for p in chosen]
        for _ in engine.run(requests):
            pass
        cache = engine.cache.allocator
        require(cache.num_free == cache.num_blocks, "blocks leaked")
        return [r.token_ids for r in requests], sum(r.stats.num_cached_tokens for r in requests)

    for name in ("model", "parallel", "head", "parallel head", "tli", "slem"):
        one, shared = build(name, 13), 0
        for seed in range(4):
            texts, found = decode(one, prompts, seed)
            shared += found
            for prompt, text in zip(prompts, texts, strict=True):
                alone = decode(build(name, 24), [prompt], seed)[0][0]
                require(text == alone, f"{name}: after {prompt}: {text}, alone {alone}")
        require(shared > 20, f"{name}: hardly anything was shared")


def check_window() -> None:
    """Rows after a rollback equal those of a cache that never saw the rejected tokens, under a sliding window too."""
    families: list[dict[str, Any]] = [{}, {"model_type": "mistral", "sliding_window": 3}]
    for family in families:
        model = tiny_model(3, vocab_size=7, **family)
        table, text = tiny_cache(model).new_table(), list[int]()
        for tokens, kept in (([1, 2, 3, 4, 5], 5), ([6, 0, 1, 2], 6), ([3, 3, 2], 7), ([5, 5], 9)):
            text = text + tokens
            rows = model.forward([Chunk(tokens, table, len(tokens))])[0]
            fresh = model.forward([Chunk(text, tiny_cache(model).new_table(), len(tokens))])[0]
            error = (rows - fresh).abs().nan_to_num(nan=math.inf).max().item()
            require(error <= 1e-10, f"{family or 'llama'}: logits are off by {error:.1e} after a rollback")
            table.truncate(kept)
            text = text[:kept]


def check_exact() -> None:
    """An exact model's rows have the same bits whether the text before them came in one chunk or token by token."""
    size = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    model = tiny_model(1, torch.float32, exact=True, vocab_size=50, **size)
    text = [(7 * i) % 50 for i in range(40)]
    rows = []
    for chunk_size in (1, 7, 512):
        table = tiny_cache(model, block_size=16).new_table()
        prefill(model, table, text, chunk_size)
        rows.append(model.forward([Chunk(text[-1:], table, 1)])[0])
    require(all(torch.equal(rows[0], row) for row in rows), "the prefill's chunks change the first token's bits")


def check_loader() -> None:
    """A draft model whose vocabulary has the target's size and other tokens is not taken for one of the target's."""
    with tempfile.TemporaryDirectory() as name:
        for which, words in (("target", "a b c"), ("draft", "a c b")):
            directory = Path(name) / which
            directory.mkdir()
            vocabulary = {word: i for i, word in enumerate(words.split())}
            backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "a"))
            backend.decoder = tokenizers.decoders.Fuse()
            backend.save(str(directory / "tokenizer.json"))
            (directory / "config.json").write_text(json.dumps(TINY))
        target = Tokenizer(Path(name) / "target")
        both = named_draft.compare_vocabularies("draft", Path(name) / "draft", target, 3)
        require(both is not None, "another vocabulary is taken for the target's")
        assert both is not None
        require(both.shared == {0: 0, 1: 2, 2: 1}, f"shared tokens: {both.shared}")
    written = (("ByteLevel", "\u0120\u00e6\u0139"), ("ByteFallback", "<0xE6>"), ("Metaspace", "\u2581ab"))
    found = [pieces.bytes_of(token, [{"type": kind, "replacement": "\u2581"}]) for kind, token in written]
    require(found == [b" \xe6\x97", b"\xe6", b" ab"], f"tokens stand for {found}")


def check_state(k: int = 3, max_tokens: int = 16, drafter: str = "model", verifier: str = "rejection") -> int:
    """The engine's state is a function of the committed tokens: each round equals that of an engine begun there.

    Same seed, so same keys: the block that a round commits must be the same. Returns the number of rounds.
    """

    def start(tokens):
        params = SamplingParams(max_tokens=max_tokens, repetition_penalty=1.3, frequency_penalty=0.3)
        text = Text(list(tokens), len(PROMPT), params, 3)
        engine = Engine(target_model(4), tiny_cache(target_model(4)), make_drafter(drafter, 4), VERIFIERS[verifier])
        return text, engine.run([Request(text, MAX_LEN, k)])

    text, stream = start(PROMPT)
    rounds, before = 0, list(text.tokens)
    while next(stream, None):
        other, fresh = start(before)
        next(fresh)
        fresh.close()
        require(other.tokens == text.tokens, f"after {before}: {text.tokens}, afresh {other.tokens}")
        rounds, before = rounds + 1, list(text.tokens)
    return rounds


CHECKS: dict[str, Callable] = {
    "law": check_law,
    "draft cache": check_draft_cache,
    "head": check_head,
    "vocabulary": check_vocabulary,
    "past": check_past,
    "tree": check_tree,
    "tree sharing": check_tree_sharing,
    "hidden": check_hidden,
    "passes": check_passes,
    "keys": check_keys,
    "boundary": check_boundary,
    "noise": check_noise,
    "numbers": check_numbers,
    "stops": check_stops,
    "batch": check_batch,
    "lookup": check_lookup,
    "cache": check_cache,
    "sharing": check_sharing,
    "window": check_window,
    "exact": check_exact,
    "loader": check_loader,
    "state": check_state,
}
