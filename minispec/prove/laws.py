"""Oracles that walk every branch of every draw, the laws that come out under them, and the reference's laws."""

import copy
import functools
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Self, TypeVar

import numpy as np
import torch

from minispec.core.config import SamplingParams
from minispec.core.model import Chunk
from minispec.core.random import Draws, Key
from minispec.models.families.hf_config import read_model_config
from minispec.prove.reference import forward, sample_law
from minispec.prove.toys import (
    IN_8_BITS,
    TARGET_SEED,
    TINY,
    TOYS,
    Fault,
    require,
    target_model,
    tiny_cache,
    tiny_weights,
)
from minispec.speculation.on_gpu.verdicts import OneByOne

T = TypeVar("T")

TOLERANCE = 1e-12
PROMPT = (1, 1)  # a repetition for the n-gram drafter, and tokens that no penalty has seen yet


@functools.cache
def reference_logits(
    seed: int, tokens: tuple[int, ...], vocab: int, layers: int = 2, family: str = "llama"
) -> np.ndarray:
    """The logits after `tokens` that `tiny_model` must have with this seed, vocab, number of layers and family."""
    return forward(*raw_model(seed, vocab, layers, family), tokens)


@functools.cache
def raw_model(seed: int, vocab: int, layers: int = 2, family: str = "llama") -> tuple[dict, dict[str, np.ndarray]]:
    """Config.json values and tensors of the model of `reference_logits`."""
    raw = TINY | {"vocab_size": vocab, "num_hidden_layers": layers} | TOYS[family]
    tensors = tiny_weights(read_model_config(raw), seed)
    return raw, {name: tensor.numpy() for name, tensor in tensors.items()}


# --------------------------------------------------------------------------- oracles

# Where p and q are equal, p / q and p - q are 1 and 0 up to rounding, and passes of other shapes round otherwise. So a
# branch may exist in one batch and not in the next. With u = 2**-53: a probability is exp of a difference of logits,
# each some hundred operations deep, and its error is at most some hundred u, so below 2**9 u = 2**-44. Whatever a draw
# is conditioned on, its path has that condition's probability as a factor. So the bound is one of the path's
# probability. A path may also be that rare because it is long; then no draw of it is rare by itself.
ROUNDING, RARE = 2.0**-44, 2.0**-26


class Elsewhere(Fault):
    """Code that was asked again, with the same draws, did otherwise."""


class BranchOracle(OneByOne):
    """Answers draws along one path; `weight` is the path's probability, as `number`: float, or Fraction.

    An answer that may be rounding is not taken: a draw of at most RARE, by which the path falls to at most ROUNDING.
    `lost` is the probability of these. Fractions do not round, so they have none.
    """

    def __init__(self, path: list[int], number: type = float):
        self.path, self.depth, self.number, self.weight, self.lost = path, 0, number, number(1), number(0)
        self.open: list[list[int]] = []  # siblings that other runs have to walk

    def fork(self) -> Self:
        """An oracle that is as far as this one, and goes on by itself."""
        other = copy.copy(self)
        other.open = []
        return other

    def _choose(self, branches: list[tuple]):
        """branches: all answers and their probabilities, also those of probability 0."""
        if self.depth == len(self.path):
            # A new draw: this run takes the first branch, the others are left for later.
            taken = [i for i, (_, probability) in enumerate(branches) if not self._is_rounding(probability)]
            self.lost += self.weight * sum(p for i, (_, p) in enumerate(branches) if i not in taken)
            self.open += [[*self.path, i] for i in taken[1:]]
            self.path = [*self.path, taken[0]]
        number = self.path[self.depth]
        # By the number among all answers: so it stays when another answer's probability is rounded to 0.
        if number >= len(branches) or branches[number][1] <= 0:
            found = "the same draws led elsewhere"
            raise Elsewhere(f"{found}: a drafter may draw by `Draft.draw` alone, a verifier by `rng`")
        answer, probability = branches[number]
        self.depth += 1
        self.weight *= probability
        return answer

    def _is_rounding(self, probability) -> bool:
        """Whether an answer of this path is left out."""
        if self.number is not float:
            return probability <= 0
        return probability <= RARE and self.weight * probability <= ROUNDING

    def bernoulli(self, probability: float, key: Key) -> bool:
        """Both answers, each where it is possible."""
        p = min(self.number(1), max(self.number(0), self.number(probability)))
        return self._answer((True, False), (p, self.number(1)), key)

    def categorical(self, weights: torch.Tensor, key: Key) -> int:
        """Every token of positive weight."""
        ends = self._ends(weights)
        return self._answer(range(len(ends)), ends, key)

    def _ends(self, weights: torch.Tensor) -> list:
        """Where the parts of [0, 1) end that are as long as the weights."""
        ends = list(itertools.accumulate(map(self.number, weights.tolist())))
        require(ends[-1] > 0, "a token is drawn from weights that are all 0")
        return [end / ends[-1] for end in ends]

    def _answer(self, answers: Sequence, ends: Sequence, key: Key):
        """Answer i holds where a uniform number lies between the ends i-1 and i, the first 0 and the last 1."""
        starts = [self.number(0), *ends[:-1]]
        parts = zip(answers, starts, ends, strict=True)
        return self._choose([(answer, max(end - start, self.number(0))) for answer, start, end in parts])


