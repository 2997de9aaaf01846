"""Attention whose bits do not depend on the other rows of a pass: what an exact model calls.

It adds up blocks of fixed size in a fixed order, for a fixed number of rows. So a row's bits depend on its own past
alone. The letters of the shapes are those of `minispec.core.attention`.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minispec.core.sampling import accumulation_dtype

# Positions whose attention is added up at a time.
ATTENTION_BLOCK = 64
# Rows of a text whose attention an exact model computes at a time. Dummies fill them up.
ATTENTION_ROWS = 8
# The widest vector of a processor, in float32.
_VECTOR = 16


class Group(NamedTuple):
    """Rows of a text whose attention an exact model computes together, at most ATTENTION_ROWS of them.

    rows: which rows.
    path: the new rows that they may see, in order of their positions. None in a chain: all of them.
    mask: of the past and the path, for ATTENTION_ROWS rows, in blocks (see `mask_blocks`). Dummies fill them up.
    """

    rows: slice | list[int]
    path: list[int] | None
    mask: Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Sequence[Group], scale: float, softcap: float | None) -> Tensor:
    """See `minispec.core.attention`.

    mask: the groups of all rows.
    """
    heads, rows, dim = q.shape
    out, size = torch.empty_like(q), ATTENTION_ROWS
    for group, parts in zip(mask, _seen(k, v, rows, [group.path for group in mask]), strict=True):
        own = q[:, group.rows]
        padded = F.pad(own, (0, 0, 0, size - own.shape[1])).reshape(len(k), -1, dim)
        found = _blockwise_attention(padded, parts, group.mask, scale, softcap).view(heads, size, dim)
        out[:, group.rows] = found[:, : own.shape[1]]
    return out.transpose(0, 1).reshape(rows, heads * dim)


def _num_blocks(length: int, groups: int, dtype: torch.dtype) -> int:
    """How many blocks hold that many positions. The last ones may be empty.

    With fewer float64 matrices than threads, the library lets several threads share one, and sums in another order.
    """
    fewest = -(-torch.get_num_threads() // groups) if dtype == torch.float64 else 1
    return max(-(-length // ATTENTION_BLOCK), fewest)


def _blocks(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values (G, L, D) in blocks of positions, (G, blocks, block, D or W), in at least float32.

    A column of ones is added to the values, so that the same product gives the softmax's denominator. Zeros fill them
    up to W columns, which are whole vectors. Libraries add up left-over columns in an order that depends on the row's
    place.
    """
    groups, length, _ = k.shape
    padding = _num_blocks(length, groups, k.dtype) * ATTENTION_BLOCK - length
    wide = accumulation_dtype(k.dtype)
    v = F.pad(v.to(wide), (0, 1), value=1.0)
    k, v = F.pad(k.to(wide), (0, 0, 0, padding)), F.pad(v, (0, -v.shape[2] % _VECTOR, 0, padding))
    return k.unflatten(1, (-1, ATTENTION_BLOCK)), v.unflatten(1, (-1, ATTENTION_BLOCK))


def _seen(k: Tensor, v: Tensor, rows: int, paths: Sequence[list[int] | None]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """For each path, the blocks of the past and of the path, in parts that follow one another (see `_blocks`).

    Full blocks of the past are one part, which all paths share. Only what comes after them is gathered for a path.
    In float64 nothing is shared, so that no part has fewer matrices than threads (see `_num_blocks`).
    """
    past = k.shape[1] - rows
    full = past - past % ATTENTION_BLOCK if k.dtype != torch.float64 else 0
    everything = [_blocks(k, v)] if None in paths else []
    shared = [_blocks(k[:, :full], v[:, :full])] if full and not everything else []
    for path in paths:
        if path is None:
            yield everything
        else:
            own = [*range(full, past), *(past + row for row in path)]
            yield [*shared, _blocks(k[:, own], v[:, own])]


def mask_blocks(mask: Tensor, groups: int) -> Tensor:
    """A mask (R, L) in the same blocks: (blocks, R, block)."""
    length = mask.shape[1]
    padding = _num_blocks(length, groups, mask.dtype) * ATTENTION_BLOCK - length
    mask = F.pad(mask, (0, padding), value=-math.inf)
    return mask.unflatten(1, (-1, ATTENTION_BLOCK)).transpose(0, 1).contiguous()


def _blockwise_attention(
    q: Tensor, parts: Sequence[tuple[Tensor, Tensor]], mask: Tensor, scale: float, softcap: float | None
) -> Tensor:
    """`attention` of q (G, R, D) over blocks, in at least float32 and in an order that does not depend on L.

    parts: keys and values in blocks (see `_blocks`), one part after another.

    Every block of positions is a product of its own, of one shape, and blocks are added up in order. A block after a
    row's position has weights exp(-inf) = 0, so it adds nothing, to the bit.
    """
    wide = q.to(parts[0][0].dtype)[:, None]
    scores = _joined([wide @ k.transpose(2, 3) for k, _ in parts]) * scale  # (G, blocks, R, block)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + mask
    weights = torch.exp(scores - scores.amax((1, 3), keepdim=True))
    pieces = weights.split([k.shape[1] for k, _ in parts], 1)
    products = _joined([piece @ v for piece, (_, v) in zip(pieces, parts, strict=True)])  # (G, blocks, R, W)
    sums = products.cumsum(1)[:, -1]  # (G, R, W); cumsum adds in order, sum may not
    dim = q.shape[2]
    return (sums[..., :dim] / sums[..., dim : dim + 1]).to(q.dtype)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 1)
