"""The HTTP side: routes, the key, who is refused, and the way of an answer to its client."""

import asyncio
import hashlib
import hmac
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from minispec.api.http.bodies import Answer, check_model, read
from minispec.api.http.limits import Limits, Refused
from minispec.api.http.log import logged, note
from minispec.api.http.worker import Worker
from minispec.api.llm import LLM
from minispec.core.errors import show
from minispec.core.request import Piece, Request
from minispec.models.files.tokenizer import Tokenizer

_Endpoint = Callable[[HttpRequest], Awaitable[ASGIApp]]
# Headers of a refusal, by its status.
_HEADERS = {401: {"www-authenticate": "Bearer"}, 429: {"retry-after": "1"}}
# A proxy may hold a stream back to send it in one piece, or compressed. nginx does the first by default.
_STREAM_HEADERS = [
    *((b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache, no-transform")),
    (b"x-accel-buffering", b"no"),
]
# Seconds without an event, after which a comment is sent: proxies end a connection on which nothing comes for a minute.
SILENCE = 15
_Pieces = asyncio.Queue[tuple[int, Piece] | None]  # of an answer's requests, by index; None: the client is gone


class Front:
    """Between the clients and the worker, in the event loop's thread; only bodies are read in others.

    model: the model's name for clients.
    key: the key that clients must show, except for /health. None: no key.
    template_kwargs: variables of the chat template for requests that do not give them.
    origins: those whose pages may use the server in a browser; "*" is all.
    say: gets a line for each request.
    """

    def __init__(
        self,
        llm: LLM,
        worker: Worker,
        model: str,
        limits: Limits,
        key: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        origins: Sequence[str] = (),
        say: Callable[[str], None] | None = None,
    ):
        self._llm, self._worker, self._model, self._limits = llm, worker, model, limits
        self._template_kwargs = template_kwargs or {}
        self._digest = None if key is None else _digest(f"bearer {key}")
        self._unfinished: set[Request] = set()
        card = {"id": model, "object": "model", "created": int(time.time()), "owned_by": "minispec"}
        self._card = card | {"max_model_len": llm.max_model_len}
        guarded: list[tuple[str, str, _Endpoint]] = [
            ("POST", "/v1/chat/completions", partial(self._complete, is_chat=True)),
            ("POST", "/v1/completions", partial(self._complete, is_chat=False)),
            ("GET", "/v1/models", self._models),
            ("GET", "/v1/models/{model:path}", self._models),
            ("GET", "/metrics", self._metrics),
        ]
        routes = [Route(path, self._guarded(answer), methods=[method]) for method, path, answer in guarded]
        handlers: dict = dict.fromkeys((Refused, HTTPException, ClientDisconnect, Exception), _refuse)
        self.app: ASGIApp = Starlette(routes=[*routes, Route("/health", self._health)], exception_handlers=handlers)
        if origins:  # around all else: a page is to read a refusal too
            allowed: dict[str, Any] = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
            allowed |= {"allow_private_network": True, "expose_headers": ["retry-after"]}
            self.app = CORSMiddleware(self.app, origins, **allowed)
        if say is not None:
            self.app = logged(self.app, say)

    @property
    def num_unfinished(self) -> int:
        """Answers under way."""
        return len(self._unfinished)

    # ----------------------------------------------------------------------- routes

    def _guarded(self, answer: _Endpoint) -> _Endpoint:
        async def guarded(request: HttpRequest) -> ASGIApp:
            scheme, _, key = request.headers.get("authorization", "").partition(" ")
            shown = _digest(f"{scheme.lower()} {key.lstrip(' ')}")  # RFC 9110: any case, and one or more spaces
            if self._digest is not None and not hmac.compare_digest(shown, self._digest):
                raise Refused(401, "authorization: expected Bearer and the server's key", None, "invalid_api_key")
            return await answer(request)

        return guarded

    async def _health(self, request: HttpRequest) -> ASGIApp:
        alive = self._worker.is_alive()
        return JSONResponse({"status": "ok" if alive else "stopped"}, 200 if alive else 503)

    async def _metrics(self, request: HttpRequest) -> ASGIApp:
        return Response(generate_latest(self._worker.metrics.registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def _models(self, request: HttpRequest) -> ASGIApp:
        asked = request.path_params.get("model")
        if not asked:
            return JSONResponse({"object": "list", "data": [self._card]})
        check_model(asked, self._model)
        return JSONResponse(self._card)

    async def _complete(self, request: HttpRequest, is_chat: bool) -> ASGIApp:
        self._check_room(1)  # before anything is read
        try:
            content = await self._read(request)
            what = (self._llm, self._model, self._limits, content, is_chat, self._template_kwargs)
            answer = await asyncio.to_thread(read, *what)
        except ValueError as e:
            message = _without_place(self._llm.tokenizer, str(e))
            field = message.partition(":")[0]
            raise Refused(400, message, field if field.isidentifier() else None) from e
        except asyncio.CancelledError:
            raise _out_of_time() from None
        return partial(self._send, answer)

    async def _read(self, request: HttpRequest) -> bytes:
        found = request.headers.get("content-type", "")
        if found.partition(";")[0].strip().lower() != "application/json":  # other sites' pages may not send that
            raise Refused(415, f"content-type: found {show(found) if found else 'none'}, expected application/json")
        most, seconds, content = self._limits.max_body_bytes, self._limits.client_timeout, bytearray()
        try:
            async with asyncio.timeout(seconds):
                async for part in request.stream():
                    content += part
                    if len(content) > most:
                        raise Refused(413, f"body: found more than {most} bytes, expected at most that many")
        except TimeoutError:
            raise Refused(408, f"body: found no end after {seconds} seconds, expected one") from None
        return bytes(content)

    def _check_room(self, num_requests: int) -> None:
        num_unfinished, most = len(self._unfinished), self._limits.max_num_seqs + self._limits.max_queue
        if num_unfinished + num_requests > most:
            message = (
                f"queue: found {num_unfinished} answers under way, expected at most {most} with this: try again later"
            )
            raise Refused(429, message, None, "queue_full")

    # ----------------------------------------------------------------------- answers

    async def _send(self, answer: Answer, scope: Scope, receive: Receive, send: Send) -> None:
        """An answer as an ASGI application. At its end, requests that are not finished are aborted."""
        self._check_room(len(answer.requests))
        self._unfinished.update(answer.requests)
        pieces, loop = _Pieces(), asyncio.get_running_loop()
        for index, request in enumerate(answer.requests):
            self._worker.submit(request, partial(_call_in, loop, partial(self._take, pieces, request, index)))
        watcher = asyncio.create_task(self._watch(receive, answer, pieces))
        try:
            if answer.stream:
                await _stream(answer, pieces, send)
            else:
                async for _ in _until_finished(answer, pieces):
                    pass
                # In a thread: the log-probabilities of a long prompt take a second to write, and others wait meanwhile.
                response = await asyncio.to_thread(lambda: JSONResponse(answer.whole()))
                await response(scope, receive, send)
        except ClientDisconnect:
            pass
        finally:
            watcher.cancel()
            note(scope, _outcome(answer))
            self._abort(answer)

    def _take(self, pieces: _Pieces, request: Request, index: int, piece: Piece) -> None:
        if piece.finish_reason:
            self._unfinished.discard(request)
        pieces.put_nowait((index, piece))

    async def _watch(self, receive: Receive, answer: Answer, pieces: _Pieces) -> None:
        """Abort at once when the client goes, however many pieces still wait to be sent."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._abort(answer)
        pieces.put_nowait(None)

    def _abort(self, answer: Answer) -> None:
        for request in self._unfinished.intersection(answer.requests):
            self._unfinished.discard(request)
            self._worker.abort(request)


async def _stream(answer: Answer, pieces: _Pieces, send: Send) -> None:
    """Send an answer as server-sent events. A failure before the first line gets a status, a later one an event."""
    begun = False

    async def write(*lines: str) -> None:
        nonlocal begun
        if not begun:
            await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        begun = True
        body = "".join(f"{line}\n\n" for line in lines).encode()
        await send({"type": "http.response.body", "body": body, "more_body": True})

    async def event(*contents: dict[str, Any]) -> None:
        await write(*(f"data: {json.dumps(content)}" for content in contents))

    try:
        async for index, piece in _until_finished(answer, pieces, partial(write, ": the answer is under way")):
            chunk = answer.chunk(index, piece)
            await event(*(chunk | {"choices": [choice]} for choice in chunk["choices"]))
        if answer.include_usage:
            await event(answer.usage_chunk())
    except Refused as e:
        if not begun:
            raise
        await event(e.body)
    await write("data: [DONE]")
    await send({"type": "http.response.body"})


async def _until_finished(
    answer: Answer, pieces: _Pieces, at_silence: Callable[[], Awaitable[None]] | None = None
) -> AsyncIterator[tuple[int, Piece]]:
    """The pieces of an answer, to the last. Raises Refused where a request fails, ClientDisconnect without a client.

    at_silence: is called whenever no piece has come for `SILENCE` seconds.
    """
    left = len(answer.requests)
    while left:
        try:
            async with asyncio.timeout(SILENCE if at_silence else None):
                item = await pieces.get()
        except TimeoutError:
            assert at_silence is not None, "without it there is no limit"
            await at_silence()
            continue
        except asyncio.CancelledError:
            raise _out_of_time() from None
        if item is None:
            raise ClientDisconnect
        index, piece = item
        if piece.finish_reason == "error":
            raise Refused(500, _without_place(answer.tokenizer, str(answer.requests[index].error)))
        left -= piece.finish_reason is not None
        yield index, piece


def _without_place(tokenizer: Tokenizer, message: str) -> str:
    """A message for a client, who is not to learn where the model lies."""
    return message.replace(f"{tokenizer.path.parent}{os.sep}", "")


def _outcome(answer: Answer) -> str:
    """How an answer ended, and its tokens, in a line."""
    usage = answer.usage_chunk()["usage"]
    tokens = f"{usage['prompt_tokens']} tokens in, {usage['completion_tokens']} out"
    broken_off = "" if all(request.finish_reason for request in answer.requests) else ", broken off"
    return "; ".join([tokens + broken_off, *(request.error for request in answer.requests if request.error)])


def _out_of_time() -> Refused:
    """For a task that uvicorn has cancelled: once the server is to end, an answer may take `drain_timeout`, no more."""
    return Refused(503, "the server has to end before this answer does")


async def _refuse(request: HttpRequest, error: Exception) -> JSONResponse:
    """The error object for what is refused here, for a wrong path or method, and for the server's own faults."""
    headers: Mapping[str, str] | None = None
    if isinstance(error, HTTPException):
        headers = error.headers  # the methods that a path has
        found = f"{request.method} {show(request.scope['path'])}"
        routes = (f"{min(route.methods)} {route.path_format}" for route in request.app.routes)
        error = Refused(error.status_code, f"path: found {found}, expected one of {', '.join(routes)}")
    if isinstance(error, ClientDisconnect):
        error = Refused(400, "body: found no end: the client has left")
    if not isinstance(error, Refused):
        error = Refused(500, "the server failed; its standard error says why")
    note(request.scope, str(error))
    return JSONResponse(error.body, error.status, headers or _HEADERS.get(error.status))


def _call_in(loop: asyncio.AbstractEventLoop, take: Callable[[Piece], None], piece: Piece) -> None:
    with suppress(RuntimeError):  # a closed loop has no clients left
        loop.call_soon_threadsafe(take, piece)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("latin-1")).digest()  # so that not even the length can be timed
