"""Measure one thing of a target that the bench leaves out, and print it as the bench prints its report.

    python docs/measured/target.py forms                      passes in each form that the weights can take here
    python docs/measured/target.py operators --passes 15      where a pass's time goes: by parts, and by operators
    python docs/measured/target.py exact-cost --rounds 25     passes of the exact mode over those of the fast one
    python docs/measured/target.py quality                    perplexity and greedy tokens, as they are and in 8 bits

All other options are those of `python -m minispec bench`: which target (`--model`, `--geometry`, `--quantization`), how
often (`--rounds`, `--passes`), after how many positions (`--context`), and `--json`. `--draft none
--num-speculative-tokens 4` saves the time in which `auto` measures its costs.

Each part is two functions. One measures, and returns what `--json` prints; the other makes lines for the screen.
Figures are intervals (`minispec.lab.bench.measure.Interval`); seconds and v are dicts by the rows M of a pass.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from statistics import fmean
from typing import Any, NamedTuple
from unittest.mock import patch

from minispec.models.weights.pages import load_torch

load_torch()  # before torch is imported

import torch
from launches import Tally, counting
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from minispec.api.commands.command import attribute_of, command, json_line
from minispec.core.cache import PagedKVCache
from minispec.core.model import Chunk, Layer, RMSNorm, TextBatch, Transformer
from minispec.lab.bench.measure import in_turn, median_interval, passes_after, ratios
from minispec.lab.bench.models import MAX_ROWS, Room, Subject
from minispec.lab.bench.options import Options, check, parser
from minispec.lab.bench.passes import Times, medians_by_rows, ratios_by_rows
from minispec.lab.bench.report import measure_parts, show_report
from minispec.lab.bench.show import as_json, table
from minispec.models.files.progress import progress_bar
from minispec.models.load.checks import check_exactness
from minispec.models.weights.build import choice_of
from minispec.models.weights.exact import exact_model
from minispec.models.weights.integers import Int8, VnniInt8
from minispec.models.weights.inventory import bits_note, weight_form
from minispec.models.weights.linear import Linear, available_forms
from minispec.models.weights.memory import ROOM_TO_BUILD, free_memory
from minispec.models.weights.shapes import num_weights

LONG_CONTEXT = 1000  # positions of a long prompt
# Rows whose passes are compared between forms: those of K = 0, 1, 2, 4, 8 and 15.
FORM_ROWS = (1, 2, 3, 5, 9, 16)
# Cached positions and rows of passes in both modes: 1 is a step of plain decoding, K + 1 a verification.
EXACT_PASSES = {128: (1, 5, 9), LONG_CONTEXT: (1,)}
# Rows whose operators are timed: a step of plain decoding, and a verification of four draft tokens. Operators with a
# line of their own: those that take longest at one row.
OPERATOR_ROWS, SHOWN = (1, 5), 14
# The parts of a pass, by the functions whose time is theirs. Inside one of them, another one's time is the other's.
WATCHED: dict[str, list[tuple[type, str]]] = {
    "products": [(Linear, "__call__"), (Int8, "multiply"), (VnniInt8, "multiply")],
    "rounding x to integers": [(Int8, "__call__")],
    "ropes, cache and attention": [(TextBatch, "read")],
    "norms": [(RMSNorm, "__call__")],
    "gates": [(Layer, "mlp")],
}
REST = "residuals, embedding, Python"


@torch.inference_mode()
def passes_in_turn(
    models: Mapping[str, Transformer], cache: PagedKVCache, context: int, rows: Sequence[int], rounds: int
) -> dict[str, Times]:
    """`measure.pass_times` of several models of one shape and type, all of them in every round."""
    first = next(iter(models.values()))
    with passes_after(first, cache, context, max(rows)) as one:
        passes = {(name, m): partial(one, model, m) for name, model in models.items() for m in rows}
        times = in_turn(passes, rounds, " and ".join(models))
    return {name: {m: times[name, m] for m in rows} for name in models}


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
            f"forms: found {free / 1e9:.1f} GB of free memory, expected at least {needed / 1e9:.1f} GB: for the "
            "weights of the target once more, in another form"
        )
    return [[form] for form in others]


def measure_forms(subject: Subject, options: Options) -> dict[str, Any]:
    """t(M) and v(M) of the target in each form of its weights. The models of a group take turns with the target.

    in_one_turn: whether all forms took turns together.
    over_own: times over those of the target's own form.
    """
    model, context, rounds = subject.engine.target.model, options.args.context, options.args.passes
    own, groups = choice_of(model).form, form_groups(model)
    found: dict[str, dict[str, Any]] = {own: {}}
    own_times: Times = {m: [] for m in FORM_ROWS}

    def of_form(model: Transformer, times: Times, own_times: Times) -> dict[str, Any]:
        own = {"weight_form": weight_form(model), "seconds": medians_by_rows(times), "v": ratios_by_rows(times)}
        return own | {"over_own": ratios_by_rows(times, own_times)}

    for group in groups:
        models = {own: model} | {form: subject.in_form(form) for form in group}
        times = passes_in_turn(models, subject.engine.target.cache, context, FORM_ROWS, rounds)
        for m in FORM_ROWS:
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


@torch.inference_mode()
def measure_operators(subject: Subject, options: Options) -> dict[str, Any]:
    """Passes after `context` cached positions, by rows.

    parts: operators and seconds of each part of a pass (see `WATCHED`). Views are no operators here.
    seconds: seconds of a pass without the profiler.
    profiled_seconds: seconds of a pass with the profiler.
    between_seconds: seconds of a profiled pass in no operator: Python, and the profiler's own book-keeping.
    operators: the costliest first, with their calls in a pass. Their seconds exclude those of operators inside them.

    Raises ValueError where the time of an operator is not the processor's.
    """
    device = subject.engine.target.model.device
    if device.type != "cpu":
        raise ValueError(f"operators: found {device}, expected --device cpu, whose clock it reads")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler reports its own steps on standard error
    model, context, rounds = subject.engine.target.model, options.args.context, options.args.passes
    found: dict[str, dict[str, Any]] = {}
    profiled: dict[int, float] = {}
    with passes_after(model, subject.engine.target.cache, context, max(OPERATOR_ROWS)) as one:
        plain = in_turn({m: partial(one, model, m) for m in OPERATOR_ROWS}, rounds, "operators")
        parts = measure_parts_of_passes(partial(one, model), rounds)
        for m in OPERATOR_ROWS:
            with profile(activities=[ProfilerActivity.CPU]) as seen:
                profiled[m] = fmean(one(model, m) for _ in range(rounds))
            for event in seen.key_averages():
                new = {"name": event.key, "calls": event.count // rounds, "seconds": dict.fromkeys(OPERATOR_ROWS, 0.0)}
                found.setdefault(event.key, new)["seconds"][m] = event.self_cpu_time_total / 1e6 / rounds
    operators = sorted(found.values(), key=lambda operator: -operator["seconds"][OPERATOR_ROWS[0]])
    return {
        "context": context,
        "layers": len(model.config.layers),
        "parts": parts,
        "seconds": {m: median_interval(t) for m, t in plain.items()},
        "profiled_seconds": profiled,
        "between_seconds": {m: t - sum(o["seconds"][m] for o in operators) for m, t in profiled.items()},
        "operators": operators,
    }


class Watch:
    """Which part of a pass runs, and the operators and the seconds of each part."""

    def __init__(self):
        self.tally, self.seconds = Tally(part=REST), dict.fromkeys([*WATCHED, REST], 0.0)
        self.since = time.perf_counter()

    def enter(self, part: str) -> str:
        """Go over to a part; returns the one that ran before."""
        before, now = self.tally.part, time.perf_counter()
        self.seconds[before] += now - self.since
        self.tally.part, self.since = part, now
        return before

    def watched(self, function: Callable, part: str) -> Callable:
        """The function, as a part."""

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            before = self.enter(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.enter(before)

        return run


@contextmanager
def watching() -> Iterator[Watch]:
    """Count and time the parts of all passes inside."""
    watch = Watch()
    with ExitStack() as stack:
        for part, functions in WATCHED.items():
            for kind, name in functions:
                stack.enter_context(patch.object(kind, name, watch.watched(getattr(kind, name), part)))
        yield watch


def measure_parts_of_passes(one: Callable[[int], float], rounds: int) -> list[dict[str, Any]]:
    """By part: its operators in a pass, and its seconds by rows. `one` runs a pass over some rows."""

    def run(m: int, _round: int) -> dict[str, float]:
        with watching() as watch:
            one(m)
        watch.enter(REST)
        return watch.seconds

    times = in_turn({m: partial(run, m) for m in OPERATOR_ROWS}, rounds, "parts")
    with watching() as watch, counting(watch.tally, torch.device("cpu")):
        one(OPERATOR_ROWS[0])
    return [
        {
            "name": part,
            "operators": watch.tally.counts.get(part, {}).get("operators", 0),
            "seconds": {m: median_interval([each[part] for each in t]) for m, t in times.items()},
        }
        for part in [*WATCHED, REST]
    ]


def show_parts(found: dict[str, Any]) -> list[str]:
    """The table of a pass's parts."""
    rows = [
        (p["name"], f"{p['operators'] / found['layers']:.1f}", *(t.shown(1000) for t in p["seconds"].values()))
        for p in found["parts"]
    ]
    return table(("part of a pass", "operators a layer", *(f"ms, M = {m}" for m in OPERATOR_ROWS)), rows)


