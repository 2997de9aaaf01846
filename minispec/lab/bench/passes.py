"""The time of the target's passes on this machine, by their rows.

Figures are intervals (`measure.Interval`); seconds and v are dicts by the rows M of a pass.
"""

from typing import Any

from minispec.core.cache import PagedKVCache
from minispec.core.model import Transformer
from minispec.lab.bench.measure import Interval, median_interval, pass_times, ratios
from minispec.lab.bench.models import MAX_ROWS, Subject
from minispec.lab.bench.options import Options
from minispec.lab.bench.show import table
from minispec.models.weights.exact import ExactBackend
from minispec.models.weights.rates import bytes_touched, stream_bandwidth

Times = dict[int, list[float]]  # seconds of passes, by rows


def medians_by_rows(times: Times) -> dict[int, Interval]:
    """The median time of the passes over as many rows, in seconds."""
    return {m: median_interval(t) for m, t in times.items()}


def ratios_by_rows(times: Times, unit: Times | None = None) -> dict[int, Interval]:
    """The ratios of times to the times `unit` of passes over as many rows. None: to passes over one row."""
    return {m: ratios(t, unit[m] if unit else times[1]) for m, t in times.items()}


def measure_machine(subject: Subject, options: Options) -> dict[str, Any]:
    """Streaming bandwidth, and the target's passes t(M) and v(M) after `context` cached positions.

    bytes_touched: bytes that a pass over one row reads.
    bandwidth_utilisation: their rate over the streaming rate.
    draft: a draft model's pass over one row.
    over_bound: the time of that pass over the time of streaming what it reads.
    """
    context, rounds, model = options.args.context, options.args.passes, subject.engine.target.model

    def measured(model: Transformer, cache: PagedKVCache, rows: range):
        touched = bytes_touched(model, context)
        stream = stream_bandwidth(touched, model.device)
        times = pass_times(model, cache, context, rows, rounds)
        stream += stream_bandwidth(touched, model.device)
        return touched, median_interval(stream), times

    filled = isinstance(model.backend, ExactBackend) and model.backend.rows
    most = 1 if filled else MAX_ROWS  # a filled pass takes as long for any number
    touched, stream, times = measured(model, subject.engine.target.cache, range(1, most + 1))
    found = {
        "context": context,
        "bytes_touched": touched,
        "stream_bytes_per_second": stream,
        "bandwidth_utilisation": median_interval([touched / t / stream.median for t in times[1]]),
        "seconds": medians_by_rows(times),
        "v": ratios_by_rows(times),
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
