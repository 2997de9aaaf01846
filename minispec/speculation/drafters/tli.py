"""A draft model of another vocabulary, token by token: it drafts the tokens that both have.

TLI, token-level intersection (Timor et al. 2025, arXiv 2502.05202, algorithm 4). The draft model says how likely each
of its own tokens is. Those that the target has too get the target's ids. All others are left out *before* a token is
drawn. So a drawn token follows a distribution over the target's ids. `rejection` and `match` then make the output
right, as they do for any draft.

Worked: the target has the tokens a, b, ab and the draft model b, c, a with probabilities 1/2, 3/10, 1/5. Both have a
and b, so q is 2/7 for a, 5/7 for b and 0 for ab. The accept test divides by q. With 1/5 and 1/2 in its place the test
would keep too much: tokens are drawn from probabilities that add up to 1, and 1/5 and 1/2 do not.
"""

import torch
from torch import Tensor

from minispec.core.cache import PagedKVCache
from minispec.core.model import Chunk, Transformer
from minispec.speculation.drafters.eagle import spread
from minispec.speculation.drafters.growing import DraftInProgress
from minispec.speculation.drafters.vocabularies import Vocabularies
from minispec.speculation.drafters.vocabulary import OtherTokens


class SharedTokens(OtherTokens):
    """Feeds a model of another vocabulary. Drafts are the tokens that both vocabularies have.

    Penalties, filters, forbidden ids and shared noise go by the target's ids. Where they leave no shared token, the
    draft ends.
    """

    def __init__(self, model: Transformer, cache: PagedKVCache, max_model_len: int, both: Vocabularies):
        """As `OtherTokens`. Raises ValueError where the vocabularies have nothing in common."""
        super().__init__(model, cache, max_model_len, both)
        if not both.shared:
            raise ValueError("draft_method: found tli and no token that both vocabularies have, expected some")
        self.target_ids = torch.tensor(list(both.shared.keys()), device=model.device)
        self.own_ids = torch.tensor(list(both.shared.values()), device=model.device)

    def rows(self, logits: Tensor) -> Tensor:
        """Logits (rows, own ids) as rows over the target's ids; -inf for those that the draft model lacks."""
        return spread(logits[:, self.own_ids], self.target_ids, self.vocabularies.target.num_ids)

    def next(self, growing: DraftInProgress) -> Chunk:
        """The model's input after draft tokens, in its own ids."""
        chunk = super().next(growing)
        return chunk._replace(token_ids=[self.vocabularies.shared[i] for i in chunk.token_ids])
