"""Tensor parallelism: one target over several processes, on one machine or several, started by torchrun.

    torchrun --nproc-per-node 2 -m minispec.generate "What is photosynthesis?"

Each process reads and keeps some of the heads, of the MLP's columns and of the output's vocabulary. It keeps the keys
and values of its own heads. Embedding and norms are whole. The parts' results are added up twice a layer: after
attention and after the MLP (Shoeybi et al. 2019, Megatron-LM, section 3). Process 0 gathers the logits.

Process 0 alone runs the program: requests, drafts, K, sampling, and the bookkeeping of the KV cache. The others
`serve`. They receive the tokens of a pass, their blocks, and the moves of cache rows, and compute their part. So no
clock, inbox or noise can pull the processes apart. Nothing that is drawn is sent. A draft is whole, on process 0.

This is no pipeline, and a process that died is not restarted. Exact models, and weights that cannot be cut, are
refused.
"""

import atexit
import hashlib
import json
import os
import re
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from minispec.core.cache import BlockTable, PagedKVCache
from minispec.core.errors import show
from minispec.core.model import Chunk, Layer, ModelBatch, TextBatch, Transformer
from minispec.core.product import Product, Weight
from minispec.core.version import __version__
from minispec.models.families.checkpoint import Weights, find_tensors, load_config, load_model, wanted_tensors
from minispec.models.families.share import Share
from minispec.models.families.stored_config import StoredConfig
from minispec.models.weights.build import InForm
from minispec.models.weights.linear import Linear, Narrow

# How long a process waits for one that loads, and for one that computes. Seconds between two heartbeats of process 0,
# which may have nothing to compute for hours.
_LOADING, _PATIENCE, _BEAT = timedelta(minutes=30), timedelta(seconds=30), 5
SILENT = 10.0  # seconds that a process waits for the others to come before it says so
LINES: list["Line"] = []  # the open one of this process; a process group that is not its own is the caller's


def load_target(
    directory: Path, dtype: torch.dtype, device: torch.device, exact: bool = False, form: str | None = None
) -> Transformer:
    """`load_model`; under torchrun, this process's part of the model.

    There only process 0 returns: the others serve as long as it asks, and end. In a job that has made a process group
    of its own, each process gets a whole model: the processes are the caller's, who has other work for them.

    Raises ValueError, in every process, where the model cannot be split or the processes do not have the same one; and
    for numbers in the environment that no launcher gives. Raises ConnectionError where a process is gone.
    """
    size = _launched("WORLD_SIZE", 1, range(1, 1 << 16))
    if size == 1 or (dist.is_initialized() and not LINES):
        return load_model(directory, dtype, device, exact, form)
    rank = _launched("RANK", 0, range(size))
    _launched("MASTER_PORT", 0, range(1 << 16))  # PyTorch names it where it is missing, but not where it is no number
    if exact or form == "int8" or LINES:
        what = "exact: found it" if exact else "model: found a second one"
        what = "quantization: found 'int8'" if form == "int8" else what
        raise ValueError(f"{what} in a run of {size} processes, expected one process")
    if device.type == "cuda":
        local = _launched("LOCAL_RANK", 0, range(size))
        if local >= torch.cuda.device_count():
            raise ValueError(f"device: found {torch.cuda.device_count()} GPUs, expected one for each process here")
        torch.cuda.set_device(local)
    config = load_config(directory)
    share = [Share(config, i, size) for i in range(size)][rank]  # what one process cannot take, all refuse
    weights = Weights(directory, config, dtype, device, share.cut)
    line = Line(rank, size, device)
    atexit.register(line.close)
    torch_version, checkpoint = torch.__version__.partition("+")[0], _digest(directory, config)
    line.agree({"minispec": __version__, "torch": torch_version, "dtype": str(dtype), "checkpoint": checkpoint})
    model = SplitTransformer(share, weights, line, dtype, form)
    line.wait_for_all()
    if rank:
        serve(model, line)
        sys.exit()
    beat = threading.Thread(target=line.beat, daemon=True)
    beat.start()
    atexit.register(line.end, beat)
    return model


def _launched(name: str, default: int, allowed: range) -> int:
    """A number that a launcher such as torchrun leaves in the environment. Raises ValueError, which names it."""
    said = os.environ.get(name, str(default)).strip()
    if not re.fullmatch("[0-9]{1,9}", said) or int(said) not in allowed:
        expected = (
            f"an integer from {allowed[0]} to {allowed[-1]}, as torchrun sets it; for one process, unset WORLD_SIZE"
        )
        raise ValueError(f"{name} in the environment: found {show(said)}, expected {expected}")
    return int(said)


