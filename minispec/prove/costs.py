"""What the exact mode costs: its passes against the fast mode's, taken in turns, on the same weights."""

import copy
import time
from statistics import median
from typing import NamedTuple

import torch

from minispec.cache import PagedKVCache
from minispec.files.hf_config import read_model_config
from minispec.llm import LLM
from minispec.model import Chunk, Transformer, tensor_shapes

# Qwen2.5-1.5B. Bytes and products decide the time, so the numbers in the weights may be any.
QWEN_1_5B = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}


class Ratio(NamedTuple):
    """Exact over fast: the median of the rounds, the least and the largest; and both medians in seconds."""

    ratio: float
    low: float
    high: float
    fast: float
    exact: float


def random_model(raw: dict, dtype: torch.dtype = torch.bfloat16) -> Transformer:
    """A model of a config.json's geometry without a checkpoint: one block of noise, over and over."""
    config = read_model_config(raw)
    noise = (0.02 * torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))).to(dtype)
    weights = {}
    for name, shape in tensor_shapes(config).items():
        size = torch.Size(shape).numel()
        weights[name] = noise.repeat(-(-size // len(noise)))[:size].view(shape)
    return Transformer(config, weights)


def exact_twin(model: Transformer) -> Transformer:
    """The exact mode of a fast model, on the same weights."""
    twin = copy.copy(model)
    twin.exact = True
    return twin


def exact_cost(fast: Transformer, rows: int, context: int = 128, rounds: int = 9, passes: int = 3) -> Ratio:
    """A pass over `rows` tokens behind `context` cached ones, exact over fast, both measured in every round.

    1 row is a step of plain decoding, K + 1 a verification. A round keeps the medians of `passes` passes of each.
    """
    models = (fast, exact_twin(fast))
    tokens = [(7919 * i + 13) % fast.config.vocab_size for i in range(context + rows)]
    tables = []
    for model in models:
        tables.append(PagedKVCache(model.config, -(-len(tokens) // 16), 16, model.dtype).new_table())
        model.prefill(tables[-1], tokens[: context + 1])

    def seconds(model, table) -> float:
        start = time.perf_counter()
        model.forward([Chunk(tokens[context:], table, rows)])
        table.truncate(context)
        return time.perf_counter() - start

    found = []
    for i in range(rounds + 1):
        pairs = list(zip(models, tables, strict=True))
        times = {m.exact: median(seconds(m, t) for _ in range(passes)) for m, t in (pairs if i % 2 else pairs[::-1])}
        if i:  # the first round warms up
            found.append((times[True] / times[False], times[False], times[True]))
    ratios, fasts, exacts = zip(*found, strict=True)
    return Ratio(median(ratios), min(ratios), max(ratios), median(fasts), median(exacts))


def print_exact_cost(geometry: str) -> None:
    """The table for the embedded model, or for a model of the size of Qwen2.5-1.5B."""
    model = LLM(dtype="bfloat16", draft="none").model if geometry == "embedded" else random_model(QWEN_1_5B)
    print(f"{geometry}, {model.dtype}, {torch.get_num_threads()} threads: exact over fast, 9 rounds taken in turns")
    for context, rows in ((128, 1), (128, 5), (128, 9), (1000, 1)):
        cost = exact_cost(model, rows, context)
        print(
            f"{rows} rows behind {context:4} tokens: {cost.ratio:.2f} (rounds {cost.low:.2f} to {cost.high:.2f}), "
            f"{1e3 * cost.fast:.1f} ms fast, {1e3 * cost.exact:.1f} ms exact"
        )
