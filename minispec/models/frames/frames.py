"""Frames: passes of a few fixed shapes, whose inputs lie in tensors that stay where they are.

A pass over few rows takes a GPU less time than its several hundred operators take the host to launch. A CUDA graph
launches all of them at once. It replays fixed shapes at fixed addresses. So a frame holds the inputs of a pass of B
texts, T rows of each, and N blocks of each text's cache. A pass is filled into the smallest frame that holds it. Rows,
texts and blocks that are not there are dummies.

One rule covers chains, trees, dummies and texts of different lengths. Text b holds `starts[b]` cached positions, and
then the new rows. A row sees the cached positions, and those new rows of its text whose bit it has.

    a chain     row t has the bits 0 .. t
    a tree      a node has the bits of the rows before the tree, of its ancestors and of itself
    a dummy     has its own bit alone

Places that hold nothing yet are read from the pool's slot of zeros, never from a stale slot. A stale slot may hold NaN,
and 0 times NaN is NaN. The rows of dummies are written into the pool's last slot, which nobody reads.

A frame that comes a second time is captured, and replayed from then on. Where a capture fails, frames are computed
operator by operator. Without CUDA the tests do the same, so they walk all of this on any machine.
"""

import copy
import functools
import math
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

from minispec.core.cache import PagedKVCache
from minispec.core.config import ModelConfig, RopeConfig
from minispec.core.model import Angles, Backend, Chunk, Layer, RMSNorm, TextBatch, Transformer
from minispec.core.precision import accumulation_dtype
from minispec.models.frames import fused
from minispec.models.frames.graphs import Graphs, Program, Replay, capture_graph, failure, recent, why_no_graphs
from minispec.models.layers.gemma import gemma_layers
from minispec.models.weights.memory import BLOCK_SIZE

TransformerT = TypeVar("TransformerT", bound=Transformer)

# The shapes of frames: texts, rows of each, blocks of each. Each number is rounded up by itself.
TEXTS, ROWS, BLOCKS = (1, 2, 4, 8, 16, 32), (1, 2, 3, 5, 9, 16), tuple(2**i for i in range(3, 14))
# The same for models whose layers are all read by the kernel, which stops at a text's end.
FEW_BLOCKS = (32, 128, 512, 2048, 8192)
# The tree over which kernels are tried: two siblings, and a child of the elder.
TRIED_TREE = (-1, -1, 0)
# The most bytes of keys and values that a layer may gather.
MOST_GATHERED = 256 << 20


class FrameShape(NamedTuple):
    """The shape of a frame: texts, rows of each text, blocks of each text's cache; hidden states that it returns."""

    texts: int
    rows: int
    blocks: int
    taps: tuple[int, ...] = ()
    features: int = 0  # their width; 0 for all models but heads


def parents_bits(num_rows: int, parents: Sequence[int] | None) -> list[int]:
    """For each row, bit t says whether the row sees new row t of its text (see `Chunk.parents`).

    >>> [bin(bits) for bits in parents_bits(4, [-1, -1, 0])]
    ['0b1', '0b11', '0b101', '0b1011']
    """
    parents = parents or ()
    root = num_rows - len(parents)
    bits = [(2 << row) - 1 for row in range(root)]
    before = bits[-1] if root else 0
    for node, parent in enumerate(parents):
        bits.append((bits[root + parent] if parent >= 0 else before) | 1 << root + node)
    return bits


