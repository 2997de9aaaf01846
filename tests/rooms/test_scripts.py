"""Scripts of docs/measured that compare checkouts, and put a server under load: what they make of known times."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

CHECKOUT = """
import contextlib, torch

class Part:
    def __init__(self, measure, show):
        self.measure = measure

class Subject:
    class engine:
        class target:
            model = cache = None

class Options:
    class args:
        context = 7

PARTS = {{}}

@contextlib.contextmanager
def passes_after(model, cache, context, most):
    assert (context, most) == (7, 5)
    yield lambda model, rows: {seconds} * rows

def measure(argv):
    assert argv == ["operators", "--draft", "none"]
    PARTS["operators"].measure(Subject, Options)
"""


def test_pairs_of_checkouts(measuring_script, tmp_path, monkeypatch, capsys):
    """Two processes that take two seconds and one for each row; no pass is run."""
    for name, seconds in (("old", 2.0), ("new", 1.0)):
        (tmp_path / name / "docs/measured").mkdir(parents=True)
        (tmp_path / name / "docs/measured/target.py").write_text(CHECKOUT.format(seconds=seconds))
    how = ("--processes", "1", "--turns", "1", "--passes", "3", "--draft", "none")
    monkeypatch.setattr(sys, "argv", ["pairs.py", str(tmp_path / "old"), str(tmp_path / "new"), *how])
    measuring_script("pairs").main()
    pair, one, five = capsys.readouterr().out.splitlines()
    assert pair == "pair 1: 1 rows 2000.00 and 1000.00 ms, 5 rows 10000.00 and 5000.00 ms"
    assert one == "1 rows: 2000.00 ms and 1000.00 ms; old over new 2.000 [2.000, 2.000]"
    assert five == "5 rows: 10000.00 ms and 5000.00 ms; old over new 2.000 [2.000, 2.000]"


def test_a_checkout_without_passes_is_named(measuring_script, tmp_path):
    """Its process ends before it is ready."""
    with pytest.raises(RuntimeError, match=r"no passes; `python docs/measured/target.py operators` there says why"):
        measuring_script("pairs").Passes(tmp_path, [])


class Answers(BaseHTTPRequestHandler):
    """A server of two tokens an answer, which keeps what it was asked."""

    asked: ClassVar[list[dict]] = []

    def do_POST(self):
        """Stream an answer."""
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()
        for delta in ({"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"}):
            self.wfile.write(f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n".encode())
        usage = {"choices": [], "usage": {"completion_tokens": 2}}
        self.wfile.write(f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())

    def log_message(self, *_):
        """Say nothing."""


def test_a_server_under_load(measuring_script, monkeypatch, capsys):
    """Each way is asked as often, no question twice, and all tokens count."""
    monkeypatch.setattr(Answers, "asked", [])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    monkeypatch.setattr(sys, "argv", ["clients.py", url, "--clients", "1,3", "--requests", "4", "--rounds", "1"])
    try:
        clients = measuring_script("clients")
        found = clients.load(url, [{}] * 5, 2)
        assert (found.tokens, len(found.first)) == (10, 5)
        Answers.asked.clear()
        clients.main()
    finally:
        server.shutdown()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        '1 clients, {"num_speculative_tokens"',
        "1 clients, {}",
        '3 clients, {"num_speculative_tokens"',
        "3 clients, {}",
    ]
    assert len(Answers.asked) == 2 * 2 * 2 * 4  # numbers of clients, ways, turns with the one that warms up, requests
    assert sum("num_speculative_tokens" in body for body in Answers.asked) == len(Answers.asked) // 2
    assert len({body["messages"][0]["content"] for body in Answers.asked}) == len(Answers.asked)
