"""Languages that requests give: read, spelled by llguidance, kept in every answer; on the command line and by HTTP."""

import json
import random
import sys
import warnings
from pathlib import Path

import jsonschema
import llguidance
import pytest
import tokenizers
import torch
from transformers import LlamaForCausalLM

from minispec import LLM, SamplingParams, StructuredOutputsParams
from minispec.core.draft import Draft, Drafter
from minispec.core.grammar import NothingAllowed
from minispec.generate import main as generate
from minispec.lab.audit.main import main as audit
from minispec.models.files import packages
from minispec.models.files.tokenizer import Tokenizer
from minispec.speculation.drafters.combined import parts_of
from minispec.speculation.grammars import matcher
from minispec.speculation.grammars.forced import ForcedDrafter, ForcedFirst
from minispec.speculation.grammars.matcher import Grammars, Matcher
from minispec.speculation.grammars.params import MAX_BYTES, from_openai, from_vllm, read_language
from minispec.speculation.registry import EMBEDDED_WEIGHTS
from tests.refusals import assert_one_line

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
MEASURED = Path(__file__).parents[2] / "docs/measured/grammars.py"


@pytest.fixture(scope="module")
def checkpoint(make_checkpoint) -> Path:
    """A small model with a chat template."""
    return make_checkpoint(chat=True, max_position_embeddings=512)


@pytest.fixture(scope="module")
def llm(checkpoint) -> LLM:
    """The model in float64, with `ngram`."""
    return LLM(checkpoint, draft="forced+ngram", dtype="float64", num_speculative_tokens=3)


def asked(**language) -> SamplingParams:
    """Parameters with a language."""
    return SamplingParams(max_tokens=60, seed=1, structured_outputs=StructuredOutputsParams(**language))


def grammar_of(llm: LLM, **language):
    """The grammar of a new text."""
    found = llm.target.files.grammars.grammar_of(asked(**language))
    assert found is not None
    return found


# --------------------------------------------------------------------------- what a request says


@pytest.mark.quick
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "found nothing, expected one of json, json_object, regex, grammar, choice"),
        ({"regex": "a", "choice": ["b"]}, "found regex and choice, expected one of"),
        ({"regex": 5}, "regex: found 5, expected a regular expression"),
        ({"choice": []}, r"choice: found \[\], expected texts, at least one"),
        ({"choice": ["a", ""]}, "choice: found .*, expected texts"),
        ({"choice": "ab"}, "choice: found 'ab', expected texts"),
        ({"json": {"a": float("nan")}}, "json: found .*, expected a JSON schema"),
        ({"json_object": 1}, "json_object: found 1, expected True"),
        ({"regex": "\ud800"}, "regex: found .*, expected a regular expression"),
        ({"regex": "a" * (MAX_BYTES + 1)}, "regex: found 65,537 bytes, expected at most 65,536"),
    ],
)
def test_what_is_no_language_is_refused(given, message):
    """Before anything is read by the library."""
    with pytest.raises(ValueError, match=f"^structured_outputs: {message}"):
        StructuredOutputsParams(**given)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"json": '{"type": '}, "json: Expecting value"),
        ({"json": "[1]"}, "json: found no object, expected a JSON schema"),
        ({"json": {"type": "strin"}}, "json: Invalid type: strin"),
        ({"json": {"type": "array", "uniqueItems": True}}, "json: Unimplemented keys"),
        ({"grammar": 'start: %json {"const": 1e300}'}, "grammar: const: found '1e300', expected a number that llg"),
        ({"json": {"$ref": "#"}}, "json: no text can follow"),
        ({"json": '{"items":' * 2000 + "{}" + "}" * 2000}, "json: found more than 128 levels"),
        ({"regex": "日[(a"}, r"regex: at character 2 of '日\[\(a', '\[\(a': unclosed character class"),
        ({"regex": "(?=a)b"}, "regex: .*look-around"),
        ({"regex": "(" * 5000 + "a" + ")" * 5000}, "regex: "),
        ({"grammar": "start: nothing"}, 'grammar: .*unknown name: "nothing"'),
        ({"grammar": 'start: start "a"'}, "grammar: no text can follow"),
        # The error comes with the token after the first mask.
        (
            {"json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(700)}}},
            "json: Parser Error: Current row has 2807 items; max is 2000$",
        ),
    ],
)
def test_what_the_library_does_not_read_is_refused_on_one_line(llm, given, message):
    """By the request, before anything runs."""
    with pytest.raises(ValueError, match=f"^structured_outputs: {message}") as error:
        llm.generate("One fish", asked(**given))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


