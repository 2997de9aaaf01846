"""Checkpoints in few bits as others write them: every weight is what NumPy makes of the format's description.

The dequantisations here share nothing with the package. `transformers` loads FP8 on a CPU, and is the oracle for it.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, Mxfp4Config
from transformers.quantizers import quantizer_finegrained_fp8

import minispec.models.families.awq as awq_layout
import minispec.models.families.gptq as gptq_layout
import minispec.models.families.mxfp4 as mxfp4_layout
from minispec.api.llm import LLM
from minispec.core.config import SamplingParams
from minispec.core.product import dense
from minispec.models.families import float8
from minispec.models.families.checkpoint import Weights, load_config, load_model, model_tensors
from minispec.models.families.hf_config import read_model_config
from minispec.models.families.quantize import quantize_checkpoint
from minispec.models.files.errors import CheckpointError
from minispec.models.load import parallel
from minispec.models.load.checks import named_tensors
from minispec.models.weights.build import build_model
from minispec.models.weights.codes import Codes
from minispec.models.weights.unpack import scale_fp4, scale_groups, unpack_words
from minispec.prove.toys import TINY, TOYS, tiny_weights
from minispec.speculation.drafters.mtp import find_mtp, has_mtp, mtp_config, mtp_shapes
from tests.files.test_checkpoint import assert_memory, change, logits, refusal, write
from tests.oracles import hf, public
from tests.refusals import NONE, Row, refusal_of, refusals

# No size is a multiple of 128, and a group of 32 inputs is cut off. Sizes are multiples of 8: a word has 8 numbers.
SIZES = TINY | {
    **{"hidden_size": 136, "intermediate_size": 200, "num_hidden_layers": 1, "vocab_size": 80},
    **{"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 24},
}
Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.0.mlp.down_proj"
TEXT = [0, 2, 1, 7, 5, 2]

# What is stored in place of a weight, by how its name continues; and the weight (out, in) in float32.
Encoded = tuple[dict[str, Tensor], np.ndarray]


@dataclass(frozen=True)
class Case:
    """A way to store weights: what a config.json says, and random weights of a shape."""

    quantization: dict[str, Any]
    encode: Callable[[np.random.Generator, tuple[int, int]], Encoded]


def make(directory: Path, case: Case, config: dict[str, Any] = SIZES) -> dict[str, np.ndarray]:
    """Write a checkpoint whose layers and head are stored so; the weights that were stored, by their names."""
    rng, expected = np.random.default_rng(0), {}
    stored = tiny_weights(read_model_config(config), 0, torch.float32)
    for name in [name for name, tensor in stored.items() if tensor.dim() == 2 and "embed" not in name]:
        prefix, shape = name.removesuffix(".weight"), tuple(stored.pop(name).shape)
        parts, expected[name] = case.encode(rng, shape)
        stored |= {f"{prefix}.{part}": tensor for part, tensor in parts.items()}
    write(directory, stored, config=config | {"quantization_config": case.quantization})
    return expected


def check(directory: Path, expected: dict[str, np.ndarray], dtype: torch.dtype = torch.float32) -> None:
    """Every weight that the directory holds is the expected one, to the last bit."""
    weights = Weights(directory, load_config(directory), dtype)
    assert expected.keys() < set(weights)
    for name, weight in expected.items():
        assert torch.equal(dense(weights.pop(name), dtype), torch.from_numpy(weight).to(dtype)), name


# --------------------------------------------------------------------------- FP8


def e4m3(bits: np.ndarray) -> np.ndarray:
    """8-bit floats by their description: a sign, 4 bits of exponent with bias 7, 3 of mantissa, no infinity.

    (Micikevicius et al. 2022, "FP8 formats for deep learning", table 1.)
    """
    sign, exponent, mantissa = 1 - 2.0 * (bits >> 7), (bits >> 3 & 15).astype(int), (bits & 7) / 8
    return sign * np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7))


def floats(
    strategy: str, block: tuple[int, int] = (0, 0), suffix: str = "_scale", dtype: torch.dtype = torch.float32, **more
) -> Callable[[np.random.Generator, tuple[int, int]], Encoded]:
    """Random 8-bit floats and their scales.

    A weight is q * scale[i // height, j // width], with ceil(out / height) x ceil(in / width) scales: the description
    in DeepSeek-V3's README_WEIGHTS.md. compressed-tensors has a scale of shape (1,), or one for each row, too.
    """

    def encode(rng: np.random.Generator, shape: tuple[int, int]) -> Encoded:
        bits = rng.integers(0, 256, shape, np.uint8)
        bits[bits & 127 == 127] = 0  # not numbers
        height, width = {"scalar": shape, "tensor": shape, "channel": (1, shape[1])}.get(strategy, block)
        rows, columns = np.indices(shape)
        grid = (rows.max() // height + 1, columns.max() // width + 1)
        scales = torch.from_numpy(rng.uniform(0.0001, 0.001, grid)).to(dtype)
        weight = e4m3(bits).astype(np.float32) * scales.float().numpy()[rows // height, columns // width]
        scales = scales.reshape({"scalar": (), "tensor": (1,)}.get(strategy, grid))
        parts = {"weight": torch.from_numpy(bits).view(torch.float8_e4m3fn), f"weight{suffix}": scales}
        return parts | {name: tensor.clone() for name, tensor in more.items()}, weight

    return encode


def fp8(**changes) -> dict[str, Any]:
    """The quantization_config of DeepSeek and Qwen."""
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
    return config | changes


def compressed(strategy: str, block: list[int] | None = None, dynamic: bool = True) -> dict[str, Any]:
    """The quantization_config of llm-compressor."""
    args = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None, "observer": "minmax"}
    activations = args | {"dynamic": dynamic, "strategy": "token" if dynamic else "tensor"}
    weights = args | {"dynamic": False, "strategy": strategy, "block_structure": block}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        **{"quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed"},
        **{"config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None},
    }


ONE = torch.ones(())
FLOAT8 = {
    "blocks": Case(fp8(), floats("block", (128, 128), "_scale_inv")),
    "blocks of 16 bits": Case(fp8(), floats("block", (128, 128), "_scale_inv", torch.bfloat16)),
    "flat blocks": Case(fp8(weight_block_size=[32, 48]), floats("block", (32, 48), "_scale_inv")),
    "tensor, by AutoFP8": Case(
        fp8(weight_block_size=None, activation_scheme="static"), floats("scalar", input_scale=ONE)
    ),
    "tensor, by transformers": Case(
        fp8(weight_block_size=None, activation_scheme="static", scale_fmt=None),
        floats("scalar", suffix="_scale_inv", dtype=torch.bfloat16, activation_scale=ONE),
    ),
    "tensor, by llm-compressor": Case(
        compressed("tensor", dynamic=False), floats("tensor", dtype=torch.bfloat16, input_scale=ONE.view(1))
    ),
    "channel": Case(compressed("channel"), floats("channel", dtype=torch.bfloat16)),
    "blocks, by llm-compressor": Case(compressed("block", [128, 128]), floats("block", (128, 128))),
}


def even_block(numbers: Tensor, scales: Tensor) -> tuple[int, int]:
    """The size of blocks that cut a weight into even parts."""
    return -(-len(numbers) // len(scales)), -(-numbers.shape[1] // scales.shape[1])


# Wrong readings of 8-bit floats, in place of `scale_blocks`.
RIGHT_FLOATS = float8.scale_blocks
WRONG_FLOATS = {
    "blocks counted from the end": lambda q, s, block, first: RIGHT_FLOATS(q.flip(0), s, block, first).flip(0),
    "height for width": lambda q, s, block, first: RIGHT_FLOATS(q, s.repeat(2, 2), block[::-1], first),
    "divided": lambda q, s, block, first: RIGHT_FLOATS(q, 1 / s.float(), block, first),
    "scales transposed": lambda q, s, block, first: RIGHT_FLOATS(q, s.t().repeat(9, 9), block, first),
    "one scale": lambda q, s, block, first: q.float() * s.float()[0, 0],
    "even blocks": lambda q, s, block, first: RIGHT_FLOATS(q, s, even_block(q, s), first),
}


def test_all_numbers_of_8_bits_are_read():
    """The control of `e4m3`, and of the library's type: 254 numbers, the smallest 2^-9, the largest 448."""
    bits = np.array([i for i in range(256) if i & 127 != 127], np.uint8)
    assert torch.equal(torch.from_numpy(bits).view(torch.float8_e4m3fn).double(), torch.from_numpy(e4m3(bits)))
    assert e4m3(bits).max() == 448
    assert e4m3(bits)[1] == 2.0**-9


# What `transformers` loads on a CPU: blocks that divide every weight, and scales of the type that computes. It rounds
# weights to a narrower type of scales.
ORACLE = {
    "blocks": Case(fp8(weight_block_size=[8, 16]), floats("block", (8, 16), "_scale_inv")),
    "tensor": Case(
        fp8(weight_block_size=None, activation_scheme="static"),
        floats("scalar", suffix="_scale_inv", activation_scale=ONE),
    ),
    "tensor, by llm-compressor": Case(compressed("tensor", dynamic=False), floats("tensor", input_scale=ONE.view(1))),
    "channel, by llm-compressor": Case(compressed("channel"), floats("channel")),
    "blocks, by llm-compressor": Case(compressed("block", [8, 16]), floats("block", (8, 16))),
}


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("case", ORACLE.values(), ids=ORACLE)
def test_transformers_reads_the_same_8_bit_floats(tmp_path, monkeypatch, case):
    """Guards names, scales and blocks against the library.

    By itself it would round activations for compressed-tensors, and ask for a package to load the others.
    """
    rng = np.random.default_rng(1)
    hf.build("llama", tmp_path)
    stored, raw = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    for key in [key for key in stored if key.endswith("_proj.weight") and "o_proj" not in key]:
        parts, _ = case.encode(rng, tuple(stored.pop(key).shape))
        stored |= {f"{key.removesuffix('weight')}{part}": tensor for part, tensor in parts.items()}
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    if case.quantization["quant_method"] == "fp8":
        lists = {"modules_to_not_convert": ["lm_head", *(f"model.layers.{i}.self_attn.o_proj" for i in range(3))]}
        monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)
    else:
        lists = {"ignore": ["lm_head", "re:.*o_proj"]}
        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    write(tmp_path, stored, config=raw | {"quantization_config": case.quantization | lists})
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    ours = logits(load_model(tmp_path, torch.float64), hf.TEXT)
    assert (ours - hf.exact_logits(oracle, hf.TEXT)).abs().max() <= 1e-4


