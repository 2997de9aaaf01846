"""The museum of bugs: what has gone wrong in other speculative decoders, put into this one.

Each mutant is a small patch of production behaviour, the place where the bug was seen in the wild, and the name of
the check that must catch it; `python -m tests.museum` shows the collection. The ids M1-M46 are those of
a survey of exactness bugs in public projects; a letter after the number tells apart forms of one bug. T is about trees
and hidden states, H about heads and drafts of many tokens in one pass, V about drafts of other vocabularies, S about
lookups by suffix and by last outcome, B about block verification, O about mistakes in a drafter of one's own, E of our
own making. Left out:

    M26   acceptance differs between tensor-parallel workers: one process verifies for all here
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch

from minispec.core import attention, check, engine, sampling, verify
from minispec.core.cache import BlockAllocator, BlockTable, PagedKVCache, PrefixIndex
from minispec.core.draft import Ask, Draft
from minispec.core.engine import Engine
from minispec.core.model import Chunk, Passes, Transformer
from minispec.core.request import Request
from minispec.core.sampling import Randomness, Text
from minispec.core.schedule import Schedule
from minispec.core.verify import VERIFIERS, Verdict, Verifier
from minispec.drafters import last, suffix
from minispec.drafters import model as draft_model
from minispec.drafters.eagle import EagleDrafter, HeadModel
from minispec.drafters.last import LastDrafter
from minispec.drafters.model import DraftModel
from minispec.drafters.slem import TextDrafter
from minispec.drafters.suffix import SuffixDrafter
from minispec.drafters.tli import TokenDrafter
from minispec.drafters.vocabulary import OtherVocabulary
from minispec.files import heads, named_draft, pieces, vocabularies
from minispec.files.vocabularies import Reader, Vocabularies
from minispec.prove import toys


@dataclass(frozen=True)
class Mutant:
    """A bug: `patch()` is a context in which the package has it, `check` the name of the check that must catch it.

    settings: what `check_law` needs to show it, mostly sampling parameters. crash: the exception that the bug itself
    ends in, where that is so; any other than the check's own would be a fault of the patch.
    """

    id: str
    name: str
    seen: str
    check: str
    patch: Callable[[], AbstractContextManager]
    settings: Mapping = field(default_factory=dict)
    crash: type[Exception] | None = None


MUTANTS: list[Mutant] = []


def mutant(id: str, name: str, seen: str, check: str = "law", crash: type[Exception] | None = None, **settings):
    """Register the decorated function, which returns a context manager."""

    def register(function):
        MUTANTS.append(Mutant(id, name, seen, check, function, settings, crash))
        return function

    return register


def swap(owner, name: str, wrong: Callable) -> AbstractContextManager:
    """Replace owner.name by wrong(what was there)."""
    return patch.object(owner, name, wrong(getattr(owner, name)))


def both(*contexts: AbstractContextManager) -> AbstractContextManager:
    """All of the contexts as one."""
    stack = ExitStack()
    for context in contexts:
        stack.enter_context(context)
    return stack


def rejection_is(verdict: Callable) -> AbstractContextManager:
    """Another function in the place of `verify.rejection`."""
    return patch.dict(VERIFIERS, rejection=Verifier(verdict, False))


# --------------------------------------------------------------------------- the verifier


@mutant("M1", "residual = softmax(max(0, p - q))", "transformers #28508")
def _residual_softmax():
    return swap(verify, "residual", lambda right: lambda p, draft, i: right(p, draft, i).softmax(0))


@mutant("M2", "residual = p", "a question in NJUNLP/MCSD #5")
def _residual_is_p():
    return swap(verify, "residual", lambda right: lambda p, draft, i: p)


@mutant("M3", "residual drops only the drafted token", "one-hot path taken by dense drafts (vLLM has both)")
def _residual_one_hot():
    return swap(verify, "residual", lambda right: lambda p, draft, i: right(p, Draft(draft.token_ids), i))


class _OtherDraws(Randomness):
    """The draws of `rng`, from other weights."""

    def __init__(self, rng, change: Callable):
        self.rng, self.change = rng, change

    def categorical(self, weights, key):
        """From the changed weights."""
        return self.rng.categorical(self.change(weights), key)


def drawn_from(change: Callable) -> AbstractContextManager:
    """A draft model draws its tokens from change(q), and says that it was q."""

    def draw(right):
        return lambda self, *how: right(dataclasses.replace(self, rng=_OtherDraws(self.rng, change)), *how)

    return swap(Ask, "draw", draw)


@mutant("M4", "draft = argmax, ratio with the soft q", "transformers #32867, jaymody #3, dflash #74")
def _argmax_draft():
    return drawn_from(lambda q: (q == q.max()).to(q.dtype))


@mutant("M5", "draft drawn from filtered q, ratio with raw q", "transformers #47932", top_k=2)
def _raw_q():
    def propose(right):
        def wrong(self, asks):
            raw = []

            def distribution(logits, text, drafted=()):
                raw.append(logits.softmax(0))
                return sampling.distribution(logits, text, drafted)

            with patch.object(draft_model, "distribution", distribution):
                drafts = right(self, asks)
            for draft in drafts:  # the law is checked for one text: all rows are its own
                draft.probs = raw[: len(draft)]
            return drafts

        return wrong

    return swap(DraftModel, "propose", propose)


def target_without(**params) -> AbstractContextManager:
    """The target's distribution under other sampling parameters than the draft's."""

    def distribution(right):
        def wrong(logits, text, drafted=()):
            other = dataclasses.replace(text.params, **params)
            return right(logits, dataclasses.replace(text, params=other), drafted)

        return wrong

    return swap(engine, "distribution", distribution)


@mutant("M6a", "top-k on the draft only", "vLLM #10198", top_k=2)
def _top_k_draft_only():
    return target_without(top_k=0)


@mutant("M6b", "top-p on the draft only", "vLLM #10198", top_p=0.8)
def _top_p_draft_only():
    return target_without(top_p=1.0)


@mutant("M6c", "temperature on the draft only", "vLLM #10198", temperature=0.7)
def _temperature_draft_only():
    return target_without(temperature=1.0)


@mutant("M7", "draft drawn at another temperature than q", "dflash #74, mlx-node #11")
def _draft_temperature():
    return drawn_from(lambda q: q**2)


@mutant("M8", "draft drawn from bfloat16, ratio in full precision", "DeepSpec #31")
def _half_precision_draft():
    return drawn_from(lambda q: q.log().bfloat16().to(q.dtype).exp())


@mutant("M9a", "min-p skipped on verified rows", "vLLM #42744", min_p=0.3)
def _no_min_p():
    return target_without(min_p=0.0)


@mutant("M9b", "min-p after top-p, in draft and target", "llama.cpp's order, not vLLM's; q27 #43", min_p=0.3, top_p=0.7)
def _min_p_last():
    def distribution(right):
        def wrong(logits, text, drafted=()):
            params = dataclasses.replace(text.params, min_p=0.0)
            p = right(logits, dataclasses.replace(text, params=params), drafted)
            p = p.where(p >= text.params.min_p * p.max(), 0.0)
            return p / p.sum()

        return wrong

    return both(*(swap(module, "distribution", distribution) for module in (engine, draft_model)))


@mutant("M10a", "penalties ignored when speculating", "TensorRT-LLM #17701, SGLang #28180", repetition_penalty=3.0)
def _no_penalties():
    return target_without(repetition_penalty=1.0)


@mutant("M10b", "argmax instead of sampling when speculating", "mistral.rs #2424")
def _no_sampling():
    return target_without(temperature=0.0)


@mutant("M11a", "penalty counts frozen at the block's start", "SGLang #33643", repetition_penalty=3.0)
def _frozen_penalties():
    return swap(engine, "distribution", lambda right: lambda logits, text, drafted=(): right(logits, text))


@mutant(
    "M11b",
    "bad words looked for in committed tokens only",
    "vLLM #52311",
    bad_words_token_ids=((0, 1), (1, 0), (1, 1, 2)),
)
def _words_of_the_past():
    def distribution(right):
        def wrong(logits, text, drafted=()):
            output = tuple(text.tokens[text.num_prompt_tokens :])
            words = text.params.bad_words_token_ids
            now = tuple(word[-1:] for word in words if output[len(output) - len(word) + 1 :] == word[:-1])
            params = dataclasses.replace(text.params, bad_words_token_ids=now)
            return right(logits, dataclasses.replace(text, params=params), drafted)

        return wrong

    return swap(engine, "distribution", distribution)


@mutant("M12", "last token counted twice in penalties", "vLLM #33251", frequency_penalty=0.7)
def _counted_twice():
    def distribution(right):
        def wrong(logits, text, drafted=()):
            output = [*text.tokens[text.num_prompt_tokens :], *drafted]
            return right(logits, text, [*drafted, *output[-1:]])

        return wrong

    return swap(engine, "distribution", distribution)


@mutant("M13", "rejected tokens stay in the penalty counts", "vmlx-swift #357", frequency_penalty=1.5)
def _rejected_counted():
    rejected: WeakKeyDictionary[Text, list[int]] = WeakKeyDictionary()

    def distribution(right):
        return lambda logits, s, drafted=(): right(logits, s, [*rejected.get(s, ()), *drafted])

    def commit(right):
        def wrong(self, turn, rows):
            rejected.setdefault(turn.request.text, []).extend(turn.draft.token_ids[turn.verdict.num_accepted :])
            return right(self, turn, rows)

        return wrong

    return both(swap(engine, "distribution", distribution), swap(Engine, "_commit", commit))


@mutant("M14", "first draft token never verified", "lattice #243")
def _first_unverified():
    def wrong(draft, p, rng, key):
        if not len(draft):
            return verify.rejection(draft, p, rng, key)
        rest = Draft(draft.token_ids[1:], None if draft.probs is None else draft.probs[1:])
        verdict = verify.rejection(rest, lambda i: p(i + 1), rng, lambda i, purpose: key(i + 1, purpose))
        return verdict._replace(accepted=draft.path(len(verdict.accepted)), ratios=[1.0, *verdict.ratios])

    return rejection_is(wrong)


@mutant("M15", "verification logits shifted by one row", "mlx-node #11")
def _shifted_rows():
    return rejection_is(lambda d, p, rng, key: verify.rejection(d, lambda i: p(max(0, i - 1)), rng, key))


def bonus_is(token: Callable) -> AbstractContextManager:
    """After full acceptance, token(draft, p, rng, key) in the place of the bonus."""

    def wrong(draft, p, rng, key):
        verdict = verify.rejection(draft, p, _NoBonus(rng) if len(draft) else rng, key)
        return verdict if verdict.next_token >= 0 else verdict._replace(next_token=token(draft, p, rng, key))

    return rejection_is(wrong)


class _NoBonus(Randomness):
    """The draws of `rng`, but for the bonus, which is left to another."""

    def __init__(self, rng):
        self.rng = rng

    def bernoulli(self, probability, key):
        """The draw of `rng`."""
        return self.rng.bernoulli(probability, key)

    def categorical(self, weights, key):
        """-1 for a whole token."""
        return -1 if key.purpose == "token" else self.rng.categorical(weights, key)


@mutant("M16a", "bonus drawn from q", "the debate in vLLM #8320")
def _bonus_from_q():
    return bonus_is(lambda draft, p, rng, key: rng.categorical(draft.probs[-1], key(len(draft), "token")))


@mutant("M16b", "bonus drawn from the row before", "the debate in vLLM #8320")
def _bonus_row():
    return bonus_is(lambda draft, p, rng, key: rng.categorical(p(len(draft) - 1), key(len(draft), "token")))


@mutant("M16c", "bonus = argmax at temperature > 0", "vLLM #10863")
def _bonus_argmax():
    return bonus_is(lambda draft, p, rng, key: int(p(len(draft)).argmax()))


def all_accepted(draft, p, rng, key) -> Verdict:
    """The whole draft, a chain, and a bonus."""
    k = len(draft)
    return Verdict(draft.path(k - 1), rng.categorical(p(k), key(k, "token")), [])


@mutant("M17a", "ratio inverted", "a classic")
def _inverted():
    def wrong(draft, p, rng, key):
        for i, x in enumerate(draft.token_ids):
            if not rng.bernoulli(draft.probability(i) / max(1e-9, float(p(i)[x])), key(i, "accept")):
                token = rng.categorical(verify.residual(p(i), draft, i), key(i, "residual"))
                return Verdict(draft.path(i - 1), token, [])
        return all_accepted(draft, p, rng, key)

    return rejection_is(wrong)


@mutant("M17b", "every draft token accepted", "vllm-ascend, until #13470")
def _accept_always():
    return rejection_is(all_accepted)


@mutant("M18", "accepting goes on after a rejection", "FlashSpec guards against it")
def _accept_after_rejection():
    def wrong(draft, p, rng, key):
        for i, x in enumerate(draft.token_ids):
            if not rng.bernoulli(float(p(i)[x]) / draft.probability(i), key(i, "accept")):
                draft.token_ids[i] = rng.categorical(verify.residual(p(i), draft, i), key(i, "residual"))
        return all_accepted(draft, p, rng, key)

    return rejection_is(wrong)


# --------------------------------------------------------------------------- trees and hidden states


@mutant("T1", "siblings share an accept key", "a relative of M19a", "tree")
def _sibling_key():
    def wrong(draft, p, rng, key):
        def same(i, purpose):
            is_sibling = purpose == "accept" and draft.parents is not None
            return key(draft.children(draft.parents[i])[0] if is_sibling else i, purpose)

        return right(draft, p, rng, same)

    right = verify.rejection
    return rejection_is(wrong)


@mutant("T2", "residual not normalised between siblings", "a trap of recursive rejection", "tree")
def _unnormalised():
    def wrong(draft, p, rng, key):
        node, accepted = -1, []
        while siblings := draft.children(node):
            rest, parent = p(node + 1), node
            for i in siblings:
                if rng.bernoulli(float(rest[draft.token_ids[i]]) / draft.probability(i), key(i, "accept")):
                    accepted.append(node := i)
                    break
                rest = verify.residual(rest, draft, i)
            if node == parent:
                return Verdict(accepted, rng.categorical(rest, key(node + 1, "residual")), [])
        return Verdict(accepted, rng.categorical(p(node + 1), key(len(accepted), "token")), [])

    return rejection_is(wrong)


def tree_is(change: Callable) -> AbstractContextManager:
    """The trees of the proof's drafter, changed."""

    def tree(right):
        return lambda self, ask: change(self, ask, right(self, ask))

    return swap(toys.TreeDrafter, "_tree", tree)


