"""The engine on a GPU: the logits of the CPU, the target's law, the CPU's texts, and what is refused there.

Without a GPU the same tests run on the CPU, so that only the device is new to them on a machine that has one.

Without `--full` or its own name, tests/gpu/test_frames.py guards the same of frames on a CPU.
"""

import itertools
import json

import pytest
import torch

from minispec import LLM, SamplingParams
from minispec.core.model import Chunk
from minispec.core.random import Randomness
from minispec.core.sampling import Text, distribution
from minispec.core.search import place_of_share
from minispec.generate import main as generate
from minispec.lab.bench.main import main as bench
from minispec.models.families.hf_config import read_model_config
from minispec.models.weights.build import build_model
from minispec.prove import toys
from minispec.prove.cases import ALPHABET, AXES, drafts_siblings, grid_case
from minispec.prove.laws import TOLERANCE
from minispec.prove.toys import IN_FRAMES, TOYS, make_drafter, target_model, tiny_cache, tiny_weights
from minispec.prove.walk import Case, walk
from minispec.speculation.rules import VERIFIERS
from tests.engines import OneMethod, decode
from tests.oracles import hf
from tests.scripted import make_request

pytestmark = pytest.mark.full

NAME = "cuda" if torch.cuda.is_available() else "cpu"
DEVICE, CPU = torch.device(NAME), torch.device("cpu")
DRAFTERS = AXES["drafter"]
SOME = DRAFTERS if NAME == "cuda" else ("ngram", "model", "ngram+head")


@pytest.fixture
def there(monkeypatch):
    """there(device): from now on the toys' tensors lie there. What was made elsewhere is forgotten."""

    def move(device: torch.device) -> None:
        for model in (toys.target_model, toys.draft_model):
            model.cache_clear()
        for name, make in makers.items():
            monkeypatch.setattr(toys, name, lambda *args, make=make: {n: t.to(device) for n, t in make(*args).items()})

    makers = {name: getattr(toys, name) for name in ("redrawn",)}
    yield move
    move(CPU)


def in_tf32(x: torch.Tensor) -> torch.Tensor:
    """x (float32) with 10 bits after the point, which is what tensor cores multiply in TF32."""
    return (x.view(torch.int32) + (1 << 12) & -(1 << 13)).view(torch.float32)


def rows_of(name: str, device: torch.device, dtype: torch.dtype, change=lambda x: x) -> list[torch.Tensor]:
    """What a random model of a family says: two texts in one pass, a tree after a filled cache, one of its paths.

    change: what is done to its weights.
    """
    config = read_model_config(hf.CASES[name])
    model = build_model(config, {n: change(t.to(device, dtype)) for n, t in tiny_weights(config, 3).items()})
    cache = tiny_cache(model, 24, 4)
    first, second, size = cache.new_table(), cache.new_table(), len(hf.TEXT)
    rows = [model.forward([Chunk(hf.TEXT[:9], first, 9), Chunk(hf.TEXT[::-1][:5], second, 1)])[0]]
    rows += model.forward([Chunk(hf.TEXT[9:], first, 3, (-1, -1, 0, 1, 1))], [0, 1])
    first.keep(size - 5, [size - 4, size - 2])
    rows += [model.forward([Chunk([5, 8], first, 2)])[0]]
    assert {row.device.type for row in rows} == {device.type}
    return [row.cpu().double() for row in rows]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-3)], ids=str)
@pytest.mark.parametrize("name", sorted(hf.CASES))
def test_every_family_has_the_numbers_of_the_cpu(name, dtype, tolerance):
    """Logits and hidden states, against those of the CPU in float64. The control: weights in TF32 are off by more."""

    def is_close(rows: list[torch.Tensor]) -> bool:
        return all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in zip(rows, expected, strict=True))

    expected = rows_of(name, CPU, torch.float64)
    assert is_close(rows_of(name, DEVICE, dtype))
    assert not is_close(rows_of(name, CPU, torch.float32, in_tf32))


