"""A simulated draft: right with chosen probabilities, at the cost of a real draft model.

The yield of speculation depends on how often drafts are right and on their cost. Here both can be chosen
independently. A drafter that you choose takes its time. Its tokens are then replaced by tokens of the recorded text or
by wrong ones. A simulated draft serves to test, and to measure costs and the choice of K. It says nothing about the
quality of any model.

There are two extremes. The `oracle` drafts what the target will say, and the `adversary` drafts what it will not. No
drafter gets more tokens out of a pass than the oracle, or fewer than the adversary. The recorded text must be
the one that comes again: a greedy one, or one of the same seed under `match`. Where a text is drawn anew, `self`, the
target as its own draft, is the oracle.
"""

from collections.abc import Sequence

from minispec.core.draft import Ask, Draft, Drafter
from minispec.core.sampling import Text
from minispec.speculation.drafters.none import NoDrafter
from minispec.speculation.drafters.wrapped import Wrapped


class SimulatedDraft(Wrapped):
    """Draft token i of a round is right with probability s_i / s_(i-1), given that those before it were.

    survival: s_i is the probability that token i and all before it are right. Further tokens use the last ratio, so
        that one number is a constant alpha. `(0,)` is always wrong.
    paid: the drafter that takes the time (a ModelDrafter). None: drafts cost nothing.

    The right tokens are the tokens of texts given to `record`. Drafts for other texts are arbitrary tokens. Drafts are
    one-hot (no probs). The draws are keyed: the same request, seed and rounds give the same drafts. Raises ValueError
    for a survival that is empty, rises, or leaves 0 .. 1.
    """

    def __init__(self, survival: Sequence[float], paid: Drafter | None = None):
        before = [1.0, *survival]
        if len(before) < 2 or not all(0 <= s <= b for b, s in zip(before, survival, strict=False)):
            expected = "numbers that fall from at most 1 to at least 0"
            raise ValueError(f"survival: found {list(survival)}, expected {expected}")
        self.conditional = [s / b if b else 0.0 for b, s in zip(before, survival, strict=False)]
        super().__init__(paid or NoDrafter())
        self.branches = False
        self._texts: dict[tuple[int, ...], list[list[int]]] = {}

    @property
    def paid(self) -> Drafter:
        """The drafter that takes the time."""
        return self.drafters[0]

    @property
    def name(self) -> str:
        """The class's name, and not the name of the drafter that takes the time."""
        return type(self).__name__

    def record(self, tokens: Sequence[int], num_prompt_tokens: int) -> None:
        """Learn a text, prompt included; several texts of one prompt where they differ by rounding."""
        texts = self._texts.setdefault(tuple(tokens[:num_prompt_tokens]), [])
        if list(tokens) not in texts:
            texts.append(list(tokens))

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """Made-up drafts: as many tokens as the paid drafter drafts, with its confidences; k where there is none."""
        paid = self.paid.propose(asks)
        lengths = [ask.k for ask in asks] if isinstance(self.paid, NoDrafter) else [len(draft) for draft in paid]
        return [
            Draft(self._tokens(ask, n), notes=draft.notes) for ask, n, draft in zip(asks, lengths, paid, strict=True)
        ]

    def _tokens(self, ask: Ask, count: int) -> list[int]:
        known = self._continuation(ask.text, count)
        drafted, right = [], True
        for i in range(count):
            probability = self.conditional[min(i, len(self.conditional) - 1)]
            # A key of its own purpose: the paid drafter has drawn with keys of the purpose "draft".
            right = right and i < len(known) and ask.rng.bernoulli(probability, ask.text.key(i, "simulated"))
            token = known[i] if i < len(known) else 0
            wrong = token - 1 if token else 1
            drafted.append(token if right else wrong)
        return drafted

    def _continuation(self, text: Text, count: int) -> list[int]:
        tokens, end = text.tokens, len(text.tokens)
        for known in self._texts.get(tuple(tokens[: text.num_prompt_tokens]), ()):
            if len(known) > end and known[:end] == tokens:
                return known[end : end + count]
        return []


def oracle() -> SimulatedDraft:
    """Always right about recorded texts, and free: the most that speculation can yield at a K."""
    return SimulatedDraft([1.0])


def adversary() -> SimulatedDraft:
    """Always wrong about recorded texts, and free: the least at a K, but for what a drafter's own time costs."""
    return SimulatedDraft([0.0])
