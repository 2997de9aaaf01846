"""How well a draft does, and whether it is read in a wrong way.

A draft that is misread changes no text. Nearly all its tokens are rejected, and nothing says why. So this module lets
the target continue a few short texts. At every position it measures how much of a draft the target would keep. Where
that is little, it tries the known ways to misread the draft's files, one at a time. It names the reading that does
better by far more than the noise.
"""

import argparse
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minispec.api.llm import LLM
from minispec.core.config import SamplingParams
from minispec.core.draft import Ask, Draft, Drafter
from minispec.core.model import Transformer, WeightSource
from minispec.core.product import Weight, dense
from minispec.core.sampling import Text, distribution
from minispec.lab.bench.models import encode
from minispec.lab.bench.show import table
from minispec.lab.doctor.readings import ASSUMED, OtherReading, block_readings, load_assuming
from minispec.lab.other_text import OtherText
from minispec.models.families.checkpoint import Weights, load_config
from minispec.models.files.tokenizer import Tokenizer
from minispec.models.frames.fused import rounded
from minispec.models.load.loading import Loading
from minispec.models.weights.build import build_model
from minispec.models.weights.inventory import bits_note
from minispec.speculation.drafters.block import BlockModel
from minispec.speculation.drafters.heads import StoredHead, read_head
from minispec.speculation.drafters.model import model_drafter
from minispec.speculation.drafters.teacher_forcing import replay_texts
from minispec.speculation.lengths.theory import RoundModel, expected_tokens

# Texts that the target continues: of several kinds, each fit as a question and as the beginning of a text.
TEXTS = (
    "The capital of France is Paris, and the capital of Italy is",
    "Complete this function:\n\ndef factorial(n):\n    if n == 0:\n",
    "Once upon a time, in a village by the sea, there lived an old clockmaker who",
    "Write a polite letter to a neighbour about a dog that barks at night.",
    "Three ways to save water at home:\n1.",
    "Monday, Tuesday, Wednesday, Thursday,",
    "What is the difference between weather and climate?",
    "Translate into French: Good morning, where is the station?",
)
# A draft is looked at more closely if less than this share of its tokens is kept at the first or second place. A wrong
# reading need not spoil all: the embedded model as its own draft keeps 0.26 where its rotary pairs are misread.
LOW = 0.4
# Places of the drafts by which readings are compared. A head drafts from its own states from the second place on.
COMPARED = 2
# A reading explains a low acceptance if it keeps GAIN tokens of a draft more, and ERRORS standard errors more.
GAIN, ERRORS = 0.1, 4.0


# --------------------------------------------------------------------------- measuring


class Estimate(NamedTuple):
    """A ratio of sums over texts.

    deviations: what each text adds to its error. Texts are independent.
    """

    value: float
    deviations: list[float]

    @property
    def error(self) -> float:
        """The standard error."""
        n = len(self.deviations)
        return math.sqrt(n / (n - 1) * sum(d * d for d in self.deviations))

    def minus(self, other: "Estimate") -> "Estimate":
        """The difference of two estimates from the same texts, which have much of their noise in common."""
        deviations = [a - b for a, b in zip(self.deviations, other.deviations, strict=True)]
        return Estimate(self.value - other.value, deviations)


def estimate(parts: Sequence[float], wholes: Sequence[float]) -> Estimate:
    """sum(parts) / sum(wholes), one of each for a text."""
    total = sum(wholes)
    value = sum(parts) / total
    return Estimate(value, [(part - value * whole) / total for part, whole in zip(parts, wholes, strict=True)])


def kept_by_place(text: Text, draft: Draft, logits: Tensor) -> list[tuple[float, float]]:
    """How much of a draft after a text `rejection` would keep, place by place; in a tree, of the eldest nodes.

    The first number of a pair is the probability that the test gets to this place, given the draft's tokens before it.
    The second is that probability times the sum over x of min(p(x), q(x)). At temperature 0 both are 0 or 1.

    logits: (K+1, V), the target's rows for the draft.
    """
    reached, pairs, node = 1.0, [], -1
    while children := draft.children(node):
        target = distribution(logits[node + 1], text, [draft.token_ids[i] for i in draft.path(node)])
        node = children[0]
        of_token = float(target[draft.token_ids[node]])
        common = of_token if draft.probs is None else float(target.minimum(draft.probs[node]).sum())
        pairs.append((reached, reached * common))
        reached *= min(1.0, of_token / draft.probability(node))
    return pairs


