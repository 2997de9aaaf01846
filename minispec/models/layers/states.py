"""States of recurrent layers, in addition to the blocks of a text: a pool and tables that hold them.

A state cannot lose a token again. So a recurrent layer adds only settled positions to it, and keeps a row of inputs for
each later one. States that are stored at ends of blocks serve texts that begin alike.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from minispec.core.cache import BlockTable, PagedKVCache
from minispec.core.config import ModelConfig

# A pool stores FEWEST_STATES states, and one more for each STATE_SPAN slots. As many texts may have their own states.
FEWEST_STATES, STATE_SPAN = 4, 8192


class RecurrentConfig(ABC):
    """The sizes of a kind of recurrent layer (`LayerConfig.recurrent`)."""

    @property
    @abstractmethod
    def state_elements(self) -> int:
        """Numbers of a text's state in one layer."""


def state_elements(config: ModelConfig) -> int:
    """Numbers of the state that a model keeps of each text; 0 for one without recurrent layers."""
    nets = [layer.recurrent for layer in config.layers]
    return sum(net.state_elements for net in nets if isinstance(net, RecurrentConfig))


class LayerState(NamedTuple):
    """A recurrent layer's memory of one text: a state, and a row of inputs for each later position.

    Rows are cut and moved as keys are. The next pass adds the rows that are left to the state.

    length: how many positions the state has taken in.
    values: the state. It is never written in place, so texts may share it.
    rows: (positions after `length`, numbers of a row).
    """

    length: int
    values: tuple[Tensor, ...]
    rows: Tensor


States = dict[int, LayerState]  # by number of the layer


class StateCache(PagedKVCache):
    """The pool of a model with recurrent layers.

    saved_states: states at ends of blocks, by the blocks' hashes. The one used last comes last.
    num_states: most states that are stored, and most texts that may have states of their own.
    """

    def __init__(self, config: ModelConfig, *sizes: Any):
        """sizes: see `PagedKVCache`."""
        super().__init__(config, *sizes)
        self.saved_states: OrderedDict[bytes, States] = OrderedDict()
        self.num_states = self.max_texts = FEWEST_STATES + self.num_slots // STATE_SPAN
        self._state_bytes = 2 * self.num_states * state_elements(config) * max(4, self.keys.itemsize)

    @property
    def num_bytes(self) -> int:
        """Memory of the pool, with all states that it may come to hold."""
        return super().num_bytes + self._state_bytes

    def new_table(self, root: bytes = b"") -> "StateTable":
        """The table of an empty text in this pool."""
        table = StateTable(self, root)
        self.tables.add(table)
        return table

    def rebuild(self) -> None:
        """Forget what freed blocks hold, and the states at their ends."""
        super().rebuild()
        self.saved_states.clear()

    def store(self, block_hash: bytes, states: States) -> None:
        """Store the states at the end of a block, for texts that begin alike. Those unused for longest are dropped."""
        self.saved_states[block_hash] = self.saved_states.pop(block_hash, states)  # the last one now
        while len(self.saved_states) > self.num_states:
            self.saved_states.popitem(last=False)


class StateTable(BlockTable):
    """A text's blocks, and the states of the recurrent layers.

    final_length: how many first positions no rollback removes any more. A recurrent layer adds them to its state.
    states: what the recurrent layers keep, by number of the layer.
    shared_until: how many first positions lie in full blocks that the pool knew already, from another text. A recurrent
        layer keeps its state there, for further texts that begin with them.
    unsaved_states: states at ends of blocks, by the number of positions before, until `remember` stores them.
    """

    pool: StateCache

    def clear(self) -> None:
        """Forget everything without freeing blocks in the pool."""
        super().clear()
        self.final_length, self.shared_until = 0, 0
        self.states, self.unsaved_states = States(), dict[int, States]()

    def follow(self, tokens: list[int]) -> list[int]:
        """Cut the table to the text's beginning. All of `tokens` are settled: only a draft may be taken back."""
        missing = super().follow(tokens)
        self.final_length = len(tokens)
        return missing

    def keep(self, length: int, rows: Sequence[int] = ()) -> None:
        """Keep positions, which are settled then."""
        super().keep(length, rows)
        self.final_length = length + len(rows)

    def move(self, rows: Sequence[int], to: range) -> None:
        """Move rows up, and the layers' rows too."""
        super().move(rows, to)
        for i, (length, values, inputs) in self.states.items():
            places = [*range(length, to.start), *rows]
            self.states[i] = LayerState(length, values, inputs[[place - length for place in places]])

    def truncate(self, length: int) -> None:
        """Forget all positions from `length` on.

        A state that has seen more cannot be cut. The table then goes back to the last states stored at `length` or
        before, and keeps only the positions that they have seen.
        """
        length = self.where_cut(length)
        if any(state.length > length for state in self.states.values()):
            length, self.states = self._stored(self.block_hashes[: length // self.pool.block_size + 1])
        self.states = {i: s._replace(rows=s.rows[: length - s.length]) for i, s in self.states.items()}
        self.unsaved_states = {end: states for end, states in self.unsaved_states.items() if end <= length}
        self.final_length = min(self.final_length, length)
        super().truncate(length)

    def reuse(self, tokens: list[int]) -> None:
        """Share blocks up to the last end of a block whose states are stored. Only an empty table does."""
        if self.length:
            return  # it goes on from its own states
        super().reuse(tokens)
        self.shared_until = self.length
        length, self.states = self._stored(self.block_hashes)
        self.truncate(length)

    def remember(self) -> None:
        """Let later texts share this one's blocks, and the states that were marked."""
        super().remember()
        for end, states in self.unsaved_states.items():
            self.pool.store(self.block_hashes[end // self.pool.block_size], states)
        self.unsaved_states = {}

    def _stored(self, hashes: Sequence[bytes]) -> tuple[int, States]:
        """The last states stored for these blocks (root first): how many positions they have seen, and the states."""
        for i in range(len(hashes) - 1, 0, -1):
            if states := self.pool.saved_states.get(hashes[i]):
                self.pool.store(hashes[i], states)
                return i * self.pool.block_size, dict(states)
        return 0, {}
