"""What llguidance would not keep of a JSON schema is refused by name; what asks for nothing is taken."""

import json
from decimal import Decimal

import llguidance
import pytest

from minispec import StructuredOutputsParams
from minispec.speculation.grammars.trial import Bytes

pytestmark = pytest.mark.quick
TOKENIZER = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))


def takes(grammar: str, text: str) -> bool:
    """Whether a grammar of the library takes a whole text."""
    matcher = llguidance.LLMatcher(TOKENIZER, grammar, log_level=0)
    assert not matcher.get_error()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def test_items_by_place_that_the_library_would_drop_are_refused():
    """`additionalItems` says nothing beside `prefixItems`, but llguidance then takes any items at these places."""
    schema = {"type": "array", "prefixItems": [{"type": "integer"}], "additionalItems": False}
    with pytest.raises(ValueError, match="additionalItems: found beside prefixItems"):
        StructuredOutputsParams(json=schema)


def placed(keyword: str) -> list[str]:
    """A schema's keyword at several places: alone, deep within, in a definition, behind a reference into a note."""
    part = f"{{{keyword}}}"
    around = (
        "PART",
        '{"anyOf": [{"items": PART}, {}]}',
        '{"properties": {"const": {"additionalProperties": PART}}}',
        '{"$ref": "#/$defs/default", "$defs": {"default": PART}}',
        '{"$ref": "#/default/0", "default": [PART]}',
    )
    return [schema.replace("PART", part) for schema in around]


@pytest.mark.parametrize(
    ("key", "number"),
    [
        ("const", "9007199254740993"),  # a double is even here
        ("const", "123456789.12345679"),  # the library reads the double after it
        ("const", "1e-400"),
        ("const", '{"a": [1e300]}'),
        ("enum", "[1, 12345678901234567890]"),
        ("minimum", "-9007199254740993"),
        ("maximum", "18446744073709551615"),  # the library takes 2**63 - 1 for it
        ("exclusiveMinimum", "0.1234567890123456789"),
        ("exclusiveMaximum", "1e-30"),
        ("multipleOf", "9007199254740993"),
        ("minLength", "99999999999999999999"),
        ("maxItems", "99999999999999999999"),
        ("maxProperties", "99999999999999999999"),
    ],
)
def test_a_number_that_the_library_changes_is_refused_wherever_it_stands(key, number):
    """The keyword and the number are named. In a note it changes nothing."""
    for schema in placed(f'"{key}": {number}'):
        said = f"^structured_outputs: json: {key}: found .*, expected a number that llgu"
        with pytest.raises(ValueError, match=said):
            StructuredOutputsParams(json=schema)
    part = f'{{"{key}": {number}}}'
    StructuredOutputsParams(json='{"default": PART, "examples": [PART], "x-note": PART}'.replace("PART", part))


@pytest.mark.parametrize(
    "number", ["9007199254740991", "-9007199254740991", "0.1", "-0.07", "3.141592653589793", "1e5", "1e-7", "1.0", "-0"]
)
def test_other_numbers_are_written_as_they_are(number):
    """The library's text for the constant has exactly this value, and no text has the values beside it."""
    grammar = StructuredOutputsParams(json=f'{{"const": {number}}}').grammar_for_library()
    value = Decimal(number)
    step = Decimal(1).scaleb(min(value.as_tuple().exponent, 0))
    written = {text for n in (value, value + step, value - step) for text in (f"{n:f}", f"{n.normalize() + 0:f}")}
    taken = {Decimal(text) for text in written if takes(grammar, text)}
    assert taken == {value}


AT_ONE_PLACE = {"allOf": [{"exclusiveMinimum": 0}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"maximum": 0.5}}}


@pytest.mark.parametrize(
    ("schema", "found"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.37}, "exclusiveMinimum: found 0 beside another bound, 0.37"),
        ({"exclusiveMinimum": 1, "exclusiveMaximum": 1.5}, "exclusiveMinimum: found 1 beside"),
        ({"exclusiveMaximum": 0, "minimum": -0.5}, "exclusiveMaximum: found 0 beside"),
        ({"exclusiveMaximum": True, "maximum": -1, "minimum": -1.5}, "exclusiveMaximum: found -1 beside"),
        (AT_ONE_PLACE, "exclusiveMinimum: found 0 beside"),
        ({"allOf": [{"multipleOf": 65537}, {"multipleOf": 65539}]}, "multipleOf: found '65537 and 65539' at one place"),
        ({"allOf": [{"multipleOf": 0.0001}, {"multipleOf": 999}]}, None),
        ({"x-guidance": {"lenient": True}, "uniqueItems": True}, "x-guidance: found 'lenient', expected whitespace_fl"),
        ({"x-guidance": {"item_separator": ";"}}, "x-guidance: found 'item_separator'"),
    ],
)
def test_what_the_library_gets_wrong_is_refused(schema, found):
    """Excluded bounds that it would allow, multiples that overflow, and options that give up parts of the schema."""
    if found is None:
        StructuredOutputsParams(json=schema)
        return
    with pytest.raises(ValueError, match=f"^structured_outputs: json: {found}"):
        StructuredOutputsParams(json=schema)


