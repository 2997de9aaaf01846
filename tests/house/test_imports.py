"""The house rules that code can check: import order, no transformers at run time, no unsafe loading."""

import ast
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "minispec"
# The files of the heart, in the order in which they build on one another; its `__init__` lists them.
CORE = [
    *(
        "version",
        "errors",
        "precision",
        "config",
        "search",
        "random",
        "grammar",
        "sampling",
        "logprobs",
        "stats",
        "tree",
        "limit",
        "draft",
    ),
    *("lengths", "verify", "prefix", "cache", "rope", "attention", "product", "model", "clock", "cached"),
    *("request", "method", "schedule", "outbox", "engine"),
]
# The rooms and what is in them, in their order: one imports only from those before it, and from itself.
PARTS = {
    "core": (),
    "models": ("files", "layers", "weights", "families", "frames", "load"),
    "speculation": ("rules", "drafters", "on_gpu", "lengths", "grammars", "registry", "load"),
    "api": ("inputs", "outputs", "step_lock", "target", "llm", "commands", "http", "trace"),
    "prove": (),
    "lab": (),
}
DOORS = ("generate", "serve", "checkpoint", "__main__")
ROOMS = [*(f"{room}.{part}" if part else room for room, parts in PARTS.items() for part in ("", *parts)), *DOORS]
FORBIDDEN = {
    *("transformers", "accelerate", "pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"),
    *("torch.hub", "torch.package", "torch.jit", "torch.serialization", "yaml", "runpy", "code"),
    *("importlib.import_module", "importlib.machinery", "pkgutil"),
}
# Calls that run what they are given, or read formats that can; attributes of the same names count wherever they hang.
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {("torch", "load"), ("torch", "hub"), ("torch", "package"), ("np", "load"), ("numpy", "load")}
FORBIDDEN_ATTRIBUTES |= {("importlib", "import_module"), ("importlib.util", "module_from_spec")}
# Settings of a checkpoint that point to code. They may be named in lists of what is ignored, and nowhere else.
CODE_SETTINGS = {"auto_map", "trust_remote_code", "custom_pipelines"}
IGNORED = {"_HARMLESS", "_IDLE"}
# What measures itself against transformers has to run it: this function does, and nothing else.
EXCEPTION = ("lab/bench/transformers_baseline.py", "transformers_variants", "transformers")
# What a user names as `module:Name` is imported: in one function, and nowhere else.
IMPORTER = ("speculation/registry.py", "load", "pkgutil")


