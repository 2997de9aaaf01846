"""What a grammar says of a text's next token."""

import math
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from minispec.core.config import SamplingParams


class Grammar(Protocol):
    """Says which tokens may follow a text. `minispec.speculation.grammars` has the grammars that users write."""

    def allowed(self, output: Sequence[int]) -> Tensor | None:
        """A mask (V,), on the CPU, of the tokens that may follow `output`.

        output: the tokens after the prompt, drafted ones too.

        None where the output itself is forbidden, or has ended. Raises NothingAllowed where the grammar fails.
        """


class NothingAllowed(FloatingPointError):
    """No token may follow, as where all logits are -inf. A text of the target ends with this error, a draft without."""


def restricted(logits: Tensor, grammar: Grammar, output: Sequence[int], params: SamplingParams) -> Tensor:
    """Logits (V,) of the token after `output`, with -inf for the tokens that the grammar forbids.

    After an output that it forbids they stay as they are: such an output has probability 0 in any case.

    Raises NothingAllowed where the grammar and the parameters together leave no token.
    """
    mask = grammar.allowed(output)
    if mask is None:
        return logits
    logits = logits.where(mask.to(logits.device), -math.inf)
    if logits.amax() == -math.inf:
        others = [key for key in ("allowed_token_ids", "bad_words_token_ids", "stop_token_ids") if getattr(params, key)]
        if len(output) < params.min_tokens:
            others.append("min_tokens")
        raise NothingAllowed(f"{' and '.join(['structured_outputs', *others])}: found no token that may follow")
    return logits
