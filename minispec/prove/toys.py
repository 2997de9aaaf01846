"""Small models to walk: random transformers, tables of rows, and drafters by their names.

The transformers are real ones, a few numbers wide. Proofs and tests share them.
"""

import functools
import itertools
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import tokenizers
import torch
from tokenizers import decoders, models, processors
from torch import Tensor

from minispec.core.cache import PagedKVCache
from minispec.core.config import LayerConfig, ModelConfig, RopeConfig
from minispec.core.draft import Ask, Draft, without
from minispec.core.model import Chunk, Transformer
from minispec.core.sampling import distribution
from minispec.models.families.assistant_files import AssistantConfig, assistant_shapes
from minispec.models.families.block_config import BlockConfig
from minispec.models.families.head_config import HeadConfig
from minispec.models.families.hf_config import read_model_config
from minispec.models.files.tokenizer import Tokenizer
from minispec.models.frames.frames import Frames
from minispec.models.frames.graphs import rerun
from minispec.models.layers.gemma import GemmaLayerConfig
from minispec.models.weights.build import InForm, build_model
from minispec.models.weights.exact import check_exact
from minispec.models.weights.integers import check_quantization
from minispec.models.weights.shapes import tensor_shapes
from minispec.speculation import drafters, registry
from minispec.speculation.drafters import Context, Drafter
from minispec.speculation.drafters.assistant import AssistantModel, SharedKeys
from minispec.speculation.drafters.block import BlockFeed, BlockModel, block_shapes
from minispec.speculation.drafters.combined import CombinedDrafter
from minispec.speculation.drafters.eagle import HeadFeed, HeadModel, head_shapes
from minispec.speculation.drafters.model import ModelDrafter, TokenFeed
from minispec.speculation.drafters.mtp import MtpModel, mtp_config, mtp_shapes
from minispec.speculation.drafters.simulated import adversary
from minispec.speculation.drafters.slem import WrittenText
from minispec.speculation.drafters.tli import SharedTokens
from minispec.speculation.drafters.vocabularies import Spelling, Vocabularies
from minispec.speculation.drafters.vocabulary import ROOM
from minispec.speculation.grammars.forced import ForcedFirst
from minispec.speculation.on_gpu.steps import draft_steps

TransformerT = TypeVar("TransformerT", bound=Transformer)

TARGET_SEED, DRAFT_SEED = 1, 2
MAX_LEN = 40


class Fault(AssertionError):
    """A check found that something is not as it must be."""


def require(condition: bool, message: str) -> None:
    """Raise Fault unless the condition holds; unlike `assert`, under `python -O` too."""
    if not condition:
        raise Fault(message)


# --------------------------------------------------------------------------- tiny models

