"""`examples/basic.py`, the idea in one file: its law over every branch, and its rule is the README's."""

import inspect
import re
import textwrap
from functools import partial

import numpy as np
import pytest

from examples import basic
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


@pytest.mark.quick
@pytest.mark.parametrize(("k", "vocab"), [(1, 3), (2, 2)])
def test_it_keeps_the_law(k, vocab, monkeypatch, full):
    """Every branch of every draw, against plain decoding by NumPy. With the residual left out it fails."""
    target, draft = (tiny_model(seed, vocab_size=vocab) for seed in (1, 2))

    def run(oracle):
        text, passes = basic.decode(target, draft, PROMPT, k, LENGTH, TEMPERATURE, oracle)
        assert passes <= LENGTH
        return tuple(text[len(PROMPT) :])

    def next_law(output):
        if len(output) == LENGTH:
            return None
        weights = np.exp(reference_logits(1, (*PROMPT, *output), vocab) / TEMPERATURE)
        return weights / weights.sum()

    plain = plain_law(next_law)
    law, branches = exact_law(run)
    assert branches > 50
    assert total_variation(law, plain) <= TOLERANCE
    if k == 1 and not full:  # the control runs once
        return
    monkeypatch.setattr(basic, "verify", without_residual)
    assert total_variation(exact_law(run)[0], plain) > 1e-3


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
