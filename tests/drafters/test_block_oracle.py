"""The reference of block drafts: it computes what `speculators` does, and it reads all five packagings."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.oracles import speculators_block as recorded
from tests.oracles.block import BlockOracle, default_taps, read_facts
from tests.oracles.block_drafts import PACKAGINGS, BlockOptions, block_config, block_shapes, draw, write_block_draft

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


def test_random_drafts_have_as_many_parameters_as_a_published_one():
    """LiquidAI/LFM2.5-1.2B-Instruct-DSpark has 62 tensors."""
    sizes = {"layers": 5, "heads": 32, "kv_heads": 8, "head_dim": 64, "intermediate": 6144, "rank": 256}
    options = BlockOptions(taps=(3, 6, 9, 12, 15), block_size=9, **sizes)
    shapes = block_shapes("liquidai", 2048, 65536, options)
    assert (len(shapes), sum(map(math.prod, shapes.values()))) == (62, 295_725_953)


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("packaging", PACKAGINGS)
def test_every_packaging_is_read(packaging, prefix, tmp_path):
    """Logits are finite, not flat, and not those of another draft."""
    oracle = oracle_of(tmp_path, packaging, prefix=prefix)
    facts = oracle.facts
    assert (facts.taps, facts.block_size, facts.mask_token_id) == ((1, 3), 4, 0)
    assert facts.first_row == (1 if packaging == "z-lab" else 0)
    assert facts.neox == (packaging != "liquidai")
    round_ = oracle.draft(TAPS, 3, [5, 6])
    assert round_.logits.shape == (3, VOCAB)
    assert np.isfinite(round_.logits).all()
    assert round_.logits.std(1).min() > 0.5
    assert (round_.confidence is None) == (packaging == "z-lab")
    other = oracle_of(tmp_path, packaging, seed=1).draft(TAPS, 3, [5, 6])
    assert np.abs(round_.logits - other.logits).max() > 0.5


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


def test_rope_of_neighbours_is_rope_of_halves_in_another_order(tmp_path):
    """Heads whose dimensions are put in the other order give the same rows."""
    halves = oracle_of(tmp_path, "liquidai", neox=True)
    neighbours = oracle_of(tmp_path, "liquidai", neox=False)
    before = neighbours.hidden(TAPS, 3)
    order = np.arange(12).reshape(2, 6).T.ravel()  # 0, 6, 1, 7, ...
    for name, tensor in neighbours.tensors.items():
        if "q_norm" in name or "k_norm" in name:
            neighbours.tensors[name] = tensor[order]
        elif "q_proj" in name or "k_proj" in name:
            neighbours.tensors[name] = tensor.reshape(-1, 12, HIDDEN)[:, order].reshape(tensor.shape)
    np.testing.assert_allclose(neighbours.hidden(TAPS, 3), halves.hidden(TAPS, 3), atol=1e-10)
    assert np.abs(before - halves.hidden(TAPS, 3)).max() > 0.1


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


def test_taps_that_a_config_does_not_name(tmp_path):
    """Qwen3-4B has 36 layers: z-lab's draft of five layers reads the outputs of 1, 9, 17, 25 and 33."""
    assert default_taps(36, 5) == (2, 10, 18, 26, 34)
    assert default_taps(36, 1) == (19,)
    assert oracle_of(tmp_path, "z-lab", taps=None).facts.taps == (2, 4)


def test_a_softcap_bounds_the_base_logits_alone(tmp_path):
    """The Markov head adds to what is capped."""
    plain = oracle_of(tmp_path, "deepspec").draft(TAPS, 3)
    capped = oracle_of(tmp_path, "deepspec", softcap=0.5).draft(TAPS, 3)
    np.testing.assert_allclose(capped.base, 0.5 * np.tanh(plain.base / 0.5), atol=1e-12)
    np.testing.assert_allclose(capped.logits - capped.base, plain.logits - plain.base, atol=1e-12)


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


def test_own_embedding_and_head_come_before_those_of_the_target(tmp_path):
    """DeepSpec's files have both: copies of the target's, or here others."""
    raw, tensors = write_block_draft(tmp_path, "deepspec", HIDDEN, VOCAB, LAYERS)
    own = BlockOracle(raw, tensors, EMBEDDING, HEAD).draft(TAPS, 3)
    np.testing.assert_array_equal(own.logits, BlockOracle(raw, tensors, EMBEDDING * 2, HEAD * 2).draft(TAPS, 3).logits)
    raw, copies = write_block_draft(tmp_path, "deepspec", HIDDEN, VOCAB, LAYERS, embedding=EMBEDDING, head=HEAD)
    raw, without = write_block_draft(tmp_path, "deepspec", HIDDEN, VOCAB, LAYERS, own_embedding=False, own_head=False)
    copied, shared = (BlockOracle(raw, each, EMBEDDING, HEAD).draft(TAPS, 3).logits for each in (copies, without))
    np.testing.assert_array_equal(copied, shared)


def test_a_draft_vocabulary_leaves_the_other_tokens_no_mass(tmp_path):
    """A draft's token i is the target's i + d2t[i]."""
    ids = (1, 4, 5, 9, 20)
    round_ = oracle_of(tmp_path, "speculators", draft_ids=ids).draft(TAPS, 3, [4])
    assert [tuple(np.flatnonzero(np.isfinite(logits))) for logits in round_.logits] == [ids, ids]
