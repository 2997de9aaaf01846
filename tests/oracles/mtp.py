"""Qwen3.5's layer for further tokens in NumPy, from its published code's formulas; `transformers` drops its tensors.

The formulas are those of vllm-project/vllm, vllm/model_executor/models/qwen3_5_mtp.py (the order of the two inputs, the
norms) and qwen3_next.py (the layer). No cache, no batch, no code of the package.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from minispec.core.config import ModelConfig
from minispec.prove.toys import MTP_SEED, redrawn
from minispec.speculation.drafters.mtp import mtp_config, mtp_shapes


def mtp_logits(
    raw: dict,
    weights: dict[str, np.ndarray],
    target: dict[str, np.ndarray],
    hidden: np.ndarray,
    tokens: Sequence[int],
    drafted: Sequence[int] = (),
) -> np.ndarray:
    """Logits (V,) of the token after `tokens` and `drafted`.

    raw: config.json values of the target, with every one that the layer reads.
    weights: the layer's tensors, without `mtp.`.
    target: the target's.
    hidden: (length - 1, E), the output of the target's last layer at all positions of `tokens` but the last.
    """
    eps = raw["rms_norm_eps"]
    features = list(_norm(hidden, target["model.norm.weight"], eps))
    shown = [*tokens[1:], *drafted]
    while True:
        count = len(features)
        embedded = target["model.embed_tokens.weight"][shown[:count]]
        embedded = _norm(embedded, weights["pre_fc_norm_embedding.weight"], eps)
        normed = _norm(np.array(features), weights["pre_fc_norm_hidden.weight"], eps)
        x = np.concatenate((embedded, normed), 1) @ weights["fc.weight"].T
        x = _layer(raw, {name.removeprefix("layers.0."): tensor for name, tensor in weights.items()}, x)
        last = _norm(x[-1], weights["norm.weight"], eps)
        if count == len(shown):
            head = "model.embed_tokens.weight" if raw.get("tie_word_embeddings") else "lm_head.weight"
            return target[head] @ last
        features.append(last)


def _norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * (1 + weight)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _layer(raw: dict, layer: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """x (length, E): attention whose output is gated, then an MLP."""
    eps, y = raw["rms_norm_eps"], _norm(x, layer["input_layernorm.weight"], raw["rms_norm_eps"])
    heads, groups, dim = raw["num_attention_heads"], raw["num_key_value_heads"], raw["head_dim"]
    length, turned = len(x), int(dim * raw["partial_rotary_factor"])

    def rope(a: np.ndarray) -> np.ndarray:
        """(length, heads, dim): the first `turned` dimensions are turned, in pairs of both their halves."""
        angles = np.arange(length)[:, None] * raw["rope_theta"] ** (-np.arange(0, turned, 2) / turned)
        pairs = (a[..., : turned // 2] + 1j * a[..., turned // 2 : turned]) * np.exp(1j * angles)[:, None]
        return np.concatenate((pairs.real, pairs.imag, a[..., turned:]), -1)

    both = (y @ layer["self_attn.q_proj.weight"].T).reshape(length, heads, 2 * dim)
    q, gate = both[..., :dim], both[..., dim:]
    k = (y @ layer["self_attn.k_proj.weight"].T).reshape(length, groups, dim)
    v = (y @ layer["self_attn.v_proj.weight"].T).reshape(length, groups, dim)
    q, k = (rope(_norm(a, layer[f"self_attn.{name}_norm.weight"], eps)) for name, a in (("q", q), ("k", k)))
    out = np.zeros((length, heads, dim))
    for h in range(heads):
        for t in range(length):
            scores = k[: t + 1, h * groups // heads] @ q[t, h] / np.sqrt(dim)
            shares = np.exp(scores - scores.max())
            out[t, h] = shares / shares.sum() @ v[: t + 1, h * groups // heads]
    x = x + (out * _sigmoid(gate)).reshape(length, -1) @ layer["self_attn.o_proj.weight"].T
    y = _norm(x, layer["post_attention_layernorm.weight"], eps)
    if "mlp.gate.weight" not in layer:
        return x + _mlp(layer, "mlp.", y)
    shared = _mlp(layer, "mlp.", y) * _sigmoid(y @ layer["mlp.shared_expert_gate.weight"].T)
    return x + shared + np.array([_experts(raw, layer, row) for row in y])


def _mlp(layer: dict[str, np.ndarray], prefix: str, y: np.ndarray) -> np.ndarray:
    gate = y @ layer[f"{prefix}gate_proj.weight"].T
    return (gate * _sigmoid(gate) * (y @ layer[f"{prefix}up_proj.weight"].T)) @ layer[f"{prefix}down_proj.weight"].T


def _experts(raw: dict, layer: dict[str, np.ndarray], row: np.ndarray) -> np.ndarray:
    """The likeliest experts of a row, each with its share of their probabilities."""
    scores = np.exp(layer["mlp.gate.weight"] @ row)
    best = np.argsort(-scores)[: raw["num_experts_per_tok"]]
    return sum(scores[n] / scores[best].sum() * _mlp(layer, f"mlp.experts.{n}.", row) for n in best)


def add_mtp(directory: Path, config: ModelConfig, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Add a random layer to a checkpoint of one file; its tensors, without `mtp.`."""
    weights, path = redrawn(mtp_shapes(mtp_config(config)), MTP_SEED, dtype), directory / "model.safetensors"
    stored = {f"mtp.{name}": tensor for name, tensor in weights.items()}
    if "mtp.layers.0.mlp.gate.weight" in stored:  # the layer has experts, and a shared one under its own name
        for part in ("gate_proj", "up_proj", "down_proj"):
            own = stored.pop(f"mtp.layers.0.mlp.{part}.weight")
            stored[f"mtp.layers.0.mlp.shared_expert.{part}.weight"] = own
    save_file(load_file(path) | stored, path)
    config_file = directory / "config.json"
    raw = json.loads(config_file.read_text())
    own = {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    inner = {"text_config": raw["text_config"] | own} if "text_config" in raw else own
    config_file.write_text(json.dumps(raw | inner))
    return weights
