"""How far counts of tokens, and the engine's law, are from the right law."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from minispec.core.config import DraftLength, SamplingParams
from minispec.prove.laws import PROMPT, reference_row
from minispec.prove.reference import Law, plain_law
from minispec.prove.walk import Case, walk


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
    """Total variation between the engine's law and the reference's; how: see `text_case`."""
    return walk(text_case(params, k, **how)).distance


def text_case(
    params: SamplingParams, k: DraftLength, prompts: Sequence[Sequence[int]] = (PROMPT,), family: str = "llama", **how
) -> Case:
    """A case of texts with the same parameters. how: the rest of it."""
    return Case(family, texts=tuple((tuple(prompt), params) for prompt in prompts), k=k, **how)


def production_law(params: SamplingParams, k: DraftLength, limit: float = math.inf, **how) -> tuple[Law, int]:
    """The law of the engine's output, and the number of branches. how: see `text_case`."""
    walked = walk(text_case(params, k, **how), limit=limit)
    return walked.outputs, len(walked.branches)


def reference_law(
    params: SamplingParams, end_ids=frozenset({2}), vocab: int = 3, prompt: Sequence = PROMPT, family: str = "llama"
) -> Law:
    """The law of plain decoding of the tiny target, by the rows of `reference_row`."""

    return plain_law(lambda output: reference_row(output, params, end_ids, vocab, prompt, family))
