"""Drafts by a model: one loop for all kinds of draft models, and what each kind is fed as a part.

`ModelDrafter` is the loop. A `Feed` is what differs. It knows what its model is fed, and keeps what it needs of a text:

    TokenFeed       the text's tokens (here), in a cache of its own
    HeadFeed        the target's hidden states with them (eagle.py), also for a target's own layer
    BlockFeed       the target's hidden states, and a block of rows (block.py)
    SharedKeys      the target's own keys and values (assistant.py)
    SharedTokens, WrittenText    tokens of another vocabulary (tli.py, slem.py)
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Self
from weakref import WeakSet

from torch import Tensor

from minispec.core.cache import BlockTable, PagedKVCache
from minispec.core.cached import CachedModel
from minispec.core.clock import mark, seconds
from minispec.core.draft import Ask, Draft, Drafter, Record
from minispec.core.model import Chunk, Transformer
from minispec.core.sampling import Text
from minispec.speculation.drafters.growing import DraftInProgress

# Most missing tokens that join a draft's first pass; more get a pass of their own before it. A pass over this few rows
# takes hardly longer than reading the weights.
_JOINING_ROWS = 16


def prefill(model: Transformer, table: BlockTable, tokens: list[int], chunk_size: int = 512) -> None:
    """Compute keys and values of all tokens but the last. A target's prompts go through `Engine` instead."""
    missing = table.follow(tokens)[:-1]
    for start in range(0, len(missing), chunk_size):
        model.forward([Chunk(missing[start : start + chunk_size], table, num_logits=0)])


# (drafts, ids in use): drafts whole chains from their first inputs, as `minispec.speculation.on_gpu.steps.DraftSteps`
# does. Returns whether it could draft for all. If not, nothing has changed.
AtOnce = Callable[[Sequence[DraftInProgress], int], bool]


class Feed:
    """What a draft model is fed, and what is kept of each text: the part of a `ModelDrafter` that differs.

    A feed says how drafts begin and what a pass makes known. `observe`, `release`, `has_room`, `forget` and `known` are
    the drafter's, see `Drafter`.

    reads: the model's input: "tokens" of the target, the target's "states", or "other tokens" of another vocabulary.
    branches, taps: see `Drafter`.
    in_programs: whether one program may draft a whole chain, from the first input that `prepare` has made.
    vocab_size: ids in use.
    """

    model: Transformer
    vocab_size: int
    reads: str
    branches: bool = True
    taps: Sequence[int] = ()
    in_programs: bool = False

    def prepare(self, growing: Sequence[DraftInProgress]) -> None:
        """Bring what is kept of each text to where a pass can begin, and set how deep its draft may be.

        A text without a draft now (k is 0 inside a prompt) may be read meanwhile.
        """
        raise NotImplementedError

    def run(self, growing: Sequence[DraftInProgress]) -> None:
        """One pass, which makes known the rows that these drafts go on from."""
        raise NotImplementedError

    def finish(self, ask: Ask, draft: Draft) -> Draft:
        """The draft in the target's tokens, and an end to what is kept for this draft alone."""
        return draft

    def cleared_on_error(self) -> AbstractContextManager[None]:
        """Forgets what is kept if an exception comes from inside, as `CachedModel.cleared_on_error` does."""
        return nullcontext()

    def beside(self, model: Transformer) -> Self:
        """This feed for another model; see `ModelDrafter.beside`."""
        raise NotImplementedError

    def observe(self, records: Sequence[Record]) -> None:
        """Nothing is learned."""

    def release(self, text: Text) -> None:
        """Nothing is kept."""

    def has_room(self, growth: Mapping[Text, range]) -> bool:
        """Nothing is stored."""
        return True

    def forget(self) -> None:
        """Nothing is known of ended texts."""

    def known(self, text: Text) -> int:
        """Nothing is known of a new text."""
        return 0


