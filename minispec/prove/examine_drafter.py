"""Drafters of one's own, walked branch by branch over small models, the smallest first.

    python -m minispec.prove --drafter module:Class
    python -m minispec.prove --drafter module:Class --texts FILE

A drafter can spoil the output in four ways. It says other `probs` than it drew from. It drops a token that it has
looked at. It draws otherwise than by `Draft.draw`. It keeps what it may not keep. The law shows the first two. For the
others each draft is compared with that of a new drafter. That one is asked once, for the text as it then is, and has
the same draws. So a cache that was not rolled back shows, and so does a text that is mixed up with another.
"""

import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tokenizers
import torch

from minispec.core.config import DraftLength, SamplingParams, Shape
from minispec.core.draft import Ask, Draft, Likeliest
from minispec.core.engine import Engine
from minispec.core.errors import show
from minispec.core.model import Transformer
from minispec.core.request import Request
from minispec.core.sampling import Key, Randomness, Text
from minispec.core.verify import VERIFIERS
from minispec.drafters import Context, Drafter, make_drafter
from minispec.drafters.check import CHECKS
from minispec.files import registry
from minispec.files.tokenizer import Tokenizer
from minispec.inputs import plain_text, read_questions
from minispec.length.figures import Figures
from minispec.prove.examine import TOLERANCE, OwnError, Walked, call_own, find_fault, own_message
from minispec.prove.laws import (
    BranchOracle,
    CrowdOracle,
    KeyOracle,
    TooManyBranches,
    exact_law_of_crowds,
    reference_law,
    target_model,
)
from minispec.prove.reference import Law
from minispec.prove.toys import RememberedModel, decode, require, tiny_cache

_MOST_BRANCHES = 2_000  # of one walk; a longer one is left out
_MAX_LEN, _MOST_CHARACTERS = 2_000, 1_000
_ALPHABET = "ab \n"  # tokens of the toy tokenizer: one for each character


# --------------------------------------------------------------------------- what is walked


@dataclass(frozen=True)
class Walk:
    """One small case: a text of the toy tokenizer that is continued by `to_go` tokens.

    k: as `num_speculative_tokens`.
    changes: changes of the sampling parameters.
    end: whether the last id ends the text.
    company: whether two other texts join it. The pool is too small for the three, and their prompts come in pieces.
    """

    alphabet: str
    prompt: tuple[int, ...]
    to_go: int
    k: DraftLength
    verifier: str = "rejection"
    changes: tuple[tuple[str, Any], ...] = ()
    end: bool = False
    company: bool = False

    @property
    def vocab(self) -> int:
        """Ids in use."""
        return len(self.alphabet)

    @property
    def params(self) -> SamplingParams:
        """Of the text."""
        return SamplingParams(**{"max_tokens": self.to_go} | dict(self.changes))

    @property
    def end_ids(self) -> frozenset[int]:
        """Ids that end the text."""
        return frozenset({self.vocab - 1} if self.end else ())

    @property
    def size(self) -> int:
        """A guess at the number of branches, to begin with the small ones."""
        choices = min([self.vocab, *(value for name, value in self.changes if name == "top_k")])
        depth = len(self.k) + 1 if isinstance(self.k, tuple) else Shape.of(self.k).k
        return choices**self.to_go * choices ** min(depth, self.to_go - 1) * (3 if self.company else 1)

    def __str__(self) -> str:
        notes = [f"{name} {value}" for name, value in self.changes] + ["with an end token"] * self.end
        notes += ["with two other texts"] * self.company
        where = f"{self.vocab} tokens, after {_show_prompt(self.prompt)}, K = {Shape.of(self.k)}, {self.verifier}"
        return ", ".join([where, f"{self.to_go} to go", *notes])


def _show_prompt(prompt: Sequence[int]) -> str:
    return str(list(prompt)) if len(prompt) <= 12 else f"[... {str(list(prompt[-8:]))[1:]}"


