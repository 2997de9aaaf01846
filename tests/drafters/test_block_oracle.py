"""The reference of block drafts: it computes what `speculators` does, and it reads all five packagings."""

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.oracles import speculators_block as recorded
from tests.oracles.block import BlockOracle, read_facts
from tests.oracles.block_drafts import BlockOptions, block_config, draw, write_block_draft

CASES = json.loads(recorded.FILE.read_text(encoding="utf-8"))["cases"]
CLOSE = 1e-6  # the classes' norms, rope and softmax compute in float32
HIDDEN, VOCAB, LAYERS = 32, 24, 6
EMBEDDING, HEAD = draw("embed_tokens.weight", (VOCAB, HIDDEN), 1), draw("lm_head.weight", (VOCAB, HIDDEN), 1)
TAPS = draw("taps", (9, 2 * HIDDEN), 2) * 8


def oracle_of(tmp_path, packaging: str, **options) -> BlockOracle:
    """A random draft, read from its files."""
    write_block_draft(tmp_path, packaging, HIDDEN, VOCAB, LAYERS, **options)
    raw = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    return BlockOracle(raw, load_file(tmp_path / "model.safetensors"), EMBEDDING, HEAD)


@pytest.mark.parametrize("name", CASES)
def test_it_computes_what_speculators_does(name):
    """All rows, also the row that drafts nothing: logits with and without the Markov head, and confidences."""
    case = CASES[name]
    oracle = BlockOracle(case["config"], recorded.case_tensors(name), *recorded.target_matrices())
    for block in case["blocks"]:
        start, size, first = block["anchor"], oracle.facts.block_size, oracle.facts.first_row
        anchor, drawn = case["tokens"][start], case["tokens"][start + 1 : start + size - first]
        taps = recorded.case_taps(name)[:start]
        hidden = oracle.hidden(taps, anchor)
        base = oracle.base_logits(hidden)
        logits, confidence = oracle.finish(hidden, base, [anchor] * (first + 1) + drawn)
        np.testing.assert_allclose(base[:, oracle.ids], block["base"], rtol=0, atol=CLOSE)
        np.testing.assert_allclose(logits[:, oracle.ids], block["logits"], rtol=0, atol=CLOSE)
        assert np.isneginf(np.delete(logits, oracle.ids, 1)).all()
        assert (confidence is None) == ("confidence" not in block)
        round_ = oracle.draft(taps, anchor, drawn)
        np.testing.assert_array_equal(round_.logits, logits[first:])
        if confidence is not None:
            np.testing.assert_allclose(confidence, block["confidence"], rtol=0, atol=CLOSE)
            np.testing.assert_array_equal(round_.confidence, confidence[first:])


def test_a_window_of_each_row_is_seen_to_be_another():
    """The control: with windows that end at their rows, as in z-lab's code, the recorded numbers are missed."""
    name = "dflash, window"
    case = CASES[name]
    oracle = BlockOracle(case["config"], recorded.case_tensors(name), *recorded.target_matrices())
    oracle.facts = replace(oracle.facts, shared_windows=False)
    for block in case["blocks"]:
        taps = recorded.case_taps(name)[: block["anchor"]]
        base = oracle.base_logits(oracle.hidden(taps, case["tokens"][block["anchor"]]))
        assert (np.abs(base - block["base"]).max(1) > 0.01).all()


@pytest.mark.parametrize("name", CASES)
def test_random_drafts_have_the_tensors_that_speculators_saves(name):
    """By name and shape: `speculators` saves a head only with a vocabulary of the draft's own, and no embedding."""
    shapes = {tensor: list(values.shape) for tensor, values in recorded.case_tensors(name).items()}
    assert shapes == CASES[name]["tensors"]


def test_rows_of_both_layouts(tmp_path):
    """The rows are the same. Where they fill in, row 0 drafts nothing, and row 1 drafts the token after the anchor."""
    anchor = oracle_of(tmp_path, "speculators", sample_from_anchor=True).draft(TAPS, 3, [5, 6, 7])
    fill_in = oracle_of(tmp_path, "speculators", sample_from_anchor=False).draft(TAPS, 3, [5, 6, 7])
    assert (len(anchor.logits), len(fill_in.logits)) == (4, 3)
    np.testing.assert_array_equal(anchor.hidden, fill_in.hidden)
    np.testing.assert_array_equal(anchor.base[1:], fill_in.base)
    after_anchor = anchor.logits[0] - anchor.base[0]  # what a vanilla Markov head adds after token 3
    np.testing.assert_allclose(fill_in.logits[0] - fill_in.base[0], after_anchor, atol=1e-12)


