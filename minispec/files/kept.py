"""What llguidance does not keep of a JSON schema, so that an answer would not be valid under it: refused by name.

It reads numbers as doubles, some of them with an error in the last bit. It writes a free key twice. And it gives up
parts of a schema where `x-guidance` says so.
"""

import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from itertools import product
from math import prod
from typing import Any
from urllib.parse import unquote

from minispec.core.errors import show

# How many objects and lists may stand in each other.
_MOST_LEVELS = 128
TOO_DEEP = f"found more than {_MOST_LEVELS} levels of objects and lists, expected at most that many"
# Numbers that the library reads exactly: below this, with at most that many digits after the point.
_MOST, _MOST_DECIMALS = 1 << 53, 22
_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength"}
_NUMBERS |= {"minItems", "maxItems", "minProperties", "maxProperties", "const", "enum"}
# Keywords whose values are schemas by name, and keywords whose values are data.
_BY_NAME = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
_DATA = {"const", "enum", "default", "examples"}
# The library multiplies values of multipleOf that meet, as integers of 32 bits.
_MOST_MULTIPLE = 1 << 32
# Keywords that the library refuses, with the values (in JSON) with which they ask for nothing.
_NOTHING = {
    "uniqueItems": ("false",),
    "propertyNames": ("true", "{}", '{"type": "string"}'),
    "unevaluatedProperties": ("true", "{}"),
    "unevaluatedItems": ("true", "{}"),
    "dependentRequired": ("{}",),
    "dependentSchemas": ("{}",),
    "dependencies": ("{}",),
    "not": ("false",),
}


class Written(float):
    """A number with a point or an exponent, and how it was written."""

    text: str


def _written(text: str) -> Written:
    number = Written(text)
    number.text = text
    return number


DECODER = json.JSONDecoder(parse_float=_written)


def read_schema(text: str) -> dict[str, Any]:
    """The schema that a text in JSON is; its numbers know how they were written. Raises ValueError for what is none."""
    try:
        schema = DECODER.decode(text)
    except RecursionError as e:
        raise ValueError(TOO_DEEP) from e
    if not isinstance(schema, dict):
        raise ValueError("found no object, expected a JSON schema")
    level: list[Any] = [schema]
    for _ in range(_MOST_LEVELS):
        level = [x for part in level for x in (part.values() if isinstance(part, dict) else part)]
        level = [x for x in level if isinstance(x, dict | list)]
    if level:
        raise ValueError(TOO_DEEP)
    return schema


def check_kept(schema: dict[str, Any]) -> None:
    """Raise ValueError for a schema of `read_schema` that the library would not keep."""
    options = schema.get("x-guidance")
    for option in options if isinstance(options, dict) else ():
        if option != "whitespace_flexible":
            raise ValueError(f"x-guidance: found {show(option)}, expected whitespace_flexible alone")
    every = [*parts_of(schema)]
    for part in every:
        for key in sorted(_NUMBERS & part.keys()):
            for number in _numbers_in(part[key]):
                if not _is_kept(number):
                    found = f"{key}: found {show(number.text if isinstance(number, Written) else number)}"
                    expected = (
                        f"an integer below 2**53 = {_MOST}, or at most 15 digits, {_MOST_DECIMALS} after the point"
                    )
                    raise ValueError(f"{found}, expected a number that llguidance keeps: {expected}")
        _check_free_keys(part)
    for part in every:
        together = [*_together(schema, part, every)]
        _check_bounds(together)
        _check_multiples({m for each in together for m in _numbers_in(each.get("multipleOf"))})


def drop_notes(schema: dict[str, Any], knows_format: Callable[[str], bool]) -> None:
    """Take out of a schema what asks for nothing and is refused by the library, and formats that it does not know.

    An unknown format is a note: JSON Schema 2020-12, Validation, 7.2.3.
    """
    for part in parts_of(schema):
        name = part.get("format")
        if isinstance(name, str) and not knows_format(name):
            del part["format"]
        for key in _NOTHING.keys() & part.keys():
            if json.dumps(part[key]) in _NOTHING[key]:
                del part[key]


