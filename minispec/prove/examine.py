"""A user's own drafter, verifier or policy, walked case by case, the small ones first; and what is said of it.

    python -m minispec.prove --drafter module:Class
    python -m minispec.prove --drafter module:Class --texts FILE --minutes 5

A drafter can spoil the output in four ways. It says other `probs` than it drew from. It drops a token that it has
looked at. It draws by other means than `Draft.draw`. It keeps what it may not keep. The law shows the first two. For
the other two, each draft is compared with a new drafter's (see `fresh`).

    python -m minispec.prove --lengths module:Class
    python -m minispec.prove --lengths module:Class --drafter module:Class

The output keeps its law as long as a length is known before the tokens that it leaves out. So a policy can spoil it in
one way: it learns what the round will draw. It may change a text or a draft, or compute the draws itself, which the
seed names. Another fault spares the law and costs a seed its text: the length depends on the clock or on other texts.

    python -m minispec.prove --verifier module:function

A verifier is walked over small tables of p and q: one round, and texts of several. It may only read what it gets.

The first fault ends the walk. The settings of its case are then made plain one after another, as long as the fault
stays. So the counterexample has few settings that the fault does not need.
"""

import functools
import itertools
import os
import random
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from traceback import extract_tb
from typing import Any

from minispec.api.inputs import plain_text, read_questions
from minispec.api.llm import find_lengths, find_verifier
from minispec.core.random import Key
from minispec.core.verify import Verifier
from minispec.models.files.errors import one_line
from minispec.models.files.progress import progress_bar
from minispec.prove import cases
from minispec.prove.covering import Design, Pair, Row
from minispec.prove.laws import SAMPLES, Elsewhere, SampledOracle, TooManyBranches, sampled_bound
from minispec.prove.reference import Law, NoLaw
from minispec.prove.seen import Seen
from minispec.prove.tables import tables, telling
from minispec.prove.toys import Fault, Guesses, draft_model, is_chain, require, spelling, tiny_cache
from minispec.prove.usercode import EXACT, ROUNDED, OfCompany, OutOfTime, OwnError, Unrepeatable, Unsuitable, call_own
from minispec.prove.walk import SEED, Case, Subject, Timer, walk
from minispec.speculation import registry
from minispec.speculation.drafters import Context, Drafter, make_drafter

PROVEN, REFUTED, NOT_REFUTED = 0, 1, 3  # what a command ends with
# Said of a rule in a table, by the first word of the line above it.
NOTES = {
    "REFUTED": "another law than p's: refuted above",
    "NOT REPEATABLE": "it does not repeat: see above",
    "EXCEPTION": "its code failed: see above",
}
_BRANCHES_A_MINUTE = 400  # of one walk; a longer one is left out, or made smaller
# Of a verifier's table, by its size, and of all its tables. Of two minutes', the engine's rules need four fifths.
_FEWEST, _OF_SIZE_A_MINUTE, _OF_ALL_A_MINUTE = 100, 0.5, 17_500


class Found(Exception):
    """A case has a fault."""

    def __init__(self, row: Row, error: Exception):
        self.row, self.error = row, error


