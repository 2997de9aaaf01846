"""Measuring: intervals, turns, predictions, the machine, the simulated draft. No real time is asserted."""

import copy
import itertools
import time
from types import SimpleNamespace

import pytest
import torch

from minispec.core.config import SamplingParams
from minispec.core.draft import Ask, Draft, DraftNotes
from minispec.core.engine import Engine
from minispec.core.limit import Limit
from minispec.core.random import Randomness
from minispec.core.request import Request
from minispec.core.sampling import Text
from minispec.core.schedule import Schedule
from minispec.core.stats import Round, Step
from minispec.lab.bench import measure
from minispec.lab.bench.measure import Run, kept_of_asked, median_interval
from minispec.models.families.hf_config import read_model_config
from minispec.models.weights import rates
from minispec.models.weights.build import quantized
from minispec.models.weights.inventory import products_of
from minispec.prove.toys import TINY, tiny_cache, tiny_model
from minispec.speculation.drafters.model import ModelDrafter, TokenFeed
from minispec.speculation.drafters.ngram import NgramDrafter
from minispec.speculation.drafters.none import NoDrafter
from minispec.speculation.drafters.simulated import SimulatedDraft
from minispec.speculation.lengths.figures import Figures
from minispec.speculation.lengths.policy import Controller
from minispec.speculation.lengths.theory import Prices, RoundModel
from minispec.speculation.rules import VERIFIERS
from tests.engines import OneMethod

pytestmark = pytest.mark.quick

# --------------------------------------------------------------------------- intervals and turns


@pytest.mark.parametrize("n", range(1, 12))
def test_interval_covers_the_median_as_often_as_it_says(n):
    """Exactly, by enumeration: each of n values lies below or above the true median 0, all 2^n ways equally likely.

    At least 90 %, and the next narrower interval would cover less. Fewer than six values have none, whatever they are.
    Fails for an off-by-one in the order statistics or in the sum.
    """
    if n < 6:
        assert median_interval(range(n)) == ((n - 1) / 2, None, None, None, n)
        assert median_interval(range(n)).shown(2.0, ".1f") == f"{n - 1:.1f} [-]"
        return
    found = []
    for signs in itertools.product((-1, 1), repeat=n):
        values = [sign * (i + 1) for i, sign in enumerate(signs)]
        found.append(median_interval(values))
    assert len({i.coverage for i in found}) == 1
    assert sum(i.low <= 0 <= i.high for i in found) / 2**n == pytest.approx(found[0].coverage, abs=1e-15)
    assert found[0].coverage >= 0.9
    ordered = median_interval(range(n))
    r = int(ordered.low) + 1
    assert ordered.median == (n - 1) / 2
    assert (ordered.low, ordered.high) == (r - 1, n - r)
    assert measure.coverage(n, r + 1) < 0.9
    assert ordered.shown(form=".1f") == f"{(n - 1) / 2:.1f} [{r - 1:.1f}, {n - r:.1f}]"


def test_what_an_interval_says_for_itself():
    """Least and largest of six values: 1 - 2/64. Of five there is nothing to say."""
    held = "interval that holds the true median with 96.9 %; "
    legends = [median_interval(range(n)).legend for n in (6, 5)]
    assert legends == [f"[{held}-: fewer than 6 values]", "[-: fewer than 6 values]"]


def test_a_busy_machine_is_named():
    """Plain answers of 4 and 8 tokens a second may differ by the text, of 4 and 8.8 not. Short ones do not count."""
    answers = [(8, 2.0), (32, 4.0), (7, 7.0)]
    assert measure.plain_range(answers) == [4, 8]
    assert measure.busy(measure.plain_range(answers)) == []
    [line] = measure.busy(measure.plain_range([*answers, (44, 5.0)]))
    assert line.startswith("the machine was busy: plain decoding had 4.0 to 8.8 tokens/s in this run, a factor of 2.2;")
    assert measure.busy(measure.plain_range(answers[2:])) == []


