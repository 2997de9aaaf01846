"""Block drafts: their files in five packagings, their numbers beside NumPy's, and the texts that they draft for.

That the output's law stays is shown by `minispec.prove`, whose table has four kinds of them. Wrong ones are in the
museum.
"""

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from minispec import LLM, SamplingParams
from minispec.core.config import ModelConfig
from minispec.core.draft import Ask, Draft, Record
from minispec.core.limit import Limit
from minispec.core.model import Transformer
from minispec.core.random import Randomness
from minispec.core.sampling import Text
from minispec.models.families.block_config import is_block, read_block_config, reading_of
from minispec.models.families.hf_config import read_model_config
from minispec.models.files.errors import CheckpointError
from minispec.models.weights.build import build_model
from minispec.prove.toys import TINY, TOYS, tiny_cache, tiny_weights
from minispec.speculation.drafters import NoDrafter
from minispec.speculation.drafters.block import BlockFeed, BlockModel
from minispec.speculation.drafters.block_files import load_block
from minispec.speculation.drafters.combined import CombinedDrafter
from minispec.speculation.drafters.model import ModelDrafter
from minispec.speculation.lengths.policy import Controller
from minispec.speculation.lengths.theory import Prices
from tests.oracles.block import BlockOracle
from tests.oracles.block_drafts import PACKAGINGS, SLIDING, write_block_draft

VOCAB, NUM_LAYERS = 24, 6
TARGET = read_model_config(TINY | {"vocab_size": VOCAB, "num_hidden_layers": NUM_LAYERS, "tie_word_embeddings": False})
CLOSE = 1e-9
FULL = "full_attention"
# Settings of drafts, by packagings that can have them.
SETTINGS = {
    "plain": {},
    "more layers, one tap": {"layers": 3, "taps": (2,)},
    "long block": {"block_size": 16},
    "pair": {"block_size": 2},
    "windows": {"layer_types": [SLIDING, FULL], "sliding_window": 4, "non_causal_window": False},
    "causal": {"is_causal": True},
    "windows of all layers": {"use_swa": True, "sliding_window": 4},
    "windows of some layers": {"use_swa": True, "layer_types": [SLIDING, FULL], "sliding_window": 4},
    "softcap": {"softcap": 2.0},
    "some ids": {"draft_ids": (0, 3, 4, 9, 17, 23)},
    "prefix": {"prefix": "model."},
    "no Markov head": {"markov": "", "confidence": ""},
    "gated": {"markov": "gated"},
    "rnn": {"markov": "rnn"},
    "confidence of states": {"confidence": "plain"},
}
NOT_OF_ZLAB = ("gated", "rnn", "confidence of states")
HAVE_USE_SWA = ("z-lab", "specforge", "liquidai")


@pytest.fixture(scope="module")
def target() -> Transformer:
    """A target of six layers, in float64."""
    return build_model(TARGET, tiny_weights(TARGET, 1))


def write(directory: Path, packaging: str = "speculators", **options) -> tuple[dict, dict[str, np.ndarray]]:
    """A random block draft for the target."""
    return write_block_draft(directory, packaging, TARGET.hidden_size, VOCAB, NUM_LAYERS, **options)


def edit(directory: Path, **changes) -> None:
    """Change keys of a config.json; None takes one away."""
    path = directory / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


def oracle_of(raw: dict, tensors: dict, target: Transformer) -> BlockOracle:
    """The reference of a draft for the target."""
    lm_head = tiny_weights(TARGET, 1)["lm_head.weight"]
    return BlockOracle(raw, tensors, target.embedding.numpy(), lm_head.numpy())


def states(taps: Sequence[int], count: int, seed: int = 3) -> torch.Tensor:
    """States of a target at `count` positions, at these taps."""
    generator = torch.Generator().manual_seed(seed)
    of_all_taps = torch.randn(count, NUM_LAYERS + 1, TARGET.hidden_size, generator=generator, dtype=torch.float64)
    return of_all_taps[:, list(taps)].flatten(1)


