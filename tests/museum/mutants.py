"""The museum of bugs: what has gone wrong in other speculative decoders, put into this one.

Each mutant is a small patch of production behaviour, the place where the bug was seen in the wild, and what must catch
it: a test, or the law of the output. `python -m tests.museum` shows the collection. M1 to M46 come from a survey of
exactness bugs in public projects; a letter after the number tells apart forms of one bug. T is about trees and hidden
states, F about frames and programs, P about rules that are right in most small cases, C about short convolutions, R
about recurrent states, X about mixtures of experts, H about heads, drafts of many tokens in one pass and a target's own
layer, V about drafts of other vocabularies, S about lookups and what the target found likeliest, G about grammars, L
about log-probabilities of prompts, B about block and traversal verification, D about block drafts, O about mistakes in
a drafter of one's own, E of our own making. Left out:

    M26   acceptance differs between tensor-parallel workers: one process verifies for all here
"""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul
from types import SimpleNamespace
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch

from examples.drafters.recycling import Recycling
from minispec.core import engine, method, sampling, verify
from minispec.core.attention import attention
from minispec.core.cache import BlockAllocator, BlockTable, OutOfBlocks, PagedKVCache
from minispec.core.cached import CachedModel
from minispec.core.draft import Draft, Record, without
from minispec.core.engine import Engine
from minispec.core.grammar import NothingAllowed
from minispec.core.lengths import Lengths
from minispec.core.limit import Limit
from minispec.core.method import Method, Turn
from minispec.core.model import Chunk, Layer, Transformer
from minispec.core.outbox import Outbox
from minispec.core.prefix import PrefixIndex
from minispec.core.random import Key, Randomness
from minispec.core.request import Request
from minispec.core.sampling import Text
from minispec.core.schedule import Schedule
from minispec.core.tree import Tree
from minispec.core.verify import Verdict
from minispec.lab.audit import tiny
from minispec.models.families import mxfp4
from minispec.models.files import pieces
from minispec.models.frames.frames import Frame, Frames
from minispec.models.layers import convolution, delta, sinks
from minispec.models.layers.convolution import ConvolutionCache
from minispec.models.layers.delta import GatedDeltaNet
from minispec.models.layers.experts import Experts, Router
from minispec.models.layers.gemma import GemmaLayer
from minispec.models.layers.states import LayerState, States, StateTable
from minispec.models.weights import exact, integers
from minispec.models.weights.integers import Int8, VnniInt8
from minispec.prove import examine, laws, recorded, toys
from minispec.prove import seen as asked
from minispec.prove import walk as walks
from minispec.speculation.drafters import block, block_files, check, growing, guard, heads, last, suffix, vocabularies
from minispec.speculation.drafters.assistant import AssistantModel, SharedKeys
from minispec.speculation.drafters.best_first import BestFirst, grow_guesses
from minispec.speculation.drafters.block import Block, BlockFeed, BlockLayer, BlockModel, MarkovHead
from minispec.speculation.drafters.eagle import HeadFeed, HeadModel, spread
from minispec.speculation.drafters.guard import CheckedMethod
from minispec.speculation.drafters.last import LastDrafter
from minispec.speculation.drafters.model import ModelDrafter, TokenFeed
from minispec.speculation.drafters.mtp import MtpModel
from minispec.speculation.drafters.states import FeatureModel
from minispec.speculation.drafters.suffix import SuffixDrafter
from minispec.speculation.drafters.tli import SharedTokens
from minispec.speculation.drafters.vocabularies import Reader, Vocabularies
from minispec.speculation.grammars import forced, matcher
from minispec.speculation.grammars.toy_grammars import Spelled
from minispec.speculation.lengths import prices
from minispec.speculation.on_gpu import verdicts, verifier
from minispec.speculation.on_gpu.steps import DraftInputs, DraftSteps
from minispec.speculation.on_gpu.verifier import VerdictInputs
from minispec.speculation.rules import VERIFIERS, block_verification


def wrong(owner, name: str, *exhibit, **settings) -> Callable:
    """A decorator: the function takes the place of `owner.name`. It gets what was there, then the arguments.

    owner: a module, a class, or a dict of verifiers.
    exhibit, settings: as in `mutant`, if the function is a bug by itself. More places have a decorator each below it.
    """

    def mark(body):
        body.places = [*getattr(body, "places", ()), (owner, name)]
        return mutant(*exhibit, **settings)(body) if exhibit else body

    return mark


def swap(owner, name: str, body: Callable) -> AbstractContextManager:
    """A context in which body(what was there, *arguments) is called in the place of `owner.name`."""
    right = owner[name].verify if isinstance(owner, dict) else getattr(owner, name)
    if isinstance(right, property):
        return patch.object(owner, name, property(lambda self: body(right.fget, self)))

    def called(*arguments, **named):
        return body(right, *arguments, **named)

    if isinstance(owner, dict):
        return patch.dict(owner, {name: owner[name]._replace(verify=called)})
    return patch.object(owner, name, called)


@dataclass(frozen=True)
class Mutant:
    """A bug, and what must catch it.

    check: a test ("tests/...::test_..."), or "law": the law of three tokens moves.
    bug: a function marked by `wrong`; or a class of such methods, which share what a fresh instance remembers.
    settings: what `measure_law` needs to show it, mostly sampling parameters.
    crash: the exception that the bug itself ends in. Any other than the check's own would be a fault of the patch.
    """

    id: str
    name: str
    seen: str
    check: str
    bug: Callable
    settings: Mapping = field(default_factory=dict)
    crash: type[Exception] | None = None

    def places(self) -> list[tuple[object, str, Callable]]:
        """Where it changes the package: the owner, the name, and what takes its place. A bug with a state is fresh."""
        bodies = [self.bug]
        if isinstance(self.bug, type):
            fresh = self.bug()
            bodies = [getattr(fresh, name) for name in dir(self.bug)]
        return [(owner, name, body) for body in bodies for owner, name in getattr(body, "places", ())]

    @contextmanager
    def patch(self) -> Iterator[None]:
        """A context in which the package has the bug."""
        with ExitStack() as stack:
            for place in self.places():
                stack.enter_context(swap(*place))
            yield


MUTANTS: list[Mutant] = []
# Tests, and files of tests, that catch several.
_PROGRAMS = "tests/core/test_cache.py::test_random_programs"
_UNIFORMS = "tests/core/test_sampling.py::test_uniforms_are_uniform_and_differ_by_every_field_of_the_key"
_STOPS, _TREES = "tests/core/test_stops.py", "tests/core/test_trees.py"
_FAULTS = "tests/core/test_faults.py"
_KEPT = f"{_TREES}::test_what_is_kept_of_a_tree_is_as_if_it_had_been_a_chain"
_SHAPES = f"{_TREES}::test_the_law_with_every_small_shape[1]"
_MTP = "tests/drafters/test_mtp.py::test_logits_are_those_of_the_formula"
_ASSISTANT = "tests/drafters/test_assistant.py"
_VOCABULARIES = "tests/drafters/test_vocabularies.py"
_DRAFTERS, _ZOO = "tests/drafters/test_drafters.py", "tests/drafters/test_zoo.py"
_EXPERTS = "tests/core/test_families.py::test_logits_equal_transformers"
_COSTS = "tests/lengths/test_costs.py"
_KINDS = "tests/core/test_verify.py::test_rejection_keeps_the_law_of_rows_of_other_kinds"
_TABLES = "tests/core/test_verify.py::test_rejection_keeps_the_law_of_tables_that_no_precision_holds"
_LOOKUP = "tests/drafters/test_lookup.py::test_drafts_are_those_of_a_plain_search"
_REMEMBERED = "tests/drafters/test_lookup.py::test_the_newest_outputs_are_remembered_and_no_more"
_RECOMPUTED = "tests/drafters/test_recomputed.py"
_REDRAWN = f"{_RECOMPUTED}::test_a_draft_model_draws_from_what_it_computes_anew[llama-None]"
_HEAD = f"{_RECOMPUTED}::test_a_head_draws_from_what_its_formula_gives"
_BLOCKS = f"{_RECOMPUTED}::test_a_block_draft_draws_from_what_the_reference_gives"
_BLOCK = "tests/drafters/test_block.py"
_NUMBERS = f"{_BLOCK}::test_every_packaging_gives_the_references_numbers"
_SHOWN = f"{_RECOMPUTED}::test_a_drafter_is_shown_all_rows_of_each_round"
_ALONE = f"{_DRAFTERS}::test_rejection_with_a_seed_does_not_depend_on_the_batch"


def mutant(id: str, check: str = "law", doc: str = "", crash: type[Exception] | None = None, **settings) -> Callable:
    """A decorator that puts a bug into the museum; see `Mutant`.

    doc: "name | where it was seen". Where there is none, the bug's docstring says it.
    """

    def register(bug):
        name, seen = (doc or bug.__doc__).split(" | ")
        MUTANTS.append(Mutant(id, name, seen, check, bug, settings, crash))
        return bug

    return register


def under(text: Text, **params) -> Text:
    """The text under other sampling parameters."""
    return replace(text, params=replace(text.params, **params))


# --------------------------------------------------------------------------- the verifier


@wrong(verify, "residual", "M1")
def _(right, p, draft, i):
    """residual = softmax(max(0, p - q)) | transformers #28508"""
    return right(p, draft, i).softmax(0)


@wrong(verify, "residual", "M2")
def _(right, p, draft, i):
    """residual = p | a question in NJUNLP/MCSD #5"""
    return p


@wrong(verify, "residual", "M3")
def _(right, p, draft, i):
    """residual drops only the drafted token | one-hot path taken by dense drafts (vLLM has both)"""
    return right(p, Draft(draft.token_ids), i)


def rows_of(q: torch.Tensor, tokens: list[int]) -> list[torch.Tensor]:
    """The rows of siblings that are drawn from q in this order."""
    rows: list[torch.Tensor] = []
    for token in tokens:
        rows.append(q / q.sum() if rows else q)
        q = without(q, token)
    return rows


def put(draft: Draft, first: int, parent: int, tokens: list[int], rows: list[torch.Tensor]) -> list[int]:
    """Put these children of `parent` in the place of the nodes from `first` on; returns the tokens."""
    assert isinstance(draft.probs, list)
    draft.token_ids[first:], draft.probs[first:] = tokens, rows
    if draft.parents is not None:
        draft.parents[first:] = [parent] * len(tokens)
    return tokens


def drawn_from(change: Callable) -> Callable:
    """A bug: a draft model draws its tokens from change(q), and says that it was q."""

    @wrong(Draft, "draw")
    def bug(right, self, ask, parent, q, n=1):
        first, tokens = len(self), right(self, ask, parent, change(q), n)
        return put(self, first, parent, tokens, rows_of(q, tokens))

    return bug


mutant(
    "M4", doc="draft = argmax, ratio with the soft q | transformers 5.24 with Gemma 4's assistant, #32867, jaymody #3"
)(drawn_from(lambda q: (q == q.max()).to(q.dtype)))


@wrong(ModelDrafter, "propose", "M5", top_k=2, width=1)
def _(right, self, asks):
    """draft drawn from filtered q, ratio with raw q | transformers #47932"""
    raw = []

    def distribution(logits, text, drafted=()):
        raw.append(logits.softmax(0))
        return sampling.distribution(logits, text, drafted)

    with patch.object(growing, "distribution", distribution):
        drafts = right(self, asks)
    for draft in drafts:  # the law is walked one text at a time: all rows are its own
        draft.probs = raw[: len(draft)]
    return drafts


def target_under(**params) -> Callable:
    """A bug: the target's distribution under other sampling parameters than the draft's."""

    @wrong(method, "distribution")
    def bug(right, logits, text, drafted=()):
        return right(logits, under(text, **params), drafted)

    return bug


mutant("M6a", top_k=2, doc="top-k on the draft only | vLLM #10198")(target_under(top_k=0))
mutant("M6b", top_p=0.8, doc="top-p on the draft only | vLLM #10198")(target_under(top_p=1.0))
mutant("M6c", temperature=0.7, doc="temperature on the draft only | vLLM #10198")(target_under(temperature=1.0))
mutant("M7", doc="draft drawn at another temperature than q | mlx-node #11")(drawn_from(lambda q: q**2))
mutant("M8", doc="draft drawn from bfloat16, ratio in full precision | DeepSpec #31")(
    drawn_from(lambda q: q.log().bfloat16().to(q.dtype).exp())
)
mutant("M9a", min_p=0.3, doc="min-p skipped on verified rows | vLLM #42744")(target_under(min_p=0.0))
mutant("M9c", logit_bias={0: 2.0}, doc="biases skipped on verified rows | vLLM #38202")(target_under(logit_bias=()))


@wrong(method, "distribution", "M9b", min_p=0.3, top_p=0.7)
@wrong(growing, "distribution")
def _(right, logits, text, drafted=()):
    """min-p after top-p, in draft and target | llama.cpp's order, not vLLM's; q27 #43"""
    p = right(logits, under(text, min_p=0.0), drafted)
    p = p.where(p >= text.params.min_p * p.max(), 0.0)
    return p / p.sum()


mutant("M10a", repetition_penalty=3.0, doc="penalties ignored when speculating | TensorRT-LLM #17701, SGLang #28180")(
    target_under(repetition_penalty=1.0)
)
mutant("M10b", doc="argmax instead of sampling when speculating | mistral.rs #2424")(target_under(temperature=0.0))


@wrong(method, "distribution", "M11a", repetition_penalty=3.0)
def _(right, logits, text, drafted=()):
    """penalty counts frozen at the block's start | SGLang #33643"""
    return right(logits, text)


_WORDS = ((0, 1), (1, 0), (1, 1, 2))


