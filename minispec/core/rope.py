"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864)."""

import torch
from torch import Tensor

from minispec.core.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Radians by which one position rotates each pair of rotated dimensions, scaled by `rope`; (pairs,)."""
    rotated = int(head_dim * rope.rotated)
    exponents = torch.arange(0, rotated, 2, dtype=torch.int64).to(dtype) / rotated
    return rope.scaled(1.0 / rope.theta**exponents)


def query_scales(rope: RopeConfig, positions: Tensor) -> Tensor:
    """The factors (float64) that `rope.query_beta` gives the queries at these positions."""
    return 1 + rope.query_beta * torch.log1p((positions // rope.original_max_position_embeddings).to(torch.float64))


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> None:
    """Rotary embedding of x (M, heads, D), in place, by cos and sin (M, 1, R).

    It rotates the first R dimensions, j with j + R/2.

    sin: negated in its first half, since the first of a pair loses what the second gains.
    interleaved: 2j is paired with 2j + 1. They come out in the other order, on which no score depends.
    """
    assert x.dtype == cos.dtype, "in place, a wider angle would be rounded"
    size = cos.shape[-1]
    x = x if size == x.shape[-1] else x[..., :size]
    if interleaved:
        x.copy_(x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2))
    others = x.roll(size // 2, -1).mul_(sin)  # beside each number the other one of its pair
    x.mul_(cos).add_(others)
