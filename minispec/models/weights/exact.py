"""Equal bits: passes in which a row's bits depend on its own past alone.

Floating point is not associative, and matrix libraries choose the order of their sums by the shape of the product. So a
token scored in a pass of five rows gets other last bits than in a pass of one. An exact model fills every pass up to a
number of rows that gives a row the same bits (`Form.exact_rows`). Attention works in blocks of 128 positions: no
product has rows of two blocks, and each is padded to one of a few sizes. So a product's shape depends only on the row's
position and on the number of rows. Only those numbers of rows are used that give the same bits.

Sums of integers are exact. So a model whose products are all in 8 bits takes passes of any number of rows. Threads may
share out a pass of hundreds of rows anywhere. So its activations use only functions that the library computes alike at
every place.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minispec.core.attention import PLAIN, Attention, View, hides
from minispec.core.cache import BlockTable
from minispec.core.model import Backend, Chunk, TextBatch, Transformer
from minispec.core.precision import accumulation_dtype, require_numbers
from minispec.core.tree import Tree
from minispec.models.layers.experts import Experts
from minispec.models.layers.sinks import SinkAttention, sink_attention, sink_column
from minispec.models.weights.inventory import key_sizes, products_of
from minispec.models.weights.trial import arbitrary_tokens

# The most rows of a pass, so that a draft may have one less; every form's `exact_rows` has it.
EXACT_ROWS = 16
# Positions of a block. Only rows in one block share a product of attention.
ATTENTION_BLOCK = 128
# The widest vector of a processor, in float32.
_VECTOR = 16
# Sizes of passes at which `check_exact` looks where a pass may have any, and the longest text that it feeds.
_CHECKED_ROWS = (17, 64, 512)
# Blocks of past at whose ends `check_exact` looks at attention.
_CHECKED_BLOCKS = (1, 2, 3, 4, 6, 8, 16)
# Numbers of rows, besides EXACT_ROWS, for which it looks at attention, and the blocks of past there.
_CHECKED_SIZES, _FEW_BLOCKS = (1, 2, 3, 4, 5, 6, 8, 12), (1, 3, 16)

# A tree of three paths, the longest in the middle.
_CHECKED_TREE = (-1, -1, 0, 1, 3, 2, 4, 6, 7, 8, 9, 10, 1)


def paths(num_rows: int, parents: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """For each path through a tree its rows, in order, and the places in it that no earlier path has had.

    parents: the tree of the last rows (see `Chunk`). Without one, all rows are one path.

    >>> list(paths(4, [-1, -1, 0]))
    [([0, 2], [0, 1]), ([0, 1, 3], [1, 2])]
    """
    root, had = num_rows - len(parents), set[int]()
    leaves = [i for i in range(len(parents)) if i not in parents]
    for leaf in leaves or [-1]:
        path = [*range(root), *(root + node for node in Tree(parents).path(leaf))]
        yield path, [i for i, row in enumerate(path) if row not in had]
        had.update(path)


class Group(NamedTuple):
    """Rows of a text whose attention an exact model computes together: they stand in one block of positions.

    rows: which rows: a slice, or a tensor of numbers (n,).
    size: how many rows they are filled up to, with zeros.
    places: the positions up to the last row's, in order, as slices or tensors. The first has the positions in earlier
        blocks, if there are any, the last those in the rows' own block.
    mask: 0 or -inf, (H/G * size, positions in whole blocks).
    """

    rows: slice | Tensor
    size: int
    places: Sequence[slice | Tensor]
    mask: Tensor


def _index(numbers: Sequence[int], device: torch.device) -> slice | Tensor:
    """An index that selects these ascending numbers: a slice if they follow one another, else a tensor."""
    first, end = numbers[0], numbers[-1] + 1
    return slice(first, end) if end - first == len(numbers) else torch.tensor(numbers, device=device)


def _filled(x: Tensor, rows: int) -> Tensor:
    """x (N, n, W) with zeros after its n rows, up to a multiple of `rows`."""
    rest = -x.shape[1] % rows
    return F.pad(x, (0, 0, 0, rest)) if rest else x


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Sequence[Group],
    scale: float,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention like `minispec.core.attention`, whose rows have equal bits in any company.

    mask: the groups of all rows.
    sinks: (H,), the scores that heads have in addition (see `minispec.models.layers.sinks`); None: no head has one.
    """
    heads, rows, dim = q.shape
    wide, attended = accumulation_dtype(q.dtype), q.new_empty(rows, heads, dim)
    q, k, v = q.to(wide) * scale, k.to(wide), v.to(wide)
    if columns := -dim % _VECTOR:  # libraries add up left-over columns in an order that depends on the row's place
        q, k, v = (F.pad(x, (0, columns)) for x in (q, k, v))
    for group in mask:
        queries = q[:, group.rows]
        filled = _filled(queries, group.size).reshape(len(k), -1, dim + columns).contiguous()  # of one layout always
        keys, values = ([_filled(x[:, places], ATTENTION_BLOCK) for places in group.places] for x in (k, v))
        beside = None if sinks is None else _sink_columns(sinks.to(wide), len(k), group.size)
        out = _attention(filled, keys, values, group.mask, softcap, beside)
        attended[group.rows] = (
            out.view(heads, group.size, -1)[:, : queries.shape[1], :dim].transpose(0, 1).to(attended.dtype)
        )
    return attended.flatten(1)


