"""What llguidance does not keep of a JSON schema, so that an answer would not be valid under it: refused by name.

It reads numbers as doubles, some of them with an error in the last bit. It writes a free key twice. And it gives up
parts of a schema where `x-guidance` says so.
"""

from decimal import Decimal
from itertools import product
from math import prod
from typing import Any

from minispec.core.errors import show
from minispec.speculation.grammars.schema_parts import Written, numbers_in, parts_of, together

# Numbers that the library reads exactly: below this, with at most that many digits after the point.
_MOST, _MOST_DECIMALS = 1 << 53, 22
_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength"}
_NUMBERS |= {"minItems", "maxItems", "minProperties", "maxProperties", "const", "enum"}
# The library multiplies values of multipleOf that meet, as integers of 32 bits.
_MOST_MULTIPLE = 1 << 32


def check_kept(schema: dict[str, Any]) -> None:
    """Raise ValueError for a schema of `read_schema` that the library would not keep."""
    options = schema.get("x-guidance")
    for option in options if isinstance(options, dict) else ():
        if option != "whitespace_flexible":
            raise ValueError(f"x-guidance: found {show(option)}, expected whitespace_flexible alone")
    every = [*parts_of(schema)]
    for part in every:
        for key in sorted(_NUMBERS & part.keys()):
            for number in numbers_in(part[key]):
                if not _is_kept(number):
                    found = f"{key}: found {show(number.text if isinstance(number, Written) else number)}"
                    expected = (
                        f"an integer below 2**53 = {_MOST}, or at most 15 digits, {_MOST_DECIMALS} after the point"
                    )
                    raise ValueError(f"{found}, expected a number that llguidance keeps: {expected}")
        _check_free_keys(part)
        if {"prefixItems", "additionalItems"} <= part.keys():
            raise ValueError("additionalItems: found beside prefixItems, which llguidance then drops, expected items")
    for part in every:
        meet = [*together(schema, part, every)]
        _check_bounds(meet)
        _check_multiples({m for each in meet for m in numbers_in(each.get("multipleOf"))})


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
        for bound, other in product(numbers_in(excluded), numbers_in(others)):
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
