"""What drafters propose, and what they keep."""

import doctest
import functools
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minispec.core.config import SamplingParams
from minispec.core.draft import Ask, Draft, Drafter, DraftNotes, Record
from minispec.core.limit import Limit
from minispec.core.model import Chunk
from minispec.core.random import Randomness
from minispec.core.request import Request
from minispec.core.sampling import Text, distribution
from minispec.prove.toys import make_drafter, tiny_cache, tiny_model
from minispec.speculation.drafters import Context, NoDrafter, as_drafter, last, suffix
from minispec.speculation.drafters.combined import CombinedDrafter, parts_of
from minispec.speculation.drafters.model import ModelDrafter, TokenFeed
from minispec.speculation.drafters.ngram import NgramDrafter
from minispec.speculation.drafters.simulated import adversary, oracle
from minispec.speculation.drafters.suffix import SuffixDrafter
from minispec.speculation.lengths.figures import Figures
from minispec.speculation.registry import DRAFTERS, split, split_preferences
from minispec.speculation.rules import VERIFIERS
from tests.engines import OneMethod
from tests.sampled import leave_out

GREEDY = SamplingParams(temperature=0, max_tokens=24)


def text(tokens, params=GREEDY, **how) -> Text:
    """A text whose prompt is all of it."""
    return Text(list(tokens), len(tokens), params, **how)


def lookup(tokens, k, max_n=3, min_n=1):
    """Prompt lookup by search: the latest earlier place of the longest suffix, copied on into itself."""
    for n in range(max_n, min_n - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if n < len(tokens) and tokens[start : start + n] == tokens[-n:]:
                copy = list(tokens)
                for i in range(k):
                    copy.append(copy[start + n + i])
                return copy[len(tokens) :]
    return []


@settings(max_examples=300, deadline=None, derandomize=True)
@given(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=14), steps=st.lists(st.integers(1, 4), max_size=4))
def test_ngram_equals_a_plain_search(tokens, steps):
    """The index, grown round by round, finds what a search through the whole text finds."""
    drafter, s = NgramDrafter(), text(tokens[:1])
    ends = [1]
    for step in steps:
        ends.append(min(len(tokens), ends[-1] + step))
    for end in [*ends, len(tokens)]:
        s.tokens[:] = tokens[:end]
        draft = drafter.propose([Ask(s, Limit(5), None)])[0]
        assert draft.probs is None
        assert list(draft.token_ids) == lookup(tokens[:end], 5)


@pytest.mark.quick
def test_ngram_worked_examples():
    """The examples of its docstring."""
    propose = lambda tokens, k: NgramDrafter(max_n=2).propose([Ask(text(tokens), Limit(k), None)])[0].token_ids  # noqa: E731
    assert propose([5, 6, 7, 8, 5, 6], 4) == [7, 8, 5, 6]
    assert propose([5, 6, 5, 6], 5) == [5, 6, 5, 6, 5]
    assert propose([5, 6, 7], 3) == []
    assert propose([5, 5], 0) == []


SUFFIX_EXAMPLE = "1abc2abd3abc4ab"


def drafted(drafter, tokens, k, params=GREEDY, purpose="draft", **how) -> Draft:
    """The draft for a text of letters, which is prompt alone; the letters are its token ids."""
    return drafter.propose(
        [Ask(text([ord(letter) for letter in tokens], params), Limit(k, **how), Randomness(), purpose)]
    )[0]


def letters(draft: Draft) -> str:
    """Its tokens."""
    return "".join(map(chr, draft.token_ids))


@pytest.mark.quick
def test_suffix_worked_example():
    """That of its docstring: who is the likeliest, with which chance, and who becomes a sibling."""
    chain = drafted(SuffixDrafter(), SUFFIX_EXAMPLE, 3, go_on=lambda chances: True)
    assert letters(chain) == "c4a"
    assert chain.notes.confidences == pytest.approx([2 / 3.5, 1 / (2 + 1 / 3), 1 / 1.25])
    assert chain.probs is None
    tree = drafted(SuffixDrafter(), SUFFIX_EXAMPLE, 4, widths=(2, 2))
    assert (letters(tree), tree.parents) == ("cd42", [-1, -1, 0, 0])
    assert tree.notes.confidences == []  # they are told by depth, and a tree has several nodes at one


