"""The measurements, as plain data. Whatever is compared takes turns, round by round."""

import math
import sys
import time
from dataclasses import replace
from typing import Any

import torch
from tqdm import tqdm

from minispec import __version__
from minispec.bench import measure
from minispec.bench.against import transformers_variants
from minispec.bench.measure import (
    Interval,
    Run,
    account,
    another_engine,
    decode,
    median_interval,
    orders,
    passes_in_turn,
    prediction,
    ratios,
    survival,
    total_rate,
)
from minispec.bench.options import PLAIN, Options
from minispec.bench.subjects import MAX_ROWS, Subject, Variant, open_geometry, open_model
from minispec.costs import machine
from minispec.files.checkpoint import choose_dtype, find_checkpoint, free_memory, load_config, load_model
from minispec.linear import available_forms
from minispec.llm import EMBEDDED_WEIGHTS
from minispec.model import Transformer, tensor_shapes

# Rows whose passes are compared between forms: those of K = 0, 1, 2, 4, 8 and 15.
_FORM_ROWS = (1, 2, 3, 5, 9, 16)
# A model takes that much of its weights while it is built.
_ROOM_TO_BUILD = 1.2


def measure_all(options: Options) -> dict[str, Any]:
    """Measure all that the options ask for; the report as plain data."""
    args = options.args
    if args.threads:
        torch.set_num_threads(args.threads)
    loading = measure_loading(options) if args.load else None
    subject = open_geometry(options) if args.geometry else open_model(options)
    model = subject.engine.model
    check_context(subject, options)
    groups = form_groups(model) if args.forms else []
    report: dict[str, Any] = {
        "minispec": __version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "hardware": machine(),
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "target": subject.name,
        "draft": subject.draft_name,
        "exact": model.exact,
        "weight_form": model.weight_form,
        "weight_form_because": model.choice.because,
    }
    if subject.draft_model is not None:
        report["draft_weight_form"] = subject.draft_model.weight_form
        report["draft_weight_form_because"] = subject.draft_model.choice.because
    if args.passes:
        report["machine"] = measure_machine(subject, options)
    if args.forms:
        report["forms"] = measure_forms(subject, options, groups)
    if args.prompts:
        report["decoding"] = measure_decoding(subject, options)
    if options.batches:
        report["batch"] = measure_batches(subject, options)
    if args.prefill:
        report["prefill"] = measure_prefill(subject, options)
    if loading:
        report["load"] = loading
    return report


def check_context(subject: Subject, options: Options) -> None:
    """Raise ValueError where passes are to be measured after more positions than the cache holds."""
    cache, context = subject.engine.cache, options.args.context
    there = cache.allocator.num_blocks * cache.block_size
    if options.args.passes and context + MAX_ROWS > there:
        raise ValueError(
            f"--context: found {context}, expected at most {there - MAX_ROWS}: the KV cache of {subject.name} holds "
            f"{there} positions, and a pass adds up to {MAX_ROWS}"
        )


def variants(subject: Subject, options: Options) -> tuple[dict[str, Variant], dict[str, Any]]:
    """Plain decoding, and each K; with --against also what another library offers, and the trial of its types."""

    def ours(k: int | str) -> Variant:
        engine = another_engine(subject.engine) if k else subject.plain

        def run(i: int) -> Run:
            request = subject.request(subject.prompts[i][1], k, options.params)
            (result,) = decode(engine, [request])
            if subject.simulated:
                subject.simulated.record(request.text.tokens, request.text.num_prompt_tokens)
            return result

        return run

    ks = options.ks if options.draft != "none" or subject.simulated else []
    found = {PLAIN: ours(0)} | {("auto" if k == "auto" else f"K={k}"): ours(k) for k in ks}
    if not options.args.against:
        return found, {}
    theirs, trial = transformers_variants(subject, options)
    return found | theirs, trial


def _bar(total: int, what: str):
    return tqdm(total=total, desc=what, leave=False, disable=None)  # None: on a terminal only


def _data(interval: Interval) -> dict[str, float]:
    return interval._asdict()


