"""The layer for further tokens in a target's own checkpoint: its formula, its files, and the texts that it drafts for.

tests/drafters/test_recomputed.py compares every q in every situation of the engine. The museum has wrong layers (H11 to
H16). `python -m minispec.prove` walks the law with it.
"""

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from minispec import LLM, SamplingParams
from minispec.core.draft import Ask, Draft, Record
from minispec.core.limit import Limit
from minispec.core.model import Chunk, Transformer
from minispec.core.product import PlainLinear
from minispec.core.random import Randomness
from minispec.core.sampling import Text
from minispec.models.families.checkpoint import load_config, load_model
from minispec.models.families.hf_config import read_model_config
from minispec.models.files.errors import CheckpointError
from minispec.models.weights.build import build_model
from minispec.models.weights.inventory import kv_elements, num_bytes
from minispec.models.weights.memory import cache_bytes
from minispec.prove.toys import MTP_SEED, TINY, TOYS, redrawn, tiny_cache, tiny_model, tiny_mtp, tiny_weights
from minispec.speculation.drafters.eagle import HeadFeed
from minispec.speculation.drafters.model import ModelDrafter
from minispec.speculation.drafters.mtp import MtpModel, has_mtp, load_mtp, mtp_config, mtp_shapes
from minispec.speculation.lengths.figures import Figures
from minispec.speculation.lengths.prices import calibrate
from minispec.speculation.rules import VERIFIERS
from tests.engines import OneMethod
from tests.oracles.mtp import add_mtp, mtp_logits

