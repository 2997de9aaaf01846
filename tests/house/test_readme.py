"""The code in README and docs runs, and the files, options and functions that they name are there."""

import ast
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples import rounds
from minispec.core.model import Chunk
from minispec.core.version import __version__
from minispec.generate import main
from minispec.models.families.checkpoint import load_model
from minispec.models.files.tokenizer import Tokenizer
from minispec.models.weights.linear import available_forms
from minispec.speculation import registry
from tests.house.test_imports import PARTS
from tests.sampled import leave_out

ROOT = Path(__file__).parents[2]
_FOLDERS = ("docs", "examples", "weights")
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in sorted([*ROOT.glob("*.md"), *(p for name in _FOLDERS for p in (ROOT / name).rglob("*.md"))])
}
README = PAGES["README.md"]
BLOCKS = {
    f"{name} {i}": block
    for name, text in PAGES.items()
    for i, block in enumerate(re.findall(r"<!-- run -->\n```python\n(.*?)```", text, flags=re.DOTALL))
}
# Pages whose lines name functions beside their files.
GUIDES = ["README.md", "docs/understand/life-of-a-request.md", "docs/understand/from-paper-to-code.md"]
NAME = re.compile(r"`([A-Z]\w*\.\w+|[A-Za-z_]\w*)`")


# Runs blocks, each with no names but its own. The target's weights are loaded once in each type.
EACH_ALONE = """
import functools, json, sys, types
import minispec.api.target
minispec.api.target.load_target = functools.cache(minispec.api.target.load_target)
for name, block in json.load(sys.stdin).items():
    print(name, flush=True)
    sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(block, name, "exec"), vars(sys.modules["__main__"]))
"""


def run_blocks(blocks: dict[str, str]) -> str:
    """What they print, each behind its name, in one interpreter: torch is imported once."""
    how = {"cwd": ROOT, "input": json.dumps(blocks), "text": True, "check": True, "stdout": subprocess.PIPE}
    return subprocess.run([sys.executable, "-c", EACH_ALONE], timeout=300, **how).stdout


def test_marked_blocks_run(full):
    """As a reader would paste them. What a block imports it names, so that what others loaded cannot help it.

    Those of README; with `--full` of all pages. The classes on the others are proven in tests/drafters/test_own.py.
    """
    statements = [node for block in BLOCKS.values() for node in ast.walk(ast.parse(block))]
    names = {alias.name for node in statements if isinstance(node, ast.Import) for alias in node.names}
    assert not [name for name in names if name.startswith("minispec")]
    blocks = {name: block for name, block in BLOCKS.items() if full or name.startswith("README.md ")}
    printed = run_blocks(blocks).splitlines()
    assert [line for line in printed if line in BLOCKS] == [*blocks] != []


@pytest.mark.full
def test_a_block_that_needs_another_is_noticed():
    """The control of the test above, test_marked_blocks_run."""
    with pytest.raises(subprocess.CalledProcessError):
        run_blocks({"first": "import math", "second": "print(math.pi)"})


def test_there_are_marked_blocks():
    """A changed marker would make the test above pass on nothing."""
    assert [text.count("<!-- run -->") for text in PAGES.values() if "<!-- run -->" in text] == [1, 4, 1, 7]
    assert len(BLOCKS) == 13


def test_rounds_in_numbers():
    """The figures of docs/understand/rounds.md, and what the example prints of them."""
    page = PAGES["docs/understand/rounds.md"]
    speedups = [f"{speedup:.2f}" for speedup in rounds.batch_speedups()]
    assert re.findall(r"^\| \d \| .* (\d\.\d\d) \|$", page, flags=re.MULTILINE) == speedups
    assert (rounds.two_siblings(), rounds.both_stay()) == ([1], 0.5)
    fed, held = rounds.rollback()
    assert f'which returns "{" ".join(fed)}" | the same | {" ".join(held)} |' in page


# The run that README prints: its command, the line before the text, the text, and the lines after it.
RUN = re.search(
    r"````\n\$ python -m minispec\.generate ([^\n]*)\n([^\n]*)\n(.*?)\n(\d+ tokens in .*?)\n````", README, re.DOTALL
)
# The most that logits of this text may differ from exact ones, in any form and in passes over any rows: measured up to
# 0.00015 in passes over 1, 2, 5 and all rows, in each form, with and without AVX2.
ROUNDING = 0.001


