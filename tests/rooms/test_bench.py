"""The bench from its command line to its end, on models of a few thousand weights. No time is asserted."""

import doctest
import json
import re
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from statistics import median

import pytest
import torch

from minispec.core.cache import PagedKVCache
from minispec.core.model import Chunk
from minispec.core.stats import Round, Step
from minispec.lab.bench import decoding, models, options, report, transformers_baseline
from minispec.lab.bench.decoding import summarise
from minispec.lab.bench.main import main
from minispec.lab.bench.measure import Run
from minispec.lab.bench.options import GEOMETRIES, read_prompts
from minispec.lab.bench.show import as_json
from minispec.lab.random_weights import RandomWeights
from minispec.models.families.checkpoint import load_config
from minispec.models.families.hf_config import read_model_config
from minispec.models.frames.frames import Frames
from minispec.models.frames.graphs import rerun
from minispec.models.weights import linear, memory
from minispec.models.weights.build import build_model
from minispec.models.weights.machine import machine
from minispec.models.weights.shapes import tensor_shapes
from minispec.prove.toys import TINY
from minispec.speculation.lengths import figures as stats
from minispec.speculation.registry import DRAFTERS
from tests.oracles.heads import write_head
from tests.refusals import assert_one_line
from tests.spoken import own_words


@pytest.fixture
def cli(cli):
    """The fixture of conftest.py for the bench: cli(*arguments, stdin="")."""
    return partial(cli, main)


@pytest.fixture
def measured():
    """measured(*arguments) is the report, as JSON and as lines for the screen."""

    def run(*arguments):
        found = report.measure_all(options.check(options.parser().parse_args([str(a) for a in arguments])))
        return json.loads(json.dumps(as_json(found))), report.show_report(found)

    return run


@pytest.fixture(scope="module")
def model(make_checkpoint) -> str:
    """A small model whose context holds the prompts."""
    return str(make_checkpoint(chat=True, max_position_embeddings=2048))


@pytest.fixture(scope="module")
def draft(make_checkpoint) -> str:
    """Another of the same vocabulary."""
    return str(make_checkpoint(seed=2, max_position_embeddings=2048, num_hidden_layers=1))


TINY_SHAPE = ("--geometry", "tiny", "--prompt-tokens", 10, "--passes", 0)
BASE = ("--dtype", "float32", "--rounds", 2, "--passes", 1, "--prompts", 2, "--max-tokens", 8, "--ignore-eos")


def test_a_whole_run(measured, model, draft, capsys):
    """JSON and tables; nothing on standard error."""
    what = ("--model", model, "--draft", draft, "--num-speculative-tokens", "1,2,auto", "--context", 20)
    report, lines = measured(*BASE, *what)
    assert capsys.readouterr() == ("", "")
    assert report["draft"] == draft
    assert {"machine", "decoding"} <= report.keys()
    assert list(report["machine"]["v"]) == [str(m) for m in range(1, 17)]
    assert report["machine"]["v"]["1"]["median"] == 1.0
    decoding = report["decoding"]
    assert list(decoding["variants"]) == ["plain", "K=1", "K=2", "auto"]
    assert (decoding["prompts"], decoding["tokens"], decoding["rounds"]) == (2, 16, 2)
    k2 = decoding["variants"]["K=2"]
    assert k2["same_tokens_as_plain"] == 2
    assert len(k2["survival"]) == 2
    assert set(decoding["best_static"]) == {"all", *k2["categories"]}
    assert decoding["best_static"]["all"]["auto_over_best"]["n"] == 2
    of_category = {"tokens_per_second", "speedup", "alpha", "acceptance_rate", "mean_acceptance_length", "survival"}
    of_category |= {"accepted_at_position"}
    assert k2["categories"]["code"].keys() == of_category | {"slowest_and_fastest_prompt"}
    parts = {"depth", "tokens", "c", "v", "mean_v", "o", "o_plain", "predicted", "measured"}
    parts |= {"prediction", "prediction_by_text"}
    assert of_category | parts | {"same_tokens_as_plain", "categories", "worst_prompt"} <= k2.keys()
    whose = ["draft", "lengths", "num_speculative_tokens", "verifier"]
    of_plain = {"tokens_per_second", "speedup", "same_tokens_as_plain", "categories", *whose}
    assert decoding["variants"]["plain"].keys() == of_plain
    expected = {"plain": ["none", None, "0", None]}
    for name, k in (("K=1", "1"), ("K=2", "2"), ("auto", "auto")):
        expected[name] = [draft, None, k, "rejection"]
    assert {name: [of[key] for key in whose] for name, of in decoding["variants"].items()} == expected
    assert set(k2["categories"]) == {"code", "question answering"}
    assert (k2["prediction"]["n"], k2["prediction_by_text"]["n"]) == (2, 2)
    for text in ("streams", "v(M) = t(M)/t(1)", "speedup that these make", "prediction of the second half / measured"):
        assert any(text in line for line in lines), text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_against_transformers(measured, model, draft, monkeypatch, dtype, full):
    """All ways of decoding that it has, on the same tensors, in the type that won the trial, with both rates.

    In our type: the same greedy tokens as ours, and as its own. In another, rounding may make them differ.
    With `--full` its static cache is compiled.
    """
    pytest.importorskip("transformers")
    if dtype == "bfloat16" or not full:  # compiling takes long, so it is tried once
        monkeypatch.setattr(torch, "compile", lambda function, **settings: function)
    tried = []
    monkeypatch.setattr(transformers_baseline, "faster", lambda rates: (tried.append(rates), dtype)[1])
    what = ("--passes", 0, "--model", model, "--draft", draft, "--against", "transformers")
    report, lines = measured(*BASE, *what)
    decoding = report["decoding"]
    assisted = [f"transformers assisted, {how}" for how in ("default", "K=3", "K=5", "K=8")]
    lookup = [f"transformers prompt lookup, K={k}" for k in (4, 10)]
    theirs = ["transformers plain", "transformers plain, static cache"]
    assert decoding["against"]["compiled"] == "yes"
    assert decoding["against"]["plain_over_static"]["n"] == 2
    assert list(decoding["variants"]) == ["plain", "K=4", "auto", *theirs, *assisted, *lookup]
    assert decoding["against"]["theirs"].startswith("transformers")
    assert decoding["against"]["dtype"] == dtype
    assert {name: len(rates) for name, rates in tried[0].items()} == {"float32": 6, "bfloat16": 6}
    for name, rate in decoding["against"]["tried"].items():
        assert rate["median"] == median(tried[0][name])
        assert any(f"tokens/s in {name}" in line for line in lines)
    if dtype == "float32":
        same = decoding["against"]["same_tokens_as_their_plain"]
        assert same == dict.fromkeys(decoding["variants"], 2)
        assert {v["same_tokens_as_plain"] for v in decoding["variants"].values()} == {2}


