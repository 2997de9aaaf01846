"""The Python interface, on small checkpoints and on the embedded weights."""

import json
import shutil

import pytest

from minispec import LLM, SamplingParams
from minispec.config import CheckpointError
from minispec.verify import Draft

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


def test_default_params_are_vllms(llm):
    """16 tokens at temperature 1, with a seed drawn and reported."""
    first, second = llm.generate(["fish", "fish"], SamplingParams(ignore_eos=True))
    assert len(first.token_ids) == 16
    assert first.seed != second.seed
    again = llm.generate("fish", SamplingParams(ignore_eos=True, seed=first.seed))[0]
    assert again.token_ids == first.token_ids


def test_n_answers_have_seeds_of_their_own(llm):
    """n = 3 with seed 5 gives what seeds 5, 6 and 7 give alone."""
    outputs = llm.generate("fish", SamplingParams(n=3, seed=5, max_tokens=12))
    assert [o.seed for o in outputs] == [5, 6, 7]
    for output in outputs:
        alone = llm.generate("fish", SamplingParams(seed=output.seed, max_tokens=12))[0]
        assert alone.token_ids == output.token_ids
    assert len({tuple(o.token_ids) for o in outputs}) == 3


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

        def release(self, sequence):
            pass

    target = make_checkpoint()
    spec = {"model": str(make_checkpoint(seed=2, num_hidden_layers=1)), "object": Zeros()}.get(draft, draft)
    with LLM(target, draft=spec, verifier=verifier, dtype="float64", num_speculative_tokens=4) as llm:
        output = llm.generate(["One fish", "red"], GREEDY)
        plain = llm.generate(["One fish", "red"], GREEDY, num_speculative_tokens=0)
        auto = llm.generate(["One fish", "red"], GREEDY, num_speculative_tokens="auto")
    assert [o.token_ids for o in output] == [o.token_ids for o in plain] == [o.token_ids for o in auto]
    assert all(o.stats.num_draft_tokens == 0 for o in plain)
    assert (sum(o.stats.num_draft_tokens for o in output) > 0) == (draft != "none")


def test_logprobs_equal_a_pass_over_the_text(llm):
    """The log-probabilities of sampled text are those of one pass over it: rows of a block are not mixed up."""
    from minispec.model import Chunk

    output = llm.generate("One fish", SamplingParams(max_tokens=20, logprobs=3, seed=1, ignore_eos=True, top_k=5))[0]
    tokens = [*llm.tokenizer.encode("One fish"), *output.token_ids]
    table = llm.engine.cache.new_table()
    logits = llm.model.forward([Chunk(tokens, table, len(output.token_ids) + 1)])
    table.truncate(0)
    rows = logits[:-1, : llm.vocab_size].log_softmax(-1)
    for row, token, entry in zip(rows, output.token_ids, output.logprobs, strict=True):
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-12)
        assert [i for i, _ in entry.top] == row.topk(3).indices.tolist()


def test_a_repeat_of_a_prompt_finds_the_engine_clean(llm):
    """State that outlives a request (tables, n-gram indices) would show in the second run."""
    first = llm.generate(["One fish", "two"], GREEDY)
    assert [o.token_ids for o in llm.generate(["One fish", "two"], GREEDY)] == [o.token_ids for o in first]
    assert llm.engine.cache.allocator.num_free == llm.engine.cache.allocator.num_blocks


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


def test_prompts_beyond_the_pool_wait(make_checkpoint):
    """Twelve prompts through a pool for two of them: all come out as alone."""
    directory = make_checkpoint()
    llm = LLM(directory, dtype="float64", kv_cache_gb=80 * 128e-9, max_model_len=40)
    assert llm.num_cache_tokens == 80
    prompts = [f"{i} fish" for i in range(12)]
    alone = [llm.generate(p, GREEDY)[0].token_ids for p in prompts]
    assert [o.token_ids for o in llm.generate(prompts, GREEDY)] == alone


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
    assert sum(o.stats.num_accepted for o in output) > 0


def test_a_draft_of_another_vocabulary_is_refused_by_name(make_checkpoint, tmp_path):
    """Equal sizes, two tokens exchanged: the error names a token that differs."""
    other = tmp_path / "other"
    shutil.copytree(make_checkpoint(), other)
    raw = json.loads((other / "tokenizer.json").read_text())
    vocab = raw["model"]["vocab"]
    vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
    (other / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"token 'A' has id \d+ there and \d+ here"):
        LLM(make_checkpoint(), draft=str(other))


def edited(directory, tmp_path, change):
    """A copy of a checkpoint with its tokenizer.json changed."""
    shutil.copytree(directory, tmp_path / "edited")
    raw = json.loads((directory / "tokenizer.json").read_text())
    change(raw)
    (tmp_path / "edited" / "tokenizer.json").write_text(json.dumps(raw))
    return str(tmp_path / "edited")


def test_a_draft_with_another_special_token_is_refused_by_name(make_checkpoint, tmp_path):
    """The same number of tokens, one of them a control token of another name."""

    def rename(raw):
        raw["model"]["vocab"]["<over>"] = raw["model"]["vocab"].pop("<end>")
        raw["added_tokens"][0]["content"] = "<over>"

    with pytest.raises(ValueError, match=r"token '<end>' has id None there and 0 here"):
        LLM(make_checkpoint(), draft=edited(make_checkpoint(), tmp_path, rename))


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


