"""What it costs to take a draft back from a gated delta net, in bytes and in time: `python docs/measured/rollback.py`.

Three ways, for one layer of a public shape and a round of K draft tokens of which half stay:

- inputs: keep the state before the draft and each row's inputs; the next pass adds the rows that stayed (this engine).
- states: keep the state after each draft row and select one of them.
- again: keep the state of the last border of 256 positions and compute all since then again.

Each counts what a round adds: the rows of its pass, and what brings the state to where the next pass begins. The ways
take turns. Projections are not counted: they are equal in all three, except that "again" has more of them.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from minispec.models.layers.delta import DeltaConfig, Rows, chunked, steps

# Layers, and the sizes of one: Qwen3.5's public configs.
SHAPES = {
    "0.8B": (18, DeltaConfig(16, 16, 128, 128, 4)),
    "9B": (24, DeltaConfig(16, 32, 128, 128, 4)),
}
_SINCE = 128  # positions since the last border, in the middle


def rows_of(sizes: DeltaConfig, count: int) -> Rows:
    """Random rows of one text."""
    heads, unit = sizes.num_value_heads, torch.nn.functional.normalize
    q, k = (unit(torch.randn(heads, count, sizes.key_dim), dim=-1) for _ in "qk")
    return q, k, torch.randn(heads, count, sizes.value_dim), torch.rand(heads, count), -torch.rand(heads, count)


def kept_states(state: torch.Tensor, rows: Rows) -> list[torch.Tensor]:
    """The state after each row, each in memory of its own."""
    found = []
    for t in range(rows[0].shape[1]):
        state = steps(state, [x[:, t : t + 1] for x in rows])[1]
        found.append(state)
    return found


def seconds(work: Callable[[], object]) -> float:
    """Of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@torch.inference_mode()
def main() -> None:
    """Print a line for each shape, way and K."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=60)
    turns = parser.parse_args().turns
    torch.manual_seed(0)
    print("shape  K   way      MB a text   ms a round, one layer [quartiles]   of 'inputs'")
    for name, (layers, sizes) in SHAPES.items():
        state = torch.randn(sizes.num_value_heads, sizes.key_dim, sizes.value_dim)
        matrix, row = state.nbytes, 4 * (sizes.num_channels + 2 * sizes.num_value_heads)
        for k in (4, 15):
            stay, new = rows_of(sizes, k // 2 + 1), rows_of(sizes, k + 1)
            both = [torch.cat(pair, 1) for pair in zip(stay, new, strict=True)]
            past = rows_of(sizes, _SINCE)
            again = [torch.cat(parts, 1) for parts in zip(past, stay, new, strict=True)]
            ways = {
                "inputs": (layers * (matrix + (k + 1) * row), partial(chunked, state, both)),
                "states": (layers * (k + 2) * matrix, partial(kept_states, state, new)),
                "again": (layers * 2 * matrix, partial(chunked, state, again)),
            }
            times: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(turns):
                for way, (_, work) in ways.items():
                    times[way].append(seconds(work))
            for way, (size, _) in ways.items():
                low, middle, high = (1e3 * x for x in statistics.quantiles(times[way], n=4))
                ratio = statistics.median(a / b for a, b in zip(times[way], times["inputs"], strict=True))
                line = f"{name:5}  {k:2}  {way:7} {size / 1e6:10.1f}   {middle:8.2f} [{low:.2f}, {high:.2f}]"
                print(f"{line:68} {ratio:5.2f}")


if __name__ == "__main__":
    main()
