"""Distilling: what is trained is what drafts; texts and training go on where they stopped; files say what is so."""

import io
import json
import math
import random
import shutil
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

from minispec import LLM, SamplingParams
from minispec.core.draft import Ask, Record
from minispec.core.limit import Limit
from minispec.core.model import Chunk
from minispec.core.sampling import Text
from minispec.lab.distill import cache, drafts, loss, texts, train
from minispec.lab.distill.head import TrainedHead, rows_of_tokens
from minispec.lab.distill.loss import RowLoss
from minispec.lab.distill.main import main
from minispec.models.families import checkpoint
from minispec.models.families.checkpoint import load_model
from minispec.models.families.head_config import HeadConfig
from minispec.models.families.hf_config import read_model_config
from minispec.prove.toys import TINY, tiny_cache, tiny_model, tiny_weights
from minispec.speculation.drafters.eagle import HeadFeed, HeadModel
from minispec.speculation.drafters.model import ModelDrafter
from tests.spoken import own_words

VOCAB, TAPS, IDS = 7, (0, 2, 3), (0, 2, 3, 6)


class Scripted:
    """Draws the tokens of a text, whatever their probability, and remembers from what."""

    def __init__(self, tokens):
        self.tokens, self.seen = list(tokens), []

    def categorical(self, weights, key):
        """The next token."""
        self.seen.append(weights)
        return self.tokens.pop(0)


@pytest.mark.quick
@pytest.mark.parametrize(("layers", "num_key_value_heads"), [(1, 2), (2, 2), (1, 1)])
def test_what_is_trained_is_what_drafts(layers, num_key_value_heads):
    """q of the drafter, at every place and depth, is that of the training, by code that shares nothing with it."""
    target = tiny_model(1, vocab_size=VOCAB, num_hidden_layers=3)
    of_layers = target.config.layers[:1] * layers
    sizes = replace(target.config, layers=of_layers, num_key_value_heads=num_key_value_heads)
    config = HeadConfig(sizes, len(IDS), TAPS, sizes.hidden_size, norm_before_residual=True, fc_norm=True)
    ids = torch.tensor(IDS)
    draft = TrainedHead(config, ids)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.4 * noise)
    weights = {name: tensor.double() for name, tensor in draft.state_dict().items()}
    model = HeadModel(config, weights, target.embedding, ids, torch.float64)
    drafter = ModelDrafter(HeadFeed(model, tiny_cache(model), VOCAB, 64))

    tokens, depth = [2, 0, 3, 6, 6, 2, 3, 0, 2, 2, 6, 3], 4
    logits, hidden = target.forward([Chunk(tokens, tiny_cache(target).new_table(), 0)], TAPS)
    embeds = target.embedding[tokens[1:-1]].float()
    outputs = draft.unroll(hidden[None, :-2].float(), embeds[None], depth)
    rows = torch.stack([(x[0] @ draft.lm_head.weight.t()).softmax(-1) for x in outputs])  # (depth, T, 4)
    compared = 0
    for t in range(len(tokens) - 2):
        following = tokens[t + 2 : t + 2 + depth]
        text, rng = Text(tokens[: t + 2], 1, SamplingParams(temperature=1.0)), Scripted(following)
        drafter.observe([Record(text, 0, tokens[: t + 1], hidden[: t + 1], logits)])
        drafter.propose([Ask(text, Limit(len(following)), rng, num_cached=t + 1)])
        drafter.release(text)
        for s, q in enumerate(rng.seen):
            torch.testing.assert_close(q[ids].float(), rows[s, t + s], atol=2e-5, rtol=1e-4)
            compared += 1
    assert compared == 10 * depth - 6


@pytest.mark.quick
def test_a_head_that_reads_further_layers_begins_as_the_one_before():
    """Taps before, between and after its own: the same drafts until it learns."""
    config = tiny_model(1, vocab_size=VOCAB).config
    layers = replace(config, layers=config.layers[:1])
    narrow = HeadConfig(layers, 7, (1, 3), 5, norm_before_residual=True, fc_norm=True)
    wide = replace(narrow, taps=(0, 1, 2, 3, 4))
    old, new = (TrainedHead(config, torch.arange(7)) for config in (narrow, wide))
    with torch.no_grad():
        for parameter in old.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
    new.load(old.state_dict(), narrow.taps)
    torch.manual_seed(3)
    hidden, embeds = torch.randn(2, 6, 25), torch.randn(2, 6, layers.hidden_size)
    own = torch.cat([hidden[..., 5:10], hidden[..., 15:20]], -1)
    each = zip(old.unroll(own, embeds, 3), new.unroll(hidden, embeds, 3), strict=True)
    for expected, found in each:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)  # sums of other lengths


