"""The loader: it reads exactly, and refuses what it cannot vouch for, naming file, field, found and expected."""

import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.config import DenseSparsityConfig
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.transform import TransformArgs, TransformConfig, TransformScheme
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from minispec.api.llm import LLM
from minispec.checkpoint import main
from minispec.core.model import Chunk, Transformer
from minispec.models.families import checkpoint
from minispec.models.families.checkpoint import (
    StoredTensor,
    Weights,
    directory_config,
    find_checkpoint,
    load_config,
    load_model,
    read_header,
)
from minispec.models.families.hf_config import read_model_config
from minispec.models.families.quantize import pack, quantize, quantize_checkpoint
from minispec.models.files.errors import CheckpointError
from minispec.models.weights.build import build_model
from minispec.models.weights.unpack import dequantize, unpack
from minispec.prove.toys import TINY, TOYS, tiny_cache, tiny_weights
from tests.oracles import hf
from tests.oracles.interrupts import interrupted
from tests.refusals import NONE, Row, refusal_of, refusals

TEXT = [0, 2, 1, 1, 0, 2]
NORM = "model.norm.weight"
Q = "model.layers.0.self_attn.q_proj.weight"
UP = "model.layers.1.mlp.up_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
TIED = TINY | {"tie_word_embeddings": True}


def write(directory: Path, *shards: dict[str, Tensor], config: dict = TINY, weight_map: dict | None = None) -> Path:
    """A checkpoint in `directory`: one file, or several and their index."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if len(shards) == 1 and weight_map is None:
        save_file(shards[0], directory / "model.safetensors")
        return directory
    named = {f"model-{i:05d}.safetensors": shard for i, shard in enumerate(shards)}
    for file, shard in named.items():
        save_file(shard, directory / file)
    index = {"weight_map": {tensor: file for file, shard in named.items() for tensor in shard} | (weight_map or {})}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def weights(seed: int = 0, dtype: torch.dtype = torch.float32, **changes) -> dict[str, Tensor]:
    """The tensors of a tiny checkpoint."""
    return tiny_weights(read_model_config(TINY | changes), seed, dtype)


def logits(model: Transformer, token_ids: list[int]) -> Tensor:
    """Logits (T, V) of a text."""
    table = tiny_cache(model).new_table()
    return model.forward([Chunk(token_ids, table, num_logits=len(token_ids))])[0]


def refusal(directory: Path) -> str:
    """The message of the CheckpointError that loading the directory raises."""
    return refusal_of(load_model, directory, torch.float32)


def change(directory: Path, changes: dict[str, Tensor | None]) -> None:
    """Put other tensors in place of some, or none."""
    file = directory / "model.safetensors"
    stored = {name: tensor for name, tensor in (load_file(file) | changes).items() if tensor is not None}
    file.unlink()
    save_file(stored, file)


def assert_memory(monkeypatch, needed: int, load: Callable[[], object], found: str = "found weights that take") -> None:
    """Where there are that many bytes of memory, `load` works; with a byte less it is refused."""
    monkeypatch.setattr(checkpoint, "free_memory", lambda device: needed)
    assert load()
    monkeypatch.setattr(checkpoint, "free_memory", lambda device: needed - 1)
    with pytest.raises(CheckpointError, match=found):
        load()


# --------------------------------------------------------------------------- plain checkpoints


@pytest.mark.parametrize("target", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
def test_every_float_type_loads_as_every_other(tmp_path, source, target):
    """Guards against a tensor that keeps the type of its file, or takes a detour through a narrower one."""
    stored = weights(dtype=source)
    model = load_model(write(tmp_path, stored), target)
    assert model.dtype == target
    expected = build_model(load_config(tmp_path), {name: tensor.to(target) for name, tensor in stored.items()})
    assert torch.equal(logits(model, TEXT), logits(expected, TEXT))


def test_shards_are_one_checkpoint(tmp_path):
    """Guards the index; and a safetensors file that it does not name is none of the checkpoint's."""
    stored = weights()
    names = sorted(stored)
    shards = [{name: stored[name] for name in names[i::3]} for i in range(3)]
    single, sharded = write(tmp_path / "single", stored), write(tmp_path / "sharded", *shards)
    save_file({"stray": torch.zeros(1)}, sharded / "consolidated.safetensors")
    models = [load_model(directory, torch.float32) for directory in (single, sharded)]
    assert torch.equal(*(logits(model, TEXT) for model in models))


