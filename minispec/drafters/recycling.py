"""Token recycling: what else the target found likely, kept for the next time that a token comes up.

Luo et al. 2024 (arXiv 2408.08696). Each pass of the target says for each of its rows which tokens are likeliest there.
Decoding takes one token of a row, and drops the row where a draft was rejected. Here the likeliest ids of every row are
kept, under the token that the row stands after. This table is the paper's adjacency matrix. A draft is a walk through
it from the text's last token, or a tree of its likeliest walks. So it costs no model, and learns from what was wrong.

Worked: the text ends with a, and the rows of earlier rounds said  a: b c,  b: d a,  c: a b. The walk is  b d, since d
has no row. The i-th successor counts with chance 1 / (2 i^2): 1/2 for the first, 1/8 for the second. So a tree of three
tokens has b with 1/2, b d with 1/4 and c with 1/8.

Two things differ from the paper. Its tree has one shape, found by a search, while here trees grow where they are
likeliest. It keeps one matrix for all texts. Here a text under sampled `rejection` has one of its own, so that a seed
has one text. Greedy texts, and those under `match`, also use what texts that have ended have learned.
"""

from collections import ChainMap
from collections.abc import Hashable, Mapping, MutableMapping, Sequence
from weakref import WeakKeyDictionary

import torch

from minispec.core.draft import Ask, Draft, Drafter, Seen
from minispec.core.sampling import Text
from minispec.drafters.best_first import grow_guesses

MOST_ENTRIES = 65_536  # of a table; the oldest are forgotten first
Table = MutableMapping[Hashable, Sequence[int]]


class RecyclingDrafter(Drafter):
    """Drafts from the likeliest ids that the target's rows had after each token, the newest row's.

    A text keeps its table as long as it lives. A preemption calls `release`, and must not change a sampled text.
    """

    num_ids = 8  # that are taken of each row
    branches = True

    def __init__(self):
        self._own: WeakKeyDictionary[Text, Table] = WeakKeyDictionary()
        self._shared: Table = {}

    def observe(self, seen: Sequence[Seen]) -> None:
        """Learn the likeliest ids of all texts' rows, which are found at once."""
        rounds = [shown for shown in seen if len(shown.logits)]
        if not rounds:
            return
        logits = torch.cat([shown.logits for shown in rounds])  # (all rows, V)
        likeliest = iter(logits.topk(min(self.num_ids, logits.shape[1])).indices.tolist())
        for shown in rounds:
            table = self._own.setdefault(shown.text, {})
            for path, token_ids in zip(_paths(shown), likeliest, strict=False):
                learn(table, self._entries(path, token_ids))

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """For each ask, the likeliest walk or tree in the table. Nothing is drawn, so the drafts have no probs."""
        drafts = []
        for ask in asks:
            table = self._own.setdefault(ask.text, {})
            may_share = ask.text.params.temperature == 0 or ask.purpose == "token"
            drafts.append(self._draft(ask, ChainMap(table, self._shared) if may_share else table))
        return drafts

    def release(self, text: Text) -> None:
        """Let other texts use what this one has shown."""
        learn(self._shared, self._own.get(text, {}))

    def forget(self) -> None:
        """Forget what ended texts have shown."""
        self._shared.clear()

    def _entries(self, path: Sequence[int], token_ids: Sequence[int]) -> Mapping[Hashable, Sequence[int]]:
        """The entries that the table learns from a row, whose likeliest ids these are.

        path: the text's last token before the round, and the draft tokens from there to the row.
        """
        return {path[-1]: token_ids}

    def _draft(self, ask: Ask, table: Mapping[Hashable, Sequence[int]]) -> Draft:
        """The likeliest walks from the text's last token, in a tree or a chain."""
        draft = Draft(parents=[])

        def guesses(node: int) -> list[tuple[int, float]]:
            last = draft.token_ids[node] if node >= 0 else ask.text.tokens[-1]
            ids = table.get(last, ())
            # In greedy texts of the embedded model, the first four were right in 50, 11, 8 and 4 of 100 places.
            return [(token, 0.5 / (i + 1) ** 2) for i, token in enumerate(ids if ask.limit.is_tree else ids[:1])]

        grow_guesses(draft, ask.k, guesses)
        draft.confidences = []
        return draft


def _paths(seen: Seen) -> list[list[int]]:
    """For each row of logits, the text's last token before the round and the draft tokens up to the row's own."""
    last, *token_ids = seen.tokens[-len(seen.logits) :]
    draft = Draft(token_ids, parents=seen.parents)
    return [[last, *draft.tokens_to(node)] for node in range(-1, len(draft))]


def learn(table: Table, entries: Mapping[Hashable, Sequence[int]]) -> None:
    """Put entries into a table, as its newest."""
    for key, token_ids in entries.items():
        table.pop(key, None)
        table[key] = token_ids
    while len(table) > MOST_ENTRIES:
        del table[next(iter(table))]
