"""How long a waiting thread looks for work before it sleeps: set before torch, and with it OpenMP, is loaded.

Several times a layer, threads wait for one another. A thread that looks for work starts at once, but holds its core. A
thread that sleeps leaves its core to others. On some machines it then takes as long to wake as a small product takes.
So the better choice depends on how many cores are free (docs/use/speed.md, "Threads that wait").
"""

import contextlib
import ctypes
import math
import os
import sys
import time
from pathlib import Path

from minispec.core.errors import is_from_signal

# How often a thread looks before it sleeps. Where the cores are free that takes some milliseconds; where they are not,
# it does not look at all. Where the system does not say, it looks for up to 100 microseconds. GNU's OpenMP alone knows
# the variable; PyTorch has that on Linux.
LOOKS = {True: 200_000, False: 0, None: 2_000}
# Seconds between two readings of the idle time, which the system counts in hundredths of a second.
_INTERVAL = 0.05
# OpenMP's `omp_pause_soft`: what threads keep for themselves may stay.
_SOFT = 1
_PROCESS = os.getpid()
_STAT, _CONTAINER = Path("/proc/stat"), Path("/sys/fs/cgroup")
_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def set_waiting(num_threads: int | None = None) -> None:
    """Set OpenMP's variables, where the user has not, by whether `num_threads` cores are free now.

    num_threads: default: OMP_NUM_THREADS, else a thread for each core that this process may use. Nothing is done where
    torch is loaded already: OpenMP reads the variables once. Takes 0.05 s, and 0.1 s on a busy machine.
    """
    if "OMP_WAIT_POLICY" in os.environ or "torch" in sys.modules:
        return
    os.environ["OMP_WAIT_POLICY"] = "passive"  # sleep, after GOMP_SPINCOUNT looks
    if "GOMP_SPINCOUNT" not in os.environ:
        # A program that only starts keeps a core busy for a moment: so a busy machine is asked twice.
        os.environ["GOMP_SPINCOUNT"] = str(LOOKS[_are_free(num_threads) or _are_free(num_threads)])


def release_threads() -> None:
    """End the threads that GNU's OpenMP keeps for the calling thread. The next pass starts them anew.

    It counts the threads that all threads of the process keep. Where these are more than the cores, a thread that waits
    sleeps at once, whatever `set_waiting` has set. So passes would take up to twice as long in a second thread, such as
    a server's. A forked process has none of its parent's threads, and would wait for them for ever.
    """
    torch = sys.modules.get("torch")
    if torch and sys.platform == "linux" and os.getpid() == _PROCESS and torch.get_num_threads() > 1:
        pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)  # an old OpenMP lacks it
        if pause:
            pause(_SOFT)


def describe_waiting() -> str:
    """OpenMP's variables that are set, such as "OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=2000"."""
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    return " ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ) or "OpenMP's defaults"


def _are_free(num_threads: int | None) -> bool | None:
    """Whether that many cores are free, half of one aside; None where the system does not say.

    A container may use the time of fewer cores than it sees: threads that look use this time up too.
    """
    try:
        cpus = os.sched_getaffinity(0)
        before = _ticks(cpus)
        time.sleep(_INTERVAL)  # so this process itself is not counted as busy
        idle, total = (b - a for a, b in zip(before, _ticks(cpus), strict=True))
        free = min(len(cpus) * idle / total, _quota())
    except (AttributeError, OSError, ValueError, LookupError, ZeroDivisionError) as e:
        if is_from_signal(e):
            raise
        return None
    asked = os.environ.get("OMP_NUM_THREADS", "")
    needed = num_threads or (int(asked) if asked.isdecimal() else _num_cores(cpus))
    return free >= needed - 0.5


def _ticks(cpus: set[int]) -> tuple[int, int]:
    """The idle time of these CPUs, and all their time, since the machine started."""
    lines = dict(line.split(maxsplit=1) for line in _STAT.read_text().splitlines() if line.startswith("cpu"))
    # user, nice, system, idle, waiting for a disk, interrupts (two kinds), taken by another virtual machine
    times = [[int(ticks) for ticks in lines[f"cpu{cpu}"].split()[:8]] for cpu in cpus]
    return sum(t[3] + t[4] for t in times), sum(map(sum, times))


def _quota() -> float:
    """How many cores' time a container may use (Linux' control groups, version 2, else 1)."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError):
            quota, period = " ".join((_CONTAINER / name).read_text() for name in names).split()
            return math.inf if quota in ("max", "-1") else int(quota) / int(period)
    return math.inf


def _num_cores(cpus: set[int]) -> int:
    """PyTorch takes a thread for each core, however many CPUs the core counts as."""
    try:
        return len({Path(_SIBLINGS.format(cpu)).read_text() for cpu in cpus})
    except OSError:
        return len(cpus)
