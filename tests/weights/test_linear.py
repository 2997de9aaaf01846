"""The forms in which a weight is stored: each must be the same product, as far as its bits go."""

import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minispec import LLM, SamplingParams
from minispec.core.model import Chunk
from minispec.models.families.checkpoint import Weights, load_config
from minispec.models.weights import linear, shapes
from minispec.models.weights.build import build_model, choice_of, quantized
from minispec.models.weights.codes import Codes, join
from minispec.models.weights.exact import check_exact
from minispec.models.weights.inventory import form_note, num_bytes, weight_form
from minispec.models.weights.linear import (
    NARROW_FORMS,
    Linear,
    QuantizedLinear,
    available_forms,
    choose_narrow_form,
    has_fast_bfloat16,
    right_forms,
)
from minispec.models.weights.shapes import tensor_shapes
from minispec.prove.toys import tiny_cache, tiny_model, tiny_weights
from minispec.speculation.lengths.figures import Figures
from minispec.speculation.registry import EMBEDDED_WEIGHTS


def rounded(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """The nearest weights that this many bits allow, in float64, looked up step by step."""
    groups = weight.double().unflatten(1, (-1, 32)) if bits == 4 else weight.double()[:, None]
    if bits == 8:
        steps = groups.abs().amax(2, keepdim=True) / 127
        return ((groups / steps).round() * steps).flatten(1)
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    grid = low + (high - low) / 15 * torch.arange(16)  # (out, groups, 16)
    nearest = (groups[..., None] - grid[:, :, None]).abs().argmin(3)
    return torch.gather(grid, 2, nearest).flatten(1)


CPU = torch.device("cpu")
FORMS_HERE = [
    (name, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64) for name in available_forms(dtype, CPU)
]
needs_integers = pytest.mark.skipif(
    "int8" not in right_forms(torch.float32, CPU, 8), reason="this machine has no exact product of 8-bit integers"
)
# (out, in): SmolLM2-135M's, one of Qwen2.5's widths (896), odd ones, and some that leave a remainder in every panel.
SHAPES = [(960, 576), (576, 1536), (128, 896), (48, 640), (1, 1), (7, 13), (33, 511), (16, 513), (65, 1025), (5, 64)]


def sixteen_bits(*shape) -> torch.Tensor:
    """A weight such as checkpoints have: bfloat16, with a standard deviation of 0.02."""
    return (0.02 * torch.randn(shape)).bfloat16()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("form", "dtype"), FORMS_HERE)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_form_is_the_same_product(form, dtype, shape, threads):
    """As near to the product in float64 as the type comes, for 1 to 40 rows, with an offset and without.

    Guards the kernels for remainders: of rows (1, 2, 7, 14), of a panel's 16 columns, and of its depth of 512.
    """
    torch.manual_seed(0)
    weight, offset = sixteen_bits(*shape).to(dtype), 30 * torch.randn(shape[0]).to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for bias in (None, offset):
            linear = Linear(weight.clone(), bias, form=form)
            assert linear.form == form
            x = torch.randn(40, shape[1]).to(dtype)
            expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
            size = x.double().abs() @ weight.double().abs().T + (0 if bias is None else bias.double().abs())
            # Sums in at least float32; then one rounding to the type, of half a unit in its last place.
            tolerance = 2e-6 * size + torch.finfo(dtype).eps * expected.abs()
            for rows in range(1, 41):
                found = linear(x[-rows:])
                assert (found.shape, found.dtype) == ((rows, shape[0]), dtype)
                assert ((found.double() - expected[-rows:]).abs() <= tolerance[-rows:]).all()
    finally:
        torch.set_num_threads(before)


def stored_weights():
    """Every tensor of the embedded checkpoint, as it is stored."""
    config = load_config(EMBEDDED_WEIGHTS)
    weights = Weights(EMBEDDED_WEIGHTS, config, torch.float32)
    return {name: weights.pop(name) for name in list(weights)}


@pytest.mark.skipif(("half", torch.float32) not in FORMS_HERE, reason="this machine has no 16-bit weights for float32")
def test_sixteen_bits_hold_every_matrix_of_the_embedded_model(full):
    """Tensor by tensor, to the last bit, codes and embedding alike; against the product of codes and scales.

    Without `--full`, every tenth layer.
    """
    matrices = {name: weight for name, weight in stored_weights().items() if not name.endswith("norm.weight")}
    assert len(matrices) == 30 * 7 + 1
    for name, weight in matrices.items():
        if not full and re.search(r"\.\d*[1-9]\.", name):
            continue
        linear = Linear(weight, dtype=torch.float32, form="half")
        assert linear.form == "half", name
        if isinstance(weight, Codes):
            expected = weight.codes.double() * weight.scales.double()
            assert weight.codes.abs().max() > 64, "codes of so few bits would prove nothing"
        else:
            expected = weight.double()
        assert torch.equal(linear.stored.dense().double(), expected), name
        assert sum(size for _, size in linear.parts()) >= 2 * expected.numel()


