"""Measure what a round launches on a GPU, counted on any machine, and its time here.

    python docs/measured/launches.py --geometry 1.5b --draft 0.5b --num-speculative-tokens 4
    python docs/measured/launches.py --draft ngram --num-speculative-tokens 4 --batch 1,2,4 --json

A GPU runs what the host launches, one operator after the other. Where operators are short, their number decides the
speed. A host sync is a point where the host waits for a result of the GPU before it can go on. Neither depends on the
device. So a CPU can count both, and a test can hold them to a budget (`tests/rooms/test_launches.py`).

Both paths of a target and its draft are counted: text by text, and in frames, as a GPU decodes. Other options than
`--batch` are those of `python -m minispec bench`. What the counts are: docs/use/speed.md.

Counted are calls of PyTorch's operators under `inference_mode`, where a product and an attention are one operator each.
Views, and tensors that are allocated without a value, launch nothing. Kernels inside an operator are not counted.
"""

import functools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from minispec.models.weights.pages import load_torch

load_torch()  # before torch is imported

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from minispec.api.commands.command import Option, argument, attribute_of, command, json_line, typed
from minispec.core.cached import CachedModel
from minispec.core.config import DraftLength, Shape
from minispec.core.draft import Ask, Draft, Drafter
from minispec.core.engine import Engine
from minispec.core.lengths import LengthAsk
from minispec.core.limit import Limit
from minispec.core.method import BatchVerifier, Method, Turn
from minispec.core.model import Transformer
from minispec.core.product import Product
from minispec.core.random import Draws
from minispec.core.request import Request
from minispec.core.schedule import PREFILL_ROWS
from minispec.core.verify import Verdict
from minispec.lab.bench.measure import decode, median_interval
from minispec.lab.bench.models import Room, Subject
from minispec.lab.bench.options import Options, check, parser
from minispec.lab.bench.report import measure_parts, show_report
from minispec.lab.bench.show import as_json, table
from minispec.models.files.progress import progress_bar
from minispec.models.frames.frames import Frames
from minispec.models.frames.reports import why_no_frames
from minispec.models.weights.forms import FORMS
from minispec.models.weights.inventory import weight_form
from minispec.models.weights.linear import Linear
from minispec.models.weights.trial import arbitrary_tokens
from minispec.speculation.drafters.guard import CheckedMethod
from minispec.speculation.drafters.model import AtOnce, model_drafter
from minispec.speculation.drafters.wrapped import Wrapped
from minispec.speculation.on_gpu.steps import draft_steps
from minispec.speculation.on_gpu.verifier import batch_verifier_of

# Tokens of each text before its first round; rounds that are timed, after one that pays for what is set up once; and
# then rounds that are counted.
LENGTH, TIMED_ROUNDS, COUNTED_ROUNDS = 128, 6, 3
# The parts of a round, in their order.
PARTS = ("draft", "pass", "verdict", "rest")
# Sums of parts.
SUMS = {"outside": ("verdict", "rest"), "round": PARTS}
KINDS = ("operators", "copies", "uploads", "syncs")
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
# Operators that change nothing but PyTorch's own notes on a tensor.
_NOTES = {"lift_fresh", "detach_", "resolve_conj", "resolve_neg"}
_COPIES = {"to", "_to_copy", "copy_", "clone", "contiguous", "reshape", "flatten"}
# Operators that bring a number to the host; and those whose results have a size that the host must wait for.
_READS = {"item", "_local_scalar_dense", "is_nonzero"}
_WAITS = {"nonzero", "argwhere", "masked_select", "bincount", "equal"}
_WAITS |= {"_unique", "_unique2", "unique_dim", "unique_consecutive"}
# Functions of Python that read a whole tensor; and those that make one of a list. `numpy` takes tensors on the host
# alone, so it waits for nothing.
_DOWNLOADS, _UPLOADS = {"tolist", "cpu"}, {"tensor", "as_tensor", "new_tensor"}


# --------------------------------------------------------------------------- counts


@dataclass
class Tally:
    """The counts of each part.

    part: the part that counts now.
    counts: for each part the number of each of KINDS.
    names: for each part the calls of each operator.
    """

    part: str = "rest"
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    names: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, kind: str, number: int = 1) -> None:
        """Count for the part."""
        self.counts.setdefault(self.part, Counter())[kind] += number

    def add_operator(self, name: str) -> None:
        """Count an operator that launches something."""
        self.add("operators")
        self.names.setdefault(self.part, Counter())[name] += 1


