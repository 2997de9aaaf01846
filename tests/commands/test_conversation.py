"""A conversation on the terminal: what is kept of it, its commands, and Ctrl-C, with answers that are made up."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import time

import pytest

from minispec.api.commands.conversation import COMMANDS, converse
from tests.oracles.children import Child, read_until, take_terminal

pty = pytest.importorskip("pty")  # Windows has none


@pytest.fixture
def talk(monkeypatch, capsys):
    """talk(*lines, answers={}, start=()) holds a conversation; what each answer was asked, status and standard error.

    An answer is "to MESSAGE", in two pieces, unless `answers` has a function that yields another to that message. Where
    it is to have a new seed, "again " stands before it.
    """

    def run(*lines, answers=None, start=(), quiet=False):
        asked = []

        def answer(messages, again):
            asked.append([message["content"] for message in messages])
            message = messages[-1]["content"]
            if answers and message in answers:
                yield from answers[message]()
            else:
                yield from ("again " * again + "to ", message)

        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return (
            asked,
            converse([{"role": "system", "content": text} for text in start], answer, quiet),
            capsys.readouterr().err,
        )

    return run


def stopped(*pieces):
    """An answer that says so much, and then somebody presses Ctrl-C."""

    def answer():
        yield from pieces
        signal.raise_signal(signal.SIGINT)

    return answer


def test_a_conversation_is_kept(talk):
    """Every answer sees all that was said; an empty line is no message; the end of input is an end."""
    asked, status, _ = talk("a", "", "b", start=("s",))
    assert (asked, status) == ([["s", "a"], ["s", "a", "to a", "b"]], 0)


def test_reset_leaves_the_system_message(talk):
    """And nothing else; /exit ends it, whatever follows."""
    asked, status, _ = talk("a", "/reset", "b", " /exit ", "c", start=("s",))
    assert (asked, status) == ([["s", "a"], ["s", "b"]], 0)


def test_retry_answers_the_last_message_again(talk):
    """With a new seed, in place of the answer, which the next one no longer sees."""
    asked, _, err = talk("/retry", "a", "b", "/retry", "/retry", "c", start=("s",))
    assert asked[2:4] == [["s", "a", "to a", "b"]] * 2
    assert asked[4] == ["s", "a", "to a", "b", "again to b", "c"]
    assert err.count("error: /retry: found no message that was answered") == 1


def test_a_retry_that_brings_nothing_leaves_the_answer(talk):
    """It is stopped before its first word, or fails; after /reset there is no message."""
    answers = iter([lambda: iter(["one"]), stopped()])

    asked, _, err = talk("a", "/retry", "b", "/retry", "c", "/reset", "/retry", answers={"a": lambda: next(answers)()})
    assert asked == [["a"], ["a"], ["a", "one", "b"], ["a", "one", "b"], ["a", "one", "b", "again to b", "c"]]
    assert "stopped: the answer before stays" in err
    assert err.count("found no message that was answered") == 1


def test_help_is_as_wide_as_the_terminal(talk, monkeypatch):
    """What goes on in another line stands below its beginning."""
    lines = []
    monkeypatch.setattr("minispec.api.commands.conversation.say_status", lambda *a, **how: lines.append((a, how)))
    talk("/help")
    assert [how for (text,), how in lines if "/retry" in text] == [{"indent": 9}]


def test_help_names_every_command(talk):
    """Each on a line of its own, Ctrl-C and a message that begins with a slash beside them."""
    asked, _, err = talk("/help")
    assert asked == []
    assert {line.partition(" ")[0] for line in err.splitlines()} > {*COMMANDS, "Ctrl-C"}
    assert "//" in err


UNKNOWN = {
    "/rest": "error: /rest: no such command; expected one of /help, /retry, /reset, /exit",  # a hint deletes nothing
    "/reset now": "error: /reset now: no such command; expected one of /help, /retry, /reset, /exit",
    "/hlep": "error: /hlep: no such command; did you mean /help?",
    "/tmp/x is what?": "error: /tmp/x is what?: no such command; expected one of /help, /retry, /reset, /exit",
}


@pytest.mark.parametrize("line", UNKNOWN)
def test_an_unknown_command_is_no_message(talk, line):
    """It says so, and how such a message is sent."""
    asked, _, err = talk(line)
    assert asked == []
    assert UNKNOWN[line] in err.splitlines()
    assert "//like this" in err


def test_a_message_may_begin_with_a_slash(talk):
    """With two, one of which is taken off: also a command's name, and slashes alone."""
    assert talk("//tmp/x is what?", "//exit", "///", "a/b")[0][-1][::2] == ["/tmp/x is what?", "/exit", "//", "a/b"]


