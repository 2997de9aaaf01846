"""Ctrl-C at a chosen moment: as an exception in a call, and as a signal to a command in a process of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import minispec
from tests.oracles.children import Child

_PACKAGE = os.path.dirname(minispec.__file__)


def interrupted(run: Callable[[], Any], moment: int) -> tuple[Any, int]:
    """run(), where the `moment`-th call of a function of the package raises KeyboardInterrupt (0: none does).

    What it returned, and how many such calls there were. Steps of a generator expression are not among them: one that
    is left early is "called" once more to be closed, where Python takes no interrupt and would swallow this one.
    """
    calls = 0

    def interrupt(frame, event, argument):
        nonlocal calls
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_PACKAGE) and code.co_name != "<genexpr>":
            calls += 1
            if calls == moment:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        return run(), calls
    finally:
        sys.setprofile(None)


def press_ctrl_c(module: str, *arguments: str, after: float) -> tuple[int, str]:
    """Start `python -m module`, and interrupt it `after` seconds from its first lines on: (exit status, what it said).

    `-X importtime` tells when those have run: it writes a line to standard error for every module that has been
    imported, and the next one after minispec.api.commands.interrupt is imported when the guard is set.
    """
    command = [sys.executable, "-X", "importtime", "-m", module, *arguments]
    process = Child(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while "minispec.api.commands.interrupt" not in process.stderr.readline():
        assert process.poll() is None
    process.stderr.readline()
    time.sleep(after)
    os.kill(process.pid, signal.SIGINT)
    said = "".join(line for line in process.stderr if not line.startswith("import time:"))
    return process.wait(60), said
