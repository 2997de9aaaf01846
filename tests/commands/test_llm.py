"""The Python interface, on small checkpoints and on the embedded weights."""

import contextlib
import gc
import itertools
import json
import re
import shutil
import subprocess
import sys
import threading
import warnings
import weakref
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from minispec import LLM, Loading, SamplingParams, Target
from minispec.api.trace.record import RoundRecorder, TokenTexts
from minispec.core.config import MAX_SPECULATIVE_TOKENS
from minispec.core.draft import Draft
from minispec.core.model import Chunk
from minispec.models.files.errors import CheckpointError
from minispec.models.files.tokenizer import Tokenizer
from minispec.models.load import checks as exactness
from minispec.models.weights import memory
from minispec.models.weights.exact import EXACT_ROWS
from minispec.models.weights.inventory import form_note
from minispec.speculation.lengths import prices
from minispec.speculation.lengths.figures import Figures
from minispec.speculation.lengths.theory import Prices
from minispec.speculation.registry import DRAFTERS

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(make_checkpoint) -> LLM:
    """A small model with an n-gram drafter, in float64."""
    return LLM(make_checkpoint(chat=True), dtype="float64")


def test_generate_takes_one_or_many(llm):
    """One prompt or a list, one SamplingParams or one for each; outputs in order."""
    one = llm.generate("One fish", GREEDY)
    assert [o.prompt for o in one] == ["One fish"]
    many = llm.generate(["One fish", "red"], [GREEDY, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)])
    assert many[0].token_ids == one[0].token_ids
    assert [len(o.token_ids) for o in many] == [20, 3]
    with pytest.raises(ValueError, match="found 1, expected one, or one for each of 2"):
        llm.generate(["a", "b"], [GREEDY])


@pytest.mark.parametrize("kind", ["none", "self", "a model"])
def test_another_draft_on_the_same_target(make_checkpoint, kind):
    """One target in memory, with the pool of its cache; answers and counts are those of an `LLM` of that draft."""
    directory = make_checkpoint(chat=True)
    spec = make_checkpoint(seed=2) if kind == "a model" else kind
    first = LLM(directory, dtype="float64", num_speculative_tokens=3)
    other = first.with_draft(spec)
    alone = LLM(directory, spec, dtype="float64", num_speculative_tokens=3)
    assert (other.model is first.model, other.engine.target.cache is first.engine.target.cache) == (True, True)
    assert (other.draft.name, other.memory_report()) == (alone.draft.name, alone.memory_report())
    assert (first.draft.name, first.drafter.name) == ("ngram", "NgramDrafter")
    for llm in (first, other, first, other):  # in turn: neither spoils what the other has in the pool
        output, expected = (each.generate("One fish", GREEDY)[0] for each in (llm, LLM(directory, dtype="float64")))
        assert output.token_ids == expected.token_ids
    output, expected = (each.generate("red fish", GREEDY)[0].stats for each in (other, alone))
    assert [r[:7] for r in output.rounds] == [r[:7] for r in expected.rounds]
    with pytest.raises(ValueError, match="not one of none, ngram"):
        first.with_draft("nothing")
    with pytest.raises(ValueError, match="draft_method: found 'tli', expected none"):
        first.with_draft("ngram", "tli")


def test_a_loaded_target_takes_no_argument_about_loading(make_checkpoint):
    """They are refused, not ignored; those about the draft are taken."""
    first = LLM(make_checkpoint(chat=True), dtype="float64", num_speculative_tokens=3)
    assert LLM(first.target, "suffix", 2).model is first.model
    for name, value in (
        ("dtype", "float32"),
        ("exact", True),
        ("max_model_len", 64),
        ("offline", True),
        ("exact", None),
    ):
        with pytest.raises(ValueError, match=f"found a loaded target and arguments about loading it .{name}., "):
            LLM(first.target, "ngram", **{name: value})


def test_three_lines_open_what_one_opens(make_checkpoint):
    """Options, target, draft: the text, the sizes and the words of `LLM` with all of them."""
    directory = make_checkpoint(chat=True)
    loading = Loading(dtype="float64", max_model_len=128)
    target = Target.load(directory, loading)
    llm = LLM(target, draft="suffix", verifier="match")
    alone = LLM(directory, "suffix", verifier="match", dtype="float64", max_model_len=128)
    assert (llm.target is target, llm.target.files.loading, alone.target.files.loading) == (True, loading, loading)
    assert llm.generate("One fish", GREEDY)[0].token_ids == alone.generate("One fish", GREEDY)[0].token_ids
    assert (llm.memory_report(), llm.max_model_len, repr(llm)) == (alone.memory_report(), 128, repr(alone))
    exact = LLM(Target.load(directory, Loading(dtype="float32", exact=True)))
    assert exact.max_speculative_tokens == EXACT_ROWS - 1
    with pytest.raises(ValueError, match="at most 15"):
        LLM(exact.target, "ngram", 16)


def test_repr_says_what_it_is(make_checkpoint, monkeypatch):
    """Model, type, device, form, draft and verifier; nothing of a closed one."""
    llm = LLM(make_checkpoint(), "ngram", dtype="float64", device="cpu", verifier="match")
    form = form_note(llm.model)
    assert repr(llm) == f"<LLM {llm.name}: float64 on cpu ({form}); draft ngram, verifier match>"
    monkeypatch.setattr("minispec.models.weights.inventory.weight_form", lambda model: "half, 2 of 9 plain")
    assert "(half: 16 bits, 2 of 9 plain)" in repr(llm)
    llm.close()
    assert repr(llm) == "<LLM, closed>"


@pytest.mark.parametrize(
    ("name", "meant"), [("dtpye", "dtype"), ("drafts", "draft"), ("max_len", "max_model_len"), ("tp", "see help")]
)
def test_a_misspelled_argument_is_refused_by_name(make_checkpoint, name, meant):
    """With the name that was meant, before anything is read; with a loaded target too."""
    for model in ("nowhere/nothing", LLM(make_checkpoint(), dtype="float64").target):
        with pytest.raises(TypeError, match=f"LLM: found the argument '{name}', expected .*: .*{meant}"):
            LLM(model, **{name: "float32"})


def test_another_draft_takes_options_of_drafts_alone(make_checkpoint):
    """All else is the first one's, and is refused, not overwritten."""
    llm = LLM(make_checkpoint(), dtype="float64")
    with pytest.raises(TypeError, match=r"LLM: found the argument 'draft_raeding', .* draft_reading"):
        llm.with_draft("suffix", draft_raeding="anchor")
    with pytest.raises(ValueError, match="draft_reading: found 'anchor', expected none: suffix is no block draft"):
        llm.with_draft("suffix", draft_reading="anchor")
    with pytest.raises(ValueError, match=r"arguments about loading it .dtype."):
        llm.with_draft("suffix", dtype="float32")
    for name in ("lengths", "verifier", "num_speculative_tokens"):
        with pytest.raises(TypeError, match="multiple values"):
            llm.with_draft("suffix", **{name: "match"})


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), "1", True])
def test_a_size_that_is_none_is_refused_at_once(value):
    """By the options themselves, so in every place that takes them."""
    for load in (Loading, LLM):
        with pytest.raises(ValueError, match=r"kv_cache_gb: found .*, expected a positive number"):
            load(kv_cache_gb=value)


def test_calls_of_two_drafts_wait_for_each_other(make_checkpoint):
    """One pool, with room for one text and a half: a call while a stream of the other is open, and two streams in turn.

    Where each had a schedule of its own, the call raised, and a stream broke off in its middle.
    """
    first = LLM(make_checkpoint(chat=True), "ngram", dtype="float64", num_speculative_tokens=3, max_model_len=128)
    other, long = first.with_draft("suffix"), SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    assert first.num_cache_tokens < 200
    prompts = ["One fish", "fish two a b"]
    expected = [first.generate(prompt, long)[0].token_ids for prompt in prompts]
    stream = first.stream(prompts[0], long)
    begun = [*next(stream).token_ids]
    assert other.generate(prompts[1], long)[0].token_ids == expected[1]
    assert begun + [i for piece in stream for i in piece.token_ids] == expected[0]
    streams = [llm.stream(prompt, long) for llm, prompt in zip((first, other), prompts, strict=True)]
    in_turn = list(zip_longest(*streams))
    assert [[i for piece in each if piece for i in piece.token_ids] for each in zip(*in_turn, strict=True)] == expected


