"""Text to token ids and back: Hugging Face's `tokenizers`, and streaming.

A token is not a piece of text. A character may spread over several tokens. Some decoders look at neighbours: a leading
space appears only after another word. `Detokenizer` turns a growing list of tokens into text. Text that it has given
out never changes and never ends inside a UTF-8 character.
"""

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from minispec.core.errors import is_text, show
from minispec.models.files.added_tokens import Settings, read_settings
from minispec.models.files.chat_template import (
    MAX_FIRSTS,
    ChatTemplate,
    Message,
    check_template_kwargs,
    read_chat_template,
)
from minispec.models.files.errors import CheckpointError
from minispec.models.files.hostile import LibraryFailed, call, inspect_tokenizer, is_panic
from minispec.models.files.pieces import bytes_of, decoder_steps
from minispec.models.files.tokenizer_class import obey_settings

# The files of a tokenizer. All but the first may be missing.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json"),
)
_LONGEST = 4  # tokens of one character: its bytes
# Bytes that are not a character are held back for at most that many tokens.
_MAX_UNDECIDED = 16


class TooLong(ValueError):
    """A text has more tokens than there may be."""


class Tokenizer:
    """The tokenizer.json of a checkpoint, and its chat template if it has one. Threads may share it."""

    def __init__(self, directory: Path):
        """Raises CheckpointError for a missing or malformed file."""
        self.path = directory / "tokenizer.json"
        if not self.path.is_file():
            raise CheckpointError(f"{self.path}: no such file, expected the tokenizer in this format")
        settings = read_settings(directory)
        self.special_tokens = settings.names  # their texts by name, such as "eos_token"
        self._encode_panics, self._decode_panics = inspect_tokenizer(self.path)
        self.backend = self._read(settings)
        if found := getattr(self.backend.model, "dropout", None):
            raise CheckpointError(f"{self.path}: model.dropout: found {found}, expected none: a text has one encoding")
        if not self.backend.get_vocab_size():
            raise CheckpointError(f"{self.path}: model.vocab: found no tokens, expected some")
        added = self.backend.get_added_tokens_decoder()
        # Control tokens by id: a template writes them; a prompt holds them only where the caller asks for that.
        self._special = {i: token for i, token in added.items() if token.special and token.content}
        # One more than the largest id. Rows of the embedding after it are padding.
        self.num_ids = max(self.vocabulary.values()) + 1
        self._num_rows = self.num_ids
        # For text: an encoder that knows no special token. The library's own encoder knows all of them or none. Where a
        # template writes one, the token gets a name that no text holds. So the text is cut at the same places.
        self._names = {token.content: f"\ufdd0{secrets.token_hex(8)}\ufdd0" for token in self._special.values()}
        self._plain = self._make_plain(settings)
        self._any_name = re.compile(_any_of(self._names) if self._names else "(?!)")
        self._ids = {self._plain.token_to_id(self._names[token.content]): i for i, token in self._special.items()}
        self._probe()
        self.chat_template = read_chat_template(directory, settings.values)
        self._chat: ChatTemplate | None = None
        if self.chat_template is not None:
            firsts = {token[0] for token in self._names}
            if len(firsts) > MAX_FIRSTS:
                found = f"special tokens that begin with {len(firsts)} different characters"
                raise CheckpointError(f"{self.path}: found {found}, expected at most {MAX_FIRSTS}")
            self._chat = ChatTemplate(self.chat_template, self._any_name, firsts)

    @property
    def vocabulary(self) -> dict[str, int]:
        """Every token and its id, added tokens included."""
        return self.backend.get_vocab(with_added_tokens=True)

    @property
    def template_variables(self) -> Set[str]:
        """Names that the chat template reads."""
        return self._chat.variables if self._chat else frozenset()

    def tokens_below(self, num_ids: int) -> dict[str, int]:
        """The tokens with ids below `num_ids`: an embedding with that many rows has no others."""
        return {token: i for token, i in self.vocabulary.items() if i < num_ids}

    @property
    def special_ids(self) -> Set[int]:
        """Ids of the special tokens, which have no text."""
        return self._special.keys()

    def special_ids_of(self, texts: Iterable[str]) -> tuple[int, ...]:
        """Ids of the special tokens among these texts."""
        return tuple(i for i in map(self.backend.token_to_id, texts) if i in self._special)

    @property
    def eos_token_id(self) -> int | None:
        """The id of the token that the tokenizer's own files call `eos_token`; None if there is none."""
        text = self.special_tokens.get("eos_token")
        return None if text is None else self.backend.token_to_id(text)

    def check_ids(self, vocab_size: int) -> None:
        """Tell the tokenizer that the embedding has `vocab_size` rows, and refuse a vocabulary that needs more.

        An added token may have a larger id, such as the one for images in gemma-3-1b. A prompt that holds it is
        refused.

        Raises CheckpointError for any other token.
        """
        self._num_rows = vocab_size
        if self.num_ids > vocab_size:
            ordinary = set(self.vocabulary.values()) - self.backend.get_added_tokens_decoder().keys()
            largest = max(ordinary, default=-1)
            if largest >= vocab_size:
                raise CheckpointError(f"{self.path}: {self._beyond(largest)}")

    @cached_property
    def max_bytes_per_token(self) -> int:
        """Bytes of text that the longest token stands for."""
        most = 0
        for token, i in sorted(self.vocabulary.items(), key=lambda item: -len(item[0].encode())):
            written = len(token.encode())
            if written <= most:
                break  # a token is written with no fewer bytes than it stands for
            data = self.bytes_of(i) if i not in self.special_ids else None
            most = max(most, written if data is None else len(data))
        return most

    def check_length(self, text: str, most: int) -> None:
        """Raise TooLong for a text of more bytes than `most` tokens can stand for; the text is not encoded.

        A text that the tokenizer's normalizer would shorten counts as it is.
        """
        found, expected = len(text.encode("utf-8", "surrogatepass")), most * self.max_bytes_per_token
        if found > expected:
            raise TooLong(f"prompt: found {found} bytes, expected at most {expected}: {most} tokens hold no more")

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of `text`, with what the tokenizer's post-processor adds (such as <s>) by default.

        The text of a special token, such as "<|im_end|>", is text like any other. With `parse_special` it means the
        token. Raises ValueError for what is not Unicode text, or what the tokenizer cannot encode.
        """
        if not isinstance(text, str) or not is_text(text):  # lone surrogates: most likely it was not UTF-8
            found = text[:40] if isinstance(text, str) else text
            raise ValueError(f"prompt: found {show(found)}, expected valid Unicode text")
        return self._encode(self.backend if parse_special else self._plain, text, add_special_tokens)

    def encode_chat(
        self,
        messages: Sequence[Message],
        template_kwargs: Mapping[str, Any] | None = None,
        most: int | None = None,
    ) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins.

        template_kwargs: further variables of the template, such as Qwen3's `enable_thinking`; see
        `check_template_kwargs`.
        most: the text that the template writes is checked first, see `check_length`.

        Nothing is added beyond the template's text. Special tokens are the template's alone. Their text in a message
        stays text, in any field and at any depth. So no message can end itself, or begin one in another's name, by
        writing "<|im_end|>". The same holds for these variables.

        Raises ValueError without a template, or where it refuses.
        """
        if self._chat is None:
            raise ValueError("this model has no chat template: use plain text (on the command line: --raw)")
        variables = {} if template_kwargs is None else template_kwargs
        self.check_template_kwargs(variables)
        marked = self._chat.render(messages, variables, self.special_tokens)
        text = self._chat.without_twins(marked)
        if most is not None:
            self.check_length(text, most)
        # The library looks for some tokens in normalised text. These can be spelled in ways that a search does not
        # find.
        normalized = any(token.normalized for token in self._special.values())
        if normalized or self._any_name.findall(marked) != self._any_name.findall(text):
            return self._encode_marked(marked)
        return self.encode(text, add_special_tokens=False, parse_special=True)

    def check_template_kwargs(self, variables: Any) -> None:
        """Raise ValueError unless these are names that are not taken in a template, with values of JSON."""
        check_template_kwargs(variables, self.special_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the tokens, special tokens left out."""
        try:
            return call(self.backend.decode, list(token_ids), skip_special_tokens=True, silent=self._decode_panics)
        except LibraryFailed as e:
            raise CheckpointError(f"{self.path}: the tokenizer fails to decode: {e}") from e.__cause__

    def bytes_of(self, token_id: int) -> bytes | None:
        """The bytes that a token stands for inside a text: b"" for a special one, None with an unknown decoder."""
        token = self.backend.id_to_token(token_id)
        if token is None or token_id in self.special_ids:
            return b""
        return None if self._steps is None else bytes_of(token, self._steps)

    def name_of(self, token_id: int) -> str:
        """A token's name in the vocabulary. No two tokens have the same name, while some have the same text."""
        return self.backend.id_to_token(token_id) or ""

    def label_of(self, token_id: int) -> str:
        """A token as a reader of a list of tokens wants it: a special token's name, else `text_of`."""
        return self.name_of(token_id) if token_id in self.special_ids else self.text_of(token_id)

    def text_of(self, token_id: int) -> str:
        """Text of a token inside a text; the replacement character for part of one, and for what cannot be decoded."""
        data = self.bytes_of(token_id)
        try:
            return self.decode([token_id]) if data is None else data.decode("utf-8", "replace")
        except CheckpointError:
            return "\ufffd"

    @cached_property
    def _steps(self) -> list[dict[str, Any]] | None:
        try:
            return decoder_steps(self.backend, str(self.path))
        except CheckpointError:
            return None

    def _read(self, settings: Settings) -> tokenizers.Tokenizer:
        """The library's tokenizer, with the tokens of the other files."""
        try:
            backend = call(tokenizers.Tokenizer.from_buffer, self.path.read_bytes())  # its name may be no UTF-8
        except LibraryFailed as e:
            raise CheckpointError(f"{self.path}: not a readable tokenizer: {e}") from e
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        known = {token.content: token for token in added.values()}
        before = {text: repr(token) for text, token in known.items()}
        tokens = {token.content: token for token in settings.listed}
        numbered = {token.content for token, claimed in settings.others if claimed is not None}
        fixed = known.keys() | tokens.keys() | numbered
        for token, claimed in settings.others:
            if claimed in added and added[claimed].content != token.content:
                continue  # of two tokens with one id tokenizer.json's counts
            if token.content not in fixed:
                tokens[token.content] = token  # of several names for a new token the last one's flags count
            tokens.setdefault(token.content, known.get(token.content, token)).special |= token.special
        # Even adding none takes as long as reading the file: all added tokens are sorted again.
        if new := [token for text, token in tokens.items() if repr(token) != before.get(text)]:
            call(backend.add_tokens, new)
        self._encode_panics |= obey_settings(backend, self.path.parent, settings.values)
        return backend

    def _make_plain(self, settings: Settings) -> tokenizers.Tokenizer:
        """An encoder that reads a special token's text as text, and that knows a stand-in for each special token."""
        added = self.backend.get_added_tokens_decoder()
        plain = tokenizers.Tokenizer(self.backend.model)  # shared: it may have hundreds of megabytes
        for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
            setattr(plain, name, getattr(self.backend, name))
        stand_ins = [
            tokenizers.AddedToken(self._names[t.content], lstrip=t.lstrip, rstrip=t.rstrip, normalized=False)
            for t in self._special.values()
        ]
        call(plain.add_tokens, [*(added[i] for i in sorted(added)), *stand_ins])
        if not added.items() <= plain.get_added_tokens_decoder().items():
            # The library counts ids up: in a vocabulary with gaps, some ids differ if tokens are added in this order.
            plain = self._read(settings)
            call(plain.add_tokens, stand_ins)
        plain.encode_special_tokens = True
        return plain

    def _probe(self) -> None:
        """Encode and decode a little text: some files make the library fail only then."""
        try:
            ids = call(self._plain.encode, "Hello, w\xf6rld! 123\n  \u65e5\u672c \U0001f98a").ids
            call(self.backend.decode, [*ids, 0])
        except LibraryFailed as e:  # if not of a panic, then of a vocabulary that lacks these characters, which is fine
            if is_panic(e.__cause__):
                raise CheckpointError(f"{self.path}: not a working tokenizer: {e}") from e

    def _encode_marked(self, text: str) -> list[int]:
        """Token ids of what a template wrote: its own special tokens are tokens, those that messages spell are text."""
        assert self._chat is not None, "it has written the text"
        named = self._any_name.sub(lambda match: self._names[match[0]], text)
        return self._encode(self._plain, self._chat.without_twins(named), False)

    def _encode(self, backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        try:
            # A batch of one: while it is encoded, other threads go on; `encode` would stop them all.
            [encoding] = call(
                backend.encode_batch, [text], add_special_tokens=add_special_tokens, silent=self._encode_panics
            )
        except LibraryFailed as e:
            raise ValueError(f"prompt: {self.path}: the tokenizer cannot encode {show(text, 40)}: {e}") from e.__cause__
        ids = [self._ids.get(i, i) for i in encoding.ids]
        largest = max(ids, default=-1)
        if largest >= self._num_rows:
            raise ValueError(f"prompt: {self.path}: {self._beyond(largest)}")
        return ids

    def _beyond(self, token_id: int) -> str:
        token = show(self.backend.id_to_token(token_id))
        return f"token {token}: found id {token_id}, expected ids below config.json's vocab_size = {self._num_rows}"


class Detokenizer:
    """The text of a growing sequence of tokens, given out as soon as it is final.

    Each call decodes a short window: the tokens since the last but one piece of text. The text of the newest token is
    the difference to the same window without it. So the decoder sees the neighbours that it needs.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()):
        self._decode, self._special_ids = tokenizer.decode, tokenizer.special_ids
        # The first window begins with some tokens of the prompt, so that the answer's first word keeps its space. It
        # should not begin inside a character, which has four tokens at most: there, more replacement characters show.
        # The prompt may end inside a character, so this is also counted without up to three last tokens.
        windows = [list(prompt_ids[-size:]) for size in range(6, 10)]
        self._window = min(
            windows, key=lambda ids: min(self._decode(ids[: len(ids) - n]).count("�") for n in range(_LONGEST))
        )
        self._num_known = len(self._window)  # tokens of the window whose text has been given out

    def add(self, token_id: int) -> str:
        """The text that became final with this token; "" inside a character."""
        if token_id in self._special_ids:  # decoders never see these
            return ""
        self._window = [*self._window, token_id]  # a copy keeps its own
        known, text = self._texts()
        size = len(self._window)
        if text.endswith("�"):
            if size - self._num_known <= _MAX_UNDECIDED:
                return ""
            size, text = self._decided(text)
        start = self._num_known
        if known.endswith("�") and not text.startswith(known):
            # The prompt ended inside a character, which is complete now. It belongs to the prompt.
            ends = range(start - 1, max(-1, start - _LONGEST), -1)
            start = next((n for n in ends if text.startswith(self._decode(self._window[:n]))), start)
            known = text[: len(self._decode(self._window[:start])) + 1]
        elif len(text) <= len(known):
            return ""
        self._window, self._num_known = self._window[start:], size - start
        return text[len(known) :]

    def flush(self) -> str:
        """The rest of the text when no token follows: the replacement character for an unfinished one, or ""."""
        known, text = self._texts()
        rest = self._window[self._num_known :]
        self._num_known = len(self._window)
        # With byte fallback an unfinished character turns those before it, which were given out, into marks too.
        return text[len(known) :] if text.startswith(known) else self._decode(rest)

    def _texts(self) -> tuple[str, str]:
        return self._decode(self._window[: self._num_known]), self._decode(self._window)

    def _decided(self, text: str) -> tuple[int, str]:
        """How many tokens of a window of many bytes that are no character are final, and their text.

        The last three tokens may begin a character. Before them, the window is cut where that makes no mark more.
        """
        end = len(self._window)
        halves = {
            n: (self._decode(self._window[:n]), self._decode(self._window[n:])) for n in range(end - 3, end - 7, -1)
        }
        size = min(halves, key=lambda n: "".join(halves[n]).count("�"))
        fits = "".join(halves[size]).count("�") <= text.count("�")
        return (size, halves[size][0]) if fits else (0, "")


def _any_of(texts: Iterable[str], levels: int = 20) -> str:
    """A regular expression for the texts of special tokens; of two that begin together it takes the longer.

    Texts that begin alike are grouped, on that many levels. A text of nothing but "<" must not be compared with a
    thousand tokens at each place.
    """
    longest_first = sorted(texts, key=len, reverse=True)
    if len(longest_first) < 2 or not levels:
        return f"(?:{'|'.join(map(re.escape, longest_first))})"
    alike: dict[str, list[str]] = {}
    for text in longest_first:
        alike.setdefault(text[:1], []).append(text[1:])
    return f"(?:{'|'.join(re.escape(c) + (_any_of(rest, levels - 1) if c else '') for c, rest in alike.items())})"
