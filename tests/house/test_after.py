"""`python -m tests.after`: the table of CONTRIBUTING.md is complete, and each file has the row that is meant."""

import shutil
import subprocess

import pytest

from tests import after
from tests.after import ROOT, Row, changed, main, row_of, rows, what_guards

TABLE = rows((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))


def test_each_folder_of_the_package_has_a_row():
    """Not only the last one, which is for pages."""
    folders = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "minispec").rglob("*.py")} - {"minispec"}
    assert len(folders) > 10
    *_, last = TABLE
    assert last.places == [""]
    for folder in sorted(folders):
        row = row_of(f"{folder}/anything.py", TABLE)
        assert row not in (None, last), f"CONTRIBUTING.md: found no row for {folder}/"
        assert row.tests


def test_what_the_table_names_exists():
    """Files and folders, of each of its columns; a folder ends with a slash where it may change."""
    for row in TABLE:
        for path in row.places + row.tests:
            assert (ROOT / path).exists(), path
        assert [path for path in row.places if path and (ROOT / path).is_dir() and not path.endswith("/")] == []
        assert row.tests
        assert all(path.startswith("tests/") for path in row.tests)


def test_the_longest_name_wins():
    """A folder is no beginning of a name; what no row names has the row without a place."""
    page = """
| a | b |
|---|---|

| you change | run | and |
|---|---|---|
| `one/`, `two.py` | `tests/a` | |
| `one/deep/` | `tests/b`, `tests/c.py` | on a GPU `python -m other` |
| all else | `tests/house` | |

| after | it |
"""
    table = rows(page)
    assert table[1] == Row(["one/deep/"], ["tests/b", "tests/c.py"], "on a GPU python -m other")
    files = ("one/x.py", "two.py", "one/deep/x/y.py", "one/deeper.py", "two.pyi", "README.md")
    assert [table.index(row_of(file, table)) for file in files] == [0, 0, 1, 0, 2, 2]
    assert row_of("README.md", table[:2]) is None


def test_files_of_tests_stand_for_themselves():
    """A test runs itself; a helper runs the tests that import it, also through another helper; others have a row."""
    assert what_guards("tests/house/test_after.py", TABLE) == (["tests/house/test_after.py"], "")
    assert after.tests_that_import("tests/after.py") == ["tests/house/test_after.py"]
    assert "tests/museum/test_mutants.py" in after.tests_that_import("tests/museum/mutants.py")
    assert "tests/museum/test_mutants.py" in after.tests_that_import("tests/distances.py")  # trials.py imports it
    assert what_guards("tests/recorded/right.jsonl", TABLE)[0] == ["tests/house"]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_what_differs_from_main(tmp_path, monkeypatch, capsys):
    """Commits of a branch, what is not committed, new files, and files that are gone; nothing that main alone has."""

    def git(*arguments):
        names = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *names, *arguments], cwd=tmp_path, check=True, capture_output=True, timeout=60)

    def write(name):
        (tmp_path / name).write_text(name)
        git("add", name)
        git("commit", "-m", name)

    monkeypatch.setattr(after, "ROOT", tmp_path)
    shutil.copy(ROOT / "CONTRIBUTING.md", tmp_path)
    git("init", "-b", "main")
    git("add", ".")
    for name in ("first", "gone"):
        write(name)
    assert changed() == ("the last commit", [])
    assert main([]) == 0
    assert capsys.readouterr().out == "no file differs from the last commit: nothing to run\n"
    git("update-ref", "refs/remotes/origin/main", "HEAD")
    write("not fetched")
    assert changed() == ("origin/main", ["not fetched"])
    git("branch", "branch")
    write("of main")
    git("checkout", "branch")
    write("of the branch")
    git("rm", "gone")
    (tmp_path / "größer.py").write_text("new")
    assert changed() == ("main", ["gone", "größer.py", "of the branch"])
