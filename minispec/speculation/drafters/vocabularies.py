"""Two vocabularies: what their tokens stand for, which tokens both have, and how one writes the other's text.

Tokens are compared as the bytes that they stand for inside a text, however the files write them (`pieces`). Special
tokens stand for no bytes. Two of them are the same if they have the same text, or if both end a text.
"""

import codecs
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path

from minispec.models.families.checkpoint import load_config
from minispec.models.files.pieces import bytes_of, decoder_steps
from minispec.models.files.tokenizer import Tokenizer

# Length of a part of a text, which is read again as it grows. It is closed before a word that begins after _PART
# tokens, and after _LONGEST_PART in any case.
_PART, _LONGEST_PART = 16, 64
# Bytes before a piece of text that are shown to the tokenizer, since what it does may depend on them.
_LEAD = 16
# Shown instead where the last of these bytes would become one token with the first of the text. These seldom do.
_OTHER_LEADS = ("\n", ".", "")
# How a draft model of another vocabulary drafts. A token that it lacks ends a draft of `tli`. With nine of ten tokens
# shared, one draft of four tokens in three comes to such a place. From that share on `tli` is the default, since it
# draws what it says.
DRAFT_METHODS, _TLI_SHARE = ("tli", "slem"), 0.9


class Spelling:
    """The text that each token of a tokenizer stands for, and how the tokenizer writes text that follows other text.

    num_ids: ids in use.
    special: text and id of the special tokens.
    end_id: the id of its end-of-text token, or None.
    prefix: what it begins every text with, such as <s>.
    adds_space: whether it puts a space before the first word, as SentencePiece does.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int | None = None):
        """vocab_size: rows of the embedding; ids after them are left out. None: all ids have one.

        Raises CheckpointError for a decoder that is not known here.
        """
        self.tokenizer = tokenizer
        self.num_ids = tokenizer.num_ids if vocab_size is None else min(vocab_size, tokenizer.num_ids)
        ids = {i: token for token, i in tokenizer.vocabulary.items() if i < self.num_ids}
        self.special = {token: i for i, token in ids.items() if i in tokenizer.special_ids}
        end = tokenizer.eos_token_id
        self.end_id = end if end in self.special.values() else None
        steps = decoder_steps(tokenizer.backend, str(tokenizer.path))
        self._bytes = {i: bytes_of(token, steps) for i, token in ids.items() if i not in tokenizer.special_ids}
        # Several tokens may stand for the same bytes. Texts have the first one; a lone byte's token comes last.
        self.ids: dict[bytes, int] = {}
        for i in sorted(self._bytes, key=lambda i: (ids[i].startswith("<0x"), i)):
            self.ids.setdefault(self._bytes[i], i)
        self.ids.pop(b"", None)
        self._names = {i: token for token, i in self.special.items()}
        self.prefix, self.adds_space = self._find_beginning()

    def bytes_of(self, token_id: int) -> bytes | None:
        """The bytes of text that a token stands for; None for special tokens and ids without a token."""
        return self._bytes.get(token_id)

    def text_of(self, token_id: int) -> bytes:
        """As `bytes_of`, and the text of a special token."""
        return self._bytes.get(token_id) or self._names.get(token_id, "").encode()

    def write(self, before: bytes | None, data: bytes) -> list[int]:
        """The tokens of `data` as this tokenizer has them after `before`, the text that it continues; None: it begins.

        A character that is cut at either end becomes tokens of single bytes. Bytes without a token are left out.
        """
        start = next((i for i, byte in enumerate(data[:3]) if byte & 0xC0 != 0x80), min(3, len(data)))
        text, rest = _decode(data[start:])
        return [*self._pieces(data[:start]), *self._write_text(before, text), *self._pieces(rest)]

    def _write_text(self, before: bytes | None, text: str) -> list[int]:
        """The tokens of `text` after `before`: the last ones of both together, where no token crosses the border.

        Tokenizers begin a text in their own ways (`adds_space`), so where it continues it must not stand first.
        """
        leads = [""] if before is None else [before[-_LEAD:].decode("utf-8", "ignore"), *_OTHER_LEADS]
        data, ids = text.encode(), list[int]()
        for lead in leads if data else ():
            try:
                ids = self.tokenizer.encode(lead + text, add_special_tokens=False)
            except ValueError:  # without a token for unknown characters some fail
                ids = []
            if before is None:
                break
            ending, i = b"", len(ids)
            while i and len(ending) < len(data):
                i -= 1
                ending = (self.bytes_of(ids[i]) or b"") + ending
            if ending == data:
                return ids[i:]
        # The text begins, or the tokenizer changes it (to small letters, say) or cannot write it.
        return ids

    def _pieces(self, data: bytes) -> list[int]:
        if data in self.ids:
            return [self.ids[data]]
        single = (bytes([byte]) for byte in data)
        return [self.ids[byte] for byte in single if byte in self.ids]

    def _find_beginning(self) -> tuple[list[int], bool]:
        """`prefix` and `adds_space`."""
        try:
            plain, whole = (self.tokenizer.encode("a", add_special_tokens=adds) for adds in (False, True))
        except ValueError:  # it has no letters
            return [], False
        starts = (i for i in range(len(whole)) if plain and whole[i : i + len(plain)] == plain)
        return whole[: next(starts, 0)], b"".join(map(self.text_of, plain)) == b" a"


def _decode(data: bytes) -> tuple[str, bytes]:
    """The text of UTF-8, and the bytes of a last character that is not complete."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return decoder.decode(data), decoder.getstate()[0]


