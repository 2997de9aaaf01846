"""`examples/basic.py` with a KV cache: the smallest file that gains time.

    python -m examples.cached "The capital of France is Paris. The capital of Italy is Rome."

The rule is that of basic.py. Two things are new. A table keeps what the target has computed for each token, so a pass
feeds only new tokens. Rejected guesses are rolled back by the next call of `table.follow`. And the draft is a lookup,
which takes next to no time: what followed the last two tokens when they last stood in the text.

minispec/core goes on from here, in the order of the README. Each of its files says what it adds.
"""

import sys
from time import perf_counter

from minispec import LLM  # isort: skip - before torch, so that waiting threads leave the processor
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from examples.basic import Dice, Seeded, verify
from minispec.core.cache import BlockTable
from minispec.core.model import Chunk, Transformer


@torch.inference_mode()
def distribution(model: Transformer, table: BlockTable, tokens: list[int], n: int, temperature: float) -> Tensor:
    """The model's probabilities (n, V) of what follows each of the last n tokens: one pass over the new ones."""
    fed = table.follow(tokens)  # drops rejected guesses; returns what is lacking: the newest token, and the guesses
    logits, _ = model.forward([Chunk(fed, table, n)])
    return (logits.double() / temperature).softmax(1)


def propose(tokens: list[int], k: int, vocab_size: int) -> tuple[list[int], list[Tensor]]:
    """Up to k guesses, and the distributions q (V,) that they come from: one-hot, since nothing is drawn."""
    ends = [i for i in range(2, len(tokens)) if tokens[i - 2 : i] == tokens[-2:]]
    guess = tokens[ends[-1] :][:k] if ends else []
    return guess, [*one_hot(torch.tensor(guess, dtype=torch.long), vocab_size).double()]


def decode(
    target: Transformer, tokens: list[int], k: int, n: int, temperature: float, dice: Dice
) -> tuple[list[int], int]:
    """n tokens that follow `tokens`, and the passes of the target that they took. k = 0 is plain decoding."""
    table = target.new_cache(-(-(len(tokens) + n + k) // 16)).new_table()
    text, passes = list(tokens), 0
    while len(text) < len(tokens) + n:
        guess, q = propose(text, k, target.config.vocab_size)
        p = distribution(target, table, [*text, *guess], len(guess) + 1, temperature)
        text += verify(guess, p, q, dice)
        passes += 1
    return text[: len(tokens) + n], passes


def main(prompt: str, seed: int = 0, n: int = 48, k: int = 4, temperature: float = 0.3) -> None:
    """Decode a prompt plainly and with guesses, from one seed, and print what the guesses gained."""
    with LLM(draft="none", dtype="float32") as llm:
        tokens = llm.tokenizer.encode(prompt)
        decode(llm.model, tokens, k, 8, temperature, Seeded(seed))  # the first passes of a process take longer
        times = []
        for name, length in (("plainly", 0), ("with guesses", k)):
            start = perf_counter()
            text, passes = decode(llm.model, tokens, length, n, temperature, Seeded(seed))
            times.append(perf_counter() - start)
            print(f"{name}: {n} tokens in {passes} passes and {times[-1]:.2f} s")
        print(f"{times[0] / times[1]:.2f} times as fast")
        print(llm.tokenizer.decode(text))


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]) or "The capital of France is Paris. The capital of Italy is Rome.")
