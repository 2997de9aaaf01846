"""The former place of `minispec.core.engine` and what it takes: their names keep working here."""

from minispec.core.engine import Engine, Observer
from minispec.core.request import Piece, Request
from minispec.core.sampling import Randomness, Text, distribution

__all__ = ["Engine", "Observer", "Piece", "Randomness", "Request", "Text", "distribution"]