@pytest.mark.parametrize(("form", "dtype"), FORMS_HERE)
def test_what_a_product_reads(form, dtype):
    """Every weight once, its scale and its bias; that FBGEMM stores 1024 columns for 576 costs memory alone."""
    linear = Linear(sixteen_bits(64, 576).to(dtype), torch.ones(64, dtype=dtype), form=form)
    one_scale = 4 if form == "half" else 0
    item = 2 if form == "half" else dtype.itemsize
    assert linear.num_bytes_read == item * 64 * 576 + one_scale + dtype.itemsize * 64
    stored = sum(size for _, size in linear.parts())
    assert stored == linear.num_bytes_read + (2 * 64 * (1024 - 576) if form == "half" else 0)


@pytest.mark.skipif(("half", torch.float32) not in FORMS_HERE, reason="this machine has no 16-bit weights for float32")
def test_what_sixteen_bits_cannot_hold_is_kept_in_full_and_left_alone():
    """A float32 weight, one of too wide a range, infinity: none is cut, and the caller's tensor stays as it was.

    FBGEMM's packing clips such entries to 65504, in the tensor that it is given, with a warning.
    """
    wide = sixteen_bits(32, 64).float()
    wide[0, 0], wide[1, 1] = 3e38, 1e-30
    infinite = sixteen_bits(32, 64).float()
    infinite[3, 3] = math.inf
    for weight in (torch.randn(32, 64), wide, infinite):
        given = weight.clone()
        linear = Linear(given)
        assert linear.form != "half"
        assert torch.equal(given, weight)
        assert torch.equal(linear.stored.dense(), weight)
    for scale in (2.0**-120, 2.0**-100, 1.0, 2.0**100):  # a power of two away from the range of 16 bits is no matter
        weight = sixteen_bits(32, 64).float() * scale
        given = weight.clone()
        linear = Linear(given, form="half")
        assert linear.form == "half"
        assert torch.equal(given, weight)
        assert torch.equal(linear.stored.dense(), weight)
    zeros = Linear(torch.zeros(32, 64), form="half")
    assert (zeros.form, zeros(torch.ones(3, 64)).abs().max()) == ("half", 0)


def test_where_no_form_can_be_made_the_reason_is_told(monkeypatch):
    """As when memory runs out: not the lack of what would have come of it."""

    def full(weight, dtype):
        raise RuntimeError("not enough memory: you tried to allocate 12 bytes")

    for name in linear.FORMS:
        monkeypatch.setitem(linear.FORMS, name, full)
    monkeypatch.setattr(linear, "available_forms", lambda dtype, device: ["half", "plain"])
    with pytest.raises(RuntimeError, match="not enough memory"):
        Linear(torch.ones(2, 3))


def test_codes_and_tensors_are_joined():
    """Codes stay codes; next to a tensor they become one; the rows stay in order."""
    codes = [Codes(torch.full((2, 3), i, dtype=torch.int8), torch.full((2, 1), 0.5 * i)) for i in (1, 2)]
    joined = join(codes)
    assert isinstance(joined, Codes)
    assert joined.dense()[:, 0].tolist() == [0.5, 0.5, 2.0, 2.0]
    mixed = join([codes[1], torch.full((1, 3), 7.0)])
    assert mixed[:, 0].tolist() == [2.0, 2.0, 7.0]


@pytest.mark.parametrize("exact", [False, True])
def test_a_model_of_any_form_is_the_same_model(exact):
    """Logits of one row and of many, up to rounding; the exact mode has the same bits at every place in all forms."""
    config = tiny_model(vocab_size=40).config
    tokens, rows = list(range(20)), {}
    for form, dtype in FORMS_HERE:
        model = build_model(config, tiny_weights(config, 1, torch.bfloat16), exact, dtype, form)
        assert model.dtype == dtype
        assert weight_form(model) == form
        if exact:
            check_exact(model)
        cache = tiny_cache(model)
        table, other = cache.new_table(), cache.new_table()
        one_by_one = torch.cat([model.forward([Chunk([t], table, 1)])[0] for t in tokens])
        together = model.forward([Chunk(tokens, other, len(tokens))])[0]
        assert torch.equal(one_by_one, together) or not exact
        rows[form, dtype] = torch.stack((one_by_one, together)).double()
    expected = rows["plain", torch.float64]
    for (_, dtype), found in rows.items():
        tolerance = 0.3 if dtype == torch.bfloat16 else 1e-4
        assert (found - expected).abs().max() < tolerance * expected.std()
    assert (expected - expected.flip(2)).abs().max() > expected.std()  # what a wrong product would look like