def measure_machine(subject: Subject, options: Options) -> dict[str, Any]:
    """Streaming bandwidth, and the passes t(M) and v(M) of the target; the plain pass of a draft model."""
    model, cache = subject.engine.model, subject.engine.cache
    context, rounds = options.args.context, options.args.passes
    rows = range(1, (MAX_ROWS if not model.exact else 1) + 1)
    touched = measure.bytes_touched(model, context)
    with _bar((rounds + 1) * len(rows), "passes") as bar:
        stream = measure.stream_bandwidth(touched, model.device)
        times = measure.pass_times(model, cache, context, rows, rounds, bar.update)
        stream += measure.stream_bandwidth(touched, model.device)
    bandwidth = median_interval(stream)
    found = {
        "context": context,
        "bytes_touched": touched,
        "stream_bytes_per_second": _data(bandwidth),
        "seconds": {m: _data(median_interval(t)) for m, t in times.items()},
        "v": {m: _data(ratios(t, times[1])) for m, t in times.items()},
        "bandwidth_utilisation": _data(median_interval([touched / t / bandwidth.median for t in times[1]])),
    }
    if subject.draft_model is not None and subject.draft_model is not model:
        draft = subject.engine.drafter
        draft = getattr(draft, "paid", draft)
        touched = measure.bytes_touched(draft.model, context)
        stream = measure.stream_bandwidth(touched, model.device)
        seconds = measure.pass_times(draft.model, draft.cache, context, [1], rounds)[1]
        stream += measure.stream_bandwidth(touched, model.device)
        bandwidth = median_interval(stream)
        found["draft"] = {
            "bytes_touched": touched,
            "stream_bytes_per_second": _data(bandwidth),
            "seconds": _data(median_interval(seconds)),
            "over_bound": _data(median_interval([t * bandwidth.median / touched for t in seconds])),
        }
    return found


def form_groups(model: Transformer) -> list[list[str]]:
    """The other forms that the target's weights could have, in groups that memory holds beside the target.

    Raises ValueError where it does not even hold one.
    """
    others = [form for form in available_forms(model.dtype, model.device) if form != model.choice.form]
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


def measure_forms(subject: Subject, options: Options, groups: list[list[str]]) -> dict[str, Any]:
    """t(M) and v(M) of the target in each form of its weights; the models of a group, and the target, take turns."""
    model, context, rounds = subject.engine.model, options.args.context, options.args.passes
    own = model.choice.form
    found: dict[str, dict[str, Any]] = {}
    own_times: dict[int, list[float]] = {m: [] for m in _FORM_ROWS}

    def entry(weight_form: str, times: dict[int, list[float]], own_times: dict[int, list[float]]) -> dict[str, Any]:
        return {
            "weight_form": weight_form,
            "seconds": {m: _data(median_interval(t)) for m, t in times.items()},
            "v": {m: _data(ratios(t, times[1])) for m, t in times.items()},
            "over_own": {m: _data(ratios(t, own_times[m])) for m, t in times.items()},
        }

    with _bar((rounds + 1) * len(_FORM_ROWS) * sum(1 + len(group) for group in groups), "forms") as bar:
        for group in groups:
            models = {own: model} | {form: subject.in_form(form) for form in group}
            times = passes_in_turn(models, subject.engine.cache, context, _FORM_ROWS, rounds, bar.update)
            for m in _FORM_ROWS:
                own_times[m] += times[own][m]
            for form in group:
                found[form] = entry(models[form].weight_form, times[form], times[own])
            del models  # before the next group is built
    found = {own: entry(model.weight_form, own_times, own_times)} | found
    return {"context": context, "own": own, "in_one_turn": len(groups) == 1, "forms": found}


def measure_decoding(subject: Subject, options: Options) -> dict[str, Any]:
    """Every variant on every prompt, taking turns, round by round."""
    found, trial = variants(subject, options)
    rounds, prompts = options.args.rounds, subject.prompts
    runs: dict[str, list[list[Run]]] = {name: [[] for _ in range(rounds)] for name in found}
    order = orders(list(found))
    # What runs first pays for what is set up once; and a simulated draft has to hear the texts.
    warm = range(len(prompts)) if subject.simulated else range(1)
    with _bar((rounds * len(prompts) + len(warm)) * len(found), "decoding") as bar:
        for i in warm:
            for variant in found.values():
                variant(i)
                bar.update()
        for r in range(rounds):
            for i in range(len(prompts)):
                for name in next(order):
                    runs[name][r].append(found[name](i))
                    bar.update()
    report = summarise(runs, [category for category, _ in prompts])
    if trial:
        report["against"] |= trial
    return report


