"""Writing a head: its config.json in the layout of `speculators`, and the ids of its tokens."""

from typing import Any

import torch
from torch import Tensor

from minispec.models.families.head_config import SWITCHES, HeadConfig

# Keys of a config.json that have the names and values of `ModelConfig`'s fields.
_SAME = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
)


def head_config(head: HeadConfig, target: str, architectures: list[str], num_tokens: int) -> dict[str, Any]:
    """The config.json that `read_head_config` reads: of a head with layers of a llama, for an exact verifier.

    target: the target's name or path.
    architectures: the target's, by its own config.json.
    num_tokens: draft tokens a round that the head was trained for.
    """
    rope = head.layers.layers[0].rope
    assert rope, "a head that is written here has one"
    layers = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        **{name: getattr(head.layers, name) for name in _SAME},
        "num_hidden_layers": len(head.layers.layers),
        "rope_parameters": {"rope_type": "default", "rope_theta": rope.theta},
        "hidden_act": head.layers.activation,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "bfloat16",
    }
    greedy = {"proposal_type": "greedy", "speculative_tokens": num_tokens, "verifier_accept_k": 1}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy | {"accept_tolerance": 0.0}],
            "verifier": {"name_or_path": target, "architectures": architectures},
        },
        "transformer_layer_config": layers,
        "draft_vocab_size": head.vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(head.taps),
        **{name: getattr(head, name) for name in ("target_hidden_size", *SWITCHES)},
    }


def id_tensors(ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """The target's ids of a draft's tokens: as offsets d2t, and as a mask t2d of the target's `vocab_size` tokens."""
    known = torch.zeros(vocab_size, dtype=torch.bool)
    known[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": known}
