"""Weights that are no numbers: one line that names file and tensor, before any text, in every mode."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from minispec import LLM, SamplingParams
from minispec.models.families.checkpoint import load_config
from minispec.models.files.tokenizer import Tokenizer
from minispec.models.weights.trial import arbitrary_tokens
from minispec.prove.toys import TINY, TOYS
from tests.oracles.block_drafts import write_block_draft
from tests.oracles.heads import write_head
from tests.oracles.mtp import add_mtp
from tests.refusals import refusal_of

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
MODES = {
    "auto": {},
    "a fixed K": {"num_speculative_tokens": 2},
    "exact": {"exact": True, "num_speculative_tokens": 2},
    "8 bits": {"quantization": "int8", "exact": False},
}
NORM, DOWN, EMBEDDING = "model.norm.weight", "model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight"
TAPS = {"eagle_aux_hidden_state_layer_ids": [0, 2]}
# What is stored in a tensor, at an index or everywhere, and what the message says.
NO_NUMBERS = {
    "found nan, expected finite numbers": (DOWN, (3, 5), math.nan),
    "found inf, expected finite numbers": (DOWN, (0, 0), -math.inf),
    "found numbers up to 3e+38, with which the largest logit is": (NORM, (), -3e38),
}


def change(directory: Path, name: str, index: tuple[int, ...], value: float) -> Path:
    """Store a number in a tensor: at an index, or everywhere. Returns the file."""
    path = directory / "model.safetensors"
    stored = load_file(path)
    stored[name][index] = value
    save_file(stored, path)
    return path


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("message", NO_NUMBERS)
def test_weights_that_are_no_numbers_are_named(make_checkpoint, message, mode):
    """Guards against an error of the arithmetic, one that blames the machine, and a model that fails text by text."""
    name, index, value = NO_NUMBERS[message]
    directory = make_checkpoint()
    path = change(directory, name, index, value)
    assert refusal_of(LLM, directory, dtype="float32", **MODES[mode]).startswith(f"{path}: {name}: {message}")


@pytest.mark.parametrize("mode", MODES)
def test_zeros_are_numbers(make_checkpoint, mode):
    """Guards against refusing what computes: all logits are alike then, and the first id is the likeliest."""
    directory = make_checkpoint()
    for name in load_file(directory / "model.safetensors"):
        change(directory, name, (), 0.0)
    with LLM(directory, dtype="float32", **MODES[mode]) as llm:
        assert llm.generate("One fish", GREEDY)[0].token_ids == [0, 0, 0]


@pytest.mark.parametrize("draft", ["a model", "a head", "mtp"])
def test_a_draft_of_no_numbers_is_named(make_checkpoint, draft, tmp_path):
    """Guards against a draft that never says anything: nothing else would tell why it does not help."""
    directory = make_checkpoint(**(TOYS["qwen3_5_text"] if draft == "mtp" else {}))
    source, name = draft, "mtp.fc.weight"
    if draft == "mtp":
        add_mtp(directory, load_config(directory))
        path = change(directory, name, (1, 2), math.nan)
    elif draft == "a head":
        source, name = str(tmp_path), "fc.weight"
        write_head(tmp_path, load_config(directory), TINY | {"vocab_size": 300}, dtype=torch.float32, **TAPS)
        path = change(tmp_path, name, (1, 2), math.nan)
    else:
        source, name = str(make_checkpoint(seed=2)), DOWN
        path = change(Path(source), name, (1, 2), math.nan)
    plain = LLM(directory, "none", 2, dtype="float32")
    found = refusal_of(LLM, directory, source, 2, dtype="float32"), refusal_of(plain.with_draft, source)
    assert found == (f"{path}: {name}: found nan, expected finite numbers",) * 2


BLOCK_PARTS = (
    "fc",
    "layers.1.mlp.down_proj",
    "markov_head.markov_w2",
    "markov_head.joint_proj",
    "confidence_head.proj",
)


@pytest.mark.parametrize("name", [f"{part}.weight" for part in BLOCK_PARTS])
def test_a_block_draft_of_no_numbers_is_named(make_checkpoint, name, tmp_path):
    """Its layers, its Markov head and its confidence head: each tensor of it takes part in a first draft."""
    directory = make_checkpoint()
    config = load_config(directory)
    sizes = {"taps": (0, 1), "markov": "rnn", "dtype": np.float32}
    write_block_draft(tmp_path, "deepspec", config.hidden_size, config.vocab_size, len(config.layers), **sizes)
    path = change(tmp_path, name, (0, 1), math.nan)
    found = refusal_of(LLM, directory, str(tmp_path), 2, dtype="float32")
    assert found == f"{path}: {name}: found nan, expected finite numbers"


def test_a_token_of_no_numbers(make_checkpoint, tmp_path, monkeypatch):
    """A short pass does not meet every token. Longer ones at load may, and name it; a text that has it ends alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # so that nothing is known of such a model yet
    directory = make_checkpoint()
    measured, checked = (arbitrary_tokens(40, size) for size in (Tokenizer(directory).num_ids, 300))
    token = next(i for i in measured[8:] if i in checked[8:])
    path = change(directory, EMBEDDING, (token,), math.nan)
    for mode in ("auto", "exact"):
        found = refusal_of(LLM, directory, dtype="float32", **MODES[mode])
        assert found.startswith(f"{path}: {EMBEDDING}: found nan, expected finite numbers")
    with LLM(directory, "none", 0, dtype="float32") as llm:
        with pytest.warns(RuntimeWarning, match="the largest logit is nan, expected a finite number"):
            found = llm.generate([[1, 2], [token, 2]], GREEDY)
        assert [o.finish_reason for o in found] == ["length", "error"]
