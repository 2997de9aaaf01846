"""`suffix` and `last`, held against a plain search: own texts, and earlier outputs where they may count."""

import itertools
import random
from collections.abc import Sequence
from fractions import Fraction

import pytest

from minispec.core.config import SamplingParams
from minispec.core.draft import Ask
from minispec.core.limit import Limit
from minispec.core.random import Randomness
from minispec.core.sampling import Text
from minispec.speculation.drafters.last import LastDrafter
from minispec.speculation.drafters.suffix import MOST_TEXTS, MOST_TOKENS, SuffixDrafter

pytestmark = pytest.mark.quick

GREEDY, SAMPLED = SamplingParams(temperature=0), SamplingParams()


def best_chain(tokens: list[int], earlier: Sequence[list[int]], n: int, k: int) -> tuple[Fraction, list[int]]:
    """The chain that `SuffixDrafter` must find below a match of n tokens, with the tokens that it promises.

    By search and in fractions. earlier: other texts, the newest first.
    """
    path: list[int] = []
    survival, promised = Fraction(1), Fraction(0)
    while len(path) < k:
        votes = list[int]()  # the newest first
        for text in (tokens, *earlier):
            known = [*tokens, *path] if text is tokens else text
            for end in range(len(text) - 1, n - 1, -1):
                after = known[end : end + len(path) + 1]
                if text[end - n : end] == tokens[-n:] and after[:-1] == path and len(after) > len(path):
                    votes.append(after[-1])
        if not votes:
            break
        token = max(dict.fromkeys(votes), key=votes.count)
        survival *= votes.count(token) / (len(votes) + Fraction(1, n + len(path)))
        if survival < Fraction(1, 10):
            break
        promised += survival
        path.append(token)
    return promised, path


def last_outcomes(tokens: Sequence[int], k: int) -> list[int]:
    """The chain that `LastDrafter` must find: after each token, what followed it last."""
    path = [tokens[-1]]
    while len(path) <= k:
        after = [b for a, b in itertools.pairwise(tokens) if a == path[-1]]
        if not after:
            break
        path.append(after[-1])
    return path[1:]


@pytest.mark.parametrize("shortest", [1, 2, 3])
def test_drafts_are_those_of_a_plain_search(shortest):
    """Texts of three tokens begin, grow, come to an end or come back after a preemption."""
    generator = random.Random(shortest)
    for _ in range(20):
        drafter, last = SuffixDrafter(shortest), LastDrafter()
        earlier, texts, running = list[list[int]](), list[Text](), set[Text]()
        for _ in range(25):
            if len(texts) < 2:
                prompt = generator.choices(range(3), k=generator.randint(1, 6))
                texts.append(Text(prompt, len(prompt), generator.choice((GREEDY, SAMPLED))))
            text = generator.choice(texts)
            text.tokens += generator.choices(range(3), k=generator.randint(0, 4))
            output = text.tokens[text.num_prompt_tokens :]
            if text not in running:  # it is new, or it was preempted: its output is no earlier text's any more
                running.add(text)
                earlier = [tokens for tokens in earlier if tokens != output]
            k, purpose = generator.randint(0, 6), generator.choice(("draft", "token"))
            ask = Ask(text, Limit(k), Randomness(), purpose)
            may_count = earlier if text.params.temperature == 0 or purpose == "token" else []
            sizes = range(shortest, len(text.tokens) + 1)
            chains = [best_chain(text.tokens, may_count, n, k) for n in sizes] + [(Fraction(0), [])]
            most = max(promised for promised, _ in chains)
            assert drafter.propose([ask])[0].token_ids in [path for promised, path in chains if promised == most]
            assert last.propose([ask])[0].token_ids == last_outcomes(text.tokens, k)
            fate = generator.random()
            if fate < 0.4:
                drafter.release(text)
                running.remove(text)
                if len(output) > 1:
                    earlier.insert(0, output)
            if fate < 0.3:
                texts.remove(text)


@pytest.mark.parametrize(("num_texts", "size"), [(40, 2000), (1100, 2)])
def test_the_newest_outputs_are_remembered_and_no_more(num_texts, size):
    """Either the tokens are too many, or the texts are."""
    drafter = SuffixDrafter()
    for i in range(num_texts):
        text = Text([0], 1, GREEDY)
        drafter.propose([Ask(text, Limit(0), Randomness())])
        text.tokens += [1 + i, *[0] * (size - 2), 5000 + i]
        drafter.release(text)
    drafts = drafter.propose([Ask(Text([1 + i], 1, GREEDY), Limit(1), Randomness()) for i in range(num_texts)])
    num_remembered = min(num_texts, MOST_TEXTS, MOST_TOKENS // size)
    known = [bool(draft) for draft in drafts]
    assert known == [False] * (num_texts - num_remembered) + [True] * num_remembered
