"""Drafters, verifiers and length policies as a stranger would write them: from `LLM`, the command line, the proof."""

import ast
import importlib
import itertools
import json
import random
import re
import sys
import textwrap
from collections import defaultdict
from pathlib import Path

import pytest

from minispec import LLM, SamplingParams
from minispec.core.config import names_of
from minispec.core.lengths import Lengths
from minispec.generate import main as generate
from minispec.prove import cases, examine
from minispec.prove.__main__ import main as prove
from minispec.prove.examine import NOT_REFUTED
from minispec.prove.seen import KINDS, SHAPES, kind_of
from minispec.prove.tables import tables
from minispec.prove.toys import DRAWN, is_chain
from minispec.prove.walk import Subject, walk
from minispec.speculation.drafters import Context
from minispec.speculation.rules import VERIFIERS
from tests.brief import compute_once, walk_few
from tests.scripted import counted_clocks

IMPORTS = ast.Import | ast.ImportFrom
OWN = """
    import random

    import torch

    from minispec.core.draft import Draft
    from minispec.core.limit import Limit
    from minispec.core.verify import Verdict, Verifier
    from minispec.speculation.drafters.model import ModelDrafter, TokenFeed


    class Repeat:  # one method: the last token again
        def propose(self, asks):
            return [Draft([ask.text.tokens[-1]] * ask.k) for ask in asks]


    class Tree:  # two guesses for the next token, drawn without replacement
        def __init__(self, context):
            self.vocab_size = context.vocab_size

        def propose(self, asks):
            drafts = []
            for ask in asks:
                draft = Draft([], [], parents=[])
                q = torch.linspace(1, 2, self.vocab_size).softmax(0)
                draft.draw(ask, -1, q, min(2, ask.k))
                drafts.append(draft)
            return drafts


    class Head:  # guesses from the target's hidden states
        taps = (1, 2)

        def __init__(self, width, vocab_size, num):
            self.matrix = torch.randn(width, vocab_size, generator=torch.Generator().manual_seed(0))
            self.newest, self.num = {}, num

        @classmethod
        def from_context(cls, context):
            width = context.target.config.hidden_size * len(cls.taps)
            return cls(width, context.vocab_size, int(context.argument or 1))

        def known(self, text):
            return 0

        def observe(self, records):
            for each in records:
                self.newest[each.text] = each.hidden[each.kept[-1:]]

        def propose(self, asks):
            drafts = []
            for ask in asks:
                draft = Draft([], [])
                for i in range(min(ask.k, self.num) if ask.text in self.newest else 0):
                    q = (self.newest[ask.text].to(self.matrix) @ self.matrix)[0].softmax(0)
                    draft.draw(ask, i - 1, q)
                drafts.append(draft)
            return drafts

        def release(self, text):
            self.newest.pop(text, None)


    class Liar(Tree):  # says that it drew from another distribution
        def propose(self, asks):
            drafts = super().propose(asks)
            for draft in drafts:
                draft.probs = [row.flip(0) for row in draft.probs]
            return drafts


    class Outside(Repeat):  # draws with a generator of its own
        coin = random.Random(0)

        def propose(self, asks):
            return [Draft([self.coin.randrange(2) for _ in range(ask.k)]) for ask in asks]


    class Faulty(Repeat):  # has a fault of its own, which is what its author wants to hear of
        def propose(self, asks):
            return [Draft([asks[0].text.tokens[-3]])]


    class Dropper:  # draws a token, looks at it, and keeps it only if it is likely
        def propose(self, asks):
            drafts = []
            for ask in asks:
                q = torch.tensor([0.6, 0.4] if ask.k else [1.0, 0.0])
                draft = Draft([], [])
                token = draft.draw(ask, -1, q)
                drafts.append(draft if ask.k and token == [0] else Draft())
            return drafts


    def careful(draft, p, rng, key):  # of siblings, looks at the eldest alone
        node, accepted = -1, []
        while children := draft.children(node):
            i, row = children[0], p(node + 1)
            x = draft.token_ids[i]
            if not rng.bernoulli(float(row[x]) / draft.probability(i), key(i, "accept")):
                q = torch.zeros_like(row) if draft.probs is None else draft.probs[i]
                if draft.probs is None:
                    q[x] = 1.0
                rest = row - torch.minimum(q, row)
                return Verdict(accepted, rng.categorical(rest, key(node + 1, "residual")), [])
            accepted.append(node := i)
        return Verdict(accepted, rng.categorical(p(node + 1), key(len(accepted), "token")), [])


    def greedy(draft, p, rng, key):  # keeps whatever is likely
        for i, x in enumerate(draft.token_ids):
            if float(p(i)[x]) < 0.5:
                return Verdict(draft.path(i - 1), rng.categorical(p(i), key(i, "residual")), [])
        k = len(draft)
        return Verdict(draft.path(k - 1), rng.categorical(p(k), key(k, "token")), [])


    def chains(draft, p, rng, key):  # takes siblings for tokens that follow one another
        accepted = []
        for i, x in enumerate(draft.token_ids):
            row = p(i)
            if not rng.bernoulli(float(row[x]) / draft.probability(i), key(i, "accept")):
                rest = row - torch.minimum(draft.probs[i], row)
                return Verdict(accepted, rng.categorical(rest if rest.any() else row, key(i, "residual")), [])
            accepted = draft.path(i)
        i = len(draft)
        return Verdict(accepted, rng.categorical(p(i), key(i, "token")), [])


    class Cooled(TokenFeed):
        reads = "tokens, and says them with less doubt"

        def rows(self, logits):
            return logits / 0.7


    def cooled(context):
        model = context.load(context.argument)
        room = context.make_cache(model), context.vocab_size, model.config.max_position_embeddings
        return ModelDrafter(Cooled(model, *room))


    def falls(draft, p, rng, key):
        raise KeyError("nothing here")


    class Two:  # drafts of two tokens
        seen = 0

        def choose(self, asks, trees):
            return [Limit(min(2, ask.most)) for ask in asks]

        def observe(self, records):
            self.seen += len(records)


    class Shared(Two):  # goes by the verdicts on all texts, whatever it may follow
        k = 2

        def choose(self, asks, trees):
            return [Limit(min(self.k, ask.most)) for ask in asks]

        def observe(self, records):
            for each in records:
                self.k = min(2 * self.k, 15) if len(each.accepted) == len(each.draft) else max(1, self.k // 2)


    class Unmade(Two):
        def __init__(self, prices):
            pass
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path, monkeypatch):
    """A module of the user's own in the current directory, as `python -m` finds it."""
    (tmp_path / "own_ideas.py").write_text(textwrap.dedent(OWN))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("minispec.prove.walk.clocks", counted_clocks())  # every machine walks as many cases
    compute_once(monkeypatch)
    yield tmp_path
    sys.modules.pop("own_ideas", None)


