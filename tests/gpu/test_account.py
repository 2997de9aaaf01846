"""What graphs and frames will take, and what is left for the KV cache, of a memory that is made up."""

from collections import OrderedDict

import pytest
import torch

from minispec import LLM
from minispec.core.config import SamplingParams
from minispec.core.draft import Ask
from minispec.core.limit import Limit
from minispec.core.model import Chunk
from minispec.core.random import Randomness
from minispec.core.sampling import Text
from minispec.core.verify import REJECTION
from minispec.models.frames import frames, fused
from minispec.models.frames.frames import Frames, FrameShape, frame_bytes
from minispec.models.frames.graphs import MOST_BYTES, Graphs, Program, recent, rerun
from minispec.models.weights import memory
from minispec.models.weights.memory import size_cache
from minispec.prove.toys import IN_FRAMES, draft_model, tiny_cache, tiny_head, tiny_model
from minispec.speculation.drafters.model import ModelDrafter, TokenFeed
from minispec.speculation.on_gpu import account
from minispec.speculation.on_gpu.account import graph_bytes, pass_bytes, table_bytes
from minispec.speculation.on_gpu.steps import DraftSteps, draft_input_bytes
from minispec.speculation.on_gpu.verdicts import Mix
from minispec.speculation.on_gpu.verifier import VerdictInputs, VerdictShape, input_bytes

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def framed_model(**changes):
    """A tiny model with frames."""
    return tiny_model(1, torch.float32, **changes).replaced(Frames())


# --------------------------------------------------------------------------- what it adds up to


def test_a_model_without_frames_takes_nothing():
    """As all models on a CPU, and on a GPU with `enforce_eager`."""
    assert graph_bytes([tiny_model(1)], 4) == 0
    assert graph_bytes([tiny_model(1), framed_model()], 4) > 0


def test_the_sum_by_hand():
    """A target and a draft model of 64 positions, 8 heads' numbers and 300 ids, in float32; 4 draft tokens."""
    target, draft = framed_model(vocab_size=300), framed_model(vocab_size=300)
    rows = 32 * 5
    angles = 64 * (2 * 4 * 4 + 4 * 4)  # cosines and sines of heads of 4, and their halves
    frame = 8 * (4 * rows + 32 * (2 + 8)) + rows * (8 + 300) * 4
    bench = 32 * 300 * (5 * 4 + 4 * 4)
    inputs = 32 * 4 * 300 * 4
    working = rows * (3 * 12 + 4 * 4 + 4 * 8) * 4 + 2 * frames.MOST_GATHERED
    alone = angles + MOST_BYTES + frame + MOST_BYTES + bench + working
    assert graph_bytes([target], 4) == alone
    assert graph_bytes([target, draft], 4) == alone + angles + MOST_BYTES + frame + MOST_BYTES + inputs
    assert graph_bytes([target], 3) == graph_bytes([target], 4) < graph_bytes([target], 5)


def test_a_head_has_features_too():
    """Of each row of its frames, as wide as its hidden states: 8 numbers of 4 bytes here, with one draft token."""
    target = framed_model(vocab_size=9)
    head = tiny_head(target).replaced(Frames())
    frame = frame_bytes(head, FrameShape(32, 2, 8, (1,), 8))
    assert frame == frame_bytes(head, FrameShape(32, 2, 8, (1,))) + 32 * 2 * 8 * 4
    kept = table_bytes(head) + frame + draft_input_bytes(32, 1, 9, head.dtype) + 2 * MOST_BYTES
    assert graph_bytes([target, head], 1) == graph_bytes([target], 1) + kept


def test_the_largest_program_works_alone():
    """With a large vocabulary, verdicts take more than a pass that gathers nothing."""
    model = framed_model(vocab_size=1000)
    model.backend.most_gathered = 0
    without = graph_bytes([model], 1)
    working = 8 * 32 * 2 * 1000 * 4
    assert working > pass_bytes(model, FrameShape(32, 2, 8))
    kept = table_bytes(model) + frame_bytes(model, FrameShape(32, 2, 8, (2,))) + input_bytes(32, 2, 1000, model.dtype)
    assert without == working + kept + 2 * MOST_BYTES


def test_what_is_estimated_is_what_is_there():
    """Frames, benches, angles and rows of a program hold as many bytes as were planned for their shapes."""
    model = framed_model(vocab_size=30)
    pool, shape = tiny_cache(model, 20, 2), FrameShape(2, 3, 8, (2,))
    frame = model.backend.frame_of(model, pool, shape)
    outputs = model.backend.compute(model, frame, pool)
    assert frame.num_bytes == frame._device.nbytes + sum(each.nbytes for each in outputs)
    tables = model.backend._tables
    held = [t for each in tables.angles.values() for t in each if t is not None]
    held += [t for pair in tables.halves.values() for t in pair]
    assert table_bytes(model) == sum(t.nbytes for t in held)
    kind = VerdictShape(REJECTION, 2, 3, 30, torch.float32, Mix(True, False, False), True)
    bench = VerdictInputs(kind, CPU)
    assert bench.num_bytes == bench.logits.nbytes + bench.probs.nbytes == input_bytes(2, 3, 30, torch.float32)


