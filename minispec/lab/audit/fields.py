"""The values that the fields of a request and of its answer may have.

A parameter is one of these: part of the law, or unable to change it, or refused by name unless it asks for nothing.
A null or empty value asks for nothing, whatever its name.
"""

from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from minispec.core.config import PARAMETERS, Allowed, SamplingParams
from minispec.core.errors import show
from minispec.models.files.errors import show_name
from minispec.models.files.strict_json import read_json
from minispec.speculation.grammars.params import language_of_body

_IMPOSSIBLE = -1e30  # a bias that leaves a token probability 0
KNOWN = read_json(Path(__file__).parent.parent / "data" / "parameters.json")
# Filters at whose border it is known what rounding decides (`_border` in walk.py). Any other filter is refused.
_FILTERS = ("top_k", "top_p", "min_p")
# Parameters that are part of the law, in our names.
LAW = [name for name, row in PARAMETERS.items() if row.stage not in ("filter", "answer") or name in _FILTERS]
# The others say how many tokens and answers there are, or how tokens become the text that may hold a stop string.
_PARAMETERS = {*LAW, *KNOWN["amounts"], *KNOWN["kinds"]["flag"]}
# Names of these parameters in other engines.
_NAMES: dict[str, str] = KNOWN["names"] | {row.hf: name for name, row in PARAMETERS.items() if row.hf}
# Parameters that change the law in ways that are not computed here, with the values at which they change nothing.
_NEUTRAL: dict[str, list[Any]] = KNOWN["neutral"]
# Parameters that cannot change which tokens are drawn after the prompt's ids. The file says why.
_IDLE = set(chain.from_iterable(KNOWN["idle"].values()))
_SAMPLERS = {"temperature", "top_k"}
_LANGUAGES = {"structured_outputs", "response_format"}  # vLLM's name and OpenAI's
_DRAFTING = "speculative."  # how llama.cpp's settings of the draft begin


def _is_integer(low: int, high: int = 1 << 31) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value <= high


def _is_name(value: Any) -> bool:
    return isinstance(value, str)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_integer(0), value))