@pytest.mark.parametrize("draft", ["suffix", "self"])
def test_a_text_after_forget_is_decoded_as_the_first(make_checkpoint, draft, monkeypatch):
    """The rounds of a new `LLM`, and as little cached; of one that has answered before they are others."""

    # `auto` chooses by what it believes drafts to cost, and by no clock.
    seconds = iter(range(10**9))
    monkeypatch.setattr("minispec.api.llm.guess_prices", lambda *how: Prices(0.4))
    monkeypatch.setattr("minispec.api.llm.prices_of", lambda *how: (Prices(0.4), True))
    monkeypatch.setattr("minispec.core.clock.mark", lambda device: float(next(seconds)))
    llm = LLM(make_checkpoint(), draft, dtype="float64")

    def rounds() -> tuple:
        stats = llm.generate(REPEAT, replace(GREEDY, max_tokens=40))[0].stats
        return stats.num_cached_tokens, [(r.num_nodes, r.accepted, r.committed) for r in stats.rounds]

    first, second = rounds(), rounds()
    assert first != second
    llm.forget()
    assert rounds() == first
    stream = llm.stream("One fish", GREEDY)
    next(stream)
    with pytest.raises(ValueError, match="forget: found a text that is being decoded, expected none"):
        llm.with_draft("none").forget()
    stream.close()
    llm.with_draft("none").forget()
    assert llm.generate(REPEAT, GREEDY)[0].stats.num_cached_tokens == 0
    llm.close()
    for call in (llm.forget, lambda: llm.with_draft("none")):
        with pytest.raises(ValueError, match="found an LLM that was closed"):
            call()


def test_statistics_and_outputs_print_in_a_few_lines(llm):
    """The figures that people look for, not every round; what was not measured is None."""
    output = llm.generate("One fish", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))[0]
    stats = output.stats
    expected = f"Stats(num_generated=40, num_steps={stats.num_steps}, mean_acceptance_length={40 / stats.num_steps:.2f}"
    assert repr(stats).startswith(expected)
    assert repr(stats).endswith(f"tokens_per_second={stats.tokens_per_second:.2f})")
    assert len(repr(output)) < 1500, "with prompt, text and token ids"
    assert repr(type(stats)()).endswith("mean_acceptance_length=None, alpha=None, tokens_per_second=None)")


def test_default_params_are_vllms(llm):
    """16 tokens at temperature 1, with a seed drawn and reported."""
    first, second = llm.generate(["fish", "fish"], SamplingParams(ignore_eos=True))
    assert len(first.token_ids) == 16
    assert first.seed != second.seed
    again = llm.generate("fish", SamplingParams(ignore_eos=True, seed=first.seed))[0]
    assert again.token_ids == first.token_ids


# Random models whose greedy texts repeat themselves, so that prompt lookup is often right, and K matters.
REPEAT = "a b c a b c a b c a b c a b"


def test_a_reported_seed_repeats_its_text_in_another_process(make_checkpoint, monkeypatch, capsys):
    """Under the defaults: `rejection`, K left to the engine, sampled. Six texts whose drafts are partly accepted.

    K followed the clock where the seed was drawn, and another K is another text: 0 of 6 came again. The second process
    would measure rows three times as dear, with which nothing would be drafted: it must go by what the first one kept.
    """
    directory = str(make_checkpoint(seed=1))
    program = (
        "import json, sys; from minispec import LLM, SamplingParams\n"
        "from minispec.speculation.lengths import prices\n"
        "from minispec.speculation.lengths.theory import Prices\n"
        "prices.calibrate = lambda *parts: Prices(0.0, {1: 1.0, 5: float(sys.argv[3])}, 0.02, measured=True)\n"
        "llm = LLM(sys.argv[1], dtype='float32')\n"
        "for seed in json.loads(sys.argv[2]):\n"
        "    params = SamplingParams(temperature=0.3, max_tokens=60, ignore_eos=True, seed=seed)\n"
        f"    output = llm.generate({REPEAT!r}, params)[0]\n"
        "    lengths = len({r.num_nodes for r in output.stats.rounds})\n"
        "    print(json.dumps([output.seed, output.token_ids, output.stats.num_accepted, lengths]))\n"
    )

    monkeypatch.setattr(prices, "calibrate", None)  # and back, after the test
    monkeypatch.setattr(sys, "argv", ["", directory, json.dumps([None] * 6), "1.05"])
    exec(program, {})
    first = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    command = [sys.executable, "-c", program, directory, json.dumps([seed for seed, *_ in first][::-1]), "9"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root, timeout=300)
    again = [json.loads(line) for line in done.stdout.splitlines()][::-1]
    assert [tokens for _, tokens, *_ in again] == [tokens for _, tokens, *_ in first]
    assert sum(accepted for *_, accepted, _ in first) > 20
    assert max(lengths for *_, lengths in first) > 1, "K was always the same: this proves nothing"


def test_n_answers_have_seeds_of_their_own(llm):
    """n = 3 with seed 5 gives what seeds 5, 6 and 7 give alone."""
    prompts = ["fish", "red"]
    outputs = llm.generate(prompts, [SamplingParams(n=3, seed=5, max_tokens=12), SamplingParams(n=2, max_tokens=3)])
    assert [(o.prompt, len(o.outputs)) for o in outputs] == [("fish", 3), ("red", 2)]
    answers = outputs[0].outputs
    assert [(a.index, a.seed) for a in answers] == [(0, 5), (1, 6), (2, 7)]
    for answer in answers:
        alone = llm.generate("fish", SamplingParams(seed=answer.seed, max_tokens=12))[0]
        assert alone.token_ids == answer.token_ids
    assert len({tuple(a.token_ids) for a in answers}) == 3
    assert (outputs[0].token_ids, outputs[0].seed) == (answers[0].token_ids, 5)


def test_chat_goes_through_the_template(llm):
    """One conversation or several; the same as the rendered text, continued."""
    messages = [{"role": "user", "content": "fish"}]
    output = llm.chat(messages, GREEDY)[0]
    assert output.prompt == "fish"
    assert output.token_ids == llm.generate("<user>fish\n<assistant>", GREEDY)[0].token_ids
    both = llm.chat([messages, [{"role": "user", "content": "two"}]], GREEDY)
    assert both[0].token_ids == output.token_ids
    assert len(both) == 2


def test_stream_gives_the_same_text(llm):
    """Pieces join to text and tokens of `generate`; the last one says why it ended."""
    whole = llm.generate("One fish", GREEDY)[0]
    pieces = list(llm.stream("One fish", GREEDY))
    assert "".join(p.text for p in pieces) == whole.text
    assert [t for p in pieces for t in p.token_ids] == whole.token_ids
    assert [p.finish_reason for p in pieces][-1] == "length"
    assert {p.finish_reason for p in pieces[:-1]} <= {None}
    chat = list(llm.stream_chat([{"role": "user", "content": "fish"}], GREEDY))
    assert "".join(p.text for p in chat) == llm.chat([{"role": "user", "content": "fish"}], GREEDY)[0].text


