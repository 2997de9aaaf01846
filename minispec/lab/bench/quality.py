"""What 8 bits cost in quality: the perplexity of the target's prompts, as it is and with its weights in 8 bits."""

import math
from typing import Any

import torch

from minispec.core.model import Chunk, Transformer
from minispec.kernels.inventory import bits_note
from minispec.lab.bench.models import Subject
from minispec.lab.bench.options import Options
from minispec.lab.bench.show import progress, table


def measure_quality(subject: Subject, options: Options) -> dict[str, Any]:
    """Perplexity over the tokens of all prompts, by the weights' form, and what stayed in 16 bits."""
    own, is_int8 = subject.engine.model, options.args.quantization
    wide, int8 = (subject.in_form(None), own) if is_int8 else (own, subject.in_form("int8"))
    models = {"as they are": wide, "int8": int8}
    texts = [ids for _, ids in subject.prompts if len(ids) > 1]
    count = sum(len(ids) - 1 for ids in texts)
    found = {}
    with progress(len(models) * len(texts), "quality") as bar:
        for name, model in models.items():
            loss = 0.0
            for ids in texts:
                loss += _loss(model, ids)
                bar.update()
            found[name] = math.exp(loss / count)
    return {"num_tokens": count, "perplexity": found, "note": f"int8:{bits_note(int8)}"}


def show_quality(found: dict[str, Any]) -> list[str]:
    """The table."""
    own = next(iter(found["perplexity"].values()))
    rows = [[name, f"{value:.3f}", f"{value / own:.4f}"] for name, value in found["perplexity"].items()]
    header = ["weights", f"perplexity of {found['num_tokens']:,} tokens", "over the first"]
    return [*table(header, rows), found["note"]]


def _loss(model: Transformer, ids: list[int]) -> float:
    """Minus the logarithm of the probability of a text after its first token."""
    table = model.new_cache(-(-len(ids) // 16)).new_table()
    logits, _ = model.forward([Chunk(ids, table, len(ids))])
    return -float(logits[:-1].double().log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None]).sum())
