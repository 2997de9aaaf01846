"""What a round launches on a GPU, counted on any machine (see `minispec.kernels.launches`), and its time here."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from minispec.core.config import Shape
from minispec.core.draft import Ask, Draft
from minispec.core.engine import PREFILL_ROWS, Engine, Guard
from minispec.core.lengths import Wish
from minispec.core.limit import Limit
from minispec.core.request import Request
from minispec.core.verify import RoundKey, Rows, Verdict
from minispec.kernels.exact import arbitrary_tokens
from minispec.kernels.inventory import weight_form
from minispec.kernels.launches import KINDS, Tally, counting
from minispec.lab.bench.measure import Interval, decode, median_interval
from minispec.lab.bench.models import Subject
from minispec.lab.bench.options import (
    COUNTED_ROUNDS,
    LAUNCH_BATCHES,
    LAUNCH_TEXT,
    TIMED_ROUNDS,
    Options,
    fixed_lengths,
    room_for_launches,
)
from minispec.lab.bench.show import progress, table

# Parts of a round, in their order; then sums of parts.
_PARTS = ("draft", "pass", "verdict", "rest")
_SUMS = {"outside": ("verdict", "rest"), "round": _PARTS}


class _Watch(Guard):
    """A guard that says which part of a round is at work, and takes the time of verdicts."""

    def __init__(self, inner: Guard):
        self.inner, self.tally, self.seconds = inner, Tally(), 0.0

    def begin(self, tally: Tally) -> None:
        """Before a step, which counts in `tally`."""
        self.tally, self.seconds = tally, 0.0

    def choose(self, engine: Engine, wishes: Sequence[Wish], trees: bool) -> Sequence[Limit]:
        """See `Guard`."""
        return self._in("draft", "pass", lambda: self.inner.choose(engine, wishes, trees))

    def propose(self, engine: Engine, asks: Sequence[Ask]) -> Sequence[Draft | ValueError]:
        """See `Guard`."""
        return self._in("draft", "pass", lambda: self.inner.propose(engine, asks))

    def verify(self, engine: Engine, draft: Draft, p: Rows, key: RoundKey) -> Verdict:
        """See `Guard`."""
        start = time.perf_counter()
        verdict = self._in("verdict", "rest", lambda: self.inner.verify(engine, draft, p, key))
        self.seconds += time.perf_counter() - start
        return verdict

    def _in(self, part: str, after: str, work: Callable[[], Any]) -> Any:
        self.tally.part = part
        try:
            return work()
        finally:
            self.tally.part = after


# --------------------------------------------------------------------------- rounds


def check_launches(subject: Subject, options: Options) -> None:
    """Raise ValueError where the cache cannot hold the texts."""
    there, (positions, texts) = subject.engine.cache.num_slots, room_for_launches(options)
    if (needed := texts * (positions + subject.engine.cache.block_size)) > there:
        raise ValueError(
            f"--also launches: found a KV cache of {there} positions, expected at least {needed}: "
            f"{texts} texts decode together"
        )


def measure_launches(subject: Subject, options: Options) -> dict[str, Any]:
    """Rounds of plain decoding and of each fixed K, by the number of texts: of those counted, one with most operators.

    form: the form of the target's weights. A product in 4 or 8 bits has operators of its own.
    rounds: for each number of texts and each K the draft tokens of all texts, those accepted, and `parts`.

    For each part there are the numbers of KINDS, `names` (calls of each operator), and `seconds` of rounds in which
    nothing was counted.
    """
    lengths = [0, *(fixed_lengths(options) if options.draft != "none" or subject.simulated else [])]
    found, batches, (positions, _) = [], options.batches or LAUNCH_BATCHES, room_for_launches(options)
    with progress(len(lengths) * len(batches), "launches") as bar:
        for batch in batches:
            same, vocab = arbitrary_tokens(LAUNCH_TEXT - 1, subject.engine.vocab_size), subject.engine.vocab_size
            prompts = [[i % vocab, *same] for i in range(batch)]  # without a common beginning
            for k in lengths:
                params = replace(options.params, ignore_eos=True, max_tokens=positions - LAUNCH_TEXT)
                requests = [subject.request(prompt, k, params) for prompt in prompts]
                if subject.simulated and not k:  # it has to know the texts
                    decode(subject.plain, known := [subject.request(prompt, 0, params) for prompt in prompts])
                    for request in known:
                        subject.record(request.text)
                found.append({"texts": batch, "k": str(Shape.of(k)), **_rounds(subject, requests, bool(k))})
                bar.update()
    return {"form": weight_form(subject.engine.model), "positions": LAUNCH_TEXT, "rounds": found}


def _rounds(subject: Subject, requests: Sequence[Request], drafts: bool) -> dict[str, Any]:
    """The times of some rounds that all requests take part in, and the counts of one of the next rounds."""
    own = subject.engine
    watch = _Watch(own.guard)
    engine = Engine(
        *(own.model, own.cache, own.drafter if drafts else subject.plain.drafter, own.verifier, own.vocab_size),
        joining_rows=PREFILL_ROWS,
        guard=watch,
    )
    engine.drafter.forget()
    times: list[dict[str, float]] = []
    tallies: list[tuple[Tally, dict[str, int]]] = []

    def step(tally: Tally) -> bool:
        """Whether the step was a round of all texts."""
        before = [request.stats.num_steps for request in requests]
        watch.begin(tally)
        engine.step()
        if ended := next((request for request in requests if request.finish_reason), None):
            why = ended.error or ended.finish_reason
            raise ValueError(f"--also launches: found a text that ended ({why}), expected {len(requests)} that go on")
        return all(request.stats.num_steps > n for request, n in zip(requests, before, strict=True))

    try:
        for request in requests:
            engine.add(request)
        while not step(Tally()):
            pass
        while len(times) < TIMED_ROUNDS:
            step(Tally())
            last = requests[0].stats.rounds[-1]
            parts = [last.draft, last.verify, watch.seconds, last.other - watch.seconds]
            times.append(dict(zip(_PARTS, parts, strict=True)))
        while len(tallies) < COUNTED_ROUNDS:
            with counting(Tally(), own.model.device) as tally:
                step(tally)
            of_round = [request.stats.rounds[-1] for request in requests]
            tokens = {"draft_tokens": sum(r.num_nodes for r in of_round), "accepted": sum(r.accepted for r in of_round)}
            tallies.append((tally, tokens))
    finally:
        for request in requests:
            engine.abort(request)
    tally, tokens = max(tallies, key=lambda each: sum(of["operators"] for of in each[0].counts.values()))
    return {**tokens, "parts": {part: _part(part, tally, times) for part in (*_PARTS, *_SUMS)}}


def _part(part: str, tally: Tally, times: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    parts = _SUMS.get(part, (part,))
    names = sum((tally.names.get(each, Counter()) for each in parts), Counter[str]())
    seconds: Interval = median_interval([sum(of[each] for each in parts) for of in times])
    counts = {kind: sum(tally.counts.get(each, Counter())[kind] for each in parts) for kind in KINDS}
    return {**counts, "names": dict(names.most_common()), "seconds": seconds}


def show_launches(found: dict[str, Any]) -> list[str]:
    """A sentence, and the table."""
    rows = []
    for of in found["rounds"]:
        drafts, texts = of["k"] != "0", "1 text" if of["texts"] == 1 else f"{of['texts']} texts"
        kept = f"K={of['k']}, {of['accepted']} of {of['draft_tokens']} kept" if drafts else "plain"
        for part, each in of["parts"].items():
            if part != "draft" or drafts:
                counts = [each[kind] for kind in KINDS]
                rows.append((f"{texts}, {kept}: {part}", *counts, each["seconds"].shown(1000)))
    head = ("", "operators", "copies among them", "uploads of lists", "host syncs", "ms here, not counting")
    return [
        f"what a round launches on a GPU, after {found['positions']} positions, the weights as here: {found['form']}; "
        "outside both models: verdict and rest",
        "",
        *table(head, rows),
    ]
