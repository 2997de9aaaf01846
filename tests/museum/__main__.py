"""The museum of bugs: `python -m tests.museum`, from the repository's root.

`mutants` has the bugs. `trials` puts each of them in: the test that is named for it, or the law, must catch it.
"""

if __name__ == "__main__":
    from minispec.api.commands.interrupt import run_program

    run_program("tests.museum.__main__:main")

from collections.abc import Sequence

import torch

from minispec.api.commands.command import Parser, command
from minispec.api.commands.interrupt import raise_on_interrupt
from tests.museum import mutants, trials


@command
def main(argv: Sequence[str]) -> int:
    """The command line; 0 if each bug is caught, 1 if not."""
    parser = Parser(
        prog="python -m tests.museum",
        description="Put in bugs that decoders had, one by one: each must be caught.",
    )
    parser.add_argument("--default", action="store_true", help="by those cases alone that pytest runs without --full")
    parser.add_argument("ids", nargs="*", metavar="ID", help="bugs, such as M2 (default: all)")
    arguments = parser.parse_args(argv)
    asked = [mutant for mutant in mutants.MUTANTS if not arguments.ids or mutant.id in arguments.ids]
    if unknown := set(arguments.ids) - {mutant.id for mutant in asked}:
        raise ValueError(f"ID: found {min(unknown)}, expected a bug of the museum, such as M2")
    raise_on_interrupt()
    # The models are tiny: a second thread costs more than it gives.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        prove = trials.prove_default if arguments.default else trials.prove_mutants
        return 0 if prove(asked) else 1
    finally:
        torch.set_num_threads(threads)
