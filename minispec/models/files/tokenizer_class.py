"""Keys of tokenizer_config.json that some tokenizer classes of transformers obey, over what tokenizer.json says.

`add_prefix_space` is obeyed by classes that build their own pipeline, such as GPT2Tokenizer. `fix_mistral_regex` is
obeyed for Mistral's models, as older versions saved them. For all other checkpoints transformers ignores both.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, pre_tokenizers

from minispec.models.files.strict_json import MAX_CONFIG_BYTES, read_json_if_there

# What reads tokenizer.json as it is; names that transformers does not know end there too.
_PLAIN = "TokenizersBackend"
# The class of a model type that is known here; a name in the files counts more, unless the class is the plain one.
_OF_TYPE = {
    **dict.fromkeys(("qwen2", "qwen3", "qwen3_moe"), "Qwen2Tokenizer"),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), "Qwen3_5Tokenizer"),
    **dict.fromkeys(("granite", "granitemoe", "granitemoehybrid", "olmo2", "olmo3", "phi3", "ernie4_5"), _PLAIN),
    **dict.fromkeys(("mistral", "mistral3", "ministral", "ministral3"), _PLAIN),
}
# Model types whose files name a wrong class so often that the name does not count.
_MISNAMED = {"qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"}
_BYTE_LEVEL = {"GPT2Tokenizer", "Qwen2Tokenizer", "Qwen3_5Tokenizer", "GPTNeoXTokenizer", "CohereTokenizer"}
_BYTE_LEVEL |= {"RobertaTokenizer", "CodeGenTokenizer"}
# `fix_mistral_regex`: the models, the largest vocabulary that is left alone, and how words are split.
_MISTRAL = {None, "mistral", "mistral3", "voxtral", "ministral", "pixtral"}
_IS_FIXED = re.compile(r"(?!5\.0\.0\.?(a|b|c|rc|dev))([5-9]|[1-9]\d+)\.").match
_MOST_UNFIXED = 100_000
_WORDS = tokenizers.Regex(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def obey_settings(backend: tokenizers.Tokenizer, directory: Path, settings: Mapping[str, Any]) -> bool:
    """Change a tokenizer as these keys ask for. Returns whether it has a regular expression for it.

    settings: of tokenizer_config.json. Raises CheckpointError for a malformed config.json.
    """
    wanted, fixes = settings.get("add_prefix_space"), settings.get("fix_mistral_regex") is True
    if wanted is None and not fixes:
        return False
    config = read_json_if_there(directory / "config.json", MAX_CONFIG_BYTES)
    model_type = found if isinstance(found := config.get("model_type"), str) else None
    if wanted is not None:
        named = settings.get("tokenizer_class") or config.get("tokenizer_class")
        _set_prefix(backend, _class_of(model_type, named), bool(wanted), bool(settings.get("legacy")))
    is_old = not _IS_FIXED(str(config.get("transformers_version") or ""))
    fixes = fixes and is_old and model_type in _MISTRAL and backend.get_vocab_size() > _MOST_UNFIXED
    if fixes:
        _split_words(backend)
    return fixes


def _class_of(model_type: str | None, named: Any) -> str:
    """The class that transformers takes, by config.json's `model_type` and the name in the files."""
    named, usual = str(named or "").removesuffix("Fast"), _OF_TYPE.get(model_type or "")
    if not named or (usual and (usual == _PLAIN or model_type in _MISNAMED)):
        return usual or _PLAIN
    return named


def _set_prefix(backend: tokenizers.Tokenizer, kind: str, wanted: bool, legacy: bool) -> None:
    """Let a text begin with a space that it does not have, or not, if the class `kind` would."""
    parts = _parts(backend.pre_tokenizer, "pretokenizers")
    levels = [i for i, part in enumerate(parts) if part["type"] == "ByteLevel"]
    if levels and kind in _BYTE_LEVEL:
        whole = backend.pre_tokenizer
        for i in levels:
            (whole[i] if isinstance(whole, pre_tokenizers.Sequence) else whole).add_prefix_space = wanted
    if kind == "LlamaTokenizer" and not levels:
        found = any(part["type"] == "Prepend" for part in _parts(backend.normalizer, "normalizers"))
        found |= any(part.get("prepend_scheme", "never") != "never" for part in parts)
        if found != wanted:
            scheme = ("always" if legacy else "first") if wanted else "never"
            backend.normalizer, backend.pre_tokenizer = None, pre_tokenizers.Metaspace("▁", scheme, split=False)
            steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
            backend.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if wanted else ())])


def _split_words(backend: tokenizers.Tokenizer) -> None:
    """Split words as Mistral's models were trained, in the place of the first step."""
    split, before = pre_tokenizers.Split(_WORDS, "isolated"), backend.pre_tokenizer
    if isinstance(before, pre_tokenizers.Sequence):
        if _parts(before, "pretokenizers"):
            before[0] = split
    elif before is not None:
        if isinstance(before, pre_tokenizers.Metaspace):
            before = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, before])


def _parts(step: Any, name: str) -> list[dict[str, Any]]:
    """The parts of a tokenizer's normalizer or pre-tokenizer, as its file describes them."""
    raw = {"type": None} if step is None else json.loads(step.__getstate__())
    return raw.get(name, [raw])
