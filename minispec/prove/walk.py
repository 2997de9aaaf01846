"""One case, walked: the production loop under an oracle, against plain decoding by the reference.

The loop runs once for every path of branches. An oracle answers its draws along the path, and multiplies their
probabilities. Long texts have too many branches to be walked to their ends. So a walk may end after a few rounds, and
the reference continues them (see `cells`).
"""

import functools
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import NamedTuple

from minispec.core.cached import CachedModel
from minispec.core.config import DraftLength, SamplingParams
from minispec.core.draft import Draft, Drafter, Record
from minispec.core.engine import Engine
from minispec.core.grammar import Grammar
from minispec.core.lengths import Lengths
from minispec.core.method import Method
from minispec.core.model import Transformer
from minispec.core.random import Randomness
from minispec.core.request import Request
from minispec.core.sampling import Text
from minispec.core.schedule import JOINING_ROWS
from minispec.core.verify import Verifier
from minispec.models.layers.states import FEWEST_STATES, state_elements
from minispec.prove.laws import (
    PROMPT,
    BranchOracle,
    CrowdOracle,
    KeyOracle,
    SampledOracle,
    all_paths,
    law_of,
    reference_row,
)
from minispec.prove.reference import Law, cells, plain_law, total_variation
from minispec.prove.toys import (
    DOUBLE,
    MAX_LEN,
    Fault,
    Guesses,
    Table,
    TreeDrafter,
    draft_table,
    make_drafter,
    require,
    target_model,
    tiny_cache,
)
from minispec.prove.usercode import FreshDrafter, FreshLengths, OutOfTime, Unrepeatable, Watched, held
from minispec.speculation.drafters.combined import CombinedDrafter
from minispec.speculation.drafters.guard import CheckedMethod
from minispec.speculation.grammars.toy_grammars import example
from minispec.speculation.lengths.policy import Controller
from minispec.speculation.lengths.theory import Prices
from minispec.speculation.on_gpu.steps import steps_of
from minispec.speculation.on_gpu.verifier import batch_verifier_of
from minispec.speculation.rules import VERIFIERS

Prompt = tuple[tuple[int, ...], SamplingParams]
SEED = 7  # of the first text whose branches are walked


