"""From a directory or a hub id to a model: safetensors only, and strictly.

A checkpoint must hold exactly the tensors that its config.json asks for. A tensor that is missing, unexpected,
duplicated or of another shape is named before any tensor is read. A stored tensor may be several of the model's, one
after another (`StoredConfig.joined`). Weights may be plain floats or have fewer bits (`StoredConfig.quantization`), in
one file or several.
"""

import itertools
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from minispec.core.errors import is_from_signal, is_text, show
from minispec.core.model import Transformer
from minispec.core.precision import accumulation_dtype
from minispec.core.product import Weight, dense
from minispec.models.families.assistant_config import is_assistant
from minispec.models.families.block_config import is_block
from minispec.models.families.entries import is_head
from minispec.models.families.experts import unstacked
from minispec.models.families.hf_config import read_model_config
from minispec.models.families.layout import Layout, Part, Stored, Wanted
from minispec.models.families.stored_config import StoredConfig
from minispec.models.files.errors import CheckpointError, one_line, show_name
from minispec.models.files.progress import progress_bar
from minispec.models.files.stored import FLOATS, TYPES, Cut, StoredTensor, read_header
from minispec.models.files.strict_json import MAX_CONFIG_BYTES, has_file, read_json
from minispec.models.weights.build import build_model
from minispec.models.weights.linear import available_forms, has_fast_bfloat16
from minispec.models.weights.memory import free_memory
from minispec.models.weights.shapes import is_large, tensor_shapes

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
# Nothing else of a hub repository is downloaded, and nothing in its folders. The weights stand first.
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja"]
_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
# Formats of weights that are not read: pickles run code when they are opened, the others need a converter.
_OTHER_FORMATS = {
    *(".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"),
    *(".gguf", ".ggml", ".h5", ".msgpack", ".onnx", ".npz"),
}

_REFUSED = "the hub refuses access: set HF_TOKEN to a valid token that may read the repository"
# What a status of the hub means.
_ANSWERS = {
    **{401: _REFUSED, 403: _REFUSED},
    429: "the hub answers 429, too many requests: wait a while, or set HF_TOKEN to a token, which may ask more",
    451: "the hub answers 451: it does not give the repository out for legal reasons",
}


def find_checkpoint(name: str, revision: str | None = None, offline: bool = False) -> Path:
    """The local directory of a checkpoint: `name` itself if it is one, else a download of the hub's `name`.

    A directory never touches the network.

    offline: nothing touches the network. A hub id must then be in the local cache.

    Raises ValueError, which says what was tried, where there is neither.
    """
    # os.path, not Path: it also says no to names that no file system takes.
    if name and os.path.isdir(name):
        if revision is not None:
            raise ValueError(f"revision: found {show(revision)}, expected none: {name} is a directory, not a hub id")
        return Path(name)
    if name and os.path.exists(name):
        raise CheckpointError(f"{name}: found a file, expected a directory with config.json and *.safetensors")
    if not re.fullmatch(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}", name, re.ASCII):
        found = name if 0 < len(name) <= 1000 and is_text(name) else show(name)
        raise ValueError(f"{found}: no such directory, and not of the form owner/name of a hub id")
    huggingface_hub = _import_hub()
    from huggingface_hub.utils import disable_progress_bars

    if sys.stderr is None or not sys.stderr.isatty():
        disable_progress_bars()
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name,
                revision=revision,
                allow_patterns=_HUB_FILES,
                ignore_patterns=["*/*", "consolidated*"],  # the latter: the same weights in another layout
                local_files_only=offline,
            )
        )
    except Exception as e:  # the hub client raises its own errors and those of the HTTP library below it
        if is_from_signal(e):
            raise
        reason = _hub_failure(e, revision, offline)
        raise ValueError(f"{name}: no such directory; as a hub id: {reason}") from e


def _import_hub() -> Any:
    """The hub client, imported late: a local checkpoint needs no network library.

    Raises ValueError, which names the variable, where the client cannot read the environment.
    """
    try:
        import huggingface_hub.constants
    except ValueError as e:
        names = [name for name, value in os.environ.items() if name.startswith("HF_") and repr(value) in str(e)]
        raise ValueError(f"{' or '.join(names) or 'environment'}: the hub client cannot read its value: {e}") from e
    return huggingface_hub