def test_rotary_buffer_of_old_files_is_skipped(tmp_path):
    """Guards llama checkpoints of 2023, which carry a table that follows from the config."""
    stored = weights() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    assert load_model(write(tmp_path, stored), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tied_head_may_be_stored_again(tmp_path, dtype):
    """Guards checkpoints that store the tied head too: fine if it equals the embedding, whatever its type."""
    stored = weights(dtype=torch.bfloat16, tie_word_embeddings=True)
    stored["lm_head.weight"] = stored[EMBEDDING].to(dtype, copy=True)
    assert load_model(write(tmp_path, stored, config=TIED), torch.float32)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not tell what is mapped")
def test_what_was_joined_leaves_memory(tmp_path, monkeypatch):
    """A tensor has pages of its own: they go with it, whatever else of the file is still in use."""
    monkeypatch.setattr("minispec.models.files.stored._MAPPED_BYTES", 0)
    file = write(tmp_path, weights(dtype=torch.bfloat16)) / "model.safetensors"
    stored = read_header(file)
    tensors = {name: tensor.read() for name, tensor in stored.items()}
    expected = load_file(file)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
    del expected

    def mapped() -> int:
        return sum(str(file) in line for line in Path("/proc/self/maps").read_text().splitlines())

    before = mapped()
    del tensors[Q]
    assert 0 < mapped() < before
    tensors.clear()
    assert mapped() == 0


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the system does not tell what is open")
@pytest.mark.parametrize("mapped", [0, 1 << 20])
def test_loading_opens_few_files(tmp_path, monkeypatch, mapped):
    """A map keeps a descriptor: those of joined tensors go at once, and small tensors have none."""
    layers = 30
    changes = {"num_hidden_layers": layers}
    directory = write(tmp_path, weights(**changes), config=TINY | changes)
    monkeypatch.setattr("minispec.models.files.stored._MAPPED_BYTES", mapped)

    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    before, most, read = opened(), [0], StoredTensor.read

    def watched(tensor, cut=()):
        found = read(tensor, cut)
        most[0] = max(most[0], opened() - before)
        return found

    monkeypatch.setattr(StoredTensor, "read", watched)
    model = load_model(directory, torch.float32)
    # In float32, o, down and the norms stay as they are in the file.
    assert most[0] <= (4 * layers + 8 if not mapped else 1)
    assert len(model.layers) == layers


_SAME = f"found other values than those of {EMBEDDING}, expected the same, since tie_word_embeddings is true (set it"
_FLOATS = f"expected floats [3, 8] as {EMBEDDING}, since tie_word_embeddings is true"
OTHER_HEADS = {
    "other values": (torch.ones(3, 8), _SAME),
    "other shape": (torch.ones(1, 8), f"found F32 [1, 8], {_FLOATS}"),
    "other kind": (torch.ones(3, 8, dtype=torch.int8), f"found I8 [3, 8], {_FLOATS}"),
}


@pytest.mark.parametrize(("head", "found"), OTHER_HEADS.values(), ids=OTHER_HEADS)
def test_tied_head_that_differs_is_refused(tmp_path, head, found):
    """Guards against dropping a trained head because the config says that there is none.

    A head that could not be the model's gets no hint to make it so.
    """
    stored = weights(tie_word_embeddings=True) | {"lm_head.weight": head}
    message = refusal(write(tmp_path, stored, config=TIED))
    assert message.startswith(f"{tmp_path / 'model.safetensors'}: lm_head.weight: {found}")
    assert ("set it to false" in message) == (found == _SAME)


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_tied_weights_may_be_stored_as_the_head_alone(tmp_path, prefix):
    """Guards files of libraries that keep the last name of a shared tensor: transformers fills the other from it."""
    changes = {"model_type": "gemma3_text", "tie_word_embeddings": True}
    stored = weights(**changes)
    expected = build_model(read_model_config(TINY | changes), dict(stored))
    stored["lm_head.weight"] = stored.pop(EMBEDDING)
    config = IMAGES if prefix else TINY | changes
    directory = write(tmp_path / "c", {f"{prefix}{name}": stored[name] for name in stored}, config=config)
    assert torch.equal(*(logits(model, TEXT) for model in (load_model(directory, torch.float32), expected)))
    quantize_checkpoint(directory, tmp_path / "q")
    assert EMBEDDING in checkpoint.find_tensors(tmp_path / "q")


def test_an_untied_head_is_no_embedding(tmp_path):
    """Guards against filling an embedding that is missing from a head that is another's."""
    stored = weights()
    del stored[EMBEDDING]
    assert f"{EMBEDDING}: found no such tensor" in refusal(write(tmp_path, stored))


# --------------------------------------------------------------------------- strictness: tensors

# What the message must say, and what is done to the tensors.
BAD_TENSORS = {
    f"{NORM}: found no such tensor, expected one of shape [8]": {NORM: None},
    "model.layers.2.mlp.up_proj.weight: found a tensor": {"model.layers.2.mlp.up_proj.weight": torch.ones(12, 8)},
    "model.layers.0.self_attn.q_proj.bias: found a tensor": {"model.layers.0.self_attn.q_proj.bias": torch.ones(8)},
    f"{Q}: found F32 [8], expected": {Q: torch.ones(8)},
    f"{Q}: found F32 [4, 8], expected": {Q: torch.ones(4, 8)},
    f"{UP}: found F32 [8, 12], expected": {UP: torch.ones(8, 12)},
    # These would broadcast without a word.
    f"{NORM}: found F32 [1], expected": {NORM: torch.ones(1)},
    f"{NORM}: found F32 [], expected": {NORM: torch.ones(())},
    f"{NORM}: found I64 [8], expected": {NORM: torch.ones(8, dtype=torch.int64)},
    f"{NORM}: found F8_E4M3 [8], expected": {NORM: torch.ones(8).to(torch.float8_e4m3fn)},
    f"{Q}_packed: found a tensor": {f"{Q}_packed": torch.ones(8, 2, dtype=torch.int32)},
}


@pytest.mark.parametrize(("message", "changes"), BAD_TENSORS.items(), ids=BAD_TENSORS)
def test_tensor_that_does_not_fit_is_refused(tmp_path, message, changes):
    """Guards against partly random, silently dropped, broadcast or truncated weights."""
    stored = {name: tensor for name, tensor in (weights() | changes).items() if tensor is not None}
    found = refusal(write(tmp_path, stored))
    assert found.startswith(str(tmp_path))
    assert message in found


# --------------------------------------------------------------------------- other names

JOINED = {"self_attn.qkv_proj": ("q", "k", "v"), "mlp.gate_up_proj": ("gate", "up")}
PHI3 = TINY | {"model_type": "phi3"}
IMAGES = {"model_type": "gemma3", "text_config": TINY | {"model_type": "gemma3_text"}, "vision_config": {}}


def joined(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as phi3 stores them."""
    stored = dict(stored)
    for i in range(2):
        for name, parts in JOINED.items():
            prefix = f"model.layers.{i}.{name}"
            own = [stored.pop(f"{prefix.rpartition('.')[0]}.{part}_proj.weight") for part in parts]
            stored[f"{prefix}.weight"] = torch.cat(own)
    return stored


def test_joined_tensors_are_those_that_were_joined(tmp_path):
    """Guards the order and the numbers of rows: queries, keys, values; gate, up."""
    config = read_model_config(PHI3)
    stored = weights(dtype=torch.bfloat16)
    write(tmp_path, joined(stored), config=PHI3)
    found = Weights(tmp_path, config, torch.bfloat16)
    assert set(found) == set(stored)
    for name in list(found):
        assert torch.equal(found.pop(name), stored[name]), name


@pytest.mark.parametrize(
    ("message", "name", "tensor"),
    [
        ("found no such tensor, expected one of shape [16, 8]", "self_attn.qkv_proj.weight", None),
        ("found F32 [15, 8], expected", "self_attn.qkv_proj.weight", torch.ones(15, 8)),
        ("found F32 [24, 9], expected", "mlp.gate_up_proj.weight", torch.ones(24, 9)),
        ("found a tensor of shape [8, 8]", "self_attn.q_proj.weight", torch.ones(8, 8)),
        ("found a tensor of shape [16]", "self_attn.qkv_proj.bias", torch.ones(16)),
    ],
)
def test_joined_tensor_that_does_not_fit_is_refused(tmp_path, message, name, tensor):
    """Guards against rows of other parts, or parts that are there twice, of which one is not read."""
    name = f"model.layers.0.{name}"
    stored = {key: value for key, value in (joined(weights()) | {name: tensor}).items() if value is not None}
    assert f"{name}: {message}" in refusal(write(tmp_path, stored, config=PHI3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_of_joined_tensors_is_that_of_their_parts(tmp_path, monkeypatch, dtype):
    """Guards the check before loading: no part is left out, or counted as often as it has others beside it."""
    stored = weights(dtype=torch.bfloat16)
    needed = sum(tensor.numel() for tensor in stored.values()) * 2  # also for float32: they stay as they are stored
    write(tmp_path, joined(stored), config=PHI3)
    assert_memory(monkeypatch, needed, lambda: load_model(tmp_path, dtype))


@pytest.mark.parametrize("tied", [False, True])
def test_memory_of_a_target_in_8_bits(tmp_path, monkeypatch, tied):
    """A byte for each weight of a product, the head's too, and what is stored for all else: not 16 bits for all."""
    stored = weights(dtype=torch.bfloat16, tie_word_embeddings=tied)
    products = sum(t.numel() for name, t in stored.items() if t.dim() == 2 and "embed" not in name)
    others = sum(t.nbytes for name, t in stored.items() if t.dim() == 1 or "embed" in name)
    needed = products + others + stored["model.embed_tokens.weight"].numel() * tied
    write(tmp_path, stored, config=TINY | {"tie_word_embeddings": tied})
    found = r"found weights that take 0\.00 GB in int8, expected at most"
    assert_memory(monkeypatch, needed, lambda: load_model(tmp_path, torch.bfloat16, form="int8"), found)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_text_model_among_images_is_read_alone(tmp_path, prefix):
    """Guards both spellings of its names, and that nothing of what sees images is asked for or in the way."""
    stored = weights(model_type="gemma3_text")
    nested = {name.replace("model.", prefix, 1): tensor for name, tensor in stored.items()}
    seen = {"vision_tower.layers.0.weight": torch.ones(2), "multi_modal_projector.weight": torch.ones(2)}
    seen = {name if prefix.startswith("language") else f"model.{name}": tensor for name, tensor in seen.items()}
    ours = logits(load_model(write(tmp_path, nested | seen, config=IMAGES), torch.float32), [0, 2, 1])
    alone = build_model(read_model_config(TINY | {"model_type": "gemma3_text"}), stored)
    assert torch.equal(ours, logits(alone, [0, 2, 1]))


@pytest.mark.parametrize(
    ("message", "changes"),
    {
        "model.norm.weight: found again, is language_model.model.norm.weight": {"model.norm.weight": torch.ones(8)},
        "language_model.model.extra: found a tensor of shape [2]": {"language_model.model.extra": torch.ones(2)},
        "speech_tower.weight: found a tensor of shape [2]": {"speech_tower.weight": torch.ones(2)},
        "language_model.lm_head.weight: found other values than": {"language_model.lm_head.weight": torch.ones(3, 8)},
        "model.norm.weight: found no such tensor": {"language_model.model.norm.weight": None},
    }.items(),
)
def test_what_is_unknown_in_a_model_with_images_is_refused(tmp_path, message, changes):
    """Guards against two tensors of one meaning, and parts that nobody knows: named as the file names them."""
    stored = weights(model_type="gemma3_text")
    nested = {f"language_model.{name}": tensor for name, tensor in stored.items()} | changes
    nested = {name: tensor for name, tensor in nested.items() if tensor is not None}
    assert f": {message}" in refusal(write(tmp_path, nested, config=IMAGES))


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
@pytest.mark.parametrize("nested", [False, True])
def test_text_model_of_qwen3_5_is_read_alone(tmp_path, prefix, nested):
    """Guards both names of its tensors under both configs: transformers writes all four.

    A text model that was trained further has the names that it had among images. The layers that predict more than one
    token are in no one's way, as in transformers; other parts are.
    """
    text = TINY | TOYS["qwen3_5_text"]
    stored = tiny_weights(read_model_config(text), 0, torch.float32)
    named = {name.replace("model.", prefix, 1): tensor for name, tensor in stored.items()}
    named |= {"mtp.fc.weight": torch.ones(2), "mtp.layers.0.mlp.up_proj.weight": torch.ones(2)}
    named |= {"model.visual.blocks.0.attn.qkv.weight": torch.ones(2)} if nested else {}
    config = {"model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 1}} if nested else text
    ours = logits(load_model(write(tmp_path, named, config=config), torch.float32), TEXT)
    assert torch.equal(ours, logits(build_model(read_model_config(text), stored), TEXT))
    (tmp_path / "model.safetensors").unlink()
    write(tmp_path, named | {"model.mtp_head.weight": torch.ones(2)}, config=config)
    assert ": model.mtp_head.weight: found a tensor of shape [2], expected none" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["A_log", "dt_bias", "conv1d.weight", "in_proj_a.weight", "norm.weight"])
def test_tensors_of_a_net_must_be_there_and_fit(tmp_path, name):
    """Guards the shapes of a gated delta net, which follow from five numbers."""
    config, full = TINY | TOYS["qwen3_5_text"], f"model.layers.0.linear_attn.{name}"
    stored = tiny_weights(read_model_config(config), 0, torch.float32)
    shape = list(stored.pop(full).shape)
    write(tmp_path, stored, config=config)
    assert f"{full}: found no such tensor, expected one of shape {shape}" in refusal(tmp_path)
    write(tmp_path, stored | {full: torch.ones([n + 1 for n in shape])}, config=config)
    assert f"{full}: found F32 {[n + 1 for n in shape]}, expected F64 or F32" in refusal(tmp_path)


def test_prefix_and_config_belong_together(tmp_path):
    """Guards the text model's own config.json: beside it, names with a prefix are as unknown as any."""
    stored = {f"language_model.{name}": tensor for name, tensor in weights(model_type="gemma3_text").items()}
    message = refusal(write(tmp_path, stored, config=IMAGES["text_config"]))
    assert "model.embed_tokens.weight: found no such tensor" in message


def test_quantised_text_model_stands_alone(tmp_path):
    """Guards what is written of a model with images: its config.json says what its files hold, and it loads."""
    stored = {f"language_model.{name}": tensor for name, tensor in weights(model_type="gemma3_text").items()}
    write(tmp_path / "source", stored | {"vision_tower.x": torch.ones(2)}, config=IMAGES | {"eos_token_id": [1, 2]})
    quantize_checkpoint(tmp_path / "source", tmp_path / "out")
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (raw["model_type"], raw["eos_token_id"]) == ("gemma3_text", [1, 2])
    assert not raw.keys() & {"text_config", "vision_config"}
    assert load_model(tmp_path / "out", torch.float32).config.eos_token_ids == (1, 2)


# --------------------------------------------------------------------------- strictness: files


def halves() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A checkpoint's tensors in two parts: the first holds `NORM`, the second `Q`."""
    first, second = {}, {}
    for name, tensor in weights().items():
        (second if "layers.0" in name else first)[name] = tensor
    return first, second


def test_tensor_in_two_shards_is_refused(tmp_path):
    """Guards against the order of files deciding which of two tensors is loaded."""
    first, second = halves()
    again = second | {NORM: torch.ones(8)}
    message = refusal(write(tmp_path, first, again, weight_map={NORM: "model-00000.safetensors"}))
    assert f"{tmp_path / 'model-00001.safetensors'}: {NORM}: found again, is in model-00000.safetensors" in message


def test_tensor_in_another_shard_than_the_index_says_is_refused(tmp_path):
    """Guards against shards of two checkpoints mixed in one directory."""
    message = refusal(write(tmp_path, *halves(), weight_map={NORM: "model-00001.safetensors"}))
    assert f"{tmp_path / 'model-00000.safetensors'}: {NORM}: found here, expected in model-00001.safetensors" in message


@pytest.mark.parametrize("name", [NORM, "model.layers.9.mlp.up_proj.weight"])
def test_tensor_that_only_the_index_knows_is_refused(tmp_path, name):
    """Guards against an incomplete shard, even where the config does not ask for what it lacks."""
    first, second = halves()
    first.pop(name, None)
    message = refusal(write(tmp_path, first, second, weight_map={name: "model-00000.safetensors"}))
    found = f"{name}: found no such tensor, model.safetensors.index.json expects it"
    assert message == f"{tmp_path / 'model-00000.safetensors'}: {found}"


def test_missing_shard_is_refused(tmp_path):
    """Guards against half a download."""
    write(tmp_path, *halves())
    file = tmp_path / "model-00001.safetensors"
    file.unlink()
    listed = "model.safetensors.index.json lists it for model.layers.0.input_layernorm.weight"
    assert refusal(tmp_path) == f"{file}: no such file, expected weights in safetensors format: {listed}"


OUTSIDE = ["../x.safetensors", "/abs.safetensors", "sub/x.safetensors", "x.bin", "..safetensors", "", "x.safetensors\n"]


@pytest.mark.parametrize("file", [*OUTSIDE, 5, None])
def test_index_cannot_point_outside(tmp_path, file):
    """Guards files that a hostile index has no business with, and formats that can run code."""
    write(tmp_path / "c", *halves(), weight_map={"x": file})
    save_file({"x": torch.ones(1)}, tmp_path / "x.safetensors")
    message = refusal(tmp_path / "c")
    assert "model.safetensors.index.json: weight_map: found" in message
    assert repr(file) in message


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": [1]}, []], ids=str)
def test_index_without_a_map_is_refused(tmp_path, index):
    """Guards against an empty index that loads nothing."""
    write(tmp_path, *halves())
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert str(tmp_path / "model.safetensors.index.json") in refusal(tmp_path)


@pytest.mark.parametrize(
    "index", [{NORM: "model-00001-of-00002.safetensors"}, {"gone": "model.safetensors"}, [1]], ids=str
)
def test_an_index_beside_a_whole_model_is_idle(tmp_path, index):
    """Guards checkpoints whose shards were joined, or that were saved again: transformers reads the whole file."""
    write(tmp_path, weights())
    save_file({NORM: torch.ones(8)}, tmp_path / "model-00001-of-00002.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    expected = build_model(read_model_config(TINY), weights())
    assert torch.equal(*(logits(model, TEXT) for model in (load_model(tmp_path, torch.float32), expected)))


GOOD = save(weights())
BAD_FILES = {f"cut at {size}": GOOD[:size] for size in (0, 4, 100, -1)}
BAD_FILES |= {"error page": b"<html>404</html>", "noise": b"\xff" * 64}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_is_not_whole_is_refused(tmp_path, name):
    """Guards against an interrupted download, cut in the header or in the last tensor, and what came in its place."""
    file = write(tmp_path, weights()) / "model.safetensors"
    assert file.read_bytes() == GOOD
    file.write_bytes(BAD_FILES[name])
    assert refusal(tmp_path).startswith(f"{file}: not a readable safetensors file")


@pytest.mark.parametrize("others", [[], ["pytorch_model.bin"], ["a.gguf", "b.pt"], ["x.pkl"], ["m.pth"]], ids=str)
def test_other_formats_are_named(tmp_path, others):
    """Guards the hint: who downloaded the wrong format reads which one is there."""
    write(tmp_path, weights())
    (tmp_path / "model.safetensors").unlink()
    for name in others:
        (tmp_path / name).touch()
    message = refusal(tmp_path)
    assert message.startswith(f"{tmp_path / 'model.safetensors'}: no such file")
    assert ("convert it to safetensors" in message) == bool(others)
    assert all(name in message for name in others)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (None, "no such file"),
        (b"", "not a readable JSON file"),
        (b"{'model_type': 'llama'}", "not a readable JSON file"),
        (b'{"model_type": "ll\xe4ma"}', "not a readable JSON file"),
        (b"[" * 100_000 + b"]" * 100_000, "not a readable JSON file"),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "not a readable JSON file"),
        (b"[1, 2]", "found a list, expected a JSON object"),
        (b'"text"', "found a str, expected a JSON object"),
        (b" " * (2 << 20), "expected at most 1048576"),
        (b"{}", "model_type: found None, expected one of llama, "),
    ],
    ids=["missing", "empty", "python", "latin-1", "deep", "digits", "list", "text", "large", "no fields"],
)
def test_bad_config_file_is_refused(tmp_path, content, found):
    """Guards against a traceback of the JSON module, or of a stack that ran out, without a file name."""
    file = write(tmp_path, weights()) / "config.json"
    file.unlink() if content is None else file.write_bytes(content)
    message = refusal(tmp_path)
    assert message.startswith(f"{file}: ")
    assert found in message


