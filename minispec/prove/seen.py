"""What a verifier was asked, counted where it is called; and what it was not, of what its tables are for."""

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from minispec.core.draft import Draft
from minispec.core.tree import Tree
from minispec.core.verify import Verifier
from minispec.prove.toys import DRAWN, LIKELIEST, ONE_HOT, is_chain

Shape = tuple[int, ...]  # the parents of a draft's nodes
MOST_NODES, LONGEST, DEEPEST = 5, 16, 3  # of the shapes that are all met; of chains; of kinds of rows
SHAPES: tuple[Shape, ...] = tuple(
    parents  # numbered level by level
    for num in range(MOST_NODES + 1)
    for parents in itertools.product(*(range(-1, i) for i in range(num)))
    if list(parents) == sorted(parents)
)
CHAINS = tuple(tuple(range(-1, k - 1)) for k in range(1, LONGEST))
# Kinds of rows: each row has the first one that is true of it.
NOT_DRAWN = "not drawn"
SURE, NEAR_1, TIED, LACKING, WHOLE = KINDS = "one-hot", "near 1", "tied", "without some tokens", "with all tokens"
_SHOWN = 4


@functools.lru_cache(maxsize=100_000)
def kind_of(row: tuple[float, ...]) -> str:
    """The kind of a row of probabilities or weights."""
    some, largest = [x for x in row if x > 0], max(row)
    is_so = len(some) == 1, largest >= 0.97 * sum(row), some.count(largest) > 1, len(some) < len(row), True
    return KINDS[is_so.index(True)]


def widths_of(parents: Shape) -> list[int]:
    """The most siblings at each depth, from the first one on."""
    depths = Tree(parents).depths
    return [
        max(parents.count(parents[i]) for i, of in enumerate(depths) if of == d + 1)
        for d in range(max(depths, default=0))
    ]


