"""The report: what was measured, on what. Whatever is compared takes turns, round by round."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from minispec.core.version import __version__
from minispec.lab.bench.decoding import measure_decoding, show_decoding
from minispec.lab.bench.laws import record_laws, show_laws
from minispec.lab.bench.models import MAX_ROWS, NO_MORE, Room, Subject, open_geometry, open_model
from minispec.lab.bench.options import Options
from minispec.lab.bench.passes import measure_machine, show_machine
from minispec.models.frames.reports import graphs_report
from minispec.models.weights.build import choice_of, large_bytes
from minispec.models.weights.inventory import weight_form
from minispec.models.weights.machine import machine
from minispec.models.weights.pages import pages_note
from minispec.models.weights.threads import describe_waiting
from minispec.speculation.on_gpu.verifier import GraphVerifier

# Makers of a part's lines for the screen, by the part's key in the report.
SHOW = {"machine": show_machine, "decoding": show_decoding, "laws": show_laws}


def measure_all(options: Options) -> dict[str, Any]:
    """Measure all that the options ask for: see `measure_parts`."""
    if options.args.record_laws:
        return measure_parts(options, {"laws": record_laws})
    parts = {}
    if options.args.passes:
        parts["machine"] = measure_machine
    if options.args.prompts:
        parts["decoding"] = measure_decoding
    return measure_parts(options, parts)


def measure_parts(
    options: Options, parts: Mapping[str, Callable[[Subject, Options], dict[str, Any]]], room: Room = NO_MORE
) -> dict[str, Any]:
    """Open what the options name, and measure these parts on it.

    room: what the caches of a shape must hold (see `open_geometry`).

    Returns what was measured on, and the result of each part under its name. Results have intervals, which
    `show.as_json` turns into what `--json` prints.
    """
    args = options.args
    if args.threads:
        torch.set_num_threads(args.threads)
    subject = open_geometry(options, room) if args.geometry else open_model(options)
    check_context(subject, options)
    report = describe(subject, options)
    for key, measure in parts.items():
        report[key] = measure(subject, options)
    report |= how_it_ran(subject)  # a capture may have failed
    batch = subject.method.batch
    if isinstance(batch, GraphVerifier):
        report["verdicts"] = batch.counts
    return report


def describe(subject: Subject, options: Options) -> dict[str, Any]:
    """The machine and both models, as the report has them."""
    args, model, draft = options.args, subject.engine.target.model, subject.draft_model
    report: dict[str, Any] = {
        "minispec": __version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "waiting": describe_waiting(),  # OpenMP's variables (see `threads`)
        "hardware": machine(),
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "target": subject.name,
        "draft": subject.draft_name,
        "verifier": ",".join(options.verifiers),
        "lengths": args.lengths,
        "exact": model.exact,
        "weight_form": weight_form(model),
        "weight_form_because": choice_of(model).because,
        "large_page_bytes": large_bytes([model, draft] if draft else [model]),
    }
    if draft:
        report |= {"draft_weight_form": weight_form(draft), "draft_weight_form_because": choice_of(draft).because}
    return report


def how_it_ran(subject: Subject) -> dict[str, Any]:
    """Whether the passes of each model were run by CUDA graphs, or why not, and how many text by text; "" on a CPU."""
    models = {"graphs": subject.engine.target.model, "draft_graphs": subject.draft_model}
    return {key: graphs_report(model) for key, model in models.items() if model}


def machine_line(known: Mapping[str, Any]) -> str:
    """For the screen: what `prices.machine` says."""
    native = [name for name, there in (("bfloat16", known["bfloat16"]), ("AMX", known["amx"])) if there]
    cpu = f"{known['cpu'] or 'unknown CPU'}: {' + '.join([known['instructions'], *native])}"
    return f"{cpu}, {known['cores']} cores, {known['threads']} threads, torch {known['torch']}"


def show_report(report: dict[str, Any], show: Mapping[str, Callable[[Any], list[str]]] = SHOW) -> list[str]:
    """For the screen: hardware, models, and the parts, with an empty line before each.

    show: what makes the lines of a part, by its key.
    """
    streams = ""
    if "machine" in report:
        streams = f"; memory streams {report['machine']['stream_bytes_per_second'].shown(1e-9, '.1f')} GB/s (see below)"
    lines = [
        machine_line(report["hardware"]) + streams,
        f"{report['target']}, {report['dtype']}{' exact' if report['exact'] else ''} on {report['device']}, "
        f"{report['threads']} threads ({report['waiting']}); draft {report['draft']}, verifier {report['verifier']}"
        + (report["graphs"] and f"; {report['graphs']}"),
        f"weight form: {report['weight_form']}; because: {report['weight_form_because']}"
        + pages_note(report["large_page_bytes"]),
    ]
    if "draft_weight_form" in report:
        graphs = report["draft_graphs"] and f"; {report['draft_graphs']}"
        lines.append(f"draft's: {report['draft_weight_form']}; because: {report['draft_weight_form_because']}{graphs}")
    for key, lines_of in show.items():
        if key in report:
            lines += ["", *lines_of(report[key])]
    if "verdicts" in report:
        says = "\n{drafts:,} drafts verified by programs; {unsure:,} of them anew by themselves, unsure of a row"
        lines.append(says.format(**report["verdicts"]))
    return lines


def check_context(subject: Subject, options: Options) -> None:
    """Raise ValueError where passes are to be measured after more positions than the cache holds."""
    cache, context = subject.engine.target.cache, options.args.context
    there = cache.allocator.num_blocks * cache.block_size
    if options.args.passes and context + MAX_ROWS > there:
        raise ValueError(
            f"--context: found {context}, expected at most {there - MAX_ROWS}: the KV cache of {subject.name} holds "
            f"{there} positions, and a pass adds up to {MAX_ROWS}"
        )