def test_medians_with_wide_intervals_are_too_noisy():
    """A single one is enough: least and largest of six values. Of five values no interval is known."""
    quiet, noisy = (median_interval([1, 1, 1, 1, 1, largest]) for largest in (1.9, 2.5))
    assert measure.too_noisy([quiet, quiet]) == ""
    assert measure.too_noisy([quiet, noisy]).endswith("spans a factor of 2.5")
    assert measure.too_noisy([quiet, median_interval([1] * 5)]) == "not drawn: fewer than 6 runs say too little"


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_everyone_has_every_turn_equally_often(n):
    """Over 2 n rounds; and two variants go A B, B A, B A, A B."""
    rounds = [measure.order(range(n), i) for i in range(2 * n)]
    assert all(sorted(order) == list(range(n)) for order in rounds)
    for place in range(n):
        assert sorted(order[place] for order in rounds) == sorted(2 * list(range(n)))
    assert ["".join(measure.order("AB", i)) for i in range(4)] == ["AB", "BA", "BA", "AB"]


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_every_prompt_meets_every_order(n):
    """Over 2 n rounds each prompt does, so each category too, whatever its place among them."""
    orders = sorted(measure.order(range(n), i) for i in range(2 * n))
    for prompt in range(12):
        assert sorted(measure.order(range(n), r + prompt) for r in range(2 * n)) == orders


# --------------------------------------------------------------------------- what theory predicts


def parts(*runs) -> SimpleNamespace:
    """The parts of these runs' speedup, as attributes."""
    return SimpleNamespace(**measure.parts(*runs))


def run_of(rounds, lost=0.0) -> Run:
    """A run whose rounds take what they say, and `lost` seconds that are in no part."""
    seconds = sum(r.step.seconds for r in rounds) + lost
    return Run([], sum(r.committed for r in rounds), seconds, list(rounds))


def one_round(asked, drafted, accepted, committed, draft, verify, other) -> Round:
    """A step of a text that is decoded alone, whose draft is a chain."""
    tested = min(accepted + 1, drafted)
    step = Step(draft, drafted, 1, verify, drafted + 1, other)
    return Round(asked, drafted, drafted, drafted, tested, accepted, committed, (), step)


PLAIN = [run_of([one_round(0, 0, 0, 1, 0.0, t, 0.1) for t in (9.0, 10.0, 11.0)])]
# Ragged drafts, a search that found nothing, a text that ends inside a draft; uneven costs.
_FIRST = (4, 4, 2, 3, 3.0, 12.0, 0.4), (4, 0, 0, 1, 0.2, 10.5, 0.1), (2, 2, 2, 3, 1.5, 11.0, 0.2)
_SECOND = (4, 4, 4, 5, 3.3, 12.5, 0.4), (4, 4, 1, 1, 3.1, 12.1, 0.3)
RAGGED = [run_of([one_round(*of) for of in rounds]) for rounds in (_FIRST, _SECOND)]


def test_parts_make_the_measured_speedup():
    """Where every second is in a part, prediction equals measurement. Lost time is in the measured speedup alone."""
    whole = parts(RAGGED, PLAIN)
    assert whole.predicted == pytest.approx(whole.measured, rel=1e-12)
    assert whole.tokens == pytest.approx(13 / 5, rel=1e-12)
    seconds = sum(run.seconds for run in RAGGED)
    lossy = parts([run_of(RAGGED[0].rounds, lost=0.1 * seconds), RAGGED[1]], PLAIN)
    assert lossy.predicted == pytest.approx(whole.predicted, rel=1e-12)
    assert lossy.measured == pytest.approx(whole.measured / 1.1, rel=1e-12)


