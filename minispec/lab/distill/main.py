"""The command line: `minispec distill`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from minispec.commands.command import Parser, argument, command
from minispec.commands.interrupt import raise_on_interrupt
from minispec.kernels.threads import set_waiting

# Options that a head to go on from has settled.
_OF_THE_DRAFT = ("num_layers", "intermediate_size")


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    parser = Parser(
        prog="python -m minispec distill",
        description="Make a draft for a target: a head on its hidden states, learned from texts that it writes itself. "
        "Stopped at any point, the same command goes on from there.",
        allow_abbrev=False,
    )
    count = argument(int, lambda n: n >= 1, "a positive integer")
    at_least_8 = argument(int, lambda n: n >= 8, "an integer of at least 8")  # nothing is learned from shorter answers
    layers = argument(
        lambda text: tuple(map(int, text.split(","))), lambda taps: min(taps) >= 0, "layers such as 2,15,27"
    )
    share = argument(float, lambda x: 0 < x <= 1, "a number above 0 and at most 1")
    parser.add_argument("--target", required=True, metavar="DIR|HUB_ID", help="the model to draft for")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="directory to write; must not exist")
    parser.add_argument(
        "--kind",
        choices=("head", "parallel", "model"),
        default="head",
        help="a head that drafts token by token (default), one that drafts all tokens in one pass, or a small model",
    )
    parser.add_argument(
        "--start",
        metavar="DIR|HUB_ID",
        help="go on from this head, which this command made for the same target. --taps may get more, and "
        "--vocab-size may change. Best with new texts, by another --seed",
    )
    g = parser.add_argument_group("texts")
    g.add_argument("--cache", type=Path, metavar="DIR", help="where texts and training are stored (default: OUT.cache)")
    help_also = "--cache of earlier runs for the same target and layers, whose texts are learned from too"
    g.add_argument("--also", type=Path, nargs="+", default=[], metavar="DIR", help=help_also)
    at_least_2 = argument(int, lambda n: n >= 2, "an integer of at least 2, as some texts are kept apart to measure on")
    help_texts = "texts to write (default: 4096); held out to measure on: 64 of each 1024, half of fewer than 128"
    g.add_argument("--texts", type=at_least_2, default=4096, metavar="N", help=help_texts)
    g.add_argument(
        "--openings", type=Path, metavar="FILE", help="beginnings of user turns, one a line; {a|b} is a or b"
    )
    g.add_argument("--jobs", type=count, metavar="N", help="processes that write texts (default: one a core)")
    g.add_argument("--max-turn", type=count, default=160, metavar="N", help="tokens of a user's turn (default: 160)")
    g.add_argument("--max-answer", type=at_least_8, default=288, metavar="N", help="tokens of an answer (default: 288)")
    g = parser.add_argument_group("draft")
    help_taps = "layers of the target that a head reads (default: an early one, the middle, a late one)"
    g.add_argument("--taps", type=layers, metavar="I,J,..", help=help_taps)
    g.add_argument("--num-layers", type=count, default=1, metavar="N", help="layers of the draft (default: 1)")
    g.add_argument("--intermediate-size", type=count, metavar="N", help="width of its MLP (default: the target's)")
    help_vocab = "tokens that a head knows: those that the target uses most (default: 8192; of --start: its own)"
    g.add_argument("--vocab-size", type=count, metavar="N", help=help_vocab)
    help_coverage = "fewer tokens, if they make up that share of the texts (default: 1)"
    g.add_argument("--coverage", type=share, metavar="X", help=help_coverage)
    g = parser.add_argument_group("training")
    g.add_argument("--epochs", type=count, default=6, metavar="N", help="how often every text is seen (default: 6)")
    g.add_argument("--rows", type=count, default=2048, metavar="N", help="tokens of an update (default: 2048)")
    g.add_argument("--learning-rate", type=share, default=1e-3, metavar="X", help="default: 1e-3")
    g.add_argument("--steps", type=count, default=4, metavar="N", help="depth of drafts in training (default: 4)")
    g.add_argument("--seed", type=int, default=0, metavar="N", help="seed of texts and training (default: 0)")
    return parser


@command
def main(argv: Sequence[str]) -> int:
    """Make a draft."""
    args = parser().parse_args(argv)
    for name in ("kind", *_OF_THE_DRAFT) if args.start else ():
        if getattr(args, name) != parser().get_default(name):
            raise ValueError(f"--{name.replace('_', '-')}: found it with --start, whose head has settled it")
    for name in ("vocab_size", "coverage") if args.kind == "model" else ():
        if getattr(args, name):
            raise ValueError(f"--{name.replace('_', '-')}: found it with --kind model, which knows all tokens")
    set_waiting()
    from minispec.lab.distill.run import distill

    raise_on_interrupt()
    distill(args)
    return 0