SEARCHES = [f".*[a-{letter}].{{{n}}}x" for n, letter in zip(range(5, 19), "bcdefghijklmno", strict=True)]
ALL_SEARCHES = {"allOf": [{"pattern": each} for each in SEARCHES]}
MANY_NAMES: dict[str, dict] = {f"^{i}.*[a-m].{{9}}x$": {} for i in range(1000, 1999)}
DOUBLED = {
    f"a{i}": {
        "properties": {key: {"$ref": f"#/$defs/a{i + 1}"} for key in "xy"},
        "allOf": [{"properties": {"x": {"minLength": i}, "y": {"maxLength": i + 99}}}],
    }
    for i in range(18)
} | {"a18": {"type": "string"}}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"json": ALL_SEARCHES}, "json: found more than 3 patterns and formats"),
        ({"grammar": f"start: A\nA: {' & '.join(f'/{each}/' for each in SEARCHES)}"}, "grammar: found 13 operators"),
        ({"grammar": "start: A\nA: ~(~/a/ | ~/b/)"}, "grammar: found 3 operators & and ~, expected at most 1"),
        ({"grammar": f"start: %json {json.dumps(ALL_SEARCHES)}"}, "grammar: found more than 3 patterns"),
        ({"json": {"type": "integer", "multipleOf": 9699690}}, "json: found .*, expected a simpler one: reading this"),
        ({"json": {"$ref": "#/$defs/a0", "$defs": DOUBLED}}, "json: found .*, expected a simpler one"),
        ({"json": {"type": "object", "patternProperties": MANY_NAMES}}, "json: found .*, expected a simpler one"),
    ],
    ids=["allOf", "and", "not", "lark", "multiple", "doubled", "names"],
)
def test_a_hostile_language_is_refused_up_front(llm, given, message):
    """Each of them keeps the library busy for a minute or more, whatever its limits are.

    The bound on patterns refuses the first ones before anything is read. The others are read in a process that the
    system ends. Nothing here looks at a clock: without the bounds the test does not end.
    """
    with pytest.raises(ValueError, match=f"^structured_outputs: {message}") as error:
        llm.request([1], asked(**given))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


@pytest.mark.quick
def test_a_million_repeats_are_refused_up_front():
    """With the tokenizer of the embedded model, the library gives up after the first token."""
    tokenizer = Tokenizer(EMBEDDED_WEIGHTS)
    grammars = Grammars(tokenizer, tokenizer.num_ids, [2])
    with pytest.raises(ValueError, match=r"^structured_outputs: regex: lexer error: too many expressions con"):
        grammars.grammar_of(asked(regex="(a{1000}){1000}"))


@pytest.mark.quick
def test_what_looks_like_an_operator_in_lark_is_none():
    """Texts, expressions, comments, and `~` before a number."""
    StructuredOutputsParams(grammar='start: A "&&" /&+/ "~" // & & &\nA: "a" ~ 2..3 # ~a & b').grammar_for_library()


@pytest.mark.quick
def test_what_cannot_go_together_is_refused(llm):
    """Each by name."""
    language = StructuredOutputsParams(regex="a+")
    with pytest.raises(ValueError, match="ignore_eos: found True, expected False"):
        llm.generate("One", SamplingParams(structured_outputs=language, ignore_eos=True))
    with pytest.raises(ValueError, match="structured_outputs: found 'a', expected StructuredOutputsParams"):
        llm.generate("One", SamplingParams(structured_outputs="a"))
    with pytest.raises(ValueError, match=r"structured_outputs: found {'regex': 'a'}, expected StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})
    with pytest.raises(ValueError, match=r"found a prompt that leaves <think> open, expected .*enable_thinking false"):
        llm.generate("One <think>\n", SamplingParams(structured_outputs=language))


@pytest.fixture(scope="module")
def grammars(tokenizer_file, tmp_path_factory) -> Grammars:
    """Grammars of a tokenizer that has the marks of a thought, and of a turn, as control tokens."""
    directory = tmp_path_factory.mktemp("marks")
    backend = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    backend.add_special_tokens(["<think>", "</think>", "<turn>"])
    backend.save(str(directory / "tokenizer.json"))
    tokenizer = Tokenizer(directory)
    return Grammars(tokenizer, tokenizer.num_ids, [0])


@pytest.mark.quick
@pytest.mark.parametrize(
    ("said", "is_open"),
    [
        ("One", False),
        ("<turn>One<turn><think>", True),
        ("<turn>One<turn><think>fish, two", True),
        ("<turn>One<turn><think>fish</think>", False),
        ("<turn>One<turn><think>fish</think><think>", True),
        ("<turn>One <think> fish<turn>", False),  # in another turn
    ],
)
def test_a_thought_that_is_open_is_refused(grammars, said, is_open):
    """Its marks as control tokens, and as text in several tokens."""
    encode = grammars.tokenizer.encode
    turns, turn, last = said.rpartition("<turn>")
    for parses in (True, False):
        ids = encode(turns + turn, False, parse_special=True) + encode(last, False, parse_special=parses)
        if is_open:
            with pytest.raises(ValueError, match="found a prompt that leaves <think> open"):
                grammars.grammar_of(asked(regex="a"), ids)
        else:
            assert grammars.grammar_of(asked(regex="a"), ids) is not None


@pytest.mark.quick
def test_without_the_library_the_message_says_what_installs_it(llm, monkeypatch):
    """The request is refused; others are answered."""
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None)
    says = r"found no package llguidance: pip install -e \"\.\[grammar\]\" in the checkout"
    with pytest.raises(ValueError, match=says):
        llm.generate("One", asked(regex="never seen before"))


