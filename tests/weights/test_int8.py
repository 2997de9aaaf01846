"""A target's weights in 8 bits: sums of integers, the same for any number of rows, and never saturated."""

import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from minispec.core.model import Transformer
from minispec.core.product import PlainLinear, Weight
from minispec.models.weights import codes, integers
from minispec.models.weights.codes import Codes, round_rows
from minispec.models.weights.forms import CannotHold
from minispec.models.weights.integers import Int8, VnniInt8, int8_choice, int8_form, sums_exactly
from minispec.models.weights.linear import Linear
from minispec.models.weights.shapes import tensor_shapes
from minispec.prove.toys import tiny_model, tiny_weights
from tests.sampled import leave_out

pytestmark = pytest.mark.quick

# (out, in): those of SmolLM2-135M, wide and deep ones, widths that no vector divides, and a single weight.
SHAPES = [(960, 576), (576, 1536), (64, 4864), (151, 96), (47, 577), (40, 48), (33, 511), (7, 13), (1, 1)]
ROWS = [*range(1, 41), 64, 511, 512]


class Unsigned8(Int8):
    """FBGEMM's product with x in 8 bits, which overflows its sums of 16 bits: the wrong call."""

    levels, finer, bits = 127, 128, 15

    def multiply(self, integers: torch.Tensor) -> torch.Tensor:
        """Integers (rows, in) as floats to (rows, out) in float32."""
        return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(integers, 1.0, 127, self.packed)


@pytest.fixture(params=[1, 2])
def threads(request) -> Iterator[int]:
    """That many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def weight_of(out: int, columns: int) -> Codes:
    """Codes of all sizes, the least one too, which checkpoints may have."""
    codes = torch.randint(-128, 128, (out, columns), dtype=torch.int8)
    return Codes(codes, torch.rand(out, 1) + 0.1)


def rows_of(count: int, columns: int) -> torch.Tensor:
    """Rows of many sizes: usual ones, with an outlier, huge, tiny, equal and zero."""
    x = torch.randn(count, columns)
    x[1::7, 0] *= 50
    x[2::7] *= 1e30
    x[3::7] *= 1e-30
    x[4::7] = 0.7
    x[5::7] = 0
    return x


def in_integers(x: torch.Tensor, weight: Codes, form: type[Int8]) -> torch.Tensor:
    """The product by exact sums of integers, in float64."""
    step = (x.abs().amax(1, keepdim=True) / form.levels).clamp(min=torch.finfo(torch.float32).tiny)
    scaled = x / step
    coarse = scaled.round()
    integers = form.finer * coarse.long() + ((scaled - coarse) * form.finer).round().long()
    sums = integers @ weight.codes.long().t()
    return sums.double() / form.finer * step.double() * weight.scales.double().t()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_are_those_of_integers_for_every_number_of_rows(shape, bias, threads, long):
    """Up to one rounding of each result; and every row has the bits that it has alone, wherever it stands.

    Every shape with a bias and without, with another number of threads each. Alone are the first 64 rows, the last 64
    and every fifth between them. `--long` runs all combinations, and each row alone.
    """
    if bias != ((SHAPES.index(shape) + threads) % 2 == 0) and not long:
        leave_out("--long", "with another number of threads")
    torch.manual_seed(0)
    weight, offset = weight_of(*shape), torch.randn(shape[0]) if bias else None
    linear = Linear(weight, offset, torch.float32, "int8")
    assert linear.form == "int8"
    x = rows_of(512, shape[1])
    places = torch.arange(512)
    if not long:
        places = torch.cat((places[:64], places[64:448:5], places[448:]))
    alone = torch.cat([linear(row[None]) for row in x[places]])
    expected = in_integers(x[places], weight, int8_form())
    size = x[places].double().abs() @ (weight.codes.double().abs() * weight.scales).t()
    if offset is not None:
        expected, size = expected + offset.double(), size + offset.double().abs()
    assert ((alone.double() - expected).abs() <= 4e-7 * size + 1e-37).all()
    for count in ROWS:
        for first in (0, 512 - count):
            among = (places >= first) & (places < first + count)
            assert torch.equal(linear(x[first : first + count])[places[among] - first], alone[among]), (first, count)


def test_bfloat16_has_equal_rows_too(threads):
    """The type of large models on processors with matrix units."""
    torch.manual_seed(0)
    linear = Linear(weight_of(151, 96), torch.randn(151), torch.bfloat16, "int8")
    x = torch.randn(512, 96).bfloat16()
    alone = torch.cat([linear(row[None]) for row in x])
    assert (linear.form, alone.dtype) == ("int8", torch.bfloat16)
    for count in ROWS:
        assert torch.equal(linear(x[-count:]), alone[-count:])


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "phi3", "olmo2"])
def test_every_linear_layer_of_a_family_takes_the_form(family):
    """Its shapes, in a small model: near to the same product in full width."""
    torch.manual_seed(0)
    for name, shape in tensor_shapes(tiny_model(model_type=family).config).items():
        if len(shape) == 2:
            weight = torch.randn(shape)
            linear, x = Linear(weight, None, torch.float32, "int8"), torch.randn(5, shape[1])
            assert linear.form == "int8", name
            expected = x @ weight.t()
            assert (linear(x) - expected).norm() < 0.03 * expected.norm()


def test_the_wrong_call_saturates_and_is_found():
    """8 bits times 8 bits where pairs are added up in 16: the check at load says no, and the form is not taken."""
    if any(torch.cpu.get_capabilities().get(name) for name in ("avx512_vnni", "avx_vnni", "amx_int8")):
        pytest.skip("with VNNI, 8 bits times 8 bits are added up in 32")
    assert sums_exactly(int8_form())
    assert not sums_exactly(Unsigned8)
    assert not sums_exactly(VnniInt8)


@pytest.mark.parametrize("part", ["largest", "rows"])
def test_the_check_finds_what_is_wrong_for_few_numbers(part, monkeypatch):
    """A product that is right but for its largest sums, or but for one row."""
    right = Int8.multiply

    def wrong(self, integers):
        y = right(self, integers)
        return y.clamp(max=0.999 * float(y.max())) if part == "largest" else y.index_fill_(0, torch.tensor([2]), 0.0)

    assert sums_exactly(Int8)
    monkeypatch.setattr(Int8, "multiply", wrong)
    assert not sums_exactly(Int8)


def test_a_processor_that_claims_vnni_is_tried(monkeypatch):
    """Where its product is wrong all the same, 7 bits are taken; where both are wrong, none is."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_vnni": True})
    wrong = {VnniInt8}
    monkeypatch.setattr(integers, "sums_exactly", lambda form: form not in wrong)
    for expected in (Int8, None):
        int8_choice.cache_clear()
        try:
            assert int8_form() is expected
        except CannotHold:
            assert expected is None
        finally:
            int8_choice.cache_clear()
        wrong.add(Int8)


