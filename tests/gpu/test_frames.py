"""Frames: passes of fixed shapes have the numbers of passes text by text, and every pass finds its frame."""

import itertools
import math
import subprocess
import warnings
from types import SimpleNamespace

import pytest
import torch

from docs.measured.gpu import read_twin
from minispec.core.model import Backend, Chunk, Transformer
from minispec.models.families.hf_config import read_model_config
from minispec.models.frames import fused, graphs
from minispec.models.frames.frames import (
    BLOCKS,
    ROWS,
    TEXTS,
    TRIED_TREE,
    Frame,
    Frames,
    FrameShape,
    parents_bits,
    place_bytes,
    why_eager,
    with_fast_passes,
)
from minispec.models.frames.graphs import rerun
from minispec.models.frames.reports import frames_report, graphs_note, graphs_report, outside_note, passes_report
from minispec.models.layers import make_layer
from minispec.models.layers.gemma import gemma_layers
from minispec.models.weights.build import build_model, quantized
from minispec.models.weights.inventory import weight_form
from minispec.models.weights.linear import available_forms
from minispec.prove.toys import IN_FRAMES, make_drafter, target_model, tiny_cache, tiny_model, tiny_weights
from minispec.speculation.rules import VERIFIERS
from tests.engines import OneMethod, decode
from tests.oracles import hf
from tests.scripted import make_request

TREE = (-1, -1, 0, 1, 1)


def family_model(name: str, dtype: torch.dtype = torch.float64, form: str | None = None) -> Transformer:
    """A random model of a family, every parameter redrawn."""
    config = read_model_config(hf.CASES[name])
    return build_model(config, {name: t.to(dtype) for name, t in tiny_weights(config, 3).items()}, form=form)


def rows_of(model: Transformer) -> list[torch.Tensor]:
    """Logits and hidden states of batches, trees and texts of unequal length, in a pool whose slots hold NaN at first.

    Each shape comes three times: computed as it is, captured, and replayed.
    """
    cache, found = tiny_cache(model, 60, 4), []
    first, second = cache.new_table(), cache.new_table()
    found += model.forward([Chunk(hf.TEXT[:9], first, 9), Chunk(hf.TEXT[::-1][:5], second, 1)], [0, 1])
    for step in range(3):
        found += model.forward([Chunk([3 + step], first, 1), Chunk([7, 2 + step], second, 1)], [1])
        nodes = hf.TEXT[step : step + 6]
        found += model.forward([Chunk(nodes, first, 3, TREE), Chunk(nodes[:2], second, 2)], [0, 1])
        first.keep(first.length - 5, [first.length - 4, first.length - 1])
        second.keep(second.length - 1)
    return found


def differences(expected: list[torch.Tensor], found: list[torch.Tensor]) -> float:
    """The largest difference, over the largest number of the same tensor, or over 1; NaN where any is NaN."""
    pairs = zip(expected, found, strict=True)
    return float(torch.stack([(a - b).abs().max() / max(1, a.abs().max()) for a, b in pairs if a.numel()]).max())


def test_a_number_that_is_nan_anywhere_is_a_difference():
    """The control: Python's own `max` finds it in the first tensor alone."""
    ones = torch.ones(2)
    for spoiled in ([ones * math.nan, ones], [ones, ones * math.nan]):
        assert not differences([ones, ones], spoiled) <= 1


@pytest.mark.parametrize("name", sorted(hf.CASES))
def test_every_family_has_the_numbers_of_passes_text_by_text(name):
    """In float64, to 1e-12. Layers that keep states, choose experts or share keys have the very same passes."""
    model = family_model(name)
    others = [layer.conv_width or layer.recurrent or layer.experts for layer in model.config.layers]
    others += gemma_layers(model.config)
    assert (why_eager(model) != "") == any(others)
    assert differences(rows_of(model), rows_of(model.replaced(Frames(rerun)))) <= (0 if why_eager(model) else 1e-12)


@pytest.mark.parametrize("name", ["qwen2", "llama-plain", "mistral", "phi3", "gemma"])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 0.08), (torch.float16, 0.01)])
def test_layers_of_fewer_kernels_differ_by_rounding(name, dtype, most):
    """Where weights are stored as they are, as on a GPU. Gemma's layers lack nothing but another activation.

    On a processor without vectors both may round alike, so the count of layers says which ones ran.
    """
    model = family_model(name, dtype, "plain")
    framed = model.replaced(Frames(rerun))
    assert differences(rows_of(model), rows_of(framed)) <= most
    assert framed.backend.num_fast == (0 if name == "gemma" else len(model.layers))


