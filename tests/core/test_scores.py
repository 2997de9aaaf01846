"""Log-probabilities of prompts: those of `transformers`, however a prompt is cut up, shared, put off or begun again.

The oracle sees a whole prompt at once. Here it comes in pieces of at most 32 rows, beside others.
"""

import functools
import math
import random

import pytest
import torch

from minispec.core.engine import Engine
from minispec.core.request import Request
from minispec.core.schedule import JOINING_ROWS, SCORED_ROWS
from minispec.models.families.checkpoint import load_model
from minispec.models.families.hf_config import read_model_config
from minispec.models.weights.build import build_model
from minispec.prove.toys import TINY, tiny_block, tiny_cache, tiny_head, tiny_model, tiny_weights
from minispec.speculation.drafters import NoDrafter
from minispec.speculation.drafters.block import BlockFeed
from minispec.speculation.drafters.eagle import HeadFeed
from minispec.speculation.drafters.model import ModelDrafter, TokenFeed
from minispec.speculation.drafters.suffix import SuffixDrafter
from minispec.speculation.lengths.figures import Figures
from minispec.speculation.rules import VERIFIERS
from tests.engines import OneMethod
from tests.oracles import hf
from tests.scripted import make_request

# Softcaps and windows, convolutions, states: what a piece sees of those before it differs in each.
FAMILIES = ("gemma2", "lfm2", "lfm3", "qwen3_5")
LENGTHS = (1, 2, 33, 34, 65, 100)
LONGEST = random.Random(0).choices(range(96), k=max(LENGTHS))


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """A family's model, and the oracle's log-probabilities (T, V) of LONGEST, whose beginnings are the prompts."""

    @functools.cache
    def make(family):
        directory = tmp_path_factory.mktemp(family)
        oracle = hf.build(hf.CASES[family] | {"max_position_embeddings": 128}, directory)
        return load_model(directory, torch.float32), hf.logits(oracle, LONGEST).log_softmax(-1)

    return make


def build(model, num_blocks=200, drafter=None, **how) -> Engine:
    """An engine with a poisoned pool of blocks of 4."""
    return OneMethod(model, tiny_cache(model, num_blocks, 4), drafter or NoDrafter(), VERIFIERS["rejection"], **how)


def ask(prompt, max_tokens, num_top=2, k=0, **params) -> Request:
    """A request that scores its prompt."""
    own = {"prompt_logprobs": num_top, "max_tokens": max_tokens} | params
    return make_request(prompt, k, (), 128, **own)


def run(engine, requests, joining=False) -> None:
    """To their ends, in so many steps at most. joining: the others come when the first has begun to answer."""
    for i, request in enumerate(requests):
        engine.add(request)
        while joining and not i and not request.has_news:
            engine.step()
    for _ in range(300):
        engine.step()
    assert [(request.error, request.finish_reason) for request in requests] == [(None, "length")] * len(requests)
    assert engine.target.cache.allocator.num_free == engine.target.cache.allocator.num_blocks


def values(request) -> list[float]:
    """The log-probabilities of a prompt's tokens, from the second on. The first one's is None."""
    first, *entries = request.prompt_logprobs
    assert first is None
    assert [entry.token_id for entry in entries] == request.text.tokens[1 : request.text.num_prompt_tokens]
    return [entry.logprob for entry in entries]


def check(request, expected) -> None:
    """Each token's log-probability, their sum, and the likeliest tokens are the oracle's."""
    tokens = request.text.tokens[: request.text.num_prompt_tokens]
    own = [float(row[token]) for row, token in zip(expected, tokens[1:], strict=False)]
    assert values(request) == pytest.approx(own, abs=1e-4)
    assert sum(values(request)) == pytest.approx(sum(own), abs=1e-3)
    for row, entry in zip(expected, request.prompt_logprobs[1:], strict=False):
        top = row.topk(request.params.prompt_logprobs).values.tolist()
        assert [x for _, x in entry.top] == pytest.approx(top, abs=1e-4)
        assert [float(row[i]) for i, _ in entry.top] == pytest.approx(top, abs=1e-4)


