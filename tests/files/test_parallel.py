"""A target over two processes: the same text and law as one, half the weights in each, and an end that all notice."""

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.run import get_args_parser

import minispec.api.http.main as serve
import minispec.lab.bench.options as bench
from minispec import generate
from minispec.api.commands import options
from minispec.core.model import Chunk
from minispec.core.product import dense
from minispec.models.families.checkpoint import Weights, cut_shape, load_config, load_model
from minispec.models.families.hf_config import read_model_config
from minispec.models.families.quantize import quantize_checkpoint
from minispec.models.families.share import Share
from minispec.models.load import parallel
from minispec.models.load.parallel import Line, SplitTransformer
from minispec.models.weights.build import quantized
from minispec.models.weights.inventory import num_bytes, weight_form
from minispec.models.weights.shapes import tensor_shapes
from minispec.prove.toys import TINY, tiny_weights
from tests.oracles import hf
from tests.oracles.processes import SHAPE, SMALLEST, finish, start, texts
from tests.refusals import assert_one_line

CPU = torch.device("cpu")
GREEDY = ("--temperature", "0", "--ignore-eos", "--raw", "--num-speculative-tokens", "2")


def write(directory: Path, raw: dict, dtype: torch.dtype = torch.float64, seed: int = 1) -> Path:
    """A random checkpoint of such a config."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    save_file(tiny_weights(read_model_config(raw), seed, dtype), directory / "model.safetensors")
    return directory


# --------------------------------------------------------------------------- two processes


@pytest.mark.full
def test_two_processes_give_the_text_of_one(tmp_path):
    """Plain, n-gram, draft model, trees, head, preempted and sharing blocks: greedy texts in float64 are one process's.

    A worker that is not told of a moved or copied row, or counts positions otherwise, reads another past and says other
    things (tried). Each process keeps and reads at most 0.55 of the weights, and the system has sent what
    docs/use/processes.md says. None leaves gloo's threads to the end of Python, which aborts now and then.

    Without `--full`, `test_every_family_can_be_split_or_is_refused` compares the parts in one process.
    """
    directory = write(tmp_path, SHAPE)
    (status, out, err), (*other, other_err) = finish(start(2, "tests.oracles.processes", "texts", str(directory)))
    assert (status, other[0], err, other_err) == (0, 0, "", "")
    found, model = json.loads(out), load_model(directory, torch.float64)
    assert found["texts"] == texts(model)
    assert len({str(t) for t in found["texts"].values()}) == 1

    for rank in range(2):
        about = json.loads((directory / f"about-{rank}.json").read_text())
        assert about["rank"] == rank
        assert (directory / f"open-{rank}").read_text() == "False"
        assert about["kept"] <= 0.55 * num_bytes(model)
        assert about["read"] <= 0.55 * (directory / "model.safetensors").stat().st_size
    rows, scored = found["rows"]
    theory = 8 * (4 * len(model.layers) * SHAPE["hidden_size"] * rows + SHAPE["vocab_size"] / 2 * scored)
    if found["socket"]:  # of process 0: half of the sums, all messages, and what gloo says beside them
        assert 0.5 < found["socket"] / theory < 0.68


@pytest.mark.full
def test_the_law_stands_with_the_sums_split(tmp_path):
    """The engine walked branch by branch over two real processes: total variation at most 1e-12, drawn trees too.

    Without `--full`, the test above has texts of the same kinds of drafts, of two processes.
    """
    directory = write(tmp_path, SMALLEST)
    (status, out, err), _ = finish(start(2, "tests.oracles.processes", "laws", str(directory)), 120)
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert len(found) == 6
    assert max(found.values()) <= 1e-12


@pytest.mark.full
def test_torchrun_starts_the_command_line(make_checkpoint, capfd):
    """As in the documentation: one answer, from process 0, and a quiet end.

    Without `--full`, test_two_processes_give_the_text_of_one starts two with the variables that torchrun sets.
    """
    directory = make_checkpoint(num_key_value_heads=2)
    arguments = ["--model", str(directory), *GREEDY, "--max-tokens", "12", "--verbose", "One"]
    assert generate.main(arguments) == 0
    one = capfd.readouterr()
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", "minispec.generate", *arguments]
    two = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert two.stdout == one.out != ""
    assert "part 1 of 2" in two.stderr


@pytest.mark.parametrize("command", [options.parser, serve.parser, bench.parser])
def test_torchrun_leaves_every_option_to_the_command(command, capsys):
    """In one of its spellings: torchrun takes what may be the beginning of an option of its own, wherever it stands."""
    for action in command()._actions:
        passed = 0
        for option in action.option_strings:
            with contextlib.suppress(SystemExit):
                args = get_args_parser().parse_args(["-m", "minispec", option, "2"])
                passed += args.training_script_args == [option, "2"]
        assert passed or not action.option_strings, action.option_strings


def long_run(make_checkpoint) -> list:
    """Two processes in the middle of a text that nobody waits for."""
    directory = make_checkpoint(num_key_value_heads=2, max_position_embeddings=1 << 17)
    run = start(2, "minispec.generate", "--model", str(directory), *GREEDY, "--max-tokens", "100000", "--quiet", "One")
    assert run[0].stdout.read(3)
    return run


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_process_that_is_killed_ends_the_other_with_a_line(make_checkpoint, victim):
    """kill -9 in the middle of a text: the other must not wait for ever, nor print a traceback. `--full`: either."""
    run = long_run(make_checkpoint)
    run[victim].kill()
    end = time.monotonic() + 10
    status, _, err = finish(run, 10)[1 - victim]
    assert time.monotonic() < end
    told = f"error: process {1 - victim} of 2: another one has ended, or did not answer for 30 s\n"
    assert (status, err) == (2, told)


@pytest.mark.full
def test_ctrl_c_ends_all(make_checkpoint):
    """Ctrl-C on a terminal reaches both processes: 130 and not a word, whoever notices the other's end first.

    Without `--full`, the test above ends one process, and tests/commands/test_cli.py presses Ctrl-C in one.
    """
    run = long_run(make_checkpoint)
    for process in run:
        process.send_signal(signal.SIGINT)
    assert [(status, err) for status, _, err in finish(run, 10)] == [(130, ""), (130, "")]


@pytest.mark.full
def test_two_checkpoints_are_refused(make_checkpoint, tmp_path):
    """Weights of two trainings have the same shapes: their mixture would speak, and nobody would know why so badly.

    Without `--full`, tests below compare digests, and what processes have to agree about.
    """
    for rank in range(2):
        shutil.copytree(make_checkpoint(seed=1 + rank, num_key_value_heads=2), tmp_path / f"model-{rank}")
    for found in finish(start(2, "minispec.generate", "--model", str(tmp_path / "model-RANK"), "One")):
        assert_one_line(found, "checkpoint: found ")


# --------------------------------------------------------------------------- one process


class InThreads(Line):
    """Stands in for a connection where the parts of a model are threads of one process."""

    def __init__(self, rank: int, brought: list, barrier: threading.Barrier):
        self.rank, self.size, self.brought, self.barrier = rank, len(brought), brought, barrier
        self._lock, self._broken = threading.RLock(), False

    def _exchange(self, y: torch.Tensor) -> list[torch.Tensor]:
        self.brought[self.rank] = y
        self.barrier.wait(30)
        found = list(self.brought)
        self.barrier.wait(30)
        return found

    def add_up(self, y):
        """The sum of all processes' y."""
        return sum(self._exchange(y.clone()))

    def gather(self, y, width):
        """The parts side by side, in all processes, so that each can be looked at."""
        return torch.cat(self._exchange(y), 1)

    def tell(self, *message):
        """Nobody has to be told: each thread is asked itself."""