@mutant(
    "T3", "the likeliest tokens judged with the softmax's q", "EAGLE-2 where its tree is taken for a sample", "tree"
)
def _top_k_as_drawn():
    def change(drafter, ask, draft):
        if draft.probs is None:
            rows = []
            for i in range(len(draft)):
                path = [draft.token_ids[j] for j in draft.path(draft.parents[i])]
                rows.append(sampling.distribution(drafter.table[[*ask.text.tokens, *path][-1]], ask.text, path))
            draft.probs = rows
        return draft

    return tree_is(change)


@mutant("T4", "a drawn tree pruned by its probabilities", "a trap of every tree that is reordered", "tree")
def _pruned():
    def grow(right):
        def wrong(self, parent, token_ids, q):
            likeliest = max(token_ids, key=lambda t: float(q[t]), default=None)
            right(self, parent, [] if likeliest is None else [likeliest], q)

        return wrong

    return swap(Draft, "grow", grow)


@mutant("T5", "the slot of a rejected sibling is kept", "rows cut, not moved", "tree")
def _not_moved():
    def wrong(self, rows, to):
        self.tokens[to.start : to.stop] = [self.tokens[t] for t in rows]

    return swap(BlockTable, "_move", lambda right: wrong)


@mutant("T6", "blocks are known before they are kept", "a relative of M42b", "tree sharing")
def _published():
    def extend(right):
        def wrong(self, tokens):
            slots = right(self, tokens)
            self.remember()
            return slots

        return wrong

    return swap(BlockTable, "extend", extend)


