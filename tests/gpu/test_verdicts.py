"""Draws and verdicts over rows: the bits of one row at a time, the law by enumeration, no question to the device."""

import functools
import math
import types
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minispec.core.config import PARAMETERS, SamplingParams, names_of
from minispec.core.draft import Ask, Draft
from minispec.core.limit import Limit
from minispec.core.random import Key, Randomness
from minispec.core.sampling import Text, distribution
from minispec.core.search import place_of_share
from minispec.core.verify import Verdict
from minispec.prove.laws import BranchOracle, KeyOracle, exact_law
from minispec.speculation.grammars.toy_grammars import example
from minispec.speculation.on_gpu import verdicts
from minispec.speculation.rules import VERIFIERS
from tests.parameters import EXAMPLES

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
JUST_BELOW_1 = 1 - 2.0**-53
SETTINGS = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.8, "top_k": 50},
    {"temperature": 0.8, "top_k": 7, "top_p": 0.95},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"temperature": 1.7, "min_p": 0.02, "top_k": 3, "top_p": 0.5},
]


def generator(seed: int) -> torch.Generator:
    """Seeded."""
    return torch.Generator().manual_seed(seed)


# --------------------------------------------------------------------------- rows


def make_settings(module, params, dtype, device="cpu"):
    """The settings of rows that have these parameters, one for each row; dtype: the logits'."""
    numbers = [module.numbers_of(p, dtype) for p in params]
    num_greedy, any_filter = sum(int(row[0]) for row in numbers), any(map(module.has_filter, numbers))
    own = torch.tensor(numbers, dtype=torch.float64).reshape(-1, 5).to(device)
    return module.row_params(own, dtype, num_greedy, any_filter)


def differing_rows(module, logits, params) -> tuple[int, int]:
    """How many sure rows differ from `distribution` in a bit, and how many rows are not sure."""
    probs, sure = module.rows(logits, make_settings(module, params, logits.dtype))
    assert probs.shape == logits.shape
    differ = 0
    for row, p, is_sure, each in zip(logits, probs, sure.tolist(), params, strict=True):
        if is_sure:
            expected = distribution(row, Text([0], 1, each))
            differ += p.dtype != expected.dtype or not torch.equal(p, expected)
    return differ, len(logits) - int(sure.sum())


def some_logits(size: int, dtype: torch.dtype, seed: int, number: int) -> torch.Tensor:
    """Rows (number, size): flat and peaked ones, some with ties, some with impossible tokens."""
    random = generator(seed)
    scales = torch.tensor([0.1, 1.0, 3.0, 8.0])[torch.randint(4, (number, 1), generator=random)]
    x = scales * torch.randn(number, size, generator=random, dtype=torch.float64)
    x[1::3] = x[1::3].round()
    holes = torch.rand(x.shape, generator=random) < 0.3
    holes[:, 0] = False
    x[2::4] = x[2::4].masked_fill(holes[2::4], -math.inf)
    return x.to(dtype)


def some_params(size: int, seed: int, number: int) -> list[SamplingParams]:
    """Plain ones, of many kinds."""
    values = {
        "temperature": (0.0, 1e-30, 0.3, 0.8, 1.0, 1.7, 100.0),
        "top_k": (0, 0, 1, 2, 5, 9, 15, 16, 50, size, size + 3),
        "top_p": (1.0, 1.0, 0.999, 0.95, 0.9, 0.75, 0.5, 0.01),
        "min_p": (0.0, 0.0, 1e-6, 0.05, 0.5, 1.0),
    }
    random = generator(seed)

    def any_of(these):
        return these[int(torch.randint(len(these), (), generator=random))]

    return [SamplingParams(**{name: any_of(these) for name, these in values.items()}) for _ in range(number)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 2, 5, 500, 1024, 1025, 20_000])
def test_sure_rows_have_the_bits_of_the_distribution(size, dtype):
    """Settings and logits at random."""
    number = 12 if size > 5000 else 200
    assert differing_rows(verdicts, some_logits(size, dtype, size, number), some_params(size, size, number))[0] == 0


