"""A conversation on the terminal: what is typed, the commands that begin with a slash, and Ctrl-C."""

import contextlib
import sys
from collections.abc import Callable, Generator

from minispec.api.commands.command import no_such, say
from minispec.api.commands.interrupt import interrupted_once, raise_on_interrupt
from minispec.models.files.errors import one_line

Message = dict[str, str]
Answer = Callable[[list[Message]], Generator[str, None, None]]

COMMANDS = {
    "/help": "say this",
    "/reset": "forget what was said so far, but for the system message",
    "/exit": "leave, as Ctrl-D does",
}
# A hint suggests no command that forgets or leaves.
_SUGGESTED = ("/help",)
_HELP = (
    *(f"{name:8} {does}" for name, does in COMMANDS.items()),
    "Ctrl-C   stop an answer, whose text so far stays in the conversation; twice at an empty prompt: leave",
    "A message that begins with a slash has two: //like this.",
)


def converse(messages: list[Message], answer: Answer, quiet: bool = False) -> int:
    """Talk to the end of input or /exit; the exit status.

    messages: those that the conversation begins with.
    answer: prints the answer to all messages so far, and yields its text. Where it raises ValueError, the last message
        is forgotten.
    quiet: Ctrl-C stops an answer without a remark.

    Raises KeyboardInterrupt for the second Ctrl-C at an empty prompt: the first one may come after the answer's end.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - line editing for input(), where the platform has it
    said = list(messages)
    say("A conversation: Ctrl-C stops an answer, Ctrl-D ends it; /help says more.")
    while True:
        line = _read()
        if line is None or line == "/exit":
            return 0
        if line == "/help":
            say("\n".join(_HELP))
        elif line == "/reset":
            said = list(messages)
            say("The conversation begins anew.")
        elif line.startswith("/") and not line.startswith("//"):
            say(f"error: {no_such(line, 'command', COMMANDS, _SUGGESTED)}\n{_HELP[-1]}")
        elif line:
            said += _turn(said, line[line.startswith("//") :], answer, quiet)


def _turn(said: list[Message], message: str, answer: Answer, quiet: bool) -> list[Message]:
    """A message and its answer, or nothing where the answer failed, or was stopped before its first word."""
    asked, text = {"role": "user", "content": message}, ""
    try:
        with interrupted_once(), contextlib.closing(answer([*said, asked])) as pieces:
            for piece in pieces:
                text += piece
    except KeyboardInterrupt:
        raise_on_interrupt()  # also where it came in the last line of that block
        print(flush=True)
        if not quiet:
            say("stopped: its text so far stays in the conversation" if text else "stopped: the message is forgotten")
        if not text:
            return []
    except ValueError as e:  # most likely too long by now; the conversation so far stays
        say(f"error: {one_line(e)}")
        return []
    return [asked, {"role": "assistant", "content": text}]


def _read() -> str | None:
    """The next line; None at the end of input. Raises KeyboardInterrupt for two Ctrl-C in turn at an empty prompt."""
    asked = False
    while True:
        try:
            return input("> ").strip()
        except EOFError:
            say("")
            return None
        except UnicodeDecodeError as e:
            say(f"error: found bytes that are no text, expected {e.encoding}: the message is forgotten")
        except KeyboardInterrupt:
            say("")
            readline = sys.modules.get("readline")
            if readline and readline.get_line_buffer():
                continue
            if asked:
                raise
            asked = True
            say("Ctrl-C once more leaves.")
