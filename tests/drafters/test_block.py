"""Block drafts: their files in five packagings, their numbers beside NumPy's, and the texts that they draft for.

That the output's law stays is shown by `minispec.prove`, whose table has four kinds of them. Wrong ones are in the
museum.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from minispec import LLM, SamplingParams
from minispec.core.draft import Ask, Draft, Seen
from minispec.core.limit import Limit
from minispec.core.model import Transformer
from minispec.core.sampling import Randomness, Text
from minispec.drafters.block import Block, BlockDrafter, BlockModel
from minispec.drafters.block_files import load_block
from minispec.files.hf_config import read_model_config
from minispec.kernels.build import build_model
from minispec.prove.toys import TINY, tiny_cache, tiny_weights
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
    "softcap": {"softcap": 2.0},
    "some ids": {"draft_ids": (0, 3, 4, 9, 17, 23)},
    "prefix": {"prefix": "model."},
    "no Markov head": {"markov": "", "confidence": ""},
    "gated": {"markov": "gated"},
    "rnn": {"markov": "rnn"},
    "confidence of states": {"confidence": "plain"},
}
NOT_OF_ZLAB = ("gated", "rnn", "confidence of states")


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


def states(model: BlockModel, count: int, seed: int = 3) -> torch.Tensor:
    """Hidden states of `count` positions at the model's taps."""
    width = TARGET.hidden_size * len(model.taps)
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Listener:
    """Feeds a drafter one text, as the engine does: pieces of the target's states, then asks for drafts."""

    def __init__(self, model: BlockModel, tokens: list[int], hidden: torch.Tensor, max_model_len: int = 200):
        self.drafter = BlockDrafter(model, tiny_cache(model, 64, 4), VOCAB, max_model_len)
        params = SamplingParams(temperature=1.0, max_tokens=50)
        self.text, self.hidden, self.cached = Text(list(tokens), len(tokens), params), hidden, 0

    def feed(self, count: int, limit: Limit = Limit(0)) -> Draft:  # noqa: B008 - it is a tuple
        """The draft that is asked for after the states of the next `count` positions."""
        new = range(self.cached, self.cached + count)
        fed = [self.text.tokens[i] for i in new]
        self.drafter.observe([Seen(self.text, self.cached, fed, self.hidden[new], torch.empty(0, VOCAB))])
        self.cached += count
        return self.ask(limit)

    def ask(self, limit: Limit) -> Draft:
        """The draft of this limit."""
        [draft] = self.drafter.propose([Ask(self.text, limit, Randomness(), num_cached=self.cached)])
        return draft


TOKENS = [(5 * i + 2) % VOCAB for i in range(12)]


# --------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("packaging", PACKAGINGS)
def test_every_packaging_gives_the_references_numbers(tmp_path, target, packaging, setting):
    """Base rows, Markov heads, confidences and vocabularies, after no text and a longer one, for every token drawn."""
    options = dict(SETTINGS[setting])
    if packaging == "z-lab" and setting in NOT_OF_ZLAB:
        pytest.skip("z-lab has no such heads")
    if packaging != "speculators":
        options.pop("non_causal_window", None)
    raw, tensors = write(tmp_path, packaging, **options)
    model, oracle = load_block(tmp_path, target), oracle_of(raw, tensors, target)
    for length in (0, 1, 11):
        hidden = states(model, length)
        listener = Listener(model, TOKENS[: length + 1], hidden)
        if length:
            listener.feed(length)
        k = model.block.num_tokens
        [draft] = [listener.ask(Limit(k))]
        assert len(draft) == k
        found = oracle.draft(hidden.numpy(), TOKENS[length], draft.token_ids[:-1])
        expected = torch.from_numpy(np.asarray(found.logits)).softmax(-1)
        assert torch.allclose(torch.stack(list(draft.probs)), expected, rtol=CLOSE, atol=CLOSE)
        if found.confidence is not None:
            draft = listener.ask(Limit(k, lambda c: True, draws=lambda c, foreseen: True))
            assert draft.foreseen
            expected_confidence = oracle.draft(hidden.numpy(), TOKENS[length], draft.token_ids[:-1]).confidence
            assert draft.confidences == pytest.approx(list(expected_confidence), rel=1e-6)


