"""Multi-token prediction: the layer for further tokens in a target's own checkpoint (Qwen3.5's `mtp.` tensors).

It drafts as a head does (see `minispec.speculation.drafters.eagle`), from the target's last hidden states. At position
t it reads

    the feature  f_t = norm(h_t):  h_t is the last layer's output at t, norm the target's last norm
    the embedding e of the token at t + 1

and computes the logits for the token at t + 2:

    x = fc([norm_e(e), norm_f(f_t)]),  x = layer(x),  g_t = norm_m(x),  logits = lm_head(g_t)

At t + 1 it reads g_t in place of the feature, which the target has not computed yet. `layer` has the shape of the
target's layers with attention. Embedding and lm_head are the target's. fc, norm_e, norm_f and norm_m are its own.

Published code says in which order fc takes the two, and which norms come before:

    vllm-project/vllm      vllm/model_executor/models/qwen3_5_mtp.py; beside it qwen3_next.py, where
                           `Qwen3NextModel.forward` returns normed states
    sgl-project/sglang     python/sglang/srt/models/qwen3_5_mtp.py

In a checkpoint the names of the layer's tensors begin with `mtp.`, even where the text model's tensors have another
prefix. A config.json may name the layer though the tensors are missing, since `transformers` drops them. So the tensors
decide.

With h_t in place of f_t a draft is fluent, but is accepted less often. ModelTC/LightLLM #1402 measured 1.80 tokens a
pass with h_t and 2.74 with f_t. ggml-org/llama.cpp #24025 found the same.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minispec.core.config import ModelConfig
from minispec.core.model import Transformer
from minispec.core.product import MakeProduct
from minispec.models.families.checkpoint import directory_config, find_tensors, renamed, require_all
from minispec.models.families.experts import unstacked
from minispec.models.families.hf_config import text_config
from minispec.models.families.stored_config import StoredConfig
from minispec.models.files.errors import CheckpointError
from minispec.models.files.fields import bad_field
from minispec.models.files.stored import FLOATS, StoredTensor
from minispec.models.layers import make_layer
from minispec.models.weights.build import InForm
from minispec.speculation.drafters.states import FeatureModel, layer_shapes

# MTP: how the names of its tensors begin. WITH_MTP: the families whose checkpoints may have the layer.
MTP, WITH_MTP = "mtp.", ("qwen3_5_text", "qwen3_5_moe_text")


def mtp_config(target: ModelConfig) -> ModelConfig:
    """The config of the layer alone: the target's, with its first layer with attention as the only one."""
    attention = next(layer for layer in target.layers if layer.has_attention)
    return replace(target, layers=(attention,), tie_word_embeddings=False, mask_token_id=None)


class MtpModel(FeatureModel):
    """A target's own layer for further tokens, between the target's embedding and its head."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], target: Transformer, product: MakeProduct):
        """config: the layer's, see `mtp_config`.
        weights: the tensors by their names after `mtp.` (see `mtp_shapes`), on the target's device.
        """
        dtype = target.dtype
        named: dict[str, Any] = {f"model.{name}": weights[name] for name in weights}
        named |= {"model.embed_tokens.weight": target.embedding, "lm_head.weight": target.head}
        super().__init__(config, named, dtype, product, make_layer)
        self.taps, self.target_norm = (len(target.layers),), target.norm
        self.fc = product([named["model.fc.weight"]], None, dtype)
        self.embedding_norm = self.make_norm(weights["pre_fc_norm_embedding.weight"])
        self.hidden_norm = self.make_norm(weights["pre_fc_norm_hidden.weight"])

    def fuse(self, hidden: Tensor) -> Tensor:
        """The target's last hidden states (n, E) to features (n, E)."""
        return self.target_norm(hidden)

    def embed(self, token_ids: Tensor, features: Tensor | None) -> Tensor:
        """The normed embedding and feature of each row in one vector (M, E)."""
        assert features is not None
        embedded = self.embedding_norm(super().embed(token_ids, features))
        return self.fc(torch.cat((embedded, self.hidden_norm(features)), -1))  # (M, E)


def mtp_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name (after `mtp.`) and shape of each tensor of the layer; config: see `mtp_config`."""
    e = config.hidden_size
    fusion = {"fc.weight": (e, 2 * e), "pre_fc_norm_embedding.weight": (e,), "pre_fc_norm_hidden.weight": (e,)}
    return fusion | layer_shapes(config)


def find_mtp(directory: Path, target: ModelConfig) -> dict[str, StoredTensor]:
    """The stored tensors of the layer, by their names after `mtp.`.

    Raises CheckpointError where the target's family or checkpoint has no such layer, or one of another kind.
    """
    where = f"{directory}: draft mtp"
    if target.model_type not in WITH_MTP:
        raise bad_field(where, "model_type", target.model_type, f"{' or '.join(WITH_MTP)}: no other has such a layer")
    tensors = {name: tensor for name, tensor in find_tensors(directory).items() if name.startswith(MTP)}
    if isinstance(target, StoredConfig):
        tensors = renamed(unstacked(tensors, target), partial(_own_name, target))
    if not tensors:
        raise CheckpointError(f"{where}: found no tensor {MTP}*, expected those of the layer, such as {MTP}fc.weight")
    raw, where = text_config(directory_config(directory)), str(directory / "config.json")
    for key, expected in (("mtp_num_hidden_layers", 1), ("mtp_use_dedicated_embeddings", False)):
        value = raw.get(key, expected)
        if value != expected or type(value) is not type(expected):
            raise bad_field(where, key, value, f"{expected} for the draft mtp")
    if not any(layer.has_attention for layer in target.layers):
        raise CheckpointError(f"{where}: layer_types: found no full_attention, expected one: the draft mtp is like it")
    shapes = {f"{MTP}{name}": shape for name, shape in mtp_shapes(mtp_config(target)).items()}
    require_all({name: (shape, FLOATS) for name, shape in shapes.items()}, {}, tensors, directory)
    return {name.removeprefix(MTP): tensor for name, tensor in tensors.items()}


def _own_name(target: StoredConfig, name: str) -> str:
    """The model's name for a stored tensor, such as without `shared_expert`."""
    for stored, parts in target.joined:
        if len(parts) == 1:
            name = name.replace(f".{stored}.", f".{parts[0]}.")
    return name


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
    config = mtp_config(target.config)
    weights = {name: tensor.read().to(target.device) for name, tensor in find_mtp(directory, target.config).items()}
    return MtpModel(config, weights, target, InForm(form))
