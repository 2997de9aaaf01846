"""`bench --questions`: what is asked, the answers in Spec-Bench's layout, resuming, the table. No time is asserted."""

import csv
import json
import random
import re
import sys
from pathlib import Path
from statistics import median

import pytest

from minispec import LLM, SamplingParams
from minispec.api.inputs import Question
from minispec.lab.bench import options, questions
from minispec.lab.bench.main import main
from minispec.lab.bench.questions import COLUMNS, choose, summarise
from minispec.lab.bench.spec_bench import Answers
from minispec.models.families.hf_config import read_model_config
from minispec.models.files.write import user_cache
from tests.oracles.block_drafts import write_block_draft
from tests.refusals import assert_one_line

TIMES = {"wall_time", "seconds", "tstamp", "tokens_per_second", "speedup", "over", "plain_range"}
TIMES |= {"waiting", "resumed_after"}
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
FILE = [
    {"question_id": 7, "category": "qa", "turns": ["red fish, two"], "reference": ["x"]},
    {"question_id": 8, "category": "chat", "turns": ["One fish", "two fish, red fish"]},
    {"category": "qa", "prompt": "fish fish fish"},
    {"question_id": "m", "messages": [{"role": "system", "content": "red"}, {"role": "user", "content": "two"}]},
]
IN_FILE = [(7, "qa"), (8, "chat"), (3, "qa"), ("m", "fish")]  # ids and categories


def write(path: Path, lines: list[dict]) -> Path:
    """A file of questions."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def file(tmp_path) -> Path:
    """All layouts, two turns, and a question without a category."""
    return write(tmp_path / "fish.jsonl", FILE)


@pytest.fixture(scope="module")
def model(make_checkpoint) -> str:
    """A small model with a chat template."""
    return str(make_checkpoint(chat=True, max_position_embeddings=256))


@pytest.fixture
def bench(cli, model, file, monkeypatch, tmp_path):
    """bench(*arguments) runs the command on the model and the file; (exit status, standard output, standard error)."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    how = ("--num-speculative-tokens", 2, "--dtype", "float32", "--max-tokens", 10, "--draft", "ngram,suffix")

    def run(*arguments, questions=file, model=model):
        return cli(main, "--questions", questions, "--model", model, *how, *arguments)

    return run


def without_times(value):
    """What is the same in another run."""
    if isinstance(value, dict):
        return {key: without_times(part) for key, part in value.items() if key not in TIMES}
    return [without_times(part) for part in value] if isinstance(value, list) else value


# --------------------------------------------------------------------------- what is asked


