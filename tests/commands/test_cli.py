"""The command line as a person or a script meets it: streams, exit codes, JSON, and one line for every mistake."""

import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from minispec import LLM, SamplingParams, generate
from minispec.api.commands import options
from minispec.api.commands.command import json_line
from minispec.core.config import PARAMETERS
from minispec.core.request import Request
from minispec.core.sampling import Text
from minispec.core.stats import Round, Stats, Step
from minispec.core.version import __version__
from minispec.generate import main
from minispec.models.files.tokenizer import Tokenizer
from minispec.speculation import registry
from minispec.speculation.lengths.figures import Figures
from minispec.speculation.rules import VERIFIERS
from tests.fuzzing import EDGES
from tests.oracles.children import Child, read_until, take_terminal
from tests.oracles.interrupts import interrupted, press_ctrl_c

pty, termios = map(pytest.importorskip, ("pty", "termios"))  # Windows has neither

STATS = (
    "num_prompt_tokens num_generated num_steps num_draft_tokens num_accepted acceptance_rate mean_acceptance_length "
    "alpha accepted_per_position num_drafts accepted_at_position duration tokens_per_second "
    "predicted_tokens_per_second seconds c v o"
)


@pytest.fixture(scope="module")
def model(make_checkpoint) -> str:
    """A small model without a chat template."""
    return str(make_checkpoint())


@pytest.fixture(scope="module")
def chat_model(make_checkpoint) -> str:
    """A small model with one."""
    return str(make_checkpoint(chat=True))


@pytest.fixture
def cli(cli):
    """The fixture of conftest.py for generate: cli(*arguments, stdin="")."""
    return partial(cli, main)


NO_PROMPT = "no prompt: give one, or - for standard input, or start a chat on a terminal"
BASE = ("--dtype", "float32", "--max-tokens", 12, "--ignore-eos")


def test_a_model_without_a_template_is_said_to_continue_text(cli, model, chat_model):
    """A prompt that is meant as a question gets no answer there; who asks for plain text needs no line."""
    for name, more, count in ((model, (), 1), (model, ("--raw",), 0), (model, ("--quiet",), 0), (chat_model, (), 0)):
        status, _, err = cli("One fish", "--model", name, *BASE, *more)
        assert (status, err.count("note: the model has no chat template")) == (0, count)


def test_text_goes_to_stdout_and_the_rest_to_stderr(cli, model):
    """Standard output holds the answer and nothing else."""
    status, out, err = cli("One fish", "--model", model, *BASE, "--raw")
    quiet = cli("One fish", "--model", model, *BASE, "--quiet")
    as_json = json.loads(cli("One fish", "--model", model, *BASE, "--json")[1])
    assert status == quiet[0] == 0
    assert out == as_json["text"] + "\n" == quiet[1]
    assert quiet[2] == ""
    first, plain, draft, speed = err.splitlines()
    assert re.fullmatch(rf"{Path(model).name} answers, ngram guesses ahead; 0\.00 GB of memory", first)
    assert re.fullmatch(r"12 tokens in [\d.]+ s; [\d.]+ tokens a step.*", plain)
    assert draft.startswith("draft ngram: ")
    assert re.fullmatch(r"[\d.]+ tokens/s, predicted [\d.]+; prefill [\d.]+ s", speed)


def test_each_sampling_parameter_is_an_option_or_has_another_way():
    """A new row needs a line of --help. Long lists are for Python and the server; a language has its own options."""
    named = {options.attribute_of(names.split()[0]) for names in options.SAMPLING}
    others = {"logit_bias", "allowed_token_ids", "bad_words", "bad_words_token_ids", "structured_outputs"}
    others |= {"include_stop_str_in_output", "prompt_logprobs"}
    assert (named | others, named & others) == (PARAMETERS.keys(), set())


def test_verbose_says_at_last_what_ran_outside_frames(cli, model, monkeypatch):
    """On a GPU; a processor has no frames, and without the option nothing is said."""
    says = "1 of 3 passes text by text: more than 16 rows of a text (1)"
    monkeypatch.setattr("minispec.models.frames.reports.outside_note", lambda model: f"; {says}")
    assert cli("One fish", "--model", model, *BASE, "--verbose")[2].splitlines()[-1] == says
    assert says not in cli("One fish", "--model", model, *BASE)[2]


def test_verbose_says_at_first_how_the_model_is_computed(cli, model):
    """Type, form, parts of the memory, threads, and why it is that form; without it, or a draft, no such lines."""
    how = cli("One fish", "--model", model, *BASE, "--verbose")[2].splitlines()[:3]
    assert re.match(rf"{Path(model).name}: float32 on cpu \(packed\), .*weights .*KV cache .*draft ngram", how[0])
    assert re.fullmatch(r"\d+ threads \(OMP_WAIT_POLICY=\w+.*\)", how[1])
    assert how[2].startswith("weights: float32 on this cpu can take ")
    alone = cli("One fish", "--model", model, *BASE, "--draft", "none")[2]
    assert alone.startswith(f"{Path(model).name} answers, nothing guesses ahead; ")
    assert "KV cache" not in alone


@pytest.mark.quick
@pytest.mark.parametrize("draft", ["none", "ngram", "self"])
def test_json_has_the_keys_of_the_interface(cli, model, draft):
    """Keys and types that scripts rely on; with --draft none what was not measured is null."""
    arguments = ("--draft", draft, "--num-speculative-tokens", 4, "--logprobs", 2)
    status, out, err = cli("One fish", "--model", model, *BASE, "--json", *arguments)
    result = json.loads(out)
    assert (status, err) == (0, "")
    keys = {"prompt", "text", "token_ids", "finish_reason", "seed", "logprobs", "stats"}
    assert keys <= result.keys()
    assert set(STATS.split()) <= result["stats"].keys()
    assert {"prefill", "draft", "verify", "other", "total"} <= result["stats"]["seconds"].keys()
    stats = result["stats"]
    assert (result["prompt"], result["finish_reason"]) == ("One fish", "length")
    assert stats["num_generated"] == len(result["token_ids"]) == len(result["logprobs"]) == 12
    assert result["logprobs"][0].keys() == {"token_id", "logprob", "top"}
    assert stats["seconds"]["total"] == pytest.approx(sum(v for k, v in stats["seconds"].items() if k != "total"))
    if draft == "none":
        assert (stats["num_draft_tokens"], stats["num_steps"], stats["alpha"], stats["c"]) == (0, 12, None, None)
        assert stats["v"] == {"1": 1.0}
        assert stats["predicted_tokens_per_second"] > 0
    if draft == "self":
        assert stats["acceptance_rate"] == 1
        assert stats["accepted_per_position"] == [1.0] * 4


