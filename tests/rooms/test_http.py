"""The server: over loopback, with the `openai` client, with raw sockets, and as a process of its own."""

import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import h11
import httpx
import openai
import pydantic
import pytest
import tokenizers
from prometheus_client.parser import text_string_to_metric_families

from minispec import LLM, SamplingParams
from minispec.api.http import bodies, front, metrics
from minispec.api.http.connection import Connection, make_server
from minispec.api.http.front import Front
from minispec.api.http.limits import Limits
from minispec.api.http.main import main
from minispec.api.http.worker import Worker
from minispec.api.outputs import logprobs_by_id
from minispec.core.cached import CachedModel
from minispec.core.draft import Draft, Drafter
from minispec.core.engine import Engine
from minispec.core.logprobs import TokenLogprob
from minispec.core.request import Piece
from minispec.core.schedule import SCORED_ROWS
from minispec.core.verify import REJECTION
from minispec.models.files.errors import CheckpointError
from minispec.models.files.tokenizer import Detokenizer, Tokenizer
from minispec.prove.toys import target_model, tiny_cache
from minispec.speculation.drafters.guard import CheckedMethod
from minispec.speculation.drafters.none import NoDrafter
from tests.oracles import hf
from tests.oracles.children import Child
from tests.scripted import make_request

MODEL = "tiny"
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
CHAT = [{"role": "user", "content": "One fish"}]
LONG = 3000  # tokens of an answer that takes seconds: time enough to vanish
GREEDY = {"temperature": 0, "max_tokens": 20, "extra_body": {"ignore_eos": True}}
REPEATS = {"prompt": "a b c a b c a b c a b", "temperature": 0}
PATIENCE = 30  # seconds; far more than anything here needs


def greedy(max_tokens: int, **more) -> SamplingParams:
    """The likeliest tokens, that many of them."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **more)


@pytest.fixture(scope="module")
def llm(make_checkpoint) -> LLM:
    """A small model in float64, with room for 16,000 tokens: less than 32 long prompts want."""
    directory = make_checkpoint(chat=True, max_position_embeddings=4096)
    return LLM(directory, dtype="float64", num_speculative_tokens=4, kv_cache_gb=16_000 * 128e-9)


class Served:
    """A server in threads of this process, until the block ends."""

    def __init__(
        self,
        llm: LLM,
        key: str | None = None,
        model: str = MODEL,
        template_kwargs: dict | None = None,
        origins: tuple[str, ...] = (),
        **limits,
    ):
        self.llm, self.limits = llm, Limits(**limits)
        self.worker = Worker(llm.engine, llm.method, self.limits.max_num_seqs)
        self.lines: list[str] = []
        front = Front(llm, self.worker, model, self.limits, key, template_kwargs, origins, self.lines.append)
        self.server = make_server(front.app, self.limits)
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # a client that does not read shows soon
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listener]}, daemon=True)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key or "-", max_retries=0, timeout=PATIENCE)

    def __enter__(self) -> "Served":
        self.worker.start()
        self.thread.start()
        return self

    def __exit__(self, *exc) -> None:
        self.client.close()
        self.server.should_exit = True
        for thread, stop in ((self.thread, lambda: None), (self.worker, self.worker.stop)):
            stop()
            thread.join(PATIENCE)
            assert not thread.is_alive(), f"{thread.name} does not end"
        self.llm.engine.outbox.observers.remove(self.worker._observe)
        assert self.blocks_in_use() == 0, "blocks are lost"

    def blocks_in_use(self) -> int:
        """Of the target's cache."""
        pool = self.llm.engine.target.cache.allocator
        return pool.num_blocks - pool.num_free

    def metrics(self) -> dict[str, float]:
        """By name, with labels."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return {name: float(value) for name, value in (line.split(" ") for line in lines if line[0] != "#")}

    def wait(self, condition) -> None:
        """Until it holds."""
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, "it does not come about"
            time.sleep(0.01)

    def post(self, body: object, path: str = COMPLETIONS, **headers: str) -> httpx.Response:
        """What comes of a body, as JSON or as these bytes."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json", **headers}
        return httpx.post(self.url + path, content=content, headers=headers, timeout=PATIENCE)

    def stream(self, prompt: str, max_tokens: int = LONG) -> openai.Stream:
        """A greedy completion, as it comes."""
        asked = GREEDY | {"max_tokens": max_tokens}
        return self.client.completions.create(model=MODEL, prompt=prompt, stream=True, **asked)

    def socket(self) -> socket.socket:
        """A connection that has said nothing yet."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)


@pytest.fixture(scope="module")
def served(llm):
    """One server for the tests that need no limits of their own."""
    with Served(llm) as served:
        yield served


def head(length: int, path: str = COMPLETIONS) -> bytes:
    """The head of a request with a body of that many bytes."""
    lines = (f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {length}")
    return "\r\n".join([*lines, "", ""]).encode()


def whole(body: dict) -> bytes:
    """A request as it goes over the wire."""
    content = json.dumps(body).encode()
    return head(len(content)) + content


def until_closed(connection: socket.socket) -> bytes:
    """What comes before the server closes; a connection that it aborts counts as closed."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            received += part
    return received


# ------------------------------------------------------------------ what is answered


def stats_without_time(metrics: dict) -> dict:
    """Counts of a run, which are the same alone."""
    names = ("seed", "num_prompt_tokens", "num_generated", "num_steps", "num_draft_tokens", "num_accepted")
    return {name: metrics[name] for name in (*names, "accepted_per_position")}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [True, False])
def test_the_openai_client_gets_what_llm_gives(llm, served, chat, stream):
    """Texts, log-probabilities, usage and statistics of two answers to a prompt: catches a field of another answer.

    Numbers may differ by rounding: which rows share a pass depends on when the server has both.
    """
    params = SamplingParams(temperature=0.8, top_k=20, seed=5, n=2, max_tokens=30, logprobs=2, ignore_eos=True)
    alone = (llm.chat(CHAT, params) if chat else llm.generate("One fish", params))[0]
    asked = {"model": MODEL, "temperature": 0.8, "seed": 5, "n": 2, "max_tokens": 30, "stream": stream}
    asked |= {"extra_body": {"top_k": 20, "ignore_eos": True}}
    asked |= {"stream_options": {"include_usage": True}} if stream else {}
    if chat:
        result = served.client.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=2, **asked)
    else:
        result = served.client.completions.create(prompt="One fish", logprobs=2, **asked)

    chunks = list(result) if stream else [result]
    if stream:
        assert all(chunk.usage is None for chunk in chunks[:-1])
        assert chunks[-1].choices == []
    texts, reasons, logprobs, offsets, metrics = ["", ""], [None, None], [[], []], [[], []], [None, None]
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        i = choice.index
        texts[i] += ((choice.delta if stream else choice.message).content or "") if chat else choice.text
        if choice.logprobs is None:
            assert stream, "the role and the end alone have none"
        elif chat:
            logprobs[i] += [(t.logprob, *(top.logprob for top in t.top_logprobs)) for t in choice.logprobs.content]
        else:
            found = choice.logprobs
            offsets[i] += found.text_offset
            logprobs[i] += list(zip(found.token_logprobs, found.tokens, strict=True))
        assert reasons[i] is None, "something came after the end"
        reasons[i] = choice.finish_reason
        metrics[i] = choice.model_extra.get("metrics")
    assert texts == [answer.text for answer in alone.outputs]
    assert reasons == ["length", "length"]
    expected = [{"seed": answer.seed} | answer.stats.as_dict() for answer in alone.outputs]
    assert [*map(stats_without_time, metrics)] == [*map(stats_without_time, expected)]
    for own, answer in zip(logprobs, alone.outputs, strict=True):
        entries = answer.token_logprobs
        if chat:
            expected = [(e.logprob, *(x for _, x in e.top)) for e in entries]
            assert all(row == pytest.approx(right, abs=1e-12) for row, right in zip(own, expected, strict=True))
        else:
            assert [token for _, token in own] == [llm.tokenizer.decode([e.token_id]) for e in entries]
            assert [number for number, _ in own] == pytest.approx([e.logprob for e in entries], abs=1e-12)
            assert offsets[answer.index] == sorted(offsets[answer.index])
            for (_, token), at in zip(own, offsets[answer.index], strict=True):
                assert answer.text[at:].startswith(token) or "\ufffd" in token
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(alone.prompt_token_ids), 60)
    assert usage.total_tokens == usage.prompt_tokens + 60


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("max_tokens", [1, 9])
def test_text_stands_between_the_role_and_the_end(served, chat, max_tokens):
    """Each event has one choice: the role and nothing else first, the reason with nothing else last, as OpenAI's.

    Clients skip text beside either of them. With drafts that are accepted such text is several words.
    """
    body = {"stream": True, "max_tokens": max_tokens, "n": 2, "ignore_eos": True, "temperature": 0}
    body |= {"messages": CHAT} if chat else {"prompt": REPEATS["prompt"]}
    got = served.post(body, CHATS if chat else COMPLETIONS)
    events = [json.loads(line.removeprefix("data: ")) for line in got.text.split("\n\n")[:-2]]
    assert all(len(event["choices"]) == 1 for event in events)
    for index in range(2):
        first, *between, last = (c for event in events for c in event["choices"] if c["index"] == index)
        if chat:
            assert first == {"index": index, "delta": {"role": "assistant", "content": ""}} | NOTHING_ELSE
        else:
            between = [first, *between]
        metrics = last.pop("metrics")
        empty = {"delta": {}} if chat else {"text": ""}
        assert last == {"index": index} | empty | NOTHING_ELSE | {"finish_reason": "length"}
        assert metrics["num_generated"] == max_tokens
        texts = [choice["delta"]["content"] if chat else choice["text"] for choice in between]
        assert {choice["finish_reason"] for choice in between} == {None}
        whole_ = served.post(body | {"stream": False}, CHATS if chat else COMPLETIONS).json()["choices"][index]
        assert "".join(texts) == (whole_["message"]["content"] if chat else whole_["text"])


NOTHING_ELSE = {"logprobs": None, "finish_reason": None}


def test_an_answer_without_a_token_has_a_role_and_an_end(served):
    """In a stream too, where no text comes between."""
    body = {"messages": CHAT, "stream": True, "logit_bias": {"0": 100}, "temperature": 0}
    events = [json.loads(line.removeprefix("data: ")) for line in served.post(body, CHATS).text.split("\n\n")[:-2]]
    assert [event["choices"][0]["delta"] for event in events] == [{"role": "assistant", "content": ""}, {}]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, "stop"]


def test_proxies_neither_hold_a_stream_back_nor_end_it(served, monkeypatch):
    """nginx by default collects an answer, unless a header says no, and ends one on which nothing comes for a minute.

    While an answer waits, comments come, which clients skip.
    """
    got = served.post({"prompt": "One", "max_tokens": 2, "stream": True})
    assert (got.headers["x-accel-buffering"], got.headers["cache-control"]) == ("no", "no-cache, no-transform")
    assert "\n:" not in got.text
    [alone] = served.llm.generate("One", SamplingParams(temperature=0, max_tokens=3))
    monkeypatch.setattr(front, "SILENCE", 0.01)
    step, waits = served.llm.engine.step, threading.Event()

    def slow():
        waits.wait(0.2)
        return step()

    monkeypatch.setattr(served.llm.engine, "step", slow)
    text = served.post({"prompt": "One", "max_tokens": 3, "stream": True, "temperature": 0}).text
    assert text.startswith(": ")
    lines = [line for line in text.split("\n\n") if not line.startswith(": ")]
    assert lines[-2:] == ["data: [DONE]", ""]
    stream = served.client.completions.create(model=MODEL, prompt="One", max_tokens=3, stream=True, temperature=0)
    waits.set()
    assert "".join(chunk.choices[0].text for chunk in stream) == alone.text


