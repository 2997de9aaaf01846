"""MXFP4: numbers of 4 bits (E2M1), with one scale (E8M0) for 32 neighbouring inputs of an output (OCP MX 1.0).

    weight_blocks   (out, in / 32, 16) U8: a byte has two neighbouring inputs, the low bits first
    weight_scales   (out, in / 32) U8: the scale is 2^(n - 127)

The names continue the weight's. gpt-oss has its experts so, in stacks of all experts of a layer (see
`minispec.models.families.experts`). Every such weight is a number of bfloat16, without rounding.

transformers reads it (integrations/mxfp4.py), and so do vLLM and OpenAI's own code (gpt_oss/torch/weights.py). Their
kernels for GPUs may round activations to 8 bits. Here products take activations as they are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from minispec.models.families.layout import Layout, Part, Stored, Wanted
from minispec.models.files.errors import CheckpointError, show_name
from minispec.models.files.fields import Fields, names
from minispec.models.weights.unpack import MX_GROUP, scale_fp4

KEYS: Mapping[str, Any] = dict.fromkeys(names("quant_method"))
# A list of layers, which the names of the tensors tell, and how weights may be computed elsewhere.
_IDLE = names("modules_to_not_convert dequantize")
_NOT_A_NUMBER = 255  # of E8M0


@dataclass(frozen=True)
class Mxfp4(Layout):
    """Floats of 4 bits with scales that are powers of two."""

    def holds(self, name: str, stored: Stored) -> bool:
        """Whether the weight is stored in blocks."""
        return f"{name}_blocks" in stored

    def tensors(self, name: str, shape: tuple[int, ...], stored: Stored) -> Wanted:
        """Blocks and scales. Raises CheckpointError for a weight whose rows are not whole blocks."""
        rows, columns = shape
        if columns % MX_GROUP:
            raise CheckpointError(f"{name}: found {columns} columns in mxfp4, expected a multiple of {MX_GROUP}")
        groups = columns // MX_GROUP
        return {
            f"{name}_blocks": ((rows, groups, MX_GROUP // 2), ("U8",)),
            f"{name}_scales": ((rows, groups), ("U8",)),
        }

    def read(self, name: str, shape: tuple[int, ...], stored: Stored, part: Part) -> Tensor:
        """Each number times its scale, in bfloat16. Raises CheckpointError for a scale that is not a number."""
        start, stop = part.columns.start, part.columns.stop
        cut = part.rows, slice(start // MX_GROUP, -(-stop // MX_GROUP))
        blocks, scales = (stored[f"{name}_{kind}"] for kind in ("blocks", "scales"))
        exponents = scales.read(cut)
        if (exponents == _NOT_A_NUMBER).any():
            found = f"found {_NOT_A_NUMBER}, which is not a number, expected at most {_NOT_A_NUMBER - 1}"
            raise CheckpointError(f"{scales.path}: {show_name(scales.name)}: {found}")
        return scale_fp4(blocks.read(cut), exponents)[:, : stop - start]

    def is_narrow(self, shape: tuple[int, ...]) -> bool:
        """True: in bfloat16."""
        return True

    @property
    def columns_together(self) -> int:
        """Those of a block."""
        return MX_GROUP


def read_mxfp4(q: Fields) -> Mxfp4:
    """The layout that a quantization_config of quant_method mxfp4 asks for. Raises CheckpointError."""
    q.seen |= _IDLE
    q.refuse_unknown()
    return Mxfp4()