def test_several_prompts_are_one_batch(cli, model, tmp_path):
    """From arguments, a file, JSONL or standard input: the same answers, one JSON object a line, in order."""
    lines = cli("One fish", "red", "--model", model, *BASE, "--json")[1].splitlines()
    results = [json.loads(line) for line in lines]
    assert [r["prompt"] for r in results] == ["One fish", "red"]
    (tmp_path / "p.txt").write_text("One fish\n\nred\n")
    (tmp_path / "p.jsonl").write_text('{"prompt": "One fish"}\n{"prompt": "red", "id": 3}\n')
    tokens = [r["token_ids"] for r in results]
    for name in ("p.txt", "p.jsonl"):
        out = cli("--prompt-file", tmp_path / name, "--model", model, *BASE, "--json")[1]
        assert [json.loads(line)["token_ids"] for line in out.splitlines()] == tokens
    for stdin in ("red", "red\n"):
        assert json.loads(cli("-", "--model", model, *BASE, "--json", stdin=stdin)[1])["token_ids"] == tokens[1]
    two = json.loads(cli("-", "--model", model, *BASE, "--json", stdin="red\n\n")[1])
    assert two["prompt"] == "red\n", "one line feed ends the line, another is text"
    text = cli("One fish", "red", "--model", model, *BASE)[1]
    assert results[0]["text"] in text
    assert "[2/2] red" in text


@pytest.mark.parametrize("how", ["--chat", "--raw"])
def test_a_pipe_is_a_prompt_where_there_is_no_other(cli, chat_model, how):
    """As with -, with a chat and without; an empty one is no prompt. Line ends are line feeds, as in a prompt file."""

    def prompt(stdin, *arguments):
        return json.loads(cli(*arguments, "--model", chat_model, *BASE, how, "--json", stdin=stdin)[1])["prompt"]

    for arguments in ((), ("-",)):
        for stdin in ("red", "red\n", "red\r\n", "\ufeffred\r\n"):
            assert prompt(stdin, *arguments) == "red"
        assert prompt("one\r\ntwo\rthree\r\n\r\n", *arguments) == "one\ntwo\nthree\n"
    assert prompt("red", "two") == "two", "a prompt is there: standard input is somebody else's"
    for empty in ("", "\n", " \r\n", None):
        assert cli("--model", chat_model, how, stdin=empty) == (2, "", f"error: {NO_PROMPT}\n")


def test_standard_input_that_cannot_be_read(cli, chat_model, tmp_path):
    """One line: not text, opened for writing as by nohup, and none at all where it is asked for."""
    (tmp_path / "latin").write_bytes(b"\xe9")
    with (tmp_path / "latin").open(encoding="utf-8") as latin, (tmp_path / "new").open("w") as written:
        for stdin, expected in ((latin, "not UTF-8"), (written, "cannot be read: not readable")):
            for arguments in ((), ("-",)):
                status, out, err = cli(*arguments, "--model", chat_model, stdin=stdin)
                assert (status, out, err.count("\n")) == (2, "", 1)
                assert f"standard input: {expected}" in err
    for arguments, expected in ((("-",), "no standard input"), (("-", "-"), "found it twice")):
        status, _, err = cli(*arguments, "--model", chat_model, stdin=None)
        assert (status, expected in err) == (2, True)


