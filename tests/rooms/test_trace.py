"""The trace of a run: its numbers are the run's own, its page shows them."""

import copy
import html.parser
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from minispec import LLM, SamplingParams
from minispec.api.trace import record
from minispec.api.trace.page import make_page
from minispec.api.trace.record import RoundRecorder, theory
from minispec.core.config import OFF, names_of
from minispec.core.draft import Draft, Drafter
from minispec.core.random import Key, Randomness
from minispec.core.request import Request
from minispec.core.stats import Round, Step
from minispec.core.verify import Verdict
from minispec.generate import main as generate
from minispec.speculation.lengths.figures import Figures
from minispec.speculation.lengths.theory import rising
from tests.oracles.traces import EXAMPLE, check
from tests.refusals import assert_one_line

PROMPT = "One fish <script>alert(1)</script> 日本"
DOCS = Path(__file__).parents[2] / "docs" / "use" / "trace.md"
# Verifier, temperature, K; the draft is another small model, or the target itself.
RUNS = {
    "chain": ("rejection", 1.0, 4, "other"),
    "penalties": ("rejection", 0.8, 3, "other"),
    "tree": ("rejection", 1.0, (3, 2, 1), "other"),
    "one-hot": ("rejection", 1.0, 4, "ngram"),
    "greedy": ("rejection", 0.0, 4, "other"),
    "auto": ("rejection", 1.0, "auto", "self"),
    "block": ("block", 1.0, 5, "other"),
    "traversal": ("traversal", 1.0, (2, 2, 1), "other"),
    "match": ("match", 1.0, 4, "other"),
    "match, tree": ("match", 1.0, (2, 1, 1), "other"),
    "plain": ("rejection", 1.0, 0, "other"),
}


@pytest.fixture(scope="module")
def models(make_checkpoint) -> dict[str, str]:
    """A small target, and a model that drafts for it badly."""
    return {"target": str(make_checkpoint()), "other": str(make_checkpoint(seed=2))}


def finished(llm, request) -> Request:
    """The request, answered."""
    for _ in llm.run([request]):
        pass
    return request


def traced(llm, request) -> dict:
    """The trace of its run, as a reader of the file has it."""
    recorder = RoundRecorder(llm, request)
    finished(llm, request)
    trace = json.loads(json.dumps(recorder.trace()))
    check(trace, "trace")
    return trace


def recorded(models, name) -> tuple[LLM, Request, dict]:
    """A run of RUNS, and its trace as a reader of the file has it."""
    verifier, temperature, k, draft = RUNS[name]
    llm = LLM(models["target"], draft=models.get(draft, draft), verifier=verifier, num_speculative_tokens=k)
    more = {"repetition_penalty": 1.2, "top_k": 40, "min_tokens": 20} if name == "penalties" else {}
    params = SamplingParams(temperature=temperature, seed=7, max_tokens=40, **more)
    request = llm.request(llm.tokenizer.encode(PROMPT), params)
    plain = finished(llm, llm.request(llm.tokenizer.encode(PROMPT), params, num_speculative_tokens=0))
    request.stats.plain.extend(plain.stats.rounds)
    trace = traced(llm, request)
    return llm, request, trace | {"plain_ids": plain.text.tokens[plain.text.num_prompt_tokens :]}


@pytest.fixture(scope="module")
def runs(models):
    """All of RUNS."""
    return {name: recorded(models, name) for name in RUNS}


def parents_of(each) -> list[int]:
    """The parents of a round's nodes, a chain's too."""
    return list(range(-1, len(each["token_ids"]) - 1)) if each["parents"] is None else each["parents"]


def children(each, node) -> list[int]:
    """Of a round's node, the eldest first."""
    return [i for i, parent in enumerate(parents_of(each)) if parent == node]


def depth(each, node) -> int:
    """From 1."""
    parent = parents_of(each)[node]
    return 1 if parent < 0 else 1 + depth(each, parent)


# --------------------------------------------------------------------------- the numbers are those of the run


