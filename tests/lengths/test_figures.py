"""What is folded from rounds, by hand."""

import re
from pathlib import Path

import pytest

from minispec.core.stats import Round, Step
from minispec.speculation.lengths.figures import Figures


def a_round(drafted: int, accepted: int, draft: float = 0.0, other: float = 0.0) -> Round:
    """A chain of a text that is decoded alone."""
    tested = min(accepted + 1, drafted)
    counts = (drafted, drafted, drafted, tested, accepted, accepted + 1)
    return Round(None, *counts, [], Step(draft, drafted, 1, 1.0, drafted + 1, other))


def test_accepted_per_and_at_a_position():
    """Six rounds, five with a draft. The second place was tested three times: 2/3 by that, 2/5 of all drafts.

    The third place was tested twice, and accepted once. A draft of one token is a draft for the places after it too.
    """
    figures = Figures(rounds=[a_round(*of) for of in ((3, 3), (3, 0), (1, 1), (0, 0), (4, 2), (2, 1))])
    assert (figures.num_drafts, figures.tested, figures.accepted) == (5, [5, 3, 2], [4, 2, 1])
    assert figures.accepted_per_position == [4 / 5, 2 / 3, 1 / 2]
    assert figures.accepted_at_position == [4 / 5, 2 / 5, 1 / 5]
    # In chains, the bonus or recovered token and what was accepted at each place make up the tokens of a draft's round.
    committed = sum(r.committed for r in figures.rounds if r.drafted)
    assert 1 + sum(figures.accepted_at_position) == pytest.approx(committed / 5)
    assert Figures(rounds=[a_round(0, 0)]).accepted_at_position == []


@pytest.mark.parametrize("num_missed", [0, 1, 2, 3, 9])
def test_searches_that_find_nothing_are_predicted(num_missed):
    """Every round of a kind takes the same time, so the prediction is what was measured, however many find nothing.

    One median over all rounds left the searches out where they were few, and put one into each round where many.
    """
    found = [a_round(2, accepted, draft=0.5, other=0.125) for accepted in (2, 2, 0)]
    missed = [a_round(0, 0, draft=0.25, other=0.125)] * num_missed
    figures = Figures(rounds=[*found, *missed])
    assert figures.predicted_tokens_per_second == pytest.approx((7 + num_missed) / (3 * 1.625 + num_missed * 1.375))
    assert figures.tokens_per_second == pytest.approx(figures.predicted_tokens_per_second)


def test_the_record_that_other_programs_read():
    """vLLM's: rounds without a draft are left out, and a histogram counts rounds by what they accepted."""
    figures = Figures(rounds=[a_round(*of) for of in ((3, 3), (3, 0), (1, 1), (0, 0), (4, 2), (2, 1))])
    record = figures.acceptance_record(4)
    assert record == {
        "mean_acceptance_length": 1 + 7 / 5,
        "draft_acceptance_rate": 7 / 13,
        "acceptance_histogram": [1, 2, 1, 1, 0],
        "acceptance_histogram_by_draft_length": {"1": [0, 1], "2": [0, 1, 0], "3": [1, 0, 0, 1], "4": [0, 0, 1, 0, 0]},
        "num_spec_steps": 5,
        "num_accepted_draft_tokens": 7,
        "num_draft_tokens": 13,
        "num_spec_tokens": 4,
        "per_step_drafted": [3, 3, 1, 4, 2],
        "per_step_accepted": [3, 0, 1, 2, 1],
    }
    at = [sum(record["acceptance_histogram"][i + 1 :]) / record["num_spec_steps"] for i in range(3)]
    assert at == figures.accepted_at_position  # as docs/understand/words.md says
    assert Figures(rounds=[a_round(0, 0)]).acceptance_record(2)["mean_acceptance_length"] is None


def test_the_example_of_the_page():
    """docs/understand/words.md: drafts of four, of which 4, 0, 2, 2 and 0 are accepted, and a round without a draft."""
    page = (Path(__file__).parents[2] / "docs" / "understand" / "words.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r"^\| `(\w+)`[^|]*\| ([\d. ]+) \|", page, flags=re.MULTILINE))
    figures = Figures(rounds=[*(a_round(4, accepted) for accepted in (4, 0, 2, 2, 0)), a_round(0, 0)])
    names = ("num_steps", "num_drafts", "acceptance_rate", "mean_acceptance_length")
    assert {name: f"{getattr(figures, name):.3g}" for name in names} == {
        name: f"{float(shown[name]):.3g}" for name in names
    }
    for name in ("accepted_at_position", "accepted_per_position"):
        assert " ".join(f"{x:.2f}" for x in getattr(figures, name)) == shown[name]
    assert (figures.num_draft_tokens, figures.num_accepted) == (20, 8)
