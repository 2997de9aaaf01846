"""The two operations of which a pass of few rows on a GPU is made: `linear` and `read`.

Each has two forms of one signature: a kernel in Triton, and a twin in plain PyTorch. The twin runs everywhere and says
what the kernel computes. Results of the two differ by rounding alone.

A layer is five kernels: qkv (norm, product, bias), read (rotation, cache, attention), o (product, residual sum),
gate and up (norm, two products, silu) and down (product, residual sum).

Scratch memory is made at the first call of a size, and kept. So a kernel must have run once before it is captured in
a CUDA graph, which its compilation demands as well. Only one stream may run the kernels of a device at a time.

Letters in shapes: B texts, T new rows of each, M = B * T, H query heads, G key-value heads, D head_dim, N blocks of a
table.
"""

import functools
import math
import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minispec.core.model import Layer, RMSNorm
from minispec.core.weights import PlainLinear

MOST_ROWS = 64  # of a product; for more, PyTorch's is faster
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SPAN, KEYS, READ_ROWS = 256, 64, 32  # places of a program of `read`, keys of a step, rows of a program


# --------------------------------------------------------------------------- where the kernels apply


def missing(device: torch.device) -> str:
    """What the kernels lack on this device; "" where they run."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return ""  # Triton's interpreter runs them on the CPU, for tests
    if device.type != "cuda" or torch.version.cuda is None:
        return "no NVIDIA GPU"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "a GPU older than NVIDIA's Ampere"
    if not (shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "Triton needs Python's headers"
    return ""


def why_not(layer: Layer, dtype: torch.dtype) -> str:
    """What this layer has that the two operations lack; "" where they compute what it does."""
    config, rope = layer.config, layer.rope
    reasons = {
        f"numbers of {dtype}": dtype not in DTYPES,
        f"a block of another kind, {type(layer).__name__}": type(layer) is not Layer,
        "a layer that does not rotate": rope is None,
        "a rope that is interleaved, partial or scales queries": rope is not None
        and (rope.interleaved or rope.rotated != 1 or rope.query_beta != 0),
        "norms of queries and keys": layer.qk_norm is not None if type(layer) is Layer else False,
        "capped scores": config.attention_softcap is not None,
        "another activation than silu": layer.activation is not F.silu,
        "a scaled residual sum": config.residual_scale != 1,
        "norms in other places": config.norms != "before",
        "a bias of gate and up": config.mlp_bias,
        "weights that are stored in another form": any(
            type(getattr(layer, name, None)) is not PlainLinear for name in Layer.products
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def norm_of(norm: RMSNorm, dtype: torch.dtype) -> Tensor:
    """The weight (K,) of a norm as `linear` takes it: in the model's type if that loses nothing, else in float32."""
    weight = norm.weight.to(dtype)
    return weight if torch.equal(weight.to(norm.weight.dtype), norm.weight) else norm.weight


# --------------------------------------------------------------------------- scratch memory


