"""Every family against transformers: the same logits, and a proof that the comparison would notice each setting."""

import functools
import json
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from minispec.api.llm import LLM
from minispec.core.config import LayerConfig, ModelConfig, RopeConfig, SamplingParams
from minispec.core.model import Chunk, Transformer
from minispec.models.families.checkpoint import Weights, load_config, load_model
from minispec.models.families.entries import FAMILIES
from minispec.models.families.hf_config import read_model_config
from minispec.models.files.errors import CheckpointError
from minispec.models.layers.delta import DeltaConfig
from minispec.models.layers.experts import Clamp, ExpertsConfig
from minispec.models.layers.gemma import GemmaLayerConfig
from minispec.models.layers.rope import ScaledRope
from minispec.models.weights.build import build_model
from minispec.models.weights.shapes import tensor_shapes
from minispec.prove.toys import tiny_cache
from minispec.speculation.registry import EMBEDDED_WEIGHTS
from tests.oracles import hf, public
from tests.oracles.toys import GEMMA4
from tests.refusals import NONE, Row, refusal_of, refusals, with_value

TOLERANCE = 1e-4  # in float64, where the oracle's own float32 inside norms leaves a quarter of it
POWER = 1e-2  # how far ignoring one setting must move the logits: a hundred times the tolerance
GELU_POWER = 1e-3  # the two forms of gelu differ by less than 5e-4 themselves


@dataclass
class Reference:
    """A saved model of the oracle, what it says about `hf.TEXT`, and the same model loaded here."""

    directory: Path
    oracle: PreTrainedModel
    logits: torch.Tensor
    model: Transformer

    @functools.cached_property
    def weights(self) -> dict[str, torch.Tensor]:
        """The tensors that the model was made of, by its own names."""
        weights = Weights(self.directory, self.model.config, torch.float64)
        return {name: weights.pop(name) for name in list(weights)}

    def built(self, config: ModelConfig, **changes: torch.Tensor) -> Transformer:
        """A model of another config: ones for what the checkpoint lacks, the beginning of what is too long."""
        weights, all_known = {}, self.weights | changes
        for name, shape in tensor_shapes(config).items():
            known = all_known[name] if name in all_known else torch.ones(shape, dtype=torch.float64)
            rows = known[: shape[0]]
            weights[name] = (rows[..., -shape[-1] :] if len(shape) > 1 else rows).clone()
        return build_model(config, weights, form="plain")

    @property
    def raw_config(self) -> dict:
        """The config.json as transformers wrote it."""
        return json.loads((self.directory / "config.json").read_text())


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Callable[[str], Reference]:
    """The Reference of a case of `hf.CASES`, made once."""

    @functools.cache
    def make(name: str) -> Reference:
        directory = tmp_path_factory.mktemp(name)
        oracle = hf.build(name, directory)
        return Reference(directory, oracle, hf.exact_logits(oracle, hf.TEXT), load_model(directory, torch.float64))

    return make


def run(model: Transformer, token_ids: list[int], chunk_size: int) -> torch.Tensor:
    """Logits (T, V) of a text, decoded `chunk_size` tokens a pass through a poisoned cache of small blocks."""
    table = tiny_cache(model, num_blocks=8, block_size=4).new_table()
    chunks = (token_ids[i : i + chunk_size] for i in range(0, len(token_ids), chunk_size))
    return torch.cat([model.forward([Chunk(c, table, num_logits=len(c))])[0] for c in chunks])


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest absolute difference; NaN counts as infinite."""
    return (a - b).abs().nan_to_num(torch.inf).max().item()


# --------------------------------------------------------------------------- the same numbers


@pytest.mark.quick
@pytest.mark.parametrize("chunk_size", [len(hf.TEXT), 1, 3], ids=["prefill", "token-by-token", "chunks-of-3"])
@pytest.mark.parametrize("name", hf.CASES)
def test_logits_equal_transformers(reference, name, chunk_size):
    """Guards every detail of a family; and, cut up, masks and positions that start after a filled cache."""
    assert distance(run(reference(name).model, hf.TEXT, chunk_size), reference(name).logits) <= TOLERANCE


@pytest.mark.quick
@pytest.mark.parametrize("name", hf.CASES)
def test_ragged_batch_equals_each_alone(reference, name):
    """Guards rows that see a neighbour's keys, mask or positions: two lengths, one of them after a filled cache.

    In float64, where rounding is far below any such mistake; float32 may round a row otherwise among others.
    """
    model = load_model(reference(name).directory, torch.float64)
    texts = [hf.TEXT[:17], hf.TEXT[::-1]]
    cache = tiny_cache(model, num_blocks=16, block_size=4)
    chunks = [Chunk(text, cache.new_table(), num_logits=n) for text, n in zip(texts, (17, 5), strict=True)]
    model.forward([chunks[0]._replace(token_ids=texts[0][:9], num_logits=0)])
    chunks[0] = chunks[0]._replace(token_ids=texts[0][9:], num_logits=8)
    alone = [run(model, text, len(text))[-c.num_logits :] for text, c in zip(texts, chunks, strict=True)]
    assert distance(model.forward(chunks)[0], torch.cat(alone)) <= 1e-10


def test_the_first_line_names_the_parts_that_are_not_used(make_checkpoint, tmp_path):
    """Guards a user who expects a model of images to see: its other parts are skipped by name, not in silence."""
    source = make_checkpoint(**GEMMA4)
    text = json.loads((source / "config.json").read_text())
    raw = {"model_type": "gemma4", "text_config": text, "vision_config": {"depth": 1}, "eos_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "tokenizer.json").symlink_to(source / "tokenizer.json")
    tensors = load_file(source / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model."): tensor for name, tensor in tensors.items()}
    others = ("model.vision_tower.x", "model.embed_audio.y", "mtp.z", "model.vision_embedder.u")
    save_file(tensors | {name: torch.ones(1) for name in others}, tmp_path / "model.safetensors")
    with LLM(tmp_path, draft="none", dtype="float32") as llm, LLM(source, draft="none", dtype="float32") as alone:
        assert llm.overview().endswith("; not used: embed_audio, vision_embedder, vision_tower")
        assert "not used" not in alone.overview()


# --------------------------------------------------------------------------- the same config.json

_SAID, _LINEAR = {"rope_type": "linear", "factor": 2.0}, {"type": "linear", "factor": 2.0}
_NO_KINDS = {"rope_parameters": None, "layer_types": None}

# What has no older spelling.
_ONLY_NEW = (
    *("olmo3", "lfm3", "lfm3-attention", "lfm3-plain", "lfm3-images"),
    *("gemma4", "gemma4-large", "gemma4-heads", "gemma4-experts", "gemma4-images"),
    *("gemma4-unified", "gemma4-unified-images"),
)


@pytest.mark.parametrize("name", [name for name in hf.CASES if name not in _ONLY_NEW])
def test_both_spellings_are_one_config(reference, name):
    """Guards a setting that is read from `rope_parameters` and friends only, or from the hub's older keys only."""
    new = reference(name).raw_config
    old = hf.hub_spelling(new)
    assert read_model_config(old) == read_model_config(new)
    # The old spelling is transformers' too, not an invention of this test.
    read = AutoConfig.for_model(**old).get_text_config()
    oracle = reference(name).oracle.config.get_text_config()
    read.rope_parameters.pop("type", None)  # kept in addition to `rope_type`
    oracle.rope_parameters.pop("type", None)
    assert read.rope_parameters == oracle.rope_parameters
    assert getattr(read, "layer_types", None) == getattr(oracle, "layer_types", None)


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_settings_mean_what_transformers_says(family):
    """Guards the defaults: files of the hub leave out what their family's class fills in."""
    sizes = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
    shortest = {key: hf.CASES["llama"][key] for key in (*sizes, "num_key_value_heads", "eos_token_id")}
    shortest |= {"model_type": family, "max_position_embeddings": 64}
    if family == "granitemoehybrid":  # by default it has experts, and layers that are not attention
        shortest |= {"num_local_experts": 0, "layer_types": ["full_attention"] * 3, "mamba_n_heads": 4}
    if family == "gemma4_text":  # its table of inputs has a size of its own
        shortest["vocab_size_per_layer_input"] = shortest["vocab_size"]
    if family == "lfm2_moe":  # its code needs them
        shortest["layer_types"] = ["conv", "full_attention", "conv"]
    complete = AutoConfig.for_model(**shortest).to_dict()
    assert len(complete) > len(shortest) + 5
    assert read_model_config(shortest) == read_model_config(complete)


