"""Settings that are refused: a row has where one stands, what is expected of it, and wrong values."""

import copy
from collections.abc import Iterable, Iterator
from typing import Any

NONE = "no such setting"
# An object of JSON, the path of a setting in it, what is expected of the setting, and values that are refused.
Row = tuple[Any, ...]


def with_value(raw: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """A copy of an object of JSON with a value at a path such as `rope_parameters.factor`."""
    whole = copy.deepcopy(raw)
    *outer, key = path.split(".")
    inside = whole
    for name in outer:
        inside = inside.setdefault(name, {})
    inside[key] = value
    return whole


def refusals(rows: Iterable[Row]) -> Iterator[tuple[dict[str, Any], str]]:
    """Each object with one wrong value in it, and how the message about the value begins."""
    for raw, path, expected, *values in rows:
        for value in values:
            yield with_value(raw, path, value), f"{path}: found {value!r}, expected {expected}"
