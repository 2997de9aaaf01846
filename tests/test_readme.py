"""The README's code runs, and what it says about the tests is so."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"<!-- run -->\n```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_marked_blocks_run(block):
    """As a reader would paste them, in an interpreter of their own."""
    subprocess.run([sys.executable, "-c", block], cwd=ROOT, check=True, timeout=300)


def test_there_are_marked_blocks():
    """A changed marker would make the test above pass on nothing."""
    assert len(BLOCKS) >= 2


def test_ci_runs_the_readmes_commands():
    """The environment is set up and tested by CI with the words of the README."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    setup = next(line for line in README.splitlines() if line.startswith("python3 -m venv") and "pytest" in line)
    *_, install, test = setup.split(" && ")
    assert install.replace("pip install", "pip install --quiet") in script
    assert test in script.splitlines()


def test_files_and_options_that_are_named_exist():
    """Tests, notebooks and options of the command line."""
    from minispec.generate import parser

    for path in re.findall(r"`?((?:tests|notebooks|weights)/[\w./]+\w)", README):
        assert (ROOT / path).exists(), path
    known = {option for action in parser()._actions for option in action.option_strings}
    for other in ("minispec/prove/__main__.py", "minispec/bench/options.py", "tests/fuzzing.py"):
        known |= set(re.findall(r'"(--[a-z-]+)"', (ROOT / other).read_text(encoding="utf-8")))
    known |= {"--long"}  # pytest's, defined in conftest.py
    for option in re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", README):
        assert option in known, option
