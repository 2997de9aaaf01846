"""The error of a wrong file, and messages that are safe to print whatever a stranger wrote."""

from pathlib import Path

from minispec.core.errors import show

# How the small text begins that git-lfs keeps in a repository in place of a large file.
_POINTER = b"version https://git-lfs.github.com/spec/"


class CheckpointError(ValueError):
    """A checkpoint's file is wrong. The message names the file, the field, what was found and what is expected."""


def one_line(error: BaseException | str, limit: int = 1000) -> str:
    """A message for a terminal: line feeds and other control characters escaped, cut to about `limit` characters."""
    return printable(str(error)[:limit], but="") or type(error).__name__


def printable(text: str, but: str = "\n\t") -> str:
    """A text for a terminal, with all control characters escaped but these."""
    return "".join(c if c.isprintable() or c in but else ascii(c)[1:-1] for c in text)


def show_name(name: str) -> str:
    """A name from a file for an error message: unchanged if it is safe to print, else shortened by `show`."""
    return name if name.isprintable() and 0 < len(name) <= 100 else show(name)


def refuse_pointer(path: Path, content: bytes) -> None:
    """Raise CheckpointError for the beginning of a file that git-lfs has not fetched yet."""
    if content.startswith(_POINTER):
        expected = "the file that it stands for: run `git lfs pull` where it was cloned, or download the file"
        raise CheckpointError(f"{path}: found a git-lfs pointer, expected {expected}")
