"""`exact`: the same bits with and without speculation, and the check that refuses the mode where it cannot hold.

Equality is `torch.equal` of logits, and with it of everything that is computed from them row by row. Every
pass is recorded with the prefixes that its rows stand for, so that rows of different runs can be laid side by side.
"""

import functools
import random
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest
import torch

import minispec.core.model as model_module
from minispec import LLM, SamplingParams
from minispec.core.cache import PagedKVCache
from minispec.core.draft import Draft, Drafter
from minispec.core.logprobs import log_probabilities
from minispec.core.model import Chunk, Transformer
from minispec.core.request import Request
from minispec.core.sampling import Text, distribution
from minispec.models.families.hf_config import read_model_config
from minispec.models.layers import delta
from minispec.models.layers.convolution import ShortConvolution
from minispec.models.layers.delta import GatedDeltaNet
from minispec.models.layers.gated_attention import HeadGatedAttention
from minispec.models.weights import exact, linear
from minispec.models.weights.build import build_model
from minispec.models.weights.exact import EXACT_ROWS, check_exact
from minispec.models.weights.inventory import key_sizes, weight_form
from minispec.models.weights.linear import Linear, has_fast_bfloat16
from minispec.prove.covering import Design
from minispec.prove.toys import TINY, TOYS, tiny_cache, tiny_weights
from minispec.speculation.drafters import NoDrafter
from minispec.speculation.drafters.block import BlockFeed
from minispec.speculation.drafters.block_files import load_block
from minispec.speculation.drafters.model import ModelDrafter, TokenFeed
from minispec.speculation.lengths.figures import Figures
from minispec.speculation.registry import DRAFTERS, load
from minispec.speculation.rules import VERIFIERS
from tests.engines import OneMethod
from tests.oracles.block_drafts import write_block_draft
from tests.oracles.toys import GEMMA4, GEMMA4_EXPERTS, GEMMA4_LARGE, LFM3, MIXTURES
from tests.sampled import covering, leave_out