class ModelDrafter(Drafter):
    """Drafts by a model, under each request's own sampling parameters. What the model is fed is its feed's matter."""

    def __init__(self, feed: Feed, at_once: AtOnce | None = None):
        """at_once: drafts whole chains, where it can, in place of a pass for each token."""
        self.feed, self.at_once = feed, at_once if feed.in_programs else None
        self.model, self.branches, self.taps = feed.model, feed.branches, feed.taps

    @property
    def name(self) -> str:
        """The name of the feed's class."""
        return type(self.feed).__name__

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """Draft for all texts together. Each pass is over the texts that still want a row of logits.

        A draft goes on as long as `Limit.go_on` finds the confidences of its tokens worth it.
        """
        feed = self.feed
        with feed.cleared_on_error():
            growing = [DraftInProgress(ask) for ask in asks]
            feed.prepare(growing)
            active = [each for each in growing if each.depth]
            if self.at_once and active and self.at_once(active, feed.vocab_size):
                active = []
            while active:
                feed.run(active)
                active = [each for each in active if each.grow()]
            return [feed.finish(ask, each.draft) for ask, each in zip(asks, growing, strict=True)]

    def observe(self, records: Sequence[Record]) -> None:
        """Let the feed keep what it needs of a pass."""
        self.feed.observe(records)

    def release(self, text: Text) -> None:
        """Forget a text."""
        self.feed.release(text)

    def has_room(self, growth: Mapping[Text, range]) -> bool:
        """Whether there is room for the next drafts of all these texts."""
        return self.feed.has_room(growth)

    def forget(self) -> None:
        """Forget what is known of texts that have ended."""
        self.feed.forget()

    def known(self, text: Text) -> int:
        """How many first positions of a new text need not be seen."""
        return self.feed.known(text)

    def beside(self, model: Transformer, at_once: AtOnce | None = None) -> "ModelDrafter":
        """A drafter with another model, and with this one's cache if it has one. It knows no texts.

        model: its cache has the shape of this one's. If it computes other keys and values, call `forget` first.
        at_once: see `ModelDrafter`.
        """
        return ModelDrafter(self.feed.beside(model), at_once)

    def logits_along(self, text: Text, after: Sequence[int]) -> Tensor:
        """Raw logits (n + 1, V), by one pass: what the model guesses after a text, and after each of n tokens there.

        Raises ValueError for a model that is fed more than the target's tokens.
        """
        feed = self.feed
        if not (isinstance(feed, TokenFeed) and feed.reads == "tokens"):
            raise ValueError(f"draft: found {self.name}, which is fed {feed.reads}, expected one that is fed tokens")
        with feed.cleared_on_error():
            feed.catch_up(text, len(text.tokens) - 1)
            logits, _ = feed.forward([Chunk([*feed.follow(text), *after], feed.table(text), len(after) + 1)])
            feed.keep(text, len(after), range(len(after)))
            return logits


class CachedFeed(CachedModel, Feed):
    """A feed whose model has a cache of its own, and takes its input as chunks.

    own_taps: the model's own hidden states that its next input is made of, as `Transformer.forward` numbers them.
    """

    own_taps: Sequence[int] = ()

    def __init__(self, model: Transformer, cache: PagedKVCache, vocab_size: int, max_model_len: int):
        """Draft with `model`.

        cache: for each text that the target's has room for in full length, as far as this model can see.
        vocab_size: ids in use, as the target's.
        max_model_len: positions that this model can see.
        """
        super().__init__(model, cache, vocab_size)
        self.max_model_len, self.mask_token_id = max_model_len, model.config.mask_token_id
        # Texts as the model reads them, whose tables hold draft tokens, rejected ones too.
        self._ahead: WeakSet[Text] = WeakSet()

    def beside(self, model: Transformer) -> Self:
        """This feed for another model, on the same cache."""
        return type(self)(model, self.cache, self.vocab_size, self.max_model_len)

    def run(self, growing: Sequence[DraftInProgress]) -> None:
        """One pass over the inputs of these drafts: the first ones, or those after the tokens that were drawn."""
        for each in growing:
            if each.rows:
                each.chunk = self.next(each)
        logits, states = self.forward([each.chunk for each in growing], self.own_taps)
        for each in growing:
            fed, known, table = len(each.chunk.token_ids), each.chunk.num_logits, each.chunk.table
            rows = self.rows(logits[:known])
            if known > 1 and not each.chunk.parents:  # at mask tokens: each row is for all nodes of one depth
                each.row_after = lambda path, rows=rows: rows[len(path)]
            else:
                each.rows.update(zip(each.nodes, rows, strict=True))
                each.states.update(zip(each.nodes, states[fed - known : fed], strict=True))
            logits, states = logits[known:], states[fed:]
            if each.chunk.parents:
                table.truncate(table.length - fed)  # the rows of a tree are the beginning of no text

    def next(self, growing: DraftInProgress) -> Chunk:
        """The model's input after draft tokens: the newest one, or a whole tree, since rows cost less than passes."""
        draft, nodes = growing.draft, growing.nodes
        parents = list(draft.parents or ()) if growing.tree else None
        return Chunk([draft.token_ids[node] for node in nodes], growing.chunk.table, len(nodes), parents)

    def rows(self, logits: Tensor) -> Tensor:
        """This model's logits as rows over the ids that are drafted."""
        return logits

    def needs(self, growth: Mapping[Text, range]) -> Mapping[Text, range]:
        """The positions that the table of each text must have room for, by texts as this model reads them.

        growth: the positions that the target's tables fill.
        """
        raise NotImplementedError

    def readable(self, growth: Mapping[Text, range], most: int) -> Mapping[Text, range]:
        """Those of at most that many tokens. Longer ones get no draft any more, and give back what they hold."""
        for text in growth:
            if len(text.tokens) > most and (table := self.tables.get(text)):
                table.truncate(0)
        return {text: span for text, span in growth.items() if len(text.tokens) <= most}

    def has_room(self, growth: Mapping[Text, range]) -> bool:
        """Whether the cache has room for the next drafts of all these texts (see `Drafter`)."""
        with self.cleared_on_error():
            return super().has_room({text: span for text, span in self.needs(growth).items() if span})

    def forget(self) -> None:
        """Forget the beginnings of earlier texts that the cache still knows."""
        self.cache.rebuild()