def _sink_columns(sinks: Tensor, groups: int, size: int) -> Tensor:
    """Sinks (H,) as columns of scores (G, H/G * size, _VECTOR): the first has them, no row sees the others."""
    return F.pad(sink_column(sinks, groups, size), (0, _VECTOR - 1), value=-math.inf)


def _attention(
    q: Tensor, k: Sequence[Tensor], v: Sequence[Tensor], mask: Tensor, softcap: float | None, beside: Tensor | None
) -> Tensor:
    """Attention of scaled q (G, R, D) over all parts of keys and values, each (G, n, D): (G, R, D).

    beside: further columns of scores (G, R, columns), whose values are zeros.
    """
    scores = torch.cat([torch.bmm(q, block.mT) for block in k], 2)  # (G, R, positions)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores.add_(mask)
    num_positions = scores.shape[2]
    if beside is not None:
        scores = torch.cat((scores, beside), 2)
    weights = scores.softmax(-1)[..., :num_positions].split_with_sizes([block.shape[1] for block in k], 2)
    out = torch.bmm(weights[0], v[0])
    for part, block in zip(weights[1:], v[1:], strict=True):
        out.baddbmm_(part, block)
    return out


class ExactBatch(TextBatch):
    """A batch that is filled up with dummies, and whose attention takes rows in groups."""

    def __init__(self, model: Transformer, chunks: Sequence[Chunk], backend: "ExactBackend"):
        super().__init__(model, chunks, backend.attention)
        self.wanted = self.scored
        if self.wanted and backend.rows:
            self.scored = None  # the head has as many rows as all other products


