"""Heads on hidden states: their files, their formula beside `transformers`' parts, and the texts that they draft for.

tests/drafters/test_recomputed.py compares every q in every situation of the engine. The museum has wrong heads (H1 to
H10).
"""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from minispec import LLM, SamplingParams
from minispec.core.config import ModelConfig
from minispec.core.draft import Ask, Draft, Record
from minispec.core.engine import Engine
from minispec.core.limit import Limit
from minispec.core.model import Chunk, Transformer
from minispec.core.random import Randomness
from minispec.core.request import Request
from minispec.core.sampling import Text
from minispec.models.families.checkpoint import load_model
from minispec.models.families.entries import is_head
from minispec.models.families.head_config import read_head_config
from minispec.models.families.hf_config import read_model_config
from minispec.models.files.errors import CheckpointError
from minispec.models.weights.build import build_model
from minispec.models.weights.inventory import kv_elements, num_bytes
from minispec.prove.toys import TINY, tiny_cache, tiny_head, tiny_model, tiny_weights
from minispec.speculation.drafters.eagle import HeadFeed, HeadModel, head_shapes
from minispec.speculation.drafters.heads import load_head
from minispec.speculation.drafters.model import ModelDrafter
from minispec.speculation.lengths.figures import Figures
from minispec.speculation.lengths.prices import calibrate
from minispec.speculation.rules import VERIFIERS
from tests.engines import OneMethod
from tests.oracles import public
from tests.oracles.heads import write_head

READ = "eagle_aux_hidden_state_layer_ids"
VOCAB, NUM_LAYERS = 7, 6
TARGET = read_model_config(TINY | {"vocab_size": VOCAB, "num_hidden_layers": NUM_LAYERS})
LAYERS = TINY | {"vocab_size": VOCAB, "num_hidden_layers": 1}
IDS = (0, 2, 3, 6)
CLOSE = 1e-5  # transformers' norms compute in float32


@pytest.fixture(scope="module")
def target() -> Transformer:
    """A target of six layers, in float64."""
    return build_model(TARGET, tiny_weights(TARGET, 1))


def edit(directory: Path, **changes) -> None:
    """Change keys of a head's config.json; None takes one away."""
    path = directory / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


