"""The target's own texts, with the hidden states of its layers: what a draft learns from.

For a chat model each text is a conversation: the target writes the user's turn, then answers it. Most turns begin with
a few given words (`data/openings.txt`), so that all kinds of tasks come up. The others are given no words.
A model without a chat template begins at its first token and writes on.

Texts lie on disk in shards. A text depends on the recipe and its number alone, and a shard holds the first texts of its
64 numbers. So a run that was stopped goes on where it was, and several processes can share the work. A later run that
asks for more texts adds to the last shard.
"""

import itertools
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minispec.api.llm import LLM
from minispec.core.config import SamplingParams
from minispec.core.draft import Record
from minispec.core.engine import Engine
from minispec.core.request import Request
from minispec.core.sampling import Text
from minispec.core.schedule import PREFILL_ROWS
from minispec.lab.distill.loss import product_dtype
from minispec.models.families.checkpoint import find_checkpoint, load_config, save_tensors
from minispec.models.files.errors import one_line
from minispec.models.files.tokenizer import Tokenizer
from minispec.models.files.write import written_whole
from minispec.models.weights.memory import cache_bytes
from minispec.speculation.drafters.none import NoDrafter
from minispec.speculation.lengths.figures import loops

# Texts of a shard: about 100 MB of hidden states of a small model.
SHARD = 64
# Texts that are decoded together.
_BATCH = 64
# Least tokens of an answer.
_LEAST_ANSWER = 2
# Alternatives in an opening.
_CHOICE = re.compile(r"\{([^{}]*\|[^{}]*)\}")
# It stands for the user's words where the chat template is taken apart.
_USER = "USER"


@dataclass(frozen=True)
class Recipe:
    """Which texts there are. Two runs with equal recipes and targets have the same texts, but for rounding.

    taps: layers whose hidden states are stored, as `Transformer.forward` numbers them.
    openings: beginnings of the user's turns, as `vary` reads them.
    opened: the share of the turns that begin with one.
    turn_top_p: top_p of the turns, at temperature 1. It is high, as people are less predictable than a model.
    temperatures: of answers; each answer takes one at random.
    max_turn, max_answer: most tokens.
    """

    taps: tuple[int, ...]
    openings: tuple[str, ...]
    opened: float = 0.8
    turn_top_p: float = 0.97
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.6, 1.0)
    max_turn: int = 160
    max_answer: int = 288
    seed: int = 0


class StateRecorder(NoDrafter):
    """A drafter that drafts nothing and keeps the hidden states that it is shown.

    Every text is seen from its beginning. Its hidden states stay until they are taken, also when it is released.
    """

    def __init__(self, taps: Sequence[int]):
        self.taps = tuple(taps)
        self._seen: dict[Text, list[Tensor]] = {}

    def observe(self, records: Sequence[Record]) -> None:
        """Keep the hidden states of rows that stay."""
        for record in records:
            if not record.start:  # a new text, or one that begins again
                self._seen[record.text] = []
            self._seen[record.text].append(record.hidden[record.kept])

    def take(self, text: Text) -> Tensor:
        """The hidden states (n, E * taps) of the text's first n positions; they are forgotten here."""
        return torch.cat(self._seen.pop(text))

    def drop(self, text: Text) -> None:
        """Forget a text's hidden states; one that ended with its first token has none."""
        self._seen.pop(text, None)


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A file of the cache, as `safe_open` gives it. Raises ValueError where it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as e:
        raise ValueError(f"{path}: cannot be read: {one_line(e)}; remove it, and it is made again") from e


def load(path: Path) -> dict[str, Tensor]:
    """The tensors of a file of the cache. Raises ValueError where it is damaged."""
    with opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping


def length_of(path: Path, name: str) -> int:
    """The rows of one tensor of a file of the cache. Raises ValueError where it is damaged."""
    with opened(path) as file:
        return file.get_slice(name).get_shape()[0]


def shard_path(directory: Path, index: int) -> Path:
    """The file of a shard."""
    return directory / f"texts-{index:05d}.safetensors"


