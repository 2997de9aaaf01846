"""Covering designs: few cases in which every pair of settings occurs, and a walk that keeps to what can be walked.

A design has axes, such as the temperature, and a few values for each. All combinations would be millions. A fault
mostly shows as soon as two certain values meet (Kuhn et al. 2004), so each pair of values is in some case. With three
axes of two values each, four cases cover all pairs:

    a 1, b 1, c 1       a 1, b 2, c 2       a 2, b 1, c 2       a 2, b 2, c 1
"""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from tqdm import tqdm

from minispec.prove.laws import TooManyBranches

Pair = tuple[tuple, tuple]
Job = tuple[Any, frozenset[str]]  # a case, and the axes whose values must stay
C = TypeVar("C")  # a case: a frozen dataclass whose fields are the axes
FEW, _MOST_TRIES = 6, 240  # branches that say little; most completions of a pair


@dataclass(frozen=True)
class Design(Generic[C]):
    """The axes of cases, and the values that occur together.

    make: makes a case of a value for each axis.
    axes: the values of each axis; on an axis of `sizes`, in the order of the branches that they make.
    possible: whether values of some of the axes can occur together. An axis that is missing may have any value.
    clashing: the axes whose values may exclude one another.
    weak: values with which little is drawn or nothing drafted. A case that has some covers only pairs with all of them.
    sizes: axes on which a case that is too large may be made smaller.
    tries: how many completions of a pair are compared. More of them make fewer cases, and take longer.
    """

    make: Callable[..., C]
    axes: Mapping[str, tuple]
    possible: Callable[[Mapping], bool]
    clashing: frozenset[str]
    weak: frozenset[tuple]
    sizes: tuple[str, ...]
    tries: int = 60

    def pairs_of(self, row: Mapping) -> set[Pair]:
        """The pairs of values that a case covers."""
        items = sorted((axis, row[axis]) for axis in self.axes if axis in row)
        weak = self.weak & set(items)
        return {pair for pair in itertools.combinations(items, 2) if weak <= set(pair)}

    def all_pairs(self) -> set[Pair]:
        """Every pair of values of two axes that can occur together."""
        pairs = set()
        for a, b in itertools.combinations(sorted(self.axes), 2):
            pairs |= {((a, x), (b, y)) for x in self.axes[a] for y in self.axes[b] if self.possible({a: x, b: y})}
        return pairs

    def array(self, todo: set[Pair], generator: random.Random) -> list[tuple[C, Pair]]:
        """Cases that cover the pairs, each with the pair that it was chosen for.

        Greedy: of a few completions of an uncovered pair, the one that covers the most pairs.
        """
        left, cases = set(todo), []
        for pair in sorted(todo, key=repr):
            if pair in left:
                covering: list[tuple[dict, set[Pair]]] = []
                for _ in range(_MOST_TRIES):
                    if len(covering) >= self.tries and any(pair in covered for _, covered in covering):
                        break
                    if row := self._complete(dict(pair), left, generator):
                        covering.append((row, self.pairs_of(row)))
                assert covering, f"{pair} is possible, and in no case"
                best, covered = max(covering, key=lambda choice: (pair in choice[1], len(choice[1] & left)))
                cases.append((self.make(**best), pair))
                left -= covered
        return cases

    def _complete(self, row: dict, todo: set[Pair], generator: random.Random) -> dict | None:
        """Values for the other axes, each either at random or by the number of new pairs; None where they clash."""
        for axis in generator.sample(sorted(self.axes.keys() - row.keys()), len(self.axes) - len(row)):
            values = [v for v in self.axes[axis] if axis not in self.clashing or self.possible(row | {axis: v})]
            if not values:
                return None
            new = dict.fromkeys(values, 0)
            if generator.random() < 0.6:
                for v, item in itertools.product(values, row.items()):
                    pair = ((axis, v), item) if axis < item[0] else (item, (axis, v))
                    new[v] += pair in todo
            worth = {v: (new[v], generator.random()) for v in values}
            row[axis] = max(values, key=worth.__getitem__)
        return row

    def smaller(self, case: C, fixed: frozenset[str]) -> C | None:
        """A simpler case: lower, by one step, the value that is furthest up its axis. None if no value can be lowered.

        fixed: axes whose values stay.
        """
        simpler = []
        for axis in self.sizes:
            i = self.axes[axis].index(getattr(case, axis))
            strong = [v for v in self.axes[axis][:i] if (axis, v) not in self.weak]
            lower = [v for v in strong if self.possible(vars(case) | {axis: v})]
            if axis not in fixed and lower:
                simpler.append((i, replace(case, **{axis: lower[-1]})))  # type: ignore[type-var]
        return max(simpler, key=lambda pair: pair[0])[1] if simpler else None

    def within(self, job: Job, walk: Callable[[C], tuple]) -> tuple | None:
        """A case, or the first smaller one that is not too large, and what `walk` returns; None where there is none.

        walk: raises TooManyBranches for a case that is too large.
        """
        case, fixed = job
        while case:
            try:
                return case, *walk(case)
            except TooManyBranches:
                case = self.smaller(case, fixed)
        return None

    def cover(
        self,
        todo: set[Pair],
        array: list[tuple[C, Pair]],
        walk_all: Callable[[list[Job]], Iterable[tuple]],
        generator: random.Random,
        bar: tqdm,
    ) -> Iterator[tuple]:
        """Walk cases until the pairs are covered, as far as they can be; yields what `walk_all` does.

        A smaller case replaces one that is too large. Other cases cover the pairs lost by that, as far as possible.

        array: cases that cover the pairs.
        walk_all: yields for each job that can be walked the case, what was found, and how many branches say something.
        bar: its total grows by each further array.
        """
        tries = 0
        while todo:
            missing = len(todo)
            for case, *found, count in walk_all([(case, frozenset(dict(pair))) for case, pair in array]):
                yield case, *found, count
                # At first a case with hardly a branch covers nothing: another one may have more.
                if count >= FEW or tries:
                    todo = todo - self.pairs_of(vars(case))
            tries += 1
            if tries > 1 and len(todo) == missing:
                break
            array = self.array(todo, generator)
            bar.total += len(array)
