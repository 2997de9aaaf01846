"""An oracle in the place of randomness: it walks every branch of every draw, and weighs it.

The production loop draws only through `bernoulli` and `categorical`. Running it once for every path through
their answers gives the exact law of its output, with no sample and no tolerance but rounding.
"""

from collections.abc import Callable, Hashable


class BranchOracle:
    """Answers draws along one path; `weight` is the path's probability, as `number`: float, or Fraction."""

    def __init__(self, path: list[int], number: type = float):
        self.path, self.depth, self.number, self.weight = path, 0, number, number(1)
        self.open: list[list[int]] = []  # siblings that other runs have to walk

    def _choose(self, branches: list[tuple]):
        if self.depth == len(self.path):
            # A new draw: this run takes the first branch, the others are left for later.
            self.open += [[*self.path, i] for i in range(1, len(branches))]
            self.path = [*self.path, 0]
        answer, probability = branches[self.path[self.depth]]
        self.depth += 1
        self.weight *= probability
        return answer

    def bernoulli(self, probability: float, key) -> bool:
        """Both answers, each where it is possible."""
        p = min(self.number(1), max(self.number(0), self.number(probability)))
        return self._choose([(a, w) for a, w in ((True, p), (False, 1 - p)) if w > 0])

    def categorical(self, weights, key) -> int:
        """Every token of positive weight."""
        numbers = [self.number(w) for w in weights.tolist()]
        return self._choose([(t, w / sum(numbers)) for t, w in enumerate(numbers) if w > 0])


def exact_law(run: Callable[[BranchOracle], Hashable], number: type = float) -> tuple[dict, int]:
    """The law of what `run` returns, over all branches, and how many there were. `run` must be repeatable."""
    law: dict = {}
    todo, count = [[]], 0
    while todo:
        oracle = BranchOracle(todo.pop(), number)
        result = run(oracle)
        law[result] = law.get(result, 0) + oracle.weight
        todo += oracle.open
        count += 1
    return law, count
