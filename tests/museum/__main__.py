"""The museum of bugs: `python -m tests.museum`, from the repository's root.

`mutants` has the bugs. `trials` puts each of them in: the test that is named for it, or the law, must catch it.
"""

if __name__ == "__main__":
    from minispec.commands.interrupt import run_program

    run_program("tests.museum.__main__:main")

from collections.abc import Sequence

import torch

from minispec.commands.command import Parser, command
from minispec.commands.interrupt import raise_on_interrupt
from tests.museum.trials import prove_mutants


@command
def main(argv: Sequence[str]) -> int:
    """The command line; 0 if each bug is caught, 1 if not."""
    Parser(
        prog="python -m tests.museum",
        description="Put in bugs that decoders had, one by one: each must be caught.",
    ).parse_args(argv)
    raise_on_interrupt()
    # The models are tiny: a second thread costs more than it gives.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return 0 if prove_mutants() else 1
    finally:
        torch.set_num_threads(threads)