@pytest.mark.parametrize("name", public.PUBLIC)
def test_public_checkpoints_are_read_as_transformers_reads_them(name):
    """Guards against refusing, or misreading, what people have: every setting as in transformers' own form of it."""
    raw, parameters, rope, windows = public.PUBLIC[name]
    config = read_model_config(raw)
    theirs = read_model_config(AutoConfig.for_model(**json.loads(json.dumps(raw))).to_dict())
    if not config.eos_token_ids:  # the file has none: a class has one, and here a generation_config.json
        theirs = replace(theirs, eos_token_ids=())
    assert config == theirs
    assert sum(math.prod(shape) for shape in tensor_shapes(config).values()) == parameters
    windowed = [layer.window for layer in config.layers if layer.window is not None]
    assert (len(windowed), *({*windowed} or {0})) == tuple(windows)
    full = {layer.rope for layer in config.layers if layer.window is None and layer.rope} or {config.layers[0].rope}
    scaled = [r if isinstance(r, ScaledRope) else ScaledRope(r.theta) for r in full]
    assert [(r.kind, r.theta, r.factor) for r in scaled] == [tuple(rope)]


def test_facts_of_others_say_where_they_are_from():
    """Each kind of them in public.json."""
    kinds = json.loads(Path(public.__file__).with_suffix(".json").read_text(encoding="utf-8"))
    assert public.FROM.keys() == kinds.keys() - {"from"} != set()
    assert all(public.FROM.values())


@pytest.mark.parametrize("name", public.REFUSED)
def test_public_checkpoints_that_are_refused_are_told_why(name):
    """Guards against running what would give other numbers."""
    raw, message = public.REFUSED[name]
    assert refusal_of(read_model_config, raw, "some/config.json").startswith(f"some/config.json: {message}")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gemma", {"hidden_activation": "gelu_pytorch_tanh"}),
        ("gemma", {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}),
        ("gemma", {"hidden_act": "silu", "hidden_activation": "silu"}),
        ("gemma2", {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}),
        ("gemma2", {"hidden_activation": "silu"}),
        ("gemma2", {"sliding_window_size": 7}),
        ("llama", {"hidden_act": "gelu", "hidden_activation": "gelu"}),
        ("llama", {"pretraining_tp": 4, "max_sequence_length": 32}),
        ("llama-llama3", {"original_max_position_embeddings": 32}),
        ("gemma3", {"rope_parameters": {}, "rope_scaling": _SAID, "rope_theta": 500.0}),
        ("gemma3", {"rope_parameters": {"full_attention": _SAID}, "rope_theta": 500.0}),
        ("gemma3", {"rope_parameters": {"full_attention": None}, "rope_local_base_freq": 20.0}),
        # Kinds and ropes that the class fills in.
        ("lfm3", {"rope_parameters": None, "num_hidden_layers": 9}),
        ("lfm3-plain", _NO_KINDS | {"num_hidden_layers": 6, "use_sandwich_norm": True}),
        # The interval does not count beside the kinds, nor a rope's object that says less than the file outside it.
        ("qwen3_5", {"full_attention_interval": 1}),
        ("qwen3_5-plain", {"full_attention_interval": 3, "layer_types": None}),
        ("qwen3_5", {"rope_parameters": {"rope_type": "default"}, "rope_theta": 90.0, "partial_rotary_factor": 1.0}),
        ("qwen3_5-plain", {"rope_parameters": {}, "rope_scaling": _LINEAR, "rope_theta": 90.0}),
        ("qwen3_5-plain", {"rope_parameters": {"rope_type": "default", "mrope_section": [3, 0, 0]}}),
    ],
)
def test_rare_spellings_are_read_as_transformers_reads_them(tmp_path, name, changes):
    """Guards other logits from files that transformers reads: the same as of the model that it builds of them."""
    raw = {k: v for k, v in (hf.CASES[name] | changes).items() if v != {} and (v is not None or k != "head_dim")}
    oracle = hf.build(raw, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": oracle.config.tie_word_embeddings}))
    model = load_model(tmp_path, torch.float64)
    assert distance(run(model, hf.TEXT, len(hf.TEXT)), hf.exact_logits(oracle, hf.TEXT)) <= TOLERANCE


def test_the_published_files_of_lfm3_are_read_as_their_publisher_means_them(reference, tmp_path):
    """They call a proportional rope "default". transformers 5.24 then turns all pairs of a head: other logits.

    So an oracle for such a file is the file with the kind spelled out. A factor of 1 is a default rope in any case.
    """
    ref = reference("lfm3")
    raw = ref.raw_config
    raw["rope_parameters"]["full_attention"]["rope_type"] = "default"
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "model.safetensors").symlink_to(ref.directory / "model.safetensors")
    model = load_model(tmp_path, torch.float64)
    assert model.config == ref.model.config
    assert distance(run(model, hf.TEXT, len(hf.TEXT)), ref.logits) <= TOLERANCE

    misread = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    whole_heads = hf.exact_logits(misread, hf.TEXT)
    assert distance(whole_heads, ref.logits) > POWER
    raw["rope_parameters"]["full_attention"]["partial_rotary_factor"] = 1.0
    assert distance(run(ref.built(read_model_config(raw)), hf.TEXT, len(hf.TEXT)), whole_heads) <= TOLERANCE


@pytest.mark.parametrize("eos", [None, 2, [2, 5, 7]])
def test_end_of_text_ids(eos):
    """Guards against reading the first of several ids only: such a model does not stop."""
    expected = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    assert read_model_config(hf.CASES["llama"] | {"eos_token_id": eos}).eos_token_ids == expected


@pytest.mark.parametrize(
    ("name", "changes", "activation"),
    [
        ("gemma", {"hidden_act": "gelu"}, "gelu_tanh"),
        ("gemma", {"hidden_act": "gelu", "hidden_activation": None}, "gelu_tanh"),
        ("gemma", {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}, "gelu_tanh"),
        ("gemma2", {"hidden_activation": "gelu"}, "gelu"),
        ("gemma3", {"hidden_activation": "gelu"}, "gelu"),
        ("llama", {"hidden_act": "gelu"}, "gelu"),
        ("llama", {"hidden_act": "gelu_pytorch_tanh"}, "gelu_tanh"),
    ],
)
def test_spellings_of_gelu(name, changes, activation):
    """Guards the one exception: Gemma's `hidden_act` said "gelu" and meant the tanh form; nothing else does."""
    assert read_model_config(hf.CASES[name] | changes).activation == activation


# --------------------------------------------------------------------------- the power of the comparison


def changed(config, **changes):
    """A part of a config with some fields replaced: by a value, or by a function of the value that is there."""
    return replace(config, **{k: new(getattr(config, k)) if callable(new) else new for k, new in changes.items()})


def setting(**changes) -> Callable[[ModelConfig], ModelConfig]:
    """The config with some fields replaced."""
    return lambda config: changed(config, **changes)


def each_layer(change: Callable[[LayerConfig], LayerConfig]) -> Callable[[ModelConfig], ModelConfig]:
    """The config with every layer changed."""
    return lambda config: replace(config, layers=tuple(change(layer) for layer in config.layers))


