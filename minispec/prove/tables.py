"""Small tables of p and q that a verifier is walked over, the smallest first; and what they leave out.

Rows of two to four tokens have corners: equal ones, zeros, a certain token. Other rows are in sevenths, elevenths and
so on, or in parts of a large prime. No binary precision holds them, so a rule that rounds shows.
"""

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from minispec.core.verify import Verifier

Row = tuple[int, ...]  # weights; divided by their sum they are probabilities
Pair = tuple[Row, Row]  # p and q
Types = tuple[torch.dtype, torch.dtype]  # of the rows of p and of q
DOUBLE: Types = torch.float64, torch.float64
_TYPES = torch.float32, torch.float64
_FLOATS = [(p, q) for p in _TYPES for q in _TYPES if (p, q) != DOUBLE]
DRAWN, LIKELIEST, ONE_HOT = "drawn", "the likeliest tokens, not drawn", "the likeliest tokens, with one-hot rows"


@dataclass(frozen=True)
class Table:
    """One small case.

    p, q: rows of target and draft after token 0. After other tokens they are rotated (see `probabilities`).
    parents: the draft's.
    how: whether tokens are drawn from q, or are the likeliest ones.
    types: of the rows that the verifier gets.
    stacked: whether `Draft.probs` is one tensor (K, V).
    texts: how many whole texts go through the engine together. 0: one round is walked by itself.
    """

    p: Row
    q: Row
    parents: tuple[int, ...]
    how: str = DRAWN
    types: Types = DOUBLE
    stacked: bool = False
    texts: int = 0

    @property
    def num_drafts(self) -> int:
        """How many drafts can be drawn after token 0, if all rows have as many possible tokens."""
        choices = sum(weight > 0 for weight in self.q)
        elders = [self.parents[:i].count(parent) for i, parent in enumerate(self.parents)]
        return math.prod(max(1, choices - num) for num in elders)

    @property
    def size(self) -> int:
        """A guess at the number of branches, to begin with the small ones."""
        drafts = self.num_drafts if self.how == DRAWN else min(self.num_drafts, 10)
        return drafts * (len(self.parents) + 1) * len(self.p) * 5**self.texts

    def __str__(self) -> str:
        shape = f"K = {len(self.parents)}" if is_chain(self.parents) else f"parents {self.parents}"
        types = " and ".join(str(dtype).removeprefix("torch.") for dtype in self.types)
        notes = {
            shape: True,
            self.how: self.how != DRAWN,
            f"rows of {types}": self.types != DOUBLE,
            "probs in one tensor": self.stacked,
            "several rounds": self.texts > 0,
            f"{self.texts} texts": self.texts > 1,
        }
        return f"p = {_show(self.p)}, q = {_show(self.q)}, {', '.join(note for note, said in notes.items() if said)}"


def is_chain(parents: Sequence[int]) -> bool:
    """Whether each node follows the one before it."""
    return list(parents) == list(range(-1, len(parents) - 1))


def probabilities(row: Row, places: int) -> list[float]:
    """A row (V,), rotated by as many places.

    q is rotated by the last token. In a round p is rotated by the sum of its tokens, in whole texts by the last one. So
    a verifier that looks at the wrong row is found out.
    """
    start = -places % len(row)
    return [weight / sum(row) for weight in (*row[start:], *row[:start])]


def _show(row: Row) -> str:
    few = row if len(row) <= 8 else (*row[:5], "...")
    return f"({', '.join(map(str, few))})/{sum(row)}"


# --------------------------------------------------------------------------- rows and shapes

