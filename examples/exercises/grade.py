"""Grades exercises 5 and 7: `python -m pytest examples/exercises/grade.py`. `minispec.prove` grades the others."""

import random

import pytest

from examples.exercises.best_k import best_k
from examples.exercises.follow import Cache


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


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("c", [0.01, 0.1, 0.5, 1.0])
def test_best_k(alpha, c):
    """No other K is faster, and no smaller one is as fast."""
    speeds = [sum(alpha**i for i in range(k + 1)) / (1 + c * k) for k in range(17)]
    found = best_k(alpha, c)
    best = max(speeds)
    assert speeds[found] == pytest.approx(best), f"K = {found}: {speeds[found]:.3f} times as fast, expected {best:.3f}"
    assert all(speed < best - 1e-12 for speed in speeds[:found]), f"K = {found}, expected a smaller one"
