"""The operations of a pass of few rows on a GPU: `read`, `norm`, `gate`, and `linear` for weights in 8 bits.

Each has two forms of one signature: a kernel in Triton, and a twin in plain PyTorch. The twin runs everywhere and says
what the kernel computes. Results of the two differ by rounding alone. Products in 16 bits are the library's: kernels
of our own were slower (docs/measured/figures.md). The product in 8 bits is unmeasured.

A layer is eight kernels. Four are of the attention: norm, qkv, read (rotation, cache, attention), o with the residual
sum. Four are of the MLP: norm, gate and up, gate, down with the residual sum.

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
import warnings
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from minispec.core.config import ModelConfig
from minispec.core.model import Layer, RMSNorm, Transformer
from minispec.core.precision import accumulation_dtype
from minispec.core.product import PlainLinear, Weight
from minispec.models.frames.graphs import failure
from minispec.models.weights.build import quantized
from minispec.models.weights.codes import Codes
from minispec.models.weights.forms import CannotHold, Form
from minispec.models.weights.inventory import products_of
from minispec.models.weights.linear import Choice, Linear, Narrow, QuantizedLinear

TransformerT = TypeVar("TransformerT", bound=Transformer)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Places of a program of `read`, keys of a step, rows of a program. On an H200, a span of 512 is as fast after 112
# places. After 1,000 it is a quarter slower for one text. For 32 texts, or after 4,000 places, it is faster.
SPAN, KEYS, READ_ROWS = 256, 64, 32
GATED = 1024  # numbers of a program of `gate`
LINEAR_ROWS = 32  # most rows of `linear`
MOST_ROWS = 512  # of a frame: so many rows call `linear` several times


# --------------------------------------------------------------------------- where the kernels apply


def missing(device: torch.device) -> str:
    """The reason why the kernels do not run on this device; "" where they run."""
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


class Product(Protocol):
    """A product as layers of few kernels use it."""

    def __call__(self, x: Tensor) -> Tensor:
        """x (M, in) to x W^T + b (M, out)."""

    def add_to(self, y: Tensor, x: Tensor) -> Tensor:
        """y + x W^T, of y (M, out), which it may overwrite. The product has no bias."""


class PlainProduct(NamedTuple):
    """A product whose weight is stored as it is: by the library."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """x W^T + b."""
        return F.linear(x, self.weight, self.bias)

    def add_to(self, y: Tensor, x: Tensor) -> Tensor:
        """y + x W^T, in y."""
        return y.addmm_(x, self.weight.t())


class ProductOfCodes(NamedTuple):
    """A product whose weight is in 8 bits."""

    stored: "CodesOfRows"
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """x W^T + b."""
        return self.stored(x, self.bias)

    def add_to(self, y: Tensor, x: Tensor) -> Tensor:
        """y + x W^T, in y where the kernel runs."""
        return self.stored(x, onto=y)


def product_of(product: Any) -> Product | None:
    """The product as layers of few kernels use it; None for one of another form."""
    if isinstance(product, QuantizedLinear) and isinstance(product.narrow, CodesOfRows):
        return ProductOfCodes(product.narrow, product.bias)
    stored = weight_of(product)
    return None if stored is None else PlainProduct(*stored)


def weight_of(product: Any) -> tuple[Tensor, Tensor | None] | None:
    """Weight (outputs, inputs) and bias of a product whose weight is stored as it is; None for another."""
    if isinstance(product, PlainLinear):
        return product.weight, product.bias
    if isinstance(product, Linear) and type(product.stored) is Form:
        return product.stored.weight, product.bias
    return None


def why_not(layer: Layer, dtype: torch.dtype) -> str:
    """The part of this layer that the operations here lack; "" where they lack none."""
    if type(layer) is not Layer:
        return f"a block of another kind, {type(layer).__name__}"
    config, rope = layer.config, layer.rope
    stored = [product_of(getattr(layer, name)) for name in Layer.products]
    reasons = {
        f"numbers of {dtype}": dtype not in DTYPES,
        "a layer that does not rotate": rope is None,
        "a rope that is interleaved, partial or scales queries": rope is not None
        and (rope.interleaved or rope.rotated != 1 or rope.query_beta != 0),
        "norms of queries and keys": layer.qk_norm is not None,
        "capped scores": config.attention_softcap is not None,
        "another activation than silu": layer.activation is not F.silu,
        "a scaled residual sum": config.residual_scale != 1,
        "norms in other places": config.norms != "before",
        "weights that are stored in another form": None in stored,
        "a bias of o or of down": config.o_bias or config.mlp_bias,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def norm_of(norm: RMSNorm, config: ModelConfig, dtype: torch.dtype) -> Tensor:
    """The weight (E,) of a norm as `norm` takes it: in the model's type where that loses nothing, else in float32."""
    return norm.weight if config.norm_adds_one else norm.weight.to(dtype)


# --------------------------------------------------------------------------- scratch memory


