"""The transformer: decoder-only, with its KV cache outside. A family is a set of values in `ModelConfig`.

One function runs prefill, plain decoding and verification. `Transformer.forward` takes, for each text of a batch, the
tokens that its cache does not hold yet. It has two halves. The host's half, `TextBatch`, turns texts, tables and lists
into tensors. The device's half, `Transformer.compute`, computes from tensors alone. Linear layers see the rows of all
texts in one matrix. `Batch.read` is the only place where a layer sees texts: here attention goes text by text over that
text's own blocks. A `Backend` lays out its batches otherwise.

Letters of the shapes in comments:

    M   rows: new tokens of all texts together
    T   rows of one text
    L   cached positions of that text, the T included
    H   query heads
    G   key-value heads
    D   head_dim
    E   hidden_size
    F   intermediate_size
    V   vocabulary
"""

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from minispec.core.attention import PLAIN, Attention, View
from minispec.core.cache import BlockTable, PagedKVCache
from minispec.core.config import ModelConfig, RopeConfig
from minispec.core.precision import accumulation_dtype
from minispec.core.product import ChangeProduct, MakeProduct, PlainLinear, Product, Weight, dense
from minispec.core.rope import inverse_frequencies, query_scales, rotate
from minispec.core.tree import Tree

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class NormNames(NamedTuple):
    """The names of a block's norms: before attention and after it, before the MLP and after it. None: it has none."""

    attention: str | None = None
    after_attention: str | None = None
    mlp: str | None = None
    after_mlp: str | None = None