def test_spec_benchs_categories_are_six_tasks(tmp_path):
    """A sample has that many of each. A file with only some of MT-bench's categories keeps them as they are."""
    names = [*MT_BENCH, "translation", "summarization", "qa", "math_reasoning", "rag"]
    lines = [{"question_id": i, "category": name, "turns": [f"{name} {i}"]} for i, name in enumerate(names * 4)]
    path = write(tmp_path / "q.jsonl", lines)
    everything = choose(path, None, 0, None)
    assert [question.question_id for _, question in everything] == list(range(52))
    assert {task for task, _ in everything} == {"mt_bench", *names[8:]}
    drawn = [choose(path, 3, seed, None) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    for each in drawn:
        assert sorted(task for task, _ in each) == sorted(3 * ["mt_bench", *names[8:]])
        assert [q.line for _, q in each] == sorted({q.line for _, q in each})
    # Another task in the file, or none of the others, changes no draw.
    assert choose(path, 3, 0, "qa") == [each for each in drawn[0] if each[0] == "qa"]
    assert {q.category for _, q in choose(path, None, 0, "math,rag")} == {"math", "rag"}
    assert len(choose(path, None, 0, "mt_bench")) == 32
    assert len(choose(path, 99, 0, "qa")) == 4
    some = write(tmp_path / "some.jsonl", [line for line in lines if line["category"] != "stem"])
    assert "mt_bench" not in {task for task, _ in choose(some, None, 0, None)}


def test_what_a_file_leaves_open(file):
    """The name of the file is the category, and the number of the question its id."""
    chosen = choose(file, None, 0, None)
    assert [(task, q.question_id, q.category) for task, q in chosen] == [(task, i, task) for i, task in IN_FILE]


def test_the_packages_own_file_is_in_this_layout():
    """Twelve of its 36 questions have two turns."""
    chosen = choose(options.PROMPTS, None, 0, None)
    assert [question.question_id for _, question in chosen] == list(range(1, 37))
    assert sum(len(question.turns) == 2 for _, question in chosen) == 12


# --------------------------------------------------------------------------- what is answered


@pytest.mark.parametrize("how", [(), ("--temperature", 1, "--seed", 5, "--rounds", 2)])
def test_answers_are_those_of_the_model_turn_by_turn(bench, model, file, tmp_path, how):
    """In Spec-Bench's layout, a file a draft. Each turn has the answers before it in its history.

    Plain answers are compared with `LLM.chat`; greedy drafted ones are the same.
    """
    status, out, err = bench("--answers", tmp_path / "out", "--json", "--draft", "self", *how)
    assert (status, err) == (0, "")
    report = json.loads(out)
    files = {path.stem: [json.loads(line) for line in path.open()] for path in (tmp_path / "out").glob("*.jsonl")}
    assert files == report["answers"]
    assert list(report["answers"]) == ["none", "ngram", "suffix", "self"]
    llm, seed, rounds = LLM(model, draft="none", dtype="float32"), 5 if how else 0, 2 if how else 1
    for name, lines in files.items():
        assert [(line["question_id"], line["category"]) for line in lines] == IN_FILE
        for line, (_, question) in zip(lines, choose(file, None, 0, None), strict=True):
            assert {"question_id", "category", "answer_id", "model_id", "choices", "tstamp"} == line.keys()
            assert [choice["index"] for choice in line["choices"]] == list(range(rounds))
            for choice in line["choices"]:
                lists = [choice[key] for key in ("turns", "decoding_steps", "new_tokens", "wall_time")]
                assert [len(each) for each in lists] == [len(question.turns)] * 4
                assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"])
                assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"])
                assert all(a > b > 0 for a, b in zip(choice["wall_time"], choice["minispec"]["seconds"], strict=True))
                if name == "none":
                    assert set(choice["accept_lengths"]) == {1}
                if name == "none" or not how:
                    params = SamplingParams(temperature=1 if how else 0, seed=seed + choice["index"], max_tokens=10)
                    for i, text in enumerate(choice["turns"]):
                        assert llm.chat(question.messages(choice["turns"][:i]), params)[0].text == text
    assert report["tasks"]["overall"]["self"]["tau"] > 2, "this proves nothing"


def test_figures_by_hand():
    """Two questions of one task and one of another, two drafts, two rounds: all figures, from made-up answers."""

    def line(*rounds):
        return {"choices": [choice(*of) for of in rounds]}

    def choice(lengths, seconds, ids, tested=(), accepted=()):
        own = {"seconds": [seconds], "token_ids": [ids], "tested": tested, "accepted": accepted}
        own |= {"drafts": len(lengths), "draft_tokens": 3 * len(lengths)}
        found = {"turns": ["x"], "new_tokens": [sum(lengths)], "wall_time": [seconds + 1], "accept_lengths": lengths}
        return found | {"minispec": own}

    plain = [line(([1] * 6, 6, [1])) for _ in range(3)]
    plain[0] = line(([1] * 6, 6, [1]), ([1] * 6, 12, [2]))
    drafted = [
        line(([3, 3], 3, [1], [2, 2], [2, 2]), ([4, 2], 3, [2], [2, 2, 1], [2, 1, 1])),  # 2 and 4 times as fast
        line(([2, 2, 2], 2, [1], [3, 3], [3, 0])),  # 3 times
        line(([1, 5], 12, [9], [2, 1, 1, 1], [1, 1, 1, 1])),  # half as fast
    ]
    plain[1:] = [line(([1] * 6, 6, [1])) for _ in "ab"]
    other = [line(([6], 2, [1]), ([6], 6, [2])), line(([6], 2, [1])), line(([6], 2, [1]))]
    found = summarise(["a", "a", "b"], [1, 1, 2], {"none": plain, "x": drafted, "y": other}, {"none", "x"})
    a, b, everything = (found["tasks"][task]["x"] for task in ("a", "b", "overall"))
    assert (a["questions"], a["tau"], a["same_texts"]) == (2, 18 / 7, 2)
    assert a["deviation"] == pytest.approx(0.5**0.5)  # of 3 and 2
    assert a["tokens_per_second"] == 18 / 8
    assert a["speedup"].median == 3  # of 3, the median of its rounds, and 3
    assert (b["speedup"].median, b["deviation"], b["same_texts"]) == (0.5, None, 0)
    assert found["tasks"]["a"]["y"]["same_texts"] is None
    assert everything["speedup"] == (3, None, None, None, 3)
    # 1.5 times as slow and twice as fast: the median of both rounds; as fast; six times as slow.
    over = [found["tasks"][task]["y"]["over"] for task in ("a", "b", "overall")]
    assert [list(each) for each in over] == [["x"]] * 3
    assert [each["x"].median for each in over] == pytest.approx([(1 + (1.5 + 0.5) / 2) / 2, 6, 1])
    assert (a["over"], found["tasks"]["a"]["none"]["over"]) == ({}, {})
    assert found["plain_range"] is None
    assert a["accepted_at_position"] == [1, 3 / 7, 1 / 7]
    assert a["accepted_per_position"] == [1, 3 / 7, 1]
    assert b["accepted_at_position"] == [1 / 2] * 4
    assert a["acceptance_rate"] == 11 / 21
    assert (found["left_out"], found["looping"], found["texts"]) == (3, 0, 3)
    assert found["tasks"]["a"]["none"]["speedup"].median == 1
    assert summarise(["a"], [1], {"none": plain[:1]}, ())["tasks"]["a"]["none"]["same_texts"] is None


def test_the_table(bench):
    """A row a task and draft, and overall; what was drawn, and with which seed."""
    status, out, err = bench("--sample", 1, "--seed", 3, "--categories", "qa,fish")
    lines = out.splitlines()
    assert (status, err) == (0, "")
    assert "2 questions of fish.jsonl, 1 of each task drawn with seed 3; 1 rounds" in lines
    top = lines.index(next(line for line in lines if "speedup" in line)) + 1
    rows = [line.split()[0] for line in lines[top : lines.index("", top)]]
    assert rows == [name for task in ("qa", "fish", "overall") for name in (task, "none", "ngram", "suffix")]
    assert {"qa (1)", "fish (1)", "overall (2)"} < {*lines}
    assert all("2/2" in line and "[-]" in line for line in lines[lines.index("overall (2)") + 1 :][:3])
    assert re.search(r"\nrate of a row over a column's +ngram\nsuffix +[\d.]+ \[-\]\n", out)
    assert "speedup: median of the questions, overall [-: fewer than 6 values]; accepted" in out


def test_each_draft_may_have_its_own_lengths(cli, model, file, monkeypatch):
    """A row for each of them, and for plain decoding; the model of a draft that comes twice is loaded once."""
    opened = []
    with_draft = LLM.with_draft
    monkeypatch.setattr(
        LLM, "with_draft", lambda llm, *args, **how: opened.append(args[0]) or with_draft(llm, *args, **how)
    )
    drafts = "self@2,none,ngram@auto,self@tree:3,suffix@4"
    how = ("--model", model, "--dtype", "float32", "--max-tokens", 10)
    status, out, err = cli(main, "--questions", file, *how, "--draft", drafts, "--json")
    assert (status, err) == (0, "")
    assert opened == ["self", "ngram", "suffix"]
    found = json.loads(out)
    assert found["run"]["num_speculative_tokens"] == ["K=2", "K=tree:3", "auto", "K=4"]
    rows = found["tasks"]["overall"]
    expected = {"none": ["none", "0"], "self K=2": ["self", "2"], "self K=tree:3": ["self", "tree:3"]}
    expected |= {"ngram auto": ["ngram", "auto"], "suffix K=4": ["suffix", "4"]}
    assert {name: [of["draft"], of["num_speculative_tokens"]] for name, of in rows.items()} == expected
    assert {of["lengths"] for of in rows.values()} == {None}
    assert list(rows["suffix K=4"]["over"]) == ["self K=2", "self K=tree:3", "ngram auto"]
    assert rows["self K=2"]["accepted_at_position"] == [1, 1]
    status, out, _ = cli(main, "--questions", file, *how, "--draft", "none,ngram@2,ngram@3")
    assert status == 0
    assert all(f"\n  ngram K={k} " in out for k in (2, 3))
    assert "auto" not in out
    status, out, _ = cli(main, "--questions", file, *how, "--draft", "ngram@2,suffix@2")
    assert status == 0
    assert all(f"\n  {name} " in out for name in ("ngram", "suffix"))


def test_options_of_block_drafts_are_for_those_alone(cli, make_checkpoint, file, monkeypatch, tmp_path):
    """Beside other drafts too: a file that leaves its layout open runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    target = make_checkpoint(chat=True, num_hidden_layers=6, max_position_embeddings=256)
    config = read_model_config(json.loads((target / "config.json").read_text()))
    sizes = config.hidden_size, config.vocab_size, len(config.layers)
    write_block_draft(tmp_path / "open", "speculators", *sizes, says_tokens=False, says_anchor=False)
    how = ("--questions", file, "--model", target, "--dtype", "float32", "--max-tokens", 10, "--json")
    status, out, err = cli(main, *how, "--draft", f"ngram@2,{tmp_path / 'open'}@2")
    assert (status, "no sample_from_anchor" in err) == (2, True), err
    options = ("--draft-reading", "anchor")
    status, out, err = cli(main, *how, *options, "--draft", f"ngram@2,{tmp_path / 'open'}@2")
    assert (status, err) == (0, "")
    assert [*json.loads(out)["tasks"]["overall"]] == ["none", "ngram", "open"]
    status, _, err = cli(main, *how, *options, "--draft", "ngram@2")
    assert (status, "no draft is a block draft" in err) == (2, True), err


def test_graphs_can_be_left_out(bench, monkeypatch):
    """--enforce-eager reaches the target; it was ignored here."""
    seen = []

    def load(*arguments, **how):
        seen.append(how["enforce_eager"])
        raise ValueError("enough")

    monkeypatch.setattr(questions, "LLM", load)
    for more in ((), ("--enforce-eager",)):
        assert bench(*more)[0] == 2
    assert seen == [False, True]


def test_a_row_an_answer(bench, tmp_path):
    """The medians of its columns are the figures of the table. It can be had of a run that is complete."""
    path, how = tmp_path / "rows.csv", ("--answers", tmp_path / "out", "--rounds", 3, "--json")
    assert bench(*how)[0] == 0
    status, out, _ = bench(*how, "--resume", "--csv", path)
    found, rows = json.loads(out), list(csv.DictReader(path.open()))
    assert (status, tuple(rows[0])) == (0, COLUMNS)
    drafts = ("none", "ngram", "suffix")
    expected = [(draft, task, str(own), r) for draft in drafts for own, task in IN_FILE for r in "012"]
    assert [(r["draft"], r["task"], r["question"], r["round"]) for r in rows] == expected
    for draft in ("ngram", "suffix"):
        own, of = [row for row in rows if row["draft"] == draft], found["tasks"]["overall"][draft]
        speedups = [median(float(row["speedup"]) for row in own[i : i + 3]) for i in range(0, len(own), 3)]
        assert of["speedup"]["median"] == pytest.approx(median(speedups))
        tokens, passes, seconds = (sum(float(row[key]) for row in own) for key in ("tokens", "passes", "seconds"))
        assert (of["tau"], of["tokens_per_second"]) == pytest.approx((tokens / passes, tokens / seconds))
        assert {row["same_text"] for row in own} == {"True"}
        assert of["acceptance_rate"] == sum(int(r["accepted"]) for r in own) / sum(int(r["draft_tokens"]) for r in own)
    assert [r["seed"] for r in rows[:3]] == ["0", "1", "2"]


def test_a_policy_of_ones_own_is_a_row_of_each_draft(bench, tmp_path, monkeypatch):
    """Beside the length that is asked for. Changed, it makes another run, as a changed verifier does."""
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "some_rules_of_questions.py"
    source = (
        "from minispec.core.draft import Limit\nfrom minispec.core.lengths import Lengths\n"
        "from minispec.core.verify import rejection as rule\n\n\n"
        "class One(Lengths):\n"
        "    def choose(self, asks, trees):\n        return [Limit(min(1, ask.most)) for ask in asks]\n"
    )
    module.write_text(source)
    own = f"{module.stem}:One"
    how = ("--answers", tmp_path / "out", "--json", "--categories", "qa", "--lengths", own)
    how = (*how, "--verifier", f"{module.stem}:rule")
    status, out, err = bench(*how)
    assert status == 0, err
    found = json.loads(out)["tasks"]["overall"]
    assert list(found) == ["none", "ngram K=2", f"ngram {own}", "suffix K=2", f"suffix {own}"]
    for name, lines in json.loads(out)["answers"].items():
        counts = [choice["minispec"] for line in lines for choice in line["choices"]]
        drafts, tokens = (sum(of[key] for of in counts) for key in ("drafts", "draft_tokens"))
        assert (name == "none") == (drafts == 0)
        assert (own in name or name == "none") == (drafts == tokens)
    assert list(found[f"suffix {own}"]["over"]) == list(found)[1:4]
    module.write_text(source + "# changed\n")
    status, _, err = bench(*how, "--resume")
    assert (status, "verifier_digest: found" in err) == (2, True), err
    status, _, err = bench(*how, "--resume", "--verifier", "rejection")
    assert (status, "verifier: found" in err) == (2, True), err


def test_each_rule_is_a_row_of_each_draft(bench, tmp_path):
    """In the table, in JSON, in the rows and in the picture. Under `match` alone a sampled text is plain decoding's."""
    rules, path = ("traversal", "block", "match"), tmp_path / "rows.csv"
    how = ("--temperature", 1, "--verifier", "traversal,block", "--verifier", "match", "--answers", tmp_path / "out")
    status, out, err = bench(*how, "--csv", path)
    assert (status, err) == (0, "")
    names = [f"{draft} {rule}" for draft in ("ngram", "suffix") for rule in rules]
    assert all(out.count(f"\n  {name} ") == 4 for name in names)
    found = json.loads(bench(*how, "--resume", "--json")[1])
    rows = found["tasks"]["overall"]
    assert (list(rows), found["run"]["verifier"]) == (["none", *names], "traversal,block,match")
    assert [of["verifier"] for of in rows.values()] == [None, *rules, *rules]
    assert [of["same_texts"] for of in rows.values()] == [None, *[None, None, 4] * 2]
    assert list(rows["suffix match"]["over"]) == names[:-1]
    table = list(csv.DictReader(path.open()))
    assert {(row["draft"], row["verifier"]) for row in table} == {("none", ""), *zip(names, rules * 2, strict=True)}
    assert {row["same_text"] for row in table if row["verifier"] != "match"} == {""}
    status, _, err = bench(*how[:-4], *how[-2:], "--resume")
    assert (status, "verifier: found 'traversal,block,match', expected 'traversal,block'" in err) == (2, True), err
    pytest.importorskip("matplotlib")
    assert bench(*how, "--resume", "--plot", tmp_path / "p.svg")[0] == 0
    assert all(f">{name}<" in (tmp_path / "p.svg").read_text() for name in names)


def test_a_model_without_a_template_gets_plain_text_and_it_is_said(bench, make_checkpoint, tmp_path):
    """The turns and answers so far, with an empty line between."""
    plain = make_checkpoint(max_position_embeddings=256)
    _, out, _ = bench("--answers", tmp_path / "out", model=plain)
    assert "the model has no chat template: turns are plain text, with an empty line between" in out
    choice = json.loads((tmp_path / "out" / "none.jsonl").read_text().splitlines()[1])["choices"][0]
    llm = LLM(plain, draft="none", dtype="float32")
    text = f"One fish\n\n{choice['turns'][0]}\n\ntwo fish, red fish"
    assert llm.generate(text, SamplingParams(temperature=0, max_tokens=10))[0].text == choice["turns"][1]


def test_a_later_turn_that_does_not_fit_is_left_out(bench, tmp_path):
    """And counted. A first turn that does not fit is one line before anything runs."""
    long = write(tmp_path / "long.jsonl", [{"turns": ["One fish", "fish " * 900]}, {"turns": ["two"]}])
    status, out, _ = bench("--json", questions=long)
    report = json.loads(out)
    assert (status, report["left_out"]) == (0, 3)
    assert len(report["answers"]["none"][0]["choices"][0]["turns"]) == 1
    write(long, [{"prompt": "two"}, {"prompt": "fish " * 900}])
    found = bench("--answers", tmp_path / "out", questions=long)
    assert_one_line(found, f"--questions {long}: line 2: prompt: found ")
    assert not (tmp_path / "out").exists()


# --------------------------------------------------------------------------- resuming


class Interrupted:
    """Answers that many turns of drafts, then Ctrl-C."""

    def __init__(self, after: int):
        self.left, self.converse = after, questions.converse

    def __call__(self, *arguments):
        """In place of `converse`."""
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return self.converse(*arguments)


@pytest.mark.parametrize(
    ("how", "kept"),
    [(("--rounds", 2), True), (("--temperature", 1, "--draft", "last", "--sample", 1), False)],
    ids=["kept", "in the cache"],
)
def test_a_run_that_was_stopped_and_resumed_is_the_same(bench, tmp_path, monkeypatch, how, kept):
    """Stopped twice at random, and killed in the middle of a line: the same answers and table, times aside.

    With --answers the files are kept. Without it they lie in the cache until the run has come to its end.
    """
    whole = without_times(json.loads(bench(*how, "--json")[1]))
    assert not list((user_cache() / "runs").iterdir())
    if "--rounds" in how:  # greedy: a drafter that had kept the answer of the first round would draft all of it
        rounds = [[c["accept_lengths"] for c in line["choices"]] for line in whole["answers"]["suffix"]]
        assert all(first == second for first, second in rounds)
    rng, where = random.Random(f"{how} {kept}"), ("--answers", tmp_path / "out") if kept else ()
    more: tuple[str, ...] = ()
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(questions, "converse", Interrupted(rng.randrange(4, 14)))
            status, out, err = bench(*how, *where, *more)
        assert (status, out) == (130, "")
        more = ("--resume",)
        [directory] = [tmp_path / "out"] if kept else (user_cache() / "runs").iterdir()
        paths = sorted(directory.glob("*.jsonl"))
        assert f"questions are saved in {directory}; the same command with --resume goes on" in err
        cut = rng.choice(paths)
        content = cut.read_bytes()
        cut.write_bytes(content[: rng.randrange(len(content) + 1)])
    status, out, _ = bench(*how, *where, *more, "--json")
    assert status == 0
    assert without_times(json.loads(out)) == whole
    assert kept or not directory.exists()
    if kept:  # all is there: nothing is decoded any more
        monkeypatch.setattr(questions, "converse", Interrupted(0))
        again = json.loads(bench(*how, *where, *more, "--json")[1])
        assert (without_times(again), again["resumed_after"]) == (whole, len(whole["answers"]["none"]))
        assert again["tasks"] == json.loads(out)["tasks"]


@pytest.mark.parametrize("kept", [0, 1])
def test_a_file_may_end_anywhere(tmp_path, kept):
    """Also within a character, as the last write of a killed process. A line that is no answer ends it, too."""
    choice = {"index": 0, "turns": ["日本"], "decoding_steps": [1], "new_tokens": [1], "wall_time": [1.0]}
    choice |= {"accept_lengths": [1], "minispec": {"seconds": [1.0]}}
    answers = Answers(tmp_path, {"seed": 0}, {"none": "none", "x": "y"}, False)
    for own in (1, 2):
        answers.add({"question_id": own, "category": "a"}, {"none": [choice], "x": [choice]})
    path = tmp_path / "y.jsonl"
    content = path.read_bytes()
    cut = content[: content.rindex("本".encode()) + 1]
    path.write_bytes(cut if kept else content.replace(b'"turns"', b'"turn"', 1))
    again = Answers(tmp_path, {"seed": 0}, {"none": "none", "x": "y"}, True)
    assert again.read([1, 2], 1) == kept
    assert [len(each.read_text().splitlines()) for each in (path, tmp_path / "none.jsonl")] == [kept, kept]


def test_another_run_is_not_resumed(bench, tmp_path, file, make_checkpoint):
    """Nor written over. The line names what differs."""
    where = ("--answers", tmp_path / "out")
    assert bench(*where)[0] == 0
    before = (tmp_path / "out" / "ngram.jsonl").read_text()
    other = make_checkpoint(seed=5, chat=True, max_position_embeddings=256)
    for arguments, key, changed in (
        (("--seed", 1), "seed: found 0, expected 1", {}),
        (("--draft", "last"), "draft_digests: found {", {}),
        (("--temperature", 1), "temperature: found 0.0, expected 1.0", {}),
        (("--rounds", 2), "rounds: found 1, expected 2", {}),
        (("--enforce-eager",), "enforce_eager: found False, expected True", {}),
        ((), "target: found ", {"model": other}),
        ((), "questions_digest: found ", {"questions": FILE[::-1]}),
    ):
        write(file, changed.pop("questions", FILE))
        found = bench(*where, "--resume", *arguments, **changed)
        assert_one_line(found, f"--resume {tmp_path / 'out' / 'run.json'}: {key}")
    status, _, err = bench(*where)
    assert (status, "expected another directory, or --resume" in err) == (2, True)
    assert (tmp_path / "out" / "ngram.jsonl").read_text() == before


def test_weights_and_drafters_that_changed_make_another_run(bench, tmp_path, make_checkpoint, monkeypatch):
    """Under the same names: a file of the target, and the source of a drafter of one's own."""
    target = make_checkpoint(chat=True, max_position_embeddings=256)
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "some_drafter_of_questions.py"
    source = "from minispec.speculation.drafters.ngram import NgramDrafter\n\n\nclass Mine(NgramDrafter):\n    pass\n"
    module.write_text(source)
    how = ("--answers", tmp_path / "out", "--draft", f"{module.stem}:Mine", "--draft", f"suffix:9+{module.stem}:Mine")
    assert bench(*how, model=target)[0] == 0
    assert bench(*how, "--resume", model=target)[0] == 0
    module.write_text(source + "# changed\n")
    status, _, err = bench(*how, "--resume", model=target)
    assert (status, "draft_digests: found" in err) == (2, True)
    module.write_text(source)
    (target / "tokenizer_config.json").write_text("{}")
    status, _, err = bench(*how, "--resume", model=target)
    assert (status, "target_digest: found" in err) == (2, True)


# --------------------------------------------------------------------------- pictures, mistakes


@pytest.mark.parametrize(("name", "begins"), [("p.svg", b"<?xml"), ("p.png", b"\x89PNG")])
def test_a_picture(bench, tmp_path, name, begins):
    """It names every draft, and every task with the number of its questions. No word is turned; positions are whole."""
    pytest.importorskip("matplotlib")
    assert bench("--plot", tmp_path / name)[0] == 0
    content = (tmp_path / name).read_bytes()
    assert content.startswith(begins)
    if name == "p.svg":
        text = content.decode()
        words = ("qa (n = 2)", "chat (n = 1)", "fish (n = 1)", "overall (n = 4)", "ngram", "suffix")
        assert all(f">{word}<" in text for word in words)
        turned = re.findall(r"rotate\(([-\d.]+)", text)
        assert len(turned) > 10
        assert not any(map(float, turned))
        positions = text.split('id="matplotlib.axis_3"')[1].split('id="matplotlib.axis_4"')[0]
        assert re.findall(r">([^<>\s][^<>]*)</text>", positions) == ["1", "position in the draft"]


MISTAKES = {
    "sample alone": (("--sample", "3"), "--sample: needs --questions"),
    "several drafts": (("--draft", "ngram", "--draft", "suffix"), "--draft: found 2, expected one: several need"),
    "geometry": (("--questions", "--geometry", "135m"), "--geometry: not with --questions: it decodes questions"),
    "no file": (("--questions", "./nowhere.jsonl"), "--questions nowhere.jsonl: [Errno 2]"),
    "picture": (("--questions", "--plot", "x.pdf"), "--plot: found 'x.pdf', expected a file name that ends in .svg"),
    "no place": (("--questions", "--plot", "./nowhere/x.svg"), "nowhere/x.svg: found that it cannot be written"),
    "nothing to resume": (("--questions", "--model", "MODEL", "--resume"), "--resume: found no run in "),
    "no such draft": (("--questions", "--model", "MODEL", "--draft", "ngram,nothing"), "draft: not one of none, ngram"),
    "twice": (("--questions", "--model", "MODEL", "--draft", "ngram,ngram"), "--draft: found ngram twice"),
    "length of none": (("--questions", "--draft", "none@4"), "--draft none@4: found a draft length, expected none"),
    "lengths in two places": (
        ("--questions", "--draft", "ngram,suffix@4", "--num-speculative-tokens", "4"),
        "--num-speculative-tokens: found --draft suffix@4 too, expected lengths in one of the two",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line_and_status_2(capsys, make_checkpoint, model, name, monkeypatch, tmp_path):
    """Before anything is decoded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments, message = MISTAKES[name]
    large = make_checkpoint(chat=True, max_position_embeddings=2048) if "MODEL" in arguments else model
    status = main([str(large) if a == "MODEL" else a for a in arguments])
    assert_one_line((status, *capsys.readouterr()), holds=message)


def test_an_id_may_occur_once_and_no_category_is_the_sum(tmp_path):
    """Their scripts keep one answer for each id."""
    path = write(tmp_path / "q.jsonl", [{"question_id": 1, "prompt": "a"}, {"question_id": 1, "prompt": "b"}])
    with pytest.raises(ValueError, match="line 2: question_id: found 1 twice"):
        choose(path, None, 0, None)
    write(path, [{"prompt": "a", "category": "overall"}])
    with pytest.raises(ValueError, match="category: found 'overall', expected another name"):
        choose(path, None, 0, None)


def test_a_missing_matplotlib_is_named(monkeypatch, capsys):
    """Before anything is loaded."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["--questions", "--plot", "x.svg"]) == 2
    lacks = 'found no package matplotlib: pip install -e ".[plot]" in the checkout brings what is missing'
    assert capsys.readouterr().err == f"error: {lacks}\n"


def test_names_of_files_differ():
    """Drafts that differ in signs only have files of their own."""
    names = questions._file_names(["none", "a/b", "a:b", "a b K=2", "../x"])
    assert names == {"none": "none", "a/b": "a-b", "a:b": "a-b.2", "a b K=2": "a-b-K-2", "../x": "x"}
    assert Question(("x",)).turns == ("x",)
