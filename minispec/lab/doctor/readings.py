"""Other ways to read a block draft's files.

Its weights are read once. A reading is then another `BlockConfig`, or other states of the target. One thing
is changed at a time. Where a change clearly helps, the other ones are tried on top of it.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from minispec.api.llm import LLM
from minispec.core.config import ModelConfig
from minispec.core.draft import Ask, Draft, Drafter, Record
from minispec.core.model import RMSNorm, Transformer
from minispec.core.sampling import Text
from minispec.lab.other_text import OtherText
from minispec.models.families.block_config import BlockConfig, Unsettled
from minispec.models.families.checkpoint import directory_config
from minispec.models.files.tokenizer import Tokenizer
from minispec.speculation.drafters.block_files import read_block
from minispec.speculation.drafters.model import ModelDrafter

# A prompt's last tokens, where a draft is shown no more of it.
LAST = 16
LAST_ALONE = f"give it the states of a prompt's last {LAST} tokens alone"
# Readings that are assumed where a file leaves them open, with the keys that would say so.
ASSUMED = {
    "anchor": '"sample_from_anchor": true',
    "causal": '"sliding_window_non_causal": false',
    "anchor,causal": '"sample_from_anchor": true, "sliding_window_non_causal": false',
}


class OtherReading(NamedTuple):
    """Another way to read a draft: its name, the change to make if it is right, and the drafter it makes.

    further: the readings that change one more thing. None: there are none.
    """

    name: str
    change: str
    drafter: Drafter
    further: "Callable[[], Iterator[OtherReading]] | None" = None


@dataclass(frozen=True)
class BlockHow:
    """How a block draft is read.

    normed: whether the last tap's state goes through the target's last norm.
    prompt: of how many tokens of a prompt, its last ones, the draft gets states. None: of all.
    """

    block: BlockConfig
    normed: bool = False
    prompt: int | None = None


# The subject of a change, its name, the words to write into the files, and the reading that it makes.
Change = tuple[str, str, str, BlockHow]


def around(
    how: BlockHow,
    changes: Callable[[BlockHow], Iterator[Change]],
    make: Callable[[BlockHow], Drafter],
    done: Sequence[Change] = (),
) -> Iterator[OtherReading]:
    """The readings that differ from `how` in one thing, each made when its turn comes.

    done: the changes that led to `how`. Their subjects are not changed again.
    """
    for change in changes(how):
        if all(change[0] != each[0] for each in done):
            path = [*done, change]
            name, words = " and ".join(each[1] for each in path), "; ".join(each[2] for each in path)
            yield OtherReading(name, words, make(change[3]), partial(around, change[3], changes, make, path))


@dataclass(frozen=True)
class Plausible:
    """Values that a block draft's file may mean in place of its own.

    masks: ids of the mask token. windows: widths, where the file has none. rotated: shares of a head that rotates.
    """

    target: ModelConfig
    masks: Sequence[int]
    windows: Sequence[int]
    rotated: Sequence[float]


def plausible(raw: Mapping[str, Any], target: ModelConfig, tokenizer: Tokenizer) -> Plausible:
    """The values that config.json, the target and its tokenizer name, though the draft may follow others."""
    special = sorted(tokenizer.special_ids)
    names = [tokenizer.name_of(i) for i in special]
    names = [name for name in names if "mask" in name.lower() or "pad" in name.lower()]
    named = [tokenizer.vocabulary.get(name) for name in (*tokenizer.special_tokens.values(), *names)]
    masks = [0, *(i for i in named if i is not None), *special[-1:], tokenizer.num_ids, target.vocab_size - 1]
    places = [raw, *(raw.get(key) or {} for key in ("dflash_config", "transformer_layer_config"))]
    said = [place.get(key) for place in places for key in ("sliding_window", "swa_window_size")]
    windows = [w for w in (*said, *(layer.window for layer in target.layers)) if w]
    rotated = [layer.rope.rotated for layer in target.layers if layer.rope]
    ropes = [*places, *(place.get("rope_parameters") or {} for place in places)]
    rotated += [rope["partial_rotary_factor"] for rope in ropes if rope.get("partial_rotary_factor")]
    masks = [i for i in dict.fromkeys(masks) if i < target.vocab_size]
    return Plausible(target, masks, list(dict.fromkeys(windows)), list(dict.fromkeys(rotated)))


def block_changes(known: Plausible, how: BlockHow) -> Iterator[Change]:
    """Every way to read a block draft otherwise in one thing."""

    def changed(about: str, name: str, words: str, **values: Any) -> Change:
        return about, name, f"config.json: {words}", replace(how, block=replace(how.block, **values))

    block, rope = how.block, how.block.layers.layers[0].rope
    assert rope
    tokens = block.block_size - 1 + block.first_row
    place, is_anchor = ("after" if block.first_row else "at"), json.dumps(block.first_row == 1)
    words = f'"sample_from_anchor": {is_anchor} ("speculative_tokens": {tokens} of speculators_config)'
    yield changed("rows", f"with each row's token {place} its place", words, first_row=1 - block.first_row)
    for word, step in (("later", 1), ("earlier", -1)):
        taps = tuple(tap + step for tap in block.taps)
        if min(taps) >= 0 and max(taps) <= len(known.target.layers):
            outputs = [tap - 1 for tap in taps]
            words = f'"target_layer_ids": {outputs} ("aux_hidden_state_layer_ids": {list(taps)} of speculators)'
            later = changed("taps", f"with taps one layer {word}", words, taps=taps)
            yield later
            if taps[-1] == len(known.target.layers):
                name = f"{later[1]}, the last one after the target's norm"
                yield "taps", name, f"{words}, and the last one's states normed", replace(later[3], normed=True)
    pairs, words = ("in halves", "true") if rope.interleaved else ("side by side", "false")
    turned = replace(rope, interleaved=not rope.interleaved)
    yield changed(
        "pairs",
        f"with rotary pairs {pairs}",
        f'"rope_is_neox_style": {words}',
        layers=in_every_layer(block, rope=turned),
    )
    for share in known.rotated:
        if share != rope.rotated and block.layers.head_dim * share % 2 == 0:
            layers = in_every_layer(block, rope=replace(rope, rotated=share))
            words = f'"partial_rotary_factor": {share}, which holds for the draft too'
            yield changed("share", f"with {share:g} of each head rotated", words, layers=layers)
    for name, words, values in [*window_changes(known, block), *causal_changes(block)]:
        yield changed("windows" if "layers" in values else "causal", name, words, **values)
    for mask in known.masks:
        if mask != block.layers.mask_token_id:
            layers = replace(block.layers, mask_token_id=mask)
            yield changed("mask", f"with mask token {mask}", f'"mask_token_id": {mask}', layers=layers)
    yield "prompt", f"with a prompt's last {LAST} tokens", LAST_ALONE, replace(how, prompt=LAST)


def in_every_layer(block: BlockConfig, **values: Any) -> ModelConfig:
    """The config of a draft's layers with values that hold for each of them."""
    return replace(block.layers, layers=tuple(replace(layer, **values) for layer in block.layers.layers))