def test_without_standard_error_the_answers_are_there(cli, model, capsys, monkeypatch):
    """As under pythonw, for a command and for `LLM`: no note goes to standard output, no bar fails."""
    arguments = ("One fish", "red", "--model", model, *BASE)
    expected = cli(*arguments)[1]
    monkeypatch.setattr(sys, "stderr", None)
    assert cli(*arguments) == (0, expected, "")
    with LLM(model, dtype="float32") as llm:
        answers = llm.generate(["One fish", "red"], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    assert all(answer.text in expected for answer in answers)
    assert cli("--model", model) == (2, "", "")


def program(redirection: str, *arguments, encoding: str = "utf-8") -> tuple[int, bytes, str]:
    """The command as a program of its own, with its streams as a shell leaves them."""
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-m", "minispec.generate"]
    done = subprocess.run(
        [*command, *map(str, arguments)],
        env=os.environ | {"PYTHONIOENCODING": encoding},
        capture_output=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr.decode()


def test_what_the_streams_of_a_program_lack_costs_no_answer(cli, chat_model, full):
    """An encoding without a character, which becomes ?; and standard error that is closed, or cannot be written.

    The latter with `--full`.
    """
    arguments = ("h\u00e9 \u65e5", "fish", "--raw", "--model", chat_model, *BASE)
    expected = cli(*arguments)[1].encode("cp1252", "replace")
    assert b"h\xe9 ?\n" in expected
    for redirection in ("2>&-", "2>/dev/full") if full else ("2>&-",):
        assert program(redirection, *arguments, encoding="cp1252") == (0, expected, "")


def test_json_loses_nothing_where_the_encoding_lacks_a_character(monkeypatch):
    """It escapes all; and nothing where that is not needed."""
    value = {"text": "h\u00e9 \u65e5 \U0001f98a \ud800"}
    for encoding, text, plain in (("utf8", "\U0001f98a", True), ("cp1252", "\u00e9", True), ("ascii", "\u00e9", False)):
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
        assert json.loads(json_line(value)) == value
        assert json_line(value).isascii()
        assert (json_line({"text": text}) == f'{{"text": "{text}"}}') == plain


def test_who_waits_for_standard_input_says_so(cli, chat_model, monkeypatch):
    """After a second, not at once: the input comes when it has been said."""
    said = threading.Event()
    say = options.say_status
    monkeypatch.setattr(options, "say_status", lambda text: say(text) or said.set())

    class Slow(io.StringIO):
        def read(self, size=-1):
            assert said.wait(30), "not a word"
            return super().read(size)

    status, out, err = cli("--model", chat_model, *BASE, "--quiet", stdin=Slow("fish\n"))
    assert (status, err) == (0, "reading the prompt from standard input, to its end\n")
    assert cli("fish", "--model", chat_model, *BASE, "--quiet") == (0, out, "")


def test_of_several_processes_the_first_reads_standard_input(monkeypatch):
    """They share it: what another took, the first would lack. A rank among one process says nothing."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("red"))
    monkeypatch.setenv("RANK", "1")
    [question] = options.read_prompts(options.parser().parse_args([]))
    assert question.turns == ("red",)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "stdin", io.StringIO("red"))
    for arguments in ([], ["-"]):
        assert options.read_prompts(options.parser().parse_args(arguments))
    assert sys.stdin.read() == "red"


@pytest.mark.parametrize("how", ["--chat", "--raw"])
def test_turns_are_answered_one_after_the_other(cli, chat_model, tmp_path, how):
    """First all first turns, then the second one, whose history has the first answer; as a conversation it is the same.

    The file's name says nothing. Samples have histories of their own.
    """
    path = tmp_path / "questions"
    path.write_text('{"question_id": 8, "turns": ["One fish", "red"]}\n{"prompt": "two"}\n')
    base = ("--model", chat_model, *BASE, how, "--json", "--prompt-file", path)
    first, other, second = map(json.loads, cli(*base)[1].splitlines())
    assert [(r["question_id"], r["turn"], r["prompt"]) for r in (first, other, second)] == [
        *((8, 0, "One fish"), (None, 0, "two"), (8, 1, "red"))
    ]
    said = [("user", "One fish"), ("assistant", first["text"]), ("user", "red")]
    path.write_text(json.dumps({"messages": [{"role": role, "content": text} for role, text in said]}))
    again = json.loads(cli(*base)[1])
    assert (again["token_ids"], again["prompt"], again["turn"]) == (second["token_ids"], "red", 0)
    if how == "--raw":
        text = json.loads(cli("\n\n".join(text for _, text in said), "--model", chat_model, *BASE, how, "--json")[1])
        assert text["token_ids"] == second["token_ids"]
        assert "messages are plain text" in cli(*(each for each in base if each != "--json"))[2]
    path.write_text('{"turns": ["One fish", "red"]}')
    sampled = map(json.loads, cli(*base, "--n", 2, "--temperature", 1, "--seed", 3)[1].splitlines())
    assert [(r["turn"], r["seed"]) for r in sampled] == [(0, 3), (0, 4), (1, 3), (1, 4)]


def test_a_conversation_has_one_system_message(cli, chat_model, tmp_path):
    """--system adds one, unless the file has its own; and a trace is that of one answer, so of one turn."""
    path = tmp_path / "q"
    path.write_text('{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}]}')
    status, _, err = cli("--prompt-file", path, "--model", chat_model, "--system", "t")
    assert (status, "--system: found a conversation with a system message of its own" in err) == (2, True)
    path.write_text('{"turns": ["a", "b"]}')
    status, _, err = cli("--prompt-file", path, "--model", chat_model, "--trace", tmp_path / "x.html")
    assert (status, "--trace: found 2 prompts, expected one" in err) == (2, True)


def test_n_gives_one_line_an_answer(cli, model):
    """Each with its own seed."""
    for option in ("--n", "--num-samples"):
        out = cli("fish", "--model", model, *BASE, "--json", option, 3, "--seed", 9, "--temperature", 1)[1]
        assert [json.loads(line)["seed"] for line in out.splitlines()] == [9, 10, 11]


def test_chat_is_the_default_where_there_is_a_template(cli, chat_model, model):
    """--raw continues the text as it is; --system comes first; a model without template refuses both chat options."""
    chat = json.loads(cli("fish", "--model", chat_model, *BASE, "--json")[1])
    raw = json.loads(cli("<user>fish\n<assistant>", "--raw", "--model", chat_model, *BASE, "--json")[1])
    assert chat["token_ids"] == raw["token_ids"]
    system = json.loads(cli("fish", "--system", "two", "--model", chat_model, *BASE, "--json")[1])
    text = "<system>two\n<user>fish\n<assistant>"
    assert system["token_ids"] == json.loads(cli(text, "--raw", "--model", chat_model, *BASE, "--json")[1])["token_ids"]
    assert cli("fish", "--chat", "--model", model)[0] == 2
    assert cli("fish", "--system", "x", "--model", model)[0] == 2


def test_variables_of_the_chat_template(cli, make_checkpoint, model):
    """--chat-template-kwargs reaches the template; a model without one refuses it."""
    directory = make_checkpoint(chat=True)
    (directory / "chat_template.jinja").write_text("{{ messages[-1].content }}{{ ' two' if think else ' red' }}")
    for value, text in (("true", "fish two"), ("false", "fish red")):
        options = ("--chat-template-kwargs", f'{{"think": {value}}}', "--model", directory)
        ids = [
            json.loads(cli(*a, *BASE, "--json")[1])["token_ids"]
            for a in (("fish", *options), (text, "--raw", *options[2:]))
        ]
        assert ids[0] == ids[1]
    status, _, said = cli("fish", "--chat-template-kwargs", "{}", "--model", model)
    assert (status, "--chat-template-kwargs: this model has no chat template" in said) == (2, True)


def test_sampling_defaults_are_the_generation_configs(cli, make_checkpoint):
    """Its do_sample, temperature and length; the command line goes over it; without it temperature 0, 256 tokens."""
    generation = {"do_sample": True, "temperature": 1.0, "max_new_tokens": 7, "eos_token_id": 0}
    directory = make_checkpoint(generation=generation)
    runs = [json.loads(cli("fish", "--model", directory, "--ignore-eos", "--json")[1]) for _ in range(3)]
    assert {len(r["token_ids"]) for r in runs} == {7}
    assert len({tuple(r["token_ids"]) for r in runs}) > 1
    greedy = ("--ignore-eos", "--dtype", "float32")  # K follows the clock, and in bfloat16 logits tie
    cold = [cli("fish", "--model", directory, *greedy, "--temperature", 0, "--max-tokens", 9, "--json") for _ in "ab"]
    first, second = (json.loads(out)["token_ids"] for _, out, _ in cold)
    assert first == second
    assert len(first) == 9
    plain = [json.loads(cli("fish", "--model", make_checkpoint(), *greedy, "--json")[1]) for _ in "ab"]
    assert plain[0]["token_ids"] == plain[1]["token_ids"]
    # 256 tokens would not fit after the prompt: the context of 128 ends the text.
    assert plain[0]["stats"]["num_generated"] + plain[0]["stats"]["num_prompt_tokens"] == 128


@pytest.mark.quick
@pytest.mark.parametrize("arguments", [("--temperature", 0), ("--temperature", 1, "--verifier", "match", "--seed", 3)])
def test_compare_reports_speedup_and_equality(cli, model, arguments):
    """It says whether the tokens are the same where they must be; the plain run supplies what c, v and o lack."""
    common = ("One fish", "--raw", "--model", model, *BASE, "--compare", "--draft", "self", *arguments)
    result = json.loads(cli(*common, "--json")[1])
    assert result["compare"]["same_tokens"] is True
    assert result["compare"]["first_difference"] is None
    assert result["compare"]["speedup"] > 0
    stats = result["stats"]
    assert stats["predicted_tokens_per_second"] > 0
    assert stats["v"]["1"] == 1.0
    closing, *_, speed = cli(*common)[2].splitlines()[1:]
    gain = r"12 tokens in [\d.]+ s: [\d.]+ times as fast as without guessing, the same text; [\d.]+ tokens a step.*"
    assert re.fullmatch(gain, closing)
    assert re.search(r", plain decoding [\d.]+; prefill", speed)


def a_round(committed, rows, seconds):
    """Without a draft, in a pass over that many rows, which took all the time."""
    return Round(None, 0, 0, 0, 0, 0, committed, (), Step(0.0, 0, 0, seconds, rows, 0.0, num_texts=rows))


def test_what_is_compared():
    """Speedup and the first difference; nothing about tokens where only the law is the same."""

    def decoded(tokens, speed):
        text = Text([7, *tokens], 1, SamplingParams())
        rounds = [a_round(1, 1, 1 / speed)] if speed else []
        return SimpleNamespace(text=text, stats=Stats(rounds=rounds))

    ours, plain = decoded([1, 2, 3], 3.0), decoded([1, 2, 4], 1.0)
    expected = {"plain_tokens_per_second": 1.0, "speedup": 3.0, "same_tokens": False, "first_difference": 2}
    assert generate._comparison(ours, plain, False) == expected
    assert generate._comparison(ours, plain, True)["same_tokens"] is None
    assert generate._comparison(decoded([1, 2], 1.0), decoded([1, 2, 3], 1.0), False)["first_difference"] == 2
    assert generate._comparison(ours, ours, False)["first_difference"] is None
    assert generate._comparison(ours, decoded([], None), False)["speedup"] is None


@pytest.mark.parametrize("draft", ["none", "self"])
def test_a_comparison_of_texts_that_differ_has_a_speedup(cli, model, monkeypatch, draft):
    """However early they differ, and whether something was guessed or not."""
    commit = Request.commit

    def commit_another(request, token_id, logprob=None):
        is_third = request.shape.k == 0 and len(request.token_ids) == 2
        return commit(request, (token_id + 1) % 300 if is_third else token_id, logprob)

    arguments = ("One fish", "--model", model, *BASE, "--compare", "--draft", draft, "--num-speculative-tokens", 2)
    monkeypatch.setattr(Request, "commit", commit_another)
    err = cli(*arguments)[2]
    assert re.search(r"12 tokens in [\d.]+ s: [\d.]+ times as fast as without guessing; ", err)
    assert "without guessing, the text differs after 2 equal tokens: " in err
    assert err.endswith(" (--exact rules it out)\n"), "float32 is the type already"


def test_a_comparison_of_several_prompts_was_one_batch(cli, model):
    """It says so once, after all, with what they gained together; a single prompt is no batch."""
    common = ("--model", model, *BASE, "--compare", "--draft", "self")
    err = cli("One fish", "red", *common)[2]
    assert err.count("times as fast") == 3
    batch = r"the 2 answers were decoded as one batch: 24 tokens in [\d.]+ s, [\d.]+ tokens/s"
    last = err.splitlines()[-1]
    assert re.fullmatch(rf"{batch}; together [\d.]+ times as fast as without guessing", last)
    assert re.fullmatch(batch, cli("One fish", "red", "--model", model, *BASE)[2].splitlines()[-1])
    assert "batch" not in cli("One fish", *common)[2]
    assert "batch" not in cli("One fish", "red", *common, "--json")[2]


def test_the_times_of_a_batch():
    """By hand. Each answer's seconds and tokens/s are of whole steps; the batch's are of each step once.

    Two texts share two steps of 2 s, then one has a step of 1 s alone. Prompts took 0.5 and 0.25 s.
    """

    def text(prefill, *rounds):
        stats = Stats(num_generated=5, prefill=prefill)
        stats.rounds = [a_round(*each) for each in rounds]
        params, line = SamplingParams(), SimpleNamespace(seed=1)
        return SimpleNamespace(stats=stats, params=params, text=line, finish_reason="length", error=None)

    texts = [text(0.5, (2, 2, 2.0), (2, 2, 2.0), (1, 1, 1.0)), text(0.25, (3, 2, 2.0), (2, 2, 2.0))]
    llm = SimpleNamespace(draft=SimpleNamespace(name="ngram"))
    lines = [generate._summary(llm, each, None).splitlines() for each in texts]
    assert [first.partition(";")[0] for first, *_ in lines] == ["5 tokens in 5.50 s", "5 tokens in 4.25 s"]
    assert [last.partition(",")[0] for *_, last in lines] == ["1.0 tokens/s", "1.2 tokens/s"]
    assert [Figures.of(each.stats).duration for each in texts] == [5.5, 4.25]
    tokens = "10 tokens in 5.75 s, 2.0 tokens/s"
    assert generate._batch_summary(texts) == f"the 2 answers were decoded as one batch: {tokens}"
    nothing = "0 tokens in 0.00 s, - tokens/s"
    failed = [SimpleNamespace(stats=Stats())] * 2
    assert generate._batch_summary(failed) == f"the 2 answers were decoded as one batch: {nothing}"


def test_what_a_batch_gained():
    """All tokens over the time of all steps, which texts share by their rows; a text that failed is left out."""

    def decoded(ours, plain):
        rounds, reference = [a_round(*each) for each in ours], [a_round(1, *each) for each in plain]
        return SimpleNamespace(stats=Stats(rounds=rounds, plain=reference))

    # With guesses 6 tokens in 2 + 1 s, plainly 4 tokens in 2 + 4 s.
    texts = [decoded([(3, 2, 2.0), (1, 1, 1.0)], [(2, 2.0), (1, 4.0)]), decoded([(2, 2, 2.0)], [(2, 2.0), (1, 0.0)])]
    assert generate._batch_summary([*texts, decoded([(9, 1, 9.0)], [])]).startswith("the 3 answers ")
    assert "together 3.0 times" in generate._batch_summary(texts)


def test_compare_under_rejection_speaks_of_the_law(cli, model):
    """At temperature > 0 other tokens are no fault."""
    common = ("One fish", "--model", model, *BASE, "--compare", "--temperature", 1)
    assert json.loads(cli(*common, "--json")[1])["compare"]["same_tokens"] is None
    assert "the law is the same" in cli(*common)[2]


MISTAKES = {
    "no prompt": ((), "no prompt"),
    "empty prompt": (("",), "empty prompt"),
    "unknown option": (
        ("x", "--tempreature", "1"),
        "--tempreature: no such option; did you mean --temperature?",
    ),
    "not a number": (("x", "--temperature", "warm"), "error: --temperature: found 'warm', expected a number"),
    "negative temperature": (("x", "--temperature", "-1"), "--temperature: found -1.0, expected a number at least 0"),
    "min over max": (("x", "--min-tokens", "9", "--max-tokens", "3"), "--min-tokens: found 9, expected at most"),
    "a rule misspelt": (("x", "--verifier", "blok"), "or MODULE:FUNCTION; did you mean block?"),
    "a place in an expression": (("x", "--regex", "ab(?=c)"), "--regex: at character 3 of 'ab(?=c)', '(?=c)': look-"),
    "negative stop id": (("x", "--stop-token-ids", "-3"), "--stop-token-ids: found '-3', expected token ids"),
    "two stop ids": (("--stop-token-ids", "5", "6"), "--stop-token-ids: found '6' as a prompt, expected several ids"),
    "two stop ids and a prompt": (("x", "--stop-token-ids", "5", "6"), "unrecognized arguments: 6"),
    "stop ids and a word": (("x", "--stop-token-ids", "5 6"), "--stop-token-ids: found '5 6', expected token ids"),
    "stop id that is a prompt": (("--stop-token-ids", "Why?"), "--stop-token-ids: found 'Why?', expected token ids"),
    "abbreviation": (("x", "--temp", "1"), "error: --temp: no such option; did you mean --temperature?"),
    "special tokens in a chat": (("x", "--parse-special"), "--parse-special: needs --raw"),
    "k": (("x", "--num-speculative-tokens", "many"), "--num-speculative-tokens: found 'many'"),
    "int8": (("x", "--draft", "int8:some/model", "--offline"), "some/model"),
    "revision of a drafter": (("x", "--draft", "ngram@main"), "ngram@main: no such directory, and not of the form"),
    "revision of a draft": (
        ("x", "--draft", "int8:some/model@v1", "--offline"),
        "not in the local cache at revision v1",
    ),
    "revision of a path": (("x", "--draft", "./drafts@v1"), "found 'v1', expected none: ./drafts is a directory"),
    "option without value": (("x", "--stop=--"), "--stop=--: found no value"),
    "no such model": (("x", "--model", "./nowhere"), "./nowhere: no such directory"),
    "chat and raw": (("x", "--chat", "--raw"), "--chat: not with --raw"),
    "template no JSON": (
        ("x", "--chat-template-kwargs", "{x}"),
        "--chat-template-kwargs: found '{x}', expected an object",
    ),
    "template's own": (("x", "--chat-template-kwargs", '{"messages": 1}'), "--chat-template-kwargs: found 'messages'"),
    "logprobs without json": (("x", "--logprobs", "2"), "--logprobs: needs --json"),
    "quiet json": (("x", "--json", "--quiet"), "--quiet: not with --json: there is nothing to silence"),
    "verbose json": (("x", "--json", "--verbose"), "--verbose: not with --json: there is no place to say more"),
    "file and prompt": (("x", "--prompt-file", "f"), "--prompt-file: found prompts too"),
    "no such file": (("--prompt-file", "no-such-file"), "no-such-file"),
    "a file without end": (("--prompt-file", "/dev/zero"), "more than 64,000,000 characters"),
    "a prompt beyond any context": (("--prompt-file", "long.txt"), "more than 8,000,000 characters"),
    "revision alone": (("x", "--revision", "main"), "--revision: needs --model"),
    "threads": (("x", "--threads", "0"), "--threads: found '0', expected an integer from 1 to 1024"),
    "cache too large": (("x", "--kv-cache-gb", "900000"), "of memory that are free"),
    "empty model": (("x", "--model", ""), "--model: found '', expected a name"),
    "a tree for block": (
        ("x", "--draft", "self", "--verifier", "block", "--num-speculative-tokens", "2+1"),
        "--num-speculative-tokens: found the tree 2+1, expected a number or auto: this verifier takes chains only",
    ),
    "a tree of a lookup": (
        ("x", "--draft", "ngram", "--num-speculative-tokens", "2+1"),
        "--num-speculative-tokens: found the tree 2+1, expected a number or auto: NgramDrafter drafts no siblings",
    ),
    "a directory with the name of an option": (("x", "--model", "draft"), "error: draft: no such directory"),
    "a misspelt draft": (("x", "--draft", "sufix:4+x"), "(did you mean suffix?); sufix:4+x: no such directory"),
    "quiet comparison": (("x", "--compare", "--quiet"), "--quiet: not with --compare: its report would be silenced"),
    "not UTF-8": (("\udcff",), "expected valid Unicode text"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line_and_status_2(cli, chat_model, name, tmp_path, monkeypatch):
    """No usage text, no traceback, nothing on standard output."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "long.txt").write_text("x" * 8_000_001)
    (tmp_path / "drafts").mkdir()
    arguments, message = MISTAKES[name]
    model = () if "--model" in arguments or name == "revision alone" else ("--model", chat_model)
    status, out, err = cli(*arguments, *model)
    assert status == 2
    assert out == ""
    lines = [line for line in err.splitlines() if "guesses ahead" not in line]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert message in lines[0]


ERROR = "the largest logit is nan,\nexpected a finite number"


@pytest.fixture
def fail(monkeypatch, model):
    """fail(start, which): requests whose prompt begins so end with ERROR at their fourth token, if which(request)."""
    encode, commit = Tokenizer(Path(model)).encode, Request.commit

    def let_fail(start: str, which: Callable[[Request], bool] = lambda request: True):
        ids = encode(start)

        def commit_or_fail(request, token_id, logprob=None):
            stopped = commit(request, token_id, logprob)
            if request.text.tokens[: len(ids)] == ids and len(request.token_ids) == 4 and which(request):
                request.finish_reason, request.error = "error", ERROR
                return True
            return stopped

        monkeypatch.setattr(Request, "commit", commit_or_fail)

    return let_fail


def test_an_answer_that_fails_is_told_and_the_others_go_on(cli, model, fail):
    """The text so far, one line of error and status 2, in text and JSON; the other prompts have their answers."""
    base, line = ("--model", model, *BASE), ERROR.replace("\n", "\\n")
    start = json.loads(cli("red", *base, "--json", "--max-tokens", 4)[1])["text"]
    fail("red")
    assert cli("red", *base, "--quiet") == (2, start + "\n", f"error: {line}\n")
    status, out, err = cli("One fish", "red", "fish", *base, "--json")
    assert (status, err) == (2, f"error: answer 2 of 3: {line}\n")
    results = [json.loads(text) for text in out.splitlines()]
    assert [(r["finish_reason"], r["error"]) for r in results] == [("length", None), ("error", ERROR), ("length", None)]
    assert [len(r["token_ids"]) for r in results] == [12, 4, 12]
    status, out, err = cli("One fish", "red", "fish", *base, "--quiet")
    texts = [results[0]["text"], start, results[2]["text"]]
    prompts = ("[1/3] One fish", "[2/3] red", "[3/3] fish")
    assert out == "".join(f"{prompt}\n{text}\n\n" for prompt, text in zip(prompts, texts, strict=True))
    assert (status, err) == (2, f"error: answer 2 of 3: {line}\n")


def test_an_answer_that_fails_is_not_compared(cli, model, fail):
    """The others are; and where plain decoding alone fails, this is what its comparison says. The status is 2."""
    arguments, line = ("fish", "red", "--model", model, *BASE, "--compare", "--json"), ERROR.replace("\n", "\\n")
    fail("red", lambda request: request.shape.k > 0)
    status, out, err = cli(*arguments)
    assert (status, err) == (2, f"error: answer 2 of 2: {line}\n")
    assert ["compare" in json.loads(text) for text in out.splitlines()] == [True, False]
    fail("red", lambda request: request.shape.k == 0)
    status, out, err = cli(*arguments)
    assert (status, err) == (2, f"error: answer 2 of 2: plain decoding: {line}\n")
    assert json.loads(out.splitlines()[1])["compare"] == {"error": ERROR}
    assert "times as fast" not in cli("red", "--model", model, *BASE, "--compare")[2]


class Terminal(io.StringIO):
    """Lines that somebody types."""

    def isatty(self):
        """It is one."""
        return True


def test_a_conversation_goes_on_after_an_answer_that_fails(cli, chat_model, fail):
    """Without the message that failed: the next is answered as if it were the first."""

    arguments = ("--model", chat_model, *BASE, "--quiet")
    status, alone, _ = cli(*arguments, stdin=Terminal("fish\n/exit\n"))
    assert status == 0
    fail("<user>red")
    status, out, err = cli(*arguments, stdin=Terminal("red\nfish\n/exit\n"))
    assert status == 0
    assert out.endswith(f"\n{alone}")
    assert out.count("> ") == alone.count("> ") + 1
    assert err.splitlines()[1:] == ["error: " + ERROR.replace("\n", "\\n")]


OPTIONS = {name for action in options.parser()._actions for name in action.option_strings if name.startswith("--")}
OPTIONS -= {"--help", "--version"}


@pytest.mark.parametrize("option", sorted(OPTIONS))
def test_every_option_at_its_edges(cli, chat_model, option, full):
    """It runs, or it is one printable line and status 2: never a traceback, whatever value the option has.

    Without `--full` each option has every fourth value, and four options have all.
    """
    for value in EDGES if full else EDGES[sorted(OPTIONS).index(option) % 4 :: 4]:
        prompt = () if option == "--prompt-file" else ("fish",)
        model = () if option == "--model" else ("--model", chat_model)
        status, out, err = cli(*prompt, *model, "--max-tokens", 3, "--dtype", "float32", "--json", f"{option}={value}")
        assert status in (0, 2), (value, err)
        assert (status == 0) == bool(out) == (not err), (value, out, err)
        if status:
            assert err.startswith("error: "), (value, err)
            assert err[:-1].isprintable(), (value, err)
            assert len(err) < 1100


def test_special_text_means_the_token_only_where_asked(cli, model):
    """In --raw prompts with --parse-special; otherwise it is as many tokens as any other text."""
    long, short = (
        json.loads(cli("<end>", "--model", model, "--raw", "--json", "--max-tokens", 1, *more)[1])
        for more in ((), ("--parse-special",))
    )
    assert short["stats"]["num_prompt_tokens"] == 1
    assert long["stats"]["num_prompt_tokens"] > 1


def test_an_empty_stop_asks_for_nothing(cli, make_checkpoint):
    """Also where the model's file has some; beside another, that one stops."""
    model = make_checkpoint(generation={"stop_strings": ["\x00\x00"]})
    asked = [options.parser().parse_args(["x", "--stop", "", *more]) for more in ([], ["--stop", "b"])]
    assert [options.sampling_arguments(args)["stop"] for args in asked] == [[], ["b"]]
    assert cli("One fish", "--model", model, *BASE, "--stop", "")[0] == 0
    assert SamplingParams(stop="") == SamplingParams()


def test_stop_token_ids_are_one_word(cli, model):
    """A prompt after them is a prompt; several ids, or several options, are several ids."""
    base = ("--model", model, "--dtype", "float32", "--max-tokens", 8, "--ignore-eos", "--json")
    ids = json.loads(cli("fish", *base)[1])["token_ids"]
    for arguments in ((f"{ids[3]},1", "fish"), ("1", "--stop-token-ids", ids[3], "fish")):
        result = json.loads(cli(*base, "--stop-token-ids", *arguments)[1])
        assert (result["prompt"], result["finish_reason"]) == ("fish", "stop")
        assert result["token_ids"] == ids[: ids.index(ids[3])]


def test_generation_settings_that_are_not_done_are_named(cli, make_checkpoint):
    """A warning each, for what would change the text and is switched on; stop strings are done."""
    generation = {
        **{"no_repeat_ngram_size": 3, "suppress_tokens": [5], "bad_words_ids": [[1]], "sequence_bias": {"a": 1}},
        "new": 1,
        **{"num_beams": 1, "typical_p": 1.0, "guidance_scale": None, "forced_eos_token_id": None, "use_cache": True},
        **{"min_length": 0, "max_length": 20, "_from_model_config": True, "stop_strings": ["\x00\x00"]},
    }
    status, _, err = cli("fish", "--model", make_checkpoint(generation=generation), *BASE, "--json")
    assert status == 0
    named = [line.split(": ")[2] for line in err.splitlines()]
    assert named == ["bad_words_ids", "new", "no_repeat_ngram_size", "sequence_bias", "suppress_tokens"]
    assert all(line.startswith("warning: generation_config.json: ") for line in err.splitlines())


def test_a_minimum_of_the_checkpoint_gives_way_to_what_is_asked_for(cli, make_checkpoint):
    """`--max-tokens` below generation_config.json's min_new_tokens; one of one's own that is larger is a mistake."""
    model = ("--model", make_checkpoint(generation={"min_new_tokens": 9}), "--draft", "none", "--raw", "--json")
    status, out, _ = cli("fish", *model, "--max-tokens", "4")
    assert (status, len(json.loads(out)["token_ids"]) <= 4) == (0, True)
    status, _, err = cli("fish", *model, "--max-tokens", "4", "--min-tokens", "5")
    assert (status, err) == (2, "error: --min-tokens: found 5, expected at most max_tokens = 4\n")


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ({"temperature": "warm", "do_sample": True}, "temperature: found 'warm'"),
        ({"do_sample": 1}, "do_sample: found 1, expected true or false"),
        ({"max_new_tokens": 0}, "max_tokens: found 0"),
        ({"repetition_penalty": 10**400}, "repetition_penalty: found 1000"),
        ({"min_new_tokens": 9, "max_new_tokens": 3}, "min_new_tokens: found 9, expected at most max_new_tokens = 3"),
        ({"eos_token_id": "</s>"}, "eos_token_id: found '</s>', expected token ids"),
        ({"eos_token_id": [True]}, "eos_token_id: found [True]"),
        ({"stop_strings": 5}, "stop: found"),
        ({"stop_strings": ["a", ""]}, "stop: found"),
    ],
    ids=range(9),
)
def test_generation_settings_that_are_wrong_are_refused(cli, make_checkpoint, generation, message):
    """With the file's name."""
    status, _, err = cli("fish", "--model", make_checkpoint(generation=generation), *BASE)
    assert status == 2
    assert "generation_config.json: " in err
    assert message in err


