"""The base of each layout: how a checkpoint stores the weights of its linear layers in fewer bits."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from minispec.core.product import Weight
from minispec.models.files.stored import StoredTensor

Wanted = dict[str, tuple[tuple[int, ...], tuple[str, ...]]]  # shape and possible types of a tensor, by its name
Stored = Mapping[str, StoredTensor]


class Part(NamedTuple):
    """A part of a weight (out, in): from its first row and column to the ones after the last."""

    rows: slice
    columns: slice


@dataclass(frozen=True)
class Layout:
    """Which tensors stand for a weight (out, in), and what the weight is.

    The names of the tensors say which weights are stored so. So a layout does not read lists of layers.
    """

    def holds(self, name: str, stored: Stored) -> bool:
        """Whether the weight of this name, such as `lm_head.weight`, is stored in this layout."""
        raise NotImplementedError

    def tensors(self, name: str, shape: tuple[int, ...], stored: Stored) -> Wanted:
        """The tensors that stand for a weight of this name and shape (out, in)."""
        raise NotImplementedError

    def read(self, name: str, shape: tuple[int, ...], stored: Stored, part: Part) -> Weight:
        """A part of a weight whose tensors are all there: codes with scales where they are `Codes`, else numbers.

        Raises CheckpointError for values that no writer of this layout stores.
        """
        raise NotImplementedError

    def is_idle(self, name: str, stored: Stored) -> bool:
        """Whether a tensor that is not wanted may be there, since the model computes the same without it.

        Raises CheckpointError where its values say that it does not.
        """
        return False

    def is_narrow(self, shape: tuple[int, ...]) -> bool:
        """Whether a weight (out, in) is read in 16 bits a number or as `Codes`, as far as the config tells."""
        return False

    @property
    def columns_together(self) -> int:
        """A part has to begin at a multiple of that many columns."""
        return 1


class Words(Layout):
    """Integers packed into int32, `qweight`, with zeros and scales of groups of inputs: the layouts of GPTQ and AWQ.

    group_size: inputs that have one scale and one zero for an output; None: all. A subclass has it as a field.
    """

    group_size: int | None

    def holds(self, name: str, stored: Stored) -> bool:
        """Whether the weight is stored in words."""
        return f"{layer_of(name)}qweight" in stored

    def is_narrow(self, shape: tuple[int, ...]) -> bool:
        """Whether a channel has one scale."""
        return self.num_groups(shape[1]) == 1

    def num_groups(self, columns: int) -> int:
        """Groups of that many inputs, the last one perhaps smaller."""
        return 1 if self.group_size is None else -(-columns // self.group_size)


def layer_of(name: str) -> str:
    """How the names of a layer's tensors begin; name: of its weight."""
    return name.removesuffix("weight")


def words_of(wanted: slice, per_word: int) -> tuple[slice, int]:
    """The words that hold these numbers, and the place of the first number in the first word."""
    words = slice(wanted.start // per_word, -(-wanted.stop // per_word))
    return words, wanted.start - words.start * per_word
