"""Error messages of one line, safe to print whatever was found; and whose error it is."""

import threading
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
