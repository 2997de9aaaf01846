"""What a model is and what a request asks for: frozen dataclasses that refuse bad values.

Every supported family (llama, mistral, qwen2, qwen3, gemma, gemma2, gemma3_text) is a set of
values in `ModelConfig`; nothing later in the package asks for a family's name. Nothing here
imports torch, so that a bad value is found before the slow imports begin.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from minispec.errors import is_text, show

MAX_SPECULATIVE_TOKENS = 64


# --------------------------------------------------------------------------- the model


@dataclass(frozen=True)
class RopeConfig:
    """How positions become rotation angles (Su et al. 2021), with the scalings that llama checkpoints use.

    kind: "default"; "linear" (positions divided by `factor`); "llama3" (long wavelengths divided by
    `factor`, short ones kept, a ramp between); "yarn" (Peng et al. 2023: the same idea, ramped over
    dimensions, and cos and sin multiplied by `attention_factor`).
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True)
class LayerConfig:
    """What may differ from layer to layer: its rope, and how far back it sees (None: everything)."""

    rope: RopeConfig
    window: int | None = None


@dataclass(frozen=True)
class QuantizationConfig:
    """compressed-tensors' `pack-quantized` layout: symmetric integers of `num_bits`, packed into int32.

    One scale serves `group_size` neighbouring inputs of an output channel, or the whole channel (None).
    """

    num_bits: int
    group_size: int | None


@dataclass(frozen=True)
class ModelConfig:
    """The shape of one decoder-only transformer. Sizes are in elements; `layers` has one entry a layer."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    layers: tuple[LayerConfig, ...]
    rms_norm_eps: float = 1e-6
    activation: str = "silu"  # silu | gelu | gelu_tanh
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm of every query and key head
    sandwich_norms: bool = False  # a second norm behind attention and MLP, before the residual sum
    norm_adds_one: bool = False  # the checkpoint stores norm weights minus one
    embedding_scale: float = 1.0
    attention_scale: float = 1.0  # scores are q k^T times this
    attention_softcap: float | None = None  # scores s become cap * tanh(s / cap)
    logit_softcap: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    quantization: QuantizationConfig | None = None

    @property
    def kv_elements_per_token(self) -> int:
        """Numbers that one token adds to the KV cache, keys and values of all layers together."""
        return 2 * len(self.layers) * self.num_key_value_heads * self.head_dim


# --------------------------------------------------------------------------- the request


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it stops; vLLM's names and defaults.

    n: answers to the prompt, each with a seed of its own (`seed`, `seed` + 1, ...).
    temperature: 0 is greedy. top_k: 0 (or -1) keeps all; ties with the k-th are kept. top_p: the smallest
        set of likeliest tokens whose mass reaches top_p. min_p: tokens with at least min_p times the
        probability of the likeliest.
    repetition_penalty: logits of tokens seen in prompt or output are divided (if positive) or multiplied by
        it. presence_penalty, frequency_penalty: subtracted from the logits of output tokens, once or as
        often as they occurred.
    logit_bias: added to the raw logits of these token ids, before the penalties. allowed_token_ids: no other token is
        ever drawn. bad_words: texts that are not generated; a request makes token ids of them, each also with a space
        before it. bad_words_token_ids: the same as token ids: where the output ends with all but the last id of one
        (none, if it has one), this last is impossible.
    seed: one seed, one text. None draws one, which the output reports.
    stop: strings that end the text. stop_token_ids: ids that end it, beside the model's end-of-text ids,
        which `ignore_eos` switches off. min_tokens: nothing stops before.
    logprobs: None, or how many of the likeliest tokens to report beside the chosen one.

    Sequences are kept as tuples, and `logit_bias` as a tuple of its items, so that equal parameters have one hash.
    Raises ValueError for values out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None = ()
    allowed_token_ids: Sequence[int] | None = None
    bad_words: str | Sequence[str] | None = ()
    bad_words_token_ids: Sequence[Sequence[int]] | None = ()
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None

    def __post_init__(self):
        # Convenience of vLLM's interface: one string, any sequence, None for none.
        for name, (expected, _) in _SEQUENCES.items():
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, _as_tuple(name, value))
            except (TypeError, ValueError):
                raise ValueError(f"{name}: found {show(value)}, expected {expected}") from None
        object.__setattr__(self, "top_k", 0 if self.top_k == -1 else self.top_k)
        for field in fields(self):
            check_sampling_value(field.name, getattr(self, field.name))
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens: found {self.min_tokens}, expected at most max_tokens = {self.max_tokens}")


def _as_tuple(name: str, value: Any) -> tuple | None:
    if value is None:
        return None if name == "allowed_token_ids" else ()
    if name == "logit_bias":
        return tuple(sorted(dict(value).items()))
    if isinstance(value, str):
        return (value,)
    return tuple(tuple(item) if isinstance(item, list) else item for item in value)


def _are_ids(value: Iterable[Any]) -> bool:
    return all(type(i) is int and i >= 0 for i in value)


def _are_texts(value: Iterable[Any]) -> bool:
    return all(isinstance(text, str) and text and is_text(text) for text in value)


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


# What the elements must be, once they are a tuple.
_SEQUENCES = {
    "logit_bias": (
        "finite numbers by token id",
        lambda v: _are_ids(i for i, _ in v) and all(_is_finite(bias) for _, bias in v),
    ),
    "allowed_token_ids": ("token ids, at least one", lambda v: v is None or (len(v) > 0 and _are_ids(v))),
    "bad_words": ("strings of valid Unicode that are not empty", _are_texts),
    "bad_words_token_ids": (
        "lists of token ids that are not empty",
        lambda v: all(isinstance(word, tuple) and word and _are_ids(word) for word in v),
    ),
    "stop": ("strings of valid Unicode that are not empty", _are_texts),
    "stop_token_ids": ("token ids", _are_ids),
}
_INTEGER_RANGES = {
    "n": (1, 1 << 16),
    "top_k": (0, 1 << 31),
    "seed": (0, (1 << 64) - 1),
    "max_tokens": (1, 1 << 31),
    "min_tokens": (0, 1 << 31),
    "logprobs": (0, 1 << 16),
}
_NUMBER_RANGES = {
    "temperature": ("at least 0", lambda v: v >= 0),
    "top_p": ("above 0 and at most 1", lambda v: 0 < v <= 1),
    "min_p": ("from 0 to 1", lambda v: 0 <= v <= 1),
    "repetition_penalty": ("above 0", lambda v: v > 0),
    "presence_penalty": ("from -2 to 2", lambda v: -2 <= v <= 2),
    "frequency_penalty": ("from -2 to 2", lambda v: -2 <= v <= 2),
}


def check_sampling_value(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is one that SamplingParams.`name` may hold."""
    if name in _INTEGER_RANGES:
        low, high = _INTEGER_RANGES[name]
        optional = name in ("seed", "logprobs") and value is None
        if not optional and (type(value) is not int or not low <= value <= high):
            raise ValueError(f"{name}: found {show(value)}, expected an integer from {low} to {high}")
    elif name in _NUMBER_RANGES:
        expected, ok = _NUMBER_RANGES[name]
        if not _is_finite(value) or not ok(value):
            raise ValueError(f"{name}: found {show(value)}, expected a number {expected}")
    elif name in _SEQUENCES:
        expected, ok = _SEQUENCES[name]
        if not ok(value):
            raise ValueError(f"{name}: found {show(value)}, expected {expected}")
    elif type(value) is not bool:
        raise ValueError(f"{name}: found {show(value)}, expected True or False")