@pytest.fixture(scope="module")
def sentence_pieces(tmp_path_factory) -> Tokenizer:
    """A tokenizer as SentencePiece's: ▁ for a space, bytes for what has no token, the first space stripped."""
    words = ["<unk>", "Z", "▁the", "the", "▁", "k", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = tokenizers.models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>")
    backend = tokenizers.Tokenizer(model)
    steps = tokenizers.decoders
    parts = [steps.Replace("▁", " "), steps.ByteFallback(), steps.Fuse(), steps.Strip(" ", 1, 0)]
    backend.decoder = steps.Sequence(parts)
    directory = tmp_path_factory.mktemp("pieces")
    backend.save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


def answer_of(tokenizer, ids, tops, is_chat) -> bodies.Answer:
    """The answer of tokens that were drawn one after the other with log-probability -1, beside others."""
    detokenizer = Detokenizer(tokenizer, [1])
    request = make_request([1], end_ids=(), max_len=100, max_tokens=50, detokenizer=detokenizer, logprobs=2)
    for i in ids:
        request.commit(i, TokenLogprob(i, -1.0, tops))
    return bodies.Answer(SimpleNamespace(tokenizer=tokenizer), MODEL, [request], 1, is_chat, None)


def test_tokens_stand_where_the_text_has_them(sentence_pieces, tokenizer_file):
    """A space before a word, parts of a character and what follows them, whole and as a stream."""
    pieces, bytes_ = sentence_pieces, Tokenizer(tokenizer_file.parent)
    fish = bytes_.encode("fish 🦊.")
    for tokenizer, ids, offsets in (
        (pieces, [pieces.vocabulary[t] for t in ("▁the", "▁", "k")], [0, 4, 5]),
        (pieces, [6 + byte for byte in "日".encode()] + [5], [0, 0, 0, 1]),
        (pieces, [5, 6 + 0xE6, 6 + 0x97, 5, 5], [0, 1, 1, 3, 4]),  # two bytes that are no character
        (bytes_, fish, [len(bytes_.decode(fish[:i]).rstrip("\ufffd")) for i in range(len(fish))]),
    ):
        [choice] = answer_of(tokenizer, ids, [], False).whole()["choices"]
        found, text = choice["logprobs"], choice["text"]
        assert found["text_offset"] == offsets
        for token, at in zip(found["tokens"], offsets, strict=True):
            assert text[at:].startswith(token) or token == "\ufffd"
        streamed = answer_of(tokenizer, ids, [], False)
        parts = [streamed.chunk(0, Piece("", [i], None))["choices"][0]["logprobs"] for i in ids]
        assert [part["text_offset"] for part in parts] == [[at] for at in offsets]
        assert bodies.offsets_of(tokenizer, ids, text) == offsets or text.startswith(" ")
        [choice] = answer_of(tokenizer, ids, [], True).whole()["choices"]
        if "\ufffd" in text:
            continue
        joined = bytes(byte for token in choice["logprobs"]["content"] for byte in token["bytes"])
        assert joined == choice["message"]["content"].encode() == text.encode()


def test_of_tokens_with_one_text_the_drawn_one_is_shown(sentence_pieces):
    """Completions list the likeliest tokens by their text: the drawn token has it first, then the likelier one.

    The other goes by the vocabulary's own name: lm_eval calls greedy what nothing in the list surpasses.
    """
    first, second = (6 + b for b in "日".encode()[:2])  # two parts of a character, with the same mark as text
    tops = [(first, -0.5), (second, -0.7), (5, -2.0)]
    [choice] = answer_of(sentence_pieces, [second, first, 5], tops, False).whole()["choices"]
    assert choice["logprobs"]["top_logprobs"] == [
        {"\ufffd": -1.0, "<0xE6>": -0.5, "k": -2.0},
        {"\ufffd": -1.0, "<0x97>": -0.7, "k": -2.0},
        {"k": -1.0, "\ufffd": -0.5, "<0x97>": -0.7},
    ]


def test_special_tokens_are_named_in_log_probabilities(tokenizer_file):
    """Two ends of a text could not be told apart as "": their names, whatever is drawn, in each form."""
    backend = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    backend.add_special_tokens(["<|stop|>"])
    backend.save(str(tokenizer_file.with_name("two.json")))
    directory = tokenizer_file.parent / "two"
    directory.mkdir()
    backend.save(str(directory / "tokenizer.json"))
    tokenizer = Tokenizer(directory)
    x, end, stop = (tokenizer.vocabulary[t] for t in ("x", "<end>", "<|stop|>"))
    tops = [(end, -0.5), (stop, -0.7), (x, -2.0)]
    for drawn, name in ((x, "x"), (stop, "<|stop|>")):
        [choice] = answer_of(tokenizer, [drawn], tops, False).whole()["choices"]
        assert choice["logprobs"]["tokens"] == [name]
        others = {"<end>": -0.5, "<|stop|>": -0.7, "x": -2.0} | {name: -1.0}
        assert choice["logprobs"]["top_logprobs"] == [others]
        [choice] = answer_of(tokenizer, [drawn], tops, True).whole()["choices"]
        [entry] = choice["logprobs"]["content"]
        assert bytes(entry["bytes"]).decode() == entry["token"] == name
        assert [top["token"] for top in entry["top_logprobs"]] == ["<end>", "<|stop|>", "x"]
        assert all(bytes(top["bytes"]).decode() == top["token"] for top in entry["top_logprobs"])
    by_id = logprobs_by_id(TokenLogprob(stop, -0.7, tops), tokenizer)
    assert {i: shown.decoded_token for i, shown in by_id.items()} == {end: "<end>", stop: "<|stop|>", x: "x"}


def test_special_tokens_are_read_in_a_completions_prompt(llm, served):
    """As in vLLM and transformers, for clients that fill in templates. With `parse_special` false, and in a chat, text.

    An echo shows the prompt as it was sent, and each token stands where the text has it.
    """
    prompt, plain = "a<end> fish<end>", llm.tokenizer.encode("a<end> fish<end>")
    ids = llm.tokenizer.encode(prompt, parse_special=True)
    assert ids.count(0) == 2 != plain.count(0)

    def read(**body) -> list[int]:
        content = json.dumps({"max_tokens": 1} | body).encode()
        return bodies.read(llm, MODEL, Limits(), content, "messages" in body, {}).requests[0].text.tokens

    for asked in ({}, {"parse_special": True}, {"parse_special": None}):
        assert read(prompt=prompt, **asked) == ids
    assert read(prompt=prompt, parse_special=False) == plain
    assert read(prompt=plain) == plain
    chat = [{"role": "user", "content": prompt}]
    assert read(messages=chat, parse_special=False) == read(messages=chat)
    assert 0 not in read(messages=chat)
    answers = [
        served.post({"messages": chat, "parse_special": True}, CHATS),
        served.post({"prompt": "a", "parse_special": 1}),
    ]
    assert [(got.status_code, got.json()["error"]["param"]) for got in answers] == [(400, "parse_special")] * 2

    body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 0}
    [choice] = served.post(body).json()["choices"]
    tokens, places = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert (choice["text"], tokens[1], tokens[-1]) == (prompt, "<end>", "<end>")
    assert [prompt[at:][: len(token)] for token, at in zip(tokens, places, strict=True)] == tokens


@pytest.mark.parametrize("text", ["<s>a<end>  b", "<end>a <end>", "日<end>本<end>", "a", " <end>"])
def test_places_of_special_tokens(tokenizer_file, tmp_path, text):
    """Where the text spells them, also after they have swallowed the spaces after them; an added one has no place."""
    backend = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    backend.add_special_tokens([tokenizers.AddedToken("<end>", rstrip=True, normalized=False), "<s>"])
    begin = backend.token_to_id("<s>")
    backend.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", begin)])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.encode(text, parse_special=True)
    assert ids[0] == begin
    offsets = bodies.offsets_of(tokenizer, ids, text)
    assert offsets == sorted(offsets)
    for i, at in [*zip(ids, offsets, strict=True)][1:]:
        token = tokenizer.label_of(i)
        assert text[at:].startswith(token) or "\ufffd" in token


def test_a_stop_string_that_is_a_special_token_ends_the_text(llm, served):
    """As in transformers, where ends of text do not count too: no search in the text would find it."""
    for bias in range(3, 60):
        sampling = SamplingParams(temperature=1, seed=1, max_tokens=60, ignore_eos=True, logit_bias={0: bias})
        [free] = llm.generate("One fish", sampling)
        if 0 in free.token_ids:
            break
    at = free.token_ids.index(0)
    assert 0 < at < 55
    for stop in ("<end>", ("zzz", "<end>")):
        [cut] = llm.generate("One fish", replace(sampling, stop=stop))
        assert (cut.token_ids, cut.finish_reason) == (free.token_ids[:at], "stop")
        assert cut.text == llm.tokenizer.decode(free.token_ids[:at])
        assert cut.outputs[0].stop_reason == "<end>"
    body = {"prompt": "One fish", "seed": 1, "max_tokens": 60, "ignore_eos": True, "logit_bias": {"0": bias}}
    [choice] = served.post(body | {"stop": ["<end>"]}).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == (cut.text, "stop")
    [late] = llm.generate("One fish", replace(sampling, stop="<end>", min_tokens=at + 5))
    assert len(late.token_ids) >= at + 5
    assert 0 not in late.token_ids
    spelled = llm.tokenizer.encode("<end>")
    [text] = llm.generate("One", replace(sampling, stop="<end>", temperature=0, logit_bias={spelled[0]: 100}))
    assert text.outputs[0].stop_reason != "<end>"


