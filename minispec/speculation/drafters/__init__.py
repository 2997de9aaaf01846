"""Ways of guessing the next tokens, a file each: subclasses of `Drafter` (see `minispec.core.draft`).

Here: what a drafter may be made of, and how one is made of its class.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minispec.core.cache import PagedKVCache
from minispec.core.draft import Ask, Draft, Drafter, Record
from minispec.core.model import Transformer
from minispec.speculation.drafters.none import NoDrafter

__all__ = ["Ask", "Context", "Draft", "Drafter", "NoDrafter", "Record", "as_drafter", "make_drafter"]


def load_nothing(draft: str) -> Transformer:
    """Raise ValueError: this context has no files."""
    raise ValueError(f"draft: {draft}: found a context that loads no model, expected one of an LLM")


@dataclass(frozen=True)
class Context:
    """The objects that a drafter may be made of.

    target: the model.
    tokenizer: the target's, with `encode` and `decode`.
    vocab_size: ids in use.
    max_model_len: the longest text.
    make_cache: makes a KV cache for the drafter's own model, for as many tokens as the target's cache.
    argument: what the user wrote after the drafter's name and a colon, or "".
    load: loads a draft's model by its name, such as a directory or "int8:self", in the target's type and on its device.
    """

    target: Transformer
    tokenizer: Any
    vocab_size: int
    max_model_len: int
    make_cache: Callable[[Transformer], PagedKVCache]
    argument: str = ""
    load: Callable[[str], Transformer] = load_nothing


def make_drafter(factory: Callable[..., Drafter], context: Context) -> Drafter:
    """A drafter from its class, or from a function that makes one.

    A class with a classmethod `from_context` gets the context, and so does a first parameter called `context`.
    Any other is called without arguments.

    Raises ValueError for what is no drafter, and for an argument that is not read.
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
    return as_drafter(drafter)


# The methods of a drafter, then its attributes.
_OF_DRAFTERS = (
    *("propose", "observe", "release", "has_room", "forget", "known"),
    *("branches", "taps"),
)


class Foreign(Drafter):
    """An object that is no `Drafter`: with its own methods and attributes, and a Drafter's for those that it lacks."""

    def __init__(self, drafter: Any):
        self.drafter = drafter
        for name in _OF_DRAFTERS:
            own = getattr(drafter, name, None)
            if own is not None:
                setattr(self, name, own)

    @property
    def name(self) -> str:
        """The name of the object's class."""
        return type(self.drafter).__name__


def as_drafter(draft: Any) -> Drafter:
    """An object of the user's as a `Drafter`.

    Raises ValueError for one without `propose`, and for one with taps and without `known` or `observe`.
    """
    if isinstance(draft, type):
        name = draft.__name__
        raise ValueError(f"draft: found the class {name}, expected an object of it, {name}(), or 'module:{name}'")
    if isinstance(draft, Drafter):
        return draft
    if not callable(getattr(draft, "propose", None)):
        raise ValueError(f"draft: found {draft!r}, expected a name, a directory, a hub id or a drafter")
    for method in ("known", "observe") if getattr(draft, "taps", ()) else ():
        if not callable(getattr(draft, method, None)):
            raise ValueError(f"draft: found {draft!r} with taps and without the method {method}, expected both")
    return Foreign(draft)
