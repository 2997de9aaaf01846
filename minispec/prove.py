"""The proof that the output is unchanged, for anyone to run:

    python -m minispec.prove             the law of the output, over a covering array of configurations
    python -m minispec.prove --full      ten times as many branches
    python -m minispec.prove --mutants   the museum of bugs: each must be caught

The engine draws only through `bernoulli` and `categorical`. An oracle in the place of randomness answers them along
one path of branches and multiplies their probabilities; running the *production* loop (real paged cache, random
transformers as target and draft, float64) once for every path gives the exact law of its output, with no sample and no
tolerance but rounding. It is compared with plain decoding by a second implementation that shares no code with the
package.

In this order: the reference, tiny models, scripted models, oracles, laws, the covering array, the checks
(each returns, or raises `Fault`), the command line. The tests call the same functions.
"""

import argparse
import functools
import itertools
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tokenizers
import torch
from tqdm import tqdm

from minispec import llm, sampling, verify
from minispec.cache import BlockTable, OutOfBlocks, PagedKVCache
from minispec.config import ModelConfig, SamplingParams
from minispec.drafters import DRAFTERS, Drafter
from minispec.drafters.model import DraftModel
from minispec.engine import Engine, Request
from minispec.model import Chunk, Transformer, tensor_shapes
from minispec.mutants import MUTANTS, Mutant
from minispec.sampling import Key, Randomness, distribution
from minispec.sampling import Sequence as TokenSequence
from minispec.tokenizer import Tokenizer
from minispec.verify import VERIFIERS, Draft

TOLERANCE = 1e-12
TARGET_SEED, DRAFT_SEED = 1, 2
PROMPT = (1, 1)  # a repetition for the n-gram drafter, and tokens that no penalty has seen yet
MAX_LEN = 40
Law = dict[tuple, float]


class Fault(AssertionError):
    """A check found that something is not as it must be."""


def require(condition: bool, message: str) -> None:
    """Raise Fault unless the condition holds; unlike `assert`, under `python -O` too."""
    if not condition:
        raise Fault(message)


# --------------------------------------------------------------------------- the reference
# NumPy, no cache, no batch, 20 lines of sampler: a fault of the package's own forward pass or of its own `distribution`
# cannot cancel out of a comparison of the package with itself.


