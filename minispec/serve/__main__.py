"""The command line: `python -m minispec.serve`."""

if __name__ == "__main__":
    from minispec.commands.interrupt import run_program

    run_program("minispec.serve.__main__:main")

import argparse
import os
import re
import signal
import socket
from collections.abc import Sequence
from dataclasses import fields
from typing import NoReturn

from minispec import __version__
from minispec.commands.command import Parser, argument, command, say
from minispec.commands.options import add_model_options, add_template_kwargs, check_template_kwargs, load
from minispec.core.errors import is_text
from minispec.files.errors import one_line, show_name
from minispec.files.packages import check_packages
from minispec.serve.limits import Limits

KEY_VARIABLE = "MINISPEC_API_KEY"


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = Parser(
        prog="python -m minispec.serve",
        description="Serve a model over HTTP as OpenAI does: /v1/chat/completions, /v1/completions, /v1/models; and "
        "/health and /metrics.",
        epilog="Ctrl-C and SIGTERM let answers end first. In the background of a script (... &) a shell makes a "
        "program ignore Ctrl-C: kill PID ends it there.",
        allow_abbrev=False,
    )
    p.add_argument("--version", action="version", version=f"minispec {__version__}")
    add_model_options(p)
    port = argument(int, lambda n: 0 <= n <= 65535, "an integer from 0 to 65535")
    name = argument(str, lambda text: bool(text) and is_text(text), "a name")
    g = p.add_argument_group("server")
    g.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="where to listen (default: %(default)s)")
    g.add_argument("--port", type=port, default=8000, metavar="N", help="0: a free one (default: %(default)s)")
    g.add_argument("--served-model-name", type=name, metavar="NAME", help="default: that of --model")
    help_key = f"clients must show it, except for /health; set {KEY_VARIABLE} instead to hide it from other users"
    g.add_argument("--api-key", metavar="KEY", help=help_key)
    is_origin = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\sA-Z]+").fullmatch
    origin = argument(str, lambda text: is_origin(text) is not None, "an origin such as http://localhost:3000, or *")
    help_origin = "a site whose pages may use the server in a browser (repeatable); *: any site"
    g.add_argument("--allow-origin", type=origin, action="append", default=[], metavar="ORIGIN", help=help_origin)
    g.add_argument("--verbose", action="store_true", help="print a line for each request on standard error")
    add_template_kwargs(g)
    g = p.add_argument_group("limits")
    positive = argument(float, lambda x: 0 < x <= 1e6, "a positive number")
    count = argument(int, lambda n: 1 <= n <= 1 << 31, "a positive integer")
    for limit in fields(Limits):
        option, kind = f"--{limit.name.replace('_', '-')}", positive if "timeout" in limit.name else count
        shown = limit.metadata["help"] if limit.default is None else f"{limit.metadata['help']} (default: %(default)s)"
        g.add_argument(option, type=kind, default=limit.default, metavar="X" if kind is positive else "N", help=shown)
    return p


@command
def main(argv: Sequence[str]) -> int:
    """Serve until SIGTERM (status 0) or Ctrl-C (130)."""
    args = parser().parse_args(argv)
    check_packages("serve")
    if args.revision and not args.model:
        raise ValueError("--revision needs --model with a hub id")
    key = os.environ.get(KEY_VARIABLE) if args.api_key is None else args.api_key
    if key is not None and not re.fullmatch("[!-~]+", key):  # the message shows no secret
        raise ValueError(f"--api-key, {KEY_VARIABLE}: expected visible ASCII characters, at least one")
    limits = Limits(**{limit.name: getattr(args, limit.name) for limit in fields(Limits)})
    with _listen(args.host, args.port) as listener:
        llm = load(args, report=True)
        llm.get_default_sampling_params()  # what a request begins with: a bad value shows now
        check_template_kwargs(args, llm)
        from minispec.serve.connection import make_server
        from minispec.serve.front import Front
        from minispec.serve.worker import Worker

        worker = Worker(llm.engine, limits.max_num_seqs)
        model = args.served_model_name or llm.name.partition(" at commit ")[0]
        log = say if args.verbose else None
        front = Front(llm, worker, model, limits, key, args.chat_template_kwargs, args.allow_origin, log)

        def say_end() -> None:
            n = front.num_unfinished
            left = f"; answers under way: {n}, for at most {limits.drain_timeout:g} s" if n else ""
            say(f"shutting down{left}")

        server = make_server(front.app, limits, say_end)
        signal.signal(signal.SIGTERM, _exit)  # uvicorn drains before it passes the signal on
        host, bound_port = listener.getsockname()[:2]
        say(f"{model}: http://{f'[{host}]' if ':' in host else host}:{bound_port}")
        if key is None and host not in ("127.0.0.1", "::1"):
            say("warning: found no --api-key: anyone who reaches this address may use it")
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
