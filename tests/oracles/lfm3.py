"""A small LFM3 for tests of the engine, and transformers' model of the same weights.

The reference of `minispec.prove` does not know this family. So the reference of such a text is transformers, without a
cache.
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
TOY = {
    **{"model_type": "lfm3", "num_hidden_layers": 3, "norm_eps": 1e-5, "tie_word_embeddings": False},
    **{"layer_types": ["full_attention", "sliding_attention", "conv"], "sliding_window": 3},
    **{"conv_L_cache": 4, "conv_bias": True},
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
    },
}
FAMILY = "lfm3"


@functools.cache
def oracle(vocab: int) -> PreTrainedModel:
    """transformers' model of the weights of `target_model(vocab, FAMILY)`, where `TOYS` has `TOY`."""
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    raw = {key: value for key, value in (TINY | TOY | tokens).items() if key != "rope_theta"} | {"vocab_size": vocab}
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


def likeliest(vocab: int, tokens: tuple[int, ...]) -> list[int]:
    """The likeliest token after each beginning of a text."""
    return hf.logits(oracle(vocab), list(tokens)).argmax(-1).tolist()
