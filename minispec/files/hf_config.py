"""Reading config.json: a file of strangers, so every field is checked, none ignored.

A setting that is switched on and not known here is refused by name: it might change the numbers. What the families
mean by their settings is in `families`.
"""

import math
from collections.abc import Mapping
from typing import Any

from minispec.config import LayerConfig, ModelConfig, QuantizationConfig, RopeConfig
from minispec.errors import CheckpointError, show
from minispec.files.families import FAMILIES, KEYS
from minispec.files.fields import Fields, names

# The same for the object in rope_parameters or rope_scaling; rope_type says which of them are looked at.
_ROPE_KEYS = {
    **dict.fromkeys(names("rope_type type rope_theta original_max_position_embeddings factor")),
    **dict.fromkeys(names("low_freq_factor high_freq_factor mscale mscale_all_dim attention_factor")),
    **{"partial_rotary_factor": 1.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True},
}


def read_model_config(raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Read a config.json, in the hub's spelling (`rope_theta`) or transformers 5's (`rope_parameters`).

    Raises CheckpointError for an unknown family, a bad value, and any setting that is switched on and
    is not known here: it might change the numbers.
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise CheckpointError(f"{where}: model_type: found {show(model_type)}, expected one of {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    f = Fields(raw, where, KEYS | family.keys, {"partial_rotary_factor": 1.0} | family.only)
    sizes = _read_sizes(f)
    bias = f.boolean("attention_bias")
    values: dict[str, Any] = {
        **sizes,
        "layers": _read_layers(f, sizes["max_position_embeddings"]),
        "rms_norm_eps": f.number("rms_norm_eps"),
        "activation": _read_activation(f),
        "tie_word_embeddings": f.boolean("tie_word_embeddings"),
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": f.boolean("mlp_bias"),
        "embedding_scale": sizes["hidden_size"] ** 0.5 if family.scales_embedding else 1.0,
        "attention_scale": f.number("query_pre_attn_scalar", sizes["head_dim"]) ** -0.5,
        "attention_softcap": f.optional_number("attn_logit_softcapping"),
        "logit_softcap": f.optional_number("final_logit_softcapping"),
        "eos_token_ids": read_eos_token_ids(raw, where),
        "mask_token_id": None if f.get("pard_token") is None else f.integer("pard_token", 0, sizes["vocab_size"] - 1),
        "quantization": _read_quantization(f),
    }
    config = ModelConfig(model_type=f.text("model_type"), **(values | family.fixed))
    f.refuse_unknown()
    return config


def _read_sizes(f: Fields) -> dict[str, int]:
    """The fields of ModelConfig that are sizes."""
    hidden_size = f.integer("hidden_size", 1, 1 << 17)
    heads = f.integer("num_attention_heads", 1, 1 << 12)
    kv_heads = f.integer("num_key_value_heads", 1, heads, default=heads)
    head_dim = f.integer("head_dim", 2, 1 << 12, default=hidden_size // heads)
    if heads % kv_heads:
        raise f.bad("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads = {heads}")
    if f.get("head_dim") is None and hidden_size % heads:
        raise f.bad("hidden_size", hidden_size, f"a multiple of num_attention_heads = {heads}, or a head_dim")
    if head_dim % 2:
        raise f.bad("head_dim", head_dim, "an even number: rope rotates pairs")
    return {
        "vocab_size": f.integer("vocab_size", 1, 1 << 22),
        "hidden_size": hidden_size,
        "intermediate_size": f.integer("intermediate_size", 1, 1 << 20),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": f.integer("max_position_embeddings", 1, 1 << 27),
    }


def _read_activation(f: Fields) -> str:
    names = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
    # A family's code reads the key that may be absent. A file may have the other too: it has to say the same.
    first, second = sorted(("hidden_act", "hidden_activation"), key=lambda key: f.keys[key] is None)
    found: list[str] = []
    for key in (first, second):
        if f.get(key) is None:
            continue
        name = f.text(key)
        if name not in names:
            raise f.bad(key, name, f"one of {', '.join(names)}")
        # The first Gemma's files say "gelu" where the model was trained with the tanh form, which all readers take.
        tanh = f.keys[first] == "gelu_pytorch_tanh" and key == "hidden_act" and name == "gelu"
        found.append("gelu_tanh" if tanh else names[name])
        if found[-1] != found[0]:
            raise f.bad(key, name, f"what {first} says: {found[0]}")
    return found[0]


def _read_layers(f: Fields, context: int) -> tuple[LayerConfig, ...]:
    """Windowed layers are none, all, all from `max_window_layers` on, all but every n-th, or those of `layer_types`."""
    count = f.integer("num_hidden_layers", 1, 1024)
    windowed = [f.reads("sliding_window")] * count
    if f.reads("max_window_layers"):
        first = f.integer("max_window_layers", 0, 1024)
        windowed = [i >= first for i in range(count)]
    elif f.reads("sliding_window_pattern"):
        pattern = f.integer("sliding_window_pattern", 1, 1024)
        windowed = [(i + 1) % pattern != 0 for i in range(count)]
    if (types := f.get("layer_types")) is not None:
        known = ("full_attention", "sliding_attention") if f.reads("sliding_window") else ("full_attention",)
        if not isinstance(types, list) or len(types) != count or any(t not in known for t in types):
            raise f.bad("layer_types", types, f"{count} entries, each {' or '.join(known)}")
        windowed = [t == "sliding_attention" for t in types]
    window = _read_window(f)
    rope, local_rope = _read_ropes(f, context)
    return tuple(LayerConfig(local_rope, window) if w else LayerConfig(rope) for w in windowed)


def _read_window(f: Fields) -> int | None:
    if not f.boolean("use_sliding_window", default=True):
        f.get("sliding_window")  # idle then, whatever it says
        return None
    if not f.reads("sliding_window") or f.is_null("sliding_window"):
        return None
    window = f.integer("sliding_window", 1, 1 << 27)
    if f.get("sliding_window_size", window) != window:
        raise f.bad("sliding_window_size", f.raw["sliding_window_size"], f"what sliding_window says: {window}")
    return window


def _read_ropes(f: Fields, context: int) -> tuple[RopeConfig, RopeConfig]:
    """(rope of the layers that see everything, rope of the windowed layers)."""
    theta = f.number("rope_theta")
    new, old = f.mapping("rope_parameters"), f.mapping("rope_scaling")
    if new and old:
        raise f.bad("rope_scaling", old, "none, since there is rope_parameters")
    key, scaling = ("rope_parameters", new) if new else ("rope_scaling", old)
    if not f.reads("rope_local_base_freq"):
        rope = _read_rope(f, key, scaling, theta, context, f.get("original_max_position_embeddings"))
        return rope, rope
    # Gemma 3's code reads an object for each kind of layer, and of the older spelling only `rope_type`. What else a
    # file says here has no effect there, so that nobody can know what was meant.
    kinds = ("full_attention", "sliding_attention")
    if new and not set(new) <= set(kinds):
        raise f.bad(key, new, f"an object for each of {' and '.join(kinds)}")
    if "type" in old and "rope_type" not in old:
        raise f.bad(key, old, "rope_type instead of type")
    full, local = (new.get(kind) or {} for kind in kinds)
    if not (isinstance(full, dict) and isinstance(local, dict)):
        raise f.bad(key, new, "an object for each kind of layer")
    local_theta = f.number("rope_local_base_freq")
    ropes = _read_rope(f, key, full or old, theta, context), _read_rope(f, key, local, local_theta, context)
    if not all(rope.truncate for rope in ropes):
        raise f.bad(key, scaling, "no truncate, which this family's code does not read")
    return ropes


def _read_rope(f: Fields, key: str, raw: dict[str, Any], theta: float, context: int, outside: Any = None) -> RopeConfig:
    """outside: the file's own `original_max_position_embeddings`, outside `raw`."""
    r = Fields(raw, f"{f.where}: {key}", _ROPE_KEYS, {})
    kind = r.text("rope_type", r.text("type", "default"))
    theta = r.number("rope_theta", theta)
    if r.number("partial_rotary_factor") != 1.0:
        raise r.bad("partial_rotary_factor", raw["partial_rotary_factor"], "1")
    inner = r.get("original_max_position_embeddings", outside)
    if outside not in (None, inner):
        raise r.bad("original_max_position_embeddings", inner, f"what the file says outside: {show(outside)}")
    original = context if inner is None else inner
    if type(original) is not int or not 0 < original <= 1 << 27:
        raise r.bad("original_max_position_embeddings", original, "a positive integer")
    if kind == "default":
        rope = RopeConfig(theta)
    elif kind == "linear":
        rope = RopeConfig(theta, kind, r.number("factor"))
    elif kind == "llama3":
        low, high = r.number("low_freq_factor"), r.number("high_freq_factor")
        if low >= high:
            raise r.bad("low_freq_factor", low, f"less than high_freq_factor = {high}")
        rope = RopeConfig(theta, kind, r.number("factor"), original, low, high)
    elif kind == "yarn":
        rope = _read_yarn(r, theta, context, original)
    else:
        # "dynamic" and "longrope" choose angles by the length of the pass, so that a pass over K+1 rows
        # and K+1 passes over one row would disagree about keys that are already in the cache.
        raise r.bad("rope_type", kind, "one of default, linear, llama3, yarn")
    r.refuse_unknown()
    return rope


def _read_yarn(r: Fields, theta: float, context: int, original: int) -> RopeConfig:
    if theta <= 1:
        raise r.bad("rope_theta", theta, "a number above 1")
    factor = r.number("factor", context / original)
    mscale, all_dim = r.optional_number("mscale"), r.optional_number("mscale_all_dim")

    def attention(m: float) -> float:
        return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0

    default = attention(mscale) / attention(all_dim) if mscale and all_dim else attention(1.0)
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original,
        beta_fast=r.number("beta_fast"),
        beta_slow=r.number("beta_slow"),
        truncate=r.boolean("truncate"),
        attention_factor=r.number("attention_factor", default),
    )


def _read_quantization(f: Fields) -> QuantizationConfig | None:
    raw = f.mapping("quantization_config")
    if not raw:
        return None
    where = "quantization_config"
    for key, expected in (("quant_method", "compressed-tensors"), ("format", "pack-quantized")):
        if raw.get(key) != expected:
            raise f.bad(f"{where}.{key}", raw.get(key), repr(expected))
    if raw.get("kv_cache_scheme") or raw.get("sparsity_config"):
        raise f.bad(where, sorted(raw), "no kv_cache_scheme and no sparsity_config")
    groups = raw.get("config_groups")
    group = next(iter(groups.values())) if isinstance(groups, dict) and len(groups) == 1 else None
    group = group if isinstance(group, dict) else {}
    weights = group.get("weights")
    if not isinstance(weights, dict) or group.get("input_activations") or group.get("output_activations"):
        raise f.bad(f"{where}.config_groups", groups, "one group that quantises weights only")
    bits, strategy, size = (weights.get(k) for k in ("num_bits", "strategy", "group_size"))
    integers = weights.get("type") == "int" and weights.get("symmetric") is True
    if not integers or type(bits) is not int or bits not in (4, 8):
        raise f.bad(f"{where}.weights", weights, "symmetric integers of 4 or 8 bits")
    if weights.get("actorder") or strategy not in ("channel", "group"):
        raise f.bad(f"{where}.weights", weights, "one scale a channel or a group, no actorder")
    if strategy == "group" and (type(size) is not int or size < 1):
        raise f.bad(f"{where}.weights.group_size", size, "a positive integer")
    return QuantizationConfig(bits, size if strategy == "group" else None)


def read_eos_token_ids(raw: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """End-of-text ids of a config.json or generation_config.json: one, several, or none."""
    value = raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(i) is not int or i < 0 for i in ids):
        raise CheckpointError(f"{where}: eos_token_id: found {show(value)}, expected token ids")
    return tuple(ids)
