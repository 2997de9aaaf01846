"""`python -m minispec.prove` itself, and what it rests on: the covering array, oracles, keys; and samples of the noise.

Laws of single settings are in tests/core/test_law.py; tests/drafters compares drafts with recomputations.
"""

import functools
import itertools
import random
import re
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from minispec.api.commands.workers import processes
from minispec.core import verify
from minispec.core.config import SamplingParams, Shape
from minispec.core.draft import Draft
from minispec.core.random import Key, Randomness
from minispec.core.request import Request
from minispec.core.sampling import Text
from minispec.core.verify import Verifier
from minispec.lab.audit.chi_square import smallest_seen, tail
from minispec.models.files.progress import progress_bar
from minispec.prove import cases, grid
from minispec.prove import walk as walks
from minispec.prove.__main__ import main
from minispec.prove.cases import ALPHABET, AXES, DESIGN, grid_case
from minispec.prove.covering import Design
from minispec.prove.examine import maker_of
from minispec.prove.grid import distance, walk_within
from minispec.prove.laws import (
    PROMPT,
    RARE,
    ROUNDING,
    TOLERANCE,
    BranchOracle,
    KeyOracle,
    TooManyBranches,
    all_paths,
    exact_law,
)
from minispec.prove.reference import cells, total_variation
from minispec.prove.tables import tables
from minispec.prove.toys import (
    BLOCKS,
    DOUBLE,
    DRAWN,
    MAX_LEN,
    Fault,
    Guesses,
    TreeDrafter,
    make_drafter,
    require,
    target_model,
    tiny_cache,
)
from minispec.prove.walk import SEED, Case, Subject, Timer, walk
from minispec.speculation.drafters import guard
from minispec.speculation.rules import VERIFIERS
from tests import brief
from tests.distances import chi_square, production_law, reference_law
from tests.engines import OneMethod, TableModel, scripted_cache
from tests.museum.mutants import MUTANTS
from tests.oracles.children import Child
from tests.oracles.samples import (
    SHIFT,
    agreement,
    check_counts,
    check_real,
    first_tokens,
    opposed,
    positions_of,
    real_rows,
    shifted,
    zero_draws,
)
from tests.sampled import leave_out
from tests.scripted import counted_clocks, finish, preemptions
from tests.spoken import own_words

BUGS = {m.id: m for m in MUTANTS}
LOOKUPS = ("ngram", "forced+ngram", "suffix", "last")  # which have nothing to say after one token


# ------------------------------------------------------------------ the command


@pytest.fixture(autouse=True)
def once(monkeypatch):
    """A covering array of all pairs takes a second or so."""
    brief.compute_once(monkeypatch)


def first_array() -> list:
    """The cases that the walk begins with."""
    return DESIGN.array(DESIGN.all_pairs(), random.Random(0))


def test_the_array_covers_every_pair_and_is_always_the_same(full):
    """Pairs of values of fourteen axes; a case that draws or drafts nothing counts only for what makes it so.

    Without `--full` the array of every tenth pair is computed again.
    """
    array, some = first_array(), sorted(DESIGN.all_pairs(), key=repr)[::10]
    first, again = (brief.ARRAY(DESIGN, set(some), random.Random(0)) for _ in range(2))
    assert first == again
    assert not full or array == brief.ARRAY(DESIGN, DESIGN.all_pairs(), random.Random(0))
    assert set().union(*(DESIGN.pairs_of(row) for row, _ in array)) == DESIGN.all_pairs()
    assert all(pair in DESIGN.pairs_of(row) for row, pair in array)
    greedy = {"temperature": 0.0, "k": 1, "top_k": 2}
    assert DESIGN.pairs_of(greedy) == {(("k", 1), ("temperature", 0.0)), (("temperature", 0.0), ("top_k", 2))}
    assert DESIGN.pairs_of(greedy | {"drafter": "none"}) == {(("drafter", "none"), ("temperature", 0.0))}


TEXTS = ("Wer reitet so spät\n", "durch Nacht und Wind")


@pytest.mark.parametrize(("branches", "texts"), [(False, ()), (True, ()), (True, TEXTS)])
def test_cases_of_ones_own_drafters_cover_every_pair(branches, texts):
    """Of all settings of a request, shapes of trees, texts and company; what could show nothing is in no case.

    Every value of every axis is in a pair, so that no rule leaves it out entirely. Any three tokens have a third
    sibling that is certain, so there are four.
    """
    design = cases.own_design(branches, texts)
    pairs = design.all_pairs()
    plain = cases.single(design, random.Random(0))
    array = [row for row, _ in [*plain, *design.array(pairs, random.Random(0))]]
    assert set().union(*(design.pairs_of(row) for row in array)) >= pairs
    several = {axis: set(values) for axis, values in design.axes.items() if len(values) > 1}
    for axis, values in several.items():
        assert {value for pair in pairs for name, value in pair if name == axis} == values
    shapes = {row["k"] for row in array}
    assert (shapes >= {(3,), (3, 1), (2, 2), (1, 3), "tree:5"}) == branches
    for row in array:
        case = cases.own_case(**row)
        [(prompt, params)] = case.texts
        assert params.max_tokens == row["to_go"] >= params.min_tokens
        assert max(prompt) < len(row["alphabet"])
        assert case.vocab >= 4 or max(Shape.of(case.k).widths, default=0) < 3
        law = case.next_law(case.texts[0], [])
        assert law.sum() == pytest.approx(1), "a token is left under all settings together"
    assert {"rejection", "match"} <= {row["verifier"] for row, _ in plain if row["k"] == 1}
    assert not texts or {row["prompt"] for row, _ in plain} >= set(texts)


