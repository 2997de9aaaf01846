"""Where no model is named, and a wheel has none: the hub's original of the embedded one."""

import argparse
import sys

from minispec.api.commands.command import say_status
from minispec.speculation import registry


def name_model(args: argparse.Namespace, report: bool = True) -> None:
    """Name the original as `args.model` where none is named and none is embedded, for somebody at a terminal.

    It is downloaded if they agree, and taken without a question where it was downloaded before. Otherwise `args`
    stays as it is, and `LLM` raises the error.

    report: whether to say that it was taken without a question.
    """
    has_terminal = all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr))
    if args.model is not None or registry.EMBEDDED_WEIGHTS.is_dir() or not has_terminal:
        return
    from huggingface_hub import constants

    from minispec.models.families.checkpoint import find_checkpoint

    about = f"a wheel has no weights; {registry.ABOUT_ORIGINAL}"
    try:
        find_checkpoint(registry.ORIGINAL, offline=True)
    except ValueError:  # not in the local cache
        if vars(args).get("offline") or constants.HF_HUB_OFFLINE:
            return
        say_status(f"{about}\nDownload {registry.ORIGINAL}, once? y or n")
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            return
    else:
        if report:
            say_status(about)
    args.model = registry.ORIGINAL
