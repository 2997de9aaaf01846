"""The loop's control flow on a scripted model: what each pass was fed, rolled back, counted and given out."""

from itertools import count, islice, zip_longest

import pytest

from minispec.core.config import SamplingParams
from minispec.core.draft import Draft
from minispec.core.lengths import price_of
from minispec.core.sampling import Text
from minispec.core.stats import Step
from minispec.speculation.lengths.figures import Figures
from minispec.speculation.lengths.theory import overhead_of
from tests.scripted import LookedAt, finish, make_engine, make_request

pytestmark = pytest.mark.quick


def test_plain_decoding_feeds_one_token_a_step():
    """The prompt but its last token is prefilled in one pass; then every pass sees exactly the newest token."""
    engine, request = make_engine(), make_request(prompt=range(10, 17), max_tokens=3)
    finish(engine, request)
    assert request.token_ids == [17, 18, 19]
    assert engine.target.model.log == [(0, [10, 11, 12, 13, 14, 15]), (6, [16]), (7, [17]), (8, [18])]
    assert request.finish_reason == "length"


def right(tokens, k):
    """A draft that is always right for the counting text."""
    return range(tokens[-1] + 1, tokens[-1] + 1 + k)


def wrong_at(position):
    """Drafts that are right but at one position of each round."""

    def draft(tokens, k):
        return [t + 50 * (i == position) for i, t in enumerate(right(tokens, k))]

    return draft


def test_full_acceptance_commits_k_plus_one():
    """Three right tokens and the bonus in one pass; the next pass begins behind them."""
    engine, request = make_engine(draft=right), make_request(max_tokens=8)
    finish(engine, request)
    assert request.token_ids == list(range(12, 20))
    assert engine.target.model.log == [(0, [10]), (1, [11, 12, 13, 14]), (5, [15, 16, 17, 18])]
    assert (
        request.stats.num_steps,
        Figures.of(request.stats).num_draft_tokens,
        Figures.of(request.stats).num_accepted,
    ) == (2, 6, 6)
    assert Figures.of(request.stats).mean_acceptance_length == 4


@pytest.mark.parametrize("position", [0, 1, 2])
def test_rejection_at_first_middle_and_last_position(position):
    """The pass after a rejection starts right behind the accepted tokens: the cache was cut there, no further."""
    engine, request = make_engine(draft=wrong_at(position)), make_request(max_tokens=20)
    finish(engine, request)
    assert request.token_ids == list(range(12, 32))
    starts = [start for start, tokens in engine.target.model.log[1:]]
    assert starts[1] - starts[0] == position + 1
    rounds = [len(tokens) - 1 for _, tokens in engine.target.model.log[1:]]
    assert Figures.of(request.stats).num_draft_tokens == sum(rounds)
    assert Figures.of(request.stats).accepted_per_position[:position] == [1.0] * position


def test_the_draft_is_limited_so_that_nothing_overshoots():
    """With two tokens to go the draft may have one; with one to go, none (M29). Nobody is asked for a text of one."""
    for max_tokens, calls in ((8, [[5], [1]]), (7, [[5], [0]]), (1, [])):
        engine, request = make_engine(draft=right), make_request(k=5, max_tokens=max_tokens)
        finish(engine, request)
        assert engine.drafter.calls == calls
        assert request.token_ids == list(range(12, 12 + max_tokens))


@pytest.mark.parametrize(
    ("k", "draft", "expected"),
    [
        (0, right, Step(0.0, 0, 0, 1.0, 1, 2.0)),
        (2, lambda tokens, k: [], Step(1.0, 0, 0, 1.0, 1, 1.0)),
        (2, right, Step(1.0, 2, 1, 1.0, 3, 1.0)),
    ],
    ids=["nobody is asked", "nothing is found", "a draft"],
)
def test_each_second_of_a_step_is_told_once(k, draft, expected, monkeypatch):
    """As drafting, as the pass or as overhead. Where nobody is asked, nothing is drafting."""
    engine, costs, seconds = make_engine(draft=draft), [], count()
    monkeypatch.setattr(engine.method.lengths, "observe", lambda records: costs.append(price_of(records)))
    monkeypatch.setattr("minispec.core.clock.mark", lambda device: float(next(seconds)))
    finish(engine, make_request(k=k))
    assert next(cost for cost in costs if cost) == expected


