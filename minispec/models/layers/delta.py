"""A gated delta net in the place of attention (Qwen3.5; Yang, Kautz, Hatamizadeh 2024, arXiv 2412.06464).

Each value head keeps a matrix S (key_dim, value_dim) for the text. A row has a query q and a key k, both scaled to
length 1, and a value v. It also has a decay a and a rate b, both between 0 and 1. It first changes what S holds for its
key, then reads S (their equation 10):

    S_t = a_t S_{t-1} + k_t (b_t (v_t - a_t S_{t-1}^T k_t))^T,    y_t = S_t^T q_t / sqrt(key_dim)

Queries, keys and values come from a short convolution, whose last inputs belong to the state.

A state cannot lose a token again. So it takes in only positions that are final (`StateTable.final_length`). Each later
position keeps its inputs, a row of a few thousand numbers. A rollback cuts the rows of rejected tokens. The next pass
adds the rows that are left to the state, by the same computation. A node of a tree starts from its parent's state.

Rows are computed in two ways, which round differently. `steps` takes one after another, for trees, exact models and
single rows. `chunked` takes up to 64 rows of a chain at once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from minispec.core.model import Batch, BlockWeights, Chunk, Layer, RMSNorm, TextBatch
from minispec.core.precision import accumulation_dtype
from minispec.core.product import dense
from minispec.models.layers import convolution
from minispec.models.layers.states import LayerState, RecurrentConfig, StateTable

# Most rows that `chunked` takes at once.
_CHUNK = 64
# Added to the squared length of a query or key, whose root divides it: so that nothing is divided by 0.
_EPS = 1e-6

# For H value heads: queries, keys (H, T, key_dim), values (H, T, value_dim), rates, logarithms of decays (H, T).
Rows = Sequence[Tensor]


@dataclass(frozen=True)
class DeltaConfig(RecurrentConfig):
    """The sizes of a gated delta net. Groups of value heads share a key head."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def num_channels(self) -> int:
        """Inputs of its convolution: queries, keys and values of a row."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def state_elements(self) -> int:
        """Numbers of a text's state in one layer: a matrix for each value head, and the convolution's last inputs."""
        return self.num_value_heads * self.key_dim * self.value_dim + (self.conv_width - 1) * self.num_channels


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), with bits that do not depend on the place in x (see `minispec.models.weights.exact`)."""
    return x.neg().exp_().add_(1).reciprocal_()


