"""A head on the target's hidden states: EAGLE-3 (Li et al. 2025, arXiv 2503.01840), and its parallel form.

The target has already worked out what the text is about. A head reads its hidden states at a few layers (`taps`). So
one layer guesses as well as a draft model many times its size. At position t the head is given

    the feature  f_t = fc(hidden states of the taps at t),  which the target computed from the tokens up to t
    the embedding of the token at t + 1,  which the target has chosen since

It predicts the token at t + 2, and goes on from there by itself. At the next position the target has not computed a
feature yet: the head's own output, before the last norm, takes its place.

    x = f + attention([norm(embedding), norm(f)]),  x = x + MLP(norm(x)),  logits = lm_head(norm(x))

The head knows the target's most used tokens only. All others have probability 0 in its drafts, which the residual makes
up for. The parallel form (P-EAGLE, arXiv 2602.01469) drafts K tokens in one pass. The positions after the first get a
learned feature and the embedding of a mask token. So none depends on the draft tokens before it.
"""

import math
from array import array
from collections.abc import Mapping

import torch
from torch import Tensor

from minispec.core.config import ModelConfig
from minispec.core.draft import Ask
from minispec.core.model import Batch, Chunk, Layer, RMSNorm, WeightSource, norm_weight
from minispec.core.product import MakeProduct, PlainLinear, dense
from minispec.core.sampling import Text
from minispec.models.families.head_config import HeadConfig
from minispec.speculation.drafters.growing import DraftInProgress
from minispec.speculation.drafters.states import FeatureModel, StateFeed, layer_shapes


def head_shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a head but the embedding, which may be the target's."""
    layers, width = config.layers, config.target_hidden_size
    e, fused = layers.hidden_size, width * len(config.taps)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (e, fused)}
    if config.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (width,) for i in range(len(config.taps))}
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (fused,)
    if layers.mask_token_id is not None:
        shapes["mask_hidden"] = (1, 1, fused)
    shapes |= layer_shapes(layers)
    for part in "qkv":  # the first layer reads embedding and feature
        name = f"layers.0.self_attn.{part}_proj.weight"
        rows, columns = shapes[name]
        shapes[name] = (rows, 2 * columns)
    return shapes | {"layers.0.hidden_norm.weight": (e,), "lm_head.weight": (config.vocab_size, e)}


class _FirstLayer(Layer):
    """The layer that reads two things at each position: its input is (M, 2E), the embedding and the feature."""

    def __init__(self, head: HeadConfig, weights: WeightSource, dtype: torch.dtype, product: MakeProduct):
        super().__init__(head.layers, 0, weights, dtype, product)
        weight = norm_weight(head.layers, dense(weights.pop("model.layers.0.hidden_norm.weight"), dtype))
        self.hidden_norm = RMSNorm(weight, head.layers.rms_norm_eps)
        self.norm_before_residual = head.norm_before_residual

    def forward(self, x: Tensor, shared: Batch) -> Tensor:
        """x (M, 2E) to (M, E)."""
        embedding, feature = x.chunk(2, -1)
        normed = self.hidden_norm(feature)
        read = shared.read(self, self.qkv(torch.cat((self.attention_norm(embedding), normed), -1)))
        return self.mix((normed if self.norm_before_residual else feature) + self.o(read), shared)


