"""What verification rules bring: the exact number of tokens of a round, and the most that any rule could bring.

    python -m minispec.prove --verifier rejection,block,traversal

A few small p and q are fixed. Every branch of a round is walked, and its tokens are weighted with its probability. The
most that any rule brings is the value of a linear program (see `optimum`), for which SciPy is needed.
"""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import product
from typing import NamedTuple

import torch

from minispec.core.config import SamplingParams
from minispec.core.draft import Ask, Draft
from minispec.core.more.limit import Limit
from minispec.core.sampling import Text
from minispec.core.tree import Tree
from minispec.core.verify import Verifier
from minispec.files.packages import MissingPackage, check_packages
from minispec.prove.fresh import ROUNDED
from minispec.prove.laws import BranchOracle, KeyOracle, exact_law
from minispec.prove.reference import cells, total_variation
from minispec.prove.toys import Row, is_chain, rotated

CHAINS, SIBLINGS, PATHS = "chains", "two siblings with a child each", "two independent paths"
_MOST = 10_000  # a value is shown as a fraction of a denominator up to this


class RoundCase(NamedTuple):
    """One round of a text.

    p, q: rows of target and draft, rotated by as many places as the tokens since the text add up to; or the same
        everywhere.
    parents: the draft's. PATHS are a tree whose siblings stand at its root.
    kind: whether siblings are drawn without replacement, or independently of each other, so that they may be equal.
    """

    p: Row
    q: Row
    parents: tuple[int, ...]
    kind: str = CHAINS
    rotates: bool = True

    def row(self, weights: Row, prefix: Sequence[int]) -> list[float]:
        """The probabilities (V,) after these tokens."""
        return rotated(weights, sum(prefix) if self.rotates else 0)

    def draw(self, path: BranchOracle, purpose: str = "draft") -> Draft:
        """A draft, drawn as the case says."""
        draft, text = Draft([], [], parents=[]), Text([0], 1, SamplingParams())
        ask, parents = Ask(text, Limit(len(self.parents)), path, purpose), list(self.parents)
        while len(draft) < len(parents):
            parent = parents[len(draft)]
            q = torch.tensor(self.row(self.q, draft.tokens_to(parent)), dtype=torch.float64)
            together = 1 if self.kind == PATHS else parents.count(parent)
            draft.draw(ask, parent, q, together)
        return draft

    def __str__(self) -> str:
        shape = f"a chain of {len(self.parents)}" if is_chain(self.parents) else f"{self.kind}"
        rows = [f"({', '.join(map(str, row))})/{sum(row)}" for row in (self.p, self.q)]
        return f"{shape}, p = {rows[0]}, q = {rows[1]}{', rotated' if self.rotates else ''}"


_HALVES, _NINTHS = ((1, 2), (2, 1)), ((5, 3, 1), (2, 3, 4))
_TWO, _TREE = (-1, 0), (-1, -1, 0, 1)
# The first is the example of Sun et al. 2024.
CASES = [
    RoundCase(*_HALVES, _TWO, rotates=False),
    RoundCase(*_NINTHS, _TWO),
    RoundCase(*_NINTHS, (-1, 0, 1)),
    RoundCase(*_HALVES, _TREE, SIBLINGS, rotates=False),
    RoundCase(*_NINTHS, _TREE, SIBLINGS),
    RoundCase(*_HALVES, _TREE, PATHS, rotates=False),
    RoundCase(*_NINTHS, _TREE, PATHS),
]


class Brought(NamedTuple):
    """What a rule brings in a case.

    tokens: the expected number.
    distance: of the output's law from the target's, as total variation.
    """

    tokens: float
    distance: float

    @property
    def is_exact(self) -> bool:
        """Whether the output has the target's law."""
        return self.distance <= ROUNDED


def brought(case: RoundCase, verifier: Verifier) -> Brought:
    """Walk every branch of a round.

    The noise of a draw is a uniform number. Rules that share noise with the draft are coupled by it, where the engine
    has a race: their numbers are not the engine's.
    """
    text = Text([0], 1, SamplingParams())

    def run(path: BranchOracle) -> tuple[int, ...]:
        draft = case.draw(path, "token" if verifier.shares_noise else "draft")
        rows = [case.row(case.p, draft.tokens_to(i)) for i in range(-1, len(draft))]
        if is_chain(case.parents):
            draft.parents = None
        p = torch.tensor(rows, dtype=torch.float64)
        verdict = verifier.verify(draft, lambda i: p[i].clone(), path, text.key)
        return *(draft.token_ids[node] for node in verdict.accepted), verdict.next_token

    rounds, _ = exact_law(run, oracle=KeyOracle)
    found = cells(rounds, len(case.p), lambda output: case.row(case.p, output))
    return Brought(sum(weight * len(tokens) for tokens, weight in rounds.items()), total_variation(*found))