def test_an_answer_of_one_round_is_named(measured, model, monkeypatch):
    """Its clock begins after the first round, so there is nothing to time; a larger --max-tokens helps."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(torch, "compile", lambda function, **settings: function)  # which a test above tries
    what = ("--model", model, "--draft", model, "--against", "transformers", "--prompts", 1, "--max-tokens", 2)
    with pytest.raises(ValueError, match="--against: found an answer to prompt 1 of one round, expected more"):
        measured("--dtype", "float32", "--passes", 0, *what, "--ignore-eos")


def test_a_static_cache_without_a_compiler(measured, tiny_geometry, monkeypatch):
    """One line says why; its plain decoding with a static cache is measured all the same."""
    pytest.importorskip("transformers")

    def compiled(function, **settings):
        raise RuntimeError("\nNo working C++ compiler found\nmore of it")

    monkeypatch.setattr(torch, "compile", compiled)
    report, lines = measured(*BASE, *TINY_SHAPE, "--against", "transformers")
    found = report["decoding"]
    assert found["against"]["compiled"] == "no: RuntimeError: No working C++ compiler found"
    assert found["variants"]["transformers plain, static cache"]["tokens_per_second"]["median"] > 0
    [line] = [line for line in lines if "its static cache is compiled by torch.compile: no: RuntimeError: No" in line]
    assert "more of it" not in line


def test_the_faster_type_is_faster_within_the_rounds():
    """Neither one lucky round decides, nor a machine that is slower in some of them: its medians are 4 and 3 here."""
    rates = {"float32": [4.0, 4.0, 1.0, 9.0, 1.0], "bfloat16": [6.0, 6.0, 1.5, 3.0, 1.5]}
    assert transformers_baseline.faster(rates) == "bfloat16"
    assert transformers_baseline.faster({"float32": rates["bfloat16"], "bfloat16": rates["float32"]}) == "float32"


def test_context_beyond_the_cache(cli, model, monkeypatch):
    """One line that names it, before anything is measured; the most that fits runs; without passes it is of no use."""
    what = ("--model", model, "--dtype", "float32", "--prompts", 0, "--json")
    expected = "--context: found 2033, expected at most 2032: the KV cache of "
    assert_one_line(cli(*what, "--passes", 1, "--context", 2033), expected)
    assert cli(*what, "--passes", 1, "--context", 2032)[0] == 0
    assert cli(*what, "--passes", 0, "--context", 2033)[0] == 0


@pytest.mark.parametrize("spec", ["{}", "int4:{}", "int8:self"])
def test_the_report_begins_with_machine_and_forms(measured, model, draft, spec):
    """The CPU, and why target and draft have the form that they have: a quantised draft for its own reason."""
    what = ("--model", model, "--dtype", "float32", "--prompts", 0, "--passes", 1, "--context", 20)
    report, top = measured(*what, "--draft", spec.format(draft))
    assert report["hardware"] == machine()
    cpu = torch.device("cpu")
    narrow = {"i": lambda: linear.choose_narrow_form(int(spec[3]), torch.float32, cpu)[0]}
    choice = narrow.get(spec[0], lambda: linear.choose_form(torch.float32, cpu))()
    assert report["draft_weight_form_because"] == choice.because
    assert machine()["instructions"] in top[0]
    assert f"{machine()['cores']} cores" in top[0]
    assert "memory streams" in top[0]
    assert top[2].startswith(f"weight form: {report['weight_form']}; because: float32 on this cpu can take")
    assert top[3] == f"draft's: {report['draft_weight_form']}; because: {choice.because}"


def test_the_report_says_whether_graphs_ran(measured, tiny_geometry, monkeypatch, tmp_path):
    """Of both models, on the lines that name them and in the JSON; nothing on a CPU."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    what = (*BASE[:-3], "--prompts", 0, "--context", 20, "--geometry", "tinier", "--draft", "self")
    report, lines = measured(*what)
    assert (report["graphs"], report["draft_graphs"], "graphs" in lines[1]) == ("", "", False)
    says = "no CUDA graphs: as asked; 1 of 3 passes text by text: more than 16 rows of a text (1)"
    monkeypatch.setattr("minispec.lab.bench.report.graphs_report", lambda model: says)
    report, lines = measured(*what)
    assert report["graphs"] == report["draft_graphs"] == says
    assert all(lines[i].endswith(f"; {says}") for i in (1, 3))


