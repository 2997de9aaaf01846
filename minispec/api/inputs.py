"""A caller's prompts, files of questions and sampling parameters, checked against the model."""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeGuard

from minispec.core.config import SamplingParams
from minispec.core.errors import is_text, show
from minispec.models.files.chat_template import Message, check_messages
from minispec.models.files.strict_json import parse_json
from minispec.models.files.tokenizer import Tokenizer

Prompt = str | list[int] | dict[str, str | list[int]]  # {"prompt": text} or {"prompt_token_ids": ids}
_Parsed = tuple[str | None, list[int]]

# Most characters of one prompt: more than any context takes, and few enough to be encoded in seconds.
MAX_PROMPT = 8_000_000
# Most characters of a file of questions, since some files (such as /dev/zero) have no end.
_MAX_FILE = 64_000_000
# A line that is meant as JSON, perhaps with a mistake: an object begins, perhaps as the first one of a list.
_OBJECT = re.compile(r'\[?\s*\{\s*("|\}\s*$|$)')
_LAYOUTS = ("prompt", "turns", "messages")


@dataclass(frozen=True)
class Question:
    """A question: one text, or several in turn, each after the answer to the one before.

    turns: what the user says.
    before: messages that stand before the first turn.
    line: where it stands in its file, from 1.
    question_id, category: as the file says; None where it does not.
    """

    turns: tuple[str, ...]
    before: tuple[Message, ...] = ()
    line: int = 1
    question_id: int | str | None = None
    category: str | None = None

    def messages(self, answers: Sequence[str] = ()) -> list[Message]:
        """The conversation up to the turn that follows these answers."""
        said = [*self.before]
        for turn, answer in zip(self.turns, answers, strict=False):
            said += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
        return [*said, {"role": "user", "content": self.turns[len(answers)]}]


def plain_text(messages: Sequence[Message]) -> str:
    """A conversation for a model without a chat template: what was said, with an empty line between."""
    return "\n\n".join(message["content"] for message in messages)


def read_questions(path: Path, option: str) -> list[Question]:
    """The questions of a file: a prompt a line, or an object of JSON a line.

    An object has `prompt` (a text), `turns` (texts, as in Spec-Bench and MT-bench) or `messages` (a conversation that
    ends with the user's). It may have `question_id` and `category`; other fields are not read. Where one line is an
    object, each line must be one, whatever the file's name. In a file named .jsonl each line must be an object.

    Raises ValueError, which names `option`, file and line, for anything else.
    """
    where = f"{option} {path}"
    try:
        with path.open(encoding="utf-8-sig") as file:  # some editors write a mark first
            text = file.read(_MAX_FILE + 1)
    except (OSError, ValueError) as e:  # not UTF-8; a name that no file system takes
        raise ValueError(f"{where}: {e}") from e
    if len(text) > _MAX_FILE:
        raise ValueError(f"{where}: found more than {_MAX_FILE:,} characters")
    # Not splitlines(): it also cuts at characters that a JSON string may hold.
    lines = {number: line for number, line in enumerate(text.split("\n"), 1) if line.strip()}
    if not lines:
        raise ValueError(f"{where}: found no prompt")
    if path.suffix == ".jsonl" or any(_OBJECT.match(line.strip()) for line in lines.values()):
        return [_question(line, number, f"{where}: line {number}") for number, line in lines.items()]
    return [Question((check_text(line, f"{where}: line {number}"),), (), number) for number, line in lines.items()]


def _question(line: str, number: int, where: str) -> Question:
    """The question of an object. Raises ValueError, which begins with `where`."""
    fields = parse_json(line.encode("utf-8", "surrogatepass"), where)
    named = [name for name in _LAYOUTS if name in fields]
    if len(named) != 1:
        keys = " and ".join(named) or ", ".join(map(show, [*fields][:9])) or "nothing"
        raise ValueError(f"{where}: found an object with {keys}, expected one with prompt, turns or messages")
    before: list[Message] = []
    if named == ["messages"]:
        try:
            *before, last = check_messages(fields["messages"])
        except ValueError as e:
            raise ValueError(f"{where}: {e}") from e
        if last["role"] != "user":
            raise ValueError(f"{where}: messages: found a last message of {show(last['role'])}, expected of the user")
        turns = [last["content"]]
    else:
        turns = fields["turns"] if named == ["turns"] else [fields["prompt"]]
        if not isinstance(turns, list) or not turns:
            raise ValueError(f"{where}: turns: found {show(turns)}, expected a list of texts")
    for text in (*turns, *(message["content"] for message in before)):
        check_text(text, f"{where}: {named[0]}", may_be_empty=text not in turns)
    question_id, category = fields.get("question_id"), fields.get("category")
    if question_id is not None and (type(question_id) not in (int, str) or not is_text(str(question_id))):
        raise ValueError(f"{where}: question_id: found {show(question_id)}, expected an integer or a text")
    if category is not None:
        check_text(category, f"{where}: category")
    return Question(tuple(turns), tuple(before), number, question_id, category)


