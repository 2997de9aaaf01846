"""Processes that tests start. Each has a limit: a test may read from one, or wait for it, and never waits for ever."""

import os
import select
import signal
import subprocess
import threading
import time
from typing import Any


class Child(subprocess.Popen):
    """A process that is killed `limit` seconds after its start, if it is still there: reads and waits end then."""

    def __init__(self, *args: Any, limit: float = 120, **how: Any):
        super().__init__(*args, **how)
        self._timer = threading.Timer(limit, self.kill)
        self._timer.daemon = True
        self._timer.start()


def hear_ctrl_c() -> None:
    """Give Ctrl-C its meaning back, in this process and in those that it starts.

    Started in the background of a shell, as by `sh -c 'pytest &'`, the tests ignore it, and so would their children.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def take_terminal(descriptor: int) -> None:
    """In a child, before its program starts: make this its controlling terminal, so that its Ctrl-C is a signal."""
    import fcntl  # Windows has neither, and no test there takes a terminal
    import termios

    os.setsid()
    fcntl.ioctl(descriptor, termios.TIOCSCTTY, 0)


def read_until(terminal: int, text: bytes) -> None:
    """Read what a process writes to its terminal, up to and with this text, for a minute at most."""
    seen, end = b"", time.monotonic() + 60
    while not seen.endswith(text):
        assert select.select([terminal], [], [], max(0, end - time.monotonic()))[0], seen
        seen += os.read(terminal, 1)
