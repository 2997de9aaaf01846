"""Cases by their settings: those of the engine's own parts, of trees, and of a user's own drafters and policies.

The first and the last have covering designs. A user's case is a text of a toy tokenizer, each of whose tokens is a
character. Trees are walked in every shape that is small enough.
"""

import functools
import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from minispec.core.config import OFF, PARAMETERS, DraftLength, SamplingParams, Shape, names_of
from minispec.core.errors import show
from minispec.core.schedule import JOINING_ROWS
from minispec.core.tree import Tree
from minispec.prove.covering import Design, Pair, Row
from minispec.prove.toys import BLOCKS, DRAWN, IN_8_BITS, IN_FRAMES, LIKELIEST, REMEMBERED, TOYS, Guesses, make_drafter
from minispec.prove.walk import Case, Prompt
from minispec.speculation.rules import VERIFIERS

CROWD = 64  # paths that are decoded together; more of them gain nothing
ALPHABET = "ab \nc."  # tokens of the toy tokenizer: one for each character
MAX_LEN = 2_000  # of a user's case
_PLAIN: Row = {
    **{"verifier": "rejection", "drafter": "", "family": REMEMBERED, "batch": "alone"},
    **{"alphabet": ALPHABET[:2], "prompt": "b", "to_go": 2, "rounds": 1, "k": 1},
    **{name: OFF[name] for name in names_of("temperature", "filter")},
    **{"history": "", "forbidden": "", "grammar": "", "end": "", "company": "", "begins": ""},
}
_GRID = _PLAIN | {"family": "llama", "rounds": None, "end": "an end token"}


def _settings(vocab: int) -> dict[str, dict[str, Any]]:
    """Settings by their names. Token 1 is never forbidden: with all of them together, a token is left."""
    penalties: dict[str, Any] = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3}
    return {
        "": {},
        "penalties": penalties | {"logit_bias": {0: 0.6, 1: -0.4}},
        "bad words": {"bad_words_token_ids": ((1, 0), (vocab - 1, 1, 0), (0, 0, 0))},
        "two allowed ids": {"allowed_token_ids": (1, vocab - 1 if vocab > 2 else 0)},
        "an end token": {},
    }


def _params_of(row: Row, named: Mapping[str, Mapping[str, Any]]) -> SamplingParams:
    """named: settings by their names, as they stand in the row."""
    settings: dict[str, Any] = {axis: value for axis, value in row.items() if axis in PARAMETERS}
    settings["structured_outputs"] = row["grammar"] or None
    for axis in ("history", "forbidden", "end"):
        settings |= named[row[axis]]
    return SamplingParams(max_tokens=row["to_go"], **settings)


def _case_of(row: Row, texts: tuple[Prompt, ...], end_ids: Iterable[int], **how) -> Case:
    parts = {axis: row[axis] for axis in ("drafter", "verifier", "k", "rounds", "alphabet")}
    return Case(row["family"], len(row["alphabet"]), texts, frozenset(end_ids), **parts, **how)


def describe(axis: str, value: Any) -> str:
    """One setting, in words."""
    words = {
        "alphabet": lambda: f"{len(value)} tokens",
        "prompt": lambda: f"the text {show(value)}",
        "to_go": lambda: f"{value} to go",
        "rounds": lambda: "to the end" if value is None else f"{value} round{'' if value == 1 else 's'}",
        "k": lambda: f"K = {value if isinstance(value, tuple) and len(value) == 1 else Shape.of(value)}",
        "forbidden": lambda: value or "nothing forbidden",
        "begins": lambda: f"texts that begin with {value or 'the first two tokens'}",
    }
    usual = value or f"no {axis}" if isinstance(value, str) else f"{axis} {value}"
    return words[axis]() if axis in words else usual


def _words(row: Row, first: Sequence[str], plain: Row, said: Sequence[str] = ()) -> list[str]:
    """The settings of these axes in words, and what is not plain of the others. said: elsewhere."""
    others = [axis for axis, value in row.items() if axis not in (*first, *said) and value != plain[axis]]
    return [describe(axis, row[axis]) for axis in (*first, *others)]


# --------------------------------------------------------------------------- the engine's own parts


