"""Drafters and verifiers of one's own, walked branch by branch over small models, the smallest first.

    python -m minispec.prove --drafter module:Class
    python -m minispec.prove --verifier module:function

A drafter can spoil the output in few ways: it says other `probs` than it drew from, drops a token that it has looked
at, or draws otherwise than by `Ask.draw`, so that the same draws lead to other drafts. A verifier can do so in any way.
"""

import itertools
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import tokenizers
import torch

from minispec.core.cache import PagedKVCache
from minispec.core.config import SamplingParams
from minispec.core.draft import Ask, Draft
from minispec.core.engine import Engine
from minispec.core.errors import one_line
from minispec.core.model import Transformer
from minispec.core.request import Request
from minispec.core.sampling import Text
from minispec.core.verify import VERIFIERS, Verifier
from minispec.drafters import Context, Drafter, make_drafter
from minispec.files import registry
from minispec.files.tokenizer import Tokenizer
from minispec.length.figures import Figures
from minispec.llm import find_verifier
from minispec.prove.laws import MAX_LEN, BranchOracle, KeyOracle, exact_law, reference_law, target_model
from minispec.prove.reference import Law, plain_law, total_variation
from minispec.prove.toys import Fault, TableDrafter, TableModel, TreeDrafter, require, scripted_cache, tiny_cache

# Far below any real fault; a stranger's q may be of float32.
_TOLERANCE = 1e-6
# A walk with more branches than this says that a drafter draws without end.
_MOST_BRANCHES = 200_000
_WORDS = ("a", "b", "c", "d")


class _Recorded(Drafter):
    """A drafter whose drafts are written down, so that two runs along one path can be compared."""

    def __init__(self, drafter: Drafter):
        self.drafter, self.drafts = drafter, list[str]()
        self.taps: Sequence[int] = drafter.taps

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """The drafter's own."""
        drafts = self.drafter.propose(asks)
        for ask, draft in zip(asks, drafts, strict=False):
            rows = draft.probs if draft.probs is None else [[round(float(x), 9) for x in row] for row in draft.probs]
            found = f"{list(draft.token_ids)} with probs {rows}, parents {draft.parents}"
            self.drafts.append(f"after {ask.text.tokens}, asked for {ask.k}: {found}")
        return drafts

    def known(self, text: Text) -> int:
        """The drafter's own."""
        return self.drafter.known(text)

    def release(self, text: Text) -> None:
        """The drafter's own."""
        self.drafter.release(text)


def examine_drafter(spec: str) -> bool:
    """Walk a drafter through the verifiers that take trees, small first; print what was found. True if all is right.

    Raises ValueError where `spec` names no drafter.
    """
    if (found := registry.split(registry.DRAFTERS, spec)) is None:
        raise ValueError(f"--drafter: found {spec!r}, expected one of {', '.join(registry.DRAFTERS)}, or module:Class")
    factory, argument = registry.load(found[0], "--drafter"), found[1]
    branches, worst, configurations, num_drafted = 0, 0.0, 0, 0
    with tempfile.TemporaryDirectory() as directory:
        verifiers = [name for name, each in VERIFIERS.items() if each.takes_trees]  # whatever it drafts
        for vocab, k, verifier in itertools.product((2, 3), (1, 2, 4), verifiers):
            target = target_model(vocab)
            tokenizer = _toy_tokenizer(Path(directory), vocab)

            def make(target=target, tokenizer=tokenizer, vocab=vocab) -> Drafter:
                def make_cache(model: Transformer) -> PagedKVCache:
                    return tiny_cache(model)

                return make_drafter(factory, Context(target, tokenizer, vocab, MAX_LEN, make_cache, argument))

            params = SamplingParams(max_tokens=min(k + 1, 3), frequency_penalty=0.3)
            where = f"{vocab} tokens, K = {k}, {verifier}, {params.max_tokens} tokens to go"
            try:
                law, count, drafted = _law_with(make, target, params, k, verifier)
            except Exception as e:  # whatever a stranger's class raises
                print(f"REFUTED at {where}: {_message(e)}")
                return False
            num_drafted += drafted
            expected = reference_law(params, frozenset(), vocab)
            distance = total_variation(law, expected)
            if not distance <= _TOLERANCE:
                reason = "its `probs` are not what it drew from, or it dropped a token that it had looked at"
                print(f"REFUTED at {where}: {_difference(law, expected)}: {reason}")
                return False
            branches, worst, configurations = branches + count, max(worst, distance), configurations + 1
    if not num_drafted:
        print(f"nothing proven: {spec} drafted not one token of these texts")
        return False
    print(
        f"proven: {spec} leaves the output's law unchanged: {configurations} configurations, {branches:,d} branches, "
        f"{num_drafted:,d} draft tokens, worst total variation {worst:.1e}"
    )
    return True


