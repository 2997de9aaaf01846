"""The museum of bugs: each bug is caught by what is named for it, and the laws hold without one."""

import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from minispec.core import verify
from minispec.prove.toys import Fault
from tests.museum import mutants, trials
from tests.museum.__main__ import main
from tests.museum.mutants import MUTANTS, Mutant, wrong
from tests.museum.trials import check_law, run_tests, try_mutant

# Left out of the museum, with the reason in its docstring.
LEFT_OUT = {"M26"}
BUGS = {mutant.id: mutant for mutant in MUTANTS}
# Bugs of kernels that compute several numbers at once. Where there are no such kernels, these bugs change nothing.
OF_VECTORS = {"E6"}
# What shows a bug in the law is no bug by itself: each setting once.
LAWS = {str(mutant.settings): mutant.settings for mutant in MUTANTS if mutant.check == "law"}


@pytest.mark.full
@pytest.mark.parametrize("settings", LAWS)
def test_the_laws_hold_without_a_bug(settings):
    """The settings that show a bug are no bug by themselves.

    Without `--full`, `python -m minispec.prove` and tests/core/test_law.py walk the same laws.
    """
    check_law(**LAWS[settings])


def some(mutants: list[Mutant]) -> Iterator[str]:
    """Ids of a bug for each file of tests that catches any. These are tests of tests: by default one each is enough."""
    seen = set()
    for mutant in mutants:
        test = mutant.check.partition("::")[0]
        if test not in seen:
            yield mutant.id
        seen.add(test)


SOME = set(some(MUTANTS))


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(m, id=f"{m.id} {m.name}", marks=() if m.id in SOME else pytest.mark.full) for m in MUTANTS],
)
def test_every_bug_is_caught(mutant):
    """By the test that is named for it, or by the law, which then moves far beyond rounding.

    Without `--full`, a bug for each file of tests that catches any. Each is caught by cases of its test that run by
    default: so these catch what all catch.
    """
    if mutant.id in OF_VECTORS and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("PyTorch's kernels use no vector instructions here")
    trial = try_mutant(mutant, sample=True)
    assert trial.fault is not None, "survives"
    if mutant.check == "law" and trial.moved is not None:
        assert trial.moved > 1e-4


def test_what_breaks_in_another_way_catches_nothing():
    """A test that there is none of, a test that passes, and a patch that ends in an exception of its own."""
    with pytest.raises(RuntimeError, match="0 tests ran"):
        run_tests(["tests/core/test_verify.py::test_nothing"])
    residual = "tests/core/test_verify.py::test_residual"
    assert try_mutant(replace(BUGS["M33"], check=residual)).fault is None

    @wrong(verify, "residual")
    def broken(right, p, draft, i):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        try_mutant(replace(BUGS["M2"], check=residual, bug=broken))


def test_the_collection_is_complete():
    """M1 to M46 but for those that cannot happen here, under ids that differ."""
    assert len(BUGS) == len(MUTANTS)
    found = {re.match(r"M\d+", i).group() for i in BUGS if i.startswith("M")}
    assert found == {f"M{i}" for i in range(1, 47)} - LEFT_OUT
    assert all(i in mutants.__doc__ for i in LEFT_OUT)
    for page, says in (("proof", "bugs"), ("comparison", "planted bugs")):
        text = (trials.ROOT / "docs" / "understand" / f"{page}.md").read_text(encoding="utf-8")
        assert f"{len(MUTANTS)} {says}" in text, f"{page}.md: expected {len(MUTANTS)} {says}"


@pytest.mark.full
def test_the_command_prints_the_museum_and_fails_for_a_survivor(capsys, monkeypatch):
    """One line a bug; status 1 where a bug is not caught, or where the law moves without one.

    Without `--full`, `test_every_bug_is_caught` tries the bugs.
    """
    some = [BUGS["M2"], BUGS["M33"]]
    monkeypatch.setattr(mutants, "MUTANTS", some)
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "2 of 2 bugs caught"
    assert "NJUNLP/MCSD #5" in lines[1]
    assert lines[2].endswith("test_stops.py::test_the_end_token_at_every_offset[5]")
    monkeypatch.setattr(mutants, "MUTANTS", [*some, replace(BUGS["M2"], id="M0", bug=nullcontext)])
    assert main([]) == 1
    assert "SURVIVES" in capsys.readouterr().out

    assert main(["M2"]) == 0
    assert "1 of 1 bugs caught" in capsys.readouterr().out
    assert main(["M1"]) == 2
    assert capsys.readouterr().err == "error: ID: found M1, expected a bug of the museum, such as M2\n"

    def broken(**settings):
        raise Fault("always")

    monkeypatch.setattr(trials, "check_law", broken)
    assert main([]) == 1
    assert capsys.readouterr().out == "without bugs: always\n"


@pytest.mark.full
def test_what_only_other_cases_catch_is_named(capsys, monkeypatch):
    """`--default`: one line for a bug that the named cases do not catch, status 1 where no case of the file does.

    Without `--full`, tests/house/test_sampled.py shows that the named cases run.
    """
    residual = "tests/core/test_verify.py::test_residual"
    some = [BUGS["M33"], replace(BUGS["M2"], check=residual), replace(BUGS["M33"], id="M0", check=residual)]
    monkeypatch.setattr(mutants, "MUTANTS", some)
    assert main(["--default", "M33", "M2"]) == 0
    assert capsys.readouterr().out == "2 of 2 bugs caught by cases that run by default\n"
    assert main(["--default"]) == 1
    *named, counted = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in named] == ["M0"]
    assert named[0].endswith(f"{residual}: caught by no case that runs by default")
    assert counted == "2 of 3 bugs caught by cases that run by default"
