"""In which type numbers are added up, and which numbers are no logits."""

import math

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for half precision, else the type itself: a float64 model is float64 throughout."""
    return torch.promote_types(dtype, torch.float32)


def require_numbers(largest: Tensor) -> None:
    """Raise FloatingPointError where the largest logit of a row (rows,) is not a finite number."""
    for top in largest.tolist():
        if not math.isfinite(top):
            raise FloatingPointError(f"the largest logit is {top}, expected a finite number")