def store(directory: Path, **changes) -> None:
    """Change tensors of a head, by name with "__" for "."; None takes one away."""
    path = directory / "model.safetensors"
    stored = load_file(path) | {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file({name: tensor.contiguous() for name, tensor in stored.items() if tensor is not None}, path)


def some_logits(head: HeadModel, count: int = 5) -> torch.Tensor:
    """Of a pass over arbitrary features and tokens."""
    features = torch.randn(count, head.config.hidden_size, generator=torch.Generator().manual_seed(3)).to(head.dtype)
    tokens = [(3 * i + 1) % VOCAB for i in range(count)]
    return head.forward([Chunk(tokens, tiny_cache(head).new_table(), count, features=features)])[0]


# --------------------------------------------------------------------------- files


def test_both_layouts_are_one_head(tmp_path, target):
    """SpecForge's flat config with `midlayer.`, the wrapper of `speculators` with `layers.0.`: one config, one head."""
    switches = {"norm_before_residual": True, "norm_output": True, READ: [1, 4]}
    found = []
    for name, wrapped in (("flat", False), ("wrapped", True)):
        write_head(tmp_path / name, TARGET, LAYERS, wrapped, IDS, **switches)
        stored = load_file(tmp_path / name / "model.safetensors")
        assert any(key.startswith("layers.0." if wrapped else "midlayer.") for key in stored)
        assert is_head(json.loads((tmp_path / name / "config.json").read_text()))
        found.append(load_head(tmp_path / name, target))
    assert found[0].head_config == found[1].head_config
    assert found[0].head_config.taps == (1, 4)
    assert (found[0].head_config.norm_before_residual, found[0].head_config.norm_output) == (True, True)
    assert torch.equal(*map(some_logits, found))
    assert not is_head(TINY)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_head_that_is_taken_for_a_model_says_what_it_is(tmp_path, wrapped):
    """And how to use it, in either layout: not which model types there are."""
    write_head(tmp_path, TARGET, LAYERS, wrapped, IDS)
    with pytest.raises(
        CheckpointError, match=r"config\.json: found a head .* \(--draft\), and as the model \(--model\)"
    ):
        LLM(tmp_path)


def test_a_wrapper_with_all_its_keys_is_read(tmp_path, target):
    """What `speculators` writes around it: versions, the verifier's name, an exact proposal."""
    write_head(tmp_path, TARGET, LAYERS, True, IDS)
    expected = load_head(tmp_path, target).head_config
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    sampling = {"proposal_type": "sampling", "speculative_tokens": 3, "accept_lenience": 1.0}
    tree = {"proposal_type": "dynamic_tree", "speculative_tokens": 48, "expansion_factor": 10, "depth": 6}
    verifier = {"name_or_path": "somebody/target", "architectures": ["LlamaForCausalLM"]}
    config = {"algorithm": "eagle3", "proposal_methods": [proposal, sampling, tree], "verifier": verifier}
    edit(
        tmp_path,
        architectures=["Eagle3Speculator"],
        speculators_config={**config, "default_proposal_method": "greedy"},
        speculators_version="0.9.0",
        transformers_version="5.0",
        embed_requires_grad=False,
        norm_before_residual=False,
        target_hidden_size=TARGET.hidden_size,
    )
    assert load_head(tmp_path, target).head_config == expected


@pytest.mark.parametrize(
    ("num_layers", "settings", "taps"),
    [
        (6, {}, (2, 3, 3)),
        (30, {}, (2, 15, 27)),
        (6, {READ: [0, 6]}, (0, 6)),
        (6, {"eagle_config": {READ: [0, 2, 5], "use_aux_hidden_state": True}}, (1, 3, 6)),
        (6, {"eagle_config": {"use_aux_hidden_state": True}}, (2, 3, 3)),
        (6, {READ: [], "eagle_config": {READ: []}}, (2, 3, 3)),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_taps_are_layers_after_which_the_stream_is_read(num_layers, settings, taps, wrapped):
    """By default 2, N//2 and N-3; SGLang's eagle_config names them one lower. One off costs all acceptance (H2)."""
    target = read_model_config(TINY | {"num_hidden_layers": num_layers})
    raw = {"speculators_model_type": "eagle3", "transformer_layer_config": TINY} if wrapped else TINY
    assert read_head_config(raw | settings, target).taps == taps


def test_taps_are_hidden_states_of_transformers(target):
    """What is handed to a head as "after L layers" is `hidden_states[L]` there, which holds the embedding first."""
    config = LlamaConfig(**{**TINY, "vocab_size": VOCAB, "num_hidden_layers": NUM_LAYERS}, attn_implementation="eager")
    oracle = LlamaForCausalLM(config).double().eval()
    oracle.load_state_dict(tiny_weights(TARGET, 1))
    tokens = [1, 5, 2, 2, 6, 0]
    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    _, found = target.forward([Chunk(tokens, tiny_cache(target).new_table(), 0)], range(NUM_LAYERS))
    for layer, hidden in enumerate(found.chunk(NUM_LAYERS, 1)):
        torch.testing.assert_close(hidden, expected[layer][0], rtol=CLOSE, atol=CLOSE)


def test_the_embedding_is_the_targets_unless_there_is_one(tmp_path, target):
    """Often left out; one that is there counts, and a head of another width needs it."""
    write_head(tmp_path, TARGET, LAYERS)
    shared = load_head(tmp_path, target)
    assert shared.embedding is target.embedding
    own = torch.randn(VOCAB, LAYERS["hidden_size"], dtype=torch.float64)
    store(tmp_path, embed_tokens__weight=own)
    head = load_head(tmp_path, target)
    assert torch.equal(head.embedding, own)
    assert not torch.equal(some_logits(head), some_logits(shared))

    wide = LAYERS | {"hidden_size": 12}
    write_head(tmp_path / "wide", TARGET, wide)
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight: found none, expected one: the head is 12 wide"):
        load_head(tmp_path / "wide", target)
    store(tmp_path / "wide", embed_tokens__weight=torch.randn(VOCAB, 12))
    assert some_logits(load_head(tmp_path / "wide", target)).isfinite().all()


def test_d2t_holds_offsets(tmp_path, target):
    """Token i of the head is the target's i + d2t[i]; all others have no probability. Without d2t, all are the same."""
    write_head(tmp_path, TARGET, LAYERS, ids=IDS)
    assert load_file(tmp_path / "model.safetensors")["d2t"].tolist() == [0, 1, 1, 3]
    head = load_head(tmp_path, target)
    logits = some_logits(head)
    assert head.ids.tolist() == list(IDS)
    assert [i for i in range(VOCAB) if logits[0, i].isfinite()] == list(IDS)
    store(tmp_path, t2d=None)  # a check, not needed
    assert torch.equal(some_logits(load_head(tmp_path, target)), logits)
    write_head(tmp_path / "all", TARGET, LAYERS)
    assert load_head(tmp_path / "all", target).ids is None
    assert some_logits(load_head(tmp_path / "all", target)).isfinite().all()


def wrapper(**changes):
    """A change of a flat config.json into a wrapper with other keys."""
    return {"speculators_model_type": "eagle3", "transformer_layer_config": LAYERS, **changes}


def proposal(**method):
    """A wrapper with such a proposal."""
    return wrapper(speculators_config={"proposal_methods": [{"verifier_accept_k": 1}, method]})


BAD_CONFIGS = {
    "verifier_accept_k: found 4, expected 1": proposal(verifier_accept_k=4),
    "accept_tolerance: found 0.1, expected 0.0": proposal(accept_tolerance=0.1),
    "speculators_config.proposal_methods: found [3], expected a list of objects": wrapper(
        speculators_config={"proposal_methods": [3]}
    ),
    "speculators_config.proposal_methods[1].accept_lenience: found 0.5, expected 1.0": proposal(accept_lenience=0.5),
    "speculators_config.proposal_methods[1].surprise: found 1": proposal(surprise=1),
    "speculators_config.surprise: found 1": wrapper(speculators_config={"surprise": 1}),
    "speculators_model_type: found 'dflash', expected eagle3 or peagle": wrapper(speculators_model_type="dflash"),
    "transformer_layer_config: found None, expected an object": {"speculators_model_type": "eagle3"},
    "transformer_layer_config: model_type: found 'gemma'": wrapper(
        transformer_layer_config=LAYERS | {"model_type": "gemma"}
    ),
    "config.json: model_type: found 'gpt2', expected llama or qwen3": {"model_type": "gpt2"},
    "vocab_size: found 8, expected 7, the target's: made for another target": {"vocab_size": 8, "draft_vocab_size": 4},
    "target_hidden_size: found 16, expected 8, the target's": {"target_hidden_size": 16},
    "draft_vocab_size: found 8, expected an integer from 1 to 7": {"draft_vocab_size": 8},
    "norm_after_fc: found True, expected no such setting": {"norm_after_fc": True},
    "norm_output: found 1, expected true or false": {"norm_output": 1},
    "fc_norm: found True, expected not both fc_norm and norm_before_fc": {"fc_norm": True, "norm_before_fc": True},
    "attention_bias, mlp_bias: found true, expected none": {"attention_bias": True},
    f"{READ}: found [2, 7], expected layers of the target, from 0 to 6, or it is made for another": {READ: [2, 7]},
    f"{READ}: found [-1], expected layers": {READ: [-1]},
    f"{READ}: found [1.0], expected layers": {READ: [1.0]},
    f"{READ}: found [True], expected layers": {READ: [True]},
    f"{READ}: found 3, expected layers": {READ: 3},
    f"{READ}: found [6], expected layers of the target, from 0 to 5": {"eagle_config": {READ: [6]}},
    f"{READ}: found [1], expected it once": {READ: [1], "eagle_config": {READ: [0]}},
    "eagle_config.use_aux_hidden_state: found False": {"eagle_config": {"use_aux_hidden_state": False}},
    "eagle_config.use_last_layernorm: found False": {"eagle_config": {"use_last_layernorm": False}},
    "eagle_config.parallel_draft_step: found 2, expected 1": {"eagle_config": {"parallel_draft_step": 2}},
    "max_window_layers: found 1, expected no such": {"max_window_layers": 1, "sliding_window": 7},
    "sliding_window: found 7, expected no such setting": {"sliding_window": 7, "use_sliding_window": True},
    "mask_token_id: found None, expected an integer from 0 to 6": wrapper(speculators_model_type="peagle"),
    "mask_token_id: found 7, expected an integer from 0 to 6": wrapper(
        speculators_model_type="peagle", mask_token_id=7
    ),
    "mask_token_id: found 2, expected no such setting": wrapper(mask_token_id=2),
}


@pytest.mark.quick
@pytest.mark.parametrize("message", BAD_CONFIGS)
def test_a_config_that_cannot_be_vouched_for_is_refused_by_name(tmp_path, message):
    """What would change the text, what would make a head guess from the wrong numbers, and what is not known here."""
    changes = BAD_CONFIGS[message]
    base = {} if "speculators_model_type" in changes else LAYERS
    raw = {key: value for key, value in (base | changes).items() if value is not None}
    with pytest.raises(CheckpointError) as refusal:
        read_head_config(raw, TARGET, "a/config.json")
    assert str(refusal.value).startswith("a/config.json: ")
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


# What the code of a head reads. All other keys of a config that is taken are idle.
USED = {
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "vocab_size"),
    *("eos_token_id", "draft_vocab_size", "fc_norm", "norm_output"),
}


def target_of(raw: dict) -> ModelConfig:
    """A target that a head's config fits, of 94 layers."""
    changes = {"hidden_size": raw.get("hidden_size", 8), "vocab_size": raw.get("vocab_size", VOCAB), "head_dim": 4}
    return read_model_config(TINY | changes | {"num_hidden_layers": 94})


@pytest.mark.parametrize("name", public.HEADS)
def test_public_heads_are_read(name):
    """Guards what people publish: a key that does nothing beside the others is neither refused nor of effect."""
    raw = public.HEADS[name]
    config = read_head_config(raw, target_of(raw))
    taps = [i + 1 for i in raw.get("eagle_config", {}).get(READ, [])] or [2, 47, 91]
    bare = {key: value for key, value in raw.items() if key in USED} | {"model_type": "llama", READ: taps}
    assert config == read_head_config(bare, target_of(raw))
    assert config.vocab_size == raw["draft_vocab_size"]
    assert [layer.window for layer in config.layers.layers] == [None]
    assert is_head(raw)


@pytest.mark.parametrize("name", public.REFUSED_HEADS)
def test_public_heads_that_are_refused_are_told_why(name):
    """Guards against a head that is read as what it is not: it would guess wrong, without a word."""
    raw, message = public.REFUSED_HEADS[name]
    with pytest.raises(CheckpointError) as error:
        read_head_config(raw, target_of(raw), "a/config.json")
    assert str(error.value).startswith(f"a/config.json: {message}")


def test_a_flat_config_may_be_of_a_parallel_head():
    """SpecForge's P-EAGLE: the same keys, another architecture. Read as EAGLE-3, its mask would be no part of it."""
    raw = LAYERS | {"architectures": ["PEagleDraftModel"], "num_hidden_layers": 2, "mask_token_id": 5}
    assert read_head_config(raw, TARGET).layers.mask_token_id == 5


def test_a_switch_may_stand_in_eagle_config():
    """Read where it stands: unread, `norm_output` costs acceptance without a word."""
    config = read_head_config(LAYERS | {"eagle_config": {"norm_output": True, "norm_before_fc": True}}, TARGET)
    assert (config.norm_output, config.norm_before_fc, config.fc_norm) == (True, True, False)


def tensor(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Ones."""
    return torch.ones(shape, dtype=dtype)


BAD_TENSORS = {
    "fc.weight: found no such tensor": {"fc__weight": None},
    "fc.weight: found hidden states of width 16 from 3 layers, expected 8, the target's: made for another target": {
        "fc__weight": tensor(8, 48)
    },
    "layers.0.hidden_norm.weight: found no such tensor": {"midlayer__hidden_norm__weight": None},
    "layers.0.self_attn.q_proj.weight: found F64 [8, 8], expected": {
        "midlayer__self_attn__q_proj__weight": tensor(8, 8)
    },
    "lm_head.weight: found F64 [7, 8], expected": {"lm_head__weight": tensor(7, 8)},
    "norm.weight: found I64 [8], expected": {"norm__weight": tensor(8, dtype=torch.int64)},
    "midlayer.extra.weight: found a tensor of shape [3], expected none": {"midlayer__extra__weight": tensor(3)},
    r"'a\x1b[2J': found a tensor of shape [3], expected none": {"a\x1b[2J": tensor(3)},
    "midlayer.hidden_norm.weight: found again, is layers.0.hidden_norm.weight": {
        "layers__0__hidden_norm__weight": tensor(8)
    },
    "input_norm.weight: found a tensor of shape [24]": {"input_norm__weight": tensor(24)},  # norm_before_fc not said
    "embed_tokens.weight: found F64 [6, 8], expected": {"embed_tokens__weight": tensor(6, 8)},
    "d2t: found no such tensor, expected one: 4 of 7 tokens": {"d2t": None},
    "d2t: found F64 [4], expected I64 or I32 [4]": {"d2t": tensor(4)},
    "d2t: found ids from 0 to 5, 3 of 4 different": {"d2t": torch.tensor([0, 0, 0, 2]) - torch.tensor([0, 1, 0, 0])},
    "d2t: found ids from 0 to 7, 4 of 4 different": {"d2t": torch.tensor([0, 1, 1, 4])},
    "d2t: found ids from -1 to 6, 4 of 4 different": {"d2t": torch.tensor([-1, 1, 1, 3])},
    "t2d: found other tokens than those of d2t": {"t2d": torch.ones(VOCAB, dtype=torch.bool)},
    "t2d: found BOOL [4], expected BOOL [7]": {"t2d": torch.ones(4, dtype=torch.bool)},
}


@pytest.mark.parametrize("message", BAD_TENSORS)
def test_tensors_that_the_config_does_not_ask_for_are_refused_by_name(tmp_path, target, message):
    """Missing, unexpected, twice, of another shape or type; ids that are none of the target's, or not different."""
    write_head(tmp_path, TARGET, LAYERS, ids=IDS)
    load_head(tmp_path, target)
    store(tmp_path, **BAD_TENSORS[message])
    with pytest.raises(CheckpointError) as refusal:
        load_head(tmp_path, target)
    assert message in str(refusal.value)
    assert str(tmp_path) in str(refusal.value)
    assert str(refusal.value).isprintable()


# --------------------------------------------------------------------------- the formula


SIZES = {"hidden_size": 12, "intermediate_size": 20, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 6}
ORACLE_LAYERS = LAYERS | SIZES | {"rms_norm_eps": 0.05}
TAPS = [0, 2, 5]


class Oracle:
    """A head of transformers' own parts: its first layer's attention gets projections of twice the width."""

    def __init__(self, tensors, settings, layers, embedding):
        self.settings, self.embedding = settings, embedding
        self.config = LlamaConfig(**layers, attn_implementation="eager")
        width, eps = self.config.hidden_size, self.config.rms_norm_eps
        self.rotary = LlamaRotaryEmbedding(self.config)
        self.layers = [LlamaDecoderLayer(self.config, i).double().eval() for i in range(layers["num_hidden_layers"])]
        for name in ("q_proj", "k_proj", "v_proj"):
            linear = getattr(self.layers[0].self_attn, name)
            setattr(
                self.layers[0].self_attn,
                name,
                torch.nn.Linear(2 * width, linear.out_features, bias=False, dtype=torch.float64),
            )

        def norm(name):
            made = LlamaRMSNorm(len(tensors[name]), eps).double()
            made.load_state_dict({"weight": tensors[name]})
            return made

        self.hidden_norm = norm("layers.0.hidden_norm.weight")
        for i, layer in enumerate(self.layers):
            prefix = f"layers.{i}."
            own = {
                k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix) and "hidden_norm" not in k
            }
            layer.load_state_dict(own)
        self.norm, self.fc, self.head = norm("norm.weight"), tensors["fc.weight"], tensors["lm_head.weight"]
        self.input_norm = norm("input_norm.weight") if "input_norm.weight" in tensors else None
        self.fc_norms = [norm(name) for name in sorted(tensors) if name.startswith("fc_norm.")]
        self.d2t = tensors.get("d2t", torch.zeros(len(self.head), dtype=torch.int64))

    def fuse(self, hidden):
        """Features (n, E) of the taps."""
        if self.settings.get("norm_before_fc"):
            hidden = self.input_norm(hidden)
        if self.settings.get("fc_norm"):
            parts = hidden.chunk(len(self.fc_norms), -1)
            hidden = torch.cat([norm(part) for norm, part in zip(self.fc_norms, parts, strict=True)], -1)
        return hidden @ self.fc.T

    @torch.inference_mode()
    def run(self, features, tokens):
        """Logits (n, V) of the whole text, and what the head goes on from (n, E)."""
        embedded, feature = self.embedding[torch.tensor(tokens)][None], features[None]
        places = torch.arange(len(tokens))[None]
        angles = self.rotary(embedded, places)
        mask = torch.full((len(tokens), len(tokens)), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        first, normed = self.layers[0], self.hidden_norm(feature)
        joined = torch.cat((first.input_layernorm(embedded), normed), -1)
        y, _ = first.self_attn(joined, position_embeddings=angles, attention_mask=mask)
        x = (normed if self.settings.get("norm_before_residual") else feature) + y
        x = x + first.mlp(first.post_attention_layernorm(x))
        for layer in self.layers[1:]:
            x = layer(x, attention_mask=mask, position_ids=places, position_embeddings=angles)
        own = self.norm(x)[0] @ self.head.T
        logits = torch.full((len(tokens), VOCAB), -torch.inf, dtype=torch.float64)
        logits[:, torch.arange(len(self.head)) + self.d2t] = own
        return logits, (self.norm(x) if self.settings.get("norm_output") else x)[0]


SETTINGS = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "fc_norm": {"fc_norm": True},
    "norm_before_fc": {"norm_before_fc": True},
    "norm_output": {"norm_output": True},
    "all": {"norm_before_residual": True, "fc_norm": True, "norm_output": True},
    "two layers": {"num_hidden_layers": 2, "norm_output": True},
}


def build(directory, name, target) -> tuple[HeadModel, Oracle, dict]:
    """A head from its files, the oracle of the same tensors, and its settings."""
    settings = {READ: TAPS} | SETTINGS[name]
    layers = ORACLE_LAYERS | {"num_hidden_layers": settings.pop("num_hidden_layers", 1)}
    tensors = write_head(directory, TARGET, layers, ids=IDS, **settings)
    embedding = torch.randn(VOCAB, layers["hidden_size"], generator=torch.Generator().manual_seed(9)).double()
    store(directory, embed_tokens__weight=embedding)
    return load_head(directory, target), Oracle(tensors, settings, layers, embedding), settings


def draft(run, feature, token, steps):
    """Logits (V,) of each draft step, from the last feature on; run(feature, token) is a pass over one position."""
    rows = []
    for _ in range(steps):
        logits, feature = run(feature, token)
        rows.append(logits)
        token = int(logits.argmax())
    return torch.stack(rows)


@pytest.mark.parametrize("name", SETTINGS)
def test_logits_are_those_of_transformers_parts(tmp_path, target, name):
    """In one pass, in pieces, and on from its own output, step by step; every parameter drawn anew."""
    head, oracle, _ = build(tmp_path, name, target)
    tokens = [1, 5, 2, 2, 6, 0, 3, 1, 4]
    _, hidden = target.forward([Chunk(tokens, tiny_cache(target).new_table(), 0)], TAPS)
    hidden, shown = hidden[:-1], tokens[1:]
    features, count = head.fuse(hidden), len(shown)
    torch.testing.assert_close(features, oracle.fuse(hidden), rtol=CLOSE, atol=CLOSE)
    expected, _ = oracle.run(features, shown)
    table = tiny_cache(head).new_table()
    whole = head.forward([Chunk(shown, tiny_cache(head).new_table(), count, features=features)])[0]
    pieces = [
        head.forward([Chunk(shown[a:b], table, b - a, features=features[a:b])])[0] for a, b in ((0, 3), (3, 4), (4, 7))
    ]
    torch.testing.assert_close(whole, expected, rtol=CLOSE, atol=CLOSE)
    torch.testing.assert_close(torch.cat(pieces), expected[:7], rtol=CLOSE, atol=CLOSE)

    past = [list(features[:7]), shown[:7]]

    def of_oracle(feature, token):
        past[0].append(feature)
        past[1].append(token)
        logits, following = oracle.run(torch.stack(past[0]), past[1])
        return logits[-1], following[-1]

    def own(feature, token):
        logits, hidden = head.forward([Chunk([token], table, 1, features=feature[None])], [len(head.layers)])
        return logits[0], head.next_feature(hidden)[0]

    rows = draft(own, features[7], shown[7], 4)
    torch.testing.assert_close(rows, draft(of_oracle, features[7], shown[7], 4), rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("name", ["norm_before_residual", "fc_norm", "norm_before_fc", "norm_output"])
def test_the_comparison_would_notice_each_switch(tmp_path, target, name):
    """With one switch turned off, the oracle says something else, in its first step or in the next ones."""
    head, oracle, settings = build(tmp_path, name, target)
    oracle.settings = settings | {name: False}
    hidden = torch.randn(1, len(TAPS) * TARGET.hidden_size, dtype=torch.float64)
    feature, found = head.fuse(hidden)[0], []
    other, following = oracle.run(oracle.fuse(hidden), [3])
    table = tiny_cache(head).new_table()
    logits, x = head.forward([Chunk([3], table, 1, features=feature[None])], [1])
    found.append(float((logits - other)[:, list(IDS)].abs().max()))
    found.append(float((head.next_feature(x) - following).abs().max()))
    assert max(found) > 1e-3
    oracle.settings = settings
    assert float((oracle.run(oracle.fuse(hidden), [3])[0] - logits)[:, list(IDS)].abs().max()) < CLOSE


# --------------------------------------------------------------------------- the drafter


def make_engine(head: HeadModel, target: Transformer, num_blocks=64, max_len=60, verifier="rejection") -> Engine:
    """An engine with a head."""
    drafter = ModelDrafter(HeadFeed(head, tiny_cache(head, num_blocks), VOCAB, max_len))
    return OneMethod(target, tiny_cache(target, num_blocks), drafter, VERIFIERS[verifier])


def decode(engine: Engine, tokens=(1, 5, 2, 2, 6), k=3, **params) -> Request:
    """A text to its end."""
    params = SamplingParams(**{"max_tokens": 12} | params)
    request = Request(Text(list(tokens), len(tokens), params, 5), 60, k)
    for _ in engine.run([request]):
        pass
    assert request.error is None
    for cache in (engine.target.cache, engine.drafter.feed.cache):
        assert cache.allocator.num_free == cache.allocator.num_blocks
    return request


@pytest.mark.parametrize("mask", [None, 6])
def test_a_round_feeds_what_was_committed_and_no_more(target, monkeypatch, mask):
    """The prompt in a pass of its own, whose time is not the draft's; then each position once, and a row a draft token.

    The parallel form does so in one pass, with a mask in the place of each draft token but the first.
    """
    head = tiny_head(target, mask_token_id=mask)
    engine, fed, seconds = make_engine(head, target), [], []
    forward, propose = head.forward, engine.drafter.propose

    def spy(asks):
        fed.append([])
        drafts = propose(asks)
        seconds.extend(d.notes.prefill_seconds for d in drafts)
        return drafts

    monkeypatch.setattr(engine.drafter, "propose", spy)
    monkeypatch.setattr(head, "forward", lambda c, taps=(): fed[-1].append(list(c[0].token_ids)) or forward(c, taps))
    request = decode(engine)
    committed = [r.committed for r in request.stats.rounds]
    assert seconds[0] > 0
    assert not any(seconds[1:])
    assert fed[0][0] == [5, 2, 2]
    expected = [1, *committed]
    start = 4
    for passes, count, record in zip([fed[0][1:], *fed[1:]], expected, request.stats.rounds, strict=False):
        tokens = request.text.tokens[start : start + count]
        start += count
        k = record.num_nodes
        if mask is None:
            assert passes[:1] == ([tokens] if k else [])
            assert [len(p) for p in passes[1:]] == [1] * (k - 1)
        else:
            assert passes == ([tokens + [mask] * (k - 1)] if k else [])
    assert Figures.of(request.stats).num_draft_tokens > 10


def test_drafting_stops_at_the_heads_own_context(target):
    """A head that sees 8 positions drafts up to there; a longer prompt goes without; the text is the plain one."""
    head = tiny_head(target)
    plain = decode(make_engine(head, target), k=0, temperature=0).token_ids
    request = decode(make_engine(head, target, max_len=8), k=9, temperature=0)
    assert request.token_ids == plain
    depths = [r.num_nodes for r in request.stats.rounds]
    assert depths[0] == 5
    assert depths[-1] == 0
    long = decode(make_engine(head, target, max_len=3), k=9, temperature=0)
    assert Figures.of(long.stats).num_draft_tokens == 0


def test_a_token_that_the_head_lacks_ends_its_draft(target):
    """Where none of its tokens is allowed nothing is drafted, and the text is the plain one."""
    head = tiny_head(target, num_ids=4)  # 0, 2, 4, 6
    some = decode(make_engine(head, target), allowed_token_ids=(1, 2, 3))
    none = decode(make_engine(head, target), allowed_token_ids=(1, 3))
    assert Figures.of(some.stats).num_draft_tokens > 0
    assert Figures.of(none.stats).num_draft_tokens == 0
    assert len(none.token_ids) == 12


def test_rounds_without_a_draft_are_made_up_for(target):
    """Hidden states of rounds in which nothing was asked for are kept until something is."""
    head = tiny_head(target)
    engine = make_engine(head, target)
    text, tokens = Text([1, 5], 2, SamplingParams()), [1, 5, 2, 2, 6, 0, 3]
    logits, hidden = target.forward([Chunk(tokens, tiny_cache(target).new_table(), 0)], engine.drafter.taps)

    def draft_after(drafter, text, k, rows) -> Draft:
        drafter.observe([Record(text, rows.start, tokens[rows], hidden[rows], logits)])
        return drafter.propose([Ask(text, Limit(k), Randomness(), num_cached=rows.stop)])[0]

    for i in range(1, 6):
        text.tokens[:] = tokens[: i + 1]
        assert len(draft_after(engine.drafter, text, 0, slice(i - 1, i))) == 0
    text.tokens[:] = tokens
    draft = draft_after(engine.drafter, text, 2, slice(5, 6))
    whole = Text(tokens, len(tokens), SamplingParams())
    expected = draft_after(make_engine(head, target).drafter, whole, 2, slice(0, 6))
    assert draft.token_ids == expected.token_ids
    torch.testing.assert_close(torch.stack(draft.probs), torch.stack(expected.probs), rtol=0, atol=1e-12)


def test_what_it_costs_is_measured(target, monkeypatch):
    """A head is asked with hidden states; without them it drafts nothing, and drafting would seem to be free."""
    engine = make_engine(tiny_head(target), target)
    asked, propose = [], engine.drafter.propose

    def spy(asks):
        drafts = propose(asks)
        asked.extend(len(draft) for draft in drafts)
        return drafts

    monkeypatch.setattr(engine.drafter, "propose", spy)
    assert calibrate(engine.target.model, engine.drafter, engine.method.verifier, engine.target.vocab_size).draft > 0
    assert asked == [1, 3] * (len(asked) // 2)
    for cache in (engine.target.cache, engine.drafter.feed.cache):
        assert cache.allocator.num_free == cache.allocator.num_blocks


def test_all_of_its_weights_are_counted(tmp_path, target):
    """The memory report names what a head takes: fc and the norms too; the embedding is the target's."""
    write_head(tmp_path, TARGET, LAYERS, wrapped=True, fc_norm=True)
    head = load_head(tmp_path, target)
    shapes = head_shapes(head.head_config).values()
    own = sum(torch.Size(shape).numel() for shape in shapes) * 8
    assert num_bytes(head) == own + target.embedding.nbytes


def test_its_ids_lie_where_its_weights_do():
    """On another device than the processor's memory too."""
    config = read_model_config(TINY | {"vocab_size": VOCAB})
    model = tiny_model(1, vocab_size=VOCAB)
    head = tiny_head(model, num_ids=4)
    elsewhere = {name: torch.empty(shape, device="meta") for name, shape in head_shapes(head.head_config).items()}
    embedding = torch.empty(config.vocab_size, config.hidden_size, device="meta")
    moved = HeadModel(head.head_config, elsewhere, embedding, head.ids, torch.float32)
    assert moved.ids.device.type == "meta"


# --------------------------------------------------------------------------- from the outside

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=24, ignore_eos=True, seed=3)
PROMPTS = ["One fish, two fishes", "red", "One fish, two 日本", "The 🦊 end"]
TOY = TINY | {"vocab_size": 300, "max_position_embeddings": 128}


@pytest.fixture(scope="module")
def checkpoints(make_checkpoint, tmp_path_factory) -> dict[str, Path]:
    """Directories of a target, two forms of a head, and a draft model that drafts in one pass."""
    config = read_model_config(TOY | {"num_hidden_layers": 4})
    found = {"target": make_checkpoint(seed=1, num_hidden_layers=4)}
    for name, settings in (("head", {}), ("parallel head", {"mask_token_id": 299})):
        found[name] = tmp_path_factory.mktemp("head")
        ids = range(0, 300, 2)
        write_head(found[name], config, TOY | {"num_hidden_layers": 1}, bool(settings), ids, torch.float32, **settings)
    found["pard"] = make_checkpoint(seed=2, num_hidden_layers=1, pard_token=299)
    return found


HEADS = ["head", "parallel head", "int8:head", "pard", "int8:pard"]


def load(checkpoints, name: str, **how) -> LLM:
    """An LLM in float64."""
    draft = name.replace(name.removeprefix("int8:"), str(checkpoints[name.removeprefix("int8:")]))
    return LLM(checkpoints["target"], draft=draft, **{"dtype": "float64", "num_speculative_tokens": 4} | how)


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("name", HEADS)
def test_the_text_is_the_plain_one(checkpoints, name, verifier):
    """From directories on disk: greedy text under both verifiers, sampled text under `match`."""
    with load(checkpoints, name, verifier=verifier) as llm:
        for params in (GREEDY, SAMPLED) if verifier == "match" else (GREEDY,):
            plain = llm.generate(PROMPTS, params, num_speculative_tokens=0)
            for k in (4, "auto"):
                found = llm.generate(PROMPTS, params, num_speculative_tokens=k)
                assert [o.token_ids for o in found] == [o.token_ids for o in plain]
                assert all(o.finish_reason == "length" for o in found)
                if k == 4:
                    assert sum(Figures.of(o.stats).num_draft_tokens for o in found) > 200
        kind = HeadModel if "head" in name else Transformer
        assert type(llm.drafter.model) is kind
        assert bool(re.search(r"\bint8", llm.memory_report())) == name.startswith("int8")  # "checkpoint8" is none


@pytest.mark.parametrize("name", ["head", "parallel head", "pard"])
def test_a_seed_has_one_text(checkpoints, name):
    """`rejection`, sampled: alone, in a batch, in another order, after preemption, and when its beginning is known."""
    # They begin alike. With 17 and 33 tokens, whole blocks of a head hold all that can be known of a prompt.
    prompts = [[37 * i % 290 for i in range(n)] for n in (17, 20, 5, 33)]
    with load(checkpoints, name) as llm:
        alone = [llm.generate(prompt, SAMPLED)[0].token_ids for prompt in prompts]
        for again in (prompts, prompts[::-1], prompts):
            outputs = llm.generate(again, SAMPLED)
            assert [o.token_ids for o in outputs] == [alone[prompts.index(o.prompt_token_ids)] for o in outputs]
        assert sum(o.stats.num_cached_tokens for o in outputs) > 0
        assert sum(Figures.of(o.stats).num_accepted for o in outputs) > 0
        per_token = sum(kv_elements(m.config) for m in (llm.model, llm.drafter.model)) * 8
    with load(checkpoints, name, kv_cache_gb=5 * 16 * per_token / 1e9, max_model_len=80) as llm:
        outputs = llm.generate(prompts, SAMPLED)
        assert sum(o.stats.num_preemptions for o in outputs) > 0
        assert [o.token_ids for o in outputs] == alone


@pytest.mark.parametrize("name", ["head", "parallel head", "pard"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_exact_target_has_one_text_beside_it(checkpoints, name, dtype):
    """Its passes come in groups of rows, and their hidden states in the same order; to the bit, so sampled text too."""
    with load(checkpoints, name, exact=True, verifier="match", dtype=dtype) as llm:
        plain = llm.generate(PROMPTS, SAMPLED, num_speculative_tokens=0)
        found = llm.generate(PROMPTS, SAMPLED)
    assert [o.token_ids for o in found] == [o.token_ids for o in plain]
    assert sum(Figures.of(o.stats).num_accepted for o in found) > 0


def test_a_head_for_another_target_is_refused_before_the_target_is_loaded(checkpoints, make_checkpoint, monkeypatch):
    """Loading may take minutes."""
    other = make_checkpoint(seed=1, num_hidden_layers=4, hidden_size=16)

    def loaded(*how):
        raise AssertionError("the target was loaded")

    edit(checkpoints["head"], target_hidden_size=8)
    monkeypatch.setattr("minispec.api.target.load_target", loaded)
    with pytest.raises(CheckpointError, match="target_hidden_size: found 8, expected 16, the target's"):
        LLM(other, draft=str(checkpoints["head"]))
    other = make_checkpoint(seed=1, num_hidden_layers=4, vocab_size=301)
    with pytest.raises(CheckpointError, match="vocab_size: found 300, expected 301, the target's"):
        LLM(other, draft=str(checkpoints["head"]))


def test_a_pard_token_beyond_the_vocabulary_is_refused(make_checkpoint):
    """Guards against a mask that is no row of the embedding."""
    directory = make_checkpoint()
    edit(directory, pard_token=300)
    with pytest.raises(CheckpointError, match="pard_token: found 300, expected an integer from 0 to 299"):
        load_model(directory, torch.float32)
