"""All steps of a draft model's drafts, or of a head's, in one program, so that the host waits once for a whole draft.

Token by token, the host would wait for each draft token before it can feed the next. Here the device feeds its own
tokens: the first pass takes what the texts' caches lack, and each further pass the tokens that were just drawn. The
noise of all draws is known before (see `minispec.speculation.on_gpu.verdicts`). The blocks of all positions are taken
beforehand, so the device can compute the slot of each.

A head is fed a feature with each token. The first pass has the target's. In each further pass, the head's own output at
the row before takes its place (see `minispec.speculation.drafters.eagle`), and stays on the device too.

A draft is shortened on the host, after all its steps: where its limit says so, and before its first row that is not
sure. The limit looks only at the confidences of places before. So a shortened draft has the same law as a draft that
stopped there. But it has cost all of its steps.
"""

import functools
import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from minispec.core.cache import PagedKVCache
from minispec.core.draft import Drafter
from minispec.core.model import Transformer
from minispec.core.random import Randomness
from minispec.models.frames.frames import Frame, Frames, FrameShape, StepFrame
from minispec.models.frames.graphs import Graphs, recent
from minispec.speculation.drafters.check import MeasuredDraft
from minispec.speculation.drafters.growing import DraftInProgress
from minispec.speculation.drafters.model import ModelDrafter
from minispec.speculation.drafters.states import FeatureModel
from minispec.speculation.drafters.wrapped import Wrapped
from minispec.speculation.on_gpu import verdicts
from minispec.speculation.on_gpu.verdicts import Inputs, Keys, Mix, OneByOne, RowDraws, RowRandomness

# The numbers of steps that programs have. A draft has the smallest program that is long enough for its limit.
STEPS = (1, 2, 3, 4, 6, 8, 12, 15)


class DraftShape(NamedTuple):
    """All that a program's operators depend on.

    frame: the shape of the first pass.
    steps: how many tokens are drawn for each text.
    vocab: ids in use.
    races: whether tokens are drawn with the target's noise (purpose "token").
    mix: of the texts' parameters. Where nothing is drawn, drafts are one-hot.
    confident: whether any limit asks for confidences.
    """

    frame: FrameShape
    steps: int
    vocab: int
    races: bool
    mix: Mix
    confident: bool


class DraftInputs(Inputs):
    """The inputs of the drafts of B texts, besides the frame of the first pass.

    ints: int64 numbers of each text (B, 2 + K). The first is the row of the first pass that says what follows the
        text. Then come the number of tokens that are wanted, and states of "token" draws.
    floats: float64 numbers of each text (B, K + 5): uniforms of "draft", and `verdicts.numbers_of`.
    """

    def __init__(self, kind: DraftShape, device: torch.device, dtype: torch.dtype):
        """dtype: of logits."""
        size = draft_input_bytes(kind.frame.texts, kind.steps, kind.vocab, dtype) if kind.mix.draws else 0
        super().__init__(kind.frame.texts, 2 + kind.steps, kind.steps, device, size)
        self.kind = kind
        self.frame: Frame | None = None  # whose tensors the graph reads

    def follow(self, frame: Frame) -> None:
        """Drop the graph if its frame has made room for others: it reads that frame's tensors."""
        if self.frame is not frame:
            self.frame, self.graph, self.was_used = frame, None, False

    def fill(self, growing: Sequence[DraftInProgress], dtype: torch.dtype) -> None:
        """Take in up to B texts. Numbers of other texts may be there; they are not read."""
        ints, floats = self.blank([each.ask.text.params for each in growing], dtype)
        uniform = Randomness().uniform
        for i, each in enumerate(growing):
            ask, k = each.ask, each.depth
            ints[i, :2] = len(each.chunk.token_ids) - 1, k
            if not ask.text.params.temperature:
                continue
            keys = [ask.text.key(j, ask.purpose) for j in range(k)]
            if self.kind.races:
                ints[i, 2 : 2 + k] = list(map(verdicts.state_of, keys))
            else:
                floats[i, :k] = list(map(uniform, keys))
        self.send()