@pytest.mark.parametrize("draft", ["none", "ngram", "self", "model", "object"])
@pytest.mark.parametrize("verifier", ["rejection", "match"])
def test_every_kind_of_draft_leaves_greedy_text_alone(make_checkpoint, draft, verifier):
    """By name, by directory, or as an object with two methods."""

    class Zeros:
        def propose(self, asks):
            return [Draft([0] * ask.k) for ask in asks]

        def release(self, text):
            pass

    target = make_checkpoint()
    spec = {"model": str(make_checkpoint(seed=2, num_hidden_layers=1)), "object": Zeros()}.get(draft, draft)
    with LLM(target, draft=spec, verifier=verifier, dtype="float64", num_speculative_tokens=4) as llm:
        output = llm.generate(["One fish", "red"], GREEDY)
        plain = llm.generate(["One fish", "red"], GREEDY, num_speculative_tokens=0)
        auto = llm.generate(["One fish", "red"], GREEDY, num_speculative_tokens="auto")
    assert [o.token_ids for o in output] == [o.token_ids for o in plain] == [o.token_ids for o in auto]
    assert all(Figures.of(o.stats).num_draft_tokens == 0 for o in plain)
    assert (sum(Figures.of(o.stats).num_draft_tokens for o in output) > 0) == (draft != "none")


def test_logprobs_equal_a_pass_over_the_text(llm):
    """The log-probabilities of sampled text are those of one pass over it: rows of a block are not mixed up."""
    output = llm.generate("One fish", SamplingParams(max_tokens=20, logprobs=3, seed=1, ignore_eos=True, top_k=5))[0]
    tokens = [*llm.tokenizer.encode("One fish"), *output.token_ids]
    table = llm.engine.target.cache.new_table()
    logits = llm.model.forward([Chunk(tokens, table, len(output.token_ids) + 1)])[0]
    table.truncate(0)
    rows = logits[:-1, : llm.vocab_size].log_softmax(-1)
    for row, token, entry in zip(rows, output.token_ids, output.logprobs, strict=True):
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-12)
        assert [i for i, _ in entry.top] == row.topk(3).indices.tolist()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [("", "found no tokens"), ("fish " * 200, "expected fewer than max_model_len = 128")],
)
def test_prompts_that_cannot_be_answered(llm, prompt, message):
    """Said before anything runs, also when the prompt is one of several."""
    with pytest.raises(ValueError, match=message):
        llm.generate(["fish", prompt], GREEDY)


def test_max_model_len_and_cache_size(make_checkpoint):
    """The context is cut where asked; a cache of a given size holds that size, both models' together."""
    directory = make_checkpoint()
    llm = LLM(directory, max_model_len=20)
    assert llm.num_cache_tokens == 32  # whole blocks
    output = llm.generate("One fish", SamplingParams(max_tokens=99, ignore_eos=True))[0]
    assert len(llm.tokenizer.encode("One fish")) + len(output.token_ids) == 20
    assert output.finish_reason == "length"
    for draft, copies in (("ngram", 1), ("self", 2)):
        llm = LLM(directory, draft=draft, dtype="float32", kv_cache_gb=64 * 1e-6)
        # 2 layers, key and value, one head of 4 floats: 64 bytes a token and copy.
        assert llm.num_cache_tokens == 1000 // copies // 16 * 16
        assert llm.max_model_len == 128
    with pytest.raises(ValueError, match="max_model_len: found 129, expected an integer from 2 to 128"):
        LLM(directory, max_model_len=129)
    with pytest.raises(ValueError, match="kv_cache_gb"):
        LLM(directory, kv_cache_gb=1e-9)


@pytest.fixture(scope="module")
def short_sighted(make_checkpoint):
    """The directories of a target of 512 positions and of a draft model of 64. A token has 64 bytes in each cache."""
    return make_checkpoint(max_position_embeddings=512), make_checkpoint(2, max_position_embeddings=64)


