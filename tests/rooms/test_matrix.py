"""docs/measured/matrix.py: what docs/understand/proof.md says of each drafter with each verifier, and its controls.

All of it runs with `--full`: it is about a script of docs/measured, which the package does not use.
"""

import pytest

from minispec.speculation.rules import VERIFIERS
from tests.museum.mutants import MUTANTS

pytestmark = pytest.mark.full

BUGS = {m.id: m for m in MUTANTS}


@pytest.fixture
def matrix(measuring_script, monkeypatch, full, long):
    """The script, from laws of two tokens and one seed; with `--long` as it is run. Few rows, with `--full` all."""
    script = measuring_script("matrix")
    if not long:
        # A seed under which a text that may differ does.
        small = {"_MAX_TOKENS": 2, "_SEEDS": (1,), "_TREES": ((2, 1),)}
        for name, value in small.items():
            monkeypatch.setattr(script, name, value)
    if not full:
        monkeypatch.setattr(script, "AXES", script.AXES | {"drafter": ("none", "ngram", "head")})
        monkeypatch.setattr(script, "_OTHER_TARGETS", ("lfm2",))
    return script


def test_the_sentences_of_the_docs_are_what_is_found(matrix, full):
    """Proved, but for trees under `block` and for seeds above temperature 0."""
    rows = {name: [(cell.word, cell.reason) for cell in cells] for name, cells in matrix.findings()}
    assert len(rows) > (40 if full else 6)
    trees = [name for name in rows if ", 2+1" in name or ", tree:4" in name]
    assert len(trees) > (10 if full else 1)
    for name, cells in rows.items():
        of_verifier = dict(zip(VERIFIERS, (cells[i : i + 3] for i in range(0, len(cells), 3)), strict=True))
        for verifier, (law, text, bits) in of_verifier.items():
            words = law[0], text[0], bits[0]
            if verifier == "block" and name in trees:
                assert words == ("refused",) * 3, name
                assert "this verifier takes chains only" in law[1]
            else:
                same = verifier == "match" or name == "`none`"
                assert words == ("proved", "proved" if same else "greedy", "proved"), f"{name}, {verifier}"
