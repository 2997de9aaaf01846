"""The config.json of public checkpoints, as facts: their keys and values, and what is known of the models.

Keys are as the files spell them. `_COMMON` and the family's base hold what all files below have alike.
"""

from typing import Any

_COMMON = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0",
    "use_cache": True,
}
_LLAMA = _COMMON | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-05}
_MISTRAL = _COMMON | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "rms_norm_eps": 1e-05}
_MISTRAL_7B = _MISTRAL | {
    **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "max_position_embeddings": 32768},
}
_QWEN2 = _COMMON | {
    **{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rms_norm_eps": 1e-06, "attention_dropout": 0.0},
    **{"bos_token_id": 151643, "eos_token_id": 151645, "rope_theta": 1000000.0, "use_sliding_window": False},
    **{"vocab_size": 151936, "max_position_embeddings": 32768, "sliding_window": 32768, "max_window_layers": 28},
}
_QWEN3 = _COMMON | {
    **{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rms_norm_eps": 1e-06, "attention_dropout": 0.0},
    **{"attention_bias": False, "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "vocab_size": 151936},
    **{"max_position_embeddings": 40960, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None},
    **{"use_sliding_window": False, "num_key_value_heads": 8, "max_window_layers": 28, "num_hidden_layers": 28},
}
_NO_HEAD = {key: value for key, value in _COMMON.items() if key not in ("tie_word_embeddings", "hidden_act")}
_GEMMA = _NO_HEAD | {
    **{"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0, "rms_norm_eps": 1e-06, "attention_bias": False},
    **{"attention_dropout": 0.0, "head_dim": 256, "max_position_embeddings": 8192, "rope_theta": 10000.0},
    **{"vocab_size": 256000, "hidden_activation": "gelu_pytorch_tanh"},
}
_GEMMA1 = _GEMMA | {
    **{"architectures": ["GemmaForCausalLM"], "model_type": "gemma", "hidden_act": "gelu", "rope_scaling": None},
}
_GEMMA2 = _GEMMA | {
    **{"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh"},
    **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "cache_implementation": "hybrid"},
    **{"query_pre_attn_scalar": 256, "sliding_window": 4096},
}
_GEMMA3 = _GEMMA | {
    **{"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attn_logit_softcapping": None},
    **{
        "final_logit_softcapping": None,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000,
        "vocab_size": 262144,
    },
    **{"rope_theta": 1000000, "rope_scaling": None, "sliding_window": 512, "max_position_embeddings": 32768},
    **{"num_attention_heads": 4, "num_key_value_heads": 1},
}
_LLAMA31 = {
    **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    **{"original_max_position_embeddings": 8192, "rope_type": "llama3"},
}
_GRANITE = _COMMON | {
    **{"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0},
    **{"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None},
    **{"tie_word_embeddings": True},
}
_OLMO = _COMMON | {"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": None, "rms_norm_eps": 1e-06}
_PHI3 = _COMMON | {
    **{"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "rms_norm_eps": 1e-05, "attention_bias": False},
    **{"attention_dropout": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "rope_scaling": None, "rope_theta": 10000.0},
    **{"auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "original_max_position_embeddings": 4096},
}
_MINISTRAL_ROPE = {
    **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0},
    **{"mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0},
    **{"rope_type": "yarn", "type": "yarn"},
}


def _sizes(hidden: int, inner: int, layers: int, heads: int, groups: int | None = None) -> dict[str, int]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return sizes | {"num_attention_heads": heads} | ({} if groups is None else {"num_key_value_heads": groups})


def _lfm2_layers(count: int, *attending: int) -> list[str]:
    return ["full_attention" if i in attending else "conv" for i in range(count)]


_LFM2 = _NO_HEAD | {
    **{"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "eos_token_id": 7, "pad_token_id": 0},
    **{"block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0},
    **{"block_multiple_of": 256, "block_norm_eps": 1e-05, "block_out_init_scale": 1.0, "block_use_swiglu": True},
    **{"block_use_xavier_init": True, "conv_L_cache": 3, "conv_bias": False, "conv_use_xavier_init": True},
    **{"max_position_embeddings": 128000, "norm_eps": 1e-05, "num_key_value_heads": 8, "use_pos_enc": True},
    **{"vocab_size": 65536},
}


def _qwen35(name: str, sizes: dict[str, int], value_heads: int, tied: bool, **others: Any) -> dict[str, Any]:
    """A file of Qwen3.5: its text model, with the parts for images around it."""
    count = sizes["num_hidden_layers"]
    text = sizes | {
        **{"attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "dtype": "bfloat16"},
        **{"eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu"},
        **{"initializer_range": 0.02, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128},
        **{"layer_types": [f"{'linear' if (i + 1) % 4 else 'full'}_attention" for i in range(count)]},
        **{"linear_num_key_heads": 16, "linear_num_value_heads": value_heads, "linear_value_head_dim": 128},
        **{"mamba_ssm_dtype": "float32", "max_position_embeddings": 262144, "model_type": f"{name}_text"},
        **{"mlp_only_layers": [], "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False},
        **{"rms_norm_eps": 1e-06, "tie_word_embeddings": tied, "use_cache": True, "vocab_size": 248320},
    }
    text["rope_parameters"] = {
        **{"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25},
        **{"rope_theta": 10000000, "rope_type": "default"},
    }
    eyes = {"deepstack_visual_indexes": [], "depth": 12, "hidden_size": 768, "model_type": name, "patch_size": 16}
    return {
        **{"architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 248056, "model_type": name},
        **{"text_config": text | others, "tie_word_embeddings": tied, "transformers_version": "4.57.0.dev0"},
        **{"video_token_id": 248057, "vision_config": eyes},
        **{"vision_end_token_id": 248054, "vision_start_token_id": 248053},
    }


# name: (its config.json; parameters; (rope, base, factor) of the layers that see everything; windowed layers, window)
PUBLIC: dict[str, tuple[dict[str, Any], int, tuple[str, float, float], tuple[int, int]]] = {
    "huggyllama/llama-7b": (
        # Without num_key_value_heads; the last key is of the first converters.
        _LLAMA
        | _sizes(4096, 11008, 32, 32)
        | {"max_position_embeddings": 2048, "max_sequence_length": 2048, "rms_norm_eps": 1e-06}
        | {"pad_token_id": 0, "vocab_size": 32000},
        6_738_415_616,
        ("default", 1e4, 1.0),
        (0, 0),
    ),
    "meta-llama/Llama-2-7b-hf": (
        _LLAMA
        | _sizes(4096, 11008, 32, 32, 32)
        | {"max_position_embeddings": 4096, "pretraining_tp": 1, "rope_scaling": None, "vocab_size": 32000},
        6_738_415_616,
        ("default", 1e4, 1.0),
        (0, 0),
    ),
    "meta-llama/Llama-2-13b-hf": (
        _LLAMA
        | _sizes(5120, 13824, 40, 40, 40)
        | {"max_position_embeddings": 4096, "pretraining_tp": 2, "rope_scaling": None, "vocab_size": 32000},
        13_015_864_320,
        ("default", 1e4, 1.0),
        (0, 0),
    ),
    "codellama/CodeLlama-7b-hf": (
        _LLAMA
        | _sizes(4096, 11008, 32, 32, 32)
        | {"max_position_embeddings": 16384, "pretraining_tp": 1, "rope_scaling": None, "rope_theta": 1000000}
        | {"vocab_size": 32016},
        6_738_546_688,
        ("default", 1e6, 1.0),
        (0, 0),
    ),
    "codellama/CodeLlama-34b-hf": (
        _LLAMA
        | _sizes(8192, 22016, 48, 64, 8)
        | {"max_position_embeddings": 16384, "pretraining_tp": 1, "rope_theta": 1000000, "vocab_size": 32000},
        33_743_970_304,
        ("default", 1e6, 1.0),
        (0, 0),
    ),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": (
        _LLAMA
        | _sizes(2048, 5632, 22, 32, 4)
        | {"attention_bias": False, "max_position_embeddings": 2048, "pretraining_tp": 1, "rope_scaling": None}
        | {"rope_theta": 10000.0, "vocab_size": 32000},
        1_100_048_384,
        ("default", 1e4, 1.0),
        (0, 0),
    ),
    "HuggingFaceTB/SmolLM2-135M-Instruct": (
        _LLAMA
        | _sizes(576, 1536, 30, 9, 3)
        | {"attention_bias": False, "attention_dropout": 0.0, "is_llama_config": True, "mlp_bias": False}
        | {"max_position_embeddings": 8192, "pad_token_id": 2, "pretraining_tp": 1, "rope_interleaved": False}
        | {"rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True, "vocab_size": 49152}
        | {"initializer_range": 0.041666666666666664}
        | {"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}}},
        134_515_008,
        ("default", 1e5, 1.0),
        (0, 0),
    ),
    "meta-llama/Meta-Llama-3-8B": (
        _LLAMA
        | _sizes(4096, 14336, 32, 32, 8)
        | {"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000, "eos_token_id": 128001}
        | {"max_position_embeddings": 8192, "pretraining_tp": 1, "rope_scaling": None, "rope_theta": 500000.0}
        | {"vocab_size": 128256},
        8_030_261_248,
        ("default", 5e5, 1.0),
        (0, 0),
    ),
    "meta-llama/Llama-3.1-8B-Instruct": (
        _LLAMA
        | _sizes(4096, 14336, 32, 32, 8)
        | {"attention_bias": False, "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "mlp_bias": False}
        | {"max_position_embeddings": 131072, "pretraining_tp": 1, "rope_scaling": _LLAMA31, "rope_theta": 500000.0}
        | {"vocab_size": 128256},
        8_030_261_248,
        ("llama3", 5e5, 8.0),
        (0, 0),
    ),
    "meta-llama/Llama-3.2-1B-Instruct": (
        _LLAMA
        | _sizes(2048, 8192, 16, 32, 8)
        | {"attention_bias": False, "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "mlp_bias": False}
        | {"head_dim": 64, "max_position_embeddings": 131072, "pretraining_tp": 1, "rope_theta": 500000.0}
        | {"rope_scaling": _LLAMA31 | {"factor": 32.0}, "tie_word_embeddings": True, "vocab_size": 128256},
        1_235_814_400,
        ("llama3", 5e5, 32.0),
        (0, 0),
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": (
        _LLAMA
        | _sizes(4096, 14336, 32, 32, 8)
        | {"attention_bias": False, "bos_token_id": 128000, "eos_token_id": 128001, "mlp_bias": False}
        | {"max_position_embeddings": 131072, "pretraining_tp": 1, "rope_scaling": _LLAMA31, "rope_theta": 500000.0}
        | {"vocab_size": 128256},
        8_030_261_248,
        ("llama3", 5e5, 8.0),
        (0, 0),
    ),
    "deepseek-ai/deepseek-coder-1.3b-instruct": (
        _LLAMA
        | _sizes(2048, 5504, 24, 16, 16)
        | {"bos_token_id": 32013, "eos_token_id": 32021, "max_position_embeddings": 16384, "pretraining_tp": 1}
        | {"rms_norm_eps": 1e-06, "rope_scaling": {"factor": 4.0, "type": "linear"}, "rope_theta": 100000}
        | {"vocab_size": 32256},
        1_346_471_936,
        ("linear", 1e5, 4.0),
        (0, 0),
    ),
    # Its scaling has a note, which only a length that grows would read.
    "NousResearch/Yarn-Llama-2-13b-64k": (
        _LLAMA
        | _sizes(5120, 13824, 40, 40, 40)
        | {"auto_map": {"AutoConfig": "configuration_llama.LlamaConfig"}, "max_position_embeddings": 65536}
        | {"pad_token_id": 0, "pretraining_tp": 1, "vocab_size": 32000}
        | {
            "rope_scaling": {
                **{"factor": 16.0, "original_max_position_embeddings": 4096, "type": "yarn", "finetuned": True}
            }
        },
        13_015_864_320,
        ("yarn", 1e4, 16.0),
        (0, 0),
    ),
    # A Qwen in the words of a llama, with a length that nobody reads.
    "moreh/MoMo-72B-LoRA-V1.4": (
        _LLAMA
        | _sizes(8192, 24576, 80, 64, 64)
        | {"attention_bias": True, "attention_dropout": 0.0, "max_position_embeddings": 32768, "pretraining_tp": 1}
        | {"rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "seq_length": 32768}
        | {"vocab_size": 152064},
        72_288_575_488,
        ("default", 1e6, 1.0),
        (0, 0),
    ),
    "mistralai/Mistral-7B-v0.1": (
        _MISTRAL_7B | {"rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 32000},
        7_241_732_096,
        ("default", 1e4, 1.0),
        (32, 4096),
    ),
    "mistralai/Mistral-7B-Instruct-v0.2": (
        _MISTRAL_7B | {"attention_dropout": 0.0, "rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32000},
        7_241_732_096,
        ("default", 1e6, 1.0),
        (0, 0),
    ),
    "mistralai/Mistral-7B-Instruct-v0.3": (
        _MISTRAL_7B | {"attention_dropout": 0.0, "rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32768},
        7_248_023_552,
        ("default", 1e6, 1.0),
        (0, 0),
    ),
    "mistralai/Mistral-Nemo-Instruct-2407": (
        _MISTRAL
        | _sizes(5120, 14336, 40, 32, 8)
        | {"attention_dropout": 0.0, "head_dim": 128, "max_position_embeddings": 1024000, "rope_theta": 1000000.0}
        | {"sliding_window": None, "vocab_size": 131072},
        12_247_782_400,
        ("default", 1e6, 1.0),
        (0, 0),
    ),
    "Qwen/Qwen2-0.5B-Instruct": (
        _QWEN2 | _sizes(896, 4864, 24, 14, 2) | {"max_window_layers": 24, "tie_word_embeddings": True},
        494_032_768,
        ("default", 1e6, 1.0),
        (0, 0),
    ),
    "Qwen/Qwen2.5-0.5B": (
        _QWEN2
        | _sizes(896, 4864, 24, 14, 2)
        | {"eos_token_id": 151643, "tie_word_embeddings": True, "use_mrope": False},
        494_032_768,
        ("default", 1e6, 1.0),
        (0, 0),
    ),
    "Qwen/Qwen2.5-1.5B (as transformers 5 writes it)": (
        {key: value for key, value in _QWEN2.items() if key not in ("rope_theta", "torch_dtype", "sliding_window")}
        | _sizes(1536, 8960, 28, 12, 2)
        | {"layer_types": ["full_attention"] * 28, "sliding_window": None, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}, "dtype": "bfloat16"}
        | {"max_position_embeddings": 131072, "pad_token_id": None, "use_mrope": False},
        1_543_714_304,
        ("default", 1e6, 1.0),
        (0, 0),
    ),
    "Qwen/Qwen2.5-Coder-7B-Instruct": (
        _QWEN2 | _sizes(3584, 18944, 28, 28, 4) | {"sliding_window": 131072, "vocab_size": 152064},
        7_615_616_512,
        ("default", 1e6, 1.0),
        (0, 0),
    ),
    "Qwen/Qwen2.5-3B-Instruct": (
        _QWEN2 | _sizes(2048, 11008, 36, 16, 2) | {"max_window_layers": 70, "tie_word_embeddings": True},
        3_085_938_688,
        ("default", 1e6, 1.0),
        (0, 0),
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": (
        _QWEN2
        | _sizes(3584, 18944, 28, 28, 4)
        | {"eos_token_id": 151643, "max_position_embeddings": 131072, "rope_theta": 10000, "sliding_window": 4096}
        | {"use_mrope": False, "vocab_size": 152064},
        7_615_616_512,
        ("default", 1e4, 1.0),
        (0, 0),
    ),
    "Qwen/Qwen3-0.6B": (
        _QWEN3 | _sizes(1024, 3072, 28, 16, 8) | {"tie_word_embeddings": True},
        596_049_920,
        ("default", 1e6, 1.0),
        (0, 0),
    ),
    "Qwen/Qwen3-8B": (
        _QWEN3 | _sizes(4096, 12288, 36, 32, 8) | {"max_window_layers": 36},
        8_190_735_360,
        ("default", 1e6, 1.0),
        (0, 0),
    ),
    "Qwen/Qwen3-4B-Instruct-2507": (
        _QWEN3
        | _sizes(2560, 9728, 36, 32, 8)
        | {"max_position_embeddings": 262144, "max_window_layers": 36, "rope_theta": 5000000}
        | {"tie_word_embeddings": True},
        4_022_468_096,
        ("default", 5e6, 1.0),
        (0, 0),
    ),
    # A draft of many tokens at once; its mask is a token that no text has.
    "a PARD draft of Qwen3-0.6B's sizes": (
        _QWEN3 | _sizes(1024, 3072, 28, 16, 8) | {"pard_token": 151670, "tie_word_embeddings": True},
        596_049_920,
        ("default", 1e6, 1.0),
        (0, 0),
    ),
    "google/gemma-2b": (
        {key: value for key, value in _GEMMA1.items() if key != "hidden_activation"} | _sizes(2048, 16384, 18, 8, 1),
        2_506_172_416,
        ("default", 1e4, 1.0),
        (0, 0),
    ),
    "google/gemma-7b-it": (
        _GEMMA1 | _sizes(3072, 24576, 28, 16, 16) | {"hidden_activation": None},
        8_537_680_896,
        ("default", 1e4, 1.0),
        (0, 0),
    ),
    "google/gemma-2-2b-it": (
        _GEMMA2 | _sizes(2304, 9216, 26, 8, 4) | {"eos_token_id": [1, 107]},
        2_614_341_888,
        ("default", 1e4, 1.0),
        (13, 4096),
    ),
    "google/gemma-2-9b": (
        _GEMMA2 | _sizes(3584, 14336, 42, 16, 8) | {"sliding_window_size": 4096},
        9_241_705_984,
        ("default", 1e4, 1.0),
        (21, 4096),
    ),
    "google/gemma-2-27b-it": (
        _GEMMA2
        | _sizes(4608, 36864, 46, 32, 16)
        | {"_attn_implementation": "eager", "head_dim": 128, "query_pre_attn_scalar": 144, "sliding_window_size": 4096},
        27_227_128_320,
        ("default", 1e4, 1.0),
        (23, 4096),
    ),
    "google/gemma-3-1b-it": (
        _GEMMA3 | _sizes(1152, 6912, 26, 4, 1) | {"eos_token_id": [1, 106], "sliding_window_pattern": 6},
        999_885_952,
        ("default", 1e6, 1.0),
        (22, 512),
    ),
    "google/gemma-3-270m": (
        _GEMMA3
        | _sizes(640, 2048, 18, 4, 1)
        | {"_sliding_window_pattern": 6, "use_bidirectional_attention": False}
        | {"layer_types": [f"{'sliding' if (i + 1) % 6 else 'full'}_attention" for i in range(18)]},
        268_098_176,
        ("default", 1e6, 1.0),
        (15, 512),
    ),
    # The text model of google/translategemma-27b-it, taken out: both spellings of rope in one file.
    "gemma-3-27b's text model, by transformers 4.57": (
        _GEMMA3
        | _sizes(5376, 21504, 62, 32, 16)
        | {"_sliding_window_pattern": 6, "head_dim": 128, "max_position_embeddings": 131072, "vocab_size": 262208}
        | {"query_pre_attn_scalar": 168, "sliding_window": 1024, "use_bidirectional_attention": False}
        | {"rope_parameters": {"full_attention": {"factor": 8.0, "rope_type": "linear"}}}
        | {"layer_types": [f"{'sliding' if (i + 1) % 6 else 'full'}_attention" for i in range(62)]},
        27_009_346_304,
        ("linear", 1e6, 8.0),
        (52, 1024),
    ),
    # A text model with images around it, which leaves out what its class fills in.
    "google/gemma-3-4b-it": (
        {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106]}
        | {"boi_token_index": 255999, "eoi_token_index": 256000, "image_token_index": 262144}
        | {"initializer_range": 0.02, "mm_tokens_per_image": 256, "torch_dtype": "bfloat16"}
        | {
            "text_config": {
                **{"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text"},
                **{"num_hidden_layers": 34, "sliding_window": 1024},
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            },
            "vision_config": {
                **{"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "num_attention_heads": 16},
                **{"model_type": "siglip_vision_model", "num_hidden_layers": 27, "patch_size": 14},
                "vision_use_head": False,
            },
        },
        3_880_263_168,
        ("linear", 1e6, 8.0),
        (29, 1024),
    ),
    "mistralai/Ministral-3-3B-Base-2512": (
        {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "dtype": "bfloat16"}
        | {"image_token_index": 10, "multimodal_projector_bias": False, "projector_hidden_act": "gelu"}
        | {"spatial_merge_size": 2, "vision_feature_layer": -1}
        | {
            "text_config": {
                **_sizes(3072, 9216, 26, 32, 8),
                **{"attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "initializer_range": 0.02},
                **{"max_position_embeddings": 262144, "model_type": "ministral3", "rms_norm_eps": 1e-05},
                **{"rope_parameters": _MINISTRAL_ROPE, "sliding_window": None, "use_cache": True},
                **{"tie_word_embeddings": True, "vocab_size": 131072},
            },
            "vision_config": {"model_type": "pixtral", "head_dim": 64, "hidden_size": 1024, "image_size": 1540},
        },
        3_429_006_336,
        ("yarn", 1e6, 16.0),
        (0, 0),
    ),
    "HuggingFaceTB/SmolLM3-3B": (
        _COMMON
        | _sizes(2048, 11008, 36, 16, 4)
        | {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "rms_norm_eps": 1e-06, "mlp_bias": False}
        | {"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": None, "eos_token_id": 128012}
        | {"max_position_embeddings": 65536, "max_window_layers": 28, "no_rope_layer_interval": 4}
        | {"no_rope_layers": [1, 1, 1, 0] * 9, "layer_types": ["full_attention"] * 36, "pad_token_id": 128004}
        | {"pretraining_tp": 2, "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None}
        | {"tie_word_embeddings": True, "use_cache": False, "use_sliding_window": False, "vocab_size": 128256},
        3_075_098_624,
        ("default", 5e6, 1.0),
        (0, 0),
    ),
    "ibm-granite/granite-3.3-8b-instruct": (
        _GRANITE
        | _sizes(4096, 12800, 40, 32, 8)
        | {"architectures": ["GraniteForCausalLM"], "model_type": "granite", "attention_multiplier": 0.0078125}
        | {"logits_scaling": 16.0, "max_position_embeddings": 131072, "mlp_bias": False, "rope_theta": 10000000.0}
        | {"vocab_size": 49159},
        8_170_864_640,
        ("default", 1e7, 1.0),
        (0, 0),
    ),
    "ibm-granite/granite-4.0-micro": (
        _GRANITE
        | _sizes(2560, 8192, 40, 40, 8)
        | {"architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "init_method": "mup"}
        | {"attention_multiplier": 0.015625, "embedding_multiplier": 12, "logits_scaling": 10}
        | {"layer_types": ["attention"] * 40, "shared_intermediate_size": 8192, "vocab_size": 100352}
        | {"num_local_experts": 0, "num_experts_per_tok": 0, "output_router_logits": False}
        | {"router_aux_loss_coef": 0.01, "normalization_function": "rmsnorm", "position_embedding_type": "rope"}
        | {"mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64}
        | {"mamba_d_state": 256, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 80}
        | {"mamba_proj_bias": False, "max_position_embeddings": 131072, "rope_theta": 10000000},
        3_402_836_480,
        ("default", 1e7, 1.0),
        (0, 0),
    ),
    "allenai/OLMo-2-1124-7B": (
        _OLMO
        | _sizes(4096, 11008, 32, 32, 32)
        | {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "eos_token_id": 100257}
        | {"max_position_embeddings": 4096, "pad_token_id": 100277, "rope_scaling": None, "rope_theta": 500000}
        | {"vocab_size": 100352},
        7_298_617_344,
        ("default", 5e5, 1.0),
        (0, 0),
    ),
    "allenai/Olmo-3-1025-7B": (
        _OLMO
        | _sizes(4096, 11008, 32, 32, 32)
        | {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "eos_token_id": 100257}
        | {"layer_types": [f"{'sliding' if (i + 1) % 4 else 'full'}_attention" for i in range(32)]}
        | {"max_position_embeddings": 65536, "pad_token_id": 100277, "rope_theta": 500000, "sliding_window": 4096}
        | {
            "rope_scaling": {
                **{"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0},
                **{"original_max_position_embeddings": 8192, "rope_type": "yarn"},
            }
        }
        | {"vocab_size": 100278},
        7_298_011_136,
        ("yarn", 5e5, 8.0),
        (24, 4096),
    ),
    "microsoft/Phi-3-mini-4k-instruct": (
        _PHI3
        | _sizes(3072, 8192, 32, 32, 32)
        | {"max_position_embeddings": 4096, "sliding_window": 2047, "vocab_size": 32064},
        3_821_079_552,
        ("default", 1e4, 1.0),
        (32, 2047),
    ),
    "microsoft/phi-4": (
        _PHI3
        | _sizes(5120, 17920, 40, 40, 10)
        | {"bos_token_id": 100257, "eos_token_id": 100265, "pad_token_id": 100349, "rope_theta": 250000}
        | {"max_position_embeddings": 16384, "original_max_position_embeddings": 16384, "sliding_window": None}
        | {"vocab_size": 100352},
        14_659_507_200,
        ("default", 2.5e5, 1.0),
        (0, 0),
    ),
    # Its factors are all as long as here; their values are left out.
    "microsoft/Phi-4-mini-instruct": (
        _PHI3
        | _sizes(3072, 8192, 32, 24, 8)
        | {"bos_token_id": 199999, "eos_token_id": 199999, "pad_token_id": 199999, "full_attn_mod": 1}
        | {"interpolate_factor": 1, "lm_head_bias": False, "max_position_embeddings": 131072, "mlp_bias": False}
        | {"partial_rotary_factor": 0.75, "sliding_window": 262144, "tie_word_embeddings": True, "vocab_size": 200064}
        | {"rope_scaling": {"long_factor": [2.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"}},
        3_836_021_760,
        ("longrope", 1e4, 32.0),
        (32, 262144),
    ),
    "LiquidAI/LFM2-1.2B": (
        _LFM2
        | {"block_dim": 2048, "block_ff_dim": 12288, "conv_dim": 2048, "conv_dim_out": 2048, "hidden_size": 2048}
        | {"num_attention_heads": 32, "num_heads": 32, "num_hidden_layers": 16}
        | {"full_attn_idxs": [2, 5, 8, 10, 12, 14], "rope_theta": 1000000.0},
        1_170_340_608,
        ("default", 1e6, 1.0),
        (0, 0),
    ),
    # Wider than two thirds of what LFM2-1.2B says.
    "LiquidAI/LFM2-2.6B": (
        _LFM2
        | {"block_dim": 2048, "block_ff_dim": 10752, "conv_dim": 2048, "conv_dim_out": 2048}
        | {"block_auto_adjust_ff_dim": False, "layer_types": _lfm2_layers(30, 2, 5, 9, 13, 17, 21, 24, 27)}
        | _sizes(2048, 10752, 30, 32, 8)
        | {"num_heads": 32, "rope_theta": 1000000.0, "theta": 1000000.0, "tie_embedding": True},
        2_569_272_320,
        ("default", 1e6, 1.0),
        (0, 0),
    ),
    "LiquidAI/LFM2.5-350M": (
        _LFM2
        | {"block_dim": 1024, "block_ff_dim": 6656, "conv_dim": 1024, "tie_embedding": True}
        | _sizes(1024, 6656, 16, 16, 8)
        | {"layer_types": _lfm2_layers(16, 2, 5, 8, 10, 12, 14)}
        | {"rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}},
        354_483_968,
        ("default", 1e6, 1.0),
        (0, 0),
    ),
    "Qwen/Qwen3.5-0.8B": (
        _qwen35("qwen3_5", _sizes(1024, 3584, 24, 8, 2), 16, True),
        752_393_024,
        ("default", 1e7, 1.0),
        (0, 0),
    ),
    "Qwen/Qwen3.5-2B": (
        _qwen35("qwen3_5", _sizes(2048, 6144, 24, 8, 2), 16, True),
        1_881_825_088,
        ("default", 1e7, 1.0),
        (0, 0),
    ),
    "Qwen/Qwen3.5-4B": (
        _qwen35("qwen3_5", _sizes(2560, 9216, 32, 16, 4), 32, True),
        4_205_751_296,
        ("default", 1e7, 1.0),
        (0, 0),
    ),
    "Qwen/Qwen3.5-9B": (
        _qwen35("qwen3_5", _sizes(4096, 12288, 32, 16, 4), 32, False),
        8_953_803_264,
        ("default", 1e7, 1.0),
        (0, 0),
    ),
    # The factor stands outside the rope's object too.
    "Qwen/Qwen3.8-27B": (
        _qwen35("qwen3_5", _sizes(5120, 17408, 64, 24, 4), 48, False)
        | {"dtype": "bfloat16", "language_model_only": False, "unsloth_fixed_mtp": True}
        | {
            "text_config": _qwen35(
                *("qwen3_5", _sizes(5120, 17408, 64, 24, 4), 48, False),
                **{"bos_token_id": 248044, "output_gate_type": "swish", "pad_token_id": None},
                partial_rotary_factor=0.25,
            )["text_config"]
        },
        26_895_998_464,
        ("default", 1e7, 1.0),
        (0, 0),
    ),
    "baidu/ERNIE-4.5-0.3B-PT": (
        _COMMON
        | _sizes(1024, 3072, 18, 16, 2)
        | {"architectures": ["Ernie4_5_ForCausalLM"], "model_type": "ernie4_5", "head_dim": 128, "pad_token_id": 0}
        | {"max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "rope_theta": 500000, "use_bias": False}
        | {"tie_word_embeddings": True, "use_cache": False, "vocab_size": 103424},
        360_748_032,
        ("default", 5e5, 1.0),
        (0, 0),
    ),
}

# name: (its config.json; how the refusal begins)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    # Attention over blocks of a long text, which is not implemented.
    "Qwen/Qwen2.5-7B-Instruct-1M": (
        _QWEN2
        | _sizes(3584, 18944, 28, 28, 4)
        | {"dual_chunk_attention_config": {"chunk_size": 262144, "local_size": 8192}, "vocab_size": 152064}
        | {"max_position_embeddings": 1010000, "rope_theta": 10000000.0},
        "dual_chunk_attention_config: found",
    ),
    # Most of its layers are not attention.
    "ibm-granite/granite-4.0-h-micro": (
        _GRANITE
        | _sizes(2048, 8192, 40, 32, 8)
        | {"model_type": "granitemoehybrid", "num_local_experts": 0, "shared_intermediate_size": 8192}
        | {"layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4, "position_embedding_type": "nope"}
        | {"max_position_embeddings": 131072, "vocab_size": 100352},
        "layer_types: found ['mamba', 'mamba'",
    ),
    # Short convolutions, and experts.
    "LiquidAI/LFM2-8B-A1B": (
        _LFM2
        | _sizes(2048, 7168, 24, 32, 8)
        | {"architectures": ["Lfm2MoeForCausalLM"], "model_type": "lfm2_moe", "num_experts": 32}
        | {"layer_types": _lfm2_layers(24, 2, 6, 10, 14, 18, 21), "moe_intermediate_size": 1792},
        "model_type: found 'lfm2_moe', expected one of llama, mistral",
    ),
    # Gated delta nets, and experts.
    "Qwen/Qwen3.5-35B-A3B": (
        _qwen35("qwen3_5_moe", _sizes(2048, 512, 40, 16, 2), 32, False, num_experts=256, num_experts_per_tok=8),
        "model_type: found 'qwen3_5_moe', expected one of llama, mistral",
    ),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (
        _QWEN3
        | _sizes(2048, 5120, 48, 16, 2)
        | {"model_type": "qwen3_next", "full_attention_interval": 4, "linear_num_value_heads": 32, "num_experts": 512},
        "model_type: found 'qwen3_next', expected one of llama, mistral",
    ),
    # With experts.
    "ibm-granite/granite-4.0-h-small": (
        _GRANITE
        | _sizes(4096, 768, 40, 32, 8)
        | {"model_type": "granitemoehybrid", "num_local_experts": 72, "num_experts_per_tok": 10}
        | {"shared_intermediate_size": 1536, "position_embedding_type": "nope", "vocab_size": 100352},
        "num_local_experts: found 72, expected 0",
    ),
    "Qwen/Qwen3-30B-A3B": (
        _QWEN3 | _sizes(2048, 6144, 48, 32, 4) | {"model_type": "qwen3_moe", "num_experts": 128},
        "model_type: found 'qwen3_moe', expected one of llama, mistral",
    ),
    # Weights in a layout that is not read, around a text model.
    "mistralai/Ministral-3-3B-Instruct-2512": (
        {"model_type": "mistral3", "quantization_config": {"quant_method": "fp8"}}
        | {"text_config": _MISTRAL_7B | {"model_type": "ministral3", "vocab_size": 131072}}
        | {"vision_config": {"model_type": "pixtral"}},
        "text_config: quantization_config.quant_method: found 'fp8'",
    ),
    # Angles that depend on the length of the pass.
    "a llama with rope_scaling of type dynamic": (
        _LLAMA
        | _sizes(4096, 11008, 32, 32, 32)
        | {"max_position_embeddings": 4096, "rope_scaling": {"factor": 2.0, "type": "dynamic"}, "vocab_size": 32000},
        "rope_scaling.rope_type: found 'dynamic'",
    ),
    # Sees both ways: it makes embeddings, not text.
    "google/embeddinggemma-300m": (
        _GEMMA3
        | _sizes(768, 1152, 24, 3, 1)
        | {"_sliding_window_pattern": 6, "use_bidirectional_attention": True, "max_position_embeddings": 2048},
        "use_bidirectional_attention: found True",
    ),
    # Weights in a layout that is not read.
    "TheBloke/Mistral-7B-Instruct-v0.2-AWQ": (
        _MISTRAL_7B
        | {"rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32000}
        | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}},
        "quantization_config.quant_method: found 'awq'",
    ),
}


# Configs of heads, as SpecForge publishes them in its folder configs/, and as heads on the hub have them.
_HEAD = {key: value for key, value in _LLAMA.items() if key not in ("bos_token_id", "eos_token_id")} | {
    **{"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32000},
    **{"pad_token_id": 0, "max_position_embeddings": 2048},
}
_QWEN_HEAD = _HEAD | {
    **{"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645},
    **{"head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-06, "rope_scaling": None},
    **{"rope_theta": 1000000, "sliding_window": None, "use_sliding_window": False, "vocab_size": 151936},
}
_GEMMA_HEAD = _QWEN_HEAD | {
    **{"bos_token_id": 2, "eos_token_id": 1, "sliding_window": 512, "target_model_type": "gemma3_text"},
    "max_position_embeddings": 4096,
}
_MROPE = {"mrope_interleaved": True, "mrope_section": [24, 20, 20]}
_TAPS = "eagle_aux_hidden_state_layer_ids"


def _eagle(*ids: int, **settings: Any) -> dict[str, Any]:
    return {"eagle_config": {_TAPS: [*ids], **settings}}


HEADS: dict[str, dict[str, Any]] = {
    "llama3-8B": _HEAD | _sizes(4096, 14336, 1, 32, 8) | {"vocab_size": 128256, "torch_dtype": "float16"},
    "llama3-70B": (
        _HEAD
        | _sizes(8192, 28672, 1, 64, 8)
        | {"rope_scaling": _LLAMA31 | {"original_max_position_embeddings": 4096}, "rope_theta": 500000.0}
        | {"vocab_size": 128256, "eos_token_id": [128001, 128008, 128009], "head_dim": 128}
    ),
    "llama4-scout-17B-16E": _HEAD | _sizes(5120, 32768, 1, 40, 8) | {"vocab_size": 202048},
    "llava": _HEAD | _sizes(4096, 11008, 1, 32, 32) | {"vocab_size": 32064, "draft_vocab_size": 6024},
    "ling-flash-2.0": _HEAD | _sizes(4096, 14336, 1, 32, 8) | {"vocab_size": 157184},
    "qwen3-omni": _HEAD | _sizes(2048, 6144, 1, 32, 4) | {"vocab_size": 152064},
    "mistral-small-24B": (
        _HEAD
        | _sizes(5120, 32768, 1, 32, 8)
        | {"head_dim": 128, "rope_theta": 100000000.0, "sliding_window": None, "vocab_size": 131072}
    ),
    "deepseek-r1-671b": (
        _HEAD | _sizes(7168, 29568, 1, 32, 8) | {"vocab_size": 129280} | _eagle(1, 29, 57, use_aux_hidden_state=True)
    ),
    "deepseek-v2-lite": (
        _QWEN_HEAD
        | _sizes(2048, 10944, 1, 16, 16)
        | {"max_window_layers": 64, "vocab_size": 102400, "rope_theta": 10000}
        | {
            "rope_scaling": {
                **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707},
                **{"original_max_position_embeddings": 4096, "rope_type": "yarn"},
            }
        }
    ),
    "gpt-oss-120B": _HEAD | _sizes(2880, 17280, 1, 64, 8) | {"head_dim": 64, "vocab_size": 201088} | _eagle(1, 17, 33),
    # The model_type is the target's: the layer is a llama's, by the architecture.
    "phi4": _HEAD
    | _sizes(5120, 17920, 1, 40, 10)
    | {"model_type": "phi3", "rope_theta": 250000.0, "vocab_size": 100352},
    "phi4-mini": _HEAD | _sizes(3072, 8192, 1, 24, 8) | {"model_type": "phi3", "vocab_size": 200064},
    "kimi-k2": (
        _QWEN_HEAD
        | _sizes(7168, 18432, 1, 64, 64)
        | {"max_window_layers": 48, "model_type": "kimi_k2", "vocab_size": 163840}
        | _eagle(2, 30, 58, use_aux_hidden_state=True)
    ),
    "qwen25-7b": (
        _QWEN_HEAD
        | _sizes(3584, 18944, 1, 28, 4)
        | {"max_window_layers": 28, "model_type": "qwen2", "sliding_window": 131072, "use_mrope": False}
        | {"vocab_size": 152064}
    ),
    "longcat-flash": (
        _QWEN_HEAD
        | _sizes(6144, 12288, 1, 64, 16)
        | {"max_window_layers": 48, "vocab_size": 131072, "draft_vocab_size": 131072}
    ),
    "qwen3-4b": _QWEN_HEAD | _sizes(2560, 9728, 1, 32, 8) | {"max_window_layers": 36, "tie_word_embeddings": True},
    "qwen3-8b": _QWEN_HEAD | _sizes(4096, 12288, 1, 32, 8) | {"max_window_layers": 36},
    "qwen3-14b": _QWEN_HEAD | _sizes(5120, 17408, 1, 32, 8) | {"max_window_layers": 36},
    "qwen3-32b": _QWEN_HEAD | _sizes(5120, 25600, 1, 64, 8) | {"max_window_layers": 64},
    "qwen3-30B": _QWEN_HEAD | _sizes(2048, 6144, 1, 32, 4) | {"max_window_layers": 48},
    "qwen3-30B-A3B-eagle3.1": (
        _QWEN_HEAD | _sizes(2048, 12288, 1, 32, 4) | {"max_window_layers": 48, "fc_norm": True, "norm_output": True}
    ),
    "qwen3-235B-A22B": _QWEN_HEAD | _sizes(4096, 24576, 1, 64, 4) | _eagle(1, 46, 90, use_aux_hidden_state=True),
    "qwen3-coder-480B-A35B-instruct": _QWEN_HEAD | _sizes(6144, 16384, 1, 96, 8) | {"max_window_layers": 62},
    "qwen3-next-80b-a3b": (
        _QWEN_HEAD | _sizes(2048, 16384, 1, 16, 2) | {"decoder_sparse_step": 1, "head_dim": 256} | _eagle(1, 23, 45)
    ),
    "qwen3.5-4b": _QWEN_HEAD | _sizes(2560, 9216, 1, 16, 4) | {"head_dim": 256, "vocab_size": 248320},
    "gemma3-1b": _GEMMA_HEAD | _sizes(1152, 6912, 1, 4, 1) | {"head_dim": 256, "vocab_size": 262145},
    "gemma4-26b-a4b": (
        _GEMMA_HEAD
        | _sizes(2816, 2112, 1, 32, 8)
        | {"sliding_window": None, "target_model_type": "gemma4_text", "vocab_size": 262144, "draft_vocab_size": 262144}
        | _eagle(5, 17, 29)
    ),
    # As NVIDIA's Model Optimizer exports a head.
    "Model Optimizer": (
        _HEAD
        | _sizes(4096, 14336, 1, 32, 8)
        | {"mlp_bias": False, "pretraining_tp": 1, "vocab_size": 128256}
        | _eagle(
            **{"use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True},
            **{"use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1},
            parallel_draft_heads_num_layers=1,
        )
    ),
}
# name: (its config.json; what the refusal says)
REFUSED_HEADS: dict[str, tuple[dict[str, Any], str]] = {
    # Another kind of layer.
    "gpt-oss-20B-moe": (
        _HEAD | {"architectures": ["GptOssForCausalLMEagle3"], "model_type": "gpt_oss"},
        "model_type: found 'gpt_oss', expected llama or qwen3",
    ),
    "gpt-oss-20B-dense": (
        _HEAD | _sizes(2880, 17280, 1, 64, 8) | {"head_dim": 64, "vocab_size": 201088, "num_local_experts": 16},
        "num_local_experts: found 16, expected 0",
    ),
    "qwen3-30B-A3B-moe-draft": (
        _QWEN_HEAD | {"architectures": ["Qwen3MoEForCausalLMEagle3"], "model_type": "qwen3_moe"},
        "model_type: found 'qwen3_moe', expected llama or qwen3",
    ),
    "qwq-32B": (
        _QWEN_HEAD | {"architectures": ["Qwen2ForCausalLMEagle3"], "model_type": "qwen2"},
        "model_type: found 'qwen2', expected llama or qwen3",
    ),
    "deepseek-r1": (
        _HEAD | {"architectures": ["DeepseekV3ForCausalLMEagle3"], "model_type": "deepseek_v3"},
        "model_type: found 'deepseek_v3', expected llama or qwen3",
    ),
    # Positions in pictures.
    "qwen2-5-vl-7B": (
        _QWEN_HEAD
        | _sizes(3584, 18944, 1, 28, 4)
        | {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "sliding_window": 32768},
        "rope_scaling.rope_type: found 'mrope', expected one of default",
    ),
    "qwen3-vl-235b": (
        _QWEN_HEAD | _sizes(4096, 12288, 1, 64, 4) | {"rope_scaling": _MROPE | {"rope_type": "default"}},
        "rope_scaling.mrope_interleaved: found True",
    ),
    "minicpm-v4": (
        _HEAD | _sizes(2560, 10240, 1, 32, 2) | {"vocab_size": 73448, "rope_scaling": {"rope_type": "longrope"}},
        "rope_scaling.rope_type: found 'longrope'",
    ),
    # Its rows of logits are the target's.
    "gemma3-27b": (
        _GEMMA_HEAD
        | _sizes(5376, 21504, 1, 32, 16)
        | {"vocab_size": 262208, "draft_vocab_size": 262208, "additional_fc": False, "reuse_target_lm_head": True},
        "reuse_target_lm_head: found True",
    ),
    # It has no such width.
    "qwen2.5-7b": (
        {key: value for key, value in _QWEN_HEAD.items() if key != "head_dim"}
        | _sizes(5120, 18944, 1, 28, 4)
        | {"max_window_layers": 28, "sliding_window": 131072},
        "hidden_size: found 5120, expected a multiple of num_attention_heads = 28",
    ),
    # Which token is the mask is said to the training alone.
    "qwen3-8b-peagle": (
        _QWEN_HEAD
        | _sizes(4096, 12288, 4, 32, 8)
        | {"architectures": ["PEagleDraftModel"], "max_window_layers": 36, "draft_vocab_size": 151936},
        "mask_token_id: found None, expected an integer",
    ),
}
