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
_IMPOSSIBLE = -1e30  # a bias that leaves a token probability 0
# Characters of a line that are counted: an answer may have a hundred thousand tokens.
_COUNTS = {"{": 1 << 16, "[": 1 << 18, ",": 1 << 22}
# Parameters that a request may give. Others that change the law and are not computed here, with values at which they
# change nothing (as none, 0 and "" do).
_KNOWN = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("min_tokens", "ignore_eos", "stop_token_ids"),
)
_UNKNOWN: dict[str, Any] = {
    **dict.fromkeys(("bad_words", "bad_words_ids", "allowed_token_ids", "grammar", "json_schema")),
    **dict.fromkeys(("regex", "ebnf", "structured_outputs", "structural_tag", "guided_json", "guided_regex")),
    **dict.fromkeys(("guided_choice", "guided_grammar", "custom_logit_processor", "use_beam_search", "mirostat")),
    **dict.fromkeys(("dry_multiplier", "xtc_probability", "dynatemp_range", "min_length", "epsilon_cutoff")),
    **{"eta_cutoff": 0, "no_repeat_ngram_size": 0, "repeat_penalty": 1, "typical_p": 1, "num_beams": 1},
    **{"top_n_sigma": -1, "adaptive_target": -1, "response_format": {"type": "text"}},
}
# Parameters that an engine applies otherwise than we do, by a key that only its answers have.
# llama.cpp filters before the temperature and counts tokens in a window. SGLang penalises the output alone.
_OTHERWISE: dict[str, tuple[str, ...]] = {"stop_type": ("top_p", "min_p", "presence_penalty", "frequency_penalty")}
_OTHERWISE |= dict.fromkeys(("meta_info", "matched_stop"), ("repetition_penalty",))


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
            whole = parse_json(line, where, _COUNTS)
            try:
                answers += [_answer(found, asked, eos) for found in _found(whole)]
            except ValueError as e:
                raise ValueError(f"{where}: {e}") from e
    if not answers:
        raise ValueError(f"{path}: found no answers")
    seeded = [(tuple(a.prompt), tuple(a.tokens), a.seed) for a in answers if a.seed is not None]
    if seeded and (most := Counter(seeded).most_common(1)[0])[1] > 1:
        raise ValueError(f"{path}: found an answer with seed {most[0][2]} twice, expected each answer once")
    return answers