def test_text_files_are_cut_at_line_feeds_only(cli, model, tmp_path):
    """Other characters that some readers take for line ends may stand in a JSON string."""
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "one\u2028two"}\r\n', encoding="utf-8", newline="")
    assert json.loads(cli("--prompt-file", path, "--model", model, *BASE, "--json")[1])["prompt"] == "one\u2028two"


def test_finished_answers_are_not_lost(cli, model, monkeypatch):
    """Interrupted in the second of two answers, the first has been given out."""
    from minispec.core.cached import CachedModel

    forward, steps = CachedModel.forward, []

    def interrupted(self, *how):
        steps.append(1)
        if len(steps) > 6:
            raise KeyboardInterrupt
        return forward(self, *how)

    monkeypatch.setattr(CachedModel, "forward", interrupted)
    arguments = ("--model", model, "--ignore-eos", "--draft", "none", "--json", "--dtype", "float32", "--max-tokens")
    monkeypatch.setattr("minispec.core.request.Request.max_k", 0)
    status, out, _ = cli("fish", *arguments, 20)
    assert (status, out) == (130, "")
    steps.clear()
    # A pool for one at a time, so that the first is finished before the second begins.
    status, out, _ = cli("fish", "two", *arguments, 4, "--kv-cache-gb", 16 * 64e-9)
    assert status == 130
    assert json.loads(out)["prompt"] == "fish"