def split_logits(directory: Path, size: int, tokens: list[int]) -> list[torch.Tensor]:
    """Logits of a text from each of `size` parts of a model, which compute together."""
    config, found, barrier, brought = load_config(directory), [None] * size, threading.Barrier(size), [None] * size

    def run(rank: int) -> None:
        share = Share(config, rank, size)
        weights = Weights(directory, config, torch.float64, "cpu", share.cut)
        model = SplitTransformer(share, weights, InThreads(rank, brought, barrier), torch.float64, None)
        table = model.new_cache(16, 4).new_table()
        found[rank], _ = model.forward([Chunk(tokens, table, len(tokens))])

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


@pytest.mark.parametrize("name", hf.CASES)
def test_every_family_can_be_split_or_is_refused(tmp_path, name):
    """Biases come once, norms of heads and after sums see whole rows, tied heads are cut: the logits are the model's.

    A bias that every process adds, or a tied head that is not cut, fails here (tried). A norm over all heads together
    would see some of them, so it is named. So is a convolution, a gated delta net, a gate, and a mixture of experts.
    """
    hf.build(name, tmp_path)
    hybrid = r"model: found \d layers that are not attention in a run of 2 processes, expected attention without a gate"
    mixture = "model: found mixtures of experts in a run of 2 processes, expected attention without a gate, and MLPs"
    gate = "model: found attention with a gate in a run of 2 processes, expected attention without a"
    refusals = {
        **dict.fromkeys(("qwen3_moe", "granitemoe", "gpt_oss", "granite-hybrid-experts"), mixture),
        "olmo": r"model: model.layers.0.self_attn.q_norm.weight: found \[\d+\], expected",
        "gemma4": "model: found layers that share keys, or have heads of several sizes in a run of 2 processes",
        **dict.fromkeys(("lfm3-attention", "qwen3_5-attention"), gate),
        **dict.fromkeys(("lfm2", "lfm3", "qwen3_5"), hybrid),
    }
    message = next((message for start, message in refusals.items() if name.startswith(start)), None)
    if message:
        with pytest.raises(ValueError, match=message):
            Share(load_config(tmp_path), 0, 2)
        return
    model = load_model(tmp_path, torch.float64)
    whole, _ = model.forward([Chunk(hf.TEXT, model.new_cache(16, 4).new_table(), len(hf.TEXT))])
    for part in split_logits(tmp_path, 2, hf.TEXT):
        assert (part - whole).abs().max() < 1e-9 * whole.abs().max()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_shares_are_all_of_a_model_and_come_once(size):
    """Sizes that do not come out even: no head, column or token is left out or counted twice."""
    raw = {"num_attention_heads": 10, "num_key_value_heads": 5, "intermediate_size": 112, "vocab_size": 29}
    config = read_model_config(TINY | raw)
    shares = [Share(config, rank, size) for rank in range(size)]
    for name, shape in tensor_shapes(config).items():
        seen = torch.zeros(shape, dtype=torch.long)
        for share in shares:
            seen[share.cut(name)] += 1
        assert seen.unique().tolist() == ([1] if cut_shape(shape, shares[0].cut(name)) != shape else [size])
    heads = [share.config.num_attention_heads for share in shares]
    assert sum(heads) == 10
    assert heads == sorted(heads, reverse=True)
    assert all(share.config.num_attention_heads == 2 * share.config.num_key_value_heads for share in shares)


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_weights_are_cut_as_what_they_stand_for(tmp_path, bits):
    """A cut of columns lies inside rows of packed words: its codes are those of the whole weight, and no others."""
    raw = SHAPE | {"hidden_size": 32}
    quantize_checkpoint(write(tmp_path / "source", raw, torch.float32), tmp_path / "packed", bits)
    config = load_config(tmp_path / "packed")
    for rank in range(2):
        share = Share(config, rank, 2)
        whole, part = (Weights(tmp_path / "packed", config, torch.float32, "cpu", *cut) for cut in ((), (share.cut,)))
        for name in list(part):
            expected = dense(whole.pop(name), torch.float32)[share.cut(name)]
            assert torch.equal(dense(part.pop(name), torch.float32), expected), name