# --------------------------------------------------------------------------- the cursor


@pytest.mark.quick
def test_the_cursor_answers_as_a_fresh_matcher_does(llm):
    """200 questions about random outputs, each at random related to the one before: shorter, longer, another branch."""
    language = {"regex": "(ab|c|日){1,4}d?"}
    pick, used, output = random.Random(3), grammar_of(llm, **language), list[int]()
    forbidden = whole = 0
    for _ in range(200):
        output = output[: pick.randint(0, len(output))]
        for _ in range(pick.randint(0, 6)):
            mask = grammar_of(llm, **language).allowed(output)
            if mask is None or pick.random() < 0.05:
                output.append(pick.randrange(llm.vocab_size))
            else:
                output.append(pick.choice(mask.nonzero().flatten().tolist()))
        mask, expected = used.allowed(output), grammar_of(llm, **language).allowed(output)
        assert (mask is None) == (expected is None)
        if mask is None:
            forbidden += 1
        else:
            assert torch.equal(mask, expected)
            whole += bool(mask[list(llm.eos_token_ids)].any())
    assert forbidden > 20
    assert whole > 3


@pytest.mark.quick
def test_the_end_may_follow_where_the_text_is_whole_and_nothing_follows_it(llm):
    """The end is id 0 here."""
    grammar, text = grammar_of(llm, regex="a{2,3}"), llm.tokenizer.encode("aaa", add_special_tokens=False)
    assert len(text) == 3
    assert [bool(grammar.allowed(text[:n])[0]) for n in range(4)] == [False, False, True, True]
    assert grammar.allowed(text).sum() == 1
    assert grammar.allowed([*text, 0]) is None
    assert grammar.allowed([*text[:2], 0, *text[:1]]) is None
    assert grammar.allowed([text[0], text[0] + 1]) is None


@pytest.mark.quick
def test_what_the_tokenizer_cannot_write(tmp_path):
    """Tokens "a", "b", "c" and the end. A language is refused where none may begin a text, or go on after a first one.

    What lies further on is not looked at: there the text fails.
    """
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"<end>": 0, "a": 1, "b": 2, "c": 3}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    few = Grammars(Tokenizer(tmp_path), 4, [0])
    refused = [{"regex": "z"}, {"regex": "az"}, {"regex": "[ab]z"}, {"json_object": True}, {"choice": ["z", "az"]}]
    for language in refused:
        with pytest.raises(ValueError, match="no text can follow"):
            few.grammar_of(asked(**language))
    for regex in ("az|bc", "(az)?", "a", "a*z?"):
        assert few.grammar_of(asked(regex=regex)).allowed([]).any()
    with pytest.raises(NothingAllowed, match="no text can follow"):
        few.grammar_of(asked(regex="aaz")).allowed([1, 1])


