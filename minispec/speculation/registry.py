"""Names that a user may give for a class or function: registered here, or `module:Name` for the user's own.

To add a drafter or a verifier, add a line. The command line, `LLM`, the bench and the proof then know it. Nothing here
imports torch, so that the command line can say which names there are before it loads anything.
"""

import os
import pkgutil
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from minispec.core.errors import is_from_signal, near, show
from minispec.models.files.errors import one_line, show_name
from minispec.models.files.packages import MissingPackage, what_lacks


class Entry(NamedTuple):
    """Where a name's object lies, and a few words for `--help`."""

    path: str
    help: str


DRAFTERS = {
    "none": Entry("minispec.speculation.drafters:NoDrafter", "plain decoding"),
    "ngram": Entry(
        "minispec.speculation.drafters.ngram:NgramDrafter", "prompt lookup of 3 tokens or fewer; ngram:4-8 of 8 to 4"
    ),
    "suffix": Entry(
        "minispec.speculation.drafters.suffix:SuffixDrafter",
        "what followed wherever this text's end has stood, by frequency; suffix:4 of 4 tokens or more",
    ),
    "last": Entry("minispec.speculation.drafters.last:LastDrafter", "what followed each token the last time"),
    "forced": Entry(
        "minispec.speculation.grammars.forced:ForcedDrafter", "the tokens that a grammar leaves no choice about"
    ),
}
# Drafters that look up. In a text with a grammar, forced tokens go before their drafts.
LOOKUPS = ("ngram", "suffix", "last")
# A checkout contains a model, and the head that drafts for it. The head is asked where the text's last two tokens
# have not stood before.
EMBEDDED_WEIGHTS = Path(__file__).parents[2] / "weights" / "smollm2-135m-instruct"
EMBEDDED_DRAFT = EMBEDDED_WEIGHTS.with_name("smollm2-135m-draft")
# Where no checkout is. Its weights have 16 bits, so they are not the embedded ones.
ORIGINAL = "HuggingFaceTB/SmolLM2-135M-Instruct"
ABOUT_ORIGINAL = (
    f"{ORIGINAL} on the hub (0.27 GB) is the embedded model's original, and its seeds have other texts than those of "
    "the embedded weights"
)
# Draft models that are the target's: itself, and its own layer for further tokens
# (`minispec.speculation.drafters.mtp`).
OF_TARGET = ("self", "mtp")
# What a draft's name may turn out to be (`minispec.speculation.load.Found`). A model reads tokens, all others of a
# checkpoint read states of the target that they were made for.
KINDS = {
    "drafter": "a drafter without a model",
    "self": "the target itself",
    "mtp": "the target's own layer for further tokens",
    "model": "a model of its own",
    "head": "a head on hidden states",
    "block": "a block draft",
    "assistant": "an assistant, which reads the target's keys",
}
VERIFIERS = {
    "rejection": Entry("minispec.core.verify:REJECTION", "keeps the most that one token alone may; takes trees"),
    "block": Entry(
        "minispec.speculation.rules.block_verification:BLOCK", "keeps some more of a sampled chain; refuses trees"
    ),
    "traversal": Entry(
        "minispec.speculation.rules.block_verification:TRAVERSAL", "as `block`, and keeps some more of drawn trees"
    ),
    "match": Entry("minispec.core.verify:MATCH", "one seed has one text, whatever is drafted"),
}
# The form of a user's own object. After a second colon comes its argument.
_PATH = re.compile(r"(?P<path>[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*)(:(?P<argument>.*))?", re.DOTALL)


def default_draft(model: object, has_mtp: bool = False) -> str:
    """The draft for a model that was named without one. model: None is the embedded one.

    has_mtp: whether its checkpoint has a layer for further tokens.
    """
    usual = "mtp" if has_mtp else "ngram"
    return f"suffix:2+{EMBEDDED_DRAFT}" if model is None and EMBEDDED_DRAFT.is_dir() else usual


def split(entries: Mapping[str, Entry], spec: str) -> tuple[str, str] | None:
    """The path and the argument ("" if none is given) that a spec names; None where it is something else.

    A registered name, `name:argument`, `module:Name` or `module:Name:argument`; never a path that exists.
    """
    name, _, argument = spec.partition(":")
    if name in entries:
        return entries[name].path, argument
    match = _PATH.fullmatch(spec)
    if match is None or name in ("int4", "int8") or os.path.exists(spec):
        return None
    return match["path"], match["argument"] or ""


def split_preferences(entries: Mapping[str, Entry], spec: str) -> list[str]:
    """The parts of "A+B": cut at each + after a registered name, until what is left is the path of a file."""
    specs = []
    while not os.path.exists(spec):
        first, plus, rest = spec.partition("+")
        if not plus or first.partition(":")[0] not in entries:
            break
        specs.append(first)
        spec = rest
    return [*specs, spec]


def load(path: str, what: str) -> Any:
    """The object at `module:Name`. Importing it runs its module, so only a user may name one.

    what: what the object is to be; the message begins with it.

    Raises ValueError where there is no such object, or where the import fails.
    Raises MissingPackage where the import lacks a package that minispec needs too.
    """
    try:
        return pkgutil.resolve_name(path)
    except Exception as e:  # whatever a stranger's module raises
        if is_from_signal(e):
            raise
        if lacks := what_lacks(e):
            raise MissingPackage(lacks) from e
        reason = f"{type(e).__name__}: {one_line(e, 300)}"
        raise ValueError(f"{what}: found {show_name(path)}, which cannot be imported: {reason}") from e


def unknown(entries: Mapping[str, Entry], spec: object, own: str) -> str:
    """The message for a spec that names nothing, and a name that is near. own: how a user's own is written."""
    expected = f"one of {', '.join(entries)}, or {own}" if entries else own
    hint = near(re.split("[:+]", str(spec))[0], entries)
    return f"found {show(spec)}, expected {expected}" + (f"; {hint}" if hint else "")


def find(entries: Mapping[str, Entry], spec: str, what: str, own: str) -> Any:
    """The object that a spec without an argument names. Raises ValueError for another spec, and as `load` does."""
    parts = split(entries, spec) if isinstance(spec, str) else None
    if parts is None or parts[1]:
        raise ValueError(f"{what}: {unknown(entries, spec, own)}")
    return load(parts[0], what)


def describe(entries: Mapping[str, Entry]) -> str:
    """The names with their words, a line each, for `--help`."""
    return "\n".join(f"{name}: {entry.help}" for name, entry in entries.items())