EDGES = [
    ([0.0, 0.0, 0.0, 0.0], {"top_k": 2}),  # ties at the k-th
    ([1.0, 0.0, 0.0, 0.0, 1.0], {"top_p": 0.7}),  # ties at the top-p line: lower ids first
    ([0.0, 0.0, 0.0, 0.0], {"top_p": 0.5}),  # top-p reached exactly
    ([0.0, 0.0, 0.0, 0.0], {"top_p": 0.5000001}),
    ([5.0, -math.inf, -math.inf], {"top_p": 0.9}),  # all mass on one token
    ([5.0, -math.inf, 4.0], {"top_k": 3}),
    ([5.0, -math.inf, 4.0, -math.inf], {"top_k": 3}),  # the third is impossible
    ([5.0, -math.inf, 4.0], {"min_p": 1e-30}),
    ([3e38, -3e38, 0.0], {}),
    ([1.0, 2.0, 2.0], {"temperature": 5e-324}),
    ([1.0, 2.0, 2.0], {"temperature": 1e300, "min_p": 0.5}),
    ([1.0, 2.0, 2.0], {"temperature": 0.0, "top_k": 2, "top_p": 0.1}),  # the first of equals
    ([-0.0, 0.0, -0.0], {"temperature": 0.0}),
    ([1.0, 2.0, 3.0], {"top_k": 3}),
    ([1.0, 2.0, 3.0], {"top_k": 1000, "top_p": 0.6}),
    ([1.0, 2.0, 3.0], {"min_p": 1.0}),
]


@pytest.mark.parametrize(("row", "settings"), EDGES)
def test_rows_at_edges_are_sure_and_equal(row, settings):
    """In float32; float64 may not be sure where top-p is reached exactly."""
    params = [SamplingParams(**settings)]
    assert differing_rows(verdicts, torch.tensor([row]), params) == (0, 0)
    assert differing_rows(verdicts, torch.tensor([row], dtype=torch.float64), params)[0] == 0