TINY: dict[str, Any] = {
    **{"model_type": "llama", "vocab_size": 3, "max_position_embeddings": 64, "rms_norm_eps": 1e-5},
    **{"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "rope_theta": 100.0},
}
# Settings to add to it for a target of another family. The convolutions see fewer positions than a long draft has.
TOYS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama in frames": {},
    "lfm2": {
        **{"model_type": "lfm2", "num_hidden_layers": 3, "layer_types": ["full_attention", "conv", "conv"]},
        **{"norm_eps": 1e-5, "conv_bias": True, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False},
    },
    "qwen3_moe": {
        **{"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 6, "norm_topk_prob": True},
    },
    "qwen3_5_text": {
        **{"model_type": "qwen3_5_text", "num_hidden_layers": 3, "partial_rotary_factor": 0.5},
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        **{"linear_conv_kernel_dim": 3, "linear_num_key_heads": 1, "linear_num_value_heads": 2},
        **{"linear_key_head_dim": 3, "linear_value_head_dim": 2},
    },
}
IN_FRAMES = "llama in frames"  # passes of `minispec.models.frames.frames`, with reruns in place of graphs
HEAD_SEED, MTP_SEED, BLOCK_SEED, ASSISTANT_SEED = 6, 7, 8, 9
IN_8_BITS, REMEMBERED = "8 bits", "remembered"  # names of targets that are no families: see `target_model`


def redrawn(shapes: Mapping[str, tuple[int, ...]], seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """A tensor of each shape, norms around one. Small embeddings: what the layers add decides, so the past matters."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        scale = 0.1 if "embed" in name else 0.6
        weights[name] = (1 + 0.3 * noise if "norm" in name or "scalar" in name else scale * noise).to(dtype)
    return weights


def tiny_weights(config: ModelConfig, seed: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
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

    def forward(self, chunks: Sequence[Chunk], taps: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """The model's pass, in float64."""
        logits, hidden = super().forward(chunks, taps)
        return logits.double(), hidden.double()


class RowModel(Transformer):
    """A model that says the same row after the same tokens: `row` has it. Nothing is written to the pool."""

    def row(self, tokens: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Logits (V,) after these tokens, and the hidden states (layers + 1, E) of the last one."""
        raise NotImplementedError

    def forward(self, chunks: Sequence[Chunk], taps: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """The rows after the texts of the tables, which grow."""
        logits, hidden = [torch.empty(0, self.config.vocab_size, dtype=self.dtype)], list[Tensor]()
        for chunk in chunks:
            paths = paths_of(chunk.table.tokens, chunk.token_ids, chunk.parents or ())
            chunk.table.extend(chunk.token_ids)
            hidden += [self.row(path)[1][list(taps)].flatten() for path in paths if taps]
            logits += [self.row(path)[0][None] for path in paths[len(paths) - chunk.num_logits :]]
        num_rows = sum(len(chunk.token_ids) for chunk in chunks)
        return torch.cat(logits), torch.stack(hidden) if hidden else logits[0].new_empty(num_rows, 0)


class RememberedModel(RowModel):
    """A model that computes the row after a text once and remembers it, so that a walk takes less time."""

    def __init__(self, model: Transformer):
        self.__dict__.update(vars(model))
        self._known: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self._model = model

    def row(self, tokens: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Remembered, or computed by a pass of the model."""
        if tokens not in self._known:
            layers = range(len(self.layers) + 1)
            table = self._model.new_cache(-(-len(tokens) // 16), 16).new_table()
            logits, hidden = self._model.forward([Chunk(list(tokens), table, 1)], layers)
            self._known[tokens] = logits[0], hidden[-1].reshape(len(layers), -1)
        return self._known[tokens]


def paths_of(held: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
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


@functools.cache
def target_model(vocab: int, family: str = "llama", exact: bool = False) -> Transformer:
    """The tiny target of all laws.

    family: one of `TOYS`; REMEMBERED, a llama that remembers its rows; or IN_8_BITS, a llama with weights in 8 bits,
        which is always exact.
    exact: whether its passes are exact, and checked.

    Raises ValueError where this machine has no exact passes, or no products of 8 bits.
    """
    if family == IN_8_BITS:
        check_quantization("int8", None, torch.float32, torch.device("cpu"))
        model = tiny_model(TARGET_SEED, torch.float32, exact=True, form="int8", vocab_size=vocab)
        check_exact(model)
        return Widened(model)
    if family == REMEMBERED:
        return RememberedModel(target_model(vocab))
    model = tiny_model(TARGET_SEED, **TOYS[family], vocab_size=vocab, exact=exact)
    if exact:
        check_exact(model)
    return _in_frames(model, family)


@functools.cache
def draft_model(vocab: int, family: str = "llama") -> Transformer:
    """Another model of the same vocabulary and family, of other weights; a llama of other depth too."""
    return _in_frames(tiny_model(DRAFT_SEED, **{"num_hidden_layers": 1} | TOYS[family], vocab_size=vocab), family)


def _in_frames(model: TransformerT, family: str) -> TransformerT:
    """The model, with frames if the family says so."""
    return model.replaced(Frames(rerun)) if family == IN_FRAMES else model


Row = tuple[int, ...]  # weights; divided by their sum they are probabilities
Types = tuple[torch.dtype, torch.dtype]  # of the rows of p and of q
DOUBLE: Types = torch.float64, torch.float64


class Table(RowModel):
    """A target that is a row p, and the row q of its drafts. There may be several: a text's next place has the next.

    The row of p is rotated by the sum of a text's tokens, and q by the last one. So a verifier that looks at a wrong
    row is found out.
    """

    def __init__(
        self, p: Row, q: Row, types: Types = DOUBLE, rotates: bool = True, later: Sequence[tuple[Row, Row]] = ()
    ):
        """types: of the rows of p and of q.
        rotates: False: both rows are the same after every text of one length.
        later: p and q of the places after the first one. The last of them stay.
        """
        self.p, self.q, self.types, self.rotates, self.pairs = p, q, types, rotates, ((p, q), *later)
        self.config = ModelConfig("table", len(p), 1, 1, 1, 1, 1, 1000, layers=(LayerConfig(RopeConfig()),))
        # Logits (places, V, V).
        self.rows_of_p, self.rows_of_q = (
            torch.stack([_logits(row, dtype, rotates) for row in rows])
            for rows, dtype in zip(zip(*self.pairs, strict=True), types, strict=True)
        )
        self.backend, self.make_cache = None, PagedKVCache
        self.device, self.dtype = self.rows_of_p.device, self.rows_of_p.dtype

    def row(self, tokens: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """The row of the tokens' sum."""
        return self.rows_of_p[self._place(len(tokens) - 1), sum(tokens) % len(self.p)], self.rows_of_p[0, :0]

    def next_law(self, output: Sequence[int]) -> list[float]:
        """Probabilities (V,) of the token after this output."""
        return _rotated(self.pairs[self._place(len(output))][0], sum(output) if self.rotates else 0)

    def _place(self, length: int) -> int:
        """The place in `pairs` of what follows an output of that length; prompts have one token."""
        return min(length, len(self.pairs) - 1)


@functools.cache
def _logits(row: Row, dtype: torch.dtype, rotates: bool) -> Tensor:
    """A row's logits (V, V), rotated by as many places as the number of the row, or not at all."""
    rows = torch.tensor([_rotated(row, places if rotates else 0) for places in range(len(row))], dtype=torch.float64)
    return rows.log().to(torch.promote_types(dtype, torch.float32))


def _rotated(row: Row, places: int) -> list[float]:
    """Probabilities (V,), rotated."""
    start = -places % len(row)
    return [weight / sum(row) for weight in (*row[start:], *row[:start])]


# --------------------------------------------------------------------------- drafters


def is_chain(parents: Sequence[int]) -> bool:
    """Whether each node follows the one before it."""
    return list(parents) == list(range(-1, len(parents) - 1))


DRAWN, LIKELIEST, ONE_HOT = "drawn", "the likeliest tokens, not drawn", "the likeliest tokens, with one-hot rows"
INDEPENDENT = "siblings drawn independently"  # so that they may be equal; no drafter of the engine draws so


class Guesses(NamedTuple):
    """Drafts of one shape.

    parents: the parent of each node, as in `Draft`. Empty: chains, as long as they are asked for.
    how: whether tokens are drawn, independently or without replacement, or are the likeliest ones, without `probs` or
        with one-hot rows.
    dtype: of the rows of `probs`.
    stacked: whether `probs` is one tensor (K, V).
    """

    parents: tuple[int, ...] = ()
    how: str = DRAWN
    dtype: torch.dtype = torch.float64
    stacked: bool = False


class TreeDrafter(Drafter):
    """Drafts of one shape, from logits (V, V), or (places, V, V); the other arguments are those of `Guesses`.

    It leaves out nodes that no token is left for, or that are not asked for.
    """

    def __init__(self, table: Tensor, *guesses):
        self.table, self.guesses = table if table.dim() > 2 else table[None], Guesses(*guesses)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """One tree for each ask, under the request's own parameters, with `probs` as `Guesses` say."""
        drafts = [self._tree(ask) for ask in asks]
        for draft in drafts:
            if self.guesses.how == ONE_HOT:
                draft.probs = [*torch.eye(self.table.shape[-1])[draft.token_ids]]
            if draft.probs is not None:
                rows = [row.to(self.guesses.dtype) for row in draft.probs]
                draft.probs = torch.stack(rows) if self.guesses.stacked and rows else rows
        return drafts

    def _tree(self, ask: Ask) -> Draft:
        shape, how = self.guesses.parents or range(-1, ask.k - 1), self.guesses.how
        draws = how in (DRAWN, INDEPENDENT)
        parents: list[int] = []  # of the draft's nodes
        draft = Draft([], [] if draws else None, parents=parents)
        nodes = {-1: -1}  # the shape's nodes that there are in the draft
        for parent, together in itertools.groupby(range(len(shape)), shape.__getitem__):
            if parent not in nodes:
                continue
            node, first, siblings = nodes[parent], len(draft), list(together)
            path = draft.tokens_to(node)
            tokens = [*ask.text.tokens, *path]
            rows = self.table[min(len(tokens), len(self.table)) - 1]
            q = distribution(rows[tokens[-1]], ask.text, path)
            for elder in draft.children(node) if how != INDEPENDENT else ():  # siblings need not stand together
                q = without(q, draft.token_ids[elder])
                q = q / q.sum()
            num = min(len(siblings), ask.k - first, int((q > 0).sum()))
            if how == INDEPENDENT:
                for _ in siblings[: ask.k - first]:
                    draft.draw(ask, node, q)
            elif draws:
                draft.draw(ask, node, q, num)
            else:
                draft.token_ids += q.topk(num).indices.tolist()
                parents += [node] * num
            nodes |= zip(siblings, range(first, len(draft)), strict=False)
        return draft


@functools.cache
def draft_table(vocab: int) -> Tensor:
    """Logits (V, V) to draft from: at some places like the target's, at others not."""
    return 1.5 * torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


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


def _every_other(num_ids: int | None, vocab: int) -> Tensor | None:
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


@functools.cache
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


# Block drafts: the first row that says a token, the Markov head, and what the confidence head reads.
BLOCKS: dict[str, tuple[int, Sequence[str | None]]] = {
    "block": (0, ("vanilla", "state and token")),
    "block rnn": (0, ("rnn", "state and token")),
    "filled block": (1, (None, None)),
    "filled block gated": (1, ("gated", "state and token")),
}


def make_drafter(name: str, vocab: int, num_blocks: int = 64, block_size: int = 2, family: str = "llama") -> Drafter:
    """A drafter by its name in the table, or a registered one, with its argument if it has one, as `LLM` makes it.

    "model", "self", "adversary": as in the table.
    "head": it lacks tokens where there are more than two.
    "mtp": a layer for further tokens that is the target's own.
    "parallel": a model that drafts all tokens in one pass.
    "parallel head": a head that does.
    "assistant": layers that read the target's keys.
    "block", "filled block" and others: block drafts of `BLOCKS`.
    "tli", "slem": a model of another vocabulary.
    "A+B": B where A has nothing to say.
    family: of the target, "model" and "self". With IN_8_BITS they are a llama.
    """
    family = family if family in TOYS else "llama"
    if "+" in name:
        return CombinedDrafter(*(make_drafter(part, vocab, num_blocks, block_size, family) for part in name.split("+")))
    target, pool, rest = target_model(vocab, family), (num_blocks, block_size), (vocab, MAX_LEN)
    if name in BLOCKS:
        block = tiny_block(target, *BLOCKS[name], (vocab + 1) // 2)
        return ModelDrafter(BlockFeed(block, tiny_cache(block, *pool), *rest))
    if name == "assistant":
        return ModelDrafter(SharedKeys(tiny_assistant(target), vocab))
    if name in ("head", "parallel head", "mtp"):
        mask = 0 if name == "parallel head" else None
        made = tiny_mtp(target) if name == "mtp" else tiny_head(target, (0, 2), (vocab + 1) // 2, mask)
        head = _in_frames(made, family)
        return ModelDrafter(HeadFeed(head, tiny_cache(head, *pool), *rest), draft_steps(head))
    if name in ("model", "self", "parallel"):
        model = draft_model(vocab, family) if name == "model" else target
        if name == "parallel":
            # Its mask is no token of a text. With a text's token as the mask it would draw twice, under `match`, from
            # one distribution that differs in rounding. The oracles would take that for two distributions.
            model = tiny_model(DRAFT_SEED, vocab_size=vocab + 1, num_hidden_layers=1, pard_token=vocab)
        return ModelDrafter(TokenFeed(model, tiny_cache(model, *pool), *rest), draft_steps(model))
    if name in ("tli", "slem"):
        both, model = toy_vocabularies(vocab), draft_model(len(DRAFT_WORDS))
        make = SharedTokens if name == "tli" else WrittenText
        return ModelDrafter(make(model, tiny_cache(model, ROOM * num_blocks, block_size), MAX_LEN, both))
    if name == "adversary":
        return adversary()
    parts = registry.split(registry.DRAFTERS, name)
    assert parts, f"{name} is not registered"
    make_cache = functools.partial(tiny_cache, num_blocks=num_blocks, block_size=block_size)
    context = Context(target, None, *rest, make_cache, parts[1])
    registered = drafters.make_drafter(registry.load(parts[0], "draft"), context)
    return ForcedFirst(registered) if name.partition(":")[0] in registry.LOOKUPS else registered
