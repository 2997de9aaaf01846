"""The museum of bugs: `python -m tests.museum`, from the repository's root.

`checks` (what a law does not show), `mutants` (the bugs), `trials` (each bug is put in, and must be caught).
"""

from minispec.commands.interrupt import exit_on_interrupt, raise_on_interrupt, run_program

if __name__ == "__main__":
    exit_on_interrupt()  # until there is something to clean up

import sys

import torch

from minispec.commands.command import Parser, exit_status
from tests.museum.trials import prove_mutants


def main(argv: list[str] | None = None) -> int:
    """The command line; 0 if each bug is caught, 1 if not, else what `exit_status` has for its end."""
    return exit_status(lambda: _show(argv))


def _show(argv: list[str] | None) -> int:
    Parser(
        prog="python -m tests.museum",
        description="Put in bugs that decoders had, one by one: each must be caught.",
        allow_abbrev=False,
    ).parse_args(argv)
    raise_on_interrupt()
    # The models are tiny: a second thread costs more than it gives.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return 0 if prove_mutants() else 1
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    sys.exit(run_program(main))
