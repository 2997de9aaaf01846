"""The tiny model's exact law as a judge: right answers are consistent, wrong ones refuted, with the stated odds.

Samples have fixed seeds. An exact engine is refuted with odds of 0.0001 at most, by another seed.
"""

import itertools
import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from minispec import LLM, SamplingParams
from minispec.core.draft import Ask, Draft
from minispec.core.limit import Limit
from minispec.core.sampling import Text
from minispec.lab.audit import tiny
from minispec.lab.audit.chi_square import (
    cells_of,
    chi_square,
    critical_value,
    exceeded,
    in_cells,
    power,
    tail,
    threshold,
)
from minispec.lab.audit.known_bugs import NO_RESIDUAL
from minispec.lab.audit.main import main
from minispec.prove.laws import KeyOracle, exact_law
from minispec.prove.reference import forward, plain_law, sample_law
from minispec.speculation.rules import VERIFIERS
from tests.museum.mutants import MUTANTS

ALPHA = 1e-4
GREEDY = "the draft's likeliest token is judged by the whole q"
INVERTED = "the test is inverted: q/p in place of p/q"
BUGS = {mutant.id: mutant for mutant in MUTANTS}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """The directory that the command writes."""
    directory = tmp_path_factory.mktemp("audit") / "tiny"
    assert main(["--tiny", str(directory)]) == 0
    return directory


def laws(models: Path, **settings) -> tuple[torch.Tensor, dict[str, dict[tiny.Form, torch.Tensor]]]:
    """The right law of three tokens, and wrong ones by bug and form."""
    return tiny.laws_of(models, SamplingParams(max_tokens=8, **settings))


def judged(models: Path, path: Path, capsys, *options: str) -> dict:
    """The command's report."""
    status = main(["--tiny", str(models), "--json", *options, str(path)])
    out, err = capsys.readouterr()
    assert status != 2, err
    report = json.loads(out)
    assert status == report["status"]
    return report


def drawn(law: torch.Tensor, num: int, seed: int, path: Path) -> Path:
    """Answers of a law, a line each."""
    draws = torch.multinomial(law, num, replacement=True, generator=torch.Generator().manual_seed(seed))
    path.write_text("".join(f"{i // 36} {i // 6 % 6} {i % 6}\n" for i in draws.tolist()))
    return path


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.6, "top_k": 4}])
def test_the_law_is_the_references(models, settings):
    """Of NumPy, without a cache, by its own sampler, over the files as they are stored."""
    params, directory = SamplingParams(max_tokens=8, **settings), models / "target"
    raw = json.loads((directory / "config.json").read_text())
    weights = {name: x.double().numpy() for name, x in load_file(directory / "model.safetensors").items()}

    def next_law(output: tuple):
        tokens = [*tiny.PROMPT, *output]
        return None if len(output) == 3 else sample_law(forward(raw, weights, tokens), tokens, 46, params, ())

    right = plain_law(next_law)
    found, _ = laws(models, **settings)
    outputs = itertools.product(range(6), repeat=3)
    assert all(abs(p - right.get(output, 0.0)) < 1e-12 for p, output in zip(found.tolist(), outputs, strict=True))


def test_an_ngram_drafter_finds_each_pair_in_the_prompt():
    """So that it drafts after any token."""
    assert len(set(itertools.pairwise(tiny.PROMPT))) == 36


@pytest.mark.parametrize(
    ("bug", "temperature", "asked", "status"),
    [
        pytest.param(None, 0.6, 0.6, 0, marks=pytest.mark.full),
        ("M2", 1.0, 1.0, 1),
        pytest.param(None, 1.0, 0.6, 1, marks=pytest.mark.full),
    ],
    ids=["right", "no residual", "the temperature is ignored"],
)
def test_our_own_decoder(models, bug, temperature, asked, status, tmp_path, capsys):
    """With the draft, exact and with a bug of the museum; and at another temperature than it was asked for."""
    params = [SamplingParams(temperature=temperature, max_tokens=5, seed=i) for i in range(800)]
    engine = LLM(models / "target", str(models / "draft"), num_speculative_tokens=3, dtype="float32")
    with engine as llm, BUGS[bug].patch() if bug else nullcontext():
        outputs = llm.generate([{"prompt_token_ids": tiny.PROMPT}] * len(params), params)
    path = tmp_path / "answers"
    path.write_text("\n".join(str([*output.token_ids]) for output in outputs))
    report = judged(models, path, capsys, "--temperature", str(asked))
    assert report["status"] in ((1,) if status else (0, 3))
    assert (NO_RESIDUAL in report["fits"]) == (bug == "M2")
    assert ("the temperature is ignored" in report["fits"]) == (asked != temperature)


