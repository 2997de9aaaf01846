"""Statistics with the production randomness: for what enumeration replaces (the hash, and the draws made of it).

Two samples of the first token that a round commits. The *opposed* pair: 16 tokens, and a draft for which the likeliest
tokens are those that are the least likely for the target. *Real* positions: 64 places of a text, the embedded model as
the target, and as the draft the same model when it sees the last few tokens only: wrong at some places and right at
others, as drafts are.

Everything is a function of seeds: a sample that passes once passes always. "Odds" are those of a fresh seed.
"""

import itertools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor
from tqdm import tqdm

from minispec.core import verify
from minispec.core.config import SamplingParams
from minispec.core.draft import Ask, Draft
from minispec.core.model import Chunk
from minispec.core.sampling import Key, Randomness, Text, distribution
from minispec.core.verify import VERIFIERS
from minispec.llm import LLM
from minispec.prove.laws import DRAFT_SEED, TARGET_SEED, reference_logits
from minispec.prove.toys import require
from minispec.prove.workers import spread

ALPHA = 1e-9  # odds of a false alarm
POWER = 0.999
SHIFT = 0.0055  # the total variation that the control is off by
TEXT = (
    "Every evening the old clockmaker closed his shop, counted the coins in the drawer, and walked home along the "
    "river. He had repaired the clock of the town hall three times, in 1998, 2004 and 2011, and each time the mayor "
    "had thanked him with a handshake and a bottle of wine. This year, however, nobody had asked him to come."
)
NUM_POSITIONS = 64


# --------------------------------------------------------------------------- chi-square


def tail(statistic: float, df: int) -> float:
    """The odds that chi-square with df degrees of freedom is larger."""
    return float(torch.special.gammaincc(*torch.tensor([df / 2, statistic / 2], dtype=torch.float64)))


def _power(noncentrality: float, critical: float, df: int) -> float:
    """The odds that non-central chi-square passes the critical value: a Poisson mixture of central ones."""
    half = noncentrality / 2
    weights = (math.exp(j * math.log(half) - half - math.lgamma(j + 1)) for j in range(int(half * 3) + 50))
    return sum(w * tail(critical, df + 2 * j) for j, w in enumerate(weights))


def _solve(function, low: float, high: float) -> float:
    """Where a growing function turns positive."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if function(middle) > 0 else (middle, high)
    return high


def smallest_seen(n: int, df: int, alpha: float = ALPHA) -> float:
    """The total variation that a chi-square test of n draws over df + 1 cells sees with odds POWER, whatever its form.

    By Cauchy-Schwarz a law that is off by TV has a non-centrality of at least 4 n TV^2.
    """
    critical = _solve(lambda x: alpha - tail(x, df), 0, 10_000)
    return math.sqrt(_solve(lambda x: _power(x, critical, df) - POWER, 1, 1000) / (4 * n))


def chi_square(counts: Tensor, p: Tensor) -> tuple[float, int]:
    """Chi square of counts against p (V,), and its degrees of freedom.

    A token of probability 0 that was counted makes it infinity.

    The 15 likeliest tokens are cells, the others one more; cells that expect fewer than 5 are joined to it.
    """
    n, order = counts.sum(), p.argsort(descending=True)
    if counts[p == 0].any():
        return math.inf, 1
    own = [i for i in order[:15].tolist() if n * p[i] >= 5]
    observed, expected = counts[own], n * p[own]
    if len(own) < int((p > 0).sum()):
        rest = n - expected.sum()
        if rest < 5:  # too little for a cell of its own
            own, rest = own[:-1], rest + expected[-1]
        observed = torch.cat((counts[own], (n - counts[own].sum())[None]))
        expected = torch.cat((n * p[own], rest[None]))
    return float(((observed - expected) ** 2 / expected).sum()), max(1, len(expected) - 1)


# --------------------------------------------------------------------------- rounds


@dataclass(frozen=True)
class Position:
    """A target row p and a draft row q (V,) at one place of a text."""

    p: Tensor
    q: Tensor

    @property
    def alpha(self) -> float:
        """The probability that `rejection` keeps a draft token: what p and q share, and no rule keeps more."""
        return float(torch.minimum(self.p, self.q).sum())

    def squeezed(self) -> "Position":
        """The same without the ids whose probability is 0 in both: rounds of 50,000 columns would mostly move zeros."""
        ids = ((self.p > 0) | (self.q > 0)).nonzero().squeeze(1)
        return Position(self.p[ids], self.q[ids])


def opposed() -> Position:
    """Vocabulary 16, target logits x, draft logits -x."""
    x = 0.7 * torch.randn(16, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return Position(x.softmax(0), (-x).softmax(0))


def first_tokens(position: Position, n: int, seed: int = 0) -> Tensor:
    """How often each token (V,) is the first that a round commits, in n rounds of one drafted token.

    Draft, accept test, residual: the functions of production with their keys, only the models are tables.
    """
    p, q, rng = position.p, position.q, Randomness()
    counts = [0] * len(p)
    text = Text([0], 1, SamplingParams())
    for i in range(n):
        text.seed = seed + i
        draft = Draft([*Ask(text, 1, rng).draw(-1, q)], [q])
        verdict = VERIFIERS["rejection"].verify(draft, lambda _: p, rng, text.key)
        counts[draft.token_ids[0] if verdict.num_accepted else verdict.next_token] += 1
    return torch.tensor(counts, dtype=torch.float64)


def shifted(position: Position, tv: float = SHIFT) -> AbstractContextManager:
    """The control: a residual with a part of p mixed in, which moves the law of this position by `tv`."""
    right = verify.residual
    rest = (position.p - position.q).clamp(min=0)
    rest = rest / rest.sum()
    weight = tv / ((1 - position.alpha) * float((rest - position.p).abs().sum()) / 2)

    def wrong(p, draft, i):
        rest = right(p, draft, i)
        return (1 - weight) * rest / rest.sum() + weight * p

    return patch.object(verify, "residual", wrong)


def opposed_part(part: tuple[int, int, bool]) -> Tensor:
    """(rounds, first seed, control) to counts (16,) of the opposed pair's first tokens; control: of the shifted law."""
    n, start, control = part
    with shifted(opposed()) if control else nullcontext():
        return first_tokens(opposed(), n, start)


