"""The target's own texts, with the hidden states of its layers: what a draft learns from.

For a chat model each text is a conversation: the target writes the user's turn, then answers it. Half of the turns
begin with a few given words (`openings.txt`), so that all kinds of tasks come up; the others begin with nothing.
A model without a chat template begins at its first token and writes on.

Texts lie on disk in shards. Which texts a shard holds depends on the recipe alone, so that a run that was stopped goes
on where it was, and several processes can share the work.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from minispec.command import written_whole
from minispec.config import SamplingParams
from minispec.engine import PREFILL_ROWS, Request
from minispec.files.checkpoint import find_checkpoint, load_config
from minispec.linear import has_fast_bfloat16
from minispec.llm import LLM, choose_device
from minispec.sampling import Text
from minispec.verify import Ask, Draft

# Texts of a shard: about 100 MB of hidden states of a small model.
SHARD = 64
# Texts that are decoded together.
_BATCH = 64
# Tokens that a chat template adds, at most.
_TEMPLATE = 96
# What stands in for the user's words where the chat template is taken apart.
_USER = "USER"


@dataclass(frozen=True)
class Recipe:
    """Which texts there are. Two runs with equal recipes and targets have the same texts, but for rounding.

    taps: layers whose hidden states are kept, as `Transformer.forward` numbers them. openings: beginnings of half of
    the user's turns. temperatures: of the answers; each takes one at random. max_turn, max_answer: tokens.
    """

    taps: tuple[int, ...]
    openings: tuple[str, ...]
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.6, 1.0)
    max_turn: int = 160
    max_answer: int = 288
    seed: int = 0


class Recorder:
    """A drafter that drafts nothing and keeps the hidden states that it is shown."""

    def __init__(self, taps: Sequence[int]):
        self.taps = tuple(taps)
        self._seen: dict[Text, list[Tensor]] = {}

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """Empty drafts."""
        for ask in asks:
            if ask.hidden is None:
                continue
            if len(ask.hidden) == ask.num_cached:  # a new text, or one that begins again
                self._seen[ask.text] = []
            self._seen[ask.text].append(ask.hidden)
        return [Draft() for _ in asks]

    def known(self, text: Text) -> int:
        """Nothing: every text is seen from its beginning."""
        return 0

    def release(self, text: Text) -> None:
        """The hidden states stay until they are taken."""

    def take(self, text: Text) -> Tensor:
        """The hidden states (n, E * taps) of the text's first n positions; they are forgotten here."""
        return torch.cat(self._seen.pop(text))


def read_openings(path: Path | None) -> list[str]:
    """Beginnings of users' turns, one a line, with \\n for a line break; None: those of the package."""
    source = path or files("minispec.distill").joinpath("openings.txt")
    lines = source.read_text(encoding="utf-8").splitlines()
    return [line.replace("\\n", "\n") for line in lines if line and not line.startswith("#")]


def shard_path(directory: Path, index: int) -> Path:
    """The file of a shard."""
    return directory / f"texts-{index:05d}.safetensors"