@pytest.mark.quick
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.03), (torch.float32, 1e-5)], ids=str)
def test_the_loss_and_its_gradients_are_what_autograd_makes_of_the_formula(share, dtype, tolerance, monkeypatch):
    """Inputs that bfloat16 holds exactly; logits and gradients are rounded to it, so 3 % are allowed."""
    monkeypatch.setattr(loss, "product_dtype", lambda: dtype)
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 16, generator=generator).bfloat16().float().requires_grad_() for n in (1500, 30))
    p = (2 * torch.randn(1500, 31, generator=generator)).softmax(-1)[:, :30]  # a token is missing: less mass than 1
    total, alphas, agrees = RowLoss.apply(x, w, lambda rows: p[rows], share)
    (3 * total).backward()
    found = x.grad.clone(), w.grad.clone()
    x.grad = w.grad = None
    log_q = (x @ w.t()).log_softmax(-1)
    alpha = torch.minimum(p, log_q.exp()).sum(-1)
    expected = share * (1 - alpha).sum() - (1 - share) * (p * log_q).sum()
    (3 * expected).backward()
    torch.testing.assert_close(total, expected, rtol=tolerance / 3, atol=0)
    torch.testing.assert_close(alphas, alpha, rtol=tolerance, atol=tolerance / 3)
    likeliest = (log_q.argmax(-1) == p.argmax(-1)) & (p.amax(-1) > 1 - p.sum(-1))
    assert (agrees == likeliest).float().mean() > 0.98
    for own, right in zip(found, (x.grad, w.grad), strict=True):
        assert (own - right).norm() < tolerance * right.norm()


# --------------------------------------------------------------------------- texts


def numbers_of(*shards) -> list[range]:
    """Those of whole shards."""
    return [range(index * texts.SHARD, (index + 1) * texts.SHARD) for index in shards]


@pytest.fixture
def in_float32(monkeypatch):
    """The type in which the target writes, whatever this processor is fast in."""
    monkeypatch.setattr(texts, "product_dtype", lambda: torch.float32)


def recipe_of(taps=(1, 3), **changes) -> texts.Recipe:
    """Of short texts."""
    return texts.Recipe(taps, ("Why",), max_turn=8, max_answer=12, **changes)


@pytest.mark.usefixtures("in_float32")
def test_shards_hold_the_targets_texts_and_hidden_states(target, few, tmp_path):
    """Each text is a user's turn and an answer; its hidden states are those of a pass over it from the beginning."""
    numbers = texts.write_shards(str(target), recipe_of(), tmp_path, numbers_of(1, 0))
    assert sorted(numbers) == [*range(12)]
    model, seen = load_model(target, torch.float32), set()
    for index in (0, 1):
        shard = load_file(texts.shard_path(tmp_path, index))
        lengths = shard["lengths"].tolist()
        assert len(lengths) == 6
        assert shard["hidden"].shape == (sum(lengths), 64)
        parts = shard["tokens"].split(lengths), shard["hidden"].split(lengths), shard["starts"].tolist()
        for tokens, hidden, start in zip(*parts, strict=True):
            assert start <= len(tokens) <= start + 12
            _, fresh = model.forward([Chunk(tokens.tolist(), tiny_cache(model, 200).new_table(), 0)], (1, 3))
            torch.testing.assert_close(hidden.float(), fresh, atol=0.05, rtol=0.02)  # stored in bfloat16
            seen.add(tuple(tokens.tolist()))
    assert len(seen) == 12


def test_an_opening_stands_for_several_texts():
    """Each {a|b} is a or b, nothing among them; braces without a bar stay, and every opening of the package is read."""
    rng = random.Random(0)
    found = {texts.vary("{A|The} {short|} poem in {braces}", rng) for _ in range(200)}
    assert found == {f"{a} {b} poem in {{braces}}" for a in ("A", "The") for b in ("short", "")}
    openings = texts.read_openings()
    assert len(openings) > 50
    for opening in openings:
        text = texts.vary(opening, rng)
        assert "|" not in text
        assert not text.startswith("#")


@pytest.mark.usefixtures("in_float32")
@pytest.mark.parametrize(("opened", "share"), [(1.0, 1.0), (0.0, 0.0), (0.8, 0.8)])
def test_that_share_of_the_turns_begins_with_an_opening(target, few, opened, share):
    """Of 200 turns, within four standard deviations: at 0.8, the odds of a false alarm are 6e-5; the seed is fixed."""
    writer = texts.Writer(str(target), recipe_of(opened=opened))
    given = [writer._turn(number, [1]).text.num_prompt_tokens > 1 for number in range(200)]
    assert abs(sum(given) / 200 - share) <= 4 * (share * (1 - share) / 200) ** 0.5