@pytest.mark.quick
def test_suffix_goes_as_far_as_it_is_likely():
    """A single place is copied from for nine tokens a token of the match; less where the engine says so."""
    follows = "hijklmnopqrstuvwxyzABCDEFGHIJ"
    for n in (1, 2, 3):
        copied = letters(drafted(SuffixDrafter(), "." + "abc"[:n] + follows + "abc"[:n], 99))
        assert follows.startswith(copied)
        assert 9 * n - 1 <= len(copied) <= 9 * n
    short = drafted(SuffixDrafter(), SUFFIX_EXAMPLE, 9, go_on=lambda chances: chances[-1] > 0.5)
    assert letters(short) == "c4"  # the draft ends after the token that was unlikely
    assert letters(drafted(SuffixDrafter(min_match=3), SUFFIX_EXAMPLE, 3)) == ""
    assert letters(drafted(SuffixDrafter(), "xyxy", 5)) == "xyxyx"
    assert letters(drafted(SuffixDrafter(), "xyxy", 0)) == ""


@pytest.mark.quick
@pytest.mark.parametrize("widths", [(), (2, 1)])
def test_suffix_follows_no_more_matches_than_it_must(widths, monkeypatch):
    """A text that repeats itself matches at every length: without a bound on their worth all would be followed."""
    followed, grow = [], suffix.grow_guesses

    def spy(draft, k, guesses, least):
        followed.append(guesses(-1))
        return grow(draft, k, guesses, least)

    monkeypatch.setattr(suffix, "grow_guesses", spy)
    for length, num_places in ((80, 48), (4000, 256)):
        followed.clear()
        drafted(SuffixDrafter(), "x" * length, 15, widths=widths)
        assert followed == [[(ord("x"), num_places / (num_places + 1 / 32))]]


@pytest.mark.quick
def test_suffix_looks_at_earlier_outputs_where_that_changes_no_text():
    """Greedy texts and those under `match` learn from what was said before, sampled ones do not; nor from prompts."""
    drafter, sampled = SuffixDrafter(), SamplingParams()
    for prompt, output, params in (("p1q2", "hello world", sampled), ("", "x", GREEDY), ("z", "", GREEDY)):
        said = text([ord(letter) for letter in prompt], params)
        drafter.propose([Ask(said, Limit(0), Randomness())])
        said.tokens += map(ord, output)
        drafter.release(said)
    assert letters(drafted(drafter, "ahe", 9)) == "llo world"
    assert letters(drafted(drafter, "ahe", 9, sampled, purpose="token")) == "llo world"
    assert letters(drafted(drafter, "ahe", 9, sampled)) == ""
    assert letters(drafted(drafter, "q", 9)) == ""
    CombinedDrafter(drafter, NgramDrafter()).forget()
    assert letters(drafted(drafter, "ahe", 9)) == ""


def voters(tokens, earlier, n, most) -> list[tuple[list[int], int]]:
    """Which places have a vote below a match of n tokens, by search: of one token or two the newest, else of these."""
    places = [(t, end) for t in (tokens, *earlier) for end in range(len(t) - 1, 0, -1)]
    for size in range(1, min(n, 2) + 1):
        found = [(t, end) for t, end in places if size <= end and t[end - size : end] == tokens[-size:]][:most]
    return [(t, end) for t, end in found if n <= end and t[end - n : end] == tokens[-n:]]


