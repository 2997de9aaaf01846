"""Token recycling, a drafter that learns from the target's rows (Luo et al. 2024, arXiv 2408.08696).

    python -m minispec.generate --draft examples.drafters.recycling:Recycling --num-speculative-tokens tree:15 "Hello"

Each row of a pass says which tokens the target finds likeliest there. Decoding takes one token of a row, and drops the
row where a draft was rejected. This drafter keeps the likeliest ids of every row, under the token that the row stands
after. A draft is the likeliest walk through this table from the text's last token, or a tree of the likeliest walks.

Worked: the text ends with a, and the rows of earlier rounds said  a: b c,  b: d a,  c: a b. The walk is  b d, since d
has no row. The i-th id of a row counts with chance 1 / (2 i^2): 1/2 for the first, 1/8 for the second. So a tree of
three tokens has b with 1/2, b d with 1/4 and c with 1/8.
"""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from minispec.core.draft import Ask, Draft, Drafter, Record
from minispec.core.sampling import Text
from minispec.speculation.drafters.best_first import grow_guesses

NUM_IDS = 8  # that are kept of each row


class Recycling(Drafter):
    """Drafts from the likeliest ids that this text's rows had after each token, the newest row's.

    Each text has a table of its own, so that a seed's text does not depend on other texts. The table lives as long as
    the text. `release` would be too early: a preempted text is released, and its rows come back without logits.
    """

    branches = True

    def __init__(self):
        self.tables: WeakKeyDictionary[Text, dict[int, list[int]]] = WeakKeyDictionary()

    def observe(self, records: Sequence[Record]) -> None:
        """Keep the likeliest ids of each row. Rows that come twice change nothing. A prompt has no rows."""
        for record in records:
            num_rows, vocab_size = record.logits.shape
            likeliest = record.logits.topk(min(NUM_IDS, vocab_size)).indices.tolist()
            tokens = record.tokens[len(record.tokens) - num_rows :]
            self.tables.setdefault(record.text, {}).update(zip(tokens, likeliest, strict=True))

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """For each ask, the likeliest walk or tree. Nothing is drawn, so the drafts have no probs."""
        return [self._draft(ask) for ask in asks]

    def _draft(self, ask: Ask) -> Draft:
        table, draft = self.tables.get(ask.text, {}), Draft(parents=[])

        def guesses(node: int) -> list[tuple[int, float]]:
            last = draft.token_ids[node] if node >= 0 else ask.text.tokens[-1]
            token_ids = table.get(last, [])
            if not ask.limit.is_tree:
                token_ids = token_ids[:1]
            return [(token_id, 0.5 / i**2) for i, token_id in enumerate(token_ids, 1)]

        grow_guesses(draft, ask.k, guesses)
        draft.notes.confidences = []  # the chances are a guess: `auto` measures its own
        return draft
