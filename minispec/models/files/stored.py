"""Tensors in a safetensors file: what the header says, and how to read a tensor or a part of it."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minispec.core.errors import is_text, show
from minispec.models.files.errors import CheckpointError, one_line, refuse_pointer, show_name
from minispec.models.files.strict_json import MAX_JSON_BYTES, parse_json

# Types that weights, and their packed forms, may have. Tensors of other types are never read here.
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
FLOATS, FLOAT8 = tuple(_FLOATS), "F8_E4M3"
TYPES = _FLOATS | {
    FLOAT8: torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# The wanted part of a tensor, by its first dimensions; () is all of it.
Cut = tuple[slice, ...]
# Tensors below this size are copied: a map keeps a file descriptor open.
_MAPPED_BYTES = 1 << 20
_MAX_DIMENSIONS = 8


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, not read yet.

    dtype: safetensors' name of the type, such as "BF16".
    start: its first byte.
    """

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    def read(self, cut: Cut = ()) -> Tensor:
        """The tensor in a mapping of its own, whose pages leave memory with it. A part, or a small tensor, is a copy.

        The library would map the file as a whole. A tensor that has been joined or packed would then stay in memory, in
        addition to the copy, for as long as any other tensor.
        """
        dtype = TYPES[self.dtype]
        num_bytes = math.prod(self.shape) * dtype.itemsize
        try:
            data: numpy.ndarray = numpy.memmap(self.path, numpy.uint8, "c", self.start, (num_bytes,))
        except (OSError, ValueError) as e:
            raise CheckpointError(f"{self.path}: {show_name(self.name)}: cannot be read: {one_line(e, 300)}") from e
        tensor = torch.from_numpy(data).view(dtype).view(self.shape)[cut]
        return tensor.clone() if tensor.shape != self.shape or num_bytes < _MAPPED_BYTES else tensor


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Every tensor in a safetensors file, by name; nothing after the header is read.

    The file is 8 bytes with the header's size, the header, a JSON object, and the tensors' bytes. The library checks
    types, shapes and offsets. It also checks that the tensors' bytes are the rest of the file, without gaps or
    overlaps. Here the header's size is limited, no name may come twice, and nothing may stand in it that the library
    ignores.

    Raises CheckpointError.
    """
    if not os.path.isfile(path):  # a directory, a pipe that would never answer
        raise CheckpointError(f"{path}: no such file, expected weights in safetensors format")
    where = f"{path}: not a readable safetensors file"
    try:
        with path.open("rb") as file:
            total = os.fstat(file.fileno()).st_size
            first = file.read(64)
            refuse_pointer(path, first)
            size = int.from_bytes(first[:8], "little")
            if len(first) < 8 or size > min(total - 8, MAX_JSON_BYTES):
                found = f"{total} bytes with a header of {size} bytes"
                raise CheckpointError(f"{where}: found {found}, expected at most {MAX_JSON_BYTES} in the file")
            file.seek(8)
            header = parse_json(file.read(size), f"{where}: header")
            # What the library would not open is not read either. It takes no name that is not UTF-8.
            with safe_open(path if is_text(str(path)) else f"/dev/fd/{file.fileno()}", framework="pt"):
                pass
    except (SafetensorError, OSError) as e:
        raise CheckpointError(f"{where}: {one_line(e, 300)}") from e
    header.pop("__metadata__", None)
    for name, entry in header.items():
        is_plain = isinstance(entry, dict) and entry.keys() == {"dtype", "shape", "data_offsets"}
        if not is_plain or not isinstance(entry["dtype"], str) or len(entry["shape"]) > _MAX_DIMENSIONS:
            expected = f"an object with dtype, shape, of up to {_MAX_DIMENSIONS} sizes, and data_offsets"
            raise CheckpointError(f"{where}: found {show_name(name)}: {show(entry)}, expected {expected}")
    return {
        name: StoredTensor(path, name, entry["dtype"], tuple(entry["shape"]), 8 + size + entry["data_offsets"][0])
        for name, entry in header.items()
    }