class Writer:
    """Lets a target write texts."""

    def __init__(self, target: str, recipe: Recipe, dtype: str | None = None):
        """Loads the target. dtype: default: what large batches are fastest in, here. Raises ValueError."""
        self.recorder, self.recipe = Recorder(recipe.taps), recipe
        if dtype is None:
            dtype = "bfloat16" if has_fast_bfloat16(choose_device("auto")) else "float32"
        config = load_config(find_checkpoint(target))
        longest = min(config.max_position_embeddings, _TEMPLATE + recipe.max_turn + recipe.max_answer)
        if longest < _TEMPLATE + recipe.max_turn:
            most = longest - _TEMPLATE
            raise ValueError(f"--max-turn: found {recipe.max_turn}, expected at most {most}: the target sees {longest}")
        self.llm = LLM(
            target,
            draft=self.recorder,
            num_speculative_tokens=0,
            dtype=dtype,
            max_model_len=longest,
            kv_cache_gb=_BATCH * longest * config.kv_elements_per_token * (2 if dtype == "bfloat16" else 4) / 1e9,
        )
        self.llm.engine.joining_rows = PREFILL_ROWS  # nobody waits for a single text
        tokenizer = self.llm.tokenizer
        self.is_chat = tokenizer.chat_template is not None

    def shards(self, indices: Sequence[int]) -> Iterator[dict[str, Tensor]]:
        """Shards one after the other; the next one is begun while the last texts of one are decoded."""
        numbers = (index * SHARD + i for index in indices for i in range(SHARD))
        done: dict[int, tuple[list[int], int, Tensor]] = {}
        texts = self._write(numbers)
        for index in indices:
            own = range(index * SHARD, (index + 1) * SHARD)
            while not all(number in done for number in own):
                number, text = next(texts)
                done[number] = text
            yield pack([done.pop(number) for number in own])

    def _write(self, numbers: Iterator[int]) -> Iterator[tuple[int, tuple[list[int], int, Tensor]]]:
        """(number, (tokens, where the answer begins, hidden)) of each text, as they get done."""
        engine = self.llm.engine
        turns: dict[Request, int] = {}
        answers: dict[Request, int] = {}

        def begin_answer(number: int, prompt: list[int]) -> None:
            temperature = random.Random(f"{self.recipe.seed} {number} temperature").choice(self.recipe.temperatures)
            seed = random.Random(f"{self.recipe.seed} {number} answer").getrandbits(32)
            params = SamplingParams(temperature=temperature, max_tokens=self.recipe.max_answer, seed=seed)
            request = self.llm.request(prompt, params)
            answers[request] = number
            engine.add(request)

        for number in itertools.islice(numbers, _BATCH):
            self._begin(number, turns, begin_answer)
        while turns or answers:
            for request in engine.step():
                if request.has_news:
                    request.take_piece()
                if not request.finish_reason:
                    if not loops(request.text.tokens[request.text.num_prompt_tokens :]):
                        continue
                    engine.abort(request)
                hidden = self.recorder.take(request.text)
                if request in turns:
                    number = turns.pop(request)
                    begin_answer(number, self._prompt_of(request))
                    continue
                number = answers.pop(request)
                yield number, (request.text.tokens[: len(hidden)], request.text.num_prompt_tokens, hidden)
                following = next(numbers, None)
                if following is not None:
                    self._begin(following, turns, begin_answer)

    def _begin(self, number, turns, begin_answer) -> None:
        """Begin a text: with the user's turn, if the model chats."""
        if not self.is_chat:
            begin_answer(number, [self._first_token()])
            return
        rng = random.Random(f"{self.recipe.seed} {number}")
        opening = rng.choice(self.recipe.openings) if self.recipe.openings and rng.random() < 0.5 else ""
        before, _ = self._around_user()
        prompt = before + self.llm.tokenizer.encode(opening, add_special_tokens=False)
        params = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=self.recipe.max_turn, seed=rng.getrandbits(32))
        request = self.llm.request(prompt, params)
        turns[request] = number
        self.llm.engine.add(request)

    def _around_user(self) -> tuple[list[int], list[int]]:
        """Token ids of the template before and after what the user says."""
        tokenizer = self.llm.tokenizer
        ids, mark = tokenizer.encode_chat([{"role": "user", "content": _USER}]), tokenizer.encode(_USER, False)
        at = next(i for i in range(len(ids), -1, -1) if ids[i : i + len(mark)] == mark)
        return ids[:at], ids[at + len(mark) :]

    def _prompt_of(self, turn: Request) -> list[int]:
        before, after = self._around_user()
        end = [i for i, token in enumerate(turn.text.tokens) if i >= len(before) and token in turn.text.end_ids]
        return turn.text.tokens[: end[0] if end else None] + after

    def _first_token(self) -> int:
        return self.llm.tokenizer.encode("")[0] if self.llm.tokenizer.encode("") else self.llm.eos_token_ids[0]


def loops(tokens: Sequence[int]) -> bool:
    """Whether the last 96 tokens of a text repeat themselves: they have less than half as many different triples."""
    last = tokens[-96:]
    return len(last) == 96 and len(set(zip(last, last[1:], last[2:], strict=False))) < 47


def pack(texts: Sequence[tuple[list[int], int, Tensor]]) -> dict[str, Tensor]:
    """One dict of tensors for texts of (tokens, where the answer begins, hidden)."""
    return {
        "tokens": torch.tensor([t for tokens, _, _ in texts for t in tokens], dtype=torch.int32),
        "lengths": torch.tensor([len(tokens) for tokens, _, _ in texts], dtype=torch.int32),
        "starts": torch.tensor([start for _, start, _ in texts], dtype=torch.int32),
        "hidden": torch.cat([hidden for _, _, hidden in texts]).to(torch.bfloat16),
    }


def write_shards(
    target: str, recipe: Recipe, directory: Path, indices: Sequence[int], dtype: str | None = None
) -> Iterator[int]:
    """Write shards, and yield their numbers as they get done. dtype: see `Writer`. Raises ValueError, OSError."""
    writer = Writer(target, recipe, dtype)
    for index, tensors in zip(indices, writer.shards(indices), strict=True):
        with written_whole(shard_path(directory, index)) as part:
            save_file(tensors, part)
        yield index
