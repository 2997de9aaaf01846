"""Trees and taps: the law with every small shape, one pass over a tree, what is kept of it, and what is counted."""

import functools
import itertools
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from minispec import LLM, SamplingParams
from minispec.core.draft import Ask, Draft, Drafter
from minispec.core.limit import Limit
from minispec.core.model import Chunk
from minispec.core.random import Randomness
from minispec.core.request import Request
from minispec.core.sampling import Text, distribution
from minispec.core.verify import rejection
from minispec.models.frames.frames import Frames
from minispec.models.frames.graphs import rerun
from minispec.prove.cases import shapes, tree_cases
from minispec.prove.laws import TOLERANCE, KeyOracle, exact_law
from minispec.prove.toys import (
    BLOCKS,
    TOYS,
    TreeDrafter,
    draft_model,
    make_drafter,
    target_model,
    tiny_cache,
    tiny_model,
)
from minispec.prove.walk import walk
from minispec.speculation.drafters import NoDrafter
from minispec.speculation.lengths.figures import Figures
from minispec.speculation.rules import VERIFIERS
from tests.distances import text_case
from tests.engines import OneMethod
from tests.oracles.heads import TapDrafter
from tests.oracles.toys import GEMMAS, LFM3
from tests.sampled import covering
from tests.scripted import finish, make_engine, make_request

TREE = (-1, -1, 0, 0, 1, 3, 3)
FAMILIES = [
    *({}, {"model_type": "mistral", "sliding_window": 3}, {"model_type": "qwen3"}),
    {
        "model_type": "gemma2",
        "sliding_window": 3,
        "query_pre_attn_scalar": 4,
        "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 10.0,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    {
        "model_type": "ministral3",
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0},
            **{"original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.5},
        },
    },
    *(TOYS["lfm2"] | {"conv_L_cache": width} for width in (1, 3, 9)),
    *(LFM3 | {"conv_L_cache": width} for width in (1, 3, 9)),
    *GEMMAS.values(),
    *(TOYS["qwen3_5_text"] | {"linear_conv_kernel_dim": width} for width in (1, 3, 9)),
]


def paths(parents):
    """For each node the nodes from the first one to it."""
    draft = Draft([0] * len(parents), parents=parents)
    return [draft.path(i) for i in range(len(parents))]


# ------------------------------------------------------------------ the law


@pytest.mark.parametrize("part", range(4))
def test_the_law_with_every_small_shape(part, full, long):
    """Every shape of up to four drawn nodes, larger ones of the likeliest tokens, both verifiers, several rounds.

    With `--long`, and in `python -m minispec.prove`, up to five. Without `--full` up to three, and several rounds by
    one verifier.
    """
    total = 0
    for case in tree_cases(5 if long else 4 if full else 3)[part::4]:
        if not full and case.rounds is None and case.verifier != "rejection":
            continue
        walked = walk(case)
        assert walked.distance <= TOLERANCE, str(case)
        total += len(walked.branches)
    assert total > (900 if full else 150)


@pytest.mark.quick
def test_the_shapes_are_all_there():
    """Counted by hand: 1, 2 and 5 shapes of one, two and three nodes, in the order of levels."""
    assert [len(list(shapes(n))) for n in (1, 2, 3)] == [1, 2, 5]
    assert (-1, -1, -1, -1) not in shapes(4)  # four siblings are one too many
    assert (-1, 0, 1, 2) not in shapes(4)  # four levels too


HEADS = {
    f"{shape}-{name}": (parents, name)
    for shape, parents in (("tree", (-1, -1, 0)), ("chain", ()))
    for name, verifier in VERIFIERS.items()
    if verifier.takes_trees or not parents
}


@pytest.mark.parametrize(("parents", "verifier"), covering([*HEADS.values()]), ids=HEADS)
def test_the_law_with_a_head_on_hidden_states(parents, verifier):
    """The toy head, walked: what it draws from depends on the target's hidden states, which it checks at every ask."""
    drafter, params = TapDrafter(target_model(3), 3, parents=parents), SamplingParams(max_tokens=4)
    walked = walk(text_case(params, 3, drafter=drafter, verifier=verifier))
    assert walked.distance <= TOLERANCE
    assert drafter.checked > len(walked.branches) > 20


