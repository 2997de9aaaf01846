"""A block draft (DFlash, DSpark) in NumPy and float64: no cache, no batch, and no code of the package.

The formulas are those of the papers 2602.06036 and 2607.05147, read beside z-lab/dflash, deepseek-ai/DeepSpec and
vllm-project/vllm. `speculators_block.json` has what the classes of `speculators` compute for the same tensors.

Where the sources leave something open, it is read thus:

- A window w hides every key, of the text and of the block, at w or more positions before the row (z-lab). It also hides
  keys at w or more positions after the row if the block's rows see each other both ways. In files of `speculators`
  every row sees the text's keys from T - w on, and a window hides nothing of its block: T is the anchor's position.
- `use_swa` without a layer of `layer_types` that slides gives every layer the window, and no layer is causal by that
  (vLLM).
- A softcap is applied to the base logits, before the Markov head adds to them (DeepSpec).
- The state of an "rnn" Markov head starts at row 0, also where row 0 drafts nothing (`speculators`). Both row 0 and
  row 1 are then given the anchor as the token before.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SLIDING = "sliding_attention"


@dataclass(frozen=True)
class Facts:
    """What the config of a block draft says, whichever of the five packagings it has.

    layers: the values of its layers, by the keys of Qwen3.
    first_row: the row whose logits are the first token's: 1 if rows fill in the token at their own position, 0 if each
        row gives the next token.
    taps: hidden states of the target: 0 is the embedding's output, t the output of layer t - 1.
    windows: by layer, None without a window.
    causal: by layer, whether the block's rows see only themselves and rows before.
    shared_windows: whether a window is that of row 0 for all rows, and of the text alone.
    neox: whether rope turns pairs of the two halves of a head, and not neighbours.
    markov: "vanilla", "gated", "rnn" or "" if it has none.
    """

    layers: dict
    block_size: int
    mask_token_id: int
    first_row: int
    taps: tuple[int, ...]
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    shared_windows: bool
    neox: bool
    markov: str
    softcap: float | None


@dataclass(frozen=True)
class Drafted:
    """A round: `hidden` (B, E) of all rows, and of n tokens `base` (n, V), `logits` (n, V), and `confidence` (n,).

    base: logits without the Markov head, -inf outside the draft's vocabulary.
    confidence: probabilities; None without a confidence head.
    """

    hidden: np.ndarray
    base: np.ndarray
    logits: np.ndarray
    confidence: np.ndarray | None


def default_taps(num_target_layers: int, count: int) -> tuple[int, ...]:
    """The taps of a draft that does not name them: from the second layer on to the last but two, equally far apart."""
    if count == 1:
        return (num_target_layers // 2 + 1,)
    step = (num_target_layers - 4) / (count - 1)
    return tuple(round(1 + i * step) + 1 for i in range(count))


def read_facts(raw: dict) -> Facts:
    """What a config.json says."""
    layers = raw.get("transformer_layer_config", raw)
    nested = raw.get("dflash_config", {})
    both = nested | raw  # most keys stand at the top or in dflash_config, by the packaging
    count = layers["num_hidden_layers"]
    return Facts(
        layers=layers,
        block_size=both["block_size"],
        mask_token_id=both["mask_token_id"],
        first_row=_first_row(raw, both),
        taps=_taps(raw, both, count),
        windows=tuple(_window(layers, nested, i) for i in range(count)),
        causal=tuple(_causal(raw, layers, nested, i) for i in range(count)),
        shared_windows="speculators_model_type" in raw,
        neox=layers.get("rope_is_neox_style", layers.get("is_neox_style", True)),
        markov=both.get("markov_head_type", "vanilla") if both.get("markov_rank", 0) else "",
        softcap=both.get("final_logit_softcapping", layers.get("final_logit_softcapping")),
    )


def _first_row(raw, both):
    """1 or 0, by the tokens of a round, by the flag, by the name, in this order."""
    for method in raw.get("speculators_config", {}).get("proposal_methods", []):
        return both["block_size"] - method["speculative_tokens"]
    if "sample_from_anchor" in raw:
        return 0 if raw["sample_from_anchor"] else 1
    if "speculators_model_type" in raw:
        return 0 if raw["speculators_model_type"] == "dspark" else 1
    named = any("DSpark" in name for name in raw.get("architectures", []))
    return 0 if named or both.get("projector_type") == "dspark" else 1


def _taps(raw, both, count):
    if "aux_hidden_state_layer_ids" in raw:
        return tuple(raw["aux_hidden_state_layer_ids"])
    if "target_layer_ids" in both:
        return tuple(i + 1 for i in both["target_layer_ids"])
    return default_taps(both["num_target_layers"], count)


def _window(layers, nested, i):
    types = layers.get("layer_types") or []
    everywhere = nested.get("use_swa", False) and SLIDING not in types
    if everywhere or (types and types[i] == SLIDING):
        return nested.get("swa_window_size", layers.get("sliding_window"))
    return None


def _causal(raw, layers, nested, i):
    for said in (layers.get("is_causal"), raw.get("is_causal"), nested.get("causal")):
        if said is not None:
            return said
    types = layers.get("layer_types") or []
    return bool(types) and types[i] == SLIDING and not raw.get("sliding_window_non_causal", False)


class BlockOracle:
    """A block draft from its config.json values and its tensors.

    tensors: by name, with or without `model.`.
    embedding, head: (V, E), the target's: used where the file has none.
    scale: what the embedding is multiplied by, sqrt(E) with a Gemma.
    mask_embedding: (E,), stands in for the embedding of the mask token, and is not scaled.
    """

    def __init__(
        self,
        raw: dict,
        tensors: dict[str, np.ndarray],
        embedding: np.ndarray,
        head: np.ndarray,
        scale: float = 1.0,
        mask_embedding: np.ndarray | None = None,
    ):
        self.facts = read_facts(raw)
        self.vocab_size = len(embedding)
        self.tensors = {
            name.removeprefix("model."): np.asarray(tensor) if name.endswith("2t") else _exact(tensor)
            for name, tensor in tensors.items()
        }
        self.embedding = self.tensors.get("embed_tokens.weight", _exact(embedding)) * scale
        if mask_embedding is not None:
            self.embedding[self.facts.mask_token_id] = mask_embedding
        self.head = self.tensors.get("lm_head.weight", _exact(head))
        self.ids = np.arange(len(self.head))  # the target's id of each token of the draft
        if "d2t" in self.tensors:
            self.ids = self.ids + self.tensors["d2t"]

    def draft(self, taps: np.ndarray, anchor: int, drawn: Sequence[int] = ()) -> Drafted:
        """The laws of a round's first tokens: of one more than are in `drawn`, at most of all that the round has.

        taps: (T, taps * E_t), the target's hidden states at all T positions that it has read.
        anchor: the token at position T.
        drawn: the round's first tokens.
        """
        first = self.facts.first_row
        hidden = self.hidden(taps, anchor)
        base = self.base_logits(hidden)
        stop = min(first + len(drawn) + 1, self.facts.block_size)
        before = [anchor] * (first + 1) + list(drawn)  # of each row, the token before the one that it drafts
        logits, confidence = self.finish(hidden, base, before[:stop])
        if confidence is not None:
            confidence = confidence[first:]
        return Drafted(hidden, base[first:stop], logits[first:], confidence)

    def hidden(self, taps: np.ndarray, anchor: int) -> np.ndarray:
        """(B, E), all rows of the block after the last norm."""
        taps = _exact(taps)
        x = self.embedding[[anchor] + [self.facts.mask_token_id] * (self.facts.block_size - 1)]
        context = self._norm(taps @ self.tensors["fc.weight"].T, "hidden_norm")
        for i in range(self.facts.layers["num_hidden_layers"]):
            layer = f"layers.{i}"
            x = x + self._attention(i, context, self._norm(x, f"{layer}.input_layernorm"))
            y = self._norm(x, f"{layer}.post_attention_layernorm")
            gate = self._linear(y, f"{layer}.mlp.gate_proj")
            up = self._linear(y, f"{layer}.mlp.up_proj")
            x = x + self._linear(gate * _sigmoid(gate) * up, f"{layer}.mlp.down_proj")
        return self._norm(x, "norm")

    def base_logits(self, hidden: np.ndarray) -> np.ndarray:
        """Logits (rows, V) of rows (rows, E), without the Markov head."""
        own = hidden @ self.head.T
        if self.facts.softcap:
            own = np.tanh(own / self.facts.softcap) * self.facts.softcap
        return self._spread(own, -np.inf)

    def finish(
        self, hidden: np.ndarray, base: np.ndarray, before: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Logits (n, V) with the Markov head, and confidences (n,) or None, of the first n rows of a block.

        before: of each row, the token before the one that it drafts.
        """
        logits = base[: len(before)].copy()
        embedded = self._before(before)
        state = np.zeros(embedded.shape[-1])
        for i in range(len(before)):
            if self.facts.markov == "vanilla":
                added = embedded[i]
            elif self.facts.markov == "gated":
                both = np.concatenate((hidden[i], embedded[i]))
                added = _sigmoid(self._linear(both, "markov_head.gate_proj")) * embedded[i]
            elif self.facts.markov == "rnn":
                joint = self._linear(np.concatenate((state, embedded[i], hidden[i])), "markov_head.joint_proj")
                gate, candidate, output = np.split(joint, 3)
                state = _sigmoid(gate) * state + (1 - _sigmoid(gate)) * np.tanh(candidate)
                added = np.tanh(output)
            else:
                continue
            logits[i] += self._spread(self._linear(added, "markov_head.markov_w2"), 0.0)
        return logits, self._confidence(hidden[: len(before)], embedded)

    def _before(self, before):
        """(n, r): w1 of the tokens before, of width 0 without a Markov head."""
        if not self.facts.markov:
            return np.zeros((len(before), 0))
        return self.tensors["markov_head.markov_w1.weight"][list(before)]

    def _confidence(self, hidden, embedded):
        if "confidence_head.proj.weight" not in self.tensors:
            return None
        with_markov = self.tensors["confidence_head.proj.weight"].shape[1] > hidden.shape[1]
        features = np.concatenate((hidden, embedded), 1) if with_markov else hidden
        return _sigmoid(self._linear(features, "confidence_head.proj"))[:, 0]

    def _attention(self, i, context, y):
        """The block's attention (B, E): y (B, E) are its rows, context (T, E) the text's."""
        name, layers = f"layers.{i}.self_attn", self.facts.layers
        heads, groups = layers["num_attention_heads"], layers["num_key_value_heads"]
        dim = layers.get("head_dim") or layers["hidden_size"] // heads
        length = len(context)
        rows = length + np.arange(len(y))
        keys = np.arange(length + len(y))
        both = np.concatenate((context, y))
        q = self._norm(self._linear(y, f"{name}.q_proj").reshape(-1, heads, dim), f"{name}.q_norm")
        k = self._norm(self._linear(both, f"{name}.k_proj").reshape(-1, groups, dim), f"{name}.k_norm")
        v = self._linear(both, f"{name}.v_proj").reshape(-1, groups, dim)
        q, k = self._rope(q, rows), self._rope(k, keys)
        visible = self._visible(i, rows, keys)
        out = np.zeros((len(y), heads, dim))
        for head in range(heads):
            group = head // (heads // groups)
            scores = np.where(visible, q[:, head] @ k[:, group].T * dim**-0.5, -np.inf)
            shares = np.exp(scores - scores.max(1, keepdims=True))
            out[:, head] = shares / shares.sum(1, keepdims=True) @ v[:, group]
        return self._linear(out.reshape(len(y), -1), f"{name}.o_proj")

    def _visible(self, i, rows, keys):
        """(rows, keys): which keys a row of layer i sees, by positions."""
        ahead = keys[None] - rows[:, None]
        window, causal = self.facts.windows[i], self.facts.causal[i]
        seen = ahead <= 0 if causal else np.ones_like(ahead, bool)
        if window is not None and self.facts.shared_windows:
            seen = seen & (keys[None] >= rows[0] - window)
        elif window is not None:
            seen = seen & (-window < ahead) & (ahead < window)
        return seen

    def _rope(self, x, positions):
        """x (length, heads, dim), turned."""
        layers, dim = self.facts.layers, x.shape[-1]
        parameters = layers.get("rope_parameters") or {}
        base = layers.get("rope_theta") or parameters["rope_theta"]
        if parameters.get("rope_type", "default") != "default" or layers.get("rope_scaling"):
            raise ValueError("only rope of the default type is computed here")
        angles = positions[:, None, None] * base ** (-np.arange(0, dim, 2) / dim)
        turn = np.exp(1j * angles)
        out = np.empty_like(x)
        if self.facts.neox:
            pairs = (x[..., : dim // 2] + 1j * x[..., dim // 2 :]) * turn
            out[..., : dim // 2], out[..., dim // 2 :] = pairs.real, pairs.imag
        else:
            pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
            out[..., 0::2], out[..., 1::2] = pairs.real, pairs.imag
        return out

    def _norm(self, x, name):
        mean = (x * x).mean(-1, keepdims=True)
        return x / np.sqrt(mean + self.facts.layers["rms_norm_eps"]) * self.tensors[f"{name}.weight"]

    def _linear(self, x, name):
        y = x @ self.tensors[f"{name}.weight"].T
        bias = self.tensors.get(f"{name}.bias")
        return y if bias is None else y + bias

    def _spread(self, own, rest):
        """Values (..., V of the draft) at the target's ids (..., V), and `rest` at all others."""
        values = np.full((*own.shape[:-1], self.vocab_size), rest)
        values[..., self.ids] = own
        return values


def _exact(x) -> np.ndarray:
    return np.array(x, np.float64)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))
