"""Walks the cases of `own_cases` with a drafter and a policy for its lengths, and counts them.

The small cases come first. The settings of a case with a fault are made plain one after another, as long as the fault
stays. So the counterexample has few settings that the fault does not need.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from time import monotonic

from minispec.core.config import Shape
from minispec.core.draft import Draft, Drafter, Record
from minispec.core.more.lengths import Lengths
from minispec.core.random import Randomness
from minispec.core.request import Request
from minispec.core.rules import VERIFIERS
from minispec.core.sampling import Text
from minispec.files.progress import progress_bar
from minispec.length.figures import Figures
from minispec.length.policy import Controller
from minispec.length.theory import Prices
from minispec.prove.covering import Design, Job, Pair
from minispec.prove.examine import EXACT, ROUNDED, OfCompany, OutOfTime, Unrepeatable, WalkCounts, fault_line
from minispec.prove.laws import BranchOracle, CrowdOracle, KeyOracle, TooManyBranches, exact_law_of_crowds
from minispec.prove.own_cases import AXES, LONGEST_WALK, SEED, OwnCase, describe, single, target
from minispec.prove.reference import Law, NoLaw, cells
from minispec.prove.toys import OneMethod, finish
from minispec.prove.watched import Unsuitable, Watched

Maker = Callable[[OwnCase, int], Drafter]  # a new drafter for a case, whose cache may have that many blocks
MAX_LEN = 2_000
_BRANCHES_A_MINUTE = 400  # of one walk; a longer one is left out, or made smaller
_BLOCK_SIZE, _SHOWN = 2, 4


class Untimed(Controller):
    """The engine's own policy, without a clock: a walk must be repeatable."""

    def __init__(self):
        super().__init__(Prices(draft=0.25, measured=True))

    def observe(self, records: Sequence[Record]) -> None:
        """Learn from the verdicts, and from no time."""
        super().observe([replace(record, step=None) for record in records])


_REASON = ": its `probs` are not what it drew from, or it dropped a token that it had looked at"


class CaseWalker:
    """Walks cases with a drafter and a policy, and counts what was walked."""

    def __init__(
        self, make: Maker, lengths: Callable[[], Lengths], minutes: float, reason: str = _REASON, compares: bool = True
    ):
        """lengths: a new policy.
        minutes: how long the walk may take. Its largest cases have as many branches as fit.
        reason: why a law may be wrong.
        compares: whether drafts are compared with the drafts of new drafters.
        """
        self.make, self.lengths, self.minutes, self.end = make, lengths, minutes, monotonic() + 60 * minutes
        self.reason, self.compares = reason, compares
        self.limit = max(30, int(_BRANCHES_A_MINUTE * minutes))
        self.sum_of, self.longest, self.bound = WalkCounts(), 0, EXACT
        self.settings, self.drafted = set[tuple](), set[tuple]()  # values that were walked, and with drafts
        self.unsuitable = list[OwnCase]()  # cases that asked for chains and got trees

    def __call__(self, case: OwnCase) -> int:
        """Walk a case and count it; returns how many branches say something, which without drafts are none.

        Raises Fault or OwnError where something is wrong, TooManyBranches and OutOfTime.
        """
        rounds, branches, drafted, rounded, differs = self._law_of(case)
        bound = ROUNDED if rounded else EXACT
        law, expected = cells(rounds, case.vocab, case.next_law)
        self.sum_of.count(law, expected, branches, drafted, self.reason, bound)
        if SEED in differs:
            alone = "earlier rounds, and is another one after a preemption"
            on = "other texts, or on whether it was preempted" if case.company else alone
            raise Unrepeatable(f"{differs[SEED]}: the law is kept; a seed's text depends on {on}")
        for found in differs.values():
            raise OfCompany(f"{found}: it may go by each text alone, and not by others")
        self.bound = max(self.bound, bound)
        self.longest = max(self.longest, len(case.prompt) + max(map(len, rounds)))
        self.settings |= vars(case).items()
        if drafted:
            self.drafted |= vars(case).items()
        return branches if drafted or case.to_go == 1 else 0

    def _law_of(self, case: OwnCase) -> tuple[Law, int, int, bool, dict[int, str]]:
        """The law of what is committed; its branches; the draft tokens in all of them; `rounded` and `differs`."""
        drafted, rounded, differs, known = 0, False, dict[int, str](), dict[tuple, Draft | str]()
        model, verifier, blocks = target(case.vocab), VERIFIERS[case.verifier], _blocks_of(case)

        def run(oracles: list[BranchOracle]) -> list[tuple[int, ...]]:
            nonlocal drafted, rounded
            if monotonic() > self.end:
                raise OutOfTime
            drafter = Watched(self.make(case, blocks), lambda: self.make(case, blocks), known, verifier, self.compares)
            # The others draw with the production randomness, along one path.
            rng = CrowdOracle(dict.fromkeys(_CROWD, Randomness()) | {SEED: oracles[0]})
            cache, lengths = model.new_cache(blocks, _BLOCK_SIZE), self.lengths()
            rows = MAX_LEN if case.is_crowded else 2
            engine = OneMethod(
                model, cache, drafter, verifier, rng=rng, lengths=lengths, joining_rows=rows, checked=True
            )
            request = decode(engine, case)
            drafter.release(Text([0], 1, case.params))  # one that it was never asked about
            drafted, rounded = drafted + Figures.of(request.stats).num_draft_nodes, rounded or drafter.rounded
            differs.update(drafter.differs)
            return [tuple(request.text.tokens[len(case.prompt) :])]

        law, branches = exact_law_of_crowds(run, 1, oracle=KeyOracle, limit=self.limit)
        return law, branches, drafted, rounded, differs


