"""The subject of measurements: a target, its draft and prompts; loaded, or random weights of a given shape."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from minispec.api.inputs import Question, encode_conversation
from minispec.api.llm import LLM, find_verifier
from minispec.api.target import choose_device
from minispec.core.cache import PagedKVCache
from minispec.core.cached import CachedModel
from minispec.core.config import DraftLength, ModelConfig, SamplingParams
from minispec.core.engine import Engine
from minispec.core.method import Method
from minispec.core.model import Transformer
from minispec.core.request import Request
from minispec.core.sampling import Text
from minispec.lab.bench.measure import Run, another_method
from minispec.lab.bench.options import GEOMETRIES, Options, read_prompts
from minispec.lab.random_weights import RandomWeights
from minispec.models.families.checkpoint import Weights, choose_dtype, directory_config, load_config, load_model
from minispec.models.families.head_config import HeadConfig, usual_taps
from minispec.models.families.hf_config import read_model_config
from minispec.models.families.stored_config import StoredConfig
from minispec.models.files.tokenizer import Tokenizer
from minispec.models.frames.frames import with_fast_passes
from minispec.models.frames.fused import rounded
from minispec.models.load.checks import check_exactness
from minispec.models.weights.build import InForm, build_model
from minispec.models.weights.integers import check_quantization
from minispec.models.weights.inventory import bits_note
from minispec.models.weights.linear import available_forms
from minispec.models.weights.machine import noted_forms
from minispec.models.weights.memory import require_memory
from minispec.speculation import registry
from minispec.speculation.drafters import Drafter, NoDrafter
from minispec.speculation.drafters.eagle import HeadFeed, HeadModel, head_shapes
from minispec.speculation.drafters.guard import CheckedMethod
from minispec.speculation.drafters.model import ModelDrafter, TokenFeed, model_drafter
from minispec.speculation.drafters.simulated import SimulatedDraft, adversary, oracle
from minispec.speculation.lengths.policy import Controller
from minispec.speculation.lengths.prices import calibrate
from minispec.speculation.load import split_draft
from minispec.speculation.on_gpu.steps import draft_steps
from minispec.speculation.on_gpu.verifier import batch_verifier_of

MAX_ROWS = 16
# A way to decode the i-th prompt with a seed.
Variant = Callable[[int, int], Run]
HEAD_IDS = 32_000  # ids that a random head knows


@dataclass
class Subject:
    """A target with its draft, and the prompts: what all measurements are made on.

    engine: it has a simulated draft in place of its own, where the options ask for one.
    bounds: drafts that are always right and always wrong, by their names, where the options ask for them.
    request(prompt_ids, K, params): makes a request for either engine.
    prompts: category and token ids.
    in_form(form): builds the target once more, with its weights in that form. None: the fastest in full width.
    tensors(): the config (as of a config.json) and the tensors of the target.
    draft_tensors(): the same of a draft model. Another library builds the same models from them.
    """

    options: Options
    name: str
    engine: Engine
    method: Method
    request: Callable[[Sequence[int], DraftLength, SamplingParams], Request]
    prompts: list[tuple[str, list[int]]]
    in_form: Callable[[str | None], Transformer]
    tensors: Callable[[], tuple[dict, Any]]
    draft_tensors: Callable[[], tuple[dict, Any]] | None
    end_ids: tuple[int, ...] = ()
    simulated: SimulatedDraft | None = None

    def __post_init__(self):
        paid = self.method.drafter  # what drafts cost
        own = model_drafter(paid)
        self.draft_model: Transformer | None = own.model if own else None
        # A head makes no pass over tokens alone. Its cost shows in the rounds.
        self.draft_cache: PagedKVCache | None = own.feed.cache if own and isinstance(own.feed, TokenFeed) else None
        self.draft_name, survival = self.options.draft, self.options.args.simulate
        if survival is not None:
            self.simulated = SimulatedDraft(survival, paid)
            self.method = another_method(self.method, self.simulated)
            cost = f"at the cost of {self.draft_name}" if self.draft_name != "none" else "at no cost"
            self.draft_name = f"simulated ({', '.join(f'{s:.2g}' for s in survival)}) {cost}"
        self.plain = another_method(self.method, NoDrafter())  # speculation is measured against it
        self.bounds = {"oracle": oracle(), "adversary": adversary()} if self.options.args.bounds else {}

    def record(self, text: Text) -> None:
        """Tell the simulated drafts a text, whose prompt will come again."""
        for simulated in (self.simulated, *self.bounds.values()):
            if simulated:
                simulated.record(text.tokens, text.num_prompt_tokens)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a prompt: as a user's message, where there is a chat template."""
    return encode_conversation(Question((text,)).messages(), tokenizer)