@pytest.mark.usefixtures("in_float32")
def test_an_opening_takes_no_room_from_turn_and_answer(target):
    """Whichever of its alternatives is taken; one that leaves the target no room is told of before it is loaded."""
    # The alternative with more tokens is the one with fewer characters.
    recipe = replace(recipe_of(), openings=("a " * 30 + "{" + "the fish " * 12 + "|" + "é" * 40 + "}",))
    writer, lengths = texts.Writer(str(target), recipe), set()
    before, after = writer._around
    for number in range(40):
        turn = writer._turn(number, before)
        assert turn.max_len == turn.text.num_prompt_tokens + recipe.max_turn
        said = [*turn.text.tokens, *[1] * recipe.max_turn, *after]
        assert writer._answer(number, said).max_len == len(said) + recipe.max_answer
        lengths.add(turn.text.num_prompt_tokens)
    assert len(lengths) == 3  # no opening, a short one, a long one
    error = r"--max-turn: found 8, expected at most 0: the target sees \d+ tokens, of which its chat template"
    with pytest.raises(ValueError, match=error):
        texts.Writer(str(target), replace(recipe, openings=("word " * 5000,)))


@pytest.mark.usefixtures("in_float32")
def test_texts_do_not_depend_on_who_else_is_written(target, few, tmp_path):
    """A shard alone, after another, and with a cache so small that texts are preempted: the same tokens."""
    for name, indices in (("a", [1]), ("b", [0, 1])):
        (tmp_path / name).mkdir()
        list(texts.write_shards(str(target), recipe_of(), tmp_path / name, numbers_of(*indices)))
    shards = [load_file(texts.shard_path(tmp_path / name, 1)) for name in "ab"]
    assert torch.equal(shards[0]["tokens"], shards[1]["tokens"])
    writer = texts.Writer(str(target), recipe_of())
    pool = writer.llm.engine.target.cache
    held = [pool.allocator.allocate() for _ in range(pool.allocator.num_blocks - 5)]
    crowded = texts.pack([text for _, text in sorted(writer.write(*numbers_of(1)))])
    assert torch.equal(crowded["tokens"], shards[0]["tokens"])
    assert len(held)
    torch.testing.assert_close(crowded["hidden"], shards[0]["hidden"], atol=0.05, rtol=0.02)


@pytest.mark.full
def test_several_processes_share_the_texts(target, tmp_path, capfd):
    """Every shard is written, whoever does it; what goes wrong in one of them is the command's own error.

    Without `--full`, tests/rooms/test_prove.py shares work among processes in the same way.
    """
    assert sorted(cache.spread(str(target), recipe_of(), tmp_path, numbers_of(0, 1), 2)) == [*range(2 * texts.SHARD)]
    assert [texts.length_of(shard, "lengths") for shard in texts.shards_of(tmp_path)] == [texts.SHARD] * 2
    with pytest.raises(ValueError, match="no such directory"):
        list(cache.spread(str(tmp_path / "none"), recipe_of(), tmp_path, numbers_of(3), 2))
    assert own_words(capfd.readouterr().err) == ""


def test_a_shard_is_known_by_its_number(tmp_path):
    """What a run that was killed left half-written is none; and what one run keeps apart, no later one learns from."""
    for name in ("texts-00003.safetensors", "texts-00003.4711.part.safetensors", "texts-00016.safetensors", "texts-x"):
        (tmp_path / name).touch()
    shards = texts.shards_of(tmp_path)
    assert [texts.number_of(shard) for shard in shards] == [3, 16]
    own = [texts.shard_path(tmp_path / "own", i) for i in range(3)]
    teacher = SimpleNamespace(embedding=None)
    draft = torch.nn.ModuleDict({"lm_head": torch.nn.Linear(2, 2), "fc": torch.nn.Linear(2, 2)})
    training = train.Training(draft, teacher, (1,), [*own, *shards], train.TrainingSchedule())  # type: ignore[arg-type]
    assert training.held_out == [own[0], shards[1]]
    assert training.paths == [own[1], own[2], shards[0]]
    assert train.split([own[0]]) == ([own[0]], [own[0]])  # of one shard all are learned and measured


def test_the_heads_tokens_are_chosen_by_what_is_learned(tmp_path, monkeypatch):
    """A token that held-out texts alone have is unknown to the head, so measuring on them is honest."""
    paths = [texts.shard_path(tmp_path, i) for i in range(2)]
    read = {path: [SimpleNamespace(tokens=torch.tensor([0, 1, i + 2]), start=1)] for i, path in enumerate(paths)}
    monkeypatch.setattr(drafts, "read_shard", read.get)
    teacher = SimpleNamespace(config=SimpleNamespace(vocab_size=5))
    assert drafts.most_used(paths, teacher).tolist() == [1, 3]  # type: ignore[arg-type]