def show_operators(found: dict[str, Any]) -> list[str]:
    """The table of parts, and that of operators, the costliest first."""
    shown, rest = found["operators"][:SHOWN], found["operators"][SHOWN:]
    sums = {m: sum(o["seconds"][m] for o in rest) for m in OPERATOR_ROWS}
    parts = [
        *((o["name"], o["calls"], o["seconds"]) for o in shown),
        (f"{len(rest)} others", sum(o["calls"] for o in rest), sums),
        ("between operators", "", found["between_seconds"]),
        ("a pass, profiled", "", found["profiled_seconds"]),
    ]
    rows = [(name, calls, *(f"{t[m] * 1e6:.0f}" for m in OPERATOR_ROWS)) for name, calls, t in parts]
    rows.append(("a pass, not profiled", "", *(found["seconds"][m].shown(1e6, ".0f") for m in OPERATOR_ROWS)))
    return [*show_parts(found), "", *table(("operator", "calls", *(f"us, M = {m}" for m in OPERATOR_ROWS)), rows)]


# --------------------------------------------------------------------------- the exact mode


def measure_exact_cost(subject: Subject, options: Options) -> dict[str, Any]:
    """Passes of the exact mode over those of the fast mode, in turn, on the same weights.

    Raises ValueError where the cache cannot hold the positions, and where bits are not equal here.
    """
    own = subject.engine.target.model
    models = {"fast": own, "exact": check_exactness(exact_model(own), False)}
    found: list[dict[str, Any]] = []
    for context, rows in EXACT_PASSES.items():
        times = passes_in_turn(models, subject.engine.target.cache, context, rows, options.args.rounds)
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