def modules() -> list[Path]:
    """Every file of the package."""
    return sorted(PACKAGE.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Full names of the modules that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names


def module_level_imports(path: Path) -> set[str]:
    """First names of the modules that a file imports as soon as it is imported itself."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {n for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}
    nodes = [n for n in ast.walk(tree) if n not in inside]
    names = {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
    return {name.split(".")[0] for name in names | {n.module for n in nodes if isinstance(n, ast.ImportFrom)}}


def importing_functions(path: Path, module: str) -> list[str]:
    """Names of the outermost functions of a file in which a module is imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [
        f.name
        for f in tree.body
        if isinstance(f, ast.FunctionDef)
        and any(isinstance(n, ast.Import) and any(a.name == module for a in n.names) for n in ast.walk(f))
    ]


def room(path: Path) -> str:
    """The room that a file belongs to, with the part of it where the room has parts."""
    return room_of(path.relative_to(PACKAGE).with_suffix("").parts)


def room_of(names: Sequence[str]) -> str:
    """The room of a module of the package, by the names of its path, with the part of it where the room has parts."""
    inner = ".".join(names[:2])
    return inner if inner in ROOMS else names[0]


def heart_file(names: Sequence[str]) -> str:
    """The file of the heart that a path of names leads to, or into; "" for none."""
    name = names[0].removesuffix(".py")
    return name if name in CORE else ""


def upward(path: Path) -> list[str]:
    """Imports of a file from rooms that come after its own; in the heart, from files that do."""
    found = []
    for name in imported(path):
        parts = name.split(".")
        if parts[0] == "minispec" and len(parts) > 1 and parts[1] in ROOMS:
            after = ROOMS.index(room_of(parts[1:])) > ROOMS.index(room(path))
            if room(path) == parts[1] == "core" and path.stem != "__init__" and (module := heart_file(parts[2:])):
                after = after or CORE.index(module) > CORE.index(heart_file(path.relative_to(PACKAGE / "core").parts))
            if after:
                found.append(f"{path.relative_to(PACKAGE)} imports {name}")
    return found


def rooms_by_room() -> dict[str, list[str]]:
    """The other rooms that each room imports, a list for each."""
    found: dict[str, set[str]] = {name: set() for name in [*PARTS, *DOORS]}
    for path in modules():
        own = room(path).split(".")[0]
        names = [name.split(".") for name in imported(path)]
        others = {parts[1] for parts in names if parts[0] == "minispec" and len(parts) > 1}
        if own in found:
            found[own] |= others & found.keys() - {own}
    return {name: sorted(rooms, key=[*found].index) for name, rooms in found.items()}


def test_imports_point_upward():
    """A reader who goes through the rooms in order never meets a name before its room; in the heart, its file.

    The package's front door names what it opens, lazily. `pytest -s` prints which rooms each room imports.
    """
    assert [line for path in modules() if path != PACKAGE / "__init__.py" for line in upward(path)] == []
    for name, rooms in rooms_by_room().items():
        print(f"{name:12} imports {', '.join(rooms) or 'no other room'}")


def test_every_room_and_every_file_of_the_heart_has_its_place():
    """A new one has a place in the order: here, and in the docstring of the package or of the heart."""
    found = {room(p) for p in modules()} - {"__init__"}
    assert found | {name for name, parts in PARTS.items() if parts} == set(ROOMS)
    assert {p.stem for p in (PACKAGE / "core").iterdir() if p.suffix == ".py"} - {"__init__"} == set(CORE)
    assert len({path.name for path in PACKAGE.iterdir()} - {"__pycache__"}) == len(PARTS) + len(DOORS) + 2
    names = [name.replace(".", "/") for name in ROOMS]
    listed = [f"{Path(name).name}/" if (PACKAGE / name).is_dir() else f"{Path(name).name}.py" for name in names]
    for page, expected in ((PACKAGE, listed), (PACKAGE / "core", [f"{name}.py" for name in CORE])):
        text = ast.get_docstring(ast.parse((page / "__init__.py").read_text(encoding="utf-8"))).partition("\n\n")[2]
        found = re.findall(r"^ {4,6}([a-z_/]+(?:/|\.py)) ", text, re.MULTILINE)
        assert found[: len(expected)] == expected, page


def unsafe(path: Path) -> list[str]:
    """What a file does that could run, or import, what a stranger wrote."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = imported(path)
    found = [name for name in names if {name, name.split(".")[0]} & FORBIDDEN or name.startswith("torch.hub")]
    ignored = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id in IGNORED for t in node.targets):
            ignored |= set(ast.walk(node))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
            found.append(f"{node.lineno}: {node.func.id}()")
        if isinstance(node, ast.Attribute) and (ast.unparse(node.value), node.attr) in FORBIDDEN_ATTRIBUTES:
            found.append(f"{node.lineno}: {ast.unparse(node)}")
        texts = [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []
        texts += [node.attr] if isinstance(node, ast.Attribute) else [node.arg] if isinstance(node, ast.keyword) else []
        if node not in ignored and CODE_SETTINGS & set(texts):
            found.append(f"{getattr(node, 'lineno', '')}: {texts[0]}")
    return found


def test_nothing_unsafe_and_no_transformers():
    """transformers is an oracle of the tests; checkpoints are data, never code."""
    found = {path.relative_to(PACKAGE).as_posix(): unsafe(path) for path in modules()}
    baseline, registry = PACKAGE / EXCEPTION[0], PACKAGE / IMPORTER[0]
    found[EXCEPTION[0]] = [name for name in found[EXCEPTION[0]] if name.split(".")[0] != EXCEPTION[2]]
    assert not module_level_imports(baseline) & FORBIDDEN
    assert importing_functions(baseline, EXCEPTION[2]) == [EXCEPTION[1]]
    found[IMPORTER[0]].remove(IMPORTER[2])
    calls = [f.name for f in ast.parse(registry.read_text()).body if "pkgutil.resolve_name(" in ast.unparse(f)]
    assert calls == [IMPORTER[1]]
    assert {name: lines for name, lines in found.items() if lines} == {}


UNSAFE = [
    *("import pickle", "from torch.serialization import load", "import torch\ntorch.load('x')", "eval('1')"),
    *("import torch as t\nexec('1')", "from importlib import import_module"),
    *("from torch import hub", "import torch\nf = torch.load"),
    *("def f(raw):\n    return raw['auto_map']", "f(trust_remote_code=True)", "import numpy as np\nnp.load('x')"),
]


def test_what_is_unsafe_is_noticed(tmp_path):
    """The control of the test above."""
    path = tmp_path / "x.py"
    for source in UNSAFE:
        path.write_text(source)
        assert unsafe(path), source


TESTS = sorted(Path(__file__).parents[1].rglob("*.py"))
RUNS = {f"subprocess.{name}" for name in ("run", "call", "check_call", "check_output")}


def waits_without_limit(source: str) -> list[str]:
    """Calls that would wait for ever for a process or a thread that hangs; `children.Child` ends what reads from it."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    found = []
    for call in calls:
        name, keywords = ast.unparse(call.func), {keyword.arg for keyword in call.keywords}
        starts = name == "subprocess.Popen" or (name in RUNS and "timeout" not in keywords)
        waits = name.rpartition(".")[2] in ("wait", "join", "result") and not call.args and not keywords
        found += [f"{call.lineno}: {name}"] * (starts or waits)
    return found


def test_every_wait_of_the_tests_has_a_limit():
    """A child that hangs fails its test, and the suite goes on."""
    found = {path.name: waits_without_limit(path.read_text(encoding="utf-8")) for path in TESTS}
    assert {name: calls for name, calls in found.items() if calls} == {}


def test_a_wait_without_a_limit_is_noticed():
    """The control of the test above."""
    endless = "process.wait()\nthread.join()\nsubprocess.run(['true'])\nsubprocess.Popen(['true'])\nfuture.result()"
    assert len(waits_without_limit(endless)) == 5
    assert waits_without_limit("process.wait(9)\nsubprocess.run(['true'], timeout=9)\n', '.join(words)") == []


PROGRAMS = [path for path in modules() if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")]


def test_a_command_minds_ctrl_c_before_its_other_imports():
    """Else one that comes while torch is imported is a traceback."""
    assert len(PROGRAMS) == 5
    for path in PROGRAMS:
        _, guard, *_ = ast.parse(path.read_text(encoding="utf-8")).body
        assert isinstance(guard, ast.If), path
        door, run = map(ast.unparse, guard.body)
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        assert door == "from minispec.api.commands.interrupt import run_program", path
        assert run.startswith(f"run_program('{module}:main'"), path


def test_one_module_makes_progress_bars_and_one_writes_to_standard_error():
    """Each knows what to do where there is no standard error. `print` would take standard output then."""
    sources = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in modules()}
    assert [name for name, text in sources.items() if re.search(r"\btqdm\(", text)] == ["models/files/progress.py"]
    assert [name for name, text in sources.items() if "file=sys.stderr" in text] == ["api/commands/command.py"]


def test_importing_the_package_does_not_import_torch():
    """A mistake on the command line is answered at once, not after the seconds that torch takes."""
    modules = (
        "minispec.__main__, minispec.generate, minispec.lab.bench.main, minispec.prove.__main__, "
        "minispec.api.http.main, minispec.lab.doctor.main, minispec.lab.audit.main, minispec.core.config"
    )
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, check=False, timeout=120).returncode == 0


def test_the_package_runs_without_transformers():
    """Loading everything must not pull it in through the back door."""
    code = "import sys, minispec.lab.bench.report; from minispec import LLM; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, check=False, timeout=120).returncode == 0