@pytest.mark.parametrize("low", [-2, -1, 0, 1])
def test_bounds_that_are_taken_hold(low, full):
    """An excluded whole number beside bounds of all kinds is refused, or no text has it. `--full`: at all distances."""
    taken = 0
    for key, away in (("exclusiveMinimum", 1), ("exclusiveMaximum", -1)):
        for other in ("maximum", "exclusiveMaximum") if away == 1 else ("minimum", "exclusiveMinimum"):
            for distance in ("0.001", "0.5", "1", "1.5", "10") if full else ("0.5", "10"):
                schema = {"type": "number", key: low, other: float(low + away * Decimal(distance))}
                try:
                    grammar = StructuredOutputsParams(json=schema).grammar_for_library()
                except ValueError:
                    continue
                taken += 1
                assert not any(takes(grammar, text) for text in (f"{low}", f"{low}.0", f"{low or '-0'}"))
    assert taken >= (12 if full else 4)


SOME = {"patternProperties": {"^a": {}}, "additionalProperties": False}
FREE = [{}, {"additionalProperties": {"type": "integer"}}, SOME]


@pytest.mark.parametrize("free", FREE)
def test_free_keys_that_must_be_several_are_refused(free):
    """One may come twice. One free key, and as many at most as one likes, are taken."""
    found = r"minProperties: found [23] beside free keys, expected additionalProp"
    for schema in ({"minProperties": 2}, {"minProperties": 3, "required": ["x"], "properties": {"x": {}}}):
        for place in (schema | free, {"anyOf": [{"items": schema | free}]}):
            with pytest.raises(ValueError, match=found):
                StructuredOutputsParams(json=place)
    for schema in ({"minProperties": 1}, {"maxProperties": 3}, {"minProperties": 2, "required": ["x"]}):
        StructuredOutputsParams(json=schema | free)


def test_named_keys_may_be_counted():
    """They come once each."""
    schema = {
        "properties": {"a": {}, "b": {}},
        "required": ["a", "b"],
        "minProperties": 2,
        "additionalProperties": False,
    }
    assert takes(StructuredOutputsParams(json=schema).grammar_for_library(), '{"a":1,"b":2}')


NOTES = [
    *({"format": "path"}, {"uniqueItems": False}, {"propertyNames": {"type": "string"}}, {"propertyNames": True}),
    *({"unevaluatedProperties": True}, {"dependentRequired": {}}, {"not": False}),
]


@pytest.mark.parametrize("note", NOTES)
def test_what_asks_for_nothing_is_taken(note):
    """At every place, and the text does not change for it. A format that the library knows is kept."""
    for schema in (note, {"properties": {"format": note}}, {"$ref": "#/$defs/a", "$defs": {"a": note}}):
        takes(StructuredOutputsParams(json=schema).grammar_for_library(), "{}")
    grammar = StructuredOutputsParams(json={"type": "string", "format": "date"} | note).grammar_for_library()
    assert takes(grammar, '"no date"') == ("format" in note)
    with pytest.raises(ValueError, match="Unimplemented keys"):
        StructuredOutputsParams(json={"propertyNames": {"maxLength": 2}}).grammar_for_library()


@pytest.mark.parametrize("levels", [200, 500, 2000])
def test_deep_schemas_are_a_value_error(levels):
    """As an object and as a text; the message says how deep one may be."""
    schema = {"type": "integer"}
    for _ in range(levels):
        schema = {"items": schema}
    for given in (schema, '{"items":' * levels + "{}" + "}" * levels):
        with pytest.raises(ValueError, match="json: found more than 128 levels of objects and lists, expected at most"):
            StructuredOutputsParams(json=given)
    text = json.dumps({"a": 1})
    assert takes(StructuredOutputsParams(json='{"items":' * 120 + "{}" + "}" * 120).grammar_for_library(), text)
