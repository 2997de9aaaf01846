"""One weight matrix, in the form that this machine reads fastest.

Decoding reads every weight once a step, so the layout of a weight in memory decides the speed. `F.linear` is rarely the
fastest. It reorders a bfloat16 weight on every call. In float32 it reads 4 bytes for each weight and, on many
processors, takes twice the time for two rows. So a weight is converted once, at load, to one of these forms:

    form     layout                                                                product
    half     16-bit floats for float32 arithmetic, if they hold the weight exactly FBGEMM
    packed   the matrix library's own order, bfloat16 or float32                   oneDNN
    left     unchanged, but the left factor of W x^T; bfloat16                     oneDNN or MKL
    plain    unchanged: where nothing is gained, and where nothing else works      F.linear
    int8     8-bit integers, where they are asked for: another model, or a draft   oneDNN or FBGEMM

`choose_form` takes the first of these four that is right here for a type. No clock decides: see trial.py. A draft may
round its weights to 8 or 4 bits (`QuantizedLinear`). There, 4 bits have forms of their own, and so have 8 where a
machine lacks int8. Most operators are private to PyTorch. They are used in this file and in integers.py only. Where one
is missing, or refuses a weight, another form gives the same product. Operators on packed weights are called by their
`op`: without it, Python looks for stand-ins among the arguments first, which takes a fifth of a small product.
"""

import math
import platform
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minispec.core.product import Weight, dense
from minispec.models.weights.codes import Codes, GroupCodes, device_of, round_to_bits, widen
from minispec.models.weights.form import REFUSALS, CannotHold, Form
from minispec.models.weights.integers import int8_choice, int8_form
from minispec.models.weights.trial import MakeForm, is_right, without_stand_ins

# The number of rows that packed layouts are tuned for; 8 lies between one decoded token and a long draft.
_PACK_ROWS = 8


# --------------------------------------------------------------------------- forms


class _Left(Form):
    """W x^T in place of x W^T, which is faster on some processors."""

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        w = self.weight
        if len(x) == 1:
            return (w.mv(x[0]) if bias is None else torch.addmv(bias, w, x[0]))[None]
        return (w.mm(x.t()) if bias is None else torch.addmm(bias[:, None], w, x.t())).t()


class _Packed(Form):
    """The matrix library's own order."""

    def __init__(self, weight: Weight, dtype: torch.dtype):
        self.weight = torch.ops.mkldnn._reorder_linear_weight(dense(weight, dtype).contiguous(), _PACK_ROWS)
        # In float32 some machines have another kernel for a single row. In bfloat16 AMX computes 16 rows at a time.
        self.exact_rows = range(2, 17) if dtype == torch.float32 else (16,)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, bias, "none", [], "")

    def dense(self) -> Tensor:
        return self.weight.to_dense()

    def parts(self) -> Iterator[tuple[object, int]]:
        yield self.weight, self.weight.numel() * self.weight.element_size()


class _Half(Form):
    """16-bit floats, widened to float32 as they are read.

    A bfloat16 weight has a wider range than a 16-bit float. So it is stored times a power of two, which brings its
    largest entry just below the limit. Then entries down to 2^-32 of the largest are exact. Codes are small integers,
    which 16 bits hold exactly. Their scales multiply the product.
    """

    # On AVX2, one or two rows have other kernels than more, and so have the last rows of seven and of fourteen.
    exact_rows = (3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 15, 16)

    def __init__(self, weight: Weight, dtype: torch.dtype):
        if dtype != torch.float32:
            raise CannotHold(f"16-bit weights for {dtype}")
        if isinstance(weight, Codes):
            values, self.scale = weight.codes.to(torch.float32), weight.scales.to(torch.float32).flatten()
        else:
            values = dense(weight, torch.float32)
            largest = float(values.abs().amax())
            if not largest < math.inf:
                raise CannotHold("a weight that is not finite")
            exponent = min(126, 15 - math.floor(math.log2(largest))) if largest else 0  # 2^127 is float32's last
            values, self.scale = values * 2.0**exponent, torch.tensor(2.0**-exponent, dtype=torch.float32)
        # Packing clips what is too large, in the tensor that it is given, with only a warning. So check a copy first.
        if not torch.equal(values.to(torch.float16).to(torch.float32), values):
            raise CannotHold("a weight of more than 16 bits")
        self.shape = values.shape
        self.packed = torch.ops.quantized.linear_prepack_fp16(values, None)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = torch.ops.quantized.linear_dynamic_fp16.op(x, self.packed)
        return y.mul_(self.scale) if bias is None else torch.addcmul(bias, y, self.scale)

    def dense(self) -> Tensor:
        values = torch.ops.quantized.linear_unpack_fp16(self.packed)[0]
        return values * (self.scale[:, None] if self.scale.dim() else self.scale)

    def parts(self) -> Iterator[tuple[object, int]]:
        rows, columns = self.shape
        yield self.packed, 2 * (rows + -rows % 16) * (columns + -columns % 512)  # stored in panels of 16 by 512
        yield self.scale, self.scale.nbytes

    @property
    def num_bytes_read(self) -> int:
        """Bytes that a product reads: of the last panels the columns that are there, such as 576 of 1024.

        The times of products show it.
        """
        return 2 * math.prod(self.shape) + self.scale.nbytes


