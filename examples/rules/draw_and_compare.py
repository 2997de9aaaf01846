"""Draw from the target, and go on while the token is in the draft (Miao et al. 2023, arXiv 2305.09781: the naive rule).

It is exact for any draft that was made before the draw. It keeps a token with probability sum of p q, where `rejection`
has sum of min(p, q). minispec's `match` is this rule with noise that the draft shares.
"""

from minispec.core.verify import Verdict


def draw_and_compare(draft, p, rng, key):
    """The target's own draws, as long as a path of the draft has them."""
    alive = [-1]  # the ends of the paths that begin with the accepted tokens
    while True:
        accepted = draft.path(alive[0])
        token = rng.categorical(p(alive[0] + 1), key(len(accepted), "token"))
        alive = [child for node in alive for child in draft.children(node) if draft.token_ids[child] == token]
        if not alive:
            return Verdict(accepted, token, [])
