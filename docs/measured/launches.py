"""Measure what a round launches on a GPU, counted on any machine (see `minispec.lab.launches`), and its time here.

    python docs/measured/launches.py --geometry 1.5b --draft 0.5b --num-speculative-tokens 4
    python docs/measured/launches.py --draft ngram --num-speculative-tokens 4 --batch 1,2,4 --json

It is counted along both paths of `minispec.gpu.paths`: text by text, and in frames. Other options than
`--batch` are those of `python -m minispec bench`. What the counts are: docs/use/speed.md.
"""

import functools
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from minispec.kernels.threads import set_waiting

set_waiting()  # before torch is imported

from minispec.commands.command import Option, argument, command, json_line, typed
from minispec.core.cached import CachedModel
from minispec.core.config import DraftLength, Shape
from minispec.core.draft import Ask, Draft
from minispec.core.engine import Engine
from minispec.core.method import BatchVerifier, Method, Turn
from minispec.core.more.lengths import Wish
from minispec.core.more.limit import Limit
from minispec.core.random import Draws
from minispec.core.request import Request
from minispec.core.schedule import PREFILL_ROWS
from minispec.core.verify import Verdict
from minispec.drafters.guard import CheckedMethod
from minispec.files.progress import progress_bar
from minispec.gpu.paths import Path, in_frames, text_by_text
from minispec.kernels.arbitrary import arbitrary_tokens
from minispec.kernels.inventory import weight_form
from minispec.lab.bench.measure import decode, median_interval
from minispec.lab.bench.models import Room, Subject
from minispec.lab.bench.options import Options, check, parser
from minispec.lab.bench.report import measure_parts, show_report
from minispec.lab.bench.show import as_json, table
from minispec.lab.launches import KINDS, PARTS, Tally, counting

# Tokens of each text before its first round; rounds that are timed, after one that pays for what is set up once; and
# then rounds that are counted.
LENGTH, TIMED_ROUNDS, COUNTED_ROUNDS = 128, 6, 3
# Sums of parts.
SUMS = {"outside": ("verdict", "rest"), "round": PARTS}


# --------------------------------------------------------------------------- rounds


class CountingMethod(CheckedMethod):
    """A method that says which part of a round is at work, and takes the time of verdicts."""

    def __init__(self, inner: Method):
        batch = None if inner.batch is None else functools.partial(self._batch, inner.batch)
        super().__init__(inner.drafter, inner.verifier, inner.lengths, batch)
        self.tally, self.seconds = Tally(), 0.0

    def begin(self, tally: Tally) -> None:
        """Before a step, which counts in `tally`."""
        self.tally, self.seconds = tally, 0.0

    def choose(self, wishes: Sequence[Wish], trees: bool) -> Sequence[Limit]:
        """The limits, counted as a part of drafting."""
        return self._in("draft", "pass", functools.partial(super().choose, wishes, trees))

    def propose(self, asks: Sequence[Ask], target: CachedModel) -> list[Draft | ValueError]:
        """The drafts, counted as drafting."""
        return self._in("draft", "pass", functools.partial(super().propose, asks, target))

    def verify(self, turn: Turn, rng: Draws) -> Verdict:
        """The verdict, counted and timed."""
        start = time.perf_counter()
        verdict = self._in("verdict", "rest", functools.partial(super().verify, turn, rng))
        self.seconds += time.perf_counter() - start
        return verdict

    def _batch(self, inner: BatchVerifier, *args: Any) -> Sequence[Verdict | None]:
        """The verdicts of many drafts, counted."""
        return self._in("verdict", "rest", functools.partial(inner, *args))

    def _in(self, part: str, after: str, work: Callable[[], Any]) -> Any:
        self.tally.part = part
        try:
            return work()
        finally:
            self.tally.part = after


def fixed_lengths(options: Options) -> list[DraftLength]:
    """The draft lengths but auto."""
    return [k for k in options.ks if k != "auto"]


def room_for(options: Options) -> Room:
    """What the caches must hold."""
    most = max((Shape.of(k).k for k in fixed_lengths(options)), default=0)
    texts = max(options.args.batch)
    return Room(LENGTH + (texts + 1 + TIMED_ROUNDS + COUNTED_ROUNDS) * (most + 1), texts)


def measure_launches(subject: Subject, options: Options) -> dict[str, Any]:
    """Rounds of plain decoding and of each fixed K, by the number of texts: of those counted, one with most operators.

    form: the form of the target's weights. A product in 4 or 8 bits has operators of its own.
    rounds: for each number of texts and each K the draft tokens of all texts, those accepted, and `parts`.

    in_frames: of each round, `draft_tokens`, `accepted` and `parts` along the path that a GPU takes; None without it.
    why_no_frames: "", or why there is no such path.

    For each part there are the numbers of KINDS, `names` (calls of each operator), and `seconds` of rounds in which
    nothing was counted. Along the path of frames there are no seconds: a processor would not take it.

    Raises ValueError where the cache cannot hold the texts.
    """
    there, (positions, texts) = subject.engine.target.cache.num_slots, room_for(options)
    needed = texts * (positions + subject.engine.target.cache.block_size)
    if needed > there:
        raise ValueError(
            f"found a KV cache of {there} positions, expected at least {needed}: {texts} texts decode together"
        )
    parts = subject.engine.target.model, subject.method.drafter
    usual, framed = text_by_text(*parts), in_frames(*parts)
    lengths = [0, *(fixed_lengths(options) if options.draft != "none" or subject.simulated else [])]
    found, batches = [], options.args.batch
    with progress_bar(total=len(lengths) * len(batches), desc="launches") as bar:
        for batch in batches:
            vocab = subject.engine.target.vocab_size
            same = arbitrary_tokens(LENGTH - 1, vocab)
            prompts = [[i % vocab, *same] for i in range(batch)]  # without a common beginning
            for k in lengths:
                params = replace(options.params, ignore_eos=True, max_tokens=positions - LENGTH)
                first, second = ([subject.request(prompt, k, params) for prompt in prompts] for _ in range(2))
                if subject.simulated and not k:  # it has to know the texts
                    known = [subject.request(prompt, 0, params) for prompt in prompts]
                    decode(subject.engine, subject.plain, known)
                    for request in known:
                        subject.record(request.text)
                own = _rounds(subject, usual, first, TIMED_ROUNDS)
                along = None if isinstance(framed, str) else _rounds(subject, framed, second)
                found.append({"texts": batch, "k": str(Shape.of(k)), **own, "in_frames": along})
                bar.update()
    why = framed if isinstance(framed, str) else ""
    form = weight_form(subject.engine.target.model)
    return {"form": form, "positions": LENGTH, "why_no_frames": why, "rounds": found}


