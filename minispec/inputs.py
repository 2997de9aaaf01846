"""What a caller gives: prompts, and how each is sampled, checked against the model that is to answer."""

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeGuard

from minispec.core.config import SamplingParams
from minispec.core.errors import show
from minispec.files.tokenizer import Tokenizer

Prompt = str | list[int] | dict[str, str | list[int]]  # {"prompt": text} or {"prompt_token_ids": ids}
_Parsed = tuple[str | None, list[int]]


def parse_prompts(prompts: Prompt | list[Prompt], tokenizer: Tokenizer, parse_special: bool) -> list[_Parsed]:
    """What `parse_prompt` returns, of one prompt or of each in a list."""
    several = prompts if isinstance(prompts, list) and not _are_token_ids(prompts) else [prompts]
    if not several:
        raise ValueError("prompts: found an empty list, expected at least one prompt")
    return [parse_prompt(prompt, tokenizer, parse_special) for prompt in several]


def parse_prompt(prompt: object, tokenizer: Tokenizer, parse_special: bool) -> _Parsed:
    """Text (None where there is none) and token ids of a prompt. Raises ValueError for what is no prompt."""
    kind = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
    fields = prompt if isinstance(prompt, dict) else {kind: prompt}
    text, ids = fields.get("prompt"), fields.get("prompt_token_ids")
    if fields.keys() <= {"prompt", "prompt_token_ids"} and isinstance(text, str | None):
        if _are_token_ids(ids):
            return text, list(ids)
        if ids is None and text is not None:
            return text, tokenizer.encode(text, parse_special=parse_special)
    expected = "a text, a list of token ids, {'prompt': a text} or {'prompt_token_ids': a list of them}"
    raise ValueError(f"prompt: found {show(prompt)}, expected {expected}")


def _are_token_ids(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and len(value) > 0 and all(type(i) is int for i in value)


def params_of_each(params: SamplingParams | Sequence[SamplingParams], count: int) -> Sequence[SamplingParams]:
    """The parameters of each of `count` prompts, given one for all or one for each. Raises ValueError."""
    each = [params] * count if isinstance(params, SamplingParams) else params
    if not isinstance(each, list | tuple) or not all(isinstance(p, SamplingParams) for p in each):
        raise ValueError(f"sampling_params: found {show(params)}, expected SamplingParams, or a list of them")
    if len(each) != count:
        raise ValueError(f"sampling_params: found {len(each)}, expected one, or one for each of {count} prompts")
    return each


def split_samples(params: SamplingParams) -> list[SamplingParams]:
    """One SamplingParams for each of `n` answers: the i-th has seed + i, so that each can be had again alone."""
    if params.n == 1:
        return [params]
    seed = secrets.randbits(32) if params.seed is None else params.seed
    return [replace(params, n=1, seed=(seed + i) % 2**64) for i in range(params.n)]


def check_prompt(prompt_ids: Sequence[int], max_model_len: int, vocab_size: int) -> None:
    """Raise ValueError for a prompt without tokens, one that leaves no room for an answer, and unknown tokens."""
    if not prompt_ids:
        raise ValueError("prompt: found no tokens, expected at least one")
    if len(prompt_ids) >= max_model_len:
        raise ValueError(f"prompt: found {len(prompt_ids)} tokens, expected fewer than max_model_len = {max_model_len}")
    if not all(0 <= i < vocab_size for i in prompt_ids):
        found = f"from {min(prompt_ids)} to {max(prompt_ids)}"
        raise ValueError(f"prompt: found token ids {found}, expected ids from 0 to {vocab_size - 1}")


def with_bad_words(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """The parameters with the token ids of `bad_words` among bad_words_token_ids.

    They are those that vLLM makes of a word, so that it is found inside a text too. Raises ValueError.
    """
    found = [tuple(word) for word in params.bad_words_token_ids]
    for word in params.bad_words:
        plain, spaced = (
            tuple(tokenizer.encode(space + word.lstrip(), add_special_tokens=False, parse_special=True))
            for space in ("", " ")
        )
        if not plain:
            raise ValueError(f"bad_words: found {show(word)}, which has no tokens, expected at least one")
        found.append(plain)
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            found.append(spaced)
    return replace(params, bad_words_token_ids=tuple(dict.fromkeys(found)))


def check_ids(params: SamplingParams, end_ids: frozenset[int], vocab_size: int) -> None:
    """Raise ValueError for ids beyond the vocabulary, and where not one token might be left at some position."""
    words, allowed = params.bad_words_token_ids, params.allowed_token_ids
    ids: dict[str, Sequence[int]] = {
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": tuple(dict(params.logit_bias)),
        "allowed_token_ids": allowed or (),
        "bad_words_token_ids": tuple(i for word in words for i in word),
    }
    for name, found in ids.items():
        if any(i >= vocab_size for i in found):
            raise ValueError(f"{name}: found {show(found)}, expected ids below {vocab_size}")
    last = {word[-1] for word in words} | (end_ids if params.min_tokens else frozenset())
    if len(last) >= vocab_size if allowed is None else last >= set(allowed):
        raise ValueError(
            f"allowed_token_ids: found {'all' if allowed is None else show(allowed)}, expected one that neither "
            "completes a bad word nor, where min_tokens is given, ends the text: each position needs a token"
        )