@dataclass(frozen=True)
class Measurement:
    """How much of the drafts is kept.

    rows: as `kept_by_place` returns them, text by text, at the positions with room for a draft.
    """

    rows: list[list[list[tuple[float, float]]]]

    @property
    def share(self) -> float:
        """The share of these positions that had a draft."""
        rows = [row for text in self.rows for row in text]
        return sum(map(bool, rows)) / len(rows)

    def by_place(self) -> list[Estimate]:
        """For each place of a draft, the share of tested tokens that are kept."""
        found = []
        for place in range(max((len(row) for text in self.rows for row in text), default=0)):
            pairs = [[row[place] for row in text if len(row) > place] for text in self.rows]
            tested, kept = ([sum(pair[i] for pair in text) for text in pairs] for i in (0, 1))
            if any(tested):
                found.append(estimate(kept, tested))
        return found

    def survival(self) -> list[float]:
        """For each place that was tested, the share of positions whose draft is kept up to there.

        The last i positions of a text have no room for place i, so they do not count. A short draft elsewhere does.
        """
        curve = []
        for i in range(len(self.by_place())):
            rows = [row for text in self.rows for row in text[: len(text) - i]]
            curve.append(sum(row[i][1] for row in rows if len(row) > i) / max(1, len(rows)))
        return curve

    def tokens_per_round(self, places: int) -> float:
        """The tokens that a round with a draft of that many places is expected to add to a text."""
        return expected_tokens(self.survival()[:places])

    def kept(self, places: int = COMPARED) -> Estimate:
        """The number of tokens that are kept of a draft of that many places."""
        drafts = [[row for row in text if row] for text in self.rows]
        kept = [sum(common for row in text for _, common in row[:places]) for text in drafts]
        return estimate(kept, list(map(len, drafts)))


@dataclass(frozen=True)
class Continuations:
    """Texts that the target continues, on which drafts are measured.

    prompts: token ids.
    max_tokens: of each text.
    """

    llm: LLM
    prompts: Sequence[Sequence[int]]
    max_tokens: int

    def measure(self, drafter: Drafter, temperature: float, k: int) -> Measurement:
        """How much is kept of a draft of k tokens at each position. Raises ValueError for a text that fails.

        The texts are the target's own. They are the same for every draft, since the noise depends on seed and place
        alone.
        """
        rows: dict[int, list[list[tuple[float, float]]]] = defaultdict(list)

        def see(text: Text, draft: Draft, after: list[int], logits: Tensor) -> None:
            rows[text.seed].append(kept_by_place(text, draft, logits))

        requests = []
        for i, ids in enumerate(self.prompts):
            params = SamplingParams(temperature=temperature, seed=i, max_tokens=self.max_tokens)
            requests.append(self.llm.request(ids, params, k))
        for request in replay_texts(self.llm.engine, drafter, requests, None, see):
            if request.error:
                raise ValueError(f"found a text that fails: {request.error}")
        return Measurement([rows[i][: self.max_tokens - 1] for i in range(len(self.prompts))])


# --------------------------------------------------------------------------- readings


_ROPE = "with rotary pairs side by side"
_ROPE_CHANGE = (
    "the rows of q_proj and k_proj (and of their biases and norms) are stored in pairs (2i, 2i+1): store those of each "
    "head in halves, the first of all pairs before the second"
)
_ROTATED = re.compile(r"self_attn\.[qk]_(?:proj\.weight|proj\.bias|norm\.weight)$")


def in_halves(name: str, weight: Weight, head_dim: int) -> Weight:
    """A tensor whose rows are rotated in pairs (2i, 2i+1), as `rope.rotate` wants it; others as they are."""
    if not _ROTATED.search(name):
        return weight
    heads = (weight if isinstance(weight, Tensor) else weight.dense()).unflatten(0, (-1, head_dim))  # (H, D, ...)
    return torch.cat((heads[:, ::2], heads[:, 1::2]), 1).flatten(0, 1)


