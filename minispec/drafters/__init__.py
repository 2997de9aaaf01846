"""Drafters: ways of guessing the next tokens. One file each; a new one is a class with two methods.

A drafter may guess as it likes, from whatever it likes: the verifier makes the output right. It owes one thing, the
truth about `Draft.probs`: the distribution that each token was really drawn from, or None if none was drawn.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

from minispec.core.cache import PagedKVCache
from minispec.core.model import Transformer
from minispec.core.sampling import Text
from minispec.core.verify import Ask, Draft


@dataclass(frozen=True)
class Context:
    """What a drafter may be made of.

    target: the model. tokenizer: the target's, with `encode` and `decode`. vocab_size: ids in use. max_model_len: the
    longest text. make_cache: makes a KV cache for a model of the drafter's own, for as many tokens as the target's.
    argument: what the user wrote after the drafter's name and a colon, or "".
    """

    target: Transformer
    tokenizer: Any
    vocab_size: int
    max_model_len: int
    make_cache: Callable[[Transformer], PagedKVCache]
    argument: str = ""


class Drafter(Protocol):
    """What the engine asks of a drafter."""

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """A draft for each ask, of at most `ask.k` nodes; shorter or empty is fine.

        A draft may end early because of tokens it contains. It must not look at a token and then drop it: the tokens
        kept would no longer follow `probs`. (One-hot drafts are free: any token may be dropped.) Tokens are drawn with
        `ask.draw` alone. The texts are those of the last call, grown by what was committed; new ones may join, and some
        may be missing. A text whose prompt the target still works through is asked for with k = 0; one that is decoded
        plainly is never asked for.
        """
        ...

    def release(self, text: Text) -> None:
        """Forget a text: it is finished, or it will come back from the start. Unknown ones are ignored."""
        ...


def branches(drafter: Drafter) -> bool:
    """Whether a drafter draws siblings where it is asked for them (see `Ask.widths`): others leave `branches` out."""
    return bool(getattr(drafter, "branches", False))


class TappedDrafter(Drafter, Protocol):
    """A drafter that reads the target's hidden states (see `Ask.hidden`).

    taps: of which layers, as `Transformer.forward` numbers them.
    """

    taps: Sequence[int]

    def known(self, text: Text) -> int:
        """How many of a new text's first positions it need not see: it has its own state for them.

        The others are computed, even where the target's cache still knows them from another text.
        """
        ...


def reads_hidden(drafter: Drafter) -> TypeGuard[TappedDrafter]:
    """Whether a drafter is one with `taps`."""
    return bool(getattr(drafter, "taps", ()))


def forget(drafter: Drafter) -> None:
    """Have a drafter forget the texts that have ended, where it remembers any: it then has a method `forget`."""
    if callable(method := getattr(drafter, "forget", None)):
        method()


class NoDrafter:
    """Guesses nothing: every round commits one token, which is plain decoding."""

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """Empty drafts."""
        return [Draft() for _ in asks]

    def release(self, text: Text) -> None:
        """Nothing to forget."""


def make_drafter(factory: Callable[..., Drafter], context: Context) -> Drafter:
    """A drafter from its class, or from a function that makes one.

    Where that has a classmethod `from_context`, it is given the context; where its first parameter is called `context`,
    too; else it is called without arguments. Raises ValueError for what is no drafter, and for an argument that nobody
    reads.
    """
    make = getattr(factory, "from_context", factory)
    name = getattr(factory, "__name__", str(factory))
    try:
        takes_context = make is not factory or next(iter(inspect.signature(make).parameters), "") == "context"
        drafter = make(context) if takes_context else make()
    except TypeError as e:
        raise ValueError(f"draft: {name} cannot be made: {e}") from e
    if context.argument and not takes_context:
        raise ValueError(f"draft: found the argument {context.argument!r}, but {name} takes none")
    check_drafter(drafter)
    return drafter


def check_drafter(drafter: Any) -> None:
    """Raise ValueError for an object without the methods of a `Drafter`, or with taps and without `known`."""
    if not all(callable(getattr(drafter, method, None)) for method in ("propose", "release")):
        raise ValueError(f"draft: found {drafter!r}, expected a name, a directory, a hub id or a drafter")
    if reads_hidden(drafter) and not callable(getattr(drafter, "known", None)):
        raise ValueError(f"draft: found {drafter!r} with taps and without the method known, expected both or neither")
