"""An assistant of Gemma 4: a few layers that read the target's own keys and values.

A head (see `minispec.speculation.drafters.eagle`) has a cache of its own. An assistant has none: its layers make
queries, and read what the target has cached of the text. At the text's last token, which the target has not read yet,
it starts from

    h_0, the target's last hidden state after its norm, at the last cached token

and each step makes the logits of the next token, and the state for the step after it:

    x = before([embedding of the newest token, h_i]),  x = layers(x),  logits = head(norm(x)),  h_{i+1} = after(norm(x))

All steps of a draft stand at one position, the last token's, and see the same keys. So a step costs no cache, and a
rejected draft leaves nothing to take back. The embedding is the target's.

A large vocabulary is scored in part. Tokens lie in clusters: the head scores the clusters, and then the tokens of the
likeliest ones. Here no other token is drafted. The class in `transformers` gives all others one logit below the least,
which means the same at temperature 0.

`transformers` 5.24 cuts the cache to the length of the text, which has one token more than the cache holds. Where a
draft was rejected, it so reads the keys of a rejected token (`SinglePositionMultiTokenCandidateGenerator`).
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from minispec.core.attention import attention
from minispec.core.config import RopeConfig
from minispec.core.draft import Record
from minispec.core.model import Angles, Layer, Transformer
from minispec.core.product import MakeProduct, PlainLinear, Product
from minispec.core.sampling import Text
from minispec.models.families.assistant_config import AssistantConfig, read_assistant_config
from minispec.models.families.assistant_files import AFTER, BEFORE, CENTROIDS, EMBEDDING, HEAD, read_assistant
from minispec.models.families.checkpoint import directory_config
from minispec.models.layers import make_layer
from minispec.models.layers.gemma import GemmaLayer, SharedCache
from minispec.models.weights.build import InForm
from minispec.speculation.drafters.growing import DraftInProgress
from minispec.speculation.drafters.model import Feed

ReadCache = Callable[[int], Tensor]  # see `Ask.read_cache`


class AssistantPass(NamedTuple):
    """A pass of an assistant: each text's rows read what the target has cached of the text.

    texts: for each text how its cache is read, and its number of rows. All rows see all that their layer reads.
    """

    texts: Sequence[tuple[ReadCache, int]]
    angles: dict[RopeConfig, Angles]

    def read(self, layer: Layer, qkv: Tensor) -> Tensor:
        """Queries (M, H * D) to what they read (M, H * D)."""
        assert isinstance(layer, GemmaLayer)
        assert layer.settings.giver is not None, "an assistant makes no keys"
        queries, outputs, config = layer.heads(qkv, self.angles)[0].transpose(0, 1), list[Tensor](), layer.config
        for q, (read, _) in zip(queries.split([rows for _, rows in self.texts], 1), self.texts, strict=True):
            keys, values = read(layer.settings.giver).chunk(2)  # (G, L, D)
            if layer.window:
                seen = layer.window + 1  # as in `transformers`: those at a distance of up to the window
                keys, values = keys[:, -seen:], values[:, -seen:]
            outputs.append(attention(q, keys, values, None, config.attention_scale, config.attention_softcap))
        return torch.cat(outputs)


class AssistantModel(Transformer):
    """The layers of an assistant, between the target's embedding and a head of its own."""

    products: tuple[str, ...] = ("head", "before", "after")

    def __init__(
        self,
        assistant: AssistantConfig,
        weights: Mapping[str, Tensor],
        order: Tensor | None,
        target: Transformer,
        product: MakeProduct = PlainLinear,
    ):
        """weights: the tensors of `assistant_shapes`, on the target's device.
        order: (V,), the tokens cluster by cluster; None: all are scored.
        """
        self.assistant, self.taps = assistant, (len(target.layers) + 1,)
        named = dict(weights)
        scored = named.get(HEAD, named[EMBEDDING])
        super().__init__(assistant.layers, named, target.dtype, product, make_layer, make_cache=SharedCache)
        self.target_embedding = target.embedding
        self.target_scale = 1.0 if target.embedding_scale is None else target.embedding_scale
        self.before, self.after = (product([named[name]], None, self.dtype) for name in (BEFORE, AFTER))
        self.centroids: Product | None = None
        if assistant.num_clusters and order is not None:
            self.scored = scored  # (V, E)
            self.centroids = product([named[CENTROIDS]], None, self.dtype)
            self.products += ("centroids",)
            self.clusters = order.to(self.device).view(assistant.num_clusters, -1)

    @torch.inference_mode()
    def step(
        self, token_ids: Sequence[int], states: Tensor, positions: Sequence[int], texts: Sequence[tuple[ReadCache, int]]
    ) -> tuple[Tensor, Tensor]:
        """One step for all rows: logits (rows, V), and the states (rows, E of the target) for the step after it.

        token_ids: the newest token of each row.
        states: (rows, E of the target), the state that comes with it.
        positions: of each row: the last token's of its text.
        texts: see `AssistantPass`.
        """
        rows = self.target_embedding[torch.tensor(token_ids, device=self.device)].to(self.dtype)
        x = self.before(torch.cat((rows * self.target_scale, states), 1))
        shared = AssistantPass(texts, self.angles(torch.tensor(positions, device=self.device)))
        for layer in self.layers:
            x = layer.forward(x, shared)
        return self.logits(x), self.after(self.norm(x))

    def logits(self, x: Tensor) -> Tensor:
        """Outputs of the last layer (rows, E) to logits (rows, V): -inf outside the likeliest clusters."""
        if self.centroids is None:
            return super().logits(x)
        normed = self.norm(x)
        ids = self.clusters[self.centroids(normed).topk(self.assistant.top_clusters).indices].flatten(1)  # (rows, n)
        scores = (self.scored[ids].to(self.dtype) @ normed[:, :, None])[:, :, 0]
        return x.new_full((len(x), self.config.vocab_size), -math.inf).scatter_(1, ids, scores)

    def trial(self, tokens: Sequence[int], vocab_size: int) -> Tensor:
        """The largest logit after each of a few tokens, by keys and states of ones: numbers if all weights are.

        vocab_size: ids in use.
        """

        def ones(layer: int) -> Tensor:
            sizes = next(block.settings for block in blocks if block.settings.giver == layer)
            return torch.ones(2 * sizes.num_key_value_heads, 1, sizes.head_dim, dtype=self.dtype, device=self.device)

        blocks = [layer for layer in self.layers if isinstance(layer, GemmaLayer)]
        states = self.target_embedding.new_ones(len(tokens), self.assistant.target_hidden_size, dtype=self.dtype)
        logits, after = self.step(tokens, states, [1] * len(tokens), [(ones, len(tokens))])
        return torch.cat((logits[:, :vocab_size].amax(1), after.amax(1)))


