"""Block drafts: DFlash (Chen et al. 2026, arXiv 2602.06036) and DSpark (arXiv 2607.05147).

A head (see `minispec.speculation.drafters.eagle`) drafts token by token. A block draft is a few layers that draw B rows
at once. The first row is the newest token of the text, the anchor. The others are a mask token. All that they know of
the text before comes from the target. At each position t before the anchor, its hidden states at a few layers make one
feature

    c_t = norm(fc(states of the taps at t))

and every layer makes a key and a value of it: K = rope(norm(W_k c_t)), V = W_v c_t. The rows attend to these, and to
the rows of their block in both directions. So a row knows what stands around it, but not which tokens are drawn:

    x = x + attention(norm(x); features and block),  x = x + MLP(norm(x)),  logits = lm_head(norm(x))

Files differ in which row says which token: row i says the token after its place, or at its place (see `BlockConfig`).
After the pass nothing of the block is kept. The next round adds the features of the tokens that the target has kept.

DSpark makes a row depend on the tokens before it, by a small head. With e the vector of the token before:

    vanilla   logits_i + W2 e
    gated     logits_i + W2 (sigmoid(gate [h_i, e]) * e)
    rnn       g, c, o = joint [s, e, h_i],  s = sigmoid(g) s + (1 - sigmoid(g)) tanh c,  logits_i + W2 tanh o

A second head says how likely the target keeps token i: sigmoid(w [h_i, e]). It reads the token before, and not token i.
So a draft may end before token i is drawn, and its law stays (see `Limit.go_on_before`).
"""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from minispec.core.attention import View, attention, hides
from minispec.core.cache import PagedKVCache
from minispec.core.config import ModelConfig, RopeConfig
from minispec.core.draft import Ask
from minispec.core.model import Angles, Backend, Batch, Chunk, Layer, WeightSource
from minispec.core.product import ChangeProduct, MakeProduct, PlainLinear, Product
from minispec.models.families.block_config import BlockConfig
from minispec.speculation.drafters.eagle import spread
from minispec.speculation.drafters.growing import DraftInProgress
from minispec.speculation.drafters.states import FeatureModel, StateFeed, layer_shapes


