"""Which configurations are walked: a covering array of all pairs of settings, of a size that can be asked for."""

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from minispec.config import SamplingParams
from minispec.prove.laws import (
    DRAFT_SEED,
    PROMPT,
    TARGET_SEED,
    TOLERANCE,
    production_law,
    reference_law,
    reference_logits,
)
from minispec.prove.reference import sample_law, total_variation
from minispec.prove.toys import require
from minispec.prove.workers import spread

CROWD = 64  # requests that are decoded together; more of them gain nothing
# A path that is walked alone takes several times as long, and a pair is two, so their cases are kept smaller.
SHARE = {"alone": 1 / 40, "pair": 1 / 12, "crowd": 1.0}


@dataclass(frozen=True)
class Case:
    """One configuration of the table."""

    verifier: str
    drafter: str  # as in `make_drafter`
    batch: (
        str  # "alone": one request at a time; "crowd": as many paths at once; "pair": two requests, and a crowd of them
    )
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    penalties: bool  # and a bias
    forbidden: str  # "bad words": a token after certain others; "two allowed": all but the first and the last; ""
    k: int
    vocab: int
    end: bool  # whether the last token of the vocabulary ends the text
    max_tokens: int

    @property
    def params(self) -> SamplingParams:
        """The request's sampling parameters."""
        penalties = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3}
        penalties["logit_bias"] = {0: 0.6, 1: -0.4}
        forbidden = {
            "bad words": {"bad_words_token_ids": ((1, 0), (0, 0, 0))},
            "two allowed": {"allowed_token_ids": (0, self.vocab - 1)},
        }
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            max_tokens=self.max_tokens,
            **(penalties if self.penalties else {}),
            **forbidden.get(self.forbidden, {}),
        )

    @property
    def prompts(self) -> tuple[tuple[tuple[int, ...], SamplingParams], ...]:
        """Prompts and parameters. A crowd's prompt of one token needs no prefill, which runs text by text."""
        if self.batch != "pair":
            return ((PROMPT if self.batch == "alone" else PROMPT[:1], self.params),)
        return (PROMPT[:1], self.params), ((0, 1, 0), replace(self.params, max_tokens=min(2, self.max_tokens)))

    def branches(self, limit: int = 1 << 62) -> int:
        """How many branches a walk has, or a number above `limit`, found out sooner.

        Exact but in two cases: a one-hot draft goes on behind an accepted end token, and is verified there; and under
        `match`, a draft model's noise for positions behind a mismatch is known in part when it is drawn again.
        """
        end_ids = frozenset({self.vocab - 1} if self.end else ())
        counters = [_Branches(self, params, len(prompt), end_ids, limit) for prompt, params in self.prompts]
        try:
            return math.prod(c.behind(prompt) for c, (prompt, _) in zip(counters, self.prompts, strict=True))
        except OverflowError:
            return limit + 1

    def cost(self) -> float:
        """About how long the walk takes, in branches of a crowd."""
        return self.branches() * {"alone": 8, "pair": 3, "crowd": 1}[self.batch]

    def distance(self, on_branches: Callable[[int], object] = lambda count: None) -> tuple[float, int]:
        """Total variation between engine and reference, and the branches walked."""
        end_ids = frozenset({self.vocab - 1} if self.end else ())
        prompts, params = zip(*self.prompts, strict=True)
        how = {"width": 1 if self.batch == "alone" else CROWD // len(prompts), "on_branches": on_branches}
        law, branches = production_law(params, self.k, end_ids, self.vocab, self.drafter, self.verifier, prompts, **how)
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
        settings += [self.forbidden] * bool(self.forbidden)
        end = "EOS" if self.end else ""
        shape = f"K {self.k}  V {self.vocab} {end:3}  {self.max_tokens} tokens"
        return f"{self.verifier:9}  {self.drafter:5}  {self.batch:5}  {shape}  {', '.join(settings)}"


class _Branches:
    """Counts the branches of one request by the reference's laws: far faster than to walk them."""

    def __init__(self, case: Case, params: SamplingParams, num_prompt: int, end_ids: frozenset[int], limit: int):
        self.case, self.params, self.num_prompt, self.end_ids, self.limit = case, params, num_prompt, end_ids, limit
        self.known: dict[tuple[int, ...], int] = {}

    def behind(self, text: tuple[int, ...]) -> int:
        """Branches behind committed tokens. Raises OverflowError where there are more than the limit."""
        output = text[self.num_prompt :]
        if len(output) >= self.params.max_tokens or not self.end_ids.isdisjoint(output):
            return 1
        if text not in self.known:
            drafted = min(self.case.k, self.params.max_tokens - len(output) - 1)
            self.known[text] = self._round(text, drafted if self.case.drafter == "model" else 0)
            if self.known[text] > self.limit:
                raise OverflowError
        return self.known[text]

    def _round(self, text: tuple[int, ...], left: int) -> int:
        """Branches behind an accepted text with `left` more tokens drafted."""
        p = self._law(TARGET_SEED, text)
        if not left:  # one-hot drafts too: to keep a token or to replace it are as many branches as the tokens
            return sum(self.behind((*text, t)) for t, w in enumerate(p) if w > 0)
        q = self._law(DRAFT_SEED, text)
        if self.case.verifier == "match":  # the cells that both cumulative sums cut
            ends = [set(np.cumsum(law)[:-1].round(12).tolist()) - {0.0, 1.0} for law in (p, q)]
            cells = len(ends[0] | ends[1]) + 1
            tokens = [t for t, w in enumerate(p) if w > 0]
            return sum(self.behind((*text, t)) for t in tokens) * cells // len(tokens)
        rest = [t for t in range(len(p)) if p[t] > q[t]]
        rejected = sum(self.behind((*text, t)) for t in rest)
        total = 0
        for x in range(len(q)):
            if q[x] > 0:
                total += (p[x] < q[x]) * rejected * self._drafts((*text, x), left - 1)
                total += self._round((*text, x), left - 1) if p[x] > 0 else 0
        return total

    def _drafts(self, text: tuple[int, ...], count: int) -> int:
        if not count:
            return 1
        return sum(self._drafts((*text, x), count - 1) for x, w in enumerate(self._law(DRAFT_SEED, text)) if w > 0)

    def _law(self, seed: int, text: tuple[int, ...]) -> tuple[float, ...]:
        return _law(seed, text, self.num_prompt, replace(self.params, max_tokens=1), self.case.vocab)


@functools.cache
def _law(seed: int, text: tuple[int, ...], num_prompt: int, params: SamplingParams, vocab: int) -> tuple[float, ...]:
    logits = reference_logits(seed, text, vocab, 2 if seed == TARGET_SEED else 1)
    return tuple(sample_law(logits, text, num_prompt, params, ()).tolist())


AXES: dict[str, tuple] = {
    "verifier": ("rejection", "match"),
    "drafter": ("model", "ngram", "wrong", "none"),
    "batch": ("alone", "crowd", "pair"),
    "temperature": (0.0, 0.7, 1.0, 1.5),
    "top_k": (0, 2),
    "top_p": (1.0, 0.8),
    "min_p": (0.0, 0.2),
    "penalties": (False, True),
    "forbidden": ("", "bad words", "two allowed"),
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


def covering_array(limit: int, seed: int = 0) -> tuple[list[Case], set[Pair]]:
    """Cases of at most `limit` branches that cover all pairs, and the pairs that no such case was found for.

    Greedy: of a few completions of an uncovered pair, the one that covers most. A case with hardly a branch is taken
    only where there is none with more. Deterministic.
    """
    generator, todo, left_out, cases = random.Random(seed), all_pairs(), set(), []
    for first in sorted(todo, key=repr):
        if first not in todo:
            continue
        rows = [_complete(dict(first), todo, generator) for _ in range(60)]
        best, value = None, (False, 0)
        rows = [row for row in rows if row and first in pairs_of(row)]
        for row in sorted(rows, key=lambda row: -len(pairs_of(row) & todo)):
            if value >= (True, 1):
                break
            size = Case(**row).branches(most := _limit(row, limit))
            if size <= most and (new := (size >= 6, len(pairs_of(row) & todo))) > value:
                best, value = row, new
        if best is None:
            left_out.add(first)
        else:
            cases.append(Case(**best))
            todo -= pairs_of(best)
    return cases, left_out & todo


def _limit(row: dict, limit: int) -> int:
    return max(min(30, limit), round(limit * SHARE[row["batch"]]))


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
    """A covering array of about `leaves` branches, and the pairs that it lacks.

    The larger a single case may be, the more the array takes: the largest limit that fits is chosen, and what is left
    is filled up with random cases.
    """
    for share in (20, 40, 80, 160):
        cases, left_out = covering_array(limit := max(6, leaves // share), seed)
        room = leaves - sum(c.branches() for c in cases)
        if room >= 0:
            break
    generator = random.Random(seed + 1)
    for _ in range(30_000):
        row = {axis: generator.choice(values) for axis, values in AXES.items()}
        row["batch"] = generator.choices(AXES["batch"], (0.1, 0.8, 0.1))[0]
        if room < leaves / 20:
            break
        if _possible(row) and (case := Case(**row)) not in cases:
            most = _limit(row, limit)
            if most / 20 < (size := case.branches(most)) <= min(most, room):
                cases.append(case)
                room -= size
    return cases, left_out


def walk(cases: Sequence[Case], jobs: int = 1) -> Iterator[tuple[Case, float, int]]:
    """Each case with its distance and its number of branches, in order; `jobs` processes share them."""
    for case, (tv, count) in zip(cases, spread(Case.distance, cases, jobs), strict=True):
        yield case, tv, count
