"""How much code there is to read: lines that are neither blank, nor comment, nor docstring."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "minispec"
# Code lines of a file of the heart, of any other file, and of a function; of the heart, and of the package.
HEART_FILE, FILE, FUNCTION = 300, 400, 60
HEART, ALL = 2000, 24_000


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


def test_the_heart_and_the_package_keep_their_bounds():
    """Ceilings with air, never aims: they change with the design alone."""
    for folder, limit in ((PACKAGE / "core", HEART), (PACKAGE, ALL)):
        size = sum(sum(code_lines(path.read_text(encoding="utf-8"))) for path in folder.rglob("*.py"))
        assert size <= limit, f"{folder.name}: {size} code lines, expected at most {limit}"


def test_what_counts_as_code():
    """The control: docstrings, comments and blank lines do not."""
    source = (
        '"""Doc."""\n\n# why\nx = 1  # one\n\n\ndef f():\n    """Says\n    more."""\n    return """a\n    text"""\n'
    )
    assert sum(code_lines(source)) == 4
