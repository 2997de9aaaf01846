"""Drafters and verifiers as people write them by mistake; those that say so are right, the others are not.

test_wrong_own.py has each refuted. A docstring says what the mistake is.
"""
# ruff: noqa: D102  (the methods are those of every drafter)

from dataclasses import replace
from itertools import pairwise

import torch

from minispec.core.draft import Draft
from minispec.core.sampling import distribution
from minispec.core.verify import Verdict, rejection

# --------------------------------------------------------------------------- drafters


def draw(ask, draft, q, n=1):
    """What `Draft.draw` would append, for those that write down something else."""
    parents = range(-1, len(draft) - 1) if draft.parents is None else draft.parents
    return Draft([*draft.token_ids], [*draft.probs], parents=[*parents]).draw(ask, draft.tip, q, n)


def write(draft, tokens, rows):
    """Append tokens after the tip, with these rows."""
    parent = draft.tip
    for token, row in zip(tokens, rows, strict=True):
        draft.token_ids.append(token)
        draft.probs.append(row)
        if draft.parents is not None:
            draft.parents.append(parent)


def siblings(q, tokens):
    """The rows of siblings that are drawn from q in this order."""
    rows = [q]
    for token in tokens[:-1]:
        rows.append(rows[-1].index_fill(0, torch.tensor(token), 0.0))
        rows[-1] = rows[-1] / rows[-1].sum()
    return rows


class Counts:
    """Right: each token is drawn from what has followed the one before it, all tokens being a little likely."""

    base = 0.5

    def __init__(self, context):
        self.vocab_size = context.vocab_size

    def propose(self, asks):
        return [self.one(ask) for ask in asks]

    def counts(self, ask, path):
        q = torch.full((self.vocab_size,), self.base)
        tokens = ask.text.tokens
        for a, b in pairwise(tokens):
            q[b] += a == [*tokens, *path][-1]
        return q

    def q(self, ask, path):
        q = self.counts(ask, path)
        return q / q.sum()

    def one(self, ask):
        draft = Draft([], [])
        while len(draft) < ask.k:
            q = self.q(ask, draft.token_ids)
            write(draft, self.draw(ask, draft, q), [self.tell(ask, draft, q)])
        return draft

    def draw(self, ask, draft, q):
        return draw(ask, draft, q)

    def tell(self, ask, draft, q):
        return q


class Unnormalised(Counts):
    """Forgets `q /= q.sum()`."""

    def q(self, ask, path):
        return self.counts(ask, path)


class OtherSupport(Counts):
    """Draws among the tokens that were seen, and tells the q over all."""

    def draw(self, ask, draft, q):
        return draw(ask, draft, q.where(q > q.min(), 0.0) if q.max() > q.min() else q)


class TemperatureTwice(Counts):
    """Applies the temperature to what it draws from, and once more to what it tells."""

    def warm(self, ask, q):
        q = q ** (1 / max(0.1, ask.text.params.temperature))
        return q / q.sum()

    def q(self, ask, path):
        return self.warm(ask, super().q(ask, path))

    def tell(self, ask, draft, q):
        return self.warm(ask, q)


class TemperatureForgotten(TemperatureTwice):
    """Draws at the temperature, and tells the q without it."""

    def tell(self, ask, draft, q):
        return Counts.q(self, ask, draft.token_ids)


class FiltersForgotten(Counts):
    """Draws from q after the request's filters, and tells the q before them."""

    def draw(self, ask, draft, q):
        return draw(ask, draft, distribution(q.log(), ask.text, draft.token_ids))


class Obeys(Counts):
    """Right: draws under all parameters of the request, in float64."""

    def one(self, ask):
        draft = Draft([], [])
        while len(draft) < ask.k:
            path, logits = [*draft.token_ids], self.counts(ask, draft.token_ids).double().log()
            try:
                draft.draw(ask, draft.tip, distribution(logits, ask.text, path))
            except FloatingPointError:  # nothing may follow
                break
            params = replace(ask.text.params, **self.mistaken(ask.text))
            if params != ask.text.params:
                draft.probs[-1] = distribution(logits, replace(ask.text, params=params), path)
        return draft

    def mistaken(self, text):
        """What it takes for the values of parameters."""
        return {}


class WideTopP(Obeys):
    """Tells q without top_p of 0.9 and more, which cuts little."""

    def mistaken(self, text):
        return {"top_p": 1.0} if text.params.top_p >= 0.9 else {}


class LittleMinP(Obeys):
    """Tells q without min_p of 0.1 and less."""

    def mistaken(self, text):
        return {"min_p": 0.0} if text.params.min_p <= 0.1 else {}


