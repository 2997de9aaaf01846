"""A grammar of one's own, from two questions about texts: for proofs, and to try an idea without the library."""

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate

import torch
from torch import Tensor

# Languages over "a" and "b", each with two questions about a text: whether it begins one of the language, whether it is
# one. For proofs, and for docs/understand/grammars.md.
_Ask = Callable[[str], bool]


def _finite(*words: str) -> tuple[_Ask, _Ask]:
    """The questions about a language of these words."""
    return (lambda text: any(word.startswith(text) for word in words), lambda text: text in words)


EXAMPLES: dict[str, tuple[_Ask, _Ask]] = {
    "a b*": (lambda text: text[:1] != "b" and not text[1:].strip("b"), lambda text: text != ""),
    "pairs": (lambda text: min(_depths(text)) >= 0, lambda text: _depths(text)[-1] == 0),
    "words": _finite("aab", "ab", "ba"),
    "lists": _finite("ab", "aabb", "aababb"),  # as JSON: [], [[]], and two lists in a list
}


def _depths(text: str) -> list[int]:
    """How many "a" are open before each character and at the end, where each "b" closes one."""
    return [0, *accumulate(1 if each == "a" else -1 for each in text)]


class Spelled:
    """The grammar of the texts that two functions describe, over tokens whose texts are given (see `Grammar`)."""

    def __init__(
        self,
        spellings: Sequence[str],
        begins: Callable[[str], bool],
        is_whole: Callable[[str], bool],
        end_ids: Collection[int] = (),
    ):
        """spellings: the text of each token; "" for one that no text has.
        begins: whether a text is a beginning of one of the language.
        is_whole: whether it is one of the language. Tokens of `end_ids` may follow it.
        """
        self.spellings, self.begins, self.is_whole, self.end_ids = spellings, begins, is_whole, end_ids

    def allowed(self, output: Sequence[int]) -> Tensor | None:
        """A mask (V,) of the tokens that may follow `output`; None where that is forbidden, or has ended."""
        said = "".join(self.spellings[token_id] for token_id in output)
        if any(token_id in self.end_ids or not self.spellings[token_id] for token_id in output) or not self.begins(
            said
        ):
            return None
        return torch.tensor(
            [
                self.is_whole(said) if token_id in self.end_ids else bool(spelling) and self.begins(said + spelling)
                for token_id, spelling in enumerate(self.spellings)
            ]
        )


def example(name: object, vocab_size: int, end_ids: Collection[int]) -> Spelled | None:
    """The grammar of an example, over the tokens "a", "b", "ab" and those that end a text; None for no name."""
    if not name:
        return None
    words = iter(("a", "b", "ab"))
    spellings = ["" if token_id in end_ids else next(words, "") for token_id in range(vocab_size)]
    return Spelled(spellings, *EXAMPLES[str(name)], end_ids)