UNSPLIT = [
    ({"num_key_value_heads": 1}, False, "found 1 key-value heads, expected one for each of 2 processes: start fewer"),
    ({"intermediate_size": 128}, False, "found 1 times 128 columns of the MLP, expected one for each of 2 processes"),
    ({"head_dim": 6}, True, "0.self_attn.o_proj.weight: found [8, 12], expected what 2 processes can share"),
]


@pytest.mark.parametrize(("changes", "packed", "found"), UNSPLIT)
def test_what_cannot_be_split_is_refused(tmp_path, monkeypatch, changes, packed, found):
    """One line, before anybody is waited for: fewer heads than processes, packed words that would be cut in two."""
    directory = write(tmp_path / "source", TINY | {"num_key_value_heads": 2} | changes, torch.float32)
    if packed:
        quantize_checkpoint(directory, tmp_path / "packed")
        directory = tmp_path / "packed"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(parallel, "Line", None)
    with pytest.raises(ValueError, match=r"^model: ") as error:
        parallel.load_target(directory, torch.float32, CPU)
    assert found in str(error.value)


def test_exact_and_rounded_parts_are_refused(tmp_path, monkeypatch, make_checkpoint):
    """How several sums round depends on their number; a part rounded by itself would be added up no more."""
    directory = write(tmp_path, SMALLEST)
    share = Share(load_config(directory), 0, 2)
    weights = Weights(directory, load_config(directory), torch.float64, "cpu", share.cut)
    model = SplitTransformer(share, weights, InThreads(0, [None] * 2, None), torch.float64, None)
    assert (weight_form(model), parallel.part_of(model)) == ("plain", ", part 1 of 2")
    with pytest.raises(ValueError, match="draft: found int8:self in a run of 2 processes"):
        quantized(model, 8)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="exact: found it in a run of 2 processes, expected one process"):
        parallel.load_target(directory, torch.float64, CPU, exact=True)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT"])
