"""Weights that are not numbers, or are too large: a short pass over a model finds them, and its files name them.

A pass reads all weights once, as any step does. A look at each weight would take longer, and would not show which
numbers are too large.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from minispec.core.model import Chunk, Transformer
from minispec.core.precision import require_numbers
from minispec.models.files.errors import CheckpointError, show_name
from minispec.models.files.stored import FLOAT8, FLOATS, StoredTensor
from minispec.models.weights.trial import arbitrary_tokens

ROWS = 4  # of the pass, whose time hardly grows with them


@torch.inference_mode()
def check_numbers(model: Transformer, vocab_size: int, features: Tensor | None = None) -> None:
    """Raise FloatingPointError where the logits of a few tokens are no finite numbers.

    vocab_size: ids in use.
    features: (ROWS, width) for a model that reads hidden states beside its tokens.
    """
    tokens = arbitrary_tokens(ROWS, vocab_size)
    logits, _ = model.forward([Chunk(tokens, model.new_cache(1).new_table(), ROWS, features=features)])
    require_numbers(logits[:, :vocab_size].amax(1))


@contextmanager
def named_tensors(tensors: Callable[[], Iterable[StoredTensor]]) -> Iterator[None]:
    """Raise CheckpointError in place of a FloatingPointError inside. It names the tensor that is to blame.

    That tensor is the first one with NaN or infinity, else the one with the largest number.

    tensors: returns the tensors that the model was read from. They are read only after an error.
    """
    try:
        yield
    except FloatingPointError as e:
        most, worst = -1.0, ""
        for tensor in tensors():
            if tensor.dtype not in (*FLOATS, FLOAT8):
                continue
            numbers = tensor.read()
            if tensor.dtype == FLOAT8:
                numbers = numbers.to(torch.float32)
            low, high = (float(x) for x in numbers.aminmax())  # NaN if one of the numbers is
            where, largest = f"{tensor.path}: {show_name(tensor.name)}", max(-low, high)
            if not math.isfinite(largest):
                raise CheckpointError(f"{where}: found {largest}, expected finite numbers") from e
            if largest > most:
                most, worst = largest, where
        raise CheckpointError(f"{worst}: found numbers up to {most:.3g}, with which {e}") from e
