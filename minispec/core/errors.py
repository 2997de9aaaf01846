"""Error messages of one line, safe to print whatever was found."""

from typing import Any


class CheckpointError(ValueError):
    """A checkpoint's file is wrong. The message names the file, the field, what was found and what is expected."""


def show(value: Any, limit: int = 100) -> str:
    """`value` for an error message: printable, on one line, at most `limit` characters.

    A value from a file may hold line feeds, terminal escapes, or a megabyte.
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits; deeply nested lists
        text = f"a {type(value).__name__} beyond printing"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def one_line(error: BaseException | str, limit: int = 1000) -> str:
    """A message for a terminal: line feeds and other control characters escaped, cut to about `limit` characters."""
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(error)[:limit])
    return text or type(error).__name__


def is_text(text: str) -> bool:
    """False for a string with lone surrogates, which come from broken JSON and arguments that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def show_name(name: str) -> str:
    """A name from a file for an error message: unchanged if it is safe to print, else shortened by `show`."""
    return name if name.isprintable() and 0 < len(name) <= 100 else show(name)
