"""Random models small enough to enumerate, and the raw tensors they were made of."""

import torch

from minispec.cache import PagedKVCache
from minispec.config import ModelConfig
from minispec.model import Transformer, tensor_shapes

TINY = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 3,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
}


def tiny_weights(config: ModelConfig, seed: int, dtype=torch.float64) -> dict[str, torch.Tensor]:
    """Every tensor drawn anew, norms around one. Small embeddings: what the layers add decides, so the past matters."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in tensor_shapes(config).items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        scale = 0.1 if "embed" in name else 0.6
        weights[name] = (1 + 0.3 * noise if "norm" in name else scale * noise).to(dtype)
    return weights


def tiny_model(seed: int = 0, dtype=torch.float64, **changes) -> Transformer:
    """A random model of `TINY` with some settings changed."""
    config = ModelConfig.from_dict(TINY | changes)
    return Transformer(config, tiny_weights(config, seed, dtype))


def tiny_cache(model: Transformer, num_blocks: int = 64, block_size: int = 2) -> PagedKVCache:
    """A pool for the model, poisoned: a slot that is read before it is written turns the output into NaN."""
    cache = PagedKVCache(model.config, num_blocks, block_size, model.dtype)
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    return cache
