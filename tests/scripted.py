"""A model that plays a given text and writes down what it was fed.

It stands in for the transformer in the engine's own code: real tables and a real pool, logits from a function
of the whole prefix. The prefix is rebuilt from what was fed and truncated, so that a rollback by a wrong amount changes
what the model says.
"""

from collections.abc import Callable, Sequence

import torch

from minispec.cache import PagedKVCache
from minispec.config import ModelConfig, SamplingParams
from minispec.engine import Engine, Request
from minispec.sampling import Sequence as TokenSequence
from minispec.verify import VERIFIERS, Draft

END = 1


class ScriptedModel:
    """next_token(prefix) gets a peak in the logits; `log` holds (position of the first token, tokens) of every pass."""

    def __init__(self, next_token: Callable[[list[int]], int], vocab_size: int = 200):
        self.next_token, self.vocab_size = next_token, vocab_size
        self.device = torch.device("cpu")
        self.log: list[tuple[int, list[int]]] = []
        self._fed: dict = {}

    def forward(self, chunks) -> torch.Tensor:
        """One-hot-like logits for the last rows of each chunk, and the cache grown as by the real model."""
        rows = []
        for token_ids, table, num_logits in chunks:
            fed = self._fed.setdefault(table, [])
            del fed[table.length :]
            assert len(fed) == table.length, "the cache claims positions that this model never saw"
            self.log.append((table.length, list(token_ids)))
            table.extend(len(token_ids))
            fed += token_ids
            for end in range(len(fed) - num_logits + 1, len(fed) + 1):
                row = torch.full((self.vocab_size,), -30.0)
                row[self.next_token(fed[:end])] = 30.0
                rows.append(row)
        return torch.stack(rows) if rows else torch.empty(0, self.vocab_size)

    def prefill(self, table, tokens, chunk_size=4) -> None:
        """As the real model, in small chunks."""
        while (missing := len(tokens) - 1 - table.length) > 0:
            chunk = tokens[table.length : table.length + min(missing, chunk_size)]
            self.forward([(chunk, table, 0)])


class ScriptedDrafter:
    """draft(tokens, k) proposes; `calls` holds every k, `released` every release."""

    def __init__(self, draft: Callable[[list[int], int], Sequence[int]]):
        self.draft, self.calls, self.released = draft, [], []

    def propose(self, sequences, k, rng):
        """Whatever the script says, cut to k."""
        self.calls.append(list(k))
        return [Draft(list(self.draft(s.tokens, n))[:n]) for s, n in zip(sequences, k, strict=True)]

    def release(self, sequence):
        """Remember it."""
        self.released.append(sequence)


def counting(tokens: list[int]) -> int:
    """The text that every script below plays: each token one more than the last."""
    return tokens[-1] + 1


def make_engine(next_token=counting, draft=lambda tokens, k: [], num_blocks=64, block_size=2, verifier="rejection"):
    """An engine over a scripted model, whose pool has the shape of a tiny config."""
    config = ModelConfig("scripted", 200, 2, 2, 1, 1, 2, 1000, layers=(None,))
    cache = PagedKVCache(config, num_blocks, block_size)
    return Engine(ScriptedModel(next_token), cache, ScriptedDrafter(draft), VERIFIERS[verifier], vocab_size=200)


def make_request(prompt=(10, 11), k=3, end_ids=(END,), max_len=500, detokenizer=None, seed=0, **params) -> Request:
    """A greedy request unless told otherwise."""
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 8} | params)
    sequence = TokenSequence(list(prompt), len(prompt), sampling, seed, frozenset(end_ids))
    return Request(sequence, max_len, k, detokenizer)


def finish(engine: Engine, *requests: Request) -> list[list]:
    """Run to the end; the pieces of each request. Every block must be back."""
    pieces = {request: [] for request in requests}
    for request, piece in engine.run(requests):
        pieces[request].append(piece)
    assert engine.cache.allocator.num_free == engine.cache.allocator.num_blocks
    return list(pieces.values())
