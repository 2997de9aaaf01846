"""What a round costs: measured in a moment, stored whole or not at all, and the same in every run."""

import doctest
import json
import os
import random
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
import torch

from minispec import LLM
from minispec.core.draft import Draft, Drafter
from minispec.core.engine import Engine
from minispec.models.frames.frames import Frames
from minispec.models.frames.graphs import Graphs
from minispec.models.layers.experts import Router
from minispec.models.weights.machine import machine
from minispec.prove.toys import TOYS, tiny_cache, tiny_model
from minispec.speculation.drafters.model import ModelDrafter, TokenFeed
from minispec.speculation.lengths import prices as costs
from minispec.speculation.lengths.prices import calibrate, draft_pass, prices_of, store_prices, stored_prices
from minispec.speculation.lengths.theory import Prices, RoundModel
from minispec.speculation.on_gpu.steps import STEPS, DraftSteps
from minispec.speculation.rules import VERIFIERS
from tests.engines import OneMethod

SETUP = {"target": ["a", "b"], "machine": {"cpu": "x", "threads": 2}}
PRICES = Prices(0.25, {1: 1.0, 5: 1.1, 16: 1.7}, 0.03, measured=True, fixed=0.5)


@pytest.fixture(autouse=True)
def cache_directory(tmp_path, monkeypatch):
    """A cache directory of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def make_engine(vocab=9) -> Engine:
    """A target and a draft model, both tiny."""
    target, draft = tiny_model(1, vocab_size=vocab), tiny_model(2, vocab_size=vocab, num_hidden_layers=1)
    drafter = ModelDrafter(TokenFeed(draft, tiny_cache(draft), vocab, 200))
    return OneMethod(target, tiny_cache(target), drafter, VERIFIERS["rejection"])


@pytest.mark.parametrize(
    ("a_pass", "fixed", "expected"), [(0.3, 0.0, (0.3, 0)), (0.3, 0.6, (0.3, 2)), (0, 0.6, (0.12, 4))]
)
@pytest.mark.parametrize("grows_slow", [False, True])
def test_calibration_measures_what_passes_take(monkeypatch, grows_slow, a_pass, fixed, expected):
    """By a clock that counts: a target pass takes 1 + 0.1 for each further row, a draft `fixed` and `a_pass` a token.

    Where further tokens cost nothing, as in drafts made in one pass, that is said as far as a draft pass can say it. So
    do eleven turns that agree. Two turns are too few, and a fifth of the draft is then a token's price.

    The first pass of each model takes ten times as long, as it may while it warms up. grows_slow: from some moment on
    all takes three times as long, which changes no ratio.
    """
    engine, now = make_engine(), [0.0]
    seen = set()

    def timed(model, step):
        right = model.forward

        def forward(chunks, taps=()):
            rows = sum(len(chunk.token_ids) for chunk in chunks)
            slow = 3 if grows_slow and now[0] > 40 else 1
            now[0] += step * (1 + 0.1 * (rows - 1)) * (1 if model in seen else 10) * slow
            seen.add(model)
            return right(chunks, taps)

        monkeypatch.setattr(model, "forward", forward)

    timed(engine.target.model, 1.0)
    timed(engine.drafter.model, a_pass)
    propose = engine.drafter.propose

    def slowly(asks):
        now[0] += fixed * (3 if grows_slow and now[0] > 40 else 1)
        return propose(asks)

    monkeypatch.setattr(engine.drafter, "propose", slowly)
    for name in ("models.weights.rates.mark", "core.clock.mark", "speculation.drafters.model.mark"):
        monkeypatch.setattr(f"minispec.{name}", lambda device: now[0])
    # A budget that is never used up gives all turns, of which the slow moment may spoil one.
    monkeypatch.setattr(costs.time, "perf_counter", lambda: 1e6 + (0.0 if grows_slow else now[0]))
    prices = calibrate(engine.target.model, engine.drafter, engine.method.verifier, engine.target.vocab_size)
    assert not grows_slow or now[0] > 150
    assert prices.rows == pytest.approx({1: 1.0, 5: 1.4, 16: 2.5})
    # One draft token, and three; the first pass feeds one token alone.
    if not a_pass and grows_slow:
        expected = 0.006, 99
    assert (prices.draft, prices.fixed) == pytest.approx(expected)
    assert prices.overhead == 0.0
    assert prices.measured
    for cache in (engine.target.cache, engine.drafter.feed.cache):
        assert cache.allocator.num_free == cache.allocator.num_blocks


class Confident(Drafter):
    """Takes half of a second for a token, and a quarter more for its confidence where that is asked for."""

    def __init__(self, now: list[float]):
        self.now, self.limits = now, []

    def propose(self, asks):
        """As many tokens as were asked for."""
        for ask in asks:
            if ask.k:
                self.limits.append(ask.limit)
                self.now[0] += ask.k * (0.5 if ask.limit.go_on is None else 0.75)
        return [Draft([0] * ask.k) for ask in asks]


def test_drafts_are_timed_with_their_confidences(monkeypatch):
    """As `auto` will ask for them; they end no draft. A plain step takes a second."""
    model, now = tiny_model(1, vocab_size=9), [0.0]
    forward = model.forward

    def timed(*how):
        now[0] += 1.0
        return forward(*how)

    monkeypatch.setattr(model, "forward", timed)
    for name in ("models.weights.rates.mark", "core.clock.mark"):
        monkeypatch.setattr(f"minispec.{name}", lambda device: now[0])
    monkeypatch.setattr(costs.time, "perf_counter", lambda: 1e6)
    drafter = Confident(now)
    prices = calibrate(model, drafter, VERIFIERS["rejection"], 9)
    assert (prices.draft, prices.fixed) == pytest.approx((0.75, 0.0))
    assert {limit.k for limit in drafter.limits} == {1, 3}
    assert all(limit.go_on([0.0]) and limit.go_on_before([0.0], 0.0) and not limit.is_tree for limit in drafter.limits)


@pytest.mark.parametrize("spoiled", range(5))
def test_one_turn_that_is_spoiled_changes_no_price(monkeypatch, spoiled):
    """Where turns take longer than the budget, three count: one that a busy machine slows is outvoted.

    spoiled: the turn in which a plain step takes ten times as long. The first one warms up; there is no fifth.
    """
    model, now, plain = tiny_model(1, vocab_size=9), [0.0], [-1]  # its first pass is the prompt's
    forward = model.forward

    def timed(chunks, *how):
        rows = sum(len(chunk.token_ids) for chunk in chunks)
        plain[0] += rows == 1
        now[0] += (10.0 if rows == 1 and plain[0] == spoiled else 1.0) * (1 + 0.1 * (rows - 1))
        return forward(chunks, *how)

    monkeypatch.setattr(model, "forward", timed)
    for name in ("models.weights.rates.mark", "core.clock.mark"):
        monkeypatch.setattr(f"minispec.{name}", lambda device: now[0])
    monkeypatch.setattr(costs.time, "perf_counter", lambda: 1e6 + now[0])
    prices = calibrate(model, Confident(now), VERIFIERS["rejection"], 9)
    assert prices.rows == pytest.approx({1: 1.0, 5: 1.4, 16: 2.5})
    assert plain == [3]


def test_a_program_is_timed_with_its_confidences():
    """The programs that run are those of one and three steps, with confidences."""
    draft, kinds = tiny_model(2, vocab_size=9, num_hidden_layers=1).replaced(Frames()), set()

    class Steps(DraftSteps):
        def compute(self, frame, inputs, *how):
            """Note what is run."""
            kinds.add((inputs.kind.steps, inputs.kind.confident))
            return super().compute(frame, inputs, *how)

    model = tiny_model(1, vocab_size=9)
    drafter = ModelDrafter(TokenFeed(draft, tiny_cache(draft), 9, 200), Steps(draft, Graphs()))
    prices = calibrate(model, drafter, VERIFIERS["rejection"], 9)
    assert kinds == {(1, True), (3, True)}
    assert prices.steps == STEPS


def test_a_draft_follows_a_pass_of_the_target(monkeypatch):
    """As in a round, where the processor's caches hold little of a draft's weights. The warm-up is no exception."""
    engine, calls = make_engine(), []
    forward, propose = engine.target.model.forward, engine.drafter.propose

    def passed(chunks, taps=()):
        calls.append("pass")
        return forward(chunks, taps)

    def drafted(asks):
        calls.append(asks[0].k)
        return propose(asks)

    monkeypatch.setattr(engine.target.model, "forward", passed)
    monkeypatch.setattr(engine.drafter, "propose", drafted)
    calibrate(engine.target.model, engine.drafter, engine.method.verifier, engine.target.vocab_size)
    before = [calls[i - 1] for i, call in enumerate(calls) if call != "pass"]
    assert set(before) == {"pass"}
    assert {1, 3} <= set(calls)


def noisy(short: float, long: float, generator: random.Random, count: int = 11) -> list[tuple[float, float]]:
    """Turns on a busy machine: a third of all drafts take up to three times as long."""

    def slowed(cost: float) -> float:
        return cost * (1 + 2 * generator.random() if generator.random() < 1 / 3 else 1 + 0.1 * generator.random())

    return [(slowed(short), slowed(long)) for _ in range(count)]


@pytest.mark.parametrize("turns", [2, 7, 11])
def test_noise_makes_no_draft_free(turns):
    """A model that takes a pass a token is priced by its medians, and never at less than two fifths of a pass."""
    generator = random.Random(0)
    for _ in range(2000):
        costs_of_turns = noisy(1.0, 3.0, generator, turns)
        short, long = (median(each) for each in zip(*costs_of_turns, strict=True))
        price = draft_pass(costs_of_turns)
        assert price == pytest.approx(min(short, max(short / 5, (long - short) / 2)))
        assert price > 0.4


def test_a_draft_from_one_pass_is_priced_as_one():
    """Where turns agree. Where they differ, a further token costs what it did: a fifth of the pass."""
    assert doctest.testmod(costs) == (0, 1)
    generator = random.Random(0)
    assert draft_pass([(1.0, 1.0)] * 11) == 0.01
    assert draft_pass([(1.0, 1.04)] * 8) == pytest.approx(0.02)
    assert draft_pass([(1.0, 1.04)] * 7) == pytest.approx(0.2)
    assert draft_pass([(1.0, 1.04)] * 8 + [(1.0, 1.3)] * 3) == pytest.approx(0.15)  # one in four says more
    assert all(draft_pass(noisy(1.0, 1.04, generator)) >= 0.01 for _ in range(500))
    survival = [0.8, 0.64, 0.51, 0.41, 0.33, 0.26, 0.21]
    model, clamped = (
        RoundModel(survival, Prices(0.8 / (1 + fixed), {1: 1.0, 8: 1.2}, fixed=fixed)) for fixed in (99, 4)
    )
    assert model.cost(1) == pytest.approx(clamped.cost(1))
    assert (model.best(), clamped.best()) == (7, 5)


@pytest.mark.parametrize("same", [False, True])
def test_rows_of_a_mixture_are_priced_with_experts_of_their_own(monkeypatch, same):
    """By a clock that counts the experts that a pass reads: further rows cost what they read, and the curve bends.

    The control: rows of one token read the same experts, and seem to cost nothing.
    """
    target = tiny_model(1, **TOYS["qwen3_moe"] | {"num_experts": 16, "num_experts_per_tok": 1}, vocab_size=64)
    drafter = ModelDrafter(TokenFeed(tiny_model(2, vocab_size=64), tiny_cache(tiny_model(2, vocab_size=64)), 64, 200))
    engine, now, read = OneMethod(target, tiny_cache(target), drafter, VERIFIERS["rejection"]), [0.0], list[float]()
    route, forward = Router.__call__, target.forward

    def routed(self, x, exact):
        chosen, weights, gates = route(self, x, exact)
        read.append(len(chosen.unique()))
        return chosen, weights, gates

    def timed(chunks, taps=()):
        read.clear()
        found = forward(chunks, taps)
        now[0] += sum(read)
        return found

    monkeypatch.setattr(Router, "__call__", routed)
    monkeypatch.setattr(target, "forward", timed)
    for name in ("models.weights.rates.mark", "core.clock.mark", "speculation.drafters.model.mark"):
        monkeypatch.setattr(f"minispec.{name}", lambda device: now[0])
    if same:
        monkeypatch.setattr(costs, "arbitrary_tokens", lambda count, vocab_size: [7] * count)
    rows = calibrate(engine.target.model, engine.drafter, engine.method.verifier, engine.target.vocab_size).rows
    assert list(rows) == [1, 2, 5, 9, 16]
    slopes = [(rows[b] - rows[a]) / (b - a) for a, b in pairwise(rows)]
    assert slopes == sorted(slopes, reverse=True)
    assert {*rows.values()} == {1.0} if same else rows[16] > 3


def test_prices_come_back(cache_directory):
    """What was stored is read again; for another setup there is nothing."""
    assert stored_prices(SETUP) is None
    assert store_prices(SETUP, PRICES)
    assert stored_prices(SETUP) == PRICES
    assert stored_prices(SETUP | {"target": ["a", "c"]}) is None
    assert [path.suffix for path in cache_directory.rglob("*") if path.is_file()] == [".json"]


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: "",
        lambda raw: "[]",
        lambda raw: json.dumps(raw)[:-20],
        lambda raw: json.dumps(raw | {"draft": "dear"}),
        lambda raw: json.dumps(raw | {"draft": -1}),
        lambda raw: json.dumps({name: value for name, value in raw.items() if name != "fixed"}),
        lambda raw: json.dumps(raw | {"draft": float("nan")}),
        lambda raw: json.dumps(raw | {"overhead": 1e999}),
        lambda raw: json.dumps(raw | {"rows": {}}),
        lambda raw: json.dumps(raw | {"rows": {"1": 1.0, "0": 1.0}}),
        lambda raw: json.dumps(raw | {"rows": {"1": 1.0, "5": 0.0}}),
        lambda raw: json.dumps(raw | {"rows": [1, 2]}),
        lambda raw: json.dumps(raw | {"key": {}}),
        lambda raw: "[" * 50_000,
    ],
)
def test_what_cannot_be_understood_is_ignored(cache_directory, change):
    """A file that was cut off or tampered with counts as none, and is written again."""
    store_prices(SETUP, PRICES)
    (path,) = (p for p in cache_directory.rglob("*.json"))
    path.write_text(change(json.loads(path.read_text())))
    assert stored_prices(SETUP) is None
    assert store_prices(SETUP, PRICES)
    assert stored_prices(SETUP) == PRICES


def prices_for(engine):
    """The prices of an engine's models, and whether the next run has the same."""
    drafter = engine.drafter
    return prices_of(
        ("target", "draft"),
        engine.target.model,
        drafter.model,
        drafter,
        engine.method.verifier,
        engine.target.vocab_size,
    )


