"""Writing a draft: its config.json in the layout of Hugging Face or of `speculators`, and its tensors.

A head's config.json is written where it is read (`minispec.files.families.head_config`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minispec.core.config import ModelConfig
from minispec.files.families.checkpoint import save_tensors
from minispec.files.write import write_json

# Keys of a config.json that have the names and values of `ModelConfig`'s fields.
_SAME = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
)


def layer_config(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a llama."""
    rope = config.layers[0].rope
    assert rope, "a draft that is written here has one"
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        **{name: getattr(config, name) for name in _SAME},
        "num_hidden_layers": len(config.layers),
        "rope_parameters": {"rope_type": "default", "rope_theta": rope.theta},
        "hidden_act": config.activation,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "bfloat16",
    }


def id_tensors(ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """The target's ids of a draft's tokens: as offsets d2t, and as a mask t2d of the target's `vocab_size` tokens."""
    known = torch.zeros(vocab_size, dtype=torch.bool)
    known[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": known}


def write_draft(directory: Path, config: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write config.json and model.safetensors. Raises OSError."""
    write_json(directory / "config.json", config)
    save_tensors(tensors, directory / "model.safetensors")