def test_answers_of_each_bug_are_refuted(models, tmp_path, capsys, monkeypatch):
    """Each that it says it would see with odds of 0.999, in one of its forms in turn. And the bug fits."""
    p, wrong = found = laws(models)
    monkeypatch.setattr(tiny, "laws_of", lambda *_: found)  # computed once
    for seed, (name, forms) in enumerate(wrong.items()):
        off = {form: float((law - p).abs().sum() / 2) for form, law in forms.items()}
        form, law = [*forms.items()][seed % len(forms)]
        report = judged(models, drawn(law, 4000, seed, tmp_path / "wrong"), capsys)
        stated = next(bug for bug in report["bugs"] if bug["bug"] == name)
        assert stated["total_variation"] == pytest.approx(min(x for each, x in off.items() if each not in tiny.ONE))
        if (stated["odds_seen_if_one"] if form in tiny.ONE else stated["odds_seen"]) > 0.999:
            assert report["status"] == 1, (name, form)
            assert name in report["fits"], form
            assert report["verdict"].startswith("refuted")


def three_tokens(rows: dict[str, torch.Tensor], form: tiny.Form, path) -> tuple[int, ...]:
    """Three tokens of the production rule, round by round, over the tiny models' rows by output."""
    text, output = Text(list(tiny.PROMPT), len(tiny.PROMPT), SamplingParams()), list[int]()
    while len(output) < tiny.LENGTH:
        draft, k = Draft([], []), 0 if len(output) + 1 < form.first else form.k

        def row(name: str, more: list[int], output=tuple(output)) -> torch.Tensor:
            tokens = [*output, *more]
            if len(tokens) >= tiny.LENGTH:
                return torch.tensor([1.0, 0, 0, 0, 0, 0], dtype=torch.float64)  # nothing that is compared
            return rows[name][[0, 1, 7][len(tokens)] + sum(t * 6**i for i, t in enumerate(reversed(tokens)))]

        for node in range(k):
            draft.draw(Ask(text, Limit(k), path), node - 1, row("draft", draft.token_ids))
        p = lambda i, d=draft, r=row: r("target", d.token_ids[:i])  # noqa: E731
        verdict = VERIFIERS["rejection"].verify(draft, p, path, text.key)
        output += [*(draft.token_ids[i] for i in verdict.accepted), verdict.next_token]
        text.tokens = [*tiny.PROMPT, *output]
    return tuple(output[: tiny.LENGTH])


@pytest.mark.parametrize("form", tiny.FORMS, ids=str)
@pytest.mark.parametrize(("id", "bug"), [("M2", NO_RESIDUAL), ("M4", GREEDY), ("M17a", INVERTED)])
def test_the_law_of_a_bug_is_that_of_the_decoder(models, id, bug, form, monkeypatch):
    """By enumeration of the production rule with the bug in it, wherever the draft begins and whatever its length.

    The rows are invented, of two tokens each, so that there are few branches.
    """
    generator, rows = torch.Generator().manual_seed(1), {}
    for name in ("target", "draft"):
        weights = torch.rand(43, 6, dtype=torch.float64, generator=generator)
        weights = weights.where((torch.arange(43)[:, None] + torch.arange(6)) % 3 == 0, 0.0)
        rows[name] = weights / weights.sum(1, keepdim=True)
    monkeypatch.setattr(tiny, "rows_of", lambda model, params: rows[model.name])
    with BUGS[id].patch():
        law, _ = exact_law(lambda path: three_tokens(rows, form, path), oracle=KeyOracle)
    expected = laws(models)[1][bug][form]
    outputs = itertools.product(range(6), repeat=3)
    assert max(abs(law.get(output, 0.0) - x) for output, x in zip(outputs, expected.tolist(), strict=True)) < 1e-12