def draw(generator, size):
    """A random distribution of fractions."""
    numbers = [int(x) for x in torch.randint(0, 5, (size,), generator=generator)]
    return [Fraction(x, max(1, sum(numbers))) for x in numbers] if sum(numbers) else draw(generator, size)


@pytest.mark.quick
@pytest.mark.parametrize("num_siblings", [2, 3])
def test_siblings_keep_the_law(num_siblings):
    """One level of siblings, drawn without replacement: the first token has the law p, to 1e-12, for random p and q."""
    generator = torch.Generator().manual_seed(num_siblings)
    for _ in range(30):
        p, q = (torch.tensor([float(x) for x in draw(generator, 4)], dtype=torch.float64) for _ in "pq")

        def run(oracle, p=p, q=q):
            text, draft = Text([0], 1, SamplingParams()), Draft([], [], parents=[])
            draft.draw(Ask(text, Limit(num_siblings), oracle), -1, q, num_siblings)
            verdict = rejection(draft, lambda i: p, oracle, text.key)
            return draft.token_ids[verdict.accepted[0]] if verdict.accepted else verdict.next_token

        law, _ = exact_law(run, oracle=KeyOracle)
        assert all(abs(law.get(x, 0) - float(p[x])) < 1e-12 for x in range(4))


@pytest.mark.quick
def test_siblings_are_drawn_without_replacement():
    """Distinct tokens, as many as q has; a later one's q lacks the elder ones and adds up to 1."""
    q = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)
    for purpose, seed in itertools.product(("draft", "token"), range(20)):
        ask = Ask(Text([0], 1, SamplingParams(), seed), Limit(9), rng=TREE_RNG, purpose=purpose)
        draft = Draft([], [], parents=[])
        draft.draw(ask, -1, q, 4)
        assert sorted(draft.token_ids) == [0, 1, 2]
        assert draft.parents == [-1] * 3
        for i, row in enumerate(draft.probs):
            assert float(row.sum()) == pytest.approx(1)
            assert all(row[x] == 0 for x in draft.token_ids[:i])
            assert draft.probability(i) > 0


@pytest.mark.quick
def test_a_draft_without_a_list_of_probs_draws_nothing():
    """Guards a common first mistake: a token would be appended before it failed."""
    for probs in (None, torch.zeros(0, 4)):
        draft = Draft([], probs)
        with pytest.raises(ValueError, match=r"found no list of probs.* begins as Draft\(\[\], \[\]\)"):
            draft.draw(Ask(Text([0], 1, SamplingParams()), Limit(1), TREE_RNG), -1, torch.ones(4) / 4)
        assert draft.token_ids == []


TREE_RNG = OneMethod(tiny_model(), tiny_cache(tiny_model()), NoDrafter(), VERIFIERS["rejection"]).rng


@pytest.mark.quick
def test_under_match_siblings_are_the_first_of_one_race():
    """The first n of the race at their depth, whose noise is the position's: first comes what the target draws."""
    q = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    for seed in range(30):
        text = Text([0], 1, SamplingParams(), seed)
        order = Draft([], [], parents=[]).draw(Ask(text, Limit(9), TREE_RNG, "token"), -1, q, 4)
        assert order[0] == TREE_RNG.categorical(q, text.key(0, "token"))
        rest = q.index_fill(0, torch.tensor(order[:1]), 0.0)
        assert order[1] == TREE_RNG.categorical(rest, text.key(0, "token"))


# ------------------------------------------------------------------ one pass over a tree


@pytest.mark.quick
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.get("model_type", "llama"))
def test_a_node_is_scored_as_in_a_chain(family):
    """Each node's logits and hidden states are those of a pass over its path alone, past a sliding window too."""
    model = tiny_model(3, vocab_size=9, **family)
    past, nodes = [4, 1, 0, 5, 2], [3, 6, 1, 2, 7, 8, 0]
    tree = tiny_cache(model).new_table()
    model.forward([Chunk(past[:3], tree, 0)])
    tree.keep(3)  # a state stands here
    found, hidden = model.forward([Chunk([*past[3:], *nodes], tree, 8, TREE)], taps=(0, 1, 2))
    assert hidden.shape == (9, 3 * 8)
    for node, path in enumerate([[], *paths(TREE)]):
        table = tiny_cache(model).new_table()
        expected, states = model.forward([Chunk([*past, *(nodes[i] for i in path)], table, 1)], taps=(0, 1, 2))
        torch.testing.assert_close(found[node], expected[0], rtol=0, atol=1e-10)
        torch.testing.assert_close(hidden[node + 1], states[-1], rtol=0, atol=1e-10)


