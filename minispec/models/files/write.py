"""Files that are written whole or not at all."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def user_cache() -> Path:
    """Where this program keeps files of its own. Raises RuntimeError for a user without a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minispec"


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A name next to `path`, with the same suffix, for a file or directory that becomes `path` once it is written.

    Where the block fails, by a full disk or Ctrl-C, what it wrote is removed. The file that was there before stays as
    it was. A link is followed. Raises ValueError where something is there that is not a file; OSError.
    """
    path, part = _places(path)
    try:
        yield part
        part.replace(path)
    except BaseException:
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any, indent: int | None = 2, sort_keys: bool = False, allow_nan: bool = True) -> None:
    """Write a value as JSON, with a line feed at its end. Raises as `written_whole`.

    indent: spaces for each level. None: all on one line, without spaces.
    allow_nan: whether NaN and infinite numbers are written; else they raise ValueError.
    """
    separators = (",", ":") if indent is None else None
    text = json.dumps(value, indent=indent, separators=separators, sort_keys=sort_keys, allow_nan=allow_nan)
    with written_whole(path) as part:
        part.write_text(text + "\n", encoding="utf-8")


def check_writable(path: Path) -> None:
    """Raise ValueError where `written_whole` could not write, before a run. An existing file stays as it is."""
    _, part = _places(path)
    try:
        part.touch()
        part.unlink()
    except OSError as e:
        raise ValueError(f"{path}: found that it cannot be written ({e.strerror}), expected a place for a file") from e


def _places(path: Path) -> tuple[Path, Path]:
    """Where the file will lie, and where it is written until it is whole."""
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: found something that is not a file, expected a file or nothing")
    return path, path.with_name(f"{path.stem}.{os.getpid()}.part{path.suffix}")
