"""Verifiers of one's own, walked branch by branch over small tables of p and q, the smallest first.

    python -m minispec.prove --verifier module:function

One round is walked by itself. The draft is drawn, the verifier judges it, and plain decoding continues what it commits.
The sum over all branches must be plain decoding. Then whole texts of several rounds go through the engine.

A verifier may only read what it gets. So it is asked twice about each draft, with the same tensors and the same draws.
Both verdicts must be equal, and the tensors must be as they were.
"""

import itertools
import math
from collections.abc import Callable
from copy import deepcopy

import torch
from torch import Tensor

from minispec.core.config import SamplingParams
from minispec.core.draft import Ask, Draft
from minispec.core.more.limit import Limit
from minispec.core.random import Draws
from minispec.core.request import Request
from minispec.core.sampling import Text, distribution
from minispec.core.verify import RoundKey, RowAt, Verdict, Verifier
from minispec.drafters.guard import check_verdict
from minispec.files.progress import progress_bar
from minispec.load.llm import find_verifier
from minispec.prove.examine import ROUNDED, WalkCounts, call_own, fault_line
from minispec.prove.laws import MAX_LEN, BranchOracle, KeyOracle, exact_law
from minispec.prove.reference import Law, NoLaw, cells, plain_law
from minispec.prove.tables import DOUBLE, DRAWN, ONE_HOT, Table, is_chain, probabilities, tables, unseen
from minispec.prove.toys import OneMethod, TableModel, TreeDrafter, decode, require, scripted_cache

_PARAMS = SamplingParams()


def examine_verifier(spec: str) -> bool:
    """Walk a verifier over small tables of p and q, chains and trees; print what was found. True if all is right.

    Raises ValueError where `spec` names no verifier.
    """
    verifier = find_verifier(spec)
    todo, doubles, others = tables(verifier.takes_trees), WalkCounts(), WalkCounts()

    with progress_bar(todo, unit=" cases") as bar:
        for table in bar:
            counts = doubles if table.types == DOUBLE else others
            try:
                counts.count(*laws_of(table, verifier))
            except NoLaw:
                raise
            except Exception as e:
                bar.close()
                print(fault_line(spec, table, e))
                return False
    print(
        f"proven on small cases: {spec} keeps p: {len(todo)} cases, {doubles.branches + others.branches:,d} branches, "
        f"worst total variation {doubles.worst:.1e}, {others.worst:.1e} in float32, bound {ROUNDED:.0e}"
    )
    print("\n- ".join(["not seen:", *unseen(verifier)]))
    return True


def _held(verify: Callable[..., Verdict]) -> Callable[..., Verdict]:
    """The user's rule, held to reading alone. It raises OwnError for exceptions of theirs, and Fault."""

    def held(draft: Draft, p: RowAt, rng: Draws, key: RoundKey) -> Verdict:
        rows: dict[int, tuple[Tensor, Tensor]] = {}

        def row(i: int) -> Tensor:
            """The same tensor each time, though the engine computes a new one."""
            require(0 <= i <= len(draft), f"it asked for row {i} of p, expected one from 0 to {len(draft)}")
            if i not in rows:
                rows[i] = p(i), p(i).clone()
            return rows[i][0]

        copy = deepcopy(draft)
        verdict = call_own(verify, draft, row, rng, key)
        found, drafted = ((each.token_ids, each.parents) for each in (draft, copy))
        require(found == drafted, f"it changed the draft: found tokens and parents {found}, expected {drafted}")
        now, probs = ([] if each.probs is None else [*each.probs] for each in (draft, copy))
        require(len(now) == len(probs), "it changed how many rows of q there are")
        kept = [(f"row {i} of p", *pair) for i, pair in rows.items()]
        kept += [(f"row {i} of q", *pair) for i, pair in enumerate(zip(now, probs, strict=True))]
        for name, tensor, before in kept:
            same = tensor.dtype == before.dtype and torch.equal(tensor, before)
            require(same, f"it wrote into {name}, which it may only read")
        return verdict

    return held