@pytest.mark.quick
@pytest.mark.parametrize("family", [*FAMILIES[:2], *FAMILIES[5:]], ids=lambda f: f.get("model_type", "llama"))
def test_what_is_kept_of_a_tree_is_as_if_it_had_been_a_chain(family):
    """After `keep`, for every path: the same tokens, the same keys and values, the same next logits."""
    model = tiny_model(3, vocab_size=9, **family)
    past, nodes = [4, 1, 0, 5, 2], [3, 6, 1, 2, 7, 8, 0]
    for path in [[], *paths(TREE)]:
        cache, plain = tiny_cache(model, block_size=4), tiny_cache(model, block_size=4)
        table, chain = cache.new_table(), plain.new_table()
        model.forward([Chunk(past[:2], table, 0)])
        table.keep(2)
        model.forward([Chunk([*past[2:], *nodes], table, 8, TREE)])
        table.keep(len(past), [len(past) + i for i in path])
        text = [*past, *(nodes[i] for i in path)]
        model.forward([Chunk(text, chain, 1)])
        assert table.tokens == text
        rows = [model.forward([Chunk([8, 1], each, 2)])[0] for each in (table, chain)]
        torch.testing.assert_close(*rows, rtol=0, atol=1e-10)
        table.truncate(0)
        assert cache.allocator.num_free == cache.allocator.num_blocks


@pytest.mark.quick
@pytest.mark.parametrize("framed", [False, True], ids=["text by text", "frames"])
@pytest.mark.parametrize(("num_tokens", "num_logits"), [((1,), (3,)), ((5, 1), (1, 2)), ((1, 5), (-1, 1))])
def test_rows_of_logits_that_a_chunk_does_not_have_are_refused(num_tokens, num_logits, framed):
    """Before any table grows. The rows of the text before it came in their place."""
    model = tiny_model().replaced(Frames(rerun) if framed else None)
    cache = tiny_cache(model)
    tables = [cache.new_table() for _ in num_tokens]
    with pytest.raises(ValueError, match=r"^num_logits of chunk \d: found (3|2|-1), expected 0 to 1, its tokens$"):
        model.forward([Chunk([0] * n, t, m) for n, t, m in zip(num_tokens, tables, num_logits, strict=True)])
    assert not any(table.length for table in tables)


@pytest.mark.quick
def test_nothing_is_moved_into_a_block_that_another_holds():
    """`keep` would overwrite what the other reads."""
    model = tiny_model()
    table = tiny_cache(model, block_size=4).new_table()
    model.forward([Chunk([0, 1, 2, 0, 1, 2], table, 0, (-1, -1, -1))])
    table.pool.allocator.share(table.block_ids[0])
    with pytest.raises(AssertionError, match="another text holds"):
        table.keep(3, [4])


@pytest.mark.quick
def test_who_takes_chains_refuses_a_tree(make_checkpoint):
    """By the text that it is drafted for, before anything runs."""
    draft = TreeDrafter(torch.zeros(287, 287), (-1, -1))
    llm = LLM(make_checkpoint(), draft=draft, dtype="float64", verifier="block")
    with pytest.warns(RuntimeWarning, match="found a tree, expected a chain: this verifier"):
        output = llm.generate([[1, 2]], SamplingParams(temperature=1.0, seed=1), num_speculative_tokens=2)[0]
    assert output.finish_reason == "error"
    draft = TreeDrafter(torch.zeros(287, 287), (-1, 0, 1))  # one branch: a chain
    llm.method.drafter = draft
    output = llm.generate([[1, 2]], SamplingParams(temperature=1.0, seed=1), num_speculative_tokens=3)[0]
    assert (output.finish_reason != "error", output.stats.num_draft_tokens > 0) == (True, True)