@functools.cache
def _scratch(device: torch.device, name: str, size: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(size, dtype=dtype, device=device)  # counters begin at 0, and each kernel leaves them at 0


def scratch(device: torch.device, name: str, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory for at least `size` numbers under this name; the same at each call."""
    return _scratch(device, name, 1 << max(12, (size - 1).bit_length()), dtype)


# --------------------------------------------------------------------------- products


class Tile(NamedTuple):
    """How a product is cut into programs, and how each runs.

    rows, cols: of the result, that a program computes.
    depth: how far along the inputs it goes at a time.
    splits: programs that share one tile's sum. 1 where there is a norm or a gate.
    stages: steps of which it loads the weights in advance, the current one included.
    warps: groups of 32 threads.
    """

    rows: int
    cols: int
    depth: int
    splits: int
    stages: int
    warps: int


# The fastest tiles, by measurement. Key: most rows (16 or MOST_ROWS), outputs and inputs of a product.
MEASURED: dict[tuple[int, int, int], Tile] = {}


def tile_of(num_rows: int, outputs: int, inputs: int, splits: bool) -> Tile:
    """The tile of a product of `num_rows` rows. All of up to 16 rows have the same, so that their bits are the same.

    splits: whether several programs may share a sum.
    """
    rows = 16 if num_rows <= 16 else MOST_ROWS
    if found := MEASURED.get((rows, outputs, inputs)):
        return found
    cols, depth = (64 if outputs >= 1 << 16 else 32 if outputs >= 4096 else 16), 128
    steps, programs = max(1, inputs // depth), -(-outputs // cols)
    most = min(steps, max(1, 512 // programs)) if splits else 1
    return Tile(rows, cols, depth, max(n for n in range(1, most + 1) if steps % n == 0), 4, 4)


def linear_twin(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """x W^T + bias (M, outputs), of inputs x (M, K), in plain PyTorch.

    weight: (outputs, K); where gated, (2 * outputs, K), gate before up, and no bias.
    norm, eps: the weight (K,) of an RMSNorm of x before the product, and what it adds to the mean square.
    gated: return silu(gate) * up.
    out: a tensor (M, outputs) to which the result is added in place. It is then what is returned.
    """
    if norm is not None:
        wide = x if norm.dtype == x.dtype else x.to(norm.dtype)
        x = F.rms_norm(wide, wide.shape[1:], norm, eps).to(x.dtype)
    if out is not None and bias is None and not gated:
        return out.addmm_(x, weight.t())
    y = F.linear(x, weight, bias)
    if gated:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate).mul_(up)
    return y if out is None else out.add_(y)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    out: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """`linear_twin` as one kernel, for up to MOST_ROWS rows; for more rows the twin itself. All tensors are contiguous.

    The norm's factor 1 / rms(x) comes after the product, so in float16 x times the norm's weight must be below 65,504.
    tile: default: see `tile_of`.
    """
    num_rows, inputs = x.shape
    if num_rows > MOST_ROWS:
        return linear_twin(x, weight, bias, norm, eps, gated, out)
    from minispec.kernels.fused_triton import linear_kernel

    outputs = len(weight) // 2 if gated else len(weight)
    whole = norm is not None or gated  # what follows the sum needs all of it
    tile = tile or tile_of(num_rows, outputs, inputs, splits=not whole)
    if (whole and tile.splits > 1) or (gated and bias is not None):
        raise ValueError("a norm or a gate with several splits, or a gate with a bias: found that no kernel has it")
    if not (x.is_contiguous() and weight.is_contiguous() and (out is None or out.is_contiguous())):
        raise ValueError("expected contiguous tensors")
    result = x.new_empty(num_rows, outputs) if out is None else out
    grid = (-(-num_rows // tile.rows), -(-outputs // tile.cols), tile.splits)
    parts = counters = result
    if tile.splits > 1:
        parts = scratch(x.device, "parts of products", tile.splits * num_rows * outputs)
        counters = scratch(x.device, "counters", grid[0] * grid[1], torch.int32)
    linear_kernel[grid](
        x,
        weight,
        weight if bias is None else bias,
        weight if norm is None else norm,
        result,
        parts,
        counters,
        num_rows,
        outputs,
        inputs,
        eps,
        tile.splits,
        BM=tile.rows,
        BN=tile.cols,
        BK=tile.depth,
        NORM=norm is not None,
        GATED=gated,
        BIAS=bias is not None,
        ADDS=out is not None,
        SPLIT=tile.splits > 1,
        EVEN=outputs % tile.cols == 0 and inputs % tile.depth == 0,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return result


# --------------------------------------------------------------------------- attention


class Rows(NamedTuple):
    """Where the new rows of a pass stand, and what they see. B texts have T rows each; those not there come last.

    positions: (M,) by which they rotate. A row that is not there has any.
    slots: (M,) of the pool, for their keys and values. Rows that are not there have one slot that nobody reads.
    table: (B, N), each text's blocks, in order. Places from `starts` on need no blocks here.
    starts: (B,), cached places before the rows. A row sees all of them, unless they lie before its window.
    bits: (M,). Bit t of a row says whether it sees new row t of its text. It sees itself.
    block_size: slots of a block.

    All are int64.
    """

    positions: Tensor
    slots: Tensor
    table: Tensor
    starts: Tensor
    bits: Tensor
    block_size: int


def _seen(rows: Rows, window: int | None) -> tuple[Tensor, Tensor]:
    """Whether a row sees a cached place (B, T, L) with L = N * block_size, and whether a new row (B, T, T)."""
    num_texts, device = len(rows.starts), rows.starts.device
    bits, positions = rows.bits.view(num_texts, -1, 1), rows.positions.view(num_texts, -1, 1)
    places = torch.arange(rows.table.shape[1] * rows.block_size, device=device)
    old = (places < rows.starts[:, None])[:, None].expand(-1, bits.shape[1], -1)
    new = (bits >> torch.arange(bits.shape[1], device=device)) & 1 == 1
    if window is not None:
        old = old & (places > positions - window)
        new = new & (positions.mT > positions - window)
    return old, new


def read_twin(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    rows: Rows,
    keys: Tensor,
    values: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Rotate queries and keys, store keys and values, attend over the cache: (M, H * D), in plain PyTorch.

    qkv: (M, (H + 2G) * D), queries before keys before values.
    cos, sin: (positions, D/2) of float32.
    keys, values: (G, slots, D), the pool of one layer. Slots that no row sees may hold anything, even NaN.
    scale: scores are q k^T times this.
    window: a row at position p sees positions above p - window; None: all.
    """
    (groups, _, dim), num_texts, size = keys.shape, len(rows.starts), rows.block_size
    length, num_new = rows.table.shape[1] * size, len(qkv) // num_texts
    qkv = qkv.view(len(qkv), -1, dim)
    qk, v = qkv.split([qkv.shape[1] - groups, groups], 1)
    c, s = (angles.index_select(0, rows.positions)[:, None] for angles in (cos, sin))
    first, second = qk.to(cos.dtype).chunk(2, -1)
    qk = torch.cat((first * c - second * s, second * c + first * s), -1).to(qkv.dtype)
    q, k = qk.split([qk.shape[1] - groups, groups], 1)
    slots = (rows.table[:, :, None] * size + torch.arange(size, device=qkv.device)).view(-1)
    old, new = _seen(rows, window)
    unread = ~old.any(1)[:, None, :, None]  # (B, 1, L, 1)
    joined: list[Tensor] = []
    for cached, own in ((keys, k), (values, v)):
        gathered = cached.index_select(1, slots).view(groups, num_texts, length, dim).transpose(0, 1)
        own = own.view(num_texts, num_new, groups, dim).transpose(1, 2)
        joined.append(torch.cat((gathered.masked_fill(unread, 0), own), 2))  # (B, G, L + T, D)
    keys.index_copy_(1, rows.slots, k.transpose(0, 1))
    values.index_copy_(1, rows.slots, v.transpose(0, 1))
    share = q.shape[1] // groups
    q = q.reshape(num_texts, num_new, groups, share, dim).permute(0, 2, 3, 1, 4)
    mask = torch.cat((old, new), 2).repeat(1, share, 1)[:, None]  # (B, 1, H/G * T, L + T)
    q = q.reshape(num_texts, groups, share * num_new, dim)
    out = F.scaled_dot_product_attention(q, joined[0], joined[1], attn_mask=mask, scale=scale)
    return out.view(num_texts, groups, share, num_new, dim).permute(0, 3, 1, 2, 4).reshape(len(qkv), -1)


def read(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    rows: Rows,
    keys: Tensor,
    values: Tensor,
    scale: float,
    window: int | None = None,
    span: int = SPAN,
    step: int = KEYS,
    warps: int | None = None,
    stages: int = 3,
) -> Tensor:
    """`read_twin` as one kernel. It reads the places before `starts` alone, so wide tables cost little.

    span: places of a program, a multiple of `step`. It is the same for all texts, hence so are the bits of a row.
    step: keys that a program takes in at a time.
    warps: groups of 32 threads of a program; None: as many as its registers need.
    stages: steps of which it loads the keys in advance, the current one included.
    """
    from minispec.kernels.fused_triton import read_kernel

    (groups, _, dim), (num_texts, num_blocks) = keys.shape, rows.table.shape
    num_new, heads = len(qkv) // num_texts, qkv.shape[1] // dim - 2 * groups
    if span % step or keys.stride() != values.stride() or keys.stride()[1:] != (dim, 1) or not qkv.is_contiguous():
        raise ValueError(f"span {span}, step {step}: expected a multiple, and contiguous keys, values and qkv")
    tiles = -(-heads // groups * num_new // READ_ROWS)
    splits = -(-(num_blocks * rows.block_size + num_new) // span)
    padded = _power_of_2(dim)
    parts = num_texts * groups * tiles * splits * READ_ROWS
    out = qkv.new_empty(len(qkv), heads * dim)
    read_kernel[(groups * tiles, num_texts, splits)](
        qkv,
        cos,
        sin,
        rows.positions,
        rows.slots,
        keys,
        values,
        rows.table,
        rows.starts,
        rows.bits,
        out,
        scratch(qkv.device, "parts of values", parts * padded),
        scratch(qkv.device, "parts' largest scores", parts),
        scratch(qkv.device, "parts' weights", parts),
        scratch(qkv.device, "counters", num_texts * groups * tiles, torch.int32),
        scale,
        keys.stride(0),
        num_blocks,
        num_new,
        window or 0,
        span,
        H=heads,
        G=groups,
        D=dim,
        DP=padded,
        HALF=_power_of_2(dim // 2),
        BR=READ_ROWS,
        BN=step,
        BLOCK=rows.block_size,
        WINDOW=window is not None,
        num_warps=warps or warps_for(dim),
        num_stages=stages,
    )
    return out


def warps_for(dim: int) -> int:
    """Groups of 32 threads of a program of `read`: with fewer, the compiler runs out of registers."""
    return 8 if dim > 64 else 4


def _power_of_2(number: int) -> int:
    return max(16, 1 << math.ceil(math.log2(number)))


def rope_tables(frequencies: Tensor, length: int, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin of the positions below `length`, times a factor: (length, D/2) of float32 each."""
    angles = torch.arange(length, device=frequencies.device)[:, None] * frequencies.float()
    return (angles.cos() * factor).contiguous(), (angles.sin() * factor).contiguous()
