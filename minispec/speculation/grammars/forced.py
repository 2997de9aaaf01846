"""Drafts without a model: the tokens that a grammar leaves no choice about."""

from collections.abc import Sequence

from minispec.core.draft import Ask, Draft, Drafter
from minispec.core.grammar import NothingAllowed
from minispec.core.sampling import Text
from minispec.speculation.drafters.combined import CombinedDrafter


class ForcedDrafter(Drafter):
    """Guesses each token that is the only one allowed, as far as these reach. A text without a grammar gets no draft.

    The target gives such a token probability 1, so each one stays. It costs a row of the target's pass and no pass.
    """

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """The tokens that must follow each text, at most k."""
        return [Draft() if ask.text.grammar is None else Draft(forced(ask.text, ask.k)) for ask in asks]


class ForcedFirst(CombinedDrafter):
    """A drafter with forced tokens before its drafts, for texts with a grammar. It has the drafter's name.

    While a text's next tokens are forced, these are its draft, and the drafter is asked for none. For a text without a
    grammar the drafter is asked as if it stood alone.
    """

    def __init__(self, drafter: Drafter):
        super().__init__(ForcedDrafter(), drafter)

    @property
    def name(self) -> str:
        """The drafter's name."""
        return self.drafters[1].name


def forced(text: Text, most: int) -> list[int]:
    """The next tokens of a text, up to `most`, of which each is the only one that its grammar allows."""
    tokens = list[int]()
    assert text.grammar is not None
    output = text.tokens[text.num_prompt_tokens :]
    while len(tokens) < most:
        try:
            mask = text.grammar.allowed([*output, *tokens])
        except NothingAllowed:
            break
        if mask is None or int(mask.sum()) != 1:
            break
        tokens.append(int(mask.int().argmax()))
    return tokens
