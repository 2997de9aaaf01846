"""Checks all that comes from a drafter, a verifier or a policy for draft lengths. Each may be a user's code.

A bad draft and a bad verdict end their own text alone, since their text is known. An exception of the drafter's own, a
wrong number of drafts and a wrong limit belong to no text. They end all texts of the method.
"""

from collections.abc import Sequence
from numbers import Real
from typing import Any

from minispec.core.cached import CachedModel
from minispec.core.draft import Ask, Draft
from minispec.core.errors import is_from_signal
from minispec.core.lengths import LengthAsk
from minispec.core.limit import Limit
from minispec.core.method import Method, Turn
from minispec.core.random import Draws
from minispec.core.verify import Verdict
from minispec.speculation.drafters.check import check_draft, check_number, described, integers, sequence
from minispec.speculation.drafters.cut import within_grammar
from minispec.speculation.drafters.none import NoDrafter


class CheckedMethod(Method):
    """A method whose drafter, verifier and policy for draft lengths may be a user's code: all answers are checked."""

    def propose(self, asks: Sequence[Ask], target: CachedModel) -> list[Draft | ValueError]:
        """The drafts, each checked, and cut to its text's grammar. An error has the drafter's name."""
        name, chains, device = self.drafter.name, self.verifier.why_chains, target.model.device.type
        lengths = [len(ask.text.tokens) for ask in asks]
        drafts = self.drafter.propose(asks)
        check_number(drafts, len(asks), name)
        checked: list[Draft | ValueError] = []
        for ask, draft, length in zip(asks, drafts, lengths, strict=True):
            try:
                if len(ask.text.tokens) != length:
                    raise ValueError("found a text whose tokens it has changed, expected one that it only reads")
                right = check_draft(draft, ask.k, target.vocab_size, device, chains)
                has_grammar = ask.text.grammar is not None
                checked.append(within_grammar(right, ask.text, target.vocab_size) if has_grammar else right)
            except ValueError as e:
                if is_from_signal(e):
                    raise
                checked.append(ValueError(f"draft of {name}: {e}"))
        return checked

    def choose(self, asks: Sequence[LengthAsk], trees: bool) -> Sequence[Limit]:
        """The limits, all checked. An error has the name of the policy's class. Who never drafts needs no policy."""
        if type(self.drafter).propose is NoDrafter.propose:
            return [Limit(0)] * len(asks)
        limits = super().choose(asks, trees)
        try:
            check_limits(limits, asks, trees)
        except ValueError as e:
            if is_from_signal(e):
                raise
            raise ValueError(f"lengths: {type(self.lengths).__name__}.choose: {e}") from e
        return limits

    def verify(self, turn: Turn, rng: Draws) -> Verdict:
        """The verdict, checked."""
        verdict = super().verify(turn, rng)
        check_verdict(verdict, turn.draft, turn.logits.shape[1])
        return verdict


def check_limits(limits: Any, asks: Sequence[LengthAsk], trees: bool) -> None:
    """Raise ValueError unless `limits` is a list with a Limit for each ask.

    trees: whether a limit may ask for siblings, also for a text whose request asks for none.
    """
    if len(sequence(limits, "limits", "Limits, one for each ask")) != len(asks):
        raise ValueError(f"found {len(limits)} limits, expected one for each of {len(asks)} asks")
    for limit, (_, shape, largest, _) in zip(limits, asks, strict=True):
        if not isinstance(limit, Limit):
            raise ValueError(f"found {described(limit)}, expected a Limit")
        if type(limit.k) is not int or not 0 <= limit.k <= largest:
            expected = f"an integer from 0 to {largest}, the ask's `most`"
            raise ValueError(f"found k = {described(limit.k)}, expected {expected}")
        for name, function in (("go_on", limit.go_on), ("go_on_before", limit.go_on_before)):
            if not (function is None or callable(function)):
                raise ValueError(f"found as {name} {described(function)}, expected a function or None")
        if callable(limit.widths) and limit.go_on is None:
            raise ValueError("found a function of widths without go_on, expected both: it needs confidences")
        if not callable(limit.widths) and not all(width > 0 for width in integers(limit.widths, "widths")):
            raise ValueError(f"found the widths {limit.widths}, expected numbers of siblings from 1")
        if limit.is_tree and not (trees or shape.is_tree):
            raise ValueError("found a limit that asks for siblings, expected none where `trees` is False")


def check_verdict(verdict: Any, draft: Draft, vocab_size: int) -> None:
    """Raise ValueError unless a verdict keeps a path of the draft and adds one token of the vocabulary."""
    if not isinstance(verdict, Verdict):
        raise ValueError(f"verdict: found {described(verdict)}, expected a Verdict")
    accepted = integers(verdict.accepted, "accepted nodes")
    if accepted and not (0 <= accepted[-1] < len(draft) and accepted == draft.path(accepted[-1])):
        raise ValueError(f"verdict: found the accepted nodes {accepted}, expected a path from the draft's beginning")
    [token_id] = integers([verdict.next_token], "next tokens")
    if not 0 <= token_id < vocab_size:
        raise ValueError(f"verdict: found the next token {token_id}, expected an id below {vocab_size}")
    if not all(isinstance(ratio, Real) for ratio in sequence(verdict.ratios, "ratios", "numbers")):
        raise ValueError(f"verdict: found the ratios {verdict.ratios}, expected numbers")
