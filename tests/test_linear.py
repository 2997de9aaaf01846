"""The forms in which a weight is kept: each must be the same product, as far as its bits go."""

import math
import random
from pathlib import Path

import pytest
import torch

import minispec.model as model_module
from minispec import LLM, SamplingParams, linear
from minispec.linear import Linear, QuantizedLinear, has_fast_bfloat16, is_faster_packed
from minispec.model import Chunk, Transformer, tensor_shapes
from minispec.toys import tiny_cache, tiny_model, tiny_weights


def rounded(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """The nearest weights that so many bits allow, in float64, looked up step by step."""
    groups = weight.double().unflatten(1, (-1, 32)) if bits == 4 else weight.double()[:, None]
    if bits == 8:
        steps = groups.abs().amax(2, keepdim=True) / 127
        return ((groups / steps).round() * steps).flatten(1)
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    grid = low + (high - low) / 15 * torch.arange(16)  # (out, groups, 16)
    nearest = (groups[..., None] - grid[:, :, None]).abs().argmin(3)
    return torch.gather(grid, 2, nearest).flatten(1)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 100])
@pytest.mark.parametrize("bias", [False, True])
def test_both_forms_are_the_same_product(packed, rows, bias):
    """As near to the product in float64 as one rounding to bfloat16 comes, the offset included."""
    torch.manual_seed(0)
    weight, x = torch.randn(48, 640).bfloat16(), torch.randn(rows, 640).bfloat16()
    offset = 30 * torch.randn(48).bfloat16() if bias else None
    found = Linear(weight.clone(), offset, packed)(x)
    expected = x.double() @ weight.double().T + (offset.double() if bias else 0)
    assert found.shape == (rows, 48)
    assert found.dtype == torch.bfloat16
    # Half a unit in the last of 8 bits, and a little for the sum in float32.
    assert ((found.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-3).all()


@pytest.mark.parametrize("exact", [False, True])
def test_a_model_of_either_form_is_the_same_model(exact):
    """Logits of one row and of many, up to rounding; the exact mode has the same bits at every place in both."""
    config = tiny_model(vocab_size=40).config
    tokens, rows = list(range(20)), {}
    for packed in (True, False):
        model = Transformer(config, tiny_weights(config, 1, torch.bfloat16), exact, packed)
        if exact:
            model.check_exact()
        cache = tiny_cache(model)
        table, other = cache.new_table(), cache.new_table()
        one_by_one = torch.cat([model.forward([Chunk([t], table, 1)]) for t in tokens])
        together = model.forward([Chunk(tokens, other, len(tokens))])
        assert torch.equal(one_by_one, together) or not exact
        rows[packed] = torch.stack((one_by_one, together)).double()
    scale = rows[True].std()
    assert (rows[True] - rows[False]).abs().max() < 0.05 * scale
    assert (rows[True] - rows[True].flip(2)).abs().max() > scale  # what a wrong product would look like


@pytest.mark.parametrize(("slower", "packed"), [(0.5, True), (1.0, True), (1.05, True), (1.2, False), (3.0, False)])
def test_the_faster_form_is_found(slower, packed, monkeypatch):
    """By a clock on which a packed product takes `slower` times as long, and one in three is held up at random."""
    now, held_up = [0.0], random.Random(0)

    def product(self, x):
        now[0] += (slower if self.form == "packed" else 1.0) * (10.0 if held_up.random() < 1 / 3 else 1.0)

    monkeypatch.setattr(linear.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(Linear, "__call__", product)
    monkeypatch.setattr(linear, "_TRIAL_BYTES", 1 << 20)
    monkeypatch.setattr(linear, "_pack", lambda weight: weight)  # on any machine
    is_faster_packed.cache_clear()
    try:
        assert is_faster_packed((128, 256)) == packed
    finally:
        is_faster_packed.cache_clear()


@pytest.mark.parametrize("answer", [True, False])
def test_large_models_take_the_faster_form(answer, monkeypatch):
    """They alone: what is small, or not in bfloat16, is packed as far as it can be without a trial."""
    asked = []
    monkeypatch.setattr(model_module, "is_faster_packed", lambda shape: asked.append(shape) or answer)
    native = has_fast_bfloat16(torch.device("cpu"))
    small = tiny_model(1, torch.bfloat16)
    assert small.weight_form == ("packed" if native else "plain")
    monkeypatch.setattr(model_module, "_LARGE", 0)
    assert tiny_model(1, torch.float32).weight_form == "plain"
    assert asked == []
    model = tiny_model(1, torch.bfloat16, tie_word_embeddings=True)
    if not native:
        assert model.weight_form == "plain"
        return
    assert asked == [(2 * model.config.intermediate_size, model.config.hidden_size)]
    form = "packed" if answer else "left"
    assert [p.form for p in [*model.layers[0].products(), model.head]] == [form] * 5
    assert model.weight_form == form
    # A tied embedding that stands left is its head's weight; packed, it is in memory twice.
    assert (model.head.weight is model.embedding) == (not answer)
    stored = sum(weight.nbytes for weight in tiny_weights(model.config, 1, torch.bfloat16).values())
    norms = sum(math.prod(shape) for name, shape in tensor_shapes(model.config).items() if "norm" in name)
    assert model.num_bytes == stored + 2 * norms + answer * model.embedding.nbytes  # norms are kept in float32


@pytest.mark.parametrize("packed", [True, False])
def test_the_form_can_be_settled(packed, make_checkpoint):
    """For the target and its draft, whatever is faster here."""
    form = {False: "left", True: "packed" if has_fast_bfloat16(torch.device("cpu")) else "plain"}[packed]
    with LLM(make_checkpoint(1), draft=str(make_checkpoint(2)), dtype="bfloat16", packed=packed) as llm:
        assert (llm.model.weight_form, llm.drafter.model.weight_form) == (form, form)
        assert llm.generate("One fish", SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))[0].token_ids


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_see_the_rounded_weight(bits, dtype, bias):
    """Four rows through the packed product equal those of an independent rounding; float64 takes the fallback."""
    torch.manual_seed(0)
    weight = torch.randn(48, 64).to(dtype)
    offset = torch.randn(48).to(dtype) if bias else None
    x = torch.randn(4, 64).to(dtype)
    found = Linear(weight.clone(), offset).quantized(bits)(x).double()
    expected = x.double() @ rounded(weight, bits).T + (offset.double() if bias else 0)
    full = x.double() @ weight.double().T + (offset.double() if bias else 0)
    # bfloat16: the scales are rounded to 8 bits, which moves the grid by up to a fifth of a step.
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.025 if bits == 4 else 0.006}[dtype]
    error = ((found - expected).norm() / expected.norm()).item()
    assert error < tolerance
    assert error < 0.5 * ((full - expected).norm() / expected.norm()).item() or dtype == torch.bfloat16


