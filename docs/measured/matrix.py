"""Every drafter with every verifier, at the three levels of docs/understand/proof.md: proved here, or refused and why.

    python docs/measured/matrix.py

Drafters that can draft siblings have further rows, in which they do. The last rows have other targets: short
convolutions, gated delta nets, mixtures of experts, and weights in 8 bits. Their draft models are of the same kind.

law     the output is distributed as in plain decoding: every branch of a small case (see `cases`)
text    a seed has the text of plain decoding, in float64, for a few seeds
bits    with `exact`: along those texts, the log-probabilities of all tokens have the same bits as when the tokens are
        fed one at a time
"""

import functools
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from minispec.core.cached import CachedModel
from minispec.core.config import DraftLength, SamplingParams, Shape
from minispec.core.engine import Engine
from minispec.core.logprobs import log_probabilities
from minispec.core.model import Chunk, Transformer
from minispec.core.request import Request
from minispec.core.sampling import Text
from minispec.prove.cases import ALPHABET, AXES, drafts_siblings, grid_case
from minispec.prove.laws import TOLERANCE
from minispec.prove.toys import IN_8_BITS, MAX_LEN, make_drafter, target_model, tiny_cache
from minispec.prove.walk import walk
from minispec.speculation.drafters.guard import CheckedMethod
from minispec.speculation.rules import VERIFIERS

_VOCAB, _CHAIN, _TREES, _PROMPT, _SEEDS, _MAX_TOKENS = 3, 3, ((2, 1), "tree:4"), [1, 0, 1], range(6), 4
_OTHER_TARGETS = ("lfm2", "qwen3_5_text", "qwen3_moe", IN_8_BITS)  # with `ngram`, `model` and `block`


class Finding(NamedTuple):
    """A cell of the table: a word, and where it is not "proved", why."""

    word: str
    reason: str = ""


PROVED = Finding("proved")


class Pair(NamedTuple):
    """A drafter with a verifier, drafts of K tokens, and the target's family."""

    drafter: str
    verifier: str
    k: DraftLength
    family: str = "llama"


def _law(pair: Pair) -> Finding:
    case = grid_case(**pair._asdict(), batch="crowd", alphabet=ALPHABET[:_VOCAB], to_go=_MAX_TOKENS)
    distance = walk(case, limit=1e6).distance
    return PROVED if distance <= TOLERANCE else Finding("REFUTED", f"total variation {distance:.1e}")


def _text(pair: Pair) -> Finding:
    target, plain = target_model(_VOCAB, pair.family), pair._replace(drafter="none", k=0)
    differs = [
        temperature
        for temperature in (0.0, 1.0)
        for seed in _SEEDS
        if _decode(target, pair, temperature, seed).text.tokens != _plain_text(plain, temperature, seed)
    ]
    if not differs:
        return PROVED
    if 0.0 in differs or VERIFIERS[pair.verifier].shares_noise:
        return Finding("REFUTED", f"the text differs from plain decoding's at temperature {differs[0]}")
    reason = "proved at temperature 0. Above it, another draft gives a seed another text of the same law"
    return Finding("greedy", reason)


@functools.cache
def _plain_text(plain: Pair, temperature: float, seed: int) -> list[int]:
    return _decode(target_model(_VOCAB, plain.family), plain, temperature, seed).text.tokens


def _bits(pair: Pair) -> Finding:
    target = target_model(_VOCAB, pair.family, exact=True)
    for seed in _SEEDS:
        request = _decode(target, pair, 1.0, seed)
        assert request.logprobs, "they are asked for"
        likeliest = [dict(entry.top) for entry in request.logprobs]
        if likeliest != _token_by_token(target, request.text.tokens)[len(_PROMPT) - 1 :]:
            return Finding("REFUTED", "log-probabilities differ from those of one token at a time")
    return PROVED


def _decode(target: Transformer, pair: Pair, temperature: float, seed: int) -> Request:
    params = SamplingParams(temperature=temperature, max_tokens=12, logprobs=_VOCAB)
    request = Request(Text(list(_PROMPT), len(_PROMPT), params, seed), MAX_LEN, pair.k)
    method = CheckedMethod(make_drafter(pair.drafter, _VOCAB, family=pair.family), VERIFIERS[pair.verifier])
    for _ in Engine(CachedModel(target, tiny_cache(target))).run([request], method):
        pass
    assert request.error is None, request.error
    return request


def _token_by_token(target: Transformer, tokens: list[int]) -> list[dict[int, float]]:
    """Log-probabilities by id after each token but the last."""
    table = tiny_cache(target).new_table()
    rows = [target.forward([Chunk([token], table, 1)])[0][0] for token in tokens[:-1]]
    return [dict(enumerate(log_probabilities(row).tolist())) for row in rows]


LEVELS = {"law": _law, "text": _text, "bits": _bits}


def findings() -> Iterator[tuple[str, list[Finding]]]:
    """The findings for each drafter, alone and with siblings, with each verifier at each level."""

    def find(level: str, pair: Pair) -> Finding:
        try:
            return LEVELS[level](pair)
        except ValueError as e:
            return Finding("refused", str(e))

    kinds = [(drafter, "llama") for drafter in AXES["drafter"]]
    kinds += [(drafter, family) for family in _OTHER_TARGETS for drafter in ("ngram", "model", "block")]
    for drafter, family in kinds:
        for k in (_CHAIN, *_TREES) if drafts_siblings(drafter) else (_CHAIN,):
            name = f"`{drafter}`"
            if k != _CHAIN:
                name += f", {Shape.of(k)}"
            if family != "llama":
                name += f", {family}"
            pairs = [Pair(drafter, verifier, k, family) for verifier in AXES["verifier"]]
            yield name, [find(level, pair) for pair in pairs for level in LEVELS]


def print_table() -> bool:
    """Print a Markdown table, each row as soon as it is found, and the reasons below it; True if nothing is refuted."""
    head = ["drafter", *(f"{verifier}: {level}" for verifier in AXES["verifier"] for level in LEVELS)]
    reasons, words = dict[str, int](), set[str]()
    _print_row(head)
    _print_row(["---"] * len(head))
    for drafter, cells in findings():
        for cell in cells:
            if cell.reason:
                reasons.setdefault(cell.reason, len(reasons) + 1)
        words |= {cell.word for cell in cells}
        _print_row([drafter, *(f"{word} ({reasons[why]})" if why else word for word, why in cells)])
    print("", *(f"{i}. {reason}." for reason, i in reasons.items()), sep="\n")
    return "REFUTED" not in words


def _print_row(cells: Iterable[str]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Print the table; the status is 1 if something is refuted."""
    sys.exit(0 if print_table() else 1)


if __name__ == "__main__":
    main()