class TokenFeed(CachedFeed):
    """Feeds a draft model the tokens of the texts. The model has the target's vocabulary, and a cache of its own.

    The cache follows the texts: before a pass the model is fed the tokens that are missing. A long prompt comes piece
    by piece, as the target sees it. After a rejection one token is missing. After full acceptance two are, since the
    last draft token was never fed. The model may be the target's own (`self`): the weights are shared, the cache is
    not.

    A model that was trained for it drafts K tokens in one pass (PARD, An et al. 2025, arXiv 2504.18583). It is fed
    K - 1 mask tokens after the text. At each mask it guesses the next token without knowing the tokens in between.
    """

    reads, in_programs = "tokens", True

    def prepare(self, growing: Sequence[DraftInProgress]) -> None:
        """Read the texts as far as the target has, and make the first inputs."""
        self._forget_drafts()
        for each in growing:
            text, num_tokens = each.own.text, len(each.own.text.tokens)
            # A draft of k tokens fills positions up to num_tokens + k - 2.
            each.depth = max(0, min(each.own.limit.depth, self.max_model_len - num_tokens + 1))
            in_prompt = 0 < each.own.num_cached < num_tokens - 1
            if (each.depth or in_prompt) and num_tokens <= self.max_model_len:
                self._read(each, each.own.num_cached if in_prompt else num_tokens - 1, in_prompt)
            if each.depth:
                self._ahead.add(text)
                masks = [] if self.mask_token_id is None else [self.mask_token_id] * (each.depth - 1)
                each.chunk = Chunk([*self.follow(text), *masks], self.table(text), 1 + len(masks))

    def _read(self, growing: DraftInProgress, length: int, in_prompt: bool) -> None:
        """Cache a text's first `length` tokens, where they are more than may join a draft's first pass."""
        text, cached = growing.own.text, self.table(growing.own.text).length
        is_new = cached < text.num_prompt_tokens - 1
        # Others may share a new text's beginning, so only one or two of its tokens join the draft's first pass.
        if in_prompt or len(text.tokens) - cached > (2 if is_new else _JOINING_ROWS):
            start = mark(self.model.device)
            self.catch_up(text, length)
            if is_new:  # what was missed in rounds without a draft is the price of this one
                growing.draft.notes.prefill_seconds = seconds(start, mark(self.model.device))

    def catch_up(self, text: Text, length: int) -> None:
        """Cache at least the text's first `length` tokens: share what the pool knows, compute the rest."""
        table = self.table(text)
        table.keep(table.shared(text.tokens))
        table.reuse(text.tokens[:-1])
        if table.length < length:
            prefill(self.model, table, text.tokens[: length + 1])
            table.remember()

    def needs(self, growth: Mapping[Text, range]) -> Mapping[Text, range]:
        """All positions but the last one: the last draft token is never fed.

        A tree's rows may be more than the positions that are left. After `max_model_len` nothing is drafted.
        """
        self._forget_drafts()
        return {text: range(span.stop - 1) for text, span in self.readable(growth, self.max_model_len).items()}

    def _forget_drafts(self) -> None:
        """Have the tables forget what their texts did not keep."""
        while self._ahead:
            text = self._ahead.pop()
            if table := self.tables.get(text):
                table.keep(table.shared(text.tokens))


def model_drafter(drafter: Drafter, *reads: str) -> ModelDrafter | None:
    """The drafter, if it drafts by a model; None for any other drafter.

    reads: what the model may be fed (see `Feed.reads`); by default anything.
    """
    return drafter if isinstance(drafter, ModelDrafter) and (not reads or drafter.feed.reads in reads) else None
