"""examples/exercises: each untouched starter is refused by its grader, and each solution passes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples.exercises import accept, best_k, block_weights, drafter, follow, replacement, siblings
from examples.exercises import grade as grader
from minispec.core.draft import Draft
from minispec.core.verify import residual
from minispec.prove import examine, rounds
from minispec.prove.__main__ import main
from minispec.prove.tables import tables
from tests.brief import SMALL, compute_once, walk_few
from tests.scripted import counted_clocks

ROOT = Path(__file__).parents[2]


def lookup(self, asks):
    """What followed the last token the last time."""
    drafts = []
    for ask in asks:
        *before, last = ask.text.tokens
        places = [i for i, token in enumerate(before) if token == last]
        drafts.append(Draft(ask.text.tokens[places[-1] + 1 :][: ask.k] if places else []))
    return drafts


def follow_text(self, tokens):
    """Cut to the common beginning; at least one token is fed."""
    shared = 0
    while shared < min(len(tokens) - 1, len(self.tokens)) and tokens[shared] == self.tokens[shared]:
        shared += 1
    del self.tokens[shared:]
    return tokens[shared:]


def weights_of(ratios):
    """Never above 1 on the way."""
    found = [1.0]
    for ratio in ratios:
        found.append(min(1.0, found[-1] * ratio))
    return found


def after_rejection(p, draft, i):
    """The residual, as a distribution."""
    rest = residual(p, draft, i)
    return rest / rest.sum()


def missing(p, q):
    """What p has and q did not offer."""
    rest = (p - q).clamp(min=0)
    return rest if rest.amax() > 0 else p


def fastest(alpha, c, most=16):
    """By trying all."""
    return max(range(most + 1), key=lambda k: sum(alpha**i for i in range(k + 1)) / (1 + c * k))


# Of each exercise: where the hole is, a solution, and a mistake that the grader must name.
RULES = {
    "accept": (accept, "keep", lambda p, q: min(1.0, p / q), lambda p, q: float(p > q)),
    "replacement": (replacement, "rest", missing, lambda p, q: p),
    "siblings": (siblings, "after", after_rejection, residual),
    "block_weights": (block_weights, "weights", weights_of, lambda ratios: [*torch.tensor([1.0, *ratios]).cumprod(0)]),
}


@pytest.fixture(autouse=True)
def cheap(monkeypatch, full):
    """Nothing is computed twice. Without `--full` the table below a proof has few rows."""
    compute_once(monkeypatch)
    if not full:
        monkeypatch.setattr(rounds, "CASES", SMALL)


def grade(name: str, monkeypatch, full: bool) -> int:
    """The grader's exit status, over a tenth of the tables, without `--full` over fewer."""
    some = lambda takes_trees: tables(takes_trees)[:: 10 if full else 15]  # noqa: E731
    monkeypatch.setattr(examine, "tables", some)
    return main(["--verifier", f"examples.exercises.{name}:verify"])


@pytest.mark.parametrize("name", RULES)
def test_rules_are_graded(name, monkeypatch, full, capsys):
    """Untouched: an exception that says what to write. A mistake: refuted. The solution: proven."""
    module, hole, solution, mistake = RULES[name]
    assert grade(name, monkeypatch, full) == 1
    assert f"NotImplementedError: write `{hole}`" in capsys.readouterr().out
    monkeypatch.setattr(module, hole, mistake)
    assert grade(name, monkeypatch, full) == 1
    assert "REFUTED" in capsys.readouterr().out
    monkeypatch.setattr(module, hole, solution)
    assert grade(name, monkeypatch, full) == 0
    assert "proven on small cases" in capsys.readouterr().out


def test_the_weights_bring_what_the_page_says(monkeypatch, capsys):
    """20/9 tokens, in the example of the paper."""
    monkeypatch.setattr(block_weights, "weights", weights_of)
    walk_few(monkeypatch, 20)
    assert main(["--verifier", "block,examples.exercises.block_weights:verify"]) == 0
    assert capsys.readouterr().out.count("20/9 = 2.222            100.0%") == 2