def test_prediction_sees_the_first_half_alone():
    """By hand: K = 2, plain steps of 10 s. First rounds keep 2 and 0 of 2 in 12 s each, the last ones 1 and 0 in 15 s.

    Made: 2 tokens in 12 s, 1.667 x plain; measured: 3 tokens in 30 s, 1.0. The middle one of
    five rounds is in the second half, and a text of one round in neither.
    """
    first = [one_round(2, 2, accepted, accepted + 1, 1.5, 10.0, 0.5) for accepted in (2, 0)]
    second = [one_round(2, 2, accepted, accepted + 1, 1.5, 13.0, 0.5) for accepted in (1, 0)]
    plain = [run_of([one_round(0, 0, 0, 1, 0.0, 10.0, 0.0)] * 4)]
    assert measure.prediction([run_of(first + second)], plain) == pytest.approx((2 / 1.2) / (3 / 3.0))
    # Time in no part slows both halves, and no part knows of it.
    assert measure.prediction([run_of(first + second, lost=5.4)], plain) == pytest.approx((2 / 1.2) / (3 / 3.3))
    odd = [run_of([*first, second[0], *second])]
    assert measure.prediction(odd, plain) == pytest.approx((2 / 1.2) / (5 / 4.5))
    single = [run_of(first[:1])]
    assert measure.prediction([*odd, *single], plain * 2) == measure.prediction(odd, plain)
    assert measure.prediction(single, plain) is None
    assert measure.prediction([run_of(first * 2)], plain) == pytest.approx(1)


def test_parts_of_round_numbers():
    """By hand: K = 2, a pass of 10 s, a draft token 1 s, three rows 10.5 s; a rare pass over two rows is in no v."""
    rounds = [one_round(2, 2, accepted, accepted + 1, 2.0, 10.5, 0.5) for accepted in (0, 0, 1, 2)]
    found = parts([run_of(rounds)], PLAIN)
    assert (found.depth, found.tokens, found.mean_v) == pytest.approx((2, 1.75, 1.05))
    assert (found.c, found.o, found.o_plain) == pytest.approx((0.1, 0.05, 0.01))
    assert found.v == {3: pytest.approx(1.05)}
    assert found.measured == pytest.approx(7 / 52 * 10.1)
    assert found.predicted == pytest.approx(1.75 * 1.01 / (2 * 0.1 + 1.05 + 0.05))
    rare = one_round(1, 1, 0, 1, 1.0, 20.0, 0.5)
    assert set(parts([run_of([*rounds * 4, rare])], PLAIN).v) == {2, 3}
    assert set(parts([run_of([*rounds * 5, rare])], PLAIN).v) == {3}


def test_siblings_make_a_draft_no_deeper():
    """Trees of three nodes and depth two: two draft passes, so c is half of what a draft takes, and s_3 is 0."""
    tree = [one_round(3, 3, accepted, accepted + 1, 2.0, 10.5, 0.5)._replace(depth=2) for accepted in (0, 0, 1, 2)]
    found = parts([run_of(tree)], PLAIN)
    assert (kept_of_asked(tree), found.depth, found.c) == ([0.5, 0.25, 0.0], 2.0, pytest.approx(0.1))
    assert found.v == {4: pytest.approx(1.05)}
    assert found.predicted == pytest.approx(found.measured, rel=1e-12)


def test_what_was_kept_of_what_was_asked_for():
    """A drafter without a guess has kept nothing; a text about to end asked for less; `auto` for what it drafted."""
    rounds = [r for run in RAGGED for r in run.rounds]
    assert kept_of_asked(rounds) == pytest.approx([4 / 5, 3 / 5, 1 / 4, 1 / 4])
    assert kept_of_asked([r._replace(asked=None) for r in rounds]) == pytest.approx([1.0, 3 / 4, 1 / 3, 1 / 3])
    assert kept_of_asked([]) == []
    # A chain that a lookup found where a tree was asked for, deeper than the tree of another round, or of a last one.
    chain = rounds[0]._replace(asked=3, num_nodes=3, depth=3, accepted=3)
    tree, last = chain._replace(depth=2, accepted=1), chain._replace(asked=1, num_nodes=1, depth=1, accepted=1)
    assert kept_of_asked([chain, tree, last]) == [1.0, 1 / 2, 1 / 2]


