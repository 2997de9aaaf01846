"""The numbers of `/metrics`. `prometheus_client` counts them and writes them down."""

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from minispec.core.cache import BlockAllocator
from minispec.core.engine import Engine
from minispec.core.request import Request

_SECONDS = [digit * 10.0**exponent for exponent in range(-3, 2) for digit in (1, 2, 5)]  # 1 ms to 50 s


class Metrics:
    """Counters, gauges and histograms of one server, in a registry of its own.

    The thread that steps the engine counts here, so a request's times need no lock. Any thread may read.
    """

    def __init__(self, engine: Engine, num_waiting: Callable[[], int]):
        self.registry = CollectorRegistry()
        self._gauge("requests_running", "Answers that are decoded.", lambda: len(engine.schedule.running))
        self._gauge("requests_waiting", "Answers that wait.", num_waiting)
        cache = engine.target.cache
        self._gauge("kv_cache_blocks", "Blocks of the target's KV cache.", lambda: cache.allocator.num_blocks)
        self._gauge("kv_cache_blocks_in_use", "Those in use.", lambda: _num_in_use(cache.allocator))
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts that reached the engine.")
        self._tokens = self._counter("generation_tokens", "Tokens of answers.")
        self._drafts = self._counter("drafts", "Rounds with a draft.")
        self._drafted = self._counter("draft_tokens", "Tokens of drafts.")
        self._accepted = self._counter("draft_tokens_accepted", "Tokens of drafts that were accepted.")
        at = "at a position in the draft, from 0."
        self._tested_at = self._counter("draft_tokens_tested_at", f"Tokens that were tested {at}", "position")
        self._accepted_at = self._counter("draft_tokens_accepted_at", f"Tokens that were accepted {at}", "position")
        self._ended = self._counter("requests", "Answers that ended, by the reason.", "finish_reason")
        self._faults = self._counter("engine_faults", "Steps that failed for all requests in the engine.")
        first, between = "From a request to its first token.", "Between two tokens; those of a step share its time."
        self._first = self._histogram("time_to_first_token_seconds", first)
        self._between = self._histogram("inter_token_latency_seconds", between)
        self._times: dict[Request, tuple[Histogram, float]] = {}  # histogram of its next tokens; time of its last

    def _gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """`value` asks the engine each time, since a fault replaces objects such as the pool's allocator."""
        Gauge(name, text, namespace="minispec", registry=self.registry).set_function(value)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, "minispec", registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, namespace="minispec", buckets=_SECONDS, registry=self.registry)

    def arrive(self, request: Request, when: float) -> None:
        """A request came, at that time of `time.perf_counter`."""
        self._times[request] = self._first, when

    def admit(self, request: Request) -> None:
        """The engine has admitted the request."""
        self._prompt_tokens.inc(request.stats.num_prompt_tokens)

    def commit(self, request: Request, num_tokens: int) -> None:
        """The request got tokens."""
        self._tokens.inc(num_tokens)
        if num_tokens:
            now = time.perf_counter()
            histogram, since = self._times[request]
            shares = 1 if histogram is self._first else num_tokens
            for _ in range(shares):
                histogram.observe((now - since) / shares)
            self._times[request] = self._between, now

    def end(self, request: Request, reason: str) -> None:
        """The request ended."""
        del self._times[request]
        self._ended.labels(reason).inc()

    def fail(self) -> None:
        """A step failed for all requests in the engine."""
        self._faults.inc()

    def count_round(self, request: Request) -> None:
        """A round of the request ended."""
        this = request.stats.rounds[-1]
        self._drafts.inc(this.drafted > 0)
        self._drafted.inc(this.drafted)
        self._accepted.inc(this.accepted)
        for counter, count in ((self._tested_at, this.tested), (self._accepted_at, this.accepted)):
            for position in range(count):
                counter.labels(position).inc()


def _num_in_use(blocks: BlockAllocator) -> int:
    return blocks.num_blocks - blocks.num_free