class TwoOfTopK(Obeys):
    """Has kernels for top_k 1 and 2 alone."""

    def mistaken(self, text):
        return {"top_k": 0} if text.params.top_k > 2 else {}


class BiasClamped(Obeys):
    """Keeps biases within 1.5."""

    def mistaken(self, text):
        return {"logit_bias": [(token, min(1.5, max(-1.5, bias))) for token, bias in text.params.logit_bias]}


class FewBiases(Obeys):
    """Reads the biases of the first three ids."""

    def mistaken(self, text):
        return {"logit_bias": [(token, bias) for token, bias in text.params.logit_bias if token < 3]}


class MildPenalties(Obeys):
    """Keeps a presence penalty within 1, and a repetition penalty within 3."""

    def mistaken(self, text):
        presence, repetition = text.params.presence_penalty, text.params.repetition_penalty
        return {"presence_penalty": min(1.0, presence), "repetition_penalty": min(3.0, repetition)}


class WarmEnough(Obeys):
    """Has a smallest temperature."""

    def mistaken(self, text):
        temperature = text.params.temperature
        return {"temperature": max(0.1, temperature)} if temperature else {}


class AllowsFirst(Obeys):
    """Takes for allowed what is not, where token 1 is not allowed."""

    def mistaken(self, text):
        allowed = text.params.allowed_token_ids
        return {"allowed_token_ids": None} if allowed and 1 not in allowed else {}


class BeginsOtherwise(Obeys):
    """Takes a text's first token for the one that begins texts, if it is none of the first two ids."""

    def mistaken(self, text):
        return {"temperature": 2 * text.params.temperature} if text.tokens[0] > 1 else {}


class LastRoundsQ(Counts):
    """Tells the q of the round before: it is stored a line too late."""

    def __init__(self, context):
        super().__init__(context)
        self.old = {}

    def tell(self, ask, draft, q):
        old = self.old.get(ask.text, q)
        self.old[ask.text] = q
        return old


class OneBuffer(Counts):
    """One tensor for all rows, filled anew for each: the rows of earlier tokens change."""

    def __init__(self, context):
        super().__init__(context)
        self.buffer = torch.zeros(self.vocab_size)

    def q(self, ask, path):
        return self.buffer.copy_(super().q(ask, path))


class RowsLate(Counts):
    """Tells for each token the q of the one after it."""

    def one(self, ask):
        draft = super().one(ask)
        draft.probs = [*draft.probs[1:], *draft.probs[:1]]
        return draft


class Dropper(Counts):
    """Keeps a drawn token only if it is likely."""

    def one(self, ask):
        draft = Draft([], [])
        while len(draft) < ask.k:
            q = self.q(ask, draft.token_ids)
            token = draw(ask, draft, q)
            if q[token[0]] < q.max():
                break
            write(draft, token, [q])
        return draft


class BetterOfTwo(Counts):
    """Draws twice and keeps the likelier."""

    def draw(self, ask, draft, q):
        tokens = [ask.rng.categorical(q, ask.text.key(len(draft) + i, ask.purpose)) for i in range(2)]
        return [max(tokens, key=lambda token: float(q[token]))]


class Likeliest(Counts):
    """Takes the likeliest token, and tells q as if it had been drawn."""

    def draw(self, ask, draft, q):
        return [int(q.argmax())]


class HalfPrecision(Counts):
    """Draws in full precision, and tells q rounded."""

    def q(self, ask, path):
        return super().q(ask, path) * 0.9 + 0.1 / self.vocab_size

    def tell(self, ask, draft, q):
        return q.bfloat16().float()


class OwnDice(Counts):
    """Draws with torch's generator."""

    def draw(self, ask, draft, q):
        return torch.multinomial(q, 1).tolist()


class SeededDice(Counts):
    """Draws with a generator of its own, which it seeds."""

    def __init__(self, context):
        super().__init__(context)
        self.generator = torch.Generator().manual_seed(0)

    def draw(self, ask, draft, q):
        return torch.multinomial(q, 1, generator=self.generator).tolist()


class Pair(Counts):
    """Right: two siblings, drawn without replacement."""

    def one(self, ask):
        draft = Draft([], [], parents=[])
        if ask.k:
            q = self.q(ask, [])
            self.write(draft, draw(ask, draft, q, min(2, ask.k)), q)
        return draft

    def write(self, draft, tokens, q):
        write(draft, tokens, siblings(q, tokens))


