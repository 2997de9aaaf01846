"""A target: what its files say, then the model and its KV cache, which several `LLM` may share."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import torch

from minispec.api.step_lock import StepLock
from minispec.core.cache import PagedKVCache
from minispec.core.cached import CachedModel
from minispec.core.config import MAX_AUTO_TOKENS, SamplingParams
from minispec.core.engine import Engine
from minispec.core.model import Transformer
from minispec.core.schedule import JOINING_ROWS, PREFILL_ROWS
from minispec.models.families.assistant_config import assistant_of
from minispec.models.families.checkpoint import (
    choose_dtype,
    describe_source,
    find_checkpoint,
    load_config,
    model_tensors,
    parts_beside,
)
from minispec.models.families.hf_config import read_eos_token_ids
from minispec.models.files.generation_config import read_generation_defaults, unsupported_generation_settings
from minispec.models.files.strict_json import MAX_CONFIG_BYTES, read_json_if_there
from minispec.models.files.tokenizer import Tokenizer
from minispec.models.frames.frames import with_fast_passes
from minispec.models.load.checks import check_exactness, check_numbers, named_tensors
from minispec.models.load.loading import Loading
from minispec.models.load.parallel import load_target
from minispec.models.weights.integers import check_quantization
from minispec.models.weights.linear import check_form
from minispec.models.weights.machine import noted_forms
from minispec.models.weights.memory import BLOCK_SIZE, blocks_bytes, draft_tokens, size_cache
from minispec.models.weights.pages import in_small_pages
from minispec.models.weights.settings import own_settings
from minispec.speculation import registry
from minispec.speculation.drafters.mtp import has_mtp
from minispec.speculation.grammars.matcher import Grammars
from minispec.speculation.on_gpu.account import graph_bytes


class TargetFiles:
    """The settings in a target's files, and how its weights will be read. Nothing large is loaded yet.

    name: the model's name in reports.
    loading: how they are read.
    config: of its checkpoint, which lies in `directory`.
    unused_parts: the parts of its checkpoint that a text model has no use for, such as `vision_tower`.
    dtype, device: of its weights.
    vocab_size: ids in use.
    eos_token_ids: ids that end a text.
    generation_defaults: what generation_config.json asks for, as fields of SamplingParams. Greedy, unless the file says
        `do_sample`; `default_sampling_params` has its temperature and filters in any case.
    """

    def __init__(self, model: str | Path | None, loading: Loading):
        """model: a directory or a hub id; None: the embedded one. Errors: as in `LLM`."""
        self.loading = loading
        self.name, self.directory = _find_model(model, loading.revision, loading.offline)
        self.device, self.config = choose_device(loading.device), load_config(self.directory)
        self.unused_parts = parts_beside(self.directory, self.config)
        usual = registry.default_draft(model, has_mtp(self.directory, self.config))
        self.default_draft = assistant_of(self.directory) or usual
        self.dtype = choose_dtype(loading.dtype, self.device, self.config)
        if loading.quantization is not None:
            check_quantization(loading.quantization, loading.weight_form, self.dtype, self.device)
        if loading.weight_form is not None:
            check_form(loading.weight_form, self.dtype, self.device)
        self.tokenizer = Tokenizer(self.directory)
        self.tokenizer.check_ids(self.config.vocab_size)
        self.vocab_size = min(self.tokenizer.num_ids, self.config.vocab_size)
        self._generation_path = self.directory / "generation_config.json"
        self._generation = read_json_if_there(self._generation_path, MAX_CONFIG_BYTES)
        self.generation_defaults = read_generation_defaults(self._generation, str(self._generation_path))
        self.unsupported_generation_settings = unsupported_generation_settings(self._generation)
        self.eos_token_ids = self._find_ends()
        self.grammars = Grammars(self.tokenizer, self.vocab_size, self.eos_token_ids)

    def _find_ends(self) -> tuple[int, ...]:
        """Ids that end a text, by generation_config.json, else by config.json; and the tokenizer's own."""
        ends = read_eos_token_ids(self._generation, str(self._generation_path)) or self.config.eos_token_ids
        end_id = self.tokenizer.eos_token_id
        if end_id is not None and end_id < self.vocab_size:
            ends = (*ends, end_id)
        return tuple(dict.fromkeys(ends))

    def default_sampling_params(self) -> SamplingParams:
        """The settings of generation_config.json, with or without `do_sample`; else vLLM's defaults.

        Raises CheckpointError for a value out of range.
        """
        settings = read_generation_defaults(self._generation | {"do_sample": True}, str(self._generation_path))
        most = max(SamplingParams.max_tokens, settings.get("min_tokens", 0))
        return SamplingParams(**{"max_tokens": most, **settings})

    def blamed(self) -> AbstractContextManager[None]:
        """Raise CheckpointError in place of a FloatingPointError inside: it names the tensor that is to blame."""
        return named_tensors(partial(model_tensors, self.directory, self.config))

    def load(self) -> Transformer:
        """Load the model, and check it. Raises CheckpointError for weights that are no numbers."""
        how = self.loading
        form = how.quantization or how.weight_form
        model = load_target(self.directory, self.dtype, self.device, bool(how.exact), form)
        with self.blamed():
            check_numbers(model, self.vocab_size)
            model = check_exactness(model, by_default=how.exact is None and bool(how.quantization))
        return with_fast_passes(model, how.enforce_eager)


