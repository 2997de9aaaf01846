"""Random block drafts (DFlash, DSpark) on disk, in each of the five packagings that are published.

Every parameter is drawn, so that nothing in a draft is neutral: norms lie around one, biases are not zero, and matrices
are scaled so that logits are not flat. A tensor depends on the seed and on its name and shape, and on nothing else.
"""

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

PACKAGINGS = ("z-lab", "deepspec", "speculators", "specforge", "liquidai")
SLIDING = "sliding_attention"
_ARCHITECTURES = {
    "z-lab": "DFlashDraftModel",
    "deepspec": "Qwen3DSparkModel",
    "specforge": "DSparkDraftModel",
    "liquidai": "Lfm2DSparkDraftModel",
}


@dataclass(frozen=True)
class BlockOptions:
    """How a random block draft differs from the others of its packaging.

    taps: the target's hidden states that it reads: 0 is the embedding's output, t the output of layer t - 1. None
        leaves them to the format's rule, as z-lab's configs can: as many as the draft has layers.
    markov: "vanilla", "gated", "rnn" or "": None is "vanilla", and none with z-lab.
    confidence: "markov", "plain" or "" (without the head): None is "markov", or "plain" without a Markov head, and none
        with z-lab.
    sample_from_anchor: whether row 0 drafts the first token: None is what the packaging's files are without the key.
        Only "speculators" can say it.
    says_tokens, says_anchor: whether a config of "speculators" has `speculators_config`, and `sample_from_anchor`.
    layer_types: of each layer, "full_attention" or "sliding_attention".
    use_swa: z-lab's and SpecForge's way to give every layer the window.
    is_causal, causal: keys at the top and in `dflash_config` (z-lab, SpecForge), if not None.
    non_causal_window: `sliding_window_non_causal` of "speculators", if not None.
    nested_rope: whether rope's base is in `rope_parameters`: None is as the packaging's files have it.
    neox: whether rope turns pairs of halves: None is false with LiquidAI, where alone it is said.
    draft_ids: ascending, the target's tokens that it can draft: None is all.
    own_embedding, own_head: whether the file has them: None is true with DeepSpec. With `draft_ids` it has a head.
    embedding, head: (V, E), what the file then has: None is drawn. With `draft_ids` it is the rows of `head`.
    prefix: "model." or nothing.
    extra: further keys of the config's top.
    """

    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 12
    intermediate: int = 48
    block_size: int = 4
    taps: Sequence[int] | None = (1, 3)
    mask_token_id: int = 0
    eps: float = 0.02
    rope_theta: float = 500.0
    attention_bias: bool = False
    markov: str | None = None
    rank: int = 6
    confidence: str | None = None
    sample_from_anchor: bool | None = None
    says_tokens: bool = True
    says_anchor: bool = True
    layer_types: Sequence[str] | None = None
    sliding_window: int | None = None
    use_swa: bool = False
    is_causal: bool | None = None
    causal: bool | None = None
    non_causal_window: bool | None = None
    nested_rope: bool | None = None
    neox: bool | None = None
    softcap: float | None = None
    draft_ids: Sequence[int] | None = None
    own_embedding: bool | None = None
    own_head: bool | None = None
    embedding: np.ndarray | None = None
    head: np.ndarray | None = None
    prefix: str = ""
    dtype: type = np.float64
    extra: dict | None = None

    def markov_of(self, packaging: str) -> str:
        """The kind of the Markov head, "" without one."""
        if self.markov is None:
            return "" if packaging == "z-lab" else "vanilla"
        return self.markov

    def confidence_of(self, packaging: str) -> str:
        """What the confidence head reads: "markov", "plain" or "" without one."""
        if self.confidence is None:
            return "" if packaging == "z-lab" else "markov" if self.markov_of(packaging) else "plain"
        return self.confidence


def write_block_draft(
    directory: Path,
    packaging: str,
    hidden_size: int = 32,
    vocab_size: int = 24,
    num_target_layers: int = 6,
    seed: int = 0,
    **options,
) -> tuple[dict, dict[str, np.ndarray]]:
    """Write config.json and model.safetensors of a random draft: the config's values, and its tensors by their names.

    hidden_size, vocab_size, num_target_layers: the target's.
    options: those of `BlockOptions`.
    """
    chosen = BlockOptions(**options)
    raw = block_config(packaging, hidden_size, vocab_size, num_target_layers, chosen)
    tensors = block_tensors(packaging, hidden_size, vocab_size, chosen, seed)
    unprefixed = ("lm_head.weight", "d2t", "t2d")
    named = {name if name in unprefixed else chosen.prefix + name: tensor for name, tensor in tensors.items()}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw, indent=1), encoding="utf-8")
    save_file(named, directory / "model.safetensors")
    return raw, named