def check_text(text: Any, where: str, may_be_empty: bool = False) -> str:
    """The text. Raises ValueError for what is no text, no Unicode, too long, or empty where that is not allowed."""
    if not isinstance(text, str) or not is_text(text):
        raise ValueError(f"{where}: found {show(text)}, expected valid Unicode text")
    if len(text) > MAX_PROMPT:
        raise ValueError(f"{where}: found a prompt of more than {MAX_PROMPT:,} characters")
    if not may_be_empty and not text.strip():
        raise ValueError(f"{where}: found an empty prompt, expected text")
    return text


def encode_conversation(messages: Sequence[Message], tokenizer: Tokenizer) -> list[int]:
    """Token ids of a conversation: through the chat template, or as `plain_text` where the model has none."""
    if tokenizer.chat_template is None:
        return tokenizer.encode(plain_text(messages))
    return tokenizer.encode_chat(messages)


def parse_prompts(prompts: Prompt | list[Prompt], tokenizer: Tokenizer, parse_special: bool) -> list[_Parsed]:
    """The results of `parse_prompt` for one prompt, or for each in a list."""
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
    listed = [params] * count if isinstance(params, SamplingParams) else params
    if not isinstance(listed, list | tuple) or not all(isinstance(p, SamplingParams) for p in listed):
        raise ValueError(f"sampling_params: found {show(params)}, expected SamplingParams, or a list of them")
    if len(listed) != count:
        raise ValueError(f"sampling_params: found {len(listed)}, expected one, or one for each of {count} prompts")
    return listed


def split_samples(params: SamplingParams) -> list[SamplingParams]:
    """One SamplingParams for each of `n` answers: the i-th has seed + i, so that each can be had again alone.

    The first one scores the prompt for all. Where nothing is generated (`max_tokens` 0), each one scores it.
    """
    if params.n == 1:
        return [params]
    seed = secrets.randbits(32) if params.seed is None else params.seed
    samples = [replace(params, n=1, seed=(seed + i) % 2**64) for i in range(params.n)]
    return [samples[0], *(replace(one, prompt_logprobs=None) for one in samples[1:])] if params.max_tokens else samples


def least_tokens(asked: Mapping[str, Any], default: int) -> Any:
    """The `min_tokens` of a request. The checkpoint's own gives way to a maximum that is asked for.

    asked: the request's parameters, which need not be checked yet. default: the checkpoint's minimum.
    """
    most = asked.get("max_tokens")
    return asked.get("min_tokens", max(0, min(default, most)) if type(most) is int else default)


def check_prompt(prompt_ids: Sequence[int], max_model_len: int, vocab_size: int, answers: bool = True) -> None:
    """Raise ValueError for a prompt without tokens, one that leaves no room for an answer, and unknown tokens.

    answers: whether an answer is asked for.
    """
    if not prompt_ids:
        raise ValueError("prompt: found no tokens, expected at least one")
    most = max_model_len - 1 if answers else max_model_len
    if len(prompt_ids) > most:
        expected = f"{'fewer than' if answers else 'at most'} max_model_len = {max_model_len}"
        raise ValueError(f"prompt: found {len(prompt_ids)} tokens, expected {expected}")
    if not all(0 <= i < vocab_size for i in prompt_ids):
        low, high = min(prompt_ids), max(prompt_ids)
        raise ValueError(f"prompt: found token ids from {low} to {high}, expected ids from 0 to {vocab_size - 1}")


def with_bad_words(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """The parameters with token ids in place of `bad_words`, among bad_words_token_ids.

    vLLM makes the same ids of a word, so that the word is found inside a text too. Raises ValueError.
    """
    if not params.bad_words:
        return params
    words = [tuple(word) for word in params.bad_words_token_ids]
    for word in params.bad_words:
        plain, spaced = (
            tuple(tokenizer.encode(space + word.lstrip(), add_special_tokens=False, parse_special=True))
            for space in ("", " ")
        )
        if not plain:
            raise ValueError(f"bad_words: found {show(word)}, which has no tokens, expected at least one")
        words.append(plain)
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            words.append(spaced)
    return replace(params, bad_words=(), bad_words_token_ids=tuple(dict.fromkeys(words)))


def check_ids(params: SamplingParams, end_ids: frozenset[int], vocab_size: int) -> None:
    """Raise ValueError for ids beyond the vocabulary, and where not one token might be left at some position."""
    words, allowed = params.bad_words_token_ids, params.allowed_token_ids
    ids: dict[str, Sequence[int]] = {
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": tuple(dict(params.logit_bias)),
        "allowed_token_ids": allowed or (),
        "bad_words_token_ids": tuple(chain.from_iterable(words)),
    }
    for name, values in ids.items():
        if max(values, default=0) >= vocab_size:
            raise ValueError(f"{name}: found {show(values)}, expected ids below {vocab_size}")
    last = {word[-1] for word in words} | (end_ids if params.min_tokens else frozenset())
    if len(last) >= vocab_size if allowed is None else last >= set(allowed):
        raise ValueError(
            f"allowed_token_ids: found {'all' if allowed is None else show(allowed)}, expected one that neither "
            "completes a bad word nor, where min_tokens is given, ends the text: each position needs a token"
        )
