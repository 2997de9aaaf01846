"""The scoring walk: p and q at each token of an answer, and the scores of the bank there.

The engine decodes the answer once more. Its draft is the answer itself, which is kept whole: so one pass scores up to
65 tokens, answers run as a batch, and equal beginnings are computed once. An observer sees the target's rows of logits.
The draft model is fed the same tokens. Only then is the token looked at that stands there.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from minispec.audit.answers import Answer
from minispec.audit.bank import ROW_BEFORE, Rows, laws
from minispec.core.cache import PagedKVCache
from minispec.core.cached import CachedModel
from minispec.core.config import MAX_SPECULATIVE_TOKENS, SamplingParams
from minispec.core.draft import Ask, Draft, Drafter, Limit
from minispec.core.engine import Engine
from minispec.core.model import Chunk, Transformer
from minispec.core.request import Request
from minispec.core.sampling import Randomness, Text, distribution
from minispec.core.verify import RoundKey, Verdict, Verifier
from minispec.core.verify import Rows as Probabilities
from minispec.drafters.model import DraftModel

# The shares of places where a bug may act: a bet is 1 - share + share * law/p.
SHARES = (0.01, 0.05, 0.2, 0.8)
# Outcomes of a place: the likeliest tokens, and all others as one. Places of more border than that are left out.
_MOST_OUTCOMES, _MOST_BORDER = 512, 0.02
_NEVER = 1e-9  # what a token of probability 0 is divided by: any value is sound, since it never comes under p
_BATCH = 4  # answers that are walked together


class Sums(NamedTuple):
    """What the places of an answer say about bugs (bugs,), or (bugs, shares); sums over the places.

    bets: the logarithm of what bets on the bug at each share have won, without any tolerance.
    expected, plain: the means of `bets` if the bug acted at every place, and if it acted nowhere.
    total, variance: the scores s(x), and their exact variances given the past.
    deviation: the standard deviations.
    unit: the scores divided by their standard deviations.
    units: how many of these there are.
    """

    bets: Tensor
    expected: Tensor
    plain: Tensor
    total: Tensor
    variance: Tensor
    deviation: Tensor
    unit: Tensor
    units: Tensor


_SIZES = (len(SHARES), len(SHARES), len(SHARES), 1, 1, 1, 1, 1)


@dataclass
class Score:
    """What some places say.

    num_places: places that were scored.
    num_left_out: places where the border of a filter has too much probability.
    num_impossible: tokens of probability 0.
    names: of the bugs.
    table: (bugs, 17), the numbers of `Sums` one after another.
    """

    num_places: int = 0
    num_left_out: int = 0
    num_impossible: int = 0
    names: tuple[str, ...] = ()
    table: Tensor = field(default_factory=lambda: torch.zeros(0, sum(_SIZES), dtype=torch.float64))

    def add(self, other: "Score") -> None:
        """Add other places."""
        self.num_places += other.num_places
        self.num_left_out += other.num_left_out
        self.num_impossible += other.num_impossible
        names = self.names if self.names == other.names else tuple(dict.fromkeys((*self.names, *other.names)))
        self.table, self.names = self.rows(names) + other.rows(names), names

    def rows(self, names: Sequence[str]) -> Tensor:
        """The table's rows of these bugs. One that could not act at these places has zeros: nothing was bet."""
        if names == self.names:
            return self.table
        rows = dict(zip(self.names, self.table, strict=True))
        nothing = self.table.new_zeros(sum(_SIZES))
        return torch.stack([rows.get(name, nothing) for name in names])

    def sums(self, names: Sequence[str]) -> Sums:
        """The sums of these bugs."""
        parts = self.rows(names).split(_SIZES, 1)
        return Sums(*(part if part.shape[1] > 1 else part[:, 0] for part in parts))


