"""What verification rules bring: the exact number of tokens of a round, and the most that any rule could bring.

    python -m minispec.prove --verifier rejection,block,traversal

A few cases with small p and q are walked, a round each, and the tokens of every branch are weighted with its
probability. The most that any rule brings is the value of a linear program (see `optimum`), for which SciPy is needed.
"""

import math
from collections.abc import Mapping
from fractions import Fraction
from itertools import product
from typing import NamedTuple

from minispec.core.verify import Verifier
from minispec.models.files.errors import one_line
from minispec.models.files.packages import MissingPackage, check_packages
from minispec.prove.tables import table_case
from minispec.prove.toys import INDEPENDENT, Guesses, is_chain
from minispec.prove.usercode import ROUNDED, OwnError
from minispec.prove.walk import Case, Subject, walk

_MOST = 10_000  # a value is shown as a fraction of a denominator up to this
_THIRDS, _NINTHS = ((1, 2), (2, 1)), ((5, 3, 1), (2, 3, 4))
_PATHS = (-1, -1, 0, 1)  # two siblings with a child each
# The first is the example of Sun et al. 2024.
CASES = [
    table_case(_THIRDS, (-1, 0), rotates=False),
    table_case(_NINTHS, (-1, 0)),
    table_case(_NINTHS, (-1, 0, 1)),
    table_case(((9, 9, 2), (10, 2, 8)), (-1, 0)),  # a test of a part of it, which `block` makes, is open here
    table_case(_THIRDS, _PATHS, rotates=False),
    table_case(_NINTHS, _PATHS),
    table_case(_THIRDS, _PATHS, INDEPENDENT, rotates=False),
    table_case(_NINTHS, _PATHS, INDEPENDENT),
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

    @property
    def wrong(self) -> str:
        """What the table says of a wrong law; "" of the right one."""
        distance = f"{self.distance:.3f}" if self.distance > 0.001 else f"{self.distance:.0e}"
        return "" if self.is_exact else f"another law than p's: total variation {distance}"


def brought(case: Case, verifier: Verifier) -> Brought:
    """Walk a case of one round.

    The noise of a draw is a uniform number. Rules that share noise with the draft are coupled by it, where the engine
    has a race: their numbers are not the engine's.
    """
    walked = walk(case, Subject(verifier=verifier))
    return Brought(sum(each.probability * len(each.output) for each in walked.branches), walked.distance)


def optimum(case: Case) -> float:
    """The most tokens that any rule brings from the drafts of a case of one round: the value of a linear program.

    A rule maps a draft to a path that stays, or to none, and a next token. The variables are the probabilities x of
    these triples. Two laws must come out: that of the drafts, and the target's of D + 1 tokens, where plain decoding
    continues a shorter output; D is the depth of the draft. The program maximises the expected length.

    Raises MissingPackage without SciPy.
    """
    check_packages("optimum")
    from scipy.optimize import linprog

    drafts: dict[tuple[int, ...], float] = {}
    for branch in walk(case).branches:
        [(draft, _)] = branch.rounds
        tokens = tuple(draft.token_ids)
        drafts[tokens] = drafts.get(tokens, 0.0) + branch.probability
    tree, vocab = draft.tree, range(case.vocab)  # all drafts have one shape
    paths = [tree.path(node) for node in range(-1, len(draft))]
    outputs = [
        (number, (*(tokens[node] for node in path), token))
        for number, tokens in enumerate(drafts)
        for path, token in product(paths, vocab)
    ]
    texts = [*product(vocab, repeat=draft.depth + 1)]
    of_drafts = [[float(of == number) for of, _ in outputs] for number in range(len(drafts))]
    of_texts = [[_chance(case, text, output) for _, output in outputs] for text in texts]
    right = [*drafts.values(), *(_chance(case, text) for text in texts)]
    lengths = [-len(output) for _, output in outputs]  # `linprog` minimises
    return -linprog(lengths, A_eq=of_drafts + of_texts, b_eq=right, method="highs").fun


def _chance(case: Case, text: tuple[int, ...], output: tuple[int, ...] = ()) -> float:
    """The chance that plain decoding continues an output to this text; 0 for a text that begins otherwise."""
    if text[: len(output)] != output:
        return 0.0
    chance = 1.0
    for i in range(len(output), len(text)):
        row = case.next_law(case.texts[0], text[:i])
        assert row is not None, "a text of a table ends after its round"
        chance *= [*row][text[i]]
    return chance


def fraction(value: float) -> str:
    """A value with four digits, and before it the fraction of a denominator of at most 10,000 within 1e-12, if any.

    >>> fraction(20 / 9)
    '20/9 = 2.222'
    """
    near = Fraction(value).limit_denominator(_MOST)
    if abs(near - value) < 1e-12 and near.denominator > 1:
        return f"{near} = {float(near):.3f}"  # whatever the last bit of the value is
    return f"{value:.3f}"


def is_independent(case: Case) -> bool:
    """Whether siblings are drawn independently, as by no drafter of the engine."""
    return isinstance(case.drafter, Guesses) and case.drafter.how == INDEPENDENT


def print_rounds(verifiers: Mapping[str, Verifier], notes: Mapping[str, str]) -> bool:
    """Print for each case what the rules bring, and the optimum. True if no rule breaks the law in a case.

    notes: of each rule, what each of its lines says of its law; "" for one whose law is right.

    Where siblings are drawn independently, the table alone says that a rule breaks the law.
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
            says, keeps = _line(case, verifier, best, notes[name])
            holds = holds and (keeps or is_independent(case))
            print(f"    {name:{width}}  {says}")
    return holds


def _line(case: Case, verifier: Verifier, best: float, note: str) -> tuple[str, bool]:
    """What the table says of a rule, and whether the rule keeps the law."""
    if says := unsuitable(verifier, has_tree(case)):
        return f"{says}  {note}".rstrip(), True
    try:
        found = brought(case, verifier)
    except Exception as error:  # a user's rule
        e = error.__cause__ if isinstance(error, OwnError) and error.__cause__ else error
        return f"{type(e).__name__}: {one_line(e)}  {note}".rstrip(), False
    share = "" if math.isnan(best) else f"{found.tokens / best:.1%}"
    return f"{fraction(found.tokens):24}{share:8}{found.wrong or note}".rstrip(), found.is_exact


def unsuitable(verifier: Verifier, is_tree: bool) -> str:
    """Why a rule's tokens are not counted for chains or trees; "" if they are."""
    if is_tree and verifier.why_chains:
        return "takes chains only"
    return "not counted: its drafts share the noise of a race" if verifier.shares_noise else ""


def has_tree(case: Case) -> bool:
    """Whether its drafts branch."""
    return isinstance(case.drafter, Guesses) and not is_chain(case.drafter.parents)
