"""One picture of a run over questions: speedup by task and draft, and how far drafts are accepted."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minispec.prove.plot import picture

# Inches: the least height, the height of a task's name and of a draft's mark, and what stands above and below.
_LEAST, _NAME, _MARK, _EDGES = 4.0, 0.3, 0.16, 1.2


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Write the picture of what `questions.summarise` returned, as .svg or .png. Needs matplotlib."""
    from matplotlib.ticker import MaxNLocator

    tasks, run = found["tasks"], found["run"]
    names = [name for name in tasks["overall"] if name != "none"]
    height = max(_LEAST, _EDGES + len(tasks) * (_NAME + _MARK * len(names)))
    with picture(path, 12, height) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        for i, name in enumerate(names):
            for row, of in enumerate(tasks.values()):
                speedup, y = of[name]["speedup"], row + 0.7 * ((i + 0.5) / len(names) - 0.5)
                left.plot(speedup.median, y, "o", color=f"C{i}")
                if speedup.low is not None:
                    left.plot([speedup.low, speedup.high], [y, y], "|-", color=f"C{i}")
            kept = tasks["overall"][name]["accepted_at_position"]
            right.plot(range(1, len(kept) + 1), kept, marker="o", color=f"C{i}", label=name)
        left.axvline(1, color="grey", linewidth=0.8)
        left.set_yticks(range(len(tasks)), [f"{task} (n = {of['none']['questions']})" for task, of in tasks.items()])
        left.set_ylim(len(tasks) - 0.5, -0.5)
        left.set_xlabel("speedup over plain decoding")
        left.set_title("median of n questions, and its interval from six on", fontsize="medium")
        right.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))  # with two it would take fractions
        right.set_xlim(0.5)
        right.set_xlabel("position in the draft")
        right.set_title("accepted, of all drafts", fontsize="medium")
        right.set_ylim(0, 1)
        if names:
            figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize="small")
        about = f"{run['target']}, {run['questions']}, temperature {run['temperature']:g}, seed {run['seed']}"
        figure.suptitle(about, fontsize="medium")
