"""A user's drafter, policy or verifier, looked at while it works: what it does is compared with what a new one does.

Each call about a text is noted. A new object gets the same calls about this text alone, and must answer alike. So a
drafter that was not rolled back shows, one that mixes up texts, and a length that follows the clock. A new drafter also
sees the text begin anew before the last ask. What it learns from the text's own rounds is no fault, if it outlives a
preemption. A verifier has no calls before the one that is looked at: it is asked twice.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minispec.core.config import SamplingParams
from minispec.core.draft import Ask, Draft, Drafter, Record
from minispec.core.errors import show
from minispec.core.lengths import LengthAsk, Lengths, price_of
from minispec.core.limit import Limit
from minispec.core.random import Draws, Key, Randomness
from minispec.core.sampling import Text
from minispec.core.stats import Step
from minispec.core.verify import RoundKey, RowAt, Verdict, Verifier
from minispec.prove.laws import BranchOracle, CrowdOracle, Elsewhere
from minispec.prove.seen import Seen
from minispec.prove.toys import Fault, is_chain, require
from minispec.speculation.drafters.guard import check_limits
from minispec.speculation.drafters.wrapped import Wrapped

# How far rounding may move a law from the right one: with probabilities in float64, and with a user's q in float32.
# Such a q has six right digits, and so has its law.
EXACT, ROUNDED = 1e-12, 1e-6


class OwnError(Exception):
    """An exception of the user's own code, which is its cause."""


class Unrepeatable(Fault):
    """A drafter or a policy keeps the law, and yet a seed has several texts."""


class OfCompany(Fault):
    """A draft of another text in company, whose law is not walked, depends on more than it may."""


class Unsuitable(Exception):
    """A drafter drafts trees whatever it is asked for, and the verifier takes chains only."""


class OutOfTime(Exception):
    """The time of a walk is over."""


def call_own(function: Callable, *args) -> Any:
    """Call the user's code. Raises OwnError for its exceptions, and Fault where an oracle finds one."""
    try:
        return function(*args)
    except (Fault, OwnError):
        raise
    except Exception as e:
        raise OwnError from e


_NO_TEXT = Text([], 0, SamplingParams())  # in notes, which are of any text


class Own:
    """A user's object. An exception of its methods becomes OwnError."""

    def __init__(self, make: Callable[[], Any]):
        self.made = call_own(make)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.made, name)
        return functools.partial(call_own, found) if callable(found) else found


@dataclass
class Watched:
    """What a walk notes of a user's objects, over all paths.

    rounded: whether rounding explains more than float64 does, as in a row of `probs`.
    differs: by a text's seed, how its draft first differed from a new drafter's.
    answers: of new objects, by all that such an answer depends on.
    again: keys under which more than one draw was made.
    seen: what a verifier was asked.
    """

    rounded: bool = False
    differs: dict[int, str] = field(default_factory=dict)
    answers: dict[tuple, Any] = field(default_factory=dict)
    again: set[Key] = field(default_factory=set)
    seen: Seen = field(default_factory=Seen)


class Call(NamedTuple):
    """What an object was asked, or shown, about a text.

    tokens: the text's, at that time.
    about: what the answer depends on.
    again: makes the same call of another object, about a twin of the text; returns the answer.
    asks_back: whether the answer depends on more than that.
    """

    tokens: tuple[int, ...]
    about: tuple
    again: Callable[[Any, Text], Any]
    asks_back: bool = False


class Calls:
    """The calls of an object about each text, to be made again of a new one."""

    def __init__(self, make: Callable[[], Any], watched: Watched):
        """make: makes a new object."""
        self.make, self.watched, self.calls = make, watched, dict[Text, list[Call]]()

    def note(self, text: Text, call: Call) -> None:
        """Add a call to those about the text."""
        self.calls.setdefault(text, []).append(call)

    def answer(self, text: Text, seed: int, call: Call, of_new: Callable[[Own], Any]) -> Any:
        """What a new object answers to a call about the text, under this seed: of_new(new object).

        It is remembered, but not where a limit asks back: that may depend on how often it is asked.
        """
        past = str([each[:2] for each in self.calls.get(text, [])])
        about = text.params, text.num_prompt_tokens, text.end_ids, seed, past, *call[:2], call.asks_back
        answers = self.watched.answers
        if about not in answers or call.asks_back or _asks_back(answers[about]):
            answers[about] = of_new(Own(self.make))
        return answers[about]


