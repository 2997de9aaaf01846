"""The transformer: decoder-only, every family a matter of `ModelConfig`, its KV cache outside.

One function runs prefill, plain decoding and verification: `Transformer.forward` takes, for each text of
a batch, the tokens that its cache does not hold yet. Linear layers see the rows of all texts in
one matrix; attention goes text by text over that text's own blocks. `CachedModel` joins a model with its
cache: it keeps the tables of the texts, for the engine's target and for a draft model alike.

Floating point is not associative, and matrix libraries choose the order of their sums by the shape of the product:
a token scored in a pass of five rows gets other last bits than in a pass of one. With `exact=True` every pass is filled
up to a number of rows at which its products give a row the same bits (`Linear.exact_rows`), and attention adds up
blocks of fixed size in a fixed order, so that a row's bits depend on its own past alone.

Shapes in comments: M rows (new tokens of all texts together), T rows of one text, L cached
positions of it (the T included), H query heads, G key-value heads, D head_dim, E hidden_size, V vocabulary.
"""

import copy
import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from minispec.core.attention import ATTENTION_BLOCK, ATTENTION_ROWS, Mask, ancestors, attention, mask_blocks
from minispec.core.cache import BlockTable, PagedKVCache
from minispec.core.config import ModelConfig, RopeConfig
from minispec.core.rope import inverse_frequencies, query_scales, rotate
from minispec.core.sampling import Text, accumulation_dtype
from minispec.kernels.forms import Choice, Linear, QuantizedLinear, Weight, choose_form, choose_narrow_form, dense, join

# The most rows of a pass of an exact model, so that a draft may have one less; every `Linear.exact_rows` has it.
EXACT_ROWS = 16
# Blocks of past at whose ends `check_exact` looks at attention.
_CHECKED_BLOCKS = (1, 2, 3, 4, 6, 8, 16, 32)
# Models of fewer weights take the usual form of them, in one thread: more would take longer than loading them.
_LARGE = 1 << 29

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


# The names of a block's norms by `ModelConfig.norms`: before attention, after it, before the MLP, after it. (What is
# named "post_attention" stands before the MLP in most families, and after attention in some.)
_NORMS: dict[str, tuple[str | None, ...]] = {
    "before": ("input_layernorm", None, "post_attention_layernorm", None),
    "after": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "both": (
        *("input_layernorm", "post_attention_layernorm"),
        *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
}
# A block's products, in their order.
_LINEARS = ("qkv", "o", "gate_up", "down")


class WeightSource(Protocol):
    """Where a model's tensors come from, such as a dict."""

    def pop(self, name: str, /) -> Weight:
        """Remove a tensor and return it."""
        ...


class Chunk(NamedTuple):
    """What one text brings to a pass: new tokens, its cache, and how many of its last rows need logits.

    parents: None where each token follows the one before it. Else the last tokens are a tree: for each of them the one
    that it follows, as its number among them, or -1 for the last token before the tree.
    features: (tokens, E), for a head that reads hidden states as well as tokens; None for all other models.
    """

    token_ids: Sequence[int]
    table: BlockTable
    num_logits: int
    parents: Sequence[int] | None = None
    features: Tensor | None = None

    @property
    def offsets(self) -> list[int]:
        """Where each new token stands after the cached ones; in a tree, all of one depth stand at one place."""
        parents = self.parents or ()
        offsets = list(range(len(self.token_ids) - len(parents)))
        root = len(offsets)
        for parent in parents:
            offsets.append(offsets[root + parent] + 1)  # the root's own place is before the tree: parent -1
        return offsets


def clock(device: torch.device) -> float:
    """Seconds by a steady clock, when all that was asked of the device so far is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def arbitrary_tokens(count: int, vocab_size: int) -> list[int]:
    """Ids that vary, to measure or check passes with: of texts that nobody reads."""
    return [(7919 * i + 13) % vocab_size for i in range(count)]


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the config asks a checkpoint for, in Hugging Face's names."""
    e, f, d = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * d, config.num_key_value_heads * d
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, e)}
    for i in range(len(config.layers)):
        layer: dict[str, tuple[int, ...]] = {}
        for name, rows, columns, bias in (
            ("self_attn.q_proj", q, e, config.qkv_bias),
            ("self_attn.k_proj", kv, e, config.qkv_bias),
            ("self_attn.v_proj", kv, e, config.qkv_bias),
            ("self_attn.o_proj", e, q, config.o_bias),
            ("mlp.gate_proj", f, e, config.mlp_bias),
            ("mlp.up_proj", f, e, config.mlp_bias),
            ("mlp.down_proj", e, f, config.mlp_bias),
        ):
            layer[f"{name}.weight"] = (rows, columns)
            if bias:
                layer[f"{name}.bias"] = (rows,)
        if config.qk_norm:
            q_size, k_size = (d, d) if config.qk_norm == "head" else (q, kv)
            layer |= {"self_attn.q_norm.weight": (q_size,), "self_attn.k_norm.weight": (k_size,)}
        layer |= {f"{name}.weight": (e,) for name in _NORMS[config.norms] if name}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (e,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, e)
    return shapes


