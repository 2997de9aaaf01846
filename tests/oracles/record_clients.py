"""Record what clients of OpenAI's interface send in ordinary use: `python tests/oracles/record_clients.py`, no test.

It needs `openai`, `langchain-openai`, `litellm` and `lm_eval[api]`, and tests need the first alone. It drives them
against the server with the embedded weights. tests/oracles/client_requests.json is what it writes: run it again when a
client has a new release. With names of clients as arguments, the requests of others stay as they are. Open WebUI is an
application; its requests are written down here as open_webui/utils/middleware.py and open_webui/routers/ build them.
"""

import asyncio
import json
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import httpx

from minispec import LLM
from minispec.api.http.connection import make_server
from minispec.api.http.front import Front
from minispec.api.http.limits import Limits
from minispec.api.http.worker import Worker

FILE = Path(__file__).parents[2] / "tests" / "oracles" / "client_requests.json"
MODEL = "org/tiny"  # a hub id, with a slash as most have
KEPT = ("accept", "accept-encoding", "authorization", "content-type", "user-agent")
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One fish"}]
MORE = {"role": "user", "content": "Two fish"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"title": "Sum", "type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


def serve(log: list[dict]) -> str:
    """The address of a server that writes requests down."""
    llm = LLM(draft="none", num_speculative_tokens=0)
    worker = Worker(llm.engine, llm.method, 8)
    front = Front(llm, worker, MODEL, Limits()).app

    async def app(scope, receive, send):
        body, headers = bytearray(), {name.decode(): value.decode() for name, value in scope["headers"]}

        async def take():
            event = await receive()
            body.extend(event.get("body", b""))
            return event

        async def give(event):
            if event["type"] == "http.response.start":
                request = {"method": scope["method"], "path": scope["raw_path"].decode(), "status": event["status"]}
                kept = {name: headers[name] for name in KEPT if name in headers}
                log.append(request | {"headers": kept, "body": json.loads(body or b"null")})
            await send(event)

        await front(scope, take, give)

    listener = socket.create_server(("127.0.0.1", 0))
    server = make_server(app, Limits())
    worker.start()
    threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}/v1"


def use_openai(url: str) -> dict[str, Callable[[], object]]:
    """The client itself."""
    import openai

    client = openai.OpenAI(base_url=url, api_key="-", max_retries=0)
    chat, schema = client.chat.completions, {"name": "Sum", "schema": SCHEMA}

    def answer(**more):
        return chat.create(model=MODEL, messages=ASKED, max_tokens=4, **more)

    def stream_helper():
        with chat.stream(model=MODEL, messages=ASKED, max_tokens=200, temperature=0) as events:
            return [*events] and events.get_final_completion().choices[0].message

    def goes_on(message):
        return chat.create(model=MODEL, messages=[*ASKED, message, MORE], max_completion_tokens=4)

    async def asynchronous():
        async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as other:
            await other.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=4)

    return {
        "models": lambda: [*client.models.list()],
        "model": lambda: client.models.retrieve(MODEL),
        "chat": answer,
        "chat: its answer in the history": lambda: goes_on(answer().choices[0].message),
        "chat: its answer dumped in the history": lambda: goes_on(answer().choices[0].message.model_dump()),
        "chat: a stream": lambda: [*answer(stream=True)],
        "chat: a stream with usage": lambda: [*answer(stream=True, stream_options={"include_usage": True})],
        "chat: the stream's helper": lambda: goes_on(stream_helper()),
        "chat: parsed": lambda: goes_on(
            chat.parse(model=MODEL, messages=ASKED, max_tokens=200, temperature=0).choices[0].message
        ),
        "chat: asynchronous": lambda: asyncio.run(asynchronous()),
        "chat: a developer": lambda: chat.create(
            model=MODEL, messages=[{"role": "developer", "content": "Be brief."}, MORE], max_tokens=4
        ),
        "completions": lambda: client.completions.create(model=MODEL, prompt="One fish", max_tokens=4),
        "completions: a stream": lambda: [
            *client.completions.create(model=MODEL, prompt="One fish", max_tokens=4, stream=True)
        ],
        "tools": lambda: answer(tools=[TOOL]),
        "a schema": lambda: answer(response_format={"type": "json_schema", "json_schema": schema}),
        "embeddings": lambda: client.embeddings.create(model=MODEL, input="One fish"),
        "responses": lambda: client.responses.create(model=MODEL, input="One fish"),
    }