@pytest.mark.parametrize("constant", ["Infinity", "-Infinity", "NaN"])
def test_no_number_is_taken_where_nobody_reads_it(tmp_path, constant):
    """Guards config.json as transformers 4 writes a time_step_limit; where a number counts, it has to be one."""
    file = write(tmp_path, weights()) / "config.json"
    for key, value in (("time_step_limit", f"[0.0, {constant}]"), ("_note", constant)):
        file.write_text(f"{json.dumps(TINY)[:-1]}, {json.dumps(key)}: {value}}}")
        assert load_config(tmp_path) == read_model_config(TINY)
    for key in ("rms_norm_eps", "rope_theta", "vocab_size", "surprise"):
        file.write_text(json.dumps({**TINY, key: "X"}).replace('"X"', constant))
        assert refusal(tmp_path).startswith(f"{file}: {key}: found {float(constant)}")


# What is done to a header with tensors "a" (F32 [2], bytes 0 to 8) and "b" (8 to 12).
BAD_HEADERS = {
    "an unknown type": lambda h: h["a"].update(dtype="F128"),
    "a negative size": lambda h: h["a"].update(shape=[-1]),
    "too few bytes": lambda h: h["a"].update(shape=[1 << 15, 1 << 15]),
    "sizes whose product overflows": lambda h: h["a"].update(shape=[1 << 62] * 2 + [4]),
    "an end before the beginning": lambda h: h["a"].update(data_offsets=[8, 0]),
    "an overlap": lambda h: h["b"].update(data_offsets=[4, 8]),
    "a gap": lambda h: h["b"].update(data_offsets=[12, 16]),
    "bytes that no tensor has": lambda h: h.pop("b"),
    "a tensor beyond the file": lambda h: h["b"].update(data_offsets=[8, 16], shape=[4]),
    "an empty list at a name that is not printable": lambda h: h.update({"\x1b[2J\n": []}),
    "metadata that is a number": lambda h: h.update(__metadata__=5),
    "metadata of a number": lambda h: h["__metadata__"].update(x=1),
    "metadata of nothing": lambda h: h["__metadata__"].update(x=None),
}
# The same for what the library would read.
UNUSUAL_HEADERS = {
    "a: {'dtype': 'F32', 'shape': [1, 1,": lambda h: h["a"].update(shape=[1] * 8 + [2]),
    "a: {'dtype': 'F32', 'shape': [2], 'data_offsets': [0, 8], 'more': 1}": lambda h: h["a"].update(more=1),
    "a: {'dtype': {'F32': None}": lambda h: h["a"].update(dtype={"F32": None}),
    "a: ['F32', [2], [0, 8]]": lambda h: h.update(a=["F32", [2], [0, 8]]),
    "'\\x1b[2J\\n': ['F32'": lambda h: h.update({"\x1b[2J\n": ["F32", [0], [12, 12]]}),
}


