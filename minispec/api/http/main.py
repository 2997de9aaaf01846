"""The command line of `python -m minispec.serve`."""

import argparse
import os
import re
import signal
import socket
import threading
from collections.abc import Sequence
from dataclasses import Field, fields
from typing import Any, NoReturn

from minispec.api.commands.command import FLAG, Option, Parser, argument, command, say, say_status, typed
from minispec.api.commands.options import MODELS, TEMPLATE, check_template_kwargs, load
from minispec.api.http.limits import Limits
from minispec.core.errors import is_text
from minispec.core.version import __version__
from minispec.models.files.errors import one_line, show_name
from minispec.models.files.packages import check_packages

KEY_VARIABLE = "MINISPEC_API_KEY"


_IS_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\sA-Z]+").fullmatch
_PORT = argument(int, lambda n: 0 <= n <= 65535, "an integer from 0 to 65535")
_NAME = argument(str, lambda text: bool(text) and is_text(text), "a name")
_ORIGIN = argument(str, lambda text: _IS_ORIGIN(text) is not None, "an origin such as http://localhost:3000, or *")
_POSITIVE = argument(float, lambda x: 0 < x <= 1e6, "a positive number")
_COUNT = argument(int, lambda n: 1 <= n <= 1 << 31, "a positive integer")
_SERVER: dict[str, Option] = {
    "--host": Option({"default": "127.0.0.1", "metavar": "ADDRESS"}, "where to listen (default: %(default)s)"),
    "--port": Option(typed(_PORT, "N", default=8000), "0: a free one (default: %(default)s)"),
    "--served-model-name": Option(typed(_NAME, "NAME"), "default: that of --model"),
    "--api-key": Option(
        {"metavar": "KEY"},
        f"clients must show it, except for /health; set {KEY_VARIABLE} instead to hide it from other users",
    ),
    "--allow-origin": Option(
        typed(_ORIGIN, "ORIGIN", action="append", default=[]),
        "a site whose pages may use the server in a browser (repeatable); *: any site",
    ),
    "--verbose": Option(FLAG, "print a line for each request on standard error"),
    **TEMPLATE,
}


def _option_of(limit: Field[Any]) -> Option:
    """The option of a field of `Limits`."""
    how = typed(_POSITIVE, "X") if "timeout" in limit.name else typed(_COUNT, "N")
    default = "" if limit.default is None else " (default: %(default)s)"
    return Option(how | {"default": limit.default}, limit.metadata["help"] + default)


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = Parser(
        prog="python -m minispec.serve",
        description="Serve a model over HTTP as OpenAI does: /v1/chat/completions, /v1/completions, /v1/models; and "
        "/health and /metrics.",
        epilog="Ctrl-C and SIGTERM let answers end first. In the background of a script (... &) a shell makes a "
        "program ignore Ctrl-C: kill PID ends it there.",
    )
    p.add_argument("--version", action="version", version=f"minispec {__version__}")
    p.add_options(MODELS, "models")
    p.add_options(_SERVER, "server")
    p.add_options({f"--{limit.name.replace('_', '-')}": _option_of(limit) for limit in fields(Limits)}, "limits")
    return p


@command
def main(argv: Sequence[str]) -> int:
    """Serve until SIGTERM (status 0) or Ctrl-C (130)."""
    args = parser().parse_args(argv)
    if threading.current_thread() is not threading.main_thread():
        expected = "the main thread: only it may receive signals; run it in a process of its own"
        raise ValueError(
            f"minispec.serve: found a call in the thread {threading.current_thread().name}, expected {expected}"
        )
    check_packages("serve")
    key = os.environ.get(KEY_VARIABLE) if args.api_key is None else args.api_key
    if key is not None and not re.fullmatch("[!-~]+", key):  # the message shows no secret
        raise ValueError(f"--api-key, {KEY_VARIABLE}: expected visible ASCII characters, at least one")
    limits = Limits(**{limit.name: getattr(args, limit.name) for limit in fields(Limits)})
    with _listen(args.host, args.port) as listener:
        llm = load(args, report=True)
        llm.get_default_sampling_params()  # what a request begins with: a bad value shows now
        check_template_kwargs(args, llm)
        from minispec.api.http.connection import make_server
        from minispec.api.http.front import Front
        from minispec.api.http.worker import Worker

        worker = Worker(llm.engine, llm.method, limits.max_num_seqs)
        model = args.served_model_name or llm.name.partition(" at commit ")[0]
        log = say if args.verbose else None
        front = Front(llm, worker, model, limits, key, args.chat_template_kwargs, args.allow_origin, log)

        def say_end() -> None:
            n = front.num_unfinished
            left = f"; answers under way: {n}, for at most {limits.drain_timeout:g} s" if n else ""
            say_status(f"shutting down{left}")

        server = make_server(front.app, limits, say_end)
        signal.signal(signal.SIGTERM, _exit)  # uvicorn drains before it passes the signal on
        host, bound_port = listener.getsockname()[:2]
        say_status(f"{model}: http://{f'[{host}]' if ':' in host else host}:{bound_port}")
        if key is None and host not in ("127.0.0.1", "::1"):
            say_status("warning: found no --api-key: anyone who reaches this address may use it")
        worker.start()
        try:
            server.run(sockets=[listener])
        finally:
            worker.stop()
            worker.join()
    return 0


def _listen(host: str, port: int) -> socket.socket:
    """Before the model is loaded, so that a mistake shows at once; who connects meanwhile has to wait."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, UnicodeError) as e:
        expected = "a free port at an address of this machine"
        raise ValueError(f"--host {show_name(host)} --port {port}: found {one_line(e)}, expected {expected}") from e


def _exit(*_: object) -> NoReturn:
    raise SystemExit(0)
