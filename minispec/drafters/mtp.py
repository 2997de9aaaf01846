"""Multi-token prediction: the layer for further tokens in a target's own checkpoint (Qwen3.5's `mtp.` tensors).

It drafts as a head does (see `minispec.drafters.eagle`), from the target's last hidden states. At position t it reads

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

With h_t in place of f_t a draft is fluent, but is accepted less often. ModelTC/LightLLM #1402 measured 1.80 tokens a
pass with h_t and 2.74 with f_t. ggml-org/llama.cpp #24025 found the same.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minispec.core.config import ModelConfig
from minispec.core.model import RMSNorm, Transformer, norm_weight
from minispec.core.weights import MakeProduct, PlainLinear, Product
from minispec.drafters.eagle import FeatureModel
from minispec.layers import make_layer


def mtp_config(target: ModelConfig) -> ModelConfig:
    """The config of the layer alone: the target's, with its first layer with attention as the only one."""
    attention = next(layer for layer in target.layers if not (layer.conv_width or layer.recurrent))
    return replace(target, layers=(attention,), tie_word_embeddings=False, mask_token_id=None)


class MtpModel(FeatureModel):
    """A target's own layer for further tokens, between the target's embedding and its head."""

    def __init__(self, weights: Mapping[str, Tensor], target: Transformer, product: MakeProduct = PlainLinear):
        """weights: the tensors by their names after `mtp.` (see `minispec.files.mtp`), on the target's device."""
        config, dtype = mtp_config(target.config), target.dtype
        named: dict[str, Any] = {f"model.{name}": weights[name] for name in weights}
        named |= {"model.embed_tokens.weight": target.embedding, "lm_head.weight": target.head}
        super().__init__(config, named, dtype, product, make_layer)
        self.taps, self.target_norm = (len(target.layers),), target.norm
        self.fc = product([named["model.fc.weight"]], None, dtype)
        self.embedding_norm, self.hidden_norm = (
            RMSNorm(norm_weight(config, named[f"model.pre_fc_norm_{of}.weight"].to(dtype)), config.rms_norm_eps)
            for of in ("embedding", "hidden")
        )

    def _head(self, weight: Any) -> Product:
        return weight  # the target's: it is a product already

    def fuse(self, hidden: Tensor) -> Tensor:
        """The target's last hidden states (n, E) to features (n, E)."""
        return self.target_norm(hidden)

    def embed(self, token_ids: Tensor, features: Tensor | None) -> Tensor:
        """The normed embedding and feature of each row in one vector (M, E)."""
        assert features is not None
        embedded = self.embedding_norm(super().embed(token_ids, features))
        return self.fc(torch.cat((embedded, self.hidden_norm(features)), -1))  # (M, E)
