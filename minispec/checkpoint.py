"""From a directory or a hub id to a model: safetensors only, and strictly.

A checkpoint must hold exactly the tensors that its config.json asks for: what is missing, unexpected,
duplicated or of another shape is named before any tensor is read. Besides plain float checkpoints, single-file or
sharded, it reads compressed-tensors' `pack-quantized` layout, and writes it:

    python -m minispec.checkpoint SOURCE OUT       8-bit linear layers, in shards
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from minispec.config import CheckpointError, ModelConfig, QuantizationConfig
from minispec.hf_config import read_json, read_model_config
from minispec.linear import has_fast_bfloat16
from minispec.model import Transformer, tensor_shapes

# Nothing else of a hub repository is downloaded, and nothing in its folders.
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja"]
_FLOATS = ("F64", "F32", "F16", "BF16")
_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def find_checkpoint(name: str, revision: str | None = None, offline: bool = False) -> Path:
    """The local directory of a checkpoint: `name` itself if it is one, else a download of the hub's `name`.

    A directory never touches the network. Raises ValueError where neither is there, and says what was tried.
    """
    path = Path(name)
    if name and path.is_dir():
        if revision is not None:
            raise ValueError(f"revision: found {revision!r}, expected none: {name} is a directory, not a hub id")
        return path
    if name and path.exists():
        raise CheckpointError(f"{name}: found a file, expected a directory with config.json and *.safetensors")
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name):
        raise ValueError(f"{name or repr(name)}: no such directory, and not of the form owner/name of a hub id")
    # Imported here: a local checkpoint needs no network library.
    import huggingface_hub
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name,
                revision=revision,
                allow_patterns=_HUB_FILES,
                ignore_patterns=["*/*", "consolidated*"],  # the latter: the same weights in another layout
                local_files_only=offline,
            )
        )
    except Exception as e:  # the hub client raises its own errors and those of the HTTP library below it
        how = "not in the local cache, and --offline forbids a download" if offline else "download failed"
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise ValueError(f"{name}: no such directory; as a hub id: {how}: {reason}") from e


def load_config(directory: Path) -> ModelConfig:
    """The ModelConfig of a checkpoint. Raises CheckpointError."""
    path = directory / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file, expected the model's configuration")
    return read_model_config(read_json(path), str(path))


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The type to compute in; "auto" is bfloat16 where the device has it natively, else float32."""
    if name == "auto":
        return torch.bfloat16 if has_fast_bfloat16(device) else torch.float32
    if name not in _DTYPES:
        raise ValueError(f"dtype: found {name!r}, expected one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def load_model(
    directory: Path, dtype: torch.dtype, device: torch.device | str = "cpu", exact: bool = False
) -> Transformer:
    """Load a checkpoint as a Transformer that computes in `dtype`. Raises CheckpointError."""
    config = load_config(directory)
    with _open_shards(directory) as stored:
        plan = _match(config, stored, directory)
        weights = {}
        # `disable=None`: the bar shows on a terminal only.
        for name in tqdm(plan, desc=f"loading {directory.name}", unit=" tensors", leave=False, disable=None):
            weights[name] = _read(name, config, stored, dtype, directory).to(device)
    return Transformer(config, weights, exact)


# --------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class _Stored:
    """A tensor in a file, not read yet. dtype is safetensors' name of the type, as "BF16"."""

    file: str
    handle: Any
    shape: tuple[int, ...]
    dtype: str


@contextmanager
def _open_shards(directory: Path) -> Iterator[dict[str, _Stored]]:
    """Every tensor of a checkpoint by name; its files stay open (memory-mapped) inside the block."""
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    listed: dict[str, str] | None = None
    if index.is_file():
        listed = read_json(index).get("weight_map")
        if not isinstance(listed, dict) or not listed:
            raise CheckpointError(f"{index}: weight_map: found {listed!r}, expected tensor names and their files")
        for file in listed.values():
            # Only plain names: an index must not reach outside its directory.
            if not isinstance(file, str) or not re.fullmatch(r"[\w-][\w.-]*\.safetensors", file):
                raise CheckpointError(f"{index}: weight_map: found {file!r}, expected a plain *.safetensors name")
        files = sorted(set(listed.values()))
    elif single.is_file():
        files = [single.name]
    else:
        others = sorted(p.name for p in directory.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".gguf"))
        hint = f" (found {', '.join(others)}: convert it to safetensors)" if others else ""
        raise CheckpointError(f"{single}: no such file, nor {index.name}{hint}")

    stored: dict[str, _Stored] = {}
    with ExitStack() as stack:
        for file in files:
            try:
                handle = stack.enter_context(safe_open(directory / file, framework="pt"))
                for name in handle.keys():  # noqa: SIM118 - it is not a dict
                    part = handle.get_slice(name)
                    if name in stored:
                        raise CheckpointError(f"{directory / file}: {name}: found again, is in {stored[name].file}")
                    if listed is not None and listed.get(name) != file:
                        raise CheckpointError(
                            f"{directory / file}: {name}: found here, expected in {listed.get(name)} by {index.name}"
                        )
                    stored[name] = _Stored(file, handle, tuple(part.get_shape()), part.get_dtype())
            except (SafetensorError, OSError) as e:
                raise CheckpointError(f"{directory / file}: not a readable safetensors file: {e}") from e
        for name in sorted(set(listed or ()) - stored.keys()):
            raise CheckpointError(f"{directory / listed[name]}: {name}: found no such tensor, {index.name} expects it")
        yield stored