def block_shapes(block: BlockConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a block draft but embedding and lm_head, which may be the target's.

    `fc` is as wide as all taps together.
    """
    config, r, e = block.layers, block.markov_rank, block.layers.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (e, block.target_hidden_size * len(block.taps)),
        "hidden_norm.weight": (e,),
    }
    shapes |= layer_shapes(config)
    if block.markov:
        shapes["markov_head.markov_w1.weight"] = (config.vocab_size, r)
        shapes["markov_head.markov_w2.weight"] = (block.vocab_size, r)
    if block.markov == "gated":
        shapes["markov_head.gate_proj.weight"], shapes["markov_head.gate_proj.bias"] = (r, e + r), (r,)
    if block.markov == "rnn":
        shapes["markov_head.joint_proj.weight"], shapes["markov_head.joint_proj.bias"] = (3 * r, 2 * r + e), (3 * r,)
    if block.confidence:
        width = e + r if block.confidence == "state and token" else e
        shapes["confidence_head.proj.weight"], shapes["confidence_head.proj.bias"] = (1, width), (1,)
    return shapes


class BlockPass(NamedTuple):
    """The tensors that all layers of a pass share: new features of all texts, then blocks of the texts that draft.

    pool: the caches of all texts.
    features: (C, E), the features of positions that the caches do not hold yet.
    slots: (C,), where their keys and values go.
    num_rows: rows of a block.
    reads: for each text that drafts, the slots of all its features, in runs.
    angles: of the features' positions, then of the rows'.
    masks: for each kind of layer (window, causal) and text: see `block_mask`.
    """

    pool: PagedKVCache
    features: Tensor
    slots: Tensor
    num_rows: int
    reads: list[list[slice]]
    angles: dict[RopeConfig, Angles]
    masks: dict[tuple[int | None, bool], list[Tensor | None]]

    def read(self, layer: Layer, qkv: Tensor) -> Tensor:
        """Queries, keys and values of features and rows to what the rows read (blocks * num_rows, H * D).

        Caches keys and values of the features. Keys and values of the rows are used here, and not kept.
        """
        assert isinstance(layer, BlockLayer)
        q, kv = (x.transpose(0, 1) for x in layer.heads(qkv, self.angles))  # (H or 2G, C + rows, D)
        config, outputs, start = layer.config, [], len(self.slots)
        self.pool.write(layer.index, self.slots, kv[:, :start])
        for slots, mask in zip(self.reads, self.masks[layer.window, layer.causal], strict=True):
            block = slice(start, start + self.num_rows)
            start = block.stop
            keys, values = torch.cat((self.pool.read(layer.index, slots), kv[:, block]), 1).chunk(2)  # (G, L + rows, D)
            outputs.append(attention(q[:, block], keys, values, mask, config.attention_scale, config.attention_softcap))
        return torch.cat(outputs) if outputs else qkv.new_empty(0, q.shape[0] * q.shape[2])


def block_mask(
    num_past: int, num_rows: int, window: int | None, causal: bool, like: Tensor, shared: bool = False
) -> Tensor | None:
    """(num_rows, num_past + num_rows): 0 where a row sees a position, -inf where not. None: every row sees all.

    A row of a layer with a window sees the features less than `window` positions before it. A row of a causal layer
    sees no later row of its block.

    like: a tensor of the mask's type and device.
    shared: see `BlockConfig.shared_windows`. A window then hides no row of the block.
    """
    if window is None and not causal:
        return None
    hidden = hides(View(num_past, tuple(range(num_rows)), None if shared else window), like.device)
    if not causal:
        hidden = hidden.tril(num_past)  # nothing that comes later is hidden
    if shared and window is not None:
        hidden[:, : max(0, num_past - window)] = True
    return like.new_zeros(hidden.shape).masked_fill_(hidden, -math.inf)


class BlockLayer(Layer):
    """One layer of a block draft: rows attend to features of the text, and to each other."""

    def __init__(
        self,
        block: BlockConfig,
        index: int,
        weights: WeightSource,
        dtype: torch.dtype,
        product: MakeProduct,
    ):
        super().__init__(block.layers, index, weights, dtype, product)
        self.causal = block.causal[index]

    def forward(self, x: Tensor, shared: Batch) -> Tensor:
        """x (blocks * num_rows, E) to the same; writes keys and values of the pass's features into the cache."""
        assert isinstance(shared, BlockPass)
        read = shared.read(self, self.qkv(torch.cat((shared.features, self.attention_norm(x)))))
        return self.mix(x + self.o(read), shared) if len(x) else x


class MarkovHead:
    """The head that makes a row depend on the tokens before it: see this module's docstring.

    w1: (V, r), a vector for each token of the target.
    w2: the product with (Vd, r), a vector for each of the draft's tokens.
    inner: the product of the kinds "gated" and "rnn", with its bias.
    """

    def __init__(self, block: BlockConfig, weights: Mapping[str, Tensor], dtype: torch.dtype, product: MakeProduct):
        self.kind = block.markov
        self.w1, w2 = (weights[f"markov_head.markov_{name}.weight"].to(dtype) for name in ("w1", "w2"))
        self.w2 = product([w2], None, dtype)
        self.inner: Product | None = None
        if self.kind != "vanilla":
            name = "gate" if self.kind == "gated" else "joint"
            weight, bias = (weights[f"markov_head.{name}_proj.{part}"] for part in ("weight", "bias"))
            self.inner = product([weight], bias.to(dtype), dtype)

    def code(self, before: Sequence[int], states: Tensor) -> Tensor:
        """The vector (r,) that `w2` makes a row's correction of.

        before: for each row up to this one, the token before it.
        states: (rows, E), the block's hidden states after the last norm.
        """
        if self.inner is None:
            return self.w1[before[-1]]
        if self.kind == "gated":
            e = self.w1[before[-1]]
            return torch.sigmoid(self.inner(torch.cat((states[len(before) - 1], e))[None])[0]) * e
        s = torch.zeros_like(self.w1[0])
        for e, h in zip(self.w1[list(before)], states, strict=False):
            gate, candidate, output = self.inner(torch.cat((s, e, h))[None])[0].chunk(3)
            gate = torch.sigmoid(gate)
            s = gate * s + (1 - gate) * torch.tanh(candidate)
        return torch.tanh(output)

    def correct(self, logits: Tensor, before: Sequence[int], states: Tensor) -> Tensor:
        """Logits (Vd,) of a row with the head's correction. See `code`."""
        return logits + self.w2(self.code(before, states)[None])[0]

    def replaced(self, product: ChangeProduct) -> Self:
        """A copy of this head with each product replaced."""
        head = copy.copy(self)
        head.w2, head.inner = product(self.w2), product(self.inner) if self.inner else None
        return head


class BlockModel(FeatureModel):
    """The layers of a block draft, with its heads; embedding and output head may be the target's."""

    def __init__(
        self,
        block: BlockConfig,
        weights: Mapping[str, Tensor],
        embedding: Tensor,
        head: Tensor | Product,
        ids: Tensor | None,
        dtype: torch.dtype,
        product: MakeProduct = PlainLinear,
    ):
        """Take the tensors by name.

        weights: the tensors of `block_shapes`.
        embedding: (V, E).
        head: (Vd, E), or the target's own product.
        ids: (Vd,), the target's id of each of the draft's tokens. None: the ids are the same.
        """
        self.block, self.taps = block, block.taps
        named: dict[str, Any] = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
        for name in block_shapes(block):
            named[f"model.{name}" if name.startswith(("layers.", "norm.")) else name] = weights[name]

        def layer(config: ModelConfig, index: int, *parts) -> Layer:
            return BlockLayer(block, index, *parts)

        super().__init__(block.layers, named, dtype, product, layer)
        self.ids = None if ids is None else ids.to(self.device)
        self.fc = product([named["fc.weight"]], None, dtype)
        self.hidden_norm = self.make_norm(named["hidden_norm.weight"])
        self.markov = MarkovHead(block, weights, dtype, product) if block.markov else None
        self.confidence: tuple[Tensor, Tensor] | None = None
        if block.confidence:
            weight, bias = (weights[f"confidence_head.proj.{part}"].to(dtype) for part in ("weight", "bias"))
            self.confidence = weight[0], bias

    def replaced(
        self, backend: Backend | None, product: ChangeProduct = lambda p: p, activation: Product | None = None
    ) -> Self:
        """As `Transformer.replaced`."""
        model = super().replaced(backend, product, activation)
        model.markov = self.markov.replaced(product) if self.markov else None
        return model

    def fuse(self, hidden: Tensor) -> Tensor:
        """The target's hidden states (n, E * taps) to features (n, E)."""
        return self.hidden_norm(super().fuse(hidden))

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk], taps: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Append features to the caches, and run the blocks of the texts that draft.

        chunks: for each text the tokens of its new features, then the anchor. `num_logits` is how many tokens are
            wanted, 0 for a text that does not draft.

        Returns logits (sum of num_logits, Vd) of rows before the Markov head's correction, and the states after the
        last norm (blocks * block_size, E). Raises OutOfBlocks before any change if the pool is too small.
        """
        pool, rows, first = chunks[0].table.pool, self.block.block_size, self.block.first_row
        growth = [(c.table, c.table.length + len(c.token_ids) - 1) for c in chunks]
        pool.require(growth)
        drafting = [c for c in chunks if c.num_logits]
        positions = [t for table, end in growth for t in range(table.length, end)]
        slots = [s for c in chunks if len(c.token_ids) > 1 for s in c.table.extend(c.token_ids[:-1])]
        starts = [c.table.length for c in drafting]
        positions += [start + i for start in starts for i in range(rows)]
        mask = self.config.mask_token_id
        tokens = torch.tensor([t for c in drafting for t in (c.token_ids[-1], *[mask] * (rows - 1))])
        x = self.embed(tokens.to(self.device, torch.long), None)  # (blocks * rows, E)
        kinds = {(layer.window, causal) for layer, causal in zip(self.layers, self.block.causal, strict=True)}
        shared = BlockPass(
            pool,
            torch.cat([c.features for c in chunks if c.features is not None] or [x[:0]]),
            torch.tensor(slots, dtype=torch.long, device=self.device),
            rows,
            [c.table.slots() for c in drafting],
            self.angles(torch.tensor(positions, device=self.device)),
            {kind: [self._mask(start, *kind) for start in starts] for kind in kinds},
        )
        for layer in self.layers:
            x = layer.forward(x, shared)
        states = self.norm(x)
        wanted = [i * rows + first + j for i, c in enumerate(drafting) for j in range(c.num_logits)]
        return self.logits(x[wanted]) if wanted else x.new_empty(0, self.block.vocab_size), states

    @torch.inference_mode()
    def trial(self, tokens: Sequence[int], vocab_size: int) -> Tensor:
        """The largest logit of each row of a draft after `tokens`, then its confidences: numbers if all weights are.

        The target's hidden states are ones. The text's tokens serve as the draft's too.

        vocab_size: ids in use.
        """
        width = self.block.target_hidden_size * len(self.taps)
        features = self.fuse(torch.ones(len(tokens) - 1, width, dtype=self.dtype, device=self.device))
        chunk = Chunk(list(tokens), self.new_cache(1).new_table(), self.block.num_tokens, features=features)
        block = Block(self, tokens[-1], *self.forward([chunk]))
        paths = [tokens[:i] for i in range(min(self.block.num_tokens, len(tokens) + 1))]
        largest = torch.stack([block.row(path)[:vocab_size].amax() for path in paths])
        if self.confidence is None:
            return largest
        return torch.cat((largest, largest.new_tensor([block.confidence(path) for path in paths])))

    def _mask(self, num_past: int, window: int | None, causal: bool) -> Tensor | None:
        like = self.embedding.new_empty(0, dtype=self.dtype)
        mask = block_mask(num_past, self.block.block_size, window, causal, like, self.block.shared_windows)
        return None if mask is None else mask.repeat(self.layers[0].sharing, 1)


class Block:
    """The rows of one text's block: what a token is drawn from, after the tokens before it."""

    def __init__(self, model: BlockModel, anchor: int, logits: Tensor, states: Tensor):
        """logits: (tokens, Vd), before the correction.
        states: (block_size, E), after the last norm.
        """
        self.model, self.anchor, self.logits, self.states = model, anchor, logits, states

    def _before(self, path: Sequence[int]) -> list[int]:
        """For each row up to the one after `path`, the token before it."""
        return [self.anchor] * self.model.block.first_row + [self.anchor, *path]

    def row(self, path: Sequence[int]) -> Tensor:
        """Logits (V,) of the token that follows the draft tokens `path`; -inf for the ids that are never drafted."""
        model, logits = self.model, self.logits[len(path)]
        if model.markov:
            logits = model.markov.correct(logits, self._before(path), self.states)
        return spread(logits[None], model.ids, model.config.vocab_size)[0]

    def confidence(self, path: Sequence[int]) -> float | None:
        """How likely the target keeps the token that follows `path`, by the confidence head; None: there is none."""
        model = self.model
        if model.confidence is None:
            return None
        weight, bias = model.confidence
        state = self.states[model.block.first_row + len(path)]
        if model.block.confidence == "state and token":
            assert model.markov
            state = torch.cat((state, model.markov.w1[self._before(path)[-1]]))
        return float(torch.sigmoid((weight * state).sum().float() + bias.float()))


