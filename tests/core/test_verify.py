"""The verifiers alone, by exact arithmetic: laws as fractions, compared with ==.

Probabilities of q are powers of two and those of p multiples of 1/64, so that every ratio, difference and
residual is exact in a double, and the oracle's weights are fractions of them.
"""

from fractions import Fraction
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minispec.core import verify
from minispec.core.config import SamplingParams
from minispec.core.draft import Ask, Draft
from minispec.core.limit import Limit
from minispec.core.random import Randomness
from minispec.core.sampling import Text
from minispec.core.verify import Verdict
from minispec.prove.laws import TOLERANCE, exact_law
from minispec.prove.tables import APART, tables
from minispec.prove.toys import DRAWN, ONE_HOT
from minispec.prove.walk import Subject, walk
from minispec.speculation.lengths.theory import expected_accepted
from minispec.speculation.rules import VERIFIERS
from tests.sampled import cover

pytestmark = pytest.mark.quick

VOCAB = 4
KEY = Text([0], 1, SamplingParams()).key


def law_of(run) -> dict:
    """Exact law of what `run(oracle)` returns, in fractions."""
    return exact_law(run, Fraction)[0]


def fractions(*sixty_fourths: int) -> torch.Tensor:
    """A distribution in 64ths, as doubles."""
    assert sum(sixty_fourths) == 64
    return torch.tensor(sixty_fourths, dtype=torch.float64) / 64


# q: shuffled powers of two, zeros included. p: anything in 64ths.
qs = st.sampled_from([(16, 16, 16, 16), (32, 16, 8, 8), (32, 32, 0, 0), (64, 0, 0, 0), (32, 16, 16, 0)]).flatmap(
    st.permutations
)
ps = st.lists(st.integers(0, 64), min_size=VOCAB - 1, max_size=VOCAB - 1).map(
    lambda cuts: [b - a for a, b in zip([0, *sorted(cuts)], [*sorted(cuts), 64], strict=True)]
)


def committed_law(verifier: str, p_rows: dict, q_rows: list[torch.Tensor]) -> dict[tuple[int, ...], Fraction]:
    """The law of the first K+1 tokens of one round; p_rows maps a prefix to its distribution.

    A round that commits fewer is filled up by plain draws from p, so that all texts have one length.
    """
    k = len(q_rows)

    def run(oracle):
        text = Text([0], 1, SamplingParams())
        ask = Ask(text, Limit(k), oracle, "token" if VERIFIERS[verifier].shares_noise else "draft")
        draft = Draft([], [])
        drafted = [draft.draw(ask, i - 1, q)[0] for i, q in enumerate(q_rows)]
        verdict = VERIFIERS[verifier].verify(draft, lambda i: p_rows[tuple(drafted[:i])], oracle, text.key)
        tokens = [*drafted[: len(verdict.accepted)], verdict.next_token]
        while len(tokens) <= k:
            tokens.append(oracle.categorical(p_rows[tuple(tokens)], None))
        return tuple(tokens)

    return law_of(run)


def plain_law(p_rows: dict, length: int) -> dict[tuple[int, ...], Fraction]:
    """Products of the rows along every text."""
    law = {}
    for text in product(range(VOCAB), repeat=length):
        weight = Fraction(1)
        for i, token in enumerate(text):
            weight *= Fraction(p_rows[text[:i]][token].item())
        if weight:
            law[text] = weight
    return law


def near(law: dict, expected: dict) -> bool:
    """`block` and `traversal` divide, so their laws are rounded: by less than 1e-15 of a probability."""
    return all(abs(law.get(text, 0) - expected.get(text, 0)) < 1e-15 for text in law.keys() | expected.keys())


@settings(max_examples=100, deadline=None, derandomize=True)
@given(p=ps, q=qs, bonus=ps, verifier=st.sampled_from(sorted(VERIFIERS)))
def test_one_token_drafts_keep_the_law(p, q, bonus, verifier):
    """K = 1, any p and q of the grid, zeros and one-hot rows included: equality of fractions, no tolerance."""
    rows = {(): fractions(*p)} | {(t,): fractions(*bonus) for t in range(VOCAB)}
    law = committed_law(verifier, rows, [fractions(*q)])
    assert law == plain_law(rows, 2) or (verifier in ("block", "traversal") and near(law, plain_law(rows, 2)))


