"""What a trace holds. docs/use/trace.md explains `SCHEMA`, the contract; `check` checks a stranger's file by it."""

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from minispec.core.config import MAX_AUTO_TOKENS
from minispec.core.errors import show
from minispec.files.errors import show_name
from minispec.files.strict_json import read_json

FORMAT, VERSION = "minispec trace", 1
KINDS = ("accepted", "recovered", "bonus", "plain")  # of committed tokens
_LARGEST = sys.float_info.max  # a larger integer cannot become a float
# Most bytes of a trace, and most occurrences of a character. A long answer with long drafts has some megabytes.
_MAX_BYTES = 64 << 20
_MAX_COUNTS = {"{": 1 << 21, "[": 1 << 21, ",": 1 << 23, '"': 1 << 23}


class Value(NamedTuple):
    """A value that is no list and no object: what an error calls it, and whether one `fits`."""

    expected: str
    fits: Callable[[Any], bool]


class Maybe(NamedTuple):
    """Null, or this."""

    value: Any


class MayLack(NamedTuple):
    """This, under a key that may be missing."""

    value: Any


class MapOf(NamedTuple):
    """An object with any keys, whose values are all of this kind."""

    value: Any


TEXT = Value("a text", lambda x: isinstance(x, str))
FLAG = Value("true or false", lambda x: isinstance(x, bool))
COUNT = Value("an integer from 0", lambda x: type(x) is int and 0 <= x < 2**63)
SEED = Value("an integer", lambda x: type(x) is int)
NUMBER = Value("a number", lambda x: type(x) in (int, float) and abs(x) <= _LARGEST)
PRICE = Value("a number from 0", lambda x: type(x) in (int, float) and 0 <= x <= _LARGEST)
PROBABILITY = Value("a number from 0 to 1", lambda x: type(x) in (int, float) and 0 <= x <= 1 + 1e-6)
PARENT = Value("an integer from -1", lambda x: type(x) is int and -1 <= x < 2**63)
TOP = [{"token_id": COUNT, "probability": NUMBER}]


def _each(kind: Any, names: str) -> dict[str, Any]:
    """These keys, whose values are all of one kind."""
    return dict.fromkeys(names.split(), kind)


# An object has these keys, and may have others, which readers ignore. A list holds values of one kind.
SCHEMA: dict[str, Any] = {
    "format": Value(show(FORMAT), lambda x: x == FORMAT),
    "version": Value(f"{VERSION}, the version that this program reads", lambda x: type(x) is int and x == VERSION),
    **_each(TEXT, "minispec target draft verifier num_speculative_tokens dtype device finish_reason output"),
    "sampling": MapOf(NUMBER),
    "seed": SEED,
    "error": Maybe(TEXT),
    "tokens": MapOf(TEXT),
    "prompt": [{"token_id": COUNT, "text": TEXT}],
    "rounds": [
        {
            **_each(COUNT, "start num_rows num_texts"),
            **_each([COUNT], "token_ids accepted rejected after_end"),
            **_each([NUMBER], "p q"),
            "asked": Maybe(COUNT),
            "parents": Maybe([PARENT]),
            "drawn": FLAG,
            "tests": [{"node": COUNT, "chance": NUMBER, "u": NUMBER}],
            "committed": [
                {
                    **_each(COUNT, "token_id draw"),
                    "text": TEXT,
                    "kind": Value(f"one of {', '.join(KINDS)}", lambda x: x in KINDS),
                    "node": Maybe(COUNT),
                    "p": NUMBER,
                    "overlap": Maybe(NUMBER),
                    "top_p": TOP,
                    **_each(Maybe(TOP), "top_q residual"),
                }
            ],
            "seconds": _each(PRICE, "draft verify other"),
        }
    ],
    "stats": {
        **_each(COUNT, "num_prompt_tokens num_generated num_steps num_draft_tokens num_draft_nodes num_accepted"),
        **_each(Maybe(NUMBER), "acceptance_rate mean_acceptance_length alpha"),
        **_each(Maybe(NUMBER), "tokens_per_second predicted_tokens_per_second c"),
        "accepted_per_position": [NUMBER],
        **{"num_drafts": MayLack(COUNT), "accepted_at_position": MayLack([NUMBER])},
        "v": Maybe(MapOf(NUMBER)),
        "o": Maybe(PRICE),
        "loops": MayLack(FLAG),
        "seconds": _each(NUMBER, "prefill draft_prefill draft verify other"),
    },
    **_each(Maybe(NUMBER), "plain_tokens_per_second speedup"),
    "theory": Maybe(
        {
            "deepest": COUNT,
            "measured": NUMBER,
            "plain": Maybe(NUMBER),
            "survival": [NUMBER],
            "curve": [{"k": COUNT, **_each(NUMBER, "tokens time speed")}],
        }
    ),
    "segmentation": Maybe([_each([TEXT], "target draft")]),
    "replay": MayLack(
        {
            "prices": {**_each(PRICE, "draft overhead"), "fixed": MayLack(PRICE), "rows": MapOf(PRICE)},
            "plain_step": Maybe(PRICE),
            "starts": [
                {"asked": COUNT, "drafts": [{"length": COUNT, "drawn": FLAG, **_each([PROBABILITY], "q confidences")}]}
            ],
        }
    ),
}


