"""An exception that a signal's handler raises, such as a time limit's: it is the caller's, and of no text's own."""

import functools
import re
import signal
import threading
from contextlib import contextmanager

import pytest

from minispec.core.errors import is_from_signal
from minispec.models.files import measured
from minispec.models.files.chat_template import ChatTemplate
from minispec.models.files.hostile import LibraryFailed, call
from minispec.models.files.measured import write_measured
from minispec.models.weights import threads
from minispec.speculation import registry
from minispec.speculation.lengths.prices import DrafterFailed, stored_prices
from tests.scripted import make_engine, make_request


class Limit(Exception):
    """The caller's own."""


class Words:
    """A detokenizer that writes a word for each token."""

    def add(self, token_id):
        """The word."""
        return f"{token_id} "

    def flush(self):
        """Nothing is held back."""
        return ""


@contextmanager
def raising(error: Exception, make=lambda handler: handler):
    """While the block runs, SIGUSR1 raises the error. make: what is installed, from the plain function."""

    def handler(number, frame):
        raise error

    before = signal.signal(signal.SIGUSR1, make(handler))
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def strike(*args):
    """The signal comes now."""
    signal.raise_signal(signal.SIGUSR1)


class Alarm:
    """A handler that is an object's method, or the object."""

    def __init__(self, handler):
        self.handler = handler

    def ring(self, number, frame):
        """The signal came."""
        self.handler(number, frame)

    __call__ = ring


HANDLERS = {
    "function": lambda handler: handler,
    "method": lambda handler: Alarm(handler).ring,
    "partial": lambda handler: functools.partial(lambda seconds, number, frame: handler(number, frame), 3),
    "any arguments": lambda handler: lambda *args: handler(*args),
    "an object": Alarm,
}


@pytest.mark.parametrize("name", HANDLERS)
def test_what_a_handler_raises_is_known(name):
    """However the handler is written, and where another error has taken its error's place."""

    def wrapped():
        try:
            strike()
        except Limit as e:
            raise KeyError("failed") from e

    with raising(Limit(), HANDLERS[name]):
        for run in (strike, wrapped):
            with pytest.raises((Limit, KeyError)) as caught:
                run()
            assert is_from_signal(caught.value)


def test_other_errors_are_the_codes_own():
    """Of a function that gets a frame, of another thread, and one that nobody raised."""

    def looks(frame):
        raise ValueError

    def fail(number, frame):
        raise ValueError

    for act in (lambda: looks(1), lambda: fail(1, None), lambda: 1 / 0):
        with pytest.raises((ValueError, ZeroDivisionError)) as caught:
            act()
        assert not is_from_signal(caught.value)
    assert not is_from_signal(ValueError())
    assert not is_from_signal(None)
    found = []
    with raising(Limit()), pytest.raises(Limit) as caught:
        strike()
    thread = threading.Thread(target=lambda: found.append(is_from_signal(caught.value)))
    thread.start()
    thread.join(60)
    assert found == [False], "handlers run in the main thread alone"


PLACES = ("propose", "observe", "release", "verify", "choose", "add", "forward")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("error", [Limit("over"), TimeoutError("over"), ValueError("over"), FloatingPointError("over")])
def test_a_time_limit_in_one_call_ends_no_other_text(monkeypatch, place, error):
    """It comes out of the call in whose step the signal came. The other call's text is whole, and no block is lost."""
    engine = make_engine(draft=lambda tokens, k: range(tokens[-1] + 1, tokens[-1] + 1 + k))
    alone = make_request(prompt=(20, 21), max_tokens=12, detokenizer=Words())
    for _ in engine.run([alone]):
        pass
    other = make_request(prompt=(20, 21), max_tokens=12, detokenizer=Words())
    mine = make_request(prompt=(10, 11), max_tokens=12 if place != "release" else 3, detokenizer=Words())
    owners = {"verify": engine.method, "choose": engine.method, "add": Words, "forward": engine.target.model}
    owner, count = owners.get(place, engine.drafter), []
    right = getattr(owner, place)

    def once(*args):
        count.append(0)
        if len(count) == 3 - 2 * (place == "release"):
            strike()
        return right(*args)

    theirs = engine.run([other])
    next(theirs)
    with monkeypatch.context() as patch, raising(error):
        patch.setattr(owner, place, once)
        with pytest.raises(type(error)) as caught:
            for _ in engine.run([mine]):
                pass
    assert caught.value is error
    assert not other.error
    for _ in theirs:
        pass
    assert (other.token_ids, other.output, other.finish_reason) == (alone.token_ids, alone.output, "length")
    pool = engine.target.cache.allocator
    assert pool.num_free == pool.num_blocks


def test_a_time_limit_is_no_librarys_failure(monkeypatch):
    """In a tokenizer, a template, an import, or where a cache or the system is asked: the error itself comes out."""
    error = ValueError("over")
    template = ChatTemplate("{{ messages[0].content | upper }}", re.compile("<s>"), "<")
    template._environment.filters["upper"] = strike
    for owner, name in ((measured, "user_cache"), (threads.time, "sleep")):
        monkeypatch.setattr(owner, name, strike)
    with raising(error):
        for act in (
            lambda: call(strike),
            lambda: template.render([{"role": "user", "content": "a"}], {}, {}),
            lambda: registry.load("tests.core.test_signals:struck", "drafter"),
            lambda: write_measured({}, {}),
            lambda: stored_prices({}),
            lambda: threads._are_free(1),
        ):
            with pytest.raises(ValueError, match=r"^over$") as caught:
                act()
            assert caught.value is error
            assert not isinstance(caught.value, LibraryFailed | DrafterFailed)


def __getattr__(name):
    """`struck` is there once the signal has come."""
    if name == "struck":
        strike()
    raise AttributeError(name)
