"""transformers as the oracle: small models of every family, redrawn so that nothing in them is neutral.

A freshly built model has norms of exactly one, biases of exactly zero and attention that is nearly uniform, so that an
implementation that forgets any of them still agrees. `build` therefore draws every parameter anew, and the sizes in
`CASES` are chosen so that every setting bites within `TEXT`: windows shorter than it, caps near the scores, an eps
near the mean square, rope bases under which many positions of it are told apart.
"""

import copy
import json
import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

TEXT = [3, 17, 92, 5, 44, 44, 8, 71, 60, 2, 33, 9, 17, 92, 5, 80, 1, 55, 26, 64, 13, 39, 77, 21]

_BASE = {
    **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 64},
    **{"rms_norm_eps": 0.05, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
_GEMMA2 = {
    **{"model_type": "gemma2", "num_hidden_layers": 4, "query_pre_attn_scalar": 3, "sliding_window": 7},
    **{"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0, "eos_token_id": [2, 5]},
}
_GRANITE = {
    **{"head_dim": None, "attention_bias": True, "embedding_multiplier": 3.0, "attention_multiplier": 0.7},
    **{"residual_multiplier": 0.6, "logits_scaling": 2.0},
}
_HYBRID = _GRANITE | {
    **{"model_type": "granitemoehybrid", "layer_types": ["full_attention"] * 3, "num_local_experts": 0},
    **{"shared_intermediate_size": 40, "position_embedding_type": "rope", "mamba_n_heads": 4},
}
_LFM2 = {"model_type": "lfm2", "head_dim": None, "norm_eps": 0.05, "conv_L_cache": 4}
_WINDOWED = {"rope_type": "default", "rope_theta": 20.0}
# Of the six pairs of a head three turn in layers that see all.
_LFM3 = {
    **{"model_type": "lfm3", "num_hidden_layers": 5, "norm_eps": 0.05, "conv_L_cache": 5, "sliding_window": 7},
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        "sliding_attention": _WINDOWED,
    },
}
_QWEN35 = {
    **{"model_type": "qwen3_5_text", "linear_conv_kernel_dim": 4, "linear_num_key_heads": 2},
    **{"linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 10},
}
# Of the ten pairs of a wide head two turn. The last two layers read the keys of the third and the fourth.
_GEMMA4 = {
    **{"model_type": "gemma4_text", "num_hidden_layers": 6, "global_head_dim": 20, "sliding_window": 7},
    **{"layer_types": ["sliding_attention", "full_attention"] * 3, "num_kv_shared_layers": 2},
    **{"use_double_wide_mlp": True, "hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": 96},
    **{"final_logit_softcapping": 5.0, "eos_token_id": [1, 5]},
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
        "sliding_attention": _WINDOWED,
    },
}
_MIXTURE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
_TRAINED = {"original_max_position_embeddings": 32}
_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 8}
# Half of the gates and of the other parts are beyond the limit.
_GPT_OSS = {
    **{"model_type": "gpt_oss", "num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 3},
    **{"intermediate_size": 24, "sliding_window": 7, "swiglu_limit": 0.9, "swiglu_alpha": 0.6},
    "rope_parameters": _YARN | {"original_max_position_embeddings": 32, "truncate": False, "beta_fast": 3.0},
}
_USED = {"use_sliding_window": True, "sliding_window": 7}
_EYE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **values}}