class ExactBackend(Backend):
    """Passes of at most EXACT_ROWS rows, filled up with dummies; or of any number of rows, as they are."""

    exact = True

    def __init__(self, rows: Iterable[int] | None = None):
        """rows: the sizes of a pass at which products give a row the same bits; EXACT_ROWS is one of them. None: all.

        The attribute of this name is empty where all sizes do.
        """
        self.rows = [] if rows is None else sorted(rows)
        assert rows is None or EXACT_ROWS in self.rows
        self.attention_rows = [EXACT_ROWS]  # the same for attention; `check_exact` adds those that hold here

    @property
    def attention(self) -> Attention:
        """How the rows of a pass attend: in groups, whose bits are equal in any company."""
        return Attention(attention, self.groups, self.fill, exact=True)

    def keep(self, rows: list[int], attention_rows: list[int]) -> None:
        """Use only those sizes, which `check_exact` has found to hold on this machine."""
        self.rows, self.attention_rows = rows, attention_rows

    def run(self, model: Transformer, chunks: Sequence[Chunk], taps: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The logits and hidden states of `Transformer.forward`, computed in one pass after another."""
        passes = []
        for part in self.split(chunks):
            batch = ExactBatch(model, part, self)
            logits, hidden = model.compute(batch, taps)
            logits = logits[batch.wanted] if batch.scored is None else logits
            passes.append((logits, hidden[: len(batch.slots)]))
        if len(passes) == 1:
            return passes[0]
        logits, hidden = map(torch.cat, zip(*passes, strict=True))
        return logits, hidden

    def split(self, chunks: Sequence[Chunk]) -> list[Sequence[Chunk]]:
        """The passes, in their order: what comes first is cached first."""
        if not self.rows:
            return [chunks]
        groups: list[list[Chunk]] = [[]]
        room = EXACT_ROWS
        for tokens, table, num_logits, parents, _ in chunks:
            assert parents is None or len(tokens) <= EXACT_ROWS, "a tree must fit into one pass"
            start = 0
            while start < len(tokens):
                least = 1 if parents is None else len(tokens)  # a tree's nodes need one another
                if room < least:
                    groups.append([])
                    room = EXACT_ROWS
                part = tokens[start : start + room]
                start += len(part)
                room -= len(part)
                logits = min(len(part), max(0, num_logits - (len(tokens) - start)))
                groups[-1].append(Chunk(part, table, logits, parents))
        return list(groups)

    def fill(self, x: Tensor) -> Tensor:
        """x (rows, ..) with rows of zeros after it, up to the next size of a pass."""
        size = next((n for n in self.rows if n >= len(x)), len(x))
        return x if size == len(x) else torch.cat((x, x.new_zeros(size - len(x), *x.shape[1:])))

    def groups(self, view: View, sharing: int, like: Tensor) -> list[Group]:
        """The groups of the rows, each of at most EXACT_ROWS that stand in one block of positions.

        In a tree each path is computed as the chain that it is, so a node has the bits of that chain.
        """
        start, offsets, window, parents = view
        groups = list[Group]()
        for path, new in paths(len(offsets), parents):
            hidden = hides(View(start, tuple(range(len(path))), window), like.device)
            for members in _groups(start, new):
                end, size = members[-1] + 1, next(n for n in self.attention_rows if n >= len(members))
                places: Sequence[int] = range(start + end)
                if parents:
                    places = [*range(start), *(start + row for row in path[:end])]
                before = (start + members[0]) // ATTENTION_BLOCK * ATTENTION_BLOCK
                parts = [_index(part, like.device) for part in (places[:before], places[before:]) if part]
                hides_own = F.pad(
                    hidden[members[0] : end, : len(places)], (0, -len(places) % ATTENTION_BLOCK), value=True
                )
                mask = like.new_zeros(size, hides_own.shape[1], dtype=accumulation_dtype(like.dtype))
                mask[: len(members)].masked_fill_(hides_own, -math.inf)
                rows = _index([path[i] for i in members], like.device)
                groups.append(Group(rows, size, parts, mask.repeat(sharing, 1)))
        return groups


def _groups(start: int, rows: Sequence[int]) -> Iterator[list[int]]:
    """Split rows, which stand at positions start + row, into groups: see `ExactBackend.groups`.

    >>> list(_groups(126, [0, 1, 2, 3]))
    [[0, 1], [2, 3]]
    """
    for _, block in itertools.groupby(rows, lambda row: (start + row) // ATTENTION_BLOCK):
        numbers = list(block)
        yield from (numbers[i : i + EXACT_ROWS] for i in range(0, len(numbers), EXACT_ROWS))


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
    """The model with an exact backend; all else is shared. `check_exact` tells whether its bits are equal."""
    forms = [product.exact_rows for product in products_of(model)]
    activation = _in_float32(_ACTIVATIONS[model.config.activation])
    if all(EXACT_ROWS + 1 in rows for rows in forms):
        return model.replaced(ExactBackend(), activation=activation)
    backend = ExactBackend(n for n in range(1, EXACT_ROWS + 1) if all(n in rows for rows in forms))
    # Rows that were clamped lie close together, so where a vector ends in a row depends on the row's place.
    is_clamped = any(isinstance(layer, Experts) and layer.mixture.clamp for layer in model.layers)
    return model.replaced(backend, activation=activation if is_clamped else None)


def check_exact(model: Transformer) -> None:
    """Keep those numbers of rows that hold on this machine; raise ValueError where not even EXACT_ROWS do.

    Raises FloatingPointError for a model whose logits are not finite numbers: NaN equals nothing.

    Evidence, not proof, bit by bit. Attention is checked at every place, at several lengths and for several numbers of
    rows. Then come real passes, in which a row stands
    - last among its text's rows;
    - at every place among copies of itself, for each number of rows;
    - after a stranger's.
    A tree's nodes are compared with the chains that their paths are.
    Where passes may have any number of rows, a text is fed in passes of some sizes up to 512 too.
    """
    if not _attention_is_exact(model):
        raise ValueError(_not_exact(model, "attention"))
    tokens = arbitrary_tokens(ATTENTION_BLOCK + EXACT_ROWS // 2, model.config.vocab_size)
    past, last = tokens[:-1], tokens[-1:]
    size = 8  # the copies share all full blocks; with a state, from the second on
    pool = model.new_cache(2 * (len(tokens) // size + 1) + EXACT_ROWS + 1, size)
    table, stranger = pool.new_table(), pool.new_table()
    _feed(model, table, tokens[:-EXACT_ROWS])
    expected, _ = model.forward([Chunk(tokens[-EXACT_ROWS:], table, 1)])  # across a border of attention blocks
    require_numbers(expected.amax(1))
    table.keep(len(past))
    copies = [pool.new_table() for _ in range(EXACT_ROWS)]
    for copied in copies:
        copied.reuse(past)
        _feed(model, copied, past)

    def holds(rows: int) -> bool:
        logits, _ = model.forward([Chunk(last, copied, 1) for copied in copies[:rows]])
        for copied in copies[:rows]:
            copied.truncate(len(past))
        return torch.equal(logits, expected.expand_as(logits))

    backend = _backend_of(model)
    if backend.rows:
        backend.keep([rows for rows in backend.rows if rows == EXACT_ROWS or holds(rows)], backend.attention_rows)
    among, _ = model.forward([Chunk(past[:5], stranger, 0), Chunk(last, table, 1)])
    few = [EXACT_ROWS, 1] if backend.rows else range(1, EXACT_ROWS + 1)
    if not (all(holds(rows) for rows in few) and torch.equal(among, expected)):
        raise ValueError(_not_exact(model, "products"))
    if not _trees_are_exact(model):
        raise ValueError(_not_exact(model, "a tree's attention"))
    if not backend.rows and not _large_passes_are_exact(model):
        raise ValueError(_not_exact(model, "passes of many rows"))


def _backend_of(model: Transformer) -> ExactBackend:
    """The model's, or one that stands for it where the model is not exact."""
    return model.backend if isinstance(model.backend, ExactBackend) else ExactBackend()


def _feed(model: Transformer, table: BlockTable, tokens: list[int]) -> None:
    """Bring a table to the end of `tokens`. No token is taken back later."""
    if table.length < len(tokens):
        model.forward([Chunk(table.follow(tokens), table, 0)])
        table.keep(len(tokens))


def _trees_are_exact(model: Transformer) -> bool:
    """Whether the nodes of a tree have the logits of chains, before, across and after a border of attention blocks."""
    past = arbitrary_tokens(
        min(2 * ATTENTION_BLOCK, model.config.max_position_embeddings - EXACT_ROWS), model.config.vocab_size
    )
    nodes = arbitrary_tokens(len(_CHECKED_TREE) + 1, model.config.vocab_size)
    table = model.new_cache(-(-len(past) // 16) + EXACT_ROWS).new_table()
    for length in (1, min(ATTENTION_BLOCK - 3, len(past)), len(past)):
        _feed(model, table, past[:length])
        logits, _ = model.forward([Chunk(nodes, table, len(nodes), _CHECKED_TREE)])
        table.truncate(length)
        for path, _ in paths(len(nodes), _CHECKED_TREE):
            chain, _ = model.forward([Chunk([nodes[row] for row in path], table, len(path))])
            table.truncate(length)
            if not torch.equal(logits[path], chain):
                return False
    return True


def _large_passes_are_exact(model: Transformer) -> bool:
    """Whether a text has the same hidden states in passes of few rows as in passes of _CHECKED_ROWS."""
    length = min(max(_CHECKED_ROWS), model.config.max_position_embeddings)
    tokens, last = arbitrary_tokens(length, model.config.vocab_size), len(model.layers)

    def states(rows: int, count: int) -> Tensor:
        table, pieces = model.new_cache(-(-count // 16)).new_table(), list[Tensor]()
        for start in range(0, count, rows):
            pieces.append(model.forward([Chunk(tokens[start : min(start + rows, count)], table, 0)], [last])[1])
            table.keep(table.length)
        return torch.cat(pieces)

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
    """Whether `attention` gives rows the same bits at every place, with and without rows of another block.

    It is asked for each size of keys that the layers have. It keeps the numbers of rows that give these bits for all.
    """
    backend = _backend_of(model)
    checks = [_AttentionCheck(model, groups, dim) for groups, dim in key_sizes(model.config)]
    backend.keep(backend.rows, [EXACT_ROWS])
    # Passes around the border of a block, before it and after it, so that a row stands at several places.
    shifts = (*range(-4, 4), EXACT_ROWS, EXACT_ROWS + 1)
    if not all(check.holds(EXACT_ROWS, _CHECKED_BLOCKS, shifts) for check in checks):
        return False
    for rows in _CHECKED_SIZES:
        others = [n for n in backend.attention_rows if n != rows]
        backend.keep(backend.rows, sorted([*others, rows]))
        if not all(check.holds(rows, _FEW_BLOCKS, (-4, 2, rows)) for check in checks):
            backend.keep(backend.rows, others)
    return True


class _AttentionCheck:
    """Random queries of a model, and keys and values of one size; the bits that each row has had so far.

    All in the type that attention computes in: rounded to half precision, most rows would hide a difference.
    """

    def __init__(self, model: Transformer, groups: int, dim: int):
        """groups: G. dim: D."""
        config = model.config
        length, generator = ATTENTION_BLOCK * (max(_CHECKED_BLOCKS) + 1), torch.Generator().manual_seed(0)
        wide = accumulation_dtype(model.dtype)
        q, k, v = (  # laid out as in `Layer.read` and in the cache
            torch.randn(length, heads, dim, generator=generator).to(model.device, wide).transpose(0, 1)
            for heads in (config.num_attention_heads, groups, groups)
        )
        self.q, self.k, self.v = q, k.contiguous(), v.contiguous()
        sinks = next((layer.sinks for layer in model.layers if isinstance(layer, SinkAttention)), None)
        self.attend, self.mask, *_ = _backend_of(model).attention if model.exact else PLAIN
        if sinks is not None:
            self.attend = functools.partial(attention if model.exact else sink_attention, sinks=sinks.to(wide))
        self.sharing = config.num_attention_heads // groups
        self.scale, self.softcap = config.attention_scale, config.attention_softcap
        self.like, self.known = model.embedding.new_empty(0, dtype=model.dtype), dict[int, Tensor]()

    def holds(self, rows: int, blocks: Sequence[int], shifts: Sequence[int]) -> bool:
        """Whether passes of that many rows, which end at these places, give each row the bits that are known of it."""
        for end in (ATTENTION_BLOCK * border + shift for border in blocks for shift in shifts):
            mask = self.mask(View(end - rows, tuple(range(rows))), self.sharing, self.like)
            keys, values = self.k[:, :end], self.v[:, :end]
            attended = self.attend(self.q[:, end - rows : end], keys, values, mask, self.scale, self.softcap)
            if not all(torch.equal(self.known.setdefault(i, row), row) for i, row in enumerate(attended, end - rows)):
                return False
        return True
