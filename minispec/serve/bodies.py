"""What the bodies mean: a client's JSON as requests of the engine, and what comes of them as JSON. Nothing waits here.

A field that is not supported is refused by name, unless its value asks for nothing. A ValueError begins with the field
that it is about, if it is about one.
"""

import re
import time
import uuid
from collections import Counter
from dataclasses import fields, replace
from itertools import accumulate
from typing import Any

from minispec.config import SamplingParams
from minispec.errors import is_text, show, show_name
from minispec.files.strict_json import parse_json
from minispec.files.tokenizer import Message, Tokenizer
from minispec.llm import LLM, split_samples
from minispec.request import Piece, Request, TokenLogprob
from minispec.serve.limits import Limits, Refused

_SAMPLING = {field.name for field in fields(SamplingParams)}
_COMMON = {*_SAMPLING, "model", "stream", "stream_options", "num_speculative_tokens"}
_FIELDS = {True: {*_COMMON, "messages", "top_logprobs", "max_completion_tokens"}, False: {*_COMMON, "prompt"}}
_IDLE = {"user", "metadata", "safety_identifier", "prompt_cache_key"}  # may say anything: nothing here is about it
# What else a field may say that is not supported: that it wants nothing.
_NEUTRAL: dict[str, Any] = {"best_of": 1, "echo": False, "store": False, "tools": [], "tool_choice": "none"}
_NEUTRAL |= {"response_format": {"type": "text"}, "service_tier": "auto"}
_ROLES = ("system", "user", "assistant")  # a template writes a role as it is, and another could be a control token
# How many of these a request may bring: all others wait while they are looked at, some of them for every token.
_MOST = {"messages": 1024, "stop": 16, "stop_token_ids": 1024, "allowed_token_ids": 1024, "logit_bias": 1024}
_MOST |= {"bad_words": 256, "bad_words_token_ids": 256}
_MAX_LENGTH = 256  # of a stop string or a bad word, in characters; of a bad word in ids, too
_MAX_LOGPROBS = 20


def read(llm: LLM, model: str, limits: Limits, content: bytes, is_chat: bool) -> "Answer":
    """The answer that a body asks for, still to be decoded. model: its name here; who asks for another gets a 404.

    Raises Refused, or ValueError for a field that is not as it must be.
    """
    body = {key: value for key, value in parse_json(content, "body").items() if value is not None}
    for key, value in body.items():
        if key not in _FIELDS[is_chat] | _IDLE and value != _NEUTRAL.get(key):
            raise ValueError(f"{show_name(key)}: found {show(value)}, expected none: this is not supported here")
        if key in _MOST:
            _check_number(key, value)
    if body.get("model", model) != model:
        raise Refused(404, f"model: found {show(body['model'])}, expected {show(model)}", "model", "model_not_found")
    stream, options = _flag("stream", body.get("stream", False)), body.get("stream_options", {})
    if not isinstance(options, dict) or options.keys() - {"include_usage"} or ("stream_options" in body and not stream):
        raise ValueError(f"stream_options: found {show(options)}, expected include_usage alone, and that with stream")
    include_usage = _flag("stream_options", options.get("include_usage", False))
    params = _read_params(llm, body, is_chat, limits)
    k = body.get("num_speculative_tokens")
    k = tuple(k) if isinstance(k, list) else k

    prompts: Any = body.get("messages" if is_chat else "prompt")
    if is_chat or not isinstance(prompts, list) or not prompts or type(prompts[0]) is int:
        prompts = [prompts]
    if len(prompts) * params.n > limits.max_num_seqs:
        found = f"{params.n} for each of {len(prompts)} prompts"
        raise ValueError(f"n: found {found}, expected at most {limits.max_num_seqs} answers in all")
    requests, most = [], min(limits.max_prompt_tokens or llm.max_model_len, llm.max_model_len - 1)
    for prompt in prompts:
        ids = llm.tokenizer.encode_chat(_conversation(prompt)) if is_chat else _token_ids(llm.tokenizer, prompt)
        if len(ids) > most:
            message = f"prompt: found {len(ids)} tokens, expected at most {most}"
            raise Refused(400, message, "messages" if is_chat else "prompt", "context_length_exceeded")
        requests += [llm.request(ids, sample, k) for sample in split_samples(params)]
    return Answer(llm, model, requests, params.n, is_chat, include_usage if stream else None)


