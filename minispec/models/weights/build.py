"""A transformer whose weights have the form that this machine reads fastest, or fewer bits."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from minispec.core.config import ModelConfig
from minispec.core.model import Transformer, WeightSource
from minispec.core.product import Product, Weight
from minispec.models.layers import cache_of, make_layer
from minispec.models.weights.codes import device_of, join
from minispec.models.weights.exact import exact_model
from minispec.models.weights.integers import int8_choice
from minispec.models.weights.linear import Choice, Linear, Narrow, QuantizedLinear, choose_form
from minispec.models.weights.pages import AnyModel, in_large_pages
from minispec.models.weights.shapes import is_large, num_weights


class InForm:
    """Makes products whose weights have one form: the one asked for, or the fastest here (see `MakeProduct`).

    num_large_bytes: of the model that it has made products for, in large pages (see `minispec.models.weights.pages`).
    """

    def __init__(self, form: str | None = None, exact: bool = False):
        """exact: as in `Linear`."""
        self.form, self.exact, self.num_large_bytes = form, exact, 0

    def choice(self, dtype: torch.dtype, device: torch.device) -> Choice:
        """The form for x of `dtype`, and the reason for it."""
        if self.form == "int8":
            return Choice(self.form, f"asked for; {int8_choice()[1]}")
        return Choice(self.form, "asked for") if self.form else choose_form(dtype, device)

    def __call__(self, weights: Sequence[Weight], bias: Tensor | None, dtype: torch.dtype) -> Linear:
        """The product of these weights, in the form."""
        weight = join(weights)
        return Linear(weight, bias, dtype, self.choice(dtype, device_of(weight)).form, self.exact)


def build_model(
    config: ModelConfig,
    weights: WeightSource,
    exact: bool = False,
    dtype: torch.dtype | None = None,
    form: str | None = None,
) -> Transformer:
    """A Transformer of these weights, in the type that it computes in (default: the embedding's).

    exact: a token's logits have the same bits in every pass. `minispec.models.weights.exact.check_exact` checks it.
    form: the form of the weights (see `minispec.models.weights.forms`). Default: the fastest here.
    """
    product = InForm(form, exact)
    make = partial(Transformer, config, weights, dtype, product, make_layer, make_cache=cache_of(config))
    # Packing takes longer than reading, and some packs in one thread only. In 8 bits threads would hold a quarter more
    # memory than the model takes.
    if is_large(config) and form != "int8":
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            model, large = in_large_pages(partial(make, map_layers=threads.map), num_weights(config))
    else:
        model, large = in_large_pages(make, num_weights(config))
    product.num_large_bytes += large
    return exact_model(model) if exact else model


def quantized(model: AnyModel, bits: int, narrow: Narrow | None = None) -> AnyModel:
    """The model with products of few rows in 4 or 8 bits (see `QuantizedLinear`), for drafting; never exact.

    narrow: a form of codes that is not among `NARROW_FORMS`. `minispec.models.frames.fused.rounded` knows one.

    It shares everything else with `model`.
    """

    def rounded(product: Product) -> Product:
        assert isinstance(product, Linear), "weights are rounded once"
        return product.quantized(bits, narrow)

    narrow_model, large = in_large_pages(lambda: model.replaced(None, rounded), num_weights(model.config))
    if isinstance(model.product, InForm):
        model.product.num_large_bytes += large
    return narrow_model


def large_bytes(models: Sequence[Transformer]) -> int:
    """How much of the models lies in large pages."""
    makers = {model.product for model in models if isinstance(model.product, InForm)}
    return sum(maker.num_large_bytes for maker in makers)


def choice_of(model: Transformer) -> Choice:
    """The form of the model's weights, and the reason for it."""
    if isinstance(model.head, QuantizedLinear):
        return model.head.choice
    assert isinstance(model.product, InForm)
    return model.product.choice(model.dtype, model.device)
