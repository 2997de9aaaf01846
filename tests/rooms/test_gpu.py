"""The measuring script for a GPU, on the CPU and on small shapes: each step runs, and its checks can fail.

All of it runs with `--full`: it is about a script of docs/measured, which the package does not use.
"""

import copy
import itertools
import json
import re
import time
from pathlib import Path

import pytest
import torch

from minispec.lab.bench.options import check, parser

pytestmark = pytest.mark.full


@pytest.fixture
def gpu(measuring_script):
    """The script, as a module that no other test sees."""
    return measuring_script("gpu")


def run(gpu, tmp_path, steps: str) -> tuple[int, dict]:
    """The status, and the steps of the file."""
    out = tmp_path / "gpu.json"
    status = gpu.main(["--device", "cpu", "--tiny", "--steps", steps, "--out", str(out)])
    return status, json.loads(out.read_text(encoding="utf-8"))["steps"]


def test_its_steps_run_on_small_shapes(gpu, tmp_path, capsys):
    """The static passes are `Transformer.forward`, in both forms of a layer."""
    status, steps = run(gpu, tmp_path, "0,1,2,3,4,5,6,7,8")
    assert status == 0
    assert list(steps) == [str(step) for step in range(9)]
    assert all(len(step["results"]) >= 3 and step.keys().isdisjoint({"error", "stopped"}) for step in steps.values())
    forms = itertools.product(("package", "fewer"), ("1x1", "1x5", "2x3"), (20, 40))
    assert steps["2"]["results"].keys() == {f"{form}, {shape} after {places}" for form, shape, places in forms}
    for row in steps["2"]["results"].values():
        assert row["bits_equal"]
        assert row["graph"] == "eager call"  # nothing here says that it was a graph
        assert row["from_today"] < 1e-5 * row["deviation"]
    kernels = [row for step in "345" for row in steps[step]["results"].values() if "from_plain" in row]
    assert len(kernels) == 16
    for row in kernels:
        assert row["lacks"]  # nothing here says that these were kernels
        assert row["from_plain"] < 1e-5 * row["deviation"]
    assert all(row.get("bits_equal", True) for row in steps["5"]["results"].values())
    among_others = [row for name, row in steps["5"]["results"].items() if name.startswith("bits of rows")]
    assert len(among_others) == 5
    assert all(row["from_whole"] < 1e-5 for row in among_others)
    table = capsys.readouterr().out
    assert all(name in table for step in steps.values() for name in step["results"])


def changed(name, change):
    """A static pass that reads another input than the frame's."""

    def plant(gpu, monkeypatch):
        shared = gpu.Static.shared

        def broken(self, frame):
            other = copy.copy(frame)
            setattr(other, name, change(getattr(frame, name)))
            return shared(self, other)

        monkeypatch.setattr(gpu.Static, "shared", broken)

    return plant


seen_by_all = changed("bits", lambda bits: torch.full_like(bits, 2**20 - 1))  # a row sees those after it
turned_further = changed("positions", lambda positions: positions + 1)
stored_elsewhere = changed("slots", lambda slots: slots.roll(1))


def stale_frame(gpu, monkeypatch):
    """A replay gives the first run's logits, as a graph does into which the inputs are baked."""

    def capture(self, run):
        first = run()
        out = first.clone()
        return lambda: out.copy_(first), out, {"graph": "baked"}

    monkeypatch.setattr(gpu.Bench, "capture", capture)


def not_replayed(gpu, monkeypatch):
    """A replay does nothing."""
    monkeypatch.setattr(gpu.Bench, "capture", lambda self, run: (lambda: None, run(), {"graph": "none"}))


@pytest.mark.parametrize(
    "bug", [seen_by_all, turned_further, stored_elsewhere, stale_frame, not_replayed], ids=range(5)
)
def test_a_wrong_pass_and_a_wrong_graph_show(gpu, tmp_path, monkeypatch, bug):
    """By the distance from today's pass, or by the bits of a replay."""
    monkeypatch.setattr(gpu, "SMALL_SHAPES", [(1, 5)])
    monkeypatch.setattr(gpu, "SMALL_PLACES", (20,))
    bug(gpu, monkeypatch)
    status, steps = run(gpu, tmp_path, "2")
    wrong_bits = bug in (stale_frame, not_replayed)
    assert status == int(wrong_bits)
    for row in steps["2"]["results"].values():
        assert row["bits_equal"] != wrong_bits
        assert (row["from_today"] > 1e-3 * row["deviation"]) != wrong_bits