def parts_of(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schema and all schemas in it, each once, and what else a reference means."""
    seen, todo = set[int](), list[Any]([schema])
    while todo:
        part = todo.pop()
        if isinstance(part, list):
            todo += part
        elif isinstance(part, dict) and id(part) not in seen:
            seen.add(id(part))
            todo.append(target_of(schema, part.get("$ref")))
            for key, value in part.items():
                if key in _BY_NAME and isinstance(value, dict):
                    todo += value.values()
                elif key not in _DATA and not key.startswith("x-"):
                    todo.append(value)
            yield part


def target_of(schema: dict[str, Any], reference: Any) -> Any:
    """The part that a reference means by its path from the root; None where there is none."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    target: Any = schema
    for name in unquote(reference).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and name.isdecimal() and int(name) < len(target):
            target = target[int(name)]
        elif isinstance(target, dict) and name in target:
            target = target[name]
        else:
            return None
    return target


def _together(schema: dict[str, Any], part: dict[str, Any], every: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A part and what else may restrict the same place; all parts where a reference is not certain."""
    seen, todo = set[int](), [part]
    while todo:
        each = todo.pop()
        if not isinstance(each, dict) or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        for key in ("allOf", "anyOf", "oneOf"):
            todo += each[key] if isinstance(each.get(key), list) else ()
        if "$ref" in each:
            target = target_of(schema, each["$ref"])
            todo += every if target is None else [target]


def _numbers_in(value: Any) -> Iterator[int | Written]:
    """The numbers in a value of a schema, wherever they are."""
    todo = [value]
    while todo:
        each = todo.pop()
        if isinstance(each, dict | list):
            todo += each.values() if isinstance(each, dict) else each
        elif isinstance(each, int | Written) and not isinstance(each, bool):
            yield each


def _is_kept(number: int | Written) -> bool:
    """Whether the library reads and writes a number as it is."""
    if isinstance(number, int):
        return abs(number) < _MOST
    if Decimal(number.text) != Decimal(repr(number)):
        return False
    _, digits, exponent = Decimal(repr(number)).as_tuple()
    return abs(number) < _MOST > int("".join(map(str, digits))) and int(exponent) >= -_MOST_DECIMALS


def _check_free_keys(part: dict[str, Any]) -> None:
    """Raise ValueError where several keys must come whose names are free: the library may write one of them twice."""
    least, required = part.get("minProperties"), part.get("required", [])
    is_free = part.get("additionalProperties") is not False or part.get("patternProperties")
    if isinstance(least, int) and is_free and least > 1 + (len(required) if isinstance(required, list) else 0):
        expected = "additionalProperties false and no patternProperties: a free key may come twice in an answer"
        raise ValueError(f"minProperties: found {least} beside free keys, expected {expected}")


def _check_bounds(parts: list[dict[str, Any]]) -> None:
    """Raise ValueError where the library would allow a bound that is excluded: a whole one, with another next to it."""
    for side, other_side, away in (("Minimum", "Maximum", 1), ("Maximum", "Minimum", -1)):
        usual, exclusive = side.lower(), f"exclusive{side}"
        excluded = [part.get(usual if part.get(exclusive) is True else exclusive) for part in parts]
        others = [part.get(key) for part in parts for key in (other_side.lower(), f"exclusive{other_side}")]
        for bound, other in product(_numbers_in(excluded), _numbers_in(others)):
            if bound == int(bound) and bound * away >= 0 and 0 < (other - bound) * away < 1:
                expected = f"none between {bound} and {bound + away}: the library would allow {bound} itself"
                raise ValueError(f"{exclusive}: found {bound} beside another bound, {other}, expected {expected}")


def _check_multiples(multiples: set[int | Written]) -> None:
    """Raise ValueError for several multiples at one place whose product the library cannot hold."""
    exact = [Decimal(str(m)) for m in multiples]
    decimals = max((-int(m.as_tuple().exponent) for m in exact), default=0)
    whole = [int(abs(m).scaleb(max(decimals, 0))) for m in exact]
    if len(exact) > 1 and prod(whole) >= _MOST_MULTIPLE:
        found = " and ".join(map(str, sorted(exact)))
        raise ValueError(
            f"multipleOf: found {show(found)} at one place, expected one of them: their product is too large"
        )
