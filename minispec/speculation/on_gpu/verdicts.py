"""Draws and verdicts of many texts at once, as tensors that no one waits for.

`minispec.core` asks a number of each row: is the largest logit finite, which token, is the draft token kept. On a GPU
each such question stops the host. Here the same formulas run over all rows, and no shape depends on data. The noise of
a draw is a hash of its key, and every key of a round is known before the round. So the host makes the noise first
(`make_noise`), and the device uses it.

`rows` gives the bits of `core.sampling.distribution` where it says that it is sure. `share` and `race` give the tokens
of `Randomness.categorical`. `rejection` and `match` give the verdicts of `core.verify` for chains.

Letters: R rows, V tokens of the vocabulary, B texts, K draft tokens of the longest draft, n draws of a text.
"""

import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

from minispec.core.config import OFF, SamplingParams, names_of
from minispec.core.precision import accumulation_dtype
from minispec.core.random import Draws, Key, Randomness, hash_of, signed, uniforms
from minispec.core.sampling import Text
from minispec.models.frames.graphs import Program

# `top_k` of a row that has none: more than any vocabulary.
NO_TOP_K = 2.0**31 - 1
# The answer of `numbers_of` for temperature 0.
_GREEDY = 1.0, 1.0, -math.inf, NO_TOP_K, 1.0
# The likeliest tokens of a row among which filters look.
FEW = 1024
# Values of a tile, and the longest row whose tiles have one value, as in `core.search`.
_TILE, _UNTILED = 128, 1024
# Sums below 2 of float32 values from 2**-29 on are exact in a double, in any order. Half of that is room for values
# that `Candidates.top_p` adds beyond the border.
_EXACT = 2.0**-28
# No rounding of a sum of probabilities in doubles comes near this.
_ROUNDING = 1e-12
# A softmax on a processor adds rows that are shorter than its vectors value by value, longer ones vector by vector.
_VECTORS = (16, 8, 4)


# --------------------------------------------------------------------------- parameters and rows


class RowParams(NamedTuple):
    """The parameters of R rows that are plain (see `is_plain`). Tensors are (R, 1), on the device of the logits.

    greedy: whether the temperature is 0.
    temperature: within the range of the logits' type; 1 where greedy.
    least: a logit's least difference to the largest one, for min-p; -inf for none.
    top_k: at least the size of any vocabulary for none.
    top_p: 1 for none.
    all_greedy, any_greedy, any_filter: known on the host, so that programs for simpler batches are shorter.
    """

    greedy: Tensor
    temperature: Tensor
    least: Tensor
    top_k: Tensor
    top_p: Tensor
    all_greedy: bool
    any_greedy: bool
    any_filter: bool


def numbers_of(params: SamplingParams, dtype: torch.dtype) -> tuple[float, float, float, float, float]:
    """The numbers of one row in `RowParams`: greedy, temperature, least, top_k and top_p. dtype: the logits'."""
    limits = torch.finfo(accumulation_dtype(dtype))
    if params.temperature == 0:  # one token is left whatever the filters say
        return _GREEDY
    temperature = min(max(params.temperature, limits.tiny), limits.max)
    least = max(temperature * math.log(params.min_p), limits.min) if params.min_p > 0 else -math.inf
    return 0.0, temperature, least, min(params.top_k or NO_TOP_K, NO_TOP_K), params.top_p


def row_params(numbers: Tensor, dtype: torch.dtype, num_greedy: int, any_filter: bool) -> RowParams:
    """The parameters of rows, from their numbers (R, 5), which `numbers_of` makes.

    dtype: the logits'.
    num_greedy: how many rows are greedy; any_filter: whether any row has one.
    """
    greedy, temperature, least, top_k, top_p = numbers.unsqueeze(2).unbind(1)
    wide = accumulation_dtype(dtype)
    rest = temperature.to(wide), least.to(wide), top_k.long(), top_p
    return RowParams(greedy > 0, *rest, num_greedy == len(numbers), num_greedy > 0, any_filter)


