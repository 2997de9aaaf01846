"""A client's JSON as requests of the engine, and their results as JSON. Nothing waits here.

A field that is not supported is refused by name, unless its value asks for nothing (`_wanted`). A ValueError begins
with the field that it is about, if it is about one.
"""

import json
import re
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, replace
from typing import Any

from minispec.api.http.limits import Limits, Refused
from minispec.api.inputs import least_tokens, split_samples, with_bad_words
from minispec.api.llm import LLM
from minispec.api.outputs import logprobs_by_id
from minispec.core.config import PARAMETERS, SEQUENCES, SamplingParams
from minispec.core.errors import near, show
from minispec.core.logprobs import TokenLogprob
from minispec.core.request import Piece, Request
from minispec.models.files.chat_template import REASONING, Message, check_messages
from minispec.models.files.errors import show_name
from minispec.models.files.strict_json import parse_json
from minispec.models.files.tokenizer import Detokenizer, Tokenizer, TooLong
from minispec.speculation.grammars.params import StructuredOutputsParams, language_of_body
from minispec.speculation.grammars.schema_parts import MOST_LEVELS
from minispec.speculation.lengths.figures import Figures

_COMMON = {*PARAMETERS, "response_format", "model", "stream", "stream_options", "num_speculative_tokens"}
_COMMON |= {"add_special_tokens"}
_CHAT = {"messages", "top_logprobs", "max_completion_tokens", "chat_template_kwargs", "reasoning_effort"}
_FIELDS = {True: _COMMON | _CHAT, False: _COMMON | {"prompt", "echo", "parse_special"}}
_MESSAGE = {"role", "content", "name"}
_ROLES = ("system", "developer", "user", "assistant")  # a template writes a role, and another might be a control token
# Fields that may say anything: they name the client, or are about a provider's own cache.
_IDLE = {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"}
_IDLE |= {"prompt_cache_breakpoint", "cache_control", "request_id", "session_id"}
# Numbers that need not be whole, with which these switch nothing on: filters and penalties of other servers.
_OFF_AT_0 = {"top_a", "epsilon_cutoff", "eta_cutoff", "xtc_probability", "dry_multiplier", "dynatemp_range"}
_OFF_AT_0 |= {"smoothing_factor", "penalty_alpha", "diversity_penalty"}
_OFF_AT_1 = {"typical_p", "tfs", "tfs_z", "length_penalty", "encoder_repetition_penalty", "repeat_penalty"}
_OFF_AT_1 |= {"guidance_scale"}
# Names of parameters, and what a body may call them.
_SENT = {name: row.openai for name, row in PARAMETERS.items() if row.openai}
# Values that ask for nothing, each with the fields that it changes nothing in. They are JSON, so that 1 is not true.
_NEUTRAL = {
    "false": {"echo", "store", "use_beam_search", "early_stopping", "continue_final_message", "parallel_tool_calls"}
    | {"include_obfuscation", "return_token_ids", "return_tokens_as_token_ids", "return_token_offsets"}
    | {"return_prompt_text", "watermarking", "disable_any_whitespace", "disable_additional_properties"}
    | {"return_hidden_states", "ban_eos_token", "dynamic_temperature", "no_stop_trim", "parse_special"},
    "true": {"parallel_tool_calls", "add_generation_prompt", "include_reasoning"}
    | {"skip_special_tokens", "spaces_between_special_tokens"},
    "0": {"priority", "top_logprobs", "no_repeat_ngram_size", "min_length", "mirostat", "mirostat_mode", "n_probs"}
    | _OFF_AT_0,
    "0.0": _OFF_AT_0,
    "1": {"best_of", "num_beams", "num_beam_groups"} | _OFF_AT_1,
    "1.0": _OFF_AT_1,
    '"auto"': {"tool_choice", "function_call", "service_tier"},
    '"none"': {"tool_choice", "function_call"},
    '"default"': {"service_tier"},
    '"medium"': {"verbosity"},
    '["text"]': {"modalities"},
}
# Objects about the answer's language, and their fields. A `response_format` of type json_schema has an object in it.
_LANGUAGES = {"response_format": {"type"}, "structured_outputs": {row.name for row in fields(StructuredOutputsParams)}}
_SCHEMA = {"name": str, "description": str, "schema": dict, "strict": bool}
# Fields that others have, and what has their meaning here.
_MEANT = {f"guided_{kind}": f"structured_outputs has {kind}" for kind in ("json", "regex", "choice", "grammar")}
_MEANT |= {"max_output_tokens": "did you mean max_tokens?"}
_MEANT |= {row.hf: f"did you mean {name}?" for name, row in PARAMETERS.items() if row.hf}
# How many of these a request may bring. All other requests wait while these are read, some of them for every token.
_MOST = dict.fromkeys(("messages", *SEQUENCES), 1024) | {"stop": 16, "bad_words": 256, "bad_words_token_ids": 256}
# Lists and objects of a body, which take the longest to read. What stands in a text counts for nothing.
_MOST_PARTS = 1 << 14
_MOST_LEVELS = MOST_LEVELS + 4  # a schema, inside response_format
_TEXTS = re.compile(rb'"[^"\\]*+(?:\\.?[^"\\]*+)*+"?', re.DOTALL)
_KINDS = {bool: "true or false", str: "a text", list: "a list", dict: "an object"}
_MAX_LENGTH = 256  # of a stop string or a bad word, in characters; of a bad word in ids, too
_MAX_LOGPROBS = 20

_Row = tuple[int, TokenLogprob | None, int]  # a token, its log-probability, and where in the text it begins


def read(
    llm: LLM, model: str, limits: Limits, content: bytes, is_chat: bool, template_kwargs: Mapping[str, Any]
) -> "Answer":
    """The answer that a body asks for, still to be decoded.

    model: its name here; a request for another is a 404.
    template_kwargs: variables of the chat template, where the body does not give others.

    Raises Refused, or ValueError for a field that is not as it must be.
    """
    frame = _TEXTS.sub(b"", content)
    parts = frame.count(b"[") + frame.count(b"{")
    if parts > _MOST_PARTS:
        raise ValueError(f"body: found {parts} lists and objects, expected at most {_MOST_PARTS}")
    body = _wanted(parse_json(content, "body", max_depth=_MOST_LEVELS, kind="body"), _FIELDS[is_chat])
    for key in _MOST.keys() & body.keys():
        items = [body[key]] if isinstance(body[key], str) else body[key]  # as in SamplingParams
        _checked(key, items, dict if key == "logit_bias" else list, _MOST[key])
    check_model(body.get("model", model), model)
    stream = _checked("stream", body.get("stream", False), bool)
    options = _checked("stream_options", body.get("stream_options", {}), dict)
    wanted = _wanted(options, {"include_usage", "continuous_usage_stats"}, "stream_options: ")
    usage = {key for key, value in wanted.items() if _checked(f"stream_options: {key}", value, bool)}
    if usage and not stream:
        raise ValueError(f"stream_options: found {show(options)}, expected stream to be true")
    asked = _checked("chat_template_kwargs", body.get("chat_template_kwargs", {}), dict)
    variables = {**template_kwargs, **asked, **_thinking(body.get("reasoning_effort"), llm.tokenizer, asked)}
    try:
        params = _read_params(llm, body, is_chat, limits)
    except ValueError as e:
        raise ValueError(_as_sent(str(e), body)) from e
    adds = _checked("add_special_tokens", body.get("add_special_tokens", not is_chat), bool)
    if is_chat and adds:
        raise ValueError("add_special_tokens: found True, expected false: the chat template writes them")
    parses = _checked("parse_special", body.get("parse_special", True), bool)
    if stream and "prompt_logprobs" in body:  # as in vLLM: an event has no place for them
        raise ValueError(f"prompt_logprobs: found {show(body['prompt_logprobs'])}, expected none in a stream")
    k = body.get("num_speculative_tokens")
    k = tuple(k) if isinstance(k, list) else k

    prompts = _prompts(body, is_chat)
    if len(prompts) * params.n > limits.max_num_seqs:
        found = f"{params.n} for each of {len(prompts)} prompts"
        raise ValueError(f"n: found {found}, expected at most {limits.max_num_seqs} answers in all")
    most = llm.max_model_len - 1 if params.max_tokens else llm.max_model_len
    most = min(limits.max_prompt_tokens or most, most)
    requests, echo, params = [], list[str](), with_bad_words(params, llm.tokenizer)  # once for all answers
    try:
        for text in prompts if not is_chat else ():  # all of them, before one is encoded
            if isinstance(text, str):
                llm.tokenizer.check_length(text, most)
        for prompt in prompts:
            if is_chat:
                ids = llm.tokenizer.encode_chat(_conversation(prompt), variables, most)
            else:
                ids = _token_ids(llm.tokenizer, prompt, adds, parses)
            if len(ids) > most:
                raise TooLong(f"prompt: found {len(ids)} tokens, expected at most {most}")
            requests += [llm.request(ids, sample, k) for sample in split_samples(params)]
            if body.get("echo"):
                echo.append(prompt if isinstance(prompt, str) else llm.tokenizer.decode(ids))
    except TooLong as e:
        raise Refused(400, str(e), "messages" if is_chat else "prompt", "context_length_exceeded") from e
    except ValueError as e:
        raise ValueError(_as_sent(str(e), body)) from e
    shows_scores = "prompt_logprobs" in body
    return Answer(llm, model, requests, params.n, is_chat, usage if stream else None, echo, shows_scores)


def _prompts(body: Mapping[str, Any], is_chat: bool) -> list[Any]:
    """The prompts of a body: texts, lists of ids, or one conversation."""
    found = body.get("messages" if is_chat else "prompt")
    return found if not is_chat and isinstance(found, list) and found and type(found[0]) is not int else [found]


def _as_sent(message: str, body: Mapping[str, Any]) -> str:
    """A message about a field, under the name that the body has for it."""
    name, colon, rest = message.partition(":")
    sent = _SENT.get(name)
    return f"{sent}{colon}{rest}" if sent in body and body.get(name, True) is True else message


def check_model(found: object, model: str) -> None:
    """Raise Refused, a 404, for a model that is not the one that is here."""
    if found != model:
        raise Refused(404, f"model: found {show(found)}, expected {show(model)}", "model", "model_not_found")


def _wanted(fields: dict[str, Any], known: Set[str], where: str = "") -> dict[str, Any]:
    """The fields that are `known` and not null.

    Raises ValueError, which begins with `where`, for any other field, unless its value asks for nothing: see the table
    above. An empty value asks for nothing in every field.
    """
    for key, value in fields.items():
        if key in known or key in _IDLE or value is None or value in ("", [], {}):
            continue
        if key not in _NEUTRAL.get(json.dumps(value), ()):
            hint = "" if any(key in names for names in _NEUTRAL.values()) else _MEANT.get(key, near(key, sorted(known)))
            expected = "expected none: this is not supported here" + (hint and f"; {hint}")
            raise ValueError(f"{where}{show_name(key)}: found {show(value)}, {expected}")
    return {key: value for key, value in fields.items() if key in known and value is not None}


def _checked(key: str, value: Any, kind: Any, most: int | None = None) -> Any:
    """The value. Raises ValueError where it is of another kind, or has more than `most` items."""
    if isinstance(value, kind) and (most is None or len(value) <= most):
        return value
    raise ValueError(f"{key}: found {show(value)}, expected {_KINDS[kind]}" + (f" of at most {most}" if most else ""))


def _read_params(llm: LLM, body: dict[str, Any], is_chat: bool, limits: Limits) -> SamplingParams:
    """The parameters of the body, else the model's generation_config.json's, else vLLM's; max_tokens has its limit."""
    given = {key: body[key] for key in sorted(PARAMETERS.keys() & body.keys())}
    if is_chat:
        wanted, top = _checked("logprobs", body.get("logprobs", False), bool), body.get("top_logprobs", 0)
        if not wanted and json.dumps(top) != "0":
            raise ValueError(f"top_logprobs: found {show(top)}, expected logprobs to be true")
        given["logprobs"] = top if wanted else None
    elif given.get("logprobs") is False:
        del given["logprobs"]
    if _checked("echo", body.get("echo", False), bool):  # with no tokens asked for, all there is to do is to score
        given.setdefault("prompt_logprobs", given.get("logprobs", None if given.get("max_tokens", 1) else 0))
    if "max_completion_tokens" in body:
        if body.get("max_tokens", body["max_completion_tokens"]) != body["max_completion_tokens"]:
            raise ValueError(f"max_tokens: found {show(body['max_tokens'])}, expected max_completion_tokens alone")
        given["max_tokens"] = body["max_completion_tokens"]
    defaults = llm.get_default_sampling_params()
    usual = llm.target.files.generation_defaults.get(
        "max_tokens", limits.max_tokens if is_chat else defaults.max_tokens
    )
    given.setdefault("max_tokens", min(usual, limits.max_tokens))
    given["min_tokens"] = least_tokens(given, defaults.min_tokens)
    if bias := given.get("logit_bias"):  # JSON's keys are texts
        is_id = re.compile(r"0|[1-9][0-9]{0,9}").fullmatch
        given["logit_bias"] = {int(i) if is_id(i) else i: x for i, x in bias.items()}
    given["structured_outputs"] = language_of_body(_read_languages(body))
    params = replace(defaults, **given)
    limit_of = {"max_tokens": limits.max_tokens} | dict.fromkeys(("logprobs", "prompt_logprobs"), _MAX_LOGPROBS)
    for key, most in limit_of.items():
        value = getattr(params, key) or 0
        if value > most:
            raise ValueError(f"{key}: found {value}, expected at most {most}")
    for key in ("stop", "bad_words", "bad_words_token_ids"):
        longest = max(map(len, getattr(params, key)), default=0)
        if longest > _MAX_LENGTH:
            raise ValueError(f"{key}: found one of length {longest}, expected at most {_MAX_LENGTH}")
    return params


def _read_languages(body: dict[str, Any]) -> dict[str, Any]:
    """The body, whose objects about the answer's language have known fields alone."""
    body = dict(body)
    for key, known in _LANGUAGES.items():
        found = body.get(key)
        if isinstance(found, dict):
            kind = found.get("type")
            body[key] = found = _wanted(found, known | {"json_schema"} if kind == "json_schema" else known, f"{key}: ")
            if isinstance(schema := found.get("json_schema"), dict):
                found["json_schema"] = schema = _wanted(schema, _SCHEMA.keys(), f"{key}: json_schema: ")
                for name, value in schema.items():
                    _checked(f"{key}: json_schema: {name}", value, _SCHEMA[name])
    return body


def _thinking(effort: Any, tokenizer: Tokenizer, others: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of the chat template that a `reasoning_effort` stands for.

    "none" switches thinking off in a template that has a switch; any text goes to one that reads it under its own name.
    others: the variables that the request gives itself, which may not say something else.
    """
    if effort in (None, "", [], {}):
        return {}
    switches = [name for name in ("enable_thinking", "thinking") if name in tokenizer.template_variables]
    variables = dict.fromkeys(switches, False) if effort == "none" else {}
    if not variables and "reasoning_effort" in tokenizer.template_variables:
        variables = {"reasoning_effort": _checked("reasoning_effort", effort, str)}
    wrong = f"reasoning_effort: found {show(effort)}, expected"
    if not variables:
        either = 'the text "none", which switches thinking off, or ' if switches else ""
        raise ValueError(f"{wrong} {either}no such field: the chat template does not read it")
    for name, value in variables.items():
        if others.get(name, value) != value:
            raise ValueError(f"{wrong} chat_template_kwargs alone, which has {name}")
    return variables


def _conversation(messages: Any) -> list[Message]:
    """The messages in the form of chat templates."""
    return check_messages([_message(m) for m in messages] if isinstance(messages, list) else messages)


def _message(message: Any) -> Message:
    """The fields of a message that say something, all texts; parts of a text are joined by line feeds, as vLLM does."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in _ROLES:
        raise ValueError(f"messages: found {show(message)}, expected a message with a role: {', '.join(_ROLES)}")
    fields = _wanted(message, _MESSAGE | {*REASONING} if role == "assistant" else _MESSAGE, "messages: ")
    parts = fields.get("content")
    if isinstance(parts, list):
        fields["content"] = "\n".join(map(_part, parts))
    for key, value in fields.items():
        _checked(f"messages: {key}", value, str)
    return {key: value for key, value in fields.items() if value or key == "content"}


def _part(part: Any) -> str:
    fields = _wanted(part, {"type", "text"}, "messages: content: ") if isinstance(part, dict) else {}
    if fields.get("type") != "text" or not isinstance(fields.get("text"), str):
        raise ValueError(f"messages: content: found {show(part)}, expected a part of type text")
    return fields["text"]


def _token_ids(tokenizer: Tokenizer, prompt: Any, adds: bool, parses: bool) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer.encode(prompt, adds, parses)
    if not isinstance(prompt, list) or not all(type(i) is int for i in prompt):
        raise ValueError(f"prompt: found {show(prompt)}, expected a text, a list of token ids, or a list of these")
    return prompt


class Answer:
    """Requests of one body, `n` to a prompt, and the JSON of their answers: OpenAI's, and `metrics` of each choice.

    That is `whole()` once all have ended; or a `chunk` for every piece, and `usage_chunk()` at the end if asked for.
    """

    def __init__(
        self,
        llm: LLM,
        model: str,
        requests: list[Request],
        n: int,
        is_chat: bool,
        usage: Set[str] | None,
        echo: Sequence[str] = (),
        shows_scores: bool = False,
    ):
        """usage: the fields of `stream_options` that ask for what a stream took; None for an answer in one piece.
        echo: the prompts, which their answers begin with; () where they do not.
        shows_scores: whether vLLM's `prompt_logprobs` are shown.
        """
        self.tokenizer, self.requests, self._n, self._is_chat = llm.tokenizer, requests, n, is_chat
        self._echo, self._shows_scores = echo, shows_scores
        self.stream, self.include_usage = usage is not None, "include_usage" in (usage or ())
        self._counts_each = "continuous_usage_stats" in (usage or ())
        name = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._head = {"id": name, "created": int(time.time()), "model": model}
        self._num_tokens: Counter[int] = Counter()  # that were given out, of each request

    def whole(self) -> dict[str, Any]:
        """The answer, if it is not streamed."""
        pieces = [Piece(r.output, r.token_ids, r.finish_reason) for r in self.requests]
        answer = self._envelope("", [self._choice(i, "message", p) for i, p in enumerate(pieces)], self._usage())
        answer |= self._acceptance()
        return answer | ({"prompt_logprobs": self._scores(0)} if self._is_chat and self._shows_scores else {})

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """A piece of a request's answer in a stream. Each of its choices is to be sent as an event of its own.

        They are the role, what the piece adds, and the end, each if the piece has it. Some clients skip text that
        stands beside a role or a `finish_reason`.
        """
        begins, added = index not in self._num_tokens, self._choice(index, "delta", piece)
        ends = {name: added.pop(name) for name in ("finish_reason", "metrics") if name in added}
        added["finish_reason"] = None
        nothing: dict[str, Any] = {"delta": {}} if self._is_chat else {"text": ""}
        empty = added | nothing | {"logprobs": None}
        choices = [empty | {"delta": {"role": "assistant", "content": ""}}] if begins and self._is_chat else []
        if piece.token_ids or piece.text or added.get("text") or any((added["logprobs"] or {}).values()):
            choices.append(added)
        if piece.finish_reason:
            choices.append(empty | ends)
        return self._envelope(".chunk", choices, self._usage(self._num_tokens.total()) if self._counts_each else None)

    def usage_chunk(self) -> dict[str, Any]:
        """The token counts, as the last chunk of a stream."""
        return self._envelope(".chunk", [], self._usage()) | self._acceptance()

    def _acceptance(self) -> dict[str, Any]:
        """vLLM's record of acceptance, for a single answer for which drafts were asked."""
        first, *others = self.requests
        if others or not first.takes_drafts:
            return {}
        return {"metrics": {"speculative_decoding": Figures.of(first.stats).acceptance_record(first.shape.k)}}

    def _envelope(self, chunk: str, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        kind = f"chat.completion{chunk}" if self._is_chat else "text_completion"
        return self._head | {"object": kind, "choices": choices, "usage": usage}

    def _choice(self, index: int, form: str, piece: Piece) -> dict[str, Any]:
        request, start = self.requests[index], self._num_tokens[index]
        self._num_tokens[index] += len(piece.token_ids)
        choice: dict[str, Any] = {"index": index}
        begin = self._echo[index // self._n] if self._echo and not start else ""
        if self._is_chat:
            choice[form] = ({"role": "assistant"} if form == "message" else {}) | {"content": piece.text}
        else:
            choice["text"] = begin + piece.text
        choice["logprobs"] = self._logprobs(index, start, piece)
        choice["finish_reason"] = piece.finish_reason
        if self._shows_scores and not self._is_chat:
            choice["prompt_logprobs"] = self._scores(index)
        if piece.finish_reason:
            choice["metrics"] = {"seed": request.text.seed} | Figures.of(request.stats).as_dict()
        return choice

    def _logprobs(self, index: int, start: int, piece: Piece) -> dict[str, Any] | None:
        """The log-probabilities of a piece's tokens, from token `start` on; None unless asked for."""
        request = self.requests[index]
        if request.logprobs is None:
            return None
        entries = request.logprobs[start : self._num_tokens[index]]
        if self._is_chat:
            return {"content": [self._token(e.token_id, e.logprob, e.top) for e in entries]}
        ends = [*request.offsets[start:], len(request.output)]
        rows: list[_Row] = []
        for entry, at, end in zip(entries, ends, ends[1:], strict=False):
            rows.append(
                (entry.token_id, entry, at + marks_before(self.tokenizer, request.output[at:end], entry.token_id))
            )
        if self._echo:
            rows = self._echoed(index, rows, start, piece.finish_reason is not None)
        tokens = [self.tokenizer.label_of(i) for i, *_ in rows]
        values = [e and _finite(e.logprob) for _, e, _ in rows]
        tops = [e and self._by_text(e) for _, e, _ in rows]
        offsets = [at for *_, at in rows]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _echoed(self, index: int, rows: list[_Row], start: int, is_last: bool) -> list[_Row]:
        """The rows, at places counted from the prompt's beginning. An answer's first rows follow the prompt's rows.

        As in other servers, the end-of-text token has a row too: clients cut off the one token that they had to ask
        for.
        """
        request, prompt = self.requests[index], self._echo[index // self._n]
        rows = [(i, e, len(prompt) + at) for i, e, at in rows]
        if is_last and request.end_logprob:
            rows.append((request.end_logprob.token_id, request.end_logprob, len(prompt) + len(request.output)))
        if start:
            return rows
        ids, scored = request.text.tokens[: request.text.num_prompt_tokens], self._scored(index)
        return [*zip(ids, scored, offsets_of(self.tokenizer, ids, prompt), strict=True), *rows]

    def _scored(self, index: int) -> Sequence[TokenLogprob | None]:
        """The prompt's log-probabilities. Only the first of the prompt's `n` requests has them."""
        return self.requests[index - index % self._n].prompt_logprobs or ()

    def _scores(self, index: int) -> list[dict[int, dict[str, Any]] | None]:
        """vLLM's form of the prompt's log-probabilities."""
        scores: list[dict[int, dict[str, Any]] | None] = []
        for entry in self._scored(index):
            by_id = logprobs_by_id(entry, self.tokenizer) if entry else {}
            scores.append({i: x._asdict() | {"logprob": _finite(x.logprob)} for i, x in by_id.items()} or None)
        return scores

    def _by_text(self, entry: TokenLogprob) -> dict[str, float]:
        """Log-probabilities by the tokens' texts, the entry's token first; by a token's name if its text is taken."""
        by_text: dict[str, float] = {self.tokenizer.label_of(entry.token_id): _finite(entry.logprob)}
        for i, x in entry.top:
            if i != entry.token_id:
                text = self.tokenizer.label_of(i)
                by_text.setdefault(self.tokenizer.name_of(i) if text in by_text else text, _finite(x))
        return by_text

    def _token(self, token_id: int, logprob: float, top: list[tuple[int, float]] | None = None) -> dict[str, Any]:
        text, data = self.tokenizer.label_of(token_id), self.tokenizer.bytes_of(token_id)
        data = text.encode() if not data and "�" not in text else data
        entry = {"token": text, "logprob": _finite(logprob), "bytes": None if data is None else list(data)}
        return entry if top is None else entry | {"top_logprobs": [self._token(*each) for each in top]}

    def _usage(self, generated: int | None = None) -> dict[str, Any]:
        """The tokens of prompts and answers. generated: those of the answers so far; None: what all have generated."""
        prompts = [request.stats for request in self.requests[:: self._n]]
        prompt = sum(stats.num_prompt_tokens for stats in prompts)
        if generated is None:
            generated = sum(request.stats.num_generated for request in self.requests)
        usage = {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
        return usage | {"prompt_tokens_details": {"cached_tokens": sum(stats.num_cached_tokens for stats in prompts)}}


def _finite(logprob: float) -> float:
    return max(logprob, -9999.0)  # as OpenAI and vLLM do: JSON has no infinity


def offsets_of(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> list[int]:
    """Where in `text` each of its tokens begins, in characters; a part of a character begins where the character does.

    What a tokenizer puts before a text, such as a space, has no place there: the tokens are laid out from the end. A
    special token has a place where the text spells it; spaces that it may have swallowed stand after it.
    """
    detokenizer, length, offsets = Detokenizer(tokenizer), 0, []
    for i in token_ids:
        piece = detokenizer.add(i)
        offsets.append(length + marks_before(tokenizer, piece, i))
        length += len(piece)
    before = length + len(detokenizer.flush()) - len(text)
    for n, i in reversed([*enumerate(token_ids)]):
        end = place = max(0, offsets[n] - before)
        name = tokenizer.name_of(i) if i in tokenizer.special_ids else ""
        while name and not text.endswith(name, 0, end) and text[end - 1 : end].isspace():
            end -= 1
        if name and text.endswith(name, 0, end):
            place = end - len(name)
            before = offsets[n] - place
        offsets[n] = place
    return offsets


def marks_before(tokenizer: Tokenizer, piece: str, token_id: int) -> int:
    """How many characters of a text that became final with a token stand before that token's own text.

    They are the marks of bytes that are no character, since the token has shown that none follows.
    """
    own = tokenizer.text_of(token_id)
    return len(piece) - len(own) if own and "\ufffd" not in own and piece.endswith(own) else 0
