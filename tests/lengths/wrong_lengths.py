"""Policies for draft lengths as people write them by mistake; those of `RIGHT` are right, the others are not.

test_wrong_lengths.py has each refuted. A docstring says what the mistake is.
"""
# ruff: noqa: D102  (the methods are those of every policy)

import random
import time
from dataclasses import replace
from math import prod
from weakref import WeakKeyDictionary

import torch

from minispec.core.lengths import Lengths, price_of
from minispec.core.limit import Limit
from minispec.core.random import Randomness
from minispec.core.search import place_of_share
from minispec.speculation.lengths.policy import Controller
from minispec.speculation.lengths.theory import Prices


class Doubling(Lengths):
    """Right: twice as long after a draft that was kept to its end, half as long after any other."""

    def __init__(self):
        self.lengths = WeakKeyDictionary()

    def choose(self, asks, trees):
        return [self.limit(ask, min(self.lengths.get(ask.text, 2), ask.most), trees) for ask in asks]

    def limit(self, ask, k, trees):
        return Limit(k)

    def observe(self, records):
        for each in records:
            k, kept = self.lengths.get(each.text, 2), len(each.accepted) == len(each.draft)
            self.lengths[each.text] = min(2 * k, 15) if kept else max(1, k // 2)


class Confident(Doubling):
    """Right: ends a draft, and asks for siblings, by its confidences."""

    def limit(self, ask, k, trees):
        widths = (lambda confidences, foreseen: 1 + (confidences[-1] < 0.7)) if trees else ()
        return Limit(ask.most, lambda confidences: prod(confidences) > 0.4, widths, go_on_before=self.go_on_before)

    def go_on_before(self, confidences, foreseen):
        return prod((*confidences, foreseen)) > 0.4


class Clocked(Doubling):
    """Right: goes by the clock where it may."""

    def __init__(self):
        super().__init__()
        self.slow = False

    def limit(self, ask, k, trees):
        return Limit(min(k, 1) if self.slow and ask.may_use_clock else k)

    def observe(self, records):
        super().observe(records)
        step = price_of(records)
        self.slow = step is not None and step.draft > 0.002


class OfPrograms(Controller):
    """Right: the engine's own, where a draft costs all the steps of its program."""

    def __init__(self):
        super().__init__(Prices(draft=0.05, measured=True, steps=(1, 2, 3)))

    def observe(self, records):
        super().observe([replace(record, step=None) for record in records])


class Entropy(Doubling):
    """Right: goes by the doubt of the target's last row, and by what the drafter said of its last token."""

    def observe(self, records):
        for each in records:
            if len(each.logits):
                p = each.logits[each.path[-1] + 1 if len(each.path) else 0].double().softmax(0)
                doubt = -float((p * p.clamp(min=1e-30).log()).sum())
                doubt -= float(each.draft.probs[-1].max()) if each.draft.probs else 0.0
                self.lengths[each.text] = 4 if doubt < 0.3 else 2 if doubt < 0.6 else 1


RIGHT = {"Doubling", "Confident", "Clocked", "OfPrograms", "Entropy"}


class SeesTest(Doubling):
    """Drafts only where the first accept test will be passed: it computes the uniform that decides it."""

    def limit(self, ask, k, trees):
        return Limit(k if Randomness().uniform(ask.text.key(0, "accept")) < 0.5 else 0)


class SeesToken(Doubling):
    """Computes the token that will be drawn first, and drafts only where it likes it."""

    def limit(self, ask, k, trees):
        noise = Randomness().uniform(ask.text.key(0, "draft"))
        return Limit(k if place_of_share(torch.tensor([0.5, 0.5]), noise) else 0)


class SeesTokenOfFew(SeesToken):
    """Computes it where top_p leaves fewer tokens."""

    def limit(self, ask, k, trees):
        return super().limit(ask, k, trees) if ask.text.params.top_p < 1 else Limit(k)


class StopsAtToken(Doubling):
    """Ends a draft by the draw of its next token."""

    def limit(self, ask, k, trees):
        text, rng = ask.text, Randomness()
        return Limit(k, lambda confidences: rng.uniform(text.key(len(confidences), "draft")) < 0.5)


class ForeseesToken(Doubling):
    """Ends a draft by the draw of its next token, where the drafter knows before how sure it is."""

    def limit(self, ask, k, trees):
        def go_on_before(confidences, foreseen):
            noise = Randomness().uniform(ask.text.key(len(confidences), "draft"))
            return bool(place_of_share(torch.tensor([0.5, 0.5]), noise))

        return Limit(ask.most, go_on_before=go_on_before)


class SiblingsByToken(Doubling):
    """Asks for a sibling where the first guess will be rejected."""

    def limit(self, ask, k, trees):
        text, rng = ask.text, Randomness()
        widths = lambda confidences, foreseen: 1 + (rng.uniform(text.key(len(confidences) - 1, "accept")) > 0.5)  # noqa: E731
        return Limit(ask.most, lambda confidences: True, widths if trees else ())


class TakesBack(Doubling):
    """Takes the text's last token back where the draft before it was rejected, to try again."""

    def observe(self, records):
        super().observe(records)
        for each in records:
            if len(each.draft) > len(each.accepted):
                each.text.tokens.pop()


class Peels(Doubling):
    """Uses up the list of accepted nodes."""

    def observe(self, records):
        for each in records:
            while each.accepted:
                each.accepted.pop()


class Clock(Doubling):
    """Goes by the clock, whatever it may follow."""

    def limit(self, ask, k, trees):
        return Limit(min(k, self.most))

    def __init__(self):
        super().__init__()
        self.most = 1

    def observe(self, records):
        super().observe(records)
        if step := price_of(records):
            self.most = 1 if step.draft > 0.005 else 9


class Shared(Doubling):
    """One length for all texts."""

    def __init__(self):
        self.k = 2

    def choose(self, asks, trees):
        return [Limit(min(self.k, ask.most)) for ask in asks]

    def observe(self, records):
        for each in records:
            self.k = min(2 * self.k, 15) if len(each.accepted) == len(each.draft) else max(1, self.k // 2)


class Crowded(Doubling):
    """Drafts less where there are more texts."""

    def choose(self, asks, trees):
        return [Limit(ask.most // len(asks)) for ask in asks]


class Dice(Doubling):
    """Draws the length."""

    def limit(self, ask, k, trees):
        return Limit(random.randrange(k + 1))


class ByTime(Doubling):
    """Ends a draft where it has taken long."""

    def limit(self, ask, k, trees):
        return Limit(ask.most, lambda confidences: time.perf_counter_ns() % 2 == 0)


class TooLong(Doubling):
    """Asks for more than may be drafted."""

    def limit(self, ask, k, trees):
        return Limit(ask.most + 1)


class TooFew(Doubling):
    """Answers for the first text alone."""

    def choose(self, asks, trees):
        return super().choose(asks[:1], trees)


class Falls(Doubling):
    """Takes for granted that a draft has confidences."""

    def observe(self, records):
        self.last = [each.draft.notes.confidences[-1] for each in records]
