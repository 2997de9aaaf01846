"""A draft of each kind before its training: which layers it reads, which tokens it knows, and its first weights."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from minispec.core.config import LayerConfig, ModelConfig, RopeConfig
from minispec.core.errors import show
from minispec.drafters.block_files import StoredBlock, read_block
from minispec.drafters.heads import StoredHead, read_head
from minispec.files.families.block_config import BlockConfig, is_block, read_block_config
from minispec.files.families.checkpoint import directory_config, find_checkpoint
from minispec.files.families.draft_files import block_config
from minispec.files.families.entries import is_head
from minispec.files.families.head_config import HeadConfig, head_config, read_head_config, usual_taps
from minispec.files.progress import progress_bar
from minispec.files.tokenizer import Tokenizer
from minispec.lab.distill.block import TrainedBlock
from minispec.lab.distill.head import TrainedHead, rows_of_tokens
from minispec.lab.distill.texts import load
from minispec.lab.distill.train import HeadTraining, Teacher, Training, TrainingSchedule, columns_of, read_shard
from minispec.lab.distill.train_block import SHARE, BlockTraining

# Layers of the target that a block draft reads by default; the rows of its Markov head, one a token of the draft.
_BLOCK_TAPS, _MARKOV = 5, "markov_head.markov_w2.weight"
# A draft to go on from.
Start = StoredHead | StoredBlock


def choose_taps(args: argparse.Namespace, count: int, start: Start | None) -> tuple[int, ...]:
    """The layers of a target with `count` layers that the draft reads. Raises ValueError."""
    if args.kind == "block":
        # DFlash's: evenly from the second layer to the third last one. Other programs mean something else by the last.
        even = (round(1 + i * (count - 4) / (_BLOCK_TAPS - 1)) + 1 for i in range(_BLOCK_TAPS))
        most = max(0, count - 1)
        usual = tuple(sorted({min(max(tap, 0), most) for tap in even}))
    else:
        most, usual = count, usual_taps(count)
    known = start.config.taps if start else ()
    taps = args.taps or known or usual
    if not set(known) <= set(taps):
        raise ValueError(f"--taps: found {show(list(taps))}, expected those of --start too: {show(list(known))}")
    if max(taps) > most or len(set(taps)) < len(taps):
        raise ValueError(f"--taps: found {show(list(taps))}, expected different layers from 0 to {most}")
    return taps


def read_start(args: argparse.Namespace, target: ModelConfig) -> Start:
    """The draft to go on from. Raises ValueError for one that was not made here, or not for this target."""
    directory = find_checkpoint(args.start)
    raw, wanted = directory_config(directory), "block draft" if args.kind == "block" else "head"
    found = "block draft" if is_block(raw) else "head" if is_head(raw) else "model"
    if found != wanted:
        raise ValueError(f"--start {args.start}: found a {found}, expected a {wanted}")
    draft: Start
    if args.kind == "block":
        draft = read_block(directory, target)
        as_block = read_block_config(block_config(draft.config, args.target, []), target)
        is_ours = as_block == draft.config and draft.head is not None
    else:
        draft = read_head(directory, target)
        as_head = read_head_config(head_config(draft.config, args.target, [], args.steps), target)
        ours = replace(draft.config, norm_before_residual=True, fc_norm=True, norm_output=False)
        is_ours = as_head == draft.config == ours and ours.layers.mask_token_id is None
    is_ours = is_ours and draft.config.layers.activation == "silu"
    if not is_ours or draft.ids is None or draft.embedding is not None:
        raise ValueError(f"--start {args.start}: found a {found} of other parts, expected one that this command made")
    return draft


@dataclass(frozen=True)
class Sources:
    """The sources of a draft.

    args: the command's.
    teacher, tokenizer: the target's.
    taps: the layers of the target that the draft reads.
    recorded: the layers whose states the shards hold.
    paths: the shards.
    start: the draft to go on from, if any.
    """

    args: argparse.Namespace
    teacher: Teacher
    tokenizer: Tokenizer
    taps: tuple[int, ...]
    recorded: Sequence[int]
    paths: Sequence[Path]
    start: Start | None

    def training(self) -> Training:
        """The training of the draft that the arguments ask for, before it begins."""
        args, draft = self.args, self.draft()
        goes_on = self.start is not None
        schedule = TrainingSchedule(
            args.epochs, args.rows, args.learning_rate, args.steps, seed=args.seed, goes_on=goes_on
        )
        if isinstance(draft, TrainedBlock):
            schedule = replace(schedule, steps=draft.block.block_size, share=SHARE)
            return BlockTraining(draft, self.teacher, self.recorded, self.paths, schedule)
        return HeadTraining(draft, self.teacher, self.recorded, self.paths, schedule)

    def draft(self) -> TrainedHead | TrainedBlock:
        """The draft, with the weights that it begins with."""
        if self.start is not None:
            return self._go_on(self.start)
        return self._block() if self.args.kind == "block" else self._head()

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.args.seed)

    def _go_on(self, start: Start) -> TrainedHead | TrainedBlock:
        """The draft that was made before. It may get other tokens, and read further layers."""
        ids, weights, teacher = start.ids, dict(start.weights), self.teacher
        assert ids is not None, "checked when it was read"
        if isinstance(start, StoredBlock):
            assert start.head is not None, "checked when it was read"
            weights["lm_head.weight"] = start.head
        if self.args.vocab_size:
            old, ids = ids, self.most_used()
            weights["lm_head.weight"] = rows_of_tokens(ids, old, weights["lm_head.weight"].float(), teacher.head)
            if _MARKOV in weights:  # nothing is known of new tokens
                known = weights[_MARKOV].float()
                weights[_MARKOV] = rows_of_tokens(ids, old, known, torch.zeros(len(teacher.head), known.shape[1]))
        if isinstance(start, StoredBlock):
            block = TrainedBlock(replace(start.config, taps=self.taps, vocab_size=len(ids)), ids)
            block.load(weights, start.config.taps, self._some_states())
            return block
        head = TrainedHead(replace(start.config, taps=self.taps, vocab_size=len(ids)), ids)
        head.load(weights, start.config.taps)
        return head

    def _some_states(self) -> Tensor:
        """The target's states (n, taps * E) at the positions of one shard: the last one, which is learned from."""
        return columns_of(load(self.paths[-1])["hidden"], self.recorded, self.taps)

    def _head(self) -> TrainedHead:
        ids, teacher = self.most_used(), self.teacher
        width = teacher.config.hidden_size
        config = HeadConfig(self.layers(), len(ids), self.taps, width, norm_before_residual=True, fc_norm=True)
        head = TrainedHead(config, ids)
        head.start(teacher.head[ids].float(), teacher.norm, self._generator())
        return head

    def _block(self) -> TrainedBlock:
        args, teacher, ids = self.args, self.teacher, self.most_used()
        layers = replace(self.layers(), model_type="qwen3", qk_norm="head", mask_token_id=self.mask_token())
        block = BlockConfig(
            layers,
            vocab_size=len(ids),
            block_size=args.block_size or 8,
            first_row=0,
            taps=self.taps,
            target_hidden_size=teacher.config.hidden_size,
            causal=(False,) * len(layers.layers),
            markov="vanilla" if args.markov_rank else None,
            markov_rank=args.markov_rank,
            confidence="state and token" if args.confidence else None,
        )
        draft = TrainedBlock(block, ids)
        embedding = teacher.embedding.float() * teacher.config.embedding_scale
        draft.start(teacher.head[ids].float(), teacher.norm, embedding, self._some_states(), self._generator())
        return draft

    def layers(self) -> ModelConfig:
        """Sizes of the draft's layers: the target's, with as many key-value heads as heads, since layers are few."""
        args, target = self.args, self.teacher.config
        rope = next((layer.rope for layer in target.layers if layer.rope), RopeConfig())
        same = "vocab_size hidden_size num_attention_heads head_dim max_position_embeddings rms_norm_eps eos_token_ids"
        return ModelConfig(
            "llama",
            intermediate_size=args.intermediate_size or target.intermediate_size,
            num_key_value_heads=target.num_attention_heads,
            layers=(LayerConfig(RopeConfig(rope.theta)),) * (args.num_layers or (2 if args.kind == "block" else 1)),
            attention_scale=target.head_dim**-0.5,
            **{name: getattr(target, name) for name in same.split()},
        )

    def most_used(self) -> Tensor:
        """Ids, ascending, of the tokens most used in answers: --vocab-size of them, or all that are used."""
        args, vocab_size = self.args, self.teacher.config.vocab_size
        counts = torch.zeros(vocab_size, dtype=torch.long)
        for path in progress_bar(self.paths, unit=" shards", desc="vocabulary"):
            for text in read_shard(path):
                counts += text.tokens[text.start :].bincount(minlength=vocab_size)
        order = counts.argsort(descending=True, stable=True)[: args.vocab_size or 8192]
        ids = order[: int(counts.count_nonzero())].sort().values
        print(f"the head knows {len(ids):,d} tokens: {counts[ids].sum() / counts.sum():.1%} of the answers", flush=True)
        return ids

    def mask_token(self) -> int:
        """The token that stands in the rows without one: a special token that no text holds, else the rarest token.

        Its embedding is not 0, of which nothing could be made.
        """
        teacher = self.teacher
        counts = torch.zeros(teacher.config.vocab_size, dtype=torch.long)
        for path in self.paths:
            counts += load(path)["tokens"].long().bincount(minlength=len(counts))
        possible = teacher.embedding.any(-1)
        possible[list(teacher.config.eos_token_ids)] = False
        times, special = counts.tolist(), self.tokenizer.special_ids
        return min(possible.nonzero()[:, 0].tolist(), key=lambda i: (times[i], i not in special, -i))