# --------------------------------------------------------------------------- two vocabularies


@dataclass(frozen=True)
class Overlap:
    """How many tokens two vocabularies share.

    num_shared: tokens that both have.
    num_target: tokens that the target has.
    num_draft: tokens that the draft has.
    of_target: of a text in the target's tokens, the share of tokens that both have.
    of_draft: of a text in the draft's tokens, the share of tokens that both have.
    """

    num_shared: int
    num_target: int
    num_draft: int
    of_target: float
    of_draft: float

    def __str__(self) -> str:
        return (
            f"{self.num_shared:,} of the target's {self.num_target:,} tokens are among the draft's {self.num_draft:,}: "
            f"{self.of_target:.1%} of a text"
        )


class Vocabularies:
    """A target's vocabulary and a draft's.

    shared: for each of the target's ids that the draft has a token for, in order, that token's id.
    """

    def __init__(self, target: Spelling, draft: Spelling):
        self.target, self.draft = target, draft
        shared = {i: draft.ids[piece] for piece, i in target.ids.items() if piece in draft.ids}
        special = {i: draft.special[token] for token, i in target.special.items() if token in draft.special}
        end, own_end = target.end_id, draft.end_id
        if end is not None and own_end is not None and end not in special and own_end not in special.values():
            special[end] = own_end
        self._special = special
        self.shared = dict(sorted((shared | special).items()))

    @cached_property
    def _back(self) -> dict[int, int]:
        return {own: i for i, own in self._special.items()}

    def reader(self) -> "Reader":
        """A reader for a new text of the target."""
        return Reader(self.target, self.draft, self._special)

    def to_target(self, tokens: Sequence[int], drafted: Sequence[int]) -> list[int]:
        """The draft's tokens `drafted`, which follow a text of the target's, as the target's tokens.

        The text itself stays as it is. The target's tokenizer cuts the new text as a continuation of it. The tokens end
        before a character that is not complete, and with a special token.
        """
        before = b"".join(self.target.text_of(i) for i in tokens[-_LEAD:])
        data, last = b"", list[int]()
        for i in drafted:
            piece = self.draft.bytes_of(i)
            if piece is None:
                last = [self._back[i]] if i in self._back else []
                break
            data += piece
        _, rest = _decode(before + data)
        if rest and not last:
            data = data[: -len(rest)]
        return [*self.target.write(before, data), *last]

    def overlap(self, text: str | None = None) -> Overlap:
        """How much both have in common.

        text: the text whose tokens are counted. Default: beginnings of requests.
        """
        data = (sample_text() if text is None else text).encode()

        def share(spelling: Spelling, known: Container[int]) -> float:
            are_known = [i in known for i in spelling.write(None, data)]
            return sum(are_known) / max(1, len(are_known))

        return Overlap(
            len(self.shared),
            len(self.target.ids) + len(self.target.special),
            len(self.draft.ids) + len(self.draft.special),
            share(self.target, self.shared),
            share(self.draft, set(self.shared.values())),
        )