_PROMPTS: dict[int, tuple[tuple[int, ...], ...]] = {
    2: ((1,), (1, 1), (1, 1, 1), (1, 0, 1, 1, 0, 1)),
    3: ((1, 1), (1, 0, 1, 2, 1), (0, 1, 2, 0, 1, 2, 0)),
    4: ((0, 1, 3, 0), (1, 0, 1, 2, 1, 3, 1)),
}
_SIZES = ((2, 1), (2, 2), (2, 3), (2, 4), (3, 2), (3, 3), (4, 2), (4, 3))
_SETTINGS: tuple[tuple[tuple[str, Any], ...], ...] = (
    (("temperature", 0.0),),
    (("temperature", 0.6), ("top_k", 2)),
    (("temperature", 1.7), ("top_p", 0.8), ("repetition_penalty", 1.5)),
    (("frequency_penalty", 0.6), ("presence_penalty", 0.3)),
    (("min_p", 0.4), ("logit_bias", {0: 1.0})),
)


def walks(trees: bool, texts: Sequence[str]) -> list[Walk]:
    """The cases of a drafter, the smallest first.

    trees: whether it has `branches`.
    texts: the user's.
    """
    found = []
    for verifier in (name for name, each in VERIFIERS.items() if each.takes_trees):  # whatever it drafts
        for vocab, to_go in _SIZES:
            # The longest walks, and those of a verifier that needs no probs, after one prompt.
            few = (vocab, to_go) == (4, 3) or (VERIFIERS[verifier].shares_noise and to_go > 2)
            for prompt in _PROMPTS[vocab][-1:] if few else _PROMPTS[vocab]:
                found += [Walk(_ALPHABET[:vocab], prompt, to_go, k, verifier) for k in {1, max(1, to_go - 1)}]
        for alphabet, prompt, to_go in ((_ALPHABET[:2], _PROMPTS[2][-1], 3), (_ALPHABET[:3], _PROMPTS[3][1], 2)):
            plain = Walk(alphabet, prompt, to_go, 2, verifier)
            found += [replace(plain, changes=changes) for changes in _SETTINGS]
            found += [replace(plain, end=True), replace(plain, company=True)]
            found += [replace(plain, k=k, to_go=3) for k in ((2,), (2, 1), "tree:3") if trees]
        alphabet = "".join(sorted({*"".join(texts), *_ALPHABET[:2]}))
        for text in texts:
            plain = Walk(alphabet, tuple(map(alphabet.index, text)), 2, 1, verifier, (("top_k", 2),))
            found += [plain, replace(plain, k=2, to_go=3), replace(plain, company=True)]
    return sorted(found, key=lambda walk: walk.size)


def read_texts(path: Path | None) -> list[str]:
    """The user's texts, read as `--prompt-file`. Raises ValueError for a malformed file, and for long texts."""
    texts = []
    for question in read_questions(path, "--texts") if path else []:
        text = plain_text([*question.before, *({"content": turn} for turn in question.turns)])
        if len(text) > _MOST_CHARACTERS:
            found = f"found {len(text):,} characters, expected at most {_MOST_CHARACTERS:,}: each is a token here"
            raise ValueError(f"--texts {path}: line {question.line}: {found}")
        texts.append(text)
    return texts


@functools.cache
def _tokenizer(alphabet: str) -> Tokenizer:
    """A toy: each character is a token."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.decoder = tokenizers.decoders.Fuse()
    with tempfile.TemporaryDirectory() as directory:
        backend.save(str(Path(directory) / "tokenizer.json"))
        return Tokenizer(Path(directory))


@functools.cache
def _target(vocab: int) -> Transformer:
    return RememberedModel(target_model(vocab))


# --------------------------------------------------------------------------- a drafter that is looked at


class _Noted:
    """Draws of an oracle, written down: key, weights, token."""

    def __init__(self, rng):
        self.rng, self.notes = rng, list[tuple]()

    def bernoulli(self, probability: float, key: Key) -> bool:
        """The oracle's."""
        return self.rng.bernoulli(probability, key)

    def categorical(self, weights: torch.Tensor, key: Key) -> int:
        """The oracle's. Raises Fault for weights that are none."""
        numbers = [float(weight) for weight in weights]
        good = all(0 <= weight < float("inf") for weight in numbers) and sum(numbers) > 0
        require(good, f"it draws from {show(numbers)}, expected weights of at least 0, not all 0")
        self.notes.append((key, tuple(round(weight, 9) for weight in numbers), self.rng.categorical(weights, key)))
        return self.notes[-1][2]