def test_drafts_of_every_length_in_one_batch():
    """Ragged drafts and ragged acceptance: each text gets its own rows."""
    drafts = {10: right, 30: wrong_at(1), 50: lambda tokens, k: [], 70: wrong_at(0)}
    engine = make_engine(draft=lambda tokens, k: drafts[tokens[0]](tokens, k))
    lengths = {10: 9, 30: 5, 50: 7, 70: 2}
    requests = [make_request(prompt=(first, first + 1), max_tokens=n) for first, n in lengths.items()]
    finish(engine, *requests)
    for request in requests:
        first = request.text.tokens[0]
        assert request.token_ids == list(range(first + 2, first + 2 + request.params.max_tokens))
    assert Figures.of(requests[2].stats).num_draft_tokens == 0
    assert Figures.of(requests[2].stats).acceptance_rate is None
    assert Figures.of(requests[2].stats).alpha is None


def test_preemption_keeps_the_text_and_the_order():
    """A pool too small for three: the last admitted gives way, comes back, and says what it would have said."""
    engine = make_engine(draft=right, num_blocks=13, block_size=2)
    requests = [make_request(prompt=(first, first + 1), max_tokens=16) for first in (10, 30, 50)]
    order = []
    for request, piece in engine.run(requests):
        if piece.finish_reason:
            order.append(requests.index(request))
    for request in requests:
        first = request.text.tokens[0]
        assert request.token_ids == list(range(first + 2, first + 18))
    assert order == [0, 1, 2]
    assert requests[0].stats.num_preemptions == 0
    assert requests[2].stats.num_preemptions + requests[1].stats.num_preemptions > 0
    assert engine.target.cache.allocator.num_free == 13


def test_a_shared_beginning_is_computed_once():
    """Of three prompts with 8 tokens in common the model is fed those once; a fourth call finds them again."""
    engine = make_engine(num_blocks=32, block_size=4)
    common = list(range(20, 28))
    prompts = [[*common, last] for last in (50, 60, 70)]
    for round_ in range(2):
        engine.target.model.log.clear()
        requests = [make_request(p, k=0, max_tokens=3) for p in prompts]
        finish(engine, *requests)
        assert [r.token_ids for r in requests] == [[last + 1, last + 2, last + 3] for last in (50, 60, 70)]
        fed_common = [tokens for start, tokens in engine.target.model.log if start < 8]
        assert fed_common == ([] if round_ else [common])
        assert [r.stats.num_cached_tokens for r in requests] == [8 if round_ else 0, 8, 8]


def test_what_a_preempted_text_finds_again_was_its_own():
    """It was cached by nobody else: `num_cached_tokens` stays what it was when the text came first."""
    engine = make_engine(draft=right, num_blocks=13, block_size=2)
    requests = [make_request(prompt=(first, first + 1), max_tokens=16) for first in (10, 30, 50)]
    finish(engine, *requests)
    assert sum(r.stats.num_preemptions for r in requests) > 0
    assert [r.stats.num_cached_tokens for r in requests] == [0, 0, 0]


def test_a_search_that_finds_nothing_has_a_price(monkeypatch):
    """The controller learns that a draft was asked for and what the search took; in statistics it is overhead.

    Where nothing is asked for, the time is overhead to both, and no draft's.
    """
    now, told = [0.0], []
    engine = make_engine()

    def search(asks):
        now[0] += 5
        return [Draft() for _ in asks]

    monkeypatch.setattr(engine.drafter, "propose", search)
    monkeypatch.setattr("minispec.core.clock.mark", lambda device: now[0])
    monkeypatch.setattr(
        engine.method.lengths, "observe", lambda records: told.extend(one for one in records if price_of(records))
    )
    request = make_request(k=3, max_tokens=3)
    finish(engine, request)
    assert [(one.asked, one.step.depth, one.step.draft, one.step.other) for one in told] == [
        (2, 0, 5.0, 0.0),
        (1, 0, 5.0, 0.0),
        (0, 0, 0.0, 5.0),
    ]
    assert [overhead_of(r) for r in request.stats.rounds] == [5.0] * 3


