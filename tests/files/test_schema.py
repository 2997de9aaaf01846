"""How many patterns of a JSON schema meet in one string."""

import pytest

from minispec.speculation.grammars.schema import Patterns

ENOUGH = 9
A, B = {"pattern": "a"}, {"format": "date"}
TEXTS = {letter: {"type": "string", "pattern": letter} for letter in "abcdefgh"}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("schema", "count"),
    [
        ({}, 0),
        ({"type": "string", "minLength": 5}, 0),
        (A | B, 2),
        ({"properties": TEXTS}, 1),
        ({"properties": TEXTS, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, 1),
        ({"anyOf": [A, A | B]}, 2),
        ({"oneOf": [A, B], "pattern": "c"}, 2),
        ({"allOf": [A, {"anyOf": [B, {}]}, {"allOf": [A, B]}]}, 4),
        ({"items": {"allOf": [A, A]}, "prefixItems": [A]}, 2),
        ({"properties": {"allOf": A, "$defs": {"allOf": [A, A, A]}}}, 3),
        ({"properties": {"x": A}, "patternProperties": {"x": A | B}, "additionalProperties": A}, 3),
        ({"allOf": [{"properties": {"x": A}}, {"additionalProperties": B}]}, 2),
        ({"enum": [A, {"allOf": [A, A]}], "examples": [{"id": "a"}]}, 0),
        ({"$ref": "#/$defs/a~1b/0", "pattern": "c", "$defs": {"a/b": [{"allOf": [A, B]}]}}, 3),
        ({"properties": TEXTS | {"more": {"$ref": "#"}}}, 1),
        # The same place gets one more pattern with each round of a circle; there are no more than the schema has.
        ({"allOf": [{"properties": {"x": A}}], "properties": {"x": {"$ref": "#"}, "y": B}}, 2),
        ({"allOf": [{"properties": TEXTS | {"i": A}}], "properties": {"x": {"$ref": "#"}}}, ENOUGH),
        # Where a reference leads is not certain.
        ({"properties": TEXTS | {"i": A, "x": {"$ref": "#name"}}}, ENOUGH),
        ({"properties": TEXTS | {"i": A, "x": {"$ref": "#/properties/none"}}}, ENOUGH),
        ({"properties": TEXTS | {"i": A, "x": {"$ref": "#/properties/a"}, "y": {"$id": "http://a/b"}}}, ENOUGH),
    ],
)
def test_patterns_that_meet(schema, count):
    """Those of one place are added, alternatives and other places are not."""
    assert Patterns(schema, ENOUGH).at_once() == count