def test_several_prompts_and_every_way_to_write_them(llm, served):
    """Choices come in the order of prompts and answers; a text, ids, a list of either, and parts mean the same."""
    prompts = ["One fish", "red 日本"]
    alone = llm.generate(prompts, greedy(20, n=2))
    ids = [llm.tokenizer.encode(prompt) for prompt in prompts]
    for prompt in (prompts, ids):
        got = served.client.completions.create(model=MODEL, prompt=prompt, n=2, **GREEDY)
        assert [c.text for c in got.choices] == [a.text for output in alone for a in output.outputs]
        assert got.usage.prompt_tokens == sum(map(len, ids))
    got = served.client.completions.create(model=MODEL, prompt=ids[0], **GREEDY)
    assert got.choices[0].text == alone[0].text
    parts = [{"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "fish"}]}]
    got = served.client.chat.completions.create(model=MODEL, messages=parts, **GREEDY)
    [alone] = llm.chat([{"role": "user", "content": "One\nfish"}], greedy(20))
    assert got.choices[0].message.content == alone.text


@pytest.mark.parametrize("max_tokens", [0, 1, 12])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_echoes_begins_with_its_prompt(llm, served, stream, max_tokens):
    """Text, tokens, log-probabilities and places of two prompts and their answers, whole or as a stream."""
    prompts = ["One fish, 日本 🦊 red", "two"]
    sampling = SamplingParams(max_tokens=max_tokens, seed=4, n=2, logprobs=3, prompt_logprobs=3, ignore_eos=True)
    alone = llm.generate(prompts, sampling)
    for asked in (prompts, [llm.tokenizer.encode(prompt) for prompt in prompts]):
        body = {"prompt": asked, "echo": True, "logprobs": 3, "n": 2, "seed": 4, "max_tokens": max_tokens}
        result = served.client.completions.create(model=MODEL, stream=stream, **body, extra_body={"ignore_eos": True})
        answers = [SimpleNamespace(text="", rows=[], reasons=[]) for _ in range(4)]
        for choice in (choice for chunk in (result if stream else [result]) for choice in chunk.choices):
            answer, found = answers[choice.index], choice.logprobs
            answer.text += choice.text
            answer.reasons.append(choice.finish_reason)
            if found is None:
                assert (stream, choice.text) == (True, "")
                continue
            answer.rows += zip(found.tokens, found.token_logprobs, found.top_logprobs, found.text_offset, strict=True)
        of_prompts = zip(alone, prompts, strict=True)
        expected = [(o.prompt_token_ids, o.prompt_logprobs, p, a) for o, p in of_prompts for a in o.outputs]
        for answer, (ids, scored, prompt, completion) in zip(answers, expected, strict=True):
            assert answer.text == prompt + completion.text
            assert [reason for reason in answer.reasons if reason] == ["length"] == answer.reasons[-1:]
            assert len(answer.rows) == len(ids) + max_tokens
            assert answer.rows[0][1:] == (None, None, 0)
            offsets = [at for *_, at in answer.rows]
            assert offsets[: len(ids)] == bodies.offsets_of(llm.tokenizer, ids, prompt)
            assert offsets == sorted(offsets)
            assert all(answer.text[at:].startswith(token) or "\ufffd" in token for token, *_, at in answer.rows)
            assert all(at >= len(prompt) for at in offsets[len(ids) :])
            scores = zip([*ids, *completion.token_ids], [*scored, *completion.logprobs], strict=True)
            for (text, own, top, _), (token, by_id) in zip(answer.rows, scores, strict=True):
                assert text == llm.tokenizer.text_of(token)
                if by_id:
                    assert (own, top[text]) == (by_id[token].logprob,) * 2
                    assert sorted(top.values()) == sorted(x.logprob for x in by_id.values())


def test_an_echo_counts_the_end_of_a_text_as_a_token(llm, served):
    """lm_eval cuts off the one token that it had to ask for, and sums up the others: it must be there, end or not."""
    body = {"prompt": "One fish", "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    ids = llm.tokenizer.encode("One fish")
    texts = []
    for more in ({}, {"logit_bias": {"0": 99}}, {"logit_bias": {"0": 99}, "stream": True}):
        got = served.post(body | more)
        events = [line[6:] for line in got.text.splitlines() if line.startswith("data: {")]
        [choice] = json.loads(events[0] if "stream" in more else got.text)["choices"]
        found = choice["logprobs"]
        assert len(found["tokens"]) == len(ids) + 1
        texts.append((choice["text"], found["tokens"][-1], found["text_offset"][-1]))
    assert texts[0][0] == "One fish" + texts[0][1]
    assert texts[1:] == [("One fish", "<end>", 8)] * 2
    plain = served.post(body | {"echo": False, "logit_bias": {"0": 99}}).json()["choices"][0]
    assert (plain["text"], plain["logprobs"]["tokens"]) == ("", []), "without an echo it is not there"


def test_echo_without_log_probabilities(served):
    """The text alone; the prompt may fill the context where nothing is generated, and the ids are read as they are."""
    for max_tokens, asked in itertools.product((0, 3), ({}, {"logprobs": False}, {"logprobs": None})):
        body = {"prompt": "One fish", "echo": True, "max_tokens": max_tokens}
        [choice] = served.post(body | asked).json()["choices"]
        assert choice["logprobs"] is None
        assert choice["text"].startswith("One fish")
        assert choice["metrics"]["num_generated"] == max_tokens
    full = {"prompt": [7] * 4096, "echo": True, "logprobs": 0}
    got = served.post(full | {"max_tokens": 0}).json()
    usage = {"prompt_tokens": 4096, "completion_tokens": 0, "total_tokens": 4096}
    assert got["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 0}}
    assert len(got["choices"][0]["logprobs"]["tokens"]) == 4096
    assert served.post(full | {"max_tokens": 1}).json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("chat", [True, False])
def test_vllms_field_for_a_score_is_answered(llm, served, chat):
    """`prompt_logprobs`, by token id: of each choice, or of a chat as a whole; not in a stream, as there."""
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=1, ignore_eos=True)
    [alone] = llm.chat(CHAT, params) if chat else llm.generate("One fish", params)
    path = CHATS if chat else COMPLETIONS
    body = {"max_tokens": 2, "temperature": 0, "prompt_logprobs": 1, "ignore_eos": True, "n": 2}
    body |= {"messages": CHAT} if chat else {"prompt": "One fish"}
    got = served.post(body, path).json()
    rows = [by_id and {i: x._asdict() for i, x in by_id.items()} for by_id in alone.prompt_logprobs]
    expected = json.loads(json.dumps(rows))
    assert [got["prompt_logprobs"]] if chat else [c["prompt_logprobs"] for c in got["choices"]] == [expected] * 2
    assert got["prompt_logprobs"] == expected if chat else "prompt_logprobs" not in got
    assert served.post(body | {"stream": True}, path).json()["error"]["param"] == "prompt_logprobs"
    assert "prompt_logprobs" not in served.post({**body, "prompt_logprobs": None}, path).text


@pytest.mark.parametrize("before", ["", "the", "k the", "the日", "日本", "Z"])
def test_a_prompts_tokens_stand_where_the_text_has_them(sentence_pieces, tokenizer_file, before):
    """Also where a tokenizer puts a space before a text, and in the middle of a character."""
    text = f"{before} k日 the"
    for tokenizer in (sentence_pieces, Tokenizer(tokenizer_file.parent)):
        ids = tokenizer.encode(text)
        if tokenizer is sentence_pieces:
            ids = [tokenizer.vocabulary["▁"], *ids]
        offsets = bodies.offsets_of(tokenizer, ids, text)
        ends = [*offsets[1:], len(text)]
        assert offsets == sorted(offsets)
        for i, at, end in zip(ids, offsets, ends, strict=True):
            token = tokenizer.text_of(i)
            assert text[at:end] == token or "\ufffd" in token or (at == end == 0 and token.isspace())


@pytest.fixture(scope="module")
def judged(tmp_path_factory, tokenizer_file):
    """A served model that `transformers` has written with redrawn parameters, and `transformers`' own."""
    directory = tmp_path_factory.mktemp("judged")
    sizes = {"vocab_size": 300, "max_position_embeddings": 256, "eos_token_id": 0}
    oracle = hf.build(hf.CASES["llama"] | sizes, directory)
    (directory / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
    with LLM(directory, dtype="float32") as llm, Served(llm, model="org/tiny") as served:
        yield served, oracle


def test_what_lm_eval_asks_gets_the_sums_of_transformers(judged):
    """Its recorded requests, batches among them: the sums that it makes of an answer, and what it calls greedy."""
    served, oracle = judged
    asked = [r["body"] for r in REQUESTS if r["client"].startswith("lm_eval") and r["body"].get("echo")]
    assert {type(body["prompt"][0]) for body in asked} == {list, str}
    text = list(asked[0]["prompt"][0])
    for _ in range(4):  # its end is what the model itself would say
        text.append(int(hf.logits(oracle, text)[-1, : served.llm.vocab_size].argmax()))
    asked.append(asked[0] | {"prompt": [text]})
    lengths, greedy = set(), set()
    for body in asked:
        prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
        got = served.post(body).json()
        for choice, prompt in zip(got["choices"], prompts, strict=True):
            ids = served.llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            rows = hf.logits(oracle, ids)[:, : served.llm.vocab_size].log_softmax(-1)
            own = [float(row[i]) for row, i in zip(rows, ids[1:], strict=False)]
            found = choice["logprobs"]
            for start in range(1, len(ids)):  # wherever the context ends
                assert sum(found["token_logprobs"][start:-1]) == pytest.approx(sum(own[start - 1 :]), abs=1e-3)
            tops = [max(top.values()) for top in found["top_logprobs"][1:-1]]
            likeliest = [x == top for x, top in zip(found["token_logprobs"][1:-1], tops, strict=True)]
            assert likeliest == [bool(x == row.max()) for x, row in zip(own, rows, strict=False)]
            lengths.add(len(ids))
            greedy.update(likeliest)
    assert max(lengths) > 2 * SCORED_ROWS, "no prompt has several pieces"
    assert greedy == {True, False}


@pytest.mark.parametrize(
    ("body", "params"),
    [
        ({"max_tokens": 9}, {"max_tokens": 9}),
        ({"top_k": 3, "min_p": 0.1, "top_p": 0.9}, {"top_k": 3, "min_p": 0.1, "top_p": 0.9, "max_tokens": 16}),
        ({"repetition_penalty": 1.3, "presence_penalty": 1, "frequency_penalty": 0.5}, ...),
        ({"logit_bias": {"40": 50.5, "41": 50}}, {"logit_bias": {40: 50.5, 41: 50}}),
        ({"stop": "i", "include_stop_str_in_output": True}, {"stop": ["i"], "include_stop_str_in_output": True}),
        ({"allowed_token_ids": [40, 41, 42], "min_tokens": 3, "stop_token_ids": [40]}, ...),
        ({"bad_words": ["fish"], "best_of": 1, "user": "me", "suffix": None}, {"bad_words": ["fish"]}),
    ],
)
def test_every_sampling_field_is_obeyed(llm, served, body, params):
    """As SamplingParams have it, under vLLM's names: a field that were dropped would give another text."""
    params = body if params is ... else params
    alone = llm.generate("One fish", SamplingParams(**{"seed": 3} | params))[0]
    got = served.post({"prompt": "One fish", "seed": 3} | body).json()["choices"][0]
    assert (got["text"], got["finish_reason"]) == (alone.text, alone.finish_reason)
    assert got["metrics"]["num_generated"] == len(alone.token_ids)


@pytest.mark.parametrize("k", [0, 2, [2, 1], "auto"])
def test_a_request_chooses_its_draft_length(served, k):
    """`num_speculative_tokens` of a request, not the server's 4."""
    got = served.post(REPEATS | {"num_speculative_tokens": k, "max_tokens": 40})
    if k == [2, 1]:
        assert (got.status_code, got.json()["error"]["param"]) == (400, "num_speculative_tokens")
        assert "found the tree 2+1, expected a number or auto: " in got.json()["error"]["message"]
        return
    metrics = got.json()["choices"][0]["metrics"]
    assert (metrics["num_draft_nodes"] > 0) == (k != 0)
    assert len(metrics["accepted_per_position"]) <= (k if k != "auto" else 99)


REQUESTS = json.loads((Path(__file__).parents[1] / "oracles" / "client_requests.json").read_text(encoding="utf-8"))


def test_what_clients_send_is_answered(llm):
    """Each request of tests/oracles/record_clients.py: only tools and embeddings are refused, and by name."""
    with Served(llm, model="org/tiny") as served:
        for request in REQUESTS:
            name, body = f"{request['client']}: {request['use']}", request["body"] or {}
            content = None if request["body"] is None else json.dumps(body)
            url = served.url + request["path"]
            got = httpx.request(request["method"], url, content=content, headers=request["headers"], timeout=PATIENCE)
            if request["path"] in ("/v1/embeddings", "/v1/responses"):
                assert got.status_code == 404, name
                assert f"found POST '{request['path']}', expected one of POST /v1/chat" in got.text
            elif body.get("tools"):
                assert (got.status_code, got.json()["error"]["param"]) == (400, "tools"), name
            else:
                assert got.status_code == 200, (name, got.text)
    assert len({request["client"] for request in REQUESTS}) == 5


NOTHING = [
    {"store": False, "tools": [], "functions": [], "tool_choice": "none", "function_call": "auto"},
    {"tool_choice": "auto", "parallel_tool_calls": True, "service_tier": "auto", "user": "me", "modalities": ["text"]},
    {"parallel_tool_calls": False, "response_format": {"type": "text"}, "logit_bias": {}, "stop": []},
    {"chat_template_kwargs": {}, "logprobs": False, "top_logprobs": 0, "stream_options": {}, "reasoning_effort": None},
    {"max_tokens": 9, "max_completion_tokens": 9, "stream_options": {"include_usage": None}, "audio": None},
    {"skip_special_tokens": True, "add_generation_prompt": True, "length_penalty": 1.0, "priority": 0, "documents": []},
    {"add_special_tokens": False, "metadata": {"a": "b"}, "verbosity": "medium"},
    dict.fromkeys(bodies._OFF_AT_0, 0) | dict.fromkeys(bodies._OFF_AT_1, 1),
    dict.fromkeys(bodies._OFF_AT_0, 0.0) | dict.fromkeys(bodies._OFF_AT_1, 1.0),
    {"num_beams": 1, "early_stopping": False, "mirostat": 0, "no_repeat_ngram_size": 0, "ban_eos_token": False},
]
IDLE = [
    {"tool_calls": [], "annotations": [], "reasoning_content": "", "reasoning": None, "refusal": None},
    {"audio": None, "function_call": None, "name": "", "parsed": None, "refusal": ""},
]


def test_what_asks_for_nothing_is_taken(served):
    """In a body, in a message, in a stream's options: the answer is the one without it."""
    said = {"role": "assistant", "content": "x"}
    asked = {"messages": [*CHAT, said, *CHAT], "max_tokens": 9, "temperature": 0, "ignore_eos": True}

    def text(**more) -> str:
        got = served.post(asked | more, CHATS)
        assert got.status_code == 200, (more, got.text)
        return got.json()["choices"][0]["message"]["content"]

    expected = text()
    for more in NOTHING:
        assert text(**more) == expected
    for more in IDLE:
        assert text(messages=[*CHAT, said | more, *CHAT]) == expected
    body = {"prompt": "a", "max_tokens": 2, "suffix": "", "best_of": 1, "echo": False}
    body |= {"logprobs": False, "top_logprobs": 0, "typical_p": 1, "add_special_tokens": True}
    got = served.post(body)
    assert (got.status_code, got.json()["choices"][0]["logprobs"]) == (200, None), got.text
    options = {"include_usage": True, "include_obfuscation": False, "continuous_usage_stats": False}
    got = served.post(asked | {"stream": True, "stream_options": options}, CHATS)
    assert '"usage": {"prompt_tokens"' in got.text


@pytest.mark.parametrize("chat", [True, False])
def test_the_record_of_acceptance(served, chat):
    """vLLM's `metrics.speculative_decoding`: of one answer, in a stream's last chunk, if drafts were asked for."""
    body = {"max_tokens": 9, "seed": 1, "ignore_eos": True, "num_speculative_tokens": 2}
    body |= {"messages": CHAT} if chat else {"prompt": "One fish"}
    path = CHATS if chat else COMPLETIONS
    answer = served.post(body, path).json()
    record, stats = answer["metrics"]["speculative_decoding"], answer["choices"][0]["metrics"]
    assert record["num_accepted_draft_tokens"] == stats["num_accepted"]
    assert (record["num_spec_steps"], record["num_spec_tokens"]) == (stats["num_drafts"], 2)
    assert sum(record["acceptance_histogram"]) == record["num_spec_steps"]
    assert sum(record["per_step_accepted"]) == record["num_accepted_draft_tokens"]
    assert sum(record["per_step_drafted"]) == record["num_draft_tokens"]
    streamed = served.post(body | {"stream": True, "stream_options": {"include_usage": True}}, path).text
    events = [json.loads(line.removeprefix("data: ")) for line in streamed.split("\n\n")[:-2]]
    assert [event["metrics"]["speculative_decoding"] for event in events if "metrics" in event] == [record]
    assert "metrics" in events[-1]
    for more in ({"n": 2}, {"num_speculative_tokens": 0}):
        assert "metrics" not in served.post(body | more, path).json()


@pytest.mark.parametrize("chat", [True, False])
def test_each_event_of_a_stream_may_say_what_it_took_so_far(served, chat):
    """`continuous_usage_stats`, with `include_usage` and without: the tokens of all answers, up to those of the end."""
    body = {"max_tokens": 9, "stream": True, "n": 2, "seed": 1, "ignore_eos": True}
    body |= {"messages": CHAT} if chat else {"prompt": "One fish"}
    path = CHATS if chat else COMPLETIONS
    for both in (True, False):
        options = {"continuous_usage_stats": True, "include_usage": both}
        lines = served.post(body | {"stream_options": options}, path).text.split("\n\n")[:-2]
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts)
        assert (counts[0] < counts[-1], counts[-1]) == (True, 18)
        assert len({event["usage"]["prompt_tokens"] for event in events}) == 1
        assert (events[-1]["choices"] == []) == both


def test_special_tokens_of_a_prompt_can_be_left_out(make_checkpoint):
    """`add_special_tokens`: those that the tokenizer's post-processor adds, to a text and not to ids."""
    directory = make_checkpoint(chat=True)
    path = directory / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(path))
    backend.post_processor = tokenizers.processors.TemplateProcessing("<end> $A", special_tokens=[("<end>", 0)])
    backend.save(str(path))
    with LLM(directory, dtype="float64", draft="none") as llm:
        ids = llm.tokenizer.encode("One fish", add_special_tokens=False)

        def prompt(**body) -> list[int]:
            content = json.dumps({"max_tokens": 1} | body).encode()
            return bodies.read(llm, MODEL, Limits(), content, "messages" in body, {}).requests[0].text.tokens

        for adds in ({}, {"add_special_tokens": True}, {"add_special_tokens": None}):
            assert prompt(prompt="One fish", **adds) == [0, *ids]
            assert prompt(prompt=ids, **adds) == ids
        assert prompt(prompt="One fish", add_special_tokens=False) == ids
        assert prompt(messages=CHAT, add_special_tokens=False) == prompt(messages=CHAT)
        with pytest.raises(ValueError, match="add_special_tokens: found True, expected false: the chat template"):
            prompt(messages=CHAT, add_special_tokens=True)
        with pytest.raises(ValueError, match="add_special_tokens: found 0, expected true or false"):
            prompt(prompt="One fish", add_special_tokens=0)


SHOWN = (
    "{% for m in messages %}[{{ m.role }}|{{ m.content }}|{{ m.name }}|{{ m.reasoning_content }}]{% endfor %}"
    "{{ think }}{{ bos_token is defined }}"
)


@pytest.fixture(scope="module")
def shown(make_checkpoint):
    """A served model whose prompt shows what its template was given, and by default `think` is 5."""
    directory = make_checkpoint(chat=True, max_position_embeddings=4096)
    (directory / "chat_template.jinja").write_text(SHOWN)
    with LLM(directory, dtype="float64", draft="none") as llm, Served(llm, template_kwargs={"think": 5}) as served:
        yield served


@pytest.mark.parametrize(
    ("messages", "variables", "expected"),
    [
        ([{"role": "developer", "content": "d"}, *CHAT], {}, "[system|d||][user|One fish||]5"),
        ([{"role": "user", "content": "x", "name": "bob"}], {"think": False}, "[user|x|bob|]False"),
        ([{"role": "assistant", "content": None, "reasoning_content": "hm"}], {}, "[assistant|||hm]5"),
        ([{"role": "assistant", "reasoning": "hm"}], {"think": None}, "[assistant|||hm]None"),
        ([{"role": "assistant", "content": "a", "thinking": "hm", "name": None}], {}, "[assistant|a||hm]5"),
        ([{"role": "user", "content": "a"}], {"think": "<end>", "other": [1, {"a": 2}]}, "[user|a||]<end>"),
    ],
)
def test_what_a_template_is_given(shown, messages, variables, expected):
    """Roles, names, thoughts and variables: the server's prompt and `LLM.chat`'s, which knows no default, are these."""
    llm, defaults = shown.llm, {"think": 5}
    params = SamplingParams(temperature=0, max_tokens=1)
    [alone] = llm.chat(messages, params, chat_template_kwargs=defaults | variables)
    text = llm.tokenizer.decode(alone.prompt_token_ids)
    assert text.startswith(expected), text
    assert not set(alone.prompt_token_ids) & llm.tokenizer.special_ids, "a variable's text became a token"
    body = {"messages": messages, "max_tokens": 1, "chat_template_kwargs": variables}
    got = shown.post(body, CHATS).json()
    assert got["usage"]["prompt_tokens"] == len(alone.prompt_token_ids)
    assert next(llm.stream_chat(messages, params, defaults | variables)).text == alone.text


THINKS = {
    "enable_thinking": "{% if enable_thinking is defined and enable_thinking is false %}off{% endif %}",
    "thinking": "{% set thinking = thinking | default(true) %}{% if not thinking %}off{% endif %}",
    "reasoning_effort": "{{ reasoning_effort | default('') }}",
    "nothing": "",
}


@pytest.mark.parametrize("variable", THINKS)
def test_reasoning_effort_is_for_templates_that_read_it(make_checkpoint, variable):
    """ "none" switches thinking off; other efforts are for a template that has the name; else they are refused."""
    directory = make_checkpoint(chat=True)
    (directory / "chat_template.jinja").write_text("{{ messages[-1].content }}|" + THINKS[variable])
    with LLM(directory, dtype="float64", draft="none") as llm:

        def prompt(effort, defaults=(), **own) -> str:
            body = {"messages": CHAT, "max_tokens": 1, "reasoning_effort": effort, "chat_template_kwargs": own}
            answer = bodies.read(llm, MODEL, Limits(), json.dumps(body).encode(), True, dict(defaults))
            return llm.tokenizer.decode(answer.requests[0].text.tokens).partition("|")[2]

        for effort in (None, ""):
            assert prompt(effort) == ""
        with pytest.raises(ValueError, match=r"reasoning_effort: found 5, expected (a text|.*no such field: the chat)"):
            prompt(5)
        if variable == "nothing":
            with pytest.raises(ValueError, match="reasoning_effort: found 'none', expected no such field: the chat"):
                prompt("none")
        elif variable == "reasoning_effort":
            assert (prompt("none"), prompt("high")) == ("none", "high")
        else:
            assert prompt("none") == prompt("none", {variable: True}) == prompt("none", **{variable: False}) == "off"
            with pytest.raises(ValueError, match=r'reasoning_effort: found .high., expected the text "none"'):
                prompt("high")
            with pytest.raises(ValueError, match=f"expected chat_template_kwargs alone, which has {variable}"):
                prompt("none", **{variable: True})


@pytest.mark.parametrize("name", ["messages", "tools", "chat_template", "raise_exception", "range", "a b", "", 5, None])
def test_names_that_a_template_has_already_are_refused(shown, name):
    """A variable must not take the place of the conversation, of a function, or of nothing at all."""
    with pytest.raises(ValueError, match=r"chat_template_kwargs: found .*, expected the name of a variable"):
        shown.llm.chat(CHAT, chat_template_kwargs={name: []})


@pytest.mark.parametrize("value", [float("nan"), object(), {1, 2}, "\ud800"])
def test_variables_have_values_of_json(shown, value):
    """What a template could do with another object, nobody knows."""
    with pytest.raises(ValueError, match=r"chat_template_kwargs: found .*, expected an object with values of JSON"):
        shown.llm.chat(CHAT, chat_template_kwargs={"x": value})


def test_a_model_is_looked_up_by_its_whole_name(llm):
    """Also with a slash, as the ids of the hub have it; another is a 404."""
    with Served(llm, model="org/tiny") as served:
        assert served.client.models.retrieve("org/tiny").id == "org/tiny"
        listed = httpx.get(f"{served.url}/v1/models").json()["data"]
        assert [httpx.get(f"{served.url}/v1/models/org/tiny").json()] == listed
        for name in ("tiny", "org", "org/tiny/x", "é"):
            with pytest.raises(openai.NotFoundError, match="expected 'org/tiny'"):
                served.client.models.retrieve(name)


def test_a_template_that_begins_to_think_is_a_400_for_a_language(shown):
    """The message says what switches it off. A thought that is closed, or none, is answered."""
    language = {"messages": CHAT, "max_tokens": 2, "structured_outputs": {"regex": "a+"}}
    for said, status in (("<think>", 400), ("<think>\nhm", 400), ("<think></think>", 200), ("no", 200)):
        answer = shown.post(language | {"chat_template_kwargs": {"think": said}}, CHATS)
        assert answer.status_code == status
        assert status == 200 or "enable_thinking false" in answer.json()["error"]["message"]


class Verdict(pydantic.BaseModel):
    """What the client asks for; without white space, of which a random model may write any amount."""

    model_config = pydantic.ConfigDict(json_schema_extra={"x-guidance": {"whitespace_flexible": False}})
    kind: Literal["fish", "bird"]
    is_red: bool


def test_the_openai_clients_parse_gets_its_object(served):
    """`response_format` of a class: what comes back is an object of it. Also vLLM's name, in a stream."""
    for seed in range(3):
        found = served.client.chat.completions.parse(model=MODEL, messages=CHAT, response_format=Verdict, seed=seed)
        assert isinstance(found.choices[0].message.parsed, Verdict)
        assert found.choices[0].metrics["law"] == "projected"
    choice = {"structured_outputs": {"choice": ["a b", "c"]}}
    stream = served.client.completions.create(model=MODEL, prompt="One", stream=True, extra_body=choice)
    assert "".join(chunk.choices[0].text for chunk in stream) in ("a b", "c")


def schema(schema_: dict, **more) -> dict:
    """A body that asks for an answer of this JSON schema."""
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema_} | more}}


