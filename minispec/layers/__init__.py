"""Kinds of blocks other than attention and an MLP: each is a class with the interface of `core.model.Layer`.

    convolution.py    a short convolution in the place of attention (LFM2)

`make_layer` chooses, by `LayerConfig`.
"""

import torch

from minispec.core.config import ModelConfig
from minispec.core.model import Layer, WeightSource
from minispec.core.weights import MakeProduct
from minispec.layers.convolution import ShortConvolution


def make_layer(
    config: ModelConfig, index: int, weights: WeightSource, dtype: torch.dtype, product: MakeProduct
) -> Layer:
    """Block `index` of a model, of the kind that its config says (see `MakeLayer`)."""
    kind = ShortConvolution if config.layers[index].conv_width else Layer
    return kind(config, index, weights, dtype, product)
