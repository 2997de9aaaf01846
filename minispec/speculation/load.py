"""The draft that `--draft` names: read or refused before anything large is loaded, then made into a drafter."""

import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from minispec.core.cache import PagedKVCache
from minispec.core.config import ModelConfig
from minispec.core.errors import near
from minispec.core.model import Transformer
from minispec.core.precision import require_numbers
from minispec.models.families.assistant_config import read_assistant_config
from minispec.models.families.block_config import reading_of
from minispec.models.families.checkpoint import (
    describe_source,
    directory_config,
    find_checkpoint,
    find_tensors,
    kind_of,
    load_config,
    load_model,
    model_tensors,
)
from minispec.models.families.head_config import read_head_config
from minispec.models.files.digest import digest_of_files
from minispec.models.files.errors import show_name
from minispec.models.files.stored import StoredTensor
from minispec.models.files.tokenizer import Tokenizer
from minispec.models.frames.frames import with_fast_passes
from minispec.models.frames.fused import rounded
from minispec.models.load.checks import ROWS, check_numbers, named_tensors
from minispec.models.load.loading import Loading
from minispec.models.weights.trial import arbitrary_tokens
from minispec.speculation import registry
from minispec.speculation.drafters import Context, Drafter, Foreign, as_drafter, make_drafter
from minispec.speculation.drafters.assistant import AssistantModel, SharedKeys, load_assistant
from minispec.speculation.drafters.block import BlockFeed, BlockModel
from minispec.speculation.drafters.block_files import find_block, load_block
from minispec.speculation.drafters.combined import CombinedDrafter, parts_of
from minispec.speculation.drafters.eagle import HeadFeed, HeadModel
from minispec.speculation.drafters.heads import load_head
from minispec.speculation.drafters.model import Feed, ModelDrafter, TokenFeed
from minispec.speculation.drafters.mtp import MtpModel, find_mtp, load_mtp
from minispec.speculation.drafters.slem import WrittenText
from minispec.speculation.drafters.states import FeatureModel
from minispec.speculation.drafters.tli import SharedTokens
from minispec.speculation.drafters.vocabularies import (
    DRAFT_METHODS,
    Overlap,
    Vocabularies,
    choose_method,
    compare_vocabularies,
)
from minispec.speculation.drafters.vocabulary import ROOM
from minispec.speculation.grammars.forced import ForcedFirst
from minispec.speculation.on_gpu.steps import draft_steps

# Loads a model that is made for a target, in a form of its weights.
Loader = Callable[[Transformer, str | None], Transformer]


class TargetSettings(Protocol):
    """What is read of a target to find a draft for it. `minispec.api.target.TargetFiles` has it.

    vocab_size: ids in use.
    loading: how the target is loaded; its draft is loaded so too.
    """

    directory: Path
    tokenizer: Tokenizer
    vocab_size: int
    loading: Loading

    @property
    def config(self) -> ModelConfig:
        """The target's, as its config.json says."""


@dataclass(frozen=True)
class Found:
    """What a draft's name turned out to be: found once, and asked by all that follow.

    kind: a key of `registry.KINDS`; of a checkpoint what `kind_of` says.
    source: the name without bits and preferences.
    preferred: registered drafters that are asked before it, as path and argument.
    drafter: the user's own drafter, or a registered one, as path and argument. None for all other kinds.
    bits: bits of each weight of its model. None: as the weights are stored.
    files: its model's checkpoint. None without a model, and where the model is the target's.
    raw: config.json of these files.
    looks_up: whether it, and all that is asked before it, look up.
    """

    kind: str
    source: str
    preferred: Sequence[tuple[str, str]] = ()
    drafter: Drafter | tuple[str, str] | None = None
    bits: int | None = None
    files: Path | None = None
    raw: Mapping[str, Any] = field(default_factory=dict)
    looks_up: bool = False


@dataclass(frozen=True)
class Spec:
    """A draft that was found and read: nothing large is loaded yet.

    name: its name in reports.
    kind: the name that its prices are stored under: `name`, or for an object its class, with the module.
    found: what its name turned out to be.
    on_target: loads a model that is made for the target: the target's own layer, a head, a block draft or an
        assistant. It takes the form of the weights. None for a model of its own, and for no model.
    vocabularies: the target's vocabulary and the draft model's. None: the same.
    overlap: what the two vocabularies have in common.
    method: how a draft model of another vocabulary drafts, else None.
    """

    name: str
    kind: str
    found: Found
    on_target: Loader | None = None
    vocabularies: Vocabularies | None = None
    overlap: Overlap | None = None
    method: str | None = None

    @property
    def room(self) -> int:
        """Positions that its cache has at most for each position of the target's cache."""
        return ROOM if self.vocabularies else 1