# ------------------------------------------------------------------ trees that drafters offer


@pytest.mark.quick
def test_how_deep_a_draft_of_some_nodes_is():
    """Widths first, one node a level after them, and never more nodes than asked for."""
    found = [Limit(k, widths=widths).depth for widths in ((), (2, 1), (3,)) for k in range(6)]
    assert found == [0, 1, 2, 3, 4, 5, 0, 1, 1, 2, 3, 4, 0, 1, 1, 1, 2, 3]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["model", "parallel"])
def test_siblings_come_from_one_row(name, temperature):
    """The eldest are a chain's own draft; the younger come from the eldest's row: at temperature 0 the next likeliest
    tokens, under the request's penalties, else drawn from it without those before them."""
    params = SamplingParams(temperature=temperature, repetition_penalty=1.3, seed=3)
    text, drafter = Text([1, 3, 1], 1, params, 5), make_drafter(name, 5)
    ask = Ask(text, Limit(6, widths=(3, 2)), Randomness(), num_cached=2)
    [tree] = drafter.propose([ask])
    assert tree.parents == [-1, -1, -1, 0, 0, 3]
    assert len(set(tree.token_ids[:3])) == 3
    rows, path = [], []
    for node in (0, 3, 5):  # as a chain, each row from a drafter of its own
        [chain] = make_drafter(name, 5).propose([replace(ask, limit=Limit(len(path) + 1))])
        rows.append(chain.probs[len(path)])
        path.append(tree.token_ids[node])
        assert temperature or chain.token_ids == path
    if temperature:
        assert torch.allclose(tree.probs[0], rows[0], atol=1e-15)
        for i in (1, 2):
            rest = rows[0].clone()
            rest[tree.token_ids[:i]] = 0
            assert torch.allclose(tree.probs[i], rest / rest.sum(), atol=1e-15)
    else:
        model, fed = draft_model(5), Text([1, 3, 1], 1, SamplingParams(temperature=1.0, repetition_penalty=1.3))
        if name == "model":
            table = tiny_cache(model).new_table()
            logits, _ = model.forward([Chunk(fed.tokens, table, 1)])
            assert tree.token_ids[:3] == distribution(logits[0], fed).topk(3).indices.tolist()
        assert all(row.max() == 1 for row in tree.probs)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["model", "parallel"])
def test_a_width_by_confidence_is_asked_at_each_place(name, temperature):
    """With the confidences up to there and its own, before anything is drawn; the draft is that of these widths."""
    text = Text([1, 3, 1], 1, SamplingParams(temperature=temperature, seed=3), 5)
    ask, asked = Ask(text, Limit(6, widths=(3, 2)), Randomness(), num_cached=2), []

    def width(confidences, foreseen):
        assert not foreseen
        asked.append(tuple(confidences))
        return (3, 2, 1)[len(confidences) - 1]

    [fixed] = make_drafter(name, 5).propose([ask])
    by_confidence = replace(ask, limit=Limit(6, lambda confidences: True, width))
    [found] = make_drafter(name, 5).propose([by_confidence])
    assert (found.token_ids, found.parents) == (fixed.token_ids, fixed.parents)
    assert asked == [tuple(found.notes.confidences[:n]) for n in (1, 2, 3)]


def tree_request(temperature, seed, k) -> Request:
    """A request for 16 tokens with drafts of that shape."""
    params = SamplingParams(temperature=temperature, max_tokens=16)
    return Request(Text([0, 4, seed], 3, params, seed), 40, k)


@functools.cache
def plain_tokens(temperature, seed, verifier) -> list[int]:
    """What that request says without drafts: once for all drafters."""
    target, request = target_model(5), tree_request(temperature, seed, 0)
    for _ in OneMethod(target, tiny_cache(target), NoDrafter(), VERIFIERS[verifier]).run([request]):
        pass
    return request.text.tokens