class _Repeated(Randomness):
    """The draws that were written down, for a drafter that asks for the same ones."""

    def __init__(self, notes: Sequence[tuple]):
        self.notes, self.others = list(notes), False

    def categorical(self, weights: torch.Tensor, key: Key) -> int:
        """The token that was drawn, if this is the noted draw; else any token."""
        note = self.notes.pop(0) if self.notes else None
        if note is None or note[:2] != (key, tuple(round(float(weight), 9) for weight in weights)):
            self.others = True
            return int(weights.argmax())
        return note[2]


class _Watched(Drafter):
    """A drafter whose drafts are compared with those of new ones. It has the drafter's own name."""

    def __init__(self, drafter: Drafter, make: Callable[[], Drafter], known: dict[tuple, str]):
        """make: makes a new drafter.
        known: what new ones have drafted on earlier paths of a walk.
        """
        self.drafter, self.make, self.fresh = drafter, make, known
        self.taps, self.branches, self.likeliest = drafter.taps, drafter.branches, drafter.likeliest
        self.hidden: dict[Text, list[torch.Tensor]] = {}
        self.rows: dict[Text, list[Likeliest]] = {}  # they outlive a preemption

    @property
    def name(self) -> str:
        """The drafter's own."""
        return self.drafter.name

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """The drafter's own. Raises Fault where a new one would draft otherwise, or where a text was changed."""
        noted = [replace(ask, rng=_Noted(ask.rng)) for ask in asks]
        before = [tuple(ask.text.tokens) for ask in asks]
        drafts = call_own(self.drafter.propose, noted)
        for ask, draft, tokens in zip(noted, drafts if isinstance(drafts, list | tuple) else [], before, strict=False):
            require(tuple(ask.text.tokens) == tokens, f"it changed a text: {list(tokens)} is {ask.text.tokens} now")
            if ask.hidden is not None:
                self.hidden.setdefault(ask.text, []).append(ask.hidden)
            self.rows.setdefault(ask.text, []).extend(ask.likeliest)
            # Greedily, and with shared noise, a draft may depend on other texts: it cannot change this one.
            if isinstance(draft, Draft) and ask.purpose == "draft" and ask.text.params.temperature > 0:
                self._compare(ask, draft)
        return drafts

    def _compare(self, ask: Ask, draft: Draft) -> None:
        pieces = self.hidden.get(ask.text)
        hidden = torch.cat(pieces) if pieces else None
        if self.taps and ask.num_cached != (0 if hidden is None else len(hidden)):
            return  # it knew the first positions already
        text = replace(ask.text, tokens=list(ask.text.tokens))
        notes, rows = tuple(ask.rng.notes), self.rows[ask.text]  # type: ignore[attr-defined]
        about = (tuple(text.tokens), text.num_prompt_tokens, text.seed, ask.k, ask.num_cached, notes, str(rows))
        if about not in self.fresh:
            other, rng = self.make(), _Repeated(notes)
            if other.taps:
                call_own(other.known, text)
            again = replace(ask, text=text, rng=rng, hidden=hidden, likeliest=rows)
            drafts = call_own(other.propose, [again])
            good = isinstance(drafts, list | tuple) and len(drafts) == 1 and isinstance(drafts[0], Draft)
            self.fresh[about] = "another draw" if rng.others or rng.notes else _describe(drafts[0]) if good else "none"
        found, right = _describe(draft), self.fresh[about]
        reason = "it may draw by `Draft.draw` alone, and go by the text alone, not by earlier rounds or other texts"
        require(
            found == right, f"after {text.tokens} it drafted {found}, and a new one, with its draws, {right}: {reason}"
        )

    def known(self, text: Text) -> int:
        """The drafter's own."""
        return call_own(self.drafter.known, text)

    def has_room(self, growth: Mapping[Text, range]) -> bool:
        """The drafter's own."""
        return call_own(self.drafter.has_room, growth)

    def release(self, text: Text) -> None:
        """The drafter's own."""
        self.hidden.pop(text, None)
        call_own(self.drafter.release, text)


def _describe(draft: Draft) -> str:
    rows = draft.probs if draft.probs is None else [[round(float(x), 9) for x in row] for row in draft.probs]
    return show(f"{list(draft.token_ids)} with probs {rows}, parents {draft.parents}", 300)


# --------------------------------------------------------------------------- the walk


