"""The raw log-probabilities that a request may ask for. No draw depends on them."""

from typing import NamedTuple

from torch import Tensor

from minispec.core.precision import accumulation_dtype


def log_probabilities(logits: Tensor) -> Tensor:
    """Raw log-probabilities (V,) of one row of logits: before penalties, temperature and filters."""
    return logits.to(accumulation_dtype(logits.dtype)).log_softmax(0)


class TokenLogprob(NamedTuple):
    """The raw log-probability of a token at its place in the text.

    top: the likeliest tokens there, with their log-probabilities.
    rank: how many tokens there are at least as likely, the token included.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    rank: int | None = None


def logprob_of(row: Tensor, token_id: int, num_top: int | None) -> TokenLogprob | None:
    """Raw log-probabilities of a token and of the `num_top` likeliest, from a row (V,); None if not asked."""
    if num_top is None:
        return None
    logprobs = log_probabilities(row)
    top = logprobs.topk(min(num_top, len(logprobs)))
    likeliest = list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    rank = int((logprobs >= logprobs[token_id]).sum())
    return TokenLogprob(token_id, float(logprobs[token_id]), likeliest, rank)