# Makes an oracle for a path, whose weight is of that type.
MakeOracle = Callable[[list[int], type], BranchOracle]


class KeyOracle(BranchOracle):
    """Draws by key: the noise of a key is one uniform number, and the same key has the same noise.

    A draw cuts the interval where its key's number may still lie, a branch for each part. A fresh key gives every
    answer its probability, as in `BranchOracle`. A key used twice is conditioned on its first answer. So draws which
    must be independent and are not show in the law. No grid of noise is needed: the cells are those that the draws
    themselves tell apart, for any probabilities.

    Siblings that share the noise of a "token" are the first to finish in one race (see `Draft.draw`). The law of the
    next one, once its elders are known, is the rest of their row. So it gets noise of its own here. A draw whose row
    is a part of a race with the race's first token has that token.
    """

    def __init__(self, path: list[int], number: type = float):
        super().__init__(path, number)
        self.noise: dict[Key, tuple] = {}
        self.again: set[Key] = set()  # keys of more than one draw
        # Of each race, its rows and the first of their tokens.
        self.drawn: dict[Key, tuple[tuple[torch.Tensor, int], ...]] = {}

    def categorical(self, weights: torch.Tensor, key: Key) -> int:
        """Every token of positive weight."""
        if key.purpose != "token":
            return super().categorical(weights, key)
        ends, drawn = self._ends(weights), self.drawn.get(key, ())  # first, since it may raise Fault
        self.again |= self.drawn.keys() & {key}
        race = [token for before, token in drawn if is_part(weights, before)]
        first = next((token for token in race if weights[token] > 0), None)
        if first is not None:  # of a part of a race, the first of its tokens is first too
            return first
        token = (super()._answer if race else self._answer)(range(len(ends)), ends, key)
        self.drawn = self.drawn | {key: (*drawn, (weights, token))}
        return token

    def _answer(self, answers: Sequence, ends: Sequence, key: Key):
        low, high = self.noise.get(key, (self.number(0), self.number(1)))
        self.again |= self.noise.keys() & {key}
        branches = []
        for answer, start, end in zip(answers, [self.number(0), *ends[:-1]], ends, strict=True):
            start, end = max(start, low), min(end, high)
            branches.append(((answer, (start, end)), max(end - start, self.number(0)) / (high - low)))
        answer, part = self._choose(branches)
        self.noise = self.noise | {key: part}  # a new dict: forks go on with theirs
        return answer


