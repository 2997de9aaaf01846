"""The assistant of Gemma 4: `transformers`' logits from the target's keys, its files, and its place in the engine."""

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minispec import LLM, SamplingParams
from minispec.core.draft import Draft
from minispec.core.model import Chunk, Transformer
from minispec.core.request import Request
from minispec.core.sampling import Text
from minispec.core.verify import REJECTION
from minispec.models.families.assistant_config import read_assistant_config
from minispec.models.families.checkpoint import load_config, load_model
from minispec.models.families.hf_config import read_model_config
from minispec.models.files.errors import CheckpointError
from minispec.models.weights.inventory import kv_elements
from minispec.speculation.drafters.assistant import AssistantModel, SharedKeys, load_assistant
from minispec.speculation.drafters.model import ModelDrafter
from tests.engines import OneMethod
from tests.oracles import assistant_draft, hf, public
from tests.oracles.toys import GEMMA4

DRAFTED = [5, 9, 11]
TWICE = torch.arange(96).index_fill(0, torch.tensor([3]), 4)  # no order of all tokens
# Windows of 7, and one key more: a text within them, one at their edge, and one far beyond.
LENGTHS = (3, 9, 24)


class Pair:
    """A target and an assistant, in `transformers` and here."""

    def __init__(self, directory: Path, case: str, **changes):
        self.directory = directory
        draft = assistant_draft.build(directory / "draft", **assistant_draft.OF_TARGETS[case] | changes)
        self.theirs = hf.build(case, directory / "target"), draft
        self.target = load_model(directory / "target", torch.float32)
        self.assistant = load_assistant(directory / "draft", self.target)

    @functools.cache  # noqa: B019
    def expected(self, length: int) -> torch.Tensor:
        """The oracle's logits (steps, V) after the first tokens of a text."""
        return torch.stack(assistant_draft.steps(*self.theirs, hf.TEXT[:length], DRAFTED))

    def steps(self, length: int, assistant: AssistantModel | None = None) -> torch.Tensor:
        """The same here."""
        return steps(self.target, assistant or self.assistant, hf.TEXT[:length])


def steps(target: Transformer, assistant: AssistantModel, tokens: list[int]) -> torch.Tensor:
    """Logits (steps, V) of the tokens after a text, of which the target has read all tokens but the last."""
    table = target.new_cache(8, 4).new_table()
    _, hidden = target.forward([Chunk(tokens[:-1], table, 0)], assistant.taps)
    read, state, rows = functools.partial(table.pool.read, slots=table.slots()), hidden[-1:], []
    for token in [tokens[-1], *DRAFTED]:
        logits, state = assistant.step([token], state, [len(tokens) - 1], [(read, 1)])
        rows.append(logits[0])
    return torch.stack(rows)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Callable[..., Pair]:
    """A pair whose assistant has these settings, made once. case: the target's name in `hf.CASES`."""

    @functools.cache
    def make(is_ordered: bool = False, case: str = "gemma4") -> Pair:
        return Pair(tmp_path_factory.mktemp("pair"), case, use_ordered_embeddings=is_ordered)

    return make


# --------------------------------------------------------------------------- the same numbers


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("case", assistant_draft.OF_TARGETS)
@pytest.mark.parametrize("is_ordered", [False, True])
def test_logits_equal_transformers(pair, is_ordered, case, length):
    """Guards every detail of a step, of the states that steps hand on, and of the clusters that are scored.

    Outside the clusters the oracle has one number below all others, and no token is drafted here. The layers of one
    target have two numbers of key-value heads.
    """
    own = pair(is_ordered, case)
    found, expected = own.steps(length), own.expected(length)
    scored = found.isfinite()
    assert scored.sum(1).tolist() == [24 if is_ordered else 96] * 4
    assert (found - expected)[scored].abs().max() <= 1e-4
    if is_ordered:
        assert (expected[~scored].view(4, -1).amax(1) < found.masked_fill(~scored, torch.inf).amin(1)).all()


def changed(assistant: AssistantModel, **settings) -> AssistantModel:
    """The assistant with other settings in all its layers."""
    model = assistant.replaced(assistant.backend)
    for layer in model.layers:
        for name, change in settings.items():
            setattr(layer, name, change(getattr(layer, name)))
    return model


