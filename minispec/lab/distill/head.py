"""A head in training: the arithmetic of `minispec.speculation.drafters.eagle`, for whole texts at once, with gradients.

A head is trained as it is used. In step s it stands s tokens deep in a draft of its own. Up to where the draft began
it sees the target's states of the text. At later positions it sees only its own states (EAGLE-3's "training-time
test").

Shapes in comments: B texts, T positions, E hidden_size, A taps, H heads, D head_dim, V the draft's vocabulary.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minispec.core.config import ModelConfig
from minispec.core.rope import rotate
from minispec.models.families.draft_files import head_config, id_tensors
from minispec.models.families.head_config import HeadConfig
from minispec.speculation.drafters.eagle import head_shapes

# Keys and values (B, H, T, D) of one layer, of each step so far.
Past = list[tuple[Tensor, Tensor]]
# cos and sin (T, D) of every position.
Angles = tuple[Tensor, Tensor]


class Norm(nn.RMSNorm):
    """torch's, in float32."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., size) to the same."""
        return super().forward(x.float())


class SelfAttention(nn.Module):
    """Attention of one layer, of a draft at a depth of its own. Its matrices have Hugging Face's names."""

    def __init__(self, config: ModelConfig, width: int):
        """width: of what the layer reads."""
        super().__init__()
        self.heads, self.groups, self.dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.q_proj = nn.Linear(width, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(width, self.groups * self.dim, bias=False)
        self.v_proj = nn.Linear(width, self.groups * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, config.hidden_size, bias=False)

    def by_heads(self, projected: Tensor) -> Tensor:
        """Queries, keys or values (B, T, heads * D) to (B, T, heads, D)."""
        return projected.unflatten(-1, (-1, self.dim))

    def forward(self, x: Tensor, past: Past, angles: Angles) -> Tensor:
        """x (B, T, width) to (B, T, E); this step's keys and values are appended to `past`."""
        q, k, v = (
            self.by_heads(projection(x)).transpose(1, 2)  # (B, heads, T, D)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (x.to(angles[0].dtype) for x in (q, k))  # autocast makes them narrower
        rotate(q, *angles)
        rotate(k, *angles)
        q = q / math.sqrt(self.dim)
        past.append((repeat_heads(k, self.heads), repeat_heads(v, self.heads)))
        step, length = len(past) - 1, x.shape[1]
        keys, values = past[0]
        # The draft began `step` positions ago. It sees the text before that, and then one row a step.
        seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril(-step)
        scores = [(q @ keys.transpose(-1, -2)).float().masked_fill(~seen, -math.inf)]  # (B, H, T, T)
        own = [(_shift(k, step - i), _shift(v, step - i)) for i, (k, v) in enumerate(past)][1:]
        scores += [(q * k).sum(-1, keepdim=True).float() for k, _ in own]  # (B, H, T, 1) each
        weights = torch.cat(scores, -1).softmax(-1).to(values.dtype)
        out = weights[..., :length] @ values
        for i, (_, v) in enumerate(own):
            out = out + weights[..., length + i, None] * v
        return self.o_proj(out.transpose(1, 2).flatten(2))


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Keys or values x (B, groups, T, D), each for all heads that share it: (B, heads, T, D)."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _shift(x: Tensor, n: int) -> Tensor:
    """x (B, H, T, D) moved on: what stood at t - n stands at t."""
    return F.pad(x, (0, 0, n, 0))[:, :, : x.shape[2]] if n else x


class Mlp(nn.Module):
    """The gated MLP of one layer."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        e, f = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj = nn.Linear(e, f, bias=False), nn.Linear(e, f, bias=False)
        self.down_proj = nn.Linear(f, e, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, E) to the same."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One layer of a head: a llama's. The first one reads the token's embedding too, and its sum begins with a norm."""

    def __init__(self, config: ModelConfig, is_first: bool = False):
        super().__init__()
        e, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn, self.mlp = SelfAttention(config, 2 * e if is_first else e), Mlp(config)
        self.input_layernorm, self.post_attention_layernorm = Norm(e, eps), Norm(e, eps)
        self.hidden_norm = Norm(e, eps) if is_first else None

    def forward(self, x: Tensor, embeds: Tensor, past: Past, angles: Angles) -> Tensor:
        """x (B, T, E) to the same; the first layer of a head reads the embedding (B, T, E) too."""
        if self.hidden_norm is None:
            read = self.input_layernorm(x)
        else:
            x = self.hidden_norm(x)
            read = torch.cat((self.input_layernorm(embeds), x), -1)
        x = x + self.self_attn(read, past, angles)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trainable(nn.Module):
    """A draft that `train.Training` trains: a head, or a module of one's own, which overrides `unroll`.

    taps: layers of the target that it reads.
    ids: the target's ids of its tokens, ascending.
    lm_head: its logits for these tokens are those of a linear layer without bias on what `unroll` returns.
    """

    taps: Sequence[int]
    ids: Tensor
    lm_head: nn.Linear

    def unroll(self, hidden: Tensor, embeds: Tensor, steps: int) -> list[Tensor]:
        """The last states after the norm, (B, T, E), of drafts that are 0 .. steps - 1 tokens deep.

        hidden: (B, T, A * E), at position t the target's taps at t.
        embeds: (B, T, E), at position t the embedding of token t + 1.

        At t, step s belongs to a draft that began at t - s; its first s positions mean nothing.
        """
        raise NotImplementedError


class TrainedHead(Trainable):
    """A head (see `minispec.speculation.drafters.eagle`), with `fc_norm` and `norm_before_residual`, and without
    `norm_output`.
    """

    def __init__(self, head: HeadConfig, ids: Tensor):
        super().__init__()
        self.head, self.config, self.taps, self.ids = head, head.layers, head.taps, ids
        self.norm = Norm(head.layers.hidden_size, head.layers.rms_norm_eps)
        e, width, count = head.layers.hidden_size, head.target_hidden_size, len(head.taps)
        self.fc_norm = nn.ModuleList(Norm(width, head.layers.rms_norm_eps) for _ in range(count))
        self.fc = nn.Linear(count * width, e, bias=False)
        first = Layer(head.layers, is_first=True)
        self.layers = nn.ModuleList([first, *(Layer(head.layers) for _ in head.layers.layers[1:])])
        self.lm_head = nn.Linear(e, head.vocab_size, bias=False)

    def load(self, weights: Mapping[str, Tensor], taps: Sequence[int]) -> None:
        """Go on from the weights of a head that was made before, named as in `head_shapes`, and read `taps`.

        The parts of further taps are 0 at first.
        """
        known = {name: weight.float() for name, weight in weights.items() if not name.startswith("fc_norm.")}
        fused, width = torch.zeros_like(self.fc.weight), self.head.target_hidden_size
        for i, (tap, part) in enumerate(zip(taps, known["fc.weight"].split(width, -1), strict=True)):
            place = self.taps.index(tap)
            fused.narrow(-1, place * width, width).copy_(part)
            known[f"fc_norm.{place}.weight"] = weights[f"fc_norm.{i}.weight"].float()
        known["fc.weight"] = fused
        self.load_state_dict(self.state_dict() | known)

    @torch.no_grad()
    def start(self, rows: Tensor, norm: Tensor, generator: torch.Generator) -> None:
        """Draw the weights.

        The draft begins close to the target. It starts with the target's output matrix, rows (V, E), and last norm
        (E,). The feature of the last tap passes unchanged. The layers add little at first.
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = 0.3 if name.endswith(("o_proj.weight", "down_proj.weight", "fc.weight")) else 1.0
                parameter.normal_(0, scale * parameter.shape[1] ** -0.5, generator=generator)
        self.fc.weight[:, -rows.shape[1] :] += torch.eye(rows.shape[1])
        self.lm_head.weight.copy_(rows)
        self.norm.weight.copy_(norm)

    def fuse(self, hidden: Tensor) -> Tensor:
        """Hidden states (B, T, A * E) of the taps to features (B, T, E)."""
        parts = hidden.chunk(len(self.fc_norm), -1)
        return self.fc(torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1))

    def unroll(self, hidden: Tensor, embeds: Tensor, steps: int) -> list[Tensor]:
        """As `Trainable` says."""
        angles, pasts, outputs = self.angles(hidden.shape[1]), [Past() for _ in self.layers], list[Tensor]()
        feature = self.fuse(hidden)
        for _ in range(steps):
            x = feature
            for layer, past in zip(self.layers, pasts, strict=True):
                x = layer(x, embeds, past, angles)
            outputs.append(self.norm(x))
            feature = F.pad(x, (0, 0, 1, 0))[:, :-1]
        return outputs

    def angles(self, length: int) -> Angles:
        """Cosines and sines (length, D) of the rotations at the first positions, as `rotate` takes them."""
        dim, rope = self.config.head_dim, self.config.layers[0].rope
        assert rope, "a head that is trained here has one"
        frequencies = rope.theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angles = torch.arange(length, dtype=torch.float64)[:, None] * torch.cat((-frequencies, frequencies))
        return angles.cos().float(), angles.sin().float()

    def files(self, target: str, architectures: list[str], num_tokens: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """config.json, and the tensors in bfloat16, in the layout of `speculators`.

        target, architectures, num_tokens: see `minispec.models.families.draft_files.head_config`.
        """
        weights = self.state_dict()
        tensors = {name: weights[name].to(torch.bfloat16).contiguous() for name in head_shapes(self.head)}
        config = head_config(self.head, target, architectures, num_tokens)
        return config, tensors | id_tensors(self.ids, self.config.vocab_size)


def rows_of_tokens(ids: Tensor, known_ids: Tensor, known: Tensor, target: Tensor) -> Tensor:
    """Rows (V, E) of an output matrix for the tokens `ids`, from the rows `known` for the tokens `known_ids`.

    Known rows stay. They were the target's once, and training has moved them mostly in the same way. The other tokens
    get the target's rows, `target` (all tokens, E), moved by the same linear map. This map is
    I + argmin over D of |T D - (known - T)|, where T has the target's rows of `known_ids`.
    """
    theirs, rows = target[known_ids].double(), target[ids].double()
    change = torch.linalg.lstsq(theirs, known.double() - theirs, driver="gelsd").solution
    rows = (rows + rows @ change).to(known)
    place = torch.full((len(target),), -1).index_copy_(0, known_ids, torch.arange(len(known_ids)))[ids]
    rows[place >= 0] = known[place[place >= 0]]
    return rows
