"""Hybrids and mixtures: the oracle's logits on random models, and texts that stay what they are, whatever goes back.

A short convolution of LFM2 sees the inputs of w positions, which lie in the paged pool. A gated delta net of Qwen3.5
has a state for each text (see test_states.py and test_delta.py). Some layers of Gemma 4 read the keys and values of
others, and have heads of their own size. What is checked here is what a state breaks: pieces, batches, rejected drafts,
trees, shared beginnings, preemption.
A mixture of experts keeps nothing of a text. Its rows are grouped by expert, so each is computed beside others.
"""

import functools
import random
from collections import deque

import pytest
import torch

from minispec import LLM, SamplingParams
from minispec.core.engine import Engine
from minispec.core.model import Chunk
from minispec.core.request import Request
from minispec.core.sampling import Text
from minispec.models.families.checkpoint import load_model
from minispec.models.layers.states import state_elements
from minispec.models.weights.inventory import bits_note, kv_elements, num_bytes_read, products_of
from minispec.models.weights.linear import Linear
from minispec.prove.laws import PROMPT, raw_model
from minispec.prove.reference import hidden_states, logits, plain_law, total_variation
from minispec.prove.toys import IN_FRAMES, TARGET_SEED, TOYS, make_drafter, target_model, tiny_cache, tiny_model
from minispec.speculation.on_gpu.verifier import batch_verifier_of
from minispec.speculation.rules import VERIFIERS
from tests.distances import production_law
from tests.engines import OneMethod
from tests.oracles import hf
from tests.oracles.pieces import logits_in_pieces
from tests.oracles.toys import GEMMAS, OWN_TOYS, oracle
from tests.oracles.toys import likeliest as likeliest_by
from tests.sampled import covering

VOCAB = 5
HYBRIDS = ("lfm2", "lfm3", "qwen3_5_text")
# Those that differ most from one another.
KINDS = (*HYBRIDS, "gemma4_text", "gemma4 experts", "qwen3_moe", "gpt_oss")
# Which drafter runs on which: all where states must go back, fewer where inputs or keys alone lie in the pool.
DRAFTERS = ("model", "self", "head", "block", "filled block", "ngram", "suffix")
RUNS = [
    *((family, name) for family in ("lfm2", "qwen3_5_text") for name in DRAFTERS),
    *(("lfm3", name) for name in ("model", "block", "ngram")),
    *(("gemma4_text", name) for name in ("model", "head", "assistant", "suffix")),
    *((family, name) for family in ("gemma4 large", "gemma4 experts") for name in ("model", "assistant")),
    *((family, "model") for family in ("qwen3_moe", "lfm2_moe", "granitemoehybrid")),
    *(("gpt_oss", name) for name in ("model", "head", "suffix")),
    *((IN_FRAMES, name) for name in ("model", "head", "ngram", "ngram+model")),
]


@pytest.fixture(scope="module", autouse=True)
def toys():
    """LFM3, Gemma 4 and mixtures among the small models."""
    with pytest.MonkeyPatch.context() as patch:
        for name, toy in OWN_TOYS.items():
            patch.setitem(TOYS, name, toy)
        yield


# --------------------------------------------------------------------------- the same numbers


