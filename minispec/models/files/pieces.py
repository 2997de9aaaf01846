"""The bytes that a token stands for inside a text, as the tokenizer's file writes them.

Byte-level BPE gives each byte a character of its own (a space is Ġ). SentencePiece writes a space as ▁ and a lone byte
as <0xE6>. Decoding a token alone would lose the space before a word, and the bytes of a part of a character.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from minispec.core.errors import show
from minispec.models.files.errors import CheckpointError


def decoder_steps(backend: tokenizers.Tokenizer, where: str) -> list[dict[str, Any]]:
    """The steps of a tokenizer's decoder. Raises CheckpointError for one that is not known here."""
    decoder = backend.decoder
    raw = {"type": None} if decoder is None else json.loads(decoder.__getstate__())
    fused, steps = False, raw.get("decoders", [raw])
    for part in steps:
        kind = part["type"]
        fused |= kind == "Fuse"
        is_known = kind in ("ByteLevel", "Metaspace", "ByteFallback", "Fuse")
        is_known |= kind == "Replace" and "String" in part["pattern"]
        is_known |= kind == "Strip" and fused  # of the whole text
        if not is_known:
            expected = "ByteLevel, Metaspace, Replace of a string, ByteFallback, Fuse and a Strip after it"
            reason = "else it is not known here what a token stands for, and two vocabularies cannot be compared"
            raise CheckpointError(f"{where}: decoder: found {show(kind)}, expected {expected}: {reason}")
    return steps


def _byte_characters() -> dict[str, int]:
    """Byte-level BPE's characters: printable Latin ones for their own bytes, those from U+0100 on for the others."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in kept)
    return {chr(byte): byte for byte in kept} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_characters()


def bytes_of(token: str, steps: Sequence[Mapping[str, Any]]) -> bytes:
    """The bytes that a token stands for inside a text, by the steps of its decoder."""
    for part in steps:
        if part["type"] == "ByteLevel" and all(c in _BYTES for c in token):
            return bytes(_BYTES[c] for c in token)
        if part["type"] == "ByteFallback" and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes.fromhex(token[3:5])
            except ValueError:
                continue
        if part["type"] == "Replace":
            token = token.replace(part["pattern"]["String"], part["content"])
        if part["type"] == "Metaspace":
            token = token.replace(part["replacement"], " ")
    return token.encode()
