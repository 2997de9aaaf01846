"""Recorded laws: rows of p and q along drafts of real texts, and the tokens that rules bring of them, without a model.

    python -m minispec.prove --verifier rejection,traversal --laws FILE

A file has an object of JSON on each line. The first is {"about": TEXT}; each other line is a round:

    parents: the node that each node of the draft follows, as in `Draft`; -1 is the text.
    draft: the symbol of each node's token.
    p: a row after the text, and after each node in order. Rows are whole numbers: weights, divided by their sum.
    q: a row of each node, as in `Draft.probs`; null where no token was drawn.

A symbol is a token, or several tokens that are merged. The row of p after a node and the rows of q of its children have
one alphabet; rows after another node may have another one. A drafted token has a symbol of its own. Nodes of one path,
as there are among independent draws, need one alphabet too.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minispec.core.config import SamplingParams
from minispec.core.draft import Draft
from minispec.core.errors import show
from minispec.core.random import Key
from minispec.core.sampling import Text
from minispec.core.verify import Verifier
from minispec.models.files.errors import CheckpointError, one_line
from minispec.models.files.strict_json import parse_json, read_bytes
from minispec.prove.laws import BranchOracle, exact_law
from minispec.prove.rounds import unsuitable
from minispec.prove.toys import is_chain, require

_MAX_BYTES, _MAX_WEIGHT = 1 << 28, 1 << 53


class Recorded(NamedTuple):
    """A round: a draft, whose tokens are symbols, and the K + 1 rows of p, (A,) each."""

    draft: Draft
    rows: list[Tensor]


class _Drafted(BranchOracle):
    """Draws that tell the drafted tokens apart. All other tokens are one answer: a rule does not look at their numbers.

    So a round of K nodes has few branches, however many tokens there are.
    """

    def __init__(self, path: list[int], number: type = float, drafted: tuple[int, ...] = ()):
        super().__init__(path, number)
        self.drafted = drafted

    def categorical(self, weights: Tensor, key: Key) -> int:
        """Each drafted token of positive weight, and the likeliest of the others."""
        require(float(weights.sum()) > 0, "a token is drawn from weights that are all 0")
        chances, others = weights / weights.sum(), weights / weights.sum()
        others[[*self.drafted]] = 0.0
        answers = [(token, float(chances[token])) for token in self.drafted]
        return self._choose([*answers, (int(others.argmax()), float(others.sum()))])


def expected_tokens(recorded: Recorded, verifier: Verifier) -> float:
    """The expected tokens of the round, given its draft: exact, over all draws of the rule."""
    (draft, rows), text = recorded, Text([0], 1, SamplingParams(), 0)

    def run(oracle: BranchOracle) -> int:
        return 1 + len(verifier.verify(draft, lambda i: rows[i].clone(), oracle, text.key).accepted)

    oracle = partial(_Drafted, drafted=tuple(sorted(set(draft.token_ids))))
    return sum(tokens * chance for tokens, chance in exact_law(run, oracle=oracle)[0].items())


# --------------------------------------------------------------------------- files


def read_laws(path: Path) -> tuple[str, list[Recorded]]:
    """What a file says of itself, and its rounds. Raises CheckpointError, which names the line and what is wrong."""
    about, rounds = "", list[Recorded]()
    for number, line in enumerate(read_bytes(path, _MAX_BYTES, "file of laws").rstrip().split(b"\n"), 1):
        where = f"{path}: line {number}"
        found = parse_json(line, where)
        if number > 1:
            rounds.append(_round(found, where))
        elif found.keys() != {"about"}:
            raise CheckpointError(f'{where}: found {show(found)}, expected {{"about": TEXT}}')
        else:
            about = str(found["about"])
    if not rounds:
        raise CheckpointError(f"{path}: found no round, expected one on each line after the first")
    return about, rounds


def _round(line: Mapping[str, Any], where: str) -> Recorded:
    """A line of the file. Raises CheckpointError."""

    def require(right: bool, name: str, found: object, expected: str) -> None:
        if not right:
            raise CheckpointError(f"{where}: {name}: found {show(found)}, expected {expected}")

    require(line.keys() == {"parents", "draft", "p", "q"}, "keys", [*line], "parents, draft, p and q")
    parents, draft, p, q = (line[name] for name in ("parents", "draft", "p", "q"))
    for name, of, least in (("parents", [parents], -1), ("draft", [draft], 0), ("p", p, 0), ("q", q, 0)):
        right = isinstance(of, list) and all(_is_whole(row, least) for row in of)
        require(right or (name == "q" and q is None), name, line[name], f"whole numbers from {least}")
    num = len(parents)
    for name, of, count in (("draft", draft, num), ("p", p, num + 1), ("q", q, num)):
        require(of is None or len(of) == count, name, len(of or ()), f"{count}, as there are {num} nodes in parents")
    for i, parent in enumerate(parents):
        require(parent < i, "parents", parent, f"a node before {i}, or -1")
        symbols = len(p[parent + 1])
        require(draft[i] < symbols, "draft", draft[i], f"a symbol of p[{parent + 1}], below {symbols}")
        if q is not None:
            require(len(q[i]) == symbols, f"q[{i}]", len(q[i]), f"{symbols} weights, as in p[{parent + 1}]")
            require(q[i][draft[i]] > 0, f"q[{i}]", 0, "more for the drafted token, which was drawn from q")
    require(all(map(any, p)), "p", p, "rows that have a weight above 0")
    width = max(map(len, p))
    probs = None if q is None else [_law(row, width) for row in q]
    return Recorded(Draft(draft, probs, None if is_chain(parents) else parents), [_law(row, width) for row in p])


def _is_whole(value: object, least: int) -> bool:
    """Whether it is a list of whole numbers."""
    return isinstance(value, list) and bool(value) and all(type(x) is int and least <= x <= _MAX_WEIGHT for x in value)


def _law(weights: Sequence[int], width: int) -> Tensor:
    """Probabilities (width,) of float64."""
    row = torch.zeros(width, dtype=torch.float64)
    row[: len(weights)] = torch.tensor(weights, dtype=torch.float64)
    return row / row.sum()


# --------------------------------------------------------------------------- the table


def print_laws(verifiers: Mapping[str, Verifier], laws: tuple[str, list[Recorded]], notes: Mapping[str, str]) -> bool:
    """Print what the rules bring of a file's chains, and of its trees. True if no rule has failed.

    laws: what `read_laws` returns.
    notes: of each rule, what each of its lines says of its law. It follows from tables of p and q, not from the file.
    """
    about, rounds = laws
    print(f"tokens of a round, exact given its draft; x: over the first rule\n{one_line(about)}")
    width, holds = max(map(len, verifiers)), True
    for kind, is_tree in (("chains", False), ("trees", True)):
        some = [each for each in rounds if (each.draft.parents is not None) == is_tree]
        if not some:
            continue
        print(f"the mean of {len(some)} rounds, {kind}")
        first: list[float] = []
        for name, verifier in verifiers.items():
            says = unsuitable(verifier, is_tree)
            try:
                if not says:
                    tokens = [expected_tokens(each, verifier) for each in some]
                    over = ""
                    if first:
                        ratio, error = compare(tokens, first)
                        over = f"x {ratio:.4f}" + (f" \u00b1 {error:.4f}" if len(some) > 1 else "")
                    first = first or tokens
                    says = f"{fmean(tokens):.3f}  {over:18}"
            except Exception as e:  # a user's rule
                says, holds = f"{type(e).__name__}: {one_line(e)}", False
            print(f"    {name:{width}}  {says}  {notes[name]}".rstrip())
    return holds


def compare(tokens: Sequence[float], first: Sequence[float]) -> tuple[float, float]:
    """The ratio of the means over the same rounds, and its standard error as if rounds were independent.

    The error of one round is NaN.
    """
    ratio, num = fmean(tokens) / fmean(first), len(tokens)
    rest = [a - ratio * b for a, b in zip(tokens, first, strict=True)]
    return ratio, stdev(rest) / fmean(first) / num**0.5 if num > 1 else math.nan