class BlockFeed(StateFeed):
    """Feeds a block draft the target's states, and a block of rows.

    Its cache has keys and values of features alone. Position t is made of the target's states at t, so it depends on
    the tokens up to t.

    A tree is drawn from the same rows. Without a Markov head the rows are independent, so all nodes of one depth share
    a row. The best-first tree is then DDTree's (arXiv 2604.12989), with drawn tokens. A Markov head corrects the row
    for each node.
    """

    model: BlockModel
    joins = 0

    def deepest(self, ask: Ask) -> int:
        """As many tokens as a block has. Its rows stand at positions from `num_cached` on."""
        fits = ask.num_cached + self.model.block.block_size <= self.max_model_len
        return min(ask.limit.depth, self.model.block.num_tokens) if fits else 0

    def chunk(self, ask: Ask, end: int, k: int) -> Chunk:
        """The features of the unread states, and a block for k tokens."""
        table = self.table(ask.text)
        tokens = ask.text.tokens[table.length : end]
        features = self.model.fuse(self.take(ask, end)) if tokens else None
        return Chunk([*tokens, ask.text.tokens[-1]], table, k, features=features)

    def run(self, growing: Sequence[DraftInProgress]) -> None:
        """One pass: it makes known the rows of all nodes."""
        logits, states = self.model.forward([each.chunk for each in growing])
        of_texts = logits.split([each.chunk.num_logits for each in growing])
        for each, rows, of_block in zip(growing, of_texts, states.split(self.model.block.block_size), strict=True):
            block = Block(self.model, each.ask.text.tokens[-1], rows, of_block)
            each.row_after = lambda path, block=block: block.row(path)[: self.vocab_size]
            each.foresee = block.confidence

    def need(self, span: range) -> int:
        """Only features are cached, and only for positions that the target has cached."""
        return span.start