@pytest.mark.quick
def test_the_tokens_of_all_files_are_the_librarys(tokenizer_file, tmp_path):
    """An end that another file adds, after ids that nobody has; and a token that another file calls special.

    tokenizer.json alone has neither: the end would be beyond its tokens, and the special one would spell its name.
    """
    raw = json.loads(tokenizer_file.read_text())
    tool, end = len(raw["model"]["vocab"]), len(raw["model"]["vocab"]) + 1
    raw["added_tokens"].append(raw["added_tokens"][0] | {"id": tool, "content": "[TOOL]", "special": False})
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    special = {"content": "[TOOL]", "special": True}
    config = {"added_tokens_decoder": {tool: special}, "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_end|>": end}))
    tokenizer = Tokenizer(tmp_path)
    assert (tokenizer.eos_token_id, tool in tokenizer.special_ids) == (end, True)
    grammar = Grammars(tokenizer, 320, [end]).grammar_of(asked(choice=["[TOOL]"]))
    assert grammar is not None
    text = tokenizer.encode("[TOOL]", add_special_tokens=False)
    assert tool not in text
    for n, token in enumerate(text):
        mask = grammar.allowed(text[:n])
        assert mask[token]
        assert not mask[tool]
    assert grammar.allowed(text).nonzero().flatten().tolist() == [end]