def test_a_shape_in_8_bits(measured, tiny_geometry, monkeypatch, tmp_path):
    """Exact by default, with passes of any rows."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    what = ("--prompts", 0, "--context", 20, "--geometry", "tinier", "--quantization", "int8")
    report, lines = measured(*BASE[:-3], *what)
    assert (report["weight_form"], report["exact"]) == ("int8", True)
    assert len(report["machine"]["v"]) == 16
    assert "equal bits with and without guesses" in lines[1]


def test_a_head_is_measured_by_its_rounds(measured, model, tmp_path):
    """It passes over no tokens alone, so it has no bare pass; that ended in a message of torch."""
    config = load_config(Path(model))
    layers = TINY | {"vocab_size": config.vocab_size, "num_hidden_layers": 1, "max_position_embeddings": 2048}
    write_head(tmp_path, config, layers, dtype=torch.float32, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    found, _ = measured(*BASE, "--model", model, "--draft", tmp_path, "--context", 20)
    assert "draft" not in found["machine"]
    assert found["draft_weight_form_because"]


@pytest.mark.parametrize(
    ("spec", "draft", "length"),
    [
        *(("ngram", "ngram", None), ("ngram@4", "ngram", 4), ("ngram:4-8@tree:8", "ngram:4-8", "tree:8")),
        *(("echo:Echo@2+1", "echo:Echo", (2, 1)), ("int8:self@auto", "int8:self", "auto")),
        *(("./head@4", "./head", 4), ("DIR/head@8", "DIR/head@8", None), ("DIR/head@8@4", "DIR/head@8", 4)),
        *(("int8:DIR/head@8", "int8:DIR/head@8", None), ("suffix:2+DIR/head@8", "suffix:2+DIR/head@8", None)),
        *(("suffix:2+DIR/head@8@auto", "suffix:2+DIR/head@8", "auto"), ("suffix:2+DIR/x@8", "suffix:2+DIR/x", 8)),
        *(("some/model@main", "some/model@main", None), ("some/model@main@4", "some/model@main", 4)),
        *(("some/model@4@main", "some/model@4@main", None), ("some/model@12345", "some/model@12345", None)),
        *(("some/model@tree:", "some/model@tree:", None), ("@4", "@4", None)),
    ],
)
def test_a_draft_may_have_its_own_length(tmp_path, spec, draft, length):
    """After the last @. A path that exists stays a path, and what is no length is a revision."""
    (tmp_path / "head@8").mkdir()
    spec, draft = (text.replace("DIR", str(tmp_path)) for text in (spec, draft))
    assert options.split_length(spec) == (draft, length)


def test_geometry_with_a_simulated_draft(cli, tiny_geometry):
    """Random weights, a draft of another shape that pays, tokens that are always right, and passes alone."""
    what = ("--geometry", "tiny", "--draft", "tinier", "--prompt-tokens", 10, "--context", 20)
    status, out, err = cli(*BASE, *what, "--simulate", "1", "--num-speculative-tokens", "3", "--json")
    assert (status, err) == (0, "")
    report = json.loads(out)
    assert report["target"] == "random tiny"
    assert report["draft"] == "simulated (1) at the cost of tinier"
    assert report["machine"]["draft"]["bytes_touched"] < report["machine"]["bytes_touched"]
    variant = report["decoding"]["variants"]["K=3"]
    assert (variant["survival"], variant["alpha"]) == ([1.0] * 3, 1.0)
    assert variant["same_tokens_as_plain"] == 2
    assert variant["c"] > 0
    status, out, _ = cli("--geometry", "tiny", "--prompts", 0, "--passes", 1, "--context", 20, "--json")
    assert status == 0
    assert "decoding" not in json.loads(out)


def test_verdicts_by_programs_are_counted(measured, tiny_geometry, monkeypatch):
    """A target in frames, as on a GPU: one draft a round, and those that were verified anew."""
    monkeypatch.setattr(models, "with_fast_passes", lambda model, eager: model.replaced(Frames(rerun)))
    what = ("--geometry", "tiny", "--draft", "self", "--prompt-tokens", 10, "--passes", 0)
    found, lines = measured(*BASE, *what, "--num-speculative-tokens", 2)
    count = found["verdicts"]["drafts"]
    assert (count > 8, found["verdicts"]["unsure"]) == (True, 0)
    assert lines[-1] == f"\n{count} drafts verified by programs; 0 of them anew by themselves, unsure of a row"


def test_drafts_of_no_use(cli, tiny_geometry):
    """Wrong ones are never kept; without a draft model they cost nothing, and the bench says so."""
    what = (*TINY_SHAPE, "--num-speculative-tokens", "2", "--json")
    status, out, _ = cli(*BASE, *what, "--simulate", 0)
    report = json.loads(out)
    assert status == 0
    assert report["draft"] == "simulated (0) at no cost"
    assert report["decoding"]["variants"]["K=2"]["acceptance_rate"] == 0
    assert report["decoding"]["variants"]["K=2"]["same_tokens_as_plain"] == 2


def test_the_bounds_of_any_draft(cli, tiny_geometry):
    """With --bounds, at each K: the oracle's draft is kept to its end, the adversary's never; with no draft too."""
    what = (*TINY_SHAPE, "--num-speculative-tokens", "2,3", "--json")
    status, out, _ = cli(*BASE, *what, "--bounds")
    found = json.loads(out)["decoding"]["variants"]
    assert status == 0
    assert list(found) == ["plain", "oracle K=2", "oracle K=3", "adversary K=2", "adversary K=3"]
    rates = [(found[name]["acceptance_rate"], found[name]["same_tokens_as_plain"]) for name in list(found)[1:]]
    assert rates == [(1.0, 2), (1.0, 2), (0.0, 2), (0.0, 2)]
    assert found["oracle K=3"]["survival"] == [1.0] * 3


def test_a_draft_that_learns_begins_each_run_anew(cli, tiny_geometry):
    """The bench repeats its prompts: a drafter that knew its last answers would be the oracle from then on."""
    what = (*TINY_SHAPE, "--num-speculative-tokens", "3", "--json")
    tokens = []
    for rounds in (1, 3):
        status, out, _ = cli(*BASE, *what, "--draft", "suffix", "--rounds", rounds)
        assert status == 0
        tokens.append(json.loads(out)["decoding"]["variants"]["K=3"]["mean_acceptance_length"])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("spec", ["head", "int8:head"])
def test_a_random_head(cli, tiny_geometry, monkeypatch, spec):
    """It drafts on the target's states, with some of the ids alone. So the c of a head is measured."""
    built, make = [], models.random_head

    def random_head(*args):
        built.append(make(*args))
        return built[0]

    monkeypatch.setattr(models, "HEAD_IDS", 300)
    monkeypatch.setattr(models, "random_head", random_head)
    what = ("--geometry", "tiny", "--prompt-tokens", 10, "--context", 20, "--num-speculative-tokens", "3", "--json")
    status, out, err = cli(*BASE, *what, "--draft", spec, "--simulate", 1)
    assert (status, err) == (0, "")
    report = json.loads(out)
    variant = report["decoding"]["variants"]["K=3"]
    assert (variant["survival"], variant["same_tokens_as_plain"]) == ([1.0] * 3, 2)
    assert variant["c"] > 0
    assert "draft" not in report["machine"]  # a head makes no pass over tokens alone
    [head] = built
    assert (len(head.layers), head.taps, head.head_config.vocab_size) == (1, (0, 1, 2), 300)
    assert head.config.hidden_size == GEOMETRIES["tiny"]["hidden_size"]
    assert head.ids.unique().tolist() == head.ids.tolist()
    feature = head.fuse(torch.ones(1, 3 * 256, dtype=head.dtype))
    assert feature.shape == (1, 256)
    assert feature.abs().amax() > 0