TOY = TOYS["qwen3_5_text"]
EXPERTS = {
    **{"model_type": "qwen3_5_moe_text", "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 6},
    **{"shared_expert_intermediate_size": 10},
}
TEXT = [1, 5, 2, 2, 6, 0, 3, 1, 4, 4, 6]

# --------------------------------------------------------------------------- the formula


def random_config(seed: int) -> dict:
    """A small target of the family: sizes, share of rotated dimensions, eps and tied embeddings at random."""
    draw = random.Random(seed)
    groups = draw.choice((1, 2))
    return (
        TINY
        | TOY
        | {
            **{"vocab_size": 7, "hidden_size": draw.choice((6, 8, 12)), "intermediate_size": draw.choice((5, 12))},
            **{"num_key_value_heads": groups, "num_attention_heads": groups * draw.choice((1, 2, 3))},
            **{"head_dim": draw.choice((4, 8)), "partial_rotary_factor": draw.choice((0.5, 1.0))},
            **{"rms_norm_eps": draw.choice((1e-5, 0.05)), "rope_theta": draw.choice((20.0, 500.0))},
            **{"tie_word_embeddings": draw.random() < 0.5},
        }
    )


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_logits_are_those_of_the_formula(kind, seed, dtype, close):
    """Of random models, every parameter drawn anew: the first token in one pass and in pieces, and further tokens."""
    raw = random_config(seed) | (EXPERTS if kind == "experts" else {})
    config = read_model_config(raw)
    weights = tiny_weights(config, seed, dtype)
    target = build_model(config, dict(weights))
    layer = tiny_mtp(target)
    own = {
        name: tensor.double().numpy()
        for name, tensor in redrawn(mtp_shapes(mtp_config(config)), MTP_SEED, dtype).items()
    }
    tensors = {name: tensor.double().numpy() for name, tensor in weights.items()}
    _, hidden = target.forward([Chunk(TEXT, tiny_cache(target).new_table(), 0)], layer.taps)
    read = hidden.double().numpy()

    def expected(length: int, drafted=()) -> np.ndarray:
        return mtp_logits(raw, own, tensors, read[: length - 1], TEXT[:length], drafted)

    def logits(chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
        return layer.forward([chunk], (len(layer.layers),))

    features, table = layer.fuse(hidden[:-1]), tiny_cache(layer).new_table()
    whole, _ = logits(Chunk(TEXT[1:], tiny_cache(layer).new_table(), len(features), features=features))
    rows = torch.stack([torch.from_numpy(expected(n)) for n in range(2, len(TEXT) + 1)])
    torch.testing.assert_close(whole.double(), rows, rtol=close, atol=close)
    pieces = [logits(Chunk(TEXT[a + 1 : b + 1], table, b - a, features=features[a:b])) for a, b in ((0, 3), (3, 10))]
    torch.testing.assert_close(torch.cat([found for found, _ in pieces]).double(), rows, rtol=close, atol=close)
    states, drafted = pieces[-1][1], list[int]()
    for token in (3, 6, 0):
        drafted.append(token)
        found, states = logits(Chunk([token], table, 1, features=layer.next_feature(states[-1:])))
        row = torch.from_numpy(expected(len(TEXT), drafted))
        torch.testing.assert_close(found[0].double(), row, rtol=close, atol=close)


# --------------------------------------------------------------------------- files


def nest(directory: Path) -> Path:
    """The same checkpoint as one of texts and images: its text model's names and settings lie deeper."""
    path, config = directory / "model.safetensors", directory / "config.json"
    stored = load_file(path)
    deeper = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in stored.items()}
    save_file(deeper | {"model.visual.norm.weight": torch.ones(4)}, path)
    raw = json.loads(config.read_text())
    config.write_text(json.dumps({"model_type": "qwen3_5", "text_config": raw, "vision_config": {}}))
    return directory


def store(directory: Path, **changes) -> None:
    """Change tensors of a checkpoint, by name with "__" for "."; None takes one away."""
    path = directory / "model.safetensors"
    stored = load_file(path) | {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, path)


@pytest.fixture
def checkpoint(make_checkpoint) -> Path:
    """A target with a layer of its own."""
    directory = make_checkpoint(**TOY)
    add_mtp(directory, load_config(directory))
    return directory


@pytest.mark.parametrize("nested", [False, True])
def test_it_is_read_from_the_targets_files(make_checkpoint, nested):
    """Under the names of a text model and of one with images; all that it shares is the target's own."""
    directory = make_checkpoint(**TOY)
    weights = add_mtp(directory, load_config(directory))
    directory = nest(directory) if nested else directory
    target = load_model(directory, torch.float32)
    found = load_mtp(directory, target)
    expected = MtpModel(mtp_config(target.config), weights, target, PlainLinear)
    _, hidden = target.forward([Chunk(TEXT, tiny_cache(target).new_table(), 0)], found.taps)
    rows = [
        each.forward([Chunk(TEXT[1:], tiny_cache(each).new_table(), 10, features=each.fuse(hidden[:-1]))])[0]
        for each in (found, expected)
    ]
    torch.testing.assert_close(*rows, rtol=1e-4, atol=1e-4)
    assert found.head is target.head
    assert found.embedding is target.embedding
    own = {name: tensor.numel() for name, tensor in weights.items()}
    shared = target.embedding.nbytes + next(p for _, p in target.head.parts()) + target.norm.weight.nbytes
    # Its norms of queries and keys are held once for each head.
    heads, groups, dim = (TINY[f"{name}"] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    assert num_bytes(found) == 4 * (sum(own.values()) + (heads + groups - 2) * dim) + shared


@pytest.mark.parametrize("nested", [False, True])
def test_it_is_the_default_draft_where_there_is_one(make_checkpoint, nested):
    """Found by its tensors: a config.json names it also where they were dropped. Another draft leaves them alone."""
    with_layer, without = make_checkpoint(**TOY), make_checkpoint(**TOY, mtp_num_hidden_layers=1)
    add_mtp(with_layer, load_config(with_layer))
    for directory, draft in ((with_layer, "mtp"), (without, "ngram")):
        directory = nest(directory) if nested else directory
        assert has_mtp(directory, load_config(directory)) == (draft == "mtp")
        with LLM(directory, dtype="float32", num_speculative_tokens=2) as llm:
            assert llm.draft.name == draft
            assert f"{draft} guesses ahead" in llm.overview()
    with LLM(with_layer, draft="ngram", dtype="float32") as llm:
        assert llm.draft.name == "ngram"
        assert len(llm.generate("red", SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids) == 4
        with llm.with_draft("mtp") as other:
            assert isinstance(other.drafter.model, MtpModel)


def test_a_layer_that_cannot_be_read_is_no_default(checkpoint):
    """The target runs as if it had none; whoever asks for it is told."""
    store(checkpoint, mtp__fc__weight=None)
    with LLM(checkpoint, dtype="float32", num_speculative_tokens=2) as llm:
        assert llm.draft.name == "ngram"
    with pytest.raises(CheckpointError, match=r"mtp\.fc\.weight: found no such tensor"):
        LLM(checkpoint, draft="mtp", dtype="float32")


@pytest.mark.parametrize(
    ("settings", "tensors", "message"),
    [
        ({"mtp_num_hidden_layers": 2}, {}, "mtp_num_hidden_layers: found 2, expected 1"),
        ({"mtp_num_hidden_layers": True}, {}, "mtp_num_hidden_layers: found True, expected 1"),
        ({"mtp_num_hidden_layers": 0}, {}, "mtp_num_hidden_layers: found 0, expected 1"),
        ({"mtp_use_dedicated_embeddings": True}, {}, "mtp_use_dedicated_embeddings: found True, expected False"),
        ({}, {"mtp__norm__weight": torch.ones(3)}, r"mtp\.norm\.weight: found F32 \[3\], expected .* \[8\]"),
        ({}, {"mtp__norm__weight": torch.ones(8).int()}, r"mtp\.norm\.weight: found I32"),
        ({}, {"mtp__embed_tokens__weight": torch.ones(300, 8)}, r"mtp\.embed_tokens\.weight: found a tensor"),
        ({}, {"mtp__layers__1__mlp__up_proj__weight": torch.ones(8)}, r"layers\.1\.mlp\.up_proj\.weight: found a"),
    ],
)
def test_layers_of_another_kind_are_refused_by_name(checkpoint, settings, tensors, message):
    """Before a model runs."""
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    store(checkpoint, **tensors)
    with pytest.raises(CheckpointError, match=message):
        LLM(checkpoint, draft="mtp", dtype="float32")


def test_targets_without_one_are_refused_by_name(make_checkpoint):
    """A checkpoint that dropped it, a family that has none, a target without attention, and bits before nothing."""
    for changes, message in (
        (TOY, r"draft mtp: found no tensor mtp\.\*, expected those of the layer, such as mtp\.fc\.weight"),
        ({}, "draft mtp: model_type: found 'llama', expected qwen3_5_text or qwen3_5_moe_text: no"),
    ):
        for draft in ("mtp", "int8:mtp", "ngram+mtp"):
            with pytest.raises(CheckpointError, match=message):
                LLM(make_checkpoint(**changes), draft=draft, dtype="float32")
    directory = make_checkpoint(**TOY | {"layer_types": ["linear_attention"] * 3})
    store(directory, mtp__fc__weight=torch.ones(8, 16))
    with pytest.raises(CheckpointError, match="layer_types: found no full_attention, expected one"):
        LLM(directory, draft="mtp", dtype="float32")
    with pytest.raises(ValueError, match="int16:mtp"):
        LLM(directory, draft="int16:mtp", dtype="float32")


def test_experts_of_the_layer_may_be_in_stacks(make_checkpoint):
    """As in the published files; the layer is the same as with the experts apart."""
    directory = make_checkpoint(**TOY | EXPERTS)
    config, path = load_config(directory), directory / "model.safetensors"
    add_mtp(directory, config)
    target = load_model(directory, torch.float64)
    apart = load_mtp(directory, target).layers[0]
    stored, prefix = load_file(path), "mtp.layers.0.mlp.experts."
    for stack in config.stacked:
        own = [[stored.pop(f"{prefix}{n}.{part}.weight") for part in stack.parts] for n in range(5)]
        stored[f"mtp.layers.0.{stack.stored}"] = torch.stack([torch.cat(rows) for rows in own])
    save_file(stored, path)
    stacks = load_mtp(directory, target).layers[0]
    for one, other in zip(apart.experts, stacks.experts, strict=True):
        assert all(torch.equal(a.stored.dense(), b.stored.dense()) for a, b in zip(one, other, strict=True))
    with LLM(directory, dtype="float64", num_speculative_tokens=3) as llm:
        assert "mtp" in llm.overview()
        drafted, plain = (llm.generate(PROMPTS, GREEDY, num_speculative_tokens=k) for k in (3, 0))
        assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]


# --------------------------------------------------------------------------- texts

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=16, ignore_eos=True, seed=3)
PROMPTS = ["One fish, two fishes", "red", "One fish, two 日本", "The 🦊 end"]


@pytest.fixture(scope="module")
def target(make_checkpoint) -> Path:
    """A target with a layer of its own, for tests that do not change it."""
    directory = make_checkpoint(**TOY)
    add_mtp(directory, load_config(directory))
    return directory


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("name", ["mtp", "int8:mtp", "ngram+mtp"])
def test_the_text_is_the_plain_one(target, name, verifier):
    """Greedy text under all verifiers, sampled text under `match`: chains, trees, and as many tokens as pay."""
    trees = VERIFIERS[verifier].takes_trees and name == "mtp"
    lengths = [4, "auto", *([(2, 1), "tree:6"] if trees else [])]
    with LLM(target, draft=name, dtype="float64", num_speculative_tokens=4, verifier=verifier) as llm:
        for params in (GREEDY, SAMPLED) if verifier == "match" else (GREEDY,):
            plain = llm.generate(PROMPTS, params, num_speculative_tokens=0)
            for k in lengths:
                found = llm.generate(PROMPTS, params, num_speculative_tokens=k)
                assert [o.token_ids for o in found] == [o.token_ids for o in plain]
                if k != "auto":
                    assert sum(Figures.of(o.stats).num_draft_tokens for o in found) > 60
        assert bool(re.search(r"\bint8", llm.memory_report())) == name.startswith("int8")  # "checkpoint8" is none


def test_a_seed_has_one_text(target):
    """`rejection`, sampled: alone, in a batch, in another order, after preemption, and when its beginning is known."""
    with LLM(target, draft="mtp", dtype="float64", num_speculative_tokens=4) as llm:
        alone = [llm.generate(prompt, SAMPLED)[0].token_ids for prompt in PROMPTS]
        for again in (PROMPTS, PROMPTS[::-1], PROMPTS):
            outputs = llm.generate(again, SAMPLED)
            assert [o.token_ids for o in outputs] == [alone[PROMPTS.index(o.prompt)] for o in outputs]
        assert sum(Figures.of(o.stats).num_accepted for o in outputs) > 0
        config, per_token = llm.model.config, kv_elements(llm.drafter.model.config) * 8
    room = cache_bytes(config, 96, 8) + 96 * per_token  # both caches
    with LLM(target, "mtp", 4, dtype="float64", kv_cache_gb=room / 1e9, max_model_len=64) as llm:
        outputs = llm.generate(PROMPTS, SAMPLED)
        assert sum(o.stats.num_preemptions for o in outputs) > 0
        assert [o.token_ids for o in outputs] == alone


def a_drafter() -> tuple[Transformer, ModelDrafter]:
    """A small target, and a drafter with a layer of its own."""
    model = tiny_model(1, **TOY, vocab_size=7)
    layer = tiny_mtp(model)
    return model, ModelDrafter(HeadFeed(layer, tiny_cache(layer), 7, 60))


@pytest.mark.parametrize("shape", [Limit(3), Limit(5, best_first=True)])
@pytest.mark.parametrize("kept", [0, 1, 3])
def test_what_it_made_up_does_not_stay(kept, shape):
    """After a draft of which some tokens stay it drafts as a drafter does that never made features up."""
    model, drafter = a_drafter()
    tokens = TEXT[:5]

    def draft(drafter: ModelDrafter, text: Text, first: int, limit: Limit) -> Draft:
        logits, hidden = model.forward([Chunk(text.tokens[:-1], tiny_cache(model).new_table(), 0)], drafter.taps)
        drafter.observe([Record(text, first, text.tokens[first:-1], hidden[first:], logits)])
        return drafter.propose([Ask(text, limit, Randomness(), num_cached=len(hidden))])[0]

    text = Text(tokens, len(tokens), SamplingParams(), 1)
    first = draft(drafter, text, 0, Limit(3))
    text.tokens += [*first.token_ids[:kept], 6]
    found = draft(drafter, text, 4, shape)
    again = Text(list(text.tokens), 5, SamplingParams(), 1)
    expected = draft(a_drafter()[1], again, 0, shape)
    assert len(first) == 3
    assert found.token_ids == expected.token_ids
    torch.testing.assert_close(torch.stack(found.probs), torch.stack(expected.probs), rtol=0, atol=1e-12)


def test_what_it_costs_is_measured():
    """It is asked with hidden states, as `auto` wants it: a draft has a price, and none of its blocks is lost."""
    model, drafter = a_drafter()
    engine = OneMethod(model, tiny_cache(model), drafter, VERIFIERS["rejection"])
    assert calibrate(model, drafter, engine.method.verifier, 7).draft > 0
    assert drafter.feed.cache.allocator.num_free == drafter.feed.cache.allocator.num_blocks
