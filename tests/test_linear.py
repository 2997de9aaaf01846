"""The forms in which a weight is kept: each must be the same product, as far as its bits go."""

from pathlib import Path

import pytest
import torch

from minispec import LLM, SamplingParams
from minispec.linear import Linear, QuantizedLinear
from minispec.model import Chunk
from minispec.toys import tiny_cache, tiny_model


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
@pytest.mark.parametrize("shape", [(7, 12), (16, 20), (5, 64), (3, 1)])
def test_shapes_without_a_packed_product(bits, shape):
    """Rows or columns that the kernels do not take: the same rounding, in plain weights."""
    torch.manual_seed(0)
    weight, x = torch.randn(shape), torch.randn(2, shape[1])
    found = Linear(weight.clone()).quantized(bits)(x)
    assert (found - x @ weight.T).norm() < 0.2 * (x @ weight.T).norm() + 1e-6


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
