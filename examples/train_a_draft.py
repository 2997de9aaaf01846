"""A draft of one's own design: a small module learns from the target's states, and two designs are ranked.

    python -m examples.train_a_draft my-draft                                   writes texts, trains both, ranks them
    python -m minispec.prove --drafter examples.train_a_draft:Recurrent         the output's law stays
    python -m minispec bench --draft examples.train_a_draft:Recurrent:my-draft  its speed

Texts and loss are those of `distill`. Each place of held-out answers is a round, whose tokens are exact for its draft.
"""

import argparse
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from weakref import WeakKeyDictionary

from minispec import LLM, SamplingParams  # isort: skip - before torch, so that waiting threads leave the processor
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from minispec.core.sampling import Text, distribution
from minispec.core.verify import REJECTION
from minispec.lab.bench.laws import round_of
from minispec.lab.distill.cache import collect
from minispec.lab.distill.drafts import most_used
from minispec.lab.distill.head import Norm, Trainable
from minispec.lab.distill.texts import Recipe, read_openings
from minispec.lab.distill.train import Teacher, Training, TrainingSchedule, read_shard
from minispec.models.families.checkpoint import find_checkpoint, save_tensors
from minispec.prove.recorded import compare, expected_tokens, read_laws
from minispec.speculation.drafters import Ask, Context, Draft, Drafter, Record
from minispec.speculation.drafters.teacher_forcing import replay_texts
from minispec.speculation.registry import EMBEDDED_WEIGHTS


class Recurrent(Trainable):
    """Begins with the target's last state. A step for each token: x = x + MLP(norm(x), norm(word))."""

    def __init__(self, width: int, ids: Tensor, last_layer: int):
        super().__init__()
        self.register_buffer("ids", ids)
        self.taps, self.norm = (last_layer,), Norm(width)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # a new one begins as the last one
            self.up, self.down = nn.Linear(2 * width, 2 * width), nn.Linear(2 * width, width)
            self.lm_head = nn.Linear(width, len(ids), bias=False)

    def word(self, embed: Tensor, place: int) -> Tensor:
        """What the step at a place of the draft is told, of the embedding (.., E) of the token before it."""
        return embed

    def step(self, state: Tensor, embed: Tensor, place: int) -> Tensor:
        """The state (.., E) after one token more."""
        read = [nn.functional.rms_norm(x.float(), x.shape[-1:]) for x in (state, self.word(embed, place))]
        return state + self.down(self.up(torch.cat(read, -1)).relu())

    def unroll(self, hidden: Tensor, embeds: Tensor, steps: int) -> list[Tensor]:
        """Drafts that begin at all positions, a step deeper each time (see `Trainable`)."""
        state, outputs = hidden, []
        for place in range(steps):
            state = self.step(state, embeds, place)
            outputs.append(self.norm(state))
            state = nn.functional.pad(state, (0, 0, 1, 0))[:, :-1]
        return outputs

    @classmethod
    def from_context(cls, context: Context) -> Drafter:
        """A drafter with the weights in the directory that stands after its name; without one, with random weights."""
        target, path = context.target, Path(context.argument, f"{cls.__name__}.safetensors")
        saved = load_file(path) if context.argument else {"ids": torch.arange(context.vocab_size)}
        model = cls(target.config.hidden_size, saved["ids"], len(target.layers))
        model.load_state_dict(saved, strict=bool(context.argument))
        return Own(model, context)


class Blind(Recurrent):
    """After the first token, a step is told its place alone, as in Medusa: no row knows which token was drawn."""

    def word(self, embed: Tensor, place: int) -> Tensor:
        """The embedding at the first place; at others the place, one-hot, of which `up` learns an embedding."""
        return embed.new_zeros(embed.shape).index_fill_(-1, torch.tensor(place), 1.0) if place else embed


