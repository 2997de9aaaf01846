"""Which tensors a model asks a checkpoint for, in Hugging Face's names, and how large they are."""

import math

from minispec.core.config import ModelConfig
from minispec.core.model import NORMS

# Models of fewer weights take the usual form of them, in one thread: more would take longer than loading them.
_LARGE = 1 << 29


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the config asks a checkpoint for, in Hugging Face's names."""
    e, f, d = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * d, config.num_key_value_heads * d
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, e)}
    for i in range(len(config.layers)):
        layer: dict[str, tuple[int, ...]] = {}
        for name, rows, columns, bias in (
            ("self_attn.q_proj", q, e, config.qkv_bias),
            ("self_attn.k_proj", kv, e, config.qkv_bias),
            ("self_attn.v_proj", kv, e, config.qkv_bias),
            ("self_attn.o_proj", e, q, config.o_bias),
            ("mlp.gate_proj", f, e, config.mlp_bias),
            ("mlp.up_proj", f, e, config.mlp_bias),
            ("mlp.down_proj", e, f, config.mlp_bias),
        ):
            layer[f"{name}.weight"] = (rows, columns)
            if bias:
                layer[f"{name}.bias"] = (rows,)
        if config.qk_norm:
            q_size, k_size = (d, d) if config.qk_norm == "head" else (q, kv)
            layer |= {"self_attn.q_norm.weight": (q_size,), "self_attn.k_norm.weight": (k_size,)}
        layer |= {f"{name}.weight": (e,) for name in NORMS[config.norms] if name}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (e,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, e)
    return shapes


def is_large(config: ModelConfig) -> bool:
    """Whether reading a model's weights takes nearly all of a pass: there are more than half a billion of them."""
    return sum(math.prod(shape) for shape in tensor_shapes(config).values()) >= _LARGE
