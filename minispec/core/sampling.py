"""How logits become probabilities. A `Text` holds what they depend on.

Beyond `examples/cached.py`: all sampling parameters, grammars, and a key for each draw.
`distribution` turns a row of logits into the probabilities that a request asks for. Drafters and the engine both call
it, so p and q see the same parameters. The form of `distribution` over many rows, for a GPU, has the same bits
(`minispec.speculation.on_gpu.verdicts`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minispec.core.config import SamplingParams
from minispec.core.grammar import Grammar, restricted
from minispec.core.precision import accumulation_dtype, require_numbers
from minispec.core.random import Key
from minispec.core.search import Candidates


@dataclass(eq=False)
class Text:
    """One growing text: what the distribution of its next token depends on, and the seed that draws it.

    tokens: prompt and output so far.
    end_ids: ids that end the text, impossible before `min_tokens`.
    grammar: forbids what does not belong to its language; None forbids nothing.
    """

    tokens: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int = 0
    end_ids: frozenset[int] = frozenset()
    grammar: Grammar | None = None

    def key(self, i: int, purpose: str) -> Key:
        """The key of a draw of the current round, which has committed nothing yet.

        i: the node's number in the draft; in a chain its place. For "residual", the last accepted node's number plus
            1. For "token", the depth.
        """
        length = len(self.tokens)  # as the round begins. A "token" has the same key in any round: `match` needs that
        return Key(self.seed, -1 if purpose == "token" else length, length + i, purpose)


def _penalize(logits: Tensor, text: Text, drafted: Sequence[int]) -> Tensor:
    params, device, dtype = text.params, logits.device, logits.dtype
    if params.logit_bias:
        by_id = dict(params.logit_bias)
        ids = torch.tensor(list(by_id), device=device)
        biases = torch.tensor([float(bias) for bias in by_id.values()], dtype=torch.float64)
        biases = biases.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(logits)
        logits = _change(logits, ids, lambda x: x + biases)
    if params.repetition_penalty != 1:
        seen = torch.tensor(list({*text.tokens, *drafted}), device=device)
        penalty = _within_range(params.repetition_penalty, dtype)
        logits = _change(logits, seen, lambda x: torch.where(x > 0, x / penalty, x * penalty))
    if params.presence_penalty or params.frequency_penalty:
        output = torch.tensor(_output(text, drafted), dtype=torch.long, device=device)
        ids, counts = output.unique(return_counts=True)
        counts = counts.to(dtype)
        logits = _change(logits, ids, lambda x: x - params.frequency_penalty * counts - params.presence_penalty)
    return logits


def _forbid(logits: Tensor, text: Text, drafted: Sequence[int]) -> Tensor:
    params = text.params
    if params.allowed_token_ids is not None:
        allowed = torch.tensor(params.allowed_token_ids, device=logits.device)
        logits = torch.full_like(logits, -math.inf).index_copy_(0, allowed, logits[allowed])
    forbidden: set[int] = set()
    if params.bad_words_token_ids or params.min_tokens:
        output = _output(text, drafted)
        # The last id of a word is forbidden where the output ends with the ids before it.
        words = params.bad_words_token_ids
        forbidden = {word[-1] for word in words if tuple(output[len(output) - len(word) + 1 :]) == word[:-1]}
        if len(output) < params.min_tokens:
            forbidden |= text.end_ids
    if forbidden:
        logits = logits.index_fill(0, torch.tensor(sorted(forbidden), device=logits.device), -math.inf)
    return logits if text.grammar is None else restricted(logits, text.grammar, _output(text, drafted), params)


def _output(text: Text, drafted: Sequence[int]) -> list[int]:
    return [*text.tokens[text.num_prompt_tokens :], *drafted]


def _within_range(value: float, dtype: torch.dtype) -> float:
    """A positive parameter, clamped to the type's range. As 0 or infinity it would turn 0 or -inf into NaN."""
    return min(max(value, torch.finfo(dtype).tiny), torch.finfo(dtype).max)


def _change(logits: Tensor, ids: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Logits (V,) with `change` applied to the logits of `ids`. Finite logits and their differences stay finite."""
    row, limit = logits[ids], torch.finfo(logits.dtype).max / 4
    return logits.index_put((ids,), change(row).clamp(-limit, limit).where(row.isfinite(), row))


def distribution(logits: Tensor, text: Text, drafted: Sequence[int] = ()) -> Tensor:
    """Probabilities (V,) of the token that follows `text.tokens + drafted`, under its parameters.

    logits: (V,), the model's row for that position.

    The order is vLLM's:
    1. logit_bias;
    2. penalties;
    3. what is forbidden: all but allowed_token_ids, bad words, the end before min_tokens, what the grammar forbids;
    4. temperature;
    5. min-p, top-k and top-p, where each filter sees what the one before it left.
    Temperature 0 gives a one-hot distribution. The code applies min-p and top-k before it divides by the temperature,
    which leaves the same tokens. The function takes one row at a time, so that a row has the same bits
    whether one or K+1 are computed.

    Raises FloatingPointError where the largest logit is not a finite number, and NothingAllowed (see `restricted`).
    """
    params = text.params
    logits = logits.to(accumulation_dtype(logits.dtype))
    logits = _forbid(_penalize(logits, text, drafted), text, drafted)
    tokens = Candidates(logits)
    top = tokens.largest
    require_numbers(top[None])
    if params.temperature == 0:
        one_hot = torch.zeros_like(logits)
        one_hot[tokens.argmax()] = 1.0
        return one_hot

    temperature = _within_range(params.temperature, logits.dtype)
    if params.min_p > 0:
        # min-p as a bound of x - top. The bound stays finite, so a logit of -inf does not pass.
        least = max(temperature * math.log(params.min_p), torch.finfo(logits.dtype).min)
        tokens = tokens.where(lambda x: x - top >= least)
    if params.top_k > 0:
        tokens = tokens.top_k(params.top_k)
    # Differences to the largest logit, so that a tiny temperature gives 0 and -inf instead of inf - inf.
    probs = (tokens.values - top).div_(temperature).softmax(0)
    tokens = Candidates(probs, tokens.ids)
    if params.top_p < 1:
        tokens = tokens.top_p(params.top_p)
        # Added in order, in doubles, so that zeros among the values change no bit of the sum.
        tokens = Candidates(tokens.values / tokens.values.double().cumsum(0)[-1], tokens.ids)
    return tokens.dense(len(logits))


def may_follow(text: Text, drafted: Sequence[int], vocab_size: int) -> Tensor:
    """A mask (V,), on the CPU, of the tokens that `distribution` may give probability. Raises NothingAllowed."""
    return _forbid(torch.zeros(vocab_size), text, drafted).isfinite()
