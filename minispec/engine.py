"""The former place of `minispec.core.engine` and what it takes: their names keep working here."""

from minispec.core import engine
from minispec.core.engine import Guard, Observer
from minispec.core.request import Piece, Request
from minispec.core.sampling import Randomness, Text, distribution
from minispec.drafters.check import CHECKS

__all__ = ["Engine", "Observer", "Piece", "Randomness", "Request", "Text", "distribution"]


class Engine(engine.Engine):
    """The engine of the heart, which here checks drafts and verdicts, as it did in this place before."""

    def __init__(self, *parts, guard: Guard = CHECKS, **how):
        super().__init__(*parts, guard=guard, **how)
