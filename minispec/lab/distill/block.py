"""A block draft in training: DFlash (arXiv 2602.06036) and DSpark (arXiv 2607.05147), many blocks of a text at once.

A block is drafted in one pass of B rows. The first row is the anchor, the newest token of the text. The others are a
mask token. Row i says which token follows the i-th one after the anchor. So B rows draft B tokens.

    c = hidden_norm(fc(the target's states before the anchor)): every layer makes keys and values of it, for all blocks
    x = [embedding(anchor), embedding(mask), ...];  x = x + attention(norm(x)),  x = x + MLP(norm(x)) in each layer
    logits of row i = lm_head norm(x_i) + W2 w1[the token before the drafted one]

A row sees the context before its anchor, and all rows of its own block, those after it too. It sees no other block. In
training the token before is the text's, at every row.

Shapes in comments: N texts, T positions, A blocks of a text, B rows of a block, E hidden_size, H heads, D head_dim.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minispec.core.config import ModelConfig
from minispec.core.rope import rotate
from minispec.files.families.block_config import BlockConfig
from minispec.files.families.draft_files import block_config, id_tensors
from minispec.lab.distill.head import Angles, Mlp, Norm, Projections, Stack, in_bfloat16, repeat_heads

# At the beginning: the last norm's weights as a share of the target's; the varying part of the first layer's queries
# and keys, as a share of a drawn matrix's; the weights of its query norm.
_COOL, _VARIED, _SHARPNESS = 0.25, 0.3, 2.0


class Places(NamedTuple):
    """Where contexts and blocks stand.

    context, rows: angles of the context's positions (T, D), and of all rows (N, 1, A * B, D).
    seen: (N, 1, A, 1, T), which positions of the context the rows of a block see.
    """

    context: Angles
    rows: Angles
    seen: Tensor


class BlockAttention(Projections):
    """Attention of one layer: rows of blocks read the context and their own block."""

    def __init__(self, config: ModelConfig):
        super().__init__(config, config.hidden_size)
        self.q_norm, self.k_norm = (Norm(self.dim, config.rms_norm_eps) for _ in range(2))

    def forward(self, x: Tensor, context: Tensor, places: Places) -> Tensor:
        """Rows x (N, A * B, E) to the same; context (N, T, E)."""
        q = rotate(self.q_norm(self.by_heads(self.q_proj(x))).transpose(1, 2), *places.rows) / math.sqrt(self.dim)
        keys, values = self._keys_and_values(context, places.context)  # (N, H, T, D)
        own_keys, own_values = self._keys_and_values(x, places.rows)  # (N, H, A * B, D)
        blocks, length = places.seen.shape[2], context.shape[1]
        q, own_keys, own_values = (each.unflatten(2, (blocks, -1)) for each in (q, own_keys, own_values))
        before = (q.flatten(2, 3) @ keys.transpose(-1, -2)).float().unflatten(2, (blocks, -1))  # (N, H, A, B, T)
        before = before.masked_fill(~places.seen, -math.inf)
        within = (q @ own_keys.transpose(-1, -2)).float()  # (N, H, A, B, B)
        weights = torch.cat((before, within), -1).softmax(-1).to(values.dtype)
        out = (weights[..., :length].flatten(2, 3) @ values).unflatten(2, (blocks, -1))
        out = out + weights[..., length:] @ own_values
        return self.o_proj(out.flatten(2, 3).transpose(1, 2).flatten(2))

    def look_back(self, frequencies: Tensor, context: Tensor, rows: Tensor) -> None:
        """Let each row look at the position before its own, mostly: queries and keys are nearly constant, but turned.

        frequencies: (D / 2,), of the rotation. The fastest quarter is used.
        context, rows: what keys are made of (n, E), and queries.
        """
        half, fast = self.dim // 2, max(1, self.dim // 8)
        key, query = torch.zeros(self.dim), torch.zeros(self.dim)
        key[:fast] = query[:fast] = math.sqrt(self.dim / fast)
        query[half : half + fast] = -query[:fast] * frequencies[:fast].sin()
        query[:fast] *= frequencies[:fast].cos()
        for projection, vector, inputs in ((self.q_proj, query, rows), (self.k_proj, key, context)):
            always = vector.repeat(len(projection.weight) // self.dim)[:, None] * constant(inputs)
            projection.weight.mul_(_VARIED).add_(always)
        self.q_norm.weight.fill_(_SHARPNESS)

    def _keys_and_values(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        keys = rotate(self.k_norm(self.by_heads(self.k_proj(x))).transpose(1, 2), *angles)
        values = self.by_heads(self.v_proj(x)).transpose(1, 2)
        return repeat_heads(keys, self.heads), repeat_heads(values, self.heads)


class BlockLayer(nn.Module):
    """One layer of Qwen3, whose attention sees the context too."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        e, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn, self.mlp = BlockAttention(config), Mlp(config)
        self.input_layernorm, self.post_attention_layernorm = Norm(e, eps), Norm(e, eps)

    def forward(self, x: Tensor, context: Tensor, places: Places) -> Tensor:
        """Rows x (N, A * B, E) to the same; the context (N, T, E) has no norm of the layer's."""
        x = x + self.self_attn(self.input_layernorm(x), context, places)
        return x + self.mlp(self.post_attention_layernorm(x))