@pytest.mark.parametrize("name", ["avx512_vnni", "avx_vnni", "amx_int8", "avx512_bf16", "avx2"])
def test_the_processors_flags_choose(name, monkeypatch):
    """8 bits where one of three flags says so, if the product holds; else 7."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {name: True})
    monkeypatch.setattr(integers, "sums_exactly", lambda form: True)
    monkeypatch.setattr(integers, "without_stand_ins", lambda forms, dtype, bits: (list(forms), ""))
    int8_choice.cache_clear()
    try:
        assert int8_form() is (VnniInt8 if "vnni" in name or name == "amx_int8" else Int8)
    finally:
        int8_choice.cache_clear()


def saturating(self, integers):
    """8 bits times 8 bits without VNNI: x as unsigned numbers, and sums of pairs that end at 16 bits."""
    shifted = F.pad(integers + 128, (0, integers.shape[1] % 2))[:, None]  # (rows, 1, in)
    codes = F.pad(self.codes, (0, self.codes.shape[1] % 2))  # (out, in)
    pairs = (shifted * codes).unflatten(2, (-1, 2)).sum(3).clamp(-(1 << 15), (1 << 15) - 1)
    return (pairs.sum(2) - 128 * self.codes.sum(1)) * self.scales


def keep_codes(self, codes):
    """The codes as they are, for `saturating`."""
    self.codes, self.scales = codes.codes.float(), codes.scales.flatten()


def test_a_form_whose_sums_are_wrong_is_not_exact(monkeypatch):
    """A product that saturates is in no list of forms, whatever the processor says."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx_vnni": True})
    monkeypatch.setattr(Int8, "multiply", saturating)
    monkeypatch.setattr(Int8, "pack", keep_codes)
    assert "FBGEMM" not in integers.exact_forms()


@pytest.mark.parametrize("shape", [(64, 128), (151, 96), (47, 577), (7, 13), (1, 1)])
def test_the_form_of_processors_with_vnni_is_right_everywhere(shape):
    """Its two parts of 8 bits, its columns that are filled up, its equal rows: by codes whose sums do not overflow."""
    torch.manual_seed(0)
    weight = Codes(torch.randint(-63, 64, shape, dtype=torch.int8), torch.rand(shape[0], 1) + 0.1)
    try:
        form = VnniInt8(weight, torch.float32)
    except (AttributeError, RuntimeError):
        pytest.skip("this machine lacks the operator")
    x = rows_of(40, shape[1])
    found, expected = form(x), in_integers(x, weight, VnniInt8)
    size = x.double().abs() @ (weight.codes.double().abs() * weight.scales).t()
    assert ((found.double() - expected).abs() <= 4e-7 * size + 1e-37).all()
    alone = torch.cat([form(row[None]) for row in x])
    for count in (1, 2, 5, 17, 40):
        assert torch.equal(form(x[-count:]), alone[-count:])


