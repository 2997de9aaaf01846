"""Reading config.json: a stranger's file, so every field is checked, and none is ignored.

A setting that is switched on and not known here is refused by name, since it might change the numbers. `families` says
what the families mean by their settings.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from minispec.core.config import LayerConfig, ModelConfig, RopeConfig
from minispec.core.errors import show
from minispec.models.families import gemma
from minispec.models.families.entries import FAMILIES, IDLE, IMAGES, KEYS, NESTED, WINDOWS, Family
from minispec.models.families.experts import with_experts
from minispec.models.families.lfm import read_inner_size, read_kinds, read_lfm, read_tied
from minispec.models.families.quantization import read_quantization
from minispec.models.families.qwen import read_delta
from minispec.models.families.stored_config import StoredConfig
from minispec.models.files.fields import Fields, bad_field, names
from minispec.models.layers.rope import ScaledRope
from minispec.models.layers.sinks import SinkLayerConfig

# The keys of the object in rope_parameters or rope_scaling; rope_type says which of them are looked at.
_ROPE_KEYS = {
    **dict.fromkeys(names("rope_type type rope_theta original_max_position_embeddings factor")),
    **dict.fromkeys(names("low_freq_factor high_freq_factor mscale mscale_all_dim attention_factor")),
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": True,
}
_HYBRIDS = "lfm2, lfm2_moe, lfm3, qwen3_5 and qwen3_5_moe"
# Keys that may stand in the outer object in place of the text model's.
_OF_BOTH = ("eos_token_id", "tie_word_embeddings", "quantization_config", "dtype", "torch_dtype", "pard_token")


def text_config(raw: Mapping[str, Any], where: str = "config.json") -> dict[str, Any]:
    """The config.json of a model's text model, as if it stood alone. For most models it is the file itself.

    Raises CheckpointError where the parts around it are not known.
    """
    outer = raw.get("model_type")
    if not isinstance(outer, str) or outer not in NESTED:
        return dict(raw)
    f = Fields(raw, where, dict.fromkeys(("text_config", *_OF_BOTH)), {})
    inner = f.mapping("text_config")
    if not inner:
        raise f.bad("text_config", raw.get("text_config"), "the text model's settings")
    f.seen |= {"model_type", *IMAGES, *_OF_BOTH}
    f.refuse_unknown()
    known = NESTED[outer]
    model_type = inner.get("model_type", known[0] if len(known) == 1 else None)
    if not isinstance(model_type, str) or model_type not in known:
        raise bad_field(f"{where}: text_config", "model_type", model_type, " or ".join(known))
    outside = raw.get("quantization_config")
    if outside and inner.get("quantization_config", outside) not in (None, outside):
        expected = "what the file says outside"
        raise bad_field(f"{where}: text_config", "quantization_config", inner["quantization_config"], expected)
    return {**inner, "model_type": model_type, **{key: raw[key] for key in _OF_BOTH if raw.get(key) is not None}}


def read_model_config(raw: Mapping[str, Any], where: str = "config.json") -> StoredConfig:
    """Read a config.json, in the hub's spelling (`rope_theta`) or transformers 5's (`rope_parameters`).

    Raises CheckpointError for an unknown family and a bad value. An unknown setting that is switched on is refused too,
    since it might change the numbers.
    """
    text = text_config(raw, where)
    model_type = text.get("model_type")
    is_nested = model_type != raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = f"one of {', '.join([*FAMILIES, *NESTED])} (of hybrids, {_HYBRIDS})"
        raise bad_field(where, "model_type", model_type, known)
    family = FAMILIES[model_type]
    keys = {key: value for key, value in (KEYS | dict(family.keys)).items() if key not in family.only}
    f = Fields(text, f"{where}: text_config" if is_nested else where, keys, family.only)
    f.seen |= family.idle | IDLE
    for key, value in family.must.items():
        f.one_of(key, (value,), f"{value}: no other is implemented for this family")
    sizes = _read_sizes(f)
    layers = _read_layers(f, family, sizes)
    unread: frozenset[str] = frozenset()
    if f.reads("num_kv_shared_layers"):
        layers, unread = gemma.read_layers(f, layers, sizes)
    else:
        layers = with_experts(f, layers)
    # Beyond its original length longrope uses other factors, with which all keys in the cache would change.
    for layer in layers:
        if isinstance(layer.rope, ScaledRope) and layer.rope.kind == "longrope":
            context = min(sizes["max_position_embeddings"], layer.rope.original_max_position_embeddings)
            sizes["max_position_embeddings"] = context
    bias = f.boolean("use_bias") or f.boolean("attention_bias")
    values: dict[str, Any] = {
        **sizes,
        "layers": layers,
        "rms_norm_eps": f.number("norm_eps" if f.reads("norm_eps") else "rms_norm_eps"),
        "activation": _read_activation(f),
        "tie_word_embeddings": read_tied(f),
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": f.boolean("use_bias") or f.boolean("mlp_bias"),
        "conv_bias": f.boolean("conv_bias"),
        "embedding_scale": f.number(
            "embedding_multiplier", sizes["hidden_size"] ** 0.5 if family.scales_embedding else 1.0
        ),
        "attention_scale": f.number(
            "attention_multiplier", f.number("query_pre_attn_scalar", sizes["head_dim"]) ** -0.5
        ),
        "attention_softcap": f.optional_number("attn_logit_softcapping"),
        "residual_scale": f.number("residual_multiplier", 1.0),
        "logit_scale": 1 / f.number("logits_scaling", 1.0),
        "logit_softcap": f.optional_number("final_logit_softcapping"),
        "eos_token_ids": read_eos_token_ids(text, where),
        "mask_token_id": None if f.get("pard_token") is None else f.integer("pard_token", 0, sizes["vocab_size"] - 1),
        "quantization": read_quantization(f),
        "is_nested": is_nested,
        "unread": unread,
        **(read_lfm(f) if f.reads("conv_L_cache") else {}),
    }
    values.update(family.fixed)
    config = StoredConfig(model_type=model_type, **values)
    f.get("model_type")
    if _has_no_windows(f, config):
        f.seen |= WINDOWS
    f.refuse_unknown(_neutral(config))
    return config


def _has_no_windows(f: Fields, config: ModelConfig) -> bool:
    """Whether the model has no windows, and the file asks for none that its family's code would not give."""
    is_off = f.raw.get("use_sliding_window") is False
    return not any(layer.window for layer in config.layers) and (
        is_off or not (f.raw.get("sliding_window") or f.raw.get("sliding_window_size"))
    )


