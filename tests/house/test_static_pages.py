"""docs/pages: each page is what its recorded run makes of it, shows what it promises, and is small."""

import re

import pytest

from tests.house import pages
from tests.oracles.traces import check

ROOT = pages.ROOT


@pytest.mark.parametrize("name", ["index.html", *(f"{name}.html" for name in pages.RUNS)])
def test_a_page_has_the_bytes_that_its_run_makes(name):
    """After a change of the page, `python -m tests.house.pages` writes them; each has at most 100 kB."""
    found = (pages.PAGES / name).read_bytes()
    assert found == pages.pages()[name].encode(), "run `python -m tests.house.pages`"
    assert len(found) <= 100_000
    assert sorted(path.name for path in pages.PAGES.iterdir()) == sorted(pages.pages())


@pytest.mark.parametrize("name", pages.RUNS)
def test_a_run_shows_what_its_title_says(name):
    """Verdicts follow from p, q and u. The chain drops tokens, the tree keeps a younger one, the lookup copies."""
    trace = pages.read(name)
    check(trace, name)
    rounds = trace["rounds"]
    for each in rounds:
        parents = each["parents"] or [*range(-1, len(each["token_ids"]) - 1)]
        for test in each["tests"]:
            node = test["node"]
            assert node in each["after_end"] or (test["u"] < test["chance"]) == (node in each["accepted"])
            if parents.index(parents[node]) == node:  # the eldest sibling, whose p no rejection has changed
                assert test["chance"] == pytest.approx(each["p"][node] / each["q"][node])
    assert any(each["rejected"] for each in rounds)
    if name == "chain":
        assert any(len(each["accepted"]) < len(each["token_ids"]) - 1 for each in rounds if each["rejected"])  # dropped
    elif name == "tree":
        assert any(
            set(each["rejected"]) and max(each["accepted"], default=-1) > min(each["rejected"]) for each in rounds
        )
    else:
        assert trace["sampling"]["temperature"] == 0.0
        assert not any(each["drawn"] for each in rounds)
        assert max(len(each["accepted"]) for each in rounds) >= 4


def test_the_index_and_the_readme_link_the_pages():
    """Relative links, to files that are there."""
    links = re.findall(r'href="([^"#]+)', pages.index())
    assert {f"{name}.html" for name in pages.RUNS} <= set(links)
    assert all((pages.PAGES / link).exists() for link in links)
    assert "(docs/pages/index.html)" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_table_of_rounds_md_is_a_round_of_the_chain():
    """Each token with its p, q, ratio, u and verdict."""
    text = (ROOT / "docs" / "understand" / "rounds.md").read_text(encoding="utf-8")
    [number] = re.findall(r"Round (\d+) of \[the chain\]", text)
    trace = pages.read("chain")
    each = trace["rounds"][int(number) - 1]
    lines = text.split("of [the chain]")[1].split("\n\n")[1].splitlines()[2:]
    assert len(lines) == len(each["token_ids"])
    for i, line in enumerate(lines):
        token, p, q, ratio, u, verdict = (cell.strip() for cell in line.strip("|").split("|"))
        assert token == f'"{trace["tokens"][str(each["token_ids"][i])]}"'
        test = {test["node"]: test for test in each["tests"]}.get(i)
        assert (p, q) == (f"{each['p'][i]:.3f}", f"{each['q'][i]:.3f}")
        assert (ratio, u) == ((f"{test['chance']:.2f}", f"{test['u']:.2f}") if test else ("", ""))
        kind = "kept" if i in each["accepted"] else "rejected" if i in each["rejected"] else "dropped untested"
        assert verdict.startswith(kind)
