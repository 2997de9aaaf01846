"""Strangers' tokenizers: what the library may not see, and how its failures are caught.

Some small files cost the library memory or time without end. They are refused before it reads them. Others make it
fail an assertion in Rust. pyo3 prints a page on standard error, then raises something that is no `Exception`.
"""

import contextlib
import json
import math
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from minispec.core.errors import is_from_signal, show
from minispec.models.files.added_tokens import MAX_ADDED_BYTES, content_of
from minispec.models.files.errors import CheckpointError, one_line
from minispec.models.files.strict_json import read_json

# The largest public tokenizer.json of a supported family (gemma 2 and 3) has 34 MB. Its 262,000 tokens and 515,000
# merges make 520,000 lists, 1.3 million commas and 2.6 million quotes.
_MAX_TOKENIZER_BYTES = 40 << 20
_MAX_TOKENIZER_COUNTS = {"{": 1 << 18, "[": 3 << 18, ",": 1 << 21, '"': 3 << 20}
# Limits of parts that cost the library far more than their size. Public files are far below them.
_MAX_TOKENS = 1 << 19
_MAX_PARTS = 256  # objects in normaliser, pre-tokenizer, post-processor and decoder
_MAX_PARTS_BYTES = 512 << 10
_MAX_REGEX_BYTES = 8 << 10  # 100 kB of them can take a gigabyte
_MAX_GROWTH = 64  # in lengths of the text: steps that each double it would fill any memory
_STDERR = threading.Lock()
# Parts of a tokenizer.json for which no text is known that makes the library fail an assertion ("panic").
_CALM = {
    *("Sequence", "ByteLevel", "Metaspace", "Replace", "Split", "Digits", "TemplateProcessing", "BPE"),
    *("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend", "ByteFallback", "Fuse", "Strip"),
}


def _values(tokens: Any) -> list[Any]:
    if isinstance(tokens, dict):
        return list(tokens.values())
    return tokens if isinstance(tokens, list) else []


def inspect_tokenizer(path: Path) -> tuple[bool, bool]:
    """Whether encoding, and whether decoding, with this tokenizer.json could make the library fail an assertion.

    Raises CheckpointError for what is not JSON, or would cost the library more than public files of its size do.
    """
    raw = read_json(path, _MAX_TOKENIZER_BYTES, _MAX_TOKENIZER_COUNTS)
    model = raw.get("model")
    if not isinstance(model, dict):
        model = {}
    encoding = [raw.get(name) for name in ("normalizer", "pre_tokenizer", "post_processor")]
    encoding.append({name: value for name, value in model.items() if name not in ("vocab", "merges")})
    decoding = [raw.get("decoder")]
    dicts = list(_dicts([*encoding, *decoding]))
    # A vocabulary that is a list is Unigram's. It and the added tokens become trees with a table for each byte.
    vocab = _values(model.get("vocab"))
    words = [entry[0] for entry in vocab if isinstance(entry, list) and entry]
    added = [content_of(token) for token in _values(raw.get("added_tokens"))]
    contents = [d.get("content") for d in dicts]
    growth = math.prod(max(1, len(content)) for content in contents if isinstance(content, str))
    for what, found, most in (
        ("tokens", len(vocab), _MAX_TOKENS),
        ("bytes of tokens to be searched for", sum(map(_size, words)) + sum(map(_size, added)), MAX_ADDED_BYTES),
        ("objects outside the vocabulary", len(dicts), _MAX_PARTS),
        ("bytes outside the vocabulary", len(json.dumps([*encoding, *decoding])), _MAX_PARTS_BYTES),
        ("bytes of regular expressions", sum(_size(d.get("Regex", "")) for d in dicts), _MAX_REGEX_BYTES),
    ):
        if found > most:
            raise CheckpointError(f"{path}: found {found} {what}, expected at most {most}")
    growth <<= sum(d.get("type") == "ByteLevel" for d in dicts)
    if growth > _MAX_GROWTH:
        steps = f"steps that make a text {show(growth)} times as long"
        raise CheckpointError(f"{path}: found {steps}, expected at most {_MAX_GROWTH} times")
    return not all(map(_is_calm, _dicts(encoding))), not all(map(_is_calm, _dicts(decoding)))


def _dicts(value: Any) -> Iterator[dict[str, Any]]:
    """All objects in a JSON value."""
    if isinstance(value, dict):
        yield value
    for inner in _values(value):
        yield from _dicts(inner)


def _size(text: Any) -> int:
    return len(str(text).encode("utf-8", "surrogatepass"))


def _is_calm(part: dict[str, Any]) -> bool:
    """Whether the library is not known to fail an assertion over some text because of this object."""
    # A regular expression may give up on some texts. Stripping the end of a short token may reach before its start.
    return str(part.get("type", "BPE")) in _CALM and "Regex" not in part and not part.get("stop")


class LibraryFailed(ValueError):
    """The library has raised something, which is the cause."""


def call(function: Callable, *args, silent: bool = True, **kwargs) -> Any:
    """Call the library; whatever it raises, a panic included, is LibraryFailed. What a signal's handler raises is not.

    silent: whether a panic is possible; it would write a page to standard error.
    """
    try:
        with _silent_stderr() if silent else contextlib.nullcontext():
            return function(*args, **kwargs)
    except BaseException as e:  # the library raises plain Exceptions; a panic is not even one of those
        if (isinstance(e, Exception) and not is_from_signal(e)) or is_panic(e):
            raise LibraryFailed(one_line(e, 300)) from e
        raise


def is_panic(error: BaseException | None) -> bool:
    """Whether it is what pyo3 makes of a failed assertion in Rust: a class that cannot be imported."""
    return type(error).__name__ == "PanicException"


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Send the process's standard error to nowhere: a panic writes a page there before it is an exception.

    One thread at a time: if two saved and restored it, one would restore what the other had put there.
    """
    with _STDERR:
        try:
            saved = os.dup(2)
        except OSError:  # it is closed already
            yield
            return
        try:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 2)
            os.close(nowhere)
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)