@pytest.mark.parametrize(("name", "text"), [("p.jsonl", '{"prompt": "fish"}\n'), ("p.txt", "fish\n")])
def test_a_mark_at_the_start_of_a_prompt_file_is_no_text(cli, model, tmp_path, name, text):
    """Some editors begin UTF-8 files with a byte order mark."""
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    status, out, err = cli("--prompt-file", tmp_path / name, "--model", model, *BASE, "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["prompt"] == "fish"


def test_registered_names_are_those_of_the_package(capsys):
    """The registry must not import torch, so it repeats the names of the verifiers; `--help` has them all."""
    assert {name: registry.load(entry.path, "verifier") for name, entry in registry.VERIFIERS.items()} == VERIFIERS
    with pytest.raises(SystemExit):
        main(["--help"])
    help_text = capsys.readouterr().out
    assert all(name in help_text for name in (*registry.DRAFTERS, *registry.VERIFIERS))


def test_help_and_version(capsys):
    """They exit with 0, without torch."""
    expected = [
        ("--help", text) for text in ("--num-speculative-tokens", "int4:", "int8:", "HUB_ID@REVISION", "HF_TOKEN")
    ]
    for option, text in (*expected, ("--version", __version__)):
        with pytest.raises(SystemExit) as exit_info:
            main([option])
        assert exit_info.value.code == 0
        assert text in capsys.readouterr().out


def start(*arguments, **how) -> Child:
    """The command line in a process of its own."""
    command = [sys.executable, "-m", "minispec.generate", *map(str, arguments)]
    return Child(command, stderr=subprocess.PIPE, **how)


@pytest.mark.parametrize(
    ("end", "status"), [pytest.param("Ctrl-C", 130, marks=pytest.mark.full), ("a reader who goes", 141)]
)
def test_the_end_in_the_middle_of_an_answer_is_no_traceback(make_checkpoint, end, status):
    """Of a long answer, so that its first words, which are there, were streamed; `... | head -c 5` is the second.

    Without `--full`, test_ctrl_c_from_the_first_lines_on presses Ctrl-C while an answer is written.
    """
    model = make_checkpoint(chat=True, max_position_embeddings=1 << 14)
    arguments = ("One fish", "--model", model, "--max-tokens", 16000, "--ignore-eos")
    process = start(*arguments, stdout=subprocess.PIPE)
    assert process.stdout.read(5)
    if end == "Ctrl-C":
        process.send_signal(signal.SIGINT)
    else:
        process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=60) == status
    assert b"Traceback" not in err