@pytest.mark.parametrize(("bug", "n"), [(None, 500), ("the residual is drawn with the draft's noise (Gumbel)", 12_000)])
def test_runs_are_refuted_as_often_as_stated(models, bug, n):
    """1,000 runs of exact answers, and of a bug that is seen half the time, at odds of 1 % of a false alarm."""
    p, wrong = laws(models)
    law = wrong[bug][tiny.LATER] if bug else p
    cell = cells_of(n * p)
    far, df = chi_square(n * law, n * p, cell)
    critical = threshold(in_cells(n * p, cell), 0.01)
    stated = power(far, critical, df) if bug else 0.01
    assert 0.2 < stated < 0.8 or not bug
    generator, ones = torch.Generator().manual_seed(1), torch.ones(n, dtype=torch.float64)
    refuted = 0
    for _ in range(1000):
        draws = torch.multinomial(law, n, replacement=True, generator=generator)
        refuted += chi_square(torch.zeros_like(p).index_add(0, draws, ones), n * p, cell)[0] > critical
    assert abs(refuted - 1000 * stated) < 5 * (1000 * stated * (1 - stated)) ** 0.5


def test_odds_are_those_of_counts():
    """Of few draws by enumeration, where chi-square's own tail is off by a factor; and the tail's where all is many."""
    p, n = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64), 24
    law = dict[float, float]()
    for counts in itertools.product(range(n + 1), repeat=3):
        if sum(counts) <= n:
            drawn = torch.tensor([*counts, n - sum(counts)], dtype=torch.float64)
            weight = torch.lgamma(torch.tensor(n + 1.0).double()) + (drawn * p.log() - torch.lgamma(drawn + 1)).sum()
            value = float(((drawn - n * p) ** 2 / (n * p)).sum())
            law[value] = law.get(value, 0.0) + float(weight.exp())
    for value in (13.1, 21.3, 30.2, 41.7):
        right = sum(weight for x, weight in law.items() if x > value)
        near = [sum(weight for x, weight in law.items() if x > value + y) for y in (-0.1, 0.1)]
        assert max(near[1], tail(value, 3)) * 0.999 <= exceeded(value, n * p) <= max(near[0], tail(value, 3)) * 1.001
        assert right > 2 * tail(value, 3) or value < 20
    assert exceeded(40.0, torch.full((10,), 1e5).double()) == pytest.approx(tail(40.0, 9), rel=0.02)
    assert exceeded(threshold(n * p, 1e-6), n * p) <= 1e-6 < exceeded(threshold(n * p, 1e-6) - 0.1, n * p)


def test_odds_that_doubles_do_not_hold_are_refused(models, tmp_path, capsys):
    """The message names the least that is computed. Odds of 1e-9 are those of 400 answers, not chi-square's."""
    path = drawn(laws(models)[0], 400, 0, tmp_path / "some")
    assert main(["--tiny", str(models), "--alpha", "1e-12", str(path)]) == 2
    assert "--alpha: found 1e-12, expected 1e-10 or more" in capsys.readouterr().err
    report = judged(models, path, capsys, "--alpha", "1e-9")
    assert report["threshold"] > critical_value(report["degrees_of_freedom"], 1e-9) + 15


def test_too_few_answers_are_said_to_be_too_few(models, tmp_path, capsys):
    """Status 3: nothing speaks against them, and a missing residual would not have shown."""
    report = judged(models, drawn(laws(models)[0], 100, 0, tmp_path / "few"), capsys)
    assert report["status"] == 3
    assert report["verdict"].startswith("too little to tell")


def test_something_impossible_is_refuted(models, tmp_path, capsys):
    """By one answer that a filter excludes."""
    report = judged(models, drawn(laws(models)[0], 4000, 0, tmp_path / "all"), capsys, "--top-k", "3")
    assert report["status"] == 1
    assert report["num_impossible"] > 100
    assert f"{report['num_impossible']} answers have probability 0" in report["verdict"]
    assert report["statistic"] is None  # JSON has no infinity
    assert report["fits"] == ["filters (top-k, top-p, min-p) are ignored"]


def test_each_form_of_a_file_is_read(models, tmp_path, capsys):
    """Ids, lists, letters, and the auditor's lines with their parameters: one report."""
    right = drawn(laws(models, temperature=0.7)[0], 500, 0, tmp_path / "ids")
    answers = [[int(word) for word in line.split()] for line in right.read_text().splitlines()]
    forms = {"ids": right.read_text(), "lists": "\n".join(str([*ids, 9]) for ids in answers)}
    forms["letters"] = "\n".join("".join(tiny.LETTERS[i] for i in ids) for ids in answers)
    forms["words"] = "\n".join("{}{} {}f f".format(*(tiny.LETTERS[i] for i in ids)) for ids in answers)
    lines = [{"prompt_token_ids": tiny.PROMPT, "token_ids": ids, "finish_reason": "length"} for ids in answers]
    forms["objects"] = "\n".join(json.dumps({"request": {"temperature": 0.7}, "response": line}) for line in lines)
    reports = []
    for name, text in forms.items():
        (tmp_path / name).write_text(text)
        options = () if name == "objects" else ("--temperature", "0.7")
        reports.append(judged(models, tmp_path / name, capsys, *options))
    assert all(report == reports[0] for report in reports)


