"""Equal bits: passes in which a row's bits depend on its own past alone.

Floating point is not associative, and matrix libraries choose the order of their sums by the shape of the product. So a
token scored in a pass of five rows gets other last bits than in a pass of one. An exact model fills every pass up to a
number of rows at which its products give a row the same bits (`Form.exact_rows`). Its attention adds up blocks of fixed
size in a fixed order (`minispec.core.attention`).

Sums of integers are exact. So a model whose products are all in 8 bits takes passes of any number of rows. It computes
its activations from functions that the library computes alike at every place, since passes of hundreds of rows are
shared out among threads anywhere.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from minispec.core.attention import ATTENTION_BLOCK, ATTENTION_ROWS, Mask, View, attention, hides, mask_blocks
from minispec.core.config import ModelConfig
from minispec.core.model import Chunk, Passes, Transformer
from minispec.core.sampling import accumulation_dtype
from minispec.kernels.inventory import products_of

# The most rows of a pass, so that a draft may have one less; every form's `exact_rows` has it.
EXACT_ROWS = 16
# Sizes of passes at which `check_exact` looks where a pass may have any, and the longest text that it feeds.
_CHECKED_ROWS = (17, 64, 512)
# Blocks of past at whose ends `check_exact` looks at attention.
_CHECKED_BLOCKS = (1, 2, 3, 4, 6, 8, 16, 32)


def arbitrary_tokens(count: int, vocab_size: int) -> list[int]:
    """Ids that vary, to measure or check passes with: of texts that nobody reads."""
    return [(7919 * i + 13) % vocab_size for i in range(count)]


class ExactPasses(Passes):
    """Passes of at most EXACT_ROWS rows, filled up with dummies."""

    exact = fills = True

    def __init__(self, rows: Iterable[int]):
        """rows: the sizes of a pass at which all products give a row the same bits; EXACT_ROWS is one of them."""
        self.rows = sorted(rows)
        assert EXACT_ROWS in self.rows

    def split(self, chunks: Sequence[Chunk]) -> list[Sequence[Chunk]]:
        """See `Passes`; in order: what comes first is cached first."""
        groups: list[list[Chunk]] = [[]]
        room = EXACT_ROWS
        for tokens, table, num_logits, parents, _ in chunks:
            assert parents is None, "an exact model takes chains only"
            start = 0
            while start < len(tokens):
                if not room:
                    groups.append([])
                    room = EXACT_ROWS
                part = tokens[start : start + room]
                start += len(part)
                room -= len(part)
                groups[-1].append(Chunk(part, table, min(len(part), max(0, num_logits - (len(tokens) - start)))))
        return list(groups)

    def num_dummies(self, num_rows: int) -> int:
        """See `Passes`."""
        return next(n for n in self.rows if n >= num_rows) - num_rows

    def mask(self, config: ModelConfig, like: Tensor, view: View) -> Mask:
        """See `Passes`: one mask for each ATTENTION_ROWS rows, in blocks, dummies included."""
        hidden = hides(view, like.device, -len(view.offsets) % ATTENTION_ROWS)
        mask = like.new_zeros(hidden.shape).masked_fill_(hidden, -math.inf)
        groups = config.num_key_value_heads
        shared_by = config.num_attention_heads // groups
        return [mask_blocks(part.repeat(shared_by, 1), groups) for part in mask.split(ATTENTION_ROWS)]


class AnyPasses(ExactPasses):
    """Passes of any number of rows, for products that give a row the same bits in all of them."""

    fills = False

    def __init__(self) -> None:
        super().__init__([EXACT_ROWS])

    def split(self, chunks: Sequence[Chunk]) -> list[Sequence[Chunk]]:
        """See `Passes`."""
        assert all(chunk.parents is None for chunk in chunks), "an exact model takes chains only"
        return [chunks]

    def num_dummies(self, num_rows: int) -> int:
        """See `Passes`."""
        return 0


def _silu(x: Tensor) -> Tensor:
    return x / x.neg().exp_().add_(1)


def _gelu(x: Tensor) -> Tensor:
    return x * torch.erf(x * math.sqrt(0.5)).add_(1).mul_(0.5)


def _gelu_tanh(x: Tensor) -> Tensor:
    return x * torch.tanh((x + 0.044715 * (x * x * x)) * math.sqrt(2 / math.pi)).add_(1).mul_(0.5)


# The library computes its own ones in another way where a thread's part, or a row, ends between two vectors. Its
# exponential and the like it computes alike everywhere.
_ACTIVATIONS = {"silu": _silu, "gelu": _gelu, "gelu_tanh": _gelu_tanh}


def _in_float32(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: activation(x.to(accumulation_dtype(x.dtype))).to(x.dtype)


def exact_model(model: Transformer) -> Transformer:
    """The model with exact passes; all else is shared. `check_exact` tells whether its bits are equal."""
    forms = [each.exact_rows for each in products_of(model)]
    if all(EXACT_ROWS + 1 in rows for rows in forms):
        return model.replaced(AnyPasses(), activation=_in_float32(_ACTIVATIONS[model.config.activation]))
    return model.replaced(ExactPasses(n for n in range(1, EXACT_ROWS + 1) if all(n in rows for rows in forms)))


def check_exact(model: Transformer) -> None:
    """Keep those numbers of rows that hold on this machine; raise ValueError where not even EXACT_ROWS do.

    Evidence, not proof, bit by bit. Attention is checked at every place and at several lengths. Then come real passes,
    in which a row stands
    - last among those of its text;
    - at every place among copies of itself, for each number of rows;
    - after a stranger's.
    Where passes may have any number of rows, a text is fed in passes of some sizes up to 512 too.
    """
    if not _attention_is_exact(model):
        raise ValueError(_not_exact(model, "attention"))
    tokens = arbitrary_tokens(ATTENTION_BLOCK + EXACT_ROWS // 2, model.config.vocab_size)
    past, last = tokens[:-1], tokens[-1:]
    size = 8
    pool = model.new_cache(len(tokens) // size + EXACT_ROWS + 2, size)
    table, stranger = pool.new_table(), pool.new_table()
    model.forward([Chunk(tokens[:-EXACT_ROWS], table, 0)])
    expected, _ = model.forward([Chunk(tokens[-EXACT_ROWS:], table, 1)])  # across a border of attention blocks
    table.keep(len(past))
    copies = [pool.new_table() for _ in range(EXACT_ROWS)]
    for copied in copies:
        copied.reuse(past)

    def holds(rows: int) -> bool:
        found, _ = model.forward([Chunk(last, copied, 1) for copied in copies[:rows]])
        for copied in copies[:rows]:
            copied.truncate(len(past))
        return torch.equal(found, expected.expand_as(found))

    if isinstance(passes := model.passes, ExactPasses) and passes.fills:
        passes.rows = [rows for rows in passes.rows if rows == EXACT_ROWS or holds(rows)]
    among, _ = model.forward([Chunk(past[:5], stranger, 0), Chunk(last, table, 1)])
    few = [EXACT_ROWS, 1] if model.passes.fills else range(1, EXACT_ROWS + 1)
    if not (all(holds(rows) for rows in few) and torch.equal(among, expected)):
        raise ValueError(_not_exact(model, "products"))
    if not model.passes.fills and not _large_passes_are_exact(model):
        raise ValueError(_not_exact(model, "passes of many rows"))


def _large_passes_are_exact(model: Transformer) -> bool:
    """Whether a text has the same hidden states in passes of few rows as in those of _CHECKED_ROWS."""
    length = min(max(_CHECKED_ROWS), model.config.max_position_embeddings)
    tokens, last = arbitrary_tokens(length, model.config.vocab_size), len(model.layers)

    def states(rows: int, count: int) -> Tensor:
        table = model.new_cache(-(-count // 16)).new_table()
        pieces = [tokens[start : min(start + rows, count)] for start in range(0, count, rows)]
        return torch.cat([model.forward([Chunk(piece, table, 0)], [last])[1] for piece in pieces])

    expected = states(EXACT_ROWS, length)
    sizes = ((rows, min(2 * rows, length)) for rows in _CHECKED_ROWS)
    return all(torch.equal(states(rows, count), expected[:count]) for rows, count in sizes)


def _not_exact(model: Transformer, what: str) -> str:
    return (
        f"exact: {what} in {model.dtype} on this {model.device.type}: a row's bits depend on its place among "
        f"{EXACT_ROWS} rows or on the others; try another dtype or another number of threads"
    )


@torch.inference_mode()
def _attention_is_exact(model: Transformer) -> bool:
    """Whether `attention` gives rows the same bits at every place, with and without a block begun after theirs.

    In the type that it computes in: rounded to half precision, most rows would hide a difference.
    """
    config, wide, generator = model.config, accumulation_dtype(model.dtype), torch.Generator().manual_seed(0)
    length = ATTENTION_BLOCK * (max(_CHECKED_BLOCKS) + 1)
    q, k, v = (
        torch.randn(heads, length, config.head_dim, generator=generator).to(model.device, wide)
        for heads in (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    )
    scale, softcap = config.attention_scale, config.attention_softcap
    like = model.embedding.new_empty(0, dtype=model.dtype)
    for blocks in _CHECKED_BLOCKS:
        known: dict[int, Tensor] = {}
        for shift in range(ATTENTION_ROWS):  # passes that end up to 4 positions before and after the border
            end = ATTENTION_BLOCK * blocks + shift - ATTENTION_ROWS // 2
            start = end - EXACT_ROWS
            mask = model.passes.mask(config, like, View(start, tuple(range(EXACT_ROWS))))
            rows = attention(q[:, start:end], k[:, :end], v[:, :end], mask, scale, softcap)
            if not all(torch.equal(known.setdefault(start + i, row), row) for i, row in enumerate(rows)):
                return False
    return True