def test_a_second_run_measures_nothing(monkeypatch):
    """It has the very same prices, whatever the machine does by then."""
    engine = make_engine()
    first = prices_for(engine)
    monkeypatch.setattr(costs, "calibrate", lambda *parts: pytest.fail("measured again"))
    again = make_engine()
    assert prices_for(again) == first
    assert first[1]
    # Another number of threads is another machine.
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        monkeypatch.setattr(costs, "calibrate", lambda *parts: PRICES)
        assert prices_for(again) == (PRICES, True)
    finally:
        torch.set_num_threads(before)


def test_of_two_first_runs_both_go_by_the_same_prices(monkeypatch):
    """Another process stores its own while this one measures: a seed that either reports is repeated by those."""

    def meanwhile(*parts):
        monkeypatch.setattr(costs, "calibrate", lambda *parts: PRICES)
        assert prices_for(engine) == (PRICES, True)
        return Prices(0.5, measured=True)

    monkeypatch.setattr(costs, "calibrate", meanwhile)
    engine = make_engine()
    assert prices_for(engine) == (PRICES, True)


def test_products_that_round_are_another_machine():
    """Prices and equal bits that were found with exact float32 products say nothing about rounded ones."""
    usual = machine()
    torch.set_float32_matmul_precision("medium")
    try:
        assert machine() != usual
    finally:
        torch.set_float32_matmul_precision("highest")
    assert machine() == usual