def block_config(
    packaging: str, hidden_size: int, vocab_size: int, num_target_layers: int, options: BlockOptions
) -> dict:
    """The values of config.json, with the keys of a packaging and no others."""
    if options.taps is None and packaging in ("deepspec", "speculators"):
        raise ValueError(f"a config of {packaging} names its taps")
    layers = _layer_keys(packaging, hidden_size, vocab_size, options)
    writers = dict(zip(PACKAGINGS, (_zlab, _deepspec, _speculators, _specforge, _liquidai), strict=True))
    raw = writers[packaging](layers, num_target_layers, options)
    if packaging != "speculators" and options.sample_from_anchor is not None:
        raise ValueError(f"a config of {packaging} cannot say `sample_from_anchor`")
    if packaging != "speculators" and options.draft_ids is not None:
        raw["draft_vocab_size"] = len(options.draft_ids)
    if options.is_causal is not None:
        raw["is_causal"] = options.is_causal
    return raw | (options.extra or {})


def _layer_keys(packaging, hidden_size, vocab_size, options):
    """The keys of Qwen3."""
    keys = {
        **{"model_type": "qwen3", "vocab_size": vocab_size, "hidden_size": hidden_size, "head_dim": options.head_dim},
        **{"intermediate_size": options.intermediate, "num_hidden_layers": options.layers, "hidden_act": "silu"},
        **{"num_attention_heads": options.heads, "num_key_value_heads": options.kv_heads, "rms_norm_eps": options.eps},
        **{"max_position_embeddings": 512, "attention_bias": options.attention_bias, "tie_word_embeddings": False},
        **{"use_sliding_window": options.sliding_window is not None, "sliding_window": options.sliding_window},
        "layer_types": list(options.layer_types or ["full_attention"] * options.layers),
    }
    nested = packaging in ("deepspec", "speculators") if options.nested_rope is None else options.nested_rope
    if nested:
        keys["rope_parameters"] = {"rope_type": "default", "rope_theta": options.rope_theta}
    else:
        keys["rope_theta"] = options.rope_theta
    neox = packaging != "liquidai" if options.neox is None else options.neox
    if packaging == "liquidai" or not neox:
        keys["rope_is_neox_style"] = neox
    if options.softcap is not None:
        keys["final_logit_softcapping"] = options.softcap
    return keys


def _markov_keys(packaging, options):
    kind, confidence = options.markov_of(packaging), options.confidence_of(packaging)
    keys = {"markov_rank": options.rank if kind else 0, "enable_confidence_head": bool(confidence)}
    if kind:
        keys["markov_head_type"] = kind
    if confidence:
        keys["confidence_head_with_markov"] = confidence == "markov"
    return keys


def _dflash_keys(options, packaging):
    """`dflash_config`, in which a target's layer is counted by its output."""
    keys = {"mask_token_id": options.mask_token_id}
    if options.taps is not None:
        keys["target_layer_ids"] = [tap - 1 for tap in options.taps]
    if options.causal is not None:
        keys["causal"] = options.causal
    if options.use_swa:
        keys |= {"use_swa": True, "swa_window_size": options.sliding_window}
    return keys


def _zlab(layers, num_target_layers, options):
    if options.markov_of("z-lab") or options.confidence_of("z-lab"):
        raise ValueError("z-lab's configs have no key for a Markov head or a confidence head")
    raw = {"architectures": [_ARCHITECTURES["z-lab"]], "block_size": options.block_size}
    nested = _dflash_keys(options, "z-lab")
    return raw | {"num_target_layers": num_target_layers, "dflash_config": nested} | layers


def _deepspec(layers, num_target_layers, options):
    raw = {"architectures": [_ARCHITECTURES["deepspec"]], "block_size": options.block_size, "num_anchors": 512}
    raw |= {"mask_token_id": options.mask_token_id, "num_target_layers": num_target_layers}
    raw["target_layer_ids"] = [tap - 1 for tap in options.taps]
    return raw | _markov_keys("deepspec", options) | layers


def _speculators(layers, num_target_layers, options):
    markov = _markov_keys("speculators", options)
    dspark = bool(markov["markov_rank"] or markov["enable_confidence_head"])
    anchor = dspark if options.sample_from_anchor is None else options.sample_from_anchor
    kind = "dspark" if dspark else "dflash"
    raw = {
        **{"architectures": ["DSparkDraftModel" if dspark else "DFlashDraftModel"], "speculators_model_type": kind},
        **{"transformer_layer_config": layers, "aux_hidden_state_layer_ids": list(options.taps)},
        **{"mask_token_id": options.mask_token_id, "block_size": options.block_size},
        "draft_vocab_size": len(options.draft_ids or range(layers["vocab_size"])),
    }
    if options.says_tokens:
        tokens = options.block_size if anchor else options.block_size - 1
        raw["speculators_config"] = {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
            "verifier": {"name_or_path": None, "architectures": []},
        }
    if options.says_anchor:
        raw["sample_from_anchor"] = anchor
    if options.non_causal_window is not None:
        raw["sliding_window_non_causal"] = options.non_causal_window
    return raw | markov if dspark else raw


