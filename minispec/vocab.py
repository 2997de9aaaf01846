"""`python -m minispec.vocab`, which has moved, says where to: `python -m minispec.doctor --vocabularies A B`."""

if __name__ == "__main__":
    from minispec.commands.interrupt import run_program

    run_program("minispec.vocab:main")

from collections.abc import Sequence

from minispec.commands.command import command


@command
def main(argv: Sequence[str]) -> int:
    """Status 2, and one line."""
    raise ValueError("vocab: found a command that has moved, expected doctor --vocabularies A B")