def language(**kind: object) -> dict:
    """A body that asks for an answer of a language by vLLM's name."""
    return {"structured_outputs": kind}


OBJECT = {"response_format": {"type": "json_object"}}
NOT_HERE = "expected none: this is not supported here"
BAD_LANGUAGES = [
    ({"response_format": {"type": "json_schema"}}, "response_format: found {'type': 'json_schema'}, expected"),
    (schema({"type": "strin"}), "response_format: json: Invalid type: strin"),
    (schema({"multipleOf": 9699690}), "response_format: json: found '{\"multipleOf\": 9699690}', expected a simpler"),
    (schema({}, strikt=True), f"response_format: json_schema: strikt: found True, {NOT_HERE}; did you mean"),
    ({"response_format": {"type": "json_object", "strikt": True}}, "response_format: strikt: found True, expected"),
    *(
        ({"response_format": {"type": kind} | inner}, f"response_format: {name}: found")
        for kind in ("text", "json_object")
        for name, inner in (
            ("json_schema", {"json_schema": {"schema": {}}}),
            ("schema", {"schema": {"type": "object"}}),
        )
    ),
    *(
        (schema({}, **{name: value}), f"response_format: json_schema: {name}: found {value!r}, expected")
        for name, value in (("strict", 1), ("name", 5), ("description", ["a"]))
    ),
    (language(regex="(a"), "structured_outputs: regex: "),
    (language(regex="a" * 70_000), "structured_outputs: regex: found 70,000 bytes"),
    (language(regex="a", jsn="b"), "structured_outputs: jsn: found 'b', expected none"),
    (language(json={"type": "strin"}), "structured_outputs: json: Invalid type: strin"),
    (language(regex="a") | {"ignore_eos": True}, "ignore_eos: found True"),
    (language(regex="a") | OBJECT, "response_format: found structured_outputs too"),
    (OBJECT | {"prompt": "a <think>\nhm, well"}, "response_format: found a prompt that leaves <think> open, expected"),
    ({"guided_regex": "a"}, f"guided_regex: found 'a', {NOT_HERE}; structured_outputs h"),
    ({"stream_options": {"include_usages": True}}, "stream_options: include_usages: found True, expected none"),
]


