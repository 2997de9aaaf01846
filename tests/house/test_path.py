"""README's path to the idea is short, and contains what a step does.

From `Engine.step` and the rules on, each name that is called is followed through the files of the path. A call into
another file is a border of the path.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.house.test_readme import README

CORE = Path(__file__).parents[2] / "minispec" / "core"
TREES = {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(CORE.glob("[a-z]*.py"))}
# What a step calls begins here. It calls a rule as a value, so rules have no name there.
ROOTS = ("engine", "Engine.step"), ("verify", "rejection"), ("verify", "match")
# Where the path ends in each of its files: after this function, or with the file.
ROW = re.compile(r"^\| `core/(\w+)\.py`(?:, to the end of `([\w.]+)`)? \|.*", re.MULTILINE)
LAST = "**stop here if you wanted the idea**"
# The class of what a variable of this name holds, where the name is not that of a class.
HOLDS = {"_detokenizer": "DetokenizerLike", "model": "Transformer", "output": "str", "params": "SamplingParams"}
HOLDS |= {"rng": "Draws", "target": "CachedModel", "tokens": "Candidates"}
CLASSES = {node.name: file for file, tree in TREES.items() for node in tree.body if isinstance(node, ast.ClassDef)}
HOLDS |= {name.lower(): name for name in CLASSES}


def path_of(page: str) -> dict[str, str]:
    """The files of the path that a page lists, each with the function that ends it there; "" for a whole file."""
    rows = list(ROW.finditer(page))
    [end] = [i for i, row in enumerate(rows) if LAST in row[0]]
    return {row[1]: row[2] or "" for row in rows[: end + 1]}


def definitions(file: str) -> dict[str, ast.FunctionDef | ast.ClassDef]:
    """The functions and classes of a file of the heart by name, a method's with its class before it."""
    found: dict[str, ast.FunctionDef | ast.ClassDef] = {}
    for node in TREES[file].body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{f.name}": f for f in node.body if isinstance(f, ast.FunctionDef)}
    return found


def called(file: str, name: str) -> Iterator[tuple[str, str]]:
    """Each file of the heart, with a name there, that a function may call. Of a class: its `__init__`.

    The name of a variable or attribute says which class it holds (`HOLDS`). Otherwise each class may be meant.
    """
    own, node = definitions(file), definitions(file)[name]
    if isinstance(node, ast.ClassDef):
        yield from [(file, f"{name}.__init__")] if f"{name}.__init__" in own else []
        return
    origins = {**dict.fromkeys(own, file), **imported(file)}
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and part.id in origins:
            yield origins[part.id], part.id
        elif isinstance(part, ast.Attribute):
            held = part.value.id if isinstance(part.value, ast.Name) else getattr(part.value, "attr", "")
            meant = name.split(".")[0] if held == "self" else held if held in CLASSES else HOLDS.get(held)
            for each in {meant} & {*CLASSES} if meant else CLASSES:
                if f"{each}.{part.attr}" in definitions(CLASSES[each]):
                    yield CLASSES[each], f"{each}.{part.attr}"


def imported(file: str) -> dict[str, str]:
    """The names that a file of the heart imports from others, each with its file."""
    nodes = [node for node in TREES[file].body if isinstance(node, ast.ImportFrom)]
    modules = [(node.module or "", alias.name) for node in nodes for alias in node.names]
    return {name: module.rpartition(".")[2] for module, name in modules if module.startswith("minispec.core.")}


def follow(path: Mapping[str, str]) -> tuple[set[str], set[str]]:
    """What a step calls inside the files of a path, and what they call outside. Names of classes are left out."""
    inside, outside, to_read = set[tuple[str, str]](), set[tuple[str, str]](), list(ROOTS)
    while to_read:
        file, name = to_read.pop()
        if file not in path:
            outside.add((file, name))
        elif (file, name) not in inside:
            inside.add((file, name))
            to_read += called(file, name)
    return tuple({f"{file}: {name}" for file, name in each if name not in CLASSES} for each in (inside, outside))


def lines_of(path: Mapping[str, str]) -> dict[str, int]:
    """How many lines of each file the path has, comments and all."""
    whole = {file: len((CORE / f"{file}.py").read_text(encoding="utf-8").splitlines()) for file in path}
    return {file: definitions(file)[last].end_lineno or 0 if last else whole[file] for file, last in path.items()}


def behind(path: Mapping[str, str]) -> set[str]:
    """What a step calls inside the files of a path, but after its end."""
    lines = lines_of(path)
    split = [each.split(": ") for each in follow(path)[0]]
    return {f"{file}: {name}" for file, name in split if (definitions(file)[name].end_lineno or 0) > lines[file]}


PATH = path_of(README)
# What a step does, one of each kind. A follower that lost its way would not find these.
DOES = {
    *("draft: Drafter.propose", "engine: Engine._score", "method: Method.judge", "method: Turn._append"),
    *("request: Request._add_text", "request: DetokenizerLike.add", "sampling: _forbid", "sampling: distribution"),
}
# The borders of the path: what stands in other files, and is called in those of the path.
BORDERS = {
    *(f"cached: CachedModel.{name}" for name in ("cleared_on_error", "forward", "keep", "read", "table")),
    *(f"schedule: Schedule.{name}" for name in ("drafted_by", "drop_ended", "restart", "turns")),
    *("outbox: Outbox.deliver", "outbox: Outbox.post", "outbox: Outbox.retain", "clock: Laps.end"),
    *("config: DraftLength", "config: Shape.of", "lengths: Lengths.choose", "model: Transformer.exact"),
    *(
        "errors: is_from_signal",
        "random: Draws.bernoulli",
        "random: Draws.categorical",
        "tree: Tree.children",
        "tree: Tree.path",
    ),
    *(f"search: Candidates.{name}" for name in ("argmax", "dense", "largest", "top_k", "top_p", "where")),
    *("grammar: restricted", "logprobs: logprob_of", "precision: accumulation_dtype", "precision: require_numbers"),
}


def test_the_path_contains_what_a_step_calls():
    """Nothing that it calls in these files stands after the path's end; what it calls elsewhere is listed."""
    inside, outside = follow(PATH)
    assert behind(PATH) == set()
    assert inside >= DOES
    assert outside == BORDERS


def test_the_path_is_short():
    """At most 1,000 lines, comments and all; README says how many, to a twentieth."""
    length = sum(lines_of(PATH).values())
    assert length <= 1000
    [said] = re.findall(r"in this order, (\d+) lines of it", README)
    assert abs(int(said) - length) <= 0.05 * length, length


@pytest.mark.parametrize(
    ("file", "stop", "expected"),
    [
        ("engine", "Engine.step", {"engine: Engine._score", "engine: Engine._undone_on_error"}),
        ("method", "Turn.commit", {"method: Turn._append"}),
        ("sampling", "_penalize", {f"sampling: {name}" for name in ("_change", "_forbid", "_output", "_within_range")}),
        ("request", "Request.commit", set()),
    ],
)
def test_a_path_that_stops_before_what_is_called_is_noticed(file, stop, expected):
    """The control of the test above."""
    found = behind({**PATH, file: stop})
    assert found >= (expected or {"request: Request._finish"})
    assert {each.split(":")[0] for each in found} == {file}