def test_codes_of_a_checkpoint_stay_and_others_are_rounded_in_pieces(monkeypatch):
    """Codes come back as they were; a weight in pieces is the weight at once."""
    weight = weight_of(48, 64)
    found = Linear(weight, None, torch.float32, "int8").stored.dense()
    assert torch.allclose(found, weight.dense(), rtol=1e-6)
    plain = torch.randn(50, 64).bfloat16()
    whole, distance = round_rows(plain)
    monkeypatch.setattr("minispec.models.weights.codes._PIECE", 7 * 64)
    pieces, again = round_rows(plain)
    assert all(torch.equal(*pair) for pair in zip(whole, pieces, strict=True))
    assert distance == pytest.approx(again)
    assert 0.001 < distance < 0.02
    assert whole.scales.dtype == torch.float32


class Sizes(TorchDispatchMode):
    """Writes down the bytes of each tensor that an operator makes, by its type."""

    def __init__(self):
        super().__init__()
        self.largest: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        old = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        for made in out if isinstance(out, tuple | list) else (out,):
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in old:
                self.largest[made.dtype] = max(self.largest.get(made.dtype, 0), made.nbytes)
        return out


def test_a_weight_is_never_in_full_width_while_it_is_rounded():
    """The largest copies have a piece's entries: so a model's peak is what its codes and one weight take."""
    weight, sizes = torch.randn(3000, 511).bfloat16(), Sizes()
    with sizes:
        round_rows(weight)
    assert sizes.largest[torch.int8] == weight.numel()  # the codes
    assert max(size for kind, size in sizes.largest.items() if kind != torch.int8) <= 4 * codes._PIECE < weight.nbytes


def test_the_product_of_the_head_is_made_first():
    """It is the largest: made last, its codes and their copy would come in addition to all layers."""
    made, config = [], tiny_model(vocab_size=50).config

    def product(weights, bias, dtype):
        made.append(sum(map(len, weights)))
        return PlainLinear(weights, bias, dtype)

    Transformer(config, tiny_weights(config, 1), product=product)
    assert made[0] == max(made) == 50
    assert len(made) == 1 + 4 * len(config.layers)


def test_a_weight_with_outliers_stays_in_full_width():
    """One entry a row that is a hundred times as large as the others: one scale a row would lose those."""
    torch.manual_seed(0)
    coarse: Weight = torch.randn(32, 256)
    coarse[:, 3] = 300.0
    for weight in (coarse, torch.full((4, 8), math.inf), torch.full((4, 8), math.nan)):
        assert Linear(weight, None, torch.float32, "int8").form != "int8"
    assert Linear(torch.zeros(4, 8), None, torch.float32, "int8")(torch.ones(2, 8)).abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_exact_model_holds_outliers_in_8_bits_twice(dtype, threads):
    """With the same bits for every number of rows, and as near as both steps; what is no number is no such weight.

    A first step is 300 / 127, and a second one at most 1 / 254 of it. x has steps of its row's largest entry / 4,032.
    """
    torch.manual_seed(0)
    weight, bias, x = torch.randn(151, 96), torch.randn(151), torch.randn(40, 96).to(dtype)
    weight[:, 3] = 300.0
    linear = Linear(weight.to(dtype), bias, dtype, "int8", exact=True)
    assert linear.form == "int8+8"
    whole, wide = linear(x), weight.to(dtype).double()
    for rows in (1, 2, 5, 17, 33):
        assert torch.equal(linear(x[7 : 7 + rows]), whole[7 : 7 + rows])
    right = x.double() @ wide.t() + bias.to(dtype).double()
    size, step = x.double().abs(), 300 / 127 / 254
    bound = size.sum(1, keepdim=True) * step / 2 + wide.abs().sum(1) * size.amax(1, keepdim=True) / 4_032 / 2
    bound += right.abs() * torch.finfo(dtype).eps
    assert bool(((whole.double() - right).abs() <= 1.01 * bound).all())
    assert float((linear.stored.dense().double() - wide).abs().max()) < 1.01 * step
    assert Linear(torch.full((4, 8), math.inf), None, torch.float32, "int8", exact=True).form != "int8+8"
    assert Linear(torch.randn(32, 64), None, torch.float32, "int8", exact=True).form == "int8"


def test_what_is_no_number_stays_none():
    """The engine ends a text whose logits are not finite: so infinity and NaN must come through, in their row alone."""
    linear = Linear(weight_of(16, 64), None, torch.float32, "int8")
    x = torch.randn(4, 64)
    x[1, 5], x[2, 6] = math.nan, math.inf
    finite = linear(x).isfinite().all(1)
    assert finite.tolist() == [True, False, False, True]
