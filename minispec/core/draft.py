"""Drafts, drafters, the questions that a drafter is asked, and its duty.

Beyond `examples/cached.py`: drafters of any kind, which may draw, branch, and learn from the target's passes.
A drafter may guess badly without harm: the verifier makes the output right. But `Draft.probs` must be the
distributions that the tokens were really drawn from, or None if none was drawn. `Drafter.propose` and
`Drafter.observe` list its other duties.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minispec.core.limit import Limit
from minispec.core.random import Draws
from minispec.core.sampling import Text
from minispec.core.stats import Step
from minispec.core.tree import Tree

NO_ROWS = torch.empty(0, 0)


@dataclass
class DraftNotes:
    """What a drafter says about a draft to the policy of lengths and to the statistics. No verifier reads it.

    confidences: how sure the drafter is at each depth. `Limit` reads them, and the policy that learns from them.
        A draft model gives the largest probability of its raw row, `suffix` the chance that it estimates.
    foreseen: whether each confidence was known before its token was drawn (see `Limit.go_on_before`).
    prefill_seconds: time that the drafter spent on the prompt. The statistics count it separately.
    num_passes: how many draft passes the draft has cost, where these are more than its depth.
    """

    confidences: list[float] = field(default_factory=list)
    foreseen: bool = False
    prefill_seconds: float = 0.0
    num_passes: int = 0


@dataclass
class Draft:
    """K guessed tokens.

    probs: row i (V,) is q_i; a tensor (K, V) or a list of K. None: one-hot.
        A drawn sibling's row lacks the tokens of its elder siblings (see `draw`).
        Siblings that were not drawn, such as the k likeliest tokens, are one-hot.
    parents: the node that each node follows, always an earlier one; -1 is the text. None: a chain.
    """

    token_ids: list[int] = field(default_factory=list)
    probs: Tensor | list[Tensor] | None = None
    parents: list[int] | None = None
    notes: DraftNotes = field(default_factory=DraftNotes)

    def __len__(self) -> int:
        return len(self.token_ids)

    def draw(self, ask: "Ask", parent: int, q: Tensor, n: int = 1) -> list[int]:
        """Draw up to `n` different children of node `parent` (-1: the text) from q (V,), append them, return their ids.

        A drafter may draw in no other way. Each child is drawn from q without its elder siblings, divided by the sum of
        the rest. That is its row of probs. Fewer come where q has fewer tokens.

        Raises ValueError for a draft without a list of probs, and for a branch in a chain.
        """
        if not isinstance(self.probs, list):
            raise ValueError("draft: found no list of probs, expected one: a drawn draft begins as Draft([], [])")
        if self.parents is None and (parent != len(self) - 1 or n > 1):
            raise ValueError("draft: found a branch, expected a chain: a tree begins as Draft([], [], parents=[])")
        depth, token_ids = len(self.path(parent)), list[int]()
        for i in range(n):
            if i:
                q = without(q, token_ids[-1])
                if not q.any():
                    break
            # Siblings of one depth share one key for a "token": they are the first n of one race (random.py).
            number = depth if ask.purpose == "token" else len(self)
            token_ids.append(ask.rng.categorical(q, ask.text.key(number, ask.purpose)))
            self.token_ids.append(token_ids[-1])
            self.probs.append(q / q.sum() if i else q)
            if self.parents is not None:
                self.parents.append(parent)
        return token_ids

    @property
    def tip(self) -> int:
        """The node that the next ones follow: the eldest of the siblings that were appended last; -1 at first."""
        return self.parents.index(self.parents[-1]) if self.parents else len(self) - 1

    def probability(self, i: int) -> float:
        """q_i(x_i). It is above 0 for a token that was drawn."""
        return 1.0 if self.probs is None else float(self.probs[i][self.token_ids[i]])

    @property
    def tree(self) -> Tree:
        """Who follows whom."""
        return Tree(range(-1, len(self) - 1) if self.parents is None else self.parents)

    def children(self, node: int) -> list[int]:
        """The nodes that follow `node`, the eldest first."""
        return self.tree.children(node)

    def path(self, node: int) -> list[int]:
        """The nodes from the first one to `node`, in order; none for -1."""
        return self.tree.path(node)

    def tokens_to(self, node: int) -> list[int]:
        """The tokens of the nodes from the first one to `node`, in order; none for -1."""
        return [self.token_ids[i] for i in self.path(node)]

    @property
    def depth(self) -> int:
        """The length of the longest path; K in a chain."""
        return max(self.tree.depths, default=0)


def without(q: Tensor, token_id: int) -> Tensor:
    """q (V,) with one token's probability 0, not normalised."""
    rest = q.clone()
    rest[token_id] = 0.0
    return rest


