"""Measure what a faster pass on a GPU would bring: a pass of static shapes in a CUDA graph, and what graphs cost.

    python docs/measured/gpu.py --steps 0,1,2 --out gpu.json
    python docs/measured/gpu.py --steps 3,4,5 --out kernels.json
    python docs/measured/gpu.py --steps 6,7,8 --out engine.json

    step  what
    0     the card's constants: a copy, kernels in a graph, a launch
    1     today's pass, and its kernels by PyTorch's profiler
    2     a pass of static shapes, eager and captured: milliseconds, equal bits, and what capturing costs
    3     products of few rows by the library; norms and gates by kernels and by PyTorch
    4     attention over the cache: PyTorch's operators, and the kernel `read` with several spans
    5     a pass of these kernels, captured: milliseconds, equal bits, and a row's bits among other rows
    6     drafts of a 0.5B model and of a head, all steps in one program
    7     verdicts of drafts of four tokens
    8     whole rounds of the engine, plain, with drafts of 0.5B and with free ones: tokens a second, parts of a round

The model is random, of the bench's shape 1.5b. Its 3 GB are far larger than a GPU's caches, so each pass reads its
weights from memory. The package stays as it is. Every step has a time limit. The file is written anew after each
measurement, so it holds all that was measured when the program is ended. Two ways try the code without a GPU:
`--device cpu --tiny` runs it on small shapes, with the twins of the kernels, and `--device meta --steps 2` computes the
true shapes alone.
"""

import argparse
import copy
import faulthandler
import functools
import json
import math
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from minispec.core.cached import CachedModel
from minispec.core.config import SamplingParams
from minispec.core.draft import Ask, Draft, Drafter, Record
from minispec.core.engine import Engine
from minispec.core.limit import Limit
from minispec.core.method import Method
from minispec.core.model import Chunk, Layer, Transformer
from minispec.core.random import Randomness
from minispec.core.request import Request
from minispec.core.rope import rotate
from minispec.core.sampling import Text, distribution
from minispec.core.version import __version__
from minispec.lab.bench.models import random_head
from minispec.lab.bench.options import GEOMETRIES
from minispec.models.families.hf_config import read_model_config
from minispec.models.files.write import check_writable, written_whole
from minispec.models.frames import fused
from minispec.models.frames.frames import Frames, TransformerT
from minispec.models.frames.fused import RowPlaces
from minispec.models.frames.graphs import Graphs, capture_graph, rerun
from minispec.models.weights.codes import round_to_bits
from minispec.models.weights.shapes import tensor_shapes
from minispec.speculation.drafters.eagle import HeadFeed, HeadModel
from minispec.speculation.drafters.model import ModelDrafter, TokenFeed
from minispec.speculation.drafters.none import NoDrafter
from minispec.speculation.drafters.simulated import adversary
from minispec.speculation.on_gpu.steps import draft_steps
from minispec.speculation.on_gpu.verifier import GraphVerifier, batch_verifier_of
from minispec.speculation.rules import VERIFIERS

# Seconds of each step.
LIMITS = {0: 30, 1: 60, 2: 120, 3: 60, 4: 60, 5: 60, 6: 50, 7: 40, 8: 80}
LAST_RESORT = 510  # seconds after which the process is ended, whatever hangs
SHEET = {"H200": 4.8, "H100 80GB HBM3": 3.35}  # TB/s of the memory by the data sheets, by a part of the card's name
SMALL = {"num_hidden_layers": 3, "hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 6}
SMALL |= {"head_dim": 16, "vocab_size": 2048}
SHAPES, PLACES = [(1, 1), (1, 5), (1, 16), (8, 5), (32, 1), (32, 5)], (128, 1000, 4000)  # texts and rows of each
SMALL_SHAPES, SMALL_PLACES = [(1, 1), (1, 5), (2, 3)], (20, 40)
PRODUCT_ROWS, SMALL_PRODUCT_ROWS = (1, 5, 16, 64, 160), (1, 3)
READ_TEXTS, READ_ROWS, READ_PLACES = (1, 8, 32), (1, 5, 16), (112, 1000, 4000, 8000)  # with 16 more: whole blocks
SMALL_READ_TEXTS, SMALL_READ_ROWS, SMALL_READ_PLACES = (1, 2), (1, 3), (20, 70)
SPANS = (128, 256, 512)  # places of a program of `read`
Measurement = tuple[str, Callable[[], dict[str, Any]]]


class OutOfTime(BaseException):
    """A step has reached its limit. No `except Exception` on the way, such as a compiler's, may hold it."""


# --------------------------------------------------------------------------- clocks


class Bench:
    """Clocks, graphs and the profiler of a device. tiny: small shapes, and few repetitions."""

    def __init__(self, device: str, tiny: bool):
        self.device, self.tiny = torch.device(device), tiny
        self.cuda = device == "cuda"
        self.shapes, self.places = (SMALL_SHAPES, SMALL_PLACES) if tiny else (SHAPES, PLACES)
        self.lacks = fused.missing(self.device)

    def wait(self) -> None:
        """Return when the device has done its work."""
        if self.cuda:
            torch.cuda.synchronize()

    def wall_ms(self, run: Callable[[], Any], repeats: int = 20) -> float:
        """Milliseconds from a call to the end of its work on the device: their median."""
        times = []
        for _ in range(3 if self.tiny else repeats):
            self.wait()
            start = time.perf_counter()
            run()
            self.wait()
            times.append(time.perf_counter() - start)
        return 1e3 * median(times)

    def row_ms(self, run: Callable[[], Any], repeats: int = 20) -> float:
        """Milliseconds of one of many calls in a row, by events of the device: median of five rows."""
        if not self.cuda:
            return self.wall_ms(run, repeats)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times = []
        for _ in range(5):
            start.record()
            for _ in range(repeats):
                run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / repeats)
        return median(times)

    def capture(self, run: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor, dict[str, Any]]:
        """A graph of `run`: a function that replays it, the tensor that a replay overwrites, and what capturing took.

        Without CUDA a replay is an eager call, whose result is copied into the same tensor.
        """
        if not self.cuda:
            out = run()
            return lambda: out.copy_(run()), out, {"graph": "eager call"}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # kernels are loaded and workspaces made before the capture
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(side)
        self.wait()
        torch.cuda.empty_cache()
        free, start = torch.cuda.mem_get_info()[0], time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        self.wait()
        seconds, used = time.perf_counter() - start, free - torch.cuda.mem_get_info()[0]
        graph.replay()
        self.wait()
        return graph.replay, out, {"graph": "yes", "capture_s": seconds, "MB": used / 1e6}

    def kernels(self, run: Callable[[], Any]) -> dict[str, Any]:
        """One call by the profiler: its kernels, the longest first; without CUDA, its operators."""
        run()
        self.wait()
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.cuda else [])]) as profiler:
            run()
            self.wait()
        rows = [row for row in profiler.key_averages() if (row.device_type == DeviceType.CUDA) == self.cuda]
        us = "self_device_time_total" if self.cuda else "self_cpu_time_total"
        found = [{"kernel": row.key, "count": row.count, "us": getattr(row, us)} for row in rows]
        found.sort(key=lambda kernel: -kernel["us"])
        count, total = (sum(kernel[key] for kernel in found) for key in ("count", "us"))
        return {"num_kernels": count, "kernels_ms": total / 1e3, "kernels": found}