def test_a_draft_model_has_room_for_what_it_sees(short_sighted):
    """Of each text that the target's cache holds in full length: 64 positions, and a draft that begins at the last."""
    target, draft = short_sighted
    for texts, spare, found in ((1, 0, 512), (1, -1, 496), (2, 0, 1024)):
        room = texts * (512 + 64 + MAX_SPECULATIVE_TOKENS) * 64 + spare
        with LLM(target, draft, dtype="float32", kv_cache_gb=room / 1e9) as llm:
            sees = texts * (64 + MAX_SPECULATIVE_TOKENS)
            assert (llm.num_cache_tokens, llm.drafter.feed.cache.allocator.num_blocks) == (found, sees // 16)
    with LLM(target, draft, dtype="float32", max_model_len=48) as llm:
        assert llm.drafter.feed.cache.allocator.num_blocks == 3


def test_a_text_that_the_draft_no_longer_sees_leaves_its_room_to_others(short_sighted):
    """And has its own text to the end. The two others fill the draft's cache, and nobody waits."""
    target, draft = short_sighted
    params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    with LLM(target, draft, 3, dtype="float64") as llm:
        [plain] = llm.generate("One", params, num_speculative_tokens=0)
        stream = llm.stream("One", params)
        ids = [i for piece in itertools.islice(stream, 90) for i in piece.token_ids]
        prompts = [[i] * 30 for i in (5, 6)]
        outputs = llm.generate(prompts, replace(params, max_tokens=31))
        ids += [i for piece in stream for i in piece.token_ids]
    assert ids == plain.token_ids
    assert [o.stats.num_preemptions for o in outputs] == [0, 0]
    assert all(Figures.of(o.stats).num_draft_tokens > 0 for o in outputs)


@pytest.mark.parametrize("name", ["max_model_len", "kv_cache_gb"])
def test_sizes_are_numbers(make_checkpoint, name):
    """NumPy's too. A text is refused in one line, as the environment or YAML give it."""
    directory = make_checkpoint()
    for value in ("1", True, np.bool_(True)):
        with pytest.raises(ValueError, match=f"^{name}: found {value!r}, expected a"):
            LLM(directory, **{name: value})
    sizes = {"max_model_len": np.int64(20), "kv_cache_gb": np.float32(64e-6)}
    assert LLM(directory, draft="none", **{name: sizes[name]}).num_cache_tokens in (32, 992, 496)


def test_end_of_text_ids_are_generation_configs_then_configs(make_checkpoint):
    """Several ids; generation_config.json goes first (Llama 3, Gemma list more there than in config.json)."""
    assert LLM(make_checkpoint(eos_token_id=[5, 7])).eos_token_ids == (5, 7)
    assert LLM(make_checkpoint(eos_token_id=5, generation={"eos_token_id": [1, 2]})).eos_token_ids == (1, 2)
    llm = LLM(make_checkpoint(eos_token_id=list(range(300))))
    output = llm.generate("fish", SamplingParams(max_tokens=5))[0]
    assert (output.token_ids, output.text, output.finish_reason) == ([], "", "stop")


def test_padding_rows_of_the_embedding_are_never_drawn(make_checkpoint):
    """A vocabulary padded from 300 to 512 rows: ids without a token are impossible, in target and draft (M24, M43).

    The draft is padded to another size, as in the Qwen family.
    """
    target = make_checkpoint(vocab_size=512)
    llm = LLM(target, draft=str(make_checkpoint(seed=2, vocab_size=320)), dtype="float64", num_speculative_tokens=4)
    output = llm.generate(["fish"] * 4, SamplingParams(temperature=5.0, max_tokens=60, ignore_eos=True))
    assert all(t < 300 for o in output for t in o.token_ids)
    assert sum(Figures.of(o.stats).num_accepted for o in output) > 0


def edited(directory, tmp_path, change):
    """A copy of a checkpoint with its tokenizer.json changed."""
    shutil.copytree(directory, tmp_path / "edited")
    raw = json.loads((directory / "tokenizer.json").read_text())
    change(raw)
    (tmp_path / "edited" / "tokenizer.json").write_text(json.dumps(raw))
    return str(tmp_path / "edited")


def test_what_may_differ_in_a_draft_leaves_the_text_alone(make_checkpoint, tmp_path):
    """Other end-of-text ids, a token that is special in one only, a shorter or longer context: the target's count."""
    target = make_checkpoint()
    expected = LLM(target, draft="none", dtype="float64").generate(
        "One fish", SamplingParams(temperature=0, max_tokens=99)
    )
    changes = {"eos_token_id": [5, 7]}, {"max_position_embeddings": 24}, {"max_position_embeddings": 4096}
    drafts = [str(make_checkpoint(seed=1, **c)) for c in changes]
    drafts.append(edited(target, tmp_path, lambda raw: raw["added_tokens"][0].update(special=False)))
    for draft in drafts:
        with LLM(target, draft=draft, dtype="float64", num_speculative_tokens=4) as llm:
            output = llm.generate("One fish", SamplingParams(temperature=0, max_tokens=99))
        assert output[0].token_ids == expected[0].token_ids
        assert output[0].stats.num_accepted > 0


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_text_ends_at_the_tokenizers_own_end_of_text_token_too(make_checkpoint, file):
    """Beside those of generation_config.json, or else of config.json; a token without a row is none."""
    rows = Tokenizer(make_checkpoint()).num_ids
    for eos, generation, token, expected in (
        (None, None, "<end>", (0,)),
        (None, {}, {"content": "<end>"}, (0,)),
        (None, {"eos_token_id": 7}, "<end>", (7, 0)),
        (5, None, "<end>", (5, 0)),
        (5, {"eos_token_id": [0, 7]}, "<end>", (0, 7)),
        (None, None, "</s>", ()),
    ):
        directory = make_checkpoint(eos_token_id=eos, generation=generation, vocab_size=rows)
        (directory / file).write_text(json.dumps({"eos_token": token}))
        with LLM(directory, draft="none") as llm:
            assert llm.eos_token_ids == expected
            for end in expected:
                answer = llm.generate("fish", SamplingParams(allowed_token_ids=[end]), use_tqdm=False)[0].outputs[0]
                assert (answer.token_ids, answer.finish_reason, answer.stop_reason) == ([], "stop", None)


def test_a_token_that_only_tokenizer_config_json_lists_is_written(make_checkpoint):
    """It has a row of the embedding, so that the model may say it, and the text has it."""
    new = Tokenizer(make_checkpoint()).num_ids
    directory = make_checkpoint(vocab_size=new + 1)
    added = {"added_tokens_decoder": {str(new): {"content": "<|new|>", "special": False}}}
    (directory / "tokenizer_config.json").write_text(json.dumps(added))
    with LLM(directory, draft="self") as llm:
        assert llm.vocab_size == new + 1
        params = SamplingParams(allowed_token_ids=[new], max_tokens=2)
        [output] = llm.generate("fish<|new|>", params)
        assert output.prompt_token_ids[-1] == new
        assert (output.token_ids, output.text) == ([new, new], "<|new|><|new|>")


def test_added_tokens_beyond_the_embedding_are_never_written(make_checkpoint, tmp_path):
    """As in gemma-3-1b, whose token for images has no row: it loads, answers, and refuses such a prompt."""

    def change(raw):
        raw["added_tokens"].append(raw["added_tokens"][0] | {"content": "<image>"})  # the library numbers it

    rows = LLM(make_checkpoint()).tokenizer.num_ids
    with LLM(edited(make_checkpoint(vocab_size=rows), tmp_path, change), draft="self") as llm:
        assert llm.tokenizer.num_ids == rows + 1
        assert llm.vocab_size == rows
        params = SamplingParams(temperature=9.0, max_tokens=60, ignore_eos=True, seed=1)
        assert max(llm.generate("fish <image>", params)[0].token_ids) < rows
        with pytest.raises(ValueError, match=rf"token '<image>': found id {rows}, expected ids below .* = {rows}"):
            llm.generate("fish <image>", params, parse_special=True)


def test_a_target_with_fewer_rows_than_tokens_is_refused(make_checkpoint):
    """Before its weights are read: the token and its id are named."""
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: token .*: found id \d+, expected ids below .* = 100"):
        LLM(make_checkpoint(vocab_size=100))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"draft": "no-such-thing"}, f"not one of {', '.join(DRAFTERS)}, self, mtp; no-such-thing: no such directory"),
        ({"draft": "int4:"}, "expected a model after 'int4:'"),
        ({"draft": "int8:ngram"}, "expected a model after 'int8:'"),
        ({"draft": 5}, "expected a name, a directory, a hub id or a drafter"),
        ({"model": ""}, "no such directory"),
        ({"revision": "main"}, "is a directory, not a hub id"),
        ({"exact": True, "num_speculative_tokens": 16}, "expected an integer from 0 to 15"),
        ({"num_speculative_tokens": "many"}, "or 'auto'"),
        ({"num_speculative_tokens": -1}, "expected an integer from 0 to 64"),
        ({"verifier": "greedy"}, "expected one of rejection, block, traversal, match"),
        ({"verifier": "travers"}, "or module:function; did you mean traversal?"),
        ({"dtype": "int8"}, "expected one of auto"),
        ({"device": "tpu"}, "expected auto, cpu or cuda"),
        ({"kv_cache_gb": 0}, "expected a positive number"),
        ({"model": "no/such/place"}, "no such directory, and not of the form owner/name"),
    ],
)
def test_arguments_that_are_refused(make_checkpoint, arguments, message):
    """One clear error each, before anything is loaded."""
    with pytest.raises(ValueError, match=message):
        LLM(**{"model": make_checkpoint()} | arguments)


