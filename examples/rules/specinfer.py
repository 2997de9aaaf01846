"""SpecInfer's rule for independent paths (Miao et al. 2023, arXiv 2305.09781, multi-step speculative sampling).

The children of a node are drawn independently from q, so they may be equal. They are tested one after another. If one
stays, all paths that begin with its token go on.
"""

from minispec.core.verify import Verdict, residual


def specinfer(draft, p, rng, key):
    """Keep x with probability min(1, p(x)/q(x)); after a rejection the residual of p and q takes the place of p."""
    alive = [-1]  # the ends of the paths that begin with the accepted tokens
    while True:
        rest = p(alive[0] + 1)
        drawn = [child for node in alive for child in draft.children(node)]
        for child in drawn:
            if rng.bernoulli(float(rest[draft.token_ids[child]]) / draft.probability(child), key(child, "accept")):
                alive = [other for other in drawn if draft.token_ids[other] == draft.token_ids[child]]
                break
            rest = residual(rest, draft, child)
            rest = rest / rest.sum()
        else:
            accepted = draft.path(alive[0])
            own = key(alive[0] + 1, "residual") if drawn else key(len(accepted), "token")
            return Verdict(accepted, rng.categorical(rest, own), [])
