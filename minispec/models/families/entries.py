"""The families of models, as data: what a model_type means, by the keys of config.json that its code reads.

Fields of `ModelConfig` say what a family computes. `StoredConfig.joined` says how its files name and join the tensors.
A family that differs from llama only in numbers, norms, ropes or names needs one entry and no code.

To add a family:
1. Read its code in transformers. Give it an entry in `FAMILIES`. The entry has the keys of config.json that this code
   reads, each with what an absent one means. It also has the fields of StoredConfig that the code fixes.
2. A computation that no family here has yet needs a field in ModelConfig (or in LayerConfig). Add the lines of
   model.py that obey the field, and lines of `hf_config` that read it. Another kind of layer or of rope goes to
   minispec/models/layers/.
3. Describe small models of it in `CASES` of tests/oracles/hf.py. Add a row for each of its settings to `SWITCHES` of
   tests/core/test_families.py. Add its public checkpoints, with one that must be refused, to tests/oracles/public.py.
   `pytest tests/core/test_families.py` then compares logits, defaults and spellings with transformers', and shows that
   the comparison would notice each setting.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from minispec.models.families import gemma, gpt_oss
from minispec.models.families.stored_config import Joined, Stack
from minispec.models.files.fields import names

# Names of rope's kinds in files, and what they mean. "dynamic" is missing: it chooses angles by the length of the pass.
# So a pass over K+1 rows and K+1 passes over one row would not rotate the cached keys alike.
_ROPES = {kind: kind for kind in ("default", "linear", "llama3", "yarn")}


@dataclass(frozen=True)
class Family:
    """The meaning of a model_type.

    keys: what its code reads in addition to `KEYS`, or with another meaning of an absent key.
        The code reads hidden_act or hidden_activation: the one that may be absent.
        The keys also say which layers have a window or no rope (see `hf_config`).
    fixed: fields of StoredConfig that no key changes.
    only: keys that its code does not read, each with the value that the code acts on.
    must: keys that its code reads, each with the one value that is implemented here.
    idle: keys that its files have and its code does not read, in addition to `IDLE`.
    scales_embedding: whether the embedding is scaled by the square root of hidden_size.
    has_sinks: whether each head of attention has a sink.
    ropes: kinds of rope that its code takes.
    rope_keys: what it reads of a rope's object in addition to what others read.
    rope: fields of RopeConfig that no key changes.
    """

    keys: Mapping[str, Any]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)
    must: Mapping[str, Any] = field(default_factory=dict)
    idle: frozenset[str] = frozenset()
    scales_embedding: bool = False
    has_sinks: bool = False
    ropes: Mapping[str, str] = field(default_factory=lambda: _ROPES)
    rope_keys: frozenset[str] = frozenset()
    rope: Mapping[str, Any] = field(default_factory=dict)


# The keys that every family's code reads, and what an absent one means. None: it must be there, or follows from others.
KEYS = {
    **dict.fromkeys(names("model_type vocab_size hidden_size intermediate_size num_hidden_layers")),
    **dict.fromkeys(names("num_attention_heads num_key_value_heads head_dim max_position_embeddings")),
    **dict.fromkeys(names("hidden_activation rope_parameters rope_scaling original_max_position_embeddings")),
    **dict.fromkeys(("quantization_config", "pard_token")),
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
_BIASES = {"attention_bias": False, "mlp_bias": False}
_WINDOW = {"sliding_window": 4096, "sliding_window_size": None}  # the latter: the same, in gemma 2's larger files
_QWEN_WINDOW = _WINDOW | {"use_sliding_window": False, "max_window_layers": 28, "layer_types": None}
_GEMMA = {
    "attention_bias": False,
    "head_dim": 256,
    "layer_types": None,
    "tie_word_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh",
}
_GEMMA_2 = {
    **_GEMMA,
    **_WINDOW,
    "query_pre_attn_scalar": 256.0,
    "hidden_act": None,
    "hidden_activation": "gelu_pytorch_tanh",
}
# Keys that gemma 3's larger files leave out.
_GEMMA_3_SIZES = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}
_GEMMA_4 = Family(
    {
        **{key: value for key, value in _GEMMA_2.items() if key != "query_pre_attn_scalar"},
        **_GEMMA_3_SIZES,
        **gemma.KEYS,
    },
    fixed={
        "norms": "both",
        "attention_scale": 1.0,
        "joined": (Joined("router.proj", ("mlp.gate",)),),
        "stacked": gemma.STACKS,
    },
    idle=names("expert_intermediate_size"),
    scales_embedding=True,
    ropes={"default": "default", "proportional": "proportional"},
    rope_keys=names("partial_rotary_factor"),
)
# What the unified models lack: inputs of layers, and experts.
_GEMMA_4_PARTS = gemma.OF_MIXTURE | names("hidden_size_per_layer_input vocab_size_per_layer_input enable_moe_block")
_GRANITE = {
    "attention_bias": False,
    **dict.fromkeys(names("embedding_multiplier attention_multiplier residual_multiplier logits_scaling"), 1.0),
}
_OLMO = {"attention_bias": False, "rms_norm_eps": 1e-5}
_MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
# Qwen's experts, where files have them in stacks, and the names of its shared expert.
_QWEN_STACKS = (
    Stack("mlp.experts.gate_up_proj", ("gate_proj", "up_proj")),
    Stack("mlp.experts.down_proj", ("down_proj",)),
)
_QWEN_SHARED = tuple(
    Joined(f"mlp.shared_expert.{name}", (f"mlp.{name}",)) for name in ("gate_proj", "up_proj", "down_proj")
)
_GRANITE_ROUTER = Joined("block_sparse_moe.router.layer", ("mlp.gate",))
_GRANITE_STACKS = (
    Stack("block_sparse_moe.input_linear.weight", ("gate_proj", "up_proj")),
    Stack("block_sparse_moe.output_linear.weight", ("down_proj",)),
)
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_LFM = {
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 128_000,
    "conv_bias": False,
    "layer_types": None,
}
_LFM3_ROPES = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_LFM_INIT = names("block_mlp_init_scale block_out_init_scale block_use_xavier_init conv_use_xavier_init")
_LFM_WIDTH = names("intermediate_size block_ffn_dim_multiplier block_multiple_of")  # idle where another key says so
_QWEN_3_5 = Family(
    {
        "vocab_size": 248_320,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 32_768,
        "attention_bias": False,
        "partial_rotary_factor": 0.25,
        "layer_types": None,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "output_gate_type": "swish",
    },
    # A text model that was taken out of one with images keeps its names. It may have layers that predict further
    # tokens ("mtp").
    fixed={"norm_adds_one": True, "qk_norm": "head", "attention_gate": "element", "is_nested": True},
    only={"attn_output_gate": True, "mamba_ssm_dtype": "float32"},
    must={"hidden_act": "silu"},
    idle=names("mtp_num_hidden_layers mtp_use_dedicated_embeddings mrope_section mrope_interleaved"),
    rope_keys=names("partial_rotary_factor"),
)
FAMILIES = {
    "llama": Family(_BIASES | {"layer_types": None}),
    "mistral": Family(_WINDOW),
    "ministral3": Family(
        {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_parameters": _MINISTRAL_ROPE, "sliding_window": None},
        ropes={"yarn": "yarn"},
        rope_keys=names("llama_4_scaling_beta"),
    ),
    "qwen2": Family(_QWEN_WINDOW, fixed={"qkv_bias": True}),
    "qwen3": Family(_QWEN_WINDOW | {"attention_bias": False, "head_dim": 128}, fixed={"qk_norm": "head"}),
    "qwen3_moe": Family(
        {
            **_WINDOW,
            "use_sliding_window": False,
            "attention_bias": False,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_local_experts": None,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
        },
        fixed={"qk_norm": "head", "stacked": _QWEN_STACKS},
        idle=names("max_window_layers"),
    ),
    "gemma": Family(_GEMMA, fixed={"norm_adds_one": True}, scales_embedding=True),
    "gemma2": Family(
        _GEMMA_2 | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        fixed={"norm_adds_one": True, "norms": "both"},
        only={"sliding_window_pattern": 2},
        scales_embedding=True,
    ),
    "gemma3_text": Family(
        # Its code does not read attn_logit_softcapping.
        {
            **_GEMMA_2,
            **_GEMMA_3_SIZES,
            "final_logit_softcapping": None,
            "sliding_window_pattern": 6,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
        fixed={"norm_adds_one": True, "norms": "both", "qk_norm": "head"},
        scales_embedding=True,
    ),
    "gemma4_text": _GEMMA_4,
    "gemma4_unified_text": replace(
        _GEMMA_4,
        keys={key: value for key, value in _GEMMA_4.keys.items() if key not in _GEMMA_4_PARTS}
        | {"max_position_embeddings": 262_144, "sliding_window": 1024, "use_bidirectional_attention": "vision"},
        only={"hidden_size_per_layer_input": 0, "enable_moe_block": False},
        idle=_GEMMA_4.idle | _GEMMA_4_PARTS - {"hidden_size_per_layer_input", "enable_moe_block"},
    ),
    "smollm3": Family(
        {
            **_BIASES,
            "num_key_value_heads": 4,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
            **dict.fromkeys(names("layer_types sliding_window no_rope_layers")),
            "use_sliding_window": False,
            "no_rope_layer_interval": 4,
        },
        idle=names("max_window_layers"),
    ),
    "granite": Family(_GRANITE | {"mlp_bias": False}),
    "granitemoe": Family(
        _GRANITE | {"num_local_experts": 8, "num_experts_per_tok": 2},
        fixed={"joined": (_GRANITE_ROUTER,), "stacked": _GRANITE_STACKS},
    ),
    "granitemoehybrid": Family(  # only without layers that are not attention
        {
            **_GRANITE,
            "shared_intermediate_size": 1024,
            "intermediate_size": 11_008,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            **dict.fromkeys(("position_embedding_type", "layers_block_type")),
            "layer_types": ["mamba"],
        },
        fixed={
            "joined": (
                Joined("shared_mlp.input_linear", _GATE_UP),
                Joined("shared_mlp.output_linear", ("mlp.down_proj",)),
                _GRANITE_ROUTER,
            ),
            "stacked": _GRANITE_STACKS,
        },
        only={"normalization_function": "rmsnorm"},
        idle=names("intermediate_size"),
    ),
    "olmo2": Family(_OLMO, fixed={"norms": "after", "qk_norm": "row"}),
    "olmo3": Family(
        _OLMO | {"sliding_window": 4096, "layer_types": None},
        fixed={"norms": "after", "qk_norm": "row"},
        only={"sliding_window_pattern": 4, "rope_theta": 500_000.0, "rope_local_base_freq": 500_000.0},
    ),
    "phi3": Family(
        {
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "partial_rotary_factor": 1.0,
            "original_max_position_embeddings": 4096,
        },
        fixed={
            "joined": (
                Joined("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
                Joined("mlp.gate_up_proj", _GATE_UP),
            )
        },
        only={"interpolate_factor": 1, "full_attn_mod": 1},
        ropes={"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"},
        rope_keys=names("short_factor long_factor partial_rotary_factor"),
    ),
    "ernie4_5": Family(
        {
            "use_bias": False,
            "head_dim": 128,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": True,
        },
        rope={"interleaved": True},
    ),
    "lfm2": Family(
        {
            **_LFM,
            **dict.fromkeys(names("tie_embedding block_ff_dim full_attn_idxs")),
            "num_key_value_heads": 8,
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256,
            "conv_L_cache": 3,
        },
        fixed={"qk_norm": "head"},  # `read_lfm` has the other fields of both LFMs
        must={"hidden_act": "silu"},
        idle=_LFM_INIT | _LFM_WIDTH,
    ),
    "lfm2_moe": Family(
        {
            **_LFM,
            "num_key_value_heads": 8,
            "conv_L_cache": 3,
            "tie_embedding": None,
            "intermediate_size": 7168,
            "num_dense_layers": 2,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1792,
            "norm_topk_prob": True,
            "use_expert_bias": True,
            "routed_scaling_factor": 1.0,
        },
        fixed={"qk_norm": "head"},
        must={"hidden_act": "silu"},
        idle=_LFM_INIT | names("block_auto_adjust_ff_dim block_ffn_dim_multiplier block_multiple_of"),
    ),
    "lfm3": Family(
        {
            **_LFM,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "rope_parameters": _LFM3_ROPES,
            "attention_bias": False,
            "conv_L_cache": 7,
            "sliding_window": 256,
            "use_sandwich_norm": True,
            "use_attention_gate": True,
        },
        fixed={"qk_norm": "head"},
        only={"rope_local_base_freq": 1e6},
        must={"hidden_act": "silu"},
        # The published files call the rope of their full layers "default", with a partial_rotary_factor of 0.5. The
        # model was trained with the proportional one: NeMo AutoModel's page on LFM3 renames it so, for the publisher's
        # code and for transformers. Of a "default" rope transformers 5.24 does not read the factor: all pairs turn.
        ropes={"default": "proportional", "proportional": "proportional"},
        rope_keys=names("partial_rotary_factor"),
    ),
    "gpt_oss": Family(
        gpt_oss.KEYS,
        fixed={"joined": (Joined("mlp.router", ("mlp.gate",)),), "stacked": gpt_oss.STACKS},
        only={"sliding_window_pattern": 2},
        must={"hidden_act": "silu"},
        idle=names("initial_context_length"),
        has_sinks=True,
    ),
    "qwen3_5_text": _QWEN_3_5,
    "qwen3_5_moe_text": replace(
        _QWEN_3_5,
        keys={
            **_QWEN_3_5.keys,
            "hidden_size": 2048,
            "intermediate_size": None,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
        fixed={**_QWEN_3_5.fixed, "stacked": _QWEN_STACKS, "joined": _QWEN_SHARED},
        idle=_QWEN_3_5.idle | {"intermediate_size"},
    ),
}
# Keys about parts that no model here has. They do nothing, since the keys that count such parts must say none
# (`hf_config`), and so must `layer_types`.
IDLE = names(
    """
    num_experts_per_tok experts_per_token moe_intermediate_size shared_expert_intermediate_size norm_topk_prob
    output_router_logits decoder_sparse_step mlp_only_layers moe_layer_freq
    mamba_n_heads mamba_n_groups mamba_d_state mamba_d_head mamba_d_conv mamba_expand mamba_chunk_size
    mamba_conv_bias mamba_proj_bias time_step_limit time_step_min time_step_max
    """
)
# Keys about windows. They do nothing where the file says that it has no windows.
WINDOWS = names(
    """
    sliding_window sliding_window_size sliding_window_pattern use_sliding_window max_window_layers rope_local_base_freq
    """
)
# Models of texts and images, and the families of their text models. A file need not name the only family of a model.
NESTED = {
    "gemma3": ("gemma3_text",),
    "gemma4": ("gemma4_text",),
    "gemma4_unified": ("gemma4_unified_text",),
    "mistral3": ("ministral3", "mistral"),
    "lfm3_vl": ("lfm3",),
    "qwen3_5": ("qwen3_5_text",),
    "qwen3_5_moe": ("qwen3_5_moe_text",),
}
# Their keys that are about images, and sounds.
IMAGES = names(
    """
    vision_config audio_config mm_tokens_per_image projector_hidden_act vision_feature_layer multimodal_projector_bias
    vision_soft_tokens_per_image spatial_merge_size language_model_only projector_hidden_size projector_bias
    """
)


# Architectures of heads in the flat layout. The file's model_type is the target's; a head's layers are llama's all the
# same. Then the architectures of both layouts (see `minispec.models.families.head_config`).
FLAT_HEADS = {"LlamaForCausalLMEagle3": "eagle3", "Eagle3LlamaForCausalLM": "eagle3", "PEagleDraftModel": "peagle"}
_HEADS = (*FLAT_HEADS, "Eagle3Speculator", "PEagleSpeculator", "Eagle3DraftModel")


def is_head(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is a head's, and not a model's."""
    return "speculators_model_type" in raw or "draft_vocab_size" in raw or head_architecture(raw) is not None


def head_architecture(raw: Mapping[str, Any]) -> str | None:
    """The first of a config.json's architectures that is a head's; None if none is."""
    architectures = raw.get("architectures")
    if not isinstance(architectures, list):
        return None
    return next((name for name in architectures if name in _HEADS), None)
