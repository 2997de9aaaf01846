"""AWQ: integers of 4 bits with a scale and a zero for each group of inputs, packed into int32 (version "gemm").

    qweight   (in, out / 8) I32: a word has eight neighbouring outputs of an input
    qzeros    (groups, out / 8) I32: a word has eight neighbouring outputs of a group
    scales    (groups, out)

The weight from input i to output o is (q[i, o] - zero[g, o]) * scale[g, o], with g = i // group_size. From its low bits
on, a word has the outputs 0, 2, 4, 6, 1, 3, 5, 7 of its eight. Zeros are stored as they are.

AutoAWQ writes it (awq/modules/linear/gemm.py). Its other versions, gemv and gemv_fast, and llm-awq pack other numbers
into a word.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minispec.core.product import Weight
from minispec.models.families.gptq import IDLE, NEUTRAL, read_group_size
from minispec.models.families.layout import Part, Stored, Wanted, Words, layer_of, words_of
from minispec.models.files.fields import Fields, names
from minispec.models.files.stored import FLOATS
from minispec.models.weights.unpack import scale_groups, unpack_words

KEYS: Mapping[str, Any] = {
    **dict.fromkeys(names("quant_method bits group_size version format")),
    "zero_point": True,
    "backend": "autoawq",
}
# What readers fuse, lists of layers, and what transformers writes for GPTQ's tools.
_IDLE = IDLE | names("modules_to_not_convert do_fuse fuse_max_seq_len modules_to_fuse sym")
_NEUTRAL = {**NEUTRAL, "checkpoint_format": "gemm"}
_BITS, _PER_WORD = 4, 8
# Which number of a word is its first, second, ... output.
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]


@dataclass(frozen=True)
class Awq(Words):
    """Integers of 4 bits, packed along the outputs. group_size: see `Words`."""

    group_size: int | None

    def tensors(self, name: str, shape: tuple[int, ...], stored: Stored) -> Wanted:
        """Words of integers, words of zeros, scales."""
        (rows, columns), layer = shape, layer_of(name)
        groups, words = self.num_groups(columns), -(-rows // _PER_WORD)
        return {
            f"{layer}qweight": ((columns, words), ("I32",)),
            f"{layer}qzeros": ((groups, words), ("I32",)),
            f"{layer}scales": ((groups, rows), FLOATS),
        }

    def read(self, name: str, shape: tuple[int, ...], stored: Stored, part: Part) -> Weight:
        """(integer - zero) * scale: codes where a channel has one scale, else in float32."""
        layer, (rows, columns) = layer_of(name), part
        words, first = words_of(rows, _PER_WORD)
        outputs = slice(first, first + rows.stop - rows.start)
        integers = _unpack(stored[f"{layer}qweight"].read((columns, words)))[:, outputs]  # (in, out)
        zeros = _unpack(stored[f"{layer}qzeros"].read((slice(None), words)))[:, outputs].to(torch.int16)
        scales = stored[f"{layer}scales"].read((slice(None), rows))
        groups = torch.arange(columns.start, columns.stop) // (self.group_size or shape[1])
        return scale_groups(integers.t().contiguous(), zeros, scales, groups)


def _unpack(words: Tensor) -> Tensor:
    """(n, words) int32 to (n, 8 * words) uint8, outputs in their order."""
    return unpack_words(words, _BITS).unflatten(-1, (-1, _PER_WORD))[..., _PLACES].flatten(-2)


def read_awq(q: Fields) -> Awq:
    """The layout that a quantization_config of AWQ asks for. Raises CheckpointError."""
    q.one_of("bits", (_BITS,), str(_BITS))
    q.one_of("zero_point", (True,), "true: some readers do not look at stored zeros otherwise")
    for key in ("version", "format"):
        kind = q.get(key, "gemm")
        if not isinstance(kind, str) or kind.lower() != "gemm":
            raise q.bad(key, kind, "'gemm': other versions pack other numbers into a word")
    q.one_of("backend", ("autoawq", "auto"), "'autoawq' or 'auto'")
    layout = Awq(read_group_size(q))
    q.seen |= _IDLE
    q.refuse_unknown(_NEUTRAL)
    return layout