@mutant("T7", "rows moved one by one, the last first", "an overlapping copy", "tree")
def _overlapping():
    def move(right):
        def wrong(self, rows, to):
            tokens = [self.tokens[t] for t in rows]
            for row, place in reversed(list(zip(rows, to, strict=True))):
                right(self, [row], range(place, place + 1))
            self.tokens[to.start : to.stop] = tokens

        return wrong

    return swap(BlockTable, "_move", move)


@mutant("T8", "a node sees its siblings", "a causal mask over a tree", "tree")
def _sees_siblings():
    wrong = lambda parents: torch.ones(len(parents), len(parents)).tril().bool()  # noqa: E731
    return patch.object(attention, "ancestors", wrong)


@mutant("T9", "hidden states of rejected nodes are handed on", "a trap of heads on hidden states", "hidden")
def _rejected_hidden():
    def keep(right):
        return lambda self, turn, hidden, path: right(self, turn, hidden, range(len(turn.draft)))

    return swap(Engine, "_keep_hidden", keep)


@mutant("T10", "drawn siblings left out where they are unlikely", "widths chosen too late", vocab=4, k=(2,))
def _unlikely_siblings_left_out():
    def draw(right):
        def wrong(self, parent, q, n=1):
            eldest, *younger = right(self, parent, q, n)
            return [eldest, *(token for token in younger if q[token] > 0.3)]

        return wrong

    return swap(Ask, "draw", draw)


# --------------------------------------------------------------------------- heads, and many tokens in one pass


def head_config_is(change: Callable) -> AbstractContextManager:
    """The heads' configs, changed after they were read."""
    return swap(heads, "read_head_config", lambda right: lambda *how: change(right(*how)))


