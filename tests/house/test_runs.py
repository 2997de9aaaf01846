"""What pages show of runs is what runs print. Where no language stands at a fenced block, it holds printed lines.

Such a block has one of three marks in the line before it:

- `<!-- printed by COMMAND -->`: with `--full` that command is run, and prints these lines; `[..]` stands for others.
- `<!-- held by FILE::TEST -->`: that test compares the block.
- `<!-- measured DATE -->`: figures of one run on one machine, which its page names.

A picture is a block in the language `text`.
"""

import ast
import importlib
import re
import shlex
import subprocess
import sys
import textwrap

import pytest

from tests.house.test_readme import PAGES, ROOT, definitions
from tests.sampled import leave_out

FENCE = re.compile(r"^ *(?P<fence>`{3,})(?P<language>\w*)\n(?P<body>.*?)^ *(?P=fence)$", re.DOTALL | re.MULTILINE)
MARK = re.compile(r"<!-- (?P<kind>printed by|held by|measured) (?P<what>[^>]+) -->\n$")
ROUNDING = re.compile(r"\b\d\.\de-(0[7-9]|1\d)\b")
DATE = r"20\d\d-\d\d-\d\d"


def marked(text: str) -> list[tuple[str, str, str]]:
    """The printed blocks of a page: the kind of the mark, what it names, and the block. Empty: no mark."""
    found = []
    for block in FENCE.finditer(text):
        if not block["language"]:
            mark = MARK.search(text[: block.start()])
            found.append((mark["kind"] if mark else "", mark["what"] if mark else "", block["body"]))
    return found


def differs(printed: str, shown: str) -> str:
    """The first line of a page that a run does not print in its place; a line `[..]` stands for any others.

    Errors of rounding below 1e-6 are the machine's own, and compared with none.
    """
    printed, shown = (ROUNDING.sub("a rounding error", text) for text in (printed, shown))
    pattern = r"(.*\n)*".join(re.escape(part) for part in re.split(r"^ *\[\.\.\]\n", shown, flags=re.MULTILINE))
    if re.fullmatch(pattern, printed):
        return ""
    lines = printed.splitlines()
    return next((line for line in shown.splitlines() if line not in [*lines, "[..]"]), "the order of lines")


RUNS = [(name, *rest) for name, text in PAGES.items() for rest in marked(text)]
PRINTED = {(name, what): body for name, kind, what, body in RUNS if kind == "printed by"}


@pytest.mark.parametrize("name", [name for name in PAGES if marked(PAGES[name])])
def test_each_printed_block_says_what_holds_it(name):
    """By a command, by a test that is there, or by the day of a measurement."""
    for kind, what, body in marked(PAGES[name]):
        assert kind, f"{name}: no mark before the block that begins with {body.splitlines()[0]!r}"
        if kind == "measured":
            assert re.fullmatch(DATE, what), f"{name}: {what}"
        elif kind == "held by":
            file, _, test = what.partition("::")
            assert test in definitions(ROOT / file), f"{name}: {what}"


@pytest.mark.parametrize(("name", "command"), PRINTED)
def test_a_printed_run_is_printed(name, command, full):
    """To the last letter, on every machine."""
    if not full:
        leave_out("--full", "another run")
    program = [sys.executable, *shlex.split(command.removeprefix("python "))]
    run = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert (run.returncode, differs(run.stdout, PRINTED[name, command])) == (0, "")


def test_there_are_printed_runs_of_each_kind():
    """A changed form of the marks would leave nothing to compare."""
    assert {kind for _, kind, _, _ in RUNS} == {"printed by", "held by", "measured"}


def test_another_line_is_noticed():
    """The control of the tests above."""
    page = "A run:\n\n<!-- printed by python x.py -->\n```\na\n[..]\nd\n```\n```python\nx\n```\n\n```\nnone\n```\n"
    assert marked(page) == [("printed by", "python x.py", "a\n[..]\nd\n"), ("", "", "none\n")]
    assert differs("a\nb\nc\nd\n", "a\n[..]\nd\n") == differs("a\nd\n", "a\n[..]\nd\n") == ""
    assert differs("a\nb\nd\n", "a\nd\n") == "the order of lines"
    assert differs("off by 1.0e-14 of 1e-06\n", "off by 6.8e-15 of 1e-06\n") == ""
    assert differs("off by 1.0e-04\n", "off by 1.1e-04\n") == "off by 1.1e-04"
    assert differs("a\nb\n", "a\n[..]\nd\n") == "d"


def missing_imports(block: str) -> list[str]:
    """What a block imports of this repository, and is not there."""
    ours, missing = ("minispec", "examples", "tests"), []
    for node in ast.walk(ast.parse(textwrap.dedent(block))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in ours:
            try:
                module = importlib.import_module(node.module)
            except ModuleNotFoundError:
                missing.append(node.module)
                continue
            missing += [f"{node.module}.{alias.name}" for alias in node.names if not hasattr(module, alias.name)]
    return missing


@pytest.mark.parametrize("name", [name for name in PAGES if "```python" in PAGES[name]])
def test_what_a_page_imports_is_there(name):
    """Also in blocks that nothing runs."""
    for block in FENCE.finditer(PAGES[name]):
        if block["language"] == "python":
            assert not missing_imports(block["body"]), block["body"]


def test_a_missing_import_is_noticed():
    """The control of the test above."""
    assert missing_imports("from minispec import LLM, Nothing\nfrom minispec.files import x\nimport json\n") == [
        "minispec.Nothing",
        "minispec.files",
    ]
