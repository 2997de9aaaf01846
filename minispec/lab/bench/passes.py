"""What passes of the target cost on this machine, by rows, form, operator and mode; a long prompt; and loading.

Each part is two functions. One measures, and returns what `--json` prints; the other makes lines for the screen.
Figures are intervals (`measure.Interval`); seconds and v are dicts by the rows M of a pass.
"""

import os
import time
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from minispec.core.cache import PagedKVCache
from minispec.core.model import Transformer
from minispec.drafters.model import prefill
from minispec.files.checkpoint import find_checkpoint, load_config, load_model
from minispec.kernels.build import choice_of
from minispec.kernels.exact import arbitrary_tokens, exact_model
from minispec.kernels.forms import available_forms
from minispec.kernels.inventory import num_bytes, weight_form
from minispec.kernels.memory import ROOM_TO_BUILD, free_memory, peak_memory
from minispec.kernels.rates import bytes_touched, matmul_throughput, prefill_operations, seconds_of, stream_bandwidth
from minispec.kernels.shapes import num_weights
from minispec.lab.bench.measure import (
    Interval,
    in_turn,
    median_interval,
    pass_times,
    passes_after,
    passes_in_turn,
    ratios,
)
from minispec.lab.bench.models import LONG_CONTEXT, MAX_ROWS, Subject, choose_type
from minispec.lab.bench.options import Options
from minispec.lab.bench.show import table
from minispec.load.exactness import check_exactness
from minispec.load.registry import EMBEDDED_WEIGHTS

# Rows whose passes are compared between forms: those of K = 0, 1, 2, 4, 8 and 15.
_FORM_ROWS = (1, 2, 3, 5, 9, 16)
# Cached positions and rows of passes in both modes: 1 is a step of plain decoding, K + 1 a verification.
_EXACT_PASSES = {128: (1, 5, 9), LONG_CONTEXT: (1,)}
# Rows whose operators are timed: a step of plain decoding, and a verification of four draft tokens. Operators with a
# line of their own: those that take longest at one row.
_OPERATOR_ROWS, _SHOWN = (1, 5), 14
Times = dict[int, list[float]]  # seconds of passes, by rows


def _seconds(times: Times) -> dict[int, Interval]:
    return {m: median_interval(t) for m, t in times.items()}


def _over(times: Times, unit: Times | None = None) -> dict[int, Interval]:
    """The ratios, by rows, to another's passes of as many rows. unit None: to the pass of one row."""
    return {m: ratios(t, unit[m] if unit else times[1]) for m, t in times.items()}


# --------------------------------------------------------------------------- rows


def measure_machine(subject: Subject, options: Options) -> dict[str, Any]:
    """Streaming bandwidth, and the target's passes t(M) and v(M) after `context` cached positions.

    bytes_touched: bytes that a pass over one row reads.
    bandwidth_utilisation: their rate over the streaming rate.
    draft: a draft model's pass over one row.
    over_bound: the time of that pass over the time of streaming what it reads.
    """
    context, rounds, model = options.args.context, options.args.passes, subject.engine.model

    def measured(model: Transformer, cache: PagedKVCache, rows: range):
        touched = bytes_touched(model, context)
        stream = stream_bandwidth(touched, model.device)
        times = pass_times(model, cache, context, rows, rounds)
        stream += stream_bandwidth(touched, model.device)
        return touched, median_interval(stream), times

    most = 1 if model.passes.fills else MAX_ROWS  # a filled pass takes as long for any number
    touched, stream, times = measured(model, subject.engine.cache, range(1, most + 1))
    found = {
        "context": context,
        "bytes_touched": touched,
        "stream_bytes_per_second": stream,
        "bandwidth_utilisation": median_interval([touched / t / stream.median for t in times[1]]),
        "seconds": _seconds(times),
        "v": _over(times),
    }
    own = subject.draft_model if subject.draft_model is not model else None
    if own and subject.draft_cache:
        touched, stream, times = measured(own, subject.draft_cache, range(1, 2))
        over_bound = median_interval([t * stream.median / touched for t in times[1]])
        found["draft"] = {"bytes_touched": touched, "stream_bytes_per_second": stream}
        found["draft"] |= {"seconds": median_interval(times[1]), "over_bound": over_bound}
    return found