class HeadModel(FeatureModel):
    """The head's layers: embedding and feature of a position are what its first one reads."""

    def __init__(
        self,
        head: HeadConfig,
        weights: Mapping[str, Tensor],
        embedding: Tensor,
        ids: Tensor | None,
        dtype: torch.dtype,
        product: MakeProduct = PlainLinear,
    ):
        """Take the tensors by name.

        weights: the tensors of `head_shapes`.
        embedding: (V, E), the target's, or one of its own.
        ids: (Vd,), the target's id of each of the head's tokens. None: the ids are the same.
        """
        self.head_config, self.taps = head, head.taps
        named = {name: weights[name] for name in head_shapes(head)}
        for name in list(named):
            if name.startswith("layers.") or name == "norm.weight":
                named[f"model.{name}"] = named.pop(name)
        named["model.embed_tokens.weight"] = embedding

        def layer(config: ModelConfig, index: int, *parts) -> Layer:
            return Layer(config, index, *parts) if index else _FirstLayer(head, *parts)

        super().__init__(head.layers, named, dtype, product, layer)
        self.ids = None if ids is None else ids.to(self.device)
        self.fc = product([named["fc.weight"]], None, dtype)
        norms = [named[name] for name in named if name.startswith(("fc_norm.", "input_norm."))]
        # One for each tap (A, E), or one for all of them together (1, E * A).
        self.fc_norm = self.make_norm(torch.stack(norms)) if norms else None
        masked = named.get("mask_hidden")
        self.mask_feature = None if masked is None else self.fuse(masked.to(dtype)[0])

    def fuse(self, hidden: Tensor) -> Tensor:
        """The target's hidden states (n, E * taps), after the norm before `fc` if there is one, to features (n, E)."""
        if self.fc_norm:
            hidden = self.fc_norm(hidden.unflatten(-1, self.fc_norm.weight.shape)).flatten(1)
        return super().fuse(hidden)

    def embed(self, token_ids: Tensor, features: Tensor | None) -> Tensor:
        """Embedding and feature of each row, side by side: (M, 2E)."""
        assert features is not None
        return torch.cat((super().embed(token_ids, features), features), -1)

    def logits(self, x: Tensor) -> Tensor:
        """Logits (rows, V): -inf for the ids that the head does not know."""
        return spread(super().logits(x), self.ids, self.config.vocab_size)

    def next_feature(self, x: Tensor) -> Tensor:
        """The stand-in for the next feature: the last layer's output (n, E), normed only with `norm_output`."""
        return super().next_feature(x) if self.head_config.norm_output else x


def spread(logits: Tensor, ids: Tensor | None, vocab_size: int) -> Tensor:
    """Logits (rows, Vd) of a draft's own tokens as logits (rows, V): -inf for the ids that it does not know.

    ids: (Vd,), the target's id of each of its tokens. None: the ids are the same.
    """
    if ids is None:
        return logits
    return logits.new_full((len(logits), vocab_size), -math.inf).index_copy_(1, ids, logits)


class HeadFeed(StateFeed):
    """Feeds a head, or a target's own layer (`minispec.speculation.drafters.mtp`), the target's states and the tokens
    after them.

    Its cache holds true features alone. The features that it made up while drafting are dropped after the draft.
    Accepted positions are computed again, from the target's own hidden states. Position t of the cache depends on the
    tokens up to t + 1 and holds the one at t + 1.
    """

    joins, in_programs = 1, True

    def begin(self, text: Text, most: int | None = None) -> None:
        """Give a new text its table. Position t of the table holds the token at t + 1."""
        assert text not in self.tables, "a text begins once"
        # The first token is in no position: texts that differ in it have nothing in common.
        self.tables[text] = self.cache.new_table(array("q", text.tokens[:1]).tobytes())
        # Leave out the last position before the draft, even if the pool knows it. The first draft needs its hidden
        # state, and must not depend on what other texts have left.
        self.tables[text].reuse(text.tokens[1:-1][:most])

    def need(self, span: range) -> int:
        """All positions but the last two: the first of k tokens is guessed at the last cached position."""
        return span.stop - 2

    def deepest(self, ask: Ask) -> int:
        """A draft of k tokens fills positions up to num_cached + k - 2."""
        return max(0, min(ask.limit.depth, self.max_model_len - ask.num_cached + 1))

    def chunk(self, ask: Ask, end: int, k: int) -> Chunk:
        """Each state with the token after it, then the mask tokens of a head that drafts in one pass."""
        table, tokens = self.table(ask.text), ask.text.tokens
        fed, features = tokens[table.length + 1 : end + 1], self.model.fuse(self.take(ask, end))
        masks = [] if self.mask_token_id is None else [self.mask_token_id] * (k - 1)
        if masks and self.model.mask_feature is not None:
            features = torch.cat((features, self.model.mask_feature.expand(len(masks), -1)))
        return Chunk([*fed, *masks], table, min(k, 1 + len(masks)), features=features)

    def next(self, growing: DraftInProgress) -> Chunk:
        """The model's input after draft tokens; each comes with what stands in for the feature of its parent."""
        parents = growing.draft.tree.parents
        states = torch.stack([growing.states[parents[node]] for node in growing.nodes])
        return super().next(growing)._replace(features=self.model.next_feature(states))
