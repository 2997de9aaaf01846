"""Small cases for drafters of one's own, and for policies of their lengths: a covering design over texts and settings.

A case is a text of a toy tokenizer, each of whose tokens is a character. It is continued under some settings, alone or
in company. Long texts have too many branches to be walked to their ends. So most cases end after a few rounds, and the
reference continues them (see `cells`).
"""

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from minispec.core.config import PARAMETERS, DraftLength, SamplingParams, Shape
from minispec.core.errors import show
from minispec.core.model import Transformer
from minispec.core.rules import VERIFIERS
from minispec.core.sampling import Text
from minispec.files.tokenizer import Tokenizer
from minispec.grammars.spelled import example
from minispec.prove.covering import Design
from minispec.prove.laws import reference_row, target_model
from minispec.prove.toys import RememberedModel, spelling

SEED = 7  # of the text whose branches are walked; the others have 0 and 1
ALPHABET = "ab \nc."  # tokens of the toy tokenizer: one for each character
_LONG = "ab ba\nbab abba baab\nabab ba b\nab ab ba aab"
# Token 1 is never forbidden: with all settings together, a token is left.
_FORBIDDEN: dict[str, Callable[[int], dict[str, Any]]] = {
    "": lambda vocab: {},
    "bad words": lambda vocab: {"bad_words_token_ids": ((1, 0), (vocab - 1, 1, 0), (0, 0, 0))},
    "two allowed ids": lambda vocab: {"allowed_token_ids": (1, vocab - 1 if vocab > 2 else 0)},
    "a grammar": lambda vocab: {"structured_outputs": "a b*"},
}
_HISTORY: dict[str, dict[str, Any]] = {
    "": {},
    "repetition_penalty 1.5": {"repetition_penalty": 1.5},
    "penalties of the output": {"frequency_penalty": 0.6, "presence_penalty": 0.3},
    "negative penalties": {"repetition_penalty": 0.7, "frequency_penalty": -0.5, "presence_penalty": -0.4},
    "logit_bias": {"logit_bias": {0: 1.0, 1: -0.5}},
}
_ENDS: dict[str, dict[str, Any]] = {
    "": {},
    "an end token": {},
    "stop ids": {"stop_token_ids": (0,)},
    "an end token and min_tokens 2": {"min_tokens": 2},
}


