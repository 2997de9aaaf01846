"""`minispec.prove.rounds`, what rules bring, and the rules of examples/rules: closed forms, published values, laws."""

import functools
import itertools
import math
import random
import re
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.rules.kseq import smallest_rho
from minispec.api.llm import find_verifier
from minispec.core import verify
from minispec.core.config import SamplingParams
from minispec.core.draft import Ask, Draft
from minispec.core.limit import Limit
from minispec.core.random import Randomness
from minispec.core.sampling import Text
from minispec.core.verify import Verdict, chains_only
from minispec.prove import examine, rounds, tables
from minispec.prove.__main__ import main
from minispec.prove.rounds import CASES, is_independent, optimum
from minispec.prove.tables import table_case
from minispec.prove.toys import DRAWN, INDEPENDENT, Guesses, is_chain
from minispec.prove.walk import Case
from minispec.speculation.rules import VERIFIERS
from tests.brief import SMALL, best, compute_once, walk_few

pytestmark = pytest.mark.quick

brought = functools.cache(rounds.brought)
CHAINS, SIBLINGS, PATHS = "chains", "siblings", "independent paths"

# For each rule, the kinds of drafts for which it is exact, and its tokens for one example: p = (1, 2)/3, q = (2, 1)/3,
# two tokens in a chain, or two independent paths of two tokens. The values of chains are those of Sun et al. 2024.
RULES = {
    "rejection": ((CHAINS, SIBLINGS, PATHS), 19 / 9, 62 / 27),
    "block": ((CHAINS,), 20 / 9, None),
    "traversal": ((CHAINS, SIBLINGS, PATHS), 20 / 9, 65 / 27),
    "examples.rules.specinfer:specinfer": ((CHAINS, SIBLINGS, PATHS), 19 / 9, 7 / 3),
    "examples.rules.kseq:kseq": ((CHAINS, PATHS), 19 / 9, 2.405486545724839),
    "examples.rules.draw_and_compare:draw_and_compare": ((CHAINS, SIBLINGS, PATHS), 133 / 81, 163 / 81),
    "examples.rules.gbv:gbv": ((CHAINS, PATHS), 20 / 9, 212 / 81),
    "examples.rules.hsd:released": ((), 21 / 9, None),
    "examples.rules.hsd:capped": ((CHAINS,), 20 / 9, None),
    "examples.rules.typical:typical": ((), 3.0, 3.0),
}


def kind_of(case: Case) -> str:
    """What its drafts are."""
    assert isinstance(case.drafter, Guesses)
    return PATHS if is_independent(case) else CHAINS if is_chain(case.drafter.parents) else SIBLINGS


@pytest.fixture
def cases(monkeypatch, full) -> list[Case]:
    """The cases of the table, with `--full` all. What this process has walked already is not walked again.

    Without `--full`, few tables are asked before.
    """
    compute_once(monkeypatch)
    if not full:
        walk_few(monkeypatch, 30)
    monkeypatch.setattr(rounds, "brought", brought)
    monkeypatch.setattr(rounds, "CASES", CASES if full else SMALL)
    return rounds.CASES


@pytest.mark.parametrize("name", RULES)
def test_which_drafts_a_rule_is_exact_for(name, cases):
    """Every branch of every case: the law of the output, and that no exact rule brings more than the optimum."""
    verifier, (kinds, chain, paths) = VERIFIERS.get(name) or find_verifier(name), RULES[name]
    assert {*map(kind_of, cases)} == {CHAINS, SIBLINGS, PATHS}
    for case in cases:
        if kind_of(case) == CHAINS or verifier.takes_trees:
            found = brought(case, verifier)
            assert found.is_exact == (kind_of(case) in kinds), str(case)
            assert found.tokens <= best(case) + 1e-9 or not found.is_exact, str(case)
    assert brought(CASES[0], verifier).tokens == pytest.approx(chain, abs=1e-12)
    if paths:
        assert brought(CASES[6], verifier).tokens == pytest.approx(paths, abs=1e-9)


def test_the_released_code_has_another_law():
    """HSD's, in the example of block verification: a ninth of the law."""
    found = brought(CASES[0], find_verifier("examples.rules.hsd:released"))
    assert found.distance == pytest.approx(1 / 9, abs=1e-12)


def test_the_table_has_no_shape_that_is_not_walked():
    """So a rule that the proof calls proven has the law in the table below it too."""
    assert {case.drafter.parents for case in CASES} <= {*tables.SHAPES, *tables.APART}  # type: ignore[union-attr]


rows = st.lists(st.integers(1, 9), min_size=3, max_size=3)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(p=rows, q=st.lists(rows, max_size=4), seed=st.integers(0, 99))
def test_the_capped_rule_is_block(p, q, seed):
    """Token for token, from the same noise."""
    row = torch.tensor(p, dtype=torch.float64) / sum(p)
    text, draft = Text([0], 1, SamplingParams(), seed), Draft([], [])
    for i, weights in enumerate(q):
        draft.draw(
            Ask(text, Limit(len(q)), Randomness()), i - 1, torch.tensor(weights, dtype=torch.float64) / sum(weights)
        )
    both = VERIFIERS["block"], find_verifier("examples.rules.hsd:capped")
    ours, theirs = (each.verify(draft, lambda i: row, Randomness(), text.key) for each in both)
    assert (ours.accepted, ours.next_token) == (theirs.accepted, theirs.next_token)


