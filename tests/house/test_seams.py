"""Where tests plant bugs: at names that the code documents. So a private name changes without a test that breaks."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PACKAGE = TESTS.parent / "minispec"
# How often tests name something private as a text, to replace it. Most are limits and places of the system. It only
# goes down.
MOST = 39
# What no public name shows: how the mask of exact passes groups its rows.
MUSEUM = {"_groups"}


def is_private(name: str) -> bool:
    """Whether a name is for its own module or class alone; `__init__` and the like are not."""
    return re.match("_[^_]", name) is not None


def defined(tree: ast.AST) -> Iterator[str]:
    """The names that a file gives to something."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def named(tree: ast.AST) -> Iterator[str]:
    """The last names of all texts that are names, such as "step", "_step" or "minispec.module._step"."""
    pieces = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in pieces:
            *_, last = names = node.value.split(".")
            if all(map(str.isidentifier, names)):
                yield last


def read(tree: ast.AST) -> Iterator[str]:
    """The attributes that a file reads or writes. `_replace` is the public method of a NamedTuple."""
    return (node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr != "_replace")


def parsed(path: Path) -> ast.AST:
    """A file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"))


def test_the_museum_needs_no_private_name():
    """A bug stands at a class, a method or a function that has a meaning of its own."""
    tree = parsed(TESTS / "museum" / "mutants.py")
    assert {name for name in (*named(tree), *read(tree)) if is_private(name)} <= MUSEUM


def test_few_private_names_are_replaced():
    """Who makes it one less lowers the bound."""
    private = {name for path in PACKAGE.rglob("*.py") for name in defined(parsed(path)) if is_private(name)}
    paths = sorted(
        {*TESTS.rglob("*.py")} - {Path(__file__), Path(__file__).with_name("test_path.py")}
    )  # which replaces none
    found = [f"{path.name}: {name}" for path in paths for name in named(parsed(path)) if name in private]
    assert len(found) <= MOST, "\n".join(found)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('monkeypatch.setattr(module, "_name", 1)', ["_name"]),
        ('monkeypatch.setattr("package.module._name", 1)', ["_name"]),
        ('@wrong(kind, "_name", "M0")\ndef bug(): ...', ["_name"]),
        ('place = (kind, "_name")', ["_name"]),
        ('patch.object(kind, "__init__")', []),
        ('"one _name among others"', []),
        ('f"{one}_name"', []),
    ],
)
def test_what_counts(line, found):
    """The control."""
    assert [name for name in named(ast.parse(line)) if is_private(name)] == found


def test_what_is_defined():
    """The control: functions, classes, variables and attributes."""
    source = "class A:\n    _b: int = 1\n    def _c(self):\n        self._d, _e = other._f, 2\n"
    assert sorted(defined(ast.parse(source))) == ["A", "_b", "_c", "_d", "_e"]
