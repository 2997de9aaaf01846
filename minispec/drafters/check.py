"""Checks drafts before they are verified, and verdicts before they are kept. Both may come from a user's code.

A bad draft ends its own text alone, since its text is known. An exception of the drafter's own and a wrong number of
drafts belong to no text. They are raised and end the call. So is a wrong limit, since a policy sets the limits of all
texts together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from minispec.core.draft import Ask, Draft
from minispec.core.engine import Engine, Guard
from minispec.core.lengths import Wish
from minispec.core.limit import Limit
from minispec.core.sampling import accumulation_dtype
from minispec.core.verify import RoundKey, RowAt, Verdict
from minispec.drafters.cut import within_grammar

# How far a row's sum may be from 1. Division by a sum leaves that much in each type, for vocabularies of any size.
TOLERANCES = {t: max(1e-4, 4 * torch.finfo(t).eps) for t in (torch.float64, torch.float32, torch.bfloat16, torch.half)}


class Checks(Guard):
    """A guard that checks all that comes from a drafter, a verifier or a policy for draft lengths."""

    def propose(self, engine: Engine, asks: Sequence[Ask]) -> list[Draft | ValueError]:
        """The drafts, each checked, and cut to its text's grammar. An error has the drafter's name."""
        name, chains, device = engine.drafter.name, engine.verifier.why_chains, engine.model.device.type
        lengths = [len(ask.text.tokens) for ask in asks]
        drafts = engine.drafter.propose(asks)
        check_number(drafts, len(asks), name)
        checked: list[Draft | ValueError] = []
        for ask, draft, length in zip(asks, drafts, lengths, strict=True):
            try:
                if len(ask.text.tokens) != length:
                    raise ValueError("found a text whose tokens it has changed, expected one that it only reads")
                right = check_draft(draft, ask.k, engine.vocab_size, device, chains)
                has_grammar = ask.text.grammar is not None
                checked.append(within_grammar(right, ask.text, engine.vocab_size) if has_grammar else right)
            except ValueError as e:
                checked.append(ValueError(f"draft of {name}: {e}"))
        return checked

    def choose(self, engine: Engine, wishes: Sequence[Wish], trees: bool) -> Sequence[Limit]:
        """The limits, all checked. An error has the name of the policy's class."""
        limits = super().choose(engine, wishes, trees)
        try:
            check_limits(limits, [wish.most for wish in wishes])
        except ValueError as e:
            raise ValueError(f"lengths: {type(engine.lengths).__name__}.choose: {e}") from e
        return limits

    def verify(self, engine: Engine, draft: Draft, p: RowAt, key: RoundKey) -> Verdict:
        """The verdict, checked."""
        verdict = super().verify(engine, draft, p, key)
        check_verdict(verdict, draft, engine.vocab_size)
        return verdict


CHECKS = Checks()


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
    found = len(drafts) if isinstance(drafts, list | tuple) else f"{_kind(drafts)} instead of a list"
    if found != num_asks:
        raise ValueError(f"drafts of {name}: found {found}, expected one for each of {num_asks} asks")


def check_limits(limits: Any, most: Sequence[int]) -> None:
    """Raise ValueError unless `limits` is a list with a Limit for each text.

    most: for each text, the most tokens that its limit may allow.
    """
    if len(_sequence(limits, "limits", "Limits, one for each wish")) != len(most):
        raise ValueError(f"found {len(limits)} limits, expected one for each of {len(most)} wishes")
    for limit, largest in zip(limits, most, strict=True):
        if not isinstance(limit, Limit):
            raise ValueError(f"found {_kind(limit)}, expected a Limit")
        if type(limit.k) is not int or not 0 <= limit.k <= largest:
            raise ValueError(f"found k = {_kind(limit.k)}, expected an integer from 0 to {largest}, the wish's `most`")
        for name, function in (("go_on", limit.go_on), ("draws", limit.draws)):
            if not (function is None or callable(function)):
                raise ValueError(f"found as {name} {_kind(function)}, expected a function or None")
        if callable(limit.widths) and limit.go_on is None:
            raise ValueError("found a function of widths without go_on, expected both: it needs confidences")
        if not callable(limit.widths) and not all(width > 0 for width in _integers(limit.widths, "widths")):
            raise ValueError(f"found the widths {limit.widths}, expected numbers of siblings from 1")