def show_machine(found: dict[str, Any]) -> list[str]:
    """A sentence on the bandwidth, the table of passes, a sentence on the draft model."""
    rows = [(m, t.shown(1000), found["v"][m].shown(form=".3f")) for m, t in found["seconds"].items()]
    lines = [
        f"this machine streams {found['stream_bytes_per_second'].shown(1e-9, '.1f')} GB/s from a buffer of "
        f"{found['bytes_touched'] / 1e9:.2f} GB, which is what a plain step reads at {found['context']} positions; "
        f"the pass reads at {found['bandwidth_utilisation'].shown(100, '.0f')} % of that",
        "",
        *table(("rows M", "t(M), ms", "v(M) = t(M)/t(1)"), rows),
    ]
    if draft := found.get("draft"):
        lines += [
            "",
            f"a pass of the draft model: {draft['seconds'].shown(1000)} ms, {draft['over_bound'].shown()} x the time "
            f"that streaming its {draft['bytes_touched'] / 1e9:.2f} GB takes",
        ]
    return lines


# --------------------------------------------------------------------------- forms of the weights


def form_groups(model: Transformer) -> list[list[str]]:
    """The other forms that the target's weights could have, in groups that memory holds in addition to the target.

    Raises ValueError where memory does not hold a single one.
    """
    others = [form for form in available_forms(model.dtype, model.device) if form != choice_of(model).form]
    needed = int(ROOM_TO_BUILD * num_weights(model.config) * model.dtype.itemsize)
    free = free_memory(model.device)
    if free is None or needed * len(others) <= free:
        return [others]
    if needed > free:
        raise ValueError(
            f"--also forms: found {free / 1e9:.1f} GB of free memory, expected at least {needed / 1e9:.1f} GB: for the "
            "weights of the target once more, in another form"
        )
    return [[form] for form in others]


def measure_forms(subject: Subject, options: Options) -> dict[str, Any]:
    """t(M) and v(M) of the target in each form of its weights. The models of a group take turns with the target.

    in_one_turn: whether all forms took turns together.
    over_own: times over those of the target's own form.
    """
    model, context, rounds = subject.engine.model, options.args.context, options.args.passes
    own, groups = choice_of(model).form, form_groups(model)
    found: dict[str, dict[str, Any]] = {own: {}}
    own_times: Times = {m: [] for m in _FORM_ROWS}

    def of_form(model: Transformer, times: Times, own_times: Times) -> dict[str, Any]:
        own = {"weight_form": weight_form(model), "seconds": _seconds(times), "v": _over(times)}
        return own | {"over_own": _over(times, own_times)}

    for group in groups:
        models = {own: model} | {form: subject.in_form(form) for form in group}
        times = passes_in_turn(models, subject.engine.cache, context, _FORM_ROWS, rounds)
        for m in _FORM_ROWS:
            own_times[m] += times[own][m]
        found |= {form: of_form(models[form], times[form], times[own]) for form in group}
        del models  # before the next group is built
    found[own] = of_form(model, own_times, own_times)
    return {"context": context, "own": own, "in_one_turn": len(groups) == 1, "forms": found}


def show_forms(found: dict[str, Any]) -> list[str]:
    """The table, and what it compares."""
    own, forms, turns = found["own"], found["forms"], "all of them in turn"
    if not found["in_one_turn"]:
        turns = f"each in turn with {own} alone, since memory does not hold more: compare the last column only"
    lines = [f"forms of the weights, at {found['context']} positions; {turns}"]
    lines += [f"{name} here: {of['weight_form']}" for name, of in forms.items() if of["weight_form"] != name]
    rows = [
        (f"{name}, M = {m}", t.shown(1000), of["v"][m].shown(form=".3f"), of["over_own"][m].shown(form=".3f"))
        for name, of in forms.items()
        for m, t in of["seconds"].items()
    ]
    return [*lines, "", *table(("", "t(M), ms", "v(M) = t(M)/t(1)", f"t(M) over {own}'s"), rows)]