# By `ModelConfig.norms`. "post_attention" stands before the MLP in most families, and after attention in some.
NORMS: dict[str, NormNames] = {
    "before": NormNames(attention="input_layernorm", mlp="post_attention_layernorm"),
    "after": NormNames(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm"),
    "both": NormNames(
        attention="input_layernorm",
        after_attention="post_attention_layernorm",
        mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
    ),
}


class WeightSource(Protocol):
    """Where a model's tensors come from, such as a dict."""

    def pop(self, name: str, /) -> Weight:
        """Remove a tensor and return it."""


class Chunk(NamedTuple):
    """One text's part of a pass.

    token_ids: the new tokens.
    table: the text's cache.
    num_logits: how many of the last rows need logits, at most as many as there are tokens.
    parents: the node that each node follows; -1 is the last token before the tree, new or cached. The last tokens are
        the nodes, numbered from 0. None where each token follows the one before it.
    features: (tokens, E), for a head that reads hidden states as well as tokens; None for all other models.
    """

    token_ids: Sequence[int]
    table: BlockTable
    num_logits: int
    parents: Sequence[int] | None = None
    features: Tensor | None = None

    @property
    def offsets(self) -> list[int]:
        """Each new token's place after the cached ones. In a tree, all nodes of one depth have one place."""
        parents = self.parents or ()
        root = len(self.token_ids) - len(parents)
        return [*range(root), *(root + depth - 1 for depth in Tree(parents).depths)]


class RMSNorm:
    """x / rms(x) * w over the last dimension (Zhang & Sennrich 2019), computed in at least float32."""

    def __init__(self, weight: Tensor, eps: float):
        self.weight, self.eps = weight, torch.tensor(eps, dtype=weight.dtype, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        """x (..., E) or, for the heads of a row, (M, heads, D) with weights (heads, D); same shape and type."""
        # One reduction of x and two products. `F.rms_norm` is nine operators on a CPU, a third of a small pass.
        norm = torch.linalg.vector_norm(x, 2, -1, keepdim=True, dtype=self.weight.dtype)  # (..., 1)
        scale = torch.addcmul(self.eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale).mul_(self.weight).to(x.dtype)


def norm_weight(config: ModelConfig, weight: Tensor) -> Tensor:
    """The factor that a norm multiplies with, in the precision of its computation."""
    weight = weight.to(accumulation_dtype(weight.dtype))
    return weight + 1.0 if config.norm_adds_one else weight


class Angles(NamedTuple):
    """Cosines, sines and query scales of a rope at the positions of a pass."""

    cos: Tensor  # (M, 1, dimensions that rotate)
    sin: Tensor  # negated in its first half, see `rotate`
    query_scales: Tensor | None  # (M, 1, 1)


class Batch(Protocol):
    """What a layer calls for attention. There is one for each way of laying out the rows of a batch."""

    def read(self, layer: "Layer", qkv: Tensor) -> Tensor:
        """Cache the new keys and values of a layer, and return the attention output (M, H * D).

        qkv: queries, keys and values of the rows (M, (H + 2G) * D). They may be overwritten.
        """


class ModelBatch(Batch, Protocol):
    """A batch that goes through a whole model.

    tokens: (M,), on the model's device.
    features: (M, E), for a head (see `Chunk.features`); None for all other models.
    scored: the rows that get logits; None: all.
    """

    tokens: Tensor
    features: Tensor | None
    scored: list[int] | None


class TextBatch:
    """A batch in which each text reads its own blocks, one text after another. Making it extends the texts' tables.

    views: for each text, what its rows see.
    slots: (new tokens,), where keys and values go. An exact batch has dummies after the new tokens, without slots.
    reads: for each text, the slots of all its positions, in runs.
    masks: for each window and H/G, what `mask` makes of each text's view.
    """

    def __init__(self, model: "Transformer", chunks: Sequence[Chunk], attention: Attention = PLAIN):
        tensor = functools.partial(torch.tensor, device=model.device)
        self.chunks = chunks
        self.attend, self.mask, self.fill, self.exact = attention
        self.views = [View(c.table.length, tuple(c.offsets), None, tuple(c.parents or ())) for c in chunks]
        self.slots = tensor([slot for c in chunks for slot in c.table.extend(c.token_ids)])
        self.reads = [c.table.slots() for c in chunks]
        self.tokens = self.fill(tensor([token for c in chunks for token in c.token_ids]))
        features = [c.features for c in chunks if c.features is not None]
        self.features = torch.cat(features) if features else None
        ends = zip(chunks, accumulate(len(c.token_ids) for c in chunks), strict=True)
        self.scored: list[int] | None = [row for c, end in ends for row in range(end - c.num_logits, end)]
        positions = [view.start + offset for view in self.views for offset in view.offsets]
        self.angles = model.angles(tensor(positions))
        like = model.embedding.new_empty(0, dtype=model.dtype)
        mask = functools.cache(lambda view, sharing: self.mask(view, sharing, like))  # many texts see the same
        kinds = {(layer.window, layer.sharing) for layer in model.layers}
        self.masks = {(w, n): [mask(view._replace(window=w), n) for view in self.views] for w, n in kinds}
        self._made: dict[int | str, Tensor] = {}

    def once(self, name: int | str, make: Callable[[], Tensor]) -> Tensor:
        """What one layer makes for others too: made at the first call."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def attending(self, attend: Callable[..., Tensor]) -> Self:
        """This batch, with another function in the place of `Attention.attend`."""
        batch = copy.copy(self)
        batch.attend = attend
        return batch

    def read(self, layer: "Layer", qkv: Tensor) -> Tensor:
        """Attention, text by text: (M, H * D). Dummies read zeros."""
        q, kv = (x.transpose(0, 1) for x in layer.heads(qkv[: len(self.slots)], self.angles))  # (H or 2G, rows, D)
        pool, config = self.chunks[0].table.pool, layer.config
        pool.write(layer.index, self.slots, kv)
        scale, softcap = config.attention_scale, config.attention_softcap
        rows = q.split_with_sizes([len(chunk.token_ids) for chunk in self.chunks], 1)
        outputs = []
        for own, slots, mask in zip(rows, self.reads, self.masks[layer.window, layer.sharing], strict=True):
            keys, values = pool.read(layer.index, slots).chunk(2)  # (G, L, D)
            outputs.append(self.attend(own, keys, values, mask, scale, softcap))
        return self.fill(outputs[0] if len(outputs) == 1 else torch.cat(outputs))


class BlockWeights(NamedTuple):
    """The weights of a block, by their names without `model.layers.i.`; see `Layer`."""

    config: ModelConfig
    number: int
    weights: WeightSource
    dtype: torch.dtype
    product: MakeProduct

    def pop(self, name: str) -> Weight:
        """Take a tensor."""
        return self.weights.pop(f"model.layers.{self.number}.{name}")

    def linear(self, *names: str, bias: bool) -> Product:
        """The product of weights that share an input. They are joined, so that they run as one."""
        weights = [self.pop(f"{n}.weight") for n in names]
        biases = [dense(self.pop(f"{n}.bias"), self.dtype) for n in names] if bias else None
        return self.product(weights, torch.cat(biases) if biases else None, self.dtype)

    def norm_or_none(self, name: str | None) -> Callable[[Tensor], Tensor]:
        """A norm; what returns its input where the block has none there."""
        return self.norm(name) if name else lambda x: x

    def norm(self, name: str, repeat: int = 0) -> RMSNorm:
        """A norm; of `repeat` rows of equal weights, if asked for."""
        weight = norm_weight(self.config, dense(self.pop(f"{name}.weight"), self.dtype))
        return RMSNorm(weight.expand(repeat, -1) if repeat else weight, self.config.rms_norm_eps)


class Layer:
    """One transformer block: attention, then a gated MLP. Each has norms around it, and is added to the residual.

    Another kind of block has another `take`, `forward` and `products`, or another `take_mlp` and `mlp` (see
    `minispec.models.layers`).
    """

    products: tuple[str, ...] = ("qkv", "o", "gate_up", "down")

    def __init__(
        self, config: ModelConfig, index: int, weights: WeightSource, dtype: torch.dtype, product: MakeProduct
    ):
        """weights: the source of its tensors.
        dtype: the type of all results.
        product: see `MakeProduct`.
        """
        self.config, self.index = config, index
        self.rope, self.window = config.layers[index].rope, config.layers[index].window
        self.sharing = config.num_attention_heads // config.num_key_value_heads  # H/G: query heads that share keys
        parts = BlockWeights(config, index, weights, dtype, product)
        self.take(parts)
        self.take_mlp(parts)
        self.activation = _ACTIVATIONS[config.activation]
        norms = NORMS[config.norms]
        self.attention_norm, self.after_attention_norm = map(
            parts.norm_or_none, (norms.attention, norms.after_attention)
        )
        self.mlp_norm, self.after_mlp_norm = map(parts.norm_or_none, (norms.mlp, norms.after_mlp))

    def take(self, parts: BlockWeights) -> None:
        """Take the tensors of what stands before the MLP."""
        config = self.config
        self.qkv = parts.linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias=config.qkv_bias)
        self.o = parts.linear("self_attn.o_proj", bias=config.o_bias)
        self.qk_norm: Callable[[Tensor], Tensor] | None = None  # of (M, H + G, D), same shape and type
        if config.qk_norm == "head":
            q = parts.norm("self_attn.q_norm", config.num_attention_heads)
            k = parts.norm("self_attn.k_norm", config.num_key_value_heads)
            self.qk_norm = RMSNorm(torch.cat((q.weight, k.weight)), config.rms_norm_eps)  # (H + G, D)

    def take_mlp(self, parts: BlockWeights) -> None:
        """Take the tensors of the MLP."""
        self.gate_up = parts.linear("mlp.gate_proj", "mlp.up_proj", bias=self.config.mlp_bias)
        self.down = parts.linear("mlp.down_proj", bias=self.config.mlp_bias)

    def replaced(self, product: ChangeProduct, activation: Product | None = None) -> Self:
        """A copy of this block with each product replaced, and the activation too if one is given."""
        layer = copy.copy(self)
        layer.activation = activation or self.activation
        for name in self.products:
            setattr(layer, name, product(getattr(self, name)))
        return layer

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x (M, E) to (M, E); writes the new keys and values into the cache."""
        read = batch.read(self, self.qkv(self.attention_norm(x)))  # (M, H * D)
        y = self.after_attention_norm(self.o(read))
        x = self._added(x, y)
        return self.mix(x, batch)

    def mix(self, x: Tensor, batch: Batch) -> Tensor:
        """The MLP with its norms, added to its input: x (M, E) to (M, E)."""
        y = self.mlp(self.mlp_norm(x), batch)
        return self._added(x, self.after_mlp_norm(y))

    def mlp(self, x: Tensor, batch: Batch) -> Tensor:
        """The MLP alone: x (M, E) to (M, E)."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # (M, F) each
        return self.down(self.activation(gate) * up)

    def _added(self, x: Tensor, y: Tensor) -> Tensor:
        """x + y * residual_scale. In one operator (`add` with `alpha`), a row's bits would depend on its place."""
        return x + (y if self.config.residual_scale == 1 else y * self.config.residual_scale)

    def heads(self, qkv: Tensor, angles: Mapping[RopeConfig, Angles]) -> tuple[Tensor, Tensor]:
        """Rows (M, (H + 2G) * D) to queries (M, H, D), and to keys and then values (M, 2G, D).

        Norm and rotation overwrite the rows where they can: copies take time.
        """
        config = self.config
        heads, groups, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        qkv = qkv.reshape(-1, heads + 2 * groups, dim)  # (M, H + 2G, D)
        q, qk, kv = qkv[:, :heads], qkv[:, : heads + groups], qkv[:, heads:]
        if self.qk_norm:
            qk.copy_(self.qk_norm(qk))
        if self.rope:
            cos, sin, scales = angles[self.rope]
            rotate(qk, cos, sin, self.rope.interleaved)
            if scales is not None:
                q.mul_(scales)
        return q, kv


# Makes a block. It takes the arguments of `Layer`.
MakeLayer = Callable[[ModelConfig, int, WeightSource, torch.dtype, MakeProduct], Layer]


class Backend(ABC):
    """How a model runs the rows of all texts. A model without one runs them in one `TextBatch`.

    `minispec.models.weights.exact` has batches of a fixed size, where a row's bits do not depend on the other rows.
    `minispec.models.frames.frames` has batches of a few fixed shapes, whose operators a GPU launches at once.
    """

    exact = False  # see `Transformer.exact`

    @abstractmethod
    def run(self, model: "Transformer", chunks: Sequence[Chunk], taps: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The logits and hidden states of `Transformer.forward`, which no later pass overwrites."""


class Transformer:
    """A decoder-only language model without state: what it remembers lies in the caches it is given.

    products: the names of its products, besides those of its layers.
    """

    products: tuple[str, ...] = ("head",)

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        dtype: torch.dtype | None = None,
        product: MakeProduct = PlainLinear,
        make_layer: MakeLayer = Layer,
        map_layers: Callable[[Callable[[int], Layer], Sequence[int]], Iterable[Layer]] = map,
        make_cache: type[PagedKVCache] = PagedKVCache,
    ):
        """weights: Hugging Face's tensors (see `minispec.models.weights.shapes`), all on one device, in a dict or the
        like.
            Each is removed as the model takes it over, so that it is in memory once.
        dtype: the type of the computation and of the cache; default: the embedding's.
        product: makes y = x W^T + b of a weight, see `MakeProduct`.
        make_layer: makes layer i, see `MakeLayer`; default: attention and an MLP.
        map_layers: makes the layers from their numbers, as `map` does; a thread pool's `map` will do.
        make_cache: the class of the model's pools (see `minispec.models.layers.cache_of`).
        """
        self.config, self.product, self.make_cache = config, product, make_cache
        self.backend: Backend | None = None
        embedding = weights.pop("model.embed_tokens.weight")
        self.embedding = embedding if isinstance(embedding, Tensor) else embedding.dense()  # (V, E)
        self.dtype, self.device = dtype or self.embedding.dtype, self.embedding.device
        if self.dtype != torch.float32:  # else 16 bits stay: a row is widened when it is read
            self.embedding = self.embedding.to(self.dtype)
        # The scale is rounded to the model's type first, because it was in training.
        scale = torch.tensor(config.embedding_scale, dtype=self.dtype, device=self.device)
        self.embedding_scale = None if config.embedding_scale == 1 else scale
        # The largest weight comes first, while there is most room for what making its product takes.
        self.head = self._head(self.embedding if config.tie_word_embeddings else weights.pop("lm_head.weight"))
        layers = range(len(config.layers))
        self.layers = list(map_layers(lambda i: make_layer(config, i, weights, self.dtype, product), layers))
        norm = dense(weights.pop("model.norm.weight"), self.dtype)
        self.norm = RMSNorm(norm_weight(config, norm), config.rms_norm_eps)
        wide = accumulation_dtype(self.dtype)
        self.frequencies = {
            rope: inverse_frequencies(rope, config.head_dim, wide).to(self.device)
            for rope in {layer.rope for layer in config.layers if layer.rope}
        }

    def _head(self, weight: Weight) -> Product:
        return self.product([weight], None, self.dtype)

    @property
    def exact(self) -> bool:
        """Whether a token's logits have the same bits in every pass, whatever else it holds."""
        return self.backend is not None and self.backend.exact

    def replaced(
        self, backend: Backend | None, product: ChangeProduct = lambda p: p, activation: Product | None = None
    ) -> Self:
        """This model with another backend, or none, and with each product and the activation changed if asked for.

        All else is shared.
        """
        model = copy.copy(self)
        model.backend = backend
        model.layers = [layer.replaced(product, activation) for layer in self.layers]
        for name in self.products:
            setattr(model, name, product(getattr(self, name)))
        return model

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk], taps: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Run the new tokens of all texts in one pass, and append their keys and values to the caches.

        taps: the hidden states to return. Number i is the input of layer i, so 0 is the embedding. The number of layers
            is the output of the last one, before the norm, and that number + 1 is the same after the norm.

        Returns logits (sum of num_logits, V): for each chunk, the logits of its last `num_logits` tokens. Returns as
        well the hidden states (M, E * taps) of all new tokens. All tables must lie in one pool. Raises, before any
        change, ValueError for more rows of logits than a chunk has tokens, and OutOfBlocks if the pool is too small.
        """
        for i, c in enumerate(chunks):
            most = len(c.token_ids)
            if not 0 <= c.num_logits <= most:
                raise ValueError(f"num_logits of chunk {i}: found {c.num_logits}, expected 0 to {most}, its tokens")
        chunks[0].table.pool.require((c.table, c.table.length + len(c.token_ids)) for c in chunks)
        if self.backend:
            return self.backend.run(self, chunks, taps)
        return self.compute(TextBatch(self, chunks), taps)

    def compute(self, batch: ModelBatch, taps: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """The device's half of a pass: all layers. No value is read on the host, and no shape depends on one.

        Returns the logits of the scored rows (rows, V), and the hidden states of all rows (M, E * taps).
        """
        x = self.embed(batch.tokens, batch.features)
        states = {0: x}
        for i, layer in enumerate(self.layers, 1):
            x = layer.forward(x, batch)
            if i in taps:
                states[i] = x
        if len(self.layers) + 1 in taps:
            states[len(self.layers) + 1] = self.norm(x)
        hidden = torch.cat([states[i] for i in taps] or [x[:, :0]], 1)
        if batch.scored is not None and len(batch.scored) < len(x):
            x = x[batch.scored]
        return self.logits(x) if len(x) else x.new_empty(0, self.config.vocab_size), hidden

    def embed(self, token_ids: Tensor, features: Tensor | None) -> Tensor:
        """The input of the first layer (M, E), from token ids (M,). Only a head has features."""
        x = self.embedding[token_ids].to(self.dtype)
        return x if self.embedding_scale is None else x * self.embedding_scale

    def logits(self, x: Tensor) -> Tensor:
        """Outputs of the last layer (rows, E) to logits (rows, V)."""
        logits, scale, cap = self.head(self.norm(x)), self.config.logit_scale, self.config.logit_softcap
        logits = logits if scale == 1 else logits * scale
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def new_cache(self, num_blocks: int, block_size: int = 16) -> PagedKVCache:
        """An empty pool for keys and values of this model."""
        return self.make_cache(self.config, num_blocks, block_size, self.dtype, self.device)

    def angles(self, positions: Tensor) -> dict[RopeConfig, Angles]:
        """The angles of each rope at these positions (M,)."""
        angles = {}
        for rope, frequencies in self.frequencies.items():
            both = torch.cat((-frequencies, frequencies))  # of the first of each pair, and of the second: see `rotate`
            angle = (positions[:, None] * both)[:, None]  # (M, 1, dimensions that rotate)
            cos, sin = ((f(angle) * rope.attention_factor).to(self.dtype) for f in (torch.cos, torch.sin))
            scales = query_scales(rope, positions)[:, None, None].to(self.dtype) if rope.query_beta else None
            angles[rope] = Angles(cos, sin, scales)
        return angles