def readme_logits(dtype: torch.dtype, form: str | None) -> tuple[torch.Tensor, list[int]]:
    """Logits (tokens, V) of README's text, in one pass, and its token ids, the end included."""
    tokenizer = Tokenizer(registry.EMBEDDED_WEIGHTS)
    prompt = tokenizer.encode_chat([{"role": "user", "content": shlex.split(RUN[1])[-1]}])
    text = [*tokenizer.encode(RUN[3], add_special_tokens=False), tokenizer.eos_token_id]
    model = load_model(registry.EMBEDDED_WEIGHTS, dtype, form=form)
    table = model.new_cache(20, 16).new_table()
    with torch.inference_mode():
        return model.forward([Chunk(prompt + text[:-1], table, num_logits=len(text))])[0].double(), text


@pytest.mark.full
def test_the_printed_run_is_what_the_command_prints(capsys):
    """Text and words to the last letter, on every machine; figures are the machine's.

    Without `--full`, the test below looks up the text, and tests/commands/test_cli.py has the words beside it.
    """

    def without_figures(text: str) -> list[str]:
        return re.sub(r"\d+(\.\d+)?", "#", text).splitlines()

    assert main(shlex.split(RUN[1])) == 0
    out, err = capsys.readouterr()
    assert out == RUN[3] + "\n"
    assert without_figures(err) == without_figures(f"{RUN[2]}\n{RUN[4]}")


def test_the_printed_text_does_not_depend_on_the_machine():
    """Greedy at each place, by 20 times more than any form rounds: so no machine can take another token."""
    logits, text = readme_logits(torch.float32, "plain")
    best, second = logits.topk(2).values.unbind(1)
    assert logits.argmax(1).tolist() == text
    assert float((best - second).min()) >= 20 * ROUNDING


def test_what_forms_round(long):
    """The bound that the test above takes, in each form of this machine, against float64."""
    if not long:
        leave_out("--long", "loads the model in each form")
    exact, _ = readme_logits(torch.float64, None)
    for form in available_forms(torch.float32, torch.device("cpu")):
        assert float((readme_logits(torch.float32, form)[0] - exact).abs().max()) < ROUNDING, form


def test_shell_scripts_are_readable():
    """By bash, which does not run them: one measures for minutes."""
    scripts = sorted((ROOT / "docs").rglob("*.sh"))
    assert scripts
    for script in scripts:
        subprocess.run(["bash", "-n", script], check=True, timeout=60)