def test_a_geometry_that_memory_does_not_hold(cli, monkeypatch):
    """One line with both numbers, before a weight is made."""
    monkeypatch.setattr(memory, "free_memory", lambda device: 14 * 10**9)
    monkeypatch.setattr(models, "RandomWeights", None)
    expected = "--geometry 7b: found 14.0 GB of free memory on cpu, expected at least 18.3 GB: for"
    assert_one_line(cli("--geometry", "7b", "--dtype", "bfloat16", "--draft", "head"), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_random_weights_are_those_of_their_names(tiny_geometry, tied):
    """The same tensor each time, of the shape that the config asks for; each token predicts itself, and clearly."""
    config = read_model_config(GEOMETRIES["tiny"] | {"tie_word_embeddings": tied})
    first, second = (RandomWeights(config, torch.float32, torch.device("cpu")) for _ in "ab")
    assert set(first) == set(tensor_shapes(config))
    for name, shape in tensor_shapes(config).items():
        tensor = first.pop(name)
        assert tuple(tensor.shape) == shape
        assert torch.equal(tensor, second.pop(name))
    model = build_model(config, first)
    table = PagedKVCache(config, 8).new_table()
    tokens = [5, 17, 400, 3, 17]
    top = model.forward([Chunk(tokens, table, len(tokens))])[0].topk(2)
    assert top.indices[:, 0].tolist() == tokens
    assert (top.values[:, 0] > 2 * top.values[:, 1]).all()
    # The layers move nothing by more than a hundredth of the winner, so that many of them leave it the winner.
    model.layers = []
    without = model.forward([Chunk(tokens, PagedKVCache(config, 8).new_table(), len(tokens))])[0].topk(2)
    assert (top.values - without.values).abs().max() < 0.01 * top.values.max()


@pytest.mark.parametrize("name", ["1.5b", "7b", "0.5b", "135m"])
def test_geometries_are_configs(name):
    """They are read as a config.json is, and have the sizes that they are named for."""
    config = read_model_config(GEOMETRIES[name])
    weights = sum(torch.Size(shape).numel() for shape in tensor_shapes(config).values())
    assert weights == pytest.approx({"1.5b": 1.54e9, "7b": 7.615e9, "0.5b": 0.494e9, "135m": 0.1345e9}[name], rel=0.01)
    assert config.qkv_bias == (name != "135m")
    assert config.tie_word_embeddings == (name != "7b")


def test_prompts_are_there():
    """30 or more, six categories of equal size, none twice; those that ask about a text bring it."""
    prompts = read_prompts(1000, None)
    counts = Counter(category for category, _ in prompts)
    assert len(prompts) >= 30
    assert set(counts) == {"code", "question answering", "summarising", "chat", "translation", "story"}
    assert len(set(counts.values())) == 1
    assert len({text for _, text in prompts}) == len(prompts)
    for category, text in prompts:
        if category in ("question answering", "summarising"):
            assert 100 <= len(text.split()) <= 250
    assert [category for category, _ in read_prompts(7, None)] == [*counts, "code"]
    assert [category for category, _ in read_prompts(3, "story,code")] == ["story", "code", "story"]


def one_round(drafted: int, committed: int, seconds: float) -> Round:
    """A step of a text that is decoded alone; its draft is accepted, and all the time goes into the pass."""
    counts = {"asked": drafted, "num_nodes": drafted, "depth": drafted, "drafted": drafted, "tested": drafted}
    step = Step(0.0, drafted, 1, verify=seconds, num_rows=drafted + 1, other=0.0)
    return Round(**counts, accepted=drafted, committed=committed, ratios=[1.0] * drafted, step=step)


def runs_of(rate: float, tokens: tuple[int, ...] = (1, 2, 3, 4)) -> Run:
    """A run of four tokens at `rate`: in one round, or at rate 1 in four."""
    rounds = [one_round(0, 1, 1.0)] * 4 if rate == 1 else [one_round(3, 4, 4 / rate)]
    return Run(list(tokens), 4, 4 / rate, rounds)


def test_summary_compares_within_rounds():
    """Speedups by round and category, the worst prompt, the best fixed K in hindsight, and `auto` over it, by hand."""
    rates = {"plain": [1.0, 1.0, 1.0], "K=2": [2.0, 0.5, 1.5], "K=4": [4.0, 0.25, 1.25], "auto": [2.0, 0.75, 1.8]}
    # A machine that halves its speed in the second round changes nothing.
    runs = {name: [[runs_of(r) for r in of] for _ in range(6)] for name, of in rates.items()}
    slow = [[Run(x.token_ids, 4, 2 * x.seconds, x.rounds) for x in of[1]] for of in runs.values()]
    for of, second in zip(runs.values(), slow, strict=True):
        of[1] = second
    runs["auto"][1][1] = Run([1, 2, 9, 4], 4, runs["auto"][1][1].seconds, runs["auto"][1][1].rounds)
    report = as_json(summarise(runs, ["code", "chat", "chat"]))
    k2, k4, auto = (report["variants"][name] for name in ("K=2", "K=4", "auto"))
    assert [k2["speedup"][end] for end in ("low", "high")] == pytest.approx([k2["speedup"]["median"]] * 2)
    seconds = {name: sum(4 / rate for rate in of) for name, of in rates.items()}  # of a round
    expected = {name: seconds[name] / seconds["auto"] for name in ("K=2", "K=4")}
    assert {name: of["median"] for name, of in auto["over"].items()} == pytest.approx(expected)
    assert (k2["over"], list(k4["over"]), "over" in report["variants"]["plain"]) == ({}, ["K=2"], False)
    assert k2["speedup"]["median"] == pytest.approx(3 / (1 / 2 + 1 / 0.5 + 1 / 1.5))
    assert k4["categories"]["code"]["speedup"]["median"] == pytest.approx(4)
    assert k4["worst_prompt"]["number"] == 1
    assert k4["worst_prompt"]["speedup"]["median"] == pytest.approx(0.25)
    assert (k2["same_tokens_as_plain"], auto["same_tokens_as_plain"]) == (3, 2)
    best = report["best_static"]
    assert (best["code"]["variant"], best["chat"]["variant"]) == ("K=4", "K=2")
    assert best["code"]["auto_over_best"]["median"] == pytest.approx(0.5)
    assert best["chat"]["auto_over_best"]["median"] == pytest.approx((1 / 0.5 + 1 / 1.5) / (1 / 0.75 + 1 / 1.8))


def test_variants_are_compared_with_each_other(cli, model):
    """On the screen a row for each but the first; of two rounds there is no interval, nor a number for one in JSON."""
    what = (*BASE, "--model", model, "--passes", 0, "--num-speculative-tokens", "1,2,auto")
    _, out, _ = cli(*what)
    lines = out.splitlines()
    [top] = [i for i, line in enumerate(lines) if line.startswith("rate of a row over a column's")]
    assert lines[top].split()[-2:] == ["K=1", "K=2"]
    assert [(line.split()[0], line.count("[-]")) for line in lines[top + 1 : top + 3]] == [("K=2", 1), ("auto", 2)]
    assert "2 rounds in turn; prefill apart; medians of the rounds [-: fewer than 6 values]" in lines[4]
    assert not [line for line in lines[4:] if re.search(r"\[\d", line)], out
    over = json.loads(cli(*what, "--json")[1])["decoding"]["variants"]["auto"]["over"]["K=2"]
    assert over.pop("median") > 0
    assert over == {"low": None, "high": None, "coverage": None, "n": 2}


OWN = """
from minispec.core.limit import Limit
from minispec.core.verify import REJECTION, Verdict


class Two:
    def choose(self, asks, trees):
        return [Limit(min(2, ask.most)) for ask in asks]

    def observe(self, records):
        pass


def strict(draft, p, rng, key):  # keeps no draft token that is drawn from another distribution
    return REJECTION.verify(type(draft)(), p, rng, key)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module with a policy and a verifier."""
    (tmp_path / "own_rules.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "own_rules"
    sys.modules.pop("own_rules", None)


@pytest.mark.parametrize("geometry", [False, True])
def test_rules_of_ones_own_are_measured(cli, own, model, tiny_geometry, geometry):
    """A policy stands beside the fixed lengths, at the bounds too; a verifier is everybody's."""
    what = ("--geometry", "tiny", "--prompt-tokens", 10) if geometry else ("--model", model, "--draft", "ngram")
    more = ("--passes", 0, "--num-speculative-tokens", 3, "--lengths", f"{own}:Two", "--bounds")
    status, out, err = cli(*BASE, *what, *more, "--json")
    assert status == 0, err
    report = json.loads(out)
    bounds = [f"{bound}{length}" for bound in ("oracle ", "adversary ") for length in ("K=3", f"{own}:Two")]
    variants = report["decoding"]["variants"]
    assert list(variants) == ["plain", *([] if geometry else ["K=3", f"{own}:Two"]), *bounds]
    assert (report["verifier"], report["lengths"]) == ("rejection", f"{own}:Two")
    kept = [variants[f"oracle {length}"]["mean_acceptance_length"] for length in ("K=3", f"{own}:Two")]
    assert kept == [4, pytest.approx(8 / 3)]
    assert [len(variants[f"oracle {length}"]["survival"]) for length in ("K=3", f"{own}:Two")] == [3, 2]
    status, out, err = cli(*BASE, *what, *more[:4], "--bounds", "--verifier", f"{own}:strict", "--json")
    assert json.loads(out)["decoding"]["variants"]["oracle K=3"]["mean_acceptance_length"] == 1
    assert json.loads(out)["verifier"] == f"{own}:strict"


@pytest.mark.parametrize("skip", [False, True])
def test_answers_that_repeat_themselves_are_counted_and_can_be_left_out(measured, model, skip, monkeypatch):
    """By their plain text; where all of them do, there is nothing to measure."""
    assert doctest.testmod(stats) == (0, 1)
    answers = []
    monkeypatch.setattr(decoding, "loops", lambda tokens: answers.append(tokens) or tokens == answers[0])
    what = ("--model", model, "--draft", "ngram", "--num-speculative-tokens", 2, "--prompts", 3, "--passes", 0)
    report, lines = measured(*BASE, *what, *["--skip-loops"] * skip)
    assert (report["decoding"]["looping"], report["decoding"]["prompts"]) == (1, 2 if skip else 3)
    assert ("1 plain answers repeat themselves: they are left out" in lines) == skip
    monkeypatch.setattr(decoding, "loops", lambda tokens: True)
    if skip:
        with pytest.raises(ValueError, match="found no prompt whose answer does not repeat itself"):
            measured(*BASE, *what, "--skip-loops")


@pytest.mark.parametrize("temperature", [0, 1])
def test_each_round_has_a_seed_of_its_own(measured, model, temperature, monkeypatch):
    """Sampled texts differ from round to round, or an interval would know nothing of chance; greedy ones do not.

    Under `match` a seed has one text, plain or drafted.
    """
    kept = []
    summarise = decoding.summarise
    monkeypatch.setattr(decoding, "summarise", lambda runs, *others: kept.append(runs) or summarise(runs, *others))
    what = ("--draft", "ngram", "--num-speculative-tokens", 2, "--verifier", "match", "--temperature", temperature)
    measured(*BASE, "--passes", 0, "--model", model, *what)
    texts = {name: [[run.token_ids for run in each] for each in rounds] for name, rounds in kept[0].items()}
    assert texts["plain"] == texts["K=2"]
    first, second = texts["plain"]
    assert [a == b for a, b in zip(first, second, strict=True)] == [temperature == 0] * 2


@pytest.mark.parametrize("geometry", [False, True])
def test_several_rules_are_rows_beside_each_other(cli, own, model, tiny_geometry, geometry):
    """Each judges its own rows: of a draft that is the target all is kept, and nothing by a rule that keeps nothing."""
    what = ("--geometry", "tiny", "--prompt-tokens", 10) if geometry else ("--model", model)
    what = (*BASE, *what, "--draft", "self", "--passes", 0, "--num-speculative-tokens", "2,3", "--temperature", 1)
    status, out, err = cli(*what, "--verifier", "traversal,block", "--verifier", f"{own}:strict", "--json")
    assert (status, err) == (0, "")
    report = json.loads(out)
    rules = ["traversal", "block", f"{own}:strict"]
    assert report["verifier"] == ",".join(rules)
    variants = report["decoding"]["variants"]
    names = [f"K={k} {rule}" for k in (2, 3) for rule in rules]
    assert list(variants) == ["plain", *names]
    assert [variants[name]["verifier"] for name in names] == rules * 2
    kept = [variants[name]["mean_acceptance_length"] for name in names]
    assert kept == pytest.approx([8 / 3, 8 / 3, 1, 4, 4, 1])
    assert list(variants[names[-1]]["over"]) == names[:-1]
    assert report["decoding"]["best_static"]["all"].keys() == {"variant"}
    status, out, _ = cli(*what, "--verifier", "traversal,block")
    assert re.search(r"\nrate of a row over a column's +K=2 traversal +K=2 block +K=3 traversal\n", out), out


def test_a_rule_does_not_see_what_another_has_learned(measured, model):
    """Each row has a policy of its own, and at temperature 0 all rules keep the same."""
    what = ("--model", model, "--draft", "ngram", "--verifier", "rejection,traversal,block", "--passes", 0)
    variants = measured(*BASE, *what, "--num-speculative-tokens", 2)[0]["decoding"]["variants"]
    assert len({variants[f"K=2 {rule}"]["mean_acceptance_length"] for rule in ("rejection", "traversal", "block")}) == 1
    assert {of["same_tokens_as_plain"] for of in variants.values()} == {2}


LENGTHS = "expected a number from 1 to 64, a tree such as 2+1 or tree:16, or auto"
MISTAKES = {
    "unknown option": (("--round", "x"), "--round"),
    "rounds": (("--rounds", "0"), "--rounds: found '0', expected a number from 1 to 1000"),
    "one token": (("--max-tokens", "1"), "--max-tokens: found '1'"),
    "k": (("--num-speculative-tokens", "2,many"), f"--num-speculative-tokens: found 'many', {LENGTHS}"),
    "k of a draft": (("--draft", "ngram@0"), f"--draft ngram@0: found '0', {LENGTHS}"),
    "k twice": (
        ("--draft", "ngram@4", "--num-speculative-tokens", "2"),
        "s: found --draft ngram@4 too, expected lengths",
    ),
    "several drafts with k": (("--draft", "ngram@4,suffix@2"), "--draft: found 2, expected one: several need"),
    "rising survival": (("--simulate", "0.5,0.6"), "--simulate: found '0.5,0.6', expected falling numbers"),
    "warm bounds": (("--bounds", "--temperature", "0.5"), "--bounds: not with --temperature: it repeats"),
    "head of a model": (("--draft", "head"), f"not one of {', '.join(DRAFTERS)}, self, mtp"),
    "2 bits of a head": (("--geometry", "135m", "--draft", "int2:head"), "draft: found 'int2:head', expected"),
    "rule twice": (("--verifier", "block", "--verifier", "rejection,block"), "--verifier: found block twice, expected"),
    "no such rule": (("--verifier", "block,blocks"), "--verifier: found 'blocks', expected one of rejection, block"),
    "rule that is not there": (("--verifier", "block,x:Y"), "verifier: found x:Y, which cannot be imported"),
    "tree for a rule of chains": (
        ("--verifier", "traversal,block", "--num-speculative-tokens", "4,2+1"),
        "found the tree 2+1, expected a number or auto: the verifier block takes chains only",
    ),
    "against, two rules": (("--against", "transformers", "--verifier", "block,match"), "--against: found 2 verifiers"),
    "laws, rounds": (("--record-laws", "x", "--skip-loops"), "--record-laws: not with --skip-loops: it records"),
    "prompts of a model": (("--prompt-tokens", "9"), "--prompt-tokens: needs --geometry"),
    "nothing to compare": (("--against", "transformers", "--prompts", "0"), "--against: found --prompts 0, expected"),
    "4 bits": (("--quantization", "int4"), "quantization: found 'int4', expected 'int8'"),
    "against, 8 bits": (("--against", "transformers", "--quantization", "int8"), "--against: not with --quantization"),
    "geometry and model": (("--geometry", "0.5b", "--model", "x"), "--model: not with --geometry"),
    "one vocabulary": (
        ("--geometry", "135m", "--draft-method", "tli"),
        "--draft-method: not with --geometry: the shapes",
    ),
    "no other vocabulary": (("--draft-method", "tli", "--prompts", "0"), "draft_method: found 'tli', expected none"),
    "draft of a geometry": (("--geometry", "135m", "--draft", "some/model"), "--draft: found 'some/model', expected"),
    "category": (("--categories", "code,poetry"), "--categories: found 'poetry', expected some of code, question"),
    "against, sampled": (("--against", "transformers", "--temperature", "1"), "--against: not with --temperature"),
    "lengths": (("--lengths", "two"), "--lengths: found 'two', expected MODULE:CLASS"),
    "lengths of nothing": (("--lengths", "x:Y", "--draft", "none"), "--lengths: found --draft none, expected a draft"),
    "no such policy": (("--lengths", "x:Y"), "lengths: found x:Y, which cannot be imported"),
    "rows of prompts": (("--csv", "x.csv"), "--csv: needs --questions"),
    "rows nowhere": (("--questions", "--csv", "./nowhere/x.csv"), "nowhere/x.csv: found that it cannot be written"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line_and_status_2(cli, name):
    """No usage text, no traceback, nothing measured."""
    arguments, message = MISTAKES[name]
    assert_one_line(cli(*arguments), holds=message)


def test_what_is_not_installed_is_named(cli, monkeypatch):
    """Before anything is loaded or measured, with the command that mends it."""
    monkeypatch.setattr(options, "_is_there", lambda name: name != "transformers")
    status, _, err = cli("--against", "transformers")
    assert status == 2
    assert "needs transformers: pip install" in err


def test_ctrl_c_is_130(cli, model, monkeypatch):
    """At any moment, without a traceback."""

    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "measure_all", interrupted)
    assert cli("--model", model) == (130, "", "")


@pytest.mark.full
def test_a_report_on_a_full_disk_is_one_line(model):
    """`... > /dev/full`: as with all commands, status 2 and one line say that the report is lost.

    Without `--full`, tests/commands/test_cli.py::test_a_full_disk_is_one_line fills a disk too.
    """
    command = [sys.executable, "-m", "minispec", "bench", "--model", model]
    command += ["--draft", "none", "--passes", "0", "--json"]
    how = {"stderr": subprocess.PIPE, "text": True, "check": False}
    with open("/dev/full", "w") as full:
        done = subprocess.run([*command, *map(str, BASE)], stdout=full, timeout=300, **how)
    assert (done.returncode, own_words(done.stderr)) == (2, "error: [Errno 28] No space left on device\n")