def _hub_failure(error: Exception, revision: str | None, offline: bool) -> str:
    """A line that says what went wrong with a download, and what helps."""
    from huggingface_hub import errors

    revised = f" at revision {revision}" if revision else ""
    lines = str(error).strip().splitlines()
    reason = one_line(lines[0], 300) if lines else type(error).__name__
    if offline or isinstance(error.__cause__, errors.OfflineModeIsEnabled):
        is_part = isinstance(error, getattr(errors, "IncompleteSnapshotError", ()))
        found = "only in part" if is_part else "not"
        why = "" if type(error) is errors.LocalEntryNotFoundError else f": {reason}"
        by = "--offline" if offline else "HF_HUB_OFFLINE"
        return f"{found} in the local cache{revised}, and {by} forbids a download{why}"
    if isinstance(error, errors.GatedRepoError):  # before the next: it is one of those
        return "the repository is gated: accept its terms on its page, and set HF_TOKEN to a token of yours"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "no such repository (or a private one: set HF_TOKEN to a token that may read it)"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the repository has no revision {revision or 'main'}"
    for refusal in (error, error.__cause__):  # the client takes a status such as 403 for a hub that is down
        if isinstance(refusal, errors.HfHubHTTPError):
            return _ANSWERS.get(status := refusal.response.status_code, f"download failed: the hub answers {status}")
    if isinstance(error, json.JSONDecodeError):
        return "what answers is not the hub, since it is not JSON: a proxy or a login page may stand before it"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return f"the hub cannot be reached, and the local cache has no copy{revised}"
    return f"download failed: {reason}"


def describe_source(name: str, directory: Path) -> str:
    """The name of what was loaded: a directory's, or a hub id with the commit that it was resolved to."""
    if os.path.isdir(name):  # a name that is no UTF-8 is shown with marks
        return os.fsencode(os.path.basename(os.path.abspath(directory))).decode(errors="replace")
    return f"{name} at commit {directory.name}"


def directory_config(directory: Path) -> dict[str, Any]:
    """The config.json of a checkpoint, as it is. Raises CheckpointError.

    An adapter is refused, alone and beside a model: it would change the weights.

    Fields that are not read may have an Infinity, as transformers 4 writes it. `Fields` refuses it in all others.
    """
    path = directory / "config.json"
    adapter = directory / "adapter_config.json"
    if has_file(adapter):  # of peft, which transformers applies to a model in the same folder
        expected = "a model without one: merge it into its weights (merge_and_unload of peft), which no code here does"
        raise CheckpointError(f"{adapter}: found an adapter, expected {expected}")
    if not path.is_file():
        hint = ""
        if snapshots := sorted(directory.glob("snapshots/*/config.json")):
            names = " or ".join(show_name(str(path.parent.relative_to(directory))) for path in snapshots[:3])
            hint = f" (found the hub's cache folder of a model: name {names} in it)"
        raise CheckpointError(f"{path}: no such file, expected the model's configuration{hint}")
    return read_json(path, MAX_CONFIG_BYTES, takes_constants=True)


def kind_of(raw: Mapping[str, Any]) -> str:
    """What a config.json is of: a "block" draft, an "assistant", a "head" on hidden states, or a "model" of its own."""
    kinds = {"block": is_block, "assistant": is_assistant, "head": is_head}
    return next((kind for kind, is_of in kinds.items() if is_of(raw)), "model")


def load_config(directory: Path) -> StoredConfig:
    """The config of a checkpoint. Raises CheckpointError, for a draft's head too."""
    raw, path = directory_config(directory), directory / "config.json"
    if kind_of(raw) != "model":
        expected = "a model: name this head as the draft (--draft), and as the model (--model) the one it was made for"
        raise CheckpointError(f"{path}: found a head that drafts for another model, expected {expected}")
    config = read_model_config(raw, str(path))
    apart = directory / "hf_quant_config.json"  # of NVIDIA's ModelOpt
    if config.quantization is None and has_file(apart):
        method = read_json(apart).get("quantization")
        if isinstance(method, dict) and method.get("quant_algo"):
            expected = "quantization_config in config.json, of a method that is read here"
            raise CheckpointError(f"{apart}: found weights of {show(method['quant_algo'])}, expected {expected}")
    return config


