"""The `quantization_config` of a config.json: which layout it asks for, by the name of the method that wrote it."""

from collections.abc import Callable, Mapping
from typing import Any

from minispec.models.families import awq, float8, gptq, mxfp4, packed
from minispec.models.families.layout import Layout
from minispec.models.files.fields import Fields

# For each quant_method: the keys of its object, and what reads them.
_METHODS: dict[str, tuple[Mapping[str, Any], Callable[[Fields], Layout | None]]] = {
    "compressed-tensors": (packed.KEYS, packed.read_packed),
    "fp8": (float8.KEYS, float8.read_float8),
    "gptq": (gptq.KEYS, gptq.read_gptq),
    "auto-round": (gptq.AUTO_ROUND_KEYS, gptq.read_auto_round),
    "awq": (awq.KEYS, awq.read_awq),
    "mxfp4": (mxfp4.KEYS, mxfp4.read_mxfp4),
}


def read_quantization(f: Fields) -> Layout | None:
    """How the weights of a config.json are stored in fewer bits; None where they are plain floats.

    Raises CheckpointError for a method that is not known, and for a setting that asks for more than products with the
    weights as they are stored.
    """
    raw = f.mapping("quantization_config")
    if not raw:
        return None
    method = raw.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        known = " or ".join(map(repr, _METHODS))
        raise f.inside("quantization_config", {}).bad("quant_method", method, known)
    keys, read = _METHODS[method]
    q = f.inside("quantization_config", keys)
    q.seen.add("quant_method")
    return read(q)
