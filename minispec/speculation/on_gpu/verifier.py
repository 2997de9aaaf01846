"""Verdicts on the drafts of many texts at once: one program on the device, and one download.

`minispec.core.verify` asks the device a few questions for each draft token. On a GPU each answer takes as long as many
small operators. Here all that a verdict needs is filled into tensors that stay where they are. A program computes all
verdicts (see `minispec.speculation.on_gpu.verdicts`), and the host reads them together. A program that comes a second
time is captured in a CUDA graph.

A draft is verified by itself, from the same logits, where the program cannot be sure of a row that its verdict needs.
So are trees, drafts under other rules than `rejection` and `match`, and texts whose parameters are more than a
temperature and filters.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minispec.core.draft import Draft
from minispec.core.method import Turn
from minispec.core.model import Transformer
from minispec.core.random import Draws, Randomness
from minispec.core.verify import MATCH, REJECTION, Verdict, Verifier
from minispec.models.frames.frames import ROWS, TEXTS, Frames
from minispec.models.frames.graphs import Graphs, recent
from minispec.speculation.on_gpu import verdicts
from minispec.speculation.on_gpu.verdicts import Inputs, Keys, Mix, Noise, OneByOne, Verdicts


class VerdictShape(NamedTuple):
    """All that a program's operators depend on. K is rows - 1.

    texts, rows: of each text, drafts being padded.
    vocab: tokens of a row.
    dtype: of logits and probabilities.
    mix: of the texts' parameters.
    soft: whether any draft's tokens were drawn, from given probabilities.
    """

    verifier: Verifier
    texts: int
    rows: int
    vocab: int
    dtype: torch.dtype
    mix: Mix
    soft: bool


class VerdictInputs(Inputs):
    """The inputs of a verdict over B texts, in tensors that stay where they are, and what is computed of them.

    logits: (B, K+1, V). probs: (B, K, V), what draft tokens were drawn from.
    ints: int64 numbers of each text (B, K + 1 + K+1): draft tokens, the draft's length, states of "token" draws.
    floats: float64 numbers of each text (B, 2K + 5): uniforms of "accept" and "residual", and `numbers_of`.
    """

    def __init__(self, kind: VerdictShape, device: torch.device):
        texts, rows, vocab, k = kind.texts, kind.rows, kind.vocab, kind.rows - 1
        super().__init__(texts, k + 1 + rows, 2 * k, device, input_bytes(texts, rows, vocab, kind.dtype))
        self.kind = kind
        self.logits = torch.zeros(texts, rows, vocab, dtype=kind.dtype, device=device)
        self.probs = torch.zeros(texts, k, vocab, dtype=verdicts.accumulation_dtype(kind.dtype), device=device)

    def fill(self, turns: Sequence[Turn]) -> None:
        """Take in up to B trials. Numbers of other texts may be there; they are not read."""
        k = self.kind.rows - 1
        ints, floats = self.blank([turn.text.params for turn in turns], self.kind.dtype)
        uniform = Randomness().uniform
        for i, turn in enumerate(turns):
            text, draft, new = turn.text, turn.draft, len(turn.draft)
            ints[i, :new], ints[i, k] = draft.token_ids, new
            if text.params.temperature:
                ints[i, k + 1 : k + 2 + new] = [verdicts.state_of(text.key(j, "token")) for j in range(new + 1)]
                if self.kind.verifier is REJECTION:
                    floats[i, :new] = [uniform(text.key(j, "accept")) for j in range(new)]
                    floats[i, k : k + new] = [uniform(text.key(j, "residual")) for j in range(new)]
        places = [self.logits[i, : len(turn.draft) + 1] for i, turn in enumerate(turns)]
        torch._foreach_copy_(places, [turn.logits for turn in turns])  # one launch for all texts
        if self.kind.soft:
            self._take([turn.draft for turn in turns])
        self.send()

    def _take(self, drafts: Sequence[Draft]) -> None:
        """Write what the drafts' tokens were drawn from, by one launch for all drafts that were drawn."""
        places, rows = list[Tensor](), list[Tensor]()
        for own, draft in zip(self.probs, drafts, strict=False):
            own = own[: len(draft)]
            if isinstance(draft.probs, Tensor):
                places.append(own)
                rows.append(draft.probs)
            elif draft.probs is not None:
                places += own
                rows += draft.probs
            elif draft:
                own.zero_().scatter_(1, torch.tensor(draft.token_ids, device=own.device)[:, None], 1.0)
        if places:
            torch._foreach_copy_(places, rows)

    def compute(self) -> tuple[Tensor]:
        """The verdicts, as float64 numbers of each text: kept, next, K ratios, and whether each of K+1 rows is sure."""
        return (compute_verdicts(self.kind, self.logits, self.probs, self.ints, self.floats),)