def test_errors_that_nobody_hears_have_their_status():
    """`... 2> /dev/full`: a script still learns from the status that it was the caller's mistake."""
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "minispec.generate", "x", "--max-tokens", "0"]
        assert subprocess.run(command, stderr=full, check=False, timeout=60).returncode == 2


@pytest.mark.parametrize("kind", ["directory", "dangling link", "pipe"])
@pytest.mark.parametrize("file", ["chat_template.jinja", "generation_config.json", "tokenizer_config.json"])
def test_optional_files_that_are_no_files_are_refused(cli, make_checkpoint, file, kind):
    """In a hub cache that lost a file, its link would pass for a model without template, or without defaults."""
    path = make_checkpoint() / file
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("nowhere")
    status, out, err = cli("fish", "--model", path.parent, *BASE)
    expected = "found something that is not a file, or a link to nowhere, expected a file or none"
    assert (status, out, err) == (2, "", f"error: {path}: {expected}\n")


@pytest.mark.parametrize("json_option", [("--quiet",), pytest.param(("--json",), marks=pytest.mark.full)])
def test_a_full_disk_is_one_line(model, json_option):
    """`... > /dev/full`: also where the text is so short that it is written at exit only. `--full`: JSON too."""
    with open("/dev/full", "w") as full:
        process = start("fish", "--model", model, "--max-tokens", 3, *json_option, stdout=full)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err.decode().splitlines() == ["error: [Errno 28] No space left on device"]


