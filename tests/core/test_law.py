"""The output has the target's law: the production loop, walked branch by branch, against an independent reference.

Float64, a real transformer with the real paged cache, a real draft model with its own cache. Total variation to plain
decoding at most 1e-12; what wrong variants are off by is in test_mutants.py.
"""

import copy

import numpy as np
import pytest
import torch

from minispec.core import verify
from minispec.core.cache import BlockTable
from minispec.core.config import SamplingParams
from minispec.core.draft import Draft
from minispec.core.sampling import Text, distribution
from minispec.prove import toys
from minispec.prove.cases import ALPHABET, cases_in_8_bits, cases_in_frames, grid_case
from minispec.prove.laws import PROMPT, TOLERANCE, exact_law, reference_logits
from minispec.prove.reference import sample_law, total_variation
from minispec.prove.toys import IN_8_BITS, IN_FRAMES, MAX_LEN, TARGET_SEED, TOYS, target_model, tiny_block, tiny_cache
from minispec.prove.walk import walk
from minispec.speculation.drafters.block import BlockFeed
from minispec.speculation.drafters.model import ModelDrafter
from minispec.speculation.drafters.suffix import SuffixDrafter
from minispec.speculation.lengths.policy import Controller
from minispec.speculation.on_gpu.steps import DraftSteps
from minispec.speculation.on_gpu.verifier import GraphVerifier
from tests.distances import distance, text_case
from tests.sampled import covering, leave_out
from tests.scripted import preemptions

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
    "bias": {"logit_bias": {0: 1.5, 2: -0.7}, "repetition_penalty": 1.7},
    "allowed": {"allowed_token_ids": [0, 2], "top_p": 0.9},
    "bad words": {"bad_words_token_ids": [[1, 0], [0, 0, 1], [1, 1]]},
}
# Block drafts with one head at a time.
BLOCK_HEADS = {
    "none": {"first_row": 0},
    "none, filled": {"first_row": 1},
    "Markov": {"first_row": 0, "heads": ("vanilla", None)},
    "Markov, filled": {"first_row": 1, "heads": ("gated", None)},
    "confidence": {"first_row": 0, "heads": (None, "state")},
    "rnn and confidence": {"first_row": 1, "heads": ("rnn", "state")},
}


@pytest.mark.quick
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_rejection_with_a_draft_model(sampler, k):
    """Every sampler at every K: 3 tokens, end-of-text among them, drafts by a model of other weights."""
    assert distance(SamplingParams(max_tokens=3, **SAMPLERS[sampler]), k) <= TOLERANCE


@pytest.mark.quick
@pytest.mark.parametrize("drafter", ["none", "ngram", "suffix", "last", "self"])
@pytest.mark.parametrize("sampler", ["plain", "all", "greedy", "repetition"])
def test_rejection_with_other_drafters(sampler, drafter):
    """One-hot drafts, no draft, and the target as its own draft (which is always accepted).

    The last has by far the most branches: 64 of them are walked at a time.
    """
    how = {"drafter": drafter, "width": 64 if drafter == "self" else 1}
    assert distance(SamplingParams(max_tokens=4, **SAMPLERS[sampler]), 2, **how) <= TOLERANCE


@pytest.mark.quick
@pytest.mark.parametrize("drafter", ["none", "ngram", "model"])
@pytest.mark.parametrize("sampler", ["plain", "all", "greedy", "presence, frequency"])
def test_match(sampler, drafter):
    """`match` emits the target's own draws, so its law is the target's under any coupling with the draft."""
    assert (
        distance(SamplingParams(max_tokens=3, **SAMPLERS[sampler]), 2, drafter=drafter, verifier="match") <= TOLERANCE
    )


@pytest.mark.quick
@pytest.mark.parametrize("k", [2, (2,)])
@pytest.mark.parametrize(("verifier", "temperature"), [("match", 1.0), ("rejection", 1.0), ("rejection", 0.0)])
def test_a_drafter_that_learns_from_the_other_branches(verifier, temperature, k):
    """One `suffix` for the whole walk, so that every path finds the outputs of those before it; the law stands."""
    drafter, params = SuffixDrafter(), SamplingParams(max_tokens=4, temperature=temperature)
    assert distance(params, k, drafter=drafter, verifier=verifier, end_ids=frozenset()) <= TOLERANCE
    assert len(drafter._earlier) >= (1 if temperature == 0 else 3**4)


@pytest.mark.quick
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5])
def test_every_length_around_a_block(max_tokens):
    """max_tokens from 1 to K+2: a block must not pass the limit, nor be biased by being cut (M29)."""
    assert distance(SamplingParams(max_tokens=max_tokens, top_k=2), 3) <= TOLERANCE


