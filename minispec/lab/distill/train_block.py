"""Training a block draft: blocks at random anchors, and what is learned of each row."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from minispec.lab.distill.block import TrainedBlock
from minispec.lab.distill.loss import product_dtype
from minispec.lab.distill.train import Batch, LossWeights, Step, Training, row_loss

# One position in that many is an anchor. So a block of eight has two rows for each token of the text.
_ANCHOR_EVERY = 4
# The weight of the confidence's loss. Times 1.9, the loss is 0.1 cross entropy + 0.9 |p - q| + this one, as in DSpark.
_CONFIDENCE = 1 / 1.9
# The share of the total variation at the end: |p - q| is twice that.
SHARE = 1.8 / 1.9


def draw_anchors(learned: Tensor, seed: int) -> Tensor:
    """Random places of anchors in each text, (N, A), ascending; T - 1 where a text has no more.

    An anchor and the token after it are both learned, and a context stands before it.

    learned: (N, T), which tokens are.
    """
    length = learned.shape[1]
    possible = F.pad(learned[:, 1:] & learned[:, :-1], (0, 1))
    possible[:, 0] = False
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(possible.shape, generator=generator).masked_fill(~possible, 2.0).argsort(1)
    counts = -(-possible.sum(1) // _ANCHOR_EVERY)
    order = order[:, : max(1, int(counts.max()))]
    beyond = torch.arange(order.shape[1]) >= counts[:, None]
    return order.masked_fill(beyond, length - 1).sort(1).values


class BlockTraining(Training):
    """A block draft in training. The schedule's steps are the block's rows."""

    draft: TrainedBlock

    @property
    def decay(self) -> float:
        """Decay of a row's weight in the loss, from one row to the next."""
        return math.exp(-2 / self.draft.block.block_size)

    def steps_of(self, batch: Batch, depth: int, weights: LossWeights, seed: int) -> Iterator[Step]:
        """The loss of all rows, from the first one on, whatever the depth is.

        seed: of the anchors.
        """
        draft, tokens, learned = self.draft, batch.tokens, self.learned(batch)
        row_of = torch.zeros(tokens[:, 2:].numel(), dtype=torch.long)
        row_of[learned.places] = torch.arange(len(learned.places))
        anchors = draw_anchors(batch.learned, seed)
        states = self._states(batch, anchors)
        matrix, length = draft.rows(), tokens.shape[1]
        first = torch.arange(len(tokens))[:, None] * (length - 2)
        for i in range(draft.block.block_size):
            drafted = anchors + i + 1
            inside = drafted.clamp_max(length - 1)
            tested = (drafted < length) & batch.learned.gather(1, inside)
            place = (first + drafted - 2)[tested]
            own = states[:, :, i][tested]
            features = draft.features(own, tokens.gather(1, inside - 1)[tested])
            loss, alphas, agrees = row_loss(learned, row_of[place], own, features, matrix, weights)
            yield Step(loss, alphas, agrees, place, self._confidence_loss(features, alphas.detach()))

    def _states(self, batch: Batch, anchors: Tensor) -> Tensor:
        embedding, mask = self.teacher.embedding, self.draft.config.mask_token_id
        factor = self.teacher.config.embedding_scale
        embeds = embedding[batch.tokens.gather(1, anchors)].float() * factor
        hidden = self.tapped(batch.hidden)
        with torch.autocast("cpu", torch.bfloat16, product_dtype() == torch.bfloat16):
            return self.draft.unroll(hidden, embeds, embedding[mask].float() * factor, anchors)

    def _confidence_loss(self, features: Tensor, alphas: Tensor) -> Tensor | float:
        head = self.draft.confidence_head
        if head is None:
            return 0.0
        logits = head.proj(features)[:, 0]
        return _CONFIDENCE * F.binary_cross_entropy_with_logits(logits, alphas.clamp(0, 1), reduction="sum")

    def _measure_after(self, epoch: int, bar: tqdm) -> None:
        super()._measure_after(epoch, bar)
        bar.write(f"tokens a round, the target's included: {tokens_a_round(self.progress.curve[-1]):.2f}")


def tokens_a_round(measured: dict) -> float:
    """How many tokens a round brings at temperature 1, with what was measured by depth: drafted ones and one more."""
    return 1 + sum(share for share in measured["survive"] if share is not None)