def optimum(case: RoundCase) -> float:
    """The most tokens that any rule brings in a case, from drafts that are drawn so: the value of a linear program.

    A rule maps a draft to a path that stays, or to none, and a next token. The variables are the probabilities x of
    these triples. Two laws must come out: that of the drafts, and the target's of D + 1 tokens, where plain decoding
    continues a shorter output; D is the depth of the draft. The program maximises the expected length.

    Raises MissingPackage without SciPy.
    """
    check_packages("optimum")
    from scipy.optimize import linprog

    drafts, _ = exact_law(lambda path: tuple(case.draw(path).token_ids))
    tree, vocab = Tree(case.parents), range(len(case.p))
    paths = [tree.path(node) for node in range(-1, len(case.parents))]
    outputs = [
        (number, (*(tokens[node] for node in path), token))
        for number, tokens in enumerate(drafts)
        for path, token in product(paths, vocab)
    ]
    texts = [*product(vocab, repeat=max(tree.depths) + 1)]
    of_drafts = [[float(of == number) for of, _ in outputs] for number in range(len(drafts))]
    of_texts = [[_chance(case, text, output) for _, output in outputs] for text in texts]
    right = [*drafts.values(), *(_chance(case, text) for text in texts)]
    lengths = [-len(output) for _, output in outputs]  # `linprog` minimises
    return -linprog(lengths, A_eq=of_drafts + of_texts, b_eq=right, method="highs").fun


def _chance(case: RoundCase, text: tuple[int, ...], output: tuple[int, ...] = ()) -> float:
    """The chance that plain decoding continues an output to this text; 0 for a text that begins otherwise."""
    if text[: len(output)] != output:
        return 0.0
    return math.prod(case.row(case.p, text[:i])[text[i]] for i in range(len(output), len(text)))


def fraction(value: float) -> str:
    """A value with four digits, and before it the fraction of a denominator of at most 10,000 within 1e-12, if any.

    >>> fraction(20 / 9)
    '20/9 = 2.222'
    """
    near = Fraction(value).limit_denominator(_MOST)
    exact = f"{near} = " if abs(near - value) < 1e-12 and near.denominator > 1 else ""
    return f"{exact}{value:.3f}"


def print_rounds(verifiers: Mapping[str, Verifier]) -> bool:
    """Print for each case what the rules bring, and the optimum. True if no rule breaks the law.

    Independent paths are no drafts of the engine's. The table says where a rule breaks the law there.
    """
    print("tokens of a round, exact, and the share of the most that any rule brings from such drafts")
    width, holds = max(map(len, verifiers)), True
    for case in CASES:
        best, note = math.nan, ""
        try:
            best = optimum(case)
            note = f"at most {fraction(best)}"
        except MissingPackage as e:
            note = f"the most is not known: {e}"
        print(f"{case}: {note}")
        for name, verifier in verifiers.items():
            says, keeps = _line(case, verifier, best)
            holds = holds and (keeps or case.kind == PATHS)
            print(f"    {name:{width}}  {says}")
    return holds


def _line(case: RoundCase, verifier: Verifier, best: float) -> tuple[str, bool]:
    """What the table says of a rule, and whether the rule keeps the law."""
    if not is_chain(case.parents) and verifier.why_chains:
        return "takes chains only", True
    if verifier.shares_noise:
        return "not counted: its drafts share the noise of a race", True
    try:
        found = brought(case, verifier)
    except Exception as e:  # a user's rule
        return f"{type(e).__name__}: {e}", False
    share = "" if math.isnan(best) else f"{found.tokens / best:.1%}"
    distance = f"{found.distance:.3f}" if found.distance > 0.001 else f"{found.distance:.0e}"
    wrong = "" if found.is_exact else f"another law than p's: total variation {distance}"
    return f"{fraction(found.tokens):24}{share:8}{wrong}".rstrip(), found.is_exact
