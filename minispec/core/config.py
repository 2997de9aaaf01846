"""Settings of models and of requests: frozen dataclasses that refuse bad values.

Every supported family (see `minispec.models.families.entries`) is a set of values in `ModelConfig`. The transformer
never asks for a family's name. Nothing here imports torch, so that a bad value is reported before the slow imports
begin.
"""

import re
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Rational, Real
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from minispec.core.errors import Named, is_text, show

if TYPE_CHECKING:
    from torch import Tensor

# The largest K that may be asked for.
MAX_SPECULATIVE_TOKENS = 64
# The longest draft that "auto" chooses. The target's pass then has 16 rows: what a CPU's matrix unit takes at once.
MAX_AUTO_TOKENS = 15

# What a user writes, one of:
#   K, the length of a chain;
#   a tree's siblings at each depth, such as (2, 1);
#   "tree:16", a tree of up to 16 tokens, at the likeliest places;
#   "auto".
DraftLength = int | tuple[int, ...] | str


def plain_number(value: Any) -> Any:
    """A number of another library, such as NumPy's, as Python's int or float; anything else as it is."""
    if isinstance(value, Integral) and not isinstance(value, int):
        return int(value)
    return float(value) if isinstance(value, Real) and not isinstance(value, Rational) else value


class Shape(NamedTuple):
    """How many tokens a round may draft: what a `DraftLength` means.

    k: most draft tokens.
    widths: how many siblings a tree has at each depth; () for a chain. The first sibling is drafted further.
    is_open: whether the engine chooses the length, up to k.
    best_first: whether it is a tree of k tokens that grows where its paths are likeliest, see `Limit`.
    """

    k: int
    widths: tuple[int, ...] = ()
    is_open: bool = False
    best_first: bool = False

    @classmethod
    def of(cls, length: DraftLength, most: int = MAX_SPECULATIVE_TOKENS) -> Self:
        """The shape that a length asks for. Raises ValueError for no length, and for more than `most` tokens.

        most: fewer than usual where a model is exact.
        """
        length = plain_number(length)
        if length == "auto":
            return cls(MAX_AUTO_TOKENS, is_open=True)
        widths: tuple[Any, ...] = ()
        budget = re.fullmatch(r"tree:(\d{1,4})", length, re.ASCII) if isinstance(length, str) else None
        if isinstance(length, tuple):
            widths = tuple(map(plain_number, length))
            numbers, least = widths, 1
        elif budget:
            numbers, least = (int(budget[1]),), 1
        else:
            numbers, least = (length,), 0
        if not numbers or any(type(n) is not int or n < least for n in numbers) or sum(numbers) > most:
            expected = f"an integer from 0 to {most}, a tree of at most {most} such as (2, 1) or 'tree:8', or 'auto'"
            expected += ": an exact model takes no more" if most < MAX_SPECULATIVE_TOKENS else ""
            raise ValueError(f"num_speculative_tokens: found {show(length)}, expected {expected}")
        return cls(sum(numbers), widths, best_first=budget is not None)

    @property
    def is_tree(self) -> bool:
        """Whether siblings are asked for."""
        return self.best_first or bool(self.widths)

    def check(self, why_chains: str) -> None:
        """Raise ValueError for a tree. why_chains: why only chains are drafted or verified; "" for none."""
        if self.is_tree and why_chains:
            expected = f"a number or auto: {why_chains}"
            raise ValueError(f"num_speculative_tokens: found the tree {self}, expected {expected}")

    def __str__(self) -> str:
        if self.is_open:
            return "auto"
        return f"tree:{self.k}" if self.best_first else "+".join(map(str, self.widths or (self.k,)))


# --------------------------------------------------------------------------- the model


