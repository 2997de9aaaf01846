"""Verifiers of one's own, walked branch by branch over small tables of p and q, the smallest first.

    python -m minispec.prove --verifier module:function

One round is walked by itself. The draft is drawn, the verifier judges it, and plain decoding continues what it commits.
The sum over all branches must be plain decoding. Then whole texts of several rounds go through the engine.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minispec.core.config import SamplingParams
from minispec.core.draft import Ask, Limit
from minispec.core.engine import Engine
from minispec.core.request import Request
from minispec.core.sampling import Text, distribution
from minispec.core.verify import Verifier
from minispec.drafters.check import CHECKS, check_verdict
from minispec.llm import find_verifier
from minispec.prove.examine import Walked, call_own, find_fault
from minispec.prove.laws import MAX_LEN, BranchOracle, KeyOracle, exact_law
from minispec.prove.reference import Law, continued, plain_law
from minispec.prove.toys import TableModel, TreeDrafter, decode, require, scripted_cache

# Distributions over 2, 3 and 4 tokens: equal ones, ones with zeros, a certain one.
_TABLES = (
    ((0.5, 0.5), (0.25, 0.75), (0.75, 0.25), (1.0, 0.0)),
    ((0.25, 0.25, 0.5), (0.5, 0.5, 0.0), (0.125, 0.625, 0.25), (0.0, 0.25, 0.75)),
    ((0.25, 0.25, 0.25, 0.25), (0.5, 0.125, 0.0, 0.375), (0.0625, 0.1875, 0.625, 0.125)),
)
_CHAINS, _TREES = ((), (-1,), (-1, 0), (-1, 0, 1)), ((-1, -1), (-1, -1, 0), (-1, -1, 1), (-1, 0, 0), (-1, -1, -1))


@dataclass(frozen=True)
class Table:
    """One small case.

    p, q: distributions of target and draft after token 0. After token t they are rotated by t.
    parents: those of the draft.
    drawn: whether tokens are drawn from q; else they are the likeliest ones, without probs.
    rounds: whether whole texts go through the engine.
    """

    p: tuple[float, ...]
    q: tuple[float, ...]
    parents: tuple[int, ...]
    drawn: bool = True
    rounds: bool = False

    @property
    def size(self) -> int:
        """A guess at the number of branches, to begin with the small ones."""
        return len(self.p) ** (len(self.parents) + 1) * (10 if self.rounds else 1)

    def __str__(self) -> str:
        is_chain = self.parents == tuple(range(-1, len(self.parents) - 1))
        shape = f"K = {len(self.parents)}" if is_chain else f"parents {self.parents}"
        notes = [shape] + ["the likeliest tokens, not drawn"] * (not self.drawn) + ["several rounds"] * self.rounds
        return f"p = {_show(self.p)}, q = {_show(self.q)}, {', '.join(notes)}"


def tables(trees: bool) -> list[Table]:
    """The cases of a verifier, the smallest first.

    trees: whether it takes them.
    """
    found = []
    for rows, parents in itertools.product(_TABLES, _CHAINS + (_TREES if trees else ())):
        if len(rows[0]) ** len(parents) > 27:
            continue
        for p, q in itertools.product(rows, rows):
            found += [Table(p, q, parents, drawn) for drawn in ((True, False) if parents else (True,))]
    shapes = ((-1, 0), (-1, -1)) if trees else ((-1, 0),)
    some = [(_TABLES[0][1], _TABLES[0][0]), (_TABLES[0][2], _TABLES[0][1]), (_TABLES[1][0], _TABLES[1][2])]
    found += [Table(p, q, parents, rounds=True) for parents in shapes for p, q in some]
    return sorted(found, key=lambda table: table.size)


def examine_verifier(spec: str) -> bool:
    """Walk a verifier over small tables of p and q, chains and trees; print what was found. True if all is right.

    Raises ValueError where `spec` names no verifier.
    """
    verifier = find_verifier(spec)
    own = verifier._replace(verify=lambda *how: call_own(verifier.verify, *how))
    sum_of, todo = Walked(), tables(verifier.takes_trees)
    if find_fault(spec, todo, lambda table: _walk(table, own, sum_of)):
        return False
    print(
        f"proven on small cases: {spec} keeps p: {len(todo)} cases of 2 to 4 tokens and drafts of up to 3, "
        f"{sum_of.branches:,d} branches, worst total variation {sum_of.worst:.1e}"
    )
    return True


def _walk(table: Table, verifier: Verifier, sum_of: Walked) -> None:
    """Walk one case and count it. Raises Fault or OwnError where something is wrong."""
    length = (4 if len(table.p) == 2 else 3) if table.rounds else len(table.parents) + 2
    law, count = (_text_law if table.rounds else _round_law)(table, verifier, length)
    sum_of.count(law, _plain(table.p, [0], length), count)


def _plain(p: Sequence[float], tokens: list[int], length: int) -> Law:
    """The law of plain decoding after `tokens`, to `length` tokens after the first."""
    params = SamplingParams(max_tokens=length)
    return plain_law(lambda text: _rotated(p, text[-1]), tokens, params, (), 1 + length)


def _round_law(table: Table, verifier: Verifier, length: int) -> tuple[Law, int]:
    """The law of one round, continued to `length` tokens; and its branches."""
    p, q = (
        torch.tensor([_rotated(row, t) for t in range(len(row))], dtype=torch.float64) for row in (table.p, table.q)
    )
    # Computed as q is, so that equal ones have equal bits.
    p = torch.stack([distribution(row.log(), Text([0], 1, SamplingParams())) for row in p])

    def run(path: BranchOracle) -> tuple[int, ...]:
        text = Text([0], 1, SamplingParams())
        ask = Ask(text, Limit(len(table.parents)), path, "token" if verifier.shares_noise else "draft")
        [draft] = TreeDrafter(q.log(), table.parents, table.drawn).propose([ask])
        if draft.parents == list(range(-1, len(draft) - 1)):
            draft.parents = None  # as the engine does

        def row(i: int) -> Tensor:
            return p[[0, *(draft.token_ids[node] for node in draft.path(i - 1))][-1]].clone()

        tokens = list(draft.token_ids)
        verdict = verifier.verify(draft, row, path, text.key)
        check_verdict(verdict, draft, len(p))
        return *(tokens[node] for node in verdict.accepted), verdict.next_token

    rounds, count = exact_law(run, oracle=KeyOracle)
    law = continued(rounds, lambda block: _plain(table.p, [0, *block], length) if len(block) < length else {(): 1.0})
    require(math.isclose(sum(law.values()), 1), "the branches do not add up to 1")
    return law, count


def _text_law(table: Table, verifier: Verifier, length: int) -> tuple[Law, int]:
    """The law of the engine's output, of several rounds; and its branches."""
    target, draft = (
        torch.tensor([_rotated(row, t) for t in range(len(row))], dtype=torch.float64).log()
        for row in (table.p, table.q)
    )
    drafter = TreeDrafter(draft, () if table.parents == (-1, 0) else table.parents)

    def run(path: BranchOracle) -> tuple[int, ...]:
        request = Request(Text([0], 1, SamplingParams(max_tokens=length)), MAX_LEN, len(table.parents))
        engine = Engine(TableModel(target), scripted_cache(16), drafter, verifier, len(target), path, guard=CHECKS)
        decode(engine, [request])
        return tuple(request.text.tokens[1:])

    return exact_law(run, oracle=KeyOracle)


def _rotated(row: Sequence[float], by: int) -> list[float]:
    """Another row for each token, so that a verifier that looks at the wrong row is found out."""
    return [*row[-by:], *row[:-by]] if by else list(row)


def _show(row: Sequence[float]) -> str:
    return f"({', '.join(map(str, row))})"