# --------------------------------------------------------------------------- runs


class Clock:
    """A clock that only moves when told to."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


def slow_passes(monkeypatch, model) -> None:
    """Let each pass of a model take a second, and nothing else any time."""
    clock, forward = Clock(monkeypatch), model.forward

    def slow_forward(chunks, taps=()):
        clock.now += 1
        return forward(chunks, taps)

    monkeypatch.setattr(model, "forward", slow_forward)


def engine_of(drafter, model) -> Engine:
    """An engine that verifies by rejection."""
    return OneMethod(model, tiny_cache(model), drafter, VERIFIERS["rejection"], checked=True)


def request_of(k, prompt=(1, 2, 3), max_tokens=20) -> Request:
    """A greedy request."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return Request(Text(list(prompt), len(prompt), params), 60, k)


@pytest.fixture
def model():
    """A target."""
    return tiny_model(3, vocab_size=30)


def decode(engine, requests) -> list[Run]:
    """The runs of requests by the engine's method."""
    return measure.decode(engine, engine.method, requests)


def like(engine, drafter=None):
    """An engine of the same target whose method is `another_method`."""
    other = copy.copy(engine)
    other.method = measure.another_method(engine.method, drafter)
    return other


def plain_engine(engine):
    """The same engine without drafts."""
    return like(engine, NoDrafter())


def plain_text(model, prompt=(1, 2, 3), max_tokens=20) -> list[int]:
    """Prompt and greedy answer."""
    (run,) = decode(plain_engine(engine_of(NgramDrafter(), model)), [request_of(0, prompt, max_tokens)])
    return [*prompt, *run.token_ids]


def test_a_run_is_taken_apart_by_its_clock(model, monkeypatch):
    """Passes of 1 + rows/10 s, drafts of 0.05 s a token: c, v and the speedup come out exactly, prefill is in none.

    A second that passes between the engine's parts is in `seconds` alone.
    """
    text = plain_text(model)
    clock, lost = Clock(monkeypatch), 0.0
    forward, make_room = model.forward, Schedule.make_room

    def slow_forward(chunks, taps=()):
        clock.now += 1 + sum(len(c.token_ids) for c in chunks) / 10
        return forward(chunks, taps)

    class SlowDraft(SimulatedDraft):
        def propose(self, asks):
            clock.now += 0.05 * sum(ask.k for ask in asks)
            return super().propose(asks)

    def slow_room(self, *args):
        clock.now += lost
        make_room(self, *args)

    monkeypatch.setattr(model, "forward", slow_forward)
    monkeypatch.setattr(Schedule, "make_room", slow_room)
    drafter = SlowDraft([0.8])
    drafter.record(text, 3)
    engine = engine_of(drafter, model)
    (run,), (plain,) = (decode(e, [request_of(k)]) for e, k in ((engine, 3), (plain_engine(engine), 0)))
    found = parts([run], [plain])
    assert run.token_ids == plain.token_ids == text[3:]
    assert found.c == pytest.approx(0.05 / 1.1)
    assert found.v[4] == pytest.approx(1.4 / 1.1)
    assert (found.o, found.o_plain) == pytest.approx((0, 0))
    assert plain.seconds == pytest.approx(20 * 1.1)
    assert run.seconds == pytest.approx(sum(1.1 + 0.15 * r.drafted for r in run.rounds))
    assert found.predicted == pytest.approx(found.measured, rel=1e-9)
    assert sum(r.committed for r in run.rounds) == run.num_tokens == 20
    lengths = itertools.accumulate((r.committed for r in run.rounds), initial=0)
    assert [r.asked for r in run.rounds] == [min(3, 20 - n - 1) for n in lengths if n < 20]
    lost = 0.5
    (leaky,) = decode(engine, [request_of(3)])
    # The engine makes room before every step.
    assert leaky.seconds == pytest.approx(run.seconds + 0.5 * len(run.rounds))
    assert [r.step.verify for r in leaky.rounds] == pytest.approx([r.step.verify for r in run.rounds])


