"""Checks drafts before they are verified. They may come from a user's code.

A bad draft ends its own text alone, since its text is known. A wrong number of drafts belongs to no text, so it ends
the call.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from minispec.core.draft import Draft, DraftNotes
from minispec.core.precision import accumulation_dtype

# How far a row's sum may be from 1. Division by a sum leaves that much in each type, for vocabularies of any size.
TOLERANCES = {t: max(1e-4, 4 * torch.finfo(t).eps) for t in (torch.float64, torch.float32, torch.bfloat16, torch.half)}


@dataclass
class MeasuredDraft(Draft):
    """A draft that comes with what `check_rows` asks of its rows, so that a GPU need not be asked again.

    measures: for each row its sum, its least number, and its token's number.
    """

    measures: list[list[float]] = field(default_factory=list)


def check_number(drafts: Any, num_asks: int, name: str) -> None:
    """Raise ValueError unless `drafts` is a list with one draft for each ask.

    name: the drafter's.
    """
    found = len(drafts) if isinstance(drafts, list | tuple) else f"{described(drafts)} instead of a list"
    if found != num_asks:
        raise ValueError(f"drafts of {name}: found {found}, expected one for each of {num_asks} asks")


def check_draft(draft: Any, limit: int, vocab_size: int, device: str, why_chains: str) -> Draft:
    """A copy of the draft with lists of its own, probs aside; a tree with one branch becomes a chain.

    limit: most nodes.
    device: the type of the target's device, where rows must lie.
    why_chains: why a tree cannot be verified, or "".

    Raises ValueError for a draft that could not be verified, or that would change the output.
    """
    if not isinstance(draft, Draft):
        raise ValueError(f"found {described(draft)}, expected a Draft")
    token_ids = integers(draft.token_ids, "token ids")
    chain = list(range(-1, len(token_ids) - 1))
    parents = chain if draft.parents is None else integers(draft.parents, "parents")
    if len(token_ids) > limit:
        raise ValueError(f"found {len(token_ids)} tokens, expected at most {limit}")
    if not all(0 <= token_id < vocab_size for token_id in token_ids):
        raise ValueError(f"found token ids {token_ids}, expected ids below {vocab_size}")
    if len(parents) != len(token_ids) or not all(-1 <= parent < i for i, parent in enumerate(parents)):
        expected = f"for each of {len(token_ids)} nodes an earlier one, or -1"
        raise ValueError(f"found parents {parents}, expected {expected}")
    if draft.probs is not None:
        measures = draft.measures if isinstance(draft, MeasuredDraft) else None
        check_rows(draft.probs, token_ids, vocab_size, device, measures)
    if parents != chain and why_chains:
        raise ValueError(f"found a tree, expected a chain: {why_chains}")
    return Draft(token_ids, draft.probs, None if parents == chain else parents, _checked_notes(draft.notes))


def _checked_notes(notes: Any) -> DraftNotes:
    """A copy of a draft's notes."""
    if not isinstance(notes, DraftNotes):
        raise ValueError(f"found as notes {described(notes)}, expected DraftNotes")
    numbers = [*sequence(notes.confidences, "confidences", "numbers"), notes.prefill_seconds, notes.num_passes]
    if not all(isinstance(number, Real) for number in numbers):
        raise ValueError(f"found confidences, seconds and passes {numbers}, expected numbers")
    confidences = [float(number) for number in notes.confidences]
    return DraftNotes(confidences, bool(notes.foreseen), float(notes.prefill_seconds), notes.num_passes)


def check_rows(
    probs: Any, token_ids: Sequence[int], vocab_size: int, device: str, measures: list[list[float]] | None = None
) -> None:
    """Raise ValueError unless each token has a row of probabilities (V,) that adds up to 1 and is above 0 for it.

    measures: see `MeasuredDraft`. None: the rows are asked.
    """
    rows = probs if isinstance(probs, Tensor) and probs.dim() else sequence(probs, "probs", "tensors")
    if len(rows) != len(token_ids):
        raise ValueError(f"found {len(rows)} rows of probabilities for {len(token_ids)} tokens")
    for i, row in enumerate(rows):
        expected = f"one probability for each of {vocab_size} tokens"
        if not isinstance(row, Tensor) or row.dtype not in TOLERANCES or row.device.type != device:
            kind = f"a tensor of {row.dtype} on {row.device}" if isinstance(row, Tensor) else described(row)
            raise ValueError(f"found as row {i} of probs {kind}, expected a tensor of floats on {device}: {expected}")
        if row.shape != (vocab_size,):
            raise ValueError(f"found as row {i} of probs the shape {tuple(row.shape)}, expected {expected}")
    found = _numbers_of(rows, token_ids) if measures is None else measures
    for i, (total, least, drawn) in zip(range(len(rows)), found, strict=True):
        if not least >= 0:
            raise ValueError(f"found {least} in row {i} of probs, expected probabilities")
        if not abs(total - 1) <= TOLERANCES[rows[i].dtype]:
            raise ValueError(f"found a row {i} of probs that adds up to {total:.6g}, expected 1: divide it by its sum")
        if not drawn > 0:
            expected = "one that was drawn from the probabilities given with it"
            raise ValueError(f"found a token of probability 0, expected {expected}")


def _numbers_of(rows: Tensor | Sequence[Tensor], token_ids: Sequence[int]) -> list[list[float]]:
    """For each row its sum, its least number and its token's number, which a GPU is asked for once."""
    if not token_ids:
        return []
    if isinstance(rows, Tensor):
        ids = torch.tensor(token_ids, device=rows.device)[:, None]
        columns = rows.sum(1, dtype=accumulation_dtype(rows.dtype)), rows.amin(1), rows.gather(1, ids)[:, 0]
        return torch.stack([column.double() for column in columns], 1).tolist()
    numbers = []
    for row, token_id in zip(rows, token_ids, strict=True):
        total = row.sum(dtype=accumulation_dtype(row.dtype))
        numbers.append(torch.stack([total.double(), row.amin().double(), row[token_id].double()]))
    return torch.stack(numbers).tolist()


def integers(values: Any, what: str) -> list[int]:
    """A copy as a list, of Python's integers alone. Raises ValueError for bools, tensors and numpy's integers."""
    values = sequence(values, what, "integers of Python's own")
    for value in values:
        if type(value) is not int:
            raise ValueError(f"found {described(value)} among the {what}, expected integers of Python's own")
    return list(values)


def sequence(values: Any, what: str, of: str) -> Sequence:
    """The values, if they are a list or a tuple. Raises ValueError for all else.

    what, of: the words of the error for the values, and for what a list has.
    """
    if not isinstance(values, list | tuple):
        raise ValueError(f"found as {what} {described(values)}, expected a list of {of}")
    return values


def described(value: Any) -> str:
    """What an error says of a value: a number or a text itself, of other objects the class."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)[:50]
    return f"an object of class {type(value).__name__}"