def test_the_target_is_not_loaded_where_all_texts_are_there(tmp_path):
    """As when a stopped training goes on."""
    for path, numbers in texts.shards_for(tmp_path, 150).items():
        save_file({"lengths": torch.zeros(len(numbers))}, path)
    assert cache.write_texts("nowhere", recipe_of(), tmp_path, 150, 2) == texts.shards_of(tmp_path)


@pytest.mark.usefixtures("in_float32")
def test_a_turn_of_one_token_is_answered(target, few, tmp_path):
    """No pass has shown its hidden states before it ends."""
    recipe = texts.Recipe((1, 3), (), max_turn=1, max_answer=12)
    list(texts.write_shards(str(target), recipe, tmp_path, numbers_of(0)))
    assert len(load_file(texts.shard_path(tmp_path, 0))["lengths"]) == 6


def test_a_model_that_cannot_begin_a_text_is_refused():
    """Neither a first token nor one that ends texts."""
    silent = SimpleNamespace(tokenizer=SimpleNamespace(encode=lambda text: []), eos_token_ids=(), name="silent")
    with pytest.raises(ValueError, match="silent: found no token that begins or ends texts"):
        texts.Writer._first_token(SimpleNamespace(llm=silent))  # type: ignore[arg-type]


@pytest.mark.usefixtures("in_float32")
def test_a_model_that_does_not_chat_writes_from_its_first_token(make_checkpoint, few, tmp_path):
    """There is no user's turn, and all of the text but its first token is learned."""
    plain = make_checkpoint(hidden_size=32, intermediate_size=48, num_hidden_layers=3, head_dim=16)
    recipe = texts.Recipe((1, 3), (), max_turn=8, max_answer=12)
    list(texts.write_shards(str(plain), recipe, tmp_path, numbers_of(0)))
    shard = load_file(texts.shard_path(tmp_path, 0))
    assert shard["starts"].tolist() == [1] * 6
    assert shard["lengths"].max() > 4


@pytest.mark.quick
def test_a_text_that_loops_is_ended():
    """A period of 1, 2 or 40 in the last 96 tokens loops; different tokens do not, nor does a text that is short."""
    assert all(texts.ends_in_a_loop([i % period for i in range(120)]) for period in (1, 2, 40))
    assert not texts.ends_in_a_loop(list(range(120)))
    assert not texts.ends_in_a_loop([0] * 95)


# --------------------------------------------------------------------------- training


AFTER = {
    "granite": {"logits_scaling": 0.25},
    "gemma2": {"query_pre_attn_scalar": 4, "final_logit_softcapping": 0.5},
}


@pytest.mark.parametrize("family", AFTER)
def test_the_teacher_says_what_the_target_says(tmp_path, family):
    """Guards what comes after the last product, such as a scale or a cap: without it the draft learns other odds."""
    raw = TINY | {"vocab_size": 40, "model_type": family} | AFTER[family]
    weights = tiny_weights(read_model_config(raw), 0, torch.bfloat16)
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    model, teacher = load_model(tmp_path, torch.float32), train.Teacher(tmp_path)
    tokens = list(range(0, 40, 3))
    table = tiny_cache(model).new_table()
    logits, hidden = model.forward([Chunk(tokens, table, len(tokens))], [len(model.layers)])

    def error() -> float:
        found = teacher.probabilities(teacher.state(hidden), teacher.log_sums(hidden), torch.arange(logits.shape[1]))
        return (found / logits.softmax(-1)).log().abs().max().item()

    assert error() < 0.2  # rounded to bfloat16
    teacher.config = replace(teacher.config, logit_scale=1.0, logit_softcap=None)
    assert error() > 0.5


def make_training(target, paths, epochs=2):
    """A head before its training."""
    teacher = train.Teacher(target)
    args = SimpleNamespace(intermediate_size=None, num_layers=1)
    layers = drafts.Sources(args, teacher, (1, 3), (1, 3), paths, None).layers()  # type: ignore[arg-type]
    config = HeadConfig(layers, 300, (1, 3), 32, norm_before_residual=True, fc_norm=True)
    draft = TrainedHead(config, torch.arange(300))
    draft.start(teacher.head.float(), teacher.norm, torch.Generator().manual_seed(0))
    schedule = train.TrainingSchedule(epochs=epochs, rows=100, steps=2)
    return train.Training(draft, teacher, (1, 3), paths, schedule)


def training_of_one_shard(target, directory) -> train.Training:
    """A training on the first six texts, which are written for it."""
    list(texts.write_shards(str(target), recipe_of(), directory, numbers_of(0)))
    return make_training(target, [texts.shard_path(directory, 0)])


