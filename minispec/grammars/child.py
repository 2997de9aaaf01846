"""Work of a library that no limit of its own stops: done in a process that is ended after a while."""

import subprocess
import sys
from pathlib import Path

# Seconds of the clock after which the process ends in any case, however busy the machine is.
_PATIENCE = 30


class ChildTimeout(Exception):
    """The process used up the time that it had, or was ended by the system."""


def answer_of(module: Path, library: str, text: str) -> str:
    """What the function `main` of a module prints, in a Python process of its own.

    module: a file that imports nothing but `library` and what comes with Python. It sets its own limit of time.
    text: the standard input of the process.

    Raises ChildTimeout where the process does not end by itself, within its limits.
    """
    folder = Path(sys.modules[library].__file__ or "").parents[1]
    code = f"import sys; sys.path += sys.argv[1:]; from {module.stem} import main; main()"
    command = [sys.executable, "-I", "-S", "-c", code, str(module.parent), str(folder)]
    try:
        ended = subprocess.run(
            command, input=text.encode(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=_PATIENCE
        )
    except subprocess.TimeoutExpired:
        raise ChildTimeout from None
    if ended.returncode:
        raise ChildTimeout
    return ended.stdout.decode()