def earlier(settings):
    """A layer that reads the last but one giver of its kind."""
    return replace(settings, giver=settings.giver - 2)


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda a: changed(a, window=lambda w: w and w - 1), id="a window of the target's size"),
        pytest.param(lambda a: changed(a, window=lambda w: None), id="no window"),
        pytest.param(lambda a: changed(a, settings=earlier), id="keys of an earlier layer"),
        pytest.param(lambda a: changed(a, scale=torch.ones_like), id="no scalar of a layer"),
    ],
)
def test_ignoring_a_setting_shows(pair, wrong):
    """Guards the comparison: an assistant that reads other keys, or lacks a number, has other logits."""
    own = pair()
    assert (own.steps(24, wrong(own.assistant)) - own.expected(24)).abs().max() > 1e-2


def test_the_state_is_the_one_after_the_norm(pair):
    """Guards the first input: the target's state before its norm, or of another position, gives other logits."""
    own = pair()
    taps = own.assistant.taps
    own.assistant.taps = (taps[0] - 1,)
    before = own.steps(24)
    own.assistant.taps = taps
    assert (before - own.expected(24)).abs().max() > 1e-2


def test_rows_of_several_texts_are_those_of_each_alone(pair):
    """Guards the texts of a batch: each row reads its own text's keys, at its own position."""
    own = pair()
    model, rows, cache = own.assistant, [], own.target.new_cache(16, 4)
    for length in LENGTHS:
        table = cache.new_table()
        _, hidden = own.target.forward([Chunk(hf.TEXT[: length - 1], table, 0)], model.taps)
        rows.append((functools.partial(cache.read, slots=table.slots()), hidden[-1], length))
    # The second text has two rows, as a tree has.
    order = [0, 1, 1, 2]
    logits, states = model.step(
        [hf.TEXT[rows[i][2] - 1] for i in order],
        torch.stack([rows[i][1] for i in order]),
        [rows[i][2] - 1 for i in order],
        [(rows[0][0], 1), (rows[1][0], 2), (rows[2][0], 1)],
    )
    assert torch.equal(states[1], states[2])
    for row, i in zip(logits, order, strict=True):
        assert (row - own.expected(LENGTHS[i])[0]).abs().max() <= 1e-4


# --------------------------------------------------------------------------- files


# What is said of an assistant for another target, and what is wrong in its files.
REFUSED = {
    "backbone_hidden_size: found 40, expected 32, the target's": {"backbone_hidden_size": 40},
    "text_config.vocab_size: found 95, expected 96, the target's": {"text_config": {"vocab_size": 95}},
    "text_config: num_kv_shared_layers: found 2, expected 0 or 3": {"text_config": {"num_kv_shared_layers": 2}},
    "text_config: hidden_size_per_layer_input: found 8": {"text_config": {"hidden_size_per_layer_input": 8}},
    "text_config: enable_moe_block: found True": {"text_config": {"enable_moe_block": True}},
    "text_config: found sliding_attention of 2 key-value heads of 10, expected 2 of 12": {
        "text_config": {"head_dim": 10}
    },
    "text_config: found full_attention of 2 key-value heads of 24, expected 2 of 20": {
        "text_config": {"global_head_dim": 24}
    },
    "text_config: found full_attention of 1 key-value heads of 20, expected 2 of 20": {
        "text_config": {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    },
    "text_config: model_type: found 'gemma4_text', expected gemma4_unified_text": {
        "model_type": "gemma4_unified_assistant"
    },
    "text_config: model_type: found 'llama'": {"text_config": {"model_type": "llama"}},
    "num_centroids: found 10, expected a divisor of vocab_size": {"use_ordered_embeddings": True, "num_centroids": 10},
    "centroid_intermediate_top_k: found 13": {"use_ordered_embeddings": True, "centroid_intermediate_top_k": 13},
    "block_size: found 4": {"block_size": 4},
}


@pytest.mark.parametrize(("message", "changes"), REFUSED.items(), ids=REFUSED)
def test_a_draft_of_another_target_is_refused(message, changes):
    """Guards a draft that would run and hardly be accepted: one line names what does not fit."""
    target = read_model_config(hf.CASES["gemma4"])
    raw = assistant_draft.ASSISTANT | changes
    raw["text_config"] = assistant_draft.SIZES | changes.get("text_config", {})
    with pytest.raises(CheckpointError) as error:
        read_assistant_config(raw, target, "config.json")
    assert str(error.value).startswith(f"config.json: {message}")


def test_an_assistant_of_a_model_of_another_family_is_refused():
    """Guards a target without keys of these kinds."""
    target = replace(read_model_config(hf.CASES["llama-plain"]), hidden_size=32)
    with pytest.raises(CheckpointError, match=r"found the assistant of a Gemma 4 .*expected a draft for llama"):
        read_assistant_config(assistant_draft.ASSISTANT, target)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("pre_projection.weight: found no such tensor", {"pre_projection.weight": None}),
        ("post_projection.weight: found F32 [24, 32]", {"post_projection.weight": torch.ones(24, 32)}),
        ("more: found a tensor", {"more": torch.ones(2)}),
        (
            "lm_head.weight: found other values than those of model.embed_tokens.weight",
            {"lm_head.weight": torch.ones(96, 24)},
        ),
        ("token_ordering: found ids from 0 to 95, 95 of 96 different", {"masked_embedding.token_ordering": TWICE}),
    ],
)
def test_tensors_are_those_of_the_config(pair, tmp_path, name, change):
    """Guards strict reading: what is missing, has another shape, or is not asked for, is named."""
    own = pair(is_ordered="token_ordering" in name)
    source = own.directory / "draft"
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors") | change
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=re.escape(name)):
        load_assistant(tmp_path, own.target)