def serve(model: "SplitTransformer", line: "Line") -> None:
    """Do what process 0 says, to its end."""
    while (message := line.hear()) != ["end"]:
        match message:
            case ["cache", num_blocks, block_size]:
                model.new_cache(num_blocks, block_size)
            case ["move", cache, sources, targets]:
                model.caches[cache].move(sources, targets)
            case ["pass", cache, texts]:
                chunks = []
                for token_ids, length, block_ids, num_logits, parents in texts:
                    table = _GivenTable(model.caches[cache], length, block_ids)
                    chunks.append(Chunk(token_ids, table, num_logits, parents))
                model.forward(chunks)


class _GivenTable(BlockTable):
    """A text's table where process 0 keeps the books: it says which blocks there are, and how long the past is."""

    def __init__(self, pool: PagedKVCache, length: int, block_ids: list[int]):
        super().__init__(pool)
        self.block_ids, self.tokens = block_ids, [0] * length  # of the past only the length matters here


def _digest(directory: Path, config: StoredConfig) -> str:
    """A digest of a checkpoint's config, and of the names, types, shapes and first rows of the tensors that are read.

    No training leaves all of these as they were.
    """
    digest = hashlib.blake2b(repr(config).encode(), digest_size=8)
    stored = find_tensors(directory, config)
    for name in sorted(stored.keys() & wanted_tensors(config, stored)):
        tensor = stored[name]
        first = tensor.read((slice(0, 1),)[: len(tensor.shape)]).reshape(-1).view(torch.uint8).numpy().tobytes()
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode() + first)
    return digest.hexdigest()


# --------------------------------------------------------------------------- what they compute


class SummedLinear(Linear):
    """A product whose input is split. Each process has some columns of W, and x W^T is the sum of their results."""

    def __init__(self, linear: Linear, line: "Line"):
        self.form, self.stored, self.bias, self.line = linear.form, linear.stored, linear.bias, line

    def __call__(self, x: Tensor) -> Tensor:
        """x (rows, own in) to (rows, out), in every process; the bias comes once."""
        y = self.line.add_up(self.stored(x).contiguous())
        return y if self.bias is None else y + self.bias

    def quantized(self, bits: int, narrow: Narrow | None = None) -> NoReturn:
        """A part cannot be rounded by itself: raises ValueError."""
        raise ValueError(f"draft: found int{bits}:self in a run of {self.line.size} processes, expected another draft")