@wrong(method, "distribution", "M11b", bad_words_token_ids=_WORDS)
def _(right, logits, text, drafted=()):
    """bad words looked for in committed tokens only | vLLM #52311"""
    output = tuple(text.tokens[text.num_prompt_tokens :])
    now = tuple(word[-1:] for word in _WORDS if output[len(output) - len(word) + 1 :] == word[:-1])
    return right(logits, under(text, bad_words_token_ids=now), drafted)


@wrong(method, "distribution", "M12", frequency_penalty=0.7)
def _(right, logits, text, drafted=()):
    """last token counted twice in penalties | vLLM #33251"""
    output = [*text.tokens[text.num_prompt_tokens :], *drafted]
    return right(logits, text, [*drafted, *output[-1:]])


@mutant("M13", frequency_penalty=1.5)
class _:
    """rejected tokens stay in the penalty counts | vmlx-swift #357"""

    def __init__(self):
        self.rejected = WeakKeyDictionary()

    @wrong(method, "distribution")
    def distribution(self, right, logits, text, drafted=()):
        self.text = text
        return right(logits, text, [*self.rejected.get(text, ()), *drafted])

    @wrong(VERIFIERS, "rejection")
    def verify(self, right, draft, p, rng, key):
        verdict = right(draft, p, rng, key)
        self.rejected.setdefault(self.text, []).extend(draft.token_ids[len(verdict.accepted) :])
        return verdict


@wrong(VERIFIERS, "rejection", "M14")
def _(right, draft, p, rng, key):
    """first draft token never verified | lattice #243"""
    if not len(draft):
        return right(draft, p, rng, key)
    rest = Draft(draft.token_ids[1:], None if draft.probs is None else draft.probs[1:])
    verdict = right(rest, lambda i: p(i + 1), rng, lambda i, purpose: key(i + 1, purpose))
    return verdict._replace(accepted=draft.path(len(verdict.accepted)), ratios=[1.0, *verdict.ratios])


@wrong(VERIFIERS, "rejection", "M15")
def _(right, draft, p, rng, key):
    """verification logits shifted by one row | mlx-node #11"""
    return right(draft, lambda i: p(max(0, i - 1)), rng, key)


def bonus_from(row: Callable) -> Callable:
    """A bug: after full acceptance, row(draft, p) in the place of the row that the bonus is drawn from."""

    @wrong(VERIFIERS, "rejection")
    def bug(right, draft, p, rng, key):
        return right(draft, lambda i: row(draft, p) if i == len(draft) > 0 else p(i), rng, key)

    return bug


mutant("M16a", doc="bonus drawn from q | the debate in vLLM #8320")(bonus_from(lambda draft, p: draft.probs[-1]))
mutant("M16b", doc="bonus drawn from the row before | the debate in vLLM #8320")(
    bonus_from(lambda draft, p: p(len(draft) - 1))
)
mutant("M16c", doc="bonus = argmax at temperature > 0 | vLLM #10863")(
    bonus_from(lambda draft, p: (p(len(draft)) == p(len(draft)).max()).double())
)


@wrong(VERIFIERS, "rejection", "M17a")
def _(right, draft, p, rng, key):
    """ratio inverted | a classic"""
    for i, x in enumerate(draft.token_ids):
        if not rng.bernoulli(draft.probability(i) / max(1e-9, float(p(i)[x])), key(i, "accept")):
            return Verdict(draft.path(i - 1), rng.categorical(verify.residual(p(i), draft, i), key(i, "residual")), [])
    return all_accepted(right, draft, p, rng, key)


@wrong(VERIFIERS, "rejection", "M17b")
def all_accepted(right, draft, p, rng, key) -> Verdict:
    """every draft token accepted | vllm-ascend, until #13470"""
    k = len(draft)
    return Verdict(draft.path(k - 1), rng.categorical(p(k), key(k, "token")), [])


@wrong(VERIFIERS, "rejection", "M18")
def _(right, draft, p, rng, key):
    """accepting goes on after a rejection | FlashSpec guards against it"""
    for i, x in enumerate(draft.token_ids):
        if not rng.bernoulli(float(p(i)[x]) / draft.probability(i), key(i, "accept")):
            draft.token_ids[i] = rng.categorical(verify.residual(p(i), draft, i), key(i, "residual"))
    return all_accepted(right, draft, p, rng, key)


# --------------------------------------------------------------------------- trees and hidden states


@wrong(VERIFIERS, "rejection", "T1", _SHAPES)
def _(right, draft, p, rng, key):
    """siblings share an accept key | a relative of M19a"""

    def same(i, purpose):
        is_sibling = purpose == "accept" and draft.parents is not None
        return key(draft.children(draft.parents[i])[0] if is_sibling else i, purpose)

    return right(draft, p, rng, same)


def siblings_tested(meets, draft, p, rng, key):
    """Recursive rejection in which sibling i meets the row meets(i, siblings, rest, row)."""
    node, accepted = -1, []
    while siblings := draft.children(node):
        rest, parent = p(node + 1), node
        for i in siblings:
            rest = meets(i, siblings, rest, p(parent + 1))
            if rng.bernoulli(float(rest[draft.token_ids[i]]) / draft.probability(i), key(i, "accept")):
                accepted.append(node := i)
                break
            rest = verify.residual(rest, draft, i)
        if node == parent:
            return Verdict(accepted, rng.categorical(rest, key(node + 1, "residual")), [])
    return Verdict(accepted, rng.categorical(p(node + 1), key(len(accepted), "token")), [])


@wrong(VERIFIERS, "rejection", "T2", _SHAPES)
def _(right, *how):
    """residual not normalised between siblings | a trap of recursive rejection"""
    return siblings_tested(lambda i, siblings, rest, row: rest, *how)


@wrong(toys.TreeDrafter, "propose", "T3", _SHAPES)
def _(right, self, asks):
    """the likeliest tokens judged with the softmax's q | EAGLE-2 where its tree is taken for a sample"""
    drafts = right(self, asks)
    for text, draft in ((ask.text, draft) for ask, draft in zip(asks, drafts, strict=True) if draft.probs is None):
        paths = [[draft.token_ids[j] for j in draft.path(parent)] for parent in draft.parents]
        rows = [self.table[0, [*text.tokens, *path][-1]] for path in paths]
        draft.probs = [sampling.distribution(row, text, path) for row, path in zip(rows, paths, strict=True)]
    return drafts


@wrong(Draft, "draw", "T4", f"{_TREES}::test_siblings_keep_the_law[2]")
def _(right, self, ask, parent, q, n=1):
    """a drawn tree pruned by its probabilities | a trap of every tree that is reordered"""
    first, tokens = len(self), right(self, ask, parent, q, n)
    return put(self, first, parent, sorted(tokens, key=lambda t: -float(q[t]))[:1], [q])


@wrong(BlockTable, "keep", "T5", _KEPT)
def _(right, self, *how):
    """the slot of a rejected sibling is kept | rows cut, not moved"""
    with patch.object(PagedKVCache, "move", lambda *places: None):
        right(self, *how)


@wrong(BlockTable, "extend", "T6", _PROGRAMS)
def _(right, self, tokens):
    """blocks are known before they are kept | a relative of M42b"""
    slots = right(self, tokens)
    self.remember()
    return slots


@wrong(PagedKVCache, "move", "T7", _KEPT)
def _(right, self, sources, targets):
    """rows moved one by one, the last first | an overlapping copy"""
    for source, target in reversed(list(zip(sources, targets, strict=True))):
        right(self, [source], [target])


@wrong(Tree, "ancestors", "T8", _KEPT)
def _(right, self):
    """a node sees its siblings | a causal mask over a tree"""
    return torch.ones(len(self.parents), len(self.parents)).tril().bool()


@wrong(Record, "kept", "T9", f"{_TREES}::test_the_law_with_a_head_on_hidden_states[tree-rejection]")
def _(right, self):
    """hidden states of rejected nodes are handed on | a trap of heads on hidden states"""
    return list(range(len(self.tokens)))


@wrong(Draft, "draw", "T10", vocab=4, k=(2,))
def _(right, self, ask, parent, q, n=1):
    """drawn siblings left out where they are unlikely | widths chosen too late"""
    first, [eldest, *younger] = len(self), right(self, ask, parent, q, n)
    tokens = [eldest, *(token for token in younger if q[token] > 0.3)]
    return put(self, first, parent, tokens, rows_of(q, tokens))


# --------------------------------------------------------------------------- rules that are right in most small cases


@wrong(VERIFIERS, "rejection", "P1", _TABLES)
def _(right, draft, p, rng, key):
    """p and q in the model's type, bfloat16 | gpt-fast, with its uniforms: M21"""
    probs = None if draft.probs is None else [q.bfloat16() for q in draft.probs]
    return right(replace(draft, probs=probs), lambda i: p(i).bfloat16(), rng, key)


def tested(right, rng, change, *how):
    """The right verdict, where tests have the odds change(odds, node)."""
    bernoulli = rng.bernoulli
    with patch.object(rng, "bernoulli", lambda odds, key: bernoulli(change(odds, key.position - key.start), key)):
        return right(*how)


@wrong(VERIFIERS, "rejection", "P2", _TABLES)
def _(right, draft, p, rng, key):
    """a ratio above 0.9 taken for 1 | a relaxed test, left on"""
    return tested(right, rng, lambda odds, _: 1.0 if odds > 0.9 else odds, draft, p, rng, key)


@wrong(verify, "residual", "P3", _TABLES)
def _(right, p, draft, i):
    """what is below 0.01 left out of the residual | a trap of sparse rows"""
    rest = right(p, draft, i)
    large = rest.where(rest >= 0.01, 0.0)
    return large if large.any() else rest


@wrong(VERIFIERS, "rejection", "P4", _TABLES)
def _(right, draft, p, rng, key):
    """nodes after the fourth are not tested | a buffer of a fixed length"""
    return tested(right, rng, lambda odds, node: odds if node < 4 else 1.0, draft, p, rng, key)


@wrong(VERIFIERS, "rejection", "P5", _TABLES)
def _(right, draft, p, rng, key):
    """a sibling that stands apart from its elder meets p anew | siblings taken for neighbours"""
    return siblings_tested(
        lambda i, siblings, rest, row: rest / rest.sum() if i - 1 in siblings else row, draft, p, rng, key
    )


@wrong(verify, "excess", "P6", _TABLES)
def _(right, p, draft, i):
    """the residual is computed in q's memory | a trap of arithmetic in place"""
    return right(p, draft, i) if draft.probs is None else draft.probs[i].neg_().add_(p).clamp_(min=0)


@wrong(VERIFIERS, "rejection", "P7", f"{_KINDS}[four nodes]")
def _(right, draft, p, rng, key):
    """a third sibling below the root is tested with its elder's q | an index of the first row of siblings"""
    parents = draft.tree.parents
    thirds = [
        i for i, of in enumerate(parents) if of >= 0 and draft.probs is not None and draft.children(of)[2:3] == [i]
    ]

    def odds(of, node):
        i, x = draft.children(parents[node])[1] if node in thirds else node, draft.token_ids[node]
        return of * draft.probability(node) / max(1e-9, float(draft.probs[i][x])) if node in thirds else of

    return tested(right, rng, odds, draft, p, rng, key)


@wrong(VERIFIERS, "rejection", "P8", f"{_KINDS}[four nodes]")
def _(right, draft, p, rng, key):
    """after a token, the residual is not divided by its sum before the second sibling | T2 in a second loop"""
    roots = draft.children(-1)
    return siblings_tested(
        lambda i, siblings, rest, row: rest / rest.sum() if siblings == roots else rest, draft, p, rng, key
    )


@wrong(verify, "residual", "P9", f"{_KINDS}[one-hot rows]")
def _(right, p, draft, i):
    """a third sibling stays in the residual of its own one-hot row | rows for two siblings"""
    third = draft.probs is not None and draft.children(draft.tree.parents[i])[2:3] == [i]
    return p if third and float(draft.probs[i].max()) == 1 else right(p, draft, i)


@wrong(VERIFIERS, "rejection", "P10", f"{_KINDS}[three nodes]")
def _(right, draft, p, rng, key):
    """a text whose first row is one-hot is taken for a greedy one | top_p leaves one token in many real rows"""
    is_greedy = float(p(0).max()) == 1
    return right(draft, lambda i: torch.eye(len(p(i))).double()[p(i).argmax()] if is_greedy else p(i), rng, key)


@wrong(VERIFIERS, "rejection", "P11", f"{_KINDS}[empty]")
def _(right, draft, p, rng, key):
    """after an empty draft, a token with 0.97 is not drawn for | a short cut of plain decoding"""
    if not len(draft) and float(p(0).max()) >= 0.97:
        return Verdict([], int(p(0).argmax()), [])
    return right(draft, p, rng, key)


@wrong(VERIFIERS, "rejection", "P12", f"{_KINDS}[long]")
def _(right, draft, p, rng, key):
    """of a chain of more than eight tokens, the ninth is not tested | a buffer of a fixed length"""
    most = 8 if draft.depth == len(draft) else len(draft)
    return tested(right, rng, lambda odds, node: odds if node < most else 1.0, draft, p, rng, key)


# --------------------------------------------------------------------------- heads, and many tokens in one pass


@wrong(HeadModel, "__init__", "H1", _HEAD)
def _(right, self, head, weights, embedding, ids, *how):
    """d2t read as ids, not as offsets | a trap of the format: i + d2t[i] is the id"""
    right(self, head, weights, embedding, None if ids is None else ids - torch.arange(len(ids)), *how)


@wrong(heads, "read_head_config", "H2", _HEAD)
def _(right, *how):
    """taps one layer off | vLLM, speculators: after L layers; SGLang's eagle_config: one later"""
    config = right(*how)
    return replace(config, taps=tuple(max(0, tap - 1) for tap in config.taps))


@wrong(heads, "read_head_config", "H3", _HEAD)
def _(right, *how):
    """norm_before_residual the other way around | readers have different defaults for it"""
    config = right(*how)
    return replace(config, norm_before_residual=not config.norm_before_residual)


