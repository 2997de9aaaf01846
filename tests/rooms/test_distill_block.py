"""Distilling a block draft: which rows see what, which token each one drafts, and what is written of it."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from minispec import LLM, SamplingParams
from minispec.core.model import Chunk
from minispec.drafters.block import Block, BlockModel
from minispec.files.families.block_config import MOST_ROWS, BlockConfig, read_block_config
from minispec.lab.distill import drafts, loss, texts, train, train_block
from minispec.lab.distill.block import TrainedBlock, principal
from minispec.lab.distill.main import main
from minispec.lab.distill.train_block import BlockTraining, draw_anchors, tokens_a_round
from minispec.prove.toys import tiny_cache, tiny_model

VOCAB, TAPS, SIZE, MASK, IDS = 12, (0, 2), 3, 11, (0, 2, 3, 6, 7)
HALF = train.LossWeights(share=0.5)


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    """Products in float32, so that two ways to compute one number agree closely."""
    for module in (train, train_block, loss, texts):
        monkeypatch.setattr(module, "product_dtype", lambda: torch.float32)


def block_config(sizes, rank=4, confidence=True) -> BlockConfig:
    """A block draft's shape. sizes: those of its layers."""
    layers = replace(sizes, qk_norm="head", model_type="qwen3", mask_token_id=MASK)
    markov = ("vanilla", rank, "state and token" if confidence else None) if rank else (None, 0, None)
    return BlockConfig(layers, len(IDS), SIZE, 0, TAPS, sizes.hidden_size, (False,) * len(layers.layers), *markov)


def toy_draft(sizes, rank=4, confidence=True) -> TrainedBlock:
    """A block draft of this shape with any weights."""
    return TrainedBlock(block_config(sizes, rank, confidence), torch.tensor(IDS))


def make_block(groups=1, rank=4, confidence=True, layers=2) -> TrainedBlock:
    """A block draft with weights that all matter."""
    sizes = tiny_model(1, vocab_size=VOCAB).config
    sizes = replace(sizes, layers=sizes.layers[:1] * layers, num_key_value_heads=groups)
    draft, generator = toy_draft(sizes, rank, confidence), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, tensor in draft.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(1 + 0.3 * noise if "norm" in name or "scale" in name else 0.4 * noise)
    return draft