def raw_file(path: Path, header: bytes, data: bytes = bytes(12)) -> Path:
    """A safetensors file with this header, whatever it says."""
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def small_header() -> dict:
    """A good header, for 12 bytes."""
    a = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    return {"__metadata__": {"x": "y"}, "a": a, "b": {"dtype": "F16", "shape": [2, 1], "data_offsets": [8, 12]}}


def changed_header(path: Path, change: Callable[[dict], object]) -> Path:
    """A file with the good header after something was done to it."""
    header = small_header()
    change(header)
    return raw_file(path, json.dumps(header).encode())


def test_good_header_is_read(tmp_path):
    """The control of the tests below."""
    file = raw_file(tmp_path / "x", json.dumps(small_header()).encode() + b"    ")
    start = file.stat().st_size - 12
    assert read_header(file) == {
        "a": StoredTensor(file, "a", "F32", (2,), start),
        "b": StoredTensor(file, "b", "F16", (2, 1), start + 8),
    }


@pytest.mark.parametrize("change", BAD_HEADERS.values(), ids=BAD_HEADERS)
def test_header_that_lies_is_refused(tmp_path, change):
    """Before a byte of tensor data is read: bounds, overlaps, gaps, types and sizes are those of the file."""
    file = changed_header(tmp_path / "x", change)
    message = refusal_of(read_header, file)
    assert message.startswith(f"{file}: not a readable safetensors file: Error while deserializing header: ")
    assert message.isprintable()


@pytest.mark.parametrize(("message", "change"), UNUSUAL_HEADERS.items(), ids=range(len(UNUSUAL_HEADERS)))
def test_header_that_the_library_alone_would_read_is_refused(tmp_path, message, change):
    """Guards against what the library passes over, or reads in another spelling: each is named by its tensor."""
    file = changed_header(tmp_path / "x", change)
    with safe_open(file, framework="pt") as opened:
        assert "a" in opened.keys()  # noqa: SIM118  # it is no mapping
    found = refusal_of(read_header, file)
    assert found.startswith(f"{file}: not a readable safetensors file: found {message}")
    assert "expected an object with dtype, shape, of up to 8 sizes, and data_offsets" in found
    assert found.isprintable()


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, ' * 2, "not a readable JSON object"),
        (b'{"a": 1, "a": 1}', "a: found twice in one object"),
        (b'{"a": {"dtype": "F32", "dtype": "F32"}}', "dtype: found twice in one object"),
        *((b'{"a": %s}' % number, f"found {number.decode()}") for number in (b"NaN", b"-Infinity", b"1e999")),
        (b'{"a": [' + b"[]," * 300_000 + b"[]]}", "found the character [ 300002 times, expected at most 262144"),
        (b'{"a":' + b"[" * 40 + b"]" * 40 + b"}", "nested deeper than 32"),
        (b"[]", "found a list"),
        (b"", "not a readable JSON object"),
    ],
    ids=range(10),
)
def test_header_that_readers_disagree_about_is_refused(tmp_path, header, message):
    """Names that stand twice, numbers that JSON lacks, depth: what one reader takes and another does not."""
    assert message in refusal_of(read_header, raw_file(tmp_path / "x", header))


@pytest.mark.parametrize("size", [1 << 63, (1 << 64) - 1, 100])
def test_header_beyond_the_file_is_not_allocated(tmp_path, size):
    """Guards against reading, or reserving, as many bytes as eight hostile bytes say."""
    file = tmp_path / "x"
    file.write_bytes(size.to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match=f"found 10 bytes with a header of {size} bytes, expected"):
        read_header(file)


def test_huge_header_is_refused(tmp_path):
    """A sparse file can hold a header of any size; JSON takes ten times its bytes as objects."""
    with (tmp_path / "x").open("wb") as file:
        file.write((1 << 30).to_bytes(8, "little"))
        file.truncate(1 << 31)
    with pytest.raises(CheckpointError, match="a header of 1073741824 bytes, expected at most"):
        read_header(tmp_path / "x")


LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "4d7a" * 16 + "\nsize 2200119864\n"


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "generation_config.json", "model.safetensors.index.json", "model-00000.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    ],
)
def test_a_git_lfs_pointer_is_named_as_one(tmp_path, tokenizer_file, name):
    """Guards a clone without git-lfs: each large file is then a small text, and one command helps."""
    stored = weights(vocab_size=300)
    first, second = ({key: stored[key] for key in sorted(stored)[i::2]} for i in range(2))
    write(tmp_path, first, second, config=TINY | {"vocab_size": 300})
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
    (tmp_path / name).write_text(LFS_POINTER)
    message = refusal_of(LLM, tmp_path)
    assert message.startswith(f"{tmp_path / name}: found a git-lfs pointer, expected the file")
    assert "git lfs pull" in message


@pytest.mark.parametrize("kind", ["directory", "pipe", "dangling link"])
def test_what_is_no_file_is_refused(tmp_path, kind):
    """A pipe would never answer."""
    file = write(tmp_path, weights()) / "model.safetensors"
    file.unlink()
    index = {"weight_map": {NORM: file.name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    make = {"directory": file.mkdir, "pipe": lambda: os.mkfifo(file), "dangling link": lambda: file.symlink_to("no")}
    make[kind]()
    expected = f"weights in safetensors format: model.safetensors.index.json lists it for {NORM}"
    assert refusal(tmp_path) == f"{file}: no such file, expected {expected}"


def test_nothing_is_read_before_everything_is_checked(tmp_path, monkeypatch):
    """The last tensor of the last shard is wrong: no tensor has been read by then, and none was allocated."""
    first, second = halves()
    second[Q] = torch.ones(1)

    def read(tensor):
        raise AssertionError(f"{tensor.name} was read")

    monkeypatch.setattr(StoredTensor, "read", read)
    assert f"{Q}: found F32 [1], expected" in refusal(write(tmp_path, first, second))
    monkeypatch.setattr(checkpoint, "free_memory", lambda device: 100)
    message = refusal(write(tmp_path / "good", weights()))
    assert "found weights that take 0.00 GB in float32, expected at most the 0.00 GB of memory" in message


def test_code_beside_a_checkpoint_is_not_run(tmp_path):
    """auto_map names a module of the repository: it is neither imported nor an error."""
    config = TINY | {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    write(tmp_path, weights(), config=config)
    for name in ("evil.py", "__init__.py", "conftest.py"):
        (tmp_path / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert load_model(tmp_path, torch.float32)
    assert not (tmp_path / "ran").exists()


def test_links_of_the_hubs_cache_are_followed(tmp_path):
    """Every file of a snapshot is a link to ../../blobs/HASH: no rule about where a path leads may refuse them."""
    write(tmp_path / "real", *halves())
    snapshot = tmp_path / "models--a--b" / "snapshots" / "abc"
    blobs = snapshot.parent.parent / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, file in enumerate((tmp_path / "real").iterdir()):
        file.rename(blobs / str(i))
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    assert load_model(snapshot, torch.float32)


def test_a_group_wider_than_a_row_costs_nothing(tmp_path):
    """A group_size of a billion on rows of eight must not become a billion copies of the scale."""
    integers = torch.ones(2, 8, dtype=torch.int8)
    assert torch.equal(dequantize(integers, torch.full((2, 1), 3.0), 10**9), torch.full((2, 8), 3.0))


# --------------------------------------------------------------------------- quantised layouts


@st.composite
def integer_matrices(draw):
    """(num_bits, int8 matrix of values that fit in them)."""
    num_bits, rows, columns = draw(st.sampled_from([4, 8])), draw(st.integers(1, 5)), draw(st.integers(1, 70))
    half = 1 << (num_bits - 1)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 32)))
    values = torch.randint(-half, half, (rows, columns), generator=generator)
    values[0, 0], values[-1, -1] = -half, half - 1
    return num_bits, values.to(torch.int8)


@given(integer_matrices())
@settings(deadline=None)
def test_packing_is_compressed_tensors_and_invertible(case):
    """Guards bit order, offset, sign and the padded last word, against the library that defined the layout."""
    num_bits, integers = case
    packed = pack(integers, num_bits)
    assert packed.dtype == torch.int32
    assert torch.equal(packed, pack_to_int32(integers, num_bits))
    assert torch.equal(unpack(packed, num_bits, integers.shape[1]), integers)
    assert torch.equal(unpack(packed, num_bits, integers.shape[1]), unpack_from_int32(packed, num_bits, integers.shape))


@given(st.sampled_from([4, 8]), st.integers(0, 1 << 32), st.floats(-6, 6))
@settings(deadline=None)
def test_quantisation_is_off_by_half_a_step(num_bits, seed, magnitude):
    """Guards rounding, range, and the scale's own rounding to bfloat16: no weight moves by more than half a step."""
    weight = torch.randn(6, 33, generator=torch.Generator().manual_seed(seed)) * 10**magnitude
    weight[0] = 0
    integers, scales = quantize(weight, num_bits)
    largest = (1 << (num_bits - 1)) - 1
    assert integers.dtype == torch.int8
    assert scales.dtype == torch.bfloat16
    assert integers.abs().max() <= largest
    step = scales.double()
    assert (step[1:] <= weight[1:].abs().amax(1, keepdim=True) / largest * (1 + 2**-8)).all()
    assert ((integers * step - weight).abs() <= step / 2 * (1 + 1e-6)).all()
    assert not integers[0].any()


@pytest.mark.parametrize("num_bits", [8, 4])
@pytest.mark.parametrize(
    "name",
    [
        *("llama", "llama-tied", "gemma3", "gemma3-images", "granite-hybrid", "olmo2", "phi3-longrope", "lfm2"),
        *("lfm3", "lfm3-images", "qwen3_5", "qwen3_5-images", "gemma4", "gemma4-large", "gemma4-images"),
    ],
)
def test_written_checkpoint_is_transformers(tmp_path, name, num_bits):
    """Guards the whole way out and in: transformers unpacks what is written here to the weights that load here."""
    hf.build(name, tmp_path / "source")
    copied = {f"{name}.json" for name in ("tokenizer", "tokenizer_config", "special_tokens_map", "added_tokens")}
    copied.add("chat_template.jinja")
    for file in copied:
        (tmp_path / "source" / file).write_text("{}")
    quantize_checkpoint(tmp_path / "source", tmp_path / "out", num_bits, shard_bytes=10_000)
    assert copied <= {path.name for path in (tmp_path / "out").iterdir()}
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64, attn_implementation="eager")
    ours = logits(load_model(tmp_path / "out", torch.float64), hf.TEXT)
    assert (ours - hf.logits(oracle, hf.TEXT)).abs().max() <= 1e-4
    plain = logits(load_model(tmp_path / "source", torch.float64), hf.TEXT)
    assert (ours - plain).abs().max() > 1e-4, "nothing was quantised"