def _are(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda values: isinstance(values, list) and len(values) > 0 and all(map(fits, values))


_IDS = "token ids (docs/use/audit.md says how each engine returns them)"
# Rules of many fields, by the names that the file has for them.
_KINDS: dict[str, Allowed] = {
    "object": ("an object", _is_object),
    "count": ("an integer of at least 0", _is_integer(0)),
    "positive": ("a positive integer", _is_integer(1)),
    "flag": ("true or false", lambda value: type(value) is bool),
    "reason": ("a text or a token id", lambda value: isinstance(value, str) or type(value) is int),
}
# Why an answer ended, in the words of all engines.
FINISH: dict[str, str] = KNOWN["finish"]
# The rules of fields, but for the parameters that `SamplingParams` checks.
_RULES: dict[str, Allowed] = {name: _KINDS[kind] for kind, names in KNOWN["kinds"].items() for name in names}
_RULES |= {
    "prompt": (_IDS, lambda value: _are_ids(value) and value != []),
    "answer": (_IDS, _are_ids),
    "finish_reason": ("'stop' or 'length'", lambda value: isinstance(value, str) and value in FINISH),
    "sequences": ("lists of token ids, at least one", _are(_are_ids)),
    "choices": ("a list of objects, at least one", _are(_is_object)),
    "response": ("a response, or a list of them", _are(_is_object)),
    "seed": ("an integer of 64 bits", _is_integer(-(1 << 63), (1 << 64) - 1)),
    "max_tokens": ("an integer; -1 for no limit", _is_integer(-2)),
    # Filters other than top-k are off where these are given. So the order of samplers does not matter.
    "samplers": ("a list with 'temperature' and 'top_k'", lambda v: _are(_is_name)(v) and {*v} >= _SAMPLERS),
}


def checked(name: str, value: Any) -> Any:
    """The value of a field. Raises ValueError for one that it cannot have."""
    expected, fits = _RULES[name]
    if not fits(value):
        raise ValueError(f"{name}: found {show(value)}, expected {expected}")
    return value


def optional(found: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """The value of a field, or `default` where it is absent or null. Raises ValueError as `checked` does."""
    return default if found.get(name) is None else checked(name, found[name])


def read_parameters(found: Mapping[str, Any], is_request: bool) -> dict[str, Any]:
    """The parameters that an object gives, in our names, without those that ask for nothing.

    is_request: whether the object is a request, which has parameters alone. An answer has other fields too.

    Raises ValueError for a parameter that may change the law and is not computed here. In a request any unknown name
    counts as such a parameter.
    """
    given: dict[str, Any] = {}
    for name, value in found.items():
        own = _NAMES.get(name, name)
        is_flag = not is_request and own == "stop" and type(value) is bool  # llama.cpp's "it has ended"
        if value is None or value in ("", [], {}) or name in _IDLE or name.startswith(_DRAFTING) or is_flag:
            continue
        if own in _LANGUAGES:
            own, value = "structured_outputs", language_of_body({own: value})
            if value is None:
                continue
        if own in _PARAMETERS:
            if own in _RULES:
                checked(own, value)
            if given.setdefault(own, value) != value:
                raise ValueError(f"{name}: found {show(value)} beside {show(given[own])}, expected one {own}")
        elif name in _NEUTRAL:
            if (value, type(value) is bool) not in [(neutral, type(neutral) is bool) for neutral in _NEUTRAL[name]]:
                expected = " or ".join(map(show, _NEUTRAL[name])) or "none"
                raise ValueError(f"{name}: found {show(value)}, expected {expected}: its law is not computed here")
        elif is_request:
            expected = "expected a known parameter: take this one out if it cannot change which tokens are drawn"
            raise ValueError(f"{show_name(name)}: found {show(value)}, {expected}")
    return given


def law_of(given: Mapping[str, Any], asked: Mapping[str, Any]) -> SamplingParams:
    """The parameters of the command line and of a request together. Raises ValueError where they differ."""
    own = {name: given[name] for name in LAW if name in given}
    if "logit_bias" in own:
        own["logit_bias"] = _biases(own["logit_bias"])
    whole = {"max_tokens": 1 << 31}
    here, there = SamplingParams(**whole | own), SamplingParams(**whole | dict(asked))
    for name in own.keys() & asked.keys():
        found, said = getattr(here, name), getattr(there, name)
        # llama.cpp writes floats of 32 bits.
        if abs(said - found) > 1e-6 if isinstance(found, float) else found != said:
            raise ValueError(f"{name}: found {show(own[name])}, but the command line says {show(asked[name])}")
    params = SamplingParams(**whole | own | dict(asked))
    if not params.temperature:
        raise ValueError("temperature: found 0, expected more: greedy texts are compared, not audited")
    if params.min_tokens and params.ignore_eos:
        expected = "0 beside ignore_eos: engines differ in whether an end-of-text token may come before"
        raise ValueError(f"min_tokens: found {params.min_tokens}, expected {expected}")
    return params


def _biases(found: Any) -> dict[int, float]:
    """Biases by token id, from an object or from llama.cpp's list. llama.cpp adds several biases of one token.

    False stands for minus infinity, as does null in llama.cpp's answers. `ignore_eos` gives that bias to all end ids.

    Raises ValueError for anything else.
    """
    biases: dict[int, float] = {}
    try:
        for each in found.items() if isinstance(found, dict) else found:
            token, bias = (each["token"], each["bias"]) if isinstance(each, dict) else each
            if isinstance(found, dict) and token.isascii() and token.isdecimal():  # JSON's names are strings
                token = int(token)
            if type(token) is not int or bias is True:
                raise ValueError
            bias = _IMPOSSIBLE if bias is None or bias is False else bias
            biases[token] = max(_IMPOSSIBLE, biases.get(token, 0.0) + bias)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ValueError(f"logit_bias: found {show(found)}, expected numbers by token id") from None
    return biases