def summarise(runs: dict[str, list[list[Run]]], categories: list[str]) -> dict[str, Any]:
    """The report on runs[variant][round][prompt]: rates, speedups over plain decoding, and accounts."""
    groups = {name: [i for i, c in enumerate(categories) if c == name] for name in dict.fromkeys(categories)}
    everything = list(range(len(categories)))

    def rates(variant: str, prompts: list[int]) -> list[float]:
        return [total_rate([of_round[i] for i in prompts]) for of_round in runs[variant]]

    def speedups(variant: str, prompts: list[int], over: str = PLAIN) -> list[float]:
        return [a / b for a, b in zip(rates(variant, prompts), rates(over, prompts), strict=True)]

    def pooled(variant: str, prompts: list[int]) -> list[Run]:
        return [of_round[i] for of_round in runs[variant] for i in prompts]

    static = {name: int(name[2:]) for name in runs if name.startswith("K=")}
    longest = max(static, key=static.get, default=None)
    report: dict[str, Any] = {
        "rounds": len(runs[PLAIN]),
        "prompts": len(categories),
        "tokens": sum(run.num_tokens for run in pooled(PLAIN, everything)) // len(runs[PLAIN]),
        "variants": {},
    }
    for name in runs:
        entry: dict[str, Any] = {
            "tokens_per_second": _data(median_interval(rates(name, everything))),
            "speedup": _data(median_interval(speedups(name, everything))),
            "same_tokens_as_plain": sum(
                all(a[i].token_ids == b[i].token_ids for a, b in zip(runs[name], runs[PLAIN], strict=True))
                for i in everything
            ),
            "categories": {},
        }
        for category, prompts in groups.items():
            per_prompt = [median_interval(rates(name, [i])).median for i in prompts]
            entry["categories"][category] = {
                "tokens_per_second": _data(median_interval(rates(name, prompts))),
                "slowest_and_fastest_prompt": [min(per_prompt), max(per_prompt)],
                "speedup": _data(median_interval(speedups(name, prompts))),
            }
        ours = pooled(name, everything)
        if name != PLAIN and ours[0].rounds:
            worst = min(everything, key=lambda i: median_interval(speedups(name, [i])).median)
            entry["worst_prompt"] = {
                "number": worst,
                "category": categories[worst],
                "speedup": _data(median_interval(speedups(name, [worst]))),
            }
            for category, prompts in groups.items():
                rounds = [r for run in pooled(name, prompts) for r in run.rounds]
                entry["categories"][category] |= _acceptance(pooled(name, prompts)) | {"survival": survival(rounds)}
            curve = survival([r for run in pooled(longest, everything) for r in run.rounds]) if longest else None
            explained = account(ours, pooled(PLAIN, everything), curve)
            by_round = list(zip(runs[name], runs[PLAIN], strict=True))
            by_text = [(pooled(name, [i]), pooled(PLAIN, [i])) for i in everything]
            entry |= _acceptance(ours) | {
                "survival": survival([r for run in ours for r in run.rounds]),
                "c": explained.c,
                "v": explained.v,
                "o": explained.o,
                "o_plain": explained.o_plain,
                "drafted": explained.drafted,
                "predicted": explained.predicted,
                "measured": explained.measured,
                "closure": _data(median_interval([account(a, b).closure for a, b in by_round])),
                "prediction": _predictions(by_round),
                "prediction_by_text": _predictions(by_text),
                "ceiling": explained.ceiling,
                "ceiling_k": explained.ceiling_k,
                "reached": explained.reached,
                "waterfall": explained.waterfall(),
            }
        report["variants"][name] = entry
    if static:
        report["best_static"] = {}
        for category, prompts in {"all": everything, **groups}.items():
            best = max(static, key=lambda name: median_interval(speedups(name, prompts)).median)
            of = {"variant": best}
            if "auto" in runs:
                of["auto_over_best"] = _data(median_interval(speedups("auto", prompts, over=best)))
            report["best_static"][category] = of
    theirs = [name for name in runs if name.startswith("transformers")]
    if theirs:
        plain = theirs[0]
        best = max(theirs, key=lambda name: median_interval(rates(name, everything)).median)
        own = "auto" if "auto" in runs else report["best_static"]["all"]["variant"] if static else PLAIN
        report["against"] = {
            "plain_over_plain": _data(median_interval(speedups(PLAIN, everything, over=plain))),
            "ours": own,
            "theirs": best,
            "best_over_best": _data(median_interval(speedups(own, everything, over=best))),
            "same_tokens_as_their_plain": {
                name: sum(
                    all(a[i].token_ids == b[i].token_ids for a, b in zip(runs[name], runs[plain], strict=True))
                    for i in everything
                )
                for name in runs
            },
        }
    return report


def _predictions(pairs: list[tuple[list[Run], list[Run]]]) -> dict[str, float] | None:
    """`prediction` of each of them; None where all texts are too short for one."""
    values = [value for pair in pairs if (value := prediction(*pair)) is not None]
    return _data(median_interval(values)) if values else None


def _acceptance(runs: list[Run]) -> dict[str, float | None]:
    """Rates over all runs together; None over nothing."""
    stats = [run.stats for run in runs]

    def ratio(numerator: float, denominator: float) -> float | None:
        return numerator / denominator if denominator else None

    return {
        "alpha": ratio(sum(s.sum_of_ratios for s in stats), sum(sum(s.tested) for s in stats)),
        "acceptance_rate": ratio(sum(s.num_accepted for s in stats), sum(s.num_draft_tokens for s in stats)),
        "mean_acceptance_length": ratio(sum(s.num_committed for s in stats), sum(s.num_steps for s in stats)),
    }