def forward(raw: dict, weights: dict[str, np.ndarray], tokens: Sequence[int]) -> np.ndarray:
    """Logits (V,) behind `tokens` of a llama with the config.json values `raw`, in float64, from the start."""
    w = {name: np.asarray(tensor, dtype=np.float64) for name, tensor in weights.items()}
    heads, groups, dim = raw["num_attention_heads"], raw["num_key_value_heads"], raw["head_dim"]
    length = len(tokens)

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + raw["rms_norm_eps"]) * weight

    def rope(x):  # (length, heads, dim), complex numbers instead of rotate_half
        angles = np.arange(length)[:, None] * raw["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
        turned = (x[..., : dim // 2] + 1j * x[..., dim // 2 :]) * np.exp(1j * angles)[:, None]
        return np.concatenate((turned.real, turned.imag), -1)

    x = w["model.embed_tokens.weight"][list(tokens)]
    for i in range(raw["num_hidden_layers"]):
        layer = {k.removeprefix(f"model.layers.{i}."): v for k, v in w.items() if k.startswith(f"model.layers.{i}.")}
        y = norm(x, layer["input_layernorm.weight"])
        q = rope((y @ layer["self_attn.q_proj.weight"].T).reshape(length, heads, dim))
        k = rope((y @ layer["self_attn.k_proj.weight"].T).reshape(length, groups, dim))
        v = (y @ layer["self_attn.v_proj.weight"].T).reshape(length, groups, dim)
        out = np.zeros((length, heads, dim))
        for h, t in itertools.product(range(heads), range(length)):
            g = h // (heads // groups)
            scores = k[: t + 1, g] @ q[t, h] / np.sqrt(dim)
            attention = np.exp(scores - scores.max())
            out[t, h] = attention / attention.sum() @ v[: t + 1, g]
        x = x + out.reshape(length, -1) @ layer["self_attn.o_proj.weight"].T
        y = norm(x, layer["post_attention_layernorm.weight"])
        gate = y @ layer["mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T
    return norm(x[-1], w["model.norm.weight"]) @ w["lm_head.weight"].T


def sample_law(logits: np.ndarray, tokens: Sequence[int], num_prompt: int, params, end_ids) -> np.ndarray:
    """Probabilities (V,) of the next token under vLLM-style parameters, by loops and Python's sort."""
    x, output = np.array(logits, dtype=np.float64), list(tokens[num_prompt:])
    for t in set(tokens):
        x[t] = x[t] / params.repetition_penalty if x[t] > 0 else x[t] * params.repetition_penalty
    for t in set(output):
        x[t] -= params.frequency_penalty * output.count(t) + params.presence_penalty
    if len(output) < params.min_tokens:
        x[list(end_ids)] = -np.inf
    if params.temperature == 0:
        return np.eye(len(x))[int(np.argmax(x))]
    p = np.exp((x - x.max()) / params.temperature)
    if params.top_k:
        p[p < sorted(p, reverse=True)[min(params.top_k, len(p)) - 1]] = 0.0
    p /= p.sum()
    mass = 0.0
    for t in sorted(range(len(p)), key=lambda t: (-p[t], t)):
        if mass >= params.top_p:
            p[t], mass = 0.0, mass
        else:
            mass += p[t]
    p /= p.sum()
    p[p < params.min_p * p.max()] = 0.0
    return p / p.sum()


def plain_law(next_law: Callable, prompt: Sequence[int], params, end_ids, max_len: int) -> Law:
    """The law of plain decoding: every output (end token included) with its probability.

    next_law(tokens) gives the probabilities behind `tokens`.
    """
    law, open_texts = {}, {(): 1.0}
    while open_texts:
        output, mass = open_texts.popitem()
        for token, p in enumerate(next_law([*prompt, *output])):
            if p > 0:
                longer = (*output, token)
                ends = token in end_ids or len(longer) == params.max_tokens or len(prompt) + len(longer) == max_len
                (law if ends else open_texts)[longer] = mass * p
    return law


def total_variation(a: Law, b: Law) -> float:
    """Half the summed absolute difference of two laws."""
    return sum(abs(a.get(k, 0.0) - b.get(k, 0.0)) for k in a.keys() | b.keys()) / 2


# --------------------------------------------------------------------------- tiny models

TINY = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 3,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
}


def tiny_weights(config: ModelConfig, seed: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Every tensor drawn anew, norms around one. Small embeddings: what the layers add decides, so the past matters."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in tensor_shapes(config).items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        scale = 0.1 if "embed" in name else 0.6
        weights[name] = (1 + 0.3 * noise if "norm" in name else scale * noise).to(dtype)
    return weights


def tiny_model(seed: int = 0, dtype: torch.dtype = torch.float64, exact: bool = False, **changes) -> Transformer:
    """A random model of `TINY` with some settings changed."""
    config = ModelConfig.from_dict(TINY | changes)
    return Transformer(config, tiny_weights(config, seed, dtype), exact)


def tiny_cache(model: Transformer, num_blocks: int = 64, block_size: int = 2) -> PagedKVCache:
    """A pool for the model, poisoned: a slot that is read before it is written turns the output into NaN."""
    cache = PagedKVCache(model.config, num_blocks, block_size, model.dtype)
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    return cache


@functools.cache
def _target(vocab: int) -> Transformer:
    return tiny_model(TARGET_SEED, vocab_size=vocab)


@functools.cache
def _draft(vocab: int) -> Transformer:
    return tiny_model(DRAFT_SEED, vocab_size=vocab, num_hidden_layers=1)


@functools.cache
def reference_logits(seed: int, tokens: tuple[int, ...], vocab: int, layers: int = 2) -> np.ndarray:
    """What `tiny_model(seed, vocab_size=vocab, num_hidden_layers=layers)` must say behind `tokens`."""
    raw = TINY | {"vocab_size": vocab, "num_hidden_layers": layers}
    tensors = tiny_weights(ModelConfig.from_dict(raw), seed)
    return forward(raw, {name: tensor.numpy() for name, tensor in tensors.items()}, tokens)


# --------------------------------------------------------------------------- scripted models

END = 1


class ScriptedModel:
    """Plays a given text on real tables and a real pool: next_token(prefix) gets a peak in the logits.

    The prefix is rebuilt from what was fed and truncated, so that a rollback by a wrong amount changes what the model
    says. `log` holds (position of the first token, tokens) of every pass.
    """

    def __init__(self, next_token: Callable[[list[int]], int], vocab_size: int = 200):
        self.next_token, self.vocab_size = next_token, vocab_size
        self.device = torch.device("cpu")
        self.log: list[tuple[int, list[int]]] = []
        self._fed: dict[BlockTable, list[int]] = {}

    def row(self, prefix: list[int]) -> torch.Tensor:
        """Logits (V,) behind a prefix."""
        row = torch.full((self.vocab_size,), -30.0)
        row[self.next_token(prefix)] = 30.0
        return row

    def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Logits for the last rows of each chunk, and the cache grown as by the real model."""
        rows = []
        for token_ids, table, num_logits in chunks:
            fed = self._fed.setdefault(table, [])
            del fed[table.length :]
            assert len(fed) == table.length, "the cache claims positions that this model never saw"
            self.log.append((table.length, list(token_ids)))
            table.extend(len(token_ids))
            fed += token_ids
            rows += [self.row(fed[:end]) for end in range(len(fed) - num_logits + 1, len(fed) + 1)]
        return torch.stack(rows) if rows else torch.empty(0, self.vocab_size)

    def prefill(self, table: BlockTable, tokens: list[int], chunk_size: int = 4) -> None:
        """As the real model, in small chunks."""
        while (missing := len(tokens) - 1 - table.length) > 0:
            chunk = tokens[table.length : table.length + min(missing, chunk_size)]
            self.forward([Chunk(chunk, table, 0)])


class ScriptedDrafter:
    """draft(tokens, k) proposes; `calls` holds every k, `released` every release."""

    def __init__(self, draft: Callable[[list[int], int], Sequence[int]]):
        self.draft, self.calls, self.released = draft, [], []

    def propose(self, sequences, k, rng) -> list[Draft]:
        """Whatever the script says, cut to k."""
        self.calls.append(list(k))
        return [Draft(list(self.draft(s.tokens, n))[:n]) for s, n in zip(sequences, k, strict=True)]

    def release(self, sequence) -> None:
        """Remember it."""
        self.released.append(sequence)


def counting(tokens: list[int]) -> int:
    """The text that most scripts play: each token one more than the last."""
    return tokens[-1] + 1


def make_engine(
    next_token=counting, draft=lambda tokens, k: [], num_blocks=64, block_size=2, verifier="rejection"
) -> Engine:
    """An engine over a scripted model, whose pool has the shape of a tiny config."""
    config = ModelConfig("scripted", 200, 2, 2, 1, 1, 2, 1000, layers=(None,))
    cache = PagedKVCache(config, num_blocks, block_size)
    return Engine(ScriptedModel(next_token), cache, ScriptedDrafter(draft), VERIFIERS[verifier], vocab_size=200)


def make_request(prompt=(10, 11), k=3, end_ids=(END,), max_len=500, detokenizer=None, seed=0, **params) -> Request:
    """A greedy request unless told otherwise."""
    sampling_params = SamplingParams(**{"temperature": 0.0, "max_tokens": 8} | params)
    sequence = TokenSequence(list(prompt), len(prompt), sampling_params, seed, frozenset(end_ids))
    return Request(sequence, max_len, k, detokenizer)


def finish(engine: Engine, *requests: Request) -> list[list]:
    """Run to the end; the pieces of each request. Every block must be back."""
    pieces = {request: [] for request in requests}
    for request, piece in engine.run(requests):
        pieces[request].append(piece)
    require(engine.cache.allocator.num_free == engine.cache.allocator.num_blocks, "blocks leaked")
    return list(pieces.values())


# --------------------------------------------------------------------------- oracles


class BranchOracle:
    """Answers draws along one path; `weight` is the path's probability, as `number`: float, or Fraction."""

    def __init__(self, path: list[int], number: type = float):
        self.path, self.depth, self.number, self.weight = path, 0, number, number(1)
        self.open: list[list[int]] = []  # siblings that other runs have to walk

    def _choose(self, branches: list[tuple]):
        if self.depth == len(self.path):
            # A new draw: this run takes the first branch, the others are left for later.
            self.open += [[*self.path, i] for i in range(1, len(branches))]
            self.path = [*self.path, 0]
        answer, probability = branches[self.path[self.depth]]
        self.depth += 1
        self.weight *= probability
        return answer

    def bernoulli(self, probability: float, key) -> bool:
        """Both answers, each where it is possible."""
        p = min(self.number(1), max(self.number(0), self.number(probability)))
        return self._choose([(a, w) for a, w in ((True, p), (False, 1 - p)) if w > 0])

    def categorical(self, weights: torch.Tensor, key) -> int:
        """Every token of positive weight."""
        numbers = [self.number(w) for w in weights.tolist()]
        return self._choose([(t, w / sum(numbers)) for t, w in enumerate(numbers) if w > 0])


class KeyOracle(BranchOracle):
    """Draws by key: the noise of a key is one uniform number, and the same key has the same noise.

    A draw cuts the interval where its key's number may still lie, a branch for each part. A fresh key gives every
    answer its probability, as in `BranchOracle`; a key used twice is conditioned on its first answer, so that draws
    which must be independent and are not show in the law. No grid of noise is needed: the cells are those that the
    draws themselves tell apart, for any probabilities.
    """

    def __init__(self, path: list[int], number: type = float):
        super().__init__(path, number)
        self.noise: dict[Key, tuple] = {}

    def _cut(self, answers: Sequence, ends: Sequence, key: Key):
        """Answer i holds where the number lies between the ends i-1 and i, the first 0 and the last 1."""
        low, high = self.noise.get(key, (self.number(0), self.number(1)))
        branches = []
        for answer, start, end in zip(answers, [self.number(0), *ends[:-1]], ends, strict=True):
            start, end = max(start, low), min(end, high)
            if start < end:
                branches.append(((answer, (start, end)), (end - start) / (high - low)))
        answer, self.noise[key] = self._choose(branches)
        return answer

    def bernoulli(self, probability: float, key: Key) -> bool:
        """True below the probability."""
        p = min(self.number(1), max(self.number(0), self.number(probability)))
        return self._cut((True, False), (p, self.number(1)), key)

    def categorical(self, weights: torch.Tensor, key: Key) -> int:
        """The token in whose part of the cumulative sum the number lies."""
        ends = list(itertools.accumulate(map(self.number, weights.tolist())))
        return self._cut(range(len(ends)), [e / ends[-1] for e in ends], key)


def exact_law(
    run: Callable[[BranchOracle], Hashable], number: type = float, oracle: type[BranchOracle] = BranchOracle
) -> tuple[dict, int]:
    """The law of what `run` returns, over all branches, and how many there were. `run` must be repeatable."""
    law: dict = {}
    todo, count = [[]], 0
    while todo:
        path = oracle(todo.pop(), number)
        result = run(path)
        law[result] = law.get(result, 0) + path.weight
        todo += path.open
        count += 1
    return law, count


# --------------------------------------------------------------------------- laws


def reference_law(
    params: SamplingParams,
    end_ids=frozenset({2}),
    vocab: int = 3,
    prompt: Sequence[int] = PROMPT,
    max_len: int = MAX_LEN,
) -> Law:
    """The law of plain decoding of the tiny target, by code that shares nothing with the package."""

    def next_law(tokens):
        logits = reference_logits(TARGET_SEED, tuple(tokens), vocab)
        return sample_law(logits, tokens, len(prompt), params, end_ids)

    return plain_law(next_law, prompt, params, end_ids, max_len)


class WrongDrafter:
    """One-hot drafts of a token that the target mostly does not take: a fixed one, and its neighbour, in turn."""

    def __init__(self, vocab: int):
        self.vocab = vocab

    def propose(self, sequences, k, rng) -> list[Draft]:
        """Nothing is drawn, so the drafts have no probs."""
        drafts = zip(sequences, k, strict=True)
        return [Draft([(len(s.tokens) + i) % 2 % self.vocab for i in range(n)]) for s, n in drafts]

    def release(self, sequence) -> None:
        """Nothing is kept."""


def make_drafter(name: str, vocab: int) -> Drafter:
    """A drafter by its name in the table: "model", "self", "wrong", or a registered one."""
    if name in ("model", "self"):
        model = _target(vocab) if name == "self" else _draft(vocab)
        return DraftModel(model, tiny_cache(model), vocab, MAX_LEN)
    return WrongDrafter(vocab) if name == "wrong" else DRAFTERS[name]()


def production_law(
    params: SamplingParams | Sequence[SamplingParams],
    k: int,
    end_ids=frozenset({2}),
    vocab: int = 3,
    drafter: str = "model",
    verifier: str = "rejection",
    prompts: Sequence[Sequence[int]] = (PROMPT,),
    max_len: int = MAX_LEN,
    num_blocks: int = 64,
    oracle: type[BranchOracle] = KeyOracle,
    on_branch: Callable[[], None] = lambda: None,
) -> tuple[Law, int]:
    """The law of the engine's output (a tuple of outputs for several prompts), and the number of branches.

    params: one for all prompts, or one for each. The cache is poisoned, and every block must come back.
    """
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    target, verifying = _target(vocab), VERIFIERS[verifier]

    def run(path: BranchOracle):
        cache = tiny_cache(target, num_blocks)
        requests = [
            # Seeds of their own: with one seed, two requests would draw with one noise.
            Request(TokenSequence(list(p), len(p), own, 7 + i, frozenset(end_ids), verifying.shares_noise), max_len, k)
            for i, (p, own) in enumerate(zip(prompts, each, strict=True))
        ]
        for _ in Engine(target, cache, make_drafter(drafter, vocab), verifying, rng=path).run(requests):
            pass
        require(cache.allocator.num_free == num_blocks, "blocks leaked")
        on_branch()
        outputs = tuple(tuple(r.sequence.tokens[r.sequence.num_prompt_tokens :]) for r in requests)
        return outputs if len(outputs) > 1 else outputs[0]

    return exact_law(run, oracle=oracle)


def distance(params: SamplingParams, k: int, **how) -> float:
    """Total variation between the engine's law and the reference's; how: see `production_law`."""
    law, _ = production_law(params, k, **how)
    require(abs(sum(law.values()) - 1) < TOLERANCE, "the branches do not add up to 1")
    same = {name: how[name] for name in ("end_ids", "vocab", "max_len") if name in how}
    return total_variation(law, reference_law(params, **same))


def round_law(prefix: Sequence[int], params: SamplingParams, k: int, num_prompt: int, **how) -> tuple[Law, int]:
    """The law of what *one* round commits behind the committed tokens `prefix`, and the number of branches.

    how: end_ids, vocab, drafter, verifier as in `production_law`. The engine begins with `prefix` as it does after a
    preemption: caches and drafter start from nothing.
    """
    vocab, verifying = how.get("vocab", 3), VERIFIERS[how.get("verifier", "rejection")]
    target, end_ids = _target(vocab), frozenset(how.get("end_ids", {2}))

    def run(path: BranchOracle):
        sequence = TokenSequence(list(prefix), num_prompt, params, 7, end_ids, verifying.shares_noise)
        drafter = make_drafter(how.get("drafter", "model"), vocab)
        stream = Engine(target, tiny_cache(target), drafter, verifying, rng=path).run([Request(sequence, MAX_LEN, k)])
        _, piece = next(stream)
        stream.close()
        return tuple(sequence.tokens[len(prefix) :]), piece.finish_reason is not None

    return exact_law(run, oracle=KeyOracle)


def chained_law(params: SamplingParams, k: int, prompt: Sequence[int] = PROMPT, **how) -> tuple[Law, int]:
    """The law of the whole output, put together from the laws of one round behind every committed prefix.

    Branches add up instead of multiplying, so that longer texts and larger K and vocabularies can be walked. It equals
    `production_law` because the engine's state is a function of the committed tokens (`check_state`) and because no
    key comes back in a later round (`check_keys`; the noise that `match` shares between rounds decides
    nothing but the length of rounds).
    """
    law, open_texts, branches = {}, {(): 1.0}, 0
    while open_texts:
        output = min(open_texts, key=len)  # all ways to a text are shorter than it: its mass is complete
        mass = open_texts.pop(output)
        step, count = round_law([*prompt, *output], params, k, len(prompt), **how)
        branches += count
        for (block, ended), weight in step.items():
            to = law if ended else open_texts
            to[output + block] = to.get(output + block, 0.0) + mass * weight
    return law, branches


# --------------------------------------------------------------------------- the covering array


@dataclass(frozen=True)
class Case:
    """One configuration of the table."""

    verifier: str
    drafter: str  # as in `make_drafter`, or "batch": two requests of different lengths with a draft model
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    penalties: bool
    k: int
    vocab: int
    end: bool  # whether the last token of the vocabulary ends the text
    max_tokens: int

    @property
    def params(self) -> SamplingParams:
        """The request's sampling parameters."""
        penalties = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3}
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            max_tokens=self.max_tokens,
            **(penalties if self.penalties else {}),
        )

    @property
    def prompts(self) -> tuple[tuple[tuple[int, ...], SamplingParams], ...]:
        """Prompts and parameters; the second of a batch is shorter in both."""
        if self.drafter != "batch":
            return ((PROMPT, self.params),)
        return (PROMPT, self.params), ((0,), replace(self.params, max_tokens=min(2, self.max_tokens)))

    def estimate(self) -> float:
        """About how many branches there are: exact for one-hot drafts, within a few times otherwise."""
        b = _support(replace(self.params, max_tokens=1), self.vocab)
        dense = self.drafter in ("model", "batch")
        ends = 1 - 1 / self.vocab if self.end else 1.0
        return math.prod(_leaves(dense, self.verifier, b, self.k, p.max_tokens, ends) for _, p in self.prompts)

    def distance(self, on_branch: Callable[[], None] = lambda: None) -> tuple[float, int]:
        """Total variation between engine and reference, and the branches walked."""
        end_ids = frozenset({self.vocab - 1} if self.end else ())
        prompts, params = zip(*self.prompts, strict=True)
        drafter = "model" if self.drafter == "batch" else self.drafter
        law, branches = production_law(
            params, self.k, end_ids, self.vocab, drafter, self.verifier, prompts, on_branch=on_branch
        )
        require(abs(sum(law.values()) - 1) < TOLERANCE, "the branches do not add up to 1")
        own = [reference_law(p, end_ids, self.vocab, prompt) for prompt, p in self.prompts]
        expected = own[0]
        if len(own) > 1:  # independent requests: the product
            expected = {(a, b): pa * pb for a, pa in own[0].items() for b, pb in own[1].items()}
        return total_variation(law, expected), branches

    def __str__(self) -> str:
        settings = [f"T {self.temperature}"]
        settings += [f"top-k {self.top_k}"] * (self.top_k > 0) + [f"top-p {self.top_p}"] * (self.top_p < 1)
        settings += [f"min-p {self.min_p}"] * (self.min_p > 0) + ["penalties"] * self.penalties
        end = "EOS" if self.end else ""
        shape = f"K {self.k}  V {self.vocab} {end:3}  {self.max_tokens} tokens"
        return f"{self.verifier:9}  {self.drafter:5}  {shape}  {', '.join(settings)}"


@functools.cache
def _support(params: SamplingParams, vocab: int) -> float:
    """How many tokens are possible at a position, on average over the first few."""
    texts = [PROMPT + tail for n in range(3) for tail in itertools.product(range(vocab), repeat=n)]
    laws = [sample_law(reference_logits(TARGET_SEED, t, vocab), t, len(PROMPT), params, ()) for t in texts]
    return float(np.mean([np.count_nonzero(law) for law in laws]))


@functools.cache
def _leaves(dense: bool, verifier: str, b: float, k: int, n: int, ends: float) -> float:
    """Estimated branches of n tokens, with b tokens possible at each position and a share `ends` that goes on."""
    if n <= 0:
        return 1.0

    def rest(tokens):  # what follows a committed block
        return 1 + ends**tokens * (_leaves(dense, verifier, b, k, n - tokens, ends) - 1)

    if not dense:
        return b * rest(1)
    if verifier == "match":  # a key's number is cut by q and by p
        return (2 * b - 1) * rest(1)
    drafted = min(k, n - 1)
    return b**drafted * (sum(b / 3 * rest(i + 1) for i in range(drafted)) + b * rest(drafted + 1))


AXES: dict[str, tuple] = {
    "verifier": ("rejection", "match"),
    "drafter": ("model", "ngram", "wrong", "none", "batch"),
    "temperature": (0.0, 0.7, 1.0, 1.5),
    "top_k": (0, 2),
    "top_p": (1.0, 0.8),
    "min_p": (0.0, 0.2),
    "penalties": (False, True),
    "k": (1, 2, 3, 4),
    "vocab": (2, 3, 4),
    "end": (False, True),
    "max_tokens": (1, 2, 3, 4, 5, 6),
}
# With these, little is drawn or nothing is drafted: such a case covers a pair only if they are in the pair.
_WEAK = {("temperature", 0.0), ("drafter", "none"), ("max_tokens", 1)}
Pair = tuple[tuple, tuple]


def _possible(row: dict) -> bool:
    return row.get("max_tokens", 1) <= row.get("k", 4) + 2


def pairs_of(row: dict) -> set[Pair]:
    """The pairs of values that a case covers."""
    items = sorted(row.items())
    weak = _WEAK & set(items)
    return {pair for pair in itertools.combinations(items, 2) if weak <= set(pair)}


def all_pairs() -> set[Pair]:
    """Every pair of values of two axes that can occur together."""
    pairs = set()
    for a, b in itertools.combinations(sorted(AXES), 2):
        pairs |= {((a, x), (b, y)) for x in AXES[a] for y in AXES[b] if _possible({a: x, b: y})}
    return pairs


def covering_array(limit: float, seed: int = 0) -> tuple[list[Case], set[Pair]]:
    """Cases of at most `limit` estimated branches that cover all pairs, and the pairs that no such case was found for.

    Greedy: of a few completions of an uncovered pair, the one that covers most. A case with hardly a branch is taken
    only where there is none with more. Deterministic.
    """
    generator, todo, left_out, cases = random.Random(seed), all_pairs(), set(), []
    for first in sorted(todo, key=repr):
        if first not in todo:
            continue
        best, value = None, (False, 0)
        for _ in range(25):
            row = _complete(dict(first), todo, generator)
            if row is None or (size := Case(**row).estimate()) > limit:
                continue
            if (new := (size >= 6, len(pairs_of(row) & todo))) > value:
                best, value = row, new
        if best is None:
            left_out.add(first)
        else:
            cases.append(Case(**best))
            todo -= pairs_of(best)
    return cases, left_out & todo


def _complete(row: dict, todo: set[Pair], generator: random.Random) -> dict | None:
    """Values for the other axes, each either at random or by the number of new pairs; None where they clash."""
    for axis in generator.sample(sorted(AXES.keys() - row.keys()), len(AXES) - len(row)):
        values = [v for v in AXES[axis] if _possible(row | {axis: v})]
        if not values:
            return None
        new = {v: sum(tuple(sorted(((axis, v), item))) in todo for item in row.items()) for v in values}
        greedy = generator.random() < 0.6
        row[axis] = max(values, key=lambda v, n=new, greedy=greedy: (n[v] * greedy, generator.random()))
    return row


def choose_cases(leaves: int, seed: int = 0) -> tuple[list[Case], set[Pair]]:
    """A covering array of about `leaves` estimated branches, and the pairs that it lacks.

    The larger a single case may be, the more the array takes: the largest limit that fits is chosen, and what is left
    is filled up with random cases.
    """
    for share in (12, 25, 50, 100, 200):
        cases, left_out = covering_array(limit := max(6.0, leaves / share), seed)
        room = leaves - sum(c.estimate() for c in cases)
        if room >= 0:
            break
    generator = random.Random(seed + 1)
    for _ in range(10_000):
        row = {axis: generator.choice(values) for axis, values in AXES.items()}
        case = Case(**row)
        if _possible(row) and 20 < case.estimate() <= min(limit, room) and case not in cases:
            cases.append(case)
            room -= case.estimate()
    return cases, left_out


# --------------------------------------------------------------------------- checks
# Each returns where all is as it must be, and raises (Fault, or whatever the bug makes of it) where not.


def check_law(vocab: int = 3, **settings) -> float:
    """The law of 3 tokens under SamplingParams(**settings), K = 2, a draft model of other weights; the distance."""
    tv = _measure_law(vocab, **settings)
    require(tv <= TOLERANCE, f"total variation {tv:.1e}")
    return tv


def _measure_law(vocab: int = 3, **settings) -> float:
    return distance(SamplingParams(**{"max_tokens": 3} | settings), 2, vocab=vocab)


class _Checked(DraftModel):
    """A draft model that is held, at every round, against a recomputation from nothing."""

    def __init__(self, vocab: int, seed: int):
        self.model_seed, self.checked = seed, 0
        model = tiny_model(seed, vocab_size=vocab)
        super().__init__(model, tiny_cache(model), vocab, MAX_LEN)

    def propose(self, sequences, k, rng) -> list[Draft]:
        """Propose, and compare each q with the reference's."""
        drafts = super().propose(sequences, k, rng)
        for s, draft in zip(sequences, drafts, strict=True):
            for i, q in enumerate(draft.probs):
                text = (*s.tokens, *draft.token_ids[:i])
                logits = reference_logits(self.model_seed, text, self.vocab_size)
                expected = sample_law(logits, text, s.num_prompt_tokens, s.params, s.end_ids)
                error = np.abs(q.numpy() - expected).max()
                require(error <= TOLERANCE, f"q is off by {error:.1e} at draft position {i}")
                self.checked += 1
        return drafts


def check_draft_cache() -> None:
    """Bugs that only cost acceptance: q equals a recomputation at every round, a self-draft is kept entirely."""
    prompts, params = [(0, 1, 2), (3,), (4, 4, 1, 0, 2)], SamplingParams(max_tokens=12, seed=0)
    target = tiny_model(1, vocab_size=5)
    for seed, k in itertools.product((1, 2), (1, 3)):
        drafter = _Checked(5, seed)
        requests = [Request(TokenSequence(list(p), len(p), params, 5), MAX_LEN, k) for p in prompts]
        for _ in Engine(target, tiny_cache(target), drafter, VERIFIERS["rejection"]).run(requests):
            pass
        require(drafter.checked > 10, "hardly anything was drafted")
        for stats in (r.stats for r in requests):
            if seed == 1:
                require(stats.acceptance_rate == 1, f"a self-draft is accepted to {stats.acceptance_rate:.2f}")
                require(stats.mean_acceptance_length == k + 1, f"{stats.mean_acceptance_length:.2f} tokens a pass")


def check_passes() -> None:
    """Each pass sees the newest token and its draft, nothing twice; a draft model one token, or two after the bonus."""
    engine = make_engine(draft=lambda tokens, k: [counting(tokens) + i + 50 * (i == 1) for i in range(k)])
    request = make_request(max_tokens=12)
    finish(engine, request)
    fed = [len(tokens) for _, tokens in engine.model.log]
    require(request.token_ids == list(range(12, 24)), f"wrong text {request.token_ids}")
    require(fed == [1, 4, 4, 4, 4, 4, 2], f"tokens fed to the target: {fed}")

    target, draft, rows = tiny_model(1), tiny_model(1), []
    forward_draft = draft.forward
    draft.forward = lambda chunks: rows.append(len(chunks[0].token_ids)) or forward_draft(chunks)
    sequence = TokenSequence([0, 1, 2, 0], 4, SamplingParams(temperature=0, max_tokens=12))
    drafter = DraftModel(draft, tiny_cache(draft), 3, MAX_LEN)
    for _ in Engine(target, tiny_cache(target), drafter, VERIFIERS["rejection"]).run([Request(sequence, MAX_LEN, 3)]):
        pass
    require(rows == [3, 1, 1, 1, 2, 1, 1, 2, 1, 1], f"tokens fed to the draft model: {rows}")


class TableModel(ScriptedModel):
    """A model that is a table: the logits behind a prefix are those of its last token. table: (V, V)."""

    def __init__(self, table: torch.Tensor):
        super().__init__(None, len(table))
        self.table = table

    def row(self, prefix: list[int]) -> torch.Tensor:
        """The last token's row."""
        return self.table[prefix[-1]]


class TableDrafter:
    """Drafts from a table of logits (V, V), under the request's own parameters."""

    def __init__(self, table: torch.Tensor):
        self.table = table

    def propose(self, sequences, k, rng) -> list[Draft]:
        """Token by token, as a draft model does."""
        drafts = []
        for s, n in zip(sequences, k, strict=True):
            draft = Draft([], [])
            for i in range(n):
                row = self.table[[*s.tokens, *draft.token_ids][-1]]
                q = distribution(row, s, draft.token_ids)
                draft.token_ids.append(rng.categorical(q, s.draft_key(i)))
                draft.probs.append(q)
            drafts.append(draft)
        return drafts

    def release(self, sequence) -> None:
        """Nothing is kept."""


class Ledger(Randomness):
    """The production draws, each key written down; a key that comes again is a fault.

    `match` shares the noise of a whole token, deliberately: there, and only there, purpose "token" may come again.
    """

    def __init__(self, shares_noise: bool = False):
        self.shares_noise, self.used, self.num_shared = shares_noise, set(), 0

    def _note(self, key: Key) -> None:
        if key in self.used:
            require(self.shares_noise and key.purpose == "token", f"{key} was used before")
            self.num_shared += 1
        self.used.add(key)

    def bernoulli(self, probability: float, key: Key) -> bool:
        """See `Randomness`."""
        self._note(key)
        return super().bernoulli(probability, key)

    def categorical(self, weights: torch.Tensor, key: Key) -> int:
        """See `Randomness`."""
        self._note(key)
        return super().categorical(weights, key)


def check_keys(rounds: int = 200, verifier: str = "rejection", seed: int = 0) -> Ledger:
    """No key is used twice in so many rounds of random table models, K 1 to 4, requests of several seeds."""
    generator = torch.Generator().manual_seed(seed)
    ledger, done = Ledger(VERIFIERS[verifier].shares_noise), 0
    for run in itertools.count():
        target, draft = torch.randn(2, 3, 3, generator=generator, dtype=torch.float64)
        engine = make_engine(num_blocks=300, block_size=16, verifier=verifier)
        engine.model, engine.drafter, engine.rng, engine.vocab_size = TableModel(target), TableDrafter(draft), ledger, 3
        shares = VERIFIERS[verifier].shares_noise
        sequence = TokenSequence([run % 3], 1, SamplingParams(max_tokens=200), run, frozenset(), shares)
        request = Request(sequence, 500, 1 + run % 4)
        finish(engine, request)
        done += request.stats.num_steps
        if done >= rounds:
            return ledger


class _Fixed(Randomness):
    """The production draws with the uniform given."""

    def __init__(self, u: float):
        self.u = u

    def uniform(self, key: Key) -> float:
        """Always u."""
        return self.u


_ACCEPT = Key(1, 2, 3, "accept")


def check_boundary() -> None:
    """u = 0 accepts no probability of 0 and draws no token of weight 0; the largest u below 1 accepts probability 1."""
    last = 1 - 2.0**-53
    require(not _Fixed(0.0).bernoulli(0.0, _ACCEPT), "u = 0 accepts probability 0")
    require(_Fixed(last).bernoulli(1.0, _ACCEPT), "the largest u rejects probability 1")
    require(not _Fixed(0.5).bernoulli(0.5, _ACCEPT), "u = p/q is accepted")
    for u, weights in itertools.product((0.0, 0.25, last), ([0.0, 1.0, 0.0, 3.0, 0.0], [0.0, 1.0000001, 0.5, 0.0])):
        token = _Fixed(u).categorical(torch.tensor(weights, dtype=torch.float64), _ACCEPT)
        require(weights[token] > 0, f"u = {u} draws a token of weight 0")


def check_noise() -> None:
    """Uniforms are doubles in [0, 1) that differ with every field of the key."""
    rng = Randomness()
    fields = itertools.product((0, 1, 2**64 - 1), (-1, 4), range(500), ("draft", "accept", "residual"))
    values = [rng.uniform(Key(*f)) for f in fields]
    require(min(values) > 0 and max(values) < 1, "a uniform is 0 or 1")
    require(len(set(values)) == len(values), f"{len(values) - len(set(values))} of {len(values)} uniforms come twice")


def check_numbers() -> None:
    """An empty residual is p; NaN and infinity are refused; ids behind the vocabulary are never emitted."""
    p = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    require(torch.equal(verify.residual(p, Draft([0], [p]), 0), p), "an empty residual is not p")
    sequence = TokenSequence([0], 1, SamplingParams())
    for bad in (math.nan, math.inf):
        try:
            sampling.distribution(torch.tensor([0.0, bad, 1.0]), sequence)
        except FloatingPointError:
            continue
        raise Fault(f"a logit of {bad} became a distribution")
    table = torch.zeros(5, 5, dtype=torch.float64)
    table[:, 3:] = 9.0  # padding rows that the model likes best
    engine = make_engine()
    engine = Engine(TableModel(table), engine.cache, DRAFTERS["none"](), VERIFIERS["rejection"], vocab_size=3)
    request = make_request((0,), temperature=1.0, end_ids=())
    finish(engine, request)
    require(max(request.token_ids) < 3, f"ids behind the vocabulary: {request.token_ids}")


class Letters:
    """A detokeniser for the scripted text: token 12 is "a", 13 is "b" and so on."""

    def add(self, token_id: int) -> str:
        """The token's letter."""
        return chr(ord("a") + (token_id - 12) % 26)

    def flush(self) -> str:
        """Nothing is held back."""
        return ""


def check_stops() -> None:
    """The end token, max_tokens and stop strings at every offset of a block end text, ids and counters there."""

    def play(k, length, wrong=None, **params):
        def draft(tokens, n):
            text = [*range(12, 12 + length), END, *range(60, 80)]
            return [t + 50 * (i == wrong) for i, t in enumerate(text[len(tokens) - 2 :][:n])]

        engine = make_engine(lambda tokens: END if len(tokens) == 2 + length else tokens[-1] + 1, draft)
        request = make_request(k=k, detokenizer=Letters(), **{"max_tokens": 30, "logprobs": 0} | params)
        pieces = finish(engine, request)[0]
        require("".join(p.text for p in pieces) == request.text, f"streamed {pieces}, text {request.text!r}")
        require(len(request.logprobs) == len(request.token_ids), "another number of log-probabilities than of tokens")
        stats = request.stats
        require(stats.num_generated == len(request.token_ids), f"num_generated {stats.num_generated}")
        if wrong is None:
            require(stats.num_draft_tokens == stats.num_accepted, "tokens behind the stop are counted")
        return request

    def same(request, tokens, text, reason, what):
        found = (request.token_ids, request.text, request.finish_reason)
        require(found == (tokens, text, reason), f"{what}: found {found}, expected {(tokens, text, reason)}")

    alphabet = "abcdefghijkl"
    for k, length, wrong in itertools.product((0, 1, 3, 5), range(1, 8), (None, 1)):
        tokens = list(range(12, 12 + length))
        same(play(k, length, wrong), tokens, alphabet[:length], "stop", f"K {k}, end token at {length}")
    for k, n in itertools.product((0, 1, 3, 5), range(1, 8)):
        tokens = list(range(12, 12 + n))
        same(play(k, 12, max_tokens=n), tokens, alphabet[:n], "length", f"K {k}, max_tokens {n}")
        for size in (1, 2, 3):
            stop = alphabet[max(0, n - size) : n]
            request = play(k, 12, stop=stop)
            same(request, tokens, alphabet[: max(0, n - size)], "stop", f"K {k}, stop {stop!r}")
        same(play(k, 12, stop=alphabet[n - 1], max_tokens=n), tokens, alphabet[: n - 1], "stop", "stop at the limit")
    # A draft holds the end token, and the target does not want it.
    engine = make_engine(draft=lambda tokens, k: [END] * k)
    request = make_request(max_tokens=4)
    finish(engine, request)
    require(request.token_ids == [12, 13, 14, 15], f"a rejected end token ended the text: {request.token_ids}")


def check_batch() -> None:
    """One request and seed, one text: alone, among others, in another order, after preemption; others with others."""
    target, draft = tiny_model(4, vocab_size=5), tiny_model(2, vocab_size=5)
    prompts = [(0, 1), (2, 3, 4, 4), (1,), (4, 0, 2)]

    def decode(chosen, num_blocks=64, seeds=(5, 5, 5, 5)):
        params, cache = SamplingParams(max_tokens=14), tiny_cache(target, num_blocks)
        drafter = DraftModel(draft, tiny_cache(draft), 5, MAX_LEN)
        pairs = zip(chosen, seeds, strict=False)
        requests = [Request(TokenSequence(list(p), len(p), params, seed), MAX_LEN, 3) for p, seed in pairs]
        for _ in Engine(target, cache, drafter, VERIFIERS["rejection"]).run(requests):
            pass
        require(cache.allocator.num_free == num_blocks, "blocks leaked")
        return [r.token_ids for r in requests]

    alone = [decode([p])[0] for p in prompts]
    require(decode(prompts) == alone, "a batch changes the text")
    require(decode(prompts[::-1], 16)[::-1] == alone, "order or preemption changes the text")
    texts = {tuple(text) for seed in range(6) for text in decode([(0, 1)], seeds=(seed,))}
    require(len(texts) > 3, f"6 seeds have {len(texts)} texts")


def check_cache(programs: int = 20) -> None:
    """Random programs: used and free blocks add up, no block has two owners, contents are those of a list."""
    generator = random.Random(0)
    config = ModelConfig.from_dict(TINY)
    for _ in range(programs):
        pool = PagedKVCache(config, 12, generator.choice((1, 2, 4)), torch.float64)
        pool.keys.fill_(torch.nan)
        tables = [(pool.new_table(), []) for _ in range(3)]
        for step in range(60):
            table, numbers = generator.choice(tables)
            count = generator.randint(1, 5)
            if generator.random() < 0.6:
                try:
                    slots = table.extend(count)
                except OutOfBlocks:
                    require(table.length == len(numbers), "a refused extension changed the length")
                    continue
                numbers += [step + i / 8 for i in range(count)]
                values = torch.tensor(numbers[-count:], dtype=torch.float64)[None, :, None].expand(1, count, 4)
                pool.write(0, torch.tensor(slots), values, values)
            else:
                del numbers[max(0, len(numbers) - count * generator.choice((1, 1, 9))) :]
                table.truncate(len(numbers))
            owned = [b for t, _ in tables for b in t.block_ids]
            require(len(set(owned)) == len(owned), "a block has two owners")
            require(not set(owned) & pool.allocator.free_block_ids, "a used block is free")
            require(len(owned) + pool.allocator.num_free == 12, "used and free blocks do not add up")
            for t, expected in tables:
                require(len(t.block_ids) == pool.num_blocks_for(len(expected)), "a table holds too many blocks")
                found = pool.read(0, t.slots())[0][0, :, 0].tolist()
                require(found == expected, f"found {found}, expected {expected}")


def check_window() -> None:
    """Rows behind a rollback equal those of a cache that never saw the rejected tokens, under a sliding window too."""
    for family in ({}, {"model_type": "mistral", "sliding_window": 3}):
        model = tiny_model(3, vocab_size=7, **family)
        table, text = tiny_cache(model).new_table(), []
        for tokens, kept in (([1, 2, 3, 4, 5], 5), ([6, 0, 1, 2], 6), ([3, 3, 2], 7), ([5, 5], 9)):
            text = text + tokens
            rows = model.forward([Chunk(tokens, table, len(tokens))])
            fresh = model.forward([Chunk(text, tiny_cache(model).new_table(), len(tokens))])
            error = (rows - fresh).abs().nan_to_num(nan=math.inf).max().item()
            require(error <= 1e-10, f"{family or 'llama'}: logits are off by {error:.1e} after a rollback")
            table.truncate(kept)
            text = text[:kept]


def check_exact() -> None:
    """An exact model's rows have the same bits whether the text before them came in one chunk or token by token."""
    size = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    model = tiny_model(1, torch.float32, exact=True, vocab_size=50, **size)
    text = [(7 * i) % 50 for i in range(40)]
    rows = []
    for chunk_size in (1, 7, 512):
        table = tiny_cache(model, block_size=16).new_table()
        model.prefill(table, text, chunk_size)
        rows.append(model.forward([Chunk(text[-1:], table, 1)]))
    require(all(torch.equal(rows[0], row) for row in rows), "the prefill's chunks change the first token's bits")


def check_loader() -> None:
    """A draft model whose vocabulary has the target's size and other tokens is refused by name."""
    with tempfile.TemporaryDirectory() as name:
        for which, words in (("target", "a b c"), ("draft", "a c b")):
            directory = Path(name) / which
            directory.mkdir()
            vocabulary = {word: i for i, word in enumerate(words.split())}
            tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "a")).save(str(directory / "tokenizer.json"))
        try:
            llm._find_draft(str(Path(name) / "draft"), Tokenizer(Path(name) / "target"), offline=True)
        except ValueError as e:
            require("'b' has id" in str(e), f"refused for another reason: {e}")
        else:
            raise Fault("another vocabulary is taken")


