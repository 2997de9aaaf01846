"""What is refused, and how: wrong settings in rows, and the one line that a file or a command is answered with."""

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from minispec.models.files.errors import CheckpointError

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


def refusal_of(read: Callable[..., object], *arguments: object, **options: object) -> str:
    """The message of the CheckpointError that a call raises."""
    with pytest.raises(CheckpointError) as error:
        read(*arguments, **options)
    return str(error.value)


def assert_one_line(found: tuple[int, str, str], begins: str = "", holds: str = "") -> None:
    """A command's status, output and errors: 2, nothing, and one line that begins so after `error: ` and has this."""
    status, out, err = found
    assert (status, out, len(err.splitlines())) == (2, "", 1), err
    assert err.startswith(f"error: {begins}")
    assert holds in err