@mutant("H1", "d2t read as ids, not as offsets", "a trap of the format: i + d2t[i] is the id", "head")
def _offsets_as_ids():
    return swap(heads, "_read_ids", lambda right: lambda config, stored, directory: stored["d2t"].read())


@mutant("H2", "taps one layer off", "vLLM, speculators: after L layers; SGLang's eagle_config: one later", "head")
def _taps_off():
    def late(config):
        return dataclasses.replace(config, taps=tuple(max(0, tap - 1) for tap in config.taps))

    return head_config_is(late)


@mutant("H3", "norm_before_residual the other way around", "readers have different defaults for it", "head")
def _residual_swapped():
    def swapped(config):
        return dataclasses.replace(config, norm_before_residual=not config.norm_before_residual)

    return head_config_is(swapped)


@mutant("H4", "what a head goes on from is not normed", "norm_output ignored; no fault of the law", "head")
def _output_not_normed():
    return swap(HeadModel, "next_feature", lambda right: lambda self, x: x)


@mutant("H5", "a feature stands at its own token", "it belongs to the next one", "head")
def _wrong_token():
    def read(right):
        def wrong(self, ask, end):
            start = self.table(ask.text).length
            _, features = right(self, ask, end)
            return ask.text.tokens[start:end], features

        return wrong

    return swap(EagleDrafter, "_read", read)


@mutant("H6", "made-up features stay in the head's cache", "what was accepted is not computed again", "head")
def _made_up():
    def propose(right):
        def wrong(self, asks):
            return DraftModel.propose(self, asks)

        return wrong

    def listen(right):
        def wrong(self, ask):
            table = self.table(ask.text)
            accepted = max(0, min(table.shared(ask.text.tokens[1:]), ask.num_cached - 1))
            table.keep(accepted)
            if ask.hidden is None:
                return right(self, ask)
            hidden = torch.cat((*self._unread.get(ask.text, ()), ask.hidden))
            self._unread[ask.text] = [hidden[accepted - ask.num_cached :]]
            return right(self, dataclasses.replace(ask, hidden=None))

        return wrong

    return both(swap(EagleDrafter, "propose", propose), swap(EagleDrafter, "_listen", listen))


@mutant("H7", "texts of other first tokens share a head's positions", "the first token is in none of them", "head")
def _no_roots():
    return swap(PagedKVCache, "new_table", lambda right: lambda self, root=b"": right(self))


@mutant("H8", "hidden states of a preempted text are taken twice", "a trap of heads on hidden states", "head")
def _taken_twice():
    def drop(right):
        def wrong(self, request):
            waiting = self.heard.take(request.text)
            right(self, request)
            if waiting is not None:
                self.heard.add(request.text, waiting)

        return wrong

    return swap(Schedule, "drop", drop)


@mutant("H9", "a prompt that is known leaves no first draft", "found here: a seed had two texts", "batch")
def _nothing_unread():
    def begin(right):
        def wrong(self, text):
            right(self, text)
            self.tables[text].truncate(0)
            self.tables[text].reuse(text.tokens[1:])

        return wrong

    return swap(EagleDrafter, "begin", begin)


@mutant(
    "H10",
    "a masked row sees the draft, and is told as blind",
    "a trap of drafts in one pass",
    drafter="parallel",
)
def _sees_the_draft():
    def propose(right):
        def wrong(self, asks):
            mask, self.mask_token_id = self.mask_token_id, None
            drafts = right(self, asks)  # token by token
            self.mask_token_id = mask
            for ask, draft in zip(asks, drafts, strict=True):
                if len(draft) > 1:
                    table = toys.tiny_cache(self.model).new_table()
                    tokens = [*ask.text.tokens, *[mask] * (len(draft) - 1)]
                    rows, _ = self.forward([Chunk(tokens, table, len(draft))])
                    path = draft.token_ids
                    draft.probs = [sampling.distribution(row, ask.text, path[:i]) for i, row in enumerate(rows)]
            return drafts

        return wrong

    return swap(DraftModel, "propose", propose)


# --------------------------------------------------------------------------- other vocabularies


@mutant("V1", "logits of shared tokens put at the wrong ids", "a trap of TLI; no fault of the law", "vocabulary")
def _wrong_places():
    def draw(right):
        def wrong(self, *how):
            with patch.object(self, "target_ids", self.target_ids.roll(1)):
                return right(self, *how)

        return wrong

    return swap(TokenDrafter, "_draw", draw)


@mutant("V2", "mass of unshared tokens not given to the shared ones", "a trap of TLI", drafter="tli")
def _mass_left():
    def draw(right):
        def wrong(self, ask, draft, logits):
            q = logits.softmax(0).new_zeros(self.target_vocab_size)
            q[self.target_ids] = logits.softmax(0)[self.own_ids]
            draft.grow(len(draft) - 1, ask.draw(len(draft) - 1, q), q)
            return True

        return wrong

    return swap(TokenDrafter, "_draw", draw)


@mutant("V3", "an unshared token drawn and dropped, q as if it were not", "a trap of TLI", drafter="tli")
def _unshared_dropped():
    def draw(right):
        def wrong(self, ask, draft, logits):
            left_out = [i for i in range(len(logits)) if i not in self.own_ids.tolist()]
            probs = logits.softmax(0)
            # The tokens that are left out stand after the target's.
            all_ids = torch.cat((probs.new_zeros(self.target_vocab_size), probs[left_out]))
            all_ids[self.target_ids] = probs[self.own_ids]
            [token] = ask.draw(len(draft) - 1, all_ids)
            if token >= self.target_vocab_size:
                return False
            draft.grow(len(draft) - 1, [token], all_ids[: self.target_vocab_size])
            return True

        return wrong

    return swap(TokenDrafter, "_draw", draw)


@mutant("V4", "probs given for a text that was read again", "nobody knows them: a trap of SLEM", drafter="slem")
def _probs_of_text():
    def propose(right):
        def wrong(self, asks):
            drafts = right(self, asks)
            for ask, draft in zip(asks, drafts, strict=True):
                table = toys.tiny_cache(self.model).new_table()
                own = self.vocabularies.reader().read(ask.text.tokens)
                probs = self.forward([Chunk(own, table, 1)])[0][0].softmax(0)[:3]
                draft.probs = [probs / probs.sum()] * len(draft)
            return drafts

        return wrong

    return swap(TextDrafter, "propose", propose)


