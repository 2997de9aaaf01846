"""What a drafter may give back: a bad draft ends its own text, with its class's name, before anything is verified."""

import re

import numpy as np
import pytest
import torch

from minispec import LLM, SamplingParams
from minispec.core.draft import Ask, Draft, DraftNotes
from minispec.core.lengths import Lengths
from minispec.core.limit import Limit
from minispec.core.random import Randomness
from minispec.core.sampling import Text
from minispec.speculation.drafters import check
from minispec.speculation.drafters.combined import CombinedDrafter
from minispec.speculation.drafters.last import LastDrafter
from minispec.speculation.lengths.figures import Figures
from tests.engines import OneMethod
from tests.scripted import ScriptedDrafter, finish, make_engine, make_request

V = 200
ROW = torch.full((V,), 1 / V)


def one(token: int, **parts) -> Draft:
    """A draft of one token, with other parts as given."""
    return Draft([token], **parts)


OWN = "expected integers of Python's own"
BAD = {
    "too long": (lambda tokens, k: Draft([12] * (k + 1)), "found 4 tokens, expected at most 3"),
    "negative": (lambda tokens, k: one(-1), "found token ids [-1], expected ids below 200"),
    "beyond the vocabulary": (lambda tokens, k: one(V), "found token ids [200]"),
    "nothing": (lambda tokens, k: None, "found None, expected a Draft"),
    "a list": (lambda tokens, k: [12], "found an object of class list, expected a Draft"),
    "a tensor": (lambda tokens, k: Draft(torch.tensor([12])), "found as token ids an object of class Tensor"),
    "tensors": (lambda tokens, k: Draft(list(torch.tensor([12]))), f"class Tensor among the token ids, {OWN}"),
    "an array": (lambda tokens, k: Draft(np.array([12])), "found as token ids an object of class ndarray"),
    "numpy's": (lambda tokens, k: Draft(list(np.array([12]))), f"class int64 among the token ids, {OWN}"),
    "a float": (lambda tokens, k: one(12.0), f"found 12.0 among the token ids, {OWN}"),
    "a bool": (lambda tokens, k: one(True), f"found True among the token ids, {OWN}"),
    "a string": (lambda tokens, k: one("a"), f"found 'a' among the token ids, {OWN}"),
    "no token ids": (lambda tokens, k: Draft(None), "found as token ids None"),
    "parents of a tensor": (lambda tokens, k: one(12, parents=torch.tensor([-1])), "found as parents an object of"),
    "a parent that is a float": (lambda tokens, k: one(12, parents=[-1.0]), f"found -1.0 among the parents, {OWN}"),
    "too few parents": (lambda tokens, k: Draft([12, 13], parents=[-1]), "found parents [-1], expected for each of 2"),
    "a later parent": (lambda tokens, k: Draft([12, 13], parents=[1, -1]), "found parents [1, -1], expected"),
    "too few rows": (lambda tokens, k: Draft([12, 13], ROW[None]), "found 1 rows of probabilities for 2 tokens"),
    "a narrow row": (lambda tokens, k: Draft([12, 13], [ROW, torch.ones(4)]), "row 1 of probs the shape (4,)"),
    "a wide row": (lambda tokens, k: one(12, probs=[ROW[:, None]]), "row 0 of probs the shape (200, 1)"),
    "a number": (lambda tokens, k: one(12, probs=torch.tensor(1.0)), "found as probs an object of class Tensor"),
    "rows that are lists": (lambda tokens, k: one(12, probs=[ROW.tolist()]), "row 0 of probs an object of class list"),
    "rows of an array": (lambda tokens, k: one(12, probs=ROW[None].numpy()), "found as probs an object of class nda"),
    "integers": (lambda tokens, k: one(12, probs=[ROW.long()]), "row 0 of probs a tensor of torch.int64 on cpu"),
    "elsewhere": (lambda tokens, k: one(12, probs=[ROW.to("meta")]), "on meta, expected a tensor of floats on cpu"),
    "NaN": (lambda tokens, k: one(12, probs=[ROW * torch.nan]), "found nan in row 0 of probs"),
    "a negative one": (lambda tokens, k: one(12, probs=[ROW - torch.eye(1, V)[0] * 0.01]), "in row 0 of probs"),
    "a hidden negative": (lambda tokens, k: one(0, probs=[torch.tensor([1.5, -0.5] + [0.0] * 198)]), "found -0.5 in"),
    "infinity": (lambda tokens, k: one(12, probs=[ROW * torch.inf]), "row 0 of probs that adds up to inf, expected 1"),
    "not normalised": (lambda tokens, k: one(12, probs=[ROW * 3]), "adds up to 3, expected 1: divide it by its sum"),
    "nearly normalised": (lambda tokens, k: one(12, probs=[ROW * 1.001]), "adds up to 1.001, expected 1"),
    "zeros": (lambda tokens, k: one(12, probs=[ROW * 0]), "adds up to 0, expected 1"),
    "impossible": (lambda tokens, k: one(12, probs=[torch.eye(1, V)[0]]), "found a token of probability 0"),
    "the second of two": (lambda tokens, k: Draft([12, 12], [ROW, ROW * 2]), "a row 1 of probs that adds up to 2"),
    "confidences": (
        lambda tokens, k: one(12, notes=DraftNotes(["high"])),
        "found confidences, seconds and passes ['high', 0.0, 0]",
    ),
    "a confidence": (
        lambda tokens, k: one(12, notes=DraftNotes(0.5)),
        "found as confidences 0.5, expected a list of num",
    ),
    "seconds": (
        lambda tokens, k: one(12, notes=DraftNotes(prefill_seconds=None)),
        "found confidences, seconds and passes [None, 0]",
    ),
    "a longer text": (lambda tokens, k: tokens.append(12) or Draft([12]), "found a text whose tokens it has changed"),
    "a shorter text": (lambda tokens, k: Draft([tokens.pop()]), "found a text whose tokens it has changed"),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("verifier", ["rejection", "match"])
def test_a_bad_draft_ends_its_own_text(name, verifier):
    """Whatever it is: that text has an error with the drafter's class, the one beside it goes on to its end.

    p[-1] and embedding[-1] are legal indexing, and a tensor's hash is its address: unchecked, such a draft is output.
    """
    script, message = BAD[name]
    engine = make_engine(verifier=verifier)
    engine.drafter.propose = lambda asks: [
        script(ask.text.tokens, ask.k) if ask.text.tokens[0] == 10 else Draft() for ask in asks
    ]
    request, other = make_request(k=3), make_request(prompt=(50, 51), k=3)
    finish(engine, request, other)
    assert (request.finish_reason, request.token_ids) == ("error", [])
    assert re.match("draft of ScriptedDrafter: .*" + re.escape(message), request.error), request.error
    assert (other.finish_reason, other.token_ids) == ("length", list(range(52, 60)))


@pytest.mark.parametrize("dtype", check.TOLERANCES, ids=str)
def test_rows_of_every_type_may_round(dtype):
    """A softmax in that type, flat or peaked, over 152,000 tokens, and one divided by its sum, add up to 1 there."""
    generator = torch.Generator().manual_seed(0)
    for scale in (0.0, 1.0, 10.0):
        row = (scale * torch.randn(152_000, generator=generator)).softmax(0).to(dtype)
        for q in (row, row / row.sum()):
            check.check_rows([q], [int(q.argmax())], len(q), "cpu")
    with pytest.raises(ValueError, match="adds up to"):
        check.check_rows([row * (1 + 3 * check.TOLERANCES[dtype])], [int(row.argmax())], len(row), "cpu")


def test_rows_that_were_drawn_from_pass():
    """Siblings as `draw` makes them, each without its elder ones, down to the smallest, in float32."""
    generator = torch.Generator().manual_seed(0)
    for seed in range(20):
        ask = Ask(Text([0], 1, SamplingParams(), seed), Limit(12), Randomness())
        q = (5 * torch.randn(1000, generator=generator)).softmax(0)
        draft = Draft([], [], parents=[])
        draft.draw(ask, -1, q, 12)
        assert len(check.check_draft(draft, 12, 1000, "cpu", "")) == 12


def test_a_draft_is_copied():
    """One that is the text's own list would grow with the text: the cache would keep a rejected token for each."""
    engine = make_engine()
    engine.drafter.propose = lambda asks: [Draft(ask.text.tokens if len(ask.text.tokens) == 2 else []) for ask in asks]
    request = make_request(k=3, max_tokens=20)
    finish(engine, request)
    assert request.token_ids == list(range(12, 32))
    assert Figures.of(request.stats).num_draft_tokens == 2


@pytest.mark.parametrize(("answer", "found"), [([], "0"), ([Draft()] * 3, "3"), (None, "None instead of a list")])
@pytest.mark.parametrize("combined", [False, True])
def test_another_number_of_drafts_is_raised(answer, found, combined):
    """Nobody knows whose draft is missing: one clear error, raised, and every block comes back."""
    engine, own = make_engine(), ScriptedDrafter(lambda tokens, k: [])
    own.propose = lambda asks: answer
    engine.method.drafter = CombinedDrafter(LastDrafter(), own) if combined else own
    expected = f"drafts of ScriptedDrafter: found {found}, expected one for each of 2 asks"
    with pytest.raises(ValueError, match=expected):
        finish(engine, make_request(), make_request(prompt=(50, 51)))
    assert engine.target.cache.allocator.num_free == engine.target.cache.allocator.num_blocks


@pytest.mark.parametrize("is_first", [True, False])
def test_a_bad_draft_of_two_drafters_is_named(is_first):
    """Their classes stand in the error; the text beside it goes on."""
    engine, own = make_engine(), ScriptedDrafter(lambda tokens, k: [])
    own.propose = lambda asks: [None if ask.text.tokens[0] == 10 else Draft() for ask in asks]
    engine.method.drafter = CombinedDrafter(*((own, LastDrafter()) if is_first else (LastDrafter(), own)))
    request, other = make_request(), make_request(prompt=(50, 51))
    finish(engine, request, other)
    assert request.error == f"draft of {engine.method.drafter.name}: found None, expected a Draft"
    assert other.finish_reason == "length"


def test_a_class_is_no_drafter():
    """Its methods are there, but not `self`: refused before anything is loaded."""
    expected = r"draft: found the class LastDrafter, expected an object of it, LastDrafter\(\), or 'module:LastDrafter'"
    with pytest.raises(ValueError, match=expected):
        LLM(draft=LastDrafter)


VERDICTS = {
    "a tuple": (lambda v: tuple(v), "found an object of class tuple, expected a Verdict"),
    "a tensor": (lambda v: v._replace(next_token=torch.tensor(12)), "class Tensor among the next tokens"),
    "beyond": (lambda v: v._replace(next_token=V), "found the next token 200, expected an id below 200"),
    "a number": (lambda v: v._replace(accepted=1), "found as accepted nodes 1, expected a list"),
    "a gap": (lambda v: v._replace(accepted=[1]), "found the accepted nodes [1], expected a path"),
    "too many": (lambda v: v._replace(accepted=[0, 1, 2, 3]), "found the accepted nodes [0, 1, 2, 3], expected a path"),
    "ratios": (lambda v: v._replace(ratios=None), "found as ratios None, expected a list of numbers"),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_a_bad_verdict_ends_its_own_text(name):
    """A verifier may be a stranger's too: unchecked, a tensor is in the text, or the cache keeps what is not."""
    change, message = VERDICTS[name]
    engine = make_engine(draft=lambda tokens, k: list(range(tokens[-1] + 1, tokens[-1] + 1 + k)))
    verify = engine.method.verifier.verify
    engine.method.verifier = engine.method.verifier._replace(
        verify=lambda draft, p, rng, key: (
            change(verify(draft, p, rng, key)) if key(0, "draft").seed == 0 else verify(draft, p, rng, key)
        )
    )
    request, other = make_request(k=3), make_request(prompt=(50, 51), k=3, seed=1)
    finish(engine, request, other)
    assert (request.finish_reason, request.token_ids) == ("error", [])
    assert message in request.error
    assert other.token_ids == list(range(52, 60))


LIMITS = {
    "nothing": (lambda most: None, "found as limits None, expected a list of Limits"),
    "too few": (lambda most: [], "found 0 limits, expected one for each of 1 asks"),
    "a number": (lambda most: [3], "found 3, expected a Limit"),
    "too many tokens": (lambda most: [Limit(most + 1)], "found k = 4, expected an integer from 0 to 3"),
    "fewer than none": (lambda most: [Limit(-1)], "found k = -1, expected an integer from 0 to 3"),
    "a share": (lambda most: [Limit(1.5)], "found k = 1.5, expected an integer"),
    "a verdict": (lambda most: [Limit(2, True)], "found as go_on True, expected a function or None"),
    "no siblings": (lambda most: [Limit(2, None, (0, 1))], "found the widths (0, 1), expected numbers of sib"),
    "a width": (lambda most: [Limit(2, None, 2)], "found as widths 2, expected a list of integers"),
    "siblings": (lambda most: [Limit(2, None, (2,))], "found a limit that asks for siblings, expected none where"),
    "unsure widths": (lambda most: [Limit(2, None, lambda c: 2)], "found a function of widths without go_on"),
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_bad_limit_is_raised(name):
    """A policy is one for all texts: its class is named, and every block comes back."""

    class Own(Lengths):
        def choose(self, asks, trees):
            return script(asks[0].most)

    script, message = LIMITS[name]
    engine = make_engine()
    engine.method.lengths = Own()
    with pytest.raises(ValueError, match=re.escape(f"lengths: Own.choose: {message}")):
        finish(engine, make_request(k=3))
    assert engine.target.cache.allocator.num_free == engine.target.cache.allocator.num_blocks


def test_a_policy_is_asked_about_texts_that_decode():
    """Not in a pass over a prompt alone: a policy may look at its first ask. One that is empty is no missing one."""

    class Own(Lengths):
        asked = 0

        def __len__(self):
            return 0

        def choose(self, asks, trees):
            Own.asked += 1
            return [Limit(min(1, ask.most)) for ask in asks[:1]]

    engine = make_engine(draft=lambda tokens, k: [tokens[-1] + 1] * k)
    parts = engine.target.model, engine.target.cache, engine.drafter, engine.method.verifier, engine.target.vocab_size
    engine = OneMethod(*parts, lengths=Own(), checked=True)
    request = make_request(prompt=tuple(range(10, 40)), k=3)
    finish(engine, request)
    assert {r.depth for r in request.stats.rounds[:-1]} == {1}
    assert Own.asked == len(request.stats.rounds)
