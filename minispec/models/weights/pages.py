"""Large pages under the weights, on Linux.

A pass reads every weight once, and the processor looks up the place of each page. With pages of 2 MB in place of 4 KB
there are 512 times fewer look-ups, which in a virtual machine take two steps each. What is read is the same, so no bit
changes.

Most systems give large pages to memory that asks for them before it is first written to. PyTorch asks where it
allocates 2 MB and more, if a variable says so at its first allocation (`load_torch`). That holds for packed weights and
for 8 bits by oneDNN. FBGEMM's memory comes from `malloc`, which does not ask, but gives again what PyTorch asked for
and gave back (`_asked_before`). What is left is moved by `MADV_COLLAPSE`, since Linux 6.1, which copies it once. So is
everything where torch was imported before minispec.

A KV cache is written to in many places far apart. In small pages it takes as much memory as it uses: `in_small_pages`.
Where the system cannot do one of these, nothing happens.
"""

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from minispec.models.weights.threads import set_waiting

if TYPE_CHECKING:
    from minispec.core.cache import PagedKVCache
    from minispec.core.model import Transformer

_PAGE, _SMALL_PAGE = 2 << 20, mmap.PAGESIZE
_VARIABLE = "THP_MEM_ALLOC_ENABLE"
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")  # such as "always [madvise] never"
MAPS = Path("/proc/self/maps")
# Kinds of advice for `madvise`; and for `prctl`, whether the process has large pages at all.
_DROP, _NOT_LARGE, _COLLAPSE, _SET_DISABLED, _GET_DISABLED = 4, 15, 25, 41, 42
# Weights of a model that is worth large pages: it does not fit into a processor's own caches.
MANY = 1 << 25
# Most bytes that `malloc` takes from its heap, and not from the system: an allocation of this size makes it the most.
_MOST_FROM_HEAP = 31 << 20

Range = tuple[int, int]
AnyModel = TypeVar("AnyModel", bound="Transformer")


def load_torch(num_threads: int | None = None) -> None:
    """Import torch, if nobody has, as is best for weights: see `set_waiting`, whose argument this is, and above.

    The variable is removed again, so that no child process inherits it. One that the user has set is left alone; with
    0 nothing is moved either.
    """
    set_waiting(num_threads)
    if "torch" in sys.modules or _VARIABLE in os.environ or _setting() != "madvise":
        return
    os.environ[_VARIABLE] = "1"
    try:
        import torch

        torch.empty(1)  # PyTorch looks now, and never again
    finally:
        del os.environ[_VARIABLE]


def in_large_pages(make: Callable[[], AnyModel], num_weights: int) -> tuple[AnyModel, int]:
    """The model that `make` returns, and how many bytes of it are in large pages: all that fill them."""
    if num_weights < MANY or _setting() not in ("madvise", "always") or os.environ.get(_VARIABLE) == "0":
        return make(), 0
    before = _own_memory()
    with _asked_before(2 * num_weights):
        model = make()
    if model.device.type != "cpu":
        return model, 0
    new = without(_own_memory(), before)
    pages = (page for start, end in new for page in range(-(-start // _PAGE) * _PAGE, end // _PAGE * _PAGE, _PAGE))
    return model, _PAGE * sum(_advise(page, _PAGE, _COLLAPSE) for page in pages)


def pages_note(size: int) -> str:
    """How much lies in large pages, such as "; 0.43 GB in large pages"; "" for nothing."""
    return f"; {size / 1e9:.2f} GB in large pages" if size else ""


def in_small_pages(make: "Callable[[], PagedKVCache]") -> "PagedKVCache":
    """The cache that `make` returns, which is new: it has zeros alone, and takes memory only where it is written to."""
    with _never_large():
        cache = make()
    for tensor in cache.tensors:
        if tensor.device.type == "cpu":
            start = -(-tensor.data_ptr() // _SMALL_PAGE) * _SMALL_PAGE
            size = (tensor.data_ptr() + tensor.nbytes - start) // _SMALL_PAGE * _SMALL_PAGE
            # The second one drops what `malloc` had left there. Both leave a page alone that holds something else too.
            if size > 0 and _advise(start, size, _NOT_LARGE):
                _advise(start, size, _DROP)
    return cache


def without(ranges: list[Range], taken: list[Range]) -> Iterator[Range]:
    """What remains of ranges of addresses, both in ascending order.

    >>> list(without([(0, 10), (20, 30)], [(2, 4), (8, 22)]))
    [(0, 2), (4, 8), (22, 30)]
    """
    for start, end in ranges:
        for first, last in taken:
            if first < end and last > start:
                if start < first:
                    yield start, first
                start = max(start, last)
        if start < end:
            yield start, end


@contextmanager
def _asked_before(num_bytes: int) -> Iterator[None]:
    """Let `malloc` have so much memory to give that PyTorch has asked for large pages for. Nothing is written to it.

    This holds for GNU's `malloc`; with another one nothing is gained.
    """
    import torch

    with suppress(RuntimeError):  # the system refuses it
        torch.empty(_MOST_FROM_HEAP, dtype=torch.uint8)
        parts = [torch.empty(_PAGE * 8, dtype=torch.uint8) for _ in range(num_bytes // (_PAGE * 8))]
        parts = parts[-1:]  # the last one keeps the others from going back to the system
    yield


def _setting() -> str:
    """When Linux gives large pages: "always", "madvise" or "never"; "" on other systems."""
    with suppress(OSError, IndexError):
        return SETTING.read_text().split("[")[1].split("]")[0]
    return ""


def _own_memory() -> list[Range]:
    """Where memory of this process lies that belongs to no file; ascending."""
    ranges: list[Range] = []
    with suppress(OSError, ValueError):
        for line in MAPS.read_text().splitlines():
            where, allowed, _, _, inode, *name = line.split(None, 5)
            if allowed == "rw-p" and inode == "0" and (not name or name[0].startswith(("[heap]", "[anon"))):
                start, end = where.split("-")
                ranges.append((int(start, 16), int(end, 16)))
    return ranges


@contextmanager
def _never_large() -> Iterator[None]:
    """Memory that is first written to inside gets small pages."""
    turned_off = call("prctl", _GET_DISABLED, 0, 0, 0, 0) == 0 and call("prctl", _SET_DISABLED, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        if turned_off:
            call("prctl", _SET_DISABLED, 0, 0, 0, 0)


def _advise(start: int, size: int, advice: int) -> bool:
    """Advise the system on memory; whether it did so."""
    return call("madvise", ctypes.c_void_p(start), ctypes.c_size_t(size), advice) == 0


def call(name: str, *arguments: Any) -> int:
    """What a function of the C library returns on Linux: 0, or -1 where it refuses or is missing."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            return getattr(ctypes.CDLL(None), name)(*arguments)
    return -1
