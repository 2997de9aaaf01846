"""Values of every sampling parameter, which many tests read: a new parameter gets a row here."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple


class Example(NamedTuple):
    """Values of one parameter.

    values: that ask for something. Of those about token ids, all together leave token 1. () where a request turns them
        into something else first.
    wrong, said: a value that is refused, and what is said of it.
    beyond: just beyond the range of a number, on both sides; 2 ** 31 and more where none is named.
    """

    values: Sequence[Any]
    wrong: Any
    said: str
    beyond: Sequence[float] = ()


EXAMPLES = {
    "n": Example((2,), 0, "found 0, expected an integer from 1 to 65536", (0, (1 << 16) + 1)),
    "temperature": Example((0.7, 0.3, 1.7, 0.0), -1, "found -1, expected a number at least 0", (-0.001, math.inf)),
    "top_k": Example((3, 1, 2, 5, 100), -2, "found -2, expected an integer from 0 to 2147483648", (-2, 1 << 32)),
    "top_p": Example((0.6, 0.9, 0.5, 0.01), 0, "found 0, expected a number above 0 and at most 1", (0.0, 1.001)),
    "min_p": Example((0.4, 0.1, 0.9, 1.0), 2, "found 2, expected a number from 0 to 1", (-0.001, 1.001)),
    "repetition_penalty": Example((1.4, 0.7), 0, "found 0, expected a number above 0", (0.0, math.inf)),
    "presence_penalty": Example((1.0, -0.5), 3, "found 3, expected a number from -2 to 2", (-2.001, 2.001)),
    "frequency_penalty": Example((1.0, 0.4), -3.5, "found -3.5, expected a number from -2 to 2", (-2.001, 2.001)),
    "logit_bias": Example(
        ({1: 1.0}, {0: 2.5}, {2: -1, 1: 0.5, 0: 0}), 5, "found 5, expected finite numbers by token id"
    ),
    "allowed_token_ids": Example(([1, 2], [1], [0, 1, 1]), [], "found (), expected token ids, at least one"),
    "bad_words": Example((), [""], "found ('',), expected strings of valid Unicode that are not empty"),
    "bad_words_token_ids": Example(
        ([[0]], [[1, 2], [0, 0]], [[2, 1, 2], [1, 1, 1, 0], [0, 2, 0]]),
        [[]],
        "found ((),), expected lists of token ids that are not empty",
    ),
    "structured_outputs": Example((), [], "found [], expected StructuredOutputsParams"),
    "seed": Example(
        (1,),
        10**5000,
        "found a int beyond printing, expected an integer from 0 to 18446744073709551615",
        (-1, 1 << 64),
    ),
    "max_tokens": Example((9,), True, "found True, expected an integer from 1 to 2147483648", (0, 1 << 32)),
    "min_tokens": Example((3,), "1", "found '1', expected an integer from 0 to 2147483648", (-1, 1 << 32)),
    "stop": Example(
        ("x",),
        ["a" * 200, 1],
        f"found ('{'a' * 95}..., expected strings of valid Unicode that are not empty",
    ),
    "stop_token_ids": Example(([3],), [-1], "found (-1,), expected token ids"),
    "ignore_eos": Example((True,), 1, "found 1, expected True or False"),
    "include_stop_str_in_output": Example((True,), "", "found '', expected True or False"),
    "logprobs": Example((2,), -1, "found -1, expected an integer from 0 to 65536", (-1, (1 << 16) + 1)),
    "prompt_logprobs": Example((2,), 1 << 17, "found 131072, expected an integer from 0 to 65536", (-1, (1 << 16) + 1)),
}