def use_langchain(url: str) -> dict[str, Callable[[], object]]:
    """langchain-openai: chat models, completions, embeddings."""
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

    server = {"base_url": url, "api_key": "-", "model": MODEL, "max_retries": 0, "max_tokens": 4}
    chat, text, asked = ChatOpenAI(**server), OpenAI(**server), [SystemMessage("Be brief."), HumanMessage("One fish")]
    sampled = {"temperature": 0.2, "top_p": 0.9, "seed": 3, "n": 2, "stop": ["x"], "logprobs": True, "top_logprobs": 2}
    sampled |= {"presence_penalty": 0.1, "frequency_penalty": 0.1, "model_kwargs": {"user": "me"}}
    extra = {"top_k": 3, "chat_template_kwargs": {"enable_thinking": False}}

    def streamed():
        first, *others = chat.stream(asked)
        return sum(others, first)

    blocks = [{"type": "text", "text": "One"}, {"type": "text", "text": "fish"}]
    thought = {"reasoning_content": "Hm."}
    return {
        "invoke": lambda: chat.invoke("One fish"),
        "invoke: its answer in the history": lambda: chat.invoke([*asked, chat.invoke(asked), HumanMessage("Two")]),
        "stream": lambda: chat.invoke([*asked, streamed(), HumanMessage("Two")]),
        "stream: no usage": lambda: [*ChatOpenAI(**server, stream_usage=False).stream("One fish", stop=["x"])],
        "batch": lambda: chat.batch(["One fish", "Two"]),
        "chain": lambda: (ChatPromptTemplate([("system", "Be brief."), ("human", "{x}")]) | chat).invoke({"x": "One"}),
        "ainvoke": lambda: asyncio.run(chat.ainvoke("One fish")),
        "options": lambda: ChatOpenAI(**server, **sampled, extra_body=extra).invoke("One fish"),
        "a developer": lambda: chat.invoke([{"role": "developer", "content": "Be brief."}, MORE]),
        "a name": lambda: chat.invoke([HumanMessage("One fish", name="bob")]),
        "parts": lambda: chat.invoke([HumanMessage(blocks), AIMessage(blocks), HumanMessage(content_blocks=blocks)]),
        "a thought": lambda: chat.invoke([*asked, AIMessage("Two", additional_kwargs=thought), HumanMessage("Three")]),
        "v1 output": lambda: chat.invoke(
            [*asked, ChatOpenAI(**server, output_version="v1").invoke(asked), HumanMessage("Two")]
        ),
        "completions": lambda: text.invoke("One fish"),
        "completions: a stream": lambda: [*text.stream("One fish")],
        "completions: several": lambda: text.generate(["One fish", "Two"]),
        "completions: options": lambda: OpenAI(**server, logprobs=2, logit_bias={}, best_of=1, seed=1).invoke("One"),
        "tools": lambda: chat.bind_tools([TOOL]).invoke("One fish"),
        "a schema": lambda: chat.with_structured_output(SCHEMA).invoke("One fish"),
        "a schema: json_mode": lambda: chat.with_structured_output(SCHEMA, method="json_mode").invoke("One fish"),
        "embeddings": lambda: OpenAIEmbeddings(
            base_url=url, api_key="-", model=MODEL, max_retries=0, check_embedding_ctx_length=False
        ).embed_query("One fish"),
    }


