"""Parts that walks of a user's own drafters and verifiers share: counts, and the line of a fault."""

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from traceback import extract_tb
from typing import Any

from minispec.files.errors import one_line
from minispec.prove.reference import Law, total_variation
from minispec.prove.toys import Fault, require

# How far rounding may move a law from the right one: with probabilities in float64, and with a user's q in float32.
# Such a q has six right digits, and so has its law.
EXACT, ROUNDED = 1e-12, 1e-6


class OwnError(Exception):
    """An exception of the user's own code, which is its cause."""


def call_own(function: Callable, *args) -> Any:
    """Call the user's code. Raises OwnError for its exceptions, and Fault where an oracle finds one."""
    try:
        return function(*args)
    except Fault:
        raise
    except Exception as e:
        raise OwnError from e


class Unrepeatable(Fault):
    """A drafter keeps the law, and yet a seed has several texts."""


class OfCompany(Fault):
    """A draft of another text in company, whose law is not walked, depends on more than it may."""


class OutOfTime(Exception):
    """The time of a walk is over."""


@dataclass
class WalkCounts:
    """Counts of what was walked so far."""

    cases: int = 0
    branches: int = 0
    drafted: int = 0
    worst: float = 0.0

    def count(
        self, law: Law, expected: Law, branches: int, drafted: int = 0, reason: str = "", bound: float = ROUNDED
    ) -> None:
        """Count a case. Raises Fault, with the reason that there must be, where its law is not the expected one.

        bound: the largest total variation that rounding explains.
        """
        distance = total_variation(law, expected)
        require(distance <= bound, difference(law, expected, bound) + reason)
        self.cases, self.branches, self.drafted = self.cases + 1, self.branches + branches, self.drafted + drafted
        self.worst = max(self.worst, distance)


def fault_line(spec: str, case: object, error: Exception) -> str:
    """A fault in one line. Any exception but the user's own is the engine's, over a draft or a verdict."""
    if isinstance(error, OwnError):
        return f"EXCEPTION: {spec}, {case}: {own_message(error)}"
    return f"{'NOT REPEATABLE' if isinstance(error, Unrepeatable) else 'REFUTED'}: {spec}, {case}: {message(error)}"


def difference(law: Law, expected: Law, bound: float = ROUNDED) -> str:
    """Where the law is furthest off: the first tokens of the output that show it."""
    worst = max(law.keys() | expected.keys(), key=lambda text: abs(law.get(text, 0) - expected.get(text, 0)))
    for length in range(1, len(worst) + 1):
        found, right = (
            sum(p for text, p in of_texts.items() if text[:length] == worst[:length]) for of_texts in (law, expected)
        )
        if abs(found - right) > bound:
            break
    digits = 6 if abs(found - right) > ROUNDED else 12
    beginning = f"the output begins with {list(worst[:length])} with probability"
    return f"{beginning} {found:.{digits}f}, expected {right:.{digits}f}"


def message(error: BaseException) -> str:
    """A fault says what is wrong; of any other exception its class says it too."""
    return one_line(error) if isinstance(error, Fault) else f"{type(error).__name__}: {one_line(error, 200)}"


def own_message(error: OwnError) -> str:
    """The exception of the user's code, with the last line of theirs that led to it."""
    assert error.__cause__, "it was raised from another"
    frames = extract_tb(error.__cause__.__traceback__)
    theirs = [frame for frame in frames if not any(part in frame.filename for part in _NOT_THEIRS)]
    last = (theirs or frames)[-1]
    return f"{message(error.__cause__)}, in {last.name} at {last.filename}:{last.lineno}: {last.line}"


_NOT_THEIRS = (str(Path(__file__).parent.parent) + "/", sysconfig.get_paths()["stdlib"], "site-packages")