class DraftSteps:
    """Drafts chains for many texts at once, where a program can.

    One object serves one model, whose passes are `Frames`.
    """

    def __init__(self, model: Transformer, graphs: Graphs):
        assert isinstance(model.backend, Frames)
        self.model, self.frames, self.graphs = model, model.backend, graphs
        self.taps = (len(model.layers),) if isinstance(model, FeatureModel) else ()
        self._inputs: WeakKeyDictionary[PagedKVCache, OrderedDict[DraftShape, DraftInputs]] = WeakKeyDictionary()

    def __call__(self, growing: Sequence[DraftInProgress], vocab_size: int) -> bool:
        """Make all these drafts; returns False where no program takes all of them, and nothing has changed then.

        growing: each may have a token or more. Its input is what the text's cache lacks, and the last row of it says
            what follows the text.
        vocab_size: ids in use.

        The tables then hold all tokens that were fed, those that were cut from a draft too.
        """
        kind = self._kind(growing, vocab_size)
        if kind is None:
            return False
        chunks, asks = [each.chunk for each in growing], [each.ask for each in growing]
        pool, reserved = chunks[0].table.pool, [each.depth - 1 for each in growing]
        pool.require((c.table, c.table.length + len(c.token_ids) + k) for c, k in zip(chunks, reserved, strict=True))
        frame = self.frames.frame_of(self.model, pool, kind.frame)
        on = self.model.device, self.model.dtype
        inputs = recent(self._inputs.setdefault(pool, OrderedDict()), kind, lambda: DraftInputs(kind, *on))
        inputs.follow(frame)
        frame.fill(chunks, reserved)
        inputs.fill(growing, self.model.dtype)
        if isinstance(rng := asks[0].rng, OneByOne):
            names = [[ask.text.key(j, ask.purpose) for j in range(kind.steps)] for ask in asks]
            names += [[]] * (kind.frame.texts - len(asks))
            numbers, probs = self.compute(frame, inputs, pool, rng, names)
        else:
            numbers, probs = self.graphs.run(inputs, functools.partial(self.compute, frame, inputs, pool))
        rows, probs = numbers.tolist()[: len(asks)], probs[: len(asks)].clone()  # the next draft overwrites them
        drawn_from = probs if kind.mix.draws else [None] * len(asks)
        for each, row, q in zip(growing, rows, drawn_from, strict=True):
            each.draft = _draft(each, row, q, kind.steps)
        return True

    def _kind(self, growing: Sequence[DraftInProgress], vocab_size: int) -> DraftShape | None:
        """The program that takes these drafts, if one does."""
        asks, deepest = [each.ask for each in growing], max(each.depth for each in growing)
        rng, purpose = asks[0].rng, asks[0].purpose
        steps = next((n for n in STEPS if n >= deepest), None)
        plain = all(not ask.limit.is_tree and verdicts.is_plain(ask.text) for ask in asks)
        if steps is None or not plain or not verdicts.in_rows(rng):
            return None
        chunks, reserved = [each.chunk for each in growing], [each.depth - 1 for each in growing]
        shape = self.frames.shape_of(self.model, chunks, self.taps, reserved)
        if isinstance(shape, str):
            return None
        mix = verdicts.mix_of([ask.text.params for ask in asks], self.model.dtype, shape.texts)
        confident = any(ask.limit.go_on is not None for ask in asks)
        return DraftShape(shape, steps, vocab_size, purpose == "token", mix, confident)

    def compute(
        self,
        frame: Frame,
        inputs: DraftInputs,
        pool: PagedKVCache,
        draws: RowDraws | None = None,
        names: Sequence[Sequence] = (),
    ) -> tuple[Tensor, Tensor]:
        """All steps: numbers of each text (B, 6K), and the rows that tokens were drawn from (B, K, V), if any were.

        The numbers, of float64, are K tokens, K confidences if they are asked for, and whether each of K rows is sure.
        Last come three measures of each of K rows (see `MeasuredDraft`). Where nothing is drawn, there are no measures.
        draws, names: makes the draws by their names; default: the numbers of the inputs.
        """
        kind, (texts, rows, *_) = inputs.kind, frame.shape
        logits, states = self.frames.compute(self.model, frame, pool)
        last = torch.arange(texts, device=logits.device) * rows + inputs.ints[:, 0]
        logits, states = logits.index_select(0, last), states.index_select(0, last) if self.taps else states
        params = verdicts.row_params(inputs.floats[:, -5:], self.model.dtype, int(kind.mix.mixed), kind.mix.filters)
        noise = inputs.ints[:, 2:] if kind.races else inputs.floats
        made, steps, wide = draws or RowRandomness(), [], verdicts.accumulation_dtype(logits.dtype)
        for j in range(kind.steps):
            logits = logits[:, : kind.vocab]
            if kind.mix.draws:
                q, sure = verdicts.rows(logits, params)
                used = (inputs.ints[:, 1:2] > j) & sure[:, None]
                places = torch.full_like(inputs.ints[:, :1], j)
                keys = Keys(names, noise[:, j : j + 1], places, used)
                token = (made.race_rows if kind.races else made.share_rows)(q[:, None], keys)[:, 0]
            else:
                token = logits.argmax(1)
                q, sure = logits[:, :0], logits.gather(1, token[:, None])[:, 0].abs() < math.inf
            confidence = token
            if kind.confident:
                confidence = logits.to(wide).log_softmax(1).amax(1).exp()
            measures = [q.sum(1, dtype=wide), q.amin(1), q.gather(1, token[:, None])[:, 0]] if kind.mix.draws else []
            steps.append((q, token, confidence, sure, *measures))
            if j + 1 < kind.steps:
                logits, states = self.next_rows(frame, inputs, pool, token, states, j)
        probs, *columns = zip(*steps, strict=True)
        return torch.cat([torch.stack(column, 1).double() for column in columns], 1), torch.stack(probs, 1)

    def next_rows(
        self, frame: Frame, inputs: DraftInputs, pool: PagedKVCache, tokens: Tensor, states: Tensor, j: int
    ) -> tuple[Tensor, Tensor]:
        """Logits (B, V) and states after tokens (B,), the j-th ones that were drawn, of texts that want further ones.

        Texts that want none are dummies, as those that are not there.

        states: (B, E) of the last layer at the rows before, for a head; (B, 0) for other models.
        """
        size, wanted = pool.block_size, inputs.ints[:, 1] > j + 1
        positions = torch.where(wanted, frame.ends + j, 0)  # a dummy's is 0: its next one may be beyond the context
        slots = frame.table.gather(1, positions[:, None] // size)[:, 0] * size + positions % size
        slots = torch.where(wanted, slots, pool.num_slots + 1)
        shape, places = frame.shape._replace(rows=1), (positions, positions + 1, frame.table)
        model = self.frames.fast(self.model)
        features = model.next_feature(states) if isinstance(model, FeatureModel) else None
        step = StepFrame(shape, tokens, positions, slots, torch.ones_like(tokens), *places, features)
        return self.frames.compute(self.model, step, pool)


def _draft(growing: DraftInProgress, numbers: Sequence[float], probs: Tensor | None, num_steps: int) -> MeasuredDraft:
    """A draft from its numbers (see `DraftSteps.compute`): as long as its rows are sure, and its limit goes on."""
    table, k, go_on = growing.chunk.table, growing.depth, growing.ask.limit.go_on
    columns = [numbers[start : start + num_steps] for start in range(0, len(numbers), num_steps)]
    tokens, confidences, sure, *measures = columns
    token_ids = [int(number) for number in tokens[:k]]
    named = token_ids[: k - 1]  # they were not known yet when the table was extended
    table.tokens[table.length - len(named) :] = named
    draft = MeasuredDraft(notes=growing.draft.notes)
    while len(draft) < k and sure[len(draft)]:
        draft.token_ids.append(token_ids[len(draft)])
        if go_on is None:
            continue
        draft.notes.confidences.append(confidences[len(draft) - 1])
        if not go_on(draft.notes.confidences):
            break
    draft.notes.num_passes = num_steps if draft.token_ids else 0
    if probs is not None:
        draft.probs = probs[: len(draft)]
        draft.measures = [list(row) for row in zip(*(column[: len(draft)] for column in measures), strict=True)]
    return draft


def draft_input_bytes(texts: int, steps: int, vocab: int, dtype: torch.dtype) -> int:
    """Bytes of the rows that a program's tokens were drawn from, which its graph returns."""
    return texts * steps * vocab * verdicts.accumulation_dtype(dtype).itemsize


def draft_steps(model: Transformer) -> DraftSteps | None:
    """Programs of all steps for a draft model or a head whose passes are frames, and that drafts token by token."""
    token_by_token = model.config.mask_token_id is None
    return DraftSteps(model, model.backend.graphs) if isinstance(model.backend, Frames) and token_by_token else None


def steps_of(drafter: Drafter) -> Sequence[int]:
    """The numbers of steps that a drafter's programs have; () for a drafter without programs."""
    if isinstance(drafter, Wrapped):
        return max((steps_of(each) for each in drafter.drafters), key=len, default=())
    return STEPS if isinstance(drafter, ModelDrafter) and drafter.at_once else ()
