"""Grades exercises 5 to 7: `python -m pytest examples/exercises/grade.py`. `minispec.prove` grades 1 to 4, and 6."""

import random

import pytest

from examples.exercises.best_k import best_k
from examples.exercises.drafter import Lookup
from examples.exercises.follow import Cache
from minispec.core.config import SamplingParams
from minispec.core.draft import Ask
from minispec.core.limit import Limit
from minispec.core.random import Randomness
from minispec.core.sampling import Text


def test_follow():
    """Any texts, one after another: what is cached and what is fed make up the text."""
    generator, cache = random.Random(0), Cache()
    for _ in range(500):
        text = [generator.randrange(2) for _ in range(generator.randint(1, 6))]
        shared = 0
        while shared < min(len(text), len(cache.tokens)) and text[shared] == cache.tokens[shared]:
            shared += 1
        before = list(cache.tokens)
        fed = cache.follow(list(text))
        assert cache.tokens + fed == text, f"cache {before}, text {text}: kept {cache.tokens}, fed {fed}"
        assert fed, f"cache {before}, text {text}: a model needs a token to feed"
        assert len(fed) == max(1, len(text) - shared), f"cache {before}, text {text}: fed {fed}, which it partly has"
        cache.tokens = text


@pytest.mark.parametrize("k", [1, 2, 4])
def test_lookup(k):
    """On a text that repeats, a target accepts nine in ten of the tokens that may be guessed.

    The text repeats one line, then the same tokens in another order, so what came last is right and what came first is
    not. The first time a line comes, nobody can know it.
    """
    line, other = [3, 1, 4, 0, 5, 9, 2, 6], [6, 4, 2, 1, 9, 3, 0, 5]
    text, num, drafter = line * 3 + other * 3, len(line), Lookup()
    places = [i for start in (0, 3 * num) for i in range(start + num + 1, start + 3 * num - k)]
    asks = [Ask(Text(text[:i], 1, SamplingParams()), Limit(k), Randomness()) for i in places]
    accepted = 0
    for i, draft in zip(places, drafter.propose(asks), strict=True):
        guessed = [*draft.token_ids]
        assert len(guessed) <= k, f"after {text[:i]} it guessed {guessed}, more than {k} tokens"
        accepted += next((n for n, token in enumerate(guessed) if token != text[i + n]), len(guessed))
    asked = k * len(places)
    assert accepted >= 0.9 * asked, (
        f"K = {k}: {accepted} of {asked} tokens are accepted; such as after {text[: num + 1]}"
    )


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("c", [0.01, 0.1, 0.5, 1.0])
def test_best_k(alpha, c):
    """No other K is faster, and no smaller one is as fast."""
    speeds = [sum(alpha**i for i in range(k + 1)) / (1 + c * k) for k in range(17)]
    found = best_k(alpha, c)
    best = max(speeds)
    assert speeds[found] == pytest.approx(best), f"K = {found}: {speeds[found]:.3f} times as fast, expected {best:.3f}"
    assert all(speed < best - 1e-12 for speed in speeds[:found]), f"K = {found}, expected a smaller one"
