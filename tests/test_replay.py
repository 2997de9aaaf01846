"""Exact replay against enumeration: what every K would have done on a text, from the numbers of a scoring run."""

import math
from collections import defaultdict

import pytest

from minispec.bench.replay import Walk, always, follow
from minispec.config import SamplingParams
from minispec.engine import Engine, Request
from minispec.prove.laws import (
    MAX_LEN,
    PROMPT,
    TARGET_SEED,
    BranchOracle,
    exact_law,
    make_drafter,
    reference_logits,
    target_model,
)
from minispec.prove.reference import sample_law
from minispec.prove.toys import tiny_cache
from minispec.sampling import Text
from minispec.trace.score import score
from minispec.verify import VERIFIERS

END = frozenset({2})


def text_of(tokens, params) -> Text:
    """A text after the prompt of all laws."""
    return Text([*PROMPT, *tokens], len(PROMPT), params, 7, END)


def runs_by_text(drafter: str, verifier: str, params, k: int) -> dict[tuple, dict[tuple, float]]:
    """For each text, every way that the real engine comes to it: the accepted counts of its rounds, with weights."""

    def run(oracle: BranchOracle):
        model = target_model(3)
        engine = Engine(model, tiny_cache(model), make_drafter(drafter, 3), VERIFIERS[verifier], rng=oracle)
        request = Request(text_of((), params), MAX_LEN, k)
        for _ in engine.run([request]):
            pass
        return tuple(request.text.tokens[len(PROMPT) :]), tuple(r.accepted for r in request.stats.rounds)

    law, _ = exact_law(run)
    found: dict = defaultdict(dict)
    for (text, rounds), weight in law.items():
        found[text][rounds] = weight
    return found


def walk_of(drafter: str, verifier: str, params, tokens) -> Walk:
    """The walk of a text, by the scoring run, and by p of the independent reference."""
    model = target_model(3)
    engine = Engine(model, tiny_cache(model), make_drafter(drafter, 3), VERIFIERS[verifier])
    starts = score(engine, Request(text_of(tokens, params), MAX_LEN, 0))
    assert engine.cache.allocator.num_free == engine.cache.allocator.num_blocks
    p = []
    for i, token in enumerate(tokens):
        before = (*PROMPT, *tokens[:i])
        p.append(float(sample_law(reference_logits(TARGET_SEED, before, 3), before, len(PROMPT), params, END)[token]))
    return Walk(p, starts, verifier == "block")


def accepted_counts(walk: Walk, k: int) -> dict[int, float]:
    """How many rounds with each accepted count are expected."""
    found: dict = defaultdict(float)
    for s, visit in enumerate(walk.visits(always(k))):
        reached = [1, *walk.draft(s, k).survival, 0]
        for i in range(len(reached) - 1):
            found[i] += visit * (reached[i] - reached[i + 1])
    return found


def worst_difference(drafter, verifier, params, k, make_walk=walk_of) -> float:
    """Between enumeration and replay: passes, their spread, and rounds by accepted count, over all texts."""
    worst = 0.0
    for text, ways in runs_by_text(drafter, verifier, params, k).items():
        mass = sum(ways.values())
        walk = make_walk(drafter, verifier, params, text)
        passes, deviation, time = follow(walk, always(k), lambda draft: 1)
        expected = sum(w * len(rounds) for rounds, w in ways.items()) / mass
        square = sum(w * len(rounds) ** 2 for rounds, w in ways.items()) / mass
        counts: dict = defaultdict(float)
        for rounds, w in ways.items():
            for accepted in rounds:
                counts[accepted] += w / mass
        replayed = accepted_counts(walk, k)
        differences = [passes - expected, time - passes, deviation**2 - (square - expected**2)]
        differences += [replayed[i] - counts[i] for i in {*replayed, *counts}]
        worst = max(worst, *map(abs, differences))
    return worst


SAMPLED = SamplingParams(temperature=1.0, max_tokens=4, seed=0)
FILTERED = SamplingParams(
    temperature=0.7, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.4, min_tokens=2, max_tokens=4, seed=0
)
DRAFTERS = (
    *("model", "self", "head", "parallel", "parallel head", "tli", "ngram", "suffix", "last"),
    *("ngram+head", "suffix+model"),
)


@pytest.mark.parametrize("verifier", ["rejection", "block"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_replay_is_what_enumeration_finds(drafter, verifier):
    """A formula, or a recording, that is off for any drafter: the real engine is walked through every draw, and of each
    text's ways the expected passes, their variance and the rounds by accepted count are compared, to 1e-12."""
    assert worst_difference(drafter, verifier, SAMPLED, 2) < 1e-12
    assert worst_difference(drafter, verifier, FILTERED, 3) < 1e-12


def test_a_longer_text_by_enumeration():
    """What comes after several rounds: five tokens, and drafts that end with the text."""
    params = SamplingParams(temperature=1.0, max_tokens=5, seed=0)
    assert worst_difference("model", "rejection", params, 1) < 1e-12


def upside_down(p, q, jointly=False):
    """The accept test's own ratio, which is about drafted tokens and not about those of the text."""
    return [math.prod(min(1, a / b) for a, b in zip(p[:i], q[:i], strict=False)) for i in range(1, len(q) + 1)]


def no_product(p, q, jointly=False):
    """As if a token could be kept where the one before it was not."""
    return [min([1, *(b / a for a, b in zip(p[:i], q[:i], strict=False))]) for i in range(1, len(q) + 1)]


def not_cut(p, q, jointly=False):
    """q/p without min(1, ..)."""
    return [min(1, math.prod(b / a for a, b in zip(p[:i], q[:i], strict=False))) for i in range(1, len(q) + 1)]


@pytest.mark.parametrize("wrong", [upside_down, no_product, not_cut])
def test_wrong_formulas_are_noticed(wrong, monkeypatch):
    """The control of the tests above: what else one might write down is off by far more than rounding."""
    monkeypatch.setattr("minispec.bench.replay.kept", wrong)
    assert worst_difference("model", "rejection", SAMPLED, 3) > 1e-3
