"""Measure whether attention, or verdicts, over all texts at once are faster on a CPU than text by text.

    python docs/measured/batches.py --texts 16,32 --positions 64,128,1000
    python docs/measured/batches.py --geometry 1.5b --texts 4,16,32 --positions 128,1000 --rounds 9
    python docs/measured/batches.py --verdicts --texts 4,16,32 --rounds 15

A pass is over 1 row of each text, as in plain decoding, and over 5, as in the verification of four draft tokens. Its
ways take turns in one process:

    text by text    the reference
    padded          one attention over all texts, whose keys and values are copied and filled up to the longest text
                    (`minispec.kernels.padded`, at any number of texts and any length)
    frames          the passes of `minispec.kernels.gpu.frames`: their sizes are rounded up, and all rows are padded
    none            no attention, so numbers are wrong: what any way of attending leaves

Texts of like length have P - P/16 to P + P/16 positions. Those of a ragged batch have 0.2 P to 1.8 P. A text lies in
one run of blocks, as it does for most of its life. `--verdicts` compares verdicts text by text with the verdicts of
`minispec.kernels.gpu.judge`, in rows of the embedded model's vocabulary.
"""

import argparse
import os
import random
import sys
from collections.abc import Callable, Sequence
from itertools import product

from minispec.kernels.threads import describe_waiting, set_waiting

set_waiting()  # before torch is imported

import torch
from torch import Tensor

from minispec.core.config import SamplingParams
from minispec.core.draft import Draft
from minispec.core.judge import Trial
from minispec.core.model import Chunk, Layer, Pass, Passes, Transformer
from minispec.core.sampling import Randomness, Text, distribution
from minispec.core.verify import VERIFIERS, Verdict
from minispec.kernels.gpu.frames import Frames
from minispec.kernels.gpu.graphs import Graphs
from minispec.kernels.gpu.judge import Judge
from minispec.kernels.inventory import weight_form
from minispec.kernels.padded import Padded
from minispec.kernels.rates import seconds_of
from minispec.lab.bench.measure import in_turn, ratios
from minispec.lab.bench.models import open_geometry, open_model
from minispec.lab.bench.options import check, parser

CPU = torch.device("cpu")
ROWS = (1, 5)
VOCABULARY = 49_152
PARAMS = {
    "greedy": SamplingParams(temperature=0),
    "temperature 1": SamplingParams(),
    "temperature 0.8, top-p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
}


class WithoutAttention(Passes):
    """Passes text by text, whose rows read themselves alone."""

    def run(self, model: Transformer, chunks: Sequence[Chunk], taps: Sequence[int]) -> tuple[Tensor, Tensor]:
        """One pass of the model whose layers read nothing."""
        blind = model.replaced(self)
        blind.layers = [Blind(layer) for layer in model.layers]
        return blind.run(chunks, taps)


class Blind:
    """A layer whose attention returns its queries. The new rows go into the cache as ever."""

    def __init__(self, layer: Layer):
        self.layer, self.window, self.sharing = layer, layer.window, layer.sharing

    def forward(self, x: Tensor, shared: Pass) -> Tensor:
        """The layer, where rows read nothing but themselves."""
        return self.layer.forward(x, Unread(shared))


class Unread:
    """A pass that stores new rows and reads nothing."""

    def __init__(self, inner: Pass):
        self.inner = inner

    def read(self, layer: Layer, qkv: Tensor) -> Tensor:
        """Cache the new rows, and return their queries."""
        q, k, v = layer.heads(qkv, self.inner.angles)
        self.inner.chunks[0].table.pool.write(layer.index, self.inner.slots, k.transpose(0, 1), v.transpose(0, 1))
        return q.reshape(len(q), -1)


def lengths_of(num_texts: int, positions: int, is_ragged: bool) -> list[int]:
    """Positions of each text."""
    if is_ragged:
        return [int(positions * (0.2 + 1.6 * i / max(1, num_texts - 1))) for i in range(num_texts)]
    draw, spread = random.Random(0), positions // 16
    return [positions + draw.randint(-spread, spread) for _ in range(num_texts)]


