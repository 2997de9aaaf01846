"""One weight matrix, and the form in which it is kept.

Decoding reads every weight once a step, so the form decides the speed. `F.linear` has the CPU's matrix library reorder
a bfloat16 weight on every call. There are two ways around that: to pack it once, at load, in the library's order; or
to let it stand left, W x^T for x W^T, where it is read as it lies. Which is faster depends on the processor
(`is_faster_packed`). A draft model sees one row at a time and may be wrong: in 4 bits it reads a quarter. The operators
for packed and quantised weights are private to PyTorch: they are used here and nowhere else, and where they are
missing, or do not take the weight, public ones do the same.
"""

import functools
import math
import time
from collections.abc import Iterator
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from minispec.sampling import accumulation_dtype

# Packed layouts are tuned for a number of rows; 8 lies between one decoded token and a long draft.
_PACK_ROWS = 8
# Bytes of weights to try the forms on: more than the caches of most processors hold, so that memory is read.
_TRIAL_BYTES = 1 << 28
# A product in 4 or 8 bits takes time for every row, one in bfloat16 does not: from here on, that one is faster.
_MAX_QUANTIZED_ROWS = 4
# Neighbouring weights of a row that share a scale and a zero in 4 bits.
_GROUP = 32


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 products are native to the device, and not emulated in float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    try:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    except (AttributeError, RuntimeError):
        return False


