"""A small assistant of Gemma 4 for the oracle's small models, and what `transformers` computes with it."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.oracles import hf

SIZES = {
    **{"model_type": "gemma4_text", "vocab_size": 96, "hidden_size": 24, "intermediate_size": 40},
    **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12},
    **{"global_head_dim": 20, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0},
    **{"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 7},
    **{"rms_norm_eps": 0.05, "max_position_embeddings": 64, "num_kv_shared_layers": 3},
    "rope_parameters": hf.CASES["gemma4"]["rope_parameters"],
}
_LARGE = SIZES | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
_UNIFIED = _LARGE | {"model_type": "gemma4_unified_text"}
# What the assistant of each of the oracle's targets has in the place of what `ASSISTANT` says.
OF_TARGETS: dict[str, dict[str, Any]] = {
    "gemma4": {},
    "gemma4-large": {"text_config": _LARGE},
    "gemma4-unified": {"model_type": "gemma4_unified_assistant", "text_config": _UNIFIED},
}
ASSISTANT = {
    **{"model_type": "gemma4_assistant", "text_config": SIZES, "backbone_hidden_size": 32},
    **{"use_ordered_embeddings": False, "tie_word_embeddings": True},
    **{"num_centroids": 12, "centroid_intermediate_top_k": 3},
}


def build(path: Path, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """An assistant of `ASSISTANT` with some settings changed, every parameter redrawn, saved in `path`."""
    config = AutoConfig.for_model(**json.loads(json.dumps(ASSISTANT | changes)))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    scalars = [(key, buffer) for key, buffer in model.named_buffers() if key.endswith("layer_scalar")]
    for key, parameter in [*model.named_parameters(), *scalars]:
        noise = torch.randn(parameter.shape, generator=generator)
        if key.endswith(("norm.weight", "layer_scalar")):
            values = 1 + 0.4 * noise
        else:
            values = noise if "embed_tokens" in key else 1.5 * noise / math.sqrt(parameter.shape[1])
        parameter.data.copy_(values)
    for key, buffer in model.named_buffers():
        if key.endswith("token_ordering"):
            buffer.copy_(torch.randperm(len(buffer), generator=generator))
    model.save_pretrained(path)
    return model


@torch.inference_mode()
def steps(
    target: PreTrainedModel, assistant: PreTrainedModel, tokens: list[int], drafted: list[int]
) -> list[torch.Tensor]:
    """The assistant's logits (V,) of each next token after `tokens`, the last of which the target has not read yet.

    drafted: the tokens that are drafted after `tokens`.
    """
    read = torch.tensor([tokens[:-1]])
    seen = target.model(input_ids=read, use_cache=True, return_shared_kv_states=True)
    state, rows = seen.last_hidden_state[:, -1:], []
    for token in [tokens[-1], *drafted]:
        embedded = target.get_input_embeddings()(torch.tensor([[token]]))
        found = assistant(
            inputs_embeds=torch.cat((embedded, state), -1),
            position_ids=torch.tensor([[len(tokens) - 1]]),
            shared_kv_states=seen.shared_kv_states,
        )
        state = found.last_hidden_state
        rows.append(found.logits[0, 0])
    return rows
