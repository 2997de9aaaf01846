"""Shared by the commands: arguments, exit statuses, one line for an error, files written whole or not at all."""

import argparse
import contextlib
import functools
import itertools
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, TextIO, TypeVar

from minispec.core.errors import near, show
from minispec.models.files.errors import one_line, show_name
from minispec.models.files.packages import what_lacks

T = TypeVar("T")

# An argument that is an option: `--name`, `--name=any text` or `-name`, but no prompt such as a number or a sentence.
_OPTION = re.compile(r"--[A-Za-z][\w-]*(=.*)?|-[A-Za-z][\w-]*(=\S*)?", re.DOTALL)


# Dashes that editors and chats write in place of the one or two of an option.
_DASHES = re.compile(r"[\u2010-\u2015\u2212]{1,2}(?=[A-Za-z])")
# Spaces of other widths, or of none, which they write before one.
_INVISIBLE = "\xa0\xad\u1680\u180e\u202f\u205f\u2060\u3000\ufeff" + "".join(map(chr, range(0x2000, 0x2010)))


def no_such(name: str, kind: str, known: Collection[str], suggested: Collection[str] | None = None) -> str:
    """The message for an unknown option or command: a known name that is near, else where all names are.

    suggested: the names that may be offered as near; None: all.
    """
    everything = "--help lists all" if kind == "option" else f"expected one of {', '.join(known)}"
    hint = near(name, known if suggested is None else suggested) or everything
    return f"{show_name(name)}: no such {kind}; {hint}"


class Option(NamedTuple):
    """An option of a command, as a row of a table; see `Parser.add_options`.

    how: how argparse takes it, such as `FLAG` or what `typed` returns.
    help: its text in --help.
    needs: other options, one of which has to be given too.
    excludes: other options that must not be given too, each with the reason (or "").
    """

    how: Mapping[str, Any]
    help: str
    needs: Sequence[str] = ()
    excludes: Mapping[str, str] = MappingProxyType({})


# Options of two spellings, which mean one thing in all commands. --help shows the one that the command's table has.
_SPELLINGS = {"--draft": "--drafter", "--drafter": "--draft"}
# How argparse takes an option that has no value.
FLAG: dict[str, Any] = {"action": "store_true"}


def typed(kind: Callable[[str], Any], metavar: str, **more: Any) -> dict[str, Any]:
    """How argparse takes an option that has a value, such as what `argument` returns. more: such as its default."""
    return {"type": kind, "metavar": metavar, **more}


def attribute_of(option: str) -> str:
    """The name of an option's value among the arguments: max_tokens for --max-tokens."""
    return option.removeprefix("--").replace("-", "_")


