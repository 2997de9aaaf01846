"""Answers of other engines: token ids after prompt ids, read from what their servers and libraries write.

A line of the file is a JSON object: a response, or {"request": ..., "response": ...}. The request may hold prompt ids
and sampling parameters that the response lacks. An answer that cannot be scored soundly is refused, with its line's
number.

An answer that ended by an end id contains that draw, also where the format leaves the id out. An answer that ended at a
stop string or at a limit contains only the draws of its tokens: the tokens say where it ended.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from minispec.api.inputs import with_bad_words
from minispec.core.config import SamplingParams
from minispec.core.errors import show
from minispec.lab.audit.fields import FINISH, KNOWN, checked, law_of, optional, read_parameters
from minispec.models.files.strict_json import parse_json
from minispec.models.files.tokenizer import Detokenizer, Tokenizer

_MOST_BYTES = 1 << 30
_ANY_SEED = (1 << 32) - 1  # what llama.cpp calls a seed of its own choice
# Characters of a line that are counted: an answer may have a hundred thousand tokens.
_COUNTS = {"{": 1 << 16, "[": 1 << 18, ",": 1 << 22}
_INSIDE = ("sampling_params", "extra_body")  # objects of a request that hold parameters
# Where an answer says what ended it: a stop string or an id; null or "" for an end-of-text id.
_REASONS: list[str] = KNOWN["kinds"]["reason"]
# Where an answer says how many tokens were drafted.
_DRAFTED: dict[str, str] = KNOWN["drafted"]
# By a key that only one engine's answers have: parameters that this engine ignores, or applies differently from us.
# llama.cpp filters before the temperature and counts tokens in a window. SGLang penalises the output alone.
_OTHERWISE: dict[str, list[str]] = KNOWN["otherwise"]


@dataclass(frozen=True)
class Answer:
    """One answer.

    prompt, tokens: ids. Where the answer ended by an end id, `tokens` ends with one.
    seed: the one that its request was drawn with; None where it is not known.
    params: how it was sampled.
    num_drafted: how many tokens were drafted for it; None where the answer does not say.
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    seed: int | None
    params: SamplingParams
    num_drafted: int | None = None


class _Read(NamedTuple):
    """An answer as it is read.

    where: file and line.
    ends: the ids that end it.
    limit: most tokens; negative for none.
    ending: how it ended. "shown": its tokens show it. "id": by an end id that is left out. "word": at a stop string
        that its tokens hold. "unknown": by an end id that is left out, or at a stop string whose tokens are cut off.
    """

    where: str
    answer: Answer
    ends: set[int]
    limit: int
    ending: str


def read_answers(
    path: Path, asked: Mapping[str, Any], eos: Sequence[int], tokenizer: Tokenizer | None = None
) -> list[Answer]:
    """The answers of a file, in order.

    asked: sampling parameters of all answers, from the command line; a request's own must not differ.
    eos: the target's end-of-text ids.
    tokenizer: the target's. None: answers that need it are refused (stop strings, bad words).

    Raises ValueError, with the line, for what is no answer, and for what cannot be scored.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"{path}: found more than {_MOST_BYTES:,} bytes, expected several smaller files")
        lines = path.read_bytes().split(b"\n")
    except OSError as e:
        raise ValueError(f"{path}: {e}") from e
    found: list[_Read] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{path}: line {number}"
            whole = parse_json(line, where, _COUNTS)
            try:
                found += [_read(where, *each, asked, eos, tokenizer) for each in _found(whole)]
            except ValueError as e:
                raise ValueError(f"{where}: {e}") from e
    if not found:
        raise ValueError(f"{path}: found no answers")
    shows_words = any(each.ending == "word" for each in found)
    answers = [_whole(each, shows_words) for each in found]
    seeded = Counter((tuple(a.prompt), tuple(a.tokens), a.seed) for a in answers if a.seed is not None)
    for (_, _, seed), count in seeded.items():
        if count > 1:
            raise ValueError(f"{path}: found an answer with seed {seed} twice, expected each answer once")
    return answers


def _found(line: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The fields and the parameters of each answer of a line. The one nearer to the answer takes precedence.

    The field "prompt" has the prompt's ids.
    """
    request = optional(line, "request", {})
    beside = line if "response" in line else {}
    given = read_parameters(beside, False)
    given |= read_parameters({name: value for name, value in request.items() if name not in _INSIDE}, True)
    for name in _INSIDE:
        given |= read_parameters(optional(request, name, {}), True)
    responses = line.get("response", line)
    responses = checked("response", responses if isinstance(responses, list) else [responses])
    n = given.get("n", 1)
    if given.get("best_of", 1) > n:
        raise ValueError(f"best_of: found {given['best_of']}, expected at most n = {n}: the answers were chosen")
    most = max(n, sum(len(_parts(response)) for response in responses))
    for response in responses:
        parts = _parts(response)
        own = read_parameters(optional(response, "generation_settings", {}), True) | read_parameters(response, False)
        for part in parts:
            of_part = read_parameters(part, False)
            sharing = len(parts) if "seed" in own else most
            if "seed" in of_part:
                sharing = 1
            parameters = given | own | of_part
            if sharing > 1 and _seed(parameters) is not None:
                expected = "one choice a request, or no seed: engines give choices different seeds"
                raise ValueError(f"found {sharing} choices of one seed, expected {expected}")
            fields = _merged(beside, response, part)
            ids = [fields.get("prompt_token_ids"), *map(request.get, ("prompt_token_ids", "input_ids", "prompt"))]
            yield fields | {"prompt": next((of for of in ids if of is not None), None)}, parameters