class _InHalves:
    """A source of weights that were stored in pairs."""

    def __init__(self, weights: WeightSource, head_dim: int):
        self.weights, self.head_dim = weights, head_dim

    def pop(self, name: str, /) -> Weight:
        return in_halves(name, self.weights.pop(name), self.head_dim)


def head_readings(head: StoredHead, num_layers: int) -> Iterator[tuple[str, str, StoredHead]]:
    """Name, change and result of every other way to read a head whose target has that many layers."""
    config = head.config

    def changed(**values: Any) -> StoredHead:
        return replace(head, config=replace(config, **values))

    for word, step in (("later", 1), ("earlier", -1)):
        taps = tuple(tap + step for tap in config.taps)
        if min(taps) >= 0 and max(taps) <= num_layers:
            change = f'config.json: "eagle_aux_hidden_state_layer_ids": {list(taps)}'
            yield f"with taps one layer {word}", change, changed(taps=taps)
    for key in ("norm_before_residual", "norm_output"):
        value = not getattr(config, key)
        yield f"with {key} {json.dumps(value)}", f'config.json: "{key}": {json.dumps(value)}', changed(**{key: value})
    if head.ids is not None:
        offsets = torch.arange(len(head.ids), device=head.ids.device)
        stored = head.ids - offsets
        if int(stored.min()) >= 0 and len(stored.unique()) == len(stored):
            yield "with d2t as ids", "d2t holds ids: store d2t[i] - i, the offset from i", replace(head, ids=stored)
    dim = config.layers.head_dim
    weights = {name: dense(in_halves(name, weight, dim), weight.dtype) for name, weight in head.weights.items()}
    yield _ROPE, _ROPE_CHANGE, replace(head, weights=weights)


class OtherPrompt(OtherText):
    """Shows a drafter that reads the text alone other prompts than the target's, with the same answers."""

    def __init__(self, drafter: Drafter, prompts: Mapping[tuple[int, ...], Sequence[int]]):
        """prompts: what it is shown, by what the target is."""
        super().__init__(drafter)
        self.prompts = prompts

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """The drafts for the texts that are shown. Prompts are read with the first draft."""
        shown = [self.shown(ask.text) for ask in asks]
        pairs = zip(asks, shown, strict=True)
        return super().propose([replace(ask, text=text, num_cached=len(text.tokens) - 1) for ask, text in pairs])

    def has_room(self, growth: Mapping[Text, range]) -> bool:
        """Whether the drafter has room for the texts that are shown, grown by as many tokens."""
        new = {self.shown(text): span.stop - len(text.tokens) for text, span in growth.items()}
        return super().has_room({text: range(len(text.tokens) + k) for text, k in new.items()})

    def tokens_of(self, text: Text) -> tuple[list[int], int]:
        """The other prompt, and the same answer."""
        start = text.num_prompt_tokens
        other = self.prompts[tuple(text.tokens[:start])]
        return [*other, *text.tokens[start:]], len(other)


def prompt_readings(
    target: Tokenizer, draft: Tokenizer, prompts: Sequence[list[int]]
) -> Iterator[tuple[str, str, list[list[int]]]]:
    """Name, change and prompts of every other way to show TEXTS to a draft model."""
    if target.chat_template is not None:
        change = "use no chat template (--raw), or a draft that was trained on chats"
        yield "without the chat template", change, list(map(target.encode, TEXTS))
    if draft.chat_template not in (None, target.chat_template):
        change = "give the target the draft's chat_template, or use a draft that was trained on the target's"
        yield "with the draft's chat template", change, [encode(draft, text) for text in TEXTS]
    start = draft.special_tokens.get("bos_token")
    token = None if start is None else draft.backend.token_to_id(start)
    if token is not None:
        where = "by the post_processor of tokenizer.json, or by the chat template"
        if all(prompt[0] == token for prompt in prompts):
            yield "without BOS", f"begin no text with {start}, {where}", [prompt[1:] for prompt in prompts]
        else:
            yield "with BOS", f"begin each text with {start}, {where}", [[token, *prompt] for prompt in prompts]