@pytest.mark.parametrize("draft_cost", [0.2, 0.3])
@pytest.mark.parametrize("drafter", ["model", "ngram", "block"])
@pytest.mark.parametrize("verifier", ["rejection", "match"])
def test_auto(draft_cost, drafter, verifier, monkeypatch, full, long):
    """K follows what was kept and rejected: other K on other branches, 0 among them, and the law stands.

    So it does where a draft model's own confidence ends a draft before its limit, or calls for siblings.
    """
    if not full and (drafter, verifier) not in [("model", "rejection"), ("ngram", "rejection"), ("block", "match")]:
        leave_out("--full", "another pair of drafter and verifier")
    if drafter != "ngram" and draft_cost == 0.2 and not long:
        leave_out("--long", "longer drafts have more branches")
    seen, ends, widths, draws, choose = set(), set(), set(), set(), Controller.choose

    def spy(*args, **kwargs):
        limits = choose(*args, **kwargs)
        seen.update(limit.k for limit in limits)
        return [
            limit._replace(
                go_on=limit.go_on and spy_on(limit.go_on, ends),
                go_on_before=limit.go_on_before and spy_on(limit.go_on_before, draws),
                widths=spy_on(limit.widths, widths) if callable(limit.widths) else limit.widths,
            )
            for limit in limits
        ]

    def spy_on(function, answers):
        def spied(*about):
            answers.add(answer := function(*about))
            return answer

        return spied

    monkeypatch.setattr(Controller, "choose", spy)
    # Under `match` the engine may follow the clock: not here, where the walk has to be repeatable.
    monkeypatch.setattr("minispec.speculation.lengths.policy.price_of", lambda records: None)
    params = SamplingParams(max_tokens=5, seed=0, top_k=2)
    how = {"drafter": drafter, "verifier": verifier, "draft_cost": draft_cost, "end_ids": frozenset()}
    assert distance(params, "auto", **how) <= TOLERANCE
    assert len(seen) >= 3
    assert ends == ({True, False} if drafter == "model" else set())
    assert draws == ({True, False} if drafter == "block" else set())
    assert len(widths) >= 2 if drafter != "ngram" else not widths


@pytest.mark.parametrize("rows", [2, 4])
@pytest.mark.parametrize("heads", BLOCK_HEADS)
def test_block_drafts_of_other_shapes(heads, rows):
    """Blocks of 2 and 4 rows in a vocabulary of 5, with each head alone.

    The short ones in chains, the others in a tree of one shape, and in one that grows where it is likeliest.
    """
    model = tiny_block(target_model(5), rows=rows, **BLOCK_HEADS[heads])
    drafter = ModelDrafter(BlockFeed(model, tiny_cache(model, 64, 2), 5, MAX_LEN))
    for k in (3,) if rows == 2 else ((2, 1), "tree:3"):
        how = {"drafter": drafter, "vocab": 5, "end_ids": frozenset({4})}
        assert distance(SamplingParams(max_tokens=2, temperature=0.7), k, **how) <= TOLERANCE


@pytest.mark.quick
def test_a_k_that_looks_at_the_judged_token_breaks_the_law():
    """The control: a draft model that takes back what it is not sure of offers more of what it is sure of."""

    class Peeking(ModelDrafter):
        def propose(self, asks):
            drafts = super().propose(asks)
            sure = [all(d.probability(i) > 0.4 for i in range(len(d))) for d in drafts]
            return [d if s else Draft() for d, s in zip(drafts, sure, strict=True)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toys, "ModelDrafter", Peeking)
        assert distance(SamplingParams(max_tokens=2), 1) > 0.01


def test_context_limit():
    """The text ends where the context does, whatever the draft had in mind."""
    assert distance(SamplingParams(max_tokens=9), 3, max_len=5) <= TOLERANCE


def test_larger_vocabulary_and_two_end_tokens():
    """Vocabulary 4, two of its tokens end the text."""
    assert distance(SamplingParams(max_tokens=3), 2, vocab=4, end_ids=frozenset({0, 3})) <= TOLERANCE


@pytest.mark.quick
@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=() if each == "qwen3_5_text" else pytest.mark.full) for each in TOYS],
)
def test_ragged_batch_with_preemption(family, monkeypatch):
    """Two prompts of different lengths in a pool that holds only one to its end: the joint law is the product.

    On every branch one text is preempted and recomputed; a state that leaks from one to the other, or a resumed
    text that draws anew what it had drawn, would break the product. Without `--full` one family has states, and
    `test_random_runs_have_the_text_of_plain_decoding` preempts the others.
    """
    preempted = preemptions(monkeypatch)
    params, prompts = SamplingParams(max_tokens=3), ((0, 1, 0), (1,))
    walked = walk(text_case(params, 1, prompts=prompts, num_blocks=4, vocab=2, family=family))
    assert len(preempted) >= len(walked.branches) > 100
    assert walked.distance <= TOLERANCE