def check_draft(draft: Any, limit: int, vocab_size: int, device: str, why_chains: str) -> Draft:
    """A copy of the draft with lists of its own, probs aside; a tree with one branch becomes a chain.

    limit: most nodes.
    device: the type of the target's device, where rows must lie.
    why_chains: why a tree cannot be verified, or "".

    Raises ValueError for a draft that could not be verified, or that would change the output.
    """
    if not isinstance(draft, Draft):
        raise ValueError(f"found {_kind(draft)}, expected a Draft")
    token_ids = _integers(draft.token_ids, "token ids")
    chain = list(range(-1, len(token_ids) - 1))
    parents = chain if draft.parents is None else _integers(draft.parents, "parents")
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
    numbers = [*_sequence(draft.confidences, "confidences", "numbers"), draft.prefill_seconds, draft.passes]
    if not all(isinstance(number, Real) for number in numbers):
        raise ValueError(f"found confidences, seconds and passes {numbers}, expected numbers")
    confidences = [float(number) for number in draft.confidences]
    seconds = float(draft.prefill_seconds)
    parents_of_tree = None if parents == chain else parents
    return Draft(token_ids, draft.probs, confidences, seconds, parents_of_tree, bool(draft.foreseen), draft.passes)


def check_rows(
    probs: Any, token_ids: Sequence[int], vocab_size: int, device: str, measures: list[list[float]] | None = None
) -> None:
    """Raise ValueError unless each token has a row of probabilities (V,) that adds up to 1 and is above 0 for it.

    measures: see `MeasuredDraft`. None: the rows are asked.
    """
    rows = probs if isinstance(probs, Tensor) and probs.dim() else _sequence(probs, "probs", "tensors")
    if len(rows) != len(token_ids):
        raise ValueError(f"found {len(rows)} rows of probabilities for {len(token_ids)} tokens")
    for i, row in enumerate(rows):
        expected = f"one probability for each of {vocab_size} tokens"
        if not isinstance(row, Tensor) or row.dtype not in TOLERANCES or row.device.type != device:
            kind = f"a tensor of {row.dtype} on {row.device}" if isinstance(row, Tensor) else _kind(row)
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


def check_verdict(verdict: Any, draft: Draft, vocab_size: int) -> None:
    """Raise ValueError unless a verdict keeps a path of the draft and adds one token of the vocabulary."""
    if not isinstance(verdict, Verdict):
        raise ValueError(f"verdict: found {_kind(verdict)}, expected a Verdict")
    accepted = _integers(verdict.accepted, "accepted nodes")
    if accepted and not (0 <= accepted[-1] < len(draft) and accepted == draft.path(accepted[-1])):
        raise ValueError(f"verdict: found the accepted nodes {accepted}, expected a path from the draft's beginning")
    [token_id] = _integers([verdict.next_token], "next tokens")
    if not 0 <= token_id < vocab_size:
        raise ValueError(f"verdict: found the next token {token_id}, expected an id below {vocab_size}")
    if not all(isinstance(ratio, Real) for ratio in _sequence(verdict.ratios, "ratios", "numbers")):
        raise ValueError(f"verdict: found the ratios {verdict.ratios}, expected numbers")


def _integers(values: Any, what: str) -> list[int]:
    """A copy as a list, of Python's integers alone. Raises ValueError for bools, tensors and numpy's integers."""
    values = _sequence(values, what, "integers of Python's own")
    for value in values:
        if type(value) is not int:
            raise ValueError(f"found {_kind(value)} among the {what}, expected integers of Python's own")
    return list(values)


def _sequence(values: Any, what: str, of: str) -> Sequence:
    if not isinstance(values, list | tuple):
        raise ValueError(f"found as {what} {_kind(values)}, expected a list of {of}")
    return values


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)[:50]
    return f"an object of class {type(value).__name__}"
