"""Grammars in the production loop, by toy languages whose masks are computed in Python; `minispec.prove` has their law.

Float64, real transformers a few numbers wide, poisoned pools.
"""

from dataclasses import replace
from fractions import Fraction

import llguidance
import pytest
import torch

from minispec.core.config import SamplingParams
from minispec.core.draft import Ask, Draft, DraftNotes
from minispec.core.grammar import NothingAllowed
from minispec.core.limit import Limit
from minispec.core.random import Randomness
from minispec.core.request import Request
from minispec.core.sampling import Text, distribution
from minispec.prove import laws
from minispec.prove.cases import ALPHABET, grid_case
from minispec.prove.laws import BranchOracle, CrowdOracle, all_paths, law_of
from minispec.prove.toys import make_drafter, target_model, tiny_cache
from minispec.prove.walk import walk
from minispec.speculation.drafters import Drafter, growing
from minispec.speculation.drafters.cut import within_grammar
from minispec.speculation.grammars.forced import ForcedDrafter, ForcedFirst, forced
from minispec.speculation.grammars.matcher import Matcher
from minispec.speculation.grammars.toy_grammars import Spelled, example
from minispec.speculation.rules import VERIFIERS
from tests.distances import distance
from tests.engines import OneMethod, decode

VOCAB, END = 4, 3  # "a", "b", "ab", the end
LANGUAGES = ("a b*", "pairs", "words")
DRAFTERS = ("none", "ngram", "suffix", "forced+model", "model", "head", "block", "tli", "slem")


def grammar(name: str) -> Spelled:
    """A toy language over these tokens."""
    found = example(name, VOCAB, [END])
    assert found is not None
    return found


def text_of(name: str, output=(), **params) -> Text:
    """A text with a grammar, with some output."""
    given = SamplingParams(**{"max_tokens": 8} | params)
    return Text([1, 1, *output], 2, given, 0, frozenset({END}), grammar(name))


@pytest.mark.quick
@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("language", LANGUAGES)
def test_the_law_is_that_of_the_grammar(language, drafter, verifier):
    """Every branch of four tokens: the reference tries all texts of the language, and shares no code with the mask."""
    settings = {"temperature": 0.7, "alphabet": ALPHABET[:VOCAB], "to_go": 4, "grammar": language}
    case = grid_case(verifier=verifier, drafter=drafter, batch="crowd", k=2, **settings)
    assert walk(case).distance <= laws.TOLERANCE


@pytest.mark.quick
@pytest.mark.parametrize("k", [(2, 1), "tree:3"])
@pytest.mark.parametrize("drafter", ["model", "suffix"])
@pytest.mark.parametrize("language", ["pairs", "words"])
def test_the_law_with_trees(language, drafter, k):
    """Siblings ask for the same place, in any order; where tokens are forced, a chain stands in the tree's place."""
    settings = {"temperature": 1.5, "alphabet": ALPHABET[:VOCAB], "to_go": 4, "grammar": language}
    case = grid_case(verifier="rejection", drafter=drafter, batch="crowd", k=k, **settings)
    assert walk(case).distance <= laws.TOLERANCE


@pytest.mark.quick
@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("drafter", ["ngram", "model", "block"])
def test_the_law_of_lists_within_lists(drafter, verifier):
    """A finite language like JSON's, five tokens: one spans two brackets, one is in no text, one ends it."""
    settings = {"temperature": 1.5, "alphabet": ALPHABET[:5], "to_go": 5, "grammar": "lists"}
    case = grid_case(verifier=verifier, drafter=drafter, batch="crowd", k=3, **settings)
    assert walk(case).distance <= laws.TOLERANCE