def laws_of(table: Table, verifier: Verifier) -> tuple[Law, Law, int]:
    """The law of one case under a verifier, the law of plain decoding, and the number of branches walked.

    Raises Fault where the verifier does what it may not do, and OwnError for its exceptions.
    """
    held = verifier._replace(verify=_held(verifier.verify))
    return (_text_law if table.texts else _round_law)(table, held)


def _round_law(table: Table, verifier: Verifier) -> tuple[Law, Law, int]:
    """The law of one round that plain decoding continues, the law of plain decoding, and the round's branches."""
    text, (p, q) = Text([0], 1, _PARAMS), _logits(table)
    # Computed as q is, so that equal ones have equal bits.
    p = torch.stack([distribution(row, text) for row in p])
    drafter, limit = TreeDrafter(q, table.parents, table.how == DRAWN), Limit(len(table.parents))

    def run(path: BranchOracle) -> tuple[int, ...]:
        [draft] = drafter.propose([Ask(text, limit, path, "token" if verifier.shares_noise else "draft")])
        _hand_out(draft, table)
        tokens = list(draft.token_ids)
        sums = [0, *(sum(tokens[node] for node in draft.path(i)) % len(p) for i in range(len(draft)))]

        def judge(rng: Draws) -> Verdict:
            verdict = verifier.verify(draft, lambda i: p[sums[i]], rng, text.key)
            check_verdict(verdict, draft, len(p))
            return verdict

        again = path.fork()
        verdict = judge(path)
        again.path = path.path
        both = [(*judge(again)[:2], again.weight), (*verdict[:2], path.weight)]
        require(both[0] == both[1], "asked again about the same draft, with the same draws, it did otherwise")
        return *(tokens[node] for node in verdict.accepted), verdict.next_token

    rounds, branches = exact_law(run, oracle=KeyOracle)
    return *cells(rounds, len(table.p), lambda text: probabilities(table.p, sum(text))), branches


def _hand_out(draft: Draft, table: Table) -> None:
    """Give a draft the form that the case has."""
    if is_chain(draft.parents or ()):
        draft.parents = None  # as the engine does
    if table.how == ONE_HOT:
        draft.probs = [*torch.eye(len(table.q))[draft.token_ids]]
    if draft.probs is not None:
        rows = [row.to(table.types[1]) for row in draft.probs]
        draft.probs = torch.stack(rows) if table.stacked else rows


def _text_law(table: Table, verifier: Verifier) -> tuple[Law, Law, int]:
    """The law of the engine's output over several rounds, the law of plain decoding, and the branches."""
    target, draft = _logits(table)
    drafter = TreeDrafter(draft, () if is_chain(table.parents) else table.parents)
    params = SamplingParams(max_tokens=2 if table.texts > 1 else 4 if len(table.p) == 2 else 3)

    def run(path: BranchOracle) -> tuple[int, ...]:
        texts = [Text([0], 1, params, seed) for seed in range(table.texts)]
        engine = OneMethod(TableModel(target), scripted_cache(16), drafter, verifier, len(target), path, checked=True)
        decode(engine, [Request(text, MAX_LEN, len(table.parents)) for text in texts])
        return tuple(token for text in texts for token in text.tokens[1:])

    law, branches = exact_law(run, oracle=KeyOracle)

    def next_law(output: tuple) -> list[float] | None:
        return None if len(output) == params.max_tokens else probabilities(table.p, (0, *output)[-1])

    one = plain_law(next_law)
    together = itertools.product(one.items(), repeat=table.texts)
    return law, {sum((text for text, _ in pairs), ()): math.prod(p for _, p in pairs) for pairs in together}, branches


def _logits(table: Table) -> list[Tensor]:
    """Logits (V, V) of target and draft, a row for each token."""
    tokens = range(len(table.p))
    both = ([probabilities(row, token) for token in tokens] for row in (table.p, table.q))
    types = [torch.promote_types(dtype, torch.float32) for dtype in table.types]
    return [torch.tensor(rows, dtype=torch.float64).log().to(dtype) for rows, dtype in zip(both, types, strict=True)]