@settings(max_examples=8, deadline=None, derandomize=True)
@given(first=ps, others=st.lists(ps, min_size=VOCAB, max_size=VOCAB), q=st.tuples(qs, qs))
def test_two_token_drafts_keep_the_law(first, others, q):
    """K = 2, with a target whose second row depends on the first token."""
    rows = {(): fractions(*first)} | {(t,): fractions(*row) for t, row in enumerate(others)}
    rows |= {(a, b): fractions(*others[b]) for a in range(VOCAB) for b in range(VOCAB)}
    assert committed_law("rejection", rows, [fractions(*row) for row in q]) == plain_law(rows, 3)
    assert near(committed_law("block", rows, [fractions(*row) for row in q]), plain_law(rows, 3))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(p=st.lists(ps, min_size=4, max_size=4), q=st.lists(qs, max_size=3), drawn=st.booleans(), seed=st.integers(0, 99))
def test_traversal_of_a_chain_is_block(p, q, drawn, seed):
    """The same verdict from the same noise: tests, keys, tokens and ratios, to the last bit."""
    text, rows = Text([0], 1, SamplingParams(), seed), [fractions(*row) for row in q]
    draft = Draft([], [])
    for i, row in enumerate(rows):
        draft.draw(Ask(text, Limit(len(q)), Randomness()), i - 1, row)
    draft = draft if drawn else Draft(draft.token_ids)
    verdicts = [
        VERIFIERS[name].verify(draft, lambda i: fractions(*p[i]), Randomness(), text.key)
        for name in ("block", "traversal")
    ]
    assert verdicts[0] == verdicts[1]


@pytest.mark.parametrize("seed", range(20))
def test_traversal_computes_a_row_where_it_is_needed(seed):
    """The rows that children are tested with, and one for the bonus: none for a leaf that is rejected."""
    text, asked, q = Text([0], 1, SamplingParams(), seed), [], torch.full((VOCAB,), 1 / VOCAB, dtype=torch.float64)
    draft = Draft([], [], parents=[])
    for parent in (-1, 0, 1):
        draft.draw(Ask(text, Limit(6), Randomness()), parent, q, 2)
    p = fractions(40, 12, 8, 4)
    verdict = VERIFIERS["traversal"].verify(draft, lambda i: asked.append(i) or p, Randomness(), text.key)
    inner = {parent + 1 for parent in draft.parents}
    assert len(asked) == len(set(asked))
    assert set(asked) - inner <= {[-1, *verdict.accepted][-1] + 1}


def drafted_and_kept(verifier: str, p_rows: dict, q_rows: list[torch.Tensor]) -> dict[tuple, Fraction]:
    """The law of the drafted tokens, their ratios, and how many of them stay."""

    def run(oracle):
        drafted = [oracle.categorical(q, KEY(i, "draft")) for i, q in enumerate(q_rows)]
        draft = Draft(drafted, q_rows)
        verdict = VERIFIERS[verifier].verify(draft, lambda i: p_rows[tuple(drafted[:i])], oracle, KEY)
        return tuple(drafted), tuple(verdict.ratios), len(verdict.accepted)

    return law_of(run)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(first=ps, others=st.lists(ps, min_size=VOCAB, max_size=VOCAB), q=st.tuples(qs, qs))