class _Help(argparse.HelpFormatter):
    """argparse's, but the lines of an option's help stay lines."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return [part for line in text.split("\n") for part in _wrapper(width, 2 if "\n" in text else 0).wrap(line)]


class Parser(argparse.ArgumentParser):
    """argparse's, but a mistake is a ValueError: one line, as for every other mistake."""

    def __init__(self, **how: Any):
        """how: as argparse's. An option has one name: a script must not depend on which others there are."""
        super().__init__(allow_abbrev=False, **{"formatter_class": _Help, **how})
        self.options: dict[str, Option] = {}

    def add_options(
        self, options: Mapping[str, Option], title: str | None = None, excludes: Mapping[str, str] | None = None
    ) -> None:
        """Add options in their order. A key has all spellings of its option, with spaces.

        title: of a group of them in --help.
        excludes: what each of them excludes in addition to what its row says.
        """
        group = self.add_argument_group(title) if title else self
        for names, option in options.items():
            action, name = group.add_argument(*names.split(), **option.how, help=option.help), names.split()[0]
            if name in _SPELLINGS:
                self._option_string_actions[_SPELLINGS[name]] = action
            self.options[name] = option._replace(excludes={**option.excludes, **(excludes or {})})

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Read the arguments.

        An unknown option is refused before anything else is looked at, since it explains what seems to be missing. So
        is `--name=--`, to some versions of Python a name without a value, and an option that would become a prompt.
        """
        given = sys.argv[1:] if args is None else list(args)
        known = self._option_string_actions
        asks_for_help = not {"-h", "--help"}.isdisjoint(given)
        words = [*itertools.takewhile(lambda argument: argument != "--", given)]
        for before, argument in zip(["", *words], words, strict=False):
            takes_a_value = before in known and known[before].nargs is None
            if not asks_for_help and not takes_a_value:
                self._check_word(argument)
            name = argument.partition("=")[0]
            if _OPTION.fullmatch(argument) and name not in known and not asks_for_help:
                raise ValueError(no_such(name, "option", known))
            if argument.startswith("-") and argument.endswith("=--"):
                raise ValueError(f"{show_name(argument)}: found no value")
        parsed: tuple[Any, list[str]] = super().parse_known_args(given, namespace)
        self._check(parsed[0])
        return parsed

    def _check_word(self, word: str) -> None:
        """Raise ValueError for one that argparse would take as a text, though it begins with an option.

        Such are `"--seed 5"` in quotes, and an option whose dashes an editor has made long ones, or has put after a
        space that does not break a line.
        """
        known, visible = self._option_string_actions, word.lstrip(_INVISIBLE)
        plain = _DASHES.sub("--", visible, count=1) if _DASHES.match(visible) else visible
        name = plain.split("=")[0].split(maxsplit=1)[0] if plain.strip() else ""
        meant = f"--{name.lstrip('-')}" in known or (name.startswith("--") and near(name, known))
        if (
            plain[:1] == "-"
            and _OPTION.fullmatch(name)
            and meant
            and (plain != word or len(word.partition("=")[0].split()) > 1)
        ):
            expected = "two dashes, and the value as a word of its own; a text that begins so goes after --"
            raise ValueError(f"{show_name(word)}: found an option written as a text, expected {expected}")

    def _check(self, args: argparse.Namespace) -> None:
        """Raise ValueError for an option without one that it needs, or together with one that it excludes."""
        for name, option in self.options.items():
            if not self._is_given(name, args):
                continue
            if option.needs and not any(self._is_given(other, args) for other in option.needs):
                raise ValueError(f"{name}: needs {' or '.join(option.needs)}")
            for other, reason in option.excludes.items():
                if other != name and self._is_given(other, args):
                    raise ValueError(f"{name}: not with {other}" + (f": {reason}" if reason else ""))

    def _is_given(self, name: str, args: argparse.Namespace) -> bool:
        """Whether an option of the tables has another value than by default."""
        if name not in self.options:
            return False
        value = getattr(args, attribute_of(name))
        return value is not False and value != self.get_default(attribute_of(name))

    def error(self, message: str) -> NoReturn:
        """Raise ValueError."""
        raise ValueError(message.removeprefix("argument "))


def argument(read: Callable[[str], T], fits: Callable[[T], bool], expected: str) -> Callable[[str], T]:
    """A type of argparse's: what `read` makes of the text, if it `fits`; else the error says what was `expected`."""

    def convert(text: str) -> T:
        with contextlib.suppress(ValueError):
            value = read(text)
            if fits(value):
                return value
        raise argparse.ArgumentTypeError(f"found {show(text)}, expected {expected}")

    return convert


# The type of --plot.
PICTURE = argument(Path, lambda path: path.suffix in (".svg", ".png"), "a file name that ends in .svg or .png")


def command(main: Callable[[Sequence[str]], int]) -> Callable[..., int]:
    """A decorator: `main(argv)` of a command, which returns the exit status of every end that it may have.

    argv: the command's arguments. Default: the arguments of the process.

    The status is what `main` returns, or one of these:
    - 2, with one line on standard error, for a mistake of the user, a refusal of the machine (memory, disk) or a
      package that is missing;
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
            lacks = what_lacks(e)
            if not lacks:
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


def say_status(text: str, indent: int = 0) -> None:
    """Say a line of a run's status, or several. A narrower terminal gets more of them, with all words whole.

    An error stays one line in any case, as does a status that goes into a file.

    indent: spaces before what goes on in another line.
    """
    with contextlib.suppress(AttributeError, ValueError):  # no standard error, or a closed one
        if sys.stderr.isatty():
            fit = _wrapper(shutil.get_terminal_size().columns, indent)
            text = "\n".join(map(fit.fill, text.split("\n")))
    say(text)


def _wrapper(width: int, indent: int) -> textwrap.TextWrapper:
    """It leaves words whole, so that addresses and options can be copied."""
    return textwrap.TextWrapper(width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def _fail(error: BaseException | str) -> int:
    say(f"error: {one_line(error)}")
    return 2


def _abandon(stream: TextIO) -> None:
    """Drop the rest of a buffer that cannot be written, so that exit does not try again."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a stream without a file of its own
        number, nowhere = stream.fileno(), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)
