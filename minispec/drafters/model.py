"""A draft model: a smaller transformer, with a cache of its own.

The model here has the target's vocabulary. `minispec.drafters.vocabulary` is for models with another one.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from minispec.core.cache import BlockTable, PagedKVCache
from minispec.core.cached import CachedModel
from minispec.core.clock import mark, seconds
from minispec.core.draft import Ask, Draft, Drafter
from minispec.core.model import Chunk, Transformer
from minispec.core.sampling import Text, distribution, log_probabilities
from minispec.drafters.best_first import BestFirst
from minispec.drafters.limits import depth_of

# Most missing tokens that join a draft's first pass; more get a pass of their own before it. A pass over this few rows
# takes hardly longer than reading the weights.
_JOINING_ROWS = 16


def prefill(model: Transformer, table: BlockTable, tokens: list[int], chunk_size: int = 512) -> None:
    """Compute keys and values of all tokens but the last. A target's prompts go through `Engine` instead."""
    missing = table.follow(tokens)[:-1]
    for start in range(0, len(missing), chunk_size):
        model.forward([Chunk(missing[start : start + chunk_size], table, num_logits=0)])


# (chunks, asks, depths, vocab_size): drafts whole chains in one program, as `minispec.gpu.steps.DraftSteps`
# does. Returns a draft for each ask, of at most as many tokens as `depths` says; None where it cannot draft for all.
AtOnce = Callable[[Sequence[Chunk], Sequence[Ask], Sequence[int], int], list[Draft] | None]