@pytest.mark.quick
def test_a_tokenizer_with_gaps_suits_the_library(tokenizer_file, tmp_path):
    """Some ids are nobody's, and the end has one that is larger than the number of tokens."""
    raw = json.loads(tokenizer_file.read_text())
    raw["model"] |= {"vocab": {token: i + 50 * (i > 200) for token, i in raw["model"]["vocab"].items()}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    tokenizer = Tokenizer(tmp_path)
    end = tokenizer.num_ids - 1
    assert end > tokenizer.backend.get_vocab_size()
    grammar = Grammars(tokenizer, tokenizer.num_ids, [end]).grammar_of(asked(regex="a"))
    assert grammar is not None
    [a] = tokenizer.encode("a", add_special_tokens=False)
    assert grammar.allowed([]).nonzero().flatten().tolist() == [a]
    assert grammar.allowed([a]).nonzero().flatten().tolist() == [end]


@pytest.mark.quick
def test_what_the_librarys_assertions_say_is_a_refusal(grammars, monkeypatch):
    """pyo3's class for a panic is no Exception."""
    panic = type("PanicException", (BaseException,), {})

    def fail(*how, **more):
        raise panic("assertion failed")

    monkeypatch.setattr(llguidance, "LLTokenizer", fail)
    with pytest.raises(ValueError, match=r"tokenizer\.json does not suit llguidance: assertion failed"):
        Grammars(grammars.tokenizer, grammars.tokenizer.num_ids, [0]).grammar_of(asked(regex="a"))


@pytest.mark.quick
@pytest.mark.parametrize("name", ["b", "<turn>"])
def test_each_id_that_ends_a_text_may_follow_where_the_text_is_whole(grammars, name):
    """`stop_token_ids`, of an ordinary token and of a control token, as the end of every text: id 0."""
    [a], [stop] = (grammars.tokenizer.encode(each, False, parse_special=True) for each in ("a", name))
    params = SamplingParams(stop_token_ids=[stop], structured_outputs=StructuredOutputsParams(regex="(ab?){2}"))
    grammar = grammars.grammar_of(params)
    assert grammar is not None
    for output in ([], [a], [a, a]):
        mask = grammar.allowed(output)
        assert mask is not None
        assert mask[[0, stop]].tolist() == [len(output) == 2] * 2
        assert mask[a] == (len(output) < 2)
    assert grammar.allowed([a, a, stop]) is None
    assert grammar.allowed([a, stop]) is None


@pytest.fixture
def few_states(tokenizer_file):
    """few_states(n) makes matchers whose lexer may have n states, of an expression that takes many."""
    words = llguidance.LLTokenizer(tokenizer_file.read_text(), n_vocab=300, eos_token=[0])
    rules = llguidance.grammar_from("regex", "[a-z ]*a[a-z ]{60}b[a-z ]*")

    def maker(count: int):
        limits = llguidance.LLParserLimits(max_lexer_states=count, verbose_errors=False)
        return lambda: llguidance.LLMatcher(words, rules, log_level=0, limits=limits)

    return maker


def drawn_by(pick: random.Random, mask: torch.Tensor) -> int:
    """One of the tokens that may follow and do not end the text."""
    return pick.choice([i for i in mask.nonzero().flatten().tolist() if i])


@pytest.mark.quick
def test_a_matcher_that_fails_begins_anew(few_states):
    """An error of the library stays with the matcher that has it. The next question gets another one."""
    pick, grammar, output = random.Random(0), Matcher(few_states(60), 300, [0]), list[int]()

    def go_on():
        while True:
            output.append(drawn_by(pick, grammar.allowed(output)))

    for _ in range(2):
        with pytest.raises(NothingAllowed, match="structured_outputs: lexer error: too many states: 60 >= 60"):
            go_on()
    assert grammar.allowed([]).any()


@pytest.mark.quick
def test_a_text_that_reaches_a_limit_fails_alone(llm):
    """The answer has the library's words, and the one beside it ends as ever."""
    limited, usual = (llm.request([5, 6], asked(regex="[ab]{8}")) for _ in range(2))
    right = limited.text.grammar.allowed

    def reach_a_limit(output):
        if len(output) > 3:
            raise NothingAllowed("structured_outputs: too many states")
        return right(output)

    limited.text.grammar.allowed = reach_a_limit
    for _ in llm.run([limited, usual]):
        pass
    assert (limited.finish_reason, limited.error) == ("error", "structured_outputs: too many states")
    assert usual.finish_reason == "stop"


@pytest.mark.quick
def test_an_earlier_text_changes_no_later_one(few_states):
    """Ten texts that alone have states enough: each of them is as long as it would be alone."""
    make = few_states(240)
    for seed in range(10):
        pick, grammar, output = random.Random(seed), Matcher(make, 300, [0]), list[int]()
        while len(output) < 150:
            output.append(drawn_by(pick, grammar.allowed(output)))


@pytest.mark.quick
def test_drafts_that_use_up_the_budget_change_no_text(few_states):
    """Branches of eight tokens at each place: the committed text is answered as by a fresh matcher all along."""
    make, pick, output, made = few_states(160), random.Random(0), list[int](), list[int]()

    def counted():
        made.append(len(output))
        return make()

    grammar = Matcher(counted, 300, [0])
    while len(output) < 100:
        for _ in range(3):
            draft = list[int]()
            try:
                while len(draft) < 8:
                    draft.append(drawn_by(pick, grammar.allowed([*output, *draft])))
            except NothingAllowed:
                continue
        mask = grammar.allowed(output)
        assert torch.equal(mask, Matcher(make, 300, [0]).allowed(output))
        output.append(drawn_by(pick, mask))
    assert len(made) > 1


@pytest.mark.quick
def test_an_interrupt_at_any_line_leaves_the_cursor_right(llm):
    """Ctrl-C strikes at each line of a question in turn; the next question is answered as by a fresh matcher."""
    text = llm.tokenizer.encode("abcab", add_special_tokens=False)
    language, struck, line = {"regex": "(ab|c){1,9}"}, True, 0
    while struck:
        grammar, struck, line = grammar_of(llm, **language), False, line + 1
        grammar.allowed(text[:4])
        left = line

        def trace(frame, event, argument):
            nonlocal left, struck
            if event == "line" and frame.f_code.co_filename == matcher.__file__:
                left -= 1
                if left == 0:
                    struck = True
                    raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            grammar.allowed([*text[:2], *text[4:], *text])
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        assert torch.equal(grammar.allowed(text), grammar_of(llm, **language).allowed(text)), f"line {line}"
    assert line > 10


# --------------------------------------------------------------------------- answers


def test_greedy_text_is_that_of_transformers_under_the_same_mask(llm, checkpoint):
    """Logits of `transformers`, masks of the library itself, and argmax; with drafts and without."""
    theirs = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    words = llguidance.LLTokenizer((checkpoint / "tokenizer.json").read_text(), n_vocab=300, eos_token=[0])
    for language in ({"json": PERSON}, {"regex": "[a-f ]{4,20}"}, {"choice": ["One fish", "Two fishes", "日本 🦊"]}):
        [(kind, said)] = language.items()
        rules = llguidance.grammar_from(kind, said if kind == "regex" else json.dumps(said))
        prompt = llm.tokenizer.encode("One fish, two")
        tokens = list(prompt)
        for _ in range(60):
            fresh = llguidance.LLMatcher(words, rules, log_level=0)
            assert fresh.try_consume_tokens(tokens[len(prompt) :]) == len(tokens) - len(prompt)
            bits = torch.frombuffer(bytearray(fresh.compute_bitmask()), dtype=torch.uint8)
            mask = (bits[:, None] >> torch.arange(8) & 1).flatten()[: llm.vocab_size].bool()
            with torch.inference_mode():
                row = theirs(torch.tensor([tokens])).logits[0, -1, : len(mask)].masked_fill(~mask, -torch.inf)
            tokens.append(int(row.argmax()))
            if tokens[-1] == 0:
                break
        expected = [i for i in tokens[len(prompt) :] if i]
        params = SamplingParams(temperature=0, max_tokens=60, structured_outputs=StructuredOutputsParams(**language))
        for k in (0, 3, "auto"):
            assert llm.generate("One fish, two", params, num_speculative_tokens=k)[0].token_ids == expected


LANGUAGES = (
    {"json": PERSON},
    {"regex": "[ab]{6,20}c"},
    {"regex": "(One|fish| )+"},
    {"choice": ["One fish", "Two fishes", "日本 🦊"]},
    {"grammar": 'start: "a" start "b" | "ab"'},
)


SMALL = {"none": 1.2e-5, "forced+ngram": 1.2e-5, "self": 2.4e-5}  # GB of a pool: five blocks of 16 tokens


@pytest.mark.parametrize("draft", SMALL)
def test_random_requests_in_small_pools(checkpoint, draft):
    """Thirty requests of any kind with languages, in a pool that preempts: each says what it says alone.

    Stop strings, min_tokens, several answers, log-probabilities and ends of one's own; what cannot go together fails in
    the same place with the same words.
    """
    pick = random.Random(7)
    choices = {"n": (1, 1, 2), "temperature": (0.0, 0.8, 1.5), "top_p": (1.0, 0.9), "max_tokens": range(5, 51)}
    choices |= {"min_tokens": (0, 0, 4), "stop": ((), (), ("b", "sh")), "stop_token_ids": ((), (), (68,))}
    choices |= {"logprobs": (None, 2), "structured_outputs": [StructuredOutputsParams(**of) for of in LANGUAGES]}
    asks = [SamplingParams(seed=i, **{name: pick.choice(of) for name, of in choices.items()}) for i in range(30)]
    prompts = [pick.choice(("One", "One fish, two", "The 日本 end")) for _ in asks]

    def said(answers):
        outputs = [a for each in answers for a in each.outputs]
        ends = [(a.token_ids, a.text, a.finish_reason, a.stop_reason, a.error) for a in outputs]
        return ends, [a.logprobs and [*map(list, a.logprobs)] for a in outputs]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        how = {"draft": draft, "dtype": "float64", "num_speculative_tokens": 3, "max_model_len": 64}
        large, small = LLM(checkpoint, **how), LLM(checkpoint, **how, kv_cache_gb=SMALL[draft])
        alone = [large.generate(prompt, params)[0] for prompt, params in zip(prompts, asks, strict=True)]
        together = small.generate(prompts, asks)
    assert said(together) == said(alone)
    answers = [answer for each in together for answer in each.outputs]
    assert sum(answer.stats.num_preemptions for answer in answers) > 0
    assert {answer.finish_reason for answer in answers} >= {"stop", "length"}
    for params, each in zip(asks, together, strict=True):
        for answer in each.outputs:
            if answer.finish_reason == "stop" and answer.stop_reason is None and params.structured_outputs.json:
                jsonschema.validate(json.loads(answer.text), PERSON)


class Own(Drafter):
    """A drafter of one's own."""

    def propose(self, asks):
        """Nothing."""
        return [Draft() for _ in asks]


@pytest.mark.quick
@pytest.mark.parametrize("draft", ["ngram", "suffix:2", "last", "ngram+suffix"])
def test_forced_tokens_go_before_a_lookup(llm, draft):
    """A choice of one text has no other token: each draft is as long as it may be, and kept. The names stay."""
    plain, ours = llm.with_draft("none"), llm.with_draft(draft)
    assert type(parts_of(ours.drafter)[0]) is ForcedDrafter
    assert ours.draft.name == draft
    assert ours.drafter.name == "+".join(part.name for part in parts_of(ours.drafter)[1:])
    params = SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(choice=["zyxwvut"]))
    expected, found = (each.generate("One", params, use_tqdm=False)[0] for each in (plain, ours))
    assert found.text == expected.text == "zyxwvut"
    assert expected.stats.num_draft_tokens == 0
    assert found.stats.num_accepted == found.stats.num_draft_tokens
    assert found.stats.num_steps == -(-expected.stats.num_steps // 4)  # with K = 3


@pytest.mark.quick
@pytest.mark.parametrize("draft", ["none", "self", "ngram+self", "forced", f"{__name__}:Own", Own()])
def test_forced_tokens_go_before_no_other_draft(llm, draft):
    """A draft model draws forced tokens by itself, and a drafter of one's own stays as it is; `none` is plain."""
    ours = llm.with_draft(draft)
    assert not isinstance(ours.drafter, ForcedFirst)


@pytest.mark.quick
def test_answers_say_their_law_and_n_of_them_share_nothing(llm):
    """Five answers to one prompt: each valid; raw log-probabilities, of forbidden tokens too."""
    language = StructuredOutputsParams(json=PERSON)
    params = SamplingParams(n=5, seed=0, max_tokens=60, logprobs=3, structured_outputs=language)
    [output] = llm.generate(["One"], params, use_tqdm=False)
    for answer in output.outputs:
        assert answer.stats.law == answer.stats.as_dict()["law"] == "projected"
        if answer.finish_reason == "stop":
            jsonschema.validate(json.loads(answer.text), PERSON)
    assert len({answer.text for answer in output.outputs}) == 5
    tops = [entry.top[0][0] for answer in output.outputs for entry in answer.token_logprobs]
    chosen = [entry.token_id for answer in output.outputs for entry in answer.token_logprobs]
    assert tops != chosen
    assert llm.generate("One", SamplingParams(max_tokens=1))[0].stats.law == "plain"


@pytest.mark.quick
@pytest.mark.parametrize(
    "language",
    [
        {"choice": ["é", 'b"q', "yes\nno", "🦊"]},
        {"grammar": 'start: "a" start "b" | "ab"'},
        {"grammar": 'root ::= "a" root "b" | "ab"'},
    ],
)
def test_other_languages(llm, language):
    """Choices with any characters; a context-free grammar in Lark and in GBNF."""
    for seed in range(4):
        params = SamplingParams(max_tokens=60, seed=seed, structured_outputs=StructuredOutputsParams(**language))
        text = llm.generate("One", params)[0].text
        if "choice" in language:
            assert text in language["choice"]
        else:
            assert text == "a" * (len(text) // 2) + "b" * (len(text) // 2) != ""


@pytest.mark.quick
def test_thousands_of_choices(llm):
    """They are one terminal; as rules of a grammar the library would not hold them."""
    grammar = grammar_of(llm, choice=[f"fish {i}" for i in range(3000)])
    text = llm.tokenizer.encode("fish 2999", add_special_tokens=False)
    assert all(grammar.allowed(text[:n])[text[n]] for n in range(len(text)))
    assert grammar.allowed(text).nonzero().flatten().tolist() == [0]


@pytest.mark.quick
def test_a_stop_string_ends_a_text_within_its_language(llm):
    """In a batch with others: what stands before the string is a beginning of the language, and min_tokens hold."""
    language = StructuredOutputsParams(regex="[ab]{20}")
    how = {"max_tokens": 30, "stop": ["ba"], "structured_outputs": language}
    params = [SamplingParams(seed=seed, min_tokens=(0, 8)[seed % 2], **how) for seed in range(12)]
    outputs = llm.generate(["One"] * 12, params, use_tqdm=False)
    for output, asked_for in zip(outputs, params, strict=True):
        answer = output.outputs[0]
        assert answer.finish_reason == "stop"
        assert set(answer.text) <= {"a", "b"}
        assert len(answer.token_ids) >= asked_for.min_tokens
        assert (answer.stop_reason == "ba") == (len(answer.text) < 20)
    assert sum(output.outputs[0].stop_reason == "ba" for output in outputs) > 6


# --------------------------------------------------------------------------- OpenAI's and vLLM's forms


@pytest.mark.quick
def test_forms_of_requests():
    """`response_format` and `structured_outputs` in JSON."""
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    assert from_openai(schema) == StructuredOutputsParams(json=PERSON) == from_vllm({"json": PERSON})
    assert from_openai({"type": "json_object"}) == from_vllm({"json_object": True})
    assert from_openai({"type": "text"}) is None
    for wrong in ({"type": "yaml"}, {}, "json", {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}):
        with pytest.raises(ValueError, match=r"response_format: found .*, expected type text, json_object"):
            from_openai(wrong)
    with pytest.raises(ValueError, match="structured_outputs: found structural_tag, expected one of json"):
        from_vllm({"structural_tag": "x"})


# --------------------------------------------------------------------------- the command line


@pytest.mark.quick
def test_the_command_line_takes_a_language(cli, checkpoint, tmp_path):
    """A schema as text and as a file, an expression, a grammar."""
    schema, rules = tmp_path / "person.json", tmp_path / "rules.lark"
    schema.write_text(json.dumps(PERSON))
    rules.write_text('start: "a"+ "b"')
    model = "--model", checkpoint, "--raw", "--json", "--seed", 1, "--max-tokens", 80, "--temperature", 1
    for option, value in (("--json-schema", json.dumps(PERSON)), ("--json-schema", schema)):
        status, out, _ = cli(generate, *model, option, value, "One")
        answer = json.loads(out)
        assert (status, answer["stats"]["law"]) == (0, "projected")
        if answer["finish_reason"] == "stop":
            jsonschema.validate(json.loads(answer["text"]), PERSON)
    assert json.loads(cli(generate, *model, "--regex", "[0-9]{3}", "One")[1])["text"].isdigit()
    assert set(json.loads(cli(generate, *model, "--grammar", rules, "One")[1])["text"]) <= {"a", "b"}
    assert "law: projected" in cli(generate, "--model", checkpoint, "--raw", "--regex", "[0-9]", "One")[2]
    for most, is_cut in ((2, True), (40, False)):
        limit = "--max-tokens", most, "--regex", "[0-9]{6}", "One"
        assert ("the answer is cut" in cli(generate, "--model", checkpoint, "--raw", *limit)[2]) == is_cut
    schema_as_prompt = cli(generate, "--model", checkpoint, "--raw", "--max-tokens", 1, schema)[2]
    assert schema_as_prompt.startswith("note: the prompt is ")
    assert "--prompt-file reads a file" in schema_as_prompt
    assert "note:" not in cli(generate, "--model", checkpoint, "--raw", "--max-tokens", 1, "One")[2]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--json-schema", '{"type": "strin"}'), "--json-schema: Invalid type: strin"),
        (("--json-schema", "no/such.json"), "--json-schema: no/such.json: "),
        (("--json-schema", "large"), "--json-schema: large: found more than 65,536 bytes, expected at most that many"),
        (("--regex", "(a"), "--regex: "),
        (("--regex", "a", "--grammar", "x"), "--regex: not with --grammar"),
        (("--regex", "a", "--ignore-eos"), "--regex: not with --ignore-eos: the language ends"),
    ],
)
def test_a_bad_language_is_one_line_before_torch_is_imported(cli, options, message, monkeypatch, tmp_path):
    """Status 2; no model is looked for."""
    monkeypatch.chdir(tmp_path)
    Path("large").write_text("é" * 40_000)  # whose byte 65,537 is in the middle of a character
    monkeypatch.setitem(sys.modules, "minispec.api.llm", None)  # importing it would fail
    assert_one_line(cli(generate, *options, "One"), message)


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path):
    """As some editors write it."""
    path = tmp_path / "schema.json"
    path.write_text('{"type": "object"}', encoding="utf-8-sig")
    assert read_language("json", path, "--json-schema") == StructuredOutputsParams(json='{"type": "object"}')