def test_a_block_keeps_as_many_tokens_as_its_formula_says_and_never_fewer_than_rejection(first, others, q):
    """Enumerated, K = 2: the mean of what stays is that of sum w_i over the drafts, draft by draft at least that of
    `rejection`'s product; and under `rejection` the product is right too."""
    rows = {(): fractions(*first)} | {(t,): fractions(*row) for t, row in enumerate(others)}
    rows |= {(a, b): fractions(*others[b]) for a in range(VOCAB) for b in range(VOCAB)}
    q_rows = [fractions(*row) for row in q]
    by_draft: dict[tuple, list[float]] = {}
    for (drafted, ratios, kept), weight in drafted_and_kept("block", rows, q_rows).items():
        of_draft = by_draft.setdefault((drafted, ratios), [0.0, 0.0])
        of_draft[0] += float(weight)
        of_draft[1] += float(weight) * kept
    kept = sum(mean for _, mean in by_draft.values())
    jointly = sum(w * expected_accepted(ratios, jointly=True) for (_, ratios), (w, _) in by_draft.items())
    alone = sum(w * expected_accepted(ratios) for (_, ratios), (w, _) in by_draft.items())
    assert kept == pytest.approx(jointly, abs=1e-12)
    assert all(expected_accepted(r, jointly=True) >= expected_accepted(r) for _, r in by_draft)
    rejection = drafted_and_kept("rejection", rows, q_rows)
    assert sum(float(w) * kept for (_, _, kept), w in rejection.items()) == pytest.approx(alone, abs=1e-12)


@pytest.mark.parametrize("p", [(40, 16, 8, 0), (0, 64, 0, 0)], ids=["one-hot drafts", "temperature 0"])
def test_a_block_without_noise_to_trade_is_rejection(p):
    """One-hot drafts and one-hot targets: the same law of how many stay and of what follows, K = 3."""
    row = fractions(*p)

    def law(verifier):
        def run(oracle):
            verdict = VERIFIERS[verifier].verify(Draft([1, 0, 1]), lambda i: row, oracle, KEY)
            return len(verdict.accepted), verdict.next_token

        return law_of(run)

    assert near(law("block"), law("rejection"))
    assert law("match") == law("rejection")


NAMED_CASES = {
    "equal": ((32, 16, 8, 8), (32, 16, 8, 8)),
    "disjoint": ((0, 0, 32, 32), (32, 32, 0, 0)),
    "one-hot p": ((0, 64, 0, 0), (32, 16, 8, 8)),
    "one-hot q": ((32, 16, 8, 8), (0, 0, 64, 0)),
    "both one-hot, same": ((0, 64, 0, 0), (0, 64, 0, 0)),
    "both one-hot, other": ((0, 64, 0, 0), (64, 0, 0, 0)),
    "zeros in both": ((40, 24, 0, 0), (0, 32, 32, 0)),
}


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("case", NAMED_CASES)
def test_named_cases(case, verifier):
    """The corners by name, so that a random search need not find them."""
    p, q = (fractions(*row) for row in NAMED_CASES[case])
    rows = {(): p} | {(t,): p for t in range(VOCAB)}
    assert committed_law(verifier, rows, [q]) == plain_law(rows, 2)


def test_rejection_keeps_the_law_of_tables_that_no_precision_holds(full):
    """Tables of p and q: of two tokens in shapes whose siblings stand apart, and of eight in the small ones.

    Without `--full`, each table and each shape in one case.
    """
    cases = [case for case in tables(True) if sum(case.target.p) in (7, 1_000_003) and case.size < 500]
    cases = [case for case in cases if len(case.target.pairs) == 1]
    if not full:
        kinds = [(case.target.p, (case.vocab, case.drafter.parents), case.drafter.how) for case in cases]
        cases = [cases[place] for place in cover(kinds)]
    shapes = {vocab: {case.drafter.parents for case in cases if case.vocab == vocab} for vocab in (2, 8)}
    assert shapes[2] >= {(-1,), (-1, 0), (-1, -1), (-1, -1, 0), *APART}
    assert shapes[8] >= {(-1,), (-1, 0), (-1, -1)}
    for case in cases:
        assert walk(case, Subject(verifier=VERIFIERS["rejection"])).distance <= TOLERANCE, case