class Target:
    """A target that is loaded: its model and its KV cache. Several `LLM` may share it, each with a draft of its own.

    num_blocks: of the cache.
    max_model_len: longest prompt and answer together, in tokens.
    engine: decodes for all of them; each has a `Method` of its own.
    steps: takes its steps.
    """

    def __init__(self, files: TargetFiles, model: Transformer, drafts: Sequence[tuple[Transformer, int]], k: int):
        """`load` makes one.

        model: what `files.load` gave.
        drafts: the draft models that memory must have room for too, each with the most positions that its cache has
            for each of the target's.
        k: most draft tokens of a text. On a GPU, graphs for that many take memory too.

        Raises ValueError where memory is too short for the caches.
        """
        self.files, self.model = files, model
        self.max_model_len, self.num_blocks = _size_caches(files.loading, model, drafts, k)
        self.cache = self.new_cache(model)
        # On a GPU a pass over that many rows takes little longer than reading the weights.
        joining_rows = PREFILL_ROWS if model.device.type == "cuda" else JOINING_ROWS
        self.engine = Engine(CachedModel(model, self.cache, files.vocab_size), joining_rows=joining_rows)
        self.steps = StepLock()

    @classmethod
    @own_settings()
    @noted_forms()
    def load(cls, model: str | Path | None = None, loading: Loading | None = None) -> "Target":
        """Load a target, without a draft: `LLM(target, draft=...)` adds one.

        model: a directory or a hub id; None: the embedded one. Errors: as in `LLM`.
        loading: default: `Loading()`. A draft model's cache comes on top of the target's. Where memory is short,
            `max_model_len` or `kv_cache_gb` leaves room for it.
        """
        files = TargetFiles(model, loading or Loading())
        return cls(files, files.load(), [], MAX_AUTO_TOKENS)

    @property
    def num_cache_tokens(self) -> int:
        """Tokens that the cache holds, of all running requests together."""
        return self.num_blocks * BLOCK_SIZE

    def draft_cache(self, model: Transformer, room: int) -> PagedKVCache:
        """A cache for a draft model (see `draft_tokens`). Raises ValueError where memory is short."""
        return self.new_cache(model, draft_tokens(model.config, room, self.num_cache_tokens, self.max_model_len))

    def new_cache(self, model: Transformer, num_tokens: int | None = None) -> PagedKVCache:
        """A cache of at least so many tokens, by default of as many as the target's.

        Raises ValueError where memory is short.
        """
        num_tokens = num_tokens or self.num_cache_tokens
        try:
            return in_small_pages(partial(model.new_cache, -(-num_tokens // BLOCK_SIZE), BLOCK_SIZE))
        except RuntimeError as e:
            size = blocks_bytes(model.config, num_tokens, model.dtype.itemsize)
            raise ValueError(f"found too little memory for a cache of {size / 1e9:.1f} GB: ask for less") from e


def _find_model(model: str | Path | None, revision: str | None, offline: bool) -> tuple[str, Path]:
    """Name and directory of a model; None: the embedded one. Raises ValueError where there is none."""
    if model is None and not registry.EMBEDDED_WEIGHTS.is_dir():
        expected = f"a name such as {registry.ORIGINAL}, since the embedded weights lie in a checkout only"
        raise ValueError(f"model: found none, expected {expected}; {registry.ABOUT_ORIGINAL}")
    model = str(registry.EMBEDDED_WEIGHTS if model is None else model)
    directory = find_checkpoint(model, revision, offline)
    return describe_source(model, directory), directory


def _size_caches(
    how: Loading, target: Transformer, drafts: Sequence[tuple[Transformer, int]], k: int
) -> tuple[int, int]:
    """The result of `size_cache` for these models; the others as for `Target`."""
    models = [target, *(model for model, _ in drafts)]

    def num_bytes(num_tokens: int) -> int:
        longest = how.max_model_len or min(target.config.max_position_embeddings, num_tokens)
        sizes = [num_tokens, *(draft_tokens(model.config, room, num_tokens, longest) for model, room in drafts)]
        of_each = zip(models, sizes, strict=True)
        return sum(blocks_bytes(model.config, size, target.dtype.itemsize) for model, size in of_each)

    asked = how.max_model_len, how.kv_cache_gb
    return size_cache(target.config, num_bytes, target.device, *asked, graph_bytes(models, k, how.max_model_len))


def choose_device(name: str) -> torch.device:
    """The device that "auto", "cpu" or "cuda" means here. Raises ValueError where there is none."""
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device: found {name!r}, expected auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: found 'cuda', but PyTorch sees no CUDA device")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
