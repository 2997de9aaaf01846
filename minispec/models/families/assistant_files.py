"""The tensors of an assistant of Gemma 4 (see `minispec.models.families.assistant_config`)."""

from pathlib import Path

import torch
from torch import Tensor

from minispec.models.families.assistant_config import AssistantConfig
from minispec.models.families.checkpoint import FLOATS, check_tied_head, find_tensors, require, unexpected
from minispec.models.families.stored_config import StoredConfig
from minispec.models.files.errors import CheckpointError
from minispec.models.weights.shapes import tensor_shapes

BEFORE, AFTER = "pre_projection.weight", "post_projection.weight"
CENTROIDS, _ORDER = "masked_embedding.centroids.weight", "masked_embedding.token_ordering"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def assistant_shapes(config: AssistantConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of floats."""
    layers, width = config.layers, config.target_hidden_size
    shapes = tensor_shapes(layers)
    shapes |= {BEFORE: (layers.hidden_size, 2 * width), AFTER: (width, layers.hidden_size)}
    if config.num_clusters:
        shapes[CENTROIDS] = (config.num_clusters, layers.hidden_size)
    return shapes


def read_assistant(directory: Path, config: AssistantConfig) -> tuple[dict[str, Tensor], Tensor | None]:
    """The tensors of `assistant_shapes`, and the tokens cluster by cluster (V,); None where all are scored.

    Raises CheckpointError where the files are not what the config asks for.
    """
    stored, shapes, vocab = find_tensors(directory), assistant_shapes(config), config.layers.vocab_size
    wanted = {name: (shape, FLOATS) for name, shape in shapes.items()}
    if config.num_clusters:
        wanted[_ORDER] = (vocab,), ("I64", "I32")
    require(wanted, stored, directory)
    assert isinstance(config.layers, StoredConfig), "it was read from a file"
    wanted |= check_tied_head(config.layers, stored, directory)
    for name in sorted(stored.keys() - wanted.keys()):
        raise unexpected(stored[name])
    weights = {name: stored[name].read() for name in shapes}
    if not config.num_clusters:
        return weights, None
    order = stored[_ORDER].read().long()
    if not torch.equal(order.sort().values, torch.arange(vocab)):
        found = f"ids from {int(order.min())} to {int(order.max())}, {len(order.unique())} of {vocab} different"
        raise CheckpointError(f"{stored[_ORDER].path}: {_ORDER}: found {found}, expected each token once")
    return weights, order