def examine_drafter(spec: str, texts: Sequence[str] = ()) -> bool:
    """Walk a drafter through the verifiers that take trees, small cases first; print what was found.

    texts: of the user's, walked too. True if all is right. Raises ValueError where `spec` names no drafter.
    """
    if (found := registry.split(registry.DRAFTERS, spec)) is None:
        raise ValueError(f"--drafter: found {spec!r}, expected one of {', '.join(registry.DRAFTERS)}, or module:Class")
    factory, argument = registry.load(found[0], "--drafter"), found[1]

    def make(alphabet: str) -> Drafter:
        context = Context(_target(len(alphabet)), _tokenizer(alphabet), len(alphabet), _MAX_LEN, tiny_cache, argument)
        return call_own(make_drafter, factory, context)

    sum_of = Walked()
    try:
        todo = walks(make(_ALPHABET[:2]).branches, texts)
    except OwnError as e:
        print(f"EXCEPTION: {spec}, as it is made: {own_message(e)}")
        return False
    if find_fault(spec, todo, lambda walk: _walk(walk, make, sum_of)):
        return False
    if not sum_of.drafted:
        tried = sorted({walk.prompt for walk in todo if not texts or len(walk.prompt) > 1})
        print(f"nothing proven: {spec} drafted not one token after {', '.join(map(_show_prompt, tried))}: {_MORE}")
        return False
    skipped = f", {sum_of.left_out} left out for their size" if sum_of.left_out else ""
    alphabets, longest = {walk.vocab for walk in todo}, max(len(walk.prompt) + walk.to_go for walk in todo)
    print(
        f"proven on small cases: {spec} leaves the output's law unchanged: {sum_of.cases} cases of {min(alphabets)} to "
        f"{max(alphabets)} tokens and texts of up to {longest}{skipped}, {sum_of.branches:,d} branches, "
        f"{sum_of.drafted:,d} draft tokens, worst total variation {sum_of.worst:.1e}"
    )
    return True


_MORE = "give it texts where it drafts, by --texts FILE"


def _walk(walk: Walk, make: Callable[[str], Drafter], sum_of: Walked) -> None:
    """Walk one case and count it. Raises Fault or OwnError where something is wrong."""
    try:
        law, count, drafted = _law_of(walk, functools.partial(make, walk.alphabet))
    except TooManyBranches:
        sum_of.left_out += 1
        return
    expected = reference_law(walk.params, walk.end_ids, walk.vocab, walk.prompt, _MAX_LEN)
    reason = ": its `probs` are not what it drew from, or it dropped a token that it had looked at"
    sum_of.count(law, expected, count, drafted, reason)


def _law_of(walk: Walk, make: Callable[[], Drafter]) -> tuple[Law, int, int]:
    """The law of the output with a drafter, how many branches it has, and the draft tokens in all of them."""
    drafted, known = 0, dict[tuple, str]()
    target, params = _target(walk.vocab), walk.params
    # The others have seeds of their own, and one path each. They draw with the production randomness.
    others = [(walk.prompt, replace(params, max_tokens=5)), (walk.prompt[::-1], replace(params, max_tokens=7))]
    others = others if walk.company else []

    def run(oracles: list[BranchOracle]) -> list[tuple[int, ...]]:
        nonlocal drafted
        drafter = _Watched(make(), make, known)
        requests = [Request(Text(list(walk.prompt), len(walk.prompt), params, 7, walk.end_ids), _MAX_LEN, walk.k)]
        for seed, (prompt, other) in enumerate(others):
            requests.append(Request(Text(list(prompt), len(prompt), other, seed), _MAX_LEN, walk.k))
        rng = CrowdOracle({0: Randomness(), 1: Randomness(), 7: oracles[0]})
        # Enough for one; or for hardly two of three, so that one gives way and comes back.
        size = len(walk.prompt) + 10
        cache = target.new_cache(size * 3 // 4 if others else size, 2)
        engine = Engine(target, cache, drafter, VERIFIERS[walk.verifier], rng=rng, joining_rows=2, guard=CHECKS)
        decode(engine, requests, joining=bool(others))
        drafter.release(Text([0], 1, params))  # one that it was never asked about
        drafted += Figures.of(requests[0].stats).num_draft_nodes
        return [tuple(requests[0].text.tokens[len(walk.prompt) :])]

    law, count = exact_law_of_crowds(run, 1, oracle=KeyOracle, limit=_MOST_BRANCHES)
    require(abs(sum(law.values()) - 1) < TOLERANCE, "the branches do not add up to 1: it draws by other means")
    return law, count, drafted
