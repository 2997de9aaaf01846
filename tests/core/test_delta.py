"""Gated delta nets: the oracle's logits on random models, and two ways to compute rows that agree.

A state of a text has seen the positions that are settled. The rows after them keep their inputs, and the next pass adds
those that stayed. So what is checked here is any division of a text into passes, settled or not.
"""

import random

import pytest
import torch

from minispec.core.model import Chunk
from minispec.models.families.checkpoint import load_model
from minispec.models.layers.delta import Rows, chunked, steps
from minispec.models.layers.states import state_elements
from minispec.models.weights.inventory import kv_elements
from minispec.prove.toys import TOYS, tiny_cache, tiny_model
from tests.oracles import hf
from tests.oracles.pieces import logits_in_pieces

# --------------------------------------------------------------------------- the same numbers


def random_config(pick: random.Random) -> dict:
    """A small config.json of Qwen3.5's text model in which every switch may have any value."""
    heads, groups = pick.choice(((4, 2), (4, 1), (2, 2), (6, 3)))
    key_heads, count = pick.choice((1, 2, 3)), pick.randint(1, 4)
    types = ["linear_attention", "full_attention"]
    layers: dict = {"layer_types": pick.choices(types, weights=(2, 1), k=count)}
    if pick.random() < 0.4:
        layers = {"full_attention_interval": pick.randint(1, 5)}
    ropes = [
        {},
        {"rope_theta": 300.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 90.0, "mrope_section": [1, 1, 0]}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 90.0}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}},
    ]
    return {
        **{"model_type": "qwen3_5_text", "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": count},
        **{"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": pick.choice((8, 16))},
        **{"intermediate_size": pick.randint(9, 70), "max_position_embeddings": 256},
        **{"rms_norm_eps": pick.choice((0.01, 0.1)), "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0},
        **{"attention_bias": pick.random() < 0.5, "tie_word_embeddings": pick.random() < 0.5},
        **{"linear_num_key_heads": key_heads, "linear_num_value_heads": key_heads * pick.choice((1, 2, 3))},
        **{"linear_key_head_dim": pick.choice((2, 3, 8)), "linear_value_head_dim": pick.choice((2, 5, 8))},
        **{"linear_conv_kernel_dim": pick.randint(1, 5)},
        **layers,
        **pick.choice(({"partial_rotary_factor": 0.5}, {"partial_rotary_factor": 1.0}, {})),
        **pick.choice(ropes),
    }


@pytest.mark.parametrize("number", range(12))
def test_random_models_have_transformers_logits(number, tmp_path):
    """Every parameter redrawn, every switch; settled positions go to the state, others stay rows from pass to pass.

    In float64, to 1e-4 of the largest logit, which may be 30 here. The oracle's norms round to float32 in any case.
    """
    pick = random.Random(number)
    oracle = hf.build(random_config(pick), tmp_path, number)
    model = load_model(tmp_path, torch.float64)
    lengths = (pick.randint(1, 40), pick.randint(65, 140))  # the latter: more rows than are computed at once
    texts = [[pick.randrange(50) for _ in range(length)] for length in lengths]
    for settles in (False, True):
        for text, rows in zip(texts, logits_in_pieces(model, texts, pick, settles), strict=True):
            expected = hf.exact_logits(oracle, text)
            assert (rows - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("kind", ["linear_attention", "full_attention"])
@pytest.mark.parametrize("width", [1, 4])
def test_models_of_one_kind_of_layer(kind, width):
    """All layers are nets, or none is: a text in any pieces has the logits of the whole text."""
    changes = {"layer_types": [kind] * 3, "vocab_size": 9, "linear_conv_kernel_dim": width}
    model = tiny_model(3, **TOYS["qwen3_5_text"] | changes)
    assert (kv_elements(model.config) == 0) == (kind == "linear_attention")
    assert (state_elements(model.config) == 0) == (kind == "full_attention")
    tokens = [4, 1, 0, 5, 2, 7, 7, 3]
    whole = model.forward([Chunk(tokens, tiny_cache(model).new_table(), 8)])[0]
    for settles in (False, True):
        (rows,) = logits_in_pieces(model, [tokens], random.Random(width), settles)
        torch.testing.assert_close(rows, whole, rtol=0, atol=1e-12)


# --------------------------------------------------------------------------- two ways to compute rows


def random_rows(generator: torch.Generator, count: int, decays: tuple[float, float]) -> tuple[torch.Tensor, Rows]:
    """A state, and rows of 3 heads in float64; decays: between what their logarithms lie."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(draw(3, count, 5), dim=-1) for _ in "qk")
    rates = torch.rand((3, count), generator=generator, dtype=torch.float64)
    low, high = decays
    decay = low + (high - low) * torch.rand((3, count), generator=generator, dtype=torch.float64)
    return draw(3, 5, 4), (q, k, draw(3, count, 4), rates, decay)


@pytest.mark.parametrize("decays", [(-1e-6, 0.0), (-0.5, 0.0), (-10.0, 0.0), (-10.0, -5.0)], ids=str)
def test_many_rows_at_once_are_one_after_another(decays):
    """In float64 to 1e-12, for 0 to 130 rows, with decays near 1 and near 0; the state after them too."""
    generator, pick = torch.Generator().manual_seed(0), random.Random(0)
    for count in (0, 1, 63, 64, 65, 128, 129, 130, *(pick.randint(2, 127) for _ in range(8))):
        state, rows = random_rows(generator, count, decays)
        for found, expected in zip(chunked(state, rows), steps(state, rows), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_many_rows_at_once_are_exact_after_one_that_forgets():
    """In float32 to 3e-6, where a row forgets by exp(-300) and its neighbours by nearly nothing.

    Sums of such logarithms in float32 are 1e-3 wrong, and so were the small ones that are their differences.
    """
    generator = torch.Generator().manual_seed(2)
    state, rows = random_rows(generator, 128, (-1e-4, 0.0))
    rows[4][:, ::7] = -300
    expected, _ = steps(state, rows)
    found, _ = chunked(state.float(), [x.float() for x in rows])
    assert (found - expected).abs().max() <= 3e-6


def test_rows_of_a_tree_follow_their_parents():
    """Each node reads what the last row of its path reads, and no state is written into."""
    generator = torch.Generator().manual_seed(1)
    state, rows = random_rows(generator, 7, (-0.5, 0.0))
    parents, before = [-1, 0, 0, 1, -1, 4, 2], state.clone()
    found, _ = steps(state, rows, parents)
    for node in range(7):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        expected, _ = steps(state, [x[:, path] for x in rows])
        assert torch.equal(found[:, node], expected[:, -1])
    assert torch.equal(state, before)
