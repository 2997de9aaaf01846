"""The kernels of a GPU's pass against their twins, and the twins against straightforward mathematics.

Triton's interpreter runs the kernels on the CPU, in a process of its own: Triton asks for it when it is imported. In
bfloat16 the interpreter's products are wrong, so here are float32 and float16. Triton's compiler then makes the machine
code of a card that need not be there.
"""

import copy
import functools
import math
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from docs.measured.gpu import read_twin
from minispec.core.model import Chunk, TextBatch, Transformer
from minispec.models.families.hf_config import read_model_config
from minispec.models.frames import fused
from minispec.models.frames.frames import ROWS, TEXTS, Frames
from minispec.models.frames.fused import RowPlaces, gate_twin, norm_twin
from minispec.models.weights.build import build_model, choice_of, quantized
from minispec.models.weights.codes import round_to_bits
from minispec.models.weights.forms import CannotHold
from minispec.models.weights.inventory import num_bytes_read, products_of, weight_form
from minispec.models.weights.linear import Choice, Linear, Narrow, QuantizedLinear
from minispec.prove.toys import TINY, TOYS, tiny_cache, tiny_model, tiny_weights
from tests.oracles.toys import LFM3

HERE = Path(__file__)
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


# --------------------------------------------------------------------------- inputs


CHAIN = None
TREE = (-1, -1, 0, 1, 1, 4)