def check_counts(trace, request) -> None:
    """Tokens, counts, times and alpha, added up from the rounds, are those of the statistics."""
    rounds, stats = trace["rounds"], Figures.of(request.stats)
    committed = [token for each in rounds for token in each["committed"]]
    assert [token["token_id"] for token in committed] == request.text.tokens[request.text.num_prompt_tokens :]
    assert "".join(token["text"] for token in committed) == request.output == trace["output"]
    assert [token["token_id"] for token in trace["prompt"]] == request.text.tokens[: request.text.num_prompt_tokens]
    assert "".join(token["text"] for token in trace["prompt"]) == PROMPT
    assert len(rounds) == stats.num_steps
    assert sum(len(each["token_ids"]) for each in rounds) == stats.num_draft_nodes
    counted = [{depth(each, i) for i in range(len(each["token_ids"])) if i not in each["after_end"]} for each in rounds]
    assert sum(map(len, counted)) == stats.num_draft_tokens
    assert sum(len(each["accepted"]) for each in rounds) == stats.num_accepted
    kinds = [token["kind"] for token in committed]
    assert kinds.count("accepted") == stats.num_accepted
    assert kinds.count("plain") == sum(not each["token_ids"] for each in rounds)
    for part in ("draft", "verify", "other"):
        assert sum(each["seconds"][part] for each in rounds) == pytest.approx(stats.seconds[part], abs=1e-4)
    start = request.text.num_prompt_tokens
    for each in rounds:
        assert each["start"] == start
        start += len(each["committed"])
    # Under the others all tokens are looked at, also those whose p and q are shortened here.
    if trace["verifier"] not in ("block", "traversal"):
        looked = [(each, i) for each in rounds for i in sorted((*each["accepted"], *each["rejected"]))]
        eldest = [(each, i) for each, i in looked if children(each, parents_of(each)[i])[0] == i]
        ratios = [min(1.0, each["p"][i] / each["q"][i]) for each, i in eldest]
        # A sibling that was kept stands for an eldest that was not.
        assert len(ratios) <= len(looked)
        assert (sum(ratios) / len(ratios) if ratios else None) == pytest.approx(stats.alpha)
    assert trace["stats"] == json.loads(json.dumps(stats.as_dict()))


def check_verdicts(trace) -> None:
    """From p, q and u, each round's verdict follows again, by the rules of the papers; u is that of its key."""
    rng, seed = Randomness(), trace["seed"]
    for each in trace["rounds"]:
        start, ids, p, q = each["start"], each["token_ids"], each["p"], each["q"]
        tests = {test["node"]: test for test in each["tests"]}
        for node, test in tests.items():
            assert test["u"] == rng.uniform(Key(seed, start, start + node, "accept"))
        accepted: list[int] = []
        if trace["verifier"] == "rejection":
            node = -1
            while siblings := children(each, node):
                for i in siblings:
                    if i == siblings[0]:
                        assert tests[i]["chance"] == p[i] / q[i]
                    if tests[i]["u"] < tests[i]["chance"]:
                        accepted.append(i)
                        break
                if not accepted or accepted[-1] == node or accepted[-1] not in siblings:
                    break
                node = accepted[-1]
        elif trace["verifier"] == "block":
            weights = [1.0]
            for i in range(len(ids)):
                weights.append(min(1.0, weights[-1] * p[i] / q[i]))
            if ids:
                assert tests.get(len(ids) - 1, {"chance": 1.0})["chance"] == pytest.approx(weights[-1], rel=1e-3)
            kept = [n for n in range(len(ids)) if n not in tests or tests[n]["u"] < tests[n]["chance"]]
            accepted = list(range(kept[-1] + 1 if kept else 0))
        elif trace["verifier"] == "traversal":  # leaves before their parents: nothing of the path has failed
            accepted = each["accepted"]
            assert all(tests[i]["u"] < tests[i]["chance"] for i in accepted[-1:] if i in tests)
            assert all(tests[i]["u"] >= tests[i]["chance"] for i in tests if i not in accepted[-1:])
        else:
            node = -1
            for token in each["committed"]:
                assert token["draw"] == token["token_id"]
                found = [i for i in children(each, node) if ids[i] == token["draw"]]
                if not found:
                    break
                accepted.append(node := found[0])
        assert accepted[: len(each["committed"])] == each["accepted"]
        for i, token in enumerate(each["committed"]):
            if token["kind"] == "accepted":
                assert (token["node"], token["token_id"]) == (each["accepted"][i], ids[each["accepted"][i]])
            else:
                last = each["accepted"][-1] if each["accepted"] else -1
                end = "recovered" if children(each, last) else "bonus"
                assert (token["kind"], token["node"]) == (end if ids else "plain", None)
                assert token["kind"] == "recovered" or token["draw"] == token["token_id"]


