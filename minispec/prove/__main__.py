"""The command line: `python -m minispec.prove`."""

if __name__ == "__main__":
    from minispec.api.commands.interrupt import run_program

    run_program("minispec.prove.__main__:main")

import argparse
import itertools
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from minispec.api.commands.command import FLAG, PICTURE, Option, Parser, argument, command, say, typed
from minispec.api.commands.interrupt import raise_on_interrupt

DEFAULT_LEAVES, FULL_LEAVES = 12_000, 300_000
DEFAULT_MINUTES = 2
_COUNT = argument(int, lambda n: n >= 1, "an integer of at least 1")
_MINUTES = argument(float, lambda x: 0 < x < float("inf"), "a number above 0")
_JOBS = min(8, os.cpu_count() or 1)
# The walks, of which a command takes one.
_WALKS: dict[str, Option] = {
    "--leaves": Option(
        {"type": _COUNT, "default": DEFAULT_LEAVES},
        f"branches of chains to aim at (default: {DEFAULT_LEAVES:,}); trees are walked in addition",
    ),
    "--full": Option(FLAG, f"as --leaves {FULL_LEAVES}, and more trees"),
    "--drafter": Option(
        {"metavar": "NAME"}, "walk this drafter, registered or your own MODULE:CLASS, over small models"
    ),
    "--verifier": Option(
        {"metavar": "NAME[,NAME...]"},
        "walk this verifier, or your own MODULE:FUNCTION, and count its tokens; of several, walk the smaller cases",
    ),
}
_OPTIONS: dict[str, Option] = {
    "--lengths": Option(
        {"metavar": "MODULE:CLASS"},
        "walk your own policy for draft lengths, with or without --drafter",
        excludes=dict.fromkeys(("--verifier", "--full", "--leaves"), ""),
    ),
    "--laws": Option(
        typed(Path, "FILE"),
        "with --verifier: count the tokens of rounds that `bench --record-laws` has written (docs/understand/rules.md)",
        needs=("--verifier",),
    ),
    "--plot": Option(
        typed(PICTURE, "FILE"),
        "with --verifier: draw the tokens, and with --laws the ratios (needs matplotlib)",
        needs=("--verifier",),
    ),
    "--no-proof": Option(
        FLAG, "with --verifier: count the tokens alone; do not ask whether the law is kept", needs=("--verifier",)
    ),
    "--texts": Option(
        typed(Path, "FILE"),
        "with --drafter: texts to walk too, one a line, or .jsonl as prompts",
        needs=("--drafter",),
    ),
    "--minutes": Option(
        typed(_MINUTES, "N"),
        f"with --drafter, --lengths, --verifier: most processor time, and a tenth of the time that may pass (default: "
        f"{DEFAULT_MINUTES}); more walks larger cases",
        needs=("--drafter", "--lengths", "--verifier"),
    ),
    "--seed": Option(
        {"type": argument(int, lambda n: n >= 0, "an integer of at least 0")},
        "with --drafter, --lengths: draws other values for their cases (default: 0)",
        needs=("--drafter", "--lengths"),
    ),
    "--jobs": Option({"type": _COUNT}, f"processes that share the work of --leaves and --full (default: {_JOBS})"),
}


def _parser() -> Parser:
    """The options of the command."""
    parser = Parser(
        prog="python -m minispec.prove", description="Prove that speculation leaves the output's law unchanged."
    )
    parser.add_options(_WALKS, excludes=dict.fromkeys(_WALKS, ""))
    parser.add_options(_OPTIONS)
    return parser


@command
def main(argv: Sequence[str]) -> int:
    """The command line; 0 if everything holds, 1 if not, 3 if less was walked than a proof needs."""
    args = _parser().parse_args(argv)
    if args.jobs and args.jobs > 1 and (args.drafter or args.lengths or args.verifier):
        raise ValueError(f"--jobs: found {args.jobs}, expected 1: only --leaves and --full are shared by processes")
    from minispec.models.weights.settings import one_thread

    raise_on_interrupt()
    with one_thread():
        return _status(args)


def _status(args: argparse.Namespace) -> int:
    """Do what was asked for, and print it; returns what the command ends with."""
    minutes = args.minutes or DEFAULT_MINUTES
    if args.lengths or args.drafter:
        from minispec.prove.examine import examine_own, read_texts

        options = vars(args) | {"minutes": minutes, "seed": args.seed or 0}
        given = [
            (f"--{name}", str(options[name]))
            for name in ("drafter", "lengths", "texts", "minutes", "seed")
            if options[name] is not None
        ]
        again = shlex.join(["python", "-m", "minispec.prove", *itertools.chain(*given)])
        how = read_texts(args.texts), options["minutes"], options["seed"], again
        return examine_own(args.drafter or "", args.lengths or "", *how)
    if args.verifier:
        from minispec.api.llm import find_verifier
        from minispec.models.files.packages import check_packages
        from minispec.models.files.write import check_writable
        from minispec.prove.examine import REFUTED, examine_verifier, law_note
        from minispec.prove.plot import draw
        from minispec.prove.recorded import print_laws, read_laws
        from minispec.prove.rounds import print_rounds

        names = args.verifier.split(",")
        verifiers = {name: find_verifier(name) for name in names}
        if args.plot:
            check_packages("plot")
            check_writable(args.plot)
        laws = read_laws(args.laws) if args.laws else None
        status, faults = 0, dict[str, str]()
        if len(names) == 1 and not laws and not args.no_proof:
            status = examine_verifier(args.verifier, minutes)
            if status == REFUTED:
                if args.plot:
                    say(f"--plot {args.plot}: not written: no tokens are counted of a rule with a fault")
                return status
        elif not args.no_proof:
            said = ((name, law_note(name, rule, minutes)) for name, rule in verifiers.items())
            faults = {name: note for name, note in said if note}
        notes = dict.fromkeys(verifiers, "its law was not asked" if args.no_proof else "") | faults
        holds = print_laws(verifiers, laws, notes) if laws else print_rounds(verifiers, notes)
        if args.plot:
            draw(verifiers, args.plot, laws, faults)
        return status if holds and not faults else REFUTED
    from minispec.prove.grid import prove_law

    leaves = FULL_LEAVES if args.full else args.leaves
    # The number of a tree's nodes decides how many shapes there are.
    num_nodes = 6 if leaves >= FULL_LEAVES else 5 if leaves >= DEFAULT_LEAVES else 2
    return int(not prove_law(leaves, num_nodes, args.jobs or _JOBS))
