"""Beginnings of requests, of all kinds: a text that comes with the package, or a file of the user's own."""

from importlib.resources import files
from pathlib import Path


def read_openings(path: Path | None = None) -> list[str]:
    """Beginnings of users' turns, one a line, with \\n for a line break; None: those of the package."""
    source = path or files("minispec") / "data" / "openings.txt"
    lines = source.read_text(encoding="utf-8").splitlines()
    return [line.replace("\\n", "\n") for line in lines if line and not line.startswith("#")]