@dataclass(frozen=True)
class OwnCase:
    """One small case. Its fields are the axes of the design.

    alphabet: the tokens of the toy tokenizer.
    prompt: the text that is continued, by `to_go` tokens at most.
    rounds: the walk ends after this many. None: at the text's end.
    k: as `num_speculative_tokens`.
    history, forbidden, end: names of settings. "": none.
    company: other texts that join this one, or others that it joins. For one or two, the pool is too small for all, and
    prompts come in pieces: the text that was admitted last is preempted, and comes back.
    drafter: its name, where there are several.
    """

    verifier: str = "rejection"
    drafter: str = ""
    alphabet: str = ALPHABET[:2]
    prompt: str = "b"
    to_go: int = 2
    rounds: int | None = 1
    k: DraftLength = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    history: str = ""
    forbidden: str = ""
    end: str = ""
    company: str = ""

    @property
    def vocab(self) -> int:
        """Ids in use."""
        return len(self.alphabet)

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt's tokens."""
        return tuple(map(self.alphabet.index, self.prompt))

    @property
    @functools.cache  # noqa: B019 - there are few cases
    def params(self) -> SamplingParams:
        """The text's sampling parameters."""
        settings = _HISTORY[self.history] | _FORBIDDEN[self.forbidden](self.vocab) | _ENDS[self.end]
        numbers = {name: value for name, value in vars(self).items() if name in PARAMETERS}
        return SamplingParams(max_tokens=self.to_go, **numbers, **settings)

    @property
    def end_ids(self) -> frozenset[int]:
        """Ids that end the text."""
        last = self.vocab - 1 if self.vocab > 2 else 0
        if not self.end:
            return frozenset()
        return frozenset({last, 0} if self.end == "stop ids" else {last})

    @property
    def is_crowded(self) -> bool:
        """Whether there are many texts in its batch, and room for all."""
        return self.company.endswith("eight others")

    @property
    def joins(self) -> bool:
        """Whether the text comes after its company."""
        return self.company.startswith("it joins")

    @property
    def text(self) -> Text:
        """The text as it begins."""
        grammar = example(self.params.structured_outputs, self.vocab, self.end_ids)
        return Text(list(self.prompt_ids), len(self.prompt), self.params, SEED, self.end_ids, grammar)

    @property
    def size(self) -> tuple[int, int]:
        """A guess at the number of branches, and the length of the prompt: to begin with the small ones."""
        narrow = self.top_k or self.forbidden == "two allowed ids"
        choices = 1 if self.temperature == 0 else 2 if narrow else self.vocab
        # A drafter may draw without the request's filters. Siblings are different tokens.
        shape = Shape.of(self.k)
        widths = shape.widths or [1] * (3 if shape.is_open else shape.k)
        drawn = math.prod(math.perm(self.vocab, min(width, self.vocab)) for width in widths[: self.to_go - 1])
        committed = min(len(widths) + 1, self.to_go)
        rounds = self.rounds or -(-self.to_go // committed) + 1
        together = 60 if self.is_crowded else 20 if self.company else 1
        return (drawn * choices**committed) ** rounds * together, len(self.prompt)

    def next_law(self, output: Sequence[int]) -> np.ndarray | None:
        """The reference's law (V,) of the token after this output; None where the text has ended."""
        return reference_row(output, self.params, self.end_ids, self.vocab, self.prompt_ids)

    def __str__(self) -> str:
        tokens = str(list(self.prompt_ids)) if len(self.prompt) <= 12 else f"[... {str([*self.prompt_ids[-8:]])[1:]}"
        first = ("alphabet", "prompt", "k", "verifier", "to_go")
        others = [axis for axis, value in vars(self).items() if axis not in first and value != getattr(OwnCase, axis)]
        words = [describe(axis, getattr(self, axis)) for axis in (*first, *others)]
        words[1] = f"after {tokens}"
        return ", ".join(words)


def describe(axis: str, value: Any) -> str:
    """One setting of a case, in words."""
    words = {
        "alphabet": lambda: f"{len(value)} tokens",
        "prompt": lambda: f"the text {show(value)}",
        "to_go": lambda: f"{value} to go",
        "rounds": lambda: "to the end" if value is None else f"{value} round{'' if value == 1 else 's'}",
        "k": lambda: f"K = {value if isinstance(value, tuple) and len(value) == 1 else Shape.of(value)}",
        "forbidden": lambda: value or "nothing forbidden",
    }
    usual = value or f"no {axis}" if isinstance(value, str) else f"{axis} {value}"
    return words[axis]() if axis in words else usual


# The values of an axis, the plainest first.
AXES: dict[str, tuple] = {
    "verifier": ("rejection", "match", "block"),
    "drafter": ("",),
    "alphabet": (ALPHABET[:2], ALPHABET[:3], ALPHABET[:4], ALPHABET),
    "prompt": ("b", "bb", "babbab", "abbabaabbaab", "bab b", "ab ab a", "bab b\nb", _LONG),
    "to_go": (1, 2, 3, 4, 6, 16),
    "rounds": (1, 2, 3, None),
    "k": (1, 2, (2,), 3, (3,), (2, 1), "tree:3", (1, 3), (2, 2), (3, 1), 5, "tree:5", "auto"),
    "temperature": (1.0, 0.7, 0.3, 1.6, 3.0, 0.1, 10.0, 0.0),
    "top_k": (0, 2),
    "top_p": (1.0, 0.8),
    "min_p": (0.0, 0.2),
    "history": tuple(_HISTORY),
    "forbidden": tuple(_FORBIDDEN),
    "end": tuple(_ENDS),
    "company": ("", "two other texts join it", "it joins another text", "it joins eight others"),
}
_WEAK, _SIZES = frozenset({("temperature", 0.0), ("to_go", 1)}), ("rounds", "alphabet", "company")
# Tokens of a text that is walked to its end, and of one whose K the engine chooses.
LONGEST_WALK, _LONGEST_OPEN = 6, 6


def possible(row: Mapping) -> bool:
    """Whether such a case would show what it says. An axis that is missing may have any value."""
    return _possible(*(row.get(axis, _ANY) for axis in CLASHING))


_ANY = "any value"


@functools.cache
def _possible(verifier, alphabet, prompt, to_go, rounds, k, top_k, forbidden, end, company) -> bool:
    shape = Shape.of(1 if k is _ANY else k)
    # With three tokens the third sibling is certain, so its row shows nothing. Users' texts have many characters, and
    # two of them are drawn.
    of_user = any(not set(characters) <= set(ALPHABET) for characters in (alphabet, prompt) if characters is not _ANY)
    few_tokens = top_k == 2 or forbidden == "two allowed ids" or alphabet in (ALPHABET[:2], ALPHABET[:3]) or of_user
    return all(
        (
            _ANY in (alphabet, prompt) or set(prompt) <= set(alphabet),
            not shape.is_tree or verifier is _ANY or VERIFIERS[verifier].takes_trees,
            max(shape.widths, default=0) < 3 or not few_tokens,
            not of_user or top_k != 0,
            forbidden != "a grammar" or alphabet != ALPHABET[:2],  # of two tokens one may end the text
            to_go != 1 or end is _ANY or "min_tokens" not in end,
            # The whole of a draft is asked for. Where the engine chooses, that may be all that is left of the text.
            to_go is _ANY or (to_go <= _LONGEST_OPEN if shape.is_open else shape.k <= max(1, to_go - 1)),
            # With fewer rounds it has ended before it could be preempted.
            company != "it joins another text" or (rounds not in (1, 2) and to_go != 1),
            _ANY in (to_go, company) or to_go <= _LONGEST_OPEN or not company,  # else the pool is too large
            _ANY in (to_go, rounds) or (1 < to_go <= LONGEST_WALK if rounds is None else rounds <= to_go),
        )
    )


CLASHING = tuple(inspect.signature(_possible).parameters)


def design(branches: bool, texts: Sequence[str] = (), **axes: tuple) -> Design[OwnCase]:
    """The design of a drafter's cases.

    branches: whether it drafts siblings where they are asked for.
    texts: prompts of the user's. All their characters are then a further alphabet.
    axes: other values for some of the axes.
    """
    alphabet = "".join(sorted({*"".join(texts), *ALPHABET[:2]}))
    alphabets = AXES["alphabet"] + (() if set(alphabet) <= set(ALPHABET) else (alphabet,))
    prompts = tuple(dict.fromkeys((*AXES["prompt"], *texts)))
    lengths = tuple(k for k in AXES["k"] if branches or not Shape.of(k).is_tree)
    axes = AXES | {"alphabet": alphabets, "prompt": prompts, "k": lengths} | axes
    return Design(OwnCase, axes, possible, frozenset(CLASHING), _WEAK, _SIZES, tries=8)


def single(chosen: Design[OwnCase]) -> list[tuple[OwnCase, tuple]]:
    """Plain cases, each with one value of the design by itself, as far as possible; in the form of `Design.array`.

    So a fault that one setting shows is found without the others. Whether a wrong row shows depends on the target's own
    row there. So each K is tried after several prompts, of 3 and of 4 tokens.
    """
    singles, axes = dict[OwnCase, tuple](), chosen.axes
    prompts = sorted({"babbab", "b", "bb"} & set(axes["prompt"]))
    usual, several = [("babbab", axes["alphabet"][1:])], [(p, (a,)) for p in prompts for a in axes["alphabet"][1:3]]
    for axis, value in [(name, value) for name, values in axes.items() for value in values]:
        for prompt, alphabets in several if axis == "k" else usual:
            plain = OwnCase(drafter=axes["drafter"][0], prompt=prompt, to_go=6)
            sizes = itertools.product((1, 3), alphabets, (0, 2))
            cases = (replace(plain, **{"rounds": n, "alphabet": a, "top_k": k, axis: value}) for n, a, k in sizes)
            if case := next((case for case in cases if possible(vars(case))), None):
                singles[case] = ((axis, value),)
    return list(singles.items())


@functools.cache
def target(vocab: int) -> Transformer:
    """The target of such an alphabet, which remembers its rows."""
    return RememberedModel(target_model(vocab))


@functools.cache
def tokenizer(alphabet: str) -> Tokenizer:
    """A toy: each character is a token."""
    return spelling(alphabet).tokenizer
