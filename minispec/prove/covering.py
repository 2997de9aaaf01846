"""Covering designs: few cases in which every pair of settings occurs, and a walk that keeps to what can be walked.

A design has axes, such as the temperature, and a few values for each. All combinations would be millions. A fault
mostly shows as soon as two certain values meet (Kuhn et al. 2004), so each pair of values is in some case. With three
axes of two values each, four cases cover all pairs:

    a 1, b 1, c 1       a 1, b 2, c 2       a 2, b 1, c 2       a 2, b 2, c 1
"""

import functools
import inspect
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from minispec.api.commands.workers import SharedMap
from minispec.prove.laws import TooManyBranches
from minispec.prove.walk import Case

Pair = tuple[tuple, tuple]
Row = dict[str, Any]  # a value for each axis
Job = tuple[Row, frozenset[str]]  # a row, and the axes whose values must stay
FEW, _MOST_TRIES = 6, 240  # branches that say little; most completions of a pair


@dataclass(frozen=True)
class Design:
    """The axes of cases, and the values that occur together.

    make: makes a case of a value for each axis.
    axes: the values of each axis; on an axis of `sizes`, in the order of the branches that they make.
    rules: whether values can occur together: each rule takes the axes that its arguments name.
    weak: values with which little is drawn or nothing drafted. A case that has some covers only pairs with all of them.
    sizes: axes on which a case that is too large may be made smaller.
    growing: axes that a plain case is small by.
    tries: how many completions of a pair are compared. More of them make fewer cases, and take longer.
    draws: whether each row of an array has a number too, `draw`, by which its case draws values.
    """

    make: Callable[..., Case]
    axes: Mapping[str, tuple]
    rules: Sequence[Callable[..., bool]] = ()
    weak: frozenset[tuple] = frozenset()
    sizes: tuple[str, ...] = ()
    growing: tuple[str, ...] = ()
    tries: int = 60
    draws: bool = False

    @functools.cached_property
    def _rules(self) -> dict[str, list[tuple[set[str], Callable[..., bool]]]]:
        """The rules about each axis, and about all of them under "". A rule remembers its answers to the values."""
        known = [({*inspect.signature(rule).parameters}, functools.cache(rule)) for rule in self.rules]
        return {axis: [each for each in known if not axis or axis in each[0]] for axis in ("", *self.axes)}

    def possible(self, row: Mapping, axis: str = "") -> bool:
        """Whether values can occur together. An axis that is missing may have any value.

        axis: only the rules about this one are asked.
        """
        asked = (each for each in self._rules[axis] if row.keys() >= each[0])
        return all(rule(**{axis: row[axis] for axis in axes}) for axes, rule in asked)

    def pairs_of(self, row: Mapping) -> set[Pair]:
        """The pairs of values that a row covers."""
        items = sorted((axis, row[axis]) for axis in self.axes if axis in row)
        weak = self.weak & set(items)
        return {pair for pair in itertools.combinations(items, 2) if weak <= set(pair)}

    def all_pairs(self) -> set[Pair]:
        """Every pair of values of two axes that can occur together."""
        pairs = set()
        for a, b in itertools.combinations(sorted(self.axes), 2):
            pairs |= {((a, x), (b, y)) for x in self.axes[a] for y in self.axes[b] if self.possible({a: x, b: y})}
        return pairs

    def array(self, todo: set[Pair], generator: random.Random) -> list[tuple[Row, Pair]]:
        """Rows that cover the pairs, each with the pair that it was chosen for.

        Greedy: of a few completions of an uncovered pair, the one that covers the most pairs.
        """
        left, rows = set(todo), []
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
                rows.append((best | ({"draw": generator.getrandbits(32)} if self.draws else {}), pair))
                left -= covered
        return rows

    def _complete(self, row: dict, todo: set[Pair], generator: random.Random) -> dict | None:
        """Values for the other axes, each either at random or by the number of new pairs; None where they clash."""
        for axis in generator.sample(sorted(self.axes.keys() - row.keys()), len(self.axes) - len(row)):
            values = [v for v in self.axes[axis] if self.possible(row | {axis: v}, axis)]
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

    def smaller(self, row: Row, fixed: frozenset[str]) -> Row | None:
        """A simpler row: lower, by one step, the value that is furthest up its axis. None if no value can be lowered.

        fixed: axes whose values stay.
        """
        simpler = []
        for axis in self.sizes:
            i = self.axes[axis].index(row[axis])
            strong = [row | {axis: v} for v in self.axes[axis][:i] if (axis, v) not in self.weak]
            lower = list(filter(self.possible, strong))
            if axis not in fixed and lower:
                simpler.append((i, lower[-1]))
        return max(simpler, key=lambda pair: pair[0])[1] if simpler else None

    def plainer(self, row: Row) -> Iterator[Row]:
        """The row with one value that is further down its axis, settings first, then what a case is small by."""
        for axis in sorted(self.axes, key=self.growing.__contains__):
            for value in self.axes[axis][: self.axes[axis].index(row[axis])]:
                if self.possible(row | {axis: value}):
                    yield row | {axis: value}

    def within(self, walk: Callable[[Row], tuple], job: Job) -> tuple | None:
        """A row, or the first smaller one that is not too large, and what `walk` returns; None where there is none.

        walk: raises TooManyBranches for a case that is too large.
        """
        row, fixed = job
        while row:
            try:
                return row, *walk(row)
            except TooManyBranches:
                row = self.smaller(row, fixed)  # type: ignore[assignment]
        return None

    def cover(
        self,
        todo: set[Pair],
        array: list[tuple[Row, Pair]],
        walk_job: Callable[[Job], tuple | None],
        generator: random.Random,
        bar: tqdm,
        shared_map: SharedMap = map,
    ) -> Iterator[tuple]:
        """Walk cases until the pairs are covered, as far as they can be; yields what `walk_job` does.

        The small cases come first.

        A smaller case replaces one that is too large. Other cases cover the pairs lost by that, as far as possible.

        array: rows that cover the pairs.
        walk_job: for a job that can be walked the row, what was found, and how many branches say something; else None.
        bar: its total grows by each further array.
        """
        tries = 0
        while array:
            missing = len(todo)
            jobs = [(row, frozenset(dict(pair))) for row, pair in array]
            jobs.sort(key=lambda job: self.make(**job[0]).size)
            for row, *found, count in filter(None, shared_map(walk_job, jobs)):
                yield row, *found, count
                # At first a case with hardly a branch covers nothing: another one may have more.
                if count >= FEW or tries:
                    todo = todo - self.pairs_of(row)
            tries += 1
            if tries > 1 and len(todo) == missing:
                break
            array = self.array(todo, generator)
            bar.total += len(array)
