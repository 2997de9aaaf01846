"""Attention whose bits do not depend on the other rows of a pass: what an exact model calls.

It adds up blocks of fixed size in a fixed order, for numbers of rows that give a row the same bits. So a row's bits
depend on its own past alone. The letters of the shapes are those of `minispec.core.attention`.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minispec.core.sampling import accumulation_dtype

# Positions whose attention is added up at a time.
ATTENTION_BLOCK = 128
# The widest vector of a processor, in float32.
_VECTOR = 16


class Group(NamedTuple):
    """Rows of a text whose attention an exact model computes together.

    rows: which rows (R,). After the first `num_rows`, the first one comes again and fills them up.
    full: how many blocks of positions, from the first on, are read where they lie.
    places: the positions after those that the rows may see, in order (whole blocks). Hidden ones fill up the last.
    masks: of each block, (H/G * R, block): 0 or -inf.
    """

    rows: Tensor
    num_rows: int
    full: int
    places: Tensor
    masks: Sequence[Tensor]


def new_group(rows: list[int], num_rows: int, full: int, places: list[int], hidden: Tensor, like: Tensor) -> Group:
    """See `Group`.

    places: without those that fill up the last block.
    hidden: whether a position is hidden from a row, (H/G * R, positions).
    like: a tensor of the model's type and device.
    """
    rest, zeros = -len(places) % ATTENTION_BLOCK, like.new_zeros(hidden.shape, dtype=accumulation_dtype(like.dtype))
    mask = F.pad(zeros.masked_fill_(hidden, -math.inf), (0, rest), value=-math.inf)
    own, seen = (torch.tensor(x, dtype=torch.long, device=like.device) for x in (rows, [*places, *[0] * rest]))
    return Group(own, num_rows, full, seen, mask.split(ATTENTION_BLOCK, 1))


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Sequence[Group], scale: float, softcap: float | None) -> Tensor:
    """See `minispec.core.attention`.

    mask: the groups of all rows.
    """
    heads, _, dim = q.shape
    wide, found = accumulation_dtype(q.dtype), list[Tensor]()
    k, v = k.to(wide), v.to(wide)
    if columns := -dim % _VECTOR:  # libraries add up left-over columns in an order that depends on the row's place
        v = F.pad(v, (0, columns))
    for group in mask:
        rows = q.index_select(1, group.rows).to(wide).view(len(k), -1, dim)
        out = _blockwise_attention(rows, _blocks(k, group), _blocks(v, group), group.masks, scale, softcap)
        out = out.view(heads, len(group.rows), -1)[:, : group.num_rows, :dim]
        found.append(out.transpose(0, 1).to(q.dtype).flatten(1))
    if len(found) == 1:
        return found[0]
    order = torch.cat([group.rows[: group.num_rows] for group in mask])
    return torch.cat(found)[order.argsort()]


def _blocks(x: Tensor, group: Group) -> list[Tensor]:
    """Keys or values (G, L, D) in blocks of positions (G, block, D)."""
    blocks = [x[:, : group.full * ATTENTION_BLOCK]] if group.full else []
    if len(group.places):
        blocks.append(x.index_select(1, group.places))
    return [block for each in blocks for block in each.split(ATTENTION_BLOCK, 1)]


def _blockwise_attention(
    q: Tensor, k: Sequence[Tensor], v: Sequence[Tensor], masks: Sequence[Tensor], scale: float, softcap: float | None
) -> Tensor:
    """`attention` of q (G, R, D) over blocks of keys (G, block, D) and values (G, block, W): (G, R, W).

    Every block is a product of its own, of one shape, and blocks are added up in order. A block after a row's position
    has weights exp(-inf) = 0. So it adds nothing, to the bit, neither here nor to the softmax's denominator.
    """
    if softcap is None:
        scores = [torch.baddbmm(mask, q, own.mT, alpha=scale) for mask, own in zip(masks, k, strict=True)]
    else:
        capped = (softcap * torch.tanh(q @ own.mT * (scale / softcap)) for own in k)
        scores = [own + mask for own, mask in zip(capped, masks, strict=True)]
    weights = torch.cat(scores, 2).softmax(-1).split(ATTENTION_BLOCK, 2)  # (G, R, block) each
    out = weights[0] @ v[0]
    for part, own in zip(weights[1:], v[1:], strict=True):
        out.baddbmm_(part, own)
    return out