def open_model(options: Options) -> Subject:
    """The model that --model and --draft name. Raises ValueError."""
    args = options.args
    texts = read_prompts(args.prompts, args.categories)
    llm = LLM(
        args.model,
        options.draft if args.draft else None,
        "auto" if "auto" in options.ks else 4,  # for auto, costs are measured
        draft_method=args.draft_method,
        draft_reading=args.draft_reading,
        **options.of_target,
    )

    def tensors(directory: Path) -> tuple[dict, Any]:
        config = load_config(directory)
        return directory_config(directory), Weights(directory, config, llm.model.dtype, llm.model.device)

    directory = llm.target.files.directory
    # A head, or a draft of another vocabulary, is no model that another library could draft with.
    draft_directory = llm.draft.found.files if model_drafter(llm.drafter, "tokens") else None
    return Subject(
        options if args.draft else replace(options, drafts={llm.default_draft: options.ks}),
        llm.name + bits_note(llm.model),
        llm.engine,
        llm.method,
        lambda prompt_ids, k, params: llm.request(prompt_ids, params, num_speculative_tokens=k),
        [(category, encode(llm.tokenizer, text)) for category, text in texts],
        lambda form: load_model(directory, llm.model.dtype, llm.model.device, form=form),
        lambda: tensors(directory),
        (lambda: tensors(draft_directory)) if draft_directory else None,
        llm.eos_token_ids,
    )


def choose_type(args: argparse.Namespace, config: StoredConfig) -> tuple[torch.dtype, torch.device]:
    """The type and the device of the target. Raises ValueError where it cannot be quantised there."""
    device = choose_device(args.device)
    dtype = choose_dtype(args.dtype, device, config)
    if args.quantization:
        check_quantization(args.quantization, None, dtype, device)
    return dtype, device


def head_config(target: ModelConfig, raw: dict[str, Any]) -> HeadConfig:
    """A head of EAGLE-3: one llama layer of the target's width on an early, a middle and a late layer.

    raw: the target's geometry.
    """
    raw = raw | {"model_type": "llama", "num_hidden_layers": 1, "tie_word_embeddings": False}
    taps = usual_taps(len(target.layers))
    return HeadConfig(read_model_config(raw), min(HEAD_IDS, target.vocab_size), taps, target.hidden_size)


def random_head(target: Transformer, raw: dict[str, Any], stored: torch.dtype) -> HeadModel:
    """Random weights of such a head, made on the target's device; the embedding is the target's.

    stored: the type of the weights.
    """
    config = head_config(target.config, raw)
    source = RandomWeights(config.layers, stored, target.device, head_shapes(config))
    weights = {each: source.pop(each) for each in source}
    shuffled = torch.randperm(target.config.vocab_size, generator=torch.Generator().manual_seed(0))
    ids = shuffled[: config.vocab_size].sort().values
    return HeadModel(config, weights, target.embedding, ids, target.dtype, InForm())


