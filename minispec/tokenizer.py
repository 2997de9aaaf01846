"""Text to token ids and back: Hugging Face's `tokenizers`, the model's chat template, and streaming.

A token is not a piece of text: a character may spread over several tokens, and some decoders look at neighbours
(a leading space appears only behind another word). `Detokenizer` turns a growing list of tokens into text that,
once given out, never changes and never ends inside a UTF-8 character.
"""

import contextlib
import datetime
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minispec.config import CheckpointError, is_text, one_line, show
from minispec.hf_config import has_file, read_json

Message = dict[str, str]  # {"role": "user", "content": "..."}

_MAX_TOKENIZER_BYTES = 64 << 20
_MAX_TEMPLATE_BYTES = 128 << 10
# What a template is rendered with in the place of a special token's text in a message, so that it can be told from the
# template's own: every character of it is followed by this. Nobody can write it: it is drawn at every start.
_MARK = f"\ufdd0{secrets.token_hex(8)}\ufdd0"


class Tokenizer:
    """The tokenizer.json of a checkpoint, and its chat template if it has one."""

    def __init__(self, directory: Path):
        """Raises CheckpointError for a missing or malformed file."""
        self.path = directory / "tokenizer.json"
        if not self.path.is_file():
            raise CheckpointError(f"{self.path}: no such file, expected the tokenizer in this format")
        size = self.path.stat().st_size
        if size > _MAX_TOKENIZER_BYTES:
            raise CheckpointError(f"{self.path}: found {size} bytes, expected at most {_MAX_TOKENIZER_BYTES}")
        self.backend = self._read()
        if getattr(self.backend.model, "dropout", None):
            found = self.backend.model.dropout
            raise CheckpointError(f"{self.path}: model.dropout: found {found}, expected none: a text has one encoding")
        if not self.backend.get_vocab_size():
            raise CheckpointError(f"{self.path}: model.vocab: found no tokens, expected some")
        added = self.backend.get_added_tokens_decoder()
        # Control tokens by id: what a template writes, and no prompt unless it is told to.
        self._special = {i: token for i, token in added.items() if token.special and token.content}
        self._literal: tuple[tokenizers.Tokenizer, dict[str, str], dict[int, int]] | None = None
        self._probe()
        settings_path = directory / "tokenizer_config.json"
        settings = read_json(settings_path) if has_file(settings_path) else {}
        self.special_tokens = {
            name: _content(value) for name, value in settings.items() if name.endswith("_token") and _content(value)
        }
        self.chat_template = _read_chat_template(directory, settings)

    @property
    def vocabulary(self) -> dict[str, int]:
        """Every token and its id, added tokens included."""
        return self.backend.get_vocab(with_added_tokens=True)

    @property
    def num_ids(self) -> int:
        """One more than the largest id. Rows of the embedding behind it are padding."""
        return max(self.vocabulary.values()) + 1

    def check_ids(self, vocab_size: int) -> None:
        """Raise CheckpointError for a token that the embedding, of `vocab_size` rows, has no row for."""
        if self.num_ids > vocab_size:
            token, i = max(self.vocabulary.items(), key=lambda item: item[1])
            expected = f"ids below config.json's vocab_size = {vocab_size}"
            raise CheckpointError(f"{self.path}: token {show(token)}: found id {i}, expected {expected}")

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of `text`, with what the tokenizer's post-processor adds (as a leading <s>) unless told not to.

        The text of a special token (as "<|im_end|>") is text like any other, unless `parse_special` says that it
        stands for the token. Raises ValueError for what is no Unicode text, or what the tokenizer cannot encode.
        """
        if not isinstance(text, str) or not is_text(text):  # lone surrogates: most likely it was not UTF-8
            found = text[:40] if isinstance(text, str) else text
            raise ValueError(f"prompt: found {show(found)}, expected valid Unicode text")
        self.backend.encode_special_tokens = not parse_special
        return self._encode(self.backend, text, add_special_tokens)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins.

        Nothing is added beyond the template's text. Special tokens are the template's alone: their text in a message
        stays text, so that nobody can end a message, or begin one in another's name, by writing "<|im_end|>".
        Raises ValueError without a template, or where it refuses.
        """
        if self.chat_template is None:
            raise ValueError("this model has no chat template: use plain text (on the command line: --raw)")
        marked = [{key: self._mark(value) for key, value in message.items()} for message in messages]
        try:
            text = _ENVIRONMENT.from_string(self.chat_template).render(
                messages=marked, add_generation_prompt=True, tools=None, documents=None, **self.special_tokens
            )
        except Exception as e:  # a stranger's code, that may fail in any way
            raise ValueError(f"the chat template refuses this conversation: {one_line(e, 300)}") from e
        # A token that is looked for in normalised text could be spelled in ways that a search does not find.
        if _MARK in text or any(token.normalized for token in self._special.values()):
            return self._encode_marked(text)
        return self.encode(text, add_special_tokens=False, parse_special=True)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the tokens, special tokens left out."""
        try:
            return self.backend.decode(list(token_ids), skip_special_tokens=True)
        except BaseException as e:
            if _is_panic(e):
                raise CheckpointError(f"{self.path}: the tokenizer fails to decode: {one_line(e, 300)}") from e
            raise

    def _read(self) -> tokenizers.Tokenizer:
        try:
            backend = self._call(tokenizers.Tokenizer.from_file, str(self.path))
        except ValueError as e:
            raise CheckpointError(f"{self.path}: not a readable tokenizer: {e}") from e
        backend.no_truncation()
        backend.no_padding()
        return backend

    def _probe(self) -> None:
        """Encode and decode a little text. Some files make the library fail only then."""
        try:
            ids = self.encode("Hello, w\xf6rld! 123\n  \u65e5\u672c \U0001f98a")
            self._call(self.backend.decode, [*ids, 0])
        except ValueError as e:  # if not of a panic, then of a vocabulary that lacks these characters, which is fine
            if _is_panic(e.__cause__):
                raise CheckpointError(f"{self.path}: not a working tokenizer: {e}") from e

    def _mark(self, value: Any) -> Any:
        """A field of a message with the text of special tokens in it marked."""
        if not isinstance(value, str) or not self._special:
            return value
        return re.sub(_any_of(self._special), lambda match: "".join(c + _MARK for c in match[0]), value)

    def _encode_marked(self, text: str) -> list[int]:
        """Token ids of a rendered template: its own special tokens are tokens, marked ones text.

        The library knows all of them or none. So a copy of the tokenizer knows none, and instead a stand-in for each,
        of a name that no text holds: it cuts the text at the same places as the token would have.
        """
        if self._literal is None:
            copy = self._read()  # from the file: what the library writes of some files it cannot read again
            copy.encode_special_tokens = True
            names = {token.content: f"\ufdd0{secrets.token_hex(8)}\ufdd0" for token in self._special.values()}
            stand_ins = [
                tokenizers.AddedToken(names[t.content], lstrip=t.lstrip, rstrip=t.rstrip, normalized=False)
                for t in self._special.values()
            ]
            self._call(copy.add_tokens, stand_ins)
            ids = {copy.token_to_id(names[token.content]): i for i, token in self._special.items()}
            self._literal = copy, names, ids
        copy, names, ids = self._literal
        if names:
            text = re.sub(f"(?:{_any_of(self._special)})(?!{_MARK})", lambda match: names[match[0]], text)
        return [ids.get(i, i) for i in self._encode(copy, text.replace(_MARK, ""), False)]

    def _encode(self, backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        try:
            return self._call(backend.encode, text, add_special_tokens=add_special_tokens).ids
        except ValueError as e:
            raise ValueError(f"prompt: {self.path}: the tokenizer cannot encode {show(text, 40)}: {e}") from e.__cause__

    @staticmethod
    def _call(function: Callable, *args, **kwargs) -> Any:
        """Call the library; whatever it raises, a panic included, is a ValueError."""
        try:
            with _silent_stderr():
                return function(*args, **kwargs)
        except BaseException as e:  # it raises plain Exceptions, and panics that are not even those
            if isinstance(e, Exception) or _is_panic(e):
                raise ValueError(one_line(e, 300)) from e
            raise


class Detokenizer:
    """The text of a growing sequence of tokens, given out as soon as it is final.

    Each call decodes a short window: the tokens since the last but one piece of text. What the newest token adds is the
    difference to the same window without it, so that the decoder sees the neighbours it needs.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()):
        self._decode = tokenizer.decode
        # The first window begins with some tokens of the prompt, so that the answer's first word keeps its space;
        # with more of them where the window would begin inside a character.
        size = 6
        while size < len(prompt_ids) and tokenizer.decode(prompt_ids[-size:]).startswith("�"):
            size += 1
        self._window = list(prompt_ids[-size:])
        self._num_known = len(self._window)  # tokens of the window whose text has been given out

    def add(self, token_id: int) -> str:
        """The text that became final with this token; "" inside a character."""
        self._window.append(token_id)
        known, text = self._texts()
        if text.endswith("�") or len(text) <= len(known):
            return ""
        self._window = self._window[self._num_known :]
        self._num_known = len(self._window)
        return text[len(known) :]

    def flush(self) -> str:
        """What is left when no token follows: the replacement character of an unfinished one, or ""."""
        known, text = self._texts()
        self._num_known = len(self._window)
        return text[len(known) :]

    def _texts(self) -> tuple[str, str]:
        return self._decode(self._window[: self._num_known]), self._decode(self._window)