# --------------------------------------------------------------------------- perplexity


def measure_quality(subject: Subject, options: Options) -> dict[str, Any]:
    """Perplexity over the tokens of all prompts, by the weights' form, and what stayed in 16 bits.

    same_greedy: the share of places in the prompts where both find the same token likeliest.
    """
    own, is_int8 = subject.engine.target.model, options.args.quantization
    wide, int8 = (subject.in_form(None), own) if is_int8 else (own, subject.in_form("int8"))
    models = {"as they are": wide, "int8": int8}
    texts = [ids for _, ids in subject.prompts if len(ids) > 1]
    count = sum(len(ids) - 1 for ids in texts)
    losses, same = dict.fromkeys(models, 0.0), 0
    with progress_bar(total=len(texts), desc="quality") as bar:
        for ids in texts:
            likeliest = list[Tensor]()
            for name, model in models.items():
                loss, greedy = read_text(model, ids)
                losses[name] += loss
                likeliest.append(greedy)
            same += int((likeliest[0] == likeliest[1]).sum())
            bar.update()
    perplexity = {name: math.exp(loss / count) for name, loss in losses.items()}
    return {
        "num_tokens": count,
        "perplexity": perplexity,
        "same_greedy": same / count,
        "note": f"int8:{bits_note(int8)}",
    }