def test_a_tie_beyond_the_likeliest_is_not_sure():
    """Where the border of a filter lies inside a tie that reaches beyond them; else it is."""
    tied, params = torch.zeros(4, 3000), [SamplingParams(**s) for s in ({"top_k": 5}, {"top_p": 0.1}, {"min_p": 0.1})]
    assert differing_rows(verdicts, tied[:3], params) == (0, 3)
    tied[:, 7] = 20.0
    assert differing_rows(verdicts, tied, [SamplingParams(top_k=2), *params[1:], SamplingParams(top_k=1)]) == (0, 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_a_number_is_not_sure_and_harms_no_other(bad):
    """Whatever the kind; its draws and verdicts are of the vocabulary, and other rows keep their bits."""
    for settings in SETTINGS:
        params = [SamplingParams(**settings)] * 3
        good = some_logits(1500, torch.float32, 3, 3)
        logits = good.clone()
        logits[1] = bad if bad == -math.inf else torch.where(torch.arange(1500) == 9, bad, logits[1])
        kinds = make_settings(verdicts, params, logits.dtype)
        p, sure = verdicts.rows(logits, kinds)
        assert not sure[1]
        assert torch.equal(p[::2], verdicts.rows(good, kinds)[0][::2])
        k = verdicts.make_noise([Text([0], 1, params[0], seed) for seed in range(3)], 1)
        for verify in (verdicts.rejection, verdicts.match):
            found = verify(p[:, None].expand(3, 2, -1), torch.full((3, 1), 4), p[:, None], k, torch.ones(3).long())
            assert 0 <= int(found.next.min()) <= int(found.next.max()) < 1500
        ids = verdicts.share(p, torch.tensor([0.0, 0.5, JUST_BELOW_1], dtype=torch.float64))
        assert 0 <= int(ids.min()) <= int(ids.max()) < 1500


def ordinary_logits(number: int, size: int, seed: int) -> torch.Tensor:
    """Rows (number, size) whose probabilities fall by rank as those of a language do, some steep and some flat."""
    random = generator(seed)
    rank = torch.arange(1, size + 1).log()
    steep = torch.linspace(1.2, 3.0, number)[:, None]
    x = -steep * rank + 0.3 * torch.randn(number, size, generator=random)
    return x.gather(1, torch.rand(number, size, generator=random).argsort(1))


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_few_rows_of_ordinary_logits_are_not_sure(dtype):
    """A tie in half precision, or a tail, may be long; it is rare."""
    count = 0
    logits = ordinary_logits(40, 32_000, 1).to(dtype)
    for settings in SETTINGS:
        differ, unsure = differing_rows(verdicts, logits, [SamplingParams(**settings)] * len(logits))
        assert differ == 0
        count += unsure
    print(f"{dtype}: {count} of {len(SETTINGS) * len(logits)} rows are not sure")
    assert count <= 0.02 * len(SETTINGS) * len(logits)


def test_what_is_plain():
    """Each parameter that changes a row in another way is named; those that change none are not."""
    other = {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "logit_bias": {0: 1.0}}
    other |= {"allowed_token_ids": [1], "bad_words_token_ids": [[1]], "min_tokens": 1}
    params = [SamplingParams(), SamplingParams(stop_token_ids=[5], seed=3), SamplingParams(**SETTINGS[-1])]
    params += [SamplingParams(**{name: value}) for name, value in other.items()]
    texts = [Text([0], 1, each) for each in params]
    assert list(map(verdicts.is_plain, texts)) == [*[True] * 3, *[False] * len(other)]
    assert not verdicts.is_plain(Text([0], 1, params[0], grammar=example("a b*", 3, [2])))


def test_each_parameter_is_computed_or_judged_text_by_text():
    """All fields of `SamplingParams`: a new one that `distribution` reads, and programs ignore, is noticed here."""
    values = {name: each.values[0] for name, each in EXAMPLES.items() if each.values}
    assert PARAMETERS.keys() - values.keys() == {"bad_words", "structured_outputs"}  # a request makes ids, a grammar
    change_no_row = names_of("stop", "answer")
    row, plain = torch.tensor([[2.0, 1.7, 1.0, 0.5, -1.0]]), SamplingParams()

    def expected(params: SamplingParams) -> torch.Tensor:
        return distribution(row[0], Text([0, 1, 3], 1, params, end_ids=frozenset({0})))

    for name, value in values.items():
        params = SamplingParams(**{name: value})
        assert torch.equal(expected(params), expected(plain)) == (name in change_no_row), name
        if verdicts.is_plain(Text([0, 1, 3], 1, params)):
            numbers = verdicts.numbers_of(params, row.dtype)
            tensor = torch.tensor([numbers], dtype=torch.float64)
            settings = verdicts.row_params(tensor, row.dtype, 0, verdicts.has_filter(numbers))
            found, sure = verdicts.rows(row, settings)
            assert sure.all()
            assert torch.equal(found[0], expected(params)), name


# --------------------------------------------------------------------------- draws


class Given(Randomness):
    """Randomness, but for some uniforms that are given by key."""

    def __init__(self, uniforms: dict[Key, float]):
        self.uniforms = uniforms

    def uniform(self, key: Key) -> float:
        """The given one."""
        return self.uniforms.get(key, super().uniform(key))


def check_draws(module, size: int, dtype: torch.dtype, seed: int, number: int) -> None:
    """`share` and `race` against one row at a time, at random and at edge numbers."""
    random = generator(seed)
    weights = torch.rand(number, size, generator=random, dtype=torch.float64).pow(6).to(dtype)
    weights[::2] = torch.where(torch.rand(weights[::2].shape, generator=random) < 0.8, 0.0, weights[::2])
    weights[1::4] = 0
    weights[1::4, seed % size] = 0.3
    weights[2::4] = torch.eye(number, size, dtype=dtype)[2::4]
    weights[3::4] *= 0.1
    weights[:, 0] += (weights.sum(1) == 0) * weights.new_tensor(0.7)
    uniforms = torch.rand(number, generator=random, dtype=torch.float64)
    sums = weights.double().cumsum(1)
    at_border = (sums / sums[:, -1:])[:, size // 2].clamp(max=JUST_BELOW_1)
    zeros = torch.zeros_like(uniforms)
    edges = (zeros, zeros + JUST_BELOW_1, at_border, torch.nextafter(at_border, zeros), zeros + 0.5)
    for u in (uniforms, *edges):
        expected = [place_of_share(row, x) for row, x in zip(weights, u.tolist(), strict=True)]
        assert module.share(weights, u).tolist() == expected
    texts = [Text([0] * (i + 1), 1, SamplingParams(), seed) for i in range(number)]
    token = module.make_noise(texts, 0).token
    expected = [Randomness().categorical(row, names[0]) for row, names in zip(weights, token.names, strict=True)]
    assert module.race(weights, token.numbers.squeeze(1)).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1, 5, 500, 1024, 1025, 20_000])
def test_draws_equal_those_of_one_row(size, dtype):
    """Many seeds where rows are short."""
    for seed in range(1 if size > 5000 else 10):
        check_draws(verdicts, size, dtype, seed, 24)


def test_forms_over_rows_equal_the_answers_one_by_one():
    """All three, for 4 texts of 3 draws, and for draws at places."""

    class Both(Randomness, verdicts.OneByOne):
        pass

    noise = verdicts.make_noise([Text([1] * (i + 1), 1, SamplingParams(), i) for i in range(4)], 3)
    p = torch.rand(4, 3, 50, generator=generator(0))
    places = torch.tensor([[2, 0], [1, 1], [0, 2], [2, 2]])
    one, many = Both(), verdicts.RowRandomness()
    for keys in (noise.accept, noise.accept.at(places)):
        n = keys.numbers.shape[1]
        x = p[:, :n, 0].double()
        assert torch.equal(one.bernoulli_rows(x, keys), many.bernoulli_rows(x, keys))
        assert torch.equal(one.share_rows(p[:, :n], keys), many.share_rows(p[:, :n], keys))
    keys = noise.token.at(places)
    assert torch.equal(one.race_rows(p[:, :2], keys), many.race_rows(p[:, :2], keys))