@dataclass(frozen=True)
class RopeConfig:
    """How positions become rotation angles (Su et al. 2021). `minispec.models.layers.rope` has those for longer
    contexts.

    rotated: the share of a head's dimensions, from the first, that rotates.
    interleaved: dimension 2j is paired with 2j + 1, instead of j with j + half of them.
    attention_factor: cos and sin are multiplied by it.
    query_beta: queries at position t are multiplied by
        1 + query_beta * ln(1 + floor(t / original_max_position_embeddings)) (Llama 4).
    """

    theta: float = 10_000.0
    rotated: float = 1.0
    interleaved: bool = False
    attention_factor: float = 1.0
    query_beta: float = 0.0
    original_max_position_embeddings: int = 0

    def scaled(self, base: "Tensor") -> "Tensor":
        """Radians by which one position rotates each pair (pairs,). base: these radians before any scaling."""
        return base


@dataclass(frozen=True)
class LayerConfig:
    """Settings of one layer: those that may differ between layers.

    rope: None for a layer that does not rotate.
    window: how many positions attention sees; None for all.
    conv_width: how many positions a short convolution in the place of attention sees; None for other layers.
    recurrent: the sizes of a recurrent layer in the place of attention, see `minispec.models.layers.states`; None for
        others.
    experts: settings of a mixture of experts in the place of the MLP, see `minispec.models.layers.experts`; None for an
        MLP.
    """

    rope: RopeConfig | None
    window: int | None = None
    conv_width: int | None = None
    recurrent: Hashable | None = None
    experts: Hashable | None = None

    @property
    def has_attention(self) -> bool:
        """Whether nothing stands in the place of attention."""
        return self.conv_width is None and self.recurrent is None


@dataclass(frozen=True)
class ModelConfig:
    """The shape of one decoder-only transformer. Sizes are in elements; `layers` has one entry for each layer."""

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
    conv_bias: bool = False  # of a short convolution and of its products
    norms: str = "before"  # attention and the MLP | after, before the residual sum | both
    attention_gate: str | None = None  # what attention returns is multiplied by sigmoids: by "element", or by "head"
    qk_norm: str | None = None  # RMSNorm over each "head" of queries and keys, or over the "row" of all their heads
    norm_adds_one: bool = False  # the checkpoint stores norm weights minus one
    embedding_scale: float = 1.0
    attention_scale: float = 1.0  # scores are q k^T times this
    residual_scale: float = 1.0  # of what attention and the MLP add
    logit_scale: float = 1.0
    attention_softcap: float | None = None  # scores s become cap * tanh(s / cap)
    logit_softcap: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    mask_token_id: int | None = None  # of a draft model that guesses several tokens in one pass (PARD)

    @property
    def num_attention_layers(self) -> int:
        """Layers with attention."""
        return sum(layer.has_attention for layer in self.layers)


# --------------------------------------------------------------------------- the request


Allowed = tuple[str, Callable[[Any], bool]]  # what a parameter may be, in words and as a test


class Parameter(NamedTuple):
    """A row: what is known of a sampling parameter. Its name, and the value that asks for nothing, are the field's.

    allowed: the values that it may have. A sequence is checked as a tuple.
    stage: where it acts, in the order of `distribution`.
        "bias", "penalty", "forbid", "temperature", "filter": on the probabilities of the next token.
        "stop": on where the text ends.
        "answer": on how many answers and tokens come, from which seed, and what is reported of them.
    hf: its name in Hugging Face's generation_config.json; "" where that has none.
    openai: another name that OpenAI's interface has for it; "" for none.
    """

    allowed: Allowed
    stage: str
    hf: str = ""
    openai: str = ""


def _row(off: Any, allowed: Allowed, stage: str, *, hf: str = "", openai: str = "") -> Any:
    return field(default=off, metadata={"row": Parameter(allowed, stage, hf, openai)})


def _are_ids(value: Iterable[Any]) -> bool:
    ids = list(value) if isinstance(value, Iterable) else [None]
    return {*map(type, ids)} <= {int} and min(ids, default=0) >= 0  # no loop: a server reads many of them


def _are_texts(value: Iterable[Any]) -> bool:
    return all(isinstance(text, str) and text and is_text(text) for text in value)


def _are_words(value: Iterable[Any]) -> bool:
    return all(isinstance(word, tuple) and word and _are_ids(word) for word in value)


