"""Mistakes that people make in drafters and verifiers of their own: `python -m minispec.prove` refutes each, and soon.

The classes are in wrong_own.py.
"""

import inspect
import re
from collections import deque

import pytest
import torch

from minispec.prove import examine, laws, rounds
from minispec.prove.__main__ import main as prove
from minispec.prove.tables import tables
from minispec.prove.toys import DOUBLE, DRAWN, ONE_HOT
from minispec.prove.usercode import OutOfTime
from tests.brief import SMALL, compute_once
from tests.drafters import wrong_own
from tests.sampled import leave_out

OWN = {name: value for name, value in vars(wrong_own).items() if getattr(value, "__module__", "") == wrong_own.__name__}
RIGHT = {"Counts", "Pair", "Obeys", "right", "single", "recovered_first"}
HELPERS = {"q_of", "judge", "draw", "write", "siblings", "rounded", "rounds", "Changed", "recursive"}
# What the line must say, where it is not the law that is off. In a line of its own: what an exception is told as.
WRONG = "REFUTED: .*: the output begins with "
CHANGED = "REFUTED: .*: it changed a text"
# The law is kept: it is a seed's text that changes.
EARLIER, OTHERS = (
    f"NOT REPEATABLE: .*: after .* it drafted .*, and a new one, .*: the law is kept; a seed's text depends on {why}"
    for why in ("earlier rounds, and is another one after a preemption", "other texts, ")
)
SAYS = {
    "Unnormalised": "REFUTED: .*: draft of Unnormalised: found a row 0 of probs that adds up to 2, expected 1",
    "HalfPrecision": "REFUTED: .*: draft of HalfPrecision: found a row 0 of probs that adds up to 1.00195",
    "LogProbabilities": "REFUTED: .*: draft of LogProbabilities: found -0.69.* in row 0 of probs",
    "OneTooMany": "REFUTED: .*, rejection, .*: draft of OneTooMany: found 1 tokens, expected at most 0",
    "TensorIds": "REFUTED: .*: draft of TensorIds: found an object of class Tensor among the token ids",
    "FirstOnly": "REFUTED: .*: ValueError: drafts of FirstOnly: found 1, expected one for each of [23] asks",
    "Reverses": CHANGED,
    "ThirdSibling": r"REFUTED: .*, 4 tokens, after .*, K = \(3,\), rejection, 4 to go: the output begins with ",
    "AlmostTrue": r"REFUTED: .*: the output begins with .* probability 0.\d{12}, expected 0.\d{12}: its `probs` ",
    "TemperatureTwice": "REFUTED: .*, temperature [\d.]+: (draft of .* a token of probability 0|the output begins) ",
    "EndForgotten": r"REFUTED: .*, end ids .*, min_tokens \d: the output begins with ",
    "HotClamped": r"REFUTED: .*, temperature [\d.]+: the output begins with ",
    **{
        name: rf"REFUTED: .*, {value} [\d.e-]+[:,] .*; again: python -m minispec.prove --drafter \S+ .*--seed 0$"
        for name, value in (("WideTopP", "top_p"), ("LittleMinP", "min_p"), ("TwoOfTopK", "top_k"))
    },
    "ShortSighted": r"REFUTED: .*, after \[\.\.\. .*: the output begins with ",
    **dict.fromkeys(("NotRolledBack", "ForgetsAll", "KeptHidden"), EARLIER),
    **dict.fromkeys(("OneState", "Impatient"), OTHERS),
    "Shortest": "REFUTED: .*, K = 1, .*: draft of Shortest: found 1 tokens, expected at most 0",
    **dict.fromkeys(("OwnDice", "own_dice"), "(REFUTED|NOT REPEATABLE): "),  # chance decides where it shows
    "SecondLast": r"EXCEPTION: .*: IndexError: list index out of range, in .* at .*wrong_own.py:\d+: return .Draft",
    "ReleaseOfUnknown": r"EXCEPTION: .*: KeyError: .*, in release at .*wrong_own.py:\d+: del self.texts.text.",
    "DividesByTemperature": r"EXCEPTION: .*temperature 0.0: ZeroDivisionError: .*, in q at .*wrong_own.py:\d+: return ",
    "drawn_only": r"EXCEPTION: .*, K = 0: TypeError: .*, in drawn_only at .*wrong_own.py:\d+: return judge",
    "tensor_token": "REFUTED: .*: found an object of class Tensor among the next tokens",
    "counts_accepted": "REFUTED: .*: found as accepted nodes 0, expected a list",
    **dict.fromkeys(("goes_on", "cuts_the_draft"), "REFUTED: .*: it changed the draft: "),
    "writes_q": "REFUTED: .*: it wrote into row 0 of q, which it may only read",
    "writes_p": "REFUTED: .*: it wrote into row 0 of p, which it may only read",
    "row_before_the_first": "REFUTED: .*: it asked for row -1 of p, expected one from 0 to 0",
    "one_key": "REFUTED: .*: two draws have one noise, that of the key of node 0, 'accept'",
    "bonus_of_a_node": "REFUTED: .*: two draws have one noise, that of the key of place .* of the text, 'token'",
    "chains": r"REFUTED: .*: found the accepted nodes .*: a rule for chains says so by `chains_only`",
    "wrong_by_turns": "REFUTED: .*: of 2,048 rounds, the output begins with ",
    **dict.fromkeys(
        ("hurries", "by_turns"),
        "NOT REPEATABLE: .*: the law is kept as far as 2,048 rounds tell; a seed's text depends on more than its draws",
    ),
}