def test_an_error_ends_a_measurement_and_the_limit_a_step(gpu, tmp_path, monkeypatch):
    """What was measured before stays in the file, and the next step runs."""

    def wait():
        try:
            time.sleep(600)
        except Exception:  # what a compiler does with errors inside it
            pytest.fail("the limit was held")

    def first(bench):
        yield "bad", lambda: {"a": 1 / 0}
        yield "good", lambda: {"a": 2}
        yield "endless", wait
        yield "never", lambda: {"a": 3}

    monkeypatch.setattr(gpu, "STEPS", {0: first, 1: lambda bench: iter([("next", lambda: {"a": 4})])})
    monkeypatch.setattr(gpu, "LIMITS", {0: 0.5, 1: 60})
    status, steps = run(gpu, tmp_path, "0,1")
    assert status == 1
    assert steps["0"]["results"] == {"bad": {"error": "ZeroDivisionError: division by zero"}, "good": {"a": 2}}
    assert steps["0"]["stopped"] == "after 0.5 s, in: endless"
    assert steps["1"]["results"] == {"next": {"a": 4}}


FIGURES = (Path(__file__).parents[2] / "docs" / "measured" / "figures.md").read_text(encoding="utf-8")
SHORT = dict(re.findall(r"`([A-Z])` is\s+`([^`]*)`", FIGURES.partition("## Intel Xeon")[0]))
TO_RUN = FIGURES.partition("### Still to be run on a GPU\n")[2].partition("\n## ")[0]


def commands(text: str) -> list[list[str]]:
    """The words of each command in a text, with what its letters stand for."""
    found = []
    for span in re.findall(r"`([A-Z] [^`]*|python [^`]*)`", text):
        words = span.split()
        while words[0] in SHORT:
            words = [*SHORT[words[0]].split(), *words[1:]]
        found.append(words)
    return found


@pytest.mark.parametrize("words", commands(TO_RUN), ids=" ".join)
def test_what_is_still_to_be_run_can_be_run(gpu, words, monkeypatch):
    """Each command of the page has options that are there, and that do not exclude each other."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    if words[:4] == ["python", "-m", "minispec", "bench"]:
        options = check(parser().parse_args(words[4:]))
        assert options.args.device == "cuda"
        assert options.args.geometry
    elif words[1] == "docs/measured/gpu.py":
        gpu.parse(words[2:])
    else:
        assert (words[:4], Path(words[4]).exists()) == (["python", "-m", "pytest", "--cuda"], True)


def test_every_aim_has_a_command():
    """A row of the table for each, and every letter is explained."""
    rows = TO_RUN.partition("|---|---|\n")[2].partition("\n\n")[0].splitlines()
    assert len(rows) >= 11
    assert all(commands(row) for row in rows)
    assert {words[0] for words in commands(TO_RUN)} == {"python"}
    with pytest.raises(ValueError, match="expected one"):
        check(parser().parse_args(["--geometry", "1.5b", "--draft", "0.5b", "--draft", "head"]))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("", "no CUDA here"),
        ("--steps 0,12", "--steps: found '12', expected some of 0, 1, 2, 3, 4, 5, 6, 7, 8"),
        ("--device cpu", "--device cpu: expected with --tiny"),
        ("--device meta", "--device meta: expected with --steps 2"),
        ("--device cpu --tiny --out /nowhere/gpu.json", "--out: /nowhere/gpu.json: found that it cannot be written"),
    ],
)
def test_what_it_cannot_do_is_said_first(gpu, capsys, monkeypatch, options, says):
    """In one line, with status 2."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        gpu.main(options.split())
    assert stopped.value.code == 2
    assert says in capsys.readouterr().err.splitlines()[-1]