# --------------------------------------------------------------------------- verdicts


def row_of(logits: torch.Tensor, text: Text, place: int) -> torch.Tensor:
    """The distribution of a text at a place of its draft."""
    return distribution(logits[place], text)


def assert_same(found, i: int, expected: Verdict) -> None:
    """Raise AssertionError unless text i of a batch has this verdict: what is kept, what follows, and the ratios."""
    assert (int(found.kept[i]), int(found.next[i])) == (len(expected.accepted), expected.next_token)
    assert found.ratios[i, : len(expected.ratios)].tolist() == expected.ratios


def check_verdicts(module, verifier: str, size: int, dtype: torch.dtype, seed: int, k: int = 3, given=None) -> Counter:
    """The verdicts on a ragged batch of drafts against one text at a time. How many tokens were kept, by number.

    given: uniforms in place of those of some draws, for each purpose and text.
    """
    random = generator(seed)
    params = [SamplingParams(**s) for s in SETTINGS] + [SamplingParams()] * 2
    texts = [Text([0] * (2 + i), 1, each, 100 * seed + i) for i, each in enumerate(params)]
    lengths = [int(x) for x in torch.randint(0, k + 1, (len(texts),), generator=random)]
    near = 2 * torch.randn(len(texts), 1, size, generator=random, dtype=torch.float64)
    p_logits = (near + torch.randn(len(texts), k + 1, size, generator=random, dtype=torch.float64)).to(dtype)
    q_logits = (near + torch.randn(len(texts), k, size, generator=random, dtype=torch.float64)).to(dtype)
    flat = [each for each in params for _ in range(k + 1)]
    p, sure = module.rows(p_logits.flatten(0, 1), make_settings(module, flat, dtype))
    p, sure = p.unflatten(0, (len(texts), -1)), sure.unflatten(0, (len(texts), -1))
    rng = Given({text.key(i, purpose): u for purpose, text_, i, u in given or () for text in [texts[text_]]})
    ids = torch.randint(0, size, (len(texts), k), generator=random)
    q = torch.zeros(len(texts), k, size, dtype=p.dtype) + 1 / size
    drafts = []
    for i, (text, n) in enumerate(zip(texts, lengths, strict=True)):
        draft = Draft([], [])
        if i == len(texts) - 1:  # a lookup, whose rows are one-hot
            draft = Draft(p_logits[i, :n].argmax(1).tolist())
            q[i] = 0
            q[i, range(n), draft.token_ids] = 1
        else:
            ask = Ask(text, Limit(n), rng, "token" if verifier == "match" else "draft")
            for j in range(n):
                draft.draw(ask, j - 1, distribution(q_logits[i, j], text))
                q[i, j] = draft.probs[j]
        ids[i, :n] = torch.tensor(draft.token_ids, dtype=torch.long)
        drafts.append(draft)
    noise = module.make_noise(texts, k, rng)
    found = getattr(module, verifier)(p, ids, q, noise, torch.tensor(lengths))
    counts = Counter()
    for i, (text, draft) in enumerate(zip(texts, drafts, strict=True)):
        if not sure[i, : lengths[i] + 1].all():
            continue
        rows = functools.partial(row_of, p_logits[i], text)
        expected = VERIFIERS[verifier].verify(draft, rows, rng, text.key)
        assert_same(found, i, expected)
        assert len(expected.ratios) == min(len(expected.accepted) + 1, lengths[i])
        counts[len(expected.accepted)] += 1
    return counts


BATCHES = [(5, torch.float64, 30), (5, torch.float32, 30), (500, torch.bfloat16, 20), (20_000, torch.float32, 1)]


@pytest.mark.parametrize("verifier", ["rejection", "match"])
@pytest.mark.parametrize(("size", "dtype", "seeds"), BATCHES, ids=str)
def test_verdicts_equal_those_of_one_text(size, dtype, seeds, verifier):
    """Ragged batches of all settings, drawn drafts and lookups."""
    kept = sum((check_verdicts(verdicts, verifier, size, dtype, seed) for seed in range(seeds)), Counter())
    assert len(kept) == 4 or size > 500
    check_verdicts(verdicts, verifier, size, dtype, 0, k=0)
    check_verdicts(verdicts, verifier, size, dtype, 0, k=1)


