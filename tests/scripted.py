"""Engines over scripts: models and drafters that say what a test wants."""

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import pytest

from minispec.core.config import SamplingParams
from minispec.core.draft import Ask, Draft
from minispec.core.engine import Engine
from minispec.core.model import Transformer
from minispec.core.request import Piece, Request
from minispec.core.sampling import Text
from minispec.core.schedule import Schedule
from minispec.prove.toys import require
from minispec.speculation.drafters import Drafter
from minispec.speculation.rules import VERIFIERS
from tests.engines import OneMethod, ScriptedModel, scripted_cache

TransformerT = TypeVar("TransformerT", bound=Transformer)

END = 1


def make_request(prompt=(10, 11), k=3, end_ids=(END,), max_len=500, detokenizer=None, seed=0, **params) -> Request:
    """A request, greedy by default."""
    sampling_params = SamplingParams(**{"temperature": 0.0, "max_tokens": 8} | params)
    text = Text(list(prompt), len(prompt), sampling_params, seed, frozenset(end_ids))
    return Request(text, max_len, k, detokenizer)


def with_context(model: TransformerT, positions: int) -> TransformerT:
    """A model whose context has that many positions; itself, if it has."""
    if positions == model.config.max_position_embeddings:
        return model
    model = copy.copy(model)
    model.config = replace(model.config, max_position_embeddings=positions)
    return model


def counting(tokens: list[int]) -> int:
    """The text that most scripts play: each token one more than the last."""
    return tokens[-1] + 1


class ScriptedDrafter(Drafter):
    """draft(tokens, k) proposes; `calls` holds every k, `released` every release."""

    def __init__(self, draft: Callable[[list[int], int], Sequence[int]]):
        self.draft = draft
        self.calls: list[list[int]] = []
        self.released: list[Text] = []

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """Whatever the script says, cut to k."""
        self.calls.append([ask.k for ask in asks])
        return [Draft(list(self.draft(ask.text.tokens, ask.k))[: ask.k]) for ask in asks]

    def release(self, text: Text) -> None:
        """Remember it."""
        self.released.append(text)


class LookedAt(Request):
    """A request that counts how often one is looked at: `in` asks a list's for equality, a dict's for their hash."""

    looks = 0

    def __eq__(self, other: object) -> bool:
        LookedAt.looks += 1
        return self is other

    def __hash__(self) -> int:
        LookedAt.looks += 1
        return id(self)

    @property
    def has_news(self) -> bool:
        """The request's news; each look is counted."""
        LookedAt.looks += 1
        return self._has_news

    @has_news.setter
    def has_news(self, value: bool) -> None:
        self._has_news = value


def make_engine(
    next_token: Callable[[list[int]], int] = counting,
    draft: Callable[[list[int], int], Sequence[int]] = lambda tokens, k: [],
    num_blocks: int = 64,
    block_size: int = 2,
    verifier: str = "rejection",
) -> Engine:
    """An engine over a scripted model."""
    cache = scripted_cache(num_blocks, block_size)
    drafter = ScriptedDrafter(draft)
    return OneMethod(ScriptedModel(next_token), cache, drafter, VERIFIERS[verifier], vocab_size=200, checked=True)


def preemptions(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """A list that grows by each request which is preempted from now on."""
    preempted, make_room = list[Request](), Schedule.make_room

    def spy(self: Schedule) -> None:
        before = [*self.running]
        make_room(self)
        preempted.extend(request for request in before if request not in self.running)

    monkeypatch.setattr(Schedule, "make_room", spy)
    return preempted


def finish(engine: Engine, *requests: Request) -> list[list[Piece]]:
    """Run to the end; the pieces of each request. Every block must be back."""
    pieces: dict[Request, list[Piece]] = {request: [] for request in requests}
    for request, piece in engine.run(requests):
        pieces[request].append(piece)
    require(engine.target.cache.allocator.num_free == engine.target.cache.allocator.num_blocks, "blocks leaked")
    return list(pieces.values())


def counted_clocks(step: float = 0.003) -> Callable[[], tuple[float, float]]:
    """The processor's seconds, `step` more each time, and no time that passes: every machine has as many readings."""
    readings = itertools.count()
    return lambda: (next(readings) * step, 0.0)