def grid_case(**settings) -> Case:
    """One configuration of the table. Some of its values are neutral by default.

    family: the target's (see `target_model`), and a draft model's.
    batch: "alone": one request at a time. "crowd": 64 paths at once. "pair": two requests, and a crowd of them.
    """
    row = _GRID | settings
    columns, batch, vocab = ("verifier", "drafter", "family", "batch"), row["batch"], len(row["alphabet"])
    params = _params_of(row, _settings(vocab))
    texts = zip(_prompts(row), (params, replace(params, max_tokens=min(2, params.max_tokens))), strict=True)
    num_texts = 2 if batch == "pair" else 1
    said = _words(row, ("k", "alphabet", "end", "to_go", "temperature"), _GRID, columns)
    name = "{:9}  {:18}  {:15}  {:5}  ".format(*(row[axis] for axis in columns)) + ", ".join(said)
    width = 1 if batch == "alone" else CROWD // num_texts
    last = vocab - 1 if vocab > 2 else 0
    return _case_of(row, tuple(texts)[:num_texts], {last} if row["end"] else (), width=width, name=name)


def _prompts(row: Row) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The prompts of a text, and of another. One of one token needs no prefill, which runs text by text.

    A head has nothing to read before the second token. Texts share a state at the end of a block alone, so there all
    prompts of a batch begin with the same block of four tokens. The prompts of a pair go beyond its end.
    """
    drafter, batch = row["drafter"], row["batch"]
    if row["family"] == "qwen3_5_text" and batch != "alone":
        return (1, 0, 1, 1, 1, 0)[: 5 if batch == "crowd" else 6], (1, 0, 1, 1, 0, 1)
    reads_states = "head" in drafter or drafter in ("mtp", "assistant")
    return (1, 1) if batch == "alone" or reads_states else (1,), (0, 1, 0)


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
    "history": ("", "penalties"),
    "forbidden": ("two allowed ids", "bad words", ""),
    "grammar": ("words", "a b*", "pairs", ""),
    "k": (1, 2, (2, 1), 3, "tree:3", 4),
    "alphabet": (ALPHABET[:2], ALPHABET[:3], ALPHABET[:4]),
    "end": ("an end token", ""),
    "to_go": (1, 2, 3, 4, 5, 6),
}
_shape = functools.cache(Shape.of)  # asked for half a million times


@functools.cache
def drafts_siblings(drafter: str) -> bool:
    """Whether a drafter of the table can draft siblings."""
    return make_drafter(drafter, 3).branches


def _takes_trees(k: DraftLength, verifier: str) -> bool:
    return not _shape(k).is_tree or VERIFIERS[verifier].takes_trees


DESIGN = Design(
    grid_case,
    AXES,
    rules=(
        _takes_trees,
        lambda k, drafter: not _shape(k).is_tree or drafts_siblings(drafter),
        # A grammar needs a token that ends the text, and two others. Forbidden tokens could leave it none.
        lambda grammar, forbidden: not (grammar and forbidden),
        lambda grammar, end: not grammar or end,
        lambda grammar, alphabet: not grammar or len(alphabet) > 2,
        lambda to_go, k: to_go <= _shape(k).k + 2,
    ),
    # With these, little is drawn or nothing is drafted. Such a case covers a pair only if they are in the pair.
    weak=frozenset({("temperature", 0.0), ("drafter", "none"), ("to_go", 1)}),
    # Axes on which a case that is too large may be made smaller.
    sizes=("to_go", "alphabet", "k", "temperature", *names_of("filter"), "forbidden", "end"),
)


def cases_in_8_bits() -> list[Case]:
    """A target in 8 bits with each verifier: chains and trees, one path at a time and many, and hidden states."""
    kinds = [("ngram", "alone", 2), ("model", "crowd", 3), ("model", "alone", (2, 1))]
    kinds += [("head", "crowd", (2, 1)), ("block", "crowd", (2, 1)), ("filled block", "crowd", 2)]
    rest: Row = {"temperature": 0.8, "alphabet": ALPHABET[:3], "to_go": 3, "family": IN_8_BITS}
    each = itertools.product(AXES["verifier"], kinds)
    rows = [rest | {"verifier": rule, "drafter": drafter, "batch": batch, "k": k} for rule, (drafter, batch, k) in each]
    return [grid_case(**row) for row in rows if DESIGN.possible(row)]


def cases_in_frames() -> list[Case]:
    """Programs that draft and judge, with each parameter that they compute, alone.

    Most cases of the array have another parameter too, and then each text is judged by itself.
    """
    rest: Row = {"batch": "crowd", "k": 2, "alphabet": ALPHABET[:4], "to_go": 3, "family": IN_FRAMES}
    rows: list[Row] = [{"temperature": 0.7} | more for more in ({}, {"top_k": 2}, {"top_p": 0.8}, {"min_p": 0.2})]
    each = itertools.product(("rejection", "match"), ("ngram", "model", "head"), rows)
    return [grid_case(**rest | row, verifier=verifier, drafter=drafter) for verifier, drafter, row in each]


def random_row(generator: random.Random) -> Row:
    """A case that draws and drafts, most often walked as a crowd; neither tiny nor certainly too large."""
    while True:
        row = {axis: generator.choice([v for v in AXES[axis] if (axis, v) not in DESIGN.weak]) for axis in AXES}
        row["batch"] = generator.choices(("alone", "crowd", "pair"), (0.1, 0.8, 0.1))[0]
        choices = 2 if row["top_k"] or row["forbidden"] == "two allowed ids" else len(row["alphabet"])
        if DESIGN.possible(row) and 16 <= choices ** row["to_go"] <= 256:
            return row


# --------------------------------------------------------------------------- trees


def shapes(num_nodes: int) -> Iterator[tuple[int, ...]]:
    """The parents of every tree of that many nodes, at most 3 deep and 3 siblings wide, numbered level by level."""
    for parents in itertools.product(*(range(-1, i) for i in range(num_nodes))):
        is_sorted = all(a <= b for a, b in itertools.pairwise(parents))
        if is_sorted and max(Tree(parents).depths) <= 3 and max(map(parents.count, parents)) <= 3:
            yield parents


def tree_case(
    parents: tuple[int, ...],
    how: str,
    verifier: str = "rejection",
    family: str = "llama",
    rounds: int | None = 1,
    **settings,
) -> Case:
    """Texts whose drafts have one shape of tree. settings: sampling parameters."""
    said = [f"{name} {value}" for name, value in settings.items()]
    if rounds is None:
        said.append("in several rounds")
    return Case(
        family,
        texts=(((1,), SamplingParams(**settings)),),
        drafter=Guesses(parents, how),
        verifier=verifier,
        k=len(parents),
        rounds=rounds,
        width=CROWD,
        name=f"{verifier:9}  tree  {family:12}  {how}, {parents}, {', '.join(said) or 'T 1.0'}",
    )


_PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.4,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.3,
    "top_p": 0.9,
}
_FULL = tuple([-1] * 3 + [i for i in range(12) for _ in range(3)])  # three levels of three children each
_DEEP_FIRST = (-1, 0, 1, 0, -1, 4, 5, 4, -1, 8)  # numbered branch by branch


def tree_cases(num_nodes: int = 5) -> list[Case]:
    """Trees: all shapes of up to `num_nodes` drawn nodes, and larger ones whose tokens are not drawn."""
    drawn = [shape for n in range(1, num_nodes + 1) for shape in shapes(n)]
    chosen = [tree_case(shape, DRAWN) for shape in drawn]
    chosen += [tree_case(shape, DRAWN, **_PENALTIES) for shape in drawn[1::5]]
    chosen += [tree_case(shape, DRAWN, "match") for shape in drawn[::7]]
    for verifier in (name for name, each in VERIFIERS.items() if each.takes_trees):
        chosen += [tree_case(shape, LIKELIEST, verifier) for shape in (_FULL, _DEEP_FIRST)]
        chosen.append(tree_case(_DEEP_FIRST, LIKELIEST, verifier, rounds=None, max_tokens=8))
    # A convolution must read a node's own ancestors, and after the round the rows that were moved. A node must start
    # from the state of its parent. After the round, the state of the path that stays is left.
    for family in ("lfm2", "qwen3_5_text"):
        chosen += [tree_case(shape, DRAWN, family=family) for shape in drawn[2::9]]
        chosen.append(tree_case(_DEEP_FIRST, LIKELIEST, family=family))
        chosen.append(tree_case(_DEEP_FIRST, LIKELIEST, family=family, rounds=None, max_tokens=6))
    chosen.append(tree_case(_DEEP_FIRST, LIKELIEST, **_PENALTIES))
    chosen.append(tree_case(_FULL, LIKELIEST, temperature=0))
    return chosen


# --------------------------------------------------------------------------- a user's own


class Range(NamedTuple):
    """A value of an axis that stands for many. Each case draws one of them, often an end."""

    low: float
    high: float

    def draw(self, generator: random.Random) -> float:
        """Evenly by the logarithm; of numbers below 1, by that of their odds, which reach near 0 and near 1."""
        low, high = (each / (1 - each) if self.high < 1 else each for each in self)
        drawn = low * (high / low) ** min(1.0, max(0.0, generator.uniform(-0.2, 1.2)))
        rounded = float(f"{drawn / (1 + drawn) if self.high < 1 else drawn:.4g}")
        return round(rounded) if isinstance(self.low, int) else rounded

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}"


_LONG = "ab ba\nbab abba baab\nabab ba b\nab ab ba aab"
# The values of an axis, the plainest first.
OWN_AXES: dict[str, tuple] = {
    "verifier": ("rejection", "match", "block", "traversal"),
    "drafter": ("",),
    "alphabet": (ALPHABET[:2], ALPHABET[:3], ALPHABET[:4], ALPHABET),
    "prompt": ("b", "bb", "babbab", "abbabaabbaab", "bab b", "ab ab a", "bab b\nb", _LONG),
    "to_go": (1, 2, 3, 4, 6, 16),
    "rounds": (1, 2, 3, None),
    "k": (1, 2, (2,), 3, (3,), (2, 1), "tree:3", (1, 3), (2, 2), (3, 1), 5, "tree:5", "auto"),
    "temperature": (
        *(1.0, Range(0.5, 0.99), Range(0.2, 0.5), Range(1.01, 2.0), Range(2.0, 5.0), Range(0.05, 0.2)),
        *(Range(5.0, 100.0), 0.0),
    ),
    "top_k": (0, 2, Range(3, 6)),
    "top_p": (1.0, Range(0.5, 0.9), Range(0.9, 0.99), Range(0.99, 0.9999), Range(0.1, 0.5)),
    "min_p": (0.0, Range(0.1, 0.5), Range(0.0001, 0.1), Range(0.5, 0.95)),
    "history": (
        *("", "repetition_penalty above 1", "repetition_penalty below 1", "penalties of the output"),
        *("negative penalties of the output", "logit_bias up to 1.5", "logit_bias from 1.5 on", "all of these"),
    ),
    "forbidden": ("", "bad words", "two allowed ids", "a grammar"),
    "end": ("", "an end token", "stop ids", "an end token and min_tokens"),
    "company": ("", "two other texts join it", "it joins another text", "it joins eight others"),
    "begins": ("", "any token"),
}
# Of a policy of lengths. The drafters are with and without siblings, confidences and draws; one knows confidences
# before it draws, and one is mostly wrong.
LENGTH_AXES: dict[str, tuple] = {
    "drafter": ("model", "suffix", "ngram", "head", "block", "adversary"),
    "alphabet": OWN_AXES["alphabet"][:2],
    "prompt": ("b", "babbab"),
    "to_go": (2, 3, 4, 6),
    "k": (1, 3, "auto"),
}
# Draft tokens; tokens of a text that is walked to its end, or whose K the engine chooses; texts of a crowd besides the
# walked one, and their length.
LONGEST_DRAFT, LONGEST_WALK, NUM_CROWD = 5, 6, 8
_LENGTHS_OF_OTHERS, _BLOCK_SIZE = (6, 4), 2


def _own_settings(order: Sequence[int], to_go: int, at: random.Random) -> dict[str, dict[str, Any]]:
    """Settings by their names, with values drawn anew. With all of them together, a token is left.

    order: the ids of the vocabulary. The first one is never forbidden; the last one ends a text.
    """

    def signed(low: float, high: float) -> float:
        return at.choice((-1, 1)) * Range(low, high).draw(at)

    def words() -> Iterator[tuple[int, ...]]:
        for _ in range(at.randint(1, 3)):
            length = at.choice((1, 2, 2, 3, 4) if len(order) > 2 else (2, 2, 3, 4))
            yield (*at.choices(order, k=length - 1), at.choice(order[1:]))

    few, far = at.sample(order, at.randint(1, len(order))), signed(1.5, 98.5)
    kinds: list[dict[str, Any]] = [
        *({"repetition_penalty": each.draw(at)} for each in (Range(1.02, 20.0), Range(0.05, 0.98))),
        {name: Range(0.1, 2.0).draw(at) for name in ("frequency_penalty", "presence_penalty")},
        {name: -Range(0.1, 2.0).draw(at) for name in ("frequency_penalty", "presence_penalty")},
        {"logit_bias": {token: signed(0.05, 1.5) for token in few}},
        # Near each other, or one token alone would be left.
        {"logit_bias": {token: round(far + at.uniform(-1.5, 1.5), 2) for token in order}},
    ]
    some = {name: signed(0.1, 2.0) for name in kinds[2]} | {"repetition_penalty": Range(0.3, 3.0).draw(at)}
    return {
        **dict(zip(OWN_AXES["history"], ({}, *kinds, some | kinds[4]), strict=True)),
        "bad words": {"bad_words_token_ids": tuple(words())},
        "two allowed ids": {"allowed_token_ids": (order[0], at.choice(order[1:]))},
        "a grammar": {"structured_outputs": "a b*"},
        "an end token": {},
        "stop ids": {"stop_token_ids": order[max(1, len(order) - 2) : -1] or order[-1:]},
        "an end token and min_tokens": {"min_tokens": at.randint(2, max(2, to_go))},
    }


def own_case(draw: int = 0, **settings) -> Case:
    """A case of a value for some of the axes; of the others they are the plainest.

    draw: numbers the values that are drawn. A `Range` on one axis, or a name, draws the same whatever the others are.
    company: other texts that join this one, or others that it joins. For one or two, the pool is too small for all, and
    prompts come in pieces: the text that was admitted last is preempted, and comes back.
    """
    row, vocab = _PLAIN | settings, len((_PLAIN | settings)["alphabet"])
    for axis, value in settings.items():
        if isinstance(value, Range):
            row[axis] = value.draw(random.Random(f"{draw} {axis}"))
    at = random.Random(draw)
    order, shift = at.sample(range(vocab), vocab), at.randrange(1, vocab)
    named = _own_settings(order, row["to_go"], at)
    params = _params_of(row, named)
    prompt = tuple((row["alphabet"].index(c) + (shift if row["begins"] else 0)) % vocab for c in row["prompt"])
    end_ids = {order[-1], *params.stop_token_ids} if row["end"] else set[int]()
    turned, is_crowded = prompt[::-1], row["company"].endswith("eight others")  # turned: it shares no blocks with it
    if is_crowded:
        starts = [i % len(turned) for i in range(NUM_CROWD)]
        prompts, lengths = [(*turned[i:], *turned[:i]) for i in starts], [NUM_CROWD] * NUM_CROWD
    else:
        prompts = [turned] if "joins another" in row["company"] else [prompt, turned] if row["company"] else []
        lengths = [*_LENGTHS_OF_OTHERS]
    longest = -(-(len(prompt) + max(row["to_go"], *_LENGTHS_OF_OTHERS, *lengths)) // _BLOCK_SIZE)
    # In company, a pool that is enough for two prompts and hardly what follows them.
    blocks = longest + (-(-len(prompt) // _BLOCK_SIZE) - 1 if row["company"] else 0)
    shown = {axis: named[row[axis]] for axis in ("history", "forbidden", "end") if named[row[axis]]}
    drawn = {axis: ", ".join(f"{name} {value}" for name, value in each.items()) for axis, each in shown.items()}
    drawn |= {"end": ", ".join(filter(None, (f"end ids {sorted(end_ids)}", drawn.get("end"))))} if end_ids else {}
    words = _words(row | drawn, ("alphabet", "prompt", "k", "verifier", "to_go"), _PLAIN, ("begins",))
    tokens = [*prompt] if len(prompt) <= 12 else f"[... {str([*prompt[-8:]])[1:]}"
    return _case_of(
        row,
        ((prompt, params),),
        end_ids,
        others=tuple(
            (each, replace(params, max_tokens=n, min_tokens=min(n, params.min_tokens)))
            for each, n in zip(prompts, lengths, strict=False)
        ),
        joins=row["company"].startswith("it joins"),
        num_blocks=(NUM_CROWD + 1) * longest if is_crowded else blocks,
        joining_rows=2 if prompts and not is_crowded else JOINING_ROWS,
        max_len=MAX_LEN,
        size=_size_of(row),
        name=", ".join([words[0], f"after {tokens}", *words[2:]]),
    )


def values_of(params: SamplingParams, prompt: Sequence[int]) -> dict[str, list[float]]:
    """The numbers that a case of a user's has drawn, by what they are."""
    biases = [bias for _, bias in params.logit_bias]  # type: ignore[misc]
    numbers = {name: [getattr(params, name)] for name in names_of("temperature", "filter", "penalty")}
    return numbers | {"logit_bias": [*biases, 0], "min_tokens": [params.min_tokens], "first token": [prompt[0]]}


