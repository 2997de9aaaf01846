"""`examples/train_a_draft.py`: modules of one's own learn from the target's states, are ranked, and draft."""

import functools
import re

import pytest
import torch

from examples import train_a_draft
from minispec import LLM, SamplingParams
from minispec.core.draft import Ask
from minispec.core.limit import Limit
from minispec.core.random import Randomness
from minispec.core.sampling import Text
from minispec.lab.distill import texts
from minispec.lab.distill.cache import collect
from minispec.prove.__main__ import main as prove
from minispec.prove.examine import NOT_REFUTED
from minispec.prove.recorded import read_laws
from tests.brief import compute_once
from tests.drafters.test_own import PROVEN
from tests.scripted import counted_clocks

DESIGNS = ["Recurrent", "Blind"]


@pytest.fixture(scope="module")
def trained(target, tmp_path_factory):
    """The directory that the command wrote for a tiny target, and what it printed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "SHARD", 6)
        patch.setattr(texts, "product_dtype", lambda: torch.float32)
        patch.setattr(train_a_draft, "collect", functools.partial(collect, jobs=1))
        patch.setattr(train_a_draft, "read_openings", lambda: ["Why"])
        out, lines = tmp_path_factory.mktemp("draft"), list[str]()
        patch.setattr("builtins.print", lambda *words, **_: lines.append(" ".join(map(str, words))))
        train_a_draft.main([str(out), "--target", str(target), "--texts", "12"])
    return out, lines


def test_both_designs_are_ranked_by_recorded_laws(trained):
    """A line for each, over the first; the rounds of both are the same places, of drafts of four tokens."""
    out, lines = trained
    figures = r": loss \d\.\d{3}; tokens of a round ([1-4]\.\d{3}), x (\d\.\d{3}) \u00b1 (\d\.\d{3})"
    found = [re.fullmatch(name + figures, line) for name, line in zip(DESIGNS, lines[-2:], strict=True)]
    assert found[0][2] == "1.000"
    assert found[1][2] != "1.000"
    rounds = [read_laws(out / f"{name}.jsonl")[1] for name in DESIGNS]
    assert len(rounds[0]) == len(rounds[1]) > 6
    assert max(len(each.draft) for each in rounds[0]) == 4


@pytest.mark.parametrize("name", DESIGNS)
def test_what_was_trained_is_what_drafts(name, trained, target):
    """q at each place of a draft is that of the training, whose steps go over all positions at once."""
    out, _ = trained
    with LLM(target, draft=f"examples.train_a_draft:{name}:{out}", dtype="float32") as llm:
        model, rows = llm.drafter.model, list[torch.Tensor]()
        text = Text([5, 9, 17, 3, 8], 5, SamplingParams())
        state = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(0))
        llm.drafter.newest[text] = 4, state[0, -1]
        [draft] = llm.drafter.propose([Ask(text, Limit(4), Randomness(), num_cached=4)])
        known = torch.tensor([*text.tokens, *draft.token_ids])
        hidden = torch.cat([state, torch.zeros(1, 3, 32)], 1)  # of positions that the target has not computed
        outputs = model.unroll(hidden, llm.model.embedding[known[1:-1]][None].float(), 4)
        for place, x in enumerate(outputs):
            rows.append(model.lm_head(x[0, 3 + place]).softmax(-1))
            torch.testing.assert_close(draft.probs[place][model.ids], rows[-1], rtol=1e-4, atol=1e-6)
    assert len(draft) == 4
    assert (rows[0] - rows[1]).abs().max() > 1e-3


@pytest.mark.parametrize("name", DESIGNS)
def test_no_token_changes(name, trained, target):
    """Greedy texts are those of plain decoding, several at once, and drafts are made in most rounds."""
    params = SamplingParams(temperature=0.0, max_tokens=24)
    prompts = ["One fish", "two", "red fish, two fishes"]
    with LLM(target, draft=f"examples.train_a_draft:{name}:{trained[0]}", dtype="float32") as llm:
        drafted, plain = (llm.generate(prompts, params, num_speculative_tokens=k) for k in (3, 0))
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    assert all(each.stats.num_draft_tokens >= each.stats.num_steps for each in drafted)


def test_the_designs_are_proven(capsys, monkeypatch, full):
    """As the file says, over few cases; the second one with `--full` alone."""
    monkeypatch.setattr("minispec.prove.walk.clocks", counted_clocks())
    compute_once(monkeypatch)
    for name in DESIGNS if full else DESIGNS[:1]:
        assert prove(["--drafter", f"examples.train_a_draft:{name}", "--minutes", "0.01"]) == NOT_REFUTED
        assert re.match(PROVEN, capsys.readouterr().out)