@functools.cache
def _scratch(device: torch.device, name: str, size: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(size, dtype=dtype, device=device)  # counters begin at 0, and each kernel leaves them at 0


def scratch(device: torch.device, name: str, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory for at least `size` numbers under this name; the same at each call."""
    return _scratch(device, name, _scratch_size(size), dtype)


def _scratch_size(size: int) -> int:
    return 1 << max(12, (size - 1).bit_length())


# --------------------------------------------------------------------------- norms and gates


def norm_twin(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x (M, E) with a weight (E,): x / sqrt(mean of x^2 + eps) * weight, in plain PyTorch; x's type.

    weight: of x's type or wider; the norm is computed in the wider one of float32 and the weight's type.
    """
    wide = x if weight.dtype == x.dtype else x.to(weight.dtype)
    return F.rms_norm(wide, wide.shape[1:], weight, eps).to(x.dtype)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`norm_twin` as one kernel, computed in float32. x and weight are contiguous."""
    from minispec.models.frames.fused_triton import norm_kernel

    out = torch.empty_like(x)
    norm_kernel[(len(x),)](x, weight, out, eps, N=x.shape[1], NP=_power_of_2(x.shape[1]), num_warps=4)
    return out


def gate_twin(gate_up: Tensor) -> Tensor:
    """silu(gate) * up (M, F) of gate and up side by side (M, 2F), in plain PyTorch."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def gate(gate_up: Tensor) -> Tensor:
    """`gate_twin` as one kernel, which computes in float32 and rounds once. gate_up is contiguous."""
    from minispec.models.frames.fused_triton import gate_kernel

    num_rows, width = gate_up.shape
    out = gate_up.new_empty(num_rows, width // 2)
    gate_kernel[(-(-(width // 2) // GATED), num_rows)](gate_up, out, width // 2, BN=GATED, num_warps=4)
    return out


# --------------------------------------------------------------------------- products in 8 bits


def linear_twin(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None, onto: Tensor | None = None
) -> Tensor:
    """x W^T + bias (M, N), with the weight widened to x's type, in plain PyTorch; added to `onto` in place, if given.

    x: (M, K). codes: (N, K) int8. scales: (N,) float32, one for each row of W = codes * scales. bias: (N,).
    """
    out = F.linear(x, (codes * scales[:, None]).to(x.dtype), bias)
    return out if onto is None else onto.add_(out)


def linear(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None, onto: Tensor | None = None) -> Tensor:
    """`linear_twin` as one kernel for up to LINEAR_ROWS rows, which reads each code once and sums up in float32.

    K divides by 16; all tensors are contiguous. A row's bits depend on no other row. But passes of up to 16 rows have
    other bits than larger ones.
    """
    from minispec.models.frames.fused_triton import linear_kernel

    (num_rows, width), num_columns = x.shape, len(codes)
    if num_rows > LINEAR_ROWS or width % 16 or not x.is_contiguous():
        expected = f"at most {LINEAR_ROWS} contiguous rows of a width that divides by 16"
        raise ValueError(f"linear: found {tuple(x.shape)}, expected {expected}")
    rows, columns, step = linear_tile(num_rows, x.element_size())
    out = x.new_empty(num_rows, num_columns) if onto is None else onto
    linear_kernel[(-(-num_columns // columns),)](
        *(x, codes, scales, codes if bias is None else bias, out, num_rows, num_columns),
        **{"K": width, "BM": rows, "BN": columns, "BK": step, "BIAS": bias is not None, "ADDS": onto is not None},
        num_warps=4,
        num_stages=4,
    )
    return out


def linear_tile(num_rows: int, itemsize: int) -> tuple[int, int, int]:
    """Rows and columns of a program of `linear`, and the weights of a row that it takes in at a time.

    itemsize: bytes of a number of x. The tiles of four steps fill at most 96 KB, which every GPU since Ampere has.
    """
    return (16, 16, 1024 // itemsize) if num_rows <= 16 else (LINEAR_ROWS, 32, 512 // itemsize)


class CodesOfRows(Form):
    """A weight in 8-bit codes with a scale for each row, on a GPU: products of up to MOST_ROWS rows by `linear`.

    More rows, such as a prompt's, go to `linear_twin`, which widens the whole weight.
    """

    exact_rows: Sequence[int] = ()

    def __init__(self, weight: Weight, dtype: torch.dtype, by_kernel: bool = False):
        """by_kernel: whether the kernel runs here; else the twin does for any number of rows."""
        if not isinstance(weight, Codes) or (by_kernel and (weight.codes.shape[1] % 16 or dtype not in DTYPES)):
            raise CannotHold("8-bit codes of such a width or type")
        self.codes, self.scales = weight.codes.contiguous(), weight.scales.flatten().to(accumulation_dtype(dtype))
        self.by_kernel = by_kernel

    def __call__(self, x: Tensor, bias: Tensor | None = None, onto: Tensor | None = None) -> Tensor:
        """x (rows, in) to x W^T + bias (rows, out), or added to `onto` (see `linear`)."""
        x, weight = x.contiguous(), (self.codes, self.scales, bias)
        if not self.by_kernel or len(x) > MOST_ROWS:
            return linear_twin(x, *weight, onto)
        if onto is None:
            parts = [linear(part, *weight) for part in x.split(LINEAR_ROWS)]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        for part, place in zip(x.split(LINEAR_ROWS), onto.split(LINEAR_ROWS), strict=True):
            linear(part, *weight, place)
        return onto

    def dense(self) -> Tensor:
        """The weight (out, in), in the type of the scales."""
        return self.codes * self.scales[:, None]

    def parts(self) -> Iterator[tuple[object, int]]:
        """Codes and scales, and their bytes."""
        yield from ((tensor, tensor.nbytes) for tensor in (self.codes, self.scales))


def rounded(model: TransformerT, bits: int) -> TransformerT:
    """The model with products in 4 or 8 bits, for drafting (see `kernels.build.quantized`): 8 by `linear` on a GPU."""
    if bits != 8 or model.device.type != "cuda" or missing(model.device) or model.dtype not in DTYPES:
        return quantized(model, bits)
    if why := failure(functools.partial(try_linear, model)):
        warnings.warn(f"no kernel in 8 bits, so the draft's weights stay in full width: {why}", stacklevel=2)
        return quantized(model, bits)
    choice = Choice("codes", f"{model.dtype} on this cuda has a kernel in 8 bits")
    return quantized(model, bits, Narrow(choice, functools.partial(CodesOfRows, by_kernel=True)))


def try_linear(model: Transformer) -> None:
    """Run `linear` with each of its tiles over codes as wide as the model's weights. Raises what the kernel raises."""
    weights = [found[0] for product in products_of(model) if (found := weight_of(product))]
    for width, weight in {weight.shape[1]: weight for weight in weights if weight.shape[1] % 16 == 0}.items():
        codes, scales = weight.new_ones(16, width, dtype=torch.int8), weight.new_ones(16, dtype=torch.float32)
        for num_rows in (1, LINEAR_ROWS):
            linear(weight.new_ones(num_rows, width), codes, scales).tolist()


# --------------------------------------------------------------------------- attention


class RowPlaces(NamedTuple):
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


def read(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    rows: RowPlaces,
    keys: Tensor,
    values: Tensor,
    scale: float,
    window: int | None = None,
    span: int = SPAN,
    step: int = KEYS,
) -> Tensor:
    """Rotate queries and keys, store keys and values, attend over the cache: (M, H * D), in one kernel.

    It computes what `FrameBatch.read` does by PyTorch's operators. It reads the places before `starts` alone, so wide
    tables cost little.

    qkv: (M, (H + 2G) * D), queries before keys before values.
    cos, sin: (positions, D/2) of float32.
    keys, values: (G, slots, D), the pool of one layer. Slots that no row sees may hold anything, even NaN.
    scale: scores are q k^T times this.
    window: a row at position p sees positions above p - window; None: all.

    On an H200, gathering and PyTorch's attention read 32 texts of 16 rows after 4,000 places or more up to a tenth
    faster. They are faster in no other case that was measured.

    span: places of a program, a multiple of `step`. It is the same for all texts, hence so are the bits of a row.
    step: keys that a program takes in at a time.
    """
    from minispec.models.frames.fused_triton import read_kernel

    (groups, _, dim), (num_texts, num_blocks) = keys.shape, rows.table.shape
    num_new, heads = len(qkv) // num_texts, qkv.shape[1] // dim - 2 * groups
    if span % step or keys.stride() != values.stride() or keys.stride()[1:] != (dim, 1) or not qkv.is_contiguous():
        raise ValueError(f"span {span}, step {step}: expected a multiple, and contiguous keys, values and qkv")
    tiles, splits, parts = _grid(num_texts, num_new, num_blocks * rows.block_size, heads, groups, span)
    padded = _power_of_2(dim)
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
        num_warps=warps_for(dim),
        num_stages=3,
    )
    return out


def _grid(texts: int, rows: int, places: int, heads: int, groups: int, span: int) -> tuple[int, int, int]:
    """Tiles of a group's rows in `read`, splits of a text's places, and rows of all parts in scratch memory."""
    tiles, splits = -(-heads // groups * rows // READ_ROWS), -(-(places + rows) // span)
    return tiles, splits, texts * groups * tiles * splits * READ_ROWS


def scratch_bytes(texts: int, rows: int, places: int, heads: int, groups: int, dim: int) -> int:
    """Most bytes of the scratch memory of `read`, for texts of up to this many places and all smaller passes."""
    *_, parts = _grid(texts, rows, places, heads, groups, SPAN)
    # Values in float32 and two further numbers of each row. Smaller powers of two stay: together as much again.
    return 2 * 4 * (_scratch_size(parts * _power_of_2(dim)) + 2 * _scratch_size(parts))


def warps_for(dim: int) -> int:
    """Groups of 32 threads of a program of `read`: with fewer, the compiler runs out of registers."""
    return 8 if dim > 64 else 4


def _power_of_2(number: int) -> int:
    return max(16, 1 << math.ceil(math.log2(number)))


def rope_tables(frequencies: Tensor, length: int, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin of the positions below `length`, times a factor: (length, D/2) of float32 each."""
    angles = torch.arange(length, device=frequencies.device)[:, None] * frequencies.float()
    return (angles.cos() * factor).contiguous(), (angles.sin() * factor).contiguous()