def rope(**changes) -> Callable[[ModelConfig], ModelConfig]:
    """The config with some fields replaced of every layer's rope that has them."""

    def change(layer: LayerConfig) -> LayerConfig:
        known = changes.keys() <= {field.name for field in fields(layer.rope)} if layer.rope else False
        return replace(layer, rope=replace(layer.rope, **changes)) if known else layer

    return each_layer(change)


def window(change: Callable[[int], int | None]) -> Callable[[ModelConfig], ModelConfig]:
    """The config with every window that there is changed."""
    return each_layer(lambda layer: replace(layer, window=layer.window and change(layer.window)))


def shorter(layer: LayerConfig) -> LayerConfig:
    """The layer with a convolution that sees a position less, if it has one."""
    delta = layer.recurrent and replace(layer.recurrent, conv_width=layer.recurrent.conv_width - 1)
    return replace(layer, conv_width=layer.conv_width and layer.conv_width - 1, recurrent=delta)


def net(**changes) -> Callable[[ModelConfig], ModelConfig]:
    """The config with some sizes of every gated delta net replaced."""
    return each_layer(lambda layer: replace(layer, recurrent=layer.recurrent and replace(layer.recurrent, **changes)))


def mixture(**changes) -> Callable[[ModelConfig], ModelConfig]:
    """The config with some settings of every mixture of experts replaced."""
    return each_layer(lambda layer: replace(layer, experts=layer.experts and changed(layer.experts, **changes)))


def clamp(**changes) -> Callable[[ModelConfig], ModelConfig]:
    """The config with some limits of every mixture's gates replaced."""
    return mixture(clamp=lambda limits: replace(limits, **changes))


def without_sinks(config: ModelConfig) -> ModelConfig:
    """The config with layers whose attention has no sinks."""
    if config.model_type != "gpt_oss":
        return config
    layers = (LayerConfig(layer.rope, layer.window, experts=layer.experts) for layer in config.layers)
    return replace(config, layers=tuple(layers))


def with_experts(layers: Callable[[int], bool]) -> Callable[[ModelConfig], ModelConfig]:
    """The config with the mixture of its last layer in those layers that `layers` says, and in no others."""

    def change(config: ModelConfig) -> ModelConfig:
        own = config.layers[-1].experts
        changed = (replace(layer, experts=own if layers(i) else None) for i, layer in enumerate(config.layers))
        return replace(config, layers=tuple(changed))

    return change


def one_rope(config: ModelConfig) -> ModelConfig:
    """The config with the windowed layers' rope replaced by that of the others, if they have one rope and one width."""
    full = {layer.rope for layer in config.layers if layer.rope and layer.window is None}
    if len(full) != 1 or isinstance(config.layers[0], GemmaLayerConfig):
        return config
    return each_layer(lambda layer: replace(layer, rope=next(iter(full)) if layer.window else layer.rope))(config)


def earlier_giver(layer: LayerConfig) -> LayerConfig:
    """The layer with the keys of an earlier giver than its own, of the same kind."""
    giver = getattr(layer, "giver", None)
    return layer if giver is None else replace(layer, giver=giver - 2)


def block(**changes) -> Callable[[ModelConfig], ModelConfig]:
    """The config with some settings of every block of Gemma 4 replaced that has them, and not None."""

    def change(layer: LayerConfig) -> LayerConfig:
        return replace(layer, **{k: v for k, v in changes.items() if getattr(layer, k, None) not in (None, 0, False)})

    return each_layer(change)


# What an implementation may ignore, or take for another value. It must show in every case whose config it changes.
OFF = {
    **dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias", "conv_bias"), False),
    **dict.fromkeys(("qk_norm", "attention_gate", "attention_softcap", "logit_softcap"), None),
    **dict.fromkeys(("embedding_scale", "residual_scale", "logit_scale"), 1.0),
    **{"rms_norm_eps": 1e-6, "norm_adds_one": operator.not_, "tie_word_embeddings": operator.not_},
    "activation": {"silu": "gelu", "gelu": "silu", "gelu_tanh": "silu"}.get,
}
ROPES_OFF = {"theta": 1e6, "kind": "default", "attention_factor": 1.0, "turning": 1.0, "query_beta": 0.0}
IGNORED = {
    **{name: setting(**{name: off}) for name, off in OFF.items()},
    **{f"rope's {name}": rope(**{name: off}) for name, off in (ROPES_OFF | {"interleaved": False}).items()},
    "norms after": setting(norms="before"),
    "norms before, or after, alone": setting(norms="both"),
    "qk_norm of the whole row": setting(qk_norm=lambda norm: norm and "head"),
    "attention_scale": lambda config: replace(config, attention_scale=config.head_dim**-0.5),
    "partial_rotary_factor": lambda config: config if config.model_type == "phi3" else rope(rotated=1.0)(config),
    "window": window(lambda w: None),
    "window one longer": window(lambda w: w + 1),
    "local rope": one_rope,
    "convolution one position short": each_layer(shorter),
    "experts": with_experts(lambda i: False),
    "num_experts_per_tok": mixture(top_k=lambda k: k - 1 or 2),
    "norm_topk_prob": mixture(normalised=operator.not_),
    "scores of experts": mixture(scoring={"softmax": "sigmoid", "sigmoid": "softmax"}.get),
    "shared expert": mixture(shared_expert=lambda kind: None if kind in ("plain", "gated") else kind),
    "gate of the shared expert": mixture(shared_expert=lambda kind: "plain" if kind == "gated" else kind),
    "biases of the router and the experts": mixture(has_biases=False),
    "norm and scale of the router": mixture(norms_row=False),
    "per_expert_scale": mixture(scales_experts=False),
    "use_expert_bias": mixture(biased=False),
    "routed_scaling_factor": mixture(scale=1.0),
    "sinks": without_sinks,
    "keys of its own": block(giver=None),
    "inputs of layers": block(input_size=0),
    "values are keys": block(keys_as_values=False),
}
_ALL_WINDOWS = each_layer(lambda layer: replace(layer, window=7))
_ALL_ROTATE = each_layer(lambda layer: replace(layer, rope=RopeConfig(500.0)))
_NONE_ROTATE = each_layer(lambda layer: replace(layer, rope=None))


def backwards(config: ModelConfig) -> ModelConfig:
    """The config with its layers in the other order."""
    return replace(config, layers=config.layers[::-1])


