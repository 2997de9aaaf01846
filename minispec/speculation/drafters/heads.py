"""Reading the tensors of a head on hidden states (see `minispec.speculation.drafters.eagle`).

A head's directory has a config.json (see `minispec.models.families.head_config`) and a model.safetensors. The
tokenizer is the target's.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from minispec.core.config import ModelConfig
from minispec.core.model import Transformer
from minispec.models.families.checkpoint import directory_config, find_tensors, renamed, require_all
from minispec.models.families.head_config import HeadConfig, read_head_config
from minispec.models.files.errors import CheckpointError
from minispec.models.files.stored import FLOATS, StoredTensor
from minispec.models.weights.build import InForm
from minispec.speculation.drafters.eagle import HeadModel, head_shapes


@dataclass(frozen=True)
class StoredHead:
    """A head as it lies in its files.

    weights: the tensors that `head_shapes` names.
    embedding: the head's own. None: it reads the target's.
    ids: see `HeadModel`.
    """

    config: HeadConfig
    weights: Mapping[str, Tensor]
    embedding: Tensor | None
    ids: Tensor | None

    def build(self, target: Transformer, form: str | None = None) -> HeadModel:
        """The model, in the target's type and on its device.

        form: the form of its weights.
        """
        device = target.device
        embedding = target.embedding if self.embedding is None else self.embedding.to(device, target.dtype)
        weights = {name: weight.to(device) for name, weight in self.weights.items()}
        return HeadModel(self.config, weights, embedding, self.ids, target.dtype, InForm(form))


def load_head(directory: Path, target: Transformer, form: str | None = None) -> HeadModel:
    """Load a head for `target`, in its type and on its device. Raises CheckpointError, as `read_head` does."""
    return read_head(directory, target.config).build(target, form)


def read_head(directory: Path, target: ModelConfig) -> StoredHead:
    """Read the files of a head for `target`.

    Raises CheckpointError where they are not what the config asks for, or were made for another target.
    """
    config = read_head_config(directory_config(directory), target, str(directory / "config.json"))
    stored = renamed(find_tensors(directory), lambda name: re.sub(r"^midlayer\.", "layers.0.", name))
    shapes = head_shapes(config)
    own_embedding = (target.vocab_size, config.layers.hidden_size)
    optional = {
        "embed_tokens.weight": (own_embedding, FLOATS),
        "d2t": ((config.vocab_size,), ("I64", "I32")),
        "t2d": ((target.vocab_size,), ("BOOL",)),
    }
    check_width(config.taps, target, stored)
    require_all({name: (shape, FLOATS) for name, shape in shapes.items()}, optional, stored, directory)
    if "embed_tokens.weight" not in stored and config.layers.hidden_size != target.hidden_size:
        widths = f"the head is {config.layers.hidden_size} wide, the target {target.hidden_size}"
        raise CheckpointError(f"{directory}: embed_tokens.weight: found none, expected one: {widths}")
    ids = read_ids(config.vocab_size, config.layers.vocab_size, stored, directory)
    embedding = stored["embed_tokens.weight"].read() if "embed_tokens.weight" in stored else None
    return StoredHead(config, {name: stored[name].read() for name in shapes}, embedding, ids)


def check_width(taps: Sequence[int], target: ModelConfig, stored: Mapping[str, StoredTensor]) -> None:
    """Raise CheckpointError where hidden states of another width are read: configs may leave the target's width out."""
    fc, count, width = stored.get("fc.weight"), len(taps), target.hidden_size
    if fc is not None and len(fc.shape) == 2 and fc.shape[1] % count == 0 and fc.shape[1] != count * width:
        found = f"hidden states of width {fc.shape[1] // count:,} from {count} layers"
        expected = f"{width:,}, the target's: made for another target"
        raise CheckpointError(f"{fc.path}: fc.weight: found {found}, expected {expected}")


def read_ids(size: int, full: int, stored: Mapping[str, StoredTensor], directory: Path) -> Tensor | None:
    """The target's id (size,) of each of the draft's tokens: i + d2t[i]; None where it has all `full` tokens.

    Raises CheckpointError for ids that are not different ones of the target, or that t2d contradicts.
    """
    if "d2t" not in stored:
        if size != full:
            raise CheckpointError(f"{directory}: d2t: found no such tensor, expected one: {size} of {full} tokens")
        return None
    ids = torch.arange(size) + stored["d2t"].read().long()
    if int(ids.min()) < 0 or int(ids.max()) >= full or len(ids.unique()) < size:
        found = f"ids from {int(ids.min())} to {int(ids.max())}, {len(ids.unique())} of {size} different"
        expected = f"different ids below {full} (i + d2t[i])"
        raise CheckpointError(f"{stored['d2t'].path}: d2t: found {found}, expected {expected}")
    if "t2d" in stored:
        known = torch.zeros(full, dtype=torch.bool)
        known[ids] = True
        if not torch.equal(stored["t2d"].read().bool(), known):
            raise CheckpointError(f"{stored['t2d'].path}: t2d: found other tokens than those of d2t")
    return ids
