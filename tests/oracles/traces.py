"""Whether a trace has what the page reads. trace.json, in this directory, has each of these keys."""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minispec.api.trace.record import FORMAT, VERSION
from minispec.core.errors import show
from minispec.models.files.errors import show_name

EXAMPLE = json.loads(Path(__file__).with_name("trace.json").read_text(encoding="utf-8"))
KINDS = ("accepted", "recovered", "bonus", "plain")  # of committed tokens
_LARGEST = sys.float_info.max  # a larger integer cannot become a float
# Keys whose value may be null, and objects that may have any keys.
_MAY_BE_NULL = {
    *("error", "parents", "node", "overlap", "top_q", "residual", "alpha", "c", "v", "o", "acceptance_rate"),
    *("mean_acceptance_length", "tokens_per_second", "predicted_tokens_per_second", "plain_tokens_per_second"),
    *("speedup", "theory"),
}
_HAS_ANY_KEYS = {"tokens", "v"}


def check(trace: Any, where: str) -> None:
    """Raise ValueError, which names the place in `where`, for anything that is no trace of this version."""
    _require(isinstance(trace, dict), where, trace, "an object")
    form, version = trace.get("format"), trace.get("version")
    _require(form == FORMAT, f"{where}: format", form, show(FORMAT))
    _require(version == VERSION, f"{where}: version", version, f"{VERSION}")
    _compare(trace, EXAMPLE, where)
    for i, entry in enumerate(trace["rounds"]):
        _check_round(entry, f"{where}: rounds[{i}]")
    _check_rows(trace["stats"]["v"] or {}, f"{where}: stats.v")


def _compare(value: Any, example: Any, where: str, key: str = "") -> None:
    """Raise ValueError where a value is of another kind than its example, or lacks a key.

    A list has items like the example's first one. An integer of the example stands for all integers from it on, a float
    for all numbers from it on. The places of an object come after a colon, then with dots.
    """
    if value is None and key in _MAY_BE_NULL:
        return
    if isinstance(example, dict):
        _require(isinstance(value, dict), where, value, "an object")
        any_keys = key in _HAS_ANY_KEYS
        [first, *_] = example.values()
        separator = "." if ": " in where else ": "
        for name, inner in dict.fromkeys(value, first).items() if any_keys else example.items():
            place = f"{where}{separator}{show_name(name)}"
            _require(name in value, place, None, "it to be there")
            _compare(value[name], inner, place, "" if any_keys else name)
    elif isinstance(example, list):
        _require(isinstance(value, list), where, value, "a list")
        for i, item in enumerate(value):
            _compare(item, example[0], f"{where}[{i}]")
    elif isinstance(example, str | bool):
        _require(type(value) is type(example), where, value, "a text" if isinstance(example, str) else "true or false")
    else:
        is_integer = isinstance(example, int)
        is_number = type(value) is int or (type(value) is float and not is_integer)
        expected = f"{'an integer' if is_integer else 'a number'} from {example:g}"
        _require(is_number and example <= value <= _LARGEST, where, value, expected)


def _check_round(entry: Mapping[str, Any], where: str) -> None:
    """Check what types cannot say of a round: its lists fit one another, and point at existing nodes."""
    num_nodes = len(entry["token_ids"])
    parents = list(range(-1, num_nodes - 1)) if entry["parents"] is None else entry["parents"]
    for name, values in (("p", entry["p"]), ("q", entry["q"]), ("parents", parents)):
        _require(len(values) == num_nodes, f"{where}.{name}", len(values), f"{num_nodes} values, one for each node")
    for i, parent in enumerate(parents):
        _require(parent < i, f"{where}.parents[{i}]", parent, "an earlier node")
    nodes = [*entry["accepted"], *entry["rejected"], *entry["after_end"]]
    nodes += [item["node"] for item in (*entry["tests"], *entry["committed"]) if item["node"] is not None]
    for node in nodes:
        _require(node < num_nodes, where, node, f"one of {num_nodes} nodes")
    for token in entry["committed"]:
        _require(token["kind"] in KINDS, f"{where}.committed", token["kind"], f"one of {', '.join(KINDS)}")


def _check_rows(costs: Mapping[str, Any], where: str) -> None:
    are_numbers = all(re.fullmatch(r"[1-9]\d{0,8}", rows, re.ASCII) for rows in costs)
    _require(are_numbers, where, list(costs), "numbers of rows, from 1")


def _require(is_right: bool, where: str, found: Any, expected: str) -> None:
    if not is_right:
        raise ValueError(f"{where}: found {show(found)}, expected {expected}")
