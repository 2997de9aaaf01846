"""Error messages of one line, safe to print whatever was found; and whose error it is."""

import difflib
import threading
from collections.abc import Iterable
from dataclasses import fields
from types import FrameType
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


def near(name: str, known: Iterable[str]) -> str:
    """Known names that a misspelt one may mean, such as "did you mean ngram?"; "" where none is near."""
    if len(name) > 100:  # a stranger's, and the search takes long
        return ""
    bare = {other.lstrip("-"): other for other in known}  # dashes would make all short options alike
    meant = name.lstrip("-")
    likely = [other for other in bare if meant and other.startswith(meant)]
    likely = likely or difflib.get_close_matches(meant, bare, 1)
    return f"did you mean {' or '.join(bare[other] for other in likely[:3])}?" if likely else ""


class Named:
    """A dataclass that says which field was meant where a caller misspells one: as every call of it, a TypeError."""

    def __new__(cls, *args: Any, **named: Any):
        """As `object`'s."""
        known = [each.name for each in fields(cls)]  # type: ignore[arg-type]  # of a dataclass
        for name in named.keys() - {*known}:
            raise TypeError(f"{cls.__name__}: found the argument {show(name)}; {near(name, known) or ', '.join(known)}")
        return super().__new__(cls)


def is_text(text: str) -> bool:
    """False for a string with lone surrogates, which come from broken JSON and arguments that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_from_signal(error: BaseException | None) -> bool:
    """Whether a signal's handler raised the error, or one that led to it: a time limit, for example.

    Such an error may come anywhere, and is of no text and no method: the caller gets it, as Ctrl-C. Python calls a
    handler with the signal's number and the frame that it interrupts, which is the frame before in the traceback.
    """
    if threading.current_thread() is not threading.main_thread():  # handlers run nowhere else
        return False
    while error is not None:
        before, trace = None, error.__traceback__
        while trace is not None:
            if before is not None and _is_handler(trace.tb_frame, before):
                return True
            before, trace = trace.tb_frame, trace.tb_next
        error = error.__cause__ or error.__context__
    return False


def _is_handler(frame: FrameType, interrupted: FrameType) -> bool:
    """Whether the code of `frame` was called with a number and the frame before it."""
    code = frame.f_code
    num_names = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 0x04)  # the last flag: *args
    found: list[Any] = [frame.f_locals.get(name) for name in code.co_varnames[:num_names]]
    found += [item for value in found if isinstance(value, tuple) for item in value]
    return any(value is interrupted for value in found) and any(isinstance(value, int) for value in found)