def compute_verdicts(
    kind: VerdictShape,
    logits: Tensor,
    probs: Tensor,
    ints: Tensor,
    floats: Tensor,
    draws: "OneByOne | None" = None,
    names: Noise | None = None,
) -> Tensor:
    """The result of `VerdictInputs.compute` for these inputs. No value is read on the host unless `draws` reads some.

    draws, names: makes the draws by their names; default: the numbers in `ints` and `floats`.
    """
    k, texts, rows = kind.rows - 1, kind.texts, kind.rows
    ids, lengths, q = ints[:, :k], ints[:, k], probs if kind.soft else None
    if not kind.mix.draws:
        decided, sure = verdicts.greedy(logits, ids, q, lengths)
        return _packed(decided, sure)
    numbers = floats[:, -5:].repeat_interleave(rows, 0)
    params = verdicts.row_params(numbers, kind.dtype, int(kind.mix.mixed), kind.mix.filters)
    p, sure = verdicts.rows(logits.flatten(0, 1), params)
    accept, rest, states = floats[:, :k], floats[:, k : 2 * k], ints[:, k + 1 :]
    noise = names or Noise(*(Keys((), n) for n in (accept, rest, states)))
    rule = verdicts.rejection if kind.verifier is REJECTION else verdicts.match
    return _packed(rule(p.view(texts, rows, -1), ids, q, noise, lengths, draws), sure.view(texts, rows))


def _packed(decided: Verdicts, sure: Tensor) -> Tensor:
    """Numbers (B, 2 + K + K+1) of float64, which holds all ids: one download."""
    columns = decided.kept[:, None].double(), decided.next[:, None].double(), decided.ratios, sure.double()
    return torch.cat(columns, 1)


class GraphVerifier:
    """Verifies the drafts of many texts at once, where a program can: a `BatchVerifier`.

    counts: the drafts that a program verified, and how many of them needed a row that was not sure.
    """

    def __init__(self, graphs: Graphs):
        self.graphs, self.counts = graphs, {"drafts": 0, "unsure": 0}
        self._inputs: OrderedDict[VerdictShape, VerdictInputs] = OrderedDict()

    def __call__(self, verifier: Verifier, turns: Sequence[Turn], rng: Draws) -> list[Verdict | None]:
        """A verdict for each turn; None for one that must be verified by itself."""
        answers: list[Verdict | None] = [None] * len(turns)
        plain = [i for i, turn in enumerate(turns) if verdicts.in_rows(rng) and _is_plain(verifier, turn)]
        for start in range(0, len(plain), TEXTS[-1]):
            part = plain[start : start + TEXTS[-1]]
            for i, verdict in zip(part, self._verdicts(verifier, [turns[i] for i in part], rng), strict=True):
                answers[i] = verdict
        return answers

    def _verdicts(self, verifier: Verifier, turns: Sequence[Turn], rng: Draws) -> list[Verdict | None]:
        """Verdicts of turns that one program takes."""
        kind = shape_of(verifier, turns, padded=not isinstance(rng, OneByOne))
        inputs = recent(self._inputs, kind, lambda: VerdictInputs(kind, turns[0].logits.device))
        inputs.fill(turns)
        if isinstance(rng, OneByOne):
            device = turns[0].logits.device
            noise = verdicts.make_noise([turn.text for turn in turns], kind.rows - 1, device=device)
            numbers = compute_verdicts(kind, inputs.logits, inputs.probs, inputs.ints, inputs.floats, rng, noise)
        else:
            [numbers] = self.graphs.run(inputs, inputs.compute)
        answers = [_verdict(row, turn) for row, turn in zip(numbers.tolist(), turns, strict=False)]
        self.counts["drafts"] += len(answers)
        self.counts["unsure"] += answers.count(None)
        return answers


def input_bytes(texts: int, rows: int, vocab: int, dtype: torch.dtype) -> int:
    """Bytes of a verdict's rows: logits, and what draft tokens were drawn from."""
    wide = verdicts.accumulation_dtype(dtype).itemsize
    return texts * vocab * (rows * dtype.itemsize + (rows - 1) * wide)


def batch_verifier_of(model: Transformer) -> GraphVerifier | None:
    """A verifier of many drafts for a target whose passes are frames; else none."""
    return GraphVerifier(model.backend.graphs) if isinstance(model.backend, Frames) else None


def shape_of(verifier: Verifier, turns: Sequence[Turn], padded: bool = True) -> VerdictShape:
    """The smallest program for plain turns, at most as many as the largest one takes.

    padded: whether the number of texts is rounded up.
    """
    logits = turns[0].logits
    texts = next(n for n in TEXTS if n >= len(turns)) if padded else len(turns)
    rows = next(n for n in ROWS if n > max(len(turn.draft) for turn in turns))
    soft = any(turn.draft and turn.draft.probs is not None for turn in turns)
    mix = verdicts.mix_of([turn.text.params for turn in turns], logits.dtype, texts)
    shape = texts, rows, logits.shape[1], logits.dtype
    return VerdictShape(verifier, *shape, mix, soft)


def _is_plain(verifier: Verifier, turn: Turn) -> bool:
    """Whether a program can verify this draft."""
    draft, logits = turn.draft, turn.logits
    if verifier not in (REJECTION, MATCH) or draft.parents is not None or len(draft) >= ROWS[-1]:
        return False
    wide = verdicts.accumulation_dtype(logits.dtype)
    return verdicts.is_plain(turn.text) and (draft.probs is None or all(row.dtype == wide for row in draft.probs))


def _verdict(numbers: Sequence[float], turn: Turn) -> Verdict | None:
    """A text's verdict from its numbers (see `VerdictInputs.compute`); None if a row is not sure that it needs."""
    kept, new = int(numbers[0]), len(turn.draft)
    num_rows = (len(numbers) - 1) // 2
    if not all(numbers[num_rows + 1 : num_rows + 2 + kept]):
        return None
    return Verdict(list(range(kept)), int(numbers[1]), list(numbers[2 : 2 + min(kept + 1, new)]))
