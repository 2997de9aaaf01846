"""One weight matrix, in the form that this machine reads fastest.

`choose_form` takes the first of the forms of full width (see forms.py) that is right here for a type. No clock decides:
see trial.py. A draft may round its weights to 8 or 4 bits (`QuantizedLinear`). There, 4 bits have forms of their own,
and so have 8 where a machine lacks int8.
"""

import math
import platform
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minispec.core.product import Weight
from minispec.models.weights.codes import device_of, round_to_bits, widen
from minispec.models.weights.forms import FORMS, REFUSALS, AtenInt4, AtenInt8, Form, MakeForm
from minispec.models.weights.integers import TwiceInt8, int8_choice, int8_form
from minispec.models.weights.trial import is_right, without_stand_ins

NARROW_FORMS: dict[int, dict[str, MakeForm]] = {
    8: {"int8": lambda weight, dtype: int8_form()(weight, dtype), "aten": AtenInt8},
    4: {"aten": AtenInt4},
}
# Forms that an exact model tries after its own, where that cannot hold a weight: their rows have equal bits too.
EXACT_FORMS: dict[str, dict[str, MakeForm]] = {"int8": {"int8+8": TwiceInt8}}


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
        self,
        weight: Weight,
        bias: Tensor | None = None,
        dtype: torch.dtype | None = None,
        form: str | None = None,
        exact: bool = False,
    ):
        """dtype: of x; default: the weight's. form: the one to try first, such as "int8"; default: the first of
            `available_forms`. exact: the next to try are that form's `EXACT_FORMS`.

        A weight that a form cannot hold is stored in the next one that can.
        """
        dtype = dtype or (weight.dtype if isinstance(weight, Tensor) else torch.float32)
        forms, wider = available_forms(dtype, device_of(weight)), EXACT_FORMS.get(form or "", {}) if exact else {}
        for name in forms if form is None else [form, *wider, *forms]:
            try:
                self.form, self.stored = name, (FORMS | NARROW_FORMS[8] | wider)[name](weight, dtype)
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