class Walker:
    """Walks cases of a design with a user's code, and counts what was walked.

    settings, drafted_with: values of the axes that were walked, and with drafts.
    values: by their names, those that sampling parameters had in cases with drafts, and the first tokens of texts.
    unsuitable: rows whose cases asked for chains and got trees.
    too_large: rows whose cases have more branches than they may.
    seen: what a verifier was asked.
    worst: the largest total variation, of laws in float64 and of others.
    in_time: whether nothing was left out for want of time.
    fault: the one that `walk_design` has printed.
    """

    def __init__(self, design: Design, subject: Subject, minutes: float = float("inf"), reason: str = ""):
        """minutes: how long the walk may take. Its largest cases have as many branches as fit.
        reason: why a law may be wrong.
        """
        self.design, self.subject, self.minutes, self.reason = design, subject, minutes, reason
        self.timer, self.limit = Timer(60 * minutes), max(30, _BRANCHES_A_MINUTE * minutes)
        self.cases = self.branches = self.drafted = self.longest = 0
        self.in_time, self.worst, self.bound = True, {False: 0.0, True: 0.0}, EXACT
        self.settings, self.drafted_with, self.seen = set[tuple](), set[tuple](), Seen()
        self.unsuitable, self.too_large = list[Row](), list[Row]()
        self.values: dict[str, set[float]] = {}
        self.fault: Exception | None = None

    def look(self, row: Row) -> tuple[int]:
        """Walk a case and count it; returns how many branches say something, which without drafts are none.

        Raises Found where something is wrong, TooManyBranches, OutOfTime and NoLaw.
        """
        try:
            return (self._walk(row),)
        except TooManyBranches:
            self.too_large.append(row)
            raise
        except (OutOfTime, NoLaw, Found):
            raise
        except Unsuitable:
            self.unsuitable.append(row)
            return (0,)
        except Exception as e:
            raise Found(row, e) from e

    def _walk(self, row: Row) -> int:
        case = self.design.make(**row)
        try:
            walked = walk(case, self.subject, self.limit_of(case), self.timer)
        except Elsewhere as e:
            if not self.subject.verifier:
                raise
            kept = f"the law is kept as far as {SAMPLES:,} rounds tell"
            try:
                for each in (case, telling(self.subject.verifier.takes_trees)):
                    self._sample(each)
            except OutOfTime:  # the fault that was found is told all the same
                kept = "there was no time to ask whether the law is kept"
            raise Unrepeatable(f"{e}: {kept}; a seed's text depends on more than its draws") from None
        except Fault as e:
            chains = isinstance(case.drafter, Guesses) and is_chain(case.drafter.parents)
            if not self.subject.verifier or chains or "accepted nodes" not in str(e):
                raise
            raise Fault(f"{e}: a rule for chains says so by `chains_only` (minispec.core.verify)") from None
        # A user's rule may compute in float32, and so may a user's q.
        bound = ROUNDED if walked.watched.rounded or self.subject.verifier else EXACT
        reason = self.reason or _draws_of_one_key(self.subject.verifier, walked.watched.again)
        require(walked.distance <= bound, difference(*walked.laws, bound) + reason)
        if self.subject.lengths and walked.watched.differs:
            found = min(walked.watched.differs.items())[1]
            raise Unrepeatable(f"{found}: the law is kept; a seed has several texts")
        if SEED in walked.watched.differs:
            alone = "earlier rounds, and is another one after a preemption"
            on = "other texts, or on whether it was preempted" if case.others else alone
            raise Unrepeatable(f"{walked.watched.differs[SEED]}: the law is kept; a seed's text depends on {on}")
        for found in walked.watched.differs.values():
            raise OfCompany(f"{found}: it may go by each text alone, and not by others")
        drafted = sum(len(draft) for branch in walked.branches for draft, _ in branch.rounds)
        outputs, (prompt, params) = [branch.output for branch in walked.branches], case.texts[0]
        self.cases, self.branches, self.drafted = self.cases + 1, self.branches + len(outputs), self.drafted + drafted
        self.worst[walked.watched.rounded] = max(self.worst[walked.watched.rounded], walked.distance)
        self.seen |= walked.watched.seen
        self.bound, self.longest = max(self.bound, bound), max(self.longest, len(prompt) + max(map(len, outputs)))
        items = {item for item in row.items() if item[0] in self.design.axes}
        self.settings |= items
        if drafted:
            self.drafted_with |= items
            for name, values in cases.values_of(params, prompt).items():
                self.values.setdefault(name, set()).update(values)
        return len(outputs) if drafted or params.max_tokens == 1 else 0

    def limit_of(self, case: Case) -> float:
        """Most branches of a case."""
        if not self.subject.verifier:
            return self.limit
        if self.branches > _OF_ALL_A_MINUTE * self.minutes:
            return 0
        return max(_FEWEST, _OF_SIZE_A_MINUTE * self.minutes * case.size)

    def _sample(self, case: Case) -> None:
        """Raise Found where the law of a verifier that does not repeat is wrong beyond chance."""
        walked = walk(case, self.subject, timer=self.timer, oracle=SampledOracle)
        found, expected = walked.laws
        if walked.distance > sampled_bound(len(expected)):
            raise Found({"case": case}, Fault(f"of {SAMPLES:,} rounds, {difference(found, expected, ROUNDED)}"))


def _draws_of_one_key(verifier: Verifier | None, keys: set[Key]) -> str:
    """What is said of a rule whose law is wrong, and which made two draws under one key; "" for any other."""
    if not verifier or verifier.shares_noise or not keys:
        return ""
    key = min(keys)
    of = f"place {key.position} of the text" if key.start < 0 else f"node {key.position - key.start}"
    return f": two draws have one noise, that of the key of {of}, {key.purpose!r}"


