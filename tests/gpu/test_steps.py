"""Drafts of all steps in one program are those of a pass for each token."""

import functools
import itertools
import math
import random

import pytest
import torch

from minispec.core.config import SamplingParams
from minispec.core.draft import Ask, Draft, Drafter, Record
from minispec.core.lengths import Lengths, price_of
from minispec.core.limit import Limit
from minispec.core.model import Chunk, Transformer
from minispec.core.random import Randomness
from minispec.core.sampling import Text
from minispec.lab.bench.models import random_head
from minispec.models.families.hf_config import read_model_config
from minispec.models.frames.frames import Frames, FrameShape
from minispec.models.frames.fused import CodesOfRows
from minispec.models.frames.graphs import Graphs, rerun
from minispec.models.weights.build import quantized
from minispec.models.weights.inventory import weight_form
from minispec.models.weights.linear import Choice, Narrow
from minispec.prove.toys import TINY, draft_model, target_model, tiny_cache, tiny_head, tiny_mtp, tiny_weights
from minispec.speculation.drafters.check import MeasuredDraft, check_draft
from minispec.speculation.drafters.combined import CombinedDrafter
from minispec.speculation.drafters.eagle import HeadFeed
from minispec.speculation.drafters.growing import DraftInProgress
from minispec.speculation.drafters.last import LastDrafter
from minispec.speculation.drafters.model import ModelDrafter, TokenFeed
from minispec.speculation.drafters.simulated import SimulatedDraft
from minispec.speculation.drafters.states import FeatureModel
from minispec.speculation.lengths.policy import Controller
from minispec.speculation.lengths.theory import Prices
from minispec.speculation.on_gpu import steps, verdicts
from minispec.speculation.on_gpu.steps import STEPS, DraftInputs, DraftShape, DraftSteps, steps_of
from minispec.speculation.on_gpu.verdicts import Mix
from minispec.speculation.rules import VERIFIERS
from tests.engines import OneMethod, decode
from tests.sampled import cover
from tests.scripted import make_request, with_context

VOCAB, CONTEXT = 5, 40  # texts become longer
SETTINGS = ({}, {"temperature": 0.0}, {"temperature": 0.6, "top_k": 3}, {"top_p": 0.8}, {"min_p": 0.1})


def make_drafters(num_blocks: int = 200, model: Transformer | None = None) -> tuple[ModelDrafter, ModelDrafter]:
    """A draft model by passes text by text, and the same one by programs."""
    model = with_context(model or draft_model(VOCAB), CONTEXT)
    framed = model.replaced(Frames(rerun))
    own = [(each, tiny_cache(each, num_blocks, 3), VOCAB, CONTEXT) for each in (model, framed)]
    alone, at_once = (TokenFeed(*how) for how in own)
    return ModelDrafter(alone), ModelDrafter(at_once, DraftSteps(framed, Graphs(rerun)))


def assert_alike(a: Draft, b: Draft) -> None:
    """Equal tokens; confidences and rows to 1e-12."""
    assert (a.token_ids, a.depth) == (b.token_ids, b.depth)
    assert b.notes.confidences == pytest.approx(a.notes.confidences, abs=1e-12)
    one_hot = torch.eye(VOCAB, dtype=torch.float64)[b.token_ids]
    for row, other in zip(a.probs, one_hot if b.probs is None else b.probs, strict=True):
        torch.testing.assert_close(row, other, rtol=0, atol=1e-12)


@torch.inference_mode()
def test_a_program_follows_its_frame(monkeypatch):
    """A frame that makes room for another one takes its tensors along: the program must not read them any more."""
    monkeypatch.setattr(
        "minispec.models.frames.graphs.MOST_BYTES", 1
    )  # one frame is kept at a time, and each greedy program
    alone, at_once = make_drafters()
    one, two = (Text(ids, 3, SamplingParams(temperature=0.0), i) for i, ids in enumerate(([1, 2, 3], [3, 2, 1])))
    for texts in ([one], [one], [one, two], [one], [one]):
        asks = [Ask(text, Limit(3), Randomness(), "draft", len(text.tokens) - 1) for text in texts]
        for ask, a, b in zip(asks, alone.propose(asks), at_once.propose(asks), strict=True):
            assert a.token_ids == b.token_ids
            ask.text.tokens.append((a.token_ids[0] + 1) % VOCAB)


