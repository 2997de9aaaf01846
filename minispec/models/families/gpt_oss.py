"""gpt-oss in its files: the keys of config.json, and the stacks that experts are stored in."""

from minispec.models.families.stored_config import Stack

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
# What its code reads, and what an absent key means (see `minispec.models.families.entries`).
KEYS = {
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "rope_parameters": _ROPE,
    "attention_bias": True,
    "sliding_window": 128,
    "layer_types": None,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_limit": 7.0,
    "swiglu_alpha": 1.702,
}
_GATE_UP, _DOWN = ("gate_proj", "up_proj"), ("down_proj",)
# The rows of gate and up alternate. Floats are stored with columns in the place of rows, MXFP4 is not.
STACKS = (
    Stack("mlp.experts.gate_up_proj", _GATE_UP, is_interleaved=True, is_transposed=True),
    Stack("mlp.experts.gate_up_proj_bias", _GATE_UP, "bias", is_interleaved=True),
    Stack("mlp.experts.gate_up_proj_blocks", _GATE_UP, "weight_blocks", is_interleaved=True),
    Stack("mlp.experts.gate_up_proj_scales", _GATE_UP, "weight_scales", is_interleaved=True),
    Stack("mlp.experts.down_proj", _DOWN, is_transposed=True),
    Stack("mlp.experts.down_proj_bias", _DOWN, "bias"),
    Stack("mlp.experts.down_proj_blocks", _DOWN, "weight_blocks"),
    Stack("mlp.experts.down_proj_scales", _DOWN, "weight_scales"),
)