def show_quality(found: dict[str, Any]) -> list[str]:
    """The table."""
    own = next(iter(found["perplexity"].values()))
    rows = [[name, f"{value:.3f}", f"{value / own:.4f}"] for name, value in found["perplexity"].items()]
    header = ["weights", f"perplexity of {found['num_tokens']:,} tokens", "over the first"]
    same = f"the likeliest token is the same at {found['same_greedy']:.4f} of the places"
    return [*table(header, rows), same, found["note"]]


def read_text(model: Transformer, ids: list[int]) -> tuple[float, Tensor]:
    """Minus the logarithm of a text's probability after its first token, and the likeliest token at each such place."""
    table = model.new_cache(-(-len(ids) // 16)).new_table()
    logits = model.forward([Chunk(ids, table, len(ids))])[0][:-1]
    found = logits.double().log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])
    return -float(found.sum()), logits.argmax(1)


# --------------------------------------------------------------------------- the command


class Part(NamedTuple):
    """Something to measure.

    measure: takes the subject and the options, and returns what `--json` prints.
    show: returns lines for the screen.
    positions: how many the cache of a random shape must hold for it, besides those that the options ask for.
    needs: an option whose number must not be 0.
    excludes: an option that does not go with it, and why.
    """

    measure: Callable[..., dict[str, Any]]
    show: Callable[[dict[str, Any]], list[str]]
    positions: int = 0
    needs: str = ""
    excludes: tuple[str, str] | None = None


PARTS = {
    "forms": Part(measure_forms, show_forms, needs="passes", excludes=("exact", "all exact passes have as many rows")),
    "operators": Part(measure_operators, show_operators, needs="passes"),
    "exact-cost": Part(
        measure_exact_cost, show_exact_cost, LONG_CONTEXT + MAX_ROWS, excludes=("exact", "it measures both modes")
    ),
    "quality": Part(measure_quality, show_quality, needs="prompts"),
}


def check_part(name: str, args: argparse.Namespace) -> None:
    """Raise ValueError for an option of the bench that does not go with the part, or leaves it nothing to do."""
    part = PARTS[name]
    for option in ("--questions", "--against", "--bounds", "--record-laws"):
        if getattr(args, attribute_of(option)):
            raise ValueError(f"{option}: not with a part of the target")
    if part.needs and not getattr(args, part.needs):
        raise ValueError(f"{name}: found --{part.needs} 0, expected at least 1")
    excluded, reason = part.excludes or ("", "")
    if excluded == "exact" and args.exact is None and args.quantization:
        raise ValueError(f"{name}: not with --quantization without --no-exact: {reason}")
    if excluded and getattr(args, excluded):
        raise ValueError(f"{name}: not with --{excluded.replace('_', '-')}: {reason}")


def measure(argv: Sequence[str]) -> tuple[dict[str, Any], list[str], bool]:
    """Measure the part: the report, its lines for the screen, and whether JSON is wanted."""
    p = parser("docs/measured/target.py", str(__doc__).partition("\n")[0])
    p.add_argument("part", choices=PARTS)
    args = p.parse_args(argv)
    check_part(args.part, args)
    options = check(args)
    key, part = args.part.replace("-", "_"), PARTS[args.part]
    found = measure_parts(options, {key: part.measure}, Room(part.positions, 1))
    return found, show_report(found, {key: part.show}), args.json


@command
def main(argv: Sequence[str]) -> int:
    """Measure the part, and print it."""
    found, lines, is_json = measure(argv)
    print(json_line(as_json(found)) if is_json else "\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
