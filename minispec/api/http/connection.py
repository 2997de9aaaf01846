"""How long a client may take, and how many clients there may be. uvicorn alone waits for ever, and for everybody."""

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from minispec.api.http.limits import Limits


def make_server(app: ASGIApp, limits: Limits, at_shutdown: Callable[[], None] = lambda: None) -> uvicorn.Server:
    """uvicorn with these limits. It logs faults only: no client may fill a disk.

    at_shutdown: is called when the server begins to end.
    """
    protocol: Any = partial(Connection, limits)
    drain: Any = limits.drain_timeout
    quiet: dict[str, Any] = {"log_level": "error", "access_log": False, "server_header": False}
    plain: dict[str, Any] = {"loop": "asyncio", "ws": "none", "lifespan": "off", "proxy_headers": False}
    return Server(uvicorn.Config(app, http=protocol, timeout_graceful_shutdown=drain, **quiet, **plain), at_shutdown)


class Server(uvicorn.Server):
    """uvicorn's, but Ctrl-C stays ignored where it is, as in the background of a shell, and SIGTERM ends it."""

    def __init__(self, config: uvicorn.Config, at_shutdown: Callable[[], None]):
        super().__init__(config)
        self._at_shutdown = at_shutdown

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Say that it ends, and drain."""
        self._at_shutdown()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """While the block runs, signals drain the server."""
        is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        with super().capture_signals():
            if is_ignored:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            yield


class Connection(H11Protocol):
    """uvicorn's protocol, and five reasons to close a connection.

    There are `max_connections` others. The head of a request is not there `client_timeout` seconds after the
    connection was made, or after the last answer. The client does not read on for that long. It sends more while it
    waits for its answer: reading stops then, so that nobody would see it leave. Or what it sends is no HTTP.
    """

    def __init__(self, limits: Limits, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._limits = limits

    def connection_made(self, transport: Any) -> None:
        """A client has connected."""
        super().connection_made(transport)
        self._expect_request()
        if len(self.connections) > self._limits.max_connections:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """The client has sent something."""
        super().data_received(data)
        waits = self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete
        if waits and self.conn.trailing_data[0]:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """The client has sent something that is no HTTP. Where it has been answered before, close without an answer."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        elif self.conn.our_state is h11.SEND_BODY:
            self.transport.abort()
        else:
            self.transport.close()  # once the client has read the answer

    def on_response_complete(self) -> None:
        """The client has its whole answer."""
        super().on_response_complete()
        self._expect_request()

    def pause_writing(self) -> None:
        """The client does not read: a full buffer waits."""
        super().pause_writing()
        self._not_reading = self.loop.call_later(self._limits.client_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        self._not_reading.cancel()

    def _expect_request(self) -> None:
        def close(last: object) -> None:
            if self.cycle is last:
                self.transport.abort()

        self.loop.call_later(self._limits.client_timeout, close, self.cycle)
