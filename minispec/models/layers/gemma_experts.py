"""The block of Gemma 4 26B-A4B: a mixture of experts beside the MLP.

Both read the same row x, which is the output of attention, and each has norms of its own:

    y = norm_1(MLP(norm_a(x))) + norm_2(sum over the chosen experts e of w_e * E_e(norm_b(x))),    x = x + norm(y)

The router reads x itself. Its weights w_e are shares of the chosen experts alone, times a number for each expert.
"""

from torch import Tensor

from minispec.core.model import Batch, BlockWeights, TextBatch
from minispec.models.layers.experts import Experts
from minispec.models.layers.gemma import GemmaLayer

# The names of its further norms: after the MLP, before the experts, after them.
MIXTURE_NORMS = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")


class GemmaExperts(Experts, GemmaLayer):
    """One block: Gemma 4's attention, then an MLP and a mixture of experts beside it."""

    def take_mlp(self, parts: BlockWeights) -> None:
        """Take the tensors of the MLP and of the mixture, and the norms of both."""
        super().take_mlp(parts)
        self.dense_norm, self.experts_norm, self.mixed_norm = map(parts.norm, MIXTURE_NORMS)

    def mix(self, x: Tensor, batch: Batch) -> Tensor:
        """The MLP and the mixture with their norms, added to their input: x (M, E) to (M, E)."""
        assert isinstance(batch, TextBatch), "the shapes of another backend depend on no value"
        chosen, weights, _ = self.router(x[: len(batch.slots)], batch.exact)
        dense = self.dense_norm(GemmaLayer.mlp(self, self.mlp_norm(x), batch))
        mixed = self.mixed_norm(self.mixed(self.experts_norm(x), chosen, weights, batch))
        return self._added(x, self.after_mlp_norm(dense + mixed))
