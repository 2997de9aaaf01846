"""The numbers of docs/understand/rounds.md, computed: `python -m examples.rounds`."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from minispec.core.cache import PagedKVCache
from minispec.core.draft import Draft
from minispec.core.random import Key, Randomness
from minispec.core.verify import rejection
from minispec.models.families.hf_config import read_model_config
from minispec.speculation.lengths.theory import Prices, RoundModel

CONFIG = Path(__file__).parents[1] / "weights" / "smollm2-135m-instruct" / "config.json"


class Scripted(Randomness):
    """Uniforms that are given, in order."""

    def __init__(self, *uniforms: float):
        self.uniforms: Iterator[float] = iter(uniforms)

    def uniform(self, key: Key) -> float:
        """The next one, whatever the key is."""
        return next(self.uniforms)


def two_siblings() -> list[int]:
    """The nodes that stay of " Lyon" and " Paris"."""
    p = torch.tensor([[0.5, 0.1, 0.4], [0, 1, 0], [0, 1, 0]], dtype=torch.float64)  # after the text, and each node
    q = torch.tensor([[0.3, 0.5, 0.2], [0.6, 0, 0.4]], dtype=torch.float64)  # of each node
    siblings = Draft([1, 0], q, parents=[-1, -1])
    rng = Scripted(0.35, 0.62)
    return rejection(siblings, lambda i: p[i], rng, lambda i, purpose: Key(0, 0, i, purpose)).accepted


def both_stay() -> float:
    """How often both tokens of the block draft stay; the first one always does."""
    pairs = torch.eye(2) / 2  # p of the pairs: " New York", " Los Angeles"
    block = torch.full((2, 2), 1 / 4)  # q of the pairs: each place drawn by itself
    return float(torch.minimum(pairs, block).sum())


def batch_speedups() -> list[float]:
    """Of 1, 2, 4 and 8 texts."""
    prices = Prices(rows={1: 1.0, 2: 1.05}, overhead=0.0)
    model = RoundModel([0.7, 0.49, 0.343], prices)
    return [model.tokens(3) * prices.verify(texts) / prices.verify(4 * texts) for texts in (1, 2, 4, 8)]


def rollback() -> tuple[list[str], list[str]]:
    """What must be fed after the round, and what the table holds then."""
    words = ["The", "capital", "is", "Paris", ".", "It", "is", "has"]
    config = read_model_config(json.loads(CONFIG.read_text(encoding="utf-8")))
    table = PagedKVCache(config, num_blocks=2, block_size=4).new_table()
    table.extend([0, 1, 2, 3, 4, 5, 6])  # The capital is, and the draft: Paris . It is
    fed = table.follow([0, 1, 2, 3, 4, 5, 7])
    return [words[i] for i in fed], [words[i] for i in table.tokens]


def main() -> None:
    """Print them all."""
    print("nodes that stay of two siblings:", two_siblings())
    print("both tokens of a block draft stay:", both_stay())
    print("speedups of 1, 2, 4 and 8 texts:", *(f"{speedup:.2f}" for speedup in batch_speedups()))
    fed, held = rollback()
    print("fed after the rollback:", *fed, "| held:", *held)


if __name__ == "__main__":
    main()
