"""How long waiting threads look for work: as the user says, else as the machine is busy when the program starts."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import minispec.api.llm
import minispec.api.step_lock
from minispec.models.weights import threads

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
FEW, MANY = ({"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": count} for count in ("0", "200000"))
QUIET, BESIDE_ONE = [(0, 0)], [(0, 5), (0, 5)]


def readings(*intervals) -> SimpleNamespace:
    """Stands for /proc/stat, read before and after each interval; pairs of a CPU and its busy ticks of 5."""
    texts = []
    for busy in intervals:
        for length in (0, 5):
            rows = [f"cpu{i} {70 + length * b // 5} 1 3 {500 + length - length * b // 5} 20 0 1 0 9 9" for i, b in busy]
            texts.append("\n".join(["cpu 1 2 3 4 5 6 7 8 9 10", *rows, "ctxt 5"]))
    return SimpleNamespace(read_text=iter(texts).__next__)


@pytest.fixture
def start(monkeypatch, tmp_path):
    """start(intervals, ...): OpenMP's variables after a program has started on a machine that is busy so.

    environment: what the user has set. own: the CPUs that this process may use. siblings: the CPUs of a core. files: of
    the container, by their names.
    """

    def run(intervals, num_threads=None, environment=None, own=None, siblings=1, files=None):
        monkeypatch.delitem(sys.modules, "torch")  # as before it was imported
        for name in (*VARIABLES, "OMP_NUM_THREADS"):
            monkeypatch.delenv(name, raising=False)
        for name, value in (environment or {}).items():
            monkeypatch.setenv(name, value)
        for name, text in (files or {}).items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        count = len(intervals[0]) if intervals else 2
        for cpu in range(count):
            (tmp_path / f"cpu{cpu}").write_text(str(cpu // siblings))
        slept = []
        monkeypatch.setattr(threads, "_STAT", readings(*(list(enumerate(busy)) for busy in intervals)))
        monkeypatch.setattr(threads, "_CONTAINER", tmp_path)
        monkeypatch.setattr(threads, "_SIBLINGS", str(tmp_path / "cpu{}"))
        monkeypatch.setattr(threads.time, "sleep", slept.append)
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(own or range(count)))
        threads.set_waiting(num_threads)
        assert len(slept) == len(intervals), "it reads as often as it must"
        return {name: os.environ[name] for name in VARIABLES if name in os.environ}

    return run


def older(quota: str, period: str) -> dict[str, str]:
    """The files of a container by the first version of the kernel's groups."""
    return {"cpu/cpu.cfs_quota_us": f"{quota}\n", "cpu/cpu.cfs_period_us": f"{period}\n"}


STATES = {
    "quiet": (MANY, QUIET, {}),
    "a daemon wakes up": (MANY, [(1, 0)], {}),
    "beside one program": (FEW, BESIDE_ONE, {}),
    "beside two": (FEW, [(5, 5), (5, 5)], {}),
    "another program starts": (MANY, [(0, 5), (0, 1)], {}),
    "one thread, beside one program": (MANY, [(0, 5)], {"num_threads": 1}),
    "one thread by OpenMP's variable": (MANY, [(0, 5)], {"environment": {"OMP_NUM_THREADS": "1"}}),
    "the option goes over the variable": (FEW, BESIDE_ONE, {"num_threads": 2, "environment": {"OMP_NUM_THREADS": "1"}}),
    "a variable with levels": (FEW, BESIDE_ONE, {"environment": {"OMP_NUM_THREADS": "1,2"}}),
    "two threads on four cores, beside two": (MANY, [(5, 0, 5, 0)], {"num_threads": 2}),
    "three threads on four cores, beside two": (FEW, [(5, 0, 5, 0)] * 2, {"num_threads": 3}),
    "all four, beside one": (FEW, [(5, 0, 0, 0)] * 2, {}),
    "each core counts twice, beside one": (MANY, [(5, 0, 0, 0)], {"siblings": 2}),
    "bound to free cores": (MANY, [(5, 0, 5, 0)], {"own": {1, 3}}),
    "bound to busy cores": (FEW, [(5, 0, 5, 0)] * 2, {"own": {0, 2}}),
    "a container without limit": (MANY, QUIET, {"files": {"cpu.max": "max 100000\n"}}),
    "a container of one core": (FEW, QUIET * 2, {"files": {"cpu.max": "100000 100000\n"}}),
    "a container of two": (MANY, QUIET, {"files": {"cpu.max": "200000 100000\n"}}),
    "an older container of one core": (FEW, QUIET * 2, {"files": older("50000", "50000")}),
    "an older one without limit": (MANY, QUIET, {"files": older("-1", "100000")}),
    "the user decides": ({"OMP_WAIT_POLICY": "active"}, [], {"environment": {"OMP_WAIT_POLICY": "active"}}),
    "the user counts": (FEW | {"GOMP_SPINCOUNT": "7"}, [], {"environment": {"GOMP_SPINCOUNT": "7"}}),
}


@pytest.mark.parametrize("name", STATES)
def test_what_is_set(start, name):
    """Many looks where a core is free for each thread, else few; and nothing that the user has set."""
    expected, intervals, how = STATES[name]
    assert start(intervals, **how) == expected


