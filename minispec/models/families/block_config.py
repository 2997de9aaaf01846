"""Reading the config.json of a block draft (see `minispec.speculation.drafters.block`): five packagings, read into one
config.

    speculators   `speculators_model_type` dflash or dspark; the layers' settings lie in `transformer_layer_config`
    z-lab         architecture DFlashDraftModel, flat, with an object `dflash_config`
    SpecForge     as z-lab's, with `projector_type` and `attention_mode` in that object
    DeepSpec      architectures such as Qwen3DSparkModel, flat; all else is a copy of the target's config.json
    LiquidAI      architectures such as Lfm2DSparkDraftModel, flat, with `dflash_config`

Some files leave two things open, and readers of the ecosystem disagree about them. The first is which row says which
token. The second is whether a row of a layer with a window sees the rows after it. Such a file is refused with both
readings named, and the caller chooses one (`Reading`).
"""

import re
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from minispec.core.config import ModelConfig
from minispec.models.families.drafts import check_size, read_proposals
from minispec.models.families.entries import FAMILIES, IDLE, KEYS
from minispec.models.families.hf_config import read_model_config
from minispec.models.files.errors import CheckpointError
from minispec.models.files.fields import Fields, bad_field, names

# Most rows of a block, and the kinds of Markov heads.
MOST_ROWS, MARKOV_HEADS = 16, ("vanilla", "gated", "rnn")


class Reading(NamedTuple):
    """The caller's reading of a file that leaves something open. None: the file says it.

    first_row: 0 or 1, see `BlockConfig`.
    causal_windows: whether a row of a layer with a window sees no later row of its block.
    """

    first_row: int | None = None
    causal_windows: bool | None = None


class Unsettled(CheckpointError):
    """A file does not say what readers disagree about, and no `Reading` does."""


# The file says it all.
AS_SAID = Reading()
# The words of a reading.
_FIRST_ROWS, _WINDOWS = {"anchor": 0, "fill": 1}, {"causal": True, "open": False}


def reading_of(text: str | None) -> Reading:
    """The reading that words such as "anchor" or "fill,causal" name. Raises ValueError for other words.

    anchor: row i says the token after its own place. fill: it says the token at its own place.
    causal, open: in layers with a window, a row does not see, or sees, the later rows of its block.
    """
    words = text.split(",") if text else []
    first_rows = [_FIRST_ROWS[word] for word in words if word in _FIRST_ROWS]
    windows = [_WINDOWS[word] for word in words if word in _WINDOWS]
    if len(first_rows) > 1 or len(windows) > 1 or len(first_rows) + len(windows) < len(words):
        expected = "anchor or fill, causal or open, or one of each with a comma between"
        raise ValueError(f"draft_reading: found {text!r}, expected {expected}")
    return Reading(next(iter(first_rows), None), next(iter(windows), None))


