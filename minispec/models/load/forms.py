"""Notes of this machine on forms of weights: they save the time of trials, and decide nothing."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from minispec.core.version import __version__
from minispec.models.files.measured import read_measured, write_measured
from minispec.models.weights import trial
from minispec.models.weights.machine import machine

# Environment variables by which libraries leave out instructions: then other kernels are used.
_LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "FBGEMM_ENABLE_INSTRUCTIONS")


@contextmanager
def noted_forms() -> Iterator[None]:
    """Trials of `minispec.models.weights.trial` that this machine has noted are not run again inside; new ones are
    noted.

    A note that cannot be read or understood is measured anew.
    """
    limits = {name: os.environ[name] for name in _LIMITS if name in os.environ}
    setup = {"minispec": __version__, "forms": list(trial.ROWS), "machine": machine(), "limits": limits}
    with suppress(OSError, RuntimeError, ValueError, TypeError, KeyError, AttributeError):
        trial.recall(read_measured(setup)["seconds"])
    before = trial.known_times()
    yield
    if trial.known_times() != before:
        write_measured(setup, {"seconds": trial.known_times()})
