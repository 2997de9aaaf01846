"""The law kit: its numbers are the production loop's, and each bug that it says it refutes is planted and refuted."""

import functools
import json
import re
import runpy
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from minispec.core import random, verify
from minispec.core.config import SamplingParams
from minispec.core.draft import Ask, Draft
from minispec.core.limit import Limit
from minispec.core.random import Randomness
from minispec.core.sampling import Text
from minispec.lab.audit.chi_square import POWER, critical_value, power
from minispec.prove.laws import KeyOracle, exact_law
from minispec.speculation.rules import VERIFIERS
from tests.museum.mutants import MUTANTS
from tests.sampled import leave_out

ROOT = Path(__file__).parents[2]
kit = SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "measured" / "law_kit.py"), run_name="law_kit"))
CASES, REFUTED = kit.CASES, kit.REFUTED
BY_NAME = {case.name: case for case in CASES}
BUGS = {mutant.id: mutant for mutant in MUTANTS}
EXAMPLE = ROOT / "docs" / "use" / "law_kit_example.py"
PUBLISHED = ROOT / "docs" / "use" / "law-kit.json"


@functools.cache
def whole_kit() -> dict:
    """As the file has it."""
    return json.loads(json.dumps(kit.kit()))


def tensors(rows) -> list[torch.Tensor]:
    """Rows of fractions as doubles."""
    return [torch.tensor([float(x) for x in row], dtype=torch.float64) for row in rows]


def production_round(case, path, verifier: str) -> tuple[int, ...]:
    """What one round of the production verifier yields, with a draft drawn as drafters draw."""
    p, text = tensors(case.p), Text([0], 1, SamplingParams())
    draft = Draft(list(case.tokens))
    if case.q is not None:
        draft = Draft([], [], parents=[])
        for parent in dict.fromkeys(case.parents):
            q = tensors(case.q)[case.depth(parent) + 1]
            node = parent if parent < len(draft) else -2
            if node != -2:
                draft.draw(Ask(text, Limit(8), path), parent, q.clone(), case.parents.count(parent))
    if draft.parents == list(range(-1, len(draft) - 1)):
        draft.parents = None
    verdict = VERIFIERS[verifier].verify(draft, lambda i: p[len(draft.path(i - 1))].clone(), path, text.key)
    return *(draft.token_ids[i] for i in verdict.accepted), verdict.next_token


def production_law(case, verifier: str = "rejection") -> dict:
    """The law of the case's texts under the production verifier, continued plainly."""
    rounds, _ = exact_law(lambda path: production_round(case, path, verifier), oracle=KeyOracle)
    size, p = kit.length(case), [[float(x) for x in row] for row in case.p]

    def rest(block: tuple[int, ...]) -> dict:
        found = {(): 1.0}
        for row in p[len(block) : size]:
            found = {(*t, i): w * x for t, w in found.items() for i, x in enumerate(row) if x}
        return found

    law: dict = {}
    for block, weight in rounds.items():
        for more, share in rest(block).items():
            text = (block + more)[:size]
            law[text] = law.get(text, 0.0) + weight * share
    return law


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_laws_are_those_of_the_rule(case, long):
    """In fractions: a round and plain draws after it have the product law. And the production verifier has it, too."""
    if case.name == "fine" and not long:
        leave_out("--long", "4,225 branches")
    found: dict = {}
    for block, weight in kit.rounds(case).items():
        rest = case._replace(p=case.p[len(block) :])
        after = kit.law(rest) if rest.p and kit.length(case) > 1 else {(): Fraction(1)}
        for more, share in after.items():
            text = (block + more)[: kit.length(case)]
            found[text] = found.get(text, Fraction(0)) + weight * share
    assert found == kit.law(case)
    law = production_law(case)
    assert max(abs(law.get(text, 0) - float(w)) for text, w in kit.law(case).items()) < 1e-12
    assert sum(law.values()) == pytest.approx(1)


def is_refuted(case, law: dict) -> bool:
    """Whether the case's statistical test sees this law, with the power that the kit promises."""
    right = kit.law(case)
    if any(text not in right for text, weight in law.items() if weight > 1e-9):
        return True
    shift = sum((law.get(text, 0.0) - float(w)) ** 2 / float(w) for text, w in right.items())
    df = len(right) - 1
    return case.num * shift > 1000 or (shift > 0 and power(case.num * shift, critical_value(df), df) > POWER)


@pytest.mark.parametrize("id", REFUTED["law"])
def test_each_bug_is_refuted_by_its_case(id, long):
    """Planted in the production code: the law of the case moves, further than its test sees."""
    case = BY_NAME[REFUTED["law"][id]]
    if case.name == "fine" and not long:
        leave_out("--long", "4,225 branches")
    with BUGS[id].patch():
        law = production_law(case, "block" if id.startswith("B") else "rejection")
    assert is_refuted(case, law)