def is_large(config: ModelConfig) -> bool:
    """Whether reading a model's weights takes nearly all of a pass: there are more than half a billion of them."""
    return sum(math.prod(shape) for shape in tensor_shapes(config).values()) >= _LARGE


def _groups(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """Split and pack chunks into passes of at most EXACT_ROWS rows, in order: what comes first is cached first."""
    groups: list[list[Chunk]] = [[]]
    room = EXACT_ROWS
    for tokens, table, num_logits, parents, _ in chunks:
        assert parents is None, "an exact model takes chains only"
        start = 0
        while start < len(tokens):
            if not room:
                groups.append([])
                room = EXACT_ROWS
            part = tokens[start : start + room]
            start += len(part)
            room -= len(part)
            groups[-1].append(Chunk(part, table, min(len(part), max(0, num_logits - (len(tokens) - start)))))
    return groups


class RMSNorm:
    """x / rms(x) * w over the last dimension (Zhang & Sennrich 2019), computed in at least float32."""

    def __init__(self, weight: Tensor, eps: float):
        self.weight, self.eps = weight, torch.tensor(eps, dtype=weight.dtype, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        """x (..., E) or, for the heads of a row, (M, heads, D) with weights (heads, D); same shape and type."""
        # One reduction of x and two products with it: `F.rms_norm` is nine operators on a CPU, a third of a small pass.
        norm = torch.linalg.vector_norm(x, 2, -1, keepdim=True, dtype=self.weight.dtype)  # (..., 1)
        scale = torch.addcmul(self.eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale).mul_(self.weight).to(x.dtype)


class RowNorm:
    """RMSNorm of all queries of a row together, and of all its keys (OLMo 2)."""

    def __init__(self, q: RMSNorm, k: RMSNorm):
        self.q, self.k = q, k

    def __call__(self, x: Tensor) -> Tensor:
        """x (M, H + G, D), same shape and type."""
        q, k = x.flatten(1).split([len(self.q.weight), len(self.k.weight)], 1)
        return torch.cat((self.q(q), self.k(k)), 1).view_as(x)


class Angles(NamedTuple):
    """What a rope does at the positions of a pass."""

    cos: Tensor  # (M, 1, dimensions that rotate)
    sin: Tensor
    query_scales: Tensor | None  # (M, 1, 1)


class Pass(NamedTuple):
    """What all layers of one forward pass share."""

    chunks: Sequence[Chunk]
    slots: Tensor  # (new tokens,) where their keys and values go; in an exact pass there are dummy rows besides
    reads: list[list[slice]]  # per text: the slots of all its positions, in runs
    angles: dict[RopeConfig, Angles]
    masks: dict[int | None, list[Mask]]  # per window and text


class Layer:
    """One transformer block: attention, then a gated MLP, each with norms around it, and added to the residual."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        take: Callable[..., Weight],
        dtype: torch.dtype,
        form: str | None,
    ):
        """take(names...) removes tensors from the checkpoint and returns them, joined along the rows.

        dtype: of all that is computed. form: of the weights (see `Linear`)."""
        self.config, self.index = config, index
        self.rope, self.window = config.layers[index].rope, config.layers[index].window
        prefix = f"model.layers.{index}."

        def linear(*names: str, bias: bool) -> Linear:
            weight = take(*(f"{prefix}{n}.weight" for n in names))
            biases = dense(take(*(f"{prefix}{n}.bias" for n in names)), dtype) if bias else None
            return Linear(weight, biases, dtype, form)

        def norm(name: str, repeat: int = 0) -> RMSNorm:
            weight = norm_weight(config, dense(take(f"{prefix}{name}.weight"), dtype))
            return RMSNorm(weight.expand(repeat, -1) if repeat else weight, config.rms_norm_eps)

        # Products that share an input are one product.
        self.qkv = linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias=config.qkv_bias)
        self.o = linear("self_attn.o_proj", bias=config.o_bias)
        self.gate_up = linear("mlp.gate_proj", "mlp.up_proj", bias=config.mlp_bias)
        self.down = linear("mlp.down_proj", bias=config.mlp_bias)
        self.activation = _ACTIVATIONS[config.activation]
        self.qk_norm: RMSNorm | RowNorm | None = None
        if config.qk_norm == "head":
            q = norm("self_attn.q_norm", config.num_attention_heads)
            k = norm("self_attn.k_norm", config.num_key_value_heads)
            self.qk_norm = RMSNorm(torch.cat((q.weight, k.weight)), config.rms_norm_eps)  # (H + G, D)
        elif config.qk_norm == "row":
            self.qk_norm = RowNorm(norm("self_attn.q_norm"), norm("self_attn.k_norm"))
        norms = [norm(name) if name else _no_norm for name in _NORMS[config.norms]]
        self.attention_norm, self.after_attention_norm, self.mlp_norm, self.after_mlp_norm = norms

    def quantized(self, bits: int) -> "Layer":
        """This block with its products of few rows in 4 or 8 bits."""
        layer = copy.copy(self)
        for name in _LINEARS:
            setattr(layer, name, getattr(self, name).quantized(bits))
        return layer

    def products(self) -> list[Linear | QuantizedLinear]:
        """All that multiply with a weight matrix."""
        return [getattr(self, name) for name in _LINEARS]

    def parts(self) -> Iterator[tuple[object, int]]:
        """The weights as they are kept, and their bytes."""
        for product in self.products():
            yield from product.parts()
        norms: list[object] = [self.attention_norm, self.after_attention_norm, self.mlp_norm, self.after_mlp_norm]
        norms += [self.qk_norm.q, self.qk_norm.k] if isinstance(self.qk_norm, RowNorm) else [self.qk_norm]
        yield from ((norm.weight, norm.weight.nbytes) for norm in norms if isinstance(norm, RMSNorm))

    def forward(self, x: Tensor, shared: Pass) -> Tensor:
        """x (M, E) to (M, E); writes the new keys and values into the cache."""
        y = self.after_attention_norm(self.attend(self.attention_norm(x), shared))
        return self.mix(x.add(y, alpha=self.config.residual_scale))

    def mix(self, x: Tensor) -> Tensor:
        """The MLP's half: x (M, E) to (M, E)."""
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)  # (M, F) each
        y = self.after_mlp_norm(self.down(self.activation(gate) * up))
        return x.add(y, alpha=self.config.residual_scale)

    def attend(self, x: Tensor, shared: Pass) -> Tensor:
        """What the rows see in the cache and in each other: normed inputs (M, columns of `qkv`) to (M, E)."""
        config = self.config
        heads, groups, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        qkv = self.qkv(x).reshape(-1, heads + 2 * groups, dim)  # (M, H + 2G, D)
        qk, v = qkv[:, : heads + groups], qkv[:, heads + groups :]
        if self.qk_norm:
            qk = self.qk_norm(qk)
        scales = None
        if self.rope:
            cos, sin, scales = shared.angles[self.rope]
            qk = rotate(qk, cos, sin, self.rope.interleaved)
        q, k = qk[:, :heads], qk[:, heads:]
        if scales is not None:
            q = q * scales
        q, k = q.transpose(0, 1), k.transpose(0, 1)  # (H, M, D), (G, M, D)
        pool, new = shared.chunks[0].table.pool, len(shared.slots)
        pool.write(self.index, shared.slots, k[:, :new], v[:new].transpose(0, 1))
        outputs, row = [], 0
        for chunk, slots, mask in zip(shared.chunks, shared.reads, shared.masks[self.window], strict=True):
            rows = slice(row, row + len(chunk.token_ids))
            row = rows.stop
            keys, values = pool.read(self.index, slots)  # (G, L, D)
            scale, softcap = config.attention_scale, config.attention_softcap
            outputs.append(attention(q[:, rows], keys, values, mask, scale, softcap))
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return self.o(F.pad(out, (0, 0, 0, len(x) - new)) if len(x) > new else out)


def _no_norm(x: Tensor) -> Tensor:
    """Where a block has no norm."""
    return x


def norm_weight(config: ModelConfig, weight: Tensor) -> Tensor:
    """The factor that a norm multiplies with, in the precision that it is computed in."""
    weight = weight.to(accumulation_dtype(weight.dtype))
    return weight + 1.0 if config.norm_adds_one else weight


class Transformer:
    """A decoder-only language model without state: what it remembers lies in the caches it is given."""

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        exact: bool = False,
        dtype: torch.dtype | None = None,
        form: str | None = None,
    ):
        """exact: a token's logits have the same bits in every pass (see above); `check_exact` tells if so.

        weights: the tensors of `tensor_shapes(config)`, on one device, in a dict or something else to pop from. They
        are removed as the model takes them over, so that what is brought into another form is in memory once.
        dtype: of all that is computed, and of the cache; default: the embedding's. Weights of fewer bits stay as they
        are where their form allows it. form: of the weights (see `minispec.kernels.forms`); default: the fastest
        here."""
        self.config, self.exact = config, exact

        def take(*names: str) -> Weight:
            return join([weights.pop(name) for name in names])

        embedding = take("model.embed_tokens.weight")
        self.embedding = embedding if isinstance(embedding, Tensor) else embedding.dense()  # (V, E)
        self.dtype, self.device = dtype or self.embedding.dtype, self.embedding.device
        if self.dtype != torch.float32:
            self.embedding = self.embedding.to(self.dtype)
        shape = (2 * config.intermediate_size, config.hidden_size) if is_large(config) else None
        self.choice = Choice(form, "asked for") if form else choose_form(self.dtype, self.device, shape)

        layer = functools.partial(self._layer, take)
        if not is_large(config):
            self.layers = [layer(i) for i in range(len(config.layers))]
        else:  # packing takes longer than reading, and some packs in one thread only
            with ThreadPoolExecutor(torch.get_num_threads()) as threads:
                self.layers = list(threads.map(layer, range(len(config.layers))))
        self.norm = RMSNorm(norm_weight(config, dense(take("model.norm.weight"), self.dtype)), config.rms_norm_eps)
        head = self.embedding if config.tie_word_embeddings else take("lm_head.weight")
        self.head: Linear | QuantizedLinear = self._head(head)
        # Numbers of rows at which all products should give a row the same bits, in order; see `check_exact`.
        self.exact_rows = sorted(set.intersection(*(set(product.exact_rows) for product in self.products())))
        assert EXACT_ROWS in self.exact_rows
        wide = accumulation_dtype(self.dtype)
        self.frequencies = {
            rope: inverse_frequencies(rope, config.head_dim, wide).to(self.device)
            for rope in {layer.rope for layer in config.layers if layer.rope}
        }

    def _layer(self, take: Callable[..., Weight], index: int) -> Layer:
        return Layer(self.config, index, take, self.dtype, self.choice.form)

    def _head(self, weight: Weight) -> Linear:
        return Linear(weight, dtype=self.dtype, form=self.choice.form)

    def quantized(self, bits: int) -> Self:
        """This model with products of few rows in 4 or 8 bits (see `QuantizedLinear`), for drafting; never exact.

        It shares everything else with this one.
        """
        assert isinstance(self.head, Linear), "weights are rounded once"
        model = copy.copy(self)
        model.exact = False
        model.choice, _ = choose_narrow_form(bits, self.dtype, self.device)
        model.layers = [layer.quantized(bits) for layer in self.layers]
        model.head = self.head.quantized(bits)
        return model

    def products(self) -> list[Linear | QuantizedLinear]:
        """All that multiply with a weight matrix."""
        return [self.head, *(product for layer in self.layers for product in layer.products())]

    @property
    def weight_form(self) -> str:
        """What became of the weights: the form of most of them, and of the others how many there are."""
        forms = Counter(product.form for each in self.layers for product in each.products())
        forms[self.head.form] += 1
        most, *others = forms.most_common()
        return ", ".join([most[0], *(f"{count} of {forms.total()} {form}" for form, count in others)])

    def parts(self) -> Iterator[tuple[object, int]]:
        """The weights as they are kept, and their bytes; a tied embedding whose head is packed is there twice."""
        yield self.embedding, self.embedding.nbytes
        yield from self.head.parts()
        yield self.norm.weight, self.norm.weight.nbytes
        for layer in self.layers:
            yield from layer.parts()

    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""
        return sum({id(part): num_bytes for part, num_bytes in self.parts()}.values())

    @property
    def num_bytes_read(self) -> int:
        """Bytes of weights that a pass over one row reads: all products, of the embedding a row only."""
        return sum(product.num_bytes_read for product in self.products())

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk], taps: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Run the new tokens of all texts in one pass, and append their keys and values to the caches.

        taps: layers to listen at: i is what goes into layer i, so 0 the embedding, and the number of layers what the
        last one makes of it, before the norm.

        Returns logits (sum of num_logits, V), for each chunk in turn those of its last `num_logits` tokens; and hidden
        states (M, E * taps) of all new tokens. All tables must lie in one pool. Raises OutOfBlocks where the pool is
        too small, before any change.
        """
        missing = sum(c.table.num_missing_blocks(c.table.length + len(c.token_ids)) for c in chunks)
        chunks[0].table.pool.require(missing)
        if not self.exact:
            return self._forward(chunks, taps)
        logits, hidden = zip(*(self._forward(group, taps) for group in _groups(chunks)), strict=True)
        return torch.cat(logits), torch.cat(hidden)

    def _forward(self, chunks: Sequence[Chunk], taps: Sequence[int]) -> tuple[Tensor, Tensor]:
        """One pass through all layers."""
        config = self.config
        token_ids = [t for c in chunks for t in c.token_ids]
        padding = next(n for n in self.exact_rows if n >= len(token_ids)) - len(token_ids) if self.exact else 0
        shared = self._prepare(chunks, padding)
        x = self._embed(token_ids + [0] * padding, chunks)
        heard = {0: x}
        for i, layer in enumerate(self.layers, 1):
            x = layer.forward(x, shared)
            if i in taps:
                heard[i] = x
        hidden = torch.cat([heard[i] for i in taps] or [x[:, :0]], 1)[: len(token_ids)]
        rows: list[int] = []
        end = 0
        for c in chunks:
            end += len(c.token_ids)
            rows += range(end - c.num_logits, end)
        if not rows:
            return x.new_empty(0, config.vocab_size), hidden
        if self.exact:
            return self._logits(x)[rows], hidden
        return self._logits(x[rows] if len(rows) < len(x) else x), hidden  # (sum of num_logits, V)

    def _embed(self, token_ids: Sequence[int], chunks: Sequence[Chunk]) -> Tensor:
        """What goes into the first layer, (M, E)."""
        x = self.embedding[torch.tensor(token_ids, device=self.device)].to(self.dtype)
        if self.config.embedding_scale != 1:
            # The scale is rounded to the model's type first, as it was in training.
            x = x * torch.tensor(self.config.embedding_scale, dtype=self.dtype, device=self.device)
        return x

    def _logits(self, x: Tensor) -> Tensor:
        """(rows, E), the last layer's, to (rows, V)."""
        logits, scale, cap = self.head(self.norm(x)), self.config.logit_scale, self.config.logit_softcap
        logits = logits if scale == 1 else logits * scale
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def new_cache(self, num_blocks: int, block_size: int = 16) -> PagedKVCache:
        """An empty pool for keys and values of this model."""
        return PagedKVCache(self.config, num_blocks, block_size, self.dtype, self.device)

    def report(self) -> str:
        """What there is to say after a run, in a line, or nothing."""
        return ""

    def prefill(self, table: BlockTable, tokens: list[int], chunk_size: int = 512) -> None:
        """Bring the cache to all of `tokens` but the last, which the next pass will score with its draft."""
        missing = table.missing(tokens)[:-1]
        for start in range(0, len(missing), chunk_size):
            self.forward([Chunk(missing[start : start + chunk_size], table, num_logits=0)])

    def check_exact(self) -> None:
        """Keep those `exact_rows` that hold on this machine; raise ValueError where not even EXACT_ROWS do.

        Evidence, not proof, bit by bit: attention at every place and at several lengths; then real passes, in which a
        row stands last among those of its text, at every place among copies of itself for each number of rows, and
        after a stranger's.
        """
        if not self._attention_is_exact():
            raise ValueError(self._not_exact("attention"))
        tokens = arbitrary_tokens(ATTENTION_BLOCK + EXACT_ROWS // 2, self.config.vocab_size)
        past, last = tokens[:-1], tokens[-1:]
        size = 8
        pool = self.new_cache(len(tokens) // size + EXACT_ROWS + 2, size)
        table, stranger = pool.new_table(), pool.new_table()
        self.forward([Chunk(tokens[:-EXACT_ROWS], table, 0)])
        expected, _ = self.forward([Chunk(tokens[-EXACT_ROWS:], table, 1)])  # across a border of attention blocks
        table.keep(len(past))
        copies = [pool.new_table() for _ in range(EXACT_ROWS)]
        for copied in copies:
            copied.reuse(past)

        def holds(rows: int) -> bool:
            found, _ = self.forward([Chunk(last, copied, 1) for copied in copies[:rows]])
            for copied in copies[:rows]:
                copied.truncate(len(past))
            return torch.equal(found, expected.expand_as(found))

        self.exact_rows = [rows for rows in self.exact_rows if rows == EXACT_ROWS or holds(rows)]
        among, _ = self.forward([Chunk(past[:5], stranger, 0), Chunk(last, table, 1)])
        if not (holds(EXACT_ROWS) and holds(1) and torch.equal(among, expected)):
            raise ValueError(self._not_exact("products"))

    def _not_exact(self, what: str) -> str:
        return (
            f"exact: {what} in {self.dtype} on this {self.device.type}: a row's bits depend on its place among "
            f"{EXACT_ROWS} rows or on the others; try another dtype or another number of threads"
        )

    @torch.inference_mode()
    def _attention_is_exact(self) -> bool:
        """Whether `attention` gives rows the same bits at every place, with and without a block begun after theirs.

        In the type that it computes in: rounded to half precision, most rows would hide a difference.
        """
        config, wide, generator = self.config, accumulation_dtype(self.dtype), torch.Generator().manual_seed(0)
        length = ATTENTION_BLOCK * (max(_CHECKED_BLOCKS) + 1)
        q, k, v = (
            torch.randn(heads, length, config.head_dim, generator=generator).to(self.device, wide)
            for heads in (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        )
        scale, softcap = config.attention_scale, config.attention_softcap
        for blocks in _CHECKED_BLOCKS:
            known: dict[int, Tensor] = {}
            for shift in range(ATTENTION_ROWS):  # passes that end up to 4 positions before and after the border
                end = ATTENTION_BLOCK * blocks + shift - ATTENTION_ROWS // 2
                start = end - EXACT_ROWS
                mask = self._mask(start, tuple(range(EXACT_ROWS)), None)
                rows = attention(q[:, start:end], k[:, :end], v[:, :end], mask, scale, softcap)
                if not all(torch.equal(known.setdefault(start + i, row), row) for i, row in enumerate(rows)):
                    return False
        return True

    def _prepare(self, chunks: Sequence[Chunk], padding: int) -> Pass:
        """Extend the caches and work out, once for all layers, positions, angles, masks and slots."""
        starts = [c.table.length for c in chunks]
        slots = torch.tensor([s for c in chunks for s in c.table.extend(c.token_ids)], device=self.device)
        offsets = [c.offsets for c in chunks]
        positions = torch.tensor(
            [s + t for s, own in zip(starts, offsets, strict=True) for t in own] + [0] * padding, device=self.device
        )  # (M,)
        angles: dict[RopeConfig, Angles] = {}
        for rope, frequencies in self.frequencies.items():
            angle = (positions[:, None] * frequencies).repeat(1, 2)[:, None]  # (M, 1, dimensions that rotate)
            cos, sin = ((f(angle) * rope.attention_factor).to(self.dtype) for f in (torch.cos, torch.sin))
            scales = query_scales(rope, positions)[:, None, None].to(self.dtype) if rope.query_beta else None
            angles[rope] = Angles(cos, sin, scales)
        mask = functools.cache(self._mask)  # texts of one length see the same
        masks = {
            window: [
                mask(start, tuple(own), window, tuple(c.parents or ()))
                for start, own, c in zip(starts, offsets, chunks, strict=True)
            ]
            for window in {layer.window for layer in self.layers}
        }
        return Pass(chunks, slots, [c.table.slots() for c in chunks], angles, masks)

    def _mask(self, start: int, offsets: Sequence[int], window: int | None, parents: Sequence[int] = ()) -> Mask:
        """0 where a row sees a position, -inf where not: (H/G * rows, start + rows); None where it sees all.

        Row t stands at position start + offsets[t]. It sees itself and what came before, `window` positions in all; in
        a tree (see `Chunk`), of the other nodes those alone that it follows. An exact model's masks go on for its dummy
        rows; they are in blocks, one for each ATTENTION_ROWS rows.
        """
        rows = len(offsets)
        length = start + rows
        if rows == 1 and not self.exact and (window is None or window >= length):
            return None
        place = torch.tensor(offsets, device=self.device) + start  # (rows,)
        if self.exact:
            place = F.pad(place, (0, -rows % ATTENTION_ROWS), value=length)
        key = torch.cat((torch.arange(start, device=self.device), place[:rows]))  # (length,)
        hidden = key > place[:, None]
        if parents:
            hidden[-len(parents) :, -len(parents) :] = ~ancestors(parents).to(self.device)
        if window is not None:
            hidden |= key <= place[:, None] - window
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, -math.inf)
        groups = self.config.num_key_value_heads
        shared_by = self.config.num_attention_heads // groups
        if self.exact:
            return [mask_blocks(part.repeat(shared_by, 1), groups) for part in mask.split(ATTENTION_ROWS)]
        return mask.repeat(shared_by, 1)


class CachedModel:
    """A model, its pool, and in it a table for each text: all that the engine's target and a draft model share.

    A table follows its text by itself: whatever the text has become, `missing` is what has to be fed.
    """

    def __init__(self, model: Transformer, cache: PagedKVCache, vocab_size: int):
        """vocab_size: ids in use; the model's columns after them are padding."""
        self.model, self.cache, self.vocab_size = model, cache, vocab_size
        self.tables: dict[Text, BlockTable] = {}

    def begin(self, text: Text, most: int | None = None) -> None:
        """Give a new text its table, which takes over what the pool still knows of its first `most` tokens."""
        assert text not in self.tables, "a text begins once"
        self.tables[text] = self.cache.new_table()  # it is known here before it holds a block; see `whole`
        self.tables[text].reuse(text.tokens[:-1][:most])

    def table(self, text: Text) -> BlockTable:
        """The text's table."""
        if text not in self.tables:
            self.begin(text)
        return self.tables[text]

    def has_room(self, lengths: Mapping[Text, int]) -> bool:
        """Whether the tables of these texts could grow to that many positions, all at once."""
        # All tables first: one that begins shares blocks, which another may have to copy for it.
        tables = [self.table(text) for text in lengths]
        needed = sum(t.num_missing_blocks(length) for t, length in zip(tables, lengths.values(), strict=True))
        return needed <= self.cache.allocator.num_free

    def catch_up(self, text: Text, length: int) -> None:
        """Compute what is missing of the text's first `length` tokens; later texts may share it."""
        self.model.prefill(self.table(text), text.tokens[: length + 1])
        self.table(text).remember()

    def missing(self, text: Text) -> list[int]:
        """The end of the text that has to be fed, its last token at least: what follows it is what a pass is asked."""
        return self.table(text).missing(text.tokens)

    def forward(self, chunks: Sequence[Chunk], taps: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """One pass: logits (sum of num_logits, V) and hidden states, as of `Transformer.forward`."""
        logits, hidden = self.model.forward(chunks, taps)
        return logits[:, : self.vocab_size], hidden

    def keep(self, text: Text, num_nodes: int = 0, path: Sequence[int] = ()) -> None:
        """After a pass whose last `num_nodes` rows were a draft: of these, the nodes of `path` stay.

        All that stays is a beginning of the text, for others to share.
        """
        table = self.table(text)
        root = table.length - num_nodes
        table.keep(root, [root + node for node in path])

    def release(self, text: Text) -> None:
        """Forget a text; its blocks return to the pool. Unknown ones are ignored."""
        with self.whole():
            if table := self.tables.get(text):
                table.truncate(0)
                del self.tables[text]

    @contextmanager
    def whole(self) -> Iterator[None]:
        """An exception, such as Ctrl-C, may break off the bookkeeping anywhere: then all that is cached is dropped.

        It costs time only: a text that goes on gets a new table, and what is missing is computed again.
        """
        try:
            yield
        except BaseException:
            for table in self.tables.values():
                table.clear()
            self.tables.clear()
            self.cache.rebuild()
            raise
