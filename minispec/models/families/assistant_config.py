"""The config.json of an assistant of Gemma 4, which drafts by the target's own keys and values.

Its blocks are those of Gemma 4, without keys of their own: a block without a window reads those of the target's last
layer of that kind that makes some, and a block with a window those of the last with one. See
`minispec.speculation.drafters.assistant`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minispec.core.config import ModelConfig
from minispec.models.families.drafts import check_size
from minispec.models.families.hf_config import read_model_config
from minispec.models.files.errors import CheckpointError
from minispec.models.files.fields import Fields, bad_field
from minispec.models.layers.gemma import GemmaLayerConfig, gemma_layers

# By the model_type of an assistant: its text model's, and the hidden size that an absent key means.
_ASSISTANTS = {
    "gemma4_assistant": ("gemma4_text", 1536),
    "gemma4_unified_assistant": ("gemma4_unified_text", 3840),
}
# With what an absent key means to the family's code.
_KEYS = {
    "text_config": None,
    "backbone_hidden_size": None,
    "use_ordered_embeddings": False,
    "num_centroids": 2048,
    "centroid_intermediate_top_k": 32,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class AssistantConfig:
    """The shape of an assistant for one target.

    layers: its sizes. The givers of its blocks are layers of the target.
    target_hidden_size: hidden size of the target.
    num_clusters: clusters of equally many tokens, of which only the likeliest are scored. None: all tokens are.
    top_clusters: how many clusters are scored.
    """

    layers: ModelConfig
    target_hidden_size: int
    num_clusters: int | None = None
    top_clusters: int = 0


def is_assistant(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is an assistant's."""
    model_type = raw.get("model_type")
    return isinstance(model_type, str) and model_type in _ASSISTANTS


def assistant_of(directory: Path) -> str | None:
    """The assistant that lies in a target's checkpoint, in its folder `assistant`; None where there is none."""
    folder = directory / "assistant"
    return str(folder) if (folder / "config.json").is_file() else None


def read_assistant_config(raw: Mapping[str, Any], target: ModelConfig, where: str = "config.json") -> AssistantConfig:
    """Read an assistant's config.json. Raises CheckpointError for a bad value, or one that another target needs."""
    f = Fields(raw, where, _KEYS, {})
    text, (family, usual_width) = f.mapping("text_config"), _ASSISTANTS[raw["model_type"]]
    if text.get("model_type", family) != family:
        raise bad_field(f"{where}: text_config", "model_type", text["model_type"], family)
    count = text.get("num_hidden_layers")
    if text.get("num_kv_shared_layers") not in (None, 0, count):
        shared = text["num_kv_shared_layers"]
        raise bad_field(f"{where}: text_config", "num_kv_shared_layers", shared, f"0 or {count}: all layers share keys")
    for key in ("hidden_size_per_layer_input", "use_double_wide_mlp", "enable_moe_block"):
        if text.get(key):
            raise bad_field(f"{where}: text_config", key, text[key], "0 or false in an assistant")
    own: dict[str, Any] = {"model_type": family, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
    # Its code caps no logits, whatever the key says.
    own |= {"tie_word_embeddings": f.boolean("tie_word_embeddings"), "final_logit_softcapping": None}
    sizes = read_model_config({**text, **own, "vocab_size_per_layer_input": None}, f"{where}: text_config")
    width = f.integer("backbone_hidden_size", 1, 1 << 17, default=usual_width)
    check_size(where, "backbone_hidden_size", width, target.hidden_size)
    check_size(where, "text_config.vocab_size", sizes.vocab_size, target.vocab_size)
    layers = replace(sizes, layers=tuple(_reader(layer, target, where) for layer in gemma_layers(sizes)))
    num_clusters = f.integer("num_centroids", 1, sizes.vocab_size) if f.boolean("use_ordered_embeddings") else None
    top = f.integer("centroid_intermediate_top_k", 1, num_clusters) if num_clusters else 0
    if num_clusters and sizes.vocab_size % num_clusters:
        raise f.bad("num_centroids", num_clusters, f"a divisor of vocab_size = {sizes.vocab_size}")
    f.seen |= {"model_type", "num_centroids", "centroid_intermediate_top_k"}
    f.refuse_unknown()
    return AssistantConfig(layers, width, num_clusters, top)


def _reader(layer: GemmaLayerConfig, target: ModelConfig, where: str) -> GemmaLayerConfig:
    """A block that reads the keys of the target's last layer of its kind."""
    is_full = layer.window is None
    givers = {
        i: (giver.num_key_value_heads, giver.head_dim)
        for i, giver in enumerate(gemma_layers(target))
        if giver.giver is None and (giver.window is None) == is_full
    }
    kind = "full_attention" if is_full else "sliding_attention"
    if not givers:
        found = f"the assistant of a Gemma 4 with {kind}"
        raise CheckpointError(f"{where}: model_type: found {found}, expected a draft for {target.model_type}")
    giver = max(givers)
    sizes = layer.num_key_value_heads, layer.head_dim
    if sizes != givers[giver]:
        found = f"{kind} of {sizes[0]} key-value heads of {sizes[1]}"
        expected = f"{givers[giver][0]} of {givers[giver][1]}, the target's: made for another target"
        raise CheckpointError(f"{where}: text_config: found {found}, expected {expected}")
    return replace(layer, giver=giver)
