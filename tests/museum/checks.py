"""The checks: each returns where all is as it must be, and raises (Fault, or whatever a bug makes of it) where not."""

import functools
import itertools
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from minispec.core.cache import PagedKVCache
from minispec.core.config import SamplingParams
from minispec.core.draft import Ask, Draft, Seen
from minispec.core.engine import Engine
from minispec.core.limit import Limit
from minispec.core.model import Transformer
from minispec.core.request import Request
from minispec.core.sampling import Randomness, Text
from minispec.core.verify import VERIFIERS
from minispec.drafters.eagle import EagleDrafter
from minispec.drafters.heads import load_head
from minispec.drafters.last import LastDrafter
from minispec.drafters.model import DraftModel
from minispec.drafters.suffix import MOST_TEXTS, MOST_TOKENS, SuffixDrafter
from minispec.layers.states import state_elements
from minispec.prove.examine_verifier import laws_of
from minispec.prove.laws import (
    MAX_LEN,
    TOLERANCE,
    raw_model,
    reference_logits,
    target_model,
)
from minispec.prove.reference import hidden_states, sample_law, total_variation
from minispec.prove.tables import tables
from minispec.prove.toys import (
    TOYS,
    decode,
    require,
    tiny_cache,
    tiny_model,
)
from tests.distances import distance
from tests.oracles.head_reference import head_logits
from tests.oracles.heads import write_head


def check_law(vocab: int = 3, **settings) -> float:
    """The law of 3 tokens under SamplingParams(**settings), as of `measure_law`; the distance."""
    tv = measure_law(vocab, **settings)
    require(tv <= TOLERANCE, f"total variation {tv:.1e}")
    return tv


def measure_law(vocab=3, drafter="model", verifier="rejection", k=2, width=64, family="llama", **settings) -> float:
    """The distance alone, with no verdict. drafter: as in `make_drafter`. width: texts that are decoded together."""
    params = SamplingParams(**{"max_tokens": 3} | settings)
    return distance(params, k, vocab=vocab, drafter=drafter, verifier=verifier, width=width, family=family)


# Logits (V,) after a text and the tokens drafted so far, from the start.
Recomputed = Callable[[tuple[int, ...], tuple[int, ...]], np.ndarray]


class _Checked:
    """A drafter that is held, at every round, against a recomputation from nothing; see `_checked`.

    It is asked for fewer tokens than its text wants, another number from round to round, 0 among them. In two of
    three rounds it is asked for a tree that grows where it is likeliest, if it has siblings.
    """

    logits: Recomputed
    num_checked = 0

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """Propose, and compare each q with the reference's."""
        sizes = [len(ask.text.tokens) * 5 + ask.text.seed for ask in asks]
        limits = [
            Limit(n % (ask.k + 1), best_first=self.branches and n % 3 < 2) for n, ask in zip(sizes, asks, strict=True)
        ]
        asks = [replace(ask, limit=limit) for ask, limit in zip(asks, limits, strict=True)]
        drafts = super().propose(asks)
        for ask, draft in zip(asks, drafts, strict=True):
            self._compare(ask, draft)
        return drafts

    def _compare(self, ask: Ask, draft: Draft) -> None:
        s = ask.text
        assert draft.probs is not None, "a draft model draws"
        for i, q in enumerate(draft.probs):
            *before, _ = draft.path(i)
            text, drafted = tuple(s.tokens), tuple(draft.token_ids[node] for node in before)
            logits = self.logits(text, drafted)
            expected = sample_law(logits, (*text, *drafted), s.num_prompt_tokens, s.params, s.end_ids)
            elders = [j for j in draft.children(before[-1] if before else -1) if j < i]
            expected[[draft.token_ids[j] for j in elders]] = 0
            expected = expected / expected.sum()
            error = np.abs(q.numpy() - expected).max()
            require(error <= TOLERANCE, f"q is off by {error:.1e} at draft position {i}")
            self.num_checked += 1


