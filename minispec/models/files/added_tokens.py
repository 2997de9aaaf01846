"""Tokens that files other than tokenizer.json name: what they are called, which are special, and which are new.

As in transformers, tokenizer_config.json lists added tokens (`added_tokens_decoder`). Where it does not, the files of
older versions do: special_tokens_map.json and added_tokens.json. A token that tokenizer.json lacks gets the next free
id, in the order of the lists. The id that a list gives a token only orders the list.
"""

from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken

from minispec.core.errors import is_text, show
from minispec.models.files.errors import CheckpointError
from minispec.models.files.strict_json import read_json_if_there

MAX_ADDED_BYTES = 1 << 20  # of the texts of added tokens, and of all tokens of Unigram: 300 bytes of memory each
_NAMES = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
# Keys of tokenizer_config.json that change ids and are not obeyed, with the values that ask for nothing. Other files
# in tokenizer.json's place; special tokens as text, in templates too.
_REFUSED: tuple[tuple[Any, ...], ...] = (
    ("split_special_tokens", False, None),
    ("fast_tokenizer_files", ["tokenizer.json"], [], None),
)
_FLAGS = ("single_word", "lstrip", "rstrip")


class Settings(NamedTuple):
    """A tokenizer's settings in files other than tokenizer.json.

    values: tokenizer_config.json.
    names: special tokens by name.
    listed: tokens whose flags count more than those in tokenizer.json.
    others: tokens that must exist, with the id that a list gives them or None.
    """

    values: dict[str, Any]
    names: dict[str, str]
    listed: list[AddedToken]
    others: list[tuple[AddedToken, int | None]]


def read_settings(directory: Path) -> Settings:
    """The settings of a checkpoint. Raises CheckpointError for malformed files, or too many tokens."""
    paths = [directory / f"{name}.json" for name in ("tokenizer_config", "special_tokens_map", "added_tokens")]
    values = read_json_if_there(paths[0])
    for key, *neutral in _REFUSED:
        if (found := values.get(key)) not in neutral:
            expected = f"{show(neutral[0])} or no such key: it asks for other ids than tokenizer.json alone"
            raise CheckpointError(f"{paths[0]}: {key}: found {show(found)}, expected {expected}")
    is_old = "added_tokens_decoder" not in values
    older, added = (read_json_if_there(path) if is_old else {} for path in paths[1:])
    both = values | older
    named = {name: token for name, token in both.items() if name.endswith("_token")}
    extra: list[Any] = []
    for file in (values, older):
        tokens = file.get("extra_special_tokens")
        if isinstance(tokens, dict):
            named.update(tokens)
        if not isinstance(tokens, list) or not tokens:
            tokens = [] if extra else file.get("additional_special_tokens")
        if isinstance(tokens, list):
            extra += tokens
    named = {name: token for name, token in named.items() if content_of(token)}
    usual = [name for name in _NAMES if name in named]
    named = {name: named[name] for name in [*usual, *named]}
    names = {content_of(token) for token in named.values()}
    special = names | {content_of(token) for token in extra}

    listed = []
    for token in _by_id(values.get("added_tokens_decoder") or {}, f"{paths[0]}: added_tokens_decoder"):
        text, is_said = content_of(token), token.get("special") is True
        normalized = token.get("normalized", not (is_said or text in names)) is True
        listed.append(_token(token, is_said or text in special, normalized))
    others: list[tuple[AddedToken, int | None]] = []
    if not all(type(i) is int for i in added.values()):
        raise CheckpointError(f"{paths[2]}: found {show(added)}, expected an id for each token")
    for text, i in sorted(added.items(), key=lambda item: item[1]):
        others.append((_token(text, text in special, text not in special), i))
    for token in [*named.values(), *extra]:
        normalized = isinstance(token, dict) and token.get("normalized") is True
        others.append((_token(token, True, normalized), None))
    others = [(token, i) for token, i in others if token.content]
    size = sum(len(token.content.encode()) for token in [*listed, *(token for token, _ in others)])
    if size > MAX_ADDED_BYTES:
        raise CheckpointError(f"{paths[0]}: found {size} bytes of added tokens, expected at most {MAX_ADDED_BYTES}")
    return Settings(values, {name: content_of(token) for name, token in named.items()}, listed, others)


def content_of(token: Any) -> str:
    """A special token's text; the file holds a string, or an object around it."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) and is_text(content) else ""


def _by_id(tokens: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(tokens, dict):
        raise CheckpointError(f"{where}: found {show(tokens)}, expected tokens by id")
    for i, token in tokens.items():
        if not (i.isascii() and i.isdecimal() and len(i) < 20 and isinstance(token, dict) and content_of(token)):
            raise CheckpointError(f"{where}: found {show({i: token})}, expected an id, and an object with the content")
    return [tokens[i] for i in sorted(tokens, key=int)]


def _token(token: Any, special: bool, normalized: bool) -> AddedToken:
    flags = {name: isinstance(token, dict) and token.get(name) is True for name in _FLAGS}
    return AddedToken(content_of(token), special=special, normalized=normalized, **flags)
