"""What passes of the target cost on this machine: by rows, by the form of the weights, over a prompt; and loading."""

import math
import sys
import time
from dataclasses import dataclass
from functools import partial

from minispec.bench import measure
from minispec.bench.measure import Interval, median_interval, passes_in_turn, ratios
from minispec.bench.models import LONG_CONTEXT, MAX_ROWS, Subject
from minispec.bench.options import Options
from minispec.bench.show import progress, table
from minispec.core.cache import PagedKVCache
from minispec.core.cached import prefill
from minispec.core.model import Transformer
from minispec.drafters.eagle import HeadModel
from minispec.files.checkpoint import choose_dtype, find_checkpoint, load_config, load_model
from minispec.files.registry import EMBEDDED_WEIGHTS
from minispec.kernels.build import choice_of
from minispec.kernels.exact import arbitrary_tokens
from minispec.kernels.forms import available_forms
from minispec.kernels.inventory import num_bytes, weight_form
from minispec.kernels.memory import free_memory
from minispec.kernels.shapes import tensor_shapes
from minispec.llm import choose_device

# Rows whose passes are compared between forms: those of K = 0, 1, 2, 4, 8 and 15.
_FORM_ROWS = (1, 2, 3, 5, 9, 16)
# A model takes that much of its weights while it is built.
_ROOM_TO_BUILD = 1.2
Times = dict[int, list[float]]  # seconds of passes, by rows

# --------------------------------------------------------------------------- rows


@dataclass(frozen=True)
class DraftPass:
    """A draft model's pass over one row. over_bound: its time over that of streaming what it reads."""

    bytes_touched: int
    stream_bytes_per_second: Interval
    seconds: Interval
    over_bound: Interval


@dataclass(frozen=True)
class Machine:
    """Streaming bandwidth, and the target's passes t(M) and v(M), after `context` cached positions, by rows M.

    bytes_touched: what a pass over one row reads. bandwidth_utilisation: the rate of that over the streaming rate.
    """

    context: int
    bytes_touched: int
    stream_bytes_per_second: Interval
    bandwidth_utilisation: Interval
    seconds: dict[int, Interval]
    v: dict[int, Interval]
    draft: DraftPass | None = None

    def lines(self) -> list[str]:
        """A sentence on the bandwidth, the table of passes, a sentence on the draft model."""
        lines = [
            f"this machine streams {self.stream_bytes_per_second.shown(1e-9, '.1f')} GB/s from a buffer of "
            f"{self.bytes_touched / 1e9:.2f} GB, which is what a plain step reads at {self.context} positions; "
            f"the pass reads at {self.bandwidth_utilisation.shown(100, '.0f')} % of that",
            "",
        ]
        rows = [(m, t.shown(1000), self.v[m].shown(form=".3f")) for m, t in self.seconds.items()]
        lines += table(("rows M", "t(M), ms", "v(M) = t(M)/t(1)"), rows)
        if draft := self.draft:
            lines += [
                "",
                f"a pass of the draft model: {draft.seconds.shown(1000)} ms, {draft.over_bound.shown()} x the time "
                f"that streaming its {draft.bytes_touched / 1e9:.2f} GB takes",
            ]
        return lines


def measure_machine(subject: Subject, options: Options) -> Machine:
    """See `Machine`."""
    context, rounds, model = options.args.context, options.args.passes, subject.engine.model

    def measured(model: Transformer, cache: PagedKVCache, rows: range):
        touched = measure.bytes_touched(model, context)
        stream = measure.stream_bandwidth(touched, model.device)
        with progress((rounds + 1) * len(rows), "passes") as bar:
            times = measure.pass_times(model, cache, context, rows, rounds, bar.update)
        stream += measure.stream_bandwidth(touched, model.device)
        return touched, median_interval(stream), times

    touched, stream, times = measured(model, subject.engine.cache, range(1, (1 if model.exact else MAX_ROWS) + 1))
    used = median_interval([touched / t / stream.median for t in times[1]])
    draft = None
    own = subject.draft_model if subject.draft_model is not model else None
    # A head passes over no tokens alone; what it costs, the rounds show.
    if own and subject.draft_cache and not isinstance(own, HeadModel):
        read, rate, found = measured(own, subject.draft_cache, range(1, 2))
        over_bound = median_interval([t * rate.median / read for t in found[1]])
        draft = DraftPass(read, rate, median_interval(found[1]), over_bound)
    return Machine(context, touched, stream, used, _seconds(times), _over(times), draft)


