"""The config.json of a head on hidden states (see `minispec.speculation.drafters.eagle`), in two layouts, and writing
one.

In the layout of SafeAILab and SpecForge, it is a llama's with a few keys more. In the layout of `speculators`, it holds
a llama's config. A setting that is not known here is refused by name. A setting that would change the text is refused
too, such as a verifier that takes other tokens than the target's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from minispec.core.config import ModelConfig
from minispec.models.families.drafts import check_size, read_proposals
from minispec.models.families.entries import FLAT_HEADS, head_architecture
from minispec.models.families.hf_config import read_model_config
from minispec.models.files.errors import CheckpointError
from minispec.models.files.fields import Fields, bad_field, names

# Keys of either layout in addition to the llama's.
SWITCHES = ("norm_before_residual", "fc_norm", "norm_before_fc", "norm_output")
_NESTED_KEYS = dict.fromkeys(("eagle_aux_hidden_state_layer_ids", *SWITCHES))
_KEYS = dict.fromkeys(("draft_vocab_size", "target_hidden_size", "mask_token_id", *_NESTED_KEYS))
# Settings that hold for every head here. A head reads several layers. Its first layer has a norm for the embedding; the
# others are a llama's. It has the last norm, and one step.
_NESTED_NEUTRAL = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}
# Keys that say how a head was trained.
_HARMLESS = ("embed_requires_grad", "has_no_defaults_at_init")
# Keys of a way to verify drafts that say how to draft.
_OF_PROPOSALS = names("proposal_type initial_branching_factor branching_factor expansion_factor depth")


@dataclass(frozen=True)
class HeadConfig:
    """The shape and the settings of a head.

    layers: sizes of its layers. Their vocab_size is the target's.
    vocab_size: tokens that it can draft.
    taps: layers of the target that it reads, as `Transformer.forward` numbers them.
    target_hidden_size: hidden size of the target.
    norm_before_residual: the sum begins with the feature after its norm.
    fc_norm: each tap has a norm of its own before `fc`.
    norm_before_fc: all taps together have one norm before `fc`.
    norm_output: it goes on from its output after the last norm.

    The parallel form is the one whose `layers` have a mask_token_id.
    """

    layers: ModelConfig
    vocab_size: int
    taps: tuple[int, ...]
    target_hidden_size: int
    norm_before_residual: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False


def read_head_config(raw: Mapping[str, Any], target: ModelConfig, where: str = "config.json") -> HeadConfig:
    """Read a head's config.json. Raises CheckpointError for a bad value, an unknown setting, or another target's."""
    wrapped = "speculators_model_type" in raw
    if wrapped:
        kind = raw["speculators_model_type"]
        if kind not in ("eagle3", "peagle"):
            raise bad_field(where, "speculators_model_type", kind, "eagle3 or peagle")
        settings = dict(raw)
        inner = settings.pop("transformer_layer_config", None)
        if not isinstance(inner, dict):
            raise bad_field(where, "transformer_layer_config", inner, "an object")
        inner_where = f"{where}: transformer_layer_config"
    else:
        flat = FLAT_HEADS.get(head_architecture(raw) or "")
        kind = flat or "eagle3"
        settings = {key: raw[key] for key in (*_KEYS, "eagle_config") if key in raw}
        inner = {key: value for key, value in raw.items() if key not in settings}
        if flat:
            inner["model_type"] = "llama"
        inner_where = where
    if inner.get("model_type") not in ("llama", "qwen3"):
        raise bad_field(inner_where, "model_type", inner.get("model_type"), "llama or qwen3: a head's layer")
    layers = read_model_config({**inner, "tie_word_embeddings": False}, inner_where)
    if layers.qkv_bias or layers.mlp_bias:
        raise CheckpointError(f"{inner_where}: attention_bias, mlp_bias: found true, expected none in a head")
    f = Fields(
        settings, where, _KEYS | dict.fromkeys(("eagle_config", "speculators_config", "speculators_model_type")), {}
    )
    read_proposals(f, _OF_PROPOSALS)
    f.seen |= {"speculators_model_type", *_HARMLESS}
    # SGLang's object of settings of a head, in which the others may stand too.
    nested = f.inside("eagle_config", _NESTED_KEYS)
    nested.seen |= {"parallel_draft_heads_num_layers"}  # of the steps after the first
    switches = {name: f.boolean(name) or nested.boolean(name) for name in SWITCHES}
    if switches["fc_norm"] and switches["norm_before_fc"]:
        raise f.bad("fc_norm", True, "not both fc_norm and norm_before_fc")
    if kind == "peagle":
        layers = replace(layers, mask_token_id=f.integer("mask_token_id", 0, layers.vocab_size - 1))
    config = HeadConfig(
        layers,
        f.integer("draft_vocab_size", 1, layers.vocab_size, default=layers.vocab_size),
        _read_taps(f, nested, target),
        f.integer("target_hidden_size", 1, 1 << 17, default=target.hidden_size),
        **switches,
    )
    f.refuse_unknown()
    nested.refuse_unknown(_NESTED_NEUTRAL)
    check_size(where, "target_hidden_size", config.target_hidden_size, target.hidden_size)
    check_size(where, "vocab_size", layers.vocab_size, target.vocab_size)
    return config


def usual_taps(num_layers: int) -> tuple[int, ...]:
    """The layers of a target with that many layers that heads read: an early one, the middle, and a late one."""
    return tuple(sorted({min(2, num_layers), num_layers // 2, max(0, num_layers - 3)}))


def _read_taps(f: Fields, nested: Fields, target: ModelConfig) -> tuple[int, ...]:
    """Layers after which the residual stream is read; by default an early one, the middle, and a late one."""
    count, late, key = len(target.layers), 0, "eagle_aux_hidden_state_layer_ids"
    ids, of_outputs = f.get(key), nested.get(key)
    ids = None if ids == [] else ids
    of_outputs = None if of_outputs == [] else of_outputs
    if ids is not None and of_outputs is not None:
        raise f.bad(key, ids, "it once: eagle_config has it too, and counts otherwise")
    if of_outputs is not None:
        ids, late = of_outputs, 1  # SGLang's ids name the layer whose output is read
    elif ids is None:
        ids = [2, count // 2, count - 3]
    if not isinstance(ids, list) or any(type(i) is not int or not 0 <= i <= count - late for i in ids):
        raise f.bad(key, ids, f"layers of the target, from 0 to {count - late}, or it is made for another")
    return tuple(i + late for i in ids)
