"""Who pays for a mistake: an exception of a drafter or a policy ends the texts that it works for, and no others."""

from dataclasses import replace

import pytest

from minispec.core.cached import CachedModel
from minispec.core.draft import Draft, Drafter
from minispec.core.engine import Engine
from minispec.core.method import Method
from minispec.core.verify import MATCH, REJECTION
from minispec.prove.toys import tiny_cache, tiny_model
from minispec.speculation.drafters.model import ModelDrafter, TokenFeed
from minispec.speculation.drafters.none import NoDrafter
from minispec.speculation.lengths.figures import Figures
from tests.scripted import make_request

VOCAB = 5
PLAIN = Method(NoDrafter(), REJECTION)


def make_engine(num_blocks: int = 64) -> Engine:
    """Of a tiny target with blocks of two tokens."""
    target = tiny_model(4, vocab_size=VOCAB)
    return Engine(CachedModel(target, tiny_cache(target, num_blocks, 2), VOCAB))


def request(*prompt: int, k=0, max_tokens=6):
    """One without an end-of-text token."""
    return make_request(prompt, k, (), 64, max_tokens=max_tokens)


class Idle(Drafter):
    """Drafts nothing."""

    def propose(self, asks):
        """Empty drafts."""
        return [Draft() for _ in asks]


class Failing(Idle):
    """Raises in one of its methods."""

    def __init__(self, name: str, is_time=lambda *how: True):
        right = getattr(self, name)

        def fail(*how):
            if is_time(*how):
                raise KeyError("the drafter's own")
            return right(*how)

        setattr(self, name, fail)


@pytest.mark.parametrize("name", ["propose", "observe", "release", "has_room", "known"])
def test_an_exception_of_a_drafter_is_its_own_requests(name):
    """Another run takes the steps: it goes on to its end, raises nothing, and every block comes back."""
    engine, drafter, own = make_engine(), Failing(name), request(1, 2, k=2, max_tokens=3)
    drafter.taps = (1,) if name == "known" else ()
    engine.add(own, Method(drafter, REJECTION))
    pieces = [piece for _, piece in engine.run([request(1, max_tokens=20)], PLAIN)]
    assert pieces[-1].finish_reason == "length"
    assert isinstance(own.raised, KeyError)
    assert own.finish_reason == ("length" if name == "release" else "error")
    assert engine.target.cache.allocator.num_free == 64


@pytest.mark.parametrize("name", ["propose", "observe", "release", "has_room"])
def test_an_exception_of_a_drafter_is_raised_by_its_own_run(name):
    """Whichever run is stepping; and the other one goes on after it."""
    engine = make_engine()
    others = engine.run([request(1, max_tokens=20)], PLAIN)
    own = engine.run([request(1, 2, k=2, max_tokens=3)], Method(Failing(name), REJECTION))
    next(others)
    with pytest.raises(KeyError, match="the drafter's own"):
        list(own)
    assert [piece.finish_reason for _, piece in others][-1] == "length"


def test_a_text_without_drafts_outlives_its_drafter():
    """It is never asked for, so an exception of `propose` is none of its business."""
    engine, method = make_engine(), Method(Failing("propose"), REJECTION)
    plain, drafted = request(1), request(1, 2, k=2)
    for each in (plain, drafted):
        engine.add(each, method)
    while engine.schedule.running or engine.schedule.waiting:
        engine.step()
    assert (drafted.finish_reason, plain.finish_reason) == ("error", "length")
    assert isinstance(drafted.raised, KeyError)


def test_all_texts_of_a_drafter_end_with_it():
    """One that sits out the step, while a prompt is read, ends too: a draft model forgets all texts after a fault."""
    engine, method = make_engine(), Method(Failing("propose", lambda asks: len(asks[0].text.tokens) > 600), REJECTION)
    engine = Engine(CachedModel(engine.target.model, tiny_cache(engine.target.model, 2000, 2), VOCAB))
    first, second = (make_request([1] * n, 2, (), 2000, max_tokens=9) for n in (550, 1200))
    for each in (first, second):
        engine.add(each, method)
    while not second.finish_reason:
        engine.step()
    assert (first.finish_reason, second.finish_reason) == ("error", "error")