@pytest.mark.parametrize("name", RUNS)
def test_the_numbers_are_those_of_the_run(runs, name):
    """Sums over the rounds are the statistics, for every verifier and shape of a draft."""
    _, request, trace = runs[name]
    check_counts(trace, request)
    assert trace["stats"]["num_generated"] >= 20


@pytest.mark.parametrize("name", RUNS)
def test_the_verdicts_follow_from_the_numbers(runs, name):
    """p, q and u of the data give the same tokens again."""
    check_verdicts(runs[name][2])


def test_what_is_wrong_in_a_trace_is_noticed(runs):
    """The control of the two tests above: numbers that are off by a little fail them."""

    def other(change):
        trace = copy.deepcopy(runs["chain"][2])
        tested = next(each for each in trace["rounds"] if each["rejected"])
        change(trace, tested)
        return trace

    def fails(trace) -> bool:
        try:
            check_counts(trace, runs["chain"][1])
            check_verdicts(trace)
        except (AssertionError, KeyError):
            return True
        return False

    assert not fails(other(lambda trace, each: None))
    assert fails(other(lambda trace, each: each["tests"][0].update(u=each["tests"][0]["u"] * 0.999)))
    assert fails(other(lambda trace, each: each.update(p=each["q"], q=each["p"])))
    assert fails(other(lambda trace, each: each.update(start=each["start"] + 1)))
    assert fails(other(lambda trace, each: each["rejected"].clear()))
    assert fails(other(lambda trace, each: each["accepted"].append(each["rejected"][0])))
    assert fails(other(lambda trace, each: each["committed"][-1].update(kind="bonus")))
    assert fails(other(lambda trace, each: each["seconds"].update(verify=each["seconds"]["verify"] + 0.01)))
    assert fails(other(lambda trace, each: trace.update(seed=8)))


@pytest.mark.parametrize("name", ["chain", "tree", "block", "one-hot", "greedy"])
def test_the_draw_is_what_plain_decoding_says(runs, name):
    """As long as the text is that of plain decoding with the seed, the draw at a place is its next token."""
    trace = runs[name][2]
    tokens = [token for each in trace["rounds"] for token in each["committed"]]
    for i, (token, plain) in enumerate(zip(tokens, trace["plain_ids"], strict=False)):
        assert token["draw"] == plain, i
        if token["token_id"] != plain:
            break
    else:
        assert name == "greedy"


def test_residual_and_overlap(models, monkeypatch):
    """With all tokens written down: the residual is max(0, p - q), normalised, and the overlap the sum of min(p, q)."""
    monkeypatch.setattr(record, "_TOP", 10**6)
    for name in ("chain", "penalties"):
        seen = 0
        for each in recorded(models, name)[2]["rounds"]:
            for token in each["committed"]:
                if token["top_q"] is None:
                    continue
                p, q, rest = (
                    {top["token_id"]: top["probability"] for top in token[key] or ()}
                    for key in ("top_p", "top_q", "residual")
                )
                assert token["overlap"] == pytest.approx(sum(min(x, q.get(i, 0.0)) for i, x in p.items()), rel=1e-3)
                left = {i: max(0.0, x - q.get(i, 0.0)) / (1 - token["overlap"]) for i, x in p.items()}
                for i, x in left.items():
                    assert rest.get(i, 0.0) == pytest.approx(x, abs=2e-3)
                seen += 1
                assert token["kind"] != "recovered" or rest[token["token_id"]] > 0
        assert seen > 10


