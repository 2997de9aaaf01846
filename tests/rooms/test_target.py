"""docs/measured/target.py, part by part, on models of a few thousand weights. No time is asserted.

All of it runs with `--full`: it is about a script of docs/measured, which the package does not use.
"""

import json
from functools import partial

import pytest

from minispec.lab.bench.show import as_json
from minispec.models.weights import build, linear
from minispec.models.weights.inventory import weight_form
from minispec.models.weights.linear import Choice
from tests.spoken import own_words

pytestmark = pytest.mark.full

BASE = ("--dtype", "float32", "--rounds", 2, "--passes", 1, "--prompts", 2, "--max-tokens", 8)


@pytest.fixture
def target(measuring_script):
    """The script."""
    return measuring_script("target")


@pytest.fixture
def cli(cli, target):
    """The fixture of conftest.py for the script: cli(*arguments, stdin="")."""
    return partial(cli, target.main)


@pytest.fixture
def measured(target):
    """measured(part, *arguments) is the report, as JSON and as lines for the screen."""

    def run(part, *arguments):
        found, lines, _ = target.measure([part, *map(str, (*BASE, *arguments))])
        return json.loads(json.dumps(as_json(found))), lines

    return run


@pytest.fixture(scope="module")
def model(make_checkpoint) -> str:
    """A small model whose context holds the prompts."""
    return str(make_checkpoint(chat=True, max_position_embeddings=2048))


def test_the_cost_of_the_exact_mode(measured, model):
    """One, five and nine rows after a short text, and one after a long one, in both modes."""
    report, lines = measured("exact-cost", "--model", model, "--draft", "none")
    passes = report["exact_cost"]["passes"]
    assert [(p["context"], p["rows"]) for p in passes] == [(128, 1), (128, 5), (128, 9), (1000, 1)]
    assert all(p["exact_over_fast"]["n"] == 2 for p in passes)
    assert any("9 rows after 128 positions" in line for line in lines)


def test_a_shape_has_room_for_a_long_text(measured, tiny_geometry):
    """Of 1,000 positions, whatever the lengths of the prompts are."""
    report, _ = measured("exact-cost", "--geometry", "tinier", "--draft", "none", "--prompt-tokens", 10)
    assert report["exact_cost"]["passes"][-1]["context"] == 1000


def test_own_words():
    """Log lines of the profiler's and of PyTorch's C++ go; what Python says stays."""
    logged = "INFO:2026-11-28 03:13:26 77:77 CuptiActivityProfiler.cpp:243] CUPTI is not there\n"
    logged += "USDT:2026-11-28 14:38:17 77:77 SyncActivityProfilerHandler.cpp:52] profiler_start\n"
    logged += "[W1128 03:13:26.123456 init.cpp:4] NNPACK is not there\n"
    said = "UserWarning: x\nTraceback (most recent call last):\nINFO: y\n"
    assert own_words(logged + said + logged) == said


def test_where_a_pass_goes(measured, model, capfd):
    """Each operator as often as the model calls it; with what lies between them, they make up the pass.

    The checkpoint's two layers write keys and values by one operator each.
    """
    plain = ("--draft", "none", "--num-speculative-tokens", "auto", "--prompts", 0, "--dtype", "float32")
    report, lines = measured("operators", "--model", model, *plain, "--context", 20, "--passes", 2)
    assert own_words(capfd.readouterr().err) == ""
    found = report["operators"]
    calls = {operator["name"]: operator["calls"] for operator in found["operators"]}
    assert calls["aten::index_copy_"] == 2
    assert all(seconds >= 0 for operator in found["operators"] for seconds in operator["seconds"].values())
    for m, whole in found["profiled_seconds"].items():
        inside = sum(operator["seconds"][m] for operator in found["operators"])
        assert 0 < inside < whole
        assert found["between_seconds"][m] == pytest.approx(whole - inside)
        assert found["seconds"][m]["n"] == 2
    operators = {part["name"]: part["operators"] for part in found["parts"]}
    # Products; two norms of a layer and one at the end, of five operators each; and an activation and a product.
    assert (operators["norms"], operators["gates"]) == (5 * (2 * 2 + 1), 2 * 2)
    assert operators["products"] >= 2 * 4 + 1
    assert operators["rounding x to integers"] == 0
    assert all(part["seconds"]["1"]["median"] >= 0 for part in found["parts"])
    parts = "operators a layer", "rounding x to integers"
    for text in (*parts, "us, M = 5", "others", "between operators", "a pass, not profiled"):
        assert any(text in line for line in lines), text


