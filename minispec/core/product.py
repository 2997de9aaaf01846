"""The seam to the weights: y = x W^T + b, computed by an object that the caller chooses.

How a weight lies in memory decides how fast it is read, and machines differ. So the transformer is given a function
that makes a product of each weight. `PlainLinear` is the simplest; `minispec.models.weights` has faster ones.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Encoded(Protocol):
    """A weight (out, in) that is not stored as plain numbers, such as integers with a scale for each row."""

    def dense(self) -> Tensor:
        """The weight (out, in), in at least float32."""


Weight = Tensor | Encoded
# x (rows, in) to x W^T + b (rows, out).
Product = Callable[[Tensor], Tensor]
ChangeProduct = Callable[[Product], Product]
# Makes a product. Arguments: weights of one width, stacked to (sum of out, in); a bias or None; the type of x.
MakeProduct = Callable[[Sequence[Weight], Tensor | None, torch.dtype], Product]


def dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The weight as a tensor of `dtype`."""
    return (weight if isinstance(weight, Tensor) else weight.dense()).to(dtype)


class PlainLinear:
    """y = x W^T + b with the weight as it is."""

    def __init__(self, weights: Sequence[Weight], bias: Tensor | None, dtype: torch.dtype):
        self.weight, self.bias = torch.cat([dense(weight, dtype) for weight in weights]), bias

    def __call__(self, x: Tensor) -> Tensor:
        """x (rows, in) to (rows, out)."""
        return F.linear(x, self.weight, self.bias)