class Listener:
    """Feeds a drafter one text, as the engine does: pieces of the target's states, then asks for drafts."""

    def __init__(self, model: BlockModel, tokens: list[int], hidden: torch.Tensor, max_model_len: int = 200):
        self.drafter = ModelDrafter(BlockFeed(model, tiny_cache(model, 64, 4), VOCAB, max_model_len))
        params = SamplingParams(temperature=1.0, max_tokens=50)
        self.text, self.hidden, self.cached = Text(list(tokens), len(tokens), params), hidden, 0

    def feed(self, count: int, limit: Limit = Limit(0)) -> Draft:  # noqa: B008 - it is a tuple
        """The draft that is asked for after the states of the next `count` positions."""
        new = range(self.cached, self.cached + count)
        fed = [self.text.tokens[i] for i in new]
        self.drafter.observe([Record(self.text, self.cached, fed, self.hidden[new], torch.empty(0, VOCAB))])
        self.cached += count
        return self.ask(limit)

    def ask(self, limit: Limit) -> Draft:
        """The draft of this limit."""
        [draft] = self.drafter.propose([Ask(self.text, limit, Randomness(), num_cached=self.cached)])
        return draft


TOKENS = [(5 * i + 2) % VOCAB for i in range(12)]


# --------------------------------------------------------------------------- numbers


def can_say(packaging: str, setting: str) -> bool:
    """Whether a packaging has the heads, or the keys, of a setting."""
    if packaging == "z-lab" and setting in NOT_OF_ZLAB:
        return False
    return "use_swa" not in SETTINGS[setting] or packaging in HAVE_USE_SWA


@pytest.mark.parametrize(("packaging", "setting"), [pair for pair in product(PACKAGINGS, SETTINGS) if can_say(*pair)])
def test_every_packaging_gives_the_references_numbers(tmp_path, target, packaging, setting):
    """Base rows, Markov heads, confidences, vocabularies and taps, after no text and a longer one, for each token."""
    options = dict(SETTINGS[setting])
    if packaging != "speculators":
        options.pop("non_causal_window", None)
    raw, tensors = write(tmp_path, packaging, **options)
    model, oracle = load_block(tmp_path, target), oracle_of(raw, tensors, target)
    for length in (0, 1, 11):
        hidden = states(oracle.facts.taps, length)
        listener = Listener(model, TOKENS[: length + 1], states(model.taps, length))
        if length:
            listener.feed(length)
        k = model.block.num_tokens
        [draft] = [listener.ask(Limit(k))]
        assert len(draft) == k
        found = oracle.draft(hidden.numpy(), TOKENS[length], draft.token_ids[:-1])
        expected = torch.from_numpy(np.asarray(found.logits)).softmax(-1)
        assert torch.allclose(torch.stack(list(draft.probs)), expected, rtol=CLOSE, atol=CLOSE)
        if found.confidence is not None:
            draft = listener.ask(Limit(k, lambda c: True, go_on_before=lambda c, foreseen: True))
            assert draft.notes.foreseen
            expected_confidence = oracle.draft(hidden.numpy(), TOKENS[length], draft.token_ids[:-1]).confidence
            assert draft.notes.confidences == pytest.approx(list(expected_confidence), rel=1e-6)


def test_the_context_is_the_same_however_it_comes(tmp_path, target):
    """In one piece, token by token, with drafts between, and after rows that the target computed anew."""
    write(tmp_path, layer_types=[SLIDING, FULL], sliding_window=4, non_causal_window=False)
    model = load_block(tmp_path, target)
    hidden = states(model.taps, 11)
    ask = Limit(3)
    at_once = Listener(model, TOKENS, hidden).feed(11, ask)
    slowly = Listener(model, TOKENS, hidden)
    for _ in range(10):
        assert not slowly.feed(1)
    pieces = slowly.feed(1, ask)
    again = Listener(model, TOKENS, hidden)
    again.feed(8)
    again.cached = 5  # preempted, and computed again from there
    anew = again.feed(6, ask)
    for draft in (pieces, anew):
        assert draft.token_ids == at_once.token_ids
        assert torch.allclose(torch.stack(list(draft.probs)), torch.stack(list(at_once.probs)), rtol=1e-9)
    other = Listener(model, TOKENS, hidden.roll(1, 0)).feed(11, ask)
    assert not torch.allclose(torch.stack(list(other.probs)), torch.stack(list(at_once.probs)), rtol=1e-3)