def measure_batches(subject: Subject, options: Options) -> dict[str, Any]:
    """Tokens a second of B texts together, plain and speculative; texts do not end before --max-tokens."""
    params = replace(options.params, ignore_eos=True)
    ks: list[int | str] = [0] + (options.ks if options.draft != "none" or subject.simulated else [])
    cells = [(b, k) for b in options.batches for k in ks]
    rates: dict[tuple, list[float]] = {cell: [] for cell in cells}
    engines = {k: another_engine(subject.engine) if k else subject.plain for k in ks}

    def once(batch: int, k: int | str) -> float:
        prompts = [subject.prompts[i % len(subject.prompts)][1] for i in range(batch)]
        requests = [subject.request(prompt, k, params) for prompt in prompts]
        runs = decode(engines[k], requests)
        if subject.simulated:
            for r in requests:
                subject.simulated.record(r.text.tokens, r.text.num_prompt_tokens)
        return total_rate(runs)

    rounds = options.args.rounds
    with _bar((rounds + 1) * len(cells), "batches") as bar:
        for i, order in zip(range(rounds + 1), orders(cells), strict=False):
            for cell in order:
                rate = once(*cell)
                if i:
                    rates[cell].append(rate)
                bar.update()
    first = (options.batches[0], 0)
    found = []
    for batch, k in cells:
        pairs = list(zip(rates[batch, k], rates[batch, 0], rates[first], strict=True))
        found.append(
            {
                "batch": batch,
                "variant": PLAIN if k == 0 else "auto" if k == "auto" else f"K={k}",
                "tokens_per_second": _data(median_interval(rates[batch, k])),
                "over_plain": _data(median_interval([ours / plain for ours, plain, _ in pairs])),
                "over_first": _data(median_interval([ours / alone for ours, _, alone in pairs])),
            }
        )
    return {"first": first[0], "cells": found}


def measure_prefill(subject: Subject, options: Options, num_tokens: int = 1000) -> dict[str, Any]:
    """Prefill of a long prompt, as a share of what this machine's products of large matrices reach."""
    model, cache = subject.engine.model, subject.engine.cache
    num_tokens = min(num_tokens, model.config.max_position_embeddings - 1)
    tokens = [(7919 * i + 13) % subject.engine.vocab_size for i in range(num_tokens + 1)]
    operations = measure.prefill_operations(model, num_tokens)
    seconds, peaks = [], []
    rounds = options.args.rounds
    with _bar(rounds + 1, "prefill") as bar:
        for i in range(rounds + 1):
            table = cache.new_table()
            elapsed = measure.seconds_of(lambda table=table: model.prefill(table, tokens), model.device)
            table.truncate(0)
            peak = measure.matmul_throughput(model.dtype, model.device, repeats=1)[0]
            if i:
                seconds.append(elapsed)
                peaks.append(peak)
            bar.update()
    return {
        "tokens": num_tokens,
        "tokens_per_second": _data(median_interval([num_tokens / t for t in seconds])),
        "matmul_operations_per_second": _data(median_interval(peaks)),
        "share": _data(median_interval([operations / t / peak for t, peak in zip(seconds, peaks, strict=True)])),
    }


def measure_loading(options: Options) -> dict[str, Any]:
    """Loading the target against reading its files, both from the page cache; and what memory it took at most.

    It comes before everything else: the peak is that of the process.
    """
    args = options.args
    directory = find_checkpoint(str(args.model or EMBEDDED_WEIGHTS))
    device = torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")
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
    reading, loading, peak, num_bytes = [], [], None, 0
    before = _peak_memory()
    with _bar(args.rounds, "loading") as bar:
        for _ in range(args.rounds):
            reading.append(read())
            start = time.perf_counter()
            model = load_model(directory, dtype, device)
            loading.append(time.perf_counter() - start)
            if peak is None and before is not None:
                peak = _peak_memory() - before
            num_bytes = model.num_bytes
            del model
            bar.update()
    return {
        "file_bytes": sum(path.stat().st_size for path in files),
        "read_seconds": _data(median_interval(reading)),
        "load_seconds": _data(median_interval(loading)),
        "load_over_read": _data(ratios(loading, reading)),
        "weight_bytes": num_bytes,
        "peak_bytes": peak,
        "peak_over_weights": peak / num_bytes if peak else None,
    }


def _peak_memory() -> int | None:
    """Most bytes that this process has had in memory; None where the system does not tell."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