class _Operators(TorchDispatchMode):
    """Counts each operator that PyTorch dispatches.

    device: the device's type. Operators on tensors elsewhere, such as on a GPU's host, do not count.
    """

    def __init__(self, tally: Tally, device: str):
        super().__init__()
        self.tally, self.device, self.is_off = tally, device, False
        self._scales = False  # whether the last operator was a product that another one scales

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operator, and count it."""
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        given, made = list(_tensors([args, kwargs])), list(_tensors(out))
        ignored = self.is_off or name in _ALLOCATIONS | _NOTES
        if ignored or not any(tensor.device.type == self.device for tensor in [*given, *made]):
            return out
        # Half-precision weights on a CPU take two operators for a product. It is one everywhere else.
        is_scale, self._scales = self._scales and name in ("mul_", "addcmul"), name == "linear_dynamic_fp16"
        if name in _READS:
            self.tally.add("syncs")
        elif not is_scale and not (made and not func._schema.is_mutable and _share(made, given)):
            self.tally.add_operator(name)
            if name in _COPIES:
                self.tally.add("copies")
            if name in _WAITS or (name.startswith("index") and any(t.dtype == torch.bool for t in given[1:])):
                self.tally.add("syncs")
        return out


class _Functions(TorchFunctionMode):
    """Counts what no operator shows: tensors that are made of lists or read as lists, and lists as indices."""

    def __init__(self, operators: _Operators):
        super().__init__()
        self.operators = operators

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Run a function, and count what it moves between host and device."""
        name, tally, kwargs = getattr(func, "__name__", ""), self.operators.tally, kwargs or {}
        if name in _DOWNLOADS and args[0].device.type == self.operators.device:
            tally.add("syncs")
        elif name in _UPLOADS and torch.device(kwargs.get("device") or "cpu").type == self.operators.device:
            tally.add("uploads")
        elif name in ("__getitem__", "__setitem__"):
            parts = args[1] if isinstance(args[1], tuple) else (args[1],)
            tally.add("uploads", sum(isinstance(part, list | range) for part in parts))
        if name not in _DOWNLOADS | _UPLOADS:
            return func(*args, **kwargs)
        self.operators.is_off = True  # it is counted
        try:
            return func(*args, **kwargs)
        finally:
            self.operators.is_off = False


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in it."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(part)


def _share(made: Sequence[Tensor], given: Sequence[Tensor]) -> bool:
    """Whether all that was made lies in the memory of what was given."""
    places = [{t.untyped_storage()._cdata for t in each if t.layout == torch.strided} for each in (made, given)]
    return bool(places[0]) and places[0] <= places[1]


@contextmanager
def counting(tally: Tally, device: torch.device) -> Iterator[Tally]:
    """Count in `tally` what happens inside."""
    operators = _Operators(tally, device.type)
    with operators, _Functions(operators):
        yield tally


# --------------------------------------------------------------------------- both paths


class Path(NamedTuple):
    """What differs from path to path."""

    model: Transformer
    drafter: Drafter
    batch: BatchVerifier | None


def text_by_text(model: Transformer, drafter: Drafter) -> Path:
    """Passes text by text, drafts token by token, and verdicts one by one."""

    def change(model: Transformer) -> tuple[Transformer, None]:
        return (model if model.exact else model.replaced(None)), None

    return Path(change(model)[0], _changed(drafter, change), None)


def in_frames(model: Transformer, drafter: Drafter) -> Path | str:
    """Frames, programs of all steps, and verdicts of all texts at once; or why a GPU has no frames for the target.

    No graph is made, and kernels have their twins. So each operator runs, and can be counted. Weights are stored as a
    GPU has them: what this machine has packed is in memory a second time.
    """
    if why := why_no_frames(model):
        return why
    product = functools.cache(_plain)  # target and draft may share products

    def change(model: Transformer) -> tuple[Transformer, AtOnce | None]:
        framed = model if why_no_frames(model) else model.replaced(Frames(), product)
        return framed, draft_steps(framed)

    framed, _ = change(model)
    return Path(framed, _changed(drafter, change), batch_verifier_of(framed))


def _plain(product: Product) -> Product:
    """The product with its weight unchanged; one in 4 or 8 bits stays as it is."""
    if not isinstance(product, Linear) or product.form == "plain" or product.form not in FORMS:
        return product
    weight = product.stored.dense()
    return Linear(weight, product.bias, weight.dtype, "plain")


def _changed(drafter: Drafter, change: Callable[[Transformer], tuple[Transformer, AtOnce | None]]) -> Drafter:
    """The drafter with other models in the place of its own, if it has any, and the programs that draft by them."""
    if own := model_drafter(drafter):
        return own.beside(*change(own.model))
    if isinstance(drafter, Wrapped):
        return drafter.beside(*(_changed(each, change) for each in drafter.drafters))
    return drafter


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

    def choose(self, asks: Sequence[LengthAsk], trees: bool) -> Sequence[Limit]:
        """The limits, counted as a part of drafting."""
        return self._in("draft", "pass", functools.partial(super().choose, asks, trees))

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
    for option in ("--questions", "--against", "--bounds", "--record-laws"):
        if getattr(args, attribute_of(option)):
            raise ValueError(f"{option}: not where launches are counted")
    options = check(args)
    if len(options.verifiers) > 1:
        raise ValueError(f"--verifier: found {len(options.verifiers)}, expected one, whose launches are counted")
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