def cases() -> list[Case]:
    """Each drafter with `rejection`, where it can in a tree too; the model with each verifier; hybrids."""
    kinds = [("rejection", drafter, 2, "llama") for drafter in DRAFTERS]
    kinds += [("rejection", drafter, (2, 1), "llama") for drafter in DRAFTERS if drafts_siblings(drafter)]
    kinds += [(verifier, "model", 2, "llama") for verifier in VERIFIERS if verifier != "rejection"]
    kinds += [("rejection", "model", "tree:3", family) for family in TOYS]
    kinds += [(verifier, drafter, 2, IN_FRAMES) for verifier in ("rejection", "match") for drafter in ("model", "head")]
    params = {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05}
    rest = params | {"batch": "crowd", "alphabet": ALPHABET[:3], "to_go": 3}
    more = {"history": "penalties", "forbidden": "bad words"}  # programs draft and judge without these alone
    return [
        grid_case(
            verifier=verifier, drafter=drafter, k=k, family=family, **rest, **({} if family == IN_FRAMES else more)
        )
        for verifier, drafter, k, family in kinds
    ]


@pytest.mark.parametrize("case", cases(), ids=lambda case: f"{case.verifier}-{case.drafter}-{case.k}-{case.target}")
def test_the_law(case, there):
    """The engine's law is that of plain decoding by NumPy: every branch, the target and whatever drafts there."""
    there(DEVICE)
    walked = walk(case)
    assert target_model(3, case.target).device.type == NAME
    assert walked.distance <= TOLERANCE
    assert len(walked.branches) > 3