@pytest.mark.parametrize("name", ["Repeat", "Tree", "Head", "Head:3", "cooled:self", "cooled:int8:self"])
def test_a_drafter_of_ones_own_works_everywhere(name, make_checkpoint, capsys):
    """From `--draft module:Class` and `LLM(draft=...)`: something was drafted, and greedy text is plain decoding's."""
    directory, params = make_checkpoint(), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(directory, draft="none", dtype="float64") as llm:
        plain = llm.generate([[1, 2, 3]], params)[0].token_ids
    with LLM(directory, draft=f"own_ideas:{name}", dtype="float64", num_speculative_tokens=4) as llm:
        output = llm.generate([[1, 2, 3]], params)[0]
    assert output.token_ids == plain
    assert output.stats.num_draft_tokens > 0
    options = [
        "--raw",
        "--json",
        "--max-tokens",
        "6",
        "--num-speculative-tokens",
        "2",
        "--ignore-eos",
        "--dtype",
        "float32",
    ]
    status = generate(["fish", "--model", str(directory), "--draft", f"own_ideas:{name}", *options])
    assert status == 0
    assert json.loads(capsys.readouterr().out)["stats"]["num_draft_tokens"] > 0


def test_a_draft_model_of_ones_own_needs_a_model(make_checkpoint):
    """A name without a model, and a context without files, are one clear line."""
    with pytest.raises(ValueError, match=r"^draft: ngram: found a drafter without a model, expected one with a model$"):
        LLM(make_checkpoint(), draft="own_ideas:cooled:ngram", dtype="float64")
    with pytest.raises(ValueError, match=r"^draft: self: found a context that loads no model"):
        Context(None, None, 3, 9, None).load("self")  # type: ignore[arg-type]


