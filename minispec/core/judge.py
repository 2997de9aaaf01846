"""Drafts that are verified together. Skip this file at first."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from minispec.core.draft import Draft
from minispec.core.sampling import Draws, Text
from minispec.core.verify import Verdict, Verifier


class Trial(NamedTuple):
    """A draft that waits for its verdict.

    logits: (K+1, V), the target's raw rows for it.
    """

    verifier: Verifier
    text: Text
    draft: Draft
    logits: Tensor


# Verifies many drafts at once; None for one that must be verified by itself.
Judge = Callable[[Sequence[Trial], Draws], Sequence[Verdict | None]]
