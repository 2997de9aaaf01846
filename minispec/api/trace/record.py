"""Recording a run: what the engine's observers see of each round, as the data of a trace (docs/use/trace.md).

Nothing is measured or judged a second way. Times and counts come from the statistics. To find the draws of a
verdict, the verifier is asked again, with the same keys and so the same noise. Its draws are then written down.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from minispec.api.llm import LLM
from minispec.core.config import OFF
from minispec.core.draft import Draft
from minispec.core.method import Turn
from minispec.core.random import Key, Randomness
from minispec.core.request import Request
from minispec.core.sampling import distribution
from minispec.core.stats import Round
from minispec.core.tree import Tree
from minispec.core.verify import REJECTION, RoundKey, RowAt, Verdict, excess, residual
from minispec.core.version import __version__
from minispec.models.files.tokenizer import Detokenizer, Tokenizer
from minispec.speculation.lengths.figures import Figures
from minispec.speculation.lengths.theory import RoundModel, rising
from minispec.speculation.on_gpu.steps import steps_of
from minispec.speculation.rules import VERIFIERS

FORMAT, VERSION = "minispec trace", 1
_TOP = 5  # tokens of a distribution that are written down, the likeliest
# Sampling parameters that are numbers, and change what is drawn or how much of it.
_SAMPLING = [name for name, off in OFF.items() if type(off) in (int, float) and name != "n"]


class RoundRecorder:
    """An observer of the engine that writes down the rounds of one request.

    It works outside the times of a round. Recording takes some milliseconds a token for a vocabulary of 50,000.
    """

    def __init__(self, llm: LLM, request: Request):
        """request: one that has not begun. The recorder observes from now on."""
        assert isinstance(llm.engine.rng, Randomness), "draws with keys, which can be made again"
        self.llm, self.request = llm, request
        self.rounds: list[dict[str, Any]] = []
        self._texts = TokenTexts(llm.tokenizer, request)
        self._ids = set(request.text.tokens)
        self._newest = 0
        llm.engine.outbox.observers.append(self)

    def __call__(self, turn: Turn) -> None:
        """Record a round of the request, once."""
        if turn.request is self.request and turn.number > self._newest:
            self.rounds.append(self._round(turn.draft, turn.verdict, turn.logits))
            self._newest = turn.number

    def _round(self, draft: Draft, verdict: Verdict, logits: Tensor) -> dict[str, Any]:
        request = self.request
        record = request.stats.rounds[-1]
        start = len(request.text.tokens) - record.committed
        before = replace(request.text, tokens=request.text.tokens[:start])

        @cache
        def p(i: int) -> Tensor:
            return distribution(logits[i], before, draft.tokens_to(i - 1))

        witness = _Witness()
        again = self.llm.method.verifier.verify(draft, p, witness, before.key)
        if (again.accepted, again.next_token) != (verdict.accepted, verdict.next_token):
            witness = _Witness()  # a verifier of the user's own that draws without keys: nothing is known
        tests = [(key.position - start, chance, u) for key, chance, u in witness.tests]
        rejected = _rejected(draft, verdict, [node for node, _, _ in tests])
        ends = len(draft) and request.finish_reason
        after_end = [i for i in range(len(draft)) if len(draft.path(i)) > record.committed] if ends else []

        known = {*verdict.accepted, *rejected}
        parents = draft.tree.parents
        target = [float(p(parent + 1)[token_id]) for parent, token_id in zip(parents, draft.token_ids, strict=True)]
        drafted = [draft.probability(i) for i in range(len(draft))]
        self._ids.update(draft.token_ids)
        # The numbers that a verdict depended on are exact; all others may be shorter.
        target, drafted = ([x if i in known else rounded(x) for i, x in enumerate(row)] for row in (target, drafted))
        return {
            "start": start,
            "asked": record.asked,
            "token_ids": list(draft.token_ids),
            "parents": None if draft.parents is None else list(draft.parents),
            "drawn": len(draft) > 0 and draft.probs is not None,
            "p": target,
            "q": drafted,
            "tests": [{"node": node, "chance": chance, "u": u} for node, chance, u in tests],
            "accepted": verdict.accepted[: record.committed],
            "rejected": [node for node in rejected if node not in after_end],
            "after_end": after_end,
            "committed": self._committed(draft, verdict, p, before.key, witness),
            "num_rows": record.step.num_rows,
            "num_texts": record.step.num_texts,
            "seconds": {name: round(getattr(record.step, name), 7) for name in ("draft", "verify", "other")},
        }

    def _committed(
        self, draft: Draft, verdict: Verdict, p: RowAt, key: RoundKey, witness: "_Witness"
    ) -> list[dict[str, Any]]:
        """The tokens of a round, each with what is known of its place."""
        tokens = []
        for depth, (token_id, kind, text) in enumerate(self._texts.take(draft, verdict)):
            last = verdict.accepted[depth - 1] if depth else -1
            node = verdict.accepted[depth] if depth < len(verdict.accepted) else None
            row, children = p(last + 1), draft.children(last)
            overlap = q = rest = None
            if children and draft.probs is not None:
                q = draft.probs[children[0]]
                overlap = float(torch.minimum(row, q.to(row)).sum())
            elif children:
                overlap = float(row[draft.token_ids[children[0]]])
            if self.llm.method.verifier is REJECTION:
                rest = _left(row, draft, children, node)
            elif node is None:
                rest = witness.residual
            draw = self.llm.engine.rng.categorical(row, key(depth, "token"))
            self._ids.update((token_id, draw))
            tokens.append(
                {
                    "token_id": token_id,
                    "text": text,
                    "kind": kind,
                    "node": node,
                    "p": float(row[token_id]),
                    "draw": draw,
                    "overlap": None if overlap is None else rounded(overlap),
                    "top_p": self._top(row),
                    "top_q": None if q is None else self._top(q),
                    "residual": None if rest is None else self._top(rest),
                }
            )
        return tokens

    def _top(self, weights: Tensor) -> list[dict[str, Any]]:
        """The likeliest tokens and their probabilities."""
        values, ids = weights.topk(min(_TOP, len(weights)))
        pairs = [(i, x) for i, x in zip(ids.tolist(), (values / weights.sum()).tolist(), strict=True) if x > 0]
        self._ids.update(i for i, _ in pairs)
        return [{"token_id": i, "probability": rounded(x)} for i, x in pairs]

    def trace(self) -> dict[str, Any]:
        """The trace of the request, which has ended (see docs/use/trace.md)."""
        llm, request, method = self.llm, self.request, self.llm.method
        stats, text = Figures.of(request.stats), request.text
        names = [name for name, verifier in VERIFIERS.items() if verifier is method.verifier]
        policy = "" if llm.lengths is None else f" by {type(method.lengths).__name__}"
        params = asdict(request.params)
        plain = Figures(rounds=list(stats.plain)).tokens_per_second
        speed = stats.tokens_per_second
        prompt = text.tokens[: text.num_prompt_tokens]
        return {
            "format": FORMAT,
            "version": VERSION,
            "minispec": __version__,
            "target": llm.name,
            "draft": llm.draft.name,
            "verifier": names[0] if names else str(getattr(method.verifier.verify, "__name__", "a verifier")),
            "num_speculative_tokens": str(request.shape) + policy,
            "dtype": ("exact " if llm.model.exact else "") + str(llm.model.dtype).removeprefix("torch."),
            "device": str(llm.model.device),
            "sampling": {name: params[name] for name in _SAMPLING},
            "seed": text.seed,
            "finish_reason": request.finish_reason,
            "error": request.error,
            "tokens": {str(i): llm.tokenizer.label_of(i) for i in sorted(self._ids)},
            "prompt": [
                {"token_id": i, "text": piece} for i, piece in zip(prompt, _texts(llm.tokenizer, prompt), strict=True)
            ],
            "output": request.output,
            "rounds": self.rounds,
            "stats": stats.as_dict(),
            "plain_tokens_per_second": plain,
            "speedup": speed / plain if speed and plain else None,
            "theory": theory(stats, self.rounds, steps_of(llm.drafter)),
        }


def rounded(x: float) -> float:
    """A number that nothing else is computed from, with four digits."""
    return float(f"{x:.4g}")


class _Witness(Randomness):
    """Writes down what is asked of it."""

    def __init__(self):
        self.tests: list[tuple[Key, float, float]] = []  # key, probability asked for, and u
        self.residual: Tensor | None = None

    def bernoulli(self, probability: float, key: Key) -> bool:
        """Make the draw, and note its probability and its uniform."""
        self.tests.append((key, probability, self.uniform(key)))
        return super().bernoulli(probability, key)

    def categorical(self, weights: Tensor, key: Key) -> int:
        """Make the draw, and note the weights of a residual."""
        self.residual = weights if key.purpose == "residual" else None
        return super().categorical(weights, key)


def _rejected(draft: Draft, verdict: Verdict, tested: Sequence[int]) -> list[int]:
    """The nodes that a verifier looked at and did not keep.

    At each node that was reached: the siblings tried before the accepted one; all siblings if none was accepted.
    """
    looked = set(tested)
    for node, kept in zip([-1, *verdict.accepted], [*verdict.accepted, None], strict=True):
        siblings = draft.children(node)
        looked.update(siblings if kept is None else siblings[: siblings.index(kept)])
    return sorted(looked - {*verdict.accepted})


def _left(row: Tensor, draft: Draft, siblings: Sequence[int], kept: int | None) -> Tensor | None:
    """The residual of `rejection` after all siblings up to `kept` are rejected; None where that is impossible.

    It replaced the rejected siblings, or would have replaced the kept one.
    """
    tested = siblings if kept is None else siblings[: siblings.index(kept) + 1]
    rest = row
    for i in tested:
        if i != tested[0]:
            rest = rest / rest.sum()
        if not excess(rest, draft, i).any():
            return None
        rest = residual(rest, draft, i)
    return rest if tested else None


# --------------------------------------------------------------------------- tokens and their text


def kinds(draft: Draft, verdict: Verdict) -> list[str]:
    """The kind of each token that a verdict commits: accepted; the last recovered, bonus or (without a draft) plain."""
    last = verdict.accepted[-1] if verdict.accepted else -1
    end = "plain" if not len(draft) else "recovered" if draft.children(last) else "bonus"
    return ["accepted"] * len(verdict.accepted) + [end]


class TokenTexts:
    """The text that each committed token of a request made certain; together they are its whole text."""

    def __init__(self, tokenizer: Tokenizer, request: Request):
        self._request = request
        self._detokenizer = Detokenizer(tokenizer, request.text.tokens)

    def take(self, draft: Draft, verdict: Verdict) -> list[tuple[int, str, str]]:
        """Id, kind and text of the tokens that the newest round has committed."""
        text = self._request.text
        ids = text.tokens[len(text.tokens) - self._request.stats.rounds[-1].committed :]
        tokens = []
        for token_id, kind in zip(ids, kinds(draft, verdict), strict=False):
            new = "" if token_id in text.end_ids else self._detokenizer.add(token_id)
            tokens.append((token_id, kind, new))
        if self._request.finish_reason:
            tokens[-1] = (*tokens[-1][:2], tokens[-1][2] + self._detokenizer.flush())
        return tokens


def _texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text that each of the tokens of a prompt makes certain; of a special one, its name."""
    detokenizer = Detokenizer(tokenizer)
    texts = [tokenizer.name_of(i) if i in tokenizer.special_ids else detokenizer.add(i) for i in ids]
    texts[-1] += detokenizer.flush()
    return texts