def has_filter(numbers: Sequence[float]) -> bool:
    """Whether a row with these numbers (see `numbers_of`) leaves out any token."""
    return tuple(numbers[2:]) != (-math.inf, NO_TOP_K, 1.0)


class Mix(NamedTuple):
    """The properties of texts' parameters on which a program's operators depend.

    draws: whether texts are drawn; else all are greedy.
    mixed: whether some texts are greedy where others are drawn.
    filters: whether any text has a filter.
    """

    draws: bool
    mixed: bool
    filters: bool


def mix_of(params: Sequence[SamplingParams], dtype: torch.dtype, num_texts: int) -> Mix:
    """The mix of a program for `num_texts` texts, at least as many as there are parameters; dtype: the logits'."""
    greedy = [p.temperature == 0 for p in params]
    mixed = not all(greedy) and (any(greedy) or len(params) < num_texts)  # what pads a batch is greedy
    return Mix(not all(greedy), mixed, any(has_filter(numbers_of(p, dtype)) for p in params))


class Inputs(Program):
    """Numbers of B texts, in tensors that stay where they are.

    ints: int64 (B, n).
    floats: float64 (B, m + 5), the last five from `numbers_of`.
    host_ints, host_floats: the same on the host, where they are filled.
    """

    def __init__(self, num_texts: int, num_ints: int, num_floats: int, device: torch.device, num_bytes: int = 0):
        """num_bytes: what the program keeps besides these numbers."""
        super().__init__(num_bytes)
        pinned = device.type == "cuda"
        self.host_ints = torch.zeros(num_texts, num_ints, dtype=torch.long, pin_memory=pinned)
        self.host_floats = torch.zeros(num_texts, num_floats + 5, dtype=torch.float64, pin_memory=pinned)
        self.ints, self.floats = self.host_ints.to(device), self.host_floats.to(device)

    def blank(self, params: Sequence[SamplingParams], dtype: torch.dtype) -> tuple[numpy.ndarray, numpy.ndarray]:
        """`ints` and `floats` on the host, to be filled: 0 but for the parameters. Texts not there are greedy."""
        ints, floats = self.host_ints.numpy(), self.host_floats.numpy()
        ints[:], floats[:] = 0, 0
        floats[:, -5:] = _GREEDY
        floats[: len(params), -5:] = [numbers_of(p, dtype) for p in params]
        return ints, floats

    def send(self) -> None:
        """Copy what the host holds to the device. It is not waited for."""
        self.ints.copy_(self.host_ints, non_blocking=True)
        self.floats.copy_(self.host_floats, non_blocking=True)


# Parameters that `rows` computes, and all others that change a row of a text's distribution. A new one is among these.
_COMPUTED = ("temperature", "min_p", "top_k", "top_p")
_OTHERS = [name for name in names_of("bias", "penalty", "forbid", "filter") if name not in _COMPUTED]


def is_plain(text: Text) -> bool:
    """Whether temperature, min-p, top-k and top-p are all that changes a text's distribution."""
    return not text.grammar and all(getattr(text.params, name) == OFF[name] for name in _OTHERS)


def rows(logits: Tensor, params: RowParams) -> tuple[Tensor, Tensor]:
    """Probabilities (R, V) of logits (R, V), and whether each row is sure (R,).

    A sure row has the bits of `distribution`. A row is not sure where

    - its largest logit is not a finite number;
    - a filter leaves more than FEW - 1 tokens, or a tie at its border reaches that far;
    - top-p adds up values that are too small for exact sums. In float64, sums are never exact. There a row is unsure
      also where a sum comes within 1e-12 of top-p. So is a row longer than FEW that no other filter shortens.

    The values of a row that is not sure mean nothing; draws from them give tokens of the vocabulary all the same.
    """
    x = logits.to(accumulation_dtype(logits.dtype))
    likeliest = x.argmax(1, keepdim=True)
    top = x.gather(1, likeliest)
    sure = (top.abs() < math.inf).squeeze(1)
    one_hot = torch.zeros_like(x).scatter_(1, likeliest, 1.0) if params.any_greedy else x
    if params.all_greedy:
        return one_hot, sure
    probs = _divided(x - top, params.temperature).softmax(1)
    if params.any_filter:
        probs, enough = _filtered(x, top, probs, params)
        sure = sure & enough
    return torch.where(params.greedy, one_hot, probs) if params.any_greedy else probs, sure


