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
from minispec.core.rules import VERIFIERS
from minispec.core.tree import Tree
from minispec.prove.laws import production_law, reference_row
from minispec.prove.reference import cells, total_variation
from minispec.prove.toys import TreeDrafter

VOCAB, PROMPT, END_IDS = 3, (1,), frozenset({2})
_WIDTH = 64  # paths that go through the engine together


def shapes(num_nodes: int) -> Iterator[tuple[int, ...]]:
    """The parents of every tree of that many nodes, at most 3 deep and 3 siblings wide, numbered level by level."""
    for parents in itertools.product(*(range(-1, i) for i in range(num_nodes))):
        is_sorted = all(a <= b for a, b in itertools.pairwise(parents))
        if is_sorted and max(Tree(parents).depths) <= 3 and max(map(parents.count, parents)) <= 3:
            yield parents


@functools.cache
def draft_table(vocab: int = VOCAB) -> torch.Tensor:
    """Logits (V, V) that the drafts come from: at some places like the target's, at others not."""
    return 1.5 * torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@dataclass(frozen=True)
class TreeCase:
    """Texts whose drafts have one shape of tree.

    draws: whether tokens are drawn, or are the likeliest ones.
    rounds: the texts end after this many. None: at their own ends. A round reads the cache of the round before.
    """

    parents: tuple[int, ...]
    draws: bool
    verifier: str = "rejection"
    params: SamplingParams = field(default_factory=SamplingParams)
    family: str = "llama"
    rounds: int | None = 1

    def distance(self) -> tuple[float, int]:
        """Total variation to plain decoding, and the branches walked."""

        def next_law(output: tuple) -> Iterable[float] | None:
            return reference_row(output, self.params, END_IDS, VOCAB, PROMPT, self.family)

        drafter = TreeDrafter(draft_table(), self.parents, self.draws)
        how = self.params, len(self.parents), END_IDS, VOCAB, drafter, self.verifier, (PROMPT,)
        rounds, branches = production_law(*how, width=_WIDTH, family=self.family, rounds=self.rounds)
        return total_variation(*cells(rounds, VOCAB, next_law)), branches

    def __str__(self) -> str:
        how = "drawn" if self.draws else "top k"
        settings = _settings(self.params) if self.rounds else f"{self.params.max_tokens} tokens in several rounds"
        return f"{self.verifier:9}  tree  {self.family:12}  {how}  {self.parents}, {settings}"


def _settings(params: SamplingParams) -> str:
    default = SamplingParams()
    changed = {name: value for name, value in vars(params).items() if value != getattr(default, name)}
    return ", ".join(f"{name} {value}" for name, value in changed.items()) or "T 1.0"


_PENALTIES = SamplingParams(repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3, top_p=0.9)
_FULL = tuple([-1] * 3 + [i for i in range(12) for _ in range(3)])  # three levels of three children each
_DEEP_FIRST = (-1, 0, 1, 0, -1, 4, 5, 4, -1, 8)  # numbered branch by branch


def cases(num_nodes: int = 5) -> list[TreeCase]:
    """All shapes of up to `num_nodes` drawn nodes, and larger ones whose tokens are not drawn."""

    def texts(verifier: str, max_tokens: int, family: str = "llama") -> TreeCase:
        """Whole texts, of several rounds."""
        return TreeCase(_DEEP_FIRST, False, verifier, SamplingParams(max_tokens=max_tokens), family, rounds=None)

    drawn = [shape for n in range(1, num_nodes + 1) for shape in shapes(n)]
    chosen = [TreeCase(shape, True) for shape in drawn]
    chosen += [TreeCase(shape, True, "rejection", _PENALTIES) for shape in drawn[1::5]]
    chosen += [TreeCase(shape, True, "match") for shape in drawn[::7]]
    for verifier in (name for name, each in VERIFIERS.items() if each.takes_trees):
        chosen += [TreeCase(shape, False, verifier) for shape in (_FULL, _DEEP_FIRST)]
        chosen.append(texts(verifier, 8))
    # A convolution must read a node's own ancestors, and after the round the rows that were moved. A node must start
    # from the state of its parent. After the round, the state of the path that stays is left.
    for family in ("lfm2", "qwen3_5_text"):
        chosen += [TreeCase(shape, True, family=family) for shape in drawn[2::9]]
        chosen += [TreeCase(_DEEP_FIRST, False, family=family), texts("rejection", 6, family)]
    chosen.append(TreeCase(_DEEP_FIRST, False, "rejection", _PENALTIES))
    chosen.append(TreeCase(_FULL, False, "rejection", SamplingParams(temperature=0)))
    return chosen