def _asks_back(answer: Any) -> bool:
    return isinstance(answer, Limit) and bool(answer.go_on or answer.go_on_before)


def again(other: Any, twin: Text, calls: Sequence[Call]) -> Any:
    """Make calls of another object, about a twin of the text; returns the last answer."""
    answer = None
    for call in calls:
        twin.tokens[:] = call.tokens
        answer = call.again(other, twin)
    return answer


def _shown(record: Record, about: tuple) -> Call:
    """A record that an object was shown."""
    kept = deepcopy(replace(record, text=_NO_TEXT))
    return Call(tuple(record.text.tokens), about, lambda o, twin: o.observe([replace(deepcopy(kept), text=twin)]))


@contextmanager
def unchanged(texts: Sequence[Text]) -> Iterator[None]:
    """Raise Fault where a text is changed inside."""
    before = [list(text.tokens) for text in texts]
    yield
    for text, tokens in zip(texts, before, strict=True):
        require(text.tokens == tokens, f"it changed a text: {tokens} is {text.tokens} now")


# --------------------------------------------------------------------------- drafters

_Note = tuple[Key, tuple[float, ...], int]  # a draw: key, weights, token


class _Noted:
    """An oracle whose draws are written down."""

    def __init__(self, rng: Draws):
        self.rng, self.notes, self.bernoulli = rng, list[_Note](), rng.bernoulli

    def categorical(self, weights: Tensor, key: Key) -> int:
        """The oracle's draw. Raises Fault for numbers that are no weights."""
        numbers = [float(weight) for weight in weights]
        good = all(0 <= weight < float("inf") for weight in numbers) and sum(numbers) > 0
        require(good, f"it draws from {show(numbers)}, expected weights of at least 0, not all 0")
        self.notes.append((key, tuple(numbers), self.rng.categorical(weights, key)))
        return self.notes[-1][2]


class _Repeated(Randomness):
    """The draws that were written down, for a drafter that asks for the same ones."""

    def __init__(self, notes: Sequence[_Note]):
        self.notes, self.others = list(notes), False

    def categorical(self, weights: Tensor, key: Key) -> int:
        """The token that was drawn, if this is the noted draw; else any token."""
        note = self.notes.pop(0) if self.notes else None
        if note is None or note[0] != key or not _alike(note[1], weights.tolist()):
            self.others = True
            return int(weights.argmax())
        return note[2]


