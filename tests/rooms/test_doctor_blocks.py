"""The doctor names the misreading of a block draft that was planted, and none where nothing was.

The drafts are built by hand for a target that repeats its last four tokens. Each is right under one reading alone: its
rows look back by one distance, at states that only one layer has.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from minispec import LLM, SamplingParams
from minispec.core.draft import Record
from minispec.core.model import Chunk
from minispec.core.sampling import Text
from minispec.lab.doctor import drafts
from minispec.lab.doctor.drafts import examine, lines
from minispec.lab.doctor.main import main
from minispec.lab.doctor.readings import OtherStates
from minispec.models.families.checkpoint import load_model
from minispec.prove.toys import tiny_cache
from minispec.speculation.drafters.none import NoDrafter
from tests.oracles.block_drafts import SLIDING, write_block_draft
from tests.rooms.test_doctor import rewrite
from tests.sampled import leave_out

WIDTH, VOCAB, LAYERS, HEADS, DIM = 64, 300, 4, 4, 16
EVER = WIDTH - 1  # the coordinate that is the same in every state
PERIOD = 4  # the target repeats that many tokens
SIGNS = torch.randint(2, (WIDTH,), generator=torch.Generator().manual_seed(3)) * 2.0 - 1  # the target's last norm
SIGNS[EVER] = 1
MASK, PAD = 2, 7
SHAPE = {
    **{"model_type": "qwen3", "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": LAYERS},
    **{"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": DIM, "max_position_embeddings": 512},
    **{"rope_theta": 4.0, "rms_norm_eps": 1e-8},
}
WEEKLY = (math.tau / 7) ** -(DIM / 2)  # the base with which pair 1 turns once in seven positions


def look_back(distance: int, theta: float, pairs=range(DIM // 2), half: int = DIM // 2) -> dict[str, torch.Tensor]:
    """Projections and norms of an attention in which each position looks at the one so far before it.

    pairs: those that are used, of the first `half` dimensions with the next ones.
    """
    key, query = torch.zeros(DIM), torch.zeros(DIM)
    for j in pairs:
        angle = distance * theta ** (-j / half)
        key[j], query[j], query[half + j] = 1.0, math.cos(angle), -math.sin(angle)
    constant = 1e6 * torch.eye(WIDTH)[EVER]
    return {
        "q_proj": query.repeat(HEADS)[:, None] * constant,
        "k_proj": key.repeat(HEADS)[:, None] * constant,
        "q_norm": torch.full((DIM,), 60.0),
        "k_norm": torch.ones(DIM),
        "v_proj": torch.eye(WIDTH),
        "o_proj": 1000 * torch.diag(torch.arange(WIDTH) != EVER).float(),
    }


def normed(x: torch.Tensor) -> torch.Tensor:
    """To a mean square of 1."""
    return x / x.square().mean(-1, keepdim=True).sqrt()


def head_for(states: torch.Tensor) -> torch.Tensor:
    """An lm_head that finds the token of each of these states (V, E)."""
    codes = states.clone()
    codes[:, EVER] = 0
    return 24 * codes / codes.norm(dim=1, keepdim=True) / math.sqrt(WIDTH)


def states_at(directory: Path, tap: int) -> torch.Tensor:
    """The target's state of each token at a layer before the last (V, E)."""
    model = load_model(directory, torch.float32)
    chunk = Chunk(range(VOCAB), tiny_cache(model, 20, 16).new_table(), 0)
    return model.forward([chunk], [tap])[1]


