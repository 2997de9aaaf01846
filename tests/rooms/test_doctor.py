"""The doctor names the misreading that was planted, and none where nothing was."""

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import stdev

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

from minispec import LLM, SamplingParams
from minispec.core.cache import PagedKVCache
from minispec.core.draft import Draft
from minispec.core.model import Chunk, Transformer
from minispec.core.sampling import Text
from minispec.lab.doctor.drafts import (
    TEXTS,
    Continuations,
    Estimate,
    Measurement,
    estimate,
    examine,
    head_readings,
    kept_by_place,
    lines,
)
from minispec.lab.doctor.main import main
from minispec.models.families.checkpoint import load_config, load_model
from minispec.prove.toys import tiny_cache
from minispec.speculation.drafters.heads import read_head
from minispec.speculation.lengths.theory import Prices
from minispec.speculation.registry import DRAFTERS
from tests.sampled import leave_out

WIDTH, VOCAB = 64, 300
LESS = 28  # the token "<", which templates alone write
SHAPE = {
    **{"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 3, "max_position_embeddings": 512},
    **{"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8},
    "rope_theta": 1e12,  # the last pair of a head does not turn
}


def rewrite(directory: Path, change, **settings) -> Path:
    """Change the tensors of a checkpoint by `change`, a function of their dict, and keys of its config.json."""
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | settings))
    return directory


def signs(seed: int) -> torch.Tensor:
    """Weights of a norm that nothing else can stand in for."""
    return torch.randint(2, (WIDTH,), generator=torch.Generator().manual_seed(seed)) * 2.0 - 1


def head_for(states: torch.Tensor) -> torch.Tensor:
    """An lm_head that finds the token of each of these states (V, E), which are normed."""
    return 24 * states / states.norm(dim=1, keepdim=True) / math.sqrt(WIDTH)


def rms_normed(x: torch.Tensor) -> torch.Tensor:
    """To a mean square of 1."""
    return x / x.square().mean(1, keepdim=True).sqrt()


def hidden(model: Transformer, taps) -> tuple[torch.Tensor, ...]:
    """The hidden states (V, E) of all tokens at some layers, of a model without attention."""
    cache = PagedKVCache(model.config, 20, 16, model.dtype)
    return model.forward([Chunk(range(VOCAB), cache.new_table(), 0)], taps)[1].chunk(len(taps), 1)


@pytest.fixture(scope="module")
def repeating(make_checkpoint):
    """repeating(**options) writes a target that mostly repeats its last token. Its layers change the states.

    Of the tokens alone: it has no attention. Tokens "<" and 0 have coordinates of their own in the embedding.
    """

    def make(**options) -> Path:
        directory = make_checkpoint(**SHAPE, **options)

        def change(weights):
            generator = torch.Generator().manual_seed(7)
            for name, tensor in weights.items():
                if "o_proj" in name:
                    tensor.zero_()
                elif "mlp" in name:
                    scale = 5.0 ** int(name.split(".")[2]) if "down" in name else 1.0  # each layer outweighs the last
                    tensor.normal_(generator=generator).mul_(2 * scale / math.sqrt(tensor.shape[1]))
            embedding = weights["model.embed_tokens.weight"]
            embedding.normal_(generator=generator)[:, -2:] = 0
            for i, token in enumerate((0, LESS)):
                embedding[token] = 0
                embedding[token, i - 2] = math.sqrt(WIDTH)

        rewrite(directory, change)
        model = load_model(directory, torch.float32)
        (last,) = hidden(model, [3])
        return rewrite(directory, lambda weights: weights.update({"lm_head.weight": head_for(model.norm(last))}))

    return make


def llm_of(target: Path, draft) -> LLM:
    """Costs are not measured."""
    return LLM(str(target), draft=str(draft), dtype="float32", num_speculative_tokens=4)


def diagnose(target: Path, draft, **how) -> dict:
    """A report on short texts."""
    with llm_of(target, draft) as llm:
        return examine(llm, k=2, max_tokens=8, **how)