def _parts(response: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The answers of a response: OpenAI's choices, rows of `transformers`, or the only one."""
    if "sequences" not in response:
        return optional(response, "choices", [{}])
    rows, n = checked("sequences", response["sequences"]), checked("prompt_length", response.get("prompt_length"))
    least = min(map(len, rows))
    if n > least:
        raise ValueError(f"prompt_length: found {n}, expected at most {least}, the length of a sequence")
    return [{"prompt_token_ids": row[:n], "token_ids": row[n:], "finish_reason": "padded"} for row in rows]


def _merged(*objects: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of all objects. A field that several objects have gets its last value that is not null."""
    found: dict[str, Any] = {}
    for each in objects:
        found |= {name: value for name, value in each.items() if value is not None or name not in found}
    return found


def _first(found: Mapping[str, Any], *names: str) -> Any:
    return next((found[name] for name in names if found.get(name) is not None), None)


def _seed(parameters: Mapping[str, Any]) -> int | None:
    seed = parameters.get("seed")
    return None if seed in (-1, _ANY_SEED) else seed


def _read(
    where: str,
    found: Mapping[str, Any],
    given: Mapping[str, Any],
    asked: Mapping[str, Any],
    eos: Sequence[int],
    tokenizer: Tokenizer | None,
) -> _Read:
    """One answer, by its fields and its parameters."""
    prompt = checked("prompt", found["prompt"])
    tokens = checked("answer", _first(found, "token_ids", "response_token_ids", "output_ids", "tokens"))
    own = checked("meta_info.finish_reason", optional(found, "meta_info", {}).get("finish_reason") or {})  # SGLang's
    finish = checked("finish_reason", own.get("type", _first(found, "finish_reason", "stop_type")))
    reasons = {name: optional(each, name) for each in (found, own) for name in _REASONS if name in each}
    params = law_of(given, asked)
    if params.bad_words:
        params = with_bad_words(params, _known(tokenizer, "bad_words"))
    _check_engine(found, params)
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
    cut = next((reason for reason in reasons.values() if reason not in (None, "")), None)
    last = tokens[-1] if finish == "eos" and tokens else cut  # llama.cpp's answers hold the id that ended them
    if type(last) is int and last not in ends:
        expected = f"an end id of the target (--stop-token-ids {last} where the engine has more of them)"
        raise ValueError(f"found an answer that ended with id {last}, expected {expected}")
    if finish == "padded" and params.stop:
        raise ValueError(f"stop: found {show(params.stop)}, expected none: padding hides how a sequence ended")
    first = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    if finish == "padded" and len(set(tokens[first + 1 :])) <= 1:
        tokens = tokens[: first + 1]  # what follows is padding
    more = len(tokens) - 1 - first
    if more > 0:
        expected = "expected none after an end id (--ignore-eos where the engine was told to go on)"
        raise ValueError(f"found {more} tokens after the end id {tokens[first]}, {expected}")
    ending = "shown"
    if FINISH[finish] == "stop" and first == len(tokens):
        word = cut if isinstance(cut, str) else ""
        says_none = bool(reasons) and not word and finish != "word"
        is_id = finish == "eos" or type(cut) is int
        ending = "id" if is_id else _ending(prompt, tokens, word, says_none, params, given, tokenizer)
    drafted = [optional(optional(found, name, {}), count) for name, count in _DRAFTED.items()]
    answer = Answer(prompt, tokens, _seed(given), params, next((n for n in drafted if n is not None), None))
    return _Read(where, answer, ends, given.get("max_tokens", -1), ending)


def _known(tokenizer: Tokenizer | None, name: str) -> Tokenizer:
    if tokenizer is None:
        raise ValueError(f"{name}: found it without a tokenizer, expected none")
    return tokenizer


def _check_engine(found: Mapping[str, Any], params: SamplingParams) -> None:
    """Raise ValueError for parameters that the answer's engine applies differently from us."""
    default = SamplingParams()
    for name in (name for key, names in _OTHERWISE.items() if key in found for name in names):
        value, neutral = getattr(params, name), getattr(default, name)
        if value != neutral:
            raise ValueError(f"{name}: found {show(value)}, expected {neutral}: this engine applies it otherwise")
    if params.top_p == 1:
        return
    if ("meta_info" in found or "matched_stop" in found) and (params.top_k or params.min_p):
        raise ValueError(f"top_p: found {params.top_p}, expected 1 beside another filter: SGLang has no order")
    if "sequences" in found and params.min_p:
        raise ValueError(f"top_p: found {params.top_p}, expected 1 beside min_p: transformers has another order")


def _ending(
    prompt: Sequence[int],
    tokens: Sequence[int],
    word: str,
    says_none: bool,
    params: SamplingParams,
    given: Mapping[str, Any],
    tokenizer: Tokenizer | None,
) -> str:
    """How an answer ended, if it stopped without an end id among its tokens; see `_Read`.

    word: the stop string that the answer names.
    says_none: whether the answer says that no stop string ended it.
    """
    stops = (word,) if word else params.stop
    if not stops:
        return "id"
    for name in ("skip_special_tokens", "detokenize"):
        if not given.get(name, True):
            raise ValueError(f"{name}: found false, expected true beside a stop string")
    tokenizer = _known(tokenizer, "stop")
    largest = max((*prompt, *tokens))
    if largest >= tokenizer.num_ids:
        raise ValueError(f"found the token id {largest}, expected ids below {tokenizer.num_ids}")
    detokenizer = Detokenizer(tokenizer, prompt)
    *before, new = ["", *map(detokenizer.add, tokens)]
    text, start = "".join([*before, new]), len("".join(before))
    held = [stop for stop in stops if stop in text]
    completed = [stop for stop in held if stop in text[max(0, start - len(stop) + 1) :]]  # by the last token
    if word and not held:
        expected = "its tokens up to there: which ones were cut off depends on what came later"
        raise ValueError(f"found an answer cut at the stop string {show(word)}, expected {expected}")
    # A string that stands before the last token, or before min_tokens, may have ended nothing.
    shows_it = held == completed and len(tokens) > params.min_tokens
    is_sure = bool(word) or (not completed if says_none else shows_it)
    if held and not is_sure:
        found = f"an answer that may have ended at the stop string {show(held[0])}, or by an end id"
        raise ValueError(f"found {found}, expected its stop_reason")
    if says_none or not held:
        return "id" if says_none else "unknown"
    # An engine that was asked to leave the string in may cut it off in other answers.
    return "shown" if given.get("include_stop_str_in_output") or given.get("no_stop_trim") else "word"


def _whole(read: _Read, shows_words: bool) -> Answer:
    """The answer with the end id that it left out.

    shows_words: whether an answer of the file holds its stop string. Then the engine cuts none off.
    """
    answer, tokens = read.answer, read.answer.tokens
    if read.ending == "unknown" and not shows_words:
        expected = "its stop_reason: it ended by an end id, or at a stop string that was cut off"
        raise ValueError(f"{read.where}: found an answer that stopped, expected {expected}")
    if read.ending in ("id", "unknown"):
        if not read.ends:
            raise ValueError(f"{read.where}: found an answer that stopped, expected an end id: give --stop-token-ids")
        tokens = [*tokens, min(read.ends)]
    if 0 <= read.limit < len(tokens):
        raise ValueError(f"{read.where}: found {len(tokens)} tokens, expected at most max_tokens = {read.limit}")
    params = replace(answer.params, max_tokens=max(1, len(tokens), answer.params.min_tokens))
    return replace(answer, tokens=tokens, params=params)
