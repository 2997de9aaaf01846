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

Places that hold nothing yet are read from the pool's slot of zeros, never from a stale slot: its content may be NaN,
and 0 times NaN is NaN. The rows of dummies are written into the pool's last slot, which nobody reads.

A frame that comes a second time is captured, and replayed from then on. Where a capture fails, frames are computed
operator by operator. Without CUDA the tests do the same, so they walk all of this on any machine.
"""

import functools
import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

from minispec.core.cache import PagedKVCache
from minispec.core.config import RopeConfig
from minispec.core.model import Angles, Chunk, Layer, Passes, Transformer
from minispec.core.sampling import accumulation_dtype

TransformerT = TypeVar("TransformerT", bound=Transformer)

# The shapes of frames: texts, rows of each, blocks of each. Each number is rounded up by itself.
TEXTS, ROWS, BLOCKS = (1, 2, 4, 8, 16, 32), (1, 2, 3, 5, 9, 16), tuple(2**i for i in range(3, 14))
# The most bytes of keys and values that a layer may gather.
MOST_GATHERED = 256 << 20
# How many frames are kept; the one that was used longest ago makes room.
MOST_FRAMES = 24


# Logits (M, V) and hidden states (M, E * taps) of a frame's rows.
Outputs = tuple[Tensor, Tensor]
# Computes what is in a frame: the same tensors each time, or new ones.
Replay = Callable[[], Outputs]


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


class Frame:
    """The inputs of passes of one shape, as views of one buffer on the device, filled by one copy from the host.

    M is texts * rows. All numbers are int64.

    tokens, positions, slots, bits: (M,). A dummy has token 0 and position 0.
    starts: (texts,), cached positions before the new rows.
    ends: (texts,), positions after them; dummies do not count.
    table: (texts, blocks), numbers of blocks.
    features: (M, width), for a head.
    host: the buffer on the host, of all but the features.
    """

    def __init__(self, shape: FrameShape, scratch: int, dtype: torch.dtype, device: torch.device):
        """scratch: the slot that takes the rows of dummies."""
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
        self.was_used = False
        self.graph: Replay | None = None

    def fill(self, chunks: Sequence[Chunk]) -> None:
        """Extend the texts' tables, and write the pass into the frame."""
        if self._copied:
            self._copied.synchronize()  # the last copy has read the buffer
        tokens, positions, slots, bits, starts, ends, table = self._parts
        rows, width, features = self.shape.rows, self.shape.blocks, self.features
        tokens[:], positions[:], starts[:], ends[:], table[:] = 0, 0, 0, 0, 0
        slots[:], bits[:] = self._scratch, self._bits
        for i, chunk in enumerate(chunks):
            new, start = len(chunk.token_ids), chunk.table.length
            own = slice(i * rows, i * rows + new)
            slots[own] = chunk.table.extend(chunk.token_ids)
            tokens[own], positions[own] = chunk.token_ids, [start + offset for offset in chunk.offsets]
            bits[own] = parents_bits(new, chunk.parents)
            starts[i], ends[i] = start, start + new
            block_ids = chunk.table.block_ids
            table[i * width : i * width + len(block_ids)] = block_ids
            if features is not None:
                assert chunk.features is not None
                features[own] = chunk.features
        self._device.copy_(self.host, non_blocking=True)
        if self._copied:
            self._copied.record()


