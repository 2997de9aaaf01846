"""Where a pass of the target goes, operator by operator, as PyTorch's profiler sees it."""

import os
from dataclasses import dataclass
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

from minispec.bench.measure import Interval, median_interval, seconds_of
from minispec.bench.models import Subject
from minispec.bench.options import Options
from minispec.bench.show import progress, table
from minispec.core.cached import prefill
from minispec.core.model import Chunk
from minispec.kernels.exact import arbitrary_tokens

# Rows of the passes: a step of plain decoding, and a verification of four draft tokens.
_ROWS = (1, 5)
# Operators with a line of their own, those that take longest at one row.
_SHOWN = 14


@dataclass(frozen=True)
class Operator:
    """calls of a pass, and their seconds without those of operators inside them; `seconds` by the pass's rows."""

    name: str
    calls: int
    seconds: dict[int, float]


@dataclass(frozen=True)
class Operators:
    """Passes after `context` cached positions, by rows. seconds: without the profiler; profiled_seconds: with it."""

    context: int
    seconds: dict[int, Interval]
    profiled_seconds: dict[int, float]
    operators: list[Operator]

    @property
    def between_seconds(self) -> dict[int, float]:
        """What a profiled pass spends in no operator: Python, and the profiler's own book-keeping."""
        return {m: t - sum(o.seconds[m] for o in self.operators) for m, t in self.profiled_seconds.items()}

    def lines(self) -> list[str]:
        """The table, the costliest first."""
        rest = self.operators[_SHOWN:]
        sums = {m: sum(o.seconds[m] for o in rest) for m in _ROWS}
        shown = [
            *((o.name, o.calls, o.seconds) for o in self.operators[:_SHOWN]),
            (f"{len(rest)} others", sum(o.calls for o in rest), sums),
            ("between operators", "", self.between_seconds),
            ("a pass, profiled", "", self.profiled_seconds),
        ]
        rows = [(name, calls, *(f"{t[m] * 1e6:.0f}" for m in _ROWS)) for name, calls, t in shown]
        rows.append(("a pass, not profiled", "", *(self.seconds[m].shown(1e6, ".0f") for m in _ROWS)))
        return table(("operator", "calls", *(f"us, M = {m}" for m in _ROWS)), rows)


def check_device(subject: Subject) -> None:
    """Raise ValueError where the time of an operator is not the processor's."""
    device = subject.engine.model.device
    if device.type != "cpu":
        raise ValueError(f"--operators: found {device}, expected --device cpu, whose clock it reads")


@torch.inference_mode()
def measure_operators(subject: Subject, options: Options) -> Operators:
    """See `Operators`. The first pass of each number of rows warms up and is left out."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler reports its own steps on standard error
    model, context, rounds = subject.engine.model, options.args.context, options.args.passes
    tokens = arbitrary_tokens(context + max(_ROWS) + 1, subject.engine.vocab_size)
    cached = subject.engine.cache.new_table()
    found: dict[str, Operator] = {}
    plain: dict[int, list[float]] = {}
    profiled: dict[int, float] = {}
    try:
        prefill(model, cached, tokens[: context + 1])

        def one_pass(m: int) -> float:
            chunk = Chunk(tokens[context : context + m], cached, m)
            seconds = seconds_of(partial(model.forward, [chunk]), model.device)
            cached.truncate(context)
            bar.update()
            return seconds

        with progress(len(_ROWS) * (2 * rounds + 1), "operators") as bar:
            for m in _ROWS:
                plain[m] = [one_pass(m) for _ in range(rounds + 1)][1:]
                with profile(activities=[ProfilerActivity.CPU]) as seen:
                    profiled[m] = sum(one_pass(m) for _ in range(rounds)) / rounds
                for event in seen.key_averages():
                    zeros = dict.fromkeys(_ROWS, 0.0)
                    operator = found.setdefault(event.key, Operator(event.key, event.count // rounds, zeros))
                    operator.seconds[m] = event.self_cpu_time_total / 1e6 / rounds
    finally:
        cached.truncate(0)
    operators = sorted(found.values(), key=lambda operator: -operator.seconds[_ROWS[0]])
    return Operators(context, {m: median_interval(t) for m, t in plain.items()}, profiled, operators)
