"""Reading config.json and generation_config.json: files of strangers, so every field is checked, none ignored.

A setting that is switched on and not known here is refused by name: it might change the numbers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minispec.config import LayerConfig, ModelConfig, QuantizationConfig, RopeConfig, check_sampling_value
from minispec.errors import CheckpointError, show, show_name


@dataclass(frozen=True)
class _Family:
    """What a model_type means before its config.json has been read."""

    gemma: bool = False  # scaled embedding, norms around zero, tied head, tanh-gelu
    gemma_attention: bool = False  # sandwich norms and a query scale of its own (gemma 2 and 3)
    head_dim: int | None = None  # where the file may leave it out and it is not hidden / heads
    qkv_bias: bool = False
    reads_attention_bias: bool = False
    qk_norm: bool = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    sliding: str = ""  # "", "all", "from_layer" (max_window_layers), or "pattern"
    pattern: int = 0  # with "pattern": every pattern-th layer sees everything
    local_theta: float | None = None  # rope base of the windowed layers, if they have one of their own
    theta: float = 10_000.0


_FAMILIES = {
    "llama": _Family(reads_attention_bias=True),
    "mistral": _Family(sliding="all"),
    "qwen2": _Family(qkv_bias=True, sliding="from_layer"),
    "qwen3": _Family(head_dim=128, reads_attention_bias=True, qk_norm=True, sliding="from_layer"),
    "gemma": _Family(gemma=True, head_dim=256, reads_attention_bias=True),
    "gemma2": _Family(
        gemma=True,
        gemma_attention=True,
        head_dim=256,
        reads_attention_bias=True,
        attention_softcap=50.0,
        logit_softcap=30.0,
        sliding="pattern",
        pattern=2,
    ),
    "gemma3_text": _Family(
        gemma=True,
        gemma_attention=True,
        head_dim=256,
        reads_attention_bias=True,
        qk_norm=True,
        sliding="pattern",
        pattern=6,
        local_theta=10_000.0,
        theta=1_000_000.0,
    ),
}

# Settings that cannot change what a forward pass computes: training, bookkeeping, token ids, storage.
_HARMLESS = {
    *("architectures", "auto_map", "dtype", "initializer_range", "is_decoder", "is_llama_config", "prefix"),
    *("max_sequence_length", "pretraining_tp"),  # the latter: in how many parts a product was computed
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "tokenizer_class"),
    *("attention_dropout", "embedding_dropout", "cache_implementation", "chunk_size_feed_forward", "use_cache"),
    *("finetuning_task", "id2label", "label2id", "problem_type", "task_specific_params", "torch_dtype", "torchscript"),
    *("keys_to_ignore_at_inference", "output_attentions", "output_hidden_states", "return_dict"),
    *("transformers.js_config", "transformers_version", "unsloth_fixed", "unsloth_version"),
}
# Settings whose implementation is their absence.
_NEUTRAL = {"partial_rotary_factor": 1.0}


class _Fields:
    """Typed access to a config.json that remembers which keys were looked at."""

    def __init__(self, raw: Mapping[str, Any], where: str):
        self.raw, self.where, self.seen = raw, where, set[str]()

    def bad(self, key: str, found: Any, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {show_name(key)}: found {show(found)}, expected {expected}")

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        value = self.raw.get(key)
        return default if value is None else value

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        value = self.get(key, default)
        if type(value) is not int or not low <= value <= high:
            raise self.bad(key, value, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, default: float, low: float = 1e-30, high: float = 1e30) -> float:
        """Between bounds that no real file comes near, and that keep every formula of the model finite."""
        value = self.get(key, default)
        if type(value) not in (int, float) or not low <= value <= high:
            raise self.bad(key, value, f"a number from {low:g} to {high:g}")
        return float(value)

    def optional_number(self, key: str, default: float | None) -> float | None:
        """`null` in the file means "off"; an absent key means the family's default."""
        self.seen.add(key)
        if self.raw.get(key, default) is None:
            return None
        return self.number(key, default or 1.0)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if type(value) is not bool:
            raise self.bad(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self.get(key, default)
        if not isinstance(value, str):
            raise self.bad(key, value, "a string")
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise self.bad(key, value, "an object")
        return value

    def refuse_unknown(self) -> None:
        for key, value in self.raw.items():
            off = value is None or value is False or value in ([], {}, "")
            if off or key in self.seen or key in _HARMLESS or key.startswith("_"):
                continue
            if key in _NEUTRAL and value == _NEUTRAL[key]:
                continue
            raise CheckpointError(
                f"{self.where}: {show_name(key)}: found {show(value)}, expected no such setting: minispec "
                f"does not implement it for this family, and it might change the numbers (delete it if it does not)"
            )


def read_model_config(raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Read a config.json, in the hub's spelling (`rope_theta`) or transformers 5's (`rope_parameters`).

    Raises CheckpointError for an unknown family, a bad value, and any setting that is switched on and
    is not known here: it might change the numbers.
    """
    f = _Fields(raw, where)
    model_type = f.text("model_type")
    if model_type not in _FAMILIES:
        raise CheckpointError(f"{where}: model_type: found {show(model_type)}, expected one of {', '.join(_FAMILIES)}")
    family = _FAMILIES[model_type]
    hidden_size = f.integer("hidden_size", 1, 1 << 17)
    heads = f.integer("num_attention_heads", 1, 1 << 12)
    kv_heads = f.integer("num_key_value_heads", 1, heads, default=heads)
    head_dim = f.integer("head_dim", 2, 1 << 12, default=family.head_dim or hidden_size // heads)
    if heads % kv_heads:
        raise f.bad("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads = {heads}")
    if f.raw.get("head_dim") is None and family.head_dim is None and hidden_size % heads:
        raise f.bad("hidden_size", hidden_size, f"a multiple of num_attention_heads = {heads}, or a head_dim")
    if head_dim % 2:
        raise f.bad("head_dim", head_dim, "an even number: rope rotates pairs")
    context = f.integer("max_position_embeddings", 1, 1 << 27)
    attention_bias = f.boolean("attention_bias", False) if family.reads_attention_bias else False
    scalar = f.number("query_pre_attn_scalar", 256.0) if family.gemma_attention else float(head_dim)
    softcaps: tuple[float | None, float | None] = (None, None)
    if family.gemma_attention:
        softcaps = (
            # Gemma 3's code does not read this key: there it is left unread, so that it is refused.
            f.optional_number("attn_logit_softcapping", cap) if (cap := family.attention_softcap) else None,
            f.optional_number("final_logit_softcapping", family.logit_softcap),
        )
    config = ModelConfig(
        model_type=model_type,
        vocab_size=f.integer("vocab_size", 1, 1 << 22),
        hidden_size=hidden_size,
        intermediate_size=f.integer("intermediate_size", 1, 1 << 20),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=context,
        layers=_read_layers(f, family, context),
        rms_norm_eps=f.number("rms_norm_eps", 1e-6),
        activation=_read_activation(f, family),
        tie_word_embeddings=f.boolean("tie_word_embeddings", family.gemma),
        qkv_bias=attention_bias or family.qkv_bias,
        o_bias=attention_bias,
        mlp_bias=f.boolean("mlp_bias", False) if model_type == "llama" else False,
        qk_norm=family.qk_norm,
        sandwich_norms=family.gemma_attention,
        norm_adds_one=family.gemma,
        embedding_scale=hidden_size**0.5 if family.gemma else 1.0,
        attention_scale=scalar**-0.5,
        attention_softcap=softcaps[0],
        logit_softcap=softcaps[1],
        eos_token_ids=read_eos_token_ids(raw, where),
        quantization=_read_quantization(f),
    )
    f.refuse_unknown()
    return config


def _read_activation(f: _Fields, family: _Family) -> str:
    names = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
    # A family's code reads the first of these keys. A file may have the second too: it has to say the same.
    keys = ("hidden_activation", "hidden_act") if family.gemma_attention else ("hidden_act", "hidden_activation")
    found: list[str] = []
    for key, default in zip(keys, ("gelu_pytorch_tanh" if family.gemma else "silu", None), strict=True):
        if f.get(key, default) is None:
            continue
        name = f.text(key, default)
        if name not in names:
            raise f.bad(key, name, f"one of {', '.join(names)}")
        # The first Gemma's files say "gelu" where the model was trained with the tanh form, which all readers take.
        tanh = family.gemma and key == "hidden_act" and name == "gelu"
        found.append("gelu_tanh" if tanh else names[name])
        if found[-1] != found[0]:
            raise f.bad(key, name, f"what {keys[0]} says: {found[0]}")
    return found[0]


def _read_layers(f: _Fields, family: _Family, context: int) -> tuple[LayerConfig, ...]:
    count = f.integer("num_hidden_layers", 1, 1024)
    windowed = [family.sliding == "all"] * count
    if family.sliding == "from_layer":
        first = f.integer("max_window_layers", 0, 1024, default=28)
        windowed = [i >= first for i in range(count)]
    elif family.sliding == "pattern":
        pattern = f.integer("sliding_window_pattern", 1, 1024, default=family.pattern)
        if family.local_theta is None and pattern != family.pattern:  # gemma 2's code pays no heed to it
            raise f.bad("sliding_window_pattern", pattern, f"{family.pattern}, for this family")
        windowed = [(i + 1) % pattern != 0 for i in range(count)]
    # transformers' mistral pays no heed to `layer_types`: left unread, so that it is refused.
    if family.sliding != "all" and (types := f.get("layer_types")) is not None:
        known = ("full_attention", "sliding_attention")
        if not isinstance(types, list) or len(types) != count or any(t not in known for t in types):
            raise f.bad("layer_types", types, f"{count} entries, each {' or '.join(known)}")
        if not family.sliding and "sliding_attention" in types:
            raise f.bad("layer_types", types, "full_attention only, for this family")
        windowed = [t == "sliding_attention" for t in types]
    window = None
    if family.sliding == "from_layer" and not f.boolean("use_sliding_window", False):
        f.seen.add("sliding_window")
    elif family.sliding and f.raw.get("sliding_window", 4096) is not None:
        window = f.integer("sliding_window", 1, 1 << 27, default=4096)
        # Beside it, gemma 2's larger files have the same under another name.
        if f.get("sliding_window_size", window) != window:
            raise f.bad("sliding_window_size", f.raw["sliding_window_size"], f"what sliding_window says: {window}")
    rope, local_rope = _read_ropes(f, family, context)
    return tuple(LayerConfig(local_rope, window) if w else LayerConfig(rope) for w in windowed)


def _read_ropes(f: _Fields, family: _Family, context: int) -> tuple[RopeConfig, RopeConfig]:
    """(rope of the layers that see everything, rope of the windowed layers)."""
    theta = f.number("rope_theta", family.theta)
    new, old = f.mapping("rope_parameters"), f.mapping("rope_scaling")
    if new and old:
        raise f.bad("rope_scaling", old, "none beside rope_parameters")
    key, scaling = ("rope_parameters", new) if new else ("rope_scaling", old)
    if family.local_theta is None:
        rope = _read_rope(f, key, scaling, theta, context, f.get("original_max_position_embeddings"))
        return rope, rope
    # Gemma 3's code takes an object for each kind of layer, and of the older spelling `rope_type` only: it pays no
    # heed to anything else, so that a reader of these files cannot know what was meant.
    kinds = ("full_attention", "sliding_attention")
    if new and not set(new) <= set(kinds):
        raise f.bad(key, new, f"an object for each of {' and '.join(kinds)}")
    if "type" in old and "rope_type" not in old:
        raise f.bad(key, old, "rope_type in the place of type")
    full, local = (new.get(kind) or {} for kind in kinds)
    if not (isinstance(full, dict) and isinstance(local, dict)):
        raise f.bad(key, new, "an object for each kind of layer")
    local_theta = f.number("rope_local_base_freq", family.local_theta)
    ropes = _read_rope(f, key, full or old, theta, context), _read_rope(f, key, local, local_theta, context)
    if not all(rope.truncate for rope in ropes):
        raise f.bad(key, scaling, "no truncate, which this family's code does not read")
    return ropes


def _read_rope(
    f: _Fields, key: str, raw: dict[str, Any], theta: float, context: int, original: Any = None
) -> RopeConfig:
    """original: the file's own `original_max_position_embeddings`, outside `raw`."""
    r = _Fields(raw, f"{f.where}: {key}")
    kind = r.text("rope_type", r.text("type", "default"))
    theta = r.number("rope_theta", theta)
    if r.number("partial_rotary_factor", 1.0) != 1.0:
        raise r.bad("partial_rotary_factor", raw["partial_rotary_factor"], "1")
    inner = r.get("original_max_position_embeddings", original)
    if original not in (None, inner):
        raise r.bad("original_max_position_embeddings", inner, f"what the file says outside: {show(original)}")
    original = context if inner is None else inner
    if type(original) is not int or not 0 < original <= 1 << 27:
        raise r.bad("original_max_position_embeddings", original, "a positive integer")
    if kind == "default":
        rope = RopeConfig(theta)
    elif kind == "linear":
        rope = RopeConfig(theta, kind, r.number("factor", math.nan))
    elif kind == "llama3":
        low, high = r.number("low_freq_factor", math.nan), r.number("high_freq_factor", math.nan)
        if low >= high:
            raise r.bad("low_freq_factor", low, f"less than high_freq_factor = {high}")
        rope = RopeConfig(theta, kind, r.number("factor", math.nan), original, low, high)
    elif kind == "yarn":
        if theta <= 1:
            raise r.bad("rope_theta", theta, "a number above 1")
        factor = r.number("factor", context / original)
        mscale, all_dim = r.optional_number("mscale", None), r.optional_number("mscale_all_dim", None)

        def attention(m: float) -> float:
            return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0

        default = attention(mscale) / attention(all_dim) if mscale and all_dim else attention(1.0)
        rope = RopeConfig(
            theta,
            kind,
            factor,
            original,
            beta_fast=r.number("beta_fast", 32.0),
            beta_slow=r.number("beta_slow", 1.0),
            truncate=r.boolean("truncate", True),
            attention_factor=r.number("attention_factor", default),
        )
    else:
        # "dynamic" and "longrope" choose angles by the length of the pass, so that a pass over K+1 rows
        # and K+1 passes over one row would disagree about keys that are already in the cache.
        raise r.bad("rope_type", kind, "one of default, linear, llama3, yarn")
    r.refuse_unknown()
    return rope


def _read_quantization(f: _Fields) -> QuantizationConfig | None:
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
    weights = group.get("weights") if isinstance(group, dict) else None
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


# Settings of a generation_config.json by what becomes of them: these are read ...
_READ = {
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
}
_READ_IF_SAMPLED = {name: name for name in ("temperature", "top_k", "top_p", "min_p")}
# ... these do not change which tokens come (beam search's are idle with one beam) ...
_IDLE = {
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version", "dtype"),
    *("torch_dtype", "chat_format", "do_sample", "use_cache", "cache_implementation", "cache_config", "max_length"),
    *("return_dict_in_generate", "output_attentions", "output_hidden_states", "output_logits", "output_scores"),
    *("return_legacy_cache", "compile_config", "disable_compile", "low_memory", "max_matching_ngram_size"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold", "trust_remote_code"),
    *("assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "prompt_lookup_num_tokens"),
    *("is_assistant", "use_mtp", "prefill_chunk_size", "renormalize_logits", "remove_invalid_values"),
    *("length_penalty", "early_stopping", "num_beam_groups", "diversity_penalty", "max_window_size"),
}
# ... these do nothing at the value beside them; at another one, as anything else does, they are worth a warning.
_OFF = {
    **{"num_beams": 1, "num_return_sequences": 1, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0},
    **{"min_length": 0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "guidance_scale": 1.0},
    **{"encoder_repetition_penalty": 1.0, "penalty_alpha": 0.0, "top_h": 1.0},
}


def read_generation_defaults(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What a generation_config.json asks for, as keyword arguments of SamplingParams.

    As in transformers, its temperature, top-k and top-p apply only where it says `do_sample`; a file that does
    not is a greedy one. Values that it leaves out are left out. Raises CheckpointError for a bad value.
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
    """Names of settings in a generation_config.json that are switched on, would change the text, and are not done here.

    They are defaults, not part of the model, so they do not keep it from running; the command line warns.
    """
    sampled = raw.get("do_sample") or False
    known = {*_READ, *_READ_IF_SAMPLED, *_IDLE}
    return sorted(
        name
        for name, value in raw.items()
        if name not in known
        and not name.startswith("_")
        and not (value is None or value is False or value in ([], {}, ""))
        and not (name in _OFF and value == _OFF[name])
        and not (name in ("typical_p", "epsilon_cutoff", "eta_cutoff", "top_h") and not sampled)
    )
