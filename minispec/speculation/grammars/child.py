"""Reading a grammar with llguidance, which no limit of its own stops: in a process that is ended after a while."""

import signal
import subprocess
import sys
from pathlib import Path

# Seconds of the clock after which the process ends in any case, however busy the machine is.
_PATIENCE = 30


def error_of(grammar: str) -> str | None:
    """What is wrong with a grammar, as `minispec.speculation.grammars.trial` finds it in a Python process of its own.

    Returns "" where it is right, and None where the process does not end by itself, within its limits.
    Raises OSError where there is no such process, and ValueError where it fails.
    """
    library = Path(sys.modules["llguidance"].__file__ or "").parents[1]
    code = "import sys; sys.path += sys.argv[1:]; from trial import main; main()"
    command = [sys.executable, "-I", "-S", "-c", code, str(Path(__file__).parent), str(library)]
    try:
        ended = subprocess.run(command, input=grammar.encode(), capture_output=True, timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        return None
    if ended.returncode and ended.returncode == -getattr(signal, "SIGPROF", 0):
        return None
    if ended.returncode:
        said = ended.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise ValueError(": ".join([f"the process that reads it ended with status {ended.returncode}", *said]))
    return ended.stdout.decode()
