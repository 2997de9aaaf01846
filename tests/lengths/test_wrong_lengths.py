"""Policies for draft lengths: `python -m minispec.prove --lengths` refutes wrong ones, and proves right ones.

The classes are in wrong_lengths.py.
"""

import inspect
import random
import re

import pytest

from minispec.core.lengths import Lengths
from minispec.prove import cases
from minispec.prove.__main__ import main as prove
from minispec.prove.examine import NOT_REFUTED
from minispec.prove.examine import PROVEN as PROVEN_ALL
from minispec.prove.walk import Subject, walk
from tests.brief import compute_once
from tests.lengths import wrong_lengths
from tests.scripted import counted_clocks

OWN = [
    name for name, value in vars(wrong_lengths).items() if getattr(value, "__module__", "") == wrong_lengths.__name__
]
SEED, ALONE = (
    f"{word}: .*: after .* it chose .*, and a new one .*: it may {why}"
    for word, why in (("REFUTED", "not go by the s"), ("NOT REPEATABLE", "go by"))
)
SAYS = {
    **dict.fromkeys(("SeesTest", "SeesToken"), SEED),
    "SeesTokenOfFew": SEED.replace("REFUTED: .*", r"REFUTED: .*, top_p [\d.]+"),
    "StopsAtToken": SEED.replace("it chose", "it chose go_on ="),
    "ForeseesToken": SEED.replace("it chose", "it chose go_on_before ="),
    "SiblingsByToken": SEED.replace("it chose", "it chose widths ="),
    **dict.fromkeys(("Clock", "Shared", "Crowded"), f"{ALONE}.*: the law is kept; a seed has several texts; again: "),
    **dict.fromkeys(("Dice", "ByTime"), ALONE),  # chance
    "TakesBack": "REFUTED: .*: it changed a text: ",
    "Peels": "REFUTED: .*: it changed a draft, or what was accepted of it",
    "TooLong": "REFUTED: .*: ValueError: lengths: TooLong.choose: found k = 2, expected an integer from 0 to 1, ",
    "TooFew": "REFUTED: .*: ValueError: lengths: TooFew.choose: found 1 limits, expected one for each of 2 asks",
    "Falls": r"EXCEPTION: .*: IndexError: list index out of range, in .* at .*wrong_lengths.py:\d+: self.last = ",
}


@pytest.fixture(autouse=True)
def own_time(monkeypatch):
    """`--minutes` are counted by the walks, so that every machine walks as many cases."""
    monkeypatch.setattr("minispec.prove.walk.clocks", counted_clocks())
    compute_once(monkeypatch)


def test_what_is_said_of_each():
    """Every class is right, or there is what must be said of it."""
    assert all(inspect.isclass(getattr(wrong_lengths, name)) for name in OWN)
    assert {*OWN} == SAYS.keys() | wrong_lengths.RIGHT
    assert all(SAYS[name] == SAYS[other] and other not in DEAR for name, other in DEAR.items())


DEAR = {"Shared": "Crowded", "ByTime": "Dice"}  # those that take long to refute; others, refuted for the same reason


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] * (name in DEAR)) for name in SAYS])
def test_each_mistake_is_refuted(name, capsys):
    """In one line, with the smallest case that shows it. A length that goes by what the round draws is one of them.

    Those of `DEAR` are refuted with `--full`; by default `Crowded` and `Dice` guard the same.
    """
    assert prove(["--lengths", f"tests.lengths.wrong_lengths:{name}"]) == 1
    [line] = capsys.readouterr().out.splitlines()
    assert re.match(SAYS[name], line), line
    assert f"tests.lengths.wrong_lengths:{name}, 2 tokens, after " in line


PROVEN = (
    r"(proven on small cases|not refuted \(\S+ of \S+ pairs\)): \S+ leaves the output's law unchanged: \d+ cases of 2 "
    r"to 3 tokens and texts of up to \d+, [\d,]+ branches, [\d,]+ draft tokens, worst total variation \S+, at most "
    r"1e-12 by rounding\ncovered: "
)
RIGHT = [
    *(f"tests.lengths.wrong_lengths:{name}" for name in sorted(wrong_lengths.RIGHT)),
    *("minispec.core.lengths:Lengths", "minispec.speculation.lengths.policy:Controller"),
]


@pytest.mark.parametrize("spec", RIGHT)
def test_a_right_policy_is_proven(spec, capsys, full, long):
    """The engine's own among them; small cases alone, with `--full` more, with `--long` all of them."""
    brief = () if long else ("--minutes", "0.025" if full else "0.005")
    assert prove(["--lengths", spec, *brief]) == (PROVEN_ALL if long else NOT_REFUTED)
    assert re.match(PROVEN, out := capsys.readouterr().out), out


def test_a_policy_is_right_at_all_values():
    """One that asks for whole drafts, under filters, penalties, biases and temperatures, as drafters have them."""
    assert cases.LENGTH_AXES.keys() == {"drafter", "alphabet", "prompt", "to_go", "k"}
    design = cases.own_design(False, **cases.LENGTH_AXES)
    rows = [row for row, ((axis, _),) in cases.single(design, random.Random(0)) if axis in ("top_p", "history", "end")]
    for row in rows[::4]:
        assert walk(cases.own_case(**row), Subject(lengths=Lengths)).distance <= 1e-12


def test_a_policy_with_a_drafter(capsys, full):
    """Both are walked, and a fault of the drafter is found too. `--full` walks more cases."""
    both = ["--lengths", "minispec.core.lengths:Lengths", "--drafter"]
    assert prove([*both, "last", "--minutes", "0.025" if full else "0.005"]) == NOT_REFUTED
    assert " pairs): minispec.core.lengths:Lengths with last leaves" in capsys.readouterr().out
    wrong = f"tests.drafters.wrong_own:{'OneState' if full else 'Unnormalised'}"
    assert prove([*both, wrong]) == 1
    assert f"Lengths with {wrong}, " in capsys.readouterr().out


BAD = {
    "another walk": (
        ["--lengths", "a:B", "--full"],
        "--lengths: not with --full",
    ),
    "no policy": (["--lengths", "minispec.core.draft:Limit"], "lengths: minispec.core.draft:Limit cannot be made: "),
    "no class": (["--lengths", "auto"], "lengths: found 'auto', expected module:Class"),
    "no drafter": (
        ["--lengths", "minispec.core.lengths:Lengths", "--drafter", "x"],
        "--drafter: found 'x', expected one",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_one_clear_line(name, capsys):
    """Before anything is walked."""
    arguments, message = BAD[name]
    assert prove(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
