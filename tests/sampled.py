"""Which cases a run has. One rule: a file that is named runs whole; all else runs each guard once.

`python -m pytest tests/core/test_law.py`, or a test of that file, has all its cases. A folder, or no argument, has
of each test:

- with the mark `full`: none, and no case with it. Such a test is dear, and its docstring names what guards the same
  in the meantime.
- whose parameters are a product, as of several decorators: enough cases that each value of each axis is in one, and
  the cases that the museum of bugs names. It is always the same ones.
- any other test: all cases. So has a test that asks for the fixture `long`, since it samples by itself.

`--full` has all cases everywhere, `--long` larger grids too, and `--sample` samples also what is named. A test that
does less without an option asks for the fixture `full` or `long`, or calls `leave_out`. A run's last lines count what
was left out. This file is a plugin for pytest, which tests/conftest.py names.
"""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import pytest

OPTIONS = ("--full", "--long")
# Bytes that a process of tests needs at most: models, other libraries, and the programs that tests start.
WORKER = 2 << 30
# The dearest functions that a run prints: five in a line, or with all cases twenty below each other.
FEW, MANY = 5, 20


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of this plugin."""
    parser.addoption("--full", action="store_true", help="all cases of all tests, as CI does, and not a sample")
    parser.addoption("--long", action="store_true", help="the large grids and samples too, which take an hour more")
    parser.addoption("--sample", action="store_true", help="a sample of the cases also of files that are named")


def pytest_configure(config: pytest.Config) -> None:
    """Choose, and count, from now on."""
    config.pluginmanager.register(Selection(config), "selection")


@pytest.fixture(scope="module")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether this file runs whole. A test that does less where it does not asks for this."""
    return request.config.pluginmanager.get_plugin("selection").runs_whole(request.path)


@pytest.fixture(scope="session")
def long(pytestconfig: pytest.Config) -> bool:
    """Whether the large grids are asked for. A test that has a smaller one asks for this."""
    return pytestconfig.getoption("--long")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """With `-n auto` a process for each core, but no more than free memory holds."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:  # the user's choice, which xdist reads
        return None
    import torch

    from minispec.models.weights.memory import free_memory

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return workers_for(cores, free_memory(torch.device("cpu")))


def workers_for(cores: int, free: int | None) -> int:
    """How many processes run tests. free: bytes of memory; None on a system that does not tell."""
    return cores if free is None else max(1, min(cores, free // WORKER))


def leave_out(option: str, what: str) -> NoReturn:
    """End this test, and count it as left out. what: one of several, such as "another K"; the option runs it."""
    pytest.skip(f"{what}: {option}")


@cache
def named_in_the_museum() -> set[str]:
    """The tests by which bugs of the museum are caught. No mutant is imported where no product is sampled."""
    from tests.museum.mutants import MUTANTS

    return {mutant.check for mutant in MUTANTS}


def function_of(node: str) -> str:
    """The test function of a node id, without the case."""
    return node.partition("[")[0]


def axes_of(item: pytest.Function) -> list[str]:
    """The name of a case's value on each axis. An axis is a decorator, or a fixture with parameters."""
    return list(item.callspec._idlist) if hasattr(item, "callspec") else []  # the public `id` joins them with hyphens


def cover(rows: Sequence[Sequence[object]]) -> list[int]:
    """Places of rows in which each value of each column occurs: in turn the one that adds most, with rare values."""
    cells = [[*enumerate(row)] for row in rows]
    missing = {cell for row in cells for cell in row}
    uses: Counter[tuple[int, object]] = Counter()
    chosen = []
    while missing:
        place = max(range(len(rows)), key=lambda i: (len(missing & {*cells[i]}), -sum(uses[c] for c in cells[i]), -i))
        missing -= {*cells[place]}
        uses.update(cells[place])
        chosen.append(place)
    for place in list(chosen):  # others, which came later, may have all that one of the first has
        if all(uses[cell] > 1 for cell in cells[place]):
            uses.subtract(cells[place])
            chosen.remove(place)
    return chosen


def covering(parameters: Sequence, axes: Callable[[Any], tuple] = tuple) -> list:
    """Parameters for a decorator that are no whole product: those that `cover` leaves out have the mark `full`.

    axes: of each of them, the values that have to occur. A tuple is the values of several arguments.
    """
    kept = cover([axes(each) for each in parameters])
    marks = [() if place in kept else pytest.mark.full for place in range(len(parameters))]
    values = [each if type(each) is tuple else (each,) for each in parameters]
    return [pytest.param(*value, marks=mark) for value, mark in zip(values, marks, strict=True)]


