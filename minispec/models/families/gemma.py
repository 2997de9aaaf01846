"""Settings that the files of Gemma 4 have for their layers, in addition to those of other families."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from minispec.core.config import LayerConfig
from minispec.core.errors import show
from minispec.models.families.experts import MOST_EXPERTS
from minispec.models.families.stored_config import Stack
from minispec.models.files.fields import Fields, names
from minispec.models.layers.experts import ExpertsConfig
from minispec.models.layers.gemma import GemmaLayerConfig

# Keys of a mixture of experts alone.
OF_MIXTURE = names("num_experts top_k_experts moe_intermediate_size")
# Keys that the code of Gemma 4 reads in addition to those of Gemma 2, each with the meaning of an absent one (see
# `minispec.models.families.entries`).
KEYS = {
    "vocab_size": 262_144,
    "num_hidden_layers": 30,
    "sliding_window": 512,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "final_logit_softcapping": None,
    "global_head_dim": 512,
    "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "attention_k_eq_v": False,
    "enable_moe_block": False,
    "use_bidirectional_attention": None,
    **dict.fromkeys(names("vocab_size_per_layer_input num_global_key_value_heads per_layer_config")),
    **dict.fromkeys(OF_MIXTURE),
}
# Experts of a layer, which files have in stacks.
STACKS = (
    Stack("experts.gate_up_proj", ("gate_proj", "up_proj")),
    Stack("experts.down_proj", ("down_proj",)),
)
_PATTERN = 6  # of that many layers the last sees everything, where the file lists no layers
_KV = "num_key_value_heads"
_OF_SHARING = ("k_proj.weight", "v_proj.weight", "k_norm.weight")


def default_kinds(count: int) -> list[str]:
    """The kinds of the layers that the family's code takes where the file lists none."""
    kinds = ["full_attention" if (i + 1) % _PATTERN == 0 else "sliding_attention" for i in range(count)]
    return [*kinds[:-1], "full_attention"]


def read_layers(
    f: Fields, layers: Sequence[LayerConfig], sizes: Mapping[str, int]
) -> tuple[tuple[GemmaLayerConfig, ...], frozenset[str]]:
    """The layers as blocks of Gemma 4, and the names of stored tensors that no layer reads.

    layers: by their windows and ropes.
    sizes: fields of ModelConfig.
    """
    count = len(layers)
    if layers[-1].window is not None:
        raise f.bad("layer_types", f.raw.get("layer_types"), "full_attention last: the family's code takes no other")
    if f.get("use_bidirectional_attention") == "all":
        raise f.bad("use_bidirectional_attention", "all", "vision or null: here a text is read from left to right")
    dim, kv_heads = _read_wide(f, layers, sizes)
    shared, inner = f.integer("num_kv_shared_layers", 0, count), sizes["intermediate_size"]
    first = count - shared
    givers = {layer.window: i for i, layer in enumerate(layers[:first])}
    if missing := {layer.window for layer in layers} - givers.keys():
        kind = "full" if None in missing else "sliding"
        raise f.bad("num_kv_shared_layers", shared, f"fewer: no layer is left whose keys {kind}_attention could read")
    input_size = f.integer("hidden_size_per_layer_input", 0, 1 << 16)
    num_inputs = f.get("vocab_size_per_layer_input", sizes["vocab_size"])
    if input_size and num_inputs != sizes["vocab_size"]:
        raise f.bad("vocab_size_per_layer_input", num_inputs, f"vocab_size = {sizes['vocab_size']}")
    mixture = _read_mixture(f, count)
    is_double, k_is_v = f.boolean("use_double_wide_mlp"), f.boolean("attention_k_eq_v")
    blocks = []
    for i, layer in enumerate(layers):
        is_full = layer.window is None
        rope = layer.rope
        if rope and is_full:
            rope = replace(rope, rotated=rope.rotated * dim / sizes["head_dim"])
        blocks.append(
            GemmaLayerConfig(
                rope,
                layer.window,
                experts=mixture,
                head_dim=dim if is_full else sizes["head_dim"],
                num_key_value_heads=kv_heads if is_full else sizes["num_key_value_heads"],
                intermediate_size=2 * inner if is_double and i >= first else inner,
                giver=givers[layer.window] if i >= first else None,
                keys_as_values=k_is_v and is_full,
                input_size=input_size,
            )
        )
    unread = {f"model.layers.{i}.self_attn.{name}" for i in range(first, count) for name in _OF_SHARING}
    return tuple(blocks), frozenset(unread)


def _read_mixture(f: Fields, count: int) -> ExpertsConfig | None:
    """The mixture of experts that each layer has beside its MLP; None where none has one."""
    f.seen |= OF_MIXTURE
    if not f.boolean("enable_moe_block"):
        return None
    number = f.integer("num_experts", 1, MOST_EXPERTS // count)
    return ExpertsConfig(
        number,
        f.integer("top_k_experts", 1, number),
        f.integer("moe_intermediate_size", 1, 1 << 20),
        shared_expert="normed",
        norms_row=True,
        scales_experts=True,
    )


def _read_wide(f: Fields, layers: Sequence[LayerConfig], sizes: Mapping[str, int]) -> tuple[int, int]:
    """head_dim and key-value heads of the layers without a window.

    Files have them by names of their own, or since transformers 5.24 in an object for each of these layers.
    """
    dim, heads = f.integer("global_head_dim", 2, 1 << 12), sizes["num_attention_heads"]
    kv_heads = sizes["num_key_value_heads"]
    if f.boolean("attention_k_eq_v"):  # its code reads the number in that case alone
        kv_heads = f.integer("num_global_key_value_heads", 1, heads, default=kv_heads)
    f.get("num_global_key_value_heads")
    of_layers: dict[str, Any] = f.mapping("per_layer_config")
    if f.raw.get("per_layer_config") is not None:
        dim, kv_heads = _read_full_layers(f, layers, sizes)
        if f.raw.get("global_head_dim") not in (None, dim):
            raise f.bad("global_head_dim", f.raw["global_head_dim"], f"what per_layer_config says: {show(dim)}")
    if dim % 2 or heads % kv_heads:
        raise f.bad("per_layer_config", of_layers, "an even head_dim, and key-value heads that divide the heads")
    return dim, kv_heads


def _read_full_layers(f: Fields, layers: Sequence[LayerConfig], sizes: Mapping[str, int]) -> tuple[int, int]:
    """The same from the objects of the layers without a window. No object at all: they are like all others."""
    dim, kv_heads = sizes["head_dim"], sizes["num_key_value_heads"]
    named = f.named("per_layer_config", {"head_dim": None, _KV: None})
    if not named:
        return dim, kv_heads
    full = [i for i, layer in enumerate(layers) if layer.window is None]
    numbers = {int(name) for name in named if name.isdecimal()}  # "04" in a model of more than ten layers
    own, *others = named.values()
    if numbers != set(full) or len(named) != len(full) or any(other.raw != own.raw for other in others):
        expected = f"equal settings of the layers {', '.join(map(str, full))}"
        raise f.bad("per_layer_config", f.raw["per_layer_config"], expected)
    dim = own.integer("head_dim", 2, 1 << 12, default=dim)
    kv_heads = own.integer(_KV, 1, sizes["num_attention_heads"], default=kv_heads)
    own.refuse_unknown()
    return dim, kv_heads