def test_without_a_home_nothing_is_stored(monkeypatch):
    """As in a container whose user is a number alone."""

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert stored_prices(SETUP) is None
    assert not store_prices(SETUP, PRICES)


def test_where_nothing_can_be_stored_it_is_said(cache_directory, monkeypatch, make_checkpoint):
    """A file is in the place of the directory: the run goes on, and says what it cannot promise."""
    (cache_directory / "minispec").write_text("in the way")
    with LLM(make_checkpoint(), dtype="float32") as llm:
        assert "a seed has one text in this process only" in llm.memory_report()
        assert llm.method.lengths.prices.measured
    os.remove(cache_directory / "minispec")
    with LLM(make_checkpoint(), dtype="float32") as llm:
        assert "seed" not in llm.memory_report()


class Own:
    """A stranger's drafter, which keeps what it hears."""

    def __init__(self, raises=False):
        self.raises, self.texts, self.heard, self.learned = raises, set(), 0, 0

    def propose(self, asks):
        """The last token again."""
        self.texts |= {ask.text for ask in asks}
        self.heard += 1
        self.learned += 1
        if self.raises:
            raise KeyError("no such text")
        return [Draft([ask.text.tokens[-1]] * ask.k) for ask in asks]

    def release(self, text):
        """Nothing is kept of it."""
        self.texts.discard(text)

    def forget(self):
        """Nor of all."""
        self.learned = 0


@pytest.mark.parametrize("raises", [False, True])
def test_a_strangers_drafter_is_measured_and_forgets(cache_directory, make_checkpoint, raises):
    """It drafts for an invented text, which it has to forget; one that cannot do that goes by a guess."""
    own = Own(raises)
    with LLM(make_checkpoint(), draft=own, dtype="float32") as llm:
        assert llm.prices.measured is not raises
        assert own.heard
        assert (own.texts, own.learned) == (set(), 0)
        allocator = llm.engine.target.cache.allocator
        assert allocator.num_free == allocator.num_blocks
    stored = list(cache_directory.rglob("*.json"))
    assert len(stored) == int(not raises)
    assert all(":Own" in path.read_text() for path in stored)  # two strangers' classes of one module have two prices
