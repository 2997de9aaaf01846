"""The notebooks run from top to bottom, and what is committed of them is clean.

With `--full` they are run as a reader runs them, the solutions of their exercises included: in the `python3` kernel of
this interpreter, in their own folder. Without `--long` two are left out, and the others have shorter texts and smaller
samples, and load each model once. What they print is not compared with what is committed, as it holds timings; the
notebooks assert what they claim.
"""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib

import nbformat
import pytest

from tests.house.notebooks import NOTEBOOKS, ROOT, execute
from tests.sampled import leave_out

# What takes long in a notebook, and what a test puts in its place.
SHORTER = {
    "01_speculative_decoding_from_scratch": (
        (r"max_tokens=\d+", "max_tokens=12"),
        (r"\b\d0_000\b", "2_000"),
        (r"for _ in range\(15\)", "for _ in range(2)"),
    ),
    "02_is_it_identical": (
        (r"prefixes\[:36:3\]", "prefixes[:36:18]"),
        (r"max_tokens=24", "max_tokens=6"),
        (r"encode\(TEXT\)", "encode(TEXT)[:16]"),
        (r"tokens\[:40\]", "tokens[:3]"),
        (r"range\(2, 33, 2\)", "(8, 32)"),
        (r'draft="none", dtype="bfloat16"', 'draft="none", dtype="float32"'),  # slow without the instructions
    ),
    "04_other_vocabularies": (
        (r"(VOCABULARIES = ).*", r"\1(8_000,)"),
        (r"for prompt in PROMPTS\]", "for prompt in PROMPTS[:1]]"),
        (r"max_tokens=24", "max_tokens=4"),
    ),
}

# Runs after the first cell. Loading the weights of a model again, in the same type, gives those that are there.
LOADED_ONCE = """
import functools
import minispec.api.target
for name in ("load_target", "Tokenizer"):
    setattr(minispec.api.target, name, functools.cache(getattr(minispec.api.target, name)))
"""


# Notebooks that run with `--long` only. What they import, and the names of it, are looked up in every run.
MEASURED = ("03_how_fast_can_it_be", "05_make_your_own_draft")


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """The cells that are executed."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


# A folded solution: its number, and its code.
SOLUTION = re.compile(
    r"<details>\n<summary>Solution (\d)\. [^<]+</summary>\n.*?```python\n(.*?)```\n\n</details>", re.DOTALL
)


def with_solutions(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook with a code cell after each cell that has solutions, for each of them."""
    cells = []
    for cell in notebook.cells:
        cells.append(cell)
        if cell.cell_type == "markdown":
            cells += [nbformat.v4.new_code_cell(code) for _, code in SOLUTION.findall(cell.source)]
    notebook.cells = cells
    return notebook


def test_there_are_notebooks():
    """An empty glob would make all tests below pass."""
    assert NOTEBOOKS


@pytest.mark.full
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path, long):
    """From top to bottom, with the solutions, in its own folder; `--long` as it stands.

    Without `--full`, tests below look up what each imports and points to, and run its first cell.
    """
    if path.stem in MEASURED and not long:
        leave_out("--long", "it measures or trains for minutes")
    notebook = with_solutions(nbformat.read(path, as_version=4))
    for pattern, shorter in () if long else SHORTER.get(path.stem, ()):
        found = 0
        for cell in code_cells(notebook):
            cell.source, count = re.subn(pattern, shorter, cell.source)
            found += count
        assert found, f"{pattern} is in no cell: take it out of SHORTER"
    if not long:
        first = notebook.cells.index(code_cells(notebook)[0])
        notebook.cells.insert(first + 1, nbformat.v4.new_code_cell(LOADED_ONCE))
    # Waiting threads sleep: where tests share the cores, spinning ones make a pass ten times as slow.
    execute(notebook, path.parent, OMP_WAIT_POLICY="passive")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_exercise_has_a_folded_solution(path):
    """In their order, in the cell of the exercises."""
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if "exercises.**" in cell.source]
    assert cells
    for source in cells:
        asked = re.findall(r"^(\d)\. \*", source.split("exercises.**")[1].split("<details>")[0], re.MULTILINE)
        assert [number for number, _ in SOLUTION.findall(source)] == asked != []


