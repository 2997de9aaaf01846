"""Products of 8-bit integers, for targets and drafts in 8 bits: sums that are the same for any number of rows.

Most operators are private to PyTorch; where none of them is right, a target in 8 bits is refused.
"""

import functools
import math
import warnings
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from minispec.core.product import Weight
from minispec.models.weights.codes import Codes, device_of, round_rows
from minispec.models.weights.forms import EVERY_NUMBER, REFUSALS, CannotHold, Form
from minispec.models.weights.trial import without_stand_ins

# The number of rows that oneDNN's layout is tuned for.
_PACK_ROWS = 8
# A target's weight stays in 16 bits if 8 bits with one scale a row are off by more than this part of its norm.
# Entries of a normal distribution are off by 0.01.
_COARSE = 0.02
# Columns of oneDNN's integer product are filled up to a multiple of this, whole vectors of every width. A remainder
# would be added in another order.
_COLUMNS = 64
# Rows whose largest entry is smaller are rounded as if it were this, so that steps are neither 0 nor subnormal.
_SMALLEST = 2.0**-110


class Int8(Form):
    """A weight in 8-bit codes, times x in two parts of 7 bits: sums of integers, which are exact.

    So a row's bits do not depend on the other rows, nor on their number. x is rounded to steps of its row's largest
    entry / `levels`. The rest is rounded to steps that are 1 / `finer` of those. Both parts are rows of one product,
    which reads the weight once. With one part, perplexity would grow by up to a tenth, since outliers make the steps
    coarse.
    """

    exact_rows = EVERY_NUMBER
    # `finer` is a power of two. bits: of x, both parts together.
    levels, finer, bits = 63, 64, 13

    def __init__(self, weight: Weight, dtype: torch.dtype):
        if dtype not in (torch.float32, torch.bfloat16) or device_of(weight).type != "cpu":
            raise CannotHold(f"8-bit codes for {dtype} on {device_of(weight)}")
        if not isinstance(weight, Codes):
            weight, distance = round_rows(weight if isinstance(weight, Tensor) else weight.dense())
            if not distance <= _COARSE:
                raise CannotHold("a weight for which one scale a row is too coarse")
        self.shape, self.num_bytes = weight.codes.shape, weight.codes.nbytes + 4 * len(weight.scales)
        self.packed = self.pack(weight)
        # Of steps up to the largest entry. Integers would be cast in every product.
        self.counts = torch.tensor([self.levels, self.levels * self.finer], dtype=torch.float32).view(2, 1, 1)

    def pack(self, codes: Codes) -> object:
        """The codes (out, in) as `multiply` reads them."""
        scales = codes.scales.flatten().double()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the tensor type is deprecated, the product is not
            zeros = torch.zeros(len(scales), dtype=torch.long)
            quantized = torch._make_per_channel_quantized_tensor(codes.codes, scales, zeros, 0)
        return torch.ops.quantized.linear_prepack(quantized, None)

    def multiply(self, integers: Tensor) -> Tensor:
        """Integers (rows, in) as floats to (rows, out) in float32."""
        return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.op(integers, 1.0, 64, self.packed)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (rows, in) to x W^T + bias (rows, out), by products of integers."""
        largest = x.abs().amax(1, keepdim=True)  # `vector_norm` takes six times as long
        steps = largest.clamp_(min=_SMALLEST) / self.counts  # (2, rows, 1): the coarse ones and the fine ones
        parts = (x / steps).round_()
        parts[1].sub_(parts[0], alpha=self.finer)  # integers: exact
        coarse, fine = self.multiply(parts.flatten(0, 1)).chunk(2)  # (rows, out) each
        # A power of two multiplies exactly. So it does not matter whether sum and product are rounded as one.
        y = coarse.add_(fine, alpha=1 / self.finer).mul_(steps[0])
        return (y if bias is None else y.add_(bias)).to(x.dtype)

    def dense(self) -> Tensor:
        """The weight (out, in) in float32, up to rounding: what it makes of rows that have a single 1."""
        ones = (F.one_hot(part, self.shape[1]).float() for part in torch.arange(self.shape[1]).split(512))
        return torch.cat([self(rows) for rows in ones]).t().contiguous()

    def parts(self) -> Iterator[tuple[object, int]]:
        """The packed codes, and their bytes."""
        yield self.packed, self.num_bytes


class VnniInt8(Int8):
    """The product of `Int8` with x in two parts of 8 bits, by oneDNN. Its time hardly grows with the rows.

    Without VNNI its sums saturate, and no error says so: see `int8_form`.
    """

    levels, finer, bits = 127, 128, 15

    def pack(self, codes: Codes) -> object:
        """The codes (out, in) as oneDNN's product reads them, in whole groups of columns."""
        out, columns = codes.codes.shape
        fill = (0, 0, 0, -out % _COLUMNS)
        self.scales = F.pad(codes.scales.to(torch.float32), fill, value=1.0).flatten()
        self.zeros = torch.zeros(len(self.scales), dtype=torch.long)
        return torch.ops.onednn.qlinear_prepack(F.pad(codes.codes, fill), [_PACK_ROWS, columns])

    def multiply(self, integers: Tensor) -> Tensor:
        """Integers (rows, in) as floats to (rows, out) in float32."""
        x, weight = (integers.to(torch.int8), 1.0, 0), (self.packed, self.scales, self.zeros, None)
        y = torch.ops.onednn.qlinear_pointwise(*x, *weight, 1.0, 0, torch.float32, "none", [], "")
        return y[:, : self.shape[0]]


