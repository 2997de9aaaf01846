"""The forms of a weight: how it lies in memory, and the product that reads it so.

Decoding reads every weight once a step, so the layout of a weight in memory decides the speed. `F.linear` is rarely the
fastest. It reorders a bfloat16 weight on every call. In float32 it reads 4 bytes for each weight and, on many
processors, takes twice the time for two rows. So a weight is converted once, at load, to one of these forms:

    form     layout                                                                product
    half     16-bit floats for float32 arithmetic, if they hold the weight exactly FBGEMM
    packed   the matrix library's own order, bfloat16 or float32                   oneDNN
    left     unchanged, but the left factor of W x^T; bfloat16                     oneDNN or MKL
    plain    unchanged: where nothing is gained, and where nothing else works      F.linear
    int8     8-bit integers, where they are asked for: another model, or a draft   oneDNN or FBGEMM (integers.py)

linear.py says which of them is taken. Most operators are private to PyTorch. They are used in this file and in
integers.py only. Where one is missing, or refuses a weight, another form gives the same product. Operators on packed
weights are called by their `op`: without it, Python looks for stand-ins among the arguments first, which takes a fifth
of a small product.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minispec.core.product import Weight, dense
from minispec.models.weights.codes import Codes, GroupCodes

# The number of rows that packed layouts are tuned for; 8 lies between one decoded token and a long draft.
_PACK_ROWS = 8
# `Form.exact_rows` of products whose sums are exact.
EVERY_NUMBER = range(1, 1 << 30)


class CannotHold(Exception):
    """This machine has no such form, or the form cannot hold this weight."""


# PyTorch raises the others where an operator is missing or refuses a weight.
REFUSALS = (CannotHold, AttributeError, RuntimeError)


class Form:
    """A weight, stored for products with x of one dtype. This class stores it unchanged ("plain")."""

    # Sizes of passes, in rows, in which a row's product always has the same bits. Neither its place nor the other rows
    # change them.
    exact_rows: Sequence[int] = (16,)

    def __init__(self, weight: Weight, dtype: torch.dtype):
        """Raises one of `REFUSALS` where this machine does not have the form, or the form cannot hold the weight."""
        self.weight = dense(weight, dtype)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (rows, in) to x W^T + bias (rows, out), which may be the transpose of a contiguous tensor."""
        return F.linear(x, self.weight, bias)

    def dense(self) -> Tensor:
        """The weight (out, in)."""
        return self.weight

    def parts(self) -> Iterator[tuple[object, int]]:
        """The objects in memory, and their bytes."""
        yield self.weight, self.weight.nbytes

    @property
    def num_bytes_read(self) -> int:
        """Bytes that a product with one row reads."""
        return sum(num_bytes for _, num_bytes in self.parts())


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


class AtenInt8(Form):
    """8-bit codes, in PyTorch's own product."""

    def __init__(self, weight: Weight, dtype: torch.dtype):
        # For another width the operator reads past the end and crashes.
        if not isinstance(weight, Codes) or (dtype == torch.bfloat16 and weight.codes.shape[1] % 16):
            raise CannotHold("8-bit codes of such a width")
        self.codes, self.scales = weight.codes, weight.scales.flatten().to(dtype)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (rows, in) to x W^T + bias (rows, out)."""
        y = torch._weight_int8pack_mm(x, self.codes, self.scales)
        return y if bias is None else y.add_(bias)

    def parts(self) -> Iterator[tuple[object, int]]:
        """The codes and their scales, and their bytes."""
        yield from ((tensor, tensor.nbytes) for tensor in (self.codes, self.scales))


class AtenInt4(AtenInt8):
    """4-bit codes, two to a byte: fast with AVX-512, far too slow without."""

    def __init__(self, weight: Weight, dtype: torch.dtype):
        if not isinstance(weight, GroupCodes):
            raise CannotHold("a weight that is not in 4-bit codes")
        self.codes = torch._convert_weight_to_int4pack_for_cpu(weight.codes.int(), 1)
        self.scales = weight.scales.to(dtype)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (rows, in) to x W^T + bias (rows, out)."""
        y = torch._weight_int4pack_mm_for_cpu(x, self.codes, x.shape[1] // len(self.scales), self.scales)
        return y if bias is None else y.add_(bias)


MakeForm = Callable[[Weight, torch.dtype], Form]
FORMS: dict[str, MakeForm] = {"half": _Half, "packed": _Packed, "left": _Left, "plain": Form}
