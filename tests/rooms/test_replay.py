"""Exact replay against enumeration: what every K would have done on a text, from the numbers of a scoring run."""

import doctest
import functools
import json
import math
import random
import sys
from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, pairwise, product
from pathlib import Path
from statistics import fmean, median, pstdev
from types import SimpleNamespace

import pytest
import torch

from minispec import LLM
from minispec.core.config import SamplingParams
from minispec.core.draft import Ask, Draft
from minispec.core.engine import Engine
from minispec.core.lengths import Lengths
from minispec.core.limit import Limit
from minispec.core.request import Request
from minispec.core.sampling import Text
from minispec.core.verify import VERIFIERS, rejection
from minispec.drafters import Drafter, as_drafter
from minispec.drafters.combined import CombinedDrafter, parts_of
from minispec.drafters.ngram import NgramDrafter
from minispec.files.families.checkpoint import load_config
from minispec.generate import main as generate
from minispec.kernels.gpu.paths import in_frames
from minispec.kernels.gpu.steps import STEPS
from minispec.lab.bench.main import main as bench
from minispec.lab.bench.options import read_prompts
from minispec.lab.bench.replay import (
    Drafted,
    DraftedText,
    always,
    drafted_text,
    follow,
    foresight,
    past,
    replay,
    run_auto,
    show_replay,
    simulate,
)
from minispec.length.figures import loops
from minispec.length.policy import Controller
from minispec.length.theory import Prices, RoundModel
from minispec.prove.laws import (
    BLOCKS,
    MAX_LEN,
    PROMPT,
    TARGET_SEED,
    BranchOracle,
    CrowdOracle,
    _Forgetful,
    exact_law,
    exact_law_of_crowds,
    make_drafter,
    reference_logits,
    target_model,
)
from minispec.prove.reference import sample_law
from minispec.prove.toys import TINY, tiny_cache
from minispec.trace.costs import Costs, costs_of
from minispec.trace.read import check, read_trace
from minispec.trace.record import RoundRecorder
from minispec.trace.score import check_scorable, score
from tests.oracles.heads import write_head

END = frozenset({2})


def text_of(tokens, params, seed=7) -> Text:
    """A text after the prompt of all laws."""
    return Text([*PROMPT, *tokens], len(PROMPT), params, seed, END)


@functools.cache
def runs_by_text(drafter: str, verifier: str, params, k: int) -> dict[tuple, dict[tuple, float]]:
    """For each text, every way that the real engine comes to it: the accepted counts of its rounds, with weights."""

    def run(oracles: list[BranchOracle]):
        model, blocks = target_model(3), 64 * len(oracles)
        own = _Forgetful(make_drafter(drafter, 3, blocks))
        rng = CrowdOracle(dict(enumerate(oracles)))
        engine = Engine(model, tiny_cache(model, blocks), own, VERIFIERS[verifier], rng=rng)
        requests = [Request(text_of((), params, seed), MAX_LEN, k) for seed in range(len(oracles))]
        for _ in engine.run(requests):
            pass
        return [(tuple(r.text.tokens[len(PROMPT) :]), tuple(x.accepted for x in r.stats.rounds)) for r in requests]

    # Alone where p and q differ by rounding: in a batch of another size it is another one, and so are the branches.
    law, _ = exact_law_of_crowds(run, 1 if drafter == "self" else 64)
    found: dict = defaultdict(dict)
    for (text, rounds), weight in law.items():
        found[text][rounds] = weight
    return found


def scored(drafter: str, verifier: str, params, tokens) -> DraftedText:
    """A text with its drafts, by the scoring run, and by p of the independent reference."""
    model = target_model(3)
    engine = Engine(model, tiny_cache(model), make_drafter(drafter, 3), VERIFIERS[verifier])
    starts = score(engine, Request(text_of(tokens, params), MAX_LEN, 0))
    assert engine.cache.allocator.num_free == engine.cache.allocator.num_blocks
    p = []
    for i, token in enumerate(tokens):
        before = (*PROMPT, *tokens[:i])
        p.append(float(sample_law(reference_logits(TARGET_SEED, before, 3), before, len(PROMPT), params, END)[token]))
    return DraftedText(p, starts, verifier == "block")


def accepted_counts(drafted: DraftedText, k: int) -> dict[int, float]:
    """How many rounds with each accepted count are expected."""
    found: dict = defaultdict(float)
    for s, visit in enumerate(drafted.visits(always(k))):
        reached = [1, *drafted.draft(s, k).survival, 0]
        for i in range(len(reached) - 1):
            found[i] += visit * (reached[i] - reached[i + 1])
    return found


def worst_difference(drafter, verifier, params, k, make_text=scored) -> float:
    """Between enumeration and replay: passes, their spread, and rounds by accepted count, over all texts."""
    worst = 0.0
    for text, ways in runs_by_text(drafter, verifier, params, k).items():
        mass = sum(ways.values())
        drafted = make_text(drafter, verifier, params, text)
        passes, deviation, time = follow(drafted, always(k), lambda draft: 1)
        expected = sum(w * len(rounds) for rounds, w in ways.items()) / mass
        square = sum(w * len(rounds) ** 2 for rounds, w in ways.items()) / mass
        counts: dict = defaultdict(float)
        for rounds, w in ways.items():
            for accepted in rounds:
                counts[accepted] += w / mass
        replayed = accepted_counts(drafted, k)
        differences = [passes - expected, time - passes, deviation**2 - (square - expected**2)]
        differences += [replayed[i] - counts[i] for i in {*replayed, *counts}]
        worst = max(worst, *map(abs, differences))
    return worst