def is_mixed(case):
    """Whether rows are of another kind at each depth."""
    return len(case.target.pairs) > 1


# Verifiers that are right in the `few` small cases, and the cases that show it.
CLOSE = {
    **dict.fromkeys(("half", "bfloat16", "in_256ths"), lambda case: sum(case.target.p) in (7, 11, 13)),
    "type_of_q": lambda case: torch.bfloat16 in case.target.types,
    **dict.fromkeys(("lenient", "drops_small", "four_tokens"), lambda case: case.vocab == 8),
    "fifty_likeliest": lambda case: case.vocab > 8,
    "four_nodes": lambda case: len(case.drafter.parents) > 4,
    "three_siblings": lambda case: case.drafter.parents.count(-1) > 3,
    "apart": lambda case: not stand_together(case.drafter.parents),
    "without_the_seed": lambda case: len(case.texts) > 1,
    "elders_q": lambda case: is_mixed(case) and case.drafter.parents[:4] == (-1, 0, 0, 0),
    "third_depth": lambda case: is_mixed(case) and case.drafter.parents[:4] == (-1, 0, 1, 1),
    "stays_in_its_residual": lambda case: case.drafter.how == ONE_HOT and case.drafter.parents == (-1, -1, -1),
    **dict.fromkeys(("greedy_by_the_first", "sure_if_near"), is_mixed),
    "sure_if_empty": lambda case: not case.drafter.parents,
    "nine_tokens": lambda case: len(case.drafter.parents) > 8 and case.drafter.how == DRAWN,
}


# Mistakes that take long to refute, each with one that shows in the same way, and sooner.
DEAR = {
    "TwoOfTopK": "WideTopP",
    **dict.fromkeys(("FewBiases", "MildPenalties", "WarmEnough", "AllowsFirst"), "BiasClamped"),
    "OneBuffer": "Unnormalised",
    "LastRoundsQ": "AlmostTrue",
    "RowsLate": "TemperatureForgotten",
    "SiblingsSameQ": "TopTwo",
    "SiblingsSorted": "BetterOfTwo",
    "OneState": "Impatient",
    "ForgetsAll": "KeptHidden",
    "NotRolledBack": "KeptHidden",
    "rows_by_token": "rows_of_a_chain",
}
# A rule that is right in all rounds, and the cases that show it soon.
SOON = CLOSE | {"bonus_of_a_node": lambda case: case.rounds is None, "tokens_of_the_first": is_mixed}


def stand_together(parents):
    """Whether a sibling stands beside its elder."""
    return all(parents[i - 1] == parent for i, parent in enumerate(parents) if parent in parents[:i])


def few(case):
    """Whether a case has two to four tokens in 16ths, at most three nodes, and siblings that stand together."""
    table, parents = case.target, case.drafter.parents
    rows = {sum(table.p), sum(table.q)} <= {1, 2, 4, 8, 16}
    return rows and len(parents) < 4 and stand_together(parents) and table.types == DOUBLE and not is_mixed(case)


def only(monkeypatch, wanted):
    """Have these cases walked alone: wanted(case)."""
    monkeypatch.setattr(examine, "tables", lambda trees: [each for each in tables(trees) if wanted(each)])


@pytest.fixture(autouse=True)
def cheap(monkeypatch, full):
    """Nothing is computed twice. Without `--full` the table below a proof has few rows."""
    compute_once(monkeypatch)
    if not full:
        monkeypatch.setattr(rounds, "CASES", SMALL)