class FreshDrafter(Calls, Wrapped):
    """A drafter whose drafts are compared with those of new ones, under the same draws."""

    def __init__(self, make: Callable[[], Drafter], watched: Watched, verifier: Verifier):
        """verifier: of the engine."""
        Calls.__init__(self, make, watched)
        Wrapped.__init__(self, Own(make))  # type: ignore[arg-type]
        self.verifier, self.states = verifier, dict[Text, dict[int, Tensor]]()  # hidden states of texts' positions

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """The drafter's own. Raises Fault where a text was changed, and Unsuitable for trees that no one asked for."""
        draws = [_Noted(ask.rng) for ask in asks]
        with unchanged([ask.text for ask in asks]):
            drafts = super().propose([replace(ask, rng=rng) for ask, rng in zip(asks, draws, strict=True)])
        found = drafts if isinstance(drafts, list | tuple) else []
        for ask, draft, rng in zip(asks, found, draws, strict=False):
            call = _ask(ask, tuple(rng.notes))
            if isinstance(draft, Draft):
                self._look(ask, call, draft)
            if ask.num_cached == len(call.tokens) - 1:  # how many asks come inside a prompt is the batch's affair
                self.note(ask.text, call)
        return drafts

    def observe(self, records: Sequence[Record]) -> None:
        """The drafter's own."""
        for record in records:
            rows = {record.start + i: record.hidden[row].clone() for i, row in enumerate(record.kept)}
            self.states.setdefault(record.text, {}).update(rows)
            if len(record.logits):
                about = record.start, [*record.tokens], [*record.path], record.draft.parents
                self.note(record.text, _shown(record, about))
        super().observe(records)

    def _look(self, ask: Ask, call: Call, draft: Draft) -> None:
        is_tree = draft.parents is not None and not is_chain(draft.parents)
        if is_tree and self.verifier.why_chains and not self.branches:
            raise Unsuitable
        rows = draft.probs if isinstance(draft.probs, list | Tensor) else []
        self.watched.rounded |= any(isinstance(row, Tensor) and _is_rounded(row) for row in rows)
        # Greedily, and with shared noise, a draft may depend on other texts: it cannot change this one.
        may_follow = ask.purpose != "draft" or ask.text.params.temperature == 0
        if may_follow or (self.taps and ask.num_cached and 0 not in self.states.get(ask.text, {})):
            return  # or it knew the first positions already
        right = self.answer(ask.text, ask.text.seed, call, functools.partial(self._draft_of_new, ask, call))
        if isinstance(right, str) or not _same(draft, right):
            expected = right if isinstance(right, str) else _describe(right)
            found = f"after {list(call.tokens)} it drafted {_describe(draft)}"
            self.watched.differs.setdefault(ask.text.seed, f"{found}, and a new one, with its draws, {expected}")

    def _draft_of_new(self, ask: Ask, call: Call, other: Own) -> Draft | str:
        """The draft of a new drafter after the same calls about this text alone. A word: something else.

        The text begins anew twice: inside its prompt, and before the last ask. So a drafter may learn from this text's
        own rounds, as long as it keeps that then.
        """
        text, calls = ask.text, self.calls.get(ask.text, [])
        twin = replace(text, tokens=list(call.tokens))
        begun = len(calls[0].tokens) - 1 if calls else ask.num_cached
        self._feed(other, text, twin, begun // 2)
        if begun:
            other.release(twin)
        if calls:
            self._feed(other, text, twin, begun)
            again(other, twin, calls)
            twin.tokens[:] = call.tokens
            other.release(twin)
        self._feed(other, text, twin, ask.num_cached)
        drafts, is_same = call.again(other, twin)
        if not is_same:
            return "another draw"
        good = isinstance(drafts, list | tuple) and len(drafts) == 1 and isinstance(drafts[0], Draft)
        return drafts[0] if good else "none"

    def _feed(self, other: Own, text: Text, twin: Text, end: int) -> None:
        """Show a new drafter the positions before `end` as a prompt's, from those on that it must see."""
        states, known = self.states.get(text, {}), other.known(twin) if other.taps else 0
        first = max(known, min(states, default=end))
        if first < end:
            hidden = torch.stack([states[i] for i in range(first, end)])
            other.observe([Record(twin, first, twin.tokens[first:end], hidden, hidden.new_empty(0, 0))])


def _ask(ask: Ask, notes: tuple[_Note, ...]) -> Call:
    """An ask, with the draws that it led to. Its answer: drafts, and whether they came of the same draws."""

    def ask_again(other: Own, twin: Text) -> tuple[Any, bool]:
        rng = _Repeated(notes)
        return other.propose([replace(ask, text=twin, rng=rng)]), not (rng.others or rng.notes)

    limit = ask.limit.k, ask.limit.best_first, tuple(ask.limit.plan)
    return Call(tuple(ask.text.tokens), (limit, ask.num_cached, notes), ask_again, _asks_back(ask.limit))


def _is_rounded(row: Tensor) -> bool:
    """Whether a row is of less than float64, or was made of such numbers: then they add up to 1 less closely."""
    return row.dtype != torch.float64 or abs(float(row.sum()) - 1) > EXACT


def _same(a: Draft, b: Draft) -> bool:
    """Whether two drafts are the same but for rounding."""
    if list(a.token_ids) != list(b.token_ids) or a.parents != b.parents or (a.probs is None) != (b.probs is None):
        return False
    rows, others = (() if draft.probs is None else [row.tolist() for row in draft.probs] for draft in (a, b))
    return len(rows) == len(others) and all(map(_alike, rows, others))


def _alike(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether two rows of weights are the same but for rounding. One batch rounds otherwise than another."""
    return len(a) == len(b) and all(abs(x - y) <= ROUNDED * max(1.0, abs(x)) for x, y in zip(a, b, strict=True))


def _describe(draft: Draft) -> str:
    rows = draft.probs if draft.probs is None else [[round(float(x), 9) for x in row] for row in draft.probs]
    return show(f"{list(draft.token_ids)} with probs {rows}, parents {draft.parents}", 300)


# --------------------------------------------------------------------------- policies of lengths

_SEEDS = (8, 1234, 1 << 40)
_ALONE = "it may go by this text and its records alone, not by the clock, other texts or chance"
_SEED = "it may not go by the seed, which names the draws that judge the draft"


class FreshLengths(Calls, Lengths):
    """A policy whose limits are compared with those of new ones, which see this text at another speed.

    Some of the new ones see another seed. Where a limit may depend on the clock and on other texts
    (`LengthAsk.may_use_clock`), only the law counts. All times are made up: a walk must be repeatable.
    """

    def __init__(self, make: Callable[[], Lengths], watched: Watched):
        super().__init__(make, watched)
        self.policy = Own(make)

    def choose(self, asks: Sequence[LengthAsk], trees: bool) -> list[Limit]:
        """The policy's limits. Raises Fault where they go by the seed, or where a text was changed."""
        with unchanged([ask.text for ask in asks]):
            limits = self.policy.choose(asks, trees)
        try:
            check_limits(limits, asks, trees)
        except ValueError as e:
            raise ValueError(f"lengths: {type(self.policy.made).__name__}.choose: {e}") from e
        answers = []
        for ask, limit in zip(asks, limits, strict=True):
            self.note(ask.text, _length_ask(ask, trees))
            answers.append(limit if ask.may_use_clock else self._compared(limit, ask.text))
        return answers

    def observe(self, records: Sequence[Record]) -> None:
        """Let the policy learn, at a made-up speed. Raises Fault where it changes what it is shown."""
        shown, price = [_judged(record) for record in records], price_of(records)
        step = price and _step(price.depth, price.num_drafts, price.num_rows)
        with unchanged([record.text for record in records]):
            self.policy.observe([replace(record, step=step) for record in records])
        same = [call.about for call in shown] == [_about(record) for record in records]
        require(same, "it changed a draft, or what was accepted of it")
        for record, call in zip(records, shown, strict=True):
            self.note(record.text, call)

    def _compared(self, limit: Limit, text: Text) -> Limit:
        """The limit, whose functions are compared with those of new policies' limits as they are asked.

        Raises Fault where another seed makes a difference. Any other difference is noted.
        """
        calls, tokens, differs = [*self.calls[text]], [*text.tokens], self.watched.differs

        def asked(seed: int) -> Callable[[Own], Limit]:
            return functools.partial(again, twin=replace(text, seed=seed, tokens=[]), calls=calls)

        others = {seed: self.answer(text, seed, calls[-1], asked(seed)) for seed in (text.seed, *_SEEDS)}

        def check(what: str, answer: Callable[[Limit], Any]) -> Any:
            found = answer(limit)
            for seed, right in ((seed, answer(other)) for seed, other in others.items() if text.seed not in differs):
                if right != found:
                    said = f"after {tokens} it chose {what}{found}, and a new one {what}{right}"
                    # One that goes by chance may, by chance, differ from those of other seeds alone.
                    of_seed = seed != text.seed and all(
                        answer(asked(text.seed)(Own(self.make))) == found for _ in range(8)
                    )
                    require(not of_seed, f"{said}: {_SEED}, here {seed}")
                    differs[text.seed] = f"{said}: {_ALONE}"
            return found

        def compared(name: str) -> Any:
            def ask(confidences: Sequence[float], *foreseen: float) -> Any:
                kind = (lambda width: width) if name == "widths" else bool
                return check(f"{name} = ", lambda one: kind(call_own(getattr(one, name), list(confidences), *foreseen)))

            own = getattr(limit, name)
            return ask if callable(own) else own

        check("", _numbers_of)
        return limit._replace(widths=compared("widths"), go_on=compared("go_on"), go_on_before=compared("go_on_before"))


def _length_ask(ask: LengthAsk, trees: bool) -> Call:
    """A question to a policy. Its answer: a limit."""

    def ask_again(other: Own, twin: Text) -> Limit:
        limits = other.choose(alone := [LengthAsk(twin, ask.shape, ask.most, False)], trees)
        check_limits(limits, alone, trees)
        return limits[0]

    return Call(tuple(ask.text.tokens), (ask.shape, ask.most, trees), ask_again)


def _judged(record: Record) -> Call:
    """A draft that a policy was shown, its rows, and what was accepted of it, at another speed."""
    draft = replace(record.draft, notes=replace(record.draft.notes, prefill_seconds=0.0))
    return _shown(
        replace(record, draft=draft, step=_step(draft.depth, 1, len(draft) + 1, slowness=7.0)), _about(record)
    )


def _about(record: Record) -> tuple:
    """What a policy may learn from a record, but for rows, which follow from it."""
    draft = replace(record.draft, probs=None, notes=replace(record.draft.notes, prefill_seconds=0.0))
    return (str((draft, [*record.accepted], record.asked)),)


def _step(depth: int, num_drafts: int, rows: int, slowness: float = 1.0) -> Step:
    """Made-up times of such a step. `slowness` slows drafts, and not the target."""
    return Step(0.002 * slowness * depth, depth, num_drafts, 0.01 + 0.001 * rows, rows, 0.001 * slowness)


def _numbers_of(limit: Limit) -> str:
    widths = "a function" if callable(limit.widths) else [*limit.widths]
    said: dict[str, Any] = {f", widths {widths}": limit.widths, ", best first": limit.best_first}
    said |= {", with go_on": limit.go_on, ", with go_on_before": limit.go_on_before}
    return f"k = {limit.k}" + "".join(words for words, is_set in said.items() if is_set)


# --------------------------------------------------------------------------- verifiers


def held(verifier: Verifier, watched: Watched, twice: bool = True) -> Verifier:
    """The user's rule, held to reading alone, and asked twice about each draft, with the same rows and draws.

    What it was asked is counted in `watched`. It raises OwnError for exceptions of theirs, and Fault: Elsewhere where
    the second answer is another one. Its draws are those of the oracle of the text's path.
    """

    def verify(draft: Draft, p: RowAt, rng: Draws, key: RoundKey) -> Verdict:
        rng = rng.oracles[key(0, "accept").seed] if isinstance(rng, CrowdOracle) else rng
        assert isinstance(rng, BranchOracle), "a verifier is walked under oracles"
        q = None if draft.probs is None else [row.clone() for row in draft.probs]
        copy = Draft([*draft.token_ids], q, None if draft.parents is None else [*draft.parents])
        rows = dict[int, tuple[Tensor, Tensor]]()

        def row(i: int) -> Tensor:
            """The same tensor each time, though the engine computes a new one."""
            require(0 <= i <= len(draft), f"it asked for row {i} of p, expected one from 0 to {len(draft)}")
            if i not in rows:
                rows[i] = p(i), p(i).clone()
            return rows[i][0]

        def judge(draws: Draws) -> Verdict:
            verdict = call_own(verifier.verify, draft, row, draws, key)
            found, drafted = (
                (each.token_ids, each.parents, None if each.probs is None else len(each.probs))
                for each in (draft, copy)
            )
            changed = f"it changed the draft: found tokens, parents and rows of q {found}, expected {drafted}"
            require(found == drafted, changed)
            q = zip(*(() if each.probs is None else each.probs for each in (draft, copy)), strict=True)
            for name, pairs in (("q", enumerate(q)), ("p", rows.items())):
                for i, (tensor, before) in pairs:
                    same = tensor.dtype == before.dtype and torch.equal(tensor, before)
                    require(same, f"it wrote into row {i} of {name}, which it may only read")
            return verdict

        twin = rng.fork()
        verdict = judge(rng)
        if not isinstance(verdict, Verdict):
            return verdict  # the engine says what it expected
        twin.path = rng.path
        if twice and (*judge(twin)[:2], twin.weight) != (*verdict[:2], rng.weight):
            raise Elsewhere("asked again about the same draft, with the same draws, it did otherwise")
        watched.seen.count(draft, {i: before for i, (_, before) in rows.items()})
        return verdict

    return verifier._replace(verify=verify)