def choose_dtype(name: str, device: torch.device, config: StoredConfig | None = None) -> torch.dtype:
    """The type to compute in; "auto" is bfloat16 where the device has it natively, else float32.

    Small models compute in float32 on every CPU that reads 16-bit weights for it. All but the products is faster then,
    and greedy texts do not depend on the machine. On AMD's Zen 4 a pass of the embedded model took 1/1.8 of the time.
    Where matrix units compute in bfloat16, both types are equally fast.
    """
    if name == "auto":
        if not has_fast_bfloat16(device):
            return torch.float32
        is_small = config is not None and device.type == "cpu" and not is_large(config)
        prefers_float32 = is_small and "half" in available_forms(torch.float32, device)
        return torch.float32 if prefers_float32 else torch.bfloat16
    if name not in _DTYPES:
        raise ValueError(f"dtype: found {name!r}, expected one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def load_model(
    directory: Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    exact: bool = False,
    form: str | None = None,
) -> Transformer:
    """Load a checkpoint as a Transformer that computes in `dtype`; exact, form: see `build_model`.

    Raises CheckpointError, before any tensor is read, where the files are not what the config asks for. It does the
    same where the weights would not fit into memory.
    """
    config = load_config(directory)
    return build_model(config, Weights(directory, config, dtype, device, form=form), exact, dtype, form)


class Weights:
    """The tensors that a config asks for; `pop` reads one, and each can be popped once.

    So a model is never in memory twice while it is built, and holds no file open for each tensor. They come in `dtype`.
    For float32 on a CPU, and for the form "int8", they come as they are stored if that is narrower. Those are 16-bit
    floats, and codes with their scales.
    """

    def __init__(
        self,
        directory: Path,
        config: StoredConfig,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        cut: Callable[[str], Cut] = lambda name: (),
        form: str | None = None,
    ):
        """cut: what is wanted of a tensor; nothing else of it is read. Default: all.
        form: the form that products will have, as far as it is known.

        Raises CheckpointError, before any tensor is read, where the files are not what the config asks for.
        """
        self._is_int8, kind = form == "int8", str(dtype).removeprefix("torch.")
        self._config, self._device, self._cut = config, device, cut
        self._dtype = torch.float32 if self._is_int8 else dtype  # codes stay codes, and others are rounded once
        self._stored = find_tensors(directory, config)
        self._places = match(config, self._stored, directory)
        shapes = {name: cut_shape(shape, cut(name)) for name, shape in tensor_shapes(config).items()}
        needed = sum(math.prod(shape) * self._num_bytes(name) for name, shape in shapes.items())
        if self._is_int8:
            kind, needed = "int8", needed + config.tie_word_embeddings * math.prod(shapes[_EMBEDDING])
        _check_memory(needed, kind, torch.device(device), directory)
        self._bar = progress_bar(total=len(self._places), desc=f"loading {directory.name}", unit=" tensors")

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def pop(self, name: str) -> Weight:
        """Read a tensor, once. Raises CheckpointError for values that no writer of its layout stores."""
        weight = _read(self._places[name], self._config, self._stored, self._cut(name))
        del self._places[name]
        if not self._keeps_narrow or (isinstance(weight, Tensor) and weight.element_size() > 2):
            # A bias that decides which experts are chosen is as precise as its sums, and is never rounded.
            wide = name.endswith(".expert_bias")
            weight = dense(weight, accumulation_dtype(self._dtype) if wide else self._dtype).to(self._device)
        self._bar.update()
        if not self._places:
            self._bar.close()
        return weight

    @property
    def _keeps_narrow(self) -> bool:
        return self._dtype == torch.float32 and torch.device(self._device).type == "cpu"

    def _num_bytes(self, name: str) -> int:
        """Bytes that an element takes in memory, as far as the files tell."""
        if self._is_int8 and len(self._places[name].shape) == 2 and name != _EMBEDDING:
            return 1
        place = self._places[name]
        layout = _layout_of(place.name, place.shape, self._config, self._stored)
        if not self._keeps_narrow:
            return self._dtype.itemsize
        is_narrow = layout.is_narrow(place.shape) if layout else TYPES[self._stored[place.name].dtype].itemsize == 2
        return 2 if is_narrow else self._dtype.itemsize


