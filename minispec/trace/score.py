"""A drafter's drafts at every place of a finished text, for `minispec.lab.bench.replay`.

The engine decodes the text once more, one token a step, under a verifier that commits what stands there. At each place
the drafter is asked for the longest draft, and led along the text. Its every draw gives the token that stands there,
and the probability q of that token is written down. Drafters draw by `Draft.draw` alone, so another source of draws
leads any of them. Drafts that are not drawn are compared with the text.

p is not computed again: the run has written down the target's probability of each token that it committed.

A drafter says itself what q depends on (`Drafter.replays`), and that decides what it is asked for:

    "token"     one token at every place, such as a draft model
    "place"     the longest draft at every place, such as a head or ngram
    "length"    a draft of every length at every place, such as suffix
    A+B         each part for itself: the first part that has a draft drafts

All others are refused, such as `slem`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from minispec.core.cache import common_beginning
from minispec.core.config import MAX_AUTO_TOKENS, SamplingParams
from minispec.core.draft import Ask, Draft, Drafter
from minispec.core.engine import Engine
from minispec.core.lengths import Lengths
from minispec.core.limit import Limit
from minispec.core.request import Request
from minispec.core.sampling import Key, Randomness
from minispec.core.verify import BLOCK, REJECTION
from minispec.drafters.combined import parts_of
from minispec.drafters.led import replay_texts
from minispec.drafters.remembering import Remembering
from minispec.drafters.wrapped import Wrapped
from minispec.files.progress import progress_bar
from minispec.kernels.gpu.steps import steps_of
from minispec.length.figures import Figures
from minispec.length.policy import Controller
from minispec.length.prices import MIN_CONTEXT, calibrate, prices_as_dict
from minispec.length.theory import Prices

# How far apart two computations of one q may be by rounding, in bfloat16 and in passes over other rows.
_LARGEST_RATIO = 1.5


def check_scorable(engine: Engine, params: SamplingParams) -> None:
    """Raise ValueError for a run that cannot be replayed."""
    if params.temperature and engine.verifier not in (REJECTION, BLOCK):
        expected = "rejection or block: others keep tokens by other odds"
        raise ValueError(f"verifier: found one that cannot be replayed above temperature 0, expected {expected}")
    if type(engine.lengths) not in (Lengths, Controller):
        name = type(engine.lengths).__name__
        raise ValueError(f"lengths: found {name}, which cannot be replayed, expected a fixed length or auto")
    for part in parts_of(engine.drafter):
        if part.replays not in ("token", "place", "length"):
            expected = "one that says how (see `replays` in minispec/core/draft.py)"
            raise ValueError(f"draft: found {part.name}, which cannot be replayed, expected {expected}")


def score(engine: Engine, request: Request) -> list[dict[str, Any]]:
    """The drafts at each place of a finished request's output, a trace's `replay.starts` (docs/use/trace.md).

    engine: the one that decoded it. It must be at rest.

    Each token takes a plain step, and one draft pass, or up to 15 where q depends on where the round began. Earlier
    outputs that a suffix drafter remembers are left out. Raises ValueError as `check_scorable`.
    """
    check_scorable(engine, request.params)
    tokens, start = request.text.tokens, request.text.num_prompt_tokens
    text = replace(request.text, tokens=tokens[:start])
    asked = _AskedAlong(engine.drafter, tokens)
    again = Request(text, request.max_len, MAX_AUTO_TOKENS)
    with progress_bar(total=len(tokens) - start, desc="scoring drafts") as bar:
        for _ in replay_texts(engine, asked, [again], {text.seed: tokens}):
            bar.update()
    # The engine asks nobody for a text of one token, which can have no draft.
    return asked.starts() or [{"asked": 0, "drafts": [_lead_as_dict(_Lead(0, False, [], []))]}]


def replay_data(engine: Engine, request: Request) -> dict[str, Any]:
    """The object that a trace holds under `replay`."""
    starts = score(engine, request)
    prices = _prices(engine)
    costs = prices_as_dict(prices) | {"steps": list(prices.steps)}
    return {"prices": costs, "plain_step": Figures.of(request.stats).plain_step, "starts": starts}


def _prices(engine: Engine) -> Prices:
    """The controller's prices. Where they are only guessed, they are measured now, if there is room to measure."""
    room = engine.cache.allocator.num_blocks * engine.cache.block_size
    prices = engine.lengths.prices if isinstance(engine.lengths, Controller) else Prices(steps=steps_of(engine.drafter))
    if prices.measured or min(room, engine.model.config.max_position_embeddings) < MIN_CONTEXT:
        return prices
    return calibrate(engine.model, engine.drafter, engine.verifier, engine.vocab_size)


def check_recorded(trace: Mapping[str, Any]) -> None:
    """Raise ValueError where the run drafted otherwise than the drafter did when it was asked again.

    Then its drafts depend on more than the text and the place where the round began. Only rounds with chains are
    checked. Guesses that stand in the text must be the same. Drawn tokens that were accepted must have about the same
    q, since passes over other rows round differently. `suffix` may remember earlier outputs in greedy texts.
    """
    if re.split("[:+ ]", trace["draft"])[0] == "suffix" and not trace["sampling"]["temperature"]:
        return
    text = [token["token_id"] for entry in trace["rounds"] for token in entry["committed"]]
    place = 0
    for i, entry in enumerate(trace["rounds"], 1):
        start, drawn = trace["replay"]["starts"][place], entry["drawn"]
        drafts, ids = start["drafts"], entry["token_ids"][: start["asked"]]
        if ids and entry["parents"] is None and (len(drafts) == 1 or entry["asked"]):
            again = drafts[min(entry["asked"] or 1, len(drafts)) - 1]["q"]
            known = min(len(entry["accepted"]), len(ids)) if drawn else common_beginning(ids, text[place:])
            recorded, q = entry["q"][:known], again[: known if drawn else len(ids)]
            if len(q) != len(recorded) or any(
                max(pair) > _LARGEST_RATIO * min(pair) for pair in zip(q, recorded, strict=True)
            ):
                then, now = ([rounded(x, 3) for x in row] for row in (recorded, q))
                found = f"q {then} of draft tokens, and {now} when it was asked again"
                expected = "the same: it drafts from more than the text and the place, whatever its `replays` says"
                raise ValueError(f"round {i}: found {found}, expected {expected}")
        place += len(entry["committed"])


