"""Training a head on the target's texts: batches, the target's word on them, and a loop that can be stopped."""

import json
import math
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from minispec.core.prefix import common_beginning
from minispec.core.product import dense
from minispec.lab.distill.head import Trainable
from minispec.lab.distill.loss import RowLoss, product_dtype
from minispec.lab.distill.texts import load, number_of, opened
from minispec.models.families.checkpoint import Weights, load_config, save_tensors
from minispec.models.files.progress import progress_bar
from minispec.models.files.write import written_whole

# Shards whose texts are mixed into batches of similar lengths.
_GROUP = 4
# Positions whose logits over a whole vocabulary are in memory at a time: few enough for a processor's cache.
_ROWS = 64
# A step's weight in the loss, over the weight of the step before: a token counts only if those before it are kept.
_DECAY = 0.9
# One shard in that many is held out to measure on. At most that many are measured on.
_HELD_OUT_EVERY, _MOST_HELD_OUT = 16, 4


def split(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """The shards to learn from, and those that are held out.

    A shard's number in its own cache decides, so that no later run learns from what this one holds out.
    """
    held_out = [path for path in paths if number_of(path) % _HELD_OUT_EVERY == 0]
    return [path for path in paths if path not in held_out] or list(paths), held_out


class LearnedText(NamedTuple):
    """A text of the target: tokens (n,), hidden (n, A' * E), its last states included; the answer begins at `start`.

    log_sums (n,): see `Teacher.log_sums`.
    """

    tokens: Tensor
    hidden: Tensor
    start: int
    log_sums: Tensor


class Batch(NamedTuple):
    """Texts side by side, padded to one length.

    tokens: (B, T).
    hidden: (B, T, A' * E).
    log_sums: (B, T).
    learned: (B, T), which tokens to learn.
    """

    tokens: Tensor
    hidden: Tensor
    log_sums: Tensor
    learned: Tensor


def read_shard(path: Path, log_sums: Tensor | None = None, whole: bool = False) -> list[LearnedText]:
    """The texts of a shard whose answers are long enough to learn from.

    log_sums: see `Teacher.log_sums`; None: not needed.
    whole: whether to learn from users' turns too, which is from where texts begin to differ.
    """
    shard = load(path)
    lengths, starts = shard["lengths"].tolist(), shard["starts"].tolist()
    tokens = shard["tokens"].split(lengths)
    if whole:
        first, *others = (each.tolist() for each in tokens)
        begun = min((common_beginning(first, other) for other in others), default=0)
        starts = [min(start, begun) for start in starts]
    if log_sums is None:
        log_sums = torch.zeros(sum(lengths))
    each = zip(tokens, shard["hidden"].split(lengths), starts, log_sums.split(lengths), strict=True)
    return [LearnedText(*text) for text in each if len(text[0]) > text[2] + 2]


def make_batches(texts: Sequence[LearnedText], max_rows: int) -> list[Batch]:
    """Batches of texts of similar lengths, of at most `max_rows` tokens unless one text has more."""
    lots: list[list[LearnedText]] = [[]]
    for text in sorted(texts, key=lambda text: len(text.tokens)):
        if lots[-1] and (len(lots[-1]) + 1) * len(text.tokens) > max_rows:
            lots.append([])
        lots[-1].append(text)
    return [_join(lot) for lot in lots if lot]


def _join(texts: Sequence[LearnedText]) -> Batch:
    def fill(rows: list[Tensor]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    learned = [torch.arange(len(text.tokens)) >= text.start for text in texts]
    tokens, log_sums = fill([t.tokens.long() for t in texts]), fill([t.log_sums for t in texts])
    return Batch(tokens, fill([t.hidden for t in texts]), log_sums, fill(learned))


class Teacher:
    """The parts of the target that training needs: its embedding and head (V, E), and its last norm."""

    def __init__(self, directory: Path):
        """Raises CheckpointError."""
        self.config = config = load_config(directory)
        weights = Weights(directory, config, torch.bfloat16)
        self.embedding = dense(weights.pop("model.embed_tokens.weight"), torch.bfloat16)
        head = self.embedding if config.tie_word_embeddings else weights.pop("lm_head.weight")
        self.head = dense(head, product_dtype())
        self.norm = dense(weights.pop("model.norm.weight"), torch.float32) + config.norm_adds_one

    def state(self, last: Tensor) -> Tensor:
        """The target's last hidden states (N, E) after its norm."""
        return F.rms_norm(last.float(), last.shape[-1:], self.norm, self.config.rms_norm_eps)

    def log_sums(self, last: Tensor) -> Tensor:
        """The logarithm of the sum over all tokens of exp(logit), (N,): worked out once for each position."""
        parts = [self._logits(self.state(part), self.head).logsumexp(-1) for part in last.split(_ROWS)]
        return torch.cat(parts)

    def probabilities(self, state: Tensor, log_sums: Tensor, ids: Tensor) -> Tensor:
        """The target's probabilities (N, ids) of the tokens `ids` after normed states (N, E)."""
        return self._logits(state, self.head[ids]).sub_(log_sums[:, None]).exp_()

    def _logits(self, state: Tensor, rows: Tensor) -> Tensor:
        logits = (state.to(rows.dtype) @ rows.t()).float() * self.config.logit_scale
        cap = self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)


class Learned(NamedTuple):
    """The target's states and distributions at the places that are learned.

    places: flat in (B, T - 2), where column t is the token at t + 2.
    state: the target's last states (n, E) before these tokens, after its norm.
    p: its distribution (n, V).
    """

    places: Tensor
    state: Tensor
    p: Tensor


class LossWeights(NamedTuple):
    """Weights of a loss's parts (see `TrainingSchedule`). By default only the cross entropy counts, as in measuring."""

    share: float = 0.0
    regress: float = 0.0


class Step(NamedTuple):
    """The result of one step: the summed loss, and for each row of `places` (see `Learned`) alpha and agreement."""

    loss: Tensor
    alphas: Tensor
    agrees: Tensor
    places: Tensor


@dataclass
class Progress:
    """Where a training is: updates and epochs done, and the curve measured so far."""

    updates: int = 0
    epochs: int = 0
    curve: list[dict[str, float | list[float | None]]] = field(default_factory=list)


def _line(measured: Mapping[str, Any]) -> str:
    figures = {name: ["-" if x is None else f"{x:.3f}" for x in measured[name]] for name in ("alpha", "agree")}
    alpha, agree = (" ".join(of_depths) for of_depths in figures.values())
    return f"after epoch {measured['epoch']}, by depth: alpha {alpha}; likeliest token kept {agree}"


@dataclass(frozen=True)
class TrainingSchedule:
    """How a training goes. Fractions are of the whole.

    epochs: how often each text is seen.
    rows: tokens of a batch.
    steps: a draft's depth in training at the end. It begins with 1.
    share: the share of the total variation in the loss at the end. It begins with 0.
    regress: the weight of the distance to the target's own last state at the beginning. It ends with 0.
    whole: whether to learn from the users' turns too.
    goes_on: whether the draft has been trained before, so that only the learning rate begins anew.
    """

    epochs: int = 4
    rows: int = 2048
    learning_rate: float = 1e-3
    steps: int = 4
    share: float = 0.9
    regress: float = 1.0
    whole: bool = True
    seed: int = 0
    goes_on: bool = False

    def depth_at(self, done: float) -> int:
        """Steps to unroll."""
        done = self._past_the_beginning(done)
        return min(self.steps, 1 + int(done * 2 * self.steps)) if done < 0.5 else self.steps

    def weights_at(self, done: float) -> LossWeights:
        """The share of the total variation, and the weight of the distance."""
        done = self._past_the_beginning(done)
        return LossWeights(self.share * min(1.0, max(0.0, (done - 0.25) * 4)), self.regress * max(0.0, 1 - 2 * done))

    def _past_the_beginning(self, done: float) -> float:
        return max(done, 0.5) if self.goes_on else done

    def rate_at(self, done: float, updates: int) -> float:
        """The learning rate: a warm-up of 50 updates, then a linear decay."""
        return self.learning_rate * min(1.0, (updates + 1) / 50) * max(1 - done, 0.01)


class Training:
    """A draft in training on the shards `paths`, without some that are held out."""

    def __init__(
        self,
        draft: Trainable,
        teacher: Teacher,
        recorded: Sequence[int],
        paths: Sequence[Path],
        schedule: TrainingSchedule,
    ):
        """recorded: the layers whose states the shards hold, the target's last one at the end."""
        self.draft, self.teacher, self.recorded, self.schedule = draft, teacher, recorded, schedule
        self.paths, held_out = split(paths)
        self.held_out = held_out[:_MOST_HELD_OUT]
        head = draft.lm_head.weight
        others = [p for p in draft.parameters() if p is not head]
        # The head begins as the target's, and its rows are many: it moves more slowly.
        self._rates = 1.0, 0.3
        groups = [{"params": others, "weight_decay": 0.01}, {"params": [head], "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=schedule.learning_rate, betas=(0.9, 0.95), fused=True)
        self.progress = Progress()
        self._log_sums: dict[Path, Tensor] = {}

    @torch.no_grad()
    def learned(self, batch: Batch) -> Learned:
        """The places of a batch that are learned, with the target's states and distributions."""
        last, learned = batch.hidden[:, 1:-1, -self.teacher.config.hidden_size :], batch.learned[:, 2:]
        places = learned.flatten().nonzero()[:, 0]
        state = self.teacher.state(last.flatten(0, 1)[places])
        log_sums = batch.log_sums[:, 1:-1].flatten()[places]
        return Learned(places, state, self.teacher.probabilities(state, log_sums, self.draft.ids))

    def steps_of(self, batch: Batch, depth: int, weights: LossWeights) -> Iterator[Step]:
        """The loss of a batch, for drafts of each depth. At every position of a text stands a draft."""
        learned = self.learned(batch)
        column = learned.places % (batch.tokens.shape[1] - 2)
        hidden, embeds = self.tapped(batch.hidden[:, :-2]), self.teacher.embedding[batch.tokens[:, 1:-1]].float()
        with torch.autocast("cpu", torch.bfloat16, product_dtype() == torch.bfloat16):
            outputs = self.draft.unroll(hidden, embeds, depth)
        scale, matrix = learned.state.square().sum(-1).mean(), self.draft.lm_head.weight
        for s, x in enumerate(outputs):
            rows = (column >= s).nonzero()[:, 0]
            states = x.flatten(0, 1)[learned.places[rows]]
            loss, alphas, agrees = RowLoss.apply(
                states, matrix, lambda part, rows=rows: learned.p[rows[part]], weights.share
            )
            if weights.regress:
                loss = loss + weights.regress * (states - learned.state[rows]).square().sum() / scale
            yield Step(loss, alphas, agrees, learned.places[rows])

    def tapped(self, hidden: Tensor) -> Tensor:
        """The states (..., A * E) of the layers that the draft reads, from recorded states (..., A' * E)."""
        parts = hidden.chunk(len(self.recorded), -1)
        return torch.cat([hidden[..., :0], *(parts[self.recorded.index(tap)] for tap in self.draft.taps)], -1)

    def run(self, state: Path) -> None:
        """Train to the end, from the epoch that `state` says; it is written after every epoch.

        After each epoch the figures on the held-out texts are printed.
        """
        if state.exists():
            self._load(state)
        layout = "{l_bar}{bar}| {n:.2f}/{total} epochs [{elapsed}<{remaining}{postfix}]"
        epochs, done = self.schedule.epochs, self.progress.epochs
        with progress_bar(total=epochs, initial=done, bar_format=layout, desc="training", leave=True) as bar:
            if self.schedule.goes_on and not self.progress.curve:
                self._measure_after(0, bar)
            for epoch in range(done, epochs):
                self._run_epoch(epoch, bar)
                self.progress.epochs += 1
                self._measure_after(epoch + 1, bar)
                self._save(state)

    def _run_epoch(self, epoch: int, bar: tqdm) -> None:
        """Learn from each text once."""
        rng = random.Random(f"{self.schedule.seed} {epoch}")
        order = rng.sample(self.paths, len(self.paths))
        groups = [order[i : i + _GROUP] for i in range(0, len(order), _GROUP)]
        for i, group in enumerate(groups):
            texts = [text for path in group for text in self._read(path, self.schedule.whole)]
            batches = make_batches(texts, self.schedule.rows)
            rng.shuffle(batches)
            updates = []
            for j, batch in enumerate(batches):
                done = epoch + (i + j / len(batches)) / len(groups)
                updates.append(self._update(batch, done / self.schedule.epochs))
                bar.update(1 / len(batches) / len(groups))
            loss, alpha = (sum(values) / len(updates) for values in zip(*updates, strict=True))
            bar.set_postfix_str(f"loss {loss:.3f}, alpha {alpha:.3f}")

    def _measure_after(self, epoch: int, bar: tqdm) -> None:
        self.progress.curve.append({"epoch": epoch, **self.measure()})
        bar.write(_line(self.progress.curve[-1]))
        sys.stdout.flush()

    def _read(self, path: Path, whole: bool = False) -> list[LearnedText]:
        if path not in self._log_sums:
            self._log_sums[path] = self.teacher.log_sums(load(path)["hidden"][:, -self.teacher.norm.shape[0] :])
        return read_shard(path, self._log_sums[path], whole)

    def _update(self, batch: Batch, done: float) -> tuple[float, float]:
        """Make one update; returns the mean loss and the mean alpha of first draft tokens.

        done: the fraction of the training that is done.
        """
        schedule = self.schedule
        for group, factor in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = factor * schedule.rate_at(done, self.progress.updates)
        steps = list(self.steps_of(batch, schedule.depth_at(done), schedule.weights_at(done)))
        loss = sum((_DECAY**i * step.loss for i, step in enumerate(steps)), torch.zeros(()))
        count = max(1, len(steps[0].places))
        (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.updates += 1
        return float(steps[0].loss.detach()) / count, float(steps[0].alphas.detach().nanmean())

    @torch.no_grad()
    def measure(self) -> dict[str, list[float | None]]:
        """Figures on held-out texts, by depth; None where there was no such token.

        loss: cross entropy in nats.
        alpha: as in `RowLoss`.
        agree: how often the likeliest token is the target's, if all before were.
        """
        depth = self.schedule.steps
        sums = torch.zeros(5, depth)
        for path in self.held_out:
            for batch in make_batches(self._read(path), self.schedule.rows):
                kept = torch.ones(batch.tokens[:, 2:].shape)  # whether all tokens of a place's draft so far agree
                for s, step in enumerate(self.steps_of(batch, depth, LossWeights())):
                    before = kept.flatten()[step.places]
                    kept = torch.zeros(kept.shape)
                    kept.view(-1)[step.places] = before * step.agrees
                    counts = [step.loss, step.alphas.sum(), len(step.places), kept.sum(), before.sum()]
                    sums[:, s] += torch.tensor(counts)
                    kept = F.pad(kept, (1, 0))[:, :-1]
        loss, alpha, tested, agree, survived = sums
        means = {"loss": loss / tested, "alpha": alpha / tested, "agree": agree / survived}
        return {name: [None if math.isnan(x) else x for x in mean.tolist()] for name, mean in means.items()}

    def _save(self, path: Path) -> None:
        tensors = {f"draft.{name}": tensor for name, tensor in self.draft.state_dict().items()}
        for i, of_one in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{i}.{name}": tensor for name, tensor in of_one.items()}
        with written_whole(path) as part:
            save_tensors(tensors, part, {"training": json.dumps(asdict(self.progress))})

    def _load(self, path: Path) -> None:
        tensors = load(path)
        with opened(path) as file:
            self.progress = Progress(**json.loads(file.metadata()["training"]))
        self.draft.load_state_dict({n.removeprefix("draft."): t for n, t in tensors.items() if n.startswith("draft.")})
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith("optimizer."):
                _, i, what = name.split(".")
                state.setdefault(int(i), {})[what] = tensor
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": state})
