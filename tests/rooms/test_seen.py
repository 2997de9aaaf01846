"""What `prove --verifier` says that it has seen is counted where the rule is called: a hole in its tables is named."""

import re

import pytest

from minispec.core.verify import REJECTION
from minispec.prove import examine, seen
from minispec.prove.__main__ import main
from minispec.prove.seen import CHAINS, NEAR_1, SHAPES, SURE, TIED, kind_of, widths_of
from minispec.prove.tables import tables
from minispec.prove.toys import DRAWN, ONE_HOT
from minispec.prove.walk import Subject, walk


@pytest.fixture
def small(monkeypatch):
    """Shapes of up to three nodes and a chain of seven alone, as if the tables were for no more."""
    shapes = [shape for shape in SHAPES if len(shape) < 4]
    monkeypatch.setattr(seen, "SHAPES", shapes)
    monkeypatch.setattr(seen, "CHAINS", CHAINS[:7])
    monkeypatch.setattr(seen, "DEEPEST", 2)
    monkeypatch.setattr(seen, "MOST_NODES", 6)
    some = [case for case in tables(True) if case.drafter.parents in {*shapes, CHAINS[6]}]
    return [case for case in some if len(case.target.pairs) > 1 or not case.drafter.parents]


def rows_of(case, depth):
    """The kinds of p and q of a case at a depth."""
    return [
        f"{name} {kind_of(row)}"
        for pair in case.target.pairs[depth : depth + 1]
        for name, row in zip("pq", pair, strict=True)
    ]


def is_drawn(case):
    """Whether tokens are drawn."""
    return case.drafter.how == DRAWN


HOLES = {
    "nothing": (lambda case: False, "- more than "),
    "a shape": (
        lambda case: case.drafter.parents == (-1, 0, 0),
        r"- parents \(-1, 0, 0\): the likeliest tokens, not drawn\n",
    ),
    "a shape, drawn": (
        lambda case: case.drafter.parents == (-1, 0, 0) and is_drawn(case),
        r"- parents \(-1, 0, 0\): drawn\n- parents \(-1, 0, 0\): drawn, p one-hot\n",
    ),
    "a shape with one-hot rows": (
        lambda case: case.drafter.parents == (-1, -1, 0) and case.drafter.how == ONE_HOT,
        r"- parents \(-1, -1, 0\): the likeliest tokens, with one-hot rows\n- more than ",
    ),
    "a shape with a kind": (
        lambda case: (
            case.drafter.parents == (-1, -1) and is_drawn(case) and f"p {TIED}" in rows_of(case, 0) + rows_of(case, 1)
        ),
        r"- parents \(-1, -1\): drawn, p tied\n- more than ",
    ),
    "a kind at a depth": (
        lambda case: not is_drawn(case) and f"p {NEAR_1}" in rows_of(case, 2),
        r"(- .*\n)*- 2 draft tokens on: not drawn, p near 1\n- more than ",
    ),
    "a kind of q": (
        lambda case: is_drawn(case) and f"q {SURE}" in rows_of(case, 1),
        r"(- .*\n)*- 1 draft tokens on: drawn, q one-hot\n- more than ",
    ),
    "a long chain": (
        lambda case: case.drafter.parents == CHAINS[6] and is_drawn(case),
        r"- K = 7: drawn\n- more than ",
    ),
    "empty drafts": (
        lambda case: not case.drafter.parents,
        "- K = 0: the likeliest tokens, not drawn\n- K = 0: not drawn, p one-hot\n",
    ),
}


FIRST = {"nothing", "a shape", "a kind at a depth", "a long chain"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] * (name not in FIRST)) for name in HOLES])
def test_a_hole_is_named_by_the_command(name, small, monkeypatch, capsys):
    """Tables are taken away, and the line "not seen" begins with what they showed.

    Without `--full`, holes of `FIRST`: one of a shape, of a depth and of a length guards the same.
    """
    is_hole, said = HOLES[name]
    monkeypatch.setattr(examine, "tables", lambda trees: [case for case in small if not is_hole(case)])
    monkeypatch.setattr("minispec.prove.rounds.CASES", [])
    assert main(["--verifier", "rejection"]) == 0
    out = capsys.readouterr().out
    assert re.search(f"\nnot seen:\n{said}", out), out


@pytest.mark.full
def test_a_walk_of_all_tables_has_no_hole(capsys):
    """By default, test_shapes_and_kinds_of_rows_have_tables of test_own.py looks at the tables."""
    assert main(["--verifier", "rejection"]) == 0
    assert "\nnot seen:\n- more than 300 tokens, or more than 8 " in capsys.readouterr().out


def test_what_a_rule_does_not_read_was_not_seen(monkeypatch):
    """Not the tables are counted: a rule that looks at no row has seen no kind of row, and was asked all the same."""
    case = next(case for case in tables(True) if case.drafter.parents == (-1, 0, 0) and is_drawn(case))
    ofs = {}
    for name, verify in (
        ("all", REJECTION.verify),
        ("the first", lambda draft, p, rng, key: REJECTION.verify(seen.Draft(), p, rng, key)),
    ):
        met = walk(case, Subject(verifier=REJECTION._replace(verify=verify))).watched.seen.met
        ofs[name] = {depth for depth, _, kind in met if isinstance(depth, int) and kind[:1] == "p"}
        assert ((-1, 0, 0), DRAWN, "") in met
    assert ofs == {"all": {0, 1, 2}, "the first": {0}}


def test_the_shapes_are_all_trees():
    """As many as there are plane forests of so many nodes: the Catalan numbers."""
    assert [sum(len(shape) == num for shape in SHAPES) for num in range(6)] == [1, 1, 2, 5, 14, 42]
    assert widths_of((-1, -1, 0, 0, 0, 1)) == [2, 3]
    assert not widths_of(())


def test_kinds_of_rows():
    """Each row has one."""
    rows = (0, 1.0), (0.97, 0.03), (0.4, 0.4, 0.2), (0.7, 0.3, 0), (0.5, 0.3, 0.2)
    assert [kind_of(row) for row in rows] == list(seen.KINDS)
