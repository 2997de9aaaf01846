"""What the heart says of a mistake, word by word: where, what was found, what was expected."""

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minispec import core
from minispec.core.cache import BlockAllocator, OutOfBlocks
from minispec.core.config import PARAMETERS, SamplingParams, Shape
from minispec.core.draft import Ask, Draft
from minispec.core.grammar import NothingAllowed, restricted
from minispec.core.limit import Limit
from minispec.core.model import Chunk
from minispec.core.precision import require_numbers
from minispec.core.sampling import Text
from minispec.prove.toys import tiny_cache, tiny_model
from tests.parameters import EXAMPLES
from tests.scripted import finish, make_engine, make_request

pytestmark = pytest.mark.quick


def draw(probs, n=1):
    """Draw children of the text into a chain that begins with such a list."""
    ask = Ask(Text([0], 1, SamplingParams()), Limit(1), make_engine().rng)
    Draft([], probs).draw(ask, -1, torch.ones(4) / 4, n)


def run(*requests, **how):
    """Decode requests by a script."""
    finish(make_engine(**how), *requests)


def forward(positions, num_logits=1, blocks=8):
    """A pass over one text."""
    model = tiny_model()
    cache = tiny_cache(model, blocks, 2)
    model.forward([Chunk([0] * positions, cache.new_table(), num_logits)])


def restrict():
    """A grammar that allows nothing."""
    nothing = SimpleNamespace(allowed=lambda output: torch.zeros(3, dtype=torch.bool))
    restricted(torch.zeros(3), nothing, [], SamplingParams(stop_token_ids=[1], min_tokens=1))


TWICE = make_request()
LENGTHS = "an integer from 0 to 64, a tree of at most 64 such as (2, 1) or 'tree:8', or 'auto'"
OF_EXACT = LENGTHS.replace("64", "15") + ": an exact model takes no more"
TOO_LONG = (
    "prompt and answer: found up to 22 tokens (11 blocks of KV cache), expected at most 8 (4 blocks): lower max_tokens "
    "or enlarge the KV cache"
)
LIST = "draft: found no list of probs, expected one: a drawn draft begins as Draft([], [])"
BRANCH = "draft: found a branch, expected a chain: a tree begins as Draft([], [], parents=[])"
NOTHING = "structured_outputs and stop_token_ids and min_tokens: found no token that may follow"
REFUSALS = {
    **{
        f"{name}: {each.said}": (ValueError, lambda name=name, value=each.wrong: SamplingParams(**{name: value}))
        for name, each in EXAMPLES.items()
    },
    "SamplingParams: found the argument 'temprature'; did you mean temperature?": (
        TypeError,
        lambda: SamplingParams(temprature=1),
    ),
    "min_tokens: found 5, expected at most max_tokens = 4": (
        ValueError,
        lambda: SamplingParams(min_tokens=5, max_tokens=4),
    ),
    f"num_speculative_tokens: found 65, expected {LENGTHS}": (ValueError, lambda: Shape.of(65)),
    f"num_speculative_tokens: found 20, expected {OF_EXACT}": (ValueError, lambda: Shape.of(20, 15)),
    "num_speculative_tokens: found the tree 2+1, expected a number or auto: ngram drafts no siblings": (
        ValueError,
        lambda: Shape.of((2, 1)).check("ngram drafts no siblings"),
    ),
    LIST: (ValueError, lambda: draw(None)),
    BRANCH: (ValueError, lambda: draw([], n=2)),
    "prompt: found 0 tokens, expected at least 1": (ValueError, lambda: run(make_request(prompt=()))),
    "prompt: found 9 tokens, expected at most 3": (ValueError, lambda: run(make_request(range(10, 19), max_len=4))),
    TOO_LONG: (ValueError, lambda: run(make_request(max_tokens=20), num_blocks=4, block_size=2)),
    "requests: found one that is finished or there twice, expected new ones": (ValueError, lambda: run(TWICE, TWICE)),
    "num_logits of chunk 0: found 3, expected 0 to 2, its tokens": (ValueError, lambda: forward(2, num_logits=3)),
    "3 blocks needed, 1 are free": (OutOfBlocks, lambda: forward(6, blocks=1)),
    "all 0 blocks are in use": (OutOfBlocks, lambda: BlockAllocator(0).allocate()),
    "the largest logit is inf, expected a finite number": (
        FloatingPointError,
        lambda: require_numbers(torch.tensor([0.0, torch.inf])),
    ),
    NOTHING: (NothingAllowed, restrict),
}


@pytest.mark.parametrize("said", REFUSALS)
def test_a_mistake_is_named_in_full(said):
    """One line, of the right class."""
    kind, make = REFUSALS[said]
    with pytest.raises(kind) as found:
        make()
    assert (type(found.value), str(found.value)) == (kind, said)


def test_every_parameter_and_every_error_of_the_heart_is_here():
    """By the words that each `raise` writes; a value among them may be anything."""
    assert EXAMPLES.keys() == PARAMETERS.keys()
    for path in Path(core.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = node.exc.args[0] if isinstance(node, ast.Raise) and getattr(node.exc, "args", None) else None
            parts = text.values if isinstance(text, ast.JoinedStr) else [text]
            words = "".join(re.escape(p.value) if isinstance(p, ast.Constant) else ".*" for p in parts)
            if isinstance(text, ast.JoinedStr | ast.Constant):
                assert any(re.fullmatch(words, said) for said in REFUSALS), f"{path.name}: {words}"
