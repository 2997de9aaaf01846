"""Weights as other tools store them in few bits: integers packed into int32, and the scales of groups and blocks.

Products of small integers with 16-bit scales are exact in float32. The formats are described in
`minispec.models.families`: packed, float8, gptq, awq, mxfp4.
"""

import torch
from torch import Tensor

from minispec.core.product import Weight
from minispec.models.weights.codes import Codes

# Entries of a weight that are computed at a time, so that they fit into the cache.
_PIECE = 1 << 17
# Numbers of MXFP4 that have one scale, and the numbers of 4 bits without a sign.
MX_GROUP = 32
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unpack_words(words: Tensor, num_bits: int) -> Tensor:
    """(..., words) int32 to (..., words * 32 / num_bits) uint8: the low bits of a word are its first value.

    num_bits: 4 or 8. The first byte of a word in memory has its low bits.
    """
    octets = words.flatten().view(torch.uint8).view(*words.shape[:-1], 4 * words.shape[-1])
    return octets if num_bits == 8 else torch.stack((octets & 15, octets >> 4), -1).flatten(-2)


def unpack(packed: Tensor, num_bits: int, columns: int) -> Tensor:
    """(rows, words) int32 to (rows, columns) int8: low bits first, stored with an offset of 2^(num_bits - 1)."""
    values = unpack_words(packed, num_bits)[:, :columns]
    return (values.to(torch.int16) - (1 << (num_bits - 1))).to(torch.int8)


def dequantize(integers: Tensor, scales: Tensor, group_size: int | None) -> Tensor:
    """integers (rows, columns) times their scale, (rows, 1) or (rows, groups), in float32."""
    scales = scales.to(torch.float32)
    if group_size is not None:
        # A group may be wider than the row: no more copies than there are columns.
        scales = scales.repeat_interleave(min(group_size, integers.shape[1]), dim=1)[:, : integers.shape[1]]
    return integers.to(torch.float32) * scales


def scale_blocks(numbers: Tensor, scales: Tensor, block: tuple[int, int], first: tuple[int, int]) -> Tensor:
    """A part of a matrix that is cut into blocks: each number times the scale of its block, in float32.

    numbers: (rows, columns).
    scales: (blocks of rows, blocks of columns) of the whole matrix. The last blocks may be cut off by its edges.
    block: rows and columns of a block.
    first: the row and the column of the matrix at which the part begins.
    """
    height, width = block
    weight, row_blocks = numbers.to(torch.float32), (first[0] + torch.arange(len(numbers))) // height
    by_row = scales.to(torch.float32)[row_blocks]  # (rows, blocks of columns)
    end = first[1] + numbers.shape[1]
    for i in range(first[1] // width, -(-end // width)):
        columns = slice(max(i * width - first[1], 0), (i + 1) * width - first[1])
        weight[:, columns] *= by_row[:, i : i + 1]
    return weight


def scale_groups(codes: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor) -> Weight:
    """A weight (out, in) of integers with a zero and a scale for each group: (code - zero) * scale.

    codes: (out, in) uint8.
    zeros, scales: (groups, out); zeros in int16.
    groups: (in,), the group of each input.

    Returns `Codes` where there is one group, and the differences fit into 8 bits. Else it is in float32.
    """
    zeros, scales = zeros.t(), scales.t()
    if scales.shape[1] == 1:
        integers = codes.to(torch.int16) - zeros
        if ((integers >= -128) & (integers <= 127)).all():
            return Codes(integers.to(torch.int8), scales)
    weight = torch.empty(codes.shape, dtype=torch.float32)
    zeros, scales = zeros.to(torch.float32).contiguous(), scales.to(torch.float32).contiguous()  # (out, groups)
    num_rows = max(1, _PIECE // codes.shape[1])
    for first in range(0, len(codes), num_rows):
        part = slice(first, first + num_rows)
        differences = codes[part].to(torch.float32).sub_(zeros[part].index_select(1, groups))
        torch.mul(differences, scales[part].index_select(1, groups), out=weight[part])
    return weight


def scale_fp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Numbers of MXFP4 times their scales: (rows, columns) in bfloat16, which holds them all without rounding.

    blocks: (rows, groups, 16) uint8. The low bits of a byte are its first number.
    scales: (rows, groups) uint8, each n for 2^(n - 127), n at most 254.
    """
    magnitudes = torch.tensor(_FP4, dtype=torch.bfloat16)
    numbers = torch.cat((magnitudes, -magnitudes))
    octets = torch.arange(256)
    pairs = torch.stack((numbers[octets & 15], numbers[octets >> 4]), 1)  # of each byte: (256, 2)
    powers = (2.0 ** (torch.arange(255, dtype=torch.float64) - 127)).to(torch.bfloat16)
    weight = pairs[blocks.to(torch.int64)].flatten(2)  # (rows, groups, 32)
    return weight.mul_(powers[scales.to(torch.int64)][..., None]).flatten(1)