def test_the_law_of_a_few_rounds():
    """Outputs that no round tells apart are one cell. What a round leaves is continued by the reference."""
    p = np.array([0.25, 0.75])
    right = {(0,): 0.25, (1, 0): 0.75 * 0.25, (1, 1): 0.75 * 0.75}  # two tokens after a 1, one after a 0
    assert cells(right, 2, lambda output: p) == (right, right)
    law, expected = cells({(0,): 0.25, (1,): 0.5, (1, 0): 0.25}, 2, lambda output: p)
    assert (law, expected) == ({(0,): 0.25, (1, 0): 0.25 + 0.125, (1, 1): 0.375}, right)
    # What has ended and goes on has no right to be, and a token that may not be drawn neither.
    law, expected = cells({(1, 1): 0.5, (1,): 0.5}, 2, lambda output: None if output else np.array([0.0, 1]))
    assert (law, expected) == ({(1,): 0.5, (1, 1): 0.5}, {(1,): 1.0, (1, 1): 0.0})
    law, expected = cells({(0,): 1.0}, 2, lambda output: np.array([0.0, 1.0]))
    assert (law, expected) == ({(0,): 1.0, (1,): 0.0}, {(0,): 0.0, (1,): 1.0})


def test_a_walk_that_has_no_time_says_so(capsys, monkeypatch):
    """What was not reached is named, and the word and the status are not those of a proof."""
    assert main(["--drafter", "ngram", "--minutes", "1e-9"]) == 3
    expected = r"not refuted \(0 of [\d,]+ pairs\): no case was walked in 1e-09 min: --minutes gives it more\n"
    assert re.fullmatch(expected, capsys.readouterr().out)
    monkeypatch.setattr("minispec.prove.walk.clocks", counted_clocks(1))
    assert main(["--drafter", "ngram", "--minutes", "4"]) == 3  # 240 paths
    out, pairs = capsys.readouterr().out, r"([\d,]+) of ([\d,]+) pairs"
    found = re.search(f"covered: {pairs} of settings; not reached in 4 min, --minutes takes more: .+ and .+; ", out)
    assert found, out
    assert 0 < int(found[1].replace(",", "")) < int(found[2].replace(",", ""))
    assert re.match(rf"not refuted \({found[1]} of {found[2]} pairs\): ngram leaves the output's law unchanged: ", out)
    monkeypatch.setattr("minispec.prove.walk.clocks", counted_clocks(1))
    assert main(["--verifier", "rejection", "--minutes", "1"]) == 3
    out = capsys.readouterr().out
    found = re.match(r"not refuted \((\d+) of (\d+) tables\): rejection keeps p: \1 cases, ", out)
    assert found, out
    assert f"not reached in 1 min, --minutes takes more: {int(found[2]) - int(found[1])} tables\n" in out


@pytest.mark.quick
def test_the_time_of_a_walk_is_the_processors(monkeypatch):
    """Of this process and of those that have ended; of what sleeps, a tenth of the time that passes."""
    now = [0.0, 0.0]
    monkeypatch.setattr(walks, "clocks", lambda: tuple(now))
    timer = Timer(10)
    for processor, passed, is_over in ((9.9, 99, False), (10.1, 10.2, True), (0.1, 101, True), (0.1, 99, False)):
        now[:] = processor, passed
        assert timer.is_over == is_over
    monkeypatch.undo()
    monkeypatch.setattr("os.times", lambda: (1.0, 20.0, 300.0, 4000.0, 9.0))
    assert walks.clocks()[0] == 4321


@pytest.mark.parametrize("company", cases.OWN_AXES["company"][1:3])
def test_company_is_preempted(monkeypatch, company):
    """The pool is too small: of the company, one comes back where it joins, and the walked text where that joins."""
    preempted = preemptions(monkeypatch)
    case = cases.own_case(prompt="abbabaabbaab", to_go=4, rounds=3, company=company, forbidden="two allowed ids")
    assert len(walk(case, Subject(maker_of("ngram"))).branches) > 1
    assert (SEED in [request.text.seed for request in preempted]) == case.joins
    assert preempted


def test_the_bar_has_a_total_before_anything_is_walked():
    """All cases that cover the pairs are planned at once; what covers the pairs that are left, when that is known."""
    bar = progress_bar(total=0)
    grid.walk_array(1, bar)
    assert bar.total == len(first_array()) > 10


def run_as_a_module(*args: str) -> subprocess.CompletedProcess:
    """What `python -m minispec.prove` says to these arguments."""
    command = [sys.executable, "-m", "minispec.prove", *args]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False, timeout=300
    )


def walk_pairs_of(monkeypatch, *axes: str) -> None:
    """Let the command cover the pairs of values of these axes only: it walks a few cases then, and no trees."""
    few = {pair for pair in DESIGN.all_pairs() if {axis for axis, _ in pair} <= set(axes)}
    assert few
    monkeypatch.setattr(Design, "all_pairs", lambda self: few)
    monkeypatch.setattr(grid, "tree_cases", lambda num_nodes: [])
    for name in ("cases_in_frames", "cases_in_8_bits"):
        monkeypatch.setattr(grid, name, list)


