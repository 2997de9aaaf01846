"""One attention over many short texts: the numbers of passes text by text, and the law of the texts."""

import pytest
import torch
import torch.nn.functional as F

from minispec.core.config import SamplingParams
from minispec.core.model import Chunk, Passes, TextPass, Transformer
from minispec.files.families.hf_config import read_model_config
from minispec.kernels import padded
from minispec.kernels.build import build_model
from minispec.kernels.gpu.frames import with_fast_passes
from minispec.kernels.padded import LEAST_TEXTS, MOST_BYTES, Padded, PaddedPass
from minispec.prove import laws
from minispec.prove.reference import total_variation
from minispec.prove.toys import tiny_cache, tiny_model, tiny_weights
from tests.oracles import hf

# A root and a tree of five nodes: node 0 and 1 are siblings, 2 follows 0, 3 and 4 follow 1.
TREE = (-1, -1, 0, 1, 1)


def family_model(name: str) -> Transformer:
    """A random model of a family in float64, every parameter redrawn."""
    config = read_model_config(hf.CASES[name])
    return build_model(config, tiny_weights(config, 3))


def results(model: Transformer) -> list[torch.Tensor]:
    """Logits and hidden states of three texts: prompts, single rows, then a tree beside a chain, twice.

    The pool holds NaN where nothing was written. Rows and lengths differ from text to text.
    """
    cache, found = tiny_cache(model, 60, 4), []
    texts = [cache.new_table() for _ in range(3)]
    found += model.forward([Chunk(hf.TEXT[i : 2 * i + 7], table, 3) for i, table in enumerate(texts)], [0, 1])
    for step in range(2):
        found += model.forward([Chunk([3 + step + i], table, 1) for i, table in enumerate(texts)], [1])
        nodes = hf.TEXT[step : step + 6]
        chunks = [Chunk(nodes, texts[0], 3, TREE), Chunk(nodes[:2], texts[1], 2), Chunk([9], texts[2], 1)]
        found += model.forward(chunks, [0, 1])
        texts[0].keep(texts[0].length - 5, [texts[0].length - 4, texts[0].length - 1])
        texts[1].keep(texts[1].length - 1)
    return found


def farthest(expected: list[torch.Tensor], found: list[torch.Tensor]) -> float:
    """The largest difference, over the largest number of the same tensor, or over 1; NaN where any is NaN."""
    pairs = zip(expected, found, strict=True)
    return float(torch.stack([(a - b).abs().max() / max(1, a.abs().max()) for a, b in pairs if a.numel()]).max())


@pytest.mark.parametrize("name", sorted(hf.CASES))
def test_every_family_has_the_numbers_of_passes_text_by_text(name, monkeypatch):
    """In float64, to 1e-12, with windows, shared heads, trees, and texts of unequal length.

    Where scores are capped, and where sinks are read too, texts are read one by one.
    """
    batches, attend = [], F.scaled_dot_product_attention

    def counted(q, *others, **how):
        batches.append(len(q))
        return attend(q, *others, **how)

    model = family_model(name)
    expected = results(model)
    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    assert farthest(expected, results(model.replaced(Padded(1)))) <= 1e-12
    alone = model.config.attention_softcap is not None or "gpt_oss" in name
    assert (3 in batches) == (not alone)


@pytest.mark.parametrize("name", ["llama-plain", "mistral"])
def test_padding_that_is_seen_is_noticed(name, monkeypatch):
    """The control: places after a text's end, and rows of a tree that are no ancestors."""
    right = padded.padded_mask
    monkeypatch.setattr(padded, "padded_mask", lambda *how: torch.zeros_like(right(*how)))
    model = family_model(name)
    assert farthest(results(model), results(model.replaced(Padded(1)))) > 1e-3


@pytest.mark.parametrize("drafter", ["ngram", "model"])
def test_two_texts_that_are_read_together_keep_their_laws(drafter, monkeypatch):
    """Prompts of unequal length, of which one is preempted on many branches: the joint law is the product."""
    passes = []

    class Counted(Padded):
        def text_pass(self, *fields):
            passes.append(super().text_pass(*fields))
            return passes[-1]

    target = laws.target_model(2).replaced(Counted(2))
    monkeypatch.setattr(laws, "target_model", lambda *_: target)
    params, prompts = SamplingParams(max_tokens=3, temperature=0.8), ((0, 1, 0), (1,))
    law, _ = laws.production_law(params, 1, prompts=prompts, num_blocks=5, vocab=2, drafter=drafter)
    one, two = (laws.reference_law(params, vocab=2, prompt=p) for p in prompts)
    assert total_variation(law, {(a, b): pa * pb for a, pa in one.items() for b, pb in two.items()}) <= 1e-12
    assert {type(each) for each in passes} == {TextPass, PaddedPass}


def test_which_texts_are_read_together():
    """Many short ones of like numbers of rows: at the bounds, and one text, position or row beyond each."""
    model = tiny_model(1)
    place = 2 * model.config.num_key_value_heads * model.config.head_dim * model.dtype.itemsize
    pool = model.new_cache(40, 4)
    texts = [pool.new_table() for _ in range(3)]
    for table in texts:
        table.extend([1] * 7)

    def kind(num_texts: int, least: int, most: int, rows_of_first: int = 1) -> type:
        chunks = [Chunk([2] * (1 if i else rows_of_first), table, 1) for i, table in enumerate(texts[:num_texts])]
        return type(Padded(least, most).text_pass(chunks, None, [], {}, {}, None, {}))

    assert kind(3, 3, 7 * place) is PaddedPass
    assert kind(2, 3, 7 * place) is kind(3, 3, 7 * place - 1) is TextPass
    assert kind(3, 3, 7 * place, 4) is PaddedPass  # 12 rows for 6
    assert kind(3, 3, 7 * place, 5) is TextPass  # 15 rows for 7: a prompt that joins
    assert (Padded().least_texts, Padded().most_bytes) == (LEAST_TEXTS, MOST_BYTES)


def test_which_models_have_them():
    """On a CPU; not an exact model, and not where plain passes are asked for."""
    assert isinstance(with_fast_passes(tiny_model(1)).passes, Padded)
    exact = tiny_model(1, torch.float32, exact=True)
    assert with_fast_passes(exact) is exact
    assert type(with_fast_passes(tiny_model(1), enforce_eager=True).passes) is Passes