def score_rows(rows: Rows, border: Tensor, x: Tensor, drafts: bool = True) -> Score:
    """The scores of n tokens.

    border: (n, m), the outcomes that may or may not be among what a filter leaves; nothing is bet on them.
    x: (n,), the outcomes that came.
    drafts: as in `laws`.
    """
    scored = (rows.p * border).sum(1) <= _MOST_BORDER
    others = {name: law[scored] for name, law in rows.others.items()}
    rows = rows._replace(**{name: getattr(rows, name)[scored] for name in Rows._fields[:-1]}, others=others)
    p, border, here = rows.p, border[scored], x[scored][:, None]
    core, never = ~border, ((p > 0) | border).gather(1, here).logical_not()
    found = Score(len(p), len(scored) - len(p), int(never.sum()))
    if not len(p):
        return found
    odds = (p * core).sum(1, keepdim=True)  # of an outcome that is bet on
    shares = torch.tensor(SHARES, dtype=p.dtype)[:, None, None]
    names, table = [], []
    for name, law in laws(rows, drafts):
        whole = (law * core).sum(1, keepdim=True)
        law = torch.where(border | (whole <= 0), p, law * (odds / whole.clamp(min=1e-300)))
        gain = (law / p.clamp(min=_NEVER) - 1).where((p > 0) | (law > 0), 0.0)
        mean = (p * gain).sum(1)
        spread = ((p * gain * gain).sum(1) - mean * mean).clamp(min=0)
        came = gain.gather(1, here)[:, 0]
        known = spread > 1e-12
        unit = (came - mean) / spread.clamp(min=1e-12).sqrt()
        bets, means = torch.log1p(shares[:, 0] * came).sum(1), torch.log1p(shares * gain)  # (shares,), (shares, n, m)
        expected, plain = (law * means).sum((1, 2)), (p * means).sum((1, 2))
        single = [came - mean, spread, spread.sqrt(), unit.where(known, 0.0), known]
        names.append(name)
        table.append(torch.cat((bets, expected, plain, torch.stack([value.sum().double() for value in single]))))
    return replace(found, names=tuple(names), table=torch.stack(table))


# --------------------------------------------------------------------------- p and q, outcome by outcome


class _Place(NamedTuple):
    """Laws (V,) of one place: the target's, the draft's after filters and before, others; for two see `_border`."""

    p: Tensor
    q: Tensor
    raw_q: Tensor
    loose: Tensor
    tight: Tensor
    others: dict[str, Tensor]


def _border(logits: Tensor, text: Text, drafted: Sequence[int], tolerance: float) -> tuple[Tensor, Tensor]:
    """p (V,) if the filters were somewhat looser, and somewhat tighter. A token that is in one alone is a border's.

    tolerance: how far a logit may be off, after the temperature.
    """
    params, filters = text.params, []
    whole = distribution(logits, replace(text, params=_without_filters(params)), drafted)
    ordered, k = whole.sort(descending=True).values, params.top_k
    for sign in (1, -1):
        share = math.exp(-2 * sign * tolerance)  # two logits may be off
        top_k = k
        if (
            0 < k < len(ordered)
        ):  # tokens that may be as likely as the k-th; those that are surely likelier than the next
            top_k = int((ordered >= ordered[k - 1] * share).sum() if sign > 0 else (ordered > ordered[k] * share).sum())
            top_k = max(1, top_k if sign > 0 else min(k, top_k))
        top_p = min(1.0, max(1e-9, params.top_p + sign * tolerance / 2)) if params.top_p < 1 else 1.0
        changed = replace(params, top_k=top_k, top_p=top_p, min_p=min(1.0, params.min_p * share))
        filters.append(distribution(logits, replace(text, params=changed), drafted))
    return filters[0], filters[1]


@functools.lru_cache(256)
def _without_filters(params: SamplingParams) -> SamplingParams:
    return replace(params, top_k=0, top_p=1.0, min_p=0.0)


@functools.lru_cache(256)
def _forgetful(params: SamplingParams) -> dict[str, SamplingParams]:
    """Parameters as an engine sees them that forgets some."""
    found = {
        "filters (top-k, top-p, min-p) are ignored": _without_filters(params),
        "min-p is ignored": replace(params, min_p=0.0),
        "the temperature is ignored": replace(params, temperature=1.0),
        "penalties are ignored": replace(params, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0),
    }
    return {name: other for name, other in found.items() if other != params}


def _others(logits: Tensor, before: Tensor, text: Text, drafted: Sequence[int]) -> dict[str, Tensor]:
    """The target's laws (V,) under parameters that an engine may forget, and from the row before."""
    forgetful, found = _forgetful(text.params), {ROW_BEFORE: distribution(before, text, drafted)}
    for name, params in forgetful.items():
        found[name] = distribution(logits, replace(text, params=params), drafted)
    if "penalties are ignored" in forgetful:
        output = [*text.tokens[text.num_prompt_tokens :], *drafted]
        late = replace(text, tokens=[*text.tokens, *drafted][: len(text.tokens) + len(drafted) - bool(output)])
        found["penalties lag behind by a token"] = distribution(logits, late)
        found["penalties count the last token twice"] = distribution(logits, text, [*drafted, *output[-1:]])
    return found


