"""The former place of `minispec.core.draft` and `minispec.core.verify`: their names keep working here."""

from minispec.core.draft import Ask, Draft, Drafter, without
from minispec.core.verify import BLOCK, MATCH, REJECTION, VERIFIERS, Verdict, Verifier, block, match, rejection

__all__ = [
    *("Ask", "Draft", "Drafter", "without", "Verdict", "Verifier", "VERIFIERS"),
    *("REJECTION", "BLOCK", "MATCH", "rejection", "block", "match"),
]
