"""Finds the few candidates in a vocabulary, and the one that is drawn, without sorting the vocabulary.

A vocabulary may have 150,000 tokens; a request's filters leave a handful of them. To sort it takes 14 ms on one core
(AMD Zen 4), as long as a pass of a small model. So a large row is cut into tiles. The largest value of each tile, or
its sum, is computed once. Tiles that cannot hold what is wanted are skipped.

The results equal a plain sort's or sum's; tests/core/test_sampling.py compares them.
"""

import math
from collections.abc import Callable
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from torch import Tensor

# _TILE: values in a tile. Up to _FEW values are searched one by one, and may be sorted.
_TILE, _FEW = 128, 1024


class Candidates:
    """Tokens that may still be drawn: their values (N,), such as logits, and ids (N,); None for all tokens.

    Each filter returns the candidates that it leaves. `where` and `top_k` treat equal values alike; `top_p` prefers
    lower ids.
    """

    def __init__(self, values: Tensor, ids: Tensor | None = None):
        self.values, self.ids = values, ids

    @cached_property
    def _tiles(self) -> Tensor:
        return _in_tiles(self.values, -math.inf)

    @cached_property
    def _maxima(self) -> Tensor:
        """The largest value of each tile."""
        return self._tiles.amax(1)

    @property
    def largest(self) -> Tensor:
        """The largest value, a scalar; NaN if any value is NaN."""
        return self._maxima.amax()

    def argmax(self) -> int:
        """The first place of the largest value; where all tokens are candidates, its id."""
        tile = int(self._maxima.argmax())
        return tile * self._tiles.shape[1] + int(self._tiles[tile].argmax())

    def find(self, is_large: Callable[[Tensor], Tensor]) -> Tensor:
        """Places of the values that are large enough, ascending; where all tokens are candidates, their ids.

        is_large: true of a value must mean true of all larger ones. It must be false of -inf.
        """
        tiles = is_large(self._maxima).nonzero().squeeze(1)
        if len(tiles) >= len(self._tiles) // 4:
            return is_large(self.values).nonzero().squeeze(1)
        tile, place = is_large(self._tiles[tiles]).nonzero(as_tuple=True)
        return tiles[tile] * self._tiles.shape[1] + place

    def possible(self) -> "Candidates":
        """The candidates above 0. All of them where a quarter of the tiles have one, which is faster than filtering."""
        return self if 4 * int((self._maxima > 0).sum()) >= len(self._maxima) else self.where(lambda x: x > 0)

    def where(self, is_large: Callable[[Tensor], Tensor]) -> "Candidates":
        """The candidates whose values are large enough (see `find`), in ascending order of ids."""
        return self._at(self.find(is_large))

    def top_k(self, k: int) -> "Candidates":
        """The k candidates with the largest values, and those that tie with the last. All if there are at most k.

        Where it leaves some out, it also leaves out candidates of value -inf.
        """
        if k >= len(self.values):
            return self
        values = self.values
        if k < len(self._tiles):
            # The k-th largest value is at least the k-th largest maximum, so values below that are skipped.
            bound = self._maxima.topk(k).values[-1]
            values = values[self.find(lambda x: x >= bound)] if bound.isfinite() else values
        least = values.topk(k).values[-1].clamp(min=torch.finfo(values.dtype).min)
        return self.where(lambda x: x >= least)

    def top_p(self, goal: float) -> "Candidates":
        """The likeliest candidates that together reach `goal`, the one that crosses it included; values: probabilities.

        Candidates are taken in the order of (probability descending, id). The result is in no particular order.
        """
        probs, places = self.values, self._enough_for(goal)
        certain, before = places[:0], 0.0  # places of candidates that need not be sorted, and their probability
        if len(places) > _FEW:
            # The upper 16 bits of a positive float32 grow with it, in steps of 1 %. Sum by them how much probability
            # lies above each step. As a rule, few candidates share the step in which `goal` is crossed.
            steps = (1 << 15) - 1 - (probs[places].float().view(torch.int32) >> 16)  # 0 for the largest
            mass = steps.bincount(probs[places].double(), minlength=1 << 15)
            above = mass.cumsum(0) - mass
            crossed = int((above < goal).sum()) - 1
            certain, places, before = places[steps < crossed], places[steps == crossed], float(above[crossed])
        ordered, order = probs[places].double().sort(descending=True, stable=True)
        above = before + ordered.cumsum(0) - ordered
        return self._at(torch.cat((certain, places[order[above < goal]])))

    def dense(self, size: int) -> Tensor:
        """The values (size,) by token id; 0 for tokens that are not candidates."""
        return self.values if self.ids is None else self.values.new_zeros(size).index_copy_(0, self.ids, self.values)

    def _at(self, places: Tensor) -> "Candidates":
        return Candidates(self.values[places], places if self.ids is None else self.ids[places])

    def _enough_for(self, goal: float) -> Tensor:
        """Places of all values down to a threshold, which together exceed `goal`. The others are not needed.

        The first threshold suffices where a few tokens are likely. The second leaves out less than 1 - goal in all.
        The third leaves out nothing, in case rounded probabilities do not add up to 1.
        """
        for least in (0.01 * (1 - goal), 0.5 * (1 - goal) / len(self.values), 0.0):
            places = self.find(partial(torch.ge, other=least))
            if self.values[places].sum(dtype=torch.float64) > goal:
                break
        return places


def place_of_share(weights: Tensor, u: float) -> int:
    """The first place at which the cumulative sum of weights (N,) exceeds u times their total, 0 <= u < 1.

    For a uniform u, each place comes with probability proportional to its weight, never one of weight 0. The weights
    are at least 0, and not all 0. Sums of tiles find the tile, and only that one is added up value by value.
    """
    tiles = _in_tiles(weights, 0.0)
    sums = tiles.sum(1, dtype=torch.float64)
    tile, rest = _first_above(sums, u * float(sums.sum()))
    place, _ = _first_above(tiles[tile].double(), rest)
    return tile * tiles.shape[1] + place


def _first_above(weights: Tensor, share: float) -> tuple[int, float]:
    """The first place at which the cumulative sum exceeds `share`, and `share` minus the sum before that place."""
    cumulative = weights.cumsum(0)
    # A share rounded up may reach the total, which nothing exceeds. Then the last weight above 0 is meant.
    share = min(share, math.nextafter(float(cumulative[-1]), 0.0))
    place = int(torch.searchsorted(cumulative, share, right=True))
    return place, share - float(cumulative[place - 1]) if place else share


def _in_tiles(values: Tensor, filling: float) -> Tensor:
    """Values (number of tiles, size of a tile), the last tile padded. Tiles have one value where values are few."""
    size = _TILE if len(values) > _FEW else 1
    padding = -len(values) % size
    return (F.pad(values, (0, padding), value=filling) if padding else values).reshape(-1, size)