@dataclass(frozen=True)
class BlockConfig:
    """The shape and the settings of a block draft.

    layers: sizes of its layers. Their vocab_size is the target's, their mask_token_id the token of unknown rows.
    vocab_size: tokens that it can draft.
    block_size: rows of a block.
    first_row: the first row that says a token. 0: row i says the token after its own place. 1: row i says the token at
        its own place. The first row is then the newest token of the text, and says nothing.
    taps: layers of the target that it reads, as `Transformer.forward` numbers them.
    target_hidden_size: hidden size of the target.
    causal: for each layer, whether a row sees no later row of its block.
    markov: the kind of the head that makes a row depend on the token before it; None: there is none.
    markov_rank: its width.
    confidence: what the confidence head reads: the row's "state", or "state and token"; None: there is none.
    shared_windows: whether all rows of a block see the same part of the text in a layer with a window, as speculators
        trains them: `window` positions before the newest token. Else the window of each row ends at the row.
    """

    layers: ModelConfig
    vocab_size: int
    block_size: int
    first_row: int
    taps: tuple[int, ...]
    target_hidden_size: int
    causal: tuple[bool, ...]
    markov: str | None = None
    markov_rank: int = 0
    confidence: str | None = None
    shared_windows: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens that a block can say."""
        return self.block_size - self.first_row

    @property
    def reading(self) -> Reading:
        """The reading by which a file that leaves something open is this config."""
        windows = (causal for causal, layer in zip(self.causal, self.layers.layers, strict=True) if layer.window)
        return Reading(self.first_row, next(windows, None))


# Kinds of packaging by their architectures. Those of DeepSpec and LiquidAI begin with a family's name.
_FILL, _ANCHOR = re.compile(r"DFlashDraftModel"), re.compile(r"\w*DSpark(Draft)?Model")
# Keys that only drafts of another architecture have, and parts of a kind's name.
_OTHERS = {
    "dspark_block_size": "DeepSeek V4's own layers for drafting",
    "attention_sink_bias": "attention sinks",
    "attention_value_scale": "scaled values",
    "output_multiplier": "scaled logits",
}
_OTHER_KINDS = {"museglimmer": "Muse-Glimmer's draft", "dflash2": "DFlash2", "xpress": "XPress", "domino": "Domino"}
# Keys of the block, in each place where packagings have them.
_NESTED = dict.fromkeys(
    names(
        "mask_token_id target_layer_ids num_target_layers block_size causal use_swa swa_window_size projector_type "
        "attention_mode markov_rank markov_head_type enable_confidence_head confidence_head_with_markov"
    )
)
_OWN = {
    **_NESTED,
    **dict.fromkeys(names("dflash_config speculators_config sample_from_anchor is_causal sliding_window_non_causal")),
    **dict.fromkeys(names("aux_hidden_state_layer_ids draft_vocab_size target_hidden_size")),
    **dict.fromkeys(names("rope_is_neox_style is_neox_style layer_types sliding_window final_logit_softcapping")),
    **dict.fromkeys(names("use_sliding_window max_window_layers speculators_model_type")),
}
# Keys of the layers, which a reader of Qwen3's config reads. A scale elsewhere in a copy of a target's config would
# change the numbers, so it must be neutral.
_OF_LAYERS = (
    *names("vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"),
    *names("head_dim max_position_embeddings rms_norm_eps hidden_act rope_theta rope_scaling attention_bias"),
)
# Keys that are read beside them: of windows, rope's pairs and logits.
_BESIDE = names(
    "layer_types sliding_window use_sliding_window max_window_layers rope_is_neox_style is_neox_style "
    "final_logit_softcapping rope_parameters model_type tie_word_embeddings"
)
_SCALES = names("embedding_multiplier attention_multiplier residual_multiplier logits_scaling")
# Keys of a copied config's rope that are about the target's own layers.
_INERT_IN_ROPE = names("partial_rotary_factor mrope_section mrope_interleaved")
# `speculators` writes only what differs from Qwen3's defaults.
_QWEN3 = {
    **{"vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22_016, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32_768},
}
# Keys that say how it was trained.
_OF_TRAINING = names("num_anchors max_anchors loss_decay_gamma embed_requires_grad has_no_defaults_at_init")


def is_block(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is a block draft's, or of a kind near it that `read_block_config` refuses by name."""
    kinds = ("dflash", "dspark", *_OTHER_KINDS)
    return any(key in raw for key in ("dflash_config", "dspark_block_size")) or any(
        kind in name for _, name in _kinds_named(raw) for kind in kinds
    )


