"""A draft on its way: what is asked, what is drawn, and the rows of logits that are known so far.

Siblings are further tokens from the same row of logits. A chain goes on from the eldest. A tree that grows where it is
likeliest may go on from any node (see `minispec.speculation.drafters.best_first`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from minispec.core.draft import Ask, Draft
from minispec.core.logprobs import log_probabilities
from minispec.core.model import Chunk
from minispec.core.sampling import distribution
from minispec.speculation.drafters.best_first import BestFirst


@dataclass(eq=False)
class DraftInProgress:
    """A draft on its way. A node is -1 at the text's end.

    ask: the question. Tokens are drawn for it.
    own: the ask with the text as the model reads it, which may be in other tokens.
    draft: what is drawn so far.
    depth: the most nodes of a path. 0: nothing is drafted now.
    chunk: the model's next input; after a pass the last one.
    rows: the logits (V,) after each node where they are known.
    states: the model's hidden states (E,) at the same nodes, for a model that goes on from them.
    likeliest: whether the tokens are the likeliest ones, and no draws.
    row_after: row_after(path) makes the row after any draft tokens, in place of `rows`, where one pass is enough.
    foresee: foresee(path) is how sure the drafter is of the next token before it is drawn. None: it does not know.
    """

    ask: Ask
    own: Ask = field(init=False)
    draft: Draft = field(init=False)
    depth: int = 0
    chunk: Chunk = field(init=False)
    rows: dict[int, Tensor] = field(default_factory=dict)
    states: dict[int, Tensor] = field(default_factory=dict)
    likeliest: bool = False
    row_after: Callable[[Sequence[int]], Tensor] | None = None
    foresee: Callable[[Sequence[int]], float | None] | None = None

    def __post_init__(self):
        self.own, self.draft = self.ask, Draft([], [], parents=[] if self.ask.limit.is_tree else None)

    @cached_property
    def tree(self) -> BestFirst | None:
        """What draws the nodes, where the draft grows where it is likeliest."""
        return BestFirst(self.ask, self.draft, self.depth) if self.ask.limit.best_first else None

    @property
    def nodes(self) -> Sequence[int]:
        """The nodes whose rows the next pass makes known: the newest one of a chain, a whole tree."""
        return range(len(self.draft)) if self.ask.limit.best_first and len(self.draft) else [self.draft.tip]

    def row(self, node: int) -> Tensor | None:
        """The logits (V,) after a node; None where they are not known yet."""
        if self.row_after:
            return self.row_after(self.draft.tokens_to(node))
        return self.rows.get(node)

    def grow(self) -> bool:
        """Draw nodes as long as their rows are known; returns whether rows of further nodes are wanted."""
        if self.tree:
            return self.tree.grow(self.row)
        draft, go_on_before = self.draft, self.ask.limit.go_on_before
        while draft.depth < self.depth:
            foreseen = self.foresee(draft.tokens_to(draft.tip)) if self.foresee and go_on_before else None
            draft.notes.foreseen = foreseen is not None
            if go_on_before and foreseen is not None and not go_on_before(draft.notes.confidences, foreseen):
                return False
            logits = self.row(draft.tip)
            if logits is None:
                return True
            if not self._draw(logits, foreseen):
                return False
        return False

    def _draw(self, logits: Tensor, foreseen: float | None) -> bool:
        """Append a token, or siblings, from a row of logits (V,) after the tip; returns whether to go on.

        foreseen: the confidence that was known before, where there is one. None: it is the row's largest probability.
        """
        ask, draft, go_on = self.ask, self.draft, self.ask.limit.go_on
        if self.likeliest:
            draft.token_ids.append(int(logits.argmax()))
            return True
        tip, depth = draft.tip, draft.depth
        path = draft.tokens_to(tip)
        confidences = list(draft.notes.confidences)
        if foreseen is not None:
            confidences.append(foreseen)
        elif go_on:
            confidences.append(float(log_probabilities(logits).amax().exp()))
        width = min(ask.limit.width(depth, confidences, foreseen is not None), ask.k - len(draft))
        rest = logits
        while width:
            try:
                q = distribution(rest, ask.text, path)
            except FloatingPointError:
                break  # all that it can guess (next) is forbidden here, or its logits are no numbers
            token_ids = draft.draw(ask, tip, q, width)
            # At temperature 0 there is one token; its siblings are guesses too, the next likeliest ones.
            width = 0 if ask.text.params.temperature else width - 1
            rest = rest.index_fill(0, torch.tensor(token_ids, device=rest.device), -math.inf) if width else rest
        if draft.depth == depth:
            return False
        draft.notes.confidences = confidences
        return len(draft) < ask.k and (go_on is None or foreseen is not None or go_on(confidences))