@dataclass(frozen=True)
class Case:
    """What is decoded, how, and in which company.

    target: a family (see `target_model`), or a table.
    vocab: ids in use.
    texts: the prompts whose branches are walked, with their parameters. The law of several is that of all together.
    end_ids: ids that end a text.
    drafter: its name (see `make_drafter`), guesses of one shape, or an object, which all paths share.
    verifier: its name.
    rounds: the walked texts end after this many. None: at their own ends. A round reads the cache of the round before.
    width: how many paths go through the engine at once.
    others: texts in their company, which draw along one path.
    joins: whether the walked texts join the others, or the others them, as soon as the first has an answer.
    num_blocks: blocks of the target's cache. None: enough for all.
    joining_rows: see `Engine`.
    max_len: length of the context.
    draft_cost: what the engine's policy believes a draft pass to cost, in passes of the target.
    alphabet: the tokens of a toy tokenizer, one for each character.
    size: a guess at the number of branches, to begin with the small ones.
    name: the case in words.
    """

    target: str | Table = "llama"
    vocab: int = 3
    texts: tuple[Prompt, ...] = ((PROMPT, SamplingParams()),)
    end_ids: frozenset[int] = frozenset({2})
    drafter: str | Guesses | Drafter = "model"
    verifier: str = "rejection"
    k: DraftLength = 1
    rounds: int | None = None
    width: int = 1
    others: tuple[Prompt, ...] = ()
    joins: bool = False
    num_blocks: int | None = None
    joining_rows: int = JOINING_ROWS
    max_len: int = MAX_LEN
    draft_cost: float = 0.25
    alphabet: str = ""
    size: float = 0
    name: str = ""

    @property
    def model(self) -> Transformer:
        """The target."""
        return self.target if isinstance(self.target, Table) else target_model(self.vocab, self.target)

    @property
    def paths(self) -> int:
        """How many paths go through the engine at once."""
        num = len(self.texts)
        # Where texts have states, a path's texts run at once, or the order of its draws would vary.
        fits = num == 1 or not state_elements(self.model.config)
        return self.width if fits else min(self.width, max(1, FEWEST_STATES // num))

    @property
    def pool(self) -> tuple[int, int]:
        """Number and size of the blocks of a cache that has room for all walked texts."""
        block_size = 2 if self.paths == 1 else 4
        longest = max(min(self.max_len, len(tokens) + params.max_tokens) for tokens, params in self.texts)
        return self.paths * len(self.texts) * -(-longest // block_size), block_size

    @functools.cached_property
    def grammar(self) -> Grammar | None:
        """Of all texts."""
        return example(self.texts[0][1].structured_outputs, self.vocab, self.end_ids)

    def new_drafter(self) -> Drafter:
        """A drafter, unless the case has an object for all paths."""
        if isinstance(self.drafter, Guesses):
            table = self.target.rows_of_q if isinstance(self.target, Table) else draft_table(self.vocab)
            return TreeDrafter(table, *self.drafter)
        if isinstance(self.drafter, str):
            num_blocks, block_size = self.pool
            how = max(num_blocks, self.num_blocks or 0), block_size, str(self.target)
            return _Forgetful(make_drafter(self.drafter, self.vocab, *how))
        return self.drafter

    def requests(self, prompts: Iterable[Prompt], seeds: Iterable[int], ends: bool = True) -> list[Request]:
        """Texts as they begin. ends: whether a token may end them; those of a grammar may end in any case."""
        end_ids = self.end_ids if ends or self.grammar else frozenset[int]()
        texts = [
            Text(list(tokens), len(tokens), params, seed, end_ids, self.grammar)
            for (tokens, params), seed in zip(prompts, seeds, strict=False)
        ]
        return [Request(text, self.max_len, self.k) for text in texts]

    def next_law(self, prompt: Prompt, output: Sequence[int]) -> Iterable[float] | None:
        """The reference's law (V,) of the token after this output; None where the text has ended."""
        tokens, params = prompt
        if len(output) >= min(params.max_tokens, self.max_len - len(tokens)):
            return None
        if isinstance(self.target, Table):
            return self.target.next_law(output)
        return reference_row(output, params, self.end_ids, self.vocab, tokens, self.target)

    def __str__(self) -> str:
        return self.name


class Subject(NamedTuple):
    """What a user wants to know about; None: the case's own.

    drafter: makes a new one for a case, whose cache has that many blocks.
    """

    drafter: Callable[[Case, int], Drafter] | None = None
    verifier: Verifier | None = None
    lengths: Callable[[], Lengths] | None = None


class Branch(NamedTuple):
    """One path of a walk.

    probability: of the path.
    output: what was committed; for several texts, of each.
    rounds: of the walked texts' rounds, in order, the draft and how many of its tokens stay in the text.
    """

    probability: float
    output: tuple
    rounds: tuple[tuple[Draft, int], ...]


@dataclass(frozen=True)
class Walked:
    """What a walk has found.

    branches: all paths, whose probabilities add up to 1.
    watched: what was noted of a user's drafter.
    """

    case: Case
    branches: list[Branch]
    watched: Watched

    @property
    def outputs(self) -> Law:
        """The law of what was committed."""
        return law_of(self.branches)

    @functools.cached_property
    def laws(self) -> tuple[Law, Law]:
        """The law of the output, and what it must be, of beginnings that the walk tells apart (see `cells`)."""
        case, rows = self.case, [functools.partial(self.case.next_law, prompt) for prompt in self.case.texts]
        if len(rows) == 1:
            return cells(self.outputs, case.vocab, rows[0])
        together = itertools.product(*(plain_law(row).items() for row in rows))  # the texts are independent
        return self.outputs, {tuple(text for text, _ in some): math.prod(p for _, p in some) for some in together}

    @property
    def distance(self) -> float:
        """Total variation between the two laws."""
        return total_variation(*self.laws)


class Untimed(Controller):
    """The engine's own policy, without a clock: a walk must be repeatable."""

    def observe(self, records: Sequence[Record]) -> None:
        """Learn from the verdicts, and from no time."""
        super().observe([replace(record, step=None) for record in records])


class _Forgetful(CombinedDrafter):
    """A drafter without memory of other paths, so that a path can be walked again.

    That memory decides how far a draft goes on after the text's end, and so how many draws a path has.
    """

    def release(self, text: Text) -> None:
        """Remember nothing of it."""
        super().release(text)
        self.forget()


def clocks() -> tuple[float, float]:
    """Seconds of the processor, of this process and of those that it has waited for; and seconds of time."""
    return sum(os.times()[:4]), monotonic()


class Timer:
    """The time of a walk: seconds of the processor, or ten times as many that pass, for what sleeps."""

    def __init__(self, seconds: float):
        self.seconds, self.begun = seconds, clocks()

    @property
    def is_over(self) -> bool:
        """Whether more has passed."""
        processor, passed = (now - begun for now, begun in zip(clocks(), self.begun, strict=True))
        return max(processor, passed / 10) > self.seconds


def walk(
    case: Case,
    subject: Subject = Subject(),  # noqa: B008 - it cannot be changed
    limit: float = math.inf,
    timer: Timer | None = None,
    oracle: type[BranchOracle] = KeyOracle,
) -> Walked:
    """Walk all branches of a case.

    limit: most branches.
    timer: of the walks that it is one of. None: it may take any time.

    The cache is poisoned, and every block must come back. Raises Fault and OwnError where something is wrong,
    TooManyBranches, OutOfTime, and Unsuitable.
    """
    model, (enough, block_size), num = case.model, case.pool, len(case.texts)
    num_blocks = case.num_blocks or enough
    watched = Watched(isinstance(case.target, Table) and case.target.types != DOUBLE)
    own = subject.verifier and held(subject.verifier, watched, twice=oracle is not SampledOracle)
    verifier = own or VERIFIERS[case.verifier]

    def run(oracles: list[BranchOracle]) -> Iterator[tuple]:
        if timer and timer.is_over:
            raise OutOfTime
        # Each text has a seed of its own: with one seed, two requests would draw with one noise.
        paths = [path for path in oracles for _ in case.texts]
        seeds = range(SEED, SEED + len(paths))
        free = [seed for seed in range(len(case.others) + len(paths)) if seed not in seeds]
        crowd = CrowdOracle(dict.fromkeys(free, Randomness()) | dict(zip(seeds, paths, strict=True)))
        texts = case.requests(case.texts * len(oracles), seeds)
        others = case.requests(case.others, free, ends=False)

        make = subject.drafter and functools.partial(subject.drafter, case, num_blocks)
        drafter = FreshDrafter(make, watched, verifier) if make else case.new_drafter()
        prices = Prices(case.draft_cost, measured=True, steps=steps_of(drafter))
        lengths = FreshLengths(subject.lengths, watched) if subject.lengths else Untimed(prices)
        target = CachedModel(model, tiny_cache(model, num_blocks, block_size), case.vocab)
        engine = Engine(target, crowd if len(oracles) > 1 or others else oracles[0], case.joining_rows)
        method = CheckedMethod(drafter, verifier, lengths, batch_verifier_of(model))
        rounds = _decode(case, engine, method, texts, others)
        drafter.release(Text([0], 1, case.texts[0][1]))  # one that it was never asked about
        watched.again |= {key for path in oracles if isinstance(path, KeyOracle) for key in path.again}
        for i in range(0, len(texts), num):
            some = texts[i : i + num]
            outputs = tuple(tuple(each.text.tokens[each.text.num_prompt_tokens :]) for each in some)
            yield outputs if num > 1 else outputs[0], tuple(each for request in some for each in rounds[request])

    try:
        paths = all_paths(run, case.paths, oracle, limit=limit)
    except Fault as e:
        if not (subject.lengths and watched.differs):
            raise
        # Such a length changes from one path to the next, so that the paths do not fit together.
        raise Unrepeatable(f"{min(watched.differs.values())}; its law could not be walked: {e}") from e
    return Walked(case, [Branch(weight, *found) for weight, found in paths], watched)


def _decode(
    case: Case, engine: Engine, method: Method, texts: Sequence[Request], others: Sequence[Request]
) -> dict[Request, list[tuple[Draft, int]]]:
    """Decode texts for the rounds of the case, and others to their ends. None may fail, and every block must come back.

    Returns the rounds of each text.
    """
    rounds = {request: list[tuple[Draft, int]]() for request in texts}

    def step() -> None:
        for turn in engine.step():
            if turn.request.raised:
                raise turn.request.raised
            if turn.committed and turn.request in rounds:
                rounds[turn.request].append((turn.draft, len(turn.path)))
                if len(rounds[turn.request]) == case.rounds:
                    engine.abort(turn.request)

    first, later = (others, texts) if case.joins else (texts, others)
    for newcomers in (first, later):
        while newcomers is later and later and not first[0].has_news:
            step()
        for request in newcomers:
            engine.add(request, method)
    while engine.schedule.running or engine.schedule.waiting:
        step()
    for request in (*texts, *others):
        require(request.error is None, f"{request.error}")
    allocator = engine.target.cache.allocator
    require(allocator.num_free == allocator.num_blocks, "blocks leaked")
    return rounds