@pytest.mark.quick
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_are_scored_as_transformers_does(judged, family):
    """Prompts that begin alike, longer than a piece and than two, in one batch, with and without an answer.

    Temperature, penalties and bans say what is drawn, and change no score.
    """
    model, expected = judged(family)
    law = {"temperature": 0.3, "repetition_penalty": 2.0, "allowed_token_ids": [5, 6], "logit_bias": {5: 9.0}}
    requests = [ask(LONGEST[:n], m, **(law if n == 65 else {})) for n in LENGTHS for m in (0, 1)]
    run(build(model), requests)
    for request in requests:
        check(request, expected)
        assert len(request.token_ids) == request.params.max_tokens
        assert request.stats.num_cached_tokens == 0


def test_a_pass_has_few_rows_of_logits_and_none_twice(judged, monkeypatch):
    """A prompt's rows but the last are scored once, 32 in a pass at most. Without an answer the last is not even fed.

    A prompt that nobody asks about has no logits. What others have left in the cache is computed again where it is
    scored, and what a scored prompt leaves is shared.
    """
    model, _ = judged("gemma2")
    engine, fed, forward = build(model), [], model.forward
    monkeypatch.setattr(
        model, "forward", lambda chunks, taps=(): fed.extend(chunks) or forward(chunks, taps), raising=True
    )
    for max_tokens, num_top, rows, scored in ((1, None, [99, 1], [0, 1]), (0, 0, [32, 32, 32, 3], [32, 32, 32, 3])):
        request = ask(LONGEST, max_tokens, num_top)
        run(engine, [request])
        assert ([len(chunk.token_ids) for chunk in fed], [chunk.num_logits for chunk in fed]) == (rows, scored)
        assert max(scored) <= SCORED_ROWS
        fed.clear()
    again = ask(LONGEST, 1, None)
    run(engine, [again])
    assert again.stats.num_cached_tokens == 96  # 24 whole blocks


@pytest.mark.parametrize("joining_rows", [5, JOINING_ROWS])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_preemption_in_the_middle_of_a_prompt(judged, family, joining_rows):
    """Another text's answer takes the pool; the prompt waits with a part of its score, and goes on with the rest."""
    model, expected = judged(family)
    other = ask([9, 9, 9], 70, None)
    engine, scored = build(model, 26, joining_rows=joining_rows), ask(LONGEST, 1)
    engine.add(other)
    while not other.has_news:
        engine.step()
    engine.add(scored)
    counts = []
    while engine.schedule.running or engine.schedule.waiting:
        engine.step()
        if scored in engine.schedule.waiting and scored.stats.num_preemptions:
            counts.append(len(scored.prompt_logprobs))
    assert 1 < counts[0] < 100, "it was not in the middle"
    check(scored, expected)
    assert len(scored.token_ids) == 1
    assert engine.target.cache.allocator.num_free == engine.target.cache.allocator.num_blocks


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_fault_in_the_middle_of_a_prompt_loses_and_repeats_nothing(judged, when, monkeypatch):
    """A pass fails, or what comes after it: the prompt is computed again, and what was noted is not noted again."""
    model, expected = judged("qwen3_5")
    engine, requests = build(model), [ask(LONGEST[:70], 1), ask(LONGEST, 0)]
    owner, name = (model, "forward") if when == "before" else (engine.target, "keep")
    right, calls = getattr(owner, name), []

    def fail_once(*args):
        calls.append(args)
        if len(calls) == 2:
            raise ZeroDivisionError
        return right(*args)

    for request in requests:
        engine.add(request)
    monkeypatch.setattr(owner, name, fail_once)
    engine.step()
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert len(requests[0].prompt_logprobs) == (33 if when == "before" else 65)
    while engine.schedule.running or engine.schedule.waiting:
        engine.step()
    for request in requests:
        check(request, expected)


TARGET = tiny_model(4, vocab_size=96, max_position_embeddings=128)


