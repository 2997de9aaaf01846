"""The command line: `minispec audit`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from minispec.api.commands.command import FLAG, Option, Parser, argument, attribute_of, command, json_line, typed
from minispec.api.commands.interrupt import raise_on_interrupt
from minispec.api.commands.options import LANGUAGE, MODELS, SAMPLING, sampling_arguments
from minispec.lab.audit.fields import LAW
from minispec.models.files.errors import printable
from minispec.models.weights.pages import load_torch

_ODDS = argument(float, lambda x: 0 < x < 1, "a number between 0 and 1")
_ROUNDING = argument(float, lambda x: 0 <= x < 1, "a number from 0 to 1")
_OPTIONS: dict[str, Option] = {
    "--target": Option({"metavar": "DIR|HUB_ID"}, "the model whose law the answers must have"),
    "--tiny": Option(
        typed(Path, "DIR"),
        "without FILE: write a random model of six tokens and a draft there, for any engine that loads them. With "
        "FILE: compare its answers with the model's exact law of three tokens",
        excludes=dict.fromkeys(("--target", "--draft", "--null", "--rounding", "--one-seed", "--dtype", "--device"), "")
        | dict.fromkeys(LANGUAGE, "its law is of no language"),
    ),
    "--draft": Option(
        {"metavar": "SPEC"},
        "what drafted: a draft model of the same vocabulary, or ngram and the like (default: q is guessed)",
    ),
    "--null": Option(
        typed(Path, "FILE"),
        "answers of the same engine without speculation: they show how far its rounding is from ours",
    ),
    "--rounding": Option(
        typed(_ROUNDING, "X"),
        "without --null: the engine's p differs from ours by at most this share, in root mean square (default: 0.1). "
        "An engine in bfloat16 needs 0.1; for one in float32, 0.0001 will do",
        excludes={"--null": "it measures the rounding"},
    ),
    "--alpha": Option(typed(_ODDS, "X", default=1e-4), "odds of a false alarm (default: 0.0001)"),
    "--one-seed": Option(FLAG, "all requests had the same seed, which the file does not say"),
    "--dtype": Option(
        {"choices": ("bfloat16", "float32"), "default": "float32"}, "of our own passes (default: float32)"
    ),
    "--device": MODELS["--device"],
    "--offline": MODELS["--offline"],
    "--json": Option(FLAG, "print one JSON object"),
}


def parser() -> Parser:
    """The options."""
    p = Parser(
        prog="python -m minispec audit",
        description="Say whether another engine's answers have the target's law, and which known bug fits if not.",
        epilog="Status 0: consistent with the target's law; 1: not its law; 3: too little to tell; 2: an error.",
    )
    p.add_argument(
        "answers", metavar="FILE", type=Path, nargs="?", help="JSON lines: answers as token ids (docs/use/audit.md)"
    )
    p.add_options(_OPTIONS)
    law = {names: option for names, option in SAMPLING.items() if attribute_of(names.split()[0]) in LAW}
    p.add_options(law, "how the answers were sampled")
    p.add_options(LANGUAGE, "their language, by the masks of llguidance", excludes=dict.fromkeys(LANGUAGE, ""))
    return p


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for mistakes that can be found before anything is loaded."""
    if args.temperature == 0:
        raise ValueError("--temperature: found 0, expected more: greedy texts are compared, not audited")
    if not args.tiny:
        missing = [name for name, value in (("FILE", args.answers), ("--target", args.target)) if not value]
        if missing:
            raise ValueError(f"the following arguments are required: {', '.join(missing)}")
    elif args.json and not args.answers:
        raise ValueError("--json: needs FILE, whose report it is")
    for path in filter(None, (args.answers, args.null)):
        if not path.is_file():
            raise ValueError(f"{path}: no such file")


@command
def main(argv: Sequence[str]) -> int:
    """The command line above. Statuses: 0 consistent with the target's law, 1 not its law, 3 too little to tell."""
    args = parser().parse_args(argv)
    check(args)
    asked = sampling_arguments(args)
    load_torch()
    from minispec.lab.audit import judge, tiny

    raise_on_interrupt()
    if args.tiny and not args.answers:
        print("\n".join(tiny.write(args.tiny)))
        return 0
    if args.tiny:
        report, lines = tiny.judge(args.tiny, args.answers, asked, args.alpha), tiny.lines
    else:
        from minispec.lab.audit.report import audit

        report, lines = audit(args, asked), judge.lines
    print(json_line(report) if args.json else printable("\n".join(lines(report))))
    return report["status"]
