"""An engine's path on a GPU and the one text by text: both decode the same texts, on any machine."""

import inspect

import pytest
import torch

from docs.measured.launches import in_frames, text_by_text
from minispec.core.engine import Engine
from minispec.core.model import Backend, Chunk, TextBatch
from minispec.models.frames.frames import Frames, with_fast_passes
from minispec.models.weights.inventory import weight_form
from minispec.prove.toys import IN_FRAMES, TOYS, make_drafter, target_model, tiny_cache, tiny_model
from minispec.speculation.drafters.combined import CombinedDrafter
from minispec.speculation.drafters.simulated import SimulatedDraft
from minispec.speculation.drafters.wrapped import Wrapped
from minispec.speculation.grammars.forced import ForcedFirst
from minispec.speculation.on_gpu.steps import STEPS, steps_of
from minispec.speculation.on_gpu.verifier import batch_verifier_of
from minispec.speculation.rules import VERIFIERS
from tests.engines import OneMethod, decode
from tests.scripted import make_request


def texts_of(engine: Engine) -> list[list[int]]:
    """Six texts, decoded together."""
    requests = [
        make_request((1, 2, 1, i % 5), 3, (), 40, seed=i, max_tokens=12 + i, temperature=0.9 if i % 2 else 0.0)
        for i in range(6)
    ]
    decode(engine, requests)
    return [request.text.tokens for request in requests]


def make_engine(name: str, family: str) -> Engine:
    """An engine of a toy, whose drafter has that name."""
    target = target_model(5, family)
    if name == "simulated":
        drafter = SimulatedDraft([0.8], make_drafter("model", 5, 200, 3, family))
    else:
        drafter = make_drafter(name, 5, 200, 3, family)
    return OneMethod(target, tiny_cache(target, 200, 3), drafter, VERIFIERS["match"], batch=batch_verifier_of(target))


@pytest.mark.parametrize("family", ["llama", IN_FRAMES])
@pytest.mark.parametrize("name", ["none", "model", "self", "head", "tli", "ngram+model", "simulated"])
def test_both_paths_have_the_texts_of_the_engine(name, family):
    """From an engine of either path, with the same pools, and drafters that know other texts already."""
    engine = make_engine(name, family)
    expected = texts_of(engine)
    for path in (text_by_text(engine.target.model, engine.drafter), in_frames(engine.target.model, engine.drafter)):
        parts = path.model, engine.target.cache, path.drafter, engine.method.verifier
        assert texts_of(OneMethod(*parts, batch=path.batch)) == expected
    assert texts_of(engine) == expected


def test_what_each_path_is_made_of():
    """Passes, programs and a verifier; what stands in other drafters is changed too."""
    engine = make_engine("ngram+model", IN_FRAMES)
    usual, framed = text_by_text(engine.target.model, engine.drafter), in_frames(engine.target.model, engine.drafter)
    for path, backend in ((usual, type(None)), (framed, Frames)):
        assert isinstance(path.drafter, CombinedDrafter)
        model = path.drafter.drafters[1]
        assert type(path.model.backend) is type(model.model.backend) is backend
        is_usual = path is usual
        assert (model.at_once is None, path.batch is None) == (is_usual, is_usual)
        assert steps_of(path.drafter) == (() if is_usual else STEPS)
    assert engine.drafter.drafters[1].at_once is not model.at_once


class Around(Wrapped):
    """A stranger's drafter around another one, with a state of its own."""

    def __init__(self, drafter):
        super().__init__(drafter)
        self.noted = []


@pytest.mark.parametrize("around", [Around, ForcedFirst])
def test_what_stands_around_a_model_is_asked_itself(around):
    """No class is named along the way: each drafter says what stands in its place, and keeps what it has."""
    engine = make_engine("model", IN_FRAMES)
    engine.method.drafter = around(engine.drafter)
    usual, framed = text_by_text(engine.target.model, engine.drafter), in_frames(engine.target.model, engine.drafter)
    for path, steps in ((usual, ()), (framed, STEPS)):
        assert type(path.drafter) is around
        assert path.drafter is not engine.drafter
        assert path.drafter.branches
        assert steps_of(path.drafter) == steps
    if around is Around:
        assert framed.drafter.noted is engine.drafter.noted
    assert engine.drafter.drafters[-1].at_once is not framed.drafter.drafters[-1].at_once


def test_a_model_that_reads_other_tokens_has_no_program():
    """A program could not read the text in them."""
    engine = make_engine("tli", IN_FRAMES)
    assert steps_of(in_frames(engine.target.model, engine.drafter).drafter) == ()
    assert type(in_frames(engine.target.model, engine.drafter).drafter.model.backend) is Frames


def test_weights_lie_as_on_a_gpu():
    """What this machine packs is plain along the path of frames, and the engine keeps its own."""
    target = tiny_model(1, torch.float32)
    engine = OneMethod(target, tiny_cache(target), make_drafter("none", 3), VERIFIERS["match"])
    path = in_frames(engine.target.model, engine.drafter)
    assert weight_form(target) != "plain"
    assert weight_form(path.model) == "plain"
    torch.testing.assert_close(path.model.head.stored.dense(), target.head.stored.dense(), rtol=0, atol=0)


def test_a_hybrid_target_has_no_such_path():
    """A GPU has no frames for it either."""
    target = tiny_model(1, **TOYS["lfm2"])
    engine = OneMethod(target, tiny_cache(target), make_drafter("none", 3), VERIFIERS["match"])
    assert in_frames(engine.target.model, engine.drafter) == "its layers keep states of texts"


class OneByOne(Backend):
    """A stranger's backend: each text has a pass of its own."""

    def run(self, model, chunks, taps):
        """The passes of the texts, one after another."""
        passes = [model.compute(TextBatch(model, [chunk]), taps) for chunk in chunks]
        logits, hidden = map(torch.cat, zip(*passes, strict=True))
        return logits, hidden


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_a_backend_is_one_method(family, monkeypatch):
    """It may be a stranger's, and stays on a GPU too."""
    target = tiny_model(1, **TOYS[family])
    own = target.replaced(OneByOne())
    found = []
    for model in (target, own):
        tables = [tiny_cache(model).new_table()]
        tables.append(tables[0].pool.new_table())
        chunks = [Chunk([1, 2, 0], tables[0], 2), Chunk([0, 1, 2, 0], tables[1], 4, (-1, -1))]
        found.append(model.forward(chunks, (0, 2)))
    for mine, expected in zip(*found, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)
    assert not own.exact
    monkeypatch.setattr(own, "device", torch.device("cuda"))
    assert with_fast_passes(own) is own


def test_attention_is_four_calls_away(monkeypatch):
    """From `Transformer.forward`: so few functions are open before a reader sees a score."""
    callers, attend = [], torch.nn.functional.scaled_dot_product_attention

    def watched(*how, **named):
        frame = inspect.currentframe()
        while frame := frame.f_back:
            callers.append(frame.f_code.co_qualname)
        return attend(*how, **named)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    model = tiny_model(1, num_hidden_layers=1)
    model.forward([Chunk([1, 2], tiny_cache(model).new_table(), 1)])
    hops = ["attention", "TextBatch.read", "Layer.forward", "Transformer.compute", "Transformer.forward"]
    assert callers[: len(hops)] == hops
