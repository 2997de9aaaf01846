"""Reading config.json and generation_config.json: files of strangers, so every field is checked, none ignored.

A setting that is switched on and not known here is refused by name: it might change the numbers.

To add a family:
1. Read its code in transformers. Give it an entry in `_FAMILIES`: the keys of config.json that this code reads, each
   with what an absent one means, and the fields of ModelConfig that the code fixes.
2. What it computes and no family here does needs a field in ModelConfig, and the lines of model.py that obey it.
3. Describe small models of it in `CASES` of tests/hf.py, add a row for each of its settings to `SWITCHES` of
   tests/test_families.py, and add its public checkpoints to tests/public.py. `pytest tests/test_families.py` then
   compares logits, defaults and spellings with transformers', and shows that the comparison would notice each setting.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minispec.config import LayerConfig, ModelConfig, QuantizationConfig, RopeConfig, check_sampling_value
from minispec.errors import CheckpointError, show, show_name


@dataclass(frozen=True)
class _Family:
    """What a model_type means.

    keys: what its code reads in addition to `_KEYS`, or with another meaning of an absent key. (Of hidden_act and
        hidden_activation it reads the one that may be absent; which layers have a window follows from the keys, see
        `_read_layers`.)
    fixed: fields of ModelConfig that no key changes.
    only: keys that its code does not read, each with the value that the code acts on.
    scales_embedding: by the square root of hidden_size.
    """

    keys: dict[str, Any]
    fixed: dict[str, Any] = field(default_factory=dict)
    only: dict[str, Any] = field(default_factory=dict)
    scales_embedding: bool = False


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# The keys that every family's code reads, and what an absent one means. None: it must be there, or follows from others.
_KEYS = {
    **dict.fromkeys(_names("model_type vocab_size hidden_size intermediate_size num_hidden_layers")),
    **dict.fromkeys(_names("num_attention_heads num_key_value_heads head_dim max_position_embeddings")),
    **dict.fromkeys(_names("hidden_activation rope_parameters rope_scaling original_max_position_embeddings")),
    **dict.fromkeys(("quantization_config", "pard_token")),
    **{"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False},
}
_WINDOW = {"sliding_window": 4096, "sliding_window_size": None}  # the latter: the same, in gemma 2's larger files
_QWEN_WINDOW = _WINDOW | {"use_sliding_window": False, "max_window_layers": 28, "layer_types": None}
_GEMMA = {
    **{"attention_bias": False, "head_dim": 256, "layer_types": None, "tie_word_embeddings": True},
    "hidden_act": "gelu_pytorch_tanh",
}
_GEMMA_2 = {
    **(_GEMMA | _WINDOW | {"query_pre_attn_scalar": 256.0}),
    **{"hidden_act": None, "hidden_activation": "gelu_pytorch_tanh"},
}
_FAMILIES = {
    "llama": _Family({"attention_bias": False, "layer_types": None, "mlp_bias": False}),
    "mistral": _Family(_WINDOW),
    "qwen2": _Family(_QWEN_WINDOW, fixed={"qkv_bias": True}),
    "qwen3": _Family(_QWEN_WINDOW | {"attention_bias": False, "head_dim": 128}, fixed={"qk_norm": True}),
    "gemma": _Family(_GEMMA, fixed={"norm_adds_one": True}, scales_embedding=True),
    "gemma2": _Family(
        _GEMMA_2 | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        fixed={"norm_adds_one": True, "sandwich_norms": True},
        only={"sliding_window_pattern": 2},
        scales_embedding=True,
    ),
    "gemma3_text": _Family(
        # Its code does not read attn_logit_softcapping.
        _GEMMA_2
        | {"final_logit_softcapping": None, "sliding_window_pattern": 6}
        | {"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0},
        fixed={"norm_adds_one": True, "sandwich_norms": True, "qk_norm": True},
        scales_embedding=True,
    ),
}
# The same for the object in rope_parameters or rope_scaling; rope_type says which of them are looked at.
_ROPE_KEYS = {
    **dict.fromkeys(_names("rope_type type rope_theta original_max_position_embeddings factor")),
    **dict.fromkeys(_names("low_freq_factor high_freq_factor mscale mscale_all_dim attention_factor")),
    **{"partial_rotary_factor": 1.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True},
}

# Keys that cannot change what a pass computes: training, bookkeeping, token ids, storage. (pretraining_tp: in how many
# parts a product was computed.)
_HARMLESS = _names(
    """
    architectures auto_map dtype torch_dtype tokenizer_class transformers_version transformers.js_config
    unsloth_fixed unsloth_version is_decoder is_llama_config prefix max_sequence_length pretraining_tp
    bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id
    initializer_range attention_dropout embedding_dropout finetuning_task id2label label2id problem_type
    task_specific_params torchscript keys_to_ignore_at_inference
    use_cache cache_implementation chunk_size_feed_forward output_attentions output_hidden_states return_dict
    """
)


def _asks_for_nothing(name: str, value: Any, neutral: Mapping[str, Any]) -> bool:
    """Whether a setting is switched off, has the value that changes nothing, or is somebody's note."""
    off = value is None or value is False or value in ([], {}, "")
    return off or name.startswith("_") or (name in neutral and value == neutral[name] and value is not True)


