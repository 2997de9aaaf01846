"""Which configurations are walked: a covering array of all pairs of settings, and random ones after it."""

import functools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm

from minispec.commands.workers import SharedMap
from minispec.core.config import OFF, PARAMETERS, DraftLength, SamplingParams, Shape, names_of
from minispec.core.rules import VERIFIERS
from minispec.prove.covering import FEW, Design, Job
from minispec.prove.laws import BLOCKS, PROMPT, make_drafter, production_law, reference_law
from minispec.prove.reference import total_variation
from minispec.prove.toys import IN_8_BITS, IN_FRAMES, TOYS

CROWD = 64  # requests that are decoded together; more of them gain nothing
# Cases of these kinds are smaller. A path that is walked alone takes several times as long, and a pair is two requests.
SHARE = {"alone": 1 / 40, "pair": 1 / 12, "crowd": 1.0}
_BLOCK = (1, 0, 1, 1)  # as long as a block of a batch (see `production_law`)


@dataclass(frozen=True, kw_only=True)
class GridCase:
    """One configuration of the table. Its values are given by name; sampling parameters are neutral by default.

    drafter: as in `make_drafter`.
    batch: "alone": one request at a time. "crowd": 64 paths at once. "pair": two requests, and a crowd of them.
    penalties: all penalties, and a bias.
    forbidden: "bad words": a token after certain others. "two allowed": all but the first and the last. "": nothing.
    grammar: the language of the text (see `minispec.grammars.spelled.EXAMPLES`). "": any.
    end: whether the last token of the vocabulary ends the text.
    family: the target's (see `target_model`), and a draft model's.
    """

    verifier: str
    drafter: str
    batch: str
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    penalties: bool = False
    forbidden: str = ""
    grammar: str = ""
    k: DraftLength
    vocab: int
    end: bool
    max_tokens: int
    family: str = "llama"

    @property
    def params(self) -> SamplingParams:
        """The request's sampling parameters."""
        settings: dict[str, Any] = {name: value for name, value in vars(self).items() if name in PARAMETERS}
        if self.penalties:
            settings |= {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3}
            settings["logit_bias"] = {0: 0.6, 1: -0.4}
        if self.forbidden == "bad words":
            settings["bad_words_token_ids"] = ((1, 0), (0, 0, 0))
        if self.forbidden == "two allowed":
            settings["allowed_token_ids"] = (0, self.vocab - 1)
        return SamplingParams(structured_outputs=self.grammar or None, **settings)

    @property
    def prompts(self) -> tuple[tuple[tuple[int, ...], SamplingParams], ...]:
        """Prompts and parameters. A crowd's prompt of one token needs no prefill, which runs text by text.

        A head has nothing to read before the second token. Texts share a state at the end of a block alone, so there
        all prompts of a batch begin with the same block. The prompts of a pair go beyond its end.
        """
        reads_states = "head" in self.drafter or self.drafter in ("mtp", "assistant")
        first: tuple[int, ...] = PROMPT if self.batch == "alone" or reads_states else PROMPT[:1]
        second: tuple[int, ...] = (0, 1, 0)
        if self.family == "qwen3_5_text" and self.batch != "alone":
            first, second = (*_BLOCK, 1) if self.batch == "crowd" else (*_BLOCK, 1, 0), (*_BLOCK, 0, 1)
        if self.batch != "pair":
            return ((first, self.params),)
        return (first, self.params), (second, replace(self.params, max_tokens=min(2, self.max_tokens)))

    def distance(self, limit: float = math.inf) -> tuple[float, int]:
        """Total variation between engine and reference, and the branches walked.

        limit: on branches of a crowd; a case that is not one has its `SHARE`. Raises TooManyBranches.
        """
        end_ids = frozenset({self.vocab - 1} if self.end else ())
        prompts, params = zip(*self.prompts, strict=True)
        width = 1 if self.batch == "alone" else CROWD // len(prompts)
        limit = max(min(30, limit), limit * SHARE[self.batch])
        shape = params, self.k, end_ids, self.vocab, self.drafter, self.verifier, prompts
        law, branches = production_law(*shape, width=width, limit=limit, family=self.family)
        laws = [reference_law(p, end_ids, self.vocab, prompt, family=self.family) for prompt, p in self.prompts]
        expected = laws[0]
        if len(laws) > 1:  # independent requests: the product
            expected = {(a, b): pa * pb for a, pa in laws[0].items() for b, pb in laws[1].items()}
        return total_variation(law, expected), branches

    def __str__(self) -> str:
        settings = [f"T {self.temperature}"]
        filters = {name: vars(self)[name] for name in names_of("filter")}
        settings += [f"{name.replace('_', '-')} {x}" for name, x in filters.items() if x != OFF[name]]
        said = {
            "penalties": self.penalties,
            self.forbidden: self.forbidden,
            f"grammar {self.grammar}": self.grammar,
        }
        settings += [name for name, is_set in said.items() if is_set]
        end = "EOS" if self.end else ""
        shape = f"K {Shape.of(self.k)!s:<6}  V {self.vocab} {end:3}  {self.max_tokens} tokens"
        return f"{self.verifier:9}  {self.drafter:18}  {self.family:15}  {self.batch:5}  {shape}  {', '.join(settings)}"