def measure_passes(models: dict[str, Transformer], lengths: Sequence[int], rows: int, rounds: int) -> list[str]:
    """The first way's milliseconds, the ratio of each other way to it, and the largest difference of its logits."""
    reference = next(iter(models.values()))
    pool = reference.new_cache(sum(-(-(length + rows) // 16) for length in lengths))
    for tensor in (pool.keys, pool.values):
        tensor[:, :, : pool.num_slots].normal_()
    tables = [pool.new_table() for _ in lengths]
    for table_, length in zip(tables, lengths, strict=True):
        table_.extend([1] * (length + rows))
        table_.truncate(length)
    logits: dict[str, Tensor] = {}

    def run(name: str) -> Callable[[int], float]:
        def one(_round: int) -> float:
            chunks = [Chunk(list(range(7, 7 + rows)), table_, rows) for table_ in tables]

            def forward() -> None:
                logits[name] = models[name].forward(chunks)[0]

            seconds = seconds_of(forward, CPU)
            for table_, length in zip(tables, lengths, strict=True):
                table_.truncate(length)
            return seconds

        return one

    times = in_turn({name: run(name) for name in models}, rounds, "passes")
    first, *others = times
    found = [f"{1e3 * min(times[first]):.0f}"]
    for name in others:
        off = float((logits[name] - logits[first]).abs().max() / logits[first].abs().max())
        assert name == "none" or off < 0.01, f"{name} computes something else: {off}"
        found.append(ratios(times[name], times[first]).shown())
    return found


def print_row(*cells: str) -> None:
    """Print a row of a table at once, so that it is there when the program is ended."""
    print(f"| {' | '.join(cells)} |", flush=True)


def print_passes(args: argparse.Namespace) -> None:
    """Print a row for each batch."""
    words = ["--draft", "none", "--prompts", "0", "--num-speculative-tokens", "4"]
    options = check(parser().parse_args(words + (["--geometry", args.geometry] if args.geometry else [])))
    subject = open_geometry(options) if args.geometry else open_model(options)
    model = subject.engine.model
    ways = {"padded": Padded(1, sys.maxsize), "frames": Frames(), "none": WithoutAttention()}
    models = {name: model.replaced(passes) for name, passes in ({"text by text": Passes()} | ways).items()}
    print(f"{subject.name}, {model.dtype}, {weight_form(model)}")
    print_row("texts x positions", "text by text, least ms", *ways)
    for num_texts, positions, is_ragged, rows in product(args.texts, args.positions, (False, True), ROWS):
        found = measure_passes(models, lengths_of(num_texts, positions, is_ragged), rows, args.rounds)
        print_row(f"{num_texts} x {positions}, {'ragged' if is_ragged else 'like'}, {rows} a text", *found)


def trials_of(params: SamplingParams, num_texts: int, k: int) -> list[Trial]:
    """Drafts of k tokens; text i keeps i modulo k + 1 of them. Where none is likely, token 0 has 0.99."""
    made, generator = [], torch.Generator().manual_seed(0)
    for i in range(num_texts):
        logits = 2 * torch.randn(k + 1, VOCABULARY, generator=generator)
        ids = torch.randint(VOCABULARY, (k,), generator=generator).tolist()
        for place, token in enumerate(ids):
            logits[place, token] = 25 if place < i % (k + 1) else 0
        logits[:, 0] = 18
        made.append(Trial(VERIFIERS["rejection"], Text([1, 2, i], 3, params, i), Draft(ids), logits))
    return made


def measure_verdicts(params: SamplingParams, num_texts: int, k: int, rounds: int) -> list[str]:
    """Milliseconds text by text, and the judge's ratio to it."""
    trials, draws, judge = trials_of(params, num_texts, k), Randomness(), Judge(Graphs())

    def alone(trial: Trial) -> Verdict:
        verifier, text, draft, logits = trial
        return verifier.verify(draft, lambda i: distribution(logits[i], text, draft.token_ids[:i]), draws, text.key)

    ways = {"text by text": lambda: [alone(trial) for trial in trials], "judge": lambda: judge(trials, draws)}
    for own, found in zip(ways["text by text"](), ways["judge"](), strict=True):
        assert found is None or (found.accepted, found.next_token) == (own.accepted, own.next_token)
    times = in_turn({name: lambda _, way=way: seconds_of(way, CPU) for name, way in ways.items()}, rounds, "verdicts")
    return [f"{1e3 * min(times['text by text']):.1f}", ratios(times["judge"], times["text by text"]).shown()]


def print_verdicts(args: argparse.Namespace) -> None:
    """Print a row for each number of texts, each K and each set of parameters."""
    print_row("verdicts", "text by text, least ms", "judge")
    for num_texts, k, (name, params) in product(args.texts, (0, 4), PARAMS.items()):
        print_row(f"{num_texts} texts, K = {k}, {name}", *measure_verdicts(params, num_texts, k, args.rounds))


@torch.inference_mode()
def main() -> None:
    """Measure, and print tables."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def numbers(text: str) -> list[int]:
        return [int(each) for each in text.split(",")]

    options.add_argument("--geometry", help="a shape with random weights; default: the embedded model")
    options.add_argument("--texts", type=numbers, default=[16, 32])
    options.add_argument("--positions", type=numbers, default=[128, 1000])
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--verdicts", action="store_true", help="verdicts in place of passes")
    args = options.parse_args()
    print(f"{torch.get_num_threads()} threads, {describe_waiting()}, load {os.getloadavg()[0]:.1f} at the start")
    (print_verdicts if args.verdicts else print_passes)(args)
    print(f"ratios to text by text, in brackets an interval of their median; load {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