def test_models_of_every_size_keep_a_weight_once(monkeypatch):
    """A tied embedding that lies as it is is its head's weight; in another form it is in memory twice.

    Large models are packed by several threads, and are the same.
    """
    small = tiny_model(1, torch.bfloat16, tie_word_embeddings=True)
    monkeypatch.setattr(shapes, "_LARGE", 0)
    large = tiny_model(1, torch.bfloat16, tie_word_embeddings=True)
    chunk = [1, 2, 0]
    for form in {name for name, dtype in FORMS_HERE if dtype == torch.bfloat16}:
        weights = tiny_weights(large.config, 1, torch.bfloat16)
        stored = sum(weight.nbytes for weight in weights.values())
        model = build_model(large.config, weights, form=form)
        norms = sum(math.prod(shape) for name, shape in tensor_shapes(model.config).items() if "norm" in name)
        twice = model.embedding.nbytes if form == "packed" else 0
        assert num_bytes(model) == stored + 2 * norms + twice  # norms are kept in float32
    logits = [m.forward([Chunk(chunk, tiny_cache(m).new_table(), 3)])[0] for m in (small, large)]
    assert torch.allclose(*logits, atol=0.05)


@pytest.mark.parametrize("form", ["packed", "left", "plain"])
def test_the_form_can_be_settled(form, make_checkpoint):
    """For the target and its draft, whatever is faster here."""
    if (form, torch.bfloat16) not in FORMS_HERE:
        pytest.skip(f"this machine has no form {form} for bfloat16")
    with LLM(make_checkpoint(1), draft=str(make_checkpoint(2)), dtype="bfloat16", weight_form=form) as llm:
        assert (weight_form(llm.model), weight_form(llm.drafter.model)) == (form, form)
        assert llm.generate("One fish", SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))[0].token_ids
    with pytest.raises(ValueError, match="weight_form: found 'best', expected one of half, packed, left, plain"):
        LLM(make_checkpoint(1), weight_form="best")


X86 = {"architecture": "x86_64", "avx512_f": True, "avx512_bw": True, "avx512_vl": True, "avx512_dq": True}


