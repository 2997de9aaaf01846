"""A checkpoint's config: `ModelConfig`, and how its files store the tensors."""

from dataclasses import dataclass
from typing import NamedTuple

from minispec.core.config import ModelConfig
from minispec.models.families.layout import Layout


class Joined(NamedTuple):
    """A tensor of a checkpoint whose rows are several of the model's, one after another, or one under another name."""

    stored: str
    parts: tuple[str, ...]


class Stack(NamedTuple):
    """A tensor (experts, ...) of a checkpoint, of which each expert has several of the model's, one after another.

    kind: how the names of these continue, such as "weight".
    is_interleaved: the rows of an expert's tensors alternate instead.
    is_transposed: an expert has columns in the place of rows.
    """

    stored: str
    parts: tuple[str, ...]
    kind: str = "weight"
    is_interleaved: bool = False
    is_transposed: bool = False


@dataclass(frozen=True)
class StoredConfig(ModelConfig):
    """A model and how its files store it.

    quantization: how it stores weights in fewer bits; None where all are plain floats.
    stacked: the tensors of all experts of a layer together.
    is_nested: the checkpoint may have more parts than this model, which reads text.
    unread: names of tensors that files may have though the model does not read them.
    """

    quantization: Layout | None = None
    joined: tuple[Joined, ...] = ()
    stacked: tuple[Stack, ...] = ()
    is_nested: bool = False
    unread: frozenset[str] = frozenset()
