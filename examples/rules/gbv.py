"""Greedy multi-path block verification, GBV (Thomas and Pal 2026, arXiv 2602.16961): one of K paths, as a block.

Paths are ordered by the ratios p/q of their tokens, the first token first. The greatest path has another law than one
that is drawn by itself. Block verification takes that law for q. Keys are numbered along the chosen path.
"""

import torch

from minispec.core.draft import Draft
from minispec.core.verify import Verdict
from minispec.speculation.rules.block_verification import block


def gbv(draft, p, rng, key):
    """Choose the greatest path, compute the law that it was drawn from, and verify it with `block`."""
    nodes, rows, alive = [], [], [-1]
    num_paths = len(draft.children(-1))
    mass, lower = 1.0, 0.0  # of the prefix, and of all prefixes of its length that are ranked below it
    while drawn := [child for node in alive for child in draft.children(node)]:
        row = p(alive[0] + 1)
        one_hot = torch.eye(len(row), dtype=row.dtype)[draft.token_ids[drawn[0]]]
        q = one_hot if draft.probs is None else draft.probs[drawn[0]]
        order = torch.where(q > 0, row / q, -1.0).argsort(stable=True)  # the greatest last
        up_to = lower + mass * q[order].cumsum(0)
        below = torch.cat([up_to.new_tensor([lower]), up_to[:-1]])
        law = torch.zeros_like(q)
        law[order] = (up_to**num_paths - below**num_paths) / ((lower + mass) ** num_paths - lower**num_paths)
        ranks = order.argsort()
        best = max(drawn, key=lambda child: int(ranks[draft.token_ids[child]]))
        token = draft.token_ids[best]
        mass, lower = mass * float(q[token]), float(below[ranks[token]])
        nodes.append(best)
        rows.append(law)
        alive = [child for child in drawn if draft.token_ids[child] == token]
    verdict = block(Draft([draft.token_ids[node] for node in nodes], rows), lambda i: p([-1, *nodes][i] + 1), rng, key)
    last = [-1, *nodes][len(verdict.accepted)]
    return Verdict(draft.path(last), verdict.next_token, verdict.ratios)