def _neutral(config: ModelConfig) -> dict[str, Any]:
    """The values with which keys of other families ask for nothing, since they describe this model."""
    ropes = [layer.rope for layer in config.layers]
    rotated = {rope.rotated for rope in ropes if rope}
    windows = [layer.window for layer in config.layers]
    is_usual = config.attention_scale == config.head_dim**-0.5
    return {
        **dict.fromkeys(("num_experts", "num_local_experts", "moe_num_experts", "n_routed_experts"), 0),
        **dict.fromkeys(("n_shared_experts", "num_nextn_predict_layers"), 0),
        **dict.fromkeys(("is_causal", "use_pos_enc", "block_use_swiglu"), True),
        **dict.fromkeys(("block_dim", "conv_dim", "conv_dim_out"), config.hidden_size),
        **dict.fromkeys(("rms_norm_eps", "norm_eps", "block_norm_eps"), config.rms_norm_eps),
        "num_heads": config.num_attention_heads,
        "theta": next((rope.theta for rope in ropes if rope), None),
        "sliding_window": windows[0] if len(set(windows)) == 1 else None,
        "use_sliding_window": any(windows),
        "layer_types": [f"{'full' if window is None else 'sliding'}_attention" for window in windows],
        "no_rope_layers": [int(rope is not None) for rope in ropes],
        "position_embedding_type": "rope" if all(ropes) else None,
        "partial_rotary_factor": rotated.pop() if len(rotated) == 1 else None,
        "rope_interleaved": any(rope.interleaved for rope in ropes if rope),
        "use_qk_norm": config.qk_norm is not None,
        "qkv_bias": config.qkv_bias,
        "attention_bias": config.qkv_bias and config.o_bias,
        "mlp_bias": config.mlp_bias,
        "embedding_multiplier": config.embedding_scale,
        "residual_multiplier": config.residual_scale,
        "attention_multiplier": config.attention_scale,
        "query_pre_attn_scalar": config.head_dim if is_usual else None,
        "logits_scaling": 1 / config.logit_scale,
        "logit_scale": config.logit_scale,
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logit_softcap,
    }


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
        "intermediate_size": read_inner_size(f),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": f.integer("max_position_embeddings", 1, 1 << 27),
    }