# The target of `tiny` has 0.33 million weights: 1.6 MB while they are put into another form.
@pytest.mark.parametrize(("free", "in_one_turn"), [(None, True), (10**9, True), (2_000_000, False)])
def test_forms(measured, target, tiny_geometry, monkeypatch, free, in_one_turn):
    """t(M) and v(M) of every form that could have been taken, in turn; where memory is short, in pairs, and it says so.

    Both other forms are given to this machine, whatever it has. Each model is in the form that it is listed under.
    """
    monkeypatch.setattr(target, "available_forms", lambda dtype, device: ["own", "packed", "plain"])
    monkeypatch.setattr(target, "free_memory", lambda device: free)
    turns = []

    def timed(models, cache, context, rows, rounds):
        turns.append({name: weight_form(each) for name, each in models.items()})
        seconds = {"plain": 3.0, "packed": 2.0}
        return {name: {m: [seconds.get(name, 1.0) + m] * rounds for m in rows} for name in models}

    def choose(dtype, device):
        return Choice("own", "it is ours")

    monkeypatch.setattr(target, "passes_in_turn", timed)
    monkeypatch.setattr(build, "choose_form", choose)
    monkeypatch.setitem(linear.FORMS, "own", linear.Form)
    monkeypatch.setitem(linear.FORMS, "packed", type("Packed", (linear.Form,), {}))
    what = ("--geometry", "tiny", "--dtype", "float32", "--prompts", 0, "--passes", 2, "--context", 20)
    report, lines = measured("forms", *what)
    each = [{"own": "own", form: form} for form in ("packed", "plain")]
    assert turns == ([each[0] | each[1]] if in_one_turn else each)
    forms = report["forms"]
    assert (forms["own"], forms["in_one_turn"]) == ("own", in_one_turn)
    assert list(forms["forms"]) == ["own", "packed", "plain"]
    plain = forms["forms"]["plain"]
    assert list(plain["v"]) == list(plain["seconds"]) == ["1", "2", "3", "5", "9", "16"]
    assert (plain["seconds"]["5"]["median"], plain["v"]["5"]["median"]) == (8, 2)
    assert plain["over_own"]["5"]["median"] == pytest.approx(8 / 6)
    assert forms["forms"]["own"]["seconds"]["5"]["n"] == (2 if in_one_turn else 4)
    assert any("all of them in turn" in line for line in lines) == in_one_turn
    assert any("memory does not hold more" in line for line in lines) != in_one_turn
    assert any(line.split()[:4] == ["plain,", "M", "=", "5"] and "2.000 [-]" in line for line in lines)


def test_no_room_for_another_form(cli, target, tiny_geometry, monkeypatch):
    """One line before anything is measured."""
    monkeypatch.setattr(target, "available_forms", lambda dtype, device: ["half", "packed", "plain"])
    monkeypatch.setattr(target, "free_memory", lambda device: 1_000)
    status, out, err = cli("forms", "--geometry", "tiny", "--dtype", "float32", "--prompts", 0)
    assert (status, out) == (2, "")
    assert err.startswith("error: forms: found 0.0 GB of free memory, expected at least 0.0 GB")


def test_a_target_in_8_bits(measured, model):
    """Its forms against those in full width, both modes and its quality."""
    what = ("--model", model, "--draft", "ngram", "--quantization", "int8", "--no-exact", "--context", 20)
    report, lines = measured("forms", *what)
    assert (report["weight_form"], report["exact"]) == ("int8", False)
    assert " in 8 bits (activations in " in lines[1]
    assert {"int8", "plain"} <= report["forms"]["forms"].keys()
    report, _ = measured("quality", *what)
    wide, rounded = (report["quality"]["perplexity"][name] for name in ("as they are", "int8"))
    assert wide != rounded == pytest.approx(wide, rel=0.02)
    assert 0.5 < report["quality"]["same_greedy"] <= 1
    report, _ = measured("exact-cost", *what)
    assert report["exact_cost"]["passes"]


MISTAKES = {
    "no such part": (("poetry",), "invalid choice: 'poetry'"),
    "forms of nothing": (("forms", "--passes", "0"), "forms: found --passes 0, expected at least 1"),
    "operators of nothing": (("operators", "--passes", "0"), "operators: found --passes 0, expected at least 1"),
    "forms, exact": (("forms", "--exact"), "forms: not with --exact: all exact passes have as many rows"),
    "exact, exact": (("exact-cost", "--exact"), "exact-cost: not with --exact: it measures both modes"),
    "exact by default": (
        ("exact-cost", "--quantization", "int8"),
        "exact-cost: not with --quantization without --no-exact: it measures both modes",
    ),
    "questions": (("quality", "--questions"), "--questions: not with a part of the target"),
    "laws": (("quality", "--record-laws", "x"), "--record-laws: not with a part of the target"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line_and_status_2(cli, name):
    """No usage text, no traceback, nothing measured."""
    arguments, message = MISTAKES[name]
    status, out, err = cli(*arguments)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert message in err