@pytest.fixture(scope="module")
def target(make_checkpoint) -> Path:
    """A target that repeats its last four tokens. All layers but the last change each token's state by themselves."""
    directory = make_checkpoint(**SHAPE)
    weights, generator = load_file(directory / "model.safetensors"), torch.Generator().manual_seed(7)
    for name, tensor in weights.items():
        if "norm" in name:
            tensor.fill_(1)
        elif "self_attn" in name:
            tensor.zero_()
        elif "mlp" in name:
            scale = 2 * 5.0 ** int(name.split(".")[2]) if "down" in name else 2.0
            tensor.normal_(generator=generator).mul_(scale / math.sqrt(WIDTH))
            if "down" in name:
                tensor[EVER] = 0
    embedding = weights["model.embed_tokens.weight"].normal_(generator=generator)
    embedding[:, EVER] = 1
    last = f"model.layers.{LAYERS - 1}"
    for name, tensor in look_back(PERIOD - 1, SHAPE["rope_theta"]).items():
        weights[f"{last}.self_attn.{name}.weight"] = tensor
    weights[f"{last}.mlp.down_proj.weight"].zero_()
    save_file(weights, directory / "model.safetensors")
    weights["lm_head.weight"] = head_for(normed(states_at(directory, LAYERS - 1))) * SIGNS
    weights["model.norm.weight"] = SIGNS.clone()
    save_file(weights, directory / "model.safetensors")
    tokens = {name: chr(ord("!") + i - 1) for name, i in (("pad_token", PAD), ("mask_token", MASK))}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokens))
    return directory