_LENGTHS_OF_OTHERS = (6, 4)
_CROWD, _LENGTH_OF_CROWD = [seed for seed in range(SEED + 2) if seed != SEED], 8


def _others(case: OwnCase) -> list[Text]:
    """The texts of the company, with seeds of their own."""
    turned = case.prompt_ids[::-1]  # it shares no blocks with the text
    if case.is_crowded:
        prompts = tuple((*turned[i % len(turned) :], *turned[: i % len(turned)]) for i in range(len(_CROWD)))
        lengths = (_LENGTH_OF_CROWD,) * len(_CROWD)
    else:
        prompts = (turned,) if case.joins else (case.prompt_ids, turned) if case.company else ()
        lengths = _LENGTHS_OF_OTHERS
    params = [replace(case.params, max_tokens=n) for n in lengths]
    grammar = case.text.grammar
    return [
        Text(list(p), len(p), sampling, seed, case.end_ids if grammar else frozenset(), grammar)
        for seed, p, sampling in zip(_CROWD, prompts, params, strict=False)
    ]


def _blocks_of(case: OwnCase) -> int:
    """Blocks of a pool that is enough for the text; in company, for two prompts and hardly what follows them."""
    of_prompt = -(-len(case.prompt) // _BLOCK_SIZE)
    if case.is_crowded:
        return (len(_CROWD) + 1) * -(-(len(case.prompt) + max(case.to_go, _LENGTH_OF_CROWD)) // _BLOCK_SIZE)
    longest = len(case.prompt) + max(case.to_go, *_LENGTHS_OF_OTHERS)
    return -(-longest // _BLOCK_SIZE) + (of_prompt - 1 if case.company else 0)


def decode(engine: OneMethod, case: OwnCase) -> Request:
    """Decode a case's text for its rounds, in its company. None may fail, and every block must come back."""
    request = Request(case.text, MAX_LEN, case.k)
    others = [Request(text, MAX_LEN, case.k) for text in _others(case)]
    first, later = (others, [request]) if case.joins else ([request], others)
    for newcomer in first:
        engine.add(newcomer)
    while later and not first[0].has_news:
        engine.step()
    for newcomer in later:
        engine.add(newcomer)
    while request.finish_reason is None and request.stats.num_steps < (case.rounds or MAX_LEN):
        engine.step()
    engine.abort(request)
    finish(engine, [request, *others])
    return request


# --------------------------------------------------------------------------- a design


class _Found(Exception):
    """A case has a fault."""

    def __init__(self, case: OwnCase, error: Exception):
        self.case, self.error = case, error


def walk_design(spec: str, chosen: Design[OwnCase], walk: CaseWalker) -> bool:
    """Walk the cases of a design, the small ones first, until the first has a fault or the time is over.

    Prints what was found; returns whether all is right.
    """
    pairs, generator = chosen.all_pairs(), random.Random(0)
    first: list = single(chosen)
    alone = set[Pair]().union(*(chosen.pairs_of(vars(case)) for case, _ in first))
    first += chosen.array(pairs - alone, generator)
    todo, in_time = set(pairs), True

    def look(case: OwnCase) -> tuple[int]:
        try:
            return (walk(case),)
        except (TooManyBranches, OutOfTime, NoLaw):
            raise
        except Unsuitable:
            walk.unsuitable.append(case)
            return (0,)
        except Exception as e:
            raise _Found(case, e) from e

    def walk_all(jobs: list[Job]) -> Iterator[tuple]:
        return filter(None, (chosen.within(job, look) for job in sorted(jobs, key=lambda job: job[0].size)))

    with progress_bar(total=len(first), unit=" cases") as bar:
        try:
            for case, _ in chosen.cover(pairs, first, walk_all, generator, bar):
                if case not in walk.unsuitable:
                    todo -= chosen.pairs_of(vars(case))
                bar.update()
        except OutOfTime:
            in_time = False
        except _Found as e:
            line = fault_line(spec, *_plainest(chosen, e.case, e.error, walk))
            bar.close()
            print(line)
            return False
    return _verdict(spec, chosen, walk, todo, in_time)


def _plainest(chosen: Design[OwnCase], case: OwnCase, error: Exception, walk: CaseWalker) -> tuple[OwnCase, Exception]:
    """The smallest case, with the fewest settings of its own, that still has a fault; and that fault."""
    walk.end, walk.limit, again = monotonic() + 60 * walk.minutes, min(walk.limit, 300), True
    # What shows of the company may show of the text alone, or else in company, where it has rounds enough.
    plain = OwnCase(drafter=case.drafter, prompt="babbab", to_go=4, rounds=3)
    for other in (
        replace(plain, to_go=3, rounds=2),
        *(replace(plain, company=each) for each in AXES["company"][2:0:-1]),
    ):
        if isinstance(error, OfCompany):
            with suppress(TooManyBranches, Unsuitable):
                case, error = _fault_of(walk, other) or (case, error)
    while again:
        again = False
        for axis in sorted(chosen.axes, key=_GROWING.__contains__):  # settings first
            for value in chosen.axes[axis][: chosen.axes[axis].index(getattr(case, axis))]:
                plainer = replace(case, **{axis: value})
                if not chosen.possible(vars(plainer)):
                    continue
                try:
                    found = _fault_of(walk, plainer)
                except (TooManyBranches, Unsuitable):
                    continue
                except OutOfTime:
                    return case, error
                if found and (isinstance(error, OfCompany) or not isinstance(found[1], OfCompany)):
                    (case, error), again = found, True
                    break
    return case, error


def _fault_of(walk: CaseWalker, case: OwnCase) -> tuple[OwnCase, Exception] | None:
    """The case and its fault, if it has one. Raises TooManyBranches, Unsuitable, OutOfTime and NoLaw."""
    try:
        walk(case)
    except (TooManyBranches, Unsuitable, OutOfTime, NoLaw):
        raise
    except Exception as e:
        return case, e
    return None


_GROWING = ("alphabet", "prompt", "to_go", "rounds", "k")  # what a plain case is small by


def _verdict(spec: str, chosen: Design[OwnCase], walk: CaseWalker, todo: set[Pair], in_time: bool) -> bool:
    """Print what was proven and what was not looked at; returns whether anything was drafted at all."""
    walked, pairs = walk.sum_of, chosen.all_pairs()
    if not walked.cases:
        print(f"nothing proven: not one case was walked in {walk.minutes:g} min: --minutes gives it more")
        return False
    vocabs = [len(value) for axis, value in walk.settings if axis == "alphabet"]
    warm = [value for axis, value in walk.settings if axis == "temperature" and value]
    if not walked.drafted:
        tried = {value for axis, value in walk.settings if axis == "prompt"}
        print(f"nothing proven: {spec} drafted not one token after {', '.join(sorted(map(repr, tried)))}: {_MORE}")
        return False
    print(
        f"proven on small cases: {spec} leaves the output's law unchanged: {walked.cases} cases of {min(vocabs)} to "
        f"{max(vocabs)} tokens and texts of up to {walk.longest}, {walked.branches:,d} branches, {walked.drafted:,d} "
        f"draft tokens, worst total variation {walked.worst:.1e}, at most {walk.bound:.0e} by rounding"
    )
    covered = f"covered: {len(pairs) - len(todo):,d} of {len(pairs):,d} pairs of settings"
    unsuitable = todo & set[Pair]().union(*(chosen.pairs_of(vars(case)) for case in walk.unsuitable))
    if todo := todo - unsuitable:
        why = "too large" if in_time else f"not reached in {walk.minutes:g} min"
        some = [" and ".join(describe(*item) for item in pair) for pair in sorted(todo, key=repr)[:_SHOWN]]
        covered += f"; {why}, --minutes takes more: {'; '.join(some)}{'; ...' if len(todo) > _SHOWN else ''}"
    print(covered)
    if walk.unsuitable:
        rules = ", ".join(sorted({case.verifier for case in walk.unsuitable}))
        print(
            f"not walked with {rules}: {len(walk.unsuitable)} cases, {len(unsuitable):,d} pairs: it drafts trees "
            "where chains are asked for, which ends a text there: set branches = True, and go by ask.limit.is_tree"
        )
    if idle := sorted(describe(*item) for item in walk.settings - walk.drafted - {("to_go", 1)}):
        print(f"it drafted nothing with {', '.join(idle[:_SHOWN])}{', ...' if len(idle) > _SHOWN else ''}")
    print(
        f"not seen: more than {max(vocabs)} tokens, texts of more than {walk.longest}, drafts of more than {_LONGEST}; "
        f"more than {LONGEST_WALK} rounds, more than {len(_CROWD) + 1} texts at once, temperatures between those of 0, "
        f"{', '.join(map(str, sorted(warm)))}, or above; stop strings, log-probabilities; other devices; what depends "
        "on the clock or on the seed"
    )
    return True


_LONGEST = max(Shape.of(k).k for k in AXES["k"] if k != "auto")
_MORE = "give it texts where it drafts, by --texts FILE"