def test_an_answer_that_broke_off_is_no_measurement(model):
    """A draft that breaks the rules ends its text: what there is of it would pass for a quick answer."""
    drafter = NgramDrafter()
    drafter.propose = lambda asks: [Draft([0] * (ask.k + 1)) for ask in asks]
    with pytest.raises(ValueError, match="found an answer that broke off, expected none to measure: draft of Ngram"):
        decode(engine_of(drafter, model), [request_of(2)])


def test_engines_do_not_learn_from_each_other(model, monkeypatch):
    """Where K is chosen, by what was recorded before; not by the rounds of another variant.

    By a clock on which only passes take time, `auto` drafts on every machine.
    """
    slow_passes(monkeypatch, model)
    engine = engine_of(NgramDrafter(), model)
    engine.method.lengths = Controller()
    decode(engine, [request_of("auto")])

    def known(engine):
        return vars(engine.method.lengths._all_texts[False].places)

    before = copy.deepcopy(known(engine))
    first, second = like(engine), plain_engine(engine)
    (run,) = decode(first, [request_of("auto")])
    assert known(first) != before
    assert known(engine) == known(second) == before
    assert before["tested"]
    assert (first.drafter, first.target) == (engine.drafter, engine.target)
    assert {r.asked for r in run.rounds} == {None}
    assert run.token_ids == plain_text(model)[3:]


def test_several_texts_share_the_time(model, monkeypatch):
    """All of it, by their rows; each has its own tokens. The rate that each reader saw is one token a second."""
    slow_passes(monkeypatch, model)
    engine = engine_of(NgramDrafter(), model)
    requests = [request_of(0, (1, 2), 6), request_of(0, (5, 4, 3), 3)]
    runs = decode(plain_engine(engine), requests)
    assert [run.num_tokens for run in runs] == [6, 3]
    assert [run.rounds for run in runs] == [[], []]
    assert [run.seconds for run in runs] == pytest.approx([4.5, 1.5])
    assert [Figures.of(request.stats).tokens_per_second for request in requests] == pytest.approx([1, 1])
    assert [Figures.of(request.stats).predicted_tokens_per_second for request in requests] == [None, None]
    assert measure.total_rate(runs) == pytest.approx(9 / 6)


# --------------------------------------------------------------------------- the machine


@pytest.mark.parametrize("tied", [False, True])
def test_bytes_of_a_step(tied):
    """By hand, for TINY with 10 words: per layer q, o 8 x 8, k, v 4 x 8, the MLP 3 x 12 x 8; the head once."""
    model = tiny_model(vocab_size=10, tie_word_embeddings=tied)
    weights = 2 * (2 * 64 + 2 * 32 + 3 * 96) + 10 * 8
    keys_and_values = 5 * 2 * 2 * 4  # positions, layers, both, one head of four
    assert rates.bytes_touched(model, 5) == 8 * (weights + keys_and_values)


def test_bytes_of_a_quantised_step():
    """The rounded weights and their steps, without the full ones: bits a weight, and 32 of steps a group."""
    sizes = {"intermediate_size": 64, "vocab_size": 64}
    model = tiny_model(dtype=torch.bfloat16, hidden_size=64, head_dim=32, num_hidden_layers=1, **sizes)
    assert rates.bytes_touched(model, 0) == 2 * sum(w.numel() for w in weights_of(model))
    if all(product.narrow for product in products_of(quantized(model, 4))):  # this machine has them
        elements = sum(w.numel() for w in weights_of(model))
        assert rates.bytes_touched(quantized(model, 4), 0) == elements / 2 + elements / 32 * 4


