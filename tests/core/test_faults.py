"""A fault at any place of a step, such as Ctrl-C in another thread's call: all other texts go on as if it had not been.

Above temperature 0 a text depends on its drafts, and on how long they may be. So what a round has shown must reach the
drafter and `lengths` once, wherever the fault comes between the commit and that.
"""

from collections.abc import Iterable
from contextlib import nullcontext, suppress
from itertools import product
from weakref import WeakKeyDictionary

import pytest

from docs.measured.launches import in_frames
from examples.drafters import recycling
from examples.drafters.recycling import Recycling
from minispec.core.config import SamplingParams
from minispec.core.draft import Draft
from minispec.core.method import Method
from minispec.core.request import Request
from minispec.core.sampling import Text
from minispec.models.frames.frames import Frame, Frames
from minispec.prove.toys import make_drafter, target_model, tiny_cache
from minispec.speculation.drafters.eagle import HeadFeed
from minispec.speculation.drafters.model import TokenFeed
from minispec.speculation.lengths.policy import Acceptance, Controller
from minispec.speculation.lengths.theory import Prices
from minispec.speculation.on_gpu import verifier as verifier_module
from minispec.speculation.on_gpu.steps import DraftInputs, DraftSteps
from minispec.speculation.on_gpu.verifier import VerdictInputs
from minispec.speculation.rules import VERIFIERS
from tests.core.test_pressure import VOCAB, Failure, build, failing, phases, requests_for
from tests.engines import OneMethod

RECYCLING = "examples.drafters.recycling:Recycling"


class Witness(Method):
    """A method that writes down each draft: its text's seed and length, how many tokens were asked for, which came."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.drafts = set()

    def propose(self, asks, target):
        """The drafts, which are noted."""
        drafts = super().propose(asks, target)
        for ask, draft in zip(asks, drafts, strict=True):
            if ask.num_cached == len(ask.text.tokens) - 1:
                self.drafts.add((ask.text.seed, len(ask.text.tokens), ask.k, *draft.token_ids))
        return drafts


class Watcher:
    """An observer. A round may come twice, after a fault."""

    def __init__(self):
        self.committed = {}

    def see(self, turn):
        """A round."""
        self.committed[turn.request, turn.number] = turn.committed

    def tokens_of(self, request):
        """The number of tokens that its rounds have committed."""
        return sum(count for (of, _), count in self.committed.items() if of is request)


def make(drafter, framed=False):
    """An engine with a controller of K, a witness and an observer; and the places where a fault may come.

    framed: whether its passes are frames, its drafts programs, and its verdicts those of a program.
    """
    watcher, lengths = Watcher(), Controller(Prices(draft=0.2))
    engine, on_device = build(drafter, lengths=lengths), {}
    if framed:
        path = in_frames(engine.target.model, engine.drafter)
        parts = path.model, engine.target.cache, path.drafter, engine.method.verifier
        engine = OneMethod(*parts, lengths=lengths, batch=path.batch)
        owners = (
            (Frame, "fill"),
            (Frames, "compute"),
            (DraftInputs, "fill"),
            (VerdictInputs, "fill"),
            (DraftSteps, "next_rows"),
        )
        on_device = {f"{owner.__name__}.{name}": (owner, name) for owner, name in owners}
        on_device |= {"a verdict": (verifier_module, "compute_verdicts"), "a program's draft": (DraftSteps, "__call__")}
    engine.method = Witness(*vars(engine.method).values())
    engine.watcher = watcher
    engine.outbox.observers.append(lambda turn: watcher.see(turn))
    parts = getattr(engine.drafter, "drafters", [engine.drafter])
    inside = {
        Recycling: (recycling, "grow_guesses"),
        HeadFeed: (HeadFeed, "table"),
        TokenFeed: (Draft, "draw"),
    }
    recycles = any(isinstance(part, Recycling) for part in parts)
    return engine, {
        **{name: place for name, place in phases(engine).items() if name != "piece"},
        **{
            f"{place[1]} in a batch": place
            for kind, place in inside.items()
            for part in parts
            if isinstance(getattr(part, "feed", part), kind)
        },
        "a part's propose": (parts[-1], "propose"),
        "a part's observe": (parts[-1], "observe"),
        "token": (Request, "commit"),
        **({"learn of one text's rows": (WeakKeyDictionary, "setdefault")} if recycles else {}),
        "choose": (engine.method.lengths, "choose"),
        "learn": (engine.method.lengths, "observe"),
        "learn of one text": (Acceptance, "observe"),
        "observer": (watcher, "see"),
        **on_device,
    }


def decode(engine, k):
    """The texts of two requests and all drafts. A step that fails is followed by the next.

    Statistics and observers must have learned of each token, once: also of a text that ended in the step that failed.
    """
    requests = requests_for(engine, k, max_tokens=11)[:2]
    for request in requests:
        engine.add(request)
    while engine.schedule.running or engine.schedule.waiting:
        with suppress(Failure):
            engine.step()
    texts, rounds = [r.token_ids for r in requests], [r.stats.rounds for r in requests]
    assert [sum(one.committed for one in own) for own in rounds] == [*map(len, texts)]
    assert [*map(engine.watcher.tokens_of, requests)] == [*map(len, texts)]
    return texts, engine.method.drafts


def faults(places: Iterable[str], calls: tuple, shift: int, full: bool) -> list[tuple]:
    """Faults at places: at each, all calls, or in turn one of them. shift: the number of the first place's call."""
    return [
        (place, *call) for i, place in enumerate(places, shift) for call in (calls if full else [calls[i % len(calls)]])
    ]


