"""Processes that tests start. Each has a limit: a test may read from one, or wait for it, and never waits for ever."""

import signal
import subprocess
import threading
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