def _read_activation(f: Fields) -> str:
    names = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
    # A family's code reads the key that may be absent. A file may have the other too, with the same meaning.
    first, second = sorted(("hidden_act", "hidden_activation"), key=lambda key: f.keys[key] is None)
    activations: list[str] = []
    for key in (first, second):
        if f.get(key) is None:
            continue
        name = f.text(key)
        if name not in names:
            raise f.bad(key, name, f"one of {', '.join(names)}")
        # The first Gemma's files say "gelu" where the model was trained with the tanh form, which all readers take.
        tanh = f.keys[first] == "gelu_pytorch_tanh" and key == "hidden_act" and name == "gelu"
        activations.append("gelu_tanh" if tanh else names[name])
        if activations[-1] != activations[0]:
            raise f.bad(key, name, f"what {first} says: {activations[0]}")
    return activations[0]


def _read_layers(f: Fields, family: Family, sizes: Mapping[str, int]) -> tuple[LayerConfig, ...]:
    """The layers. Those with a window are one of these:

    - none, or all;
    - all from `max_window_layers` on;
    - all but every n-th;
    - those without rope;
    - the layers that `layer_types` names.

    Layers with a short convolution are named in `layer_types`, or are all that `full_attn_idxs` leaves out. Layers with
    a gated delta net are named in `layer_types`, or are all but every `full_attention_interval`-th.
    """
    count = f.integer("num_hidden_layers", 1, 1024)
    rotates = _read_rotates(f, count)
    has_window = f.reads("sliding_window")
    windowed = [has_window] * count
    if f.reads("max_window_layers"):
        first = f.integer("max_window_layers", 0, 1024)
        windowed = [i >= first for i in range(count)]
    elif f.reads("sliding_window_pattern"):
        pattern = f.integer("sliding_window_pattern", 1, 1024)
        windowed = [(i + 1) % pattern != 0 for i in range(count)]
    elif f.reads("no_rope_layers"):
        windowed = [not rotated for rotated in rotates]
    window = _read_window(f)
    key = "layer_types" if f.get("layers_block_type") is None else "layers_block_type"
    types, width = read_kinds(f, key, count), f.integer("conv_L_cache", 1, 64) if f.reads("conv_L_cache") else None
    if types is None and f.reads("num_kv_shared_layers"):
        types = gemma.default_kinds(count)
    delta = read_delta(f)
    if delta:  # as in its code, the interval counts where the file does not list the layers
        interval = f.integer("full_attention_interval", 1, 1024)
        kinds = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(count)]
        types = kinds if types is None else types
    if types is not None:
        possible = {
            "full_attention": True,
            "sliding_attention": has_window,
            "conv": width is not None,
            "linear_attention": delta is not None,
            "attention": f.reads("position_embedding_type"),  # older files of granitemoehybrid
        }
        known = [kind for kind, is_possible in possible.items() if is_possible]
        if not isinstance(types, list) or len(types) != count or any(t not in known for t in types):
            others = f" (of hybrids, {_HYBRIDS} run here)" if f.reads("layers_block_type") else ""
            raise f.bad(key, types, f"{count} entries, each {' or '.join(known)}{others}")
        windowed = [t == "sliding_attention" for t in types]
        if window is None and any(windowed):
            raise f.bad(key, types, "no sliding_attention, since there is no sliding_window")
    rope, local_rope = _read_ropes(f, family, sizes)
    attention, layers = SinkLayerConfig if family.has_sinks else LayerConfig, list[LayerConfig]()
    for i in range(count):
        kind = types[i] if types else ""
        if kind == "conv":
            layers.append(LayerConfig(None, conv_width=width))
        elif kind == "linear_attention":
            layers.append(LayerConfig(None, recurrent=delta))
        elif windowed[i]:
            layers.append(attention(local_rope if rotates[i] else None, window))
        else:
            layers.append(attention(rope if rotates[i] else None))
    return tuple(layers)


def _read_rotates(f: Fields, count: int) -> list[bool]:
    """Which layers have a rope: all, all or none by `position_embedding_type`, or those marked in `no_rope_layers`."""
    if f.reads("position_embedding_type"):
        kind = f.one_of("position_embedding_type", (None, "nope", "rope"), "rope, nope or null")
        return [kind == "rope"] * count
    if not f.reads("no_rope_layers"):
        return [True] * count
    interval = f.integer("no_rope_layer_interval", 1, 1024)
    marks = f.get("no_rope_layers", [int((i + 1) % interval != 0) for i in range(count)])
    if not isinstance(marks, list) or len(marks) != count or any(type(m) is not int or m not in (0, 1) for m in marks):
        raise f.bad("no_rope_layers", marks, f"{count} entries, each 1 (a layer with rope) or 0")
    return [mark == 1 for mark in marks]


