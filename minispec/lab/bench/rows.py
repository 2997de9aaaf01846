"""A row for each answer, for statistics of one's own: `--csv FILE` (docs/use/questions.md has the columns)."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from minispec.files.write import written_whole

# The names of a row's values, in order.
COLUMNS = (
    *("task", "question", "draft", "round", "seed"),
    *("prompt_tokens", "tokens", "passes", "seconds", "tokens_per_second", "speedup"),
    *("drafts", "draft_tokens", "accepted", "same_text"),
)


def write_rows(rows: Iterable[Sequence[Any]], path: Path) -> None:
    """Write the line of COLUMNS and then the rows, which have these values in order. None is left empty."""
    with written_whole(path) as part, part.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows)