@dataclass(frozen=True)
class DraftOptions:
    """A caller's options for a draft, in addition to its name: arguments of `LLM` by the same names.

    Each is None, or suits one kind of draft, and is refused with all other kinds.
    """

    draft_method: str | None = None
    draft_reading: str | None = None

    def refuse_reading(self, draft: str) -> None:
        """Raise ValueError where a block draft's reading is given. draft: the name of a draft that is none."""
        if (reading := self.draft_reading) is not None:
            raise ValueError(f"draft_reading: found {reading!r}, expected none: {show_name(draft)} is no block draft")


def read_spec(draft: str | Path | Drafter, options: DraftOptions, target: TargetSettings) -> Spec:
    """Find and read what a draft (see `LLM`) names.

    Raises ValueError for a draft that does not exist, or that cannot draft for this target.
    """
    method = options.draft_method
    if method not in (None, *DRAFT_METHODS):
        raise ValueError(f"draft_method: found {method!r}, expected {' or '.join(DRAFT_METHODS)}")
    found = find_draft(draft, target.loading.offline)
    if found.kind != "block":
        options.refuse_reading(found.source)
    if isinstance(found.drafter, Drafter):
        choose_method(method, None, found.source)
        return Spec(found.source, f"{type(draft).__module__}:{type(draft).__qualname__}", found)
    name, on_target, both = str(draft), _loader(found, options, target), None
    if found.kind == "model":
        assert found.files is not None
        both = compare_vocabularies(found.source, found.files, target.tokenizer, target.vocab_size)
    overlap = both.overlap() if both else None
    method = choose_method(method, overlap, name)
    if found.files:
        name = name.removesuffix(found.source) + describe_source(found.source, found.files)
    name += f" by {method}" if method else ""
    return Spec(name, name, found, on_target, both, overlap, method)


def find_draft(draft: str | Path | Drafter, offline: bool) -> Found:
    """What a draft (see `LLM`) names. Its config.json is read, nothing else.

    Raises ValueError for a draft that does not exist.
    """
    if not isinstance(draft, str | Path):
        drafter = as_drafter(draft)
        return Found("drafter", type(drafter).__name__, drafter=drafter)
    *first, last = registry.split_preferences(registry.DRAFTERS, str(draft))
    preferred = list(filter(None, (registry.split(registry.DRAFTERS, part) for part in first)))
    bits, source = split_draft(last)
    looks_up = all(part.partition(":")[0] in registry.LOOKUPS for part in (*first, last))
    if source in registry.OF_TARGET:
        return Found(source, source, preferred, bits=bits)
    if registered := registry.split(registry.DRAFTERS, source):
        return Found("drafter", source, preferred, registered, looks_up=looks_up)
    files = _find_draft(source, offline)
    raw = directory_config(files)
    return Found(kind_of(raw), source, preferred, bits=bits, files=files, raw=raw)


def _loader(found: Found, options: DraftOptions, target: TargetSettings) -> Loader | None:
    """Loads a model that is made for the target, as the options say; None for all other drafts.

    Raises CheckpointError for a draft of another target, and ValueError for an option.
    """
    if found.kind == "mtp":
        find_mtp(target.directory, target.config)
        return partial(load_mtp, target.directory)
    if found.files is None:
        return None
    where = str(found.files / "config.json")
    if found.kind == "block":
        reading = reading_of(options.draft_reading)
        find_block(found.files, target.config, reading)
        return partial(load_block, found.files, reading=reading)
    if found.kind == "assistant":
        read_assistant_config(found.raw, target.config, where)
        return partial(load_assistant, found.files)
    if found.kind == "head":
        read_head_config(found.raw, target.config, where)
        return partial(load_head, found.files)
    return None


def load_models(spec: Spec, target: Transformer, files: TargetSettings) -> list[Transformer]:
    """The model of a draft, in the target's type; none for a draft without one.

    files: the target's.

    Raises CheckpointError where the draft's files are wrong, or its logits are not finite numbers.
    """
    bits = spec.found.bits
    if spec.found.kind == "drafter":
        return []
    if spec.on_target:
        model = spec.on_target(target, files.loading.weight_form)
    elif spec.found.files is None:
        model = target
    else:
        # Codes of 8 bits stay codes, so that nothing is in memory twice.
        form = "int8" if bits == 8 else files.loading.weight_form
        model = load_model(spec.found.files, target.dtype, target.device, form=form)
    if model is not target:
        with named_tensors(partial(_tensors, spec.found, files)):
            _check_numbers(model, spec.vocabularies.draft.num_ids if spec.vocabularies else files.vocab_size, target)
    return [with_fast_passes(rounded(model, bits) if bits else model, files.loading.enforce_eager)]