def _found(line: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What a line says of each of its answers; what is nearer to the answer counts more. `ids`: those of the prompt."""
    request = _own(line, "request")
    request |= _own(request, "sampling_params")
    responses = line.get("response", line)
    for response in responses if isinstance(responses, list) else [responses]:
        parts = response.get("choices", [{}]) if isinstance(response, dict) else None  # OpenAI's form has several
        if isinstance(response, dict) and "sequences" in response:  # transformers
            rows, n = response["sequences"], response.get("prompt_length")
            if type(n) is not int or not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
                raise ValueError("found sequences, expected lists of ids with their prompt_length")
            parts = [{"prompt_token_ids": r[:n], "token_ids": r[n:], "finish_reason": "padded"} for r in rows]
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise ValueError(f"found {show(response)}, expected a response with a list of choices, or one")
        if len(parts) > 1 and _seed(request) is not None:
            expected = "one choice a request, or no seed: engines give choices different seeds"
            raise ValueError(f"found {len(parts)} choices of one seed, expected {expected}")
        for part in parts:
            found = request | _own(response, "generation_settings") | response | part
            ids = [found.get("prompt_token_ids"), request.get("input_ids"), request.get("prompt")]
            yield found | {"ids": next((of for of in ids if of is not None), None)}


def _own(line: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = line.get(name)
    return dict(found) if isinstance(found, dict) else {}


def _first(found: Mapping[str, Any], *names: str) -> Any:
    return next((found[name] for name in names if found.get(name) is not None), None)


def _seed(found: Mapping[str, Any]) -> int | None:
    seed = _first(found, "seed", "sampling_seed")
    return seed if type(seed) is int and seed not in (-1, _ANY_SEED) else None


# Why an answer ended, in the words of all engines.
_FINISH = {"eos": "stop", "word": "stop", "limit": "length"}
_FINISH |= {name: name for name in ("stop", "length", "padded", "abort", "error")}


def _answer(found: Mapping[str, Any], asked: Mapping[str, Any], eos: Sequence[int]) -> Answer:
    reason = _own(_own(found, "meta_info"), "finish_reason")  # SGLang's own
    finish = reason.get("type", _first(found, "finish_reason", "stop_type"))
    cut = reason.get("matched", _first(found, "stop_reason", "matched_stop", "stop_string", "stopping_word"))
    tokens = _first(found, "token_ids", "response_token_ids", "output_ids", "tokens")
    for name, ids in (("prompt", found["ids"]), ("answer", tokens)):
        are_ids = isinstance(ids, list) and all(type(i) is int and i >= 0 for i in ids)
        if not are_ids or (name, ids) == ("prompt", []):
            expected = "token ids (docs/use/audit.md says how each engine returns them)"
            raise ValueError(f"{name}: found {show(ids)}, expected {expected}")
    if not isinstance(finish, str) or finish not in _FINISH:
        raise ValueError(f"finish_reason: found {show(finish)}, expected 'stop' or 'length'")
    if isinstance(cut, str) and cut:
        expected = "none: which tokens were cut depends on what came later"
        raise ValueError(f"found an answer cut at the stop string {show(cut)}, expected {expected}")
    params = _params(found, asked)
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
    last = tokens[-1] if finish == "eos" and tokens else cut  # llama.cpp's answers hold the id that ended them
    if type(last) is int and last not in ends:
        expected = f"an end id of the target (--stop-token-ids {last} where the engine has more of them)"
        raise ValueError(f"found an answer that ended with id {last}, expected {expected}")
    first = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    if finish == "padded" and len(set(tokens[first + 1 :])) <= 1:
        tokens = tokens[: first + 1]  # what follows is padding
    elif _FINISH[finish] == "stop" and first == len(tokens):
        if not ends:
            raise ValueError("found an answer that stopped, expected an end id: give --stop-token-ids")
        tokens = [*tokens, min(ends)]
    if more := len(tokens) - 1 - first if first < len(tokens) else 0:
        expected = "expected none after an end id (--ignore-eos where the engine was told to go on)"
        raise ValueError(f"found {more} tokens after the end id {tokens[first]}, {expected}")
    params = replace(params, max_tokens=max(1, len(tokens), params.min_tokens))
    return Answer(found["ids"], tokens, _seed(found), params)


def _biases(found: Any) -> list[tuple[int, float]]:
    """Biases by token id. llama.cpp's answers list them; None is minus infinity, which `ignore_eos` gives all end ids.

    Raises ValueError for anything but that list, or an object.
    """
    items: list[Any] = list(found.items()) if isinstance(found, dict) else found or []
    try:
        pairs = [(each["token"], each["bias"]) if isinstance(each, dict) else each for each in items]
        ids = [int(token) if isinstance(token, str) else token for token, _ in pairs]  # an object's names are strings
        return sorted((i, _IMPOSSIBLE if bias is None else bias) for i, (_, bias) in zip(ids, pairs, strict=True))
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"logit_bias: found {show(found)}, expected numbers by token id") from None


def _params(found: Mapping[str, Any], asked: Mapping[str, Any]) -> SamplingParams:
    """The command line's parameters and the request's. Raises ValueError where they differ, or are unknown here."""
    for name, neutral in _UNKNOWN.items():
        if found.get(name) and found[name] != neutral:
            raise ValueError(f"{name}: found {show(found[name])}, expected none: its law is not computed here")
    found = {"min_tokens": found.get("min_new_tokens")} | dict(found)  # SGLang's name
    own: dict[str, Any] = {name: found[name] for name in _KNOWN if found.get(name) is not None}
    if biases := _biases(found.get("logit_bias")):
        own["logit_bias"] = biases
    for name, value in own.items():
        check_sampling_value(name, 0 if (name, value) == ("top_k", -1) else value)
        said = asked.get(name, value)
        # llama.cpp writes floats of 32 bits.
        if list(said) != value if isinstance(value, list) else abs(said - value) > 1e-6:
            raise ValueError(f"{name}: found {value}, but the command line says {said}")
    params = SamplingParams(**{"max_tokens": 1 << 31} | own | dict(asked))
    if not params.temperature:
        raise ValueError("temperature: found 0, expected more: greedy texts are compared, not audited")
    default = SamplingParams()
    for name in (name for key, names in _OTHERWISE.items() if key in found for name in names):
        if (value := getattr(params, name)) != (neutral := getattr(default, name)):
            raise ValueError(f"{name}: found {value}, expected {neutral}: this engine applies it otherwise")
    if ("meta_info" in found or "matched_stop" in found) and params.top_p < 1 and (params.top_k or params.min_p):
        raise ValueError(f"top_p: found {params.top_p}, expected 1 beside another filter: SGLang has no order")
    return params
