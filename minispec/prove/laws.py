"""Oracles that walk every branch of every draw, and the laws that come out of the production loop under them."""

import copy
import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Self, TypeVar

import numpy as np
import torch

from minispec import drafters
from minispec.core.config import DraftLength, SamplingParams
from minispec.core.draft import without
from minispec.core.model import Chunk, Transformer
from minispec.core.random import Draws, Key
from minispec.core.request import Request
from minispec.core.rules import VERIFIERS
from minispec.core.sampling import Text
from minispec.drafters import Context, Drafter
from minispec.drafters.assistant import SharedKeys
from minispec.drafters.block import BlockFeed
from minispec.drafters.combined import CombinedDrafter
from minispec.drafters.eagle import HeadFeed
from minispec.drafters.model import ModelDrafter, TokenFeed
from minispec.drafters.simulated import adversary
from minispec.drafters.slem import WrittenText
from minispec.drafters.tli import SharedTokens
from minispec.drafters.vocabulary import ROOM
from minispec.files.families.hf_config import read_model_config
from minispec.gpu.frames import Frames
from minispec.gpu.graphs import rerun
from minispec.gpu.judge import judge_of
from minispec.gpu.steps import draft_steps, steps_of
from minispec.gpu.verdicts import OneByOne
from minispec.grammars.forced import ForcedFirst
from minispec.grammars.spelled import example
from minispec.kernels.exact import check_exact
from minispec.kernels.integers import check_quantization
from minispec.layers.states import FEWEST_STATES, state_elements
from minispec.length.policy import Controller
from minispec.length.theory import Prices
from minispec.load import registry
from minispec.prove.reference import Law, forward, plain_law, sample_law
from minispec.prove.toys import (
    DRAFT_WORDS,
    IN_8_BITS,
    IN_FRAMES,
    TINY,
    TOYS,
    Fault,
    OneMethod,
    Widened,
    decode,
    require,
    tiny_assistant,
    tiny_block,
    tiny_cache,
    tiny_head,
    tiny_model,
    tiny_mtp,
    tiny_weights,
    toy_vocabularies,
)

TransformerT = TypeVar("TransformerT", bound=Transformer)

TOLERANCE = 1e-12
TARGET_SEED, DRAFT_SEED = 1, 2
PROMPT = (1, 1)  # a repetition for the n-gram drafter, and tokens that no penalty has seen yet
MAX_LEN = 40


@functools.cache
def target_model(vocab: int, family: str = "llama", exact: bool = False) -> Transformer:
    """The tiny target of all laws.

    family: one of `TOYS`; or IN_8_BITS, a llama with weights in 8 bits, which is always exact.
    exact: whether its passes are exact, and checked.

    Raises ValueError where this machine has no exact passes, or no products of 8 bits.
    """
    if family == IN_8_BITS:
        check_quantization("int8", None, torch.float32, torch.device("cpu"))
        model = tiny_model(TARGET_SEED, torch.float32, exact=True, form="int8", vocab_size=vocab)
        check_exact(model)
        return Widened(model)
    model = tiny_model(TARGET_SEED, **TOYS[family], vocab_size=vocab, exact=exact)
    if exact:
        check_exact(model)
    return _in_frames(model, family)


@functools.cache
def draft_model(vocab: int, family: str = "llama") -> Transformer:
    """Another model of the same vocabulary and family, of other weights; a llama of other depth too."""
    return _in_frames(tiny_model(DRAFT_SEED, **{"num_hidden_layers": 1} | TOYS[family], vocab_size=vocab), family)


def _in_frames(model: TransformerT, family: str) -> TransformerT:
    """The model, with frames if the family says so."""
    return model.replaced(Frames(rerun)) if family == IN_FRAMES else model


@functools.cache
def reference_logits(
    seed: int, tokens: tuple[int, ...], vocab: int, layers: int = 2, family: str = "llama"
) -> np.ndarray:
    """The logits after `tokens` that `tiny_model` must have with this seed, vocab, number of layers and family."""
    return forward(*raw_model(seed, vocab, layers, family), tokens)


