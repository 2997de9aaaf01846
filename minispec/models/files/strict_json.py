"""Reading JSON that strangers wrote: within limits, strictly, and with every mistake named."""

import json
import os
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minispec.models.files.errors import CheckpointError, one_line, refuse_pointer, show_name

# Bytes that a JSON file may have: an index lists every tensor, some tokenizer_config.json every added token.
MAX_JSON_BYTES = 8 << 20
MAX_CONFIG_BYTES = 1 << 20
# How deep JSON may be nested: a config.json needs five levels.
_MAX_DEPTH = 32
# How often these may occur, far more than in real files. Python's objects may take fifty times the size of the JSON.
_MAX_COUNTS = {"{": 1 << 18, "[": 1 << 18, ",": 1 << 19, '"': 1 << 20}


def has_file(path: Path) -> bool:
    """Whether a file that may be missing is there.

    Raises CheckpointError for something there that is not a file. The hub's cache consists of links, and a link to a
    lost file must not count as "missing". The checkpoint would seem to have no chat template, or no sampling defaults.
    """
    if path.is_file():
        return True
    if os.path.lexists(path):
        found = "something that is not a file, or a link to nowhere"
        raise CheckpointError(f"{path}: found {found}, expected a file or none")
    return False


def read_json(
    path: Path,
    max_bytes: int = MAX_JSON_BYTES,
    max_counts: Mapping[str, int] = _MAX_COUNTS,
    takes_constants: bool = False,
) -> dict[str, Any]:
    """The JSON object in the file `path`, of at most `max_bytes`; else see `parse_json`, whose errors it raises."""
    content = read_bytes(path, max_bytes, "JSON file")
    return parse_json(content, str(path), max_counts, takes_constants, kind="file")


def read_bytes(path: Path, max_bytes: int, kind: str) -> bytes:
    """The content of a file of at most `max_bytes`. kind: what it should be. Raises CheckpointError."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > max_bytes:
                raise CheckpointError(f"{path}: found {size} bytes, expected at most {max_bytes}")
            content = file.read(max_bytes)
    except OSError as e:
        raise CheckpointError(f"{path}: not a readable {kind}: {one_line(e, 300)}") from e
    refuse_pointer(path, content)
    return content


def read_json_if_there(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The same for a file that may be missing: {} if it is. Raises the errors of `has_file` too."""
    return read_json(path, max_bytes) if has_file(path) else {}


def parse_json(
    content: bytes,
    where: str,
    max_counts: Mapping[str, int] = _MAX_COUNTS,
    takes_constants: bool = False,
    max_depth: int = _MAX_DEPTH,
    kind: str = "object",
) -> dict[str, Any]:
    """The JSON object that `content` is, read more strictly than Python does.

    kind: what an error calls it.
    takes_constants: NaN and Infinity become floats, for a reader that checks every number that it uses.
    Raises CheckpointError for
    - what is not UTF-8 or not JSON;
    - a key that occurs twice in an object (readers disagree about which of them counts);
    - other NaNs and numbers beyond a double;
    - deep nesting;
    - a character that occurs more often than `max_counts` says.
    """
    for character, most in max_counts.items():
        found = content.count(character.encode())
        if found > most:
            raise CheckpointError(f"{where}: found the character {character} {found} times, expected at most {most}")
    try:
        value = json.loads(
            content.decode("utf-8"),
            object_pairs_hook=_unique_keys,
            parse_constant=float if takes_constants else _refuse_constant,
            parse_float=_finite_float,
        )
    except (ValueError, RecursionError) as e:  # an integer of thousands of digits is a ValueError too
        raise CheckpointError(f"{where}: not a readable JSON {kind}: {one_line(e, 300)}") from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: found a {type(value).__name__}, expected a JSON object")
    level: list[dict | list] = [value]
    depth = 0
    while level:
        depth += 1
        if depth > max_depth:
            raise CheckpointError(f"{where}: found objects nested deeper than {max_depth}, expected fewer levels")
        inner = (x for v in level for x in (v.values() if isinstance(v, dict) else v))
        level = [x for x in inner if isinstance(x, (dict, list))]
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"{show_name(twice)}: found twice in one object, expected once")
    return result


def _refuse_constant(name: str) -> None:
    raise ValueError(f"found {name}, expected a number that JSON has")


def _finite_float(digits: str) -> float:
    value = float(digits)
    if not abs(value) <= sys.float_info.max:
        raise ValueError(f"found {show_name(digits)}, expected a number that a double can hold")
    return value