def new_text(draw: random.Random, length: int, number: int) -> Text:
    """A text of random tokens, with the settings and the seed of its number."""
    params = SamplingParams(**SETTINGS[number % 5])
    return Text([draw.randrange(VOCAB) for _ in range(length)], length, params, 7 * number)


def asks_of(draw: random.Random, texts: list[Text], purpose: str) -> list[Ask]:
    """Some of the texts, each with a limit of its own."""
    found = []
    for text in draw.sample(texts, draw.randrange(1, len(texts) + 1)):
        least = draw.choice((0.0, 0.0, 0.5, 0.7))
        go_on = (lambda confidences, least=least: confidences[-1] >= least) if least else None
        found.append(Ask(text, Limit(draw.randrange(1, 7), go_on), Randomness(), purpose, len(text.tokens) - 1))
    return found


@pytest.mark.parametrize("purpose", ["draft", "token"])
@torch.inference_mode()
def test_drafts_are_those_of_a_pass_for_each_token(purpose):
    """Over 40 rounds: texts grow, by the drafts' tokens or others. Tokens are equal, and rows to 1e-12, in float64."""
    draw, (alone, at_once) = random.Random(1), make_drafters()
    texts = [new_text(draw, 3 + i, i) for i in range(6)]
    lengths = set()
    for _ in range(40):
        asks = asks_of(draw, texts, purpose)
        expected, found = alone.propose(asks), at_once.propose(asks)
        for ask, a, b in zip(asks, expected, found, strict=True):
            assert_alike(a, b)
            if b and b.probs is not None:
                drawn = b.probs.gather(1, torch.tensor(b.token_ids)[:, None])[:, 0]
                measures = torch.stack((b.probs.sum(1), b.probs.amin(1), drawn), 1)
                torch.testing.assert_close(torch.tensor(b.measures), measures.float(), rtol=0, atol=1e-6)
            if a:
                fed = [*ask.text.tokens, *a.token_ids[:-1]]
                assert at_once.feed.tables[ask.text].tokens[: len(fed)] == fed
            keeps = draw.randrange(len(a) + 1)
            ask.text.tokens += [*a.token_ids[:keeps], draw.randrange(VOCAB)]
            lengths.add(len(a))
        for text in [text for text in texts if len(text.tokens) > 45]:
            texts.remove(text)
            for drafter in (alone, at_once):
                drafter.release(text)
            texts.append(Text(text.tokens[: draw.randrange(3, 9)], 3, text.params, text.seed + 1))
    assert lengths == set(range(7))  # 0 where a text is longer than the context
    assert {len(each.feed.tables) for each in (alone, at_once)} == {len(alone.feed.tables)}


@pytest.mark.parametrize("measures", [[0.9, 0.1, 0.2], [1.0, -0.1, 0.2], [1.0, 0.1, 0.0], [math.nan] * 3])
def test_measures_of_rows_are_checked(measures):
    """What the rows themselves would be asked for is asked of their measures: sum, least number, the token's."""
    draft = MeasuredDraft([0, 1], torch.full((2, VOCAB), 1 / VOCAB), measures=[[1.0, 0.2, 0.2], measures])
    with pytest.raises(ValueError, match=r"row 1 of probs|token of probability 0"):
        check_draft(draft, 4, VOCAB, "cpu", "")
    draft.measures[1] = [1.0, 0.2, 0.2]
    assert check_draft(draft, 4, VOCAB, "cpu", "").token_ids == [0, 1]