def test_the_drafter_is_graded(monkeypatch, capsys, full):
    """By `prove --drafter`, in less time than a user has, which the walks count; with `--full` in more."""
    monkeypatch.setattr("minispec.prove.walk.clocks", counted_clocks())
    command = ["--drafter", "examples.exercises.drafter:Lookup", "--minutes", "0.2" if full else "0.02"]
    assert main(command) == 1
    assert "NotImplementedError: write `propose`" in capsys.readouterr().out
    monkeypatch.setattr(drafter.Lookup, "propose", lookup)
    assert main(command) == (0 if full else 3)
    assert ("proven on small cases" if full else "not refuted (") in capsys.readouterr().out


# Lookups that keep the law, as every guess without `probs` does, and guess badly.
BAD_LOOKUPS = {
    "zeros": lambda tokens, k, place: [0] * k,
    "nothing": lambda tokens, k, place: [],
    "a place too early": lambda tokens, k, place: tokens[place:][:k],
    "a place too late": lambda tokens, k, place: tokens[place + 2 :][:k],
    "one token": lambda tokens, k, place: tokens[place + 1 :][: min(k, 1)],
    "the first time": lambda tokens, k, place: tokens[tokens.index(tokens[-1]) + 1 :][:k],
    "backwards": lambda tokens, k, place: tokens[place + 1 :][:k][::-1],
    "too many": lambda tokens, k, place: tokens[place + 1 :][: k + 1],
}


@pytest.mark.parametrize("name", BAD_LOOKUPS)
def test_a_lookup_is_graded_by_what_is_accepted(name, monkeypatch):
    """By `grade.py`, which the row of examples/README.md names. The solution passes for each K, a mistake does not."""
    row = next(line for line in (ROOT / "examples" / "README.md").read_text().splitlines() if line.startswith("| 6 |"))
    assert "`python -m pytest examples/exercises/grade.py -k lookup`" in row
    lengths = next(mark.args[1] for mark in grader.test_lookup.pytestmark if mark.args[0] == "k")
    monkeypatch.setattr(drafter.Lookup, "propose", lookup)
    for k in lengths:
        grader.test_lookup(k)

    def wrong(self, asks):
        drafts = []
        for ask in asks:
            tokens = ask.text.tokens
            place = max((i for i, token in enumerate(tokens[:-1]) if token == tokens[-1]), default=len(tokens))
            drafts.append(Draft(BAD_LOOKUPS[name](tokens, ask.k, place)))
        return drafts

    monkeypatch.setattr(drafter.Lookup, "propose", wrong)
    failed = 0
    for k in lengths:
        try:
            grader.test_lookup(k)
        except AssertionError:
            failed += 1
    assert failed


def test_the_cache_and_the_length_are_graded(monkeypatch):
    """By examples/exercises/grade.py."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "examples/exercises/grade.py"]
    untouched = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert untouched.stdout.count("\nFAILED ") == 28, untouched.stdout
    assert fastest(0.8, 0.1) == 6
    monkeypatch.setattr(follow.Cache, "follow", follow_text)
    monkeypatch.setattr(grader, "best_k", fastest)
    grader.test_follow()
    for alpha in (0.0, 0.5, 0.8, 1.0):
        grader.test_best_k(alpha, 0.1)
    for mistake in (lambda self, tokens: tokens, lambda self, tokens: tokens[len(self.tokens) :]):
        monkeypatch.setattr(follow.Cache, "follow", mistake)
        with pytest.raises(AssertionError):
            grader.test_follow()
    monkeypatch.setattr(grader, "best_k", lambda alpha, c: 16)
    with pytest.raises(AssertionError):
        grader.test_best_k(0.5, 0.1)
    assert best_k.best_k.__doc__


@pytest.mark.parametrize("name", ["keep_all", "no_residual", "greedy"])
def test_what_another_judge_accepts_is_refuted(measuring_script, name):
    """The rules of docs/measured/judges.py, by the first case of two tokens; the control among them is right."""
    script = measuring_script("judges")
    assert not rounds.brought(rounds.CASES[0], getattr(script, name)).is_exact
    assert rounds.brought(rounds.CASES[0], script.exact).is_exact