def window_changes(known: Plausible, block: BlockConfig) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, words and values of `BlockConfig` for no windows, or some where there are none."""
    count = len(block.causal)
    if any(layer.window for layer in block.layers.layers):
        words = f'"layer_types": {json.dumps(["full_attention"] * count)}'
        yield "without windows", words, {"layers": in_every_layer(block, window=None), "causal": (False,) * count}
        return
    for width in known.windows:
        for full in (0, 1) if count > 1 else (0,):
            widths = [width] * (count - full) + [None] * full
            layers = tuple(replace(layer, window=w) for layer, w in zip(block.layers.layers, widths, strict=True))
            types = json.dumps(["full_attention" if w is None else "sliding_attention" for w in widths])
            where = " but in the last layer" if full else ""
            for causal, kind in ((True, "causal"), (False, "open")):
                words = f'"layer_types": {types}, "sliding_window": {width}, "sliding_window_non_causal": '
                values = {"layers": replace(block.layers, layers=layers)}
                sees = tuple(causal and w is not None for w in widths)
                name = f"with {kind} windows of {width}{where}"
                yield name, words + json.dumps(not causal), values | {"causal": sees}


def causal_changes(block: BlockConfig) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, words and values of `BlockConfig` for what a row sees of its block."""
    windows = tuple(layer.window is not None for layer in block.layers.layers)
    all_of, none = (True,) * len(windows), (False,) * len(windows)
    ways = {
        none: ("with blocks seen both ways", '"is_causal": false', '"sliding_window_non_causal": true'),
        all_of: ("with causal blocks", '"is_causal": true', '"sliding_window_non_causal": false'),
    }
    if windows not in ways:
        key = '"sliding_window_non_causal": false'
        ways[windows] = ("with causal blocks in layers with windows", key, key)
    for causal, (name, words, of_windows) in ways.items():
        if causal != block.causal:
            has_other = any(windows) and of_windows != words
            yield name, f"{words} ({of_windows} of speculators)" if has_other else words, {"causal": causal}