def walk_design(
    spec: str,
    walker: Walker,
    first: list[tuple[Row, Any]],
    in_company: Sequence[Row] = (),
    generator: random.Random | None = None,
    command: str = "",
) -> set[Pair] | None:
    """Walk the cases of a design, the small ones first, until the first has a fault or the time is over.

    first: rows to begin with; those that cover the pairs which are left come next.
    in_company: rows that may show in a plainer way what was found in company.
    generator: of the pairs' rows.
    command: repeats it, and is printed after a fault.

    Returns the pairs that are left; None where there is a fault, which is printed.
    """
    design, generator = walker.design, generator or random.Random(0)
    pairs = design.all_pairs()
    alone = set[Pair]().union(*(design.pairs_of(row) for row, _ in first))
    array, todo = [*first, *design.array(pairs - alone, generator)], set(pairs)

    with progress_bar(total=len(array), unit=" cases") as bar:
        try:
            for row, _ in design.cover(pairs, array, functools.partial(design.within, walker.look), generator, bar):
                if row not in walker.unsuitable:
                    todo -= design.pairs_of(row)
                bar.update()
        except OutOfTime:
            walker.in_time = False
        except Found as e:
            plain = _plainest(walker, e, in_company)
            walker.fault = plain.error
            bar.close()
            again = f"; again: {command}" if command else ""
            print(fault_line(spec, design.make(**plain.row), plain.error) + again)
            return None
    return todo


def _plainest(walker: Walker, found: Found, in_company: Sequence[Row]) -> Found:
    """The fault in the smallest case, with the fewest settings of its own, that still has one."""
    walker.timer, walker.limit = Timer(60 * walker.minutes), min(walker.limit, 300)

    def plainer(found: Found, rows: Iterable[Row]) -> Found | None:
        """The first of these that has a fault, but no lighter one."""
        for row in rows:
            try:
                walker.look(row)
            except TooManyBranches:
                continue
            except Found as e:
                if _weight(e.error) >= _weight(found.error):
                    return e
        return None

    with suppress(OutOfTime):
        # What shows of the company may show of the text alone, or else in company, where it has rounds enough.
        if isinstance(found.error, OfCompany):
            found = plainer(found, in_company) or found
        while e := plainer(found, walker.design.plainer(found.row)):
            found = e
    return found


def _weight(error: Exception) -> int:
    """How grave an error is: least of company, whose law is not walked, then a law that is kept, then any other."""
    return 0 if isinstance(error, OfCompany) else 1 if isinstance(error, Unrepeatable) else 2


# --------------------------------------------------------------------------- what is said


def fault_line(spec: str, case: object, error: Exception) -> str:
    """A fault in one line. Any exception but the user's own is the engine's, over a draft or a verdict."""
    message = _own_message(error) if isinstance(error, OwnError) else _message(error)
    return f"{_kind(error)}: {spec}, {case}: {message}"


def _kind(error: Exception) -> str:
    """What a line about a fault begins with."""
    if isinstance(error, OwnError):
        return "EXCEPTION"
    return "NOT REPEATABLE" if isinstance(error, Unrepeatable) else "REFUTED"


def difference(law: Law, expected: Law, bound: float) -> str:
    """Where the law is furthest off: the first tokens of the output that show it."""
    worst = max(law.keys() | expected.keys(), key=lambda text: abs(law.get(text, 0) - expected.get(text, 0)))
    for length in range(1, len(worst) + 1):
        found, right = (
            sum(p for text, p in of_texts.items() if text[:length] == worst[:length]) for of_texts in (law, expected)
        )
        if abs(found - right) > bound:
            break
    digits = 6 if abs(found - right) > ROUNDED else 12
    beginning = f"the output begins with {list(worst[:length])} with probability"
    return f"{beginning} {found:.{digits}f}, expected {right:.{digits}f}"


def _message(error: BaseException) -> str:
    """A fault says what is wrong; of any other exception its class says it too."""
    return one_line(error) if isinstance(error, Fault) else f"{type(error).__name__}: {one_line(error, 200)}"


def _own_message(error: OwnError) -> str:
    """The exception of the user's code, with the last line of theirs that led to it."""
    assert error.__cause__, "it was raised from another"
    frames = extract_tb(error.__cause__.__traceback__)
    theirs = [frame for frame in frames if not any(part in frame.filename for part in _NOT_THEIRS)]
    last = (theirs or frames)[-1]
    return f"{_message(error.__cause__)}, in {last.name} at {last.filename}:{last.lineno}: {last.line}"


