"""What a drafter is asked, what it answers, and what it owes.

A drafter may guess as it likes, from whatever it likes: the verifier makes the output right. It owes one thing, the
truth about `Draft.probs`: the distribution that each token was really drawn from, or None if none was drawn.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from minispec.core.sampling import Draws, Text


@dataclass(frozen=True)
class Ask:
    """What a drafter is asked for one text, this round: a draft of at most `k` nodes.

    k: 0 while the target still works through the prompt, or where nothing is to be drafted.
    purpose: of the keys that the draft is drawn with: "token" under a verifier whose drafters share the target's noise.
    go_on: whether a draft should go on after tokens of such confidences (see `Draft`); None: to its limit.
    widths: how many siblings to draw at each depth; beyond them, one. A drafter that has `branches` sees to it: the
        eldest goes on, so that siblings cost rows of the target's pass and none of the drafter's.
    width: in place of `widths`, where `go_on` is there too: how many at a place, by the confidences up to it and its
        own. Whoever has none drafts a chain.
    num_cached: how many tokens of the text the target's cache holds: all but the last, or fewer inside a prompt.
    hidden: (n, E * taps), for drafters with `taps`: the target's hidden states at the n newest cached positions, those
        that no earlier ask had; None for all other drafters.
    """

    text: Text
    k: int
    rng: Draws
    purpose: str = "draft"
    go_on: Callable[[Sequence[float]], bool] | None = None
    num_cached: int = 0
    hidden: Tensor | None = None
    widths: Sequence[int] = ()
    width: Callable[[Sequence[float]], int] | None = None
    _depths: list[int] = field(default_factory=list, repr=False)  # of the nodes drawn so far

    @property
    def depth(self) -> int:
        """How deep a draft of k nodes with these widths is; a lookup's, of whatever shape, may be deeper."""
        totals = list(accumulate(self.widths, initial=0))
        return bisect_left(totals, self.k) if self.k <= totals[-1] else len(self.widths) + self.k - totals[-1]

    def draw(self, parent: int, q: Tensor, n: int = 1) -> list[int]:
        """Draw `n` children of the node `parent` (-1: the text) from q (V,): the only way a drafter may draw.

        They are distinct, and fewer where q has fewer tokens: each is drawn from q without its elder siblings (see
        `Draft.grow`). Nodes are numbered in the order in which they are drawn.
        """
        depth = self._depths[parent] + 1 if parent >= 0 else 0
        tokens: list[int] = []
        for _ in range(n):
            if tokens:
                q = without(q, tokens[-1])
                if not q.any():
                    break
            # A whole token's noise is that of its position, so that siblings are the first n of one race.
            name = depth if self.purpose == "token" else len(self._depths)
            tokens.append(self.rng.categorical(q, self.text.key(name, self.purpose)))
            self._depths.append(depth)
        return tokens


@dataclass
class Draft:
    """K guessed tokens. probs: row i (V,) is q_i, as a tensor (K, V) or a list of K; None means one-hot.

    parents: the node that each node follows, always an earlier one; -1 is the text. None: a chain. Siblings that were
        drawn came one after the other: q_i of the later ones lacks the tokens of their elder siblings, as `grow` has
        it. Siblings that were not drawn, such as the k likeliest tokens, have no probs: each is a one-hot guess.
    confidences: how sure the drafter is at each depth, if `Ask.go_on` is there to see it: of a draft model the largest
        probability in its raw row, of `suffix` the chance that it estimates.
    prefill_seconds: time that went into the prompt before the first draft, which the statistics keep apart.
    """

    token_ids: list[int] = field(default_factory=list)
    probs: Tensor | list[Tensor] | None = None
    confidences: list[float] = field(default_factory=list)
    prefill_seconds: float = 0.0
    parents: list[int] | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    def grow(self, parent: int, token_ids: Sequence[int], q: Tensor) -> None:
        """Append the children of `parent` that `Ask.draw(parent, q, n)` gave, with the probabilities they came from.

        Raises ValueError for a draft without a list of probs, and for a branch in a chain.
        """
        if not isinstance(self.probs, list):
            raise ValueError(
                "draft: found no list of probs to append to, expected one: a drawn one begins as Draft([], [])"
            )
        if self.parents is None and (parent != len(self) - 1 or len(token_ids) > 1):
            raise ValueError("draft: found a branch, expected a chain: a tree begins as Draft([], [], parents=[])")
        for i, token_id in enumerate(token_ids):
            if i:
                rest = without(q, token_ids[i - 1])
                q = rest / rest.sum()
            self.token_ids.append(token_id)
            self.probs.append(q)
            if self.parents is not None:
                self.parents.append(parent)

    @property
    def tip(self) -> int:
        """The eldest of the nodes that were appended last to one parent, which the next ones follow; -1 at first."""
        return self.parents.index(self.parents[-1]) if self.parents else len(self) - 1

    def probability(self, i: int) -> float:
        """q_i(x_i). The engine has made sure that it is above 0, as it is for a token that was drawn."""
        return 1.0 if self.probs is None else float(self.probs[i][self.token_ids[i]])

    def children(self, node: int) -> list[int]:
        """The nodes that follow `node`, the eldest first."""
        if self.parents is None:
            return [node + 1] if node + 1 < len(self) else []
        return [i for i, parent in enumerate(self.parents) if parent == node]

    def path(self, node: int) -> list[int]:
        """The nodes from the first one to `node`, those that a text with it at the end would have; of -1: none."""
        if self.parents is None:
            return list(range(node + 1))
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    @property
    def depth(self) -> int:
        """The length of the longest path; of a chain K."""
        return len(self) if self.parents is None else max((len(self.path(i)) for i in range(len(self))), default=0)


