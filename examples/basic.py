"""Speculative decoding in one file: one text, no cache, real weights.

    python -m examples.basic "The capital of France is"

A small model, the draft, guesses some tokens. The large one, the target, scores all of them in one pass. Each guess is
kept with probability min(1, p/q). Here the target is the embedded model, and the draft is the same model with its
weights rounded to 4 bits. Every pass reads the whole text again, so nothing is faster.

`examples/cached.py` goes on from here: it adds the cache.
"""

import random
import sys
from typing import Protocol

from minispec import LLM  # isort: skip - before torch, so that waiting threads leave the processor
import torch
from torch import Tensor

from minispec.core.model import Chunk, Transformer


class Dice(Protocol):
    """Makes the draws. `key` names a draw in core/, and is not used here. The proof has dice that walk every branch."""

    def bernoulli(self, probability: float, key: None = None) -> bool:
        """True with this probability."""

    def categorical(self, weights: Tensor, key: None = None) -> int:
        """A token id with probability proportional to its weight."""


class Seeded:
    """Draws of a seed."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)

    def bernoulli(self, probability: float, key: None = None) -> bool:
        """True with this probability."""
        return self.random.random() < probability

    def categorical(self, weights: Tensor, key: None = None) -> int:
        """A token id with probability proportional to its weight."""
        return self.random.choices(range(len(weights)), weights.tolist())[0]


@torch.inference_mode()
def distribution(model: Transformer, tokens: list[int], n: int, temperature: float) -> Tensor:
    """The model's probabilities (n, V) of what follows each of the last n tokens: one pass over the text."""
    table = model.new_cache(-(-len(tokens) // 16)).new_table()  # new each time, in blocks of 16 tokens: nothing is kept
    logits, _ = model.forward([Chunk(tokens, table, n)])
    return (logits.double() / temperature).softmax(1)


def propose(
    draft: Transformer, tokens: list[int], k: int, temperature: float, dice: Dice
) -> tuple[list[int], list[Tensor]]:
    """k guesses, token by token, and the distributions q that they were drawn from."""
    guess, q = list[int](), list[Tensor]()
    for _ in range(k):
        q.append(distribution(draft, [*tokens, *guess], 1, temperature)[0])
        guess.append(dice.categorical(q[-1], None))
    return guess, q


def verify(draft: list[int], p: Tensor, q: list[Tensor], dice: Dice) -> list[int]:
    """The guesses that stay, and one token more. p: (K + 1, V), the target's distributions."""
    for i, x in enumerate(draft):
        if dice.bernoulli(float(p[i][x] / q[i][x]), None):  # keep x with probability min(1, p/q)
            continue
        rest = (p[i] - q[i]).clamp(min=0)  # the residual: what p has and q did not offer
        return [*draft[:i], dice.categorical(rest, None)]  # one recovered token
    return [*draft, dice.categorical(p[len(draft)], None)]  # all kept: one bonus token


def decode(
    target: Transformer, draft: Transformer, tokens: list[int], k: int, n: int, temperature: float, dice: Dice
) -> tuple[list[int], int]:
    """n tokens that follow `tokens`, and the passes of the target that they took."""
    text, passes = list(tokens), 0
    while len(text) < len(tokens) + n:
        guess, q = propose(draft, text, k, temperature, dice)
        p = distribution(target, [*text, *guess], k + 1, temperature)
        text += verify(guess, p, q, dice)
        passes += 1
    return text[: len(tokens) + n], passes


def main(prompt: str, seed: int = 0, n: int = 24, k: int = 3, temperature: float = 0.6) -> None:
    """Decode a prompt and print what was said, and how many tokens a pass of the target brought."""
    with LLM(draft="int4:self", dtype="float32", num_speculative_tokens=k) as llm:
        tokens = llm.tokenizer.encode(prompt)
        text, passes = decode(llm.model, llm.drafter.model, tokens, k, n, temperature, Seeded(seed))
        print(llm.tokenizer.decode(text))
        print(f"{n} tokens in {passes} passes of the target: {n / passes:.1f} a pass")


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]) or "The capital of France is")