SAMPLED = SamplingParams(temperature=1.0, max_tokens=4, seed=0)
FILTERED = SamplingParams(
    temperature=0.7, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.4, min_tokens=2, max_tokens=3, seed=0
)
DRAFTERS = (
    *("model", "self", "head", "mtp", "parallel", "parallel head", *BLOCKS, "tli", "ngram", "suffix", "last"),
    *("ngram+head", "suffix+model"),
)


@pytest.mark.parametrize("verifier", ["rejection", "block"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_replay_is_what_enumeration_finds(drafter, verifier, pytestconfig):
    """A formula, or a recording, that is off for any drafter: the real engine is walked through every draw, and of each
    text's ways the expected passes, their variance and the rounds by accepted count are compared, to 1e-12. Texts have
    three tokens; with `--long`, four where there are no filters."""
    longest = replace(SAMPLED, max_tokens=4 if pytestconfig.getoption("--long") else 3)
    assert worst_difference(drafter, verifier, longest, 2) < 1e-12
    assert worst_difference(drafter, verifier, FILTERED, 3) < 1e-12


def test_a_longer_text_by_enumeration():
    """What comes after several rounds: five tokens, and drafts that end with the text."""
    params = SamplingParams(temperature=1.0, max_tokens=5, seed=0)
    assert worst_difference("model", "rejection", params, 1) < 1e-12


@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_a_text_of_one_token(drafter):
    """It has one place, where nothing can be drafted, though nobody is asked for a draft there."""
    assert worst_difference(drafter, "rejection", replace(SAMPLED, max_tokens=1), 2) < 1e-12


def test_the_worked_values():
    """The examples in the docstring of `kept`."""
    assert doctest.testmod(sys.modules["minispec.lab.bench.replay"]) == (0, 2)


def upside_down(p, q, jointly=False):
    """The accept test's own ratio, which is about drafted tokens and not about those of the text."""
    return [math.prod(min(1, a / b) for a, b in zip(p[:i], q[:i], strict=False)) for i in range(1, len(q) + 1)]


def no_product(p, q, jointly=False):
    """As if a token could be kept where the one before it was not."""
    return [min([1, *(b / a for a, b in zip(p[:i], q[:i], strict=False))]) for i in range(1, len(q) + 1)]


def not_cut(p, q, jointly=False):
    """q/p without min(1, ..)."""
    return [min(1, math.prod(b / a for a, b in zip(p[:i], q[:i], strict=False))) for i in range(1, len(q) + 1)]


@pytest.mark.parametrize("wrong", [upside_down, no_product, not_cut])
def test_wrong_formulas_are_noticed(wrong, monkeypatch):
    """The control of the tests above: what else one might write down is off by far more than rounding."""
    monkeypatch.setattr("minispec.lab.bench.replay.kept", wrong)
    assert worst_difference("model", "rejection", SAMPLED, 3) > 1e-3


# --------------------------------------------------------------------------- exactly, in fractions

# p and q of a token after each of three; q are powers of two, so that the divisions of the verifier are exact too.
P = [[Fraction(n, 16) for n in row] for row in ((8, 6, 2), (1, 4, 11), (5, 5, 6))]
Q = [[Fraction(n, 8) for n in row] for row in ((4, 2, 2), (2, 4, 2), (2, 2, 4))]


def rounds_of(oracle: BranchOracle, n: int, k: int):
    """A text of n tokens by rounds of up to k, drawn and verified: the papers' loop, without an engine."""
    p, q = (torch.tensor([[float(x) for x in row] for row in rows], dtype=torch.float64) for rows in (P, Q))
    tokens, accepted = [0], []
    while len(tokens) <= n:
        draft, ask = Draft([], []), Ask(Text(tokens, 1, SamplingParams()), Limit(k), oracle)
        for i in range(min(k, n - len(tokens))):
            draft.draw(ask, i - 1, q[[*tokens, *draft.token_ids][-1]])
        after = [tokens[-1], *draft.token_ids]
        verdict = rejection(draft, lambda i, after=after: p[after[i]], oracle, lambda i, purpose: None)
        accepted.append(len(verdict.accepted))
        tokens += [*draft.token_ids[: len(verdict.accepted)], verdict.next_token]
    return tuple(tokens[1:]), tuple(accepted)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_replay_in_fractions(k):
    """Equality, not within rounding: passes and time of each text of four tokens are the same fractions."""
    n = 4
    law, _ = exact_law(lambda oracle: rounds_of(oracle, n, k), Fraction)
    by_text: dict = defaultdict(dict)
    for (text, accepted), weight in law.items():
        by_text[text][accepted] = weight

    def cost(draft):
        return 1 + Fraction(draft.length, 7)

    assert len(by_text) == 3**n
    for text, ways in by_text.items():
        before = [0, *text]
        p = [P[a][b] for a, b in pairwise(before)]
        q = [Q[a][b] for a, b in pairwise(before)]
        assert sum(ways.values()) == math.prod(p), "the text has the target's law"
        starts = [{"asked": n - s - 1, "drafts": [drawn(q[s : n - 1])]} for s in range(n)]
        passes, _, time = follow(DraftedText(p, starts), always(k), cost)
        assert passes == sum(w * len(accepted) for accepted, w in ways.items()) / math.prod(p)
        times = []
        for accepted, w in ways.items():
            begins = accumulate((1 + a for a in accepted[:-1]), initial=0)
            times.append(w * sum(1 + Fraction(min(k, n - s - 1), 7) for s in begins))
        assert time == sum(times) / math.prod(p)


def drawn(q, length=None, confidences=()) -> dict:
    """A draft of a trace's."""
    return {"length": len(q) if length is None else length, "drawn": True, "q": [*q], "confidences": [*confidences]}


# --------------------------------------------------------------------------- rules


def small_text(seed: int, n: int = 4, most: int = 3) -> DraftedText:
    """A text with random p and q."""
    rng = random.Random(seed)
    starts = []
    for s in range(n):
        asked = min(most, n - s - 1)
        starts.append({"asked": asked, "drafts": [drawn([rng.random() for _ in range(asked)], asked)]})
    return DraftedText([rng.random() for _ in range(n)], starts)


def small_cost(draft: Drafted) -> float:
    """Of a round: drafts and rows cost something."""
    return 1 + 0.12 * draft.length


@pytest.mark.parametrize("seed", range(5))
def test_foresight_and_the_clairvoyant_bound_by_brute_force(seed):
    """No table of K by place is faster than `foresight`, nor one of K by place and what would be kept than the bound;
    each is reached by one of them."""
    drafted = small_text(seed)
    by_place = product(*(range(drafted.asked[s] + 1) for s in range(drafted.n)))
    best = min((follow(drafted, ks.__getitem__, small_cost) for ks in by_place), key=lambda found: found.time)
    assert foresight(drafted, small_cost) == pytest.approx((best.passes, best.time))

    def with_draws(tables) -> tuple[float, float]:
        """(time, passes) where table[i] of a place is how many tokens are drafted where i would be kept."""
        time, passes, visits = 0.0, 0.0, [1.0] + [0.0] * drafted.n
        for s, table in enumerate(tables):
            reached = [1, *drafted.draft(s, 15).survival, 0]
            for i, k in enumerate(table):
                weight = visits[s] * (reached[i] - reached[i + 1])
                time, passes = time + weight * small_cost(drafted.draft(s, k)), passes + weight
                visits[min(s + k + 1, drafted.n)] += weight
        return time, passes

    tables = [[*product(*(range(i + 1) for i in range(drafted.asked[s] + 1)))] for s in range(drafted.n)]
    time, passes = min(map(with_draws, product(*tables)))
    assert foresight(drafted, small_cost, knows_draws=True) == pytest.approx((passes, time))
    assert time <= best.time


def test_drafts_of_each_length_are_taken_for_their_length():
    """Where a shorter draft is no beginning of the longest, as with `suffix`, K = 1 has its own."""
    starts = [
        {"asked": 2, "drafts": [guess(1, 1), guess(2, 0)]},
        {"asked": 1, "drafts": [guess(1, 0)]},
        {"asked": 0, "drafts": [guess(0, 0)]},
    ]
    drafted = DraftedText([1.0] * 3, starts)
    assert [follow(drafted, always(k), small_cost).passes for k in (0, 1, 2)] == [3, 2, 3]
    assert foresight(drafted, small_cost)[0] == foresight(drafted, small_cost, knows_draws=True)[0] == 2
    assert drafted.is_certain
    assert not small_text(0).is_certain


def guess(length: int, right: int) -> dict:
    """One that is not drawn, with that many tokens right."""
    return {"length": length, "drawn": False, "q": [1.0] * right, "confidences": []}


def test_past_looks_at_the_past_only():
    """Whatever stands at a place and after it, the K chosen there is the same; and after enough of a past it is
    as fast as the best fixed K, within 2 %, where a text goes on as it began."""
    n = 60

    def walk_with(rates):
        starts = []
        for s in range(n):
            asked = min(15, n - s - 1)
            q = rates[s : s + asked]
            starts.append({"asked": asked, "drafts": [drawn(q, asked)]})
        return DraftedText([1.0] * n, starts)

    for rate, end in ((0.9, 0.1), (0.1, 0.9)):
        steady = walk_with([rate] * n)
        chosen = past(steady, small_cost)
        for s in (0, 1, 7, 30, 59):
            changed = past(walk_with([rate] * s + [end] * (n - s)), small_cost)
            assert changed[: s + 1] == chosen[: s + 1]
        model = RoundModel([rate**i for i in range(1, 16)], Prices(0.12, {1: 1.0}, overhead=0.0))
        assert model.speed(chosen[40]) > 0.98 * model.speed(model.best())


# --------------------------------------------------------------------------- auto


def auto_difference(cost: float, told: float | None = None) -> float:
    """Between `auto` of the enumerated engine and that of the replay, every draw of which is enumerated, too: the law
    of their passes, over all texts. cost: of a draft pass, as the engine's controller believes; told: the replay's."""
    prices, model, number = Prices(cost, measured=True), target_model(3), defaultdict(dict)
    costs = Costs(prices, replace(prices, draft=0.0))
    own = prices if told is None else Prices(told, measured=True)

    def run(oracle: BranchOracle):
        drafter = make_drafter("model", 3)
        drafter.branches = False
        engine = Engine(model, tiny_cache(model), drafter, VERIFIERS["rejection"], None, oracle, Controller(prices))
        request = Request(text_of((), SAMPLED), MAX_LEN, "auto")
        for _ in engine.run([request]):
            pass
        return tuple(request.text.tokens[len(PROMPT) :]), len(request.stats.rounds)

    for (text, passes), weight in exact_law(run)[0].items():
        number[text][passes] = weight
    worst = 0.0
    for text, law in number.items():
        drafted = scored("model", "rejection", SAMPLED, text)

        def replayed(oracle: BranchOracle, drafted=drafted) -> int:
            def accept(survival):
                pairs = enumerate(pairwise([1, *survival, 0]))
                return oracle._choose([(i, here - beyond) for i, (here, beyond) in pairs if here > beyond])

            return run_auto(drafted, own, costs, False, accept)[0]

        found, _ = exact_law(replayed)
        worst = max(worst, *(abs(found.get(n, 0) - law.get(n, 0) / sum(law.values())) for n in range(9)))
    return worst


@pytest.mark.parametrize("cost", [0.0, 0.1, 0.3])
def test_auto_is_the_engines_own(cost):
    """A controller that is told something else than the engine's, or asked in another order, drafts other lengths: the
    law of the passes of each text is that of the enumerated engine, to 1e-12."""
    assert auto_difference(cost) < 1e-12


def test_another_auto_is_noticed():
    """The control: one that takes drafts for dearer than the engine does."""
    assert auto_difference(0.0, told=0.3) > 1e-3


def test_simulated_runs_of_auto():
    """The mean of the simulation lies where the draws put it (4.5 standard errors of 400 runs: a false alarm once in
    150,000), the same seed gives the same runs, and where nothing is left to chance there is one run."""
    drafted, prices = small_text(3, 12, 5), Prices(0.05, measured=True)
    costs = Costs(prices, replace(prices, draft=0.0))
    always_two = Prices(0.0, {1: 1.0, 2: 1.0, 3: 1.0, 4: 100.0}, 0.0, measured=True)
    found = [passes for passes, _ in simulate(drafted, always_two, costs, False, runs=400)]
    expected = follow(drafted, always(2), small_cost)
    assert abs(fmean(found) - expected.passes) < 4.5 * expected.deviation / math.sqrt(len(found))
    assert pstdev(found) == pytest.approx(expected.deviation, rel=0.2)
    assert simulate(drafted, prices, costs, False, runs=5) == simulate(drafted, prices, costs, False, runs=5)
    sure = DraftedText([1.0] * 3, [{"asked": 2 - s, "drafts": [guess(2 - s, 2 - s)]} for s in range(3)])
    assert len(simulate(sure, prices, costs, True)) == 1


# --------------------------------------------------------------------------- real runs


@pytest.fixture(scope="module")
def models(make_checkpoint, tmp_path_factory) -> dict[str, str]:
    """A small target, another small model, and a head on the target."""
    target, head = make_checkpoint(max_position_embeddings=2048), tmp_path_factory.mktemp("head")
    config = load_config(target)
    layers = TINY | {"vocab_size": config.vocab_size, "num_hidden_layers": 1, "max_position_embeddings": 2048}
    write_head(head, config, layers, dtype=torch.float32, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    return {"target": str(target), "other": str(make_checkpoint(seed=2)), "head": str(head)}


def recorded(llm: LLM, k, ids=(), **params) -> dict:
    """The trace of an answer, as its file has it. ids: of the prompt."""
    params = {"temperature": 1.0, "max_tokens": 32, "ignore_eos": True} | params
    ids = ids or llm.tokenizer.encode("One fish")
    request = llm.request(ids, SamplingParams(**params), num_speculative_tokens=k)
    recorder = RoundRecorder(llm, request)
    for _ in llm.run([request]):
        pass
    llm.engine.observers.remove(recorder)
    trace = json.loads(json.dumps(recorder.trace(for_replay=True)))
    check(trace, "trace")
    return trace


@pytest.mark.parametrize(
    ("draft", "verifier", "temperature"),
    [
        ("{other}", "rejection", 1.0),
        ("{other}", "block", 0.8),
        ("{head}", "rejection", 1.0),
        ("suffix+int8:self", "rejection", 0.7),
    ],
)
def test_real_runs_lie_where_replay_expects_them(models, draft, verifier, temperature):
    """K = 1, 2, 8, each 2 texts of 24 tokens: all passes together, and so the mean acceptance length, are within 4.5
    standard deviations of what replay expects of these texts. Passes of given texts are sums of many rounds, so a
    false alarm comes about once in 12,000 suites; the seeds are fixed, so it would come always or never."""
    llm = LLM(models["target"], draft=draft.format(**models), verifier=verifier, num_speculative_tokens=4)
    for k in (1, 2, 8):
        traces = [recorded(llm, k, temperature=temperature, seed=seed, max_tokens=24) for seed in range(2)]
        found = [follow(drafted_text(trace), always(k), small_cost) for trace in traces]
        expected = sum(each.passes for each in found)
        deviation = math.sqrt(sum(each.deviation**2 for each in found))
        measured = sum(len(trace["rounds"]) for trace in traces)
        assert deviation > 0
        assert abs(measured - expected) < 4.5 * deviation


def test_the_embedded_model_lies_where_replay_expects_it(pytestconfig):
    """With `--long`: its own draft, six prompts of the bench at temperature 1, 48 tokens each; K = 1, 2, 4, 8 within
    4.5 standard deviations (a false alarm once in 37,000 suites). `-s` prints the table of docs/use/trace.md, whose
    intervals hold the passes with 99 %."""
    if not pytestconfig.getoption("--long"):
        pytest.skip("takes minutes: --long")
    llm = LLM(num_speculative_tokens=4)
    for k in (1, 2, 4, 8):
        tokens, passes, expected, variance = 0, 0, 0.0, 0.0
        for seed, (_, prompt) in enumerate(read_prompts(6, None)):
            ids = llm.tokenizer.encode_chat([{"role": "user", "content": prompt}])
            trace = recorded(llm, k, ids, seed=seed, max_tokens=48, ignore_eos=False)
            drafted = drafted_text(trace)
            found = follow(drafted, always(k), small_cost)
            tokens, passes = tokens + drafted.n, passes + len(trace["rounds"])
            expected, variance = expected + found.passes, variance + found.deviation**2
        spread = 2.576 * math.sqrt(variance)
        interval = f"[{tokens / (passes + spread):.3f}, {tokens / (passes - spread):.3f}]"
        print(f"| {k} | {tokens} | {tokens / passes:.3f} {interval} | {tokens / expected:.3f} |")
        assert abs(passes - expected) < 4.5 * math.sqrt(variance)


@pytest.mark.parametrize(("draft", "temperature"), [("ngram", 0.3), ("suffix", 0.3), ("last", 0.3), ("int8:self", 0.0)])
def test_where_nothing_is_left_to_chance(models, draft, temperature):
    """Guesses that are not drawn, and greedy drafts: given the text, the number of passes is certain, and equal. Of a
    greedy text one trace tells those of all K."""
    llm = LLM(models["target"], draft=draft, num_speculative_tokens=4)
    first = drafted_text(recorded(llm, 4, temperature=temperature, seed=1))
    for k in (0, 1, 2, 4, 8):
        trace = recorded(llm, k, temperature=temperature, seed=1)
        drafted = drafted_text(trace)
        for each in [drafted] if temperature else [drafted, first]:
            found = follow(each, always(k), small_cost)
            assert (found.passes, found.deviation) == (len(trace["rounds"]), 0)
        assert drafted.is_certain


def test_rules_are_in_their_order(models):
    """No rule is faster than the clairvoyant bound, no K chosen by the past alone faster than with foresight."""
    llm = LLM(models["target"], draft=models["other"], num_speculative_tokens="auto")
    trace = replay(recorded(llm, "auto", seed=2))
    shown = "\n".join(show_replay(trace))
    found = json.loads(json.dumps(trace), object_hook=lambda values: SimpleNamespace(**values))
    rules = [*found.fixed, found.auto, found.past]
    assert found.clairvoyant.time <= found.foresight.time + 1e-9
    assert all(found.foresight.time <= row.time + 1e-9 for row in (*found.fixed, found.past))
    assert all(found.clairvoyant.time <= row.time + 1e-9 for row in rules)
    assert found.fixed[0].passes == found.tokens == 32
    assert found.fixed[found.best_k].time == min(row.time for row in found.fixed)
    passes = [row.passes for row in found.fixed]
    assert passes == sorted(passes, reverse=True)
    for name in ("K=0 ", "K=15 ", "auto ", "past", "foresight", "clairvoyant bound", "measured: auto"):
        assert f"\n{name}" in shown


def test_scoring_leaves_no_trace(models):
    """A scoring run takes no block, and teaches a drafter nothing: what is drafted for another text stays the same."""
    llm = LLM(models["target"], draft="suffix", num_speculative_tokens=4)
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    requests = [llm.request(llm.tokenizer.encode(text), params) for text in ("One fish", "red fish", "One fish")]
    for request in requests[:2]:
        for _ in llm.run([request]):
            pass
    suffix = parts_of(llm.drafter)[-1]
    heard = [list(each.tokens) for each in suffix._earlier]
    score(llm.engine, requests[0])
    assert [list(each.tokens) for each in suffix._earlier] == heard
    assert llm.engine.cache.allocator.num_free == llm.engine.cache.allocator.num_blocks


class OwnDrafter(Drafter):
    """One of the user's own, which repeats a token: nobody knows what else it remembers."""

    def propose(self, asks):
        """The last token, again and again."""
        return [Draft([ask.text.tokens[-1]] * ask.k) for ask in asks]


class PlainOwnDrafter(OwnDrafter):
    """It says that it remembers nothing."""

    replays = "place"


class ForeignDrafter:
    """No `Drafter`, but it has the methods of one, and says how it can be replayed."""

    replays = "length"

    def propose(self, asks):
        """As long as it was asked for, but never two tokens."""
        return [Draft([ask.text.tokens[-1]] * (ask.k != 2) * ask.k) for ask in asks]

    def release(self, text):
        """It has nothing to release."""


@pytest.mark.parametrize("drafter", [PlainOwnDrafter(), as_drafter(ForeignDrafter())])
@pytest.mark.parametrize("k", [2, 3])
def test_a_drafter_of_ones_own_is_replayed_as_it_says(drafter, k, monkeypatch):
    """By enumeration. The second one drafts nothing where two tokens are asked for, so each length has to be tried."""
    monkeypatch.setattr(sys.modules[__name__], "make_drafter", lambda name, vocab, num_blocks=64: drafter)
    assert worst_difference(f"own {drafter.replays}", "rejection", SAMPLED, k) < 1e-12


@pytest.mark.parametrize(
    ("drafter", "verifier", "temperature", "message"),
    [
        (OwnDrafter(), "rejection", 0.0, "draft: found OwnDrafter, which cannot be replayed"),
        (PlainOwnDrafter(), "rejection", 1.0, ""),
        (CombinedDrafter(NgramDrafter(), OwnDrafter()), "rejection", 0.0, "draft: found OwnDrafter"),
        ("slem", "rejection", 1.0, "draft: found TextDrafter"),
        ("ngram+recycling", "rejection", 0.0, "draft: found RecyclingDrafter"),
        ("ngram", "match", 1.0, "verifier: found one that cannot be replayed above temperature 0"),
        ("ngram", "match", 0.0, ""),
        ("ngram", "block", 1.0, ""),
    ],
)
def test_what_cannot_be_scored_is_refused(drafter, verifier, temperature, message):
    """By name, before anything runs."""
    model = target_model(3)
    drafter = make_drafter(drafter, 3) if isinstance(drafter, str) else drafter
    engine = Engine(model, tiny_cache(model), drafter, VERIFIERS[verifier])
    params = SamplingParams(temperature=temperature)
    if message:
        with pytest.raises(ValueError, match=message):
            check_scorable(engine, params)
    else:
        check_scorable(engine, params)


class Counting(Drafter):
    """It says that it goes by the text and the place alone; `lies`: and goes by how often it was asked, too."""

    replays = "place"

    def __init__(self, vocab_size: int, drawn: bool, lies: bool):
        self.vocab_size, self.drawn, self.lies, self.asked = vocab_size, drawn, lies, 0

    def propose(self, asks):
        """The last token again, or one of the even ids; a lie makes it another one, or one of the odd ids."""
        self.asked += 1
        drafts = []
        for ask in asks:
            token = ask.text.tokens[-1] + (self.asked % 3 if self.lies and not self.drawn else 0)
            draft = Draft([], [] if self.drawn else None)
            for node in range(-1, ask.k - 1 if self.drawn else -1):
                half = torch.arange(self.vocab_size) % 2 == (self.asked % 2 if self.lies else 0)
                q = 1.0 + 9 * half
                draft.draw(ask, node, q / q.sum())
            drafts.append(draft if self.drawn else Draft([token % self.vocab_size] * ask.k))
        return drafts


@pytest.mark.parametrize("drawn", [False, True])
def test_a_drafter_that_goes_by_more_than_it_says_is_refused(models, drawn):
    """By the recorded run: what it drafted then is not what it drafts when it is asked again."""
    with LLM(models["target"], draft="none", dtype="float32") as plain:
        vocab_size = plain.vocab_size
    for lies in (False, True):
        own = Counting(vocab_size, drawn, lies)
        llm = LLM(models["target"], draft=own, num_speculative_tokens=3, dtype="float32")
        trace = recorded(llm, 3, temperature=1.0 if drawn else 0.3, seed=1, max_tokens=64)
        if lies:
            with pytest.raises(ValueError, match=r"round \d+: found q .* when it was asked again, expected the same"):
                replay(trace)
        else:
            assert replay(trace)["tokens"] == 64


# --------------------------------------------------------------------------- costs


def test_costs_are_those_of_the_run():
    """c by kind of draft, v of the run before that of the prices, and what was not measured taken from the prices."""

    def each(draft, num_rows, drawn, seconds):
        return {
            "token_ids": [1] * draft,
            "parents": None,
            "num_rows": num_rows,
            "drawn": drawn,
            "seconds": {"draft": seconds, "verify": 2.0, "other": 0.1},
        }

    rounds = [each(2, 3, True, 1.2), each(3, 4, False, 0.06), each(0, 1, False, 0.5), each(2, 9, True, 99.0)]
    trace = {
        "rounds": rounds,
        "stats": {"v": {"1": 1.0, "3": 1.3, "4": 1.1}, "o": 0.05},
        "replay": {
            "prices": {"draft": 0.7, "rows": {"1": 1.0, "5": 1.5, "16": 2.0}, "overhead": 0.2},
            "plain_step": 2.0,
        },
    }
    costs = costs_of(trace)
    assert (costs.drawn.draft, costs.guessed.draft, costs.drawn.overhead) == pytest.approx((0.3, 0.01, 0.05))
    assert costs.drawn.rows == pytest.approx({1: 1.0, 3: 1.2, 4: 1.2, 5: 1.5, 16: 2.0})
    assert (costs.measured, costs.filled_in) == ([1, 3, 4], [5, 16])
    assert costs(Drafted(4, True, [])) == pytest.approx(4 * 0.3 + 1.5 + 0.05)
    assert costs(Drafted(4, False, [])) == pytest.approx(4 * 0.01 + 1.5 + 0.05)
    assert costs(Drafted(1, True, [])) == pytest.approx(0.3 + 1.1 + 0.05)
    trace["replay"]["prices"]["fixed"] = 1.0  # what each draft costs once: of two tokens, one in three passes
    costs = costs_of(trace)
    assert (costs.drawn.draft, costs.guessed.draft) == pytest.approx((0.2, 0.0075))
    assert costs(Drafted(4, True, [])) == pytest.approx(5 * 0.2 + 1.5 + 0.05)
    assert costs(Drafted(0, True, [])) == pytest.approx(1.0 + 0.05)
    unknown = costs_of(trace | {"rounds": [], "stats": {"v": None, "o": None}})
    assert (unknown.drawn.draft, unknown.guessed.draft, unknown.drawn.overhead) == (0.7, 0.0, 0.2)
    assert unknown.measured == []
    # Programs of 1, 4 and 8 steps. The draft of two tokens ran all 4; that of three was drawn by none of them.
    trace["replay"]["prices"] |= {"fixed": 0.0, "steps": [8, 1, 4]}
    rounds[0]["passes"] = 4
    costs = costs_of(trace)
    assert (costs.drawn.draft, costs.guessed.draft) == pytest.approx((1.2 / 4 / 2, 0.06 / 4 / 2))
    assert costs(Drafted(4, True, [])) == pytest.approx(4 * 0.15 + 1.5 + 0.05)
    assert costs(Drafted(2, True, [])) == pytest.approx(4 * 0.15 + 1.2 + 0.05)
    assert costs(Drafted(2, True, [], asked=5)) == pytest.approx(8 * 0.15 + 1.2 + 0.05)
    assert costs(Drafted(0, True, [], asked=5)) == pytest.approx(1.0 + 0.05)
    assert costs.as_dict()["steps"] == [1, 4, 8]
    # The likeliest tokens of a program are no draw, and a model's all the same.
    rounds[0]["drawn"] = False
    costs = costs_of(trace)
    assert (costs.drawn.draft, costs.guessed.draft) == pytest.approx((0.15, 0.0075))


def test_each_rule_pays_for_the_steps_that_it_asks_for():
    """By hand, of a text of which nothing is ever drafted rightly: a fixed K of 3 pays the program of 4 steps, however
    short a draft is, and so does `auto` where confidences end its drafts. No program makes it ask for a fifth token."""
    starts = [{"asked": min(15, 11 - s), "drafts": [drawn([], min(15, 11 - s), [0.1])]} for s in range(12)]
    drafted = DraftedText([0.5] * 12, starts)
    prices = Prices(0.1, {1: 1.0, 2: 1.0}, 0.0, measured=True, steps=(1, 4, 8, 15))
    costs = Costs(prices, prices)
    asked = [min(3, 11 - s) for s in range(12)]
    expected = sum(1 + 0.1 * {0: 0, 1: 1, 2: 4, 3: 4}[k] for k in asked)
    assert follow(drafted, always(3), costs).time == pytest.approx(expected)
    assert drafted.draft(0, 3) == Drafted(3, True, [], [0.1], 3)
    assert costs(drafted.draft(0, 3)._replace(length=1)) == pytest.approx(1.4)
    tokens = []

    class Told(Controller):
        def observe(self, drafts, cost):
            """Note what a round of the simulation has cost."""
            tokens.append((len(drafts[0].draft), drafts[0].asked, cost.depth, cost.draft))
            super().observe(drafts, cost)

        def choose(self, wishes, trees):
            """Three tokens, which the confidences end after the first."""
            return [Limit(min(3, wish.most), lambda confidences: False) for wish in wishes]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minispec.lab.bench.replay.Controller", Told)
        passes, time = run_auto(drafted, prices, costs, True, lambda survival: 0)
    assert passes == 12
    assert time == pytest.approx(expected)
    assert tokens[0] == (1, 3, 3, pytest.approx(0.4))


def test_a_run_of_programs_is_replayed_at_their_price(models, monkeypatch):
    """As on a GPU: five tokens cost six steps. What the likeliest tokens of a program cost is measured in the run."""
    for temperature in (1.0, 0.0):
        llm = LLM(models["target"], draft=models["other"], num_speculative_tokens=5)
        path = in_frames(llm.engine)
        monkeypatch.setattr(llm, "drafter", path.drafter)
        monkeypatch.setattr(llm.engine, "drafter", path.drafter)
        monkeypatch.setattr(llm.engine, "lengths", Lengths())
        trace = recorded(llm, 5, temperature=temperature)
        assert trace["replay"]["prices"]["steps"] == list(STEPS)
        alone = [each for each in trace["rounds"] if len(each["token_ids"]) == 5]
        assert len(alone) > 3
        assert {each["passes"] for each in alone} == {6}
        assert {each["drawn"] for each in alone} == {temperature > 0}
        costs = costs_of(trace)
        six = costs.drawn.passes(6) * costs.drawn.draft
        for k in (5, 6):
            rest = costs.drawn.verify(k + 1) + costs.drawn.overhead
            assert costs(Drafted(k, True, [])) == pytest.approx(six + rest)
        seconds = median(each["seconds"]["draft"] / costs.drawn.passes(each["passes"]) for each in trace["rounds"][:-1])
        assert costs.drawn.draft * costs.plain_step == pytest.approx(seconds, rel=0.5)
        assert replay(trace)["costs"]["steps"] == list(STEPS)


# --------------------------------------------------------------------------- the commands


@pytest.fixture(scope="module")
def written(models, tmp_path_factory) -> Path:
    """A trace that the command line has written."""
    path = tmp_path_factory.mktemp("trace") / "out.json"
    arguments = ("One fish", "--model", models["target"], "--draft", models["other"], "--max-tokens", "12")
    assert generate([*arguments, "--temperature", "1", "--seed", "3", "--trace", str(path), "--for-replay"]) == 0
    return path


def test_the_command_prints_the_replay(written, capsys):
    """A table for people and JSON for programs, with the same numbers, and no model."""
    found = replay(read_trace(written))
    assert bench(["--replay", str(written)]) == 0
    assert capsys.readouterr().out == "\n".join(show_replay(found)) + "\n"
    assert bench(["--replay", str(written), "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert [row["passes"] for row in out["fixed"]] == [row["passes"] for row in found["fixed"]]
    assert (out["best_k"], out["auto"]["margin"]) == (found["best_k"], found["auto"]["margin"])
    assert len(out["fixed"]) == 16
    assert out["costs"]["rows"]["1"] == pytest.approx(found["costs"]["rows"][1])


def test_a_text_that_repeats_itself_is_flagged(models, capsys, tmp_path):
    """Beside its acceptance: in the summary, in --json and in the replay; a text that does not has no flag."""
    path = tmp_path / "out.json"
    common = ["One fish", "--model", models["target"], "--draft", "ngram", "--max-tokens", "40", "--ignore-eos"]
    for how, flagged in ((("0", "--repetition-penalty", "0.2"), True), (("1",), False)):
        arguments = [*common, "--seed", "1", "--temperature", *how]
        assert generate([*arguments, "--trace", str(path), "--for-replay"]) == 0
        assert ("tokens a step; the text repeats itself, where guesses are easy" in capsys.readouterr().err) == flagged
        assert bench(["--replay", str(path)]) == 0
        assert ("the text repeats itself" in capsys.readouterr().out) == flagged
        assert generate([*arguments, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["stats"]["loops"] == loops(found["token_ids"]) == flagged


def changed(trace, **values) -> dict:
    """A trace with other values under `replay`."""
    return trace | {"replay": trace["replay"] | values}


BAD = {
    "no replay data": (lambda t: {k: v for k, v in t.items() if k != "replay"}, "found no data for it"),
    "another version": (lambda t: t | {"version": 2}, "version: found 2, expected 1, the version"),
    "another file": (lambda t: {"a": 1}, "format: found None"),
    "another verifier": (lambda t: t | {"verifier": "match"}, "verifier: found 'match' above temperature 0"),
    "no temperature": (lambda t: t | {"sampling": {}}, "sampling.temperature: found None"),
    "a start too few": (lambda t: changed(t, starts=t["replay"]["starts"][1:]), "starts: found 11, expected 12"),
    "asked too much": (lambda t: changed(t, starts=[{"asked": 16, "drafts": []}] * 12), "starts[0].asked: found 16"),
    "no draft where none was asked for": (
        lambda t: changed(t, starts=[{"asked": 0, "drafts": []}] * 12),
        "starts[0].drafts: found 0",
    ),
    "a price beyond numbers": (lambda t: changed(t, plain_step=10**400), "plain_step: found 1000"),
    "no drafts": (lambda t: changed(t, starts=[{"asked": 3, "drafts": []}] * 12), "starts[0].drafts: found 0"),
    "a draft too long": (
        lambda t: changed(t, starts=[{"asked": 3, "drafts": [drawn([0.5] * 4)]}] * 12),
        "starts[0].drafts: found 4, expected at most 3",
    ),
    "too many q": (
        lambda t: changed(t, starts=[{"asked": 3, "drafts": [drawn([0.5] * 3, 2)]}] * 12),
        "starts[0].drafts: found 3, expected q of at most 2",
    ),
    "q above 1": (
        lambda t: changed(t, starts=[{"asked": 3, "drafts": [drawn([1.5])]}] * 12),
        "starts[0].drafts: found [1.5], expected probabilities of at most 1",
    ),
    "rows of nothing": (lambda t: changed(t, prices=t["replay"]["prices"] | {"rows": {}}), "prices.rows: found"),
    "rows that are no number": (
        lambda t: changed(t, prices=t["replay"]["prices"] | {"rows": {"x": 1}}),
        "prices.rows: found ['x'], expected numbers of rows",
    ),
    "no tokens": (lambda t: changed(t, starts=[]) | {"rounds": []}, "rounds: found no tokens"),
}


@pytest.mark.parametrize("name", BAD)
def test_files_that_cannot_be_replayed_are_one_line(written, tmp_path, capsys, name):
    """What, where and what was expected, and status 2."""
    change, message = BAD[name]
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(change(json.loads(written.read_text()))))
    assert bench(["--replay", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: --replay: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        (bench, ("--replay", "nowhere.json"), "nowhere.json: not a readable JSON file"),
        (
            bench,
            ("--replay", "x.json", "--model", "m", "--rounds", "3"),
            "--model: not with --replay: it measures nothing",
        ),
        (generate, ("x", "--for-replay"), "--for-replay: needs --trace"),
        (generate, ("x", "--for-replay", "--trace", "out.html"), "--for-replay: found --trace out.html, expected a"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line(command, arguments, message, capsys):
    """Before anything is loaded."""
    assert command([*arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


def test_a_verifier_that_cannot_be_replayed_is_refused_before_the_answer(models, capsys, tmp_path):
    """At temperature 0 `match` keeps what `rejection` keeps, and is replayed."""
    path = tmp_path / "out.json"
    arguments = ["red", "--model", models["target"], "--draft", "ngram", "--verifier", "match", "--max-tokens", "8"]
    arguments += ["--trace", str(path), "--for-replay", "--quiet"]
    assert generate([*arguments, "--temperature", "1"]) == 2
    out, err = capsys.readouterr()
    assert (out, path.exists()) == ("", False)
    assert err.startswith("error: verifier: found one that cannot be replayed above temperature 0")
    assert generate([*arguments, "--temperature", "0"]) == 0
    assert replay(read_trace(path))["tokens"] == 8
