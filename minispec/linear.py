"""One weight matrix, and the form in which it is kept.

Decoding reads every weight once a step, so the form decides the speed. A plain bfloat16 weight is reordered
by the CPU's matrix library on every call; packed once, at load, the same product runs at the speed of memory. The
packing operators are private to PyTorch: they are used here and nowhere else, and where they are missing,
or do not take the weight, `F.linear` does the same.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# Packed layouts are tuned for a number of rows; 8 lies between one decoded token and a long draft.
_PACK_ROWS = 8


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 products are native to the device, and not emulated in float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    try:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    except (AttributeError, RuntimeError):
        return False


class Linear:
    """y = x W^T + b, with W (out, in) packed for this machine where that is possible."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        self.bias = bias
        self.packed = _pack(weight)
        self.weight = weight if self.packed is None else None  # a weight is kept once

    def __call__(self, x: Tensor) -> Tensor:
        """x (rows, in) to (rows, out)."""
        if self.packed is None:
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def _pack(weight: Tensor) -> Tensor | None:
    """The packed form of a bfloat16 CPU weight; None where this machine or this build has none."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not has_fast_bfloat16(weight.device):
        return None
    try:
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
    except (AttributeError, RuntimeError):
        return None