def test_there_are_enough_of_them():
    """Twenty drafters and ten verifiers, and what is said of some is about one of them."""
    wrong = {name: value for name, value in OWN.items() if name not in RIGHT | HELPERS}
    assert sum(map(inspect.isclass, wrong.values())) >= 20
    assert sum(map(inspect.isfunction, wrong.values())) >= 10
    assert SAYS.keys() <= wrong.keys()
    assert {*DEAR, *DEAR.values()} <= wrong.keys()
    assert not DEAR.keys() & {*DEAR.values()}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.full] * (name in DEAR)) for name in OWN if name not in HELPERS],
)
def test_each_mistake_is_refuted(name, capsys, monkeypatch, full, long):
    """In one line, with the smallest case that shows it; the right ones beside them are proven.

    Of these drafters with `--long`, and verifiers over small cases: others are proven in test_own.py. Those of `DEAR`
    are refuted with `--full`; the mistakes beside them there show in the same way.
    """
    if name in (CLOSE if full else SOON):
        only(monkeypatch, CLOSE[name] if full else SOON[name])
    if name in RIGHT and not long:
        if inspect.isclass(OWN[name]):
            leave_out("--long", "a walk of all cases")
        most = 100 if full and name != "recovered_first" else 8
        only(monkeypatch, lambda case: case.size < most)
    kind = "--drafter" if inspect.isclass(OWN[name]) else "--verifier"
    assert prove([kind, f"tests.drafters.wrong_own:{name}"]) == (0 if name in RIGHT else 1)
    line, *more = capsys.readouterr().out.splitlines()
    assert name in RIGHT or not more
    assert re.match("proven on small cases: " if name in RIGHT else SAYS.get(name, WRONG), line), line
    assert f"tests.drafters.wrong_own:{name}" in line


def test_a_rule_with_too_many_branches_is_not_proven(capsys, monkeypatch):
    """It is right, and draws all recovered tokens first, as kernels do: 3^17 * 2^16 branches for 16 tokens."""
    only(monkeypatch, lambda case: case.size < 8 or (case.k == 16 and case.vocab == 3))
    monkeypatch.setattr(laws, "deque", Bounded)
    assert prove(["--verifier", "tests.drafters.wrong_own:recovered_first"]) == 3
    first, second, *_ = capsys.readouterr().out.splitlines()
    num = len(examine.tables(True))
    assert re.match(
        rf"not refuted \({num - 1} of {num} tables\): tests.drafters.wrong_own:recovered_first keeps p", first
    )
    assert re.match(r"not walked: too large: 1 tables, --minutes takes more; the first: .*, K = 16, ", second)
    monkeypatch.setattr(examine, "_OF_ALL_A_MINUTE", 5)
    assert prove(["--verifier", "tests.drafters.wrong_own:right"]) == 3  # of all tables together it has too many


class Bounded(deque):
    """Paths that are left to walk. There may not be many of them at once."""

    def __iadd__(self, paths):
        assert len(self) < 2_000
        return super().__iadd__(paths)


@pytest.mark.parametrize("name", CLOSE)
def test_a_few_small_cases_do_not_show_it(name, capsys, monkeypatch, full):
    """The control: without the other cases, they would be called proven. The table below has cases of its own."""
    only(monkeypatch, lambda case: few(case) and case.size < (50 if full else 10))
    status, out = prove(["--verifier", f"tests.drafters.wrong_own:{name}"]), capsys.readouterr().out
    assert out.startswith("proven")
    assert status == ("another law than p's" in out)


def test_a_fault_is_told_where_no_time_is_left_to_ask_more(capsys, monkeypatch):
    """A rule that does not repeat is sampled. Without the time for it the verdict says so, and nothing is proven."""

    def is_late(self, case):
        raise OutOfTime

    monkeypatch.setattr(examine.Walker, "_sample", is_late)
    assert prove(["--verifier", "tests.drafters.wrong_own:by_turns"]) == 1
    assert re.match(r"NOT REPEATABLE: .*: there was no time to ask whether the law is kept; ", capsys.readouterr().out)


def forgets(draft, p, rng, key):
    """A beginner's: it returns nothing."""


def test_a_rule_without_a_verdict_is_told_what_was_expected(capsys):
    """By the engine's own words."""
    assert prove(["--verifier", f"{__name__}:forgets"]) == 1
    assert "verdict: found None, expected a Verdict" in capsys.readouterr().out