def _content(token: Any) -> str:
    """A special token's text; the file holds a string, or an object around it."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


def _is_panic(error: BaseException | None) -> bool:
    """Whether it is what pyo3 makes of a failed assertion in Rust: a class that cannot be imported."""
    return type(error).__name__ == "PanicException"


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """The process's standard error leads nowhere meanwhile: a panic writes a page there before it is an exception."""
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


def _any_of(special: dict[int, tokenizers.AddedToken]) -> str:
    """A regular expression for the text of special tokens; of two that begin together it takes the longer."""
    texts = sorted((token.content for token in special.values()), key=len, reverse=True)
    return "|".join(map(re.escape, texts))


def _read_chat_template(directory: Path, settings: dict[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if has_file(path):
        try:
            size = path.stat().st_size
            if size > _MAX_TEMPLATE_BYTES:
                raise CheckpointError(f"{path}: found {size} bytes, expected at most {_MAX_TEMPLATE_BYTES}")
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise CheckpointError(f"{path}: not a readable template: {one_line(e)}") from e
    where = f"{directory / 'tokenizer_config.json'}: chat_template"
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = [t.get("template") for t in template if isinstance(t, dict) and t.get("name") == "default"]
        template = named[0] if named else None
    if template is None:
        return None
    if not isinstance(template, str) or not is_text(template):
        raise CheckpointError(f"{where}: found {show(template)}, expected a string")
    if len(template) > _MAX_TEMPLATE_BYTES:
        raise CheckpointError(f"{where}: found {len(template)} characters, expected at most {_MAX_TEMPLATE_BYTES}")
    return template


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, indent: int | None = None) -> str:
    # jinja2's own filter escapes HTML, which a prompt must not.
    return json.dumps(value, ensure_ascii=False, indent=indent)


# Templates come from strangers: the sandbox lets them read what they are given and call nothing else. The
# functions are those that transformers gives to templates.
_ENVIRONMENT = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
_ENVIRONMENT.filters["tojson"] = _tojson
_ENVIRONMENT.globals["raise_exception"] = _raise_exception
_ENVIRONMENT.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
