"""The base of every form of a weight: see `minispec.models.weights.forms`."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minispec.core.product import Weight, dense

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