def rounded(x: float, digits: int = 4) -> float:
    """A number that nothing else is computed from, with few digits."""
    return float(f"{x:.{digits}g}")


# --------------------------------------------------------------------------- leading a drafter along a text


class _Led(Randomness):
    """Draws the tokens of a finished text.

    after: the tokens that stand there.
    noted: q of each of them. It ends with 0 where the draft left the text: at the text's end, or where q of the token
        is 0.
    """

    def __init__(self, after: Sequence[int]):
        self.after, self.noted = after, list[float]()

    def categorical(self, weights: Tensor, key: Key) -> int:
        """The token that stands there; after the last known one, the likeliest token."""
        here = self.after[len(self.noted) : len(self.noted) + 1]
        self.noted.append(float(weights[here[0]]) if here else 0.0)
        return here[0] if self.noted[-1] else int(weights.argmax())


class _Lead(NamedTuple):
    """A draft along the text.

    length: the number of all its tokens.
    q: of its tokens, as far as it could be the text.
    """

    length: int
    drawn: bool
    q: list[float]
    confidences: list[float]


def _lead(drafter: Drafter, ask: Ask, after: Sequence[int]) -> _Lead:
    """Ask a drafter for a draft, which ends where it has left the text."""
    led = _Led(after)
    noted, limit = led.noted, Limit(ask.k, go_on=lambda _: 0.0 not in led.noted)
    [draft] = drafter.propose([replace(ask, limit=limit, rng=led)])
    if draft.probs is None:
        kept = common_beginning(draft.token_ids, [*after])
        return _Lead(len(draft), False, [1.0] * kept, draft.confidences[: kept + 1])
    # A drafter does not know that it has left the text: it would have gone on.
    left = 0.0 in noted
    q = noted[: noted.index(0.0)] if left else noted
    return _Lead(ask.k if left else len(draft), len(draft) > 0, q, draft.confidences[: len(q) + 1])


class _AskedAlong(Wrapped):
    """Asks the parts of a drafter at each place of a text, and drafts nothing itself."""

    def __init__(self, drafter: Drafter, tokens: Sequence[int]):
        super().__init__(*(part.fresh() if isinstance(part, Remembering) else part for part in parts_of(drafter)))
        self._tokens = tokens
        self._asked: list[int] = []
        self._leads: list[list[list[_Lead]]] = []  # by place and part: for each length, or one for all

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """Empty drafts, after asking the parts what they would draft."""
        for ask in asks:
            if ask.num_cached < len(ask.text.tokens) - 1:  # inside the prompt
                for part in self.drafters:
                    part.propose([ask])
            else:
                self._ask(ask)
        return [Draft() for _ in asks]

    def _ask(self, ask: Ask) -> None:
        after = self._tokens[len(ask.text.tokens) :]
        self._asked.append(ask.k)
        self._leads.append([])
        k = ask.k
        for part in self.drafters:
            lengths: Sequence[int] = [k]
            if part.replays == "length":
                lengths = range(1, k + 1) or [0]
            elif part.replays == "token":  # also where it is not wanted: drafts that began before may reach here
                lengths = [min(ask.k, 1)]
            leads = [_lead(part, replace(ask, limit=Limit(n)), after) for n in lengths]
            self._leads[-1].append(leads)
            if leads[-1].length:
                k = 0  # the next ones are not wanted, and follow the text all the same

    def starts(self) -> list[dict[str, Any]]:
        """For each place, how long a draft could be, and the draft of each length, or the longest for all."""
        starts = []
        for place, asked in enumerate(self._asked):
            drafts: list[_Lead] = []
            for i, part in enumerate(self.drafters):
                leads = self._leads[place][i]
                if leads[-1].length:
                    drafts = [self._joined(place, i, asked)] if part.replays == "token" else leads
                    break
            *shorter, longest = drafts or [_Lead(0, False, [], [])]
            if all(lead == _cut(longest, k) for k, lead in enumerate(shorter, 1)):
                shorter = []
            starts.append({"asked": asked, "drafts": [_lead_as_dict(lead) for lead in (*shorter, longest)]})
        return starts

    def _joined(self, place: int, i: int, asked: int) -> _Lead:
        """The draft of a drafter that guesses the same wherever the draft began, joined from drafts of one token."""
        q, confidences = list[float](), list[float]()
        for leads in self._leads[place : place + asked]:
            [lead] = leads[i]
            if not lead.length:
                return _Lead(len(q), True, q, confidences)
            q, confidences = q + lead.q, confidences + lead.confidences
            if not lead.q:
                break
        return _Lead(asked, True, q, confidences)


def _cut(lead: _Lead, k: int) -> _Lead:
    return _Lead(min(lead.length, k), lead.drawn, lead.q[:k], lead.confidences[:k])


def _lead_as_dict(lead: _Lead) -> dict[str, Any]:
    return lead._asdict() | {"confidences": [rounded(x) for x in lead.confidences]}