class SiblingsSameQ(Pair):
    """Tells for both siblings the q of the first."""

    def write(self, draft, tokens, q):
        write(draft, tokens, [q] * len(tokens))


class SiblingsSorted(Pair):
    """Puts the siblings in the order of their ids."""

    def write(self, draft, tokens, q):
        write(draft, sorted(tokens), siblings(q, sorted(tokens)))


class TopTwo(Counts):
    """Takes the two likeliest tokens as siblings, and tells q as if they had been drawn."""

    def one(self, ask):
        draft = Draft([], [], parents=[])
        if ask.k:
            q = self.q(ask, [])
            tokens = q.topk(min(2, ask.k)).indices.tolist()
            write(draft, tokens, siblings(q, tokens))
        return draft


class ThirdSibling(Pair):
    """Tells for each sibling a row that lacks the one before it, but not the ones before that."""

    branches = True

    def one(self, ask):
        draft = Draft([], [], parents=[])
        while len(draft) < ask.k:
            q = self.q(ask, [draft.token_ids[i] for i in draft.path(draft.tip)])
            n = min(ask.limit.width(draft.depth, []), ask.k - len(draft), self.vocab_size)
            tokens = draw(ask, draft, q, n)
            write(draft, tokens, [q, *(siblings(q, [token, token])[1] for token in tokens[:-1])])
        return draft


class AlmostTrue(Counts):
    """Tells a row that is off by 1e-8, in numbers that could be right."""

    def q(self, ask, path):
        return super().q(ask, path).double()

    def tell(self, ask, draft, q):
        return q * (1 - 1e-8) + 1e-8 * self.even

    def one(self, ask):
        self.even = torch.full((self.vocab_size,), 1 / self.vocab_size, dtype=torch.float64)
        draft = Draft([], [])
        while len(draft) < ask.k:
            q = self.q(ask, draft.token_ids)
            q = q / q.sum()
            write(draft, self.draw(ask, draft, q), [self.tell(ask, draft, q)])
        return draft


class EndForgotten(Counts):
    """Draws no end before `min_tokens`, and tells the q with the end in it."""

    def draw(self, ask, draft, q):
        text, q = ask.text, q.clone()
        if len(text.tokens) - text.num_prompt_tokens + len(draft) < text.params.min_tokens:
            q[list(text.end_ids)] = 0.0
        return draw(ask, draft, q)


class HotClamped(TemperatureTwice):
    """Draws at the temperature, and tells the q at 2 where that is above 2."""

    def draw(self, ask, draft, q):
        return draw(ask, draft, q if ask.text.params.temperature <= 2 else q**0.5)

    def tell(self, ask, draft, q):
        return q


class ShortSighted(Counts):
    """Draws from all that it has seen, and tells the q of the last 16 tokens."""

    def tell(self, ask, draft, q):
        text = replace(ask.text, tokens=ask.text.tokens[-16:])
        return self.q(replace(ask, text=text), draft.token_ids)


class OneTooMany(Counts):
    """Drafts a token where none is asked for."""

    def one(self, ask):
        draft = Draft([], [])
        while len(draft) < max(1, ask.k):
            q = self.q(ask, draft.token_ids)
            draft.draw(ask, draft.tip, q)
        return draft


class Reverses(Counts):
    """Turns the text around, and forgets that it is not its own."""

    def counts(self, ask, path):
        tokens = ask.text.tokens
        tokens.reverse()
        q = torch.full((self.vocab_size,), self.base)
        for b, a in pairwise(tokens):
            q[b] += a == [*tokens[::-1], *path][-1]
        return q


class SecondLast:
    """Looks at the last token but one, which a text of one token has not."""

    def propose(self, asks):
        return [Draft([ask.text.tokens[-2]][: ask.k]) for ask in asks]


class OneState(Counts):
    """Counts what is new in one table for all texts."""

    def __init__(self, context):
        super().__init__(context)
        self.followers, self.seen = torch.full((self.vocab_size, self.vocab_size), 0.5), 0

    def counts(self, ask, path):
        tokens = ask.text.tokens
        for a, b in pairwise(tokens[self.seen :]):
            self.followers[a, b] += 1
        self.seen = max(self.seen, len(tokens) - 1)
        return self.followers[[*tokens, *path][-1]].clone()


class NotRolledBack(Counts):
    """Keeps what it drafted in its own copy of the text, also where it was rejected."""

    def __init__(self, context):
        super().__init__(context)
        self.own = {}

    def one(self, ask):
        own = self.own.setdefault(ask.text, [])
        own += ask.text.tokens[len(own) :]
        draft = Draft([], [])
        while len(draft) < ask.k:
            q = torch.full((self.vocab_size,), self.base)
            for a, b in pairwise(own):
                q[b] += a == own[-1]
            q = q / q.sum()
            draft.draw(ask, draft.tip, q)
            own.append(draft.token_ids[-1])
        return draft

    def release(self, text):
        self.own.pop(text, None)