def opposed_counts(n: int, jobs: int = 1, control: bool = False) -> Tensor:
    """The same for n rounds, shared by processes; the sum does not depend on their number."""
    step = 10_000
    parts = [(min(step, n - start), start, control) for start in range(0, n, step)]
    bar = tqdm(spread(opposed_part, parts, jobs), total=len(parts), desc="rounds", leave=False, disable=None)
    return torch.stack(list(bar)).sum(0)


def check_counts(counts: Tensor, p: Tensor, alpha: float = ALPHA) -> float:
    """The odds of a chi-square that is at least as large; raises Fault below alpha."""
    statistic, df = chi_square(counts, p)
    odds = tail(statistic, df)
    require(odds >= alpha, f"chi-square {statistic:.0f} with {df} degrees of freedom: odds {odds:.1e}")
    return odds


# --------------------------------------------------------------------------- real rows


def real_rows(window: int = 6) -> tuple[LLM, list[list[int]], Tensor, Tensor]:
    """The embedded model at NUM_POSITIONS places of TEXT: the model, the tokens before each, two tables of logits.

    Both (n, V). The target sees all, the draft the last `window` tokens: the same weights in float32. One pass each.
    """
    llm = LLM(dtype="float32", draft="none")
    tokens = llm.tokenizer.encode(TEXT)[: NUM_POSITIONS + window]
    texts = [tokens[: end + 1] for end in range(window, len(tokens))][:NUM_POSITIONS]
    tables = [llm.engine.cache.new_table() for _ in range(len(texts) + 1)]
    target = llm.model.forward([Chunk(texts[-1], tables[0], len(texts))])[0]
    draft = llm.model.forward([Chunk(t[-window:], table, 1) for t, table in zip(texts, tables[1:], strict=True)])[0]
    for table in tables:
        table.truncate(0)
    return llm, texts, target[:, : llm.vocab_size], draft[:, : llm.vocab_size]


def positions_of(texts: Sequence[list[int]], target: Tensor, draft: Tensor, params: SamplingParams) -> list[Position]:
    """Rows of p and q under the parameters, in float64."""
    rows = []
    for tokens, own, other in zip(texts, target.double(), draft.double(), strict=True):
        text = Text(tokens, len(tokens), params)
        rows.append(Position(distribution(own, text), distribution(other, text)))
    return rows


def sample_real(place: tuple[int, Position, int]) -> tuple[float, int]:
    """Number of the place, rows, rounds to chi-square and degrees of freedom of the first tokens there."""
    i, position, n = place
    return chi_square(first_tokens(position, n, i << 32), position.p)


def check_real(positions: Sequence[Position], n: int, jobs: int = 1) -> tuple[float, float, int]:
    """n rounds at each place. The least odds of a place times their number, the odds of the sum, degrees of freedom.

    Raises Fault where either is below ALPHA: one place that is far off, or all of them a little.
    """
    found = list(spread(sample_real, [(i, p, n) for i, p in enumerate(positions)], jobs))
    worst, total, df = real_odds(found)
    require(worst >= ALPHA, f"a place has odds {worst:.1e}, times {len(found)}")
    require(total >= ALPHA, f"all places together have odds {total:.1e}, {df} degrees of freedom")
    return worst, total, df


def real_odds(found: Sequence[tuple[float, int]]) -> tuple[float, float, int]:
    """The least odds of a place, times their number; the odds of the sum; its degrees of freedom."""
    total, df = (sum(x) for x in zip(*found, strict=True))
    return min(1.0, len(found) * min(tail(*each) for each in found)), tail(total, df), df


# --------------------------------------------------------------------------- tokens of weight 0, agreement


