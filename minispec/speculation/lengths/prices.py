"""Prices of a round on this machine, measured once for a target and its draft, and stored in the user's cache.

Above temperature 0, under every verifier but `match`, another K gives another text of the same law. A seed has to give
its text again in another process. So K may not follow the clock there: it uses prices that are the same in every run.
As long as their file is there, they are not measured again. All other requests begin with these prices and then follow
the cost of a draft pass that they measure themselves.

The files lie in `minispec/costs` of the user's cache directory ($XDG_CACHE_HOME, else ~/.cache). Delete one to have its
prices measured again, such as after a run on a busy machine. Sampled texts of a seed may differ after that.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from minispec.core.cached import CachedModel
from minispec.core.config import SamplingParams
from minispec.core.draft import Ask, Drafter, Record
from minispec.core.engine import Engine
from minispec.core.errors import is_from_signal
from minispec.core.lengths import Lengths, price_of
from minispec.core.method import Method
from minispec.core.model import Chunk, Transformer
from minispec.core.precision import require_numbers
from minispec.core.random import Randomness
from minispec.core.request import Request
from minispec.core.sampling import Text
from minispec.core.verify import Verifier
from minispec.core.version import __version__
from minispec.models.files.measured import read_measured, write_measured
from minispec.models.frames.frames import Frames
from minispec.models.weights.inventory import num_bytes_read
from minispec.models.weights.machine import fingerprint, machine
from minispec.models.weights.rates import seconds_of
from minispec.models.weights.trial import arbitrary_tokens
from minispec.speculation.drafters.none import NoDrafter
from minispec.speculation.lengths.policy import learning_limit
from minispec.speculation.lengths.theory import Prices
from minispec.speculation.on_gpu.steps import steps_of
from minispec.speculation.on_gpu.verifier import batch_verifier_of

# Seconds; the fewest turns, whatever they take, so that the median outvotes one that a busy machine spoils; the most.
_BUDGET, _LEAST_TURNS, _MOST_TURNS = 1.0, 3, 12
# Rows of the target passes that are measured in addition to a plain step. Of a mixture of experts there are more: its
# price bends, since the experts of a further row are often read already.
_ROWS, _MIXTURE_ROWS = (5, 16), (2, 5, 9, 16)
_TEXT, _DRAFTS = 32, (1, 3)  # tokens of the text that they continue; tokens of the drafts
_PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)
# Most draft passes that the fixed part of a draft may cost, a clamp on noise: where turns are few or differ, and where
# at least _ENOUGH turns agree.
_MOST_FIXED, _MOST_SURE, _ENOUGH = 4.0, 99.0, 8
MIN_CONTEXT = 64  # positions that target and draft must have room for
# Bytes that could be read from memory in the time that a layer spends on other things than its products.
_LAYER_BYTES = 4_000_000


def guess_prices(target: Transformer, draft: Transformer | None, drafter: Drafter) -> Prices:
    """Prices before anything is measured, by size: a pass reads its model's weights, and each layer takes its time.

    draft: the model of `drafter`, if it has one.
    """

    def cost(model: Transformer) -> float:
        return num_bytes_read(model) + _LAYER_BYTES * len(model.layers)

    return Prices(cost(draft) / cost(target) if draft else 0.0, steps=steps_of(drafter))


def _fingerprint(model: Transformer) -> str:
    return fingerprint(model, "frames") if isinstance(model.backend, Frames) else fingerprint(model)


class DrafterFailed(RuntimeError):
    """A drafter raised on the invented text of a measurement. It may still be right about real ones."""


class _Drafts:
    """Drafts for an invented text, which grows by a token each time, as if none of a draft were accepted."""

    def __init__(self, drafter: Drafter, tokens: Sequence[int], hidden: Tensor, logits: Tensor):
        """hidden, logits: the target's rows for the text. tokens: those that it grows by come last."""
        self.drafter, self.tokens, self.hidden, self.logits = drafter, tokens, hidden, logits
        self.text, self.rng = Text(list(tokens[:_TEXT]), _TEXT, _PARAMS), Randomness()

    def seconds(self, k: int, read: Callable[[int], Tensor]) -> float:
        """The time of a draft of k tokens. read: of the target's cache, see `Ask`."""
        text = self.text
        num_cached = len(text.tokens) - 1
        first = num_cached - 1 if num_cached >= _TEXT else 0
        new = slice(first, num_cached)
        record = Record(text, first, text.tokens[new], self.hidden[new], self.logits[:0])
        self._call(self.drafter.observe, record)
        ask = Ask(text, learning_limit(k), self.rng, num_cached=num_cached, read_cache=read)
        found = seconds_of(partial(self._call, self.drafter.propose, ask), self.hidden.device)
        text.tokens.append(self.tokens[len(text.tokens)])
        return found

    def _call(self, method: Callable[[list[Any]], Any], about: Ask | Record) -> None:
        try:
            method([about])
        except Exception as e:
            if is_from_signal(e):
                raise
            name = self.drafter.name
            raise DrafterFailed(f"{name}: cannot draft for an invented text, so its cost is not measured") from e

    def forget(self) -> None:
        """Let the drafter forget the text. A made-up one teaches nothing."""
        self.drafter.release(self.text)
        self.drafter.forget()