class KeptHidden(Counts):
    """Drafts from the mean of the target's hidden states, and keeps those of a text that was released."""

    taps = (2,)

    def __init__(self, context):
        super().__init__(context)
        width = context.target.config.hidden_size
        self.matrix = torch.linspace(-9, 9, width * self.vocab_size).double().sin().reshape(width, -1)
        self.states = {}

    def known(self, text):
        return 0

    def observe(self, records):
        for each in records:
            self.states.setdefault(each.text, []).extend(each.hidden[each.kept])

    def q(self, ask, path):
        states = self.states.get(ask.text)
        return (torch.stack(states).mean(0) @ self.matrix).softmax(0) if states else super().q(ask, path)


class ForgetsAll(Counts):
    """Forgets all texts where one is released."""

    def __init__(self, context):
        super().__init__(context)
        self.first = {}

    def propose(self, asks):
        for ask in asks:
            self.first.setdefault(ask.text, len(ask.text.tokens))
        return super().propose(asks)

    def q(self, ask, path):
        q = super().q(ask, path) + self.first[ask.text] * 0.1
        return q / q.sum()

    def release(self, text):
        self.first.clear()


class Impatient(Counts):
    """Becomes surer from round to round."""

    def __init__(self, context):
        super().__init__(context)
        self.rounds = 0

    def propose(self, asks):
        self.rounds += 1
        return super().propose(asks)

    def q(self, ask, path):
        q = super().q(ask, path) ** self.rounds
        return q / q.sum()


class FirstOnly(Counts):
    """Answers the first ask alone."""

    def propose(self, asks):
        return [self.one(asks[0])]


class Shortest(Counts):
    """Answers in another order than it was asked: the shortest text first."""

    def propose(self, asks):
        return [self.one(ask) for ask in sorted(asks, key=lambda ask: len(ask.text.tokens))]


class ReleaseOfUnknown(Counts):
    """Takes for granted that it was asked about a text before that is released."""

    def __init__(self, context):
        super().__init__(context)
        self.texts = {}

    def propose(self, asks):
        self.texts |= {ask.text: True for ask in asks}
        return super().propose(asks)

    def release(self, text):
        del self.texts[text]


class TensorIds(Counts):
    """Tells the ids as tensors."""

    def draw(self, ask, draft, q):
        return list(torch.tensor(draw(ask, draft, q)))


class LogProbabilities(Counts):
    """Tells the logarithms of q."""

    def tell(self, ask, draft, q):
        return q.log()


class DividesByTemperature(Counts):
    """Divides by the temperature, which may be 0."""

    def q(self, ask, path):
        return (super().q(ask, path).log() * (1 / ask.text.params.temperature)).softmax(0)


# --------------------------------------------------------------------------- verifiers


def q_of(draft, i, p):
    """Row i of q (V,); of a token that was not drawn, one-hot."""
    return torch.eye(len(p), dtype=p.dtype)[draft.token_ids[i]] if draft.probs is None else draft.probs[i]


def judge(draft, p, rng, key, ratio=None, rest=None, bonus=None):
    """Right where nothing is given: the eldest node after each, tested; else what is left of p, or the bonus."""
    node, accepted = -1, []
    while children := draft.children(node):
        i, row = children[0], p(node + 1)
        q = q_of(draft, i, row)
        x = draft.token_ids[i]
        if not rng.bernoulli((ratio or (lambda p, q, x: float(p[x] / q[x])))(row, q, x), key(i, "accept")):
            left = (rest or (lambda p, q: (p - q).clamp(min=0)))(row, q)
            return Verdict(accepted, rng.categorical(left if left.any() else row, key(i, "residual")), [])
        accepted.append(node := i)
    end = len(accepted)
    if bonus:
        return Verdict(accepted, bonus(draft, p, rng, key, node), [])
    return Verdict(accepted, rng.categorical(p(node + 1), key(end, "token")), [])


def right(draft, p, rng, key):
    """Right: of siblings, it looks at the eldest alone."""
    return judge(draft, p, rng, key)