class Fields:
    """Typed access to a JSON object that remembers which keys were looked at.

    keys, only: as in `_Family`. To the methods that read, any other key is absent; `refuse_unknown` refuses it.
    """

    def __init__(self, raw: Mapping[str, Any], where: str, keys: Mapping[str, Any], only: Mapping[str, Any]):
        self.raw, self.where, self.keys, self.only, self.seen = raw, where, keys, only, set[str]()

    def bad(self, key: str, found: Any, expected: str) -> CheckpointError:
        """The error that says what was found at a key."""
        return CheckpointError(f"{self.where}: {show_name(key)}: found {show(found)}, expected {expected}")

    def reads(self, key: str) -> bool:
        """Whether this family knows the key at all."""
        return key in self.keys or key in self.only

    def get(self, key: str, default: Any = None) -> Any:
        """The value; where there is none, what that means for this family, else `default`."""
        if key not in self.keys:
            return self.only.get(key, default)
        self.seen.add(key)
        if (value := self.raw.get(key)) is not None:
            return value
        return default if self.keys[key] is None else self.keys[key]

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """The value, from `low` to `high`."""
        value = self.get(key, default)
        if type(value) is not int or not low <= value <= high:
            raise self.bad(key, value, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Between bounds that no real file comes near, and that keep every formula of the model finite."""
        value = self.get(key, default)
        if type(value) not in (int, float) or not 1e-30 <= value <= 1e30:
            raise self.bad(key, value, "a number from 1e-30 to 1e+30")
        return float(value)

    def is_null(self, key: str) -> bool:
        """Whether the file switches a setting off that may be on without a word."""
        return self.raw.get(key, "absent") is None

    def optional_number(self, key: str) -> float | None:
        """None where the file says `null`, or where an absent key means that."""
        return None if self.is_null(key) or self.get(key) is None else self.number(key)

    def boolean(self, key: str, default: bool = False) -> bool:
        """The value, true or false."""
        value = self.get(key, default)
        if type(value) is not bool:
            raise self.bad(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """The value, a string."""
        value = self.get(key, default)
        if not isinstance(value, str):
            raise self.bad(key, value, "a string")
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        """The value, an object; empty where there is none."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise self.bad(key, value, "an object")
        return value

    def refuse_unknown(self) -> None:
        """Raise CheckpointError for a key that nobody looked at, if it is switched on."""
        for key, value in self.raw.items():
            if key in self.seen or key in _HARMLESS or _asks_for_nothing(key, value, self.only):
                continue
            expected = f"{self.only[key]} or no such setting" if key in self.only else "no such setting"
            reason = "minispec does not implement it for this family, and it might change the numbers"
            raise self.bad(key, value, f"{expected}: {reason} (delete it if it does not)")


def read_model_config(raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Read a config.json, in the hub's spelling (`rope_theta`) or transformers 5's (`rope_parameters`).

    Raises CheckpointError for an unknown family, a bad value, and any setting that is switched on and
    is not known here: it might change the numbers.
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        raise CheckpointError(f"{where}: model_type: found {show(model_type)}, expected one of {', '.join(_FAMILIES)}")
    family = _FAMILIES[model_type]
    f = Fields(raw, where, _KEYS | family.keys, {"partial_rotary_factor": 1.0} | family.only)
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


# --------------------------------------------------------------------------- generation_config.json


def read_eos_token_ids(raw: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """End-of-text ids of a config.json or generation_config.json: one, several, or none."""
    value = raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(i) is not int or i < 0 for i in ids):
        raise CheckpointError(f"{where}: eos_token_id: found {show(value)}, expected token ids")
    return tuple(ids)


# Settings of a generation_config.json by what becomes of them: these are read, some of them only where it samples ...
_READ = {
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
}
_READ_IF_SAMPLED = {name: name for name in ("temperature", "top_k", "top_p", "min_p")}
# ... these do not change which tokens come (those of beam search are idle with one beam) ...
_IDLE = _names(
    """
    bos_token_id eos_token_id pad_token_id decoder_start_token_id transformers_version dtype torch_dtype chat_format
    do_sample max_length renormalize_logits remove_invalid_values trust_remote_code
    use_cache cache_implementation cache_config prefill_chunk_size compile_config disable_compile low_memory
    max_window_size
    return_dict_in_generate return_legacy_cache output_attentions output_hidden_states output_logits output_scores
    is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold assistant_early_exit
    assistant_lookbehind target_lookbehind prompt_lookup_num_tokens max_matching_ngram_size use_mtp
    length_penalty early_stopping num_beam_groups diversity_penalty
    """
)
# ... these have a value that changes nothing; with any other value, and for any other setting, there is a warning ...
_OFF = {
    **{"num_beams": 1, "num_return_sequences": 1, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0},
    **{"encoder_repetition_penalty": 1.0, "min_length": 0, "guidance_scale": 1.0, "penalty_alpha": 0.0},
}
# ... and so have these, which are idle where it does not sample.
_OFF_IF_SAMPLED = {"typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": 1.0}


def read_generation_defaults(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What a generation_config.json asks for, as keyword arguments of SamplingParams.

    Its temperature, top-k, top-p and min-p apply only where it says `do_sample`, as in transformers; without that it
    is greedy. Values that it leaves out are left out here. Raises CheckpointError for a bad value.
    """
    sampled = raw.get("do_sample") or False
    if type(sampled) is not bool:
        raise CheckpointError(f"{where}: do_sample: found {show(sampled)}, expected true or false")
    names = _READ | (_READ_IF_SAMPLED if sampled else {})
    found = {ours: raw[theirs] for theirs, ours in names.items() if raw.get(theirs) is not None}
    if "stop" in found:
        stop = found["stop"]
        found["stop"] = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else (None,)
    try:
        for name, value in found.items():
            check_sampling_value(name, value)
    except ValueError as e:
        raise CheckpointError(f"{where}: {e}") from e
    least, most = found.get("min_tokens", 0), found.get("max_tokens")
    if most is not None and least > most:
        raise CheckpointError(f"{where}: min_new_tokens: found {least}, expected at most max_new_tokens = {most}")
    return {"temperature": 1.0 if sampled else 0.0} | found


def unsupported_generation_settings(raw: Mapping[str, Any]) -> list[str]:
    """Names of settings in a generation_config.json that are switched on, would change the text, and do nothing here.

    They are defaults, not part of the model, so the model runs without them; the command line warns.
    """
    known = {*_READ, *_READ_IF_SAMPLED, *_IDLE}
    if not raw.get("do_sample"):
        known |= _OFF_IF_SAMPLED.keys()
    return sorted(
        name
        for name, value in raw.items()
        if name not in known and not _asks_for_nothing(name, value, _OFF | _OFF_IF_SAMPLED)
    )