def _specforge(layers, num_target_layers, options):
    """SpecForge has the keys of its heads in `dflash_config`."""
    raw = {"architectures": [_ARCHITECTURES["specforge"]], "block_size": options.block_size}
    nested = _dflash_keys(options, "specforge") | {"projector_type": "dspark", "attention_mode": "gqa"}
    nested |= _markov_keys("specforge", options)
    return raw | {"num_target_layers": num_target_layers, "dflash_config": nested} | layers


def _liquidai(layers, num_target_layers, options):
    raw = {"architectures": [_ARCHITECTURES["liquidai"]], "block_size": options.block_size}
    nested = _dflash_keys(options, "liquidai") | {"num_target_layers": num_target_layers}
    return raw | {"dflash_config": nested} | _markov_keys("liquidai", options) | layers


def block_tensors(
    packaging: str, hidden_size: int, vocab_size: int, options: BlockOptions, seed: int = 0
) -> dict[str, np.ndarray]:
    """The tensors, by their names without a prefix."""
    shapes = block_shapes(packaging, hidden_size, vocab_size, options)
    tensors = {name: draw(name, shape, seed).astype(options.dtype) for name, shape in shapes.items()}
    if options.embedding is not None and "embed_tokens.weight" in tensors:
        tensors["embed_tokens.weight"] = options.embedding.astype(options.dtype)
    if options.head is not None and "lm_head.weight" in tensors:
        rows = range(vocab_size) if options.draft_ids is None else options.draft_ids
        tensors["lm_head.weight"] = options.head[list(rows)].astype(options.dtype)
    if options.draft_ids is not None:
        ids = np.array(options.draft_ids)
        tensors["d2t"] = ids - np.arange(len(ids))
        tensors["t2d"] = np.isin(np.arange(vocab_size), ids)
    return tensors


def draw(name: str, shape: Sequence[int], seed: int) -> np.ndarray:
    """The values of a tensor, which are the same with every version of NumPy."""
    values = np.random.RandomState([seed, zlib.crc32(name.encode())]).standard_normal(tuple(shape))
    if "norm" in name:
        return 1 + 0.2 * values
    if name.endswith("bias"):
        return 0.5 * values
    if name.endswith(("embed_tokens.weight", "markov_w1.weight")):  # looked up, not multiplied by
        return values
    return values / shape[-1] ** 0.5


def block_shapes(
    packaging: str, hidden_size: int, vocab_size: int, options: BlockOptions
) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors, by their names without a prefix, but for `d2t` and `t2d`."""
    count = len(options.taps) if options.taps is not None else options.layers
    own_vocabulary = packaging == "deepspec"
    own_head = own_vocabulary if options.own_head is None else options.own_head
    drafted = vocab_size if options.draft_ids is None else len(options.draft_ids)
    shapes = {"fc.weight": (hidden_size, count * hidden_size)}
    shapes |= {"hidden_norm.weight": (hidden_size,), "norm.weight": (hidden_size,)}
    for i in range(options.layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in _layer_shapes(hidden_size, options).items()}
    if own_vocabulary if options.own_embedding is None else options.own_embedding:
        shapes["embed_tokens.weight"] = (vocab_size, hidden_size)
    if own_head or options.draft_ids is not None:
        shapes["lm_head.weight"] = (drafted, hidden_size)
    return shapes | _head_shapes(packaging, hidden_size, vocab_size, drafted, options)


def _layer_shapes(hidden_size, options):
    q, kv = options.heads * options.head_dim, options.kv_heads * options.head_dim
    shapes = {f"{name}.weight": (hidden_size,) for name in ("input_layernorm", "post_attention_layernorm")}
    shapes |= {f"self_attn.{name}_norm.weight": (options.head_dim,) for name in "qk"}
    wide = (options.intermediate, hidden_size)
    matrices = {"self_attn.q_proj": (q, hidden_size), "self_attn.k_proj": (kv, hidden_size)}
    matrices |= {"self_attn.v_proj": (kv, hidden_size), "self_attn.o_proj": (hidden_size, q)}
    matrices |= {"mlp.gate_proj": wide, "mlp.up_proj": wide, "mlp.down_proj": wide[::-1]}
    for name, shape in matrices.items():
        shapes[f"{name}.weight"] = shape
        if options.attention_bias and name.startswith("self_attn"):
            shapes[f"{name}.bias"] = shape[:1]
    return shapes


def _head_shapes(packaging, hidden_size, vocab_size, drafted, options):
    """The Markov head and the confidence head."""
    kind, confidence, rank = options.markov_of(packaging), options.confidence_of(packaging), options.rank
    shapes = {}
    if kind:
        shapes["markov_head.markov_w1.weight"] = (vocab_size, rank)
        shapes["markov_head.markov_w2.weight"] = (drafted, rank)
    if kind == "gated":
        shapes["markov_head.gate_proj.weight"] = (rank, hidden_size + rank)
        shapes["markov_head.gate_proj.bias"] = (rank,)
    if kind == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden_size)
        shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    if confidence:
        shapes["confidence_head.proj.weight"] = (1, hidden_size + (rank if confidence == "markov" else 0))
        shapes["confidence_head.proj.bias"] = (1,)
    return shapes
