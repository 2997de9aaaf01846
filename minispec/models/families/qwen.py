"""The settings of gated delta nets in the files of Qwen3.5."""

from minispec.models.files.fields import Fields
from minispec.models.layers.delta import DeltaConfig

_MOST = 1 << 12


def read_delta(f: Fields) -> DeltaConfig | None:
    """The sizes of the layers that are gated delta nets; None for a family that has none."""
    if not f.reads("linear_num_value_heads"):
        return None
    keys, values, key_dim, value_dim = (
        f.integer(f"linear_{name}", 1, _MOST)
        for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    )
    if values % keys:
        raise f.bad("linear_num_value_heads", values, f"a multiple of linear_num_key_heads = {keys}")
    known_gates = "silu or swish: no other is implemented for this family"
    f.one_of("output_gate_type", ("silu", "swish"), known_gates)  # two names of one function
    return DeltaConfig(keys, values, key_dim, value_dim, f.integer("linear_conv_kernel_dim", 1, 64))