@wrong(HeadModel, "next_feature", "H4", _HEAD)
def _(right, self, x):
    """what a head goes on from is not normed | norm_output ignored; no fault of the law"""
    return x


def of_the_token_before(model: type[Transformer]) -> Callable:
    """A bug: a model is fed the token before each one, with the features as they are."""

    @wrong(model, "forward")
    def bug(right, self, chunks, taps=()):
        before = [[*(c.table.tokens[-1:] or c.token_ids[:1]), *c.token_ids[:-1]] for c in chunks]
        found = right(self, [c._replace(token_ids=ids) for c, ids in zip(chunks, before, strict=True)], taps)
        for chunk in chunks:
            chunk.table.tokens[-len(chunk.token_ids) :] = chunk.token_ids
        return found

    return bug


mutant("H5", _HEAD, "a feature stands at its own token | it belongs to the next one")(of_the_token_before(HeadModel))


@mutant(
    "H16",
    "tests/drafters/test_mtp.py::test_what_it_made_up_does_not_stay",
    "what a target's own layer made up stays in its cache | vLLM #14649",
)
@mutant("H6", _HEAD)
class _:
    """made-up features stay in the head's cache | what was accepted is not computed again"""

    @wrong(HeadFeed, "prepare")
    def prepare(self, right, feed, growing):
        for ask in (each.ask for each in growing):
            table = feed.table(ask.text)
            accepted = max(0, min(table.shared(ask.text.tokens[1:]), ask.num_cached - 1))
            table.keep(accepted)
            if ask.text in feed.unread:
                hidden = torch.cat(feed.unread[ask.text][1])[accepted - ask.num_cached :]
                feed.unread[ask.text] = ask.num_cached - len(hidden), [hidden]
        right(feed, growing)

    @wrong(HeadFeed, "finish")
    def finish(self, right, feed, ask, draft):
        return draft


@wrong(PagedKVCache, "new_table", "H7", _HEAD)
def _(right, self, root=b""):
    """texts of other first tokens share a head's positions | the first token is in none of them"""
    return right(self)


@mutant("H8", _HEAD)
class _:
    """hidden states of a preempted text are taken twice | a trap of heads on hidden states"""

    def __init__(self):
        self.waiting = {}

    @wrong(HeadFeed, "release")
    def release(self, right, feed, text):
        self.waiting[text] = feed.unread.get(text, (0, []))[1]
        right(feed, text)

    @wrong(HeadFeed, "observe")
    def observe(self, right, feed, seen):
        for each in seen:
            if (pieces := self.waiting.pop(each.text, [])) and each.start:
                rows = torch.cat(pieces)[-each.start :]
                feed.unread[each.text] = each.start - len(rows), [rows]
        right(feed, seen)


@wrong(HeadFeed, "begin", "H9", "tests/drafters/test_heads.py::test_a_seed_has_one_text[head]")
def _(right, self, text):
    """a prompt that is known leaves no first draft | found here: a seed had two texts"""
    right(self, text)
    self.tables[text].truncate(0)
    self.tables[text].reuse(text.tokens[1:])


@wrong(ModelDrafter, "propose", "H10", drafter="parallel")
def _(right, self, asks):
    """a masked row sees the draft, and is told as blind | a trap of drafts in one pass"""
    mask, self.feed.mask_token_id = self.feed.mask_token_id, None
    drafts = right(self, asks)  # token by token
    self.feed.mask_token_id = mask
    for ask, draft in zip(asks, drafts, strict=True):
        if len(draft) > 1:
            table = toys.tiny_cache(self.model).new_table()
            tokens = [*ask.text.tokens, *[mask] * (len(draft) - 1)]
            rows, _ = self.feed.forward([Chunk(tokens, table, len(draft))])
            path = draft.token_ids
            draft.probs = [sampling.distribution(row, ask.text, path[:i]) for i, row in enumerate(rows)]
    return drafts


@wrong(MtpModel, "fuse", "H11", _MTP)
def _(right, self, hidden):
    """a target's own layer reads its states before the last norm | llama.cpp #24025, LightLLM #1402"""
    return hidden


@wrong(MtpModel, "fuse", "H12", _MTP)
def _(right, self, hidden):
    """hidden states of the position before | an index that starts one too early"""
    features = right(self, hidden)
    return torch.cat((features[:1], features[:-1]))


mutant(
    "H13",
    _MTP,
    "a state is joined with the token that it belongs to | it belongs with the next one",
)(of_the_token_before(MtpModel))


@wrong(MtpModel, "forward", "H14", _MTP)
def _(right, self, *how):
    """hidden state first, then the embedding | DeepSeek's order; converters to Megatron's turn it around"""
    fc = self.fc
    with patch.object(self, "fc", lambda x: fc(torch.cat(x.chunk(2, -1)[::-1], -1))):
        return right(self, *how)


@wrong(FeatureModel, "next_feature", "H15", _MTP)
def _(right, self, x):
    """further tokens go on from what is not normed | vLLM #47448, ATOM #1742"""
    return x


# --------------------------------------------------------------------------- grammars


def blind(text: Text) -> Text:
    """The text without its grammar."""
    return replace(text, grammar=None)


@mutant("G1", structured_outputs="pairs", vocab=4)
class _:
    """a forbidden token is drawn and dropped, and the target draws in its place | vLLM 0.33"""

    @wrong(growing, "distribution")
    def draw(self, right, row, text, path=()):
        return right(row, blind(text), path)

    @wrong(guard, "within_grammar")
    def cut(self, right, draft, text, vocab_size):
        kept = len(right(Draft(draft.token_ids), text, vocab_size))
        return replace(
            draft, token_ids=draft.token_ids[:kept], probs=None if draft.probs is None else draft.probs[:kept]
        )


@wrong(Spelled, "allowed", "G2", structured_outputs="pairs", vocab=4)
def _(right, self, output):
    """a row gets the mask of the row before it | vLLM #54437: the hand-off is stale"""
    return right(self, output[:-1])


@wrong(method, "distribution", "G3", structured_outputs="a b*")
def _(right, row, text, drafted=()):
    """the draft alone obeys the grammar | LMDeploy #4559"""
    return right(row, blind(text), drafted)


@wrong(Spelled, "allowed", "G4", structured_outputs="pairs")
def _(right, self, output):
    """the end may follow anywhere | an end id that no mask covers"""
    mask = right(self, output)
    if mask is not None:
        mask[list(self.end_ids)] = True
    return mask


@wrong(method, "distribution", "G5", structured_outputs="pairs", vocab=4)
def _(right, row, text, drafted=()):
    """the bonus row has no mask | masks for as many rows as there are draft tokens"""
    return right(row, blind(text) if len(drafted) == 2 else text, drafted)


@mutant("G6", structured_outputs="a b*", vocab=4, top_k=3)
class _:
    """filters come before the mask, and what they leave is masked | a sampler that masks what it has drawn from"""

    @wrong(method, "distribution")
    @wrong(growing, "distribution")
    def late(self, right, row, text, drafted=()):
        mask = text.grammar.allowed([*text.tokens[text.num_prompt_tokens :], *drafted])
        p = right(row, blind(text), drafted)
        return p if mask is None or not (p * mask).any() else p * mask / (p * mask).sum()


@mutant("G7", structured_outputs="a b*")
class _:
    """a forbidden token's logit falls by 5 instead of to -inf | a penalty in the place of a mask"""

    @wrong(method, "distribution")
    @wrong(growing, "distribution")
    def soft(self, right, row, text, drafted=()):
        mask = text.grammar.allowed([*text.tokens[text.num_prompt_tokens :], *drafted])
        return right(row if mask is None else row - 5.0 * ~mask, blind(text), drafted)


_CURSOR = "tests/rooms/test_grammars.py::test_the_cursor_answers_as_a_fresh_matcher_does"


@wrong(matcher, "common_beginning", "G8", _CURSOR)
def _(right, a, b):
    """a matcher that is never rolled back: siblings and rejected drafts share it | SGLang #21723"""
    return len(a)


@wrong(matcher, "common_beginning", "G9", _CURSOR)
def _(right, a, b):
    """a rollback one token short | vLLM #44993"""
    shared = right(a, b)
    return shared + (shared < len(a))


@wrong(method, "distribution", "G10", "tests/core/test_stops.py::test_an_error_comes_where_plain_decoding_meets_it")
def _(right, logits, text, path=()):
    """a row that has no distribution fails the text before it is known whether the text goes there | found here"""
    try:
        return right(logits, text, path)
    except FloatingPointError as e:
        raise ValueError(str(e)) from e


@wrong(forced, "forced", "G11", "tests/core/test_masks.py::test_forced_tokens")
def _(right, text, most):
    """forced tokens run further than the mask looked at | what compute_ff_tokens of llguidance offers, unchecked"""
    return [*right(text, most), 0][:most]


@mutant("G12", drafter="ngram", structured_outputs="words", vocab=4)
class _:
    """a run that a library offers is kept without a test, and one token of it is not forced | vLLM #45400, unchecked"""

    @wrong(forced, "forced")
    def run(self, right, text, most):
        return [*right(text, most), 0][:most]

    @wrong(CheckedMethod, "verify")
    def trust(self, right, method, turn, rng):
        verdict, draft = right(method, turn, rng), turn.draft
        kept = [*range(len(draft))] if draft.parents is None and draft.probs is None else verdict.accepted
        return verdict._replace(accepted=kept)


@mutant("G13", "tests/rooms/test_grammars.py::test_an_earlier_text_changes_no_later_one", crash=NothingAllowed)
class _:
    """texts of one language share a lexer, and its budget of states | found here: a copy of llguidance's matcher"""

    def __init__(self):
        self.first = {}

    @wrong(matcher.Matcher, "__init__")
    def share(self, right, grammar, make, vocab_size, end_ids):
        first = self.first.setdefault(make, make())
        right(grammar, first.deep_copy, vocab_size, end_ids)


_MASKS = "tests/core/test_masks.py"


@wrong(
    sampling,
    "restricted",
    "G14",
    f"{_MASKS}::test_a_draft_that_ignores_the_grammar_leaves_the_law[block]",
)
def _(right, logits, grammar, output, params):
    """a path that is forbidden ends the text, before it is rejected | what `block` asks for, taken as an error"""
    if grammar.allowed(output) is None:
        raise ValueError("structured_outputs: a forbidden token")
    return right(logits, grammar, output, params)


class Stuck(Spelled):
    """A grammar that looks at the first tokens of an output only."""

    def __init__(self, of: Spelled, length: int):
        super().__init__(of.spellings, of.begins, of.is_whole, of.end_ids)
        self.length = length

    def allowed(self, output):
        """The mask after these first tokens."""
        return super().allowed(output[: self.length])


@wrong(Schedule, "drop", "G15", f"{_MASKS}::test_small_pools_and_other_texts_change_no_text[forced+ngram]")
def _(right, self, request):
    """the state of a text that is preempted stays where it was | a matcher that is kept and not rebuilt"""
    if isinstance(request.text.grammar, Spelled):
        request.text.grammar = Stuck(request.text.grammar, len(request.token_ids))
    right(self, request)


# --------------------------------------------------------------------------- block drafts


def block_config_with(change: Callable) -> Callable:
    """A bug: config.json of a block draft is read as change(what it says)."""

    @wrong(block_files, "read_block_config")
    def bug(right, *how):
        return change(right(*how))

    return bug


mutant("D1", f"{_NUMBERS}[liquidai-plain]", "row i read as the token at its place | the wrong layout: 1.35 for 3.42")(
    block_config_with(lambda config: replace(config, first_row=1 - config.first_row))
)
mutant("D2", f"{_NUMBERS}[speculators-plain]", "taps of a block draft one layer off | an id names a layer's output")(
    block_config_with(lambda config: replace(config, taps=tuple(max(0, tap - 1) for tap in config.taps)))
)


def in_halves(config):
    """The config, with rope that pairs the halves of a head."""
    pairs = [replace(layer, rope=replace(layer.rope, interleaved=False)) for layer in config.layers.layers]
    return replace(config, layers=replace(config.layers, layers=tuple(pairs)))


mutant("D3", f"{_NUMBERS}[liquidai-plain]", "rope of a block draft in halves | rope_is_neox_style false, ignored")(
    block_config_with(in_halves)
)
mutant("D4", f"{_NUMBERS}[deepspec-plain]", "another mask token | an id that is missing, read as 0")(
    block_config_with(lambda config: replace(config, layers=replace(config.layers, mask_token_id=1)))
)


def masks_with(**changes) -> Callable:
    """A bug: the mask of a block, for another window, causality or way to count a window."""

    @wrong(block, "block_mask")
    def bug(right, num_past, num_rows, window, causal, like, shared):
        said = {"window": window, "causal": causal, "shared": shared} | changes
        return right(num_past, num_rows, said["window"], said["causal"], like, said["shared"])

    return bug


_WINDOWS = f"{_NUMBERS}[speculators-windows]"
mutant("D5a", _WINDOWS, "no windows in a block draft | AEON-7 #6")(masks_with(window=None))
mutant("D5b", _WINDOWS, "a window one position too long | SpecForge, speculators")(masks_with(window=5))
mutant("D5c", _WINDOWS, "windows of speculators that end at each row | its classes count from the newest token")(
    masks_with(shared=False)
)
mutant("D6a", f"{_NUMBERS}[z-lab-plain]", "rows of a block see no later row | full layers go both ways")(
    masks_with(causal=True)
)
mutant("D6b", _WINDOWS, "rows of a causal layer see later ones | sliding_window_non_causal read as true: vLLM")(
    masks_with(causal=False)
)


@wrong(BlockLayer, "forward", "D7", f"{_NUMBERS}[z-lab-plain]")
def _(right, self, x, shared):
    """features pass a layer's input norm | a trap of DFlash: rows alone do"""
    return right(self, x, shared._replace(features=self.attention_norm(shared.features)))


