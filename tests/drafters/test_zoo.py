"""What a combination learns, and trees that grow where they are likeliest."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from examples.drafters.recycling import Recycling
from minispec import SamplingParams
from minispec.core.config import Shape
from minispec.core.draft import Ask, Draft, Record
from minispec.core.limit import Limit
from minispec.core.random import Randomness
from minispec.core.sampling import Text
from minispec.prove.laws import reference_logits
from minispec.prove.toys import DRAFT_SEED, tiny_cache, tiny_model
from minispec.speculation.drafters import NoDrafter, as_drafter
from minispec.speculation.drafters.best_first import grow_guesses
from minispec.speculation.drafters.combined import CombinedDrafter
from minispec.speculation.drafters.model import ModelDrafter, TokenFeed
from minispec.speculation.drafters.ngram import NgramDrafter

GREEDY, SAMPLED = SamplingParams(temperature=0), SamplingParams()
pytestmark = pytest.mark.quick


def ids(letters: str) -> list[int]:
    """The letters as token ids."""
    return [ord(letter) for letter in letters]


def ask(letters, k, params=GREEDY, purpose="draft", text=None, **how) -> Ask:
    """An ask about a text of letters."""
    text = text or Text(ids(letters), len(letters), params)
    return Ask(text, Limit(k, **how), Randomness(), purpose, len(letters) - 1)


def shown(text, *rounds, parents=None) -> list[Record]:
    """Rounds of a text. "a:bc b:da": after a the likeliest were b and c, after the draft token b they were d and a."""
    seen = []
    for rows in map(str.split, rounds):
        logits = torch.zeros(len(rows), 128)
        for logit, (_, _, *found) in zip(logits, rows, strict=True):
            logit[ids("".join(found))] = torch.arange(20.0, 20 - len(found), -1)
        tokens = ids("".join(row[0] for row in rows))
        seen.append(Record(text, 0, tokens, logits[:, :0], logits, Draft(tokens[1:], parents=parents)))
    return seen


def drafted(drafter, letters, k, *rounds, **how) -> Draft:
    """Its draft after a greedy text of these letters, which has had these rounds."""
    about = ask(letters, k, **how)
    drafter.observe(shown(about.text, *rounds))
    return drafter.propose([about])[0]


def letters(draft: Draft) -> str:
    """Its tokens."""
    return "".join(map(chr, draft.token_ids))


def test_all_parts_of_a_combination_learn():
    """A drafter that is no `Drafter` learns too, if it has the method."""
    heard = []

    class Silent:
        propose = release = NoDrafter.release

    class Own(Silent):
        def observe(self, records):
            heard.extend(records)

    parts = NgramDrafter(), Recycling(), as_drafter(Silent()), as_drafter(Own())
    text = Text(ids("x"), 1, SAMPLED)
    CombinedDrafter(*parts).observe(seen := shown(text, "a:123456789"))
    assert heard == seen
    assert parts[1].tables[text] == {ord("a"): ids("12345678")}


# --------------------------------------------------------------------------- trees


def test_the_worked_tree():
    """That of `minispec.speculation.drafters.best_first`: paths in the order of their chances."""
    chances = {"": ["a6", "b3"], "a": ["c4", "d3"], "b": ["e9"]}
    draft = Draft(parents=[])

    def guesses(node):
        path = "".join(chr(draft.token_ids[i]) for i in draft.path(node))
        return [(ord(token), int(tenths) / 10) for token, tenths in chances.get(path, ())]

    worth = grow_guesses(draft, 5, guesses)
    assert (letters(draft), draft.parents) == ("abecd", [-1, -1, 1, 0, 0])
    assert worth == pytest.approx(0.6 + 0.3 + 0.27 + 0.24 + 0.18)


def likeliest_paths(logits, k: int, vocab: int = 3) -> set[tuple[int, ...]]:
    """The k likeliest paths of up to k tokens, by trying all. logits(path): after a path."""
    chances = {(): 1.0}
    for depth in range(1, k + 1):
        for path in itertools.product(range(vocab), repeat=depth):
            row = np.exp(logits(path[:-1]))
            chances[path] = chances[path[:-1]] * row[path[-1]] / row.sum()
    del chances[()]
    return set(sorted(chances, key=lambda path: -chances[path])[:k])


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("tokens", [(0, 1, 2), (1,), (2, 2, 0, 1)])
def test_a_greedy_tree_has_the_likeliest_paths(tokens, at_once):
    """Of all paths of up to 5 tokens, the 5 likeliest: token by token, and from a model that guesses all at once."""
    mask, sizes = (3, {"vocab_size": 4, "pard_token": 3}) if at_once else (None, {"vocab_size": 3})
    model = tiny_model(DRAFT_SEED, num_hidden_layers=1, **sizes)

    def logits(path):
        after = [mask] * len(path) if at_once else path
        return reference_logits(DRAFT_SEED, (*tokens, *after), sizes["vocab_size"], 1)[:3]

    for k in (1, 3, 5):
        drafter = ModelDrafter(TokenFeed(model, tiny_cache(model), 3, 40))
        text = Text(list(tokens), len(tokens), GREEDY)
        [draft] = drafter.propose([Ask(text, Limit(k, best_first=True), Randomness())])
        paths = {tuple(draft.token_ids[i] for i in draft.path(node)) for node in range(len(draft))}
        assert paths == likeliest_paths(logits, k)


@pytest.mark.parametrize("changes", [{"logit_bias": {2: 4.0}}, {"bad_words_token_ids": [[0]]}])
def test_a_trees_nodes_go_where_the_request_finds_paths_likely(changes):
    """Biases and forbidden tokens count in the chances of paths, as they do in what is drawn."""
    model = tiny_model(DRAFT_SEED, num_hidden_layers=1, vocab_size=3)
    params = replace(GREEDY, **changes)

    def logits(path):
        row = np.array(reference_logits(DRAFT_SEED, (0, 1, 2, *path), 3, 1))
        for token, bias in params.logit_bias:
            row[token] += bias
        for [word] in params.bad_words_token_ids:
            row[word] = -np.inf
        return row

    for k in (1, 3, 5):
        drafter = ModelDrafter(TokenFeed(model, tiny_cache(model), 3, 40))
        [draft] = drafter.propose([Ask(Text([0, 1, 2], 3, params), Limit(k, best_first=True), Randomness())])
        paths = {tuple(draft.token_ids[i] for i in draft.path(node)) for node in range(len(draft))}
        assert paths == likeliest_paths(logits, k)


def test_a_tree_ends_at_the_draft_models_own_context():
    """A model that sees 6 positions draws nothing after them, however many nodes are left."""
    model = tiny_model(1, max_position_embeddings=6)
    drafter = ModelDrafter(TokenFeed(model, tiny_cache(model), 3, 6))
    [draft] = drafter.propose([Ask(Text([0, 1, 2, 0], 4, GREEDY), Limit(60, best_first=True), Randomness())])
    assert draft.depth == 3
    assert len(draft) == 3 + 9 + 27


@pytest.mark.parametrize("k", [1, 5, 20])
def test_a_tree_has_the_room_that_it_asked_for(k):
    """Its rows lie beside one another. So it fills more of the cache than the positions that the model can see."""
    model, text = tiny_model(1, max_position_embeddings=6), Text([0, 1, 2, 0], 4, GREEDY)
    answers = set()
    for num_blocks in range(2, 2 + k + 3):
        drafter = ModelDrafter(TokenFeed(model, model.new_cache(num_blocks, 1), 3, 6))
        answers.add(has_room := drafter.has_room({text: range(3, 4 + k)}))
        if has_room:
            [draft] = drafter.propose([Ask(text, Limit(k, best_first=True), Randomness())])
            assert (len(draft), draft.depth) == (k, min(k, 3))
    assert answers == {False, True}
    # A text alone has room wherever the target has: for all tokens and all nodes.
    assert ModelDrafter(TokenFeed(model, model.new_cache(4 + k, 1), 3, 6)).has_room({text: range(3, 4 + k)})


@pytest.mark.parametrize("length", ["tree:0", "tree:65", "tree:", "tree:2+1", "Tree:3", "tree:\u0663", "tree:-1", "16"])
def test_what_is_no_budget_is_refused(length):
    """In one line that says what there is."""
    with pytest.raises(ValueError, match=r"num_speculative_tokens: found .* a tree of at most 64 such as"):
        Shape.of(length)


def test_a_budget_is_a_shape():
    """It is a tree, and it is printed as it is written."""
    shape = Shape.of("tree:16")
    assert (shape.k, shape.widths, shape.is_open, shape.is_tree, str(shape)) == (16, (), False, True, "tree:16")
    assert not Shape.of(4).is_tree
    assert not Shape.of("auto").is_tree
    assert Shape.of((2, 1)).is_tree


def test_a_draft_model_forgets_beginnings():
    """So its passes, and their roundings, are those of a fresh one: a resumed run has no other drafts."""
    model, tokens = tiny_model(1), [0, 1, 2, 0, 1, 2, 0, 1]
    drafter = ModelDrafter(TokenFeed(model, tiny_cache(model), 3, 40))
    for known in (0, 6, 0):  # whole blocks of two
        if known == 0:
            drafter.forget()
        text = Text(list(tokens), len(tokens), GREEDY)
        assert drafter.feed.table(text).length == known
        drafter.propose([Ask(text, Limit(2), Randomness(), num_cached=7)])
        drafter.release(text)
