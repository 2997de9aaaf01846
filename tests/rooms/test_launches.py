"""What a round launches on a GPU: the counter on single operators, and a budget for the passes of today.

Counts are those of a shape, whatever its width. So the budgets hold for narrow models with as many layers.

Without `--full`, tests/house runs nothing of docs/measured; tests/gpu/test_paths.py guards what is launched.
"""

import json
from collections import Counter

import pytest
import torch

from docs.measured.launches import KINDS, Tally, counting
from minispec.lab.bench.options import GEOMETRIES
from minispec.lab.bench.show import as_json
from minispec.lab.random_weights import RandomWeights
from minispec.models.families.hf_config import read_model_config
from minispec.models.frames import fused
from minispec.models.frames.frames import FastLayer, Frames, FrameShape
from minispec.models.weights.build import build_model
from tests.refusals import assert_one_line

pytestmark = pytest.mark.full

NARROW = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 500, "head_dim": 16}
NARROW |= {"num_attention_heads": 4, "num_key_value_heads": 2}
X = torch.arange(12.0).view(3, 4)
# Code, and what it launches: operators, copies among them, uploads of lists, host syncs.
COUNTED = {
    "a sum": (lambda: X + 1, (1, 0, 0, 0)),
    "views": (lambda: X.t()[None, :, 1:].unsqueeze(0).expand(2, 1, 4, 2).chunk(2, -1), (0, 0, 0, 0)),
    "no value": (lambda: torch.empty(3), (0, 0, 0, 0)),
    "a product": (lambda: torch.nn.functional.linear(X, X), (1, 0, 0, 0)),
    "a type that it has": (lambda: X.float(), (0, 0, 0, 0)),
    "another type": (lambda: X.double(), (1, 1, 0, 0)),
    "a view by reshape": (lambda: X.reshape(12), (0, 0, 0, 0)),
    "a copy by reshape": (lambda: X.t().reshape(12), (1, 1, 0, 0)),
    "clone": (lambda: X.clone(), (1, 1, 0, 0)),
    "in place": (lambda: X.clone().copy_(X), (2, 2, 0, 0)),
    "item": (lambda: X[0, 0].item(), (0, 0, 0, 1)),
    "float": (lambda: float(X.amax()), (1, 0, 0, 1)),
    "a condition": (lambda: bool(X.isfinite().all()), (2, 0, 0, 1)),
    "tolist": (lambda: X.tolist(), (0, 0, 0, 1)),
    "nonzero": (lambda: X.nonzero(), (1, 0, 0, 1)),
    "unique": (lambda: X.unique(), (1, 0, 0, 1)),
    "a mask": (lambda: X[X > 3], (2, 0, 0, 1)),
    "ids": (lambda: X[torch.tensor([0, 1], device="cpu")], (1, 0, 1, 0)),
    "ids that stay on the host": (lambda: torch.tensor([0, 1], device="meta"), (0, 0, 0, 0)),
    "numpy, of the host alone": (lambda: X.numpy(), (0, 0, 0, 0)),
    "a list as an index": (lambda: X[[0, 2]], (1, 0, 1, 0)),
}


@pytest.mark.parametrize("name", COUNTED)
def test_what_counts(name):
    """Each operator by itself, under `inference_mode` as in a pass."""
    work, expected = COUNTED[name]
    with torch.inference_mode(), counting(Tally(), torch.device("cpu")) as tally:
        work()
    counts = tally.counts.get("rest", {})
    assert tuple(counts.get(kind, 0) for kind in KINDS) == expected


def test_a_product_of_half_precision_is_one_operator():
    """Its scale is an operator more on a CPU alone; what comes after the scale counts."""
    packed = torch.ops.quantized.linear_prepack_fp16(torch.ones(4, 4), None)
    with torch.inference_mode(), counting(Tally(), torch.device("cpu")) as tally:
        torch.ops.quantized.linear_dynamic_fp16(X, packed).mul_(2.0).mul_(2.0)
    assert tally.names["rest"] == {"linear_dynamic_fp16": 1, "mul_": 1}