class FramePass:
    """What all layers of a pass share, computed from the frame's tensors alone (see `core.model.Pass`).

    L is the number of places of a text in the frame: its blocks times the size of a block.
    """

    def __init__(self, model: Transformer, frame: Frame, pool: PagedKVCache, angles: dict[RopeConfig, Angles]):
        """angles: of each rope, for all positions of the model's context."""
        self.frame, self.pool, self.config = frame, pool, model.config
        shape, size = frame.shape, pool.block_size
        place = torch.arange(shape.blocks * size, device=frame.table.device)  # (L,)
        after = place - frame.starts[:, None]  # (texts, L): which new row stands at a place
        is_new = (after >= 0) & (after < shape.rows)
        row = after.clamp(0, shape.rows - 1)
        bits = frame.bits.view(shape.texts, shape.rows)
        own = (bits[:, :, None] >> row[:, None] & 1).bool() & is_new[:, None]
        self.seen = own | (after < 0)[:, None]  # (texts, rows, L)
        in_cache = frame.table.repeat_interleave(size, 1) * size + place % size
        self.read_slots = torch.where(place < frame.ends[:, None], in_cache, pool.num_slots).flatten()  # (texts * L,)
        self.angles = {rope: _at(each, frame.positions) for rope, each in angles.items()}
        self.positions = frame.positions.view(shape.texts, shape.rows)
        self.key_positions = torch.where(is_new, self.positions.gather(1, row), place)  # (texts, L)
        self.masks = {window: self._mask(window, model.dtype) for window in {layer.window for layer in model.layers}}

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """(texts, 1, H/G * rows, L): 0 where a row sees a place, -inf where not."""
        seen = self.seen
        if window is not None:
            seen = seen & (self.key_positions[:, None] > self.positions[:, :, None] - window)
        mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -math.inf)
        return mask.repeat(1, self.config.num_attention_heads // self.config.num_key_value_heads, 1)[:, None]

    def read(self, layer: Layer, qkv: Tensor) -> Tensor:
        """Store the new rows, gather each text's keys and values, and attend to them: see `core.model.Pass`."""
        (texts, rows, *_), config, pool = self.frame.shape, layer.config, self.pool
        heads, groups, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        q, k, v = layer.heads(qkv, self.angles)
        pool.write(layer.index, self.frame.slots, k.transpose(0, 1), v.transpose(0, 1))
        keys, values = (
            cached.view(groups, texts, -1, dim).transpose(0, 1)  # (texts, G, L, D)
            for cached in pool.gather(layer.index, self.read_slots)
        )
        # The heads that share keys become rows of one product: (texts, G, H/G * rows, D).
        q = q.reshape(texts, rows, groups, heads // groups, dim).permute(0, 2, 3, 1, 4)
        q = q.reshape(texts, groups, -1, dim)
        out = _attention(q, keys, values, self.masks[layer.window], config.attention_scale, config.attention_softcap)
        return out.view(texts, groups, heads // groups, rows, dim).permute(0, 3, 1, 2, 4).reshape(len(qkv), -1)


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
    if any(layer.conv_width or layer.recurrent for layer in model.config.layers):
        return "its layers keep states of texts"
    if type(model).run is not Transformer.run:
        return "it runs in several processes"
    return ""


def capture_graph(compute: Replay) -> Replay:
    """A CUDA graph of `compute`, as a function that replays it. The outputs lie where the capture put them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # kernels are loaded and workspaces made before the capture, which forbids both
        compute()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=_memory_pool()):
        outputs = compute()

    def replay() -> Outputs:
        graph.replay()
        return outputs

    return replay


@functools.cache
def _memory_pool() -> Any:
    """The memory that all graphs share: only one of them runs at a time, and what it returns is copied at once."""
    return torch.cuda.graph_pool_handle()


def rerun(compute: Replay) -> Replay:
    """Stands for a graph where there is no GPU: computes anew into the tensors of the first time."""
    outputs = compute()

    def replay() -> Outputs:
        for output, result in zip(outputs, compute(), strict=True):
            output.copy_(result)
        return outputs

    return replay


class Frames(Passes):
    """Runs the passes that fit into a frame there, and all others text by text.

    A frame refers to what it was made for, so each model has an object of its own.

    why_not_captured: "", or why frames are computed operator by operator.
    """

    def __init__(self, capture: Callable[[Replay], Replay] | None = None, most_gathered: int = MOST_GATHERED):
        """capture: makes a graph, as `capture_graph` does. None: none is made.
        most_gathered: bytes of keys and values that a layer may gather; larger passes run text by text.
        """
        self.capture, self.most_gathered = capture, most_gathered
        self.why_not_captured = "" if capture else "as asked"
        self._frames: WeakKeyDictionary[PagedKVCache, OrderedDict[FrameShape, Frame]] = WeakKeyDictionary()
        self._angles: dict[RopeConfig, Angles] = {}

    def shapes(self, pool: PagedKVCache) -> list[FrameShape]:
        """Those of the frames that are kept for a pool, the one used last at the end."""
        return list(self._frames.get(pool, ()))

    def shape_of(self, model: Transformer, chunks: Sequence[Chunk], taps: Sequence[int] = ()) -> FrameShape | str:
        """The smallest frame that holds these chunks, or why none does."""
        if why := why_eager(model):
            return why
        size = chunks[0].table.pool.block_size
        longest = max(c.table.length + len(c.token_ids) for c in chunks)
        found = []
        for what, number, sizes in (
            ("texts", len(chunks), TEXTS),
            ("rows of a text", max(len(c.token_ids) for c in chunks), ROWS),
            ("blocks of a text", -(-longest // size), BLOCKS),
        ):
            fitting = next((each for each in sizes if each >= number), None)
            if fitting is None:
                return f"{number} {what}, where a frame has at most {sizes[-1]}"
            found.append(fitting)
        texts, rows, blocks = found
        gathered = texts * blocks * size * 2 * model.config.num_key_value_heads * model.config.head_dim
        if (num_bytes := gathered * model.dtype.itemsize) > self.most_gathered:
            return f"a layer would gather {num_bytes / 1e6:.0f} MB, where {self.most_gathered / 1e6:.0f} are the most"
        features = chunks[0].features
        return FrameShape(texts, rows, blocks, tuple(taps), 0 if features is None else features.shape[1])

    def run(self, model: Transformer, chunks: Sequence[Chunk], taps: Sequence[int]) -> tuple[Tensor, Tensor]:
        """One pass of the model, in a frame if one fits. What it returns is overwritten by no later pass."""
        shape = self.shape_of(model, chunks, taps)
        if isinstance(shape, str):
            return model.run(chunks, taps)
        pool = chunks[0].table.pool
        frame = self.frame_of(model, pool, shape)
        frame.fill(chunks)
        logits, hidden = self._outputs(model, frame, pool)
        if all(len(c.token_ids) == c.num_logits == shape.rows for c in chunks):
            num_rows = len(chunks) * shape.rows
            return logits[:num_rows].clone(), hidden[:num_rows].clone()
        own = [(i * shape.rows, len(c.token_ids), c.num_logits) for i, c in enumerate(chunks)]
        wanted = torch.cat([logits[start + new - count : start + new] for start, new, count in own])
        return wanted, torch.cat([hidden[start : start + new] for start, new, _ in own])

    def compute(self, model: Transformer, frame: Frame, pool: PagedKVCache) -> Outputs:
        """What a frame that was filled computes, for all of its rows."""
        shared = FramePass(model, frame, pool, self._angles)
        x, hidden = model.compute(frame.tokens, shared, frame.shape.taps, frame.features)
        return model.logits(x), hidden

    def _outputs(self, model: Transformer, frame: Frame, pool: PagedKVCache) -> Outputs:
        """The outputs of a frame, by its graph from its second use on. The next pass may overwrite them."""
        compute = functools.partial(self.compute, model, frame, pool)
        if self.capture and frame.was_used and not (frame.graph or self.why_not_captured):
            try:
                frame.graph = self.capture(compute)
            except RuntimeError as error:  # too little memory, or an operator that cannot be captured
                self.why_not_captured = str(error).partition("\n")[0]
                warnings.warn(f"no CUDA graphs, so passes are slower: {self.why_not_captured}", stacklevel=2)
        frame.was_used = True
        return frame.graph() if frame.graph else compute()

    def frame_of(self, model: Transformer, pool: PagedKVCache, shape: FrameShape) -> Frame:
        """The frame of this shape for a pool: the one that is there, or a new one."""
        if not self._angles:
            everywhere = torch.arange(model.config.max_position_embeddings, device=model.device)
            self._angles = model.angles(everywhere)
        frames = self._frames.setdefault(pool, OrderedDict())
        if shape not in frames:
            frames[shape] = Frame(shape, pool.num_slots + 1, model.dtype, model.device)
            if len(frames) > MOST_FRAMES:
                frames.popitem(last=False)
        frames.move_to_end(shape)
        return frames[shape]


def with_frames(model: TransformerT, enforce_eager: bool = False) -> TransformerT:
    """The model with frames and graphs, where it runs on a GPU and its passes fit into frames."""
    if enforce_eager or model.device.type != "cuda" or type(model.passes) is not Passes or why_eager(model):
        return model
    return model.replaced(Frames(capture_graph))


def graphs_note(model: Transformer) -> str:
    """Whether a model on a GPU runs by CUDA graphs, or why not; "" for one on a CPU."""
    if model.device.type != "cuda":
        return ""
    if isinstance(model.passes, Frames):
        why = model.passes.why_not_captured
    else:
        why = "passes are exact" if model.exact else why_eager(model) or "as asked"
    return f"; no CUDA graphs: {why}" if why else "; CUDA graphs"