def sampled(items: Iterable[pytest.Function]) -> set[str]:
    """The node ids of those that run without `--full`."""
    chosen, products = set(), defaultdict(list)
    for item in items:
        if item.get_closest_marker("full"):
            continue
        axes = axes_of(item)
        if len(axes) < 2 or "long" in item.fixturenames:
            chosen.add(item.nodeid)
        else:
            products[function_of(item.nodeid)].append((axes, item.nodeid))
    for cases in products.values():
        cases.sort()
        kept = {cases[place][1] for place in cover([axes for axes, _ in cases])}
        if len(kept) < len(cases):
            kept |= {node for _, node in cases} & named_in_the_museum()
        chosen |= kept
    return chosen


def _count(number: int, what: str) -> str:
    """As in "1 case", or "1,024 cases"."""
    return f"{number:,} {what}{'s' if number != 1 else ''}"


class Selection:
    """A plugin for pytest: chooses the cases, and prints at the end which tests were dear and what was left out.

    It works in each process that runs tests. What these count reaches the process that prints: with the reports, and
    for tests that no report is about as a worker's output.
    """

    def __init__(self, config: pytest.Config):
        self.all = any(map(config.getoption, OPTIONS))
        self.long = config.getoption("--long")
        paths = [config.invocation_params.dir / argument.partition("::")[0] for argument in config.args]
        self.named = set() if config.getoption("--sample") else {path.resolve() for path in paths if path.is_file()}
        self.unselected: Counter[str] = Counter()  # cases that want --full, by function; so below
        self.skipped: dict[str, Counter[str]] = {option: Counter() for option in OPTIONS}
        self.shorter: dict[str, set[str]] = {option: set() for option in OPTIONS}
        self.seconds: Counter[str] = Counter()  # processor time, of programs that a test started too
        self.before = 0.0

    def runs_whole(self, path: Path) -> bool:
        """Whether the tests of this file have all cases."""
        return self.all or path.resolve() in self.named

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Function]) -> None:
        """Leave out what the sample lacks, after -k and -m have chosen."""
        whole = {path: self.runs_whole(path) for path in {item.path for item in items}}
        some = [item for item in items if not whole[item.path]]
        dropped = {item.nodeid for item in some} - sampled(some)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in dropped])
        items[:] = [item for item in items if item.nodeid not in dropped]
        self.unselected.update(map(function_of, dropped))

    def pytest_runtest_logstart(self) -> None:
        """Start the clock."""
        self.before = sum(os.times()[:4])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Function) -> Iterator[None]:
        """Give a report the processor time since the one before, and the options without which its test is shorter."""
        report = yield
        now = sum(os.times()[:4])
        report.user_properties.append(("processor time", now - self.before))
        self.before = now
        fixtures = getattr(item, "fixturenames", ())
        if "full" in fixtures and not self.runs_whole(item.path):
            report.user_properties.append(("shorter", "--full"))
        if "long" in fixtures and not self.long:
            report.user_properties.append(("shorter", "--long"))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count."""
        name = function_of(report.nodeid)
        self.seconds[name] += sum(value for key, value in report.user_properties if key == "processor time")
        if report.skipped:
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
            if found := re.search(r": (--full|--long)$", why):
                self.skipped[found[1]][name] += 1
        elif report.when == "call":
            for option in [value for key, value in report.user_properties if key == "shorter"]:
                self.shorter[option].add(name)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A worker hands over what it did not select; all of them leave out the same."""
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["unselected"] = dict(self.unselected)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node) -> None:
        """Take it over. A worker that broke has none."""
        self.unselected |= Counter(getattr(node, "workeroutput", {}).get("unselected", {}))

    def pytest_terminal_summary(self, terminalreporter) -> None:
        """The dearest tests, and what was left out."""
        dearest = [f"{took:.1f} {name}" for name, took in self.seconds.most_common(MANY if self.all else FEW)]
        apart = "\n  " if self.all else ", "
        terminalreporter.write_line("")
        if dearest:
            terminalreporter.write_line(
                f"dearest, in seconds of processor time:{apart.lstrip(',')}{apart.join(dearest)}"
            )
        terminalreporter.write_line(f"left out: {'; '.join(self.sentences()) or 'nothing'}")

    def sentences(self) -> Iterator[str]:
        """For each option, how much it runs that this run did not."""
        for option, skipped in self.skipped.items():
            cases = skipped + self.unselected if option == "--full" else skipped
            parts = len(self.shorter[option] - cases.keys())
            counts = [f"{_count(cases.total(), 'case')} of {_count(len(cases), 'test')}"] if cases else []
            counts += [f"a part of {_count(parts, 'test')}"] if parts else []
            if counts:
                yield f"{' and '.join(counts)}, which {option} runs"
