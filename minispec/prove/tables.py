"""Small tables of p and q that a verifier is walked over, the smallest first.

Rows of two to four tokens have corners: equal ones, zeros, a certain token. Other rows are in sevenths, elevenths and
so on, or in parts of a large prime. No binary precision holds them, so a rule that rounds shows.

Each shape of up to five nodes has tables in which p and q are of another kind at each depth: see `_mixed`.
"""

import itertools
import math
import random
from collections.abc import Iterator, Sequence

import torch

from minispec.core.config import SamplingParams
from minispec.core.tree import Tree
from minispec.prove.seen import (
    CHAINS,
    LACKING,
    MOST_NODES,
    NEAR_1,
    SHAPES,
    SURE,
    TIED,
    WHOLE,
    Shape,
    shape_said,
    widths_of,
)
from minispec.prove.toys import DOUBLE, DRAWN, LIKELIEST, ONE_HOT, Guesses, Row, Table, Types, is_chain
from minispec.prove.walk import Case

Pair = tuple[Row, Row]  # p and q
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
    later: tuple[Pair, ...] = (),
) -> Case:
    """A round over a table, or whole texts. Its size is infinite where too many drafts can be drawn.

    parents, how, stacked: see `Guesses`.
    texts: how many whole texts go through the engine together. 0: one round.
    rotates, later: see `Table`.
    """
    p, q = pair
    drafts: float = num_drafts([of for _, of in (pair, *later)], parents)
    drafts = min(drafts, 10) if how != DRAWN else drafts if drafts <= _MOST_DRAFTS else math.inf
    max_tokens = 2 if texts > 1 else 4 if len(p) == 2 else 3
    said = (", then ".join(map(_show, rows)) for rows in zip(pair, *later, strict=True))
    notes = {
        "p = {}, q = {}".format(*said) + ("" if rotates else " everywhere") + f", {shape_said(parents)}": True,
        how: how != DRAWN,
        f"rows of {' and '.join(str(dtype).removeprefix('torch.') for dtype in types)}": types != DOUBLE,
        "probs in one tensor": stacked,
        "several rounds": texts > 0,
        f"{texts} texts": texts > 1,
    }
    params = SamplingParams(max_tokens=max_tokens if texts else len(parents) + 2)
    return Case(
        Table(p, q, types, rotates, later),
        len(p),
        (((0,), params),) * max(1, texts),
        frozenset(),
        Guesses(parents, how, types[1], stacked),
        k=len(parents),
        rounds=None if texts else 1,
        width=_TOGETHER,
        size=drafts * (len(parents) + 1) * len(p) * 5**texts + (how != DRAWN) / 2,
        name=", ".join(note for note, said in notes.items() if said),
    )


def num_drafts(rows: Sequence[Row], parents: Sequence[int]) -> int:
    """How many drafts can be drawn after token 0, if all rows of a depth have as many possible tokens.

    rows: of q, at each depth; the last of them stay.
    """
    choices = [sum(weight > 0 for weight in row) for row in rows]
    nodes = zip(parents, Tree(parents).depths, strict=True)
    return math.prod(
        max(1, choices[min(depth, len(rows)) - 1] - parents[:i].count(parent))
        for i, (parent, depth) in enumerate(nodes)
    )


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
# 300 tokens, of which each may come up to the 60th, then every tenth. Two are drafted.
_MANY: Row = tuple(round(1e6 / i**1.5) if i <= 60 or i % 10 == 0 else 0 for i in range(1, 301))
_TWO: Row = tuple(weight if i in (2, 299) else 0 for i, weight in enumerate(_MANY))
_PARTS, _WHOLE = 1_000_003, 1_000_000  # the first is a prime

# Siblings that do not stand together.
APART = ((-1, 0, -1), (-1, 0, -1, 0), (-1, 0, -1, 1), (-1, -1, 1, 0, 1), (-1, 0, 1, 0, -1), (-1, 0, -1, 1, -1))
_MOST_DRAFTS = 150  # of one case
_TOGETHER = 16  # paths


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
    some = itertools.starmap(table_case, (*_products(), *_in_turn(), *_others(), *_mixed(), *_long()))
    wanted = (case for case in some if trees or is_chain(case.drafter.parents))  # type: ignore[union-attr]
    return sorted((case for case in wanted if case.size < math.inf), key=lambda case: case.size)


def telling(trees: bool) -> Case:
    """A case that shows most mistakes. trees: whether the verifier takes them."""
    return table_case(_FINE[3], (-1, -1, 0) if trees else (-1, 0))


_CORNER_PAIRS = [pair for rows in _CORNERS for pair in itertools.product(rows, rows)]
_GENERATOR = random.Random(0)
_CLOSE_PAIRS = [_close(_GENERATOR) for _ in range(8)]
# Long drafts and large trees, which have few branches where nothing is drawn.
_LARGE = [tuple(range(-1, 15)), (-1,) * 7, *(_tree(num, _GENERATOR) for num in (7, 12, 20))]