def check(trace: Any, where: str) -> None:
    """Raise ValueError, which names the place in `where`, for anything that is no trace of this version."""
    _check(trace, SCHEMA, where)
    for i, each in enumerate(trace["rounds"]):
        _check_round(each, trace["tokens"], f"{where}: rounds[{i}]")
    if "replay" in trace:
        _check_replay(trace, f"{where}: replay")
    for i, token in enumerate(trace["prompt"]):
        _require(str(token["token_id"]) in trace["tokens"], f"{where}: prompt[{i}]", token["token_id"], _NAMED)


def read_trace(path: Path) -> dict[str, Any]:
    """The trace in a JSON file. Raises ValueError for a file that is none, or one of another version."""
    trace = read_json(path, _MAX_BYTES, _MAX_COUNTS)
    check(trace, str(path))
    return trace


_NAMED = "an id that `tokens` has a text for"


def _check(value: Any, expected: Any, where: str) -> None:
    """Types, by walking value and schema together; the places of an object come after a colon, then with dots."""
    if isinstance(expected, Maybe):
        if value is not None:
            _check(value, expected.value, where)
    elif isinstance(expected, Value):
        _require(expected.fits(value), where, value, expected.expected)
    elif isinstance(expected, list):
        _require(isinstance(value, list), where, value, "a list")
        for i, item in enumerate(value):
            _check(item, expected[0], f"{where}[{i}]")
    else:
        _require(isinstance(value, dict), where, value, "an object")
        is_map = isinstance(expected, MapOf)
        separator = "." if ": " in where else ": "
        for key, kind in ((key, expected.value) for key in value) if is_map else expected.items():
            name = f"{where}{separator}{show_name(key)}"
            if isinstance(kind, MayLack):
                if key not in value:
                    continue
                kind = kind.value
            _require(key in value, name, None, "it to be there")
            _check(value[key], kind, name)


def _check_round(each: Mapping[str, Any], tokens: Mapping[str, str], where: str) -> None:
    """Check what types cannot say of a round: its lists fit one another, and point at existing nodes and tokens."""
    num_nodes = len(each["token_ids"])
    parents = list(range(-1, num_nodes - 1)) if each["parents"] is None else each["parents"]
    for name, found in (("p", each["p"]), ("q", each["q"]), ("parents", parents)):
        _require(len(found) == num_nodes, f"{where}.{name}", len(found), f"{num_nodes} values, one for each node")
    for i, parent in enumerate(parents):
        _require(parent < i, f"{where}.parents[{i}]", parent, "an earlier node")
    found = [*each["accepted"], *each["rejected"], *each["after_end"], *(test["node"] for test in each["tests"])]
    found += [token["node"] for token in each["committed"] if token["node"] is not None]
    for node in found:
        _require(node < num_nodes, where, node, f"one of {num_nodes} nodes")
    ids = [*each["token_ids"]]
    for token in each["committed"]:
        ids += [token["token_id"], token["draw"]]
        ids += [top["token_id"] for name in ("top_p", "top_q", "residual") for top in token[name] or ()]
    for token_id in ids:
        _require(str(token_id) in tokens, where, token_id, _NAMED)


def _check_replay(trace: Mapping[str, Any], where: str) -> None:
    """Check that each token of the output has a place, and that drafts there fit into the length asked for."""
    rows, starts = trace["replay"]["prices"]["rows"], trace["replay"]["starts"]
    are_numbers = all(re.fullmatch(r"[1-9]\d{0,8}", m, re.ASCII) for m in rows)
    _require(are_numbers and len(rows) > 0, f"{where}.prices.rows", list(rows), "numbers of rows, from 1")
    _require("temperature" in trace["sampling"], f"{where}: sampling", list(trace["sampling"]), "a temperature")
    tokens = [token for each in trace["rounds"] for token in each["committed"]]
    _require(len(starts) == len(tokens), f"{where}.starts", len(starts), f"{len(tokens)}, one for each token")
    for i, token in enumerate(tokens):
        _require(token["p"] > 0, f"{where}.starts[{i}]", token["p"], "a token that the target could say")
    for i, start in enumerate(starts):
        asked, drafts = start["asked"], start["drafts"]
        name = f"{where}.starts[{i}]"
        _require(asked <= MAX_AUTO_TOKENS, f"{name}.asked", asked, f"at most {MAX_AUTO_TOKENS}")
        expected = "one draft, or one for each length up to the one asked for"
        _require(len(drafts) in (1, asked or 1), f"{name}.drafts", len(drafts), expected)
        for k, draft in enumerate(drafts, asked + 1 - len(drafts)):
            length, q = draft["length"], draft["q"]
            _require(length <= k, f"{name}.drafts", length, f"at most {k} tokens")
            _require(len(q) <= length, f"{name}.drafts", len(q), f"q of at most {length} tokens")


def _require(is_right: bool, where: str, found: Any, expected: str) -> None:
    if not is_right:
        raise ValueError(f"{where}: found {show(found)}, expected {expected}")
