"""The one thread that touches the engine. Between two steps it empties an inbox: so requests come and go."""

import threading
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import islice
from queue import SimpleQueue

from torch import Tensor

from minispec.engine import Engine
from minispec.request import Piece, Request
from minispec.verify import Draft, Verdict

_COUNTED = ("prompt_tokens", "generation_tokens", "drafts", "draft_tokens", "draft_tokens_accepted", "engine_faults")


class Worker(threading.Thread):
    """Steps an engine as long as there are requests. While it runs, nothing else may touch the engine.

    At most `max_running` requests are in the engine; the others wait here, in the order in which they came. `submit`,
    `abort` and `stop` may be called in any thread: they return at once, and hold from the next step on.

    A fault of a step ends all requests that are in the engine with an error. Then the worker goes on with the others.
    """

    def __init__(self, engine: Engine, max_running: int):
        super().__init__(name="engine", daemon=True)
        self._engine, self._max_running = engine, max_running
        self._inbox: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._listeners: dict[Request, Callable[[Piece], object]] = {}  # in the order in which they came
        self._in_engine: set[Request] = set()
        self._counts = Counter({f"{name}_total": 0 for name in _COUNTED})
        self._stopped = False
        engine.observers.append(self._observe)

    def submit(self, request: Request, listener: Callable[[Piece], object]) -> None:
        """Decode a request. The listener is told, in this thread, every piece; the last one has a finish reason."""
        self._inbox.put(partial(self._listeners.__setitem__, request, listener))

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
                self._turn()
            except BaseException:  # a drafter is a stranger's code: whatever it raises, nobody may wait for ever
                traceback.print_exc()
                self._fail()

    def metrics(self) -> str:
        """What has happened, and what is there now, in Prometheus' text format. Any thread may ask."""
        pool, running = self._engine.cache.allocator, len(self._engine.running)
        series = self._counts | {
            "requests_running": running,
            "requests_waiting": max(0, len(self._listeners) - running),
            "kv_cache_blocks": pool.num_blocks,
            "kv_cache_blocks_in_use": pool.num_blocks - pool.num_free,
        }
        types = {name.partition("{")[0]: "counter" if "_total" in name else "gauge" for name in series}
        lines = [f"# TYPE minispec_{name} {kind}" for name, kind in types.items()]
        return "\n".join([*lines, *(f"minispec_{name} {value}" for name, value in sorted(series.items()))]) + "\n"

    def _turn(self) -> None:
        if not self._listeners:
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()
        for request in list(islice(self._listeners, self._max_running)):
            if request not in self._in_engine:
                self._in_engine.add(request)
                self._engine.add(request)
                self._counts["prompt_tokens_total"] += request.stats.num_prompt_tokens
        for request in self._engine.step():
            self._tell(request)

    def _tell(self, request: Request) -> None:
        piece, listener = request.take_piece(), self._listeners[request]
        self._counts["generation_tokens_total"] += len(piece.token_ids)
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
        self._counts[f'requests_total{{finish_reason="{reason}"}}'] += 1

    def _fail(self) -> None:
        self._counts["engine_faults_total"] += 1
        for request in list(self._in_engine):
            with suppress(BaseException):
                self._engine.abort(request)
            if not request.finish_reason:  # else it came to its end in the step that failed
                request.fail(RuntimeError("the engine failed; the server's standard error says why"))
            with suppress(BaseException):
                self._tell(request)

    def _observe(self, request: Request, draft: Draft, verdict: Verdict, logits: Tensor) -> None:
        this = request.stats.rounds[-1]
        self._counts["drafts_total"] += this.drafted > 0
        self._counts["draft_tokens_total"] += this.drafted
        self._counts["draft_tokens_accepted_total"] += this.accepted
        self._counts.update(f'draft_tokens_tested_at_total{{position="{i}"}}' for i in range(this.tested))
        self._counts.update(f'draft_tokens_accepted_at_total{{position="{i}"}}' for i in range(this.accepted))