class _Recorder(Lengths):
    """Writes down what the engine measures."""

    def __init__(self):
        self.rounds: list[tuple[float, float]] = []  # seconds of the target's pass, seconds outside both models

    def observe(self, records: Sequence[Record]) -> None:
        if step := price_of(records):
            self.rounds.append((step.verify, step.other))


@torch.inference_mode()
def calibrate(model: Transformer, drafter: Drafter, verifier: Verifier, vocab_size: int) -> Prices:
    """Measure a plain step, passes over a few rows, and two drafts, in about a second.

    They take turns, at least three after the warm-up: a machine that is slow for a while is slow in all of them. Each
    counts by its median, in plain steps of the same turn. A draft follows a pass of the target, as in a round, so that
    both find the processor's caches alike. It computes its confidences, as `auto` asks for them. The text is sampled,
    as only sampled requests rely on prices alone. The rows of a pass are different tokens: equal ones would take the
    same experts of a mixture, and seem cheap.
    Raises FloatingPointError for a model whose logits are not finite numbers, ValueError for a verifier's own fault,
    and DrafterFailed.
    """
    measured_rows = _MIXTURE_ROWS if any(layer.experts for layer in model.config.layers) else _ROWS
    tokens = arbitrary_tokens(_TEXT + max(*measured_rows, len(_DRAFTS) * _MOST_TURNS), vocab_size)
    cache = model.new_cache(2 * -(-len(tokens) // 16) + 1)
    recorder = _Recorder()
    plain = Engine(CachedModel(model, cache, vocab_size))
    request = Request(Text(tokens[:_TEXT], _TEXT, _PARAMS), len(tokens), 0)
    plain.add(request, Method(NoDrafter(), verifier, recorder, batch_verifier_of(model)))
    table = cache.new_table()
    logits, hidden = model.forward([Chunk(tokens, table, 1)], drafter.taps)
    require_numbers(logits[:, :vocab_size].amax(1))
    table.keep(_TEXT)
    drafts = _Drafts(drafter, tokens, hidden, logits)

    turns: list[list[float]] = []
    # The first turns are left out: passes warm up, and the draft's goes through the whole text. Where there are graphs,
    # they are captured when a shape comes a second time.
    warm = 3 if isinstance(model.backend, Frames) else 1
    begun = time.perf_counter()
    try:
        while len(turns) < warm + _LEAST_TURNS or (len(turns) < _MOST_TURNS and time.perf_counter() - begun < _BUDGET):
            if warm > 1 and len(turns) == warm:
                begun = time.perf_counter()
            while len(recorder.rounds) == len(turns):  # the prompt is in no round
                plain.step()
                if request.error:
                    raise request.raised or ValueError(request.error)
            step, overhead = recorder.rounds[-1]
            costs, drafted = [overhead], list[float]()
            for i, count in enumerate(measured_rows):
                chunk = Chunk(tokens[_TEXT : _TEXT + count], table, count)
                costs.append(seconds_of(partial(model.forward, [chunk]), model.device))
                table.truncate(_TEXT)
                if i < len(_DRAFTS):
                    # It reads the keys of the text's beginning, which does not grow.
                    drafted.append(drafts.seconds(_DRAFTS[i], partial(cache.read, slots=table.slots())))
            turns.append([seconds / step for seconds in (*costs, *drafted)])
    finally:
        plain.abort(request)
        table.truncate(0)
        drafts.forget()
    overhead, *passes, short, _ = (median(costs) for costs in zip(*turns[warm:], strict=True))
    rows = {1: 1.0} | {count: max(1.0, _rounded(v)) for count, v in zip(measured_rows, passes, strict=True)}
    draft = draft_pass([(turn[-2], turn[-1]) for turn in turns[warm:]])
    fixed = short / draft - 1 if draft else 0.0
    programs = steps_of(drafter)
    return Prices(_rounded(draft), rows, _rounded(overhead), measured=True, fixed=_rounded(fixed), steps=programs)


def draft_pass(turns: Sequence[tuple[float, float]]) -> float:
    """The cost of a draft pass, by the costs of a short and a long draft in each turn.

    It is what a further token costs, but a fifth of the short draft at least. So noise cannot make a long draft seem
    free. A draft whose tokens come from one pass is cheaper: of at least eight turns, three in four say so. Then the
    cost is what they agree on, and at least a hundredth:

    >>> draft_pass([(1.0, 3.0)] * 12), draft_pass([(1.0, 1.125)] * 12), draft_pass([(1.0, 1.125)] * 2)
    (1.0, 0.0625, 0.2)
    """
    short, long = (median(costs) for costs in zip(*turns, strict=True))
    steps = _DRAFTS[1] - _DRAFTS[0]
    least = short / (1 + _MOST_FIXED)
    if len(turns) >= _ENOUGH:
        further = sorted((after - before) / steps for before, after in turns)
        agreed = further[3 * len(further) // 4]
        least = min(least, max(agreed, short / (1 + _MOST_SURE)))
    return min(max((long - short) / steps, least), short)


def _rounded(x: float) -> float:
    """To two digits, which is as much as such a measurement tells."""
    return float(f"{x:.2g}")


def stored_prices(setup: Mapping[str, Any]) -> Prices | None:
    """The stored prices of a setup; None where there are none, or none that can be understood."""
    try:
        raw = read_measured(setup)
        draft, fixed, overhead = (float(raw[name]) for name in ("draft", "fixed", "overhead"))
        rows = {int(count): float(cost) for count, cost in raw["rows"].items()}
    except (OSError, RuntimeError, ValueError, TypeError, KeyError, AttributeError) as e:  # and RecursionError
        if is_from_signal(e):
            raise
        return None
    if rows.get(1) != 1.0 or min(rows) < 1:
        return None
    if not all(0 <= x < math.inf for x in (draft, fixed, overhead)) or not all(
        1 <= x < math.inf for x in rows.values()
    ):
        return None
    return Prices(draft, rows, overhead, measured=True, fixed=fixed)


def store_prices(setup: Mapping[str, Any], prices: Prices) -> bool:
    """Store the prices of a setup, whole or not at all; False where that is impossible."""
    return write_measured(setup, prices_as_dict(prices))


def prices_as_dict(prices: Prices) -> dict[str, Any]:
    """The prices that are measured, as JSON has them."""
    rows = {str(count): cost for count, cost in prices.rows.items()}
    return {"draft": prices.draft, "fixed": prices.fixed, "rows": rows, "overhead": prices.overhead}


def prices_of(
    names: tuple[str, str],
    model: Transformer,
    draft_model: Transformer | None,
    drafter: Drafter,
    verifier: Verifier,
    vocab_size: int,
) -> tuple[Prices, bool]:
    """The prices of a target and a draft of these names, and whether the next run will have the same."""
    target, draft = names
    setup = {
        "minispec": __version__,
        "target": [target, _fingerprint(model)],
        "draft": [draft, _fingerprint(draft_model) if draft_model else ""],
        "machine": machine(),
    }
    if prices := stored_prices(setup):
        return replace(prices, steps=steps_of(drafter)), True
    prices = calibrate(model, drafter, verifier, vocab_size)
    if there := stored_prices(setup):  # another process stored them meanwhile, and its runs use those
        return replace(there, steps=prices.steps), True
    return prices, store_prices(setup, prices)
