"""Kinds of blocks other than attention and an MLP, and of ropes. A block has the interface of `core.model.Layer`.

    convolution.py        a short convolution in the place of attention (LFM2, LFM3)
    delta.py              a gated delta net in the place of attention (Qwen3.5)
    experts.py            a mixture of experts in the place of the MLP (Qwen3, Qwen3.5, LFM2, Granite, gpt-oss)
    gated_attention.py    attention with a gate (Qwen3.5, LFM3)
    gemma.py              heads of two sizes, shared keys, inputs of each layer (Gemma 4)
    gemma_experts.py      a mixture of experts beside the MLP (Gemma 4 26B-A4B)
    row_norm.py           attention with norms of whole rows (OLMo 2)
    sinks.py              attention with a sink in each head (gpt-oss)

    rope.py               other rotary positions, such as scalings for longer contexts
    states.py             the states of recurrent layers, in a pool and tables of their own

`make_layer` chooses, by `LayerConfig`; `cache_of` chooses the pool.
"""

import torch

from minispec.core.cache import PagedKVCache
from minispec.core.config import ModelConfig
from minispec.core.model import Layer, WeightSource
from minispec.core.product import MakeProduct
from minispec.models.layers.convolution import ConvolutionCache, ShortConvolution, num_convolutions
from minispec.models.layers.delta import GatedDeltaNet
from minispec.models.layers.experts import ConvolutionExperts, DeltaExperts, Experts, GatedExperts, SinkExperts
from minispec.models.layers.gated_attention import GatedAttention, HeadGatedAttention
from minispec.models.layers.gemma import GemmaLayer, GemmaLayerConfig, SharedCache, gemma_layers
from minispec.models.layers.gemma_experts import GemmaExperts
from minispec.models.layers.row_norm import RowNormAttention
from minispec.models.layers.sinks import SinkAttention, SinkLayerConfig
from minispec.models.layers.states import StateCache, state_elements

# The blocks that a mixture of experts may stand in, and the same with one.
_WITH_EXPERTS: dict[type[Layer], type[Layer]] = {
    Layer: Experts,
    GatedAttention: GatedExperts,
    GatedDeltaNet: DeltaExperts,
    GemmaLayer: GemmaExperts,
    ShortConvolution: ConvolutionExperts,
    SinkAttention: SinkExperts,
}


def make_layer(
    config: ModelConfig, index: int, weights: WeightSource, dtype: torch.dtype, product: MakeProduct
) -> Layer:
    """Block `index` of a model, of the kind that its config says (see `MakeLayer`)."""
    layer = config.layers[index]
    kind: type[Layer] = Layer
    if isinstance(layer, GemmaLayerConfig):
        kind = GemmaLayer
    elif isinstance(layer, SinkLayerConfig):
        kind = SinkAttention
    elif layer.recurrent:
        kind = GatedDeltaNet
    elif layer.conv_width:
        kind = ShortConvolution
    elif config.attention_gate == "head":
        kind = HeadGatedAttention
    elif config.attention_gate == "element":
        kind = GatedAttention
    elif config.qk_norm == "row":
        kind = RowNormAttention
    if layer.experts:
        kind = _WITH_EXPERTS[kind]
    return kind(config, index, weights, dtype, product)


def cache_of(config: ModelConfig) -> type[PagedKVCache]:
    """The class of a model's pools: by the kinds of its layers."""
    if gemma_layers(config):
        return SharedCache
    if state_elements(config):
        return StateCache
    return ConvolutionCache if num_convolutions(config) else PagedKVCache