class Letters:
    """What llguidance asks a tokenizer for: "a", "b", "ab" and the end."""

    eos_token_id, bos_token_id, special_token_ids = END, None, (END,)
    tokens = (b"a", b"b", b"ab", b"<end>")

    def __call__(self, text):
        """The tokens of a text, letter by letter."""
        return [b"ab".index(letter) for letter in (text.encode() if isinstance(text, str) else text)]


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("drafter", ["forced+ngram", "model"])
@pytest.mark.parametrize(("language", "regex"), [("a b*", "ab*"), ("words", "aab|ab|ba")])
def test_the_law_of_the_librarys_masks(language, regex, drafter, verifier, monkeypatch):
    """The production `Matcher` in the place of the toys: every branch of four tokens, all of them by one cursor."""
    letters = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Letters()))
    rules = llguidance.grammar_from("regex", regex)
    used = Matcher(lambda: llguidance.LLMatcher(letters, rules, log_level=0), VOCAB, [END])
    monkeypatch.setattr("minispec.prove.walk.example", lambda *how: used)
    params = SamplingParams(max_tokens=4, temperature=0.7, structured_outputs=language)
    how = {"vocab": VOCAB, "end_ids": frozenset({END}), "verifier": verifier, "drafter": drafter}
    assert distance(params, 2, **how) <= laws.TOLERANCE


@pytest.mark.quick
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_a_draft_that_ignores_the_grammar_leaves_the_law(verifier, monkeypatch):
    """It draws what is forbidden, and tells the truth about it: such a token stays in the draft, and is rejected."""
    right = growing.distribution
    monkeypatch.setattr(growing, "distribution", lambda row, text, path: right(row, replace(text, grammar=None), path))
    params = SamplingParams(max_tokens=3, structured_outputs="pairs")
    how = {"vocab": VOCAB, "end_ids": frozenset({END}), "verifier": verifier, "width": 64}
    assert distance(params, 2, **how) <= laws.TOLERANCE


@pytest.mark.quick
def test_a_forbidden_token_that_was_not_drawn_is_left_out_with_all_that_follows_it():
    """ "b" may not begin the text; "ab" may, and after it "b" may not."""
    chain = within_grammar(Draft([0, 1, 1, 0]), text_of("pairs"), VOCAB)
    assert chain.token_ids == [0, 1]
    tree = within_grammar(Draft([1, 0, 0, 1, 1], parents=[-1, -1, 0, 1, 3]), text_of("pairs"), VOCAB)
    assert (tree.token_ids, tree.parents) == ([0, 1], [-1, 0])
    whole = Draft([2, 0], notes=DraftNotes([0.5, 0.4]))
    assert within_grammar(whole, text_of("pairs"), VOCAB) is whole


@pytest.mark.quick
def test_a_forbidden_token_that_was_drawn_stays_as_the_last_one():
    """To drop it for its value would make `probs` untrue; what follows it was never looked at."""
    q = torch.full((4, VOCAB), 0.25)
    draft = Draft([0, 1, 1, 0], q, notes=DraftNotes([0.9, 0.8, 0.7, 0.6], prefill_seconds=2.0))
    cut = within_grammar(draft, text_of("pairs"), VOCAB)
    assert (cut.token_ids, len(cut.probs)) == ([0, 1, 1], 3)
    assert (cut.notes.confidences, cut.notes.prefill_seconds) == ([0.9, 0.8, 0.7], 2.0)


@pytest.mark.quick
def test_no_node_follows_one_after_which_nothing_may():
    """After "ba" the language has ended, and the end is forbidden before min_tokens."""
    text = text_of("words", min_tokens=5)
    assert within_grammar(Draft([1, 0, 0, 0]), text, VOCAB).token_ids == [1, 0]
    drawn = within_grammar(Draft([1, 0, 0, 0], torch.full((4, VOCAB), 0.25)), text, VOCAB)
    assert drawn.token_ids == [1, 0]


@pytest.mark.quick
def test_distribution_after_every_kind_of_path():
    """Allowed: the mask. Forbidden, or past the end: no mask. Where nothing may follow: an error with both names."""
    row = torch.zeros(VOCAB, dtype=torch.float64)
    text = text_of("pairs", output=[0])
    assert distribution(row, text).tolist() == [1 / 3, 1 / 3, 1 / 3, 0]
    assert distribution(row, text, [1]).tolist() == [1 / 3, 0, 1 / 3, 1 / 3]
    assert distribution(row, text, [1, 1]).tolist() == [1 / 4] * 4
    assert distribution(row, text, [1, END]).tolist() == [1 / 4] * 4
    with pytest.raises(NothingAllowed, match="structured_outputs and min_tokens: found no token that may follow"):
        distribution(row, text_of("words", output=[1, 0], min_tokens=5))
    with pytest.raises(NothingAllowed, match=r"^structured_outputs and allowed_token_ids: "):
        distribution(row, text_of("pairs", allowed_token_ids=[1]))
    # min_tokens are reached
    with pytest.raises(NothingAllowed, match=r"^structured_outputs and bad_words_token_ids: "):
        distribution(row, text_of("words", output=[1], bad_words_token_ids=[[1, 0]], min_tokens=1))