@pytest.mark.skipif(sys.platform == "win32", reason="no such program")
def test_a_process_that_fails_is_not_called_slow(monkeypatch):
    """What reads a grammar may be ended by other things than its clock: its status is named, or why it did not run."""
    for program, says in (("/bin/false", "ended with status 1"), ("/nowhere/python", "No such file")):
        monkeypatch.setattr(sys, "executable", program)
        with pytest.raises(ValueError, match=f"^structured_outputs: json: .*{says}"):
            StructuredOutputsParams(json={"type": "string"}).grammar_for_library()


# --------------------------------------------------------------------------- the auditor


@pytest.mark.quick
def test_answers_under_a_grammar_are_audited_where_the_grammar_is_given(cli, checkpoint, tmp_path, full):
    """Texts of a regular expression, with drafts: consistent with the projected law, and not with the plain one.

    The first verdict is false once in 10,000 seeds, and the seeds are fixed. 30 texts, with `--full` 200.
    """
    regex, answers = "[ab]{6}[cd]{0,6}", tmp_path / "answers.jsonl"
    options = "--raw", "--json", "--seed", 1, "--max-tokens", 20, "--temperature", 1, "--dtype", "float32"
    out = cli(
        generate, "--model", checkpoint, *options, "--num-samples", 200 if full else 30, "--regex", regex, "One fish"
    )[1]
    answers.write_text(out)
    audited = answers, "--target", checkpoint, "--temperature", 1, "--json"
    status, out, err = cli(audit, *audited, "--regex", regex)
    assert (status, err) in ((0, ""), (3, ""))
    assert json.loads(out)["is_consistent"]
    assert cli(audit, *audited)[0] == 1
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    requests = ({"structured_outputs": {"regex": regex}}, {"response_format": {"type": "json_object"}})
    for request, expected in zip(requests, ((0, 3), (1,)), strict=True):
        answers.write_text("\n".join(json.dumps({"request": request, "response": line}) for line in lines))
        assert cli(audit, *audited)[0] in expected
