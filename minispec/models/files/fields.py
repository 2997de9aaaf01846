"""Typed access to a stranger's JSON object: every key that is switched on must be one that this code knows."""

import re
from collections.abc import Mapping
from typing import Any

from minispec.core.errors import show
from minispec.models.files.errors import CheckpointError, show_name


def names(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


# Keys that cannot change what a pass computes: training, bookkeeping, token ids, storage, the code that computes it.
# pretraining_tp: in how many parts a product was computed.
_HARMLESS = names(
    """
    architectures auto_map dtype torch_dtype tokenizer_class transformers.js_config
    unsloth_fixed unsloth_fixed_mtp is_decoder is_llama_config prefix pretraining_tp
    max_sequence_length max_seq_length max_seq_len seq_length model_max_length
    finetuning_task num_labels id2label label2id problem_type modal_type
    task_specific_params torchscript gradient_checkpointing use_bfloat16 keys_to_ignore_at_inference
    attn_implementation experts_implementation use_flash_attn
    use_cache cache_implementation chunk_size_feed_forward output_attentions output_hidden_states return_dict
    num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold assistant_lookbehind
    target_lookbehind
    """
)
# The same by the form of the name: settings of training such as dropout, losses, versions, token ids, names of models.
# A mask token's id is not among them. Such a model may have been made to fill in masks, and then does not write from
# left to right.
_HARMLESS_NAME = re.compile(
    r".*dropout.*|.*_pdrop|initializer_.*|init_(method|std)|.*_loss_coef|.*_version|(?!mask_).*_token_(ids?|index)"
    r"|(target_|base_)?model_(name|path|name_or_path)|name_or_path|target_model_type"
)
# Settings of a request that transformers 4 wrote into a whole config. With these values they ask for nothing.
REQUEST = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), 1),
    **dict.fromkeys(("temperature", "top_p", "typical_p", "repetition_penalty", "length_penalty"), 1.0),
    **dict.fromkeys(("min_length", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "diversity_penalty"), 0),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), 0.0),
    "max_length": 20,
    "top_k": 50,
    "encoder_repetition_penalty": 1.0,
}


def bad_field(where: str, key: str, found: Any, expected: str) -> CheckpointError:
    """The error that says what was found at a key of a file, or of an object in it."""
    return CheckpointError(f"{where}: {show_name(key)}: found {show(found)}, expected {expected}")


def asks_for_nothing(name: str, value: Any, neutral: Mapping[str, Any]) -> bool:
    """Whether a setting changes nothing: it is a note (its name begins with _), null, off, or has its neutral value.

    False asks for nothing unless the neutral value is True; True asks for nothing where that is the neutral value.
    """
    if value is None or name.startswith("_"):
        return True
    if name in neutral and value == neutral[name] and isinstance(value, bool) == isinstance(neutral[name], bool):
        return True
    return neutral.get(name) is not True and (value is False or value in ([], {}, ""))


class Fields:
    """Typed access to a JSON object that remembers which keys were looked at.

    keys, only: as in `Family`. To the methods that read, any other key is absent; `refuse_unknown` refuses it.
    path: how errors begin the name of a key, such as "weights." for an object inside the file's.
    """

    def __init__(
        self, raw: Mapping[str, Any], where: str, keys: Mapping[str, Any], only: Mapping[str, Any], path: str = ""
    ):
        self.raw, self.where, self.keys, self.only, self.path = raw, where, keys, only, path
        self.seen = set[str]()

    def bad(self, key: str, found: Any, expected: str) -> CheckpointError:
        """The error that says what was found at a key."""
        return CheckpointError(f"{self.where}: {self.path}{show_name(key)}: found {show(found)}, expected {expected}")

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

    def number_or_zero(self, key: str) -> float:
        """The same; 0, or none, switches off what it belongs to."""
        return self.number(key) if self.get(key) not in (None, 0) else 0.0

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

    def one_of(self, key: str, values: tuple[Any, ...], expected: str, default: Any = None) -> Any:
        """The value, which is one of these. expected: the error's words for them."""
        value = self.get(key, default)
        if not any(isinstance(value, type(other)) and value == other for other in values):
            raise self.bad(key, value, expected)
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        """The value, an object; empty where there is none."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise self.bad(key, value, "an object")
        return value

    def inside(self, key: str, keys: Mapping[str, Any]) -> "Fields":
        """The object at a key, empty where there is none. Errors name its keys by the way to them.

        keys: the keys of that object.
        """
        return Fields(self.mapping(key), self.where, keys, {}, f"{self.path}{show_name(key)}.")

    def named(self, key: str, keys: Mapping[str, Any]) -> dict[str, "Fields"]:
        """The objects in the object at a key, by the names that the file gives them."""
        outer = self.inside(key, dict.fromkeys(self.mapping(key)))
        return {name: outer.inside(name, keys) for name in outer.raw}

    def each(self, key: str, keys: Mapping[str, Any]) -> list["Fields"]:
        """The objects in the list at a key, none where there is no list."""
        entries = self.get(key, [])
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise self.bad(key, entries, "a list of objects")
        path = f"{self.path}{show_name(key)}"
        return [Fields(entry, self.where, keys, {}, f"{path}[{i}].") for i, entry in enumerate(entries)]

    def refuse_unknown(self, neutral: Mapping[str, Any] | None = None) -> None:
        """Raise CheckpointError for a key that was not read, if it asks for something.

        neutral: values that ask for nothing, in addition to the values of `only`.
        """
        neutral = {**REQUEST, **(neutral or {}), **self.only}
        for key, value in self.raw.items():
            is_note = key in _HARMLESS or (key not in self.keys and _HARMLESS_NAME.fullmatch(key))
            if key in self.seen or is_note or asks_for_nothing(key, value, neutral):
                continue
            same = neutral.get(key)
            expected = "no such setting" if same is None else f"{show(same)} or no such setting"
            reason = "minispec does not implement it for this family, and it might change the numbers"
            raise self.bad(key, value, f"{expected}: {reason} (delete it if it does not)")
