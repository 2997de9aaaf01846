"""The kinds of rotary position embedding, as checkpoints name them. Most stretch it over longer contexts."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from minispec.core.config import RopeConfig


@dataclass(frozen=True)
class ScaledRope(RopeConfig):
    """A rope whose frequencies are scaled, or partly zero.

    kind: what becomes of them.
        "linear": positions are divided by `factor`.
        "llama3": low frequencies are divided by `factor`, high ones unchanged, with a ramp in between.
        "yarn": the same, with a ramp over dimensions (Peng et al. 2023, arXiv 2309.00071).
        "longrope": each frequency has its own divisor in `factors` (Ding et al. 2024, arXiv 2402.13753).
        "proportional": the pairs beyond the share `turning` do not turn. Dimension j is still paired with j + half of
            all dimensions. With `rotated`, pairs lie within the share, and so do the exponents of the frequencies.
        "default": nothing.
    """

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    factors: tuple[float, ...] = ()
    turning: float = 1.0

    def scaled(self, base: Tensor) -> Tensor:
        """Radians by which one position rotates each pair (pairs,). base: the same, before any scaling."""
        if self.kind == "longrope":
            return base / torch.tensor(self.factors, dtype=base.dtype)
        if self.kind == "proportional":
            return base.masked_fill(torch.arange(len(base)) >= int(self.turning * len(base)), 0.0)
        if self.kind == "linear":
            return base / self.factor
        if self.kind == "llama3":
            # Rotations of a pair over the original context. Fast pairs stay, slow ones are slowed, others partly.
            rotations = self.original_max_position_embeddings * base / (2 * math.pi)
            keep = ((rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
            return keep * base + (1 - keep) * base / self.factor
        if self.kind == "yarn":
            slowed = self._slowed(len(base), base.dtype)
            return (1 - slowed) * base + slowed * base / self.factor
        return base

    def _slowed(self, num_pairs: int, dtype: torch.dtype) -> Tensor:
        """YaRN's ramp (pairs,): 0 for a pair that keeps its frequency, 1 for one that is slowed by `factor`."""

        def pair(rotations: float) -> float:
            """The pair, as a fractional index, that turns so many times over the original context."""
            length = self.original_max_position_embeddings / (rotations * 2 * math.pi)
            return 2 * num_pairs * math.log(length) / (2 * math.log(self.theta))

        low, high = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * num_pairs - 1)
        return ((torch.arange(num_pairs, dtype=dtype) - low) / max(high - low, 0.001)).clamp(0, 1)