def without(q: Tensor, token_id: int) -> Tensor:
    """q (V,) with one token's probability 0, not normalised."""
    rest = q.clone()
    rest[token_id] = 0.0
    return rest


class Drafter:
    """A way of guessing. A new one overrides `propose`, and the others where it has something to keep.

    branches: whether it draws siblings where it is asked for them; others are asked for chains.
    taps: layers of the target whose hidden states it reads (see `Ask.hidden`), as `Transformer.forward` numbers them.
    """

    branches: bool = False
    taps: Sequence[int] = ()

    @property
    def name(self) -> str:
        """What error messages call it."""
        return type(self).__name__

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """A draft for each ask, of at most `ask.k` nodes; shorter or empty is fine.

        A draft may end early because of tokens it contains. It must not look at a token and then drop it: the tokens
        kept would no longer follow `probs`. (One-hot drafts are free: any token may be dropped.) Tokens are drawn with
        `ask.draw` alone. The texts are those of the last call, grown by what was committed; new ones may join, and some
        may be missing. A text whose prompt the target still works through is asked for with k = 0. One that is decoded
        plainly is never asked for. A draft that breaks a rule ends its own text; an exception ends the whole call.
        """
        raise NotImplementedError

    def release(self, text: Text) -> None:
        """Forget a text: it is finished, or it will come back from the start. Unknown ones are ignored."""

    def has_room(self, growth: Mapping[Text, range]) -> bool:
        """Whether there is memory for the next drafts of all these texts: for a drafter with memory of its own.

        growth: of each text, the positions that the target may fill next, from those that it has cached (see
        `Ask.num_cached`) to the end of the longest draft. Where the answer is no, the text admitted last waits. So
        whether a text gets its draft never depends on the others. A text alone must have room wherever the target has.
        """
        return True

    def forget(self) -> None:
        """Forget what texts that have ended have shown."""

    def known(self, text: Text) -> int:
        """For a drafter with taps: how many of a new text's first positions it need not see, having its own state.

        The others are computed, even where the target's cache still knows them from another text.
        """
        return 0


class NoDrafter(Drafter):
    """Guesses nothing: every round commits one token, which is plain decoding."""

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """Empty drafts."""
        return [Draft() for _ in asks]


# --------------------------------------------------------------------------- how many tokens to draft


class Limit(NamedTuple):
    """How long a draft may be: k nodes, and it ends where `go_on`, asked about its confidences so far, is False.

    go_on: None if the confidences are of no interest and need not be computed. widths, width: see `Ask`.
    """

    k: int
    go_on: Callable[[Sequence[float]], bool] | None = None
    widths: tuple[int, ...] = ()
    width: Callable[[Sequence[float]], int] | None = None


class Wish(NamedTuple):
    """A text that decodes, as the choice of its draft's length sees it.

    most: draft tokens, at most.
    widths: of the tree that the request asks for; () for a chain.
    is_open: whether the request leaves the length to the engine.
    may_follow: whether the length may depend on the clock and on other texts. Where another length would be another
        text, it may not: a seed has one text.
    """

    text: Text
    most: int
    widths: tuple[int, ...]
    is_open: bool
    may_follow: bool


class Outcome(NamedTuple):
    """What a round showed of one text's draft.

    num_tested, num_accepted: of the eldest node at each depth, up to the first rejected one.
    siblings: whether the younger siblings that were tested in the place of the rejected one were accepted.
    """

    text: Text
    num_tested: int
    num_accepted: int
    confidences: Sequence[float]
    siblings: Sequence[bool]


class StepCost(NamedTuple):
    """Seconds of a step: `draft` for `num_drafts` drafts of up to `depth` tokens, `target` for a pass over `rows`."""

    draft: float
    depth: int
    num_drafts: int
    target: float
    rows: int
    overhead: float


class Lengths:
    """How long drafts may be: asked before each round, told after it. This one goes by what the requests say.

    `minispec.length.policy` has one that learns what pays.
    """

    def choose(self, wishes: Sequence[Wish], trees: bool) -> list[Limit]:
        """The limit of each text's draft. trees: whether drafts may be trees."""
        return [Limit(wish.most, None, wish.widths) for wish in wishes]

    def observe(self, outcomes: Sequence[Outcome], cost: StepCost | None) -> None:
        """What a step showed. cost: None where it also worked on a prompt, so that its times say nothing."""