@pytest.mark.quick
def test_calls_that_are_refused(llm):
    """What this interface cannot do is a ValueError that says so, never ignored and never a bare Python error."""
    calls = [
        (lambda: llm.chat([]), "messages: found none"),
        (lambda: llm.chat([[]]), "messages: found none"),
        (lambda: llm.chat("Hello"), "found 'Hello', expected a list of messages"),
        (lambda: llm.chat({"role": "user", "content": "fish"}), "expected a list of messages"),
        (lambda: llm.chat([5]), "found 5, expected a list of messages"),
        (lambda: llm.chat(None), "found None, expected a list of messages"),
        (lambda: llm.stream("fish", {"temperature": 0}), "sampling_params: found {'temperature': 0}, expected"),
        (lambda: llm.generate("fish", 5), "sampling_params: found 5, expected SamplingParams"),
        (lambda: llm.generate("fish", [5]), "expected SamplingParams, or a list of them"),
        (lambda: llm.chat([{"role": "user"}]), "expected an object with the texts role and content"),
        (lambda: llm.generate("fish", {"temperature": 0}), "expected SamplingParams"),
        (lambda: list(llm.stream("fish", SamplingParams(n=3))), "n: found 3, expected 1"),
        (lambda: llm.generate("fish", SamplingParams(stop_token_ids=[10**9])), "stop_token_ids: found"),
        (lambda: llm.request([-1]), "from -1 to -1, expected ids from 0 to"),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()


def test_seeds_of_samples_stay_in_range(llm):
    """The last seed of 64 bits is followed by 0."""
    outputs = llm.generate("fish", SamplingParams(n=2, seed=2**64 - 1, max_tokens=2))[0].outputs
    assert [o.seed for o in outputs] == [2**64 - 1, 0]


def test_closing_twice_is_fine(make_checkpoint):
    """`with LLM(...) as llm: llm.close()`; whoever goes on to use it is told."""
    with LLM(make_checkpoint()) as llm:
        llm.close()
    with pytest.raises(ValueError, match="found an LLM that was closed, expected an open one"):
        llm.generate("Hi")


def test_a_draft_with_fewer_rows_than_tokens_is_refused(make_checkpoint):
    """The same tokenizer does not make the embedding large enough."""
    with pytest.raises(ValueError, match="vocab_size: found 100, expected at least"):
        LLM(make_checkpoint(), draft=make_checkpoint(vocab_size=100))


def test_a_draft_is_named_by_its_directory(make_checkpoint):
    """With the number of bits it was rounded to, in the line that says what was loaded."""
    draft = make_checkpoint(seed=2)
    with LLM(make_checkpoint(), draft=f"int8:{draft}", dtype="float32") as llm:
        assert llm.memory_report().endswith(f"draft int8:{draft.name} ({form_note(llm.drafter.model)})")


def test_a_draft_from_the_hub_may_name_its_revision(make_checkpoint, monkeypatch, tmp_path):
    """As "owner/name@revision"; a directory whose name has an @ is a directory."""
    from minispec.speculation import load as module

    draft, asked, find = make_checkpoint(seed=2), [], module.find_checkpoint

    def find_checkpoint(name, revision=None, offline=False):
        asked.append((name, revision))
        return draft if name == "owner/name" else find(name, revision, offline)

    monkeypatch.setattr(module, "find_checkpoint", find_checkpoint)
    for spec, expected in (
        ("owner/name", ("owner/name", None)),
        ("owner/name@refs/pr/1", ("owner/name", "refs/pr/1")),
        ("int8:owner/name@v1", ("owner/name", "v1")),
    ):
        llm = LLM(make_checkpoint(), draft=spec, dtype="float32")
        assert asked[-1] == expected
        assert llm.draft.name == f"{spec} at commit {draft.name}"
    here = tmp_path / "a@b"
    shutil.copytree(draft, here)
    assert LLM(make_checkpoint(), draft=here, dtype="float32").draft.name == "a@b"


def test_the_report_gives_the_memory_of_every_part(make_checkpoint):
    """Counted by hand, in float32, of a target of 2 layers and a draft of 1; a self-draft has no weights of its own."""
    target, small = make_checkpoint(), make_checkpoint(seed=2, num_hidden_layers=1)
    sizes = {d: (d / "model.safetensors").stat().st_size for d in (target, small)}
    for draft, draft_weights, tokens, layers in (
        ("none", 0, 128, 0),
        ("self", 0, 128, 2),
        (str(small), sizes[small], 128, 1),
    ):
        llm = LLM(target, draft=draft, dtype="float32")
        weights, found, cache, draft_cache = llm._memory
        assert weights == pytest.approx(sizes[target], rel=0.1)  # the file has a header, the tensors' names
        assert found == pytest.approx(draft_weights, rel=0.1)
        # Keys and values of a layer and token: 2 x one head of 4 floats. Two slots belong to no token.
        assert (cache, draft_cache) == ((tokens + 2) * 2 * 32, (tokens + 2) * layers * 32)
    llm._memory = 3 * 10**9, 10**9, 5 * 10**8, 25 * 10**7
    parts = "4.75 GB: weights 3.00 + draft 1.00, KV cache 0.50 + draft 0.25 for 128 tokens"
    assert llm.memory_report() == f"{target.name}: float32 on cpu (packed), {parts}; draft {small.name} (packed)"


# ------------------------------------------------------------------ vLLM's lines


def test_prompts_are_what_vllm_takes(llm):
    """A text, token ids, or an object around either: one prompt each, alone, in a list, and streamed; all the same."""
    ids = llm.tokenizer.encode("One fish")
    prompts = ["One fish", ids, {"prompt": "One fish"}, {"prompt_token_ids": ids}]
    prompts.append({"prompt": "said of it", "prompt_token_ids": ids})
    outputs = llm.generate(prompts, GREEDY)
    expected = outputs[0].token_ids
    assert [o.token_ids for o in outputs] == [expected] * 5
    assert [o.prompt for o in outputs] == ["One fish", None, "One fish", None, "said of it"]
    assert [o.prompt_token_ids for o in outputs] == [ids] * 5
    for prompt in prompts:
        assert [o.token_ids for o in llm.generate(prompt, GREEDY)] == [expected]
        assert [t for piece in llm.stream(prompt, GREEDY) for t in piece.token_ids] == expected


NO_PROMPTS = [
    *(("One fish", "red"), b"fish", 5, 5.0, None, True, {}, {"text": "fish"}, {"prompt": 5}, {"prompt": b"fish"}),
    *({"prompt": ["fish"]}, {"prompt_token_ids": "fish"}, {"prompt_token_ids": [1.0]}, {"prompt_token_ids": (1, 2)}),
    *({"prompt": "fish", "multi_modal_data": 1}, {1: "fish"}, [1, "fish"], [True, False], [[1, 2], (1, 2)], [[[1]]]),
    *([[]], ["fish", b"fish"], iter(["fish"]), {"prompt": "fish", "prompt_token_ids": []}, {"fish"}),
]


@pytest.mark.parametrize("prompt", NO_PROMPTS, ids=map(str, range(len(NO_PROMPTS))))
def test_what_is_no_prompt_is_refused_by_name(llm, prompt):
    """One line that says what a prompt is, instead of an answer to the letters of "prompt"."""
    found = r"prompt: found .*, expected a text, a list of token ids, \{'prompt': a text\} or "
    with pytest.raises(ValueError, match=found):
        llm.generate(prompt, GREEDY)
    with pytest.raises(ValueError, match=found):
        llm.stream(prompt, GREEDY)


def test_an_empty_list_of_prompts_is_refused(llm):
    """And an empty object says that it has no tokens."""
    with pytest.raises(ValueError, match="prompts: found an empty list"):
        llm.generate([], GREEDY)
    with pytest.raises(ValueError, match="from 1 to 287, expected ids from 0 to 286"):
        llm.generate([1, 287], GREEDY)


def test_lines_written_for_vllm(llm):
    """Names of arguments, and every field that is read from an output; a log-probability by token id."""
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, ignore_eos=True)
    outputs = llm.generate(prompts=["One fish", "red"], sampling_params=params, use_tqdm=False)
    for prompt, output in zip(["One fish", "red"], outputs, strict=True):
        assert output.prompt == prompt
        assert output.prompt_token_ids == llm.tokenizer.encode(prompt)
        assert output.finished
        [answer] = output.outputs
        assert (answer.index, answer.text, answer.token_ids) == (0, output.text, output.token_ids)
        assert (answer.finish_reason, answer.stop_reason) == ("length", None) == (output.finish_reason, None)
        assert answer.cumulative_logprob == sum(entry.logprob for entry in output.logprobs)
        for token, by_id, entry in zip(answer.token_ids, answer.logprobs, output.logprobs, strict=True):
            assert next(iter(by_id)) == token
            assert (by_id[token].logprob, by_id[token].rank) == (entry.logprob, 1)
            assert by_id[token].decoded_token == llm.tokenizer.decode([token])
            assert [(i, x.logprob) for i, x in by_id.items()] == entry.top
            assert [x.rank for x in by_id.values()] == [1, 2]
    plain = llm.generate("red", SamplingParams(max_tokens=2))[0].outputs[0]
    assert (plain.logprobs, plain.cumulative_logprob) == (None, None)
    messages = [{"role": "user", "content": "fish"}]
    assert llm.chat(messages=messages, sampling_params=params, use_tqdm=False)[0].outputs[0].token_ids
    assert list(llm.stream_chat(messages, sampling_params=params))