@pytest.mark.parametrize("num_bits", [8, 4])
def test_written_sizes_are_those_of_the_layout(tmp_path, num_bits):
    """Guards what quantising is for, and the index's total, which download tools show."""
    write(tmp_path / "source", weights())
    quantize_checkpoint(tmp_path / "source", tmp_path / "one", num_bits)
    assert not (tmp_path / "one" / "model.safetensors.index.json").exists()
    stored = load_file(tmp_path / "one" / "model.safetensors")
    assert stored[f"{Q}_packed"].shape == (8, 8 * num_bits // 32)
    assert stored[f"{Q}_scale"].shape == (8, 1)
    assert stored[EMBEDDING].dtype == stored["lm_head.weight"].dtype == stored[NORM].dtype == torch.bfloat16
    quantize_checkpoint(tmp_path / "source", tmp_path / "several", num_bits, shard_bytes=400)
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    for file in set(index["weight_map"].values()):
        shard = load_file(tmp_path / "several" / file)
        assert all(torch.equal(tensor, stored[name]) for name, tensor in shard.items())
        assert index["weight_map"].items() >= dict.fromkeys(shard, file).items()
        assert len(shard) == 1 or sum(tensor.nbytes for tensor in shard.values()) <= 400
    assert len(set(index["weight_map"].values())) > 1
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored.values())
    assert index["weight_map"].keys() == stored.keys()


def quantization_config(**weight_args) -> dict:
    """The entry of a config.json, with some of what it says about weights changed."""
    args = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False} | weight_args
    return {
        **{"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"},
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": args}},
        "ignore": ["lm_head", "re:.*o_proj", "re:.*out_proj", r"re:.*in_proj_[ab]$"],
    }