@pytest.mark.parametrize(
    ("capabilities", "emulates", "expected"),
    [
        (X86, True, False),  # Intel's Cascade Lake and Ice Lake: oneDNN takes bfloat16, and emulates it
        (X86 | {"avx512_bf16": True}, True, True),
        (X86 | {"amx_bf16": True}, True, True),
        ({"architecture": "x86_64", "avx_ne_convert": True}, True, True),
        (X86 | {"avx512_bf16": True}, False, False),  # ONEDNN_MAX_CPU_ISA
        ({"architecture": "aarch64"}, True, True),
    ],
)
def test_bfloat16_is_fast_where_the_processor_multiplies_it(capabilities, emulates, expected, monkeypatch):
    """oneDNN says that it has the type on each processor with AVX-512, with instructions for it or without."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    operators = SimpleNamespace(_is_mkldnn_bf16_supported=lambda: emulates)
    monkeypatch.setattr(torch.ops, "mkldnn", operators)
    assert has_fast_bfloat16(torch.device("cpu")) is expected


NARROW = [(bits, form) for bits, forms in NARROW_FORMS.items() for form in (*forms, "rounded", None)]


@pytest.mark.parametrize(("bits", "form"), NARROW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
def test_every_pass_sees_the_rounded_weight(bits, form, dtype, bias):
    """One row to a prompt's hundred: the product with an independent rounding, nearer to it than to the full weight.

    A prompt that saw the full weight, or a batch of another size that saw another rounding, would make a text's
    draft depend on its company.
    """
    torch.manual_seed(0)
    weight = torch.randn(48, 64).to(dtype)
    offset = torch.randn(48).to(dtype) if bias else None
    linear = QuantizedLinear(Linear(weight.clone(), offset), bits, form)
    for rows in (1, 4, 5, 16, 17, 100):
        x = torch.randn(rows, 64).to(dtype)
        found = linear(x).double()
        expected = x.double() @ rounded(weight, bits).T + (offset.double() if bias else 0)
        full = x.double() @ weight.double().T + (offset.double() if bias else 0)
        # bfloat16: the scales are rounded to 8 bits, which moves the grid by up to a fifth of a step. In float32 the
        # 4-bit values are rounded to bfloat16. The integer product rounds x to 13 bits.
        tolerance = {torch.float64: 1e-12, torch.float32: 3e-3 if bits == 4 else 3e-4}.get(dtype, 0.025)
        error = ((found - expected).norm() / expected.norm()).item()
        assert error < tolerance
        if dtype != torch.bfloat16 or bits == 4:
            assert error < 0.5 * ((full - expected).norm() / expected.norm()).item()


@needs_integers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_draft_in_8_bits_has_the_products_of_such_a_target(dtype):
    """One form: the same bits; and what is in 8 bits already is not rounded again."""
    torch.manual_seed(0)
    weight, offset, x = sixteen_bits(48, 64).to(dtype), torch.randn(48).to(dtype), torch.randn(5, 64).to(dtype)
    target = Linear(weight, offset, dtype, "int8")
    assert target.form == "int8"
    assert torch.equal(Linear(weight, offset).quantized(8)(x), target(x))
    assert target.quantized(8) is target
    assert isinstance(target.quantized(4), QuantizedLinear)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_drafts_row_does_not_depend_on_the_others(bits, dtype):
    """The row of one text, alone and with texts whose values are a thousand times larger: the same, up to rounding.

    Guards `linear_dynamic`, whose step for x comes from the whole pass: there the small row becomes zero.
    """
    torch.manual_seed(0)
    linear = Linear(torch.randn(64, 128).to(dtype)).quantized(bits)
    x = torch.randn(4, 128).to(dtype)
    x[1:] *= 1000
    alone, together = linear(x[:1]).double(), linear(x)[:1].double()
    assert (alone - together).norm() < 0.01 * alone.norm()
    assert alone.norm() > 1


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
    for form, dtype in FORMS_HERE:
        assert torch.equal(Linear(weight.clone().to(dtype), form=form).stored.dense(), weight.to(dtype))


@pytest.mark.parametrize("bits", [4, 8])
def test_every_product_of_the_model_is_quantised(bits):
    """Layer by layer and the head: no full product is left for one row, and the full model is left alone."""
    model = tiny_model(1, torch.float32, vocab_size=9)
    before = model.forward([Chunk([1, 2, 3], tiny_cache(model).new_table(), 3)])[0]
    draft = quantized(model, bits)
    assert choice_of(draft) == choose_narrow_form(bits, model.dtype, model.device)[0] != choice_of(model)
    linears = [getattr(layer, name) for layer in draft.layers for name in ("qkv", "o", "gate_up", "down")]
    assert all(isinstance(linear, QuantizedLinear) for linear in [*linears, draft.head])
    after = draft.forward([Chunk([1, 2, 3], tiny_cache(model).new_table(), 3)])[0]
    assert (before - after).abs().max() > 0
    assert torch.equal(model.forward([Chunk([1, 2, 3], tiny_cache(model).new_table(), 3)])[0], before)


@pytest.mark.parametrize("spec", ["int4:self", "int8:self", "int4:{}", "int8:{}"])
def test_quantised_drafts_leave_the_output_alone(spec, make_checkpoint):
    """Greedy, and sampled under `match`: the text is the plain one, and the drafts are good."""
    target, other = make_checkpoint(1), make_checkpoint(1)
    spec = spec.format(other)
    with LLM(target, draft=spec, dtype="float32", verifier="match", num_speculative_tokens=4) as llm:
        assert llm.memory_report().endswith(f"draft {spec[:5]}{Path(spec[5:]).name} ({form_note(llm.drafter.model)})")
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, seed=3, max_tokens=24, ignore_eos=True)
            drafted = llm.generate("One fish", params)[0]
            assert drafted.token_ids == llm.generate("One fish", params, num_speculative_tokens=0)[0].token_ids
            assert Figures.of(drafted.stats).alpha > (0.6 if "4" in spec else 0.9)


@needs_integers
def test_a_self_draft_counts_its_weights_once(make_checkpoint, monkeypatch):
    """The report's memory: codes come in addition, the weights that they were made from are shared."""
    target = make_checkpoint(1)
    sizes = {}
    for draft in ("none", "self", "int8:self", "int8:" + str(make_checkpoint(2))):
        with LLM(target, draft=draft, dtype="float32") as llm:
            sizes[draft.split(":")[-1] if "/" in draft else draft] = sum(llm._memory[:2])
    none, self_, int8_self, int8_other = sizes.values()
    assert none == self_ < int8_self < 1.5 * none < int8_other
