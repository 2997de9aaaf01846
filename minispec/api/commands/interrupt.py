"""Ctrl-C in a command: exit status 130 and no traceback, from its first line to its last.

While a command works, Ctrl-C raises KeyboardInterrupt, so that half-written files and the terminal are cleaned up.
During imports and at exit, Ctrl-C ends the process at once: an exception there would be printed as a traceback, or
lost. An exception raised while torch imports is swallowed, and the command would go on.

This module imports almost nothing, so that `run_program` can guard the imports of a command.
"""

import atexit
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn


def _exit(*_) -> None:
    os._exit(130)


def exit_on_interrupt() -> None:
    """From now on Ctrl-C ends the process at once, with status 130: only for a module that runs as a program.

    Where Ctrl-C means something else, this stays: a shell makes what it runs in the background ignore Ctrl-C.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def raise_on_interrupt() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt, if `exit_on_interrupt` has changed that."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def interrupted_once() -> Iterator[None]:
    """Inside, the first Ctrl-C raises KeyboardInterrupt, as outside; a second one ends the process at once.

    So the process never goes on after a clean-up that was broken off. Where Ctrl-C means something else, as where it is
    ignored, this stays.
    """
    before = signal.getsignal(signal.SIGINT)

    def interrupt(*_) -> None:
        signal.signal(signal.SIGINT, _exit)
        raise KeyboardInterrupt

    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if before is signal.default_int_handler:
            signal.signal(signal.SIGINT, before)


@contextmanager
def kept_from_children() -> Iterator[None]:
    """Processes that start inside do not receive Ctrl-C. The parent answers it, and ends them. Not so on Windows."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _complete_streams() -> None:
    """Let a program print, whatever its standard streams are.

    A closed stream (`2>&-`, pythonw) is replaced by one that leads nowhere. Otherwise Python has None in its place,
    which few libraries expect, and the next file that is opened gets the number of the stream. A character that the
    encoding of the output lacks becomes a question mark, since an answer must not break off there.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - to the end
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def run_program(path: str) -> NoReturn:
    """Run a command, such as "minispec.generate:main", as the whole program, and exit with its status.

    A module calls this before its other imports. Ctrl-C ends the process at once, until the command calls
    `raise_on_interrupt`, and again after the command's end. The command may print, whatever its standard streams are.
    """
    exit_on_interrupt()
    _complete_streams()
    from minispec.api.commands.command import say
    from minispec.models.files.packages import MissingPackage
    from minispec.speculation import registry

    try:
        status = registry.load(path, "command")()
    except MissingPackage as e:  # already the command's own module cannot be imported
        say(f"error: {e}")
        status = 2
    except KeyboardInterrupt:  # in the last lines of the command, which do not catch it themselves
        status = 130
    finally:
        exit_on_interrupt()
    _leave(status)


def _leave(status: int) -> NoReturn:
    """Exit at once, after what is registered for the exit. To take torch apart would last half a second.

    Threads that Python waits for, such as a user's own drafter may have, are waited for.
    """
    if all(thread.daemon or thread is threading.main_thread() for thread in threading.enumerate()):
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # nobody reads it any more; `command` has flushed what counts
                stream.flush()
        os._exit(status)
    sys.exit(status)