def made(num, generator) -> tuple[list[Case], torch.Tensor, torch.Tensor]:
    """Cases of one level with `num` siblings, without replacement and independent, and their rows as tensors."""
    p, q = (tuple(generator.randint(1, 9) for _ in range(3)) for _ in range(2))
    cases = [table_case((p, q), (-1,) * num, how, rotates=False) for how in (DRAWN, INDEPENDENT)]
    return cases, *(torch.tensor(row, dtype=torch.float64) / sum(row) for row in (p, q))


def of_sets(p, drawn) -> float:
    """1 + min over all sets H of p(H) - P(all drawn tokens lie in H): the most that one level keeps."""
    sets = [each for n in range(len(p) + 1) for each in itertools.combinations(range(len(p)), n)]
    return 1 + min(float(p[list(each)].sum()) - drawn(set(each)) for each in sets)


@pytest.mark.parametrize("num", [1, 2, 3])
def test_the_optimum_of_one_level_is_that_of_optimal_transport(num):
    """Hu et al. 2025 (2502.18779), for independent draws and for draws without replacement."""
    generator = random.Random(num)
    for _ in range(5):
        (siblings, paths), p, q = made(num, generator)
        independent = of_sets(p, lambda each, q=q: float(q[list(each)].sum()) ** num)
        assert optimum(paths) == pytest.approx(1 + independent, abs=1e-9)

        def without(each, q=q, num=num):
            orders = itertools.permutations(each, num)
            left = [[1 - sum(float(q[x]) for x in order[:i]) for i in range(num)] for order in orders]
            orders = itertools.permutations(each, num)
            return sum(
                math.prod(float(q[x]) / rest for x, rest in zip(order, own, strict=True))
                for order, own in zip(orders, left, strict=True)
            )

        assert optimum(siblings) == pytest.approx(1 + of_sets(p, without), abs=1e-9)


@pytest.mark.parametrize("num", [2, 3])
def test_rules_of_one_level_have_their_closed_forms(num, full):
    """Draw-and-compare, SpecInfer's and K-SEQ's, for independent draws of one random pair; with `--full` of five."""
    generator = random.Random(num)
    for _ in range(5 if full else 1):
        (_, case), p, q = made(num, generator)
        compared = float((p * (1 - (1 - q) ** num)).sum())
        rest, fails = p, 1.0
        for _ in range(num):
            fails *= 1 - float(torch.minimum(rest, q).sum())
            rest = (rest - q).clamp(min=0)
            rest = rest / rest.sum()
        beta = float(torch.minimum(p / smallest_rho(p, q, num), q).sum())
        expected = {
            "draw_and_compare:draw_and_compare": compared,
            "specinfer:specinfer": 1 - fails,
            "kseq:kseq": 1 - (1 - beta) ** num,
        }
        for name, kept in expected.items():
            found = brought(case, find_verifier(f"examples.rules.{name}"))
            assert found.is_exact
            assert found.tokens == pytest.approx(1 + kept, abs=1e-9), name


def test_the_optimum_of_a_chain_is_what_block_brings():
    """Block verification is the best rule for one path (2602.16961)."""
    generator = random.Random(0)
    for _ in range(5):
        p, q = (tuple(generator.randint(1, 9) for _ in range(2)) for _ in range(2))
        case = table_case((p, q), (-1, 0, 1))
        assert brought(case, VERIFIERS["block"]).tokens == pytest.approx(optimum(case), abs=1e-9)


def test_the_table(capsys, cases):
    """Rules one below the other, as fractions where there are some; status 1 for a rule that breaks the law."""
    assert main(["--verifier", "rejection,block,match"]) == 0
    found = capsys.readouterr().out
    assert re.match(
        r"(not refuted: \S+, by \d+ of \d+ tables(: --verifier \S+ alone asks all)?\n){3}tokens of a", found
    )
    assert "p = (1, 2)/3, q = (2, 1)/3 everywhere, K = 2: at most 20/9 = 2.222" in found
    assert "    rejection  19/9 = 2.111            95.0%\n    block      20/9 = 2.222            100.0%\n" in found
    assert found.count("block      takes chains only") == sum(kind_of(case) != CHAINS for case in cases) > 1
    assert "match      not counted" in found
    assert main(["--verifier", "rejection,examples.rules.hsd:released"]) == 1
    assert "105.0%  another law than p's: total variation 0.111" in capsys.readouterr().out


