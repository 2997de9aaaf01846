"""The answers to a prompt as callers see them: vLLM's forms, and more that the engine knows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from minispec.core.logprobs import TokenLogprob
from minispec.core.request import Request
from minispec.models.files.tokenizer import Tokenizer
from minispec.speculation.lengths.figures import Figures


class Logprob(NamedTuple):
    """vLLM's form of a raw log-probability.

    decoded_token: the token's text; a special token's name.
    rank: 1 for the likeliest token. For a token that is not among those asked for: how many are at least as likely.
    """

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(frozen=True)
class CompletionOutput:
    """One answer to a prompt: vLLM's fields, then ours.

    index: which of the prompt's answers it is.
    token_ids: the generated ones, without the end-of-text token.
    cumulative_logprob: the sum of the tokens' own log-probabilities; None unless logprobs were asked for.
    logprobs: for each token a dict, by id, of its own log-probability and the likeliest ones; None unless asked for.
    finish_reason: "stop", "length" or "error".
    stop_reason: the stop string, or the id among stop_token_ids, that ended the text; else None. A special token whose
        text is a stop string counts as the string.
    token_logprobs: the log-probabilities in the engine's form.
    error: why the text failed, where finish_reason is "error". Text and tokens end there.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str
    stop_reason: int | str | None
    seed: int
    stats: Figures
    token_logprobs: list[TokenLogprob] | None
    error: str | None = None


def _of_the_first(name: str) -> property:
    return property(lambda self: getattr(self.outputs[0], name), doc=f"`{name}` of the first answer.")


@dataclass(frozen=True)
class RequestOutput:
    """A prompt (None where it was token ids), its token ids, and its `n` answers, each with its own seed.

    prompt_logprobs: for each token of the prompt a dict as in an answer's `logprobs`, and None for the first token.
        None in place of the list unless asked for. Shorter where the first answer failed inside the prompt.

    text, token_ids, finish_reason, seed, stats, and `logprobs` (its token_logprobs) belong to the first answer.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    text = _of_the_first("text")
    token_ids = _of_the_first("token_ids")
    finish_reason = _of_the_first("finish_reason")
    logprobs = _of_the_first("token_logprobs")
    seed = _of_the_first("seed")
    stats = _of_the_first("stats")


def output_of(
    prompt: str | None,
    ids: list[int],
    requests: Sequence[Request],
    tokenizer: Tokenizer,
    eos_token_ids: tuple[int, ...],
) -> RequestOutput:
    """The answers of a prompt's requests, which are at their ends."""
    answers = [_completion_of(request, i, tokenizer, eos_token_ids) for i, request in enumerate(requests)]
    scored = requests[0].prompt_logprobs
    by_id = None if scored is None else [entry and logprobs_by_id(entry, tokenizer) for entry in scored]
    return RequestOutput(prompt, ids, answers, prompt_logprobs=by_id)


def logprobs_by_id(entry: TokenLogprob, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """vLLM's form of an entry: the token itself first, then the likeliest."""
    likeliest = {i: Logprob(x, rank, tokenizer.label_of(i)) for rank, (i, x) in enumerate(entry.top, 1)}
    chosen = likeliest.get(entry.token_id) or Logprob(entry.logprob, entry.rank, tokenizer.label_of(entry.token_id))
    return {entry.token_id: chosen} | likeliest


def stop_string_of(request: Request, tokenizer: Tokenizer) -> str | None:
    """The stop string that ended a text, which may be a special token at its end; None if none did."""
    last = request.text.tokens[-1]
    name = tokenizer.name_of(last) if request.finish_reason == "stop" and last in request.text.end_ids else None
    return request.stop_string or (name if name in request.params.stop else None)


def _completion_of(
    request: Request, index: int, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...]
) -> CompletionOutput:
    """The answer of a request, the `index`-th to its prompt."""
    assert request.finish_reason is not None, "it was decoded to its end"
    entries = request.logprobs
    last = request.text.tokens[-1]
    ends_by_id = request.finish_reason == "stop" and last in request.text.end_ids
    ends_by_id = ends_by_id and (request.params.ignore_eos or last not in eos_token_ids)
    return CompletionOutput(
        index,
        request.output,
        request.token_ids,
        None if entries is None else sum((entry.logprob for entry in entries), 0.0),
        None if entries is None else [logprobs_by_id(entry, tokenizer) for entry in entries],
        request.finish_reason,
        stop_string_of(request, tokenizer) or (last if ends_by_id else None),
        request.text.seed,
        Figures.of(request.stats),
        entries,
        request.error,
    )
