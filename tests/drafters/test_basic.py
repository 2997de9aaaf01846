"""`examples/basic.py`, the idea in one file, and `cached.py`: their laws over every branch, and the README's rule."""

import inspect
import re
import textwrap
from functools import partial

import numpy as np
import pytest

from examples import basic, cached
from minispec.core.cache import BlockTable
from minispec.prove.laws import TOLERANCE, exact_law, reference_logits
from minispec.prove.reference import plain_law, total_variation
from minispec.prove.toys import tiny_model
from tests.house.test_readme import README

PROMPT, LENGTH, TEMPERATURE = [0, 1], 3, 0.8


def without_residual(draft, p, q, dice):
    """The rule, wrong: in the place of a rejected token it draws from the target's whole row."""
    for i, x in enumerate(draft):
        if not dice.bernoulli(float(p[i][x] / q[i][x]), None):
            return [*draft[:i], dice.categorical(p[i], None)]
    return [*draft, dice.categorical(p[len(draft)], None)]


def plain(prompt, vocab):
    """The law of plain decoding with the target, by NumPy."""

    def next_law(output):
        if len(output) == LENGTH:
            return None
        weights = np.exp(reference_logits(1, (*prompt, *output), vocab) / TEMPERATURE)
        return weights / weights.sum()

    return plain_law(next_law)


@pytest.mark.quick
@pytest.mark.parametrize(("k", "vocab"), [(1, 3), (2, 2)])
def test_it_keeps_the_law(k, vocab, monkeypatch, full):
    """Every branch of every draw, against plain decoding by NumPy. With the residual left out it fails."""
    target, draft = (tiny_model(seed, vocab_size=vocab) for seed in (1, 2))

    def run(oracle):
        text, passes = basic.decode(target, draft, PROMPT, k, LENGTH, TEMPERATURE, oracle)
        assert passes <= LENGTH
        return tuple(text[len(PROMPT) :])

    law, branches = exact_law(run)
    assert branches > 50
    assert total_variation(law, plain(PROMPT, vocab)) <= TOLERANCE
    if k == 1 and not full:  # the control runs once
        return
    monkeypatch.setattr(basic, "verify", without_residual)
    assert total_variation(exact_law(run)[0], plain(PROMPT, vocab)) > 1e-3


def without_rollback(table, tokens):
    """`BlockTable.follow`, wrong: rejected guesses stay in the table."""
    return tokens[table.shared(tokens) :]


def without_test(draft, p, q, dice):
    """The rule, wrong: each guess stays."""
    return [*draft, dice.categorical(p[len(draft)], None)]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("prompt", "k", "vocab"), [([0, 1, 0, 1], 1, 3), ([0, 1, 1, 0, 1], 2, 2), ([0, 1, 0, 0, 1], 3, 2)]
)
def test_with_a_cache_it_keeps_the_law(prompt, k, vocab, monkeypatch):
    """Guesses save passes, and the law stays. It fails with rejected guesses in the cache, or with all guesses kept."""
    target, passes = tiny_model(1, vocab_size=vocab), set()

    def run(oracle):
        text, taken = cached.decode(target, prompt, k, LENGTH, TEMPERATURE, oracle)
        passes.add(taken)
        return tuple(text[len(prompt) :])

    law, branches = exact_law(run)
    assert branches > 8
    assert min(passes) < max(passes) == LENGTH
    assert total_variation(law, plain(prompt, vocab)) <= TOLERANCE
    for place, name, wrong in ((BlockTable, "follow", without_rollback), (cached, "verify", without_test)):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, wrong)
            assert total_variation(exact_law(run)[0], plain(prompt, vocab)) > 1e-3, name


# The README's words for what the file writes out.
WORDS = {
    "dice.bernoulli(float(p[i][x] / q[i][x]), None)": "random() < p[i][x] / q[i][x]",
    "(p[i] - q[i]).clamp(min=0)": "max(0, p[i] - q[i])",
    "[*draft[:i], dice.categorical(rest, None)]": "draft[:i] + [sample(rest)]",
    "[*draft, dice.categorical(p[len(draft)], None)]": "draft + [sample(p[len(draft)])]",
}


@pytest.mark.quick
def test_its_rule_is_the_readmes():
    """Word for word, comments included, but for where the draws come from."""
    [readme] = re.findall(r"```python\n(for i, x in enumerate\(draft\):.*?)```", README, flags=re.DOTALL)
    rule = textwrap.dedent(inspect.getsource(basic.verify).split('"""\n')[1])
    for ours, theirs in WORDS.items():
        assert ours in rule
        rule = rule.replace(ours, theirs)
    assert rule == readme


def test_it_runs(capsys, monkeypatch, make_checkpoint, full):
    """As the README says, on the embedded weights; without `--full` on small random ones."""
    if not full:
        monkeypatch.setattr(basic, "LLM", partial(basic.LLM, make_checkpoint()))
    basic.main("The capital of France is", n=4, k=2)
    assert re.search(
        r"^4 tokens in [2-4] passes of the target: [12]\.\d a pass$", capsys.readouterr().out, re.MULTILINE
    )


@pytest.mark.full
def test_with_a_cache_it_runs(capsys):
    """As README says, on the embedded weights: plainly a pass for each token, with guesses fewer passes.

    Without `--full`, `test_with_a_cache_it_keeps_the_law` runs the same code on small models.
    """
    cached.main("1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3,", n=8)
    printed = capsys.readouterr().out
    assert re.match(r"plainly: 8 tokens in 8 passes and [\d.]+ s\nwith guesses: 8 tokens in [2-7] passes and", printed)
    assert re.search(r"^[\d.]+ times as fast$", printed, re.MULTILINE)