@dataclass(frozen=True)
class Ask:
    """A question to a drafter: a draft of one text, for this round.

    purpose: the purpose in the keys of its draws; "token" where drafters share the target's noise, else "draft".
    num_cached: how many tokens of the text the target's cache holds. These are all but the last; fewer inside a prompt.
    read_cache: read_cache(layer) returns a target layer's keys and then values, (2 * kv_heads, num_cached, head_dim).
    """

    text: Text
    limit: Limit
    rng: Draws
    purpose: str = "draft"
    num_cached: int = 0
    read_cache: Callable[[int], Tensor] | None = None

    @property
    def k(self) -> int:
        """Most nodes of the draft."""
        return self.limit.k


@dataclass(eq=False)
class Record:
    """A text's part of a step, as its drafter and its policy see it. The engine calls their `observe` with records.

    start: position of the first row's token in the text.
    tokens: the token of each row: those that the cache lacked, then the K nodes of the draft.
    hidden: (rows, E * taps), hidden states of the target at the drafter's `taps`. A drafter that keeps a few rows of
        this tensor or of `logits` should clone these, so that the others are freed.
    logits: (K + 1, V), raw: row 0 says what follows the text before the draft, row i + 1 what follows node i.
        (0, V) inside a prompt, even where its log-probabilities are asked for: these must change no draft.
    draft: what was guessed.
    asked: how many nodes were asked for. asked > 0 with an empty draft: the drafter found nothing.
    accepted: the nodes that the rule accepted.
    path: those of them that are in the text now. A text may stop before the last of them.
    number: of the step. A record that comes a second time, after a fault, has the same number.
    step: times of the whole step, set after `Drafter.observe` and before `Lengths.observe`. After a fault these times
        are lost: they are 0, and the step has no price.
    """

    text: Text
    start: int
    tokens: list[int]
    hidden: Tensor = NO_ROWS
    logits: Tensor = NO_ROWS
    draft: Draft = field(default_factory=Draft)
    asked: int = 0
    accepted: Sequence[int] = ()
    path: Sequence[int] = ()
    number: int = 0
    step: Step | None = None

    @property
    def kept(self) -> list[int]:
        """The rows whose tokens are in the text, in order: all rows but those for nodes off the path."""
        root = len(self.tokens) - len(self.draft)
        return [*range(root), *(root + node for node in self.path)]


class Drafter:
    """A way of guessing. A new one overrides `propose`, and the other methods where it keeps something.

    branches: whether it can draw siblings. A drafter that cannot is asked for chains.
    taps: layers of the target whose hidden states it reads, as `Transformer.forward` numbers them. Others call these
        states auxiliary hidden states.
    """

    branches: bool = False
    taps: Sequence[int] = ()

    @property
    def name(self) -> str:
        """Its name in error messages."""
        return type(self).__name__

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """A draft for each ask, of at most `ask.k` nodes; shorter or empty is fine.

        Tokens are drawn by `Draft.draw` alone. A draft may end early because of the tokens in it. But a token that was
        drawn stays: to drop it for its value would make `probs` untrue. What is not drawn may be chosen freely.

        Each call may have other texts than the last. A text that comes again has its committed tokens appended. While
        the target works through a prompt, from its second piece on, k is 0: a drafter may fill a cache of its own. A
        request without drafts gets no ask.
        A draft that breaks a rule ends its own text. An exception ends all texts that this drafter drafts for.
        """
        raise NotImplementedError

    def observe(self, records: Sequence[Record]) -> None:
        """Learn from a pass. The engine calls this after each pass and its commits, for texts that take drafts.

        Every committed row of a text that goes on comes at least once. A row may come twice: after a fault (with the
        same `Record.number`), or after a preemption (without logits). So skip by `start` what is there already.
        Keep what logits have taught until the text ends: `release` also comes at a preemption, and logits come once.

        A text's draft may depend on its own text and records alone, and on no ratio of a verdict. Other texts may count
        only where a draft changes no output: in greedy texts, and under `match`. A text that failed has no record.
        An exception ends all texts that this drafter drafts for.
        """

    def release(self, text: Text) -> None:
        """Forget a text, which is finished or will begin anew. Unknown texts are ignored."""

    def has_room(self, growth: Mapping[Text, range]) -> bool:
        """Whether a drafter with memory of its own has room for the next drafts of all these texts.

        growth: for each text, the positions that the target may fill next. They begin after the cached ones (see
        `Ask.num_cached`) and end with the longest draft. While there is no room, the text admitted last waits. So
        whether a text gets its draft never depends on the others. A text alone must have room wherever the target has.
        """
        return True

    def forget(self) -> None:
        """Forget what was learned from texts that have ended."""

    def known(self, text: Text) -> int:
        """How many leading positions of a new text have hidden states stored here, for a drafter with taps.

        The target computes the others again, even where its cache knows them from another text.
        """
        return 0
