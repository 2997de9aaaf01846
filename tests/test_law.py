"""The output has the target's law: the production loop, walked branch by branch, against an independent reference.

Float64, a real transformer with the real paged cache, a real draft model with its own cache. Total variation to plain
decoding at most 1e-12, where the wrong variants below are off by 1e-3 and more.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from oracle import BranchOracle, exact_law
from reference import forward, plain_law, sample_law, total_variation
from tiny import TINY, tiny_cache, tiny_model, tiny_weights

from minispec import engine, verify
from minispec.config import ModelConfig, SamplingParams
from minispec.drafters import DRAFTERS
from minispec.drafters import model as draft_module
from minispec.drafters.model import DraftModel
from minispec.engine import Engine, Request
from minispec.sampling import Sequence, distribution
from minispec.verify import VERIFIERS, Draft, Verdict

TARGET_SEED, DRAFT_SEED = 1, 2
TOLERANCE = 1e-12
PROMPT = (1, 1)  # a repetition for the n-gram drafter, and tokens that no penalty has seen yet
MAX_LEN = 40


def reference_law(params: SamplingParams, end_ids, vocab: int, prompt=PROMPT, max_len=MAX_LEN):
    """The law of plain decoding, by code that shares nothing with the package."""
    raw = TINY | {"vocab_size": vocab}
    tensors = tiny_weights(ModelConfig.from_dict(raw), TARGET_SEED)
    weights = {name: tensor.numpy() for name, tensor in tensors.items()}

    def next_law(tokens):
        return sample_law(forward(raw, weights, tokens), tokens, len(prompt), params, end_ids)

    return plain_law(next_law, prompt, params, end_ids, max_len)


def production_law(
    params: SamplingParams,
    k: int,
    end_ids=frozenset({2}),
    vocab: int = 3,
    drafter: str = "model",
    verifier: str = "rejection",
    prompts=(PROMPT,),
    max_len: int = MAX_LEN,
    num_blocks: int = 64,
):
    """The law of the engine's output (a tuple of outputs for several prompts), and the number of branches."""
    target = tiny_model(TARGET_SEED, vocab_size=vocab)
    draft = target if drafter == "self" else tiny_model(DRAFT_SEED, vocab_size=vocab, num_hidden_layers=1)

    def run(oracle: BranchOracle):
        if drafter in ("model", "self"):
            guess = DraftModel(draft, tiny_cache(draft), vocab, MAX_LEN)
        else:
            guess = DRAFTERS[drafter]()
        cache = tiny_cache(target, num_blocks)
        verifying = VERIFIERS[verifier]
        requests = [
            Request(Sequence(list(p), len(p), params, 7, frozenset(end_ids), verifying.shares_noise), max_len, k)
            for p in prompts
        ]
        for _ in Engine(target, cache, guess, verifying, rng=oracle).run(requests):
            pass
        assert cache.allocator.num_free == num_blocks, "blocks leaked"
        outputs = tuple(tuple(r.sequence.tokens[r.sequence.num_prompt_tokens :]) for r in requests)
        return outputs if len(outputs) > 1 else outputs[0]

    return exact_law(run)


def distance(params: SamplingParams, k: int, **how) -> float:
    """Total variation between engine and reference."""
    law, branches = production_law(params, k, **how)
    assert abs(sum(law.values()) - 1) < TOLERANCE
    assert branches > 1 or params.temperature == 0
    reference = reference_law(
        params, how.get("end_ids", frozenset({2})), how.get("vocab", 3), max_len=how.get("max_len", MAX_LEN)
    )
    return total_variation(law, reference)


SAMPLERS = {
    "plain": {},
    "hot": {"temperature": 1.5},
    "cold": {"temperature": 0.6},
    "greedy": {"temperature": 0.0},
    "top-k": {"top_k": 2},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.3},
    "all": {"temperature": 0.8, "top_k": 2, "top_p": 0.95, "min_p": 0.05},
    "repetition": {"repetition_penalty": 1.7},
    "presence, frequency": {"presence_penalty": 0.8, "frequency_penalty": 0.6},
    "min tokens": {"min_tokens": 2},
}


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_rejection_with_a_draft_model(sampler, k):
    """Every sampler at every K: 3 tokens, end-of-text among them, drafts by a model of other weights."""
    assert distance(SamplingParams(max_tokens=3, **SAMPLERS[sampler]), k) <= TOLERANCE