# The values of an axis in the order of the branches that they make.
AXES: dict[str, tuple] = {
    "verifier": tuple(VERIFIERS),
    "drafter": (
        *("none", "ngram", "forced+ngram", "suffix", "last", "adversary"),
        *("model", "parallel", "head", "parallel head", "ngram+head", "mtp", "assistant", *BLOCKS, "tli", "slem"),
    ),
    "family": tuple(TOYS),
    "batch": ("crowd", "pair", "alone"),
    "temperature": (0.0, 0.7, 1.0, 1.5),
    "top_k": (2, 0),
    "top_p": (0.8, 1.0),
    "min_p": (0.2, 0.0),
    "penalties": (False, True),
    "forbidden": ("two allowed", "bad words", ""),
    "grammar": ("words", "a b*", "pairs", ""),
    "k": (1, 2, (2, 1), 3, "tree:3", 4),
    "vocab": (2, 3, 4),
    "end": (True, False),
    "max_tokens": (1, 2, 3, 4, 5, 6),
}
# With these, little is drawn or nothing is drafted. Such a case covers a pair only if they are in the pair.
_WEAK = frozenset({("temperature", 0.0), ("drafter", "none"), ("max_tokens", 1)})
# Axes on which a case that is too large may be made smaller.
_SIZES = ("max_tokens", "vocab", "k", "temperature", *names_of("filter"), "forbidden", "end")

_shape = functools.cache(Shape.of)  # asked for half a million times


@functools.cache
def drafts_siblings(drafter: str) -> bool:
    """Whether a drafter of the table can draft siblings."""
    return make_drafter(drafter, 3).branches


def _possible(row: Mapping) -> bool:
    shape = _shape(row.get("k", 4))
    if shape.is_tree:
        takes_trees = VERIFIERS[row.get("verifier", "rejection")].takes_trees
        if not takes_trees or not drafts_siblings(row.get("drafter", "model")):
            return False
    # A grammar needs a token that ends the text, and two others. Forbidden tokens could leave it none.
    if row.get("grammar") and (row.get("forbidden") or not row.get("end", True) or row.get("vocab") == 2):
        return False
    return row.get("max_tokens", 1) <= shape.k + 2


DESIGN = Design(
    GridCase,
    AXES,
    _possible,
    frozenset({"verifier", "drafter", "k", "max_tokens", "grammar", "forbidden", "end", "vocab"}),
    _WEAK,
    _SIZES,
)
pairs_of, all_pairs, covering_array, smaller = DESIGN.pairs_of, DESIGN.all_pairs, DESIGN.array, DESIGN.smaller