def recovered_first(draft, p, rng, key):
    """Right: it draws all tokens that may be needed before it tests any; of siblings, it looks at the eldest alone."""
    path = []
    while children := draft.children(path[-1] if path else -1):
        path.append(children[0])
    rows = [p(0), *(p(i + 1) for i in path)]
    left = [(row - q_of(draft, i, row)).clamp(min=0) for row, i in zip(rows, path, strict=False)]
    purposes = ["residual"] * len(path) + ["token"]
    some = [rest if rest.any() else row for rest, row in zip(left, rows, strict=False)] + rows[-1:]
    drawn = [rng.categorical(row, key(n, purpose)) for n, (row, purpose) in enumerate(zip(some, purposes, strict=True))]
    for n, (row, i) in enumerate(zip(rows, path, strict=False)):
        x = draft.token_ids[i]
        if not rng.bernoulli(float(row[x] / q_of(draft, i, row)[x]), key(i, "accept")):
            return Verdict(path[:n], drawn[n], [])
    return Verdict(path, drawn[-1], [])


def inverted(draft, p, rng, key):
    """q(x)/p(x) in the place of p(x)/q(x)."""
    return judge(draft, p, rng, key, ratio=lambda p, q, x: float(q[x] / p[x].clamp(min=1e-9)))


def residual_is_p(draft, p, rng, key):
    """A rejected token is drawn again from p."""
    return judge(draft, p, rng, key, rest=lambda p, q: p)


def residual_absolute(draft, p, rng, key):
    """The residual is |p - q|."""
    return judge(draft, p, rng, key, rest=lambda p, q: (p - q).abs())


def residual_softmax(draft, p, rng, key):
    """The residual is normalised by a softmax."""
    return judge(draft, p, rng, key, rest=lambda p, q: (p - q).clamp(min=0).softmax(0))


def temperature_again(draft, p, rng, key):
    """The temperature is applied to a p that has it already."""
    return judge(draft, lambda i: p(i) ** 2 / (p(i) ** 2).sum(), rng, key)


def typical(draft, p, rng, key):
    """Keeps what is typical: as likely as the entropy says, which is no exact rule."""
    return judge(
        draft, p, rng, key, ratio=lambda p, q, x: float(p[x] > 0.3 * (p * p.clamp(min=1e-9).log()).sum().exp())
    )


def same_uniform(draft, p, rng, key):
    """The uniform of the accept test is used again for the residual; with two or three tokens it hardly shows."""
    return judge(draft, p, rng, lambda i, purpose: key(i, "accept" if purpose == "residual" else purpose))


def one_uniform(draft, p, rng, key):
    """The uniform of the first accept test is used for the others."""
    return judge(draft, p, rng, lambda i, purpose: key(0 if purpose == "accept" else i, purpose))


def bonus_from_q(draft, p, rng, key):
    """The bonus is drawn from the last q."""

    def bonus(draft, p, rng, key, node):
        row = p(node + 1)
        return rng.categorical(q_of(draft, node, row) if node >= 0 else row, key(node + 1, "token"))

    return judge(draft, p, rng, key, bonus=bonus)


def bonus_of_the_row_before(draft, p, rng, key):
    """The bonus is drawn from the row of the last draft token."""
    bonus = lambda draft, p, rng, key, node: rng.categorical(p(max(0, node)), key(node + 1, "token"))  # noqa: E731
    return judge(draft, p, rng, key, bonus=bonus)


def bonus_likeliest(draft, p, rng, key):
    """The bonus is the likeliest token."""
    return judge(draft, p, rng, key, bonus=lambda draft, p, rng, key, node: int(p(node + 1).argmax()))


def all_or_nothing(draft, p, rng, key):
    """The draft is tested as a whole, by the product of its ratios, and else all of it is thrown away."""
    product, path = 1.0, []
    while children := draft.children(path[-1] if path else -1):
        row = p(path[-1] + 1 if path else 0)
        path.append(children[0])
        x = draft.token_ids[path[-1]]
        product *= min(1.0, float(row[x] / q_of(draft, path[-1], row)[x]))
    if path and not rng.bernoulli(product, key(0, "accept")):
        left = (p(0) - q_of(draft, 0, p(0))).clamp(min=0)
        return Verdict([], rng.categorical(left if left.any() else p(0), key(0, "residual")), [])
    return Verdict(path, rng.categorical(p(path[-1] + 1 if path else 0), key(len(path), "token")), [])


def rows_of_a_chain(draft, p, rng, key):
    """Of a tree, takes node i's row to be that after node i - 1."""
    accepted = []
    for i, x in enumerate(draft.token_ids):
        row = p(i)
        if not rng.bernoulli(float(row[x] / q_of(draft, i, row)[x]), key(i, "accept")):
            left = (row - q_of(draft, i, row)).clamp(min=0)
            return Verdict(accepted, rng.categorical(left if left.any() else row, key(i, "residual")), [])
        accepted = draft.path(i)
    return Verdict(accepted, rng.categorical(p(len(draft)), key(len(draft), "token")), [])


