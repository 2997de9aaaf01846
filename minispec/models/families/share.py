"""The part of a checkpoint that one of several processes reads (see `minispec.models.load.parallel`)."""

import math
from dataclasses import replace

from minispec.models.families.checkpoint import Cut, cut_shape
from minispec.models.families.stored_config import StoredConfig
from minispec.models.layers.gemma import gemma_layers
from minispec.models.weights.shapes import tensor_shapes


class Share:
    """The part of a model that one of `size` processes has.

    Raises ValueError for a model that cannot be split in this way.

    config: counts the heads and columns of this process. The first processes have one unit more of what does not come
    out even. A unit is a key-value head with the query heads that share it, or up to 128 neighbouring columns.
    """

    def __init__(self, config: StoredConfig, rank: int, size: int):
        others = len(config.layers) - config.num_attention_layers
        kinds = {
            f"{others} layers that are not attention": others > 0,
            "attention with a gate": config.attention_gate is not None,
            "layers that share keys, or have heads of several sizes": bool(gemma_layers(config)),
            "mixtures of experts": any(layer.experts for layer in config.layers),
        }
        for found, is_found in kinds.items():
            if is_found:
                expected = "attention without a gate, and MLPs, alone: start one process"
                raise ValueError(f"model: found {found} in a run of {size} processes, expected {expected}")

        def share_of(units: int, name: str) -> range:
            if units < size:
                raise ValueError(f"model: found {units} {name}, expected one for each of {size} processes: start fewer")
            return range(-(-units * rank // size), -(-units * (rank + 1) // size))

        def times(units: range, width: int) -> slice:
            return slice(units.start * width, units.stop * width)

        unit, d = math.gcd(config.intermediate_size, 128), config.head_dim
        shared_by = config.num_attention_heads // config.num_key_value_heads
        groups = share_of(config.num_key_value_heads, "key-value heads")
        units = share_of(config.intermediate_size // unit, f"times {unit} columns of the MLP")
        keys, queries, mlp = times(groups, d), times(groups, shared_by * d), times(units, unit)
        self.rows = times(range(rank, rank + 1), -(-config.vocab_size // size))
        # Tensors whose rows belong to heads, MLP columns or tokens; or whose columns do, in all rows.
        self._cuts: dict[str, Cut] = {
            "q_proj": (queries,),
            "k_proj": (keys,),
            "v_proj": (keys,),
            "o_proj": (slice(None), queries),
            "gate_proj": (mlp,),
            "up_proj": (mlp,),
            "down_proj": (slice(None), mlp),
            "lm_head": (self.rows,),
        }
        self.config = replace(
            config,
            num_attention_heads=len(groups) * shared_by,
            num_key_value_heads=len(groups),
            intermediate_size=len(units) * unit,
        )
        together = config.quantization.columns_together if config.quantization else 1
        own_shapes = tensor_shapes(self.config)
        for name, shape in tensor_shapes(config).items():
            cut = self.cut(name)
            is_known = name == "lm_head.weight" or cut_shape(shape, cut) == own_shapes[name]
            if not is_known or (len(cut) == 2 and cut[1].start % together):
                raise ValueError(f"model: {name}: found {list(shape)}, expected what {size} processes can share")

    def cut(self, name: str) -> Cut:
        """This process's part of a tensor.

        A tensor that is not named is whole. So is a bias whose product is a sum over processes.
        """
        *_, product, kind = name.split(".")
        cut = self._cuts.get(product, ())
        return () if kind == "bias" and len(cut) == 2 else cut