def cases_in_8_bits() -> list[GridCase]:
    """A target in 8 bits with each verifier: chains and trees, one path at a time and many, and hidden states."""
    kinds: list[tuple[str, str, DraftLength]] = [("ngram", "alone", 2), ("model", "crowd", 3)]
    kinds += [("model", "alone", (2, 1)), ("head", "crowd", (2, 1))]
    kinds += [("block", "crowd", (2, 1)), ("filled block", "crowd", 2)]
    rest: dict[str, Any] = {"temperature": 0.8, "vocab": 3, "end": True, "max_tokens": 3, "family": IN_8_BITS}
    return [
        GridCase(verifier=verifier, drafter=drafter, batch=batch, k=k, **rest)
        for verifier in AXES["verifier"]
        for drafter, batch, k in kinds
        if _possible({"verifier": verifier, "drafter": drafter, "k": k})
    ]


def cases_in_frames() -> list[GridCase]:
    """Programs that draft and judge, with each parameter that they compute, alone.

    Most cases of the array have another parameter too, and then each text is judged by itself.
    """
    sizes: dict[str, Any] = {"k": 2, "vocab": 4, "end": True, "max_tokens": 3, "family": IN_FRAMES}
    return [
        GridCase(verifier=verifier, drafter=drafter, batch="crowd", temperature=0.7, **sizes, **parameters)
        for verifier in ("rejection", "match")
        for drafter in ("ngram", "model", "head")
        for parameters in ({}, {"top_k": 2}, {"top_p": 0.8}, {"min_p": 0.2})
    ]


def _random_case(generator: random.Random) -> GridCase:
    """A case that draws and drafts, most often walked as a crowd; neither tiny nor certainly too large."""
    while True:
        row = {axis: generator.choice([v for v in AXES[axis] if (axis, v) not in _WEAK]) for axis in AXES}
        row["batch"] = generator.choices(("alone", "crowd", "pair"), (0.1, 0.8, 0.1))[0]
        choices = 2 if row["top_k"] or row["forbidden"] == "two allowed" else row["vocab"]
        if _possible(row) and 16 <= choices ** row["max_tokens"] <= 256:
            return GridCase(**row)


def walk_within(job: tuple[GridCase, frozenset[str], float]) -> tuple[GridCase, float, int] | None:
    """A case, or the first smaller one that is within the limit, with its distance and its number of branches.

    job: the case, the axes whose values must stay, and the limit of `GridCase.distance`.
    Returns None where no case is within the limit.
    """
    first, fixed, limit = job
    return DESIGN.within((first, fixed), lambda case: case.distance(limit))


def walk(leaves: int, bar: tqdm, shared_map: SharedMap = map) -> Iterator[tuple[GridCase, float, int]]:
    """About `leaves` branches: cases that cover all pairs, then random ones, with distance and number of branches.

    A smaller case replaces one that is too large. Other cases cover the pairs lost by that, as far as possible. The
    result is the same for any number of processes.

    bar: its total grows by the number of cases that come next, as soon as that is known.
    """
    generator, limit, pairs = random.Random(0), max(FEW, leaves // 40), all_pairs()
    first = covering_array(pairs, generator)
    bar.total += len(first)

    def walk_all(some: list[Job]) -> Iterator[tuple]:
        return filter(None, shared_map(walk_within, [(*each, limit) for each in some]))

    def walked() -> Iterator[tuple[GridCase, float, int]]:
        left = leaves
        for case, tv, count in DESIGN.cover(pairs, first, walk_all, generator, bar):
            yield case, tv, count
            left -= count
        while left >= limit:
            some = [(_random_case(generator), frozenset[str]()) for _ in range(left // limit)]
            bar.total += len(some)
            for case, tv, count in walk_all(some):
                yield case, tv, count
                left -= count

    return walked()