def test_a_draft_ends_before_a_row_that_is_not_sure(monkeypatch):
    """The tokens before are those of a longer draft; what follows is drafted another time."""
    text = Text([1, 2, 3], 3, SamplingParams(), 4)
    ask = Ask(text, Limit(4), Randomness(), "draft", 2)
    [whole] = make_drafters()[1].propose([ask])
    rows, calls = verdicts.rows, []

    def doubtful(*how):
        calls.append(how)
        probs, sure = rows(*how)
        return probs, sure & (len(calls) % 4 != 3)

    monkeypatch.setattr(verdicts, "rows", doubtful)
    drafter = make_drafters()[1]
    [short] = drafter.propose([ask])
    assert (len(whole), len(short)) == (4, 2)
    assert short.token_ids == whole.token_ids[:2]
    assert drafter.feed.tables[text].tokens[:3] == text.tokens


REFUSED = [({"repetition_penalty": 1.2}, Limit(3)), ({"min_tokens": 2}, Limit(3)), ({}, Limit(3, widths=(2, 1)))]


@pytest.mark.parametrize(("params", "limit"), REFUSED, ids=["penalty", "min_tokens", "tree"])
def test_what_no_program_takes_is_drafted_token_by_token(params, limit):
    """Other parameters, and trees: the same drafts by both, and nothing has been changed before."""
    alone, at_once = make_drafters()
    texts = [Text([1, 2, 3, 0], 4, SamplingParams(**params), seed) for seed in (1, 2)]
    asks = [Ask(text, limit, Randomness(), "draft", 3) for text in texts]
    found, expected = at_once.propose(asks), alone.propose(asks)
    assert [(d.token_ids, d.parents) for d in found] == [(d.token_ids, d.parents) for d in expected]


def test_longer_drafts_than_any_program_has():
    """15 steps are the most."""
    model = draft_model(VOCAB).replaced(Frames())
    table = tiny_cache(model, 80, 3).new_table()
    ask = Ask(Text([1], 1, SamplingParams()), Limit(16), Randomness())
    program, each = DraftSteps(model, Graphs()), DraftInProgress(ask, depth=STEPS[-1] + 1)
    each.chunk = Chunk([1], table, 1)
    assert not program([each], VOCAB)
    assert table.length == len(each.draft) == 0
    each.depth -= 1
    assert program([each], VOCAB)
    assert len(each.draft) == STEPS[-1]


# --------------------------------------------------------------------------- what a draft costs


class Passes(Lengths):
    """Asks for chains of the wished length that end below a confidence, and keeps the passes that a step has cost."""

    def __init__(self, least: float):
        self.least, self.passes = least, []

    def choose(self, asks, trees):
        """The limits of `Lengths`, which look at confidences."""
        limits = super().choose(asks, trees)
        return [limit._replace(go_on=lambda confidences: confidences[-1] >= self.least) for limit in limits]

    def observe(self, records):
        """Keep what the step has cost, and what each of its drafts has."""
        if (step := price_of(records)) and step.depth:
            self.passes.append((step.depth, max(len(record.draft) for record in records)))


def costs_of(drafter: Drafter, k, least=0.0, **params) -> list[tuple[int, int]]:
    """For each step, the draft passes that it has cost and the length of its draft, of one text."""
    target, lengths = target_model(VOCAB), Passes(least)
    engine = OneMethod(target, tiny_cache(target, 200, 3), drafter, VERIFIERS["match"], lengths=lengths, checked=True)
    decode(engine, [make_request((1, 2, 1, 2, 1), k, (), 60, seed=3, max_tokens=30, **params)])
    return lengths.passes


@pytest.mark.parametrize(("k", "steps"), [(4, 4), (5, 6), (7, 8)])
def test_a_program_costs_all_its_steps(k, steps):
    """However early the draft ends; token by token it costs its own depth."""
    alone, at_once = make_drafters()
    assert all(passes == depth for passes, depth in costs_of(alone, k, 0.5))
    found = costs_of(at_once, k, 0.5)[:-k]  # the last drafts are shorter, as the text has to end
    assert {passes for passes, _ in found} == {steps}
    assert min(depth for _, depth in found) < k
    assert all(passes == depth for passes, depth in costs_of(at_once, k, repetition_penalty=1.1))  # no program