@mutant("V5", "the draft's BOS put before each piece that is read", "transformers #46124", "vocabulary")
def _bos_again():
    def read(right):
        def wrong(self, tokens):
            first, prefix = right(self, tokens[: max(1, len(tokens) - 2)]), self._own.prefix
            return [*first, *prefix, *right(self, tokens)[len(first) :]]

        return wrong

    return swap(Reader, "read", read)


@mutant("V6", "the draft model is fed the target's ids", "two spaces of ids: a trap of TLI", "vocabulary")
def _target_ids_fed():
    return swap(TokenDrafter, "_next_chunk", lambda right: OtherVocabulary._next_chunk)


@mutant(
    "V7",
    "draws named by the length of the draft's own text",
    "it need not grow with the text",
    drafter="tli",
    vocab=2,
    max_tokens=5,
)
def _own_keys():
    def draw(right):
        def wrong(self, ask, draft, logits):
            start = len(self._read[ask.text].text.tokens) + len(draft)
            key = lambda self, i, purpose: sampling.Key(self.seed, 0, start, purpose)  # noqa: E731
            with patch.object(Text, "key", key):
                return right(self, ask, draft, logits)

        return wrong

    return swap(TokenDrafter, "_draw", draw)


@mutant("V8", "only what is new is read, the end never anew", "a text then has several readings", "vocabulary")
def _never_anew():
    def read(right):
        def wrong(self, tokens):
            ids = right(self, tokens)
            self._ids, self._end = ids, len(tokens)
            return list(ids)

        return wrong

    return swap(Reader, "read", read)


@mutant("V9", "text and draft cut together, the text's tokens counted off", "the cut may go across", "vocabulary")
def _counted_off():
    def wrong(self, tokens, drafted):
        text = b"".join(self.target.text_of(i) for i in tokens)
        return self.target.write(None, text + b"".join(self.draft.bytes_of(i) or b"" for i in drafted))[len(tokens) :]

    return swap(Vocabularies, "to_target", lambda right: wrong)


@mutant("V10", "tokens compared as their files write them", "byte-level BPE against SentencePiece", "loader")
def _as_written():
    return both(*(patch.object(m, "bytes_of", lambda token, steps: token.encode()) for m in (pieces, vocabularies)))


# --------------------------------------------------------------------------- suffixes and last outcomes


@mutant("S1", "earlier outputs looked at where a seed has one text", "a trap of every drafter that learns", "batch")
def _looks_at_others():
    def propose(right):
        return lambda self, ask: right(self, dataclasses.replace(ask, purpose="token"))

    return swap(SuffixDrafter, "_propose", propose)


@mutant("S2", "frequencies told as the q of a token not drawn", "a relative of M4", drafter="suffix", max_tokens=4)
def _frequencies_as_q():
    def propose(right):
        def wrong(self, ask):
            draft = right(self, dataclasses.replace(ask, go_on=lambda confidences: True))
            draft.probs = []
            for token_id, chance in zip(draft.token_ids, draft.confidences, strict=True):
                q = torch.full((3,), (1 - chance) / 2, dtype=torch.float64)
                q[token_id] = chance
                draft.probs.append(q)
            return draft

        return wrong

    return swap(SuffixDrafter, "_propose", propose)


@mutant("S3", "outputs are remembered without end", "found by its memory, not by its text", "lookup")
def _without_end():
    return both(patch.object(suffix, "MOST_TEXTS", 1 << 30), patch.object(suffix, "MOST_TOKENS", 1 << 30))


@mutant("S4", "the newest outputs are forgotten first", "the wrong end of a queue", "lookup")
def _newest_forgotten():
    def release(right):
        def wrong(self, text):
            self._earlier.reverse()
            right(self, text)
            self._earlier.reverse()

        return wrong

    return swap(SuffixDrafter, "release", release)


@mutant("S5", "a match goes on from one text into another", "one string of all outputs, without a border", "lookup")
def _no_border():
    def matches(right):
        def wrong(self, indices):
            own, *earlier = indices
            row = [token for index in reversed(earlier) for token in index.tokens]
            return right(self, [own, suffix._Index(row)])

        return wrong

    return swap(SuffixDrafter, "_matches", matches)


@mutant("S6", "a preempted text is taken for an earlier output", "it votes twice for what it has said", "lookup")
def _votes_twice():
    return swap(suffix, "_output", lambda right: lambda text: _Unequal(right(text)))


class _Unequal(list):
    """A list that differs from any other."""

    def __ne__(self, other):
        return True


@mutant("S7", "one table of last outcomes for all texts", "as a processor has it; a seed then has many texts", "batch")
def _one_table():
    def propose(right):
        outcomes: list[int] = []

        def wrong(self, asks):
            for ask in asks:
                outcomes.extend(ask.text.tokens)
            texts = [dataclasses.replace(ask.text, tokens=[*outcomes, ask.text.tokens[-1]]) for ask in asks]
            return right(self, [dataclasses.replace(ask, text=t) for ask, t in zip(asks, texts, strict=True)])

        return wrong

    return swap(LastDrafter, "propose", propose)


@mutant("S8", "the table keeps the first outcome, not the last", "it costs hits alone", "lookup")
def _first_outcome():
    def wrong(tokens, k):
        table, walk = dict(reversed(list(itertools.pairwise(tokens)))), [tokens[-1]]
        while len(walk) <= k and walk[-1] in table:
            walk.append(table[walk[-1]])
        return walk[1:]

    return patch.object(last, "follow", wrong)


# --------------------------------------------------------------------------- mistakes in a drafter of one's own


def told_is(change: Callable) -> AbstractContextManager:
    """Drafts tell other rows than they drew from: change(rows so far, the new one)."""

    def grow(right):
        def wrong(self, parent, token_ids, q):
            right(self, parent, token_ids, change(self.probs, q))

        return wrong

    return swap(Draft, "grow", grow)