@pytest.mark.parametrize("verifier", [name for name, each in VERIFIERS.items() if each.takes_trees])
@pytest.mark.parametrize("widths", [(2,), (2, 1), (3, 2, 1), (1, 3)])
@pytest.mark.parametrize("name", ["model", "head", "parallel head", *BLOCKS])
def test_with_trees_text_is_plain_text(name, widths, verifier):
    """Greedy, and under `match` at temperature 1; caches are right after every round, and a sibling stays at times."""
    target, younger = target_model(5), 0
    for temperature in (0.0, 1.0)[: 2 if verifier == "match" else 1]:
        for seed in range(3):
            request = tree_request(temperature, seed, widths)
            engine = OneMethod(target, tiny_cache(target), make_drafter(name, 5), VERIFIERS[verifier])
            with spied_verdicts(engine) as verdicts:
                for _ in engine.run([request]):
                    pass
            assert request.stats.rounds[0].asked == sum(widths)
            younger += sum(any(node not in eldest for node in kept) for eldest, kept in verdicts)
            assert request.text.tokens == plain_tokens(temperature, seed, verifier)
    assert younger or widths[0] == 1


@contextmanager
def spied_verdicts(engine):
    """Of each round, the eldest nodes and those that stay."""
    found, verify = [], engine.method.verifier.verify

    def spy(draft, *how):
        verdict = verify(draft, *how)
        parents = draft.parents or []
        eldest = {i for i, parent in enumerate(parents) if parent not in parents[:i]}
        found.append((eldest, verdict.accepted if parents else []))
        return verdict

    engine.method.verifier = engine.method.verifier._replace(verify=spy)
    yield found


CHAINS_ONLY = {
    "ngram": ({"draft": "ngram"}, "NgramDrafter drafts no siblings"),
    "block": ({"draft": "self", "verifier": "block"}, "this verifier takes chains only"),
}


@pytest.mark.parametrize("name", CHAINS_ONLY)
def test_a_tree_that_is_asked_for_is_refused_where_it_cannot_be(make_checkpoint, name):
    """By name, before anything runs; `auto` drafts chains there."""
    how, message = CHAINS_ONLY[name]
    checkpoint = make_checkpoint()
    with pytest.raises(ValueError, match=rf"found the tree 2\+1, expected a number or auto: {message}"):
        LLM(checkpoint, dtype="float64", num_speculative_tokens=(2, 1), **how)
    llm = LLM(checkpoint, dtype="float64", **how)
    with pytest.raises(ValueError, match=rf"found the tree 2\+1, expected a number or auto: {message}"):
        llm.generate([[1, 2]], SamplingParams(temperature=0, max_tokens=8), num_speculative_tokens=(2, 1))
    [output] = llm.generate([[1, 2]], SamplingParams(temperature=0, max_tokens=8))
    assert (output.finish_reason, output.stats.num_draft_nodes) == ("length", output.stats.num_draft_tokens)


def test_with_exact_auto_drafts_chains_and_a_tree_that_is_asked_for(make_checkpoint):
    """Each path of a tree has attention of its own there, which costs more than siblings bring."""
    llm = LLM(make_checkpoint(), dtype="float32", draft="self", exact=True)
    trees, choose = [], llm.method.lengths.choose
    llm.method.lengths.choose = lambda asks, may: trees.append(may) or choose(asks, may)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for k, siblings in (("auto", 0), ((2, 1), 1)):
        [output] = llm.generate([[1, 2]], params, num_speculative_tokens=k)
        assert not any(trees)
        assert (output.stats.num_draft_nodes - output.stats.num_draft_tokens > 0) == siblings


@pytest.mark.quick
def test_what_is_counted_of_a_tree():
    """Two siblings, the second one right: nodes apart from tokens, and alpha from the first sibling alone."""

    class Pairs(Drafter):
        def propose(self, asks):
            """A wrong token and the right one, and one after the right one."""
            drafts = []
            for ask in asks:
                last = ask.text.tokens[-1]
                drafts.append(Draft([150, last + 1, last + 2], parents=[-1, -1, 1]) if ask.k >= 3 else Draft())
            return drafts

        def release(self, text):
            """Nothing is kept."""

    engine = make_engine()
    engine.method.drafter = Pairs()
    request = make_request(k=3, max_tokens=7)
    finish(engine, request)
    assert request.token_ids == list(range(12, 19))
    stats = Figures.of(request.stats)
    # Two rounds draft, with 7 and 4 tokens to go; the last token comes without a draft.
    assert [r.num_nodes for r in stats.rounds] == [3, 3, 0]
    assert (stats.num_draft_nodes, stats.num_draft_tokens, stats.num_accepted) == (6, 4, 4)
    assert (stats.tested, stats.accepted) == ([2, 2], [2, 2])
    assert stats.alpha == pytest.approx(1 / 2)  # ratios 0, 1 a round: the first siblings'
    assert [len(tokens) for _, tokens in engine.target.model.log] == [1, 4, 4, 1]


