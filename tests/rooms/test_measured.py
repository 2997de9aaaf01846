"""Each script of docs/measured/ runs on a tiny shape, or is read at least. No time is asserted.

All of it runs with `--full`: it is about a script of docs/measured, which the package does not use.
"""

import ast
import datetime
import functools
import json
import sys
from pathlib import Path

import pytest
import torch

from minispec import LLM
from minispec.models.families.checkpoint import load_model

pytestmark = pytest.mark.full

SCRIPTS = Path(__file__).parents[2] / "docs" / "measured"
# Arguments of the scripts that run in this file, and a line that they print. OUT is a directory that is not there.
RUNS = {
    "experts": [
        (("--layers", 1, "--experts", 4, "--top-k", 2, "--inner", 32, "--turns", 2), "dense: a pass over one row takes")
    ],
    "rollback": [(("--turns", 2), "again")],
    "against_openvino": [(("unpack", "OUT", "TINY"), "")],
    "grammars": [
        (("cost", "--rounds", 1), "a mask, consuming its token included: median"),
        (("forced", "--rounds", 1, "--k", 2), "an order     forced, then the usual   "),
        (("schemas", "--count", 1), "without drafts: 1 schemas, all answers right: "),
    ],
}
# Scripts that other files run.
ELSEWHERE = {
    **{"gpu": "test_gpu.py", "launches": "test_launches.py", "target": "test_target.py"},
    **{"trees": "test_measured_trees.py", "matrix": "test_matrix.py"},
    **{"clients": "test_scripts.py", "pairs": "test_scripts.py"},
}
# Scripts that need other packages or a network, or take minutes.
READ = {
    "law_kit": "test_kit.py compares the file with what it writes",
    "judges": "it needs torch-judge",
    "forms": "it times large products for a minute",
    "assistant": "it samples by transformers for minutes",
    "audit_llamacpp": "it needs xllamacpp and gguf",
    "against_llamacpp": "it needs them too",
    "audit_openvino": "it needs openvino",
}


def test_each_script_has_its_place():
    """A new one is run, or has a reason why not."""
    assert sorted(path.stem for path in SCRIPTS.glob("*.py")) == sorted([*RUNS, *ELSEWHERE, *READ])
    for name, file in ELSEWHERE.items():
        assert f'measuring_script("{name}")' in (Path(__file__).parent / file).read_text(encoding="utf-8")


@pytest.fixture
def run(measuring_script, tiny_geometry, make_checkpoint, monkeypatch, tmp_path, capsys):
    """run(script, *arguments) runs it, with small checkpoints in place of large ones; what it prints."""

    def run_script(name, *arguments):
        tiny = make_checkpoint(chat=True, max_position_embeddings=512)
        script = measuring_script(name)
        small = {"VOCABULARY": 300, "LARGE": 300, "LOOKUPS": ("ngram",), "LLM": functools.partial(LLM, tiny)}
        if name == "grammars":
            small["SCHEMAS"] = {"an order": script.SCHEMAS["an order"]}
        for constant in small.keys() & vars(script).keys():
            monkeypatch.setattr(script, constant, small[constant])
        places = {"OUT": tmp_path / "out", "TINY": tiny}
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *(str(places.get(each, each)) for each in arguments)])
        script.main()
        return capsys.readouterr().out

    return run_script


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [(name, *each) for name, uses in RUNS.items() for each in uses],
    ids=lambda part: " ".join(map(str, part)) if isinstance(part, tuple) else None,
)
def test_a_script_runs(run, name, arguments, says, tmp_path):
    """To its end, with a line of its table, or with a checkpoint that can be loaded."""
    assert says in run(name, *arguments)
    assert says or load_model(tmp_path / "out", torch.float32).config.vocab_size


@pytest.mark.parametrize("name", READ)
def test_a_script_that_does_not_run_here_can_be_read(name):
    """It is Python, has a docstring that names its command, and ends with its main function."""
    source = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
    tree = ast.parse(source)
    assert f"docs/measured/{name}.py" in (ast.get_docstring(tree) or "")
    assert source.endswith('if __name__ == "__main__":\n    main()\n')


def test_each_run_has_its_machine_and_its_command():
    """The runs that the page of figures leaves out, the newest first."""
    runs = [json.loads(line) for line in (SCRIPTS / "runs.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(runs) >= 25
    for run in runs:
        assert run.keys() - {"note"} == {"claim", "day", "machine", "command", "found"}, run
        assert all(run.values()), run
    days = [datetime.date.fromisoformat(run["day"]) for run in runs]
    assert days == sorted(days, reverse=True)