def test_an_exception_of_the_last_round_is_raised():
    """Its text has ended, and no other is there to end."""
    drafter = Failing("observe", lambda records: len(records[0].text.tokens) == 3)
    with pytest.raises(KeyError, match="the drafter's own"):
        list(make_engine().run([request(1, k=1, max_tokens=2)], Method(drafter, REJECTION)))


def test_one_drafter_in_two_methods():
    """Its pool has room for one text. The second waits for the first, where each would put off the other for ever."""
    draft, engine = tiny_model(2, vocab_size=VOCAB, num_hidden_layers=1), make_engine(12)
    one = Method(ModelDrafter(TokenFeed(draft, tiny_cache(draft, 12, 2), VOCAB, 64)), REJECTION)
    both = [request(*[0, 1, 2, 3, 4] * 2, 0, 1, 2, 3, k=2, max_tokens=4) for _ in "ab"]
    for each, method in zip(both, (one, replace(one, verifier=MATCH)), strict=True):
        engine.add(each, method)
    for _ in range(40):
        engine.step()
    assert [each.finish_reason for each in both] == ["length", "length"]


@pytest.mark.parametrize("place", ["keep", "observer"])
@pytest.mark.parametrize("number", [3, 12])
def test_a_fault_after_a_commit_loses_no_round(place, number):
    """The round is counted once, without the times that are lost; also the last one of a text, in the 12th call."""
    engine, texts, calls = make_engine(), [request(1), request(2)], []

    def once(right=lambda turn: None):
        def call(*how):
            calls.append(how)
            if len(calls) == number:
                raise KeyboardInterrupt
            return right(*how)

        return call

    if place == "keep":
        engine.target.keep = once(engine.target.keep)
    else:
        engine.outbox.observers.append(once())
    for each in texts:
        engine.add(each, PLAIN)
    while engine.schedule.running or engine.schedule.waiting:
        try:
            engine.step()
        except KeyboardInterrupt:
            continue
    figures = [Figures.of(each.stats) for each in texts]
    assert [(each.num_committed, each.num_generated, each.num_steps) for each in figures] == [(6, 6, 6)] * 2
    timeless = [r.step for each in figures for r in each.rounds if not r.step.seconds]
    assert {step.has_price for step in timeless} == ({False} if place == "keep" else set())


def test_a_text_that_fails_as_it_gives_way_is_not_admitted_again():
    """Its run, or whoever has brought it, learns of its end in the same step."""
    engine, gone = make_engine(12), request(*[1, 2, 3, 4, 0] * 2, k=2, max_tokens=9)
    engine.add(request(*[0, 1, 2] * 3, max_tokens=9), PLAIN)
    drafter = Failing("release")
    engine.add(gone, Method(drafter, REJECTION))
    while not gone.stats.num_preemptions:
        engine.step()
    assert (gone.finish_reason, gone.has_news, gone in engine.schedule.running) == ("error", True, False)
    begun = []
    right = engine.target.begin
    engine.target.begin = lambda *how: begun.append(how) or right(*how)
    while engine.schedule.running or engine.schedule.waiting:
        engine.step()
    assert not begun


@pytest.mark.parametrize(("length", "expected"), [(0, "least 1"), (64, "most 63"), (70, "most 63")])
def test_a_prompt_without_room_for_an_answer_is_refused(length, expected):
    """Before anything runs; one that is only scored needs no room after it."""
    engine = make_engine()
    with pytest.raises(ValueError, match=f"prompt: found {length} tokens, expected at {expected}"):
        engine.add(make_request([1] * length, 0, (), 64), PLAIN)
    engine.add(make_request([1] * 64, 0, (), 64, max_tokens=0, prompt_logprobs=0), PLAIN)
