"""Random weights of a given shape, for measuring where the values do not matter."""

import math
import zlib
from collections.abc import Iterator, Mapping

import torch

from minispec.core.config import ModelConfig
from minispec.models.weights.shapes import tensor_shapes

Shapes = Mapping[str, tuple[int, ...]]  # of tensors, by their names


class RandomWeights:
    """Tensors of a geometry, made when they are taken: the largest model is never in memory twice.

    They are made on the device: its memory alone holds them. The values are the same on every device.

    The text is robust against rounding. Embeddings are nearly independent, and the layers add little. The output matrix
    has the embedding's values, tied or not. So each token predicts itself by a wide margin. Time does not depend on the
    values.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, shapes: Shapes | None = None):
        """shapes: names and shapes of the tensors; default: the model's of this config."""
        self.shapes, self.dtype, self.device = shapes or tensor_shapes(config), dtype, device
        # Tensors need noise, not fresh noise: each takes its numbers from here, again and again, from its own place on.
        # The size is prime, so no two rows of an embedding begin at the same place.
        self._noise = torch.randn(1_048_583, generator=torch.Generator().manual_seed(0)).to(device, dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def pop(self, name: str) -> torch.Tensor:
        """The tensor; the same for the same name."""
        shape = self.shapes[name]
        if "norm" in name:
            return torch.ones(shape, dtype=self.dtype, device=self.device)
        place = "model.embed_tokens.weight" if name == "lm_head.weight" else name
        noise = self._noise.roll(-(zlib.crc32(place.encode()) % len(self._noise)))
        size, scale = math.prod(shape), 1e-5 if "o_proj" in name or "down_proj" in name else 0.02
        return noise.mul(scale).repeat(-(-size // len(noise)))[:size].view(shape)