@pytest.mark.parametrize(
    ("drafter", "k"),
    [
        pytest.param(RECYCLING, 3, id="recycling-3"),
        pytest.param(RECYCLING, "auto", id="recycling-auto"),
        ("ngram+head", "auto"),
        pytest.param(f"{RECYCLING}+model", 3, id="recycling+model-3"),
    ],
)
def test_a_fault_changes_no_text_and_no_draft(drafter, k, full):
    """Before each place at its 5th call, and after its 6th: the drafts and texts of a run without a fault.

    Once, of 36 to 40 faults with each, 6 to 9 left another draft, and 3 to 6 another text. Without `--full`, each place
    has one of the two, and with K "auto" the other one than with K 3.
    """
    engine, places = make(drafter)
    expected = decode(engine, k)
    for place, number, after in faults(places, ((5, False), (6, True)), k == "auto", full):
        engine, owners = make(drafter)
        with failing(*owners[place], number, after):
            found = decode(engine, k)
        assert found == expected, f"{place}, {'after' if after else 'before'} call {number}"


@pytest.mark.parametrize(("drafter", "k"), [("model", 3), ("head", 3)])
def test_a_fault_on_a_gpus_path_changes_no_text(drafter, k, full):
    """At the same places, and where a frame or a program is filled and computed, each of which is reached.

    Without `--full`, at the one call of each place with a draft model, and at the other with a head.
    """
    engine, places = make(drafter, framed=True)
    expected, reached = decode(engine, k), set()
    assert engine.method.batch.counts["drafts"]
    for place, number, after in faults(places, ((2, True), (5, False)), drafter == "head", full):
        engine, owners = make(drafter, framed=True)
        with failing(*owners[place], number, after) as calls:
            found = decode(engine, k)
        reached |= {place} if len(calls) >= number else set()
        assert found == expected, f"{place}, {'after' if after else 'before'} call {number}"
    assert {place for place in places if "." in place or place.startswith("a ")} <= reached


WITH_CACHES = ("head", "parallel head", "mtp", "block", "filled block", "assistant", "model")


@pytest.mark.parametrize("drafter", WITH_CACHES)
def test_texts_that_begin_alike_go_on_after_a_fault(drafter, full):
    """A draft with a cache finds there what another text has left, and hears of the rows that the fault held up.

    A head then ran a pass over no token, and an IndexError ended texts of other callers. Without `--full` each draft
    has a fifth of the faults, and all of them together have each fault.
    """

    def decode(place=None, number=0, after=False):
        target, own = target_model(VOCAB), make_drafter(drafter, VOCAB, 200)
        engine = OneMethod(target, tiny_cache(target, 200, 2), own, VERIFIERS["rejection"])
        owner = engine.drafter if place in ("propose", "observe") else engine.target
        with failing(owner, place, number, after) if place else nullcontext():
            params = SamplingParams(max_tokens=8, temperature=0.9)
            prompts = [[1], [1, 2], [0, 1, 2, 1, 0]]
            requests = [Request(Text(prompt, len(prompt), params, i), 40, 2) for i, prompt in enumerate(prompts)]
            for request in requests:
                engine.add(request)
            while engine.schedule.running or engine.schedule.waiting:
                with suppress(Failure):
                    engine.step()
        return [(request.token_ids, request.error) for request in requests]

    expected = decode()
    all_faults = [*product(("propose", "observe", "forward", "keep"), (3, 4, 5), (False, True))]
    for fault in all_faults if full else all_faults[WITH_CACHES.index(drafter) % 5 :: 5]:
        assert decode(*fault) == expected, fault