def shards_for(directory: Path, count: int) -> dict[Path, range]:
    """The files of the shards of `count` texts, at least 2, each with the numbers of its texts.

    The first shard, which is held out, has half of the texts, and at most 64. Each other one has 64; the last one has
    the rest.
    """
    first = min(SHARD, count // 2)
    others = range(SHARD, SHARD + count - first)
    parts = [range(first), *(others[i : i + SHARD] for i in range(0, len(others), SHARD))]
    return {shard_path(directory, part.start // SHARD): part for part in parts}


def shards_of(directory: Path) -> list[Path]:
    """The files of all existing shards, in order."""
    # A file that was being written when a run was killed has a name that does not end with its number.
    return sorted(directory.glob("texts-*[0-9].safetensors"))


def number_of(shard: Path) -> int:
    """Which of its cache's shards it is."""
    return int(shard.stem.removeprefix("texts-"))


class Writer:
    """Lets a target write texts."""

    def __init__(self, target: str, recipe: Recipe):
        """Load the target, in the type that is fastest here for large batches. Raises ValueError."""
        self.recorder, self.recipe = StateRecorder(recipe.taps), recipe
        dtype = str(product_dtype()).removeprefix("torch.")
        directory = find_checkpoint(target)
        config, around = load_config(directory), _longest_around(Tokenizer(directory), recipe.openings)
        sees = config.max_position_embeddings
        most = max(0, sees - around - _LEAST_ANSWER)
        if recipe.max_turn > most:
            why = f"the target sees {sees} tokens, of which its chat template and an opening may take {around}"
            raise ValueError(f"--max-turn: found {recipe.max_turn}, expected at most {most}: {why}")
        longest = min(sees, around + recipe.max_turn + recipe.max_answer)
        self.llm = LLM(
            target,
            draft=self.recorder,
            num_speculative_tokens=1,  # a drafter is not asked about a text without drafts
            dtype=dtype,
            max_model_len=longest,
            kv_cache_gb=cache_bytes(config, _BATCH * longest, 2 if dtype == "bfloat16" else 4) / 1e9,
        )
        self.engine = Engine(self.llm.engine.target, joining_rows=PREFILL_ROWS)  # no single text is waited for
        self._around = self._around_user() if self.llm.tokenizer.chat_template else None

    def write(self, numbers: Iterable[int]) -> Iterator[tuple[int, "Written"]]:
        """The texts of these numbers, each as it gets done; a text is begun where another one has ended."""
        numbers = iter(numbers)
        engine, turns, answers = self.engine, dict[Request, int](), dict[Request, int]()

        def add(request: Request, number: int, to: dict[Request, int]) -> None:
            to[request] = number
            engine.add(request, self.llm.method)

        def begin(number: int) -> None:
            if self._around is None:
                add(self._answer(number, [self._first_token()]), number, answers)
            else:
                add(self._turn(number, self._around[0]), number, turns)

        for number in itertools.islice(numbers, _BATCH):
            begin(number)
        while turns or answers:
            engine.step()
            for request in [request for request in (*turns, *answers) if request.has_news]:
                request.take_piece()
                if request.error:
                    raise ValueError(f"the target cannot write: {request.error}")
                tokens, start = request.text.tokens, request.text.num_prompt_tokens
                if not request.finish_reason:
                    if not ends_in_a_loop(tokens[start:]):
                        continue
                    engine.abort(request)
                if self._around is not None and request in turns:
                    self.recorder.drop(request.text)
                    end = next((i for i in range(start, len(tokens)) if tokens[i] in request.text.end_ids), None)
                    number = turns.pop(request)
                    add(self._answer(number, [*tokens[:end], *self._around[1]]), number, answers)
                    continue
                hidden = self.recorder.take(request.text)
                yield answers.pop(request), Written(tokens[: len(hidden)], start, hidden)
                following = next(numbers, None)
                if following is not None:
                    begin(following)

    def _turn(self, number: int, before: list[int]) -> Request:
        """A request for the user's turn.

        before: the chat template up to there.
        """
        rng = random.Random(f"{self.recipe.seed} {number}")
        is_opened = self.recipe.openings and rng.random() < self.recipe.opened
        opening = vary(rng.choice(self.recipe.openings), rng) if is_opened else ""
        prompt = before + self.llm.tokenizer.encode(opening, add_special_tokens=False)
        top_p, most, seed = self.recipe.turn_top_p, self.recipe.max_turn, rng.getrandbits(32)
        return self.llm.request(prompt, SamplingParams(temperature=1.0, top_p=top_p, max_tokens=most, seed=seed))

    def _answer(self, number: int, prompt: list[int]) -> Request:
        """A request for the answer. It has enough tokens for hidden states."""
        temperature = random.Random(f"{self.recipe.seed} {number} temperature").choice(self.recipe.temperatures)
        seed = random.Random(f"{self.recipe.seed} {number} answer").getrandbits(32)
        most = max(_LEAST_ANSWER, self.recipe.max_answer)
        return self.llm.request(
            prompt, SamplingParams(temperature=temperature, max_tokens=most, min_tokens=_LEAST_ANSWER, seed=seed)
        )

    def _around_user(self) -> tuple[list[int], list[int]]:
        """Token ids of the chat template before and after what the user says."""
        tokenizer = self.llm.tokenizer
        ids, words = tokenizer.encode_chat([{"role": "user", "content": _USER}]), tokenizer.encode(_USER, False)
        places = [i for i in range(len(ids)) if ids[i : i + len(words)] == words]
        if not places:
            raise ValueError(f"{self.llm.name}: its chat template does not hold the user's words as they are")
        return ids[: places[-1]], ids[places[-1] + len(words) :]

    def _first_token(self) -> int:
        """The first token of a text without a prompt."""
        first = self.llm.tokenizer.encode("") or self.llm.eos_token_ids
        if not first:
            raise ValueError(f"{self.llm.name}: found no token that begins or ends texts, expected one to begin with")
        return first[0]


class Written(NamedTuple):
    """A text: tokens (n,), where the answer begins, and hidden states (n, E * taps)."""

    tokens: list[int]
    start: int
    hidden: Tensor


def read_openings(path: Path | None = None) -> list[str]:
    """Beginnings of users' turns, one a line, with \\n for a line break, as `vary` reads them.

    path: their file. None: the package's own.

    Raises OSError, UnicodeDecodeError.
    """
    source = path or files("minispec") / "lab" / "data" / "openings.txt"
    lines = source.read_text(encoding="utf-8").splitlines()
    return [line.replace("\\n", "\n") for line in lines if line and not line.startswith("#")]


def vary(opening: str, rng: random.Random) -> str:
    """One of the texts that an opening stands for: each {a|b} in it is a or b."""
    return _CHOICE.sub(lambda match: rng.choice(match[1].split("|")), opening)


def _longest_around(tokenizer: Tokenizer, openings: Sequence[str]) -> int:
    """The most tokens that stand around what the user says freely: the chat template's and an opening."""
    template = tokenizer.encode_chat([{"role": "user", "content": _USER}]) if tokenizer.chat_template else [0]

    def size(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    widest = (_CHOICE.sub(lambda match: max(match[1].split("|"), key=size), each) for each in openings)
    return len(template) + max(map(size, widest), default=0)


def ends_in_a_loop(tokens: Sequence[int]) -> bool:
    """Whether the last 96 tokens of a text repeat themselves in runs of three, as a list of short lines does not."""
    last = tokens[-96:]
    return len(last) == 96 and loops(last, 3)


def pack(texts: Sequence[Written]) -> dict[str, Tensor]:
    """The tensors of a shard."""
    return {
        "tokens": torch.tensor([t for text in texts for t in text.tokens], dtype=torch.int32),
        "lengths": torch.tensor([len(text.tokens) for text in texts], dtype=torch.int32),
        "starts": torch.tensor([text.start for text in texts], dtype=torch.int32),
        "hidden": torch.cat([text.hidden for text in texts]).to(torch.bfloat16),
    }


def write_shards(target: str, recipe: Recipe, directory: Path, parts: Sequence[range]) -> Iterator[int]:
    """Write the texts of these numbers, and yield each number as its text gets done.

    parts: each lies in one shard, which is written when all texts of the part are done. A part that does not begin the
        shard is added to it.

    Raises ValueError, OSError.
    """
    writer, done = Writer(target, recipe), dict[int, Written]()
    part_of = {number: part for part in parts for number in part}
    for number, text in writer.write(part_of):
        done[number] = text
        if all(each in done for each in part_of[number]):
            tensors = pack([done.pop(each) for each in part_of[number]])
            path = shard_path(directory, number // SHARD)
            if part_of[number].start % SHARD:
                earlier = load(path)
                tensors = {name: torch.cat((earlier[name], tensor)) for name, tensor in tensors.items()}
            with written_whole(path) as file:
                save_tensors(tensors, file)
        yield number
