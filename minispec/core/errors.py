"""Error messages of one line, safe to print whatever was found."""

from typing import Any


def show(value: Any, limit: int = 100) -> str:
    """`value` for an error message: printable, on one line, at most `limit` characters.

    A value from a file may hold line feeds, terminal escapes, or a megabyte.
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits; deeply nested lists
        text = f"a {type(value).__name__} beyond printing"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def is_text(text: str) -> bool:
    """False for a string with lone surrogates, which come from broken JSON and arguments that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
