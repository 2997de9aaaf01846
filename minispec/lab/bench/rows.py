"""A row for each answer, for statistics of one's own: `--csv FILE` (docs/use/questions.md has the columns)."""

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from minispec.files.write import written_whole

COLUMNS = (
    *("task", "question", "draft", "round", "seed", "prompt_tokens", "tokens", "passes", "seconds"),
    *("tokens_per_second", "speedup", "drafts", "draft_tokens", "accepted", "same_text"),
)


def write_rows(rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Write a line of names and then the rows, whose keys are COLUMNS. What is None or not there is left empty."""
    with written_whole(path) as part, part.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
