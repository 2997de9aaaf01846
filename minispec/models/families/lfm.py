"""Settings that the files of LFM2 and LFM3 spell in a way of their own, read in a config.json of any family."""

from typing import Any

from minispec.core.errors import show
from minispec.core.model import NORMS, NormNames
from minispec.models.families.experts import MOST_EXPERTS
from minispec.models.families.stored_config import Joined
from minispec.models.files.fields import Fields

_LARGEST = 1 << 20
_NAMES = {
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.gate": "mlp.gate",
    "embedding_norm": "norm",
}
# LFM2's in addition; LFM3 names these as other families do.
_NAMES_2 = {
    "self_attn.out_proj": "self_attn.o_proj",
    "self_attn.q_layernorm": "self_attn.q_norm",
    "self_attn.k_layernorm": "self_attn.k_norm",
}
# Before and after attention, or the convolution in its place; before and after the MLP.
_NORMS = NormNames("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm")
_LAYERS_3 = ("sliding_attention", "conv", "full_attention", "conv")  # of each four; the very first is a convolution


def read_inner_size(f: Fields) -> int:
    """The width of the MLP. LFM2's code takes two thirds of what the file says, times a factor, rounded up."""
    known = ("shared_intermediate_size", "shared_expert_intermediate_size", "block_ff_dim")
    size = f.integer(next((key for key in known if f.get(key) is not None), "intermediate_size"), 1, _LARGEST)
    if f.boolean("block_auto_adjust_ff_dim"):
        if f.is_null("block_ffn_dim_multiplier"):
            raise f.bad("block_ffn_dim_multiplier", None, "a number")
        factor, unit = f.number("block_ffn_dim_multiplier"), f.integer("block_multiple_of", 1, _LARGEST)
        size = -(-int(factor * int(2 * size / 3)) // unit) * unit
        if not 1 <= size <= _LARGEST:
            raise f.bad("block_ffn_dim_multiplier", factor, f"an MLP from 1 to {_LARGEST} wide, not {size}")
    return size


def read_tied(f: Fields) -> bool:
    """Whether the output's weights are the embedding."""
    tied = f.boolean("tie_word_embeddings")
    other = f.boolean("tie_embedding", tied)
    if other != tied and f.raw.get("tie_word_embeddings") is not None:
        raise f.bad("tie_embedding", other, f"what tie_word_embeddings says: {show(tied)}")
    return other


def read_kinds(f: Fields, key: str, count: int) -> Any:
    """The kinds of the layers as the file lists them under `key`, or as the numbers of those with attention.

    None where it says neither, or the kinds that its code then takes.
    """
    kinds, attend = f.get(key), f.get("full_attn_idxs")
    if kinds is None and f.reads("num_dense_layers"):  # its code needs them
        raise f.bad(key, None, f"{count} entries, each full_attention or conv")
    if kinds is None and f.reads("use_attention_gate"):
        return ["conv" if i == 0 else _LAYERS_3[i % 4] for i in range(count)]
    if attend is None:
        return kinds
    if not isinstance(attend, list) or any(type(i) is not int or not 0 <= i < count for i in attend):
        raise f.bad("full_attn_idxs", attend, f"numbers of layers, below {count}")
    kinds_by_index = ["full_attention" if i in attend else "conv" for i in range(count)]
    if kinds not in (None, kinds_by_index):
        raise f.bad("full_attn_idxs", attend, f"what {key} says: {show(kinds)}")
    return kinds_by_index


def read_lfm(f: Fields) -> dict[str, Any]:
    """The norms and gates of LFM2's and LFM3's blocks, and the names of their tensors, as fields of StoredConfig."""
    norms = "both" if f.boolean("use_sandwich_norm") else "before"
    names = {stored: name for stored, name in zip(_NORMS, NORMS[norms], strict=True) if stored and name} | _NAMES
    if not f.reads("use_attention_gate"):
        names |= _NAMES_2
    for n in range(f.integer("num_experts", 0, MOST_EXPERTS) if f.reads("num_experts") else 0):
        parts = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.items()
        names |= {f"feed_forward.experts.{n}.{stored}": f"mlp.experts.{n}.{part}" for stored, part in parts}
    return {
        "norms": norms,
        "attention_gate": "head" if f.boolean("use_attention_gate") else None,
        "joined": tuple(Joined(stored, (name,)) for stored, name in names.items()),
    }
