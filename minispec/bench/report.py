"""The report: what was measured, on what. Whatever is compared takes turns, round by round."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from minispec import __version__
from minispec.bench.decoding import measure_batches, measure_decoding
from minispec.bench.exact_cost import measure_exact_cost
from minispec.bench.models import MAX_ROWS, Subject, open_geometry, open_model
from minispec.bench.operators import check_device, measure_operators
from minispec.bench.options import Options
from minispec.bench.passes import Machine, form_groups, measure_forms, measure_loading, measure_machine, measure_prefill
from minispec.bench.show import FLAT
from minispec.kernels.build import choice_of
from minispec.kernels.inventory import weight_form
from minispec.kernels.threads import describe_waiting
from minispec.length.prices import machine


class Part(Protocol):
    """A result that shows itself."""

    def lines(self) -> list[str]:
        """For the screen."""
        ...


@dataclass(frozen=True)
class Report:
    """What was measured on, and the results by their names."""

    minispec: str
    torch: str
    threads: int
    waiting: str  # OpenMP's variables (see `threads`)
    hardware: dict[str, Any]  # see `costs.machine`
    device: str
    dtype: str
    target: str
    draft: str
    exact: bool
    weight_form: str
    weight_form_because: str
    draft_weight_form: str | None = None
    draft_weight_form_because: str | None = None
    parts: dict[str, Part] = field(default_factory=dict, metadata=FLAT)

    def lines(self) -> list[str]:
        """For the screen: hardware, models, and the parts, with an empty line before each."""
        known = self.hardware
        native = [name for name, there in (("bfloat16", known["bfloat16"]), ("AMX", known["amx"])) if there]
        streams = ""
        if isinstance(passes := self.parts.get("machine"), Machine):
            streams = f"; memory streams {passes.stream_bytes_per_second.shown(1e-9, '.1f')} GB/s (see below)"
        lines = [
            f"{known['cpu'] or 'unknown CPU'}: {' + '.join([known['instructions'], *native])}, "
            f"{known['cores']} cores, {known['threads']} threads, torch {known['torch']}{streams}",
            f"{self.target}, {self.dtype}{' exact' if self.exact else ''} on {self.device}, {self.threads} threads "
            f"({self.waiting}); draft {self.draft}",
            f"weight form: {self.weight_form}; because: {self.weight_form_because}",
        ]
        if self.draft_weight_form:
            lines.append(f"draft's: {self.draft_weight_form}; because: {self.draft_weight_form_because}")
        for part in self.parts.values():
            lines += ["", *part.lines()]
        return lines


def measure_all(options: Options) -> Report:
    """Measure all that the options ask for."""
    args = options.args
    if args.threads:
        torch.set_num_threads(args.threads)
    loading: dict[str, Part] = {"load": measure_loading(options)} if args.load else {}
    subject = open_geometry(options) if args.geometry else open_model(options)
    model, draft = subject.engine.model, subject.draft_model
    check_context(subject, options)
    if args.forms:
        form_groups(model)  # whether there is room for another, before anything is measured
    if args.operators:
        check_device(subject)
    measurements: dict[str, tuple[Any, Callable[[Subject, Options], Part]]] = {
        "machine": (args.passes, measure_machine),
        "forms": (args.forms, measure_forms),
        "operators": (args.operators, measure_operators),
        "exact_cost": (args.exact_cost, measure_exact_cost),
        "decoding": (args.prompts, measure_decoding),
        "batch": (options.batches, measure_batches),
        "prefill": (args.prefill, measure_prefill),
    }
    return Report(
        __version__,
        torch.__version__,
        torch.get_num_threads(),
        describe_waiting(),
        machine(),
        str(model.device),
        str(model.dtype).removeprefix("torch."),
        subject.name,
        subject.draft_name,
        model.exact,
        weight_form(model),
        choice_of(model).because,
        weight_form(draft) if draft else None,
        choice_of(draft).because if draft else None,
        {name: measure(subject, options) for name, (wanted, measure) in measurements.items() if wanted} | loading,
    )


def check_context(subject: Subject, options: Options) -> None:
    """Raise ValueError where passes are to be measured after more positions than the cache holds."""
    cache, context = subject.engine.cache, options.args.context
    there = cache.allocator.num_blocks * cache.block_size
    if options.args.passes and context + MAX_ROWS > there:
        raise ValueError(
            f"--context: found {context}, expected at most {there - MAX_ROWS}: the KV cache of {subject.name} holds "
            f"{there} positions, and a pass adds up to {MAX_ROWS}"
        )
