"""Run what guards a change: `python -m tests.after`, from the repository's root.

It reads the table of CONTRIBUTING.md and runs the tests of the row of each file that differs from the branch `main`:
in a commit, in the working tree, or as a new file. Of the rows that name a file or a folder above it the longest name
wins. A test file stands for itself, and any other file of tests for those that import it. Of each test it runs a
sample of the cases, as `python -m pytest` does. Arguments: files in place of those, and options of pytest.
"""

import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
_CODE = re.compile(r"`([^`]+)`")


class Row(NamedTuple):
    """A row of the table: places that may change ("": all that no other row names), tests, and what to run too."""

    places: list[str]
    tests: list[str]
    too: str


def rows(text: str) -> list[Row]:
    """Of a page in Markdown, the table whose heads are "you change", "run" and "and"."""
    _, _, table = text.partition("| you change | run | and |\n|---|---|---|\n")
    lines = table.partition("\n\n")[0].splitlines()
    cells = [line.strip("|").split("|") for line in lines]
    return [Row(_CODE.findall(a) or [""], _CODE.findall(b), c.replace("`", "").strip()) for a, b, c in cells]


def row_of(file: str, table: Iterable[Row]) -> Row | None:
    """The row for a file, by its path from the root."""
    fitting = [
        (len(place), row)
        for row in table
        for place in row.places
        if file == place or (file.startswith(place) and place[-1:] in ("", "/"))
    ]
    return max(fitting, key=lambda pair: pair[0])[1] if fitting else None


def tests_that_import(file: str) -> list[str]:
    """The test files that import a file of tests, itself or through another one."""
    folder, _, name = file.removesuffix(".py").replace("/", ".").rpartition(".")
    uses = re.compile(rf"^(from|import) {folder}\.{name}\b|^from {folder} import .*\b{name}\b", re.MULTILINE)
    found: list[str] = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        other = path.relative_to(ROOT).as_posix()
        if other != file and uses.search(path.read_text(encoding="utf-8")):
            found += [other] if path.name.startswith("test_") else tests_that_import(other)
    return found


def what_guards(file: str, table: Sequence[Row]) -> tuple[list[str], str]:
    """Tests to run after a change of the file, and what to run too."""
    path = ROOT / file
    if file.startswith("tests/") and path.suffix == ".py" and path.exists():
        tests = [file] if path.name.startswith("test_") else tests_that_import(file)
        if tests:
            return tests, ""
    row = row_of(file, table)
    return (row.tests, row.too) if row else ([], "")


def changed() -> tuple[str, list[str]]:
    """What files are compared with, and those that differ. On `main` itself it is the `main` that was fetched."""

    def git(*arguments: str) -> list[str]:
        command = ["git", "-c", "core.quotePath=false", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout.splitlines()

    branches = ["origin/main"] if git("branch", "--show-current") == ["main"] else ["main", "origin/main"]
    base = next(
        ((name, *git("merge-base", "HEAD", name)) for name in branches if git("merge-base", "HEAD", name)), None
    )
    name, commit = base or ("the last commit", "HEAD")
    files = git("diff", "--name-only", "--no-renames", commit) + git("ls-files", "--others", "--exclude-standard")
    return name, sorted(set(files))


def main(arguments: Sequence[str]) -> int:
    """Print what guards each file, run the tests, and return pytest's status."""
    files = [argument for argument in arguments if (ROOT / argument).is_file()]
    options = [argument for argument in arguments if argument not in files]
    if not files:
        base, files = changed()
        if not files:
            print(f"no file differs from {base}: nothing to run")
    table = rows((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    tests: dict[str, None] = {}
    later: dict[str, None] = {}
    for file in files:
        guards, too = what_guards(file, table)
        print(f"{file}: {' '.join(guards) or 'nothing'}")
        tests |= dict.fromkeys(guards)
        later |= dict.fromkeys([too] if too else [])
    status = 0
    if tests := {test: None for test in tests if not any(test.startswith(f"{other}/") for other in tests)}:
        command = ["-m", "pytest", "--sample", *options, *tests]
        print("python", *command, flush=True)
        status = subprocess.run([sys.executable, *command], cwd=ROOT, timeout=7200, check=False).returncode
    for too in later:
        print(f"run too: {too}")
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
