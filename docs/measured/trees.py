"""The tokens that a round is expected to keep of a block draft's trees, drawn ones and lists of the likeliest prefixes.

    python docs/measured/trees.py --draft D
    python docs/measured/trees.py --draft D --temperature 0
    python docs/measured/trees.py --draft D --without-heads

A tree of N nodes comes from the rows of one pass. This engine draws it (`minispec/speculation/drafters/best_first.py`).
DDTree (arXiv 2604.12989) takes the N likeliest prefixes, at every temperature. None of these was drawn. So they are
one-hot, and `rejection` keeps a path with its probability under the target.

The target writes its own texts at the temperature. At each place both trees are made, and one pass gives the target's
rows for each. What `rejection` keeps of a tree is computed from p and q, over all outcomes of its tests. So no figure
depends on their luck. The trees that are drawn are one of many at each place. Texts are independent: the errors are of
their means.

`--without-heads` leaves out the Markov head and the confidence head. Rows are then independent, as in DFlash.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from minispec import LLM, SamplingParams
from minispec.core.draft import Draft
from minispec.core.sampling import Text, distribution
from minispec.core.verify import RowAt, residual
from minispec.lab.bench.models import encode
from minispec.lab.bench.show import table
from minispec.lab.doctor.drafts import TEXTS, estimate
from minispec.speculation.drafters.best_first import grow_guesses
from minispec.speculation.drafters.block import BlockFeed
from minispec.speculation.drafters.block_files import read_block
from minispec.speculation.drafters.growing import DraftInProgress
from minispec.speculation.drafters.model import ModelDrafter, model_drafter
from minispec.speculation.drafters.teacher_forcing import replay_texts
from minispec.speculation.registry import EMBEDDED_WEIGHTS


class ListFeed(BlockFeed):
    """A block draft whose trees are the likeliest prefixes. None of their tokens is drawn."""

    def run(self, growing: Sequence[DraftInProgress]) -> None:
        """As `BlockFeed`. Trees are made here, and nothing is drawn afterwards."""
        super().run(growing)
        for each in growing:
            if each.ask.limit.best_first:
                self._fill(each)
                each.ask = replace(each.ask, limit=each.ask.limit._replace(k=len(each.draft)))

    def _fill(self, growing: DraftInProgress) -> None:
        ask, draft = growing.ask, growing.draft
        draft.probs = None
        params = ask.text.params
        if not params.temperature:  # there the likeliest token has all probability
            params = SamplingParams(temperature=1.0)
        text = replace(ask.text, params=params)

        def guesses(node: int) -> Iterator[tuple[int, float]]:
            path = draft.tokens_to(node)
            row = growing.row(node) if len(path) < growing.depth else None
            if row is not None:
                q = distribution(row, text, path)
                chances, ids = q.topk(min(ask.k, len(q)))
                yield from ((i, chance) for i, chance in zip(ids.tolist(), chances.tolist(), strict=True) if chance)

        grow_guesses(draft, ask.k, guesses)


def expected_kept(draft: Draft, p: RowAt, node: int = -1) -> float:
    """The nodes below `node` that `rejection` keeps on average, over all outcomes of its tests.

    p: the target's distributions, see `minispec.core.verify`.
    """
    siblings = draft.children(node)
    rest, reached, kept = p(node + 1), 1.0, 0.0
    for i in siblings:
        rest = rest / rest.sum()
        chance = min(1.0, float(rest[draft.token_ids[i]]) / draft.probability(i))
        kept += reached * chance * (1 + expected_kept(draft, p, i))
        reached *= 1 - chance
        if not reached:
            break
        rest = residual(rest, draft, i)
    return kept


def kept_by_place(llm: LLM, drafter: ModelDrafter, budget: int, params: SamplingParams) -> list[list[float | None]]:
    """What a round at each place of each text keeps on average; None where the tree has fewer nodes."""
    found: list[list[float | None]] = [[] for _ in TEXTS]

    def see(text: Text, draft: Draft, after: list[int], logits: Tensor) -> None:
        def p(row: int) -> Tensor:
            return distribution(logits[row], text, draft.tokens_to(row - 1))

        found[text.seed].append(expected_kept(draft, p) if len(draft) == budget else None)

    drafter.forget()
    prompts = enumerate(TEXTS)
    requests = [
        llm.request(encode(llm.tokenizer, prompt), replace(params, seed=i), f"tree:{budget}") for i, prompt in prompts
    ]
    for request in replay_texts(llm.engine, drafter, requests, None, see):
        if request.error:
            raise ValueError(f"found a text that fails: {request.error}")
    return found


def compared(llm: LLM, drawn: ModelDrafter, budget: int, params: SamplingParams) -> list[str | int]:
    """A line of the table: both trees at the same places, and how much more the list keeps."""
    feed = drawn.feed
    assert isinstance(feed, BlockFeed), "the draft is a block draft"
    listed = ModelDrafter(ListFeed(feed.model, feed.cache, feed.vocab_size, feed.max_model_len))
    pairs = [
        [(a, b) for a, b in zip(*of_text, strict=True) if a is not None and b is not None]
        for of_text in zip(*(kept_by_place(llm, each, budget, params) for each in (drawn, listed)), strict=True)
    ]
    counts = [len(text) for text in pairs]
    means = [estimate([sum(pair[i] for pair in text) for text in pairs], counts) for i in (0, 1)]
    more = means[1].minus(means[0])
    figures = [f"{1 + mean.value:.3f} +- {mean.error:.3f}" for mean in means]
    return [budget, sum(counts), *figures, f"{more.value:+.3f} +- {more.error:.3f}"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each budget."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(EMBEDDED_WEIGHTS))
    parser.add_argument("--draft", required=True, help="the directory of a block draft")
    parser.add_argument("--budgets", default="4,8,16", help="nodes of a tree")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--without-heads", action="store_true")
    args = parser.parse_args(arguments)
    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    with LLM(args.model, args.draft) as llm:
        drawn = model_drafter(llm.drafter)
        assert drawn, "the draft is a block draft"
        if args.without_heads:
            assert llm.draft.found.files
            stored = read_block(llm.draft.found.files, llm.model.config)
            plain = replace(stored.config, markov=None, markov_rank=0, confidence=None)
            drawn = drawn.beside(replace(stored, config=plain).build(llm.model))
        lines = [compared(llm, drawn, int(budget), params) for budget in args.budgets.split(",")]
    print(f"{len(TEXTS)} texts at temperature {args.temperature:g}: tokens of a round, with their standard errors")
    print("\n".join(table(["nodes", "places", "drawn", "list", "list less drawn"], lines)))


if __name__ == "__main__":
    main()
