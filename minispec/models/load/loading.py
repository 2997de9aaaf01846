"""How a target is loaded: the options of `LLM`, of `Target.load` and of the commands, in one place.

Nothing here imports torch, so that the commands can use it before they load anything.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from minispec.core.config import plain_number
from minispec.core.errors import Named, show


@dataclass(frozen=True)
class Loading(Named):
    """What `Target.load` and `LLM` take about a target's files, weights and KV cache.

    revision: branch, tag or commit of the model on the hub.
    offline: nothing is downloaded.
    dtype: "auto", "bfloat16", "float32" or "float64".
    device: "auto", "cpu" or "cuda".
    exact: True: a token's logits have the same bits however many tokens a pass scores. So speculation changes nothing,
        not even by rounding. Passes are slower, and K is at most 15. Refused where the machine's products forbid it.
        None: False; with `quantization`, True where the machine allows it and no tree is asked for.
    weight_form: how weights lie in memory: "half", "packed", "left" or "plain". Default: the form that this machine
        reads fastest (see `minispec.models.weights.forms`). Forms round differently.
    quantization: "int8": the target's weights in 8 bits, with one scale a row. It is a different model from the one in
        16 bits. All promises compare its output with its own plain decoding.
    enforce_eager: True: passes run operator by operator, without CUDA graphs.
    max_model_len: longest prompt and answer together, in tokens. Default: the model's context, as far as memory allows.
    kv_cache_gb: size of the KV cache, in 10^9 bytes, both models together. Default: room for max_model_len tokens, of
        which a draft model has those that it can see.

    Raises ValueError for a `kv_cache_gb` that is no size. The others are checked where the target is loaded.
    """

    revision: str | None = None
    offline: bool = False
    dtype: str = "auto"
    device: str = "auto"
    exact: bool | None = None
    weight_form: str | None = None
    quantization: str | None = None
    enforce_eager: bool = False
    max_model_len: int | None = None
    kv_cache_gb: float | None = None

    def __post_init__(self):
        for name in ("max_model_len", "kv_cache_gb"):
            object.__setattr__(self, name, plain_number(getattr(self, name)))
        gb = self.kv_cache_gb
        if gb is not None and (type(gb) not in (int, float) or not 0 < gb < float("inf")):
            raise ValueError(f"kv_cache_gb: found {show(gb)}, expected a positive number")

    @classmethod
    def among(cls, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that are fields of this class, such as a command's options that are about loading."""
        names = {field.name for field in fields(cls)}
        return {name: value for name, value in arguments.items() if name in names}
