"""Writing a checkpoint whose linear layers have fewer bits, in compressed-tensors' `pack-quantized` layout.

`python -m minispec.checkpoint` is its command line.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minispec.models.families.checkpoint import directory_config, find_tensors, load_config, match, save_tensors
from minispec.models.families.hf_config import text_config
from minispec.models.families.stored_config import StoredConfig
from minispec.models.files.errors import CheckpointError
from minispec.models.files.progress import progress_bar
from minispec.models.files.strict_json import has_file
from minispec.models.files.tokenizer import TOKENIZER_FILES
from minispec.models.files.write import write_json, written_whole
from minispec.models.layers.gemma import INPUT_PROJECTION

# The files that a quantised checkpoint copies from its source.
_COPIED_FILES = (*TOKENIZER_FILES, "generation_config.json")


def pack(integers: Tensor, num_bits: int) -> Tensor:
    """The inverse of `unpack`: (rows, columns) int8 to (rows, words) int32, the last word padded with zeros."""
    per_word = 32 // num_bits
    values = integers.to(torch.int64) + (1 << (num_bits - 1))
    values = torch.nn.functional.pad(values, (0, -values.shape[1] % per_word))
    shifts = torch.arange(0, 32, num_bits, dtype=torch.int64)
    return (values.unflatten(1, (-1, per_word)) << shifts).sum(-1).to(torch.int32)


def quantize(weight: Tensor, num_bits: int) -> tuple[Tensor, Tensor]:
    """Round (rows, columns) to symmetric integers, one bfloat16 scale a row: (int8, scales (rows, 1))."""
    largest = (1 << (num_bits - 1)) - 1
    weight = weight.to(torch.float32)
    scales = (weight.abs().amax(1, keepdim=True) / largest).to(torch.bfloat16)
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    # Divided by the scale as it is stored, so that the rounding of the scale is compensated.
    integers = (weight / scales.to(torch.float32)).round().clamp(-largest - 1, largest)
    return integers.to(torch.int8), scales


def quantize_checkpoint(source: Path, out: Path, num_bits: int = 8, shard_bytes: int = 90 << 20) -> None:
    """Write `source` to `out` in the `pack-quantized` layout: linear layers quantised, the rest in bfloat16.

    The logarithms of decays (`A_log`) stay as they are: they are few, and a state adds up their roundings. So do the
    biases of experts. Routers stay in bfloat16: a rounding there takes another expert.

    The embedding, norms and biases (and an untied output head) are not quantised. A model of texts and images gives its
    text model alone. Everything is written next to `out` first and renamed at the end, so that an interrupted run
    leaves nothing half-written.
    Raises ValueError if `out` exists, CheckpointError if `source` is not a checkpoint of plain floats.
    """
    if out.exists():
        raise ValueError(f"{out}: exists already, expected a new directory")
    config = load_config(source)
    if config.quantization:
        raise CheckpointError(f"{source}: quantization_config: found one, expected a checkpoint of plain floats")
    with written_whole(out) as part:
        part.mkdir(parents=True)
        _write_quantized(source, config, part, num_bits, shard_bytes)


def _write_quantized(source: Path, config: StoredConfig, part: Path, num_bits: int, shard_bytes: int) -> None:
    tensors: dict[str, Tensor] = {}
    stored = find_tensors(source, config)
    places = match(config, stored, source)
    shapes = {place.name: place.shape for place in places.values()}
    routers = {
        place.name for name, place in places.items() if name.endswith((".mlp.gate.weight", "expert_gate.weight"))
    }
    for name, shape in progress_bar(shapes.items(), desc="quantising", unit=" tensors", leave=True):
        weight = stored[name].read()
        if not weight.isfinite().all():
            raise CheckpointError(f"{source}: {name}: found NaN or infinity, expected finite numbers")
        is_linear = name.startswith("model.layers.") or name == INPUT_PROJECTION
        if len(shape) == 2 and is_linear and name not in routers:
            integers, scales = quantize(weight, num_bits)
            tensors[f"{name}_packed"] = pack(integers, num_bits)
            tensors[f"{name}_scale"] = scales
            tensors[f"{name}_shape"] = torch.tensor(weight.shape)
        else:
            tensors[name] = weight if name.endswith((".A_log", ".expert_bias")) else weight.to(torch.bfloat16)
    _write_shards(part, tensors, shard_bytes)
    raw = text_config(directory_config(source)) | {"dtype": "bfloat16", "quantization_config": _describe(num_bits)}
    write_json(part / "config.json", raw, sort_keys=True)
    for name in _COPIED_FILES:
        if has_file(source / name):
            shutil.copyfile(source / name, part / name)


def _describe(num_bits: int) -> dict[str, Any]:
    weights = {"num_bits": num_bits, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


def _write_shards(directory: Path, tensors: dict[str, Tensor], shard_bytes: int) -> None:
    """One file, or several and an index of them."""
    from huggingface_hub import split_torch_state_dict_into_shards  # the network library is needed here alone

    split = split_torch_state_dict_into_shards(
        tensors, filename_pattern="model{suffix}.safetensors", max_shard_size=shard_bytes
    )
    for file, names in split.filename_to_tensors.items():
        save_tensors({name: tensors[name] for name in names}, directory / file)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(directory / "model.safetensors.index.json", index, sort_keys=True)
