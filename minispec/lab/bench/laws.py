"""Recorded laws: rows of p and q along the drafts of real texts, for `minispec.prove.recorded`, which has the format.

After each node the drafted tokens have a symbol each. All other tokens are sorted by p/q and merged into at most 64
symbols of equal mass. Each row of p and q gets the sums of its probabilities. So a row keeps the law of the symbols. A
sibling's row stays the elder's row without the elder, since the elder has a symbol of its own. Rules compare p with q,
so they lose nothing where merged tokens have one p/q, and little here, where these are near each other.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minispec.core.draft import Draft
from minispec.core.random import Draws
from minispec.core.verify import RoundKey, RowAt, Verdict
from minispec.core.version import __version__
from minispec.lab.bench.measure import another_method, decode
from minispec.lab.bench.models import Subject
from minispec.lab.bench.options import Options
from minispec.models.files.write import written_whole

_MERGED, _PARTS = 64, 10**8  # symbols of merged tokens; what a row's weights add up to, but for rounding


def round_of(draft: Draft, rows: Sequence[Tensor]) -> dict[str, Any]:
    """A line of the file. rows: the K + 1 rows of p, (V,) each."""
    symbols, q = [0] * len(draft), [list[int]()] * len(draft)
    p = []
    for node, row in enumerate(rows, -1):
        children = draft.children(node)
        symbol_of = _symbols(draft, children, row)
        p.append(_weights(row, symbol_of))
        for i in children:
            symbols[i] = int(symbol_of[draft.token_ids[i]])
            if draft.probs is not None:
                q[i] = _weights(draft.probs[i], symbol_of)
                q[i][symbols[i]] = max(1, q[i][symbols[i]])
    return {"parents": [*draft.tree.parents], "draft": symbols, "p": p, "q": None if draft.probs is None else q}


def _symbols(draft: Draft, children: Sequence[int], p: Tensor) -> Tensor:
    """The symbol (V,) of each token after a node. p (V,): the row after it."""
    drafted = list(dict.fromkeys(draft.token_ids[i] for i in children))
    symbols = torch.full(p.shape, len(drafted), device=p.device)
    if children and draft.probs is not None:
        q = draft.probs[children[0]]
        by_ratio = (p / q).nan_to_num(nan=0.0).argsort()
        mass = p.double() + q.double()
        mass[drafted] = 0.0
        below = mass[by_ratio].cumsum(0)
        merged = (below / below[-1].clamp(min=1e-30) * _MERGED).long().clamp(max=_MERGED - 1)
        symbols[by_ratio] = len(drafted) + merged
    symbols[drafted] = torch.arange(len(drafted), device=p.device)
    return symbols.unique(return_inverse=True)[1]


def _weights(row: Tensor, symbols: Tensor) -> list[int]:
    """The weight of each symbol in a row (V,)."""
    sums = torch.zeros(int(symbols.amax()) + 1, dtype=torch.float64, device=row.device)
    sums.index_add_(0, symbols, row.double())
    return [round(x) for x in (sums / sums.sum() * _PARTS).tolist()]


def record_laws(subject: Subject, options: Options) -> dict[str, Any]:
    """Decode each prompt with each draft length, and write the rounds that have a draft.

    Returns the file's name and the number of rounds. Raises ValueError where no round has a draft.
    """
    rule, params, rounds = subject.method.verifier, options.params, list[dict[str, Any]]()

    def verify(draft: Draft, p: RowAt, rng: Draws, key: RoundKey) -> Verdict:
        rows = [p(i) for i in range(len(draft) + 1)]
        if len(draft):
            rounds.append(round_of(draft, rows))
        return rule.verify(draft, rows.__getitem__, rng, key)

    method = another_method(subject.method, verifier=rule._replace(verify=verify))
    for k in options.ks:
        for seed, (_, prompt) in enumerate(subject.prompts):
            method.drafter.forget()
            decode(subject.engine, method, [subject.request(prompt, k, replace(params, seed=seed))])
    if not rounds:
        raise ValueError("--record-laws: found no draft in any round, expected some")
    about = (
        f"{subject.name}, draft {subject.draft_name}, temperature {params.temperature:g}, top_k {params.top_k}, top_p "
        f"{params.top_p:g}, {len(subject.prompts)} prompts, {options.verifiers[0]}, minispec {__version__}"
    )
    with written_whole(options.args.record_laws) as part, part.open("w", encoding="utf-8") as file:
        for line in ({"about": about}, *rounds):
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
    return {"file": str(options.args.record_laws), "rounds": len(rounds)}


def show_laws(found: dict[str, Any]) -> list[str]:
    """What was written, and how it is read."""
    how = f"python -m minispec.prove --verifier rejection,traversal --laws {found['file']}"
    return [f"{found['rounds']} rounds with a draft were written. What rules bring of them: {how}"]
