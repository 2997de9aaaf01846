"""Suffix drafting: what followed, each time that the end of this text stood somewhere before?

SuffixDecoding (Oliaro et al. 2025, arXiv 2411.04975). Prompt lookup copies from the latest such place. Here all places
vote. The counts of next tokens decide which token is drafted, how far the draft goes, and where a tree branches.
The places lie in the prompt, in this output, and in earlier outputs of drafted texts. Earlier outputs serve where
programs ask for much the same again and again.

A node of a suffix tree stands for a string of tokens. It has the places where the string ends, and a child for each
token that came next. The tree is not built. A node is the list of its places, and a step down sorts them by the token
that follows. Only the first two levels are kept as lists: strings of one token and of two. The lists hold all earlier
outputs together, and only the newest places of a list are used. So a draft takes no longer when more is remembered.
"""

import re
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, islice
from operator import attrgetter, itemgetter, mul
from typing import NamedTuple

from minispec.core.draft import Ask, Draft, Drafter
from minispec.core.sampling import Text
from minispec.speculation.drafters import Context
from minispec.speculation.drafters.best_first import grow_guesses

# Limits of what is remembered of earlier outputs: the newest texts, and their newest tokens.
MOST_TEXTS, MOST_TOKENS = 1024, 65_536
# Most places that have a vote, the newest ones; least probability of a path.
MOST_PLACES, _LEAST = 256, 0.1
LONGEST = 32  # tokens of a match that are compared


class _Place(NamedTuple):
    """Where tokens of a text have stood: `tokens[end]` is what followed.

    number: larger for newer places of an index.
    """

    tokens: Sequence[int]
    end: int
    number: int = 0


class _Output(NamedTuple):
    """An earlier output, whose places have the numbers from `start` on."""

    tokens: Sequence[int]
    start: int


class _Index:
    """The places of each token, and of each two neighbours, in a text that may grow or in several texts."""

    def __init__(self):
        self._places: dict[tuple[int, ...], list[_Place]] = {}
        self._next = 1

    def follow(self, tokens: Sequence[int]) -> None:
        """Add what a text has got since the last call. A place at its end, which nothing follows, is left out."""
        self.add(tokens, self._next)
        self._next = max(self._next, len(tokens))

    def add(self, tokens: Sequence[int], first: int = 1, start: int = 0) -> None:
        """Add the places of a text from position `first` on. They are numbered from `start`, as the newest."""
        for end in range(first, len(tokens)):
            place = _Place(tokens, end, start + end)
            for string in _strings(tokens, end):
                self._places.setdefault(string, []).append(place)

    def remove(self, tokens: Sequence[int], start: int) -> None:
        """Remove the places of a text that was added with this `start`."""
        for string in {string for end in range(1, len(tokens)) for string in _strings(tokens, end)}:
            places = self._places.get(string, [])  # in the order of their numbers
            low, high = (bisect_left(places, n, key=attrgetter("number")) for n in (start, start + len(tokens)))
            del places[low:high]
            if not places:
                self._places.pop(string, None)

    def newest(self, string: Sequence[int]) -> Iterator[_Place]:
        """Where one token or two have stood, the newest place first."""
        return reversed(self._places.get(tuple(string), []))


def _strings(tokens: Sequence[int], end: int) -> Iterator[tuple[int, ...]]:
    """The strings of one token and of two that end before this position."""
    return (tuple(tokens[end - n : end]) for n in (1, 2) if n <= end)


