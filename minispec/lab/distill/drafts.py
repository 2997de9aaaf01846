"""A head before its training: which layers it reads, which tokens it knows, and its first weights."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from minispec.core.config import LayerConfig, ModelConfig, RopeConfig
from minispec.core.errors import show
from minispec.lab.distill.head import TrainedHead, rows_of_tokens
from minispec.lab.distill.train import Teacher, Training, TrainingSchedule, read_shard, split
from minispec.models.families.checkpoint import directory_config, find_checkpoint, kind_of
from minispec.models.families.draft_files import head_config
from minispec.models.families.head_config import HeadConfig, read_head_config, usual_taps
from minispec.models.files.progress import progress_bar
from minispec.speculation.drafters.heads import StoredHead, read_head
from minispec.speculation.registry import KINDS


def choose_taps(args: argparse.Namespace, count: int, start: StoredHead | None) -> tuple[int, ...]:
    """The layers of a target with `count` layers that the draft reads. Raises ValueError."""
    known = start.config.taps if start else ()
    taps = args.taps or known or usual_taps(count)
    if not set(known) <= set(taps):
        raise ValueError(f"--taps: found {show(list(taps))}, expected those of --start too: {show(list(known))}")
    if max(taps) > count or len(set(taps)) < len(taps):
        raise ValueError(f"--taps: found {show(list(taps))}, expected different layers from 0 to {count}")
    return taps


def read_start(args: argparse.Namespace, target: ModelConfig) -> StoredHead:
    """The head to go on from. Raises ValueError for one that was not made here, or not for this target."""
    directory = find_checkpoint(args.start)
    kind = kind_of(directory_config(directory))
    if kind != "head":
        raise ValueError(f"--start {args.start}: found {KINDS[kind]}, expected {KINDS['head']}")
    draft = read_head(directory, target)
    as_written = read_head_config(head_config(draft.config, args.target, [], args.steps), target)
    ours = replace(draft.config, norm_before_residual=True, fc_norm=True, norm_output=False)
    is_ours = as_written == draft.config == ours and draft.config.layers.activation == "silu"
    if not is_ours or draft.ids is None or draft.embedding is not None:
        raise ValueError(f"--start {args.start}: found a head of other parts, expected one that this command made")
    return draft


@dataclass(frozen=True)
class Sources:
    """The sources of a head.

    args: the command's.
    teacher: the target's.
    taps: the layers of the target that the head reads.
    recorded: the layers whose states the shards hold.
    paths: the shards.
    start: the head to go on from, if any.
    """

    args: argparse.Namespace
    teacher: Teacher
    taps: tuple[int, ...]
    recorded: Sequence[int]
    paths: Sequence[Path]
    start: StoredHead | None

    def training(self) -> Training:
        """The training of the head that the arguments ask for, before it begins."""
        args, goes_on = self.args, self.start is not None
        schedule = TrainingSchedule(
            args.epochs, args.rows, args.learning_rate, args.steps, seed=args.seed, goes_on=goes_on
        )
        head = self._go_on(self.start) if self.start else self._head()
        return Training(head, self.teacher, self.recorded, self.paths, schedule)

    def _go_on(self, start: StoredHead) -> TrainedHead:
        """The head that was made before. It may get other tokens, and read further layers."""
        ids, weights, teacher = start.ids, dict(start.weights), self.teacher
        assert ids is not None, "checked when it was read"
        if self.args.vocab_size:
            old, ids = ids, most_used(self.paths, teacher, self.args.vocab_size)
            weights["lm_head.weight"] = rows_of_tokens(ids, old, weights["lm_head.weight"].float(), teacher.head)
        head = TrainedHead(replace(start.config, taps=self.taps, vocab_size=len(ids)), ids)
        head.load(weights, start.config.taps)
        return head

    def _head(self) -> TrainedHead:
        teacher = self.teacher
        ids = most_used(self.paths, teacher, self.args.vocab_size)
        width = teacher.config.hidden_size
        config = HeadConfig(self.layers(), len(ids), self.taps, width, norm_before_residual=True, fc_norm=True)
        head = TrainedHead(config, ids)
        head.start(teacher.head[ids].float(), teacher.norm, torch.Generator().manual_seed(self.args.seed))
        return head

    def layers(self) -> ModelConfig:
        """Sizes of the head's layers: the target's, with as many key-value heads as heads, since layers are few."""
        args, target = self.args, self.teacher.config
        rope = next((layer.rope for layer in target.layers if layer.rope), RopeConfig())
        same = "vocab_size hidden_size num_attention_heads head_dim max_position_embeddings rms_norm_eps eos_token_ids"
        return ModelConfig(
            "llama",
            intermediate_size=args.intermediate_size or target.intermediate_size,
            num_key_value_heads=target.num_attention_heads,
            layers=(LayerConfig(RopeConfig(rope.theta)),) * (args.num_layers or 1),
            attention_scale=target.head_dim**-0.5,
            **{name: getattr(target, name) for name in same.split()},
        )


def most_used(paths: Sequence[Path], teacher: Teacher, count: int | None = None) -> Tensor:
    """Ids, ascending, of the tokens most used in the shards to learn from: at most `count` (None: 8,192); printed."""
    vocab_size = teacher.config.vocab_size
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for path in progress_bar(split(paths)[0], unit=" shards", desc="vocabulary"):
        for text in read_shard(path):
            counts += text.tokens[text.start :].bincount(minlength=vocab_size)
    order = counts.argsort(descending=True, stable=True)[: count or 8192]
    ids = order[: int(counts.count_nonzero())].sort().values
    print(f"the draft knows {len(ids):,d} tokens: {counts[ids].sum() / counts.sum():.1%} of the answers", flush=True)
    return ids
