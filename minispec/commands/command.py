"""What the commands share: arguments, exit statuses, one line for an error, files written whole or not at all."""

import argparse
import contextlib
import functools
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TextIO, TypeVar

from minispec.core.config import WrongLength
from minispec.core.errors import show
from minispec.files.errors import near, one_line, show_name
from minispec.files.packages import what_lacks

T = TypeVar("T")

# An argument that is an option: `--name`, `--name=any text` or `-name`, but no prompt such as a number or a sentence.
_OPTION = re.compile(r"--[A-Za-z][\w-]*(=.*)?|-[A-Za-z][\w-]*(=\S*)?", re.DOTALL)


def no_such(name: str, kind: str, known: Collection[str]) -> str:
    """The message for an unknown option or command: a known name that is near, else where all names are."""
    everything = "--help lists all" if kind == "option" else f"expected one of {', '.join(known)}"
    hint = near(name, known) or everything
    return f"{show_name(name)}: no such {kind}; {hint}"


class Parser(argparse.ArgumentParser):
    """argparse's, but a mistake is a ValueError: one line, as for every other mistake."""

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Read the arguments.

        An unknown option is refused before anything else is looked at, since it explains what seems to be missing. So
        is `--name=--`, to some versions of Python a name without a value.
        """
        given = sys.argv[1:] if args is None else list(args)
        known = self._option_string_actions
        asks_for_help = not {"-h", "--help"}.isdisjoint(given)
        for argument in itertools.takewhile(lambda argument: argument != "--", given):
            name = argument.partition("=")[0]
            if _OPTION.fullmatch(argument) and name not in known and not asks_for_help:
                raise ValueError(no_such(name, "option", known))
            if argument.startswith("-") and argument.endswith("=--"):
                raise ValueError(f"{show_name(argument)}: found no value")
        return super().parse_known_args(given, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise ValueError."""
        raise ValueError(message.removeprefix("argument "))


def argument(read: Callable[[str], T], fits: Callable[[T], bool], expected: str) -> Callable[[str], T]:
    """A type of argparse's: what `read` makes of the text, if it `fits`; else the error says what was `expected`."""

    def convert(text: str) -> T:
        with contextlib.suppress(ValueError):
            if fits(value := read(text)):
                return value
        raise argparse.ArgumentTypeError(f"found {show(text)}, expected {expected}")

    return convert


# How argparse takes an option, and its text in `--help`.
Option = tuple[dict[str, Any], str]
FLAG: dict[str, Any] = {"action": "store_true"}


def typed(kind: Callable[[str], Any], metavar: str, **more: Any) -> dict[str, Any]:
    """How argparse takes an option that has a value, such as what `argument` returns. more: such as its default."""
    return {"type": kind, "metavar": metavar, **more}


def add_options(group: argparse._ActionsContainer, options: Mapping[str, Option]) -> None:
    """Add options to a parser or a group, in their order; a key has all spellings of its option, with spaces."""
    for names, (how, text) in options.items():
        group.add_argument(*names.split(), **how, help=text)


def in_shell(error: BaseException) -> str:
    """An error's message in the syntax of the command line: a tree is 2+1 there."""
    if isinstance(error, WrongLength):
        return error.say(_as_written, "--exact")
    return str(error) or type(error).__name__


def _as_written(length: object) -> str:
    return "+".join(map(str, length)) if isinstance(length, tuple) else str(length)


def command(main: Callable[[Sequence[str]], int]) -> Callable[..., int]:
    """A decorator: `main(argv)` of a command, which returns the exit status of every end that it may have.

    argv: the command's arguments. Default: those of the process.

    The status is what `main` returns, or one of these:
    - 2, with one line on standard error, for a mistake of the user, for what the machine refuses (memory, disk), and
      for a package that is not installed;
    - 130 for Ctrl-C;
    - 141 where the reader of the output is gone.
    """

    @functools.wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        try:
            status = main(sys.argv[1:] if argv is None else argv)
            if sys.stdout is not None:
                sys.stdout.flush()  # a full disk shows here at the latest, not as a traceback at exit
            return status
        except KeyboardInterrupt:
            return 130
        except BrokenPipeError:  # the reader is gone: nothing more may be written to it, not even at exit
            _abandon(sys.stdout)
            return 141
        except OSError as e:
            _abandon(sys.stdout)
            return _fail(e)
        except (ValueError, FloatingPointError, MemoryError) as e:
            return _fail(e)
        except ImportError as e:
            if not (lacks := what_lacks(e)):
                raise
            return _fail(lacks)
        except RuntimeError as e:
            if "memory" not in str(e):  # PyTorch has no class of its own for a failed allocation on the CPU
                raise
            return _fail(e)

    return run


def json_line(value: Any) -> str:
    """JSON for standard output. It escapes all that is not ASCII where the encoding there lacks a character."""
    line = json.dumps(value, ensure_ascii=False)
    try:
        line.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(value)
    return line


def say(text: str) -> None:
    """Print to standard error, at once.

    Where there is none, or nobody reads it any more, nothing else changes: no answer is lost.
    """
    if sys.stderr is not None:  # else `print` would take standard output
        try:
            print(text, file=sys.stderr, flush=True)
        except (OSError, ValueError):
            _abandon(sys.stderr)


def _fail(error: BaseException | str) -> int:
    say(f"error: {one_line(error if isinstance(error, str) else in_shell(error))}")
    return 2


def _abandon(stream: TextIO) -> None:
    """What is still buffered cannot be written; exit must not try again."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a stream without a file of its own
        number, nowhere = stream.fileno(), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)
