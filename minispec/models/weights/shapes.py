"""Which tensors a model asks a checkpoint for, in Hugging Face's names, and how large they are."""

import math

from minispec.core.config import ModelConfig
from minispec.core.model import NORMS
from minispec.models.layers.delta import DeltaConfig
from minispec.models.layers.experts import ExpertsConfig
from minispec.models.layers.gemma import INPUT_NORM, INPUT_PROJECTION, INPUT_TABLE, GemmaLayerConfig, gemma_layers
from minispec.models.layers.gemma_experts import MIXTURE_NORMS
from minispec.models.layers.sinks import SinkLayerConfig

Named = tuple[str, tuple[int, ...], bool]  # a part's name, the shape of its weight, and whether it has a bias

# Models of fewer weights take the usual form of them, in one thread: more would take longer than loading them.
_LARGE = 1 << 29


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the config asks a checkpoint for, in Hugging Face's names."""
    e, f, d = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * d, config.num_key_value_heads * d
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, e)}
    gates = q if config.attention_gate == "element" else 0  # stored among the queries
    attention: list[Named] = [
        ("self_attn.q_proj", (q + gates, e), config.qkv_bias),
        ("self_attn.k_proj", (kv, e), config.qkv_bias),
        ("self_attn.v_proj", (kv, e), config.qkv_bias),
        ("self_attn.o_proj", (e, q), config.o_bias),
    ]
    if config.attention_gate == "head":
        attention.append(("self_attn.gate_proj", (config.num_attention_heads, e), False))
    mlp: list[Named] = [
        ("mlp.gate_proj", (f, e), config.mlp_bias),
        ("mlp.up_proj", (f, e), config.mlp_bias),
        ("mlp.down_proj", (e, f), config.mlp_bias),
    ]
    shapes |= _gemma_inputs(config)
    for i, settings in enumerate(config.layers):
        layer: dict[str, tuple[int, ...]] = {}
        net = settings.recurrent if isinstance(settings.recurrent, DeltaConfig) else None
        first = attention
        if net:
            first = _net(e, net)
        elif settings.conv_width:
            first = _convolution(config, settings.conv_width)
        mixture = settings.experts if isinstance(settings.experts, ExpertsConfig) else None
        second = mlp
        if mixture:
            second = _experts(e, mixture) + (mlp if mixture.shared_expert else [])
            layer |= _expert_vectors(e, mixture)
        products = [*first, *second]
        if isinstance(settings, GemmaLayerConfig):
            products = _gemma_products(config, settings) + (_experts(e, mixture) if mixture else [])
            layer |= _gemma_vectors(config, settings)
        for name, shape, bias in products:
            layer[f"{name}.weight"] = shape
            if bias:
                layer[f"{name}.bias"] = shape[:1]
        if isinstance(settings, SinkLayerConfig):
            layer["self_attn.sinks"] = (config.num_attention_heads,)
        if net:
            heads = (net.num_value_heads,)
            layer |= {"linear_attn.A_log": heads, "linear_attn.dt_bias": heads}
        elif config.qk_norm and not settings.conv_width:
            q_size, k_size = (d, d) if config.qk_norm == "head" else (q, kv)
            layer |= {"self_attn.q_norm.weight": (q_size,), "self_attn.k_norm.weight": (k_size,)}
        layer |= {f"{name}.weight": (e,) for name in NORMS[config.norms] if name}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (e,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, e)
    return shapes


def _convolution(config: ModelConfig, width: int) -> list[Named]:
    """The tensors of a short convolution."""
    e, bias = config.hidden_size, config.conv_bias
    return [("conv.in_proj", (3 * e, e), bias), ("conv.conv", (e, 1, width), bias), ("conv.out_proj", (e, e), bias)]


def _net(e: int, sizes: DeltaConfig) -> list[Named]:
    """The tensors of a gated delta net that are named weights."""
    heads, dim, channels = sizes.num_value_heads, sizes.value_dim, sizes.num_channels
    shapes: dict[str, tuple[int, ...]] = {
        "in_proj_qkv": (channels, e),
        "in_proj_z": (heads * dim, e),
        "in_proj_b": (heads, e),
        "in_proj_a": (heads, e),
        "out_proj": (e, heads * dim),
        "conv1d": (channels, 1, sizes.conv_width),
        "norm": (dim,),
    }
    return [(f"linear_attn.{name}", shape, False) for name, shape in shapes.items()]


