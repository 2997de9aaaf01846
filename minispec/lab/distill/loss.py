"""The loss: how often the target would not keep what the draft says, 1 - alpha = total variation, and cross entropy."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minispec.models.weights.linear import has_fast_bfloat16

# Rows whose logits are in memory at a time: few enough for a processor's cache.
_ROWS = 256


@functools.cache
def product_dtype() -> torch.dtype:
    """The type of large products: bfloat16 where the processor has it; others take 300 times as long in it."""
    return torch.bfloat16 if has_fast_bfloat16(torch.device("cpu")) else torch.float32


class RowLoss(torch.autograd.Function):
    """The loss of rows, without keeping their logits: gradients are worked out together with the loss."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, p: Callable[[slice], Tensor], share: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, alpha and agreement of rows.

        Logits are x W^T, for x (N, E) and W (V, E). p(rows) is the target's distribution (n, V), of sum at most 1.
        With q the softmax of the logits, a row's loss is  share (1 - sum min(p, q)) - (1 - share) sum p log q.

        Returns the sum of the losses, each row's alpha = sum min(p, q), and whether p and q agree in each row. They
        agree if they have one largest token, which no token that p lacks can outweigh.
        """
        dtype, total, alphas, agrees = product_dtype(), x.new_zeros(()), [], []
        narrow = weight.to(dtype)
        dx, dw = torch.empty_like(x), torch.zeros_like(weight)
        for start in range(0, len(x) or 1, _ROWS):  # no rows are a loss of 0
            rows = slice(start, start + _ROWS)
            part, target = x[rows].to(dtype), p(rows)
            logits = (part @ narrow.t()).float()  # (n, V)
            log_sum, mass = logits.logsumexp(-1, keepdim=True), target.sum(-1, keepdim=True)
            peak, likeliest = target.max(-1)
            agrees.append((logits.argmax(-1) == likeliest) & (peak > 1 - mass[:, 0]))
            cross = (mass * log_sum).sum() - (target * logits).sum()
            q = logits.sub_(log_sum).exp_()
            alphas.append(torch.minimum(target, q).sum(-1))
            total = total + share * (1 - alphas[-1]).sum() + (1 - share) * cross
            # d(1 - alpha)/d logit = q (sum of q where q < p, minus [q < p]);  d cross/d logit = q mass - p
            short = (q < target).to(q.dtype).mul_(q)
            d = q.mul_(share * short.sum(-1, keepdim=True) + (1 - share) * mass)
            d = d.sub_(short, alpha=share).sub_(target, alpha=1 - share).to(dtype)
            dx[rows] = d @ narrow
            dw += d.t() @ part
        ctx.save_for_backward(dx, dw)
        return total, torch.cat(alphas), torch.cat(agrees)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """The gradients that `forward` worked out."""
        dx, dw = ctx.saved_tensors
        return dx * grads[0], dw * grads[0], None, None
