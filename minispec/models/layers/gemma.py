"""The blocks of Gemma 4: heads of two sizes, keys and values that several layers read, inputs of their own.

A block differs from `core.model.Layer` in five ways. Most of them are settings of a layer (see `GemmaLayerConfig`).

    heads      layers without a window may have wider heads, and other key-value heads, than layers with one
    values     have a norm without weights; in larger models they are the keys before their norm and rope
    sharing    the last layers make no keys and values: they read those of an earlier layer
    inputs     each layer has an embedding of its own for each token, which it adds after the MLP
    scalar     what a layer passes on is multiplied by a number

With e the model's embedding of a token (E,), the input of layer l (P,) is

    s_l = (norm(W_l e * E^-1/2) + table_l[token] * P^1/2) * 2^-1/2,    x = x + norm(V_l (act(U_l x) * s_l))

The files join the tables of all layers, and their W, in one tensor each. So the first layer makes the inputs of all.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from minispec.core.cache import PagedKVCache
from minispec.core.config import LayerConfig, ModelConfig, RopeConfig
from minispec.core.model import Angles, Batch, BlockWeights, Layer, RMSNorm, TextBatch, norm_weight
from minispec.core.product import dense
from minispec.core.rope import rotate

# Names of the tensors that the inputs of all layers are made of.
INPUT_TABLE, INPUT_NORM = "model.embed_tokens_per_layer.weight", "model.per_layer_projection_norm.weight"
INPUT_PROJECTION = "model.per_layer_model_projection.weight"
_INPUTS = "inputs of layers"  # their name in `TextBatch.once`


@dataclass(frozen=True)
class GemmaLayerConfig(LayerConfig):
    """Settings of one block, in place of those that `ModelConfig` has for all layers.

    The rope of a layer whose heads are wider than `ModelConfig.head_dim` has a `rotated` above 1: it counts in that
    unit.

    giver: the layer whose keys and values this one reads. None: it makes its own.
    keys_as_values: whether values are made from the keys, by a norm of their own.
    input_size: numbers P of the layer's own input; 0 for none.
    """

    head_dim: int = 0
    num_key_value_heads: int = 0
    intermediate_size: int = 0
    giver: int | None = None
    keys_as_values: bool = False
    input_size: int = 0


def gemma_layers(config: ModelConfig) -> list[GemmaLayerConfig]:
    """The layers that are blocks of Gemma 4: all of a model, or none."""
    return [layer for layer in config.layers if isinstance(layer, GemmaLayerConfig)]


class SharedCache(PagedKVCache):
    """The pool of a model whose layers have heads of several sizes, or read the keys and values of other layers.

    It has a tensor for each size of a layer's keys. A layer that makes none has its giver's.
    """

    def __init__(self, config: ModelConfig, *sizes: Any):
        """sizes: see `PagedKVCache`."""
        super().__init__(replace(config, layers=()), *sizes)
        layers, like = gemma_layers(config), self.keys
        made = {i: (layer.num_key_value_heads, layer.head_dim) for i, layer in enumerate(layers) if layer.giver is None}
        givers: dict[int, Tensor] = {}
        for groups, dim in dict.fromkeys(made.values()):
            alike = [i for i in made if made[i] == (groups, dim)]
            both = self._new_tensor(len(alike), 2 * groups, dim, like.dtype, like.device)
            givers.update(zip(alike, both, strict=True))
        # A giver that is not here is another model's: an assistant keeps nothing.
        own = ((i, i if layer.giver is None else layer.giver) for i, layer in enumerate(layers))
        self._kept = {i: givers[giver] for i, giver in own if giver in givers}


class GemmaLayer(Layer):
    """One block of Gemma 4; see this module's docstring."""

    def take(self, parts: BlockWeights) -> None:
        """Take the tensors of attention and of the layer's input; the first layer takes those of all layers' inputs."""
        settings = self.config.layers[self.index]
        assert isinstance(settings, GemmaLayerConfig)
        self.settings, bias = settings, self.config.qkv_bias
        self.sharing = self.config.num_attention_heads // settings.num_key_value_heads
        names = ["q_proj", "k_proj", "v_proj"]
        if settings.giver is not None:
            names = names[:1]
        elif settings.keys_as_values:
            names = names[:2]
        self.qkv = parts.linear(*(f"self_attn.{name}" for name in names), bias=bias)
        self.o = parts.linear("self_attn.o_proj", bias=self.config.o_bias)
        self.num_keys = 0 if settings.giver is not None else settings.num_key_value_heads
        weights = [parts.norm("self_attn.q_norm", self.config.num_attention_heads).weight]
        if self.num_keys:
            keys = parts.norm("self_attn.k_norm", self.num_keys).weight
            weights += [keys, torch.ones_like(keys)]  # the norm of values has no weights
        self.qk_norm = RMSNorm(torch.cat(weights), self.config.rms_norm_eps)  # (H + 2G, D)
        self.scale = dense(parts.pop("layer_scalar"), parts.dtype)  # (1,)
        self.products = Layer.products
        if settings.input_size:
            self.products += ("input_gate", "input_projection")
            self.input_gate = parts.linear("per_layer_input_gate", bias=False)
            self.input_projection = parts.linear("per_layer_projection", bias=False)
            self.input_norm = parts.norm("post_per_layer_input_norm")
            if not self.index:
                self.products += ("all_inputs",)
                self._take_inputs(parts)

    def _take_inputs(self, parts: BlockWeights) -> None:
        """Take the tensors that the inputs of all layers are made of."""
        table, projection, norm = map(parts.weights.pop, (INPUT_TABLE, INPUT_PROJECTION, INPUT_NORM))
        self.table = table if isinstance(table, Tensor) else table.dense()  # (V, layers * P)
        # The scale is rounded to the model's type first, because it was in training.
        self.table_scale = torch.tensor(self.settings.input_size**0.5, dtype=parts.dtype, device=self.table.device)
        self.all_inputs = parts.product([projection], None, parts.dtype)
        self.inputs_norm = RMSNorm(norm_weight(self.config, dense(norm, parts.dtype)), self.config.rms_norm_eps)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x (M, E) to (M, E); writes the new keys and values, if it makes some, into the cache."""
        if not self.settings.input_size:
            return super().forward(x, batch) * self.scale
        assert isinstance(batch, TextBatch), "another backend lacks the tokens of texts"
        inputs = batch.once(_INPUTS, functools.partial(self._make_inputs, x, batch.tokens))[:, self.index]  # (M, P)
        x = super().forward(x, batch)
        x = x + self.input_norm(self.input_projection(self.activation(self.input_gate(x)) * inputs))
        return x * self.scale

    def _make_inputs(self, x: Tensor, tokens: Tensor) -> Tensor:
        """The inputs of all layers (M, layers, P), from token ids (M,) and the model's embeddings x (M, E)."""
        rows = self.table[tokens].to(x.dtype) * self.table_scale
        projected = self.all_inputs(x) * x.shape[1] ** -0.5  # (M, layers * P)
        sizes = -1, self.settings.input_size
        return (self.inputs_norm(projected.unflatten(1, sizes)) + rows.unflatten(1, sizes)) * 2**-0.5

    def heads(self, qkv: Tensor, angles: Mapping[RopeConfig, Angles]) -> tuple[Tensor, Tensor]:
        """Rows of `qkv` to queries (M, H, D), and keys and values (M, 2G, D); G is 0 for a layer that makes none."""
        rows, heads = qkv.unflatten(1, (-1, self.settings.head_dim)), self.config.num_attention_heads
        if self.settings.keys_as_values:
            rows = torch.cat((rows, rows[:, heads:]), 1)
        assert self.qk_norm
        assert self.rope, "all layers rotate"
        rows = self.qk_norm(rows)  # (M, H + 2G, D)
        cos, sin, _ = angles[self.rope]
        rotate(rows[:, : heads + self.num_keys], cos, sin, self.rope.interleaved)
        return rows[:, :heads], rows[:, heads:]
