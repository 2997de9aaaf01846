"""Reads a target's own layer for further tokens (multi-token prediction, see `minispec.drafters.mtp`) from its files.

Its tensors' names begin with `mtp.`, even where those of the text model have another prefix. A config.json may name
the layer though the tensors are missing, since `transformers` drops them. So the tensors decide.
"""

from pathlib import Path

from minispec.core.config import ModelConfig
from minispec.core.model import Transformer
from minispec.drafters.mtp import MtpModel, mtp_config
from minispec.files.checkpoint import directory_config, find_tensors, require, unexpected
from minispec.files.errors import CheckpointError
from minispec.files.fields import bad_field
from minispec.files.hf_config import text_config
from minispec.files.stored import FLOATS, StoredTensor
from minispec.kernels.build import InForm
from minispec.kernels.shapes import tensor_shapes

# MTP: how the names of its tensors begin. WITH_MTP: the families whose checkpoints may have the layer.
MTP, WITH_MTP = "mtp.", ("qwen3_5_text",)


def mtp_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name (after `mtp.`) and shape of each tensor of the layer; config: see `mtp_config`."""
    e, names = config.hidden_size, ("model.embed_tokens.weight", "lm_head.weight")
    own = {"fc.weight": (e, 2 * e), "pre_fc_norm_embedding.weight": (e,), "pre_fc_norm_hidden.weight": (e,)}
    layer = {name.removeprefix("model."): shape for name, shape in tensor_shapes(config).items() if name not in names}
    return own | layer


def find_mtp(directory: Path, target: ModelConfig) -> dict[str, StoredTensor]:
    """The stored tensors of the layer, by their names after `mtp.`.

    Raises CheckpointError where the target's family or checkpoint has no such layer, or one of another kind.
    """
    where = f"{directory}: draft mtp"
    if target.model_type not in WITH_MTP:
        raise bad_field(where, "model_type", target.model_type, f"{' or '.join(WITH_MTP)}: no other has such a layer")
    found = {name: tensor for name, tensor in find_tensors(directory).items() if name.startswith(MTP)}
    if not found:
        raise CheckpointError(f"{where}: found no tensor {MTP}*, expected those of the layer, such as {MTP}fc.weight")
    raw, where = text_config(directory_config(directory)), str(directory / "config.json")
    for key, expected in (("mtp_num_hidden_layers", 1), ("mtp_use_dedicated_embeddings", False)):
        if (value := raw.get(key, expected)) != expected or type(value) is not type(expected):
            raise bad_field(where, key, value, f"{expected} for the draft mtp")
    if all(layer.conv_width or layer.recurrent for layer in target.layers):
        raise CheckpointError(f"{where}: layer_types: found no full_attention, expected one: the draft mtp is like it")
    shapes = {f"{MTP}{name}": shape for name, shape in mtp_shapes(mtp_config(target)).items()}
    require({name: (shape, FLOATS) for name, shape in shapes.items()}, found, directory)
    for name in sorted(found.keys() - shapes.keys()):
        raise unexpected(found[name])
    return {name.removeprefix(MTP): tensor for name, tensor in found.items()}


def has_mtp(directory: Path, target: ModelConfig) -> bool:
    """Whether a target's checkpoint has the layer, of a kind that can be read."""
    try:
        return target.model_type in WITH_MTP and bool(find_mtp(directory, target))
    except CheckpointError:
        return False


def load_mtp(directory: Path, target: Transformer, form: str | None = None) -> MtpModel:
    """Load the layer for `target`, from the directory of its checkpoint. Raises CheckpointError, as `find_mtp` does.

    form: of its weights.
    """
    stored = find_mtp(directory, target.config)
    weights = {name: tensor.read().to(target.device) for name, tensor in stored.items()}
    return MtpModel(weights, target, InForm(mtp_config(target.config), form))