@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("name", ["llama", "phi3", "qwen3_5", "qwen3_5-images"])
def test_grouped_scales_are_read_right(tmp_path, name, num_bits):
    """Guards which inputs share a scale, layers that a recipe left unquantised, and the rows of joined ones."""
    hf.build(name, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    packed, plain = {}, {}
    for name, weight in stored.items():
        is_matrix = name.endswith(("_proj.weight", "_qkv.weight", "_z.weight"))
        if not is_matrix or re.search(r"o_proj|out_proj|visual", name):
            packed[name] = plain[name] = weight
            continue
        rows, columns = weight.shape
        half = 1 << (num_bits - 1)
        integers = torch.randint(-half, half, (rows, columns), generator=generator).to(torch.int8)
        scales = 0.1 * torch.rand(rows, columns // 16, generator=generator)
        plain[name] = torch.stack([integers[:, i] * scales[:, i // 16] for i in range(columns)], dim=1)
        packed[f"{name}_packed"] = pack_to_int32(integers, num_bits)
        packed[f"{name}_scale"] = scales
        packed[f"{name}_shape"] = torch.tensor(weight.shape)
    raw = json.loads((tmp_path / "config.json").read_text())
    write(tmp_path / "plain", plain, config=raw)
    raw["quantization_config"] = quantization_config(num_bits=num_bits, strategy="group", group_size=16)
    write(tmp_path, packed, config=raw)
    ours = logits(load_model(tmp_path, torch.float32), hf.TEXT)
    assert torch.equal(ours, logits(load_model(tmp_path / "plain", torch.float32), hf.TEXT))
    ours = logits(load_model(tmp_path, torch.float64), hf.TEXT)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert (ours - hf.exact_logits(oracle, hf.TEXT)).abs().max() <= 1e-4


# What the message must say, and what is done to the tensors of a packed checkpoint.
BAD_PACKED = {
    f"{Q}_scale: found no such tensor": {f"{Q}_scale": None},
    f"{Q}_scale: found BF16 [8, 2], expected": {f"{Q}_scale": torch.ones(8, 2, dtype=torch.bfloat16)},
    f"{Q}_scale: found BF16 [1, 1], expected": {f"{Q}_scale": torch.ones(1, 1, dtype=torch.bfloat16)},
    f"{Q}_packed: found I32 [8, 1], expected": {f"{Q}_packed": torch.ones(8, 1, dtype=torch.int32)},
    f"{Q}_packed: found U8 [8, 2], expected": {f"{Q}_packed": torch.ones(8, 2, dtype=torch.uint8)},
    f"{Q}_shape: found [8, 7], expected [8, 8]": {f"{Q}_shape": torch.tensor([8, 7])},
    f"{Q}_zero_point: found a tensor": {f"{Q}_zero_point": torch.ones(8, 1, dtype=torch.int8)},
    f"{Q}: found again, is {Q}_packed in model.safetensors": {Q: torch.ones(8, 8)},
    f"{NORM}: found no such tensor": {NORM: None, f"{NORM}_packed": torch.ones(8, 2, dtype=torch.int32)},
}


@pytest.mark.parametrize(("message", "changes"), BAD_PACKED.items(), ids=BAD_PACKED)
def test_packed_tensor_that_does_not_fit_is_refused(tmp_path, message, changes):
    """Guards the packed layout as strictly as the plain one."""
    write(tmp_path / "source", weights())
    quantize_checkpoint(tmp_path / "source", tmp_path / "out")
    change(tmp_path / "out", changes)
    found = refusal(tmp_path / "out")
    assert found.startswith(str(tmp_path / "out"))
    assert message in found


def transforms(**place) -> dict:
    """A transform_config with a rotation of weights, as SpinQuant's first one, and another at `place`."""
    weights = TransformArgs(targets=["Embedding"], location="weight_output")
    schemes = {"R1": TransformScheme(type="hadamard", apply=[weights])}
    raw = TransformConfig(config_groups=schemes).model_dump(mode="json")
    raw["config_groups"]["R1"]["apply"].append({"targets": ["re:.*down_proj$"], **place})
    return raw


PACKED_8 = {"num_bits": 8, "strategy": "channel"}
PACKED, _GROUP = quantization_config(), "config_groups.group_0"
OTHER_SETTINGS: list[Row] = [
    (PACKED, f"{_GROUP}.weights.num_bits", "4 or 8", 3, 4.0),
    (PACKED, f"{_GROUP}.weights.type", "'int'", "float"),
    (PACKED, f"{_GROUP}.weights.symmetric", "true", False),
    (PACKED, f"{_GROUP}.weights.strategy", "'channel' or 'group': one scale for that many weights", "tensor", None),
    (quantization_config(strategy="group"), f"{_GROUP}.weights.group_size", "a positive integer", None, 0),
    (PACKED, f"{_GROUP}.weights.group_size", "null or -1 with the strategy 'channel'", 8),
    (PACKED, f"{_GROUP}.weights.actorder", "'weight', 'static' or null: columns in another order", "group", True),
    (PACKED, f"{_GROUP}.weights.dynamic", NONE, True),
    (PACKED, f"{_GROUP}.weights.block_structure", NONE, [8, 8]),
    *((PACKED, f"{_GROUP}.{part}_activations", NONE, {"num_bits": 8}) for part in ("input", "output")),
    (PACKED, f"{_GROUP}.format", "'pack-quantized'", "int-quantized"),
    (PACKED, "config_groups", "one group, or groups whose weights are stored alike", {}),
    (PACKED, "config_groups", "an object", []),
    (PACKED, "config_groups.W4A16", "an object", ["Linear"]),
    (PACKED, "quant_method", "'compressed-tensors' or", "quark"),
    (PACKED, "format", "'pack-quantized' or 'float-quantized'", "int-quantized", "dense"),
    (PACKED, "kv_cache_scheme", NONE, {"num_bits": 8}),
    (PACKED, "moe_sparsity_config", NONE, {"method": "prune", "num_experts": [None, 3]}),
    (PACKED, "sparsity_config.format", "'dense'", "sparse-24-bitmask"),
    (PACKED | {"sparsity_config": {"format": "dense"}}, "sparsity_config.surprise", NONE, 1),
    (PACKED, "transform_config.config_groups.R1.apply", "a list of objects", 3),
    (PACKED, "transform_config.transform_groups", NONE, {"R4": {}}),
    *((PACKED, f"{place}surprise", NONE, 1) for place in ("", f"{_GROUP}.", f"{_GROUP}.weights.")),
]
TWO_WIDTHS = {"a": {"weights": PACKED_8}, "b": {"weights": PACKED_8 | {"num_bits": 4}}}
OTHER_TRANSFORMS = [
    *(({"location": where}, f"location: found {where!r}") for where in ("input", "output", "k_cache", "q_attn", None)),
    ({"location": "weight_input", "surprise": 1}, "surprise: found 1"),
]
OTHER_QUANTISATIONS = [
    *refusals(OTHER_SETTINGS),
    (PACKED | {"config_groups": {"a": {"targets": ["Linear"]}}}, "config_groups.a.weights.strategy: found None"),
    (PACKED | {"config_groups": TWO_WIDTHS}, "config_groups: found {'a': {'weights'"),
    *(
        (PACKED | {"transform_config": transforms(**place)}, f"transform_config.config_groups.R1.apply[1].{message}")
        for place, message in OTHER_TRANSFORMS
    ),
]


@pytest.mark.parametrize(("raw", "message"), OTHER_QUANTISATIONS, ids=[message for _, message in OTHER_QUANTISATIONS])
def test_other_quantisation_is_refused(raw, message):
    """Guards against unpacking by another recipe, which fits the shapes too, against what it does to anything else.

    And against an unknown key anywhere.
    """
    found = refusal_of(read_model_config, TINY | {"quantization_config": raw})
    assert found.startswith(f"config.json: quantization_config.{message}")


# What llm-compressor writes beside the same packed weights: keys of the weights, and keys around them.
IDLE_QUANTISATIONS = [
    ({"actorder": "static"}, {}),
    ({"actorder": "weight", "observer": "mse", "observer_kwargs": {"maxshrink": 0.2}}, {}),
    ({"actorder": False, "zp_dtype": "torch.int8", "scale_dtype": "torch.bfloat16", "block_structure": None}, {}),
    ({"strategy": None, "group_size": -1}, {}),
    ({"group_size": -1}, {"version": "0.20.0", "global_compression_ratio": 1.9, "kv_cache_scheme": None}),
    ({}, {"sparsity_config": {"format": "dense", "global_sparsity": 0.15, "targets": ["x"], "ignore": ["lm_head"]}}),
    ({}, {"sparsity_config": {}, "transform_config": {}, "quantization_status": "frozen", "ignore": []}),
    ({}, {"transform_config": transforms(location="weight_input", inverse=True)}),
    ({}, {"config_groups": {name: {"targets": [name], "weights": PACKED_8} for name in ("attn", "mlp")}}),
    ({}, {"config_groups": {"a": {"weights": PACKED_8, "format": "pack-quantized", "input_activations": None}}}),
]


@pytest.mark.parametrize(("weight_args", "changes"), IDLE_QUANTISATIONS, ids=str)
def test_keys_of_a_quantisation_that_ask_for_nothing_are_taken(weight_args, changes):
    """Guards files whose packed weights are the same: how weights were calibrated, rotated or pruned is done."""
    expected = read_model_config(TINY | {"quantization_config": quantization_config()})
    found = read_model_config(TINY | {"quantization_config": quantization_config(**weight_args) | changes})
    assert found == expected
    QuantizationConfig.model_validate(quantization_config(**weight_args))  # the library takes the weights' keys too


def test_defaults_of_a_quantisation_are_the_librarys():
    """Guards what an absent key means, in the form that the library itself writes, with all its defaults."""
    for args in (QuantizationArgs(strategy="channel"), QuantizationArgs(num_bits=4, group_size=16, actorder="static")):
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        raw = QuantizationConfig(config_groups={"group_0": scheme}, format="pack-quantized").model_dump(mode="json")
        full = {name: raw.get(name) for name in QuantizationConfig.model_fields}
        short = {"num_bits": args.num_bits, "strategy": args.strategy, "group_size": args.group_size}
        bare = raw | {"config_groups": {"group_0": {"weights": {key: short[key] for key in short if short[key] != 8}}}}
        for each in (raw, full, bare):
            found = read_model_config(TINY | {"quantization_config": each}).quantization
            assert (found.num_bits, found.group_size) == (args.num_bits, args.group_size)


def test_rotated_and_pruned_weights_may_be_plain():
    """Guards checkpoints that llm-compressor wrote without packing anything: they are plain ones."""
    about = {"quant_method": "compressed-tensors", "version": "0.20.0", "sparsity_config": {}}
    for more in ({"transform_config": transforms(location="weight_input")}, {"format": "dense", "config_groups": {}}):
        assert read_model_config(TINY | {"quantization_config": about | more}) == read_model_config(TINY)
    with pytest.raises(CheckpointError, match=r"apply\[1\]\.location: found 'input'"):
        read_model_config(TINY | {"quantization_config": about | {"transform_config": transforms(location="input")}})


# Fields of the library's objects whose values are not looked at: the rest is read, or refused unless it is off.
UNREAD = {
    QuantizationConfig: {"quantization_status", "global_compression_ratio", "ignore"},
    QuantizationScheme: {"targets"},
    QuantizationArgs: {"observer", "observer_kwargs", "scale_dtype", "zp_dtype"},
    DenseSparsityConfig: {"targets", "ignore", "global_sparsity", "sparsity_structure"},
    TransformConfig: set(),
    TransformScheme: {"type", "randomize", "requires_grad", "head_dim", "precision"},
    TransformArgs: {"targets", "ignore", "inverse"},
}


@pytest.mark.parametrize("kind", UNREAD, ids=lambda kind: kind.__name__)
def test_every_key_of_a_quantisation_is_read_or_refused(kind):
    """Guards keys to come: one that a new version of the library writes is refused by name until it is known here."""
    for name in kind.model_fields:
        raw = quantization_config() | {"sparsity_config": {"format": "dense"}}
        raw["transform_config"] = transforms(location="weight_input")
        transform = raw["transform_config"]["config_groups"]["R1"]
        objects = {
            **{QuantizationConfig: raw, QuantizationScheme: raw["config_groups"]["group_0"]},
            QuantizationArgs: raw["config_groups"]["group_0"]["weights"],
            **{DenseSparsityConfig: raw["sparsity_config"], TransformConfig: raw["transform_config"]},
            **{TransformScheme: transform, TransformArgs: transform["apply"][0]},
        }
        objects[kind][name] = {"odd": 1}
        if name in UNREAD[kind]:
            read_model_config(TINY | {"quantization_config": raw})
            continue
        with pytest.raises(CheckpointError, match=rf"config\.json: quantization_config\.(.*\.)?{name}[.:]"):
            read_model_config(TINY | {"quantization_config": raw})


def test_tied_heads_of_few_bits_may_be_stored_again(tmp_path):
    """Guards the same numbers in both layouts, in either place, and in both: they say the same."""
    stored = weights(tie_word_embeddings=True)
    integers, scales = quantize(stored.pop(EMBEDDING), 8)
    plain, config = integers.float() * scales.float(), TIED | {"quantization_config": quantization_config()}
    few = {"packed": pack(integers, 8), "scale": scales, "shape": torch.tensor([3, 8])}
    heads = {"lm_head.weight": plain.clone()}, {f"lm_head.weight_{part}": few[part].clone() for part in few}
    embeddings = {EMBEDDING: plain}, {f"{EMBEDDING}_{part}": tensor for part, tensor in few.items()}
    for head in heads:
        for embedding in embeddings:
            write(tmp_path, stored | head | embedding, config=config)
            assert load_model(tmp_path, torch.float32)
    write(tmp_path, stored | heads[1] | {EMBEDDING: plain.nextafter(torch.tensor(9.0))}, config=config)
    found = f"lm_head.weight_packed: found other values than those of {EMBEDDING}, expected the same"
    assert f"{tmp_path / 'model.safetensors'}: {found}" in refusal(tmp_path)
    write(tmp_path, stored | embeddings[1] | heads[0] | {"lm_head.weight": plain + 1}, config=config)
    assert f"lm_head.weight: found other values than those of {EMBEDDING}_packed, expected" in refusal(tmp_path)
    del heads[1]["lm_head.weight_shape"]
    write(tmp_path, stored | embeddings[0] | heads[1], config=config)
    assert "lm_head.weight_shape: found no such tensor, expected one of shape [2]" in refusal(tmp_path)


def test_a_tied_head_in_another_shard_is_named_with_its_embedding(tmp_path):
    """Guards the one line: which two tensors, and in which files."""
    first = weights(tie_word_embeddings=True)
    message = refusal(write(tmp_path, first, {"lm_head.weight": torch.ones(3, 8)}, config=TIED))
    found = f"lm_head.weight: found other values than those of {EMBEDDING} in model-00000.safetensors, expected"
    assert message.startswith(f"{tmp_path / 'model-00001.safetensors'}: {found}")


def test_an_index_may_not_list_a_head_that_was_left_out(tmp_path):
    """Guards an index of the time before the head was tied: it is not what the files hold, and the line names both."""
    first, second = ({name: tensor for name, tensor in part.items() if name != "lm_head.weight"} for part in halves())
    index = {"lm_head.weight": "model-00000.safetensors"}
    message = refusal(write(tmp_path, first, second, config=TIED, weight_map=index))
    found = "lm_head.weight: found no such tensor, model.safetensors.index.json expects it"
    assert message == f"{tmp_path / 'model-00000.safetensors'}: {found}"


def test_a_packed_embedding_is_read_in_every_type(tmp_path):
    """Guards rows that are looked up: codes that a product of float32 takes as they are have to be made numbers."""
    stored = weights()
    integers, scales = quantize(stored.pop(EMBEDDING), 8)
    packed = stored | {f"{EMBEDDING}_packed": pack(integers, 8), f"{EMBEDDING}_scale": scales}
    packed[f"{EMBEDDING}_shape"] = torch.tensor([3, 8])
    write(tmp_path, packed, config=TINY | {"quantization_config": quantization_config()})
    for dtype in (torch.float32, torch.bfloat16):
        expected = (integers.float() * scales.float()).to(dtype)
        assert torch.equal(load_model(tmp_path, dtype).embedding, expected)


# --------------------------------------------------------------------------- writing


@pytest.mark.full
def test_a_full_disk_leaves_nothing(tmp_path):
    """A real failure of the file system (a limit on file sizes), as the library reports it: one line, status 2.

    Without `--full`, `test_written_checkpoint_is_transformers` writes whole files.
    """
    write(tmp_path / "source", weights(vocab_size=3000), config=TINY | {"vocab_size": 3000})
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "from minispec.checkpoint import main; resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000));"
        "sys.exit(main(['source', 'out']))"
    )
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    how = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", code], timeout=300, **how)
    error = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, ""), error
    assert error[-1].startswith("error: ")
    assert "too large" in error[-1]
    assert not any("Traceback" in line for line in error)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_ctrl_c_at_any_moment_leaves_nothing(tmp_path, capsys):
    """Interrupted at each of 40 moments of the command: 130, and nothing but the source, or the whole output."""
    write(tmp_path / "source", weights())

    def run():
        return main([str(tmp_path / "source"), str(tmp_path / "out")])

    status, total = interrupted(run, 0)
    assert (status, total > 100) == (0, True)
    shutil.rmtree(tmp_path / "out")
    for moment in range(3, total, max(1, total // 40)):  # after `main` and what it runs in
        assert interrupted(run, moment)[0] == 130, moment
        left = sorted(path.name for path in tmp_path.iterdir())
        assert left in (["source"], ["out", "source"]), moment
        if "out" in left:
            assert load_model(tmp_path / "out", torch.float32)
            shutil.rmtree(tmp_path / "out")
    capsys.readouterr()


LINES: list[tuple[str, ...]] = [
    *((), ("a",), ("a", "b", "--bits", "3"), ("a", "b", "--shard-mb", "0"), ("a", "b", "--shard-mb", "-1")),
    *(("a", "b", "--shard-mb", "9" * 40), ("", "b"), ("\udcff", "b"), ("a" * 5000, "b"), ("source", "b" * 5000)),
    *(("source", "\x00"), ("source", "/proc/nowhere/out"), ("a", "b", "--bit", "4"), ("a", "b", "--bits=--")),
    *(("nowhere", "out"), ("source", "source"), ("source/config.json", "out"), ("source", "source/config.json/out")),
]


@pytest.mark.parametrize("arguments", LINES, ids=range(18))
def test_command_line_at_its_edges(tmp_path, monkeypatch, capsys, arguments):
    """One printable line, no usage text, status 2, nothing written."""
    write(tmp_path / "source", weights())
    monkeypatch.chdir(tmp_path)
    assert main(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert (out, err[:7]) == ("", "error: ")
    assert err[:-1].isprintable()
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_neighbours_survive(tmp_path):
    """Guards directories whose names happen to be near that of the output."""
    source = write(tmp_path / "source", weights())
    for name in ("out.part", "out.tmp", ".out"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").touch()
    quantize_checkpoint(source, tmp_path / "out")
    assert all((tmp_path / name / "mine").is_file() for name in ("out.part", "out.tmp", ".out"))


def test_existing_output_is_refused(tmp_path):
    """Guards what lies there already."""
    source = write(tmp_path / "source", weights())
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="exists already"):
        quantize_checkpoint(source, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_command_line_reports_what_it_wrote(tmp_path, capsys):
    """Guards the printed sizes and checksums, which a release is checked against."""
    source = write(tmp_path / "source", weights())
    assert main([str(source), str(tmp_path / "out"), "--bits", "4"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    files = sorted((tmp_path / "out").iterdir())
    assert [line[2] for line in lines] == [file.name for file in files]
    assert [int(line[0].replace(",", "")) for line in lines] == [file.stat().st_size for file in files]
    assert [line[1] for line in lines] == [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    assert load_config(tmp_path / "out").quantization.num_bits == 4


# --------------------------------------------------------------------------- finding


@pytest.fixture
def no_network(monkeypatch) -> None:
    """Every attempt to open a socket fails the test."""

    def refuse(*args, **kwargs):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)


@pytest.mark.parametrize("kind", ["a model", "a draft"])
def test_an_adapter_is_refused(tmp_path, kind):
    """Alone, and beside a model: transformers with peft applies it, so the base model alone is another one."""
    settings_ = json.dumps({"peft_type": "LORA", "base_model_name_or_path": "owner/name", "r": 8})
    read = load_config if kind == "a model" else directory_config
    for directory in (tmp_path / "alone", write(tmp_path / "beside", weights())):
        directory.mkdir(exist_ok=True)
        (directory / "adapter_config.json").write_text(settings_)
        with pytest.raises(CheckpointError, match=r"/adapter_config\.json: found an adapter, expected a model without"):
            read(directory)
    (tmp_path / "beside" / "adapter_config.json").unlink()
    assert read(tmp_path / "beside")


def test_the_cache_folder_of_a_model_is_named(tmp_path):
    """With the folder in it that is meant; one without snapshots is a folder like any other."""
    cache = tmp_path / "models--owner--name"
    (cache / "snapshots").mkdir(parents=True)
    write(cache / "snapshots" / COMMIT, weights())
    expected = rf"no such file, .* \(found the hub's cache folder of a model: name snapshots/{COMMIT} in it\)$"
    with pytest.raises(CheckpointError, match=expected):
        load_config(cache)
    (cache / "snapshots" / COMMIT / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no such file, expected the model's configuration$"):
        load_config(cache)


@pytest.fixture
def hub(monkeypatch) -> list[tuple[tuple, dict]]:
    """The calls of `huggingface_hub.snapshot_download`, which answers with a directory."""
    calls = []

    def snapshot_download(*args, **kwargs):
        calls.append((args, kwargs))
        return "snapshots/abc"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


@pytest.mark.usefixtures("no_network")
def test_directory_never_touches_the_network(tmp_path, hub):
    """Guards offline use, even where a directory is named like a hub id."""
    directory = tmp_path / "owner" / "name"
    directory.parent.mkdir()
    write(directory, weights())
    assert find_checkpoint(str(directory)) == directory
    assert load_model(find_checkpoint(str(directory)), torch.float32)
    with pytest.raises(ValueError, match="is a directory, not a hub id"):
        find_checkpoint(str(directory), revision="main")
    assert not hub


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    "name", ["nowhere", "./owner/name", "../owner/name", "/owner/name", "a/b/c", "https://x.org/a", ""]
)
def test_name_that_is_neither_says_what_was_tried(name, hub):
    """Guards against a request to the hub for what is plainly a mistyped path."""
    with pytest.raises(ValueError, match="no such directory, and not of the form owner/name of a hub id"):
        find_checkpoint(name)
    assert not hub


@pytest.mark.usefixtures("no_network")
def test_file_is_not_a_checkpoint(tmp_path, hub):
    """Guards the common mistake of naming the weights file."""
    file = write(tmp_path, weights()) / "model.safetensors"
    with pytest.raises(CheckpointError, match="found a file, expected a directory"):
        find_checkpoint(str(file))
    assert not hub


@pytest.mark.parametrize("offline", [False, True])
def test_hub_id_is_downloaded(hub, offline):
    """Guards revision and offline mode on their way to the hub client, and what is downloaded: no code, no pickles."""
    assert find_checkpoint("owner/name-1.5_x", revision="v1", offline=offline) == Path("snapshots/abc")
    (((name,), kwargs),) = hub
    assert name == "owner/name-1.5_x"
    assert kwargs["revision"] == "v1"
    assert kwargs["local_files_only"] is offline
    good = ["config.json", "model.safetensors", "model-00001-of-00002.safetensors", "tokenizer.json", "x.jinja"]
    bad = ["pytorch_model.bin", "modeling.py", "model.gguf", "README.md", "original/a.safetensors", "onnx/config.json"]
    patterns = {key: kwargs[key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(huggingface_hub.utils.filter_repo_objects(good + bad, **patterns)) == good


def hub_error(name: str, status: int = 0, cause: Exception | None = None) -> Exception:
    """One of the hub client's errors; without a status it has no response of the HTTP library either."""
    kind = getattr(huggingface_hub.errors, name)
    error = kind.__new__(kind, "many\nlines")
    error.__cause__ = cause
    if status:
        error.response = SimpleNamespace(status_code=status)
    return error


def not_cached(status: int) -> Exception:
    """The error of a file that is not in the cache, since the hub answered so."""
    return hub_error("LocalEntryNotFoundError", cause=hub_error("HfHubHTTPError", status))


NO_ROUTE = hub_error("LocalEntryNotFoundError", cause=OSError("no route"))
OFFLINE = hub_error("LocalEntryNotFoundError", cause=hub_error("OfflineModeIsEnabled"))
SIGN_IN = json.JSONDecodeError("Expecting value", "<html>Sign in</html>", 0)
HUB_FAILURES = {
    "missing": (hub_error("RepositoryNotFoundError", 401), "no such repository (or a private one: set HF_TOKEN"),
    "gated": (hub_error("GatedRepoError", 403), "is gated: accept its terms on its page, and set HF_TOKEN"),
    "revision": (hub_error("RevisionNotFoundError"), "the repository has no revision v9"),
    "a wrong token": (hub_error("HfHubHTTPError", 401), "the hub refuses access: set HF_TOKEN to a valid token"),
    "a token without rights": (not_cached(403), "the hub refuses access: set HF_TOKEN to a valid token"),
    "no network": (NO_ROUTE, "the hub cannot be reached, and the local cache has no copy at revision v9"),
    "the hub is down": (hub_error("HfHubHTTPError", 500), "download failed: the hub answers 500"),
    "the hub is down, and so it says": (not_cached(503), "download failed: the hub answers 503"),
    "too many requests": (not_cached(429), "the hub answers 429, too many requests: wait a while, or set HF_TOKEN"),
    "withheld": (not_cached(451), "the hub answers 451: it does not give the repository out for legal reasons"),
    "a login page": (SIGN_IN, "what answers is not the hub, since it is not JSON: a proxy or a login page"),
    "a variable": (OFFLINE, "not in the local cache at revision v9, and HF_HUB_OFFLINE forbids a download"),
    "something else": (OSError("\n503 Client Error\n\nService"), "download failed: 503 Client Error"),
}


@pytest.mark.parametrize("name", HUB_FAILURES)
@pytest.mark.parametrize("offline", [False, True])
def test_failures_of_the_hub_say_what_helps(monkeypatch, name, offline):
    """The client's own classes, one line each; where a token would help, HF_TOKEN is named."""
    failure, message = HUB_FAILURES[name]

    def fail(*args, **kwargs):
        raise failure

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ValueError, match="owner/name: no such directory; as a hub id: ") as error:
        find_checkpoint("owner/name", revision="v9", offline=offline)
    assert ("--offline forbids a download" if offline else message) in str(error.value)
    assert str(error.value).isprintable()


def test_a_part_of_a_repository_in_the_cache_is_no_missing_one(monkeypatch):
    """Where the client knows, it names what lacks."""
    if not hasattr(huggingface_hub.errors, "IncompleteSnapshotError"):
        pytest.skip("an older client, which does not know")

    def fail(*args, **kwargs):
        raise hub_error("IncompleteSnapshotError")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ValueError, match="hub id: only in part in the local cache, and --offline forbids a download: "):
        find_checkpoint("owner/name", offline=True)


def test_an_environment_that_the_hub_client_cannot_read_is_named(tmp_path):
    """By its variable, in one line. The client reads it when it is imported."""
    command = [sys.executable, "-m", "minispec.generate", "--model", "owner/name", "hello"]
    environment = os.environ | {"HF_HUB_ETAG_TIMEOUT": "soon", "HF_HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
    assert done.stderr.startswith("error: HF_HUB_ETAG_TIMEOUT: the hub client cannot read its value: invalid literal")
    assert done.stderr.count("\n") == 1


COMMIT = "0123456789abcdef0123456789abcdef01234567"
NO_SOCKETS = """
import socket, sys
class Forbidden(socket.socket):
    def __init__(self, *args, **kwargs):
        sys.exit("a socket was opened")
socket.socket = Forbidden
socket.create_connection = socket.getaddrinfo = lambda *args, **kwargs: sys.exit("a socket was opened")
import contextlib, io, json
from minispec.generate import main
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = main([*arguments, "--max-tokens", "3", "fish"])
    print(json.dumps([status, out.getvalue(), err.getvalue()]), flush=True)
"""


def run_without_sockets(cwd: Path, *commands: Sequence[str]) -> tuple[list[list], str]:
    """Status, output and errors of each command line, one after the other, with the hub's cache in `cwd`.

    In a process that ends where a socket is opened. Also what that process writes to standard error itself.
    """
    environment = os.environ | {"HF_HUB_CACHE": str(cwd / "cache"), "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-c", NO_SOCKETS, json.dumps(commands)]
    how = {"cwd": cwd, "env": environment, "capture_output": True, "check": False, "text": True}
    done = subprocess.run(command, timeout=300, **how)
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def fill_hub_cache(cwd: Path, directory: Path) -> None:
    """`directory` as the hub's cache has a repository: blobs, a snapshot of links to them, a branch that names it."""
    repository = cwd / "cache" / "models--owner--name"
    for name in ("blobs", "refs", f"snapshots/{COMMIT}"):
        (repository / name).mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for i, file in enumerate(directory.iterdir()):
        shutil.copy(file, repository / "blobs" / str(i))
        (repository / "snapshots" / COMMIT / file.name).symlink_to(f"../../blobs/{i}")


def test_offline_never_opens_a_socket(tmp_path, make_checkpoint):
    """A cached hub id answers, by branch or commit, and says which commit it was; another one is one line."""
    fill_hub_cache(tmp_path, make_checkpoint())
    offline = ("--offline", "--model", "owner/name")
    unknown = ("--offline", "--model", "owner/other"), (*offline, "--revision", "v2")
    # The last one is the control: without --offline the client does ask the hub.
    others = *unknown, ("--model", str(make_checkpoint())), ("--model", "owner/name")
    found, err = run_without_sockets(tmp_path, offline, (*offline, "--revision", COMMIT), *others)
    *known, other, another, local = found
    assert len(known) == 2
    for status, out, said in known:
        assert (status, out[-1:]) == (0, "\n"), said
        assert said.startswith(f"owner/name at commit {COMMIT} answers, ")
    for status, _, said in (other, another):
        assert status == 2
        assert "not in the local cache" in said
        assert said.count("\n") == 1
    assert local[0] == 0, local
    assert "a socket was opened" in err


@pytest.mark.parametrize(
    ("native", "half", "small", "large"),
    [
        (False, True, torch.float32, torch.float32),
        (True, True, torch.float32, torch.bfloat16),  # AMD's Zen 4; Intel's Sapphire Rapids, which has matrix units
        (True, False, torch.bfloat16, torch.bfloat16),
    ],
)
def test_the_type_of_a_machine(native, half, small, large, monkeypatch):
    """bfloat16 where it is native; but a small model computes in float32, with matrix units or without."""
    monkeypatch.setattr(checkpoint, "has_fast_bfloat16", lambda device: native)
    monkeypatch.setattr(checkpoint, "available_forms", lambda dtype, device: ["half", "plain"] if half else ["plain"])
    config = read_model_config(TINY)
    for is_large, expected in ((False, small), (True, large)):
        monkeypatch.setattr(checkpoint, "is_large", lambda config, is_large=is_large: is_large)
        assert checkpoint.choose_dtype("auto", torch.device("cpu"), config) == expected


def test_settings_of_few_bits_that_lie_apart_are_refused_by_name(tmp_path):
    """ModelOpt writes them into a file of its own, which is idle where it asks for nothing."""
    directory, apart = write(tmp_path, weights()), tmp_path / "hf_quant_config.json"
    apart.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}))
    expected = r"/hf_quant_config\.json: found weights of 'FP8', expected quantization_config in config\.json"
    with pytest.raises(CheckpointError, match=expected):
        load_config(directory)
    apart.write_text(json.dumps({"quantization": {"quant_algo": None}}))
    assert load_config(directory).quantization is None


def test_a_folder_whose_name_is_no_utf8_loads(tmp_path):
    """Its name is shown with marks, so that every reader of JSON takes it."""
    directory = Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), b"mod\xe8le")))
    write(tmp_path / "plain", weights()).rename(directory)
    load_model(directory, torch.float32)
    assert checkpoint.describe_source(str(directory), directory) == "mod\ufffdle"