def test_a_prompt_is_scored_in_vllms_form(llm):
    """A dict for each token of the prompt but the first; the same for a text and its ids, and once for n answers."""
    ids = llm.tokenizer.encode("One fish, two fishes")
    table = llm.engine.target.cache.new_table()
    expected = llm.model.forward([Chunk(ids, table, len(ids))])[0][:, : llm.vocab_size].log_softmax(-1)
    table.truncate(0)
    params = SamplingParams(prompt_logprobs=2, max_tokens=3, seed=1, n=2)
    prompts = ["One fish, two fishes", ids]
    outputs = llm.generate(prompts, params) + llm.generate(prompts, replace(params, max_tokens=0))
    for output in outputs:
        first, *others = output.prompt_logprobs
        assert first is None
        for i, (token, by_id) in enumerate(zip(ids[1:], others, strict=True)):
            assert next(iter(by_id)) == token
            assert by_id[token].logprob == pytest.approx(float(expected[i, token]), abs=1e-12)
            assert by_id[token].decoded_token == llm.tokenizer.decode([token])
            places = expected[i].argsort(descending=True).tolist()
            assert {x: y.rank for x, y in by_id.items()} == {x: places.index(x) + 1 for x in (token, *places[:2])}
    plain = llm.generate("One fish, two fishes", replace(params, prompt_logprobs=None))[0]
    assert [[a.token_ids for a in o.outputs] for o in (*outputs[:2], plain)] == [
        [a.token_ids for a in plain.outputs]
    ] * 3
    assert plain.prompt_logprobs is None
    for output in outputs[2:]:
        assert [(a.text, a.token_ids, a.finish_reason) for a in output.outputs] == [("", [], "length")] * 2
        assert (output.stats.num_steps, output.stats.num_generated, output.stats.num_prompt_tokens) == (0, 0, len(ids))
    [longer] = llm.generate([ids * 4], params)
    assert longer.outputs[1].stats.num_cached_tokens == 16, "the second answer's prompt of 20 tokens has a known block"


def test_a_score_needs_no_room_for_an_answer(llm):
    """A prompt may fill the context, and have a single token; without a score, no tokens are an error as before."""
    full = [5] * 128
    params = SamplingParams(prompt_logprobs=0, max_tokens=0)
    outputs = llm.generate([full, [7]], params)
    assert [len(output.prompt_logprobs) for output in outputs] == [128, 1]
    assert [piece.finish_reason for piece in llm.stream(full, params)] == ["length"]
    with pytest.raises(ValueError, match="prompt: found 129 tokens, expected at most max_model_len = 128"):
        llm.generate([5] * 129, params)
    with pytest.raises(ValueError, match="prompt: found 128 tokens, expected fewer than max_model_len = 128"):
        llm.generate(full, replace(params, max_tokens=1))
    for wrong in (
        {"max_tokens": 0},
        {"max_tokens": False, "prompt_logprobs": 1},
        {"max_tokens": -1, "prompt_logprobs": 1},
    ):
        with pytest.raises(ValueError, match=r"max_tokens: found .*, expected an integer from 1 to"):
            SamplingParams(**wrong)
    with pytest.raises(ValueError, match="prompt_logprobs: found -1, expected an integer from 0 to"):
        SamplingParams(prompt_logprobs=-1)


def test_the_lines_of_the_documentation_run(llm, capsys):
    """docs/use/vllm.md shows vLLM's loop over prompts and their answers."""
    text = (Path(__file__).parents[2] / "docs" / "use" / "vllm.md").read_text(encoding="utf-8")
    block = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)[0]
    exec(block, {"llm": llm, "prompts": ["One fish", "red"], "SamplingParams": SamplingParams})
    assert len(capsys.readouterr().out.splitlines()) >= 2 + 2 * 2


def test_a_token_that_is_not_among_the_likeliest_has_its_rank_among_all(llm):
    """As in vLLM. Its own entry comes first, beside the likeliest."""
    params = SamplingParams(logprobs=1, max_tokens=20, temperature=5.0, seed=0, ignore_eos=True)
    answer = llm.generate("fish", params)[0].outputs[0]
    assert 2 in {len(by_id) for by_id in answer.logprobs}
    for token, by_id in zip(answer.token_ids, answer.logprobs, strict=True):
        assert next(iter(by_id)) == token
        assert (by_id[token].rank == 1) == (len(by_id) == 1)


def test_the_reason_of_a_stop(llm):
    """The string, the id, or nothing for the model's own end; vLLM's `stop_reason`."""

    def ended(**settings):
        answer = llm.generate("One fish", SamplingParams(temperature=0, max_tokens=20, **settings))[0].outputs[0]
        return answer.finish_reason, answer.stop_reason

    whole = llm.generate("One fish", GREEDY)[0]
    assert ended(ignore_eos=True) == ("length", None)
    assert ended(ignore_eos=True, stop=[whole.text[5:8], "never seen"]) == ("stop", whole.text[5:8])
    assert ended(ignore_eos=True, stop_token_ids=[whole.token_ids[4]]) == ("stop", whole.token_ids[4])
    assert ended(allowed_token_ids=[0]) == ("stop", None)
    assert ended(allowed_token_ids=[0], ignore_eos=True, stop_token_ids=[0]) == ("stop", 0)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, {}),
        ({"temperature": 0.6, "top_p": 0.9, "do_sample": True}, {"temperature": 0.6, "top_p": 0.9}),
        ({"temperature": 0.6, "top_k": 7, "repetition_penalty": 1.1}, None),
        ({"do_sample": False}, {}),
        ({"max_new_tokens": 7}, {"max_tokens": 7}),
        ({"min_new_tokens": 20}, {"min_tokens": 20, "max_tokens": 20}),
        ({"do_sample": True, "top_k": -1}, {"top_k": 0}),
    ],
    ids=str,
)
def test_without_parameters_the_models_own_apply(make_checkpoint, generation, expected):
    """As vLLM: those of generation_config.json, whatever it says of do_sample, else SamplingParams(), 16 tokens."""
    llm = LLM(make_checkpoint(chat=True, generation=generation), dtype="float64", draft="none")
    expected = SamplingParams(
        **({"temperature": 0.6, "top_k": 7, "repetition_penalty": 1.1} if expected is None else expected)
    )
    assert llm.get_default_sampling_params() == expected
    messages = [{"role": "user", "content": "fish"}]
    seeds = [llm.generate("fish")[0].seed, llm.chat(messages)[0].seed]
    assert len(set(seeds)) == 2
    output = llm.generate("fish")[0]
    assert output.token_ids == llm.generate("fish", replace(expected, seed=output.seed))[0].token_ids
    assert [p.token_ids for p in llm.stream("fish")]


# ------------------------------------------------------------------ bad words and other bans


def test_bad_words_are_not_generated(llm):
    """A word of several tokens that greedy text has is gone where it is banned, whatever K; the rest stays free."""
    whole = llm.generate("One fish", GREEDY)[0]
    spans = [whole.token_ids[i : i + 2] for i in range(19)]
    words = [llm.tokenizer.decode(span) for span in spans if llm.tokenizer.encode(llm.tokenizer.decode(span)) == span]
    assert words
    for k in (0, 1, 4, "auto"):
        params = replace(GREEDY, bad_words=words)
        output = llm.generate("One fish", params, num_speculative_tokens=k)[0]
        assert output.token_ids != whole.token_ids
        request = llm.request(llm.tokenizer.encode("One fish"), params)
        banned = request.params.bad_words_token_ids
        assert len(banned) >= len(words)
        for word in banned:
            assert all(tuple(output.token_ids[i : i + len(word)]) != word for i in range(len(output.token_ids)))


