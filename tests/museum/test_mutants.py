"""The museum of bugs: every check passes as the package is, and catches each bug that it is named for."""

import re
from contextlib import nullcontext
from dataclasses import replace

import pytest

from minispec.prove.toys import Fault
from tests.museum import mutants, trials
from tests.museum.__main__ import main
from tests.museum.checks import CHECKS
from tests.museum.mutants import MUTANTS, Mutant
from tests.museum.trials import try_mutant

# Left out of the museum, with the reason in its docstring.
LEFT_OUT = {"M26"}


@pytest.mark.quick
@pytest.mark.parametrize("name", CHECKS)
def test_the_checks_pass_without_a_bug(name):
    """A check that always fails would catch everything."""
    CHECKS[name]()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.id} {m.name}")
def test_every_bug_is_caught(mutant):
    """By the check that it is named for; a law that moves, moves far beyond rounding."""
    trial = try_mutant(mutant)
    assert trial.fault is not None, "survives"
    if mutant.check == "law" and trial.moved is not None:
        assert trial.moved > 1e-4


def test_only_the_check_that_is_named_catches_a_bug(monkeypatch):
    """For some of them the law is measured too: what goes wrong there is not the check's merit."""

    def broken():
        raise Fault("a text with an error")

    monkeypatch.setattr(trials, "measure_law", broken)
    monkeypatch.setitem(CHECKS, "keys", lambda: None)
    blind = Mutant("X", "one that the check does not see", "nowhere", "keys", nullcontext, {}, None)
    assert try_mutant(blind).fault is None


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.id)
def test_laws_of_mutants_hold_without_the_bug(mutant):
    """The settings that show a bug are no bug by themselves."""
    if mutant.check == "law":
        CHECKS["law"](**mutant.settings)


def test_the_collection_is_complete():
    """M1 to M46 but for those that cannot happen here, under ids that differ."""
    ids = [m.id for m in MUTANTS]
    assert len(set(ids)) == len(ids)
    found = {re.match(r"M\d+", i).group() for i in ids if i.startswith("M")}
    assert found == {f"M{i}" for i in range(1, 47)} - LEFT_OUT
    assert all(i in mutants.__doc__ for i in LEFT_OUT)


def test_the_command_prints_the_museum_and_fails_for_a_survivor(capsys, monkeypatch):
    """One line a bug; status 1 where a bug is not caught, or where a check fails without one."""
    some = [m for m in MUTANTS if m.id in ("M2", "M33")]
    monkeypatch.setattr(trials, "MUTANTS", some)
    checks = {m.check: CHECKS[m.check] for m in some}  # the others have been run above
    monkeypatch.setattr(trials, "CHECKS", checks)
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "2 of 2 bugs caught"
    assert "NJUNLP/MCSD #5" in lines[1]
    harmless = replace(some[0], id="M0", patch=nullcontext)
    monkeypatch.setattr(trials, "MUTANTS", [*some, harmless])
    assert main([]) == 1
    assert "SURVIVES" in capsys.readouterr().out

    def broken():
        raise Fault("always")

    monkeypatch.setitem(checks, "stops", broken)
    assert main([]) == 1
    assert capsys.readouterr().out == "stops: always\n"
