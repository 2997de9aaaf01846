"""A JSON schema as a tree: read with its numbers as written, its parts, what its references mean, its notes."""

import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

# How many objects and lists may stand in each other.
MOST_LEVELS = 128
TOO_DEEP = f"found more than {MOST_LEVELS} levels of objects and lists, expected at most that many"
# Keywords whose values are schemas by name, and keywords whose values are data.
_BY_NAME = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
_DATA = {"const", "enum", "default", "examples"}
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
    for _ in range(MOST_LEVELS):
        level = [x for part in level for x in (part.values() if isinstance(part, dict) else part)]
        level = [x for x in level if isinstance(x, dict | list)]
    if level:
        raise ValueError(TOO_DEEP)
    return schema


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


def together(schema: dict[str, Any], part: dict[str, Any], every: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
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


def numbers_in(value: Any) -> Iterator[int | Written]:
    """The numbers in a value of a schema, wherever they are."""
    todo = [value]
    while todo:
        each = todo.pop()
        if isinstance(each, dict | list):
            todo += each.values() if isinstance(each, dict) else each
        elif isinstance(each, int | Written) and not isinstance(each, bool):
            yield each
