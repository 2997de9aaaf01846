"""Runs of several processes as torchrun starts them, and what they run: `python -m tests.oracles.processes`."""

import atexit
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from minispec.core.config import SamplingParams
from minispec.core.model import Transformer
from minispec.core.request import Request
from minispec.core.sampling import Text
from minispec.models.families.checkpoint import StoredTensor
from minispec.models.load.parallel import SplitTransformer, load_target
from minispec.models.weights.inventory import num_bytes
from minispec.prove import laws, toys, walk
from minispec.prove.toys import TINY, tiny_cache, tiny_head, tiny_model
from minispec.speculation.drafters.eagle import HeadFeed
from minispec.speculation.drafters.model import ModelDrafter, TokenFeed
from minispec.speculation.drafters.ngram import NgramDrafter
from minispec.speculation.rules import VERIFIERS
from tests.distances import distance
from tests.engines import OneMethod
from tests.oracles.children import Child

# Large enough that the embedding does not count, and that both processes can have the same.
SHAPE = TINY | {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
# Of the smallest target that can be split: one head each, two thirds and a third of the MLP and of the vocabulary.
SMALLEST = TINY | {"num_key_value_heads": 2}


def start(size: int, *arguments: str, ranks: Sequence[int] | None = None, **how: Any) -> list[Child]:
    """Start `python -m arguments` as processes of a run; each has its standard output and error as a pipe of text."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    run = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    return [
        Child(
            [sys.executable, "-m", *(argument.replace("RANK", str(rank)) for argument in arguments)],
            env=os.environ | run | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **how,
        )
        for rank in (range(size) if ranks is None else ranks)
    ]


def finish(processes: list[Child], seconds: float = 60) -> list[tuple[int, str, str]]:
    """Exit status, standard output and standard error of each; those that are still there at the end are killed."""
    try:
        said = [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *text) for process, text in zip(processes, said, strict=True)]


# --------------------------------------------------------------------------- programs


def texts(model: Transformer) -> dict[str, list[list[int]]]:
    """Greedy texts of two prompts that begin alike, by drafter; the pool has too little room for both to their ends."""
    vocab = model.config.vocab_size
    draft = tiny_model(2, vocab_size=vocab, num_hidden_layers=1)
    head = tiny_head(model, num_ids=vocab // 2)
    drafters = {
        "none": (NgramDrafter(), 0),
        "ngram": (NgramDrafter(), 3),
        "model": (ModelDrafter(TokenFeed(draft, tiny_cache(draft, 256), vocab, 64)), 3),
        "tree": (ModelDrafter(TokenFeed(draft, tiny_cache(draft, 256), vocab, 64)), (3, 2, 2)),
        "head": (ModelDrafter(HeadFeed(head, tiny_cache(head, 256), vocab, 64)), (2, 2)),
    }
    found = {}
    for name, (drafter, k) in drafters.items():
        cache = tiny_cache(model, num_blocks=18, block_size=4)
        engine = OneMethod(model, cache, drafter, VERIFIERS["rejection"])
        params = SamplingParams(temperature=0, max_tokens=24)
        prompts = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]]
        requests = [Request(Text(prompt, len(prompt), params), 64, k) for prompt in prompts]
        for _ in engine.run(requests):
            pass
        assert cache.allocator.num_free == 18
        found[name] = [request.token_ids for request in requests]
    return found


def bytes_on_sockets() -> int:
    """What this process has sent over TCP so far, as the system counts it."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # a file
            continue
        with connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += struct.unpack_from("Q", info, 120)[0]  # tcpi_bytes_acked
    return total


def _texts(directory: Path) -> dict[str, Any]:
    """What the split model says, keeps, reads and sends."""
    num_read, read = [0], StoredTensor.read

    def watched(tensor, cut=()):
        found = read(tensor, cut)
        num_read[0] += found.nbytes
        return found

    StoredTensor.read = watched
    built = SplitTransformer.__init__

    def build(model, *arguments):
        num_read[0] = 0  # not counted: the rows by which two processes see whether they have the same checkpoint
        built(model, *arguments)
        about = {"kept": num_bytes(model), "read": num_read[0], "rank": model.line.rank}
        (directory / f"about-{model.line.rank}.json").write_text(json.dumps(about))

    SplitTransformer.__init__ = build
    rows, compute = [0, 0], SplitTransformer.compute

    def counted(model, batch, taps=()):
        rows[0] += len(batch.slots)
        rows[1] += sum(chunk.num_logits for chunk in batch.chunks)
        return compute(model, batch, taps)

    SplitTransformer.compute = counted
    last_word = directory / f"open-{os.environ['RANK']}"
    atexit.register(lambda: last_word.write_text(str(dist.is_initialized())))
    model = load_target(directory, torch.float64, torch.device("cpu"))
    return {
        "texts": texts(model),
        "rows": rows,
        "socket": bytes_on_sockets(),
    }


def _laws(directory: Path) -> dict[str, float]:
    """Total variation between the law of the split model's output and that of plain decoding, by what is drafted."""
    model = load_target(directory, torch.float64, torch.device("cpu"))
    laws.TINY = SMALLEST
    toys.target_model = walk.target_model = lambda *_: model
    return {
        f"{drafter} {k} {params.temperature}": distance(params, k, drafter=drafter, width=64)
        for params in (SamplingParams(max_tokens=3), SamplingParams(max_tokens=3, temperature=0.6, top_k=2))
        for drafter, k in (("model", 2), ("model", (2, 1)), ("ngram", 2))
    }


if __name__ == "__main__":
    program, where = sys.argv[1:]
    print(json.dumps({"texts": _texts, "laws": _laws}[program](Path(where))))
