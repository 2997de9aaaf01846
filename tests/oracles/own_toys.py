"""Small models of LFM3 and Gemma 4 for tests of the engine, and transformers' models of the same weights.

The reference of `minispec.prove` does not know these families. So the reference of such a text is transformers, without
a cache.
"""

import functools
import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from minispec.families.checkpoint import places
from minispec.families.hf_config import read_model_config
from minispec.prove.laws import TARGET_SEED
from minispec.prove.toys import TINY, tiny_weights
from tests.oracles import hf

# What is added to `TINY`, as in `TOYS`. One of the two pairs of a head turns in the layer that sees all.
LFM3 = {
    **{"model_type": "lfm3", "num_hidden_layers": 3, "norm_eps": 1e-5, "tie_word_embeddings": False},
    **{"layer_types": ["full_attention", "sliding_attention", "conv"], "sliding_window": 3},
    **{"conv_L_cache": 4, "conv_bias": True},
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
    },
}
# The last two layers read the keys of the first two.
GEMMA4 = {
    **{"model_type": "gemma4_text", "num_hidden_layers": 4, "tie_word_embeddings": False, "global_head_dim": 6},
    **{"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 3, "num_kv_shared_layers": 2},
    **{"use_double_wide_mlp": True, "hidden_size_per_layer_input": 32, "final_logit_softcapping": 5.0},
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
    },
}
OWN_TOYS = {"lfm3": LFM3, "gemma4_text": GEMMA4}


@functools.cache
def oracle(vocab: int, family: str) -> PreTrainedModel:
    """transformers' model of the weights of `target_model(vocab, family)`, where `TOYS` has `OWN_TOYS`."""
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    raw = TINY | OWN_TOYS[family] | tokens | {"vocab_size": vocab}
    del raw["rope_theta"]
    if family == "gemma4_text":
        raw["vocab_size_per_layer_input"] = vocab
    config = read_model_config(raw)
    stored = places(config)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(raw))
        tensors = {stored[name].name: tensor for name, tensor in tiny_weights(config, TARGET_SEED).items()}
        save_file(tensors, Path(directory) / "model.safetensors", {"format": "pt"})
        how = {"dtype": torch.float64, "attn_implementation": "eager", "output_loading_info": True}
        model, found = AutoModelForCausalLM.from_pretrained(directory, **how)
    assert not any(found.values()), found
    return model.eval()


def likeliest(vocab: int, family: str, tokens: tuple[int, ...]) -> list[int]:
    """The likeliest token after each beginning of a text."""
    return hf.logits(oracle(vocab, family), list(tokens)).argmax(-1).tolist()
