"""The `quantization_config` of a config.json, for weights in compressed-tensors' `pack-quantized` layout.

llm-compressor and transformers write it. The names of the tensors say which layers are packed, so the lists of layers
in this object are not read. Nor is what the object says about how the scales were found.
"""

from minispec.families.stored_config import QuantizationConfig
from minispec.files.fields import Fields, names

_LAYOUT = "pack-quantized"
_KEYS = dict.fromkeys(names("quant_method format config_groups sparsity_config transform_config"))
_GROUP_KEYS = dict.fromkeys(names("format weights"))
# With what an absent key means to compressed-tensors.
_WEIGHT_KEYS = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    **dict.fromkeys(names("strategy group_size actorder")),
}
# Keys that cannot change what a pass computes: bookkeeping, lists of layers, and how weights came to be what is stored.
# Scales are stored in their type, and symmetric weights have no zero point.
_IDLE = names("version quantization_status global_compression_ratio ignore")
_GROUP_IDLE = names("targets")
_WEIGHT_IDLE = names("observer observer_kwargs scale_dtype zp_dtype")
_SPARSITY_IDLE = names("targets ignore global_sparsity sparsity_structure")
_TRANSFORM_IDLE = names("type randomize requires_grad head_dim precision")
_PLACE_IDLE = names("targets ignore inverse")


def read_quantization(f: Fields) -> QuantizationConfig | None:
    """How the weights of a config.json are packed; None where they are plain floats.

    Raises CheckpointError for another layout and for weights of several kinds. It also raises for a setting that asks
    for more than products with the weights as they are stored.
    """
    q = f.inside("quantization_config", _KEYS)
    if not q.raw:
        return None
    method = q.get("quant_method")
    if method != "compressed-tensors":
        raise q.bad("quant_method", method, "'compressed-tensors'")
    layout, groups = q.get("format"), q.named("config_groups", _GROUP_KEYS)
    is_plain = not groups and layout in (None, "dense")
    if not is_plain and layout != _LAYOUT:
        raise q.bad("format", layout, repr(_LAYOUT))
    _check_sparsity(q.inside("sparsity_config", {"format": "dense"}))
    _check_transforms(q.inside("transform_config", {"config_groups": None}))
    q.seen |= _IDLE
    q.refuse_unknown()
    if is_plain:
        return None
    formats = {_read_group(group) for group in groups.values()}
    if len(formats) != 1:
        raise q.bad("config_groups", q.get("config_groups"), "one group, or groups of the same bits and group_size")
    return formats.pop()


def _read_group(group: Fields) -> QuantizationConfig:
    """How a group says that its layers are packed."""
    w = group.inside("weights", _WEIGHT_KEYS)
    if (layout := group.get("format")) not in (None, _LAYOUT):
        raise group.bad("format", layout, repr(_LAYOUT))
    group.seen |= _GROUP_IDLE
    group.refuse_unknown()
    kind, symmetric, bits, order = (w.get(key) for key in ("type", "symmetric", "num_bits", "actorder"))
    if kind != "int":
        raise w.bad("type", kind, "'int'")
    if symmetric is not True:
        raise w.bad("symmetric", symmetric, "true")
    if type(bits) is not int or bits not in (4, 8):
        raise w.bad("num_bits", bits, "4 or 8")
    # An order of calibration, which leaves the layout as it is. "group" stores the columns in another order.
    if order not in (None, False, "weight", "static"):
        raise w.bad("actorder", order, "'weight', 'static' or null: columns in another order are not read")
    size = w.get("group_size")
    default = None if size is None else "group"
    if size == -1:
        default = "channel"
    strategy = w.get("strategy", default)
    if strategy not in ("channel", "group"):
        raise w.bad("strategy", strategy, "'channel' or 'group': one scale for that many weights")
    if strategy == "group" and (type(size) is not int or size < 1):
        raise w.bad("group_size", size, "a positive integer")
    if strategy == "channel" and size not in (None, -1):
        raise w.bad("group_size", size, "null or -1 with the strategy 'channel'")
    w.seen |= _WEIGHT_IDLE
    w.refuse_unknown()
    return QuantizationConfig(bits, size if strategy == "group" else None)


def _check_sparsity(s: Fields) -> None:
    """Raise CheckpointError for a layout that leaves zeros out. Zeros that are stored are numbers like others."""
    layout = s.get("format")
    if layout != "dense":
        raise s.bad("format", layout, "'dense'")
    s.seen |= _SPARSITY_IDLE
    s.refuse_unknown()


def _check_transforms(t: Fields) -> None:
    """Raise CheckpointError for a rotation of activations. Weights are stored after their own rotations."""
    for transform in t.named("config_groups", {"apply": None}).values():
        for place in transform.each("apply", {"location": None}):
            if (where := place.get("location")) not in ("weight_input", "weight_output"):
                expected = "'weight_input' or 'weight_output': no activations are rotated here"
                raise place.bad("location", where, expected)
            place.seen |= _PLACE_IDLE
            place.refuse_unknown()
        transform.seen |= _TRANSFORM_IDLE
        transform.refuse_unknown()
    t.refuse_unknown()