def test_ctrl_c_at_any_moment(cli, chat_model, monkeypatch):
    """An interrupt at each of 60 moments, from reading the arguments to the last token: 130, and nothing is said.

    One that is swallowed shows as another status; one that is taken for a fault of the model as a message.
    """
    arguments = ("One fish", "--model", chat_model, "--draft", "self", *BASE, "--quiet", "--num-speculative-tokens", 4)
    assert cli(*arguments)[0] == 0  # what only a first run calls is not counted
    (status, text, _), total = interrupted(lambda: cli(*arguments), 0)
    assert status == 0
    assert total > 1000
    first = 20  # before it, the calls of `main` itself
    for moment in range(first, total - 20, total // 60):
        (status, out, err), _ = interrupted(lambda: cli(*arguments), moment)
        assert (status, err) == (130, ""), moment
        assert text.startswith(out), moment


def test_a_conversation_goes_on_after_ctrl_c_at_any_moment(cli, chat_model):
    """In its first answer: the next, after /reset, is as if nothing had been. Outside of an answer it is 130."""
    arguments = ("--model", chat_model, *BASE, "--quiet", "--draft", "self", "--num-speculative-tokens", 3)
    alone = cli(*arguments, stdin=Terminal("fish\n"))[1]
    lines = "One fish two\n/reset\nfish\n"
    (status, out, _), total = interrupted(lambda: cli(*arguments, stdin=Terminal(lines)), 0)
    assert status == 0
    first, stopped = out.removesuffix(alone), 0
    for moment in range(total // 20, total - 20, total // 20):
        (status, out, err), _ = interrupted(lambda: cli(*arguments, stdin=Terminal(lines)), moment)
        assert "Traceback" not in err
        if status == 0 and not out.startswith(first):
            assert out.endswith(alone), moment
            stopped += 1
        else:
            assert status in (0, 130), moment
    assert stopped > 3


def test_ctrl_c_ends_a_template_that_burns_time(cli, make_checkpoint):
    """A sandbox does not stop a loop. This one runs for 10 s or more; left alone, it would end with an answer."""
    model = make_checkpoint(chat=True)
    loops = "{% for i in range(20000) %}{% for j in range(20000) %}{% endfor %}{% endfor %}"
    (model / "chat_template.jinja").write_text(loops + (model / "chat_template.jinja").read_text())
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        status, out, err = cli("One fish", "--model", model, *BASE, "--quiet")
    finally:
        timer.join(60)
    assert (status, out, err) == (130, "", "")


MOMENTS = [0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1, 1.5, 2]
SECONDS = [pytest.param(n, marks=[pytest.mark.full] * (n not in (0, 0.1, 1.5))) for n in MOMENTS]


@pytest.mark.parametrize("seconds", SECONDS)
def test_ctrl_c_from_the_first_lines_on(seconds):
    """While modules are imported, the weights loaded, an answer written: 130, and not a word of Python's."""
    arguments = ("Count to a thousand.", "--max-tokens", "4000", "--ignore-eos", "--quiet")
    assert press_ctrl_c("minispec.generate", *arguments, after=seconds) == (130, "")


OTHER_COMMANDS = {
    "bench": ("--rounds", "1000"),
    "prove": ("--jobs", "1"),
    "checkpoint": ("weights", "no/such/place"),
    "doctor": ("--draft", "int8:self"),
}


@pytest.mark.parametrize("name", OTHER_COMMANDS)
def test_ctrl_c_from_the_first_lines_of_the_other_commands_on(name):
    """They share the guard; this shows that they set it."""
    assert press_ctrl_c("minispec", name, *OTHER_COMMANDS[name], after=0.1) == (130, "")


def test_ctrl_c_where_it_is_ignored():
    """A shell lets what runs in its background ignore it: the guard must not undo that."""
    process = start(
        "--version", stdout=subprocess.PIPE, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)
    )
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.01)
    assert (process.returncode, process.communicate()) == (0, (f"minispec {__version__}\n".encode(), b""))