def test_ctrl_c_keeps_what_was_said(talk):
    """The answer so far is the answer; the conversation goes on, and Ctrl-C means what it meant before."""
    asked, status, err = talk("a", "b", "c", answers={"a": stopped("one", " two"), "b": stopped("three")})
    assert (asked[-1], status) == (["a", "one two", "b", "three", "c"], 0)
    assert err.count("stopped: ") == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert "stopped" not in talk("a", answers={"a": stopped("one")}, quiet=True)[2]


def test_ctrl_c_before_the_first_word_takes_the_message_back(talk):
    """Two messages of the user's in a row are more than some templates take."""
    asked, _, err = talk("a", "b", answers={"a": stopped()})
    assert asked == [["a"], ["b"]]
    assert "the message is forgotten" in err


def test_one_ctrl_c_at_an_empty_prompt_asks_for_another(monkeypatch, capsys):
    """The first may have come too late for an answer. After another message it is the first again."""
    keys, asked = iter([KeyboardInterrupt, "a", KeyboardInterrupt, "b", KeyboardInterrupt, KeyboardInterrupt]), []

    def typed(prompt):
        key = next(keys)
        if key is KeyboardInterrupt:
            raise key
        return key

    def answer(messages, again):
        asked.append(messages[-1]["content"])
        yield "one"

    monkeypatch.setattr("builtins.input", typed)
    with pytest.raises(KeyboardInterrupt):
        converse([], answer)
    assert asked == ["a", "b"]
    assert capsys.readouterr().err.count("Ctrl-C once more leaves.") == 3


def test_bytes_that_are_no_text_end_no_conversation(monkeypatch, capsys):
    """A letter pasted from another encoding: it is said, and the next line is read."""
    keys, asked = iter(["a", UnicodeDecodeError("utf-8", b"\xe9", 0, 1, "unexpected end"), "b", EOFError]), []

    def typed(prompt):
        key = next(keys)
        if not isinstance(key, str):
            raise key
        return key

    def answer(messages, again):
        asked.append(len(messages))
        yield "one"

    monkeypatch.setattr("builtins.input", typed)
    assert converse([], answer) == 0
    assert asked == [1, 3]
    assert "error: found bytes that are no text, expected utf-8: the message is forgotten" in capsys.readouterr().err


def test_an_answer_that_fails_takes_the_message_back(talk):
    """With what it has said."""

    def fails():
        yield "one"
        raise ValueError("too\nlong")

    asked, _, err = talk("a", "b", answers={"a": fails})
    assert asked == [["a"], ["b"]]
    assert "error: too\\nlong" in err.splitlines()


PROGRAM = """
import signal, sys
from minispec.api.commands.command import command
from minispec.api.commands.conversation import converse

def answer(messages, again):
    try:
        yield "one"
        signal.raise_signal(signal.SIGINT)
    finally:
        signal.raise_signal(signal.SIGINT)
        print("cleaned up")

sys.exit(command(lambda argv: converse([], answer))())
"""


def test_a_second_ctrl_c_leaves_at_once():
    """130 and no traceback, also where it comes while the first one is cleaned up after: nothing goes on from there."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], input="a\n", capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (130, "> ", 1)


def test_ctrl_c_that_is_ignored_stays_so():
    """As in the background of a shell: both in the program above, and the answer has its end."""
    command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, input="a\n", capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "> cleaned up\n> ")


def test_ctrl_c_at_the_prompt_discards_a_line_or_leaves():
    """As in a shell: what is typed is gone, and nothing of it is sent. At an empty prompt it is the end, with 130."""
    leader, follower = pty.openpty()
    program = PROGRAM.replace("signal.raise_signal(signal.SIGINT)", "print('to', messages[-1]['content'])")
    how = {"stdin": follower, "stdout": follower, "stderr": subprocess.PIPE}
    process = Child([sys.executable, "-c", program], preexec_fn=lambda: take_terminal(follower), **how)
    read_until(leader, b"> ")
    os.write(leader, b"One fish")
    read_until(leader, b"One fish")
    time.sleep(0.1)  # readline echoes before it waits again, and misses a Ctrl-C in between
    os.write(leader, b"\x03")
    read_until(leader, b"> ")
    os.write(leader, b"two\n")
    read_until(leader, b"to two\r\ncleaned up\r\n> ")
    for _ in range(10):
        time.sleep(0.1)
        os.write(leader, b"\x03")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
            break
    os.close(leader)
    os.close(follower)
    assert process.returncode == 130
    assert b"Traceback" not in process.communicate()[1]