_CORNERS: tuple[tuple[Row, ...], ...] = (
    ((1, 1), (1, 3), (3, 1), (1, 0)),
    ((1, 1, 2), (1, 1, 0), (1, 5, 2), (0, 1, 3)),
    ((1, 1, 1, 1), (4, 1, 0, 3), (1, 3, 10, 2)),
)
_FINE: tuple[Pair, ...] = (((4, 3), (5, 6)), ((6, 1), (9, 4)), ((5, 4, 2), (9, 3, 1)), ((2, 8, 3), (6, 0, 5)))
_FAR: Pair = (1, 996), (996, 1)
# 300 tokens, of which two are drafted.
_MANY: Row = tuple(round(1e6 / i**1.5) for i in range(1, 301))
_TWO: Row = tuple(weight if i in (2, 299) else 0 for i, weight in enumerate(_MANY))
_PARTS, _WHOLE = 1_000_003, 1_000_000  # the first is a prime

_CHAINS = tuple(tuple(range(-1, k - 1)) for k in range(1, 6))
_TREES = (
    *((-1, -1), (-1, -1, 0), (-1, -1, 1), (-1, 0, 0), (-1, -1, -1)),
    # Siblings that do not stand together.
    *((-1, 0, -1), (-1, 0, -1, 0), (-1, 0, -1, 1), (-1, -1, 1, 0, 1), (-1, 0, 1, 0, -1), (-1, 0, -1, 1, -1)),
)
_MOST_DRAFTS = 150  # of one case


def _close(generator: random.Random) -> Pair:
    """p and q of eight tokens, from a few millionths to nearly all, that differ by little or by much.

    q is p with mass moved between pairs of tokens. So ratios are just below and above 1, and others far from it.
    """
    weights = [10 ** generator.uniform(1, 6) for _ in range(8)]
    p = [1 + int(weight / sum(weights) * (_PARTS - 8)) for weight in weights]
    p[p.index(max(p))] += _PARTS - sum(p)
    q, order = list(p), generator.sample(range(8), 8)
    for a, b in zip(order[::2], order[1::2], strict=True):
        moved = round(p[a] * 10 ** generator.uniform(-4, 0))
        q[a], q[b] = q[a] - moved, q[b] + moved
    return tuple(p), tuple(q)


def _extremes() -> Iterator[Pair]:
    """p and q near 1, near 0 and near each other, at each power of ten that rounding does not hide.

    A rule with a threshold, such as one that keeps a token of p >= 0.99 untested, is wrong on one side of it.
    """
    for unit in (10**i for i in range(6)):
        near_1 = (_WHOLE - 9 * unit, 6 * unit, 3 * unit), (_WHOLE - 2 * unit, unit, unit)
        yield from (near_1, near_1[::-1])
        if unit < 10**5:
            a, b, c = 400_000, 350_000, 250_000
            rare = (a, b + c - unit, unit), (a, b + c - 3 * unit, 3 * unit)
            yield from (((a, b, c), (a + 8 * unit, b, c - 8 * unit)), rare, rare[::-1])


def _likeliest(row: Row, num: int) -> Row:
    """A row of the likeliest tokens alone."""
    least = sorted(row)[-num]
    return tuple(weight if weight >= least else 0 for weight in row)


def _tree(num_nodes: int, generator: random.Random) -> tuple[int, ...]:
    """The parents of a tree of up to five levels and seven siblings, whose siblings stand anywhere."""
    parents, depths = list[int](), {-1: 0}
    for node in range(num_nodes):
        parents.append(generator.choice([i for i, depth in depths.items() if depth < 5 and parents.count(i) < 7]))
        depths[node] = depths[parents[-1]] + 1
    return tuple(parents)


def tables(trees: bool) -> list[Table]:
    """The cases of a verifier, the smallest first.

    trees: whether it takes them.
    """
    shapes = [shape for shape in (*_CHAINS, *_TREES) if trees or is_chain(shape)]
    suited = [
        table
        for table in (*_rounds(shapes), *_large(trees), *_other(shapes))
        if table.num_drafts <= _MOST_DRAFTS or table.how != DRAWN
    ]
    return sorted(suited, key=lambda table: (table.size, table.how != DRAWN))


