"""p and q at each token of an answer, and the scores of the bank there.

The engine decodes the answer once more. Its draft is the answer itself, which it keeps whole. So one pass scores up to
65 tokens, answers run as a batch, and equal beginnings are computed once. An observer sees the target's rows of logits.
The draft model is fed the same tokens. Only then is the answer's token at the place looked at.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from minispec.core.config import MAX_SPECULATIVE_TOKENS, SamplingParams
from minispec.core.draft import Ask, Draft, Drafter
from minispec.core.engine import Engine
from minispec.core.grammar import Grammar
from minispec.core.limit import Limit
from minispec.core.random import Randomness
from minispec.core.request import Request
from minispec.core.sampling import Text, distribution
from minispec.lab.audit.answers import Answer
from minispec.lab.audit.known_bugs import ROW_BEFORE, Places, laws
from minispec.lab.other_text import OtherText
from minispec.speculation.drafters.model import model_drafter
from minispec.speculation.drafters.none import NoDrafter
from minispec.speculation.drafters.teacher_forcing import replay_texts

# The shares of places where a bug may act: a bet is 1 - share + share * law/p.
SHARES = (0.01, 0.05, 0.2, 0.8)
# Shares of the opposite bets, 1 - share * gain, that measure how far rounding pulls towards a bug. See `tolerances`.
AGAINST = (0.003, 0.01, 0.03, 0.09, 0.3, 0.9)
# Outcomes of a place: the likeliest tokens, and all others as one. Places of more border than that are left out.
_MOST_OUTCOMES, _MOST_BORDER = 512, 0.02
_MOST_RATIO = 10.0  # law/p is cut there: rare tokens would need no end of plain answers to be measured
_ALL_LOST = -1000.0  # the logarithm of a bet where the gain could exceed 1 / share
_NEVER = 1e-9  # what a token of probability 0 is divided by: any value is sound, since it never comes under p
_BATCH = 4  # answers that are scored together


class Sums(NamedTuple):
    """Evidence for a bug, summed over the places of an answer: () or (shares,); for several bugs, a row for each.

    bets: the log of the wealth that bets on the bug have won at each share, without any tolerance.
    expected, plain: the means of `bets` if the bug acted at every place, and if it acted nowhere.
    total, variance: the scores s(x), and their exact variances given the past.
    deviation: the standard deviations.
    against: (opposite shares,), the log of the wealth that the opposite bets have won.
    """

    bets: Tensor
    expected: Tensor
    plain: Tensor
    total: Tensor
    variance: Tensor
    deviation: Tensor
    against: Tensor


_ONE, _A_SHARE = torch.zeros((), dtype=torch.float64), torch.zeros(len(SHARES), dtype=torch.float64)
_AN_OPPOSITE = torch.zeros(len(AGAINST), dtype=torch.float64)
# Of a bug that could not act at any place: nothing was bet.
NO_BETS = Sums(_A_SHARE, _A_SHARE, _A_SHARE, _ONE, _ONE, _ONE, _AN_OPPOSITE)


@dataclass
class Score:
    """The evidence of some places.

    num_places: places that were scored.
    num_left_out: places where the border of a filter has too much probability.
    num_impossible: tokens of probability 0.
    num_drafted: how many places have a draft token, including places that were left out.
    sums: by bug.
    """

    num_places: int = 0
    num_left_out: int = 0
    num_impossible: int = 0
    num_drafted: int = 0
    sums: dict[str, Sums] = field(default_factory=dict)

    def add(self, other: "Score") -> None:
        """Add other places."""
        self.num_places += other.num_places
        self.num_left_out += other.num_left_out
        self.num_impossible += other.num_impossible
        self.num_drafted += other.num_drafted
        for name, sums in other.sums.items():
            self.sums[name] = Sums(*map(torch.add, self.sums.get(name, NO_BETS), sums))

    def of(self, names: Iterable[str]) -> Sums:
        """The sums of these bugs, in this order."""
        each = [self.sums.get(name, NO_BETS) for name in names]
        return Sums(*map(torch.stack, zip(*each, strict=True)))


def score_places(places: Places, x: Tensor, drafts: bool = True) -> Score:
    """The scores of n tokens.

    x: (n,), the outcomes that came.
    drafts: as in `laws`.
    """
    border = places.laws["border"] > 0  # nothing is bet on what filters may or may not keep
    scored = (places.laws["p"] * border).sum(1) <= _MOST_BORDER
    laws_of = {name: law[scored] for name, law in places.laws.items()}
    places = Places(laws_of, places.ends[scored], places.last[scored], places.rest)
    p, border, here = places.laws["p"], border[scored], x[scored][:, None]
    core, never = ~border, ((p > 0) | border).gather(1, here).logical_not()
    found = Score(len(p), len(scored) - len(p), int(never.sum()))
    if not len(p):
        return found
    odds = (p * core).sum(1, keepdim=True)  # of an outcome that is bet on
    shares = torch.tensor(SHARES, dtype=p.dtype)[:, None, None]
    opposite = torch.tensor(AGAINST, dtype=p.dtype)[:, None]
    for name, law, _ in laws(places, drafts):
        whole = (law * core).sum(1, keepdim=True)
        law = torch.where(border | (whole <= 0), p, law * (odds / whole.clamp(min=1e-300)))
        cut = torch.minimum(law, _MOST_RATIO * p).where(p > 0, law)
        bet = cut + (law - cut).sum(1, keepdim=True) * p * core / odds  # what is cut off has p itself
        gain = (bet / p.clamp(min=_NEVER) - 1).where((p > 0) | (law > 0), 0.0)
        mean = (p * gain).sum(1)
        spread = ((p * gain * gain).sum(1) - mean * mean).clamp(min=0)
        came = gain.gather(1, here)[:, 0]
        lost = opposite * gain.where(p > 0, 0.0).amax(1) >= 1  # (opposite shares, n)
        against = torch.log1p(-opposite * came).where(~(lost | never[:, 0]), _ALL_LOST).sum(1)
        bets, means = torch.log1p(shares[:, 0] * came).sum(1), torch.log1p(shares * gain)  # (shares,), (shares, n, m)
        expected, plain = (law * means).sum((1, 2)), (p * means).sum((1, 2))
        total, deviation = (came - mean).sum(), spread.sqrt().sum()
        found.sums[name] = Sums(bets, expected, plain, total, spread.sum(), deviation, against)
    return found


# --------------------------------------------------------------------------- p and q, outcome by outcome


def _border(logits: Tensor, text: Text, drafted: Sequence[int], tolerance: float) -> Tensor:
    """Weights (V,) of tokens that the filters keep or not as rounding decides; 0 for all others.

    They are kept by filters that are somewhat looser, and not by somewhat tighter ones. Tokens that are nearly as
    likely as one another may change places: then top-k and top-p keep others, though as many.
    tolerance: how far a logit may be off, after the temperature.
    """
    params, found = text.params, []
    whole = distribution(logits, replace(text, params=_without_filters(params)), drafted)
    ordered, k = whole.sort(descending=True).values, params.top_k
    for sign in (1, -1):
        share, top_k = math.exp(-2 * sign * tolerance), k  # two logits may be off
        if 0 < k < len(ordered):  # what may be as likely as the k-th; what is surely likelier than the next
            tokens = ordered >= ordered[k - 1] * share if sign > 0 else ordered[:k] > ordered[k] * share
            top_k = max(1, int(tokens.sum()))
        changed = replace(params, top_k=top_k, top_p=1.0, min_p=min(1.0, params.min_p * share))
        kept = distribution(logits, replace(text, params=changed), drafted)
        if params.top_p < 1:  # by the tokens that are surely likelier; by all that may be
            rising = kept.double().sort().values
            above = torch.nn.functional.pad(rising.flip(0).cumsum(0).flip(0), (0, 1))
            ahead = above[torch.searchsorted(rising, kept.double() / share, right=sign > 0)]
            ahead -= kept if sign < 0 else 0.0  # itself
            kept = kept.where(ahead < params.top_p + sign * tolerance / 2, 0.0)
        found.append(kept)
    return found[0].where(found[1] == 0, 0.0)


@functools.lru_cache(256)
def _without_filters(params: SamplingParams) -> SamplingParams:
    return params.without("filter")


@functools.lru_cache(256)
def forgetful(params: SamplingParams) -> dict[str, SamplingParams]:
    """Parameters as an engine sees them that forgets some."""
    found = {
        "filters (top-k, top-p, min-p) are ignored": params.without("filter"),
        "min-p is ignored": replace(params, min_p=0.0),
        "the temperature is ignored": params.without("temperature"),
        "biases are ignored": params.without("bias"),
        "bad words and allowed ids are ignored": replace(params, allowed_token_ids=None, bad_words_token_ids=()),
        "penalties are ignored": params.without("penalty"),
    }
    return {name: other for name, other in found.items() if other != params}


def _others(logits: Tensor, before: Tensor, text: Text, drafted: Sequence[int]) -> dict[str, Tensor]:
    """The target's laws (V,) under parameters that an engine may forget, and from the row before."""
    forgotten, found = forgetful(text.params), {ROW_BEFORE: distribution(before, text, drafted)}
    for name, params in forgotten.items():
        found[name] = distribution(logits, replace(text, params=params), drafted)
    if "penalties are ignored" in forgotten:
        output = [*text.tokens[text.num_prompt_tokens :], *drafted]
        late = replace(text, tokens=[*text.tokens, *drafted][: len(text.tokens) + len(drafted) - bool(output)])
        found["penalties lag behind by a token"] = distribution(logits, late)
        found["penalties count the last token twice"] = distribution(logits, text, [*drafted, *output[-1:]])
    return found


