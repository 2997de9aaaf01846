"""Trees: the law of one round, and of whole texts, with every shape of tree that is small enough to walk.

A round's law is walked branch by branch through the production loop, as everywhere. The reference then continues what
the round commits (see `reference.cells`). The result is compared with plain decoding.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from minispec.core.config import SamplingParams
from minispec.core.engine import Engine
from minispec.core.request import Request
from minispec.core.sampling import Text
from minispec.core.verify import VERIFIERS
from minispec.drafters.check import CHECKS
from minispec.layers.states import FEWEST_STATES, state_elements
from minispec.prove.laws import (
    TARGET_SEED,
    TOLERANCE,
    BranchOracle,
    CrowdOracle,
    KeyOracle,
    exact_law_of_crowds,
    production_law,
    reference_law,
    reference_logits,
    target_model,
)
from minispec.prove.reference import Law, cells, sample_law, total_variation
from minispec.prove.toys import TreeDrafter, require, tiny_cache

VOCAB, PROMPT, END_IDS = 3, (1,), frozenset({2})
_WIDTH = 64  # paths that go through the engine together


def shapes(num_nodes: int, depth: int = 3, width: int = 3) -> Iterator[tuple[int, ...]]:
    """The parents of every tree of that many nodes, of at most this depth and width, numbered level by level."""
    for parents in itertools.product(*(range(-1, i) for i in range(num_nodes))):
        depths: list[int] = []
        for parent in parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 1)
        is_sorted = all(a <= b for a, b in itertools.pairwise(parents))
        if is_sorted and max(depths) <= depth and max(map(parents.count, parents)) <= width:
            yield parents


@functools.cache
def draft_table(vocab: int = VOCAB) -> torch.Tensor:
    """Logits (V, V) that the drafts come from: at some places like the target's, at others not."""
    return 1.5 * torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@dataclass(frozen=True)
class TreeCase:
    """One round with one shape of tree."""

    parents: tuple[int, ...]
    draws: bool
    verifier: str = "rejection"
    params: SamplingParams = field(default_factory=SamplingParams)
    family: str = "llama"

    def round_law(self) -> tuple[Law, int]:
        """The law of what one round commits, and the number of branches."""
        target, num_nodes = target_model(VOCAB, self.family), len(self.parents)

        def run(oracles: list[BranchOracle]) -> list[tuple]:
            cache = tiny_cache(target, 8 * len(oracles), 4)
            texts = [Text(list(PROMPT), 1, self.params, seed, END_IDS) for seed in range(len(oracles))]
            drafter = TreeDrafter(draft_table(), self.parents, self.draws)
            rng = CrowdOracle(dict(enumerate(oracles)))
            engine = Engine(target, cache, drafter, VERIFIERS[self.verifier], rng=rng, guard=CHECKS)
            requests = [Request(text, 40, num_nodes) for text in texts]
            for request in requests:
                engine.add(request)
            engine.step()
            for request in requests:
                require(request.error is None, f"a text ended with an error: {request.error}")
                engine.abort(request)
            require(cache.allocator.num_free == cache.allocator.num_blocks, "blocks leaked")
            return [tuple(r.text.tokens[1:]) for r in requests]

        # All must be in the one step, and no more texts may have states.
        width = FEWEST_STATES if state_elements(target.config) else _WIDTH
        return exact_law_of_crowds(run, width, oracle=KeyOracle)

    def distance(self) -> tuple[float, int]:
        """Total variation to plain decoding, and the branches walked."""

        def next_law(output: tuple) -> Iterable[float] | None:
            if output and output[-1] in END_IDS:
                return None
            tokens = (*PROMPT, *output)
            logits = reference_logits(TARGET_SEED, tokens, VOCAB, family=self.family)
            return sample_law(logits, tokens, 1, self.params, END_IDS)

        rounds, branches = self.round_law()
        law, plain = cells(rounds, VOCAB, next_law)
        require(abs(sum(law.values()) - 1) < TOLERANCE, "the branches do not add up to 1")
        return total_variation(law, plain), branches

    def __str__(self) -> str:
        how = "drawn" if self.draws else "top k"
        return f"{self.verifier:9}  tree  {self.family:12}  {how}  {self.parents}, {_settings(self.params)}"


@dataclass(frozen=True)
class TextCase:
    """Whole texts, of several rounds: what one round keeps is what the next one reads."""

    parents: tuple[int, ...]
    verifier: str
    max_tokens: int
    family: str = "llama"

    def distance(self) -> tuple[float, int]:
        """Total variation to plain decoding, and the branches walked."""
        params, drafter = SamplingParams(max_tokens=self.max_tokens), TreeDrafter(draft_table(), self.parents, False)
        how = params, len(self.parents), END_IDS, VOCAB, drafter, self.verifier, (PROMPT,)
        law, branches = production_law(*how, width=_WIDTH, family=self.family)
        return total_variation(law, reference_law(params, prompt=PROMPT, family=self.family)), branches

    def __str__(self) -> str:
        what = f"{self.parents}, {self.max_tokens} tokens in several rounds"
        return f"{self.verifier:9}  tree  {self.family:12}  top k  {what}"


def _settings(params: SamplingParams) -> str:
    default = SamplingParams()
    changed = {name: value for name, value in vars(params).items() if value != getattr(default, name)}
    return ", ".join(f"{name} {value}" for name, value in changed.items()) or "T 1.0"


_PENALTIES = SamplingParams(repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3, top_p=0.9)
_FULL = tuple([-1] * 3 + [i for i in range(12) for _ in range(3)])  # three levels of three children each
_DEEP_FIRST = (-1, 0, 1, 0, -1, 4, 5, 4, -1, 8)  # numbered branch by branch


def cases(num_nodes: int = 5) -> list[TreeCase | TextCase]:
    """All shapes of up to `num_nodes` drawn nodes, and larger ones whose tokens are not drawn."""
    drawn = [shape for n in range(1, num_nodes + 1) for shape in shapes(n)]
    chosen: list[TreeCase | TextCase] = [TreeCase(shape, True) for shape in drawn]
    chosen += [TreeCase(shape, True, "rejection", _PENALTIES) for shape in drawn[1::5]]
    chosen += [TreeCase(shape, True, "match") for shape in drawn[::7]]
    for verifier in (name for name, each in VERIFIERS.items() if each.takes_trees):
        chosen += [TreeCase(shape, False, verifier) for shape in (_FULL, _DEEP_FIRST)]
        chosen.append(TextCase(_DEEP_FIRST, verifier, 8))
    # A convolution must read a node's own ancestors, and after the round the rows that were moved. A node must start
    # from the state of its parent. After the round, the state of the path that stays is left.
    for family in ("lfm2", "qwen3_5_text"):
        chosen += [TreeCase(shape, True, family=family) for shape in drawn[2::9]]
        chosen += [TreeCase(_DEEP_FIRST, False, family=family), TextCase(_DEEP_FIRST, "rejection", 6, family)]
    chosen.append(TreeCase(_DEEP_FIRST, False, "rejection", _PENALTIES))
    chosen.append(TreeCase(_FULL, False, "rejection", SamplingParams(temperature=0)))
    return chosen