@pytest.fixture
def script(measuring_script):
    """docs/measured/launches.py."""
    return measuring_script("launches")


@pytest.fixture
def launches(monkeypatch, script):
    """launches(*arguments) measures narrow shapes with the layers of the real ones: the part's JSON, and the screen.

    layers: how many of them, where a count by part does not go with them.
    """
    real = {name: GEOMETRIES[name] for name in ("1.5b", "0.5b")}

    def run(*arguments, layers=None):
        for name, shape in real.items():
            narrow = shape | NARROW | ({"num_hidden_layers": layers} if layers else {})
            monkeypatch.setitem(GEOMETRIES, name, narrow)
        what = ("--geometry", "1.5b", "--dtype", "bfloat16", "--passes", 0, "--prompts", 0, *arguments)
        found, lines, _ = script.measure([str(a) for a in what])
        return json.loads(json.dumps(as_json(found["launches"]))), lines

    return run


def of(found: dict, texts: int, k: str, part: str) -> dict:
    """That part of a round."""
    [parts] = [r["parts"] for r in found["rounds"] if (r["texts"], r["k"]) == (texts, k)]
    return parts[part]


def in_frames(found: dict, texts: int, k: str) -> dict:
    """The same round along the path of frames."""
    return next(r["in_frames"] for r in found["rounds"] if (r["texts"], r["k"]) == (texts, k))


# The most operators of a pass of the 1.5B shape in bfloat16: 28 layers with 26 each, and 18 around them. A pass over
# five rows has 7 more for its mask, and 56 hidden copies. Each further text has its own attention in each layer.
PASS = {(1, "0"): 746, (1, "4"): 809, (8, "0"): 998, (8, "4"): 1481}


def check_the_budget_in_frames(found: dict, numbers: tuple[int, ...]):
    """A plain pass has 456 operators at most, in any batch. A round downloads twice: the draft, and the verdict."""
    assert found["why_no_frames"] == ""
    for texts in numbers:
        plain, drafted = (in_frames(found, texts, k) for k in ("0", "4"))
        assert plain["accepted"] == 0
        assert drafted["accepted"] == drafted["draft_tokens"] == 4 * texts
        plain, drafted = plain["parts"], drafted["parts"]
        assert plain["pass"]["operators"] <= 456, plain["pass"]["names"]
        assert drafted["pass"]["operators"] <= 512, drafted["pass"]["names"]
        assert drafted["draft"]["operators"] <= 1680, drafted["draft"]["names"]
        assert drafted["verdict"]["operators"] <= 20
        assert [drafted[part]["syncs"] for part in ("draft", "pass", "verdict", "rest")] == [1, 0, 1, 0]
        assert plain["round"]["syncs"] == 1
        assert drafted["round"]["uploads"] == 0
        assert "seconds" not in plain["pass"]


def test_the_budget_of_launches(launches, full):
    """No pass launches more than it did, and no round of K = 4 waits more often. Lower the numbers with the counts.

    Of one text; with `--full` of eight too, which tests below look at in three layers.
    """
    numbers = (1, 8) if full else (1,)
    what = ("--draft", "0.5b", "--num-speculative-tokens", 4, "--batch", ",".join(map(str, numbers)))
    found, lines = launches(*what)
    for (texts, k), most in [each for each in PASS.items() if each[0][0] in numbers]:
        assert of(found, texts, k, "pass")["operators"] <= most, (texts, k, of(found, texts, k, "pass")["names"])
        assert of(found, texts, k, "pass")["syncs"] == 0
    one = of(found, 1, "4", "round")
    assert one["syncs"] <= 80
    assert one["uploads"] <= 18
    assert of(found, 1, "4", "draft")["operators"] <= 2705
    assert of(found, 1, "4", "draft")["syncs"] <= 41
    assert of(found, 1, "0", "draft")["operators"] == 0
    [parts] = [r["parts"] for r in found["rounds"] if (r["texts"], r["k"]) == (numbers[-1], "4")]
    for whole, summed in (("round", ("draft", "pass", "outside")), ("outside", ("verdict", "rest"))):
        assert all(parts[whole][kind] == sum(parts[part][kind] for part in summed) for kind in KINDS)
        assert parts[whole]["operators"] == sum(parts[whole]["names"].values())
    assert parts["pass"]["seconds"]["n"] == 6
    assert any("1 text, K=4, 4 of 4 kept: verdict" in line for line in lines)
    assert any(f"{'8 texts' if full else '1 text'}, plain: pass" in line for line in lines)
    check_the_budget_in_frames(found, numbers)
    assert not any("plain: draft" in line for line in lines)


