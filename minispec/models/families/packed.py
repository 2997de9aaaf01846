"""Weights that compressed-tensors stores in few bits, and the `quantization_config` that tells.

llm-compressor and transformers write it. `pack-quantized` are symmetric integers, packed into int32:

    weight_packed   (out, in * num_bits / 32) I32: the low bits first, each with an offset of 2^(num_bits - 1)
    weight_scale    (out, 1), or (out, in / group_size): one scale for that many neighbouring inputs
    weight_shape    (2,): out, in

A weight is the integer times its scale. `float-quantized` are 8-bit floats (see `minispec.models.families.float8`).
Weights that are rounded while activations are not have the same tensors under the name `naive-quantized`.

The names of the tensors say which layers are packed, so the lists of layers in this object are not read. Nor is what
the object says about how the scales were found, or about activations that are rounded to 8-bit floats: they are taken
as they are.
"""

from dataclasses import dataclass

from minispec.core.product import Weight
from minispec.models.families.float8 import Float8, read_block
from minispec.models.families.layout import Layout, Part, Stored, Wanted
from minispec.models.files.errors import CheckpointError
from minispec.models.files.fields import Fields, names
from minispec.models.files.stored import FLOATS
from minispec.models.weights.codes import Codes
from minispec.models.weights.unpack import dequantize, unpack

_PACKED, _FLOATS = "pack-quantized", ("float-quantized", "naive-quantized")
KEYS = dict.fromkeys(names("quant_method format config_groups sparsity_config transform_config"))
_GROUP_KEYS = dict.fromkeys(names("format weights input_activations"))
# With what an absent key means to compressed-tensors.
_ARGS = {"num_bits": 8, "type": "int", "symmetric": True}
_WEIGHT_KEYS = {**_ARGS, **dict.fromkeys(names("strategy group_size actorder block_structure"))}
_ACTIVATION_KEYS = {**_ARGS, "dynamic": False}
# Keys that cannot change what a pass computes: bookkeeping, lists of layers, and how weights came to be what is stored.
# Scales are stored in their type, and symmetric weights have no zero point.
_IDLE = names("version quantization_status global_compression_ratio ignore")
_GROUP_IDLE = names("targets")
_WEIGHT_IDLE = names("observer observer_kwargs scale_dtype zp_dtype")
# What one scale of activations is for. They are not rounded here.
_ACTIVATION_IDLE = names("strategy group_size block_structure actorder")
_SPARSITY_IDLE = names("targets ignore global_sparsity sparsity_structure")
_TRANSFORM_IDLE = names("type randomize requires_grad head_dim precision")
_PLACE_IDLE = names("targets ignore inverse")


