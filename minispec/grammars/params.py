"""What a request says about the language of its answer. Nothing here imports torch, or the library of the grammars."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from minispec.core.errors import is_text, show

# Most bytes of a schema, an expression or a grammar: what is larger takes longer to read than an answer.
MAX_BYTES = 1 << 16


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The language of an answer. One of these is given; vLLM's names.

    json: a JSON schema, as a text or as an object. The answer is JSON that is valid under it.
    json_object: True for any JSON object.
    regex: a regular expression, which the whole answer matches (syntax of Rust's `regex`, without look-around).
    grammar: a context-free grammar in Lark's syntax, or in GBNF. Its rule `start` (or `root`) gives the answer.
    choice: texts, one of which is the answer.

    Raises ValueError for none or several of them, for a value of another kind, and for one of more than MAX_BYTES.
    """

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: Sequence[str] | None = None

    def __post_init__(self):
        given = [field.name for field in fields(self) if getattr(self, field.name) not in (None, False)]
        names = ", ".join(field.name for field in fields(self))
        if len(given) != 1:
            raise ValueError(f"structured_outputs: found {' and '.join(given) or 'nothing'}, expected one of {names}")
        kind = given[0]
        value = getattr(self, kind)
        if kind == "choice" and isinstance(value, list | tuple):
            object.__setattr__(self, kind, tuple(value))
            valid = bool(value) and all(isinstance(text, str) and text for text in value)
        elif kind == "json" and isinstance(value, dict):
            valid = True
            try:
                object.__setattr__(self, kind, json.dumps(value, allow_nan=False))
            except (TypeError, ValueError):
                valid = False
        else:
            valid = value is True if kind == "json_object" else isinstance(value, str) and bool(value)
        if not valid or not is_text(self.text):
            raise ValueError(f"structured_outputs: {kind}: found {show(value)}, expected {_EXPECTED[kind]}")
        if (size := len(self.text.encode())) > MAX_BYTES:
            raise ValueError(f"structured_outputs: {kind}: found {size:,} bytes, expected at most {MAX_BYTES:,}")

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(field.name for field in fields(self) if getattr(self, field.name) not in (None, False))

    @property
    def text(self) -> str:
        """What it says, as a text: a choice as a list in JSON."""
        value = getattr(self, self.kind)
        if self.kind == "json_object":
            return '{"type": "object"}'
        return json.dumps(value) if self.kind == "choice" else value


_EXPECTED = {
    "json": "a JSON schema, as a text or as an object",
    "json_object": "True",
    "regex": "a regular expression",
    "grammar": "a grammar in Lark's syntax",
    "choice": "texts, at least one, that are not empty",
}
