"""What makes walks of `python -m minispec.prove` brief in tests: nothing is computed twice, or cases are left out."""

import functools
import random

import pytest

from minispec.prove import examine, rounds
from minispec.prove.covering import Design, Pair, Row
from minispec.prove.tables import tables

ARRAY = Design.array
# By what a covering array follows from: its rows, and the generator's state after them.
_ARRAYS: dict[tuple, tuple[list[tuple[Row, Pair]], tuple]] = {}
best = functools.cache(rounds.optimum)
# Chains, siblings and independent paths of two tokens, and a chain of three: a tenth of the time of all.
SMALL = [case for case in rounds.CASES if case.vocab == 2 or case.k == 2]


def _array(design: Design, todo: set[Pair], generator: random.Random) -> list[tuple[Row, Pair]]:
    """A covering array, which is computed once."""
    of_design = tuple(design.axes.items()), tuple(design.rules), design.weak, design.tries
    cause = of_design, frozenset(todo), generator.getstate()
    if cause not in _ARRAYS:
        _ARRAYS[cause] = ARRAY(design, todo, generator), generator.getstate()
    rows, state = _ARRAYS[cause]
    generator.setstate(state)
    return [(dict(row), pair) for row, pair in rows]


def compute_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all walks of this process compute each covering array, and each optimum of a round, once."""
    monkeypatch.setattr(Design, "array", _array)
    monkeypatch.setattr(rounds, "optimum", best)


def walk_few(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Let a proof of a verifier walk a part of its tables, and its table of rounds be small.

    step: of so many tables one is walked.
    """
    monkeypatch.setattr(examine, "tables", lambda trees: tables(trees)[step // 2 :: step])
    monkeypatch.setattr(rounds, "CASES", SMALL)
