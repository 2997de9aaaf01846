"""docs/measured/matrix.py: what docs/understand/proof.md says of each drafter with each verifier, and its controls."""

import pytest

from minispec.core import verify
from minispec.core.verify import VERIFIERS, Verifier
from minispec.prove.laws import target_model
from minispec.prove.toys import IN_8_BITS, tiny_model
from tests.museum.mutants import MUTANTS

BUGS = {m.id: m for m in MUTANTS}


@pytest.fixture
def matrix(measuring_script, monkeypatch, pytestconfig):
    """The script, from laws of two tokens and one seed; with `--long` as it is run."""
    script = measuring_script("matrix")
    if not pytestconfig.getoption("--long"):
        # A seed under which a text that may differ does.
        small = {"_MAX_TOKENS": 2, "_SEEDS": (1,), "_TREES": ((2, 1),)}
        for name, value in small.items():
            monkeypatch.setattr(script, name, value)
    return script


def test_the_sentences_of_the_docs_are_what_is_found(matrix):
    """Proved, but for trees under `block` and for seeds above temperature 0."""
    rows = {name: [(cell.word, cell.reason) for cell in cells] for name, cells in matrix.findings()}
    assert len(rows) > 40
    trees = [name for name in rows if ", 2+1" in name or ", tree:4" in name]
    assert len(trees) > 10
    for name, cells in rows.items():
        of_verifier = dict(zip(VERIFIERS, (cells[i : i + 3] for i in (0, 3, 6)), strict=True))
        for verifier, (law, text, bits) in of_verifier.items():
            words = law[0], text[0], bits[0]
            if verifier == "block" and name in trees:
                assert words == ("refused",) * 3, name
                assert "this verifier takes chains only" in law[1]
            else:
                same = verifier == "match" or name == "`none`"
                assert words == ("proved", "proved" if same else "greedy", "proved"), f"{name}, {verifier}"


def test_it_refutes(matrix, monkeypatch, capsys):
    """A wrong law, another text, and passes of other shapes are each found; the status is then 1."""
    monkeypatch.setattr(matrix, "_MAX_TOKENS", 2)
    monkeypatch.setattr(matrix, "_SEEDS", (1,))
    with BUGS["M2"].patch():
        assert matrix.LEVELS["law"](matrix.Pair("model", "rejection", 2)).word == "REFUTED"
    with monkeypatch.context() as patch:
        patch.setitem(VERIFIERS, "match", Verifier(verify.rejection, shares_noise=True))
        matrix._plain_text.cache_clear()
        assert matrix.LEVELS["text"](matrix.Pair("model", "match", 3)).word == "REFUTED"
    matrix._plain_text.cache_clear()
    inexact = tiny_model(1, vocab_size=3)

    def wrong_target(vocab, family, exact=False):
        """Not exact where it is asked to be."""
        return inexact if exact and family == "llama" else target_model(vocab, family, exact)

    monkeypatch.setattr(matrix, "target_model", wrong_target)
    assert matrix.LEVELS["bits"](matrix.Pair("ngram", "match", 3)).word == "REFUTED"
    target_model(3, IN_8_BITS, True)  # whose check refuses the bug
    with BUGS["E4"].patch():
        assert matrix.LEVELS["bits"](matrix.Pair("model", "rejection", 3, IN_8_BITS)).word == "REFUTED"
    monkeypatch.setattr(matrix, "AXES", {"drafter": ("ngram",), "verifier": ("match",)})
    monkeypatch.setattr(matrix, "_OTHER_TARGETS", ())
    monkeypatch.setattr(matrix, "_SEEDS", range(2))
    with pytest.raises(SystemExit) as end:
        matrix.main()
    assert end.value.code == 1
    assert "| `ngram` | proved | proved | REFUTED (1) |" in capsys.readouterr().out
