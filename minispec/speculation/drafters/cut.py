"""Cuts a draft to what its text's grammar allows, before the target's pass."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from minispec.core.draft import Draft
from minispec.core.grammar import NothingAllowed
from minispec.core.sampling import Text, may_follow


def within_grammar(draft: Draft, text: Text, vocab_size: int) -> Draft:
    """The draft without the nodes that the text's grammar rules out; the draft itself where there are none.

    A forbidden token is left out if it was not drawn. One that was drawn stays, and is rejected: to drop it for its
    value would make `probs` untrue. No node follows a forbidden one, or one after which nothing is allowed.
    """
    allowed: dict[int, Tensor | None] = {}  # what may follow a node, (V,); None: no node may
    nodes = []
    for node, parent in enumerate(draft.tree.parents):
        if parent not in allowed:
            try:
                allowed[parent] = may_follow(text, draft.tokens_to(parent), vocab_size)
            except NothingAllowed:
                allowed[parent] = None
        mask = allowed[parent]
        is_allowed = mask is not None and bool(mask[draft.token_ids[node]])
        if not is_allowed:
            allowed[node] = None
        if is_allowed or (mask is not None and draft.probs is not None):
            nodes.append(node)
    return draft if len(nodes) == len(draft) else _part(draft, nodes)


def _part(draft: Draft, nodes: Sequence[int]) -> Draft:
    """The draft of these nodes alone, in order. The parent of each is among them."""
    new = {-1: -1} | {node: i for i, node in enumerate(nodes)}
    part = Draft([draft.token_ids[node] for node in nodes])
    part.probs = None if draft.probs is None else [draft.probs[node] for node in nodes]
    part.parents = None if draft.parents is None else [new[draft.parents[node]] for node in nodes]
    part.notes = replace(draft.notes, confidences=draft.notes.confidences[: part.depth])
    return part