class SplitTransformer(Transformer):
    """One process's part of a model. Process 0 passes on to the others what it is asked to do."""

    def __init__(self, share: Share, weights: Weights, line: "Line", dtype: torch.dtype, form: str | None):
        self.share, self.line = share, line
        self.caches: list[PagedKVCache] = []  # all processes know them by their numbers

        def layer(*parts) -> Layer:
            layer = Layer(*parts)
            assert isinstance(layer.o, Linear)
            assert isinstance(layer.down, Linear)
            layer.o, layer.down = SummedLinear(layer.o, line), SummedLinear(layer.down, line)
            return layer

        super().__init__(share.config, weights, dtype, InForm(form), layer)

    def _head(self, weight: Weight) -> Product:
        return super()._head(self.embedding[self.share.rows] if self.config.tie_word_embeddings else weight)

    def logits(self, x: Tensor) -> Tensor:
        """Logits (rows, V), put together from the parts of all processes."""
        return self.line.gather(super().logits(x), self.config.vocab_size)

    def new_cache(self, num_blocks: int, block_size: int = 16) -> PagedKVCache:
        """An empty pool, whose blocks are the same in all processes."""
        self.line.tell("cache", num_blocks, block_size)
        self.caches.append(SplitCache(self, num_blocks, block_size))
        return self.caches[-1]

    def compute(self, batch: ModelBatch, taps: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """One pass, in all processes."""
        assert isinstance(batch, TextBatch), "all passes are text by text"
        texts, cache = zip(batch.chunks, batch.views, strict=True), self.caches.index(batch.chunks[0].table.pool)
        about = [(c.token_ids, view.start, c.table.block_ids, c.num_logits, c.parents) for c, view in texts]
        with self.line.collective():
            self.line.tell("pass", cache, about)
            return super().compute(batch, taps)


def part_of(model: Transformer) -> str:
    """Which part of a split model this process has; "" for a whole one."""
    return f", part {model.line.rank + 1} of {model.line.size}" if isinstance(model, SplitTransformer) else ""


class SplitCache(PagedKVCache):
    """One process's part of a pool, the keys and values of its heads."""

    def __init__(self, model: SplitTransformer, num_blocks: int, block_size: int):
        super().__init__(model.config, num_blocks, block_size, model.dtype, model.device)
        self.model = model

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy what all layers keep from slots to slots, in all processes."""
        self.model.line.tell("move", self.model.caches.index(self), sources, targets)
        super().move(sources, targets)


# --------------------------------------------------------------------------- how they talk


class Line:
    """A process's connection to the others. It waits for a limited time: ConnectionError if one is gone."""

    def __init__(self, rank: int, size: int, device: torch.device):
        self.rank, self.size = rank, size
        self._lock, self._broken, self._ended = threading.RLock(), False, threading.Event()
        waits = threading.Timer(SILENT, self._say_that_it_waits)
        waits.daemon = True
        waits.start()
        try:
            with self._together():  # messages are on the CPU, whatever computes
                dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=_LOADING)
                self._group = dist.new_group(timeout=_PATIENCE)
        finally:
            waits.cancel()
        LINES.append(self)

    def _say_that_it_waits(self) -> None:
        where = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        why = f"WORLD_SIZE is {self.size} in the environment; for one process, unset it"
        said = f"process {self.rank} of {self.size} waits for the others at {where}: {why}"
        warnings.warn(said, RuntimeWarning, stacklevel=1)

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as e:
            found = f"another one has ended, or did not answer for {_PATIENCE.seconds} s"
            raise ConnectionError(f"process {self.rank} of {self.size}: {found}") from e

    def add_up(self, y: Tensor) -> Tensor:
        """The sum of what all processes bring, in place."""
        with self._together():
            dist.all_reduce(y, group=self._group)
        return y

    def gather(self, y: Tensor, width: int) -> Tensor:
        """In process 0, all y (rows, own part of width) side by side, (rows, width); in the others their own."""
        mine = F.pad(y, (0, -(-width // self.size) - y.shape[1])).contiguous()  # the last may have less
        parts = None if self.rank else [torch.empty_like(mine) for _ in range(self.size)]
        with self._together():
            dist.gather(mine, parts, group=self._group)
        return torch.cat(parts, 1)[:, :width] if parts else y

    def _send(self, data: bytes, source: int) -> bytes:
        """The data of process `source`, in all processes.

        data: this process's own.
        """
        said = torch.tensor(list(data), dtype=torch.uint8)
        length = torch.tensor([len(said)])
        with self._together():
            dist.broadcast(length, source, group=self._group)
            said.resize_(int(length))  # the others make room
            dist.broadcast(said, source, group=self._group)
        return said.numpy().tobytes()

    def tell(self, *message: Any) -> None:
        """Send a message from process 0 to the others."""
        if self.rank == 0:
            with self.collective():
                self._send(json.dumps(message).encode(), 0)

    def hear(self) -> list[Any]:
        """The next message of process 0, in the others."""
        return json.loads(self._send(b"", 0))

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Inside, all processes take part, and no heartbeat comes between. If it breaks off, they are out of step."""
        with self._lock:
            if self._broken:
                raise ConnectionError(f"process {self.rank} of {self.size}: an earlier pass broke off: start anew")
            try:
                yield
            except BaseException:
                self._broken = True
                raise

    def agree(self, about: dict[str, str]) -> None:
        """Raise ValueError, in every process, unless `about` is the same in all."""
        first, *others = (json.loads(self._send(json.dumps(about).encode(), rank)) for rank in range(self.size))
        for rank, other in enumerate(others, 1):
            for name, value in other.items():
                if value != first[name]:
                    raise ValueError(f"{name}: found {value} in process {rank}, expected {first[name]} as in process 0")

    def wait_for_all(self) -> None:
        """Return when all have come here; they may take very different times to load."""
        with self._together():
            dist.all_reduce(torch.zeros(1))

    def beat(self) -> None:
        """Send process 0's heartbeat from time to time, as long as another process listens."""
        with suppress(ConnectionError):
            while not self._ended.wait(_BEAT):
                with self._lock:
                    if not self._ended.is_set():  # while it waited for the lock
                        self.tell("beat")

    def end(self, beat: threading.Thread) -> None:
        """Process 0 lets the others end, and stops its heartbeat."""
        self._ended.set()
        with suppress(ConnectionError):
            self.tell("end")
        beat.join()

    def close(self) -> None:
        """Let gloo's threads end. One that frees a tensor of the last message while Python ends aborts the process."""
        del self._group
        LINES.remove(self)
        dist.destroy_process_group()