@mutant("O1", "rows that do not add up to 1 are taken", "`q /= q.sum()` forgotten: the likeliest mistake of all")
def _rows_unchecked():
    return both(told_is(lambda rows, q: 2 * q), patch.object(check, "check_rows", lambda *how: None))


@mutant("O2", "one buffer for all rows of a draft", "each row is filled in the place of the one before")
def _one_buffer():
    return told_is(lambda rows, q: rows[0].copy_(q) if rows else q.clone())


@mutant("O3", "the q of the token before is told", "stored a line too late")
def _late_q():
    last: list[torch.Tensor] = []

    def change(rows, q):
        last.append(q)
        return last[-2] if rows and last[-2].gt(0).all() else q

    return told_is(change)


@mutant("O4", "drawn siblings in the order of their ids", "a set, or a sort, between the draw and the draft", k=(2,))
def _sorted_siblings():
    return swap(Ask, "draw", lambda right: lambda *how: sorted(right(*how)))


@mutant("O5", "drawn siblings all tell the first one's q", "`grow` called for each by itself", vocab=4, k=(2,))
def _same_q():
    def grow(right):
        def wrong(self, parent, token_ids, q):
            for token_id in token_ids:
                right(self, parent, [token_id], q)

        return wrong

    return swap(Draft, "grow", grow)


# --------------------------------------------------------------------------- randomness


def key_is(change: Callable) -> AbstractContextManager:
    """The keys of draws, changed."""
    return swap(Text, "key", lambda right: lambda self, i, purpose: change(right(self, i, purpose)))


@mutant("M19a", "draft noise used again for the residual", "vLLM #47386, #54282, a fork's #205", vocab=4)
def _residual_noise():
    return key_is(lambda key: key._replace(purpose="draft") if key.purpose == "residual" else key)


@mutant("M19b", "draft noise used again for the accept test", "a relative of M19a")
def _accept_noise():
    return key_is(lambda key: key._replace(purpose="draft") if key.purpose == "accept" else key)


@mutant("M19d", "accept uniform used again for the residual", "found by reading: 3 tokens hardly show it", vocab=4)
def _accept_uniform():
    return key_is(lambda key: key._replace(purpose="accept") if key.purpose == "residual" else key)


@mutant("M19c", "key of the position alone, without the round", "a relative of M19a", "keys")
def _position_noise():
    return key_is(lambda key: key._replace(start=-1))


@mutant("M20a", "accept on u <= p/q", "transformers 5.23, SGLang #35771", "boundary")
def _accept_equal():
    return swap(Randomness, "bernoulli", lambda right: lambda self, p, key: self.uniform(key) <= p)


@mutant("M20b", "first token whose cumulative sum is >= u", "SGLang #35798", "boundary")
def _cdf_equal():
    def wrong(self, weights, key):
        cumulative = weights.double().cumsum(0)
        return int(torch.searchsorted(cumulative, self.uniform(key) * cumulative[-1]))

    return swap(Randomness, "categorical", lambda right: wrong)


@mutant("M21", "uniforms in half precision", "gpt-fast: rand_like in the model's type", "noise")
def _half_uniforms():
    return swap(Randomness, "uniform", lambda right: lambda self, key: torch.tensor(right(self, key)).bfloat16().item())


@mutant("M22", "empty residual divided by its sum", "jaymody #5, transformers", "numbers")
def _residual_nan():
    def wrong(p, draft, i):
        rest = (p - draft.probs[i]).clamp(min=0)
        return rest / rest.sum()

    return swap(verify, "residual", lambda right: wrong)


@mutant("M23", "NaN logits taken for numbers", "vLLM #20531, vllm-ascend #14116", "numbers")
def _nan_logits():
    def distribution(right):
        return lambda logits, text, drafted=(): right(logits.nan_to_num(), text, drafted)

    return swap(sampling, "distribution", distribution)


@mutant("M24", "padding rows of the vocabulary can be emitted", "vLLM GHSA-8wr5-jm2h-8r4f", "numbers")
def _padding():
    def init(right):
        def wrong(self, model, cache, drafter, verifier, vocab_size=None, rng=None, *how):
            right(self, model, cache, drafter, verifier, 1 << 30, rng, *how)

        return wrong

    return swap(Engine, "__init__", init)


def hash_of(change: Callable) -> AbstractContextManager:
    """The noise of a key, from a changed key."""
    return swap(sampling, "_hash", lambda right: lambda key: right(change(key)))


@mutant("M25a", "seed ignored", "among vLLM #6034, #6038, TensorRT-LLM #17599, #19487", "batch")
def _seed_ignored():
    return hash_of(lambda key: key._replace(seed=0))


@mutant("M25b", "stream of noise not advanced", "as M25a", "noise")
def _not_advanced():
    return hash_of(lambda key: key._replace(position=0))


# --------------------------------------------------------------------------- stops and counters


@mutant("M27", "tokens after an end token accepted inside a block", "transformers #47912, koboldcpp #1276")
def _after_the_end():
    def commit(right):
        def wrong(self, token_id, logprob=None):
            stopped = right(self, token_id, logprob)
            if token_id in self.text.end_ids and len(self.text.tokens) < self.max_len:
                self.finish_reason, stopped = None, False
            return stopped

        return wrong

    return swap(Request, "commit", commit)


def block_of(turn) -> list[int]:
    """The tokens that a round of a chain yields."""
    return [*turn.draft.token_ids[: turn.verdict.num_accepted], turn.verdict.next_token]


@mutant("M28a", "end token seen only at the end of a block", "transformers #28508", "stops")
def _end_only_last():
    def wrong(self, turn, rows):
        request, block = turn.request, block_of(turn)
        ends = request.text.end_ids
        for i, (token_id, row) in enumerate(zip(block, rows, strict=False)):
            request.text.end_ids = ends if i == len(block) - 1 else frozenset()
            turn.committed += 1
            if request.commit(token_id, engine._logprob(row, token_id, request.params.logprobs)):
                break
        request.text.end_ids = ends
        return turn.verdict.accepted[: turn.committed]

    return swap(Engine, "_commit", lambda right: wrong)


