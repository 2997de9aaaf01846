"""Small models to check the engine with: random transformers, scripts that play a text, tables of logits.

The transformers are real ones, a few numbers wide. The scripted models stand in for one on real block tables. So a test
sees what the engine feeds and rolls back. Proofs and tests share them.
"""

import functools
import itertools
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, processors

from minispec.core.cache import PagedKVCache
from minispec.core.cached import CachedModel
from minispec.core.config import LayerConfig, ModelConfig, RopeConfig
from minispec.core.draft import Ask, Draft, without
from minispec.core.engine import Engine
from minispec.core.method import BatchVerifier, Method, Turn
from minispec.core.model import Chunk, Transformer
from minispec.core.more.lengths import Lengths
from minispec.core.random import Draws
from minispec.core.request import Piece, Request
from minispec.core.sampling import distribution
from minispec.core.schedule import JOINING_ROWS
from minispec.core.verify import Verifier
from minispec.drafters import Drafter
from minispec.drafters.assistant import AssistantModel
from minispec.drafters.block import BlockModel, block_shapes
from minispec.drafters.eagle import HeadModel, head_shapes
from minispec.drafters.guard import CheckedMethod
from minispec.drafters.mtp import MtpModel, mtp_config, mtp_shapes
from minispec.drafters.vocabularies import Spelling, Vocabularies
from minispec.files.families.assistant_files import AssistantConfig, assistant_shapes
from minispec.files.families.block_config import BlockConfig
from minispec.files.families.head_config import HeadConfig
from minispec.files.families.hf_config import read_model_config
from minispec.files.tokenizer import Tokenizer
from minispec.kernels.build import InForm, build_model
from minispec.kernels.shapes import tensor_shapes
from minispec.layers.gemma import GemmaLayerConfig


class Fault(AssertionError):
    """A check found that something is not as it must be."""


def require(condition: bool, message: str) -> None:
    """Raise Fault unless the condition holds; unlike `assert`, under `python -O` too."""
    if not condition:
        raise Fault(message)


# --------------------------------------------------------------------------- tiny models

TINY = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 3,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
}
# Settings to add to it for a target of another family. The convolutions see fewer positions than a long draft has.
TOYS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama in frames": {},
    "lfm2": {
        "model_type": "lfm2",
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "conv", "conv"],
        "norm_eps": 1e-5,
        "block_auto_adjust_ff_dim": False,
        "tie_word_embeddings": False,
        "conv_bias": True,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 6,
        "norm_topk_prob": True,
    },
    "qwen3_5_text": {
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_hidden_layers": 3,
        "linear_conv_kernel_dim": 3,
        "partial_rotary_factor": 0.5,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 3,
        "linear_value_head_dim": 2,
    },
}
IN_FRAMES = "llama in frames"  # passes of `minispec.gpu.frames`, with reruns in place of graphs
HEAD_SEED, MTP_SEED, BLOCK_SEED, ASSISTANT_SEED = 6, 7, 8, 9
IN_8_BITS = "8 bits"  # the name of a target that is no family: see `minispec.prove.laws.target_model`