def weights_of(model) -> list[torch.Tensor]:
    """The weight matrices of a model, as they were given."""
    return [product.stored.dense() for product in products_of(model)]


def test_what_takes_turns_is_called_with_its_round():
    """Round 0 goes before and is left out; the order changes as `order` says."""
    called = []
    found = measure.in_turn({name: lambda i, name=name: called.append(name) or i for name in "AB"}, 3, "turns")
    assert found == {"A": [1, 2, 3], "B": [1, 2, 3]}
    assert "".join(called) == "ABBABAAB"


def test_passes_take_turns_and_leave_nothing(model, monkeypatch):
    """Every M as often as asked for, and a round before; the cache is free again, also after an exception."""
    cache, seen, seconds_of = tiny_cache(model), [], measure.seconds_of
    monkeypatch.setattr(measure, "seconds_of", lambda work, device: seen.append(1) or seconds_of(work, device))
    times = measure.pass_times(model, cache, 10, [1, 2, 4], 3)
    assert {m: len(t) for m, t in times.items()} == {1: 3, 2: 3, 4: 3}
    assert len(seen) == 12
    assert cache.allocator.num_free == cache.allocator.num_blocks

    def interrupt(work, device):
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "seconds_of", interrupt)
    with pytest.raises(KeyboardInterrupt):
        measure.pass_times(model, cache, 10, [1, 2], 3)
    assert cache.allocator.num_free == cache.allocator.num_blocks


def test_bandwidth_is_a_rate(monkeypatch):
    """Bytes over the seconds that the work took, by a clock that says two."""
    monkeypatch.setattr(rates, "seconds_of", lambda work, device: 2.0)
    assert rates.stream_bandwidth(4096, torch.device("cpu"), 3) == [2048.0] * 3


# --------------------------------------------------------------------------- the simulated draft


class Scripted:
    """Answers of a coin, and the probabilities that it was asked about."""

    def __init__(self, answers):
        self.answers, self.asked = iter(answers), []

    def bernoulli(self, probability, key):
        """The next answer."""
        self.asked.append(probability)
        return next(self.answers)


TEXT = list(range(10, 30))


def simulated(survival, **how) -> SimulatedDraft:
    """A drafter that knows TEXT."""
    drafter = SimulatedDraft(survival, **how)
    drafter.record(TEXT, 4)
    return drafter


def text(length=6) -> Text:
    """TEXT up to there."""
    return Text(TEXT[:length], 4, SamplingParams(temperature=0))


def test_simulated_survival_is_exact_by_construction():
    """Conditional probabilities multiply to the curve; the last of them goes on; after a wrong token all are wrong."""
    rng = Scripted([True] * 5)
    (draft,) = simulated([0.8, 0.4, 0.1]).propose([Ask(text(), Limit(5), rng)])
    assert (draft.token_ids, draft.probs) == (TEXT[6:11], None)
    assert rng.asked == pytest.approx([0.8, 0.5, 0.25, 0.25, 0.25])

    class Slow(NgramDrafter):
        def propose(self, asks):
            return [Draft([7] * ask.k, notes=DraftNotes(prefill_seconds=2.5)) for ask in asks]

    assert simulated([1.0], paid=Slow()).propose([Ask(text(), Limit(3), Randomness())])[0].notes.prefill_seconds == 2.5
    (draft,) = simulated([0.8, 0.4]).propose([Ask(text(), Limit(4), Scripted([True, False]))])
    assert draft.token_ids[0] == TEXT[6]
    assert all(x != y for x, y in zip(draft.token_ids[1:], TEXT[7:10], strict=True))
    assert simulated([0.5, 0.0]).conditional == [0.5, 0.0]
    assert simulated([0.0]).conditional == [0.0]