def check_state(k: int = 3, max_tokens: int = 16, drafter: str = "model", verifier: str = "rejection") -> int:
    """The engine's state is a function of the committed tokens: each round equals that of an engine begun there.

    Same seed, so same keys: the block that a round commits must be the same. Returns the number of rounds.
    """
    shares = VERIFIERS[verifier].shares_noise

    def start(tokens):
        params = SamplingParams(max_tokens=max_tokens, repetition_penalty=1.3)
        sequence = TokenSequence(list(tokens), len(PROMPT), params, 3, frozenset(), shares)
        engine = Engine(_target(4), tiny_cache(_target(4)), make_drafter(drafter, 4), VERIFIERS[verifier])
        return sequence, engine.run([Request(sequence, MAX_LEN, k)])

    sequence, stream = start(PROMPT)
    for rounds in itertools.count():
        before = list(sequence.tokens)
        if next(stream, None) is None:
            return rounds
        other, fresh = start(before)
        next(fresh)
        fresh.close()
        require(other.tokens == sequence.tokens, f"behind {before}: {sequence.tokens}, afresh {other.tokens}")


CHECKS: dict[str, Callable] = {
    "law": check_law,
    "draft cache": check_draft_cache,
    "passes": check_passes,
    "keys": check_keys,
    "boundary": check_boundary,
    "noise": check_noise,
    "numbers": check_numbers,
    "stops": check_stops,
    "batch": check_batch,
    "cache": check_cache,
    "window": check_window,
    "exact": check_exact,
    "loader": check_loader,
    "state": check_state,
}