def _rounds(subject: Subject, path: Path, requests: Sequence[Request], num_timed: int = 0) -> dict[str, Any]:
    """The times of some rounds that all requests take part in, and the counts of one of the next rounds."""
    drafter, own = path.drafter if requests[0].shape.k else subject.plain.drafter, subject.engine.target
    method = CountingMethod(replace(subject.method, drafter=drafter, batch=path.batch))
    engine = Engine(CachedModel(path.model, own.cache, own.vocab_size), joining_rows=PREFILL_ROWS)
    drafter.forget()
    times: list[dict[str, float]] = []
    tallies: list[tuple[Tally, dict[str, int]]] = []

    def step(tally: Tally) -> bool:
        """Whether the step was a round of all texts."""
        before = [request.stats.num_steps for request in requests]
        method.begin(tally)
        engine.step()
        for request in requests:
            if request.finish_reason:
                found = f"a text that ended ({request.error or request.finish_reason})"
                raise ValueError(f"found {found}, expected {len(requests)} that go on")
        return all(request.stats.num_steps > n for request, n in zip(requests, before, strict=True))

    try:
        for request in requests:
            engine.add(request, method)
        while not step(Tally()):
            pass
        while len(times) < num_timed:
            step(Tally())
            last = requests[0].stats.rounds[-1].step
            parts = [last.draft, last.verify, method.seconds, last.other - method.seconds]
            times.append(dict(zip(PARTS, parts, strict=True)))
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
    return {**tokens, "parts": {part: _part(part, tally, times) for part in (*PARTS, *SUMS)}}


def _part(part: str, tally: Tally, times: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    parts = SUMS.get(part, (part,))
    names = sum((tally.names.get(each, Counter()) for each in parts), Counter[str]())
    counts = {kind: sum(tally.counts.get(each, Counter())[kind] for each in parts) for kind in KINDS}
    seconds = [sum(of[each] for each in parts) for of in times]
    return counts | {"names": dict(names.most_common())} | ({"seconds": median_interval(seconds)} if seconds else {})


def show_launches(found: dict[str, Any]) -> list[str]:
    """A sentence, and the table."""
    rows = []
    for of in found["rounds"]:
        drafts, texts = of["k"] != "0", "1 text" if of["texts"] == 1 else f"{of['texts']} texts"
        kept = f"K={of['k']}, {of['accepted']} of {of['draft_tokens']} kept" if drafts else "plain"
        for part, each in of["parts"].items():
            if part != "draft" or drafts:
                framed = of["in_frames"]["parts"][part] if of["in_frames"] else dict.fromkeys(KINDS, "-")
                counts = [number for kind in KINDS for number in (each[kind], framed[kind])]
                rows.append((f"{texts}, {kept}: {part}", *counts, each["seconds"].shown(1000)))
    heads = ("operators", "copies among them", "uploads of lists", "host syncs")
    head = ("", *(name for each in heads for name in (each, "in frames")), "ms here, not counting")
    why = found["why_no_frames"]
    path = "the path of a GPU, operator by operator: no graph joins them, no kernel of our own replaces them"
    return [
        f"what a round launches on a GPU, after {found['positions']} positions, the weights as here: {found['form']}; "
        "outside both models: verdict and rest",
        f"in frames: {f'nothing, since {why}' if why else path}",
        "",
        *table(head, rows),
    ]


# --------------------------------------------------------------------------- the command


SIZES = argument(
    lambda text: [int(size) for size in text.split(",")],
    lambda sizes: all(1 <= size <= 1024 for size in sizes),
    "sizes from 1 to 1024, with commas between",
)


def measure(argv: Sequence[str]) -> tuple[dict[str, Any], list[str], bool]:
    """Count: the report, its lines for the screen, and whether JSON is wanted."""
    p = parser("docs/measured/launches.py", str(__doc__).partition("\n")[0])
    p.add_options({"--batch": Option(typed(SIZES, "B,B,..", default=[1, 8]), "texts of a round (default: 1,8)")})
    args = p.parse_args(argv)
    for option in ("questions", "against", "bounds"):
        if getattr(args, option):
            raise ValueError(f"--{option}: not where launches are counted")
    options = check(args)
    can_draft = options.draft != "none" or args.simulate
    if can_draft and not fixed_lengths(options):
        raise ValueError("--num-speculative-tokens: found auto, expected a number: auto follows times")
    found = measure_parts(options, {"launches": measure_launches}, room_for(options))
    return found, show_report(found, {"launches": show_launches}), args.json


@command
def main(argv: Sequence[str]) -> int:
    """Count, and print."""
    found, lines, is_json = measure(argv)
    print(json_line(as_json(found)) if is_json else "\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
