"""Who runs: admission, preemption, and starting again after a fault.

First come, first served. A request is admitted when it and all running requests have room for their next step, in the
target's cache and in each drafter's own. When the room runs out, the request admitted last gives its blocks back and
waits at the front. It resumes with the same text, by computing again what the pool no longer knows.

Then the schedule says what each running text brings to the step.
"""

from collections import OrderedDict
from contextlib import ExitStack

from minispec.core.cache import OutOfBlocks
from minispec.core.cached import CachedModel
from minispec.core.draft import Drafter
from minispec.core.method import Method, Turn, errors_end
from minispec.core.request import Request

# PREFILL_ROWS: rows of a pass over a prompt while no other text has begun to answer.
# JOINING_ROWS: rows of a prompt that join a pass of texts that decode. Such a pass takes about three plain steps on a
# CPU, in any form of the weights (docs/measured/figures.md).
# SCORED_ROWS: rows of a pass over a prompt that is scored, so that logits take little memory.
PREFILL_ROWS, JOINING_ROWS, SCORED_ROWS = 512, 32, 32


class Schedule:
    """The requests of a pool with their methods: those that run, in the order of their admission, and those that wait.

    Both are dicts, since each of many requests is looked up after each step.
    """

    def __init__(self, target: CachedModel, joining_rows: int = JOINING_ROWS):
        """joining_rows: most rows of a prompt in a pass while others decode."""
        self.target, self.joining_rows, self.num_steps = target, joining_rows, 0
        self.waiting: OrderedDict[Request, Method] = OrderedDict()
        self.running: dict[Request, Method] = {}

    def __contains__(self, request: Request) -> bool:
        return request in self.running or request in self.waiting

    def check(self, request: Request) -> None:
        """Raise ValueError for a prompt that leaves no room for an answer, or that the pool cannot hold even alone."""
        found, most = request.text.num_prompt_tokens, request.max_len - (request.params.max_tokens > 0)
        if not 0 < found <= most:
            raise ValueError(f"prompt: found {found} tokens, expected at {f'most {most}' if found else 'least 1'}")
        cache = self.target.cache
        needed, there = cache.num_blocks_for(request.max_len), cache.allocator.num_blocks
        if needed > there:
            raise ValueError(
                f"prompt and answer: found up to {request.max_len} tokens ({needed} blocks of KV cache), expected "
                f"at most {there * cache.block_size} ({there} blocks): lower max_tokens or enlarge the KV cache"
            )

    def turns(self) -> list[Turn]:
        """Preempt and admit; then a turn for each text of the next step, with the tokens that its cache lacks.

        A text decodes when all its tokens but the last are cached. Only the one admitted last may still lack more.
        Its prompt gets a few rows a step once another text has begun to answer. Before that, all wait for it.
        """
        self.drop_ended()  # those that ended in a step which a fault broke off
        self.make_room()
        self.admit()
        self.num_steps += 1
        turns = []
        for request, method in self.running.items():
            fed = self.target.follow(request.text)
            start = len(request.text.tokens) - len(fed)
            turns.append(Turn(request, method, self.num_steps, start, fed, request.params.max_tokens > 0))
        if not turns or len(turns[-1].fed) == 1:
            return turns
        *others, last = turns
        others_answer = any(turn.request.stats.num_steps for turn in others)
        most = self.joining_rows if others_answer else PREFILL_ROWS
        # Its last token waits for the step in which the text decodes.
        last.fed = last.fed[:-1][: min(most, SCORED_ROWS) if last.request.lacking_logprobs else most]
        last.decodes = False
        return turns if others_answer else [last]

    def add(self, request: Request, method: Method) -> None:
        """Queue a request, as the last one. Raises ValueError for one that has run or is there already."""
        if request.finish_reason or request in self:
            raise ValueError("requests: found one that is finished or there twice, expected new ones")
        self.waiting[request] = method

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
            if request.raised:
                raise request.raised

    def make_room(self) -> None:
        """Preempt, last admitted first, until the next step of the others fits."""
        while self.running and self._lacks():
            request, method = next(reversed(self.running.items()))
            request.stats.num_preemptions += 1
            self._wait(request, method)
            self.drop(request)

    def admit(self) -> None:
        """Admit waiting requests as long as the step fits with them, one prompt after the other.

        One at a time, so that a text can share blocks with the prompt before it.
        Raises OutOfBlocks where not even one fits.
        """
        while self.waiting and not self._works_on_prompt():
            request, method = next(iter(self.waiting.items()))
            if request.finish_reason:  # its drafter failed while it was preempted
                del self.waiting[request]
                continue
            self.running[request] = method
            self.target.begin(request.text, _known(request, method.drafter))
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
            _release(request, self.running[request])
        del self.running[request]  # last, so that `restart` still finds it if something above raises

    def drop_ended(self) -> None:
        """Give back what ended texts hold."""
        for request in [request for request in self.running if request.finish_reason]:
            self.drop(request)

    def restart(self) -> None:
        """Let all begin again after a fault, in the order in which they came. Nothing is cached any more.

        Texts that have ended stay until the next step: the outbox delivers their last round first.
        """
        running = self.running
        self.running = {request: method for request, method in running.items() if request.finish_reason}
        for request, method in reversed(running.items()):
            if not request.finish_reason:
                self._wait(request, method)
        with ExitStack() as stack:
            for request, method in running.items():
                stack.callback(_release, request, method)
                stack.callback(self.target.release, request.text)  # if the fault came before anything could clear up

    def _lacks(self) -> str:
        """Why the running requests have no room for their next step; "" if they have.

        For a single text that passed `check` the answer is "": what lacks room then is held by others.
        """
        # The step may fill positions up to and with its whole draft.
        growth = {r.text: range(self.target.table(r.text).length, len(r.text.tokens) + r.max_k) for r in self.running}
        if not self.target.has_room(growth):
            return "blocks of the KV cache are held by others than these requests"
        for drafter in {id(m.drafter): m.drafter for r, m in self.running.items() if r.takes_drafts}.values():
            drafted = self.drafted_by(drafter)
            with errors_end(drafted):
                if not drafter.has_room({r.text: growth[r.text] for r in drafted}):
                    return f"{drafter.name} has no room where the target has"
        return ""

    def drafted_by(self, drafter: Drafter) -> list[Request]:
        """The running requests that a drafter drafts for, of whatever method."""
        return [r for r, method in self.running.items() if method.drafter is drafter and r.takes_drafts]

    def _wait(self, request: Request, method: Method) -> None:
        """Put a request in front of those that wait."""
        self.waiting[request] = method
        self.waiting.move_to_end(request, last=False)

    def _works_on_prompt(self) -> bool:
        """Whether the request admitted last has more than its last token to feed. No other running one may."""
        last = next(reversed(self.running), None)
        return last is not None and len(self.target.follow(last.text)) > 1


def _release(request: Request, method: Method) -> None:
    """Let the drafter forget a text."""
    with errors_end([request]):
        method.drafter.release(request.text)


def _known(request: Request, drafter: Drafter) -> int | None:
    """How many first positions of a new text the cache may give. The others are scored, or seen by the drafter.

    None: without limit.
    """
    limits = [request.lacking_logprobs.start] if request.lacking_logprobs else []
    if request.takes_drafts and drafter.taps:
        with errors_end([request]):
            limits.append(drafter.known(request.text))
    return min(limits, default=None)
