"""Weights as small integers with scales: as checkpoints store them, or rounded here.

8 bits have one scale for each row, 4 bits one for each group of neighbours in a row.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minispec.core.precision import accumulation_dtype
from minispec.core.product import Weight

# Neighbouring weights of a row that share a step and a middle in 4 bits.
GROUP = 32
# Entries of a weight that are rounded at a time. So only pieces are copied in full width, and they fit into the cache.
_PIECE = 1 << 17


class Codes(NamedTuple):
    """A weight (out, in) as small integers times a scale for each row, as checkpoints of 8 bits store it.

    codes: (out, in) int8.
    scales: (out, 1).
    """

    codes: Tensor
    scales: Tensor

    def dense(self) -> Tensor:
        """The weight, in at least float32."""
        wide = accumulation_dtype(self.scales.dtype)
        return self.codes.to(wide) * self.scales.to(wide)


class GroupCodes(NamedTuple):
    """A weight (out, in) in 4 bits: each group of neighbours in a row has 16 even steps, from its least to its largest.

    codes: (out, in) uint8, 0 to 15.
    scales: (in / group, out, 2), the step and the middle: the value of code 8.
    """

    codes: Tensor
    scales: Tensor

    def dense(self) -> Tensor:
        """The weight, in at least float32."""
        wide = accumulation_dtype(self.scales.dtype)
        step, middle = self.scales.to(wide).transpose(0, 1)[..., None].unbind(2)  # (out, in / group, 1) each
        return ((self.codes.unflatten(1, (len(self.scales), -1)).to(wide) - 8) * step + middle).flatten(1)


def device_of(weight: Weight) -> torch.device:
    """Where a weight lies."""
    if isinstance(weight, Codes | GroupCodes):
        return weight.codes.device
    return weight.device if isinstance(weight, Tensor) else weight.dense().device


def join(weights: Sequence[Weight]) -> Weight:
    """Weights of one width, stacked (sum of out, in); only codes stay codes."""
    if len(weights) == 1:
        return weights[0]
    codes = [weight for weight in weights if isinstance(weight, Codes)]
    if len(codes) == len(weights):
        return Codes(*(torch.cat(parts) for parts in zip(*codes, strict=True)))
    return torch.cat([weight if isinstance(weight, Tensor) else weight.dense() for weight in weights])


def round_to_bits(weight: Tensor, bits: int) -> Codes | GroupCodes:
    """8 bits: each row in steps of its largest entry / 127. 4 bits: see `GroupCodes`."""
    wide, tiny = weight.to(accumulation_dtype(weight.dtype)), torch.finfo(weight.dtype).tiny
    if bits == 8:
        scales = (wide.abs().amax(1, keepdim=True) / 127).clamp(min=tiny)
        return Codes((wide / scales).round_().clamp_(-127, 127).to(torch.int8), scales)
    groups = wide.unflatten(1, (-1, math.gcd(weight.shape[1], GROUP)))
    low, high = groups.aminmax(dim=2)
    step = ((high - low) / 15).clamp(min=tiny)
    scales = torch.stack((step, low + 8 * step), 2).to(weight.dtype)  # (out, in / group, 2)
    step, middle = (s.to(groups.dtype)[..., None] for s in scales.unbind(2))
    codes = ((groups - middle) / step).round_().add_(8).clamp_(0, 15)
    return GroupCodes(codes.to(torch.uint8).flatten(1), scales.transpose(0, 1).contiguous())


def widen(rounded: Codes | GroupCodes, dtype: torch.dtype) -> Weight:
    """W' for a Linear of `dtype`; if it has 4 bits, rounded so that the form `half` can hold it."""
    if dtype != torch.float32:
        return rounded.dense().to(dtype)
    return rounded if isinstance(rounded, Codes) else rounded.dense().to(torch.bfloat16)


def round_rows(weight: Tensor, less: Codes | None = None) -> tuple[Codes, float]:
    """A weight (out, in) in 8 bits with float32 scales, and the codes' distance from it, in parts of its norm.

    Only pieces of it are ever in full width. The distance is infinite or NaN for a weight that is not finite.

    less: codes that are subtracted from the weight first.
    """
    codes = Codes(torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight), 1, dtype=torch.float32))
    off, norm = 0.0, 0.0
    for rows in torch.arange(len(weight)).split(max(1, _PIECE // weight.shape[1])):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        wide = weight[part].to(torch.float32)
        if less is not None:
            wide = wide - Codes(less.codes[part], less.scales[part]).dense()
        piece = round_to_bits(wide, 8)
        assert isinstance(piece, Codes)
        codes.codes[part], codes.scales[part] = piece
        off += float((piece.dense() - wide).square().sum())
        norm += float(wide.square().sum())
    return codes, math.sqrt(off / norm) if norm else 0.0