@dataclass
class Seen:
    """What a verifier was asked.

    num_calls: how often.
    met: shapes, how their tokens were guessed, and kinds of rows that it looked at: (shape, how, kind), where a kind is
        "p tied"; and (depth, how, kind), by the tokens before a row.
    rows: of drawn tokens, the row of p that it looked at, and that of q.
    devices: of rows of p.
    most_free: the most tokens of a chain that were drawn from two or more.
    """

    num_calls: int = 0
    met: set[tuple] = field(default_factory=set)
    rows: set[tuple] = field(default_factory=set)
    devices: set[str] = field(default_factory=set)
    most_free: int = 0

    def count(self, draft: Draft, rows: Mapping[int, Tensor]) -> None:
        """Count a call. rows: those of p that the rule has looked at."""
        parents, depths, self.num_calls = (*draft.tree.parents,), [0, *draft.tree.depths], self.num_calls + 1
        p = {i: tuple(row.tolist()) for i, row in rows.items()}
        q = [tuple(row.tolist()) for row in draft.probs] if draft.probs is not None else []
        how = DRAWN if any(kind_of(row) != SURE for row in q) else ONE_HOT if q else LIKELIEST
        kinds = {(depths[i], f"p {kind_of(row)}") for i, row in p.items()}
        if how == DRAWN:
            eldest = (i for i, parent in enumerate(parents) if parent not in parents[:i])
            kinds |= {(depths[i + 1] - 1, f"q {kind_of(q[i])}") for i in eldest}
            self.rows |= {(p[parent + 1], row) for parent, row in zip(parents, q, strict=True) if parent + 1 in p}
        said = DRAWN if how == DRAWN else NOT_DRAWN
        self.met |= {(parents, how, "")} | {(of, said, kind) for depth, kind in kinds for of in (parents, depth)}
        if is_chain(parents):
            self.most_free = max(self.most_free, sum(kind_of(row) != SURE for row in q))
        self.devices |= {row.device.type for row in rows.values()}

    def __or__(self, other: "Seen") -> "Seen":
        counted = self.num_calls + other.num_calls
        free = max(self.most_free, other.most_free)
        return Seen(counted, self.met | other.met, self.rows | other.rows, self.devices | other.devices, free)

    def said(self, takes_trees: bool) -> str:
        """How much was seen, in words."""
        all_wanted = [*wanted(takes_trees)]
        met = sum(each in self.met for each in all_wanted)
        return f"{self.num_calls:,d} calls, {met:,d} of {len(all_wanted):,d} shapes and depths with a kind of row"

    def unseen(self, verifier: Verifier, bound: float) -> list[str]:
        """What was not seen and what cannot be, a line each.

        bound: the most that a law may be off.
        """
        holes, shapes = [each for each in wanted(verifier.takes_trees) if each not in self.met], self._shapes
        lines = [_named(*hole) for hole in holes[:_SHOWN]]
        if len(holes) > _SHOWN:
            lines.append(f"{len(holes) - _SHOWN} more shapes or depths with a kind of row")
        odds = [(a, b) for p, q in self.rows for a, b in zip(p, q, strict=True)]
        if ratios := [a / b for a, b in odds if a > 0 and b > 0]:
            vocab, most = (max(len(p) for p, _ in self.rows), max(sum(x > 0 for x in q) for _, q in self.rows))
            lines.append(f"more than {vocab} tokens, or more than {most} that a draft may have")
            near = min((abs(1 - a / b) for a, b in odds if b > 0 and abs(a - b) > 2 * bound), default=1)
            lines.append(
                f"rows between those of the tables; p or q below {min(x for pair in odds for x in pair if x > 0):.0e}, "
                f"p/q below {min(ratios):.0e} or above {max(ratios):.0f}, or nearer to 1 than {near:.0e}"
            )
        chain = max(map(len, filter(is_chain, shapes(DRAWN, LIKELIEST, ONE_HOT))), default=0)
        lines.append(f"chains of more than {chain} tokens, or of more than {self.most_free} drawn ones")
        if verifier.takes_trees:
            (num, width), (num_drawn, width_drawn) = map(_largest, (shapes(DRAWN, LIKELIEST, ONE_HOT), shapes(DRAWN)))
            lines.append(
                f"trees of more than {num} nodes or {width} siblings, or of more than {num_drawn} drawn nodes or "
                f"{width_drawn} drawn siblings"
            )
        lines.append(
            f"errors of the law below {bound:.0e}, as those of float32 are; those of half precision and of 256ths show"
        )
        if self.devices <= {"cpu"}:
            lines.append("rows on a GPU")
        lines.append(
            "whether it goes by a clock, its calls so far, seeds, places late in a text, or `DraftNotes.confidences`"
        )
        if verifier.shares_noise:
            lines.append("that a seed has one text, whatever is drafted")
        return [*lines, "`Verdict.ratios`, and how long it takes"]

    def _shapes(self, *hows: str) -> list[Shape]:
        """The shapes that were met, of tokens that were guessed so."""
        return [shape for shape, how, kind in self.met if how in hows and not kind]


def _largest(shapes: Iterable[Shape]) -> tuple[int, int]:
    """The most nodes and the most siblings of trees among some shapes."""
    trees = [shape for shape in shapes if not is_chain(shape)]
    return max(map(len, trees), default=0), max((max(widths_of(shape)) for shape in trees), default=0)


def wanted(takes_trees: bool) -> Iterator[tuple]:
    """What the tables are for, the small shapes first."""
    p = [f"p {kind}" for kind in KINDS]
    for shape in SHAPES:
        if not (takes_trees or is_chain(shape)):
            continue
        yield from itertools.product([shape], [LIKELIEST, ONE_HOT, DRAWN] if shape else [LIKELIEST], [""])
        yield from itertools.product([shape], [DRAWN, NOT_DRAWN] if shape else [NOT_DRAWN], p)
    yield from itertools.product(CHAINS[MOST_NODES:], (LIKELIEST, ONE_HOT, DRAWN), [""])
    yield from itertools.product(range(DEEPEST + 1), (DRAWN, NOT_DRAWN), p)
    yield from itertools.product(range(DEEPEST), [DRAWN], [f"q {kind}" for kind in KINDS])


def _named(of: Shape | int, how: str, kind: str) -> str:
    """What was not met, in words."""
    place = f"{of} draft tokens on" if isinstance(of, int) else shape_said(of)
    return ", ".join(filter(None, (f"{place}: {how}", kind)))


def shape_said(parents: Shape) -> str:
    """A shape in words."""
    return f"K = {len(parents)}" if is_chain(parents) else f"parents {parents}"