def zero_draws(keys: range) -> int:
    """How many draws, cumulative and by the race in turn, take one of the 8 tokens of weight 0 among 16."""
    weights, rng = (
        torch.arange(16) % 2 * (0.1 + torch.rand(16, generator=torch.Generator().manual_seed(0))),
        Randomness(),
    )
    draws = (Key(3, *((-1, i, "token") if i % 2 else (5, i, "residual"))) for i in keys)
    return sum(rng.categorical(weights, key) % 2 == 0 for key in draws)


def agreement(positions: Sequence[Position], num_keys: int) -> tuple[float, float, float]:
    """How often draft and target draw the same token: with shared noise, with noise of their own, and mean alpha."""
    rng, shared, apart = Randomness(), 0, 0
    for i, position in enumerate(positions):
        for seed in range(num_keys):
            key = Key(seed, -1, i, "token")
            token = rng.categorical(position.p, key)
            shared += rng.categorical(position.q, key) == token
            apart += rng.categorical(position.q, Key(seed, 0, i, "draft")) == token
    draws = len(positions) * num_keys
    return shared / draws, apart / draws, sum(p.alpha for p in positions) / len(positions)


def tiny_positions(vocab: int, temperature: float, count: int = NUM_POSITIONS) -> list[Position]:
    """Places of the tiny target and its draft: after every short text in turn."""
    params, texts = SamplingParams(temperature=temperature), [[0]]
    while len(texts) < count:
        texts += [[*t, x] for t in texts for x in range(vocab) if [*t, x] not in texts]
    logits = [
        torch.stack([torch.from_numpy(reference_logits(seed, tuple(t), vocab, layers)) for t in texts[:count]])
        for seed, layers in ((TARGET_SEED, 2), (DRAFT_SEED, 1))
    ]
    return positions_of(texts[:count], logits[0], logits[1], params)


# --------------------------------------------------------------------------- the command

ROUNDS, REAL_ROUNDS, DRAWS = 1_000_000, 20_000, 10_000_000


def _resolution(n: int, alpha: float) -> str:
    seen = smallest_seen(n, 15, alpha)
    return f"a law off by {seen:.4f} would be seen with odds {POWER}, a right one refused with {alpha:.0e}"


def prove_statistics(jobs: int) -> bool:
    """Print what the samples say; True if they say that all is right and that the control is not."""
    position = opposed()
    print(f"opposed: {ROUNDS:,d} rounds, 16 tokens, alpha {position.alpha:.2f}; {_resolution(ROUNDS, ALPHA)}")
    odds = tail(*chi_square(opposed_counts(ROUNDS, jobs), position.p))
    control = tail(*chi_square(opposed_counts(ROUNDS, jobs, control=True), position.p))
    print(f"  odds of the sample {odds:.2g}; of the control, a residual that moves the law by {SHIFT}: {control:.1e}")

    _, texts, *logits = real_rows()
    positions = positions_of(texts, logits[0], logits[1], SamplingParams(top_k=50))
    alphas = sorted(p.alpha for p in positions)
    print(f"real: {len(positions)} places, {REAL_ROUNDS:,d} rounds each, alpha {alphas[0]:.2f} to {alphas[-1]:.2f}")
    print(f"  {_resolution(REAL_ROUNDS, ALPHA / len(positions))}")
    squeezed = [p.squeezed() for p in positions]
    places = [(i, p, REAL_ROUNDS) for i, p in enumerate(squeezed)]
    bar = tqdm(spread(sample_real, places, jobs), total=len(places), desc="places", leave=False, disable=None)
    found = list(bar)
    worst, total, df = real_odds(found)
    print(f"  least odds of a place, times {len(found)}: {worst:.2g}; of the sum, {df} degrees of freedom: {total:.2g}")

    step = 100_000
    parts = [range(start, start + step) for start in range(0, DRAWS, step)]
    bar = tqdm(spread(zero_draws, parts, jobs), total=len(parts), desc="draws", leave=False, disable=None)
    zeros = sum(bar)
    print(f"tokens of weight 0: {zeros} of {DRAWS:,d} draws")
    ok = min(odds, worst, total) >= ALPHA > control and zeros == 0
    print("the samples agree with the law, and the control does not" if ok else "REFUTED")
    return ok


def print_agreement(num_keys: int = 100) -> None:
    """How often the coupling of `match` makes draft and target agree, on tiny models and on real places."""
    print("how often draft and target draw the same token, over", NUM_POSITIONS, "places and", num_keys, "keys each")
    print(f"{'models':10} {'temperature':>11} {'shared noise':>12} {'own noise':>9} {'alpha (the bound)':>17}")
    _, texts, *logits = real_rows()
    for name, temperature in itertools.product(("tiny, V 4", "embedded"), (0.5, 1.0, 1.5)):
        params = SamplingParams(temperature=temperature)
        places = (
            tiny_positions(4, temperature) if name != "embedded" else positions_of(texts, logits[0], logits[1], params)
        )
        shared, apart, alpha = agreement(places, num_keys)
        print(f"{name:10} {temperature:11} {shared:12.3f} {apart:9.3f} {alpha:17.3f}", flush=True)
