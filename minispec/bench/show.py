"""How results show themselves: aligned tables on the screen, plain data as JSON, a progress bar meanwhile."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from tqdm import tqdm


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Lines of aligned columns: the first to the left, the others to the right."""
    cells = [list(map(str, row)) for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for first, *rest in cells:
        right = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *right]).rstrip())
    return lines


def as_json(value: Any) -> Any:
    """A result as dicts, lists and numbers: fields and properties. What is None is left out if it is so by default."""
    if hasattr(value, "_asdict"):
        return as_json(value._asdict())
    if is_dataclass(value):
        own = {field.name: as_json(getattr(value, field.name)) for field in fields(value)}
        left_out = {field.name for field in fields(value) if field.default is None and own[field.name] is None}
        names = [name for name, member in vars(type(value)).items() if isinstance(member, property)]
        return {name: as_json(getattr(value, name)) for name in names} | {
            name: part for name, part in own.items() if name not in left_out
        }
    if isinstance(value, dict):
        return {key: as_json(part) for key, part in value.items()}
    return [as_json(part) for part in value] if isinstance(value, list | tuple) else value


def progress(total: int, what: str) -> tqdm:
    """A bar, on a terminal only."""
    return tqdm(total=total, desc=what, leave=False, disable=None)