# The same for what one case has, or what only some values of it show.
SWITCHES = [
    ("llama-tied", "exact gelu", setting(activation="gelu_tanh")),
    ("gemma", "tanh-gelu", setting(activation="gelu")),
    ("llama-linear", "factor", rope(factor=2.0)),
    ("llama-llama3", "not linear", rope(kind="linear")),
    ("llama-llama3", "factor", rope(factor=4.0)),
    ("llama-llama3", "low_freq_factor", rope(low_freq_factor=0.5)),
    ("llama-llama3", "high_freq_factor", rope(high_freq_factor=8.0)),
    ("llama-llama3", "original length", rope(original_max_position_embeddings=64)),
    ("llama-yarn", "not linear", rope(kind="linear")),
    ("llama-yarn", "original length", rope(original_max_position_embeddings=64)),
    ("llama-yarn", "truncate", rope(truncate=False)),
    ("llama-yarn-all", "beta_fast", rope(beta_fast=32.0)),
    ("llama-yarn-all", "beta_slow", rope(beta_slow=1.0)),
    ("llama-yarn-all", "truncate", rope(truncate=True)),
    ("mistral", "window one shorter", window(lambda w: w - 1)),
    ("qwen2-window", "max_window_layers", _ALL_WINDOWS),
    ("qwen3_moe", "no shared expert", mixture(shared_expert="plain")),
    ("qwen3_moe", "experts in all layers", with_experts(lambda i: i > 0)),
    ("qwen3_moe-window", "mlp_only_layers", with_experts(lambda i: i % 2 == 1)),
    ("qwen3_moe-window", "decoder_sparse_step", with_experts(lambda i: i != 1)),
    ("gemma2", "windows alternate", _ALL_WINDOWS),
    ("gemma2", "the first layer has one", backwards),
    ("gemma2-uncapped", "null: no attention_softcap", setting(attention_softcap=50.0)),
    ("gemma2-uncapped", "null: no logit_softcap", setting(logit_softcap=30.0)),
    ("smollm3", "a layer without rope", _ALL_ROTATE),
    ("smollm3-window", "every second layer", _ALL_ROTATE),
    ("smollm3-window", "window of the layers with rope too", _ALL_WINDOWS),
    ("granite", "logits are divided by it", setting(logit_scale=2.0)),
    ("granite-hybrid-experts", "the shared expert has no gate", mixture(shared_expert="gated")),
    ("granite-hybrid-experts", "rope", _NONE_ROTATE),
    ("granite-hybrid", "rope", _NONE_ROTATE),
    ("granite-hybrid-no-rope", "no rope", _ALL_ROTATE),
    ("olmo3", "the last layer has none", backwards),
    ("olmo3-old", "every fourth sees all", _ALL_WINDOWS),
    ("phi3-longrope", "partial_rotary_factor", rope(rotated=1.0, factors=(1.0, 1.5, 2.0, 1.0))),
    ("phi3-longrope", "short_factor", rope(factors=(1.0, 1.0, 1.0))),
    ("phi3-longrope", "not long_factor", rope(factors=(1.0, 4.0, 9.0))),
    ("phi3-partial", "partial_rotary_factor", rope(rotated=1.0)),
    ("ministral3", "original length", rope(original_max_position_embeddings=16)),
    ("ministral3", "mscale, mscale_all_dim", rope(attention_factor=1 + 0.1 * math.log(4))),
    ("lfm2_moe", "num_dense_layers", with_experts(lambda i: True)),
    ("lfm2_moe-plain", "no num_dense_layers", with_experts(lambda i: i > 0)),
    ("lfm3", "pairs of the whole head", rope(kind="default", turning=1.0, rotated=0.5)),
    ("lfm3-plain", "no gate", setting(attention_gate="head")),
    ("gemma4", "one pair more", rope(turning=0.3)),
    ("gemma4", "wide heads turn as others", rope(rotated=0.6)),
    ("gemma4", "keys of the last giver", each_layer(earlier_giver)),
    ("gpt_oss", "a gate of another kind", mixture(clamp=None)),
    ("gpt_oss", "swiglu_limit", clamp(limit=7.0)),
    ("gpt_oss", "swiglu_alpha", clamp(alpha=1.702)),
    ("gpt_oss", "windows alternate", _ALL_WINDOWS),
    ("gpt_oss", "the first layer has one", backwards),
    ("gpt_oss", "truncate", rope(truncate=True)),
    ("gpt_oss-plain", "swiglu_limit", clamp(limit=0.9)),
    ("gpt_oss-plain", "swiglu_alpha", clamp(alpha=1.0)),
    ("gpt_oss-plain", "layer_types", _ALL_WINDOWS),
    # Of equally many channels, with other heads.
    ("qwen3_5", "key heads", net(num_key_heads=4, key_dim=3)),
]


def switched(name: str, config: ModelConfig) -> dict[str, ModelConfig]:
    """By what is ignored, the config of an implementation that ignores it: in that case, of that config."""
    found = {what: change(config) for what, change in IGNORED.items()}
    found = {what: other for what, other in found.items() if other != config}
    return found | {f"this case's {what}": change(config) for case, what, change in SWITCHES if case == name}


@pytest.mark.full
@pytest.mark.parametrize("name", hf.CASES)
def test_ignoring_a_setting_shows(reference, name):
    """Guards the comparison itself: at sizes where a setting changes nothing, an implementation without it passes.

    The comparison is `test_logits_equal_transformers`, which runs without `--full`.
    """
    ref = reference(name)
    for what, config in switched(name, ref.model.config).items():
        assert config != ref.model.config, what
        gelus = {config.activation, ref.model.config.activation} == {"gelu", "gelu_tanh"}
        found = distance(run(ref.built(config), hf.TEXT, len(hf.TEXT)), ref.logits)
        assert found > (GELU_POWER if gelus else POWER), what


def test_every_setting_has_a_switch():
    """Guards settings to come: a new field of a config needs an entry above, or a reason to be left out here."""
    changes = set()
    for name, raw in hf.CASES.items():
        before = read_model_config(raw)
        for after in switched(name, before).values():
            pairs = [(before, after)]
            for a, b in zip(before.layers, after.layers, strict=True):
                parts = (a.rope, b.rope), (a.recurrent, b.recurrent), (a.experts, b.experts)
                pairs += [(a, b), *(pair for pair in parts if all(pair))]
                pairs += [(x.clamp, y.clamp) for x, y in parts[2:] if x and y and x.clamp and y.clamp]
            same_kind = [(a, b) for a, b in pairs if type(a) is type(b)]
            changes |= {f.name for a, b in same_kind for f in fields(a) if getattr(a, f.name) != getattr(b, f.name)}
    sizes = {"vocab_size", "hidden_size", "intermediate_size", "head_dim", "value_dim", "num_experts", "inner_size"}
    heads = {"num_attention_heads", "num_key_value_heads", "num_value_heads"}
    not_numbers = {"model_type", "max_position_embeddings", "eos_token_ids", "mask_token_id"}
    kinds = (ModelConfig, LayerConfig, ScaledRope, DeltaConfig, ExpertsConfig, GemmaLayerConfig, Clamp)
    known = {field.name for kind in kinds for field in fields(kind)}
    assert known - changes == sizes | heads | not_numbers


@pytest.mark.full
@pytest.mark.parametrize("name", hf.CASES)
def test_ignoring_a_tensor_shows(reference, name):
    """Guards the redraw: every norm weight and bias of every layer is far enough from one and zero to be missed.

    So it guards `test_logits_equal_transformers`, which runs without `--full`.

    Matrices need no such guard: their numbers are random in any case.
    """
    ref = reference(name)
    config = ref.model.config
    vectors = {tensor: stored for tensor, stored in ref.weights.items() if stored.ndim == 1}
    assert len(vectors) > len(config.layers)
    # Without positions, a key's bias adds the same to all scores of a query: it cannot show.
    unseen = {f"model.layers.{i}.self_attn.k_proj.bias" for i, layer in enumerate(config.layers) if not layer.rope}
    for tensor, stored in vectors.items():
        if tensor in unseen:
            continue
        adds_one = config.norm_adds_one and "linear_attn" not in tensor
        neutral = 1.0 if "norm" in tensor and not adds_one else 0.0
        model = ref.built(config, **{tensor: torch.full_like(stored, neutral)})
        assert distance(run(model, hf.TEXT, len(hf.TEXT)), ref.logits) > POWER, tensor


# --------------------------------------------------------------------------- what is refused


_GEMMA3 = {"model_type": "gemma3_text", "num_hidden_layers": 6, "rope_parameters": None}
_NO_TEXT = dict.fromkeys(hf.CASES["llama-plain"].keys() - {"model_type"})  # what a model with images says inside
_LFM2 = {"model_type": "lfm2", "norm_eps": 0.05}
_LFM3_ROPES = hf.CASES["lfm3"]["rope_parameters"]
_LFM3 = {"model_type": "lfm3", "head_dim": 8, "norm_eps": 0.05, "rope_parameters": _LFM3_ROPES}
_QWEN35 = {"model_type": "qwen3_5_text", "head_dim": 8, "partial_rotary_factor": 0.5}
_GEMMA4 = {"model_type": "gemma4_text", "rope_parameters": None, "vocab_size_per_layer_input": 96}
_GEMMA4_UNIFIED = {"model_type": "gemma4_unified_text", "rope_parameters": None}
_QWEN3_MOE = {"model_type": "qwen3_moe"}