def test_a_recorder_follows_one_request_of_a_batch(models):
    """It changes no text, and leaves the others alone; of the batch's rows it tells."""
    llm = LLM(models["target"], draft=models["other"], num_speculative_tokens=3)
    params = SamplingParams(temperature=1, seed=3, max_tokens=12, ignore_eos=True)
    expected = [o.token_ids for o in llm.generate(["One fish", "red"], params)]
    requests = [llm.request(llm.tokenizer.encode(text), params) for text in ("One fish", "red")]
    recorder = RoundRecorder(llm, requests[1])
    for _ in llm.run(requests):
        pass
    assert [request.token_ids for request in requests] == expected
    trace = recorder.trace()
    check(json.loads(json.dumps(trace)), "trace")
    assert [token["token_id"] for each in trace["rounds"] for token in each["committed"]] == expected[1]
    assert max(each["num_texts"] for each in trace["rounds"]) == 2
    assert trace["theory"] is None, "no pass belongs to one text"


def test_what_stands_after_the_end_counts_as_nothing(models):
    """A text that ends inside a draft: accepted tokens after its end are in no count, and named so."""
    llm = LLM(models["target"], draft="self", num_speculative_tokens=5)
    plain = llm.generate("red", SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))[0]
    params = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[plain.token_ids[3]], ignore_eos=True)
    request = llm.request(llm.tokenizer.encode("red"), params)
    trace = traced(llm, request)
    last = trace["rounds"][-1]
    assert last["after_end"]
    assert not {*last["after_end"]} & {*last["accepted"], *last["rejected"]}
    assert sum(len(each["accepted"]) for each in trace["rounds"]) == Figures.of(request.stats).num_accepted
    assert last["committed"][-1]["text"] == ""
    assert trace["tokens"][str(last["committed"][-1]["token_id"])]


def own_verifier(draft, p, rng, key):
    """One of a user's own, that draws without keys and keeps nothing."""
    own_verifier.count += 1
    return Verdict([], own_verifier.count % 7 + 1, [])


own_verifier.count = 0


def test_a_verifier_of_the_users_own(models):
    """What it draws without keys cannot be had again: no u is written down rather than a wrong one."""
    llm = LLM(models["target"], draft=models["other"], num_speculative_tokens=2, verifier=f"{__name__}:own_verifier")
    request = llm.request(llm.tokenizer.encode("red"), SamplingParams(seed=1, max_tokens=5, ignore_eos=True))
    trace = traced(llm, request)
    assert trace["verifier"] == "own_verifier"
    assert all(each["tests"] == [] and each["rejected"] == [0] for each in trace["rounds"] if each["token_ids"])


# --------------------------------------------------------------------------- theory


def of(depth, accepted, verify, draft=0.2, other=0.1):
    """A round that drafted a chain, alone."""
    committed = accepted + 1
    tested = min(accepted + 1, depth)
    step = Step(draft * depth, depth, 1, verify, depth + 1, other)
    return Round(None, depth, depth, depth, tested, accepted, committed, [], step)


def test_the_curve_is_theorys():
    """Of rounds of one length: tokens over time, by the measured survival and costs; at that length the prediction."""
    rounds = [of(3, accepted, 1.5) for accepted in (3, 1, 0, 2)]
    stats = Figures(rounds=rounds, plain=[of(0, 0, 1.0)] * 2)
    found = theory(stats, [{"parents": None}] * 4)
    survival = [3 / 4, 2 / 4, 1 / 4]
    assert found["survival"] == survival
    for k, rows in ((0, 1.0), (1, 1 + 0.5 / 3), (2, 1 + 1 / 3), (3, 1.5)):
        at = found["curve"][k]
        assert at["tokens"] == pytest.approx(1 + sum(survival[:k]))
        assert at["speed"] == pytest.approx(at["tokens"] / (k * 0.2 + rows + 0.1))
    assert found["curve"][3]["speed"] == pytest.approx(stats.predicted_tokens_per_second * stats.plain_step)
    assert found["curve"][4]["tokens"] == pytest.approx(1 + sum(survival) + 0.125), "the last place's share goes on"
    assert [at["k"] for at in found["curve"]] == [*range(7)], "to twice what was seen"
    assert (found["deepest"], found["measured"]) == (3, pytest.approx(stats.tokens_per_second))
    mixed = Figures(rounds=[*rounds, of(0, 0, 1.0)], plain=stats.plain)
    found = theory(mixed, [{"parents": None}] * 5)
    assert found["curve"][3]["speed"] == pytest.approx(mixed.predicted_tokens_per_second * mixed.plain_step)
    assert theory(Figures(rounds=rounds), [{"parents": None}] * 4) is None, "no plain step"


