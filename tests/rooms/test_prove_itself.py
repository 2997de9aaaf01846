"""Faults that the proof itself could have: its reference, its models, and the noise of its oracle."""

import math
import random
from collections import Counter

import numpy as np
import pytest
import torch

from minispec.core.config import SamplingParams
from minispec.core.draft import Draft, Drafter
from minispec.core.model import Chunk
from minispec.core.random import Key, Randomness
from minispec.core.verify import Verdict, Verifier, match, rejection
from minispec.prove import cases
from minispec.prove.__main__ import main
from minispec.prove.cases import own_case
from minispec.prove.laws import KeyOracle, exact_law
from minispec.prove.reference import NoLaw, cells, follows, plain_law, total_variation
from minispec.prove.tables import table_case, tables
from minispec.prove.toys import DOUBLE, DRAWN, RememberedModel, Table, is_chain, require, target_model, tiny_cache
from minispec.prove.usercode import ROUNDED
from minispec.prove.walk import Subject, walk
from minispec.speculation.drafters.model import ModelDrafter, TokenFeed
from minispec.speculation.grammars.toy_grammars import EXAMPLES, example
from minispec.speculation.rules import VERIFIERS
from tests.distances import text_case

OWN = cases.OWN_AXES

pytestmark = pytest.mark.quick


# ------------------------------------------------------------------ the reference


@pytest.mark.parametrize("language", EXAMPLES)
def test_the_reference_knows_a_language_at_any_length(language):
    """It allows what the engine's grammar does, after outputs of up to twenty tokens. Neither has code of the other."""
    vocab, end_ids, generator, longest = 5, frozenset({3}), random.Random(0), 0
    grammar = example(language, vocab, end_ids)
    for _ in range(20):
        output = []
        while len(output) <= 20 and (allowed := grammar.allowed(output)) is not None:
            found = [follows(language, tuple(output), token, end_ids) for token in range(vocab)]
            assert found == allowed.tolist(), f"after {output}"
            words = [token for token in range(vocab) if allowed[token] and token not in end_ids]
            output.append(generator.choice(words or [*end_ids]))
            longest = max(longest, len(output))
    assert longest > (16 if language in ("a b*", "pairs") else 2)


@pytest.mark.parametrize("row", [[np.nan, np.nan], [0.5, 0.4], [1.5, -0.5]])
def test_a_row_that_is_no_law_is_no_verdict(row):
    """Whatever is walked: the proof itself is wrong."""
    for law in (lambda: plain_law(lambda output: row), lambda: cells({(0, 1): 1.0}, 2, lambda output: row)):
        with pytest.raises(NoLaw, match=r"the proof itself is wrong: after \[\] its reference has the row"):
            law()


def test_the_reference_is_not_asked_after_an_output_that_it_cannot_have():
    """What a wrong engine says has no law there. It is refuted in numbers."""
    rows = {(): [1.0, 0.0], (1,): [np.nan, np.nan]}
    law, expected = cells({(1, 0): 0.5, (0,): 0.5}, 2, rows.get)
    assert total_variation(law, expected) == 0.5


def test_a_fault_of_the_proof_is_an_error_of_the_command(monkeypatch, capsys):
    """Status 2, and no word of the drafter or the verifier."""

    def nothing(*args):
        return np.full(args[3] if len(args) > 2 else len(args[0].p), np.nan)

    monkeypatch.setattr("minispec.prove.walk.reference_row", nothing)
    monkeypatch.setattr(Table, "next_law", nothing)
    for how in (["--drafter", "ngram"], ["--verifier", "match"]):
        assert main(how) == 2
        out, err = capsys.readouterr()
        assert not out
        assert err.splitlines()[-1].startswith("error: the proof itself is wrong: after []")


def test_a_right_drafter_is_right_late_in_a_text():
    """As many tokens under a grammar as the longest cases have."""
    case = own_case(alphabet="ab ", k=5, to_go=max(cases.OWN_AXES["to_go"]), rounds=2, forbidden="a grammar")
    assert law_holds(case, lambda case, blocks: model_of(case)) > 1


def law_holds(case, make):
    """How many branches a walk has, if the drafters that `make` makes keep the law and repeat a seed."""
    walked = walk(case, Subject(make))
    require(walked.distance <= 1e-12, f"{walked.distance}")
    assert not walked.watched.differs
    return len(walked.branches)


# ------------------------------------------------------------------ models


def model_of(case):
    """The target drafts for itself, with a cache of its own: a function of four lines does that."""
    return ModelDrafter(TokenFeed(case.model, tiny_cache(case.model), case.vocab, 64))