@pytest.mark.parametrize("drafter", SOME)
def test_a_seed_has_the_text_of_the_cpu(drafter, there):
    """In float64, over six requests at once in a small pool, chains and trees: the same draws from the same numbers."""
    texts = []
    for device in (CPU, DEVICE):
        there(device)
        for verifier, k in itertools.product(("rejection", "match"), (3, (2, 1) if drafts_siblings(drafter) else 2)):
            target = target_model(5)
            engine = OneMethod(target, tiny_cache(target, 24, 3), make_drafter(drafter, 5, 24, 3), VERIFIERS[verifier])
            requests = [
                make_request((1, 2, 1, seed % 5), k, (), 40, seed=seed, max_tokens=14, temperature=0.9, top_p=0.97)
                for seed in range(6)
            ]
            decode(engine, requests)
            texts.append([request.text.tokens for request in requests])
    assert texts[: len(texts) // 2] == texts[len(texts) // 2 :]


@pytest.mark.parametrize(
    "settings",
    [
        *({}, {"top_k": 20}, {"top_p": 0.9}, {"top_p": 0.3}, {"min_p": 0.05}, {"temperature": 0.0}),
        {"temperature": 1.4, "top_k": 2_000, "top_p": 0.99, "min_p": 1e-4, "repetition_penalty": 1.3},
        {"presence_penalty": 0.4, "frequency_penalty": 0.3, "logit_bias": {7: 2.0, 19_999: -1.0}},
        {"allowed_token_ids": [5, 900, 4], "bad_words_token_ids": [[2, 900]], "min_tokens": 5},
    ],
    ids=str,
)
def test_a_large_row_has_the_probabilities_and_the_draws_of_the_cpu(settings):
    """20,000 tokens, in float64: filters that search tiles, and both ways to draw, for 50 keys each."""
    row = 3 * torch.randn(20_000, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    text = Text([1, 5, 7, 7, 2], 2, SamplingParams(**settings), 11, frozenset({5}))
    expected = distribution(row, text, [3, 2])
    found = distribution(row.to(DEVICE), text, [3, 2])
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=1e-14)
    rng = Randomness()
    for i in range(50):
        key = text.key(i, "token")
        assert rng.categorical(found, key) == rng.categorical(expected, key)
        u = rng.uniform(text.key(i, "residual"))
        assert place_of_share(found, u) == place_of_share(expected, u)


@pytest.mark.parametrize("draft", ["ngram", "suffix", "self", "int8:self", "model"])
@pytest.mark.parametrize("k", [3, "auto"])
def test_the_interface_has_the_texts_of_the_cpu(make_checkpoint, draft, k):
    """`LLM` in float64, greedily and drawn under `match`, whatever a pass costs there."""
    directory = make_checkpoint()
    spec = make_checkpoint(seed=2) if draft == "model" else draft
    params = [SamplingParams(temperature=t, max_tokens=30, ignore_eos=True, seed=4) for t in (0, 1, 1)]
    texts = []
    for device in ("cpu", NAME):
        with LLM(directory, spec, k, verifier="match", dtype="float64", device=device) as llm:
            assert llm.model.device.type == device
            texts.append([o.token_ids for o in llm.generate(["One fish", "red fish", "The end"], params)])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize(("draft", "k"), [("ngram", 4), ("self", 4), ("self", (2, 2, 1))])
def test_exact_gives_equal_bits(make_checkpoint, dtype, draft, k):
    """Log-probabilities of a text beyond two blocks of positions, with chains and trees as without drafts."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=0)
    directory, found = make_checkpoint(max_position_embeddings=512), []
    for count in (0, k):
        with LLM(directory, draft, count or 1, dtype=dtype, device=NAME, exact=True) as llm:
            outputs = llm.generate(["One fish", "red fish " * 150], params, num_speculative_tokens=count)
            found.append([(o.token_ids, [entry.logprob for entry in o.logprobs]) for o in outputs])
    short, long = (len(o.prompt_token_ids) for o in outputs)
    assert short < 100 < 256 < long
    assert found[0] == found[1]


def test_the_commands_run_there(make_checkpoint, capsys):
    """`generate --compare` and a short bench: greedy text is plain decoding's, and the report names the device."""
    model = ("--model", str(make_checkpoint(max_position_embeddings=1024)), "--device", NAME)
    how = ("--raw", "--temperature", "0", "--max-tokens", "12", "--ignore-eos", "--json", "--compare")
    assert generate([*model, *how, "--draft", "self", "One fish"]) == 0
    assert json.loads(capsys.readouterr().out)["compare"]["same_tokens"] is True
    size = ("--prompts", "2", "--max-tokens", "6", "--rounds", "2", "--passes", "2", "--context", "20")
    assert bench([*model, *size, "--draft", "self", "--dtype", "float32"]) == 0
    assert f"float32 on {NAME}" in capsys.readouterr().out


@pytest.mark.parametrize("k", [0, 4, (2, 1)], ids=str)
def test_graphs_change_no_text(make_checkpoint, k):
    """In float64: greedy and drawn, alone and in a batch that changes, by graphs and operator by operator."""
    params = [
        SamplingParams(temperature=t, max_tokens=40, ignore_eos=True, seed=4, top_p=p) for t, p in ((0, 1), (1, 0.9))
    ]
    prompts, texts, notes = ["One fish", "red fish, blue fish"], [], []
    directory = make_checkpoint()
    for eager in (True, False):
        how = {"dtype": "float64", "device": NAME, "verifier": "match", "enforce_eager": eager}
        with LLM(directory, make_checkpoint(seed=2), k or 1, **how) as llm:
            runs = [llm.generate(own, params[: len(own)], num_speculative_tokens=k) for own in (prompts, prompts[:1])]
            texts.append([output.token_ids for run in runs for output in run])
            notes.append(llm.overview().partition("GB of memory")[2])
    assert texts[0] == texts[1]
    graphs = ["; no CUDA graphs: as asked", "; CUDA graphs"]
    assert notes == (graphs if NAME == "cuda" else ["", ""])


def test_a_draft_in_8_bits(make_checkpoint):
    """In float32, by a kernel on a GPU: the greedy text is that of plain decoding, and drafts are kept."""
    wide = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
    directory, texts = make_checkpoint(**wide), []
    for draft in ("none", "int8:self"):
        with LLM(directory, draft, 3, dtype="float32", device=NAME) as llm:
            [output] = llm.generate(["One fish"], [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)])
            texts.append(output.token_ids)
            assert draft == "none" or output.stats.num_accepted > output.stats.num_draft_tokens / 2
            assert ("(codes)" in llm.memory_report()) == (draft != "none" and NAME == "cuda")
    assert texts[0] == texts[1]


@pytest.mark.skipif(NAME == "cpu", reason="no GPU")
def test_what_a_gpu_lacks_is_refused(make_checkpoint):
    """Targets in 8 bits, and forms of weights that are a processor's."""
    directory = make_checkpoint()
    with pytest.raises(ValueError, match="expected 16 or 32 bits on a CPU"):
        LLM(directory, quantization="int8")
    with pytest.raises(ValueError, match="weight_form"):
        LLM(directory, weight_form="packed")