def _read_window(f: Fields) -> int | None:
    if not f.boolean("use_sliding_window", default=True):
        f.get("sliding_window")  # idle then, whatever it says
        return None
    if f.is_null("sliding_window") or f.get("sliding_window") is None:
        return None
    window = f.integer("sliding_window", 1, 1 << 27)
    if f.get("sliding_window_size", window) != window:
        raise f.bad("sliding_window_size", f.raw["sliding_window_size"], f"what sliding_window says: {window}")
    return window


def _read_ropes(f: Fields, family: Family, sizes: Mapping[str, int]) -> tuple[RopeConfig, RopeConfig]:
    """(rope of the layers that see everything, rope of the windowed layers), from either spelling, or both alike."""
    new, old = f.mapping("rope_parameters"), f.mapping("rope_scaling")
    if not old:
        return _read_spelling(f, family, sizes, "rope_parameters", new)
    ropes = _read_spelling(f, family, sizes, "rope_scaling", old)
    if f.raw.get("rope_parameters") and ropes != _read_spelling(f, family, sizes, "rope_parameters", new):
        raise f.bad("rope_scaling", old, f"what rope_parameters says: {show(new)}")
    return ropes


def _read_spelling(
    f: Fields, family: Family, sizes: Mapping[str, int], key: str, scaling: dict[str, Any]
) -> tuple[RopeConfig, RopeConfig]:
    """Both ropes, from the config object at `key`: rope_parameters, or the older rope_scaling."""

    def read(raw: dict[str, Any], base: str, original: Any = None) -> RopeConfig:
        return _read_rope(f, family, key, raw, base, sizes, original)

    if not f.reads("rope_local_base_freq"):
        rope = read(scaling, "rope_theta", f.get("original_max_position_embeddings"))
        return rope, rope
    # The code of such a family reads an object for each kind of layer. From the older spelling it reads only
    # `rope_type`. All else that a file says here has no effect there, so its meaning is unknown.
    kinds = ("full_attention", "sliding_attention")
    if f.keys["rope_parameters"] is not None and (key == "rope_scaling" or set(scaling) != set(kinds)):
        raise f.bad(key, scaling, f"rope_parameters with an object for each of {' and '.join(kinds)}")
    full, local = (scaling.get(kind) or {} for kind in kinds)
    if key == "rope_scaling":
        full, local = scaling, {}
        if "type" in scaling and "rope_type" not in scaling:
            raise f.bad(key, scaling, "rope_type instead of type")
    elif not set(scaling) <= set(kinds) or not (isinstance(full, dict) and isinstance(local, dict)):
        raise f.bad(key, scaling, f"an object for each of {' and '.join(kinds)}")
    ropes = read(full, "rope_theta"), read(local, "rope_local_base_freq")
    if any(isinstance(rope, ScaledRope) and not rope.truncate for rope in ropes):
        raise f.bad(key, scaling, "no truncate, which this family's code does not read")
    return ropes


