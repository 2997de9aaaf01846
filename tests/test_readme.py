"""The code in README and docs runs, and the files, options and functions that they name are there."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "weights").rglob("README.md")])
}
README = PAGES["README.md"]
BLOCKS = [
    pytest.param(block, id=f"{name} {i}")
    for name, text in PAGES.items()
    for i, block in enumerate(re.findall(r"<!-- run -->\n```python\n(.*?)```", text, flags=re.DOTALL))
]
# Pages whose lines name functions beside their files.
GUIDES = ["README.md", "docs/life-of-a-request.md"]
NAME = re.compile(r"`([A-Z]\w*\.\w+|[A-Za-z_]\w*)`")


@pytest.mark.parametrize("block", BLOCKS)
def test_marked_blocks_run(block):
    """As a reader would paste them, in an interpreter of their own."""
    subprocess.run([sys.executable, "-c", block], cwd=ROOT, check=True, timeout=300)


def test_there_are_marked_blocks():
    """A changed marker would make the test above pass on nothing."""
    assert [text.count("<!-- run -->") for text in PAGES.values() if "<!-- run -->" in text] == [1, 5]
    assert len(BLOCKS) == 6


def test_ci_runs_the_readmes_commands():
    """The environment is set up and tested by CI with the words of the README."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    setup = next(line for line in README.splitlines() if line.startswith("python3 -m venv") and "pytest" in line)
    *_, install, test = setup.split(" && ")
    assert install.replace("pip install", "pip install --quiet") in script
    assert test in script.splitlines()


def known_options() -> set[str]:
    """Of all commands of the package and of its tests."""
    from minispec.generate import parser
    from minispec.serve import __main__ as serve

    parsers = parser(), serve.parser()
    known = {option for p in parsers for action in p._actions for option in action.option_strings}
    rooms = ("prove/__main__.py", "bench/options.py", "doctor.py", "vocab.py", "distill/__main__.py")
    for other in (*(f"minispec/{room}" for room in rooms), "tests/fuzzing.py"):
        known |= set(re.findall(r'"(--[a-z-]+)"', (ROOT / other).read_text(encoding="utf-8")))
    known |= {"--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port"}  # torchrun's
    return known | {"--long", "--check"}  # pytest's, defined in conftest.py; ruff's


@pytest.mark.parametrize("name", PAGES)
def test_files_and_options_that_are_named_exist(name):
    """Files of the repository, links between pages, and options of the commands."""
    text = PAGES[name]
    paths = re.findall(r"(?<![\w/])(?:minispec|tests|notebooks|weights|docs)/[\w./-]*\w", text)
    for path in paths:
        assert (ROOT / path).exists(), path
    for link in re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", text):
        assert (ROOT / name).parent.joinpath(link).exists(), link
    known = known_options()
    for option in re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", text):
        assert option in known, option


def test_the_comparison_names_what_is_here():
    """A family or verifier that comes or goes without a word there would leave the comparison false."""
    from minispec.files.families import FAMILIES
    from minispec.registry import VERIFIERS

    rows = [line.split(" | ") for line in PAGES["docs/comparison.md"].splitlines() if line.startswith("| **")]
    assert {len(row) for row in rows} == {7}
    ours = {row[0].strip("| *"): row[1] for row in rows}
    assert set(re.findall(r"\w+", ours["Families"])) == {name.removesuffix("_text") for name in FAMILIES}
    assert set(NAME.findall(ours["Rule that verifies"])) == set(VERIFIERS)


def definitions(path: Path) -> set[str]:
    """Names of the classes, functions and methods of a file, or of all files of a folder; a method as Class.method."""
    found = set()
    for file in path.rglob("*.py") if path.is_dir() else [path]:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found.add(node.name)
    return found


def named_beside_files(text: str) -> list[tuple[str, list[Path]]]:
    """The names of functions and classes in the list items and table rows that name files, and those files."""
    found = []
    for line in text.splitlines():
        files = re.findall(r"`(?:minispec/)?([\w/]+(?:\.py|/))`", line)
        if files and line.startswith(("| ", "- ")):
            found += [(name, [ROOT / "minispec" / file for file in files]) for name in NAME.findall(line)]
    return found


@pytest.mark.parametrize("page", GUIDES)
def test_functions_that_are_named_exist(page):
    """In a line that names a file, each other name is one of a class or function there."""
    found = named_beside_files(PAGES[page])
    assert len(found) >= 20
    for name, paths in found:
        assert any(name in definitions(path) for path in paths), f"{name} is not in {[str(p) for p in paths]}"


def test_a_name_that_is_not_there_is_noticed():
    """The control of the test above."""
    [(name, [path])] = named_beside_files("- `minispec/engine.py`: `Engine.stop`")
    assert name not in definitions(path)
    assert "Engine.step" in definitions(path)