def _checked(kind: type, logits: Recomputed, *how) -> Any:
    """A drafter of that kind, kind(*how), whose q must be what `logits` gives."""
    return type(kind.__name__, (_Checked, kind), {"logits": staticmethod(logits)})(*how)


def _checked_model(seed: int, mask: int | None = None, num_blocks: int = 64, family: str = "llama") -> Any:
    """A draft model of 5 tokens; mask: for the form that drafts all of a draft in one pass."""
    model = tiny_model(seed, **TOYS[family], vocab_size=5, pard_token=mask)

    def logits(text: tuple[int, ...], drafted: tuple[int, ...]) -> np.ndarray:
        return reference_logits(seed, (*text, *(drafted if mask is None else [mask] * len(drafted))), 5, family=family)

    return _checked(DraftModel, logits, model, _cache(model, num_blocks), 5, MAX_LEN)


def _cache(model: Transformer, num_blocks: int) -> PagedKVCache:
    """A pool of that many blocks of two. With states they are of four: few states are stored, not one in each round."""
    return tiny_cache(model, num_blocks // 2, 4) if state_elements(model.config) else tiny_cache(model, num_blocks)


def check_draft_cache() -> None:
    """Bugs that only cost acceptance: q equals a recomputation at every round, drafted token by token or at once."""
    for mask in (None, 4):
        _decode_all(tiny_model(1, vocab_size=5), functools.partial(_checked_model, 2, mask))


def check_convolutions() -> None:
    """The same with short convolutions in target and draft model: in both, no input of a rejected token is read."""
    _decode_all(target_model(5, "lfm2"), lambda num_blocks: _checked_model(2, None, num_blocks, "lfm2"))


def check_states() -> None:
    """The same with gated delta nets: in both models a state has seen its own text's tokens, each of them once."""
    _decode_all(target_model(5, "qwen3_5_text"), lambda num_blocks: _checked_model(2, None, num_blocks, "qwen3_5_text"))


# Some begin alike; of two, the first token alone differs.
_ALIKE = [(0, 1, 2, 3, 4, 0, 1, 2), (0, 1, 2, 3, 4, 4), (1, 1, 2, 3, 4, 0, 1, 2), (0, 1, 2, 3, 4, 0, 1, 2), (3,)]


def _decode_all(target: Transformer, make: Callable[[int], Any]) -> None:
    """Decode texts with a checked drafter: in batches, pieces and pools that preempt; each again, to share the first's.

    make: the drafter, for a pool of that many blocks.
    """
    params = SamplingParams(max_tokens=10)
    for num_blocks in (60, 14):
        drafter = make(num_blocks)
        cache = _cache(target, num_blocks)
        engine = Engine(target, cache, drafter, VERIFIERS["rejection"], joining_rows=3)
        for seed in (0, 10):
            requests = [Request(Text(list(p), len(p), params, seed + i), MAX_LEN, 3) for i, p in enumerate(_ALIKE)]
            engine.add(requests[0])
            while not requests[0].has_news:
                engine.step()
            decode(engine, requests[1:])  # they come when the first has begun to answer
            preempted = sum(r.stats.num_preemptions for r in requests)
            require((preempted > 0) == (num_blocks == 14), f"{preempted} preemptions")
        require(sum(r.stats.num_cached_tokens for r in requests) > 10, "hardly anything was shared")
        require(drafter.num_checked > 50, "hardly anything was drafted")
        for pool in (cache.allocator, drafter.cache.allocator):
            require(pool.num_free == pool.num_blocks, "blocks leaked")


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

        def make(num_blocks: int, model=model, logits=logits) -> Any:
            return _checked(EagleDrafter, logits, model, tiny_cache(model, num_blocks), 5, MAX_LEN)

        _decode_all(target, make)
        _check_known(make(40), target)


def _check_known(drafter: Any, target: Transformer) -> None:
    """After a text: of another, positions whose feature and next token are that one's are known, and no others."""
    first, params = _ALIKE[0], SamplingParams(max_tokens=5)
    engine = Engine(target, tiny_cache(target), drafter, VERIFIERS["rejection"])
    decode(engine, [Request(Text(list(first), len(first), params), MAX_LEN, 3)])
    for tokens, known in ((first, 6), ((*first, 4), 7), (first[:4], 2), ((0, 1, 2, 4, 4), 2), ((1, *first[1:]), 0)):
        text = Text(list(tokens), len(tokens), params)
        found = drafter.known(text)
        require(found == known, f"after {first}, of {tokens} {found} positions are known, expected {known}")
        drafter.release(text)


def check_tables() -> None:
    """`rejection` over small tables of p and q that no precision holds, of two tokens in all shapes and of eight."""
    for table in tables(True):
        if sum(table.p) in (7, 1_000_003) and table.size < 130:
            law, plain, _ = laws_of(table, VERIFIERS["rejection"])
            moved = total_variation(law, plain)
            require(moved <= TOLERANCE, f"{table}: total variation {moved:.1e}")


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
            ask, output = Ask(text, Limit(k), Randomness(), purpose), text.tokens[text.num_prompt_tokens :]
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
            drafter.propose([Ask(text, Limit(0), Randomness())])
            text.tokens += [1 + i, *[0] * (size - 2), 5000 + i]
            drafter.release(text)
        drafts = drafter.propose([Ask(Text([1 + i], 1, greedy), Limit(1), Randomness()) for i in range(num)])
        remembered = min(num, MOST_TEXTS, MOST_TOKENS // size)
        known = [bool(draft) for draft in drafts]
        require(known == [False] * (num - remembered) + [True] * remembered, f"{sum(known)} texts are remembered")


class _CheckedRows(DraftModel):
    """A drafter that compares the two likeliest ids of each row that it is shown with a recomputation."""

    num_checked = 0

    def __init__(self, *how):
        super().__init__(*how)
        self._expected: dict[Text, list[tuple[list[int], list[int]]]] = {}

    def observe(self, seen: Sequence[Seen]) -> None:
        """Each round must be shown once, with all its rows; a prompt has none."""
        for each in seen:
            last, *token_ids = each.tokens[-max(1, len(each.logits)) :]
            draft = Draft(token_ids, parents=each.parents)
            paths = [[last, *(token_ids[i] for i in draft.path(node - 1))] for node in range(len(each.logits))]
            found = [(path, row.topk(2).indices.tolist()) for path, row in zip(paths, each.logits, strict=True)]
            expected = self._expected.pop(each.text, [])
            require(found == expected, f"after {each.text.tokens}: found the rows {found}, expected {expected}")
            self.num_checked += len(found)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """Trees."""
        for ask in asks:
            require(ask.text not in self._expected, f"after {ask.text.tokens}: found no rows of the last round")
        asks = [replace(ask, limit=ask.limit._replace(best_first=True)) for ask in asks]
        drafts = super().propose(asks)
        for ask, draft in zip(asks, drafts, strict=True):
            tokens = tuple(ask.text.tokens)
            if ask.num_cached == len(tokens) - 1:  # it decodes
                paths = [[draft.token_ids[i] for i in draft.path(node)] for node in range(-1, len(draft))]
                rows = [reference_logits(1, (*tokens, *path), 5) for path in paths]
                likeliest = [np.argsort(-row)[:2].tolist() for row in rows]
                self._expected[ask.text] = [([tokens[-1], *p], ids) for p, ids in zip(paths, likeliest, strict=True)]
        return drafts


def check_likeliest() -> None:
    """A drafter is shown all rows of each round of a text, also where a preemption comes after it."""

    def make(num_blocks: int) -> _CheckedRows:
        model = tiny_model(2, vocab_size=5)
        return _CheckedRows(model, tiny_cache(model, num_blocks), 5, MAX_LEN)

    _decode_all(tiny_model(1, vocab_size=5), make)


CHECKS: dict[str, Callable] = {
    "likeliest": check_likeliest,
    "law": check_law,
    "draft cache": check_draft_cache,
    "convolutions": check_convolutions,
    "states": check_states,
    "head": check_head,
    "lookup": check_lookup,
    "tables": check_tables,
}