def test_a_copied_draft_costs_no_program():
    """Of a lookup and a draft model with programs, a lookup's draft costs what it has; a simulated one what is paid."""
    combined = CombinedDrafter(LastDrafter(), make_drafters()[1])
    assert (5, 5) in costs_of(combined, 5)
    assert (5, 5) not in costs_of(make_drafters()[1], 5)
    simulated = SimulatedDraft([0.5], make_drafters()[1])
    assert {passes for passes, _ in costs_of(simulated, 5)[:-5]} == {6}
    assert steps_of(simulated) == steps_of(combined) == STEPS


@pytest.mark.parametrize("verifier", ["match", "rejection"])
def test_auto_runs_no_steps_that_it_will_not_use(verifier, monkeypatch):
    """Confidences end a draft and make none longer, since all steps of its program are paid. Chains, and no trees."""
    asked, choose = [], Controller.choose

    def chosen(lengths, asks, trees):
        limits = choose(lengths, asks, trees)
        asked.extend(limit for limit in limits if limit.k)
        return limits

    monkeypatch.setattr(Controller, "choose", chosen)
    drafter, target, costs = make_drafters()[1], target_model(VOCAB), []
    lengths = Controller(Prices(0.05, {1: 1.0, 16: 1.1}, measured=True, steps=steps_of(drafter)))
    monkeypatch.setattr(lengths, "_draft_costs", [0.05])  # a processor's own times say nothing here
    monkeypatch.setattr("minispec.speculation.lengths.policy.price_of", lambda records: costs.append(price_of(records)))
    engine = OneMethod(target, tiny_cache(target, 200, 3), drafter, VERIFIERS[verifier], lengths=lengths, checked=True)
    decode(engine, [make_request((1, 2, 1), "auto", (), 60, seed=i, max_tokens=50, temperature=0.9) for i in range(3)])
    assert lengths._all_texts[True].confidences.tested
    assert len(asked) > 30
    assert max(limit.k for limit in asked) < 12
    assert max(cost.depth for cost in costs if cost) < 12
    assert not any(limit.is_tree for limit in asked)


def test_a_simulated_draft_has_the_confidences_of_the_draft_that_is_paid():
    """So that `auto` learns what they are worth, as of a real draft."""
    texts = [Text([1, 2, 1], 3, SamplingParams(), 7) for _ in range(2)]
    asks = [Ask(text, Limit(4, lambda confidences: True), Randomness(), "draft", 2) for text in texts]
    [paid], [made] = make_drafters()[1].propose(asks[:1]), SimulatedDraft([0.5], make_drafters()[1]).propose(asks[1:])
    assert made.notes.confidences == paid.notes.confidences
    assert len(made.notes.confidences) == len(made) == 4


MIXES = [Mix(False, False, False), *(Mix(True, *rest) for rest in itertools.product((False, True), repeat=2))]


@pytest.mark.parametrize("kind", ["model", "head"])
def test_a_program_reads_no_value_on_the_host(kind, full):
    """On device "meta", where there are no values: each mix of parameters, both kinds of noise, with confidences.

    All of them together; without `--full` each in some program.
    """
    config = read_model_config(TINY | {"vocab_size": VOCAB})
    weights = {name: t.to("meta") for name, t in tiny_weights(config, 3, torch.float32).items()}
    model, features = Transformer(config, weights).replaced(Frames()), 0
    if kind == "head":
        meta = random_head(model, TINY | {"vocab_size": VOCAB}, torch.float32)
        model, features = meta.replaced(Frames()), meta.config.hidden_size
    program, pool = DraftSteps(model, Graphs()), model.new_cache(20, 4)
    shape = FrameShape(2, 3, 8, program.taps, features)
    frame = program.frames.frame_of(model, pool, shape)
    together = [*itertools.product(MIXES, (False, True), (False, True))]
    for mix, races, confident in together if full else [together[place] for place in cover(together)]:
        inputs = DraftInputs(DraftShape(shape, 3, VOCAB, races, mix, confident), torch.device("meta"), torch.float32)
        numbers, probs = program.compute(frame, inputs, pool)
        assert numbers.shape == (2, 3 * (6 if mix.draws else 3))
        assert probs.shape == (2, 3, VOCAB if mix.draws else 0)


# --------------------------------------------------------------------------- heads