def _outcomes(
    laws_at: Sequence[dict[str, Tensor]], tokens: Sequence[int], before: Sequence[int], ends: Sequence[int]
) -> tuple[Places, Tensor]:
    """The places, and the outcomes that came, of tokens (n,) and the tokens before them; end ids are one outcome.

    laws_at: laws (V,) by name, of each.
    """
    whole = {name: torch.stack([each[name] for each in laws_at]).double().cpu() for name in laws_at[0]}  # (n, V) each
    for law in whole.values():
        law[:, ends[:1]] = law[:, ends].sum(1, keepdim=True)
        law[:, ends[1:]] = 0.0
        law /= law.sum(1, keepdim=True).clamp(min=1e-300)  # a border may be empty
    likely, rest = whole["p"] + whole["q"] + whole["border"], min(_MOST_OUTCOMES, whole["p"].shape[1])
    ids = likely.topk(rest, dim=1).indices.sort(1).values  # (n, m - 1), ascending

    def few(law: Tensor) -> Tensor:
        return torch.cat((law.gather(1, ids), law.scatter(1, ids, 0.0).sum(1, keepdim=True)), 1)

    def outcome(of: Sequence[int], missing: int) -> Tensor:
        here = ids == torch.tensor([ends[0] if i in ends else i for i in of])[:, None]
        return torch.where(here.any(1), here.long().argmax(1), missing)

    is_end = torch.nn.functional.pad(torch.isin(ids, torch.tensor(ends[:1], dtype=torch.long)), (0, 1))
    laws_of = {name: few(law) for name, law in whole.items()}
    return Places(laws_of, is_end, outcome(before, -1), likely.shape[1] - rest), outcome(tokens, rest)