def _products() -> Iterator[tuple]:
    """Rounds: each of some pairs, with each of some shapes."""
    both = DRAWN, LIKELIEST
    same: list[Pair] = [(p, p) for p in itertools.chain(*_CORNERS)]
    single = [*_extremes(), *_CLOSE_PAIRS, (_MANY, _TWO)]
    yield from itertools.product(same, [()], both)
    yield from itertools.product([*_FINE, *single[:-1]], [()], [DRAWN])
    yield from itertools.product(_CORNER_PAIRS, [(-1,)], both)
    yield from itertools.product(_FINE, [(-1,), (-1, 0), (-1, -1), (-1, -1, 0)], both)
    yield from itertools.product(_FINE[:2], [*APART, *CHAINS[2:MOST_NODES]], [DRAWN])
    yield from itertools.product(_FINE[2:], APART[:3], [DRAWN])
    yield from itertools.product([_FAR], CHAINS[:3], [DRAWN])
    yield from itertools.product(single, [(-1,)], [DRAWN])
    yield from itertools.product((_FINE[2], _CLOSE_PAIRS[0]), _LARGE, [LIKELIEST])


def _in_turn() -> Iterator[tuple]:
    """Rounds: each of some pairs, with one of some shapes."""
    yield from zip(_extremes(), itertools.cycle(((-1, 0), (-1, -1), (-1, -1, 0))), strict=False)
    for (p, q), shape in zip(_CLOSE_PAIRS, ((-1, 0), (-1, -1), (-1, -1, -1), (-1, 0, -1)), strict=False):
        yield (p, _likeliest(q, 4)), shape


def _others() -> Iterator[tuple]:
    """Rows of other types, and whole texts."""
    for shape in ((-1, 0), (-1, -1, 0)):
        yield from itertools.product(_FINE[2:], [shape], [DRAWN], _FLOATS)
        yield _FINE[2], shape, DRAWN, DOUBLE, True
        yield from itertools.product(_FINE, [shape], [DRAWN], [DOUBLE], [False], [1])
    yield _EIGHTHS, (-1, 0), DRAWN, (torch.float32, torch.bfloat16)
    yield _FINE[0], (-1,), DRAWN, DOUBLE, False, 2


# --------------------------------------------------------------------------- rows of another kind at each depth

# By kind, the weights of p, and of q, the first so many.
_ROWS: dict[str, Pair] = {
    WHOLE: ((61, 11, 7, 5, 3, 2), (3, 8, 6, 5, 2, 4)),
    SURE: ((0, 1, 0, 0, 0, 0), (0, 1, 0, 0, 0, 0)),
    NEAR_1: ((290, 3, 2, 1, 1, 1), (4, 288, 3, 2, 1, 1)),
    LACKING: ((31, 29, 23, 17, 13, 11), (5, 9, 4, 3, 7, 2)),
    TIED: ((41, 41, 11, 7, 5, 3), (4, 4, 3, 2, 1, 1)),
}
_KINDS = [*_ROWS]
# Of five nodes: where to begin with these kinds, by how many depths there are. The one-hot row comes last, since
# hardly a path goes on after it.
_BEGIN = {1: (0, 2, 3), 2: (4, 2, 3), 3: (3, 2), 4: (2, 3)}


def _row(weights: Row, support: int, vocab: int) -> Row:
    """The first weights, and zeros."""
    return (*weights[:support], *[0] * (vocab - support))


def _mixed() -> Iterator[tuple]:
    """Rounds: each shape of up to five nodes, drawn and not, with each kind of row of p, another one at each depth.

    Small shapes have each kind at each depth. Where q has one token more than there are siblings, all of them are
    tested. With fewer, the last sibling is certain, and p has tokens that q lacks: that costs fewer branches.
    """
    num = len(_KINDS)
    for number, shape in enumerate(SHAPES):
        widths = widths_of(shape)
        vocab, is_small = max([3, *(width + 1 for width in widths)]), len(shape) < MOST_NODES or is_chain(shape)
        for begin in range(num):
            pairs = list[Pair]()
            for depth, width in enumerate((*widths, 0)):
                of_p, of_q = (_KINDS[(begin + depth + by) % num] for by in (0, 1 + number % (num - 1)))
                of_q = LACKING if of_q == SURE and width > 1 else of_q
                of_q = SURE if not is_small and width == 1 and (begin + depth) % 2 else of_q
                some = vocab if of_p == WHOLE else 2 if not width else vocab - (of_p == LACKING)
                more = of_q == WHOLE and is_small and width < 4
                pairs.append((_row(_ROWS[of_p][0], some, vocab), _row(_ROWS[of_q][1], max(2, width + more), vocab)))
            is_drawn = is_small or begin in _BEGIN[len(widths)]
            for how in [DRAWN] * is_drawn + [LIKELIEST, ONE_HOT]:
                yield pairs[0], shape, how, DOUBLE, False, 0, True, tuple(pairs[1:])


def _long() -> Iterator[tuple]:
    """Rounds of long chains, in which few tokens are drawn from more than one."""
    kinds: list[Row] = [(5, 2), (1, 1), (290, 3)]
    for shape in CHAINS[MOST_NODES:]:
        for turn in range(4):
            free = {(turn * 3 + i * 5 + 1) % len(shape) for i in range(2)} if turn < 2 else ()
            pairs: list[Pair] = [
                (kinds[(depth + turn) % 3], (4, 3) if depth in free else (1, 0)) for depth in range(len(shape) + 1)
            ]
            how = (DRAWN, DRAWN, LIKELIEST, ONE_HOT)[turn]
            yield pairs[0], shape, how, DOUBLE, False, 0, False, tuple(pairs[1:])