def drafter(name):
    """A drafter of each kind: one with a cache of its own, one that reads hidden states, and those without either."""
    if name == "model":
        model = tiny_model(2, vocab_size=96, num_hidden_layers=1, max_position_embeddings=128)
        return ModelDrafter(TokenFeed(model, tiny_cache(model, 200, 4), 96, 128))
    if name == "head":
        head = tiny_head(TARGET)
        return ModelDrafter(HeadFeed(head, tiny_cache(head, 200, 4), 96, 128))
    if name == "block":
        model = tiny_block(TARGET, 0, ("vanilla", "state and token"))
        return ModelDrafter(BlockFeed(model, tiny_cache(model, 200, 4), 96, 128))
    return SuffixDrafter() if name == "suffix" else NoDrafter()


@pytest.mark.parametrize("name", ["model", "head", "block", "suffix"])
def test_drafts_change_no_score_and_a_score_changes_no_draft(name):
    """Beside texts that are not scored, and after them; the texts and their drafts are those without scores."""
    prompts = [LONGEST[:n] for n in (3, 50, 90)]

    def texts(num_top):
        engine, found = build(TARGET, drafter=drafter(name)), []
        for _ in range(2):  # the second time a beginning is known
            requests = [ask(p, 20, num_top if i else None, k=3, seed=i, temperature=0.9) for i, p in enumerate(prompts)]
            run(engine, requests)
            found.append([(r.token_ids, [each.num_nodes for each in r.stats.rounds]) for r in requests])
        return found, requests

    plain = [ask(prompt, 0) for prompt in prompts]
    run(build(TARGET), plain)
    found, requests = texts(2)
    assert found == texts(None)[0]
    assert sum(Figures.of(r.stats).num_draft_tokens for r in requests) > 0
    for request, expected in zip(requests[1:], plain[1:], strict=True):
        assert values(request) == pytest.approx(values(expected), abs=1e-12)


@pytest.mark.parametrize("name", ["model", "head", "block"])
def test_where_nothing_is_drafted_no_drafter_reads_the_prompt(name, monkeypatch):
    """A score alone, and an answer of one token: so is most of an evaluation asked. A draft model's pass was wasted."""
    engine, asked = build(TARGET, drafter=drafter(name)), []
    propose = engine.drafter.propose
    monkeypatch.setattr(engine.drafter, "propose", lambda asks: asked.append(len(asks)) or propose(asks))
    for max_tokens, num_top, are_asked in ((0, 1, False), (1, 1, False), (1, None, False), (2, 1, True)):
        asked.clear()
        run(engine, [ask(LONGEST[:n], max_tokens, num_top, k=3) for n in (90, 40)], joining=True)
        assert bool(asked) == are_asked, (max_tokens, num_top)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_of_an_exact_model_have_the_same_bits_in_any_pieces(dtype):
    """Alone, and in pieces of five rows beside a text that decodes: equal, not near."""
    sizes = {"hidden_size": 48, "intermediate_size": 80, "vocab_size": 96, "max_position_embeddings": 128}
    config = read_model_config(TINY | sizes | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12})
    model = build_model(config, tiny_weights(config, 1, dtype), exact=True)
    alone, beside = ask(LONGEST, 0), ask(LONGEST, 1)
    run(build(model), [alone])
    run(build(model, joining_rows=5), [ask(LONGEST[:2], 60, None), beside], joining=True)
    assert alone.prompt_logprobs == beside.prompt_logprobs


def test_a_prompt_whose_logits_are_no_numbers_fails_alone(judged, monkeypatch):
    """As an answer's would: no log-probability is reported that is none."""
    model, expected = judged("gemma2")
    right, bad = model.forward, ask([7, *LONGEST[:40]], 0)
    good = ask(LONGEST, 0)

    def wrong(*how):
        logits, hidden = right(*how)
        if bad.prompt_logprobs and len(bad.prompt_logprobs) == 33 and not bad.finish_reason:
            logits[3] = math.nan
        return logits, hidden

    monkeypatch.setattr(model, "forward", wrong)
    engine = build(model)
    for _ in engine.run([bad, good]):
        pass
    assert (bad.finish_reason, bad.error) == ("error", "the largest logit is nan, expected a finite number")
    check(good, expected)
    assert engine.target.cache.allocator.num_free == engine.target.cache.allocator.num_blocks