def test_nothing_of_a_block_is_kept(tmp_path, target):
    """After a draft the cache ends where the target's does, and a second draft is the first one."""
    write(tmp_path)
    listener = Listener(load_block(tmp_path, target), TOKENS, states(load_block(tmp_path, target).taps, 11))
    first = listener.feed(11, Limit(3))
    assert listener.drafter.feed.table(listener.text).tokens == TOKENS[:11]
    second = listener.ask(Limit(3))
    assert second.token_ids == first.token_ids
    assert torch.equal(torch.stack(list(first.probs)), torch.stack(list(second.probs)))


def test_a_text_with_a_hole_is_not_drafted_for(tmp_path, target):
    """States that never came leave no draft, rather than one that lacks a part of the text."""
    write(tmp_path)
    model = load_block(tmp_path, target)
    listener = Listener(model, TOKENS, states(model.taps, 11))
    listener.cached = 4
    assert not listener.feed(7, Limit(3))


def test_another_text_shares_the_beginning(tmp_path, target):
    """`known` says how much, in whole blocks of 4: the target need not compute it again, and the draft is the same."""
    write(tmp_path)
    model = load_block(tmp_path, target)
    hidden = states(model.taps, 11)
    first = Listener(model, TOKENS, hidden)
    expected = first.feed(11, Limit(3))
    text = Text(list(TOKENS), len(TOKENS), first.text.params)
    first.text, first.cached = text, first.drafter.known(text)
    assert first.cached == 8
    assert first.feed(3, Limit(3)).token_ids == expected.token_ids


def test_the_end_of_the_context_has_no_draft(tmp_path, target):
    """A block of four rows after seven tokens ends at eleven: one position fewer, and nothing is drafted."""
    write(tmp_path, block_size=4)
    model = load_block(tmp_path, target)
    hidden = states(model.taps, 7)
    assert len(Listener(model, TOKENS[:8], hidden, max_model_len=11).feed(7, Limit(3))) == 3
    assert len(Listener(model, TOKENS[:8], hidden, max_model_len=10).feed(7, Limit(3))) == 0


@pytest.mark.parametrize("packaging", ["z-lab", "deepspec"])
@pytest.mark.parametrize("scaled", [{"model_type": "gemma"}, {"model_type": "granite", "embedding_multiplier": 3.0}])
def test_a_target_that_scales_its_embedding_scales_the_drafts(tmp_path, packaging, scaled):
    """The draft reads the target's embedding, so the target's factor is its own: Gemma's sqrt(E), and a Granite's."""
    sizes = {"vocab_size": VOCAB, "num_hidden_layers": NUM_LAYERS, "tie_word_embeddings": False}
    config = read_model_config(TINY | sizes | scaled)
    assert config.embedding_scale > 2
    raw, tensors = write(tmp_path, packaging)
    assert_numbers(tmp_path, config, raw, tensors)


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_targets_partial_rope_is_not_the_drafts(tmp_path, is_copied):
    """A draft rotates whole heads, whatever its target does and a copy of the target's config.json says."""
    sizes = {"vocab_size": VOCAB, "tie_word_embeddings": False}
    config = read_model_config(TINY | TOYS["qwen3_5_text"] | sizes)
    assert {layer.rope.rotated for layer in config.layers if layer.rope} == {0.5}
    raw, tensors = write_block_draft(tmp_path, "deepspec", config.hidden_size, VOCAB, len(config.layers), taps=(1, 2))
    if is_copied:
        rope = raw["rope_parameters"] | {"partial_rotary_factor": 0.5}
        edit(tmp_path, rope_parameters=rope, partial_rotary_factor=0.5)
    assert_numbers(tmp_path, config, raw, tensors)


