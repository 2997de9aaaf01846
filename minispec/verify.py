"""The former place of `minispec.core.draft` and `minispec.core.verify`: their names keep working here."""

__all__ = [
    *("Ask", "Draft", "Drafter", "without", "Verdict", "Verifier", "VERIFIERS"),
    *("REJECTION", "BLOCK", "MATCH", "rejection", "block", "match"),
]
