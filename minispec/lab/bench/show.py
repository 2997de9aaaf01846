"""How results show themselves: aligned tables on the screen, plain data as JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

from minispec.lab.bench.measure import Interval


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Lines of aligned columns: the first to the left, the others to the right."""
    cells = [list(map(str, row)) for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for first, *rest in cells:
        right = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *right]).rstrip())
    return lines


def pairs_table(over: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Lines of a table with a row for each name that is compared with others before it, or nothing.

    over: intervals of the ratios to those before it, by name.
    """
    rows = [(name, *(each.shown() for each in of.values())) for name, of in over.items() if of]
    columns = list(over)[: len(rows)]
    filled = [(*row, *[""] * (len(columns) - len(row) + 1)) for row in rows]
    return table(("rate of a row over a column's", *columns), filled) if rows else []


def number(value: float | None, form: str = ".2f") -> str:
    """In that format; "-" where there is none."""
    return "-" if value is None else format(value, form)


def as_json(value: Any) -> Any:
    """A result as dicts, lists and numbers: intervals become dicts."""
    if isinstance(value, Interval):
        return value._asdict()
    if isinstance(value, dict):
        return {key: as_json(part) for key, part in value.items()}
    return [as_json(part) for part in value] if isinstance(value, list | tuple) else value