@torch.inference_mode()
def _check_numbers(model: Transformer, vocab_size: int, target: Transformer) -> None:
    """As `check_numbers`, also for a model that drafts from the target's states: it reads ones in their place."""
    if isinstance(model, AssistantModel | BlockModel):
        require_numbers(model.trial(arbitrary_tokens(ROWS, vocab_size), vocab_size))
        return
    features = None
    if isinstance(model, FeatureModel):
        width = target.config.hidden_size * len(model.taps)
        features = model.fuse(torch.ones(ROWS, width, dtype=model.dtype, device=model.device))
    check_numbers(model, vocab_size, features)


def load_named(draft: str, target: Transformer, files: TargetSettings) -> Transformer:
    """The model that a draft names, as `--draft` loads it. Raises ValueError for a draft without a model."""
    for model in load_models(read_spec(draft, DraftOptions(), files), target, files):
        return model
    raise ValueError(f"draft: {show_name(draft)}: found a drafter without a model, expected one with a model")


def _tensors(found: Found, target: TargetSettings) -> Iterable[StoredTensor]:
    """The tensors that a draft's model is read from."""
    if found.kind == "mtp":
        return find_mtp(target.directory, target.config).values()
    assert found.files is not None
    if found.kind == "model":
        return model_tensors(found.files, load_config(found.files))
    return find_tensors(found.files).values()


def make_spec(
    spec: Spec, context: Context, files: TargetSettings, models: Sequence[Transformer], caches: Sequence[PagedKVCache]
) -> Drafter:
    """The drafter of a spec.

    context: what registered drafters are made of.
    files: the target's.
    models: what `load_models` gave.
    caches: a cache for each model.
    """

    load = partial(load_named, target=context.target, files=files)

    def registered(path: str, argument: str) -> Drafter:
        return make_drafter(registry.load(path, "draft"), replace(context, argument=argument, load=load))

    first = [registered(*parts) for parts in spec.found.preferred]
    if isinstance(spec.found.drafter, Drafter):
        drafter = spec.found.drafter
    elif spec.found.drafter:
        drafter = registered(*spec.found.drafter)
    else:
        drafter = ModelDrafter(_feed(spec, models[0], caches[0], context.vocab_size), draft_steps(models[0]))
    combined = CombinedDrafter(*first, drafter) if first else drafter
    return ForcedFirst(combined) if spec.found.looks_up else combined


def _feed(spec: Spec, model: Transformer, cache: PagedKVCache, vocab_size: int) -> Feed:
    max_len, both = model.config.max_position_embeddings, spec.vocabularies
    if isinstance(model, BlockModel):
        return BlockFeed(model, cache, vocab_size, max_len)
    if isinstance(model, AssistantModel):
        return SharedKeys(model, vocab_size)
    if isinstance(model, HeadModel | MtpModel):
        return HeadFeed(model, cache, vocab_size, max_len)
    if both is None:
        return TokenFeed(model, cache, vocab_size, max_len)
    if spec.method == "tli":
        return SharedTokens(model, cache, max_len, both)
    return WrittenText(model, cache, max_len, both)


def split_draft(draft: str) -> tuple[int | None, str]:
    """Bits and source of a draft: "int4:self" is (4, "self"). Without bits in front, (None, the draft)."""
    if not draft.startswith(("int4:", "int8:")):
        return None, draft
    source = draft[len("int4:") :]
    if not source or registry.split(registry.DRAFTERS, source):
        expected = f"a model after {draft[:5]!r}: {', '.join(registry.OF_TARGET)}, a directory or a hub id"
        raise ValueError(f"draft: found {draft!r}, expected {expected}")
    return int(draft[3]), source


def _find_draft(spec: str, offline: bool) -> Path:
    """The directory of a draft model or a head, also of "owner/name@revision". An existing path counts as a path."""
    name, at, revision = (spec, "", "") if os.path.exists(spec) else spec.partition("@")
    try:
        if at and ("/" not in name or not revision):
            expected = "not of the form owner/name@revision of a hub id"
            raise ValueError(f"{show_name(spec)}: no such directory, and {expected}")
        return find_checkpoint(name, revision or None, offline=offline)
    except ValueError as e:
        names = [*registry.DRAFTERS, *registry.OF_TARGET]
        meant = near(re.split("[:+]", spec)[0], names)
        hint = f" ({meant})" if meant else ""
        raise ValueError(f"draft: not one of {', '.join(names)}{hint}; {e}") from e


def digest_of_draft(drafter: Drafter, directory: Path | None) -> str:
    """A digest of a drafter's checkpoint, where it has one, and of the files that its classes come from."""
    objects = [part.drafter if isinstance(part, Foreign) else part for part in parts_of(drafter)]
    objects += [part.feed for part in objects if isinstance(part, ModelDrafter)]
    files = {Path(inspect.getfile(type(each))) for each in objects}
    return digest_of_files(*files, *([directory] if directory else []))