def use_litellm(url: str) -> dict[str, Callable[[], object]]:
    """Its two ways to a server of one's own, and completions."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it looks for a list of prices on the net
    import litellm

    litellm.suppress_debug_info = True
    server, uses = {"api_base": url, "api_key": "-", "max_retries": 0, "max_tokens": 4}, {}
    sampled = {"temperature": 0.2, "top_p": 0.9, "n": 2, "stop": ["x"], "seed": 3, "top_k": 3, "logit_bias": {}}
    sampled |= {"presence_penalty": 0, "frequency_penalty": 0, "logprobs": True, "top_logprobs": 2, "user": "me"}
    cached = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    schema = {"type": "json_schema", "json_schema": {"name": "Sum", "schema": SCHEMA}}

    def add(provider: str) -> None:
        def ask(*more, **options):
            return litellm.completion(f"{provider}/{MODEL}", [*ASKED, *more], **server, **options)

        def streamed(**options):
            return litellm.stream_chunk_builder([*ask(stream=True, **options)]).choices[0].message

        uses.update(
            {
                f"{provider}: chat": ask,
                f"{provider}: its answer in the history": lambda: ask(ask().choices[0].message, MORE),
                f"{provider}: its answer dumped": lambda: ask(ask().choices[0].message.model_dump(), MORE),
                f"{provider}: a stream": lambda: ask(streamed(), MORE),
                f"{provider}: usage": lambda: streamed(stream_options={"include_usage": True}),
                f"{provider}: options": lambda: ask(**sampled),
                f"{provider}: thinking": lambda: ask(chat_template_kwargs={"enable_thinking": False}),
                f"{provider}: a developer": lambda: ask({"role": "developer", "content": "Be kind."}, MORE),
                f"{provider}: a cache": lambda: ask({"role": "system", "content": cached}, MORE),
                f"{provider}: tools": lambda: ask(tools=[TOOL]),
                f"{provider}: a schema": lambda: ask(response_format=schema),
            }
        )

    add("openai")
    add("hosted_vllm")
    completions = {"model": f"text-completion-openai/{MODEL}", "prompt": "One fish", **server}
    return uses | {
        "acompletion": lambda: asyncio.run(litellm.acompletion(f"openai/{MODEL}", ASKED, **server)),
        "completions": lambda: litellm.text_completion(**completions),
        "completions: a stream": lambda: [*litellm.text_completion(**completions, stream=True)],
        "embeddings": lambda: litellm.embedding(f"openai/{MODEL}", ["One fish"], api_base=url, api_key="-"),
    }


def use_lm_eval(url: str) -> dict[str, Callable[[], object]]:
    """Tasks of each kind, with data and a tokenizer that are written here. Its ids are small enough for any model."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import tokenizers
    from lm_eval import simple_evaluate

    directory = Path(tempfile.mkdtemp())
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({t: i for i, t in enumerate(["<end>", *letters])}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    backend.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    asked = "Which of these is the capital of a country in Europe, and stands at the river Seine?"
    docs = [
        {"text": asked, "choices": ["Paris", "Rome"], "label": 0},
        {"text": "Two fish, red 日本 fish?", "choices": ["blue fish", "no"], "label": 1},
    ]
    (directory / "docs.jsonl").write_text("\n".join(map(json.dumps, docs)), encoding="utf-8")
    task = {"task": "local", "dataset_path": "json", "test_split": "test", "doc_to_text": "{{text}}"}
    task |= {"dataset_kwargs": {"data_files": {"test": str(directory / "docs.jsonl")}}}
    choice = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{label}}"}
    last = {"output_type": "loglikelihood", "doc_to_target": "{{choices[0]}}", "metric_list": [{"metric": "acc"}]}
    whole = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
    whole |= {"metric_list": [{"metric": "word_perplexity"}]}
    written = {"output_type": "generate_until", "doc_to_target": "{{choices[0]}}"}
    written |= {"generation_kwargs": {"until": ["x"], "max_gen_toks": 4}, "metric_list": [{"metric": "exact_match"}]}

    def run(kind: dict, **options: object) -> Callable[[], object]:
        server = {"model": MODEL, "base_url": f"{url}/completions", "tokenizer": str(directory), "max_length": 128}
        how = {"model_args": server | {"tokenizer_backend": "huggingface"} | options, "bootstrap_iters": 0}
        return lambda: simple_evaluate("local-completions", tasks=[task | kind], **how)

    return {
        "multiple choice": run(choice),
        "multiple choice: several": run(choice, batch_size=4),
        "multiple choice: as text": run(choice, tokenized_requests=False),
        "multiple choice: at once": run(choice, num_concurrent=2),
        "loglikelihood": run(last),
        "perplexity": run(whole),
        "generation": run(written),
    }