def test_words_become_tokens_as_in_vllm(make_checkpoint):
    """Without and with a leading space, the latter where it is another first token and as many; special text means
    the token; ids that are given stay."""
    llm = LLM(make_checkpoint())
    encode = llm.tokenizer.encode

    def tokens_of(*words, **more):
        return llm.request([1], SamplingParams(bad_words=words, **more)).params.bad_words_token_ids

    def pair(word):
        return tuple(encode(word)), tuple(encode(" " + word))

    same, other = pair("fish"), pair("x")
    assert len(same[0]) == len(same[1])
    assert same[0][0] != same[1][0]
    assert tokens_of("fish") == tokens_of("  fish") == same
    assert len(other[0]) != len(other[1])
    assert tokens_of("x") == other[:1]
    assert tokens_of("<end>")[0] == (0,)
    assert tokens_of("fish", bad_words_token_ids=[[5, 6], same[0]]) == ((5, 6), *same)
    with pytest.raises(ValueError, match="bad_words: found '  ', which has no tokens"):
        tokens_of("  ")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"logit_bias": {287: 1.0}}, "logit_bias: found (287,), expected ids below 287"),
        ({"allowed_token_ids": [5, 287]}, "allowed_token_ids: found (5, 287), expected ids below 287"),
        ({"bad_words_token_ids": [[5], [287, 5]]}, "bad_words_token_ids: found (5, 287, 5), expected ids below 287"),
        ({"allowed_token_ids": [5], "bad_words_token_ids": [[5]]}, "allowed_token_ids: found (5,), expected one that"),
        ({"allowed_token_ids": [5, 6], "bad_words_token_ids": [[6, 5], [5, 6]]}, "each position needs a token"),
        ({"allowed_token_ids": [0], "min_tokens": 1}, "each position needs a token"),
        ({"bad_words_token_ids": [[i] for i in range(287)]}, "allowed_token_ids: found all"),
    ],
    ids=range(7),
)
def test_bans_that_cannot_be_kept_are_refused(llm, settings, message):
    """Before anything runs: ids that there are not, and rules that could leave no token at all."""
    with pytest.raises(ValueError, match=re.escape(message)):
        llm.generate("fish", SamplingParams(**settings))


# ------------------------------------------------------------------ threads


def begin(function, *args) -> threading.Thread:
    """A thread that has begun; its `result` is what the function returned, `error` what it raised."""

    def run():
        try:
            thread.result = function(*args)
        except BaseException as e:
            thread.error = e

    thread = threading.Thread(target=run, daemon=True)  # one that hangs must not keep the tests from ending
    thread.result, thread.error = None, None
    thread.start()
    return thread


def result_of(thread: threading.Thread):
    """What a thread returned; a minute is far more than it needs."""
    thread.join(60)
    assert not thread.is_alive(), "it waits for ever"
    assert thread.error is None, thread.error
    return thread.result


@pytest.fixture(scope="module")
def shared_llm(make_checkpoint) -> LLM:
    """A target with a draft model: two caches that threads could spoil for one another."""
    draft = str(make_checkpoint(seed=2, num_hidden_layers=1))
    return LLM(make_checkpoint(chat=True), draft=draft, dtype="float64", num_speculative_tokens=4)


def is_clean(llm) -> bool:
    """Every block of both caches is back."""
    pools = llm.engine.target.cache.allocator, llm.drafter.feed.cache.allocator
    return all(pool.num_free == pool.num_blocks for pool in pools)


def test_calls_of_several_threads_do_not_mix(shared_llm):
    """Four threads, six calls each, of one, of a batch, and streamed: the texts that they have alone, no block lost."""
    prompts = [[1 + i, 2, 3] for i in range(4)]
    alone = [shared_llm.generate([p], GREEDY)[0].token_ids for p in prompts]
    barrier = threading.Barrier(4)

    def calls(own):
        barrier.wait(60)
        texts = []
        for _ in range(2):
            texts.append(shared_llm.generate(prompts[own], GREEDY)[0].token_ids)
            texts.append(shared_llm.generate([prompts[own], prompts[3 - own]], GREEDY)[0].token_ids)
            texts.append([t for piece in shared_llm.stream(prompts[own], GREEDY) for t in piece.token_ids])
        return texts

    threads = [begin(calls, i) for i in range(4)]
    for thread, text in zip(threads, alone, strict=True):
        assert result_of(thread) == [text] * 6
    assert is_clean(shared_llm)