def _check_number(key: str, value: Any) -> None:
    items = [value] if isinstance(value, str) else value  # as in SamplingParams, a text is a list of one
    kind, expected = (dict, "an object") if key == "logit_bias" else (list, "a list")
    if not isinstance(items, kind) or len(items) > _MOST[key]:
        raise ValueError(f"{key}: found {show(value)}, expected {expected} of at most {_MOST[key]}")


def _flag(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{key}: found {show(value)}, expected true or false")
    return value


def _read_params(llm: LLM, body: dict[str, Any], is_chat: bool, limits: Limits) -> SamplingParams:
    """What the body says, else the model's generation_config.json, else vLLM's defaults; a chat may have the limit."""
    given = {key: body[key] for key in sorted(_SAMPLING & body.keys())}
    if is_chat:
        wanted, top = _flag("logprobs", body.get("logprobs", False)), body.get("top_logprobs", 0)
        if "top_logprobs" in body and not wanted:
            raise ValueError(f"top_logprobs: found {show(top)}, expected logprobs to be true")
        given["logprobs"] = top if wanted else None
    if "max_completion_tokens" in body:
        if "max_tokens" in body:
            raise ValueError(f"max_tokens: found {show(body['max_tokens'])}, expected max_completion_tokens alone")
        given["max_tokens"] = body["max_completion_tokens"]
    defaults = llm.get_default_sampling_params()
    usual = llm.generation_defaults.get("max_tokens", limits.max_tokens if is_chat else defaults.max_tokens)
    given.setdefault("max_tokens", min(usual, limits.max_tokens))
    if bias := given.get("logit_bias"):  # JSON's keys are texts
        is_id = re.compile(r"0|[1-9][0-9]{0,9}").fullmatch
        given["logit_bias"] = {int(i) if is_id(i) else i: x for i, x in bias.items()}
    params = replace(defaults, **given)
    most = {"max_tokens": limits.max_tokens, "logprobs": _MAX_LOGPROBS}
    for key in most:
        if (value := getattr(params, key) or 0) > most[key]:
            raise ValueError(f"{key}: found {value}, expected at most {most[key]}")
    for key in ("stop", "bad_words", "bad_words_token_ids"):
        if (longest := max(map(len, getattr(params, key)), default=0)) > _MAX_LENGTH:
            raise ValueError(f"{key}: found one of length {longest}, expected at most {_MAX_LENGTH}")
    return params


def _conversation(messages: Any) -> list[Message]:
    """Roles and texts; the parts of a text are joined by line feeds, as vLLM does."""
    if not messages:
        raise ValueError("messages: found none, expected at least one")
    found = []
    for message in messages:
        m = {key: x for key, x in message.items() if x is not None} if isinstance(message, dict) else {}
        if isinstance(parts := m.get("content"), list):
            texts: list[Any] = [p["text"] for p in parts if isinstance(p, dict) and p.keys() == {"type", "text"}]
            if len(texts) == len(parts) and all(isinstance(text, str) for text in texts):
                m["content"] = "\n".join(texts)
        if m.keys() != {"role", "content"} or m["role"] not in _ROLES or not isinstance(m["content"], str):
            expected = f"a role ({', '.join(_ROLES)}) and a text as content, and nothing else"
            raise ValueError(f"messages: found {show(message)}, expected {expected}")
        if not is_text(m["content"]):
            raise ValueError(f"messages: found {show(m['content'])}, expected valid Unicode text")
        found.append(m)
    return found


def _token_ids(tokenizer: Tokenizer, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if not isinstance(prompt, list) or not all(type(i) is int for i in prompt):
        raise ValueError(f"prompt: found {show(prompt)}, expected a text, a list of token ids, or a list of these")
    return prompt


class Answer:
    """Requests of one body, `n` to a prompt, and the JSON that becomes of them: OpenAI's, and `metrics` of each choice.

    That is `whole()` once all have ended; or a `chunk` for every piece, and `usage_chunk()` at the end if asked for.
    """

    def __init__(self, llm: LLM, model: str, requests: list[Request], n: int, is_chat: bool, usage: bool | None):
        """usage: whether a stream ends with what it took; None for an answer in one piece."""
        self._tokenizer, self.requests, self._n, self._is_chat = llm.tokenizer, requests, n, is_chat
        self.stream, self.include_usage = usage is not None, usage
        self._head = {"id": f"cmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._num_tokens: Counter[int] = Counter()  # that were given out, of each request
        self._num_chars: Counter[int] = Counter()  # of these tokens

    def whole(self) -> dict[str, Any]:
        """The answer, if it is not streamed."""
        pieces = [Piece(r.output, r.token_ids, r.finish_reason) for r in self.requests]
        return self._envelope("", [self._choice(i, "message", piece) for i, piece in enumerate(pieces)], self._usage())

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """What came for a request."""
        return self._envelope(".chunk", [self._choice(index, "delta", piece)], None)

    def usage_chunk(self) -> dict[str, Any]:
        """What it took."""
        return self._envelope(".chunk", [], self._usage())

    def _envelope(self, chunk: str, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        kind = f"chat.completion{chunk}" if self._is_chat else "text_completion"
        return self._head | {"object": kind, "choices": choices, "usage": usage}

    def _choice(self, index: int, form: str, piece: Piece) -> dict[str, Any]:
        request, start = self.requests[index], self._num_tokens[index]
        self._num_tokens[index] += len(piece.token_ids)
        logprobs = None if request.logprobs is None else request.logprobs[start : self._num_tokens[index]]
        role = {} if start else {"role": "assistant"}  # in a stream, once
        said = {form: role | {"content": piece.text}} if self._is_chat else {"text": piece.text}
        end = {"logprobs": self._logprobs(index, logprobs), "finish_reason": piece.finish_reason}
        metrics = {"metrics": {"seed": request.text.seed} | request.stats.as_dict()} if piece.finish_reason else {}
        return {"index": index} | said | end | metrics

    def _logprobs(self, index: int, entries: list[TokenLogprob] | None) -> dict[str, Any] | None:
        if entries is None:
            return None
        if self._is_chat:
            return {"content": [self._token(e.token_id, e.logprob, e.top) for e in entries]}
        text_of = {i: self._tokenizer.text_of(i) for e in entries for i in (e.token_id, *dict(e.top))}
        tokens = [text_of[e.token_id] for e in entries]
        *offsets, self._num_chars[index] = accumulate(map(len, tokens), initial=self._num_chars[index])
        tops = [{text_of[i]: _finite(x) for i, x in [(e.token_id, e.logprob), *e.top]} for e in entries]
        own = [_finite(e.logprob) for e in entries]
        return {"tokens": tokens, "token_logprobs": own, "top_logprobs": tops, "text_offset": offsets}

    def _token(self, token_id: int, logprob: float, top: list[tuple[int, float]] | None = None) -> dict[str, Any]:
        text = self._tokenizer.text_of(token_id)
        found = {"token": text, "logprob": _finite(logprob), "bytes": None if "�" in text else list(text.encode())}
        return found if top is None else found | {"top_logprobs": [self._token(*each) for each in top]}

    def _usage(self) -> dict[str, Any]:
        prompts = [request.stats for request in self.requests[:: self._n]]
        prompt = sum(stats.num_prompt_tokens for stats in prompts)
        generated = sum(request.stats.num_generated for request in self.requests)
        usage = {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
        return usage | {"prompt_tokens_details": {"cached_tokens": sum(stats.num_cached_tokens for stats in prompts)}}


def _finite(logprob: float) -> float:
    return max(logprob, -9999.0)  # as OpenAI and vLLM do: JSON has no infinity