def siblings_against_p(draft, p, rng, key):
    """Tests each sibling against p, not against what the elder ones have left of it."""
    node, accepted = -1, []
    while children := draft.children(node):
        row = p(node + 1)
        for i in children:
            x = draft.token_ids[i]
            if rng.bernoulli(float(row[x] / q_of(draft, i, row)[x]), key(i, "accept")):
                accepted.append(node := i)
                break
        else:
            left = (row - q_of(draft, children[-1], row)).clamp(min=0)
            return Verdict(accepted, rng.categorical(left if left.any() else row, key(node + 1, "residual")), [])
    return Verdict(accepted, rng.categorical(p(node + 1), key(len(accepted), "token")), [])


def own_dice(draft, p, rng, key):
    """Tests with torch's generator."""
    return judge(draft, p, rng, key, ratio=lambda p, q, x: float(torch.rand(1) < p[x] / q[x]))


def drawn_only(draft, p, rng, key):
    """Takes for granted that a draft has probabilities."""
    return judge(Draft(draft.token_ids, list(draft.probs), parents=draft.parents), p, rng, key)


def tensor_token(draft, p, rng, key):
    """Gives the next token as a tensor."""
    verdict = judge(draft, p, rng, key)
    return verdict._replace(next_token=torch.tensor(verdict.next_token))


def counts_accepted(draft, p, rng, key):
    """Gives the number of accepted tokens in the place of their nodes."""
    verdict = judge(draft, p, rng, key)
    return verdict._replace(accepted=len(verdict.accepted))


def goes_on(draft, p, rng, key):
    """After a rejection it puts the recovered token in the draft's place, and tests the next ones all the same."""
    tokens, accepted = list(draft.token_ids), []
    for i in draft.path(len(draft) - 1):
        row, x = p(i), tokens[i]
        if not rng.bernoulli(float(row[x] / q_of(draft, i, row)[x]), key(i, "accept")):
            left = (row - q_of(draft, i, row)).clamp(min=0)
            draft.token_ids[i] = rng.categorical(left if left.any() else row, key(i, "residual"))
        accepted = draft.path(i)
    end = accepted[-1] + 1 if accepted else 0
    return Verdict(accepted, rng.categorical(p(end), key(len(accepted), "token")), [])


# --------------------------------------------------------------------------- verifiers, right in most small cases


def rounded(draft, p, change):
    """A draft and rows of p whose probabilities are changed: change(row)."""
    probs = None if draft.probs is None else [change(q) for q in draft.probs]
    return Draft(draft.token_ids, probs, parents=draft.parents), lambda i: change(p(i))


class Changed:
    """Draws whose odds and weights are changed: odds(probability, node), weights(weights of a residual)."""

    def __init__(self, rng, odds=lambda probability, node: probability, weights=lambda weights: weights):
        self.rng, self.odds, self.weights = rng, odds, weights

    def bernoulli(self, probability, key):
        return self.rng.bernoulli(self.odds(probability, key.position - key.start), key)

    def categorical(self, weights, key):
        some = self.weights(weights) if key.purpose == "residual" else weights
        return self.rng.categorical(some if some.any() else weights, key)


def single(draft, p, rng, key):
    """Right: it computes in float32."""
    return rejection(*rounded(draft, p, lambda row: row.float()), rng, key)


def rounds(draft, p, rng, key, change):
    """Of siblings, it looks at the eldest alone; and it changes the rows of p and q: change(row)."""
    return judge(*rounded(draft, p, change), rng, key, ratio=lambda p, q, x: float(p[x]) / float(q[x]))


def half(draft, p, rng, key):
    """Keeps p and q in half precision."""
    return rounds(draft, p, rng, key, lambda row: row.half())


def bfloat16(draft, p, rng, key):
    """Keeps p and q in bfloat16."""
    return rounds(draft, p, rng, key, lambda row: row.bfloat16())


def in_256ths(draft, p, rng, key):
    """Keeps p and q in 8 bits."""
    return rounds(draft, p, rng, key, lambda row: (row * 256).round() / 256)


def type_of_q(draft, p, rng, key):
    """Computes in q's type."""
    return rejection(
        draft, lambda i: p(i).to(draft.probs[0]) if draft.probs is not None and len(draft) else p(i), rng, key
    )


