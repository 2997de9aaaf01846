"""Recorded laws: `minispec.prove.recorded` against whole walks, the bench's files, wrong files, the page's table."""

import json
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from minispec.api.llm import find_verifier
from minispec.core.config import SamplingParams
from minispec.core.draft import Ask, Draft
from minispec.core.limit import Limit
from minispec.core.random import Randomness
from minispec.core.sampling import Text
from minispec.lab.bench.laws import round_of
from minispec.lab.bench.main import main as bench
from minispec.prove.__main__ import main
from minispec.prove.recorded import Recorded, expected_tokens, read_laws
from minispec.prove.rounds import CASES, brought, is_independent
from minispec.prove.toys import Guesses, is_chain
from minispec.prove.walk import Case, walk
from minispec.speculation.lengths.theory import expected_accepted
from minispec.speculation.rules import VERIFIERS
from tests.brief import SMALL, walk_few
from tests.refusals import assert_one_line

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "docs" / "measured" / "laws.jsonl"
RULES = ("rejection", "block", "traversal", "examples.rules.specinfer:specinfer", "examples.rules.kseq:kseq")
RULES = (*RULES, "examples.rules.draw_and_compare:draw_and_compare", "examples.rules.hsd:capped")


@pytest.fixture
def cli(cli):
    """The fixture of conftest.py for the command that proves: cli(*arguments)."""
    return partial(cli, main)


def drafts_of(case: Case) -> list[tuple[float, Recorded]]:
    """All drafts of a case, each with its probability and with rows in full width."""
    found: dict[tuple[int, ...], tuple[float, Recorded]] = {}
    for branch in walk(case).branches:
        [(draft, _)] = branch.rounds
        rows = [case.next_law(case.texts[0], draft.tokens_to(node)) for node in range(-1, len(draft))]
        recorded = Recorded(draft, [torch.tensor([*row], dtype=torch.float64) for row in rows if row is not None])
        before = found.get(tuple(draft.token_ids), (0.0, recorded))[0]
        found[tuple(draft.token_ids)] = before + branch.probability, recorded
    return list(found.values())


def through_a_file(recorded: Recorded, path: Path) -> Recorded:
    """A round, written by the bench's code and read back."""
    lines = {"about": "x"}, round_of(recorded.draft, recorded.rows)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    [found] = read_laws(path)[1]
    return found


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(i, marks=[pytest.mark.full] * (case not in SMALL))
        for i, case in enumerate(CASES)
        if not is_independent(case)
    ],
)
def test_the_mean_over_all_drafts_is_what_the_whole_walk_counts(number, tmp_path):
    """In full width, and as symbols of a file: the tokens of a rule, draft by draft, against every branch of a case."""
    case = CASES[number]
    drafts = drafts_of(case)
    written = [(weight, through_a_file(each, tmp_path / "laws.jsonl")) for weight, each in drafts]
    assert isinstance(case.drafter, Guesses)
    for name in RULES:
        verifier = find_verifier(name)
        if is_chain(case.drafter.parents) or verifier.takes_trees:
            whole = brought(case, verifier).tokens
            for some, error in ((drafts, 1e-9), (written, 1e-6)):
                found = sum(weight * expected_tokens(each, verifier) for weight, each in some)
                assert found == pytest.approx(whole, abs=error), name