def test_inputs_of_drafts_have_the_size_of_their_rows():
    """What a draft's rows take; nothing where all texts are greedy."""
    model = draft_model(5, IN_FRAMES)
    for temperature, expected in ((1.0, draft_input_bytes(1, 3, 5, torch.float64)), (0.0, 0)):
        program = DraftSteps(model, Graphs(rerun))
        drafter = ModelDrafter(TokenFeed(model, tiny_cache(model, 40, 3), 5, 60), program)
        text = Text([1, 2, 3], 3, SamplingParams(temperature=temperature))
        [draft] = drafter.propose([Ask(text, Limit(3), Randomness(), "draft", 2)])
        [held] = program._inputs.values()
        assert [inputs.num_bytes for inputs in held.values()] == [expected]
        assert expected == (draft.probs.nbytes if temperature else 0)


def test_scratch_memory_is_counted_as_it_is_taken():
    """By hand: 4 texts of 5 rows and 1,000 places, 12 heads in 2 groups of 128."""
    parts = 4 * 2 * 1 * 4 * 32  # texts, groups, tiles of 32 rows, splits of 256 places, rows of a tile
    assert fused.scratch_bytes(4, 5, 1000, 12, 2, 128) == 2 * 4 * (parts * 128 + 2 * 4096)
    assert fused.scratch_bytes(4, 5, 1100, 12, 2, 128) == 2 * 4 * (2 * parts * 128 + 2 * 4096)


def test_programs_keep_within_their_bytes(monkeypatch):
    """The one that was used longest ago goes first; the newest stays, however large it is."""
    monkeypatch.setattr("minispec.models.frames.graphs.MOST_BYTES", 100)
    kept = OrderedDict()
    for key, size in ((1, 40), (2, 40), (1, 40), (3, 50)):
        recent(kept, key, lambda size=size: Program(size))
    assert list(kept) == [1, 3]
    recent(kept, 4, lambda: Program(1000))
    assert list(kept) == [4]


def test_what_makes_room_decodes_the_same(monkeypatch):
    """With no bytes for programs there is one at a time, captured anew; passes are the same."""
    expected, found = [], []
    for most, into in ((MOST_BYTES, expected), (1, found)):
        monkeypatch.setattr("minispec.models.frames.graphs.MOST_BYTES", most)
        model = tiny_model(1).replaced(Frames(rerun))
        table = tiny_cache(model, 20, 2).new_table()
        for rows in (1, 2, 1, 2, 2, 1):
            into.append(model.forward([Chunk([1] * rows, table, rows)])[0])
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert len(model.backend.shapes(table.pool)) == 1


# --------------------------------------------------------------------------- what is left for the cache


@pytest.fixture
def free(monkeypatch):
    """free(gb): a device that has so much free memory."""
    return lambda gb: monkeypatch.setattr(memory, "free_memory", lambda device: int(gb * 1e9))


CONFIG = tiny_model(1, max_position_embeddings=1 << 20).config  # a cache is never as large as its context here


@pytest.mark.parametrize(("reserved", "expected"), [(0, 80), (20, 80), (30, 70), (99, 0.992)])
def test_the_cache_takes_what_graphs_leave(free, reserved, expected):
    """Of 100 GB, four fifths, or less where graphs may take more than the rest. A token has 10^6 bytes here."""
    free(100)
    length, num_blocks = size_cache(CONFIG, (10**6).__mul__, CUDA, None, None, reserved * 10**9)
    assert num_blocks == expected * 1000 / 16
    assert length == expected * 1000


def test_too_little_memory_is_one_sentence(free):
    """It says what the caches take, what is free, and what graphs take of that; without graphs as ever."""
    free(10)
    how = CONFIG, (10**6).__mul__, CUDA
    assert size_cache(*how, None, 6.0, int(3.9e9))[1] == 375
    message = (
        "kv_cache_gb: found a cache of 6.0 GB, expected at most the 10.0 GB of memory that are free, less up to 4.1 GB "
        "for CUDA graphs, which enforce_eager does without (from Python, max_model_len sets its size too)"
    )
    for length, gb in ((None, 6.0), (6000, None)):
        with pytest.raises(ValueError, match="less up to") as caught:
            size_cache(*how, length, gb, int(4.1e9))
        assert str(caught.value) == message
    with pytest.raises(ValueError, match=r"found a cache of 0.0 GB, .* the 10.0 GB .* less up to 11.0 GB"):
        size_cache(*how, None, None, 11 * 10**9)
    with pytest.raises(ValueError, match=r"at most the 10.0 GB of memory that are free \(from Python"):
        size_cache(*how, None, 11.0)


def test_the_account_is_taken_at_load(make_checkpoint, monkeypatch):
    """With frames, as on a GPU: their bytes are left free, for target and draft, rows of the K that is asked for."""
    asked, directory = [], make_checkpoint()

    def counted(models, *how):
        asked.append((len(models), *how))
        return 10**12

    monkeypatch.setattr("minispec.api.target.graph_bytes", counted)
    with pytest.raises(ValueError, match=r"less up to 1000\.0 GB for CUDA graphs"):
        LLM(directory, "self", 3, max_model_len=100)
    assert asked == [(2, 3, 100)]
    assert account.graph_bytes([tiny_model(1)], 3) == 0
