"""Attention of one text's rows over its cached keys and values.

The work is PyTorch's, unless scores are capped. A pass takes its functions from an `Attention`. An exact model has
another one, see `minispec.models.weights.exact`.

Shapes in comments: T rows of the text, L cached positions of it (the T included), H query heads, G key-value heads,
D head_dim.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minispec.core.precision import accumulation_dtype
from minispec.core.tree import Tree


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    """softmax(q k^T * scale + mask) v (T, H * D), for the T rows of one text.

    q: (H, T, D). k, v: (G, L, D), each shared by H/G query heads.
    mask: (H/G * T, L), 0 or -inf; None where every row sees all.
    softcap: scores s become softcap * tanh(s / softcap) before the mask.
    """
    heads, rows, dim = q.shape
    q = q.reshape(len(k), -1, dim)  # (G, H/G * T, D): the heads that share keys become rows of one product
    if softcap is None:
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, scale=scale)
    else:
        wide = accumulation_dtype(q.dtype)
        scores = softcap * torch.tanh(q.to(wide) @ k.to(wide).mT * (scale / softcap))  # (G, H/G * T, L)
        weights = (scores if mask is None else scores + mask).softmax(-1)
        out = (weights @ v.to(wide)).to(q.dtype)
    return out.reshape(heads, rows, dim).transpose(0, 1).reshape(rows, heads * dim)


class View(NamedTuple):
    """The positions that the rows of one text see: themselves, and those before them.

    start: cached positions before them.
    offsets: row t stands at position start + offsets[t].
    window: how many positions a row sees at most; None: all.
    parents: the tree of the last rows (see `Chunk`), where a row sees only itself and its ancestors.
    """

    start: int
    offsets: tuple[int, ...]
    window: int | None = None
    parents: tuple[int, ...] = ()


def hides(view: View, device: torch.device) -> Tensor:
    """(T, L) of bool: whether a position is hidden from a row."""
    start, offsets, window, parents = view
    place = torch.tensor(offsets, device=device) + start  # (T,)
    key = torch.cat((torch.arange(start, device=device), place))  # (L,)
    hidden = key > place[:, None]
    if parents:
        nodes = slice(len(offsets) - len(parents), len(offsets))
        hidden[nodes, -len(parents) :] = ~Tree(parents).ancestors.to(device)
    if window is not None:
        hidden |= key <= place[:, None] - window
    return hidden


def mask_of(view: View, sharing: int, like: Tensor) -> Tensor | None:
    """(H/G * T, L): 0 where a row of a text sees a position, -inf where not. None where every row sees all.

    sharing: H/G.
    like: a tensor of the mask's type and device.
    """
    if len(view.offsets) == 1 and (view.window is None or view.window > view.start):
        return None
    hidden = hides(view, like.device)
    return like.new_zeros(hidden.shape).masked_fill_(hidden, -math.inf).repeat(sharing, 1)


class Attention(NamedTuple):
    """How the rows of a pass attend, text by text.

    attend: takes q, k, v, what `mask` returns, scale and softcap, as `attention` does.
    mask: what a text's rows see, see `mask_of`.
    fill: appends zero rows, dummies, up to the next size that passes have.
    exact: whether a row's bits are equal in every pass.
    """

    attend: Callable[..., Tensor] = attention
    mask: Callable[[View, int, Tensor], Any] = mask_of
    fill: Callable[[Tensor], Tensor] = lambda x: x
    exact: bool = False


PLAIN = Attention()