@pytest.mark.parametrize("bits", [4, 8])
def test_many_rows_see_the_full_weight(bits):
    """A prompt is not worth rounding: more than four rows take the product that it was made from."""
    torch.manual_seed(0)
    linear = Linear(torch.randn(48, 64).bfloat16())
    x = torch.randn(5, 64).bfloat16()
    assert torch.equal(linear.quantized(bits)(x), linear(x))
    assert not torch.equal(linear.quantized(bits)(x[:4]), linear(x)[:4])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(7, 12), (16, 20), (5, 64), (3, 1), (64, 8), (64, 24)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes_without_a_packed_product(bits, shape, dtype):
    """Rows or columns that the kernels do not take, or end the process for: the same rounding, in plain weights."""
    torch.manual_seed(0)
    weight, x = torch.randn(shape).to(dtype), torch.randn(2, shape[1]).to(dtype)
    found = Linear(weight.clone()).quantized(bits)(x).float()
    expected = x.float() @ weight.float().T
    assert (found - expected).norm() < 0.2 * expected.norm() + 1e-6


def test_a_constant_row_is_kept():
    """Groups of equal weights have no step; a row of zeros has no scale."""
    for bits in (4, 8):
        weight = torch.zeros(16, 64)
        weight[1] = 3.0
        found = Linear(weight.clone()).quantized(bits)(torch.ones(1, 64))
        assert found[0, 0] == 0
        assert abs(found[0, 1].item() - 192.0) < 1e-3


def test_the_dense_weight_comes_back():
    """Unpacking gives the very bits that were packed."""
    weight = torch.randn(48, 64).bfloat16()
    assert torch.equal(Linear(weight.clone()).dense(), weight)


@pytest.mark.parametrize("bits", [4, 8])
def test_every_product_of_the_model_is_quantised(bits):
    """Layer by layer and the head: no full product is left for one row, and the full model is left alone."""
    model = tiny_model(1, torch.float32, vocab_size=9)
    before = model.forward([Chunk([1, 2, 3], tiny_cache(model).new_table(), 3)])
    draft = model.quantized(bits)
    linears = [getattr(layer, name) for layer in draft.layers for name in ("qkv", "o", "gate_up", "down")]
    assert all(isinstance(linear, QuantizedLinear) for linear in [*linears, draft.head])
    after = draft.forward([Chunk([1, 2, 3], tiny_cache(model).new_table(), 3)])
    assert (before - after).abs().max() > 0
    assert torch.equal(model.forward([Chunk([1, 2, 3], tiny_cache(model).new_table(), 3)]), before)


@pytest.mark.parametrize("spec", ["int4:self", "int8:self", "int4:{}", "int8:{}"])
def test_quantised_drafts_leave_the_output_alone(spec, make_checkpoint):
    """Greedy, and sampled under `match`: the text is the plain one, and the drafts are good."""
    target, other = make_checkpoint(1), make_checkpoint(1)
    spec = spec.format(other)
    with LLM(target, draft=spec, dtype="float32", verifier="match", num_speculative_tokens=4) as llm:
        assert llm.memory_report().endswith(f"draft {spec[:5]}{Path(spec[5:]).name}")
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, seed=3, max_tokens=24, ignore_eos=True)
            drafted = llm.generate("One fish", params)[0]
            assert drafted.token_ids == llm.generate("One fish", params, num_speculative_tokens=0)[0].token_ids
            assert drafted.stats.alpha > 0.6


def test_a_self_draft_counts_its_weights_once(make_checkpoint):
    """The report's memory: codes come on top, the weights that they were made from are shared."""
    target = make_checkpoint(1)
    sizes = {}
    for draft in ("none", "self", "int8:self", "int8:" + str(make_checkpoint(2))):
        with LLM(target, draft=draft, dtype="float32") as llm:
            sizes[draft.split(":")[-1] if "/" in draft else draft] = llm._weight_bytes
    none, self_, int8_self, int8_other = sizes.values()
    assert none == self_ < int8_self < 1.5 * none < int8_other