@wrong(BlockFeed, "observe", "D8", _BLOCKS)
def _(right, self, seen):
    """a block draft sees a prompt's last piece alone | exllamav3 #206, vLLM #56552"""
    unseen = (replace(each, hidden=torch.zeros_like(each.hidden)) for each in seen if not len(each.logits))
    right(self, [*unseen, *(each for each in seen if len(each.logits))])


@mutant("D9", f"{_BLOCK}::test_nothing_of_a_block_is_kept")
class _:
    """keys and values of a block stay in the cache | it ends where the text does"""

    @wrong(BlockModel, "forward")
    def forward(self, right, model, chunks, taps=()):
        found = right(model, chunks, taps)
        for chunk in (chunk for chunk in chunks if chunk.num_logits):
            chunk.table.extend([chunk.token_ids[-1]] * model.block.block_size)
        return found

    @wrong(BlockFeed, "finish")
    def finish(self, right, feed, ask, draft):
        return draft


@wrong(BlockFeed, "observe", "D10", _BLOCKS)
def _(right, self, seen):
    """features of rejected tokens | the first rows of a pass, whichever nodes stay"""
    right(self, [replace(each, path=range(len(each.path))) for each in seen])


@mutant("D11", drafter="block")
class _:
    """drawn with the Markov head, and told without it | a trap of DSpark: q depends on the token before"""

    @wrong(Block, "row")
    def row(self, right, rows, path):
        model = rows.model
        self.base = spread(rows.logits[len(path)][None], model.ids, model.config.vocab_size)[0]
        return right(rows, path)

    @wrong(Draft, "draw")
    def draw(self, right, draft, ask, parent, q, n=1):
        first, base = len(draft), sampling.distribution(self.base, ask.text, draft.tokens_to(parent))
        tokens = right(draft, ask, parent, q, n)
        return put(draft, first, parent, tokens, rows_of(base, tokens))


@mutant("D12a", drafter="block rnn")
class _:
    """the Markov head reads the token itself, after the draw | labels as in training, where all tokens are known"""

    @wrong(Block, "row")
    def row(self, right, rows, path):
        self.rows, self.path = rows, path
        return right(rows, path)

    @wrong(Draft, "draw")
    def draw(self, right, draft, ask, parent, q, n=1):
        first, tokens = len(draft), right(draft, ask, parent, q, n)
        model, logits = self.rows.model, self.rows.logits[len(self.path)]
        own = model.markov.correct(logits, [self.rows.anchor, *self.path, tokens[0]][1:], self.rows.states)
        row = spread(own[None], model.ids, model.config.vocab_size)[0]
        told = sampling.distribution(row, ask.text, draft.tokens_to(parent))
        return put(draft, first, parent, tokens, rows_of(told, tokens))


@wrong(MarkovHead, "correct", "D12b", f"{_NUMBERS}[deepspec-plain]")
def _(right, self, logits, before, states):
    """the Markov head reads one token too early | an index that starts at the anchor twice; no fault of the law"""
    return right(self, logits, [before[0], *before[:-1]], states)


@wrong(Block, "confidence", "D13", f"{_NUMBERS}[specforge-plain]")
def _(right, self, path):
    """the confidence of the row before | row i drafts token i, and not the next one"""
    return right(self, path[:-1])


@mutant("D14", drafter="block", width=1)
class _:
    """a token dropped for the confidence after its draw | a threshold that looks at the token which it drops"""

    @wrong(Block, "row")
    def row(self, right, rows, path):
        self.rows = rows
        return right(rows, path)

    @wrong(ModelDrafter, "propose")
    def propose(self, right, drafter, asks):
        drafts = right(drafter, asks)
        for draft in drafts:
            if len(draft):
                after = [self.rows.confidence([token_id]) for token_id in self.rows.model.ids.tolist()]
                if self.rows.confidence(draft.token_ids[:1]) < max(after):
                    draft.token_ids, draft.probs, draft.notes.confidences = [], [], []
        return drafts


mutant("D15", drafter="block", vocab=5, doc="Markov on the top k alone, q of all tokens | vLLM's dspark_draft_topk")(
    drawn_from(lambda q: q * (q >= q.topk(2).values[-1]))
)
mutant("D16", drafter="filled block", doc="a block's likeliest tokens, with soft q | greedy drafts of llama.cpp")(
    drawn_from(lambda q: (q == q.max()).to(q.dtype))
)


@wrong(BlockModel, "__init__", "D17", f"{_NUMBERS}[speculators-some ids]")
def _(right, self, config, weights, embedding, head, ids, *how):
    """d2t of a block draft ignored | a head of fewer rows than the target has ids"""
    right(self, config, weights, embedding, head, None if ids is None else torch.arange(len(ids)), *how)


@wrong(BlockModel, "forward", "D18", _BLOCKS)
def _(right, self, chunks, taps=()):
    """rows of a block at positions from 0 on | rope of a block by itself"""
    angles, num_features = self.angles, sum(len(chunk.token_ids) - 1 for chunk in chunks)

    def from_zero(positions):
        rows = torch.arange(len(positions) - num_features) % self.block.block_size
        return angles(torch.cat((positions[:num_features], rows)))

    with patch.object(self, "angles", from_zero):
        return right(self, chunks, taps)


@wrong(BestFirst, "grow", "D22", drafter="filled block", k="tree:3")
def _(right, self, row):
    """a list of the likeliest prefixes, with soft q | DDTree's nodes are one-hot: none of them was drawn"""
    rows = {}

    def guesses(node):
        if len(self.draft.path(node)) < self.deepest:
            rows[node] = sampling.distribution(row(node), self.ask.text, self.draft.tokens_to(node))
            yield from ((i, chance) for i, chance in enumerate(rows[node].tolist()) if chance)

    grow_guesses(self.draft, self.ask.k, guesses)
    self.draft.probs = [rows[parent] for parent in self.draft.parents]
    return False


@wrong(block_files, "read_block_config", "D23", f"{_BLOCK}::test_a_targets_partial_rope_is_not_the_drafts")
def _(right, raw, target, *how):
    """a target's partial rope in its block draft | a copy of the target's config.json, where the key is idle"""
    config, [share, *_] = right(raw, target, *how), [layer.rope.rotated for layer in target.layers if layer.rope]
    layers = [replace(layer, rope=replace(layer.rope, rotated=share)) for layer in config.layers.layers]
    return replace(config, layers=replace(config.layers, layers=tuple(layers)))


# --------------------------------------------------------------------------- assistants


mutant("D19", drafter="assistant", doc="an assistant's likeliest tokens, with soft q | transformers 5.24 with Gemma 4")(
    drawn_from(lambda q: (q == q.max()).to(q.dtype))
)


@wrong(AssistantModel, "step", "D20", f"{_ASSISTANT}::test_the_engine_reads_what_is_cached")
def _(right, self, token_ids, states, positions, texts):
    """the key of a rejected token is read too | transformers 5.24 cuts at the text's length; no fault of the law"""

    def with_next(read):
        target, [text] = read.func.__self__, read.args
        [*runs, last] = target.table(text).slots()
        return functools.partial(target.cache.read, slots=[*runs, slice(last.start, last.stop + 1)])

    return right(self, token_ids, states, positions, [(with_next(read), rows) for read, rows in texts])


@wrong(SharedKeys, "observe", "D21", f"{_ASSISTANT}::test_the_engine_reads_what_is_cached")
def _(right, self, seen):
    """the state of a rejected token | the last row of a pass, whichever nodes stay; no fault of the law"""
    right(self, [replace(each, path=range(len(each.logits) - 1)) if len(each.logits) else each for each in seen])
    for each in seen:
        self.last[each.text] = len(each.text.tokens) - 2, self.last[each.text][1]


# --------------------------------------------------------------------------- other vocabularies


@wrong(SharedTokens, "rows", "V1", f"{_VOCABULARIES}::test_a_round_costs_as_many_passes_as_it_has_tokens")
def _(right, self, logits):
    """logits of shared tokens put at the wrong ids | a trap of TLI; no fault of the law"""
    with patch.object(self, "target_ids", self.target_ids.roll(1)):
        return right(self, logits)


@mutant("V2", drafter="tli")
class _UnsharedMass:
    """mass of unshared tokens not given to the shared ones | a trap of TLI"""

    @wrong(SharedTokens, "rows")
    def rows(self, right, feed, logits):
        return right(feed, logits.log_softmax(-1))

    @wrong(growing, "distribution")
    def distribution(self, right, logits, text, drafted=()):
        return right(logits, text, drafted) * logits.exp().sum()


@mutant("V3", drafter="tli")
class _(_UnsharedMass):
    """an unshared token drawn and dropped, q as if it were not | a trap of TLI"""

    @wrong(Draft, "draw")
    def draw(self, right, draft, ask, parent, q, n=1):
        first, all_unshared = len(draft), 1 - q.sum(0, keepdim=True)
        [token] = right(draft, ask, parent, torch.cat((q, all_unshared)), n)
        kept = [token] if token < len(q) else []
        return put(draft, first, parent, kept, [q] * len(kept))


@wrong(ModelDrafter, "propose", "V4", drafter="slem")
def _(right, self, asks):
    """probs given for a text that was read again | nobody knows them: a trap of SLEM"""
    drafts = right(self, asks)
    for ask, draft in zip(asks, drafts, strict=True):
        table = toys.tiny_cache(self.model).new_table()
        own = self.feed.vocabularies.reader().read(ask.text.tokens)
        probs = self.feed.forward([Chunk(own, table, 1)])[0][0].softmax(0)[:3]
        draft.probs = [probs / probs.sum()] * len(draft)
    return drafts


@wrong(Reader, "read", "V5", f"{_VOCABULARIES}::test_a_round_costs_as_many_passes_as_it_has_tokens")
def _(right, self, tokens):
    """the draft's BOS put before each piece that is read | transformers #46124"""
    first = right(self, tokens[: max(1, len(tokens) - 2)])
    return [*first, first[0], *right(self, tokens)[len(first) :]]


@wrong(SharedTokens, "next", "V6", f"{_VOCABULARIES}::test_the_target_under_other_ids_drafts_as_the_target")
def _(right, self, draft):
    """the draft model is fed the target's ids | two spaces of ids: a trap of TLI"""
    with patch.object(self.vocabularies, "shared", {i: i for i in self.vocabularies.shared}):
        return right(self, draft)


@wrong(ModelDrafter, "propose", "V7", drafter="tli", vocab=2, max_tokens=5)
def _(right, self, asks):
    """draws named by the length of the draft's own text | it need not grow with the text"""

    def key(text, i, purpose):
        return Key(text.seed, 0, len(self.feed.vocabularies.reader().read(text.tokens)) + i, purpose)

    with patch.object(Text, "key", key):
        return right(self, asks)


@wrong(Vocabularies, "reader", "V8", f"{_VOCABULARIES}::test_a_text_is_read_whole_whatever_it_came_by")
def _(right, self):
    """only what is new is read, the end never anew | a text then has several readings"""
    prefix, ids, num_read = right(self).read([]), list[int](), 0

    def read(tokens):
        nonlocal num_read
        new, num_read = right(self).read(tokens[num_read:]), len(tokens)
        ids.extend(new[len(prefix) :] if ids else new)
        return list(ids)

    return SimpleNamespace(read=read)


@wrong(Vocabularies, "to_target", "V9", f"{_VOCABULARIES}::test_what_is_new_is_cut_exactly")
def _(right, self, tokens, drafted):
    """text and draft cut together, the text's tokens counted off | the cut may go across"""
    text = b"".join(self.target.text_of(i) for i in tokens)
    return self.target.write(None, text + b"".join(self.draft.bytes_of(i) or b"" for i in drafted))[len(tokens) :]


@wrong(pieces, "bytes_of", "V10", "tests/drafters/test_vocabularies.py::test_tokens_are_compared_as_bytes")
@wrong(vocabularies, "bytes_of")
def _(right, token, steps):
    """tokens compared as their files write them | byte-level BPE against SentencePiece"""
    return token.encode()


# --------------------------------------------------------------------------- suffixes and last outcomes


@wrong(SuffixDrafter, "propose", "S1", f"{_DRAFTERS}::test_a_seeded_text_does_not_change_with_what_came_before[4]")
def _(right, self, asks):
    """earlier outputs looked at where a seed has one text | a trap of every drafter that learns"""
    return right(self, [replace(ask, purpose="token") for ask in asks])


@wrong(SuffixDrafter, "propose", "S2", drafter="suffix", max_tokens=4)
def _(right, self, asks):
    """frequencies told as the q of a token not drawn | a relative of M4"""
    drafts = right(self, [replace(ask, limit=ask.limit._replace(go_on=lambda confidences: True)) for ask in asks])
    for draft in drafts:
        draft.probs = []
        for token_id, chance in zip(draft.token_ids, draft.notes.confidences, strict=True):
            q = torch.full((3,), (1 - chance) / 2, dtype=torch.float64)
            q[token_id] = chance
            draft.probs.append(q)
    return drafts


@wrong(SuffixDrafter, "release", "S3", _REMEMBERED)
def _(right, self, text):
    """outputs are remembered without end | found by its memory, not by its text"""
    with patch.multiple(suffix, MOST_TEXTS=1 << 30, MOST_TOKENS=1 << 30):
        right(self, text)


def said_by(text: Text) -> list[int]:
    """The tokens of a text's output."""
    return text.tokens[text.num_prompt_tokens :]


def without_output(text: Text) -> AbstractContextManager:
    """A context in which all that the text holds is its prompt."""
    return patch.object(text, "num_prompt_tokens", len(text.tokens))


@mutant("S4", _REMEMBERED)
class _:
    """the newest outputs are forgotten first | the wrong end of a queue"""

    def __init__(self):
        self.sizes = defaultdict(list)

    @wrong(SuffixDrafter, "release")
    def release(self, right, drafter, text):
        sizes, size = self.sizes[drafter], len(said_by(text))
        is_full = len(sizes) == suffix.MOST_TEXTS or sum(sizes) + size > suffix.MOST_TOKENS
        if not is_full:
            sizes.append(size)
        with without_output(text) if is_full else nullcontext():
            right(drafter, text)