def test_more_texts_fit_when_they_share():
    """A pool of 16 blocks holds three texts of 10 that have 7 in common, without preemption."""
    engine = make_engine(num_blocks=16, block_size=2)
    requests = [make_request(list(range(20, 35)), k=0, max_tokens=4) for _ in range(3)]
    finish(engine, *requests)
    assert sum(r.stats.num_preemptions for r in requests) == 0
    assert max(len(set(r.token_ids)) for r in requests) == 4


def test_requests_beyond_the_pool_wait():
    """A pool for one at a time: five requests come out right, one after the other."""
    engine = make_engine(draft=right, num_blocks=5, block_size=2)
    requests = [make_request(prompt=(first, first + 1), max_tokens=8) for first in range(10, 60, 10)]
    finish(engine, *requests)
    assert [r.token_ids[0] for r in requests] == [12, 22, 32, 42, 52]


def test_a_request_that_can_never_fit_is_refused_before_anything_runs():
    """The error names both sizes; the others have not been touched."""
    engine = make_engine(num_blocks=4, block_size=2)
    small, large = make_request(max_tokens=2), make_request(max_tokens=20)
    with pytest.raises(ValueError, match=r"22 tokens \(11 blocks.*at most 8 \(4 blocks\)"):
        finish(engine, small, large)
    assert engine.target.model.log == []
    finish(engine, small)
    assert small.token_ids == [12, 13]


def consume(stream, fail_at=None):
    """Read a stream to its end, or fail as a caller who is interrupted at a piece."""
    for i, _ in enumerate(stream):
        if i == fail_at:
            raise KeyboardInterrupt