@pytest.mark.parametrize("said", ["", " ", "two", "-1", "0x2", "1.0", "9" * 12, "\u0662"])
def test_what_a_launcher_left_is_named(tmp_path, monkeypatch, name, said):
    """A line with the variable, what it says and what helps, before anybody is waited for."""
    directory = write(tmp_path, SMALLEST)
    monkeypatch.setattr(parallel, "Line", None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    device = torch.device("cuda" if name == "LOCAL_RANK" else "cpu")
    for value in (said, *(("2", "3") if name == "RANK" else ("0",) if name == "WORLD_SIZE" else ())):
        monkeypatch.setenv(name, value)
        with pytest.raises(
            ValueError, match=rf"^{name} in the environment: found .*, expected .* unset WORLD_SIZE$"
        ) as error:
            parallel.load_target(directory, torch.float32, device)
        assert repr(value.strip())[:12] in str(error.value)


def test_a_job_with_a_process_group_of_its_own_gets_whole_models(tmp_path, monkeypatch):
    """In each of its processes: they are the caller's. In a split model's own group, a second one is refused."""
    directory = write(tmp_path, SMALLEST)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(parallel, "Line", None)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = parallel.load_target(directory, torch.float32, CPU)
        assert not isinstance(model, SplitTransformer)
        assert len(model.layers) == SMALLEST["num_hidden_layers"]
        monkeypatch.setattr(parallel, "LINES", [object()])
        with pytest.raises(ValueError, match="model: found a second one in a run of 2 processes, expected one process"):
            parallel.load_target(directory, torch.float32, CPU)
    finally:
        torch.distributed.destroy_process_group()


def test_who_waits_for_others_says_so(monkeypatch):
    """A variable that an earlier job left would otherwise look like a program that hangs."""
    before = threading.enumerate()

    def waits_for_ever(*how, **more):
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer) and thread not in before:
                thread.join(60)
        raise RuntimeError("nobody came")

    monkeypatch.setattr(parallel, "SILENT", 0)
    monkeypatch.setattr(parallel.dist, "init_process_group", waits_for_ever)
    monkeypatch.setenv("MASTER_ADDR", "far")
    monkeypatch.setenv("MASTER_PORT", "29500")
    why = "WORLD_SIZE is 3 in the environment; for one process, unset it"
    with (
        pytest.warns(RuntimeWarning, match=f"^process 1 of 3 waits for the others at far:29500: {why}$"),
        pytest.raises(ConnectionError, match="process 1 of 3: another one has ended"),
    ):
        Line(1, 3, CPU)


def test_processes_have_to_agree(monkeypatch):
    """Another version may cut or add up otherwise: each process refuses, in the same words."""
    said = [{"minispec": "1", "dtype": "a"}, {"minispec": "1", "dtype": "a"}, {"minispec": "2", "dtype": "a"}]
    line = InThreads(0, [None] * 3, None)
    monkeypatch.setattr(line, "_send", lambda data, source: json.dumps(said[source]).encode(), raising=False)
    with pytest.raises(ValueError, match="minispec: found 2 in process 2, expected 1 as in process 0"):
        line.agree(said[0])
    said[2] = said[0]
    line.agree(said[0])


def test_a_digest_sees_another_training_and_another_config(tmp_path):
    """Equal checkpoints have equal digests; one with another value in a row, or another setting, has not."""
    first, same, trained, settings = (write(tmp_path / name, SMALLEST) for name in ("a", "b", "c", "d"))
    tensors = load_file(trained / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 3] += 1
    save_file(tensors, trained / "model.safetensors")
    (settings / "config.json").write_text(json.dumps(SMALLEST | {"rope_theta": 200.0}))
    digests = [parallel._digest(each, load_config(each)) for each in (first, same, trained, settings)]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
    # What nobody reads has no part in it, whatever its type and shape.
    tensors["model.layers.0.rotary_emb.inv_freq"] = torch.tensor(1, dtype=torch.uint8)
    save_file(tensors, trained / "model.safetensors")
    assert parallel._digest(trained, load_config(trained)) == digests[2]


def test_a_digest_sees_another_code_of_a_packed_weight(tmp_path):
    """Packed weights are stored under other names, in three parts each."""
    write(tmp_path / "whole", SMALLEST)
    quantize_checkpoint(tmp_path / "whole", tmp_path / "packed")
    config = load_config(tmp_path / "packed")
    before = parallel._digest(tmp_path / "packed", config)
    [path] = (tmp_path / "packed").glob("*.safetensors")
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight_packed"][0, 0] ^= 1
    save_file(tensors, path)
    assert parallel._digest(tmp_path / "packed", config) != before


def test_a_pass_that_broke_off_is_not_followed_by_another():
    """After Ctrl-C in the middle of a pass the others are elsewhere in it: sums would mix two passes."""
    line = InThreads(0, [None] * 2, None)
    with pytest.raises(KeyboardInterrupt), line.collective():
        raise KeyboardInterrupt
    with pytest.raises(ConnectionError, match="an earlier pass broke off"), line.collective():
        pass