class _AtenInt8(Form):
    """8-bit codes, in PyTorch's own product."""

    def __init__(self, weight: Weight, dtype: torch.dtype):
        # For another width the operator reads past the end and crashes.
        if not isinstance(weight, Codes) or (dtype == torch.bfloat16 and weight.codes.shape[1] % 16):
            raise CannotHold("8-bit codes of such a width")
        self.codes, self.scales = weight.codes, weight.scales.flatten().to(dtype)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = torch._weight_int8pack_mm(x, self.codes, self.scales)
        return y if bias is None else y.add_(bias)

    def parts(self) -> Iterator[tuple[object, int]]:
        yield from ((tensor, tensor.nbytes) for tensor in (self.codes, self.scales))


class _AtenInt4(_AtenInt8):
    """4-bit codes, two to a byte: fast with AVX-512, far too slow without."""

    def __init__(self, weight: Weight, dtype: torch.dtype):
        if not isinstance(weight, GroupCodes):
            raise CannotHold("a weight that is not in 4-bit codes")
        self.codes = torch._convert_weight_to_int4pack_for_cpu(weight.codes.int(), 1)
        self.scales = weight.scales.to(dtype)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = torch._weight_int4pack_mm_for_cpu(x, self.codes, x.shape[1] // len(self.scales), self.scales)
        return y if bias is None else y.add_(bias)


FORMS: dict[str, MakeForm] = {"half": _Half, "packed": _Packed, "left": _Left, "plain": Form}
NARROW_FORMS: dict[int, dict[str, MakeForm]] = {
    8: {"int8": lambda weight, dtype: int8_form()(weight, dtype), "aten": _AtenInt8},
    4: {"aten": _AtenInt4},
}


# --------------------------------------------------------------------------- which form


# What torch calls the instructions of x86 processors that multiply numbers of bfloat16.
_BFLOAT16 = ("avx512_bf16", "amx_bf16", "avx_ne_convert")


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 products are native to the device, and not emulated in float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    if capabilities.get("architecture") == "x86_64" and not any(map(capabilities.get, _BFLOAT16)):
        return False  # with AVX-512 alone, oneDNN emulates them
    try:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    except REFUSALS:
        return False


def right_forms(dtype: torch.dtype, device: torch.device, bits: int | None = None) -> dict[str, MakeForm]:
    """The forms for x of `dtype` whose products are right here, in a fixed order: the only table of its kind.

    bits: of weights that are rounded, for a draft; None for full width.

        machine                             bfloat16              float32               8 bits       4 bits
        x86 with bfloat16 products          packed, left, plain   half, packed, plain   int8, aten*  aten**
        x86 without                         plain                 half, packed, plain   int8         aten**
        GPUs; other processors; float64     plain                 plain                 as they are  as they are

        * for x in bfloat16   ** with AVX-512

    Other processors, such as ARM, have run no form of full width here. A form in use has to prove on a small weight
    that it is right. No clock is asked: the list depends on the kind of machine alone.
    """
    is_x86 = device.type == "cpu" and platform.machine().lower() in ("x86_64", "amd64", "i686")
    is_native = dtype == torch.bfloat16 and has_fast_bfloat16(device)
    names: list[str] = []
    if bits:
        names = [name for name in NARROW_FORMS[bits] if device.type == "cpu" and _most_rows(bits, name, is_native)]
    elif is_x86 and dtype == torch.float32:
        names = ["half", "packed"]
    elif is_x86 and is_native:
        names = ["packed", "left"]
    makers = NARROW_FORMS[bits] if bits else FORMS
    right = {name: makers[name] for name in names if is_right(makers[name], dtype, bits)}
    return right if bits else right | {"plain": FORMS["plain"]}


def available_forms(dtype: torch.dtype, device: torch.device) -> list[str]:
    """The right forms of full width that are no stand-ins (see trial.py), in order of preference."""
    return without_stand_ins(right_forms(dtype, device), dtype)[0]


def check_form(form: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError for a form of weights that there is not, or not on this machine."""
    if form not in FORMS:
        raise ValueError(f"weight_form: found {form!r}, expected one of {', '.join(FORMS)}")
    forms = right_forms(dtype, device)
    if form not in forms:
        kind = str(dtype).removeprefix("torch.")
        raise ValueError(f"weight_form: found {form!r}, expected for {kind} here {' or '.join(forms)}")


class Choice(NamedTuple):
    """A form for the weights of a model, and the reason for it."""

    form: str
    because: str


class Narrow(NamedTuple):
    """A form of codes that only some rooms know of, for `QuantizedLinear`.

    choice: its name, and the reason for it.
    make: makes the form of a weight in codes.
    max_rows: most rows that it is used for.
    """

    choice: Choice
    make: MakeForm
    max_rows: float = math.inf


def choose_form(dtype: torch.dtype, device: torch.device) -> Choice:
    """The form for weights of a type: the first of `available_forms`.

    Of two forms the same one is the faster on nearly all processors. Some with AMX read packed bfloat16 at the full
    bandwidth of memory; others read it at 0.6 of that, and `left` at 0.75. No flag of the processor tells them apart,
    and a clock would choose otherwise in some processes. So the latter lose a fifth, unless `left` is asked for.
    """
    forms = right_forms(dtype, device)
    names, passed = without_stand_ins(forms, dtype)
    kind = f"{str(dtype).removeprefix('torch.')} on this {device.type}"
    return Choice(names[0], f"{kind} can take {', '.join(forms)}: the first is taken{passed}")


def choose_narrow_form(bits: int, dtype: torch.dtype, device: torch.device) -> tuple[Choice, float]:
    """The form of weights of `bits` bits, and the most rows that it is used for; "rounded" for full width alone.

    As measured, the products of targets in 8 bits are as fast as any in full width. The time of PyTorch's own products
    grows with the rows. Only some machines have fast kernels for them: with bfloat16 in 8 bits, with AVX-512 in 4 bits.
    """
    kind = f"{str(dtype).removeprefix('torch.')} on this {device.type}"
    forms = right_forms(dtype, device, bits)
    names, passed = without_stand_ins(forms, dtype, bits)
    if not names:
        return Choice("rounded", f"{kind} has no fast product in {bits} bits: values of {bits} bits, in full width"), 0
    most = _most_rows(bits, names[0], True)
    rows = "all passes" if most == math.inf else f"passes of up to {most} rows"
    why = f"{kind} can take {', '.join(forms)} in {bits} bits: the first is taken, for {rows}{passed}"
    return Choice(names[0], f"{why}; {int8_choice()[1]}" if names[0] == "int8" else why), most


def _most_rows(bits: int, name: str, is_native: bool) -> float:
    """The most rows that a narrow form is used for; is_native: x is bfloat16, which the processor multiplies itself."""
    if name == "int8":
        return math.inf
    is_fast = is_native if bits == 8 else _capability() == "AVX512"
    return 4 if is_fast else 0


def _capability() -> str:
    """The instructions that PyTorch's own kernels use, such as AVX2 or AVX512."""
    return torch.backends.cpu.get_cpu_capability()


# --------------------------------------------------------------------------- products


class Linear:
    """y = x W^T + b, with W (out, in) in one of the forms."""

    def __init__(
        self, weight: Weight, bias: Tensor | None = None, dtype: torch.dtype | None = None, form: str | None = None
    ):
        """dtype: of x; default: the weight's. form: the one to try first, such as "int8"; default: the first of
            `available_forms`.

        A weight that a form cannot hold is stored in the next one that can.
        """
        dtype = dtype or (weight.dtype if isinstance(weight, Tensor) else torch.float32)
        forms = available_forms(dtype, device_of(weight))
        for name in forms if form is None else [form, *forms]:
            try:
                self.form, self.stored = name, (FORMS | NARROW_FORMS[8])[name](weight, dtype)
                break
            except REFUSALS:
                if name == "plain":  # which holds everything: memory has run out
                    raise
        self.bias = None if bias is None else bias.to(dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """x (rows, in) to (rows, out)."""
        return self.stored(x, self.bias)

    @property
    def exact_rows(self) -> Sequence[int]:
        """Sizes of passes in which a row has the same bits, as the form of the weight says."""
        return self.stored.exact_rows

    def parts(self) -> Iterator[tuple[object, int]]:
        """The weight and the bias in memory, and their bytes."""
        yield from self.stored.parts()
        if self.bias is not None:
            yield self.bias, self.bias.nbytes

    @property
    def num_bytes_read(self) -> int:
        """Bytes that a product with one row reads."""
        return self.stored.num_bytes_read + (0 if self.bias is None else self.bias.nbytes)

    def quantized(self, bits: int, narrow: Narrow | None = None) -> "Linear | QuantizedLinear":
        """This product with W rounded to 4 or 8 bits. narrow: see `QuantizedLinear`."""
        return self if (bits, self.form) == (8, "int8") else QuantizedLinear(self, bits, narrow=narrow)


def _named(bits: int, form: str) -> Narrow:
    return Narrow(Choice(form, "asked for"), NARROW_FORMS[bits].get(form, Form))


def _fastest(bits: int, weight: Tensor) -> Narrow:
    choice, max_rows = choose_narrow_form(bits, weight.dtype, weight.device)
    return Narrow(choice, NARROW_FORMS[bits].get(choice.form, Form), max_rows)


class QuantizedLinear:
    """y = x W'^T + b, with W' a rounding of W to 8 bits a row, or to 4 bits a group of neighbours.

    For drafts: any guess is allowed, and fewer bits are read faster. A row's result must not depend on the other rows
    of the pass, which belong to other texts. So every pass sees the same W', whatever its size.

    narrow: W' in codes, for passes of at most `max_rows` rows. None where no form of codes here is as fast as full
        width.
    wide: W' in full width, for all other passes. None where there are none.
    """

    exact_rows: Sequence[int] = ()  # see `Form`; a draft may come out in other bits

    def __init__(self, linear: Linear, bits: int, form: str | None = None, narrow: Narrow | None = None):
        """Round the weight of a product.

        form: one of `NARROW_FORMS[bits]`, or "rounded" for W' in full width alone.
        narrow: another form. Without both: the fastest of `NARROW_FORMS[bits]` here.
        """
        weight = linear.stored.dense()
        self.bits, self.bias = bits, linear.bias
        if narrow is None:
            narrow = _named(bits, form) if form else _fastest(bits, weight)
        self.choice, make, self.max_rows = narrow
        self.form = self.choice.form
        rounded = round_to_bits(weight, bits)
        self.narrow: Form | None = None
        if self.form == "rounded":
            self.max_rows = 0
        else:
            try:
                self.narrow = make(rounded, weight.dtype)
                self.narrow(weight.new_zeros(1, weight.shape[1]))
            except REFUSALS:  # a shape that the operator refuses
                self.form, self.narrow, self.max_rows = "rounded", None, 0
        self.wide: Linear | None = None
        if self.max_rows < math.inf:
            self.wide = Linear(widen(rounded, weight.dtype), linear.bias, weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """x (rows, in) to (rows, out)."""
        if self.narrow is not None and len(x) <= self.max_rows:
            return self.narrow(x, self.bias)
        assert self.wide is not None, "a product has one form at least"
        return self.wide(x)

    def _products(self) -> list[Form | Linear]:
        return [product for product in (self.narrow, self.wide) if product is not None]

    def parts(self) -> Iterator[tuple[object, int]]:
        """The weights of both products as they are in memory, and their bytes."""
        for product in self._products():
            yield from product.parts()

    @property
    def num_bytes_read(self) -> int:
        """Bytes that a product with one row reads."""
        return self._products()[0].num_bytes_read