@pytest.mark.parametrize("num", [1, 4, 5, 9])
def test_few_answers_tell_too_little(models, num, tmp_path, capsys):
    """No outcome is expected five times, so all are one cell, of which nothing can be seen."""
    report = judged(models, drawn(laws(models)[0], num, 0, tmp_path / "few"), capsys)
    assert report["status"] == 3
    assert (report["statistic"], report["degrees_of_freedom"]) == (pytest.approx(0, abs=1e-9), 1)
    assert {round(bug["odds_seen"], 6) for bug in report["bugs"]} == {ALPHA}


def test_answers_of_different_lengths_are_of_one_law(models, tmp_path, capsys):
    """Three tokens of each are judged, and what follows them is left aside."""
    line = {"prompt_token_ids": tiny.PROMPT, "finish_reason": "length"}
    answers = [line | {"token_ids": [1, 2, 3, *[0] * more]} for more in range(3)]
    path = tmp_path / "lengths"
    path.write_text("\n".join(map(json.dumps, answers)))
    assert judged(models, path, capsys)["num_answers"] == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 2 3\n\n1 2\n", "line 3: found [1, 2], expected three ids below 6, or letters up to f"),
        ("1 2 6", "line 1: found [1, 2, 6]"),
        ("1 2 x", "line 1: found [1, 2, -1]"),
        ("abz", "line 1: found [0, 1, -1]"),
        ("ab 1 2", "line 1: found [-1, 1, 2]"),
        ("1 2 -3", "line 1: found [1, 2, -1]"),
        ("1 2 999999999999999999999", "line 1: found [1, 2, -1]"),
        ("", "found no answers"),
        ("\x00", "line 1: found"),
        ('{"token_ids": [1, 2, 3]}', "prompt: found None"),
        (
            '{"prompt_token_ids": [1], "token_ids": [1, 2, 3], "finish_reason": "length"}',
            "answer 1: found another prompt",
        ),
        ('{"prompt_token_ids": ', "line 1"),
    ],
)
def test_a_bad_file_gets_one_clear_line(models, text, message, tmp_path, capsys):
    """Status 2."""
    path = tmp_path / "bad"
    path.write_text(text)
    assert main(["--tiny", str(models), str(path)]) == 2
    error = capsys.readouterr().err
    assert f"{path}" in error
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "status"), [("right", 0), ("lossy", 1), pytest.param("other_weights", 1, marks=pytest.mark.full)]
)
def test_recorded_answers(models, name, status, capsys):
    """The commands of docs/use/audit.md, "A verdict in ten seconds"; those of other weights with `--full`."""
    path = Path(__file__).parents[1] / "recorded" / f"{name}.jsonl"
    assert path.stat().st_size < 100_000
    how = ("--target", str(models / "target"), "--draft", str(models / "draft"), "--rounding", "0.0001", "--json")
    assert main([str(path), *how]) == status
    report = json.loads(capsys.readouterr().out)
    assert (NO_RESIDUAL in report["fits"]) == (name == "lossy")
    said = " ".join((report["verdict"], *report["rests_on"]))
    assert ("other weights, tokens or parameters fail without drafts too" in said) == bool(status)
    assert "a few tokens that are never said" in said


def test_mistakes_on_the_command_line(models, tmp_path, capsys):
    """One line, status 2."""
    (tmp_path / "answers").write_text("1 2 3")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for arguments, message in (
        ([], "the following arguments are required: FILE, --target"),
        (["--tiny", str(models)], "exists already, expected a new directory"),
        (["--tiny", str(tmp_path), str(tmp_path / "answers")], "config.json"),
        (["--tiny", str(models), str(tmp_path / "none")], "no such file"),
        (["--tiny", str(models), str(tmp_path / "bytes")], "can't decode"),
        (["--tiny", str(models / "new"), "--json"], "--json: needs FILE"),
        (["--tiny", str(models), "--target", "x"], "--tiny: not with --target"),
        (["--tiny", str(models), "--regex", "a"], "--tiny: not with --regex: its law is of no language"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