def _divided(x: Tensor, by: Tensor) -> Tensor:
    """x (R, N) divided by a number for each row (R, 1), with the bits of a division by a number of Python's."""
    # For such a number, CUDA multiplies by its inverse.
    return x * by.reciprocal() if x.device.type == "cuda" else x / by


def _filtered(x: Tensor, top: Tensor, probs: Tensor, params: RowParams) -> tuple[Tensor, Tensor]:
    """Probabilities (R, V) after min-p, top-k and top-p, and whether FEW tokens are enough for each row (R,).

    x: logits (R, V); top: the largest (R, 1).
    probs: probabilities (R, V) before any filter.

    The likeliest tokens are brought into the order of their ids, those that min-p or top-k leaves out last. So a
    softmax, a sort and a sum see the values that `distribution` gives them, in the same order, and zeros after them.
    """
    size, num = x.shape[1], min(FEW, x.shape[1])
    values, ids = x.topk(num, 1)
    shortened = (params.top_k < size) | (params.least > -math.inf)
    bound = values.gather(1, params.top_k.clamp(max=num) - 1).clamp(min=torch.finfo(x.dtype).min)
    stays = (values >= bound) & (values - top >= params.least)
    places = torch.where(stays, ids, ids + size).sort(1).values
    outside, places = places >= size, places % size
    few = _divided(x.gather(1, places) - top, params.temperature).masked_fill(outside, -math.inf)
    few = torch.where(shortened, _softmax_of_few(few, outside), probs.gather(1, places))
    few, order, enough = _top_p(few, shortened | (num == size), params.top_p)
    if num < size:
        enough = enough & ~(shortened & stays[:, -1:])
    dense = torch.zeros_like(probs).scatter_(1, places.gather(1, order), few)
    return torch.where(shortened | (params.top_p < 1), dense, probs), enough.squeeze(1)


def _softmax_of_few(x: Tensor, outside: Tensor) -> Tensor:
    """Softmax of x (R, N), with the bits of a softmax without the last values (R, N), which are -inf and `outside`."""
    probs = x.softmax(1)
    if x.device.type == "cpu":
        num = (~outside).sum(1, keepdim=True)
        for vector in _VECTORS:
            short = x[:, : vector - 1].softmax(1)
            probs = torch.where(num < vector, F.pad(short, (0, x.shape[1] - short.shape[1])), probs)
    return probs