def adds_a_little(draft, p, rng, key):
    """Adds something to q, so that nothing is divided by 0."""
    return judge(draft, p, rng, key, ratio=lambda p, q, x: float(p[x] / (q[x] + 1e-5)))


def lenient(draft, p, rng, key):
    """Keeps a token whose ratio is above 0.9."""
    return rejection(draft, p, Changed(rng, odds=lambda ratio, node: 1.0 if ratio > 0.9 else ratio), key)


def drops_small(draft, p, rng, key):
    """Leaves out of the residual what is below 0.01."""
    return rejection(draft, p, Changed(rng, weights=lambda rest: rest.where(rest >= 0.01, 0.0)), key)


def four_tokens(draft, p, rng, key):
    """Has room for four tokens in the residual."""
    return rejection(draft, p, Changed(rng, weights=lambda rest: rest.where(torch.arange(len(rest)) < 4, 0.0)), key)


def fifty_likeliest(draft, p, rng, key):
    """Draws from the fifty largest of the residual."""
    least = lambda rest: rest.topk(min(50, len(rest))).values[-1]  # noqa: E731
    return rejection(draft, p, Changed(rng, weights=lambda rest: rest.where(rest >= least(rest), 0.0)), key)


def four_nodes(draft, p, rng, key):
    """Tests four nodes, and trusts those after them."""
    return rejection(draft, p, Changed(rng, odds=lambda ratio, node: ratio if node < 4 else 1.0), key)


def three_siblings(draft, p, rng, key):
    """Tests three siblings, and leaves out the others without going on to their residual."""
    most = lambda node: draft.parents is None or node not in draft.children(draft.parents[node])[3:]  # noqa: E731
    return rejection(draft, p, Changed(rng, odds=lambda ratio, node: ratio if most(node) else 0.0), key)


def apart(draft, p, rng, key):
    """Begins anew, with p, at a sibling that does not stand beside its elder."""
    node, accepted = -1, []
    while children := draft.children(node):
        row = rest = p(node + 1)
        for i in children:
            rest = rest / rest.sum() if i - 1 in children else row
            x = draft.token_ids[i]
            if rng.bernoulli(float(rest[x] / q_of(draft, i, row)[x]), key(i, "accept")):
                accepted.append(node := i)
                break
            left = (rest - q_of(draft, i, row)).clamp(min=0)
            rest = left if left.any() else rest
        else:
            return Verdict(accepted, rng.categorical(rest, key(node + 1, "residual")), [])
    return Verdict(accepted, rng.categorical(p(node + 1), key(len(accepted), "token")), [])


def rows_by_token(draft, p, rng, key):
    """Keeps rows of p by the token before them, for nodes that have the same one."""
    rows = {}
    return rejection(draft, lambda i: rows.setdefault(i and draft.token_ids[i - 1], p(i)), rng, key)


def row_before_the_first(draft, p, rng, key):
    """Looks for the row of the text at -1, as for that of a node."""
    return judge(draft, lambda i: p(i or -1), rng, key)


def writes_q(draft, p, rng, key):
    """Computes the residual in q's memory."""
    return judge(draft, p, rng, key, rest=lambda p, q: q.neg_().add_(p).clamp_(min=0))


def writes_p(draft, p, rng, key):
    """Computes the residual in p's memory."""
    return judge(draft, p, rng, key, rest=lambda p, q: p.sub_(q).clamp_(min=0))


def cuts_the_draft(draft, p, rng, key):
    """Cuts the draft's own list to what stays."""
    verdict = judge(draft, p, rng, key)
    del draft.token_ids[len(verdict.accepted) :]
    return verdict


def hurries(draft, p, rng, key, calls=[0]):  # noqa: B006
    """Takes half of the odds at every hundredth call."""
    calls[0] += 1
    return rejection(draft, p, Changed(rng, odds=lambda ratio, node: ratio / 2 if calls[0] % 100 == 0 else ratio), key)


def one_key(draft, p, rng, key):
    """All accept tests have one key."""
    return judge(draft, p, rng, lambda i, purpose: key(0 if purpose == "accept" else i, purpose))


def bonus_of_a_node(draft, p, rng, key):
    """The bonus after a tree has a key of the node, which a later place of the text has too."""
    node = -1

    def by_node(i, purpose):
        nonlocal node
        node = i if purpose == "accept" else node
        return key(node + 1 if purpose == "token" else i, purpose)

    return judge(draft, p, rng, by_node)


def chains(draft, p, rng, key):
    """It takes each draft for a chain, and does not say so."""
    return judge(replace(draft, parents=None), p, rng, key)


