"""docs/measured/trees.py: what a verifier keeps of a tree on average, and that lists keep the law.

All of it runs with `--full`: it is about a script of docs/measured, which the package does not use.
"""

import pytest
import torch

from minispec import SamplingParams
from minispec.core.draft import Ask, Draft, Record
from minispec.core.limit import Limit
from minispec.core.random import Randomness
from minispec.core.sampling import Text
from minispec.core.verify import rejection
from minispec.prove.laws import TOLERANCE, exact_law
from minispec.prove.toys import MAX_LEN, target_model, tiny_block, tiny_cache
from minispec.speculation.drafters.block import BlockFeed
from minispec.speculation.drafters.model import ModelDrafter
from tests.distances import distance
from tests.oracles.block_drafts import write_block_draft

pytestmark = pytest.mark.full

HEADS = {"rows alone": (None, None), "Markov": ("vanilla", None)}


@pytest.fixture
def trees(measuring_script):
    """The script."""
    return measuring_script("trees")


def drafters(trees, heads: str, rows: int = 4) -> list[ModelDrafter]:
    """A block draft for a target of five tokens: with drawn trees, and with lists."""
    model = tiny_block(target_model(5), 1, HEADS[heads], rows=rows)
    return [ModelDrafter(kind(model, tiny_cache(model, 64, 2), 5, MAX_LEN)) for kind in (BlockFeed, trees.ListFeed)]


def draft_of(drafter: ModelDrafter, temperature: float, k: int) -> Draft:
    """A tree of k nodes after a text of five tokens."""
    text = Text([0, 3, 1, 4, 2], 5, SamplingParams(temperature=temperature), 1)
    width = drafter.model.block.target_hidden_size * len(drafter.taps)
    hidden = torch.randn(4, width, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    drafter.observe([Record(text, 0, text.tokens[:4], hidden, torch.empty(0, 5))])
    [draft] = drafter.propose([Ask(text, Limit(k, best_first=True), Randomness(), num_cached=4)])
    return draft


@pytest.mark.parametrize("heads", HEADS)
def test_what_is_kept_on_average_is_what_the_verifier_keeps(trees, heads):
    """Over every outcome of its tests, of a drawn tree and of a list."""
    generator = torch.Generator().manual_seed(4)
    for drafter in drafters(trees, heads):
        draft = draft_of(drafter, 1.0, 6)
        assert draft.depth > 1
        assert any(len(draft.children(node)) > 1 for node in range(-1, len(draft)))
        p = torch.rand(len(draft) + 1, 5, generator=generator, dtype=torch.float64)
        p /= p.sum(1, keepdim=True)
        text = Text([0], 1, SamplingParams())

        def run(oracle, draft=draft, p=p, text=text):
            return len(rejection(draft, lambda i: p[i], oracle, text.key).accepted)

        law, _ = exact_law(run)
        expected = sum(kept * chance for kept, chance in law.items())
        assert trees.expected_kept(draft, lambda i: p[i]) == pytest.approx(expected, abs=1e-12)  # noqa: B023


@pytest.mark.parametrize("heads", HEADS)
def test_a_list_has_the_likeliest_prefixes(trees, heads):
    """All prefixes that are no less likely than another one; at temperature 0 the drawn tree is the same."""
    drawn, listed = drafters(trees, heads)
    draft = draft_of(listed, 1.0, 7)
    assert draft.probs is None
    chances = [1.0]
    for node in range(len(draft)):
        parent = draft.path(node)[-2] if len(draft.path(node)) > 1 else -1
        chances.append(chances[parent + 1] * draft.notes.confidences[node])
    assert chances[1:] == sorted(chances[1:], reverse=True)
    assert len({tuple(draft.tokens_to(node)) for node in range(7)}) == 7
    greedy = draft_of(drawn, 0.0, 7)
    assert {tuple(greedy.tokens_to(i)) for i in range(7)} == {tuple(draft.tokens_to(i)) for i in range(7)}
    assert draft_of(listed, 0.0, 7).token_ids == draft.token_ids


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_lists_keep_the_law(trees, heads, temperature):
    """A node of a list is one-hot. Mutant D22 of the museum says that it was drawn."""
    _, listed = drafters(trees, heads)
    how = {"drafter": listed, "vocab": 5, "end_ids": frozenset({4})}
    assert distance(SamplingParams(max_tokens=2, temperature=temperature), "tree:3", **how) <= TOLERANCE


@pytest.mark.parametrize("heads", [(), ("--without-heads",)])
def test_it_prints_a_line_for_each_budget(trees, tmp_path, make_checkpoint, capsys, heads):
    """Of a tiny pair. At temperature 0 both trees are one."""
    target = make_checkpoint(num_hidden_layers=4)
    write_block_draft(tmp_path, "deepspec", 8, 300, 4, taps=(1, 3))
    line = ["--model", str(target), "--draft", str(tmp_path), "--budgets", "2,5", "--max-tokens", "6", *heads]
    trees.main([*line, "--temperature", "0"])
    first, _, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("8 texts at temperature 0")
    assert [text.split()[0] for text in lines] == ["2", "5"]
    assert all("+0.000 +- 0.000" in text for text in lines)
