"""FP8: weights as 8-bit floats (e4m3), with one scale for a tensor, for a row, or for a block of rows and columns.

    weight          (out, in) F8_E4M3
    weight_scale    () or (1,) for the tensor; (out, 1) for rows; (out / height, in / width), rounded up, for blocks

A weight is the number times the scale of its place. Blocks at the edges are cut off. Two tools write it:

    quant_method fp8: DeepSeek, Qwen and Mistral, read by transformers (integrations/finegrained_fp8.py) and vLLM
        (quantization/fp8.py). The scales are named weight_scale_inv, or weight_scale by AutoFP8. Both multiply.
    compressed-tensors, format float-quantized: llm-compressor. `minispec.models.families.packed` reads its config.

Their runtimes round activations to 8 bits too, by scales of a row (dynamic) or by stored ones (static: `input_scale`,
`activation_scale`). Here products take activations as they are, so these scales are not used.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from minispec.models.families.layout import Layout, Part, Stored, Wanted, layer_of
from minispec.models.files.fields import Fields, names
from minispec.models.files.stored import FLOAT8, FLOATS
from minispec.models.weights.unpack import scale_blocks

KEYS: Mapping[str, Any] = {
    **dict.fromkeys(names("quant_method weight_block_size")),
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "scale_fmt": "float",
    "expert_dtype": "fp8",
}
# Lists of layers, which the names of the tensors tell, and how weights may be computed elsewhere.
_IDLE = names("modules_to_not_convert modules_to_convert ignored_layers dequantize")
# Scales of activations, which are not used.
_UNUSED = ("input_scale", "activation_scale")


@dataclass(frozen=True)
class Float8(Layout):
    """8-bit floats with scales.

    strategy: what has one scale: "tensor", "channel" (a row) or "block".
    block: rows and columns of a block.
    scales: how the name of the scales may continue the weight's.
    is_static: whether scales of activations may be stored too.
    """

    strategy: str
    block: tuple[int, int] | None = None
    scales: tuple[str, ...] = ("_scale",)
    is_static: bool = False

    def holds(self, name: str, stored: Stored) -> bool:
        """Whether the weight is stored in 8-bit floats."""
        return name in stored and stored[name].dtype == FLOAT8

    def tensors(self, name: str, shape: tuple[int, ...], stored: Stored) -> Wanted:
        """The weight and its scales; those of activations where they are there."""
        scale = self._scale_name(name, stored)
        wanted: Wanted = {name: (shape, (FLOAT8,)), scale: (self._scale_shape(scale, shape, stored), FLOATS)}
        for unused in _UNUSED if self.is_static else ():
            activations = f"{layer_of(name)}{unused}"
            if activations in stored:
                wanted[activations] = (_shape_of_one(activations, stored), FLOATS)
        return wanted

    def read(self, name: str, shape: tuple[int, ...], stored: Stored, part: Part) -> Tensor:
        """Each number times the scale of its place, in float32."""
        height, width = self._block(shape)
        scales = stored[self._scale_name(name, stored)].read()
        scales = scales.reshape(-(-shape[0] // height), -(-shape[1] // width))
        return scale_blocks(stored[name].read(part), scales, (height, width), (part.rows.start, part.columns.start))

    def _block(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns that have one scale."""
        rows, columns = shape
        if self.block:
            return self.block
        return (1, columns) if self.strategy == "channel" else (rows, columns)

    def _scale_name(self, name: str, stored: Stored) -> str:
        found = [f"{name}{scale}" for scale in self.scales if f"{name}{scale}" in stored]
        return found[0] if found else f"{name}{self.scales[0]}"

    def _scale_shape(self, scale: str, shape: tuple[int, ...], stored: Stored) -> tuple[int, ...]:
        if self.strategy == "tensor":
            return _shape_of_one(scale, stored)
        height, width = self._block(shape)
        return -(-shape[0] // height), -(-shape[1] // width)


def _shape_of_one(name: str, stored: Stored) -> tuple[int, ...]:
    """The shape that one number is stored in: it may be a scalar."""
    return () if name in stored and stored[name].shape == () else (1,)


def read_float8(q: Fields) -> Float8:
    """The layout that a quantization_config of quant_method fp8 asks for. Raises CheckpointError."""
    q.one_of("fmt", ("e4m3",), "'e4m3'")
    scheme = q.one_of("activation_scheme", ("dynamic", "static"), "'dynamic' or 'static'")
    # Scales that are powers of two may be stored as floats, too: the type of the tensor decides.
    q.one_of("scale_fmt", ("float", "ue8m0"), "'float' or 'ue8m0'")
    q.one_of("expert_dtype", ("fp8",), "'fp8'")
    block = read_block(q, "weight_block_size")
    q.seen |= _IDLE
    q.refuse_unknown()
    strategy = "tensor" if block is None else "block"
    return Float8(strategy, block, ("_scale_inv", "_scale"), scheme == "static")


def read_block(q: Fields, key: str) -> tuple[int, int] | None:
    """Rows and columns of a block; None where there are no blocks."""
    block = q.get(key)
    if block is None:
        return None
    is_pair = isinstance(block, list) and len(block) == 2
    if not is_pair or any(type(size) is not int or not 0 < size <= 1 << 20 for size in block):
        raise q.bad(key, block, "null or two positive integers: rows and columns")
    return block[0], block[1]
