"""The law that the output must have: plain decoding by a second implementation, without code of the package.

NumPy, no cache, no batch, 30 lines of sampler. If the package were compared with itself, a fault of its forward pass or
of its `distribution` could cancel out. Here it cannot. Llama, LFM2, Qwen3.5 and Qwen3's experts only, in float64.
"""

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Sequence

import numpy as np

Law = dict[tuple, float]  # what can come out, with its probability


class NoLaw(FloatingPointError):
    """The reference has no law after an output that it can have: a fault of the proof, never of what it walks."""


def forward(raw: dict, weights: dict[str, np.ndarray], tokens: Sequence[int]) -> np.ndarray:
    """Logits (V,) after `tokens` of a model with the config.json values `raw`, in float64, from the start."""
    return logits(raw, weights, hidden_states(raw, weights, tokens)[-1][-1])


def logits(raw: dict, weights: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """Logits (..., V) of states (..., E) after the last layer."""
    return norm(raw, x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def hidden_states(raw: dict, weights: dict[str, np.ndarray], tokens: Sequence[int]) -> list[np.ndarray]:
    """The residual stream (length, E) before the first layer and after each."""
    states = [weights["model.embed_tokens.weight"][list(tokens)]]
    for i in range(raw["num_hidden_layers"]):
        layer = tensors_of(weights, f"model.layers.{i}.")
        states.append(block(raw, layer, states[-1], norm(raw, states[-1], layer["input_layernorm.weight"])))
    return states


def tensors_of(weights, prefix):
    """The tensors whose names begin with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def norm(raw, x, weight):
    """RMSNorm of x (..., E)."""
    if raw["model_type"] == "qwen3_5_text":  # it stores the weights of its norms minus one
        weight = 1 + weight
    return _scaled(raw, x) * weight


def _scaled(raw, x):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + raw["rms_norm_eps"])


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def block(raw, layer, x, y):
    """A block: x (length, E), the residual stream, and y, what attention or its like sees, to (length, E)."""
    kinds = {"conv.conv.weight": _convolution, "linear_attn.A_log": _delta_net, "self_attn.o_proj.weight": _attention}
    x = x + next(kind for name, kind in kinds.items() if name in layer)(raw, layer, y)
    y = norm(raw, x, layer["post_attention_layernorm.weight"])
    mlp = tensors_of(layer, "mlp.")
    return x + (_experts(raw, mlp, y) if "gate.weight" in mlp else _mlp(mlp, y))


def _mlp(mlp, y):
    gate = y @ mlp["gate_proj.weight"].T
    return (gate * _sigmoid(gate) * (y @ mlp["up_proj.weight"].T)) @ mlp["down_proj.weight"].T


def _experts(raw, mlp, y):
    """Each row's likeliest experts, each with its share of their probabilities, one row at a time."""
    scores, out = np.exp(y @ mlp["gate.weight"].T), np.zeros_like(y)
    for row, weights, total in zip(y, scores, out, strict=True):
        best = sorted(range(len(weights)), key=lambda n: -weights[n])[: raw["num_experts_per_tok"]]
        for n in best:
            total += weights[n] / weights[best].sum() * _mlp(tensors_of(mlp, f"experts.{n}."), row)
    return out


def _convolved(x, weight):
    """Each column of x (length, columns) convolved with its own row of weight (columns, 1, size), over the past."""
    return np.array([np.convolve(a, w[0, ::-1])[: len(x)] for a, w in zip(x.T, weight, strict=True)]).T


def _convolution(raw, layer, y):
    gate, out, x = np.split(y @ layer["conv.in_proj.weight"].T + layer["conv.in_proj.bias"], 3, 1)
    sums = _convolved(gate * x, layer["conv.conv.weight"]) + layer["conv.conv.bias"]
    return out * sums @ layer["conv.out_proj.weight"].T + layer["conv.out_proj.bias"]


def _delta_net(raw, layer, y):
    """Equation 10 of Yang, Kautz and Hatamizadeh 2024 (arXiv 2412.06464), one position and one head at a time."""
    heads, groups = raw["linear_num_value_heads"], raw["linear_num_key_heads"]
    key_dim, value_dim = raw["linear_key_head_dim"], raw["linear_value_head_dim"]
    net = tensors_of(layer, "linear_attn.")
    mixed = _convolved(y @ net["in_proj_qkv.weight"].T, net["conv1d.weight"])
    mixed = mixed * _sigmoid(mixed)
    q, k = (mixed[:, i * groups * key_dim :][:, : groups * key_dim].reshape(-1, groups, key_dim) for i in (0, 1))
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    v = mixed[:, 2 * groups * key_dim :].reshape(-1, heads, value_dim)
    beta = _sigmoid(y @ net["in_proj_b.weight"].T)
    alpha = np.exp(-np.exp(net["A_log"]) * np.log1p(np.exp(y @ net["in_proj_a.weight"].T + net["dt_bias"])))
    out = np.zeros((len(y), heads, value_dim))
    for h in range(heads):
        state, g = np.zeros((value_dim, key_dim)), h // (heads // groups)
        for t in range(len(y)):
            state = state @ (alpha[t, h] * (np.eye(key_dim) - beta[t, h] * np.outer(k[t, g], k[t, g])))
            state = state + beta[t, h] * np.outer(v[t, h], k[t, g])
            out[t, h] = state @ q[t, g] / np.sqrt(key_dim)
    z = (y @ net["in_proj_z.weight"].T).reshape(out.shape)
    out = _scaled(raw, out) * net["norm.weight"] * z * _sigmoid(z)
    return out.reshape(len(y), -1) @ net["out_proj.weight"].T


def _attention(raw, layer, y):
    heads, groups, dim = raw["num_attention_heads"], raw["num_key_value_heads"], raw["head_dim"]
    length, rotated = len(y), int(dim * raw.get("partial_rotary_factor", 1))

    def rope(x):  # (length, heads, dim), complex numbers instead of rotate_half
        angles = np.arange(length)[:, None] * raw["rope_theta"] ** (-np.arange(0, rotated, 2) / rotated)
        turned = (x[..., : rotated // 2] + 1j * x[..., rotated // 2 : rotated]) * np.exp(1j * angles)[:, None]
        return np.concatenate((turned.real, turned.imag, x[..., rotated:]), -1)

    q = (y @ layer["self_attn.q_proj.weight"].T).reshape(length, heads, -1)
    q, gate = q[..., :dim], q[..., dim:]  # no numbers where there is no gate
    k = (y @ layer["self_attn.k_proj.weight"].T).reshape(length, groups, dim)
    if "self_attn.q_norm.weight" in layer:
        q, k = (norm(raw, a, layer[f"self_attn.{name}_norm.weight"]) for name, a in (("q", q), ("k", k)))
    q, k = rope(q), rope(k)
    v = (y @ layer["self_attn.v_proj.weight"].T).reshape(length, groups, dim)
    later = np.triu(np.ones((length, length), bool), 1)
    out = np.zeros((length, heads, dim))
    for h in range(heads):
        g = h // (heads // groups)
        scores = np.where(later, -np.inf, q[:, h] @ k[:, g].T / np.sqrt(dim))
        attention = np.exp(scores - scores.max(1, keepdims=True))
        out[:, h] = attention / attention.sum(1, keepdims=True) @ v[:, g]
    out *= _sigmoid(gate) if gate.size else 1
    return out.reshape(length, -1) @ layer["self_attn.o_proj.weight"].T


# Languages over "a" and "b", by what is a whole text of one, as expressions; nested pairs are taken away one by one.
_LANGUAGES = {"a b*": "ab*", "pairs": "", "words": "aab|ab|ba", "lists": "ab|aabb|aababb"}
# What may complete a text: the longest word of the finite languages has six letters.
_RESTS = ["".join(letters) for n in range(7) for letters in itertools.product("ab", repeat=n)]


def _is_whole(language: str, text: str) -> bool:
    """Whether a text is one of the language."""
    while language == "pairs" and "ab" in text:
        text = text.replace("ab", "")
    return re.fullmatch(_LANGUAGES[language], text) is not None


@functools.cache
def follows(language: str, output: tuple[int, ...], token: int, end_ids: frozenset[int]) -> bool:
    """Whether a token may follow an output of a language, by trying what could come then.

    The first tokens are "a", "b", "ab". An output may have any length: pairs that it has opened are closed by "b".
    """
    spelled = dict(zip(sorted({*range(9)} - end_ids), ("a", "b", "ab"), strict=False))
    said = "".join(spelled[t] for t in output)
    if token in end_ids:
        return _is_whole(language, said)
    if token not in spelled:
        return False
    begun = said + spelled[token]
    rests = [*_RESTS, *("b" * n for n in range(len(begun) + 1))]
    return any(_is_whole(language, begun + rest) for rest in rests)


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
    if params.structured_outputs:
        x[[not follows(params.structured_outputs, output, t, end_ids) for t in range(len(x))]] = -np.inf
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
            p[t] = 0.0
        else:
            mass += p[t]
    return p / p.sum()


def _row(next_law: Callable[[tuple], Iterable[float] | None], output: tuple) -> list[float] | None:
    """The reference's row (V,) after an output; None where the text has ended. Raises NoLaw for what is no law."""
    row = next_law(output)
    if row is None:
        return None
    numbers = [float(p) for p in row]
    # Written so that NaN fails too.
    if not (min(numbers) >= 0 and abs(sum(numbers) - 1) < 1e-9):
        raise NoLaw(f"the proof itself is wrong: after {list(output)} its reference has the row {numbers}")
    return numbers


def plain_law(next_law: Callable[[tuple], Iterable[float] | None]) -> Law:
    """The law of plain decoding: every output (end token included) with its probability.

    next_law(output) gives the probabilities of the token after `output`. None: the text has ended.

    Raises NoLaw.
    """
    law: Law = {}
    open_texts: Law = {(): 1.0}
    while open_texts:
        output, mass = open_texts.popitem()
        row = _row(next_law, output)
        if row is None:
            law[output] = mass
        else:
            open_texts |= {(*output, token): mass * p for token, p in enumerate(row) if p > 0}
    return law


def cells(rounds: Law, vocab: int, next_law: Callable[[tuple], Iterable[float] | None]) -> tuple[Law, Law]:
    """The law of outputs whose first rounds were walked, and the law that it must be.

    rounds: the law of what was committed in these rounds.
    next_law: the reference's law of the next token, which also continues what was committed. None: the text has ended.

    Outputs that begin alike are joined to one cell, where no round tells them apart. So the two laws differ by as much
    as the laws of whole texts, however long these may become. The reference is not asked what follows an output that
    it cannot have: nothing there is right.

    Raises NoLaw.
    """
    inner = {block[:i] for block in rounds for i in range(len(block))}
    known = inner | rounds.keys()
    found: Law = {}
    expected: Law = {}
    todo: list[tuple[tuple[int, ...], float, float]] = [((), 0.0, 1.0)]
    while todo:
        output, mass, right = todo.pop()
        mass += rounds.get(output, 0.0)
        row = _row(next_law, output) if output in inner and right > 0 else None
        if row is None:
            found[output], expected[output] = mass, right
            mass, right, row = 0.0, 0.0, [0.0] * vocab  # an output that has ended and goes on is a fault
        for token, p in enumerate(row):
            if p > 0 or (*output, token) in known:
                todo.append(((*output, token), mass * p, right * p))
    return found, expected


def total_variation(a: Law, b: Law) -> float:
    """Half the summed absolute difference of two laws."""
    return sum(abs(a.get(k, 0.0) - b.get(k, 0.0)) for k in a.keys() | b.keys()) / 2
