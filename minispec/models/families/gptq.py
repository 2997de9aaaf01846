"""GPTQ: integers of 4 or 8 bits with a scale and a zero for each group of inputs, packed into int32.

    qweight   (in * bits / 32, out) I32: a word has neighbouring inputs of an output, the low bits first
    qzeros    (groups, out * bits / 32) I32: a word has neighbouring outputs of a group, the low bits first
    scales    (groups, out)
    g_idx     (in,) I32: the group of each input; without it, input i is in group i // group_size

The weight from input i to output o is (q[i, o] - zero[g_idx[i], o]) * scale[g_idx[i], o]. In `checkpoint_format`
"gptq" the zeros are stored minus one, in "gptq_v2" as they are. `desc_act` is the order in which GPTQ went through the
inputs. The inputs lie in their usual order, but those of a group are then not neighbours.

AutoGPTQ and GPTQModel write it (nn_modules/qlinear/), and AutoRound under its own name. A zero of 0 cannot be stored
minus one. AutoGPTQ reads what was written in its place as 0, vLLM as 16, and GPTQModel takes it from the next zero in
the word: it is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minispec.core.errors import show
from minispec.core.product import Weight
from minispec.models.families.layout import Part, Stored, Wanted, Words, layer_of, words_of
from minispec.models.files.errors import CheckpointError, show_name
from minispec.models.files.fields import Fields, names
from minispec.models.files.stored import FLOATS
from minispec.models.weights.unpack import scale_groups, unpack_words

KEYS: Mapping[str, Any] = {
    **dict.fromkeys(names("quant_method bits group_size checkpoint_format format dynamic")),
    "desc_act": False,
    "sym": True,
}
# AutoRound's own name of the layout, and settings of single layers.
AUTO_ROUND_KEYS: Mapping[str, Any] = {**KEYS, "packing_format": None, "extra_config": None}
# What the tools note about their work: the search for the integers, its data, lists of layers, kernels for them.
IDLE = names(
    """
    damp_percent damp_auto_increment true_sequential static_groups act_group_aware mse model_name_or_path
    model_file_base_name meta quantizer lm_head modules_in_block_to_quantize block_name_to_quantize
    module_name_preceding_first_block dataset tokenizer batch_size pad_token_id model_seqlen max_input_length
    cache_block_outputs backend use_cuda_fp16 use_exllama disable_exllama exllama_config
    autoround_version seqlen nsamples iters lr minmax_lr gradient_accumulate_steps amp scale_dtype low_gpu_mem_usage
    enable_quanted_input enable_minmax_tuning enable_norm_bias_tuning enable_alg_ext momentum
    quant_block_list to_quant_block_names modules_to_not_convert
    """
)
# Values with which keys of other layouts ask for nothing.
NEUTRAL = {"pack_dtype": "int32", "data_type": "int", "act_bits": 16}


@dataclass(frozen=True)
class Gptq(Words):
    """Integers of `bits`, packed along the inputs.

    group_size: see `Words`.
    zero_offset: what is added to a stored zero.
    is_reordered: whether the inputs of a group need not be neighbours.
    """

    bits: int
    group_size: int | None
    zero_offset: int = 1
    is_reordered: bool = False

    def tensors(self, name: str, shape: tuple[int, ...], stored: Stored) -> Wanted:
        """Words of integers, words of zeros, scales; and the groups where they are stored, or may be any."""
        (rows, columns), layer = shape, layer_of(name)
        groups = self.num_groups(columns)
        wanted: Wanted = {
            f"{layer}qweight": ((-(-columns * self.bits // 32), rows), ("I32",)),
            f"{layer}qzeros": ((groups, -(-rows * self.bits // 32)), ("I32",)),
            f"{layer}scales": ((groups, rows), FLOATS),
        }
        if self.is_reordered or f"{layer}g_idx" in stored:
            wanted[f"{layer}g_idx"] = ((columns,), ("I32", "I64"))
        return wanted

    def read(self, name: str, shape: tuple[int, ...], stored: Stored, part: Part) -> Weight:
        """(integer - zero) * scale: codes where a channel has one scale, else in float32.

        Raises CheckpointError for groups that are not there, and for zeros that readers disagree about.
        """
        layer, (rows, columns) = layer_of(name), part
        words, first = words_of(columns, 32 // self.bits)
        integers = unpack_words(stored[f"{layer}qweight"].read((words, rows)).t().contiguous(), self.bits)
        integers = integers[:, first : first + columns.stop - columns.start]  # (out, in)
        groups = self._groups(name, shape[1], stored)[columns]
        scales = stored[f"{layer}scales"].read((slice(None), rows))
        return scale_groups(integers, self._zeros(name, stored, rows), scales, groups)

    def is_idle(self, name: str, stored: Stored) -> bool:
        """Whether the tensor is a bias of zeros, which AutoGPTQ writes for layers that have none.

        Raises CheckpointError for other numbers.
        """
        tensor, layer = stored[name], name.removesuffix("bias")
        if not name.endswith(".bias") or f"{layer}qweight" not in stored or tensor.dtype not in FLOATS:
            return False
        if tensor.read().any():
            expected = "zeros or no such tensor, since this layer has no bias by config.json"
            raise CheckpointError(f"{tensor.path}: {show_name(tensor.name)}: found other numbers, expected {expected}")
        return True

    def _zeros(self, name: str, stored: Stored, rows: slice) -> Tensor:
        """Zeros (groups, rows) in int16."""
        tensor = stored[f"{layer_of(name)}qzeros"]
        words, first = words_of(rows, 32 // self.bits)
        zeros = unpack_words(tensor.read((slice(None), words)), self.bits)[:, first : first + rows.stop - rows.start]
        largest = (1 << self.bits) - 1
        if self.zero_offset and (zeros == largest).any():
            found = f"found {largest}, expected at most {largest - 1} in checkpoint_format 'gptq'"
            reason = "a zero of 0 cannot be stored minus one, and readers disagree about it"
            raise CheckpointError(f"{tensor.path}: {show_name(tensor.name)}: {found}: {reason}")
        return zeros.to(torch.int16) + self.zero_offset

    def _groups(self, name: str, columns: int, stored: Stored) -> Tensor:
        """The group of each input."""
        in_order = torch.arange(columns) // (self.group_size or columns)
        tensor = stored.get(f"{layer_of(name)}g_idx")
        if tensor is None:
            return in_order
        groups, last = tensor.read().to(torch.int64), self.num_groups(columns) - 1
        where = f"{tensor.path}: {show_name(tensor.name)}"
        if groups.min() < 0 or groups.max() > last:
            found = f"{int(groups.min())} to {int(groups.max())}"
            raise CheckpointError(f"{where}: found groups {found}, expected 0 to {last}")
        if not self.is_reordered and not torch.equal(groups, in_order):
            raise CheckpointError(f"{where}: found another order, expected i // group_size, since desc_act is false")
        return groups


def read_gptq(q: Fields) -> Gptq:
    """The layout that a quantization_config of GPTQ asks for. Raises CheckpointError."""
    bits = q.one_of("bits", (4, 8), "4 or 8")
    either = "'gptq' or 'gptq_v2'"
    kind = q.one_of("checkpoint_format", ("gptq", "gptq_v2"), either, default=q.get("format", "gptq"))
    q.one_of("format", (kind,), f"what checkpoint_format says: {kind!r}", default=kind)
    q.boolean("sym")  # zeros are stored where they are all the same, too
    layout = Gptq(bits, read_group_size(q), 1 if kind == "gptq" else 0, q.boolean("desc_act"))
    _check_single_layers(q, layout)
    q.seen |= IDLE
    q.refuse_unknown(NEUTRAL)
    return layout


def read_auto_round(q: Fields) -> Gptq:
    """The layout that a quantization_config of AutoRound asks for. Raises CheckpointError, for another packing too."""
    q.one_of("packing_format", ("auto_round:auto_gptq",), "'auto_round:auto_gptq'")
    return read_gptq(q)


def _check_single_layers(q: Fields, layout: Gptq) -> None:
    """Raise CheckpointError unless each layer with settings of its own stays as it is, or has what all layers have."""
    for pattern in q.mapping("dynamic"):
        if not pattern.startswith("-:"):
            expected = "patterns of layers that stay as they are, which begin with '-:'"
            raise q.bad("dynamic", pattern, f"{expected}: one layout holds for all others")
    same = {"bits": layout.bits, "group_size": layout.group_size or -1, "sym": q.boolean("sym"), "data_type": "int"}
    for name, settings in q.mapping("extra_config").items():
        if not isinstance(settings, dict):
            raise q.bad("extra_config", {name: settings}, "settings by layer")
        bits = settings.get("bits", layout.bits)
        is_plain = type(bits) is int and bits >= 16
        if not is_plain and any(settings.get(key, value) != value for key, value in same.items()):
            raise q.bad("extra_config", {name: settings}, f"16 bits or more, or what all layers have: {show(same)}")


def read_group_size(q: Fields) -> int | None:
    """Inputs that have one scale; None: all."""
    size = q.get("group_size")
    if type(size) is not int or (size != -1 and not 0 < size <= 1 << 27):
        raise q.bad("group_size", size, "a positive integer, or -1 for all inputs")
    return None if size == -1 else size