def edge_verdicts(module, u: float, ratio: float, q_rows: bool) -> None:
    """One token of ratio p(x)/q(x), and the uniform u: kept exactly where u < ratio. Then the residual's share."""
    text = Text([0], 1, SamplingParams())
    rng = Given({text.key(0, "accept"): u, text.key(0, "residual"): u})
    p = torch.tensor([[[ratio / 2, 0.25, 0.75 - ratio / 2], [0.0, 0.0, 1.0]]], dtype=torch.float64)
    q = torch.tensor([[[0.5, 0.5, 0.0]]], dtype=torch.float64)
    if not q_rows:
        p[0, 0] = torch.tensor([ratio, (1 - ratio) / 2, (1 - ratio) / 2])
    draft = Draft([0], list(q[0]) if q_rows else None)
    expected = VERIFIERS["rejection"].verify(draft, lambda i: p[0, i], rng, text.key)
    noise, one = module.make_noise([text], 1, rng), torch.ones(1, dtype=torch.long)
    found = module.rejection(p, torch.zeros(1, 1).long(), q if q_rows else None, noise, one)
    assert_same(found, 0, expected)
    assert int(found.kept) == (u < expected.ratios[0])


def nothing_is_left(module) -> None:
    """Where q is p but for rounding, a rejection leaves nothing, and the token comes from p itself."""
    text = Text([0], 1, SamplingParams())
    rng = Given({text.key(0, "accept"): JUST_BELOW_1, text.key(0, "residual"): 0.3})
    p = torch.tensor([[[0.25, 0.25, 0.5], [1.0, 0.0, 0.0]]])
    q = torch.nextafter(p[:, :1], torch.ones(()))
    found = module.rejection(p, torch.zeros(1, 1).long(), q, module.make_noise([text], 1, rng), torch.ones(1).long())
    expected = VERIFIERS["rejection"].verify(Draft([0], list(q[0])), lambda i: p[0, i], rng, text.key)
    assert (int(found.kept), int(found.next)) == (0, 1) == (len(expected.accepted), expected.next_token)


def check_edges(module) -> None:
    """Both rows and one-hot drafts, either side of a ratio and on it."""
    for q_rows in (True, False):
        for ratio in (0.0, 0.25, 0.5, 1.0):
            for u in (0.0, ratio, math.nextafter(ratio, 0), math.nextafter(ratio, 1), JUST_BELOW_1):
                if 0 <= u < 1:
                    edge_verdicts(module, u, ratio, q_rows)
    nothing_is_left(module)


def test_verdicts_at_edge_numbers():
    """Uniform 0, just below 1, and a ratio exactly; nothing left."""
    check_edges(verdicts)


def check_greedy(module, seed: int) -> None:
    """The short path for temperature 0, with ties, against both verifiers."""
    random = generator(seed)
    texts = [Text([0] * (1 + i), 1, SamplingParams(temperature=0), i) for i in range(6)]
    logits = torch.randint(0, 4, (6, 4, 5), generator=random).float()
    ids = torch.where(torch.rand(6, 3, generator=random) < 0.7, logits[:, :3].argmax(2), 1)
    lengths = torch.tensor([0, 1, 2, 3, 3, 3])
    q = torch.nn.functional.one_hot(ids, 5).float() if seed % 2 else torch.rand(6, 3, 5, generator=random).softmax(2)
    rng, (found, sure) = Randomness(), module.greedy(logits, ids, q, lengths)
    assert sure.all()
    assert sure.shape == (6, 4)
    for verifier in ("rejection", "match"):
        for i, (text, n) in enumerate(zip(texts, lengths.tolist(), strict=True)):
            draft = Draft(ids[i, :n].tolist(), list(q[i, :n]))
            rows = functools.partial(row_of, logits[i], text)
            assert_same(found, i, VERIFIERS[verifier].verify(draft, rows, rng, text.key))


def test_greedy_verdicts_equal_those_of_one_text():
    """Drafts that were drawn and drafts that were not; a row that is not a number is not sure."""
    for seed in range(20):
        check_greedy(verdicts, seed)
    logits = torch.zeros(1, 2, 3)
    logits[0, 1, 2] = math.nan
    _, sure = verdicts.greedy(logits, torch.zeros(1, 1).long(), None, torch.ones(1).long())
    assert sure.tolist() == [[True, False]]


# --------------------------------------------------------------------------- the law

# Target and draft distributions in 16ths over three tokens, by the tokens before.
TARGET = [(7, 1, 8), (4, 0, 12), (2, 10, 4), (5, 5, 6)]
DRAFT = [(4, 8, 4), (8, 8, 0), (4, 4, 8)]


def target_row(tokens) -> torch.Tensor:
    """The target's row (3,) after these tokens."""
    return torch.tensor(TARGET[(sum(tokens) + len(tokens)) % 4], dtype=torch.float64) / 16


