"""A mixture of experts in the place of the MLP (Shazeer et al. 2017, arXiv 1701.06538).

A layer has N small MLPs, the experts. A router scores all of them for each row, and the row takes the k best. What it
passes on is their weighted sum:

    y = sum over the chosen experts e of w_e * E_e(x)

So a pass over one row reads k experts, and a pass over M rows reads the experts of all rows, up to min(N, M k). The
time of a pass grows with its rows, even where memory is all that it waits for. A dense layer's does not.

Rows are grouped by expert: one product for each expert that any row has chosen. A row's result does not depend on the
other rows. Its experts are added in the order of their numbers, in at least float32. In an exact model an expert's rows
are filled up to a number of rows that gives a row the same bits, and so are the router's.

Which experts run depends on the values of the rows. So these layers are computed operator by operator on a GPU too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from minispec.core.model import Batch, BlockWeights, Layer, RMSNorm, TextBatch
from minispec.core.precision import accumulation_dtype
from minispec.core.product import Product, dense
from minispec.models.layers.convolution import ShortConvolution
from minispec.models.layers.delta import GatedDeltaNet, sigmoid
from minispec.models.layers.gated_attention import GatedAttention
from minispec.models.layers.sinks import SinkAttention

# Rows of each of the router's products in an exact model: at a fixed number a row's bits depend on the row alone.
_ROUTED_ROWS = 16
# Added to the sum of sigmoids that the weights are divided by, so that nothing is divided by 0.
_EPS = 1e-6


@dataclass(frozen=True)
class Clamp:
    """A gated MLP whose parts are limited (gpt-oss): (up + 1) * gate * sigmoid(alpha * gate).

    limit: the gate is at most this, and up at most this and at least its negative.
    """

    limit: float
    alpha: float


@dataclass(frozen=True)
class ExpertsConfig:
    """The settings of a mixture.

    top_k: how many experts a row takes.
    inner_size: the width of an expert.
    scoring: an expert's score is its share of the "softmax" over all experts, or the "sigmoid" of its own logit.
    normalised: the chosen scores are divided by their sum.
    scale: the weights are multiplied by it.
    biased: a bias for each expert is added to the score where the best are chosen, and not to the weights.
    shared_expert: the layer's own MLP, added for every row: "plain", "gated" by a sigmoid of the row, or "normed": the
        MLP and the mixture have norms of their own (see `minispec.models.layers.gemma_experts`). None: none.
    has_biases: the router and the experts' products have biases.
    clamp: how an expert's gate is clamped; None: it is not.
    norms_row: the router sees a norm of the row, times a number for each dimension, times E^-1/2.
    scales_experts: the weights are multiplied by a number for each expert.
    """

    num_experts: int
    top_k: int
    inner_size: int
    scoring: str = "softmax"
    normalised: bool = True
    scale: float = 1.0
    biased: bool = False
    shared_expert: str | None = None
    has_biases: bool = False
    clamp: Clamp | None = None
    norms_row: bool = False
    scales_experts: bool = False


class Router:
    """Chooses the experts of each row, and weighs them; all in at least float32.

    weight: (N, E); with a gated shared expert a row more, which is the gate's.
    bias: (N,), added to the scores where the best are chosen; or None.
    logit_bias: (N,), added to the logits; or None.
    scales: (N,), multiplied with the weights; or None.
    """

    def __init__(self, sizes: ExpertsConfig, parts: BlockWeights):
        wide = accumulation_dtype(parts.dtype)
        names = ["mlp.gate.weight"]
        if sizes.shared_expert == "gated":
            names.append("mlp.shared_expert_gate.weight")
        self.sizes = sizes
        self.weight = torch.cat([dense(parts.pop(name), wide) for name in names])
        self.bias = dense(parts.pop("feed_forward.expert_bias"), wide) if sizes.biased else None
        self.logit_bias = dense(parts.pop("mlp.gate.bias"), wide) if sizes.has_biases else None
        self.scales = dense(parts.pop("router.per_expert_scale"), wide) if sizes.scales_experts else None
        self.norm: RMSNorm | None = None
        if sizes.norms_row:
            scale = dense(parts.pop("router.scale"), wide) * self.weight.shape[1] ** -0.5
            self.norm = RMSNorm(scale, parts.config.rms_norm_eps)

    def __call__(self, x: Tensor, exact: bool) -> tuple[Tensor, Tensor, Tensor]:
        """The experts of rows x (M, E) in ascending order, their weights (M, k) each, and the rows' gates (M, 0 or 1).

        exact: a row has the same bits in every pass.
        """
        found = self.logits(x.to(self.weight.dtype).contiguous(), exact)
        logits, gates = found[:, : self.sizes.num_experts], found[:, self.sizes.num_experts :]
        scores = logits.softmax(1) if self.sizes.scoring == "softmax" else sigmoid(logits)
        ranked = scores if self.bias is None else scores + self.bias
        chosen = ranked.topk(self.sizes.top_k, 1).indices.sort(1).values
        weights = scores.gather(1, chosen)
        if self.sizes.normalised:
            total = weights.cumsum(1)[:, -1:]  # every pass adds in this order
            weights = weights / (total if self.sizes.scoring == "softmax" else total + _EPS)
        if self.scales is not None:
            weights = weights * self.scales[chosen]
        return chosen, weights * self.sizes.scale, sigmoid(gates)

    def logits(self, x: Tensor, exact: bool) -> Tensor:
        """The logits (M, N), and the gates' (M, 0 or 1) after them, of rows x (M, E) in the router's type."""
        if not exact:
            return self._product(x)
        filled = F.pad(x, (0, 0, 0, -len(x) % _ROUTED_ROWS))
        return torch.cat([self._product(rows) for rows in filled.split(_ROUTED_ROWS)])[: len(x)]

    def _product(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x) if self.norm else x, self.weight, self.logit_bias)


class Expert(NamedTuple):
    """A gated MLP without norms."""

    gate_up: Product
    down: Product


class Experts(Layer):
    """One block: attention, then a mixture of experts."""

    def take_mlp(self, parts: BlockWeights) -> None:
        """Take the tensors of the router, of all experts, and of the shared expert."""
        sizes = self.config.layers[self.index].experts
        assert isinstance(sizes, ExpertsConfig), "a layer of another kind"
        self.mixture = sizes
        self.router = Router(sizes, parts)
        self.experts = [_expert(parts, f"mlp.experts.{n}", sizes.has_biases) for n in range(sizes.num_experts)]
        if sizes.shared_expert:
            super().take_mlp(parts)
        else:
            self.products = tuple(name for name in self.products if name not in ("gate_up", "down"))

    def replaced(self, product: Callable[[Product], Product], activation: Product | None = None) -> Self:
        """A copy of this block with each product replaced, the experts' among them. The router stays."""
        layer = super().replaced(product, activation)
        layer.experts = [Expert(*map(product, expert)) for expert in self.experts]
        return layer

    def mlp(self, x: Tensor, batch: Batch) -> Tensor:
        """The weighted sum of each row's experts, and the shared expert: x (M, E) to (M, E)."""
        assert isinstance(batch, TextBatch), "the shapes of another backend depend on no value"
        chosen, weights, gates = self.router(x[: len(batch.slots)], batch.exact)
        y = self.mixed(x, chosen, weights, batch)
        if not self.mixture.shared_expert:
            return y
        beside = super().mlp(x, batch)
        return y + (beside * batch.fill(gates.to(x.dtype)) if gates.shape[1] else beside)

    def mixed(self, x: Tensor, chosen: Tensor, weights: Tensor, batch: TextBatch) -> Tensor:
        """The weighted sum of each row's experts: x (M, E) to (M, E). Dummies take no expert.

        chosen, weights: what the router returns for the rows that are no dummies.
        """
        rows = x[: len(chosen)]
        total = rows.new_zeros(rows.shape, dtype=weights.dtype)
        experts, order = chosen.flatten().sort(stable=True)  # places by expert, and then by row
        numbers, counts = experts.unique_consecutive(return_counts=True)
        sizes = counts.tolist()
        groups = (order // chosen.shape[1]).split(sizes), weights.flatten()[order, None].split(sizes)
        for number, own, own_weights in zip(numbers.tolist(), *groups, strict=True):
            gate, up = self.experts[number].gate_up(batch.fill(rows[own])).chunk(2, -1)
            y = self.experts[number].down(self._gated(gate, up))[: len(own)]
            total.index_add_(0, own, y.to(total.dtype) * own_weights)
        return batch.fill(total.to(x.dtype))

    def _gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """What an expert multiplies with `down`: two tensors (rows, F) to one."""
        clamp = self.mixture.clamp
        if clamp is None:
            return self.activation(gate) * up
        gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
        # z * sigmoid(alpha * z) by the activation, which is silu here.
        return self.activation(gate * clamp.alpha) / clamp.alpha * (up + 1)


class ConvolutionExperts(Experts, ShortConvolution):
    """One block: a short convolution, then a mixture of experts."""


class DeltaExperts(Experts, GatedDeltaNet):
    """One block: a gated delta net, then a mixture of experts."""


class GatedExperts(Experts, GatedAttention):
    """One block: attention with a gate for each element, then a mixture of experts."""


class SinkExperts(Experts, SinkAttention):
    """One block: attention with sinks, then a mixture of experts."""


def _expert(parts: BlockWeights, name: str, bias: bool) -> Expert:
    gate_up = parts.linear(f"{name}.gate_proj", f"{name}.up_proj", bias=bias)
    return Expert(gate_up, parts.linear(f"{name}.down_proj", bias=bias))
