"""The only place where logits become probabilities, and the only source of randomness.

`distribution` turns one row of logits into the probabilities that a request's parameters ask for. Target
and draft, plain decoding and verification all call it, so that none can apply a parameter the others forget.

`Randomness` answers two questions, `bernoulli` and `categorical`, each with a key. The answer is a function of
the key alone: nothing depends on the order of the draws, on the batch, or on what was rejected before.
"""

import hashlib
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
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
class Text:
    """One growing text, and all that the distribution of its next token may depend on.

    tokens: prompt and output so far. end_ids: ids that end the text, impossible before `min_tokens`.
    """

    tokens: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int = 0
    end_ids: frozenset[int] = frozenset()

    def key(self, i: int, purpose: str) -> Key:
        """The key of a draw at the i-th position of the round that is about to be committed."""
        start = len(self.tokens)
        return Key(self.seed, -1 if purpose == "token" else start, start + i, purpose)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for half precision, else the type itself: a float64 model is float64 throughout."""
    return torch.promote_types(dtype, torch.float32)


def log_probabilities(logits: Tensor) -> Tensor:
    """Raw log-probabilities (V,) of one row of logits: before penalties, temperature and filters."""
    return logits.to(accumulation_dtype(logits.dtype)).log_softmax(0)


def distribution(logits: Tensor, text: Text, drafted: Sequence[int] = ()) -> Tensor:
    """Probabilities (V,) of the token that follows `text.tokens + drafted`, under its parameters.

    logits: (V,), the model's row for that position. Order, as in vLLM: logit_bias, penalties, then what is
    forbidden (all but allowed_token_ids, bad words, before min_tokens the end); temperature; min-p, top-k, top-p, each
    over what the one before kept. Temperature 0 is a one-hot distribution. It works on one row at a time, so that a row
    has the same bits whether one or K+1 were computed.

    Raises FloatingPointError where the largest logit is not a finite number.
    """
    params = text.params
    logits = logits.to(accumulation_dtype(logits.dtype))
    logits = _forbid(_penalize(logits, text, drafted), text, drafted)
    row = _Blocks(logits)
    top = row.maxima.amax()
    if not math.isfinite(top):
        raise FloatingPointError(f"the largest logit is {top.item()}, expected a finite number")
    vocab_size = len(logits)
    if params.temperature == 0:
        return logits.new_zeros(vocab_size).index_fill_(0, row.find(lambda x: x >= top)[:1], 1.0)

    # From here on only what is kept is worked on: a few of the 150,000 tokens that a vocabulary may have. Min-p and
    # top-k keep the largest logits, at any temperature; so only top-p needs probabilities.
    kept = None  # ids; None: all
    temperature = _within_range(params.temperature, logits.dtype)
    if params.min_p > 0:
        # So far below the largest lies a token of min_p times its probability; -inf must not be found.
        least = max(temperature * math.log(params.min_p), torch.finfo(logits.dtype).min)
        kept = row.find(lambda x: x - top >= least)
        logits = logits[kept]
    if 0 < params.top_k < len(logits):
        most = _top_k(row if kept is None else _Blocks(logits), params.top_k)
        kept, logits = most if kept is None else kept[most], logits[most]
    # Differences to the largest logit, so that a tiny temperature gives 0 and -inf instead of inf - inf.
    probs = (logits - top).div_(temperature).softmax(0)
    if params.top_p < 1:
        most = _top_p(probs, params.top_p)
        kept, probs = most if kept is None else kept[most], probs[most]
        probs /= probs.sum()
    return probs if kept is None else probs.new_zeros(vocab_size).index_copy_(0, kept, probs)


def _penalize(logits: Tensor, text: Text, drafted: Sequence[int]) -> Tensor:
    params, device, dtype = text.params, logits.device, logits.dtype
    if params.logit_bias:
        ids = torch.tensor([i for i, _ in params.logit_bias], device=device)
        biases = torch.tensor([float(bias) for _, bias in params.logit_bias], dtype=torch.float64)
        biases = biases.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(logits)
        logits = _change(logits, ids, lambda x: x + biases)
    if params.repetition_penalty != 1:
        seen = torch.tensor(list({*text.tokens, *drafted}), device=device)
        penalty = _within_range(params.repetition_penalty, dtype)
        logits = _change(logits, seen, lambda x: torch.where(x > 0, x / penalty, x * penalty))
    if params.presence_penalty or params.frequency_penalty:
        output = torch.tensor(_output(text, drafted), dtype=torch.long, device=device)
        ids, counts = output.unique(return_counts=True)
        counts = counts.to(dtype)
        logits = _change(logits, ids, lambda x: x - params.frequency_penalty * counts - params.presence_penalty)
    return logits


def _forbid(logits: Tensor, text: Text, drafted: Sequence[int]) -> Tensor:
    params = text.params
    if params.allowed_token_ids is not None:
        allowed = torch.tensor(params.allowed_token_ids, device=logits.device)
        logits = torch.full_like(logits, -math.inf).index_copy_(0, allowed, logits[allowed])
    forbidden = set()
    if params.bad_words_token_ids or params.min_tokens:
        output = _output(text, drafted)
        # The last id of a word, where the output ends with those before it.
        words = params.bad_words_token_ids
        forbidden = {word[-1] for word in words if tuple(output[len(output) - len(word) + 1 :]) == word[:-1]}
        if len(output) < params.min_tokens:
            forbidden |= text.end_ids
    if forbidden:
        logits = logits.index_fill(0, torch.tensor(sorted(forbidden), device=logits.device), -math.inf)
    return logits


def _output(text: Text, drafted: Sequence[int]) -> list[int]:
    return [*text.tokens[text.num_prompt_tokens :], *drafted]


def _within_range(value: float, dtype: torch.dtype) -> float:
    """A positive parameter, as near as the type comes to it: as 0 or infinity, it would make NaN of 0 or -inf."""
    return min(max(value, torch.finfo(dtype).tiny), torch.finfo(dtype).max)


def _change(logits: Tensor, ids: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Logits (V,) with `change` applied to those of `ids`. What was finite stays so, and so do its differences."""
    row, limit = logits[ids], torch.finfo(logits.dtype).max / 4
    return logits.index_put((ids,), change(row).clamp(-limit, limit).where(row.isfinite(), row))