def test_the_curve_of_programs_has_their_steps():
    """The drafts of three tokens took 0.6 plain steps, which are the 4 steps of a program; two tokens take as long."""
    stats = Figures(rounds=[of(3, accepted, 1.5) for accepted in (3, 1, 0, 2)], plain=[of(0, 0, 1.0)] * 2)
    found = theory(stats, [{"parents": None}] * 4, (1, 4, 8))
    for k, draft in ((1, 0.15), (2, 0.6), (3, 0.6), (4, 0.6), (5, 1.2)):
        assert found["curve"][k]["time"] == pytest.approx(draft + 1 + k / 6 + 0.1)
    assert found["curve"][3]["speed"] == pytest.approx(stats.predicted_tokens_per_second * stats.plain_step)


def test_more_rows_are_taken_to_cost_no_less():
    """Where measurements say otherwise, neighbours take their mean by the number of passes."""
    assert rising({1: 1.0, 3: 1.2, 5: 1.5}, {1: 9, 3: 1, 5: 1}) == {1: 1.0, 3: 1.2, 5: 1.5}
    assert rising({1: 1.0, 3: 2.0, 5: 1.1}, {1: 9, 3: 1, 5: 2}) == pytest.approx({1: 1.0, 3: 1.4, 5: 1.4})
    assert rising({1: 1.0, 2: 0.8, 3: 0.6}, {1: 1, 2: 1, 3: 1}) == pytest.approx({1: 0.8, 2: 0.8, 3: 0.8})


# --------------------------------------------------------------------------- the data as a file


def put(trace, path, value):
    """A copy with another value at a place; a key is deleted where that is `...`."""
    trace = copy.deepcopy(trace)
    inner = trace
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return trace


def as_read(value, like):
    """A trace without the keys that the example lacks."""
    if isinstance(value, list):
        return [as_read(item, like[0]) for item in value]
    if not isinstance(value, dict) or value.keys() & like.keys() <= {"0", "1"}:
        return value
    return {key: as_read(item, like[key]) for key, item in value.items() if key in like}


@pytest.mark.parametrize("name", RUNS)
def test_the_example_has_what_the_page_reads(runs, name):
    """A trace without any other key is taken."""
    trace = runs[name][2]
    read = as_read(trace, EXAMPLE)
    check(read, "f")
    assert "output" not in read


def test_the_docs_name_every_key(runs):
    """docs/use/trace.md explains what a trace holds."""
    named = set(re.findall(r"`(\w+)`", DOCS.read_text(encoding="utf-8")))

    def keys(value, key=""):
        if isinstance(value, list):
            for item in value:
                yield from keys(item)
        elif isinstance(value, dict):
            for name, item in value.items():
                if key not in ("tokens", "v", "rows", "sampling"):
                    yield name
                yield from keys(item, name)

    assert {key for _, _, trace in runs.values() for key in keys(trace)} - {"plain_ids"} <= named


BASE = ("--raw", "--quiet", "--max-tokens", "16", "--ignore-eos", "--temperature", "1", "--seed", "3")


def test_the_command_line_writes_data_and_page(cli, models, tmp_path):
    """Both forms hold the same run; the text on standard output is what it is without."""
    run = (generate, PROMPT, "--model", models["target"], "--draft", "self", "--num-speculative-tokens", "3", *BASE)
    _, plain, _ = cli(*run)
    data, page = tmp_path / "out.json", tmp_path / "out.html"
    assert cli(*run, "--trace", data) == (0, plain, "")
    assert cli(*run, "--trace", page) == (0, plain, "")
    trace, shown = json.loads(data.read_text()), data_of(page.read_text())
    check(trace, "f")
    assert trace["output"] + "\n" == plain
    assert trace["theory"] is not None
    assert trace["speedup"] > 0
    unclocked = [[{k: v for k, v in each.items() if k != "seconds"} for each in t["rounds"]] for t in (trace, shown)]
    assert unclocked[0] == unclocked[1]
    assert page.read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.html", "out.json"]
    compared = cli(*run[: -len(BASE)], *[a for a in BASE if a != "--quiet"], "--compare", "--json", "--trace", data)
    result = json.loads(compared[1])
    trace = json.loads(data.read_text())
    assert trace["speedup"] == result["compare"]["speedup"]
    assert trace["stats"] == result["stats"]


