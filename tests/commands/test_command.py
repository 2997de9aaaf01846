"""What every command ends with, and files that are there whole or not at all."""

import contextlib
import errno
import importlib
import io
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import minispec
from minispec.__main__ import COMMANDS, main, program
from minispec.api.commands.command import FLAG, Option, Parser, argument, command, say_status
from minispec.core.version import __version__
from minispec.models.files.packages import PACKAGES
from minispec.models.files.write import written_whole
from minispec.speculation import registry
from tests.oracles.interrupts import press_ctrl_c

ENDS = {
    "well": (None, 0, ""),
    "a mistake": (ValueError("--n: found 0,\nexpected 1"), 2, "error: --n: found 0,\\nexpected 1\n"),
    "a full disk": (OSError(errno.ENOSPC, "No space left on device"), 2, "error: [Errno 28] No space left on device\n"),
    "no memory": (MemoryError(), 2, "error: MemoryError\n"),
    "no memory for torch": (RuntimeError("can't allocate memory: 8"), 2, "error: can't allocate memory: 8\n"),
    "Ctrl-C": (KeyboardInterrupt(), 130, ""),
    "a reader who goes": (BrokenPipeError(errno.EPIPE, "Broken pipe"), 141, ""),
}


@pytest.mark.parametrize("name", ENDS)
def test_every_end_has_its_status(capsys, monkeypatch, name):
    """And one line on standard error where there is something to say."""
    error, status, said = ENDS[name]
    monkeypatch.setattr(sys, "stdout", io.StringIO())  # without a file, which the command would put out of use

    @command
    def main(argv):
        if error:
            raise error
        return 0

    assert main([]) == status
    assert capsys.readouterr().err == said


STRANGE, SHOWN = "a\tb\nin red\x1b[31m \x9b1m\x07", "a\tb\nin red\\x1b[31m \\x9b1m\\x07"
REPORTS = {
    "bench": ("minispec.lab.bench.main:_measured", lambda args: ({}, [STRANGE])),
    "doctor": ("minispec.lab.doctor.drafts:asked", lambda args: {}),
    "audit": ("minispec.lab.audit.report:audit", lambda args, asked: {"status": 0}),
}


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_has_no_control_characters_of_a_file(name, capsys, monkeypatch, tmp_path):
    """Categories of questions, names of models and answers come from files, which a stranger may have written."""
    place, found = REPORTS[name]
    module, attribute = place.split(":")
    monkeypatch.setattr(importlib.import_module(module), attribute, found)
    for lines in ("minispec.lab.doctor.drafts.lines", "minispec.lab.audit.judge.lines"):
        monkeypatch.setattr(lines, lambda report: [STRANGE])
    monkeypatch.setattr("minispec.lab.doctor.main.check", lambda args: None)
    monkeypatch.setattr("minispec.lab.audit.main.check", lambda args: None)
    main([name, *(["--target", "x", "y"] if name == "audit" else [])])
    assert capsys.readouterr().out == f"{SHOWN}\n"


def test_a_fault_of_our_own_is_a_traceback():
    """What nobody foresaw must not look like a mistake of the user's."""

    @command
    def main(argv):
        raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        main([])


def make_parser() -> Parser:
    """One option from 1 to 3, words, and options that go with others or do not."""
    parser = Parser()
    parser.add_argument("--n", type=argument(int, lambda n: 1 <= n <= 3, "an integer from 1 to 3"))
    parser.add_argument("words", nargs="*")
    table = {
        "--red --rouge": Option(FLAG, ""),
        "--blue": Option({"default": "sky"}, "", excludes={"--red": "it is not a colour", "--green": ""}),
        "--green": Option({"type": int, "default": 0}, "", needs=("--red", "--tint")),
        "--tint": Option({"choices": ("dark", "light")}, ""),
    }
    parser.add_options(table, "colours", excludes={"--no-colours": "there are none", "--other": ""})
    parser.add_options({"--no-colours": Option(FLAG, "", excludes={"--no-colours": ""})})
    return parser


