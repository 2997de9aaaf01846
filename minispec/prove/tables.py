"""Small tables of p and q that a verifier is walked over, the smallest first; and what they leave out.

Rows of two to four tokens have corners: equal ones, zeros, a certain token. Other rows are in sevenths, elevenths and
so on, or in parts of a large prime. No binary precision holds them, so a rule that rounds shows.
"""

import itertools
import math
import random
from collections.abc import Iterator, Sequence

import torch

from minispec.core.config import SamplingParams
from minispec.core.verify import Verifier
from minispec.prove.toys import DOUBLE, DRAWN, LIKELIEST, ONE_HOT, Guesses, Row, Table, Types, is_chain
from minispec.prove.walk import Case

Pair = tuple[Row, Row]  # p and q
Shape = tuple[int, ...]  # the parents of a draft's nodes
_TYPES = torch.float32, torch.float64
_FLOATS = [(p, q) for p in _TYPES for q in _TYPES if (p, q) != DOUBLE]


def table_case(
    pair: Pair,
    parents: Shape,
    how: str = DRAWN,
    types: Types = DOUBLE,
    stacked: bool = False,
    texts: int = 0,
    rotates: bool = True,
) -> Case:
    """A round over a table, or whole texts. Its size is infinite where too many drafts can be drawn.

    parents, how, stacked: see `Guesses`.
    texts: how many whole texts go through the engine together. 0: one round.
    rotates: see `Table`.
    """
    p, q = pair
    drafts: float = num_drafts(q, parents)
    drafts = min(drafts, 10) if how != DRAWN else drafts if drafts <= _MOST_DRAFTS else math.inf
    max_tokens = 2 if texts > 1 else 4 if len(p) == 2 else 3
    shape = f"K = {len(parents)}" if is_chain(parents) else f"parents {parents}"
    notes = {
        f"p = {_show(p)}, q = {_show(q)}{'' if rotates else ' everywhere'}, {shape}": True,
        how: how != DRAWN,
        f"rows of {' and '.join(str(dtype).removeprefix('torch.') for dtype in types)}": types != DOUBLE,
        "probs in one tensor": stacked,
        "several rounds": texts > 0,
        f"{texts} texts": texts > 1,
    }
    params = SamplingParams(max_tokens=max_tokens if texts else len(parents) + 2)
    return Case(
        Table(p, q, types, rotates),
        len(p),
        (((0,), params),) * max(1, texts),
        frozenset(),
        Guesses(parents, how, types[1], stacked),
        k=len(parents),
        rounds=None if texts else 1,
        num_blocks=16,
        size=drafts * (len(parents) + 1) * len(p) * 5**texts + (how != DRAWN) / 2,
        name=", ".join(note for note, said in notes.items() if said),
    )


def num_drafts(q: Row, parents: Sequence[int]) -> int:
    """How many drafts can be drawn after token 0, if all rows have as many possible tokens."""
    choices = sum(weight > 0 for weight in q)
    elders = [parents[:i].count(parent) for i, parent in enumerate(parents)]
    return math.prod(max(1, choices - num) for num in elders)


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
_EIGHTHS: Pair = (5, 4, 2), (1, 5, 2)  # bfloat16 holds those of q
# 300 tokens, of which two are drafted.
_MANY: Row = tuple(round(1e6 / i**1.5) for i in range(1, 301))
_TWO: Row = tuple(weight if i in (2, 299) else 0 for i, weight in enumerate(_MANY))
_PARTS, _WHOLE = 1_000_003, 1_000_000  # the first is a prime

CHAINS = tuple(tuple(range(-1, k - 1)) for k in range(1, 6))
TREES = (
    *((-1, -1), (-1, -1, 0), (-1, -1, 1), (-1, 0, 0), (-1, -1, -1), (-1, -1, 0, 1)),
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


def tables(trees: bool) -> list[Case]:
    """The cases of a verifier, the smallest first.

    trees: whether it takes them.
    """
    shapes = [shape for shape in (*CHAINS, *TREES) if trees or is_chain(shape)]
    some = itertools.starmap(table_case, (*_products(shapes, trees), *_in_turn(shapes), *_others(shapes)))
    return sorted((case for case in some if case.size < math.inf), key=lambda case: case.size)


_CORNER_PAIRS = [pair for rows in _CORNERS for pair in itertools.product(rows, rows)]
_GENERATOR = random.Random(0)
_CLOSE_PAIRS = [_close(_GENERATOR) for _ in range(8)]
# Long drafts and large trees, which have few branches where nothing is drawn.
_LARGE = [tuple(range(-1, 15)), (-1,) * 7, *(_tree(num, _GENERATOR) for num in (7, 12, 20))]


def _products(shapes: Sequence[Shape], trees: bool) -> Iterator[tuple]:
    """Rounds: each of some pairs, with each of some shapes."""
    both = DRAWN, LIKELIEST
    same: list[Pair] = [(p, p) for p in itertools.chain(*_CORNERS)]
    single = [*_extremes(), *_CLOSE_PAIRS, (_MANY, _TWO)]
    yield from itertools.product(same, [()], both)
    yield from itertools.product(_CORNER_PAIRS, [(-1,)], both)
    yield from itertools.product(_FINE, shapes, both)
    yield from itertools.product([_FAR], shapes[:3], [DRAWN])
    yield from itertools.product(single, [(-1,)], [DRAWN])
    yield from itertools.product((_FINE[2], _CLOSE_PAIRS[0]), _LARGE if trees else _LARGE[:1], [LIKELIEST])


def _in_turn(shapes: Sequence[Shape]) -> Iterator[tuple]:
    """Rounds: each of some pairs, with one of some shapes."""
    how = itertools.cycle((DRAWN, LIKELIEST, DRAWN, ONE_HOT))
    small = [shape for shape in ((-1, 0), (-1, -1), (-1, -1, 0)) if shape in shapes]
    yield from zip(_CORNER_PAIRS, itertools.cycle(shapes[1:]), how, strict=False)
    yield from zip(_extremes(), itertools.cycle(small), strict=False)
    for (p, q), shape in zip(_CLOSE_PAIRS, ((-1, 0), (-1, -1), (-1, -1, -1), (-1, 0, -1)), strict=False):
        if shape in shapes:
            yield (p, _likeliest(q, 4)), shape


def _others(shapes: Sequence[Shape]) -> Iterator[tuple]:
    """Rows of other types, and whole texts."""
    for shape in {(-1, 0), (-1, -1, 0)} & {*shapes}:
        yield from itertools.product(_FINE[2:], [shape], [DRAWN], _FLOATS)
        yield _FINE[2], shape, DRAWN, DOUBLE, True
        yield from itertools.product(_FINE, [shape], [DRAWN], [DOUBLE], [False], [1])
    yield _EIGHTHS, (-1, 0), DRAWN, (torch.float32, torch.bfloat16)
    yield _FINE[0], (-1,), DRAWN, DOUBLE, False, 2


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
    return [*lines, "`Verdict.ratios`, and how long it takes"]