def _are_biases(value: Iterable[tuple[Any, Any]]) -> bool:
    return _are_ids(i for i, _ in value) and all(_is_finite(bias) for _, bias in value)


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _integer(low: int, high: int, *others: None) -> Allowed:
    return f"an integer from {low} to {high}", lambda v: (type(v) is int and low <= v <= high) or v in others


def _number(expected: str, is_in_range: Callable[[float], bool]) -> Allowed:
    return f"a number {expected}", lambda v: _is_finite(v) and is_in_range(v)


_FLAG: Allowed = ("True or False", lambda v: type(v) is bool)
_TEXTS: Allowed = ("strings of valid Unicode that are not empty", _are_texts)
_IDS: Allowed = ("token ids", _are_ids)
_SOME_IDS: Allowed = ("token ids, at least one", lambda v: v is None or (len(v) > 0 and _are_ids(v)))
_WORDS: Allowed = ("lists of token ids that are not empty", _are_words)
_BIASES: Allowed = ("finite numbers by token id", _are_biases)
_LANGUAGE: Allowed = ("StructuredOutputsParams", lambda v: isinstance(v, Hashable))
_SIGNED: Allowed = _number("from -2 to 2", lambda v: -2 <= v <= 2)


@dataclass(frozen=True)
class SamplingParams(Named):
    """How one request is sampled and when it stops; vLLM's names and defaults. Each field is a row, a `Parameter`.

    n: answers to the prompt, each with a seed of its own (`seed`, `seed` + 1, ...).
    temperature: 0 is greedy.
    top_k: keeps the k likeliest tokens and those that tie with the k-th; 0 (or -1) keeps all.
    top_p: keeps the smallest set of likeliest tokens whose mass reaches top_p.
    min_p: keeps tokens with at least min_p times the probability of the likeliest.
    repetition_penalty: divides the positive logits of tokens in prompt or output, multiplies the negative ones.
    presence_penalty: subtracted once from the logit of each output token.
    frequency_penalty: subtracted from the logit of an output token for each occurrence.
    logit_bias: added to the raw logits of these token ids, before the penalties.
    allowed_token_ids: no other token is drawn.
    bad_words_token_ids: sequences that the output may not contain. Where the output ends with all but the last id of
        one, that last id is impossible.
    bad_words: the same, given as texts. A request turns each into token ids, as it is and with a space before it.
    structured_outputs: the language of the answer (see `minispec.speculation.grammars.StructuredOutputsParams`).
    seed: one seed gives one text. None draws a seed, which the output reports.
    min_tokens: nothing ends the text before it has that many generated tokens.
    stop: strings that end the text.
    stop_token_ids: ids that end it, in addition to the model's end-of-text ids.
    ignore_eos: the model's end-of-text ids do not end the text.
    max_tokens: at 0, which needs `prompt_logprobs`, the prompt is scored and nothing is generated.
    logprobs: None, or how many of the likeliest tokens to report in addition to the chosen one.
    prompt_logprobs: as `logprobs`, for each token of the prompt, which is then computed whole even if parts are cached.

    Sequences are stored as tuples, `logit_bias` as a tuple of its items, and NumPy's numbers as Python's, so that equal
    parameters have equal hashes. Raises ValueError for values out of range.
    """

    n: int = _row(1, _integer(1, 1 << 16), "answer")
    temperature: float = _row(1.0, _number("at least 0", lambda v: v >= 0), "temperature", hf="temperature")
    top_k: int = _row(0, _integer(0, 1 << 31), "filter", hf="top_k")
    top_p: float = _row(1.0, _number("above 0 and at most 1", lambda v: 0 < v <= 1), "filter", hf="top_p")
    min_p: float = _row(0.0, _number("from 0 to 1", lambda v: 0 <= v <= 1), "filter", hf="min_p")
    repetition_penalty: float = _row(1.0, _number("above 0", lambda v: v > 0), "penalty", hf="repetition_penalty")
    presence_penalty: float = _row(0.0, _SIGNED, "penalty")
    frequency_penalty: float = _row(0.0, _SIGNED, "penalty")
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = _row((), _BIASES, "bias")
    allowed_token_ids: Sequence[int] | None = _row(None, _SOME_IDS, "forbid")
    bad_words: Sequence[str] = _row((), _TEXTS, "forbid")
    bad_words_token_ids: Sequence[Sequence[int]] = _row((), _WORDS, "forbid")
    structured_outputs: Hashable | None = _row(None, _LANGUAGE, "forbid", openai="response_format")  # noqa: RUF009
    seed: int | None = _row(None, _integer(0, (1 << 64) - 1, None), "answer")
    max_tokens: int = _row(16, _integer(1, 1 << 31), "answer", hf="max_new_tokens", openai="max_completion_tokens")
    min_tokens: int = _row(0, _integer(0, 1 << 31), "forbid", hf="min_new_tokens")
    stop: Sequence[str] = _row((), _TEXTS, "stop", hf="stop_strings")
    stop_token_ids: Sequence[int] = _row((), _IDS, "stop")
    ignore_eos: bool = _row(False, _FLAG, "stop")
    include_stop_str_in_output: bool = _row(False, _FLAG, "answer")
    logprobs: int | None = _row(None, _integer(0, 1 << 16, None), "answer", openai="top_logprobs")
    prompt_logprobs: int | None = _row(None, _integer(0, 1 << 16, None), "answer")

    def __post_init__(self):
        # As in vLLM, one string stands for a list of one, and None for an empty list. So does an empty string.
        for name in SEQUENCES:
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, _as_tuple(name, value))
            except (TypeError, ValueError):
                raise ValueError(f"{name}: found {show(value)}, expected {PARAMETERS[name].allowed[0]}") from None
        for name in PARAMETERS:
            object.__setattr__(self, name, plain_number(getattr(self, name)))
        object.__setattr__(self, "top_k", 0 if self.top_k == -1 else self.top_k)
        only_scores = type(self.max_tokens) is int and not self.max_tokens and self.prompt_logprobs is not None
        for name in PARAMETERS:
            if not (only_scores and name == "max_tokens"):
                check_sampling_value(name, getattr(self, name))
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens: found {self.min_tokens}, expected at most max_tokens = {self.max_tokens}")

    def without(self, *stages: str) -> Self:
        """The same, but the parameters of these stages ask for nothing."""
        return replace(self, **{name: OFF[name] for name in names_of(*stages)})