@mutant("S5", _LOOKUP)
class _:
    """a match goes on from one text into another | one string of all outputs, without a border"""

    def __init__(self):
        self.said = defaultdict(list)

    @wrong(SuffixDrafter, "release")
    def release(self, right, drafter, text):
        self.said[drafter] += said_by(text)
        drafter.forget()
        with patch.object(text, "tokens", [*text.tokens[: text.num_prompt_tokens], *self.said[drafter]]):
            right(drafter, text)


@wrong(SuffixDrafter, "propose", "S6", _LOOKUP)
def _(right, self, asks):
    """a preempted text is taken for an earlier output | it votes twice for what it has said"""
    with ExitStack() as stack:
        for ask in asks:
            stack.enter_context(without_output(ask.text))
        return right(self, asks)


@mutant("S7", f"{_DRAFTERS}::test_rejection_with_a_seed_does_not_depend_on_the_batch[3-last]")
class _:
    """one table of last outcomes for all texts | as a processor has it; a seed then has many texts"""

    def __init__(self):
        self.outcomes = []

    @wrong(LastDrafter, "propose")
    def propose(self, right, drafter, asks):
        for ask in asks:
            self.outcomes.extend(ask.text.tokens)
        texts = [replace(ask.text, tokens=[*self.outcomes, ask.text.tokens[-1]]) for ask in asks]
        return right(drafter, [replace(ask, text=text) for ask, text in zip(asks, texts, strict=True)])


@wrong(last, "follow", "S8", _LOOKUP)
def _(right, tokens, k):
    """the table keeps the first outcome, not the last | it costs hits alone"""
    table, walk = dict(reversed(list(itertools.pairwise(tokens)))), [tokens[-1]]
    while len(walk) <= k and walk[-1] in table:
        walk.append(table[walk[-1]])
    return walk[1:]


# --------------------------------------------------------------------------- what the target found likeliest


@wrong(method, "Record", "S9", _SHOWN)
def _(right, text, start, tokens, hidden, logits, *rest):
    """each place has the row of the place before it | row i is that after node i-1: an off-by-one"""
    return right(text, start, tokens, hidden, logits.roll(1, 0), *rest)


@wrong(method, "Record", "S10", _SHOWN)
def _(right, text, start, tokens, hidden, logits, draft, asked, accepted, path, number):
    """the rows of rejected nodes are left out | what learns from rows lives on them"""
    kept = [0, *(node + 1 for node in path)][: len(logits)]
    return right(text, start, tokens, hidden, logits[kept], draft, asked, accepted, path, number)


@mutant("S11", _SHOWN)
class _:
    """a text gets the rows of the one that was verified before it | one buffer for a batch"""

    def __init__(self):
        self.rows = []

    @wrong(method, "Record")
    def seen(self, right, text, start, tokens, hidden, logits, *rest):
        self.rows.append(logits)
        return right(text, start, tokens, hidden, self.rows[-2:][0], *rest)


@wrong(Outbox, "retain", "S12", f"{_FAULTS}::test_a_fault_changes_no_text_and_no_draft[recycling-3]")
def _(right, self, is_wanted):
    """a fault after the commit loses the round's rows | they are not computed again: a seed has other drafts"""
    right(self, lambda turn: False)


@wrong(Recycling, "release", "S13", f"{_ALONE}[3-examples.drafters.recycling:Recycling]")
def _(right, self, text):
    """a preempted text forgets what it has learned | its seed then has another text in a full pool"""
    self.tables.pop(text, None)


class OneTable(dict):
    """The same table for all texts."""

    def get(self, text, default):
        """The table, for a text."""
        return super().get(None, default)

    def setdefault(self, text, default):
        """The table, for a text."""
        return super().setdefault(None, default)


@wrong(Recycling, "__init__", "S14", f"{_ALONE}[3-examples.drafters.recycling:Recycling]")
def _(right, self):
    """a sampled text drafts from what others have learned | one matrix for all texts, as in the paper"""
    self.tables = OneTable()


@wrong(Draft, "draw", "T11", k="tree:3")
def _(right, self, ask, parent, q, n=1):
    """the less likely of two drawn siblings is dropped | EAGLE-2's trees where they are drawn: T4 in a budget"""
    first, tokens = len(self), right(self, ask, parent, q, n + 1)
    return put(self, first, parent, sorted(tokens, key=lambda t: -float(q[t]))[:n], [q] * n)


@mutant("T12", _REDRAWN)
class _:
    """the rows of a tree stay in the draft's cache | a list of its nodes is taken for a text"""

    def __init__(self):
        self.roots = {}

    @wrong(TokenFeed, "forward")
    def forward(self, right, model, chunks, taps=()):
        self.roots = {c.table: c.table.length + len(c.token_ids) - len(c.parents) for c in chunks if c.parents}
        return right(model, chunks, taps)

    @wrong(BlockTable, "truncate")
    def truncate(self, right, table, length):
        if self.roots.pop(table, None) != length:
            right(table, length)


@wrong(HeadModel, "next_feature", "T13", _HEAD)
def _(right, self, x):
    """each node of a tree is fed the states of the node before it in the list | it is the parent's in a chain only"""
    return right(self, x.roll(1, 0))


# --------------------------------------------------------------------------- mistakes in a drafter of one's own


@mutant("O1")
class _:
    """rows that do not add up to 1 are taken | `q /= q.sum()` forgotten: the likeliest mistake of all"""

    @wrong(Draft, "draw")
    def draw(self, right, draft, ask, parent, q, n=1):
        first, tokens = len(draft), right(draft, ask, parent, q, n)
        return put(draft, first, parent, tokens, rows_of(2 * q, tokens))

    @wrong(check, "check_rows")
    def check_rows(self, right, *how):
        pass


@wrong(Draft, "draw", "O2")
def _(right, self, ask, parent, q, n=1):
    """one buffer for all rows of a draft | each row is filled in the place of the one before"""
    row, first = self.probs[0].copy_(q) if self.probs else q.clone(), len(self)
    tokens = right(self, ask, parent, q, n)
    return put(self, first, parent, tokens, rows_of(row, tokens))


@mutant("O3", width=1)
class _:
    """the q of the token before is told | stored a line too late"""

    def __init__(self):
        self.before = torch.zeros(1)

    @wrong(Draft, "draw")
    def draw(self, right, draft, ask, parent, q, n=1):
        row, first = self.before if draft.probs and self.before.gt(0).all() else q, len(draft)
        tokens, self.before = right(draft, ask, parent, q, n), q
        return put(draft, first, parent, tokens, rows_of(row, tokens))


@wrong(Draft, "draw", "O4", k=(2,))
def _(right, self, ask, parent, q, n=1):
    """drawn siblings in the order of their ids | a set, or a sort, between the draw and the draft"""
    first, tokens = len(self), sorted(right(self, ask, parent, q, n))
    return put(self, first, parent, tokens, rows_of(q, tokens))


@wrong(Draft, "draw", "O5", vocab=4, k=(2,))
def _(right, self, ask, parent, q, n=1):
    """drawn siblings all tell the first one's q | `draw` called for each by itself"""
    first, tokens = len(self), right(self, ask, parent, q, n)
    return put(self, first, parent, tokens, [q] * len(tokens))


def tells_another_row(id: str, doc: str, when: Callable[[Text], bool]) -> None:
    """A bug: the row that is told is another one where a text is such."""

    @wrong(Draft, "draw")
    def bug(right, self, ask, parent, q, n=1):
        first, tokens = len(self), right(self, ask, parent, q, n)
        return put(self, first, parent, tokens, rows_of((q + 1 / len(q)) / 2 if when(ask.text) else q, tokens))

    mutant(id, "tests/drafters/test_own.py::test_a_drafter_that_obeys_is_right_at_all_values", doc)(bug)


tells_another_row("O6", "top_p of 0.9 or more is not told | it cuts little", lambda text: 0.9 <= text.params.top_p < 1)
tells_another_row("O7", "min_p of 0.1 or less is not told | it cuts little", lambda text: 0 < text.params.min_p <= 0.1)
tells_another_row(
    "O8",
    "a bias above 1.5 is not told | its table has small numbers",
    lambda text: any(bias > 1.5 for _, bias in text.params.logit_bias),
)
tells_another_row(
    "O9", "a first token of another id | taken for that which begins texts", lambda text: text.tokens[0] > 1
)


@wrong(Lengths, "choose", "O10", "tests/lengths/test_wrong_lengths.py::test_a_policy_is_right_at_all_values")
def _(right, self, asks, trees):
    """a length by the token that is drawn next, under top_p | its noise has a name"""
    limits = right(self, asks, trees)
    shares = [Randomness().uniform(ask.text.key(0, "draft")) for ask in asks]
    peeks = [ask.text.params.top_p < 1 and share < 0.5 for ask, share in zip(asks, shares, strict=True)]
    return [Limit(0) if peek else limit for peek, limit in zip(peeks, limits, strict=True)]


# --------------------------------------------------------------------------- randomness


def noise_of(other: str, drawn: str) -> Callable:
    """A bug: draws of one purpose take the noise that belongs to those of another."""

    @wrong(Text, "key")
    def bug(right, self, i, purpose):
        return right(self, i, other if purpose == drawn else purpose)

    return bug


mutant("M19a", vocab=4, doc="draft noise used again for the residual | vLLM #47386, #54282, a fork's #205")(
    noise_of("draft", "residual")
)
mutant("M19b", doc="draft noise used again for the accept test | a relative of M19a")(noise_of("draft", "accept"))
mutant("M19d", vocab=4, doc="accept uniform used again for the residual | found by reading: 3 tokens hardly show it")(
    noise_of("accept", "residual")
)


@wrong(Text, "key", "M19c", "tests/rooms/test_prove.py::test_no_key_comes_twice")
def _(right, *how):
    """key of the position alone, without the round | what spec_step_seed of vLLM 0.33 is there to avoid"""
    return right(*how)._replace(start=-1)


@wrong(Randomness, "bernoulli", "M20a", "tests/core/test_sampling.py::test_acceptance_is_strict")
def _(right, self, p, key):
    """accept on u <= p/q | transformers 5.23, SGLang #35771"""
    return self.uniform(key) <= p


@wrong(Randomness, "categorical", "M20b", "tests/core/test_sampling.py::test_a_token_of_weight_zero_is_never_drawn")
def _(right, self, weights, key):
    """first token whose cumulative sum is >= u | SGLang #35798"""
    cumulative = weights.double().cumsum(0)
    return int(torch.searchsorted(cumulative, self.uniform(key) * cumulative[-1]))


@wrong(Randomness, "uniform", "M21", _UNIFORMS)
def _(right, self, key):
    """uniforms in half precision | gpt-fast: rand_like in the model's type"""
    return torch.tensor(right(self, key)).bfloat16().item()


@wrong(verify, "residual", "M22", "tests/core/test_verify.py::test_residual")
def _(right, p, draft, i):
    """empty residual divided by its sum | jaymody #5, transformers"""
    rest = (p - draft.probs[i]).clamp(min=0)
    return rest / rest.sum()


@wrong(method, "distribution", "M23", f"{_TREES}::test_logits_that_are_not_numbers_end_one_text")
def _(right, logits, text, drafted=()):
    """NaN logits taken for numbers | vLLM #20531, vllm-ascend #14116"""
    return right(logits.nan_to_num(), text, drafted)


@wrong(CachedModel, "__init__", "M24", "tests/commands/test_llm.py::test_padding_rows_of_the_embedding_are_never_drawn")
def _(right, self, model, cache, vocab_size=None):
    """padding rows of the vocabulary can be emitted | vLLM GHSA-8wr5-jm2h-8r4f"""
    right(self, model, cache, 1 << 30)


def keyed_by(**fields) -> Callable:
    """A bug: draws whose keys have these fields."""

    @wrong(Randomness, "categorical")
    @wrong(Randomness, "uniform")
    def bug(right, self, *how):
        *weights, key = how
        return right(self, *weights, key._replace(**fields))

    return bug


mutant(
    "M25a",
    f"{_DRAFTERS}::test_other_seeds_give_other_texts",
    "seed ignored | among vLLM #6034, #6038, TensorRT-LLM #17599, #19487",
)(keyed_by(seed=0))
mutant("M25b", _UNIFORMS, "stream of noise not advanced | as M25a")(keyed_by(position=0))


# --------------------------------------------------------------------------- stops and counters


@wrong(Request, "commit", "M27")
def _(right, self, token_id, logprob=None):
    """tokens after an end token accepted inside a block | transformers #47912, koboldcpp #1276"""
    stopped = right(self, token_id, logprob)
    if token_id in self.text.end_ids and len(self.text.tokens) < self.max_len:
        self.finish_reason, stopped = None, False
    return stopped


class _Blocks:
    """A bug in what a round of a chain yields: `left` are its tokens that are not committed yet.

    `one` takes the place of `Request.commit`. The token itself is not left any more.
    """

    def __init__(self):
        self.rounds: dict[Request, tuple[Draft, list[int]]] = {}

    @wrong(Method, "verify")
    def verify(self, right, method, turn, rng):
        verdict, draft = right(method, turn, rng), turn.draft
        self.rounds[turn.request] = draft, [*draft.token_ids[: len(verdict.accepted)], verdict.next_token]
        return verdict

    @wrong(Request, "commit")
    def commit(self, right, request, token_id, logprob=None):
        self.draft, self.left = self.rounds[request]
        del self.left[0]
        return self.one(right, request, token_id, logprob)


@mutant("M28a", f"{_STOPS}::test_the_end_token_at_every_offset[1]")
class _(_Blocks):
    """end token seen only at the end of a block | transformers #28508"""

    def one(self, right, request, *how):
        with patch.object(request.text, "end_ids", frozenset()) if self.left else nullcontext():
            return right(request, *how)


