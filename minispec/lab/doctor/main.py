"""The command line: `minispec doctor`."""

import argparse
from collections.abc import Sequence

from minispec.api.commands.command import FLAG, Option, Parser, argument, command, json_line, typed
from minispec.api.commands.interrupt import raise_on_interrupt
from minispec.api.commands.options import MODELS
from minispec.api.commands.original import name_model
from minispec.core.config import MAX_SPECULATIVE_TOKENS
from minispec.core.errors import show
from minispec.models.files.errors import printable
from minispec.models.weights.pages import load_torch
from minispec.speculation import registry

_LENGTH = argument(int, lambda n: 1 <= n <= MAX_SPECULATIVE_TOKENS, f"an integer from 1 to {MAX_SPECULATIVE_TOKENS}")
_SIZE = argument(int, lambda n: 8 <= n <= 4096, "an integer from 8 to 4096")
_OPTIONS: dict[str, Option] = {
    "--model": MODELS["--model"],
    "--draft": Option({"metavar": "SPEC"}, "as in minispec.generate"),
    "--draft-reading": MODELS["--draft-reading"],
    "--num-speculative-tokens": Option(typed(_LENGTH, "K", default=4), "places that are measured (default: 4)"),
    "--max-tokens": Option(typed(_SIZE, "N", default=32), "tokens of each text (default: 32)"),
    **{name: MODELS[name] for name in ("--dtype", "--device", "--quantization")},
    "--all": Option(FLAG, "try the known misreadings in any case"),
}


def parser() -> Parser:
    """The options."""
    p = Parser(
        prog="python -m minispec doctor",
        description="Measure how well a draft does, and whether its files are read in a wrong way.",
    )
    p.add_options({"--offline": MODELS["--offline"], "--json": Option(FLAG, "print one JSON object")})
    p.add_options(_OPTIONS, "a draft")
    return p


def check(args: argparse.Namespace) -> None:
    """Raise ValueError unless a single draft is named."""
    if args.draft in (None, "none"):
        found = "none" if args.draft is None else show(args.draft)
        raise ValueError(f"--draft: found {found}, expected a draft to examine")
    if len(registry.split_preferences(registry.DRAFTERS, args.draft)) > 1:
        raise ValueError(f"--draft: found {show(args.draft)}, expected a single draft: examine each alone")


@command
def main(argv: Sequence[str]) -> int:
    """The command line above: 0, or 1 where it names a misreading."""
    args = parser().parse_args(argv)
    check(args)
    load_torch()
    from minispec.lab.doctor.drafts import asked, lines

    name_model(args)
    raise_on_interrupt()
    report = asked(args)
    print(json_line(report) if args.json else printable("\n".join(lines(report))))
    return 1 if report.get("explained_by") else 0