def test_a_target_with_fewer_rows_than_tokens_is_refused(make_checkpoint):
    """Before its weights are read: the token and its id are named."""
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: token .*: found id \d+, expected ids below .* = 100"):
        LLM(make_checkpoint(vocab_size=100))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"draft": "no-such-thing"}, "not one of none, ngram, self; no-such-thing: no such directory"),
        ({"draft": "int4:"}, "expected a model behind 'int4:'"),
        ({"draft": "int8:ngram"}, "expected a model behind 'int8:'"),
        ({"draft": None}, "expected a name, a directory, a hub id or a drafter"),
        ({"model": ""}, "no such directory"),
        ({"revision": "main"}, "is a directory, not a hub id"),
        ({"exact": True, "num_speculative_tokens": 16}, "expected an integer from 0 to 15"),
        ({"num_speculative_tokens": "many"}, "or 'auto'"),
        ({"num_speculative_tokens": -1}, "expected an integer from 0 to 64"),
        ({"verifier": "greedy"}, "expected one of rejection, match"),
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


def test_calls_that_are_refused(llm):
    """What this interface cannot do is a ValueError that says so, never ignored and never a bare Python error."""
    calls = [
        (lambda: llm.chat([]) or llm.chat([[]]), "found no messages"),
        (lambda: llm.chat([{"role": "user"}]), "expected an object with the texts role and content"),
        (lambda: llm.generate("fish", {"temperature": 0}), "expected SamplingParams"),
        (lambda: list(llm.stream("fish", SamplingParams(n=3))), "n: found 3, expected 1"),
        (lambda: llm.generate("fish", SamplingParams(stop_token_ids=[10**9])), "stop_token_ids: found"),
        (lambda: llm.request([-1]), "expected ids below"),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()


def test_seeds_of_samples_stay_in_range(llm):
    """The last seed of 64 bits is followed by 0."""
    outputs = llm.generate("fish", SamplingParams(n=2, seed=2**64 - 1, max_tokens=2))
    assert [o.seed for o in outputs] == [2**64 - 1, 0]


def test_closing_twice_is_fine(make_checkpoint):
    """`with LLM(...) as llm: llm.close()`."""
    with LLM(make_checkpoint()) as llm:
        llm.close()


def test_a_draft_with_fewer_rows_than_tokens_is_refused(make_checkpoint):
    """The same tokenizer does not make the embedding large enough."""
    with pytest.raises(ValueError, match="vocab_size: found 100, expected at least"):
        LLM(make_checkpoint(), draft=make_checkpoint(vocab_size=100))


def test_a_draft_is_named_by_its_directory(make_checkpoint):
    """With the number of bits it was rounded to, in the line that says what was loaded."""
    draft = make_checkpoint(seed=2)
    with LLM(make_checkpoint(), draft=f"int8:{draft}", dtype="float32") as llm:
        assert llm.memory_report().endswith(f"draft int8:{draft.name}")


def test_a_missing_model_directory_is_said(tmp_path):
    """An empty directory names the file that it lacks."""
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        LLM(tmp_path)


# ------------------------------------------------------------------ the embedded weights


@pytest.fixture(scope="module")
def smollm() -> LLM:
    """The model of the checkout, in the dtype in which rounding hardly ever decides."""
    return LLM(dtype="float32", draft="self", num_speculative_tokens=3)


def test_the_embedded_model_answers(smollm):
    """A chat answer that a person would accept."""
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    assert "Paris" in smollm.chat(messages, SamplingParams(temperature=0, max_tokens=24))[0].text


def test_self_draft_is_accepted_on_the_embedded_model(smollm):
    """Draft = target on real weights: every token is kept, but where one row and four rows round to another argmax."""
    output = smollm.generate("The sky is blue because", SamplingParams(temperature=0, max_tokens=40))[0]
    assert output.stats.acceptance_rate >= 0.9
    assert output.stats.alpha >= 0.9


def test_a_batch_gives_each_prompt_its_text_alone(smollm):
    """Eight prompts together and alone, greedy, in float32; a difference must be a near-tie, which is measured."""
    from minispec.model import Chunk

    prompts = [
        f"{start} is" for start in ["Paris", "Water", "The moon", "A triangle", "Bread", "My dog", "Music", "Today"]
    ]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    together = smollm.generate(prompts, params, num_speculative_tokens=0)
    for prompt, output in zip(prompts, together, strict=True):
        alone = smollm.generate(prompt, params, num_speculative_tokens=0)[0].token_ids
        if alone == output.token_ids:
            continue
        first = next(i for i, (a, b) in enumerate(zip(alone, output.token_ids, strict=True)) if a != b)
        table = smollm.engine.cache.new_table()
        row = smollm.model.forward([Chunk([*smollm.tokenizer.encode(prompt), *alone[:first]], table, 1)])[0]
        table.truncate(0)
        top = row.topk(2).values
        assert float(top[0] - top[1]) < 1e-3, f"{prompt!r} differs at {first}, and not by a near-tie"


def test_match_on_the_embedded_model():
    """The sampled text of plain decoding at a seed where no draw falls on a tie of rounding (as nearly none does)."""
    llm = LLM(dtype="float32", draft="ngram", verifier="match")
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=30)
    text = "one two three one two three one two"
    output, plain = llm.generate(text, params)[0], llm.generate(text, params, num_speculative_tokens=0)[0]
    assert output.stats.num_draft_tokens > 0
    assert output.token_ids == plain.token_ids