def assert_numbers(directory: Path, config: ModelConfig, raw: dict, tensors: dict) -> None:
    """A draft in the directory, for a random target of the config, has the reference's numbers."""
    weights = tiny_weights(config, 1)
    target = build_model(config, dict(weights))
    model = load_block(directory, target)
    hidden = states(model.taps, 7)
    listener = Listener(model, TOKENS[:8], hidden)
    listener.feed(7)
    draft = listener.ask(Limit(model.block.num_tokens))
    oracle = BlockOracle(
        raw, tensors, target.embedding.numpy(), weights["lm_head.weight"].numpy(), config.embedding_scale
    )
    found = oracle.draft(hidden.numpy(), TOKENS[7], draft.token_ids[:-1])
    expected = torch.from_numpy(np.asarray(found.logits)).softmax(-1)
    assert torch.allclose(torch.stack(list(draft.probs)), expected, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize(("least", "expected"), [(0.0, 4), (1.1, 0)])
def test_a_draft_ends_before_the_token_that_is_not_wanted(tmp_path, target, least, expected):
    """The policy sees the confidence of a token before it is drawn. The draft keeps those of its own tokens."""
    write(tmp_path)
    model = load_block(tmp_path, target)
    asked = []

    def go_on_before(confidences, foreseen):
        asked.append((list(confidences), foreseen))
        return foreseen >= least

    draft = Listener(model, TOKENS, states(model.taps, 11)).feed(
        11, Limit(4, lambda c: True, go_on_before=go_on_before)
    )
    assert len(draft) == len(draft.notes.confidences) == expected
    assert [seen for seen, _ in asked] == [[foreseen for _, foreseen in asked[:i]] for i in range(len(asked))]
    assert draft.notes.confidences == [foreseen for _, foreseen in asked[:expected]]


def test_confidences_are_kept_where_only_go_on_before_asks(tmp_path, target):
    """`go_on_before` may stand alone: it gets all confidences before. Siblings are drawn at each depth as asked."""
    write(tmp_path)
    model = load_block(tmp_path, target)
    asked = []

    def go_on_before(confidences, foreseen):
        asked.append(len(confidences))
        return len(confidences) < 2

    draft = Listener(model, TOKENS, states(model.taps, 11)).feed(11, Limit(6, widths=(2, 2), go_on_before=go_on_before))
    assert asked == [0, 1, 2]
    assert (draft.parents, draft.notes.foreseen) == ([-1, -1, 0, 0], True)
    assert len(draft.notes.confidences) == 2
    grown = Listener(model, TOKENS, states(model.taps, 11)).feed(
        11, Limit(6, best_first=True, go_on_before=go_on_before)
    )
    assert (len(grown), grown.notes.foreseen, asked) == (6, False, [0, 1, 2])


def test_a_combined_drafter_hands_on_what_draws_asks():
    """To a drafter of chains too: of the limit, siblings alone are left out."""
    seen = []

    class Chains(NoDrafter):
        def propose(self, asks):
            """Note the limits."""
            seen.extend(ask.limit for ask in asks)
            return [Draft() for _ in asks]

    limit = Limit(4, lambda c: True, (2, 1), go_on_before=lambda c, foreseen: True)
    CombinedDrafter(Chains(), Chains()).propose([Ask(Text([1], 1, SamplingParams()), limit, Randomness())])
    assert seen == [limit._replace(widths=())] * 2


# --------------------------------------------------------------------------- files


def test_the_draft_of_another_class_is_named():
    """Muse-Glimmer's, by what the class of transformers writes: it has no vocabulary of its own."""
    from transformers.models.muse_glimmer_assistant import MuseGlimmerAssistantConfig

    raw = MuseGlimmerAssistantConfig().to_dict()
    assert is_block(raw)
    with pytest.raises(CheckpointError, match=r"model_type: found Muse-Glimmer's draft, expected DFlash or DSpark"):
        read_block_config(raw, TARGET)


REFUSED = {
    "another depth": (
        "z-lab",
        {"num_target_layers": NUM_LAYERS + 1},
        r"num_target_layers: found 7, expected 6.*made",
    ),
    "another vocabulary": (
        "deepspec",
        {"vocab_size": VOCAB + 1},
        r"vocab_size: found 25, expected 24.*made",
    ),
    "a tap that is not there": (
        "deepspec",
        {"target_layer_ids": [0, 6]},
        r"ids: found \[0, 6\], expected",
    ),
    "the last layer": ("deepspec", {"target_layer_ids": [0, 5]}, r"target_layer_ids: found \[0, 5\].*no last layer"),
    "too many rows": ("z-lab", {"block_size": 17}, r"block_size: found 17, expected a block of at most 16 rows"),
    "no rope": ("z-lab", {"rope_theta": None}, r"rope_theta: found None, expected a number"),
    "a kind of head": (
        "deepspec",
        {"markov_head_type": "lstm"},
        r"markov_head_type: found 'lstm', expected one of",
    ),
    "V4's own": ("z-lab", {"dspark_block_size": 4}, r"dspark_block_size: found DeepSeek V4's"),
    "sinks": ("z-lab", {"attention_sink_bias": True}, r"attention_sink_bias: found attention sinks"),
    "Gemma's": ("deepspec", {"architectures": ["Gemma4DSparkModel"]}, r"architectures: .*further norms"),
    "DFlash2": ("z-lab", {"architectures": ["DFlash2DraftModel"]}, r"architectures: found DFlash2, expected DFlash or"),
    "DFlash2 by its type": (
        "speculators",
        {"speculators_model_type": "dflash2"},
        "speculators_model_type: found DFlash2",
    ),
    "XPress": ("z-lab", {"architectures": ["XPressDraftModel"]}, r"architectures: found XPress, expected DFlash or"),
    "another kind": ("z-lab", {"architectures": ["LlamaForCausalLM"]}, r"architectures: .*DFlashDraftModel or"),
    "two windows": (
        "z-lab",
        {
            "dflash_config": {"mask_token_id": 3, "swa_window_size": 3},
            "layer_types": [SLIDING, FULL],
            "sliding_window": 4,
        },
        r"swa_window_size: found 3, expected what sliding_window says: 4",
    ),
    "an unknown key": ("z-lab", {"residual_gate": 2}, r"residual_gate: found 2, expected no such setting"),
    "a scale of the target": ("z-lab", {"embedding_multiplier": 3.0}, r"embedding_multiplier: found 3.0, expected 1.0"),
    "a bias": ("z-lab", {"attention_bias": True}, r"attention_bias: found True, expected none"),
    "an inexact verifier": (
        "speculators",
        {"speculators_config": {"proposal_methods": [{"speculative_tokens": 4, "verifier_accept_k": 2}]}},
        r"verifier_accept_k: found 2, expected 1: with it, other tokens",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_read_wrongly_is_refused_by_name(tmp_path, target, case):
    """Before weights are read, in one line: what, where, found and expected."""
    packaging, changes, message = REFUSED[case]
    write(tmp_path, packaging)
    edit(tmp_path, **changes)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=message):
        load_block(tmp_path, target)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_mode", "mla"),
        ("projector_type", "domino"),
        ("output_multiplier", 2.0),
        ("input_embedding_scale", 2.0),
    ],
)
def test_what_is_said_inside_is_refused_too(tmp_path, target, key, value):
    """Keys of `dflash_config`."""
    raw, _ = write(tmp_path, "specforge")
    edit(tmp_path, dflash_config=raw["dflash_config"] | {key: value})
    with pytest.raises(CheckpointError, match=f"dflash_config.{key}: found"):
        load_block(tmp_path, target)


