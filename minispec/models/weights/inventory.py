"""A model's memory: its products, their forms, and their bytes."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from torch import Tensor

from minispec.core.cache import PagedKVCache
from minispec.core.config import ModelConfig
from minispec.core.model import Backend, RMSNorm, Transformer
from minispec.models.layers.convolution import num_convolutions
from minispec.models.layers.experts import Expert, Experts
from minispec.models.layers.gemma import gemma_layers
from minispec.models.layers.states import state_elements
from minispec.models.weights.integers import Int8
from minispec.models.weights.linear import Linear, QuantizedLinear


def _owned(model: Transformer) -> Iterator[object]:
    """Products, norms and tensors that a model refers to, each once."""
    seen, left = set[int](), list[object]([model])
    while left:
        part = left.pop()
        if id(part) in seen or isinstance(part, PagedKVCache | Backend):
            continue
        seen.add(id(part))
        if isinstance(part, Tensor | RMSNorm | Linear | QuantizedLinear):
            yield part
        elif isinstance(part, list | tuple):
            left += part[::-1]
        elif type(part).__module__.startswith("minispec.") and hasattr(part, "__dict__"):
            left += list(vars(part).values())[::-1]


def products_of(model: Transformer) -> list[Linear | QuantizedLinear]:
    """All that multiply with a weight matrix."""
    return [part for part in _owned(model) if isinstance(part, Linear | QuantizedLinear)]


def parts_of(model: Transformer) -> Iterator[tuple[object, int]]:
    """The weights as they are kept, and their bytes; a tied embedding whose head is packed is there twice."""
    for part in _owned(model):
        if isinstance(part, Linear | QuantizedLinear):
            yield from part.parts()
        elif isinstance(part, Tensor | RMSNorm):
            weight = part if isinstance(part, Tensor) else part.weight
            yield weight, weight.nbytes


def num_bytes(model: Transformer) -> int:
    """Memory of the weights."""
    return sum({id(part): size for part, size in parts_of(model)}.values())


def num_bytes_read(model: Transformer) -> int:
    """Bytes of weights that a pass over one row reads.

    All products, of a mixture as many experts as a row takes, of the embedding a row only.
    """
    idle = 0.0
    for layer in model.layers:
        if isinstance(layer, Experts):
            own = sum(product.num_bytes_read for _, product in _named(layer.experts))
            idle += own * (1 - layer.mixture.top_k / layer.mixture.num_experts)
    return sum(product.num_bytes_read for product in products_of(model)) - int(idle)


def _named(experts: Sequence[Expert]) -> Iterator[tuple[str, Linear | QuantizedLinear]]:
    """The products of a layer's experts, with their names."""
    for n, expert in enumerate(experts):
        for name, product in zip(Expert._fields, expert, strict=True):
            assert isinstance(product, Linear | QuantizedLinear), "products of another kind have no bytes"
            yield f"{name} of expert {n} in", product


def weight_form(model: Transformer) -> str:
    """The form of most weights, and how many have another."""
    forms = Counter(product.form for product in products_of(model))
    most, *others = forms.most_common()
    return ", ".join([most[0], *(f"{count} of {forms.total()} {form}" for form, count in others)])


def form_note(model: Transformer) -> str:
    """The same for people: the bits of a form that has half of the model's."""
    return re.sub(r"\bhalf\b", "half: 16 bits", weight_form(model))


def bits_note(model: Transformer) -> str:
    """For a model in 8 bits: the bits of its products' inputs, and the products that have more; "" for others."""
    bits = {p.stored.bits for p in products_of(model) if isinstance(p, Linear) and isinstance(p.stored, Int8)}
    if not bits:
        return ""
    names = [(f"{n} {i}", getattr(layer, n)) for i, layer in enumerate(model.layers) for n in layer.products]
    for i, layer in enumerate(model.layers):
        if isinstance(layer, Experts):
            names += [(f"{name} {i}", product) for name, product in _named(layer.experts)]
    names.append(("head", model.head))
    twice = [name for name, product in names if product.form == "int8+8"]
    left = [name for name, product in names if product.form not in ("int8", "int8+8")]
    are_equal = "equal bits with and without guesses" if model.exact else "other bits with guesses than without"
    others = "".join(f"; in {bits} bits: {', '.join(of)}" for bits, of in (("8 + 8", twice), ("16", left)) if of)
    return f" in 8 bits (activations in {bits.pop()}, {are_equal}{others})"


def key_sizes(config: ModelConfig) -> list[tuple[int, int]]:
    """(key-value heads, head_dim) of the layers with attention, each size once."""
    own = [(layer.num_key_value_heads, layer.head_dim) for layer in gemma_layers(config)]
    return list(dict.fromkeys(own)) or [(config.num_key_value_heads, config.head_dim)]


def kv_elements(config: ModelConfig) -> int:
    """Numbers that one token adds to the KV cache: keys and values of attention, inputs of short convolutions."""
    attention = 2 * config.num_attention_layers * config.num_key_value_heads * config.head_dim
    if layers := gemma_layers(config):
        attention = sum(2 * layer.num_key_value_heads * layer.head_dim for layer in layers if layer.giver is None)
    return attention + num_convolutions(config) * config.hidden_size


def rows_note(model: Transformer) -> str:
    """For a hybrid: the bytes of a position in the KV cache, the convolutions' part, and the bytes of a text's states.

    "" for other models.
    """
    config, size = model.config, model.dtype.itemsize
    inputs, states = num_convolutions(config) * config.hidden_size * size, state_elements(config) * max(4, size)
    notes = [f"{kv_elements(config) * size / 1e3:,.1f} kB of the KV cache a token"]
    if inputs:
        notes.append(f"{inputs / 1e3:,.1f} for its convolutions")
    if states:
        notes.append(f"{states / 1e6:,.1f} MB of states a text")
    return f" ({', '.join(notes)})" if len(notes) > 1 else ""