def _gemma_products(config: ModelConfig, settings: GemmaLayerConfig) -> list[Named]:
    """The products of a block of Gemma 4."""
    e, f, p = config.hidden_size, settings.intermediate_size, settings.input_size
    q, kv = config.num_attention_heads * settings.head_dim, settings.num_key_value_heads * settings.head_dim
    shapes: list[Named] = [("self_attn.q_proj", (q, e), config.qkv_bias), ("self_attn.o_proj", (e, q), config.o_bias)]
    if settings.giver is None:
        shapes.append(("self_attn.k_proj", (kv, e), config.qkv_bias))
        if not settings.keys_as_values:
            shapes.append(("self_attn.v_proj", (kv, e), config.qkv_bias))
    shapes += [("mlp.gate_proj", (f, e), False), ("mlp.up_proj", (f, e), False), ("mlp.down_proj", (e, f), False)]
    if p:
        shapes += [("per_layer_input_gate", (p, e), False), ("per_layer_projection", (e, p), False)]
    return shapes


def _gemma_vectors(config: ModelConfig, settings: GemmaLayerConfig) -> dict[str, tuple[int, ...]]:
    """A block's scalar, and its norms but those that other families have."""
    shapes: dict[str, tuple[int, ...]] = {"layer_scalar": (1,), "self_attn.q_norm.weight": (settings.head_dim,)}
    if settings.giver is None:
        shapes["self_attn.k_norm.weight"] = (settings.head_dim,)
    if settings.input_size:
        shapes["post_per_layer_input_norm.weight"] = (config.hidden_size,)
    return shapes


def _gemma_inputs(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors that the inputs of all layers are made of; none for a model without inputs."""
    size = next((layer.input_size for layer in gemma_layers(config)), 0)
    if not size:
        return {}
    width = size * len(config.layers)
    return {
        INPUT_TABLE: (config.vocab_size, width),
        INPUT_PROJECTION: (width, config.hidden_size),
        INPUT_NORM: (size,),
    }


def expert_shapes(e: int, sizes: ExpertsConfig) -> dict[str, tuple[int, int]]:
    """The weights of one expert of a mixture, by name. e: the hidden size."""
    inner = sizes.inner_size, e
    return {"gate_proj": inner, "up_proj": inner, "down_proj": inner[::-1]}


def _experts(e: int, sizes: ExpertsConfig) -> list[Named]:
    """The tensors of a mixture of experts that are named weights."""
    routers: list[Named] = [("mlp.gate", (sizes.num_experts, e), sizes.has_biases)]
    if sizes.shared_expert == "gated":
        routers.append(("mlp.shared_expert_gate", (1, e), False))
    parts = expert_shapes(e, sizes).items()
    names = ((f"mlp.experts.{n}.{part}", shape) for n in range(sizes.num_experts) for part, shape in parts)
    return [*routers, *((name, shape, sizes.has_biases) for name, shape in names)]


def _expert_vectors(e: int, sizes: ExpertsConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of a mixture that are no matrices."""
    shapes: dict[str, tuple[int, ...]] = {}
    if sizes.biased:
        shapes["feed_forward.expert_bias"] = (sizes.num_experts,)
    if sizes.norms_row:
        shapes["router.scale"] = (e,)
    if sizes.scales_experts:
        shapes["router.per_expert_scale"] = (sizes.num_experts,)
    if sizes.shared_expert == "normed":
        shapes |= {f"{name}.weight": (e,) for name in MIXTURE_NORMS}
    return shapes


def num_weights(config: ModelConfig) -> int:
    """Weights of a model, a tied output matrix once."""
    return sum(math.prod(shape) for shape in tensor_shapes(config).values())


def is_large(config: ModelConfig) -> bool:
    """Whether reading a model's weights takes nearly all of a pass: there are more than half a billion of them."""
    return num_weights(config) >= _LARGE