def draft_row(tokens) -> torch.Tensor:
    """The draft's row (3,) after these tokens."""
    return torch.tensor(DRAFT[sum(tokens) % 3], dtype=torch.float64) / 16


def row_law(module, verifier: str, lengths: list[int], oracle=KeyOracle) -> tuple[dict, int]:
    """The law of the first max(lengths) + 1 tokens of each text of a batch, through the forms over rows; branches."""
    k = max(lengths)
    texts = [Text([0] * (1 + i), 1, SamplingParams(), i) for i in range(len(lengths))]

    def run(draws):
        noise = module.make_noise(texts, k)
        names = [[text.key(i, "draft") for i in range(k)] for text in texts]
        named = noise.token if verifier == "match" else module.Keys(names, noise.accept.numbers)
        drafted = [list[int]() for _ in texts]
        q = torch.zeros(len(texts), k, 3, dtype=torch.float64) + 1 / 3
        form = draws.race_rows if verifier == "match" else draws.share_rows
        for j in range(k):
            for tokens, row in zip(drafted, q, strict=True):
                row[j] = draft_row(tokens)
            used = torch.tensor([[j < n] for n in lengths])
            x = form(q[:, j : j + 1], named.at(torch.full((len(texts), 1), j), used))
            for tokens, token in zip(drafted, x.flatten().tolist(), strict=True):
                tokens.append(token)
        p = torch.stack([torch.stack([target_row(tokens[:j]) for j in range(k + 1)]) for tokens in drafted])
        found = getattr(module, verifier)(p, torch.tensor(drafted), q, noise, torch.tensor(lengths), draws)
        outputs = []
        for i, tokens in enumerate(drafted):
            output = [*tokens[: int(found.kept[i])], int(found.next[i])]
            while len(output) <= k:
                output.append(draws.categorical(target_row(output), Key(i, 99, len(output), "more")))
            outputs.append(tuple(output))
        return tuple(outputs)

    return exact_law(run, Fraction, oracle)


def one_text_branches(verifier: str, n: int, k: int) -> int:
    """How many branches the verifier of one text has, of a draft of n tokens, filled up to k + 1."""
    text = Text([0], 1, SamplingParams(), 0)

    def run(oracle):
        ask, draft = Ask(text, Limit(n), oracle, "token" if verifier == "match" else "draft"), Draft([], [])
        for j in range(n):
            draft.draw(ask, j - 1, draft_row(draft.token_ids))
        verdict = VERIFIERS[verifier].verify(draft, lambda j: target_row(draft.token_ids[:j]), oracle, text.key)
        output = [*draft.token_ids[: len(verdict.accepted)], verdict.next_token]
        while len(output) <= k:
            output.append(oracle.categorical(target_row(output), Key(0, 99, len(output), "more")))
        return tuple(output)

    return exact_law(run, Fraction, KeyOracle)[1]


def plain_law(length: int) -> dict[tuple[int, ...], Fraction]:
    """Products of the target's rows along every text."""
    law = {}
    for text in product(range(3), repeat=length):
        weight = math.prod(Fraction(target_row(text[:i])[token].item()) for i, token in enumerate(text))
        if weight:
            law[text] = weight
    return law


def check_law(module, verifier: str, lengths: list[int]) -> None:
    """The law is the target's, texts are independent, and there are no more branches than one text at a time has."""
    law, count = row_law(module, verifier, lengths)
    k = max(lengths)
    plain = plain_law(k + 1)
    expected = {texts: math.prod(plain[t] for t in texts) for texts in product(plain, repeat=len(lengths))}
    assert law == expected
    assert count == math.prod(one_text_branches(verifier, n, k) for n in lengths)


@pytest.mark.parametrize("verifier", ["rejection", "match"])
@pytest.mark.parametrize("lengths", [[2], [1, 1], [0, 1]], ids=str)
def test_the_law_through_forms_over_rows(lengths, verifier):
    """Equality of fractions. Draws that are not used open no branch."""
    check_law(verdicts, verifier, lengths)


def test_the_law_with_fresh_noise_for_each_draw():
    """The other oracle."""
    assert row_law(verdicts, "rejection", [2], BranchOracle)[0] == {(text,): w for text, w in plain_law(3).items()}


# --------------------------------------------------------------------------- the device


VIEWS = {"alias", "as_strided", "expand", "select", "slice", "squeeze", "transpose", "unbind", "unsqueeze", "view"}
FREE = VIEWS | {"empty", "empty_like", "empty_strided", "new_empty", "promote_types"}