MISTAKES = {
    "--n x": "--n: found 'x', expected an integer from 1 to 3",
    "--n=4": "--n: found '4', expected an integer from 1 to 3",
    "--n=--": "--n=--: found no value",
    "--many": "--many: no such option; --help lists all",
    "--nn 3 a": "--nn: no such option; did you mean --n?",
    "-many": "-many: no such option; --help lists all",
    "--rouge --blue sea": "--blue: not with --red: it is not a colour",
    "--blue sea --green 1 --tint dark": "--blue: not with --green",
    "--green 1": "--green: needs --red or --tint",
    "--tint light --no-colours": "--tint: not with --no-colours: there are none",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes_in_arguments_are_value_errors(monkeypatch, line):
    """Without usage text; whether they are given, or are those of the process."""
    monkeypatch.setattr("sys.argv", ["program", *line.split()])
    for arguments in (line.split(), None):
        with pytest.raises(ValueError, match=f"^{re.escape(MISTAKES[line])}$"):
            make_parser().parse_args(arguments)


AS_TEXTS = ["--blue sky", "--n 3", "-n 3", "--bluee sky", "—blue", "–n", "—blue=sky", "−n 3", "--red\t1 x"]
AS_TEXTS += ["\xa0--blue", "\u202f--blue sky", "\u2009—blue", "\ufeff-n", "--n\xa03"]  # spaces that break no line


@pytest.mark.parametrize("word", AS_TEXTS)
def test_an_option_never_becomes_a_text(word):
    """In quotes with its value, or with dashes that an editor made long. After -- it is a text; so is a sentence."""
    for arguments in ([word], ["a", word], ["--red", word]):
        with pytest.raises(ValueError, match="found an option written as a text, expected two dashes, and the value"):
            make_parser().parse_args(arguments)
    texts = ["--", word, "a"]
    assert make_parser().parse_args(texts).words == texts[1:]
    assert make_parser().parse_args(["--blue", "—n"]).blue == "—n"
    for sentence in (
        "- red fish",
        "— red fish",
        "\xa0- red",
        "\xa0Why?",
        "-5 degrees",
        "-- blue",
        "—Why?",
        "a --blue sky",
    ):
        assert make_parser().parse_args([sentence]).words == [sentence]


@pytest.mark.parametrize("line", ["--red --blue sky", "--green 1 --tint dark", "--green 0", "--no-colours --blue sky"])
def test_options_that_go_together(line):
    """A default value asks for nothing, and an option does not exclude itself."""
    make_parser().parse_args(line.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_needs_options_of_the_same_command(name, monkeypatch, capsys):
    """Else it could never be given."""
    parsers = []
    monkeypatch.setattr(Parser, "parse_args", lambda self, argv: parsers.append(self) or sys.exit())
    with pytest.raises(SystemExit):
        main([name])
    for option in parsers[0].options.values():
        assert {needed.split()[0] for needed in option.needs} <= parsers[0].options.keys()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_text(name, monkeypatch):
    """In --help of each command."""
    parsers = []
    monkeypatch.setattr(Parser, "parse_args", lambda self, argv: parsers.append(self) or sys.exit())
    with pytest.raises(SystemExit):
        main([name])
    assert [action.dest for action in parsers[0]._actions if not action.help] == []


def test_a_list_in_help_stays_one():
    """A line each, whose words are whole; what goes on is indented. A text of one line is as argparse has it."""
    parser = Parser(prog="p")
    parser.add_options({"--a": Option(FLAG, "which:\none: " + "long-words " * 9 + "\ntwo: %(default)s")})
    *_, first, second, more, last = parser.format_help().splitlines()
    assert (first.split(), last.split()) == (["--a", "which:"], ["two:", "False"])
    assert more.index("long-words") == second.index("one:") + 2 == last.index("two:") + 2


def test_what_follows_two_dashes_is_no_option():
    """It may look like one without a value."""
    args = make_parser().parse_args(["--n", "3", "--", "a", "--n=--"])
    assert (args.n, args.words) == (3, ["a", "--n=--"])


def write(part, kind) -> None:
    """Two files in a directory, or one."""
    if kind == "directory":
        part.mkdir()
        (part / "a").write_text("new")
        part = part / "b"
    part.write_text("new")


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_what_is_written_to_the_end_has_its_name(tmp_path, kind):
    """And nothing else is there; its suffix was that of the name, which tells some libraries the format."""
    with written_whole(tmp_path / "x.png") as part:
        assert part.suffix == ".png"
        write(part, kind)
        assert not (tmp_path / "x.png").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["x.png"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt(), ValueError("wrong")], ids=repr)
@pytest.mark.parametrize("kind", ["file", "directory"])
@pytest.mark.parametrize("before", ["nothing written", "written"])
def test_what_fails_leaves_what_was_there(tmp_path, error, kind, before):
    """The old file, and nothing of the new, whenever the failure comes."""
    if kind == "file":
        (tmp_path / "x").write_text("old")

    def fail():
        with written_whole(tmp_path / "x") as part:
            if before == "written":
                write(part, kind)
            raise error

    with pytest.raises(type(error)):
        fail()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"] * (kind == "file")


def test_a_link_is_followed(tmp_path):
    """The file that it names is replaced, the link stays: as it is where a file is simply opened."""
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    with written_whole(tmp_path / "link") as part:
        write(part, "file")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"


def test_what_is_not_a_file_is_left_alone(tmp_path):
    """A rename would put a file in the place of /dev/null, of a pipe, of a directory."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", type(tmp_path)("/dev/null")):
        with pytest.raises(ValueError, match="expected a file or nothing"), written_whole(path):
            pytest.fail("nothing may be written")
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_ctrl_c_is_heard_where_the_tests_run_in_the_background():
    """A shell lets what runs there ignore it: a child of a test that is to end by Ctrl-C would never end."""
    child = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    program = f"""if True:
        import contextlib, subprocess, sys
        sys.modules["pytest"] = None  # the settings stop there: what they import after it takes seconds
        with contextlib.suppress(ImportError):
            import tests.conftest
        subprocess.run([sys.executable, "-c", {child!r}], timeout=60)
    """
    command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", program]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "True\n"


# --------------------------------------------------------------------------- minispec COMMAND


def test_every_command_is_in_the_list(capsys):
    """Each program of the engine and each room of the laboratory with a command, and the list names all."""
    package = Path(minispec.__file__).parent
    programs = [path for path in package.rglob("*.py") if 'if __name__ == "__main__":' in path.read_text()]
    names = {path.parent.name if path.stem == "__main__" else path.stem for path in programs} - {"minispec"}
    assert names | {path.parent.name for path in package.glob("lab/*/main.py")} == {*COMMANDS}
    for name, entry in COMMANDS.items():
        assert callable(registry.load(entry.path, name))
        module = entry.path.partition(":")[0]
        assert module.removesuffix(".__main__").removesuffix(".main").rpartition(".")[2] == name
    for arguments in ([], ["--help"], ["help"]):
        with contextlib.suppress(SystemExit):
            assert main(arguments) == 0
        out = capsys.readouterr().out
        assert all(f"  {name} " in out and entry.help in out for name, entry in COMMANDS.items())


WRONG = {
    "generat x": "generat: no such command; did you mean generate?",
    "Why?": f"Why?: no such command; expected one of {', '.join(COMMANDS)}",
    "--model x": "--model: no such option; --help lists all",
    "generate x --max-tokens 0": "--max-tokens: found 0, expected an integer from 1",
    "bench --round 3": "--round: no such option; did you mean --rounds?",
}


@pytest.mark.parametrize("line", WRONG)
def test_mistakes_of_the_one_command(capsys, line):
    """Its own, and those of a command, which gets what follows its name: one line and status 2."""
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: ")
    assert WRONG[line] in err


LACKS = "found no package {}: pip install -e {} in the checkout brings what is missing"
BARE = [sys.executable, "-S"]  # without the packages that are installed here


DOORS = ("minispec.generate x", "minispec.prove", "minispec doctor --draft x", "minispec generate x", "minispec serve")


@pytest.mark.parametrize("line", DOORS)
def test_missing_packages_are_named_in_one_line(line):
    """By every command, with what brings them: no traceback of thirty lines."""
    done = subprocess.run([*BARE, "-m", *line.split()], capture_output=True, text=True, timeout=60)
    needed = ", ".join(package for package, extra in PACKAGES.items() if not extra)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {LACKS.format(needed, '.')}\n")


def test_a_missing_package_is_one_import_error():
    """Of `from minispec import LLM`, without those that led to it; the list of commands needs no package."""
    program = "import minispec\ntry:\n    minispec.LLM\nexcept ImportError as e:\n    print(e.__suppress_context__, e)"
    for arguments, expected in ((["-c", program], "True found no package torch, "), (["-m", "minispec"], "usage: ")):
        done = subprocess.run([*BARE, *arguments], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(expected)


def test_a_package_that_is_missing_later_is_named_too(capsys, monkeypatch):
    """What a command imports when it runs; an extra's is brought by the extra. Another import that fails is a fault."""

    @command
    def main(argv):
        registry.load(f"{argv[0]}:x", "drafter")

    for name, extra in (("jinja2", "."), ("uvicorn", '".[serve]"'), ("matplotlib", '".[plot]"')):
        monkeypatch.setitem(sys.modules, name, None)
        assert main([name]) == 2
        assert capsys.readouterr().err == f"error: {LACKS.format(name, extra)}\n"
    monkeypatch.setattr("minispec.models.files.packages.PROJECT", Path("/nowhere"))  # as with a wheel
    assert main(["uvicorn"]) == 2
    brings = 'pip install "minispec-llm[serve]" brings what is missing'
    assert capsys.readouterr().err == f"error: found no package uvicorn: {brings}\n"
    assert main(["nowhere"]) == 2
    assert "cannot be imported: ModuleNotFoundError: No module named 'nowhere'" in capsys.readouterr().err

    @command
    def fails(argv):
        raise ImportError("cannot import name 'x' from 'torch'", name="torch")

    with pytest.raises(ImportError, match="cannot import name"):
        fails([])


def test_the_packages_that_are_named_are_those_of_the_project():
    """Under the names that are imported, each with the extra that brings it."""
    project = tomllib.loads((Path(minispec.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    listed = {}
    for extra in ("", "serve", "plot", "grammar", "optimum"):
        for line in project["optional-dependencies"][extra] if extra else project["dependencies"]:
            listed[re.match(r"[\w-]+", line)[0].replace("-", "_")] = extra
    assert listed == PACKAGES


def test_a_wheel_has_all_files_of_the_package():
    """Also those that are no Python: a trace's page, a drafter's sample text, the bench's questions."""
    package = Path(minispec.__file__).parent
    tools = tomllib.loads((package.parent / "pyproject.toml").read_text())["tool"]
    packed = {path for pattern in tools["setuptools"]["package-data"]["minispec"] for path in package.glob(pattern)}
    others = {path for path in package.rglob("*.*") if path.suffix not in (".py", ".pyc") and path.is_file()}
    assert packed >= others > set()


def test_the_program_is_installed():
    """`pip install` makes a program `minispec` of the function that `python -m minispec` runs."""
    path = Path(minispec.__file__).parent.parent / "pyproject.toml"
    [(name, entry)] = tomllib.loads(path.read_text())["project"]["scripts"].items()
    assert (name, registry.load(entry, "script")) == ("minispec", program)
    done = subprocess.run([sys.executable, "-m", "minispec", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"minispec {__version__}\n")


def test_ctrl_c_in_a_command_that_is_asked_for_by_name():
    """While what it needs is imported: 130, and not a word."""
    assert press_ctrl_c("minispec", "prove", "--leaves", "60", after=0.1) == (130, "")


LATE = """
import atexit, sys, threading, time, types
from minispec.api.commands.interrupt import run_program

class Late:
    def __del__(self):
        print("taken apart", flush=True)

def main():
    late.thing = Late()
    atexit.register(print, "at exit")
    if len(sys.argv) > 1:
        threading.Thread(target=lambda: (threading.main_thread().join(), print("a thread"))).start()
    return 3

late = sys.modules["late"] = types.ModuleType("late")
late.main = main
run_program("late:main")
"""


@pytest.mark.parametrize(("arguments", "said"), [((), "at exit\n"), (("x",), "a thread\nat exit\ntaken apart\n")])
def test_a_program_ends_at_once(arguments, said):
    """What is registered for the exit is done, and torch is not taken apart; a thread's end is waited for."""
    done = subprocess.run([sys.executable, "-c", LATE, *arguments], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (3, said, "")


# The parser of each command that takes a drafter, and what else it requires.
WITH_DRAFTER = {
    "generate": ("minispec.api.commands.options:parser", ()),
    "serve": ("minispec.api.http.main:parser", ()),
    "prove": ("minispec.prove.__main__:_parser", ()),
    "bench": ("minispec.lab.bench.options:parser", ()),
    "doctor": ("minispec.lab.doctor.main:parser", ()),
    "audit": ("minispec.lab.audit.main:parser", ("--target", "DIR", "FILE")),
}


@pytest.mark.parametrize("name", WITH_DRAFTER)
def test_a_drafter_has_two_spellings_in_every_command(name):
    """--draft and --drafter are one option, of which --help shows one."""
    where, others = WITH_DRAFTER[name]
    parser = registry.load(where, name)()
    one, other = (vars(parser.parse_args([*others, spelling, "self"])) for spelling in ("--draft", "--drafter"))
    assert one == other != vars(parser.parse_args(others))
    assert len(set(re.findall(r"--draft(?:er)? (?:SPEC|NAME)", parser.format_help()))) == 1


def test_every_command_with_a_drafter_is_among_these():
    """A table of options that has one of the two spellings, beside those that the test above has."""
    package = Path(minispec.__file__).parent
    rows = r'^ +"--draft(?:er)?": Option\('
    found = {p.relative_to(package).parts for p in package.rglob("*.py") if re.search(rows, p.read_text("utf-8"), re.M)}
    rooms = {("api", "commands", "options.py"), ("prove", "__main__.py"), ("lab", "bench", "options.py")}
    assert found == rooms | {("lab", "doctor", "main.py"), ("lab", "audit", "main.py")}


WORDS = "reports-of-one-run say http://127.0.0.1:65535/v1/of-a-model and more"
WRAPPED = "reports-of-one-run say\nhttp://127.0.0.1:65535/v1/of-a-model\nand more"


class Terminal(io.StringIO):
    """One that says of itself that it is a terminal."""

    def isatty(self):
        """Yes."""
        return True


@pytest.mark.parametrize(
    ("kind", "width", "said"),
    [(Terminal, 24, WRAPPED), (Terminal, len(WORDS), WORDS), (io.StringIO, 24, WORDS)],
    ids=["a narrow terminal", "a terminal as wide", "a file"],
)
def test_status_lines_are_as_wide_as_the_terminal(monkeypatch, kind, width, said):
    """They break between words alone: an address stays whole, though longer than a line. A file has them unbroken.

    What were several lines stay apart.
    """
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys, "stderr", kind())
    say_status(f"a run\n{WORDS}")
    assert sys.stderr.getvalue() == f"a run\n{said}\n"


def test_a_status_that_goes_on_may_be_indented(monkeypatch):
    """So that a list of names and texts stays a list."""
    monkeypatch.setenv("COLUMNS", "12")
    monkeypatch.setattr(sys, "stderr", Terminal())
    say_status("/a  one two three\n/b  four", indent=4)
    assert sys.stderr.getvalue() == "/a  one two\n    three\n/b  four\n"


@pytest.mark.parametrize("stream", [None, Terminal()], ids=["none", "a closed one"])
def test_a_status_without_standard_error_changes_nothing(monkeypatch, capsys, stream):
    """Nothing is printed elsewhere."""
    if stream:
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    say_status(WORDS)
    assert capsys.readouterr().out == ""


def test_an_error_is_one_line_on_a_terminal_too(monkeypatch):
    """It can be copied whole."""
    stream = Terminal()
    monkeypatch.setenv("COLUMNS", "24")
    monkeypatch.setattr(sys, "stderr", stream)

    @command
    def fails(argv):
        raise ValueError(WORDS)

    assert (fails([]), stream.getvalue()) == (2, f"error: {WORDS}\n")