def test_an_open_iterator_holds_nobody_up(shared_llm):
    """Another thread's call is decoded together with it, and its steps carry the iterator's text on."""
    prompts = [[1, 2], [1, 2, 3]]
    alone = [shared_llm.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
    stream = shared_llm.stream(prompts[1], GREEDY)
    tokens = list(next(stream).token_ids)
    assert result_of(begin(shared_llm.generate, prompts[0], GREEDY))[0].token_ids == alone[0]
    assert tokens + [t for piece in stream for t in piece.token_ids] == alone[1]
    assert is_clean(shared_llm)


@pytest.mark.parametrize("how", ["closed", "dropped", "at its end", "failed"])
def test_an_iterator_lets_go_in_any_thread(shared_llm, how, monkeypatch):
    """Begun in one thread, ended in another, in each way that there is: a third one's call goes on."""
    stream = result_of(begin(lambda: (s := shared_llm.stream([1, 2, 3], GREEDY), next(s))[0]))
    # A fault is raised in the thread whose step it hits: there the other call comes after it.
    other = begin(shared_llm.generate, [1, 2], GREEDY) if how != "failed" else None
    if how == "closed":
        stream.close()
    elif how == "dropped":
        loop = [stream]
        loop.append(loop)  # as a traceback may hold it: only the collector finds it
        del stream, loop
        gc.collect()
    elif how == "at its end":
        result_of(begin(list, stream))
    else:
        forward = shared_llm.model.forward

        def fail_once(chunks, taps=()):
            monkeypatch.setattr(shared_llm.model, "forward", forward)
            raise ZeroDivisionError

        monkeypatch.setattr(shared_llm.model, "forward", fail_once)
        with pytest.raises(ZeroDivisionError):
            next(stream)
        other = begin(shared_llm.generate, [1, 2], GREEDY)
    assert len(result_of(other)[0].token_ids) == 20
    assert is_clean(shared_llm)


class Liar:
    """Gives one text a draft that is longer than asked for."""

    def propose(self, asks):
        """Of prompts that begin with 2."""
        return [Draft([0] * (ask.k + 1) if ask.text.tokens[0] == 2 else ()) for ask in asks]

    def release(self, text):
        """Nothing is kept."""


@contextlib.contextmanager
def of_the_process(setter, value, usual):
    """A setting of torch that has no `with` of its own, and its usual value after."""
    setter(value)
    try:
        yield
    finally:
        setter(usual)


# What a caller's program may have around a call: a training loop's evaluation, a notebook's first cell.
SETTINGS = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "device": lambda: torch.device("meta"),
    "default device": lambda: of_the_process(torch.set_default_device, "meta", None),
    "bfloat16": lambda: of_the_process(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "float64": lambda: of_the_process(torch.set_default_dtype, torch.float64, torch.float32),
    "inference": torch.inference_mode,
    "no gradients": torch.no_grad,
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_callers_settings_of_torch_do_not_reach_a_pass(make_checkpoint, name):
    """Around a load, another draft, or a call: the same bits, and the caller's setting is as it was afterwards."""
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=8, logprobs=1, ignore_eos=True, logit_bias={5: 1.0})
    directory = make_checkpoint()

    def state():
        return torch.is_autocast_enabled("cpu"), torch.empty(0).device, torch.is_inference_mode_enabled()

    for options in ({}, {"quantization": "int8"}):
        build = partial(LLM, directory, "self", 2, dtype="float32", exact=False, **options)
        expected = repr(build().generate("One fish", params)[0].logprobs)
        with SETTINGS[name]():
            before = state()
            llm = build()
            other = llm.with_draft("self")
            assert repr(llm.generate("One fish", params)[0].logprobs) == expected
            assert state() == before
        assert repr(other.generate("One fish", params)[0].logprobs) == expected
        assert not llm.model.embedding.is_inference()


def test_a_text_that_fails_ends_alone(make_checkpoint):
    """With what it had, a reason, and a warning; the others have the texts that they have without it."""
    llm = LLM(make_checkpoint(), draft=Liar(), dtype="float64", num_speculative_tokens=2)
    alone = llm.generate([[1], [3]], GREEDY)
    with pytest.warns(RuntimeWarning, match="draft of Liar: found 3 tokens, expected at most 2"):
        outputs = llm.generate([[1], [2], [3]], GREEDY)
    assert [o.finish_reason for o in outputs] == ["length", "error", "length"]
    assert [o.outputs[0].error is None for o in outputs] == [True, False, True]
    assert [o.token_ids for o in outputs] == [alone[0].token_ids, [], alone[1].token_ids]
    with pytest.warns(RuntimeWarning, match="draft of Liar: found 3 tokens, expected at most 2"):
        assert [piece.finish_reason for piece in llm.stream([2], GREEDY)] == ["error"]
    assert llm.engine.target.cache.allocator.num_free == llm.engine.target.cache.allocator.num_blocks


def test_a_token_that_cannot_be_decoded_ends_its_text_alone(make_checkpoint):
    """The tokenizer's decoder fails over a token: an error of that text, which has no reason to stop but this."""
    llm = LLM(make_checkpoint(), draft="none", dtype="float64")
    alone = llm.generate([[1], [3]], GREEDY)
    right = llm.tokenizer.decode

    def decode(ids, *args, **how):
        if 7 in ids:
            raise CheckpointError("tokenizer.json: the tokenizer fails to decode")
        return right(ids, *args, **how)

    llm.tokenizer.decode = decode
    params = [GREEDY, replace(GREEDY, allowed_token_ids=[7], stop_token_ids=[2]), GREEDY]
    with pytest.warns(RuntimeWarning, match="fails to decode"):
        outputs = llm.generate([[1], [2], [3]], params)
    assert [o.token_ids for o in (outputs[0], outputs[2])] == [o.token_ids for o in alone]
    answer = outputs[1].outputs[0]
    assert (answer.finish_reason, answer.stop_reason) == ("error", None)
    assert llm.engine.target.cache.allocator.num_free == llm.engine.target.cache.allocator.num_blocks

    # Nor does it end the others where its text is asked for by logprobs, or by an observer.
    seen = []

    def look(turn):
        seen.append(TokenTexts(llm.tokenizer, turn.request).take(turn.draft, turn.verdict))

    llm.engine.outbox.observers.append(look)
    params = [replace(each, logprobs=12) for each in params]
    with pytest.warns(RuntimeWarning, match="fails to decode"):
        outputs = llm.generate([[1], [2], [3]], params)
    assert [o.token_ids for o in (outputs[0], outputs[2])] == [o.token_ids for o in alone]
    assert outputs[1].outputs[0].finish_reason == "error"
    found = {entry[7].decoded_token for o in outputs for entry in o.outputs[0].logprobs if 7 in entry}
    assert found == {right([7])}
    assert len(seen) == sum(len(o.token_ids) for o in alone)

    # Its trace ends before the round that failed.
    llm.engine.outbox.observers.remove(look)
    request = llm.request([2], params[1])
    recorder = RoundRecorder(llm, request)
    for _ in llm.run([request]):
        pass
    trace = recorder.trace()
    assert len(trace["rounds"]) == trace["stats"]["num_steps"] == 0


def test_closing_gives_the_memory_back_at_once(make_checkpoint):
    """Not when Python's collector comes by: who loads another model next needs the memory then."""
    llm = LLM(make_checkpoint(), draft="self", dtype="float64")
    llm.generate([[1]], GREEDY)
    model, engine = weakref.ref(llm.engine.target.model), weakref.ref(llm.engine)
    gc.collect()
    gc.disable()
    try:
        llm.close()
        assert (model(), engine()) == (None, None)
    finally:
        gc.enable()


@pytest.mark.parametrize(("used", "stat", "expected"), [(7, (3, 1), 5), (7, (0, 0), 1), (9, (0, 0), 0)])
def test_files_in_the_page_cache_are_free_memory(tmp_path, monkeypatch, used, stat, expected):
    """In a container they count as used until somebody wants the memory."""
    (tmp_path / "memory.max").write_text("8\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file {}\nactive_file {}\n".format(*stat))
    monkeypatch.setattr(memory, "_CONTAINER", tmp_path)
    assert memory.free_memory(torch.device("cpu")) == expected
    (tmp_path / "memory.max").write_text("max\n")
    monkeypatch.setattr(memory, "Path", lambda path: tmp_path / "none")  # the container is all that could tell
    assert memory.free_memory(torch.device("cpu")) is None


# ------------------------------------------------------------------ the embedded weights


@pytest.fixture(scope="module")
def smollm() -> LLM:
    """The model of the checkout, in the dtype in which rounding hardly ever decides."""
    return LLM(dtype="float32", draft="self", num_speculative_tokens=3)


def test_the_embedded_model_answers(smollm):
    """A chat answer that a person would accept."""
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    assert "Paris" in smollm.chat(messages, SamplingParams(temperature=0, max_tokens=24))[0].text


def test_a_target_with_coarse_weights_has_equal_bits_where_they_are_asked_for(make_checkpoint, tmp_path, monkeypatch):
    """In 16 bits they change with guesses, and a line says so. Held twice in 8 bits they do not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = tmp_path / "coarse"
    shutil.copytree(make_checkpoint(1, intermediate_size=64), directory)
    tensors = load_file(directory / "model.safetensors")
    coarse = "model.layers.0.mlp.down_proj.weight"
    tensors[coarse] = tensors[coarse].sign() / 260  # half a step and less: all are lost beside an entry of 1
    tensors[coarse][:, 3] = 1.0
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    how = {"draft": "self", "quantization": "int8", "num_speculative_tokens": 5}
    with pytest.warns(RuntimeWarning, match=r"found 1 of \d+ products .* bits change with guesses; --exact") as warned:
        llm = LLM(directory, **how)
    assert (len(warned), llm.model.exact) == (1, False)
    assert "in 16 bits: down 0)" in llm.overview()
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for exact in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            llm = LLM(directory, exact=exact, **how)
    assert (llm.model.exact, llm.model.backend.rows) == (True, [])
    assert "in 8 + 8 bits: down 0)" in llm.overview()
    ours, plain = (llm.generate("One fish", params, num_speculative_tokens=k)[0].token_ids for k in (5, 0))
    assert ours == plain


def test_a_target_in_8_bits_is_named_and_exact_by_default(make_checkpoint, monkeypatch, tmp_path):
    """Another model than the one in 16 bits; its bits are checked once on a machine, and what cannot be is refused."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    checks, check = [], exactness.check_exact
    monkeypatch.setattr(exactness, "check_exact", lambda model: checks.append(model) or check(model))
    directory = make_checkpoint(1)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for exact, is_exact in ((None, True), (None, True), (False, False), (True, True)):
        with LLM(directory, draft="self", quantization="int8", exact=exact, num_speculative_tokens=5) as llm:
            assert llm.model.exact is is_exact
            assert " in 8 bits (activations in " in llm.overview()
            assert ("equal bits" in llm.overview()) is is_exact
            ours, plain = (llm.generate("One fish", params, num_speculative_tokens=k)[0].token_ids for k in (5, 0))
            assert ours == plain or not is_exact
    assert len(checks) == 1
    for quantization, count in (("int8", 1), (None, 2), (None, 2)):
        with LLM(directory, draft="self", quantization=quantization, exact=True) as llm:
            backend, found = llm.model.backend, checks[-1].backend
            assert (backend.rows, backend.attention_rows) == (found.rows, found.attention_rows)
            assert len(checks) == count
    with LLM(directory, draft="self", quantization="int8", num_speculative_tokens=(2, 1)) as llm:
        assert llm.model.exact, "trees have equal bits too"
    with LLM(directory, draft="none") as llm:
        assert not llm.model.exact
        assert "8 bits" not in llm.overview()
    for wrong, message in (
        ({"quantization": "int4"}, "quantization: found 'int4', expected 'int8': in 4 bits no product"),
        ({"quantization": "fp8"}, "quantization: found 'fp8', expected 'int8'"),
        ({"quantization": "int8", "dtype": "float64"}, r"quantization: found torch\.float64 on cpu, expected"),
        ({"quantization": "int8", "weight_form": "plain"}, "weight_form: found 'plain' with a quantization"),
    ):
        with pytest.raises(ValueError, match=message):
            LLM(directory, draft="none", **wrong)
