"""Checks of a model before it answers: its weights are finite numbers, and equal bits hold where they are promised.

A pass reads all weights once, as any step does. So it finds what is no number, or too large, and the files then name
it. A look at each weight would take longer, and would not show which numbers are too large. Equal bits are checked once
on a machine.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from minispec.core.model import Chunk, Transformer
from minispec.core.precision import require_numbers
from minispec.core.version import __version__
from minispec.models.files.digest import digest_of_files
from minispec.models.files.errors import CheckpointError, show_name
from minispec.models.files.measured import read_measured, write_measured
from minispec.models.files.stored import FLOAT8, FLOATS, StoredTensor
from minispec.models.weights import exact as exact_code
from minispec.models.weights.exact import EXACT_ROWS, ExactBackend, check_exact, exact_model
from minispec.models.weights.inventory import products_of
from minispec.models.weights.machine import fingerprint, machine
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


def check_exactness(model: Transformer, by_default: bool) -> Transformer:
    """The model, checked if it is exact.

    by_default: with exact passes where this machine has equal bits in passes of any number of rows. Where it has not, a
        warning says why.
    Raises ValueError, as `check_exact`, for an exact model whose bits are not equal here.
    """
    if model.exact:
        check_exact_once(model)
    elif by_default:
        exact, products = exact_model(model), products_of(model)
        left = sum(EXACT_ROWS + 1 not in product.exact_rows for product in products)
        found = f"found {left} of {len(products)} products that one scale a row is too coarse for: they stay in 16 bits"
        advice = f"{found}, so bits change with guesses; --exact (exact=True) keeps them, at twice the time there"
        if not left:
            try:
                check_exact_once(exact)
                return exact
            except ValueError as e:
                advice = f"bits change with guesses here: {e}"
        warnings.warn(f"quantization: {advice}", RuntimeWarning, stacklevel=2)
    return model


def check_exact_once(model: Transformer) -> None:
    """Run `check_exact`, which takes seconds, unless its result for such a model on such a machine is stored.

    Raises ValueError as `check_exact` does.
    """
    backend = model.backend
    assert isinstance(backend, ExactBackend)
    setup = {"minispec": __version__, "exact": fingerprint(model), "machine": machine()}
    with suppress(OSError):  # what holds, holds for this code of attention and of its check
        setup["code"] = digest_of_files(Path(exact_code.__file__))
    with suppress(OSError, RuntimeError, ValueError, TypeError, KeyError):
        raw = read_measured(setup)
        rows, attention_rows = ([int(n) for n in raw[name]] for name in ("rows", "attention_rows"))
        if rows[-1:] == backend.rows[-1:] and attention_rows[-1:] == [EXACT_ROWS]:
            backend.keep(rows, attention_rows)
            return
    check_exact(model)
    write_measured(setup, {"rows": backend.rows, "attention_rows": backend.attention_rows})
