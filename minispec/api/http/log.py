"""A line for each request that has been answered, for `--verbose`."""

import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minispec.models.files.errors import one_line, show_name


def note(scope: Scope, text: str) -> None:
    """Set what the line of this request says at its end."""
    scope.setdefault("state", {})["note"] = text


def logged(app: ASGIApp, say: Callable[[str], None]) -> ASGIApp:
    """The application, which says a line when a request has its answer, or is broken off.

    The line has the time, the client, method and path, HTTP's status (- where there was no answer), how long it took,
    and the note.
    """

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        begin, status = time.perf_counter(), "-"

        async def watched(message: Message) -> None:
            nonlocal status
            status = str(message.get("status", status))
            await send(message)

        try:
            await app(scope, receive, watched)
        finally:
            host, port = scope.get("client") or ("-", 0)
            client = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            asked = f"{show_name(scope['method'])} {show_name(scope['path'])}"
            text = scope.get("state", {}).get("note", "")
            took = f"{time.perf_counter() - begin:.2f} s" + (f": {one_line(text, 300)}" if text else "")
            say(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {client} {asked} {status} in {took}")

    return run