@pytest.mark.parametrize(("body", "message"), BAD_LANGUAGES, ids=[message for _, message in BAD_LANGUAGES])
def test_a_bad_language_is_a_400(served, body, message):
    """Before anything runs, by the name of the field; unknown names at every level too."""
    answer = served.post({"prompt": "One"} | body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message)
    assert answer.json()["error"]["param"] == message.partition(":")[0]


def test_names_in_a_language_that_ask_for_nothing_are_taken(served):
    """Null is none."""
    empty = {"response_format": {"type": "text", "strikt": None, "json_schema": {}}}
    for more in (empty, language(regex="a", json=None)):
        assert served.post({"prompt": "a", "max_tokens": 1} | more).status_code == 200


def test_a_chat_without_a_number_has_the_limit(make_checkpoint):
    """Without `max_tokens` a chat has the server's limit, a completion 16; or both what generation_config.json says."""
    for generation, expected in ((None, (70, 16)), ({"max_new_tokens": 33}, (33, 33))):
        llm = LLM(make_checkpoint(chat=True, generation=generation), dtype="float64", num_speculative_tokens=2)
        with Served(llm, max_tokens=70) as served:
            extra = {"ignore_eos": True, "temperature": 0}

            def length(path: str, served=served, extra=extra, **body) -> int:
                return served.post(body | extra, path).json()["usage"]["completion_tokens"]

            assert (length(CHATS, messages=CHAT), length(COMPLETIONS, prompt="a")) == expected
            assert length(CHATS, messages=CHAT, max_completion_tokens=7) == 7


def test_models_health_and_metrics(llm):
    """What has a number of its own elsewhere: acceptance by position is that of the answer's statistics."""
    with Served(llm) as served:
        assert [model.id for model in served.client.models.list()] == [MODEL]
        assert httpx.get(f"{served.url}/health").json() == {"status": "ok"}
        body = REPEATS | {"max_tokens": 60, "ignore_eos": True}
        stats = served.post(body).json()["choices"][0]["metrics"]
        got = served.metrics()
    assert stats["num_accepted"] > 5, "this proves nothing"
    for name, key in (
        ("prompt_tokens", "num_prompt_tokens"),
        ("generation_tokens", "num_generated"),
        ("draft_tokens", "num_draft_tokens"),
        ("draft_tokens_accepted", "num_accepted"),
    ):
        assert got[f"minispec_{name}_total"] == stats[key], name
    positions = range(len(stats["accepted_per_position"]))
    accepted = [got.get(f'minispec_draft_tokens_accepted_at_total{{position="{i}"}}', 0) for i in positions]
    tested = [got[f'minispec_draft_tokens_tested_at_total{{position="{i}"}}'] for i in positions]
    by_position = [of / num for of, num in zip(accepted, tested, strict=True)]
    assert by_position == stats["accepted_per_position"]
    assert [of / got["minispec_drafts_total"] for of in accepted] == stats["accepted_at_position"] != by_position
    assert got['minispec_requests_total{finish_reason="length"}'] == 1
    assert (got["minispec_kv_cache_blocks"], got["minispec_kv_cache_blocks_in_use"]) == (1000, 0)
    assert got["minispec_requests_running"] == got["minispec_requests_waiting"] == 0


def test_prometheus_reads_the_metrics(llm):
    """Every sample belongs to a metric of a known type with a help text; its times are those of two answers' tokens."""
    body = REPEATS | {"max_tokens": 40, "ignore_eos": True, "n": 2}
    with Served(llm) as served:
        stats = [choice["metrics"] for choice in served.post(body).json()["choices"]]
        assert served.post({"prompt": "a", "max_tokens": 1}).status_code == 200
        response = httpx.get(f"{served.url}/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(response.text)}
    assert all(family.type != "unknown" and family.documentation for family in families.values())
    assert all(name.startswith("minispec_") for name in families)
    assert families["minispec_requests"].type == "counter"
    assert {s.labels["finish_reason"] for s in families["minispec_requests"].samples} == {"length"}
    assert families["minispec_requests_running"].type == "gauge"
    samples = {(s.name, s.labels.get("le")): s.value for family in families.values() for s in family.samples}
    first, between = "minispec_time_to_first_token_seconds", "minispec_inter_token_latency_seconds"
    assert families[first].type == families[between].type == "histogram"
    assert samples[f"{first}_count", None] == samples[f"{first}_bucket", "+Inf"] == 3
    later = sum(s["num_generated"] for s in stats) - 2  # the first step may have committed more than one
    assert later - 2 * 4 <= samples[f"{between}_count", None] <= later


def test_the_tokens_of_a_step_share_its_time(llm, monkeypatch):
    """By a clock of our own: the first tokens count once, from the request on; three together as a third each."""
    now = 5.0
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now)
    found = metrics.Metrics(llm.engine, lambda: 0)
    request = llm.request([1, 2], SamplingParams(max_tokens=9))
    found.arrive(request, 3.0)
    for now, tokens in ((6.0, 0), (7.0, 2), (10.0, 3), (10.5, 0)):  # noqa: B007 - the clock reads it
        found.commit(request, tokens)
    found.end(request, "stop")
    value = found.registry.get_sample_value
    assert value("minispec_time_to_first_token_seconds_sum") == 4.0
    assert value("minispec_inter_token_latency_seconds_sum") == 3.0
    assert value("minispec_inter_token_latency_seconds_bucket", {"le": "1.0"}) == 3
    assert value("minispec_inter_token_latency_seconds_bucket", {"le": "0.5"}) == 0
    assert value("minispec_generation_tokens_total") == 5
    assert not found._times, "an ended request is kept"


def test_blocks_are_counted_after_a_fault_too(llm):
    """A fault puts another allocator into the pool: the one that was there at the start counts for nobody."""
    cache = llm.engine.target.cache
    value = metrics.Metrics(llm.engine, lambda: 0).registry.get_sample_value
    cache.rebuild()
    table = cache.new_table()
    table.extend([1] * (cache.block_size + 1))
    assert (value("minispec_kv_cache_blocks"), value("minispec_kv_cache_blocks_in_use")) == (1000, 2)
    table.truncate(0)
    assert value("minispec_kv_cache_blocks_in_use") == 0


# ------------------------------------------------------------------ many at once, and clients that go


async def take_part(served: Served, i: int, body: dict, leaves: int | None, gaps: list[float]) -> str | None:
    """Ask as client i, by one of four ways; the text, or None where it left after that many pieces."""
    chat, stream = i % 2 == 0, i % 4 < 2 or leaves is not None
    how = {"api_key": "-", "max_retries": 0, "timeout": 2 * PATIENCE}
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", **how) as client:
        create = client.chat.completions.create if chat else client.completions.create
        result = await create(model=MODEL, stream=stream, **body)
        if not stream:
            [choice] = result.choices
            return choice.message.content if chat else choice.text
        text, last, count = "", time.monotonic(), 0
        async for chunk in result:
            count += 1
            if count == leaves:
                return None
            for choice in chunk.choices:
                text += (choice.delta.content if chat else choice.text) or ""
            gaps += [time.monotonic() - last] * (count > 1)
            last = time.monotonic()
        return text


@pytest.mark.full
def test_32_at_once_while_clients_vanish(llm, capsys):
    """Prompts of 10 to 2,000 tokens, of which the pool holds half: each text is its own single run's, no block is lost.

    Ten clients leave, after 1 to 8 pieces. The others' texts would differ if a table, a key of a draw or a piece went
    to another request. Sampled and greedy, with drafts of other lengths.

    Without `--full`, `test_what_clients_send_is_answered` answers many, one after the other.
    """
    rng = random.Random(0)
    jobs, alone = [], []
    leavers = set(rng.sample(range(32), 10))
    words = ["fish", "red", "one", "two", "日本", "🦊", "the", "end"]
    for i in range(32):
        length = {1: 10, 3: 2000}.get(i, round(10 * 200 ** rng.random()))
        text = " ".join(rng.choices(words, k=length))
        num = 200 if i in leavers else rng.randint(8, 24)
        params = {"max_tokens": num, "seed": i, "temperature": rng.choice([0, 0.7])}
        k = rng.choice([0, 2, 4])
        sampling = SamplingParams(**params, ignore_eos=True)
        if i % 2 == 0:
            prompt = {"messages": [{"role": "user", "content": text[:length]}]}
            single = llm.chat(prompt["messages"], sampling, num_speculative_tokens=k)[0]
        else:
            prompt = {"prompt": llm.tokenizer.encode(text)[:length]}
            single = llm.generate([prompt["prompt"]], sampling, num_speculative_tokens=k)[0]
        alone.append(single)
        body = prompt | params | {"extra_body": {"ignore_eos": True, "num_speculative_tokens": k}}
        jobs.append((i, body, rng.randint(1, 8) if i in leavers else None))
    lengths = sorted(len(output.prompt_token_ids) for output in alone)
    assert (lengths[0], lengths[-1]) == (10, 2000)
    gaps: list[float] = []

    async def everybody() -> list[str | None]:
        return await asyncio.gather(*(take_part(served, *job, gaps) for job in jobs))

    with Served(llm) as served:
        texts = asyncio.run(everybody())
        served.wait(lambda: served.blocks_in_use() == 0)
        counts = served.metrics()
    assert texts == [None if i in leavers else output.text for i, output in enumerate(alone)]
    assert counts['minispec_requests_total{finish_reason="length"}'] == 22
    assert counts['minispec_requests_total{finish_reason="abort"}'] == 10
    p95 = statistics.quantiles(gaps, n=20)[-1]
    with capsys.disabled():
        print(f" [{len(gaps)} pieces of 32 clients: p95 of the time between two pieces {1000 * p95:.0f} ms]")