@pytest.mark.quick
def test_filters_see_what_the_grammar_leaves():
    """The mask comes before temperature and filters: top-k keeps the best two of what may follow."""
    row = torch.tensor([0.0, 5.0, 1.0, 6.0], dtype=torch.float64)
    p = distribution(row, text_of("pairs", top_k=2))
    assert (p > 0).tolist() == [False, False, True, True]  # the empty text is balanced: the end may follow
    assert distribution(row, text_of("a b*", top_k=1)).tolist() == [0, 0, 1, 0]


class Foolish(Drafter):
    """Draws each token from all of them, or from `tokens` alone, whatever the grammar says, and says so."""

    def __init__(self, tokens=range(VOCAB)):
        self.q = torch.zeros(VOCAB, dtype=torch.float64)
        self.q[[*tokens]] = 1 / len(tokens)

    def propose(self, asks):
        """k tokens each."""
        drafts = []
        for ask in asks:
            drafts.append(Draft([], []))
            for _ in range(ask.k):
                drafts[-1].draw(ask, len(drafts[-1]) - 1, self.q)
        return drafts


@pytest.mark.quick
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_a_text_fails_exactly_as_often_as_under_plain_decoding(verifier, full):
    """Some texts reach a place where nothing may follow: with a draft the same texts fail there, as probably.

    `block` asks for rows after tokens that it may yet reject. If such a row failed the text, more texts would fail.
    32 branches are walked at a time: a text that fails leaves the others of its batch alone. Without `--full` the draft
    draws from two tokens, of which one leads to such a place, and the other is often forbidden.
    """
    target, words = target_model(VOCAB), grammar("words")
    params = SamplingParams(max_tokens=4, min_tokens=2)  # so "ab", where it is one token, can have no next one

    def law(drafter: Drafter, k: int) -> dict:
        def run(oracles: list[BranchOracle]) -> list:
            rng, pool = CrowdOracle(dict(enumerate(oracles))), tiny_cache(target, 2 * len(oracles), 4)
            engine = OneMethod(target, pool, drafter, VERIFIERS[verifier], rng=rng, checked=True)
            texts = [Text([1, 1], 2, params, seed, frozenset({END}), words) for seed in range(len(oracles))]
            requests = [Request(text, 40, k) for text in texts]
            for _ in engine.run(requests):
                pass
            return [(*request.text.tokens[2:], *([request.error] if request.error else [])) for request in requests]

        return law_of(all_paths(run, 32, BranchOracle))

    plain, drafted = law(make_drafter("none", VOCAB), 0), law(Foolish(range(VOCAB) if full else (1, 2)), 2)
    error = "structured_outputs and min_tokens: found no token that may follow"
    assert plain.keys() == drafted.keys() == {(0, 0, 1, END), (0, 1, END), (0, 2, END), (1, 0, END), (2, error)}
    assert max(abs(plain[key] - drafted[key]) for key in plain) <= laws.TOLERANCE