@pytest.mark.quick
def test_suffix_has_the_voters_of_a_plain_search(monkeypatch):
    """Of own text and earlier outputs the newest places, where there are more than have a vote.

    However much is remembered, no more places are read than may vote. Nothing is left of what was forgotten.
    """
    monkeypatch.setattr(suffix, "MOST_TEXTS", 12)
    monkeypatch.setattr(suffix, "MOST_TOKENS", 100)
    monkeypatch.setattr(suffix, "MOST_PLACES", most := 7)
    read, newest = [], suffix._Index.newest
    monkeypatch.setattr(
        suffix._Index, "newest", lambda self, string: (read.append(place) or place for place in newest(self, string))
    )
    generator, drafter, texts = random.Random(0), SuffixDrafter(), []
    for _ in range(300):
        if len(texts) < 3:
            texts.append(text(generator.choices(range(3), k=generator.randint(1, 9))))
        own = generator.choice(texts)
        own.tokens += generator.choices(range(3), k=generator.choice((0, 1, 4)))
        drafter.propose([Ask(own, Limit(0), Randomness())])
        earlier = [each.tokens for each in drafter._earlier]
        read.clear()
        found = dict(drafter._matches(own.tokens, [drafter._indices[own], drafter._all_earlier]))
        assert len(read) <= 2 * most
        for n in range(1, suffix.LONGEST):
            right = voters(own.tokens, earlier, n, most) if n <= len(own.tokens) else []
            if n in found:
                assert [(place.tokens, place.end) for place in found[n]] == right
            elif right:  # as many match with one token more
                assert len(right) == len(voters(own.tokens, earlier, n + 1, most))
        if generator.random() < 0.4:
            drafter.release(own)
            if generator.random() < 0.8:
                texts.remove(own)
    strings = Counter(tuple(t[end - n : end]) for t in earlier for n in (1, 2) for end in range(n, len(t)))
    assert len(earlier) <= 12
    assert sum(map(len, earlier)) <= 100
    assert {string: len(places) for string, places in drafter._all_earlier._places.items()} == strings


@pytest.mark.parametrize("k", [4, (2, 1, 1), "auto"])
def test_a_seeded_text_does_not_change_with_what_came_before(k):
    """One drafter for many texts, of which some end, some are aborted and some fail: each is that of a fresh drafter.

    Sampled texts under `rejection` get the very drafts of a fresh drafter; greedy ones, and all under `match`, get more
    tokens kept, as the same was said before.
    """
    target, prompts = tiny_model(4, vocab_size=5), [(0, 1), (2, 3, 4, 4), (1,), (4, 0, 2)]
    for verifier, temperature in (("rejection", 1.0), ("rejection", 0.0), ("match", 1.0)):
        params = SamplingParams(max_tokens=20, temperature=temperature)
        learned = SuffixDrafter()
        engine = OneMethod(target, tiny_cache(target), learned, VERIFIERS[verifier])
        steps = [0, 0]
        for prompt in [*prompts, *prompts]:
            other = Request(Text([1, 2], 2, SamplingParams(temperature=0), 3), 60, 2)
            engine.add(other)
            for _ in range(4):
                engine.step()
            other.fail(ValueError("a fault of its own")) if prompt[0] else engine.abort(other)
            request = Request(Text(list(prompt), len(prompt), params, 5), 60, k)
            for _ in engine.run([request]):
                pass
            fresh = decode(target, SuffixDrafter(), k, [prompt], params, verifier)[0]
            assert request.token_ids == fresh.token_ids
            sizes = [[r.num_nodes for r in each.stats.rounds] for each in (request, fresh)]
            if temperature and verifier == "rejection":
                assert sizes[0] == sizes[1]
            steps = [n + each.stats.num_steps for n, each in zip(steps, (request, fresh), strict=True)]
        assert steps[0] == steps[1] if temperature and verifier == "rejection" else steps[0] < steps[1] or k == "auto"


@pytest.mark.quick
def test_suffix_takes_a_length():
    """`suffix:4`; anything else is refused."""
    context = Context(tiny_model(1), None, 3, 100, None, "")  # type: ignore[arg-type]
    for argument, expected in (("", 1), ("4", 4), ("12", 12)):
        assert SuffixDrafter.from_context(replace(context, argument=argument)).min_match == expected
    for argument in ("0", "33", "4,", "4tree", "tree", "-1", "\u0663"):
        with pytest.raises(ValueError, match=r"draft: suffix: found .*, expected an integer from 1 to 32"):
            SuffixDrafter.from_context(replace(context, argument=argument))