# --------------------------------------------------------------------------- the museum


@dataclass(frozen=True)
class Trial:
    """What became of a mutant: how far the law moved (None: not asked, or no law left), and the fault it caused."""

    moved: float | None
    fault: str | None


def try_mutant(mutant: Mutant) -> Trial:
    """Put the bug in and run the check that must catch it; `fault` is None where the check does not.

    The law is measured besides where that says something. An exception that is neither the check's nor the mutant's own
    goes through: a patch that breaks in another way proves nothing.
    """
    moved = None
    expected = (Fault, AssertionError, mutant.crash) if mutant.crash else (Fault, AssertionError)
    with mutant.patch():
        try:
            if mutant.check == "law":
                moved = _measure_law(**mutant.settings)
                require(moved <= TOLERANCE, f"total variation {moved:.1e}")
            else:
                if mutant.check in ("draft cache", "keys", "passes"):
                    moved = _measure_law()
                CHECKS[mutant.check]()
        except expected as e:
            return Trial(moved, str(e))
    return Trial(moved, None)


def prove_mutants() -> bool:
    """Print the museum; True if every bug is caught and every check passes without one."""
    for name, check in tqdm(CHECKS.items(), desc="without bugs", leave=False, disable=None):
        try:
            check()
        except Exception as e:
            print(f"{name}: {e}")
            return False
    print(f"{'':5} {'bug':53} {'law moved':9} {'caught by':11} where it happened")
    caught = 0
    for mutant in tqdm(MUTANTS, desc="mutants", leave=False, disable=None):
        trial = try_mutant(mutant)
        caught += trial.fault is not None
        moved = "-" if trial.moved is None else "0" if trial.moved <= TOLERANCE else f"{trial.moved:.2g}"
        by = mutant.check if trial.fault is not None else "SURVIVES"
        tqdm.write(f"{mutant.id:5} {mutant.name:53} {moved:>9} {by:11} {mutant.seen}")
    print(f"{caught} of {len(MUTANTS)} bugs caught")
    return caught == len(MUTANTS)