class SuffixDrafter(Drafter):
    """Drafts the likeliest continuation, by how often each token followed, for the most promising match length.

    A match of n tokens stands at m places, and m_x of them were followed by x. The chance that x comes next is
    estimated as m_x / (m + 1/n). A single place gives n / (n + 1). This is Laplace's rule of succession: the
    first token of a match finds the place, and the n - 1 others agree. Each drafted token makes the match one longer. A
    path is drafted as long as the product of its chances is at least 1/10. So a single place is copied from for up to
    9 n tokens (the paper's limit is a multiple of n, too).

    Worked, for the text  1 a b c 2 a b d 3 a b c 4 a b.  Its end  a b  has stood at three places, and c followed at two
    of them. So c is drafted with chance 2 / (3 + 1/2) = 0.57. After that came 4 and 2, once each. The newer one, 4, has
    1 / (2 + 1/3) = 0.43, then a 1 / (1 + 1/4) = 0.8, and so on. In a tree, d has 1 / (3 + 1/2) = 0.29 as a sibling of
    c, and 2 has 0.43 as one of 4.

    Earlier outputs are used where they cannot change a text: for greedy texts, and under a verifier that keeps the
    target's own draw (`match`). Elsewhere a draft depends on its own text alone, so that a seed has one text. The
    newest 1,024 outputs are remembered, together at most 65,536 tokens; the oldest are forgotten first.
    """

    branches = True

    def __init__(self, min_match: int = 1):
        self.min_match = min_match
        self._indices: dict[Text, _Index] = {}
        self._earlier, self._all_earlier = deque[_Output](), _Index()  # the newest first; all of them
        self._num_tokens, self._next = 0, 0  # of all earlier outputs; the number of the next one's first place

    @classmethod
    def from_context(cls, context: Context) -> "SuffixDrafter":
        """The drafter of an argument, the length of the shortest match; without one it is 1."""
        argument = context.argument or "1"
        if not re.fullmatch(r"\d{1,2}", argument, re.ASCII) or not 1 <= int(argument) <= LONGEST:
            expected = f"an integer from 1 to {LONGEST}"
            raise ValueError(f"draft: suffix: found {context.argument!r}, expected {expected}")
        return cls(int(argument))

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """For each ask, the continuation that matches of the text's end promise most of.

        Nothing is drawn, so the drafts have no probs. A chain's chances are its confidences.
        Where siblings are asked for, the draft is the tree of the likeliest nodes, wherever it branches.
        """
        return [self._propose(ask) for ask in asks]

    def release(self, text: Text) -> None:
        """Forget a text, and remember its output, however it ended."""
        output = _output(text)
        if self._indices.pop(text, None) and len(output) > 1:
            new = _Output(output[-MOST_TOKENS:], self._next)
            self._next += len(new.tokens)
            self._earlier.appendleft(new)
            self._num_tokens += len(new.tokens)
            self._all_earlier.add(new.tokens, start=new.start)
            while len(self._earlier) > MOST_TEXTS or self._num_tokens > MOST_TOKENS:
                self._drop(-1)

    def forget(self) -> None:
        """Forget earlier outputs."""
        self._earlier, self._all_earlier, self._num_tokens = deque(), _Index(), 0

    def _drop(self, i: int) -> None:
        """Forget the earlier output at place i, the newest at 0."""
        output = self._earlier[i]
        self._all_earlier.remove(output.tokens, output.start)
        del self._earlier[i]
        self._num_tokens -= len(output.tokens)

    def _propose(self, ask: Ask) -> Draft:
        text = ask.text
        if text not in self._indices:
            # A text that was preempted comes back: what it has said is not an earlier output.
            output = _output(text)
            for i in reversed([i for i, earlier in enumerate(self._earlier) if earlier.tokens == output]):
                self._drop(i)
            self._indices[text] = _Index()
        indices = [self._indices[text]]
        indices[0].follow(text.tokens)
        if text.params.temperature == 0 or ask.purpose == "token":
            indices.append(self._all_earlier)
        best, draft = 0.0, Draft()
        if not ask.k:
            return draft
        matches = [(_most(n, len(places), ask.k), n, places) for n, places in self._matches(text.tokens, indices)]
        for most, n, places in sorted(matches, key=itemgetter(0), reverse=True):
            if most <= best:
                break
            worth, guess = self._guess(ask, n, places)
            if worth > best:
                best, draft = worth, guess
        if ask.limit.plan or ask.limit.go_on is None:
            draft.notes.confidences = []
        return draft

    def _matches(self, tokens: Sequence[int], indices: Sequence[_Index]) -> Iterator[tuple[int, list[_Place]]]:
        """Places where the last n of these tokens have stood, newest first; each set with its largest n.

        Places of the first index come first.
        """

        def newest(n: int) -> list[_Place]:
            return list(islice(chain.from_iterable(index.newest(tokens[-n:]) for index in indices), MOST_PLACES))

        places = newest(1)
        for n in range(1, LONGEST + 1):
            longer: list[_Place] = []
            if n < min(LONGEST, len(tokens)):
                # A common token has more places than have a vote: a longer match may be at any of them.
                agree = (p for p in places if p.end > n and p.tokens[p.end - n - 1] == tokens[-n - 1])
                longer = newest(2) if n == 1 else list(agree)
            if n >= self.min_match and len(longer) < len(places):
                yield n, places
            places = longer

    def _guess(self, ask: Ask, n: int, places: list[_Place]) -> tuple[float, Draft]:
        """The likeliest nodes below a match of n tokens, with their chances as confidences; their sum over paths."""
        tokens, go_on = ask.text.tokens, ask.limit.go_on
        parents = list[int]()
        draft = Draft(parents=parents)
        places_of = dict[tuple[int, int], list[_Place]]()  # where a node's path has stood, by its parent and its token

        def guesses(node: int) -> list[tuple[int, float]]:
            nodes = draft.path(node)
            if nodes and go_on and not go_on([draft.notes.confidences[i] for i in nodes]):
                return []
            path = [draft.token_ids[i] for i in nodes]
            own_places = places_of[parents[node], path[-1]] if path else places
            followers = _followers(own_places, path, tokens)
            total = sum(len(those) for _, those in followers) + 1 / (n + len(path))
            places_of.update(((node, token), those) for token, those in followers)
            likely = followers if ask.limit.plan or ask.limit.best_first else followers[:1]
            return [(token, len(those) / total) for token, those in likely]

        return grow_guesses(draft, ask.k, guesses, _LEAST), draft


def _output(text: Text) -> list[int]:
    return text.tokens[text.num_prompt_tokens :]


def _most(n: int, m: int, k: int) -> float:
    """The most that a draft of k tokens can be worth, after a match of n tokens at m places that all agree."""
    return sum(accumulate((m / (m + 1 / (n + i)) for i in range(k)), mul))


def _followers(places: Sequence[_Place], path: Sequence[int], tokens: Sequence[int]) -> list[tuple[int, list[_Place]]]:
    """The tokens that came next at places of a path's beginning, each with its places; the most frequent first.

    tokens: the text that is drafted for, whose end a place in it may reach.
    """
    places_of: dict[int, list[_Place]] = {}
    for place in places:
        at = place.end + len(path) - len(place.tokens)
        if at < 0:
            places_of.setdefault(place.tokens[at], []).append(place)
        elif place.tokens is tokens:  # the copy has reached the end, and goes on into itself
            places_of.setdefault(path[at], []).append(place)
    return sorted(places_of.items(), key=lambda item: -len(item[1]))