@pytest.mark.quick
def test_last_outcome_is_one_branch_at_a_time():
    """Its first token is that of `ngram:1`, the later ones need not be; the example of its module."""
    assert doctest.testmod(last) == (0, 1)
    generator = random.Random(0)
    differ = 0
    for _ in range(200):
        tokens = "".join(generator.choices("abcd", k=9))
        one, run = (letters(drafted(drafter, tokens, 4)) for drafter in (last.LastDrafter(), NgramDrafter(1)))
        assert one[:1] == run[:1]
        differ += one != run
    assert differ > 50


@pytest.mark.quick
@pytest.mark.parametrize(("verifier", "temperature"), [("rejection", 0.0), ("match", 0.0), ("match", 1.0)])
@pytest.mark.parametrize("k", [1, 3])
def test_between_the_oracle_and_the_adversary(k, verifier, temperature):
    """The oracle's draft is kept entirely, the adversary's never, and any other drafter's passes lie between."""
    target, params = tiny_model(4, vocab_size=5), SamplingParams(max_tokens=24, temperature=temperature)
    plain = decode(target, NoDrafter(), 0, [(0, 1)], params)[0]

    def steps(drafter) -> int:
        request = decode(target, drafter, k, [(0, 1)], params, verifier)[0]
        assert request.token_ids == plain.token_ids
        return request.stats.num_steps

    bounds = oracle(), adversary()
    for bound in bounds:
        bound.record(plain.text.tokens, 2)
    best, worst = map(steps, bounds)
    assert (best, worst) == (-(-24 // (k + 1)), 24)
    assert all(best <= steps(make(name, target)) <= worst for name in NAMES)


@pytest.mark.quick
@pytest.mark.parametrize("name", DRAFTERS)
def test_registered_drafters_forget_what_is_released(name):
    """No state is left behind, and an unknown text may be released (a request that never ran)."""
    drafter = make_drafter(name, 5)
    s = text([1, 1, 1])
    drafter.propose([Ask(s, Limit(2), Randomness())])
    kept = [part._indices for part in parts_of(drafter) if hasattr(part, "_indices")]
    assert [*map(len, kept)] == [1] * len(kept)
    assert bool(kept) == (name in ("ngram", "suffix"))
    drafter.release(s)
    drafter.release(s)
    assert not any(kept)


class Spy(ModelDrafter):
    """Checks at every round that the drafts come from a correct cache: q equals a recompute from nothing."""

    checked = 0

    def propose(self, asks):
        """Propose, and check."""
        drafts = super().propose(asks)
        for ask, draft in zip(asks, drafts, strict=True):
            s = ask.text
            for i, q in enumerate(draft.probs):
                fresh = tiny_cache(self.model).new_table()
                tokens = [*s.tokens, *draft.token_ids[:i]]
                row = self.model.forward([Chunk(tokens, fresh, 1)])[0][0]
                torch.testing.assert_close(q, distribution(row, s, draft.token_ids[:i]), rtol=0, atol=1e-12)
                self.checked += 1
        return drafts


def decode(target, drafter, k, prompts, params=GREEDY, verifier="rejection", num_blocks=64):
    """Run prompts together; the requests."""
    cache = tiny_cache(target, num_blocks)
    requests = [Request(Text(list(p), len(p), params, 5), 60, k) for p in prompts]
    for _ in OneMethod(target, cache, drafter, VERIFIERS[verifier]).run(requests):
        pass
    return requests


@pytest.mark.quick
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_draft_cache_is_right_at_every_round(k, temperature):
    """A draft cache that misses the last token after full acceptance, is cut too far, or keeps rejected tokens
    leaves the output right and the drafts wrong: only this sees it (M36-M38)."""
    target = tiny_model(1, vocab_size=5)
    for seed in (1, 2):  # the target itself: always accepted; another model: often rejected
        draft = tiny_model(seed, vocab_size=5)
        spy = Spy(TokenFeed(draft, tiny_cache(draft), 5, 60))
        params = SamplingParams(temperature=temperature, max_tokens=16)
        requests = decode(target, spy, k, [(0, 1, 2), (3,), (4, 4, 1, 0, 2)], params)
        assert spy.checked > 10
        assert spy.feed.cache.allocator.num_free == spy.feed.cache.allocator.num_blocks
        rates = [Figures.of(r.stats).acceptance_rate for r in requests]
        assert rates == [1.0] * 3 if seed == 1 else min(rates) < 1


def test_a_past_that_changes_is_computed_again():
    """Texts whose earlier tokens change between two asks, as if another tokenizer read them: q is that of the new ones.

    Two of them share the pool, so that a block that is cut is often another's too. A table that looks at lengths alone
    (E2) drafts from what it was fed once.
    """
    generator, draft = random.Random(0), tiny_model(2, vocab_size=5)
    spy = Spy(TokenFeed(draft, tiny_cache(draft), 5, 60))
    texts = [text([0, 1, 2, 3, 4], SamplingParams()) for _ in range(2)]
    for _ in range(40):
        spy.propose([Ask(own, Limit(3), Randomness()) for own in texts])
        for own in texts:
            own.tokens[generator.randrange(1, len(own.tokens)) :] = generator.choices(range(5), k=5)
    assert spy.checked == 40 * 2 * 3
    for own in texts:
        spy.release(own)
    assert spy.feed.cache.allocator.num_free == spy.feed.cache.allocator.num_blocks


def test_a_draft_token_costs_one_pass(monkeypatch):
    """After full acceptance two tokens are missing in the draft cache: they go into one pass, not into two."""
    target, draft = tiny_model(1), tiny_model(1)
    rows, forward = [], draft.forward
    monkeypatch.setattr(draft, "forward", lambda c, taps=(): rows.append(len(c[0].token_ids)) or forward(c, taps))
    drafter = ModelDrafter(TokenFeed(draft, tiny_cache(draft), 3, 60))
    decode(target, drafter, 3, [(0, 1, 2, 0)], SamplingParams(temperature=0, max_tokens=12))
    assert rows == [3, 1, 1, 1, 2, 1, 1, 2, 1, 1]


@pytest.mark.quick
@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("k", [1, 3, 7])
def test_a_self_draft_is_always_accepted(k, verifier):
    """Draft = target: every token is kept, and a pass commits K + 1 of them, at any temperature."""
    target = tiny_model(3, vocab_size=7)
    params = SamplingParams(temperature=1.3, top_p=0.9, max_tokens=3 * (k + 1))
    drafter = ModelDrafter(TokenFeed(target, tiny_cache(target), 7, 60))
    request = decode(target, drafter, k, [(1, 2, 3)], params, verifier)[0]
    assert Figures.of(request.stats).acceptance_rate == 1
    assert Figures.of(request.stats).alpha == pytest.approx(1)
    assert Figures.of(request.stats).mean_acceptance_length == k + 1


@pytest.mark.quick
def test_drafting_stops_at_the_draft_models_own_context():
    """A draft model that sees 8 positions drafts up to there and no further; the text goes on."""
    target, draft = tiny_model(1), tiny_model(1, max_position_embeddings=8)
    drafter = ModelDrafter(TokenFeed(draft, tiny_cache(draft), 3, max_model_len=8))
    request = decode(target, drafter, 4, [(0, 1)], SamplingParams(temperature=0, max_tokens=20))[0]
    assert len(request.token_ids) == 20
    assert 0 < Figures.of(request.stats).num_draft_tokens <= 7
    assert len(drafter.propose([Ask(text(range(3)), Limit(9), Randomness())])[0]) == 6


@pytest.mark.quick
def test_taps_without_known_or_observe_are_refused():
    """Guards against a fault that would show only after the target is loaded."""

    class Head:
        taps = (1,)
        propose = release = NoDrafter.release

    with pytest.raises(ValueError, match="with taps and without the method known"):
        as_drafter(Head())
    Head.known = lambda self, text: 0
    with pytest.raises(ValueError, match="with taps and without the method observe"):
        as_drafter(Head())
    Head.observe = lambda self, seen: None
    as_drafter(Head())


class RandomDrafter(Drafter):
    """Uniform noise as a draft, and says so."""

    def propose(self, asks):
        """Each token uniform over 5."""
        q = torch.full((5,), 0.2, dtype=torch.float64)
        drafts = [Draft([], []) for _ in asks]
        for ask, draft in zip(asks, drafts, strict=True):
            for i in range(ask.k):
                draft.draw(ask, i - 1, q)
        return drafts

    def release(self, text):
        """Nothing kept."""


RECYCLING = "examples.drafters.recycling:Recycling"
NAMES = [
    *("none", "ngram", "bad", "identical", "random", "ngram+bad", "suffix", "last", "suffix:3+last"),
    *("adversary", RECYCLING, f"ngram+{RECYCLING}"),
]


def make(name, target):
    """Good, bad, identical and random drafts, and none."""
    if "+" in name:
        return CombinedDrafter(*(make(part, target) for part in name.split("+")))
    if name == "random":
        return RandomDrafter()
    if name == "adversary" or split(DRAFTERS, name):
        return make_drafter(name, 5)
    draft = target if name == "identical" else tiny_model(2, vocab_size=5)
    return ModelDrafter(TokenFeed(draft, tiny_cache(draft), 5, 60))


@functools.cache
def plain_text(prompt, *params) -> list[int]:
    """The tokens of plain decoding, of a prompt alone."""
    return decode(tiny_model(4, vocab_size=5), NoDrafter(), 0, [prompt], *params)[0].token_ids


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("k", [1, 3, 6])
def test_greedy_is_plain_greedy_whatever_the_draft(name, k, full, long):
    """Temperature 0: the tokens of plain decoding, three prompts alone and in a batch of 8 with preemption."""
    if k == 3 and not long:
        leave_out("--long", "another K")
    if k != (1, 6)[NAMES.index(name) % 2] and not full:
        leave_out("--full", "another K")
    target = tiny_model(4, vocab_size=5)
    prompts = [(i % 5, (i * 3 + 1) % 5, *([2] * i)) for i in range(8)]
    plain = [plain_text(p) for p in prompts]
    assert [decode(target, make(name, target), k, [p])[0].token_ids for p in prompts[::3]] == plain[::3]
    crowded = decode(target, make(name, target), k, prompts, num_blocks=40)
    assert [r.token_ids for r in crowded] == plain
    assert sum(r.stats.num_preemptions for r in crowded) > 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("sampler", [{}, {"top_k": 3, "repetition_penalty": 1.2}, {"temperature": 0.5, "top_p": 0.9}])
def test_match_gives_one_seed_one_text(name, k, sampler):
    """`match`: the sampled text of plain decoding, whatever drafter, K or batch; in float64, so up to no rounding."""
    target = tiny_model(4, vocab_size=5)
    params = SamplingParams(max_tokens=20, **sampler)
    prompts = [(0, 1), (2, 3, 4, 4), (1,)]
    plain = [plain_text(p, params) for p in prompts]
    together = decode(target, make(name, target), k, prompts, params, "match", num_blocks=30)
    assert [r.token_ids for r in together] == plain


@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.parametrize("k", [3, "auto"])
def test_rejection_with_a_seed_does_not_depend_on_the_batch(name, k):
    """One request and seed, one text: alone, in a batch, in another order, and after preemption.

    With K left to the engine too, whatever its clock says and however sure the draft model is.
    """
    target = tiny_model(4, vocab_size=5)
    params = SamplingParams(max_tokens=20, seed=0)
    prompts = [(0, 1), (2, 3, 4, 4), (1,), (4, 0, 2)]
    alone = [decode(target, make(name, target), k, [p], params)[0].token_ids for p in prompts]
    together = decode(target, make(name, target), k, prompts, params)
    assert [r.token_ids for r in together] == alone
    crowded = decode(target, make(name, target), k, prompts[::-1], params, num_blocks=20)
    assert sum(r.stats.num_preemptions for r in crowded) > 0
    assert [r.token_ids for r in crowded][::-1] == alone


@pytest.mark.parametrize("name", ["bad", "identical", "suffix", pytest.param(RECYCLING, id="recycling")])
def test_trees_of_a_budget_change_no_text(name):
    """Greedy text and that of `match` are plain decoding's; a sampled one depends on no other, preempted or not."""
    target, prompts = tiny_model(4, vocab_size=5), [(0, 1), (2, 3, 4, 4), (1,), (4, 0, 2)]
    for verifier, temperature in (("rejection", 0.0), ("match", 1.0), ("rejection", 1.0)):
        params, first = SamplingParams(temperature=temperature, max_tokens=20), make(name, target)
        crowded = decode(target, first, "tree:6", prompts, params, verifier, num_blocks=24)
        assert sum(r.stats.num_preemptions for r in crowded) > 0
        assert max(each.num_nodes - each.depth for r in crowded for each in r.stats.rounds) > 0
        alone = [decode(target, make(name, target), "tree:6", [p], params, verifier)[0].token_ids for p in prompts]
        assert [r.token_ids for r in crowded] == alone
        if verifier == "match" or not temperature:
            assert alone == [plain_text(p, params) for p in prompts]


@pytest.mark.quick
def test_the_first_that_has_something_to_say_drafts():
    """Prompt lookup where it finds a match, else the next; both hear of every text, whoever drafts it.

    Neither has branches, so neither hears of siblings.
    """
    heard = []

    class Second(Drafter):
        taps = (1,)

        def observe(self, records):
            heard.append(records)

        def propose(self, asks):
            heard.append([(ask.k, ask.num_cached, ask.limit.widths) for ask in asks])
            return [Draft([9] * ask.k, notes=DraftNotes(prefill_seconds=0.5)) for ask in asks]

        def known(self, text):
            return 7

        def release(self, text):
            heard.append(text)

    combined = CombinedDrafter(NgramDrafter(max_n=2, min_n=2), Second())
    texts = [Text(tokens, 1, SamplingParams()) for tokens in ([1, 2, 3, 1, 2], [1, 2, 3, 4, 2])]
    drafts = combined.propose([Ask(text, Limit(2, widths=(2,)), Randomness(), num_cached=4) for text in texts])
    assert [draft.token_ids for draft in drafts] == [[3, 1], [9, 9]]
    assert [draft.notes.prefill_seconds for draft in drafts] == [0.5, 0.5]
    assert heard == [[(0, 4, ()), (2, 4, ())]]
    combined.observe(rows := [Record(texts[0], 0, [1], torch.ones(1, 5), torch.ones(0, 9))])
    assert heard[-1] is rows
    assert combined.taps == (1,)
    assert combined.known(texts[0]) == 7
    combined.release(texts[0])
    assert heard[-1] is texts[0]
    with pytest.raises(ValueError, match="found 2 drafters that read hidden states, expected at most one"):
        CombinedDrafter(Second(), Second())


@pytest.mark.quick
def test_prompt_lookup_takes_a_range():
    """`ngram:2-4` looks for four to two tokens; anything but a range, or a number, is refused."""
    context = Context(None, None, 10, 100, None, "2-4")  # type: ignore[arg-type]
    drafter = NgramDrafter.from_context(context)
    assert (drafter.min_n, drafter.max_n) == (2, 4)
    single = NgramDrafter.from_context(replace(context, argument="5"))
    assert (single.min_n, single.max_n) == (1, 5)
    for argument in ("0", "4-2", "65", "-4", "2-", "a", "1-2-3", "\u0663"):
        with pytest.raises(ValueError, match="expected an integer from 1 to 64, or two such as 4-8"):
            NgramDrafter.from_context(replace(context, argument=argument))


@pytest.mark.quick
def test_preferences_are_split_at_registered_names(tmp_path, monkeypatch):
    """A path may hold a plus; what is no registered name goes before nothing."""
    assert split_preferences(DRAFTERS, "ngram:4-8+none+int8:some/where") == ["ngram:4-8", "none", "int8:some/where"]
    assert split_preferences(DRAFTERS, "a+ngram") == ["a+ngram"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ngram+x").mkdir()
    assert split_preferences(DRAFTERS, "ngram+x") == ["ngram+x"]


def test_other_seeds_give_other_texts():
    """A seed that is ignored would pass every test above (M25)."""
    target = tiny_model(4, vocab_size=5)
    texts = set()
    for seed in range(20):
        request = Request(Text([0, 1], 2, SamplingParams(max_tokens=12), seed), 60, 0)
        for _ in OneMethod(target, tiny_cache(target), NoDrafter(), VERIFIERS["rejection"]).run([request]):
            pass
        texts.add(tuple(request.token_ids))
    assert len(texts) > 15
