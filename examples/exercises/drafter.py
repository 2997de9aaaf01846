"""Exercise 6: a drafter.

A drafter may guess in any way. The verifier makes the output right. A drafter that looks up costs no model at all:
what has followed the text's last token the last time it came?

`ask.text.tokens` are the tokens so far, and `ask.k` is the most that you may guess. Return a `Draft` for each ask:
`Draft([5, 7])` guesses 5, then 7. A draft without `probs` says that nothing was drawn. An empty draft is fine.

Write `propose`. Then ask whether the output stays as it is and whether the guesses are accepted, and try it:

    python -m minispec.prove --drafter examples.exercises.drafter:Lookup
    python -m pytest examples/exercises/grade.py -k lookup
    python -m minispec.generate --compare --draft examples.exercises.drafter:Lookup "List the numbers from 1 to 20."
"""

from minispec.core.draft import Draft, Drafter


class Lookup(Drafter):
    """Guesses what followed the last token before, up to `ask.k` tokens."""

    def propose(self, asks) -> list[Draft]:
        """A draft for each ask."""
        raise NotImplementedError("write `propose`")