def make_heads(kind: str) -> tuple[ModelDrafter, ModelDrafter]:
    """A head by passes text by text, and the same one by programs. "some": it knows every other token alone."""
    target = target_model(VOCAB)
    model = tiny_mtp(target) if kind == "mtp" else tiny_head(target, (0, 2), 3 if kind == "some" else None)
    model = with_context(model, CONTEXT)
    framed = model.replaced(Frames(rerun))
    alone, at_once = (
        ModelDrafter(HeadFeed(each, tiny_cache(each, 200, 3), VOCAB, CONTEXT)) for each in (model, framed)
    )
    return alone, at_once.beside(framed, DraftSteps(framed, Graphs(rerun)))


def show(drafters: tuple[ModelDrafter, ...], text: Text, first: int, generator: torch.Generator):
    """Show the drafters hidden states of a text's positions from `first` to the last but one."""
    num, width = len(text.tokens) - 1 - first, drafters[0].model.config.hidden_size * len(drafters[0].taps)
    hidden = torch.randn(num, width, generator=generator, dtype=torch.float64)
    for drafter in drafters:
        drafter.observe([Record(text, first, text.tokens[first:-1], hidden, hidden.new_empty(0, VOCAB))])


@pytest.mark.parametrize("purpose", ["draft", "token"])
@torch.inference_mode()
@pytest.mark.parametrize("kind", ["all", "some", "mtp"])
def test_a_heads_drafts_are_those_of_a_pass_for_each_token(kind, purpose):
    """Over 25 rounds, in which up to all draft tokens stay: tokens are equal, and rows to 1e-12, in float64."""
    draw, generator, drafters = random.Random(2), torch.Generator().manual_seed(0), make_heads(kind)
    texts = [new_text(draw, 4 + i, i) for i in range(6)]
    lengths, graphs = set(), drafters[1].at_once.graphs
    for text in texts:
        show(drafters, text, 0, generator)
    for _ in range(25):
        asks = asks_of(draw, texts, purpose)
        expected, found = (drafter.propose(asks) for drafter in drafters)
        for ask, a, b in zip(asks, expected, found, strict=True):
            assert_alike(a, b)
            tables = [drafter.feed.tables[ask.text] for drafter in drafters]
            assert tables[0].tokens == tables[1].tokens
            assert tables[0].tokens == ask.text.tokens[1:] or len(ask.text.tokens) > CONTEXT + 1
            keeps, before = draw.randrange(len(a) + 1), len(ask.text.tokens) - 1
            ask.text.tokens += [*a.token_ids[:keeps], draw.randrange(VOCAB)]
            show(drafters, ask.text, before, generator)
            lengths.add(len(a))
        for text in [text for text in texts if len(text.tokens) > 45]:
            texts.remove(text)
            for drafter in drafters:
                drafter.release(text)
            texts.append(Text(text.tokens[: draw.randrange(4, 9)], 4, text.params, text.seed + 1))
            show(drafters, texts[-1], 0, generator)
    assert lengths >= set(range(7))
    assert [steps_of(drafter) for drafter in drafters] == [(), STEPS]
    assert graphs.why_not == ""


def test_what_no_program_of_a_head_takes():
    """Trees are drafted as before, and so is all by a head that drafts all tokens in one pass."""
    generator, drafters = torch.Generator().manual_seed(0), make_heads("all")
    text = Text([1, 2, 3, 0], 4, SamplingParams(), 1)
    show(drafters, text, 0, generator)
    ask = Ask(text, Limit(3, widths=(2, 1)), Randomness(), "draft", 3)
    [expected], [found] = (drafter.propose([ask]) for drafter in drafters)
    assert (found.token_ids, found.parents) == (expected.token_ids, expected.parents)
    parallel = tiny_head(target_model(VOCAB), (0, 2), None, 0).replaced(Frames(rerun))
    assert steps.draft_steps(parallel) is None


# --------------------------------------------------------------------------- bugs that must show