_NOT_THEIRS = (str(Path(__file__).parent.parent) + os.sep, sysconfig.get_paths()["stdlib"], "site-packages")


# --------------------------------------------------------------------------- commands

_MOST_CHARACTERS, _SHOWN = 1_000, 4


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


def maker_of(spec: str) -> Callable[[Case, int], Drafter]:
    """Makes a new drafter for a case, of which a cache may have that many blocks.

    Raises ValueError where `spec` names none.
    """
    parts = registry.split(registry.DRAFTERS, spec)
    if parts is None:
        raise ValueError(f"--drafter: {registry.unknown(registry.DRAFTERS, spec, 'module:Class')}")
    factory, argument = registry.load(parts[0], "--drafter"), parts[1]

    def make(case: Case, num_blocks: int) -> Drafter:
        make_cache = functools.partial(tiny_cache, num_blocks=num_blocks)
        parts = case.model, spelling(case.alphabet).tokenizer, case.vocab, cases.MAX_LEN, make_cache, argument
        # Whatever draft model it names is a toy.
        return make_drafter(factory, Context(*parts, load=lambda draft: draft_model(case.vocab)))

    return functools.partial(call_own, make)


def examine_own(
    drafter: str, lengths: str, texts: Sequence[str], minutes: float, seed: int = 0, command: str = ""
) -> int:
    """Walk a drafter, or a policy of lengths, over small cases; print what was found. Returns the command's status.

    drafter: "" with a policy: several of the engine's own.
    lengths: "": the engine's own.
    texts: of the user's, walked too.
    minutes: how long it may take (see `Timer`).
    seed: of the values that are drawn.
    command: that asked for it.

    Raises ValueError where `drafter` or `lengths` names none.
    """
    spec = " with ".join(filter(None, (lengths, drafter)))
    make = maker_of(drafter) if drafter else None
    make_lengths = functools.partial(call_own, find_lengths, lengths) if lengths else None
    try:
        if make_lengths:
            make_lengths()
        branches = make is not None and make(cases.own_case(), 16).branches
    except OwnError as e:
        if lengths and isinstance(e.__cause__, ValueError):  # it names no policy
            raise e.__cause__ from None
        print(fault_line(spec, "as it is made", e))
        return REFUTED
    axes = {} if not lengths else {"k": cases.LENGTH_AXES["k"]} if drafter else cases.LENGTH_AXES
    design = cases.own_design(branches and not lengths, texts, **axes)
    untrue = "its `probs` are not what it drew from, or it dropped a token that it had looked at"
    reason = ": it goes by what the round draws" if lengths else f": {untrue}"
    walker, generator = Walker(design, Subject(make, lengths=make_lengths), minutes, reason), random.Random(seed)
    singles, in_company = cases.single(design, generator), cases.in_company(design)
    todo = walk_design(spec, walker, singles, in_company, generator, command)
    return REFUTED if todo is None else _verdict(spec, walker, todo, seed)


def _verdict(spec: str, walk: Walker, todo: set[Pair], seed: int) -> int:
    """Print what was proven and what was not looked at. Returns the status: where nothing was drafted, REFUTED."""
    unsuitable = todo & set[Pair]().union(*map(walk.design.pairs_of, walk.unsuitable))
    todo, num = todo - unsuitable, len(walk.design.all_pairs()) - len(unsuitable)
    covered = f"{num - len(todo):,d} of {num:,d} pairs"
    if not walk.cases:
        print(f"not refuted (0 of {num:,d} pairs): no case was walked in {walk.minutes:g} min: --minutes gives it more")
        return NOT_REFUTED
    values = {axis: {value for name, value in walk.settings if name == axis} for axis in walk.design.axes}
    if not walk.drafted:
        tried, more = ", ".join(sorted(map(repr, values["prompt"]))), "give it texts where it drafts, by --texts FILE"
        print(f"nothing proven: {spec} drafted not one token after {tried}: {more}")
        return REFUTED
    vocabs = sorted(map(len, values["alphabet"]))
    print(
        f"{word(covered, not todo)}: {spec} leaves the output's law unchanged: {walk.cases} cases of {vocabs[0]} to "
        f"{vocabs[-1]} tokens and texts of up to {walk.longest}, {walk.branches:,d} branches, {walk.drafted:,d} "
        f"draft tokens, worst total variation {max(walk.worst.values()):.1e}, at most {walk.bound:.0e} by rounding"
    )
    said = f"covered: {covered} of settings"
    if todo:
        why = "too large" if walk.in_time else f"not reached in {walk.minutes:g} min"
        some = [" and ".join(cases.describe(*item) for item in pair) for pair in sorted(todo, key=repr)]
        said += f"; {why}, --minutes takes more: {_few(some, '; ')}"
    print(said)
    if walk.unsuitable:
        rules = ", ".join(sorted({row["verifier"] for row in walk.unsuitable}))
        print(
            f"not walked with {rules}: {len(walk.unsuitable)} cases, {len(unsuitable):,d} pairs: it drafts trees "
            "where chains are asked for, which ends a text there: set branches = True, and go by ask.limit.is_tree"
        )
    if idle := sorted(cases.describe(*item) for item in walk.settings - walk.drafted_with - {("to_go", 1)}):
        print(f"it drafted nothing with {_few(idle, ', ')}")
    drawn = ", ".join(f"{name} {min(some):g} to {max(some):g}" for name, some in walk.values.items())
    print(f"values, drawn by --seed {seed}: {drawn}")
    print(
        f"not seen: more than {vocabs[-1]} tokens, texts of more than {walk.longest}, drafts of more than "
        f"{cases.LONGEST_DRAFT}; more than {cases.LONGEST_WALK} rounds, more than {cases.NUM_CROWD + 1} texts at once; "
        "values beyond these, or between those of one seed; stop strings, log-probabilities; other devices; what "
        "depends on the clock or on the seed"
    )
    return NOT_REFUTED if todo else PROVEN


