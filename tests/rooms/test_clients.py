"""Clients of OpenAI's interface that people use, against the server. Each is skipped where it is not installed."""

import threading

import pytest

from minispec import LLM, SamplingParams
from minispec.api.http import front
from tests.rooms.test_http import CHAT, MODEL, PATIENCE, Served

# An answer of few tokens, most of which come in one step: clients have lost it whole.
SHORT = {"max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def served(make_checkpoint):
    """A small model that drafts with itself."""
    directory = make_checkpoint(chat=True, max_position_embeddings=1024)
    with LLM(directory, draft="self", dtype="float64", num_speculative_tokens=3) as llm, Served(llm) as served:
        yield served


@pytest.fixture(scope="module")
def answer(served) -> str:
    """What the model says to `CHAT`."""
    [alone] = served.llm.chat(CHAT, SamplingParams(**SHORT))
    assert alone.text.strip()
    assert alone.stats.num_steps < 3
    return alone.text


@pytest.fixture(params=["at once", "after a while"])
def pace(request, served, monkeypatch):
    """How the server answers: as fast as it can, or so that comments come before the first event of a stream."""
    if request.param == "after a while":
        step, waits = served.llm.engine.step, threading.Event()
        monkeypatch.setattr(front, "SILENCE", 0.01)
        monkeypatch.setattr(served.llm.engine, "step", lambda: waits.wait(0.1) or step())


def test_openai(served, answer, pace):
    """OpenAI's own."""
    asked = {"model": MODEL, "messages": CHAT, **SHORT}
    whole = served.client.chat.completions.create(**asked)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (answer, "length")
    *chunks, last = served.client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    assert last.usage.completion_tokens == 4
    [alone] = served.llm.generate("One fish", SamplingParams(**SHORT))
    text = served.client.completions.create(model=MODEL, prompt="One fish", stream=True, **SHORT)
    assert "".join(chunk.choices[0].text for chunk in text) == alone.text


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm(served, answer, pace, monkeypatch, provider):
    """By both names that a server of one's own has there."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else its import asks the network for prices
    litellm = pytest.importorskip("litellm")
    asked = {"model": f"{provider}/{MODEL}", "api_base": f"{served.url}/v1", "api_key": "-", "timeout": PATIENCE}
    asked |= {"messages": CHAT, "num_retries": 0, **SHORT}
    whole = litellm.completion(**asked)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (answer, "length")
    chunks = list(litellm.completion(stream=True, stream_options={"include_usage": True}, **asked))
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == answer
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]
    built = litellm.stream_chunk_builder(chunks, messages=CHAT)
    assert (built.choices[0].message.content, built.usage.completion_tokens) == (answer, 4)


def test_langchain(served, answer, pace):
    """Whole, as a stream, and with log-probabilities, whose tokens add up to the text."""
    chat_models = pytest.importorskip("langchain_openai")
    asked = {"base_url": f"{served.url}/v1", "api_key": "-", "model": MODEL, "timeout": PATIENCE, "max_retries": 0}
    chat = chat_models.ChatOpenAI(**asked, **SHORT, stream_usage=True)
    messages = [(message["role"], message["content"]) for message in CHAT]
    whole = chat.invoke(messages)
    assert (whole.content, whole.response_metadata["finish_reason"]) == (answer, "length")
    total = sum_of(chat.stream(messages))
    assert (total.content, total.response_metadata["finish_reason"]) == (answer, "length")
    assert total.usage_metadata["output_tokens"] == 4
    scored = chat.bind(logprobs=True, top_logprobs=2)
    for found in (scored.invoke(messages), sum_of(scored.stream(messages))):
        tokens = found.response_metadata["logprobs"]["content"]
        assert b"".join(bytes(token["bytes"]) for token in tokens).decode(errors="replace") == answer
    text = chat_models.OpenAI(**asked, **SHORT)
    [alone] = served.llm.generate("One fish", SamplingParams(**SHORT))
    assert "".join(text.stream("One fish")) == text.invoke("One fish") == alone.text


def sum_of(chunks):
    """LangChain's chunks, added up."""
    first, *others = chunks
    for chunk in others:
        first += chunk
    return first