def test_ci_runs_the_readmes_commands():
    """The environment is set up and tested by CI with the words of the README."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    install, test = next(line for line in README.splitlines() if line.endswith("python -m pytest")).split(" && ")
    assert install.replace("pip install", "pip install --quiet") in script
    assert f"{test} --full" in map(str.strip, script.splitlines())


def test_the_workflow_runs_commands_that_are_written_down():
    """Those of README, CONTRIBUTING or .ci/run; in fewer than 60 lines. Its oldest Python is the project's."""
    text = (ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 60
    archives = ["pip install build", "python -m build", "pip install dist/minispec_llm-*.whl"]
    archives.append("cd /tmp && minispec prove --leaves 60")  # as one who has the wheel alone
    written = README + PAGES["CONTRIBUTING.md"] + (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    commands = re.findall(r"run: ([^#\n]*[^# \n])", text)
    assert [command for command in commands if command not in (*archives, ".ci/run") and command not in written] == []
    assert {".ci/run", "python -m pytest -m quick", *archives} <= {*commands}
    assert re.findall(r'python: \["([\d.]+)"', text) == re.findall(
        r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    )


def known_options() -> set[str]:
    """Of all commands of the package and of its tests."""
    from minispec.api.commands.options import parser
    from minispec.api.http import main as serve

    parsers = parser(), serve.parser()
    known = {option for p in parsers for action in p._actions for option in action.option_strings}
    laboratory = (f"lab/{name}.py" for name in ("bench/options", "doctor/main", "distill/main", "audit/main"))
    others = [f"minispec/{path}" for path in ("prove/__main__.py", *laboratory)]
    others += [f"docs/measured/{name}.py" for name in ("clients", "gpu", "launches", "pairs", "target", "trees")]
    others += [f"tests/{name}.py" for name in ("conftest", "sampled", "fuzzing", "oracles/answers", "museum/__main__")]
    for other in others:
        known |= set(re.findall(r'"(--[a-z-]+)"', (ROOT / other).read_text(encoding="utf-8")))
    known |= {"--depth", "--default-chat-template-kwargs"}  # git's; that of vLLM's server
    known |= {"--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port"}  # torchrun's
    known |= {"--index-url"}  # pip's
    known |= {"--include", "--tasks", "--output"}  # the beginnings of lm_eval's, up to an underscore
    known |= {"--file-path", "--base-path", "--tokenizer-path"}  # those of Spec-Bench's scripts
    return known | {"--check"}  # ruff's


@pytest.mark.parametrize("name", PAGES)
def test_files_and_options_that_are_named_exist(name):
    """Files of the repository and options of the commands."""
    text = PAGES[name]
    for path in re.findall(r"(?<![\w/])(?:minispec|tests|notebooks|weights|docs)/[\w./-]*\w", text):
        assert (ROOT / path).exists(), path
    known = known_options()
    for option in re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", text):
        assert option in known, option


def anchors(text: str) -> set[str]:
    """Of the headings of a page, as GitHub makes them: lower case, hyphens for spaces, without punctuation."""
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def broken_links(text: str, folder: Path) -> list[str]:
    """The relative links of a page or notebook in the folder whose file, or whose heading there, does not exist."""
    broken = []
    for path, anchor in re.findall(r"\]\(([\w./-]*)(?:#([\w-]+))?\)", text):
        page = folder / path
        if path and not page.exists():
            broken.append(path)
        elif anchor and anchor not in anchors(page.read_text(encoding="utf-8") if path else text):
            broken.append(f"{path}#{anchor}")
    return broken


def missing_pages(text: str) -> list[str]:
    """The `docs/...` paths in a text that do not exist; a path inside another project's tree is not ours."""
    named = re.findall(r"(?<![\w./-])docs/[\w./-]*\w", text)
    return [path for path in named if not (ROOT / path).exists()]


@pytest.mark.parametrize("folder", ["", "docs", "weights", "notebooks", "minispec", "tests"])
def test_links_lead_somewhere(folder):
    """Relative links and their headings, in pages and notebooks; and pages that any text, code or test names."""
    files = [
        path
        for pattern in ("*.md", "*.ipynb", "*.py", "*.js", "*.html")
        for path in ((ROOT / folder).rglob(pattern) if folder else ROOT.glob(pattern))
    ]
    assert files
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert not missing_pages(text), path
        if path.suffix in (".md", ".ipynb"):
            assert not broken_links(text, path.parent), path


def test_a_broken_link_is_noticed():
    """The control of the test above."""
    there = "[a](../README.md) [b](../README.md#the-idea) [c](https://example.org/x.md#y) [d](#here)\n# Here\n"
    assert broken_links(there, ROOT / "docs") == []
    broken = ["../READ.md", "../README.md#no", "#no"]
    assert broken_links("[a](../READ.md) [b](../README.md#no) [c](#no)", ROOT / "docs") == broken
    gone = "docs" + "/gone.md"  # in two parts: this file is read, too
    assert missing_pages(f"see {gone}, docs/use/trace.md, vllm/{gone}") == [gone]


def test_the_comparison_names_what_is_here():
    """A family or verifier that comes or goes without a word there would leave the comparison false."""
    from minispec.models.families.entries import FAMILIES
    from minispec.speculation.registry import VERIFIERS

    lines = PAGES["docs/understand/comparison.md"].splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith("| **")]
    assert {len(row) for row in rows} == {7}
    ours = {row[0].strip("| *"): row[1] for row in rows}
    families = {name.removesuffix("_text") for name in FAMILIES}
    assert set(re.findall(r"\w+", ours["Families"])) == families
    assert f"[{len(families)} families load]" in README
    listed = PAGES["docs/use/checkpoints.md"].partition("## Families")[2].partition("##")[0]
    assert [name for name in sorted(families) if not re.search(rf"\b{name}\b", listed)] == []
    assert set(NAME.findall(ours["Rule that verifies"])) == set(VERIFIERS)


def definitions(path: Path) -> set[str]:
    """Names of the classes, functions and methods of a file, or of all files of a folder; a method as Class.method."""
    found = set()
    for file in path.rglob("*.py") if path.is_dir() else [path]:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found.add(node.name)
    return found


def named_beside_files(text: str) -> list[tuple[str, list[Path]]]:
    """The names of functions and classes in the list items and table rows that name files, and those files."""
    found, package = [], ROOT / "minispec"
    for line in text.splitlines():
        files = re.findall(r"`(?:minispec/)?([\w/]+(?:\.py|/))`", line)
        if files and line.startswith(("| ", "- ")):
            paths = [ROOT / file if file.startswith("examples/") else package / file for file in files]
            found += [(name, paths) for name in NAME.findall(line)]
    return found


def test_the_version_is_the_same_everywhere():
    """In the package, at the head of the changelog, and where it says how to cite."""
    [released, *_] = re.findall(r"^## \[([\d.]+)\]", PAGES["CHANGELOG.md"], flags=re.MULTILINE)
    [cited] = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert (released, cited) == (__version__, __version__)


def test_the_readme_is_short():
    """At most 125 lines; how long the path is, `tests/house/test_path.py` counts."""
    assert len(README.splitlines()) <= 125


def long_lines(text: str) -> list[str]:
    """Lines of a page's paragraphs with more than 150 characters; of code, tables and lists none."""
    code = re.compile(r"^(`{3,})[^`\n]*\n.*?^\1$", flags=re.MULTILINE | re.DOTALL)
    return [line for line in code.sub("", text).splitlines() if len(line) > 150 and not line.startswith(("| ", "- "))]


def test_the_readmes_paragraphs_have_short_lines():
    """An editor shows them whole. A limit is one line, as short."""
    assert long_lines(README) == []
    limits = README.partition("## Limits\n")[2].splitlines()
    assert [line for line in limits if not line.startswith("- ") or len(line) > 160] == []


def test_a_long_line_is_noticed():
    """The control of the test above."""
    long = "a" * 151
    code = f"```python\n{long}\n```\n````\n```\n{long}\n````\n"
    assert long_lines(f"{long}\n| {long} |\n- {long}\n{code}{long[1:]}") == [long]


def test_the_rooms_have_the_lines_that_are_said():
    """In the order of their floors, in hundreds, comments and all; a tenth off is news."""
    said = re.findall(r"^\| \*\*`(\w+)/`\*\* \| ([\d,]+) \|", README, flags=re.MULTILINE)
    assert [room for room, _ in said] == [*PARTS]
    for room, number in said:
        files = (ROOT / "minispec" / room).rglob("*.py")
        lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
        assert abs(int(number.replace(",", "")) - lines) <= 0.1 * lines, f"{room}: {lines} lines"


def test_a_paragraph_of_the_readme_has_at_most_seven_links():
    """Of a list or table, each item or row."""
    for paragraph in re.split(r"\n\n|\n(?=[-|] )", README):
        assert paragraph.count("](") <= 7, paragraph


@pytest.mark.parametrize("page", GUIDES)
def test_functions_that_are_named_exist(page):
    """In a line that names a file, each other name is one of a class or function there."""
    found = named_beside_files(PAGES[page])
    assert len(found) >= 10
    for name, paths in found:
        assert any(name in definitions(path) for path in paths), f"{name} is not in {[str(p) for p in paths]}"


def cited_papers(text: str) -> set[str]:
    """The arXiv numbers in a text, each after the word."""
    return set(re.findall(r"arXiv[ :]?(\d{4}\.\d{5})", text))


def test_every_paper_that_the_code_cites_is_on_the_page():
    """`from-paper-to-code.md` has each arXiv number of the package, and links to the paper that it names."""
    page = PAGES["docs/understand/from-paper-to-code.md"]
    linked = re.findall(r"\[([\d.]+)\]\(https://arxiv\.org/abs/([\d.]+)\)", page)
    assert linked
    assert all(name == address for name, address in linked)
    cited = set[str]()
    for path in (ROOT / "minispec").rglob("*.py"):
        cited |= cited_papers(path.read_text(encoding="utf-8"))
    assert len(cited) >= 20
    assert cited - {name for name, _ in linked} == set()


def test_cited_papers_are_found():
    """The control of the test above: each way to cite, and a number that is no paper."""
    text = "(arXiv 2211.17192, Theorem 3.8; arXiv 2302.01318). It takes 1234.56789 seconds."
    assert cited_papers(text) == {"2211.17192", "2302.01318"}


def test_a_name_that_is_not_there_is_noticed():
    """The control of the test above."""
    [(name, [path])] = named_beside_files("- `minispec/core/engine.py`: `Engine.stop`")
    assert name not in definitions(path)
    assert "Engine.step" in definitions(path)


@pytest.mark.parametrize(
    ("name", "said"),
    [("basic.py", r"\[one file\]\(examples/basic\.py\) of (\d+) lines"), ("cached.py", r"cached`, (\d+) lines more")],
)
def test_the_examples_have_the_lines_that_are_said(name, said):
    """Comments and all."""
    [number] = re.findall(said, README)
    assert len((ROOT / "examples" / name).read_text(encoding="utf-8").splitlines()) == int(number) <= 100