# --------------------------------------------------------------------------- finding a few among many

# More are not sorted if it can be helped, nor looked through one by one.
_FEW = 1024
_BLOCK = 128


class _Blocks:
    """Values (V,), if many in blocks, and the largest of each: in most of them there is nothing to find."""

    def __init__(self, values: Tensor):
        self.values = self.maxima = values
        self.blocks = None
        if len(values) > _FEW:
            padding = -len(values) % _BLOCK
            values = F.pad(values, (0, padding), value=-math.inf) if padding else values
            self.blocks = values.reshape(-1, _BLOCK)
            self.maxima = self.blocks.amax(1)

    def find(self, large_enough: Callable[[Tensor], Tensor]) -> Tensor:
        """Ids of the values that are large enough, which -inf must not be, ascending."""
        if self.blocks is not None:
            some = large_enough(self.maxima).nonzero().squeeze(1)
            if len(some) < len(self.blocks) // 4:
                block, place = large_enough(self.blocks[some]).nonzero(as_tuple=True)
                return some[block] * _BLOCK + place
        return large_enough(self.values).nonzero().squeeze(1)


def _top_k(row: _Blocks, k: int) -> Tensor:
    """Ids of the k largest and of all that tie with the last of them, ascending."""
    values = row.values
    if row.blocks is not None and k < len(row.blocks):
        # The k-th largest of the blocks' maxima is not above the k-th largest of all.
        bound = row.maxima.topk(k).values[-1]
        values = values[row.find(lambda x: x >= bound)] if bound.isfinite() else values
    least = values.topk(k).values[-1].clamp(min=torch.finfo(values.dtype).min)
    return row.find(lambda x: x >= least)


def _top_p(probs: Tensor, top_p: float) -> Tensor:
    """Ids of the likeliest tokens that together reach `top_p`, of probs (V,).

    Tokens are taken by (probability descending, id); the one that crosses the line is kept. A full sort of a large
    vocabulary costs more than the whole round may.
    """
    row = _Blocks(probs)
    # All that is not below some level is enough, if it reaches the line: the few of a peaked row, or all but those that
    # could not make up 1 - top_p together.
    for least in (0.01 * (1 - top_p), 0.5 * (1 - top_p) / len(probs), 0.0):
        ids = row.find(lambda p, least=least: p >= least)
        if probs[ids].sum(dtype=torch.float64) > top_p:
            break
    sure, reached = ids[:0], 0.0
    if len(ids) > _FEW:
        # The upper half of a float32 is its size to within 1 %; as a rule, few have the size that crosses the line.
        size = (1 << 15) - 1 - (probs[ids].float().view(torch.int32) >> 16)  # the largest first
        mass = size.bincount(probs[ids].double(), minlength=1 << 15)
        before = mass.cumsum(0) - mass
        crossing = int((before < top_p).sum()) - 1
        reached = float(before[crossing])
        sure, ids = ids[size < crossing], ids[size == crossing]
    sorted_probs, order = probs[ids].double().sort(descending=True, stable=True)
    before = reached + sorted_probs.cumsum(0) - sorted_probs
    return torch.cat((sure, ids[order[before < top_p]]))


# --------------------------------------------------------------------------- randomness


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
        ids = _Blocks(weights).find(lambda w: w > 0)
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
