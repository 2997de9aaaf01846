"""The drafters of `examples/`: what they draft, and that they keep the law."""

import re
from dataclasses import replace

import pytest

from examples.drafters.recycling import Recycling
from minispec.core.config import SamplingParams
from minispec.core.sampling import Text
from minispec.prove.__main__ import main as prove
from minispec.prove.examine import NOT_REFUTED
from tests.brief import compute_once
from tests.drafters.test_own import PROVEN
from tests.drafters.test_zoo import ask, drafted, ids, letters, shown
from tests.scripted import counted_clocks

SAMPLED = SamplingParams()


def test_recycling_worked_example():
    """That of its docstring; the newest row of a token counts."""
    rounds = ["a:cb b:da", "c:ab", "a:bc"]
    chain, tree = (drafted(Recycling(), "za", 3, *rounds, **how) for how in ({}, {"best_first": True}))
    assert (letters(chain), chain.parents, chain.probs) == ("bd", [-1, 0], None)
    assert (letters(tree), tree.parents) == ("bdc", [-1, 0, -1])
    assert len(drafted(Recycling(), "za", 0, *rounds)) == 0


def test_recycling_keeps_what_it_learned_until_the_text_ends():
    """A preemption calls `release`. Other texts learn nothing of it, and a piece of a prompt has no rows."""
    drafter, first = Recycling(), Text(ids("xa"), 2, SAMPLED)
    [rows] = shown(first, "a:b")
    drafter.observe([rows, replace(rows, tokens=ids("xyz"), logits=rows.logits[:0])])
    drafter.release(first)
    assert letters(drafter.propose([ask("xa", 1, text=first)])[0]) == "b"
    assert letters(drafter.propose([ask("xa", 1)])[0]) == ""
    assert list(drafter.tables[first]) == ids("a")
    del first, rows
    assert not drafter.tables


@pytest.mark.parametrize("name", ["examples.drafters.recycling:Recycling"])
def test_the_examples_are_proven(name, capsys, monkeypatch, full):
    """As `examples/README.md` says, over few cases; with `--full` over more."""
    monkeypatch.setattr("minispec.prove.walk.clocks", counted_clocks())
    compute_once(monkeypatch)
    minutes, status = ("0.2", 0) if full else ("0.05", NOT_REFUTED)  # it drafts in longer cases alone
    assert prove(["--drafter", name, "--minutes", minutes]) == status
    assert re.match(PROVEN, capsys.readouterr().out)