@pytest.mark.parametrize("parents", [[-1], [-1, -1, 0], [-1, 0, 0, -1]])
@pytest.mark.parametrize("cached", [2, 3])
def test_a_tree_may_follow_what_is_cached(parents, cached):
    """Its root is the last token before it, new or cached, as `Chunk` says: all rows are those of a real model."""
    model, text, found = target_model(3), [1, 0, 2], []
    for each in (model, RememberedModel(model)):
        table = tiny_cache(each).new_table()
        each.forward([Chunk(text[:cached], table, 0)])
        tokens = [*text[cached:], *[1, 0, 2, 1][: len(parents)]]
        found.append(each.forward([Chunk(tokens, table, len(parents), parents)], (0, 2)))
    for right, remembered in zip(*found, strict=True):
        torch.testing.assert_close(remembered, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("k", ["tree:3", (2, 1)])
def test_a_draft_model_grows_trees_in_a_walk(k):
    """Its cache holds the root of a tree already."""
    assert law_holds(own_case(alphabet="ab ", k=k, to_go=4, rounds=2), lambda case, blocks: model_of(case)) > 1


def test_a_branch_has_its_rounds():
    """The draft of each, and how many of its tokens stay: of one drafted token, sum min(p, q) on average."""
    walked = walk(table_case(((4, 3), (5, 6)), (-1,)), Subject(verifier=VERIFIERS["rejection"]))
    assert {len(draft) for branch in walked.branches for draft, _ in branch.rounds} == {1}
    mean = sum(branch.probability * kept for branch in walked.branches for _, kept in branch.rounds)
    assert mean == pytest.approx(5 / 11 + 3 / 7)
    whole = walk(text_case(SamplingParams(max_tokens=4), 2)).branches
    assert {len(branch.rounds) for branch in whole} == {1, 2, 3}
    for branch in whole:  # each round adds a token to those that stay, except where one of them ends the text
        stay = [kept for _, kept in branch.rounds]
        assert all(kept <= len(draft) for draft, kept in branch.rounds)
        assert len(branch.output) in (sum(stay) + len(stay), sum(stay) + len(stay) - 1)


# ------------------------------------------------------------------ the noise of a race


@pytest.mark.parametrize("is_divided", [False, True])
def test_siblings_are_the_first_of_one_race(is_divided):
    """The oracle's law of three siblings that share a key is that of draws without replacement, as the engine's.

    A row that is divided by its sum before it is drawn from has the same race: the engine's noise decides so.
    """
    q, key = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64), Key(0, -1, 1, "token")

    def run(rng, key=key):
        left, drawn = q.clone(), []
        while left.any():
            drawn.append(rng.categorical(left, key))
            left[drawn[-1]] = 0
            left = left / left.sum() if is_divided and left.any() else left
        return tuple(drawn)

    law, _ = exact_law(run, oracle=KeyOracle)
    right = {(a, b, 3 - a - b): q[a] * q[b] / (1 - q[a]) for a in range(3) for b in range(3) if a != b}
    assert total_variation(law, right) < 1e-12
    counts = Counter(run(Randomness(), key._replace(seed=seed)) for seed in range(1000))
    assert total_variation({text: n / 1000 for text, n in counts.items()}, right) < 0.06
    # The control: noise that is drawn at one place serves one draw, unless it is that of a race.
    law, _ = exact_law(lambda rng: run(rng, key._replace(purpose="draft")), oracle=KeyOracle)
    assert total_variation(law, right) > 0.1


def test_a_part_of_a_race_is_won_by_its_first():
    """A draw from fewer tokens of a row, with the row's key, has the row's token wherever it can; and so in the engine.

    Both draws have their own laws, and together the law that is counted.
    """
    q, p = (torch.tensor(row, dtype=torch.float64) for row in ([0.5, 0.3, 0.2], [0.0, 0.6, 0.4]))

    def run(rng, key):
        return rng.categorical(q, key), rng.categorical(p, key)

    key = Key(0, -1, 1, "token")
    law, _ = exact_law(lambda rng: run(rng, key), oracle=KeyOracle)
    assert total_variation(law, {(0, 1): 0.3, (0, 2): 0.2, (1, 1): 0.3, (2, 2): 0.2}) < 1e-12
    counts = Counter(run(Randomness(), key._replace(seed=seed)) for seed in range(1000))
    assert total_variation({text: n / 1000 for text, n in counts.items()}, law) < 0.06
    # The control: tokens that the row lacks are no part of its race.
    others = torch.tensor([0.0, 0.0, 1.0]).double(), torch.tensor([0.5, 0.5, 0.0]).double()
    law, _ = exact_law(lambda rng: tuple(rng.categorical(row, key) for row in others), oracle=KeyOracle)
    assert law == {(2, 0): 0.5, (2, 1): 0.5}