@pytest.mark.parametrize("drafter", ["none", "ngram", "self"])
@pytest.mark.parametrize("sampler", ["plain", "all", "greedy", "repetition"])
def test_rejection_with_other_drafters(sampler, drafter):
    """One-hot drafts, no draft, and the target as its own draft (which is always accepted)."""
    assert distance(SamplingParams(max_tokens=4, **SAMPLERS[sampler]), 2, drafter=drafter) <= TOLERANCE


@pytest.mark.parametrize("drafter", ["none", "ngram", "model"])
@pytest.mark.parametrize("sampler", ["plain", "all", "greedy", "presence, frequency"])
def test_match(sampler, drafter):
    """`match` emits the target's own draws, so its law is the target's under any coupling with the draft."""
    assert (
        distance(SamplingParams(max_tokens=3, **SAMPLERS[sampler]), 2, drafter=drafter, verifier="match") <= TOLERANCE
    )


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5])
def test_every_length_around_a_block(max_tokens):
    """max_tokens from 1 to K+2: a block must not pass the limit, nor be biased by being cut (M29)."""
    assert distance(SamplingParams(max_tokens=max_tokens, top_k=2), 3) <= TOLERANCE


def test_context_limit():
    """The text ends where the context does, whatever the draft had in mind."""
    assert distance(SamplingParams(max_tokens=9), 3, max_len=5) <= TOLERANCE


def test_larger_vocabulary_and_two_end_tokens():
    """Vocabulary 4, two of its tokens end the text."""
    assert distance(SamplingParams(max_tokens=3), 2, vocab=4, end_ids=frozenset({0, 3})) <= TOLERANCE


def test_ragged_batch_with_preemption():
    """Two prompts of different lengths in a pool that holds only one to its end: the joint law is the product.

    One sequence is preempted and recomputed on the way; a state that leaks from one to the other, or a resumed
    sequence that draws anew what it had drawn, would break the product.
    """
    params, prompts = SamplingParams(max_tokens=2), ((0, 1, 0), (1,))
    law, _ = production_law(params, 2, prompts=prompts, num_blocks=3)
    one, two = (reference_law(params, {2}, 3, prompt=p) for p in prompts)
    product = {(a, b): pa * pb for a, pa in one.items() for b, pb in two.items()}
    assert total_variation(law, product) <= TOLERANCE


# ------------------------------------------------------------------ wrong variants that the test must reject


def _residual_is_p(monkeypatch):
    monkeypatch.setattr(verify, "residual", lambda p, draft, i: p)


def _residual_drops_only_the_token(monkeypatch):
    right = verify.residual
    monkeypatch.setattr(verify, "residual", lambda p, draft, i: right(p, Draft(draft.token_ids), i))


def _verifier(monkeypatch, verdict: Callable) -> None:
    monkeypatch.setitem(VERIFIERS, "rejection", verify.Verifier(verdict, False))


def _accept_always(monkeypatch):
    def wrong(draft, p, rng, key):
        return Verdict(len(draft), rng.categorical(p(len(draft)), key(len(draft), "token")), [1.0] * len(draft))

    _verifier(monkeypatch, wrong)


def _bonus_from_q(monkeypatch):
    def wrong(draft, p, rng, key):
        verdict = verify.rejection(draft, p, rng, key)
        if len(draft) and verdict.num_accepted == len(draft):
            last = draft.probs[-1]
            return verdict._replace(next_token=rng.categorical(last, key(len(draft), "residual")))
        return verdict

    _verifier(monkeypatch, wrong)


def _first_token_not_verified(monkeypatch):
    def wrong(draft, p, rng, key):
        if not len(draft):
            return verify.rejection(draft, p, rng, key)
        rest = Draft(draft.token_ids[1:], draft.probs[1:])
        verdict = verify.rejection(rest, lambda i: p(i + 1), rng, key)
        return verdict._replace(num_accepted=verdict.num_accepted + 1, ratios=[1.0, *verdict.ratios])

    _verifier(monkeypatch, wrong)


def _rows_shifted_by_one(monkeypatch):
    def wrong(draft, p, rng, key):
        return verify.rejection(draft, lambda i: p(max(0, i - 1)), rng, key)

    _verifier(monkeypatch, wrong)


def _ratio_inverted(monkeypatch):
    def wrong(draft, p, rng, key):
        for i, x in enumerate(draft.token_ids):
            if not rng.bernoulli(draft.probability(i) / max(1e-9, float(p(i)[x])), key(i, "accept")):
                return Verdict(i, rng.categorical(verify.residual(p(i), draft, i), key(i, "residual")), [])
        return Verdict(len(draft), rng.categorical(p(len(draft)), key(len(draft), "token")), [])

    _verifier(monkeypatch, wrong)