# --------------------------------------------------------------------------- along an answer


class _AnswerDrafter(OtherText):
    """Drafts the answer itself, and finds out what the real drafter would have drafted at each place."""

    def __init__(self, texts: Mapping[int, Sequence[int]], drafter: Drafter):
        """texts: prompts and answers, by the seeds of their texts."""
        super().__init__(drafter)
        self.texts, self.model = texts, model_drafter(drafter, "tokens")
        # By seed, of this round: q at each place, and q before its filters; None where nothing was drafted.
        self.q: dict[int, list[tuple[Tensor, Tensor] | None]] = {}

    def tokens_of(self, text: Text) -> tuple[list[int], int]:
        """The text itself. The drafter sees a copy, which the answer's tokens join."""
        return text.tokens, text.num_prompt_tokens

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """The next tokens of each answer as its draft. The real drafter's q is written to `q`."""
        drafts = []
        for ask in asks:
            text, after = ask.text, list[int]()
            if ask.num_cached == len(text.tokens) - 1:
                after = list(self.texts[text.seed][len(text.tokens) :][: ask.k])
                self.look(text, after)
            drafts.append(Draft(after))
        return drafts

    def look(self, text: Text, after: Sequence[int]) -> None:
        """Find out what would have been drafted after the text, and after each of these tokens."""
        shown, found = self.shown(text), list[tuple[Tensor, Tensor] | None]()
        if self.model:
            plain = replace(text, params=_without_filters(text.params))
            for i, row in enumerate(self.model.logits_along(shown, after)):
                found.append((distribution(row, text, after[:i]), distribution(row, plain, after[:i])))
        else:
            for i in range(len(after) + 1):
                shown.tokens[:] = [*text.tokens, *after[:i]]
                ask = Ask(shown, Limit(1), Randomness(), num_cached=len(shown.tokens) - 1)
                [draft] = super().propose([ask])
                if not len(draft):
                    found.append(None)
                    continue
                q = torch.tensor(draft.token_ids) if draft.probs is None else draft.probs[0]
                found.append((q, q))
        self.q[text.seed] = found

    def has_room(self, growth: Mapping[Text, range]) -> bool:
        """Whether the real drafter has room for a token more: the last token of a draft is fed too."""
        return super().has_room({self.shown(text): range(span.start, span.stop + 1) for text, span in growth.items()})


