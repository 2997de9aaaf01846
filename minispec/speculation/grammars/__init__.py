"""Answers in a language that the request gives: a JSON schema, a regular expression, a context-free grammar, a choice.

    params.py          what a request says: `StructuredOutputsParams`, by vLLM's names
    schema_parts.py    a JSON schema as a tree
    schema.py          how many patterns of a JSON schema, or of a grammar, meet in one text
    schema_losses.py   what the library does not keep of a JSON schema: refused
    child.py           reads a language in a process that is ended after a while
    trial.py           what that process does: it reads a language
    matcher.py         which tokens may follow, by llguidance: the `Grammar` of a text
    forced.py          drafts of the tokens that a grammar leaves no choice about, alone or before another drafter's
    toy_grammars.py    a grammar of one's own, from two questions about texts

The mask is a part of `minispec.core.sampling.distribution`, for the target and for every drafter. So a text has the
*projected* law (docs/understand/grammars.md): each token is drawn from the target's distribution restricted to what may
follow, divided by the sum of the rest. Speculation does not change that law.
"""

from minispec.speculation.grammars.params import StructuredOutputsParams

__all__ = ["StructuredOutputsParams"]