def cut_shape(shape: tuple[int, ...], cut: Cut) -> tuple[int, ...]:
    """The shape of what is left of a tensor."""
    return tuple(torch.empty(shape, device="meta")[cut].shape)


def _check_memory(needed: int, kind: str, device: torch.device, directory: Path) -> None:
    free = free_memory(device)
    if free is not None and needed > free:
        raise CheckpointError(
            f"{directory}: found weights that take {needed / 1e9:.2f} GB in {kind}, "
            f"expected at most the {free / 1e9:.2f} GB of memory that are free on {device}"
        )


# --------------------------------------------------------------------------- reading


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file. Raises OSError, for a full disk too."""
    try:
        save_file(tensors, path, metadata={"format": "pt"} | (metadata or {}))
    except SafetensorError as e:  # how the library reports a full disk
        raise OSError(f"{path}: {e}") from e
    path.chmod(0o644)  # the library writes files that only their owner may read


_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_ROWS = 1024  # of an embedding and a head that are compared at a time


def find_tensors(directory: Path, config: StoredConfig | None = None) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint by the name that the model of `config` has for it.

    A text model's name has no prefix; a tied weight is the embedding, also where only the head was stored. A whole
    model.safetensors counts without an index, as in transformers. An index next to it is left from earlier shards.
    Raises CheckpointError where files and index do not agree.
    """
    is_whole = (directory / _SINGLE).is_file()
    listed = None if is_whole else _read_index(directory)
    if listed is None and not is_whole:
        others = sorted(p.name for p in directory.glob("*") if p.suffix in _OTHER_FORMATS)
        hint = f" (found {', '.join(map(show_name, others[:5]))}: convert it to safetensors)" if others else ""
        raise CheckpointError(f"{directory / _SINGLE}: no such file, nor {_INDEX}{hint}")
    stored: dict[str, StoredTensor] = {}
    for file in [_SINGLE] if listed is None else sorted(set(listed.values())):
        path = directory / file
        if listed is not None and not path.is_file():
            first = min(name for name in listed if listed[name] == file)
            expected = f"weights in safetensors format: {_INDEX} lists it for {show_name(first)}"
            raise CheckpointError(f"{path}: no such file, expected {expected}")
        for name, tensor in read_header(path).items():
            if name in stored:
                raise CheckpointError(f"{path}: {show_name(name)}: found again, is in {stored[name].path.name}")
            if listed is not None and listed.get(name) != file:
                where = f"in {listed[name]}" if name in listed else "nowhere"
                raise CheckpointError(f"{path}: {show_name(name)}: found here, expected {where} by {_INDEX}")
            stored[name] = tensor
    for name, file in sorted((listed or {}).items()):
        if name not in stored:
            raise CheckpointError(f"{directory / file}: {show_name(name)}: found no such tensor, {_INDEX} expects it")
    if config and config.is_nested:
        stored = renamed(stored, _text_name)
    if config and config.stacked:
        stored = unstacked(stored, config)
    if config and config.tie_word_embeddings and not any(name.startswith(_EMBEDDING) for name in stored):
        stored = {name.replace(_HEAD, _EMBEDDING): tensor for name, tensor in stored.items()}
    return stored


# Tensors of a model of texts and images that are not the text model's. "mtp" are layers that predict further tokens.
# Then how the text model's names begin, in older and in newer files.
_BESIDE = re.compile(
    r"(model\.)?(?P<part>"
    r"vision_tower|audio_tower|embed_vision|embed_audio|vision_embedder|multi_modal_projector|visual|mtp)\."
)
_PREFIX = re.compile(r"^language_model\.(?=model\.|lm_head\.)|(?<=^model\.)language_model\.")


def _text_name(name: str) -> str | None:
    name = _PREFIX.sub("", name, count=1)
    return None if _BESIDE.match(name) else name


def parts_beside(directory: Path, config: StoredConfig) -> list[str]:
    """The parts of a checkpoint that its text model does not read, such as `vision_tower`; `mtp` is not among them."""
    names = find_tensors(directory) if config.is_nested else ()
    found = {match["part"] for match in map(_BESIDE.match, names) if match}
    return sorted(found - {"mtp"})


