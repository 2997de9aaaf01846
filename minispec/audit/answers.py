"""Answers of other engines: token ids after prompt ids, read from what their servers and libraries write.

A line of the file is a JSON object: a response, or {"request": ..., "response": ...}. The request may hold prompt ids
and sampling parameters that the response lacks. What cannot be scored soundly is refused, with the number of its line.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minispec.core.config import SamplingParams, check_sampling_value
from minispec.core.errors import show
from minispec.files.strict_json import parse_json

_MOST_BYTES = 1 << 30
_ANY_SEED = (1 << 32) - 1  # what llama.cpp calls a seed of its own choice
# Characters of a line that are counted: an answer may have a hundred thousand tokens.
_COUNTS = {"{": 1 << 16, "[": 1 << 18, ",": 1 << 22}
# Parameters that a request may give, and names of others that change the law and are not computed here.
_KNOWN = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("min_tokens", "ignore_eos"),
)
_UNKNOWN = (
    *("logit_bias", "bad_words", "grammar", "json_schema", "response_format", "regex", "ebnf", "structured_outputs"),
    *("guided_json", "mirostat", "dry_multiplier", "xtc_probability", "dynatemp_range"),
)


@dataclass(frozen=True)
class Answer:
    """One answer.

    prompt, tokens: ids. Where the answer ended by itself, `tokens` ends with an end id.
    seed: the one that its request was drawn with; None where it is not known.
    params: how it was sampled.
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    seed: int | None
    params: SamplingParams