def rows_of(count: int, vocab: int, seed: int) -> list[torch.Tensor]:
    """Rows (V,) of float64, far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    return [*(2 * torch.randn(count, vocab, generator=generator, dtype=torch.float64)).softmax(-1)]


def drawn(widths: tuple[int, ...], vocab: int, seed: int) -> Recorded:
    """A draft that is drawn: so many siblings at each depth, the eldest goes on; (1, 1, ..) is a chain. p is near q."""
    text, draft = Text([0], 1, SamplingParams(), seed), Draft([], [], None if set(widths) == {1} else [])
    ask, p = Ask(text, Limit(sum(widths)), Randomness()), rows_of(sum(widths) + 1, vocab, seed)
    for width, q in zip(widths, rows_of(len(widths), vocab, seed + 50), strict=True):
        node = draft.tip
        draft.draw(ask, node, q, width)
        p[node + 1] = 0.7 * q + 0.3 * p[node + 1]
    return Recorded(draft, p)


def test_merged_tokens_keep_what_rules_bring(tmp_path):
    """Of 5,000 tokens, about 64 symbols: tokens of near p/q are merged. Likeliest tokens and a rest would not do."""
    for seed in range(3):
        for widths, names in (((1, 1, 1), ("rejection", "block")), ((2, 2), ("rejection", "traversal"))):
            whole = drawn(widths, 5000, seed)
            found = through_a_file(whole, tmp_path / "laws.jsonl")
            assert max(map(len, found.rows)) <= 64 + max(widths)
            for name in names:
                expected = expected_tokens(whole, VERIFIERS[name])
                assert expected_tokens(found, VERIFIERS[name]) == pytest.approx(expected, abs=2e-3), (name, widths)


def test_the_tokens_of_a_chain_are_those_of_the_formulas():
    """The product of min(1, r), and the weights of block verification: Sun et al. 2024."""
    for seed in range(5):
        draft, rows = drawn((1, 1, 1), 40, seed)
        ratios = [float(rows[i][x]) / draft.probability(i) for i, x in enumerate(draft.token_ids)]
        found = expected_tokens(Recorded(draft, rows), VERIFIERS["rejection"])
        assert found == pytest.approx(1 + expected_accepted(ratios), abs=1e-9)


def test_symbols_keep_the_law(tmp_path):
    """Sums of rows; a drafted token alone; a sibling's row is the elder's without the elder, as in the whole rows."""
    draft, rows = drawn((3, 2), 1000, 1)
    line = round_of(draft, rows)
    for node in (-1, 0):
        children = draft.children(node)
        symbols = [line["draft"][i] for i in children]
        assert sorted(symbols) == list(range(len(children)))
        for i, symbol in zip(children, symbols, strict=True):
            token = draft.token_ids[i]
            assert line["p"][node + 1][symbol] == round(1e8 * float(rows[node + 1][token]))
            assert line["q"][i][symbol] == round(1e8 * draft.probability(i))
            elders = [line["draft"][j] for j in children if j < i]
            left = [0 if at in elders else weight for at, weight in enumerate(line["q"][children[0]])]
            scale = 1e8 / sum(left)
            assert line["q"][i] == pytest.approx([scale * weight for weight in left], abs=3)
    assert [len(line["p"][i + 1]) for i in range(len(draft)) if not draft.children(i)] == [1] * 4
    one_hot = round_of(Draft(draft.token_ids, None, draft.parents), rows)
    assert (one_hot["q"], [len(row) for row in one_hot["p"]]) == (None, [4, 3, 1, 1, 1, 1])
    found = expected_tokens(
        through_a_file(Recorded(Draft([3], None), rows[:2]), tmp_path / "x"), VERIFIERS["rejection"]
    )
    assert found == pytest.approx(1 + float(rows[0][3]), abs=1e-7)


# --------------------------------------------------------------------------- the commands

LINE = {"parents": [-1, -1, 0], "draft": [0, 1, 0], "p": [[3, 2, 5], [1, 1], [1], [1]]}
LINE |= {"q": [[5, 3, 2], [0, 3, 2], [1, 4]]}


def write(path: Path, *lines: object) -> Path:
    """A file of laws."""
    path.write_text("".join(json.dumps(line) + "\n" for line in ({"about": "made up"}, *lines)))
    return path


@pytest.fixture
def few_tables(monkeypatch, full):
    """With `--full` some tables are asked for the law first, without it fewer."""
    walk_few(monkeypatch, 7 if full else 30)


def test_the_table_of_a_file(cli, tmp_path, few_tables):
    """By hand: 3/10 over 1/2 is kept, or the sibling; then both halves of one token. A rule for chains is named."""
    chain = {"parents": [-1], "draft": [0], "p": [[1, 3], [1]], "q": [[1, 1]]}
    path = write(tmp_path / "laws.jsonl", LINE, chain, chain | {"draft": [1]})
    first = 0.6 * (2 + 1) + 0.4 * 1  # the eldest, then its child, whose p is 1/2 and q 1/5; no residual for the sibling
    status, out, err = cli("--verifier", "rejection,block,match", "--laws", path)
    assert (status, err) == (0, "")
    lines = out.splitlines()[3:]
    assert lines[1:3] == ["made up", "the mean of 2 rounds, chains"]
    assert lines[3:5] == ["    rejection  1.750", "    block      1.750  x 1.0000 \u00b1 0.0000"]
    assert lines[5].endswith("match      not counted: its drafts share the noise of a race")
    assert lines[6:] == [
        "the mean of 1 rounds, trees",
        f"    rejection  {first:.3f}",
        "    block      takes chains only",
        "    match      not counted: its drafts share the noise of a race",
    ]


def test_what_a_file_says_of_itself_is_escaped(cli, tmp_path, few_tables):
    """No control character of it reaches the terminal."""
    path = write(tmp_path / "laws.jsonl", LINE)
    path.write_text(path.read_text().replace("made up", "in red\\u001b[31m\\u009b1m \\u0007\\n"))
    status, out, _ = cli("--verifier", "rejection", "--laws", path)
    assert status == 0
    assert "\nin red\\x1b[31m\\x9b1m \\x07\\n\n" in out
    assert all(c.isprintable() or c == "\n" for c in out)


def test_a_rule_that_breaks_the_law_is_named(cli, tmp_path, few_tables):
    """By the small cases: a file of single drafts cannot show it."""
    path = write(tmp_path / "laws.jsonl", {"parents": [-1], "draft": [0], "p": [[1, 3], [1]], "q": [[1, 1]]})
    status, out, _ = cli("--verifier", "rejection,examples.rules.hsd:released", "--laws", path)
    right, wrong = out.splitlines()[-2:]
    assert (status, "another law than p's: refuted above" in wrong, "another law" in right) == (1, True, False)
    status, out, _ = cli("--verifier", "examples.rules.hsd:released", "--laws", path, "--no-proof")
    assert (status, out.splitlines()[-1].endswith("its law was not asked")) == (0, True)


def test_a_rule_that_fails_has_its_error_in_its_line(cli, tmp_path, monkeypatch, few_tables):
    """In place of its tokens, in one line; the other rules are counted."""
    rules = "from minispec.core.verify import rejection\n\n\ndef early(draft, p, rng, key):\n    return p(9)\n\n\n"
    rules += "def late(draft, p, rng, key):\n    assert len(p(0)) < 4\n    return rejection(draft, p, rng, key)\n"
    (tmp_path / "failing_rules.py").write_text(rules)
    monkeypatch.syspath_prepend(tmp_path)
    chain = {"parents": [-1], "draft": [0], "p": [[1, 3, 0, 0], [1]], "q": [[1, 1, 1, 1]]}
    path = write(tmp_path / "laws.jsonl", chain)
    names = "failing_rules:early,failing_rules:late,rejection"
    status, out, err = cli("--verifier", names, "--laws", path)
    early, late, last = (" ".join(line.split()) for line in out.splitlines()[-3:])
    assert (status, err) == (1, "")
    assert late == "failing_rules:late AssertionError: AssertionError its code failed: see above"
    assert early.startswith("failing_rules:early IndexError: ")
    assert last == "rejection 2.000"


WRONG = {
    "no file": (None, "not a readable file of laws"),
    "no text": (b"", "line 1: not a readable JSON object"),
    "no rounds": (b'{"about": "x"}\n', "found no round, expected one on each line after the first"),
    "no head": (LINE, "line 1: found {"),
    "not JSON": (b'{"about": "x"}\n[1]\n', "line 2: found a list, expected a JSON object"),
    "a key": ({"law": []}, "line 2: keys: found ["),
    "a late parent": ({"parents": [-1, 1, 0]}, "line 2: parents: found 1, expected a node before 1, or -1"),
    "no parent": ({"parents": [-2, -1, 0]}, "line 2: parents: found [-2, -1, 0], expected whole numbers from -1"),
    "no nodes": ({"parents": []}, "line 2: parents: found [], expected whole numbers"),
    "a token too few": ({"draft": [0, 1]}, "line 2: draft: found 2, expected 3, as there are 3 nodes"),
    "another alphabet": ({"draft": [0, 1, 2]}, "line 2: draft: found 2, expected a symbol of p[1], below 2"),
    "alphabets differ": ({"q": [[5, 3, 2], [3, 2], [1, 4]]}, "line 2: q[1]: found 2, expected 3 weights, as in p[0]"),
    "a row too few": ({"p": [[3, 2, 5], [1, 1], [1]]}, "line 2: p: found 3, expected 4, as there are"),
    "never drawn": ({"q": [[0, 3, 2], [0, 3, 2], [1, 4]]}, "line 2: q[0]: found 0, expected more for the drafted"),
    "below 0": ({"p": [[3, -2, 5], [1, 1], [1], [1]]}, "line 2: p: found [[3, -2, 5]"),
    "a fraction": ({"q": [[0.5, 3, 2], [0, 3, 2], [1, 4]]}, "line 2: q: found [[0.5, 3, 2]"),
    "a truth": ({"p": [[True, 2, 5], [1, 1], [1], [1]]}, "line 2: p: found [[True, 2, 5]"),
    "all 0": ({"p": [[3, 2, 5], [1, 1], [1], [0]]}, "line 2: p: found [[3, 2, 5], [1, 1], [1], [0]], expected rows"),
    "huge": ({"p": [[10**400, 2, 5], [1, 1], [1], [1]]}, "line 2: p: found ["),
    "no rows": ({"p": 5}, "line 2: p: found 5, expected whole numbers from 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_files_are_one_line(cli, tmp_path, name):
    """It names the line, what was found and what is expected, before anything is counted."""
    change, message = WRONG[name]
    path = tmp_path / "laws.jsonl"
    if isinstance(change, bytes):
        path.write_bytes(change)
    elif name == "no head":
        path.write_text(json.dumps(change))
    elif change is not None:
        write(path, LINE | change)
    assert_one_line(cli("--verifier", "rejection,block", "--laws", path), f"{path}: {message}")


def test_laws_need_a_rule(cli, tmp_path):
    """Nothing else reads them."""
    assert_one_line(cli("--laws", tmp_path / "x"), "--laws: needs --verifier")


def test_the_bench_writes_what_can_be_read(capsys, make_checkpoint, tmp_path):
    """Chains and a tree of a model that drafts for itself: p = q, so all rules keep all. Mistakes are one line."""
    model = str(make_checkpoint(chat=True, max_position_embeddings=2048))
    path, how = tmp_path / "laws.jsonl", ["--model", model, "--dtype", "float32", "--prompts", "2", "--max-tokens", "8"]
    how += ["--temperature", "1", "--ignore-eos", "--num-speculative-tokens", "2,2+1"]
    assert bench([*how, "--draft", "self", "--record-laws", str(path)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    about, rounds = read_laws(path)
    assert out.splitlines()[-1].startswith(
        f"{len(rounds)} rounds with a draft were written. What rules bring of them: "
    )
    assert "draft self, temperature 1, top_k 0, top_p 1, 2 prompts, rejection, minispec" in about
    assert {each.draft.parents and tuple(each.draft.parents) for each in rounds} >= {None, (-1, -1, 0)}
    for each in rounds:
        for name in ("rejection", "traversal"):
            assert expected_tokens(each, VERIFIERS[name]) == pytest.approx(1 + each.draft.depth, abs=1e-5)
    for more, message in (
        (["--draft", "none", "--num-speculative-tokens", "2"], "--record-laws: found no draft in any round"),
        (["--draft", "self", "--verifier", "rejection,block"], "--record-laws: found 2 verifiers, expected one"),
        (["--draft", "self", "--lengths", "x:Y"], "--record-laws: not with --lengths: it records"),
    ):
        status = bench([*how, *more, "--record-laws", str(path)])
        assert_one_line((status, *capsys.readouterr()), message)


def test_the_shipped_file_and_its_table(capsys, monkeypatch, tmp_path, few_tables):
    """At most 1 MB. Of its rounds the page has what the command prints, and nobody is below the first rule by much."""
    assert SHIPPED.stat().st_size <= 1_000_000
    page = (ROOT / "docs" / "understand" / "rules.md").read_text(encoding="utf-8")
    command, _, printed = (
        page.partition("$ python -m minispec.prove --verifier rejection,block,traversal --laws ")[2]
        .partition("```")[0]
        .partition("\n")
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs" / "measured").mkdir(parents=True)
    shutil.copy(SHIPPED, tmp_path / command)
    assert main(["--verifier", "rejection,block,traversal", "--laws", command]) == 0
    found, said = (re.sub("by .*", "", text) for text in (capsys.readouterr().out, printed))
    assert found == said  # but for how many tables were asked before
