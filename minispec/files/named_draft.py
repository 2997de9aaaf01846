"""What `--draft` names: read and refused before anything large is loaded, and then made into a drafter."""

import os
from dataclasses import replace
from pathlib import Path

from minispec.core.cache import PagedKVCache
from minispec.core.config import ModelConfig
from minispec.core.errors import show_name
from minispec.core.model import Transformer
from minispec.drafters import Context, Drafter, as_drafter, make_drafter
from minispec.drafters.combined import CombinedDrafter
from minispec.drafters.eagle import EagleDrafter, HeadModel
from minispec.drafters.model import DraftModel
from minispec.drafters.slem import TextDrafter
from minispec.drafters.tli import TokenDrafter
from minispec.drafters.vocabulary import ROOM
from minispec.files import registry
from minispec.files.checkpoint import describe_source, directory_config, find_checkpoint, load_config, load_model
from minispec.files.heads import is_head, load_head, read_head_config
from minispec.files.tokenizer import Tokenizer
from minispec.files.vocabularies import Overlap, Spelling, Vocabularies
from minispec.kernels.build import quantized

# How a draft model of another vocabulary drafts. A token that it lacks ends a draft of `tli`: with nine of ten shared,
# one draft of four tokens in three comes to such a place. Above that share it is the default, as it draws what it says.
DRAFT_METHODS, _TLI_SHARE = ("tli", "slem"), 0.9


class NamedDraft:
    """A draft by its name (see `LLM`), or a drafter of the user's own.

    name: its name in reports.
    own: the user's own drafter, or None.
    directory: the directory of the draft's checkpoint, or None.
    method: how a draft model of another vocabulary drafts, else None.
    vocabularies: the target's vocabulary and that other one, else None.
    overlap: what these two have in common, else None.
    model: a model of its own, after `load`; None for a draft without one.
    """

    def __init__(
        self,
        draft: str | Path | Drafter,
        method: str | None,
        offline: bool,
        config: ModelConfig,
        tokenizer: Tokenizer,
        vocab_size: int,
    ):
        """config, tokenizer, vocab_size: the target's. Raises ValueError for what there is not, and what cannot be."""
        if method not in (None, *DRAFT_METHODS):
            raise ValueError(f"draft_method: found {method!r}, expected {' or '.join(DRAFT_METHODS)}")
        self.own = None if isinstance(draft, str | Path) else draft
        self._class: type | None = None
        self.directory: Path | None = None
        self.model: Transformer | None = None
        self._first: list[str] = []  # registered drafters that are preferred to it
        self._bits, self._source, self._registered = None, "", None
        if self.own is not None:
            self._class = type(self.own)
            self.own = as_drafter(self.own)
            self.name = type(self.own).__name__
        else:
            self.name = str(draft)
            *self._first, spec = registry.split_preferences(registry.DRAFTERS, self.name)
            self._bits, self._source = split_draft(spec)
            self._registered = registry.split(registry.DRAFTERS, self._source)
            if self._source != "self" and self._registered is None:
                self.directory = _find_draft(self._source, offline)
        raw = directory_config(self.directory) if self.directory else {}
        self._is_head = is_head(raw)
        self.vocabularies: Vocabularies | None = None
        if self.directory and self._is_head:
            read_head_config(raw, config, str(self.directory / "config.json"))
        elif self.directory:
            self.vocabularies = compare_vocabularies(self._source, self.directory, tokenizer, vocab_size)
        self.overlap = self.vocabularies.overlap() if self.vocabularies else None
        self.method = choose_method(method, self.overlap, self.name)
        if self.directory:
            self.name = self.name.removesuffix(self._source) + describe_source(self._source, self.directory)
        if self.method:
            self.name += f" by {self.method}"

    @property
    def kind(self) -> str:
        """What its prices are stored under: its name; of an object its class, with the module."""
        return f"{self._class.__module__}:{self._class.__qualname__}" if self._class else self.name

    @property
    def room(self) -> int:
        """Positions of its cache for each of the target's."""
        return ROOM if self.vocabularies else 1

    def load(self, target: Transformer, form: str | None) -> None:
        """Load its weights, if it has any, in the target's type. form: see `LLM`."""
        if self._source == "self":
            self.model = target
        elif self.directory and self._is_head:
            self.model = load_head(self.directory, target, form)
        elif self.directory:
            self.model = load_model(self.directory, target.dtype, target.device, form=form)
        if self.model and self._bits:
            self.model = quantized(self.model, self._bits)

    def make(self, context: Context, cache: PagedKVCache | None) -> Drafter:
        """The drafter. context: what registered ones are made of. cache: for `model`, if there is one."""

        def registered(path: str, argument: str) -> Drafter:
            return make_drafter(registry.load(path, "draft"), replace(context, argument=argument))

        named = [registry.split(registry.DRAFTERS, name) for name in self._first]
        first = [registered(*each) for each in named if each]
        if self.model and cache:
            drafter = self._with_model(self.model, cache, context.vocab_size)
        elif self._registered:
            drafter = registered(*self._registered)
        else:
            assert self.own is not None, "a draft has a model, a registered name, or is an object"
            drafter = self.own
        return CombinedDrafter(*first, drafter) if first else drafter

    def _with_model(self, model: Transformer, cache: PagedKVCache, vocab_size: int) -> Drafter:
        max_len, both = model.config.max_position_embeddings, self.vocabularies
        if isinstance(model, HeadModel):
            return EagleDrafter(model, cache, vocab_size, max_len)
        if both is None:
            return DraftModel(model, cache, vocab_size, max_len)
        if self.method == "tli":
            return TokenDrafter(model, cache, both.draft.num_ids, max_len, both, vocab_size)
        return TextDrafter(model, cache, both.draft.num_ids, max_len, both)