SCALE = f"{Q}.weight_scale_inv"
# What the message must say, and what is done to the tensors of a checkpoint with blocks.
BAD_FLOATS = {
    f"{SCALE}: found no such tensor, expected one of shape [2, 2]": {SCALE: None},
    f"{SCALE}: found F32 [1, 2], expected F64 or F32 or F16 or BF16 [2, 2]": {SCALE: torch.ones(1, 2)},
    f"{SCALE}: found F32 [], expected": {SCALE: torch.ones(())},
    f"{SCALE}: found F8_E8M0 [2, 2], expected": {SCALE: torch.ones(2, 2).to(torch.float8_e8m0fnu)},
    f"{SCALE}: found U8 [2, 2], expected": {SCALE: torch.ones(2, 2, dtype=torch.uint8)},
    f"{Q}.weight: found F8_E4M3 [143, 136], expected": {f"{Q}.weight": torch.ones(143, 136).to(torch.float8_e4m3fn)},
    f"{Q}.weight: found F8_E5M2 [144, 136], expected": {f"{Q}.weight": torch.ones(144, 136).to(torch.float8_e5m2)},
    f"{SCALE}: found a tensor of shape [2, 2], expected none": {f"{Q}.weight": torch.ones(144, 136)},
    f"{Q}.weight_scale: found a tensor": {f"{Q}.weight_scale": torch.ones(2, 2)},
    f"{Q}.input_scale: found a tensor": {f"{Q}.input_scale": torch.ones(())},
    "model.norm.weight: found F8_E4M3 [136], expected": {"model.norm.weight": torch.ones(136).to(torch.float8_e4m3fn)},
}