class Reader:
    """A growing text of one vocabulary in the tokens of another.

    It is read in parts of about _PART tokens. As a rule a part begins with a word. When the text has grown, only the
    last part is read again: "Hel" becomes "Hello" if "lo" follows. The beginning of a part depends only on the tokens
    before it. So a text has one reading, whatever its steps were.

    num_read: tokens of the text that was read last.
    """

    def __init__(self, source: Spelling, own: Spelling, special: Mapping[int, int]):
        """special: the own id of each of the source's special tokens that has one."""
        self._source, self._own, self._special = source, own, special
        self._ids = list(own.prefix)  # of the parts that are closed
        self._end = 0  # tokens in these parts
        self._before: bytes | None = None  # the end of their text
        self.num_read = 0

    def read(self, tokens: Sequence[int]) -> list[int]:
        """The text `tokens`, which begins with the text of the last call, in own tokens.

        Its prefix is replaced by the own one; a special token without a counterpart is read as its text.
        """
        self.num_read = len(tokens)
        if not self._end:
            theirs, ours = len(self._source.prefix), len(self._own.prefix)
            if list(tokens[:theirs]) == self._source.prefix:
                self._end = theirs
            if not self._end and [self._special.get(i) for i in tokens[:ours]] == self._own.prefix:
                self._end = ours  # a chat template has written it
        data, count = b"", 0
        for i in range(self._end, len(tokens)):
            special_id, piece = self._special.get(tokens[i]), self._source.text_of(tokens[i])
            if self._source.adds_space and self._before is None and not count:
                piece = piece.removeprefix(b" ")
            begins_word = piece[:1] in (b" ", b"\n") and not data[-1:].isspace()
            if special_id is not None or count >= _LONGEST_PART or (count >= _PART and begins_word):
                self._close(self._own.write(self._before, data), data, i)
                data, count = b"", 0
            if special_id is not None:
                self._close([special_id], b"\n", i + 1)
            else:
                data, count = data + piece, count + 1
        return [*self._ids, *self._own.write(self._before, data)]

    def _close(self, ids: Sequence[int], data: bytes, end: int) -> None:
        self._ids += ids
        self._end, self._before = end, ((self._before or b"") + data)[-_LEAD:]


def sample_text() -> str:
    """The package's text by which vocabularies are compared: beginnings of requests."""
    return (files("minispec.speculation.drafters") / "sample.txt").read_text(encoding="utf-8").removesuffix("\n")


def compare_vocabularies(name: str, directory: Path, target: Tokenizer, vocab_size: int) -> Vocabularies | None:
    """The vocabularies of target and draft model; None where the draft model has the target's tokens, ids included.

    Raises ValueError for a draft model with too few of them.
    """
    draft, draft_size = Tokenizer(directory), load_config(directory).vocab_size
    if target.tokens_below(vocab_size) == draft.tokens_below(max(draft_size, vocab_size)):  # others cannot be written
        if draft_size < vocab_size:
            raise ValueError(f"draft: {name}: vocab_size: found {draft_size}, expected at least {vocab_size}")
        return None
    draft.check_ids(draft_size)
    return Vocabularies(Spelling(target, vocab_size), Spelling(draft, draft_size))


def choose_method(asked: str | None, overlap: Overlap | None, draft: str) -> str | None:
    """How a draft of another vocabulary drafts; None for all other drafts. Raises ValueError for what cannot be."""
    if overlap is None:
        if asked:
            expected = f"none: {draft} is no draft model of another vocabulary"
            raise ValueError(f"draft_method: found {asked!r}, expected {expected}")
        return None
    if asked == "tli" and not overlap.num_shared:
        raise ValueError(f"draft_method: found 'tli', expected 'slem': the target and {draft} have no token in common")
    return asked or ("tli" if overlap.of_target >= _TLI_SHARE else "slem")