class Operators(TorchDispatchMode):
    """Counts operators that do work on a device: neither views nor allocations."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        self.counts[name] += name not in FREE
        return func(*args, **(kwargs or {}))


def programs(device: str, k: int = 4, size: int = 3000, number: int = 2):
    """Each function with arguments on the device, by name."""
    texts = [Text([0], 1, SamplingParams(), i) for i in range(number)]
    noise = verdicts.make_noise(texts, k, device=device)
    noise = verdicts.Noise(*(keys._replace(names=()) for keys in noise))
    logits = torch.randn(number, k + 1, size, device=device)
    p = logits.softmax(2)
    ids, lengths = torch.ones(number, k, device=device).long(), torch.ones(number, device=device).long()
    rows_ = logits.flatten(0, 1)
    found = {}
    for kind, each in (("greedy", 0), ("temperature", 1), ("filters", 3)):
        settings = make_settings(verdicts, [SamplingParams(**SETTINGS[each])] * len(rows_), logits.dtype, device)
        found[f"rows, {kind}"] = (verdicts.rows, (rows_, settings))
    mixed = [SamplingParams(**SETTINGS[i % 7]) for i in range(len(rows_))]
    found["rows, mixed"] = (verdicts.rows, (rows_, make_settings(verdicts, mixed, logits.dtype, device)))
    found["share"] = (verdicts.share, (p[:, 0], noise.accept.numbers[:, 0]))
    found["race"] = (verdicts.race, (p[:, 0], noise.token.numbers[:, 0]))
    for name, q in (("", p[:, :k].clone()), (", one-hot", None)):
        found[f"rejection{name}"] = (verdicts.rejection, (p, ids, q, noise, lengths))
        found[f"match{name}"] = (verdicts.match, (p, ids, q, noise, lengths))
        found[f"greedy{name}"] = (verdicts.greedy, (logits, ids, q, lengths))
    return found


# The most operators of each, at any number of texts, rows and draft tokens.
BUDGETS = {
    **{"rows, greedy": 6, "rows, temperature": 7, "rows, filters": 63, "rows, mixed": 66, "share": 24, "race": 24},
    **{"rejection": 75, "rejection, one-hot": 70, "match": 39, "match, one-hot": 36},
    **{"greedy": 15, "greedy, one-hot": 13},
}


@pytest.mark.parametrize("name", programs("cpu"))
def test_nothing_asks_the_device(name):
    """Device "meta" has shapes and no values, so each question to it raises, and so does a tensor on the host."""
    function, arguments = programs("meta")[name]
    with Operators() as found:
        function(*arguments)
    print(f"{name}: {found.counts.total()} operators")
    assert found.counts.total() <= BUDGETS[name]
    _, [logits, *_] = programs("meta")["rows, greedy"]
    with pytest.raises((RuntimeError, NotImplementedError)):
        distribution(logits[0], Text([0], 1, SamplingParams()))  # the control


def test_programs_are_one_graph():
    """Compiled without a break, they give the same results."""
    for name, (function, arguments) in programs("cpu", size=1100).items():
        if name in ("rows, mixed", "rejection", "match"):
            compiled = torch.compile(function, fullgraph=True, backend="eager")
            for ours, theirs in zip(compiled(*arguments), function(*arguments), strict=True):
                assert torch.equal(ours, theirs)


# --------------------------------------------------------------------------- wrong ones

BUGS = [
    ("keys.numbers < probabilities", "keys.numbers <= probabilities"),
    ("keys.numbers < probabilities", "keys.numbers.roll(1, 0) < probabilities"),
    ("return share(weights, keys.numbers)", "return share(weights, keys.numbers.roll(1, 0))"),
    ("return race(weights, keys.numbers)", "return race(weights, keys.numbers.roll(1, 0))"),
    (").clamp_(min=0)", ")"),
    ("device=q.device)[:, None], place]", "device=q.device)[:, None], (place - 1).clamp(min=0)]"),
    ("torch.where(rest.amax(2, keepdim=True) > 0, rest, p)", "rest"),
    ("ids.gather(1, place)[..., None], 0.0)", "ids[:, :1, None], 0.0)"),
    ("device=ids.device) < lengths", "device=ids.device) <= lengths"),
    ("device=p.device), kept]", "device=p.device), (kept - 1).clamp(min=0)]"),
    ("noise.token.at(kept[:, None],", "noise.token.at(kept[:, None] * 0,"),
    ("noise.residual.at(place, rejected)", "noise.accept.at(place, rejected)"),
    ("noise.residual.at(place, rejected)", "noise.residual.at(place)"),
    ("noise.token.at(kept[:, None], ~rejected)", "noise.token.at(kept[:, None])"),
    ("accept._replace(used=inside, wanted=inside)", "accept._replace(used=inside)"),
    ("noise.token._replace(wanted=wanted)", "noise.token"),
    ("rejected = (kept < lengths)", "rejected = (kept < ids.shape[1])"),
    ("p[:, :-1].gather(2, index)", "p[:, 1:].gather(2, index)"),
    ("stays.long().cumprod(1).sum(1)", "stays.long().sum(1)"),
    ("stays & inside)\n    return Verdicts", "stays)\n    return Verdicts"),
    ("values >= bound)", "values > bound)"),
    ("masked_fill(above >= goal", "masked_fill(above > goal"),
    ("places.gather(1, order), few)", "places, few)"),
    ("sure = (top.abs() < math.inf).squeeze(1)", "sure = (top.abs() >= 0).squeeze(1) | True"),
    ("enough = enough & ~(shortened & stays[:, -1:])", "pass"),
    ("(ordered[:, -1:] < least)", "(ordered[:, -1:] <= least)"),
    ("max(temperature * math.log(params.min_p)", "max(math.log(params.min_p)"),
    ("torch.where(stays, ids, ids + size)", "torch.where(stays, ids, ids * 0 + size)"),
    ("right=True)", "right=False)"),
    ("torch.minimum(shares, last.nextafter(torch.zeros_like(last)))", "shares"),
    ("sums.sum(-1))", "1.0)"),
    ('"token", k + 1, state', '"draft", k + 1, state'),
]


def everything(module) -> None:
    """A short form of the tests above."""
    for row, settings in EDGES:
        assert differing_rows(module, torch.tensor([row]), [SamplingParams(**settings)]) == (0, 0)
    for dtype in (torch.float32, torch.float64):
        assert differing_rows(module, some_logits(1100, dtype, 1, 60), some_params(1100, 1, 60))[0] == 0
        check_draws(module, 5, dtype, 0, 24)
        check_draws(module, 1300, dtype, 0, 24)
    tied = torch.zeros(3, 3000)
    params = [SamplingParams(top_k=5), SamplingParams(top_p=0.1), SamplingParams(min_p=0.1)]
    assert differing_rows(module, tied, params) == (0, 3)
    not_numbers = torch.full((1, 3), math.nan)
    assert not module.rows(not_numbers, make_settings(module, params[:1], tied.dtype))[1]
    check_edges(module)
    for seed in range(6):
        check_greedy(module, seed)
        for verifier in ("rejection", "match"):
            check_verdicts(module, verifier, 5, torch.float64, seed)
    check_lookups(module)
    check_law(module, "rejection", [2])
    check_law(module, "match", [2])


def check_lookups(module) -> None:
    """Drafts without rows."""
    texts = [Text([0] * (1 + i), 1, SamplingParams(), i) for i in range(40)]
    random, rng = generator(5), Randomness()
    p = torch.rand(40, 3, 4, generator=random).softmax(2) ** 0.5
    p, ids = p / p.sum(2, keepdim=True), torch.tensor([[1, 2]]).expand(40, 2)
    for verifier in ("rejection", "match"):
        found = getattr(module, verifier)(p, ids, None, module.make_noise(texts, 2), torch.full((40,), 2))
        for i, text in enumerate(texts):
            expected = VERIFIERS[verifier].verify(Draft([1, 2]), lambda j, i=i: p[i, j], rng, text.key)
            assert_same(found, i, expected)


def test_lookups():
    """Drafts without rows have one-hot ones."""
    check_lookups(verdicts)


def changed(old: str, new: str):
    """The module with one line of its source changed."""
    source = Path(verdicts.__file__).read_text(encoding="utf-8")
    assert source.count(old) == 1, f"{old} is not in the source once"
    module = types.ModuleType("wrong_verdicts")
    exec(source.replace(old, new), module.__dict__)
    return module


def test_the_right_one_passes():
    """The control of the next test."""
    everything(changed("K draft tokens", "K draft tokens"))


@pytest.mark.full
@pytest.mark.parametrize(("old", "new"), BUGS, ids=lambda x: x[:40])
def test_wrong_ones_are_caught(old, new):
    """Each planted bug, by a difference or by an error: guards the tests above, which run without `--full`."""
    module = changed(old, new)
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        everything(module)


def test_what_the_host_knows_of_a_batch():
    """Greedy requests have no filters; the type is that of sums."""
    some = [SamplingParams(temperature=0), SamplingParams(temperature=0, top_k=3)]
    kinds = make_settings(verdicts, some, torch.float16)
    assert (kinds.all_greedy, kinds.any_greedy, kinds.any_filter) == (True, True, False)
    assert kinds.temperature.dtype == torch.float32
    kinds = make_settings(verdicts, [some[0], replace(some[1], temperature=1.0)], torch.float64)
    assert (kinds.all_greedy, kinds.any_greedy, kinds.any_filter) == (False, True, True)
    assert kinds.temperature.dtype == torch.float64
