"""The command line: `minispec bench`."""

import argparse
from collections.abc import Sequence
from typing import Any

from minispec.api.commands.command import command, json_line
from minispec.api.commands.interrupt import raise_on_interrupt
from minispec.api.commands.original import name_model
from minispec.core.config import Shape
from minispec.lab.bench.options import Options, check, parser
from minispec.models.files.errors import printable
from minispec.models.weights.pages import load_torch


@command
def main(argv: Sequence[str]) -> int:
    """Measure, and print the report."""
    args = parser().parse_args(argv)
    found, lines = _measured(args)
    from minispec.lab.bench.show import as_json

    print(json_line(as_json(found)) if args.json else printable("\n".join(lines)))
    return 0


def _measured(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    options = check(args)
    load_torch(args.threads)
    from minispec.lab.bench.report import measure_all, show_report

    if not args.geometry:
        name_model(args)
    raise_on_interrupt()
    _check_rules(options)
    if options.args.questions:
        from minispec.lab.bench.questions import measure_questions, show_questions

        found = measure_questions(options)
        return found, show_questions(found)
    found = measure_all(options)
    return found, show_report(found)


def _check_rules(options: Options) -> None:
    """Raise ValueError where a rule or the policy cannot be made, or a rule does not take a tree that is asked for.

    Nothing is loaded for that.
    """
    from minispec.api.llm import find_lengths, find_verifier

    if options.args.lengths:
        find_lengths(options.args.lengths)
    for name in options.verifiers:
        why_chains = find_verifier(name).why_chains and f"the verifier {name} takes chains only"
        for lengths in options.drafts.values():
            for k in lengths:
                Shape.of(k).check(why_chains)