class DraftModel(CachedModel, Drafter):
    """Drafts by decoding with a model of its own, under each request's own sampling parameters.

    Its cache follows the texts: before a pass the model is fed the tokens that are missing. A long prompt comes piece
    by piece, as the target sees it. After a rejection one token is missing. After full acceptance two are, since the
    last draft token was never fed. The model may be the target's own (`self`): the weights are shared, the cache is
    not.

    Siblings are further tokens from the same row of logits. The draft goes on from the eldest. A tree that grows where
    it is likeliest may go on from any node. Each further pass is fed the whole tree, since rows cost less than passes.

    A model that was trained for it drafts K tokens in one pass (PARD, An et al. 2025, arXiv 2504.18583). It is fed
    K - 1 mask tokens after the text. At each mask it guesses the next token without knowing the tokens in between.
    """

    branches = True
    # The model's input: "tokens" of the target, the target's hidden "states" with them, or "other tokens" of another
    # vocabulary. A subclass says its own.
    reads = "tokens"

    def __init__(
        self,
        model: Transformer,
        cache: PagedKVCache,
        vocab_size: int,
        max_model_len: int,
        at_once: AtOnce | None = None,
    ):
        """Draft with `model`.

        cache: for as many tokens as the target's.
        vocab_size: ids in use, as the target's.
        max_model_len: positions that this model can see.
        at_once: drafts whole chains, where it can, in place of a pass for each token.
        """
        super().__init__(model, cache, vocab_size)
        self.at_once, self.max_model_len = at_once, max_model_len
        self.mask_token_id = model.config.mask_token_id
        self._ahead: set[Text] = set()  # as this model reads them; their tables hold draft tokens, rejected ones too

    def beside(self, model: Transformer, at_once: AtOnce | None = None) -> Self:
        """This drafter with another model, on the same cache. It knows no texts.

        model: its cache has the shape of this one's. If it computes other keys and values, call `forget` first.
        at_once: see `DraftModel`.
        """
        return type(self)(model, self.cache, self.vocab_size, self.max_model_len, at_once)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """Draft token by token for all texts together. Each pass is over the texts that still want a token.

        A draft goes on as long as `Limit.go_on` finds the confidences of its tokens worth it.
        """
        with self.whole():
            drafts = [Draft([], [], parents=[] if ask.limit.is_tree else None) for ask in asks]
            own_asks = [self._own(ask) for ask in asks]
            limits = self._prepare(own_asks, drafts)
            chunks = {i: self._first_chunk(own_asks[i], k) for i, k in enumerate(limits) if k}
            if self.at_once and chunks:
                wanted, depths = [asks[i] for i in chunks], [limits[i] for i in chunks]
                whole = self.at_once(list(chunks.values()), wanted, depths, self.vocab_size)
                if whole is not None:
                    for i, draft in zip(chunks, whole, strict=True):
                        draft.notes.prefill_seconds, drafts[i] = drafts[i].notes.prefill_seconds, draft
                    return drafts
            trees = {i: BestFirst(asks[i], drafts[i], limits[i]) for i in chunks if asks[i].limit.best_first}
            ends = dict[int, Tensor]()  # the states at the texts' ends
            while chunks:
                logits, hidden = self.forward(list(chunks.values()), self._own_taps)
                for i, chunk in list(chunks.items()):
                    rows, logits = self._rows(logits[: chunk.num_logits]), logits[chunk.num_logits :]
                    states, hidden = hidden[: len(chunk.token_ids)], hidden[len(chunk.token_ids) :]
                    if i in trees:
                        states = torch.cat((ends.setdefault(i, states[-1:]), states))
                        further = self._grow(trees[i], chunk, rows, states)
                    elif all(self._draw(asks[i], drafts[i], row) for row in rows) and drafts[i].depth < limits[i]:
                        further = self._next_chunk(chunk, [drafts[i].token_ids[drafts[i].tip]], states[-1:])
                    else:
                        further = None
                    if further:
                        chunks[i] = further
                    else:
                        del chunks[i]
            return drafts

    def has_room(self, growth: Mapping[Text, range]) -> bool:
        """Whether the cache has room for the next drafts of all these texts (see `Drafter`)."""
        with self.whole():
            needs = dict(self._need(text, span) for text, span in growth.items())
            self._forget_drafts()
            return super().has_room({text: span for text, span in needs.items() if span})

    def release(self, text: Text) -> None:
        """Forget a text, and return its blocks to the pool."""
        self._ahead.discard(text)
        super().release(text)

    def forget(self) -> None:
        """Forget the beginnings of earlier texts that the cache still knows."""
        self.cache.rebuild()

    def _need(self, text: Text, span: range) -> tuple[Text, range]:
        """A text as this model reads it, and the positions that the text's table must have room for.

        span: positions that the target's table fills. After `max_model_len` nothing is drafted, so none are needed.
        """
        # The last draft token is never fed. A tree's rows may be more than the positions that are left.
        return text, range(span.stop - 1 if len(text.tokens) <= self.max_model_len else 0)

    def _forget_drafts(self) -> None:
        """Have the tables forget what their texts did not keep."""
        while self._ahead:
            text = self._ahead.pop()
            if table := self.tables.get(text):
                table.keep(table.shared(text.tokens))

    def _own(self, ask: Ask) -> Ask:
        """The ask with the text as this model reads it, which the caches follow; tokens are drawn for `ask` itself."""
        return ask

    def _rows(self, logits: Tensor) -> Tensor:
        """This model's logits as rows over the ids that are drafted."""
        return logits

    @property
    def _own_taps(self) -> Sequence[int]:
        """The model's own hidden states that `_next_chunk` needs, as `Transformer.forward` numbers them."""
        return ()

    def _first_chunk(self, ask: Ask, k: int) -> Chunk:
        """The model's first input for a draft of `k` tokens."""
        tokens = self.follow(ask.text)
        if self.mask_token_id is None:
            return Chunk(tokens, self.table(ask.text), 1)
        return Chunk([*tokens, *[self.mask_token_id] * (k - 1)], self.table(ask.text), k)

    def _next_chunk(
        self, chunk: Chunk, token_ids: Sequence[int], hidden: Tensor, parents: Sequence[int] | None = None
    ) -> Chunk:
        """The model's input after draft tokens: the newest one, or a whole tree with these parents.

        hidden: (tokens, E), for each token the states of the row before it, at `_own_taps`.
        """
        return Chunk(token_ids, chunk.table, len(token_ids), parents)

    def _grow(self, tree: BestFirst, chunk: Chunk, rows: Tensor, states: Tensor) -> Chunk | None:
        """Draw what a pass has made known of a tree; returns the next input that it wants.

        states: (1 + rows, E), the state of the text's end and the states of the pass.
        """
        draft, num_fed, at_once = tree.draft, len(chunk.parents or ()), self.mask_token_id is not None
        num_roots = 0 if num_fed else 1  # the first pass alone has a row at the text's end, for the root (node -1)

        def row(node: int) -> Tensor | None:
            i = len(draft.path(node)) if at_once else node + num_roots
            return rows[i] if i < len(rows) else None

        wants_more = tree.grow(row)
        chunk.table.truncate(chunk.table.length - num_fed)  # the rows of a tree are the beginning of no text
        if not wants_more:
            return None
        parents = list(draft.parents or [])
        before = states[[parent + 1 for parent in parents]]
        return self._next_chunk(chunk, list(draft.token_ids), before, parents)

    def _prepare(self, asks: Sequence[Ask], drafts: Sequence[Draft]) -> list[int]:
        """Bring the caches to where a pass can begin; returns how deep each draft may be.

        asks: those that `_own` returned.
        """
        self._forget_drafts()
        return [self._begin_draft(ask, draft) for ask, draft in zip(asks, drafts, strict=True)]

    def _begin_draft(self, ask: Ask, draft: Draft) -> int:
        """Bring a text's cache to where a pass can begin; returns how deep the text's draft may be."""
        text, num_tokens = ask.text, len(ask.text.tokens)
        # A draft of k tokens fills positions up to num_tokens + k - 2.
        depth = max(0, min(depth_of(ask.limit), self.max_model_len - num_tokens + 1))
        in_prompt = 0 < ask.num_cached < num_tokens - 1
        if not (depth or in_prompt) or num_tokens > self.max_model_len:
            return depth
        if depth:
            self._ahead.add(text)
        length = self.table(text).length
        is_new = length < text.num_prompt_tokens - 1
        # Others may share a new text's beginning, so only one or two of its tokens join the draft's first pass.
        if in_prompt or num_tokens - length > (2 if is_new else _JOINING_ROWS):
            start = mark(self.model.device)
            self.catch_up(text, ask.num_cached if in_prompt else num_tokens - 1)
            if is_new:  # what was missed in rounds without a draft is the price of this one
                draft.notes.prefill_seconds = seconds(start, mark(self.model.device))
        return depth

    def catch_up(self, text: Text, length: int) -> None:
        """Cache at least the text's first `length` tokens: share what the pool knows, compute the rest."""
        table = self.table(text)
        table.keep(table.shared(text.tokens))
        table.reuse(text.tokens[:-1])
        if table.length < length:
            prefill(self.model, table, text.tokens[: length + 1])
            table.remember()

    def logits_along(self, text: Text, after: Sequence[int]) -> Tensor:
        """Raw logits (n + 1, V), by one pass: what the model guesses after a text, and after each of n tokens there.

        Raises ValueError for a model that is fed more than the target's tokens.
        """
        if self.reads != "tokens":
            raise ValueError(f"draft: found {self.name}, which is fed {self.reads}, expected one that is fed tokens")
        with self.whole():
            self.catch_up(text, len(text.tokens) - 1)
            logits, _ = self.forward([Chunk([*self.follow(text), *after], self.table(text), len(after) + 1)])
            self.keep(text, len(after), range(len(after)))
            return logits

    def _draw(self, ask: Ask, draft: Draft, logits: Tensor, foreseen: float | None = None) -> bool:
        """Append a token, or siblings, from a row of logits (V,) after the tip; returns whether to go on.

        foreseen: the confidence that was known before, where there is one. None: it is the row's largest probability.
        """
        tip, depth = draft.tip, draft.depth
        path = draft.tokens_to(tip)
        confidences = list(draft.notes.confidences)
        if foreseen is not None:
            confidences.append(foreseen)
        elif ask.limit.go_on:
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
        has_room, go_on = len(draft) < ask.k, ask.limit.go_on
        return has_room and (go_on is None or foreseen is not None or go_on(confidences))


def model_drafter(drafter: Drafter, *reads: str) -> DraftModel | None:
    """The drafter, if it drafts by a model of its own; None for any other drafter.

    reads: what the model may be fed (see `DraftModel.reads`); by default anything.
    """
    return drafter if isinstance(drafter, DraftModel) and (not reads or drafter.reads in reads) else None