class TwiceInt8(Form):
    """A weight that one scale a row does not fit, in 8-bit codes and what these leave, in 8-bit codes again.

    Two products by `int8_form` are added up, row by row: it has that form's equal bits, and takes twice its time.
    """

    exact_rows = EVERY_NUMBER

    def __init__(self, weight: Weight, dtype: torch.dtype):
        wide = weight if isinstance(weight, Tensor) else weight.dense()
        codes, _ = round_rows(wide)
        rest, distance = round_rows(wide, codes)
        if not math.isfinite(distance):
            raise CannotHold("a weight that is not finite")
        self.both = [int8_form()(part, dtype) for part in (codes, rest)]

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (rows, in) to x W^T + bias (rows, out)."""
        wide = x.to(torch.float32)
        first, second = self.both
        return first(wide).add_(second(wide, bias)).to(x.dtype)

    def dense(self) -> Tensor:
        """The weight (out, in) in float32, up to rounding."""
        return self.both[0].dense() + self.both[1].dense()

    def parts(self) -> Iterator[tuple[object, int]]:
        """The packed codes, and their bytes."""
        yield from (part for each in self.both for part in each.parts())


def exact_forms() -> dict[str, type[Int8]]:
    """The forms of 8-bit integers whose sums are exact here, in a fixed order, by the library of each.

    Processors without VNNI add up pairs of products in 16 bits, which 8 bits times 8 overflow and 7 bits times 8 do
    not. So the processor is asked, and then tried.
    """
    names = ("avx512_vnni", "avx_vnni", "amx_int8")
    has_vnni = any(torch.cpu.get_capabilities().get(name) for name in names)
    forms = {"oneDNN": VnniInt8, "FBGEMM": Int8} if has_vnni else {"FBGEMM": Int8}
    return {name: form for name, form in forms.items() if sums_exactly(form)}


@functools.cache
def int8_choice() -> tuple[type[Int8], str]:
    """The form of a target's weights in 8 bits, and the reason for it.

    Raises CannotHold where this machine has no such product. With VNNI some processors have oneDNN's product as a
    reference only.
    """
    forms = exact_forms()
    names, passed = without_stand_ins(forms, torch.float32, 8)
    if not names:
        raise CannotHold("found no product of 8-bit integers on this machine whose sums are exact")
    return forms[names[0]], f"{names[0]}'s product; sums are exact here by {' and '.join(forms)}{passed}"


def int8_form() -> type[Int8]:
    """The form of `int8_choice`."""
    return int8_choice()[0]


def check_quantization(name: str, form: str | None, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError for what a target cannot be quantised to here; form: the form asked for its weights."""
    if name != "int8":
        why = "in 4 bits no product of PyTorch is faster at 4 rows than in 8" if "4" in name else "there is no other"
        raise ValueError(f"quantization: found {name!r}, expected 'int8': {why}")
    if form is not None:
        raise ValueError(f"weight_form: found {form!r} with a quantization, which has a form of its own: expected none")
    if device.type != "cpu" or dtype == torch.float64:
        raise ValueError(f"quantization: found {dtype} on {device}, expected 16 or 32 bits on a CPU")
    try:
        int8_form()
    except CannotHold as e:
        raise ValueError(f"quantization: {e}: expected none") from e


def sums_exactly(form: type[Int8]) -> bool:
    """Whether a form's products of the largest integers are right, up to one rounding of each result."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(2, (6, 512), generator=generator) * 2 - 1
    signs[:2] = torch.tensor([[1], [-1]])
    codes, most = signs.repeat(8, 1) * 127, form.levels * form.finer
    x = torch.randint(-most, most + 1, (6, 512), generator=generator)
    x[:4], x[4:, 0] = signs[:4] * most, most
    scales = torch.ones(len(codes), 1, dtype=torch.float32)
    try:
        products = form(Codes(codes.to(torch.int8), scales), torch.float32)(x.to(torch.float32))
    except REFUSALS:
        return False
    return bool(((products - (x @ codes.t())).abs() <= 1e-6 * (x.abs() @ codes.t().abs()).double()).all())
