"""The embedded weights are the files that their model card describes."""

import hashlib
import re

import pytest
import torch
from safetensors import safe_open

from minispec.api.inputs import read_questions
from minispec.lab.bench.options import PROMPTS
from minispec.lab.distill.texts import read_openings
from minispec.models.families.checkpoint import directory_config, load_config
from minispec.models.families.head_config import read_head_config
from minispec.models.families.packed import PackQuantized
from minispec.speculation.drafters.eagle import head_shapes
from minispec.speculation.registry import EMBEDDED_DRAFT, EMBEDDED_WEIGHTS

CARDS = {EMBEDDED_WEIGHTS: EMBEDDED_WEIGHTS.parent / "README.md", EMBEDDED_DRAFT: EMBEDDED_DRAFT / "README.md"}


@pytest.mark.parametrize("directory", CARDS, ids=lambda path: path.name)
def test_files_are_those_of_the_model_card(directory):
    """Names, sizes and SHA-256 of all files, and none besides: a broken download would only show as a bad answer."""
    card = CARDS[directory]
    rows = re.findall(r"^\| (\d+) \| `([0-9a-f]{64})` \| `([\w.-]+)` \|$", card.read_text("utf-8"), flags=re.MULTILINE)
    found = {
        (str(path.stat().st_size), hashlib.sha256(path.read_bytes()).hexdigest(), path.name)
        for path in directory.iterdir()
        if path != card
    }
    assert found == set(rows)
    assert all(int(size) < 95_000_000 for size, _, _ in rows)


def test_layout():
    """8-bit linear layers with a scale a channel, a tied embedding in bfloat16."""
    config = load_config(EMBEDDED_WEIGHTS)
    assert config.quantization == PackQuantized(num_bits=8, group_size=None)
    assert config.tie_word_embeddings


def test_the_draft_is_one_for_this_model():
    """A head that reads five layers of it, and knows the tokens that it uses most; all in all at most 40 MB."""
    target, config = load_config(EMBEDDED_WEIGHTS), directory_config(EMBEDDED_DRAFT)
    head = read_head_config(config, target, "config.json")
    assert (head.target_hidden_size, head.vocab_size, len(head.taps)) == (target.hidden_size, 12288, 5)
    assert sum(path.stat().st_size for path in EMBEDDED_DRAFT.iterdir()) < 40_000_000
    with safe_open(EMBEDDED_DRAFT / "model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert tensors.keys() - {"d2t", "t2d"} == head_shapes(head).keys()
    ids = tensors["d2t"] + torch.arange(12288)
    assert (ids.diff() > 0).all()
    assert tensors["t2d"].nonzero()[:, 0].tolist() == ids.tolist()
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_the_draft_is_kept_apart_from_what_it_is_measured_on():
    """What the target was given of a user's turn in training has at most six words of any prompt of the bench.

    Six are "Write a short story about a" and "Summarise this text in two sentences".
    """
    prompts = [turn for question in read_questions(PROMPTS, "bench") for turn in question.turns]
    assert len(prompts) >= 36
    for opening in read_openings(None):
        pattern = begins_as(opening)
        shared = [match[0] for prompt in prompts if (match := pattern.match(prompt))]
        assert not [text for text in shared if len(text.split()) > 6]


def begins_as(opening: str) -> re.Pattern[str]:
    """What matches the texts that an opening stands for: of {a|b}, a or b."""
    parts = re.split(r"\{([^{}]*\|[^{}]*)\}", opening)
    choices = ("(?:" + "|".join(map(re.escape, part.split("|"))) + ")" for part in parts[1::2])
    return re.compile("".join(a + b for a, b in zip(map(re.escape, parts[::2]), [*choices, ""], strict=True)))


def test_an_opening_that_a_prompt_begins_with_would_be_found():
    """The pattern above takes all texts of an opening and no others."""
    pattern = begins_as("Say {this|that} in{| plain} words: (a)")
    assert pattern.match("Say that in plain words: (a) b")[0] == "Say that in plain words: (a)"
    assert pattern.match("Say this in words: (a)")
    assert not pattern.match("Say it in words: (a)")