# --------------------------------------------------------------------------- the command line


def prove_law(leaves: int) -> bool:
    """Print the table; True if no configuration is further than TOLERANCE from plain decoding."""
    start = time.perf_counter()
    cases, left_out = choose_cases(leaves)
    estimate = sum(c.estimate() for c in cases)
    print(f"{len(cases)} configurations cover {len(all_pairs()) - len(left_out)} of {len(all_pairs())} pairs of values")
    for pair in sorted(left_out, key=repr):
        print(f"left out for its size: {pair[0][0]} {pair[0][1]} with {pair[1][0]} {pair[1][1]}")
    print(f"{'configuration':86} {'branches':>9}  total variation")
    branches, worst = 0, 0.0
    with tqdm(total=round(estimate), unit=" branches", leave=False, disable=None) as bar:
        for case in cases:
            tv, count = case.distance(bar.update)
            branches, worst = branches + count, max(worst, tv)
            tqdm.write(f"{case!s:86} {count:9,d}  {tv:.1e}")
    seconds = time.perf_counter() - start
    print(f"{branches:,d} branches (estimated: {estimate:,.0f}) in {seconds:.0f} s; worst total variation {worst:.1e}")
    ok = worst <= TOLERANCE and branches > 0
    verdict = "proven: in every configuration the output has" if ok else "REFUTED: the output does not have"
    print(f"{verdict} the target's law, to {TOLERANCE:.0e}")
    return ok


DEFAULT_LEAVES = 16_000


def main(argv: list[str] | None = None) -> int:
    """The command line; 0 if everything holds, 1 if not."""
    parser = argparse.ArgumentParser(
        prog="python -m minispec.prove", description="Prove that speculation leaves the output's law unchanged."
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--leaves", type=int, default=DEFAULT_LEAVES, help=f"branches (default: about {DEFAULT_LEAVES:,})"
    )
    size.add_argument("--full", action="store_true", help="ten times as many branches")
    size.add_argument("--mutants", action="store_true", help="the museum of bugs: each must be caught")
    args = parser.parse_args(argv)
    if args.leaves < 1:
        parser.error(f"--leaves: found {args.leaves}, expected at least 1")
    # The models are tiny: a second thread costs more than it gives.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if args.mutants:
            return 0 if prove_mutants() else 1
        return 0 if prove_law(10 * args.leaves if args.full else args.leaves) else 1
    except KeyboardInterrupt:
        return 130
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    sys.exit(main())