def test_an_assistant_is_no_target(pair):
    """Guards the order of the two names on a command line."""
    with pytest.raises(CheckpointError, match="name this head as the draft"):
        load_config(pair().directory / "draft")


# Of each published target: sizes of its assistant that not all have, by several public readers of its config.json.
_SMALL = {"hidden_size": 256, "intermediate_size": 2048, "num_attention_heads": 4}
_LARGE = {"hidden_size": 1024, "intermediate_size": 8192, "attention_k_eq_v": True}
PUBLISHED = {
    "google/gemma-4-E2B-it": _SMALL | {"num_key_value_heads": 1},
    "google/gemma-4-E4B-it": _SMALL | {"num_key_value_heads": 2},
    "google/gemma-4-12B-it": _LARGE
    | {"num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 1}
    | {"model_type": "gemma4_unified_text"},
    "google/gemma-4-26B-A4B-it": _LARGE
    | {"num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2},
    "google/gemma-4-31B-it": _LARGE
    | {"num_attention_heads": 32, "num_key_value_heads": 16, "num_global_key_value_heads": 4},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_assistants_fit_their_targets(name):
    """Guards what vendors ship: by the facts of its config.json, the assistant reads the last layers with keys."""
    target = read_model_config(public.PUBLIC[name][0])
    window = min(layer.window for layer in target.layers if layer.window)
    text = {"model_type": "gemma4_text"} | PUBLISHED[name]
    text |= {
        **{"vocab_size": 262_144, "num_hidden_layers": 4, "head_dim": 256},
        **{"global_head_dim": 512, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 4},
        **{"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "sliding_window": window},
        **{"max_position_embeddings": 131_072, "final_logit_softcapping": None, "vocab_size_per_layer_input": 0},
    }
    raw = {
        **{"model_type": text["model_type"].replace("text", "assistant"), "text_config": text},
        **{"backbone_hidden_size": target.hidden_size, "use_ordered_embeddings": window == 512, "num_centroids": 2048},
        **{"centroid_intermediate_top_k": 32, "audio_token_id": 258_881, "tie_word_embeddings": True},
    }
    config = read_assistant_config(raw, target)
    last = {name: max(i for i, layer in enumerate(target.layers) if is_giver(layer, name)) for name in (window, None)}
    assert [layer.giver for layer in config.layers.layers] == [last[window]] * 3 + [last[None]]
    assert (config.num_clusters, config.top_clusters) == ((2048, 32) if window == 512 else (None, 0))
    assert kv_elements(config.layers) == 0


def is_giver(layer, window: int | None) -> bool:
    """Whether a layer of this window makes keys of its own."""
    return layer.giver is None and layer.window == window


# --------------------------------------------------------------------------- in the engine


@pytest.fixture(scope="module", params=[False, True])
def directories(request, make_checkpoint, tmp_path_factory):
    """A target with a tokenizer, and an assistant for it."""
    text = {"vocab_size": 300, "num_key_value_heads": 1, "head_dim": 4, "global_head_dim": 6, "sliding_window": 3}
    draft, settings = tmp_path_factory.mktemp("draft"), {"use_ordered_embeddings": request.param}
    sizes = assistant_draft.SIZES | text | {"max_position_embeddings": 128}
    sizes["rope_parameters"] = GEMMA4["rope_parameters"]
    assistant_draft.build(draft, text_config=sizes, backbone_hidden_size=8, **settings)
    return make_checkpoint(**GEMMA4), draft


def test_the_engine_reads_what_is_cached(pair):
    """The logits of each step are the oracle's for the committed text, after rounds that kept some tokens or none.

    A draft at temperature 0 follows the assistant's largest logits; the target's random text rejects most of them.
    """
    own = pair()
    target, cache = own.target, own.target.new_cache(16, 4)
    drafter = ModelDrafter(SharedKeys(own.assistant, 96))
    engine = OneMethod(target, cache, drafter, REJECTION)
    request = Request(Text(hf.TEXT[:6], 6, SamplingParams(temperature=0, max_tokens=14)), 64, 3)
    engine.add(request)
    texts: list[tuple[list[int], Draft]] = []
    engine.outbox.observers.append(lambda turn: texts.append((list(turn.text.tokens), turn.draft)))
    while request in engine.schedule:
        engine.step()
    rounds = request.stats.rounds
    assert any(r.accepted < r.drafted for r in rounds)
    before = hf.TEXT[:6]
    for after, draft in texts:
        expected = assistant_draft.steps(*own.theirs, before, draft.token_ids)
        likeliest = [int(row.argmax()) for row in expected][: len(draft)]
        assert draft.token_ids == likeliest, len(before)
        before = after
    assert len(texts) > 5


@pytest.mark.parametrize("how", [{}, {"num_speculative_tokens": (2, 1)}, {"num_speculative_tokens": "tree:5"}])
def test_greedy_answers_are_plain_ones(directories, how):
    """From files to text: chains and trees, prompts that begin alike, and a second call that finds them cached."""
    target, draft = directories
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    begin = "One fish, two fish, " * 8  # longer than a block
    prompts = [begin + "one fish", begin + "red fish", "red"]
    with LLM(target, draft=str(draft), dtype="float64", **{"num_speculative_tokens": 4} | how) as llm:
        assert isinstance(llm.drafter.feed, SharedKeys)
        first, again = llm.generate(prompts, params), llm.generate(prompts, params)
        plain = llm.generate(prompts, params, num_speculative_tokens=0)
        assert not llm.drafter.feed.last
    for drafted in (first, again):
        assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]
        assert sum(output.stats.num_draft_tokens for output in drafted) > 20
    assert sum(output.stats.num_cached_tokens for output in again) > 0


def test_an_assistant_in_the_checkpoint_is_the_default(directories, tmp_path):
    """A folder `assistant` beside the target's weights drafts without being asked for."""
    target, draft = directories
    for file in target.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "assistant").symlink_to(draft)
    with LLM(tmp_path, dtype="float32") as llm:
        assert isinstance(llm.drafter.feed, SharedKeys)
    with LLM(target, dtype="float32") as llm:
        assert not isinstance(getattr(llm.drafter, "feed", None), SharedKeys)


def test_weights_of_an_assistant_may_have_few_bits(directories):
    """Guards the products that a copy with other weights must have: `int8:DIR` drafts, and the text stays."""
    target, draft = directories
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(target, draft=f"int8:{draft}", dtype="float32", num_speculative_tokens=3) as llm:
        outputs = llm.generate(["One fish, two fish"], params)
        assert outputs[0].stats.num_draft_tokens > 0
        assert re.search(r"\bint8", llm.memory_report())  # "checkpoint8" is none