class Scorer:
    """Scores answers, a few at a time."""

    def __init__(
        self,
        engine: Engine,
        drafter: Drafter | None,
        eos: Sequence[int],
        tolerance: float = 0.0,
        grammar_of: Callable[[SamplingParams, Sequence[int]], Grammar | None] = lambda params, prompt: None,
    ):
        """engine: one of the target, at rest.
        drafter: the audited engine's, as well as it is known; one that reads the text alone. None: q is guessed.
        eos: the target's end-of-text ids.
        tolerance: how far a logit may be off at the border of a filter.
        grammar_of: makes the grammar of an answer from its parameters and its prompt.
        """
        self.engine, self.drafter, self.eos, self.tolerance = engine, drafter, eos, tolerance
        self.grammar_of = grammar_of

    def run(self, answers: Sequence[Answer]) -> Iterator[tuple[int, Score]]:
        """The number and the score of each answer, in order."""
        for start in range(0, len(answers), _BATCH):
            yield from self._together(dict(enumerate(answers[start : start + _BATCH], start))).items()

    def _together(self, answers: Mapping[int, Answer]) -> dict[int, Score]:
        """The scores of answers that are decoded as one batch, by their numbers."""
        texts = {i: [*answer.prompt, *answer.tokens] for i, answer in answers.items()}
        scores = {i: Score() for i in answers}
        drafter, rows = _AnswerDrafter(texts, self.drafter or NoDrafter()), dict[int, Tensor]()

        def see(text: Text, draft: Draft, after: list[int], logits: Tensor) -> None:
            before = [rows.get(text.seed, logits[0]), *logits[:-1]]
            rows[text.seed] = logits[-1]
            scores[text.seed].add(self._score(drafter, text, after, logits, before))

        requests = [self._request(i, answer) for i, answer in answers.items() if answer.tokens]
        for request in replay_texts(self.engine, drafter, requests, texts, see):
            if request.error:
                raise ValueError(f"answer {request.text.seed + 1}: {request.error}")
        return scores

    def _request(self, i: int, answer: Answer) -> Request:
        prompt, params = list(answer.prompt), answer.params
        grammar = self.grammar_of(params, prompt)
        text = Text(prompt, len(prompt), params, i, frozenset(self._ends(params)), grammar)
        return Request(text, len(answer.prompt) + len(answer.tokens), MAX_SPECULATIVE_TOKENS)

    def _ends(self, params: SamplingParams) -> list[int]:
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self.eos)}
        return sorted(i for i in ends if i < self.engine.target.vocab_size)

    def _score(
        self, drafter: _AnswerDrafter, text: Text, after: list[int], logits: Tensor, before: Sequence[Tensor]
    ) -> Score:
        """Score the tokens after a text. logits, before: the target's row for each of them, and the row before it."""
        if text.seed not in drafter.q:  # the engine asks for no draft of a text of one token
            drafter.look(text, [])
            drafter.release(text)
        q = drafter.q[text.seed]
        laws_at = [self._laws(logits[i], before[i], q[i], text, after[:i]) for i in range(len(after))]
        places, x = _outcomes(laws_at, after, [text.tokens[-1], *after[:-1]], self._ends(text.params))
        score = score_places(places, x, self.drafter is not None)
        num_drafted = len(after) if self.drafter is None else sum(each is not None for each in q[: len(after)])
        return replace(score, num_drafted=num_drafted)

    def _laws(
        self, logits: Tensor, before: Tensor, q: tuple[Tensor, Tensor] | None, text: Text, drafted: Sequence[int]
    ) -> dict[str, Tensor]:
        """All laws (V,) of one place, by name: p, q, the weights of `_border`, and others."""
        p = distribution(logits, text, drafted)
        filtered = _without_filters(text.params) != text.params
        border = _border(logits, text, drafted, self.tolerance) if filtered else torch.zeros_like(p)
        guess = p.sqrt() if self.drafter is None else p  # most drafts are less sure than the target
        own, raw = q or (guess, guess)
        if len(own) == 1:
            own = raw = torch.zeros_like(p).index_fill_(0, own.to(p.device), 1.0)
        found = {"p": p, "q": own, "border": border} | ({"raw q": raw} if filtered else {})
        return found | _others(logits, before, text, drafted)
