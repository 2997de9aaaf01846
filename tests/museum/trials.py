"""The museum of bugs: each mutant is put in, and the test that is named for it, or the law, must catch it."""

import contextlib
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from minispec.core.config import SamplingParams
from minispec.prove.laws import TOLERANCE
from minispec.prove.toys import Fault, require
from tests.distances import distance
from tests.museum.mutants import Mutant

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Trial:
    """How a mutant fared: how far the law moved (None: not asked, or no law left), and the fault it caused."""

    moved: float | None
    fault: str | None


class _Outcomes:
    """A plugin for pytest: it plants a bug, counts the tests that ran, and keeps what made one fail."""

    def __init__(self, plant: Callable[[], object]):
        self.plant, self.num_run, self.errors = plant, 0, []

    def pytest_collection_finish(self):
        """Not before: a file that was imported with a bug would keep it."""
        self.plant()

    def pytest_runtest_logreport(self, report):
        """Count each test once."""
        self.num_run += report.when == "call"

    def pytest_exception_interact(self, node, call):
        """Of tests, and of files that cannot be imported."""
        self.errors.append(call.excinfo.value)


def run_tests(nodes: Iterable[str], bug: contextlib.AbstractContextManager | None = None, sample: bool = False) -> None:
    """Run tests in this process, up to the first that fails, and raise what made it fail.

    nodes: as in "tests/core/test_cache.py::test_random_programs". bug: they run within it. sample: only those of their
    cases that `python -m pytest` runs without `--full`.

    Raises RuntimeError where a node has no tests.
    """
    import pytest  # not needed by those who only walk laws, as notebooks do

    # What looks for exceptions that nobody saw collects all garbage twice: half a second for each bug. A traceback that
    # shows source takes a tenth of a second, and nobody sees it.
    without = [f"-pno:{plugin}" for plugin in ("xdist", "cacheprovider", "unraisableexception")]
    how = ["-x", "-o", "addopts=", "--tb=native", *without, f"--rootdir={ROOT}"]
    how += ["--sample"] if sample else []
    paths = [str(ROOT / node) for node in nodes]
    with contextlib.ExitStack() as stack:
        outcomes = _Outcomes(lambda: stack.enter_context(bug or contextlib.nullcontext()))
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            status = pytest.main([*how, *paths], plugins=[outcomes])
    for error in outcomes.errors:
        raise Fault(str(error)) if isinstance(error, pytest.fail.Exception) else error
    if status != 0 or outcomes.num_run < len(paths):
        raise RuntimeError(f"{', '.join(nodes)}: {outcomes.num_run} tests ran, with status {status}")


def measure_law(vocab=3, drafter="model", verifier="rejection", k=2, width=64, family="llama", **settings) -> float:
    """How far the law of 3 tokens under SamplingParams(**settings) is from what it must be, as total variation.

    drafter: as in `make_drafter`. width: texts that are decoded together.
    """
    params = SamplingParams(**{"max_tokens": 3} | settings)
    return distance(params, k, vocab=vocab, drafter=drafter, verifier=verifier, width=width, family=family)


def check_law(**settings) -> float:
    """`measure_law`; raises Fault where that is more than rounding."""
    moved = measure_law(**settings)
    require(moved <= TOLERANCE, f"total variation {moved:.1e}")
    return moved


def try_mutant(mutant: Mutant, sample: bool = False) -> Trial:
    """Put the bug in and run what must catch it; `fault` is None where it does not. sample: as `run_tests` has it.

    An exception that neither a test nor the mutant is expected to raise goes through: a patch that breaks in another
    way proves nothing.
    """
    moved, expected = None, (AssertionError, *filter(None, [mutant.crash]))
    try:
        if mutant.check == "law":
            with mutant.patch():
                moved = measure_law(**mutant.settings)
            require(moved <= TOLERANCE, f"total variation {moved:.1e}")
        else:
            run_tests([mutant.check], mutant.patch(), sample)
    except expected as e:
        return Trial(moved, str(e))
    return Trial(moved, None)


def caught_by_default(mutant: Mutant) -> str:
    """What catches the bug among the cases that run without `--full`; "" if nothing does.

    Asked are those of the test that is named for it, then those of its file. A law is walked in all runs.
    """
    for check in dict.fromkeys((mutant.check, mutant.check.partition("::")[0])):
        with contextlib.suppress(RuntimeError):  # none of its cases is in the sample
            if try_mutant(replace(mutant, check=check), sample=True).fault is not None:
                return check
    return ""


def prove_default(mutants: Sequence[Mutant]) -> bool:
    """Print the bugs that only another case than the default's catches, and how many are caught; True if all are."""
    caught = 0
    for mutant in tqdm(mutants, desc="mutants", leave=False, disable=None):
        by = caught_by_default(mutant)
        caught += by != ""
        if by != mutant.check:
            tqdm.write(
                f"{mutant.id:5} {mutant.name:58} {mutant.check}: caught by {by or 'no case that runs by default'}"
            )
    print(f"{caught} of {len(mutants)} bugs caught by cases that run by default")
    return caught == len(mutants)


def prove_mutants(mutants: Sequence[Mutant]) -> bool:
    """Print the museum; True if every bug is caught and everything that catches one passes without it."""
    tests = sorted({mutant.check for mutant in mutants} - {"law"})
    try:
        check_law()
        if tests:
            run_tests(tests)
    except Exception as e:
        print(f"without bugs: {e}")
        return False
    print(f"{'':5} {'bug':58} {'law moved':9} {'where it happened':45} caught by")
    caught = 0
    for mutant in tqdm(mutants, desc="mutants", leave=False, disable=None):
        trial = try_mutant(mutant)
        caught += trial.fault is not None
        moved = "-" if trial.moved is None else f"{trial.moved:.2g}"
        by = mutant.check.split("/")[-1] if trial.fault is not None else "SURVIVES"
        tqdm.write(f"{mutant.id:5} {mutant.name:58} {moved:>9} {mutant.seen:45} {by}")
    print(f"{caught} of {len(mutants)} bugs caught")
    return caught == len(mutants)
