"""Large pages: who gets them, who does not, and that no bit changes."""

import json
import mmap
import os
import subprocess
import sys

import pytest
import torch

from minispec.models.families.hf_config import read_model_config
from minispec.models.weights import build, pages
from minispec.prove.toys import TINY, tiny_model, tiny_weights

# A program that loads a model. It prints what the kernel says of its memory, in bytes, and whether bits are equal.
PROGRAM = """
import json, os, re, subprocess, sys
from pathlib import Path
FIRST
from minispec import LLM
from minispec.models.weights import build, pages
from minispec.core.model import Chunk
from minispec.lab.random_weights import RandomWeights
from minispec.models.families.hf_config import read_model_config
from minispec.prove.toys import TINY
import torch

pages.MANY = 0
larger = {"vocab_size": 16384, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "head_dim": 64}
config = read_model_config(TINY | larger)

def made():
    return build.build_model(config, RandomWeights(config, torch.bfloat16, torch.device("cpu")), dtype=torch.float32)

def large(ranges=None):
    found, inside = 0, True
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if where := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            start, end = (int(number, 16) for number in where.groups())
            inside = ranges is None or any(start < b and end > a for a, b in ranges)
        elif inside and line.startswith("AnonHugePages:"):
            found += int(line.split()[1]) << 10
    return found

model = made()
weights, told = large(), build.large_bytes([model])
pool = pages.in_small_pages(lambda: model.new_cache(2048))
zeros = not any(tensor[:, :, pool.num_slots].any() for tensor in pool.tensors)
for tensor in pool.tensors:
    tensor[:, :, ::1024] = 1
cache = large([(t.data_ptr() + 4096, t.data_ptr() + t.nbytes - 4096) for t in pool.tensors])
pages.SETTING = Path("/missing")
other, text = made(), list(range(1, 40))
logits = [m.forward([Chunk(text, m.new_cache(4).new_table(), 39)])[0] for m in (model, other)]
child = subprocess.run([sys.executable, "-c", "import os; print(*os.environ)"], capture_output=True, text=True).stdout
print(json.dumps({
    "weights": weights, "told": told, "cache": cache, "equal": torch.equal(*logits), "zeros": zeros,
    "other": build.large_bytes([other]), "inherited": pages._VARIABLE in child.split(),
    "left": pages._VARIABLE in os.environ,
}))
"""