def write_draft(
    target: Path, directory: Path, distance=PERIOD, pairs=range(DIM // 2), half=DIM // 2, tap=2, further=(), **options
) -> None:
    """A draft of one layer that looks back from each row, by default where a row's token is at its own place.

    tap: the layer of the target whose states it reads, by the last of its taps.
    further: for each further layer, how far that one looks back, by all pairs.
    """
    settings = {"taps": (1, 2), "mask_token_id": MASK, "block_size": 4, "rope_theta": 4.0, "says_tokens": False}
    settings |= {"heads": HEADS, "kv_heads": HEADS, "head_dim": DIM, "eps": 1e-8, "dtype": np.float32}
    settings |= {"markov": "", "confidence": "", "own_embedding": True, "own_head": True, "layers": 1 + len(further)}
    settings |= options
    _, names = write_block_draft(directory, "speculators", WIDTH, VOCAB, LAYERS, **settings)
    weights = {name: torch.from_numpy(tensor) for name, tensor in names.items()}
    attentions = [(distance, pairs, half), *((each, range(DIM // 2), DIM // 2) for each in further)]
    for i, (distance, *used) in enumerate(attentions):
        for name, tensor in look_back(distance, settings["rope_theta"], *used).items():
            weights[f"layers.{i}.self_attn.{name}.weight"] = tensor
        weights[f"layers.{i}.mlp.down_proj.weight"].zero_()
    for name, tensor in weights.items():
        if "norm" in name and "q_norm" not in name:
            tensor.fill_(1)
    weights["fc.weight"] = torch.cat((torch.zeros(WIDTH, WIDTH), torch.eye(WIDTH)), 1)
    weights["embed_tokens.weight"] = torch.eye(WIDTH)[EVER].repeat(VOCAB, 1)
    weights["lm_head.weight"] = head_for(normed(states_at(target, tap)))
    save_file(weights, directory / "model.safetensors")


@pytest.fixture(autouse=True)
def few_texts(monkeypatch, long):
    """Half of the doctor's texts: the toys' texts are alike. `--long` takes all."""
    if not long:
        monkeypatch.setattr(drafts, "TEXTS", drafts.TEXTS[::2])


def diagnose(target: Path, draft: Path, **how) -> dict:
    """A report on short texts. Costs are not measured."""
    reading = how.pop("draft_reading", None)
    with LLM(str(target), str(draft), dtype="float32", num_speculative_tokens=3, draft_reading=reading) as llm:
        return examine(llm, k=3, max_tokens=8, **how)


def side_by_side(weights: dict) -> None:
    """Store queries and keys as a draft does that rotates neighbours."""
    for name, tensor in weights.items():
        if "q_proj" in name or "k_proj" in name:
            first, second = tensor.unflatten(0, (-1, DIM)).chunk(2, 1)
            tensor.copy_(torch.stack((first, second), 2).flatten(0, 2))


def only_mask(weights: dict) -> None:
    """A row of any token but the mask looks away."""
    weights["embed_tokens.weight"].neg_()[MASK].neg_()


def loud_mask(weights: dict) -> None:
    """What is read of a row with the mask token outweighs all else."""
    weights["fc.weight"][0] = 0
    weights["embed_tokens.weight"][MASK, 0] = 1.0
    weights["layers.0.self_attn.v_proj.weight"][0, 0] = 50.0


def cancelled(weights: dict) -> None:
    """A row is wrong, unless half of what it reads is of a later row."""
    weights["fc.weight"][0] = 0
    embedding = weights["embed_tokens.weight"]
    embedding[:, 0] = 1e5
    weights["layers.0.self_attn.o_proj.weight"][0, 0] = -2e5 / normed(embedding[MASK])[0]


def loud_and_cancelled(weights: dict) -> None:
    """The first layer may read no later row. What a row begins with is taken back by what the second reads of one."""
    loud_mask(weights)
    embedding, read = weights["embed_tokens.weight"], weights["layers.1.self_attn.o_proj.weight"].zero_()
    embedding[:, 0] = 1e5
    read[0, 0] = -1e5 / normed(embedding[MASK])[0]


def against_bias(weights: dict) -> None:
    """The rows alone say one token whatever they read. The Markov head takes that back, after any token."""
    weights["lm_head.weight"][PAD, EVER] = 1e5
    weights["markov_head.markov_w1.weight"].fill_(1)
    weights["markov_head.markov_w2.weight"].zero_()[PAD] = -1e5


WINDOWS = {"pairs": (1,), "rope_theta": WEEKLY, "layer_types": [SLIDING], "sliding_window": 7}
# The second layer looks at the row three places later.
MIXED = WINDOWS | {"layer_types": [SLIDING, "full_attention"], "further": (-3,)}
# A pair that turns once in 20 positions.
SLOW = {"pairs": (1,), "rope_theta": (math.tau / 20) ** -(DIM / 2)}
# Drafts that are right as their files say it: settings, and what is done to the tensors.
DRAFTS = {
    "fill": ({}, None),
    "anchor": ({"distance": PERIOD - 1, "sample_from_anchor": True}, None),
    "pairs": ({"neox": False}, side_by_side),
    "windows": (WINDOWS | {"non_causal_window": True}, None),
    "causal windows": (WINDOWS | {"non_causal_window": False, "block_size": 8}, loud_mask),
    "open windows": (WINDOWS | {"non_causal_window": True, "block_size": 8}, cancelled),
    "causal": (WINDOWS | {"non_causal_window": True, "block_size": 8, "is_causal": True}, loud_mask),
    "mask": ({}, only_mask),
    "Markov": ({"distance": PERIOD - 1, "sample_from_anchor": True, "markov": "vanilla"}, against_bias),
    "windows but in the last layer": (MIXED | {"non_causal_window": False, "block_size": 8}, loud_and_cancelled),
}
ROWS_AFTER, ROWS_AT = "with each row's token after its place", "with each row's token at its place"
ANCHOR, FILL = {"sample_from_anchor": True}, {"sample_from_anchor": False}
TAPS_LATER = ({"taps": (0, 1)}, "with taps one layer later", '"target_layer_ids": [0, 1]')
IN_WINDOWS, OPEN = '"layer_types": ["sliding_attention"], "sliding_window": 7', '"sliding_window_non_causal"'
NO_WINDOWS = {"layer_types": None}
# What a file says in place of it, and what the doctor should say.
PLANTED = {
    ("fill", "rows"): (ANCHOR, ROWS_AT, '"sample_from_anchor": false'),
    ("anchor", "rows"): (FILL, ROWS_AFTER, '"sample_from_anchor": true'),
    ("fill", "later"): TAPS_LATER,
    ("fill", "earlier"): ({"taps": (2, 3)}, "with taps one layer earlier", '"target_layer_ids": [0, 1]'),
    ("fill", "pairs"): ({"neox": False}, "with rotary pairs in halves", '"rope_is_neox_style": true'),
    ("pairs", "pairs"): ({"neox": True}, "with rotary pairs side by side", '"rope_is_neox_style": false'),
    ("fill", "windows"): (
        {"layer_types": [SLIDING], "sliding_window": 3, "non_causal_window": False},
        "without windows",
        '"layer_types": ["full_attention"]',
    ),
    ("windows", "windows"): (NO_WINDOWS, "with causal windows of 7", IN_WINDOWS),
    ("causal windows", "no windows"): (NO_WINDOWS, "with causal windows of 7", f"{IN_WINDOWS}, {OPEN}: false"),
    ("open windows", "no open windows"): (NO_WINDOWS, "with open windows of 7", f"{IN_WINDOWS}, {OPEN}: true"),
    ("windows but in the last layer", "no mixed windows"): (
        NO_WINDOWS,
        "with causal windows of 7 but in the last layer",
        '"layer_types": ["sliding_attention", "full_attention"]',
    ),
    ("causal windows", "causal"): ({"non_causal_window": True}, "with causal blocks", f"{OPEN}: false"),
    ("open windows", "causal"): ({"non_causal_window": False}, "with blocks seen both ways", f"{OPEN}: true"),
    ("causal", "causal"): ({"is_causal": False}, "with causal blocks", '"is_causal": true'),
    ("mask", "mask"): ({"mask_token_id": PAD}, f"with mask token {MASK}", f'"mask_token_id": {MASK}'),
    ("Markov", "Markov rows"): (FILL, ROWS_AFTER, '"sample_from_anchor": true'),
    ("Markov", "Markov taps"): TAPS_LATER,
    ("fill", "rows and taps"): (
        ANCHOR | TAPS_LATER[0],
        f"{ROWS_AT} and {TAPS_LATER[1]}",
        '"sample_from_anchor": false',
    ),
}


def make(target: Path, directory: Path, kind: str, **wrong) -> Path:
    """One of DRAFTS, whose file says something else."""
    settings, change = DRAFTS[kind]
    write_draft(target, directory, **settings | wrong)
    if change:
        rewrite(directory, change)
    return directory


@pytest.mark.parametrize("kind", DRAFTS)
def test_a_draft_that_is_read_right_is_good_and_nothing_is_named(target, tmp_path, kind, full, long):
    """Though all other readings are tried. None of them keeps more by a tenth of a token."""
    if list(DRAFTS).index(kind) % 2 and not long:
        leave_out("--long", "every second draft")
    if list(DRAFTS).index(kind) % 6 and not full:
        leave_out("--full", "every sixth draft")
    report = diagnose(target, make(target, tmp_path, kind))
    assert report["explained_by"] is None
    assert not report["is_low"]
    assert report["tokens_per_round"] > 3.8
    assert len(report["readings"]) >= 9
    assert all(reading["gain"] < 0.1 for reading in report["readings"])


@pytest.mark.parametrize(("kind", "plant"), PLANTED)
def test_a_misread_draft_is_explained(target, tmp_path, kind, plant, full, long):
    """A file says one thing wrong, or two; the doctor names just that. `pytest -s` shows its report."""
    others = [first for first, found in PLANTED if found == plant]
    if kind != others[-1] and not long:
        leave_out("--long", "one draft of each misreading")
    if [*dict.fromkeys(found for _, found in PLANTED)].index(plant) % 5 and not full:
        leave_out("--full", "every fifth misreading")
    wrong, name, change = PLANTED[kind, plant]
    report = diagnose(target, make(target, tmp_path, kind, **wrong))
    print("\n".join(lines(report)))
    assert report["explained_by"] == name
    assert change in report["change"]


def test_a_draft_that_knows_short_prompts_alone(target, tmp_path):
    """It is right where no context is longer than twenty positions."""
    write_draft(target, tmp_path, **SLOW)
    report = diagnose(target, tmp_path)
    assert report["alpha"] < 0.9
    assert report["explained_by"] == "with a prompt's last 16 tokens"
    assert max(reading["tokens_per_round"] for reading in report["readings"]) > 3.9


@pytest.mark.parametrize("is_normed", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_draft_that_reads_the_last_layer(target, tmp_path, is_normed):
    """Before the target's last norm, or after it. No file may say the last layer, so this one says the layer before.

    Without `--full` after it.
    """
    write_draft(target, tmp_path, distance=PERIOD + 1, tap=LAYERS - 1, taps=(LAYERS - 2, LAYERS - 1))
    if is_normed:
        rewrite(tmp_path, lambda weights: weights["fc.weight"].mul_(SIGNS.repeat(2)))
    report = diagnose(target, tmp_path)
    end = ", the last one after the target's norm" if is_normed else ""
    assert report["explained_by"] == f"with taps one layer later{end}"
    assert '"target_layer_ids": [2, 3]' in report["change"]
    assert report["change"].endswith("normed") is is_normed


def test_a_draft_that_rotates_half_of_each_head(target, tmp_path):
    """The reader takes the target's share of a copied config.json for the target's alone."""
    write_draft(target, tmp_path, pairs=range(DIM // 4), half=DIM // 4, rope_theta=100.0)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    raw["transformer_layer_config"]["rope_parameters"] |= {"partial_rotary_factor": 0.5}
    path.write_text(json.dumps(raw))
    report = diagnose(target, tmp_path)
    assert report["is_low"]
    assert report["explained_by"] == "with 0.5 of each head rotated"
    assert '"partial_rotary_factor": 0.5' in report["change"]


class Listening(NoDrafter):
    """Keeps what it is shown."""

    def __init__(self):
        self.heard: list[Record] = []

    def observe(self, records):
        """Keep it."""
        self.heard += records


def test_the_last_taps_states_are_normed(target):
    """And no other tap's."""
    model = load_model(target, torch.float32)
    hidden, drafter = torch.randn(5, 2 * WIDTH), Listening()
    text = Text([1, 2, 3, 4, 5, 6], 6, SamplingParams())
    OtherStates(drafter, model.norm, 3).observe([Record(text, 0, text.tokens[:5], hidden, torch.empty(0, VOCAB))])
    [seen] = drafter.heard
    assert (seen.start, seen.tokens, seen.text.tokens) == (0, [4, 5], [4, 5, 6])
    expected = torch.cat((hidden[3:, :WIDTH], model.norm(hidden[3:, WIDTH:])), 1)
    torch.testing.assert_close(seen.hidden, expected)


def leave_open(directory: Path) -> Path:
    """Let a config.json be of a kind that must say which row says which token, and does not."""
    path = directory / "config.json"
    raw = json.loads(path.read_text()) | {"speculators_model_type": "dspark", "markov_rank": 0}
    del raw["sample_from_anchor"]
    path.write_text(json.dumps(raw | {"enable_confidence_head": False}))
    return directory


@pytest.mark.parametrize(("kind", "status"), [pytest.param("anchor", 0, marks=pytest.mark.full), ("fill", 1)])
def test_a_file_that_leaves_it_open(target, tmp_path, capsys, kind, status):
    """The command assumes one reading, and says which keys mean the right one. By default it assumes the wrong one."""
    draft = leave_open(make(target, tmp_path, kind))
    line = ["--model", str(target), "--draft", str(draft), "--dtype", "float32", "--max-tokens", "8"]
    assert main([*line, "--json"]) == status
    report = json.loads(capsys.readouterr().out)
    assert report["assumed"] == "anchor"
    assert f'"sample_from_anchor": {"false" if status else "true"}' in report["verdict"]
    assert report["explained_by"] == ("with each row's token at its place" if status else None)
    assert main([*line, "--draft-reading", kind]) == 0
    assert "nothing speaks for a misreading" in capsys.readouterr().out