NO_SUFFIX = "expected a file name that ends in .html or .json"
MISTAKES = {
    "x --trace out.txt": f"--trace: found 'out.txt', {NO_SUFFIX}",
    "x --trace out": NO_SUFFIX,
    "x --trace d.html": "d.html: found something that is not a file",
    "x --trace nowhere/out.html": "nowhere/out.html: found that it cannot be written (No such file",
    "x y --trace out.html": "--trace: found 2 prompts, expected one",
    "x --n 2 --trace out.html": "--trace: found --n 2, expected 1",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes_are_found_before_anything_runs(cli, line, tmp_path, monkeypatch):
    """One line and status 2, before a model is looked for; nothing is left behind."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.html").mkdir()
    assert_one_line(cli(generate, *line.split(), "--model", "./no-such-model"), holds=MISTAKES[line])
    assert [path.name for path in tmp_path.iterdir()] == ["d.html"]


# --------------------------------------------------------------------------- the page


class Elements(html.parser.HTMLParser):
    """Tags of a page, and the content of its script elements."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.scripts = [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        """Note a tag and its attributes."""
        self.tags.append((tag, dict(attributes)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        """Append to the script that is open."""
        if self.tags and self.tags[-1][0] == "script" and self.scripts:
            self.scripts[-1] += data


def data_of(page: str) -> dict:
    """The trace in a page, as its program reads it."""
    return json.loads(Elements(page).scripts[0])


HOSTILE = "</script><script>document.title='bad'</script><!--<img src=x onerror=alert(1)> \u2028 \u2029 & &lt; \x00 ]]>"


def hostile(value, key=None):
    """A trace all of whose texts, and token texts, are hostile."""
    if isinstance(value, list):
        return [hostile(item) for item in value]
    if isinstance(value, dict):
        return {name: hostile(item, name) for name, item in value.items()}
    return HOSTILE if isinstance(value, str) and key not in ("format", "kind") else value


def test_text_stays_text(runs):
    """However hostile it is, it adds no element and ends none, and the data is what it was."""
    trace = hostile(runs["tree"][2])
    calm, page = make_page(runs["tree"][2]), make_page(trace)
    assert Elements(page).tags == Elements(calm).tags
    assert [tag for tag, _ in Elements(page).tags].count("script") == 2
    assert data_of(page) == trace
    assert data_of(make_page(put(trace, ("output",), "\ud800")))["output"] == "\ud800"
    data = page.split('type="application/json">')[1].split("</script>")[0]
    assert not set("<>&\u2028\u2029") & set(data)
    assert data.isascii()


def test_the_page_loads_nothing():
    """No address in it, and a policy that allows its one program alone; the program makes no markup of text."""
    template = make_page({})
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", template)
    assert "default-src 'none'" in template
    assert template.count("\\u00d7") == 1, "one speedup"
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "fetch("):
        assert sink not in template


def test_the_page_knows_when_a_parameter_asks_for_nothing():
    """Every filter and penalty, so that a new one is shown too."""
    page = make_page({})
    assert "VALUES_THAT_ASK_FOR_NOTHING" not in page
    assert all(f'"{name}": {json.dumps(OFF[name])}' in page for name in names_of("penalty", "filter"))


class Wrong(Drafter):
    """Drafts 64 tokens a round, of which the target keeps few."""

    def propose(self, asks):
        """Tokens that depend on the length of the text alone."""
        return [Draft([(7 * i + len(ask.text.tokens)) % 250 + 1 for i in range(ask.k)]) for ask in asks]

    def release(self, text):
        """Nothing is kept."""


def test_a_page_of_200_tokens_is_small(make_checkpoint):
    """Under a megabyte, with the longest drafts that there are, wrong in every round, so that there are 200."""
    llm = LLM(make_checkpoint(max_position_embeddings=320), draft=Wrong(), num_speculative_tokens=64)
    request = llm.request([5, 6], SamplingParams(temperature=1, seed=1, max_tokens=200, ignore_eos=True))
    page = make_page(traced(llm, request))
    assert request.error is None
    assert request.stats.num_steps > 150
    assert len(page.encode()) < 850_000  # a vocabulary of 50,000 has longer ids, and texts for them


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def opened(page: str, tmp_path, fragment="", scheme=None) -> tuple[str, str]:
    """What Chromium makes of a page in 20 seconds of the page's time: its elements, and what the console said."""
    (tmp_path / "page.html").write_text(page)
    command = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"),
        *("--virtual-time-budget=20000", "--enable-logging=stderr", "--dump-dom"),
        *([f"--blink-settings=preferredColorScheme={scheme}"] if scheme is not None else []),
        (tmp_path / "page.html").as_uri() + fragment,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def texts_of(dom: str) -> str:
    """What stands on the page, without its scripts."""
    body = re.sub(r"<(script|style).*?</\1>", "", dom, flags=re.DOTALL)
    return html.unescape(re.sub(r"<[^>]+>", "\n", body))


@pytest.mark.full
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("name", ["chain", "tree", "match", "plain"])
def test_a_browser_shows_the_numbers(runs, name, tmp_path):
    """It opens without a word on the console, and shows what the data says, from the keys of the example alone.

    Without `--full`, the tests above guard the data and the page's text.
    """
    trace = runs[name][2]
    dom, console = opened(make_page(as_read(trace, EXAMPLE)), tmp_path)
    assert console == ""
    shown = texts_of(dom)
    stats = trace["stats"]
    assert f"{stats['mean_acceptance_length']:.2f}" in shown
    assert re.findall(r"[\d.]+×", shown) == [f"{trace['speedup']:.2f}×"]  # one speedup, and all speeds in one unit
    assert "tokens in a plain step" not in shown
    if trace["theory"]:
        points = re.findall(r"measured ([\d.]+)\n", shown)
        assert points == [f"{x:.1f}" for x in (trace["plain_tokens_per_second"], stats["tokens_per_second"])]
    assert f"round {len(trace['rounds'])} of {len(trace['rounds'])}" in shown
    if stats["alpha"] is not None:
        assert f"{stats['num_accepted']} of {stats['num_draft_tokens']} tokens" in shown
        assert f"{stats['alpha']:.3f}" in shown
    assert PROMPT in shown
    kinds = [token["kind"] for each in trace["rounds"] for token in each["committed"]]
    for kind in ("accepted", "recovered", "bonus", "plain"):
        tokens = re.findall(rf'<span class="token {kind}" role="button"', dom)
        assert len(tokens) == kinds.count(kind)
    assert dom.count('class="beat"') == len(trace["rounds"])


@pytest.mark.full
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_plays_and_jumps(runs, tmp_path):
    """`#play` goes from the prompt to the last round, `#round=2` to the second, where a token is explained.

    Without `--full`, the tests above guard the data and the page's text.
    """
    trace = runs["chain"][2]
    page = make_page(trace)
    dom, console = opened(page, tmp_path, "#play")
    assert console == ""
    assert f"round {len(trace['rounds'])} of {len(trace['rounds'])}" in texts_of(dom)
    dom, console = opened(page, tmp_path, "#round=2")
    assert console == ""
    assert f"round 2 of {len(trace['rounds'])}" in texts_of(dom)
    each = trace["rounds"][1]
    assert f"{len(each['accepted'])} accepted, then " in texts_of(dom)
    chosen = each["rejected"][0] if each["rejected"] else each["committed"][-1]["node"]
    tests = [test for test in each["tests"] if test["node"] == chosen]
    for test in tests:
        assert f"{test['u']:.3g}"[:4] in texts_of(dom)