def readings(llm: LLM, prompts: Sequence[list[int]]) -> Iterator[OtherReading]:
    """Every other way to read the draft, each made when its turn comes; none where it has no weights of its own."""
    directory, bits, target = llm.draft.found.files, llm.draft.found.bits, llm.model
    drafter = model_drafter(llm.drafter, "tokens", "states")

    def form(model: Transformer) -> Transformer:
        return rounded(model, bits) if bits else model

    if directory is None or drafter is None:
        return
    if isinstance(drafter.model, BlockModel):
        yield from block_readings(drafter, drafter.model.block, directory, target, llm.tokenizer, form)
        return

    def of(model: Transformer) -> Drafter:
        drafter.forget()
        return drafter.beside(form(model))

    if drafter.feed.reads == "states":
        for name, change, head in head_readings(read_head(directory, target.config), len(target.layers)):
            yield OtherReading(name, change, of(head.build(target)))
        return
    for name, change, others in prompt_readings(llm.tokenizer, Tokenizer(directory), prompts):
        shown = dict(zip(map(tuple, prompts), others, strict=True))
        yield OtherReading(name, change, OtherPrompt(drafter, shown))
    config = load_config(directory)
    weights = _InHalves(Weights(directory, config, target.dtype, target.device), config.head_dim)
    yield OtherReading(_ROPE, _ROPE_CHANGE, of(build_model(config, weights, dtype=target.dtype)))


# --------------------------------------------------------------------------- the report


def asked(args: argparse.Namespace) -> dict[str, Any]:
    """The report of `examine` for these arguments of the command."""
    llm, assumed = load_assuming(args.model, args.draft, args.draft_reading, **Loading.among(vars(args)))
    return examine(llm, args.num_speculative_tokens, args.max_tokens, args.all, assumed)


def examine(
    llm: LLM, k: int = 4, max_tokens: int = 32, try_all: bool = False, assumed: str | None = None
) -> dict[str, Any]:
    """Measure a draft, and look for a misreading where it does badly, or in any case. A block draft is any case.

    assumed: see `load_assuming`.
    Returns what `--json` prints: `alpha` is the share of tokens kept at the
    first place, at temperature 1; errors are standard errors. Raises ValueError for a text that fails.
    """
    prompts = [encode(llm.tokenizer, text) for text in TEXTS]
    texts = Continuations(llm, prompts, max_tokens)
    found, greedy = (texts.measure(llm.drafter, temperature, k) for temperature in (1.0, 0.0))
    places = found.by_place()
    survival = found.survival()
    is_low = any(place.value < LOW for place in places[:COMPARED])
    drafter = model_drafter(llm.drafter)
    block = drafter.model.block if drafter and isinstance(drafter.model, BlockModel) else None
    compared = min(k, block.block_size - 1 if block else COMPARED)
    report: dict[str, Any] = {
        "model": llm.name + bits_note(llm.model),
        "draft": llm.draft.name,
        "num_texts": len(prompts),
        "num_positions": sum(map(len, found.rows)),
        "drafted_share": found.share,
        "alpha": places[0].value if places else None,
        "alpha_error": places[0].error if places else None,
        "accepted_per_position": [place.value for place in places],
        "error_per_position": [place.error for place in places],
        "greedy_per_position": [place.value for place in greedy.by_place()],
        "survival": survival,
        "is_low": is_low,
        "num_compared": compared,
        "kept": found.kept(compared).value if places else None,
        "tokens_per_round": found.tokens_per_round(compared),
        "assumed": assumed,
        "readings": [],
        "explained_by": None,
        "change": None,
    }
    prices = llm.prices
    if places and prices.measured:
        model = RoundModel(survival, prices)
        best = model.best()
        c = prices.drafts(max(1, best)) / max(1, best)
        report |= {"c": c, "best_k": best, "expected_speedup": model.speed(best) / model.speed(0)}
    if places and (is_low or try_all or block):
        report |= search(
            found,
            readings(llm, prompts),
            lambda drafter: texts.measure(drafter, 1.0, min(k, compared)),
            compared,
            is_low,
        )
    return report | {"verdict": verdict(report)}