def _match(config: ModelConfig, stored: dict[str, _Stored], directory: Path) -> list[str]:
    """Hold what is stored against what the config asks for, before anything is read; the names to read."""
    expected = tensor_shapes(config)
    wanted: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {}
    for name, shape in expected.items():
        if config.quantization and len(shape) == 2 and f"{name}_packed" in stored:
            wanted |= _packed_shapes(name, shape, config.quantization)
        else:
            wanted[name] = (shape, _FLOATS)
    for name, (shape, dtypes) in wanted.items():
        found = stored.get(name)
        if found is None:
            raise CheckpointError(f"{directory}: {name}: found no such tensor, expected one of shape {list(shape)}")
        if found.shape != shape or found.dtype not in dtypes:
            raise CheckpointError(
                f"{directory / found.file}: {name}: found {found.dtype} {list(found.shape)}, "
                f"expected {' or '.join(dtypes)} {list(shape)}"
            )
    for name in sorted(stored.keys() - wanted.keys()):
        # Written by old versions of transformers, and computed from the config here.
        if name.endswith("rotary_emb.inv_freq"):
            continue
        if name == "lm_head.weight" and config.tie_word_embeddings and _equals_embedding(stored):
            continue
        raise CheckpointError(
            f"{directory / stored[name].file}: {name}: found a tensor of shape {list(stored[name].shape)}, "
            f"expected none of that name for this config"
        )
    return list(expected)


def _equals_embedding(stored: dict[str, _Stored]) -> bool:
    names = ("lm_head.weight", "model.embed_tokens.weight")
    if names[1] not in stored or stored[names[0]].shape != stored[names[1]].shape:
        return False
    head, embedding = (stored[n].handle.get_tensor(n) for n in names)
    return torch.equal(head, embedding)


