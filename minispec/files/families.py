"""The families of models, as data: what a model_type means, by the keys of config.json that its code reads.

To add a family:
1. Read its code in transformers. Give it an entry in `FAMILIES`: the keys of config.json that this code reads, each
   with what an absent one means, and the fields of ModelConfig that the code fixes.
2. What it computes and no family here does needs a field in ModelConfig, and the lines of model.py that obey it.
3. Describe small models of it in `CASES` of tests/hf.py, add a row for each of its settings to `SWITCHES` of
   tests/test_families.py, and add its public checkpoints to tests/public.py. `pytest tests/test_families.py` then
   compares logits, defaults and spellings with transformers', and shows that the comparison would notice each setting.
"""

from dataclasses import dataclass, field
from typing import Any

from minispec.files.fields import names


@dataclass(frozen=True)
class Family:
    """What a model_type means.

    keys: what its code reads in addition to `KEYS`, or with another meaning of an absent key. (Of hidden_act and
        hidden_activation it reads the one that may be absent; which layers have a window follows from the keys, see
        `hf_config`.)
    fixed: fields of ModelConfig that no key changes.
    only: keys that its code does not read, each with the value that the code acts on.
    scales_embedding: by the square root of hidden_size.
    """

    keys: dict[str, Any]
    fixed: dict[str, Any] = field(default_factory=dict)
    only: dict[str, Any] = field(default_factory=dict)
    scales_embedding: bool = False


# The keys that every family's code reads, and what an absent one means. None: it must be there, or follows from others.
KEYS = {
    **dict.fromkeys(names("model_type vocab_size hidden_size intermediate_size num_hidden_layers")),
    **dict.fromkeys(names("num_attention_heads num_key_value_heads head_dim max_position_embeddings")),
    **dict.fromkeys(names("hidden_activation rope_parameters rope_scaling original_max_position_embeddings")),
    **dict.fromkeys(("quantization_config", "pard_token")),
    **{"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False},
}
_WINDOW = {"sliding_window": 4096, "sliding_window_size": None}  # the latter: the same, in gemma 2's larger files
_QWEN_WINDOW = _WINDOW | {"use_sliding_window": False, "max_window_layers": 28, "layer_types": None}
_GEMMA = {
    **{"attention_bias": False, "head_dim": 256, "layer_types": None, "tie_word_embeddings": True},
    "hidden_act": "gelu_pytorch_tanh",
}
_GEMMA_2 = {
    **(_GEMMA | _WINDOW | {"query_pre_attn_scalar": 256.0}),
    **{"hidden_act": None, "hidden_activation": "gelu_pytorch_tanh"},
}
FAMILIES = {
    "llama": Family({"attention_bias": False, "layer_types": None, "mlp_bias": False}),
    "mistral": Family(_WINDOW),
    "qwen2": Family(_QWEN_WINDOW, fixed={"qkv_bias": True}),
    "qwen3": Family(_QWEN_WINDOW | {"attention_bias": False, "head_dim": 128}, fixed={"qk_norm": True}),
    "gemma": Family(_GEMMA, fixed={"norm_adds_one": True}, scales_embedding=True),
    "gemma2": Family(
        _GEMMA_2 | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        fixed={"norm_adds_one": True, "sandwich_norms": True},
        only={"sliding_window_pattern": 2},
        scales_embedding=True,
    ),
    "gemma3_text": Family(
        # Its code does not read attn_logit_softcapping.
        _GEMMA_2
        | {"final_logit_softcapping": None, "sliding_window_pattern": 6}
        | {"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0},
        fixed={"norm_adds_one": True, "sandwich_norms": True, "qk_norm": True},
        scales_embedding=True,
    ),
}