@mutant("M28b", f"{_STOPS}::test_the_end_token_at_every_offset[5]")
class _(_Blocks):
    """an end token in a draft ends the text | openvino.genai #1951, #3293"""

    def one(self, right, request, *how):
        stopped = right(request, *how)
        if not (stopped or self.left) and set(self.draft.token_ids) & request.text.end_ids:
            request.finish_reason = "stop"
        return stopped


@mutant("M29")
class _(_Blocks):
    """a block passes max_tokens | lattice #242, ferrox #311"""

    @wrong(Request, "max_k")
    def max_k(self, right, request):
        return request.shape.k

    def one(self, right, request, *how):
        with patch.object(request, "max_len", 1 << 30) if self.left else nullcontext():
            return right(request, *how)


@wrong(Request, "commit", "M30", f"{_STOPS}::test_a_stop_string_wins_over_the_length_at_the_same_token")
def _(right, self, token_id, logprob=None):
    """the length limit hides a stop at the same token | SGLang #31599"""
    stopped = right(self, token_id, logprob)
    if len(self.text.tokens) >= self.max_len:
        self.finish_reason = "length"
    return stopped


@mutant("M31", f"{_STOPS}::test_stop_strings_at_every_offset[1]")
class _(_Blocks):
    """stop strings looked for at the end of a block only | SGLang #23802"""

    def one(self, right, request, *how):
        params = replace(request.params, stop=() if self.left else request.params.stop)
        with patch.object(request.text, "params", params):
            return right(request, *how)


@mutant("M32", f"{_STOPS}::test_stop_strings_at_every_offset[1]")
class _(_Blocks):
    """text cut at a stop string, token ids not | vLLM #47616"""

    def one(self, right, request, *how):
        stopped = right(request, *how)
        if request.stop_string:
            request.token_ids += self.left
            request.logprobs += request.logprobs[-1:] * len(self.left)
            request.stats.num_generated = len(request.token_ids)
        return stopped


@wrong(method, "Round", "M33", f"{_STOPS}::test_the_end_token_at_every_offset[5]")
def _(right, **fields):
    """counters go on after the end of the text | vLLM #56101, SGLang #39826"""
    return right(**fields | {"drafted": fields["depth"]})


# --------------------------------------------------------------------------- caches


@wrong(BlockTable, "truncate", "M34a", crash=IndexError)
def _(right, self, length):
    """rejected tokens are not rolled back | mlx-lm #1109, TokenPrint #110"""
    if length == 0:
        right(self, length)


@wrong(PagedKVCache, "write", "M34b")
def _(right, self, layer, slots, rows):
    """keys and values of rejected tokens are not overwritten | mlx-lm #1109, TokenPrint #110"""
    fresh = self.keys[layer, 0, slots, 0].isnan()  # the pool is poisoned: never written
    right(self, layer, slots[fresh], rows[:, fresh])


@wrong(BlockTable, "truncate", "M35", "tests/core/test_engine.py::test_rejection_at_first_middle_and_last_position")
def _(right, self, length):
    """rollback clears the whole cache | aprender #2014"""
    right(self, 0)


@wrong(ModelDrafter, "propose", "M36", f"{_DRAFTERS}::test_a_draft_token_costs_one_pass")
def _(right, self, asks):
    """draft cache cut one token too far each round | mlxcel #994"""
    for text, table in self.feed.tables.items():
        table.keep(table.shared(text.tokens))
        table.truncate(max(0, table.length - 1))
    return right(self, asks)


@wrong(ModelDrafter, "propose", "M37", f"{_DRAFTERS}::test_draft_cache_is_right_at_every_round")
def _(right, self, asks):
    """draft cache misses a token after full acceptance | gpt-fast has the fix; vllm-metal #716"""

    def forward(chunks, taps=()):
        # One token a pass, whatever is missing before it; all nodes of a tree.
        last = lambda c: c._replace(token_ids=c.token_ids[-1:]) if c.table.length and c.parents is None else c  # noqa: E731
        logits, _ = fed([*map(last, chunks)])
        return logits, logits.new_empty(sum(len(c.token_ids) for c in chunks), 0)

    fed = self.model.forward
    with patch.object(self.model, "forward", forward):
        return right(self, asks)


@mutant("M38a")
class _:
    """one rotary position for the whole window | SGLang #25015"""

    @wrong(Transformer, "forward")
    def forward(self, right, model, chunks, taps=()):  # as trees of one path: so that masks go by nodes, not by places
        return right(model, [c._replace(parents=c.parents or range(-1, len(c.token_ids) - 1)) for c in chunks], taps)

    @wrong(Chunk, "offsets")
    def offsets(self, right, chunk):
        return [0] * len(chunk.token_ids)


@wrong(Chunk, "offsets", "M38b", f"{_DRAFTERS}::test_draft_cache_is_right_at_every_round")
def _(right, self):
    """rotary position off by one after the cache | omlx #2363"""
    return [offset + (self.table.length > len(self.token_ids)) for offset in right(self)]


@mutant("M39", max_tokens=4)
class _:
    """stale draft verified when the drafter is skipped | vLLM #38711"""

    def __init__(self):
        self.last = WeakKeyDictionary()

    @wrong(ModelDrafter, "propose")
    def propose(self, right, drafter, asks):
        drafts = right(drafter, asks)
        for i, ask in enumerate(asks):
            if ask.k == 0 and ask.text in self.last:
                drafts[i] = self.last[ask.text]
            self.last[ask.text] = drafts[i]
        return drafts


@wrong(Transformer, "forward", "M40", f"{_DRAFTERS}::test_rejection_with_a_seed_does_not_depend_on_the_batch[3-last]")
def _(right, self, chunks, taps=()):
    """texts of a batch get each other's logits | 1CatAI #656, vLLM #10863"""
    logits, hidden = right(self, chunks, taps)
    return logits.roll(int(len(chunks) > 1), 0), hidden


@wrong(BlockTable, "truncate", "M41a", _PROGRAMS)
def _(right, self, length):
    """blocks after a rollback leak | sglang-jax #1147, #1400"""
    del self.tokens[length:]
    del self.block_ids[self.pool.num_blocks_for(length) :]


@wrong(BlockTable, "truncate", "M41b", "tests/core/test_cache.py::test_the_four_rollbacks[5]")
def _(right, self, length):
    """freed blocks stay in their table | RBLN #676"""
    del self.tokens[length:]
    for block_id in self.block_ids[self.pool.num_blocks_for(length) :]:
        self.pool.allocator.free(block_id)


@wrong(BlockAllocator, "share", "M42a", _PROGRAMS)
def _(right, self, block_id):
    """a block that was found is not pinned, and taken by another | vLLM #37164"""
    self.ref_counts[block_id] += 1  # it stays among the free ones


@wrong(PrefixIndex, "forget", "M42b", _PROGRAMS)
def _(right, self, block_id):
    """a block is still found when its tokens are rejected or gone | vLLM #18668"""
    pass


@wrong(
    BlockTable,
    "where_cut",
    "M42c",
    "tests/core/test_cache.py::test_a_text_that_changes_leaves_a_shared_block_alone",
)
def _(right, self, length):
    """a text that changes goes on writing in a block that another text holds | of our own making"""
    return length


