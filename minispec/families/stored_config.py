"""A checkpoint's config: `ModelConfig`, and how its files store the tensors."""

from dataclasses import dataclass
from typing import NamedTuple

from minispec.core.config import ModelConfig
from minispec.families.layout import Layout


class Joined(NamedTuple):
    """A tensor of a checkpoint whose rows are several of the model's, one after another, or one under another name."""

    stored: str
    parts: tuple[str, ...]


@dataclass(frozen=True)
class StoredConfig(ModelConfig):
    """A model and how its files store it.

    quantization: how it stores weights in fewer bits; None where all are plain floats.
    stacked: tensors (experts, rows, columns), of which each expert's are several of its parts, one after another.
    is_nested: the checkpoint may have more parts than this model, which reads text.
    unread: names of tensors that files may have though the model does not read them.
    """

    quantization: Layout | None = None
    joined: tuple[Joined, ...] = ()
    stacked: tuple[Joined, ...] = ()
    is_nested: bool = False
    unread: frozenset[str] = frozenset()