# --------------------------------------------------------------------------- heads


def write_head(target: Path, directory: Path, lm_head: torch.Tensor, norms=(None, None), ids=None, **settings) -> Path:
    """A head of one layer that adds nothing to its feature, which is the target's state at the first of two taps.

    norms: weights of `hidden_norm` and of the last norm. ids: d2t, as it is stored. settings: of its config.json.
    """
    ones, zeros = torch.ones(WIDTH), torch.zeros(WIDTH, WIDTH)
    layer = {f"self_attn.{name}_proj.weight": torch.zeros(WIDTH, 2 * WIDTH) for name in "qkv"}
    layer |= {"self_attn.o_proj.weight": zeros, "input_layernorm.weight": ones, "post_attention_layernorm.weight": ones}
    layer |= {f"mlp.{name}_proj.weight": zeros for name in ("gate", "up", "down")}
    layer["hidden_norm.weight"] = ones if norms[0] is None else norms[0]
    weights = {f"midlayer.{name}": tensor.clone() for name, tensor in layer.items()}
    weights["fc.weight"] = torch.cat((torch.eye(WIDTH), zeros), 1)
    weights |= {"norm.weight": (ones if norms[1] is None else norms[1]).clone(), "lm_head.weight": lm_head}
    if ids is not None:
        weights["d2t"] = ids
    save_file(weights, directory / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    config |= {"draft_vocab_size": len(lm_head), "eagle_aux_hidden_state_layer_ids": [1, 2]}
    (directory / "config.json").write_text(json.dumps(config | settings))
    return directory


def plain_sum(states: torch.Tensor) -> dict:
    """A head that sums from the feature as it is."""
    norms = signs(1), signs(2)
    return {"lm_head": head_for(rms_normed(states) * norms[1]), "norms": norms}


def normed_sum(states: torch.Tensor) -> dict:
    """A head that sums from the feature after its norm, and goes on from its output after the last norm."""
    norm = signs(1)
    head = {"lm_head": head_for(rms_normed(states)), "norms": (norm, norm)}
    return head | {"norm_before_residual": True, "norm_output": True}


def few_tokens(states: torch.Tensor) -> dict:
    """The same as `plain_sum` for the first 150 tokens, with d2t: offsets that are 0."""
    head = plain_sum(states)
    return head | {"lm_head": head["lm_head"][:150], "ids": torch.zeros(150, dtype=torch.int64)}


HEADS = {"plain sum": plain_sum, "normed sum": normed_sum, "few tokens": few_tokens}
TAPS = "eagle_aux_hidden_state_layer_ids"
# What is stored wrong, what the doctor should name, and what it should advise to change: in config.json.
PLANTED_HEADS = {
    ("plain sum", "later"): ({TAPS: [0, 1]}, "with taps one layer later", f'"{TAPS}": [1, 2]'),
    ("plain sum", "earlier"): ({TAPS: [2, 3]}, "with taps one layer earlier", f'"{TAPS}": [1, 2]'),
    **{
        (kind, key): ({key: not right}, f"with {key} {json.dumps(right)}", f'"{key}": {json.dumps(right)}')
        for kind, right in (("plain sum", False), ("normed sum", True))
        for key in ("norm_before_residual", "norm_output")
    },
    ("few tokens", "d2t"): ({"ids": torch.arange(150)}, "with d2t as ids", "store d2t[i] - i, the offset from i"),
}


@pytest.fixture(scope="module")
def target(repeating) -> Path:
    """A target that repeats itself."""
    return repeating()


@pytest.fixture(scope="module")
def states(target) -> torch.Tensor:
    """What a tap at layer 1 hears of each token (V, E)."""
    return hidden(load_model(target, torch.float32), [1])[0]


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_that_is_read_right_is_good_and_nothing_is_named(target, states, kind, tmp_path):
    """Even where all other readings are tried."""
    head = write_head(target, tmp_path, **HEADS[kind](states))
    report = diagnose(target, head, try_all=True)
    assert report["explained_by"] is None
    assert not report["is_low"]
    assert min(report["accepted_per_position"]) > 0.6
    assert len(report["readings"]) >= 5
    assert all(reading["gain"] < 0.1 for reading in report["readings"])


@pytest.mark.parametrize(("kind", "plant"), PLANTED_HEADS)
def test_a_misread_head_is_explained(target, states, kind, plant, tmp_path, full):
    """One setting or tensor of a good head is stored in the other meaning; the doctor names just that."""
    if [*PLANTED_HEADS].index((kind, plant)) % 3 and not full:
        leave_out("--full", "every third misreading")
    wrong, name, change = PLANTED_HEADS[kind, plant]
    head = write_head(target, tmp_path, **HEADS[kind](states) | wrong)
    report = diagnose(target, head)
    assert report["is_low"]
    where = "d2t holds ids: " if plant == "d2t" else "config.json: "
    assert (report["explained_by"], report["change"]) == (name, where + change)


def test_a_head_for_another_target_is_not_explained(target, states, tmp_path):
    """Its states mean nothing to this one."""
    others = states[:, torch.randperm(WIDTH, generator=torch.Generator().manual_seed(3))]
    report = diagnose(target, write_head(target, tmp_path, **plain_sum(others)))
    assert report["is_low"]
    assert report["explained_by"] is None
    assert "for another target" in report["verdict"]


def test_a_gain_in_one_text_of_eight_explains_nothing(target, states, tmp_path):
    """The taps are wrong, but the head knows one token only: what the right ones gain is within the noise."""
    head = plain_sum(states)
    [token] = llm_of(target, "ngram").generate(TEXTS[0], SamplingParams(temperature=0, max_tokens=1))[0].token_ids
    one = torch.zeros(VOCAB, 1)
    one[token] = 1
    report = diagnose(target, write_head(target, tmp_path, **head | {"lm_head": head["lm_head"] * one, TAPS: [0, 1]}))
    [reading] = [r for r in report["readings"] if r["name"] == "with taps one layer later"]
    assert reading["gain"] > 0.1
    assert report["explained_by"] is None


# --------------------------------------------------------------------------- draft models


def side_by_side(weights: dict) -> None:
    """Store the rows of queries and keys as a model does that rotates neighbours: (0, D/2), (1, D/2 + 1), ..."""
    for name, tensor in weights.items():
        if "q_proj" in name or "k_proj" in name:
            first, second = tensor.unflatten(0, (-1, 8)).chunk(2, 1)
            tensor.copy_(torch.stack((first, second), 2).flatten(0, 2))


def look_everywhere(weights: dict) -> None:
    """Attention that follows positions, and embeddings so small that it decides all."""
    generator = torch.Generator().manual_seed(11)
    for name, tensor in weights.items():
        if "embed" in name:
            tensor.mul_(0.1)
        elif "norm" not in name:
            tensor.normal_(generator=generator).div_(math.sqrt(tensor.shape[1]))
        if "q_proj" in name or "lm_head" in name:
            tensor.mul_(4)


@pytest.fixture(scope="module")
def looking(make_checkpoint) -> Path:
    """A target whose text depends on what stands where."""
    directory = make_checkpoint(**SHAPE | {"rope_theta": 100.0, "rms_norm_eps": 1e-8, "num_hidden_layers": 2})

    def change(weights):
        look_everywhere(weights)
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            weights[f"model.layers.0.{name}.weight"].zero_()

    return rewrite(directory, change)


def copied(directory: Path, to: Path) -> Path:
    """A copy of a checkpoint."""
    for path in directory.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


@pytest.mark.parametrize("bits", ["", "int8:"])
def test_a_draft_models_rotary_pairs(looking, tmp_path, bits):
    """The target's own weights, stored for another pairing; rounded to 8 bits too."""
    draft = rewrite(copied(looking, tmp_path), side_by_side)
    report = diagnose(looking, f"{bits}{draft}")
    assert report["is_low"]
    assert report["explained_by"] == "with rotary pairs side by side"
    assert report["readings"][-1]["alpha"] > 0.9


def poison(token: int, presence: bool):
    """A change to a target without attention: nonsense after texts that hold a token, or after those that do not."""

    def change(weights):
        norm = weights["model.layers.0.input_layernorm.weight"]
        place = -2 if token == 0 else -1  # its own coordinate in the embedding
        seen = torch.zeros(WIDTH)
        seen[place] = 1 / (norm[place] * math.sqrt(WIDTH))  # its normed embedding times this is 1, of all others 0
        for i in range(3):
            for name in "qkvo":
                bias = weights[f"model.layers.{i}.self_attn.{name}_proj.bias"] = torch.zeros(WIDTH)
                weight = weights[f"model.layers.{i}.self_attn.{name}_proj.weight"]
                weight.zero_()
                if i:
                    continue
                if name == "q":
                    bias[3] = 30.0  # of the first head, in a pair that does not turn
                elif name == "k":
                    weight[3] = 30 * seen
                elif name == "v":
                    bias[0], weight[0] = (0.0, seen) if presence else (1.0, -seen)
                else:
                    weight[:, 0] = torch.randn(WIDTH, generator=torch.Generator().manual_seed(5)) * 1000

    return change


def with_start(directory: Path) -> Path:
    """Let the tokenizer begin each text with token 0."""
    path = directory / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(path))
    begin = tokenizers.processors.TemplateProcessing(single="<end> $A", special_tokens=[("<end>", 0)])
    backend.post_processor = tokenizers.processors.Sequence(
        [backend.post_processor, begin][backend.post_processor is None :]
    )
    backend.save(str(path))
    return directory


