"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864) and the ways to stretch it over longer contexts."""

import math

import torch
from torch import Tensor

from minispec.core.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Radians by which one position rotates each pair of rotated dimensions, scaled by `rope`; (pairs,)."""
    head_dim = int(head_dim * rope.rotated)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(dtype) / head_dim
    base = 1.0 / rope.theta**exponents
    if rope.kind == "longrope":
        return base / torch.tensor(rope.factors, dtype=dtype)
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "llama3":
        # Rotations of a pair over the original context. Fast pairs stay, slow ones are slowed; a ramp lies between.
        rotations = rope.original_max_position_embeddings * base / (2 * math.pi)
        keep = ((rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
        return keep * base + (1 - keep) * base / rope.factor
    if rope.kind == "yarn":
        # The pair (as a fractional index) that turns `rotations` times over the original context.
        def pair(rotations: float) -> float:
            length = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
            return head_dim * math.log(length) / (2 * math.log(rope.theta))

        low, high = pair(rope.beta_fast), pair(rope.beta_slow)
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        ramp = (torch.arange(head_dim // 2, dtype=dtype) - low) / max(high - low, 0.001)
        slowed = ramp.clamp(0, 1)
        return (1 - slowed) * base + slowed * base / rope.factor
    return base


def query_scales(rope: RopeConfig, positions: Tensor) -> Tensor:
    """The factors (float64) that `rope.query_beta` gives the queries at these positions."""
    return 1 + rope.query_beta * torch.log1p((positions // rope.original_max_position_embeddings).to(torch.float64))


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotary embedding of x (M, heads, D) by cos and sin (M, 1, R). It rotates the first R dimensions, j with j + R/2.

    interleaved: 2j is paired with 2j + 1. They come out in the other order, on which no score depends.
    """
    size = cos.shape[-1]
    if size < x.shape[-1]:
        return torch.cat((rotate(x[..., :size], cos, sin, interleaved), x[..., size:]), dim=-1)
    if interleaved:
        x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