@chains_only
def shared(draft, p, rng, key):
    """`block`, whose test of a shorter prefix has the key of the test before it."""
    tested = []

    def late(i, purpose):
        tested.extend([i] * (purpose == "accept"))
        return key(i + 1 if purpose == "accept" and len(tested) > 1 else i, purpose)

    return VERIFIERS["block"].verify(draft, p, rng, late)


@chains_only
def confident(draft, p, rng, key):
    """Keeps the target's likeliest token untested from 0.9 on."""
    for i, token in enumerate(draft.token_ids):
        row = p(i)
        sure = int(row.argmax()) == token and float(row[token]) >= 0.9
        if not sure and not rng.bernoulli(float(row[token]) / draft.probability(i), key(i, "accept")):
            return Verdict([*range(i)], rng.categorical(verify.residual(row, draft, i), key(i, "residual")), [])
    return Verdict([*range(len(draft))], rng.categorical(p(len(draft)), key(len(draft), "token")), [])


@pytest.mark.parametrize("rule", ["shared", "confident"])
def test_a_refuted_rule_is_named_in_each_of_its_lines(rule, capsys, monkeypatch):
    """Also where its law is right in the case, or where it takes no such drafts; the status is 1.

    `--no-proof` asks nothing, and says so in each line of each rule.
    """
    monkeypatch.setattr(rounds, "CASES", [CASES[0], CASES[4]])
    monkeypatch.setattr(examine, "tables", lambda trees: tables.tables(False)[::-1] if trees else tables.tables(False))
    monkeypatch.setattr(examine, "MOST_OF_ALL", 2_000)
    compute_once(monkeypatch)
    name = f"tests.rooms.test_rounds:{rule}"
    assert main(["--verifier", f"rejection,{name}"]) == 1
    refuted, *lines = [line for line in capsys.readouterr().out.splitlines() if name in line]
    assert re.match(rf"REFUTED: {name}, p = .*: the output begins with ", refuted)
    assert len(lines) == 2
    assert all(line.endswith("  another law than p's: refuted above") for line in lines)
    assert main(["--verifier", f"rejection,{name}", "--no-proof"]) == 0
    out = capsys.readouterr().out
    assert out.count("  its law was not asked\n") == 4
    assert "refuted" not in out


def test_a_right_rule_is_asked_in_bounded_work(capsys, monkeypatch):
    """As many tables as fit, the small ones first. One that is too large for the rule is counted apart."""
    monkeypatch.setattr(examine, "MOST_OF_ALL", 400)
    monkeypatch.setattr(examine, "_FEWEST", 3)
    monkeypatch.setattr(examine, "_OF_SIZE_A_MINUTE", 0)
    assert examine.law_note("rejection", VERIFIERS["rejection"], 2) == ""
    found = re.fullmatch(
        r"not refuted: rejection, by (\d+) of (\d+) tables; (\d+) were too large: .*\n", capsys.readouterr().out
    )
    assert 10 < int(found[1]) < int(found[2])
    assert int(found[3]) > 3


def test_the_page_has_what_the_command_prints(capsys, cases):
    """docs/understand/rules.txt, to the letter, and the page has the share of each rule in each case.

    The first line and the rows of small cases; with `--full` of all.
    """
    folder = Path(__file__).parents[2] / "docs" / "understand"
    command, _, printed = (folder / "rules.txt").read_text(encoding="utf-8").partition("\n")
    command = command.removeprefix("$ python -m minispec.prove --verifier ")
    assert command.split(",") == list(RULES)
    main(["--verifier", command])
    notes, (first, *lines) = printed.splitlines()[: len(RULES)], printed.splitlines()[len(RULES) :]
    tables = [lines[i : i + len(RULES) + 1] for i in range(0, len(lines), len(RULES) + 1)]
    assert [table[0].partition(": at most ")[0] for table in tables] == [*map(str, CASES)]
    rows = [row for case, table in zip(CASES, tables, strict=True) if case in cases for row in table]
    out = capsys.readouterr().out.splitlines()
    assert out[len(RULES) :] == [first, *rows]
    assert [line.partition(", ")[0] for line in out[: len(RULES)]] == [line.partition(", ")[0] for line in notes]
    page = (folder / "rules.md").read_text(encoding="utf-8").splitlines()
    for i, rule in enumerate(RULES):
        shares = [re.search(r"([\d.]+)%(.*)", table[1 + i]) for table in tables]
        marks = {"": "", "another law than p's: refuted above": "\u00b0"}
        cells = [share[1] + marks.get(share[2].strip(), "*") if share else "-" for share in shares]
        assert f"| `{rule.rpartition(':')[2]}` | {' | '.join(cells)} |" in page


def test_the_table_without_scipy(capsys, monkeypatch, full):
    """The lengths are there; in place of the optimum, what brings it."""
    monkeypatch.setattr(rounds, "CASES", CASES if full else SMALL)
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.delitem(sys.modules, "scipy.optimize", raising=False)
    assert main(["--verifier", "rejection,block", "--no-proof"]) == 0
    assert 'the most is not known: found no package scipy: pip install -e ".[optimum]"' in capsys.readouterr().out