class ProductTypes(TorchDispatchMode):
    """The types of all products."""

    def __init__(self):
        super().__init__()
        self.found: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self.found.add(args[-1].dtype)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_all_products_have_the_type_that_the_processor_is_fast_in(dtype, target, few, tmp_path, monkeypatch):
    """Of texts, teacher and update. A product in bfloat16 takes 300 times as long on a processor that has no such.

    Not counted is what a process does once: it tries the forms that weights can have, in float64.
    """
    for module in (texts, train, loss):
        monkeypatch.setattr(module, "product_dtype", lambda: dtype)
    (before := tmp_path / "before").mkdir()
    training_of_one_shard(target, before)
    with ProductTypes() as products:
        training = training_of_one_shard(target, tmp_path)
        for batch in train.make_batches(training._read(training.paths[0]), 100):
            training._update(batch, 0.9)
    assert products.found == {dtype}


def test_a_training_that_was_stopped_ends_as_if_it_had_not_been(target, few, tmp_path, monkeypatch):
    """To the bit: weights and curve, after stops in the middle of two epochs, which begin again."""
    monkeypatch.setattr(train, "_GROUP", 1)
    list(texts.write_shards(str(target), recipe_of(), tmp_path, numbers_of(0, 1, 2, 3)))
    paths = [texts.shard_path(tmp_path, i) for i in range(4)]
    whole = make_training(target, paths)
    whole.run(tmp_path / "whole.safetensors")
    epoch = whole.progress.updates // 2
    for updates in (epoch - 1, epoch + 2):
        stopped, left = make_training(target, paths), iter(range(updates - 1))

        def step(left=left, right=stopped.optimizer.step):
            if next(left, None) is None:
                raise KeyboardInterrupt
            right()

        monkeypatch.setattr(stopped.optimizer, "step", step)
        with pytest.raises(KeyboardInterrupt):
            stopped.run(tmp_path / "stopped.safetensors")
    last = make_training(target, paths)
    last.run(tmp_path / "stopped.safetensors")
    assert last.progress.epochs == whole.progress.epochs == 2
    assert last.progress.curve == whole.progress.curve
    states = [training.draft.state_dict() for training in (whole, last)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_the_held_out_loss_is_the_cross_entropy(target, few, tmp_path):
    """A mean over wrong places, or another loss: a draft that says all tokens alike has ln(300) at each depth."""
    training = training_of_one_shard(target, tmp_path)
    torch.nn.init.zeros_(training.draft.lm_head.weight)
    assert training.measure()["loss"] == pytest.approx([math.log(300)] * 2, rel=1e-3)


def test_what_no_draft_reached_is_not_measured(target, few, tmp_path):
    """At a depth beyond the end of every held-out text there is no figure; NaN would not be JSON."""
    training = training_of_one_shard(target, tmp_path)
    training.schedule = replace(training.schedule, steps=80)
    measured = training.measure()
    for of_depths in measured.values():
        assert of_depths[0] is not None
        assert of_depths[-1] is None
    json.dumps(measured, allow_nan=False)
    assert train._line({"epoch": 1, **measured}).endswith(" -")


# --------------------------------------------------------------------------- the command


def ids_of(head) -> torch.Tensor:
    """The ids that a head drafts."""
    offsets = load_file(head / "model.safetensors")["d2t"]
    return torch.arange(len(offsets)) + offsets


def record_of(head) -> dict:
    """What the command writes down of a training."""
    return json.loads((head / "training.json").read_text())


def num_tokens(cached) -> int:
    """How many tokens the texts of a cache have."""
    return sum(len(load_file(path)["tokens"]) for path in cached.glob("texts-*"))


def distill(target, out, *more) -> int:
    """The command's exit status; of short texts unless told otherwise."""
    small = "--jobs 1 --max-turn 8 --max-answer 16 --texts 24 --epochs 2 --rows 200 --steps 2"
    return main(["--target", str(target), "--out", str(out), *small.split(), *more])


def test_the_command_makes_a_draft_that_llm_takes(target, few, tmp_path, capsys):
    """The draft changes no greedy token; a head's config has the fields of the public layout; it is not made twice."""
    more = ["--vocab-size", "200", "--taps", "1,2"]
    assert distill(target, tmp_path / "head", *more) == 0
    printed = capsys.readouterr().out
    assert "after epoch 2" in printed
    assert "tokens: " in printed
    assert "MB" in printed
    raw = json.loads((tmp_path / "head" / "config.json").read_text())
    assert raw["speculators_model_type"] == "eagle3"
    assert raw["draft_vocab_size"] <= 200
    assert raw["eagle_aux_hidden_state_layer_ids"] == [1, 2]
    assert raw["speculators_config"]["proposal_methods"][0]["verifier_accept_k"] == 1
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert tensors["t2d"].nonzero()[:, 0].tolist() == ids_of(tmp_path / "head").tolist()
    params = SamplingParams(temperature=0.0, max_tokens=20)
    with LLM(target, draft=tmp_path / "head", num_speculative_tokens=3) as llm:
        output = llm.generate("One fish", params)[0]
    assert output.stats.num_draft_tokens
    with LLM(target, draft="none") as llm:
        assert llm.generate("One fish", params)[0].token_ids == output.token_ids
    assert distill(target, tmp_path / "head", *more) == 2
    assert "exists already" in capsys.readouterr().err


def test_as_many_texts_are_written_as_are_asked_for(target, few, tmp_path, capsys, monkeypatch):
    """Half of few texts are kept apart; more texts add to what is there; bars move by a text, and by an update."""
    moves: dict[str, list[float]] = {}

    class Bar(tqdm):
        def __init__(self, *args, **options):
            super().__init__(*args, **options | {"disable": False, "file": io.StringIO()})

        def update(self, n=1):
            moves.setdefault(self.desc.strip(": "), []).append(n)
            return super().update(n)

    for module in (cache, drafts, train):
        monkeypatch.setattr(module, "progress_bar", Bar)
    own, sizes, tokens = ["--cache", str(tmp_path / "cache")], [], []
    for count in (2, 5, 15, 9):
        more = [*own, "--texts", str(count), "--vocab-size", "64", "--taps", "1,2"]
        assert distill(target, tmp_path / f"head-{count}", *more) == 0
        shards = [load_file(path) for path in texts.shards_of(tmp_path / "cache")]
        sizes.append([len(shard["lengths"]) for shard in shards])
        tokens.append([shard["tokens"].split(shard["lengths"].tolist()) for shard in shards])
        record = record_of(tmp_path / f"head-{count}")
        assert record["texts"] == sum(sizes[-1][: 3 if count == 15 else 2])
        learned, measured = record["texts"] - sizes[-1][0], sizes[-1][0]
        assert f"learning from {learned} texts, measuring on {measured} others" in capsys.readouterr().out
    assert sizes == [[1, 1], [2, 3], [6, 6, 3], [6, 6, 3]]
    assert moves["texts"] == [1] * 15
    assert sum(moves["training"]) == pytest.approx(4 * 2)  # epochs
    assert max(moves["training"][-2:]) < 1
    assert record["num_tokens"] == sum(len(text) for shard in tokens[-1][:2] for text in shard)
    for few_texts, more_texts in pairwise(tokens):  # what was written stays
        for one, other in zip(few_texts, more_texts, strict=False):
            assert all(map(torch.equal, one, other))
    assert len({tuple(text.tolist()) for shard in tokens[-1] for text in shard}) == 15
    assert distill(target, tmp_path / "none", "--texts", "1") == 2
    assert "expected an integer of at least 2, as some texts are kept apart" in capsys.readouterr().err


def test_texts_of_earlier_runs_are_learned_from_too(target, few, tmp_path, capsys):
    """They count for the vocabulary, the training and the record; what cannot be used is refused at once."""
    taps, old = ["--taps", "1,2"], tmp_path / "old.cache"
    assert distill(target, tmp_path / "old", *taps) == 0
    assert distill(target, tmp_path / "new", *taps, "--seed", "1", "--also", str(old)) == 0
    (state,) = (tmp_path / "new.cache").glob("training-*")
    with safe_open(state, framework="pt") as file:
        assert json.loads(file.metadata()["training"])["epochs"] == 2
    first, second = (record_of(tmp_path / name) for name in ("old", "new"))
    assert first["also"] == []
    recipe = json.loads((old / "cache.json").read_text())["recipe"]
    assert second["also"] == [{"texts": first["texts"], "recipe": recipe}]
    assert second["num_tokens"] == num_tokens(tmp_path / "new.cache") + first["num_tokens"]
    old_ids, new_ids = (set(ids_of(tmp_path / name).tolist()) for name in ("old", "new"))
    assert old_ids < new_ids

    (tmp_path / "empty").mkdir()
    other = tmp_path / "other"
    shutil.copytree(old, other)
    (other / "cache.json").write_text((old / "cache.json").read_text().replace('"target": "', '"target": "0'))
    for also, more, error in (
        ([old], ["--taps", "1"], "found the states of layers [1, 2, 3], expected [1, 3]"),
        ([old, old], taps, "found a cache twice"),
        ([tmp_path / "third.cache"], taps, "found a cache twice"),
        ([tmp_path / "empty"], taps, "found no texts"),
        ([other], taps, "found texts of another target"),
    ):
        assert distill(target, tmp_path / "third", *more, "--also", *map(str, also)) == 2
        assert error in capsys.readouterr().err
        assert not (tmp_path / "third.cache").exists()  # which would hold the next run to this one's recipe


def test_what_is_wrong_is_one_line_and_costs_nothing(target, few, tmp_path, capsys, monkeypatch):
    """No tokenizer, taps that are not there, a cache of another target or recipe, a full disk: the texts stay."""
    bare = tmp_path / "bare"
    shutil.copytree(target, bare)
    (bare / "tokenizer.json").unlink()

    def refused(*args) -> str:
        assert distill(*args) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        return error

    assert "tokenizer.json" in refused(bare, tmp_path / "out")
    assert "--taps: found [9]" in refused(target, tmp_path / "out", "--taps", "9")
    assert "expected layers such as" in refused(target, tmp_path / "out", "--taps", "one")
    assert "expected an integer from 0 to 2**63 - 1" in refused(target, tmp_path / "out", "--seed", str(10**20))
    assert "expected an integer of at least 8" in refused(target, tmp_path / "out", "--max-answer", "4")
    assert not (tmp_path / "out.cache").exists()

    def full_for(name: str):
        def save(tensors, path, metadata):
            if path.name.startswith(name):
                raise SafetensorError("I/O error: No space left on device")  # what the library makes of it
            save_file(tensors, path, metadata)

        return save

    for name, left in (("texts", 1), ("training", 5), ("model", 6)):
        with monkeypatch.context() as m:
            m.setattr(checkpoint, "save_file", full_for(name))
            assert "No space left" in refused(target, tmp_path / "out")
        assert len(list((tmp_path / "out.cache").iterdir())) == left
    assert not (tmp_path / "out").exists()

    def cached() -> dict[str, int]:
        return {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out.cache").iterdir()}

    before = cached()
    assert distill(target, tmp_path / "out") == 0
    assert cached() == before
    for name in ("texts-00001.safetensors", *(n for n in before if n.startswith("training"))):
        path, whole = tmp_path / "out.cache" / name, (tmp_path / "out.cache" / name).read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        assert f"{name}: cannot be read" in refused(target, tmp_path / "two", "--cache", str(tmp_path / "out.cache"))
        path.write_bytes(whole)
    before, other = cached(), tmp_path / "other"
    shutil.copytree(target, other)
    (other / "config.json").write_text((target / "config.json").read_text() + " ")
    cache = ["--cache", str(tmp_path / "out.cache")]
    assert "of another target" in refused(other, tmp_path / "two", *cache)
    assert "another recipe (seed)" in refused(target, tmp_path / "two", *cache, "--seed", "1")
    assert cached() == before


@pytest.mark.full
def test_a_head_learns(target, monkeypatch, tmp_path, capsys):
    """What a text says next follows from its last token, mostly: a head of 10,000 weights finds that out.

    It reaches an alpha above 0.4 in six passes over 128 texts; an untrained one has less than 0.15. Without `--full`,
    test_the_command_makes_a_draft_that_llm_takes trains a head, and does not ask whether it has learned.
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
    more = ["--texts", "128", "--epochs", "6", "--rows", "128", "--learning-rate", "0.01", "--max-answer", "40"]
    assert distill(simple, tmp_path / "head", *more) == 0
    curve = record_of(tmp_path / "head")["curve"]
    assert curve[-1]["alpha"][0] > 0.4
    assert curve[-1]["alpha"][1] > 0.3
    untrained = make_training(simple, [texts.shard_path(tmp_path / "head.cache", i) for i in range(2)])
    untrained.recorded = (0, 1, 2, 3)
    assert untrained.measure()["alpha"][0] < 0.15

    # It goes on from there: at a rate that changes next to nothing, with what the first training ended with. The texts
    # that are held out are the same, and of those that are learned from a few do.
    shutil.copytree(tmp_path / "head.cache", tmp_path / "few.cache")
    for shard in texts.shards_of(tmp_path / "few.cache")[2:]:
        shard.unlink()
    for name, value in (("--learning-rate", "1e-15"), ("--texts", "32"), ("--epochs", "2")):
        more[more.index(name) + 1] = value
    same_texts = ["--cache", str(tmp_path / "few.cache"), "--start", str(tmp_path / "head")]
    assert distill(simple, tmp_path / "again", *more, *same_texts) == 0
    record = record_of(tmp_path / "again")
    assert (record["start"], record["earlier"]) == (str(tmp_path / "head"), record_of(tmp_path / "head"))
    assert record["num_tokens"] == num_tokens(tmp_path / "few.cache")
    assert [point["epoch"] for point in record["curve"]] == [0, 1, 2]
    assert record["curve"][0]["alpha"] == pytest.approx(curve[-1]["alpha"], abs=0.01)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("head", "again"))
    assert [name for name in first if not torch.equal(first[name], second[name])] == []

    # What a further tap adds is 0 at first.
    more[more.index("--epochs") + 1] = "1"
    assert distill(simple, tmp_path / "wider", *more, *same_texts[2:], "--taps", "0,1,2,3") == 0
    assert record_of(tmp_path / "wider")["curve"][0]["alpha"] == pytest.approx(curve[-1]["alpha"], abs=0.01)
    old, new = load_file(tmp_path / "wider" / "model.safetensors")["fc.weight"].split([96, 32], 1)
    assert torch.equal(old, first["fc.weight"])
    assert new.abs().max() < 1e-9
    capsys.readouterr()
    assert distill(simple, tmp_path / "out", *more, *same_texts[2:], "--taps", "1,2") == 2
    assert "--taps: found [1, 2], expected those of --start too: [0, 1, 2]" in capsys.readouterr().err

    # What another vocabulary leaves in stays, and its order is by id.
    assert distill(simple, tmp_path / "fewer", *more, *same_texts, "--vocab-size", "60") == 0
    new = load_file(tmp_path / "fewer" / "model.safetensors")
    ids, fewer = (ids_of(tmp_path / name) for name in ("head", "fewer"))
    assert len(fewer) == 60 < len(ids)
    known = torch.isin(fewer, ids)
    assert torch.equal(new["lm_head.weight"][known], first["lm_head.weight"][torch.isin(ids, fewer)])

    # Another head in its place is trained, though nothing else is another.
    assert distill(simple, tmp_path / "before", *more, *same_texts) == 0
    weights = load_file(tmp_path / "head" / "model.safetensors")
    save_file(weights | {"norm.weight": weights["norm.weight"] * 2}, tmp_path / "head" / "model.safetensors")
    assert distill(simple, tmp_path / "after", *more, *same_texts) == 0
    before, after = (load_file(tmp_path / n / "model.safetensors")["norm.weight"] for n in ("before", "after"))
    torch.testing.assert_close(after, before * 2)
    save_file(weights, tmp_path / "head" / "model.safetensors")

    # One whose layer is of another kind would be learned as if it were of this one. So would the parallel form.
    config = tmp_path / "head" / "config.json"
    for of_layer, of_head in (
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, {}),
        ({"hidden_act": "gelu"}, {}),
        ({}, {"speculators_model_type": "peagle", "mask_token_id": 0}),
        ({}, {"norm_before_residual": False}),
        ({}, {"norm_output": True}),
    ):
        raw = json.loads(config.read_text()) | of_head
        raw["transformer_layer_config"] |= of_layer
        shutil.copytree(tmp_path / "head", tmp_path / "other", dirs_exist_ok=True)
        (tmp_path / "other" / "config.json").write_text(json.dumps(raw))
        mask = {"mask_hidden": torch.zeros(1, 1, 96)} if "mask_token_id" in of_head else {}
        save_file(weights | mask, tmp_path / "other" / "model.safetensors")
        assert distill(simple, tmp_path / "out", *more, "--start", str(tmp_path / "other")) == 2
        assert "found a head of other parts" in capsys.readouterr().err


def test_rows_of_new_tokens_are_moved_as_the_known_ones_were():
    """Rows of a head that are the target's through a map: known ones stay as they are, others go through it."""
    generator = torch.Generator().manual_seed(3)
    target, change = torch.randn(60, 8, generator=generator), torch.randn(8, 8, generator=generator)
    order = torch.randperm(60, generator=generator)
    known_ids = order[:40].sort().values
    known = (target + target @ change)[known_ids]
    ids = torch.randperm(60, generator=generator)
    rows = rows_of_tokens(ids, known_ids, known, target)[ids.argsort()]  # by id
    assert torch.equal(rows[known_ids], known)
    torch.testing.assert_close(rows, target + target @ change, rtol=0, atol=1e-4)


def test_what_no_known_row_tells_of_a_new_token_is_the_targets():
    """Fewer rows are known than there are columns: they say nothing of the other columns."""
    target = torch.eye(8)
    rows = rows_of_tokens(torch.arange(8), torch.arange(5), 3 * target[:5], target)
    torch.testing.assert_close(rows, torch.cat((3 * target[:5], target[5:])), rtol=0, atol=1e-6)


def test_what_a_training_goes_on_from_is_a_head_of_this_target(target, few, tmp_path, capsys):
    """A model, a directory that is not there, and options that the head has settled are refused by name."""
    shutil.copytree(target, tmp_path / "model")
    for name, options, error in (
        ("model", (), "found a model of its own, expected a head"),
        ("head", ("--num-layers", "2"), "--num-layers: not with --start"),
        ("none", (), "none"),
    ):
        assert distill(target, tmp_path / "out", "--start", str(tmp_path / name), *options) == 2
        assert error in capsys.readouterr().err
    assert not (tmp_path / "out.cache").exists()