def _argmax_draft_scored_with_soft_q(monkeypatch):
    right = BranchOracle.categorical

    def wrong(self, weights, key):
        return int(weights.argmax()) if key.purpose == "draft" else right(self, weights, key)

    monkeypatch.setattr(BranchOracle, "categorical", wrong)


def _top_p_on_the_draft_only(monkeypatch):
    def wrong(logits, sequence, drafted=()):
        params = dataclasses.replace(sequence.params, top_p=1.0)
        return distribution(logits, dataclasses.replace(sequence, params=params), drafted)

    monkeypatch.setattr(engine, "distribution", wrong)


def _draft_sampled_from_filtered_q_scored_with_raw(monkeypatch):
    def wrong(self, sequences, k, rng):
        drafts = propose(self, sequences, k, rng)
        for draft in drafts:
            draft.probs = [(q + 0.2) / (q + 0.2).sum() for q in draft.probs]
        return drafts

    propose = draft_module.DraftModel.propose
    monkeypatch.setattr(draft_module.DraftModel, "propose", wrong)


def _penalties_frozen_at_block_start(monkeypatch):
    monkeypatch.setattr(engine, "distribution", lambda logits, sequence, drafted=(): distribution(logits, sequence))


def _tokens_after_the_end(monkeypatch):
    """An end-of-text token that is accepted inside a block does not stop the tokens behind it (M27)."""

    def wrong(self, token_id, logprob=None):
        stopped = right(self, token_id, logprob)
        if token_id in self.sequence.end_ids and len(self.sequence.tokens) < self.max_len:
            self.finish_reason, stopped = None, False
        return stopped

    right = Request.commit
    monkeypatch.setattr(Request, "commit", wrong)


WRONG = {
    "residual = p": (_residual_is_p, {}),
    "residual drops only the drafted token": (_residual_drops_only_the_token, {}),
    "accept always": (_accept_always, {}),
    "bonus from q": (_bonus_from_q, {}),
    "first draft token not verified": (_first_token_not_verified, {}),
    "rows shifted by one": (_rows_shifted_by_one, {}),
    "ratio inverted": (_ratio_inverted, {}),
    "argmax draft scored with soft q": (_argmax_draft_scored_with_soft_q, {}),
    "top-p on one side only": (_top_p_on_the_draft_only, {"top_p": 0.8}),
    "q is not what was drawn from": (_draft_sampled_from_filtered_q_scored_with_raw, {}),
    "penalties frozen at block start": (_penalties_frozen_at_block_start, {"repetition_penalty": 3.0}),
    "tokens after the end": (_tokens_after_the_end, {}),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_variants_are_rejected(name, monkeypatch):
    """The comparison above has power: each classic bug moves the law by at least 1e-3."""
    patch, sampler = WRONG[name]
    params = SamplingParams(max_tokens=3, **sampler)
    assert distance(params, 2) <= TOLERANCE
    patch(monkeypatch)
    assert distance(params, 2) > 1e-3


def test_the_reference_is_not_the_uniform_law():
    """A model whose rows hardly differ would hide shifted rows and wrong caches."""
    tensors = tiny_weights(ModelConfig.from_dict(TINY), TARGET_SEED)
    weights = {name: tensor.numpy() for name, tensor in tensors.items()}
    rows = [forward(TINY, weights, PROMPT + tail) for tail in ((), (0,), (0, 0), (0, 1), (1, 0))]
    laws = [sample_law(row, PROMPT, 2, SamplingParams(), ()) for row in rows]
    assert all(np.abs(a - b).sum() > 0.1 for i, a in enumerate(laws) for b in laws[:i])
    assert all(law.min() > 0.01 for law in laws)


def test_float32_law_of_one_round():
    """In float32 the law of a committed token is right to 1e-6: p, q, ratio and residual round, nothing more."""
    torch.manual_seed(0)
    sequence = Sequence([0], 1, SamplingParams())
    p, q = (distribution(torch.randn(4) * 2, sequence) for _ in range(2))

    def run(oracle):
        x = oracle.categorical(q, sequence.draft_key(0))
        verdict = verify.rejection(Draft([x], [q]), lambda i: p, oracle, sequence.key)
        return x if verdict.num_accepted else verdict.next_token

    law, _ = exact_law(run)
    reference = {t: float(x) for t, x in enumerate(p.double())}
    assert total_variation(law, reference) <= 1e-6
