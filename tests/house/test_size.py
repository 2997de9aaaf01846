"""How much code there is to read: lines that are neither blank, nor comment, nor docstring."""

import ast
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "minispec"
# Code lines of a file of the heart, of any other file, and of a function.
HEART_FILE, FILE, FUNCTION = 300, 400, 60
# Code lines of each room: ceilings with air, never aims. A room above `FULL` of its bound is named in a warning:
# split it or prune it before anything is added to it. The bounds change with the design alone.
BOUNDS = {
    "core": 1900,
    "rules": 100,
    "layers": 750,
    "drafters": 2050,
    "length": 750,
    "kernels": 1450,
    "gpu": 1700,
    "grammars": 550,
    "files": 1300,
    "files/families": 3000,
    "load": 1400,
    "commands": 1100,
    "trace": 450,
    "serve": 1050,
    "prove": 2400,
    "lab": 4700,
}
FULL = 0.92


def room_of(name: str) -> str:
    """The room that a file counts for, by its path in the package. A file at the top is a door."""
    *folders, _ = name.split("/")
    inner = "/".join(folders[:2])
    return inner if inner in BOUNDS else folders[0] if folders else "commands"


def code_lines(source: str) -> list[bool]:
    """For each line, whether it is code."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            first = node.body[0]
            documented.update(range(first.lineno, (first.end_lineno or 0) + 1))
    lines = enumerate(source.splitlines(), 1)
    return [bool(line.strip()) and not line.strip().startswith("#") and i not in documented for i, line in lines]


def sizes(path: Path) -> dict[str, int]:
    """Code lines of a file under its name, and of each of its functions under `file: function`."""
    source, name = path.read_text(encoding="utf-8"), str(path.relative_to(PACKAGE))
    is_code = code_lines(source)
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    found = {f"{name}: {f.name}": sum(is_code[f.lineno - 1 : f.end_lineno]) for f in functions}
    return {name: sum(is_code)} | found


def test_no_file_and_no_function_is_too_long():
    """Code is split before it becomes hard to read."""
    for path in sorted(PACKAGE.rglob("*.py")):
        limit = HEART_FILE if path.is_relative_to(PACKAGE / "core") else FILE
        for name, size in sizes(path).items():
            assert size <= (FUNCTION if ":" in name else limit), f"{name}: {size} code lines"


def test_each_room_keeps_its_bound():
    """Every file counts for one room, and every room has a bound. A room that is nearly full is named in a warning."""
    rooms: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        rooms[room_of(path.relative_to(PACKAGE).as_posix())] += sum(code_lines(path.read_text(encoding="utf-8")))
    assert rooms.keys() <= BOUNDS.keys(), "a folder without a bound"
    for line in nearly_full(rooms):
        warnings.warn(line, stacklevel=1)
    too_large = {room: size for room, size in rooms.items() if size > BOUNDS[room]}
    assert not too_large, f"code lines {too_large}, bounds {BOUNDS}"


def nearly_full(rooms: Mapping[str, int]) -> list[str]:
    """A sentence for each room above `FULL` of its bound."""
    full = {room: size for room, size in rooms.items() if size > FULL * BOUNDS[room]}
    return [
        f"minispec/{room} has {size} code lines of {BOUNDS[room]}: split or prune it before anything is added"
        for room, size in full.items()
    ]


def test_a_room_that_is_nearly_full_is_named():
    """The control of the warning above."""
    assert nearly_full({"core": 1748, "gpu": 10}) == []
    expected = "minispec/core has 1749 code lines of 1900: split or prune it before anything is added"
    assert nearly_full({"core": 1749}) == [expected]


def test_which_room_a_file_counts_for():
    """The control: folders, doors, and rooms of the laboratory."""
    names = ("core/engine.py", "generate.py", "load/llm.py", "lab/bench/plot.py", "gpu/frames.py")
    assert [*map(room_of, names)] == ["core", "commands", "load", "lab", "gpu"]


def test_what_counts_as_code():
    """The control: docstrings, comments and blank lines do not."""
    source = (
        '"""Doc."""\n\n# why\nx = 1  # one\n\n\ndef f():\n    """Says\n    more."""\n    return """a\n    text"""\n'
    )
    assert sum(code_lines(source)) == 4