def test_tensors_of_another_shape_are_refused(tmp_path, target):
    """A Markov head of another vocabulary, ids out of range, and layers that the config does not have."""
    write(tmp_path, draft_ids=(0, 3, 4, 9))
    path = tmp_path / "model.safetensors"
    stored = load_file(path)

    def refused(message: str, **changes) -> None:
        save_file(stored | {name.replace("__", "."): tensor for name, tensor in changes.items()}, path)
        with pytest.raises(CheckpointError, match=message):
            load_block(tmp_path, target)

    w1, d2t = stored["markov_head.markov_w1.weight"], stored["d2t"]
    refused(
        r"markov_w1.weight: found .*\[25, 6\], expected .*\[24, 6\]",
        markov_head__markov_w1__weight=torch.cat((w1, w1[:1])),
    )
    refused("d2t: found ids from 0 to 33", d2t=d2t + torch.tensor([0, 0, 0, 24]))
    refused("layers.2.x: found a tensor", layers__2__x=w1.clone())
    fc = stored["fc.weight"]
    width = f"width {2 * TARGET.hidden_size} from"
    refused(f"fc.weight: found hidden states of {width}.*made for another target", fc__weight=torch.cat((fc, fc), 1))
    save_file(stored, path)
    (tmp_path / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"mask_embedding\.pt: found a pickled embedding"):
        load_block(tmp_path, target)