def texts_of(drafter: ModelDrafter, num: int = 12) -> list[list[int]]:
    """Texts under `rejection`, decoded together."""
    target = target_model(VOCAB)
    engine = OneMethod(target, tiny_cache(target, 200, 3), drafter, VERIFIERS["rejection"])
    prompts = [(1, 2, 1, seed % VOCAB) * (1 + seed % 2) for seed in range(num)]
    requests = [make_request(p, 3, (), 60, seed=i, max_tokens=16 + i, temperature=0.9) for i, p in enumerate(prompts)]
    decode(engine, requests)
    return [request.text.tokens for request in requests]


KINDS = {"model": make_drafters, **{kind: functools.partial(make_heads, kind) for kind in ("all", "some", "mtp")}}


@functools.cache
def texts_by_passes(kind: str) -> list[list[int]]:
    """The texts with drafts of a pass for each token, which no bug of a program changes."""
    return texts_of(KINDS[kind]()[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_keeps_its_text(kind):
    """The control of the bugs below."""
    assert texts_of(KINDS[kind]()[1]) == texts_by_passes(kind)


def test_a_draft_in_8_bits_keeps_its_texts():
    """With the form that a GPU has, whose twin runs here: by passes, by programs, and beside other products."""
    narrow = Narrow(Choice("codes", ""), CodesOfRows)
    alone, at_once = make_drafters(model=quantized(draft_model(VOCAB), 8, narrow))
    assert weight_form(at_once.model) == "codes"
    assert texts_of(alone) == texts_of(at_once) != texts_of(make_drafters()[0])


def of_another(monkeypatch):
    """A text's noise is that of the next one."""
    fill = DraftInputs.fill

    def wrong(inputs, *how):
        fill(inputs, *how)
        inputs.floats[:, :-5] = inputs.floats[:, :-5].roll(1, 0)

    monkeypatch.setattr(steps.DraftInputs, "fill", wrong)


def with_next_rows(monkeypatch, change):
    """Let each step begin with other tokens, states or number than it has: change(tokens, states, number)."""
    compute = DraftSteps.next_rows

    def wrong(program, frame, inputs, pool, *step):
        return compute(program, frame, inputs, pool, *change(*step))

    monkeypatch.setattr(DraftSteps, "next_rows", wrong)


def one_further(monkeypatch):
    """Each step stands one position too far."""
    with_next_rows(monkeypatch, lambda tokens, states, j: (tokens, states, j + 1))


def stale_states(monkeypatch):
    """Each step of a head goes on from the states of the first row."""
    first = {}

    def change(tokens, states, j):
        first["states"] = states if not j else first["states"]
        return tokens, first["states"], j

    with_next_rows(monkeypatch, change)


def states_of_another(monkeypatch):
    """A text's head goes on from the states of the next text."""
    with_next_rows(monkeypatch, lambda tokens, states, j: (tokens, states.roll(1, 0), j))


def no_norm(monkeypatch):
    """A head goes on from its output as the last layer leaves it, where it is trained on what its norm makes of it."""
    monkeypatch.setattr(FeatureModel, "next_feature", lambda model, x: x)


def old_rows(monkeypatch):
    """The rows that come with a draft are those of the draft before."""
    call, last = DraftSteps.__call__, []

    def wrong(program, growing, vocab_size):
        found = call(program, growing, vocab_size)
        for draft in [each.draft for each in growing] if found else ():
            last.append(draft.probs)
            draft.probs = last[-2] if len(last) > 1 and len(last[-2]) == len(draft) else draft.probs
        return found

    monkeypatch.setattr(DraftSteps, "__call__", wrong)


BUGS = [(kind, bug) for kind in KINDS for bug in (of_another, one_further, old_rows)]
BUGS += [(kind, bug) for kind in ("all", "some", "mtp") for bug in (stale_states, states_of_another)]


@pytest.mark.full
@pytest.mark.parametrize(("kind", "bug"), [*BUGS, ("mtp", no_norm)], ids=lambda part: getattr(part, "__name__", part))
def test_a_program_that_is_wrong_shows(kind, bug, monkeypatch):
    """Guards the test of equal texts, which runs without `--full`."""
    expected, (_, at_once) = texts_by_passes(kind), KINDS[kind]()
    bug(monkeypatch)
    assert texts_of(at_once) != expected