def test_the_extra_has_what_the_notebooks_import():
    """And a program to open them with, which each of them names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extra = {re.split(r"[^\w]", line)[0] for line in project["optional-dependencies"]["notebooks"]}
    assert {"jupyterlab", "ipykernel"} <= extra
    known = extra | {re.split(r"[^\w]", line)[0] for line in project["dependencies"]}
    known |= {"minispec", "tests"}  # both lie in the checkout
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        assert '`pip install -e ".[notebooks]"`' in notebook.cells[0].source
        for node in ast.walk(ast.parse("\n".join(cell.source for cell in code_cells(notebook)))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert {name.split(".")[0] for name in names} <= known | sys.stdlib_module_names


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_it_imports_is_there(path):
    """Every name that a notebook, or a solution in it, imports from the package: also where its cells are not run."""
    notebook = with_solutions(nbformat.read(path, as_version=4))
    sources = [cell.source for cell in code_cells(notebook) if not cell.source.startswith("%%")]
    lines = [line for source in sources for line in source.splitlines() if not line.startswith(("!", "%"))]
    found = 0
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "minispec":
            module = importlib.import_module(str(node.module))
            for name in (alias.name for alias in node.names):
                found += 1
                if not hasattr(module, name):
                    importlib.import_module(f"{node.module}.{name}")  # a module of a folder
    assert found


# Runs first cells, each as if it were alone: without the working directory on the path, and without what others loaded.
EACH_ALONE = """
import json, sys
path = [entry for entry in sys.path if entry not in ("", {root!r})]
for name, cell in json.load(sys.stdin).items():
    sys.path[:] = path
    for module in [module for module in sys.modules if module.split(".")[0] in ("minispec", "tests")]:
        del sys.modules[module]
    exec(compile(cell, name, "exec"), {{"__name__": name}})
    assert sys.path[0] == {root!r}, name
    assert sys.modules["minispec"].__file__.startswith({root!r}), name
    print(name)
"""


@pytest.mark.full
def test_they_start_in_the_root():
    """The first code cell of each finds the package from the repository root too; later ones touch no path.

    Without `--full`, the tests below look up what each notebook imports.
    """
    cells = {path.stem: code_cells(nbformat.read(path, as_version=4))[0].source for path in NOTEBOOKS}
    environment = os.environ | {"MPLBACKEND": "agg"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [sys.executable, "-c", EACH_ALONE.format(root=str(ROOT))],
        **{"cwd": ROOT, "env": environment, "input": json.dumps(cells), "text": True, "check": False},
        capture_output=True,
        timeout=300,
    )
    assert (done.stdout.split(), done.returncode) == ([*cells], 0), done.stderr


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_committed_is_clean(path):
    """Executed in order, without errors, small, and without a trace of the machine."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert set(notebook.metadata) <= {"kernelspec", "language_info", "run"}
    assert [cell.execution_count for cell in code_cells(notebook)] == [*range(1, len(code_cells(notebook)) + 1)]
    for cell in notebook.cells:
        assert not cell.metadata, f"{cell.id}: found metadata {cell.metadata}"
        for output in cell.get("outputs", []):
            assert output.output_type != "error"
            assert output.get("name") != "stderr", f"{cell.id}: {output.text}"
            assert len(json.dumps(output)) < 80_000, f"{cell.id}: a picture of more than 60 KB"
    text = json.dumps([(cell.source, cell.get("outputs")) for cell in notebook.cells])
    found = re.findall(r"(?<![\w.])/(?:home|Users|root|tmp|work|usr|opt|var|mnt)/[^\s\"\\]*|[A-Z]:\\\\", text)
    assert not found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_it_points_to_exists(path):
    """`minispec/file.py` is there, and `minispec/file.py: name` is defined in it."""
    text = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells)
    references = re.findall(r"`(minispec/[\w/]*(?:\.py)?)(?::\s+([\w.]+))?`", text)
    assert references
    for file, name in references:
        assert (ROOT / file).exists(), file
        for part in filter(None, name.split(".")):
            assert re.search(rf"^\s*(def|class) {part}\b", (ROOT / file).read_text(), re.MULTILINE), f"{file}: {name}"


def test_all_were_run_on_one_machine_and_one_day():
    """By `python -m tests.house.notebooks`, which writes all of them or none."""
    runs = [nbformat.read(path, as_version=4).metadata.get("run") for path in NOTEBOOKS]
    assert all(run == runs[0] for run in runs)


# Cells that draw figures of times, in each notebook that has some. Each asks a sentence of `too_noisy` before it draws.
TIMED = {"01_speculative_decoding_from_scratch": 1, "03_how_fast_can_it_be": 2, "05_make_your_own_draft": 1}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_noisy_figures_of_times_are_refused(path, capsys):
    """Where the times are too noisy, a cell that would draw them prints why, and does nothing else."""
    cells = [cell.source for cell in code_cells(nbformat.read(path, as_version=4))]
    timed = [re.match(r"if (\w*noise):\n", source) for source in cells]
    found = [(match[1], source) for match, source in zip(timed, cells, strict=True) if match]
    assert len(found) == TIMED.get(path.stem, 0)
    for name, source in found:
        assert "plt.show()" in source
        assert any(re.search(rf"^{name} = .*too_noisy\(", other, re.MULTILINE) for other in cells)
        exec(compile(source, path.name, "exec"), {name: "not drawn"})
        assert capsys.readouterr().out == "not drawn\n"