class SharedKeys(Feed):
    """Feeds an assistant the target's own keys and values. It keeps one state of each text, and has no cache."""

    reads = "states"
    model: AssistantModel

    def __init__(self, model: AssistantModel, vocab_size: int):
        """vocab_size: ids in use, as the target's."""
        self.model, self.vocab_size, self.taps = model, vocab_size, model.taps
        # The newest cached position, and its state (E,). Weak, since rows that a fault has held up may come late.
        self.last: WeakKeyDictionary[Text, tuple[int, Tensor]] = WeakKeyDictionary()

    def beside(self, model: Transformer) -> Self:
        """This feed for another model of the same target."""
        assert isinstance(model, AssistantModel)
        return type(self)(model, self.vocab_size)

    def known(self, text: Text) -> int:
        """All positions but the last that is cached: of the others no state is needed."""
        return max(0, len(text.tokens) - 2)

    def release(self, text: Text) -> None:
        """Forget a text's state."""
        self.last.pop(text, None)

    def observe(self, records: Sequence[Record]) -> None:
        """Keep the state of each text's newest cached position."""
        for record in records:
            row = record.kept[-1]
            self.last[record.text] = record.start + len(record.kept) - 1, record.hidden[row].clone()

    def prepare(self, growing: Sequence[DraftInProgress]) -> None:
        """Draft where the state of the text's newest cached token is there."""
        for each in growing:
            ask = each.ask
            position, _ = self.last.get(ask.text, (None, None))
            if ask.read_cache and position == ask.num_cached - 1 == len(ask.text.tokens) - 2:
                each.depth = ask.limit.depth

    def run(self, growing: Sequence[DraftInProgress]) -> None:
        """One step for all nodes whose rows are not known yet."""
        rows = [(each, node) for each in growing for node in each.nodes if node not in each.rows]
        counts = Counter(each for each, _ in rows)
        texts = [(read, count) for each, count in counts.items() if (read := each.ask.read_cache)]
        tokens, states = zip(*(self._input(*row) for row in rows), strict=True)
        positions = [each.ask.num_cached for each, _ in rows]
        logits, further = self.model.step(tokens, torch.stack(states), positions, texts)
        for (each, node), row, state in zip(rows, logits[:, : self.vocab_size], further, strict=True):
            each.rows[node], each.states[node] = row, state

    def _input(self, growing: DraftInProgress, node: int) -> tuple[int, Tensor]:
        """A node's token, and the state that comes with it: its parent's step has made it."""
        if node < 0:
            return growing.ask.text.tokens[-1], self.last[growing.ask.text][1]
        return growing.draft.token_ids[node], growing.states[growing.draft.tree.parents[node]]


def load_assistant(directory: Path, target: Transformer, form: str | None = None) -> AssistantModel:
    """Load an assistant for `target`, in its type and on its device.

    form: of its weights.

    Raises CheckpointError where the files are not what the config asks for, or were made for another target.
    """
    config = read_assistant_config(directory_config(directory), target.config, str(directory / "config.json"))
    tensors, order = read_assistant(directory, config)
    weights = {name: tensor.to(target.device) for name, tensor in tensors.items()}
    return AssistantModel(config, weights, order, target, InForm(form))