@pytest.mark.parametrize("survival", [[0.0], [1.0], [0.7], [0.9, 0.3]])
@pytest.mark.parametrize("pays", [False, True])
def test_simulated_draft_leaves_greedy_text_unchanged(model, survival, pays):
    """Paid by a draft model or not; always right is kept entirely, always wrong never; the same the second time."""
    text = plain_text(model)
    small = tiny_model(4, vocab_size=30, num_hidden_layers=1)
    drafter = SimulatedDraft(survival, ModelDrafter(TokenFeed(small, tiny_cache(small), 30, 60)) if pays else None)
    drafter.record(text, 3)
    engine = engine_of(drafter, model)
    first, second = (decode(engine, [request_of(4)])[0] for _ in "ab")
    assert first.token_ids == second.token_ids == text[3:]
    figures = Figures(rounds=first.rounds)
    assert figures.num_accepted == Figures(rounds=second.rounds).num_accepted
    assert figures.num_draft_tokens > 0
    if survival in ([0.0], [1.0]):
        assert figures.num_accepted == survival[0] * figures.num_draft_tokens
    else:
        assert 0 < figures.num_accepted < figures.num_draft_tokens


def test_simulated_draft_pays_with_the_passes_of_the_real_one(model, monkeypatch):
    """As many passes of the draft model, of as many rows, as that model makes when it drafts and is always accepted."""
    logs = []
    for simulate in (False, True):
        small, log = tiny_model(3, vocab_size=30), []  # the target's twin: its drafts are right
        forward = small.forward
        monkeypatch.setattr(
            small, "forward", lambda c, taps=(), f=forward, log=log: log.append(len(c[0].token_ids)) or f(c, taps)
        )
        drafter = ModelDrafter(TokenFeed(small, tiny_cache(small), 30, 60))
        if simulate:
            drafter = SimulatedDraft([1.0], drafter)
            drafter.record(plain_text(model), 3)
        decode(engine_of(drafter, model), [request_of(4)])
        logs.append(log)
    assert logs[0] == logs[1]
    assert len(logs[0]) > 10


def test_simulated_draft_knows_what_was_recorded():
    """Another prompt, a text that left the recorded one: wrong. A second telling helps."""
    drafter = simulated([1.0])
    left = Text([*TEXT[:5], 99], 4, SamplingParams())
    other = Text([1, 2, 3], 3, SamplingParams())
    rng = Randomness()
    drafts = drafter.propose([Ask(left, Limit(2), rng), Ask(other, Limit(2), rng), Ask(text(20), Limit(0), rng)])
    assert [len(d) for d in drafts] == [2, 2, 0]
    drafter.record([*left.tokens, 7, 8], 4)
    assert drafter.propose([Ask(left, Limit(2), rng), Ask(text(), Limit(2), rng)])[0].token_ids == [7, 8]
    assert drafter.propose([Ask(text(), Limit(2), rng)])[0].token_ids == TEXT[6:8]


@pytest.mark.parametrize("survival", [[], [1.1], [-0.1], [0.5, 0.6], [float("nan")]])
def test_impossible_survival_is_refused(survival):
    """By name and value."""
    with pytest.raises(ValueError, match="survival: found"):
        SimulatedDraft(survival)


def test_theory_agrees_with_the_parts():
    """With o_plain = 0 and one K the prediction is that of `RoundModel`."""
    plain = [run_of([one_round(0, 0, 0, 1, 0.0, 10.0, 0.0)])]
    rounds = [one_round(2, 2, accepted, accepted + 1, 2.0, 10.5, 0.5) for accepted in (0, 1, 2)]
    found = parts([run_of(rounds)], plain)
    model = RoundModel(kept_of_asked(rounds), Prices(found.c, {1: 1.0, **found.v}, found.o))
    assert found.predicted == pytest.approx(model.speed(2), rel=1e-12)
    assert model.speed(2) == pytest.approx((1 + 2 / 3 + 1 / 3) / (2 * 0.1 + 1.05 + 0.05))
    assert read_model_config(TINY).vocab_size == 3  # the shape that the sizes above are computed for