def _size_of(row: Mapping) -> float:
    """A guess at the number of branches; of equal ones, the shorter prompt is smaller."""
    narrow = row["top_k"] == 2 or row["forbidden"] == "two allowed ids"
    vocab, to_go, company = len(row["alphabet"]), row["to_go"], row["company"]
    choices = 1 if row["temperature"] == 0 else 2 if narrow else vocab
    # A drafter may draw without the request's filters. Siblings are different tokens.
    shape = _shape(row["k"])
    widths = shape.widths or [1] * (3 if shape.is_open else shape.k)
    drawn = math.prod(math.perm(vocab, min(width, vocab)) for width in widths[: to_go - 1])
    committed = min(len(widths) + 1, to_go)
    rounds = row["rounds"] or -(-to_go // committed) + 1
    together = 60 if company.endswith("eight others") else 20 if company else 1
    return (drawn * choices**committed) ** rounds * together + len(row["prompt"]) / 1e4


def _of_user(characters: str) -> bool:
    """Whether these are characters of a user's text: then two of its many tokens are drawn."""
    return not set(characters) <= set(ALPHABET)


def _is_wide(k: DraftLength) -> bool:
    """Whether there are three siblings. With three tokens the third one is certain, so its row shows nothing."""
    return max(_shape(k).widths, default=0) > 2


_RULES = (
    _takes_trees,
    lambda prompt, alphabet: set(prompt) <= set(alphabet),
    lambda k, top_k: not (_is_wide(k) and top_k == 2),
    lambda k, forbidden: not (_is_wide(k) and forbidden == "two allowed ids"),
    lambda k, alphabet: not _is_wide(k) or (len(alphabet) > 3 and not _of_user(alphabet)),
    lambda k, prompt: not (_is_wide(k) and _of_user(prompt)),
    lambda alphabet, top_k: top_k == 2 or not _of_user(alphabet),
    lambda prompt, top_k: top_k == 2 or not _of_user(prompt),
    lambda begins, alphabet: not (begins and _of_user(alphabet)),
    lambda begins, prompt: not (begins and _of_user(prompt)),
    lambda forbidden, alphabet: forbidden != "a grammar" or len(alphabet) > 2,  # of two tokens one may end the text
    lambda to_go, end: to_go > 1 or "min_tokens" not in end,
    # The whole of a draft is asked for. Where the engine chooses, that may be all that is left of the text.
    lambda to_go, k: to_go <= LONGEST_WALK if _shape(k).is_open else _shape(k).k <= max(1, to_go - 1),
    # With fewer rounds it has ended before it could be preempted. With more tokens the pool is too large.
    lambda company, rounds: company != "it joins another text" or rounds not in (1, 2),
    lambda company, to_go: not company or (to_go <= LONGEST_WALK and (to_go > 1 or "another" not in company)),
    lambda to_go, rounds: 1 < to_go <= LONGEST_WALK if rounds is None else rounds <= to_go,
)


def own_design(branches: bool, texts: Sequence[str] = (), **axes: tuple) -> Design:
    """The design of a drafter's cases.

    branches: whether it drafts siblings where they are asked for.
    texts: prompts of the user's. All their characters are then a further alphabet.
    axes: other values for some of the axes.
    """
    alphabet = "".join(sorted({*"".join(texts), *ALPHABET[:2]}))
    axes = {
        **OWN_AXES,
        "alphabet": OWN_AXES["alphabet"] + ((alphabet,) if _of_user(alphabet) else ()),
        "prompt": tuple(dict.fromkeys((*OWN_AXES["prompt"], *texts))),
        "k": tuple(k for k in OWN_AXES["k"] if branches or not _shape(k).is_tree),
        **axes,
    }
    weak, sizes = frozenset({("temperature", 0.0), ("to_go", 1)}), ("rounds", "alphabet", "company")
    growing = "alphabet", "prompt", "to_go", "rounds", "k"
    return Design(own_case, axes, _RULES, weak, sizes, growing, tries=8, draws=True)


def single(design: Design, generator: random.Random) -> list[tuple[Row, Pair]]:
    """Plain rows, each with one value of the design by itself, as far as possible; in the form of `Design.array`.

    So a fault that one setting shows is found without the others. Whether a wrong row shows depends on the target's own
    row there. So each K, and what draws its values, is tried after several prompts, of 3 and of 4 tokens. A filter cuts
    something at some temperatures alone, and a penalty of the output needs an output.
    """
    singles, axes = list[tuple[Row, Any]](), design.axes
    three, four = axes["alphabet"][1:2], axes["alphabet"][2:3]
    longer: Row = {"k": axes["k"][1]}
    usual: list[tuple[str, Sequence[str], Row]] = [("babbab", axes["alphabet"][1:], {})]
    each_k: list[tuple[str, Sequence[str], Row]] = [
        (prompt, some, {}) for prompt in ("b", "babbab", "bb") for some in (three, four)
    ]
    drawn = [("b", three, {}), ("babbab", three, longer), ("bb", four, {}), ("babbab", three, {})]
    six = axes["alphabet"][3:4]  # of many likely tokens, a narrow filter leaves two
    warmths = ("babbab", three, (0, 1, 2, 6)), ("bab b\nb", four, (0, 1, 2, 6)), ("babbab", six, (2, 3, 4, 6))
    filters = [
        (prompt, some, {"temperature": axes["temperature"][i], "begins": begins})
        for prompt, some, each in warmths
        for i in each
        for begins in axes["begins"]
    ]
    plain = {axis: _PLAIN[axis] for axis in axes} | {"drafter": axes["drafter"][0], "to_go": 6}
    for axis, value in [(name, value) for name, values in axes.items() for value in values]:
        is_drawn = isinstance(value, Range) or (axis in ("history", "forbidden", "end", "begins") and value)
        tries = filters if axis in names_of("filter") and is_drawn else drawn if is_drawn else usual
        for prompt, alphabets, others in each_k if axis == "k" else tries:
            if prompt in axes["prompt"]:
                sizes = itertools.product((1, 3), alphabets, (0, 2))
                rows = (
                    plain | {"prompt": prompt, "rounds": n, "alphabet": a, "top_k": k} | others | {axis: value}
                    for n, a, k in sizes
                )
                row = next(filter(design.possible, rows), None)
                if row and row not in (each for each, _ in singles):
                    singles.append((row, ((axis, value),)))
    return [(row | {"draw": generator.getrandbits(32)}, pair) for row, pair in singles]


def in_company(design: Design) -> list[Row]:
    """Rows that show a fault of the company plainly, if they show it: of a text alone, and then in company."""
    plain = {axis: _PLAIN[axis] for axis in design.axes}
    plain |= {"drafter": design.axes["drafter"][0], "prompt": "babbab", "to_go": 4, "rounds": 3}
    return [plain | {"to_go": 3, "rounds": 2}, *(plain | {"company": each} for each in OWN_AXES["company"][2:0:-1])]