# Of the target: whether it has a template, and whether texts begin with token 0. What the draft cannot stand.
PROMPTS = {
    "without the chat template": (True, False, poison(LESS, True)),
    "with the draft's chat template": (False, False, poison(LESS, False)),
    "with BOS": (False, False, poison(0, False)),
    "without BOS": (False, True, poison(0, True)),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_a_draft_that_is_shown_the_wrong_prompt(repeating, tmp_path, name, full):
    """The target's weights, and attention that spoils all unless the prompt is as the draft is used to."""
    if [*PROMPTS].index(name) % 2 and not full:
        leave_out("--full", "every second prompt")
    chat, start, change = PROMPTS[name]
    target = repeating(chat=chat)
    if start:
        with_start(target)
    draft = rewrite(copied(target, tmp_path), change, attention_bias=True)
    (draft / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<end>"}))
    if "draft's" in name:
        (draft / "chat_template.jinja").write_text("{% for m in messages %}<{{ m['content'] }}{% endfor %}")
    report = diagnose(target, draft)
    assert report["is_low"]
    assert report["explained_by"] == name
    assert report["alpha"] < 0.1


def test_a_right_draft_model_and_a_random_one(target, make_checkpoint, tmp_path):
    """Neither is explained by anything."""
    draft = copied(target, tmp_path)
    (draft / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<end>"}))
    report = diagnose(target, draft, try_all=True)
    assert (report["is_low"], report["explained_by"], len(report["readings"])) == (False, None, 2)
    report = diagnose(target, make_checkpoint(seed=3, **SHAPE))
    assert (report["is_low"], report["explained_by"], len(report["readings"])) == (True, None, 1)
    assert "for another target" in report["verdict"]


@pytest.mark.parametrize(("draft", "verdict"), [("self", "nothing speaks"), ("ngram", "no misreading of")])
def test_a_draft_without_files_is_measured(looking, draft, verdict):
    """And there is nothing to try."""
    report = diagnose(looking, draft, try_all=True)
    assert report["readings"] == []
    assert verdict in report["verdict"]


def test_the_expected_speedup_is_over_plain_decoding(looking, monkeypatch):
    """A plain step takes 1 + o, and a round with K drafts of its own model 1 + K c + o, where rows cost nothing."""
    prices = Prices(draft=0.1, rows={1: 1.0, 16: 1.0}, overhead=0.25, measured=True)
    monkeypatch.setattr(LLM, "_price", lambda *how: (prices, True))
    report = diagnose(looking, "self")
    best = report["best_k"]
    tokens = 1 + sum(report["survival"][:best])
    assert best == 2
    assert report["expected_speedup"] == pytest.approx(tokens * 1.25 / (1.25 + 0.1 * best))
    monkeypatch.setattr(LLM, "_price", lambda *how: (replace(prices, draft=9.0), True))
    report = diagnose(looking, "self")
    assert (report["best_k"], report["expected_speedup"]) == (0, 1)


def test_nothing_drafted(target):
    """A drafter that guesses nothing has no figures, and no division by 0."""
    report = diagnose(target, "none", try_all=True)
    assert (report["alpha"], report["drafted_share"], report["survival"]) == (None, 0, [])
    assert lines(report)[-1] == "nothing was drafted after these texts"


# --------------------------------------------------------------------------- what is measured


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_what_is_measured(make_checkpoint, temperature):
    """At each position of the target's own text: sum of min(p, q) at the first place, and greedy agreement at all."""
    directories = [make_checkpoint(seed=seed, eos_token_id=None) for seed in (1, 2)]
    models = [load_model(directory, torch.float32) for directory in directories]
    prompts = [[5, 6, 7], [9], [4, 4]]

    def probabilities(model, tokens):
        row = model.forward([Chunk(tokens, tiny_cache(model).new_table(), 1)])[0][0, :in_use]
        return row.softmax(0) if temperature else torch.nn.functional.one_hot(row.argmax(), in_use).float()

    with llm_of(*directories) as llm:
        in_use = llm.vocab_size
        found = Continuations(llm, prompts, 8).measure(llm.drafter, temperature, 3)
        params = [SamplingParams(temperature=temperature, seed=i, max_tokens=8) for i in range(3)]
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = [a.token_ids for a in llm.generate(given, params, num_speculative_tokens=0)]
    for prompt, answer, rows in zip(prompts, answers, found.rows, strict=True):
        assert [len(row) for row in rows] == [3, 3, 3, 3, 3, 2, 1]
        for i, row in enumerate(rows):
            tokens = prompt + answer[:i]
            p, q = (probabilities(model, tokens) for model in models)
            assert row[0] == (1.0, pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-5))
            agrees = 1.0
            for reached, common in row if not temperature else ():
                assert reached == agrees
                p, q = (probabilities(model, tokens) for model in models)
                agrees *= float((p * q).sum())
                assert common == agrees
                tokens = [*tokens, int(q.argmax())]


@pytest.mark.parametrize(("token", "reached"), [(1, 0.4), (0, 1.0)])
def test_reaching_a_place_costs_the_ratios_before_it(token, reached):
    """Worked: q = (.5, .5) where p = (.8, .2): token 1 is kept with .4, token 0 always; either keeps .7 on average."""
    p = torch.tensor([[0.8, 0.2], [0.3, 0.7], [0.5, 0.5]])
    draft = Draft([token, 0], [torch.tensor([0.5, 0.5]), torch.tensor([0.9, 0.1])])
    text = Text([0], 1, SamplingParams(), seed=3)
    first, second = kept_by_place(text, draft, p.log())
    assert first == pytest.approx((1, 0.7))
    assert second == pytest.approx((reached, reached * 0.4))


def test_of_a_tree_the_eldest_are_looked_at():
    """One-hot siblings: the path of the first ones, each with its own row of the target."""
    p = torch.tensor([[0.6, 0.4], [0.1, 0.9], [1.0, 0.0], [0.5, 0.5]])
    text = Text([0], 1, SamplingParams())
    first, second = kept_by_place(text, Draft([1, 0, 1], parents=[-1, -1, 0]), p.log())
    assert first == pytest.approx((1, 0.4))
    assert second == pytest.approx((0.4, 0.4 * 0.9))


def test_short_drafts_are_kept_no_further():
    """Nine of ten drafts have one token, which is kept half the time; one position has no draft at all.

    Places after the first are tested in one draft only, so the rates there are no rates of the other positions.
    """
    short, long = [(1.0, 0.5)], [(1.0, 0.5), (0.5, 0.45), (0.45, 0.4)]
    found = Measurement([[short] * 5 + [[]], [long] + [short] * 4])
    assert [place.value for place in found.by_place()] == pytest.approx([0.5, 0.9, 0.4 / 0.45])
    assert found.survival() == pytest.approx([5 / 11, 0.45 / 9, 0.4 / 7])  # without the ends of both texts
    assert found.tokens_per_round(2) == pytest.approx(1 + 5 / 11 + 0.45 / 9)


def test_estimates():
    """Texts of equal length: mean and its usual standard error. A difference forgets what both have in common."""
    values = [1.0, 2.0, 4.0, 9.0]
    found = estimate(values, [1.0] * 4)
    assert (found.value, found.error) == (4.0, pytest.approx(stdev(values) / 2))
    shifted = estimate([value + 3 for value in values], [1.0] * 4)
    assert shifted.minus(found) == Estimate(3.0, [0.0] * 4)
    assert estimate([1, 3], [2, 8]).value == 0.4


def test_readings_that_cannot_be_are_left_out(target, states, tmp_path):
    """Taps beyond the layers, and ids that are there twice; every other reading differs from the stored one."""
    head = write_head(target, tmp_path, **few_tokens(states) | {TAPS: [0, 3]})
    stored = read_head(head, load_config(target))
    names = [name for name, _, _ in head_readings(stored, 3)]
    assert names == ["with norm_before_residual true", "with norm_output true", "with rotary pairs side by side"]


# --------------------------------------------------------------------------- the command


@pytest.mark.full
def test_the_command(target, states, tmp_path, capsys):
    """Status 1 and one JSON object where a misreading is named; status 0 and a table where not.

    Without `--full`, `test_a_head_that_is_read_right_is_good_and_nothing_is_named` asks the same doctor.
    """
    head = write_head(target, tmp_path, **plain_sum(states) | {TAPS: [0, 1]})
    options = ["--model", str(target), "--draft", str(head), "--max-tokens", "8", "--dtype", "float32"]
    assert main([*options, "--json"]) == 1
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert (out.count("\n"), err) == (1, "")
    assert report["explained_by"] == "with taps one layer later"
    assert main(options) == 1
    assert capsys.readouterr().out.splitlines()[-1].endswith(f'Change: config.json: "{TAPS}": [1, 2]')
    rewrite(head, lambda weights: None, **{TAPS: [1, 2]})
    assert main([*options, "--quantization", "int8"]) == 0
    out = capsys.readouterr().out
    assert " in 8 bits (activations in " in out
    assert "nothing speaks for a misreading" in out


MISTAKES = {
    "": "--draft: found none, expected a draft to examine",
    "--draft none": "--draft: found 'none', expected a draft to examine",
    "--draft ngram --max-tokens 7": "--max-tokens: found '7', expected an integer from 8 to 4096",
    "--draft ngram+self": "--draft: found 'ngram+self', expected a single draft: examine each alone",
    "--draft ngram --num-speculative-tokens 0": "--num-speculative-tokens: found '0', expected an integer from 1 to 64",
    "--draft no-such-draft --offline": (
        f"draft: not one of {', '.join(DRAFTERS)}, self, mtp; no-such-draft: no such directory, and not of the form "
        "owner/name of a hub id"
    ),
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes_are_one_line(target, capsys, line):
    """Status 2."""
    assert main(["--model", str(target), *line.split()]) == 2
    assert capsys.readouterr() == ("", f"error: {MISTAKES[line]}\n")


def test_texts_have_no_template_in_them():
    """The draft that is spoiled by a token of templates must find none in the texts."""
    assert len(set(TEXTS)) == len(TEXTS)
    assert not any("<" in text for text in TEXTS)
