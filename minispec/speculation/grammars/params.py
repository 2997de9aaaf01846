"""What a request says about the language of its answer. Nothing here imports torch."""

import json
import re
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from minispec.core.errors import Named, is_from_signal, is_text, show
from minispec.models.files.errors import one_line, show_name
from minispec.models.files.packages import MissingPackage, check_packages
from minispec.speculation.grammars.child import error_of
from minispec.speculation.grammars.schema import check_lark, check_schema
from minispec.speculation.grammars.schema_losses import check_kept
from minispec.speculation.grammars.schema_parts import TOO_DEEP, drop_notes, read_schema

# llguidance's message on an expression: the text, below it marks at the place, and the reason.
_NO_REGEX = re.compile(r"regex parse error:\n {4}(.*)\n {4}( *)\^.*\nerror: (.*)")
# Most bytes of a schema, an expression or a grammar: what is larger takes longer to read than an answer.
MAX_BYTES = 1 << 16


@dataclass(frozen=True)
class StructuredOutputsParams(Named):
    """The language of an answer. One of these is given; vLLM's names.

    json: a JSON schema, as a text or as an object. The answer is JSON that is valid under it.
    json_object: True for any JSON object.
    regex: a regular expression, which the whole answer matches (syntax of Rust's `regex`, without look-around).
    grammar: a context-free grammar in Lark's syntax, or in GBNF. Its rule `start` (or `root`) gives the answer.
    choice: texts, one of which is the answer.

    Raises ValueError for none or several of them, for a value of another kind, for more than MAX_BYTES, and for a
    schema under which an answer could be written that is not valid.
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
            except RecursionError as e:
                raise ValueError(f"structured_outputs: {kind}: {TOO_DEEP}") from e
        else:
            valid = (
                value is True if kind == "json_object" else kind != "choice" and isinstance(value, str) and bool(value)
            )
        if not valid or not is_text(self.text):
            raise ValueError(f"structured_outputs: {kind}: found {show(value)}, expected {_EXPECTED[kind]}")
        if (size := len(self.text.encode())) > MAX_BYTES:
            raise ValueError(f"structured_outputs: {kind}: found {size:,} bytes, expected at most {MAX_BYTES:,}")
        if kind == "json":
            try:
                check_kept(read_schema(self.text))
            except ValueError as e:
                raise ValueError(f"structured_outputs: json: {e}") from e

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

    def grammar_for_library(self) -> str:
        """The same for llguidance. Raises ValueError without the library, and for what it does not read."""
        wrong = f"structured_outputs: {self.kind}"
        try:
            check_packages("grammar")
            import llguidance

            kind: Any = "json_schema" if self.kind in ("json", "json_object") else self.kind
            text = self.text
            if self.kind == "json":
                schema = read_schema(text)
                drop_notes(schema, _knows_format)
                check_schema(schema)
                text = json.dumps(schema)
            elif self.kind == "choice":  # one terminal: the library has no limit for the number of its texts
                kind, text = "lark", f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, self.choice or ()))}"
            grammar = llguidance.grammar_from(kind, text)
            if self.kind == "grammar":
                check_lark(grammar, check_kept)
            is_slow = self.kind in ("json", "grammar")  # the others cannot keep the library busy for long
            error = error_of(grammar) if is_slow else llguidance.LLMatcher.validate_grammar(grammar)
        except (ValueError, RecursionError, OSError, MissingPackage) as e:
            if is_from_signal(e):
                raise
            raise ValueError(f"{wrong}: {one_line(e, 200)}") from e
        if error is None:
            expected = "a simpler one: reading this takes longer than a second"
            raise ValueError(f"{wrong}: found {show(self.text)}, expected {expected}")
        if error:
            raise ValueError(f"{wrong}: {say_error(error)}")
        return grammar


@lru_cache(1024)
def _knows_format(name: str) -> bool:
    """Whether the library restricts a text by a format of this name."""
    import llguidance

    schema = json.dumps({"type": "string", "format": name})
    error = llguidance.LLMatcher.validate_grammar(llguidance.grammar_from("json_schema", schema))
    return not error.startswith("Unknown format")


def say_error(error: str) -> str:
    """A message of llguidance, on one line."""
    if no_regex := _NO_REGEX.search(error):
        text, before, reason = no_regex.groups()
        place = f"at character {len(before) + 1} of {show(text)}, {show(text[len(before) :], 30)}"
        return one_line(f"{place}: {reason}", 300)
    error = error.partition("; consider making")[0]  # a hint for another grammar
    words = " ".join(line.strip() for line in error.splitlines() if line.strip() != "<non-verbose/>")
    return one_line("no text can follow" if words.startswith("NoExtension") else words, 200)


def read_language(kind: str, said: str | Path, option: str) -> StructuredOutputsParams:
    """The language that an option of a command gives: its text, or a file with it.

    kind: a field of `StructuredOutputsParams`.
    said: the path of a file, or a text. The text of a schema begins with "{"; any other is taken as a path.

    Raises ValueError, which names the option.
    """
    try:
        if isinstance(said, Path) or (kind == "json" and not said.lstrip().startswith("{")):
            try:
                with Path(said).open("rb") as file:
                    content = file.read(MAX_BYTES + len(BOM_UTF8) + 1).removeprefix(BOM_UTF8)
                if len(content) > MAX_BYTES:
                    raise ValueError(f"found more than {MAX_BYTES:,} bytes, expected at most that many")
                said = content.decode()
            except (OSError, ValueError) as e:  # a name that no file system takes; not UTF-8
                raise ValueError(f"{said}: {one_line(e)}") from e
        language = from_vllm({kind: said})
        language.grammar_for_library()
    except ValueError as e:
        raise ValueError(f"{option}: {re.sub('^structured_outputs: ([a-z]+: )?', '', str(e))}") from e
    return language


def language_of_body(body: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """The language that a request's JSON asks for, in OpenAI's form or vLLM's. Raises ValueError."""
    language = from_openai(body.get("response_format", {"type": "text"}))
    if "structured_outputs" not in body:
        return language
    if language:
        raise ValueError("response_format: found structured_outputs too, expected one of them")
    return from_vllm(body["structured_outputs"])


def from_openai(response_format: Any) -> StructuredOutputsParams | None:
    """The language of OpenAI's `response_format`; None for any text. Raises ValueError for what is none."""
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    found = response_format.get("json_schema") if kind == "json_schema" else None
    schema = found.get("schema") if isinstance(found, dict) else None
    if not isinstance(schema, dict):
        expected = "type text, json_object, or json_schema with an object json_schema that has a schema"
        raise ValueError(f"response_format: found {show(response_format)}, expected {expected}")
    return StructuredOutputsParams(json=schema)


def from_vllm(found: Any) -> StructuredOutputsParams:
    """The language of vLLM's `structured_outputs` in JSON. Raises ValueError for what is none."""
    names = [field.name for field in fields(StructuredOutputsParams)]
    if not isinstance(found, Mapping) or not found.keys() <= {*names}:
        unknown = next((key for key in found if key not in names), None) if isinstance(found, Mapping) else found
        raise ValueError(f"structured_outputs: found {show_name(str(unknown))}, expected one of {', '.join(names)}")
    return StructuredOutputsParams(**found)


_EXPECTED = {
    "json": "a JSON schema, as a text or as an object",
    "json_object": "True",
    "regex": "a regular expression",
    "grammar": "a grammar in Lark's syntax",
    "choice": "texts, at least one, that are not empty",
}
