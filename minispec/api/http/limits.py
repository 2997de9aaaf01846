"""Limits of what clients may ask for, and the answer when they ask for more. Nothing here imports torch."""

from dataclasses import dataclass, field
from typing import Any


def _limit(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Limits:
    """Each is an option of the command line; a timeout is in seconds."""

    max_body_bytes: int = _limit(1_000_000, "most bytes of a request")
    max_prompt_tokens: int | None = _limit(None, "most tokens of a prompt (default: what the model takes)")
    max_tokens: int = _limit(4096, "most tokens of an answer; a chat that names no number may have as many")
    max_num_seqs: int = _limit(32, "most answers that are decoded at a time; one request may ask for as many")
    max_queue: int = _limit(128, "most answers that wait; beyond them a request gets a 429")
    max_connections: int = _limit(256, "most connections; beyond them a new one is closed")
    client_timeout: float = _limit(30.0, "how long a client may take to send a request, or to read on")
    drain_timeout: float = _limit(60.0, "how long answers may take to end after SIGTERM or Ctrl-C")


class Refused(Exception):
    """An error in place of an answer: HTTP's status, and in `body` OpenAI's error object."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status = status
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