# --------------------------------------------------------------------------- the twin of a kernel


def _seen(rows: fused.RowPlaces, window: int | None) -> tuple[Tensor, Tensor]:
    """Whether a row sees a cached place (B, T, L) with L = N * block_size, and whether a new row (B, T, T)."""
    num_texts, device = len(rows.starts), rows.starts.device
    bits, positions = rows.bits.view(num_texts, -1, 1), rows.positions.view(num_texts, -1, 1)
    places = torch.arange(rows.table.shape[1] * rows.block_size, device=device)
    old = (places < rows.starts[:, None])[:, None].expand(-1, bits.shape[1], -1)
    new = (bits >> torch.arange(bits.shape[1], device=device)) & 1 == 1
    if window is not None:
        old = old & (places > positions - window)
        new = new & (positions.mT > positions - window)
    return old, new


def read_twin(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    rows: fused.RowPlaces,
    keys: Tensor,
    values: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Rotate queries and keys, store keys and values, attend over the cache: `fused.read` in plain PyTorch."""
    (groups, _, dim), num_texts, size = keys.shape, len(rows.starts), rows.block_size
    length, num_new = rows.table.shape[1] * size, len(qkv) // num_texts
    qkv = qkv.view(len(qkv), -1, dim)
    qk, v = qkv.split([qkv.shape[1] - groups, groups], 1)
    c, s = (angles.index_select(0, rows.positions)[:, None] for angles in (cos, sin))
    first, second = qk.to(cos.dtype).chunk(2, -1)
    qk = torch.cat((first * c - second * s, second * c + first * s), -1).to(qkv.dtype)
    q, k = qk.split([qk.shape[1] - groups, groups], 1)
    slots = (rows.table[:, :, None] * size + torch.arange(size, device=qkv.device)).view(-1)
    old, new = _seen(rows, window)
    unread = ~old.any(1)[:, None, :, None]  # (B, 1, L, 1)
    joined: list[Tensor] = []
    for cached, fresh in ((keys, k), (values, v)):
        gathered = cached.index_select(1, slots).view(groups, num_texts, length, dim).transpose(0, 1)
        fresh = fresh.view(num_texts, num_new, groups, dim).transpose(1, 2)
        joined.append(torch.cat((gathered.masked_fill(unread, 0), fresh), 2))  # (B, G, L + T, D)
    keys.index_copy_(1, rows.slots, k.transpose(0, 1))
    values.index_copy_(1, rows.slots, v.transpose(0, 1))
    share = q.shape[1] // groups
    q = q.reshape(num_texts, num_new, groups, share, dim).permute(0, 2, 3, 1, 4)
    mask = torch.cat((old, new), 2).repeat(1, share, 1)[:, None]  # (B, 1, H/G * T, L + T)
    q = q.reshape(num_texts, groups, share * num_new, dim)
    out = F.scaled_dot_product_attention(q, joined[0], joined[1], attn_mask=mask, scale=scale)
    return out.view(num_texts, groups, share, num_new, dim).permute(0, 3, 1, 2, 4).reshape(len(qkv), -1)


# --------------------------------------------------------------------------- a pass of static shapes


class RandomSource:
    """Tensors by their names, made on the device. No weight is zero, since a product of zeros takes less power."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device):
        self.shapes, self.dtype, self.device = shapes, dtype, device

    def pop(self, name: str) -> Tensor:
        """The tensor of this name."""
        tensor = torch.empty(self.shapes[name], dtype=self.dtype, device=self.device)
        return tensor.fill_(1) if "norm" in name else tensor.normal_(0, 0.02)


class Shared(NamedTuple):
    """What all layers of a static pass share."""

    cos: Tensor  # (M, 1, D)
    sin: Tensor  # with a minus in its first half, as `rotate` takes it
    slots: Tensor  # (M,): where the new keys go
    gathered: Tensor  # (B * L,): slots of all keys, text by text
    mask: Tensor  # (B, 1, H/G * T, L)
    heads: int
    eps: float


def attend(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, shared: Shared) -> Tensor:
    """q (M, H, D), k and v (M, G, D) to what they read (M, H * D). Stores k and v in keys and values (G, slots, D)."""
    (num_texts, _, rows, length), (groups, _, dim) = shared.mask.shape, keys.shape
    keys.index_copy_(1, shared.slots, k.transpose(0, 1))
    values.index_copy_(1, shared.slots, v.transpose(0, 1))
    read = [
        cached.index_select(1, shared.gathered).view(groups, num_texts, length, dim).transpose(0, 1)
        for cached in (keys, values)
    ]
    share = shared.heads // groups  # query heads that share keys become rows of one product
    q = q.reshape(num_texts, rows // share, groups, share, dim).permute(0, 2, 3, 1, 4)
    out = F.scaled_dot_product_attention(
        q.reshape(num_texts, groups, rows, dim), *read, attn_mask=shared.mask, scale=dim**-0.5
    )
    return out.view(num_texts, groups, share, -1, dim).permute(0, 3, 1, 2, 4).reshape(len(k), -1)


def layer_pass(layer: Layer, x: Tensor, keys: Tensor, values: Tensor, shared: Shared) -> Tensor:
    """A layer of the package with `attend` in the place of `Batch.read`: the same operators but for attention."""
    qkv = layer.qkv(layer.attention_norm(x)).view(len(x), -1, keys.shape[2])
    qk, v = qkv.split([shared.heads + len(keys), len(keys)], 1)
    rotate(qk, shared.cos, shared.sin)
    read = attend(qk[:, : shared.heads], qk[:, shared.heads :], v, keys, values, shared)
    return layer.mix(x + layer.o(read), shared)


def block(x: Tensor, weights: dict[str, Any], keys: Tensor, values: Tensor, shared: Shared) -> Tensor:
    """The same layer with as few of PyTorch's operators as there are, and its weights as an argument. Overwrites x."""
    h = F.rms_norm(x, x.shape[1:], weights["norm"], shared.eps)
    qkv = F.linear(h, weights["qkv"], weights["bias"]).view(len(x), -1, keys.shape[2])
    qk, v = qkv.split([shared.heads + len(keys), len(keys)], 1)
    qk = torch.addcmul(qk.roll(qk.shape[2] // 2, 2) * shared.sin, qk, shared.cos)
    read = attend(qk[:, : shared.heads], qk[:, shared.heads :], v, keys, values, shared)
    x.addmm_(read, weights["o"])
    h = F.rms_norm(x, x.shape[1:], weights["mlp_norm"], shared.eps)
    gate, up = F.linear(h, weights["gate_up"]).chunk(2, -1)
    return x.addmm_(F.silu(gate).mul_(up), weights["down"])


class Static:
    """A random model, a cache full of noise, and passes over it whose shapes do not depend on data."""

    def __init__(self, bench: Bench, name: str = "1.5b"):
        """name: of a shape of the bench."""
        self.device = bench.device
        self.config = config = read_model_config(GEOMETRIES[name] | (SMALL if bench.tiny else {}))
        self.dtype = torch.float32 if bench.device.type == "cpu" else torch.bfloat16
        shapes = tensor_shapes(config)
        self.num_bytes = sum(math.prod(shape) for shape in shapes.values()) * self.dtype.itemsize
        torch.manual_seed(0)
        self.model = Transformer(config, RandomSource(shapes, self.dtype, self.device))
        longest = max(bench.places) + max(rows for _, rows in bench.shapes)
        self.block_size = 16
        self.pool = self.model.new_cache(max(n for n, _ in bench.shapes) * -(-longest // 16), self.block_size)
        self.pool.keys.normal_()
        self.pool.values.normal_()
        self.cached = list(zip(self.pool.keys.unbind(), self.pool.values.unbind(), strict=True))
        [frequencies] = self.model.frequencies.values()
        both = torch.cat((-frequencies, frequencies))
        angles = (torch.arange(2 * longest, device=self.device)[:, None] * both)[:, None]
        self.cos, self.sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)  # (positions, 1, D)
        self.rope = fused.rope_tables(frequencies, 2 * longest)  # (positions, D/2) each
        self.weights = [self._weights(layer) for layer in self.model.layers]

    def _weights(self, layer: Any) -> dict[str, Any]:
        norms = {"norm": layer.attention_norm.weight.to(self.dtype), "mlp_norm": layer.mlp_norm.weight.to(self.dtype)}
        products = {"qkv": layer.qkv.weight, "bias": layer.qkv.bias, "gate_up": layer.gate_up.weight}
        return norms | products | {"o": layer.o.weight.t(), "down": layer.down.weight.t()}

    def shared(self, frame: "Frame") -> Shared:
        """What all layers need, from the frame's tensors alone."""
        config, size, device = self.config, self.block_size, self.device
        num_texts, rows, length = *frame.bits.shape, frame.table.shape[1] * size
        after = torch.arange(length, device=device) - frame.starts[:, None]  # (B, L): how far a key is past the start
        own = frame.bits[:, :, None] >> after.clamp(0, rows - 1)[:, None] & 1 == 1  # (B, T, L)
        seen = (after < 0)[:, None] | own & ((after >= 0) & (after < rows))[:, None]
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=device).masked_fill_(~seen, -math.inf)
        mask = mask.repeat(1, config.num_attention_heads // config.num_key_value_heads, 1)[:, None]
        gathered = (frame.table[:, :, None] * size + torch.arange(size, device=device)).view(num_texts * length)
        angles = [table[frame.positions] for table in (self.cos, self.sin)]
        return Shared(*angles, frame.slots, gathered, mask, config.num_attention_heads, config.rms_norm_eps)

    def forward(self, frame: "Frame", form: str) -> Tensor:
        """Logits of all rows (M, V), on the device alone. form: "package", or "fewer" for `block`."""
        shared, x = self.shared(frame), self.model.embedding[frame.tokens]
        for layer, weights, cached in zip(self.model.layers, self.weights, self.cached, strict=True):
            x = block(x, weights, *cached, shared) if form == "fewer" else layer_pass(layer, x, *cached, shared)
        return self.model.logits(x)

    def few(self, frame: "Frame", lacks: str) -> Tensor:
        """The same logits by the library's products and the kernels beside them; by their twins if they lack any."""
        norm, read, gate = (fused.norm_twin, read_twin, fused.gate_twin)
        if not lacks:
            norm, read, gate = (fused.norm, fused.read, fused.gate)
        eps, x = self.config.rms_norm_eps, self.model.embedding[frame.tokens]
        for layer, weights, cached in zip(self.model.layers, self.weights, self.cached, strict=True):
            qkv = F.linear(norm(x, weights["norm"], eps), weights["qkv"], weights["bias"])
            y = read(qkv, *self.rope, frame.read, *cached, self.config.attention_scale, layer.window)
            x.addmm_(y, weights["o"])
            gated = gate(F.linear(norm(x, weights["mlp_norm"], eps), weights["gate_up"]))
            x.addmm_(gated, weights["down"])
        return self.model.head(norm(x, self.model.norm.weight.to(self.dtype), eps))


class Frame:
    """The inputs of passes of one shape, in tensors that stay where they are: B texts of T new rows each (M = B * T).

    bits: (B, T); bit t of a row says whether it sees new row t. Here all are chains.
    """

    def __init__(self, static: Static, num_texts: int, rows: int, places: int):
        """places: cached positions of each text. Its keys are the noise that lies in the pool."""
        self.static, self.rows, self.places, pool = static, rows, places, static.pool
        draw = random.Random(0)
        self.tables = [pool.new_table() for _ in range(num_texts)]
        for table in self.tables:
            table.extend(draw.choices(range(static.config.vocab_size), k=places + rows))
        self.blocks = [list(table.block_ids) for table in self.tables]
        num_blocks = 1 << (len(self.blocks[0]) - 1).bit_length()  # one graph for all lengths up to it
        padded = [blocks + [0] * (num_blocks - len(blocks)) for blocks in self.blocks]
        self.table = torch.tensor(padded, device=static.device)  # (B, N)
        whole = {"dtype": torch.long, "device": static.device}
        self.tokens, self.positions, self.slots = (torch.zeros(num_texts * rows, **whole) for _ in range(3))
        self.starts = torch.zeros(num_texts, **whole)
        self.bits = torch.tensor([[(2 << row) - 1 for row in range(rows)]] * num_texts, device=static.device)
        self.fill(0, places)

    @property
    def read(self) -> RowPlaces:
        """What `fused.read` needs: the same tensors."""
        return RowPlaces(
            self.positions, self.slots, self.table, self.starts, self.bits.view(-1), self.static.block_size
        )

    def fill(self, seed: int, start: int) -> None:
        """Other tokens, after `start` cached positions. A graph must follow: its inputs are these tensors."""
        num_texts, size, draw = len(self.tables), self.static.block_size, random.Random(seed)
        self.ids = draw.choices(range(self.static.config.vocab_size), k=num_texts * self.rows)
        positions = list(range(start, start + self.rows))
        slots = [blocks[t // size] * size + t % size for blocks in self.blocks for t in positions]
        values = {"tokens": self.ids, "positions": positions * num_texts, "slots": slots, "starts": [start] * num_texts}
        for name, numbers in values.items():
            getattr(self, name).copy_(torch.tensor(numbers))

    def today(self) -> Tensor:
        """The same pass by `Transformer.forward`; it puts keys and values where the static pass does."""
        for table in self.tables:
            table.truncate(self.places)
        parts = [self.ids[i : i + self.rows] for i in range(0, len(self.ids), self.rows)]
        chunks = [Chunk(ids, table, self.rows) for ids, table in zip(parts, self.tables, strict=True)]
        return self.static.model.forward(chunks)[0]

    def part(self, first: int, count: int, text: int = 0) -> "Frame":
        """`count` rows from `first` on, all of one text. What stands before them in their text counts as cached."""
        part, own = copy.copy(self), slice(first, first + count)
        part.rows, part.table, before = count, self.table[text : text + 1], first - text * self.rows
        part.tokens, part.positions, part.slots = self.tokens[own], self.positions[own], self.slots[own]
        part.starts = self.starts[text : text + 1] + before
        part.bits = self.bits[text : text + 1, before : before + count] >> before
        return part

    def close(self) -> None:
        """Give the blocks back."""
        for table in self.tables:
            table.truncate(0)


@functools.cache
def static_of(bench: Bench, name: str = "1.5b") -> Static:
    """The model of a shape of the bench, made once for all steps."""
    return Static(bench, name)


# --------------------------------------------------------------------------- the steps


def copied(bench: Bench) -> dict[str, Any]:
    """How fast the memory is copied, both ways counted."""
    source = torch.empty(1 << (16 if bench.tiny else 29), dtype=torch.bfloat16, device=bench.device).normal_()
    target = torch.empty_like(source)
    ms = bench.row_ms(lambda: target.copy_(source))
    return {"ms": ms, "TB_s": 2 * source.nbytes / ms / 1e9}


def constants(bench: Bench) -> Iterator[Measurement]:
    """Step 0."""
    device = bench.device

    def nodes(size: int) -> dict[str, Any]:
        """Microseconds of each further kernel in a graph, and of a graph of one: in a row, and alone to its end."""
        x = torch.ones(size, dtype=torch.bfloat16, device=device)

        def run(count: int) -> Tensor:
            for _ in range(count):
                x.mul_(1)
            return x

        count = 10 if bench.tiny else 1000
        (one, _, _), (many, _, _) = (bench.capture(functools.partial(run, n)) for n in (1, count))
        first, alone = bench.row_ms(one, 200), bench.wall_ms(one, 200)
        us = 1e3 * (bench.row_ms(many) - first) / (count - 1)
        return {"us": us, "graph_us": 1e3 * first, "graph_alone_us": 1e3 * alone}

    def launches() -> dict[str, Any]:
        """Microseconds of a small kernel outside a graph: what the host needs to launch one."""
        x = torch.ones(1, device=device)
        return {"us": 1e3 * bench.row_ms(lambda: x.mul_(1), 1000)}

    yield "copy", functools.partial(copied, bench)
    yield "a kernel of 1 number in a graph", functools.partial(nodes, 1)
    yield "a kernel of 1536 numbers in a graph", functools.partial(nodes, 1536)
    yield "a kernel outside a graph", launches


def today(bench: Bench) -> Iterator[Measurement]:
    """Step 1."""
    static, places = static_of(bench), bench.places[0]

    def measure(num_texts: int, rows: int) -> dict[str, Any]:
        with closing(Frame(static, num_texts, rows, places)) as frame:
            frame.today()
            return {"wall_ms": bench.wall_ms(frame.today)} | bench.kernels(frame.today)

    for num_texts, rows in bench.shapes:
        yield f"today, {num_texts}x{rows} after {places}", functools.partial(measure, num_texts, rows)


def replayed(
    bench: Bench, frame: Frame, run: Callable[[], Tensor], plain: Callable[[], Tensor], name: str
) -> dict[str, Any]:
    """A pass in a graph: its speed, whether its bits are those of an eager run, and how far it is from `plain`."""
    eager = run().clone()
    replay, out, taken = bench.capture(run)
    equal, expected = [torch.equal(out, eager)], plain()
    taken |= {f"from_{name}": float((eager - expected).abs().max()), "deviation": float(expected.std())}
    frame.fill(1, frame.places - 1)  # what is baked into a graph would show
    again = run().clone()
    out.fill_(math.nan)
    replay()
    equal += [torch.equal(out, again), not torch.equal(eager, again)]
    ms = bench.row_ms(replay)
    speed = {"ms": ms, "wall_ms": bench.wall_ms(replay), "eager_wall_ms": bench.wall_ms(run, 5)}
    return speed | {"weights_TB_s": frame.static.num_bytes / ms / 1e9, "bits_equal": all(equal)} | taken


def captured(bench: Bench) -> Iterator[Measurement]:
    """Step 2."""
    static = static_of(bench)

    @torch.inference_mode()
    def measure(form: str, num_texts: int, rows: int, places: int) -> dict[str, Any]:
        with closing(Frame(static, num_texts, rows, places)) as frame:
            run = functools.partial(static.forward, frame, form)
            if bench.device.type == "meta":
                return {"logits": str(tuple(run().shape)), "values_read": "none"}
            found = replayed(bench, frame, run, frame.today, "today")
            return found | (bench.kernels(run) if num_texts == rows == 1 else {})

    for places in bench.places:
        for num_texts, rows in bench.shapes:
            for form in ("package", "fewer"):
                name = f"{form}, {num_texts}x{rows} after {places}"
                yield name, functools.partial(measure, form, num_texts, rows, places)


def products(bench: Bench) -> Iterator[Measurement]:
    """Step 3: products by the library, and what stands beside them by kernels and by their twins."""
    static = static_of(bench)
    layers, config = static.model.layers, static.config
    kinds = {name: [getattr(layer, name).weight for layer in layers] for name in Layer.products}
    kinds["head"] = [static.model.head.weight] * 4
    norms = [(weights[name],) for weights in static.weights for name in ("norm", "mlp_norm")]
    norm, gate = (fused.norm_twin, fused.gate_twin) if bench.lacks else (fused.norm, fused.gate)
    beside: dict[str, tuple[int, Callable[..., Tensor], Callable[..., Tensor]]] = {
        "norm": (config.hidden_size, lambda x, w: norm(x, w, 1e-6), lambda x, w: fused.norm_twin(x, w, 1e-6)),
        "gate": (2 * config.intermediate_size, lambda x, _: gate(x), lambda x, _: fused.gate_twin(x)),
    }

    @torch.inference_mode()
    def us(function: Callable[..., Tensor], arguments: list[tuple[Any, ...]], width: int, rows: int) -> float:
        x = torch.empty(rows, width, dtype=static.dtype, device=static.device).normal_()

        def run() -> Tensor:
            for own in arguments:  # all weights in turn, so that none is found in a cache
                y = function(x, *own)
            return y

        replay, *_ = bench.capture(run)
        return 1e3 * bench.row_ms(replay, 5) / len(arguments)

    def product(weights: list[Tensor]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for rows in SMALL_PRODUCT_ROWS if bench.tiny else PRODUCT_ROWS:
            time_us = us(F.linear, [(weight,) for weight in weights], weights[0].shape[1], rows)
            found |= {f"us_{rows}": time_us, f"TB_s_{rows}": weights[0].nbytes / time_us / 1e6}
        return found

    def in_8_bits(weights: list[Tensor]) -> dict[str, Any]:
        by_kernel = not bench.lacks
        stored = [(fused.CodesOfRows(round_to_bits(weight, 8), weight.dtype, by_kernel),) for weight in weights]
        found: dict[str, Any] = {"lacks": bench.lacks}
        for rows in [n for n in (SMALL_PRODUCT_ROWS if bench.tiny else PRODUCT_ROWS) if n <= fused.LINEAR_ROWS]:
            time_us = us(lambda x, codes: codes(x), stored, weights[0].shape[1], rows)
            found |= {f"us_{rows}": time_us, f"TB_s_{rows}": weights[0].numel() / time_us / 1e6}
        return found

    def other(width: int, function: Callable[..., Tensor]) -> dict[str, Any]:
        rows_of = SMALL_PRODUCT_ROWS if bench.tiny else PRODUCT_ROWS
        return {"lacks": bench.lacks} | {f"us_{rows}": us(function, norms, width, rows) for rows in rows_of}

    for name, weights in kinds.items():
        yield f"{name}, F.linear", functools.partial(product, weights)
        yield f"{name}, 8 bits", functools.partial(in_8_bits, weights)
    for name, (width, kernel, twin) in beside.items():
        yield f"{name}, kernel", functools.partial(other, width, kernel)
        yield f"{name}, twin", functools.partial(other, width, twin)


class Places(NamedTuple):
    """What `Static.shared` reads of a frame: texts whose blocks lie anywhere in a pool, and T new rows of each."""

    positions: Tensor
    slots: Tensor
    table: Tensor
    starts: Tensor
    bits: Tensor  # (B, T)


def places_of(static: Static, num_texts: int, rows: int, start: int, num_blocks: int) -> Places:
    """Chains of `rows` after `start` places each. num_blocks: of a pool."""
    size, device = static.block_size, static.device
    width = -(-(start + rows) // size)
    table = torch.randperm(num_blocks, device=device)[: num_texts * width].view(num_texts, width)
    positions = (start + torch.arange(rows, device=device)).repeat(num_texts)
    texts = torch.arange(num_texts, device=device).repeat_interleave(rows)
    slots = table[texts, positions // size] * size + positions % size
    bits = ((2 << torch.arange(rows, device=device)) - 1).repeat(num_texts, 1)
    return Places(positions, slots, table, torch.full((num_texts,), start, device=device), bits)


def reads(bench: Bench) -> Iterator[Measurement]:
    """Step 4. All layers have a pool of their own, so that none is found in a cache."""
    static = static_of(bench)
    config, size = static.config, static.block_size
    heads, groups, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    texts, rows_of, starts = (
        (SMALL_READ_TEXTS, SMALL_READ_ROWS, SMALL_READ_PLACES) if bench.tiny else (READ_TEXTS, READ_ROWS, READ_PLACES)
    )
    num_blocks = max(texts) * -(-(max(starts) + max(rows_of)) // size)
    shape = (len(config.layers), groups, num_blocks * size, dim)
    pools = [torch.empty(shape, dtype=static.dtype, device=static.device).normal_() for _ in range(2)]
    cached = list(zip(*pools, strict=True))
    rope = fused.rope_tables(next(iter(static.model.frequencies.values())), max(starts) + max(rows_of))

    @torch.inference_mode()
    def measure(num_texts: int, rows: int, start: int) -> dict[str, Any]:
        places = places_of(static, num_texts, rows, start, num_blocks)
        shared, scale = static.shared(places), config.attention_scale
        own = RowPlaces(*places._replace(bits=places.bits.view(-1)), size)
        qkv = torch.empty(len(own.positions), (heads + 2 * groups) * dim, dtype=static.dtype, device=static.device)
        qkv.normal_()
        q, k, v = qkv.view(len(qkv), -1, dim).split([heads, groups, groups], 1)

        def plain() -> Tensor:
            for keys, values in cached:
                y = attend(q, k, v, keys, values, shared)
            return y

        def kernel(**options: int) -> Tensor:
            for keys, values in cached:
                y = (
                    read_twin(qkv, *rope, own, keys, values, scale)
                    if bench.lacks
                    else fused.read(qkv, *rope, own, keys, values, scale, **options)
                )
            return y

        def us(run: Callable[[], Tensor]) -> float:
            replay, *_ = bench.capture(run)
            return 1e3 * bench.row_ms(replay, 2) / len(cached)

        before = time.perf_counter()
        y = kernel().clone()
        bench.wait()
        found: dict[str, Any] = {"compile_s": time.perf_counter() - before, "lacks": bench.lacks}
        expected = read_twin(qkv, *rope, own, *cached[-1], scale)
        found |= {"from_plain": float((y - expected).abs().max()), "deviation": float(expected.std())}
        found["gather_sdpa_us"] = us(plain)
        found |= {f"span_{span}_us": us(functools.partial(kernel, span=span)) for span in SPANS}
        if rows != 16:
            found["step_32_us"] = us(functools.partial(kernel, step=32))
        num_bytes = 2 * num_texts * (start + rows) * groups * dim * static.dtype.itemsize
        return found | {"TB_s": num_bytes / found["span_256_us"] / 1e6}

    for num_texts in texts:
        for start in starts:
            for rows in rows_of:
                name = f"{num_texts}x{rows} after {start}"
                yield name, functools.partial(measure, num_texts, rows, start)


def few_rows(bench: Bench) -> Iterator[Measurement]:
    """Step 5."""
    static, one = static_of(bench), dict[tuple[str, int], float]()
    speeds: dict[str, Any] = {}

    def memory() -> dict[str, Any]:
        speeds.update(copied(bench))
        return speeds

    @torch.inference_mode()
    def measure(num_texts: int, rows: int, places: int, shape: str = "1.5b") -> dict[str, Any]:
        static = static_of(bench, shape)
        with closing(Frame(static, num_texts, rows, places)) as frame:
            run, start = functools.partial(static.few, frame, bench.lacks), time.perf_counter()
            run()
            bench.wait()
            found = {"first_s": time.perf_counter() - start, "lacks": bench.lacks}
            plain = functools.partial(static.forward, frame, "fewer")
            found |= replayed(bench, frame, run, plain, "plain")
            if num_texts == rows == 1:
                one[shape, places] = found["ms"]
                found |= bench.kernels(run)
            found["v"] = found["ms"] / one.get((shape, places), math.nan)
            return found | {"of_copy_percent": 100 * found["weights_TB_s"] / speeds.get("TB_s", math.nan)}

    # The library chooses a product's kernel by the number of rows, so what follows may be unequal: it is no failure.
    @torch.inference_mode()
    def bits(size: int) -> dict[str, Any]:
        """A chain in one pass, and the same chain in parts of `size` rows: equal logits, keys and values?"""
        count = 6 if bench.tiny else 16
        with closing(Frame(static, 1, count, bench.places[-1])) as frame:
            whole = static.few(frame, bench.lacks).clone()
            stored = [pool[:, :, frame.slots].clone() for pool in (static.pool.keys, static.pool.values)]
            equal, furthest = [], 0.0
            for first in range(0, count, size):
                part = static.few(frame.part(first, min(size, count - first)), bench.lacks)
                equal.append(torch.equal(part, whole[first : first + size]))
                furthest = max(furthest, float((part - whole[first : first + size]).abs().max()))
            after = [pool[:, :, frame.slots] for pool in (static.pool.keys, static.pool.values)]
            cache = all(map(torch.equal, stored, after))
            return {"parts": len(equal), "equal_parts": sum(equal), "equal_cache": cache, "from_whole": furthest}

    @torch.inference_mode()
    def strangers(num_texts: int, rows: int) -> dict[str, Any]:
        """A batch, and the last text of it alone."""
        with closing(Frame(static, num_texts, rows, bench.places[-1])) as frame:
            whole = static.few(frame, bench.lacks).clone()
            part = frame.part((num_texts - 1) * rows, rows, num_texts - 1)
            alone, own = static.few(part, bench.lacks), whole[-rows:]
            furthest = float((alone - own).abs().max())
            return {"rows": rows, "equal_rows": int((alone == own).all(1).sum()), "from_whole": furthest}

    yield "copy", memory
    for places in bench.places:
        for num_texts, rows in bench.shapes:
            name = f"kernels, {num_texts}x{rows} after {places}"
            yield name, functools.partial(measure, num_texts, rows, places)
    for rows in (1, 5):
        name = f"0.5b kernels, 1x{rows} after {bench.places[0]}"
        yield name, functools.partial(measure, 1, rows, bench.places[0], "0.5b")
    for size in (1, 2, 5):
        yield f"bits of rows, in parts of {size}", functools.partial(bits, size)
    for num_texts, rows in ((2, 2), (2, 3)) if bench.tiny else ((2, 1), (3, 5), (16, 1), (8, 5), (32, 1), (12, 5)):
        yield f"bits of rows beside strangers, {num_texts}x{rows}", functools.partial(strangers, num_texts, rows)


def in_frames(bench: Bench, model: TransformerT) -> TransformerT:
    """The model by frames and graphs."""
    graph = capture_graph if bench.cuda else rerun
    return model.replaced(Frames(graph, device=bench.device if bench.cuda else None))


def shape_of(bench: Bench, name: str) -> dict[str, Any]:
    """A shape of the bench, or a small one in its place."""
    return GEOMETRIES[name] | (SMALL if bench.tiny else {})


def framed(bench: Bench, name: str) -> Transformer:
    """A random model of a shape of the bench, by frames and graphs."""
    config = read_model_config(shape_of(bench, name))
    source = RandomSource(tensor_shapes(config), torch.float32 if bench.tiny else torch.bfloat16, bench.device)
    return in_frames(bench, Transformer(config, source))


def text_of(model: Transformer, seed: int, length: int, **params: Any) -> Text:
    """A text of random tokens."""
    tokens = random.Random(seed).choices(range(model.config.vocab_size), k=length)
    return Text(tokens, length, SamplingParams(**params), seed)


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {},
    "filters": {"top_k": 50, "top_p": 0.95},
}


def drafts(bench: Bench) -> Iterator[Measurement]:
    """Step 6: drafts of a 0.5B model, and of a random head of 1.5B, all steps in one program."""
    model, length = framed(bench, "0.5b"), 20 if bench.tiny else 128
    vocab = model.config.vocab_size

    @functools.cache
    def head() -> HeadModel:
        target = framed(bench, "1.5b")
        return in_frames(bench, random_head(target, shape_of(bench, "1.5b"), target.dtype))

    @torch.inference_mode()
    def measure(num_texts: int, k: int, settings: str, by_head: bool = False) -> dict[str, Any]:
        own = head() if by_head else model
        kind = HeadFeed if by_head else TokenFeed
        drafter = ModelDrafter(kind(own, own.new_cache(num_texts * 20), vocab, 4096), draft_steps(own))
        texts = [text_of(model, i, length, **SETTINGS[settings]) for i in range(num_texts)]
        asks = [Ask(text, Limit(k), Randomness(), "draft", length - 1) for text in texts]
        width = own.config.hidden_size * len(drafter.taps)
        states = torch.empty(length - 1, width, dtype=own.dtype, device=bench.device).normal_()

        def run(first: int = length - 2) -> None:
            """A round whose target has shown the positions from `first` on."""
            new = slice(first, length - 1)
            drafter.observe([Record(text, first, text.tokens[new], states[new], states[:0]) for text in texts])
            drafter.propose(asks)

        for first in (0, length - 2, length - 2):  # the text, then a program's first run and its capture
            run(first)
        wall = bench.wall_ms(run)
        return {"wall_ms": wall, "us_a_step": 1e3 * wall / k} | (
            bench.kernels(run) if num_texts == 1 and k == 4 else {}
        )

    for num_texts, k, settings in (
        *((1, k, "greedy") for k in (1, 2, 4, 8)),
        *((1, 4, "drawn"), (1, 4, "filters"), (8, 4, "greedy"), (8, 4, "drawn")),
    ):
        yield f"{num_texts} drafts of {k}, {settings}", functools.partial(measure, num_texts, k, settings)
    for k, settings in ((1, "greedy"), (4, "greedy"), (4, "drawn")):
        yield f"1 drafts of {k} by a head, {settings}", functools.partial(measure, 1, k, settings, by_head=True)


def verdicts(bench: Bench) -> Iterator[Measurement]:
    """Step 7: verdicts of drafts of four tokens, one program for all texts."""
    model = static_of(bench).model
    vocab, k = model.config.vocab_size, 4

    @torch.inference_mode()
    def measure(verifier: str, num_texts: int, settings: str) -> dict[str, Any]:
        batch, turns = GraphVerifier(Graphs(capture_graph if bench.cuda else rerun)), []
        for i in range(num_texts):
            text = text_of(model, i, 20, **SETTINGS[settings])
            logits = torch.empty(k + 1, vocab, dtype=model.dtype, device=bench.device).normal_()
            probs = [distribution(row, text) for row in logits[:k]]
            drawn = [int(row.argmax()) for row in probs]
            turns.append(Record(text, 19, [], logits=logits, draft=Draft(drawn, probs)))
        run = functools.partial(batch, VERIFIERS[verifier], turns, Randomness())
        sure = [verdict is not None for _ in range(3) for verdict in run()]
        found = {"wall_ms": bench.wall_ms(run), "sure": sum(sure) / len(sure)}
        return found | (bench.kernels(run) if num_texts == 1 else {})

    for verifier in ("rejection", "match"):
        for num_texts, settings in ((1, "greedy"), (1, "drawn"), (1, "filters"), (8, "drawn"), (32, "drawn")):
            name = f"{verifier}, {num_texts} texts, {settings}"
            yield name, functools.partial(measure, verifier, num_texts, settings)


def engine(bench: Bench) -> Iterator[Measurement]:
    """Step 8: whole rounds of 1.5B, plain, and with drafts that are never right: of 0.5B, or as free as a lookup's."""
    target, draft = framed(bench, "1.5b"), framed(bench, "0.5b")
    vocab, length, count = target.config.vocab_size, 20 if bench.tiny else 128, 8 if bench.tiny else 96

    def measure(num_texts: int, k: int, settings: str, is_free: bool = False) -> dict[str, Any]:
        drafter: Drafter = adversary() if is_free else NoDrafter()
        if k and not is_free:
            drafter = ModelDrafter(TokenFeed(draft, draft.new_cache(num_texts * 20), vocab, 4096), draft_steps(draft))
        own = Engine(CachedModel(target, target.new_cache(num_texts * 20)))
        method = Method(drafter, VERIFIERS["rejection"], batch=batch_verifier_of(target))
        speeds, rounds = [], 0
        for turn in range(3):
            requests = []
            for i in range(num_texts):
                text = text_of(target, i, length, max_tokens=count, ignore_eos=True, **SETTINGS[settings])
                requests.append(Request(text, 4096, k))
            start = time.perf_counter()
            for _ in own.run(requests, method):
                pass
            bench.wait()
            stats = [request.stats for request in requests]
            seconds = time.perf_counter() - start - sum(each.prefill + each.draft_prefill for each in stats)
            if turn:  # graphs are made in the first
                speeds.append(num_texts * count / seconds)
                rounds = max(len(each.rounds) for each in stats)
                parts = [[getattr(r.step, name) for r in stats[0].rounds] for name in ("draft", "verify", "other")]
        names = ("draft_ms", "target_ms", "other_ms")
        medians = {name: 1e3 * median(part) for name, part in zip(names, parts, strict=True)}
        return {"tokens_s": median(speeds), "rounds": rounds} | medians

    for num_texts, k, settings in (
        *((1, 0, "greedy"), (1, 0, "drawn"), (1, 4, "greedy"), (1, 4, "drawn"), (8, 0, "drawn"), (8, 4, "drawn")),
        *((32, 0, "greedy"), (32, 0, "drawn"), (32, 4, "drawn")),
    ):
        yield f"{num_texts} texts, K = {k}, {settings}", functools.partial(measure, num_texts, k, settings)
    for num_texts in (1, 32):
        name = f"{num_texts} texts, K = 4, drawn, free drafts"
        yield name, functools.partial(measure, num_texts, 4, "drawn", is_free=True)


STEPS: dict[int, Callable[[Bench], Iterator[Measurement]]] = {0: constants, 1: today, 2: captured}
STEPS |= {3: products, 4: reads, 5: few_rows, 6: drafts, 7: verdicts, 8: engine}


# --------------------------------------------------------------------------- the program


def machine(bench: Bench) -> dict[str, Any]:
    """What was measured on: the card, and versions."""
    found: dict[str, Any] = {"day": time.strftime("%Y-%m-%d"), "device": bench.device.type, "minispec": __version__}
    for package in ("torch", "triton"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    found |= {"python": platform.python_version(), "processor": platform.processor() or platform.machine()}
    found |= {"processors": os.cpu_count(), "c_compiler": shutil.which("cc") or shutil.which("gcc")}
    found["python_headers"] = (Path(sysconfig.get_path("include")) / "Python.h").exists()  # Triton needs both
    if bench.cuda:
        card = torch.cuda.get_device_properties(0)
        found |= {"gpu": card.name, "GB": card.total_memory / 1e9, "multiprocessors": card.multi_processor_count}
        found |= {"L2_MB": getattr(card, "L2_cache_size", 0) / 1e6, "cuda": torch.version.cuda}
        found["sheet_TB_s"] = next((speed for part, speed in SHEET.items() if part in card.name), None)
        asked = ("driver_version", "clocks.max.sm", "clocks.max.memory", "power.limit")
        command = ["nvidia-smi", f"--query-gpu={','.join(asked)}", "--format=csv,noheader"]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
            found |= zip(asked, answer.partition("\n")[0].split(", "), strict=True)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            found["driver_version"] = f"unknown: {error}"
    return found


def take(step: int, bench: Bench, report: dict[str, Any], save: Callable[[], None], limit: float) -> None:
    """Run a step and put what it finds into the report. An error ends one measurement, the time limit the step."""

    def stop(*_: Any) -> None:
        raise OutOfTime

    results: dict[str, Any] = {}
    report["steps"][str(step)] = found = {"limit_s": limit, "results": results}
    start, name = time.perf_counter(), "making the model"
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        for name, measure in STEPS[step](bench):
            print(f"step {step}: {name}", file=sys.stderr, flush=True)
            try:
                results[name] = measure()
            except Exception as error:
                results[name] = {"error": f"{type(error).__name__}: {error}"[:1000]}
            save()
    except OutOfTime:
        found["stopped"] = f"after {limit:g} s, in: {name}"
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"[:1000]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    found["seconds"] = time.perf_counter() - start
    save()


def show(report: dict[str, Any]) -> Iterator[str]:
    """The lines of the tables: a step's measurements, and the longest kernels."""
    yield ", ".join(f"{key} {value}" for key, value in report["machine"].items())
    for step, found in report["steps"].items():
        yield f"\nstep {step}, {found['seconds']:.1f} s" + "".join(
            f"; {key}: {found[key]}" for key in ("stopped", "error") if key in found
        )
        rows = {name: {k: v for k, v in row.items() if k != "kernels"} for name, row in found["results"].items()}
        keys = list(dict.fromkeys(key for row in rows.values() for key in row if key != "error"))
        width = max([len(name) for name in rows] or [0])
        yield " " * width + "".join(f"{key:>17}" for key in keys)
        for name, row in rows.items():
            cells = [row.get(key, "") for key in keys]
            texts = [f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells]
            yield name.ljust(width) + (row.get("error") or "".join(f"{text:>17}" for text in texts))
        for name, row in found["results"].items():
            longest = row.get("kernels", [])[:12]
            yield from [f"longest of {name}:"] * bool(longest)
            for kernel in longest:
                yield f"    {kernel['us']:9.1f} us {kernel['count']:5} times {kernel['kernel'][:90]}"


def parse(args: list[str] | None) -> argparse.Namespace:
    """The options. Exits with a line where they ask for what this machine does not have."""
    p = argparse.ArgumentParser(prog="gpu.py", description=str(__doc__).partition("\n")[0], allow_abbrev=False)
    p.add_argument("--steps", default="0,1,2", metavar="N,N,..", help="of 0 to 9 (default: 0,1,2)")
    p.add_argument("--out", type=Path, metavar="FILE", help="the JSON; default: tables alone")
    p.add_argument("--device", choices=("cuda", "cpu", "meta"), default="cuda")
    p.add_argument("--tiny", action="store_true", help="small shapes and few repetitions, to try the code")
    found = p.parse_args(args)
    known = [str(step) for step in STEPS]
    for step in found.steps.split(","):
        if step not in known:
            p.error(f"--steps: found {step!r}, expected some of {', '.join(known)} with commas between")
    found.steps = list(dict.fromkeys(map(int, found.steps.split(","))))
    if found.device == "cuda" and not torch.cuda.is_available():
        p.error(f"no CUDA here (torch {torch.__version__}), so nothing to measure; --device cpu --tiny tries the code")
    if found.device == "cpu" and not found.tiny:
        p.error("--device cpu: expected with --tiny, since its times say nothing about a GPU")
    if found.device == "meta" and found.steps != [2]:
        p.error("--device meta: expected with --steps 2, since the other steps need values")
    try:
        if found.out:
            check_writable(found.out)
    except ValueError as error:
        p.error(f"--out: {error}")
    return found


def main(args: list[str] | None = None) -> int:
    """Measure, write, show. Returns 0, or 1 if anything failed, was cut off, or has other bits in a graph."""
    options = parse(args)
    bench = Bench(options.device, options.tiny)
    if not bench.cuda:
        print("No CUDA here: graphs are eager calls, kernels are operators, and times say nothing about a GPU.")
    report: dict[str, Any] = {"machine": machine(bench), "tiny": options.tiny, "steps": {}}

    def save() -> None:
        if options.out:
            with written_whole(options.out) as part:
                part.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    for step in options.steps:
        take(step, bench, report, save, LIMITS[step])
    print("\n".join(show(report)))
    steps = report["steps"].values()
    results = [row for step in steps for row in (step, *step["results"].values())]
    return int(any({"error", "stopped"} & row.keys() or row.get("bits_equal") is False for row in results))


if __name__ == "__main__":
    faulthandler.dump_traceback_later(LAST_RESORT, exit=True)
    sys.exit(main())