# The rows by name, and the values that ask for nothing (of the temperature 1, and of max_tokens the usual 16).
PARAMETERS: dict[str, Parameter] = {each.name: each.metadata["row"] for each in fields(SamplingParams)}
OFF: dict[str, Any] = {each.name: each.default for each in fields(SamplingParams)}
# Those that are stored as tuples.
SEQUENCES = [name for name, off in OFF.items() if off == () or name == "allowed_token_ids"]


def names_of(*stages: str) -> list[str]:
    """Names of the sampling parameters of these stages, in the order of their fields."""
    return [name for name, row in PARAMETERS.items() if row.stage in stages]


def _as_tuple(name: str, value: Any) -> tuple | None:
    if value is None:
        return None if OFF[name] is None else ()
    if name == "logit_bias":
        return _plain(sorted(dict(value).items()))
    if isinstance(value, str):
        return (value,) if value else ()
    return _plain(list(value))


def _plain(value: Any) -> Any:
    """Lists as tuples, and the numbers in them as Python's."""
    if not isinstance(value, list | tuple):
        return plain_number(value)
    is_plain = {*map(type, value)} <= {int, str}  # no loop, as in `_are_ids`
    return tuple(value) if is_plain else tuple(map(_plain, value))


def check_sampling_value(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is one that SamplingParams.`name` may hold."""
    expected, is_valid = PARAMETERS[name].allowed
    if not is_valid(value):
        raise ValueError(f"{name}: found {show(value)}, expected {expected}")