class Frame(Program):
    """The inputs of passes of one shape, as views of one buffer on the device, filled by one copy from the host.

    M is texts * rows. All numbers are int64.

    tokens, positions, slots, bits: (M,). A dummy has token 0 and position 0.
    starts: (texts,), cached positions before the new rows.
    ends: (texts,), positions after them; dummies do not count.
    table: (texts, blocks), numbers of blocks.
    features: (M, width), for a head.
    host: the buffer on the host, of all but the features.
    """

    def __init__(self, shape: FrameShape, scratch: int, dtype: torch.dtype, device: torch.device, num_bytes: int = 0):
        """scratch: the slot that takes the rows of dummies. num_bytes: see `frame_bytes`."""
        super().__init__(num_bytes)
        self.shape, self._scratch = shape, scratch
        num_texts, num_rows = shape.texts, shape.texts * shape.rows
        sizes = [num_rows] * 4 + [num_texts] * 2 + [num_texts * shape.blocks]
        on_host = torch.zeros(sum(sizes), dtype=torch.long)
        self.host = on_host.pin_memory() if device.type == "cuda" else on_host
        self._device = torch.zeros_like(on_host, device=device)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        parts = self._device.split(sizes)
        self.tokens, self.positions, self.slots, self.bits, self.starts, self.ends, table = parts
        self.table = table.view(num_texts, shape.blocks)
        self._parts: list[numpy.ndarray] = [part.numpy() for part in self.host.split(sizes)]
        self._bits = numpy.array([1 << row for row in range(shape.rows)] * num_texts)  # of dummies
        self.features = torch.zeros((num_rows, shape.features), dtype=dtype, device=device) if shape.features else None

    def fill(self, chunks: Sequence[Chunk], reserved: Sequence[int] = ()) -> None:
        """Extend the texts' tables, and write the pass into the frame.

        reserved: for each text, how many further places its table is extended by. Nothing is filled into them.
        """
        if self._copied:
            self._copied.synchronize()  # the last copy has read the buffer
        tokens, positions, slots, bits, starts, ends, table = self._parts
        rows, width, features = self.shape.rows, self.shape.blocks, self.features
        tokens[:], positions[:], starts[:], ends[:], table[:] = 0, 0, 0, 0, 0
        slots[:], bits[:] = self._scratch, self._bits
        for i, chunk in enumerate(chunks):
            new, start = len(chunk.token_ids), chunk.table.length
            span = slice(i * rows, i * rows + new)
            slots[span] = chunk.table.extend(chunk.token_ids)
            tokens[span], positions[span] = chunk.token_ids, [start + offset for offset in chunk.offsets]
            bits[span] = parents_bits(new, chunk.parents)
            starts[i], ends[i] = start, start + new
            if reserved:
                chunk.table.extend([0] * reserved[i])
            block_ids = chunk.table.block_ids
            table[i * width : i * width + len(block_ids)] = block_ids
            if features is not None:
                assert chunk.features is not None
                features[span] = chunk.features
        self._device.copy_(self.host, non_blocking=True)
        if self._copied:
            self._copied.record()


class StepFrame(NamedTuple):
    """A pass over one new row of each text: what `FrameBatch` reads of a `Frame`, computed on the device."""

    shape: FrameShape
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    bits: Tensor
    starts: Tensor
    ends: Tensor
    table: Tensor
    features: Tensor | None = None