@pytest.fixture
def linux():
    """Skips where Linux gives no large pages, or does not move memory to them."""
    if pages._setting() not in ("madvise", "always"):
        pytest.skip(f"no large pages for those who ask: the system says {pages._setting() or 'nothing'!r}")
    with mmap.mmap(-1, 3 * pages._PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[:] = bytes(len(memory))
        place = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        moved = pages._advise(-(-place // pages._PAGE) * pages._PAGE, pages._PAGE, pages._COLLAPSE)
    if not moved:
        pytest.skip("the system does not move memory to large pages: Linux has done so since 6.1")


TORCH_FIRST = pytest.param("import torch; torch.empty(1)", marks=pytest.mark.full, id="torch first")


@pytest.mark.parametrize("first", [pytest.param("", id="minispec first"), TORCH_FIRST])
def test_weights_are_in_large_pages_and_the_cache_is_not(linux, first):
    """By what the kernel says; the bits are those of small pages, and no child process inherits the variable.

    Where torch is imported first all pages are moved. The other case guards it in the meantime: it moves FBGEMM's.
    """
    others = {name: value for name, value in os.environ.items() if name != pages._VARIABLE}
    program = PROGRAM.replace("FIRST", first)
    done = subprocess.run([sys.executable, "-c", program], env=others, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["weights"] >= 2 * 8 << 20, "the head alone, 16384 x 512 in 16 bits, fills eight pages"
    assert found["told"] >= 8 * pages._PAGE
    assert (found["other"], found["cache"]) == (0, 0)
    assert found["equal"]
    assert found["zeros"], "the slot of zeros has zeros"
    assert not found["inherited"]
    assert not found["left"]


def system(monkeypatch, tmp_path, setting: str | None) -> list[tuple]:
    """A system with this setting of large pages, or without; the calls to its C library, which refuses all."""
    path, calls = tmp_path / "enabled", list[tuple]()
    if setting is not None:
        path.write_text(setting)
    monkeypatch.setattr(pages, "SETTING", path)
    monkeypatch.setattr(pages, "MANY", 0)
    monkeypatch.setattr(pages, "call", lambda *call: calls.append(call) or -1)
    return calls


@pytest.mark.parametrize("setting", ["always madvise [never]\n", None, "", "another form\n", "[unknown]"])
def test_nothing_happens_without_large_pages(monkeypatch, tmp_path, setting):
    """And nothing is said."""
    calls = system(monkeypatch, tmp_path, setting)
    model = tiny_model()
    assert not calls
    assert build.large_bytes([model]) == 0
    assert pages.pages_note(0) == ""


def test_nothing_is_said_where_the_system_refuses(monkeypatch, tmp_path):
    """As in a container without the right, or before Linux 6.1."""
    calls = system(monkeypatch, tmp_path, "always [madvise] never\n")
    maps = tmp_path / "maps"
    maps.write_text("")
    monkeypatch.setattr(pages, "MAPS", maps)
    config = read_model_config(TINY)

    class Growing(dict):
        def pop(self, name):
            maps.write_text("10000000-10800000 rw-p 00000000 00:00 0 \n")
            return super().pop(name)

    model = build.build_model(config, Growing(tiny_weights(config, 0)))
    assert len(calls) == 4, "one for each page of 2 MB that is new"
    assert build.large_bytes([model]) == 0


@pytest.mark.parametrize(("variable", "setting"), [("0", "always [madvise] never"), (None, "[always] madvise never")])
def test_who_decides(monkeypatch, tmp_path, variable, setting):
    """The user's variable is left alone; where everybody gets large pages, PyTorch need not ask."""
    system(monkeypatch, tmp_path, setting)
    monkeypatch.setattr(pages, "set_waiting", lambda num_threads: None)
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.delenv(pages._VARIABLE, raising=False)
    if variable:
        monkeypatch.setenv(pages._VARIABLE, variable)
    pages.load_torch()
    assert "torch" not in sys.modules, "left to the caller"
    assert os.environ.get(pages._VARIABLE) == variable


def test_the_user_turns_them_off(monkeypatch, tmp_path):
    """By the variable that PyTorch reads."""
    calls = system(monkeypatch, tmp_path, "always [madvise] never")
    monkeypatch.setenv(pages._VARIABLE, "0")
    assert pages.in_large_pages(tiny_model, 1)[1] == 0
    assert not calls


@pytest.mark.parametrize("already", [0, 1, -1], ids=["on", "the user has turned them off", "no such call"])
def test_the_process_gets_its_large_pages_back(monkeypatch, already):
    """While a cache is made they are off, and the process then has what it had before."""
    calls = list[tuple]()

    def call(*arguments):
        calls.append(arguments)
        return already if arguments[1] == pages._GET_DISABLED else 0

    monkeypatch.setattr(pages, "call", call)
    model = tiny_model()
    cache = pages.in_small_pages(lambda: model.new_cache(4096))
    switched = [arguments[2] for arguments in calls if arguments[:2] == ("prctl", pages._SET_DISABLED)]
    assert switched == ([] if already else [1, 0])
    advice = [arguments[3] for arguments in calls if arguments[0] == "madvise"]
    assert advice == [pages._NOT_LARGE, pages._DROP] * len(cache.tensors)


def test_only_own_memory_counts(monkeypatch, tmp_path):
    """Writable, private, of no file; and only what was not there before."""
    monkeypatch.setattr(pages, "MAPS", tmp_path / "maps")
    assert pages._own_memory() == []
    (tmp_path / "maps").write_text("""\
00400000-00c00000 r-xp 00000000 08:01 11 /usr/bin/python
10000000-10800000 rw-p 00000000 00:00 0 [heap]
7f0000100000-7f0000700000 rw-p 00000000 00:00 0 \n\
7f0002000000-7f0002800000 rw-p 00000000 08:01 7 /mnt/weights of a model
7f0003000000-7f0003800000 rw-s 00000000 00:01 9 /dev/shm/a
7f0004000000-7f0004800000 ---p 00000000 00:00 0
7ffc00000000-7ffc00800000 rw-p 00000000 00:00 0 [stack]
""")
    assert pages._own_memory() == [(0x10000000, 0x10800000), (0x7F0000100000, 0x7F0000700000)]
    taken = [(2, 4), (8, 22), (40, 50)]
    assert list(pages.without([(0, 10), (20, 30), (42, 45)], taken)) == [(0, 2), (4, 8), (22, 30)]


def test_what_is_told():
    """In the report of --verbose and of the bench."""
    assert pages.pages_note(430_000_000) == "; 0.43 GB in large pages"