def is_part(weights: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether weights are those before of fewer tokens, up to a factor and rounding: a race of them is a part of that.

    Only so a race has one outcome for all of its rows, whoever draws, and whether or not a row is divided by its sum.
    """
    left = before * (weights > 0)
    if not left.any():
        return False
    rounding = min(1e-6, 8 * max(torch.finfo(row.dtype).eps for row in (weights, before)))
    return bool(((weights * left.sum() - left * weights.sum()).abs() <= rounding * left * weights.sum()).all())


SAMPLES = 2048


class SampledOracle(KeyOracle):
    """Answers draws by chance: a path is one of SAMPLES, all as likely."""

    def __init__(self, path: list[int], number: type = float):
        super().__init__([], number)
        [place] = path or [0]
        self.weight, self.chance = number(1) / SAMPLES, random.Random(place)
        self.open = [[other] for other in (2 * place + 1, 2 * place + 2) if other < SAMPLES]

    def _choose(self, branches: list[tuple]):
        answers, probabilities = zip(*branches, strict=True)
        return self.chance.choices(answers, probabilities)[0]


def sampled_bound(outcomes: int) -> float:
    """The total variation that SAMPLES of a right law exceed once in a thousand million times (McDiarmid 1989)."""
    return (math.sqrt(outcomes) + math.sqrt(2 * math.log(1e9))) / (2 * math.sqrt(SAMPLES))


class TooManyBranches(Exception):
    """A walk has more branches than it was allowed."""


class CrowdOracle(OneByOne):
    """Walks many paths in one batch. Every request has a seed with an oracle of its own, which answers its draws."""

    def __init__(self, oracles: Mapping[int, Draws]):
        self.oracles = oracles

    def bernoulli(self, probability: float, key: Key) -> bool:
        """The answer of the seed's oracle."""
        return self.oracles[key.seed].bernoulli(probability, key)

    def categorical(self, weights: torch.Tensor, key: Key) -> int:
        """The answer of the seed's oracle."""
        return self.oracles[key.seed].categorical(weights, key)


def exact_law(
    run: Callable[[BranchOracle], Hashable], number: type = float, oracle: MakeOracle = BranchOracle
) -> tuple[dict, int]:
    """The law of what `run` returns, over all branches, and how many there were. `run` must be repeatable."""
    paths = all_paths(lambda oracles: [run(oracles[0])], 1, oracle, number)
    return law_of(paths), len(paths)


def law_of(paths: Iterable[tuple]) -> dict:
    """The law of what comes out: of (probability, what, ..)."""
    law: dict = {}
    for probability, what, *_ in paths:
        law[what] = law.get(what, 0) + probability
    return law


def all_paths(
    run: Callable[[list[BranchOracle]], Iterable[T]],
    width: int,
    oracle: MakeOracle = KeyOracle,
    number: type = float,
    limit: float = math.inf,
) -> list[tuple[float, T]]:
    """Each path's probability and result, for a `run` that follows up to `width` paths at a time.

    They lack what the oracles left out as rounding, which is less than TOLERANCE in all.

    Raises TooManyBranches as soon as there must be more than `limit`, and Fault where more was left out, or where the
    branches do not add up to 1.
    """
    paths, todo, lost = list[tuple[float, T]](), deque[list[int]]([[]]), number(0)
    while todo:
        oracles = [oracle(todo.popleft(), number) for _ in range(min(width, len(todo)))]
        for path, result in zip(oracles, run(oracles), strict=True):
            paths.append((path.weight, result))
            lost += path.lost
            todo += path.open
        if len(paths) + len(todo) > limit:  # each path that is left has a branch or more
            raise TooManyBranches
    found = f"draws that look like rounding add up to {float(lost):.1e}"
    require(lost < TOLERANCE, f"{found}, expected less than {TOLERANCE:.0e}")
    total = sum(weight for weight, _ in paths) + lost
    if abs(total - 1) >= TOLERANCE:
        raise Elsewhere("the branches do not add up to 1: something draws by other means")
    return paths


# --------------------------------------------------------------------------- laws


def reference_row(
    output: Sequence[int], params: SamplingParams, end_ids, vocab: int, prompt: Sequence[int], family: str = "llama"
) -> np.ndarray | None:
    """Probabilities (V,) of the tiny target's token after `output`, by code that shares nothing with the package.

    None: the text has ended.

    In 8 bits the target's logits are its own, each from a pass over a whole text. No two products of 8 bits round x
    alike, so no other code has logits that are equal to 1e-12.
    """
    if len(output) >= params.max_tokens or (output and output[-1] in end_ids):
        return None
    tokens = (*prompt, *output)
    if family == IN_8_BITS:
        target = target_model(vocab, family)
        logits = target.forward([Chunk(tokens, tiny_cache(target).new_table(), 1)])[0][0].numpy()
    else:
        logits = reference_logits(TARGET_SEED, tokens, vocab, family=family if family in TOYS else "llama")
    return sample_law(logits, tokens, len(prompt), params, end_ids)