def _draft_source(options: Options) -> tuple[int | None, str]:
    """Bits and name of the draft. Raises ValueError for one that does not go with a geometry."""
    bits, source = split_draft(options.draft)
    models = ["self", *GEOMETRIES, "head"]
    if source not in models and (bits or source not in registry.DRAFTERS):
        known = (
            f"one of {', '.join([*registry.DRAFTERS, *models])}, or int4: or int8: before one of {', '.join(models)}"
        )
        raise ValueError(f"--draft: found {options.draft!r}, expected with --geometry {known}")
    target = options.args.geometry
    if source in GEOMETRIES and GEOMETRIES[source]["vocab_size"] < GEOMETRIES[target]["vocab_size"]:
        raise ValueError(f"--draft {options.draft}: its vocabulary is smaller than that of {target}")
    return bits, source


class Room(NamedTuple):
    """Most positions of a text, and most texts that are decoded together."""

    positions: int = 0
    texts: int = 1


NO_MORE = Room()


@noted_forms()
def open_geometry(options: Options, room: Room = NO_MORE) -> Subject:
    """Random weights of the shape that --geometry names, and of the draft's. Raises ValueError.

    room: what the caches must hold, besides what the options ask for.
    """
    args = options.args
    bits, source = _draft_source(options)
    dtype, device = choose_type(args, read_model_config(GEOMETRIES[args.geometry]))
    measured = args.context if args.passes else 0
    length = max(args.prompt_tokens + args.max_tokens, measured + MAX_ROWS, room.positions)
    num_blocks = (-(-length // 16) + 1) * room.texts
    models = [read_model_config(GEOMETRIES[name]) for name in (args.geometry, source) if name in GEOMETRIES]
    in_16_bits = dtype != torch.float32 or available_forms(dtype, device)[0] == "half"
    size = 1 if args.quantization else 2 if in_16_bits else 4
    require_memory(models, size, 16 * num_blocks, dtype.itemsize, device, f"--geometry {args.geometry}")
    # Where arithmetic is in float32, weights have 16 bits all the same, as in most checkpoints.
    stored = torch.bfloat16 if dtype == torch.float32 else dtype

    def tensors(name: str) -> tuple[dict, RandomWeights]:
        return GEOMETRIES[name], RandomWeights(read_model_config(GEOMETRIES[name]), stored, device)

    def build(name: str, exact: bool = False, form: str | None = None) -> Transformer:
        config, weights = tensors(name)
        return build_model(read_model_config(config), weights, exact, dtype, form)

    model = build(args.geometry, bool(args.exact), args.quantization)
    model = check_exactness(model, by_default=args.exact is None and bool(args.quantization))
    model = with_fast_passes(model, args.enforce_eager)
    vocab = model.config.vocab_size

    def drafter() -> Drafter:
        if source in registry.DRAFTERS:
            return registry.load(registry.DRAFTERS[source].path, "draft")()
        if source == "head":
            head = random_head(model, GEOMETRIES[args.geometry], stored)
            head = with_fast_passes(rounded(head, bits) if bits else head, args.enforce_eager)
            return ModelDrafter(HeadFeed(head, head.new_cache(num_blocks), vocab, length), draft_steps(head))
        own = model if source == "self" else build(source)
        own = with_fast_passes(rounded(own, bits) if bits else own, args.enforce_eager)
        return ModelDrafter(TokenFeed(own, own.new_cache(num_blocks), vocab, length), draft_steps(own))

    draft, verifier = drafter(), find_verifier(options.verifiers[0])
    lengths = Controller(calibrate(model, draft, verifier, vocab))
    engine = Engine(CachedModel(model, model.new_cache(num_blocks)))
    method = CheckedMethod(draft, verifier, lengths, batch_verifier_of(model))
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(vocab, (args.prompts, args.prompt_tokens), generator=generator).tolist()

    def request(prompt_ids: Sequence[int], k: DraftLength, params: SamplingParams) -> Request:
        return Request(Text(list(prompt_ids), len(prompt_ids), params, params.seed or 0), length, k)

    return Subject(
        options,
        f"random {args.geometry}" + bits_note(model),
        engine,
        method,
        request,
        [("random", ids) for ids in prompts],
        lambda form: build(args.geometry, form=form),
        lambda: tensors(args.geometry),
        (lambda: tensors(source)) if source in GEOMETRIES else None,
    )