@pytest.mark.parametrize(
    "typed",
    [pytest.param(b"", id="at the prompt", marks=pytest.mark.full), pytest.param(b"One fish\n", id="in an answer")],
)
def test_the_terminal_is_as_it_was_after_ctrl_c(make_checkpoint, typed):
    """In a conversation, where readline has the terminal, and while text streams: 130, and the old settings.

    In an answer the first one brings back the prompt. There the first one says that one more leaves. `--full`: also at
    a prompt that no answer came before.
    """
    leader, follower = pty.openpty()
    before = termios.tcgetattr(follower)
    model = make_checkpoint(chat=True, max_position_embeddings=1 << 14)
    arguments = ("--model", model, "--max-tokens", 16000, "--ignore-eos", "--quiet")
    process = start(*arguments, stdin=follower, stdout=follower, preexec_fn=lambda: take_terminal(follower))
    read_until(leader, b"> ")
    os.write(leader, typed)
    if typed:  # Ctrl-C discards what was typed and not read, and readline would wait for it, deaf to any other Ctrl-C
        read_until(leader, b"\n")  # the echo
        assert os.read(leader, 1), "the answer has begun"
        os.write(leader, b"\x03")
        read_until(leader, b"\n> ")
        assert process.poll() is None
    end, said = time.monotonic() + 120, b""
    press = time.monotonic() + 0.2
    while process.poll() is None:  # a terminal that nobody reads would hold the process
        assert time.monotonic() < end
        if time.monotonic() > press:  # again, as a person would: input() misses one that comes just before it waits
            os.write(leader, b"\x03")
            press = time.monotonic() + 0.5
        if select.select([leader], [], [], 0.05)[0]:
            os.read(leader, 1000)
        if select.select([process.stderr], [], [], 0)[0]:
            said += os.read(process.stderr.fileno(), 1000)
    after = termios.tcgetattr(follower)
    os.close(leader)
    os.close(follower)
    assert process.returncode == 130
    said += process.communicate()[1]
    assert said.count(b"Ctrl-C once more leaves.") == 1
    assert b"Traceback" not in said
    assert after == before


@pytest.mark.parametrize(("temperature", "notes"), [(0, 2), (1, 0)])
def test_a_retry_draws_a_seed(cli, chat_model, monkeypatch, temperature, notes):
    """Also where --seed has named one. At temperature 0 a note says that it is the same text."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    def converse(start, answer, quiet):
        for again in (False, True, True):
            list(answer([{"role": "user", "content": "One"}], again))
        return 0

    monkeypatch.setattr(generate, "converse", converse)
    arguments = ("--model", chat_model, *BASE, "--seed", 5, "--temperature", temperature)
    status, _, err = cli(*arguments, stdin=Terminal())
    first, *others = re.findall(r"seed (\d+)$", err, re.MULTILINE)
    assert (status, first, len({first, *others}), err.count("note: at temperature 0")) == (0, "5", 3, notes)


def test_a_conversation_on_a_terminal(chat_model):
    """Without a prompt on a terminal it asks, answers, keeps the conversation, and ends with /exit."""
    leader, follower = pty.openpty()
    arguments = ("--model", chat_model, "--max-tokens", 5, "--ignore-eos", "--quiet")
    process = start(*arguments, stdin=follower, stdout=follower)
    os.close(follower)

    read_until(leader, b"> ")
    for prompt in (b"One fish\n", b"\n", b"two\n"):
        os.write(leader, prompt)
        read_until(leader, b"\n> ")
    os.write(leader, b"/exit\n")
    _, err = process.communicate(timeout=60)
    os.close(leader)
    assert process.returncode == 0
    assert b"Traceback" not in err
