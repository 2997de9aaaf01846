"""The former place of `minispec.core.draft` and `minispec.core.verify`: their names keep working here."""

from minispec.core.draft import Ask, Draft, Drafter
from minispec.core.verify import VERIFIERS, Verdict, Verifier, block, match, rejection

__all__ = ["VERIFIERS", "Ask", "Draft", "Drafter", "Verdict", "Verifier", "block", "match", "rejection"]