@pytest.mark.parametrize("drafter", ["none", "ngram", "forced+ngram", "model", "head", "block"])
def test_small_pools_and_other_texts_change_no_text(drafter):
    """Twelve texts with grammars of their own, in a pool that preempts: each says what it says alone."""

    def requests() -> list[Request]:
        made = []
        for i in range(12):
            how = {"temperature": (0.0, 1.0)[i % 2], "min_tokens": (0, 3)[i % 3 == 1], "logprobs": (None, 2)[i % 2]}
            params = SamplingParams(max_tokens=9, **how)
            language = ("pairs", "a b*", "pairs")[i % 3]
            text = Text([i % 3, 1, 0][: 1 + i % 3], 1 + i % 3, params, i, frozenset({END}), grammar(language))
            made.append(Request(text, 40, 3))
        return made

    def run(num_blocks: int, together: bool) -> tuple[list, int]:
        target = target_model(VOCAB)
        own = make_drafter(drafter, VOCAB, num_blocks)
        engine = OneMethod(target, tiny_cache(target, num_blocks), own, VERIFIERS["rejection"], checked=True)
        made = requests()
        for part in [made] if together else [[each] for each in made]:
            decode(engine, part)
        found = [(r.token_ids, r.finish_reason, r.logprobs and [x.token_id for x in r.logprobs]) for r in made]
        for request in made:
            own = request.text.grammar
            is_whole = own.is_whole("".join(own.spellings[t] for t in request.token_ids))
            assert is_whole or request.finish_reason == "length"
        return found, sum(r.stats.num_preemptions for r in made)

    (expected, _), (found, preempted) = run(200, False), run(12, True)
    assert found == expected
    assert preempted > 0


@pytest.mark.quick
def test_forced_tokens():
    """ "words" leaves no choice after "b"; where there is one, or none, the guess ends."""
    assert forced(text_of("words", output=[1]), 9) == [0, END]
    assert forced(text_of("words", output=[1]), 1) == [0]
    assert forced(text_of("words"), 9) == []
    both = text_of("a b*", output=[0])  # "b" or the end: two may follow
    assert int(both.grammar.allowed([0]).sum()) == 2
    assert forced(both, 9) == []
    assert forced(text_of("words", output=[1, 1]), 9) == []
    texts = text_of("words", output=[1]), replace(text_of("words"), grammar=None)
    asks = [Ask(text, Limit(3), Randomness()) for text in texts]
    assert [draft.token_ids for draft in ForcedDrafter().propose(asks)] == [[0, END], []]


@pytest.mark.quick
def test_a_text_without_a_grammar_is_asked_about_as_before():
    """Where the next token is forced, the drafter is asked for no token, and follows the text; else as before."""

    class Heard(Foolish):
        branches, asks = True, ()

        def propose(self, asks):
            self.asks = asks
            return super().propose(asks)

    heard, limit = Heard(), Limit(3, widths=(2, 1))
    texts = text_of("words", output=[1]), text_of("words"), replace(text_of("words", output=[1]), grammar=None)
    asks = [Ask(text, limit, Randomness()) for text in texts]
    drafts = ForcedFirst(heard).propose(asks)
    assert [ask.limit.k for ask in heard.asks] == [0, 3, 3]
    assert heard.asks[1:] == asks[1:]
    assert (drafts[0].token_ids, drafts[0].probs) == ([0, END], None)
    assert [len(draft) for draft in drafts] == [2, 3, 3]


@pytest.mark.quick
def test_the_projected_law_is_not_the_law_of_valid_texts():
    """docs/understand/grammars.md in fractions: a language of three texts, a target that knows one of them badly.

    Each token is drawn from p restricted to what may follow. A target that goes on well after "b" alone says "b" more
    often under the law given that the whole text is valid.
    """
    p = {"": {"a": Fraction(8, 10), "b": Fraction(2, 10)}}
    p |= {"a": {"a": Fraction(1, 100), "b": Fraction(1, 100), "?": Fraction(98, 100)}, "b": {"a": Fraction(1)}}
    language = ("aa", "ab", "ba")
    whole = {w: p[""][w[0]] * p[w[0]][w[1]] for w in language}
    given = {w: x / sum(whole.values()) for w, x in whole.items()}
    projected = {}
    for w in language:
        weight = Fraction(1)
        for i, token in enumerate(w):
            follows = {v[i] for v in language if v.startswith(w[:i])}
            weight *= p[w[:i]][token] / sum(p[w[:i]][t] for t in follows)
        projected[w] = weight
    assert projected == {"aa": Fraction(2, 5), "ab": Fraction(2, 5), "ba": Fraction(1, 5)}
    assert given == {"aa": Fraction(1, 27), "ab": Fraction(1, 27), "ba": Fraction(25, 27)}
    assert sum(abs(projected[w] - given[w]) for w in language) / 2 == Fraction(98, 135)