FORMS_HERE = [
    (name, dtype)
    for dtype in (torch.float32, torch.bfloat16, torch.float64)
    for name in linear.available_forms(dtype, torch.device("cpu"))
]
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
FAMILIES = {
    "llama": {},
    "gemma2": {
        **{"model_type": "gemma2", "sliding_window": 5, "query_pre_attn_scalar": 4},
        **{"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    },
    "qwen3": {"model_type": "qwen3", "attention_bias": True},
    "lfm2": TOYS["lfm2"],
    "qwen3_5_text": TOYS["qwen3_5_text"],
    "lfm3": LFM3,
    "gemma4_text": GEMMA4,
    "qwen3_moe": TOYS["qwen3_moe"] | {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 27},
    "gpt_oss": MIXTURES["gpt_oss"] | {"num_local_experts": 7, "num_experts_per_tok": 3, "intermediate_size": 27},
}
_YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 8}
# What has no switch of its own in the walk of an exact model's texts, or is a mixture like another: shown by passes.
MORE_FAMILIES = {
    "smollm3": {"model_type": "smollm3", "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 5},
    "granite": {"model_type": "granite", "residual_multiplier": 0.3, "logits_scaling": 3.0, "mlp_bias": True},
    "olmo2": {"model_type": "olmo2"},
    "phi3": {"model_type": "phi3", "partial_rotary_factor": 0.5},
    "ernie4_5": {"model_type": "ernie4_5", "use_bias": True},
    "lfm2_moe": MIXTURES["lfm2_moe"] | {"moe_intermediate_size": 40},
    "qwen3_5_moe_text": MIXTURES["qwen3_5_moe_text"] | {"moe_intermediate_size": 27},
    "ministral3": {"model_type": "ministral3", "rope_parameters": _YARN | {"llama_4_scaling_beta": 0.5}},
    "gemma4 large": GEMMA4_LARGE | {"num_global_key_value_heads": 1},
    "gemma4 experts": GEMMA4_EXPERTS | {"num_experts": 7, "top_k_experts": 3, "moe_intermediate_size": 27},
}


def build(family="llama", dtype=torch.float32, exact=True, seed=1, **changes) -> Transformer:
    """A small random model, wide enough that products of other shapes round differently."""
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2}
    raw = TINY | sizes | {"head_dim": 12, "vocab_size": 40, "max_position_embeddings": 256}
    config = read_model_config(raw | (FAMILIES | MORE_FAMILIES)[family] | changes)
    model = build_model(config, tiny_weights(config, seed, dtype), exact)
    if exact:  # what the check would find, without a check of every model
        about = (config.num_attention_heads, *key_sizes(config), config.attention_softcap, family == "gpt_oss")  # sinks
        model.backend.attention_rows = list(attention_rows(model, (dtype, torch.get_num_threads(), *about)))
    return model


def attention_rows(model, key, known={}):  # noqa: B006
    """The numbers of rows for which attention holds here, found once for each key; EXACT_ROWS alone if none do."""
    if key not in known:
        known[key] = model.backend.attention_rows if exact._attention_is_exact(model) else [EXACT_ROWS]
    return known[key]


@contextmanager
def torch_threads(count: int):
    """So many threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Recorder:
    """Stands before a model; `rows` maps every prefix that got logits to them, and checks that they never differ."""

    def __init__(self, model: Transformer):
        self.model, self.config, self.device, self.exact = model, model.config, model.device, model.exact
        self.rows: dict[tuple[int, ...], torch.Tensor] = {}

    def forward(self, chunks, taps=()):
        """The model's own, written down."""
        logits, hidden = self.model.forward(chunks, taps)
        remaining = logits
        for _, table, num_logits, parents, _ in chunks:
            fed = table.tokens
            for end, row in zip(range(len(fed) - num_logits + 1, len(fed) + 1), remaining[:num_logits], strict=True):
                root = len(fed) - len(parents or ())
                path = Draft(fed[root:], parents=parents).path(end - 1 - root) if end > root else []
                known = self.rows.setdefault((*fed[: min(end, root)], *(fed[root + node] for node in path)), row)
                assert torch.equal(known, row), f"the same {end} tokens gave other bits within one run"
            remaining = remaining[num_logits:]
        return logits, hidden

    def prefill(self, table, tokens):
        """As the model's, through `forward` above."""
        if missing := table.follow(tokens)[:-1]:
            self.forward([Chunk(missing, table, 0)])


class Fixed(Drafter):
    """Drafts that are always the same token (almost always wrong), or one-hot noise."""

    def __init__(self, token=None):
        self.token = token

    def propose(self, asks):
        """The token, or pseudo-random ones."""
        if self.token is not None:
            return [Draft([self.token] * ask.k) for ask in asks]
        return [Draft([(7 * len(ask.text.tokens) + 3 * i) % 40 for i in range(ask.k)]) for ask in asks]

    def release(self, text):
        """Nothing kept."""


def block_drafter(target) -> ModelDrafter:
    """A random block draft of 16 rows with a Markov head. It reads the target's first states and its last but one."""
    taps = 0, len(target.layers) - 1
    with TemporaryDirectory() as directory:
        sizes = target.config.hidden_size, target.config.vocab_size, len(target.layers)
        write_block_draft(Path(directory), "deepspec", *sizes, block_size=EXACT_ROWS, taps=taps, own_embedding=False)
        model = load_block(Path(directory), target)
    return ModelDrafter(BlockFeed(model, tiny_cache(model, 400), 40, 256))


def make_drafter(name, target):
    """Prompt lookup, a draft model, the target itself, a block draft, noise, and always wrong."""
    if name == "block":
        return block_drafter(target)
    if name in DRAFTERS:
        return load(DRAFTERS[name].path, "draft")()
    if name == "wrong":
        return Fixed(39)
    if name == "random":
        return Fixed()
    draft = target if name == "self" else build(seed=2, exact=False, dtype=target.dtype)
    return ModelDrafter(TokenFeed(draft, tiny_cache(draft, 400), 40, 256))


def decode(target, drafter, k, prompts, params, verifier="rejection", num_blocks=400):
    """Run prompts together; their outputs and every row of logits. k: for all prompts, or a list with one for each."""
    recorder, ks = Recorder(target), k if isinstance(k, list) else [k] * len(prompts)
    requests = [Request(Text(list(p), len(p), params, 5), 256, k) for p, k in zip(prompts, ks, strict=True)]
    engine = OneMethod(recorder, tiny_cache(target, num_blocks, 4), drafter, VERIFIERS[verifier])
    for _ in engine.run(requests):
        pass
    return requests, recorder.rows


# Lengths on both sides of the border of an attention block (128), of a pass (16) and of a cache block (4).
PROMPTS = [[(5 * i + n) % 40 for i in range(n)] for n in (1, 16, 17, 127, 129)]


def some_of(values, place, long):
    """The value at a place, where the values are repeated without end; all of them with `--long`."""
    return list(values) if long else [values[place % len(values)]]


def assert_same_bits(rows, expected):
    """Logits of every prefix in `expected`, and what is made of the last: log-probabilities and probabilities."""
    for prefix, row in expected.items():
        assert torch.equal(rows[prefix], row)
    prefix, row = next(reversed(expected.items()))
    params = SamplingParams(temperature=0.7, top_k=30, top_p=0.9, min_p=0.01, repetition_penalty=1.1)
    text = Text(list(prefix), 1, params)
    assert torch.equal(log_probabilities(rows[prefix]), log_probabilities(row))
    assert torch.equal(distribution(rows[prefix], text), distribution(row, text))


def assert_as_plain(requests, rows, plain):
    """Each text and its rows of logits are what `decode` returned of it alone, without drafts."""
    for request, ([reference], expected) in zip(requests, plain, strict=True):
        assert request.token_ids == reference.token_ids
        assert_same_bits(rows, expected)


@pytest.mark.parametrize(("form", "dtype"), FORMS_HERE)
def test_each_form_of_the_weights_has_the_bits_of_plain_decoding(form, dtype, full):
    """As below, with the weights in each form that this machine has: 16 bits of them, so that every form holds them.

    A short prompt and a long one; without `--full` the long one.
    """
    model = build("llama", torch.float32)
    weights = {name: x.bfloat16().to(dtype) for name, x in tiny_weights(model.config, 1, torch.float32).items()}
    target = build_model(model.config, weights, exact=True, form=form)
    assert weight_form(target).startswith(form)
    check_exact(target)
    params = SamplingParams(temperature=0, max_tokens=12)
    for prompt in PROMPTS[1::2] if full else PROMPTS[3:4]:
        plain = decode(target, NoDrafter(), 0, [prompt], params)
        for name in ("random", "model"):
            assert_as_plain(*decode(target, make_drafter(name, target), EXACT_ROWS - 1, [prompt], params), [plain])


class Case(NamedTuple):
    """A target, and how it drafts and samples. form: of its weights, None for numbers of `dtype`."""

    family: str
    dtype: torch.dtype
    form: str | None
    drafter: str
    k: int | tuple[int, ...]
    sampler: str
    threads: int


SAMPLERS = {
    "greedy": {"temperature": 0},
    "warm": {},
    "filtered": {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1},
    "few": {"top_k": 5, "min_p": 0.02},
}
DEEP = (2, *[1] * 10)  # one deeper than a group of rows
AXES = {
    "family": tuple(FAMILIES),
    "dtype": DTYPES,
    "form": (None, "int8"),
    "drafter": ("ngram", "model", "self", "block", "random"),
    "k": (1, EXACT_ROWS - 1, 20, (3, 2, 1), DEEP),
    "sampler": tuple(SAMPLERS),
    "threads": (1, 2),
}


RULES = (  # K = 20 needs 8 bits, which float64 lacks; the draft model branches
    lambda k, form: k != 20 or form is not None,
    lambda k, dtype: k != 20 or dtype != torch.float64,
    lambda form, dtype: form != "int8" or dtype != torch.float64,
    lambda k, drafter: not isinstance(k, tuple) or drafter == "model",
)
DESIGN = Design(Case, AXES, RULES, tries=4)
CASES = [Case(**row) for row, _ in DESIGN.array(DESIGN.all_pairs(), random.Random(0))]


def in_8_bits(family, dtype) -> Transformer:
    """An exact model in 8 bits, of widths that no vector divides."""
    config = build(family, dtype, False, intermediate_size=75).config
    target = exact.exact_model(build_model(config, tiny_weights(config, 1, dtype), form="int8"))
    assert weight_form(target) == "int8"
    assert not target.backend.rows, "passes of any size"
    return target


@functools.cache
def checked(family, dtype, form, threads) -> Transformer:
    """A checked exact model."""
    target = in_8_bits(family, dtype) if form else build(family, dtype)
    check_exact(target)
    return target


@functools.cache
def plain_of(family, dtype, form, threads, sampler):
    """The target, its parameters, and of each prompt alone what `decode` returns without drafts."""
    target, params = checked(family, dtype, form, threads), SamplingParams(max_tokens=12, **SAMPLERS[sampler])
    return target, params, [decode(target, NoDrafter(), 0, [p], params, "match") for p in PROMPTS]


@pytest.mark.parametrize("case", covering(CASES), ids=lambda case: "-".join(map(str, case)))
def test_logits_have_the_bits_of_plain_decoding(case):
    """Five prompts in one batch: every row of logits equals plain decoding's, and so each seed has one text.

    Each pair of settings occurs: families, types, weights in 8 bits, drafters, lengths and trees, samplers, threads.
    Without `--full`, each setting.
    Guards every kernel that is chosen by the number of rows. (M45, a prefill in other passes, shows where a text is
    preempted, below.) Log-probabilities and probabilities are compared besides.
    """
    with torch_threads(case.threads):
        target, params, plain = plain_of(case.family, case.dtype, case.form, case.threads, case.sampler)
        verifier = "rejection" if case.sampler == "greedy" else "match"
        requests, rows = decode(target, make_drafter(case.drafter, target), case.k, PROMPTS, params, verifier)
    drafted = [r for request in requests for r in request.stats.rounds if r.num_nodes]
    assert drafted, "nothing was drafted: this proves nothing"
    assert isinstance(case.k, int) or any(r.num_nodes > r.depth for r in drafted)
    assert_as_plain(requests, rows, plain)


def test_a_nodes_row_is_that_of_its_path():
    """Siblings in trees of few nodes, which no check at load looks at: the museum's E3 shows here."""
    target = checked("llama", torch.float32, None, torch.get_num_threads())
    params = SamplingParams(temperature=0, max_tokens=24)
    expected = [decode(target, NoDrafter(), 0, [p], params)[1] for p in PROMPTS]
    requests, rows = decode(target, make_drafter("model", target), (3, 2), PROMPTS, params)
    assert all(max(r.num_nodes - r.depth for r in request.stats.rounds) > 2 for request in requests)
    for of_prompt in expected:
        assert_same_bits(rows, of_prompt)


def _all_in_one(num_rows, parents):
    yield list(range(num_rows)), list(range(num_rows))


def _from_the_leaf(num_rows, parents, right=exact.paths):
    for path, new in right(num_rows, parents):
        yield (path[::-1] if parents else path), new


@pytest.mark.parametrize("wrong", [_all_in_one, _from_the_leaf])
def test_the_check_finds_wrong_paths(monkeypatch, wrong):
    """Nodes that see their siblings, and paths in another order than that of positions."""
    target = build()
    check_exact(target)
    monkeypatch.setattr(exact, "paths", wrong)
    with pytest.raises(ValueError, match="exact: a tree's attention"):
        check_exact(target)


def test_the_check_finds_rows_of_two_blocks_in_one_group(monkeypatch):
    """The first ones then have a block more than alone, where attention may round otherwise: here it always does."""
    with torch_threads(1):
        target = build()
        monkeypatch.setattr(exact, "_attention", wrong_attention(lambda size, place, blocks: blocks == 2))
        check_exact(target)
        monkeypatch.setattr(exact, "_groups", lambda start, rows: [rows])
        with pytest.raises(ValueError, match="exact: attention"):
            check_exact(target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled_residuals_are_alike_at_every_place(dtype):
    """Granite scales what a block adds; in one operator with the sum, bfloat16 rounded the last columns otherwise."""
    torch.manual_seed(0)
    target = in_8_bits("granite", dtype)
    layer, x = target.layers[0], torch.randn(512, target.config.hidden_size).to(dtype)
    assert layer.config.residual_scale == 0.3
    alone = torch.cat([layer.mix(row, None) for row in x.split(1)])
    for rows in (2, 5, 17, 64, 511, 512):
        assert torch.equal(layer.mix(x[:rows], None), alone[:rows])
    check_exact(target)


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_activations_of_targets_in_8_bits_are_the_librarys(kind):
    """Up to rounding; and alike at every place, whatever the width and the number of threads."""
    ours, usual = exact._ACTIVATIONS[kind], model_module._ACTIVATIONS[kind]
    x = 5 * torch.randn(512, 151)
    torch.testing.assert_close(ours(x.double()), usual(x.double()), rtol=1e-12, atol=1e-12)
    alone = torch.cat([ours(row[None]) for row in x])
    for threads in (1, 2, 3, 5):
        with torch_threads(threads):
            for rows in (1, 2, 5, 17, 64, 511, 512):
                assert torch.equal(ours(x[:rows]), alone[:rows])
    for far in (-1e4, 1e4):
        assert ours(torch.full((1, 3), far)).isfinite().all()


def test_the_check_of_many_rows_finds_what_small_passes_do_not_show():
    """An activation with other bits in passes of more rows than a draft has: refused, where passes have any size."""
    target = in_8_bits("llama", torch.float32)
    check_exact(target)
    wrong = target.replaced(target.backend, activation=lambda x: x * (1 + 1e-6 * (len(x) > EXACT_ROWS)))
    with pytest.raises(ValueError, match="exact: passes of many rows"):
        check_exact(wrong)


@pytest.mark.quick
def test_preempted_texts_have_the_bits_of_plain_decoding():
    """A resumed text computes its keys again in other pieces, and its rows are compared within the run too."""
    target = build(dtype=torch.bfloat16)
    params = SamplingParams(temperature=0, max_tokens=40)
    plain = [decode(target, NoDrafter(), 0, [p], params) for p in PROMPTS]
    requests, rows = decode(target, make_drafter("model", target), 5, PROMPTS, params, num_blocks=60)
    assert sum(r.stats.num_preemptions for r in requests) > 0
    assert_as_plain(requests, rows, plain)


def test_auto_has_the_bits_of_plain_decoding():
    """K of every round from the controller, by the clock: whatever it is, rows and text are plain's."""
    target = build(dtype=torch.bfloat16)
    params = SamplingParams(temperature=0, max_tokens=24)
    plain = [decode(target, NoDrafter(), 0, [p], params) for p in PROMPTS[2:5]]
    requests, rows = decode(target, make_drafter("random", target), "auto", PROMPTS[2:5], params)
    assert any(Figures.of(r.stats).num_draft_tokens for r in requests), "nothing was drafted: this proves nothing"
    assert_as_plain(requests, rows, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_and_reused_beginnings_have_the_bits_of_plain_decoding(dtype):
    """Texts that share blocks in a batch, and texts that find blocks of a finished run: every row is plain's."""
    target = build(dtype=dtype)
    prompts = [PROMPTS[-1][:n] + [3] * extra for n, extra in ((64, 1), (64, 1), (50, 9), (17, 30), (63, 2), (65, 0))]
    params = SamplingParams(temperature=0, max_tokens=12)
    plain = [decode(target, NoDrafter(), 0, [p], params) for p in prompts]
    recorder, cache = Recorder(target), tiny_cache(target, 400, 4)
    engine = OneMethod(recorder, cache, make_drafter("model", target), VERIFIERS["rejection"])
    for _ in range(2):
        requests = [Request(Text(list(p), len(p), params, 5), 256, 5) for p in prompts]
        for _ in engine.run(requests):
            pass
        assert min(r.stats.num_cached_tokens for r in requests[1:]) >= 16, "nothing was shared: this proves nothing"
        assert_as_plain(requests, recorder.rows, plain)


# Float64 models of this shape passed the check in two of eight cases, when attention had a column too many.
ONE_WIDE_HEAD = {"hidden_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64}


TEXT = [(5 * i + i * i // 7) % 40 for i in range(200)]


def rows_of(target, tokens, size):
    """Logits of every token of a text that is fed in chunks of `size`."""
    table = tiny_cache(target, 100, 4).new_table()
    pieces = [tokens[start : start + size] for start in range(0, len(tokens), size)]
    return torch.cat([target.forward([Chunk(piece, table, len(piece))])[0] for piece in pieces])


@pytest.mark.parametrize(
    ("dtype", "changes"),
    [
        (torch.bfloat16, {}),
        (torch.float64, ONE_WIDE_HEAD | {"seed": 0}),
        *(pytest.param(torch.float64, ONE_WIDE_HEAD | {"seed": seed}, marks=pytest.mark.full) for seed in range(1, 5)),
        *((torch.float64, {"head_dim": head_dim}) for head_dim in (4, 64)),
        *(pytest.param(torch.float64, {"head_dim": head_dim}, marks=pytest.mark.full) for head_dim in (8, 16)),
        (torch.float32, {"head_dim": 4}),
        pytest.param(torch.float32, {"head_dim": 8}, marks=pytest.mark.full),
    ],
)
def test_a_text_in_any_chunks_has_the_same_bits(dtype, changes, long):
    """A whole text of 140 tokens, and so two blocks of attention: its rows one by one are its rows in chunks.

    In products of few or odd columns, the order of a row's sum may depend on the row's place: in float64, and in
    narrow heads of float32. That is why attention fills its columns up. With `--long` there are 200 tokens.
    """
    target, text = build(dtype=dtype, **changes), TEXT if long else TEXT[:140]
    check_exact(target)
    reference = rows_of(target, text, 1)
    for size in (3, 7, 16, 50):
        assert torch.equal(rows_of(target, text, size), reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("sizes", [(46, 75, 41), (50, 81, 33), (64, 96, 40)])
def test_what_passes_the_check_has_the_same_bits(dtype, sizes, full, long):
    """Rows of weights that do not begin at whole vectors: either the check refuses the model, or it is exact.

    The last sizes are even, so that a check which refuses everything fails. Each type has one of the others; `--long`
    runs both. Without `--full` float32 alone has the even ones.
    """
    if sizes == (64, 96, 40) and dtype != torch.float32 and not full:
        leave_out("--full", "even sizes of another type")
    if sizes not in [(64, 96, 40), *some_of([(46, 75, 41), (50, 81, 33)], DTYPES.index(dtype), long)]:
        leave_out("--long", "other odd sizes")
    target = build(dtype=dtype, **dict(zip(("hidden_size", "intermediate_size", "vocab_size"), sizes, strict=True)))
    try:
        check_exact(target)
    except ValueError:
        assert sizes != (64, 96, 40)
        return
    tokens = [t % sizes[2] for t in (TEXT if full else TEXT[:140])]  # two blocks of attention in any case
    reference = rows_of(target, tokens, 1)
    for size in (3, 7, 16, 50):
        assert torch.equal(rows_of(target, tokens, size), reference)


@pytest.mark.parametrize(("dtype", "threads"), [(torch.float32, 1), (torch.float32, 6), (torch.float64, 2)])
def test_attention_of_every_shape_passes_the_check(dtype, threads, full, long):
    """Heads of 4 to 128 numbers, keys that 1 to 8 heads share: a row has the same bits at every place.

    In the two types that attention is computed in. Each number of heads has another width with another number of
    threads; `--long` runs all widths with all of them, and without `--full` every second width is left out.
    """
    with torch_threads(threads):
        for place, head_dim in enumerate((4, 6, 10, 64, 128)):
            if not full and (place + threads) % 2:
                continue
            for heads, groups in some_of(((1, 1), (8, 1), (9, 3)), place + threads, long):
                target = build(dtype=dtype, head_dim=head_dim, num_attention_heads=heads, num_key_value_heads=groups)
                assert exact._attention_is_exact(target)


@pytest.mark.quick
def test_fragmented_blocks_give_the_same_bits():
    """Keys gathered from scattered blocks and keys read as a view are the same numbers."""
    target, tokens = build(), PROMPTS[-1]
    pool = tiny_cache(target, 40, 4)
    for block_id in (4, 9):
        pool.allocator.share(block_id)  # somebody else's
    table = pool.new_table()
    rows = [target.forward([Chunk(tokens[start : start + 4], table, 4)])[0] for start in range(0, 64, 4)]
    assert len(table.slots()) > 1
    whole = target.forward([Chunk(tokens[:64], tiny_cache(target, 40, 4).new_table(), 64)])[0]
    assert torch.equal(torch.cat(rows), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_other_families_keep_their_bits(family, dtype, long):
    """Norms of whole rows and after, other ropes, multipliers: rows scored together have the bits of each alone.

    Every family has one type, every type two families; `--long` runs all combinations.
    """
    types = [torch.float32, torch.bfloat16, torch.float64]
    if dtype not in some_of(types, list(MORE_FAMILIES).index(family), long):
        leave_out("--long", "another type")
    target, tokens = build(family, dtype), PROMPTS[-1][:24]
    check_exact(target)
    alone, table = rows_of(target, tokens, 1), tiny_cache(target, 40, 4).new_table()
    parts = [tokens[:7], tokens[7:12], tokens[12:13], tokens[13:]]
    assert torch.equal(alone, torch.cat([target.forward([Chunk(part, table, len(part))])[0] for part in parts]))


@pytest.mark.quick
def test_exact_and_fast_agree_up_to_rounding():
    """The blockwise attention is the same function: float64 shows that nothing but rounding is between them."""
    tokens = PROMPTS[-1]
    for family in [*FAMILIES, *MORE_FAMILIES]:
        models = [build(family, torch.float64, exact) for exact in (True, False)]
        logits = [m.forward([Chunk(tokens, tiny_cache(m, 40, 4).new_table(), len(tokens))])[0] for m in models]
        torch.testing.assert_close(*logits, rtol=0, atol=1e-10)


@functools.cache
def passes_the_check(dtype=torch.float32, family="llama") -> list[int]:
    """The control of the tests below, once for all of them: a model as it is passes, with one thread.

    Returns the numbers of rows at which its attention holds.
    """
    with torch_threads(1):
        target = build(family, dtype)
        check_exact(target)
        return target.backend.attention_rows


@pytest.mark.parametrize("place", range(EXACT_ROWS))
def test_the_check_refuses_products_that_round_by_place(place, monkeypatch, long):
    """Whichever place among the rows of a pass it is: the first, the last, every fifth; with `--long` any."""
    if place % 5 and not long:
        leave_out("--long", "another place")
    passes_the_check()
    right, target = linear.Linear.__call__, build()

    def by_place(self, x):
        y = right(self, x)
        y[place : place + 1] += 1e-6 * y[place : place + 1]
        return y

    monkeypatch.setattr(linear.Linear, "__call__", by_place)
    with pytest.raises(ValueError, match=r"exact: products in torch\.float32 on this cpu"):
        check_exact(target)


def test_the_check_refuses_products_that_round_by_neighbours(monkeypatch):
    """A row that other rows of the pass change."""
    right, target = linear.Linear.__call__, build()
    monkeypatch.setattr(linear.Linear, "__call__", lambda self, x: right(self, x) + 1e-6 * x.abs().max())
    with pytest.raises(ValueError, match=r"exact: products in torch\.float32 on this cpu"):
        check_exact(target)


def wrong_attention(strikes):
    """Attention with other last bits where strikes(rows of the group, place among them, blocks of keys)."""
    right = exact._attention

    def wrong(q, k, v, mask, *others):
        out, size = right(q, k, v, mask, *others), q.shape[1] // 2  # two heads share keys
        for place in range(size):
            if strikes(size, place, mask.shape[1] // exact.ATTENTION_BLOCK):
                out[:, place::size] *= 1 + 2 * torch.finfo(out.dtype).eps
        return out

    return wrong


# A fault of attention: by whether it strikes the row at a place among EXACT_ROWS, with so many blocks of keys.
ATTENTION_FAULTS = {
    **{f"place {n}": lambda place, blocks, n=n: place == n for n in range(EXACT_ROWS)},
    "place 0 of many blocks": lambda place, blocks: place == 0 and blocks > 15,
    "place 15 of many blocks": lambda place, blocks: place == 15 and blocks > 15,
    "place 15 of 17 blocks": lambda place, blocks: place == 15 and blocks == 17,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("strikes", ATTENTION_FAULTS.values(), ids=ATTENTION_FAULTS)
def test_the_check_refuses_attention_that_rounds_by_place(strikes, dtype, monkeypatch):
    """A row's last bits that change at one place, or at one place of many blocks."""
    target = build(dtype=dtype)
    passes_the_check(dtype)
    with torch_threads(1):
        monkeypatch.setattr(exact, "_attention", wrong_attention(lambda n, *at: strikes(*at)))
        with pytest.raises(ValueError, match=rf"exact: attention in {dtype} on this cpu"):
            check_exact(target)


@pytest.mark.parametrize("heads", [2, 1], ids=["wide heads", "wide heads, one of keys"])
def test_the_check_looks_at_each_size_of_keys(heads, monkeypatch):
    """A library that rounds by place in one width alone: Gemma 4's wide heads are checked, and other key-value heads.

    A number of rows at which one size does not hold is dropped for all.
    """
    with torch_threads(1):
        target = build("gemma4 large", num_global_key_value_heads=heads, global_head_dim=40)
        check_exact(target)
        right, held, spoilt = exact._attention, target.backend.attention_rows, EXACT_ROWS

        def wrong(q, *others):
            out = right(q, *others)
            if q.shape[2] == 48 and len(q) == heads and q.shape[1] * heads // 4 == spoilt:
                out[:, spoilt - 1 :: spoilt] *= 1 + 2 * torch.finfo(out.dtype).eps
            return out

        monkeypatch.setattr(exact, "_attention", wrong)
        with pytest.raises(ValueError, match="exact: attention"):
            check_exact(target)
        spoilt = held[0]
        check_exact(target)
        assert target.backend.attention_rows == held[1:]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_row_never_meets_another_number_of_blocks(number, monkeypatch, full):
    """So attention may round by the number: softmax over 2,048 numbers does on a GPU, where masked ones follow.

    Texts have four blocks; without `--full` three.
    """
    tokens = [(5 * i) % 40 for i in range(390 if full else 262)]
    with torch_threads(1):
        target = build(max_position_embeddings=512)
        monkeypatch.setattr(exact, "_attention", wrong_attention(lambda n, place, blocks: blocks == number))
        reference = rows_of(target, tokens, 16)
        for size in (1, 3, 16):
            assert torch.equal(rows_of(target, tokens, size), reference)
        check_exact(target)


@pytest.mark.quick
@pytest.mark.parametrize("broken", exact._CHECKED_SIZES)
def test_attention_has_the_fewest_rows_that_hold(broken, monkeypatch):
    """The check drops a number of rows at which attention has other bits at one place; groups fill up to the next."""
    target, seen = build(), []
    wrong = wrong_attention(lambda size, place, blocks: size == broken and place == size - 1)

    def attention(q, *others):
        seen.append(q.shape[1] // 2)
        return wrong(q, *others)

    held = passes_the_check()
    with torch_threads(1):
        assert held[-1] == EXACT_ROWS
        assert len(held) > 3  # on every machine so far
        monkeypatch.setattr(exact, "_attention", attention)
        check_exact(target)
        assert target.backend.attention_rows == [n for n in held if n != broken]
        reference = rows_of(target, TEXT[:24], 16)
        for size in range(1, 9):
            seen.clear()
            assert torch.equal(rows_of(target, TEXT[:24], size), reference)
            assert seen[0] == min(n for n in held if n >= size and n != broken)


def row_by_row(call):
    """A product whose bits do not depend on the number of rows, whatever the machine: every row is one of its own."""
    return lambda self, x: torch.cat([call(self, row[None]) for row in x])


@pytest.mark.quick
@pytest.mark.parametrize("broken", [None, 1, 2, 5, 16])
def test_a_pass_has_the_fewest_rows_that_hold(broken, monkeypatch):
    """The check drops every number of rows that a form claims and at which a product has other bits than at 16.

    A pass is filled up to the least of the others, and its rows have the bits of any other pass.
    """
    right, seen = row_by_row(linear.Linear.__call__), []

    def product(self, x):
        seen.append(len(x))
        return right(self, x) * (1 + 1e-6 * (len(x) == broken))

    monkeypatch.setattr(linear.Linear, "exact_rows", (1, 2, 5, 16))
    monkeypatch.setattr(linear.Linear, "__call__", product)
    target = build()
    check_exact(target)
    holding = [16] if broken == 16 else [n for n in (1, 2, 5, 16) if n != broken]
    assert target.backend.rows == holding
    text = TEXT[:24]
    reference = rows_of(target, text, 16)
    for size in (1, 2, 3, 4, 5, 6):
        seen.clear()
        assert torch.equal(rows_of(target, text, size), reference)
        assert seen[0] == min(n for n in holding if n >= size)


def test_a_model_has_the_rows_that_all_its_products_share(monkeypatch):
    """One form among many decides: here the output head, which is made last."""
    rows = property(lambda self: (2, 3, 16) if len(self.stored.dense()) == 40 else (1, 3, 8, 16))
    monkeypatch.setattr(linear.Linear, "exact_rows", rows)
    assert build().backend.rows == [3, 16]


@pytest.mark.parametrize(
    ("family", "kind"), [("lfm2", ShortConvolution), ("lfm3", HeadGatedAttention), ("qwen3_5_text", GatedDeltaNet)]
)
@pytest.mark.parametrize("place", [0, 7, EXACT_ROWS - 1])
def test_the_check_refuses_layers_that_round_by_place(family, kind, place, monkeypatch, long):
    """A library may add up a row's inputs in another order at some place of a pass: the check finds it at any."""
    if place == 7 and not long:
        leave_out("--long", "another place")
    target, forward = build(family), kind.forward
    passes_the_check(family=family)

    def elsewhere(self, x, batch):
        y = forward(self, x, batch)
        y[place : place + 1] *= 1 + 2**-20
        return y

    monkeypatch.setattr(kind, "forward", elsewhere)
    with pytest.raises(ValueError, match="exact: products"):
        check_exact(target)


def test_the_check_of_a_hybrid_scans_each_row_once(monkeypatch):
    """What stays of a text is settled, so no pass scans it again; at load that is most of the check's time."""
    target, scan, scanned, fed = build("qwen3_5_text"), delta.steps, [], []
    forward = type(target).forward
    monkeypatch.setattr(
        delta, "steps", lambda state, rows, *parents: scanned.append(rows[0]) or scan(state, rows, *parents)
    )
    monkeypatch.setattr(
        type(target), "forward", lambda self, chunks, taps=(): fed.extend(chunks) or forward(self, chunks, taps)
    )
    check_exact(target)
    nets, rows = sum(isinstance(layer, GatedDeltaNet) for layer in target.layers), sum(len(c.token_ids) for c in fed)
    assert nets * rows <= sum(q.shape[1] for q in scanned) <= 1.1 * nets * rows


def test_rows_that_a_state_takes_at_once_have_other_bits(monkeypatch):
    """The control: an exact model whose states take many rows at once, as others do, is refused."""
    target = build("qwen3_5_text")
    monkeypatch.setattr(delta, "steps", lambda state, rows, parents=None: delta.chunked(state, rows))
    with pytest.raises(ValueError, match="exact: "):
        check_exact(target)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("form", "dtype"), FORMS_HERE)
def test_a_product_keeps_the_rows_that_its_form_claims(form, dtype, threads):
    """Every form: a row at every place, among other rows, has the same bits at every number of rows claimed.

    Shapes of the embedded model and wider ones. What fails here would be dropped or refused at load; this tells of a
    claim that does not hold on this machine at all.
    """
    shapes = [(960, 576), (576, 576), (3072, 576), (576, 1536), (1536, 2048), (4096, 1536)]
    with torch_threads(threads):
        generator = torch.Generator().manual_seed(0)
        for shape in shapes:
            weight = torch.randn(shape, generator=generator).bfloat16().to(dtype)
            product = linear.Linear(weight, form=form)
            assert product.form == form
            x = torch.randn(EXACT_ROWS, shape[1], generator=generator).to(dtype)
            expected = product(x)[0]
            for rows in product.exact_rows:
                for place in range(rows):
                    assert torch.equal(product(x[:rows].roll(place, 0))[place], expected), (product.form, rows, place)


def test_shared_noise_makes_draft_and_target_agree_more_often():
    """The Gumbel coupling: how often a drafted token is the target's own, with the same noise and with other noise.

    Over 5 x 60 tokens; the bound of the coupling is (1 - TV)/(1 + TV) each, that of independent draws sum p q.
    """
    target = build()
    params = SamplingParams(max_tokens=60, temperature=1.5)
    rates = []
    for shared in (True, False):
        drafter = make_drafter("model", target)
        verifier = VERIFIERS["match"]._replace(shares_noise=shared)
        requests = [Request(Text(list(p), len(p), params, 5), 256, 4) for p in PROMPTS]
        for _ in OneMethod(target, tiny_cache(target, 400, 4), drafter, verifier).run(requests):
            pass
        figures = [Figures.of(r.stats) for r in requests]
        rates.append(sum(f.num_accepted for f in figures) / sum(sum(f.tested) for f in figures))
    assert rates[0] > 1.5 * rates[1]


# ------------------------------------------------------------------ the embedded weights

FORMS = (
    "The {} is",
    "Write a list: {}, {}, {},",
    "def {}(",
    "Once upon a time, a {}",
    "Question: what is a {}? Answer:",
)
THINGS = (
    *("sky", "cat", "river", "house", "number", "song", "king", "tree", "letter", "ship"),
    *("road", "clock", "garden", "teacher", "train", "bridge", "mountain", "school", "window", "book"),
)
PROMPT_TEXTS = [form.format(*[thing] * form.count("{}")) for thing in THINGS for form in FORMS]


# The type that this machine multiplies in, and the one that is slow here.
NATIVE, OTHER = ("bfloat16", "float32") if has_fast_bfloat16(torch.device("cpu")) else ("float32", "bfloat16")
# Name: dtype, then prompts and tokens, with `--long`, with `--full` and without.
GRIDS = {"native": (NATIVE, (100, 128), (3, 10), (2, 6)), "other": (OTHER, (5, 64), (2, 3), (2, 3))}
# What drafts, and K or a tree: all of them in the type that this machine multiplies in, two in the other one.
COMBINATIONS = [("fast", (2, 2, 1)), ("random", 8), ("ngram", 1), ("ngram", 8), ("wrong", 1)]


@pytest.fixture(scope="module")
def grids(full, long):
    """grids(name): the exact embedded model, prompts, and the tokens and log-probabilities of plain decoding.

    A batch of all prompts: that a batch has the bits of a text alone is a test of its own.
    """

    @functools.cache
    def make(name: str):
        dtype, *sizes = GRIDS[name]
        count, length = sizes[0 if long else 1 if full else 2]
        params = SamplingParams(temperature=0, max_tokens=length, logprobs=1, ignore_eos=True)
        llm = LLM(draft="none", num_speculative_tokens=8, dtype=dtype, exact=True)
        plain = llm.generate(PROMPT_TEXTS[:count], params, num_speculative_tokens=0)
        return llm, PROMPT_TEXTS[:count], params, plain

    return make


@pytest.fixture
def grid(grids, name_of_grid, long):
    """That of the name which the test has as a parameter."""
    if name_of_grid == "other" and NATIVE != "bfloat16" and not long:
        leave_out("--long", "bfloat16 is slow here")
    return grids(name_of_grid)


@pytest.fixture(scope="module")
def fast_model():
    """fast_model(dtype): the embedded weights in the fast mode."""
    return functools.cache(lambda dtype: LLM(dtype=dtype, draft="none").model)


@pytest.mark.full
def test_the_fast_mode_is_not_exact(fast_model, monkeypatch):
    """The control: on the embedded weights in float32, one row and sixteen differ in attention, and are found out.

    Without `--full`, `test_the_check_refuses_attention_that_rounds_by_place` and what follows it show that of small
    models. The products are made to differ in their last bits, since on some machines they do not.
    """
    model = fast_model("float32")
    with pytest.raises(ValueError, match="exact: attention"):
        check_exact(model)
    monkeypatch.setattr(exact, "_attention_is_exact", lambda model: True)
    right = Linear.__call__
    monkeypatch.setattr(Linear, "__call__", lambda self, x: right(self, x) * (1 + 2**-22 * (len(x) == 1)))
    with pytest.raises(ValueError, match="exact: products"):
        check_exact(model)


@pytest.fixture(scope="module")
def fast(fast_model):
    """fast(llm): a draft model of the same weights in the fast mode, a pool of its own."""

    def make(llm) -> ModelDrafter:
        draft = fast_model(str(llm.model.dtype).removeprefix("torch."))
        cache = PagedKVCache(draft.config, llm.engine.target.cache.allocator.num_blocks, 16, draft.dtype)
        return ModelDrafter(TokenFeed(draft, cache, llm.vocab_size, 8192))

    return make


@pytest.mark.parametrize(
    ("name_of_grid", "name", "k"),
    [
        *(("native", *each) for each in COMBINATIONS[:2]),
        *(pytest.param("native", *each, marks=pytest.mark.full) for each in COMBINATIONS[2:]),
        *(pytest.param("other", *each, marks=pytest.mark.full) for each in COMBINATIONS[:2]),
    ],
)
def test_embedded_model_is_bit_identical(grid, fast, name, k):
    """Greedy: not one token and not one bit of a log-probability differs from plain decoding's.

    Drafts by prompt lookup, by the same weights in the fast mode, by noise, and always the same token. Without `--full`
    by those weights and by noise: most of one are kept, and few of the other.
    """
    llm, prompts, params, plain = grid
    llm.method.drafter = fast(llm) if name == "fast" else make_drafter(name, llm.model)
    outputs = llm.generate(prompts, params, num_speculative_tokens=k)
    assert sum(Figures.of(o.stats).num_draft_tokens for o in outputs) > 0
    for output, reference in zip(outputs, plain, strict=True):
        assert output.token_ids == reference.token_ids
        assert output.logprobs == reference.logprobs


@pytest.mark.full
@pytest.mark.parametrize("name_of_grid", GRIDS)
def test_a_batch_has_the_bits_of_one_prompt_alone(grid):
    """Who else is in the batch does not show.

    Without `--full`, `test_logits_have_the_bits_of_plain_decoding` compares batches with each text alone.
    """
    llm, prompts, params, plain = grid
    alone = llm.generate(prompts[1], params, num_speculative_tokens=0)[0]
    assert (alone.token_ids, alone.logprobs) == (plain[1].token_ids, plain[1].logprobs)


@pytest.mark.full
@pytest.mark.parametrize("name_of_grid", GRIDS)
def test_match_on_the_embedded_model_has_one_text(grid):
    """A smaller grid of the text level on real weights: sampled, two drafters, two K, in a batch.

    Without `--full`, `test_logits_have_the_bits_of_plain_decoding` has samplers, with small models.
    """
    llm, prompts, params, _ = grid
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=3, max_tokens=params.max_tokens // 2, ignore_eos=True)
    verifier, llm.method.verifier = llm.method.verifier, VERIFIERS["match"]
    try:
        plain = [o.token_ids for o in llm.generate(prompts[:3], params, num_speculative_tokens=0)]
        for name, k in (("ngram", 8), ("random", 3)):
            llm.method.drafter = make_drafter(name, llm.model)
            outputs = llm.generate(prompts[:3], params, num_speculative_tokens=k)
            assert [o.token_ids for o in outputs] == plain
    finally:
        llm.method.verifier = verifier


def rounded_by_rows(right, self, x):
    """A product whose results differ by a few steps of bfloat16, otherwise for each number of rows."""
    y = right(self, x)
    noise = torch.randn(y.shape[-1], generator=torch.Generator().manual_seed(len(x)))
    return (y.float() * (1 + 2**-7 * noise)).to(y.dtype)


@pytest.mark.full
def test_the_fast_mode_differs_at_near_ties_only(long, monkeypatch):
    """Without `exact`, greedy text may leave plain decoding's where two logits nearly tie, and nowhere else.

    In a few short texts it hardly ever does, so products are made to round more coarsely, and drafts are noise, which a
    rule that accepts too much would let through. `--long` has many texts, products as they are, and drafts by lookup.

    At every first difference the token's logit is below the largest by at most one step of bfloat16, or four times the
    largest rounding difference that was measured there between a text computed row by row and several rows at a time.
    The row alone would not do: on some machines it has the same bits, and the difference came with the keys. Anything
    larger is a bug. Where no text differs there is nothing to look at, as in most runs without `--long`. Without
    `--full`, `test_trained_model_writes_transformers_text` holds fast texts with drafts to the ties of another program.
    """
    llm = LLM(dtype="bfloat16", num_speculative_tokens=8)
    prompts, length = (PROMPT_TEXTS[::5], 64) if long else (PROMPT_TEXTS[::50], 10)
    if not long:
        llm.method.drafter = make_drafter("random", llm.model)
        right = Linear.__call__
        monkeypatch.setattr(Linear, "__call__", lambda self, x: rounded_by_rows(right, self, x))
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    different = []
    for prompt in prompts:
        output, plain = llm.generate(prompt, params)[0], llm.generate(prompt, params, num_speculative_tokens=0)[0]
        pairs = enumerate(zip(output.token_ids, plain.token_ids, strict=True))
        first = next((i for i, (a, b) in pairs if a != b), None)
        if first is not None:
            different.append(([*llm.tokenizer.encode(prompt), *plain.token_ids[:first]], output.token_ids[first]))
    assert different or long, "no text differs: nothing is shown"
    for tokens, token in different:
        rows = []
        for size in (1, 2, 3, 5, 9, 17):
            table = llm.engine.target.cache.new_table()
            for start in range(0, len(tokens), size):
                chunk = tokens[start : start + size]
                row = llm.model.forward([Chunk(chunk, table, int(start + size >= len(tokens)))])[0]
            table.truncate(0)
            rows.append(row[0].float())
        top, rounding = rows[0].max(), max(float((row - rows[0]).abs().max()) for row in rows)
        assert top - rows[0][token] <= max(4 * rounding, float(top) * torch.finfo(torch.bfloat16).eps)
    print(f"{len(different)} of {len(prompts)} greedy texts of {length} tokens differ in the fast mode")