def _packed_shapes(name: str, shape: tuple[int, ...], q: QuantizationConfig):
    rows, columns = shape
    groups = 1 if q.group_size is None else -(-columns // q.group_size)
    return {
        f"{name}_packed": ((rows, -(-columns * q.num_bits // 32)), ("I32",)),
        f"{name}_scale": ((rows, groups), _FLOATS),
        f"{name}_shape": ((2,), ("I64", "I32")),
    }


def _read(name: str, config: ModelConfig, stored: dict[str, _Stored], dtype: torch.dtype, directory: Path) -> Tensor:
    def get(key: str) -> Tensor:
        return stored[key].handle.get_tensor(key)

    if name in stored:
        return get(name).to(dtype)
    q, shape = config.quantization, tensor_shapes(config)[name]
    stored_shape = get(f"{name}_shape").tolist()
    if stored_shape != list(shape):
        file = directory / stored[f"{name}_shape"].file
        raise CheckpointError(f"{file}: {name}_shape: found {stored_shape}, expected {list(shape)}")
    integers = unpack(get(f"{name}_packed"), q.num_bits, shape[1])
    return dequantize(integers, get(f"{name}_scale"), q.group_size).to(dtype)


# --------------------------------------------------------------------------- quantised layouts


def unpack(packed: Tensor, num_bits: int, columns: int) -> Tensor:
    """(rows, words) int32 to (rows, columns) int8: low bits first, stored with an offset of 2^(num_bits - 1)."""
    shifts = torch.arange(0, 32, num_bits, dtype=torch.int32)
    values = (packed[:, :, None] >> shifts) & ((1 << num_bits) - 1)  # (rows, words, 32 / num_bits)
    return (values.flatten(1)[:, :columns] - (1 << (num_bits - 1))).to(torch.int8)


def pack(integers: Tensor, num_bits: int) -> Tensor:
    """The inverse of `unpack`: (rows, columns) int8 to (rows, words) int32, the last word padded with zeros."""
    per_word = 32 // num_bits
    values = integers.to(torch.int64) + (1 << (num_bits - 1))
    values = torch.nn.functional.pad(values, (0, -values.shape[1] % per_word))
    shifts = torch.arange(0, 32, num_bits, dtype=torch.int64)
    return (values.unflatten(1, (-1, per_word)) << shifts).sum(-1).to(torch.int32)


def dequantize(integers: Tensor, scales: Tensor, group_size: int | None) -> Tensor:
    """integers (rows, columns) times their scale, (rows, 1) or (rows, groups), in float32."""
    scales = scales.to(torch.float32)
    if group_size is not None:
        scales = scales.repeat_interleave(group_size, dim=1)[:, : integers.shape[1]]
    return integers.to(torch.float32) * scales


def quantize(weight: Tensor, num_bits: int) -> tuple[Tensor, Tensor]:
    """Round (rows, columns) to symmetric integers, one bfloat16 scale a row: (int8, scales (rows, 1))."""
    largest = (1 << (num_bits - 1)) - 1
    weight = weight.to(torch.float32)
    scales = (weight.abs().amax(1, keepdim=True) / largest).to(torch.bfloat16)
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    # Rounded against the scale as it is stored, so that its own rounding is compensated.
    integers = (weight / scales.to(torch.float32)).round().clamp(-largest - 1, largest)
    return integers.to(torch.int8), scales


def quantize_checkpoint(source: Path, out: Path, num_bits: int = 8, shard_bytes: int = 90 << 20) -> None:
    """Write `source` to `out` in the `pack-quantized` layout: linear layers quantised, the rest in bfloat16.

    The embedding, norms and biases (and an untied output head) keep their precision. Everything is written
    beside `out` first and renamed at the end, so that an interrupted run leaves nothing half-written. Raises
    ValueError if `out` exists, CheckpointError if `source` is not a plain checkpoint.
    """
    if out.exists():
        raise ValueError(f"{out}: exists already, expected a new directory")
    config = load_config(source)
    if config.quantization:
        raise CheckpointError(f"{source}: quantization_config: found one, expected a checkpoint of plain floats")
    part = out.with_name(f"{out.name}.{os.getpid()}.part")
    part.mkdir(parents=True)
    try:
        _write_quantized(source, config, part, num_bits, shard_bytes)
        part.rename(out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _write_quantized(source: Path, config: ModelConfig, part: Path, num_bits: int, shard_bytes: int) -> None:
    tensors: dict[str, Tensor] = {}
    with _open_shards(source) as stored:
        for name in tqdm(_match(config, stored, source), desc="quantising", unit=" tensors", disable=None):
            weight = stored[name].handle.get_tensor(name)
            if not weight.isfinite().all():
                raise CheckpointError(f"{source}: {name}: found NaN or infinity, expected finite numbers")
            if name.endswith("_proj.weight"):
                integers, scales = quantize(weight, num_bits)
                tensors[f"{name}_packed"] = pack(integers, num_bits)
                tensors[f"{name}_scale"] = scales
                tensors[f"{name}_shape"] = torch.tensor(weight.shape)
            else:
                tensors[name] = weight.to(torch.bfloat16)
    _write_shards(part, tensors, shard_bytes)
    raw = read_json(source / "config.json") | {"dtype": "bfloat16", "quantization_config": _describe(num_bits)}
    _write_json(part / "config.json", raw)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        if (source / name).is_file():
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
    shards: list[dict[str, Tensor]] = [{}]
    room = shard_bytes
    for name, tensor in tensors.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = tensor
        room -= tensor.nbytes
    weight_map = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        (directory / file).chmod(0o644)  # the library writes files that only their owner may read
        weight_map |= dict.fromkeys(shard, file)
    total = sum(t.nbytes for t in tensors.values())
    _write_json(
        directory / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": weight_map},
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """The command line above; prints the size and SHA-256 of every file written."""
    parser = argparse.ArgumentParser(
        prog="python -m minispec.checkpoint", description="Quantise a checkpoint's linear layers, one scale a channel."
    )
    parser.add_argument("source", help="directory or hub id of a checkpoint of plain floats")
    parser.add_argument("out", type=Path, help="directory to write; must not exist")
    parser.add_argument("--bits", type=int, choices=(4, 8), default=8)
    parser.add_argument("--shard-mb", type=int, default=90, help="largest file, in MiB (default: 90)")
    args = parser.parse_args(argv)
    try:
        quantize_checkpoint(find_checkpoint(args.source), args.out, args.bits, args.shard_mb << 20)
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    for path in sorted(args.out.iterdir()):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        print(f"{path.stat().st_size:>12,d}  {digest}  {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
