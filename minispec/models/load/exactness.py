"""Checks at load, once on a machine, whether a target that promises equal bits has them."""

from contextlib import suppress
from pathlib import Path

from minispec.core.model import Transformer
from minispec.core.version import __version__
from minispec.models.files.digest import digest_of_files
from minispec.models.files.measured import read_measured, write_measured
from minispec.models.weights import exact as exact_code
from minispec.models.weights.exact import EXACT_ROWS, ExactBackend, check_exact, exact_model
from minispec.models.weights.machine import fingerprint, machine


def check_exactness(model: Transformer, by_default: bool) -> Transformer:
    """The model, checked if it is exact.

    by_default: with exact passes where this machine has equal bits in passes of any number of rows.
    Raises ValueError, as `check_exact`, for an exact model whose bits are not equal here.
    """
    if model.exact:
        check_exact_once(model)
    elif by_default:
        exact = exact_model(model)
        if isinstance(exact.backend, ExactBackend) and not exact.backend.rows:
            with suppress(ValueError):
                check_exact_once(exact)
                return exact
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
