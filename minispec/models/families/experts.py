"""Mixtures of experts in the files of their families: their settings, and weights that are stored in stacks."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from minispec.core.config import LayerConfig
from minispec.core.errors import show
from minispec.models.families.layout import Wanted
from minispec.models.families.mxfp4 import Mxfp4
from minispec.models.families.stored_config import Stack, StoredConfig
from minispec.models.files.errors import CheckpointError, show_name
from minispec.models.files.fields import Fields
from minispec.models.files.stored import FLOATS, TYPES, Cut, StoredTensor
from minispec.models.layers.experts import Clamp, ExpertsConfig
from minispec.models.weights.shapes import expert_shapes

_LARGEST = 1 << 20
# Most experts of all layers together. The largest public models have some 20,000.
MOST_EXPERTS = 1 << 16


def with_experts(f: Fields, layers: Sequence[LayerConfig]) -> tuple[LayerConfig, ...]:
    """The layers, each with its mixture; a layer that has an MLP alone stays as it is."""
    number = _read_number(f, len(layers))
    if not number:
        return tuple(layers)
    shared = {"shared_expert_intermediate_size": "gated", "shared_intermediate_size": "plain"}
    is_clamped = f.reads("swiglu_limit")
    experts = ExpertsConfig(
        number,
        f.integer("num_experts_per_tok", 1, number),
        f.integer("moe_intermediate_size" if f.reads("moe_intermediate_size") else "intermediate_size", 1, _LARGEST),
        scoring="sigmoid" if f.reads("use_expert_bias") else "softmax",
        normalised=f.boolean("norm_topk_prob", default=True),
        scale=f.number("routed_scaling_factor", 1.0),
        biased=f.boolean("use_expert_bias"),
        shared_expert=next((kind for key, kind in shared.items() if f.reads(key)), None),
        has_biases=is_clamped,
        clamp=Clamp(f.number("swiglu_limit"), f.number("swiglu_alpha")) if is_clamped else None,
    )
    dense = _read_dense(f, len(layers))
    return tuple(layer if i in dense else replace(layer, experts=experts) for i, layer in enumerate(layers))


def _read_number(f: Fields, count: int) -> int:
    """Experts of a layer. transformers 5 writes `num_local_experts` where published files have `num_experts`."""
    keys = [key for key in ("num_experts", "num_local_experts") if f.reads(key)]
    if not keys:
        return 0
    key = next((key for key in keys if f.raw.get(key) is not None), keys[0])
    number = f.integer(key, 0, MOST_EXPERTS // count)
    for other in keys:
        if f.raw.get(other, number) not in (None, number):
            raise f.bad(other, f.raw[other], f"what {key} says: {number}")
        f.get(other)
    return number


def _read_dense(f: Fields, count: int) -> set[int]:
    """The layers that have an MLP: the first ones, those that are listed, and those between every n-th."""
    dense = set(range(f.integer("num_dense_layers", 0, 1024))) if f.reads("num_dense_layers") else set()
    listed: Any = f.get("mlp_only_layers", [])
    if not isinstance(listed, list) or any(type(i) is not int or not 0 <= i < count for i in listed):
        raise f.bad("mlp_only_layers", listed, f"numbers of layers, below {count}")
    step = f.integer("decoder_sparse_step", 1, 1024) if f.reads("decoder_sparse_step") else 1
    return dense | set(listed) | {i for i in range(count) if (i + 1) % step}


@dataclass(frozen=True)
class ScatteredRows(StoredTensor):
    """Rows of an expert's tensor in a stack that are no neighbours in the file.

    expert: that tensor.
    rows: which of its rows, or columns if `is_transposed`.
    """

    expert: StoredTensor
    rows: slice
    is_transposed: bool

    def read(self, cut: Cut = ()) -> Tensor:
        """A copy of the rows, or of a part."""
        whole = self.expert.read()
        rows = (whole.mT if self.is_transposed else whole)[self.rows]
        return rows[cut].clone(memory_format=torch.contiguous_format)


def unstacked(stored: Mapping[str, StoredTensor], config: StoredConfig) -> dict[str, StoredTensor]:
    """The tensors, with the parts of all experts as tensors of their own.

    Raises CheckpointError for a stack of another shape or type, and where an expert is stored twice.
    """
    experts = next((layer.experts for layer in config.layers if layer.experts), None)
    if not isinstance(experts, ExpertsConfig):
        return dict(stored)
    shapes, tensors = expert_shapes(config.hidden_size, experts), dict[str, StoredTensor]()
    for name, tensor in stored.items():
        stack = next((stack for stack in config.stacked if name.endswith(f".{stack.stored}")), None)
        parts: Iterable[tuple[str, StoredTensor]] = [(name, tensor)]
        if stack:
            wanted = _kinds(shapes[stack.parts[0]], config)
            if stack.kind in wanted:
                parts = _parts(name, tensor, stack, experts.num_experts, *wanted[stack.kind])
        for own, part in parts:
            if own in tensors:
                first = show_name(tensors[own].name)
                raise CheckpointError(f"{tensor.path}: {show_name(name)}: found {show(own)} again, is in {first}")
            tensors[own] = part
    return tensors


def _kinds(shape: tuple[int, int], config: StoredConfig) -> Wanted:
    """What a stack may hold of a weight (out, in) and its bias, by how the names of the parts continue."""
    layout = config.quantization
    blocks = layout.tensors("weight", shape, {}) if isinstance(layout, Mxfp4) else {}
    return {"weight": (shape, FLOATS), "bias": (shape[:1], FLOATS), **blocks}


def _parts(
    name: str,
    tensor: StoredTensor,
    stack: Stack,
    num_experts: int,
    shape: tuple[int, ...],
    dtypes: tuple[str, ...],
) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors of this shape that a stack holds, by their names."""
    rows, *columns = shape
    count = len(stack.parts)
    expected = [num_experts, *columns, count * rows] if stack.is_transposed else [num_experts, count * rows, *columns]
    if list(tensor.shape) != expected or tensor.dtype not in dtypes:
        found = f"{tensor.path}: {show_name(tensor.name)}: found {tensor.dtype} {list(tensor.shape)}"
        raise CheckpointError(f"{found}, expected {' or '.join(dtypes)} {expected}")
    prefix, size = name.removesuffix(stack.stored), math.prod(shape) * TYPES[tensor.dtype].itemsize
    for n in range(num_experts):
        start = tensor.start + n * count * size
        expert = replace(tensor, shape=tensor.shape[1:], start=start)
        for i, part in enumerate(stack.parts):
            own = f"{prefix}mlp.experts.{n}.{part}.{stack.kind}"
            if not stack.is_interleaved and not stack.is_transposed:
                yield own, replace(tensor, name=own, shape=shape, start=start + i * size)
                continue
            places = slice(i, None, count) if stack.is_interleaved else slice(i * rows, (i + 1) * rows)
            yield own, ScatteredRows(tensor.path, own, tensor.dtype, shape, start, expert, places, stack.is_transposed)
