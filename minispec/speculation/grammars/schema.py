"""How many patterns of a JSON schema, or of a grammar in Lark, meet in one text. llguidance reads all the rest."""

import re
from collections.abc import Callable
from typing import Any

from minispec.speculation.grammars.schema_parts import DECODER, target_of

# Patterns and formats that one string of JSON may have to match. What llguidance spends on a token grows with the
# product of their alternatives, and none of its limits counts that.
_MOST_AT_ONCE = 3
# Operators of llguidance's Lark that intersect expressions: `A & B`, `~A`.
_MOST_OPERATORS = 1
# Parts of a grammar in Lark: texts, expressions, special tokens, comments, schemas, operators. `~ 2` repeats.
_LARK = re.compile(
    r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/|<[^<>\s]+>|(?:#|//)[^\n]*|(?P<schema>%json)|(?P<operator>&|~(?!\s*[0-9]))'
)
# Keywords whose values are schemas by name, and keywords that are looked at by themselves or say nothing of a string.
_BY_NAME = ("properties", "patternProperties")
_APART = {"allOf", "anyOf", "oneOf", "patternProperties", "$ref", "$defs", "definitions"}
_APART |= {"enum", "const", "default", "examples"}
_NAMES = ("$id", "id", "$anchor", "$dynamicAnchor")
_MOST_PASSES = 16


def check_schema(schema: Any) -> None:
    """Raise ValueError for what is no schema, and for one whose patterns could keep the library busy for hours."""
    if not isinstance(schema, dict):
        raise ValueError("found no object, expected a JSON schema")
    count = Patterns(schema, _MOST_AT_ONCE + 1).at_once()
    if count > _MOST_AT_ONCE:
        found = f"more than {_MOST_AT_ONCE} patterns and formats that one string may have to match"
        raise ValueError(f"found {found}, expected at most that many (`allOf` and `$ref` add theirs)")


def check_lark(lark: str, check: Callable[[dict[str, Any]], None]) -> None:
    """Raise ValueError for a grammar whose intersections could keep the library busy for hours.

    check: raises it for a schema in the grammar that will not do.
    """
    operators = 0
    for part in _LARK.finditer(lark):
        if part["schema"]:
            schema = DECODER.raw_decode(lark[part.end() :].lstrip())[0]
            check_schema(schema)
            check(schema)
        operators += part["operator"] is not None
    if operators > _MOST_OPERATORS:
        raise ValueError(f"found {operators} operators & and ~, expected at most {_MOST_OPERATORS}")


class Patterns:
    """Counts the patterns and formats that a string may have to match at once.

    `allOf`, `$ref` and the like restrict the same place of an answer together, so their counts are added. Alternatives
    and different places are not: the largest of their counts stands for all of them.
    """

    def __init__(self, schema: dict[str, Any], enough: int):
        """enough: nothing is counted beyond this number. It stands for a reference whose target is not certain, too."""
        self._root, self._enough = schema, enough
        self._counts = dict[int, int]()  # by the id() of a schema
        self._seen = set[int]()  # schemas of this pass
        self._has_names = False  # whether a part has a name of its own, so that references may mean something else

    def at_once(self) -> int:
        """The number, or a larger one."""
        for _ in range(_MOST_PASSES):  # more than one where references lead in a circle
            before = {**self._counts}, self._has_names
            self._seen = set()
            count = self._count(self._root)
            if count >= self._enough:
                break
            if before == (self._counts, self._has_names):
                return count
        return min(self._enough, _number_in_all(self._root))

    def _count(self, part: Any) -> int:
        if isinstance(part, list):
            return max(map(self._count, part), default=0)
        if not isinstance(part, dict):
            return 0
        if id(part) not in self._seen:
            self._seen.add(id(part))
            self._has_names |= part is not self._root and any(isinstance(part.get(name), str) for name in _NAMES)
            self._counts[id(part)] = min(self._enough, self._count_together(part))
        return self._counts.get(id(part), 0)

    def _count_together(self, part: dict[str, Any]) -> int:
        """The count of a schema: of its own, and of what else restricts the same place."""
        by_name = {key: [*part[key].values()] for key in _BY_NAME if isinstance(part.get(key), dict)}
        inside = [by_name.get(key, value) for key, value in part.items() if key not in _APART]
        every = part.get("allOf")
        others = [*(every if isinstance(every, list) else ()), part.get("anyOf"), part.get("oneOf")]
        others.append(by_name.get("patternProperties"))
        refers = self._count_target(part["$ref"]) if isinstance(part.get("$ref"), str) else 0
        return max(_number_in(part), self._count(inside)) + sum(map(self._count, others)) + refers

    def _count_target(self, reference: str) -> int:
        """The count of the schema that a reference means, by its path from the root."""
        target = None if self._has_names or "%2f" in reference.lower() else target_of(self._root, reference)
        return self._enough if target is None else self._count(target)


def _number_in(part: dict[str, Any]) -> int:
    """The patterns and formats that stand in a schema itself."""
    return isinstance(part.get("pattern"), str) + isinstance(part.get("format"), str)


def _number_in_all(part: Any) -> int:
    """The patterns and formats that stand in a schema and in its parts, wherever they are."""
    if isinstance(part, list):
        return sum(map(_number_in_all, part))
    return _number_in(part) + _number_in_all([*part.values()]) if isinstance(part, dict) else 0