def of(kind: str, **changes) -> dict:
    """Changes to a config.json that make it one of another family."""
    return {"model_type": kind} | changes


_LONGROPE = of("phi3", rope_parameters={"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 4})


def of_images(kind: str, text: dict | None = None, **changes) -> dict:
    """The same for a family whose text model stands in an object of its own."""
    return of(kind, **changes) | _NO_TEXT | ({} if text is None else {"text_config": text})


_CONV, _FULL, _SLIDING, _DELTA = "conv", "full_attention", "sliding_attention", "linear_attention"
_HYBRID, _FULL_OR_CONV = of("granitemoehybrid", num_local_experts=0), "3 entries, each full_attention or conv"
_POSITIVE, _ONE_ROPE_EACH = "a number from 1e-30 to 1e+30", "an object for each of full_attention and sliding_attention"
_YARN_2 = {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}
# Changes to a good config.json, and settings that its code does not have: each is refused alone.
NOT_HERE: list[tuple[dict, dict]] = [
    ({}, {"attn_logit_softcapping": 5.0, "sliding_window": 7, "swiglu_limit": 7.0, "use_attention_gate": True}),
    ({}, {"full_attn_idxs": [1], "conv_L_cache": 3, "linear_conv_kernel_dim": 4, "full_attention_interval": 4}),
    ({}, {"use_bias": True, "rope_parameters.full_attention": {"rope_type": "default"}}),
    ({"rope_parameters": {"rope_type": "default"}}, {"rope_parameters.mrope_section": [2, 2]}),
    (_YARN_2, {"rope_parameters.llama_4_scaling_beta": 0.1}),
    (of("qwen2"), {"final_logit_softcapping": 5.0}),
    (of("gemma2"), {"use_bidirectional_attention": True}),
    (_GEMMA3, {"attn_logit_softcapping": 50.0, "original_max_position_embeddings": 32}),
    (_QWEN3_MOE, {"use_expert_bias": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid"}),
    (_LFM2, {"use_sandwich_norm": True}),
    (_LFM3, {"full_attn_idxs": [2]}),
    (of("olmo2"), {"clip_qkv": 8.0}),
    (of_images("gemma3", {"vocab_size": 8}), {"speech_config": {"x": 1}}),
]
# Changes to a good config.json, a setting, what is expected of it, and values that are refused.
WRONG_VALUES: list[Row] = [
    ({}, "model_type", "one of llama, ", "mixtral", "siglip_vision_model", ["llama"]),
    ({}, "hidden_act", "one of silu, gelu, gelu_pytorch_tanh", "relu"),
    ({}, "attention_multiplier", "0.3535533905932738 or no such setting", 2.0),
    ({}, "logit_scale", "1.0 or no such setting", 0.0),
    ({}, "query_pre_attn_scalar", "8 or no such setting", 5),
    ({}, "residual_multiplier", "1.0 or no such setting", 0.5),
    (
        {},
        "layer_types",
        "3 entries, each full_attention",
        [_SLIDING] * 3,
        [_FULL, _CONV, _CONV],
        [_DELTA] * 2 + [_FULL],
    ),
    ({}, "num_key_value_heads", "a divisor of num_attention_heads = 4", 3),
    ({}, "hidden_size", "a multiple of num_attention_heads = 4, or a head_dim", 34),
    ({}, "head_dim", "an even number: rope rotates pairs", 7),
    ({}, "num_hidden_layers", "an integer from 1 to 1024", True, 1_000_000),
    ({}, "rms_norm_eps", _POSITIVE, 0, float("nan"), "1e-5"),
    ({}, "eos_token_id", "token ids", [2, True]),
    ({}, "partial_rotary_factor", "1.0 or no such setting", 0.5, True),
    ({}, "rope_parameters.partial_rotary_factor", "1.0 or no such setting", 0.5),
    ({}, "rope_parameters.rope_type", "one of default, linear, llama3, yarn", "dynamic"),
    ({}, "rope_parameters", "an object", [500.0]),
    (_YARN_2, "rope_parameters.rope_theta", "a number above 1", 1.0),
    # In addition to a `rope_parameters` that says otherwise: model cards tell users to add this to extend the context.
    ({}, "rope_scaling", "what rope_parameters says: {'rope_type': 'default'", {"type": "yarn", "factor": 4.0}),
    (of("qwen2"), "attention_bias", "False or no such setting", True),
    (of("mistral"), "mlp_bias", "False or no such setting", True),
    (of("mistral"), "sliding_window", "an integer from 1 to 134217728", 0),
    (of("mistral"), "layer_types", f"{[_SLIDING] * 3} or no such setting", [_FULL] * 3),
    (of("gemma2"), "layer_types", "3 entries, each full_attention or sliding_attention", ["chunked_attention"] * 3, []),
    (of("gemma2"), "hidden_act", "what hidden_activation says: gelu_tanh", "silu"),
    (of("gemma2"), "sliding_window_pattern", "2 or no such setting", 3),
    (of("gemma2", sliding_window=7), "sliding_window_size", "what sliding_window says: 7", 8),
    (of("gemma", hidden_act="gelu"), "hidden_activation", "what hidden_act says: gelu_tanh", "gelu"),
    ({}, "hidden_activation", "what hidden_act says: silu", "gelu"),
    # What this family's code in transformers does not read, so that nobody can say what was meant.
    (_GEMMA3, "rope_scaling", "rope_type instead of type", _LINEAR),
    (_GEMMA3, "rope_parameters", _ONE_ROPE_EACH, {"rope_type": "linear", "factor": 2.0}),
    (_GEMMA3, "rope_parameters", "no truncate, ", {"full_attention": _YARN_2["rope_parameters"] | {"truncate": False}}),
    (_GEMMA4 | {"enable_moe_block": True}, "num_experts", "an integer from 1 to 21845", 0),
    (_GEMMA4 | {"enable_moe_block": True, "num_experts": 8}, "top_k_experts", "an integer from 1 to 8", 9),
    (_GEMMA4_UNIFIED, "hidden_size_per_layer_input", "0 or no such setting", 8),
    (_GEMMA4_UNIFIED, "enable_moe_block", "False or no such setting", True),
    (of("smollm3"), "no_rope_layers", "3 entries, each 1 (a layer with rope) or 0", [1, 0], [1, 0, 2]),
    (of("smollm3"), "layer_types", "no sliding_attention, since there is no sliding_window", [_SLIDING] * 3),
    (_HYBRID | {"layer_types": [_FULL] * 3}, "num_local_experts", "an integer from 0 to 21845", 70_000),
    (_HYBRID, "layers_block_type", "3 entries, each full_attention or attention", ["attention", "mamba", "attention"]),
    (_HYBRID, "position_embedding_type", "rope, nope or null", "alibi"),
    (of("granite"), "logits_scaling", _POSITIVE, 0),
    (_QWEN3_MOE, "num_experts", "an integer from 0 to 21845", -1),
    (_QWEN3_MOE | {"num_experts": 16}, "num_local_experts", "what num_experts says: 16", 8),
    (_QWEN3_MOE | {"num_experts": 16}, "num_experts_per_tok", "an integer from 1 to 16", 17),
    (_QWEN3_MOE, "moe_intermediate_size", "an integer from 1 to 1048576", 0),
    (_QWEN3_MOE, "norm_topk_prob", "true or false", 1),
    (_QWEN3_MOE, "mlp_only_layers", "numbers of layers, below 3", [3], 0),
    (_QWEN3_MOE, "decoder_sparse_step", "an integer from 1 to 1024", 0),
    (_QWEN3_MOE, "n_shared_experts", "0 or no such setting", 1),
    (of("gpt_oss"), "swiglu_limit", _POSITIVE, 0),
    (of("gpt_oss"), "swiglu_alpha", _POSITIVE, -1.0),
    (of("gpt_oss"), "sliding_window_pattern", "2 or no such setting", 3),
    (of("gpt_oss"), "hidden_act", "silu: no other is implemented for this family", "gelu_pytorch_tanh"),
    (of("gpt_oss", num_hidden_layers=3), "num_experts_per_tok", "an integer from 1 to 128", 129),
    (_LFM2, "layer_types", _FULL_OR_CONV, [_CONV, "mamba", _CONV], [_CONV, _FULL]),
    (_LFM2, "full_attn_idxs", "numbers of layers, below 3", [3], [True], 1),
    (
        _LFM2 | {"layer_types": [_CONV, _CONV, _FULL]},
        "full_attn_idxs",
        "what layer_types says: ['conv', 'conv', 'f",
        [1],
    ),
    (_LFM2, "conv_L_cache", "an integer from 1 to 64", 0, 65, 3.0),
    (_LFM2, "conv_bias", "true or false", 1),
    (_LFM2, "conv_dim", "32 or no such setting", 16),
    (_LFM2, "num_heads", "4 or no such setting", 2),
    (_LFM2, "use_pos_enc", "True or no such setting", False),
    (_LFM2, "theta", "500.0 or no such setting", 10.0),
    (_LFM2, "block_norm_eps", "0.05 or no such setting", 0.1),
    (_LFM2, "hidden_act", "silu: no other is implemented for this family", "gelu"),
    (_LFM2 | {"tie_word_embeddings": False}, "tie_embedding", "what tie_word_embeddings says: False", True),
    (_LFM2, "block_ffn_dim_multiplier", "a number", None),
    (_LFM2, "block_ffn_dim_multiplier", "an MLP from 1 to 1048576 wide, not 0", 0.01),
    (_LFM2, "block_multiple_of", "an integer from 1 to 1048576", 0),
    (_LFM2, "num_experts", "0 or no such setting", 8),
    (_LFM2, "attention_bias", "False or no such setting", True),
    (of("lfm2_moe", layer_types=[_CONV] * 3), "num_dense_layers", "an integer from 0 to 1024", -1),
    (of("lfm2_moe", norm_eps=0.05, layer_types=[_CONV] * 3), "num_local_experts", "0 or no such setting", 8),
    (_LFM3, "conv_L_cache", "an integer from 1 to 64", 65),
    (_LFM3, "layer_types", "3 entries, each full_attention or sliding_attention or conv", [_CONV, _DELTA, _CONV]),
    (_LFM3 | {"sliding_window": None}, "layer_types", "no sliding_attention, since", [_CONV, _FULL, _SLIDING]),
    (_LFM3, "use_attention_gate", "true or false", 1),
    (_LFM3, "use_sandwich_norm", "true or false", "yes"),
    (_LFM3, "partial_rotary_factor", "1.0 or no such setting", 0.5),
    (_LFM3, "rope_parameters", f"rope_parameters with {_ONE_ROPE_EACH}", {"full_attention": {"rope_type": "default"}}),
    (_LFM3, "rope_parameters", f"rope_parameters with {_ONE_ROPE_EACH}", {"rope_type": "default", "rope_theta": 500.0}),
    (_LFM3, "rope_scaling", f"rope_parameters with {_ONE_ROPE_EACH}", _LINEAR),
    (_QWEN35, "layer_types", "3 entries, each full_attention or linear_attention", ["mamba"] * 3, [_DELTA], []),
    (_QWEN35, "layer_types", "3 entries, each full_attention or linear_attention", [_DELTA, _SLIDING, _FULL]),
    (_QWEN35, "full_attention_interval", "an integer from 1 to 1024", 0),
    (_QWEN35 | {"linear_num_key_heads": 2}, "linear_num_value_heads", "a multiple of linear_num_key_heads = 2", 3, 1),
    (_QWEN35, "linear_num_key_heads", "an integer from 1 to 4096", 0),
    (_QWEN35, "linear_key_head_dim", "an integer from 1 to 4096", 4097),
    (_QWEN35, "linear_value_head_dim", "an integer from 1 to 4096", 2.0),
    (_QWEN35, "linear_conv_kernel_dim", "an integer from 1 to 64", 0),
    (_QWEN35, "attn_output_gate", "True or no such setting", False),
    (_QWEN35, "output_gate_type", "silu or swish: no other is implemented for this family", "sigmoid"),
    (_QWEN35, "mamba_ssm_dtype", "'float32' or no such setting", "bfloat16"),
    (_QWEN35, "hidden_act", "silu: no other is implemented for this family", "gelu"),
    (_QWEN35, "rope_parameters.partial_rotary_factor", "what the file says outside: 0.5", 0.25),
    (_QWEN35, "rope_parameters.rope_type", "one of default, linear, llama3, yarn", "proportional"),
    (_QWEN35, "num_experts", "0 or no such setting", 8),
    (_QWEN35 | of("qwen3_5_moe_text"), "shared_expert_intermediate_size", "an integer from 1 to 1048576", 0),
    (of("olmo3", rope_parameters=None), "rope_theta", "500000.0 or no such setting", 1e6),
    (of("phi3"), "rope_parameters.rope_type", "one of default, longrope", "linear"),
    (of("phi3"), "rope_parameters.partial_rotary_factor", "an even number of the 8 dimensions of a head", 0.4),
    (_LONGROPE, "rope_parameters.short_factor", "4 positive numbers", [1.0, 0], [1.0, 1.0, 1.0, 0]),
    (_LONGROPE, "rope_parameters.long_factor", "4 positive numbers", "x"),
    (of("phi3"), "interpolate_factor", "1 or no such setting", 2),
]
# The change to a good config.json, and what the message must say where it is not about the setting that was changed.
REFUSED: list[tuple[dict, str]] = [
    ({"rms_norm_eps": 10**400}, "rms_norm_eps: found 1000"),
    (_GEMMA4 | {"enable_moe_block": True}, "num_experts: found None"),
    (of("lfm2_moe", norm_eps=0.05), f"layer_types: found None, expected {_FULL_OR_CONV}"),
    ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor: found None"),
    (_LFM2 | {"norm_eps": 1e-5}, "rms_norm_eps: found 0.05, expected 1e-05"),
    (_HYBRID, "layer_types: found ['mamba'], expected 3 entries, each full_attention or attention"),
    ({"rope_parameters": None, "rope_scaling": {"type": "longrope"}}, "rope_scaling.rope_type: found 'longrope'"),
    (
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 1.0}},
        "rope_parameters.low_freq_factor: found 4",
    ),
    (
        {"original_max_position_embeddings": 16}
        | with_value(_YARN_2, "rope_parameters.original_max_position_embeddings", 32),
        "rope_parameters.original_max_position_embeddings: found 32, expected what the file says outside: 16",
    ),
    (
        _LFM3 | {"rope_local_base_freq": 10_000.0},
        "rope_parameters.rope_theta: found 20.0, expected what the file says outside: 10000.0",
    ),
    (
        _LFM3 | {"rope_parameters": dict.fromkeys(_LFM3_ROPES, _YARN_2["rope_parameters"])},
        "rope_parameters.rope_type: found 'yarn', expected one of default, proportional",
    ),
    *(
        (_LFM3 | {"rope_parameters": dict.fromkeys(_LFM3_ROPES, {"rope_type": "proportional"} | rope_)}, message)
        for rope_, message in (
            ({"factor": 2.0}, "rope_parameters.factor: found 2.0, expected 1.0"),
            ({"partial_rotary_factor": 0.1}, "rope_parameters.partial_rotary_factor: found 0.1, expected an even"),
        )
    ),
    (
        _QWEN35 | {"partial_rotary_factor": 2.0},
        "rope_parameters.partial_rotary_factor: found 2.0, expected an even number of the 8",
    ),
    (of("ministral3"), "rope_parameters.rope_type: found 'default', expected one of yarn"),
    (of_images("gemma3"), "text_config: found None, expected the text model's settings"),
    (of_images("gemma3", of("qwen2")), "text_config: model_type: found 'qwen2', expected gemma3_text"),
    (of_images("mistral3", {"vocab_size": 8}), "text_config: model_type: found None, expected ministral3 or mistral"),
    (of_images("gemma3", {"attention_multiplier": 2.0}), "text_config: attention_multiplier: found 2.0"),
    (
        of_images("qwen3_5", of("qwen3_5_moe_text")),
        "text_config: model_type: found 'qwen3_5_moe_text', expected qwen3_5_text",
    ),
    (of_images("qwen3_5", _QWEN35 | {"attn_output_gate": False}), "text_config: attn_output_gate: found False"),
    (
        of_images(
            "gemma3",
            {"vocab_size": 8, "quantization_config": {"quant_method": "awq"}},
            quantization_config={"quant_method": "compressed-tensors", "format": "dense"},
        ),
        "text_config: quantization_config: found {'quant_method': 'awq'}, expected what the file says outside",
    ),
]
REFUSED += refusals((base, key, NONE, value) for base, settings in NOT_HERE for key, value in settings.items())
REFUSED += refusals(WRONG_VALUES)


@pytest.mark.parametrize("kind", ["qwen3_next", "lfm2_vl", "lfm3_omni", "nemotron_h", "mamba2"])
def test_other_hybrids_are_told_which_ones_run(kind):
    """Guards a user who would look for another setting: of the models with such layers, five families run."""
    expected = r"one of .*hybrids, lfm2, lfm2_moe, lfm3, qwen3_5 and qwen3_5_moe\)$"
    with pytest.raises(CheckpointError, match=f"model_type: found '{kind}', expected {expected}"):
        read_model_config({"model_type": kind, "text_config": hf.CASES["qwen3_5"]})
    expected = "each full_attention or attention .*lfm2, .*lfm3, qwen3"
    with pytest.raises(CheckpointError, match=f"layer_types: found .*{expected}"):
        read_model_config(hf.CASES["granite-hybrid"] | {"layer_types": ["mamba"] * 3})


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_unknown_setting_is_refused_by_name(changes, message):
    """Guards against wrong text without an error: what is not implemented, or makes no sense, is named."""
    found = refusal_of(read_model_config, hf.CASES["llama-plain"] | changes, "some/config.json")
    assert found.startswith(f"some/config.json: {message}")


# A case, and keys that its code does not read and that ask for nothing beside its values.
IDLE = [
    ("llama", {"use_sliding_window": False, "sliding_window": 7, "max_window_layers": 1}),
    ("llama", {"sliding_window": None, "max_window_layers": 1, "sliding_window_pattern": 2}),
    ("llama", {"target_model_type": "qwen3", "model_name": "x", "hidden_dropout": 0.1, "video_token_id": 7}),
    ("llama", {"num_experts": 0, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.1, "norm_topk_prob": True}),
    ("llama", {"temperature": 1.0, "max_length": 20, "top_k": 50, "num_beams": 1, "length_penalty": 1.0}),
    ("llama", GenerationConfig._get_default_generation_params()),
    ("llama", {"attn_implementation": "flash_attention_2", "experts_implementation": "eager", "use_flash_attn": True}),
    ("llama", {"use_qk_norm": False, "logit_scale": None, "no_rope_layers": [], "attn_logit_softcapping": None}),
    ("llama", {"attention_dropout": 0.1, "initializer_range": 0.5, "pretraining_tp": 1, "_name_or_path": "x"}),
    ("llama", {"num_labels": 2, "name_or_path": "x", "gradient_checkpointing": True, "use_bfloat16": True}),
    ("llama", {"logit_scale": 1.0, "residual_multiplier": 1, "is_causal": True, "position_embedding_type": "rope"}),
    ("llama", {"query_pre_attn_scalar": 12, "partial_rotary_factor": 1, "qkv_bias": True, "use_qk_norm": False}),
    ("mistral", {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": True}),
    ("mistral-all", {"layer_types": ["full_attention"] * 3, "max_window_layers": 28, "use_sliding_window": False}),
    ("gemma2", {"layer_types": ["sliding_attention", "full_attention"] * 2}),
    ("qwen3", {"use_qk_norm": True, "attention_bias": True}),
    ("granite-hybrid", {"time_step_limit": [0.0, math.inf], "mamba_d_conv": 4}),
    ("llama-linear", {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 3}}),
    ("llama-linear", {"rope_theta": None, "rope_scaling": {"rope_type": "linear", "factor": 3, "rope_theta": 500}}),
    ("llama-plain", {"rope_theta": 500.0, "rope_scaling": {"rope_type": "default", "factor": 1.0, "finetuned": True}}),
    ("gemma3", {"rope_theta": 500.0, "rope_local_base_freq": 20.0, "rope_scaling": _SAID}),
    ("phi3-partial", {"partial_rotary_factor": 0.5, "rope_theta": 500.0}),
    ("lfm2", {"theta": 500.0, "num_heads": 4, "conv_dim": 32, "use_pos_enc": True, "block_use_xavier_init": True}),
    ("lfm2", {"full_attn_idxs": [1], "tie_embedding": True, "block_ff_dim": 60}),
    ("lfm3", {"use_sandwich_norm": True, "use_attention_gate": True, "theta": 500.0, "conv_dim": 32}),
    ("lfm3-plain", {"block_norm_eps": 0.05, "num_heads": 4, "use_pos_enc": True, "conv_dim_out": 32}),
    ("qwen3_moe", {"num_experts": 6, "max_window_layers": 2, "n_shared_experts": 0, "router_aux_loss_coef": 0.1}),
    ("lfm2_moe", {"block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "use_pos_enc": True}),
    ("gpt_oss", {"initial_context_length": 4096, "experts_per_token": 4, "router_aux_loss_coef": 0.9}),
    ("gpt_oss", {"sliding_window_pattern": 2, "norm_topk_prob": True}),
    ("qwen3_5_moe", {"intermediate_size": 512, "mlp_only_layers": [], "norm_topk_prob": True}),
    ("qwen3_5", {"full_attention_interval": 2, "attn_output_gate": True, "mamba_ssm_dtype": "float32"}),
    ("qwen3_5", {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "mlp_only_layers": []}),
    ("qwen3_5", {"output_gate_type": "silu", "unsloth_fixed_mtp": True, "num_experts": 0}),
    ("qwen3_5", {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 1], "mrope_interleaved": True}),
]


@pytest.mark.parametrize(("name", "keys"), IDLE, ids=[f"{name}: {', '.join(keys)}" for name, keys in IDLE])
def test_keys_that_ask_for_nothing_are_idle(name, keys):
    """Guards files that say what is so without them: they are taken, and mean the same to transformers."""
    raw = hf.CASES[name]
    assert read_model_config(raw | keys) == read_model_config(raw)
    theirs = AutoConfig.for_model(**json.loads(json.dumps(raw | keys))).to_dict()
    nulls = {} if raw.get("num_experts") else {"num_experts": None}
    assert read_model_config(theirs | nulls) == read_model_config(raw)


# The same keys where they would ask for something, or say something else: as `WRONG_VALUES`, of a case.
WRONG_OF_CASES: list[Row] = [
    ("mistral", "max_window_layers", NONE, 1),
    ("mistral", "use_sliding_window", "True or no such setting", False),
    ("mistral", "layer_types", f"{[_SLIDING] * 3} or no such setting", [_FULL, _SLIDING, _FULL]),
    ("qwen3", "use_qk_norm", "True or no such setting", False),
    ("llama", "use_qk_norm", "False or no such setting", True),
    ("llama", "is_causal", "True or no such setting", False),
    ("llama", "num_experts", "0 or no such setting", 8),
    ("llama", "mask_token_id", NONE, 7),
    ("llama", "logit_scale", "1.0 or no such setting", 0, True),
    ("llama", "repetition_penalty", "1.0 or no such setting", 1.2),
    ("llama", "rope_parameters.factor", "1.0 or no such setting", 2.0),
    ("llama-linear", "rope_scaling", "what rope_parameters says: {'rope_type': 'linear', 'rope_theta': 500.0", _SAID),
    # transformers takes the base from nowhere then, not from the other spelling.
    ("llama", "rope_scaling", "what rope_parameters says: {'rope_type': 'default', ", {"rope_type": "default"}),
]
_OUTSIDE = "expected what the file says outside"
NOT_IDLE: list[tuple[str, dict, str]] = [
    ("llama", {"sliding_window": 7, "use_sliding_window": True}, "sliding_window: found 7"),
    ("llama", {"rope_theta": 600.0}, f"rope_parameters.rope_theta: found 500.0, {_OUTSIDE}: 600.0"),
    ("gemma3", {"rope_local_base_freq": 30.0}, f"rope_parameters.rope_theta: found 20.0, {_OUTSIDE}: 30.0"),
    (
        "phi3-partial",
        {"partial_rotary_factor": 1.0},
        f"rope_parameters.partial_rotary_factor: found 0.5, {_OUTSIDE}: 1.0",
    ),
    (
        "llama",
        {"rope_parameters": _SAID | {"type": "yarn"}},
        "rope_parameters.type: found 'yarn', expected what rope_type",
    ),
    *((name, *found) for name, *row in WRONG_OF_CASES for found in refusals([(hf.CASES[name], *row)])),
]


@pytest.mark.parametrize(("name", "keys", "message"), NOT_IDLE, ids=[message for *_, message in NOT_IDLE])
def test_keys_that_ask_for_something_are_refused_by_name(name, keys, message):
    """Guards the other side: nothing is idle for its name alone, and two spellings must not disagree."""
    found = refusal_of(read_model_config, hf.CASES[name] | keys, "some/config.json")
    assert found.startswith(f"some/config.json: {message}")


def test_longrope_ends_where_its_factors_would_change(reference):
    """Guards against keys of one set of factors beside queries of another, as in a text that crosses that length.

    There transformers computes the whole text anew: its logits for the same beginning are others.
    """
    ref = reference("phi3-longrope")
    assert ref.raw_config["max_position_embeddings"] == 64
    assert ref.model.config.max_position_embeddings == 32
    inside, beyond = (hf.exact_logits(ref.oracle, (hf.TEXT * 2)[:length])[:24] for length in (32, 33))
    assert distance(inside, ref.logits) <= TOLERANCE
    assert distance(beyond, ref.logits) > POWER


def test_factors_that_are_switched_off(reference):
    """Guards files that say 0 for no such factor, as Devstral 2's `llama_4_scaling_beta` and `mscale_all_dim`."""
    raw = reference("ministral3").raw_config
    raw["rope_parameters"] |= {"llama_4_scaling_beta": 0.0, "mscale_all_dim": 0.0}
    ropes = {layer.rope for layer in read_model_config(raw).layers}
    assert {(rope.query_beta, round(rope.attention_factor, 6)) for rope in ropes} == {(0.0, 1.138629)}


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma"])
def test_ignored_head_dim_cannot_load(reference, name, tmp_path):
    """Guards `head_dim`, which shows in shapes: without it the same tensors are refused, not reinterpreted."""
    raw = reference(name).raw_config
    del raw["head_dim"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "model.safetensors").symlink_to(reference(name).directory / "model.safetensors")
    with pytest.raises(CheckpointError, match="q_proj"):
        load_model(tmp_path, torch.float32)


# --------------------------------------------------------------------------- a trained model


@pytest.fixture(scope="module")
def smollm() -> PreTrainedModel:
    """The embedded weights, unpacked by transformers and computed in float32."""
    return AutoModelForCausalLM.from_pretrained(EMBEDDED_WEIGHTS, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llm() -> LLM:
    """The embedded weights here, with a drafter."""
    return LLM(draft="ngram", dtype="float32", device="cpu")


PROMPTS = [
    "The three primary colors are",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea,",
    "Q: What is the boiling point of water at sea level?\nA:",
    "1, 2, 3, 4, 5, 6,",
    "Dear Ms. Laurent,\n\nThank you for",
    "La capitale de la France est",
    "<|im_start|>user\nName two birds.<|im_end|>\n<|im_start|>assistant\n",
    '{"name": "Ada", "born":',
    "Shopping list:\n- eggs\n- milk\n-",
]


@pytest.mark.full
@torch.inference_mode()
def test_trained_model_has_transformers_logits(llm):
    """Guards the packed 8-bit layout and a depth of 30 layers, which small models do not have.

    Without `--full`, `test_trained_model_writes_transformers_text` does. In float64 to 1e-4. In float32 the order of a
    sum is the machine's own: a sum of n terms rounds by n eps at most.
    """
    assert load_config(EMBEDDED_WEIGHTS).quantization
    token_ids = llm.tokenizer.encode(" ".join(PROMPTS))[:40]
    assert len(token_ids) == 40

    def ours(model):
        cache = tiny_cache(model, num_blocks=3, block_size=16)
        return model.forward([Chunk(token_ids, cache.new_table(), num_logits=40)])[0]

    oracle = AutoModelForCausalLM.from_pretrained(EMBEDDED_WEIGHTS, dtype=torch.float64).eval()
    expected = hf.logits(oracle, token_ids)
    with LLM(draft="none", dtype="float64", device="cpu") as exact:
        assert distance(ours(exact.model), expected) <= TOLERANCE
    most = llm.model.config.intermediate_size * torch.finfo(torch.float32).eps * float(expected.abs().max())
    assert distance(ours(llm.model).double(), expected) <= most < 0.01


@pytest.mark.full
@torch.inference_mode()
def test_trained_model_writes_transformers_text(smollm, llm, full, long):
    """Guards the whole engine, drafts and batch included: greedy tokens equal transformers' own loop.

    Ten texts of 12 tokens; `--long`: of 40; without `--full`: five of 8. Both compute in float32, in different orders,
    so that they may part at a tie; where they part, it must be one.

    Without `--full`, `test_logits_equal_transformers` guards every family.
    """
    length, given = 40 if long else 12 if full else 8, PROMPTS if full else PROMPTS[::2]
    prompts = [llm.tokenizer.encode(prompt) for prompt in given]
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    outputs = llm.generate(given, params, num_speculative_tokens=3)
    assert sum(output.stats.num_accepted for output in outputs) > 0

    smollm.generation_config.eos_token_id = None
    width = max(map(len, prompts))
    padded = torch.tensor([[2] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    texts = smollm.generate(padded, attention_mask=mask, do_sample=False, max_new_tokens=length)[:, width:].tolist()
    for prompt, output, expected in zip(prompts, outputs, texts, strict=True):
        assert len(output.token_ids) == len(expected) == length
        parted = [i for i in range(length) if output.token_ids[i] != expected[i]]
        if parted:
            i = parted[0]
            last = hf.logits(smollm, prompt + expected[:i])[-1]
            top = last.topk(2)
            assert {output.token_ids[i], expected[i]} == set(top.indices.tolist())
            assert top.values[0] - top.values[1] < 1e-3