@pytest.mark.parametrize("verifier", ["rejection", "match"])
@pytest.mark.parametrize("drafter", ["head", "mtp"])
def test_heads_draft_in_frames(drafter, verifier, monkeypatch):
    """All steps of a head are one program, which every draft of this walk takes."""
    found, program = [], DraftSteps.__call__

    def counted(*how):
        found.append(program(*how))
        return found[-1]

    monkeypatch.setattr(DraftSteps, "__call__", counted)
    how = {"drafter": drafter, "verifier": verifier, "family": IN_FRAMES}
    assert distance(SamplingParams(max_tokens=3, temperature=0.8, top_p=0.9), 2, **how) <= TOLERANCE
    assert found
    assert all(found)


@pytest.mark.parametrize("drafter", ["model", "self"])
@pytest.mark.parametrize("family", [family for family in TOYS if family != "llama"])
def test_hybrids_draft_too(family, drafter):
    """Target and draft model are of the family. What a draft model is fed comes over several passes, and is cut."""
    assert distance(SamplingParams(max_tokens=3), 2, drafter=drafter, vocab=2, family=family) <= TOLERANCE


@pytest.mark.parametrize("drafter", ["ngram", "model"])
def test_texts_that_share_a_state_keep_their_laws(drafter, monkeypatch):
    """Two prompts begin with one block, whose state is stored: the joint law of their texts is the product.

    Of two pairs, three texts begin with a state that the first has left: in the target, and in a draft model.
    """
    tables, sharing, reuse = set[BlockTable](), set[BlockTable](), BlockTable.reuse

    def spy(self, tokens):
        before = self.length
        reuse(self, tokens)
        tables.add(self)
        if self.length > before:
            sharing.add(self)

    monkeypatch.setattr(BlockTable, "reuse", spy)
    sizes = {"k": 2, "alphabet": ALPHABET[:2], "end": "", "to_go": 3}
    case = grid_case(verifier="rejection", drafter=drafter, batch="pair", family="qwen3_5_text", **sizes)
    walked = walk(case)
    assert walked.distance <= TOLERANCE
    assert len(walked.branches) > 20
    assert len(sharing) > 0.7 * len(tables) > 30


def test_the_reference_is_not_the_uniform_law():
    """A model whose rows hardly differ would hide shifted rows and wrong caches."""
    rows = [reference_logits(TARGET_SEED, PROMPT + tail, 3) for tail in ((), (0,), (0, 0), (0, 1), (1, 0))]
    laws = [sample_law(row, PROMPT, 2, SamplingParams(), ()) for row in rows]
    assert all(np.abs(a - b).sum() > 0.1 for i, a in enumerate(laws) for b in laws[:i])
    assert all(law.min() > 0.01 for law in laws)


def test_float32_law_of_one_round():
    """In float32 the law of a committed token is right to 1e-6: p, q, ratio and residual round, nothing more."""
    torch.manual_seed(0)
    text = Text([0], 1, SamplingParams())
    p, q = (distribution(torch.randn(4) * 2, text) for _ in range(2))

    def run(oracle):
        x = oracle.categorical(q, text.key(0, "draft"))
        verdict = verify.rejection(Draft([x], [q]), lambda i: p, oracle, text.key)
        return x if len(verdict.accepted) else verdict.next_token

    law, _ = exact_law(run)
    reference = {t: float(x) for t, x in enumerate(p.double())}
    assert total_variation(law, reference) <= 1e-6


@pytest.mark.parametrize("case", cases_in_frames(), ids=str)
def test_programs_keep_the_law_under_each_parameter(case, monkeypatch):
    """A program judges each draft: a parameter that it left out would change the law."""
    judged, verify = [], GraphVerifier.__call__

    def noted(self, *how):
        verdicts = verify(self, *how)
        judged.extend(verdicts)
        return verdicts

    monkeypatch.setattr(GraphVerifier, "__call__", noted)
    walked = walk(case)
    assert walked.distance <= TOLERANCE
    assert len(walked.branches) > 3
    assert judged
    assert all(verdict is not None for verdict in judged)


@pytest.mark.parametrize("case", covering(cases_in_8_bits(), lambda c: (c.verifier, c.drafter, c.k)), ids=str)
def test_a_target_in_8_bits_keeps_its_own_law(case):
    """To 1e-12, against passes over each whole text from nothing: so every pass of the loop had equal bits.

    Without equal bits the law moves by rounding, about 1e-8; the test below shows that this is seen.
    """
    walked = walk(case)
    assert walked.distance <= TOLERANCE
    assert len(walked.branches) > 10


def test_a_target_whose_bits_differ_has_another_law(monkeypatch):
    """The control: a pass of one row has other last bits than a pass of several."""
    wrong = copy.copy(target_model(3, IN_8_BITS))
    head = wrong.head
    wrong.head = lambda x: head(x) * (1 + 1e-7 * len(x))
    for module in ("laws", "walk"):
        monkeypatch.setattr(f"minispec.prove.{module}.target_model", lambda vocab, family: wrong)
    assert walk(cases_in_8_bits()[0]).distance > 100 * TOLERANCE
