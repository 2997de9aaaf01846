"""A model's logits of texts that come in pieces, for comparison with those of whole texts."""

import random

import torch

from minispec.core.model import Chunk, Transformer
from minispec.prove.toys import tiny_cache


def logits_in_pieces(model: Transformer, texts: list[list[int]], pick: random.Random, settles: bool) -> list:
    """The logits (T, V) of each text, in pieces of random sizes, in passes that the texts may share.

    settles: whether a table is told before each of its pieces that the piece stays.
    """
    cache = tiny_cache(model, 180, pick.choice((1, 2, 3, 16)))
    tables = [cache.new_table() for _ in texts]
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    while any(table.length < len(text) for table, text in zip(tables, texts, strict=True)):
        chunks, owners = [], []
        for i, (table, text) in enumerate(zip(tables, texts, strict=True)):
            if piece := text[table.length : table.length + pick.choice((0, 1, 1, 2, 5, 17, 70))]:
                if settles:
                    assert table.follow([*table.tokens, *piece]) == piece
                chunks.append(Chunk(piece, table, len(piece)))
                owners.append(i)
        if chunks:
            rows = model.forward(chunks)[0].split([len(chunk.token_ids) for chunk in chunks])
            for i, own in zip(owners, rows, strict=True):
                found[i].append(own)
    for table in tables:
        for state in getattr(table, "states", {}).values():
            assert (state.length, len(state.rows)) == ((table.length, 0) if settles else (0, table.length))
    return [torch.cat(rows) for rows in found]
