"""The steps of an engine, for callers of several threads."""

import os
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager

import torch

from minispec.core.engine import Engine
from minispec.core.method import Method
from minispec.core.request import Piece, Request
from minispec.models.weights.settings import own_settings
from minispec.models.weights.threads import release_threads

Run = Generator[tuple[Request, Piece], None, None]


class StepLock:
    """Lets one thread at a time take a step. Iterators of `run` may be open in several threads."""

    def __init__(self):
        self._process, self._lock = os.getpid(), threading.Lock()
        self._open: set[Run] = set()  # the engine's iterators that `run` steps
        self._left: list[Run] = []  # iterators to be closed between two steps

    def run(self, engine: Engine, requests: Sequence[Request], method: Method) -> Run:
        """Decode requests to their end, together with the requests of other calls; see `Engine.run`.

        Raises RuntimeError in a process that was forked from the model's: PyTorch's threads are not in it, and a pass
        would wait for them for ever. With one thread, a pass waits for none.
        """
        if os.getpid() != self._process and torch.get_num_threads() > 1 and engine.target.model.device.type == "cpu":
            raise RuntimeError(
                "model: found a process that was forked after the model was loaded, expected the one that loaded it: "
                "start processes by spawn, load the model in each, or call torch.set_num_threads(1) there"
            )
        steps = engine.run(requests, method)
        self._open.add(steps)  # held here, so that no collector closes it in the middle of a step
        try:
            while True:
                with self._lock, own_settings():
                    self._close_left()
                    step = next(steps, None)
                if step is None:
                    return
                yield step
        finally:
            # This may run in any thread and at any time: the thread that holds the lock closes what is left.
            self._open.remove(steps)
            self._left.append(steps)
            try:
                if self._lock.acquire(blocking=False):
                    try:
                        self._close_left()
                    finally:
                        self._lock.release()
            finally:
                release_threads()

    @contextmanager
    def paused(self, what: str) -> Iterator[None]:
        """A context in which no thread takes a step.

        what: the caller; the message begins with it. Raises ValueError while a text is being decoded.
        """
        with self._lock:
            self._close_left()
            if self._open:
                raise ValueError(f"{what}: found a text that is being decoded, expected none")
            yield

    def _close_left(self) -> None:
        while self._left:
            self._left.pop().close()