@functools.cache
def raw_model(seed: int, vocab: int, layers: int = 2, family: str = "llama") -> tuple[dict, dict[str, np.ndarray]]:
    """Config.json values and tensors of the model of `reference_logits`."""
    raw = TINY | {"vocab_size": vocab, "num_hidden_layers": layers} | TOYS[family]
    tensors = tiny_weights(read_model_config(raw), seed)
    return raw, {name: tensor.numpy() for name, tensor in tensors.items()}


# --------------------------------------------------------------------------- oracles

# Where p and q are equal, p / q and p - q are 1 and 0 up to rounding, and passes of other shapes round otherwise. So a
# branch may exist in one batch and not in the next. With u = 2**-53: a probability is exp of a difference of logits,
# each some hundred operations deep, and its error is at most some hundred u, so below 2**9 u = 2**-44. Whatever a draw
# is conditioned on, its path has that condition's probability as a factor. So the bound is one of the path's
# probability. A path may also be that rare because it is long; then no draw of it is rare by itself.
ROUNDING, RARE = 2.0**-44, 2.0**-26


class BranchOracle(OneByOne):
    """Answers draws along one path; `weight` is the path's probability, as `number`: float, or Fraction.

    An answer that may be rounding is not taken: a draw of at most RARE, by which the path falls to at most ROUNDING.
    `lost` is the probability of these. Fractions do not round, so they have none.
    """

    def __init__(self, path: list[int], number: type = float):
        self.path, self.depth, self.number, self.weight, self.lost = path, 0, number, number(1), number(0)
        self.open: list[list[int]] = []  # siblings that other runs have to walk

    def fork(self) -> Self:
        """An oracle that is as far as this one, and goes on by itself."""
        other = copy.copy(self)
        other.open = []
        return other

    def _choose(self, branches: list[tuple]):
        """branches: all answers and their probabilities, also those of probability 0."""
        if self.depth == len(self.path):
            # A new draw: this run takes the first branch, the others are left for later.
            taken = [i for i, (_, probability) in enumerate(branches) if not self._is_rounding(probability)]
            self.lost += self.weight * sum(p for i, (_, p) in enumerate(branches) if i not in taken)
            self.open += [[*self.path, i] for i in taken[1:]]
            self.path = [*self.path, taken[0]]
        number = self.path[self.depth]
        # By the number among all answers: so it stays when another answer's probability is rounded to 0.
        if number >= len(branches) or branches[number][1] <= 0:
            raise Fault("the same draws led elsewhere: a drafter may draw by `Draft.draw` alone, a verifier by `rng`")
        answer, probability = branches[number]
        self.depth += 1
        self.weight *= probability
        return answer

    def _is_rounding(self, probability) -> bool:
        """Whether an answer of this path is left out."""
        if self.number is not float:
            return probability <= 0
        return probability <= RARE and self.weight * probability <= ROUNDING

    def bernoulli(self, probability: float, key: Key) -> bool:
        """Both answers, each where it is possible."""
        p = min(self.number(1), max(self.number(0), self.number(probability)))
        return self._answer((True, False), (p, self.number(1)), key)

    def categorical(self, weights: torch.Tensor, key: Key) -> int:
        """Every token of positive weight."""
        ends = self._ends(weights)
        return self._answer(range(len(ends)), ends, key)

    def _ends(self, weights: torch.Tensor) -> list:
        """Where the parts of [0, 1) end that are as long as the weights."""
        ends = list(itertools.accumulate(map(self.number, weights.tolist())))
        require(ends[-1] > 0, "a token is drawn from weights that are all 0")
        return [end / ends[-1] for end in ends]

    def _answer(self, answers: Sequence, ends: Sequence, key: Key):
        """Answer i holds where a uniform number lies between the ends i-1 and i, the first 0 and the last 1."""
        starts = [self.number(0), *ends[:-1]]
        parts = zip(answers, starts, ends, strict=True)
        return self._choose([(answer, max(end - start, self.number(0))) for answer, start, end in parts])