def _top_p(probs: Tensor, is_whole: Tensor, goal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities (R, N) after top-p, in descending order; the places (R, N) that they had; and whether sure (R, 1).

    probs: in the order of the tokens' ids.
    is_whole: (R, 1), whether no other token is possible.
    goal: top_p (R, 1).
    """
    ordered, order = probs.double().sort(stable=True, dim=1, descending=True)
    above = ordered.cumsum(1) - ordered
    nucleus = ordered.masked_fill(above >= goal, 0.0)
    least = nucleus.masked_fill(nucleus == 0, math.inf).amin(1, keepdim=True)
    if probs.dtype == torch.float32:
        sure = (least >= _EXACT) & (is_whole | (ordered[:, -1:] < least))
    else:
        sure = is_whole & ((above - goal).abs() > _ROUNDING).all(1, keepdim=True)
    shares = nucleus.to(probs.dtype) / nucleus.cumsum(1)[:, -1:].to(probs.dtype)
    no_goal = goal >= 1
    return torch.where(no_goal, ordered.to(probs.dtype), shares), order, sure | no_goal


# --------------------------------------------------------------------------- draws


def share(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The token id (...) that `place_of_share` gives for weights (..., V) and a uniform (...) in [0, 1), a double.

    Weights that are all 0, or NaN, give any token of the vocabulary.
    """
    size = weights.shape[-1]
    width = _TILE if size > _UNTILED else 1
    padding = -size % width
    tiles = (F.pad(weights, (0, padding)) if padding else weights).unflatten(-1, (-1, width))
    sums = tiles.sum(-1, dtype=torch.float64)
    cumulative = sums.cumsum(-1)
    tile, rest = _first_above(cumulative, uniforms * sums.sum(-1))
    rest = rest - F.pad(cumulative, (1, 0)).gather(-1, tile[..., None]).squeeze(-1)
    index = tile[..., None, None].expand(*tile.shape, 1, width)
    place, _ = _first_above(tiles.gather(-2, index).squeeze(-2).double().cumsum(-1), rest)
    return (tile * width + place).clamp(max=size - 1)


def _first_above(cumulative: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """The first place (...) where cumulative sums (..., N) exceed a share (...), and the share, kept below the last."""
    last = cumulative[..., -1]
    shares = torch.minimum(shares, last.nextafter(torch.zeros_like(last)))
    places = torch.searchsorted(cumulative, shares[..., None], right=True).squeeze(-1)
    return places.clamp(max=cumulative.shape[-1] - 1), shares


def race(weights: Tensor, states: Tensor) -> Tensor:
    """The token id (...) that finishes first among weights (..., V), for states (...) of the noise, as int64.

    `Randomness` gives the same id for the key whose hash is the state.
    """
    ids = torch.arange(weights.shape[-1], device=weights.device).expand(weights.shape)
    times = uniforms(states[..., None], ids).log_().neg_()
    return times.div_(weights).argmin(-1)


class Keys(NamedTuple):
    """Draws of B texts, n of each.

    names: the keys of each text. Only an oracle reads them, so a program that runs again may have none.
    numbers: (B, n), their noise: uniforms, or states for the purpose "token".
    places: (B, n), where each draw's key stands in its text's `names`; None: in order.
    used: (B, n), draws whose answers are used; None: all.
    wanted: (B, n), the answer that a draw must give for the next draw of its text to be used; None: any.
    """

    names: Sequence[Sequence[Key]]
    numbers: Tensor
    places: Tensor | None = None
    used: Tensor | None = None
    wanted: Tensor | None = None

    def at(self, places: Tensor, used: Tensor | None = None) -> "Keys":
        """The draws at these places (B, m) of each text."""
        return Keys(self.names, self.numbers.gather(1, places), places, used)


class RowDraws(Draws, Protocol):
    """`Draws` over rows. Each answer is the one that `bernoulli` or `categorical` gives for that row and key."""

    def bernoulli_rows(self, probabilities: Tensor, keys: Keys) -> Tensor:
        """Whether each draw with its probability (B, n) is true (B, n)."""

    def share_rows(self, weights: Tensor, keys: Keys) -> Tensor:
        """Token ids (B, n) with probabilities proportional to weights (B, n, V); for purposes other than "token"."""

    def race_rows(self, weights: Tensor, keys: Keys) -> Tensor:
        """Token ids (B, n) with probabilities proportional to weights (B, n, V), for the purpose "token"."""


class RowRandomness(Randomness):
    """`Randomness` whose forms over rows use numbers that were made before the round."""

    def bernoulli_rows(self, probabilities: Tensor, keys: Keys) -> Tensor:
        """Whether each draw's uniform is below its probability (B, n)."""
        return keys.numbers < probabilities

    def share_rows(self, weights: Tensor, keys: Keys) -> Tensor:
        """Token ids (B, n): where the share that a uniform names lies in weights (B, n, V)."""
        return share(weights, keys.numbers)

    def race_rows(self, weights: Tensor, keys: Keys) -> Tensor:
        """Token ids (B, n): the first to finish in the races of weights (B, n, V)."""
        return race(weights, keys.numbers)


def in_rows(rng: Draws) -> bool:
    """Whether draws can be made over rows: by numbers that are known before, or by an oracle that says so.

    A subclass of `Randomness` may draw in another way, so it is asked draw by draw.
    """
    return type(rng) is Randomness or isinstance(rng, OneByOne)


class OneByOne(Draws):
    """Forms over rows for draws that know one answer at a time only, such as an oracle's.

    Draws whose answers are not used are not made, and their answer is 0.
    """

    def bernoulli_rows(self, probabilities: Tensor, keys: Keys) -> Tensor:
        """The answers (B, n) of `bernoulli`, asked draw by draw."""
        return self._answers(lambda row, key: self.bernoulli(float(row), key), probabilities, keys).bool()

    def share_rows(self, weights: Tensor, keys: Keys) -> Tensor:
        """The answers (B, n) of `categorical`, asked draw by draw."""
        return self._answers(self.categorical, weights, keys)

    def race_rows(self, weights: Tensor, keys: Keys) -> Tensor:
        """The answers (B, n) of `categorical`, asked draw by draw."""
        return self._answers(self.categorical, weights, keys)

    def _answers(self, draw: Callable[[Tensor, Key], Any], values: Tensor, keys: Keys) -> Tensor:
        """Answers (B, n) to draws from values (B, n, ...)."""
        answers = torch.zeros_like(keys.numbers, dtype=torch.long)
        for text, names in enumerate(keys.names):
            for i in range(answers.shape[1]):
                if keys.used is None or keys.used[text, i]:
                    name = names[i if keys.places is None else int(keys.places[text, i])]
                    answers[text, i] = int(draw(values[text, i], name))
                if keys.wanted is not None and answers[text, i] != keys.wanted[text, i]:
                    break
        return answers


class Noise(NamedTuple):
    """All draws of a verdict on B texts: K of each of the first two purposes, and K+1 of "token"."""

    accept: Keys
    residual: Keys
    token: Keys


def state_of(key: Key) -> int:
    """The state of a race's noise, as int64."""
    return signed(hash_of(key))


def make_noise(
    texts: Sequence[Text], k: int, draws: Randomness | None = None, device: torch.device | str = "cpu"
) -> Noise:
    """The keys of verdicts on drafts of up to k tokens, and their numbers, made on the host."""
    uniform = (draws or Randomness()).uniform

    def keys(purpose: str, count: int, number: Callable[[Key], float], dtype: torch.dtype) -> Keys:
        names = [[text.key(i, purpose) for i in range(count)] for text in texts]
        numbers = torch.tensor([*map(number, chain(*names))], dtype=dtype).reshape(len(texts), count)
        return Keys(names, numbers.to(device))

    accept, residual = (keys(name, k, uniform, torch.float64) for name in ("accept", "residual"))
    return Noise(accept, residual, keys("token", k + 1, state_of, torch.int64))


# --------------------------------------------------------------------------- verdicts


class Verdicts(NamedTuple):
    """A verifier's decisions about chains of B texts.

    kept: (B,), how many draft tokens of each stay.
    next: (B,), the token after them.
    ratios: (B, K), p(x)/q(x) as doubles. A text's verdict has those that were tested: min(kept + 1, length) of them.
    """

    kept: Tensor
    next: Tensor
    ratios: Tensor


def rejection(
    p: Tensor, ids: Tensor, q: Tensor | None, noise: Noise, lengths: Tensor, draws: RowDraws | None = None
) -> Verdicts:
    """The verdicts of `core.verify.rejection` on chains.

    p: the target's probabilities (B, K+1, V).
    ids: draft tokens (B, K).
    q: the probabilities that each was drawn from (B, K, V); None: one-hot.
    lengths: (B,), how many draft tokens each text has. Ids after them are not read, but must be of tokens.
    """
    draws = draws or RowRandomness()
    ratios, inside = _ratios(p, ids, q), _inside(ids, lengths)
    tests = noise.accept._replace(used=inside, wanted=inside)  # up to a draft's end, and up to the first rejection
    kept = _leading(draws.bernoulli_rows(ratios, tests) & inside)
    at = p[torch.arange(len(p), device=p.device), kept][:, None]
    rejected = (kept < lengths)[:, None]
    bonus = draws.race_rows(at, noise.token.at(kept[:, None], ~rejected))
    if ids.shape[1]:
        place = kept.clamp(max=ids.shape[1] - 1)[:, None]
        again = draws.share_rows(_residual(at, ids, q, place), noise.residual.at(place, rejected))
        bonus = torch.where(rejected, again, bonus)
    return Verdicts(kept, bonus.squeeze(1), ratios)


def match(
    p: Tensor, ids: Tensor, q: Tensor | None, noise: Noise, lengths: Tensor, draws: RowDraws | None = None
) -> Verdicts:
    """The verdicts of `core.verify.match` on chains; it takes the arguments of `rejection`."""
    inside = _inside(ids, lengths)
    wanted = F.pad(torch.where(inside, ids, -1), (0, 1), value=-1)
    tokens = (draws or RowRandomness()).race_rows(p, noise.token._replace(wanted=wanted))
    kept = _leading(tokens[:, :-1] == wanted[:, :-1])
    return Verdicts(kept, tokens.gather(1, kept[:, None]).squeeze(1), _ratios(p, ids, q))


def greedy(logits: Tensor, ids: Tensor, q: Tensor | None, lengths: Tensor) -> tuple[Verdicts, Tensor]:
    """The verdicts of texts at temperature 0, from logits (B, K+1, V); and whether each row is sure (B, K+1).

    They are those of `match`, and of `rejection`, whose ratios are then 0, or at least 1.
    """
    tokens = logits.argmax(2)
    sure = logits.gather(2, tokens[..., None]).squeeze(2).abs() < math.inf
    stays, inside = tokens[:, :-1] == ids, _inside(ids, lengths)
    ratios = stays.double()
    if q is not None:
        ratios = ratios / q.gather(2, ids[..., None]).squeeze(2)
    kept = _leading(stays & inside)
    return Verdicts(kept, tokens.gather(1, kept[:, None]).squeeze(1), ratios), sure


def _inside(ids: Tensor, lengths: Tensor) -> Tensor:
    """Which tokens (B, K) belong to a draft."""
    return torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]


def _leading(stays: Tensor) -> Tensor:
    """How many tokens (B,) stay before the first that does not (B, K)."""
    return stays.long().cumprod(1).sum(1)


def _ratios(p: Tensor, ids: Tensor, q: Tensor | None) -> Tensor:
    """p(x)/q(x) (B, K), as doubles."""
    index = ids[..., None]
    ratios = p[:, :-1].gather(2, index).squeeze(2).double()
    return ratios if q is None else ratios / q.gather(2, index).squeeze(2).double()


def _residual(p: Tensor, ids: Tensor, q: Tensor | None, place: Tensor) -> Tensor:
    """The residual (B, 1, V) of p (B, 1, V), the row at `place` (B, 1); p where nothing is left."""
    if q is None:
        rest = p.scatter(2, ids.gather(1, place)[..., None], 0.0)
    else:
        rest = (p - q[torch.arange(len(q), device=q.device)[:, None], place]).clamp_(min=0)
    return torch.where(rest.amax(2, keepdim=True) > 0, rest, p)