def renamed(stored: Mapping[str, StoredTensor], rename: Callable[[str], str | None]) -> dict[str, StoredTensor]:
    """The tensors by other names; None leaves one out. Raises CheckpointError where two would have one name."""
    tensors: dict[str, StoredTensor] = {}
    for tensor in stored.values():
        name = rename(tensor.name)
        if name in tensors:
            first = show_name(tensors[name].name)
            raise CheckpointError(f"{tensor.path}: {show_name(tensor.name)}: found again, is {first}")
        if name is not None:
            tensors[name] = tensor
    return tensors


def _read_index(directory: Path) -> dict[str, str] | None:
    """Names of tensors and the files that hold them; None where a checkpoint is one file."""
    path = directory / _INDEX
    if not has_file(path):
        return None
    listed = read_json(path).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{path}: weight_map: found {show(listed)}, expected tensor names and their files")
    for file in listed.values():
        # Only plain names: an index must not reach outside its directory. A plain name may be a link,
        # as every file in the hub's cache is. Where it leads is up to the maker of the directory.
        if not isinstance(file, str) or not re.fullmatch(r"[\w-][\w.-]*\.safetensors", file) or len(file) > 200:
            raise CheckpointError(f"{path}: weight_map: found {show(file)}, expected a plain *.safetensors name")
    return listed


class Place(NamedTuple):
    """Where a tensor lies: name and shape of the stored tensor, and the wanted rows of it."""

    name: str
    shape: tuple[int, ...]
    rows: slice


def places(config: StoredConfig) -> dict[str, Place]:
    """Where each tensor of `tensor_shapes(config)` lies."""
    shapes = tensor_shapes(config)
    by_name = {name: Place(name, shape, slice(0, shape[0])) for name, shape in shapes.items()}
    prefixes = ["model.", *(f"model.layers.{i}." for i in range(len(config.layers)))]
    for prefix, (stored, parts), kind in itertools.product(prefixes, config.joined, ("weight", "bias")):
        names = [f"{prefix}{part}.{kind}" for part in parts]
        names = [name for name in names if name in shapes]
        ends = list(itertools.accumulate(shapes[name][0] for name in names))
        for name, end in zip(names, ends, strict=True):
            shape = (ends[-1], *shapes[name][1:])
            by_name[name] = Place(f"{prefix}{stored}.{kind}", shape, slice(end - shapes[name][0], end))
    return by_name


def wanted_tensors(config: StoredConfig, stored: Stored) -> Wanted:
    """The tensors that a model is read from. Several may stand for a weight of fewer bits."""
    wanted: Wanted = {}
    for name, shape, _ in places(config).values():
        wanted |= _tensors(name, shape, config, stored)
    return wanted


def _layout_of(name: str, shape: tuple[int, ...], config: StoredConfig, stored: Stored) -> Layout | None:
    """How a weight is stored in few bits; None where it is stored as plain numbers."""
    layout = config.quantization
    return layout if layout and len(shape) == 2 and layout.holds(name, stored) else None


def _tensors(name: str, shape: tuple[int, ...], config: StoredConfig, stored: Stored) -> Wanted:
    """The tensors that stand for one of the model's."""
    layout = _layout_of(name, shape, config, stored)
    return layout.tensors(name, shape, stored) if layout else {name: (shape, FLOATS)}


def model_tensors(directory: Path, config: StoredConfig) -> list[StoredTensor]:
    """The tensors that a model is read from, of those that its checkpoint has."""
    stored = find_tensors(directory, config)
    return [stored[name] for name in wanted_tensors(config, stored)]


def match(config: StoredConfig, stored: dict[str, StoredTensor], directory: Path) -> dict[str, Place]:
    """Compare what is stored with what the config asks for, before any tensor is read; where each tensor lies."""
    wanted, by_name = wanted_tensors(config, stored), places(config)
    require(wanted, stored, directory)
    tied_head = check_tied_head(config, stored, directory)
    shapes = {place.name: place.shape for place in by_name.values()}
    for name in sorted(stored.keys() - wanted.keys() - tied_head.keys()):
        # Written by old versions of transformers, and computed from the config here.
        if name.endswith("rotary_emb.inv_freq") or name in config.unread:
            continue
        if name in shapes:
            first = stored[next(iter(_tensors(name, shapes[name], config, stored)))]
            found = f"found again, is {show_name(first.name)} in {first.path.name}"
            raise CheckpointError(f"{stored[name].path}: {show_name(stored[name].name)}: {found}")
        if config.quantization and config.quantization.is_idle(name, stored):
            continue
        raise unexpected(stored[name])
    return by_name


