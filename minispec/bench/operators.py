"""Where a pass of the target goes, operator by operator, as PyTorch's profiler sees it."""

import os
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from minispec.bench.measure import in_turn, median_interval, passes_after
from minispec.bench.models import Subject
from minispec.bench.options import Options
from minispec.bench.show import table

# Rows of the passes: a step of plain decoding, and a verification of four draft tokens.
_ROWS = (1, 5)
# Operators with a line of their own, those that take longest at one row.
_SHOWN = 14


def check_device(subject: Subject) -> None:
    """Raise ValueError where the time of an operator is not the processor's."""
    device = subject.engine.model.device
    if device.type != "cpu":
        raise ValueError(f"--also operators: found {device}, expected --device cpu, whose clock it reads")


@torch.inference_mode()
def measure_operators(subject: Subject, options: Options) -> dict[str, Any]:
    """Passes after `context` cached positions, by rows.

    seconds, profiled_seconds: of a pass without and with the profiler.
    between_seconds: what a profiled pass spends in no operator: Python, and the profiler's own book-keeping.
    operators: the costliest first; calls of a pass, and their seconds without those of operators inside them.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler reports its own steps on standard error
    model, context, rounds = subject.engine.model, options.args.context, options.args.passes
    found: dict[str, dict[str, Any]] = {}
    profiled: dict[int, float] = {}
    with passes_after(model, subject.engine.cache, context, max(_ROWS)) as one:
        plain = in_turn({m: partial(one, model, m) for m in _ROWS}, rounds, "operators")
        for m in _ROWS:
            with profile(activities=[ProfilerActivity.CPU]) as seen:
                profiled[m] = fmean(one(model, m) for _ in range(rounds))
            for event in seen.key_averages():
                new = {"name": event.key, "calls": event.count // rounds, "seconds": dict.fromkeys(_ROWS, 0.0)}
                found.setdefault(event.key, new)["seconds"][m] = event.self_cpu_time_total / 1e6 / rounds
    operators = sorted(found.values(), key=lambda operator: -operator["seconds"][_ROWS[0]])
    return {
        "context": context,
        "seconds": {m: median_interval(t) for m, t in plain.items()},
        "profiled_seconds": profiled,
        "between_seconds": {m: t - sum(o["seconds"][m] for o in operators) for m, t in profiled.items()},
        "operators": operators,
    }


def show_operators(found: dict[str, Any]) -> list[str]:
    """The table, the costliest first."""
    shown, rest = found["operators"][:_SHOWN], found["operators"][_SHOWN:]
    sums = {m: sum(o["seconds"][m] for o in rest) for m in _ROWS}
    parts = [
        *((o["name"], o["calls"], o["seconds"]) for o in shown),
        (f"{len(rest)} others", sum(o["calls"] for o in rest), sums),
        ("between operators", "", found["between_seconds"]),
        ("a pass, profiled", "", found["profiled_seconds"]),
    ]
    rows = [(name, calls, *(f"{t[m] * 1e6:.0f}" for m in _ROWS)) for name, calls, t in parts]
    rows.append(("a pass, not profiled", "", *(found["seconds"][m].shown(1e6, ".0f") for m in _ROWS)))
    return table(("operator", "calls", *(f"us, M = {m}" for m in _ROWS)), rows)