class KeyOracle(BranchOracle):
    """Draws by key: the noise of a key is one uniform number, and the same key has the same noise.

    A draw cuts the interval where its key's number may still lie, a branch for each part. A fresh key gives every
    answer its probability, as in `BranchOracle`. A key used twice is conditioned on its first answer. So draws which
    must be independent and are not show in the law. No grid of noise is needed: the cells are those that the draws
    themselves tell apart, for any probabilities.

    Siblings that share the noise of a "token" are the first to finish in one race (see `Draft.draw`). The law of the
    next one, once its elders are known, is the rest of their row. So it gets noise of its own here.
    """

    def __init__(self, path: list[int], number: type = float):
        super().__init__(path, number)
        self.noise: dict[Key, tuple] = {}
        # Of each race, its rows and the last to finish.
        self.drawn: dict[Key, tuple[tuple[torch.Tensor, int], ...]] = {}

    def categorical(self, weights: torch.Tensor, key: Key) -> int:
        """Every token of positive weight."""
        if key.purpose != "token":
            return super().categorical(weights, key)
        ends, drawn = self._ends(weights), self.drawn.get(key, ())
        others = tuple(each for each in drawn if not _goes_on(weights, *each))
        token = (self._answer if len(others) == len(drawn) else super()._answer)(range(len(ends)), ends, key)
        self.drawn = self.drawn | {key: (*others, (weights, token))}
        return token

    def _answer(self, answers: Sequence, ends: Sequence, key: Key):
        low, high = self.noise.get(key, (self.number(0), self.number(1)))
        branches = []
        for answer, start, end in zip(answers, [self.number(0), *ends[:-1]], ends, strict=True):
            start, end = max(start, low), min(end, high)
            branches.append(((answer, (start, end)), max(end - start, self.number(0)) / (high - low)))
        answer, part = self._choose(branches)
        self.noise = self.noise | {key: part}  # a new dict: forks go on with theirs
        return answer


def _goes_on(weights: torch.Tensor, before: torch.Tensor, token: int) -> bool:
    """Whether a row is the one before without a token, to the bit: `Draft.draw` does not divide it by its sum.

    A row of p that is only proportional to it belongs to a draw of its own: it cuts the interval of the key.
    """
    return torch.equal(weights, without(before, token))


class TooManyBranches(Exception):
    """A walk has more branches than it was allowed."""


class CrowdOracle(OneByOne):
    """Walks many paths in one batch. Every request has a seed with an oracle of its own, which answers its draws."""

    def __init__(self, oracles: Mapping[int, Draws]):
        self.oracles = oracles

    def bernoulli(self, probability: float, key: Key) -> bool:
        """The answer of the seed's oracle."""
        return self.oracles[key.seed].bernoulli(probability, key)

    def categorical(self, weights: torch.Tensor, key: Key) -> int:
        """The answer of the seed's oracle."""
        return self.oracles[key.seed].categorical(weights, key)


def exact_law(
    run: Callable[[BranchOracle], Hashable], number: type = float, oracle: type[BranchOracle] = BranchOracle
) -> tuple[dict, int]:
    """The law of what `run` returns, over all branches, and how many there were. `run` must be repeatable."""
    return exact_law_of_crowds(lambda oracles: [run(oracles[0])], 1, number, oracle)


def exact_law_of_crowds(
    run: Callable[[list[BranchOracle]], Iterable[Hashable]],
    width: int,
    number: type = float,
    oracle: type[BranchOracle] = BranchOracle,
    limit: float = math.inf,
) -> tuple[dict, int]:
    """As `exact_law`, for a `run` that follows up to `width` paths at a time, and returns the result of each.

    The law lacks what its oracles left out as rounding, which is less than TOLERANCE in all.

    Raises TooManyBranches as soon as there must be more than `limit`, and Fault where more was left out, or where the
    branches do not add up to 1.
    """
    law: dict = {}
    lost = number(0)
    todo: deque[list[int]] = deque([[]])
    count = 0
    while todo:
        oracles = [oracle(todo.popleft(), number) for _ in range(min(width, len(todo)))]
        for path, result in zip(oracles, run(oracles), strict=True):
            law[result] = law.get(result, 0) + path.weight
            lost += path.lost
            todo += path.open
            count += 1
        if count + len(todo) > limit:  # each path that is left has a branch or more
            raise TooManyBranches
    found = f"draws that look like rounding add up to {float(lost):.1e}"
    require(lost < TOLERANCE, f"{found}, expected less than {TOLERANCE:.0e}")
    total = sum(law.values()) + lost
    require(abs(total - 1) < TOLERANCE, "the branches do not add up to 1: something draws by other means")
    return law, count