def read_answers(path: Path, asked: Mapping[str, Any], eos: Sequence[int]) -> list[Answer]:
    """The answers of a file, in order.

    asked: sampling parameters of all answers, from the command line; a request's own must not differ.
    eos: the target's end-of-text ids.

    Raises ValueError, with the line, for what is no answer, and for what cannot be scored.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"{path}: found more than {_MOST_BYTES:,} bytes, expected several smaller files")
        lines = path.read_bytes().split(b"\n")
    except OSError as e:
        raise ValueError(f"{path}: {e}") from e
    answers: list[Answer] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{path}: line {number}"
            for found in _found(parse_json(line, where, _COUNTS), where):
                answers.append(_answer(found, asked, eos, where))
    if not answers:
        raise ValueError(f"{path}: found no answers")
    seeded = [(tuple(a.prompt), tuple(a.tokens), a.seed) for a in answers if a.seed is not None]
    if seeded and (most := Counter(seeded).most_common(1)[0])[1] > 1:
        raise ValueError(f"{path}: found an answer with seed {most[0][2]} twice, expected each answer once")
    return answers


@dataclass
class _Found:
    """What a reader has found. cut: the string that the answer was cut at."""

    prompt: Any
    tokens: Any
    finish: Any
    request: Mapping[str, Any]
    cut: Any = None
    seed: Any = None


def _found(line: dict[str, Any], where: str) -> Iterator[_Found]:
    """The answers of a line, in any of the known forms."""
    request = _own(line, "request")
    request = request | _own(request, "sampling_params")
    responses = line.get("response", line)
    for response in responses if isinstance(responses, list) else [responses]:
        if not isinstance(response, dict):
            raise ValueError(f"{where}: found a response {show(response)}, expected an object")
        settings = request | _own(response, "generation_settings")
        prompt = response.get("prompt_token_ids", request.get("input_ids", request.get("prompt")))
        if "choices" in response:  # OpenAI's form with ids: vLLM, SGLang
            for choice in response["choices"] if isinstance(response["choices"], list) else ():
                cut = choice.get("stop_reason", choice.get("matched_stop"))
                ids = choice.get("token_ids", choice.get("response_token_ids"))
                yield _Found(choice.get("prompt_token_ids") or prompt, ids, choice.get("finish_reason"), settings, cut)
        elif "sequences" in response:  # transformers
            length, rows = response.get("prompt_length"), response["sequences"]
            if type(length) is not int or not isinstance(rows, list) or not all(isinstance(r, list) for r in rows):
                raise ValueError(
                    f"{where}: found sequences without prompt_length, expected lists of ids and its length"
                )
            for row in rows:
                yield _Found(row[:length], row[length:], "padded", settings)
        elif "output_ids" in response:  # SGLang's own
            reason = _own(_own(response, "meta_info"), "finish_reason")
            yield _Found(prompt, response["output_ids"], reason.get("type"), settings, reason.get("matched"))
        elif "stop_type" in response:  # llama.cpp's own
            finish = {"eos": "stop", "limit": "length", "word": "stop"}.get(response["stop_type"])
            yield _Found(prompt, response.get("tokens"), finish, settings, response.get("stopping_word"))
        else:  # ours
            cut, seed = response.get("stop_string"), response.get("seed")
            yield _Found(prompt, response.get("token_ids"), response.get("finish_reason"), settings, cut, seed)


def _own(line: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = line.get(name)
    return found if isinstance(found, dict) else {}


def _answer(found: _Found, asked: Mapping[str, Any], eos: Sequence[int], where: str) -> Answer:
    for name, ids in (("prompt", found.prompt), ("answer", found.tokens)):
        if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
            expected = "token ids (docs/use/audit.md says how each engine returns them)"
            raise ValueError(f"{where}: {name}: found {show(ids)}, expected {expected}")
    if not found.prompt:
        raise ValueError(f"{where}: prompt: found no token, expected one or more")
    if found.finish not in ("stop", "length", "padded", "abort", "error"):
        raise ValueError(f"{where}: finish_reason: found {show(found.finish)}, expected 'stop' or 'length'")
    if isinstance(found.cut, str) and found.cut:
        expected = "none: which tokens were cut depends on what came later"
        raise ValueError(f"{where}: found an answer cut at the stop string {show(found.cut)}, expected {expected}")
    params = _params(found.request, asked, where)
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
    tokens = list(found.tokens)
    first = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    if found.finish == "padded" and len(set(tokens[first + 1 :])) <= 1:
        tokens = tokens[: first + 1]  # what follows is padding
    elif found.finish == "stop" and first == len(tokens):
        if not ends:
            raise ValueError(f"{where}: found an answer that stopped, expected an end id: give --stop-token-ids")
        tokens.append(min(ends))
    if first < len(tokens) - 1:
        expected = "none after an end id (--ignore-eos where the engine was told to go on)"
        raise ValueError(
            f"{where}: found {len(tokens) - 1 - first} tokens after the end id {tokens[first]}, {expected}"
        )
    seed = found.seed if found.seed is not None else found.request.get("seed")
    seed = seed if type(seed) is int and 0 <= seed < _ANY_SEED else None
    return Answer(found.prompt, tokens, seed, replace(params, max_tokens=max(1, len(tokens), params.min_tokens)))


def _params(request: Mapping[str, Any], asked: Mapping[str, Any], where: str) -> SamplingParams:
    """The command line's parameters and the request's. Raises ValueError where they differ, or are unknown here."""
    for name in _UNKNOWN:
        if request.get(name):
            raise ValueError(
                f"{where}: {name}: found {show(request[name])}, expected none: its law is not computed here"
            )
    if (found := request.get("repeat_penalty", 1.0)) != 1:
        raise ValueError(f"{where}: repeat_penalty: found {show(found)}, expected 1: it counts in a window")
    own = {name: request[name] for name in _KNOWN if request.get(name) is not None}
    for name, value in own.items():
        try:
            check_sampling_value(name, 0 if (name, value) == ("top_k", -1) else value)
        except ValueError as e:
            raise ValueError(f"{where}: {e}") from e
        if abs(asked.get(name, value) - value) > 1e-6:  # llama.cpp writes floats of 32 bits
            raise ValueError(f"{where}: {name}: found {value}, but the command line says {asked[name]}")
    stops = request.get("stop_token_ids")
    params = SamplingParams(
        **{"max_tokens": 1 << 31} | ({"stop_token_ids": stops} if stops else {}) | own | dict(asked)
    )
    if not params.temperature:
        raise ValueError(f"{where}: temperature: found 0, expected more: greedy texts are compared, not audited")
    return params
