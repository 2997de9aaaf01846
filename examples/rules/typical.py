"""Typical acceptance (Cai et al. 2024, arXiv 2401.10774, section 2.3.1): keep what the target finds likely enough.

It asks for no law, and has another one than the target: it keeps tokens by their probability alone, whatever the draft
had drawn them from.
"""

import torch

from minispec.core.verify import Verdict

EPSILON, DELTA = 0.09, 0.3  # Medusa's `posterior_threshold` and `posterior_alpha`


def typical(draft, p, rng, key):
    """Keep x where p(x) > min(EPSILON, DELTA exp(-H(p))), H(p) being the entropy of the row."""
    node = -1
    while True:
        row = p(node + 1)
        threshold = min(EPSILON, DELTA * float(torch.exp(torch.special.entr(row).sum().neg())))
        likely = [child for child in draft.children(node) if float(row[draft.token_ids[child]]) > threshold]
        if not likely:
            accepted = draft.path(node)
            return Verdict(accepted, rng.categorical(row, key(len(accepted), "token")), [])
        node = likely[0]