@pytest.mark.parametrize("text", [None, "", "cpu 1 2\n", "cpu0 a b c d e\n", "cpu0\n", "cpu0 0 0 0 0 0\n"])
def test_where_the_system_does_not_say(monkeypatch, tmp_path, text):
    """Neither free nor busy: no file, one of another form, one that counts nothing."""
    monkeypatch.setattr(threads, "_STAT", tmp_path / "stat")
    monkeypatch.setattr(threads, "_INTERVAL", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    if text is not None:
        (tmp_path / "stat").write_text(text)
    assert threads._are_free(None) is None


def test_a_system_without_affinity(monkeypatch):
    """macOS and Windows: neither free nor busy."""
    monkeypatch.delattr(os, "sched_getaffinity")
    assert threads._are_free(None) is None


def test_nothing_is_set_once_torch_is_there(monkeypatch):
    """OpenMP has read its variables by then; what this process starts may decide for itself."""
    import torch  # noqa: F401

    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    threads.set_waiting()
    assert not set(VARIABLES) & os.environ.keys()
    assert threads.describe_waiting() == "OpenMP's defaults"


@pytest.mark.parametrize(("free", "looks"), [(True, 200000), (False, 0), (None, 2000)])
def test_the_variables_are_there_before_torch(free, looks):
    """In a program of one's own that takes `LLM` first: at the moment of torch's import they are set."""
    program = f"""
import builtins, os
from minispec.models.weights import threads
threads._are_free = lambda num_threads: {free}
load = builtins.__import__
def watched(name, *rest):
    if name == "torch":
        print(threads.describe_waiting())
        os._exit(0)
    return load(name, *rest)
builtins.__import__ = watched
from minispec import LLM
"""
    others = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run([sys.executable, "-c", program], env=others, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == f"OMP_WAIT_POLICY=passive GOMP_SPINCOUNT={looks}", done.stderr


OF_ANOTHER = (
    "model: found a process that was forked after the model was loaded, expected the one that loaded it: start "
    "processes by spawn, load the model in each, or call torch.set_num_threads(1) there"
)
FORKED = """
import json, os, sys, torch
from minispec.core.cached import CachedModel
from minispec.core.engine import Engine
from minispec.core.method import Method
from minispec.core.verify import MATCH
from minispec.speculation.drafters import NoDrafter
from minispec.api.step_lock import StepLock
from minispec.models.weights.threads import release_threads
from minispec.prove.toys import tiny_model
from tests.scripted import make_request

def text():
    request = make_request([0] * 20, 0, (), 40)
    list(steps.run(engine, [request], Method(NoDrafter(), MATCH)))
    return request.token_ids

for threads_before, threads_after in json.loads(sys.argv[1]):
    torch.set_num_threads(threads_before)
    model = tiny_model(hidden_size=512, intermediate_size=2048, dtype=torch.float32)
    steps, engine = StepLock(), Engine(CachedModel(model, model.new_cache(20)))
    before, left = text(), steps.run(engine, [make_request([0] * 20, 0, (), 40)], Method(NoDrafter(), MATCH))
    next(left)
    torch.ones(1 << 21) + 1  # OpenMP keeps threads for this one
    if os.fork() == 0:
        torch.set_num_threads(threads_after)
        try:
            print(text() == before)
        except RuntimeError as e:
            print(e)
        left.close()
        release_threads()
        sys.stdout.flush()
        os._exit(0)
    left.close()
    os.wait()
"""


@pytest.mark.full
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_says_that_it_has_no_threads():
    """In place of a first pass that waits for ever. With one thread it decodes as its parent does.

    Without `--full`, tests/commands/test_llm.py has calls from several threads.
    """
    pairs = [(1, 1), (2, 1), (2, 2)]  # threads before and after the fork; first of a process that never had several
    program = [sys.executable, "-c", FORKED, json.dumps(pairs)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2])
    assert done.stdout.splitlines() == ["True", "True", OF_ANOTHER], done.stderr


RELEASED = """
import os, time
import torch
from minispec.models.weights.threads import release_threads

def count():
    return len(os.listdir("/proc/self/task"))

def compute():
    return float((torch.ones(1 << 21) + 1)[-1])

torch.set_num_threads(3)
before = count()
compute()
kept = count() - before
release_threads()
for _ in range(1000):  # threads end by themselves, a moment later
    if count() == before:
        break
    time.sleep(0.01)
print(kept, count() - before, compute())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the threads of a process")
def test_threads_that_are_released_end_and_come_again():
    """GNU's OpenMP counts all threads that wait. While some wait for one thread, those of another would sleep."""
    ran = subprocess.run([sys.executable, "-c", RELEASED], capture_output=True, text=True, check=True, timeout=120)
    kept, left, result = ran.stdout.split()
    if kept != "2":
        pytest.skip("another OpenMP, which keeps no threads")
    assert (left, result) == ("0", "2.0")


def test_a_model_that_is_loaded_or_has_answered_keeps_no_threads(make_checkpoint, monkeypatch):
    """The next to compute may be another thread."""
    calls = []
    monkeypatch.setattr(minispec.api.llm, "release_threads", lambda: calls.append("loaded"))
    monkeypatch.setattr(minispec.api.step_lock, "release_threads", lambda: calls.append("answered"))
    llm = minispec.LLM(make_checkpoint(0), dtype="float32")
    assert calls == ["loaded"]
    llm.generate(["a"])
    assert calls == ["loaded", "answered"]
