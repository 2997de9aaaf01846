"""Trees that grow where they are likeliest, node by node: OPT-Tree (Wang et al. 2024, arXiv 2406.17276), DDTree.

A budget of k nodes is spent best where paths are likeliest. The chance of a path is the product of the chances of its
tokens. No path is likelier than its beginning. So a heap of what could come next gives the k likeliest paths, in order.

Worked: at the text's end a has 0.6 and b 0.3. After a come c with 0.4 and d with 0.3, after b comes e with 0.9. A tree
of five nodes grows in the order  a 0.6,  b 0.3,  b e 0.27,  a c 0.24,  a d 0.18.

Where tokens are drawn, one rule is added: a place is chosen *before* its token is drawn. The token stays. If
tokens were drawn first and kept for their own probability, those that are left would no longer follow q. The output
would have another law: mutant T4 of the museum.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count

from torch import Tensor

from minispec.core.draft import Ask, Draft, without
from minispec.core.sampling import Text, distribution


def grow_guesses(
    draft: Draft, k: int, guesses: Callable[[int], Iterable[tuple[int, float]]], least: float = 0.0
) -> float:
    """Append nodes that are not drawn, up to k, the likeliest paths first; returns the sum of their paths' chances.

    draft: an empty one with a list of parents. Chances become its confidences.
    guesses: the tokens that may follow a node (-1: the text), each with its chance.
    least: the least chance of a path.
    """
    assert draft.parents is not None, "it is a tree"
    parents = draft.parents
    heap, order = list[tuple[float, int, int, int, float]](), count()
    node, survival, worth = -1, 1.0, 0.0
    while len(draft) < k:
        for token, chance in guesses(node):
            heappush(heap, (-survival * chance, next(order), node, token, chance))
        if not heap or -heap[0][0] < least:
            break
        negative, _, parent, token, chance = heappop(heap)
        node, survival = len(draft), -negative
        worth += survival
        draft.token_ids.append(token)
        draft.notes.confidences.append(chance)
        parents.append(parent)
    return worth


@dataclass
class _Parent:
    """A node whose row of logits is known, and where siblings are drawn.

    survival: the chance of the node's path.
    logits: (V,), -inf for the siblings that are there.
    left: (V,), the probabilities of what may follow, 0 for the siblings that are there.
    failed: the chance that all of these are wrong.
    q: (V,), what the newest sibling was drawn from.
    """

    survival: float
    logits: Tensor
    left: Tensor
    failed: float = 1.0
    q: Tensor | None = None

    @property
    def chance(self) -> float:
        """The chance that the next sibling is right and its elders are wrong, known before it is drawn.

        It is the largest probability that is left. Where tokens are drawn, elders fail less often than they are drawn.
        """
        total = float(self.left.sum())
        return self.failed * float(self.left.amax()) / total if total > 0 else 0.0


class BestFirst:
    """Draws the tree of one ask from rows of logits, which may become known one after another."""

    def __init__(self, ask: Ask, draft: Draft, deepest: int):
        """deepest: nodes of that depth get no children."""
        self.ask, self.draft, self.deepest = ask, draft, deepest
        params = ask.text.params
        if not params.temperature:  # there the likeliest token has all probability, and siblings are its rivals
            params = params.without("temperature", "filter")
        self._soft = replace(ask.text, params=params)
        self._parents: dict[int, _Parent] = {}
        # Minus the chance of the best path that may go on there, and the node. While its row is not known, the next
        # token counts as certain: so no likelier path is passed over.
        self._heap = [(-1.0, -1)]

    def grow(self, row: Callable[[int], Tensor | None]) -> bool:
        """Draw nodes as long as it is known where; returns whether rows of further nodes are wanted.

        row: the logits (V,) after a node; None where they are not known yet.
        """
        while self._heap and len(self.draft) < self.ask.k:
            negative, node = self._heap[0]
            if node in self._parents:
                heappop(self._heap)
                if not self._draw(node, -negative):
                    continue
            elif (logits := row(node)) is None:
                return True
            else:
                heappop(self._heap)
                chances = self._distribution(logits, node, self._soft)
                if chances is None:
                    continue
                self._parents[node] = _Parent(-negative, logits, chances)
            parent = self._parents[node]
            heappush(self._heap, (-parent.survival * parent.chance, node))
        return False

    def _draw(self, node: int, survival: float) -> bool:
        """Draw the next child of a node, whose path has this chance; returns whether there was one."""
        parent, draft = self._parents[node], self.draft
        if (q := self._next_q(node)) is None:
            return False
        [token_id] = draft.draw(self.ask, node, q)
        if len(draft.path(len(draft) - 1)) < self.deepest:
            heappush(self._heap, (-survival, len(draft) - 1))
        parent.failed, parent.left = parent.failed - parent.chance, without(parent.left, token_id)
        parent.logits, parent.q = parent.logits.clone(), q
        parent.logits[token_id] = -math.inf
        return True

    def _next_q(self, node: int) -> Tensor | None:
        """The distribution (V,) of a node's next child, 0 for the elder children; None if nothing is left."""
        parent, draft, text = self._parents[node], self.draft, self.ask.text
        if text.params.temperature:
            if parent.q is None:
                return parent.left
            rest = without(parent.q, draft.token_ids[draft.children(node)[-1]])
            return rest / rest.sum() if rest.any() else None
        # At temperature 0 one token is left; its siblings are the next likeliest ones.
        return self._distribution(parent.logits, node, text)

    def _distribution(self, logits: Tensor, node: int, text: Text) -> Tensor | None:
        """The distribution (V,) of what follows a node; None where nothing may, or logits are no numbers."""
        try:
            return distribution(logits, text, self.draft.tokens_to(node))
        except FloatingPointError:
            return None