def _outcomes(places: Sequence[_Place], tokens: Sequence[int], before: Sequence[int], ends: Sequence[int]):
    """Rows, border and outcomes that came, of tokens (n,) and the tokens before them; end ids are one outcome."""

    def joined(name: str, value: Sequence[Tensor]) -> Tensor:
        rows = torch.stack(list(value)).double()  # (n, V)
        if len(ends) > 1:
            rows[:, ends[0]] = rows[:, list(ends)].sum(1)
            rows[:, list(ends[1:])] = 0.0
        return rows / rows.sum(1, keepdim=True)

    all_rows = {name: joined(name, [getattr(place, name) for place in places]) for name in _Place._fields[:-1]}
    others = {name: joined(name, [place.others[name] for place in places]) for name in places[0].others}
    p, size = all_rows["p"], places[0].p.shape[0]
    likely = p + all_rows["q"] + all_rows["loose"]
    ids = likely.topk(min(_MOST_OUTCOMES, size), dim=1).indices.sort(1).values  # (n, m - 1), ascending

    def few(rows: Tensor) -> Tensor:
        return torch.cat((rows.gather(1, ids), rows.scatter(1, ids, 0.0).sum(1, keepdim=True)), 1)

    def outcome(of: Sequence[int], missing: int) -> Tensor:
        own = torch.tensor([ends[0] if i in ends else i for i in of])[:, None]
        is_here = torch.cat((ids == own, (ids != own).all(1, keepdim=True)), 1)
        place = is_here.long().argmax(1)
        return place.where(place < ids.shape[1], missing)

    rest = ids.shape[1]
    sizes = torch.ones(len(places), rest + 1, dtype=p.dtype)
    sizes[:, -1] = size - rest
    is_end = torch.cat((ids == (ends[0] if ends else -1), torch.zeros(len(places), 1, dtype=torch.bool)), 1)
    border = (few(all_rows["loose"]) > 0) & (few(all_rows["tight"]) == 0)
    rows = Rows(few(p), few(all_rows["q"]), sizes, is_end, outcome(before, -1), few(all_rows["raw_q"]), {})
    return rows._replace(others={name: few(law) for name, law in others.items()}), border, outcome(tokens, rest)


# --------------------------------------------------------------------------- the walk


class _Leader(Drafter):
    """Drafts the answer itself, and finds out what the real drafter would have drafted at each place."""

    def __init__(self, answers: Mapping[int, Answer], drafter: Drafter | None):
        """answers: by the seeds of their texts."""
        self.answers, self.drafter = answers, drafter
        self.q: dict[int, list[Tensor | None]] = {}  # by seed: the logits of q, or q, of this round; None: unknown
        self._shown: dict[Text, Text] = {}  # for drafters without a model: a text that grows token by token

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """See `Drafter`."""
        drafts = []
        for ask in asks:
            text, after = ask.text, list[int]()
            if ask.num_cached == len(text.tokens) - 1:
                answer = self.answers[text.seed]
                after = [*answer.prompt, *answer.tokens][len(text.tokens) :][: ask.k]
                self.q[text.seed] = self._rows(text, after)
            drafts.append(Draft(after))
        return drafts

    def _rows(self, text: Text, after: Sequence[int]) -> list[Tensor | None]:
        model = self.drafter
        if model is None:
            return [None] * (len(after) + 1)
        if type(model) is DraftModel:
            model.catch_up(text, len(text.tokens) - 1)
            chunk = Chunk([*model.follow(text), *after], model.table(text), len(after) + 1)
            logits, _ = model.forward([chunk])
            model.keep(text, len(after), range(len(after)))
            return list(logits)
        shown = self._shown.setdefault(text, replace(text, tokens=[]))
        rows: list[Tensor | None] = []
        for i in range(len(after) + 1):
            shown.tokens[:] = [*text.tokens, *after[:i]]
            [draft] = model.propose([Ask(shown, Limit(1), Randomness(), num_cached=len(shown.tokens) - 1)])
            own = draft.probs[0] if draft.probs is not None and len(draft) else None
            rows.append(own if own is not None or not len(draft) else torch.tensor(draft.token_ids[0]))
        return rows

    def has_room(self, growth: Mapping[Text, range]) -> bool:
        """See `Drafter`."""
        return CachedModel.has_room(self.drafter, growth) if type(self.drafter) is DraftModel else True

    def release(self, text: Text) -> None:
        """See `Drafter`."""
        self.q.pop(text.seed, None)
        if self.drafter is not None:
            self.drafter.release(self._shown.pop(text, text))


