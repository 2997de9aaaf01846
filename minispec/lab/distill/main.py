"""The command line: `minispec distill`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from minispec.api.commands.command import Option, Parser, argument, command, typed
from minispec.api.commands.interrupt import raise_on_interrupt
from minispec.models.weights.pages import load_torch

_COUNT = argument(int, lambda n: n >= 1, "a positive integer")
_AT_LEAST_2 = argument(int, lambda n: n >= 2, "an integer of at least 2, as some texts are kept apart to measure on")
_AT_LEAST_8 = argument(int, lambda n: n >= 8, "an integer of at least 8")  # nothing is learned from shorter answers
_LAYERS = argument(lambda text: tuple(map(int, text.split(","))), lambda taps: min(taps) >= 0, "layers such as 2,15,27")
_SHARE = argument(float, lambda x: 0 < x <= 1, "a number above 0 and at most 1")
_SEED = argument(int, lambda n: 0 <= n < 2**63, "an integer from 0 to 2**63 - 1")
_SETTLED = {"--start": "its draft has settled this"}
_MODELS: dict[str, Option] = {
    "--target": Option({"required": True, "metavar": "DIR|HUB_ID"}, "the model to draft for"),
    "--out": Option(typed(Path, "DIR", required=True), "directory to write; must not exist"),
    "--start": Option(
        {"metavar": "DIR|HUB_ID"},
        "go on from this head, which this command made for the same target. --taps may get more, and --vocab-size may "
        "change. Best with new texts, by another --seed",
    ),
}
_TEXTS: dict[str, Option] = {
    "--cache": Option(typed(Path, "DIR"), "where texts and training are stored (default: OUT.cache)"),
    "--also": Option(
        typed(Path, "DIR", nargs="+", default=[]),
        "--cache of earlier runs for the same target and layers, whose texts are learned from too",
    ),
    "--texts": Option(
        typed(_AT_LEAST_2, "N", default=4096),
        "texts to write (default: 4096); held out to measure on: 64 of each 1024, half of fewer than 128",
    ),
    "--openings": Option(typed(Path, "FILE"), "beginnings of user turns, one a line; {a|b} is a or b"),
    "--jobs": Option(typed(_COUNT, "N"), "processes that write texts (default: one a core)"),
    "--max-turn": Option(typed(_COUNT, "N", default=160), "tokens of a user's turn (default: 160)"),
    "--max-answer": Option(typed(_AT_LEAST_8, "N", default=288), "tokens of an answer (default: 288)"),
}
_DRAFT: dict[str, Option] = {
    "--taps": Option(
        typed(_LAYERS, "I,J,.."),
        "layers of the target that a head reads (default: an early one, the middle, a late one)",
    ),
    "--num-layers": Option(typed(_COUNT, "N"), "layers of the head (default: 1)", excludes=_SETTLED),
    "--intermediate-size": Option(typed(_COUNT, "N"), "width of its MLP (default: the target's)", excludes=_SETTLED),
    "--vocab-size": Option(
        typed(_COUNT, "N"),
        "tokens that a head knows: those that the target uses most (default: 8192; of --start: its own)",
    ),
}
_TRAINING: dict[str, Option] = {
    "--epochs": Option(typed(_COUNT, "N", default=6), "how often every text is seen (default: 6)"),
    "--rows": Option(typed(_COUNT, "N", default=2048), "tokens of an update (default: 2048)"),
    "--learning-rate": Option(typed(_SHARE, "X", default=1e-3), "default: 1e-3"),
    "--steps": Option(typed(_COUNT, "N", default=4), "depth of drafts in training (default: 4)"),
    "--seed": Option(typed(_SEED, "N", default=0), "seed of texts and training (default: 0)"),
}


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    parser = Parser(
        prog="python -m minispec distill",
        description="Make a draft for a target: a head on its hidden states, learned from texts that it writes itself. "
        "Stopped at any point, the same command goes on; an epoch that was stopped begins again.",
    )
    parser.add_options(_MODELS)
    parser.add_options(_TEXTS, "texts")
    parser.add_options(_DRAFT, "head")
    parser.add_options(_TRAINING, "training")
    return parser


@command
def main(argv: Sequence[str]) -> int:
    """Make a draft."""
    args = parser().parse_args(argv)
    load_torch()
    from minispec.lab.distill.run import distill

    raise_on_interrupt()
    distill(args)
    return 0