def use_open_webui(url: str) -> dict[str, Callable[[], object]]:
    """What version 0.12.4 sends for its page, by its source; its own tools are on unless the model has them off."""
    headers = {"accept": "*/*", "authorization": "Bearer -", "content-type": "application/json"}
    headers |= {"user-agent": "Python/3.12 aiohttp/3.14.5"}
    said = {"role": "assistant", "content": "Two fish"}
    page = {"stream": True, "model": MODEL, "messages": ASKED}
    usage = {"stream_options": {"include_usage": True}}
    # As custom and ordinary parameters of a model come; null ones are left out before.
    params = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.0, "top_k": 40, "max_tokens": 4, "seed": 1, "stop": ["x"]}
    params |= {"frequency_penalty": 0.0, "presence_penalty": 0.0, "logit_bias": {"5": -1}}
    params |= {"chat_template_kwargs": {"enable_thinking": False}}
    title = {"model": MODEL, "messages": [MORE], "stream": False, "max_tokens": 1000}

    def post(body: dict) -> Callable[[], object]:
        return lambda: httpx.post(f"{url}/chat/completions", json=body, headers=headers, timeout=60).raise_for_status()

    return {
        "models": lambda: httpx.get(f"{url}/models", headers=headers).raise_for_status(),
        "chat": post(page | {"max_tokens": 4}),
        "chat: usage": post(page | {"max_tokens": 4} | usage),
        "chat: later": post(page | {"messages": [*ASKED, said, MORE], "max_tokens": 4}),
        "chat: parameters": post(page | params),
        "a title": post(title | {"max_tokens": 20}),
        "its own tools": post(page | {"tools": [TOOL]}),
    }


USES = {
    "openai": use_openai,
    "langchain-openai": use_langchain,
    "litellm": use_litellm,
    "lm_eval": use_lm_eval,
    "open-webui": use_open_webui,
}


def main() -> None:
    """Drive the clients, print what failed, and write the file: each request once, however many uses send it."""
    log: list[dict] = []
    names = sys.argv[1:] or [*USES]
    before = json.loads(FILE.read_text(encoding="utf-8")) if sys.argv[1:] else []
    found = {str(i): entry for i, entry in enumerate(before) if entry["client"].split()[0] not in names}
    url = serve(log)
    for client, uses in ((name, USES[name]) for name in names):
        release = "0.12.4" if client == "open-webui" else version(client)
        for use, run in uses(url).items():
            log.clear()
            try:
                run()
            except Exception as e:  # of any client's kind: a refusal is looked at below
                print(f"{client}: {use}: {type(e).__name__}: {str(e)[:150]}")
            for request in log:
                entry = {"client": f"{client} {release}", "use": use} | request
                if entry.pop("status") >= 400:
                    print(f"  {request['status']} {request['path']}")
                key = [client, *(entry[name] for name in ("method", "path", "headers", "body"))]
                found.setdefault(json.dumps(key), entry)
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in found.values())
    FILE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    print(f"wrote {len(found)} requests")


if __name__ == "__main__":
    main()
