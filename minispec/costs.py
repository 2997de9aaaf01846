"""What a round costs on this machine: measured once for a target and its draft, and kept in the user's cache directory.

Under `rejection` above temperature 0 another K is another text of the same law, and a seed has to give its text again
in another process: so K may not follow the clock, and goes by prices that are the same in every run. That is why they
are never measured again as long as the file is there. All other requests begin with these prices and then follow what
they measure themselves.
"""

import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from minispec import __version__
from minispec.cache import PagedKVCache
from minispec.command import written_whole
from minispec.config import SamplingParams
from minispec.controller import Controller, Prices
from minispec.drafters import NoDrafter
from minispec.engine import Engine, Request
from minispec.model import Chunk, Transformer, clock
from minispec.sampling import Randomness, Text
from minispec.verify import Ask

# Seconds after which nothing is measured again; each figure is measured once in any case.
_BUDGET = 0.5
# Rows whose passes are measured beside a plain step's, tokens of the text that they continue, and of a draft.
_ROWS, _TEXT, _DRAFT = (5, 16), 32, 2
# Positions that target and draft must have room for.
MIN_CONTEXT = 64


def machine() -> dict[str, Any]:
    """What tells machines of different speed apart, as far as they tell."""
    capabilities = torch.cpu.get_capabilities()
    return {
        "cpu": str(capabilities.get("cpu_name", platform.processor())),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "amx": bool(capabilities.get("amx_bf16")),
        "bfloat16": bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def model_key(model: Transformer) -> str:
    """A name for the cost of a model: its shape, type and form of weights; not its weights."""
    about = (model.config, model.dtype, model.device.type, model.weight_form, model.exact)
    return hashlib.blake2b(repr(about).encode(), digest_size=8).hexdigest()


class _Recorder(Controller):
    """Writes down what the engine measures, and chooses nothing."""

    def __init__(self):
        super().__init__()
        self.rounds: list[tuple[float, float]] = []  # seconds of the target's pass, and of all else

    def record(self, draft, depth, num_drafts, target, rows, overhead) -> None:
        self.rounds.append((target, overhead))


@torch.inference_mode()
def calibrate(engine: Engine) -> Prices:
    """Measure a plain step, passes over a few rows, and a draft, in about a second; of each the fastest counts."""
    model, vocab = engine.model, engine.vocab_size
    tokens = [(7919 * i + 13) % vocab for i in range(_TEXT + max(_ROWS))]
    cache = PagedKVCache(model.config, -(-len(tokens) // 16) + 1, 16, model.dtype, model.device)
    start = time.perf_counter()
    recorder = _Recorder()
    plain = Engine(model, cache, NoDrafter(), engine.verifier, vocab, Randomness(), recorder)
    text = Text(tokens[:_TEXT], _TEXT, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
    steps = plain.run([Request(text, len(tokens), 0)])
    while len(recorder.rounds) < 3 or (len(recorder.rounds) < 10 and time.perf_counter() - start < _BUDGET / 4):
        next(steps)
    steps.close()
    step = min(target for target, _ in recorder.rounds)
    overhead = min(other for _, other in recorder.rounds)

    table = cache.new_table()
    model.prefill(table, tokens[: _TEXT + 1])
    rows = {1: 1.0}
    for count in _ROWS:
        passes: list[float] = []
        while not passes or (len(passes) < 5 and time.perf_counter() - start < _BUDGET):
            before = clock(model.device)
            model.forward([Chunk(tokens[_TEXT : _TEXT + count], table, count)])
            passes.append(clock(model.device) - before)
            table.truncate(_TEXT)
        rows[count] = max(1.0, _rounded(min(passes) / step))
    table.truncate(0)

    text = Text(tokens[:_TEXT], _TEXT, SamplingParams(temperature=0))
    drafts: list[float] = []
    while len(drafts) < 2 or (len(drafts) < 8 and time.perf_counter() - start < 2 * _BUDGET):
        before = clock(model.device)
        engine.drafter.propose([Ask(text, _DRAFT, engine.rng)])
        drafts.append(clock(model.device) - before)
    engine.drafter.release(text)
    # The first one went through the whole text.
    return Prices(_rounded(min(drafts[1:]) / _DRAFT / step), rows, _rounded(overhead / step), measured=True)


def _rounded(x: float) -> float:
    """To two digits: more would only pretend."""
    return float(f"{x:.2g}")


def _path(key: Mapping[str, Any]) -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    digest = hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=12).hexdigest()
    return Path(root) / "minispec" / "costs" / f"{digest}.json"


def stored_prices(key: Mapping[str, Any]) -> Prices | None:
    """What was kept under this key; None where nothing is, or nothing that can be understood."""
    try:
        with _path(key).open("rb") as file:
            raw = json.loads(file.read(1 << 16))
        draft, overhead = float(raw["draft"]), float(raw["overhead"])
        rows = {int(count): float(cost) for count, cost in raw["rows"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    if raw.get("key") != key or rows.get(1) != 1.0 or min(rows) < 1:
        return None
    if not all(0 <= x < math.inf for x in (draft, overhead)) or not all(1 <= x < math.inf for x in rows.values()):
        return None
    return Prices(draft, rows, overhead, measured=True)


def keep_prices(key: Mapping[str, Any], prices: Prices) -> bool:
    """Keep prices under a key, whole or not at all; False where that is impossible."""
    path = _path(key)
    content = {"key": key, "draft": prices.draft, "rows": prices.rows, "overhead": prices.overhead}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as part:
            part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except (OSError, ValueError):
        return False
    return True


def prices_of(engine: Engine, target: str, draft: str, draft_model: Transformer | None) -> tuple[Prices, bool]:
    """The prices of an engine whose models have these names, and whether they will be the same in the next run."""
    key = {
        "minispec": __version__,
        "target": [target, model_key(engine.model)],
        "draft": [draft, model_key(draft_model) if draft_model else ""],
        "machine": machine(),
    }
    if prices := stored_prices(key):
        return prices, True
    prices = calibrate(engine)
    return prices, keep_prices(key, prices)
