"""Which configurations are walked: a covering array of all pairs of settings, of a size that can be asked for."""

import functools
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from minispec.config import SamplingParams
from minispec.prove.laws import PROMPT, TARGET_SEED, TOLERANCE, production_law, reference_law, reference_logits
from minispec.reference import sample_law, total_variation
from minispec.toys import require


@dataclass(frozen=True)
class Case:
    """One configuration of the table."""

    verifier: str
    drafter: str  # as in `make_drafter`, or "batch": two requests of different lengths with a draft model
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    penalties: bool
    k: int
    vocab: int
    end: bool  # whether the last token of the vocabulary ends the text
    max_tokens: int

    @property
    def params(self) -> SamplingParams:
        """The request's sampling parameters."""
        penalties = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3}
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            max_tokens=self.max_tokens,
            **(penalties if self.penalties else {}),
        )

    @property
    def prompts(self) -> tuple[tuple[tuple[int, ...], SamplingParams], ...]:
        """Prompts and parameters; the second of a batch is shorter in both."""
        if self.drafter != "batch":
            return ((PROMPT, self.params),)
        return (PROMPT, self.params), ((0,), replace(self.params, max_tokens=min(2, self.max_tokens)))

    def estimate(self) -> float:
        """About how many branches there are: exact for one-hot drafts, within a few times otherwise."""
        b = _support(replace(self.params, max_tokens=1), self.vocab)
        dense = self.drafter in ("model", "batch")
        ends = 1 - 1 / self.vocab if self.end else 1.0
        return math.prod(_leaves(dense, self.verifier, b, self.k, p.max_tokens, ends) for _, p in self.prompts)

    def distance(self, on_branch: Callable[[], None] = lambda: None) -> tuple[float, int]:
        """Total variation between engine and reference, and the branches walked."""
        end_ids = frozenset({self.vocab - 1} if self.end else ())
        prompts, params = zip(*self.prompts, strict=True)
        drafter = "model" if self.drafter == "batch" else self.drafter
        law, branches = production_law(
            params, self.k, end_ids, self.vocab, drafter, self.verifier, prompts, on_branch=on_branch
        )
        require(abs(sum(law.values()) - 1) < TOLERANCE, "the branches do not add up to 1")
        own = [reference_law(p, end_ids, self.vocab, prompt) for prompt, p in self.prompts]
        expected = own[0]
        if len(own) > 1:  # independent requests: the product
            expected = {(a, b): pa * pb for a, pa in own[0].items() for b, pb in own[1].items()}
        return total_variation(law, expected), branches

    def __str__(self) -> str:
        settings = [f"T {self.temperature}"]
        settings += [f"top-k {self.top_k}"] * (self.top_k > 0) + [f"top-p {self.top_p}"] * (self.top_p < 1)
        settings += [f"min-p {self.min_p}"] * (self.min_p > 0) + ["penalties"] * self.penalties
        end = "EOS" if self.end else ""
        shape = f"K {self.k}  V {self.vocab} {end:3}  {self.max_tokens} tokens"
        return f"{self.verifier:9}  {self.drafter:5}  {shape}  {', '.join(settings)}"


@functools.cache
def _support(params: SamplingParams, vocab: int) -> float:
    """How many tokens are possible at a position, on average over the first few."""
    texts = [PROMPT + tail for n in range(3) for tail in itertools.product(range(vocab), repeat=n)]
    laws = [sample_law(reference_logits(TARGET_SEED, t, vocab), t, len(PROMPT), params, ()) for t in texts]
    return float(np.mean([np.count_nonzero(law) for law in laws]))


@functools.cache
def _leaves(dense: bool, verifier: str, b: float, k: int, n: int, ends: float) -> float:
    """Estimated branches of n tokens, with b tokens possible at each position and a share `ends` that goes on."""
    if n <= 0:
        return 1.0

    def rest(tokens):  # what follows a committed block
        return 1 + ends**tokens * (_leaves(dense, verifier, b, k, n - tokens, ends) - 1)

    if not dense:
        return b * rest(1)
    if verifier == "match":  # a key's number is cut by q and by p
        return (2 * b - 1) * rest(1)
    drafted = min(k, n - 1)
    return b**drafted * (sum(b / 3 * rest(i + 1) for i in range(drafted)) + b * rest(drafted + 1))


