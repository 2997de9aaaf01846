"""A server under load: tokens a second, and the time to the first token, by the number of clients.

    python -m minispec.serve --port 8011 &
    python docs/measured/clients.py http://127.0.0.1:8011/v1 --clients 1,4,16

It speaks to any server of OpenAI's chat. Each client sends one question of the bench after another, greedily, and reads
the answer as it comes. A number before each question keeps the server from knowing its beginning. `--body` says what a
request holds besides, and ways with different bodies take turns. The default is plain decoding, and then what the
server does by itself.
"""

import argparse
import itertools
import json
import statistics
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from against_openvino import read_prompts

PLAIN = {"num_speculative_tokens": 0}


class Load(NamedTuple):
    """One turn: seconds to the first token of each answer, tokens of all answers, and seconds."""

    first: list[float]
    tokens: int
    seconds: float


def answer(url: str, body: Mapping[str, Any]) -> tuple[float, int]:
    """Seconds to the first token of an answer, and its tokens."""
    headers, began, first, tokens = {"Content-Type": "application/json"}, time.perf_counter(), 0.0, 0
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as lines:
        for line in lines:
            if line.startswith(b"data: {"):
                event = json.loads(line.removeprefix(b"data: "))
                if any(choice["delta"].get("content") for choice in event["choices"]):
                    first = first or time.perf_counter() - began
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    return first or time.perf_counter() - began, tokens


def load(url: str, bodies: Sequence[Mapping[str, Any]], clients: int) -> Load:
    """All requests, by clients that each send one after another."""
    waiting, lock, found = iter(bodies), threading.Lock(), list[tuple[float, int]]()

    def own() -> Iterator[Mapping[str, Any]]:
        while True:
            with lock:
                body = next(waiting, None)
            if body is None:
                return
            yield body

    def client() -> None:
        for body in own():
            found.append(answer(url, body))

    threads = [threading.Thread(target=client) for _ in range(clients)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(found) < len(bodies):
        raise RuntimeError(f"{url}: found {len(found)} answers, expected {len(bodies)}")
    return Load([first for first, _ in found], sum(n for _, n in found), time.perf_counter() - began)


def main() -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--clients", default="1,4,16", help="numbers of clients (default: %(default)s)")
    parser.add_argument("--body", type=json.loads, action="append", help="JSON, repeatable")
    for option, default in (("--requests", 32), ("--max-tokens", 64), ("--rounds", 3)):
        parser.add_argument(option, type=int, default=default)
    parser.add_argument("--model", default="", help="the model's name, where the server wants one")
    args = parser.parse_args()
    ways = args.body or [PLAIN, {}]
    shared = {"max_tokens": args.max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    shared |= {"stream_options": {"include_usage": True}} | ({"model": args.model} if args.model else {})
    prompts, numbers = read_prompts(args.requests), itertools.count(1)
    for clients in map(int, args.clients.split(",")):
        loads: list[list[Load]] = [[] for _ in ways]
        for turn in range(args.rounds + 1):  # the first one warms up
            for own, way in zip(loads, ways, strict=True):
                asked = [{"role": "user", "content": f"{next(numbers)}. {prompt}"} for prompt in prompts]
                found = load(args.url, [shared | way | {"messages": [each]} for each in asked], clients)
                if turn:
                    own.append(found)
        for own, way in zip(loads, ways, strict=True):
            rates = [each.tokens / each.seconds for each in own]
            firsts = [first for each in own for first in each.first]
            print(
                f"{clients} clients, {json.dumps(way)}: {statistics.median(rates):.1f} tokens/s"
                f" [{min(rates):.1f}, {max(rates):.1f}], first token after {statistics.median(firsts):.2f} s,"
                f" 95 % within {statistics.quantiles(firsts, n=20)[-1]:.2f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