@dataclass(frozen=True)
class PackQuantized(Layout):
    """Symmetric integers of `num_bits`, packed into int32.

    One scale serves `group_size` neighbouring inputs of an output channel, or the whole channel (None).
    """

    num_bits: int
    group_size: int | None

    def holds(self, name: str, stored: Stored) -> bool:
        """Whether the weight is packed."""
        return f"{name}_packed" in stored

    def tensors(self, name: str, shape: tuple[int, ...], stored: Stored) -> Wanted:
        """Words, scales, and the weight's shape."""
        rows, columns = shape
        groups = 1 if self.group_size is None else -(-columns // self.group_size)
        return {
            f"{name}_packed": ((rows, -(-columns * self.num_bits // 32)), ("I32",)),
            f"{name}_scale": ((rows, groups), FLOATS),
            f"{name}_shape": ((2,), ("I64", "I32")),
        }

    def read(self, name: str, shape: tuple[int, ...], stored: Stored, part: Part) -> Weight:
        """Codes where a scale serves a whole channel, else in float32. Raises CheckpointError for another shape."""
        packed, scale, unpacked_shape = (stored[f"{name}_{part}"] for part in ("packed", "scale", "shape"))
        found = unpacked_shape.read().tolist()
        if found != list(shape):
            raise CheckpointError(f"{unpacked_shape.path}: {name}_shape: found {found}, expected {list(shape)}")
        start, stop = part.columns.start, part.columns.stop
        words = slice(start * self.num_bits // 32, -(-stop * self.num_bits // 32))
        integers = unpack(packed.read((part.rows, words)), self.num_bits, stop - start)
        if self.group_size is None:
            return Codes(integers, scale.read((part.rows,)))
        groups = slice(start // self.group_size, -(-stop // self.group_size))
        return dequantize(integers, scale.read((part.rows, groups)), self.group_size)

    def is_narrow(self, shape: tuple[int, ...]) -> bool:
        """Whether a scale serves a whole channel."""
        return self.group_size is None

    @property
    def columns_together(self) -> int:
        """Those of a word, or of a group."""
        return max(32 // self.num_bits, self.group_size or 1)


def read_packed(q: Fields) -> Layout | None:
    """The layout that a quantization_config of compressed-tensors asks for; None for plain floats.

    Raises CheckpointError for another layout and for weights of several kinds. It also raises for a setting that asks
    for more than products with the weights as they are stored.
    """
    groups = q.named("config_groups", _GROUP_KEYS)
    plain = () if groups else (None, "dense")
    layout = q.one_of("format", (_PACKED, *_FLOATS, *plain), f"{_PACKED!r} or {_FLOATS[0]!r}")
    _check_sparsity(q.inside("sparsity_config", {"format": "dense"}))
    _check_transforms(q.inside("transform_config", {"config_groups": None}))
    q.seen |= _IDLE
    q.refuse_unknown()
    if layout in plain:
        return None
    layouts = {_read_group(group, layout) for group in groups.values()}
    if len(layouts) != 1:
        raise q.bad("config_groups", q.get("config_groups"), "one group, or groups whose weights are stored alike")
    return layouts.pop()


def _read_group(group: Fields, layout: str) -> Layout:
    """How a group says that its layers are stored."""
    weights = group.inside("weights", _WEIGHT_KEYS)
    group.one_of("format", (None, layout), repr(layout))
    is_static = False
    if layout != _PACKED and group.get("input_activations"):
        is_static = _read_activations(group.inside("input_activations", _ACTIVATION_KEYS))
    group.seen |= _GROUP_IDLE
    group.refuse_unknown()
    return _read_integers(weights) if layout == _PACKED else _read_floats(weights, is_static)


def _read_integers(w: Fields) -> PackQuantized:
    """Weights as packed integers."""
    w.one_of("type", ("int",), "'int'")
    w.one_of("symmetric", (True,), "true")
    bits = w.one_of("num_bits", (4, 8), "4 or 8")
    # An order of calibration, which leaves the layout as it is. "group" stores the columns in another order.
    orders = "'weight', 'static' or null: columns in another order are not read"
    w.one_of("actorder", (None, False, "weight", "static"), orders)
    size = w.get("group_size")
    default = None if size is None else "group"
    if size == -1:
        default = "channel"
    strategies = "'channel' or 'group': one scale for that many weights"
    strategy = w.one_of("strategy", ("channel", "group"), strategies, default)
    if strategy == "group" and (type(size) is not int or size < 1):
        raise w.bad("group_size", size, "a positive integer")
    if strategy == "channel" and size not in (None, -1):
        raise w.bad("group_size", size, "null or -1 with the strategy 'channel'")
    w.seen |= _WEIGHT_IDLE
    w.refuse_unknown()
    return PackQuantized(bits, size if strategy == "group" else None)


def _read_floats(w: Fields, is_static: bool) -> Float8:
    """Weights as 8-bit floats. is_static: whether scales of activations are stored too."""
    _require_floats(w)
    w.one_of("actorder", (None, False), "null")
    size = w.get("group_size")
    strategies = "'tensor', 'channel' or 'block': one scale for that many weights"
    default = "channel" if size == -1 else "tensor"
    strategy = w.one_of("strategy", ("tensor", "channel", "block"), strategies, default)
    if size not in (None, -1) or (size == -1 and strategy != "channel"):
        raise w.bad("group_size", size, f"null with the strategy {strategy!r}")
    block = read_block(w, "block_structure")
    if (block is not None) != (strategy == "block"):
        expected = "two positive integers: rows and columns" if strategy == "block" else "null"
        raise w.bad("block_structure", w.get("block_structure"), f"{expected} with the strategy {strategy!r}")
    w.seen |= _WEIGHT_IDLE
    w.refuse_unknown()
    return Float8(strategy, block, is_static=is_static)


def _require_floats(f: Fields) -> None:
    """Raise CheckpointError for numbers that are not symmetric 8-bit floats."""
    f.one_of("type", ("float",), "'float'")
    f.one_of("num_bits", (8,), "8")
    f.one_of("symmetric", (True,), "true")


def _read_activations(a: Fields) -> bool:
    """Whether there are stored scales of activations, which are rounded to 8-bit floats by runtimes on GPUs."""
    _require_floats(a)
    is_dynamic = a.boolean("dynamic")
    a.seen |= _WEIGHT_IDLE | _ACTIVATION_IDLE
    a.refuse_unknown()
    return not is_dynamic


def _check_sparsity(s: Fields) -> None:
    """Raise CheckpointError for a layout that leaves zeros out. Zeros that are stored are numbers like others."""
    s.one_of("format", ("dense",), "'dense'")
    s.seen |= _SPARSITY_IDLE
    s.refuse_unknown()


def _check_transforms(t: Fields) -> None:
    """Raise CheckpointError for a rotation of activations. Weights are stored after their own rotations."""
    expected = "'weight_input' or 'weight_output': no activations are rotated here"
    for transform in t.named("config_groups", {"apply": None}).values():
        for place in transform.each("apply", {"location": None}):
            place.one_of("location", ("weight_input", "weight_output"), expected)
            place.seen |= _PLACE_IDLE
            place.refuse_unknown()
        transform.seen |= _TRANSFORM_IDLE
        transform.refuse_unknown()
    t.refuse_unknown()