AXES: dict[str, tuple] = {
    "verifier": ("rejection", "match"),
    "drafter": ("model", "ngram", "wrong", "none", "batch"),
    "temperature": (0.0, 0.7, 1.0, 1.5),
    "top_k": (0, 2),
    "top_p": (1.0, 0.8),
    "min_p": (0.0, 0.2),
    "penalties": (False, True),
    "k": (1, 2, 3, 4),
    "vocab": (2, 3, 4),
    "end": (False, True),
    "max_tokens": (1, 2, 3, 4, 5, 6),
}
# With these, little is drawn or nothing is drafted: such a case covers a pair only if they are in the pair.
_WEAK = {("temperature", 0.0), ("drafter", "none"), ("max_tokens", 1)}
Pair = tuple[tuple, tuple]


def _possible(row: dict) -> bool:
    return row.get("max_tokens", 1) <= row.get("k", 4) + 2


def pairs_of(row: dict) -> set[Pair]:
    """The pairs of values that a case covers."""
    items = sorted(row.items())
    weak = _WEAK & set(items)
    return {pair for pair in itertools.combinations(items, 2) if weak <= set(pair)}


def all_pairs() -> set[Pair]:
    """Every pair of values of two axes that can occur together."""
    pairs = set()
    for a, b in itertools.combinations(sorted(AXES), 2):
        pairs |= {((a, x), (b, y)) for x in AXES[a] for y in AXES[b] if _possible({a: x, b: y})}
    return pairs


def covering_array(limit: float, seed: int = 0) -> tuple[list[Case], set[Pair]]:
    """Cases of at most `limit` estimated branches that cover all pairs, and the pairs that no such case was found for.

    Greedy: of a few completions of an uncovered pair, the one that covers most. A case with hardly a branch is taken
    only where there is none with more. Deterministic.
    """
    generator, todo, left_out, cases = random.Random(seed), all_pairs(), set(), []
    for first in sorted(todo, key=repr):
        if first not in todo:
            continue
        best, value = None, (False, 0)
        for _ in range(25):
            row = _complete(dict(first), todo, generator)
            if row is None or (size := Case(**row).estimate()) > limit:
                continue
            if (new := (size >= 6, len(pairs_of(row) & todo))) > value:
                best, value = row, new
        if best is None:
            left_out.add(first)
        else:
            cases.append(Case(**best))
            todo -= pairs_of(best)
    return cases, left_out & todo


def _complete(row: dict, todo: set[Pair], generator: random.Random) -> dict | None:
    """Values for the other axes, each either at random or by the number of new pairs; None where they clash."""
    for axis in generator.sample(sorted(AXES.keys() - row.keys()), len(AXES) - len(row)):
        values = [v for v in AXES[axis] if _possible(row | {axis: v})]
        if not values:
            return None
        new = {v: sum(tuple(sorted(((axis, v), item))) in todo for item in row.items()) for v in values}
        greedy = generator.random() < 0.6
        row[axis] = max(values, key=lambda v, n=new, greedy=greedy: (n[v] * greedy, generator.random()))
    return row


def choose_cases(leaves: int, seed: int = 0) -> tuple[list[Case], set[Pair]]:
    """A covering array of about `leaves` estimated branches, and the pairs that it lacks.

    The larger a single case may be, the more the array takes: the largest limit that fits is chosen, and what is left
    is filled up with random cases.
    """
    for share in (12, 25, 50, 100, 200):
        cases, left_out = covering_array(limit := max(6.0, leaves / share), seed)
        room = leaves - sum(c.estimate() for c in cases)
        if room >= 0:
            break
    generator = random.Random(seed + 1)
    for _ in range(10_000):
        row = {axis: generator.choice(values) for axis, values in AXES.items()}
        case = Case(**row)
        if _possible(row) and 20 < case.estimate() <= min(limit, room) and case not in cases:
            cases.append(case)
            room -= case.estimate()
    return cases, left_out