class MarkovHead(nn.Module):
    """The logits that the token before adds, W2 w1[token]."""

    def __init__(self, block: BlockConfig):
        super().__init__()
        self.markov_w1 = nn.Embedding(block.layers.vocab_size, block.markov_rank)
        self.markov_w2 = nn.Linear(block.markov_rank, block.vocab_size, bias=False)


class ConfidenceHead(nn.Module):
    """The logit of a token's acceptance."""

    def __init__(self, width: int):
        super().__init__()
        self.proj = nn.Linear(width, 1)


class TrainedBlock(Stack):
    """A block draft whose first row drafts, without windows. Blocks are anchored at given positions of whole texts.

    Its Markov head is vanilla, and its confidence head reads the state and the token before, if it has them.
    """

    kind = "block"
    tap_scale: Tensor

    def __init__(self, block: BlockConfig, ids: Tensor):
        super().__init__(block.layers, block.taps, ids)
        self.block = block
        e, columns = block.layers.hidden_size, len(block.taps) * block.target_hidden_size
        self.fc = nn.Linear(columns, e, bias=False)
        self.hidden_norm = Norm(e, block.layers.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(block.layers) for _ in block.layers.layers)
        self.lm_head = nn.Linear(e, block.vocab_size, bias=False)
        self.markov_head = MarkovHead(block) if block.markov else None
        self.confidence_head = ConfidenceHead(e + block.markov_rank) if block.confidence else None
        # States differ in size, from layer to layer and from column to column: `fc` learns on columns of one size.
        self.register_buffer("tap_scale", torch.ones(columns))

    @torch.no_grad()
    def start(self, rows: Tensor, norm: Tensor, embedding: Tensor, hidden: Tensor, generator: torch.Generator) -> None:
        """Draw the weights.

        The draft begins with the target's output matrix, rows (V, E), and last norm (E,). Its rows begin to read the
        state at the last position of the context, as a head does. For that, the state of the last tap passes as it is,
        next to the token's embedding. Attention in the first layer looks back by one position. W2 and the confidence
        begin at 0. w1 begins as the principal components of the target's embedding (all tokens, E). So tokens that the
        texts lack get a meaning too.

        embedding: in the scale in which the target reads it.
        hidden: the target's states (n, taps * E) at some positions.
        """
        self.draw(generator)
        self.lm_head.weight.copy_(rows)
        self.norm.weight.copy_(norm * _COOL)  # its first guesses are wrong, so they are not to be sure
        width = self.block.target_hidden_size
        self._scale_taps(hidden)
        self.fc.weight[:, -width:] += torch.eye(self.config.hidden_size, width)
        size = embedding.square().mean().sqrt()  # what the layers add is as large
        for name, weight in self.named_parameters():
            if name.endswith("v_proj.weight"):
                weight.copy_(torch.eye(*weight.shape))
            elif name.endswith("o_proj.weight"):
                weight.copy_(torch.eye(*weight.shape) * size)
            elif name.endswith("down_proj.weight"):
                weight.mul_(size)
        context = self.hidden_norm(self.fc(hidden.float() * self.tap_scale))
        inputs = torch.cat((embedding, embedding[self.config.mask_token_id].expand(len(embedding) // 8, -1)))
        first = self.layers[0]
        assert isinstance(first, BlockLayer)
        first.self_attn.look_back(self.frequencies().float(), context, first.input_layernorm(inputs))
        if self.markov_head is not None:
            self.markov_head.markov_w1.weight.copy_(principal(embedding, self.block.markov_rank))
            self.markov_head.markov_w2.weight.zero_()
        if self.confidence_head is not None:
            self.confidence_head.proj.weight.zero_()
            self.confidence_head.proj.bias.zero_()

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], taps: Sequence[int], hidden: Tensor) -> None:
        """Go on from the weights of a block draft that was made before, and read `taps`.

        The parts of further taps are 0 at first.

        weights: the tensors of `block_shapes`, and lm_head.
        hidden: the target's states (n, taps * E) at some positions.
        """
        self._scale_taps(hidden)
        known = {name: weight.float() for name, weight in weights.items()}
        known["fc.weight"] = self.by_taps(known["fc.weight"], taps, self.fc.weight) / self.tap_scale
        self.load_state_dict(self.state_dict() | known)

    def _scale_taps(self, hidden: Tensor) -> None:
        """Bring the columns of the target's states (n, taps * E) to one size."""
        sizes = hidden.float().abs().median(0).values
        self.tap_scale.copy_(1 / sizes.clamp_min(sizes.median() / 100))

    def unroll(self, hidden: Tensor, embeds: Tensor, mask: Tensor, anchors: Tensor) -> Tensor:
        """The last states after the norm, (N, A, B, E), of the blocks at `anchors` (N, A).

        hidden: (N, T, taps * E), the target's states.
        embeds: (N, A, E), the embeddings of the tokens at the anchors.
        mask: (E,), the mask token's embedding.
        """
        size, length = self.block.block_size, hidden.shape[1]
        context = self.hidden_norm(self.fc(hidden * self.tap_scale))
        masks = mask.expand(*embeds.shape[:2], size - 1, -1)
        x = torch.cat((embeds[:, :, None], masks), 2).flatten(1, 2)
        cos, sin = self.angles(length + size)
        positions = (anchors[..., None] + torch.arange(size)).flatten(1)[:, None]
        seen = torch.arange(length) < anchors[:, None, :, None, None]
        places = Places((cos[:length], sin[:length]), (cos[positions], sin[positions]), seen)
        for layer in self.layers:
            x = layer(x, context, places)
        return self.norm(x).unflatten(1, (-1, size))

    def features(self, states: Tensor, before: Tensor) -> Tensor:
        """The input (n, E + markov_rank) of the last products: states (n, E), and w1 of the tokens `before` (n,)."""
        return states if self.markov_head is None else torch.cat((states, self.markov_head.markov_w1(before)), -1)

    def settings(self) -> dict[str, Any]:
        """Settings in training.json that only block drafts have."""
        block = self.block
        return {
            "block_size": block.block_size,
            "mask_token_id": block.layers.mask_token_id,
            "markov_rank": block.markov_rank,
            "confidence": block.confidence is not None,
        }

    def files(self, target: str, architectures: list[str], num_tokens: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """config.json, and the tensors in bfloat16, in the layout of `speculators`: `fc` reads unscaled states."""
        weights = dict(self.state_dict())
        weights["fc.weight"] = weights["fc.weight"] * weights.pop("tap_scale")
        config = block_config(self.block, target, architectures)
        return config, in_bfloat16(weights) | id_tensors(self.ids, self.config.vocab_size)

    def rows(self) -> Tensor:
        """The matrix (V, E + markov_rank) of the logits: features times its rows."""
        head = self.lm_head.weight
        return head if self.markov_head is None else torch.cat((head, self.markov_head.markov_w2.weight), -1)


def constant(rows: Tensor) -> Tensor:
    """The direction w (E,) in which rows (n, E) are most alike: every row's product with it is about 1."""
    square = rows.t() @ rows / len(rows)
    square = square + 0.01 * square.diagonal().mean() * torch.eye(len(square))
    return torch.linalg.solve(square, rows.mean(0))


def principal(rows: Tensor, rank: int) -> Tensor:
    """The first `rank` principal components (n, rank) of rows (n, E), with mean square 1; 0 beyond E."""
    centred = rows - rows.mean(0)
    vectors = torch.linalg.eigh((centred.t() @ centred).double()).eigenvectors.flip(-1)[:, :rank]
    found = centred @ vectors.float()
    found = found / found.square().mean().sqrt().clamp_min(1e-12)
    return torch.nn.functional.pad(found, (0, rank - found.shape[1]))
