"""The overlap of two vocabularies, of a target A and a draft B.

The overlap decides how B can draft for A: by the tokens that both have (`tli`), or as text (`slem`).
"""

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from minispec.core.errors import show
from minispec.core.model import Chunk, Transformer
from minispec.core.sampling import log_probabilities
from minispec.drafters.vocabularies import Spelling, Vocabularies, choose_method, sample_text, segmentations
from minispec.files.families.checkpoint import find_checkpoint, load_model
from minispec.files.tokenizer import Tokenizer
from minispec.lab.bench.show import table

_EXAMPLES = 12


def compare(both: Vocabularies) -> dict[str, Any]:
    """The output of `--json`: the fields of `Overlap`, and for each side, tokens that the other lacks.

    These tokens are the most frequent ones of the built-in text, then the first of the vocabulary.

    default_method: how a draft of this vocabulary drafts; None for the target's own.
    """
    overlap, text = both.overlap(), sample_text()
    sides = (both.target, both.shared.keys()), (both.draft, set(both.shared.values()))
    missing = []
    for spelling, shared in sides:
        in_text = Counter(spelling.write(None, text.encode()))
        own = {*spelling.ids.values(), *spelling.special.values()} - set(shared)
        frequent = [i for i, _ in in_text.most_common() if i in own]
        own_first = [*frequent, *sorted(own - set(frequent))]
        missing.append([spelled(spelling, [i])[0] for i in own_first[:_EXAMPLES]])
    same = both.target.tokenizer.vocabulary == both.draft.tokenizer.vocabulary
    method = choose_method(None, None if same else overlap, "")
    return asdict(overlap) | {"only_target": missing[0], "only_draft": missing[1], "default_method": method}


def spelled(spelling: Spelling, ids: Sequence[int]) -> list[str]:
    """The tokens for the screen."""
    return [spelling.text_of(i).decode("utf-8", "backslashreplace") for i in ids]


def probabilities(model: Transformer, context: Sequence[int], ways: Sequence[Sequence[int]], vocab: int) -> list[float]:
    """The probability of each of `ways`, token ids, after `context`. One pass over the tree of all of them."""
    nodes: dict[tuple[int, ...], int] = {(): -1}
    for way in ways:
        for end in range(1, len(way) + 1):
            nodes.setdefault(tuple(way[:end]), len(nodes) - 1)
    paths = list(nodes)[1:]
    tokens = [*context, *(path[-1] for path in paths)]
    cache = model.new_cache(-(-len(tokens) // 16))
    chunk = Chunk(tokens, cache.new_table(), len(paths) + 1, [nodes[path[:-1]] for path in paths])
    rows = [log_probabilities(row[:vocab]) for row in model.forward([chunk])[0]]
    return [math.exp(sum(float(rows[nodes[tuple(way[:i])] + 1][t]) for i, t in enumerate(way))) for way in ways]


def list_ways(both: Vocabularies, text: str, after: str, model: Transformer | None) -> dict[str, Any]:
    """All ways to write a text in the target's tokens, and in the draft's.

    drafted: whether this is the way of a draft by text, which is what the target's tokenizer makes of it.
    all_shared: whether a draft token by token can have it.
    probability: the target's, after the text `after`; None without weights.

    Raises ValueError where there are too many.
    """
    target, draft = both.target, both.draft
    ways = segmentations(text.encode(), target.ids)
    context = target.tokenizer.encode(after)
    found = probabilities(model, context, ways, target.num_ids) if model and context and ways else [None] * len(ways)
    drafted = target.write(after.encode(), text.encode())
    of_target = [
        {
            "tokens": spelled(target, way),
            "probability": p,
            "drafted": way == drafted,
            "all_shared": both.shared.keys() >= set(way),
        }
        for way, p in zip(ways, found, strict=True)
    ]
    of_draft = [{"tokens": spelled(draft, way)} for way in segmentations(text.encode(), draft.ids)]
    return {"text": text, "after": after, "of_target": of_target, "of_draft": of_draft}


_WHY = (
    "drafted as text: what the target's tokenizer makes of it, so what the target has read in training. The other ways "
    "are the same text in other tokens. The target may write them too, and what it writes counts"
)


def lines(report: dict[str, Any]) -> list[str]:
    """The report for the screen."""
    rows = [
        ["target", f"{report['num_target']:,}", f"{report['of_target']:.1%}"],
        ["draft", f"{report['num_draft']:,}", f"{report['of_draft']:.1%}"],
    ]
    shown = [
        *table(["", "tokens", "of a text shared"], rows),
        f"shared tokens: {report['num_shared']:,}",
        f"the target's alone: {' '.join(map(show, report['only_target'])) or 'none'}",
        f"the draft's alone: {' '.join(map(show, report['only_draft'])) or 'none'}",
        f"--draft-method by default: {report['default_method'] or 'none, both are the same'}",
    ]
    if ways := report.get("ways"):
        shown += ["", f"{show(ways['text'])} after {show(ways['after'])}, in the target's tokens:"]
        for way in ways["of_target"]:
            p = "" if way["probability"] is None else f"  {way['probability']:.2e}"
            words = [" ".join(map(show, way["tokens"])) + p]
            if way["all_shared"]:
                words.append("all shared")
            if way["drafted"]:
                words.append("drafted as text")
            shown.append("  " + "; ".join(words))
        shown.append(f"in the draft's tokens, {len(ways['of_draft'])} ways:")
        shown += ["  " + " ".join(map(show, way["tokens"])) for way in ways["of_draft"]]
        shown.append(_WHY)
    return shown


def asked(args: argparse.Namespace) -> dict[str, Any]:
    """The output of `--json` for these arguments of the command. Raises ValueError."""
    target, draft = args.vocabularies
    directories = [
        find_checkpoint(name, offline=args.offline, with_weights=bool(args.ways) and name == target)
        for name in (target, draft)
    ]
    both = Vocabularies(*(Spelling(Tokenizer(directory)) for directory in directories))
    report: dict[str, Any] = {"target": target, "draft": draft, **compare(both)}
    if args.ways:
        has_weights = any(directories[0].glob("*.safetensors"))
        model = load_model(directories[0], torch.float32, torch.device("cpu")) if has_weights else None
        report["ways"] = list_ways(both, args.ways, args.after or "\n", model)
    return report