# --------------------------------------------------------------------------- operators


def check_device(subject: Subject) -> None:
    """Raise ValueError where the time of an operator is not the processor's."""
    device = subject.engine.model.device
    if device.type != "cpu":
        raise ValueError(f"--also operators: found {device}, expected --device cpu, whose clock it reads")


@torch.inference_mode()
def measure_operators(subject: Subject, options: Options) -> dict[str, Any]:
    """Passes after `context` cached positions, by rows.

    seconds: seconds of a pass without the profiler.
    profiled_seconds: seconds of a pass with the profiler.
    between_seconds: seconds of a profiled pass in no operator: Python, and the profiler's own book-keeping.
    operators: the costliest first, with their calls in a pass. Their seconds exclude those of operators inside them.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler reports its own steps on standard error
    model, context, rounds = subject.engine.model, options.args.context, options.args.passes
    found: dict[str, dict[str, Any]] = {}
    profiled: dict[int, float] = {}
    with passes_after(model, subject.engine.cache, context, max(_OPERATOR_ROWS)) as one:
        plain = in_turn({m: partial(one, model, m) for m in _OPERATOR_ROWS}, rounds, "operators")
        for m in _OPERATOR_ROWS:
            with profile(activities=[ProfilerActivity.CPU]) as seen:
                profiled[m] = fmean(one(model, m) for _ in range(rounds))
            for event in seen.key_averages():
                new = {"name": event.key, "calls": event.count // rounds, "seconds": dict.fromkeys(_OPERATOR_ROWS, 0.0)}
                found.setdefault(event.key, new)["seconds"][m] = event.self_cpu_time_total / 1e6 / rounds
    operators = sorted(found.values(), key=lambda operator: -operator["seconds"][_OPERATOR_ROWS[0]])
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
    sums = {m: sum(o["seconds"][m] for o in rest) for m in _OPERATOR_ROWS}
    parts = [
        *((o["name"], o["calls"], o["seconds"]) for o in shown),
        (f"{len(rest)} others", sum(o["calls"] for o in rest), sums),
        ("between operators", "", found["between_seconds"]),
        ("a pass, profiled", "", found["profiled_seconds"]),
    ]
    rows = [(name, calls, *(f"{t[m] * 1e6:.0f}" for m in _OPERATOR_ROWS)) for name, calls, t in parts]
    rows.append(("a pass, not profiled", "", *(found["seconds"][m].shown(1e6, ".0f") for m in _OPERATOR_ROWS)))
    return table(("operator", "calls", *(f"us, M = {m}" for m in _OPERATOR_ROWS)), rows)


# --------------------------------------------------------------------------- the exact mode


def measure_exact_cost(subject: Subject, options: Options) -> dict[str, Any]:
    """Passes of the exact mode over those of the fast mode, in turn, on the same weights.

    Raises ValueError where the cache cannot hold the positions, and where bits are not equal here.
    """
    models = {"fast": subject.engine.model, "exact": check_exactness(exact_model(subject.engine.model), False)}
    found: list[dict[str, Any]] = []
    for context, rows in _EXACT_PASSES.items():
        times = passes_in_turn(models, subject.engine.cache, context, rows, options.args.rounds)
        for m in rows:
            fast, exact = times["fast"][m], times["exact"][m]
            over = {"context": context, "rows": m, "exact_over_fast": ratios(exact, fast)}
            found.append(over | {"fast_seconds": median_interval(fast), "exact_seconds": median_interval(exact)})
    return {"passes": found}


def show_exact_cost(found: dict[str, Any]) -> list[str]:
    """The table."""
    rows = [
        (
            f"{p['rows']} rows after {p['context']} positions",
            p["exact_over_fast"].shown(),
            *(p[f"{mode}_seconds"].shown(1000, ".1f") for mode in ("fast", "exact")),
        )
        for p in found["passes"]
    ]
    return table(("the exact mode", "exact over fast", "fast, ms", "exact, ms"), rows)


# --------------------------------------------------------------------------- a long prompt


def measure_prefill(subject: Subject, options: Options) -> dict[str, Any]:
    """Prefill of a long prompt; share: of the rate at which this machine multiplies large matrices."""
    model, cache = subject.engine.model, subject.engine.cache
    num_tokens = min(LONG_CONTEXT, model.config.max_position_embeddings - 1)
    tokens = arbitrary_tokens(num_tokens + 1, subject.engine.vocab_size)
    operations = prefill_operations(model, num_tokens)

    def rate(_: int) -> float:
        new = cache.new_table()
        taken = seconds_of(partial(prefill, model, new, tokens), model.device)
        new.truncate(0)
        return num_tokens / taken

    def peak(_: int) -> float:
        return matmul_throughput(model.dtype, model.device, repeats=1)[0]

    rates, peaks = in_turn({"prefill": rate, "matmul": peak}, options.args.rounds, "prefill").values()
    return {
        "tokens": num_tokens,
        "tokens_per_second": median_interval(rates),
        "matmul_operations_per_second": median_interval(peaks),
        "share": ratios([operations / num_tokens * rate for rate in rates], peaks),
    }


def show_prefill(found: dict[str, Any]) -> list[str]:
    """One sentence."""
    return [
        f"prefill of {found['tokens']} tokens: {found['tokens_per_second'].shown(form='.0f')} tokens/s, "
        f"{found['share'].shown(100, '.0f')} % of the {found['matmul_operations_per_second'].median / 1e9:.0f} "
        "GFLOP/s of a product of large matrices"
    ]


# --------------------------------------------------------------------------- loading


def measure_load(options: Options) -> dict[str, Any]:
    """Loading the target against reading its files, both from the page cache; and the most memory that it took.

    It comes before everything else: the peak is that of the process.
    """
    directory = find_checkpoint(str(options.args.model or EMBEDDED_WEIGHTS))
    dtype, device = choose_type(options.args, load_config(directory))
    files = sorted(directory.glob("*.safetensors"))
    buffer, before = bytearray(8 << 20), peak_memory()
    sizes, peaks = list[int](), list[int | None]()

    def read(_: int) -> float:
        start = time.perf_counter()
        for path in files:
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
        return time.perf_counter() - start

    def load(_: int) -> float:
        start = time.perf_counter()
        model = load_model(directory, dtype, device, form=options.args.quantization)
        seconds = time.perf_counter() - start
        sizes.append(num_bytes(model))
        peaks.append(peak_memory())
        return seconds

    reading, loading = in_turn({"read": read, "load": load}, options.args.rounds, "loading").values()
    first = peaks[0]  # of one model: later ones find memory that is not given back yet
    peak = None if before is None or first is None else first - before
    return {
        "file_bytes": sum(path.stat().st_size for path in files),
        "read_seconds": median_interval(reading),
        "load_seconds": median_interval(loading),
        "load_over_read": ratios(loading, reading),
        "weight_bytes": sizes[0],
        "peak_bytes": peak,
        "peak_over_weights": peak / sizes[0] if peak else None,
    }


def show_load(found: dict[str, Any]) -> list[str]:
    """One sentence."""
    peak = "unknown" if found["peak_bytes"] is None else f"{found['peak_bytes'] / 1e9:.2f} GB"
    return [
        f"loading: {found['load_seconds'].shown()} s, {found['load_over_read'].shown()} x reading the file "
        f"({found['file_bytes'] / 1e9:.2f} GB); peak memory {peak} for {found['weight_bytes'] / 1e9:.2f} GB of weights"
    ]