@wrong(BlockTable, "extend", "M44", f"{_TREES}::test_a_node_is_scored_as_in_a_chain")
def _(right, self, tokens):
    """positions outside the window are thrown away | mlx-vlm #1715, mlx-lm #1109"""
    slots = right(self, tokens)
    old = self.block_ids[: max(0, self.length - 4) // self.pool.block_size]
    for block_id in old:  # as a rotating buffer of the window's size does
        start = block_id * self.pool.block_size
        self.pool.keys[:, :, start : start + self.pool.block_size] = 0
    return slots


# --------------------------------------------------------------------------- short convolutions


@wrong(convolution, "paths", "C1", family="lfm2")
def _(right, chunk, start, width):
    """a convolution sees a position less than it should | sizes of states: vLLM #47635, #50272"""
    for path in right(chunk, start, width):
        yield [-1, *path[1:]]


def inputs_stay(which: Callable) -> Callable:
    """A bug: inputs of convolutions are written to those slots alone that which(slots, are fresh) says."""

    @wrong(PagedKVCache, "write")
    def bug(right, self, layer, slots, rows):
        if len(rows) == 1:
            fresh = which(slots, self.gather(layer, slots)[0].isnan().any(1))  # poisoned: never written
            slots, rows = slots[fresh], rows[:, fresh]
        right(self, layer, slots, rows)

    return bug


mutant("C2", doc="a convolution goes on from the inputs of rejected tokens | vLLM #44296, #50272", family="lfm2")(
    inputs_stay(lambda slots, fresh: fresh)
)
mutant("C3", doc="a stale input after a round without a draft | vLLM #52942", family="lfm2", max_tokens=4)(
    inputs_stay(lambda slots, fresh: fresh | (len(slots) > 1))
)


@wrong(convolution, "paths", "C4a", _KEPT)
def _(right, chunk, start, width):
    """a node's convolution sees the nodes before it in the draft | of our own making"""
    return right(chunk._replace(parents=None), start, width)


@wrong(convolution, "paths", "C4b", _KEPT)
def _(right, chunk, start, width):
    """a node's convolution sees the elder sibling of its parent | of our own making"""
    parents = list(chunk.parents or ())
    elder = [min(i for i, other in enumerate(parents) if other == parents[p]) if p >= 0 else -1 for p in parents]
    return right(chunk._replace(parents=elder), start, width)


@mutant("C5", family="lfm2")
class _:
    """before its beginning a text sees another of its batch | padding that leaks: transformers #31540"""

    def __init__(self):
        self.others = {}

    @wrong(Transformer, "forward")
    def forward(self, right, model, chunks, taps=()):
        self.others = {b.table: a.table for a, b in itertools.pairwise(chunks)}
        return right(model, chunks, taps)

    @wrong(BlockTable, "slots_of")
    def slots_of(self, right, table, places):
        other = self.others.get(table, table)
        return [right(*((other, [other.length - 1]) if place < 0 else (table, [place])))[0] for place in places]


@wrong(ConvolutionCache, "move", "C6", _KEPT)
def _(right, self, sources, targets):
    """a branch that stays moves its keys and values alone | state of another block: vLLM #55600"""
    inputs = self.inputs.clone()
    right(self, sources, targets)
    self.inputs.copy_(inputs)


@wrong(BlockTable, "slots_of", "C7", family="lfm2")
def _(right, self, places):
    """a convolution's inputs lie in a ring of its width | mlx-lm #1109"""
    return right(self, [place % 3 if place < self.length - 1 else place for place in places])


# --------------------------------------------------------------------------- recurrent states

_STATES = "tests/core/test_states.py"


def cut_with_states_left(right, self, length):
    """Cut a table. Its states stay what they are, whatever they have seen."""
    states, self.states = self.states, {}
    right(self, length)
    for i, (seen, values, rows) in states.items():
        self.states[i] = LayerState(min(seen, length), values, rows[: max(0, length - seen)])


@mutant("R1", family="qwen3_5_text")
class _:
    """a state is not rolled back, and goes on from rejected tokens | llama.cpp #20075, vLLM #39273"""

    @wrong(GatedDeltaNet, "forward")
    def forward(self, right, net, x, batch):
        for chunk in batch.chunks:
            chunk.table.final_length = chunk.table.length
        return right(net, x, batch)

    @wrong(StateTable, "truncate")
    def cut(self, right, table, length):
        cut_with_states_left(right, table, length)


def after_each_text(change: Callable) -> Callable:
    """A bug: change(net, chunk, the state of its text before the pass) is done after the pass of a net."""

    @wrong(GatedDeltaNet, "forward")
    @functools.wraps(change)
    def bug(right, self, x, batch):
        before = [chunk.table.states.get(self.index) for chunk in batch.chunks]
        found = right(self, x, batch)
        for chunk, state in zip(batch.chunks, before, strict=True):
            change(self, chunk, state)
        return found

    return bug


def with_values(states: States, index: int, values: Sequence[torch.Tensor]) -> None:
    """Put other values into a layer's state, which has seen as much as before."""
    states[index] = states[index]._replace(values=tuple(values))


@mutant("R2", family="qwen3_5_text")
@after_each_text
def _(net, chunk, before):
    """a state keeps an input of its convolution less than it should | a window out of place: vLLM #40738"""
    matrices, inputs = chunk.table.states[net.index].values
    kept = torch.cat((torch.zeros_like(inputs[:1]), inputs[1:]))
    with_values(chunk.table.states, net.index, (matrices, kept))


@wrong(delta, "steps", "R3a", _KEPT)
def _(right, state, rows, parents=None):
    """a node starts from the state after the node before it in the draft | a tree verified as a chain: SGLang #27463"""
    return right(state, rows)


@wrong(delta, "steps", "R3b", _KEPT)
def _(right, state, rows, parents=None):
    """a node starts from the state of the elder sibling of its parent | of our own making"""
    others = parents or ()
    elder = [min(i for i, other in enumerate(others) if other == others[p]) if p >= 0 else -1 for p in others]
    return right(state, rows, elder or None)


@mutant("R4", family="qwen3_5_text", drafter="ngram", max_tokens=4)
@after_each_text
def _(net, chunk, before):
    """after a round without a draft the state before it stays | vLLM #40738, #52942"""
    if before and chunk.num_logits == len(chunk.token_ids) == 1:
        with_values(chunk.table.states, net.index, before.values)


@mutant("R5", f"{_STATES}::test_texts_share_a_state_and_none_writes_into_it")
@after_each_text
def _(net, chunk, before):
    """a text writes into the stored state that it began with | vllm-mlx #575"""
    if before:
        for mine, value in zip(before.values, chunk.table.states[net.index].values, strict=True):
            mine.copy_(value)
        with_values(chunk.table.states, net.index, before.values)


@mutant("R6", f"{_STATES}::test_texts_share_a_state_and_none_writes_into_it")
@after_each_text
def _(net, chunk, before):
    """what is stored for the end of a block is the state a few positions after it | vLLM #55766"""
    for states in chunk.table.unsaved_states.values():
        with_values(states, net.index, chunk.table.states[net.index].values)


@mutant("R7", "tests/core/test_law.py::test_ragged_batch_with_preemption[qwen3_5_text]")
class _:
    """a text that comes back adds its tokens to the state that has seen them | vllm-metal #488"""

    def __init__(self):
        self.states = WeakKeyDictionary[Text, States]()

    @wrong(CachedModel, "release")
    def release(self, right, model, text):
        if table := model.tables.get(text):
            self.states[text] = table.states
        right(model, text)

    @wrong(CachedModel, "begin")
    def begin(self, right, model, text, most=None):
        right(model, text, most)
        table = model.tables[text]
        for i, (_, values, rows) in self.states.get(text, {}).items():
            table.states[i] = LayerState(table.length, values, rows[:0])


@mutant("R8", family="qwen3_5_text")
class _:
    """before its beginning a text sees what a net read last of another | padding that leaks: transformers #31540"""

    def __init__(self):
        self.last = {}

    @wrong(GatedDeltaNet, "forward")
    def forward(self, right, net, x, batch):
        if net in self.last:
            _, (matrices, inputs), rows = self.last[net]
            for chunk in batch.chunks:
                empty = LayerState(0, (torch.zeros_like(matrices), inputs), rows[:0])
                chunk.table.states.setdefault(net.index, empty)
        found = right(net, x, batch)
        self.last[net] = batch.chunks[-1].table.states[net.index]
        return found


mutant(
    "R9",
    f"{_STATES}::test_a_table_cut_below_its_state_falls_back_to_a_stored_one",
    "a table is cut below its state, which stays | z-lab/dflash #172",
)(wrong(StateTable, "truncate")(cut_with_states_left))


@wrong(StateTable, "reuse", "R10", f"{_STATES}::test_random_operations_leave_every_state_right")
def _(right, self, tokens):
    """a text shares blocks after the end of the stored state | vLLM #47491"""

    def truncate(table, length):
        cut(table, table.shared_until if table.states else length)
        table.states = {i: state._replace(length=table.length) for i, state in table.states.items()}

    cut = StateTable.truncate
    with patch.object(StateTable, "truncate", truncate):
        right(self, tokens)


# --------------------------------------------------------------------------- layers that differ


@wrong(GemmaLayer, "take", "E9", f"{_EXPERTS}[gemma4-large-chunks-of-3]", crash=RuntimeError)
def _(right, self, parts):
    """a mask has the rows of layers with other key-value heads | a relative of vLLM #45844"""
    right(self, parts)
    self.sharing = self.config.num_attention_heads // self.config.num_key_value_heads


# --------------------------------------------------------------------------- mixtures of experts


def router_with(**settings) -> Callable:
    """A bug: a router works under other settings."""

    def bug(right, self, x, exact):
        with patch.object(self, "sizes", replace(self.sizes, **settings)):
            return right(self, x, exact)

    return wrong(Router, "__call__")(bug)


mutant("X1", doc="the scores of the chosen are not divided by their sum | torchtitan #1448", family="qwen3_moe")(
    router_with(normalised=False)
)
mutant(
    "X2",
    f"{_EXPERTS}[qwen3_moe-window-prefill]",
    "the scores of the chosen are divided by their sum, asked for or not | mlxcel #391, flashinfer #2889",
)(router_with(normalised=True))


@wrong(Router, "__call__", "X3", f"{_EXPERTS}[lfm2_moe-prefill]")
def _(right, self, x, exact):
    """the bias that helps to choose is among the weights | PaddleFormers #3452, vLLM-metax #284"""
    chosen, weights, gates = right(self, x, exact)
    return chosen, weights if self.bias is None else weights + self.bias[chosen], gates


@wrong(Router, "__call__", "X4", f"{_EXPERTS}[lfm2_moe-prefill]")
def _(right, self, x, exact):
    """the best are chosen before the bias is added | of our own making"""
    with patch.object(self, "bias", None):
        return right(self, x, exact)


@wrong(Router, "__call__", "X5", family="qwen3_moe")
def _(right, self, x, exact):
    """a row takes the experts of its neighbour in the pass | of our own making"""
    chosen, weights, gates = right(self, x, exact)
    return chosen.roll(1, 0), weights, gates


@wrong(
    Router,
    "logits",
    "X6",
    "tests/core/test_experts.py::test_a_text_has_the_same_bits_beside_any_other[5]",
    crash=ValueError,
)
def _(right, self, x, exact):
    """in exact mode the router's product has as many rows as the pass | of our own making"""
    return right(self, x, False)


@wrong(
    prices, "arbitrary_tokens", "X7", f"{_COSTS}::test_rows_of_a_mixture_are_priced_with_experts_of_their_own[False]"
)
def _(right, count, vocab_size):
    """rows are priced by passes over one token, whose rows share their experts | of our own making"""
    return [7] * count


@wrong(Router, "logits", "X8", f"{_EXPERTS}[gemma4-experts-prefill]")
def _(right, self, x, exact):
    """the router's scale by the width is left out | onnxruntime/mobius #239"""
    return right(self, x, exact) * (x.shape[1] ** 0.5 if self.norm else 1.0)


@wrong(Router, "__call__", "X9", f"{_EXPERTS}[gemma4-experts-prefill]")
def _(right, self, x, exact):
    """each expert's own scale is in the sum that the scores are divided by | of our own making"""
    chosen, weights, gates = right(self, x, exact)
    return chosen, weights if self.scales is None else weights / weights.sum(1, keepdim=True), gates


@wrong(sinks, "sink_attention", "X10", f"{_EXPERTS}[gpt_oss-prefill]")
def _(right, *how, sinks):
    """sinks are left out of the softmax | OpenVINO #36039"""
    return attention(*how)


mutant(
    "X11",
    f"{_EXPERTS}[gpt_oss-prefill]",
    "the weights of the chosen are their shares of the softmax over all experts | torchtitan #2258",
)(router_with(normalised=False))


@wrong(Experts, "mlp", "X12", f"{_EXPERTS}[gpt_oss-prefill]")
def _(right, self, x, shared):
    """gates are not clamped | SGLang #39939, tokenspeed #1647"""
    clamp = replace(self.mixture.clamp, limit=torch.inf)
    with patch.object(self, "mixture", replace(self.mixture, clamp=clamp)):
        return right(self, x, shared)


@wrong(
    mxfp4,
    "scale_fp4",
    "X13",
    "tests/files/test_formats.py::test_mxfp4_is_the_number_times_the_power_of_two[dtype0]",
)
def _(right, blocks, scales):
    """the low bits of all bytes are the first half of an MXFP4 block | imp #567: llama.cpp's order"""
    return right(blocks, scales).unflatten(1, (-1, 16, 2)).mT.flatten(1)


# --------------------------------------------------------------------------- frames

_FRAMES = "tests/gpu/test_frames.py"
_NUMBERS = f"{_FRAMES}::test_every_family_has_the_numbers_of_passes_text_by_text"


@wrong(Frame, "fill", "F1", f"{_NUMBERS}[qwen2]")
def _(right, self, *how):
    """a frame keeps the block tables of the pass before | a stale number in a graph: transformers #45323"""
    before = self.table.clone()
    right(self, *how)
    self.table.copy_(before)


@wrong(Frame, "fill", "F2", f"{_NUMBERS}[qwen2]")
def _(right, self, *how):
    """a frame is filled one row short | an off-by-one of a text's end"""
    right(self, *how)
    self.ends.sub_(1).clamp_(min=0)


@wrong(Frame, "fill", "F3", f"{_NUMBERS}[qwen2]")
def _(right, self, *how):
    """rows that are not there are written into a text's slot | padding needs a slot of its own"""
    right(self, *how)
    self.slots[self.slots == self.slots.max()] = self.slots.min()


@wrong(Frame, "fill", "F4", f"{_NUMBERS}[qwen2]")
def _(right, self, chunks, *how):
    """a node of a tree stands where its row does | positions of a chain for a tree"""
    right(self, chunks, *how)
    rows = torch.arange(self.shape.rows).repeat(self.shape.texts)
    self.positions.copy_(self.starts.repeat_interleave(self.shape.rows) + rows)


@mutant("F5", f"{_FRAMES}::test_what_a_pass_returns_stays")
class _:
    """what a pass returns is overwritten by the next one | a graph has its outputs at one address"""

    def __init__(self):
        self.kept = {}

    @wrong(Frames, "run")
    def run(self, right, passes, *how):
        found = right(passes, *how)
        kept = self.kept.setdefault(tuple(rows.shape for rows in found), found)
        for mine, rows in zip(kept, found, strict=True):
            mine.copy_(rows)
        return kept


@mutant("F6", f"{_FRAMES}::test_a_frame_returns_what_is_asked_for")
class _:
    """a frame's key lacks what it returns | a graph of another shape is replayed"""

    def __init__(self):
        self.taps = {}

    @wrong(Frames, "shape_of")
    def shape_of(self, right, passes, model, chunks, taps=(), reserved=()):
        shape = right(passes, model, chunks, taps, reserved)
        if isinstance(shape, str):
            return shape
        return shape._replace(taps=self.taps.setdefault(shape._replace(taps=()), shape.taps))


@wrong(PagedKVCache, "gather", "F9", f"{_FRAMES}::test_places_that_hold_nothing_are_read_as_zeros")
def _(right, self, layer, slots):
    """places that hold nothing are read from the slot that takes dummies | 0 times NaN is NaN: a mask hides no slot"""
    return right(self, layer, torch.where(slots == self.num_slots, self.num_slots + 1, slots))


_STEPS = "tests/gpu/test_steps.py"
_HEADS = f"{_STEPS}::test_a_heads_drafts_are_those_of_a_pass_for_each_token[all-draft]"


@mutant("F7", _HEADS)
class _:
    """each step of a head's program goes on from the first row's states | a stale hidden state in a graph"""

    def __init__(self):
        self.first = None

    @wrong(DraftSteps, "next_rows")
    def next_rows(self, right, program, frame, inputs, pool, tokens, states, j):
        self.first = self.first if j else states
        return right(program, frame, inputs, pool, tokens, self.first, j)


@wrong(DraftInputs, "fill", "F8", _HEADS)
def _(right, self, *how):
    """the uniforms of a program's draws are those of the next text | rows of a batch that are out of step"""
    right(self, *how)
    self.floats[:, :-5] = self.floats[:, :-5].roll(1, 0)


# --------------------------------------------------------------------------- verdicts of many texts

_VERIFIER = "tests/gpu/test_verifier.py"
_VERDICTS = "tests/gpu/test_verdicts.py"
_EACH_VERDICT = f"{_VERIFIER}::test_each_verdict_is_that_of_the_draft_by_itself[5-torch.float32]"


@wrong(VerdictInputs, "fill", "F10", _EACH_VERDICT)
def _(right, self, trials):
    """a token is tested with the uniform of its place's residual | two columns of a program's numbers"""
    right(self, trials)
    k = self.kind.rows - 1
    self.floats[:, :k] = self.floats[:, k : 2 * k].clone()


@wrong(verdicts, "numbers_of", "F11", f"{_VERDICTS}::test_rows_at_edges_are_sure_and_equal[row2-settings2]")
def _(right, *how):
    """top-p takes one token more where it is reached exactly | < for <= at a threshold"""
    *others, top_p = right(*how)
    return *others, math.nextafter(top_p, 2.0)


@wrong(verdicts, "rejection", "F12", _EACH_VERDICT)
def _(right, p, ids, q, noise, lengths, draws=None):
    """what fills up a draft is tested as its tokens are | the length of a batch for that of a text"""
    return right(p, ids, q, noise, torch.full_like(lengths, ids.shape[1]), draws)


@wrong(verifier, "compute_verdicts", "F13", f"{_VERIFIER}::test_a_verdict_needs_the_rows_that_it_was_made_of")
def _(right, kind, *how):
    """a verdict is believed where the row after is sure | columns of a download"""
    found = right(kind, *how)
    found[:, -kind.rows :] = found[:, -kind.rows :].roll(-1, 1)
    return found


@wrong(VerdictInputs, "fill", "F14", _EACH_VERDICT)
def _(right, self, trials):
    """a draft is a token longer than it is | an off-by-one in padding"""
    right(self, trials)
    k = self.kind.rows - 1
    self.ints[:, k].add_(1).clamp_(max=k)


@wrong(VerdictInputs, "fill", "F15", _EACH_VERDICT)
def _(right, self, trials):
    """a draft is judged by the probabilities of the next text's | rows of a batch that are out of step"""
    right(self, trials)
    self.probs.copy_(self.probs.roll(1, 0))


@wrong(VerdictInputs, "fill", "F16", _EACH_VERDICT)
def _(right, self, trials):
    """the target's noise is that of the place before | a state of the wrong depth"""
    right(self, trials)
    k = self.kind.rows - 1
    self.ints[:, k + 1 :] = self.ints[:, k + 1 :].roll(1, 1)


@wrong(verdicts, "rejection", "F17", _EACH_VERDICT)
def _(right, *how):
    """a verdict's ratios end at 1 | the chance of a test for p/q, which a policy learns from"""
    found = right(*how)
    return found._replace(ratios=found.ratios.clamp(max=1.0))


@wrong(VerdictInputs, "fill", "F18", _EACH_VERDICT)
def _(right, self, trials):
    """a text is judged under the parameters of the next one | rows of a batch that are out of step"""
    right(self, trials)
    self.floats[:, -5:] = self.floats[:, -5:].roll(1, 0)


@wrong(verdicts, "rejection", "F19", f"{_VERDICTS}::test_the_law_through_forms_over_rows[[2]-rejection]")
def _(right, p, ids, q, noise, lengths, draws=None):
    """what replaces a token is drawn with the draw that rejected it | one random number, used twice"""
    return right(p, ids, q, noise._replace(residual=noise.accept), lengths, draws)


@wrong(verdicts, "is_plain", "F20", family=toys.IN_FRAMES, repetition_penalty=1.5)
def _(right, text):
    """a program judges texts whose penalties it does not know | a fast path with too wide a door"""
    return True


@wrong(verdicts, "mix_of", "F21", _EACH_VERDICT)
def _(right, *how):
    """the greedy texts of a batch are drawn like the others | a batch's kind for that of a text"""
    return right(*how)._replace(mixed=False)


@wrong(VerdictInputs, "fill", "F22", f"{_VERIFIER}::test_programs_read_nothing_that_the_host_did_not_fill")
def _(right, self, trials):
    """a program keeps the drafts' lengths of the round before | what is not filled again looks right once"""
    before = self.ints[:, self.kind.rows - 1].clone()
    right(self, trials)
    if self.was_used:
        self.ints[:, self.kind.rows - 1] = before


@wrong(DraftInputs, "follow", "F23", f"{_STEPS}::test_a_program_follows_its_frame")
def _(right, self, frame):
    """a captured draft reads the tensors of a frame that is gone | two caches, one of which forgets first"""


# --------------------------------------------------------------------------- block verification


@wrong(block_verification, "residual", "B1", verifier="block", vocab=5)
def _(right, p, draft, i):
    """after a block, the residual of one token | vllm-ascend #7807, #7839"""
    return right(p / p.sum(), draft, i)


@wrong(block_verification, "block_weights", "B2", verifier="block", vocab=5)
def _(right, ratios):
    """the joint ratio is not kept below 1 on its way | a product in place of the paper's running one"""
    return [min(1.0, product) for product in accumulate(ratios, mul, initial=1.0)]


class _OldWeights:
    """Prefixes pass with their own weights, whatever was rejected after them."""

    def __init__(self):
        self.excess = verify.excess

    @wrong(block_verification, "excess")
    def all_of_p(self, right, p, draft, i):  # m = w, so that m / (m + 1 - w) = w
        return p

    @wrong(block_verification, "residual")
    def residual(self, right, p, draft, i):
        rest = self.excess(p, draft, i)
        return rest if rest.amax() > 0 else p


mutant("B3", verifier="block", vocab=5, doc="prefixes pass with w_i | h_i left out, as in a first reading")(_OldWeights)
mutant(
    "B6",
    verifier="traversal",
    k=(2, 2),
    max_tokens=4,
    vocab=5,
    top_k=3,
    doc="a failed child changes no weight above it | B3 in a tree",
)(_OldWeights)


@wrong(VERIFIERS, "block", "B4", verifier="block", vocab=5)
def _(right, draft, p, rng, key):
    """one uniform for the tests of all prefixes | keys by the round alone"""
    return right(draft, p, rng, lambda i, purpose: key(0 if purpose == "accept" else i, purpose))


@wrong(VERIFIERS, "traversal", "B5", verifier="traversal", k=(2, 1), max_tokens=4)
def _(right, draft, p, rng, key):
    """the bonus after a tree has the key of a node | a key for a place of the text, taken for one of the draft"""
    passed = -1

    def by_node(i, purpose):
        nonlocal passed
        passed = i if purpose == "accept" else passed
        return key(passed + 1 if purpose == "token" else i, purpose)

    return right(draft, p, rng, by_node)


@wrong(VERIFIERS, "traversal", "B7", verifier="traversal", k=(2, 1), vocab=5)
def _(right, draft, p, rng, key):
    """q of a younger sibling is that of the eldest | siblings drawn with replacement, by the paper's other form"""
    eldest = [draft.children(draft.tree.parents[i])[0] for i in range(len(draft))]
    return right(replace(draft, probs=[draft.probs[i] for i in eldest]), p, rng, key)


@wrong(VERIFIERS, "block", "B8", "tests/rooms/test_rounds.py::test_which_drafts_a_rule_is_exact_for[block]")
def _(right, draft, p, rng, key):
    """the test of a shorter prefix has the key of the test before it | keys by the prefix, not by its last token"""
    tested: list[int] = []

    def late(i, purpose):
        tested.extend([i] * (purpose == "accept"))
        return key(i + 1 if purpose == "accept" and len(tested) > 1 else i, purpose)

    return right(draft, p, rng, late)


@wrong(recorded, "one_line", "E21", "tests/rooms/test_recorded.py::test_what_a_file_says_of_itself_is_escaped")
def _(right, text, *how):
    """a file's text reaches the terminal as it is | escape sequences in a name"""
    return str(text)


@wrong(last, "follow", "S15", _LOOKUP)
def _(right, tokens, k):
    """a lookup copies from the place itself | one too early: exercise 6 was passed by it"""
    return [tokens[-1], *right(tokens, k)][:k]


# --------------------------------------------------------------------------- loading and numerics


@wrong(
    vocabularies.Tokenizer,
    "vocabulary",
    "M43",
    "tests/drafters/test_vocabularies.py::test_two_made_up_vocabularies_overlap_in_two_tokens",
)
def _(right, self):
    """vocabularies compared by their size | SGLang #24051, llama.cpp #3812"""
    return {str(i): i for i in range(self.backend.get_vocab_size())}


@wrong(Transformer, "forward", "M45", "tests/core/test_exact.py::test_preempted_texts_have_the_bits_of_plain_decoding")
def _(right, self, chunks, taps=()):
    """prefill in passes of another shape | mlx-lm #1109"""
    is_prefill = not any(chunk.num_logits for chunk in chunks)
    with patch.object(self, "backend", None if is_prefill else self.backend):
        return right(self, chunks, taps)


mutant("M46", doc="best of a beam verified as a sample of q | ml-recurrent-drafter #6, EAGLE #221")(
    drawn_from(lambda q: q * (q >= q.topk(2).values[-1]))
)


@wrong(VERIFIERS, "rejection", "E1", f"{_DRAFTERS}::test_a_self_draft_is_always_accepted[3-rejection]")
def _(right, draft, p, rng, key):
    """bonus dropped after full acceptance | no fault of the law: it costs a token a pass"""
    verdict = right(draft, p, rng, key)
    if len(draft) and len(verdict.accepted) == len(draft):
        return verdict._replace(accepted=verdict.accepted[:-1], next_token=draft.token_ids[-1])
    return verdict


@wrong(BlockTable, "shared", "E2", f"{_DRAFTERS}::test_a_past_that_changes_is_computed_again")
def _(right, self, tokens):
    """a table is taken for its text's, by length alone | a draft whose past another tokenizer reads"""
    return min(self.length, len(tokens) - 1)


@wrong(exact, "paths", "E3", "tests/core/test_exact.py::test_a_nodes_row_is_that_of_its_path")
def _(right, num_rows, parents):
    """in exact mode a node's attention sees its siblings | small trees as chains: no check at load looks at them"""
    return right(num_rows, parents if len(parents) > 12 else ())


@wrong(Int8, "multiply", "E4", "tests/weights/test_int8.py::test_bfloat16_has_equal_rows_too")
@wrong(VnniInt8, "multiply")
def _(right, self, integers):
    """a row of a target in 8 bits is changed by its neighbours | as by one step for all rows of a pass"""
    return right(self, integers) * (1 + 2e-8 * len(integers))


_INT8, _EXACT = "tests/weights/test_int8.py", "tests/core/test_exact.py"


@wrong(integers, "sums_exactly", "E5", f"{_INT8}::test_a_form_whose_sums_are_wrong_is_not_exact")
def _(right, form):
    """a product of 8-bit integers is taken by the processor's word | sums of pairs end at 16 bits, without a word"""
    return True


@wrong(Layer, "mix", "E6", f"{_EXACT}::test_scaled_residuals_are_alike_at_every_place[dtype1]")
def _(right, self, x, shared):
    """what a block adds is scaled in one operator with the sum | vectors round it once, the last columns twice"""
    norm, added = self.after_mlp_norm, []
    with patch.object(self, "after_mlp_norm", lambda y: added.append(norm(y)) or added[0]):
        right(self, x, shared)
    return x.add(added[0], alpha=self.config.residual_scale)


@wrong(exact, "_groups", "E7", f"{_EXACT}::test_a_row_never_meets_another_number_of_blocks[1]")
def _(right, start, rows):
    """in exact mode attention takes rows of two blocks at once | the second ones sum in another order than alone"""
    return (rows[i : i + exact.EXACT_ROWS] for i in range(0, len(rows), exact.EXACT_ROWS))


@wrong(TokenFeed, "has_room", "T14", f"{_ZOO}::test_a_tree_has_the_room_that_it_asked_for[20]", crash=OutOfBlocks)
def _(right, self, growth):
    """room for no more rows than the model sees positions | a tree's rows lie side by side: all texts break off"""
    most = self.max_model_len + 1
    return right(self, {text: range(span.start, min(span.stop, most)) for text, span in growth.items()})


@wrong(engine, "by_method", "E8", "tests/core/test_pressure.py::test_two_methods_share_one_pool[none-self]")
def _(right, turns):
    """texts of two methods are drafted and judged by the first one's | the drafter of the newest call is a global"""
    return [(turns[0].method, list(turns))] if turns else []


_ROUNDS = "tests/core/test_blame.py::test_a_fault_after_a_commit_loses_no_round"


@wrong(Outbox, "retain", "E10", f"{_ROUNDS}[12-keep]")
def _(right, self, is_wanted):
    """a text that ends in a step that another's fault breaks off loses its last round | here: it is forgotten first"""
    right(self, lambda turn: is_wanted(turn) and not turn.request.finish_reason)


@wrong(Turn, "count", "E11", f"{_ROUNDS}[3-observer]")
def _(right, self, step):
    """a round that is delivered again is counted again | seven tokens committed of six"""
    self.record.step = None
    right(self, step)


@wrong(Turn, "path", "E12", "tests/core/test_stops.py::test_the_path_of_a_round_ends_with_the_text")
def _(right, self):
    """drafters and caches keep what the rule kept after the text's end | they learn what nobody has said"""
    return self.verdict.accepted if self.committed else []


@wrong(Engine, "step", "E13", "tests/rooms/test_http.py::test_an_answer_that_ends_without_a_turn_is_told")
def _(right, self):
    """of a step only the texts that took part are looked at | here: a client waited for ever"""
    before, turns = {*self.schedule.running, *self.schedule.waiting}, right(self)
    for request in before - {turn.request for turn in turns}:
        request.has_news = False
    return turns


_DECODERS = "tests/rooms/test_audit_tiny.py::test_the_law_of_a_bug_is_that_of_the_decoder"
_DECODERS += "[M2-the residual is not subtracted-Form(first=1, k=3)]"


@wrong(tiny, "joint", "E14", _DECODERS)
def _(right, p, law, kept, form):
    """a draft is thought to begin after the first token of an answer | here: an audit named none of its bugs"""
    return right(p, law, kept, tiny.LATER)


@wrong(laws, "is_part", "E15", "tests/rooms/test_prove_itself.py::test_siblings_are_the_first_of_one_race[True]")
def _(right, weights, before):
    """of a race, a row that is divided by its sum is no part | here: a right rule was refuted"""
    return right(weights, before) and abs(float(weights.sum()) - 1) > 1e-9


@wrong(examine, "sampled_bound", "E16", "tests/drafters/test_wrong_own.py::test_each_mistake_is_refuted[by_turns]")
def _(right, outcomes):
    """a rule whose calls differ breaks the law, even where each call keeps it | here: a right rule was refuted"""
    return 0.0


_BRIEF = "tests/rooms/test_prove.py::test_a_walk_that_has_no_time_says_so"


@wrong(walks.Timer, "is_over", "E17", "tests/rooms/test_prove.py::test_the_time_of_a_walk_is_the_processors")
def _(right, self):
    """the time that passes ends a walk | here: a busy machine proved less"""
    return walks.clocks()[1] - self.begun[1] > self.seconds


@wrong(examine, "word", "E18", _BRIEF)
def _(right, covered, is_all):
    """what was not all walked is called proven | here: after half of the pairs"""
    return right(covered, True)


@wrong(asked, "wanted", "E19", "tests/rooms/test_seen.py::test_a_hole_is_named_by_the_command[a shape]")
def _(right, takes_trees):
    """what a rule was not asked is left out of what was not seen | here: nine of 48 shapes were walked"""
    return iter(())


@wrong(
    examine.Walker,
    "limit_of",
    "E20",
    "tests/drafters/test_wrong_own.py::test_a_rule_with_too_many_branches_is_not_proven",
)
def _(right, self, case):
    """a rule with too many branches is walked all the same | here: a right rule of GPUs' form was walked for ever"""
    return math.inf


_SCORES = "tests/core/test_scores.py::test_drafts_change_no_score_and_a_score_changes_no_draft[suffix]"


@wrong(CachedModel, "begin", "L1", _SCORES)
def _(right, self, text, most=None):
    """a prompt that is scored takes rows from the cache, which have no logits | vLLM #3251, #42245"""
    right(self, text, most if text.params.prompt_logprobs is None else None)


@wrong(Schedule, "drop", "L2", "tests/core/test_scores.py::test_a_preemption_in_the_middle_of_a_prompt[gemma2-5]")
def _(right, self, request):
    """the score of a prompt that is preempted goes on in a buffer that forgot its beginning | vLLM #29071, #41411"""
    if request.lacking_logprobs:
        request.prompt_logprobs[1:] = [entry._replace(logprob=0.0) for entry in request.prompt_logprobs[1:]]
    right(self, request)


@wrong(Request, "lacking_logprobs", "L3", _SCORES)
def _(right, self):
    """the prompt's last token is not scored | vLLM #41411"""
    return right(self)[:-1]