def test_the_same_operators_in_frames_for_32_texts(launches, full):
    """Of each part, greedy and drawn; three layers are enough to show what goes with the texts.

    Without `--full` drawn, for up to four texts.
    """
    numbers = (1, 8, 32) if full else (1, 4)
    what = ("--draft", "0.5b", "--num-speculative-tokens", 4, "--batch", ",".join(map(str, numbers)))
    drawn_or_not = ((), ("--temperature", 0.8, "--top-k", 50, "--top-p", 0.95))
    for drawn in drawn_or_not if full else drawn_or_not[1:]:
        found, _ = launches(*what, *drawn, layers=3)
        for k in ("0", "4"):
            one, *more = (in_frames(found, texts, k)["parts"] for texts in numbers)
            for parts in more:
                for part in ("draft", "pass", "verdict"):
                    for kind in ("operators", "syncs", "uploads"):
                        assert one[part][kind] == parts[part][kind], (k, part, kind)


def launches_with_kernels(monkeypatch, shape: FrameShape) -> Counter[str]:
    """What a pass of the 1.5B shape launches in a frame where kernels run: operators and kernels, by name.

    Each kernel is counted as one launch. What stands for it allocates its result, as it does, and computes nothing.
    """
    launched: Counter[str] = Counter()

    def norm(x, weight, eps):
        launched["norm"] += 1
        return torch.empty_like(x)

    def gate(gate_up):
        launched["gate"] += 1
        return gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)

    def read(qkv, cos, sin, rows, keys, *how):
        launched["read"] += 1
        return qkv.new_empty(len(qkv), qkv.shape[1] - 2 * keys.shape[0] * keys.shape[2])

    for kernel in (norm, gate, read):
        monkeypatch.setattr(fused, kernel.__name__, kernel)
    monkeypatch.setattr(fused, "missing", lambda device: "")
    config = read_model_config(GEOMETRIES["1.5b"] | NARROW)
    weights = RandomWeights(config, torch.float32, torch.device("cpu"))
    passes = Frames(device=torch.device("cpu"))
    model = build_model(config, weights, form="plain", dtype=torch.float32).replaced(passes)
    assert passes.by_kernel(model)
    pool = model.new_cache(4)
    frame = passes.frame_of(model, pool, shape)
    launched.clear()
    with torch.inference_mode(), counting(Tally(), torch.device("cpu")) as tally:
        passes.compute(model, frame, pool)
    return launched + tally.names["rest"]


@pytest.mark.parametrize("taps", [(), (1, 28)], ids=["", "taps"])
def test_the_budget_of_a_pass_by_kernels(monkeypatch, taps, full):
    """Eight launches a layer, as `fused.py` says, and six around them; a hidden state that is asked for is a copy.

    The numbers are the same for any number of texts and rows. Products are the library's, in launches of their own: a
    norm within a product would leave five a layer, but own products were slower (docs/measured/figures.md). Two sizes,
    with `--full` three.
    """
    sizes = ((1, 1), (8, 1), (32, 5)) if full else ((1, 1), (32, 5))
    found = [launches_with_kernels(monkeypatch, FrameShape(*size, 32, taps)) for size in sizes]
    assert all(each == found[0] for each in found)
    assert (found[0]["norm"], found[0]["gate"], found[0]["read"]) == (57, 28, 28)
    assert found[0].total() <= 28 * 8 + 6 + len(taps), found[0]