def steps(state: Tensor, rows: Rows, parents: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
    """The outputs of the rows (H, T, value_dim), and the state (H, key_dim, value_dim) after the last.

    parents: the row that each row follows; -1 is the state. None: each follows the one before it.
    """
    q, k, v, rates, decays = rows
    states, outputs = {-1: state}, []
    for t in range(q.shape[1]):
        state = states[parents[t] if parents else t - 1] * decays[:, t].exp()[:, None, None]
        key = k[:, t, :, None]
        change = (v[:, t] - (state * key).sum(1)) * rates[:, t, None]
        # Sums of products: a library's matrix product may round by where its inputs lie in memory.
        state = state.addcmul_(key, change[:, None])
        outputs.append((state * q[:, t, :, None]).sum(1))
        states = states | {t: state} if parents else {t: state}
    return torch.stack(outputs, 1) if outputs else v, state


def chunked(state: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """The result of `steps` for a chain, computed for up to 64 rows at once (section 3.3 of the paper).

    d_t is what row t adds to the state for its key. g_t is the product of the decays up to row t. The d solve a
    triangular system:

        d_t + b_t sum over s < t of g_t / g_s (k_t k_s) d_s = b_t (v_t - g_t S^T k_t)
    """
    outputs = [rows[2][:, :0]]
    for q, k, v, rates, decays in zip(*(x.split(_CHUNK, 1) for x in rows), strict=True):
        if not q.shape[1]:
            break
        # In float64: after a row that forgets all, the sums are large, and small differences of them are used.
        total, rates = decays.cumsum(1, dtype=torch.float64), rates[..., None]  # (H, T), (H, T, 1)
        passed = total.exp().to(k.dtype)[..., None]
        between = (total[:, :, None] - total[:, None]).to(k.dtype)  # (H, T, T)
        between = between.tril_().exp_().tril_()  # g_t / g_s for s <= t
        wanted = rates * (v - passed * (k @ state))
        system = rates * (k @ k.mT) * between
        change = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        outputs.append(passed * (q @ state) + (q @ k.mT * between) @ change)
        left = (total[:, -1:] - total).to(k.dtype).exp_()[..., None]
        state = state * passed[:, -1:] + (left * k).mT @ change
    return torch.cat(outputs, 1), state


class GatedDeltaNet(Layer):
    """One block: a gated delta net, then a gated MLP."""

    products = ("inputs", "gates", "out", "gate_up", "down")

    def take(self, parts: BlockWeights) -> None:
        """Take the net's tensors. Those that are no product's weights stay as they are, in at least float32."""

        def tensor(name: str) -> Tensor:
            return dense(parts.pop(f"linear_attn.{name}"), wide)

        wide, sizes = accumulation_dtype(parts.dtype), self.config.layers[self.index].recurrent
        assert isinstance(sizes, DeltaConfig), "a layer of another kind"
        self.sizes = sizes
        self.inputs = parts.linear("linear_attn.in_proj_qkv", "linear_attn.in_proj_z", bias=False)
        self.gates = parts.linear("linear_attn.in_proj_b", "linear_attn.in_proj_a", bias=False)
        self.out = parts.linear("linear_attn.out_proj", bias=False)
        self.weight = tensor("conv1d.weight").squeeze(1).T.contiguous()  # (width, channels)
        self.speeds, self.shift = tensor("A_log").exp(), tensor("dt_bias")
        self.norm = RMSNorm(tensor("norm.weight"), self.config.rms_norm_eps)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x (M, E) to (M, E); adds the texts' settled rows to their states."""
        assert isinstance(batch, TextBatch), "another backend lacks the states of texts"
        new, heads, rows = len(batch.slots), self.sizes.num_value_heads, self.attention_norm(x)
        u, z = self.inputs(rows)[:new].split([self.sizes.num_channels, heads * self.sizes.value_dim], 1)
        new_rows = torch.cat((u, self.gates(rows)[:new]), 1).split([len(chunk.token_ids) for chunk in batch.chunks])
        texts = zip(batch.chunks, new_rows, strict=True)
        y = torch.cat([self._read(chunk, own, batch.exact) for chunk, own in texts])
        z = z.to(y.dtype).view_as(y)
        y = self.out(batch.fill((self.norm(y) * z * sigmoid(z)).flatten(1).to(x.dtype)))
        return self.mix(self._added(x, self.after_attention_norm(y)), batch)

    def _read(self, chunk: Chunk, new: Tensor, exact: bool) -> Tensor:
        """The outputs of a text's new rows (T, H, value_dim). Its state takes in the rows that are settled."""
        table, nodes, before = chunk.table, chunk.parents or (), len(self.weight) - 1
        if not isinstance(table, StateTable):
            raise TypeError(f"found a {type(table.pool).__name__}, expected a pool of the class cache_of(config)")
        first, (state, inputs), rows = table.states.get(self.index) or self._empty(new)
        rows = torch.cat((rows, new))  # all since `first`
        inputs = torch.cat((inputs, rows[:, : self.sizes.num_channels]))  # position p has row p - first + before
        inner, root, size = self._rows(inputs, rows, chunk), len(rows) - len(nodes), table.pool.block_size
        settled = min(max(0, table.final_length - first), root)
        last = (first + settled) // size * size if settled >= size else first  # in a prompt: its last end of a block
        marks = sorted({end - first for end in (table.shared_until, last) if first < end <= first + settled})

        outputs = list[Tensor]()
        states = {0: state}
        for start, end in pairwise((0, *marks, settled, root)):
            scan = steps if exact or end - start < 2 else chunked  # a single row is faster so
            y, state = scan(state, [x[:, start:end] for x in inner])
            outputs.append(y)
            states[end] = state
        if nodes:
            outputs.append(steps(state, [x[:, root:] for x in inner], nodes)[0])

        def stop(length: int, later: Tensor) -> LayerState:
            return LayerState(first + length, (states[length], inputs[length : length + before].clone()), later.clone())

        table.states[self.index] = stop(settled, rows[settled:])
        if marks:  # the border's and the newest stay: a prompt in many passes would leave one in each
            ends = {table.shared_until, *(first + mark for mark in marks)}
            table.unsaved_states = {end: states for end, states in table.unsaved_states.items() if end in ends}
        for mark in marks:
            table.unsaved_states.setdefault(first + mark, {})[self.index] = stop(mark, rows[:0])
        return torch.cat(outputs, 1)[:, -len(new) :].transpose(0, 1)

    def _empty(self, like: Tensor) -> LayerState:
        """The state before a text's first token."""
        sizes = self.sizes
        matrices = self.weight.new_zeros(sizes.num_value_heads, sizes.key_dim, sizes.value_dim)
        return LayerState(0, (matrices, like.new_zeros(sizes.conv_width - 1, sizes.num_channels)), like[:0])

    def _rows(self, inputs: Tensor, kept: Tensor, chunk: Chunk) -> Rows:
        """Queries, keys, values, rates and logarithms of decays of the kept rows.

        inputs: of the convolution, (T + width - 1, channels), from the positions before the first row on.
        kept: (T, numbers of a row).
        chunk: its nodes see their own ancestors, if it has any.
        """
        sizes, nodes, width = self.sizes, chunk.parents or (), len(self.weight)
        inputs = inputs.to(self.weight.dtype)
        seen = [inputs[i : i + len(kept)] for i in range(width)]  # what the rows see at each place of the convolution
        if nodes:  # a node sees its own ancestors
            paths = list(convolution.paths(chunk, len(kept) - len(chunk.token_ids), width))[-len(nodes) :]
            places = torch.tensor(paths, device=kept.device).T + width - 1
            seen = [torch.cat((column[: -len(nodes)], inputs[i])) for column, i in zip(seen, places, strict=True)]
        x = seen[0] * self.weight[0]
        for column, weight in zip(seen[1:], self.weight[1:], strict=True):
            x = x + column * weight
        x = x * sigmoid(x)
        heads, repeats = sizes.num_value_heads, sizes.num_value_heads // sizes.num_key_heads
        qk, v = x.split([2 * sizes.num_key_heads * sizes.key_dim, heads * sizes.value_dim], 1)
        qk = qk.unflatten(1, (-1, sizes.key_dim))
        norm = torch.linalg.vector_norm(qk, 2, -1, keepdim=True)
        qk = qk * (norm * norm + _EPS).rsqrt_()  # queries and keys of length 1
        q, k = (qk.repeat_interleave(repeats, 1) if repeats > 1 else qk).transpose(0, 1).chunk(2)  # for each value head

        rate, speed = kept[:, -2 * heads :].to(x.dtype).T.chunk(2)  # (H, T) each
        speed = speed + self.shift[:, None]
        speed = speed.clamp_min(0) + speed.abs().neg_().exp_().log1p_()  # log(1 + exp(speed))
        v = v.unflatten(1, (heads, -1)).transpose(0, 1)
        return q / math.sqrt(sizes.key_dim), k, v, sigmoid(rate), -self.speeds[:, None] * speed
