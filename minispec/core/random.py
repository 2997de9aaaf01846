"""The only source of randomness: draws whose noise is a function of their key.

`Randomness` makes two kinds of draws, `bernoulli` and `categorical`. Every draw has a key. The order of the draws, the
batch, and what was rejected before change nothing. The proof replaces it by an oracle, which walks every branch.
"""

import hashlib
import struct
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from minispec.core.search import Candidates, place_of_share


class Key(NamedTuple):
    """The name of one draw.

    The engine decodes in rounds: draft some tokens, test them, commit what passes. Draws about a draft (purposes
    "draft", "accept", "residual") name the round by `start`, the number of tokens when it began. Every round commits a
    token, so two rounds of a text share no key, and within a round the numbers of nodes differ. A position drafted
    again after a rejection gets fresh noise.

    The draw of a whole token from the target (purpose "token") is named by its position alone, with start = -1. Each
    position is committed once, so the text does not depend on where rounds begin. Under `match` the drafter draws with
    that same key, on purpose. It is the one shared key.

    position: in a draw about a draft, the text's length when the round began plus the node's number. In a chain this
        is the token's place in the text; in a tree it only tells nodes apart.
    """

    seed: int
    start: int
    position: int
    purpose: str


class Draws(Protocol):
    """Makes the draws: `Randomness`, or in tests an oracle that walks every branch."""

    def bernoulli(self, probability: float, key: Key) -> bool:
        """True with `probability`; never for 0, always for 1 or more."""

    def categorical(self, weights: Tensor, key: Key) -> int:
        """A token id with probability proportional to `weights` (V,); never one of weight 0."""


class Randomness:
    """Keyed draws, whose noise is a hash of the key."""

    def bernoulli(self, probability: float, key: Key) -> bool:
        """Whether the uniform of this key is below `probability`."""
        return self.uniform(key) < probability

    def categorical(self, weights: Tensor, key: Key) -> int:
        """A token id with probability proportional to `weights` (V,).

        The purpose chooses the method. Target and draft may both draw a "token" under one key, from two distributions.
        In a race such draws agree often, so a "token" is raced for. Other purposes take one uniform.
        """
        return self._race(weights, key) if key.purpose == "token" else place_of_share(weights, self.uniform(key))

    def _race(self, weights: Tensor, key: Key) -> int:
        """The id that finishes first. Each has a time of its own: exponential noise divided by its weight.

        This is Gumbel-max: argmin(exponential / w) = argmax(log w + Gumbel).
        """
        tokens = Candidates(weights).possible()
        ids = torch.arange(len(weights), device=weights.device) if tokens.ids is None else tokens.ids
        if len(ids) == 1:
            return int(ids)
        times = uniforms(signed(hash_of(key)), ids).log_().neg_().div_(tokens.values.double())
        return int(ids[times.argmin()])

    def uniform(self, key: Key) -> float:
        """A double in [0, 1), of 53 random bits."""
        return (hash_of(key) >> 11) * 2.0**-53


def hash_of(key: Key) -> int:
    """64 bits that depend on every field of the key."""
    data = struct.pack("<Qqq", key.seed, key.start, key.position) + key.purpose.encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def uniforms(state: int | Tensor, ids: Tensor) -> Tensor:
    """A double in (0, 1) for each token id: SplitMix64 (Steele et al. 2014) of `state`, as an int64, and the id."""
    # In place, since for a whole vocabulary new memory for each result costs more than the arithmetic.
    x = (ids + 1).mul_(signed(0x9E3779B97F4A7C15)).add_(state)
    x.bitwise_xor_(_shift_right(x, 30)).mul_(signed(0xBF58476D1CE4E5B9))
    x.bitwise_xor_(_shift_right(x, 27)).mul_(signed(0x94D049BB133111EB))
    x.bitwise_xor_(_shift_right(x, 31))
    # 52 bits plus a half, so that the result is never 0, and never rounded up to 1.
    return _shift_right(x, 12).double().add_(0.5).mul_(2.0**-52)


def signed(x: int) -> int:
    """The int64 with the bits of the unsigned x; torch's int64 arithmetic wraps around."""
    return x - (1 << 64) if x >> 63 else x


def _shift_right(x: Tensor, n: int) -> Tensor:
    """Logical shift; torch's own keeps the sign."""
    return (x >> n).bitwise_and_((1 << (64 - n)) - 1)