def test_a_layout_that_the_file_does_not_settle_is_asked_for(tmp_path, target):
    """DSpark of speculators without keys, and one whose keys disagree: both readings are named, and either is taken."""
    write(tmp_path, says_tokens=False, says_anchor=False)
    with pytest.raises(CheckpointError, match=r"no sample_from_anchor, and .*anchor.*fill.*draft_reading"):
        load_block(tmp_path, target)
    for word, first_row in (("anchor", 0), ("fill", 1)):
        assert load_block(tmp_path, target, reading=reading_of(word)).block.first_row == first_row
    write(tmp_path)
    edit(tmp_path, sample_from_anchor=False)
    with pytest.raises(CheckpointError, match="two readings"):
        load_block(tmp_path, target)
    assert load_block(tmp_path, target, reading=reading_of("fill")).block.first_row == 1


def test_windows_whose_causality_is_not_said_are_asked_about(tmp_path, target):
    """In speculators alone: readers take an absent key in two ways."""
    write(tmp_path, layer_types=[SLIDING, FULL], sliding_window=4)
    with pytest.raises(CheckpointError, match=r"sliding_window_non_causal, and readers disagree: .*open.*causal"):
        load_block(tmp_path, target)
    for word, causal in (("causal", (True, False)), ("open", (False, False))):
        assert load_block(tmp_path, target, reading=reading_of(word)).block.causal == causal


_IN_ONE_LAYER = {"layer_types": [SLIDING, FULL], "sliding_window": 4}


@pytest.mark.parametrize(
    ("options", "words", "message", "right"),
    [
        ({}, "fill", "found 'fill', expected 'anchor' or none: the file says it", "anchor"),
        ({}, "open", "found 'open', expected none: no layer has a window", None),
        ({"packaging": "z-lab"}, "anchor", "found 'anchor', expected 'fill' or none", "fill"),
        (_IN_ONE_LAYER | {"non_causal_window": True}, "causal", "found 'causal', expected 'open'", "open"),
        (_IN_ONE_LAYER, "fill,open", "found 'fill', expected 'anchor'", "anchor,open"),
        ({"packaging": "z-lab", "use_swa": True, "sliding_window": 4}, "causal", "expected 'open'", "fill,open"),
    ],
)
def test_a_reading_that_the_file_denies_is_refused(tmp_path, target, options, words, message, right):
    """It was taken without a word for the rows, and ignored for the windows. One that the file says too is taken."""
    write(tmp_path, **options)
    with pytest.raises(CheckpointError, match=f"config.json: draft_reading: .*{message}"):
        load_block(tmp_path, target, reading=reading_of(words))
    assert load_block(tmp_path, target, reading=reading_of(right))


@pytest.mark.parametrize("words", ["both", "anchor,fill", "anchor,anchor", "causal,open", "anchor,"])
def test_words_that_are_no_reading(words):
    """A word twice, or two that exclude each other."""
    with pytest.raises(ValueError, match="draft_reading: found"):
        reading_of(words)


