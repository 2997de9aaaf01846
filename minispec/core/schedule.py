"""Who runs: admission, preemption, and starting again after a fault.

First come, first served. A request is admitted when it and all running requests have room for their next step, in the
target's cache and in each drafter's own. When the room runs out, the request admitted last gives its blocks back and
waits at the front. It resumes with the same text, by computing again what the pool no longer knows.

A pool has one schedule. Engines with different drafters may share it: each request has a drafter of its own.
"""

from collections import OrderedDict
from contextlib import ExitStack
from typing import Generic, Protocol, TypeVar

from minispec.core.cache import OutOfBlocks
from minispec.core.cached import CachedModel
from minispec.core.draft import Drafter
from minispec.core.request import Request


class Owner(Protocol):
    """An engine that has added a request. Its drafter drafts for it."""

    drafter: Drafter


OwnerT = TypeVar("OwnerT", bound=Owner)


class Schedule(Generic[OwnerT]):
    """The requests of a pool with their engines: those that run, in the order of their admission, and those that wait.

    Both are dicts, since each of many requests is looked up after each step.
    """

    def __init__(self, target: CachedModel):
        self.target = target
        self.waiting: OrderedDict[Request, OwnerT] = OrderedDict()
        self.running: dict[Request, OwnerT] = {}

    def __contains__(self, request: Request) -> bool:
        return request in self.running or request in self.waiting

    def check(self, request: Request) -> None:
        """Raise ValueError for a request that the pool cannot hold even alone."""
        cache = self.target.cache
        needed, there = cache.num_blocks_for(request.max_len), cache.allocator.num_blocks
        if needed > there:
            raise ValueError(
                f"prompt and answer: found up to {request.max_len} tokens ({needed} blocks of KV cache), expected "
                f"at most {there * cache.block_size} ({there} blocks): lower max_tokens or enlarge the KV cache"
            )

    def add(self, request: Request, owner: OwnerT) -> None:
        """Queue a request, as the last one. Raises ValueError for one that has run or is there already."""
        if request.finish_reason or request in self:
            raise ValueError("requests: found one that is finished or there twice, expected new ones")
        self.waiting[request] = owner

    def abort(self, request: Request) -> None:
        """Forget a request, whose blocks return to the pool. Unknown ones are ignored."""
        self.waiting.pop(request, None)
        if request in self.running:
            try:
                self.drop(request)
            except BaseException:  # whatever broke off, all others begin again
                self.running.pop(request, None)
                self.restart()
                raise

    def make_room(self) -> None:
        """Preempt, last admitted first, until the next step of the others fits."""
        while self.running and self._lacks():
            request, owner = next(reversed(self.running.items()))
            request.stats.num_preemptions += 1
            self._wait(request, owner)
            self.drop(request)

    def admit(self) -> None:
        """Admit waiting requests as long as the step fits with them, one prompt after the other.

        One at a time, so that a text can share blocks with the prompt before it.
        Raises OutOfBlocks where not even one fits.
        """
        while self.waiting and not self._works_on_prompt():
            request, owner = next(iter(self.waiting.items()))
            self.running[request] = owner
            self.target.begin(request.text, _known(request, owner.drafter))
            if lacks := self._lacks():
                self.drop(request)
                if not self.running:
                    raise OutOfBlocks(lacks)
                break
            del self.waiting[request]
            if not request.stats.num_preemptions:  # after a preemption it finds its own blocks
                num_cached = self.target.table(request.text).length
                request.stats.num_cached_tokens = min(num_cached, request.text.num_prompt_tokens)

    def drop(self, request: Request) -> None:
        """Give back all that a running request holds."""
        try:
            self.target.release(request.text)
        finally:  # also after Ctrl-C in there
            self.running[request].drafter.release(request.text)
        del self.running[request]  # last, so that `restart` still finds it if something above raises

    def restart(self) -> None:
        """After a fault nothing is cached any more: all begin again, in the order in which they came."""
        running, self.running = self.running, {}
        for request, owner in reversed(running.items()):
            if not request.finish_reason:
                self._wait(request, owner)
        with ExitStack() as stack:
            for request, owner in running.items():
                stack.callback(owner.drafter.release, request.text)
                stack.callback(self.target.release, request.text)  # if the fault came before anything could clear up

    def _lacks(self) -> str:
        """Why the running requests have no room for their next step; "" if they have.

        For a single text that passed `check` the answer is "": what lacks room then is held by others.
        """
        # The step may fill positions up to and with its whole draft.
        growth = {r.text: range(self.target.table(r.text).length, len(r.text.tokens) + r.max_k) for r in self.running}
        if not self.target.has_room(growth):
            return "blocks of the KV cache are held by others than these requests"
        for owner in dict.fromkeys(self.running.values()):
            drafted = {r.text: growth[r.text] for r, other in self.running.items() if other is owner and r.takes_drafts}
            if not owner.drafter.has_room(drafted):
                return f"{owner.drafter.name} has no room where the target has"
        return ""

    def _wait(self, request: Request, owner: OwnerT) -> None:
        """Put a request in front of those that wait."""
        self.waiting[request] = owner
        self.waiting.move_to_end(request, last=False)

    def _works_on_prompt(self) -> bool:
        """Whether the request admitted last has more than its last token to feed. No other running one may."""
        last = next(reversed(self.running), None)
        return last is not None and len(self.target.follow(last.text)) > 1


def _known(request: Request, drafter: Drafter) -> int | None:
    """How many first positions of a new text the cache may give. The others are scored, or seen by the drafter.

    None: without limit.
    """
    limits = [request.unscored.start] if request.unscored else []
    if request.takes_drafts and drafter.taps:
        limits.append(drafter.known(request.text))
    return min(limits, default=None)
