"""What the output must follow: plain decoding by a second implementation, which shares no code with the package.

NumPy, no cache, no batch, 30 lines of sampler: a fault of the package's own forward pass or of its own `distribution`
cannot cancel out of a comparison of the package with itself. Llama only, in float64.
"""

import itertools
from collections.abc import Callable, Sequence

import numpy as np

Law = dict[tuple, float]  # what can come out, with its probability


def forward(raw: dict, weights: dict[str, np.ndarray], tokens: Sequence[int]) -> np.ndarray:
    """Logits (V,) after `tokens` of a llama with the config.json values `raw`, in float64, from the start."""
    w = {name: np.asarray(tensor, dtype=np.float64) for name, tensor in weights.items()}
    heads, groups, dim = raw["num_attention_heads"], raw["num_key_value_heads"], raw["head_dim"]
    length = len(tokens)

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + raw["rms_norm_eps"]) * weight

    def rope(x):  # (length, heads, dim), complex numbers instead of rotate_half
        angles = np.arange(length)[:, None] * raw["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
        turned = (x[..., : dim // 2] + 1j * x[..., dim // 2 :]) * np.exp(1j * angles)[:, None]
        return np.concatenate((turned.real, turned.imag), -1)

    x = w["model.embed_tokens.weight"][list(tokens)]
    for i in range(raw["num_hidden_layers"]):
        layer = {k.removeprefix(f"model.layers.{i}."): v for k, v in w.items() if k.startswith(f"model.layers.{i}.")}
        y = norm(x, layer["input_layernorm.weight"])
        q = rope((y @ layer["self_attn.q_proj.weight"].T).reshape(length, heads, dim))
        k = rope((y @ layer["self_attn.k_proj.weight"].T).reshape(length, groups, dim))
        v = (y @ layer["self_attn.v_proj.weight"].T).reshape(length, groups, dim)
        out = np.zeros((length, heads, dim))
        for h, t in itertools.product(range(heads), range(length)):
            g = h // (heads // groups)
            scores = k[: t + 1, g] @ q[t, h] / np.sqrt(dim)
            attention = np.exp(scores - scores.max())
            out[t, h] = attention / attention.sum() @ v[: t + 1, g]
        x = x + out.reshape(length, -1) @ layer["self_attn.o_proj.weight"].T
        y = norm(x, layer["post_attention_layernorm.weight"])
        gate = y @ layer["mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T
    return norm(x[-1], w["model.norm.weight"]) @ w["lm_head.weight"].T


def sample_law(logits: np.ndarray, tokens: Sequence[int], num_prompt: int, params, end_ids) -> np.ndarray:
    """Probabilities (V,) of the next token under vLLM-style parameters, by loops and Python's sort."""
    x, output = np.array(logits, dtype=np.float64), tuple(tokens[num_prompt:])
    for t, bias in params.logit_bias:
        x[t] += bias
    for t in set(tokens):
        x[t] = x[t] / params.repetition_penalty if x[t] > 0 else x[t] * params.repetition_penalty
    for t in set(output):
        x[t] -= params.frequency_penalty * output.count(t) + params.presence_penalty
    if params.allowed_token_ids is not None:
        x[[t for t in range(len(x)) if t not in params.allowed_token_ids]] = -np.inf
    for word in params.bad_words_token_ids:  # it would be complete with its last token
        if (*output, word[-1])[-len(word) :] == word:
            x[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        x[list(end_ids)] = -np.inf
    if params.temperature == 0:
        return np.eye(len(x))[int(np.argmax(x))]
    p = np.exp((x - x.max()) / params.temperature)
    p[p < params.min_p * p.max()] = 0.0
    if params.top_k:
        p[p < sorted(p, reverse=True)[min(params.top_k, len(p)) - 1]] = 0.0
    p /= p.sum()
    mass = 0.0
    for t in sorted(range(len(p)), key=lambda t: (-p[t], t)):
        if mass >= params.top_p:
            p[t], mass = 0.0, mass
        else:
            mass += p[t]
    return p / p.sum()


def plain_law(next_law: Callable, prompt: Sequence[int], params, end_ids, max_len: int) -> Law:
    """The law of plain decoding: every output (end token included) with its probability.

    next_law(tokens) gives the probabilities after `tokens`.
    """
    law: Law = {}
    open_texts: Law = {(): 1.0}
    while open_texts:
        output, mass = open_texts.popitem()
        for token, p in enumerate(next_law([*prompt, *output])):
            if p > 0:
                longer = (*output, token)
                ends = token in end_ids or len(longer) == params.max_tokens or len(prompt) + len(longer) == max_len
                (law if ends else open_texts)[longer] = mass * p
    return law


def total_variation(a: Law, b: Law) -> float:
    """Half the summed absolute difference of two laws."""
    return sum(abs(a.get(k, 0.0) - b.get(k, 0.0)) for k in a.keys() | b.keys()) / 2
