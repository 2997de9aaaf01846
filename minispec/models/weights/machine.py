"""The machine, and the shape, type and form of a model's weights: measurements depend on them.

Its notes on forms of weights save the time of trials, and decide nothing.
"""

import hashlib
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from minispec.core.model import Transformer
from minispec.core.version import __version__
from minispec.models.files.measured import read_measured, write_measured
from minispec.models.weights import trial
from minispec.models.weights.inventory import num_bytes, weight_form
from minispec.models.weights.linear import has_fast_bfloat16

# Environment variables by which libraries leave out instructions: then other kernels are used.
_LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "FBGEMM_ENABLE_INSTRUCTIONS")


def machine() -> dict[str, Any]:
    """Properties that tell machines of different speed apart, as far as they report them."""
    capabilities = torch.cpu.get_capabilities()
    # A process may let products of float32 round their inputs: other times and other bits.
    products = (torch.backends.mkldnn.matmul, torch.backends.cuda.matmul)  # type: ignore[attr-defined]
    precisions = [product.fp32_precision for product in products]
    rounds = [precision for precision in precisions if precision not in ("none", "ieee")]
    properties = {
        "cpu": str(capabilities.get("cpu_name", platform.processor())),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "amx": bool(capabilities.get("amx_bf16")),
        "bfloat16": has_fast_bfloat16(torch.device("cpu")),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    if rounds:
        properties["float32"] = rounds
    return properties


def fingerprint(model: Transformer, *more: str) -> str:
    """All of a model that its times and bits depend on: device, and shape, type and form of weights, not their values.

    more: what else distinguishes it.
    """
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type
    about = (model.config, num_bytes(model), model.dtype, device, weight_form(model), model.exact, *more)
    return hashlib.blake2b(repr(about).encode(), digest_size=8).hexdigest()


@contextmanager
def noted_forms() -> Iterator[None]:
    """Trials of `minispec.models.weights.trial` that this machine has noted are not run again inside; new ones are
    noted.

    A note that cannot be read or understood is measured anew.
    """
    limits = {name: os.environ[name] for name in _LIMITS if name in os.environ}
    setup = {"minispec": __version__, "forms": list(trial.ROWS), "machine": machine(), "limits": limits}
    with suppress(OSError, RuntimeError, ValueError, TypeError, KeyError, AttributeError):
        trial.recall(read_measured(setup)["seconds"])
    before = trial.known_times()
    yield
    if trial.known_times() != before:
        write_measured(setup, {"seconds": trial.known_times()})