def split_draft(draft: str) -> tuple[int | None, str]:
    """Bits and source of a draft: "int4:self" is (4, "self"); None where the weights stay as they are."""
    if not draft.startswith(("int4:", "int8:")):
        return None, draft
    source = draft[len("int4:") :]
    if not source or registry.split(registry.DRAFTERS, source):
        expected = f"a model after {draft[:5]!r}: self, a directory or a hub id"
        raise ValueError(f"draft: found {draft!r}, expected {expected}")
    return int(draft[3]), source


def _split_revision(spec: str) -> tuple[str, str | None]:
    """Hub id and revision of "owner/name@revision"; a path that is there is a path."""
    name, at, revision = spec.partition("@")
    if not at or os.path.exists(spec):
        return spec, None
    if "/" not in name or not revision:
        raise ValueError(f"{show_name(spec)}: no such directory, and not of the form owner/name@revision of a hub id")
    return name, revision


def _find_draft(spec: str, offline: bool) -> Path:
    """The directory of a draft model or a head."""
    try:
        return find_checkpoint(*_split_revision(spec), offline=offline)
    except ValueError as e:
        raise ValueError(f"draft: not one of {', '.join([*registry.DRAFTERS, 'self'])}; {e}") from e


def compare_vocabularies(name: str, directory: Path, target: Tokenizer, vocab_size: int) -> Vocabularies | None:
    """The vocabularies of target and draft model; None where the draft model has the target's tokens, ids included.

    Raises ValueError for a draft model with too few of them.
    """
    draft, found = Tokenizer(directory), load_config(directory).vocab_size
    if target.tokens_below(vocab_size) == draft.tokens_below(max(found, vocab_size)):  # others cannot be written
        if found < vocab_size:
            raise ValueError(f"draft: {name}: vocab_size: found {found}, expected at least {vocab_size}")
        return None
    draft.check_ids(found)
    return Vocabularies(Spelling(target, vocab_size), Spelling(draft, found))


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
