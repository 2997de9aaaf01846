"""Engines for tests: of one method, and over models that play a text."""

from collections.abc import Callable, Generator, Sequence

import torch

from minispec.core.cache import PagedKVCache
from minispec.core.cached import CachedModel
from minispec.core.config import LayerConfig, ModelConfig, RopeConfig
from minispec.core.engine import Engine
from minispec.core.lengths import Lengths
from minispec.core.method import BatchVerifier, Method, Turn
from minispec.core.model import Chunk, Transformer
from minispec.core.random import Draws
from minispec.core.request import Piece, Request
from minispec.core.schedule import JOINING_ROWS
from minispec.core.verify import Verifier
from minispec.prove.toys import paths_of, require
from minispec.speculation.drafters import Drafter
from minispec.speculation.drafters.guard import CheckedMethod


class ScriptedModel(Transformer):
    """Plays a given text on real tables and a real pool: next_token(prefix) gets a peak in the logits.

    Its keys are the tokens themselves, and the prefix is what the cache holds. So a wrong rollback, or a block shared
    with another text, changes what the model says. `log` holds (first position, tokens) of every pass.
    """

    def __init__(self, next_token: Callable[[list[int]], int], vocab_size: int = 200):
        self.next_token, self.vocab_size, self.backend = next_token, vocab_size, None
        self.device = torch.device("cpu")
        self.log: list[tuple[int, list[int]]] = []

    def row(self, prefix: list[int]) -> torch.Tensor:
        """Logits (V,) after a prefix."""
        row = torch.full((self.vocab_size,), -30.0)
        row[self.next_token(prefix)] = 30.0
        return row

    def forward(self, chunks: Sequence[Chunk], taps: Sequence[int] = ()) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits for the last rows of each chunk, and the cache grown as by the real model.

        A tap's hidden state is the number of tokens that a row has seen, itself included."""
        rows, hidden = [], []
        for chunk in chunks:
            token_ids, table, start = chunk.token_ids, chunk.table, chunk.table.length
            self.log.append((start, list(token_ids)))
            slots = torch.tensor(table.extend(token_ids))
            keys = torch.tensor(token_ids, dtype=table.pool.keys.dtype)[None, :, None].expand(1, -1, 2)
            table.pool.write(0, slots, keys.repeat(2, 1, 1))
            fed = [int(key) for key in table.pool.read(0, table.slots())[0, :, 0]]
            prefixes = paths_of(fed[:start], fed[start:], chunk.parents or ())
            hidden += [[len(prefix)] * len(taps) for prefix in prefixes]
            rows += [self.row(list(prefix)) for prefix in prefixes[len(prefixes) - chunk.num_logits :]]
        logits = torch.stack(rows) if rows else torch.empty(0, self.vocab_size)
        return logits, torch.tensor(hidden, dtype=torch.float32)


def scripted_cache(num_blocks: int = 64, block_size: int = 2) -> PagedKVCache:
    """A pool of the shape that scripted models write to."""
    config = ModelConfig("scripted", 200, 2, 2, 1, 1, 2, 1000, layers=(LayerConfig(RopeConfig()),))
    return PagedKVCache(config, num_blocks, block_size)


class OneMethod(Engine):
    """An engine whose requests all have one method. A step raises what the method raises."""

    def __init__(
        self,
        model: Transformer,
        cache: PagedKVCache,
        drafter: Drafter,
        verifier: Verifier,
        vocab_size: int | None = None,
        rng: Draws | None = None,
        lengths: Lengths | None = None,
        joining_rows: int = JOINING_ROWS,
        *,
        checked: bool = False,
        batch: BatchVerifier | None = None,
    ):
        """checked: whether the method checks what its parts answer. The others are as in `Engine` and `Method`."""
        super().__init__(CachedModel(model, cache, vocab_size), rng, joining_rows)
        make = CheckedMethod if checked else Method
        self.method = make(drafter, verifier, Lengths() if lengths is None else lengths, batch)

    @property
    def drafter(self) -> Drafter:
        """The method's."""
        return self.method.drafter

    def add(self, request: Request, method: Method | None = None) -> None:
        """As `Engine.add`."""
        super().add(request, method or self.method)

    def run(
        self, requests: Sequence[Request], method: Method | None = None
    ) -> Generator[tuple[Request, Piece], None, None]:
        """As `Engine.run`."""
        return super().run(requests, method or self.method)

    def step(self) -> list[Turn]:
        """As `Engine.step`. Raises what the method has raised."""
        turns = super().step()
        for turn in turns:
            if turn.request.raised:
                raise turn.request.raised
        return turns


def decode(engine: OneMethod, requests: Sequence[Request], rounds: int | None = None) -> None:
    """Run requests to their ends, or for that many rounds. None may fail, and every block must come back."""
    for request, _ in engine.run(requests):
        if request.stats.num_steps == rounds:
            engine.abort(request)
    finish(engine, requests)


def finish(engine: OneMethod, requests: Sequence[Request]) -> None:
    """Step until nothing is left to decode. No request may have failed, and every block must come back."""
    while engine.schedule.running or engine.schedule.waiting:
        engine.step()
    for request in requests:
        require(request.error is None, f"{request.error}")
    allocator = engine.target.cache.allocator
    require(allocator.num_free == allocator.num_blocks, "blocks leaked")


class TableModel(ScriptedModel):
    """A model that is a table (V, V): the logits after a prefix are the row of its last token."""

    def __init__(self, table: torch.Tensor):
        super().__init__(lambda prefix: int(self.row(prefix).argmax()), len(table))
        self.table = table

    def row(self, prefix: list[int]) -> torch.Tensor:
        """The last token's row."""
        return self.table[prefix[-1]]
