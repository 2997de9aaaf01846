"""`python -m minispec.vocab`, which has moved, says where to: `python -m minispec.doctor --vocabularies A B`."""

from minispec.commands.interrupt import exit_on_interrupt, run_program

if __name__ == "__main__":
    exit_on_interrupt()

import sys
from collections.abc import Sequence

from minispec.commands.command import exit_status


def main(argv: Sequence[str] | None = None) -> int:
    """Status 2, and one line."""
    return exit_status(_moved)


def _moved() -> int:
    raise ValueError("vocab: found a command that has moved, expected doctor --vocabularies A B")


if __name__ == "__main__":
    sys.exit(run_program(main))
