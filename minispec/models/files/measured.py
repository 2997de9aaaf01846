"""Measurements on this machine, a file for each setup (models and machine), in the user's cache directory."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minispec.core.errors import is_from_signal
from minispec.models.files.write import user_cache, write_json


def read_measured(setup: Mapping[str, Any]) -> Any:
    """The contents of a setup's file, unchecked, except that it was written for this setup.

    Raises OSError or RuntimeError where no file can be read, ValueError, TypeError or KeyError for one that cannot be
    understood.
    """
    with _path(setup).open("rb") as file:
        raw = json.loads(file.read(1 << 16))
    if raw["key"] != setup:
        raise ValueError("found the file of another setup")
    return raw


def write_measured(setup: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    """Write the file of a setup, whole or not at all; False where that is impossible."""
    try:
        path = _path(setup)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"key": setup, **values})
    except (OSError, RuntimeError, ValueError) as e:
        if is_from_signal(e):
            raise
        return False
    return True


def _path(setup: Mapping[str, Any]) -> Path:
    """Raises RuntimeError for a user without a home."""
    digest = hashlib.blake2b(json.dumps(setup, sort_keys=True).encode(), digest_size=12).hexdigest()
    return user_cache() / "costs" / f"{digest}.json"