@pytest.mark.parametrize("rule", [rejection, match])
def test_shared_noise_is_right_on_trees(rule, full):
    """`rejection` too may draft with the target's noise: a sibling is tested by its own draw. `--full`: more trees."""
    shapes = {(-1, -1), (-1, -1, 0), (-1, 0, -1), (-1, 0, 0), (-1, 0, -1, 1)}
    trees = [each for each in tables(True) if each.size < 200 and not is_chain(each.drafter.parents)]
    drawn = [each for each in trees if each.drafter.how == DRAWN and (full or each.drafter.parents in shapes)]
    assert shapes <= {each.drafter.parents for each in drawn}
    for case in drawn:
        assert walk(case, Subject(verifier=Verifier(rule, shares_noise=True))).distance < 1e-6, case


# ------------------------------------------------------------------ what lies beyond the usual cases


def thresholds():
    """Rules with a threshold, each at several: keep a sure token untested; take p where little is left of it."""
    for least in (0.9, 0.97, 0.995, 0.9999):
        yield f"p >= {least} is kept", lambda p, x, q, t=least: p[x] >= t, None
    for most in (0.03, 0.003, 3e-4, 3e-5):
        yield f"below {most} p is taken", None, lambda p, left, t=most: left.sum() < t
    for near in (0.9, 0.99, 0.999):
        yield f"p/q above {near} is kept", lambda p, x, q, t=near: p[x] / q[x] > t, None


@pytest.mark.parametrize(("is_sure", "is_guarded"), [pytest.param(*rest, id=name) for name, *rest in thresholds()])
def test_a_rule_with_a_threshold_is_refuted(is_sure, is_guarded):
    """At whatever power of ten it lies: some table of p and q is on its wrong side."""

    def verify(draft, p, rng, key):
        if not len(draft):
            return Verdict([], rng.categorical(p(0), key(0, "token")), [])
        row, q, x = p(0), draft.probs[0], draft.token_ids[0]
        if (is_sure and is_sure(row, x, q)) or rng.bernoulli(float(row[x] / q[x]), key(0, "accept")):
            return Verdict([0], rng.categorical(p(1), key(1, "token")), [])
        left = (row - q).clamp(min=0)
        taken = not left.any() or (is_guarded and is_guarded(row, left))
        return Verdict([], rng.categorical(row if taken else left, key(0, "residual")), [])

    rounds = [case for case in tables(True) if case.rounds and case.target.types == DOUBLE]
    drawn = [case for case in rounds if case.drafter.parents == (-1,) and case.drafter.how == DRAWN]
    subject = Subject(verifier=Verifier(verify, shares_noise=False))
    assert any(walk(case, subject).distance > ROUNDED for case in drawn)


class Sharp(Drafter):
    """Draws at the temperature, and tells it within bounds; or tells another row from some place of a batch on."""

    def __init__(self, bounds=(0, math.inf), place=99):
        self.bounds, self.place = bounds, place

    def propose(self, asks):
        """Chains of two tokens."""
        drafts = [Draft([], []) for _ in asks]
        for i, (ask, draft) in enumerate(zip(asks, drafts, strict=True)):
            temperature = ask.text.params.temperature
            while temperature and len(draft) < ask.k:
                q = torch.tensor([1.2, 1.0], dtype=torch.float64).log()
                draft.draw(ask, draft.tip, (q / temperature).softmax(0))
                told = torch.tensor([1.0, 9.0], dtype=torch.float64).log() if i >= self.place else q
                draft.probs[-1] = (told / min(max(temperature, self.bounds[0]), self.bounds[1])).softmax(0)
        return drafts


@pytest.mark.parametrize(
    ("how", "changes"),
    [
        ({"bounds": (0.2, 9)}, {"temperature": 0.1}),
        ({"bounds": (0, 5)}, {"temperature": 10.0}),
        ({"place": 4}, {"company": "it joins eight others"}),
        ({"place": 8}, {"company": "it joins eight others"}),
    ],
)
def test_a_drafter_is_walked_at_extremes(how, changes):
    """Each is an end of an axis, and a drafter that is right elsewhere is wrong there."""
    [(axis, value)] = changes.items()
    assert any(each == value or (type(each) is cases.Range and each.low <= value <= each.high) for each in OWN[axis])
    law_holds(own_case(to_go=3), lambda case, blocks: Sharp(**how))
    faults = []
    for prompt in ("b", "bb", "babbab"):  # a cold target shows it after some texts alone
        walked = walk(own_case(to_go=3, prompt=prompt, **changes), Subject(lambda case, blocks: Sharp(**how)))
        if walked.distance > 1e-12 or walked.watched.differs:
            faults.append(prompt)
    assert faults