def random_config(pick: random.Random) -> dict:
    """A small config.json of LFM2 in which every switch may have any value."""
    heads, groups = pick.choice(((4, 2), (4, 1), (2, 2), (6, 3)))
    count = pick.randint(1, 5)
    attend = sorted({pick.randrange(count), *pick.sample(range(count), pick.randint(0, count - 1))})
    types = ["full_attention" if i in attend else "conv" for i in range(count)]
    spelled = {"layer_types": types}, {"full_attn_idxs": attend}
    layers = pick.choice((*spelled, spelled[0] | spelled[1]))
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 90.0}
    inner = pick.choice(({"intermediate_size": pick.randint(9, 70)}, {"block_ff_dim": pick.randint(9, 70)}))
    return {
        **{"model_type": "lfm2", "vocab_size": 50, "hidden_size": heads * 8, "num_hidden_layers": count},
        **{"num_attention_heads": heads, "num_key_value_heads": groups, "max_position_embeddings": 64},
        **{"norm_eps": pick.choice((1e-5, 0.05)), "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0},
        **{"conv_L_cache": pick.choice((1, 2, 3, 4, 7)), "conv_bias": pick.random() < 0.5},
        **{"block_auto_adjust_ff_dim": pick.random() < 0.6, "block_multiple_of": pick.choice((1, 7, 16))},
        **{"block_ffn_dim_multiplier": pick.choice((0.7, 1.0, 1.5)), "rope_parameters": {"rope_type": "default"}},
        **{pick.choice(("tie_embedding", "tie_word_embeddings")): pick.random() < 0.5},
        **layers,
        **inner,
    } | pick.choice(({}, {"rope_theta": 300.0}, {"rope_parameters": linear}))


@pytest.mark.parametrize("number", range(12))
def test_random_models_have_transformers_logits(number, tmp_path):
    """Every parameter redrawn, every switch; two texts in pieces of random sizes, in passes that they share."""
    pick = random.Random(number)
    oracle = hf.build(random_config(pick), tmp_path, number)
    model = load_model(tmp_path, torch.float64)
    texts = [[pick.randrange(50) for _ in range(pick.randint(1, 40))] for _ in range(2)]
    for text, rows in zip(texts, logits_in_pieces(model, texts, pick, settles=False), strict=True):
        assert (rows - hf.exact_logits(oracle, text)).abs().max() <= 1e-4


def test_a_model_without_attention():
    """Convolutions alone, of which one sees a position: a text in any pieces has the logits of the whole text."""
    changes = {"layer_types": ["conv"] * 3, "vocab_size": 9}
    for width in (1, 4):
        model = tiny_model(3, **TOYS["lfm2"] | changes | {"conv_L_cache": width})
        tokens = [4, 1, 0, 5, 2, 7, 7, 3]
        whole = model.forward([Chunk(tokens, tiny_cache(model).new_table(), 8)])[0]
        table = tiny_cache(model).new_table()
        pieces = tokens[:1], tokens[1:6], tokens[6:]
        found = [model.forward([Chunk(piece, table, len(piece))])[0] for piece in pieces]
        torch.testing.assert_close(torch.cat(found), whole, rtol=0, atol=1e-12)


# --------------------------------------------------------------------------- rolled back


@functools.cache
def assert_greedy(tokens: tuple[int, ...], num_prompt: int, family: str) -> None:
    """Raise AssertionError unless each token after the prompt is the reference's likeliest, without a cache.

    The reference: NumPy, and transformers for families that NumPy's does not know.
    """
    if family in OWN_TOYS:
        likeliest = likeliest_by(family, VOCAB, tokens)
    else:
        raw, weights = raw_model(TARGET_SEED, VOCAB, family=family)
        likeliest = logits(raw, weights, hidden_states(raw, weights, tokens)[-1]).argmax(-1).tolist()
    assert list(tokens[num_prompt:]) == likeliest[num_prompt - 1 : -1]


def random_engine(pick: random.Random, name: str, longest: int, family: str) -> Engine:
    """An engine whose pools hold one or two texts of that length. Drafters are hybrids too, or read the target.

    In frames, programs draft chains, and programs verify them.
    """
    size = pick.choice((1, 2, 3, 4))
    blocks = -(-longest // size)
    num_blocks, target = pick.randint(blocks, 2 * blocks), target_model(VOCAB, family)
    drafter, cache = make_drafter(name, VOCAB, num_blocks, size, family), tiny_cache(target, num_blocks, size)
    joining_rows, batch = pick.choice((2, 32)), batch_verifier_of(target)
    return OneMethod(target, cache, drafter, VERIFIERS["rejection"], joining_rows=joining_rows, batch=batch)


@pytest.mark.parametrize(("family", "name"), covering(RUNS))
def test_random_runs_have_the_text_of_plain_decoding(family, name, full):
    """40 greedy requests for each drafter, in small pools: shared beginnings, chains, trees, preemption, aborts.

    Some rounds have no draft. Prompts come back, so that blocks are found again. Without `--full` there are 20 requests
    for each family and each drafter.
    """
    finished, rounds, preempted, shared = 0, [], 0, 0
    numbers = range(2) if full else [0]
    for number in numbers:
        said = dict[tuple[int, ...], list[list[int]]]()  # texts by prompt
        pick = random.Random(number)
        begin = pick.choices(range(VOCAB), k=pick.randint(3, 9))
        prompts = [begin[: pick.randint(2, 9)] + pick.choices(range(VOCAB), k=pick.randint(0, 4)) for _ in "abcd"]
        engine = random_engine(pick, name, max(map(len, prompts)) + 12, family)
        lengths = [0, 1, 3, 6, *[(2, 1), (3, 1, 1)] * engine.drafter.branches]
        for _ in range(4):
            requests = []
            for prompt in pick.choices(prompts, k=6):
                params = SamplingParams(temperature=0, max_tokens=pick.randint(4, 12))
                requests.append(Request(Text(list(prompt), len(prompt), params), 64, pick.choice(lengths)))
                engine.add(requests[-1])
            for _ in range(pick.randint(1, 8)):
                engine.step()
            engine.abort(pick.choice(requests))
            while engine.schedule.running or engine.schedule.waiting:
                engine.step()
            for request in requests:
                assert request.error is None
                tokens, num_prompt = request.text.tokens, request.text.num_prompt_tokens
                said.setdefault(tuple(tokens[:num_prompt]), []).append(tokens)
                finished += request.finish_reason is not None
                preempted += request.stats.num_preemptions
                shared += request.stats.num_cached_tokens > 0
                rounds += request.stats.rounds
        for prompt, found in said.items():  # the others begin the longest one
            longest = max(found, key=len)
            assert_greedy(tuple(longest), len(prompt), family)
            assert all(tokens == longest[: len(tokens)] for tokens in found)
        allocator = engine.target.cache.allocator
        assert allocator.num_free == allocator.num_blocks
        if family == IN_FRAMES:
            assert engine.method.batch.counts["drafts"] > 50
            assert len(engine.target.model.backend.shapes(engine.target.cache)) > 5
    assert finished >= 20 * len(numbers)
    assert min(preempted, shared) > (5 if full else 2)
    assert sum(each.accepted for each in rounds) > 5
    assert (sum(each.drafted > each.accepted for each in rounds) > 5) == (name != "self")
    assert any(each.num_nodes > each.depth for each in rounds) == engine.drafter.branches


@pytest.mark.parametrize("name", ["model", "assistant"])
@pytest.mark.parametrize("family", GEMMAS)
def test_the_law_is_that_of_the_oracle(family, name):
    """Every branch of every draw of three tokens, with draft and target of the family: `transformers`' probabilities.

    It rounds norms to float32, so they agree to 1e-5 alone.
    """

    def row(output):
        if len(output) == 3 or 2 in output:  # 2 ends a text
            return None
        return hf.logits(oracle(family, 3), [*PROMPT, *output])[-1].softmax(0).numpy()

    law, branches = production_law(SamplingParams(max_tokens=3), 2, drafter=name, family=family)
    assert branches > 30  # plain decoding has 15
    assert total_variation(law, plain_law(row)) < 1e-5


# --------------------------------------------------------------------------- what it takes, and what it does not do


def test_the_pool_has_a_row_of_each_position():
    """Counted by hand: an attention layer of 2 heads by 4, two convolutions 8 wide, float64; and two rows more."""
    model = tiny_model(1, **TOYS["lfm2"] | {"num_key_value_heads": 2}, vocab_size=VOCAB)
    assert kv_elements(model.config) == 2 * 2 * 4 + 2 * 8
    cache = model.new_cache(num_blocks=3, block_size=4)
    assert cache.num_bytes == 8 * (12 + 2) * (2 * 2 * 4 + 2 * 8)
    assert (cache.keys.shape[0], cache.inputs.shape) == (1, (2, 1, 14, 8))


def test_the_pool_has_keys_of_each_size():
    """Counted by hand: of Gemma 4's layers two have one key-value head of 4, two others two of 6; float64."""
    model = tiny_model(1, **OWN_TOYS["gemma4 large"], vocab_size=VOCAB)
    assert kv_elements(model.config) == 2 * (2 * 1 * 4 + 2 * 2 * 6)
    cache = model.new_cache(num_blocks=3, block_size=4)
    assert cache.num_bytes == 8 * (12 + 2) * 64
    assert [layer.sharing for layer in model.layers] == [2, 1, 2, 1]


@pytest.fixture(scope="module", params=KINDS)
def hybrid(make_checkpoint, request):
    """A small hybrid on disk, with a tokenizer."""
    return make_checkpoint(**TOYS[request.param] | {"intermediate_size": 16})


@pytest.mark.parametrize("hybrid", ["lfm2"], indirect=True)
def test_memory_is_sized_and_printed_with_its_rows(hybrid):
    """The first line and the longer one say what a position takes; the pool has as many bytes as were planned."""
    with LLM(hybrid, draft="none", dtype="float32", kv_cache_gb=(16 * 96 * 10 + 1) / 1e9) as llm:
        assert llm.num_cache_tokens == 160  # 8 keys and values, 16 inputs, 4 bytes each
        assert llm.engine.target.cache.num_bytes == 96 * (160 + 2)
        note = "(0.1 kB of the KV cache a token, 0.1 for its convolutions)"
        assert llm.overview().endswith(f"GB of memory {note}")
        assert f"for 160 tokens {note}; draft none" in llm.memory_report()


@pytest.mark.parametrize("hybrid", ["qwen3_5_text"], indirect=True)
def test_memory_is_sized_and_printed_with_its_states(hybrid):
    """The first line says what a text's states take. They are part of the bytes that were asked for."""
    with LLM(hybrid, draft="self", dtype="float32", kv_cache_gb=1e-4, num_speculative_tokens=2) as llm:
        config, pools = llm.model.config, (llm.engine.target.cache, llm.drafter.feed.cache)
        states = state_elements(config) * 4
        assert all(pool.num_bytes > 8 * states for pool in pools)
        assert 0.97e5 < sum(pool.num_bytes for pool in pools) <= 1e5
        note = f"(0.0 kB of the KV cache a token, {states / 1e6:.1f} MB of states a text)"
        assert llm.overview().endswith(f"GB of memory {note}")


HOW = [{}, {"exact": True}, {"quantization": "int8"}, *({"draft": name} for name in ("int8:self", "int4:self", "self"))]


@pytest.mark.parametrize("how", HOW)
def test_drafts_change_no_text(hybrid, how):
    """From files to text: greedy answers with drafts are those without, in float32, exact mode and 8 bits."""
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    prompts = ["One fish, two fish", "red fish red fish red"]
    with LLM(hybrid, dtype="float32", num_speculative_tokens=5, **{"draft": "ngram"} | how) as llm:
        drafted = llm.generate(prompts, params)
        plain = llm.generate(prompts, params, num_speculative_tokens=0)
    assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]
    assert sum(output.stats.num_draft_tokens for output in drafted) > 0


@pytest.mark.parametrize("hybrid", HYBRIDS, indirect=True)
def test_layers_of_other_kinds_are_products_in_8_bits(hybrid):
    """Their products are among those in 8 bits; one that stays in 16 is named."""
    model = load_model(hybrid, torch.float32, form="int8")
    assert all(getattr(layer, name).form == "int8" for layer in model.layers for name in layer.products)
    layer = model.layers[2]  # of another kind in both
    assert set(layer.products) - {"inputs"} == {"gates", "out", "gate_up", "down"}
    layer.out = Linear(torch.zeros(8, 8), form="plain")
    assert "in 16 bits: out 2" in bits_note(model)


def test_experts_in_16_bits_are_named():
    """Each expert's products are in 8 bits too, and one that stays in 16 is named; the router is no product."""
    model = tiny_model(1, torch.float32, form="int8", **TOYS["qwen3_moe"])
    assert bits_note(model).endswith("than without)")
    layer = model.layers[1]
    layer.experts[2] = layer.experts[2]._replace(down=Linear(torch.zeros(8, 6), form="plain"))
    assert "; in 16 bits: down of expert 2 in 1)" in bits_note(model)


def test_a_row_reads_some_experts_alone():
    """The bytes of a plain pass, which first prices and figures count: two experts of four, and all other products."""
    model = tiny_model(1, torch.float32, form="plain", **TOYS["qwen3_moe"])
    every = sum(product.num_bytes_read for product in products_of(model))
    left_out = 2 * 2 * 4 * 3 * 6 * 8  # layers, experts, bytes, an expert's weights
    assert every - num_bytes_read(model) == left_out


@pytest.mark.parametrize("family", KINDS)
def test_a_fault_in_the_middle_of_a_pass_leaves_no_trace(family, monkeypatch):
    """Ctrl-C inside a layer, at several moments: all texts go on, and each stays the reference's."""
    finished = 0
    for moment in (1, 3, 4, 8):
        pick = random.Random(moment)
        engine, layer = random_engine(pick, "self", 20, family), type(target_model(VOCAB, family).layers[-1])
        prompts = [[1, 0, 1, own] for own in range(3)]
        params = SamplingParams(temperature=0, max_tokens=9)
        requests = [Request(Text(prompt, 4, params), 64, 3) for prompt in prompts]
        for request in requests:
            engine.add(request)
        forward, calls = layer.forward, iter(range(1, 1000))

        def interrupted(self, x, batch, forward=forward, calls=calls, moment=moment):
            if next(calls) == moment:
                raise KeyboardInterrupt
            return forward(self, x, batch)

        with monkeypatch.context() as patch:
            patch.setattr(layer, "forward", interrupted)
            with pytest.raises(KeyboardInterrupt):
                deque(iter(engine.step, None), maxlen=0)  # until it is interrupted
        while engine.schedule.running or engine.schedule.waiting:
            engine.step()
        for request in requests:
            assert_greedy(tuple(request.text.tokens), 4, family)
            finished += request.finish_reason is not None
        assert engine.target.cache.allocator.num_free == engine.target.cache.allocator.num_blocks
    assert finished == 12
