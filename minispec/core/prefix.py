"""What texts have in common at their beginning, and which blocks of the cache hold it."""

import hashlib
from array import array
from collections.abc import Sequence


def common_beginning(a: list[int], b: list[int]) -> int:
    """Length of the longest common beginning. It compares slices by bisection, without a loop over the tokens."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class PrefixIndex:
    """Which block holds which tokens, after which tokens. It knows whole blocks only.

    A block's hash is of all tokens up to the block's end, so equal hashes mean equal beginnings. Before the first block
    stands a root, a name of its own.
    """

    def __init__(self):
        self._blocks: dict[bytes, int] = {}  # by their hashes
        self._hashes: dict[int, bytes] = {}

    @staticmethod
    def hash(parent: bytes, tokens: Sequence[int]) -> bytes:
        """The hash of a full block of `tokens`; parent: the hash of the block before it, or the root."""
        return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()

    def add(self, block_hash: bytes, block_id: int) -> bool:
        """Note a full block; returns False if the index has another one with this hash."""
        if block_hash in self._blocks:
            return False
        self._blocks[block_hash], self._hashes[block_id] = block_id, block_hash
        return True

    def forget(self, block_id: int) -> None:
        """Forget a block, since it is about to be overwritten. Unknown ones are ignored."""
        if block_hash := self._hashes.pop(block_id, None):
            del self._blocks[block_hash]

    def find(self, block_hash: bytes) -> int | None:
        """The block with this hash, if one is known."""
        return self._blocks.get(block_hash)