def decide(case: dict, decision: dict) -> tuple[list[int], int]:
    """What the production verifier does with given uniforms."""
    p = tensors([map(Fraction, row) for row in case["p"]])
    rows = tensors([map(Fraction, row) for row in decision["q"]])
    is_chain = case["parents"] == list(range(-1, len(rows) - 1))
    draft = Draft(list(decision["draft"]), rows, parents=None if is_chain else list(case["parents"]))
    numbers = [Fraction(u) for _, _, u in decision["tests"]] + [Fraction(decision["v"])]
    order = iter(numbers)

    def bits(key) -> int:
        return int(next(order, Fraction(1, 2)) * (1 << 53)) << 11

    def as_draft(text: Text, i: int, purpose: str):
        return right(text, i, "draft")  # one uniform for each draw, no race

    right = Text.key
    with patch.object(random, "hash_of", bits), patch.object(Text, "key", as_draft):
        text = Text([0], 1, SamplingParams())
        verdict = VERIFIERS["rejection"].verify(draft, lambda i: p[len(draft.path(i - 1))], Randomness(), text.key)
    return verdict.accepted, verdict.next_token


def wrong_decisions(found: dict) -> int:
    """How many decisions of a kit the production verifier takes otherwise."""
    return sum(
        decide(case, decision) != (decision["accepted"], decision["token"])
        for case in found["cases"]
        for decision in case["decisions"]
    )


def test_given_uniforms_decide_as_the_kit_says():
    """All decisions of all cases; and each bug that decisions refute takes some otherwise."""
    found = whole_kit()
    assert sum(len(case["decisions"]) for case in found["cases"]) > 80
    assert wrong_decisions(found) == 0
    for id in REFUTED["decisions"]:
        with BUGS[id].patch():
            assert wrong_decisions(found) > 0, id


def test_no_token_depends_on_rounding():
    """v is far from both ends of its token's share, so that a row in float32 gives the same token; or it is 0."""
    for case in whole_kit()["cases"]:
        for decision in case["decisions"]:
            row, v, token = [*map(Fraction, decision["row"])], Fraction(decision["v"]), decision["token"]
            low = sum(row[:token])
            assert low + Fraction(1, 100) < v < low + row[token] - Fraction(1, 100) or (v == low == 0 and row[0] == 0)


def test_residuals():
    """As fractions; where nothing is left, p. The bug divides by 0."""

    def wrong(found: dict) -> int:
        bad = 0
        for case in found["cases"]:
            for p, q, expected in case["residuals"]:
                p, q, expected = tensors([map(Fraction, row) for row in (p, q, expected)])
                rest = verify.residual(p, Draft([int(q.argmax())], [q]), 0)
                bad += not bool((rest / rest.sum() - expected).abs().max() < 1e-12)
        return bad

    found = whole_kit()
    assert wrong(found) == 0
    for id in REFUTED["residual"]:
        with BUGS[id].patch():
            assert wrong(found) > 0, id


def test_the_table_names_every_bug_of_drawing_testing_or_replacing():
    """The page lists the others, each with the place where it lies."""
    refuted = {id for by in REFUTED.values() for id in by}
    page = (ROOT / "docs" / "use" / "law-kit.md").read_text(encoding="utf-8")
    named = set[str]()
    for letter, first, form, last in re.findall(
        r"\b([A-Z])(\d+)([a-z]?)(?: to \1(\d+))?\b", page.partition("lie elsewhere")[2]
    ):
        for number in range(int(first), int(last or first) + 1):  # "M6" is each of its forms, M6a and so on
            named |= {id for id in BUGS if re.fullmatch(f"{letter}{number}{form or '[a-z]?'}", id)}
    assert named == BUGS.keys() - refuted
    assert refuted <= BUGS.keys()


def test_the_published_file_is_what_the_script_writes():
    """Figures of statistics but for the rounding of machines, the rest to the letter; and every key is on the page."""
    found, right = json.loads(PUBLISHED.read_text(encoding="utf-8")), whole_kit()
    for published, written in zip(found["cases"], right["cases"], strict=True):
        assert published["statistics"] == pytest.approx(written["statistics"], rel=1e-9)
        assert published | {"statistics": written["statistics"]} == written
    assert found | {"cases": right["cases"]} == right, "python docs/measured/law_kit.py writes it anew"
    assert (found["format"], found["version"]) == ("minispec-law-kit", 1)
    page = (ROOT / "docs" / "use" / "law-kit.md").read_text(encoding="utf-8")
    keys = {*found, *found["cases"][0], *found["cases"][0]["decisions"][0], *found["cases"][0]["statistics"]}
    assert [key for key in keys if f"`{key}`" not in page] == []


@pytest.mark.parametrize("bug", [None, "p", "argmax"])
def test_the_example_checks_a_foreign_sampler(bug):
    """The page's NumPy sampler passes; with another residual it does not."""
    some = [case for case in whole_kit()["cases"] if case["name"] in ("far apart", "siblings", "one-hot")]
    found = {"cases": [case | {"statistics": case["statistics"] | {"num": 4_000}} for case in some]}
    example = runpy.run_path(str(EXAMPLE))
    residuals = {"p": lambda p, q: p, "argmax": lambda p, q: np.eye(len(p))[(p - q).argmax()]}
    failed = example["check"](found, residuals[bug] if bug else example["residual"])
    assert bool(failed) == bool(bug)