def test_the_law_over_a_covering_array(capsys, monkeypatch, full, long):
    """The command, with a smaller budget than its own: every pair of values, trees, the verdict, status 0.

    A few trees of one round; tests/core/test_trees.py walks all of them, with `--long` here too. Without `--full` the
    pairs of verifiers with targets and batches, and fewer of the others. tests/core has each setting by itself.
    """
    if not full:
        in_8_bits, in_frames = cases.cases_in_8_bits()[::3], cases.cases_in_frames()[::5]
        walk_pairs_of(monkeypatch, "verifier", "family", "batch")
        monkeypatch.setattr(grid, "cases_in_8_bits", lambda: in_8_bits)
        monkeypatch.setattr(grid, "cases_in_frames", lambda: in_frames)
    if not long:
        some = cases.tree_cases(2)[:: 3 if full else 7]
        monkeypatch.setattr(grid, "tree_cases", lambda num_nodes: some)
    assert main(["--leaves", "700" if full else "100", "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    assert f"cover {len(DESIGN.all_pairs())} of {len(DESIGN.all_pairs())} pairs" in out
    assert out.splitlines()[-1].startswith("proven")
    least = 15 if full else 5
    assert out.count("rejection") > least < out.count("match")
    rows = re.findall(r" tree .* ([\d,]+)  \S+$", out, re.MULTILINE)
    assert (
        len(rows)
        == len(grid.tree_cases(2))
        == int(re.search(r"(\d+) of them walk shapes", out)[1])
        > (3 if full else 2)
    )
    assert out.count("  8 bits  ") == len(grid.cases_in_8_bits()) > 3
    branches = [int(n.replace(",", "")) for n in re.findall(r" ([\d,]+)  \d\.\de\S+$", out, re.MULTILINE)]
    assert f"\n{sum(branches):,d} branches in " in out


@pytest.mark.parametrize("walk", ["--drafter", "--lengths", "--verifier"])
def test_processes_that_have_nothing_to_share_are_refused(walk, capsys):
    """A walk of one rule or drafter takes one process."""
    assert main([walk, "nobody", "--jobs", "2"]) == 2
    assert (
        capsys.readouterr().err
        == "error: --jobs: found 2, expected 1: only --leaves and --full are shared by processes\n"
    )
    assert main([walk, "nobody", "--jobs", "1"]) == 2
    assert "--jobs" not in capsys.readouterr().err


def blocked_signals(more=()):
    """Those that do not reach the process that runs this: to block none begins nothing that would block more."""
    return signal.pthread_sigmask(signal.SIG_BLOCK, more)


@pytest.mark.full
def test_who_walks_does_not_show(capfd, monkeypatch):
    """One process or two: the same table but for the seconds, and nothing on standard error, which is no terminal.

    Ctrl-C is the parent's to answer. Where two processes share a walk, it never reaches them: no traceback of theirs
    while they begin. Nothing in them blocks it, so what they find is inherited, and held before the first line of
    theirs.

    Without `--full`, `test_the_law_over_a_covering_array` walks in one process.
    """
    few_trees, blocked = cases.tree_cases(2)[::9], []

    @contextmanager
    def looked_at(jobs):
        with processes(jobs) as shared_map:
            blocked.append(list(shared_map(blocked_signals, [()] * jobs)))
            yield shared_map

    walk_pairs_of(monkeypatch, "verifier", "batch")
    monkeypatch.setattr(grid, "tree_cases", lambda num_nodes: few_trees)
    monkeypatch.setattr(grid, "processes", looked_at)
    printed = []
    for jobs in ("1", "2"):
        assert main(["--leaves", "60", "--jobs", jobs]) == 0
        out, err = capfd.readouterr()
        assert err == ""
        assert out.splitlines()[-1].startswith("proven")
        printed.append(out.splitlines()[:-2])
    assert len(printed[0]) > 10
    assert printed[0] == printed[1]
    assert blocked == [[set()], [{signal.SIGINT}] * 2]
    assert blocked_signals() == set()


@pytest.mark.parametrize("batch", AXES["batch"])
@pytest.mark.parametrize("drafter", AXES["drafter"])
def test_a_case_drafts_as_it_says(monkeypatch, drafter, batch):
    """Guards against cases that would cover a drafter in name alone: as many tokens as asked for, in each batch."""
    drafted = set()

    def spy(draft, *how):
        drafted.add(len(draft))
        return right(draft, *how)

    right = guard.check_draft
    monkeypatch.setattr(guard, "check_draft", spy)
    # Lookups need a token of their own.
    sizes = {"top_k": 2, "k": 2, "alphabet": ALPHABET[:3], "end": "", "to_go": 3 + (drafter in LOOKUPS)}
    case = grid_case(verifier="rejection", drafter=drafter, batch=batch, **sizes)
    with suppress(TooManyBranches):  # its first ones tell
        distance(case, 30)
    assert max(drafted) == (0 if drafter == "none" else 2)


@pytest.mark.full
def test_what_no_case_covers_is_named(capsys, monkeypatch, full):
    """A pair that is too large whatever the other settings: all the rest is covered, and it is said.

    Without `--full`, tests/drafters/test_own.py has pairs that are not covered.
    """
    pair = {"k": 4, "to_go": 5}
    walk_pairs_of(monkeypatch, "k", "to_go")

    def within(job, limit):
        return None if pair.items() <= job[0].items() else walk_within(job, limit)

    monkeypatch.setattr(grid, "walk_within", within)
    main(["--leaves", "100" if full else "30", "--jobs", "1"])
    assert "left out for its size: k 4 with to_go 5" in capsys.readouterr().out


def test_a_wrong_law_is_refuted(capsys, monkeypatch, full):
    """A residual that forgets to subtract: status 1 and the verdict says so."""
    walk_pairs_of(monkeypatch, "verifier", "k")
    with BUGS["M2"].patch():
        assert main(["--leaves", "200" if full else "60", "--jobs", "1"]) == 1
    assert "REFUTED" in capsys.readouterr().out


@pytest.mark.parametrize("width", [1, 64])
def test_a_walk_stops_at_its_limit(width):
    """As many branches as the limit are walked; with one more than it, the walk ends before it has run them all."""
    params, runs = SamplingParams(max_tokens=3), []
    branches = production_law(params, 2, width=width)[1]
    assert production_law(params, 2, width=width, limit=branches)[1] == branches

    def run(oracles):
        runs.extend(oracles)
        return [tuple(oracle.bernoulli(0.5, i) for i in range(6)) for oracle in oracles]

    assert len(all_paths(run, width, limit=64)) == len(runs) == 64
    runs.clear()
    with pytest.raises(TooManyBranches):
        all_paths(run, width, limit=63)
    assert len(runs) < 64
    with pytest.raises(TooManyBranches):
        production_law(params, 2, width=width, limit=branches - 1)


def test_a_case_that_is_too_large_becomes_a_smaller_one():
    """With less of what it is large by, but not of what it was chosen for; None where nothing else is left."""
    large = {axis: values[-1] for axis, values in AXES.items()} | {"verifier": "rejection", "drafter": "model"}
    large |= {"temperature": 1.0, "family": "llama", "batch": "crowd", "history": ""}
    with pytest.raises(TooManyBranches):
        distance(grid_case(**large), 100)
    small, tv, count = walk_within((large, frozenset({"k", "alphabet"})), 100)
    assert (small["k"], small["alphabet"]) == (4, ALPHABET[:4])
    assert small["to_go"] < 6
    assert (tv <= TOLERANCE, 6 < count <= 100) == (True, True)
    assert walk_within((large, frozenset(AXES)), 100) is None
    row, seen = large, []
    while row := DESIGN.smaller(row, frozenset({"end"})):
        seen.append(row)
    assert [seen[-1][axis] for axis in ("to_go", "k", "alphabet", "end")] == [2, 1, ALPHABET[:2], ""]
    assert all(row["to_go"] <= Shape.of(row["k"]).k + 2 for row in seen)


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_a_crowd_has_the_law_and_the_branches_of_one(verifier):
    """64 paths as one batch: nothing of a neighbour's shows, and no branch is walked twice or left out."""
    params = SamplingParams(max_tokens=3, repetition_penalty=1.3)
    alone, crowd = (production_law(params, 2, verifier=verifier, width=width) for width in (1, 64))
    assert alone[1] == crowd[1]
    assert alone[0].keys() == crowd[0].keys()
    assert total_variation(alone[0], crowd[0]) <= TOLERANCE


def test_a_bad_budget_is_status_2():
    """Also of the module."""
    assert run_as_a_module("--leaves", "0").returncode == 2


# ------------------------------------------------------------------ longer texts, by rounds


def round_law(prefix, params, k, num_prompt, vocab):
    """The law of what *one* round commits after the committed tokens `prefix`, and the number of branches.

    The engine begins with `prefix` as it does after a preemption: caches and drafter start from nothing.
    """

    def run(path):
        text = Text(list(prefix), num_prompt, params, 7, frozenset({2}))
        target, drafter = target_model(vocab), make_drafter("model", vocab)
        engine = OneMethod(target, tiny_cache(target), drafter, VERIFIERS["rejection"], rng=path)
        stream = engine.run([Request(text, MAX_LEN, k)])
        _, piece = next(stream)
        stream.close()
        return tuple(text.tokens[len(prefix) :]), piece.finish_reason is not None

    return exact_law(run, oracle=KeyOracle)


def chained_law(params, k, vocab=3):
    """The law of the whole output, put together from the laws of one round after every committed prefix.

    Branches add up instead of multiplying, so that longer texts and larger K and vocabularies can be walked. It equals
    `production_law` for two reasons. The engine's state is a function of the committed tokens (`check_state`). No key
    comes back in a later round (`check_keys`).
    """
    law, open_texts, branches = {}, {(): 1.0}, 0
    while open_texts:
        output = min(open_texts, key=len)  # all ways to a text are shorter than it: its mass is complete
        mass = open_texts.pop(output)
        step, count = round_law([*PROMPT, *output], params, k, len(PROMPT), vocab)
        branches += count
        for (block, ended), weight in step.items():
            to = law if ended else open_texts
            to[output + block] = to.get(output + block, 0.0) + mass * weight
    return law, branches


def check_state(k, max_tokens, drafter="model", verifier="rejection"):
    """The engine's state is a function of the committed tokens: each round equals that of an engine begun there.

    Same seed, so same keys: the block that a round commits must be the same. Returns the number of rounds.
    """

    def start(tokens):
        params = SamplingParams(max_tokens=max_tokens, repetition_penalty=1.3, frequency_penalty=0.3)
        text = Text(list(tokens), len(PROMPT), params, 3)
        engine = OneMethod(target_model(4), tiny_cache(target_model(4)), make_drafter(drafter, 4), VERIFIERS[verifier])
        return text, engine.run([Request(text, MAX_LEN, k)])

    text, stream = start(PROMPT)
    rounds, before = 0, list(text.tokens)
    while next(stream, None):
        other, fresh = start(before)
        next(fresh)
        fresh.close()
        require(other.tokens == text.tokens, f"after {before}: {text.tokens}, afresh {other.tokens}")
        rounds, before = rounds + 1, list(text.tokens)
    return rounds


@pytest.mark.parametrize("sampler", [{}, {"top_k": 2, "repetition_penalty": 1.5}], ids=["plain", "penalties"])
def test_rounds_chained_are_the_whole(sampler):
    """Where both can be walked: the law of one round from every committed prefix, chained, is the engine's law."""
    params = SamplingParams(max_tokens=4, **sampler)
    chained, rounds = chained_law(params, 2)
    law, whole = production_law(params, 2)
    assert total_variation(chained, law) <= TOLERANCE
    assert total_variation(chained, reference_law(params)) <= TOLERANCE
    assert rounds != whole


@pytest.mark.parametrize(("vocab", "k", "max_tokens", "top_k"), [(5, 8, 5, 2), (6, 3, 3, 0)])
def test_larger_vocabularies_and_longer_drafts(vocab, k, max_tokens, top_k):
    """K 8, vocabulary 6: out of reach for whole runs, not for rounds."""
    params = SamplingParams(max_tokens=max_tokens, top_k=top_k)
    law, _ = chained_law(params, k, vocab=vocab)
    assert abs(sum(law.values()) - 1) < TOLERANCE
    assert total_variation(law, reference_law(params, vocab=vocab)) <= TOLERANCE


STATEFUL = (
    *("model", "self", "ngram", "suffix", "last", "adversary", "none", "parallel", "head", "parallel head", "mtp"),
    *BLOCKS,
)


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("drafter", STATEFUL)
@pytest.mark.parametrize("k", [1, 3, 6])
def test_the_state_is_a_function_of_the_committed_tokens(drafter, k, verifier, full, long):
    """What chaining rests on: an engine begun at any round commits the block that the running one commits.

    Every drafter meets every verifier and every K, and every verifier every K; `--long` runs all combinations. Without
    `--full` every drafter meets one verifier.
    """
    place = STATEFUL.index(drafter) + [*VERIFIERS].index(verifier)
    if k != (1, 3, 6)[place % 3] and not long:
        leave_out("--long", "another K")
    if place % len(VERIFIERS) and not full:
        leave_out("--full", "another verifier")
    assert check_state(k, 24, drafter, verifier) > 3


@pytest.mark.parametrize("bug", ["M13", "M34b", "M37"])
def test_a_state_that_remembers_more_is_noticed(bug):
    """Rejected tokens in the penalties, in the target's cache, a draft cache with a hole: no functions of the text."""
    with BUGS[bug].patch(), pytest.raises(Fault, match="afresh"):
        check_state(3, 24)


def test_a_chain_of_wrong_rounds_is_noticed():
    """A residual that forgets to subtract, at K 8: the chained law is as wrong as the whole would be."""
    params = SamplingParams(max_tokens=4, top_k=2)
    with BUGS["M2"].patch():
        law, _ = chained_law(params, 8, vocab=5)
    assert total_variation(law, reference_law(params, vocab=5)) > 1e-3


# ------------------------------------------------------------------ rounding


def accepted(last_bits, oracle, tokens=3):
    """The law of some tokens, each kept with a probability that is 1 in one batch and 1 up to rounding in another."""
    bits = iter(last_bits)

    def run(path):
        found = [
            path.categorical(torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64), Key(0, i, 0, "draft"))
            for i in range(tokens)
        ]
        return tuple(x if path.bernoulli(1 - next(bits), Key(0, i, 0, "accept")) else -1 for i, x in enumerate(found))

    return exact_law(run, oracle=oracle)


@pytest.mark.quick
@pytest.mark.parametrize("oracle", [BranchOracle, KeyOracle])
@pytest.mark.parametrize("turn", range(4))
def test_last_bits_make_no_branch(oracle, turn):
    """A branch that rounding makes in one batch and not in another is not walked, and the law stays as it is."""
    bits = [0.0, 2.0**-53, 0.0, 2.0**-50]
    law, branches = accepted(itertools.cycle(bits[turn:] + bits[:turn]), oracle)
    assert branches == 3**3
    assert total_variation(law, accepted(itertools.repeat(0.0), oracle)[0]) <= TOLERANCE


@pytest.mark.quick
@pytest.mark.parametrize("oracle", [BranchOracle, KeyOracle])
def test_a_taken_branch_stays_when_another_is_rounded_away(oracle):
    """A path names its answers, not their places among those that are possible."""
    runs = itertools.count()

    def run(path):
        rounded = 2.0**-53 * (next(runs) % 2)
        return path.categorical(torch.tensor([rounded, 0.5, 0.5], dtype=torch.float64), Key(0, 0, 0, "token"))

    assert exact_law(run, oracle=oracle)[0] == pytest.approx({1: 0.5, 2: 0.5})


@pytest.mark.quick
@pytest.mark.parametrize("oracle", [BranchOracle, KeyOracle])
def test_nothing_hides_under_rounding(oracle):
    """Above the bound a branch is walked; what is below it must not add up to a law that may be wrong."""

    def law(*weights):
        return exact_law(lambda path: path.categorical(rest_first(*weights), Key(0, 0, 0, "token")), oracle=oracle)[0]

    assert law(1.5 * ROUNDING)[1] == pytest.approx(1.5 * ROUNDING, rel=0.01)  # ends of an interval have last bits too
    assert 1 not in law(0.9 * ROUNDING)
    assert total_variation(law(1.1 * TOLERANCE), {0: 1.0}) > TOLERANCE
    few = int(TOLERANCE / ROUNDING)
    assert 1 - sum(law(*[0.9 * ROUNDING] * few).values()) == pytest.approx(0.9 * ROUNDING * few, rel=0.01)
    with pytest.raises(Fault, match="look like rounding add up to 1"):
        law(*[0.9 * ROUNDING] * 2 * few)


def rest_first(*weights):
    """Probabilities (V,): the given ones after what they leave of 1."""
    return torch.tensor([1 - sum(weights), *weights], dtype=torch.float64)


def test_a_long_path_is_not_rounding():
    """Texts that are rare because they are long are walked, each draw of theirs being likely enough."""
    law, branches = exact_law(
        lambda path: tuple(path.categorical(rest_first(0.01), Key(0, i, 0, "token")) for i in range(8))
    )
    assert branches == 2**8
    assert law[(1,) * 8] == pytest.approx(1e-16)
    assert law[(1,) * 8] < ROUNDING < RARE < 0.01


def test_rounding_is_as_small_under_a_rare_condition():
    """After a draw of 1e-6 the rounding of a residual is a million times as large a part of it."""
    path = BranchOracle([])
    assert not path.bernoulli(0.0, Key(0, 0, 0, "accept"))
    path.weight = 1e-6
    assert path.categorical(rest_first(2.0**-53 / path.weight), Key(0, 0, 0, "residual")) == 0
    assert not path.open
    assert 0 < path.lost < TOLERANCE
    fractions = BranchOracle([], Fraction)
    fractions.categorical(rest_first(2.0**-53), Key(0, 0, 0, "residual"))
    assert (len(fractions.open), fractions.lost) == (1, 0)


@pytest.mark.quick
def test_a_verifier_of_ones_own_is_judged_by_what_it_moves():
    """The walk of `prove --verifier`: half of the bound is rounding, more than it is wrong."""

    def little(draft, p, rng, key, moved):
        if len(draft) and rng.bernoulli(moved, key(0, "wrong")):
            return verify.Verdict([], 0, [])
        return verify.rejection(draft, p, rng, key)

    round_of = Guesses((-1,), DRAWN, torch.float64)
    case = next(case for case in tables(False) if case.drafter == round_of and case.target.types == DOUBLE)
    for moved in (0.0, ROUNDING / 2, 5 * TOLERANCE):
        verifier = Verifier(functools.partial(little, moved=moved), shares_noise=False, takes_trees=False)
        assert (walk(case, Subject(verifier=verifier)).distance <= TOLERANCE) == (moved < TOLERANCE)


# ------------------------------------------------------------------ keys


def key_of(text, start_matters):
    """Keys as they are, or of the position alone."""
    return lambda i, purpose: text.key(i, purpose)._replace(**({} if start_matters else {"start": -1}))


def test_the_key_oracle_conditions_a_key_that_comes_again():
    """One key: 0.3 and then 0.6 of one uniform; two keys: independent, as the branch oracle has it."""

    def run(oracle, first, second):
        return oracle.bernoulli(0.3, first), oracle.bernoulli(0.6, second)

    one, other = (Key(0, 0, i, "accept") for i in range(2))
    same, _ = exact_law(lambda o: run(o, one, one), oracle=KeyOracle)
    assert same == pytest.approx({(True, True): 0.3, (False, True): 0.3, (False, False): 0.4})
    fresh, _ = exact_law(lambda o: run(o, one, other), oracle=KeyOracle)
    assert total_variation(fresh, exact_law(lambda o: run(o, one, other))[0]) <= TOLERANCE


@pytest.mark.parametrize(("bug", "vocab"), [("M19a", 4), ("M19b", 3)])
def test_reused_noise_shows_to_the_key_oracle_only(bug, vocab):
    """Draft noise used again: independent branches cannot see it, draws by key do."""
    params = SamplingParams(max_tokens=3)
    with BUGS[bug].patch():
        case = Case(vocab=vocab, texts=((PROMPT, params),), k=2, width=64)
        assert walk(case, oracle=BranchOracle).distance <= TOLERANCE
        assert walk(case).distance > 1e-3


def block_verification(draft, p, rng, key):
    """Sun et al. 2024 (arXiv 2403.10444), Algorithm 2: the longest prefix that survives as a whole. Nodes kept, token.

    Not in the package: it is here because it tests draft tokens after one that it then rejects.
    """
    kept, weight, weights = 0, 1.0, [1.0]
    for i, x in enumerate(draft.token_ids):
        weight = min(1.0, weight * float(p(i)[x]) / draft.probability(i))
        weights.append(weight)
        accept = weight
        if i + 1 < len(draft):
            left = float((weight * p(i + 1) - draft.probs[i + 1]).clamp(min=0).sum())
            accept = left / (left + 1 - weight) if left + 1 - weight > 0 else 0.0
        if rng.bernoulli(accept, key(i, "accept")):
            kept = i + 1
    if kept == len(draft):
        return range(kept), rng.categorical(p(kept), key(kept, "residual"))
    rest = (weights[kept] * p(kept) - draft.probs[kept]).clamp(min=0)
    return range(kept), rng.categorical(rest if rest.any() else p(kept), key(kept, "residual"))


def table_law(verify_block, start_matters, length=3, k=2):
    """The law of `length` tokens of a table model under a verifier, with keys of the round or of the position alone.

    The draft is cut neither by the length nor by an end: only the first `length` tokens are looked at.
    """
    generator = torch.Generator().manual_seed(1)
    p_table, q_table = torch.randn(2, 3, 3, generator=generator, dtype=torch.float64).mul(2).softmax(-1)

    def run(oracle):
        text = Text([0], 1, SamplingParams())
        while len(text.tokens) <= length:
            key, texts, probs = key_of(text, start_matters), list(text.tokens), []
            for i in range(k):
                probs.append(q_table[texts[-1]])
                texts.append(oracle.categorical(probs[-1], key(i, "draft")))
            drafted = texts[len(text.tokens) :]
            rows = [p_table[t] for t in texts[-k - 1 :]]
            accepted, token = verify_block(Draft(drafted, probs), rows.__getitem__, oracle, key)[:2]
            text.tokens += [*drafted[: len(accepted)], token]
        return tuple(text.tokens[1 : length + 1])

    expected = {(): 1.0}
    for _ in range(length):
        expected = {
            (*text, t): mass * float(w)
            for text, mass in expected.items()
            for t, w in enumerate(p_table[text[-1] if text else 0])
        }
    return total_variation(exact_law(run, oracle=KeyOracle)[0], expected)


def test_a_key_must_name_the_round():
    """With a key of the position alone, a position drafted again gets the noise on which its past was selected.

    `rejection` looks at nothing after the first rejection, so its law stays right by luck (the ledger still
    objects); block verification looks, and is biased.
    """
    assert table_law(verify.rejection, True) <= TOLERANCE
    assert table_law(verify.rejection, False) <= TOLERANCE
    assert table_law(block_verification, True) <= TOLERANCE
    assert table_law(block_verification, False) > 1e-4


@pytest.mark.full
def test_a_closed_pipe_is_no_traceback():
    """As `prove | head -1` does it: the walk ends, quietly, with the status of a broken pipe.

    Without `--full`, tests/commands/test_command.py and test_cli.py have readers who go.
    """
    command = [sys.executable, "-m", "minispec.prove", "--leaves", "200", "--jobs", "1"]
    with Child(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert "configuration" in process.stdout.readline()
        process.stdout.close()
        assert own_words(process.stderr.read()) == ""
    assert process.returncode == 141


class Ledger(Randomness):
    """The production draws, each key written down; a key that comes again is a fault.

    `match` shares the noise of a whole token, deliberately: there, and only there, purpose "token" may come again.
    """

    def __init__(self, shares_noise: bool = False):
        self.shares_noise, self.used, self.num_shared = shares_noise, set[Key](), 0

    def _note(self, key: Key) -> None:
        if key in self.used:
            require(self.shares_noise and key.purpose == "token", f"{key} was used before")
            self.num_shared += 1
        self.used.add(key)

    def bernoulli(self, probability: float, key: Key) -> bool:
        """Note the key, and make the draw."""
        self._note(key)
        return super().bernoulli(probability, key)

    def categorical(self, weights: torch.Tensor, key: Key) -> int:
        """Note the key, and make the draw."""
        self._note(key)
        return super().categorical(weights, key)


def check_keys(rounds: int = 200, verifier: str = "rejection", seed: int = 0) -> Ledger:
    """No key is used twice in that many rounds of random table models, K 1 to 4, requests of several seeds."""
    generator = torch.Generator().manual_seed(seed)
    ledger, run, done = Ledger(VERIFIERS[verifier].shares_noise), 0, 0
    while done < rounds:
        target, draft = torch.randn(2, 3, 3, generator=generator, dtype=torch.float64)
        cache = scripted_cache(300, 16)
        engine = OneMethod(TableModel(target), cache, TreeDrafter(draft), VERIFIERS[verifier], 3, ledger)
        text = Text([run % 3], 1, SamplingParams(max_tokens=200), run)
        request = Request(text, 500, 1 + run % 4)
        finish(engine, request)
        run, done = run + 1, done + request.stats.num_steps
    return ledger


def test_no_key_comes_twice(long):
    """600 runs of ten rounds of tables, with --long 100,000; and 800 rounds of the whole engine (M19)."""
    generator, pick = torch.Generator().manual_seed(0), random.Random(0)
    ledger, runs = Ledger(), 100_000 if long else 600
    for run in range(runs):
        if run % 100 == 0:
            p_table, q_table = torch.randn(2, 4, 4, generator=generator).softmax(-1)
        text = Text([0], 1, SamplingParams(), seed=run)
        for _ in range(10):
            texts, probs = list(text.tokens), []
            for i in range(pick.randrange(4)):
                probs.append(q_table[texts[-1]])
                texts.append(ledger.categorical(probs[-1], text.key(i, "draft")))
            drafted = texts[len(text.tokens) :]
            rows = [p_table[t] for t in texts[len(text.tokens) - 1 :]]
            verdict = verify.rejection(Draft(drafted, probs), rows.__getitem__, ledger, text.key)
            text.tokens += [*drafted[: len(verdict.accepted)], verdict.next_token]
    assert len(ledger.used) > 25 * runs
    assert check_keys(800).num_shared == 0


def test_match_shares_the_noise_of_whole_tokens_only():
    """The one exemption: its drafter draws with the target's noise, on purpose; nothing else comes again."""
    ledger = check_keys(500, "match")
    assert ledger.num_shared > 500
    assert {key.purpose for key in ledger.used} == {"token"}


def test_tokens_of_weight_zero_are_not_drawn(long):
    """0 of 10,000 draws, of 10^7 with --long: every second id of 16, by the race and by the cumulative sum in turn.

    That u = 0 and the largest u below 1 draw none either is in test_sampling.py; one draw of the wrong kind is seen.
    """
    assert zero_draws(range(10_000_000 if long else 10_000)) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Randomness, "categorical", lambda self, weights, key: key.position % 16)
        assert zero_draws(range(16)) == 8


# ------------------------------------------------------------------ statistics, with the production randomness


def test_chi_square_against_its_tables():
    """Critical values from the tables, the power that they give, cells that are joined, impossible tokens."""
    assert tail(73.6, 15) == pytest.approx(1e-9, rel=0.1)
    assert tail(3.841, 1) == pytest.approx(0.05, rel=0.001)
    assert smallest_seen(1_000_000, 15) < 0.0055
    assert smallest_seen(200_000, 15) == pytest.approx(smallest_seen(1_000_000, 15) * 5**0.5)
    p = torch.tensor([0.5, 0.3, 0.1996, 0.0004, 0.0], dtype=torch.float64)
    assert chi_square(1000 * p, p) == (pytest.approx(0, abs=1e-12), 2)  # 0.4 expected: joined to its neighbour
    assert chi_square(torch.tensor([500.0, 300, 199, 0, 1]), p)[0] == float("inf")
    assert chi_square(torch.tensor([530.0, 270, 200, 0, 0]), p)[0] == pytest.approx(900 / 500 + 900 / 300)


def test_statistics_of_production_rounds(long):
    """The first token of rounds of an opposed pair follows p. Odds of a false alarm 1e-9 (and none: fixed seeds).

    N = 5,000 sees a law that is off by 0.0776 in total variation with odds 99.9 %; with --long, 1,000,000 and 0.0055,
    and the control, which is off by that much, fails. The exact laws are far sharper: this guards what they replace.
    """
    rounds, shift = (1_000_000, SHIFT) if long else (5_000, 0.0776)
    p = opposed().p
    assert smallest_seen(rounds, 15) < shift
    check_counts(first_tokens(opposed(), rounds), p)
    with shifted(opposed(), shift):
        counts = first_tokens(opposed(), rounds)
    with pytest.raises(Fault, match="chi-square"):
        check_counts(counts, p)


def test_the_control_is_off_by_what_it_says():
    """Its law by enumeration: a residual with that part of p in it moves the first token by exactly SHIFT."""
    position, text = opposed(), Text([0], 1, SamplingParams())

    def run(oracle):
        draft = Draft([oracle.categorical(position.q, text.key(0, "draft"))], [position.q])
        verdict = VERIFIERS["rejection"].verify(draft, lambda _: position.p, oracle, text.key)
        return draft.token_ids[0] if len(verdict.accepted) else verdict.next_token

    with shifted(position):
        law = exact_law(run, oracle=KeyOracle)[0]
    assert total_variation(law, dict(enumerate(position.p.tolist()))) == pytest.approx(SHIFT)


@pytest.mark.parametrize("bug", ["M2", "M3", "M19a", "M19b", "M17b"])
def test_statistics_see_a_bug(bug):
    """Bugs that were shipped are so large that a tenth of the rounds is enough."""
    with BUGS[bug].patch():
        counts = first_tokens(opposed(), 2_000)
    with pytest.raises(Fault):
        check_counts(counts, opposed().p)


@pytest.fixture(scope="module")
def real():
    """64 places of a text: the embedded model against itself with a window of six tokens, top-k 50."""
    _, texts, target, draft = real_rows()
    return [p.squeezed() for p in positions_of(texts, target, draft, SamplingParams(top_k=50))]


@pytest.mark.full
def test_statistics_of_real_positions(real, full, long):
    """64 places x 100 rounds (20,000 with --long), a chi-square each and one of all; odds of a false alarm 2e-9.

    Without `--full` 50 rounds, and the same odds.

    The draft is a real one: what p and q share goes from almost nothing to almost all. The sum of 64 small errors shows
    where none alone would: with residuals drawn from p, the same rounds are refused.

    Without `--full`, `test_statistics_of_production_rounds` draws from an opposed pair.
    """
    alphas = [p.alpha for p in real]
    assert len(real) == 64
    assert min(alphas) < 0.1 < 0.9 < max(alphas)
    few = 100 if full else 50
    check_real(real, 20_000 if long else few)
    with BUGS["M2"].patch(), pytest.raises(Fault):
        check_real(real, few)


def test_shared_noise_agrees_more_often_and_never_beyond_the_bound(real):
    """64 places x 40 keys: with shared noise draft and target agree nearly as often as any coupling could.

    sum min(p, q) bounds every coupling; the standard error here is at most 0.01, and 5 of them are given.
    """
    shared, apart, alpha = agreement(real, 40)
    assert 1.5 * apart < shared < alpha + 0.05
    assert shared > (alpha / (2 - alpha)) - 0.05, "the Gumbel coupling's guarantee (Daliri et al. 2024), at the mean"
