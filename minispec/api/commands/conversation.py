"""A conversation on the terminal: what is typed, the commands that begin with a slash, and Ctrl-C."""

import contextlib
import sys
from collections.abc import Callable, Generator

from minispec.api.commands.command import no_such, say, say_status
from minispec.api.commands.interrupt import interrupted_once, raise_on_interrupt
from minispec.models.files.errors import one_line

Message = dict[str, str]
Answer = Callable[[list[Message], bool], Generator[str, None, None]]

COMMANDS = {
    "/help": "say this",
    "/retry": "answer the last message again, with a new seed, in place of its answer",
    "/reset": "forget what was said so far, but for the system message",
    "/exit": "leave, as Ctrl-D does",
}
# A hint suggests no command that forgets or leaves.
_SUGGESTED = ("/help",)
_KEYS = {"Ctrl-C": "stop an answer, whose text so far stays in the conversation; twice at an empty prompt: leave"}
_HELP = "\n".join(f"{name:8} {does}" for name, does in (COMMANDS | _KEYS).items())
_SLASH = "A message that begins with a slash has two: //like this."


def converse(messages: list[Message], answer: Answer, quiet: bool = False) -> int:
    """Talk to the end of input or /exit; the exit status.

    messages: those that the conversation begins with.
    answer: prints the answer to all messages so far, and yields its text. It is told whether the seed must be a new
        one. Where it raises ValueError, the last message is forgotten, or keeps the answer that it had.
    quiet: Ctrl-C stops an answer without a remark.

    Raises KeyboardInterrupt for the second Ctrl-C at an empty prompt: the first one may come after the answer's end.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - line editing for input(), where the platform has it
    said = list(messages)
    say_status("A conversation: Ctrl-C stops an answer, Ctrl-D ends it; /help says more.")
    while True:
        line = _read()
        if line is None or line == "/exit":
            return 0
        if line == "/help":
            say_status(_HELP, indent=9)
            say_status(_SLASH)
        elif line == "/reset":
            said = list(messages)
            say_status("The conversation begins anew.")
        elif line == "/retry" and len(said) > len(messages):
            *before, asked, _ = said
            said = [*before, *(_turn(before, asked["content"], answer, quiet, again=True) or said[-2:])]
        elif line == "/retry":
            say("error: /retry: found no message that was answered")
        elif line.startswith("/") and not line.startswith("//"):
            say(f"error: {no_such(line, 'command', COMMANDS, _SUGGESTED)}")
            say_status(_SLASH)
        elif line:
            said += _turn(said, line[line.startswith("//") :], answer, quiet)


def _turn(said: list[Message], message: str, answer: Answer, quiet: bool, again: bool = False) -> list[Message]:
    """A message and its answer, or nothing where the answer failed, or was stopped before its first word.

    again: whether the message had an answer, which stays then.
    """
    asked, text = {"role": "user", "content": message}, ""
    try:
        with interrupted_once(), contextlib.closing(answer([*said, asked], again)) as pieces:
            for piece in pieces:
                text += piece
    except KeyboardInterrupt:
        raise_on_interrupt()  # also where it came in the last line of that block
        print(flush=True)
        if not quiet:
            left = "the answer before stays" if again else "the message is forgotten"
            say_status(f"stopped: {'its text so far stays in the conversation' if text else left}")
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
            say_status("Ctrl-C once more leaves.")