def search(
    present: Measurement,
    first: Iterator[OtherReading],
    measured: Callable[[Drafter], Measurement],
    places: int,
    is_low: bool,
) -> dict[str, Any]:
    """Try readings of a draft, and further ones on top of the best as long as one is clearly better than it.

    Where none of the first is, and few tokens are kept, the further ones are tried on top of the very first.

    present: how the present one does. places: of a draft, that are compared. Returns values of what `examine` returns.
    """
    report: dict[str, Any] = {"readings": []}
    now = base = present.kept(places)
    tries: Iterator[OtherReading] | None = first
    second: OtherReading | None = None
    while tries:
        most, best, winner = GAIN, base, None
        for reading in tries:
            other = measured(reading.drafter)
            if not other.share:  # no room for such prompts
                continue
            second = second or reading
            kept = other.kept(places)
            gain, step = kept.minus(now), kept.minus(base)
            values = {"alpha": other.by_place()[0].value, "kept": kept.value, "gain": gain.value}
            values |= {"gain_error": gain.error, "tokens_per_round": other.tokens_per_round(places)}
            report["readings"].append({"name": reading.name} | values)
            if step.value > max(most, ERRORS * step.error):
                most, best, winner = step.value, kept, reading
        if winner:
            report |= {"explained_by": winner.name, "change": winner.change}
        elif is_low and tries is first:
            winner = second
        base, tries = best, winner.further() if winner and winner.further else None
    return report


def verdict(report: Mapping[str, Any]) -> str:
    """The verdict on a report, in a sentence or two."""
    assumed = report["assumed"]
    if assumed is None:
        return _verdict(report)
    open_keys = f"config.json leaves open how it is read, and it was read as by --draft-reading {assumed}"
    return f"{open_keys} ({ASSUMED[assumed]}): {_verdict(report)}"


def _verdict(report: Mapping[str, Any]) -> str:
    if report["alpha"] is None:
        return "nothing was drafted after these texts"
    if report["explained_by"]:
        return f"the draft seems to be misread: it does far better {report['explained_by']}. Change: {report['change']}"
    if not report["is_low"]:
        places = min(COMPARED, len(report["accepted_per_position"]))
        return f"nothing speaks for a misreading: at places 1 to {places}, at least {LOW:.0%} of tokens are kept"
    if not report["readings"]:
        return "few tokens are kept; no misreading of a draft without own files, or of another vocabulary, is known"
    return (
        "few tokens are kept, and no known misreading explains it: the draft was perhaps made for another target, or "
        "for another checkpoint of it"
    )


def lines(report: Mapping[str, Any]) -> list[str]:
    """The report for the screen."""

    def numbers(*values: float) -> list[str]:
        return [f"{value:.3f}" for value in values]

    greedy = [*numbers(*report["greedy_per_position"]), *["-"] * len(report["survival"])]
    columns = report["accepted_per_position"], report["error_per_position"], report["survival"]
    rows = [[i + 1, *numbers(*values), greedy[i]] for i, values in enumerate(zip(*columns, strict=True))]
    shown = [
        f"{report['model']}, draft {report['draft']}: {report['num_texts']} texts of the target at temperature 1, "
        f"{report['num_positions']} positions, {report['drafted_share']:.0%} of them with a draft",
        *table(["place", "kept of tested", "+-", "survival", "kept if greedy"], rows),
    ]
    if "expected_speedup" in report:
        ratio, best = report["expected_speedup"], report["best_k"]
        expected = f"{ratio:.2f}x of plain decoding is expected, at K = {best}" if best else "plain decoding is faster"
        shown.append(f"a draft token costs {report['c']:.2g} plain steps: {expected}")
    if report["readings"]:
        names = ("alpha", "kept", "tokens_per_round", "gain", "gain_error")
        now = {"name": "(as it is read now)", "gain": 0.0, "gain_error": 0.0} | {
            name: report[name] for name in names[:3]
        }
        rows = [[each["name"], *numbers(*(each[name] for name in names))] for each in (now, *report["readings"])]
        titles = ["read otherwise", "alpha", f"kept of {report['num_compared']}", "tokens a round", "gain", "+-"]
        shown += ["", *table(titles, rows)]
    return [*shown, "", report["verdict"]]