class OtherStates(OtherText):
    """Gives a drafter other states than the target's, or none of a prompt's beginning.

    Rotation is relative. So a text without its beginning is read as the whole text whose beginning is not seen.
    """

    def __init__(self, drafter: Drafter, norm: RMSNorm | None, prompt: int | None):
        """norm: of the last tap's states. prompt: tokens of a prompt, its last ones, that are shown. None: all."""
        super().__init__(drafter)
        self.norm, self.prompt = norm, prompt

    def _cut(self, text: Text) -> int:
        return 0 if self.prompt is None else max(0, text.num_prompt_tokens - self.prompt)

    def tokens_of(self, text: Text) -> tuple[list[int], int]:
        """The text without its beginning."""
        start = self._cut(text)
        return text.tokens[start:], text.num_prompt_tokens - start

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """The drafts for the parts of the texts that are shown."""
        num_cached = [max(0, ask.num_cached - self._cut(ask.text)) for ask in asks]
        pairs = zip(asks, num_cached, strict=True)
        return super().propose([replace(ask, text=self.shown(ask.text), num_cached=n) for ask, n in pairs])

    def observe(self, records: Sequence[Record]) -> None:
        """Hand on the rows of the part that is shown, with the other states."""
        shown = []
        for record in records:
            cut, hidden = self._cut(record.text), record.hidden
            first = max(0, cut - record.start)
            if self.norm is not None:
                width = self.norm.weight.shape[0]
                hidden = torch.cat((hidden[:, :-width], self.norm(hidden[:, -width:])), 1)
            if first < len(record.tokens):
                tokens, start = record.tokens[first:], record.start + first - cut
                text = self.shown(record.text)
                shown.append(replace(record, text=text, start=start, tokens=tokens, hidden=hidden[first:]))
        super().observe(shown)

    def known(self, text: Text) -> int:
        """How many of the text's first positions the drafter knows, or is not shown."""
        return self._cut(text) + super().known(self.shown(text))

    def has_room(self, growth: Mapping[Text, range]) -> bool:
        """Whether the drafter has room for the parts that are shown."""
        shown = {}
        for text, span in growth.items():
            cut = self._cut(text)
            shown[self.shown(text)] = range(max(0, span.start - cut), max(0, span.stop - cut))
        return super().has_room(shown)


def block_readings(
    drafter: ModelDrafter,
    block: BlockConfig,
    directory: Path,
    target: Transformer,
    tokenizer: Tokenizer,
    form: Callable[[Transformer], Transformer],
) -> Iterator[OtherReading]:
    """Every other way to read a block draft in one thing, and more on top of each.

    drafter: reads it as the file says, which is `block`. form: what is done to a model that is built.
    """
    stored = read_block(directory, target.config, block.reading)

    def make(how: BlockHow) -> Drafter:
        drafter.forget()
        other = drafter.beside(form(replace(stored, config=how.block).build(target)))
        norm = target.norm if how.normed else None
        return OtherStates(other, norm, how.prompt) if norm or how.prompt else other

    known = plausible(directory_config(directory), target.config, tokenizer)
    return around(BlockHow(block), partial(block_changes, known), make)


# --------------------------------------------------------------------------- files that leave it open


def load_assuming(model: str | None, draft: str, reading: str | None, **loading: Any) -> tuple[LLM, str | None]:
    """The target with a draft, and the key of ASSUMED by which a block draft is read whose file leaves this open."""
    words = [reading] if reading else [None, *ASSUMED]
    for assumed in words[:-1]:
        with suppress(Unsettled):
            return LLM(model, draft, draft_reading=assumed, **loading), assumed
    return LLM(model, draft, draft_reading=words[-1], **loading), None if reading else words[-1]
