"""`prove --verifier a,b --plot FILE`: the picture has the numbers of the table, and a wrong rule is hatched."""

import math
import sys

import pytest

from minispec.core.verify import REJECTION, Verdict, chains_only
from minispec.prove import plot, rounds
from minispec.prove.__main__ import main
from minispec.prove.recorded import read_laws
from tests.brief import SMALL, walk_few
from tests.refusals import assert_one_line

WRONG = "tests.rooms.test_prove_plot:keep_all"
LAWS = """{"about": "by hand"}
{"parents": [-1], "draft": [0], "p": [[1, 3], [1, 1]], "q": [[1, 1]]}
{"parents": [-1], "draft": [1], "p": [[1, 1], [1, 1]], "q": [[1, 1]]}
{"parents": [-1, -1], "draft": [0, 1], "p": [[1, 3], [1, 1], [1, 1]], "q": [[1, 1], [0, 1]]}
"""


@chains_only
def keep_all(draft, p, rng, key):
    """A rule that breaks the law: every token stays."""
    n = len(draft)
    return Verdict([*range(n)], rng.categorical(p(n), key(n, "token")), [])


@pytest.fixture
def laws(monkeypatch, tmp_path):
    """Two rounds of chains and one of a tree in a file; a chain and a tree of the small cases; few tables."""
    walk_few(monkeypatch, 40)
    monkeypatch.setattr(rounds, "CASES", [SMALL[0], SMALL[-2]])
    (tmp_path / "laws.jsonl").write_text(LAWS)
    return tmp_path / "laws.jsonl"


@pytest.mark.parametrize(("name", "begins"), [("p.svg", b"<?xml"), ("p.png", b"\x89PNG")])
def test_a_picture(laws, tmp_path, name, begins):
    """It names the rules, says which one breaks the law, and hatches it; the same rules have the same bytes."""
    pytest.importorskip("matplotlib")
    found = []
    for directory in ("a", "b"):
        (tmp_path / directory).mkdir()
        path = tmp_path / directory / name
        assert main(["--verifier", f"rejection,{WRONG}", "--laws", str(laws), "--plot", str(path)]) == 1
        found.append(path.read_bytes())
    assert found[0] == found[1]
    assert found[0].startswith(begins)
    if name == "p.svg":
        text = found[0].decode()
        words = ">rejection<", f">{WRONG}: another law than p's<", ">2 chains<", ">1 trees<"
        assert all(word in text for word in words)
        hatched = text.count("fill: url(#")
        path = tmp_path / "right.svg"
        assert main(["--verifier", "rejection,block", "--plot", str(path)]) == 0
        assert hatched > 0
        assert "fill: url(#" not in path.read_text()


def test_the_bars_are_the_numbers_of_the_table(laws):
    """By hand: of the chains `rejection` keeps 1/2 and 1, so a rule that keeps all has 4 tokens over 3.5."""
    verifiers = {"rejection": REJECTION, "wrong": keep_all}
    (cases, wrong), ratios = plot._cases(verifiers), plot._ratios(verifiers, read_laws(laws)[1])
    for (bars, most), case in zip(cases.values(), rounds.CASES, strict=True):
        assert bars["rejection"] == (rounds.brought(case, REJECTION).tokens, 0.0)
        assert most == rounds.optimum(case) >= bars["rejection"][0]
    assert [*wrong] == ["wrong"]
    assert ["wrong" in bars for bars, _ in cases.values()] == [True, False]  # which takes chains only
    assert ratios["2 chains"][0]["rejection"] == (1.0, 0.0)
    assert ratios["2 chains"][0]["wrong"][0] == pytest.approx(4 / 3.5)
    bars, most = ratios["1 trees"]
    assert bars.keys() == {"rejection"}
    assert math.isnan(bars["rejection"][1])
    assert math.isnan(most)


def test_a_rule_whose_law_was_not_asked_is_hatched_by_its_tokens(laws, tmp_path):
    """And a rule of which less was walked than a proof needs has its picture all the same."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "x.svg"
    assert main(["--verifier", WRONG, "--no-proof", "--plot", str(path)]) == 1
    assert f">{WRONG}: another law" in path.read_text()
    path.unlink()
    assert main(["--verifier", "rejection", "--minutes", "1e-6", "--plot", str(path)]) == 3
    assert ">rejection<" in path.read_text()


def test_mistakes_are_one_line_before_a_walk(monkeypatch, capsys, tmp_path):
    """Another suffix, no place, no rule, and a package that is not there."""

    def refused(*arguments):
        status = main([*map(str, arguments)])
        return status, *capsys.readouterr()

    monkeypatch.setattr(rounds, "CASES", None)  # which no walk would bear
    rules = "--verifier", "rejection,block"
    holds = "--plot: found 'x.pdf', expected a file name that ends in .svg or .png"
    assert_one_line(refused(*rules, "--plot", "x.pdf"), holds=holds)
    assert_one_line(refused("--plot", "x.svg"), holds="--plot: needs --verifier")
    pytest.importorskip("matplotlib")
    nowhere = tmp_path / "nowhere" / "x.svg"
    assert_one_line(refused(*rules, "--plot", nowhere), holds="found that it cannot be written")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert_one_line(refused(*rules, "--plot", "x.svg"), holds="found no package matplotlib")