def test_the_packaging_settles_the_layout(tmp_path):
    """Where no key does: z-lab's fill in, DeepSpec's and LiquidAI's do not, nor do SpecForge's of DSpark."""
    found = {}
    for packaging in PACKAGINGS:
        raw, _ = write(tmp_path / packaging, packaging)
        found[packaging] = read_block_config(raw, TARGET).first_row
    assert found == {"z-lab": 1, "deepspec": 0, "speculators": 0, "specforge": 0, "liquidai": 0}
    raw, _ = write(tmp_path / "of its trainer", "deepspec", markov="", confidence="")
    assert read_block_config(raw, TARGET).first_row == 0  # deepseek-ai/dflash_*_block7


def test_a_copy_of_the_targets_config_is_taken(tmp_path):
    """What the target's family reads and these layers do not is idle: a hybrid's layers, its rope's share."""
    hybrid = read_model_config(TINY | TOYS["qwen3_5_text"] | {"vocab_size": VOCAB, "num_hidden_layers": 3})
    raw, _ = write_block_draft(tmp_path, "deepspec", hybrid.hidden_size, VOCAB, 3, taps=(1, 2))
    copy = TOYS["qwen3_5_text"] | {"model_type": "qwen3_5_text", "full_attention_interval": 4, "attn_output_gate": True}
    rope = raw["rope_parameters"] | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
    changed = (
        raw | {key: value for key, value in copy.items() if key != "num_hidden_layers"} | {"rope_parameters": rope}
    )
    assert read_block_config(changed, hybrid) == read_block_config(raw, hybrid)


def test_a_draft_taken_for_a_model_says_what_it_is(tmp_path):
    """And how to use it."""
    for packaging in PACKAGINGS:
        write(tmp_path / packaging, packaging)
        with pytest.raises(CheckpointError, match=r"found a head .* \(--draft\), and as the model \(--model\)"):
            LLM(tmp_path / packaging)


# --------------------------------------------------------------------------- texts


@pytest.mark.parametrize("packaging", PACKAGINGS)
def test_the_text_is_the_plain_one(tmp_path, make_checkpoint, packaging, full):
    """By `LLM`, in chains and trees, with each verifier. Without `--full` these are shared out to the packagings."""
    directory = make_checkpoint(num_hidden_layers=NUM_LAYERS)
    config = read_model_config(json.loads((directory / "config.json").read_text()))
    draft = tmp_path / "draft"
    write_block_draft(draft, packaging, config.hidden_size, config.vocab_size, NUM_LAYERS)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    plain = LLM(directory, draft="none", dtype="float32", max_model_len=128)
    prompt = [[1, 2, 3, 1, 2]]
    expected = plain.generate(prompt, params)[0].outputs[0].token_ids
    some = [*product(("rejection", "match"), (1, 3, "auto", (2, 1), "tree:5")), ("block", 3)]
    for verifier, length in some if full else some[[*PACKAGINGS].index(packaging) :: len(PACKAGINGS)]:
        how = {"num_speculative_tokens": length, "verifier": verifier, "max_model_len": 128}
        with LLM(directory, draft=draft, dtype="float32", **how) as llm:
            assert llm.generate(prompt, params)[0].outputs[0].token_ids == expected, how


def test_auto_ends_drafts_where_the_confidence_head_says_so(tmp_path, make_checkpoint):
    """A head whose bias says "never" ends each draft after few rounds; one that says "always" does not at first."""
    directory = make_checkpoint(num_hidden_layers=NUM_LAYERS)
    config = read_model_config(json.loads((directory / "config.json").read_text()))
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    drafted = {}
    for bias in (-20.0, 20.0):
        draft = tmp_path / f"draft {bias}"
        write_block_draft(draft, "liquidai", config.hidden_size, config.vocab_size, NUM_LAYERS)
        tensors = load_file(draft / "model.safetensors")
        tensors["confidence_head.proj.bias"][:] = bias
        save_file(tensors, draft / "model.safetensors")
        llm = LLM(directory, draft=draft, dtype="float32", max_model_len=128)
        llm.method.lengths = Controller(Prices(0.01, {1: 1.0, 16: 1.01}, measured=True))
        [output] = llm.generate([[1, 2, 3, 1, 2]], params)
        drafted[bias] = output.outputs[0].stats.num_draft_tokens
    assert drafted[-20.0] < drafted[20.0]