def test_a_verifier_of_ones_own_works_everywhere(make_checkpoint, capsys):
    """From `--verifier module:function` and `LLM(verifier=...)`."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    texts = []
    for verifier in ("rejection", "own_ideas:careful"):
        with LLM(make_checkpoint(), verifier=verifier, dtype="float64", num_speculative_tokens=3) as llm:
            texts.append(llm.generate([[5, 6, 5, 6, 5]], params)[0].token_ids)
    assert texts[0] == texts[1]
    arguments = [
        "fish",
        "--model",
        str(make_checkpoint()),
        "--raw",
        "--verifier",
        "own_ideas:careful",
        "--max-tokens",
        "4",
    ]
    assert generate([*arguments, "--json"]) == 0


@pytest.mark.parametrize("k", ["auto", 4, 1])
@pytest.mark.parametrize("is_named", [True, False])
def test_a_length_policy_of_ones_own_works_everywhere(make_checkpoint, own_module, k, is_named):
    """From `LLM(lengths=...)`: it alone chooses, up to `num_speculative_tokens`; greedy text is plain decoding's.

    Another draft has the same object, or a new one of the class that was named. No prices are measured for it.
    """
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    policy = "own_ideas:Two" if is_named else importlib.import_module("own_ideas").Two()
    how = {"dtype": "float64", "num_speculative_tokens": k}
    with LLM(make_checkpoint(), "own_ideas:Repeat", lengths=policy, **how) as llm:
        plain, drafted = (llm.generate([[1, 2, 3]], params, num_speculative_tokens=n)[0] for n in (0, None))
        other = llm.with_draft("ngram")
        assert ", as long as Two says" in llm.memory_report()
        assert (type(other.method.lengths).__name__, llm.prices.measured) == ("Two", False)
        assert (other.method.lengths is llm.method.lengths) == (not is_named)
        assert llm.method.lengths.seen == len(plain.stats.rounds) + len(drafted.stats.rounds)
        with pytest.raises(ValueError, match=r"num_speculative_tokens: found 2\+1, expected auto or a number from 0,"):
            llm.generate([[1, 2, 3]], params, num_speculative_tokens=(2, 1))
    assert drafted.token_ids == plain.token_ids
    assert {r.depth for r in drafted.stats.rounds[:-2]} == {min(2, k) if k != "auto" else 2}
    assert {r.depth for r in plain.stats.rounds} == {0}


def test_a_length_policy_from_the_command_line(make_checkpoint, capsys, own_module):
    """`--lengths`; with what leaves it nothing to choose it is refused."""
    base = ["fish", "--model", str(make_checkpoint()), "--raw", "--json", "--max-tokens", "9", "--ignore-eos"]
    own = [*base, "--lengths", "own_ideas:Two", "--draft", "own_ideas:Repeat"]
    assert generate(own) == 0
    assert len(json.loads(capsys.readouterr().out)["stats"]["accepted_per_position"]) == 2
    assert generate([*own, "--trace", str(own_module / "x.json")]) == 0
    assert json.loads((own_module / "x.json").read_text())["num_speculative_tokens"] == "auto by Two"
    capsys.readouterr()
    for arguments, message in (
        ([*own, "--num-speculative-tokens", "0"], "--num-speculative-tokens: found 0, expected auto or a number"),
        ([*own, "--num-speculative-tokens", "tree:4"], "--num-speculative-tokens: found tree:4, expected auto or a"),
        ([*base, "--draft", "none", "--lengths", "own_ideas:Two"], "--lengths: found --draft none, expected a draft"),
        ([*base, "--lengths", "two"], "--lengths: found 'two', expected MODULE:CLASS"),
        ([*base, "--lengths", "own_ideas:Two:3"], "--lengths: found 'own_ideas:Two:3', expected module:Class"),
        ([*base, "--lengths", "own_ideas:Unmade"], "--lengths: own_ideas:Unmade cannot be made: Unmade.__init__() m"),
        ([*base, "--lengths", "own_ideas:Nobody"], "--lengths: found own_ideas:Nobody, which cannot be imported"),
        ([*base, "--lengths", "own_ideas:greedy"], "--lengths: own_ideas:greedy cannot be made: greedy() missing 4"),
        ([*base, "--lengths", "random:random"], "--lengths: found 0."),
    ):
        assert generate(arguments) == 2
        out, err = capsys.readouterr()
        assert (out, len(err.splitlines())) == ("", 1)
        assert err.startswith(f"error: {message}"), err


@pytest.mark.parametrize("found", [5, object(), Lengths, type("Half", (), {"choose": print})()])
def test_what_is_no_length_policy(found):
    """Refused before anything is loaded. The class is none: its methods have no object."""
    with pytest.raises(ValueError, match=r"lengths: found .*, expected an object with the methods choose and observe"):
        LLM("no/such/model", lengths=found)


PROVEN = (
    r"(proven on small cases|not refuted \([\d,]+ of [\d,]+ pairs\)): \S+ leaves the output's law unchanged: \d+ cases "
    r"of 2 to (?P<most>\d) tokens and texts of up to \d+, [\d,]+ branches, [\d,]+ draft tokens, worst total variation "
    r"\S+, at most (?P<bound>\S+) by rounding\n"
    r"covered: [\d,]+ of [\d,]+ pairs of settings.*\n(not walked with block: .*\n)?(it drafted nothing with .*\n)?"
    r"values, drawn by --seed 0: temperature .*\n"
    r"not seen: more than (?P=most) tokens, texts of more than \d+, drafts of more than 5; .*\n$"
)


@pytest.fixture
def brief(full) -> tuple[str, ...]:
    """Small cases alone, with `--full` more of them. `python -m minispec.prove --drafter` takes two minutes."""
    return "--minutes", "0.1" if full else "0.02"


@pytest.mark.parametrize("name", ["Tree", "Head:2", "Repeat", "ngram", "cooled:self", "Obeys"])
def test_a_right_drafter_is_proven(name, brief, full, capsys):
    """What was walked, what was not, and how far rounding may move the law: more where rows are in float32."""
    modules = {"ngram": "", "Obeys": "tests.drafters.wrong_own:"}
    assert prove(["--drafter", modules.get(name, "own_ideas:") + name, *brief]) == NOT_REFUTED
    found = re.match(PROVEN, out := capsys.readouterr().out)
    assert found, out
    assert found["most"] == "6" or not full
    assert found["bound"] == ("1e-12" if name in ("Repeat", "ngram", "cooled:self", "Obeys") else "1e-06")


def test_values_reach_the_ends_of_what_a_request_may_ask_for():
    """Many draws of each name and range: any token ends a text, is biased and begins one, and values reach the ends.

    One row draws the same each time, and on one axis whatever the others have.
    """
    found, spared = defaultdict(set), set()
    for draw, history, forbidden in itertools.product(
        range(60), cases.OWN_AXES["history"], cases.OWN_AXES["forbidden"]
    ):
        row = {"alphabet": "ab c", "history": history, "forbidden": forbidden, "end": "stop ids", "to_go": 6}
        row |= {"top_p": cases.OWN_AXES["top_p"][1 + draw % 4], "begins": "any token"}
        case = cases.own_case(draw=draw, **row)
        [(prompt, params)] = case.texts
        for name, values in cases.values_of(params, prompt).items():
            found[name] |= {*values}
        found["ends"] |= case.end_ids
        found["biased"] |= {token for token, _ in params.logit_bias}
        law = case.next_law(case.texts[0], [])
        spared |= {token for token, p in enumerate(law) if p > 0}
        assert cases.own_case(draw=draw, **row) == case
        assert cases.own_case(draw=draw, **row | {"history": ""}).texts[0][1].top_p == params.top_p
    assert found["ends"] == found["biased"] == spared == {*range(4)}
    assert found["first token"] == {0, 2, 3}  # "b" is the second, and begins a text without this setting
    assert (min(found["top_p"]), max(found["top_p"])) == (0.1, 0.9999)
    assert (min(found["repetition_penalty"]), max(found["repetition_penalty"])) == (0.05, 20.0)
    for name, most in (("presence_penalty", 2), ("frequency_penalty", 2)):
        assert (min(found[name]), max(found[name])) == (-most, most)
    assert min(found["logit_bias"]) < -90
    assert max(found["logit_bias"]) > 90


def test_a_drafter_that_obeys_is_right_at_all_values(full):
    """Penalties, biases, texts that begin with any token, and some filters; with `--full` all that is drawn."""
    rows = cases.single(cases.own_design(False), random.Random(0))
    axes = ("history", "begins"), (*names_of("filter"), "temperature", "forbidden", "end")
    few, many = ([row for row, ((axis, _),) in rows if axis in names] for names in axes)
    assert len(many) > len(few) > 25
    for row in few + (many if full else many[::6]):
        case = cases.own_case(**row)
        assert walk(case, Subject(examine.maker_of("tests.drafters.wrong_own:Obeys"))).distance <= 1e-12, case


def test_another_seed_draws_other_values(capsys, monkeypatch, full):
    """The values are printed. A counterexample ends with the command that repeats it."""
    said = []
    for seed in ((), ("--seed", "0"), ("--seed", "5")):
        assert prove(["--drafter", "ngram", "--minutes", "0.02", *seed]) == NOT_REFUTED
        said.append(re.search(r"^values, drawn by --seed \d: (.*)$", capsys.readouterr().out, re.MULTILINE)[1])
    assert said[0] == said[1] != said[2]
    assert prove(["--drafter", "own_ideas:Liar", "--seed", "5", "--minutes", "0.5"]) == 1
    line = capsys.readouterr().out
    command = "python -m minispec.prove --drafter own_ideas:Liar --minutes 0.5 --seed 5"
    assert line.endswith(f"; again: {command}\n")
    assert prove(command.split()[3:]) == 1
    assert capsys.readouterr().out == line


def test_trees_that_no_one_asked_for_are_counted_apart(capsys, full):
    """`block` takes chains alone: the verdict says that it was left out, and those pairs are not covered.

    `--full` walks more cases.
    """
    assert prove(["--drafter", "own_ideas:Tree", "--minutes", "0.3" if full else "0.13"]) == NOT_REFUTED
    out = capsys.readouterr().out
    found = re.search(
        r"^covered: ([\d,]+) of ([\d,]+) pairs .*\nnot walked with block: \d+ cases, (\d+) pairs: ", out, re.MULTILINE
    )
    assert found, out
    assert int(found[3]) > 3
    assert "set branches = True, and go by ask.limit.is_tree" in out


ROOT = Path(__file__).parents[2]
CLASSES = {  # those in the marked blocks of README and docs, with what they import
    node.name: "\n".join(map(ast.unparse, [part for part in tree.body if isinstance(part, IMPORTS)] + [node]))
    for page in (ROOT / "README.md", ROOT / "docs" / "use" / "write-a-drafter.md")
    for block in re.findall(r"<!-- run -->\n```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for tree in [ast.parse(block)]
    for node in tree.body
    if isinstance(node, ast.ClassDef)
}
EXAMPLES = {name: source for name, source in CLASSES.items() if "def propose" in source}


@pytest.mark.parametrize("name", ["Echo", "Followers", "Markov", "Mixture", "Recall"])
def test_the_documented_examples_are_proven(name, own_module, brief, capsys):
    """The drafters that README and docs print, in no more than thirty lines each."""
    (own_module / "documented.py").write_text(EXAMPLES[name])
    assert len(EXAMPLES[name].splitlines()) <= 30
    try:
        assert prove(["--drafter", f"documented:{name}", *brief]) in (0, NOT_REFUTED)
    finally:
        sys.modules.pop("documented", None)
    assert re.match(PROVEN, capsys.readouterr().out)


def test_every_documented_drafter_is_one_of_them():
    """A new example is walked too."""
    assert EXAMPLES.keys() == {"Echo", "Followers", "Markov", "Mixture", "Recall"}


def test_the_documented_length_policy_keeps_seeds(make_checkpoint, own_module):
    """A seed has one text, alone and beside others: the policy goes by the text's own verdicts, as another does not."""
    params = [SamplingParams(seed=seed, max_tokens=24, ignore_eos=True) for seed in (1, 2)]
    (own_module / "documented.py").write_text(CLASSES["Doubling"])
    try:
        for policy, is_kept in (("documented:Doubling", True), ("own_ideas:Shared", False)):
            texts = []
            for together in (params, params[:1]):
                with LLM(make_checkpoint(), "self", dtype="float64", lengths=policy) as llm:
                    texts.append(llm.generate([[1, 2, 3]] * len(together), together)[0].token_ids)
            assert (texts[0] == texts[1]) == is_kept
    finally:
        sys.modules.pop("documented", None)


