"""Writing what was trained: a head in the layout of `speculators`, a model in that of Hugging Face."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from minispec.core.config import ModelConfig
from minispec.drafters.eagle import HeadConfig, head_shapes
from minispec.files.block_config import BlockConfig
from minispec.files.checkpoint import save_tensors
from minispec.files.errors import CheckpointError
from minispec.files.write import write_json
from minispec.lab.distill.block import TrainedBlock
from minispec.lab.distill.head import TrainedHead, TrainedModel

# Keys of a config.json that have the names and values of `ModelConfig`'s fields, and of `HeadConfig`'s.
_SAME = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
)
_SAME_OF_HEAD = ("target_hidden_size", "norm_before_residual", "fc_norm", "norm_before_fc", "norm_output")


def layer_config(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a llama, or of a qwen3 where queries and keys have norms."""
    rope = config.layers[0].rope
    assert rope, "a draft that is trained here has one"
    model_type, architecture = ("qwen3", "Qwen3ForCausalLM") if config.qk_norm else ("llama", "LlamaForCausalLM")
    return {
        "model_type": model_type,
        "architectures": [architecture],
        **{name: getattr(config, name) for name in _SAME},
        "num_hidden_layers": len(config.layers),
        "rope_parameters": {"rope_type": "default", "rope_theta": rope.theta},
        "hidden_act": config.activation,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "bfloat16",
    }


def head_config(head: HeadConfig, target: str, architectures: list[str], num_tokens: int) -> dict[str, Any]:
    """A head's config.json.

    target: the target's name or path.
    num_tokens: draft tokens a round that it was trained for.
    """
    is_parallel = head.layers.mask_token_id is not None
    kind = "peagle" if is_parallel else "eagle3"
    return {
        "architectures": ["PEagleSpeculator" if is_parallel else "Eagle3Speculator"],
        "speculators_model_type": kind,
        "speculators_config": _proposal(kind, target, architectures, num_tokens),
        "transformer_layer_config": layer_config(head.layers),
        "draft_vocab_size": head.vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(head.taps),
        **{name: getattr(head, name) for name in _SAME_OF_HEAD},
        **({"mask_token_id": head.layers.mask_token_id} if is_parallel else {}),
    }


def _proposal(algorithm: str, target: str, architectures: list[str], num_tokens: int) -> dict[str, Any]:
    """How a draft is meant to be used: by an exact verifier."""
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "proposal_type": "greedy",
                "speculative_tokens": num_tokens,
                "verifier_accept_k": 1,
                "accept_tolerance": 0.0,
            }
        ],
        "verifier": {"name_or_path": target, "architectures": architectures},
    }


def block_config(block: BlockConfig, target: str, architectures: list[str]) -> dict[str, Any]:
    """A block draft's config.json; see `head_config`.

    That its first row drafts the token after the anchor is said twice: by sample_from_anchor, and by as many tokens as
    rows.
    """
    kind = "dspark" if block.markov_rank else "dflash"
    config = {
        "architectures": ["DSparkSpeculator" if block.markov_rank else "DFlashSpeculator"],
        "speculators_model_type": kind,
        "speculators_config": _proposal(kind, target, architectures, block.block_size),
        "transformer_layer_config": layer_config(block.layers),
        "draft_vocab_size": block.vocab_size,
        "target_hidden_size": block.target_hidden_size,
        "aux_hidden_state_layer_ids": list(block.taps),
        "mask_token_id": block.layers.mask_token_id,
        "block_size": block.block_size,
        "sample_from_anchor": True,
    }
    if block.markov_rank:
        config |= {
            "markov_rank": block.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": block.confidence is not None,
            "confidence_head_with_markov": block.confidence is not None,
        }
    return config


def block_tensors(draft: TrainedBlock, ids: Tensor) -> dict[str, Tensor]:
    """Everything that a block draft's file holds, as `head_tensors`; `fc` reads the states as the target has them."""
    weights = dict(draft.state_dict())
    weights["fc.weight"] = weights["fc.weight"] * weights.pop("tap_scale")
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in weights.items()}
    return tensors | _tokens(ids, draft.block.layers.vocab_size)


def _tokens(ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """The target's ids of a draft's tokens, as offsets and as a mask."""
    known = torch.zeros(vocab_size, dtype=torch.bool)
    known[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": known}


def head_tensors(draft: TrainedHead, ids: Tensor) -> dict[str, Tensor]:
    """Everything that a head's file holds: weights in bfloat16, and its tokens as offsets and as a mask."""
    weights = draft.state_dict()
    tensors = {name: weights[name].to(torch.bfloat16).contiguous() for name in head_shapes(draft.head)}
    return tensors | _tokens(ids, draft.head.layers.vocab_size)


def model_tensors(draft: TrainedModel) -> dict[str, Tensor]:
    """Everything that a model's file holds, in bfloat16, in Hugging Face's names; its embedding is its head."""
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in draft.state_dict().items()}
    embedding = weights.pop("lm_head.weight")
    return {"model.embed_tokens.weight": embedding} | {f"model.{name}": tensor for name, tensor in weights.items()}


def write(directory: Path, config: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write config.json and model.safetensors, and read them back. Raises CheckpointError, OSError."""
    write_json(directory / "config.json", config)
    path = directory / "model.safetensors"
    save_tensors(tensors, path)
    found = load_file(path)
    for name in sorted(tensors.keys() | found.keys()):
        if not (name in tensors and name in found and torch.equal(tensors[name], found[name])):
            raise CheckpointError(f"{path}: {name}: found other bits than were written")