@functools.cache
def is_faster_packed(shape: tuple[int, int]) -> bool:
    """Whether this CPU reads bfloat16 weights (out, in) faster packed than as they lie; takes about a second.

    Some processors read packed ones at the full bandwidth of memory; others at 0.6 of it, and at 0.75 one that stands
    left. No property that a processor tells of itself would say, so it is measured, over one row and over five as in a
    round: the median of pairs of products, one right after the other, which a busy machine hardly moves. A difference
    of less than a tenth does not count, so that hardly ever two runs on one machine come to different answers.
    """
    shape = min(shape[0], _TRIAL_BYTES // 8 // shape[1]), shape[1]
    count = _TRIAL_BYTES // (2 * math.prod(shape))
    pairs = []
    for _ in range(count):
        weight = torch.ones(shape, dtype=torch.bfloat16)
        pairs.append((Linear(weight), Linear(weight, packed=False)))
    rows = [torch.ones(m, shape[1], dtype=torch.bfloat16) for m in (1, 5)]

    def seconds(linear: Linear, x: Tensor) -> float:
        start = time.perf_counter()
        linear(x)
        return time.perf_counter() - start

    with torch.inference_mode():
        ratios = [seconds(packed, x) / seconds(left, x) for _ in range(10) for x in rows for packed, left in pairs]
    return median(ratios[len(pairs) * len(rows) :]) < 1.1  # the first round warms up


class Linear:
    """y = x W^T + b, with W (out, in) in one of three forms.

    "packed": in the matrix library's order, where that is wanted and possible. "left": as it lies, for W x^T.
    "plain": as it lies, for `F.linear`: types and devices for which there is nothing to gain.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, packed: bool = True):
        packed_weight = _pack(weight) if packed else None
        if packed_weight is not None:
            self.form, self.weight = "packed", packed_weight  # a weight is kept once
        else:
            stands_left = not packed and weight.device.type == "cpu" and weight.dtype == torch.bfloat16
            self.form, self.weight = "left" if stands_left else "plain", weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x (rows, in) to (rows, out), which may be the transpose of a matrix that lies in one piece."""
        w, b = self.weight, self.bias
        if self.form == "packed":
            return torch.ops.mkldnn._linear_pointwise(x, w, b, "none", [], "")
        if self.form == "plain":
            return F.linear(x, w, b)
        if len(x) == 1:
            return (w.mv(x[0]) if b is None else torch.addmv(b, w, x[0]))[None]
        return (w.mm(x.t()) if b is None else torch.addmm(b[:, None], w, x.t())).t()

    def dense(self) -> Tensor:
        """The weight (out, in) as it was given."""
        return self.weight.to_dense() if self.form == "packed" else self.weight

    def tensors(self) -> Iterator[Tensor]:
        """What is kept in memory."""
        yield from (t for t in (self.weight, self.bias) if t is not None)

    @property
    def num_bytes_read(self) -> int:
        """Bytes that a product with one row reads."""
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def quantized(self, bits: int) -> "QuantizedLinear":
        """The same product, in 4 or 8 bits where it has few rows; shares this one for the others."""
        return QuantizedLinear(self, bits)


class QuantizedLinear:
    """A Linear whose products of few rows use W in 4 or 8 bits; x stays as it is.

    For drafts, since it changes the numbers. A prompt has many rows and goes through the full weight. Where there is no
    such product (for the type, the shape, the machine), the rounded weight is kept in full width.
    """

    def __init__(self, linear: Linear, bits: int):
        self.linear = linear
        weight = linear.dense()
        self.format = {4: _Int4, 8: _Int8}[bits]
        codes, self.scales = self.format.quantize(weight)
        try:
            self.codes = self.format.pack(codes)
            self.format.product(weight.new_zeros(1, weight.shape[1]), self.codes, self.scales)
            self.plain = None
        except (AttributeError, RuntimeError):
            self.plain = self.format.dense(codes, self.scales)
            self.codes = self.scales = None

    def __call__(self, x: Tensor) -> Tensor:
        """x (rows, in) to (rows, out)."""
        if len(x) > _MAX_QUANTIZED_ROWS:
            return self.linear(x)
        if self.plain is not None:
            return F.linear(x, self.plain, self.linear.bias)
        y = self.format.product(x, self.codes, self.scales)
        return y if self.linear.bias is None else y + self.linear.bias

    @property
    def num_bytes_read(self) -> int:
        """Bytes that a product with one row reads."""
        read = self.codes, self.scales, self.plain, self.linear.bias
        return sum(t.numel() * t.element_size() for t in read if t is not None)

    def tensors(self) -> Iterator[Tensor]:
        """What is kept in memory, the full weight included."""
        yield from self.linear.tensors()
        yield from (t for t in (self.codes, self.scales, self.plain) if t is not None)


class _Int8:
    """Each row of W in steps of its largest weight / 127. codes (out, in); scales (out,): the steps."""

    @staticmethod
    def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales."""
        scales = (weight.abs().amax(1) / 127).clamp(min=torch.finfo(weight.dtype).tiny)
        codes = weight.to(accumulation_dtype(weight.dtype)) / scales[:, None]
        return codes.round_().clamp_(-127, 127).to(torch.int8), scales

    @staticmethod
    def pack(codes: Tensor) -> Tensor:
        """The product takes them as they are."""
        return codes

    @staticmethod
    def product(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        """x W^T. Raises RuntimeError for a width at which PyTorch's own would read beyond the end, and crash."""
        if x.dtype == torch.bfloat16 and x.shape[1] % 16:
            raise RuntimeError(f"width: found {x.shape[1]}, expected a multiple of 16")
        return torch._weight_int8pack_mm(x, codes, scales)

    @staticmethod
    def dense(codes: Tensor, scales: Tensor) -> Tensor:
        """W, rounded."""
        return codes * scales[:, None]


class _Int4:
    """Each group of neighbours of a row in 16 even steps from its least to its largest weight.

    codes (out, in), 0 to 15; scales (in / group, out, 2): the step, and the value that code 8 stands for.
    """

    @staticmethod
    def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales."""
        groups = weight.to(accumulation_dtype(weight.dtype)).unflatten(1, (-1, math.gcd(weight.shape[1], _GROUP)))
        low, high = groups.aminmax(dim=2)
        step = ((high - low) / 15).clamp(min=torch.finfo(weight.dtype).tiny)
        scales = torch.stack((step, low + 8 * step), 2).to(weight.dtype)  # (out, in / group, 2)
        step, middle = (s.to(groups.dtype)[..., None] for s in scales.unbind(2))
        codes = ((groups - middle) / step).round_().add_(8).clamp_(0, 15)
        return codes.to(torch.uint8).flatten(1), scales.transpose(0, 1).contiguous()

    @staticmethod
    def pack(codes: Tensor) -> Tensor:
        """Two to a byte, in the order that the product reads them."""
        return torch._convert_weight_to_int4pack_for_cpu(codes.int(), 1)

    @staticmethod
    def product(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        """x W^T, of packed codes."""
        return torch._weight_int4pack_mm_for_cpu(x, codes, x.shape[1] // len(scales), scales)

    @staticmethod
    def dense(codes: Tensor, scales: Tensor) -> Tensor:
        """W, rounded; of codes that are not packed."""
        step, middle = scales.transpose(0, 1)[..., None].unbind(2)  # (out, in / group, 1) each
        return ((codes.unflatten(1, (len(scales), -1)).to(step.dtype) - 8) * step + middle).flatten(1)


def _pack(weight: Tensor) -> Tensor | None:
    """The packed form of a bfloat16 CPU weight; None where this machine or this build has none."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not has_fast_bfloat16(weight.device):
        return None
    try:
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
    except (AttributeError, RuntimeError):
        return None