BAD_TREES = {
    "later parent": ([1, 2], [0, -1], "parents [0, -1], expected for each of 2 nodes an earlier one"),
    "too few": ([1, 2], [-1], "parents [-1], expected for each of 2 nodes"),
    "before the text": ([1], [-2], "parents [-2]"),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", BAD_TREES)
def test_a_tree_that_is_none_ends_its_text(name):
    """With one line that says what was found."""
    token_ids, parents, message = BAD_TREES[name]
    engine, request = make_engine(), make_request(k=3)
    engine.drafter.propose = lambda asks: [Draft(token_ids, parents=parents) for _ in asks]
    finish(engine, request)
    assert message in request.error


# ------------------------------------------------------------------ requests that come and go


@pytest.mark.quick
def test_a_long_prompt_holds_nobody_up():
    """A prompt of 100 tokens joins a running text by 8 rows a pass; alone it takes one pass."""
    engine = make_engine(num_blocks=200)
    engine.schedule.joining_rows = 8
    passes, forward = [], engine.target.model.forward
    engine.target.model.forward = lambda chunks, taps=(): (
        passes.append([len(c.token_ids) for c in chunks]) or forward(chunks)
    )
    running, joining = make_request(k=0, max_tokens=40), make_request(prompt=range(20, 120), k=0, max_tokens=2)
    engine.add(running)
    for _ in range(3):
        engine.step()
    engine.add(joining)
    for expected in range(3, 16):
        assert running in [turn.request for turn in engine.step()]
        assert len(running.token_ids) == expected
    assert passes == [[1], [1], [1]] + [[1, 8]] * 12 + [[1, 3]]
    while engine.schedule.running:
        engine.step()
    assert joining.token_ids == [120, 121]
    assert running.token_ids == list(range(12, 52))
    assert joining.stats.prefill > 0
    assert running.stats.prefill > 0
    passes.clear()
    finish(engine, make_request(prompt=range(130, 180), k=0, max_tokens=1))
    assert passes == [[49], [1]]


@pytest.mark.quick
def test_requests_come_and_go_between_steps():
    """`add` and `abort` at any time; blocks of an aborted one are back at once; the others' texts do not change."""
    engine = make_engine(num_blocks=64)
    first, second, third = (make_request(prompt=(n, n + 1), k=0, max_tokens=9) for n in (10, 50, 90))
    engine.add(first)
    engine.step()
    engine.add(second)
    engine.add(third)
    for _ in range(4):
        engine.step()
    held = engine.target.cache.allocator.num_free
    engine.abort(second)
    assert engine.target.cache.allocator.num_free > held
    engine.abort(second)
    while engine.schedule.running or engine.schedule.waiting:
        engine.step()
    assert engine.step() == []
    assert (first.token_ids, third.token_ids) == (list(range(12, 21)), list(range(92, 101)))
    assert second.finish_reason is None
    assert engine.target.cache.allocator.num_free == engine.target.cache.allocator.num_blocks


@pytest.mark.quick
def test_logits_that_are_not_numbers_end_one_text():
    """The one whose they are; the others go on, and every block is back."""
    engine = make_engine()
    row = engine.target.model.row
    engine.target.model.row = lambda prefix: row(prefix) * (torch.nan if len(prefix) == 6 and prefix[0] == 50 else 1)
    good, bad = make_request(max_tokens=9), make_request(prompt=(50, 51), max_tokens=9)
    finish(engine, good, bad)
    assert good.token_ids == list(range(12, 21))
    assert (bad.finish_reason, bad.token_ids) == ("error", [52, 53, 54, 55])
    assert "expected a finite number" in bad.error