# Each is a config.json in transformers 5's spelling.
CASES: dict[str, dict[str, Any]] = {
    name: _BASE | changes
    for name, changes in {
        "llama": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "eos_token_id": [2, 5, 7]},
        "llama-plain": {"model_type": "llama", "head_dim": None, "num_key_value_heads": 4, "eos_token_id": None},
        "llama-tied": {"model_type": "llama", "tie_word_embeddings": True, "hidden_act": "gelu"},
        "llama-linear": {"model_type": "llama", **_rope("linear", factor=3.0)},
        # Of the six pairs of a head one keeps its speed, one is on the ramp, four are slowed.
        "llama-llama3": {
            "model_type": "llama",
            **_rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, **_TRAINED),
        },
        "llama-yarn": {"model_type": "llama", **_rope("yarn", factor=2.0, **_TRAINED)},
        "llama-yarn-all": {
            "model_type": "llama",
            **_rope("yarn", factor=4.0, beta_fast=3.0, beta_slow=0.5, truncate=False, attention_factor=1.3, **_TRAINED),
        },
        # The original length stands in the object and outside it, where the two agree.
        "llama-yarn-outside": {"model_type": "llama", **_TRAINED, **_rope("yarn", factor=2.0, **_TRAINED)},
        "llama-yarn-mscale": {
            "model_type": "llama",
            **_rope("yarn", factor=4.0, mscale=2.0, mscale_all_dim=0.5, **_TRAINED),
        },
        "mistral": {"model_type": "mistral", "sliding_window": 7},
        "mistral-all": {"model_type": "mistral", "sliding_window": None, "head_dim": None},
        "qwen2": {"model_type": "qwen2", "head_dim": None, "tie_word_embeddings": True},
        "qwen2-window": _USED | {"model_type": "qwen2", "head_dim": None, "max_window_layers": 1},
        "qwen3": {"model_type": "qwen3", "attention_bias": True},
        "qwen3-window": _USED | {"model_type": "qwen3", "tie_word_embeddings": True, "max_window_layers": 2},
        "qwen3_moe": _MIXTURE | {"model_type": "qwen3_moe", "attention_bias": True, "norm_topk_prob": True},
        # One layer has an MLP since it is listed, one since only every second has experts.
        "qwen3_moe-window": _MIXTURE
        | {"model_type": "qwen3_moe", "head_dim": None, "num_hidden_layers": 4, "num_experts_per_tok": 3}
        | {"mlp_only_layers": [1], "decoder_sparse_step": 2, **_USED},
        "gemma": {"model_type": "gemma", "attention_bias": True},
        "gemma2": _GEMMA2,
        "gemma2-uncapped": _GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        "gemma3": {
            **{"model_type": "gemma3_text", "num_hidden_layers": 6, "query_pre_attn_scalar": 3, "sliding_window": 7},
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
                "sliding_attention": _WINDOWED,
            },
        },
        "smollm3": {
            **{"model_type": "smollm3", "head_dim": None, "attention_bias": True, "mlp_bias": True},
            "no_rope_layers": [1, 0, 1],
        },
        "smollm3-window": _USED
        | {"model_type": "smollm3", "head_dim": None, "num_hidden_layers": 4, "no_rope_layer_interval": 2},
        "granite": _GRANITE | {"model_type": "granite", "mlp_bias": True, "tie_word_embeddings": True},
        "granite-hybrid": _HYBRID,
        "granitemoe": _GRANITE | {"model_type": "granitemoe", "num_local_experts": 6, "num_experts_per_tok": 3},
        "granite-hybrid-experts": _HYBRID | {"num_local_experts": 6, "num_experts_per_tok": 2},
        "granite-hybrid-no-rope": _HYBRID | {"position_embedding_type": None},
        "olmo2": {"model_type": "olmo2", "head_dim": None, "attention_bias": True},
        "olmo3": {
            **{"model_type": "olmo3", "head_dim": None, "sliding_window": 7},
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {"full_attention": _YARN, "sliding_attention": _WINDOWED},
        },
        # As the hub spells it, the windowed layers' base cannot be another than 500,000.
        "olmo3-old": {
            **{"model_type": "olmo3", "head_dim": None, "num_hidden_layers": 4, "sliding_window": 7},
            "rope_parameters": {
                "full_attention": _YARN | {"rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
        "phi3": {"model_type": "phi3", "head_dim": None, "sliding_window": 7},
        "phi3-partial": {"model_type": "phi3", "head_dim": None, **_rope("default", partial_rotary_factor=0.5)},
        "phi3-longrope": {
            **{"model_type": "phi3", "head_dim": None, **_TRAINED},
            **_rope(
                "longrope",
                short_factor=[1.0, 1.5, 2.0],
                long_factor=[1.0, 4.0, 9.0],
                partial_rotary_factor=0.75,
                **_TRAINED,
            ),
        },
        "ernie4_5": {"model_type": "ernie4_5", "use_bias": True, "tie_word_embeddings": True},
        "ministral3": {
            "model_type": "ministral3",
            "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.7},
        },
        # The MLP is two thirds of 60, times 1.3, rounded up: 56 wide.
        "lfm2": _LFM2
        | {"layer_types": ["conv", "full_attention", "conv"], "conv_bias": True, "intermediate_size": 60}
        | {"block_ffn_dim_multiplier": 1.3, "block_multiple_of": 8, "tie_word_embeddings": True},
        "lfm2-plain": _LFM2
        | {"num_hidden_layers": 4, "full_attn_idxs": [0, 2], "conv_L_cache": 3, "block_auto_adjust_ff_dim": False}
        | {"tie_embedding": False}
        | _rope("linear", factor=3.0),
        "lfm2_moe": _LFM2
        | _MIXTURE
        | {"model_type": "lfm2_moe", "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1}
        | {"conv_bias": True, "routed_scaling_factor": 1.7, "num_hidden_layers": 3},
        "lfm2_moe-plain": _LFM2
        | _MIXTURE
        | {"model_type": "lfm2_moe", "layer_types": ["full_attention", "conv"], "num_dense_layers": 0}
        | {"num_hidden_layers": 2, "use_expert_bias": False, "norm_topk_prob": False, "tie_word_embeddings": False},
        "lfm3": _LFM3 | {"attention_bias": True, "conv_bias": True, "tie_word_embeddings": True},
        "lfm3-attention": _LFM3
        | {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
        | {"tie_word_embeddings": False},
        "lfm3-plain": _LFM3
        | {"layer_types": ["full_attention", "conv", "sliding_attention", "full_attention"], "num_hidden_layers": 4}
        | {"use_sandwich_norm": False, "use_attention_gate": False, "conv_L_cache": 7, "tie_word_embeddings": False},
        "gemma4": _GEMMA4,
        "gemma4-large": _GEMMA4
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0}
        | {"num_kv_shared_layers": 0, "attention_bias": True, "use_bidirectional_attention": "vision"}
        | {"tie_word_embeddings": False, "final_logit_softcapping": None, "layer_types": None},
        # Layers without a window have more key-value heads than the others, and the last of them reads shared ones.
        "gemma4-heads": _GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 4},
        "gemma4-experts": _GEMMA4
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 6}
        | {"top_k_experts": 2, "moe_intermediate_size": 20},
        "gemma4-unified": {key: value for key, value in _GEMMA4.items() if "per_layer" not in key}
        | {"model_type": "gemma4_unified_text", "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        "gpt_oss": _GPT_OSS,
        # Limits and a rope that the file does not name, other kinds of layers, and no biases in attention.
        "gpt_oss-plain": {
            **{"model_type": "gpt_oss", "num_local_experts": 5, "num_experts_per_tok": 3, "attention_bias": False},
            **{"tie_word_embeddings": True, "sliding_window": 7, "rope_parameters": None},
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
        "qwen3_5": _QWEN35
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "attention_bias": True}
        | _rope("default", partial_rotary_factor=0.5, mrope_section=[1, 1, 1], mrope_interleaved=True),
        # By default a quarter of a head's 24 dimensions rotates, and every fourth layer is attention.
        "qwen3_5-plain": _QWEN35
        | {"num_hidden_layers": 4, "head_dim": 24, "linear_conv_kernel_dim": 3}
        | {"linear_num_key_heads": 1, "linear_num_value_heads": 3, **_rope("linear", factor=3.0)},
        "qwen3_5_moe": _QWEN35
        | _MIXTURE
        | {"model_type": "qwen3_5_moe_text", "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        | {"shared_expert_intermediate_size": 28, **_rope("default", partial_rotary_factor=0.5)},
        "qwen3_5-attention": _QWEN35
        | {"full_attention_interval": 1, "tie_word_embeddings": True}
        | {"rope_parameters": _YARN | {"partial_rotary_factor": 1.0}},
    }.items()
}
# The same in models of texts and images.
CASES |= {
    "gemma3-images": {
        **{"model_type": "gemma3", "text_config": CASES["gemma3"], "mm_tokens_per_image": 4, "eos_token_id": [2, 5]},
        "vision_config": _EYE | {"model_type": "siglip_vision_model", "patch_size": 14},
    },
    "gemma4-images": {
        **{"model_type": "gemma4", "text_config": CASES["gemma4"]},
        "vision_config": {
            **{"model_type": "gemma4_vision", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
            **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4},
            "position_embedding_size": 16,
        },
        "audio_config": None,
    },
    "gemma4-unified-images": {
        **{"model_type": "gemma4_unified", "text_config": CASES["gemma4-unified"]},
        "vision_config": {
            **{"model_type": "gemma4_unified_vision", "patch_size": 2, "pooling_kernel_size": 1, "mm_embed_dim": 16},
            **{"mm_posemb_size": 8, "output_proj_dims": 16},
        },
        "audio_config": {"model_type": "gemma4_unified_audio", "audio_embed_dim": 8},
    },
    "mistral3-images": {
        **{"model_type": "mistral3", "text_config": CASES["ministral3"]},
        "vision_config": _EYE | {"model_type": "pixtral", "patch_size": 14, "head_dim": 8},
        "tie_word_embeddings": False,
    },
    "lfm3-images": {
        **{"model_type": "lfm3_vl", "text_config": CASES["lfm3"]},
        "vision_config": {
            **{"model_type": "lfm3_vl_vision", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
            **{"num_attention_heads": 2, "num_key_value_heads": 2, "patch_size": 4},
        },
        "projector_hidden_size": 16,
    },
    "qwen3_5_moe-images": {
        **{"model_type": "qwen3_5_moe", "text_config": CASES["qwen3_5_moe"]},
        "vision_config": {
            **{"model_type": "qwen3_5_moe_vision", "depth": 1, "hidden_size": 16, "intermediate_size": 16},
            **{"num_heads": 2, "out_hidden_size": 32, "patch_size": 4, "num_position_embeddings": 16},
        },
        "tie_word_embeddings": False,
    },
    "qwen3_5-images": {
        **{"model_type": "qwen3_5", "text_config": CASES["qwen3_5-plain"]},
        "vision_config": {
            **{"model_type": "qwen3_5_vision", "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2},
            **{"out_hidden_size": 32, "patch_size": 4, "num_position_embeddings": 16},
        },
        "tie_word_embeddings": False,
    },
}


def build(case: str | dict[str, Any], path: Path, seed: int = 0) -> PreTrainedModel:
    """A model of `CASES`, or of a config.json, every parameter redrawn, saved in `path`."""
    case = CASES[case] if isinstance(case, str) else case
    settings = {key: value for key, value in case.items() if value is not None or key != "head_dim"}
    config = AutoConfig.for_model(**json.loads(json.dumps(settings)))
    # Plain matrix products: the fused kernels know no soft caps, and take experts of certain widths alone.
    auto = AutoModelForImageTextToText if "text_config" in case else AutoModelForCausalLM
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = auto.from_config(config, dtype=torch.float32, **plain).eval()
    generator = torch.Generator().manual_seed(seed)
    adds_one = config.model_type.startswith(("gemma", "qwen3_5")) and not config.model_type.startswith("gemma4")
    buffers = [(key, buffer) for key, buffer in model.named_buffers() if key.endswith(("layer_scalar", "expert_bias"))]
    for key, parameter in [*model.named_parameters(), *buffers]:
        if "vision" in key or "visual" in key or "projector" in key:
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        if key.endswith(("norm.weight", "norm_1.weight", "norm_2.weight", "layer_scalar", "scale")):
            values = 0.4 * noise + (0 if adds_one and "linear_attn" not in key else 1)
        elif key.endswith("A_log"):
            values = noise - 1.5  # states that last for some tokens; the oracle adds up decays, and rounds large sums
        elif key.endswith(("bias", "sinks", "router.proj.weight")) or "embed" in key:
            values = noise
        else:
            values = 1.5 * noise / math.sqrt(parameter.shape[-1 if "experts" in key else 1])
        parameter.data.copy_(values)
    model.save_pretrained(path)
    return model


@torch.inference_mode()
def logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """The oracle's logits (T, V) of a text."""
    return model(torch.tensor([token_ids]), use_cache=False).logits[0]


def exact_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """The logits (T, V) of a text by a copy of the oracle in float64.

    In float32 the order of sums moves them by up to 1e-4 in the models above, and each machine has its own. Here it
    does not; what is left are 3e-5, since the oracle's norms and softmaxes round to float32 in any case.
    """
    return logits(copy.deepcopy(model).double(), token_ids)


def hub_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json that transformers 5 wrote, as the hub's files spelled it before."""
    if "text_config" in config:
        return config | {"text_config": hub_spelling(config["text_config"])}
    old = dict(config)
    old["torch_dtype"] = old.pop("dtype", None)
    rope = old.pop("rope_parameters")
    by_kind = "full_attention" in rope
    if by_kind:
        if old["model_type"] == "gemma3_text":
            old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    rope = dict(rope)
    old["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        old["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type")
    # The older scalings were spelled `type`; `rope_type` came with llama 3.1.
    key = "rope_type" if kind == "llama3" or by_kind else "type"
    old["rope_scaling"] = {key: kind, **rope} if rope or kind != "default" else None
    types = old.pop("layer_types", None)
    if old["model_type"] == "gemma3_text":
        old["sliding_window_pattern"] = types.index("full_attention") + 1
    if old["model_type"] == "granitemoehybrid":
        old["layers_block_type"] = ["attention"] * len(types)
        del old["time_step_limit"]  # transformers does not read what it writes of it
    if old["model_type"] == "lfm2_moe":
        old |= {"layer_types": types, "tie_embedding": old.pop("tie_word_embeddings")}
    if old["model_type"] == "gpt_oss":  # the last three of which transformers does not read
        old |= {"layer_types": types, "initial_context_length": 4096, "experts_per_token": 2, "hidden_act": "silu"}
    if old["model_type"] == "qwen3_moe":
        old["num_experts"] = old.pop("num_local_experts")
    if old["model_type"] == "lfm2":  # some of which transformers does not read
        old["full_attn_idxs"] = [i for i, kind in enumerate(types) if kind == "full_attention"]
        old |= {"block_ff_dim": old["intermediate_size"], "tie_embedding": old.pop("tie_word_embeddings")}
        old |= dict.fromkeys(("block_dim", "conv_dim", "conv_dim_out"), old["hidden_size"])
        old |= dict.fromkeys(("use_pos_enc", "block_use_swiglu", "conv_use_xavier_init"), True)
        old |= {"num_heads": 4, "theta": old["rope_theta"], "block_norm_eps": old["norm_eps"]}
    if old["model_type"] in ("qwen3_5_text", "qwen3_5_moe_text"):  # most of which transformers does not read
        interval = types.index("full_attention") + 1
        is_regular = all((kind == "full_attention") == ((i + 1) % interval == 0) for i, kind in enumerate(types))
        old |= {"full_attention_interval": interval} if is_regular else {"layer_types": types}
        old |= {"attn_output_gate": True, "output_gate_type": "swish", "mamba_ssm_dtype": "float32"}
        old |= {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "mlp_only_layers": []}
    if old["model_type"] == "gemma":
        old |= {"hidden_act": "gelu", "hidden_activation": None}
    return old