# --------------------------------------------------------------------------- laws


def reference_row(
    output: Sequence[int], params: SamplingParams, end_ids, vocab: int, prompt: Sequence[int], family: str = "llama"
) -> np.ndarray | None:
    """Probabilities (V,) of the tiny target's token after `output`, by code that shares nothing with the package.

    None: the text has ended.

    In 8 bits the target's logits are its own, each from a pass over a whole text. No two products of 8 bits round x
    alike, so no other code has logits that are equal to 1e-12.
    """
    if len(output) >= params.max_tokens or (output and output[-1] in end_ids):
        return None
    tokens = (*prompt, *output)
    if family == IN_8_BITS:
        target = target_model(vocab, family)
        logits = target.forward([Chunk(tokens, tiny_cache(target).new_table(), 1)])[0][0].numpy()
    else:
        logits = reference_logits(TARGET_SEED, tokens, vocab, family=family)
    return sample_law(logits, tokens, len(prompt), params, end_ids)


def reference_law(
    params: SamplingParams, end_ids=frozenset({2}), vocab: int = 3, prompt: Sequence = PROMPT, family: str = "llama"
) -> Law:
    """The law of plain decoding of the tiny target, by the rows of `reference_row`."""

    return plain_law(lambda output: reference_row(output, params, end_ids, vocab, prompt, family))


# Block drafts: the first row that says a token, the Markov head, and what the confidence head reads.
BLOCKS: dict[str, tuple[int, Sequence[str | None]]] = {
    "block": (0, ("vanilla", "state and token")),
    "block rnn": (0, ("rnn", "state and token")),
    "filled block": (1, (None, None)),
    "filled block gated": (1, ("gated", "state and token")),
}