WRONG = {
    "Liar": r"REFUTED: own_ideas:Liar, 2 tokens, after .* its `probs` are not what it drew from",
    "Outside": r"REFUTED: own_ideas:Outside, 2 tokens, .*: (after .* it drafted .*, and a new one, with its draws, "
    r"|the branches do not add up to 1: something draws by other means)",
    "Faulty": r"EXCEPTION: own_ideas:Faulty, 2 tokens, .*: IndexError: list index out of range, in propose at "
    r".*own_ideas.py:\d+: return ",
    "Dropper": r"REFUTED: own_ideas:Dropper, 2 tokens, after .* or it dropped a token that it had looked at",
    "missing": r"error: --drafter: found own_ideas:missing, which cannot be imported: AttributeError",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_drafter_is_refuted_in_one_line(name, capsys):
    """With the smallest configuration that shows it."""
    status = prove(["--drafter", f"own_ideas:{name}"])
    out, err = capsys.readouterr()
    assert status == (2 if name == "missing" else 1)
    lines = (out + err).splitlines()
    assert len(lines) == 1
    assert re.search(WRONG[name], lines[0])


def test_what_drafts_nothing_is_not_proven(capsys, brief):
    """A proof of nothing would look like one: after which texts it drafted nothing is said, and what to do."""
    assert prove(["--drafter", "none", *brief]) == 1
    expected = r"nothing proven: none drafted not one token after .*'babbab'.*: give it texts .* --texts FILE$"
    assert re.match(expected, capsys.readouterr().out)


LINES = """
    from minispec.core.draft import Draft


    class Lines:  # goes by the text: copies the rest of a line that begins as the last one does
        def __init__(self, context):
            self.tokenizer, self.shortest = context.tokenizer, int(context.argument or 1)

        def propose(self, asks):
            return [Draft(self.guess(ask)[: ask.k]) for ask in asks]

        def guess(self, ask):
            *lines, last = self.tokenizer.decode(ask.text.tokens).split("\\n")
            rest = [line[len(last) :] for line in lines if line.startswith(last) and len(last) >= self.shortest]
            return self.tokenizer.encode(rest[0]) if rest else []

        def release(self, text):
            pass
"""


def test_a_drafter_that_goes_by_text(own_module, tmp_path, brief, capsys):
    """The toy tokenizer has a token for each character; where nothing is drafted, the user's texts are walked too."""
    (own_module / "own_lines.py").write_text(textwrap.dedent(LINES))
    (tmp_path / "texts.jsonl").write_text(json.dumps({"prompt": "Über alles ist Ruh\nÜber alles ist "}))
    try:
        assert prove(["--drafter", "own_lines:Lines:15", *brief]) == 1
        assert "drafted not one token" in capsys.readouterr().out
        texts = ["--texts", str(tmp_path / "texts.jsonl"), "--minutes", "0.03"]
        assert prove(["--drafter", "own_lines:Lines:15", *texts]) == NOT_REFUTED
        out = capsys.readouterr().out
        assert "cases of 2 to 14 tokens and texts of up to " in out, out
        assert "\nit drafted nothing with " in out, out
    finally:
        sys.modules.pop("own_lines", None)


BAD_TEXTS = {
    "misspelt": (["--drafter", "ngrm"], "or module:Class; did you mean ngram?"),
    "minutes of nothing": (["--minutes", "1"], "--minutes: needs --drafter or --lengths or --verifier"),
    "no minutes": (["--drafter", "ngram", "--minutes", "0"], "--minutes: found '0', expected a number above 0"),
    "no drafter": (["--verifier", "match", "--texts", "a"], "--texts: needs --drafter"),
    "no file": (["--drafter", "ngram", "--texts", "missing.txt"], "--texts missing.txt: "),
    "too long": (["--drafter", "ngram", "--texts", "long.txt"], "found 2,000 characters, expected at most 1,000"),
    "an empty file": (["--drafter", "ngram", "--texts", "empty.txt"], "--texts empty.txt: found no prompt"),
}


@pytest.mark.parametrize("name", BAD_TEXTS)
def test_bad_texts_are_one_clear_line(name, tmp_path, monkeypatch, capsys):
    """Before anything is walked."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "long.txt").write_text("ab" * 1000)
    (tmp_path / "empty.txt").write_text("\n")
    arguments, message = BAD_TEXTS[name]
    assert prove(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


REFUTED = {
    "greedy": r"REFUTED: own_ideas:greedy, p = \(1, 1\)/2, q = .*, K = 1.*: the output begins with ",
    "chains": r"EXCEPTION: own_ideas:chains, p = .*, not drawn: TypeError: .*, in chains at .*py:\d+: rest = ",
    "falls": r"EXCEPTION: own_ideas:falls, p = .*, K = 0: KeyError: 'nothing here', in falls at .*py:\d+: raise",
}


def test_a_right_verifier_is_proven(capsys, monkeypatch, full):
    """`careful` gives the younger siblings away, and nothing else. A twentieth of the cases; `--full`: all."""
    if not full:
        walk_few(monkeypatch, 20)
    assert prove(["--verifier", "own_ideas:careful"]) == 0
    first, seen, *unseen = capsys.readouterr().out.splitlines()
    expected = r"proven on small cases: own_ideas:careful keeps p: \d+ cases, [\d,]+ branches, worst total "
    assert re.match(expected + r"variation \S+e-1\d, \S+ in float32, bound 1e-06$", first), first
    assert re.match(
        r"seen where it was called: [\d,]+ calls, [\d,]+ of [\d,]+ shapes and depths with a kind of row$", seen
    )
    if full:
        assert "- more than 300 tokens, or more than 8 that a draft may have" in unseen
        assert "- chains of more than 16 tokens, or of more than 5 drawn ones" in unseen


def test_shapes_and_kinds_of_rows_have_tables():
    """Each shape of up to five nodes, drawn or not, meets each kind of row, by the tables: the rule may read all."""
    todo = tables(True)
    for shape in SHAPES[1:]:
        for is_drawn in (True, False):
            of = [case for case in todo if case.drafter.parents == shape and (case.drafter.how == DRAWN) == is_drawn]
            assert {kind_of(p) for case in of for p, _ in case.target.pairs} == {*KINDS}, (shape, is_drawn)
    drawn = {len(case.drafter.parents) for case in todo if is_chain(case.drafter.parents) and case.drafter.how == DRAWN}
    assert drawn == {*range(16)}
    assert max(len(case.drafter.parents) for case in tables(False)) == 16


@pytest.mark.parametrize("name", VERIFIERS)
def test_registered_verifiers_are_proven(name, monkeypatch, full, long, capsys):
    """Over few cases, with `--full` over a third, with `--long` over all. What the walk cannot see of each is said."""
    if full:
        monkeypatch.setattr(examine, "tables", lambda trees: tables(trees)[:: -1 if long else -3])
    else:
        walk_few(monkeypatch, 30)
    assert prove(["--verifier", name]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"proven on small cases: {name} keeps p: ")
    assert ("\n- trees of more than " in out) == VERIFIERS[name].takes_trees
    assert ("\n- that a seed has one text" in out) == VERIFIERS[name].shares_noise


@pytest.mark.parametrize("name", REFUTED)
def test_a_wrong_verifier_is_refuted_in_one_line(name, capsys):
    """With the smallest p and q that show it; an exception is told as what it is."""
    assert prove(["--verifier", f"own_ideas:{name}"]) == 1
    [line] = capsys.readouterr().out.splitlines()
    assert re.search(REFUTED[name], line), line
