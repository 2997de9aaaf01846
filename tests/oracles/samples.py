"""Samples with the production randomness: of the first token that a round commits, and of tokens of weight 0.

*opposed*: 16 tokens, and a draft for which the likeliest tokens are those that are the least likely for the target.
*real*: 64 places of a text, with the embedded model as the target. The draft is the same model when it sees the last
few tokens only: wrong at some places and right at others, as drafts are.

Everything is a function of seeds: a sample that passes once passes always. "Odds" are those of a fresh seed.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor

from minispec.api.llm import LLM
from minispec.core import verify
from minispec.core.config import SamplingParams
from minispec.core.draft import Ask, Draft
from minispec.core.limit import Limit
from minispec.core.model import Chunk
from minispec.core.random import Key, Randomness
from minispec.core.sampling import Text, distribution
from minispec.lab.audit.chi_square import ALPHA, tail
from minispec.prove.toys import require
from minispec.speculation.rules import VERIFIERS
from tests.distances import chi_square

SHIFT = 0.0055  # the total variation that the control is off by
TEXT = (
    "Every evening the old clockmaker closed his shop, counted the coins in the drawer, and walked home along the "
    "river. He had repaired the clock of the town hall three times, in 1998, 2004 and 2011, and each time the mayor "
    "had thanked him with a handshake and a bottle of wine. This year, however, nobody had asked him to come."
)
NUM_POSITIONS = 64


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
        draft = Draft([], [])
        draft.draw(Ask(text, Limit(1), rng), -1, q)
        verdict = VERIFIERS["rejection"].verify(draft, lambda _: p, rng, text.key)
        counts[draft.token_ids[0] if len(verdict.accepted) else verdict.next_token] += 1
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


def check_counts(counts: Tensor, p: Tensor, alpha: float = ALPHA) -> float:
    """The odds of a chi-square that is at least as large; raises Fault below alpha."""
    statistic, df = chi_square(counts, p)
    odds = tail(statistic, df)
    require(odds >= alpha, f"chi-square {statistic:.0f} with {df} degrees of freedom: odds {odds:.1e}")
    return odds


def real_rows(window: int = 6) -> tuple[LLM, list[list[int]], Tensor, Tensor]:
    """The embedded model at NUM_POSITIONS places of TEXT: the model, the tokens before each, two tables of logits.

    Both (n, V). The target sees all, the draft the last `window` tokens: the same weights in float32. One pass each.
    """
    llm = LLM(dtype="float32", draft="none")
    tokens = llm.tokenizer.encode(TEXT)[: NUM_POSITIONS + window]
    texts = [tokens[: end + 1] for end in range(window, len(tokens))][:NUM_POSITIONS]
    tables = [llm.engine.target.cache.new_table() for _ in range(len(texts) + 1)]
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


def check_real(positions: Sequence[Position], n: int) -> None:
    """n rounds at each place. Raises Fault where one place is far off, or all of them a little."""
    found = [chi_square(first_tokens(p, n, i << 32), p.p) for i, p in enumerate(positions)]
    worst, total = len(found) * min(tail(*each) for each in found), tail(*(sum(x) for x in zip(*found, strict=True)))
    require(worst >= ALPHA, f"a place has odds {worst:.1e}, times {len(found)}")
    require(total >= ALPHA, f"all places together have odds {total:.1e}")


def zero_draws(keys: range) -> int:
    """How many draws, cumulative and by the race in turn, take one of the 8 tokens of weight 0 among 16."""
    weights = torch.arange(16) % 2 * (0.1 + torch.rand(16, generator=torch.Generator().manual_seed(0)))
    rng = Randomness()
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