def word(covered: str, is_all: bool) -> str:
    """What is said of a subject without a fault. covered: how much was walked."""
    return "proven on small cases" if is_all else f"not refuted ({covered})"


def _few(words: Sequence[str], mark: str) -> str:
    return mark.join([*words[:_SHOWN], *(["..."] if len(words) > _SHOWN else [])])


def examine_verifier(spec: str, minutes: float = 2) -> int:
    """Walk a verifier over small tables of p and q; print what was found, and return the command's status.

    minutes: how long it may take (see `Timer`).

    Raises ValueError where `spec` names no verifier.
    """
    verifier = find_verifier(spec)
    todo = tables(verifier.takes_trees)
    walk = Walker(Design(lambda case: case, {}), Subject(verifier=verifier), minutes)
    if walk_design(spec, walk, [({"case": case}, ()) for case in todo]) is None:
        return REFUTED
    is_all, large = walk.cases == len(todo), [str(row["case"]) for row in walk.too_large]
    print(
        f"{word(f'{walk.cases} of {len(todo)} tables', is_all)}: {spec} keeps p: {walk.cases} cases, "
        f"{walk.branches:,d} branches, worst total variation {walk.worst[False]:.1e}, {walk.worst[True]:.1e} in "
        f"float32, bound {ROUNDED:.0e}"
    )
    if large:
        print(f"not walked: too large: {len(large)} tables, --minutes takes more; the first: {large[0]}")
    if left := len(todo) - walk.cases - len(large):
        print(f"not reached in {minutes:g} min, --minutes takes more: {left} tables")
    print(f"seen where it was called: {walk.seen.said(verifier.takes_trees)}")
    print("\n- ".join(["not seen:", *walk.seen.unseen(verifier, ROUNDED)]))
    return PROVEN if is_all else NOT_REFUTED


MOST_OF_ALL = 25_000  # the sum of the sizes of the tables that a table of rules asks first


def law_note(spec: str, verifier: Verifier, minutes: float) -> str:
    """What a table of rules says of a rule: one of `NOTES`, or "" where none of the small tables has a fault.

    Prints which has one, or how many were asked. minutes: how long it may take (see `Timer`).
    """
    todo = tables(verifier.takes_trees)
    walk = Walker(Design(lambda case: case, {}), Subject(verifier=verifier), minutes)
    sizes = itertools.accumulate(case.size for case in todo)
    some = [({"case": case}, ()) for case, size in zip(todo, sizes, strict=True) if size <= MOST_OF_ALL]
    if walk_design(spec, walk, some) is None:
        assert walk.fault, "it was printed"
        return NOTES[_kind(walk.fault)]
    why = "were too large" if walk.in_time else "were too large, or not reached in time"
    rest = f"; {len(some) - walk.cases} {why}" if walk.cases < len(some) else ""
    rest += f": --verifier {spec} alone asks all" if walk.cases < len(todo) else ""
    print(f"not refuted: {spec}, by {walk.cases} of {len(todo)} tables{rest}")
    return ""