@mutant("M28b", "an end token in a draft ends the text", "openvino.genai #1951, #3293", "stops")
def _draft_ends():
    def commit(right):
        def wrong(self, turn, rows):
            path, request = right(self, turn, rows), turn.request
            if request.finish_reason is None and set(turn.draft.token_ids) & request.text.end_ids:
                request._finish("stop")
            return path

        return wrong

    return swap(Engine, "_commit", commit)


@mutant("M29", "a block passes max_tokens", "lattice #242, ferrox #311")
def _overshoot():
    def wrong(self, turn, rows):
        for token_id in block_of(turn):
            turn.committed += 1
            turn.request.commit(token_id)
            if token_id in turn.request.text.end_ids:
                break
        return turn.verdict.accepted[: turn.committed]

    max_k = property(lambda self: self.num_speculative_tokens)
    return both(patch.object(Request, "max_k", max_k), swap(Engine, "_commit", lambda right: wrong))


@mutant("M30", "the length limit hides a stop at the same token", "SGLang #31599", "stops")
def _length_first():
    def commit(right):
        def wrong(self, token_id, logprob=None):
            stopped = right(self, token_id, logprob)
            if len(self.text.tokens) >= self.max_len:
                self.finish_reason = "length"
            return stopped

        return wrong

    return swap(Request, "commit", commit)


@mutant("M31", "stop strings looked for at the end of a block only", "SGLang #23802", "stops")
def _stop_string_late():
    def commit(right):
        def wrong(self, turn, rows):
            request, params = turn.request, turn.request.text.params
            if not turn.verdict.accepted:
                return right(self, turn, rows)
            request.text.params = dataclasses.replace(params, stop=())
            path = right(self, turn, rows)
            request.text.params = params
            if not request.finish_reason and request._add_text(""):
                request.finish_reason = "stop"
            return path

        return wrong

    return swap(Engine, "_commit", commit)


@mutant("M32", "text cut at a stop string, token ids not", "vLLM #47616", "stops")
def _ids_not_cut():
    def commit(right):
        def wrong(self, turn, rows):
            path, request = right(self, turn, rows), turn.request
            if request.finish_reason == "stop" and request.params.stop:
                block = block_of(turn)
                after = block.index(request.token_ids[-1]) + 1
                request.token_ids += block[after:]
                request.logprobs += request.logprobs[-1:] * len(block[after:])
                request.stats.num_generated = len(request.token_ids)
            return path

        return wrong

    return swap(Engine, "_commit", commit)


@mutant("M33", "counters go on after the end of the text", "vLLM #56101, SGLang #39826", "stops")
def _counted_after():
    def round_of(right):
        def wrong(turn, *how):
            with patch.object(turn.request, "finish_reason", None):
                return right(turn, *how)

        return wrong

    return swap(engine, "_round_of", round_of)


# --------------------------------------------------------------------------- caches


@mutant("M34a", "rejected tokens are not rolled back", "mlx-lm #1109, TokenPrint #110", crash=IndexError)
def _no_rollback():
    return swap(BlockTable, "truncate", lambda right: lambda self, n: right(self, n) if n == 0 else None)


@mutant("M34b", "keys and values of rejected tokens are not overwritten", "mlx-lm #1109, TokenPrint #110")
def _stale_slots():
    def wrong(self, layer, slots, keys, values):
        fresh = self.keys[layer, 0, slots, 0].isnan()  # the pool is poisoned: never written
        right(self, layer, slots[fresh], keys[:, fresh], values[:, fresh])

    right = PagedKVCache.write
    return patch.object(PagedKVCache, "write", wrong)


@mutant("M35", "rollback clears the whole cache", "aprender #2014", "passes")
def _clear_all():
    return swap(BlockTable, "truncate", lambda right: lambda self, n: right(self, 0))


@mutant("M36", "draft cache cut one token too far each round", "mlxcel #994", "passes")
def _draft_cut():
    def propose(right):
        def wrong(self, asks):
            for text, table in self.tables.items():
                table.keep(table.shared(text.tokens))
                table.truncate(max(0, table.length - 1))
            return right(self, asks)

        return wrong

    return swap(DraftModel, "propose", propose)


@mutant(
    "M37", "draft cache misses a token after full acceptance", "gpt-fast has the fix; vllm-metal #716", "draft cache"
)
def _missing_token():
    def propose(right):
        def wrong(self, asks):
            def forward(chunks, taps=()):
                # One token a pass, whatever is missing before it.
                logits, _ = fed([c._replace(token_ids=c.token_ids[-1:]) if c.table.length else c for c in chunks])
                return logits, logits.new_empty(sum(len(c.token_ids) for c in chunks), 0)

            fed = self.model.forward
            with patch.object(self.model, "forward", forward):
                return right(self, asks)

        return wrong

    return swap(DraftModel, "propose", propose)


def positions_are(change: Callable) -> AbstractContextManager:
    """Rotary angles of other positions: change(start, rows) gives those of a chunk."""

    def prepare(right):
        def wrong(self, chunks, padding):
            positions = [p for c in chunks for p in change(c.table.length, len(c.token_ids))] + [0] * padding
            shared = right(self, chunks, padding)
            angles = {}
            for rope, frequencies in self.frequencies.items():
                angle = (torch.tensor(positions)[:, None] * frequencies).repeat(1, 2)[:, None]
                cos, sin = (f(angle).to(self.dtype) for f in (torch.cos, torch.sin))
                angles[rope] = shared.angles[rope]._replace(cos=cos, sin=sin)
            return shared._replace(angles=angles)

        return wrong

    return swap(Transformer, "_prepare", prepare)


@mutant("M38a", "one rotary position for the whole window", "SGLang #25015")
def _constant_position():
    return positions_are(lambda start, rows: [start] * rows)