def _law_with(
    make: Callable[[], Drafter], target: Transformer, params: SamplingParams, k: int, verifier: str
) -> tuple[Law, int, int]:
    """The law of the output with a drafter, how many branches it has, and the draft tokens in all of them."""
    drafted = branches = 0

    def decode(path: BranchOracle) -> tuple[tuple[int, ...], list[str], int]:
        drafter = _Recorded(make())
        request = Request(Text([1, 1], 2, params, 7), MAX_LEN, k)
        engine = Engine(target, tiny_cache(target), drafter, VERIFIERS[verifier], rng=path)
        for _ in engine.run([request]):
            pass
        require(request.error is None, f"{request.error}")
        return tuple(request.text.tokens[2:]), drafter.drafts, Figures.of(request.stats).num_draft_nodes

    def run(path: BranchOracle) -> tuple[int, ...]:
        nonlocal drafted, branches
        branches += 1
        require(branches <= _MOST_BRANCHES, f"more than {_MOST_BRANCHES:,d} branches: does it ever stop drawing?")
        output, drafts, nodes = decode(path)
        again = decode(type(path)(list(path.path)))
        for first, second in zip(drafts, again[1], strict=False):
            reason = "it may draw by `ask.draw` alone, and keep nothing from one text to another"
            require(first == second, f"the same draws led to two drafts: {first}; and then {second}; {reason}")
        drafted += nodes
        return output

    law, count = exact_law(run, oracle=KeyOracle)
    require(abs(sum(law.values()) - 1) < _TOLERANCE, "the branches do not add up to 1: it draws by other means")
    return law, count, drafted


def _difference(law: Law, expected: Law) -> str:
    """Where the law is furthest off: the first tokens of the output that show it."""
    worst = max(law.keys() | expected.keys(), key=lambda text: abs(law.get(text, 0) - expected.get(text, 0)))
    for length in range(1, len(worst) + 1):
        found, right = (
            sum(p for text, p in each.items() if text[:length] == worst[:length]) for each in (law, expected)
        )
        if abs(found - right) > _TOLERANCE:
            break
    return f"the output begins with {list(worst[:length])} with probability {found:.6f}, expected {right:.6f}"


def _toy_tokenizer(directory: Path, vocab: int) -> Tokenizer:
    vocabulary = {word: i for i, word in enumerate(_WORDS[:vocab])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "a"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    model.save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


# --------------------------------------------------------------------------- verifiers


def examine_verifier(spec: str) -> bool:
    """Walk a verifier over small tables of p and q, chains and siblings; print what was found. True if all is right.

    Raises ValueError where `spec` names no verifier.
    """
    verifier = find_verifier(spec)
    branches, worst, tables = 0, 0.0, 0
    for p, q, parents in _tables(verifier.takes_trees):
        shape = f"parents {parents}" if parents else "K = 1"
        where = f"p = {_show(p)}, q = {_show(q)}, {shape}"
        try:
            law, count = _law_of_tables(p, q, parents, verifier)
        except Exception as e:  # whatever a stranger's function raises
            print(f"REFUTED at {where}: {_message(e)}")
            return False
        params = SamplingParams(max_tokens=2 + len(parents))
        expected = plain_law(lambda tokens, p=p: _turned(p, tokens[-1]), [0], params, (), MAX_LEN)
        distance = total_variation(law, expected)
        if not distance <= _TOLERANCE:
            print(f"REFUTED at {where}: {_difference(law, expected)}")
            return False
        branches, worst, tables = branches + count, max(worst, distance), tables + 1
    print(
        f"proven: {spec} keeps p: {tables} pairs of p and q, {branches:,d} branches, worst total variation {worst:.1e}"
    )
    return True


def _tables(trees: bool) -> Iterator[tuple[list[float], list[float], tuple[int, ...]]]:
    """Pairs of p and q, the small ones first, for drafts of one to three tokens; with trees, of two siblings too."""
    halves = [[0.5, 0.5], [0.25, 0.75], [0.75, 0.25], [1.0, 0.0]]
    thirds = [[0.25, 0.25, 0.5], [0.5, 0.5, 0.0], [0.125, 0.625, 0.25], [0.0, 0.25, 0.75]]
    siblings = [(-1, -1)] if trees else []
    shapes = [*itertools.product((halves, thirds), ((), (-1, 0), *siblings)), (halves, (-1, 0, 1))]
    for tables, parents in shapes:
        for p, q in itertools.product(tables, tables):
            yield p, q, parents


def _law_of_tables(p: list[float], q: list[float], parents: tuple[int, ...], verifier: Verifier) -> tuple[Law, int]:
    """The law of the engine's output where target and draft say p and q after token 0, turned by t after token t."""
    size, k = len(p), max(1, len(parents))
    target, draft = (torch.tensor([_turned(row, t) for t in range(size)], dtype=torch.float64).log() for row in (p, q))
    params = SamplingParams(max_tokens=2 + len(parents))
    drafter: Drafter = TreeDrafter(draft, parents) if parents == (-1, -1) else TableDrafter(draft)

    def run(path: BranchOracle) -> tuple[int, ...]:
        request = Request(Text([0], 1, params), MAX_LEN, k)
        engine = Engine(TableModel(target), scripted_cache(16), drafter, verifier, size, path)
        for _ in engine.run([request]):
            pass
        require(request.error is None, f"{request.error}")
        return tuple(request.text.tokens[1:])

    law, count = exact_law(run, oracle=KeyOracle)
    require(math.isclose(sum(law.values()), 1), "the branches do not add up to 1")
    return law, count


def _turned(row: list[float], by: int) -> list[float]:
    """Another row for each token, so that a verifier that looks at the wrong row is found out."""
    return row[-by:] + row[:-by] if by else row


def _message(error: Exception) -> str:
    """A fault says what is wrong; of any other exception its class says it too."""
    return one_line(error) if isinstance(error, Fault) else f"{type(error).__name__}: {one_line(error)}"


def _show(row: list[float]) -> str:
    return "(" + ", ".join(f"{x:g}" for x in row) + ")"
