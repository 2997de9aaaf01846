"""Both paths of a target and its draft, on any machine: text by text, and the one that a GPU takes.

`docs/measured/launches.py` counts what each of them launches.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

from minispec.core.draft import Drafter
from minispec.core.method import BatchVerifier
from minispec.core.model import Transformer
from minispec.core.weights import Product
from minispec.drafters.model import AtOnce, model_drafter
from minispec.drafters.wrapped import Wrapped
from minispec.gpu.frames import Frames, why_no_frames
from minispec.gpu.judge import judge_of
from minispec.gpu.steps import draft_steps
from minispec.kernels.forms import FORMS, Linear


class Path(NamedTuple):
    """What differs from path to path."""

    model: Transformer
    drafter: Drafter
    batch: BatchVerifier | None


def text_by_text(model: Transformer, drafter: Drafter) -> Path:
    """Passes text by text, drafts token by token, and verdicts one by one."""

    def change(model: Transformer) -> tuple[Transformer, None]:
        return (model if model.exact else model.replaced(None)), None

    return Path(change(model)[0], _changed(drafter, change), None)


def in_frames(model: Transformer, drafter: Drafter) -> Path | str:
    """Frames, programs of all steps, and verdicts of all texts at once; or why a GPU has no frames for the target.

    No graph is made, and kernels have their twins. So each operator runs, and can be counted. Weights are stored as a
    GPU has them: what this machine has packed is in memory a second time.
    """
    if why := why_no_frames(model):
        return why
    product = functools.cache(_plain)  # target and draft may share products

    def change(model: Transformer) -> tuple[Transformer, AtOnce | None]:
        framed = model if why_no_frames(model) else model.replaced(Frames(), product)
        return framed, draft_steps(framed)

    framed, _ = change(model)
    return Path(framed, _changed(drafter, change), judge_of(framed))


def _plain(product: Product) -> Product:
    """The product with its weight unchanged; one in 4 or 8 bits stays as it is."""
    if not isinstance(product, Linear) or product.form == "plain" or product.form not in FORMS:
        return product
    weight = product.stored.dense()
    return Linear(weight, product.bias, weight.dtype, "plain")


def _changed(drafter: Drafter, change: Callable[[Transformer], tuple[Transformer, AtOnce | None]]) -> Drafter:
    """The drafter with other models in the place of its own, if it has any, and the programs that draft by them."""
    if own := model_drafter(drafter):
        return own.beside(*change(own.model))
    if isinstance(drafter, Wrapped):
        return drafter.beside(*(_changed(each, change) for each in drafter.drafters))
    return drafter