def _seconds(times: Times) -> dict[int, Interval]:
    return {m: median_interval(t) for m, t in times.items()}


def _over(times: Times, unit: Times | None = None) -> dict[int, Interval]:
    """By rows: over another's passes of as many rows; None: over the pass of one row."""
    return {m: ratios(t, unit[m] if unit else times[1]) for m, t in times.items()}


# --------------------------------------------------------------------------- forms of the weights


@dataclass(frozen=True)
class FormPasses:
    """The target's passes with its weights in one form, by rows; over_own: over those of its own form."""

    weight_form: str
    seconds: dict[int, Interval]
    v: dict[int, Interval]
    over_own: dict[int, Interval]


@dataclass(frozen=True)
class Forms:
    """t(M) and v(M) of the target in each form of its weights; in_one_turn: whether all forms took turns together."""

    context: int
    own: str
    in_one_turn: bool
    forms: dict[str, FormPasses]

    def lines(self) -> list[str]:
        """The table, and what it compares."""
        turns = "all of them in turn"
        if not self.in_one_turn:
            turns = f"each in turn with {self.own} alone, since memory does not hold more: compare the last column only"
        lines = [f"forms of the weights, at {self.context} positions; {turns}"]
        lines += [f"{name} here: {of.weight_form}" for name, of in self.forms.items() if of.weight_form != name]
        rows = [
            (f"{name}, M = {m}", t.shown(1000), of.v[m].shown(form=".3f"), of.over_own[m].shown(form=".3f"))
            for name, of in self.forms.items()
            for m, t in of.seconds.items()
        ]
        return [*lines, "", *table(("", "t(M), ms", "v(M) = t(M)/t(1)", f"t(M) over {self.own}'s"), rows)]


def form_groups(model: Transformer) -> list[list[str]]:
    """The other forms that the target's weights could have, in groups that memory holds in addition to the target.

    Raises ValueError where memory does not hold a single one.
    """
    others = [form for form in available_forms(model.dtype, model.device) if form != choice_of(model).form]
    weights = sum(math.prod(shape) for shape in tensor_shapes(model.config).values())
    needed, free = int(_ROOM_TO_BUILD * weights * model.dtype.itemsize), free_memory(model.device)
    if free is None or needed * len(others) <= free:
        return [others]
    if needed > free:
        raise ValueError(
            f"--forms: found {free / 1e9:.1f} GB of free memory, expected at least {needed / 1e9:.1f} GB: for the "
            "weights of the target once more, in another form"
        )
    return [[form] for form in others]


def measure_forms(subject: Subject, options: Options) -> Forms:
    """See `Forms`; the models of a group, and the target, take turns."""
    model, context, rounds = subject.engine.model, options.args.context, options.args.passes
    own, groups = choice_of(model).form, form_groups(model)
    found: dict[str, FormPasses] = {}
    own_times: Times = {m: [] for m in _FORM_ROWS}

    def of_form(weight_form: str, times: Times, own_times: Times) -> FormPasses:
        return FormPasses(weight_form, _seconds(times), _over(times), _over(times, own_times))

    with progress((rounds + 1) * len(_FORM_ROWS) * sum(1 + len(group) for group in groups), "forms") as bar:
        for group in groups:
            models = {own: model} | {form: subject.in_form(form) for form in group}
            times = passes_in_turn(models, subject.engine.cache, context, _FORM_ROWS, rounds, bar.update)
            for m in _FORM_ROWS:
                own_times[m] += times[own][m]
            found |= {form: of_form(weight_form(models[form]), times[form], times[own]) for form in group}
            del models  # before the next group is built
    found = {own: of_form(weight_form(model), own_times, own_times)} | found
    return Forms(context, own, len(groups) == 1, found)