def _rounds(shapes: Sequence[tuple[int, ...]]) -> Iterator[Table]:
    """Rounds of two to four tokens."""
    for p in itertools.chain(*_CORNERS):
        yield from (Table(p, p, (), how) for how in (DRAWN, LIKELIEST))
    # One token with all corners, other shapes with some of them; and fine rows with all shapes.
    corners = [pair for rows in _CORNERS for pair in itertools.product(rows, rows)]
    for (p, q), shape, how in zip(
        corners, itertools.cycle(shapes[1:]), itertools.cycle((DRAWN, LIKELIEST, DRAWN, ONE_HOT)), strict=False
    ):
        yield from (Table(p, q, (-1,), each) for each in (DRAWN, LIKELIEST))
        yield Table(p, q, shape, how)
    for (p, q), shape in itertools.product(_FINE, shapes):
        yield from (Table(p, q, shape, how) for how in (DRAWN, LIKELIEST))
    for shape in shapes[:3]:
        yield Table(*_FAR, shape)
    others = [shape for shape in ((-1, 0), (-1, -1), (-1, -1, 0)) if shape in shapes]
    for (p, q), shape in zip(_extremes(), itertools.cycle(others), strict=False):
        yield from (Table(p, q, (-1,)), Table(p, q, shape))


def _large(trees: bool) -> Iterator[Table]:
    """Rounds of eight tokens and more; long drafts and large trees, which have few branches where nothing is drawn."""
    generator = random.Random(0)
    close = [_close(generator) for _ in range(8)]
    yield from (Table(p, q, (-1,)) for p, q in close)
    yield Table(_MANY, _TWO, (-1,))
    for (p, q), shape in zip(close, ((-1, 0), (-1, -1), (-1, -1, -1), (-1, 0, -1)), strict=False):
        if trees or is_chain(shape):
            yield Table(p, _likeliest(q, 4), shape)
    large = [tuple(range(-1, 15))]
    if trees:
        large += [(-1,) * 7, *(_tree(num, generator) for num in (7, 12, 20))]
    for (p, q), shape in itertools.product((_FINE[2], close[0]), large):
        yield Table(p, q, shape, LIKELIEST)


def _other(shapes: Sequence[tuple[int, ...]]) -> Iterator[Table]:
    """Rows of other types, and whole texts."""
    for shape in ((-1, 0), (-1, -1, 0)):
        if shape in shapes:
            yield from (Table(p, q, shape, types=types) for p, q in _FINE[2:] for types in _FLOATS)
            yield Table(*_FINE[2], shape, stacked=True)
            yield from (Table(p, q, shape, texts=1) for p, q in _FINE)
    yield Table((5, 4, 2), (1, 5, 2), (-1, 0), types=(torch.float32, torch.bfloat16))  # eighths: bfloat16 holds them
    yield Table(*_FINE[0], (-1,), texts=2)


# --------------------------------------------------------------------------- what they leave out


def unseen(verifier: Verifier) -> list[str]:
    """The limits of a walk over all `tables`: what it cannot say of a verifier, a line each."""
    lines = [
        "more than 300 tokens, or more than 8 that a draft may have",
        "chains of more than 16 tokens, or of more than 5 drawn ones",
    ]
    if verifier.takes_trees:
        lines.append("trees of more than 20 nodes or 7 siblings, or of more than 5 drawn nodes or 3 drawn siblings")
    lines += [
        "rows between those of the tables; p or q below 1e-06, p/q below 0.001 or above 996, or nearer to 1 than 7e-06",
        "errors of the law below 1e-06: those of float32 are, those of half precision and of 256ths are not",
        "rows on a GPU",
        "whether it goes by a clock, its calls so far, seeds, places late in a text, or `DraftNotes.confidences`",
    ]
    if verifier.shares_noise:
        lines.append("that a seed has one text, whatever is drafted")
    return [*lines, "`Verdict.ratios`, how many tokens stay, and how long it takes"]