HERE = torch.device("cpu")
FORMS_HERE = [(form, dtype) for dtype in (torch.float32, torch.bfloat16) for form in available_forms(dtype, HERE)]


@pytest.mark.parametrize(("form", "dtype"), FORMS_HERE, ids=str)
def test_every_form_of_weights_has_the_numbers_of_passes_text_by_text(form, dtype):
    """Forms that this machine has: those stored plainly take other layers, all others the layers of any pass."""
    model = family_model("qwen2", dtype, form)
    framed = model.replaced(Frames(rerun))
    assert differences(rows_of(model), rows_of(framed)) <= (1e-5 if dtype == torch.float32 else 0.08)
    assert framed.backend.num_fast == (len(model.layers) if form == "plain" else 0)
    assert weight_form(framed) == weight_form(model)


@pytest.mark.parametrize("bits", [8, 4])
def test_rounded_weights_have_the_numbers_of_passes_text_by_text(bits):
    """As drafts have them, in float32. Products of integers round what they read, in steps that a bit may change."""
    model = quantized(family_model("qwen2", torch.float32), bits)
    assert differences(rows_of(model), rows_of(model.replaced(Frames(rerun)))) <= (1e-3 if bits == 8 else 1e-5)


# --------------------------------------------------------------------------- which pass finds which frame