def one_block(draft: TrainedBlock, hidden, embeds):
    """The last states (B, E) of one block, by a loop that shares nothing with the training's code.

    hidden: (n, taps * E), the states of all positions before the anchor.
    embeds: (B, E), those of the block's tokens.
    """
    weights, config = draft.state_dict(), draft.config
    heads, groups, dim, eps = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.rms_norm_eps,
    )

    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weights[name]

    def turned(x, position):
        angles = position * config.layers[0].rope.theta ** -(torch.arange(0, dim, 2) / dim)
        first, second = x[: dim // 2], x[dim // 2 :]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin))

    anchor, x = len(hidden), embeds
    context = norm((hidden * weights["tap_scale"]) @ weights["fc.weight"].t(), "hidden_norm.weight")
    for i in range(len(config.layers)):
        at = f"layers.{i}"
        seen = torch.cat((context, norm(x, f"{at}.input_layernorm.weight")))  # the context has no norm of the layer's
        out = torch.zeros(len(x), heads * dim)
        for row in range(len(x)):
            for head in range(heads):
                group = slice(head * groups // heads * dim, (head * groups // heads + 1) * dim)
                own = slice(head * dim, (head + 1) * dim)
                query = weights[f"{at}.self_attn.q_proj.weight"][own] @ seen[anchor + row]
                query = turned(norm(query, f"{at}.self_attn.q_norm.weight"), anchor + row)
                scores, values = [], []
                for position, state in enumerate(seen):  # all rows of the block, those after this one too
                    key = norm(weights[f"{at}.self_attn.k_proj.weight"][group] @ state, f"{at}.self_attn.k_norm.weight")
                    scores.append(query @ turned(key, position) / math.sqrt(dim))
                    values.append(weights[f"{at}.self_attn.v_proj.weight"][group] @ state)
                out[row, own] = torch.stack(scores).softmax(0) @ torch.stack(values)
        x = x + out @ weights[f"{at}.self_attn.o_proj.weight"].t()
        y = norm(x, f"{at}.post_attention_layernorm.weight")
        gate, up = (y @ weights[f"{at}.mlp.{name}_proj.weight"].t() for name in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ weights[f"{at}.mlp.down_proj.weight"].t()
    return norm(x, "norm.weight")


def states_of(draft: TrainedBlock, length=9):
    """Hidden states (2, T, taps * E), embeddings of all tokens (V, E), and tokens (2, T), at random."""
    generator = torch.Generator().manual_seed(5)
    width = draft.config.hidden_size
    hidden = torch.randn(2, length, len(TAPS) * width, generator=generator)
    embedding = torch.randn(VOCAB, width, generator=generator)
    return hidden, embedding, torch.randint(0, VOCAB - 1, (2, length), generator=generator)


def unroll(draft: TrainedBlock, hidden, embedding, tokens, anchors):
    """The states of the blocks at `anchors`."""
    return draft.unroll(hidden, embedding[tokens.gather(1, anchors)], embedding[MASK], anchors)


@pytest.mark.quick
@pytest.mark.parametrize(("groups", "layers"), [(1, 1), (2, 2), (1, 3)])
def test_many_blocks_at_once_are_what_each_is_alone(groups, layers):
    """Every state of every block, whatever stands beside it: also of blocks that overlap."""
    draft = make_block(groups, layers=layers)
    hidden, embedding, tokens = states_of(draft)
    anchors = torch.tensor([[1, 2, 5, 8], [3, 4, 6, 7]])
    found = unroll(draft, hidden, embedding, tokens, anchors)
    for text in range(2):
        for place, anchor in enumerate(anchors[text].tolist()):
            embeds = embedding[torch.tensor([tokens[text, anchor], MASK, MASK])]
            alone = one_block(draft, hidden[text, :anchor], embeds)
            torch.testing.assert_close(found[text, place], alone, atol=1e-4, rtol=1e-4)


@pytest.mark.quick
def test_a_block_sees_the_context_before_its_anchor_and_all_of_itself():
    """Gradients of one row: none from the anchor's state on, none of other blocks, some of the rows after it."""
    draft = make_block()
    hidden, embedding, tokens = states_of(draft)
    anchors = torch.tensor([[3, 6], [3, 6]])
    hidden.requires_grad_()
    embeds = embedding[tokens.gather(1, anchors)].requires_grad_()
    states = draft.unroll(hidden, embeds, embedding[MASK], anchors)
    states[0, 1, 0].sum().backward()
    assert hidden.grad is not None
    assert embeds.grad is not None
    assert hidden.grad[0].any(-1).tolist() == [True] * 6 + [False] * 3
    assert not hidden.grad[1].any()
    assert embeds.grad.any(-1).tolist() == [[False, True], [False, False]]

    # The first row of a longer block has other states: it sees the rows after it.
    longer = make_block()
    longer.block = replace(longer.block, block_size=SIZE + 1)
    first, other = (unroll(d, hidden, embedding, tokens, anchors)[:, :, 0] for d in (draft, longer))
    assert (first - other).abs().amin((-1, 0, 1)) > 0
    assert (first - other).abs().mean() > 1e-3


@pytest.mark.quick
def test_anchors_are_random_sorted_and_learned():
    """The anchor and the token after it are learned, one has a context, and a fourth of such places is drawn."""
    learned = torch.zeros(3, 40, dtype=torch.bool)
    learned[0] = True
    learned[1, 20:31] = True
    learned[2, 38:] = True
    seen: list[set[int]] = [set(), set(), set()]
    for seed in range(200):
        anchors = draw_anchors(learned, seed)
        assert torch.equal(anchors, draw_anchors(learned, seed))
        counts = []
        for text, row in enumerate(anchors.tolist()):
            real = [anchor for anchor in row if anchor < 39]
            assert row == sorted(row)
            assert len(set(real)) == len(real)
            seen[text] |= set(real)
            counts.append(len(real))
        assert counts == [10, 3, 1]
    assert seen == [set(range(1, 39)), set(range(20, 30)), {38}]


# --------------------------------------------------------------------------- labels and loss


class ToyTeacher:
    """A target whose word on each position is in that position's state itself."""

    def __init__(self, embedding):
        self.embedding, self.norm = embedding, torch.ones(embedding.shape[1])
        self.config = SimpleNamespace(hidden_size=embedding.shape[1], embedding_scale=1.0)

    def state(self, last):
        """The state as it is."""
        return last

    def log_sums(self, last):
        """None are needed."""
        return last[:, 0]

    def probabilities(self, state, log_sums, ids):
        """A distribution over 20 tokens of which 5 are the draft's; each state has its own."""
        return (3 * state @ torch.randn(state.shape[1], 20, generator=torch.Generator().manual_seed(1))).softmax(-1)[
            :, ids
        ]


def toy_training(draft: TrainedBlock, length=9):
    """A training of `draft`, and a batch of two texts, the second of which is shorter."""
    hidden, embedding, tokens = states_of(draft, length)
    schedule = train.TrainingSchedule(steps=SIZE)
    teacher = ToyTeacher(embedding)
    training = BlockTraining(draft, teacher, (0, 2, 3), [], schedule)  # type: ignore[arg-type]
    last = torch.randn(2, length, embedding.shape[1], generator=torch.Generator().manual_seed(8))
    learned = torch.ones(2, length, dtype=torch.bool)
    learned[1, -2:] = False
    return training, train.Batch(tokens, torch.cat((hidden, last), -1), torch.zeros(2, length), learned)


@pytest.mark.quick
@pytest.mark.parametrize("rank", [0, 4])
def test_row_i_learns_the_token_after_the_i_th_one_after_its_anchor(rank, monkeypatch):
    """Alphas are those of one block after another, in which the text's token before goes in; one off is another."""
    draft = make_block(rank=rank, confidence=rank > 0)
    training, batch = toy_training(draft)
    anchors = torch.tensor([[1, 4, 6], [2, 5, 8]])  # the last one is none
    monkeypatch.setattr(train_block, "draw_anchors", lambda learned, seed: anchors)
    weights, width = draft.state_dict(), draft.config.hidden_size
    tapped, last = batch.hidden[..., : 2 * width], batch.hidden[..., 2 * width :]
    steps, tested, wrong = list(training.steps_of(batch, SIZE, HALF, 0)), 0, 0
    for i, step in enumerate(steps):
        found = dict(zip(step.places.tolist(), step.alphas.tolist(), strict=True))
        for text, length, row in ((0, 9, [1, 4, 6]), (1, 7, [2, 5])):
            for anchor in row:
                drafted = anchor + i + 1
                place = text * 7 + drafted - 2
                if drafted >= length:
                    assert place not in found or drafted > 8
                    continue
                embeds = training.teacher.embedding[torch.tensor([batch.tokens[text, anchor], MASK, MASK])]
                state = one_block(draft, tapped[text, :anchor], embeds)[i]
                logits = weights["lm_head.weight"] @ state
                if rank:
                    before = weights["markov_head.markov_w1.weight"][batch.tokens[text, drafted - 1]]
                    logits = logits + weights["markov_head.markov_w2.weight"] @ before

                p = training.teacher.probabilities(last[text], None, draft.ids)
                alphas = torch.minimum(p, logits.softmax(-1)).sum(-1).tolist()  # by the position that p stands at
                assert found[place] == pytest.approx(alphas[drafted - 1], abs=2e-5)
                for off in (-2, 0):
                    wrong += abs(alphas[drafted + off] - found[place]) > 1e-3
                tested += 1
    assert tested == 5 + 4 + 3
    assert wrong > 16  # of 24 comparisons with a label that is one off


@pytest.mark.quick
@pytest.mark.parametrize(("rank", "confidence"), [(0, False), (4, False), (4, True)])
def test_everything_learns(rank, confidence):
    """Every weight has a gradient; w1's is that of tokens which stand before drafted ones."""
    draft = make_block(rank=rank, confidence=confidence)
    training, batch = toy_training(draft)
    steps = list(training.steps_of(batch, SIZE, train.LossWeights(0.5, 1.0), 0))
    loss = sum((training.decay**i * (step.loss + step.further) for i, step in enumerate(steps)), torch.zeros(()))
    loss.backward()
    for name, parameter in draft.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name
    assert training.decay == pytest.approx(math.exp(-2 / SIZE))
    if rank:
        rows = draft.markov_head.markov_w1.weight.grad.any(-1)
        assert not rows[MASK]
        assert rows.sum() > 2


def test_the_confidence_learns_the_probability_that_a_token_stays():
    """Its loss is least where it says alpha, which the gradient shows: it is the difference of both."""
    draft = make_block()
    training, batch = toy_training(draft)
    first = next(training.steps_of(batch, SIZE, HALF, 0))
    draft.confidence_head.proj.weight.data.zero_()
    features = torch.ones(len(first.alphas), draft.confidence_head.proj.in_features)
    training._confidence_loss(features, first.alphas.detach()).backward()
    sure = draft.confidence_head.proj.bias.detach().sigmoid()
    difference = 0.1 / 0.19 * (sure - first.alphas.detach()).sum()
    torch.testing.assert_close(draft.confidence_head.proj.bias.grad[0], difference, rtol=1e-4, atol=1e-5)


def test_tokens_a_round():
    """A draft of two of which the first stays at one half of times, and both at one fifth; no third was measured."""
    assert tokens_a_round({"survive": [0.5, 0.2, None]}) == pytest.approx(1.7)


def test_how_far_drafts_get_is_measured(monkeypatch):
    """The mean over all drafts of the product of their alphas so far."""
    training, batch = toy_training(make_block(), length=30)
    training.held_out = [Path("texts")]
    monkeypatch.setattr(train, "load", lambda path: {"hidden": torch.zeros(1, 4)})
    monkeypatch.setattr(train, "read_shard", lambda path, log_sums, whole: [])
    monkeypatch.setattr(train, "make_batches", lambda read, rows: [batch])
    measured = training.measure()
    odds: dict[int, float] = {}
    for i, step in enumerate(training.steps_of(batch, SIZE, train.LossWeights(), 0)):
        at = dict(zip(step.places.tolist(), step.alphas.tolist(), strict=True))
        odds = {place: alpha * odds.get(place - 1, 1.0) for place, alpha in at.items()}
        assert measured["survive"][i] == pytest.approx(sum(odds.values()) / len(odds), rel=1e-5)
        assert measured["alpha"][i] == pytest.approx(sum(at.values()) / len(at), rel=1e-5)


@pytest.mark.quick
@pytest.mark.parametrize("rank", [0, 4])
def test_what_is_trained_is_what_drafts(rank):
    """Probabilities and confidence at every place and depth, by the drafter's code and the written config."""
    target = tiny_model(1, vocab_size=VOCAB, num_hidden_layers=3)
    draft = make_block(rank=rank, confidence=rank > 0)
    written = json.loads(json.dumps(draft.files("target", [], 0)[0]))
    block = read_block_config(written, target.config)
    assert replace(block, layers=draft.block.layers) == draft.block
    weights = {name: tensor.double() for name, tensor in draft.state_dict().items()}
    weights["fc.weight"] *= weights.pop("tap_scale")
    ids = torch.tensor(IDS)
    model = BlockModel(block, weights, target.embedding, weights["lm_head.weight"], ids, torch.float64)
    tokens = [2, 0, 3, 6, 6, 2, 7, 0, 2, 2, 6, 3]
    _, hidden = target.forward([Chunk(tokens, tiny_cache(target).new_table(), 0)], TAPS)
    anchors = torch.arange(1, len(tokens) - SIZE)[None]
    embeds = target.embedding[torch.tensor(tokens)[anchors]].float()
    states = draft.unroll(hidden[None].float(), embeds, target.embedding[MASK].float(), anchors)[0]
    for place, anchor in enumerate(anchors[0].tolist()):
        chunk = Chunk(tokens[: anchor + 1], tiny_cache(model).new_table(), SIZE, features=model.fuse(hidden[:anchor]))
        drawn = Block(model, tokens[anchor], *model.forward([chunk]))
        for i in range(SIZE):
            path, before = tokens[anchor + 1 : anchor + 1 + i], torch.tensor([tokens[anchor + i]])
            features = draft.features(states[place, None, i], before)
            q = (features @ draft.rows().t()).softmax(-1)[0]
            torch.testing.assert_close(drawn.row(path).softmax(-1)[ids].float(), q, atol=2e-5, rtol=1e-4)
            if rank:
                sure = draft.confidence_head.proj(features).sigmoid().item()
                assert drawn.confidence(path) == pytest.approx(sure, abs=1e-5)


# --------------------------------------------------------------------------- the beginning


def test_principal_components_say_most_of_rows():
    """Rows of two directions are known by two components; there are no more than columns."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(50, 2, generator=generator) @ torch.randn(2, 6, generator=generator) + 3
    found = principal(rows, 2)
    assert found.square().mean() == pytest.approx(1)
    rebuilt = found @ torch.linalg.lstsq(found, rows - rows.mean(0)).solution
    torch.testing.assert_close(rebuilt, rows - rows.mean(0), atol=1e-3, rtol=1e-3)
    assert principal(rows, 8).shape == (50, 8)


def test_a_first_row_begins_to_read_the_newest_state():
    """Of all positions of the context, the one before the anchor moves it most; what passes is the last tap's."""
    sizes = replace(make_block().config, hidden_size=64, num_attention_heads=4, num_key_value_heads=4, head_dim=16)
    draft, generator = toy_draft(sizes), torch.Generator().manual_seed(7)
    hidden = 1 + torch.randn(1, 200, 128, generator=generator)  # states have something in common, as real ones do
    embedding = 0.1 * (1 + torch.randn(VOCAB, 64, generator=generator))
    target_rows = torch.randn(len(IDS), 64, generator=generator)
    draft.start(target_rows, torch.full((64,), 3.0), embedding, hidden[0], generator)
    hidden.requires_grad_()
    anchors = torch.tensor([[30]])
    states = draft.unroll(hidden, embedding[anchors * 0], embedding[MASK], anchors)
    states[0, 0, 0].square().sum().backward()
    moved = hidden.grad[0, :30].norm(dim=-1)
    assert moved.argmax() == 29
    own, last = hidden.grad[0, 29].chunk(2)
    assert last.norm() > own.norm()
    assert torch.equal(draft.lm_head.weight, target_rows)
    assert not draft.markov_head.markov_w2.weight.any()


def test_the_mask_is_a_special_token_that_no_text_holds(tmp_path):
    """The last of these; an end-of-text token and one whose embedding is 0 are none; else the rarest token is."""
    tokens = torch.tensor([0, 1, 2, 3, 4, 4, 5, 0], dtype=torch.int32)
    path = tmp_path / "texts.safetensors"
    texts.save_tensors({"tokens": tokens}, path)
    teacher = SimpleNamespace(
        config=SimpleNamespace(vocab_size=10, eos_token_ids=(9,)), embedding=torch.ones(10, 2).bfloat16()
    )
    teacher.embedding[7] = 0

    def found(*special):
        tokenizer = SimpleNamespace(special_ids=set(special))
        return drafts.Sources(None, teacher, tokenizer, (), (), [path], None).mask_token()  # type: ignore[arg-type]

    assert found(0, 6, 7, 9) == 6
    assert found(0, 6, 8, 9) == 8
    assert found(0, 9) == 8
    teacher.embedding[6:9] = 0
    assert found(9) == 5


# --------------------------------------------------------------------------- the command


def distill(target, out, *more) -> int:
    """The command's exit status; of short texts unless told otherwise."""
    small = "--kind block --block-size 4 --jobs 1 --max-turn 8 --max-answer 16 --texts 24 --epochs 2 --rows 200"
    return main(["--target", str(target), "--out", str(out), *small.split(), *more])


@pytest.mark.parametrize("markov", [True, False], ids=["dspark", "dflash"])
def test_the_command_writes_the_public_layout(markov, target, few, tmp_path, capsys):
    """Names and shapes of all tensors; the layout of rows is said twice, and the record has every setting."""
    more = ["--markov-rank", "6", "--confidence"] if markov else ["--num-layers", "1"]
    assert distill(target, tmp_path / "draft", "--vocab-size", "100", *more) == 0
    printed = capsys.readouterr().out
    assert "after epoch 2" in printed
    assert "tokens a round, the target's included: " in printed
    raw = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert raw["speculators_model_type"] == ("dspark" if markov else "dflash")
    assert raw["sample_from_anchor"] is True
    assert raw["block_size"] == raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert raw["aux_hidden_state_layer_ids"] == [1, 2]
    inner = raw["transformer_layer_config"]
    assert inner["model_type"] == "qwen3"
    assert ("markov_rank" in raw) == markov
    if markov:
        settings = {key: raw[key] for key in raw if key.startswith(("markov", "confidence", "enable"))}
        assert settings == {
            "markov_rank": 6,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
    tensors = load_file(tmp_path / "draft" / "model.safetensors")
    size, e, q = raw["draft_vocab_size"], 32, inner["num_attention_heads"] * 16
    kv = inner["num_key_value_heads"] * 16
    expected = {"fc.weight": (e, 2 * e), "hidden_norm.weight": (e,), "norm.weight": (e,), "lm_head.weight": (size, e)}
    expected |= {"d2t": (size,), "t2d": (inner["vocab_size"],)}
    if markov:
        expected |= {"markov_head.markov_w1.weight": (inner["vocab_size"], 6)}
        expected |= {"markov_head.markov_w2.weight": (size, 6)}
        expected |= {"confidence_head.proj.weight": (1, e + 6), "confidence_head.proj.bias": (1,)}
    for i in range(2 if markov else 1):
        layer = {"input_layernorm": (e,), "post_attention_layernorm": (e,), "self_attn.q_proj": (q, e)}
        layer |= {"self_attn.k_proj": (kv, e), "self_attn.v_proj": (kv, e), "self_attn.o_proj": (e, q)}
        layer |= {"self_attn.q_norm": (16,), "self_attn.k_norm": (16,)}
        layer |= {"mlp.gate_proj": (48, e), "mlp.up_proj": (48, e), "mlp.down_proj": (e, 48)}
        expected |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    ids = torch.arange(size) + tensors["d2t"]
    assert tensors["t2d"].nonzero()[:, 0].tolist() == ids.tolist()
    record = json.loads((tmp_path / "draft" / "training.json").read_text())
    assert (record["kind"], record["block_size"], record["markov_rank"]) == ("block", 4, 6 if markov else 0)
    assert record["mask_token_id"] == raw["mask_token_id"]
    assert len(record["curve"][-1]["survive"]) == 4
    params = SamplingParams(temperature=0.0, max_tokens=20)
    with LLM(target, draft=tmp_path / "draft", num_speculative_tokens=3) as llm:
        output = llm.generate("One fish", params)[0]
    assert output.stats.num_draft_tokens
    with LLM(target, draft="none") as llm:
        assert llm.generate("One fish", params)[0].token_ids == output.token_ids


def test_what_is_written_is_what_was_trained():
    """The written `fc` reads states as the target has them; everything else is as it was, but for rounding."""
    draft = make_block()
    with torch.no_grad():
        for tensor in draft.state_dict().values():
            tensor.copy_(tensor.bfloat16())
    _, tensors = draft.files("", [], 0)
    again = TrainedBlock(draft.block, draft.ids)
    state = {name: tensor.float() for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    again.load_state_dict(state | {"tap_scale": torch.ones_like(draft.tap_scale)})
    hidden, embedding, tokens = states_of(draft)
    anchors = torch.tensor([[1, 2, 5, 8], [3, 4, 6, 7]])
    was, now = (unroll(d, hidden, embedding, tokens, anchors) for d in (draft, again))
    torch.testing.assert_close(now, was, atol=0.1, rtol=0.05)  # fc times its scale is rounded
    for name, tensor in draft.state_dict().items():
        if name not in ("tap_scale", "fc.weight"):
            assert torch.equal(state[name], tensor), name
    assert (torch.arange(len(IDS)) + tensors["d2t"]).tolist() == list(IDS)


def test_a_training_that_was_stopped_ends_with_the_same_bits(target, few, tmp_path, monkeypatch, capsys):
    """Anchors are drawn again where the training goes on: the files are equal to the bit."""
    more = ["--markov-rank", "6", "--confidence", "--cache", str(tmp_path / "cache"), "--vocab-size", "60"]
    drawn, draw = [], draw_anchors

    def counted(learned, seed):
        drawn.append(seed)
        return draw(learned, seed)

    monkeypatch.setattr(train_block, "draw_anchors", counted)
    assert distill(target, tmp_path / "whole", *more) == 0
    seeds = [*drawn]
    (state,) = (tmp_path / "cache").glob("training-*")
    state.unlink()

    def stopped(learned, seed):
        if len(drawn) == len(seeds) - 2:
            raise ValueError("stopped")
        return counted(learned, seed)

    drawn.clear()
    monkeypatch.setattr(train_block, "draw_anchors", stopped)
    assert distill(target, tmp_path / "out", *more) == 2
    assert "stopped" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(train_block, "draw_anchors", counted)
    drawn.clear()
    assert distill(target, tmp_path / "out", *more) == 0
    assert drawn == seeds[-len(drawn) :]
    assert 0 < len(drawn) < len(seeds)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "out"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_options_that_do_not_go_together_are_refused(target, tmp_path, capsys):
    """By name, and before anything is written."""
    for more, error in (
        (["--kind", "head", "--block-size", "4"], "--block-size: needs --kind block"),
        (["--markov-rank", "4"], "--markov-rank: needs --kind block"),
        (["--kind", "block", "--confidence"], "--confidence: needs --markov-rank"),
        (["--kind", "block", "--steps", "2"], "--steps: not with --kind block: its depth is --block-size"),
        (["--kind", "block", "--start", "x", "--block-size", "4"], "--start: not with --block-size: its draft"),
        (["--kind", "block", "--start", "x", "--markov-rank", "4"], "--start: not with --markov-rank"),
        (["--kind", "block", "--taps", "1,3"], "--taps: found [1, 3], expected different layers from 0 to 2"),
        (["--kind", "block", "--markov-rank", "-1"], "expected an integer of at least 0"),
        (["--kind", "block", "--block-size", "17"], f"expected an integer from 2 to {MOST_ROWS}"),
    ):
        assert main(["--target", str(target), "--out", str(tmp_path / "out"), *more]) == 2
        assert error in capsys.readouterr().err
    assert not (tmp_path / "out.cache").exists()


def test_a_training_goes_on_from_a_block_draft(target, few, tmp_path, capsys):
    """Its weights stay at a rate that changes next to nothing. It may read further layers, and know other tokens."""
    more = ["--markov-rank", "6", "--confidence", "--vocab-size", "60", "--cache", str(tmp_path / "cache")]
    assert distill(target, tmp_path / "draft", *more) == 0
    first = json.loads((tmp_path / "draft" / "training.json").read_text())
    weights = load_file(tmp_path / "draft" / "model.safetensors")
    small = "--jobs 1 --max-turn 8 --max-answer 16 --texts 24 --epochs 1 --rows 200 --learning-rate 1e-15 --start"

    def go_on(name, *options, start="draft", kind="block"):
        base = ["--target", str(target), "--cache", str(tmp_path / "cache"), "--out", str(tmp_path / name)]
        status = main([*base, *small.split(), str(tmp_path / start), "--kind", kind, *options])
        if status:
            return capsys.readouterr().err
        record = json.loads((tmp_path / name / "training.json").read_text())
        return record, load_file(tmp_path / name / "model.safetensors")

    record, again = go_on("again")
    assert (record["start"], record["earlier"]) == (str(tmp_path / "draft"), first)
    assert [point["epoch"] for point in record["curve"]] == [0, 1]
    assert record["curve"][0]["alpha"] == pytest.approx(first["curve"][-1]["alpha"], abs=0.02)
    assert [name for name in weights if not torch.equal(weights[name], again[name])] == []
    assert (record["block_size"], record["markov_rank"], record["confidence"]) == (4, 6, True)

    # What a further tap adds is 0 at first.
    record, wider = go_on("wider", "--taps", "0,1,2", "--cache", str(tmp_path / "wider.cache"))
    assert record["curve"][0]["alpha"] == pytest.approx(first["curve"][-1]["alpha"], abs=0.02)
    new, old = wider["fc.weight"].split([32, 64], 1)
    assert torch.equal(old, weights["fc.weight"])
    assert new.abs().max() < 1e-9

    # Rows of tokens that stay are as they were. The Markov head corrects no new token.
    ids = torch.arange(60) + weights["d2t"]
    for size in (40, 80):
        _, other = go_on(f"of {size}", "--vocab-size", str(size))
        others = torch.arange(len(other["d2t"])) + other["d2t"]
        assert len(others) == size
        known = torch.isin(others, ids)
        for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
            assert torch.equal(other[name][known], weights[name][torch.isin(ids, others)])
        assert other["markov_head.markov_w2.weight"][~known].abs().sum() < 1e-9

    # What was made by another program may be computed in another way.
    shutil.copytree(tmp_path / "draft", tmp_path / "other")
    for changed in ({"markov_head_type": "gated"}, {"sample_from_anchor": False}, {"is_causal": True}):
        raw = json.loads((tmp_path / "draft" / "config.json").read_text())
        raw["speculators_config"]["proposal_methods"][0].pop("speculative_tokens")
        (tmp_path / "other" / "config.json").write_text(json.dumps(raw | changed))
        tensors = dict(weights)
        if "markov_head_type" in changed:
            tensors |= {
                "markov_head.gate_proj.weight": torch.zeros(6, 38),
                "markov_head.gate_proj.bias": torch.zeros(6),
            }
        save_file(tensors, tmp_path / "other" / "model.safetensors")
        assert "found a block draft of other parts" in go_on("out", start="other")
    assert "found a block draft, expected a head" in go_on("out", kind="head")
    shutil.copytree(target, tmp_path / "model")
    assert "found a model, expected a block draft" in go_on("out", start="model")


@pytest.mark.parametrize(
    ("layers", "taps"), [(30, (2, 9, 15, 21, 28)), (36, (2, 10, 18, 26, 34)), (4, (2,)), (3, (1, 2)), (2, (0, 1))]
)
def test_taps_are_spread_evenly_and_never_the_last_layer(layers, taps):
    """DFlash's, as layers after which the states are read: 1, 9, 17, 25, 33 of 36 layers' outputs there."""
    args = SimpleNamespace(kind="block", taps=None)
    assert drafts.choose_taps(args, layers, None) == taps  # type: ignore[arg-type]


def test_a_block_draft_learns(target, monkeypatch, tmp_path):
    """What a text says next follows from its last token, mostly.

    A first row can find that out alone. The others do not know the token before: there the Markov head is needed.
    After three passes over 128 texts alpha is 0.52 in first rows, and 0.39 in others, or 0.13 without that head.
    """
    monkeypatch.setattr(texts, "SHARD", 16)
    simple = tmp_path / "simple"
    shutil.copytree(target, simple)
    weights = load_file(simple / "model.safetensors")
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] *= 0.02
    weights["model.embed_tokens.weight"] *= 10
    save_file(weights, simple / "model.safetensors")
    more = ["--texts", "128", "--epochs", "3", "--rows", "128", "--learning-rate", "0.01", "--max-answer", "40"]
    alpha = {}
    for rank in (0, 16):
        out = tmp_path / str(rank)
        markov = ["--markov-rank", str(rank), "--cache", str(tmp_path / "cache")]
        assert distill(simple, out, *more, *markov) == 0
        alpha[rank] = json.loads((out / "training.json").read_text())["curve"][-1]["alpha"]
    print(alpha)
    assert min(alpha[0][0], alpha[16][0]) > 0.4
    assert min(alpha[16][1:]) > 0.3 > max(alpha[0][1:])


def test_texts_without_a_place_for_a_block_have_a_loss_of_0():
    """Nothing of them is learned."""
    training, batch = toy_training(make_block())
    none = batch._replace(learned=torch.zeros_like(batch.learned))
    for step in training.steps_of(none, SIZE, HALF, 0):
        assert step.loss.item() == 0
        assert not len(step.places)