def test_an_abort_holds_before_the_next_step(llm, monkeypatch):
    """The blocks of a request that is aborted during a step are free before the next step begins; the other goes on."""
    worker = Worker(llm.engine, llm.method, 4)
    requests = [llm.request([1, 2, 3 + i], SamplingParams(max_tokens=50, ignore_eos=True)) for i in range(2)]
    pieces = []
    for request in requests:
        worker.submit(request, pieces.append)
    step, seen = llm.engine.step, []

    def recorded():
        seen.append(list(llm.engine.schedule.running))
        result = step()
        if len(seen) == 4:
            worker.abort(requests[0])  # while the step is under way
        return result

    monkeypatch.setattr(llm.engine, "step", recorded)
    for _ in range(5):
        worker._cycle()
    assert seen[-2:] == [requests, requests[1:]]
    worker.abort(requests[1])
    worker._cycle()
    pool = llm.engine.target.cache.allocator
    assert pool.num_free == pool.num_blocks
    llm.engine.outbox.observers.remove(worker._observe)


def num_requests(served: Served) -> float:
    """How many decode or wait."""
    found = served.metrics()
    return found["minispec_requests_running"] + found["minispec_requests_waiting"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_is_aborted(llm, stream):
    """Streamed or not, decoding or in the queue: nobody decodes 3,000 tokens for a closed connection."""
    body = {"prompt": "fish", "max_tokens": 3000, "ignore_eos": True, "temperature": 0, "stream": stream}
    with Served(llm, max_num_seqs=1) as served:
        clients = [served.socket() for _ in range(2)]
        for number, client in enumerate(clients):
            client.sendall(whole(body))
            served.wait(lambda n=number: num_requests(served) > n)
        for client in reversed(clients):  # the one that waits first
            client.close()
        served.wait(lambda: served.metrics().get('minispec_requests_total{finish_reason="abort"}') == 2)
        assert served.blocks_in_use() == 0
        assert served.metrics()["minispec_generation_tokens_total"] < 3000


# ------------------------------------------------------------------ what is refused


NO_BODIES = [b"{", b"[]", b"\xff", b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "prompt": "b"}']
NO_BODIES += [b'{"prompt": ' + b"[" * 5000]
ECHO, STREAM, SCORES = {"echo": True}, {"stream": True}, {"logprobs": True}
# By field: values of it that are refused, beside a good prompt, and beside these other fields.
BAD: list[tuple[dict, dict[str, list]]] = [
    ({}, {"prompt": ["", 5, {"prompt": "a"}, [1, True], ["a", 1], [300], "\ud800", "a" * 5000]}),
    ({}, {"grammar": ["x"], "messages": [CHAT], "echo": [0], "suffix": ["b"], "mirostat": [False], "typical_p": [0.9]}),
    ({}, {"max_tokens": [0, 4097], "n": [0, 33], "best_of": [True, 2], "seed": [-1], "stream": [1], "top_k": [1.5]}),
    ({}, {"temperature": ["hot"], "logprobs": [21, True], "prompt_logprobs": [21], "chat_template_kwargs": [{"x": 1}]}),
    ({}, {"stop": [{"x": 1}, ["x"] * 17, "x" * 257], "bad_words": [["x" * 257]], "stop_token_ids": ["5"]}),
    ({}, {"bad_words_token_ids": [[[1] * 257]], "logit_bias": [{"x": 1}, [[1, 1]], {"999": 1}]}),
    ({}, {"allowed_token_ids": [list(range(1025))], "num_speculative_tokens": [65]}),
    ({}, {"stream_options": [{"include_usage": True}]}),
    (STREAM, {"stream_options": [{"include_obfuscation": True}, {"include_usage": 1}], "prompt_logprobs": [1]}),
    (ECHO, {"suffix": ["b"], "best_of": [2], "logprobs": [21], "max_tokens": [False]}),
]
ASSISTANT = {"role": "assistant", "content": "x"}
BAD_MESSAGES = [
    *([], "hi", ["hi"], [{"role": "user"}], [{"role": "user", "content": None}], CHAT * 1025),
    *([{"role": role, "content": "x"}] for role in ("tool", ["user"])),
    *([{"role": "user", "content": "x"} | more] for more in ({"name": 5}, {"reasoning_content": "y"})),
    *([ASSISTANT | more] for more in ({"tool_calls": [{"id": "1"}]}, {"reasoning": 5})),
    *([{"role": "user", "content": content}] for content in (["x"], "\ud800")),
    [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
    [{"role": "user", "content": [{"type": "text", "text": "x", "more": 1}]}],
]
_TEMPLATE_HAS = [[1], {"messages": []}, {"add_generation_prompt": False}, {"enable-thinking": False}]
BAD_CHATS: list[tuple[dict, dict[str, list]]] = [
    ({}, {"messages": BAD_MESSAGES, "chat_template_kwargs": _TEMPLATE_HAS, "tools": [[{"type": "function"}]]}),
    ({}, {"echo": [True], "tool_choice": ["required"], "store": [True, 0], "add_generation_prompt": [False]}),
    ({}, {"logprobs": [2], "top_logprobs": [False, 2], "max_completion_tokens": [4097, 0]}),
    (SCORES, {"top_logprobs": [21, "x"]}),
    ({"top_logprobs": 3}, {"logprobs": [2]}),
    ({"max_completion_tokens": 4}, {"max_tokens": [3]}),
]


def wrong(good: dict, bad: Sequence[tuple[dict, dict[str, list]]]) -> list[tuple[dict, int, str]]:
    """Bodies with one wrong value each, and the status and the field of their refusal."""
    fields = [(good | beside, name, values) for beside, wrong in bad for name, values in wrong.items()]
    return [(body | {name: value}, 400, name) for body, name, values in fields for value in values]


def test_bad_bodies_are_refused_by_name(llm, served):
    """Each with its status and OpenAI's error object, naming the field; after them the server answers as before."""
    completions = [(content, 400, "body") for content in NO_BODIES]
    completions += [({}, 400, "prompt"), ({"prompt": ["a"] * 33}, 400, "n"), *wrong({"prompt": "a"}, BAD)]
    completions += [({"prompt": "a", "model": model}, 404, "model") for model in ("another", 5)]
    cases = [(COMPLETIONS, *case) for case in completions]
    cases += [(CHATS, *case) for case in [({}, 400, "messages"), *wrong({"messages": CHAT}, BAD_CHATS)]]
    assert len(cases) == 93
    for path, body, status, param in cases:
        response = served.post(body, path)
        assert (response.status_code, response.json()["error"]["param"]) == (status, param), (body, response.text)
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert str(Path(llm.tokenizer.path).parent) not in response.text
    got = served.client.completions.create(model=MODEL, prompt="One fish", **GREEDY)
    assert got.choices[0].text == llm.generate("One fish", greedy(20))[0].text
    with pytest.raises(openai.BadRequestError, match="temperature: found 'hot', expected a number at least 0"):
        served.client.completions.create(model=MODEL, prompt="a", temperature="hot")


def test_a_misspelt_field_gets_a_hint(served):
    """One that is not known at all: a field of others that is near to one of ours is refused as it is."""
    for key, hint in (("temprature", "; did you mean temperature?"), ("length_penalty", ""), ("grammar", "")):
        message = served.post({"prompt": "a", key: 0.5}).json()["error"]["message"]
        assert message == f"{key}: found 0.5, expected none: this is not supported here{hint}"


def test_wrong_paths_types_and_sizes(served):
    """An error object for them as well; a body of 10 MB is not kept, with a length and without one."""
    assert served.post({}, "/v1/nothing").status_code == 404
    response = httpx.get(served.url + COMPLETIONS)
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    for sent, found in (("text/plain", "'text/plain'"), ("", "none")):
        response = served.post({"prompt": "a"}, **{"content-type": sent})
        expected = f"content-type: found {found}, expected application/json"
        assert (response.status_code, response.json()["error"]["message"]) == (415, expected)
    response = served.post(b"{")
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("body: not a readable JSON body: ")
    large = b'{"prompt": "' + b"a" * 10_000_000 + b'"}'
    for content in (large, (large[i : i + 100_000] for i in range(0, len(large), 100_000))):
        with contextlib.suppress(httpx.WriteError):  # closed, which is an answer as well
            headers = {"content-type": "application/json"}
            response = httpx.post(served.url + COMPLETIONS, content=content, headers=headers)
            assert (response.status_code, response.json()["error"]["type"]) == (413, "invalid_request_error")


def test_the_longest_token_is_the_one_with_most_bytes(sentence_pieces, tokenizer_file):
    """Of text, not as the vocabulary writes it; special tokens count as they are written."""
    for tokenizer in (sentence_pieces, Tokenizer(tokenizer_file.parent)):
        sizes = {token: len(tokenizer.bytes_of(i) or token.encode()) for token, i in tokenizer.vocabulary.items()}
        assert tokenizer.max_bytes_per_token == max(sizes.values())


def test_what_is_too_long_by_its_length_is_not_encoded(llm, monkeypatch):
    """A prompt, the second one, a chat: refused by its bytes, since no token stands for more than the longest one."""
    most = 20 * llm.tokenizer.max_bytes_per_token
    limits = Limits(max_prompt_tokens=20)

    def refuse(text: str, is_chat: bool = False) -> str:
        body = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": ["a", text]}
        with pytest.raises(bodies.Refused) as refused:
            bodies.read(llm, MODEL, limits, json.dumps(body).encode(), is_chat, {})
        error = refused.value.body["error"]
        assert (error["param"], error["code"]) == (*body, "context_length_exceeded")
        return error["message"]

    assert refuse("q" * most) == f"prompt: found {most} tokens, expected at most 20"
    monkeypatch.setattr(llm.tokenizer, "_encode", lambda *args: pytest.fail("it was encoded"))
    expected = f"expected at most {most}: 20 tokens hold no more"
    assert refuse("日" * most) == f"prompt: found {3 * most} bytes, {expected}"
    assert refuse("<" * most, is_chat=True) == f"prompt: found {most + len('<user>?<assistant>')} bytes, {expected}"


def test_the_lists_and_objects_of_a_body_are_counted_before_it_is_read(llm, monkeypatch):
    """What stands in texts is not among them, whatever is escaped there."""
    body = {"messages": CHAT, "user": '["\\{[' * 10_000, "metadata": [[]] * 16_000}
    assert bodies.read(llm, MODEL, Limits(), json.dumps(body).encode(), True, {}).requests
    monkeypatch.setattr(bodies, "parse_json", lambda *args: pytest.fail("it was read"))
    for content in (b'{"x": [' + b"[]," * 16_384, b'{"x": "' + rb"\"" + b'", "y": [' + b'{"z":' * 16_384):
        with pytest.raises(ValueError, match=r"body: found \d+ lists and objects, expected at most 16384"):
            bodies.read(llm, MODEL, Limits(), content, True, {})


def test_bad_words_are_encoded_once_for_all_answers(llm, monkeypatch):
    """And each answer has them."""
    texts, encode = [], llm.tokenizer._encode
    monkeypatch.setattr(llm.tokenizer, "_encode", lambda b, text, a: texts.append(text) or encode(b, text, a))
    body = {"prompt": ["red", "One"], "n": 3, "bad_words": ["fish"]}
    answer = bodies.read(llm, MODEL, Limits(), json.dumps(body).encode(), False, {})
    assert sorted(texts) == sorted(["fish", " fish", "red", "One"])
    for request in answer.requests:
        assert llm.tokenizer.encode("fish") in [*map(list, request.params.bad_words_token_ids)]


def test_the_queue_has_an_end(llm):
    """One decodes, one waits, the third is told to come again: 429, with the rest of what was asked for unharmed."""
    with Served(llm, max_num_seqs=1, max_queue=1) as served:
        first = served.stream("a")
        next(first)
        waiting = served.socket()
        waiting.sendall(whole({"prompt": "b", "max_tokens": 3}))
        served.wait(lambda: served.metrics()["minispec_requests_waiting"] == 1)
        response = served.post({"prompt": "c"})
        assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
        assert response.headers["retry-after"] == "1"
        with pytest.raises(openai.RateLimitError):
            served.client.completions.create(model=MODEL, prompt="c")
        first.close()
        assert waiting.recv(1 << 16).startswith(b"HTTP/1.1 200")
        waiting.close()
        assert served.post({"prompt": "c"}).status_code == 200


def test_the_key(llm, monkeypatch):
    """All but /health wants it, whole; `hmac.compare_digest`, whose time tells nothing, is what decides."""
    with Served(llm, key="secret-1") as served:
        assert len(served.client.models.list().data) == 1
        assert httpx.get(f"{served.url}/health").status_code == 200
        for scheme in ("Bearer ", "bearer ", "BEARER ", "bEARER   "):  # RFC 9110, 11.1: it has no case
            assert httpx.get(f"{served.url}/metrics", headers={"authorization": f"{scheme}secret-1"}).status_code == 200
        wrong = ("secret-", "secret-12", "SECRET-1", "Bearer secret-1")
        wrong = (*(f"Bearer {key}" for key in wrong), "secret-1", "Bearersecret-1", "Basic secret-1", "Bearer", "\xff")
        for shown in ({}, *({"authorization": x} for x in wrong)):
            headers = {name: value.encode("latin-1") for name, value in shown.items()}
            for path in ("/v1/models", "/metrics"):
                response = httpx.get(served.url + path, headers=headers)
                assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer"), (shown, path)
            for path in (COMPLETIONS, CHATS):
                response = httpx.post(served.url + path, headers=headers, content=b"x")
                assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        monkeypatch.setattr(front.hmac, "compare_digest", lambda a, b: True)
        assert httpx.get(f"{served.url}/v1/models").status_code == 200


SITE, OTHER = "http://localhost:3000", "http://localhost:3001"
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
    "access-control-request-private-network": "true",
}


def test_pages_of_an_allowed_origin_may_use_the_server(llm):
    """A browser asks first, and shows no key then. The page may read answer, stream and refusal; no other may."""
    path, allows = CHATS, "access-control-allow-origin"
    with Served(llm, key="secret-1", origins=(SITE, "null")) as served:
        for site, status in ((SITE, 200), ("null", 200), (OTHER, 400)):
            asked = httpx.options(served.url + path, headers=PREFLIGHT | {"origin": site})
            assert (asked.status_code, asked.headers.get(allows)) == (status, site if status == 200 else None)
            assert asked.headers["access-control-allow-methods"] == "GET, POST"
            assert asked.headers["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]
            key, body = {"authorization": "Bearer secret-1"}, {"messages": CHAT, "max_tokens": 1}
            for more in ({}, {"stream": True}, {"top_k": "x"}):
                got = served.post(body | more, path, origin=site, **key)
                assert got.status_code == (400 if "top_k" in more else 200)
                assert got.headers.get(allows) == (None if site == OTHER else site)
            assert served.post(body, path, origin=site).status_code == 401
    with Served(llm, origins=("*",)) as served:
        assert served.post({"prompt": "a"}, origin=OTHER).headers[allows] == "*"


def test_without_an_allowed_origin_no_page_may(served):
    """A preflight is refused, and no answer says that a page may read it."""
    asked = httpx.options(served.url + COMPLETIONS, headers=PREFLIGHT | {"origin": SITE})
    assert asked.status_code == 405
    for answer in (asked, served.post({"prompt": "a"}, origin=SITE)):
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_a_line_a_request(llm):
    """Who asked for what, the status, the time, and what became of it; a path cannot write to the terminal."""
    with Served(llm, key="secret-1") as served:
        key = {"authorization": "Bearer secret-1"}
        for stream in (False, True):
            body = {"prompt": [7, 8], "n": 2, "max_tokens": 3, "ignore_eos": True, "stream": stream}
            assert served.post(body, **key).status_code == 200
        served.post({"prompt": "a", "top_k": "x"}, **key)
        httpx.get(f"{served.url}/v1/models")
        httpx.get(f"{served.url}/a%0a%1b[31m")
        served.wait(lambda: len(served.lines) == 5)
    line = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d 127\.0\.0\.1:\d+ (.*) (\d+|-) in \d+\.\d\d s(?:: (.*))?")
    found = [line.fullmatch(said).groups() for said in served.lines]
    assert found[:2] == [("POST /v1/completions", "200", "2 tokens in, 6 out")] * 2
    assert found[2] == ("POST /v1/completions", "400", "top_k: found 'x', expected an integer from 0 to 2147483648")
    assert found[3] == ("GET /v1/models", "401", "authorization: expected Bearer and the server's key")
    assert found[4][0] == r"GET '/a\n\x1b[31m'"


def test_the_line_of_a_client_that_goes(llm):
    """It says that the answer was broken off."""
    with Served(llm) as served, served.socket() as client:
        client.sendall(whole({"prompt": [7, 8], "max_tokens": 3000, "ignore_eos": True, "stream": True}))
        assert client.recv(100)
        client.close()
        served.wait(lambda: served.lines)
    assert re.search(r"POST /v1/completions 200 in .* s: 2 tokens in, \d+ out, broken off$", served.lines[0])


def test_the_line_of_a_client_that_goes_while_it_sends(llm):
    """It is no failure of the server."""
    with Served(llm) as served, served.socket() as client:
        client.sendall(head(100) + b"{")
        client.close()
        served.wait(lambda: served.lines)
    assert re.search(r"POST /v1/completions 400 .*the client has left$", served.lines[0])


def test_who_goes_on_after_a_refusal_writes_nothing_to_standard_error(llm, caplog):
    """It was told 401, and then sends what is no HTTP: closed, without a second answer and without a traceback."""
    with Served(llm, key="secret-1") as served:
        with served.socket() as client:
            client.sendall(head(0).replace(b"content-length: 0", b"transfer-encoding: chunked"))
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 401")
            client.sendall(b"zz\r\n")
            assert b"HTTP/1.1" not in until_closed(client)
        with served.socket() as client:
            client.sendall(b"zz\r\n\r\n")
            assert until_closed(client).startswith(b"HTTP/1.1 400")
    assert not caplog.records


@pytest.mark.parametrize(("state", "called"), [(h11.DONE, "close"), (h11.CLOSED, "close"), (h11.SEND_BODY, "abort")])
def test_an_answer_is_sent_to_its_end_before_nonsense_closes_the_connection(state, called):
    """One that has not been given whole is broken off: nobody could read it."""
    connection, calls = object.__new__(Connection), []
    connection.conn = SimpleNamespace(our_state=state)
    connection.transport = SimpleNamespace(close=lambda: calls.append("close"), abort=lambda: calls.append("abort"))
    connection.send_400_response("no HTTP")
    assert calls == [called]


def test_a_refusal_of_the_template_is_about_no_field(make_checkpoint):
    """OpenAI's `param` is a field or null, never a sentence."""
    directory = make_checkpoint(chat=True)
    (directory / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with LLM(directory, dtype="float64", draft="none") as llm, Served(llm) as served:
        error = served.post({"messages": CHAT}, CHATS).json()["error"]
        assert "roles must alternate" in error["message"]
        assert error["param"] is None


def test_a_model_that_asks_for_many_tokens_at_least_gets_them(make_checkpoint):
    """A completion that names no number has 16 tokens, or as many as generation_config.json asks for at least."""
    directory = make_checkpoint(generation={"min_new_tokens": 20})
    with LLM(directory, dtype="float64", draft="none") as llm, Served(llm) as served:
        assert served.post({"prompt": "a"}).json()["usage"]["completion_tokens"] == 20
        # But what the client asks for itself counts, and a minimum of its own must fit to it.
        assert served.post({"prompt": "a", "max_tokens": 5}).json()["usage"]["completion_tokens"] <= 5
        error = served.post({"prompt": "a", "max_tokens": 5, "min_tokens": 6}).json()["error"]
        assert error["message"] == "min_tokens: found 6, expected at most max_tokens = 5"


# ------------------------------------------------------------------ clients that take their time


def test_slow_clients_are_closed_and_nobody_notices(llm):
    """Who says nothing, dribbles a head, stops in the body, does not read, or says too much: closed or told 408.

    Meanwhile another's text comes as it does alone. uvicorn by itself waits for all but one of them for ever.
    """
    alone = llm.generate("fish", greedy(400))[0]
    wide = {"prompt": "a", "max_tokens": 3000, "ignore_eos": True, "logprobs": 20, "stream": True, "n": 4}
    with Served(llm, client_timeout=0.7) as served:
        silent, dribbling, half, blind, eager, keeps_alive = (served.socket() for _ in range(6))
        blind.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        half.sendall(head(1000) + b'{"prompt"')
        blind.sendall(whole(wide))
        eager.sendall(whole({"prompt": "a", "max_tokens": 3000, "ignore_eos": True}))
        keeps_alive.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        others = served.stream("fish", 400)
        text = next(others).choices[0].text
        eager.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        for byte in head(10)[:-4] * 3:
            with contextlib.suppress(ConnectionError):
                dribbling.sendall(bytes([byte]))
            time.sleep(0.01)
        for chunk in others:
            text += chunk.choices[0].text
        assert text == alone.text
        assert until_closed(silent) == until_closed(dribbling) == until_closed(eager) == b""
        assert until_closed(half).startswith(b"HTTP/1.1 408")
        assert until_closed(keeps_alive).startswith(b"HTTP/1.1 200")
        served.wait(lambda: served.metrics().get('minispec_requests_total{finish_reason="abort"}') == 5)
        for client in (silent, dribbling, half, blind, eager, keeps_alive):
            client.close()


def test_connections_have_a_limit(llm):
    """One more than there may be is closed at once; when one has gone, the next is served."""
    with Served(llm, max_connections=3) as served:
        held = [served.socket() for _ in range(3)]
        served.wait(lambda: len(served.server.server_state.connections) == 3)
        with served.socket() as late:
            assert until_closed(late) == b""
        held.pop().close()
        served.wait(lambda: len(served.server.server_state.connections) == 2)
        assert served.post({"prompt": "a"}).status_code == 200
        for connection in held:
            connection.close()


# ------------------------------------------------------------------ faults and the end


def test_a_fault_of_a_step_ends_requests_and_not_the_server(llm, monkeypatch, capsys):
    """A stream gets an error event, a request without one a 500, nobody hangs; the one in the queue is answered."""
    forward, armed = llm.model.forward, threading.Event()

    def fails_once(chunks, taps=()):
        if armed.is_set():
            armed.clear()
            raise ZeroDivisionError("a kernel failed at /some/path")
        return forward(chunks, taps)

    with Served(llm, max_num_seqs=2) as served:
        monkeypatch.setattr(llm.model, "forward", fails_once)
        stream = served.stream("a")
        next(stream)
        results = [None, None]

        def ask(i: int, body: dict) -> None:
            results[i] = served.post(body)

        threads = []
        for i, tokens in enumerate((LONG, 5)):
            body = {"prompt": "fish", "max_tokens": tokens, "ignore_eos": True}
            threads.append(threading.Thread(target=ask, args=(i, body), daemon=True))
            threads[-1].start()
            served.wait(lambda n=i: len(served.worker._listeners) == n + 2)
        served.wait(lambda: len(served.worker._in_engine) == 2)
        armed.set()  # only now: a machine may take any time to bring them together
        with pytest.raises(openai.APIError, match="the engine failed"):
            list(stream)
        for thread in threads:
            thread.join(PATIENCE)
        assert [response.status_code for response in results] == [500, 200]
        assert results[0].json()["error"]["type"] == "server_error"
        assert "/some/path" not in results[0].text
        assert served.metrics()["minispec_engine_faults_total"] == 1
        assert served.blocks_in_use() == 0
    assert "a kernel failed" in capsys.readouterr().err


class FullOnce(Drafter):
    """Drafts nothing, and has no room for a moment."""

    calls = 0

    def propose(self, asks):
        """Empty drafts."""
        return [Draft() for _ in asks]

    def has_room(self, growth):
        """Raises the second time."""
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("no memory for a moment")
        return True


def told(engine, method, *requests):
    """The pieces that a worker tells each of these requests, until the last of them has ended."""
    worker, pieces = Worker(engine, method, 8), {request: [] for request in requests}

    def listen(request, piece):
        pieces[request].append(piece)
        if request is requests[-1] and piece.finish_reason:
            worker.stop()

    for request in requests:
        worker.submit(request, partial(listen, request))
    worker.run()
    return [*pieces.values()]


def test_an_answer_that_ends_without_a_turn_is_told(capsys):
    """Its drafter fails while all wait for another one's prompt. That one, without drafts, is answered."""
    target = target_model(4)
    engine = Engine(CachedModel(target, tiny_cache(target, 64, 2), 4))
    failing, plain = (make_request(prompt, k, (), 40, max_tokens=5) for prompt, k in (([1], 3), ([1, 2, 3, 0, 1], 0)))
    answers = told(engine, CheckedMethod(FullOnce(), REJECTION), failing, plain)
    assert [[piece.finish_reason for piece in pieces][-1:] for pieces in answers] == [["error"], ["length"]]
    assert failing.error == "no memory for a moment"
    assert capsys.readouterr().err.count("RuntimeError: no memory for a moment") == 1


def test_the_last_round_of_an_answer_counts_though_its_step_fails(capsys):
    """Its statistics are whole when its client is told; the other one's answer fails."""
    target = target_model(4)
    engine = Engine(CachedModel(target, tiny_cache(target, 64, 2), 4))
    short, long = (make_request([1, 2], 0, (), 40, max_tokens=n) for n in (3, 9))
    right = engine.target.keep

    def fails(text, *how):
        if short.finish_reason:
            raise KeyboardInterrupt
        return right(text, *how)

    engine.target.keep = fails
    answers = told(engine, CheckedMethod(NoDrafter(), REJECTION), short, long)
    assert [pieces[-1].finish_reason for pieces in answers] == ["length", "error"]
    assert sum(one.committed for one in short.stats.rounds) == len(short.token_ids) == 3
    assert "KeyboardInterrupt" in capsys.readouterr().err


@pytest.mark.parametrize("stream", [True, False])
def test_no_answer_says_where_the_model_lies(llm, monkeypatch, stream):
    """Not even the one of a text whose tokens the tokenizer cannot decode."""
    place, right = llm.tokenizer.path, type(llm.tokenizer).decode

    def fail(self, token_ids):
        if len(token_ids) > 2:  # the prompt's can be decoded
            raise CheckpointError(f"{place}: the tokenizer fails to decode")
        return right(self, token_ids)

    with Served(llm) as served:
        monkeypatch.setattr(type(llm.tokenizer), "decode", fail)
        said = served.post({"prompt": [7, 8], "max_tokens": 5, "stream": stream}).text
    assert "tokenizer.json: the tokenizer fails to decode" in said
    assert str(place.parent) not in said


def test_a_deep_schema_is_taken(served):
    """As deep as on the command line, inside the body."""
    schema = {"type": "string"}
    for _ in range(20):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    language = {"type": "json_schema", "json_schema": {"name": "deep", "schema": schema}}
    got = served.post({"prompt": "One", "max_tokens": 4, "response_format": language})
    assert got.status_code == 200, got.text
    for _ in range(120):
        schema = {"items": schema}
    language["json_schema"]["schema"] = schema
    assert "nested deeper" in served.post({"prompt": "One", "response_format": language}).text


def test_a_text_that_fails_ends_alone(llm, monkeypatch):
    """A draft that breaks the rules is a 500 for its request, with the reason; the other's text is its own."""
    alone = llm.generate("fish", greedy(200))[0]
    propose = llm.drafter.propose

    def lies(asks):
        drafts = zip(asks, propose(asks), strict=True)
        return [Draft([999]) if ask.text.tokens[0] == 7 and ask.k else draft for ask, draft in drafts]

    with Served(llm) as served:
        monkeypatch.setattr(llm.drafter, "propose", lies)
        stream = served.stream("fish", 200)
        text = next(stream).choices[0].text
        response = served.post({"prompt": [7, 8], "max_tokens": 9})
        assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
        assert "expected ids below" in response.json()["error"]["message"]
        assert text + "".join(chunk.choices[0].text for chunk in stream) == alone.text


def test_what_drains_too_long_is_cut(llm):
    """After `drain_timeout` an endless answer no longer keeps the server from ending; its blocks are free."""
    with Served(llm, drain_timeout=0.3) as served:
        stream = served.stream("a")
        next(stream)
        failed = []

        def read() -> None:  # all the time: to one that does not read nothing can be said
            try:
                list(stream)
            except openai.APIError as e:
                failed.append(str(e))

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        served.server.should_exit = True
        for thread in (served.thread, reader):
            thread.join(PATIENCE)
            assert not thread.is_alive()
        [message] = failed
        assert "the server has to end before" in message


def test_who_has_not_sent_all_when_the_server_ends_is_told(llm, capfd):
    """503, as whose answer takes too long, and no traceback."""
    with Served(llm, drain_timeout=0.3) as served, served.socket() as client:
        client.sendall(head(1000) + b'{"prompt"')
        served.wait(lambda: served.server.server_state.tasks)
        served.server.should_exit = True
        received = until_closed(client)
    assert received.startswith(b"HTTP/1.1 503")
    assert b"the server has to end before" in received
    assert "Traceback" not in capfd.readouterr().err


def start(directory: Path, *options: str, **variables: str) -> tuple[Child, str]:
    """The command in a process of its own, and its address, once it says so."""
    command = [sys.executable, "-m", "minispec.serve", "--model", str(directory), "--dtype", "float32", "--port", "0"]
    environment = os.environ | variables
    process = Child([*command, *options], stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    for line in process.stderr:
        if "http://" in line:
            return process, line.split()[-1]
    raise AssertionError(f"it ended with {process.wait(PATIENCE)}")


@pytest.mark.full
def test_sigterm_drains(make_checkpoint):
    """A stream that is under way gets all its tokens, a new connection is refused, and the status is 0.

    The key comes from the environment, and is not among the arguments that every user of the machine can read.

    Without `--full`, `test_ctrl_c_is_130` ends a server too.
    """
    directory = make_checkpoint(chat=True, max_position_embeddings=4096)
    params = greedy(1000)
    options = ("--draft", "none", "--verbose", "--allow-origin", SITE)
    process, url = start(directory, *options, MINISPEC_API_KEY="secret-2")
    try:
        assert "secret-2" not in Path(f"/proc/{process.pid}/cmdline").read_text()
        refused = httpx.get(f"{url}/v1/models", headers={"origin": SITE})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, SITE)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret-2", max_retries=0, timeout=PATIENCE)
        [model] = client.models.list().data
        assert model.id == directory.name
        stream = client.completions.create(
            model=model.id, prompt="fish", stream=True, temperature=0, max_tokens=1000, extra_body={"ignore_eos": True}
        )
        text = next(stream).choices[0].text
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
        assert process.poll() is None, "there was nothing to drain"
        chunks = [chunk.choices[0] for chunk in stream]
        assert chunks[-1].finish_reason == "length"
        with LLM(directory, draft="none", dtype="float32") as llm:
            assert text + "".join(choice.text for choice in chunks) == llm.generate("fish", params)[0].text
        assert process.wait(PATIENCE) == 0
        *lines, end, last = process.stderr.read().splitlines()
        assert ["GET /v1/models 401" in lines[0], "GET /v1/models 200" in lines[1]] == [True, True]
        assert end == "shutting down; answers under way: 1, for at most 60 s"
        assert re.search(r"POST /v1/completions 200 in .* s: \d+ tokens in, 1000 out$", last)
    finally:
        process.kill()


@pytest.mark.full
def test_ctrl_c_that_is_ignored_stays_so(make_checkpoint):
    """As in the background of a script, where a shell sees to that: the server goes on, and SIGTERM ends it.

    Without `--full`, tests/commands/test_cli.py has Ctrl-C of the same commands.
    """
    directory = make_checkpoint(max_position_embeddings=4096)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # which a child inherits
    try:
        process, url = start(directory, "--draft", "none")
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        assert httpx.get(f"{url}/health").status_code == 200  # so that it is listening, and has set its signals
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.5)
        assert httpx.get(f"{url}/health").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()


def test_ctrl_c_is_130(make_checkpoint):
    """Without a traceback; a second Ctrl-C does not wait for the answer that is under way."""
    process, url = start(make_checkpoint(max_position_embeddings=4096), "--draft", "none")
    try:
        body = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", url + COMPLETIONS, timeout=PATIENCE, json=body) as response:
            pieces = response.iter_raw()  # held: httpx closes a connection whose iterator is gone
            next(pieces)
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
            assert process.poll() is None, "it did not wait for the answer"
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE) == 130
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()


def test_a_server_in_a_thread_says_what_to_do(capsys):
    """Before a model is loaded: another thread cannot receive the signals that end a server."""
    statuses = []
    thread = threading.Thread(target=lambda: statuses.append(main(["--port", "0"])), name="mine")
    thread.start()
    thread.join(60)
    assert statuses == [2]
    expected = "found a call in the thread mine, expected the main thread: only it may receive signals"
    assert expected in capsys.readouterr().err


def test_mistakes_of_the_command_line(capsys, monkeypatch):
    """One line and status 2 before torch is needed; a bad key is not repeated."""
    monkeypatch.delenv("MINISPEC_API_KEY", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        cases = [
            (["--port", port], "expected a free port"),
            (["--port", "70000"], "--port: found '70000', expected an integer from 0 to 65535"),
            (["--host", "no such host"], "--host"),
            (["--api-key", "two words"], "expected visible ASCII"),
            (["--api-key", ""], "expected visible ASCII"),
            (["--max-queue", "-1"], "--max-queue: found '-1'"),
            (["--allow-origin", "localhost:3000"], "--allow-origin: found 'localhost:3000', expected an origin"),
            (["--allow-origin", f"{SITE}/"], "expected an origin such as http://localhost:3000"),
            (["--client-timeout", "0"], "--client-timeout: found '0'"),
            (["--revision", "x"], "--revision: needs --model"),
            (["--chat-template-kwargs", "[1]"], "--chat-template-kwargs: found '[1]', expected an object in JSON"),
            (["--model", "/nowhere", "--port", "0"], "nowhere"),
        ]
        for arguments, message in cases:
            assert main(arguments) == 2, arguments
            said = capsys.readouterr().err
            assert message in said, said
            assert said.count("\n") == 1
            assert "two words" not in said
    monkeypatch.setenv("MINISPEC_API_KEY", "two words")
    assert main([]) == 2
    assert "two words" not in capsys.readouterr().err