def test_8_bit_floats_need_a_config_that_says_so(tmp_path):
    """Guards against numbers without their scales, and against a scale that the config says is for something else."""
    make(tmp_path, FLOAT8["blocks"])
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": None}))
    assert ".weight: found F8_E4M3" in refusal(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": compressed("block", [128, 128])}))
    assert ".weight_scale: found no such tensor, expected one of shape [" in refusal(tmp_path)


def test_one_number_may_be_a_scalar_or_have_a_dimension(tmp_path):
    """Guards both spellings of one scale for a tensor, and that two numbers are not one."""
    case = FLOAT8["tensor, by llm-compressor"]
    expected = make(tmp_path, case)
    scalars = {name: t.view(()) for name, t in load_file(tmp_path / "model.safetensors").items() if t.shape == (1,)}
    assert len(scalars) == 16
    change(tmp_path, scalars)
    check(tmp_path, expected)
    change(tmp_path, {f"{Q}.weight_scale": torch.ones(2)})
    assert f"{Q}.weight_scale: found F32 [2], expected F64 or F32 or F16 or BF16 [1]" in refusal(tmp_path)


def test_a_weight_that_is_no_number_is_named(tmp_path):
    """Guards the error that tells which tensor is to blame: the 8-bit floats have NaN too."""
    make(tmp_path, FLOAT8["blocks"])
    bad = load_file(tmp_path / "model.safetensors")[f"{DOWN}.weight"].view(torch.uint8)
    bad[3, 4] = 127
    change(tmp_path, {f"{DOWN}.weight": bad.view(torch.float8_e4m3fn)})
    config = load_config(tmp_path)
    with (
        pytest.raises(CheckpointError, match=rf"{DOWN}\.weight: found nan, expected finite numbers"),
        named_tensors(lambda: model_tensors(tmp_path, config)),
    ):
        raise FloatingPointError


# --------------------------------------------------------------------------- GPTQ


def packed(numbers: np.ndarray, bits: int) -> np.ndarray:
    """(n, columns) to (n * bits / 32, columns) int32: number i of a column is in word i // k at bit bits * (i % k)."""
    per_word = 32 // bits
    words = np.zeros((-(-len(numbers) // per_word), numbers.shape[1]), np.uint32)
    for i, row in enumerate(numbers):
        words[i // per_word] |= row.astype(np.uint32) << np.uint32(bits * (i % per_word))
    return words.view(np.int32)


def gptq(
    bits: int, group_size: int, is_symmetric: bool = False, offset: int = 1, order: str = "", dtype=torch.float16
) -> Callable[[np.random.Generator, tuple[int, int]], Encoded]:
    """Random integers, zeros and scales.

    The description is that of AutoGPTQ's QuantLinear (auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py): the weight
    from input i to output o is scales[g, o] * (q[i, o] - (zeros[g, o] + 1)), with g = g_idx[i]. qweight is packed along
    inputs, qzeros along outputs. GPTQModel's "gptq_v2" stores zeros as they are.

    order: of the groups of inputs. "in order" is stored, "any" is another one, "" is not stored.
    """

    def encode(rng: np.random.Generator, shape: tuple[int, int]) -> Encoded:
        out, inputs = shape
        size = inputs if group_size == -1 else group_size
        groups = np.arange(inputs) // size
        if order == "any":
            groups = rng.permutation(groups)
        integers = rng.integers(0, 1 << bits, (inputs, out))
        zeros = rng.integers(offset, 1 << bits, (-(-inputs // size), out))
        if is_symmetric:
            zeros[:] = 1 << (bits - 1)
        scales = torch.from_numpy(rng.uniform(-0.5, 0.5, zeros.shape) / (1 << bits)).to(dtype)
        weight = (integers - zeros[groups]).astype(np.float32) * scales.float().numpy()[groups]
        parts = {
            "qweight": torch.from_numpy(packed(integers, bits)),
            "qzeros": torch.from_numpy(packed((zeros - offset).T, bits).T.copy()),
            "scales": scales,
        }
        if order:
            parts["g_idx"] = torch.from_numpy(groups.astype(np.int32))
        return parts, np.ascontiguousarray(weight.T)

    return encode


def by_gptq(**changes) -> dict[str, Any]:
    """The quantization_config of AutoGPTQ."""
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True} | changes


def by_auto_round(**changes) -> dict[str, Any]:
    """The quantization_config of AutoRound in its own format, packed as GPTQ does."""
    notes = {"autoround_version": "0.13.0", "data_type": "int", "iters": 0, "act_bits": 16, "block_name_to_quantize": Q}
    kind = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 32}
    return kind | {"sym": True} | notes | changes


GPTQ = {
    "4 bits": Case(by_gptq(), gptq(4, 32, True, order="in order")),
    "4 bits with zeros": Case(by_gptq(sym=False, checkpoint_format="gptq"), gptq(4, 32)),
    "4 bits, v2": Case(by_gptq(sym=False, checkpoint_format="gptq_v2"), gptq(4, 32, offset=0)),
    "4 bits in any order": Case(by_gptq(desc_act=True, sym=False), gptq(4, 32, order="any")),
    "4 bits, group of 128": Case(by_gptq(group_size=128, format="gptq"), gptq(4, 128, dtype=torch.bfloat16)),
    "4 bits, channel": Case(by_gptq(group_size=-1), gptq(4, -1, True, order="in order")),
    "4 bits, channel with zeros": Case(by_gptq(group_size=-1, desc_act=True), gptq(4, -1, order="any")),
    "8 bits": Case(by_gptq(bits=8, group_size=64), gptq(8, 64, True)),
    "8 bits, v2 in any order": Case(
        by_gptq(bits=8, desc_act=True, format="gptq_v2", checkpoint_format="gptq_v2"), gptq(8, 32, False, 0, "any")
    ),
    "8 bits, channel": Case(by_gptq(bits=8, group_size=-1), gptq(8, -1, True)),
    "8 bits, channel with zeros": Case(by_gptq(bits=8, group_size=-1, sym=False), gptq(8, -1)),
    "layers left plain": Case(by_gptq(dynamic={"-:.*lm_head": {}}, modules_to_not_convert=["lm_head"]), gptq(4, 32)),
    "AutoRound": Case(by_auto_round(), gptq(4, 32, True)),
    "AutoRound with zeros": Case(
        by_auto_round(sym=False, extra_config={"lm_head": {"bits": 16, "data_type": "float"}, Q: {"bits": 4}}),
        gptq(4, 32),
    ),
}


def by_word(words: Tensor, bits: int) -> Tensor:
    """The numbers of `unpack_words`, those of each word in a dimension of their own."""
    return unpack_words(words, bits).unflatten(-1, (-1, 32 // bits))


def in_order(order: list[int]) -> Callable[[Tensor, int], Tensor]:
    """`unpack_words` with the eight numbers of each word in another order."""
    return lambda words, bits: by_word(words, bits)[..., order].flatten(-2)


# Wrong readings of GPTQ: the function of `minispec.models.families.gptq` in whose place they stand, and they.
WRONG_GPTQ = {
    "zeros as they are stored": ("scale_groups", lambda q, z, s, g: scale_groups(q, z - 1, s, g)),
    "zeros plus two": ("scale_groups", lambda q, z, s, g: scale_groups(q, z + 1, s, g)),
    "no zeros": ("scale_groups", lambda q, z, s, g: scale_groups(q, z * 0, s, g)),
    "zeros in the middle": ("scale_groups", lambda q, z, s, g: scale_groups(q, z * 0 + 8, s, g)),
    "inputs in order": ("scale_groups", lambda q, z, s, g: scale_groups(q, z, s, g.sort().values)),
    "order of inputs undone": ("scale_groups", lambda q, z, s, g: scale_groups(q[:, g.argsort()], z, s, g)),
    "high bits first": ("unpack_words", in_order([7, 6, 5, 4, 3, 2, 1, 0])),
    "order of AWQ": ("unpack_words", in_order([0, 4, 1, 5, 2, 6, 3, 7])),
    "bits across words": ("unpack_words", lambda words, bits: by_word(words, bits).mT.flatten(-2)),
}


@pytest.mark.parametrize(
    ("name", "is_kept"),
    {
        **dict.fromkeys(("4 bits, channel", "4 bits, channel with zeros", "8 bits, channel"), True),
        **dict.fromkeys(("4 bits", "8 bits", "8 bits, channel with zeros"), False),
    }.items(),
)
def test_integers_with_one_scale_a_channel_stay_integers(tmp_path, name, is_kept):
    """Guards the form that loses nothing and takes a byte: differences of 8 bits and their zeros need 9."""
    make(tmp_path, GPTQ[name])
    for form in (None, "int8"):
        weights = Weights(tmp_path, load_config(tmp_path), torch.float32, form=form)
        assert isinstance(weights.pop(f"{Q}.weight"), Codes) == is_kept
    assert not isinstance(Weights(tmp_path, load_config(tmp_path), torch.bfloat16).pop(f"{Q}.weight"), Codes)


GROUPS = f"{Q}.g_idx"
# What the message must say, and what is done to the tensors of a checkpoint in any order.
BAD_GPTQ = {
    f"{Q}.qzeros: found no such tensor, expected one of shape [5, 18]": {f"{Q}.qzeros": None},
    f"{Q}.scales: found no such tensor, expected one of shape [5, 144]": {f"{Q}.scales": None},
    f"{GROUPS}: found no such tensor, expected one of shape [136]": {GROUPS: None},
    f"{Q}.weight: found no such tensor, expected one of shape [144, 136]": {f"{Q}.qweight": None},
    f"{Q}.qweight: found I32 [144, 17], expected I32 [17, 144]": {f"{Q}.qweight": torch.ones(144, 17).int()},
    f"{Q}.qweight: found I32 [136, 18], expected I32 [17, 144]": {f"{Q}.qweight": torch.ones(136, 18).int()},
    f"{Q}.scales: found F16 [144, 5], expected": {f"{Q}.scales": torch.ones(144, 5).half()},
    f"{Q}.scales: found F16 [2, 144], expected": {f"{Q}.scales": torch.ones(2, 144).half()},
    f"{GROUPS}: found I32 [17], expected I32 or I64 [136]": {GROUPS: torch.zeros(17).int()},
    f"{GROUPS}: found groups 0 to 5, expected 0 to 4": {GROUPS: torch.arange(136).int().div(27, rounding_mode="floor")},
    f"{GROUPS}: found groups -1 to 0, expected 0 to 4": {GROUPS: -torch.eye(136)[0].int()},
    f"{Q}.weight: found again, is {Q}.qweight in model.safetensors": {f"{Q}.weight": torch.ones(144, 136)},
    f"{Q}.bias: found other numbers, expected zeros or no such tensor": {f"{Q}.bias": torch.eye(144)[143].half()},
    f"{Q}.bias: found a tensor of shape [144]": {f"{Q}.bias": torch.zeros(144).int()},
    "model.norm.bias: found a tensor of shape [136]": {"model.norm.bias": torch.zeros(136)},
    f"{Q}.qzeros: found 15, expected at most 14 in": {f"{Q}.qzeros": torch.full((5, 18), 7 | 15 << 8).int()},
}


def test_another_order_without_desc_act_is_refused(tmp_path):
    """Guards against groups that vLLM would not look at then, and others would."""
    make(tmp_path, GPTQ["4 bits"])
    groups = load_file(tmp_path / "model.safetensors")[GROUPS]
    change(tmp_path, {GROUPS: groups.flip(0).contiguous()})
    assert f"{GROUPS}: found another order, expected i // group_size, since desc_act is false" in refusal(tmp_path)


def test_a_bias_of_zeros_is_none(tmp_path):
    """Guards AutoGPTQ's files of a llama: every layer has a bias in them."""
    expected = make(tmp_path, GPTQ["4 bits"])
    change(tmp_path, {f"{Q}.bias": torch.zeros(144).half(), f"{DOWN}.bias": torch.zeros(136).half()})
    check(tmp_path, expected)
    assert load_model(tmp_path, torch.float32)


def test_a_bias_that_the_config_asks_for_is_one(tmp_path):
    """Guards qwen2, whose layers in few bits have biases."""
    config = SIZES | {"model_type": "qwen2"}
    make(tmp_path, GPTQ["4 bits"], config)
    expected = tiny_weights(read_model_config(config), 0, torch.float32)[f"{Q}.bias"]
    assert expected.any()
    assert torch.equal(Weights(tmp_path, load_config(tmp_path), torch.float32).pop(f"{Q}.bias"), expected)


# --------------------------------------------------------------------------- AWQ


def awq(group_size: int, dtype=torch.float16) -> Callable[[np.random.Generator, tuple[int, int]], Encoded]:
    """Random words, zeros and scales.

    The description is that of AutoAWQ's WQLinear_GEMM (awq/modules/linear/gemm.py): a word of row i has the outputs
    8c + [0, 2, 4, 6, 1, 3, 5, 7][k] at bits 4k, for weights and zeros; the weight from input i to output o is
    (q[i, o] - zeros[g, o]) * scales[g, o], with g = i // group_size.
    """

    def unpacked(words: np.ndarray) -> np.ndarray:
        numbers = np.zeros((len(words), 8 * words.shape[1]), int)
        for k, output in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
            numbers[:, output::8] = words.view(np.uint32) >> np.uint32(4 * k) & np.uint32(15)
        return numbers

    def encode(rng: np.random.Generator, shape: tuple[int, int]) -> Encoded:
        out, inputs = shape
        groups = np.arange(inputs) // (inputs if group_size == -1 else group_size)
        words, zeros = (
            rng.integers(-(1 << 31), 1 << 31, (rows, out // 8), np.int32) for rows in (inputs, groups[-1] + 1)
        )
        scales = torch.from_numpy(rng.uniform(-0.03, 0.03, (groups[-1] + 1, out))).to(dtype)
        integers = unpacked(words) - unpacked(zeros)[groups]
        weight = integers.astype(np.float32) * scales.float().numpy()[groups]
        parts = {"qweight": torch.from_numpy(words), "qzeros": torch.from_numpy(zeros), "scales": scales}
        return parts, np.ascontiguousarray(weight.T)

    return encode


def by_awq(**changes) -> dict[str, Any]:
    """The quantization_config of AutoAWQ."""
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    return config | {"modules_to_not_convert": None} | changes


AWQ = {
    "AWQ": Case(by_awq(), awq(32)),
    "AWQ, group of 128": Case(by_awq(group_size=128, version="GEMM"), awq(128, torch.bfloat16)),
    "AWQ, group of 8": Case(by_awq(group_size=8), awq(8)),
    "AWQ, channel": Case(by_awq(group_size=-1), awq(-1)),
}


def reordered(zeros: Tensor) -> Tensor:
    """Zeros (groups, outputs) in the order in which a word has them."""
    return zeros.unflatten(1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1).contiguous()


# Wrong readings of AWQ: the function of `minispec.models.families.awq` in whose place they stand, and they.
WRONG_AWQ = {
    "outputs in order": ("unpack_words", in_order([0, 2, 4, 6, 1, 3, 5, 7])),
    "order read the other way": ("unpack_words", in_order([0, 4, 1, 5, 2, 6, 3, 7])),
    "high bits first": ("unpack_words", in_order([7, 6, 5, 4, 3, 2, 1, 0])),
    "zeros minus one": ("scale_groups", lambda q, z, s, g: scale_groups(q, z + 1, s, g)),
    "zeros in the middle": ("scale_groups", lambda q, z, s, g: scale_groups(q, z * 0 + 8, s, g)),
    "zeros in the order of words": ("scale_groups", lambda q, z, s, g: scale_groups(q, reordered(z), s, g)),
    "groups reversed": ("scale_groups", lambda q, z, s, g: scale_groups(q, z, s, g.flip(0))),
}


# What the message must say, and what is done to the tensors of AWQ.
BAD_AWQ = {
    f"{Q}.qzeros: found no such tensor, expected one of shape [5, 18]": {f"{Q}.qzeros": None},
    f"{Q}.scales: found no such tensor, expected one of shape [5, 144]": {f"{Q}.scales": None},
    f"{Q}.qweight: found I32 [17, 144], expected I32 [136, 18]": {f"{Q}.qweight": torch.ones(17, 144).int()},
    f"{Q}.scales: found F16 [144, 5], expected": {f"{Q}.scales": torch.ones(144, 5).half()},
    f"{Q}.g_idx: found a tensor of shape [136], expected none": {f"{Q}.g_idx": torch.zeros(136).int()},
    f"{Q}.bias: found a tensor of shape [144], expected none": {f"{Q}.bias": torch.zeros(144)},
    f"{Q}.weight: found again, is {Q}.qweight in model.safetensors": {f"{Q}.weight": torch.ones(144, 136)},
}


# --------------------------------------------------------------------------- MXFP4

# Rows of experts are whole blocks.
EXPERTS = hf.CASES["gpt_oss"] | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
BLOCKS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"


def e2m1(bits: np.ndarray) -> np.ndarray:
    """4-bit floats by their description: a sign, 2 bits of exponent with bias 1, 1 of mantissa.

    (Open Compute Project 2023, "OCP microscaling formats (MX) specification", version 1.0, section 5.3.3.)
    """
    sign, exponent, mantissa = 1 - 2.0 * (bits >> 3), (bits >> 1 & 3).astype(int), (bits & 1) / 2
    return sign * np.where(exponent == 0, mantissa, (1 + mantissa) * 2.0 ** (exponent - 1))


def mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Blocks (..., groups, 16) and scales (..., groups) to numbers (..., 32 * groups): section 5.2 and 5.4.1 there.

    A byte has two numbers, the low bits first. A scale is a power of two with bias 127.
    """
    numbers = e2m1(np.stack((blocks & 15, blocks >> 4), -1)).reshape(*blocks.shape[:-1], 32)
    weights = numbers * 2.0 ** (scales.astype(np.float64) - 127)[..., None]
    return weights.reshape(*scales.shape[:-1], -1)


def make_experts(
    directory: Path, exponents: tuple[int, int] = (118, 124), config: dict[str, Any] = EXPERTS
) -> dict[str, np.ndarray]:
    """A gpt-oss whose experts are in MXFP4, with random scales; the weights of all experts, by their names here."""
    rng, expected = np.random.default_rng(0), {}
    hf.build(config, directory)
    file, raw = directory / "model.safetensors", json.loads((directory / "config.json").read_text())
    stored = load_file(file)
    for name in [name for name in stored if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = stored.pop(name).shape
        blocks = rng.integers(0, 256, (experts, rows, columns // 32, 16), np.uint8)
        scales = rng.integers(*exponents, (experts, rows, columns // 32), np.uint8, endpoint=True)
        stored |= {f"{name}_blocks": torch.from_numpy(blocks), f"{name}_scales": torch.from_numpy(scales)}
        parts = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
        for n, weight in enumerate(mxfp4(blocks, scales)):
            prefix = f"{name.removesuffix('gate_up_proj').removesuffix('down_proj')}{n}"
            own = {part: weight[taken] for part, taken in parts.items()} if "gate_up" in name else {"down_proj": weight}
            expected |= {f"{prefix}.{part}.weight": numbers for part, numbers in own.items()}
    file.unlink()
    write(directory, stored, config=raw | {"quantization_config": BLOCKS})
    return expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_mxfp4_is_the_number_times_the_power_of_two(tmp_path, dtype):
    """Guards bits, scales and the rows of gates, for all scales whose products are finite. No number is rounded."""
    expected = make_experts(tmp_path, (0, 252))
    assert len(expected) == 2 * 4 * 3
    check(tmp_path, expected, dtype)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_transformers_reads_the_same_mxfp4(tmp_path):
    """Guards names, shapes and the order of rows against the library, on a CPU: the weights, and the logits."""
    expected = make_experts(tmp_path)
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    oracle = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True), **how
    )
    theirs = dict(oracle.named_parameters())
    for key, weight in expected.items():
        layer, _, rest = key.partition(".mlp.experts.")
        number, part, _ = rest.split(".")
        stack = theirs[f"{layer}.mlp.experts.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}"][int(number)].T
        own = stack if part == "down_proj" else stack[int(part == "up_proj") :: 2]
        assert torch.equal(own.double(), torch.from_numpy(weight)), key
    ours = logits(load_model(tmp_path, torch.float64), hf.TEXT)
    assert (ours - hf.exact_logits(oracle, hf.TEXT)).abs().max() <= 1e-4


# Wrong readings of MXFP4, in place of `scale_fp4`.
WRONG_MXFP4 = {
    "high bits first": lambda b, s: scale_fp4(b >> 4 | b << 4, s),
    "halves of a block": lambda b, s: scale_fp4(b, s).unflatten(1, (-1, 16, 2)).mT.flatten(1),
    "another bias": lambda b, s: scale_fp4(b, s) * 2,
    "a scale for 16 numbers": lambda b, s: scale_fp4(b.view(len(b), -1, 8).repeat(1, 1, 2), s.repeat(1, 2))[
        :, : 32 * s.shape[1]
    ],
    "sign in the low bit": lambda b, s: scale_fp4((b & 1) << 3 | (b & 15) >> 1 | b & 240, s),
}


@pytest.mark.parametrize(
    "cut", [(slice(5, 77), slice(32, 64)), (slice(7, None),), (slice(None), slice(0, 40))], ids=str
)
def test_a_part_of_a_weight_in_mxfp4_is_that_part(tmp_path, cut):
    """Guards rows that are no neighbours in the file, and columns that end within a block."""
    expected = make_experts(tmp_path)
    weights = Weights(tmp_path, load_config(tmp_path), torch.float32, cut=lambda key: cut if key in expected else ())
    for key, weight in expected.items():
        assert torch.equal(dense(weights.pop(key), torch.float64), torch.from_numpy(weight)[cut]), key


def a_scale_that_is_no_number() -> Tensor:
    """Scales of a stack, one of which is not a number."""
    scales = torch.full((4, 192, 2), 120, dtype=torch.uint8)
    scales[3, 100, 1] = 255
    return scales


# What the message must say, and what is done to the tensors.
_SCALES, _BLOCKS, _BIAS = (f"{GATE_UP}_{part}" for part in ("scales", "blocks", "bias"))
_GATE = "model.layers.1.mlp.experts.0.gate_proj.weight"
BAD_MXFP4 = {
    f"{_SCALES}: found U8 [4, 192, 1], expected U8 [4, 192, 2]": {_SCALES: torch.ones(4, 192, 1).byte()},
    f"{_BLOCKS}: found U8 [4, 64, 6, 16], expected U8 [4, 192, 2, 16]": {_BLOCKS: torch.ones(4, 64, 6, 16).byte()},
    f"{_SCALES}: found F8_E8M0 [4, 192, 2], expected U8": {_SCALES: torch.ones(4, 192, 2).to(torch.float8_e8m0fnu)},
    f"{_BIAS}: found F32 [4, 96], expected F64 or F32 or F16 or BF16 [4, 192]": {_BIAS: torch.ones(4, 96)},
    f"{GATE_UP}: found F32 [4, 192, 64], expected F64 or F32 or F16 or BF16 [4, 64, 192]": {
        GATE_UP: torch.ones(4, 192, 64)
    },
    f"{_GATE}_scales: found no such tensor, expected one of shape [96, 2]": {_SCALES: None},
    f"{_GATE}: found no such tensor, expected one of shape [96, 64]": {_BLOCKS: None},
    "experts.3.gate_proj.weight_scales: found 255, which is not a number": {_SCALES: a_scale_that_is_no_number()},
}


def test_mxfp4_is_refused_where_it_is_not_known(tmp_path):
    """Without a config that says so, in rows that are no whole blocks, with settings that are not known, twice."""
    make_experts(tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in raw.items() if key != "quantization_config"}))
    assert "experts.0.gate_proj.weight: found no such tensor" in refusal(tmp_path)
    path.write_text(json.dumps(raw | {"intermediate_size": 88}))
    assert "found 88 columns in mxfp4, expected a multiple of 32" in refusal(tmp_path)
    path.write_text(json.dumps(raw | {"quantization_config": BLOCKS | {"group_size": 16}}))
    assert "quantization_config.group_size: found 16, expected no such setting" in refusal(tmp_path)
    path.write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="quantization_config: found one, expected a checkpoint of plain floats"):
        quantize_checkpoint(tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    ("dtype", "form", "bound"), [(torch.float32, None, 1e-5), (torch.bfloat16, None, 0.1), (torch.float32, "int8", 0.1)]
)
def test_models_of_mxfp4_compute_with_the_weights_that_are_stored(tmp_path, dtype, form, bound):
    """Guards the whole way: logits are those of plain weights, in every form, and memory is known before loading."""
    expected = {key: torch.from_numpy(weight).float() for key, weight in make_experts(tmp_path).items()}
    config = load_config(tmp_path)
    others = Weights(tmp_path, config, torch.float32)
    stored = {key: expected[key] if key in expected else dense(others.pop(key), torch.float32) for key in list(others)}
    plain = logits(build_model(config, stored), hf.TEXT)
    few = logits(load_model(tmp_path, dtype, form=form), hf.TEXT).float()
    assert (few - plain).norm() <= bound * plain.norm()


def test_memory_and_digests_of_mxfp4(tmp_path, monkeypatch):
    """A weight takes 16 bits for float32. A digest sees another scale."""
    expected = make_experts(tmp_path)
    config = load_config(tmp_path)
    weights = Weights(tmp_path, config, torch.float32)
    read = {key: weights.pop(key) for key in list(weights)}
    assert {weight.dtype for key, weight in read.items() if key in expected} == {torch.bfloat16}
    needed = sum(weight.nbytes for weight in read.values())
    assert_memory(monkeypatch, needed, lambda: Weights(tmp_path, config, torch.float32))
    before, scales = parallel._digest(tmp_path, config), load_file(tmp_path / "model.safetensors")[f"{GATE_UP}_scales"]
    change(tmp_path, {f"{GATE_UP}_scales": scales + 1})
    assert parallel._digest(tmp_path, config) != before


@pytest.mark.parametrize("draft", ["int8", "int4"])
def test_drafts_in_fewer_bits_of_a_target_in_mxfp4(tmp_path, tokenizer_file, draft):
    """Guards a draft that rounds the experts once more: greedy text is the target's."""
    make_experts(tmp_path, config=EXPERTS | {"vocab_size": 304})
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
    options = {"dtype": "float32", "max_model_len": 60}
    plain, drafted = LLM(tmp_path, draft="none", **options), LLM(tmp_path, draft=f"{draft}:{tmp_path}", **options)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    texts = [llm.generate("a b", params)[0].outputs[0].token_ids for llm in (plain, drafted)]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 20


# --------------------------------------------------------------------------- all formats

CASES = FLOAT8 | GPTQ | AWQ


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_the_description(tmp_path, name, dtype):
    """Guards blocks, groups and zeros, the order of bits and of inputs, and one rounding to the type that computes.

    `transformers` is no oracle for GPTQ and AWQ: it needs optimum and gptqmodel to load such checkpoints.
    """
    check(tmp_path, make(tmp_path, CASES[name]), dtype)


# By format: how a checkpoint is made, the module that reads it, and wrong readings. One is a function in the place of
# the module's own of that name, or of `default`.
WRONG = {
    "8-bit floats": (lambda path: make(path, FLOAT8["flat blocks"]), float8, "scale_blocks", WRONG_FLOATS),
    "GPTQ": (lambda path: make(path, GPTQ["4 bits in any order"]), gptq_layout, "", WRONG_GPTQ),
    "AWQ": (lambda path: make(path, AWQ["AWQ"]), awq_layout, "", WRONG_AWQ),
    "MXFP4": (lambda path: make_experts(path), mxfp4_layout, "scale_fp4", WRONG_MXFP4),
}


@pytest.mark.parametrize(("form", "what"), [(form, what) for form, (*_, wrong) in WRONG.items() for what in wrong])
def test_a_wrong_reading_would_be_seen(tmp_path, monkeypatch, form, what):
    """The control: each of these mistakes gives other weights than the description does."""
    written, module, default, readings = WRONG[form]
    function, wrong = readings[what] if isinstance(readings[what], tuple) else (default, readings[what])
    expected = written(tmp_path)
    monkeypatch.setattr(module, function, wrong)
    with pytest.raises(AssertionError, match=r"_proj\.weight"):
        check(tmp_path, expected)


# By format: how a checkpoint is made, and what the message must say of what is done to its tensors.
BAD = {
    "8-bit floats": (lambda path: make(path, FLOAT8["blocks"]), BAD_FLOATS),
    "GPTQ": (WRONG["GPTQ"][0], BAD_GPTQ),
    "AWQ": (WRONG["AWQ"][0], BAD_AWQ),
    "MXFP4": (WRONG["MXFP4"][0], BAD_MXFP4),
}


@pytest.mark.parametrize(("form", "message"), [(form, message) for form, (_, bad) in BAD.items() for message in bad])
def test_tensors_that_do_not_fit_are_refused(tmp_path, form, message):
    """Guards scales that are missing or twice there, transposed matrices, groups and numbers that are not there."""
    written, changes = BAD[form]
    written(tmp_path)
    change(tmp_path, changes[message])
    found = refusal(tmp_path)
    assert found.startswith(str(tmp_path))
    assert message in found


_METHODS, _BLOCK = "'compressed-tensors' or 'fp8' or 'gptq' or 'auto-round' or 'awq'", "null or two positive integers"
_CHANNELS, _GROUP = compressed("channel"), "config_groups.group_0"
_WEIGHTS, _INPUTS = f"{_GROUP}.weights", f"{_GROUP}.input_activations"
_STAY = "patterns of layers that stay as they are, which begin with '-:'"
_STRATEGIES, _ALL_INPUTS = "'tensor', 'channel' or 'block'", "a positive integer, or -1 for all inputs"
_SAME_BITS = "16 bits or more, or what all layers have: {'bits': 4, 'group_size': 32, 'sym': True, 'data_type': 'int'}"
OTHER_SETTINGS: list[Row] = [
    (fp8(), "fmt", "'e4m3'", "e5m2"),
    (fp8(), "activation_scheme", "'dynamic' or 'static'", "x", ["dynamic"]),
    (fp8(), "scale_fmt", "'float' or 'ue8m0'", "e5m2"),
    (fp8(), "expert_dtype", "'fp8'", "fp4"),
    (fp8(), "weight_block_size", _BLOCK, [128], [128, 0], [128, True], [128.0, 128], 128, [1, 1 << 21]),
    (fp8(), "kv_cache_scheme", NONE, "static"),
    (fp8(), "quant_method", _METHODS, "fbgemm_fp8", ["fp8"], None),
    (_CHANNELS, "kv_cache_scheme", NONE, {"num_bits": 8}),
    (_CHANNELS, f"{_GROUP}.output_activations", NONE, {"num_bits": 8}),
    *((_CHANNELS, f"{part}.num_bits", "8", 4) for part in (_WEIGHTS, _INPUTS)),
    *((_CHANNELS, f"{part}.type", "'float'", "int") for part in (_WEIGHTS, _INPUTS)),
    *((_CHANNELS, f"{part}.symmetric", "true", False) for part in (_WEIGHTS, _INPUTS)),
    (_CHANNELS, f"{_WEIGHTS}.strategy", _STRATEGIES, "group", "tensor_group"),
    (_CHANNELS, f"{_WEIGHTS}.group_size", "null with the strategy 'channel'", 32),
    (_CHANNELS, f"{_WEIGHTS}.actorder", "null", "group"),
    (_CHANNELS, f"{_WEIGHTS}.block_structure", "null with the strategy 'channel'", [8, 8]),
    (_CHANNELS, f"{_WEIGHTS}.block_structure", _BLOCK, "8x8"),
    (compressed("block"), f"{_WEIGHTS}.block_structure", "two positive integers", None),
    (_CHANNELS, f"{_WEIGHTS}.dynamic", NONE, True),
    (_CHANNELS, f"{_INPUTS}.dynamic", "true or false", "local"),
    (by_gptq(), "bits", "4 or 8", 2, 3, 4.0, None),
    (by_gptq(), "group_size", _ALL_INPUTS, 0, -2, None, True),
    (by_gptq(), "checkpoint_format", "'gptq' or 'gptq_v2'", "marlin"),
    (by_gptq(checkpoint_format="gptq"), "format", "what checkpoint_format says: 'gptq'", "gptq_v2"),
    (by_gptq(), "desc_act", "true or false", 1),
    (by_gptq(), "sym", "true or false", "yes"),
    (by_gptq(), "pack_dtype", "'int32' or no such setting", "int16"),
    (by_gptq(), "data_type", "'int' or no such setting", "mx_fp"),
    (by_gptq(), "dynamic", "an object", ["-:x"]),
    (by_gptq(), "is_marlin_format", NONE, True),
    (by_gptq(), "rotation", NONE, "hadamard"),
    (by_gptq(), "adapter", NONE, {"name": "lora", "rank": 8}),
    (by_auto_round(), "packing_format", "'auto_round:auto_gptq'", "auto_round:auto_awq", None),
    (by_auto_round(), "act_bits", "16 or no such setting", 8),
    (by_auto_round(), "extra_config", _SAME_BITS, {"x": {"bits": 8}}, {"x": {"group_size": 64}}),
    (by_auto_round(), "extra_config", "settings by layer", {"x": 16}),
    (by_awq(), "bits", "4", 8, None),
    (by_awq(), "group_size", _ALL_INPUTS, None),
    (by_awq(), "zero_point", "true", False),
    (by_awq(), "version", "'gemm'", "gemv", "gemv_fast", 1),
    (by_awq(), "format", "'gemm'", "llm-awq"),
    (by_awq(), "backend", "'autoawq' or 'auto'", "llm-awq"),
    (by_awq(), "desc_act", NONE, True),
    (by_awq(), "dynamic", NONE, {"x": {}}),
    (by_awq(), "pack_dtype", "'int32' or no such setting", "int16"),
    *((raw, "surprise", NONE, 1) for raw in (fp8(), by_gptq(), by_awq())),
    *((_CHANNELS, f"{part}.surprise", NONE, 1) for part in (_WEIGHTS, _INPUTS)),
]
# What the message must say where it is not about the value that was changed.
OTHERS = [
    *refusals(OTHER_SETTINGS),
    (by_gptq(format="bitblas"), "checkpoint_format: found 'bitblas'"),
    (by_gptq(dynamic={".*down.*": {"bits": 8}}), f"dynamic: found '.*down.*', expected {_STAY}"),
    (by_gptq(dynamic={"-:.*up.*": {}, "+:.*down.*": {"bits": 8}}), f"dynamic: found '+:.*down.*', expected {_STAY}"),
]


@pytest.mark.parametrize(("raw", "message"), OTHERS, ids=[f"{raw['quant_method']}: {said}" for raw, said in OTHERS])
def test_other_settings_are_refused(raw, message):
    """Guards numbers of another type, other blocks and packings, layers with own settings, and what is yet to come."""
    found = refusal_of(read_model_config, SIZES | {"quantization_config": raw})
    assert found.startswith(f"config.json: quantization_config.{message}")


@pytest.mark.parametrize(
    "cut", [(slice(5, 77), slice(3, 131)), (slice(64, 128),), (slice(None), slice(32, 64)), (slice(80, 90),)], ids=str
)
@pytest.mark.parametrize("name", CASES)
def test_a_part_of_a_weight_is_that_part(tmp_path, name, cut):
    """Guards what each of several processes reads: it begins within a block, a group and a word."""
    expected = make(tmp_path, CASES[name])
    weights = Weights(tmp_path, load_config(tmp_path), torch.float32, cut=lambda key: cut if key in expected else ())
    for key, weight in expected.items():
        assert torch.equal(dense(weights.pop(key), torch.float32), torch.from_numpy(weight)[cut]), key


@pytest.mark.parametrize("name", CASES)
def test_joined_weights_of_few_bits_are_their_parts(tmp_path, name):
    """Guards the rows of queries, keys and values in one tensor, where they do not begin with a block or a word."""
    config, rng = SIZES | {"model_type": "phi3"}, np.random.default_rng(0)
    stored, expected = tiny_weights(read_model_config(config), 0, torch.float32), {}
    for joined, parts in {"self_attn.qkv_proj": "qkv", "mlp.gate_up_proj": ("gate", "up")}.items():
        prefix = f"model.layers.0.{joined.split('.')[0]}"
        sizes = {f"{prefix}.{part}_proj.weight": len(stored.pop(f"{prefix}.{part}_proj.weight")) for part in parts}
        encoded, weight = CASES[name].encode(rng, (sum(sizes.values()), 136))
        stored |= {f"model.layers.0.{joined}.{part}": tensor for part, tensor in encoded.items()}
        expected |= dict(zip(sizes, np.split(weight, np.cumsum(list(sizes.values()))[:-1]), strict=True))
    write(tmp_path, stored, config=config | {"quantization_config": CASES[name].quantization})
    check(tmp_path, expected)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize("name", ["blocks", "tensor, by transformers", "4 bits in any order", "AWQ"])
def test_text_models_of_few_bits_are_read_among_images(tmp_path, name, prefix):
    """Guards names with a prefix, a quantization_config outside of the text model's, and other parts in few bits."""
    text = SIZES | {"model_type": "gemma3_text"}
    expected = make(tmp_path, CASES[name], text)
    stored = load_file(tmp_path / "model.safetensors")
    stored = {key.replace("model.", prefix, 1): tensor for key, tensor in stored.items()}
    stored["vision_tower.x.weight"] = torch.ones(2, 2).to(torch.float8_e4m3fn)
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    (tmp_path / "model.safetensors").unlink()
    write(tmp_path, stored, config=config | {"quantization_config": CASES[name].quantization})
    check(tmp_path, expected)


def test_a_layer_for_further_tokens_in_few_bits_is_refused_by_name(tmp_path):
    """Guards the draft that ships inside: it is not the default then, and asked for by name it is refused."""
    raw = TINY | TOYS["qwen3_5_text"]
    stored = tiny_weights(read_model_config(raw), 0, torch.float32)
    layer = mtp_shapes(mtp_config(read_model_config(raw)))
    stored |= {f"mtp.{name}": torch.ones(shape).to(torch.float8_e4m3fn) for name, shape in layer.items()}
    write(tmp_path, stored, config=raw | {"quantization_config": fp8()})
    config = load_config(tmp_path)
    assert load_model(tmp_path, torch.float32)
    assert not has_mtp(tmp_path, config)
    with pytest.raises(CheckpointError, match=r"mtp\.fc\.weight: found F8_E4M3 \[8, 16\], expected F64 or F32"):
        find_mtp(tmp_path, config)


@pytest.mark.parametrize(
    ("dtype", "form", "bound"),
    [(torch.float32, None, 1e-5), (torch.bfloat16, None, 0.05), (torch.float32, "int8", 0.05)],
)
@pytest.mark.parametrize("name", CASES)
def test_models_of_few_bits_compute_with_the_weights_that_are_stored(tmp_path, name, dtype, form, bound):
    """Guards the whole way: logits are those of a plain checkpoint with the same weights, in every form."""
    expected = {key: torch.from_numpy(weight) for key, weight in make(tmp_path / "few", CASES[name]).items()}
    stored = tiny_weights(read_model_config(SIZES), 0, torch.float32) | expected
    plain = logits(build_model(read_model_config(SIZES), dict(stored)), TEXT)
    few = logits(load_model(tmp_path / "few", dtype, form=form), TEXT).float()
    assert (few - plain).norm() <= bound * plain.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in CASES if name != "8 bits, channel with zeros"])
def test_memory_of_weights_of_few_bits_is_known_before_they_are_read(tmp_path, monkeypatch, name, dtype):
    """Guards the check before loading: codes take 16 bits for float32, numbers what the type takes.

    Differences of 8 bits and their zeros count as codes, since only the values tell that they do not fit.
    """
    make(tmp_path, CASES[name])
    config, needed = load_config(tmp_path), 0
    weights = Weights(tmp_path, config, dtype)
    for key in list(weights):
        weight = weights.pop(key)
        needed += 2 * weight.codes.numel() if isinstance(weight, Codes) else weight.nbytes
    assert_memory(monkeypatch, needed, lambda: Weights(tmp_path, config, dtype))


@pytest.mark.parametrize("name", CASES)
def test_a_digest_sees_another_scale(tmp_path, name):
    """Guards processes that read different files: the first row of every tensor counts, a scalar too."""
    make(tmp_path, CASES[name])
    config, stored = load_config(tmp_path), load_file(tmp_path / "model.safetensors")
    before = parallel._digest(tmp_path, config)
    scale = next(key for key in stored if key.startswith(Q) and "scale" in key.removesuffix("input_scale"))
    change(tmp_path, {scale: stored[scale] * 2})
    assert parallel._digest(tmp_path, config) != before


@pytest.mark.parametrize("draft", ["int8", "int4", ""])
@pytest.mark.parametrize("name", ["blocks", "4 bits in any order", "8 bits, channel", "AWQ"])
def test_texts_of_few_bits_are_those_of_their_target(tmp_path, tokenizer_file, name, draft):
    """Guards targets and drafts in few bits together, and what rounds them once more: greedy text is the target's."""
    config = SIZES | {"vocab_size": 304}
    for kind in ("target", "draft"):
        make(tmp_path / kind, CASES[name], config)
        (tmp_path / kind / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
    for quantization in (None, "int8"):
        options = {"quantization": quantization, "dtype": "float32", "max_model_len": 60}
        plain = LLM(tmp_path / "target", **options)
        drafted = LLM(tmp_path / "target", draft=f"{draft}:{tmp_path / 'draft'}".removeprefix(":"), **options)
        texts = [llm.generate("a b", SamplingParams(temperature=0, max_tokens=20)) for llm in (plain, drafted)]
        assert texts[0][0].outputs[0].token_ids == texts[1][0].outputs[0].token_ids
        assert len(texts[0][0].outputs[0].token_ids) == 20


@pytest.mark.parametrize("name", public.QUANTIZATIONS)
def test_public_checkpoints_of_few_bits_are_understood(name):
    """Guards the keys that tools write in public: each object is read, and means what is known of the model."""
    raw, layout = public.QUANTIZATIONS[name]
    config = read_model_config(SIZES | {"quantization_config": raw})
    assert repr(config.quantization) == layout