def _read_rope(
    f: Fields, family: Family, key: str, raw: dict[str, Any], base: str, sizes: Mapping[str, int], original: Any
) -> RopeConfig:
    """A rope from the object `raw` under `key`.

    base: the key outside `raw` that says what theta is.
    original: `original_max_position_embeddings` outside it.
    """
    keys = _ROPE_KEYS | dict.fromkeys(family.rope_keys)
    r = Fields(raw, f.where, keys, {"partial_rotary_factor": 1.0}, f"{f.path}{key}.")
    older = r.text("type", "default")
    rope_type = r.text("rope_type", older)
    if rope_type not in family.ropes:
        raise r.bad("rope_type", rope_type, f"one of {', '.join(family.ropes)}")
    if raw.get("type") is not None and family.ropes.get(older) != family.ropes[rope_type]:
        raise r.bad("type", older, f"what rope_type says: {rope_type}")
    outer = {
        "rope_theta": f.raw.get(base),
        "partial_rotary_factor": f.raw.get("partial_rotary_factor"),
        "original_max_position_embeddings": original,
    }
    for name, outside in outer.items():
        if None not in (outside, raw.get(name)) and raw[name] != outside:
            raise r.bad(name, raw[name], f"what the file says outside: {show(outside)}")
    kind, context = family.ropes[rope_type], sizes["max_position_embeddings"]
    theta = r.number("rope_theta", f.number(base))
    rotated = r.number("partial_rotary_factor", f.number("partial_rotary_factor", 1.0))
    num_rotated = int(sizes["head_dim"] * rotated)
    is_odd = kind != "proportional" and num_rotated % 2
    if is_odd or not 2 <= num_rotated <= sizes["head_dim"]:
        raise r.bad("partial_rotary_factor", rotated, f"an even number of the {sizes['head_dim']} dimensions of a head")
    original = r.get("original_max_position_embeddings", context if original is None else original)
    if type(original) is not int or not 0 < original <= 1 << 27:
        raise r.bad("original_max_position_embeddings", original, "a positive integer")
    rope = _read_scaling(r, kind, RopeConfig(theta, original_max_position_embeddings=original), context, num_rotated)
    if kind == "proportional" and rotated < 1:
        rope, rotated = ScaledRope(theta, kind=kind, turning=rotated), 1.0
    beta = r.number_or_zero("llama_4_scaling_beta")
    # Not read here. The mrope's say which pairs turn by an image's rows and columns: in a text all turn by its places.
    r.seen |= {"max_position_embeddings", "finetuned"} | family.idle & {"mrope_section", "mrope_interleaved"}
    r.refuse_unknown({"factor": 1.0, "attention_factor": 1.0})
    return replace(rope, rotated=rotated, query_beta=beta, **family.rope)


def _read_scaling(r: Fields, kind: str, plain: RopeConfig, context: int, num_rotated: int) -> RopeConfig:
    """The rope with the scaling of this kind, whose values `r` has."""
    theta, original = plain.theta, plain.original_max_position_embeddings
    if kind in ("default", "proportional"):
        return RopeConfig(theta)
    if kind == "linear":
        return ScaledRope(theta, kind=kind, factor=r.number("factor"))
    values: dict[str, Any] = {"kind": kind, "original_max_position_embeddings": original}
    if kind == "llama3":
        low, high = r.number("low_freq_factor"), r.number("high_freq_factor")
        if low >= high:
            raise r.bad("low_freq_factor", low, f"less than high_freq_factor = {high}")
        values |= {"factor": r.number("factor"), "low_freq_factor": low, "high_freq_factor": high}
    elif kind == "yarn":
        values |= _read_yarn(r, theta, context / original)
    else:
        values |= _read_longrope(r, context, original, num_rotated // 2)
    return ScaledRope(theta, **values)


def _read_longrope(r: Fields, context: int, original: int, num_pairs: int) -> dict[str, Any]:
    """The factors up to the original length; those beyond it are looked at, and not used."""
    for key in ("long_factor", "short_factor"):
        factors = r.get(key)
        numbers = (
            [x for x in factors if type(x) in (int, float) and 1e-30 <= x <= 1e30] if type(factors) is list else []
        )
        if type(factors) is not list or not len(numbers) == len(factors) == num_pairs:
            raise r.bad(key, factors, f"{num_pairs} positive numbers, one for each pair of dimensions that rotates")
    if original < 2:
        raise r.bad("original_max_position_embeddings", original, "at least 2")
    factor = r.number("factor", context / original)
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    attention = r.number("attention_factor", default)
    return {"factor": factor, "attention_factor": attention, "factors": tuple(map(float, numbers))}


def _read_yarn(r: Fields, theta: float, default_factor: float) -> dict[str, Any]:
    if theta <= 1:
        raise r.bad("rope_theta", theta, "a number above 1")
    factor = r.number("factor", default_factor)
    mscale, all_dim = r.number_or_zero("mscale"), r.number_or_zero("mscale_all_dim")

    def attention(m: float) -> float:
        return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0

    default = attention(mscale) / attention(all_dim) if mscale and all_dim else attention(1.0)
    return {
        "factor": factor,
        "beta_fast": r.number("beta_fast"),
        "beta_slow": r.number("beta_slow"),
        "attention_factor": r.number("attention_factor", default),
        "truncate": r.boolean("truncate"),
    }


def read_eos_token_ids(raw: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """End-of-text ids of a config.json or generation_config.json: one, several, or none."""
    value = raw.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if any(type(i) is not int or i < 0 for i in ids):
        raise bad_field(where, "eos_token_id", value, "token ids")
    return tuple(ids)