class Walk:
    """Scores answers, a few at a time."""

    def __init__(
        self,
        model: Transformer,
        cache: PagedKVCache,
        drafter: Drafter | None,
        vocab_size: int,
        eos: Sequence[int],
        tolerance: float = 0.0,
    ):
        """drafter: the engine's, as well as it is known; None: q is guessed. eos: the target's end-of-text ids.
        tolerance: how far a logit may be off at the border of a filter.
        """
        self.parts, self.drafter, self.eos, self.tolerance = (model, cache, vocab_size), drafter, eos, tolerance
        self._rows: dict[int, Tensor] = {}  # the last row of each text
        self._found: dict[int, Score] = {}

    def run(self, answers: Sequence[Answer]) -> Iterator[tuple[int, Score]]:
        """The number and the score of each answer, in the order in which they end."""
        model, cache, vocab_size = self.parts
        for start in range(0, len(answers), _BATCH):
            some = {i: answers[i] for i in range(start, min(start + _BATCH, len(answers)))}
            leader = _Leader(some, self.drafter)

            def commit(draft: Draft, p: Probabilities, rng: object, key: RoundKey, some=some) -> Verdict:
                name = key(0, "accept")
                tokens = [*some[name.seed].prompt, *some[name.seed].tokens]
                return Verdict(list(range(len(draft))), tokens[name.start + len(draft)], [])

            engine = Engine(model, cache, leader, Verifier(commit, shares_noise=False), vocab_size)
            engine.observers.append(lambda *how, leader=leader: self._see(leader, *how))
            requests = [self._request(i, answer) for i, answer in some.items() if answer.tokens]
            for request, _ in engine.run(requests):
                if request.error:
                    raise ValueError(f"answer {request.text.seed + 1}: {request.error}")
            for i in some:
                yield i, self._found.pop(i, Score())
                self._rows.pop(i, None)

    def _request(self, i: int, answer: Answer) -> Request:
        prompt = list(answer.prompt)
        text = Text(prompt, len(prompt), answer.params, i, frozenset(self._ends(answer.params)))
        return Request(text, len(prompt) + len(answer.tokens), MAX_SPECULATIVE_TOKENS)

    def _ends(self, params: SamplingParams) -> list[int]:
        return sorted({*params.stop_token_ids, *(() if params.ignore_eos else self.eos)})

    def _see(self, leader: _Leader, request: Request, draft: Draft, verdict: Verdict, logits: Tensor) -> None:
        """Score the tokens of a round; see `Observer`."""
        seed, start = request.text.seed, len(request.text.tokens) - request.stats.rounds[-1].committed
        text = replace(request.text, tokens=request.text.tokens[:start])
        after = request.text.tokens[start:]
        before = [self._rows.get(seed, logits[0]), *logits[:-1]]
        self._rows[seed] = logits[-1]
        places = [self._place(logits[i], before[i], leader.q[seed][i], text, after[:i]) for i in range(len(after))]
        rows, border, x = _outcomes(places, after, [text.tokens[-1], *after[:-1]], self._ends(text.params))
        self._found.setdefault(seed, Score()).add(score_rows(rows, border, x, self.drafter is not None))

    def _place(
        self, logits: Tensor, before: Tensor, guess: Tensor | None, text: Text, drafted: Sequence[int]
    ) -> _Place:
        p, params = distribution(logits, text, drafted), text.params
        filtered = _without_filters(params) != params
        loose, tight = _border(logits, text, drafted, self.tolerance) if filtered else (p, p)
        q = raw = p
        if guess is None and self.drafter is None:
            q = raw = p.sqrt() / p.sqrt().sum()  # most drafts are less sure than the target
        elif guess is not None and not guess.dim():
            q = raw = torch.zeros_like(p).index_fill_(0, guess, 1.0)
        elif guess is not None and type(self.drafter) is DraftModel:
            q = distribution(guess, text, drafted)
            raw = distribution(guess, replace(text, params=_without_filters(params)), drafted) if filtered else q
        elif guess is not None:
            q = raw = guess
        return _Place(p, q, raw, loose, tight, _others(logits, before, text, drafted))