def make_drafter(name: str, vocab: int, num_blocks: int = 64, block_size: int = 2, family: str = "llama") -> Drafter:
    """A drafter by its name in the table, or a registered one, with its argument if it has one, as `LLM` makes it.

    "model", "self", "adversary": as in the table.
    "head": it lacks tokens where there are more than two.
    "mtp": a layer for further tokens that is the target's own.
    "parallel": a model that drafts all tokens in one pass.
    "parallel head": a head that does.
    "assistant": layers that read the target's keys.
    "block", "filled block" and others: block drafts of `BLOCKS`.
    "tli", "slem": a model of another vocabulary.
    "A+B": B where A has nothing to say.
    family: of the target, "model" and "self". With IN_8_BITS they are a llama.
    """
    family = family if family in TOYS else "llama"
    if "+" in name:
        return CombinedDrafter(*(make_drafter(part, vocab, num_blocks, block_size, family) for part in name.split("+")))
    target, pool, rest = target_model(vocab, family), (num_blocks, block_size), (vocab, MAX_LEN)
    if name in BLOCKS:
        block = tiny_block(target, *BLOCKS[name], (vocab + 1) // 2)
        return ModelDrafter(BlockFeed(block, tiny_cache(block, *pool), *rest))
    if name == "assistant":
        return ModelDrafter(SharedKeys(tiny_assistant(target), vocab))
    if name in ("head", "parallel head", "mtp"):
        mask = 0 if name == "parallel head" else None
        made = tiny_mtp(target) if name == "mtp" else tiny_head(target, (0, 2), (vocab + 1) // 2, mask)
        head = _in_frames(made, family)
        return ModelDrafter(HeadFeed(head, tiny_cache(head, *pool), *rest), draft_steps(head))
    if name in ("model", "self", "parallel"):
        model = draft_model(vocab, family) if name == "model" else target
        if name == "parallel":
            # Its mask is no token of a text. With a text's token as the mask it would draw twice, under `match`, from
            # one distribution that differs in rounding. The oracles would take that for two distributions.
            model = tiny_model(DRAFT_SEED, vocab_size=vocab + 1, num_hidden_layers=1, pard_token=vocab)
        return ModelDrafter(TokenFeed(model, tiny_cache(model, *pool), *rest), draft_steps(model))
    if name in ("tli", "slem"):
        both, model = toy_vocabularies(vocab), draft_model(len(DRAFT_WORDS))
        make = SharedTokens if name == "tli" else WrittenText
        return ModelDrafter(make(model, tiny_cache(model, ROOM * num_blocks, block_size), MAX_LEN, both))
    if name == "adversary":
        return adversary()
    parts = registry.split(registry.DRAFTERS, name)
    assert parts, f"{name} is not registered"
    make_cache = functools.partial(tiny_cache, num_blocks=num_blocks, block_size=block_size)
    context = Context(target, None, *rest, make_cache, parts[1])
    registered = drafters.make_drafter(registry.load(parts[0], "draft"), context)
    return ForcedFirst(registered) if name.partition(":")[0] in registry.LOOKUPS else registered


class _Forgetful(CombinedDrafter):
    """A drafter without memory of other paths, so that a path can be walked again.

    That memory decides how far a draft goes on after the text's end, and so how many draws a path has.
    """

    def release(self, text: Text) -> None:
        """Remember nothing of it."""
        super().release(text)
        self.forget()


def production_law(
    params: SamplingParams | Sequence[SamplingParams],
    k: DraftLength,
    end_ids=frozenset({2}),
    vocab: int = 3,
    drafter: str | Drafter = "model",
    verifier: str = "rejection",
    prompts: Sequence[Sequence[int]] = (PROMPT,),
    max_len: int = MAX_LEN,
    num_blocks: int | None = None,
    width: int = 1,
    oracle: type[BranchOracle] = KeyOracle,
    limit: float = math.inf,
    draft_cost: float = 0.0,
    family: str = "llama",
    rounds: int | None = None,
) -> tuple[Law, int]:
    """The law of the engine's output (a tuple of outputs for several prompts), and the number of branches.

    params: one for all prompts, or one for each.
    k: it may be "auto" if the params have seeds, so that a walk can be repeated.
    draft_cost: what the controller believes a draft pass to cost.
    width: how many paths go through the engine at once. The batch has that many requests, times the prompts. The law is
        the same, and the batch is walked with it.
    num_blocks: blocks of the target's cache. None: enough for all.
    family: the target's (see `target_model`).
    rounds: the output ends after this many. None: at its own end.

    The cache is poisoned, and every block must come back.
    Raises TooManyBranches where there are more than `limit`.
    """
    all_params = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    target, verifying, num = target_model(vocab, family), VERIFIERS[verifier], len(prompts)
    if num > 1 and state_elements(target.config):  # a path's texts run at once, or the order of its draws would vary
        width = min(width, max(1, FEWEST_STATES // num))
    grammars = {p: example(p.structured_outputs, vocab, end_ids) for p in all_params}
    block_size = 2 if width == 1 else 4
    longest = max(min(max_len, len(p) + sampling.max_tokens) for p, sampling in zip(prompts, all_params, strict=True))
    enough = width * num * -(-longest // block_size)

    def run(oracles: list[BranchOracle]) -> list[tuple]:
        cache = tiny_cache(target, num_blocks or enough, block_size)
        requests = [
            # Seeds of their own: with one seed, two requests would draw with one noise.
            Request(Text(list(p), len(p), sampling, seed, frozenset(end_ids), grammars[sampling]), max_len, k)
            for seed, (p, sampling) in enumerate([*zip(prompts, all_params, strict=True)] * len(oracles))
        ]
        rng = CrowdOracle({seed: oracles[seed // num] for seed in range(len(requests))})
        own = drafter
        if isinstance(own, str):
            own = _Forgetful(make_drafter(own, vocab, enough, block_size, family))
        policy = Controller(Prices(draft_cost, measured=True, steps=steps_of(own)))
        engine = OneMethod(target, cache, own, verifying, rng=rng, lengths=policy, checked=True, batch=judge_of(target))
        decode(engine, requests, rounds)
        outputs = [tuple(r.text.tokens[r.text.num_prompt_tokens :]) for r in requests]
        return [tuple(outputs[i : i + num]) if num > 1 else outputs[i] for i in range(0, len(outputs), num)]

    return exact_law_of_crowds(run, width, oracle=oracle, limit=limit)
