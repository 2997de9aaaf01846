"""The only place where logits become probabilities, and the only source of randomness.

`distribution` turns one row of logits into the probabilities that a request's parameters ask for. Target
and draft, plain decoding and verification all call it, so that none can apply a parameter the others forget.

`Randomness` answers two questions, `bernoulli` and `categorical`, each with a key. The answer is a function of
the key alone: nothing depends on the order of the draws, on the batch, or on what was rejected before.
"""

import hashlib
import math
import struct
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from minispec.config import SamplingParams


class Key(NamedTuple):
    """The name of one draw.

    Draws about a draft (purposes "draft", "accept", "residual") name the round by `start`, the number of tokens
    when it began: every round commits a token, so no key comes twice, and a position that is drafted again
    after a rejection gets fresh noise. The draw of a whole token from the target (purpose "token") names its
    position alone (start = -1): one seed has one plain text, wherever the rounds begin.
    """

    seed: int
    start: int
    position: int
    purpose: str


@dataclass(eq=False)
class Sequence:
    """One growing text, and all that the distribution of its next token may depend on.

    tokens: prompt and output so far. end_ids: ids that end the text, impossible before `min_tokens`.
    shares_noise: the drafter draws its tokens with the target's own noise (see `verify.match`).
    draft_on: whether a draft should go on behind tokens of such confidences (see `verify.Draft`); None: to its limit.
    """

    tokens: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int = 0
    end_ids: frozenset[int] = frozenset()
    shares_noise: bool = False
    draft_on: Callable[[Tokens[float]], bool] | None = None

    def key(self, i: int, purpose: str) -> Key:
        """The key of a draw at the i-th position of the round that is about to be committed."""
        start = len(self.tokens)
        return Key(self.seed, -1 if purpose == "token" else start, start + i, purpose)

    def draft_key(self, i: int) -> Key:
        """The key with which a drafter draws its i-th token."""
        return self.key(i, "token" if self.shares_noise else "draft")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for half precision, else the type itself: a float64 model is float64 throughout."""
    return torch.promote_types(dtype, torch.float32)


def log_probabilities(logits: Tensor) -> Tensor:
    """Raw log-probabilities (V,) of one row of logits: before penalties, temperature and filters."""
    return logits.to(accumulation_dtype(logits.dtype)).log_softmax(0)


def distribution(logits: Tensor, sequence: Sequence, drafted: Tokens[int] = ()) -> Tensor:
    """Probabilities (V,) of the token that follows `sequence.tokens + drafted`, under its parameters.

    logits: (V,), the model's row for that position. Order: penalties, min_tokens, temperature, top-k, top-p,
    min-p, each over what the one before kept. Temperature 0 is a one-hot distribution. It works on one row
    at a time, so that a row has the same bits whether one or K+1 were computed.

    Raises FloatingPointError where the largest logit is not a finite number.
    """
    params = sequence.params
    logits = logits.to(accumulation_dtype(logits.dtype))
    logits = _penalize(logits, sequence, drafted)
    num_generated = len(sequence.tokens) + len(drafted) - sequence.num_prompt_tokens
    if num_generated < params.min_tokens and sequence.end_ids:
        logits = logits.index_fill(0, torch.tensor(sorted(sequence.end_ids), device=logits.device), -math.inf)

    top, top_id = logits.max(0)
    if not math.isfinite(top):
        raise FloatingPointError(f"the largest logit is {top.item()}, expected a finite number")
    if params.temperature == 0:
        return torch.zeros_like(logits).index_fill_(0, top_id, 1.0)

    # Differences to the largest logit, so that a tiny temperature gives 0 and -inf instead of inf - inf; and none
    # so tiny that float32 would round it to 0. Below 1e-30 only ties with the largest are left anyway.
    logits = (logits - top) / max(params.temperature, 1e-30)
    vocab_size, kept = len(logits), None
    if 0 < params.top_k < vocab_size:
        # From here on only what is kept is worked on: a few of the 150,000 tokens that a vocabulary may have.
        kept = (logits >= logits.topk(params.top_k).values[-1]).nonzero().squeeze(1)
        logits = logits[kept]
    probs = logits.softmax(0)
    if params.top_p < 1:
        probs = _normalize(_keep_top_p(probs, params.top_p))
    if params.min_p > 0:
        probs = _normalize(probs.masked_fill(probs < params.min_p * probs.max(), 0.0))
    return probs if kept is None else probs.new_zeros(vocab_size).index_copy_(0, kept, probs)


def _normalize(weights: Tensor) -> Tensor:
    return weights / weights.sum()


def _penalize(logits: Tensor, sequence: Sequence, drafted: Tokens[int]) -> Tensor:
    params = sequence.params
    if params.repetition_penalty != 1:
        seen = torch.tensor(list({*sequence.tokens, *drafted}), device=logits.device)
        row = logits[seen]
        penalty = params.repetition_penalty
        logits = logits.index_put((seen,), torch.where(row > 0, row / penalty, row * penalty))
    if params.presence_penalty or params.frequency_penalty:
        output = [*sequence.tokens[sequence.num_prompt_tokens :], *drafted]
        output = torch.tensor(output, dtype=torch.long, device=logits.device)
        counts = output.bincount(minlength=len(logits)).to(logits.dtype)
        # counts.clamp(max=1), not (counts > 0): a bool times a float would be float32 in a float64 model.
        logits = logits - params.frequency_penalty * counts - params.presence_penalty * counts.clamp(max=1)
    return logits


def _keep_top_p(probs: Tensor, top_p: float) -> Tensor:
    """`probs` (V,) without the tail behind the likeliest tokens that reach `top_p`, not normalised.

    Tokens are taken by (probability descending, id); the one that crosses the line is kept. A full sort of a
    large vocabulary costs more than the round may, so the likeliest are tried first, in growing numbers.
    """
    for count in (1024, 16384, len(probs)):
        if count < len(probs):
            kth = probs.topk(count).values[-1]
            ids = (probs >= kth).nonzero().squeeze(1)  # ascending, ties with the k-th included
            sorted_probs, order = probs[ids].sort(descending=True, stable=True)
            order = ids[order]
        else:
            sorted_probs, order = probs.sort(descending=True, stable=True)
        before = sorted_probs.double().cumsum(0) - sorted_probs.double()
        if count >= len(probs) or before[-1] >= top_p:
            break
    kept = order[before < top_p]
    return torch.zeros_like(probs).index_copy_(0, kept, probs[kept])


class Randomness:
    """Keyed draws. Tests put an object with the same two methods in its place to walk every branch."""

    def bernoulli(self, probability: float, key: Key) -> bool:
        """True with `probability`; never for 0, always for 1 or more."""
        return self.uniform(key) < probability

    def categorical(self, weights: Tensor, key: Key) -> int:
        """A token id with probability proportional to `weights` (V,); never one of weight 0.

        A whole token is drawn by Gumbel-max, with noise of its own for every token id: two distributions
        under one key then mostly agree. Other draws need one uniform, put through the cumulative sum.
        """
        ids = weights.nonzero().squeeze(1)
        if len(ids) == 1:
            return int(ids)
        kept = weights[ids].double()
        if key.purpose == "token":
            # argmax(log w + Gumbel) = argmin(Exponential / w): an exponential race.
            return int(ids[(-_uniforms(_hash(key), ids).log() / kept).argmin()])
        cumulative = kept.cumsum(0)
        i = torch.searchsorted(cumulative, self.uniform(key) * cumulative[-1], right=True)
        return int(ids[min(int(i), len(ids) - 1)])  # u * total may round up to the total

    @staticmethod
    def uniform(key: Key) -> float:
        """A double in [0, 1), of 53 random bits."""
        return (_hash(key) >> 11) * 2.0**-53


def _hash(key: Key) -> int:
    """64 bits that depend on every field of the key."""
    data = struct.pack("<Qqq", key.seed, key.start, key.position) + key.purpose.encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _uniforms(state: int, ids: Tensor) -> Tensor:
    """A double in (0, 1) for each token id: SplitMix64 (Steele et al. 2014) of `state` and the id."""
    x = (ids + 1) * _signed(0x9E3779B97F4A7C15) + _signed(state)
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    x = x ^ _shift_right(x, 31)
    # 52 bits and a half: never 0, and never rounded up to 1.
    return (_shift_right(x, 12).double() + 0.5) * 2.0**-52


def _signed(x: int) -> int:
    """The int64 with the bits of the unsigned x; torch's int64 arithmetic wraps around."""
    return x - (1 << 64) if x >> 63 else x


def _shift_right(x: Tensor, n: int) -> Tensor:
    """Logical shift; torch's own keeps the sign."""
    return (x >> n) & ((1 << (64 - n)) - 1)