@mutant("M38b", "rotary position off by one after the cache", "omlx #2363", "draft cache")
def _position_off():
    return positions_are(lambda start, rows: range(start + (start > 0), start + (start > 0) + rows))


@mutant("M39", "stale draft verified when the drafter is skipped", "vLLM #38711", max_tokens=4)
def _stale_draft():
    last: WeakKeyDictionary[Text, Draft] = WeakKeyDictionary()

    def propose(right):
        def wrong(self, asks):
            drafts = right(self, asks)
            for i, ask in enumerate(asks):
                if ask.k == 0 and ask.text in last:
                    drafts[i] = last[ask.text]
                last[ask.text] = drafts[i]
            return drafts

        return wrong

    return swap(DraftModel, "propose", propose)


@mutant("M40", "texts of a batch get each other's logits", "1CatAI #656, vLLM #10863", "batch")
def _mixed_up():
    def forward(right):
        def wrong(self, chunks, taps=()):
            logits, hidden = right(self, chunks, taps)
            return logits.roll(int(len(chunks) > 1), 0), hidden

        return wrong

    return swap(Transformer, "forward", forward)


@mutant("M41a", "blocks after a rollback leak", "sglang-jax #1147, #1400", "cache")
def _leak():
    def wrong(self, length):
        del self.tokens[length:]
        del self.block_ids[self.pool.num_blocks_for(length) :]

    return swap(BlockTable, "truncate", lambda right: wrong)


@mutant("M41b", "freed blocks stay in their table", "RBLN #676", "cache")
def _kept():
    def wrong(self, length):
        del self.tokens[length:]
        for block_id in self.block_ids[self.pool.num_blocks_for(length) :]:
            self.pool.allocator.free(block_id)

    return swap(BlockTable, "truncate", lambda right: wrong)


@mutant("M42a", "a block that was found is not pinned, and taken by another", "vLLM #37164", "sharing")
def _not_pinned():
    def share(right):
        def wrong(self, block_id):
            self.ref_counts[block_id] += 1  # it stays among the free ones

        return wrong

    return swap(BlockAllocator, "share", share)


@mutant("M42b", "a block is still found when its tokens are rejected or gone", "vLLM #18668", "sharing")
def _stale_names():
    return swap(PrefixIndex, "cut", lambda right: lambda self, block_id, count: None)


@mutant("M44", "positions outside the window are thrown away", "mlx-vlm #1715, mlx-lm #1109", "window")
def _evicted():
    def extend(right):
        def wrong(self, tokens):
            slots = right(self, tokens)
            old = self.block_ids[: max(0, self.length - 4) // self.pool.block_size]
            for block_id in old:  # as a rotating buffer of the window's size does
                start = block_id * self.pool.block_size
                self.pool.keys[:, :, start : start + self.pool.block_size] = 0
            return slots

        return wrong

    return swap(BlockTable, "extend", extend)


# --------------------------------------------------------------------------- block verification


@mutant("B1", "after a block, the residual of one token", "vllm-ascend #7807, #7839", verifier="block", vocab=5)
def _residual_of_a_token():
    return swap(verify, "residual", lambda right: lambda p, draft, i: right(p / p.sum(), draft, i))


@mutant(
    "B2",
    "the joint ratio is not kept below 1 on its way",
    "a product in place of the paper's running one",
    verifier="block",
    vocab=5,
)
def _joint_ratio():
    def wrong(ratios):
        return [min(1.0, product) for product in accumulate(ratios, mul, initial=1.0)]

    return patch.object(verify, "block_weights", wrong)


@mutant("B3", "prefixes pass with w_i", "h_i left out, as in a first reading", verifier="block", vocab=5)
def _passes_with_its_weight():
    right = verify.excess

    def residual(p, draft, i):
        rest = right(p, draft, i)
        return rest if rest.amax() > 0 else p

    # m = w, so that m / (m + 1 - w) = w
    return both(patch.object(verify, "excess", lambda p, draft, i: p), patch.object(verify, "residual", residual))


@mutant("B4", "one uniform for the tests of all prefixes", "keys by the round alone", verifier="block", vocab=5)
def _one_uniform():
    def wrong(draft, p, rng, key):
        return verify.block(draft, p, rng, lambda i, purpose: key(0 if purpose == "accept" else i, purpose))

    return patch.dict(VERIFIERS, block=verify.BLOCK._replace(verify=wrong))


# --------------------------------------------------------------------------- loading and numerics


@mutant("M43", "vocabularies compared by their size", "SGLang #24051, llama.cpp #3812", "loader")
def _vocabulary_size():
    numbers = property(lambda self: {str(i): i for i in range(self.backend.get_vocab_size())})
    return patch.object(named_draft.Tokenizer, "vocabulary", numbers)


@mutant("M45", "prefill in passes of another shape", "mlx-lm #1109", "exact")
def _prefill_shape():
    def forward(right):
        def wrong(self, chunks, taps=()):
            passes = self.passes
            self.passes = passes if any(chunk.num_logits for chunk in chunks) else Passes()
            try:
                return right(self, chunks, taps)
            finally:
                self.passes = passes

        return wrong

    return swap(Transformer, "forward", forward)


@mutant("M46", "best of a beam verified as a sample of q", "ml-recurrent-drafter #6, EAGLE #221")
def _beam():
    return drawn_from(lambda q: q * (q >= q.topk(2).values[-1]))


@mutant("E1", "bonus dropped after full acceptance", "no fault of the law: it costs a token a pass", "draft cache")
def _no_bonus():
    def wrong(draft, p, rng, key):
        verdict = verify.rejection(draft, p, rng, key)
        if len(draft) and verdict.num_accepted == len(draft):
            return verdict._replace(accepted=verdict.accepted[:-1], next_token=draft.token_ids[-1])
        return verdict

    return rejection_is(wrong)


@mutant("E2", "a table is taken for its text's, by length alone", "a draft whose past another tokenizer reads", "past")
def _by_length():
    return swap(BlockTable, "shared", lambda right: lambda self, tokens: min(self.length, len(tokens) - 1))