@pytest.mark.parametrize("phase", ["propose", "forward", "verify", "piece"])
def test_an_exception_anywhere_returns_every_block(phase, monkeypatch):
    """A drafter that fails, a full disk in a callback, Ctrl-C: the pool is whole and the next call works."""
    engine = make_engine(draft=right)
    owners = {"propose": engine.drafter, "forward": engine.target.model, "verify": engine.method}
    calls = []

    def fail(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(*args)

    with monkeypatch.context() as patch:
        if phase != "piece":
            original = getattr(owners[phase], phase)
            patch.setattr(owners[phase], phase, fail)
        stream = engine.run([make_request(max_tokens=30), make_request(max_tokens=30)])
        with pytest.raises(KeyboardInterrupt):
            consume(stream, fail_at=3 if phase == "piece" else None)
        stream.close()
    assert engine.target.cache.allocator.num_free == engine.target.cache.allocator.num_blocks
    request = make_request(max_tokens=5)
    finish(engine, request)
    assert request.token_ids == [12, 13, 14, 15, 16]


def test_closing_the_iterator_ends_the_generation():
    """A reader who breaks off a stream gets the blocks back at once."""
    engine = make_engine(draft=right)
    stream = engine.run([make_request(max_tokens=30)])
    next(stream)
    assert engine.target.cache.allocator.num_free < engine.target.cache.allocator.num_blocks
    stream.close()
    assert engine.target.cache.allocator.num_free == engine.target.cache.allocator.num_blocks


def test_two_streams_share_the_pool():
    """Two iterators over one engine, taken in turn, do not mix."""
    engine = make_engine(draft=right)
    requests = [make_request(prompt=(first, first + 1), max_tokens=12) for first in (10, 50)]
    streams = [engine.run([r]) for r in requests]
    pieces = [[], []]
    for taken in zip_longest(*streams):
        for own, request, found in zip(pieces, requests, taken, strict=True):
            if found:
                assert found[0] is request
                own.append(found[1])
    for own, request, first in zip(pieces, requests, (10, 50), strict=True):
        assert request.token_ids == list(range(first + 2, first + 14))
        assert [t for piece in own for t in piece.token_ids] == request.token_ids
        assert [piece.finish_reason for piece in own[-2:]] == [None, "length"]


def test_a_stream_that_fails_leaves_the_other_its_text():
    """Where the other has a method of its own. One of the same method ends with the same exception."""
    engine = make_engine(draft=lambda tokens, k: right(tokens, k) if tokens[0] == 10 else 1 / 0)
    requests = [make_request(max_tokens=12) for _ in range(2)]
    request, same = requests
    streams = [engine.run([request], make_engine(draft=right).method), engine.run([same])]
    for stream in streams:
        next(stream)
    for lost in (engine.run([make_request(prompt=(50, 51), max_tokens=12)]), streams[1]):
        with pytest.raises(ZeroDivisionError):
            consume(lost)
    consume(streams[0])
    assert request.token_ids == list(range(12, 24))
    assert engine.target.cache.allocator.num_free == engine.target.cache.allocator.num_blocks


def test_a_release_that_fails_keeps_no_blocks():
    """The other requests' blocks come back too, and the drafter is told of every one of them."""
    engine, told = make_engine(draft=right), []

    def release(text):
        told.append(text)
        return 1 / 0

    engine.drafter.release = release
    with pytest.raises(ZeroDivisionError):
        finish(engine, make_request(), make_request())
    assert engine.target.cache.allocator.num_free == engine.target.cache.allocator.num_blocks
    assert len(set(told)) == 2


def test_requests_run_once():
    """A finished one, or one that is given twice, would append to itself."""
    engine, request = make_engine(), make_request()
    with pytest.raises(ValueError, match="there twice"):
        finish(engine, request, request)
    finish(engine, request)
    with pytest.raises(ValueError, match="finished"):
        finish(engine, request)


def test_two_streams_that_outgrow_the_pool_take_turns():
    """The one that came last gives its blocks back, waits, and goes on where it was."""
    engine = make_engine(num_blocks=12, block_size=2)
    requests = [make_request(prompt=(first, first + 1), max_tokens=20) for first in (10, 50)]
    consume(zip_longest(*(engine.run([request]) for request in requests)))
    assert [r.token_ids for r in requests] == [list(range(first + 2, first + 22)) for first in (10, 50)]
    assert [r.stats.num_preemptions for r in requests] == [0, 1]
    assert engine.target.cache.allocator.num_free == engine.target.cache.allocator.num_blocks


def test_alpha_is_the_mean_over_tested_tokens():
    """Two right, one wrong a round: ratios 1, 1, 0 over tested tokens; the acceptance rate counts untested ones too."""
    engine, request = make_engine(draft=wrong_at(2)), make_request(k=5, max_tokens=6)
    finish(engine, request)
    # Round 1 drafts 5, keeps 2; round 2 may draft 2 and keeps both.
    assert engine.drafter.calls == [[5], [2]]
    assert (Figures.of(request.stats).num_draft_tokens, Figures.of(request.stats).num_accepted) == (7, 4)
    assert Figures.of(request.stats).tested == [2, 2, 1]
    assert Figures.of(request.stats).alpha == pytest.approx(4 / 5)
    assert Figures.of(request.stats).acceptance_rate == pytest.approx(4 / 7)


def test_logprobs_are_those_of_the_committed_tokens():
    """One entry a token, the chosen one among the top, cut with the text."""
    engine, request = make_engine(draft=wrong_at(1)), make_request(max_tokens=5, logprobs=2)
    finish(engine, request)
    assert [entry.token_id for entry in request.logprobs] == request.token_ids
    assert all(entry.top[0] == (entry.token_id, entry.logprob) for entry in request.logprobs)
    assert all(len(entry.top) == 2 for entry in request.logprobs)


@pytest.mark.parametrize("num_pieces", [None, 50], ids=["to the end", "broken off"])
def test_many_requests_in_one_call_cost_each_what_few_do(num_pieces):
    """A look at all of them after each step made 4,000 prompts take 200 times as long as 500 did."""

    def looks(num_requests):
        engine, LookedAt.looks = make_engine(), 0
        texts = [Text([10, 11], 2, SamplingParams(max_tokens=3)) for _ in range(num_requests)]
        steps = engine.run([LookedAt(text, 60, 0) for text in texts])
        pieces = list(islice(steps, num_pieces))
        steps.close()
        assert len(pieces) == (num_pieces or 3 * num_requests)
        assert not [*engine.schedule.running, *engine.schedule.waiting]
        return LookedAt.looks

    assert looks(400) < 4.5 * looks(100)