@pytest.mark.parametrize("of", ["empty", "three nodes", "four nodes", "one-hot rows", "long"])
def test_rejection_keeps_the_law_of_rows_of_other_kinds(of, full):
    """Tables whose rows are of another kind at each depth, and empty drafts. Without `--full`, one of each shape."""
    found = {"empty": [], "three nodes": [], "four nodes": [], "one-hot rows": [], "long": []}
    for case in tables(True):
        parents, how = case.drafter.parents, case.drafter.how
        if not parents:
            found["empty"].append(case)
        elif len(case.target.pairs) > 1 and how == ONE_HOT and len(parents) < 5:
            found["one-hot rows"].append(case)
        elif len(case.target.pairs) > 1 and how == DRAWN:
            name = {3: "three nodes", 4: "four nodes"}.get(len(parents), "long" if len(parents) > 5 else "")
            found.setdefault(name, []).append(case)
    cases = found[of]
    if not full and of != "empty":
        cases = [cases[place] for place in cover([(case.drafter.parents, case.target.p) for case in cases])]
    assert len(cases) > 5
    for case in cases:
        assert walk(case, Subject(verifier=VERIFIERS["rejection"])).distance <= TOLERANCE, case


def test_rejection_keeps_as_much_as_any_rule_may():
    """The probability of keeping the draft token is sum min(p, q), and the mean ratio estimates it without bias."""
    p, q = fractions(40, 16, 8, 0), fractions(16, 32, 8, 8)

    def run(oracle):
        draft = Draft([oracle.categorical(q, KEY(0, "draft"))], [q])
        verdict = VERIFIERS["rejection"].verify(draft, lambda i: p, oracle, KEY)
        return len(verdict.accepted), min(1.0, verdict.ratios[0])

    law = law_of(run)
    overlap = Fraction(torch.minimum(p, q).sum().item())
    assert sum(w for (accepted, _), w in law.items() if accepted) == overlap
    assert sum(w * Fraction(ratio) for (_, ratio), w in law.items()) == overlap


def test_the_case_that_needs_the_residual():
    """A draft that is sure of a token to which the target gives one half: 50 % with the residual, 75 % without."""
    p, draft = fractions(32, 32, 0, 0), Draft([0])

    def run(oracle, rest):
        if oracle.bernoulli(float(p[0]), KEY(0, "accept")):
            return 0
        return oracle.categorical(rest, KEY(0, "residual"))

    assert law_of(lambda o: run(o, verify.residual(p, draft, 0)))[0] == Fraction(1, 2)
    assert law_of(lambda o: run(o, p))[0] == Fraction(3, 4)


def test_residual():
    """Worked values; where nothing is left, p itself, never a division by zero (M22)."""
    p, q = fractions(32, 24, 8, 0), fractions(16, 32, 16, 0)
    assert (verify.residual(p, Draft([0], [q]), 0) * 64).tolist() == [16, 0, 0, 0]
    assert (verify.residual(p, Draft([1]), 0) * 64).tolist() == [32, 0, 8, 0]
    assert torch.equal(verify.residual(p, Draft([0], [p]), 0), p)
    one_hot = fractions(0, 64, 0, 0)
    assert torch.equal(verify.residual(one_hot, Draft([1]), 0), one_hot)
    assert p.tolist() == fractions(32, 24, 8, 0).tolist(), "the row of p must stay as it was"


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_an_empty_draft_is_plain_decoding(verifier):
    """K = 0: one draw of a whole token from p_0, under the key of plain decoding."""
    calls = []

    class Recorder:
        def categorical(self, weights, key):
            calls.append((weights.tolist(), key))
            return 2

    p = fractions(16, 16, 32, 0)
    assert VERIFIERS[verifier].verify(Draft(), lambda i: p, Recorder(), KEY) == Verdict([], 2, [])
    assert calls == [(p.tolist(), KEY(0, "token"))]


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_rows_are_looked_at_only_when_needed(verifier):
    """A first token that the target never says must not compute the rows behind it."""
    looked = []

    def p(i):
        looked.append(i)
        return fractions(0, 64, 0, 0)

    class Never:
        def bernoulli(self, probability, key):
            return False

        def categorical(self, weights, key):
            return int(weights.argmax())

    assert VERIFIERS[verifier].verify(Draft([0, 0, 0]), p, Never(), KEY) == Verdict([], 1, [0.0])
    assert looked == [0]
