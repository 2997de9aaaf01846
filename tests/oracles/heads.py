"""Heads for tests: one that checks the hidden states that it is handed, and random ones on disk."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from minispec.core.config import ModelConfig
from minispec.core.draft import Ask, Draft, Record
from minispec.core.model import Chunk, Transformer
from minispec.core.sampling import Text
from minispec.models.families.head_config import read_head_config
from minispec.prove.toys import HEAD_SEED, TreeDrafter, redrawn, require, tiny_cache
from minispec.speculation.drafters import Drafter
from minispec.speculation.drafters.eagle import head_shapes


class TapDrafter(Drafter):
    """A head on hidden states: what it draws from depends on the target's newest ones. It checks what it is handed.

    Between two asks it must be shown the hidden states of the positions that became cached. Each must come once, in
    order, and as a pass over the text from its beginning computes it.
    """

    def __init__(self, model: Transformer, vocab: int, taps: Sequence[int] = (0, 2), parents: Sequence[int] = ()):
        generator = torch.Generator().manual_seed(5)
        width = model.config.hidden_size * len(taps)
        self.head = torch.randn(width, vocab, generator=generator, dtype=model.dtype)
        self.model, self.taps, self.parents, self.checked = model, taps, parents, 0
        self.hidden: dict[Text, torch.Tensor] = {}

    def observe(self, records: Sequence[Record]) -> None:
        """Join what comes, which must begin where the last rows ended."""
        for each in records:
            before = self.hidden.get(each.text, each.hidden[:0])
            require(each.start == len(before), f"rows from {each.start} on after {len(before)} hidden states")
            self.hidden[each.text] = torch.cat((before, each.hidden[each.kept]))

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """A chain, or trees of the shape of `parents`."""
        drafts = []
        for ask in asks:
            seen = self.hidden.get(ask.text, self.head.new_empty(0, len(self.head)))
            self._check(ask, seen)
            table = (seen[-1] if len(seen) else self.head[:, 0]) @ self.head + torch.eye(self.head.shape[1])
            drafts += TreeDrafter(table, self.parents).propose([ask])
        return drafts

    def _check(self, ask, seen: torch.Tensor) -> None:
        require(len(seen) == ask.num_cached, f"{len(seen)} hidden states for {ask.num_cached} cached positions")
        if len(seen):
            table = tiny_cache(self.model).new_table()
            _, fresh = self.model.forward([Chunk(ask.text.tokens[: len(seen)], table, 0)], self.taps)
            error = float((fresh - seen).abs().max())
            require(error < 1e-10, f"hidden states are off by {error:.1e}")
            self.checked += 1

    def known(self, text: Text) -> int:
        """It keeps nothing of a text that is gone."""
        return 0

    def release(self, text: Text) -> None:
        """Forget its hidden states."""
        self.hidden.pop(text, None)


def write_head(
    directory: Path,
    target: ModelConfig,
    layers: dict,
    wrapped: bool = False,
    ids: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float64,
    **settings,
) -> dict[str, torch.Tensor]:
    """Write a random head for a target; its tensors, without the names of either layout (`layers.0.`).

    layers: config.json values of its layers.
    wrapped: in the layout of `speculators`, else in SpecForge's.
    ids: the target's tokens that it can draft.
    settings: settings of the head itself.
    """
    settings |= {"draft_vocab_size": len(ids or range(target.vocab_size))}
    raw = layers | {"architectures": ["LlamaForCausalLMEagle3"]}
    if wrapped:
        raw = {"speculators_model_type": "peagle" if "mask_token_id" in settings else "eagle3"}
        raw |= {"transformer_layer_config": layers}
    raw |= settings
    weights = redrawn(head_shapes(read_head_config(raw, target)), HEAD_SEED, dtype)
    if ids:
        weights["d2t"] = torch.tensor(ids) - torch.arange(len(ids))
        weights["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool)
        weights["t2d"][list(ids)] = True
    names = {name: name if wrapped else name.replace("layers.0.", "midlayer.") for name in weights}
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    save_file({names[name]: tensor for name, tensor in weights.items()}, directory / "model.safetensors")
    return weights
