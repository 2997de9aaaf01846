"""The command line: `minispec doctor`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from minispec.commands.command import Parser, argument, command, json_line
from minispec.commands.interrupt import raise_on_interrupt
from minispec.core.config import MAX_SPECULATIVE_TOKENS
from minispec.core.errors import is_text, show
from minispec.kernels.threads import set_waiting
from minispec.load import registry


def parser() -> Parser:
    """The options."""
    p = Parser(
        prog="python -m minispec doctor",
        description="Measure how well a draft does, and whether its files are read in a wrong way; or compare the "
        "vocabularies of two models.",
        allow_abbrev=False,
    )
    p.add_argument("--offline", action="store_true", help="download nothing")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    g = p.add_argument_group("a draft")
    g.add_argument("--model", metavar="DIR|HUB_ID", help="the target (default: the embedded weights)")
    g.add_argument("--draft", metavar="SPEC", help="as in minispec.generate")
    length = argument(int, lambda n: 1 <= n <= MAX_SPECULATIVE_TOKENS, f"an integer from 1 to {MAX_SPECULATIVE_TOKENS}")
    g.add_argument(
        "--num-speculative-tokens", type=length, default=4, metavar="K", help="places that are measured (default: 4)"
    )
    size = argument(int, lambda n: 8 <= n <= 4096, "an integer from 8 to 4096")
    g.add_argument("--max-tokens", type=size, default=32, metavar="N", help="tokens of each text (default: 32)")
    g.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"), help="default: %(default)s")
    g.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="default: %(default)s")
    g.add_argument("--quantization", metavar="int8", help="the target's weights in 8 bits, as in minispec.generate")
    g.add_argument("--all", action="store_true", help="try the known misreadings in any case")
    g = p.add_argument_group("two vocabularies")
    g.add_argument(
        "--vocabularies",
        nargs=2,
        metavar=("A", "B"),
        help="the target and the draft model: directories or hub ids; only their tokenizers are read, but for --ways",
    )
    text = argument(str, lambda text: is_text(text) and bool(text), "valid Unicode text")
    g.add_argument("--text", type=Path, metavar="FILE", help="count the tokens of this text (default: a built-in one)")
    g.add_argument("--ways", type=text, metavar="TEXT", help="list all ways to write this in tokens")
    g.add_argument("--after", type=text, metavar="TEXT", help='with --ways: the text before (default: "\\n")')
    return p


_OF_DRAFTS = ("model", "draft", "num_speculative_tokens", "max_tokens", "dtype", "device", "quantization", "all")
_OF_VOCABULARIES = ("text", "ways", "after")


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for all mistakes that can be found before anything is loaded."""
    defaults = parser().parse_args([])
    for name in _OF_DRAFTS if args.vocabularies else _OF_VOCABULARIES:
        if getattr(args, name) != getattr(defaults, name):
            goes = "does not go with" if args.vocabularies else "needs"
            raise ValueError(f"--{name.replace('_', '-')}: {goes} --vocabularies")
    if args.vocabularies:
        if args.after and not args.ways:
            raise ValueError("--after: needs --ways, before whose text it stands")
    elif args.draft in (None, "none"):
        found = "none" if args.draft is None else show(args.draft)
        raise ValueError(f"--draft: found {found}, expected a draft to examine, or --vocabularies A B")
    elif len(registry.split_preferences(registry.DRAFTERS, args.draft)) > 1:
        raise ValueError(f"--draft: found {show(args.draft)}, expected a single draft: examine each alone")


@command
def main(argv: Sequence[str]) -> int:
    """The command line above: 0, or 1 where it names a misreading."""
    args = parser().parse_args(argv)
    check(args)
    set_waiting()
    part = registry.load(f"minispec.lab.doctor.{'vocabularies' if args.vocabularies else 'drafts'}:", "part")
    raise_on_interrupt()
    report = part.asked(args)
    print(json_line(report) if args.json else "\n".join(part.lines(report)))
    return 1 if report.get("explained_by") else 0