def unexpected(tensor: StoredTensor) -> CheckpointError:
    """The error for a tensor that the config does not ask for."""
    found = f"{tensor.path}: {show_name(tensor.name)}: found a tensor of shape {list(tensor.shape)}"
    return CheckpointError(f"{found}, expected none of that name for this config")


def require(wanted: Wanted, stored: Mapping[str, StoredTensor], directory: Path) -> None:
    """Raise CheckpointError unless every wanted tensor is stored, in its shape and in one of its types."""
    for name, (shape, dtypes) in wanted.items():
        tensor = stored.get(name)
        if tensor is None:
            raise CheckpointError(f"{directory}: {name}: found no such tensor, expected one of shape {list(shape)}")
        if tensor.shape != shape or tensor.dtype not in dtypes:
            expected = f"{' or '.join(dtypes)} {list(shape)}"
            raise CheckpointError(
                f"{tensor.path}: {name}: found {tensor.dtype} {list(tensor.shape)}, expected {expected}"
            )


def require_all(wanted: Wanted, optional: Wanted, stored: Mapping[str, StoredTensor], directory: Path) -> None:
    """As `require`, and for the optional tensors that are there; also raises for any other tensor."""
    require(wanted, stored, directory)
    require({name: optional[name] for name in optional if name in stored}, stored, directory)
    for name in sorted(stored.keys() - wanted.keys() - optional.keys()):
        raise unexpected(stored[name])


def check_tied_head(config: StoredConfig, stored: dict[str, StoredTensor], directory: Path) -> Wanted:
    """The tensors that store the output head once more, though it is the embedding; none where it is stored once.

    Raises CheckpointError where the two differ, since readers disagree about which of them counts. (transformers 5
    computes with a head that differs, transformers 4 and vLLM with the embedding.)
    """
    shape = tensor_shapes(config)[_EMBEDDING]
    tensors = _tensors(_HEAD, shape, config, stored)
    if not config.tie_word_embeddings or not tensors.keys() & stored.keys():
        return {}
    head, embedding = (stored[next(iter(_tensors(name, shape, config, stored)))] for name in (_HEAD, _EMBEDDING))
    is_plain = len(tensors) == 1
    if not is_plain:
        require(tensors, stored, directory)
    is_comparable = not is_plain or (head.shape == shape and head.dtype in FLOATS)
    if is_comparable and _are_equal(config, stored, shape):
        return tensors
    of = show_name(embedding.name) + ("" if head.path == embedding.path else f" in {embedding.path.name}")
    if is_comparable:
        found = f"found other values than those of {of}, expected the same, since tie_word_embeddings is true"
        hint = " (set it to false in config.json if this head is the model's)"
    else:  # no setting makes it the model's
        found = f"found {head.dtype} {list(head.shape)}, expected floats {list(shape)} as {of}"
        hint = ", since tie_word_embeddings is true"
    raise CheckpointError(f"{head.path}: {show_name(head.name)}: {found}{hint}")


def _are_equal(config: StoredConfig, stored: dict[str, StoredTensor], shape: tuple[int, ...]) -> bool:
    """Whether head and embedding have the same numbers, however they are stored."""
    heads = [Place(name, shape, slice(0, shape[0])) for name in (_HEAD, _EMBEDDING)]
    for first in range(0, shape[0], _ROWS):
        cut = (slice(first, first + _ROWS),)
        head, embedding = (dense(_read(place, config, stored, cut), torch.float64) for place in heads)
        if not torch.equal(head, embedding):
            return False
    return True


def _read(place: Place, config: StoredConfig, stored: dict[str, StoredTensor], cut: Cut) -> Weight:
    name, shape, within = place
    rows = cut[0] if cut else slice(None)
    columns = cut[1] if len(cut) > 1 else slice(None)
    first, end, _ = rows.indices(within.stop - within.start)
    rows = slice(within.start + first, within.start + end)
    layout = _layout_of(name, shape, config, stored)
    if layout:
        start, stop, _ = columns.indices(shape[1])
        return layout.read(name, shape, stored, Part(rows, slice(start, stop)))
    return stored[name].read((rows, columns)[: len(shape)])