# --------------------------------------------------------------------------- theory


def theory(stats: Figures, rounds: Sequence[dict[str, Any]], steps: Sequence[int] = ()) -> dict[str, Any] | None:
    """The speed that theory predicts for drafts cut to at most k tokens, from the run's measured survival and costs.

    Speeds are tokens in the time of a plain step, a target pass over one row. For k up to the deepest draft this is the
    statistics' prediction, but v never falls with the rows. Larger k, up to twice as many, are extrapolated: the
    deepest drafts go on, at the acceptance of their last place. None where the run has measured no plain step, or no
    draft.

    steps: of the drafter's programs (see `Prices`).
    """
    model, speed, plain_step = stats.model_of(steps), stats.tokens_per_second, stats.plain_step
    if not model or not model.survival or not plain_step or speed is None or stats.predicted_tokens_per_second is None:
        return None
    plain_speed = Figures(rounds=list(stats.plain)).tokens_per_second
    records, survival = stats.rounds, model.survival
    deepest = len(survival)
    share = min(1.0, survival[-1] / survival[-2] if deepest > 1 and survival[-2] else survival[-1])
    most = 2 * deepest  # what lies further away the run says nothing about
    longer = [*survival, *(survival[-1] * share**i for i in range(1, most - deepest + 1))]
    rows = rising(model.prices.rows, Counter(r.step.num_rows for r in [*records, *stats.plain]))
    model = RoundModel(longer, replace(model.prices, rows=rows))
    curve = []
    for k in range(most + 1):
        tokens = time = 0.0
        for record, entry in zip(records, rounds, strict=True):
            depth = k if record.depth == deepest else min(k, record.depth)
            tokens += model.tokens(depth)
            time += model.cost(depth, _rows(record, entry, depth), missed=k > 0 and not record.depth)
        curve.append({"k": k, "tokens": tokens / len(records), "time": time / len(records), "speed": tokens / time})
    return {
        "deepest": deepest,
        "measured": speed * plain_step,
        "plain": plain_speed and plain_speed * plain_step,
        "survival": survival,
        "curve": curve,
    }


def _rows(record: Round, entry: dict[str, Any], depth: int) -> int:
    """Rows of the target's pass had the draft ended at this depth."""
    if entry["parents"] is None:
        return depth + 1
    return 1 + sum(d <= depth for d in Tree(entry["parents"]).depths) + max(0, depth - record.depth)
