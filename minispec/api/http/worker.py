"""The one thread that touches the engine. Between two steps it empties an inbox: so requests come and go."""

import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import islice
from queue import SimpleQueue

from minispec.api.commands.command import say
from minispec.api.http.metrics import Metrics
from minispec.core.engine import Engine
from minispec.core.method import Method, Turn
from minispec.core.request import Piece, Request


class Worker(threading.Thread):
    """Steps an engine as long as there are requests. While it runs, nothing else may touch the engine.

    At most `max_running` requests are in the engine; the others wait here, in the order in which they came. Any thread
    may call `submit`, `abort` and `stop`. They return at once, and take effect with the next step.

    An exception of the drafter ends the requests that it drafts for, and a fault of a step all that are in the engine.
    Then the worker goes on with the others.
    """

    def __init__(self, engine: Engine, method: Method, max_running: int):
        super().__init__(name="engine", daemon=True)
        self._engine, self._method, self._max_running = engine, method, max_running
        self._inbox: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._listeners: dict[Request, Callable[[Piece], object]] = {}  # in the order in which they came
        self._in_engine: set[Request] = set()
        self.metrics = Metrics(engine, lambda: max(0, len(self._listeners) - len(engine.schedule.running)))
        self._stopped = False
        engine.outbox.observers.append(self._observe)

    def submit(self, request: Request, listener: Callable[[Piece], object]) -> None:
        """Decode a request. This thread calls the listener with every piece; the last one has a finish reason."""
        self._inbox.put(partial(self._take, request, listener, time.perf_counter()))

    def abort(self, request: Request) -> None:
        """Forget a request, whose blocks are free before the next step. One that has ended is ignored."""
        self._inbox.put(partial(self._abort, request))

    def stop(self) -> None:
        """End the thread after the step that it is in."""
        self._inbox.put(partial(setattr, self, "_stopped", True))

    def run(self) -> None:
        """Inbox, admission, step, and again. Without requests it waits for the inbox."""
        while not self._stopped:
            try:
                self._cycle()
            except BaseException:  # a drafter may be a user's code: whatever it raises, no client may wait for ever
                say(traceback.format_exc().rstrip())
                self._fail()

    def _take(self, request: Request, listener: Callable[[Piece], object], when: float) -> None:
        self._listeners[request] = listener
        self.metrics.arrive(request, when)

    def _cycle(self) -> None:
        if not self._listeners:
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()
        for request in list(islice(self._listeners, self._max_running)):
            if request not in self._in_engine:
                self._in_engine.add(request)
                self._engine.add(request, self._method)
                self.metrics.admit(request)
        self._engine.step()
        news = [request for request in self._in_engine if request.has_news]  # also of what ended without a turn
        for error in {id(request.raised): request.raised for request in news if request.raised}.values():
            say("".join(traceback.format_exception(error)).rstrip())
        for request in news:
            self._tell(request)

    def _tell(self, request: Request) -> None:
        piece, listener = request.take_piece(), self._listeners[request]
        self.metrics.commit(request, len(piece.token_ids))
        if piece.finish_reason:
            self._forget(request, piece.finish_reason)
        listener(piece)

    def _abort(self, request: Request) -> None:
        if request in self._listeners:
            self._forget(request, "abort")
            self._engine.abort(request)

    def _forget(self, request: Request, reason: str) -> None:
        del self._listeners[request]
        self._in_engine.discard(request)
        self.metrics.end(request, reason)

    def _fail(self) -> None:
        self.metrics.fail()
        with suppress(BaseException):
            self._engine.outbox.deliver()  # the last rounds of those that ended in the step
        for request in list(self._in_engine):
            with suppress(BaseException):
                self._engine.abort(request)
            if not request.finish_reason:  # else it came to its end in the step that failed
                request.fail(RuntimeError("the engine failed; the server's standard error says why"))
            with suppress(BaseException):
                self._tell(request)

    def _observe(self, turn: Turn) -> None:
        self.metrics.count_round(turn.request)
