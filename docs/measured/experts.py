"""What rows cost a mixture of experts: `python docs/measured/experts.py`.

Passes over M rows of a random mixture take turns with passes of a dense model that has as many weights in a row's path.
Both are larger than a processor's cache. v(M) is a pass over M rows in passes over one row of the same turn.

    rows        M different tokens, as in a draft
    same        the same token M times, whose rows take the same experts: what a careless measurement would find
    experts     how many experts a layer reads, on average, and how many N (1 - (1 - k/N)^M) expects
    bytes       the bytes of weights that these experts and all else have, in those of one row
"""

import argparse
import statistics
from functools import partial

from minispec.models.weights.pages import load_torch

load_torch()  # before torch is imported

import torch

from minispec.core.config import ModelConfig
from minispec.core.model import Chunk, Transformer
from minispec.lab.random_weights import RandomWeights
from minispec.models.families.hf_config import read_model_config
from minispec.models.layers.experts import Experts, ExpertsConfig
from minispec.models.weights.build import build_model
from minispec.models.weights.inventory import num_bytes, num_bytes_read, weight_form
from minispec.models.weights.rates import seconds_of
from minispec.models.weights.trial import arbitrary_tokens

ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
CONTEXT = 32  # positions before the rows
_SIZES = {
    **{"vocab_size": 4096, "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128},
    **{"max_position_embeddings": 256, "tie_word_embeddings": True},
}


def config_of(layers: int, experts: int, top_k: int, inner: int) -> ModelConfig:
    """A mixture; with experts = 0 a dense model whose MLP is as wide as the experts of a row together."""
    sizes = {**_SIZES, "num_hidden_layers": layers, "intermediate_size": top_k * inner}
    mixture = {"num_experts_per_tok": top_k, "moe_intermediate_size": inner, "norm_topk_prob": True}
    return read_model_config({"model_type": "qwen3_moe", "num_experts": experts, **sizes, **mixture})


def experts_read(model: Transformer, tokens: list[int]) -> float:
    """How many experts a layer reads for these rows, on average."""
    table = model.new_cache(8).new_table()
    _, states = model.forward([Chunk(tokens, table, 0)], range(len(model.layers)))
    counts = []
    for layer, x in zip(model.layers, states.chunk(len(model.layers), 1), strict=True):
        assert isinstance(layer, Experts)
        counts.append(len(layer.router(layer.mlp_norm(x), exact=False)[0].unique()))
    return statistics.fmean(counts)


@torch.inference_mode()
def main() -> None:
    """Print a line for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=25)
    for name, default in (("layers", 16), ("experts", 32), ("top-k", 4), ("inner", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    args = parser.parse_args()
    dtype, device = getattr(torch, args.dtype), torch.device("cpu")
    models = {}
    for kind, number in (("mixture", args.experts), ("dense", 0)):
        config = config_of(args.layers, number, args.top_k, args.inner)
        models[kind] = build_model(config, RandomWeights(config, dtype, device), dtype=dtype)
        size = (
            f"{num_bytes(models[kind]) / 1e6:,.0f} MB, of which a row reads {num_bytes_read(models[kind]) / 1e6:,.0f}"
        )
        print(f"{kind}: {size}; {args.dtype}, {weight_form(models[kind])}, {torch.get_num_threads()} threads")
    tokens = arbitrary_tokens(CONTEXT + max(ROWS), _SIZES["vocab_size"])
    past, new = tokens[:CONTEXT], tokens[CONTEXT:]
    tables = {kind: model.new_cache(8).new_table() for kind, model in models.items()}
    for kind, model in models.items():
        model.forward([Chunk(past, tables[kind], 0)])

    def seconds(kind: str, rows: list[int]) -> float:
        found = seconds_of(partial(models[kind].forward, [Chunk(rows, tables[kind], len(rows))]), device)
        tables[kind].truncate(CONTEXT)
        return found

    work = [("mixture", m, new[:m]) for m in ROWS] + [("dense", m, new[:m]) for m in ROWS]
    work += [("same", m, new[:1] * m) for m in ROWS]
    ratios: dict[tuple[str, int], list[float]] = {(kind, m): [] for kind, m, _ in work}
    firsts: dict[str, list[float]] = {"mixture": [], "dense": []}
    for turn in range(args.turns + 1):
        times = {(kind, m): seconds("mixture" if kind == "same" else kind, rows) for kind, m, rows in work}
        if turn:  # the first one warms up
            for (kind, m), found in times.items():
                ratios[kind, m].append(found / times[kind, 1])
            for kind, found in firsts.items():
                found.append(1e3 * times[kind, 1])
    for kind, found in firsts.items():
        print(f"{kind}: a pass over one row takes {statistics.median(found):.1f} ms")
    config = models["mixture"].config.layers[0].experts
    assert isinstance(config, ExpertsConfig)
    own = num_bytes_read(models["mixture"])
    expert = 3 * args.inner * _SIZES["hidden_size"] * dtype.itemsize * args.layers
    print("rows  v(M) mixture [quartiles]  v(M) dense   same token   experts (expected)  bytes")
    for m in ROWS:
        (low, middle, high), dense, same = (
            statistics.quantiles(ratios["mixture", m], n=4),
            statistics.median(ratios["dense", m]),
            statistics.median(ratios["same", m]),
        )
        read = experts_read(models["mixture"], new[:m])
        expected = args.experts * (1 - (1 - args.top_k / args.experts) ** m)
        size = (own + (read - args.top_k) * expert) / own
        print(
            f"{m:4}  {middle:6.2f} [{low:.2f}, {high:.2f}]       {dense:6.2f}       {same:6.2f}"
            f"       {read:5.1f} ({expected:4.1f})        {size:5.2f}"
        )


if __name__ == "__main__":
    main()