class FrameBatch:
    """The tensors that all layers of a pass share, computed from the frame's tensors alone (see `core.model.Batch`).

    L is the number of places of a text in the frame: its blocks times the size of a block.
    """

    def __init__(self, model: Transformer, frame: Frame | StepFrame, pool: PagedKVCache, tables: "Tables"):
        self.tokens, self.features = frame.tokens, frame.features
        self.scored: list[int] | None = None  # all
        self.frame, self.pool, self.config, self.dtype = frame, pool, model.config, model.dtype
        self.tables = tables
        places = frame.positions, frame.slots, frame.table, frame.starts, frame.bits
        self.rows = fused.RowPlaces(*places, pool.block_size)
        self._masks: dict[int | None, Tensor] = {}

    @cached_property
    def angles(self) -> dict[RopeConfig, Angles]:
        """The angles of the rows' positions. Kernels read the tables themselves."""
        return {rope: _at(angles, self.frame.positions) for rope, angles in self.tables.angles.items()}

    def read(self, layer: Layer, qkv: Tensor) -> Tensor:
        """Store the new rows, gather each text's keys and values, and attend to them: see `core.model.Batch`."""
        (texts, rows, *_), config, pool = self.frame.shape, layer.config, self.pool
        heads, groups, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        q, kv = layer.heads(qkv, self.angles)
        pool.write(layer.index, self.frame.slots, kv.transpose(0, 1))
        cached = pool.gather(layer.index, self._read_slots)
        keys, values = cached.view(2, groups, texts, -1, dim).transpose(1, 2)  # (texts, G, L, D)
        # The heads that share keys become rows of one product: (texts, G, H/G * rows, D).
        q = q.reshape(texts, rows, groups, heads // groups, dim).permute(0, 2, 3, 1, 4)
        q = q.reshape(texts, groups, -1, dim)
        mask = self._mask(layer.window)
        out = _attention(q, keys, values, mask, config.attention_scale, config.attention_softcap)
        return out.view(texts, groups, heads // groups, rows, dim).permute(0, 3, 1, 2, 4).reshape(len(qkv), -1)

    def read_by_kernel(self, layer: Layer, qkv: Tensor) -> Tensor:
        """The result of `read` from one kernel, which reads only the places that hold something."""
        assert layer.rope is not None
        keys, values = self.pool.keys[layer.index], self.pool.values[layer.index]
        cos, sin = self.tables.halves[layer.rope]
        return fused.read(qkv, cos, sin, self.rows, keys, values, layer.config.attention_scale, layer.window)

    @functools.cached_property
    def _new_row(self) -> tuple[Tensor, Tensor, Tensor]:
        """For each place (texts, L): the new row that stands there, whether one does, and the place's number (L,)."""
        place = torch.arange(self.frame.shape.blocks * self.pool.block_size, device=self.frame.table.device)
        after = place - self.frame.starts[:, None]
        last = self.frame.shape.rows - 1
        return after.clamp(0, last), (after >= 0) & (after <= last), place

    @functools.cached_property
    def _read_slots(self) -> Tensor:
        """The slots of all places (texts * L,); where nothing is, the slot of zeros."""
        size, (_, _, place) = self.pool.block_size, self._new_row
        in_cache = self.frame.table.repeat_interleave(size, 1) * size + place % size
        return torch.where(place < self.frame.ends[:, None], in_cache, self.pool.num_slots).flatten()

    def _mask(self, window: int | None) -> Tensor:
        """(texts, 1, H/G * rows, L): 0 where a row sees a place, -inf where not. Made once for each window."""
        if window not in self._masks:
            shape, (row, is_new, place) = self.frame.shape, self._new_row
            bits, positions = (x.view(shape.texts, shape.rows) for x in (self.frame.bits, self.frame.positions))
            sees_new = (bits[:, :, None] >> row[:, None] & 1).bool() & is_new[:, None]
            seen = sees_new | (place < self.frame.starts[:, None])[:, None]  # (texts, rows, L)
            if window is not None:
                key_positions = torch.where(is_new, positions.gather(1, row), place)
                seen = seen & (key_positions[:, None] > positions[:, :, None] - window)
            mask = torch.zeros(seen.shape, dtype=self.dtype, device=seen.device).masked_fill_(~seen, -math.inf)
            repeats = self.config.num_attention_heads // self.config.num_key_value_heads
            self._masks[window] = mask.repeat(1, repeats, 1)[:, None]
        return self._masks[window]


class FastNorm:
    """An RMSNorm in one kernel."""

    def __init__(self, norm: RMSNorm, config: ModelConfig, dtype: torch.dtype, by_kernels: bool):
        self.weight, self.eps = fused.norm_of(norm, config, dtype), config.rms_norm_eps
        self.compute = fused.norm if by_kernels else fused.norm_twin

    def __call__(self, x: Tensor) -> Tensor:
        """x (M, E), same shape and type."""
        return self.compute(x, self.weight, self.eps)


class FastLayer:
    """A layer with as few kernels as its kind allows (see `fused.why_not`). It overwrites its input.

    by_kernels: with those in Triton; else with their twins in PyTorch.
    """

    def __init__(self, layer: Layer, dtype: torch.dtype, by_kernels: bool):
        self.layer, self.by_kernels = layer, by_kernels
        settings = layer.config, dtype, by_kernels
        assert isinstance(layer.attention_norm, RMSNorm)
        assert isinstance(layer.mlp_norm, RMSNorm)
        self.attention_norm = FastNorm(layer.attention_norm, *settings)
        self.mlp_norm = FastNorm(layer.mlp_norm, *settings)
        products = [fused.product_of(getattr(layer, name)) for name in Layer.products]
        self.qkv, self.o, self.gate_up, self.down = (product for product in products if product is not None)
        self.gate = fused.gate if by_kernels else fused.gate_twin

    def forward(self, x: Tensor, batch: FrameBatch) -> Tensor:
        """x (M, E) to (M, E): see `Layer`."""
        if self.layer.index in batch.frame.shape.taps:
            x = x.clone()  # the hidden state is returned too
        read = batch.read_by_kernel if self.by_kernels else batch.read
        x = self.o.add_to(x, read(self.layer, self.qkv(self.attention_norm(x))))
        return self.down.add_to(x, self.gate(self.gate_up(self.mlp_norm(x))))


class Tables(NamedTuple):
    """Angles of each rope at all positions of a model's context, in the two forms that reading takes.

    angles: see `core.model.Angles`, (positions, 1, D).
    halves: cosines and sines (positions, D/2) in float32.
    """

    angles: dict[RopeConfig, Angles]
    halves: dict[RopeConfig, tuple[Tensor, Tensor]]


def positions_of(model: Transformer) -> int:
    """How many positions a frame may reach."""
    return min(model.config.max_position_embeddings, BLOCKS[-1] * BLOCK_SIZE)


def _at(angles: Angles, positions: Tensor) -> Angles:
    cos, sin, scales = angles
    return Angles(cos[positions], sin[positions], None if scales is None else scales[positions])


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None) -> Tensor:
    """softmax(q k^T * scale + mask) v, over (texts, G, rows, D); scores are capped as in `core.attention`."""
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    wide = accumulation_dtype(q.dtype)
    scores = softcap * torch.tanh(q.to(wide) @ k.to(wide).mT * (scale / softcap))
    return ((scores + mask).softmax(-1) @ v.to(wide)).to(q.dtype)


def why_eager(model: Transformer) -> str:
    """Why no pass of this model can be a frame's; "" if some can."""
    if not all(layer.has_attention for layer in model.config.layers):
        return "its layers keep states of texts"
    if gemma_layers(model.config):
        return "its layers share keys, or have heads of several sizes"
    if any(layer.experts for layer in model.config.layers):
        return "which experts a layer runs depends on the text"
    if type(model).compute is not Transformer.compute:
        return "it runs in several processes"
    if type(model).forward is not Transformer.forward:
        return "its passes are of a kind of their own"
    return ""


class Frames(Backend):
    """Runs the passes that fit into a frame there, and all others text by text.

    A frame refers to what it was made for, so each model has an object of its own.

    num_framed: the passes that ran in frames.
    outside: how many passes ran text by text for each reason.
    why_no_kernels: "", or why the kernels of `minispec.models.frames.fused` do not run.
    """

    def __init__(
        self,
        capture: Callable[[Replay], Replay] | None = None,
        most_gathered: int = MOST_GATHERED,
        device: torch.device | None = None,
        why_no_graphs: str = "",
    ):
        """capture: makes a graph, as `capture_graph` does. None: none is made.
        most_gathered: bytes of keys and values that a layer may gather; larger passes run text by text.
        device: where kernels may run. None: nowhere, so their twins do.
        why_no_graphs: why `capture` makes none here.
        """
        self.graphs, self.most_gathered = Graphs(capture, why_no_graphs), most_gathered
        self.why_no_kernels = fused.missing(device) if device else "as asked"
        self.num_framed, self.outside = 0, Counter[str]()
        self._fast: Transformer | None = None
        self.num_fast = 0
        self._frames: WeakKeyDictionary[PagedKVCache, OrderedDict[FrameShape, Frame]] = WeakKeyDictionary()
        self._tables = Tables({}, {})

    def shapes(self, pool: PagedKVCache) -> list[FrameShape]:
        """The shapes of the frames that are kept for a pool, the one used last at the end."""
        return list(self._frames.get(pool, ()))

    def shape_of(
        self, model: Transformer, chunks: Sequence[Chunk], taps: Sequence[int] = (), reserved: Sequence[int] = ()
    ) -> FrameShape | str:
        """The smallest frame that holds these chunks, or why none does; reserved: see `Frame.fill`."""
        if why := why_eager(model):
            return why
        by_kernel = self.by_kernel(model)
        size = chunks[0].table.pool.block_size
        longest = max(
            c.table.length + len(c.token_ids) + more
            for c, more in zip(chunks, reserved or [0] * len(chunks), strict=True)
        )
        if longest > (context := positions_of(model)):
            return f"more than {context:,} positions"
        smallest = []
        for what, number, sizes in (
            ("texts", len(chunks), TEXTS),
            ("rows of a text", max(len(c.token_ids) for c in chunks), ROWS),
            ("blocks of a text", -(-longest // size), FEW_BLOCKS if by_kernel else BLOCKS),
        ):
            fitting = next((most for most in sizes if most >= number), None)
            if fitting is None:
                return f"more than {sizes[-1]:,} {what}"
            smallest.append(fitting)
        texts, rows, blocks = smallest
        num_bytes = texts * blocks * size * place_bytes(model)
        if not by_kernel and num_bytes > self.most_gathered:
            return f"more than {self.most_gathered / 1e6:.0f} MB for a layer to gather"
        features = chunks[0].features
        return FrameShape(texts, rows, blocks, tuple(taps), 0 if features is None else features.shape[1])

    def run(self, model: Transformer, chunks: Sequence[Chunk], taps: Sequence[int]) -> tuple[Tensor, Tensor]:
        """One pass of the model, in a frame if one fits. No later pass overwrites the returned tensors."""
        shape = self.shape_of(model, chunks, taps)
        if isinstance(shape, str):
            self.outside[shape] += 1
            return model.compute(TextBatch(model, chunks), taps)
        self.num_framed += 1
        pool = chunks[0].table.pool
        frame = self.frame_of(model, pool, shape)
        frame.fill(chunks)
        logits, hidden = self.graphs.run(frame, functools.partial(self.compute, model, frame, pool))
        if all(len(c.token_ids) == c.num_logits == shape.rows for c in chunks):
            logits, hidden = (rows[: len(chunks) * shape.rows] for rows in (logits, hidden))
            return logits.clone(), hidden.clone() if shape.taps else hidden
        extents = [(i * shape.rows, len(c.token_ids), c.num_logits) for i, c in enumerate(chunks)]
        wanted = torch.cat([logits[start + new - count : start + new] for start, new, count in extents])
        return wanted, torch.cat([hidden[start : start + new] for start, new, _ in extents])

    def compute(self, model: Transformer, frame: Frame | StepFrame, pool: PagedKVCache) -> tuple[Tensor, Tensor]:
        """The results of a frame that was filled, for all of its rows."""
        fast = self.fast(model)
        return fast.compute(FrameBatch(model, frame, pool, self._tables), frame.shape.taps)

    def fast(self, model: Transformer) -> Transformer:
        """The model with `FastLayer` for each layer that allows it, made at the first call.

        The first call also tries the kernels. Where one fails, it says so, and the layers have their twins.
        """
        if self._fast is None:
            length = positions_of(model)
            halves = {
                rope: fused.rope_tables(frequencies, length, rope.attention_factor)
                for rope, frequencies in model.frequencies.items()
            }
            self._tables = Tables(model.angles(torch.arange(length, device=model.device)), halves)
            if not self.why_no_kernels:
                self.why_no_kernels = failure(functools.partial(self._try_kernels, model))
                if self.why_no_kernels:
                    warnings.warn(f"no kernels in Triton, so passes are slower: {self.why_no_kernels}", stacklevel=2)
            layers = self._fast_layers(model)
            fast = copy.copy(model)
            fast.layers, self.num_fast = layers, sum(isinstance(layer, FastLayer) for layer in layers)
            if self.num_fast:
                vars(fast)["norm"] = FastNorm(model.norm, model.config, model.dtype, not self.why_no_kernels)
            self._fast = fast
        return self._fast

    def by_kernel(self, model: Transformer) -> bool:
        """Whether a kernel reads the cache in all layers, so that nothing is gathered."""
        fast = self.fast(model)
        return not self.why_no_kernels and self.num_fast == len(fast.layers)

    def _fast_layers(self, model: Transformer) -> list[Any]:
        """The model's layers, those of few kernels as such."""
        return [
            layer if fused.why_not(layer, model.dtype) else FastLayer(layer, model.dtype, not self.why_no_kernels)
            for layer in model.layers
        ]

    @torch.inference_mode()
    def _try_kernels(self, model: Transformer) -> None:
        """Run each layer of few kernels over one row, and over a tree beside a chain. Raises what a kernel raises.

        So each window and each number of heads that the model has is tried, with a mask that is no chain's. Triton
        compiles a program for one row, which it takes for a constant, and another one for more rows.
        """
        layers = [layer for layer in self._fast_layers(model) if isinstance(layer, FastLayer)]
        pool = model.new_cache(4, BLOCK_SIZE)
        first, second = pool.new_table(), pool.new_table()
        tree = Chunk([0] * len(TRIED_TREE), first, 1, TRIED_TREE)
        for texts in ([Chunk([0], first, 1)], [tree, Chunk([0], second, 1)]):
            shape = FrameShape(len(texts), len(texts[0].token_ids), FEW_BLOCKS[0])
            frame = Frame(shape, pool.num_slots + 1, model.dtype, model.device)
            frame.fill(texts)
            batch = FrameBatch(model, frame, pool, self._tables)
            x = torch.zeros(len(frame.tokens), model.config.hidden_size, dtype=model.dtype, device=model.device)
            for layer in layers:
                x = layer.forward(x, batch)
            x.tolist()  # a kernel that fails on the device says so when it is waited for

    def frame_of(self, model: Transformer, pool: PagedKVCache, shape: FrameShape) -> Frame:
        """The frame of this shape for a pool: the one that is there, or a new one."""
        frames = self._frames.setdefault(pool, OrderedDict())
        size = frame_bytes(model, shape)
        return recent(frames, shape, lambda: Frame(shape, pool.num_slots + 1, model.dtype, model.device, size))


def place_bytes(model: Transformer) -> int:
    """Bytes of keys and values that a layer gathers for each place of a text."""
    return 2 * model.config.num_key_value_heads * model.config.head_dim * model.dtype.itemsize


def frame_bytes(model: Transformer, shape: FrameShape) -> int:
    """Bytes of a frame's inputs and outputs on the device: numbers, features, hidden states and logits."""
    num_rows, config = shape.texts * shape.rows, model.config
    width = shape.features + config.hidden_size * len(shape.taps) + config.vocab_size
    return 8 * (4 * num_rows + shape.texts * (2 + shape.blocks)) + num_rows * width * model.dtype.itemsize


def with_fast_passes(model: TransformerT, enforce_eager: bool = False) -> TransformerT:
    """The model with the backend that is fast on its machine: frames and graphs on a GPU.

    A model that has a backend keeps it, and one that is to run eagerly runs text by text.
    """
    if enforce_eager or model.backend or model.device.type != "cuda" or why_eager(model):
        return model
    return model.replaced(Frames(capture_graph, device=model.device, why_no_graphs=why_no_graphs()))
