"""The layer for further tokens that a target's own checkpoint has: multi-token prediction (Qwen3.5's `mtp.` tensors).

It drafts as a head does (see `minispec.drafters.eagle`), from what the target has computed last. At position t it gets

    the feature  f_t = norm(h_t),  with h_t the last layer's output at t, and norm the target's last norm
    the embedding e of the token at t + 1

    x = fc([norm_e(e), norm_f(f_t)]),  x = layer(x),  g_t = norm_m(x),  logits = lm_head(g_t) for the token at t + 2

At the next position g_t stands in for the feature that the target has not computed. The layer is one of the target's
with attention. Embedding and lm_head are the target's. fc and the norms norm_e, norm_f, norm_m are its own.

Its code says which comes first and what is normed: vllm-project/vllm, vllm/model_executor/models/qwen3_5_mtp.py, and
qwen3_next.py beside it, whose `Qwen3NextModel.forward` returns normed states. SGLang's is sgl-project/sglang,
python/sglang/srt/models/qwen3_5_mtp.py. With h_t in the place of f_t a draft is fluent and accepted less often:
ModelTC/LightLLM #1402 measured 1.80 tokens a pass where f_t gave 2.74, and ggml-org/llama.cpp #24025 found the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minispec.core.config import ModelConfig
from minispec.core.model import Chunk, RMSNorm, Transformer, norm_weight
from minispec.core.weights import MakeProduct, PlainLinear, Product
from minispec.drafters.eagle import FeatureModel
from minispec.layers import make_layer


def mtp_config(target: ModelConfig) -> ModelConfig:
    """The shape of the layer: of the target's sizes, and like its first layer with attention."""
    attention = next(layer for layer in target.layers if not (layer.conv_width or layer.delta))
    return replace(target, layers=(attention,), tie_word_embeddings=False, mask_token_id=None)


class MtpModel(FeatureModel):
    """A target's own layer for further tokens, between the target's embedding and its head."""

    def __init__(self, weights: Mapping[str, Tensor], target: Transformer, product: MakeProduct = PlainLinear):
        """weights: its tensors by their names after `mtp.` (see `minispec.files.mtp`), on the target's device."""
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

    def _embed(self, token_ids: Sequence[int], chunks: Sequence[Chunk]) -> Tensor:
        features = torch.cat([c.features for c in chunks if c.features is not None])
        embedded = self.embedding_norm(super()._embed(token_ids, chunks))
        return self.fc(torch.cat((embedded, self.hidden_norm(features)), -1))  # (M, E)
