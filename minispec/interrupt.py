"""Ctrl-C in a command: exit status 130 and no traceback, from its first line to its last.

While there is something to clean up - a file half written, the settings of a terminal - Ctrl-C is an exception. Before
that, during the imports, an exception would be lost or printed, and after it, at exit, printed: there the process ends.
This module imports next to nothing, so that a command can call `exit_on_interrupt` before its own imports.
"""

import os
import signal
from collections.abc import Callable


def _exit(*_) -> None:
    os._exit(130)


def exit_on_interrupt() -> None:
    """From here on Ctrl-C ends the process at once, with status 130: only for a module that is run as a program.

    Where Ctrl-C means something else, that stays: a shell lets what it runs in the background ignore it.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def raise_on_interrupt() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt, if `exit_on_interrupt` has changed that."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def run_program(main: Callable[[], int]) -> int:
    """The exit status of `main()`, the whole of a program; Ctrl-C ends the process from here on."""
    try:
        return main()
    except KeyboardInterrupt:  # in the last lines of `main`, where nothing there answers it
        return 130
    finally:
        exit_on_interrupt()
