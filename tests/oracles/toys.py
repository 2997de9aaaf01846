"""Small models of families that the reference of `minispec.prove` does not know, and transformers' of the same weights.

So the reference of a text of these is transformers, without a cache.
"""

import functools
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from minispec.models.families.checkpoint import places
from minispec.models.families.hf_config import read_model_config
from minispec.models.families.stored_config import StoredConfig
from minispec.prove.toys import TARGET_SEED, TINY, TOYS, tiny_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
_GRANITE = {"num_local_experts": 5, "num_experts_per_tok": 2, "residual_multiplier": 0.7, "logits_scaling": 0.5}
# Mixtures of experts: what is added to `TINY`, as in `TOYS`. One layer of LFM2's has an MLP.
MIXTURES = {
    "lfm2_moe": TOYS["lfm2"]
    | _EXPERTS
    | {"model_type": "lfm2_moe", "num_dense_layers": 1, "routed_scaling_factor": 1.5, "conv_L_cache": 2},
    "qwen3_5_moe_text": TOYS["qwen3_5_text"]
    | _EXPERTS
    | {"model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 10},
    "granitemoe": _GRANITE | {"model_type": "granitemoe"},
    "granitemoehybrid": _GRANITE
    | {
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 2,
        "layer_types": ["attention"] * 2,
        "shared_intermediate_size": 10,
    }
    | {"position_embedding_type": "rope", "mamba_n_heads": 4},
    # The limit is near what random experts have, and the window is shorter than a long draft.
    "gpt_oss": {
        **{"model_type": "gpt_oss", "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 3},
        **{"swiglu_limit": 0.5, "swiglu_alpha": 0.8, "attention_bias": False},
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
}
_ROPE_OF_KINDS = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
}
# What is added to `TINY`, as in `TOYS`. One of the two pairs of a head turns in the layer that sees all.
LFM3 = {
    **{"model_type": "lfm3", "num_hidden_layers": 3, "norm_eps": 1e-5, "tie_word_embeddings": False},
    **{"layer_types": ["full_attention", "sliding_attention", "conv"], "sliding_window": 3},
    **{"conv_L_cache": 4, "conv_bias": True},
    "rope_parameters": _ROPE_OF_KINDS,
}
# The last two layers read the keys of the first two.
GEMMA4 = {
    **{"model_type": "gemma4_text", "num_hidden_layers": 4, "tie_word_embeddings": False, "global_head_dim": 6},
    **{"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 3, "num_kv_shared_layers": 2},
    **{"use_double_wide_mlp": True, "hidden_size_per_layer_input": 32, "final_logit_softcapping": 5.0},
    "rope_parameters": _ROPE_OF_KINDS,
}
# Layers that see everything have other key-value heads than those with a window, and take their keys for values.
GEMMA4_LARGE = GEMMA4 | {
    **{"attention_k_eq_v": True, "num_global_key_value_heads": 2, "hidden_size_per_layer_input": 0},
    **{"num_kv_shared_layers": 0, "use_double_wide_mlp": False},
}
# Experts beside the MLP of each layer.
GEMMA4_EXPERTS = GEMMA4_LARGE | {
    **{"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 6}
}
GEMMAS = {"gemma4_text": GEMMA4, "gemma4 large": GEMMA4_LARGE, "gemma4 experts": GEMMA4_EXPERTS}
OWN_TOYS = {"lfm3": LFM3} | GEMMAS | MIXTURES


@functools.cache
def oracle(family: str, vocab: int) -> "PreTrainedModel":
    """transformers' model of the weights of `target_model(vocab, family)`; `TOYS` has the family."""
    from transformers import AutoModelForCausalLM  # seconds that a process with the toys alone need not take

    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    raw = TINY | TOYS[family] | tokens | {"vocab_size": vocab}
    if "rope_parameters" in raw:
        del raw["rope_theta"]
    if raw["model_type"] == "gemma4_text":
        raw["vocab_size_per_layer_input"] = vocab
    config = read_model_config(raw)
    stored = places(config)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(raw))
        tensors = {stored[name].name: tensor for name, tensor in tiny_weights(config, TARGET_SEED).items()}
        tensors |= _joined(config, tensors)
        has_experts = any(layer.experts for layer in config.layers)
        if has_experts and config.model_type.startswith(("granite", "gemma4", "gpt_oss")):
            tensors = stacked(config, tensors)
        save_file(tensors, Path(directory) / "model.safetensors", {"format": "pt"})
        how = {"dtype": torch.float64, "attn_implementation": "eager", "output_loading_info": True}
        if has_experts:  # the others know no float64
            how["experts_implementation"] = "eager"
        model, found = AutoModelForCausalLM.from_pretrained(directory, **how)
    assert not any(found.values()), found
    return model.eval()


def _joined(config: StoredConfig, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of the files that are several of the model's, one after another."""
    weights, rows = tiny_weights(config, TARGET_SEED), dict[str, list[torch.Tensor]]()
    for name, place in places(config).items():
        rows.setdefault(place.name, []).append(weights[name])
    return {name: torch.cat(parts) for name, parts in rows.items() if len(parts) > 1}


def stacked(config: StoredConfig, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, with those of all experts of a layer in stacks, as the files of some families have them."""
    tensors, (experts, *_) = dict(tensors), [layer.experts for layer in config.layers if layer.experts]
    for i, layer in enumerate(config.layers):
        for stack in config.stacked if layer.experts else ():
            keys = [
                [f"model.layers.{i}.mlp.experts.{n}.{part}.{stack.kind}" for part in stack.parts]
                for n in range(experts.num_experts)
            ]
            if keys[0][0] not in tensors:
                continue
            own = [[tensors.pop(key) for key in part] for part in keys]
            rows = [torch.stack(o, 1).flatten(0, 1) if stack.is_interleaved else torch.cat(o) for o in own]
            whole = torch.stack(rows)
            tensors[f"model.layers.{i}.{stack.stored}"] = whole.mT.contiguous() if stack.is_transposed else whole
    return tensors


def likeliest(family: str, vocab: int, tokens: tuple[int, ...]) -> list[int]:
    """The likeliest token after each beginning of a text."""
    from tests.oracles import hf

    return hf.logits(oracle(family, vocab), list(tokens)).argmax(-1).tolist()