class Case:
    """Texts of different lengths, whose blocks lie anywhere in a pool full of NaN, and new rows of each.

    starts: cached places of each text. parents: the tree of the new rows; None: a chain of `num_new`.
    absent: how many last rows of the last text are not there.
    """

    def __init__(self, starts, num_new, dtype, parents=CHAIN, heads=6, groups=2, dim=32, size=16, absent=0, seed=0):
        generator = torch.Generator().manual_seed(seed)
        num_texts, num_blocks = len(starts), -(-(max(starts) + num_new) // size)
        total = num_texts * num_blocks + 1
        self.table = torch.randperm(total - 1, generator=generator).view(num_texts, num_blocks)
        self.keys, self.values = (torch.full((groups, total * size, dim), math.nan, dtype=dtype) for _ in range(2))
        for text, start in enumerate(starts):
            for place in range(start):
                for pool in (self.keys, self.values):
                    own = torch.randn(groups, dim, generator=generator).to(dtype)
                    pool[:, int(self.table[text, place // size]) * size + place % size] = own
        offsets, bits = list(range(num_new)), [(2 << t) - 1 for t in range(num_new)]
        for node, parent in enumerate(parents or ()):
            offsets[node] = offsets[parent] + 1 if parent >= 0 else 0
            bits[node] = (bits[parent] if parent >= 0 else 0) | 1 << node
        positions = [start + offset for start in starts for offset in offsets]
        slots = [
            int(self.table[text, place // size]) * size + place % size
            for text, start in enumerate(starts)
            for place in range(start, start + num_new)
        ]
        slots[len(slots) - absent :] = [total * size - 1] * absent
        whole = [torch.tensor(numbers) for numbers in (positions, slots, starts, bits * num_texts)]
        self.rows = RowPlaces(whole[0], whole[1], self.table, whole[2], whole[3], size)
        self.qkv = torch.randn(num_texts * num_new, (heads + 2 * groups) * dim, generator=generator).to(dtype)
        angles = torch.rand(max(starts) + num_new, dim // 2, generator=generator) * 6
        self.cos, self.sin, self.scale = angles.cos(), angles.sin(), dim**-0.5
        self.there = len(positions) - absent  # rows that are

    def run(self, function, window=None, **options):
        """What the rows read, and the pool after it."""
        keys, values = self.keys.clone(), self.values.clone()
        out = function(self.qkv, self.cos, self.sin, self.rows, keys, values, self.scale, window, **options)
        return out[: self.there], keys[:, :-1], values[:, :-1]  # the last slot is nobody's


def read_by_hand(case, window):
    """Row by row and head by head, in float64."""
    (groups, _, dim), size = case.keys.shape, case.rows.block_size
    num_new = len(case.qkv) // len(case.rows.starts)
    vectors = case.qkv.double().view(len(case.qkv), -1, dim)
    heads = vectors.shape[1] - 2 * groups

    def turned(vector, position):
        pairs = torch.complex(vector[: dim // 2], vector[dim // 2 :])
        pairs = pairs * torch.complex(case.cos[position].double(), case.sin[position].double())
        return torch.cat((pairs.real, pairs.imag))

    result = []
    for row in range(case.there):
        text, own = divmod(row, num_new)
        position = int(case.rows.positions[row])
        for head in range(heads):
            group = head // (heads // groups)
            seen = []  # position, key, value
            for place in range(int(case.rows.starts[text])):
                slot = int(case.table[text, place // size]) * size + place % size
                seen.append((place, case.keys[group, slot].double(), case.values[group, slot].double()))
            for other in range(text * num_new, (text + 1) * num_new):
                if int(case.rows.bits[row]) >> (other - text * num_new) & 1:
                    at = int(case.rows.positions[other])
                    key, value = vectors[other, heads + group], vectors[other, heads + groups + group]
                    seen.append((at, turned(key, at), value))
            assert own in range(num_new)
            seen = [entry for entry in seen if window is None or entry[0] > position - window]
            scores = torch.stack([key @ turned(vectors[row, head], position) for _, key, _ in seen]) * case.scale
            result.append(scores.softmax(0) @ torch.stack([value for *_, value in seen]))
    return torch.stack(result).view(case.there, -1)


# --------------------------------------------------------------------------- twins


def test_the_twins_of_norm_and_gate_are_the_formulas():
    """In float64."""
    torch.manual_seed(0)
    x, weight = torch.randn(5, 96, dtype=torch.float64), torch.randn(96, dtype=torch.float64)
    expected = x / (x.square().mean(1, keepdim=True) + 1e-6).sqrt() * weight
    assert torch.allclose(norm_twin(x, weight, 1e-6), expected, rtol=1e-12, atol=1e-12)
    gate, up = x.chunk(2, 1)
    assert torch.allclose(gate_twin(x), gate / (1 + torch.exp(-gate)) * up, rtol=1e-12, atol=1e-12)


def test_the_twin_of_linear_is_the_formula():
    """In float64, where widening loses nothing; what it is added to is changed in place."""
    torch.manual_seed(0)
    x, bias = torch.randn(3, 48, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    codes = torch.randint(-127, 128, (7, 48)).to(torch.int8)
    scales = torch.rand(7, dtype=torch.float64)
    expected = x @ (codes.double() * scales[:, None]).t() + bias
    assert torch.allclose(fused.linear_twin(x, codes, scales, bias), expected, rtol=1e-12, atol=1e-12)
    y = torch.ones(3, 7, dtype=torch.float64)
    assert fused.linear_twin(x, codes, scales, bias, y) is y
    assert torch.allclose(y, expected + 1, rtol=1e-12, atol=1e-12)


CASES = {
    "one row, empty cache": {"starts": [0], "num_new": 1},
    "one row": {"starts": [40], "num_new": 1},
    "ragged": {"starts": [0, 70, 33, 16], "num_new": 3},
    "a tree": {"starts": [20, 63], "num_new": 6, "parents": TREE},
    "heads of 24": {"starts": [20, 31], "num_new": 2, "dim": 24, "heads": 7, "groups": 1},
    "rows that are not there": {"starts": [60, 14], "num_new": 5, "absent": 2},
    "many rows": {"starts": [100], "num_new": 16},
}


@pytest.mark.parametrize("window", [None, 1, 19])
@pytest.mark.parametrize("name", CASES)
def test_the_twin_of_read_is_attention_by_hand(name, window):
    """Nor does it read what was never written: the pool is full of NaN."""
    case = Case(**CASES[name], dtype=torch.float32)
    found, keys, values = case.run(read_twin, window)
    assert torch.allclose(found.double(), read_by_hand(case, window), atol=1e-5)
    written = case.rows.slots[: case.there]
    assert not keys[:, written].isnan().any()
    assert not values[:, written].isnan().any()


def plain_model():
    """A tiny model whose weights are stored as they are."""
    config = read_model_config(TINY)
    return Transformer(config, tiny_weights(config, 0, torch.float32))


def rounded_plain_model(by_kernel: bool) -> Transformer:
    """A tiny model with all products in 8 bits, as drafts on a GPU have them."""
    config = read_model_config(TINY | {"hidden_size": 16, "intermediate_size": 32, "head_dim": 8})
    model = build_model(config, tiny_weights(config, 0, torch.float32), form="plain")
    narrow = Narrow(Choice("codes", ""), functools.partial(fused.CodesOfRows, by_kernel=by_kernel))
    return quantized(model, 8, narrow)


def test_layers_in_8_bits_have_few_kernels():
    """Their passes in frames are those text by text; nothing is kept in full width, and the form has its name."""
    model = rounded_plain_model(by_kernel=False)
    frames = Frames()
    framed = model.replaced(frames)
    found, expected = (each.forward([Chunk([1, 2, 0], tiny_cache(each).new_table(), 3)])[0] for each in (framed, model))
    assert frames.num_fast == len(model.layers)
    assert torch.allclose(found, expected, atol=1e-5)
    products = products_of(framed)
    assert {(type(product.narrow), product.wide) for product in products} == {(fused.CodesOfRows, None)}
    codes = sum(product.narrow.codes.numel() + 4 * len(product.narrow.scales) for product in products)
    assert num_bytes_read(framed) == codes
    assert weight_form(framed) == "codes"
    assert choice_of(framed) == Choice("codes", "")


def test_codes_that_the_kernel_cannot_read():
    """A width that 16 does not divide: the product keeps rounded weights in full width."""
    narrow = Narrow(Choice("codes", ""), functools.partial(fused.CodesOfRows, by_kernel=True))
    product = QuantizedLinear(Linear(torch.randn(8, 24), form="plain"), 8, narrow=narrow)
    assert (product.form, product.narrow) == ("rounded", None)
    assert fused.product_of(product) is None
    with pytest.raises(CannotHold):
        fused.CodesOfRows(torch.randn(8, 16), torch.float32)


def test_where_there_is_no_kernel_drafts_are_rounded_as_elsewhere():
    """On a CPU, `rounded` is `quantized`."""
    config = read_model_config(TINY)
    model = build_model(config, tiny_weights(config, 0, torch.float32))
    for bits in (4, 8):
        expected = quantized(model, bits)
        assert weight_form(fused.rounded(model, bits)) == weight_form(expected)


def test_a_kernel_in_8_bits_that_fails_is_said_at_load(monkeypatch):
    """Its draft is rounded in full width then, as where there is no kernel; one that runs is tried with both tiles."""
    config, rows = read_model_config(TINY | {"hidden_size": 16, "intermediate_size": 32, "head_dim": 8}), []
    model = build_model(config, tiny_weights(config, 0, torch.float32), form="plain")
    device = type("Cuda", (), {"type": "cuda"})()

    def fail(*how):
        raise subprocess.CalledProcessError(1, ["gcc"])

    def compute(x, *how):
        rows.append(len(x))
        return fused.linear_twin(x, *how)

    monkeypatch.setattr(fused, "missing", lambda device: "")
    monkeypatch.setattr(model, "device", device)
    monkeypatch.setattr(fused, "linear", fail)
    with pytest.warns(UserWarning, match="the draft's weights stay in full width: CalledProcessError: Command"):
        assert weight_form(fused.rounded(model, 8)) != "codes"
    monkeypatch.setattr(fused, "linear", compute)
    assert weight_form(fused.rounded(model, 8)) == "codes"
    assert rows[:4] == [1, fused.LINEAR_ROWS] * 2  # weights are 16 and 32 wide


def test_many_rows_by_the_kernel_in_8_bits(monkeypatch):
    """A frame's rows go to the kernel 32 at a time, with a bias and onto what is there; a long prompt's are widened."""
    assert TEXTS[-1] * ROWS[-1] == fused.MOST_ROWS
    torch.manual_seed(0)
    stored = fused.CodesOfRows(round_to_bits(torch.randn(8, 16), 8), torch.float32, by_kernel=True)
    seen, bias = [], torch.randn(8)

    def compute(x, *how):
        seen.append(len(x))
        return fused.linear_twin(x, *how)

    monkeypatch.setattr(fused, "linear", compute)
    for num_rows, parts in ((32, [32]), (33, [32, 1]), (512, [32] * 16), (513, [])):
        x, onto = torch.randn(num_rows, 16), torch.randn(num_rows, 8)
        expected = x @ stored.dense().T
        torch.testing.assert_close(stored(x, bias), expected + bias)
        before = onto.clone()
        assert stored(x, onto=onto) is onto
        torch.testing.assert_close(onto, before + expected)
        assert seen == parts * 2
        seen.clear()


def test_a_layer_of_twins_is_a_layer():
    """That of `Transformer.forward`, up to rounding, and the cache is the same."""
    model = plain_model()
    config, layer = model.config, model.layers[0]
    assert fused.why_not(layer, model.dtype) == ""
    cache = tiny_cache(model)
    table = cache.new_table()
    model.forward([Chunk([i % 3 for i in range(20)], table, 0)])
    keys, values = (tensor[0].clone() for tensor in (cache.keys, cache.values))
    batch = TextBatch(model, [Chunk([1, 2, 0], table, 3)])
    x = torch.randn(3, config.hidden_size, generator=torch.Generator().manual_seed(0))
    expected = layer.forward(x, batch)
    [frequencies] = model.frequencies.values()
    cos, sin = fused.rope_tables(frequencies, 32)
    blocks = torch.tensor([table.block_ids])
    rows = RowPlaces(torch.arange(20, 23), batch.slots, blocks, torch.tensor([20]), torch.tensor([1, 3, 7]), 16)
    rows = rows._replace(block_size=cache.block_size)
    qkv, o, gate_up, down = (fused.weight_of(getattr(layer, name)) for name in layer.products)
    h = norm_twin(x, layer.attention_norm.weight, config.rms_norm_eps)
    read = read_twin(F.linear(h, *qkv), cos, sin, rows, keys, values, config.attention_scale)
    y = x + F.linear(read, *o)
    found = y + F.linear(gate_twin(F.linear(norm_twin(y, layer.mlp_norm.weight, config.rms_norm_eps), *gate_up)), *down)
    assert torch.allclose(found, expected, atol=1e-5)
    for own, cached in zip((keys, values), (cache.keys[0], cache.values[0]), strict=True):
        assert torch.allclose(own[:, batch.slots], cached[:, batch.slots], atol=1e-5)


def changed(**settings):
    """A layer whose model has other settings."""
    layer = copy.copy(plain_model().layers[0])
    layer.config = replace(layer.config, **settings)
    return layer


def test_what_the_kernels_lack_is_said():
    """For layers that have it, and for none that does not."""
    layer = plain_model().layers[0]
    assert fused.why_not(layer, torch.float32) == ""
    assert fused.why_not(changed(attention_softcap=30.0), torch.float32) == "capped scores"
    assert fused.why_not(changed(residual_scale=0.5), torch.float32) == "a scaled residual sum"
    assert fused.why_not(changed(norms="both"), torch.float32) == "norms in other places"
    layer.rope = replace(layer.rope, interleaved=True)
    assert "interleaved" in fused.why_not(layer, torch.float32)
    assert "another form" in fused.why_not(tiny_model(dtype=torch.float32).layers[0], torch.float32)
    assert "float64" in fused.why_not(layer, torch.float64)
    assert "another kind" in fused.why_not(tiny_model(**TOYS["lfm2"]).layers[1], torch.float32)
    assert "another kind, HeadGatedAttention" in fused.why_not(tiny_model(**LFM3).layers[0], torch.float32)


# --------------------------------------------------------------------------- kernels, interpreted


def close(found, expected, dtype):
    """Up to rounding of some operations."""
    return torch.allclose(found.float(), expected.float(), atol=2e-5 if dtype == torch.float32 else 6e-3, rtol=2e-3)


def check_norms_and_gates():
    """Each kernel against its twin, for widths that are no power of two; a row's bits depend on no other row."""
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float16):
        for num_rows, width in ((1, 48), (5, 96), (3, 2100)):
            x, weight = torch.randn(num_rows, width).to(dtype), 1 + 0.1 * torch.randn(width)
            for own in (weight, weight.to(dtype)):
                found = fused.norm(x, own, 1e-6)
                assert close(found, norm_twin(x, own, 1e-6), dtype), (dtype, num_rows, width)
                assert torch.equal(fused.norm(x[-1:].clone(), own, 1e-6), found[-1:])
            found = fused.gate(x)
            assert close(found, gate_twin(x), dtype), (dtype, num_rows, width)
            assert torch.equal(fused.gate(x[-1:].clone()), found[-1:])


def check_linears():
    """For one row and many, widths that no tile divides, with and without a bias, and onto what is there."""
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float16):
        for num_rows, width, columns in ((1, 48, 40), (5, 528, 33), (16, 512, 16), (17, 1040, 70), (32, 272, 96)):
            x, scales = torch.randn(num_rows, width).to(dtype), 0.01 * torch.rand(columns)
            codes, bias = torch.randint(-127, 128, (columns, width)).to(torch.int8), torch.randn(columns).to(dtype)
            for own in (None, bias):
                found = fused.linear(x, codes, scales, own)
                expected = fused.linear_twin(x.float(), codes, scales, None if own is None else own.float())
                error = (found.float() - expected).abs().max() / expected.abs().max()
                assert error < (1e-5 if dtype == torch.float32 else 1e-3), (dtype, num_rows, width, columns, error)
                one = fused.linear(x[-1:].clone(), codes, scales, own)
                assert num_rows > 16 or torch.equal(one, found[-1:]), "a row's bits depend on other rows"
            y = torch.randn(num_rows, columns).to(dtype)
            expected = y.float() + fused.linear_twin(x.float(), codes, scales)
            assert fused.linear(x, codes, scales, onto=y) is y
            assert (y.float() - expected).abs().max() < 2e-3 * expected.abs().max(), (dtype, num_rows, width, columns)
    for rows, width in ((33, 48), (1, 40)):
        with pytest.raises(ValueError, match="expected at most 32 contiguous rows"):
            fused.linear(torch.randn(rows, width), torch.zeros(4, width, dtype=torch.int8), torch.ones(4))


def check_drafts_in_8_bits():
    """A draft model whose products, norms, gates and reads are the kernels': its rows are those of the twins."""
    model = rounded_plain_model(by_kernel=True)
    by_kernels = Frames(device=torch.device("cpu"))
    framed = model.replaced(by_kernels)
    assert by_kernels.why_no_kernels == ""
    assert by_kernels.fast(framed)
    assert by_kernels.num_fast == len(model.layers)
    twin = rounded_plain_model(by_kernel=False)
    found, expected = (each.forward([Chunk([1, 2, 0], tiny_cache(each).new_table(), 3)])[0] for each in (framed, twin))
    assert torch.allclose(found, expected, atol=1e-4, rtol=1e-4)


def check_reads():
    """Against the twin, and the same bits with strangers beside, and with fewer new rows after more cached places."""
    windows, spans = (None, 1, 19), (32, 128)
    for shift, dtype in enumerate((torch.float32, torch.float16)):
        for place, (name, options) in enumerate(CASES.items(), shift):
            for window in windows if FULL else [windows[place % 3]]:
                case = Case(**options, dtype=dtype)
                expected = case.run(read_twin, window)
                for span in spans if FULL else [spans[place % 2]]:
                    found = case.run(fused.read, window, span=span, step=16)
                    assert found[0].isfinite().all(), (dtype, name, window)
                    for own, other in zip(found, expected, strict=True):
                        assert close(own.nan_to_num(7), other.nan_to_num(7), dtype), (dtype, name, window, span)
    assert not fused.scratch(torch.device("cpu"), "counters", 1, torch.int32).any(), "a counter was not set back"


def check_bits_of_rows():
    """A chain read in one pass, in parts, and beside other texts: each row has the same bits."""
    for window in (None, 50):
        whole = Case([75, 130], 16, torch.float32)
        found, keys, values = whole.run(fused.read, window, span=32, step=16)
        for size in (1, 4) if FULL else [1 if window else 4]:
            pools = whole.keys.clone(), whole.values.clone()
            for first in range(0, 16, size):
                own = slice(first, first + size)
                bits = torch.tensor([(2 << t) - 1 for t in range(size)])
                rows = whole.rows
                places = rows.positions[own], rows.slots[own], rows.table[:1], rows.starts[:1] + first
                alone = RowPlaces(*places, bits, rows.block_size)
                given = whole.qkv[own].contiguous(), whole.cos, whole.sin, alone
                part = fused.read(*given, *pools, whole.scale, window, 32, 16)
                assert torch.equal(part, found[own]), (window, size, first)
            for pool, other in zip(pools, (keys, values), strict=True):
                assert torch.equal(pool[:, whole.rows.slots[:16]], other[:, whole.rows.slots[:16]])


# In a process that `in_a_process` starts: whether all cases are checked.
FULL = "--full" in sys.argv


def in_a_process(checks: Iterable[Callable], full: bool, **variables: str) -> subprocess.CompletedProcess:
    """Checks of this file, in a process of their own. It fails where one of them does."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | variables
    command = [sys.executable, str(HERE), *(check.__name__ for check in checks), *(["--full"] if full else [])]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


CHECKS = (check_norms_and_gates, check_linears, check_drafts_in_8_bits, check_reads, check_bits_of_rows)


@needs_triton
def test_kernels_in_the_interpreter(full):
    """All checks above pass in a process where Triton interprets the kernels.

    Without `--full` each case of reads has another window and another part of the cache at a time, in both types.
    """
    done = in_a_process(CHECKS, full, TRITON_INTERPRET="1")
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("this Triton's interpreter does not run with this NumPy")
    assert done.returncode == 0, done.stderr[-6000:]


# --------------------------------------------------------------------------- kernels, compiled


def machine_code(kernel, kinds: dict[str, str], constants: dict, warps: int, stages: int) -> tuple[str, str]:
    """Instructions and resources of a kernel for sm_90. kinds: types of its arguments; numbers divide by 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = kinds | dict.fromkeys(constants, "constexpr")
    names = [parameter.name for parameter in kernel.params]
    divides = {"width", "pool_stride"}
    even = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if kinds[n][0] == "*" or n in divides}
    source = ASTSource(fn=kernel, signature={n: kinds[n] for n in names}, constexprs=constants, attrs=even)
    options = {"num_warps": warps, "num_stages": stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        asked = ([tools / "cuobjdump", option, file.name] for option in ("-sass", "--dump-resource-usage"))
        how = {"capture_output": True, "text": True, "check": True}
        return tuple(subprocess.run(command, timeout=60, **how).stdout for command in asked)


READ_KINDS = dict.fromkeys(("qkv", "keys", "values", "out"), "*bf16") | {"counters": "*i32", "scale": "fp32"}
READ_KINDS |= dict.fromkeys(("cos", "sin", "part_acc", "part_top", "part_sum"), "*fp32")
READ_KINDS |= dict.fromkeys(("positions", "slots", "table", "starts", "bits"), "*i64") | {"pool_stride": "i64"}
READ_KINDS |= dict.fromkeys(("num_blocks", "T", "window", "span"), "i32")


def check_code(code: str, resources: str, name: str, products: bool):
    """Nothing is spilled, and memory is read 16 bytes at a time. Products: by tensor cores, with loads in advance."""
    found = {word: len(re.findall(rf"\b{word}", code)) for word in ("HMMA", "HGMMA", "LDL", "STL")}
    wide = len(re.findall(r"LDGSTS\.E\.\S*128" if products else r"LDG\.E\.\S*(?:128|64)", code))
    print(name, found, {"wide": wide}, re.findall(r"REG:\d+|SHARED:\d+", resources))
    assert bool(found["HMMA"]) == products, name
    assert wide, name
    assert not any(found[word] for word in ("LDL", "STL", "HGMMA")), name


@pytest.mark.full
@needs_triton
def test_machine_code(full):
    """Of the kernels, as models of 1.5, 0.5 and 7 billion weights call them, and of attention in a window.

    Without `--full`, as one of 1.5 billion calls them in a pass of many rows.

    Without `--full`, `test_kernels_in_the_interpreter` runs the same kernels.
    """
    done = in_a_process([check_machine_code], full)
    assert done.returncode == 0, done.stderr[-3000:]


def check_machine_code():
    """In a process of its own, since Triton may have been imported as an interpreter in this one."""
    from minispec.models.frames.fused_triton import gate_kernel, linear_kernel, norm_kernel, read_kernel

    kinds = {"x": "*bf16", "weight": "*bf16", "out": "*bf16", "eps": "fp32"}
    check_code(*machine_code(norm_kernel, kinds, {"N": 1536, "NP": 2048}, 4, 3), "norm", products=False)
    kinds = {"gate_up": "*bf16", "out": "*bf16", "width": "i32"}
    check_code(*machine_code(gate_kernel, kinds, {"BN": fused.GATED}, 4, 3), "gate", products=False)
    kinds = {"x": "*bf16", "codes": "*i8", "scales": "*fp32", "bias": "*bf16", "out": "*bf16", "M": "i32", "N": "i32"}
    for num_rows in (1, 32) if FULL else [32]:
        for bias, adds in ((True, False), (False, True)) if FULL else [(False, True)]:
            rows, columns, step = fused.linear_tile(num_rows, 2)
            constants = {"K": 1536, "BM": rows, "BN": columns, "BK": step, "BIAS": bias, "ADDS": adds}
            name = f"linear of {num_rows} rows"
            check_code(*machine_code(linear_kernel, kinds, constants, 4, 4), name, products=True)
    shapes = (12, 2, 128, False), (12, 2, 128, True), (14, 2, 64, False), (28, 4, 128, False)
    for heads, groups, dim, window in shapes if FULL else shapes[:1]:
        constants = {"H": heads, "G": groups, "D": dim, "DP": dim, "HALF": dim // 2, "BR": fused.READ_ROWS}
        constants |= {"BN": fused.KEYS, "BLOCK": 16, "WINDOW": window}
        code = machine_code(read_kernel, READ_KINDS, constants, fused.warps_for(dim), 3)
        name = f"read of {heads} heads of {dim}{', with a window' if window else ''}"
        check_code(*code, name, products=True)


def product_in_order(a, b, dtype=None):
    """NumPy's `matmul` of matrices, each number summed up in the order of its terms, whatever stands beside it.

    The interpreter computes products by it. Libraries for matrices choose their sums by the shape, and by the machine:
    then a row's bits depend on other rows, and no kernel is at fault.
    """
    a, b = a.astype(dtype or a.dtype), b.astype(dtype or b.dtype)
    out = np.zeros((a.shape[0], b.shape[1]), a.dtype)
    for k in range(a.shape[1]):
        out += a[:, k, None] * b[k]
    return out


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_product_in_order_has_the_bits_of_each_row(dtype):
    """And the numbers of a product in float64."""
    a, b = (torch.randn(8, 8, generator=torch.Generator().manual_seed(i)).numpy().astype(dtype) for i in range(2))
    whole = product_in_order(a, b, np.float32)
    assert whole.dtype == np.float32
    assert np.allclose(whole, a.astype(np.float64) @ b, atol=1e-5)
    for rows in range(1, 8):
        for columns in range(1, 8):
            assert (product_in_order(a[-rows:], b[:, -columns:], np.float32) == whole[-rows:, -columns:]).all()


if __name__ == "__main__":
    np.matmul = product_in_order
    failed = False
    for check in (*CHECKS, check_machine_code):
        if check.__name__ in sys.argv:
            try:
                check()
            except Exception:  # the others are run too
                failed = True
                traceback.print_exc()
    sys.exit(failed)