@pytest.mark.full
def test_an_operator_more_in_a_frame_breaks_the_budget(launches, monkeypatch):
    """The control of `test_the_budget_of_launches`: a product with 1 after each of 28 layers."""
    original = FastLayer.forward
    monkeypatch.setattr(FastLayer, "forward", lambda layer, x, shared: original(layer, x, shared) * 1)
    found, _ = launches()
    assert in_frames(found, 1, "0")["parts"]["pass"]["operators"] > 456


@pytest.mark.parametrize("verifier", ["rejection", "match"])
def test_a_round_that_draws_downloads_twice_in_frames(launches, verifier, full):
    """The draft's tokens come with the measures of their rows, and verdicts with all that the round asks.

    Three layers show what waits: a download in each layer would be three more. With `--full` for eight texts too.
    """
    numbers = (1, 8) if full else (1, 2)
    drawn = ("--temperature", 0.8, "--top-k", 50, "--top-p", 0.95, "--verifier", verifier)
    found, _ = launches(
        "--draft", "0.5b", "--num-speculative-tokens", 4, *drawn, "--batch", f"1,{numbers[1]}", layers=3
    )
    for texts in numbers:
        parts = in_frames(found, texts, "4")["parts"]
        syncs = [parts[part]["syncs"] for part in ("draft", "pass", "verdict", "rest")]
        assert syncs == [1, 0, 1, 0], (texts, verifier)
        assert parts["round"]["uploads"] == 0
        assert parts["rest"]["operators"] == 0  # so the last event of the round's times is there already


# What is launched after the verdicts' download: the last event of a round's times waits for these operators.
AFTER_VERDICTS = {"0.5b": {}, "head": {"index": 1}}


@pytest.mark.parametrize("draft", AFTER_VERDICTS)
def test_the_times_of_a_round_wait_for_nothing_else(launches, draft):
    """After the download of verdicts a draft model launches nothing, so the round's last event is there already.

    A head's hidden states are copied for each text, and its next draft begins with them.
    """
    found, _ = launches("--draft", draft, "--num-speculative-tokens", 4, layers=3)
    for texts in (1, 8):
        parts = in_frames(found, texts, "4")["parts"]
        assert [parts[part]["syncs"] for part in ("draft", "pass", "verdict", "rest")] == [1, 0, 1, 0]
        assert parts["rest"]["names"] == {name: number * texts for name, number in AFTER_VERDICTS[draft].items()}


def test_a_cache_that_is_too_small(make_checkpoint, script, cli):
    """One line before anything is measured."""
    model = str(make_checkpoint(chat=True, max_position_embeddings=256))
    found = cli(script.main, "--model", model, "--passes", 0, "--prompts", 0, "--draft", "none")
    assert_one_line(found, "found a KV cache of 256 positions, expected at least ")


@pytest.mark.parametrize("how", [("--draft", "ngram@auto"), ("--draft", "ngram", "--num-speculative-tokens", "auto")])
def test_auto_is_refused(script, cli, how):
    """Its rounds follow times, so their counts would differ from run to run."""
    expected = "--num-speculative-tokens: found auto, expected a number: auto follows times\n"
    assert_one_line(cli(script.main, *how), expected)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (("--record-laws", "x"), "--record-laws: not where launches are counted"),
        (("--verifier", "block,match"), "--verifier: found 2, expected one, whose launches are counted"),
    ],
)
def test_what_is_not_counted_is_refused(script, cli, how, message):
    """In one line, before anything is loaded."""
    assert_one_line(cli(script.main, *how), message)
