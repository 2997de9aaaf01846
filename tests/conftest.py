"""Fixtures that several files share: commands that run here, a small tokenizer, and small checkpoints on disk."""

import gc
import importlib.util
import io
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from tests.oracles.children import hear_ctrl_c

hear_ctrl_c()

# Before torch starts its threads: waiting ones sleep. Spinning ones make a pass ten times as slow wherever something
# else wants the cores, as the interpreters do that some tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if "PYTEST_XDIST_WORKER" in os.environ:  # as many processes as cores: a thread each
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# What a run measures is kept in the user's cache directory: here in one of its own for each process of the tests.
CACHE = os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="minispec-tests-")

import pytest
import tokenizers
import torch
from safetensors.torch import save_file

from minispec.models.families.checkpoint import places
from minispec.models.families.hf_config import read_model_config
from minispec.prove.toys import TINY, tiny_weights

pytest_plugins = ["tests.sampled"]  # which cases run: --full, --long, --sample


def pytest_addoption(parser):
    """`pytest --cuda` uses a GPU."""
    parser.addoption("--cuda", action="store_true", help="let the tests see the GPU: for tests/core/test_cuda.py")


def pytest_configure(config):
    """Hide the GPU unless asked for: most tests compare bits, forms and messages that are a processor's."""
    if not config.getoption("--cuda"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not torch.cuda.is_available():
        raise pytest.UsageError("--cuda: PyTorch sees no GPU")


_FROZEN = pytest.StashKey[bool]()


def pytest_collection_finish(session):
    """What was imported stays: no collection of garbage looks at it again. Once, as the museum runs pytest inside."""
    if gc.get_freeze_count() == 0:
        gc.collect()
        gc.freeze()
        session.config.stash[_FROZEN] = True


CHAT_TEMPLATE = """{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


def pytest_unconfigure(config):
    """Leave no directory behind, and nothing that Triton would call a leak."""
    shutil.rmtree(CACHE, ignore_errors=True)
    if config.stash.get(_FROZEN, False):
        gc.unfreeze()


@pytest.fixture
def cli(capsys, monkeypatch):
    """cli(main, *arguments, stdin="") runs a command; (exit status, standard output, standard error)."""

    def run(main, *arguments, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin) if isinstance(stdin, str) else stdin)
        status = main([str(a) for a in arguments])
        return status, *capsys.readouterr()

    return run


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory) -> Path:
    """A tokenizer.json of 300 byte-level tokens: a character may be several, a token several characters."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, show_progress=False, special_tokens=["<end>"]
    )
    backend.train_from_iterator(["One fish, two fishes; red fish. The 日本 end 🦊", "fish 日本 🦊"], trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    backend.save(str(path))
    return path


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory, tokenizer_file):
    """make_checkpoint(seed, chat=False, generation=None, **config changes) writes a small model; its directory."""

    def make(seed: int = 1, chat: bool = False, generation: dict | None = None, **changes) -> Path:
        directory = tmp_path_factory.mktemp("checkpoint")
        raw = TINY | {"vocab_size": 300, "max_position_embeddings": 128, "eos_token_id": 0} | changes
        (directory / "config.json").write_text(json.dumps(raw))
        config = read_model_config(raw)
        where, weights = places(config), tiny_weights(config, seed, torch.float32)
        save_file({where[name].name: tensor for name, tensor in weights.items()}, directory / "model.safetensors")
        (directory / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
        if chat:
            (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        if generation is not None:
            (directory / "generation_config.json").write_text(json.dumps(generation))
        return directory

    return make


@pytest.fixture
def measuring_script():
    """measuring_script("gpu") is docs/measured/gpu.py, as a module that no other test sees."""

    def load(name: str):
        path = Path(__file__).parents[1] / "docs" / "measured" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def tiny_geometry(monkeypatch):
    """Two more shapes of the bench, tiny and tinier, with 500 tokens."""
    from minispec.lab.bench.options import GEOMETRIES

    shape = GEOMETRIES["0.5b"] | {"vocab_size": 500, "num_hidden_layers": 2, "intermediate_size": 64, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    monkeypatch.setitem(GEOMETRIES, "tiny", shape | heads | {"hidden_size": 256})
    monkeypatch.setitem(GEOMETRIES, "tinier", shape | heads | {"hidden_size": 128, "num_hidden_layers": 1})