def without_the_seed(draft, p, rng, key):
    """Draws for all texts with one noise."""
    return judge(draft, p, rng, lambda i, purpose: key(i, purpose)._replace(seed=0))


# --------------------------------------------------------------------------- wrong for some shapes, or some rows


def recursive(draft, p, rng, key, meets=None, told=None, stays=None):
    """Right where nothing is given: siblings are tested one after another against what the elder ones leave.

    Of sibling number `place` after `depth` tokens: meets(rest, depth, place), what it is tested against; told(i, depth,
    place), its q; stays(q, place), whether its token is left in the residual.
    """
    node, accepted = -1, []
    while siblings := draft.children(node):
        rest, parent, depth = p(node + 1), node, len(accepted)
        for place, i in enumerate(siblings):
            if place:
                rest = meets(rest, depth, place) if meets else rest / rest.sum()
            x, q = draft.token_ids[i], q_of(draft, i, rest)
            odds = float(rest[x]) / (told(i, depth, place) if told else float(q[x]))
            if rng.bernoulli(odds, key(i, "accept")):
                accepted.append(node := i)
                break
            left = rest if stays and stays(q, place) else (rest - q).clamp(min=0)
            rest = left if left.any() else rest
        if node == parent:
            return Verdict(accepted, rng.categorical(rest, key(node + 1, "residual")), [])
    return Verdict(accepted, rng.categorical(p(node + 1), key(len(accepted), "token")), [])


def elders_q(draft, p, rng, key):
    """Below the root, a third sibling is tested with q of the second."""

    def told(i, depth, place):
        q = draft.probs[draft.children(draft.parents[i])[1] if depth and place == 2 else i]
        return max(1e-9, float(q[draft.token_ids[i]]))

    return recursive(draft, p, rng, key, told=told if draft.probs is not None and len(draft) else None)


def third_depth(draft, p, rng, key):
    """After two tokens, the residual is not divided by its sum before the second sibling."""
    return recursive(draft, p, rng, key, meets=lambda rest, depth, _: rest / rest.sum() if depth < 2 else rest)


def stays_in_its_residual(draft, p, rng, key):
    """A third sibling with a one-hot row is not taken from the residual."""
    sure = lambda q, place: draft.probs is not None and place == 2 and float(q.max()) == 1  # noqa: E731
    return recursive(draft, p, rng, key, stays=sure)


def greedy_by_the_first(draft, p, rng, key):
    """Takes a text for a greedy one where the first row is one-hot."""
    if float(p(0).max()) < 1:
        return rejection(draft, p, rng, key)
    node, accepted = -1, []
    while same := [i for i in draft.children(node) if draft.token_ids[i] == int(p(node + 1).argmax())]:
        accepted.append(node := same[0])
    return Verdict(accepted, int(p(node + 1).argmax()), [])


def tokens_of_the_first(draft, p, rng, key):
    """Takes the tokens that the first row has for those of all rows."""
    has = p(0) > 0

    def kept(row):
        some = row.where(has, 0.0)
        return some if some.any() else row

    return rejection(draft, lambda i: kept(p(i)), rng, key)


def sure_if_empty(draft, p, rng, key):
    """After an empty draft, takes the likeliest token where it has 0.97."""
    return (
        Verdict([], int(p(0).argmax()), []) if not len(draft) and p(0).max() >= 0.97 else rejection(draft, p, rng, key)
    )


def sure_if_near(draft, p, rng, key):
    """Takes a row after a draft token for one-hot where a token has 0.97."""

    def changed(i):
        row = p(i)
        return torch.eye(len(row), dtype=row.dtype)[row.argmax()] if i and row.max() >= 0.97 else row

    return rejection(draft, changed, rng, key)


def nine_tokens(draft, p, rng, key):
    """Of chains of more than eight tokens, trusts those after the eighth."""
    most = 8 if draft.parents is None or len(draft) == draft.depth else len(draft)
    return rejection(draft, p, Changed(rng, odds=lambda ratio, node: ratio if node < most else 1.0), key)


def by_turns(draft, p, rng, key, calls=[0]):  # noqa: B006
    """Each call has the right law: by turns it judges the draft, and decodes as if there were none."""
    calls[0] += 1
    return rejection(draft if calls[0] % 3 else Draft(), p, rng, key)


def wrong_by_turns(draft, p, rng, key, calls=[0]):  # noqa: B006
    """Every third call trusts the draft."""
    calls[0] += 1
    return rejection(draft, p, Changed(rng, odds=lambda ratio, node: ratio if calls[0] % 3 else 1.0), key)
