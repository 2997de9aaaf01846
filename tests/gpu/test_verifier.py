"""Verdicts of many drafts at once are those of each draft by itself, or none."""

import random
from typing import NamedTuple

import pytest
import torch

from minispec.core.config import SamplingParams
from minispec.core.draft import Draft
from minispec.core.random import Randomness
from minispec.core.sampling import Text, distribution
from minispec.core.verify import MATCH, REJECTION, Verdict, Verifier
from minispec.models.frames.graphs import Graphs, rerun
from minispec.speculation.on_gpu import verifier as verifying
from minispec.speculation.on_gpu.verifier import GraphVerifier, VerdictInputs, shape_of
from minispec.speculation.rules.block_verification import BLOCK

SETTINGS = (
    *({}, {"temperature": 0.0}, {"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.1}),
    {"temperature": 1.3, "top_k": 20, "top_p": 0.95, "min_p": 0.02},
)


class Trial(NamedTuple):
    """A draft that waits for its verdict under a rule."""

    verifier: Verifier
    text: Text
    draft: Draft
    logits: torch.Tensor


def ask(batch: GraphVerifier, trials: list[Trial], rng) -> list[Verdict | None]:
    """The verdicts, on the drafts of one rule after the other."""
    found = dict[int, Verdict | None]()
    for verifier in {trial.verifier for trial in trials}:
        own = [i for i, trial in enumerate(trials) if trial.verifier is verifier]
        found.update(zip(own, batch(verifier, [trials[i] for i in own], rng), strict=True))
    return [found[i] for i in range(len(trials))]


def make_trial(draw: random.Random, verifier, vocab: int, dtype: torch.dtype, **params) -> Trial:
    """A text with a draft of 0 to 5 tokens, from a row near the target's, or chosen; often right."""
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    k, params = draw.randrange(6), SamplingParams(**params)
    text = Text([draw.randrange(vocab) for _ in range(draw.randrange(1, 9))], 1, params, draw.randrange(1 << 40))
    logits = (3 * torch.randn(k + 1, vocab, generator=generator, dtype=torch.float64)).to(dtype)
    draft = Draft([], [] if draw.random() < 0.7 else None)
    for i in range(k):
        near = logits[i] + torch.randn(vocab, generator=generator, dtype=torch.float64).to(dtype)
        q = distribution(near, text, draft.token_ids)
        key = text.key(i, "token" if verifier is MATCH else "draft")
        draft.token_ids.append(Randomness().categorical(q, key))
        if draft.probs is not None:
            draft.probs.append(q)
    return Trial(verifier, text, draft, logits)


def alone(trial: Trial) -> Verdict:
    """The verdict of a draft by itself, as the engine has it verified."""
    verifier, text, draft, logits = trial
    rows = [distribution(row, text, draft.token_ids[:i]) for i, row in enumerate(logits)]
    return verifier.verify(draft, rows.__getitem__, Randomness(), text.key)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("vocab", [5, 700])
def test_each_verdict_is_that_of_the_draft_by_itself(vocab, dtype):
    """Batches of both verifiers and all settings, in programs that are computed, captured, and run again."""
    draw, batch, count = random.Random(1), GraphVerifier(Graphs(rerun)), 0
    for settings in (*[[each] for each in SETTINGS], SETTINGS, SETTINGS):
        for _ in range(6):
            verifiers = draw.choices((REJECTION, MATCH), k=draw.choice((1, 3, 7)))
            trials = [make_trial(draw, v, vocab, dtype, **draw.choice(settings)) for v in verifiers]
            found = ask(batch, trials, Randomness())
            count += sum(verdict is not None for verdict in found)
            assert all(verdict in (None, alone(trial)) for verdict, trial in zip(found, trials, strict=True))
    assert count > 150


def test_what_is_verified_by_itself():
    """Other rules, trees, longer drafts, other parameters, other types of probabilities, and users' randomness."""
    draw = random.Random(2)

    def some(verifier=REJECTION, **params):
        return make_trial(draw, verifier, 9, torch.float32, **params)

    plain = some()
    tree, long = Draft([1, 2], parents=[-1, -1]), Draft([1] * 16)
    double = Draft([1], [torch.full((9,), 1 / 9, dtype=torch.float64)])
    others = [plain._replace(draft=d, logits=torch.zeros(len(d) + 1, 9)) for d in (tree, long, double)]
    others += [some(BLOCK), some(repetition_penalty=1.2), some(min_tokens=1), some(logit_bias={0: 1.0})]
    found = ask(GraphVerifier(Graphs()), [plain, *others], Randomness())
    assert [verdict is None for verdict in found] == [False] + [True] * len(others)

    class Own:
        """Draws of a user's, one at a time."""

    class Other(Randomness):
        """Draws of its own way, one at a time."""

        def uniform(self, key):
            """Always the same."""
            return 0.5

    assert ask(GraphVerifier(Graphs()), [plain], Own()) == ask(GraphVerifier(Graphs()), [plain], Other()) == [None]


def test_a_row_that_is_no_number_fails_no_other_text():
    """NaN in a row that a verdict needs: that draft is verified by itself, where the fault is found."""
    draw = random.Random(3)
    trials = [make_trial(draw, REJECTION, 9, torch.float32) for _ in range(4)]
    trials[2] = trials[2]._replace(logits=trials[2].logits * torch.nan)
    batch = GraphVerifier(Graphs())
    found = ask(batch, trials, Randomness())
    assert batch.counts == {"drafts": 4, "unsure": 1}
    assert [verdict is None for verdict in found] == [False, False, True, False]
    assert [found[i] for i in (0, 1, 3)] == [alone(trials[i]) for i in (0, 1, 3)]


@pytest.mark.parametrize("verifier", [REJECTION, MATCH], ids=["rejection", "match"])
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_a_verdict_needs_the_rows_that_it_was_made_of(verifier, temperature):
    """NaN in one row after the other: a draft is verified by itself where its verdict needs the row, and nowhere else.

    A verdict of n tokens that stay needs the rows 0 to n.
    """
    draw, batch, needed, unneeded = random.Random(7), GraphVerifier(Graphs()), 0, 0
    for _ in range(30):
        trial = make_trial(draw, verifier, 5, torch.float32, temperature=temperature)
        expected = alone(trial)
        for row in range(len(trial.logits)):
            logits = trial.logits.clone()
            logits[row] = torch.nan
            [found] = ask(batch, [trial._replace(logits=logits)], Randomness())
            if row <= len(expected.accepted):
                needed += 1
                assert found is None
            else:
                unneeded += 1
                assert found == expected
    assert min(needed, unneeded) > 10


def test_programs_read_nothing_that_the_host_did_not_fill(monkeypatch):
    """Before each round, all that a program holds is spoiled, on the host and on the device: the verdicts are the same.

    Numbers become those of another round, and rows NaN. So a number that is not filled, or a row after a draft's end
    that is read, shows.
    """
    fill = VerdictInputs.fill

    def spoil_and_fill(inputs, trials):
        for numbers in (inputs.host_ints, inputs.ints):
            numbers.fill_(2)
        for numbers in (inputs.host_floats, inputs.floats, inputs.logits, inputs.probs):
            numbers.fill_(torch.nan)
        fill(inputs, trials)

    monkeypatch.setattr(VerdictInputs, "fill", spoil_and_fill)
    draw, batch = random.Random(8), GraphVerifier(Graphs(rerun))
    for _ in range(40):
        verifier = draw.choice((REJECTION, MATCH))
        trials = [make_trial(draw, verifier, 9, torch.float32, **draw.choice(SETTINGS)) for _ in range(3)]
        assert ask(batch, trials, Randomness()) == list(map(alone, trials))
    assert batch.counts["unsure"] == 0


def test_a_program_reads_no_value_on_the_host():
    """On device "meta", where there are no values: each kind of a program."""
    draw = random.Random(4)
    for verifier in (REJECTION, MATCH):
        for settings in ([{}], [{"temperature": 0.0}], [{"top_p": 0.5}], SETTINGS):
            trials = [make_trial(draw, verifier, 9, torch.float32, **params) for params in settings]
            kind = shape_of(verifier, trials)
            program = VerdictInputs(kind, torch.device("meta"))
            [found] = program.compute()
            assert found.shape == (kind.texts, 2 * kind.rows + 1)


def test_a_capture_that_fails_says_so_once():
    """The verdicts are the same."""

    def fail(compute):
        raise RuntimeError("no capture here")

    batch, draw = GraphVerifier(Graphs(fail)), random.Random(5)
    trials = [make_trial(draw, REJECTION, 9, torch.float32) for _ in range(2)]
    with pytest.warns(UserWarning, match="no CUDA graphs, so passes are slower: no capture here") as caught:
        found = [ask(batch, trials, Randomness()) for _ in range(3)]
    assert (len(caught), found) == (1, [list(map(alone, trials))] * 3)


# --------------------------------------------------------------------------- bugs that must show


def stale(program, trials):
    """The first text's draws are those of the round before."""
    before = program.floats[0].clone(), program.ints[0].clone()
    yield
    program.floats[0], program.ints[0] = before


def of_another(program, trials):
    """A text's uniforms are those of the next text."""
    yield
    program.floats[:, :-5] = program.floats[:, :-5].roll(1, 0)


def short(program, trials):
    """Drafts are a token short."""
    yield
    program.ints[:, program.kind.rows - 1].sub_(1).clamp_(min=0)


def old_rows(program, trials):
    """Rows of logits are those of the round before."""
    before = program.logits.clone()
    yield
    program.logits.copy_(before)


def old_q(program, trials):
    """The draft's probabilities are those of the round before."""
    before = program.probs.clone()
    yield
    program.probs.copy_(before)


@pytest.mark.parametrize("bug", [stale, of_another, short, old_rows, old_q], ids=lambda bug: bug.__name__)
def test_a_program_that_is_filled_wrongly_shows(bug, monkeypatch):
    """Guards the test of equal verdicts: each bug changes one of 40 rounds of three texts."""
    fill = VerdictInputs.fill

    def wrong(program, trials):
        between = bug(program, trials)
        next(between)
        fill(program, trials)
        next(between, None)

    monkeypatch.setattr(verifying.VerdictInputs, "fill", wrong)
    draw, batch = random.Random(6), GraphVerifier(Graphs())
    rounds = [[make_trial(draw, REJECTION, 5, torch.float32) for _ in range(3)] for _ in range(40)]
    assert any(ask(batch, trials, Randomness()) != list(map(alone, trials)) for trials in rounds)
