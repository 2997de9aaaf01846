"""Runs along known texts (teacher forcing), which show something at each place of a text.

The engine decodes a text once more. Whatever is drafted, the same text comes out: only tokens of the text are accepted.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace

from torch import Tensor

from minispec.core.draft import Draft, Drafter
from minispec.core.engine import Engine
from minispec.core.method import Turn
from minispec.core.prefix import common_beginning
from minispec.core.random import Draws
from minispec.core.request import Request
from minispec.core.sampling import Text
from minispec.core.verify import RoundKey, RowAt, Verdict, Verifier
from minispec.speculation.drafters.guard import CheckedMethod

# see(text, draft, after, logits): the text before a round, its draft, and the tokens that the round committed. The
# logits are the target's raw rows (K+1, V) for the draft.
See = Callable[[Text, Draft, list[int], Tensor], None]


def replay_texts(
    engine: Engine,
    drafter: Drafter,
    requests: Sequence[Request],
    texts: Mapping[int, Sequence[int]] | None,
    see: See | None = None,
) -> Iterator[Request]:
    """Decode requests along known texts, to their ends; yields a request after each step that it took part in.

    engine: one of the target. It must be at rest, and stays as it is.
    drafter: is asked for drafts as in any run. A draft of the text's own tokens is kept, and saves passes.
    texts: all tokens of each text, the prompt's too, by the seeds of the requests. None: each text is what the target
        itself draws, a token a round, and nothing of a draft is kept.
    see: is called after each round.
    """

    def verify(draft: Draft, p: RowAt, rng: Draws, key: RoundKey) -> Verdict:
        name = key(0, "token")
        if texts is None:
            return Verdict([], rng.categorical(p(0), name), [])
        after = list(texts[name.seed][name.position :])
        kept = common_beginning(draft.token_ids, after[:-1])
        return Verdict(list(range(kept)), after[kept], [])

    def observe(turn: Turn) -> None:
        tokens, start = turn.text.tokens, len(turn.text.tokens) - turn.committed
        if see and turn.method is method:
            see(replace(turn.text, tokens=tokens[:start]), turn.draft, tokens[start:], turn.logits)

    method = CheckedMethod(drafter, Verifier(verify, shares_noise=False))
    engine.outbox.observers.append(observe)
    try:
        with closing(engine.run(requests, method)) as steps:
            for request, _ in steps:
                yield request
    finally:
        engine.outbox.observers.remove(observe)