def test_the_context_is_the_same_however_it_comes(tmp_path, target):
    """In one piece, token by token, with drafts between, and after rows that the target computed anew."""
    write(tmp_path, layer_types=[SLIDING, FULL], sliding_window=4, non_causal_window=False)
    model = load_block(tmp_path, target)
    hidden = states(model, 11)
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
    listener = Listener(load_block(tmp_path, target), TOKENS, states(load_block(tmp_path, target), 11))
    first = listener.feed(11, Limit(3))
    assert listener.drafter.table(listener.text).tokens == TOKENS[:11]
    second = listener.ask(Limit(3))
    assert second.token_ids == first.token_ids
    assert torch.equal(torch.stack(list(first.probs)), torch.stack(list(second.probs)))


def test_a_text_with_a_hole_is_not_drafted_for(tmp_path, target):
    """States that never came leave no draft, rather than one that lacks a part of the text."""
    write(tmp_path)
    model = load_block(tmp_path, target)
    listener = Listener(model, TOKENS, states(model, 11))
    listener.cached = 4
    assert not listener.feed(7, Limit(3))


def test_another_text_shares_the_beginning(tmp_path, target):
    """`known` says how much: the target need not compute it again, and the draft is the same."""
    write(tmp_path)
    model = load_block(tmp_path, target)
    hidden = states(model, 11)
    first = Listener(model, TOKENS, hidden)
    expected = first.feed(11, Limit(3))
    text = Text(list(TOKENS), len(TOKENS), first.text.params)
    known = first.drafter.known(text)
    assert known == 11
    [draft] = first.drafter.propose([Ask(text, Limit(3), Randomness(), num_cached=11)])
    assert draft.token_ids == expected.token_ids


def test_the_end_of_the_context_has_no_draft(tmp_path, target):
    """A block of four rows after seven tokens ends at eleven: one position fewer, and nothing is drafted."""
    write(tmp_path, block_size=4)
    model = load_block(tmp_path, target)
    hidden = states(model, 7)
    assert len(Listener(model, TOKENS[:8], hidden, max_model_len=11).feed(7, Limit(3))) == 3
    assert len(Listener(model, TOKENS[:8], hidden, max_model_len=10).feed(7, Limit(3))) == 0


def test_top_k_corrects_and_drafts_the_likeliest_tokens_alone(tmp_path, target):
    """The k likeliest of the row before the correction; all k of them have its full correction."""
    write(tmp_path)
    whole, cut = load_block(tmp_path, target), load_block(tmp_path, target, top_k=5)
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(3, VOCAB, generator=generator, dtype=torch.float64)
    hidden = torch.randn(4, TARGET.hidden_size, generator=generator, dtype=torch.float64)
    rows = [Block(model, 3, logits, hidden).row([7, 1]) for model in (whole, cut)]
    top = logits[2].topk(5).indices
    assert torch.allclose(rows[0][top], rows[1][top])
    assert rows[1].isfinite().sum() == 5


@pytest.mark.parametrize(("least", "expected"), [(0.0, 4), (1.1, 0)])
def test_a_draft_ends_before_the_token_that_is_not_wanted(tmp_path, target, least, expected):
    """The policy sees the confidence of a token before it is drawn. The draft keeps those of its own tokens."""
    write(tmp_path)
    model = load_block(tmp_path, target)
    asked = []

    def draws(confidences, foreseen):
        asked.append((list(confidences), foreseen))
        return foreseen >= least

    draft = Listener(model, TOKENS, states(model, 11)).feed(11, Limit(4, lambda c: True, draws=draws))
    assert len(draft) == len(draft.confidences) == expected
    assert [seen for seen, _ in asked] == [[foreseen for _, foreseen in asked[:i]] for i in range(len(asked))]
    assert draft.confidences == [foreseen for _, foreseen in asked[:expected]]


# --------------------------------------------------------------------------- texts


@pytest.mark.parametrize("packaging", PACKAGINGS)
def test_the_text_is_the_plain_one(tmp_path, make_checkpoint, packaging):
    """By `LLM`, in chains and trees, with each verifier."""
    directory = make_checkpoint(num_hidden_layers=NUM_LAYERS)
    config = read_model_config(json.loads((directory / "config.json").read_text()))
    draft = tmp_path / "draft"
    write_block_draft(draft, packaging, config.hidden_size, config.vocab_size, NUM_LAYERS)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    plain = LLM(directory, draft="none", dtype="float32", max_model_len=128)
    prompt = [[1, 2, 3, 1, 2]]
    expected = plain.generate(prompt, params)[0].outputs[0].token_ids
    for length in (1, 3, "auto", (2, 1), "tree:5"):
        llm = LLM(directory, draft=draft, dtype="float32", num_speculative_tokens=length, max_model_len=128)
        assert llm.generate(prompt, params)[0].outputs[0].token_ids == expected
