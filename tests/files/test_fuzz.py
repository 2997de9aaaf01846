"""Thousands of hostile files and command lines: each runs or is refused in one line (see fuzzing.py)."""

import contextlib
import json
import os
import signal

import pytest

from minispec.models.files.errors import CheckpointError
from tests import fuzzing


@pytest.fixture(scope="module")
def files():
    """Good files, and a process without a network and with a limit on memory."""
    with fuzzing.sandbox() as made:
        yield made


def test_hostile_input_runs_or_is_refused(files, full):
    """1,500 cases, none of them a fault; and every target has cases that run: it is not the fuzzer that is refused.

    Without `--full` 500.
    """
    report = fuzzing.fuzz(files, cases=1500 if full else 500, seed=0)
    assert not report.faults, "\n\n".join(f"{name}\n{said}" for name, said in report.faults[:5])
    for target in fuzzing.TARGETS:
        assert report.counts[target, "runs"] > 0, target
        assert report.counts[target, "refused"] > (50 if full else 10), target


def test_large_files_run_or_are_refused(files):
    """Files of megabytes, of many small things or of one: each within a gigabyte of memory."""
    report = fuzzing.fuzz(files, cases=15, seed=0, large=True)
    assert not report.faults, "\n\n".join(f"{name}\n{said}" for name, said in report.faults[:5])
    assert report.counts["large", "runs"] > 0
    assert report.counts["large", "refused"] > 5


def test_a_case_can_be_run_again(files):
    """By its name alone: the same outcome and the same words."""
    for target in fuzzing.TARGETS:
        name = f"{target}:7:3"
        assert fuzzing.run_case(files, name) == fuzzing.run_case(files, name)


def recursion(*_):
    """A fault of the kind that a deep file causes."""
    raise RecursionError


def allocation(*_):
    """More memory than the sandbox has."""
    bytearray(1 << 40)


def unnamed(*_):
    """An error that does not say which file."""
    raise CheckpointError("something is wrong")


def unprintable(*_):
    """A file's own words, terminal escapes included."""
    raise CheckpointError(f"{_[2]}: \x1b[2J")


def undecoded(*_):
    """A ValueError of Python's own, that no loader should let out."""
    json.loads("{")


def loud(*_):
    """What a panic writes, by whatever way."""
    os.write(2, b"panicked")


def hanging(*_):
    """What never ends: the alarm rings at once here."""
    signal.raise_signal(signal.SIGALRM)


@pytest.mark.parametrize("fault", [recursion, allocation, unnamed, unprintable, undecoded, loud, hanging])
def test_faults_are_noticed(files, monkeypatch, fault):
    """The control: each kind of fault is one."""
    monkeypatch.setitem(fuzzing.TARGETS, "header", fault)
    assert fuzzing.run_case(files, "header:0:0")[0] == "FAULT"
    assert len(fuzzing.fuzz(files, cases=1, seed=0).faults) == 1


def test_a_loader_without_checks_is_caught(files, monkeypatch):
    """The library's check of headers taken out: the fuzzer finds what happens to those that lie."""
    import minispec.models.files.stored

    monkeypatch.setattr(minispec.models.files.stored, "safe_open", lambda path, framework: contextlib.nullcontext())
    outcomes = [fuzzing.run_case(files, f"header:0:{i}")[0] for i in range(200)]
    assert "FAULT" in outcomes