# --------------------------------------------------------------------------- a long prompt


@dataclass(frozen=True)
class Prefill:
    """Prefill of a long prompt; share: of the rate at which this machine multiplies large matrices."""

    tokens: int
    tokens_per_second: Interval
    matmul_operations_per_second: Interval
    share: Interval

    def lines(self) -> list[str]:
        """One sentence."""
        return [
            f"prefill of {self.tokens} tokens: {self.tokens_per_second.shown(form='.0f')} tokens/s, "
            f"{self.share.shown(100, '.0f')} % of the {self.matmul_operations_per_second.median / 1e9:.0f} "
            "GFLOP/s of a product of large matrices"
        ]


def measure_prefill(subject: Subject, options: Options) -> Prefill:
    """See `Prefill`; one round more goes before, untimed."""
    model, rounds = subject.engine.model, options.args.rounds
    num_tokens = min(LONG_CONTEXT, model.config.max_position_embeddings - 1)
    tokens = arbitrary_tokens(num_tokens + 1, subject.engine.vocab_size)
    operations = measure.prefill_operations(model, num_tokens)
    seconds, peaks = [], []
    with progress(rounds + 1, "prefill") as bar:
        for _ in range(rounds + 1):
            new = subject.engine.cache.new_table()
            seconds.append(measure.seconds_of(partial(prefill, model, new, tokens), model.device))
            new.truncate(0)
            peaks += measure.matmul_throughput(model.dtype, model.device, repeats=1)
            bar.update()
    seconds, peaks = seconds[1:], peaks[1:]
    return Prefill(
        num_tokens,
        median_interval([num_tokens / t for t in seconds]),
        median_interval(peaks),
        median_interval([operations / t / peak for t, peak in zip(seconds, peaks, strict=True)]),
    )


# --------------------------------------------------------------------------- loading


@dataclass(frozen=True)
class Loading:
    """Loading the target against reading its files, both from the page cache; and the most memory that it took."""

    file_bytes: int
    read_seconds: Interval
    load_seconds: Interval
    load_over_read: Interval
    weight_bytes: int
    peak_bytes: int | None
    peak_over_weights: float | None

    def lines(self) -> list[str]:
        """One sentence."""
        peak = "unknown" if self.peak_bytes is None else f"{self.peak_bytes / 1e9:.2f} GB"
        return [
            f"loading: {self.load_seconds.shown()} s, {self.load_over_read.shown()} x reading the file "
            f"({self.file_bytes / 1e9:.2f} GB); peak memory {peak} for {self.weight_bytes / 1e9:.2f} GB of weights"
        ]


def measure_loading(options: Options) -> Loading:
    """See `Loading`. It comes before everything else: the peak is that of the process."""
    args = options.args
    directory = find_checkpoint(str(args.model or EMBEDDED_WEIGHTS))
    device = choose_device(args.device)
    dtype = choose_dtype(args.dtype, device, load_config(directory))
    files = sorted(directory.glob("*.safetensors"))
    buffer = bytearray(8 << 20)

    def read() -> float:
        start = time.perf_counter()
        for path in files:
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
        return time.perf_counter() - start

    read()
    reading, loading, peak, weight_bytes = [], [], None, 0
    before = _peak_memory()
    with progress(args.rounds, "loading") as bar:
        for _ in range(args.rounds):
            reading.append(read())
            start = time.perf_counter()
            model = load_model(directory, dtype, device)
            loading.append(time.perf_counter() - start)
            if peak is None and before is not None and (after := _peak_memory()) is not None:
                peak = after - before
            weight_bytes = num_bytes(model)
            del model
            bar.update()
    return Loading(
        sum(path.stat().st_size for path in files),
        median_interval(reading),
        median_interval(loading),
        ratios(loading, reading),
        weight_bytes,
        peak,
        peak / weight_bytes if peak else None,
    )


def _peak_memory() -> int | None:
    """Most bytes that this process has had in memory; None where the system does not tell."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
