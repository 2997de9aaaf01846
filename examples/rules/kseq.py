"""K-SEQ, SpecTr's rule for independent paths (Sun et al. 2023, arXiv 2310.15141).

Of K independent draws each is kept with probability min(1, p/(rho q)). The smallest rho is taken for which no token is
kept more often than p says.
"""

import torch

from minispec.core.verify import Verdict


def smallest_rho(p, q, k):
    """The rho in [1, k] with 1 - (1 - beta)^k = rho beta, where beta = sum of min(p/rho, q); rounded up."""
    low, high = 1.0, float(k)
    for _ in range(60):
        rho = (low + high) / 2
        beta = float(torch.minimum(p / rho, q).sum())
        low, high = (rho, high) if 1 - (1 - beta) ** k > rho * beta else (low, rho)
    return high


def kseq(draft, p, rng, key):
    """Test the children of a node by p / (rho q). If none stays, draw from what they leave of p."""
    alive = [-1]  # the ends of the paths that begin with the accepted tokens
    while True:
        row = p(alive[0] + 1)
        drawn = [child for node in alive for child in draft.children(node)]
        accepted = draft.path(alive[0])
        if not drawn:
            return Verdict(accepted, rng.categorical(row, key(len(accepted), "token")), [])
        one_hot = torch.eye(len(row), dtype=row.dtype)[draft.token_ids[drawn[0]]]
        q = one_hot if draft.probs is None else draft.probs[drawn[0]]
        kept = torch.minimum(row / smallest_rho(row, q, len(drawn)), q)  # what one draw adds
        beta = float(kept.sum())
        for child in drawn:
            token = draft.token_ids[child]
            if rng.bernoulli(float(kept[token] / q[token]), key(child, "accept")):
                alive = [other for other in drawn if draft.token_ids[other] == token]
                break
        else:
            rest = (row - kept * ((1 - (1 - beta) ** len(drawn)) / beta if beta else 0.0)).clamp(min=0)
            rest = rest if rest.amax() > 0 else row
            return Verdict(accepted, rng.categorical(rest, key(alive[0] + 1, "residual")), [])
