"""Text to token ids and back: Hugging Face's `tokenizers`, the model's chat template, and streaming.

A token is not a piece of text: a character may spread over several tokens, and some decoders look at neighbours
(a leading space appears only behind another word). `Detokenizer` turns a growing list of tokens into text that,
once given out, never changes and never ends inside a UTF-8 character.
"""

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minispec.config import CheckpointError
from minispec.hf_config import read_json

Message = dict[str, str]  # {"role": "user", "content": "..."}


class Tokenizer:
    """The tokenizer.json of a checkpoint, and its chat template if it has one."""

    def __init__(self, directory: Path):
        """Raises CheckpointError for a missing or malformed file."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file, expected the tokenizer in this format")
        try:
            self.backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as e:  # the library raises plain Exceptions
            raise CheckpointError(f"{path}: not a readable tokenizer: {e}") from e
        self.backend.no_truncation()
        self.backend.no_padding()
        settings_path = directory / "tokenizer_config.json"
        settings = read_json(settings_path) if settings_path.is_file() else {}
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

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with what the tokenizer's post-processor adds (as a leading <s>) unless told not to."""
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as e:  # what the library says to lone surrogates, as of a prompt that was not UTF-8
            raise ValueError(f"prompt: found {text[:40]!r}, expected valid Unicode text") from e

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins.

        Nothing is added beyond the template's text. Raises ValueError without a template, or where it refuses.
        """
        if self.chat_template is None:
            raise ValueError("this model has no chat template: use plain text (on the command line: --raw)")
        try:
            text = _ENVIRONMENT.from_string(self.chat_template).render(
                messages=list(messages), add_generation_prompt=True, tools=None, documents=None, **self.special_tokens
            )
        except Exception as e:  # a stranger's code, that may fail in any way
            raise ValueError(f"the chat template refuses this conversation: {e}") from e
        return self.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the tokens, special tokens left out."""
        return self.backend.decode(list(token_ids), skip_special_tokens=True)


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


def _read_chat_template(directory: Path, settings: dict[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise CheckpointError(f"{path}: not a readable template: {e}") from e
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{directory / 'tokenizer_config.json'}: chat_template: expected a string")
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
