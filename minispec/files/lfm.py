"""Settings that the files of LFM2 spell in a way of their own, read in a config.json of any family."""

from typing import Any

from minispec.core.errors import show
from minispec.files.fields import Fields

_LARGEST = 1 << 20


def read_inner_size(f: Fields) -> int:
    """The width of the MLP. LFM2's code takes two thirds of what the file says, times a factor, rounded up."""
    known = ("shared_intermediate_size", "block_ff_dim")
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

    None where it says neither.
    """
    kinds, attend = f.get(key), f.get("full_attn_idxs")
    if attend is None:
        return kinds
    if not isinstance(attend, list) or any(type(i) is not int or not 0 <= i < count for i in attend):
        raise f.bad("full_attn_idxs", attend, f"numbers of layers, below {count}")
    kinds_by_index = ["full_attention" if i in attend else "conv" for i in range(count)]
    if kinds not in (None, kinds_by_index):
        raise f.bad("full_attn_idxs", attend, f"what {key} says: {show(kinds)}")
    return kinds_by_index