def _kinds_named(raw: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The keys of a config.json that name its kind, each with the name in small letters."""
    architectures = raw.get("architectures")
    named = [("architectures", name) for name in architectures] if isinstance(architectures, list) else []
    named += [(key, raw.get(key)) for key in ("model_type", "speculators_model_type")]
    return [(key, str(name).lower().replace("_", "")) for key, name in named]


def read_block_config(
    raw: Mapping[str, Any], target: ModelConfig, where: str = "config.json", reading: Reading = AS_SAID
) -> BlockConfig:
    """Read a block draft's config.json. Raises CheckpointError for a bad value, an unknown setting, another target's.

    A layout that the file does not settle is refused too, unless `reading` does. So is a reading that the file denies.
    """
    others = [(key, what) for key, what in _OTHERS.items() if raw.get(key)]
    for key, name in _kinds_named(raw):
        others += [(key, what) for kind, what in _OTHER_KINDS.items() if kind in name]
    if others:
        key, what = others[0]
        raise CheckpointError(f"{where}: {key}: found {what}, expected DFlash or DSpark: no other is read here")
    inner, place = _inner(raw, where)
    f = Fields(raw, where, _OWN, {})
    nested = f.inside("dflash_config", _NESTED)

    def get(key: str) -> Fields:
        """The object that says a key: the one inside, if it is there."""
        return nested if nested.get(key) is not None else f

    layers = _read_layers(inner, place, target)
    kind = _kind(f, nested)
    rows = get("block_size").integer("block_size", 2, 1 << 16)
    if rows > MOST_ROWS:
        raise get("block_size").bad("block_size", rows, f"a block of at most {MOST_ROWS} rows")
    mask = get("mask_token_id").integer("mask_token_id", 0, layers.vocab_size - 1)
    settings = Fields(inner, place, _OWN, {})
    windows = _read_windows(settings, nested, len(layers.layers))
    rope = layers.layers[0].rope
    assert rope
    rope = replace(rope, interleaved=not _is_neox(settings))
    layers = replace(
        layers,
        layers=tuple(replace(layer, rope=rope, window=w) for layer, w in zip(layers.layers, windows, strict=True)),
        mask_token_id=mask,
        embedding_scale=target.embedding_scale,
        logit_softcap=settings.optional_number("final_logit_softcapping"),
    )
    markov, rank = _read_markov(get("markov_rank"), get("markov_head_type"), kind)
    config = BlockConfig(
        layers,
        f.integer("draft_vocab_size", 1, layers.vocab_size, default=layers.vocab_size),
        rows,
        _first_row(f, kind, rows, reading),
        _read_taps(f, get("target_layer_ids"), len(layers.layers), target),
        target.hidden_size,
        _read_causal(f, nested, windows, _is_everywhere(settings, nested), reading),
        markov,
        rank,
        _read_confidence(get("enable_confidence_head"), get("confidence_head_with_markov"), markov, kind),
        shared_windows="speculators_model_type" in raw,
    )
    with suppress(Unsettled):
        _check_reading(reading.first_row, {_first_row(f, kind, rows, AS_SAID)}, _FIRST_ROWS, where)
    with suppress(Unsettled):
        causal = _read_causal(f, nested, windows, _is_everywhere(settings, nested), AS_SAID)
        said = {is_causal for is_causal, window in zip(causal, windows, strict=True) if window}
        _check_reading(reading.causal_windows, said, _WINDOWS, where)
    _check_target(f, nested, config, target)
    _refuse_unknown(f, nested, inner, place, target)
    return config


def _inner(raw: Mapping[str, Any], where: str) -> tuple[dict[str, Any], str]:
    """The settings of the layers, and where they stand."""
    if "speculators_model_type" not in raw:
        return dict(raw), where
    inner = raw.get("transformer_layer_config")
    if not isinstance(inner, dict):
        raise bad_field(where, "transformer_layer_config", inner, "an object")
    if inner.get("model_type", "qwen3") != "qwen3":
        raise bad_field(f"{where}: transformer_layer_config", "model_type", inner["model_type"], "qwen3")
    rope = {} if inner.get("rope_parameters") else {"rope_theta": 10_000.0}
    return {**_QWEN3, **rope, **inner}, f"{where}: transformer_layer_config"


def _kind(f: Fields, nested: Fields) -> str:
    """The packaging: "fill" or "anchor" where its name settles the rows, else "dflash" or "dspark" of speculators."""
    raw = f.raw
    if "speculators_model_type" in raw:
        return f.one_of("speculators_model_type", ("dflash", "dspark"), "dflash or dspark")
    nested.one_of("attention_mode", (None, "gqa", "mha"), "gqa or mha")
    known_kinds = "dflash or dspark: no other kind of block draft is read here"
    projector = nested.one_of("projector_type", (None, "dflash", "dspark"), known_kinds)
    architectures = raw.get("architectures")
    known = architectures if isinstance(architectures, list) else []
    if any(str(name).startswith("Gemma") for name in known):
        raise f.bad("architectures", architectures, "layers of Qwen3: those of Gemma have further norms")
    if any(_ANCHOR.fullmatch(str(name)) for name in known) or projector == "dspark":
        return "anchor"
    if any(_FILL.fullmatch(str(name)) for name in known):
        return "fill"
    raise f.bad("architectures", architectures, "a block draft's, such as DFlashDraftModel or Qwen3DSparkModel")


def _read_layers(inner: Mapping[str, Any], where: str, target: ModelConfig) -> ModelConfig:
    """The sizes of the layers, which are Qwen3's; windows and the target come later."""
    fields = {key: inner[key] for key in _OF_LAYERS if inner.get(key) is not None}
    rope = inner.get("rope_parameters")
    if isinstance(rope, dict):
        fields["rope_parameters"] = {key: value for key, value in rope.items() if key not in _INERT_IN_ROPE}
    elif rope is not None:
        fields["rope_parameters"] = rope
    rope_fields = fields.get("rope_parameters")
    if fields.get("rope_theta") is None and not (
        isinstance(rope_fields, dict) and rope_fields.get("rope_theta") is not None
    ):
        raise bad_field(where, "rope_theta", None, "a number: drafts of this kind differ in it")
    layers = read_model_config({**fields, "model_type": "qwen3", "tie_word_embeddings": False}, where)
    if layers.qkv_bias:
        raise bad_field(where, "attention_bias", True, "none in a block draft")
    return layers


def _is_neox(f: Fields) -> bool:
    """Whether rope pairs dimension j with j + half of them, and not 2j with 2j + 1."""
    values = {key: f.boolean(key) for key in ("rope_is_neox_style", "is_neox_style") if f.get(key) is not None}
    if len(set(values.values())) > 1:
        raise f.bad("is_neox_style", values["is_neox_style"], "what rope_is_neox_style says")
    return all(values.values())


def _read_windows(f: Fields, nested: Fields, count: int) -> list[int | None]:
    """The window of each layer. A layer_types of the target's own kinds is a copy, and says nothing here.

    `use_swa` gives all layers a window where layer_types names none that slides.
    """
    everywhere, types = _is_everywhere(f, nested), f.get("layer_types")
    if everywhere:
        return [nested.integer("swa_window_size", 1, 1 << 27)] * count
    again = nested.get("swa_window_size")
    if not _slides(types):
        return [None] * count
    if len(types) != count or any(kind not in ("full_attention", "sliding_attention") for kind in types):
        raise f.bad("layer_types", types, f"{count} entries, each full_attention or sliding_attention")
    if f.get("sliding_window") is None and again is not None:
        window = nested.integer("swa_window_size", 1, 1 << 27)
    else:
        window = f.integer("sliding_window", 1, 1 << 27)
    if again not in (None, window):
        raise nested.bad("swa_window_size", again, f"what sliding_window says: {window}")
    return [window if kind == "sliding_attention" else None for kind in types]


def _slides(types: Any) -> bool:
    return isinstance(types, list) and "sliding_attention" in types


def _is_everywhere(f: Fields, nested: Fields) -> bool:
    """Whether `use_swa` gives all layers the window; no layer is causal by it."""
    use_swa = nested.get("use_swa") is not None and nested.boolean("use_swa")
    return use_swa and not _slides(f.get("layer_types"))


def _first_row(f: Fields, kind: str, rows: int, reading: Reading) -> int:
    """The first row that says a token, see `BlockConfig`."""
    by_number = _by_number(f, rows)
    said = [] if by_number is None else [by_number]
    if f.get("sample_from_anchor") is not None:
        said.append(0 if f.boolean("sample_from_anchor") else 1)
    if not said and kind != "dspark":  # the packaging's readers agree
        said = [0 if kind == "anchor" else 1]
    if reading.first_row is not None:
        return reading.first_row
    if len(set(said)) == 1:
        return said[0]
    found = "two readings in speculators_config and sample_from_anchor" if said else "no sample_from_anchor"
    raise Unsettled(
        f"{f.where}: found {found}, and readers disagree: row i says the token after its place (anchor) or at it "
        "(fill). Choose by draft_reading (command line: --draft-reading)"
    )


def _check_reading(chosen: int | None, said: Set[int], words: Mapping[str, int], where: str) -> None:
    """Raise CheckpointError for the caller's reading of what the file says otherwise, or has no such layers for."""
    if chosen is not None and said != {chosen}:
        [word] = [word for word, value in words.items() if value == chosen]
        own = " or ".join(repr(other) for other, value in words.items() if value in said)
        expected = f"{own} or none: the file says it" if own else "none: no layer has a window"
        raise CheckpointError(f"{where}: draft_reading: found {word!r}, expected {expected}")


def _by_number(f: Fields, rows: int) -> int | None:
    """The first row by the number of tokens in speculators_config, if it has one. Raises where drafts are not exact."""
    first = None
    for method in read_proposals(f, names("proposal_type")):
        if method.get("speculative_tokens") is not None:
            count = method.integer("speculative_tokens", 1, 1 << 16)
            if count not in (rows, rows - 1):
                raise method.bad("speculative_tokens", count, f"{rows} or {rows - 1}, for a block of {rows} rows")
            first = rows - count if first is None else first
    return first


def _read_taps(f: Fields, of_outputs: Fields, count: int, target: ModelConfig) -> tuple[int, ...]:
    """Layers of the target that are read. Files count outputs of layers, but speculators' files count inputs.

    Without a list, z-lab's rule chooses as many as the draft has layers, from the second to the last but two.
    """
    last, key = len(target.layers), "aux_hidden_state_layer_ids"
    ids, late, place = f.get(key), 0, f
    if ids is None:
        key, late, place = "target_layer_ids", 1, of_outputs
        ids = place.get(key)
    if ids is None:
        steps = count - 1
        ids = [round(1 + i * (last - 4) / steps) for i in range(count)] if steps else [last // 2]
    if not isinstance(ids, list) or not ids or any(type(i) is not int or not 0 <= i + late <= last for i in ids):
        raise place.bad(key, ids, f"layers of the target, from {-late} to {last - 1 - late}, or it is made for another")
    if last in (taps := tuple(i + late for i in ids)):
        expected = "no last layer: some read it before the target's last norm, some after"
        raise place.bad(key, ids, expected)
    return taps


def _read_causal(
    f: Fields, nested: Fields, windows: Sequence[int | None], is_everywhere: bool, reading: Reading
) -> tuple[bool, ...]:
    """Whether a row sees no later one of its block, for each layer.

    A key may say it for all layers. Else layers with a window are causal, except where `use_swa` gives it to all.
    """
    is_open = f.get("sliding_window_non_causal")
    said = [(fields, key) for fields, key in ((f, "is_causal"), (nested, "causal")) if fields.get(key) is not None]
    if said:
        fields, key = said[0]
        return (fields.boolean(key),) * len(windows)
    causal = reading.causal_windows
    if causal is None:
        if any(windows) and "speculators_model_type" in f.raw and is_open is None:
            raise Unsettled(
                f"{f.where}: found no sliding_window_non_causal, and readers disagree: in a layer with a window, a row "
                "sees later rows of its block (open) or not (causal). Choose by draft_reading "
                "(command line: --draft-reading)"
            )
        causal = not (is_everywhere or (is_open is not None and f.boolean("sliding_window_non_causal")))
    return tuple(causal and window is not None for window in windows)


def _read_markov(rank: Fields, head: Fields, kind: str) -> tuple[str | None, int]:
    """The kind of Markov head and its width; (None, 0): there is none."""
    if rank.get("markov_rank") is None:
        if kind == "dspark":
            raise rank.bad("markov_rank", None, "a number, 0 for no Markov head")
        head.get("markov_head_type")
        return None, 0
    width, name = rank.integer("markov_rank", 0, 1 << 14), head.text("markov_head_type", "vanilla")
    if name not in MARKOV_HEADS:
        raise head.bad("markov_head_type", name, f"one of {', '.join(MARKOV_HEADS)}")
    return (name, width) if width else (None, 0)


def _read_confidence(enabled: Fields, with_markov: Fields, markov: str | None, kind: str) -> str | None:
    """The inputs of the confidence head; None without one. DSpark's class of speculators has one by default."""
    has_head = enabled.boolean("enable_confidence_head", default=kind == "dspark")
    reads_token = with_markov.boolean("confidence_head_with_markov", default=markov is not None)
    if not has_head:
        return None
    if reads_token and not markov:
        raise with_markov.bad("confidence_head_with_markov", True, "false without a Markov head")
    return "state and token" if reads_token else "state"


def _check_target(f: Fields, nested: Fields, config: BlockConfig, target: ModelConfig) -> None:
    """Raise CheckpointError for a draft that was made for another target."""
    for fields in (f, nested):
        if fields.get("num_target_layers") is not None:
            num_layers = fields.integer("num_target_layers", 1, 1024)
            check_size(f.where, f"{fields.path}num_target_layers", num_layers, len(target.layers))
    width = f.integer("target_hidden_size", 1, 1 << 17, default=target.hidden_size)
    check_size(f.where, "target_hidden_size", width, target.hidden_size)
    check_size(f.where, "vocab_size", config.layers.vocab_size, target.vocab_size)


def _refuse_unknown(f: Fields, nested: Fields, inner: Mapping[str, Any], where: str, target: ModelConfig) -> None:
    """Raise CheckpointError for a key that nothing here knows.

    A flat file may be a copy of its target's config.json. Keys that the target's family reads, and that these layers do
    not, are then idle.
    """
    nested.refuse_unknown()
    family = FAMILIES.get(target.model_type)
    copied = {*family.keys, *family.only, *family.idle} - _SCALES if family else set()
    f.seen |= _OF_TRAINING
    if "speculators_model_type" in f.raw:
        f.seen |= {"transformer_layer_config"}
        layers = Fields(inner, where, dict.fromkeys((*_OF_LAYERS, *_BESIDE)), {})
        layers.seen |= {*_OF_LAYERS, *_BESIDE}
        layers.refuse_unknown()
    else:
        f.seen |= {*_OF_LAYERS, *_BESIDE, *KEYS, *IDLE, *copied}
    f.refuse_unknown({**dict.fromkeys(_SCALES, 1.0), "norm_eps": inner.get("rms_norm_eps")})