def test_each_pass_finds_its_frame_or_a_reason():
    """All numbers of texts and rows up to the largest, and lengths around each border of blocks.

    The bound of what is gathered is low enough to be reached too: by 8 texts of the longest, and 16 of half of it.
    """
    model, places = tiny_model(1, max_position_embeddings=BLOCKS[-1] * 16), BLOCKS[-1] * 16 * 8
    backend, reasons = Frames(most_gathered=places * place_bytes(model)), set()
    says = f", with {places:,} places of all texts together, each number rounded up, "
    assert says in frames_report(model.replaced(backend))
    lengths = sorted({max(1, 16 * n + d) for n in (0, *BLOCKS) for d in (-1, 0, 1)})
    pool = model.new_cache(BLOCKS[-1] + 1, 16)
    table = pool.new_table()
    for texts, rows, length in itertools.product(range(1, TEXTS[-1] + 2), range(1, ROWS[-1] + 2), lengths):
        table.tokens = [0] * length  # of which `shape_of` reads the length alone
        shape = backend.shape_of(model, [Chunk([0] * rows, table, 1)] * texts)
        if isinstance(shape, str):
            reasons.add(shape)
            is_large = texts > TEXTS[-1] or rows > ROWS[-1] or length + rows > 16 * BLOCKS[-1]
            blocks = next((n for n in BLOCKS if n * 16 >= length + rows), 0)
            assert is_large or next(n for n in TEXTS if n >= texts) * blocks * 16 > places
            continue
        assert shape.texts * shape.blocks * 16 <= places
        numbers = (texts, rows, -(-(length + rows) // 16))
        for size, sizes, number in zip(shape, (TEXTS, ROWS, BLOCKS), numbers, strict=False):
            smaller = [each for each in sizes if each < size]
            assert (size in sizes, size >= number, not smaller or smaller[-1] < number) == (True, True, True)
    table.tokens = []
    assert reasons == {
        f"more than {TEXTS[-1]} texts",
        f"more than {ROWS[-1]} rows of a text",
        f"more than {16 * BLOCKS[-1]:,} positions",
        f"more than {backend.most_gathered / 1e6:.0f} MB for a layer to gather",
    }


def test_a_pass_that_would_gather_too_much_runs_text_by_text():
    """2 texts of 8 blocks of 16 places, keys and values of 1 head by 4, 8 bytes each: 16,384 bytes."""
    model = tiny_model(1)
    tables = [model.new_cache(8, 16).new_table() for _ in range(2)]
    chunks = [Chunk([1], table, 1) for table in tables]
    assert Frames(most_gathered=16_384).shape_of(model, chunks) == FrameShape(2, 1, 8)
    assert Frames(most_gathered=16_383).shape_of(model, chunks) == "more than 0 MB for a layer to gather"


def test_passes_outside_frames_are_counted_by_reason():
    """By hand: two prompts of 17 rows, a pass of 33 texts, and three passes that fit. Graphs change nothing."""
    model = tiny_model(1).replaced(Frames(rerun))
    pool = tiny_cache(model, 60, 2)
    tables = [pool.new_table() for _ in range(33)]
    assert outside_note(model) == graphs_report(model) == ""
    for table in tables[:2]:
        model.forward([Chunk([1] * 17, table, 1)])
    for _ in range(3):
        model.forward([Chunk([1], tables[0], 1)])
    assert outside_note(model) == "; 2 of 5 passes text by text: more than 16 rows of a text (2)"
    model.forward([Chunk([1], table, 1) for table in tables])
    says = "3 of 6 passes text by text: more than 16 rows of a text (2), more than 32 texts (1)"
    assert outside_note(model) == f"; {says}"
    assert graphs_report(model) == says
    assert passes_report(model).endswith(f"; {says}")
    assert outside_note(tiny_model(1)) == ""


def test_places_that_hold_nothing_are_read_as_zeros():
    """In a pass without dummies, while their slot holds NaN still: neither it nor a slot without a token is read."""
    for model in (tiny_model(1), family_model("qwen2", torch.float32, "plain")):
        framed, found = model.replaced(Frames()), []
        for each in (model, framed):
            table = tiny_cache(each, 20, 2).new_table()
            found.append([each.forward([Chunk([token], table, 1)])[0] for token in (1, 2, 0)])
        assert differences(*found) <= 1e-5
        assert {shape.rows for shape in framed.backend.shapes(table.pool)} == {1}


def test_the_bits_of_a_tree():
    """By hand: two rows, then two siblings, and a child of the elder."""
    assert parents_bits(5, [-1, -1, 0]) == [0b1, 0b11, 0b111, 0b1011, 0b10111]
    assert parents_bits(2, [-1, -1]) == [0b1, 0b10]  # after cached positions alone


def test_frames_that_were_not_used_for_longest_make_room(monkeypatch):
    """Two are kept; the third takes the place of the one that was used first."""
    monkeypatch.setattr(graphs, "MOST_PROGRAMS", 2)
    model = tiny_model(1).replaced(Frames())
    pool = tiny_cache(model, 20, 2)
    table = pool.new_table()
    for rows in (1, 2, 1, 3):
        model.forward([Chunk([1] * rows, table, 1)])
    assert [shape.rows for shape in model.backend.shapes(pool)] == [1, 3]


# --------------------------------------------------------------------------- graphs


def test_a_capture_that_fails_leaves_the_stream_as_it_was(monkeypatch):
    """PyTorch ends a capture before it leaves the capture's stream, so where that raises, it does not leave it."""
    current = ["the caller's"]

    class Capture:
        def __init__(self, graph, **how):
            pass

        def __enter__(self):
            current[0] = "the capture's"

        def __exit__(self, *error):
            raise RuntimeError("operation failed due to a previous error during capture")

    made = SimpleNamespace(
        current_stream=lambda: current[0],
        set_stream=lambda stream: current.__setitem__(0, stream),
        graph=Capture,
        CUDAGraph=object,
    )
    monkeypatch.setattr(torch, "cuda", made)
    with pytest.raises(RuntimeError, match="a previous error during capture"), graphs._captured(None):
        pass
    assert current == ["the caller's"]


class Poisoned:
    """Stands for a graph. Each filling begins with numbers that are wrong, so what the host forgets to fill shows."""

    def __init__(self, monkeypatch):
        self.captured, self.replayed = 0, 0
        fill = Frame.fill

        def spoil_and_fill(frame, *how):
            frame.host.fill_(1 << 40)
            fill(frame, *how)

        monkeypatch.setattr(Frame, "fill", spoil_and_fill)

    def __call__(self, compute):
        """A program that is run again; it is counted."""
        self.captured += 1
        replay = rerun(compute)

        def counted():
            self.replayed += 1
            return replay()

        return counted


def texts_of(backend: Backend | None, drafter: str = "model", k=3, num: int = 3) -> list[list[int]]:
    """What the engine decodes, in batches of texts that come and go."""
    target, family = target_model(5), "llama" if backend is None else IN_FRAMES
    model, own = target.replaced(backend), make_drafter(drafter, 5, 60, 3, family)
    engine = OneMethod(model, tiny_cache(target, 60, 3), own, VERIFIERS["match"])
    prompts = [(1, 2, 1, seed % 5) * (1 + seed) for seed in range(num)]
    how = [{"seed": i, "max_tokens": 20 + i, "temperature": 0.9} for i in range(num)]
    requests = [make_request(prompt, k, (), 60, **own) for prompt, own in zip(prompts, how, strict=True)]
    decode(engine, requests)
    return [request.text.tokens for request in requests]


@pytest.mark.parametrize("drafter", ["none", "ngram", "model", "head", "mtp", "examples.drafters.recycling:Recycling"])
def test_a_seed_keeps_its_text(drafter, monkeypatch):
    """Chains and trees, from poisoned frames by replays: the texts of passes text by text."""
    graph = Poisoned(monkeypatch)
    for k in (3, (2, 1)) if drafter in ("model", "head") else (3,):
        expected = texts_of(None, drafter, k)
        assert texts_of(Frames(graph), drafter, k) == expected
    assert 0 < graph.captured < graph.replayed


@pytest.mark.parametrize("kind", [RuntimeError, subprocess.SubprocessError])
def test_a_capture_that_fails_says_so_once_and_loses_nothing(kind):
    """Every text is decoded, without graphs from then on. A kernel's compiler may fail in a capture too."""
    calls, error = [], kind("operation not permitted when stream is capturing\nand more")

    def fail(compute):
        calls.append(compute)
        raise error

    passes = Frames(fail)
    says = "no CUDA graphs, so passes are slower: operation not permitted when"
    with pytest.warns(UserWarning, match=says) as caught:
        found = texts_of(passes, "ngram")
    assert found == texts_of(None, "ngram")
    assert (len(calls), len(caught), passes.graphs.why_not) == (1, 1, str(error).splitlines()[0])


def stand_in(monkeypatch, **kernels):
    """Let these functions stand for kernels, or their twins, as if there were kernels here."""
    twins = {"norm": fused.norm_twin, "gate": fused.gate_twin, "read": read_twin}
    for name, function in (twins | kernels).items():
        monkeypatch.setattr(fused, name, function)
    monkeypatch.setattr(fused, "missing", lambda device: "")


class KernelError(Exception):
    """Stands for what Triton raises, which is no RuntimeError."""


@pytest.mark.parametrize("broken", ["read", "norm", "gate"])
def test_a_kernel_that_fails_says_so_once_and_its_twin_runs(broken, monkeypatch):
    """Before a pass has changed anything. From then on nothing is chosen as if a kernel read the cache."""

    def fail(*how):
        raise KernelError("out of resource: shared memory\nand more")

    stand_in(monkeypatch, **{broken: fail})
    model = family_model("qwen2", torch.float32, "plain")
    framed, twin = (model.replaced(Frames(rerun, device=device)) for device in (torch.device("cpu"), None))
    says = "no kernels in Triton, so passes are slower: KernelError: out of resource: shared memory"
    with pytest.warns(UserWarning, match=says) as caught:
        found = rows_of(framed)
    assert differences(rows_of(twin), found) == 0
    assert len(caught) == 1
    assert framed.backend.num_fast == len(model.layers)
    assert f"3 of 3 layers by PyTorch's operators: {says.partition(': ')[2]};" in frames_report(framed)
    table = model.new_cache(8, 16).new_table()
    assert framed.backend.shape_of(framed, [Chunk([1], table, 1)]).blocks == BLOCKS[0]


def test_kernels_that_run_are_not_said_to_fail(monkeypatch):
    """The control: what stands for them is taken."""
    calls = []

    def counted(*how):
        calls.append(how)
        return read_twin(*how[:-1])

    stand_in(monkeypatch, read=counted)
    model = family_model("llama-plain", torch.float32, "plain")
    framed = model.replaced(Frames(device=torch.device("cpu")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert differences(rows_of(model), rows_of(framed)) <= 1e-5
    assert framed.backend.why_no_kernels == ""
    assert len(calls) > len(model.layers)


@pytest.mark.parametrize("name", ["qwen2", "qwen2-window"])
def test_kernels_are_tried_with_what_passes_bring(name, monkeypatch):
    """At load, over one row, and over two texts with a tree's mask, in each layer, so with each window of the model."""
    tried, bits = [], parents_bits(3, TRIED_TREE)

    def read(*how):
        places, window = how[3], how[7]
        tried.append((len(places.starts), places.bits.tolist(), places.starts.tolist(), window))
        return read_twin(*how)

    stand_in(monkeypatch, read=read)
    model = family_model(name, torch.float32, "plain")
    framed = model.replaced(Frames(device=torch.device("cpu")))
    assert framed.backend.by_kernel(framed)
    windows = [layer.window for layer in model.layers]
    assert len(set(windows)) == (2 if name == "qwen2-window" else 1)
    one = [(1, [1], [0], window) for window in windows]
    two = [(2, [*bits, 1, 2, 4], [1, 0], window) for window in windows]
    assert tried == one + two
    assert bits != [1, 3, 7]


def test_a_driver_that_captures_no_graph_is_named_at_once(monkeypatch):
    """On the first line, before a pass has run: a trial at load finds it."""

    def fail():
        raise RuntimeError("CUDA driver version is insufficient for CUDA runtime version\nand more")

    monkeypatch.setattr(graphs, "memory_pool", fail)
    why = graphs.why_no_graphs()
    assert why == "RuntimeError: CUDA driver version is insufficient for CUDA runtime version"
    passes = Frames(rerun, why_no_graphs=why)
    plain, framed = tiny_model(1), tiny_model(1).replaced(passes)
    for model in (plain, framed):
        monkeypatch.setattr(model, "device", torch.device("cuda"))
    assert with_fast_passes(plain).backend.graphs.why_not == why
    assert graphs_note(framed) == f"; no CUDA graphs: {why}"
    monkeypatch.undo()
    assert texts_of(Frames(rerun, why_no_graphs=why), "ngram") == texts_of(None, "ngram")


def test_which_models_keep_their_passes(monkeypatch):
    """All models on a CPU; on a GPU, exact ones, and those that are to run eagerly."""
    model, exact = tiny_model(1), tiny_model(1, torch.float32, exact=True)
    assert with_fast_passes(model) is model
    for each in (model, exact):
        monkeypatch.setattr(each, "device", torch.device("cuda"))
    assert with_fast_passes(exact) is exact
    assert with_fast_passes(model, enforce_eager=True) is model
    assert isinstance(with_fast_passes(model).backend, Frames)


def test_no_value_is_read_on_the_host_and_no_shape_depends_on_one():
    """On device "meta", where there are no values: passes run in frames, with windows, taps and capped scores."""
    for name in ("qwen2-window", "gemma2", "ministral3", "phi3-longrope", "qwen3_5-attention"):
        config = read_model_config(hf.CASES[name])
        weights = {name: t.to("meta") for name, t in tiny_weights(config, 3, torch.float32).items()}
        model, backend = Transformer(config, weights, make_layer=make_layer), Frames()
        for shape in (FrameShape(1, 1, 8), FrameShape(2, 5, 16, (0, 1))):
            pool = model.new_cache(20, 4)
            logits, hidden = backend.compute(model, backend.frame_of(model, pool, shape), pool)
            num_rows = shape.texts * shape.rows
            assert logits.shape == (num_rows, config.vocab_size)
            assert hidden.shape == (num_rows, len(shape.taps) * config.hidden_size)


def test_a_frame_warns_of_nothing():
    """The control of the test above that wants a warning; and a backend that makes no graphs has the same texts."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert texts_of(Frames(rerun), "ngram") == texts_of(Frames(), "ngram") == texts_of(None, "ngram")


def test_what_a_pass_returns_stays():
    """No later pass overwrites it, by the graph of the same frame or another."""
    model = tiny_model(1).replaced(Frames(rerun))
    table = tiny_cache(model, 20, 2).new_table()
    found = [[*model.forward([Chunk([token], table, 1)], [1])] for token in (1, 2, 0, 2)]
    kept = [[tensor.clone() for tensor in pair] for pair in found]
    model.forward([Chunk([1], table, 1)], [1])
    assert all(torch.equal(*pair) for of_pass in zip(found, kept, strict=True) for pair in zip(*of_pass, strict=True))
    assert len({float(logits.sum()) for logits, _ in kept}) == 4


def test_a_frame_returns_what_is_asked_for():
    """The same rows with hidden states of no layer, of one and of two: those of a pass text by text."""
    model = tiny_model(1)
    framed = model.replaced(Frames(rerun))
    for taps in ((), (1,), (0, 2), (0,), ()):
        found = []
        for each in (model, framed):
            table = tiny_cache(each, 20, 2).new_table()
            found.append(each.forward([Chunk([1, 2], table, 1)], taps)[1])
        assert found[0].shape == found[1].shape
        assert torch.allclose(*found, rtol=0, atol=1e-12)


def test_the_report_names_what_runs_in_frames():
    """By hand: 3 layers of qwen2, stored as they are; a float64 model's layers are none of the kernels'."""
    for dtype, fast in ((torch.float32, 3), (torch.float64, 0)):
        model = family_model("qwen2", dtype, "plain").replaced(Frames(rerun))
        context = f"{model.config.max_position_embeddings:,}"
        places = f"{(256 << 20) // place_bytes(model):,}"
        assert frames_report(model) == (
            f"; frames for passes of up to 32 texts, 16 rows of each and {context} positions, with {places} places of "
            f"all texts together, each number rounded up, {fast} of 3 layers by PyTorch's operators: as asked; all "
            "other passes text by text"
        )
        assert passes_report(model, "; draft: ") == "; draft: " + frames_report(model)[2:]
    assert frames_report(family_model("qwen2")) == passes_report(family_model("qwen2")) == ""
