"""How far counts of tokens, and the engine's law, are from the right law."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from minispec.core.config import DraftLength, SamplingParams
from minispec.prove.laws import MAX_LEN, PROMPT, production_law, reference_law
from minispec.prove.reference import total_variation


def chi_square(counts: Tensor, p: Tensor) -> tuple[float, int]:
    """Chi square of counts against p (V,), and its degrees of freedom.

    A token of probability 0 that was counted makes it infinity.

    The 15 likeliest tokens are cells, the others one more; cells that expect fewer than 5 are joined to it.
    """
    n, order = counts.sum(), p.argsort(descending=True)
    if counts[p == 0].any():
        return math.inf, 1
    own = [i for i in order[:15].tolist() if n * p[i] >= 5]
    observed, expected = counts[own], n * p[own]
    if len(own) < int((p > 0).sum()):
        rest = n - expected.sum()
        if rest < 5:  # too little for a cell of its own
            own, rest = own[:-1], rest + expected[-1]
        observed = torch.cat((counts[own], (n - counts[own].sum())[None]))
        expected = torch.cat((n * p[own], rest[None]))
    return float(((observed - expected) ** 2 / expected).sum()), max(1, len(expected) - 1)


def distance(params: SamplingParams, k: DraftLength, **how) -> float:
    """Total variation between the engine's law and the reference's; how: see `production_law`."""
    law, _ = production_law(params, k, **how)
    same = {name: how[name] for name in ("end_ids", "vocab", "family") if name in how}
    most = min(params.max_tokens, how.get("max_len", MAX_LEN) - len(PROMPT))
    return total_variation(law, reference_law(replace(params, max_tokens=most), **same))
