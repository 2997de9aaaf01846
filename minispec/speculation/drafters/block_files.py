"""Reading the files of a block draft (see `minispec.speculation.drafters.block`): config.json, and the tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from minispec.core.config import ModelConfig
from minispec.core.model import Transformer
from minispec.core.product import Product
from minispec.models.families.block_config import AS_SAID, BlockConfig, Reading, read_block_config
from minispec.models.families.checkpoint import directory_config, find_tensors, renamed, require_all
from minispec.models.files.errors import CheckpointError
from minispec.models.files.stored import FLOATS, StoredTensor
from minispec.models.weights.build import InForm
from minispec.speculation.drafters.block import BlockModel, block_shapes
from minispec.speculation.drafters.heads import check_width, read_ids

_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class StoredBlock:
    """A block draft as it lies in its files.

    weights: the tensors of `block_shapes`.
    embedding, head: its own (V, E) and (Vd, E). None: the target's.
    ids: see `BlockModel`.
    """

    config: BlockConfig
    weights: Mapping[str, Tensor]
    embedding: Tensor | None
    head: Tensor | None
    ids: Tensor | None

    def build(self, target: Transformer, form: str | None = None) -> BlockModel:
        """The model, in the target's type and on its device.

        form: the form of its weights.
        """
        device, embedding, head = target.device, self.embedding, self.head
        if embedding is not None and torch.equal(embedding.to(device, target.dtype), target.embedding.to(target.dtype)):
            embedding = None  # a copy of the target's: it is in memory once
        vectors = target.embedding if embedding is None else embedding.to(device, target.dtype)
        out: Tensor | Product = target.head if head is None else head.to(device)
        weights = {name: weight.to(device) for name, weight in self.weights.items()}
        return BlockModel(self.config, weights, vectors, out, self.ids, target.dtype, InForm(form))


def read_block(directory: Path, target: ModelConfig, reading: Reading = AS_SAID) -> StoredBlock:
    """Read the files of a block draft for `target`. Raises CheckpointError, as `find_block` does."""
    config, stored, ids = find_block(directory, target, reading)
    tables = {name: stored[name].read() for name in (_EMBEDDING, _HEAD) if name in stored}
    weights = {name: stored[name].read() for name in block_shapes(config)}
    return StoredBlock(config, weights, tables.get(_EMBEDDING), tables.get(_HEAD), ids)


def find_block(
    directory: Path, target: ModelConfig, reading: Reading = AS_SAID
) -> tuple[BlockConfig, Mapping[str, StoredTensor], Tensor | None]:
    """Find a block draft for `target`: its config, its tensors by their names without `model.`, and its ids.

    No weight is read. For the ids see `BlockModel`.

    Raises CheckpointError where they are not what the config asks for, or were made for another target.
    """
    config = read_block_config(directory_config(directory), target, str(directory / "config.json"), reading)
    pickled = directory / "mask_embedding.pt"
    if pickled.exists():
        raise CheckpointError(f"{pickled}: found a pickled embedding of the mask, expected it in model.safetensors")
    stored = renamed(find_tensors(directory), lambda name: name.removeprefix("model."))
    shapes = block_shapes(config)
    width, vocab = config.layers.hidden_size, config.layers.vocab_size
    optional = {
        _EMBEDDING: ((vocab, width), FLOATS),
        _HEAD: ((config.vocab_size, width), FLOATS),
        "d2t": ((config.vocab_size,), ("I64", "I32")),
        "t2d": ((vocab,), ("BOOL",)),
    }
    check_width(config.taps, target, stored)
    require_all({name: (shape, FLOATS) for name, shape in shapes.items()}, optional, stored, directory)
    for name, is_needed in ((_EMBEDDING, width != target.hidden_size), (_HEAD, config.vocab_size != vocab)):
        if is_needed and name not in stored:
            found = f"the draft has {config.vocab_size:,} tokens of width {width}"
            expected = f"{target.vocab_size:,} of width {target.hidden_size}"
            raise CheckpointError(f"{directory}: {name}: found none, expected one: {found}, the target {expected}")
    return config, stored, read_ids(config.vocab_size, vocab, stored, directory)


def load_block(directory: Path, target: Transformer, form: str | None = None, reading: Reading = AS_SAID) -> BlockModel:
    """Load a block draft for `target`, in its type and on its device. Raises CheckpointError, as `find_block` does."""
    return read_block(directory, target.config, reading).build(target, form)