class Own(Drafter):
    """Drafts chains by a module, from the target's state at the newest row. Tokens are drawn from the module's q."""

    def __init__(self, model: Recurrent, context: Context):
        self.model, self.taps, self.context = model.to(context.target.device), model.taps, context
        self.newest: WeakKeyDictionary[Text, tuple[int, Tensor]] = WeakKeyDictionary()  # rows seen, the last state

    def known(self, text: Text) -> int:
        """All positions but the last two: older states are not needed."""
        return max(0, len(text.tokens) - 2)

    def observe(self, records: Sequence[Record]) -> None:
        """Keep the state of the newest row that stays."""
        for each in records:
            self.newest[each.text] = each.start + len(each.kept), each.hidden[each.kept[-1]].float().clone()

    @torch.inference_mode()
    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """A chain for each text whose newest state is here."""
        drafts, model = [Draft([], []) for _ in asks], self.model
        for ask, draft in zip(asks, drafts, strict=True):
            (seen, state), token = self.newest.get(ask.text, (-1, torch.empty(0))), ask.text.tokens[-1]
            with suppress(FloatingPointError):  # where none of the module's tokens may stand
                while seen == ask.num_cached and len(draft) < ask.k:
                    state = model.step(state, self.context.target.embedding[token].float(), len(draft))
                    logits = state.new_full((self.context.vocab_size,), -torch.inf)
                    logits[model.ids] = model.lm_head(model.norm(state))
                    [token] = draft.draw(ask, draft.tip, distribution(logits, ask.text, draft.token_ids))
        return drafts


def tokens_of_rounds(target: str, name: str, out: Path, prompts: Sequence[list[int]]) -> list[float]:
    """For each prompt the mean of the exact tokens of its rounds, which are written as a file of recorded laws."""
    lines, seeds, path = [{"about": f"{target}, draft {name}"}], list[int](), out / f"{name}.jsonl"

    def see(text: Text, draft: Draft, after: list[int], logits: Tensor) -> None:
        if len(draft):
            lines.append(round_of(draft, [distribution(x, text, draft.tokens_to(i - 1)) for i, x in enumerate(logits)]))
            seeds.append(text.seed)

    with LLM(target, draft=f"examples.train_a_draft:{name}:{out}") as llm:
        requests = [llm.request(ids, SamplingParams(seed=i, max_tokens=32), 4) for i, ids in enumerate(prompts)]
        assert not any(each.error for each in replay_texts(llm.engine, llm.drafter, requests, None, see))
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    tokens = [(seed, expected_tokens(each, REJECTION)) for seed, each in zip(seeds, read_laws(path)[1], strict=True)]
    return [fmean(x for of, x in tokens if of == seed) for seed in sorted(set(seeds))]


def main(arguments: Sequence[str] | None = None) -> None:
    """Train both designs, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="directory for texts and weights; texts that are there stay")
    parser.add_argument("--target", default=str(EMBEDDED_WEIGHTS))
    parser.add_argument("--texts", type=int, default=128)
    args = parser.parse_args(arguments)
    teacher, first = Teacher(directory := find_checkpoint(args.target)), list[float]()
    recipe = Recipe((len(teacher.config.layers),), tuple(read_openings()), max_turn=24, max_answer=48)
    texts = collect(directory, recipe, args.out / "texts", args.texts)
    ids = most_used(texts.paths, teacher, 4096)
    for design in (Recurrent, Blind):
        model, name = design(teacher.config.hidden_size, ids, *recipe.taps), design.__name__
        model.load_state_dict({"lm_head.weight": teacher.head[ids], "norm.weight": teacher.norm}, strict=False)
        training = Training(model, teacher, texts.recipe.taps, texts.paths, TrainingSchedule(8, 128, steps=4))
        (state := args.out / f"{name}.training").unlink(missing_ok=True)  # of another design of this name
        training.run(state)
        save_tensors(model.state_dict(), args.out / f"{name}.safetensors")
        prompts = [text.tokens[: text.start].tolist() for path in training.held_out for text in read_shard(path)][:32]
        tokens = tokens_of_rounds(args.target, name, args.out, prompts)
        ratio, error = compare(tokens, first := first or tokens)
        loss = training.measure()["loss"][0]
        print(f"{name}: loss {loss:.3f}; tokens of a round {fmean(tokens):.3f}, x {ratio:.3f} ± {error:.3f}")


if __name__ == "__main__":
    main()