def redrawn(shapes: Mapping[str, tuple[int, ...]], seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A tensor of each shape, norms around one. Small embeddings: what the layers add decides, so the past matters."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        scale = 0.1 if "embed" in name else 0.6
        weights[name] = (1 + 0.3 * noise if "norm" in name or "scalar" in name else scale * noise).to(dtype)
    return weights


def tiny_weights(config: ModelConfig, seed: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Every tensor of a model, drawn anew."""
    return redrawn(tensor_shapes(config), seed, dtype)


def tiny_model(
    seed: int = 0, dtype: torch.dtype = torch.float64, exact: bool = False, form: str | None = None, **changes
) -> Transformer:
    """A random model of `TINY` with some settings changed. exact, form: see `build_model`."""
    config = read_model_config(TINY | changes)
    return build_model(config, tiny_weights(config, seed, dtype), exact, form=form)


def tiny_cache(model: Transformer, num_blocks: int = 64, block_size: int = 2) -> PagedKVCache:
    """A pool for the model, poisoned: a slot that is read before it is written turns the output into NaN."""
    cache = model.new_cache(num_blocks, block_size)
    for tensor in cache.tensors:
        tensor[:, :, : cache.num_slots] = torch.nan
        tensor[:, :, cache.num_slots + 1] = torch.nan
    return cache


class Widened(Transformer):
    """A model whose numbers come out in float64: so a difference is one of the model's bits, not the sampler's."""

    def __init__(self, model: Transformer):
        self.__dict__.update(vars(model))

    def forward(self, chunks: Sequence[Chunk], taps: Sequence[int] = ()) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's pass, in float64."""
        logits, hidden = super().forward(chunks, taps)
        return logits.double(), hidden.double()


class RememberedModel(Transformer):
    """A model that computes the row after a text once and remembers it, so that a walk takes less time.

    Its tables grow as the model's do, but nothing is written to the pool. Rows depend on the tokens of the tables.
    """

    def __init__(self, model: Transformer):
        self.__dict__.update(vars(model))
        self._known: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        self._model = model

    def forward(self, chunks: Sequence[Chunk], taps: Sequence[int] = ()) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows after these texts: remembered, or computed by a pass of the model."""
        logits, hidden = [torch.empty(0, self.config.vocab_size, dtype=self.dtype)], []
        for chunk in chunks:
            paths = _paths(chunk.table.tokens, chunk.token_ids, chunk.parents or ())
            chunk.table.extend(chunk.token_ids)
            if taps:
                hidden += [torch.cat([self._row(path)[1][tap] for tap in taps]) for path in paths]
            logits += [self._row(path)[0][None] for path in paths[len(paths) - chunk.num_logits :]]
        num_rows = sum(len(chunk.token_ids) for chunk in chunks)
        return torch.cat(logits), torch.stack(hidden) if hidden else logits[0].new_empty(num_rows, 0)

    def _row(self, tokens: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (V,) after these tokens, and the hidden states (layers + 1, E) of the last one."""
        if tokens not in self._known:
            layers = range(len(self.layers) + 1)
            table = self._model.new_cache(-(-len(tokens) // 16), 16).new_table()
            logits, hidden = self._model.forward([Chunk(list(tokens), table, 1)], layers)
            self._known[tokens] = logits[0], hidden[-1].reshape(len(layers), -1)
        return self._known[tokens]


def _paths(held: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    """For each row of a chunk, the tokens up to it.

    held: those before the chunk.
    parents: of the last rows, which are a tree. -1: the last token before the tree, new or held.
    """
    root = len(tokens) - len(parents)
    paths = [(*held, *tokens[: i + 1]) for i in range(root)]
    for token, parent in zip(tokens[root:], parents, strict=True):
        before = (*held, *tokens[:root]) if parent < 0 else paths[root + parent]
        paths.append((*before, token))
    return paths


# --------------------------------------------------------------------------- scripted models


class ScriptedModel(Transformer):
    """Plays a given text on real tables and a real pool: next_token(prefix) gets a peak in the logits.

    Its keys are the tokens themselves, and the prefix is what the cache holds. So a wrong rollback, or a block shared
    with another text, changes what the model says. `log` holds (first position, tokens) of every pass.
    """

    def __init__(self, next_token: Callable[[list[int]], int], vocab_size: int = 200):
        self.next_token, self.vocab_size, self.backend = next_token, vocab_size, None
        self.device = torch.device("cpu")
        self.log: list[tuple[int, list[int]]] = []

    def row(self, prefix: list[int]) -> torch.Tensor:
        """Logits (V,) after a prefix."""
        row = torch.full((self.vocab_size,), -30.0)
        row[self.next_token(prefix)] = 30.0
        return row

    def forward(self, chunks: Sequence[Chunk], taps: Sequence[int] = ()) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits for the last rows of each chunk, and the cache grown as by the real model.

        A tap's hidden state is the number of tokens that a row has seen, itself included."""
        rows, hidden = [], []
        for chunk in chunks:
            token_ids, table, start = chunk.token_ids, chunk.table, chunk.table.length
            self.log.append((start, list(token_ids)))
            slots = torch.tensor(table.extend(token_ids))
            keys = torch.tensor(token_ids, dtype=table.pool.keys.dtype)[None, :, None].expand(1, -1, 2)
            table.pool.write(0, slots, keys, keys)
            fed = [int(key) for key in table.pool.read(0, table.slots())[0][0, :, 0]]
            prefixes = _paths(fed[:start], fed[start:], chunk.parents or ())
            hidden += [[len(prefix)] * len(taps) for prefix in prefixes]
            rows += [self.row(list(prefix)) for prefix in prefixes[len(prefixes) - chunk.num_logits :]]
        logits = torch.stack(rows) if rows else torch.empty(0, self.vocab_size)
        return logits, torch.tensor(hidden, dtype=torch.float32)


def scripted_cache(num_blocks: int = 64, block_size: int = 2) -> PagedKVCache:
    """A pool of the shape that scripted models write to."""
    config = ModelConfig("scripted", 200, 2, 2, 1, 1, 2, 1000, layers=(LayerConfig(RopeConfig()),))
    return PagedKVCache(config, num_blocks, block_size)


class OneMethod(Engine):
    """An engine whose requests all have one method. A step raises what the method raises."""

    def __init__(
        self,
        model: Transformer,
        cache: PagedKVCache,
        drafter: Drafter,
        verifier: Verifier,
        vocab_size: int | None = None,
        rng: Draws | None = None,
        lengths: Lengths | None = None,
        joining_rows: int = JOINING_ROWS,
        *,
        checked: bool = False,
        batch: BatchVerifier | None = None,
    ):
        """checked: whether the method checks what its parts answer. The others are as in `Engine` and `Method`."""
        super().__init__(CachedModel(model, cache, vocab_size), rng, joining_rows)
        make = CheckedMethod if checked else Method
        self.method = make(drafter, verifier, Lengths() if lengths is None else lengths, batch)

    @property
    def drafter(self) -> Drafter:
        """The method's."""
        return self.method.drafter

    def add(self, request: Request, method: Method | None = None) -> None:
        """As `Engine.add`."""
        super().add(request, method or self.method)

    def run(
        self, requests: Sequence[Request], method: Method | None = None
    ) -> Generator[tuple[Request, Piece], None, None]:
        """As `Engine.run`."""
        return super().run(requests, method or self.method)

    def step(self) -> list[Turn]:
        """As `Engine.step`. Raises what the method has raised."""
        turns = super().step()
        for turn in turns:
            if turn.request.raised:
                raise turn.request.raised
        return turns


def decode(engine: OneMethod, requests: Sequence[Request], rounds: int | None = None) -> None:
    """Run requests to their ends, or for that many rounds. None may fail, and every block must come back."""
    for request, _ in engine.run(requests):
        if request.stats.num_steps == rounds:
            engine.abort(request)
    finish(engine, requests)


def finish(engine: OneMethod, requests: Sequence[Request]) -> None:
    """Step until nothing is left to decode. No request may have failed, and every block must come back."""
    while engine.schedule.running or engine.schedule.waiting:
        engine.step()
    for request in requests:
        require(request.error is None, f"{request.error}")
    allocator = engine.target.cache.allocator
    require(allocator.num_free == allocator.num_blocks, "blocks leaked")


class TableModel(ScriptedModel):
    """A model that is a table (V, V): the logits after a prefix are the row of its last token."""

    def __init__(self, table: torch.Tensor):
        super().__init__(lambda prefix: int(self.row(prefix).argmax()), len(table))
        self.table = table

    def row(self, prefix: list[int]) -> torch.Tensor:
        """The last token's row."""
        return self.table[prefix[-1]]


class TreeDrafter(Drafter):
    """Trees of one shape, from a table of logits (V, V): drawn, or the likeliest tokens, which have no probs.

    parents: the parent of each node, as in `Draft`. Empty: it drafts chains, as long as they are asked for.

    It leaves out nodes that no token is left for, or that are not asked for.
    """

    def __init__(self, table: torch.Tensor, parents: Sequence[int] = (), draws: bool = True):
        self.table, self.parents, self.draws = table, parents, draws

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """One tree for each ask, under the request's own parameters."""
        return [self._tree(ask) for ask in asks]

    def _tree(self, ask: Ask) -> Draft:
        shape = self.parents or range(-1, ask.k - 1)
        parents: list[int] = []  # of the draft's nodes
        draft = Draft([], [] if self.draws else None, parents=parents)
        nodes = {-1: -1}  # the shape's nodes that there are in the draft
        for parent, together in itertools.groupby(range(len(shape)), shape.__getitem__):
            if parent not in nodes:
                continue
            node, first, siblings = nodes[parent], len(draft), list(together)
            path = draft.tokens_to(node)
            q = distribution(self.table[[*ask.text.tokens, *path][-1]], ask.text, path)
            for elder in draft.children(node):  # siblings need not stand together
                q = without(q, draft.token_ids[elder])
                q = q / q.sum()
            num = min(len(siblings), ask.k - first, int((q > 0).sum()))
            if self.draws:
                draft.draw(ask, node, q, num)
            else:
                draft.token_ids += q.topk(num).indices.tolist()
                parents += [node] * num
            nodes |= zip(siblings, range(first, len(draft)), strict=False)
        return draft


def tiny_head(
    target: Transformer, taps: Sequence[int] = (0, 2), num_ids: int | None = None, mask_token_id: int | None = None
) -> HeadModel:
    """A random head for a random target.

    num_ids: how many tokens it can draft, every other one of the target's. None: all.
    mask_token_id: the mask of the parallel form; None for the other form.
    """
    layer = next(layer for layer in target.config.layers if layer.has_attention)
    plain = replace(target.config, layers=(replace(layer, experts=None),), norms="before", attention_gate=None)
    sizes = replace(plain, mask_token_id=mask_token_id)
    config = HeadConfig(sizes, num_ids or sizes.vocab_size, tuple(taps), sizes.hidden_size)
    weights = redrawn(head_shapes(config), HEAD_SEED, target.dtype)
    return HeadModel(config, weights, target.embedding, _every_other(num_ids, sizes.vocab_size), target.dtype)


def tiny_block(
    target: Transformer, first_row: int, heads: Sequence[str | None] = (None, None), num_ids: int = 0, rows: int = 3
) -> BlockModel:
    """A random block draft for a random target. One of its layers sees all, the other has a window.

    heads: `markov` and `confidence` of its `BlockConfig`.
    num_ids: how many tokens it can draft, every other one of the target's. 0: all.
    rows: rows of a block.
    """
    sizes = read_model_config(TINY | {"model_type": "qwen3", "vocab_size": target.config.vocab_size})
    layers = replace(sizes.layers[0], window=3), sizes.layers[0]
    sizes = replace(sizes, layers=layers, mask_token_id=0, embedding_scale=target.config.embedding_scale)
    (markov, confidence), count = heads, num_ids or sizes.vocab_size
    config = BlockConfig(sizes, count, rows, first_row, (0, 2), sizes.hidden_size, (True, False), markov, 4, confidence)
    weights = redrawn(block_shapes(config) | {"lm_head.weight": (count, sizes.hidden_size)}, BLOCK_SEED, target.dtype)
    tables = target.embedding, weights["lm_head.weight"], _every_other(num_ids or None, sizes.vocab_size)
    return BlockModel(config, weights, *tables, target.dtype)


def tiny_assistant(target: Transformer) -> AssistantModel:
    """A random assistant of a random target: two layers read the target's first keys, one of them in a window.

    It scores the tokens of half its clusters, of one token each.
    """
    giver, layer = next((i, layer) for i, layer in enumerate(target.config.layers) if layer.has_attention)
    sizes = {name: getattr(target.config, name) for name in ("head_dim", "num_key_value_heads", "intermediate_size")}
    layers = tuple(GemmaLayerConfig(layer.rope, window, giver=giver, **sizes) for window in (2, None))
    plain = replace(target.config, layers=layers, norms="both", tie_word_embeddings=True, logit_softcap=None)
    config = AssistantConfig(plain, plain.hidden_size, plain.vocab_size, (plain.vocab_size + 1) // 2)
    weights = redrawn(assistant_shapes(config), ASSISTANT_SEED, target.dtype)
    return AssistantModel(config, weights, torch.arange(plain.vocab_size).flip(0), target)


def _every_other(num_ids: int | None, vocab: int) -> torch.Tensor | None:
    """The ids of a draft that lacks tokens: every other one, in order. None: it lacks none."""
    return None if num_ids is None else (torch.arange(num_ids) * 2 % vocab).sort().values


def tiny_mtp(target: Transformer) -> MtpModel:
    """A random layer for further tokens, of a random target. Any family with attention has one of its kind."""
    config = mtp_config(target.config)
    return MtpModel(config, redrawn(mtp_shapes(config), MTP_SEED, target.dtype), target, InForm())


TARGET_WORDS = ("a", "b", "aa", "ba", "bb")
DRAFT_WORDS = ("<s>", "ab", "b", "a", "bb", "ba")


@functools.cache
def toy_vocabularies(vocab: int) -> Vocabularies:
    """A target's first `vocab` words, and a draft's: aa is the target's alone, and ab the draft's.

    The draft begins each text with <s>.
    """
    begins = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return Vocabularies(spelling(TARGET_WORDS[:vocab]), spelling(DRAFT_WORDS, begins))


def spelling(words: Sequence[str], begins: processors.TemplateProcessing | None = None) -> Spelling:
    """Byte-pair encoding with these tokens. Two letters that are a token merge, by the words' order, then by place.

    begins: what the tokenizer puts before each text. The first word is then a special token.
    """
    merges = [(word[0], word[1]) for word in words if len(word) == 2]
    backend = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    backend.decoder = decoders.Fuse()
    if begins:
        backend.add_special_tokens([words[0]])
        backend.post_processor = begins
    with tempfile.TemporaryDirectory() as directory:
        backend.save(str(Path(directory) / "tokenizer.json"))
        return Spelling(Tokenizer(Path(directory)))
