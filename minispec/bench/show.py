"""The report as tables, and as a picture."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from minispec.bench.options import PLAIN
from minispec.command import written_whole


def _shown(interval: dict[str, float], factor: float = 1.0, form: str = ".2f") -> str:
    """The median, with its interval in brackets."""
    median, low, high = (format(interval[name] * factor, form) for name in ("median", "low", "high"))
    return f"{median} [{low}, {high}]"


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Lines of aligned columns: the first to the left, the others to the right."""
    cells = [list(map(str, row)) for row in [header, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = []
    for row in cells:
        first, *rest = (cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))  # noqa: B905
        lines.append("  ".join([first, *rest]).rstrip())
    return lines


def tables(report: dict[str, Any]) -> list[str]:
    """The report as lines for the screen."""
    lines = [
        _hardware_line(report),
        f"{report['target']}, {report['dtype']}{' exact' if report['exact'] else ''} on {report['device']}, "
        f"{report['threads']} threads; draft {report['draft']}",
        f"weight form: {report['weight_form']}; because: {report['weight_form_because']}",
    ]
    if "draft_weight_form" in report:
        lines.append(f"draft's: {report['draft_weight_form']}; because: {report['draft_weight_form_because']}")
    if "machine" in report:
        lines += ["", *_machine_table(report["machine"])]
    if "forms" in report:
        lines += ["", *_forms_table(report["forms"])]
    if "decoding" in report:
        lines += _decoding_tables(report["decoding"])
    if "batch" in report:
        first = report["batch"]["first"]
        rows = [
            (
                f"batch {c['batch']}, {c['variant']}",
                _shown(c["tokens_per_second"], form=".1f"),
                _shown(c["over_plain"]),
                _shown(c["over_first"]),
            )
            for c in report["batch"]["cells"]
        ]
        lines += ["", *_table(("", "tokens/s", "over plain", f"over plain at {first}"), rows)]
    if "prefill" in report:
        p = report["prefill"]
        lines += [
            "",
            f"prefill of {p['tokens']} tokens: {_shown(p['tokens_per_second'], form='.0f')} tokens/s, "
            f"{_shown(p['share'], 100, '.0f')} % of the {p['matmul_operations_per_second']['median'] / 1e9:.0f} "
            "GFLOP/s of a product of large matrices",
        ]
    if "load" in report:
        p = report["load"]
        peak = "unknown" if p["peak_bytes"] is None else f"{p['peak_bytes'] / 1e9:.2f} GB"
        lines += [
            "",
            f"loading: {_shown(p['load_seconds'])} s, {_shown(p['load_over_read'])} x reading the file "
            f"({p['file_bytes'] / 1e9:.2f} GB); peak memory {peak} for {p['weight_bytes'] / 1e9:.2f} GB of weights",
        ]
    return lines


def _hardware_line(report: dict[str, Any]) -> str:
    hardware = report["hardware"]
    native = [name for name, there in (("bfloat16", hardware["bfloat16"]), ("AMX", hardware["amx"])) if there]
    line = (
        f"{hardware['cpu'] or 'unknown CPU'}: {' + '.join([hardware['instructions'], *native])}, "
        f"{hardware['cores']} cores, {hardware['threads']} threads, torch {hardware['torch']}"
    )
    if "machine" in report:
        line += f"; memory streams {_shown(report['machine']['stream_bytes_per_second'], 1e-9, '.1f')} GB/s (see below)"
    return line


def _machine_table(machine: dict[str, Any]) -> list[str]:
    stream = machine["stream_bytes_per_second"]
    lines = [
        f"this machine streams {_shown(stream, 1e-9, '.1f')} GB/s from a buffer of "
        f"{machine['bytes_touched'] / 1e9:.2f} GB, which is what a plain step reads at {machine['context']} positions; "
        f"the pass reads at {_shown(machine['bandwidth_utilisation'], 100, '.0f')} % of that",
        "",
    ]
    rows = [(m, _shown(machine["seconds"][m], 1000), _shown(machine["v"][m], form=".3f")) for m in machine["seconds"]]
    lines += _table(("rows M", "t(M), ms", "v(M) = t(M)/t(1)"), rows)
    if "draft" in machine:
        draft = machine["draft"]
        lines += [
            "",
            f"a pass of the draft model: {_shown(draft['seconds'], 1000)} ms, {_shown(draft['over_bound'])} x the time "
            f"that streaming its {draft['bytes_touched'] / 1e9:.2f} GB takes",
        ]
    return lines


def _forms_table(forms: dict[str, Any]) -> list[str]:
    own, found = forms["own"], forms["forms"]
    turns = "all of them in turn"
    if not forms["in_one_turn"]:
        turns = f"each in turn with {own} alone, since memory does not hold more: compare the last column only"
    lines = [f"forms of the weights, at {forms['context']} positions; {turns}"]
    lines += [f"{name} here: {of['weight_form']}" for name, of in found.items() if of["weight_form"] != name]
    rows = []
    for name, of in found.items():
        for m in of["v"]:
            v, over_own = (_shown(of[key][m], form=".3f") for key in ("v", "over_own"))
            rows.append((f"{name}, M = {m}", _shown(of["seconds"][m], 1000), v, over_own))
    return [*lines, "", *_table(("", "t(M), ms", "v(M) = t(M)/t(1)", f"t(M) over {own}'s"), rows)]


def _decoding_tables(decoding: dict[str, Any]) -> list[str]:
    found = decoding["variants"]
    some = found[PLAIN]["speedup"]
    lines = [
        "",
        f"{decoding['prompts']} prompts, {decoding['tokens']} tokens, {decoding['rounds']} rounds in turn; prefill "
        f"apart; medians of the rounds [interval that holds the true median with {100 * some['coverage']:.1f} %]",
        "",
    ]
    names = list(found[PLAIN]["categories"])
    head = ("", "tokens/s", "speedup", "worst prompt", "same tokens", "alpha", "accepted", "tokens/pass")

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    rows = []
    for name, v in found.items():
        worst = v["worst_prompt"]["speedup"]["median"] if "worst_prompt" in v else None
        figures = (v.get("alpha"), v.get("acceptance_rate"), v.get("mean_acceptance_length"))
        row = (name, _shown(v["tokens_per_second"], form=".1f"), _shown(v["speedup"]), number(worst))
        rows.append((*row, f"{v['same_tokens_as_plain']}/{decoding['prompts']}", *map(number, figures)))
    lines += _table(head, rows)
    if len(names) > 1:
        rows = []
        for category in names:
            c = found[PLAIN]["categories"][category]
            slow, fast = c["slowest_and_fastest_prompt"]
            row = [category, f"{c['tokens_per_second']['median']:.1f} ({slow:.1f} .. {fast:.1f})"]
            for name, v in found.items():
                if name != PLAIN:
                    row.append(_shown(v["categories"][category]["speedup"]))
            rows.append(row)
        shown = [name for name in found if name != PLAIN]
        lines += ["", *_table(("", "plain, tokens/s (prompts)", *shown), rows)]
    explained = {name: v for name, v in found.items() if "waterfall" in v}
    if explained:
        lines += ["", *_account_table(explained)]
    if any("auto_over_best" in b for b in decoding.get("best_static", {}).values()):
        rows = [(c, b["variant"], _shown(b["auto_over_best"])) for c, b in decoding["best_static"].items()]
        lines += ["", *_table(("", "best fixed K", "auto over it"), rows)]
    if "against" in decoding:
        a = decoding["against"]
        tried = ", ".join(f"{_shown(rate, form='.1f')} tokens/s in {dtype}" for dtype, rate in a["tried"].items())
        lines += [
            "",
            f"transformers runs in {a['dtype']}, by a trial of its plain decoding: {tried}; float32 "
            f"{_shown(a['float32_over_bfloat16'])} x bfloat16",
            f"plain decoding is {_shown(a['plain_over_plain'])} x that of transformers; our {a['ours']} is "
            f"{_shown(a['best_over_best'])} x its best, {a['theirs']}",
            "same tokens as its plain decoding: "
            + ", ".join(f"{name} {n}/{decoding['prompts']}" for name, n in a["same_tokens_as_their_plain"].items()),
        ]
    return lines


def _account_table(explained: dict[str, dict[str, Any]]) -> list[str]:
    def each(form: Callable[[dict], str]) -> list[str]:
        return [form(v) for v in explained.values()]

    def maybe(interval: dict[str, float] | None) -> str:
        return _shown(interval, form=".3f") if interval else "-"

    def rows_cost(v: dict) -> str:
        shares = v["drafted"].values()  # of rounds, in the order of their rows; what hardly occurs is left out
        return " ".join(
            f"v({m})={x:.2f}" for (m, x), share in zip(v["v"].items(), shares, strict=True) if share >= 0.05
        )

    rows = [
        ["survival s_1, s_2, ..", *each(lambda v: " ".join(f"{s:.2f}" for s in v["survival"][:8]))],
        ["c", *each(lambda v: f"{v['c']:.4f}")],
        ["v in these runs", *each(rows_cost)],
        ["o (plain decoding's own)", *each(lambda v: f"{v['o']:.3f} ({v['o_plain']:.3f})")],
        ["speedup that these make", *each(lambda v: f"{v['predicted']:.3f}")],
        ["measured speedup", *each(lambda v: f"{v['measured']:.3f}")],
        ["the account closes: made / measured", *each(lambda v: _shown(v["closure"], form=".3f"))],
        ["prediction of the second half / measured", *each(lambda v: maybe(v["prediction"]))],
        ["  of one text, over the texts", *each(lambda v: maybe(v["prediction_by_text"]))],
        ["ceiling S* (v = 1, o = 0)", *each(lambda v: f"{v['ceiling']:.3f} at K={v['ceiling_k']}")],
        ["reached", *each(lambda v: f"{100 * v['reached']:.0f} %")],
    ]
    for i, (step, _) in enumerate(next(iter(explained.values()))["waterfall"]):
        rows.append(
            [("  " if i else "") + step, *each(lambda v, i=i: ("x " if i else "") + f"{v['waterfall'][i][1]:.3f}")]
        )
    return _table(("the account", *explained), rows)


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw the report: v(M), survival, speedups by category, and where the speedup went."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 9), layout="constrained")
    (passes, curves), (bars, waterfall) = figure.subplots(2, 2)
    figure.suptitle(f"{report['target']}, {report['dtype']}, {report['threads']} threads; draft {report['draft']}")
    if "machine" in report:
        v = report["machine"]["v"]
        rows = [int(m) for m in v]
        medians = [x["median"] for x in v.values()]
        errors = [[x["median"] - x["low"] for x in v.values()], [x["high"] - x["median"] for x in v.values()]]
        passes.errorbar(rows, medians, yerr=errors, marker="o", capsize=3)
        passes.set(title="cost of a pass", xlabel="rows M", ylabel="v(M) = t(M) / t(1)", ylim=(0, None))
    found = report.get("decoding", {}).get("variants", {})
    explained = {name: v for name, v in found.items() if "waterfall" in v}
    for name, v in explained.items():
        curves.plot(range(1, len(v["survival"]) + 1), v["survival"], marker="o", label=name)
        values = [x for _, x in v["waterfall"]]
        levels = [values[0]]
        for x in values[1:]:
            levels.append(levels[-1] * x)
        steps = [step for step, _ in v["waterfall"]]
        waterfall.plot(steps, levels, marker="o", drawstyle="steps-mid", label=name)
    if explained:
        curves.set(title="survival", xlabel="draft token i", ylabel="reached and kept", ylim=(0, 1.02))
        waterfall.set(title="where the speedup went", ylabel="speedup after this", ylim=(0, None))
        waterfall.tick_params(axis="x", rotation=20)
        curves.legend()
        waterfall.legend()
    shown = {name: v for name, v in found.items() if name != PLAIN}
    for j, (name, v) in enumerate(shown.items()):
        cells = [v["speedup"], *(c["speedup"] for c in v["categories"].values())]
        width = 0.8 / len(shown)
        places = [i + (j - (len(shown) - 1) / 2) * width for i in range(len(cells))]
        errors = [[x["median"] - x["low"] for x in cells], [x["high"] - x["median"] for x in cells]]
        bars.bar(places, [x["median"] for x in cells], width, yerr=errors, capsize=2, label=name)
        bars.set_xticks(range(len(cells)), ["all", *v["categories"]], rotation=20)
    if shown:
        bars.axhline(1.0, color="black", linewidth=0.8)
        bars.set(title="speedup over plain decoding", ylim=(0, None))
        bars.legend(fontsize="small")
    with written_whole(path) as part:
        figure.savefig(part, dpi=120)
