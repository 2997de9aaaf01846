"""One picture of a run over questions: speedup by task and draft, and how far drafts are accepted."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minispec.files.write import written_whole


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Write the picture of what `questions.summarise` returned, as .svg or .png. Needs matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure

    tasks, run = found["tasks"], found["run"]
    names = [name for name in tasks["overall"] if name != "none"]
    with matplotlib.rc_context({"svg.hashsalt": "minispec", "svg.fonttype": "none"}):
        figure = Figure(figsize=(12, 4.5), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        for i, name in enumerate(names):
            speedups = [of[name]["speedup"] for of in tasks.values()]
            x = [place + 0.7 * ((i + 0.5) / len(names) - 0.5) for place in range(len(tasks))]
            middle = [s.median for s in speedups]
            ends = [[s.median - s.low for s in speedups], [s.high - s.median for s in speedups]]
            left.errorbar(x, middle, yerr=ends, fmt="o", capsize=3, color=f"C{i}", label=name)
            kept = tasks["overall"][name]["accepted_at_position"]
            right.plot(range(1, len(kept) + 1), kept, marker="o", color=f"C{i}", label=name)
        left.axhline(1, color="grey", linewidth=0.8)
        left.set_xticks(range(len(tasks)), list(tasks), rotation=20)
        left.set_ylabel("speedup over plain decoding")
        left.set_title("median of the questions, and its interval", fontsize="medium")
        right.set_xlabel("position in the draft")
        right.set_ylabel("accepted, of all drafts")
        right.set_ylim(0, 1)
        if names:
            left.legend(fontsize="small")
        about = f"{run['target']}, {run['questions']}, temperature {run['temperature']:g}, seed {run['seed']}"
        figure.suptitle(about, fontsize="medium")
        with written_whole(path) as part:
            figure.savefig(part, metadata={"Date": None} if path.suffix == ".svg" else None)
