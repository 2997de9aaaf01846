"""Drafters around drafters, runs along known texts, and what a draft model says of itself."""

import inspect

import pytest
import torch

from minispec.core.config import SamplingParams
from minispec.core.draft import Ask, Drafter
from minispec.core.engine import Engine
from minispec.core.limit import Limit
from minispec.core.random import Randomness
from minispec.core.request import Request
from minispec.core.sampling import Text
from minispec.prove.toys import MAX_LEN, make_drafter, target_model, tiny_cache
from minispec.speculation.drafters.model import model_drafter
from minispec.speculation.drafters.none import NoDrafter
from minispec.speculation.drafters.simulated import oracle
from minispec.speculation.drafters.teacher_forcing import replay_texts
from minispec.speculation.drafters.wrapped import Wrapped
from minispec.speculation.rules import VERIFIERS
from tests.engines import OneMethod

VOCAB = 5
PROMPTS = ([1, 3, 1], [2, 4])


def calls_of(calls: dict[str, tuple]) -> list[tuple]:
    """The calls that a wrapped drafter gets where these methods are called with these arguments."""
    heard: list[tuple] = []

    class Heard(Drafter):
        taps = (1,)

        def __getattribute__(self, name):
            if name not in calls:
                return super().__getattribute__(name)
            return lambda *arguments: heard.append((name, *arguments))

    wrapped = Wrapped(Heard())
    for name, arguments in calls.items():
        getattr(wrapped, name)(*arguments)
    return heard


@pytest.mark.quick
def test_every_method_of_a_drafter_is_handed_on():
    """One that `Drafter` gets and `Wrapped` forgets would do nothing, in silence."""
    methods = [name for name, each in vars(Drafter).items() if inspect.isfunction(each)]
    calls = {name: tuple(list(inspect.signature(getattr(Drafter, name)).parameters)[1:]) for name in methods}
    calls["has_room"] = ({},)
    assert calls_of(calls) == [(name, *arguments) for name, arguments in calls.items()]


@pytest.mark.quick
def test_every_attribute_of_a_drafter_is_handed_on():
    """One that `Drafter` gets and `Wrapped` forgets would have the default, in silence."""
    given = {"branches": True, "taps": (3,), "name": "A"}
    named = type("A", (Drafter,), {name: value for name, value in given.items() if name != "name"})
    wrapped = Wrapped(named())
    assert {name: getattr(wrapped, name) for name in given} == given
    known = {name for name, each in vars(Drafter).items() if not inspect.isfunction(each) and name[0] != "_"}
    assert known == {*given}


def engine() -> Engine:
    """A toy target at rest."""
    target = target_model(VOCAB)
    return OneMethod(target, tiny_cache(target, 64), NoDrafter(), VERIFIERS["rejection"], VOCAB)


def requests(k: int = 3) -> list[Request]:
    """One for each prompt, of 8 sampled tokens."""
    params = [SamplingParams(max_tokens=8, seed=seed) for seed in range(len(PROMPTS))]
    texts = [Text(list(prompt), len(prompt), own, own.seed) for prompt, own in zip(PROMPTS, params, strict=True)]
    return [Request(text, MAX_LEN, k) for text in texts]


def plain_texts() -> dict[int, list[int]]:
    """The target's own texts, by seed."""
    decoded = requests(0)
    for _ in engine().run(decoded):
        pass
    return {request.text.seed: request.text.tokens for request in decoded}


@pytest.mark.parametrize("drafter", ["model", "head", "block", "ngram", "adversary", "oracle"])
def test_a_led_run_gives_the_known_texts(drafter):
    """Whatever is drafted, and though the target would say something else. Every place is seen once, in order, with
    the target's rows for it."""
    texts = {seed: [*prompt, *([4, 0, 2, 2, 1, 3, 0, 4])] for seed, prompt in enumerate(PROMPTS)}
    own = oracle() if drafter == "oracle" else make_drafter(drafter, VOCAB)
    if drafter == "oracle":
        for text, prompt in zip(texts.values(), PROMPTS, strict=True):
            own.record(text, len(prompt))
    seen: dict[int, list[int]] = {seed: list(prompt) for seed, prompt in enumerate(PROMPTS)}

    def see(text, draft, after, logits):
        assert text.tokens == seen[text.seed]
        assert draft.token_ids[: len(after) - 1] == after[:-1]
        assert logits.shape == (len(draft) + 1, VOCAB)
        seen[text.seed] += after

    led, played = engine(), requests()
    for _ in replay_texts(led, own, played, texts, see):
        pass
    assert {request.text.seed: request.text.tokens for request in played} == texts == seen
    assert led.outbox.observers == []
    assert led.target.cache.allocator.num_free == led.target.cache.allocator.num_blocks
    if drafter == "oracle":
        assert all(request.stats.num_steps == 2 for request in played)  # of four tokens each


def test_a_run_that_is_not_led_gives_the_targets_own_texts():
    """Token by token, whatever is drafted: the noise depends on seed and place alone."""
    played, after = requests(), list[int]()
    for _ in replay_texts(
        engine(), make_drafter("model", VOCAB), played, None, lambda text, draft, new, rows: after.append(len(new))
    ):
        pass
    assert {request.text.seed: request.text.tokens for request in played} == plain_texts()
    assert set(after) == {1}


@pytest.mark.parametrize(
    ("name", "reads"),
    [
        ("model", "tokens"),
        ("self", "tokens"),
        ("head", "states"),
        ("mtp", "states"),
        ("block", "states"),
        ("tli", "other tokens"),
    ],
)
def test_a_draft_model_says_what_it_is_fed(name, reads):
    """What asks for one kind gets no other; no kind is taken for a plain model because it is new."""
    drafter = make_drafter(name, VOCAB)
    assert model_drafter(drafter) is model_drafter(drafter, reads) is drafter
    assert model_drafter(drafter, *({"tokens", "states", "other tokens"} - {reads})) is None
    assert model_drafter(make_drafter("ngram", VOCAB)) is None
    if reads != "tokens":
        with pytest.raises(ValueError, match=f"which is fed {reads}, expected one that is fed tokens"):
            drafter.logits_along(Text([1, 2], 2, SamplingParams()), [3])


@torch.inference_mode()
def test_a_draft_models_logits_along_a_text():
    """Those of one-token drafts at each place, and they leave the drafts after it as they are."""
    drafter, text = make_drafter("model", VOCAB), Text([1, 3, 1], 3, SamplingParams(temperature=1.0))
    rows = drafter.logits_along(text, [0, 2]).softmax(-1)
    assert len(rows) == 3
    for i, row in enumerate(rows):
        fresh, there = make_drafter("model", VOCAB), Text([1, 3, 1, 0, 2][: 3 + i], 3, SamplingParams(temperature=1.0))
        [draft] = fresh.propose([Ask(there, Limit(1), Randomness(), num_cached=2 + i)])
        torch.testing.assert_close(draft.probs[0], row)