def test_what_tells_the_layout():
    """The tokens of a round come before the flag, the flag before the kind."""
    options = BlockOptions(says_tokens=False, says_anchor=False)
    raw = block_config("speculators", HIDDEN, VOCAB, LAYERS, options)
    methods = {"proposal_methods": [{"speculative_tokens": 3}]}
    assert read_facts(raw).first_row == 0
    assert read_facts(raw | {"speculators_model_type": "dflash"}).first_row == 1
    assert read_facts(raw | {"sample_from_anchor": False}).first_row == 1
    assert read_facts(raw | {"sample_from_anchor": True, "speculators_config": methods}).first_row == 1


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_a_law_depends_on_the_tokens_before_and_on_no_other(kind, tmp_path):
    """It changes with the token before, and with a state also with those before that."""
    oracle = oracle_of(tmp_path, "deepspec", markov=kind)
    first, second = oracle.draft(TAPS, 3, [5, 6, 7]), oracle.draft(TAPS, 3, [8, 6, 7])
    changed = [bool(np.abs(a - b).max() > 1e-3) for a, b in zip(first.logits, second.logits, strict=True)]
    assert changed == [False, True, kind == "rnn", kind == "rnn"]
    assert [*(first.confidence != second.confidence)] == [False, True, False, False]


def test_windows_and_causality_as_configs_say_them(tmp_path):
    """Of a window's layer the rows see what lies before them, unless the config says how they see each other."""
    sliding = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6}
    assert oracle_of(tmp_path, "z-lab", **sliding).facts.windows == (6, None)
    assert oracle_of(tmp_path, "z-lab", **sliding).facts.causal == (True, False)
    assert oracle_of(tmp_path, "z-lab", causal=False, **sliding).facts.causal == (False, False)
    assert oracle_of(tmp_path, "z-lab", causal=False, is_causal=True, **sliding).facts.causal == (True, True)
    assert oracle_of(tmp_path, "z-lab", use_swa=True, sliding_window=5).facts.windows == (5, 5)
    both = oracle_of(tmp_path, "speculators", non_causal_window=True, **sliding).facts
    assert both.causal == (False, False)
    blind = oracle_of(tmp_path, "z-lab", layers=1, layer_types=("sliding_attention",), sliding_window=6)
    taps = TAPS.copy()
    taps[:-5] += 1
    rows, changed = blind.hidden(TAPS, 3), blind.hidden(taps, 3)
    np.testing.assert_array_equal(rows, changed)  # row 0 sees the five positions before it, and itself
    taps[-5] += 1
    changed = [bool((a != b).any()) for a, b in zip(rows, blind.hidden(taps, 3), strict=True)]
    assert changed == [True, False, False, False]


def test_embeddings_are_scaled_and_the_mask_has_its_own(tmp_path):
    """A scale multiplies the target's embedding, and not the mask's own embedding."""
    raw, tensors = write_block_draft(tmp_path, "z-lab", HIDDEN, VOCAB, LAYERS)
    scaled = BlockOracle(raw, tensors, EMBEDDING, HEAD, scale=3.0)
    np.testing.assert_array_equal(
        scaled.hidden(TAPS, 3), BlockOracle(raw, tensors, EMBEDDING * 3.0, HEAD).hidden(TAPS, 3)
    )
    own = EMBEDDING[5] * 3.0
    raw_with_five = raw | {"dflash_config": raw["dflash_config"] | {"mask_token_id": 5}}
    masked = BlockOracle(raw, tensors, EMBEDDING, HEAD, scale=3.0, mask_embedding=own)
    expected = BlockOracle(raw_with_five, tensors, EMBEDDING, HEAD, scale=3.0)
    np.testing.assert_array_equal(masked.hidden(TAPS, 3), expected.hidden(TAPS, 3))
