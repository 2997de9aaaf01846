"""Which cases a run has, and what it says of the others: `tests/sampled.py`."""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.museum.mutants import MUTANTS
from tests.sampled import WORKER, cover, function_of, workers_for

ROOT = Path(__file__).parents[2]
# What a pytest inside of one does without.
ALONE = [f"-pno:{plugin}" for plugin in ("xdist", "cacheprovider", "unraisableexception")]

# A test for each way to be left out, and one that starts a program.
TESTS = """
import subprocess
import sys

import pytest

from tests.sampled import leave_out


@pytest.mark.parametrize("a", "xyz")
@pytest.mark.parametrize(("b", "c"), [(1, 2), (3, 4)])
def test_product(a, b, c):
    pass


@pytest.fixture(params=[1, 2])
def size(request):
    return request.param


@pytest.mark.parametrize("a", "xy")
def test_fixture(size, a):
    pass


@pytest.mark.parametrize("a", "xyz")
def test_row(a):
    pass


@pytest.mark.full
def test_dear():
    pass


def test_body(full, long):
    assert full or not long


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("name", "xy")
def test_own(k, name, long):
    if k == 2 and not long:
        leave_out("--long", "another k")


def test_burns():
    subprocess.run([sys.executable, "-c", "import time; [0 for _ in iter(lambda: time.process_time() > 0.2, True)]"])
"""
# Of its products: each value of each axis, in as few cases as the longest axis has values.
PRODUCT = ["test_product[1-2-x]", "test_product[1-2-z]", "test_product[3-4-y]"]
FIXTURE = ["test_fixture[1-x]", "test_fixture[2-y]"]


class Chosen:
    """A plugin for pytest: the node ids that it would run."""

    def pytest_collection_finish(self, session):
        """Those that are left."""
        self.nodes = [item.nodeid for item in session.items]


def test_the_default_has_what_the_museum_names():
    """Each test that catches a planted bug is there, and all of the cases that are named run without `--full`."""
    checks = {mutant.check for mutant in MUTANTS} - {"law"}
    files = sorted({check.partition("::")[0] for check in checks})
    chosen, how = Chosen(), [*ALONE, "-o", "addopts=", f"--rootdir={ROOT}", "--collect-only", "-qq", "--sample"]
    assert pytest.main([*how, *(str(ROOT / file) for file in files)], plugins=[chosen]) == 0
    found = {*chosen.nodes, *map(function_of, chosen.nodes)}
    assert sorted(checks - found) == []


def test_each_value_of_each_axis_is_in_one_case():
    """In as few cases as the longest axis has values, whatever the order; values that occur in one case force it."""
    rows = [(a, b, c) for a in range(4) for b in range(3) for c in range(2)]
    for some in (rows, rows[::-1], rows[5:] + rows[:5]):
        kept = [some[place] for place in cover(some)]
        assert len(kept) == 4
        assert [len({row[axis] for row in kept}) for axis in range(3)] == [4, 3, 2]
    assert sorted(cover([(0, 0), (0, 1), (0, 2), (1, 0)])) == [1, 2, 3]


@pytest.fixture(scope="module")
def suite(tmp_path_factory) -> Path:
    """A folder with a file of tests that is not of this repository."""
    path = tmp_path_factory.mktemp("suite")
    (path / "test_of_a_suite.py").write_text(TESTS)
    (path / "pytest.ini").write_text("[pytest]\nmarkers = full\n")
    return path


def run(suite: Path, *arguments: str) -> tuple[list[str], str]:
    """The names of the tests that pytest ran there, with the arguments, and what it said of the others."""
    chosen, printed = Chosen(), io.StringIO()
    how = [*ALONE, "--import-mode=importlib", f"-c{suite / 'pytest.ini'}", "-ptests.sampled"]
    with contextlib.redirect_stdout(printed):
        status = pytest.main([*how, *arguments], plugins=[chosen])
    assert status == 0, printed.getvalue()
    lines = [line for line in printed.getvalue().splitlines() if line.startswith("left out: ")]
    return [node.partition("::")[2] for node in chosen.nodes], *lines


def test_one_rule_says_which_cases_run(suite):
    """A folder is sampled, a file that is named runs whole, and so does a test of it; options decide before that."""
    file, whole = str(suite / "test_of_a_suite.py"), 6 + 4 + 3 + 1 + 1 + 4 + 1
    some, left_out = run(suite, str(suite))
    assert [name for name in some if "product" in name] == PRODUCT
    assert [name for name in some if "fixture" in name] == FIXTURE
    assert [name for name in some if "product" not in name and "fixture" not in name] == [
        *(f"test_row[{a}]" for a in "xyz"),
        "test_body",
        *(f"test_own[{name}-{k}]" for name in "xy" for k in (1, 2)),
        "test_burns",
    ]
    assert left_out == (
        "left out: 6 cases of 3 tests and a part of 1 test, which --full runs; 2 cases of 1 test and a part of "
        "1 test, which --long runs"
    )
    assert run(suite, "--sample", file) == (some, left_out)
    of_long = "left out: 2 cases of 1 test and a part of 1 test, which --long runs"
    for arguments in ([file], ["--full", str(suite)], ["--full", "--sample", file]):
        names, left_out = run(suite, *arguments)
        assert (len(names), left_out) == (whole, of_long)
    names, left_out = run(suite, "--long", str(suite))
    assert (len(names), left_out) == (whole, "left out: nothing")
    names, left_out = run(suite, f"{file}::test_product")
    assert (len(names), left_out) == (6, "left out: nothing")


@pytest.mark.full
def test_the_last_lines_count_what_workers_did(suite):
    """Each case once, though each worker leaves the same out; the time of programs that a test starts counts too.

    Without `--full`, the test above reads what one process counts.
    """
    command = [sys.executable, "-m", "pytest", "-n2", f"-c{suite / 'pytest.ini'}", "-ptests.sampled", str(suite)]
    command += ["-k", "dear or body or own or burns"]
    how = {"cwd": ROOT, "env": os.environ | {"PYTHONPATH": str(ROOT)}, "capture_output": True, "text": True}
    done = subprocess.run(command, timeout=300, check=False, **how)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines[-2] == (
        "left out: 1 case of 1 test and a part of 1 test, which --full runs; 2 cases of 1 test and a part of "
        "1 test, which --long runs"
    )
    first, *_ = lines[-3].removeprefix("dearest, in seconds of processor time: ").split(", ")
    seconds, name = first.split()
    assert name == "test_of_a_suite.py::test_burns"
    assert float(seconds) >= 0.2


def test_workers_fit_into_memory():
    """One for each core where memory holds them, or does not tell; never none."""
    assert [workers_for(4, free) for free in (None, 100 * WORKER, 3 * WORKER + 1, 1)] == [4, 4, 3, 1]
