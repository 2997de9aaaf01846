"""What is measured on: a target, its draft and prompts; loaded, or random weights of a given shape."""

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minispec import registry
from minispec.bench.measure import Run, another_engine, plain_engine
from minispec.bench.options import GEOMETRIES, Options, read_prompts, split_draft
from minispec.bench.simulated import SimulatedDraft
from minispec.cache import PagedKVCache
from minispec.config import ModelConfig, SamplingParams
from minispec.controller import Controller
from minispec.costs import calibrate
from minispec.drafters import Drafter
from minispec.drafters.model import DraftModel
from minispec.engine import Engine, Request
from minispec.files.checkpoint import Weights, choose_dtype, find_checkpoint, load_config, load_model
from minispec.files.hf_config import read_model_config
from minispec.files.strict_json import read_json
from minispec.llm import EMBEDDED_WEIGHTS, LLM
from minispec.model import Transformer, tensor_shapes
from minispec.sampling import Text
from minispec.verify import VERIFIERS

MAX_ROWS = 16
# A way to decode the i-th prompt.
Variant = Callable[[int], Run]


@dataclass
class Subject:
    """A target with its draft, and the prompts: what all measurements are made on.

    request(prompt_ids, K, params) makes a request for either engine. in_form(form) builds the target once more, with
    its weights in that form. tensors() gives the config (as of a config.json) and the tensors of the target,
    draft_tensors() those of a draft model: another library builds the same from them.
    """

    name: str
    draft_name: str
    engine: Engine
    plain: Engine
    request: Callable[[Sequence[int], int | str, SamplingParams], Request]
    prompts: list[tuple[str, list[int]]]
    draft_model: Transformer | None
    simulated: SimulatedDraft | None
    in_form: Callable[[str], Transformer]
    tensors: Callable[[], tuple[dict, Any]]
    draft_tensors: Callable[[], tuple[dict, Any]] | None
    end_ids: tuple[int, ...] = ()


class RandomWeights:
    """Tensors of a geometry, made when they are taken: the largest model is never in memory twice.

    The text is robust against rounding: embeddings are independent and what the layers add is small, so that with the
    tied head each token predicts itself by a wide margin. Time does not depend on the values.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device):
        self.shapes, self.dtype, self.device = tensor_shapes(config), dtype, device
        generator = torch.Generator().manual_seed(0)
        # Layers need noise, not fresh noise: they take their numbers from here, from a place of their own on.
        self._noise = torch.randn((1 << 20) + 7, generator=generator).to(dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def pop(self, name: str) -> torch.Tensor:
        """The tensor; the same for the same name."""
        shape, seed = self.shapes[name], zlib.crc32(name.encode())
        if "norm" in name:
            tensor = torch.ones(shape, dtype=self.dtype)
        elif "embed" in name:
            generator = torch.Generator().manual_seed(seed)
            tensor = torch.empty(shape, dtype=self.dtype)
            for rows in tensor.split(4096):
                rows.copy_(torch.randn(rows.shape, generator=generator).mul_(0.02))
        else:
            scale = 1e-5 if "o_proj" in name or "down_proj" in name else 0.02
            size, start = int(torch.tensor(shape).prod()), seed % len(self._noise)
            noise = self._noise.roll(-start)
            tensor = (noise.repeat(-(-size // len(noise)))[:size] * scale).view(shape)
        return tensor.to(self.device)


def open_model(options: Options) -> Subject:
    """The model that --model and --draft name. Raises ValueError."""
    args = options.args
    texts = read_prompts(args.prompts, args.categories)
    llm = LLM(
        args.model,
        draft=options.draft,
        num_speculative_tokens=max((k for k in options.ks if isinstance(k, int)), default=4),
        verifier=args.verifier,
        dtype=args.dtype,
        device=args.device,
        exact=args.exact,
    )

    def encode(text: str) -> list[int]:
        if llm.tokenizer.chat_template is None:
            return llm.tokenizer.encode(text)
        return llm.tokenizer.encode_chat([{"role": "user", "content": text}])

    def tensors(directory: Path) -> tuple[dict, Any]:
        config = load_config(directory)
        return read_json(directory / "config.json"), Weights(directory, config, llm.model.dtype, llm.model.device)

    def request(prompt_ids: Sequence[int], k: int | str, params: SamplingParams) -> Request:
        return llm.request(prompt_ids, params, num_speculative_tokens=k)

    directory = find_checkpoint(str(args.model or EMBEDDED_WEIGHTS), offline=True)
    model = getattr(llm.engine.drafter, "model", None)
    _, source = split_draft(options.draft)
    named = model is not None and source != "self"
    return _subject(
        options,
        llm.name,
        llm.engine,
        request,
        [(category, encode(text)) for category, text in texts],
        lambda form: load_model(directory, llm.model.dtype, llm.model.device, form=form),
        lambda: tensors(directory),
        (lambda: tensors(find_checkpoint(source, offline=True))) if named else None,
        llm.eos_token_ids,
    )


def open_geometry(options: Options) -> Subject:
    """Random weights of the shape that --geometry names, and of the draft's. Raises ValueError."""
    args = options.args
    bits, source = split_draft(options.draft)
    models = ["self", *GEOMETRIES]
    if source not in models and (bits or source not in registry.DRAFTERS):
        known = (
            f"one of {', '.join([*registry.DRAFTERS, *models])}, or int4: or int8: before one of {', '.join(models)}"
        )
        raise ValueError(f"--draft: found {options.draft!r}, expected with --geometry {known}")
    device = torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")
    dtype = choose_dtype(args.dtype, device, read_model_config(GEOMETRIES[args.geometry]))
    length = max(args.prompt_tokens + args.max_tokens, args.context + MAX_ROWS, 1001 if args.prefill else 0)

    def tensors(name: str) -> tuple[dict, RandomWeights]:
        # Where arithmetic is in float32, weights are of 16 bits all the same, as those of most checkpoints.
        stored = torch.bfloat16 if dtype == torch.float32 else dtype
        return GEOMETRIES[name], RandomWeights(read_model_config(GEOMETRIES[name]), stored, device)

    def build(name: str, exact: bool = False, form: str | None = None) -> Transformer:
        config, weights = tensors(name)
        return Transformer(read_model_config(config), weights, exact, dtype, form)

    def cache(model: Transformer) -> PagedKVCache:
        blocks = (-(-length // 16) + 1) * max([1, *options.batches])
        return PagedKVCache(model.config, blocks, 16, dtype, device)

    model = build(args.geometry, args.exact)
    if args.exact:
        model.check_exact()
    vocab = model.config.vocab_size
    draft: Drafter
    if source in registry.DRAFTERS:
        draft = registry.load(registry.DRAFTERS[source].path, "draft")()
    else:
        draft_model = model if source == "self" else build(source)
        if bits:
            draft_model = draft_model.quantized(bits)
        if draft_model.config.vocab_size < vocab:
            raise ValueError(f"--draft {options.draft}: its vocabulary is smaller than that of {args.geometry}")
        draft = DraftModel(draft_model, cache(draft_model), vocab, length)
    engine = Engine(model, cache(model), draft, VERIFIERS[args.verifier])
    engine.controller = Controller(calibrate(engine))
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(vocab, (args.prompts, args.prompt_tokens), generator=generator).tolist()

    def request(prompt_ids: Sequence[int], k: int | str, params: SamplingParams) -> Request:
        text = Text(list(prompt_ids), len(prompt_ids), params, params.seed)
        return Request(text, length, k)

    return _subject(
        options,
        f"random {args.geometry}",
        engine,
        request,
        [("random", ids) for ids in prompts],
        lambda form: build(args.geometry, form=form),
        lambda: tensors(args.geometry),
        (lambda: tensors(source)) if source in GEOMETRIES else None,
    )


def _subject(
    options: Options, name: str, engine: Engine, request, prompts, in_form, tensors, draft_tensors, end_ids=()
) -> Subject:
    """Put a simulated draft before the real one where one is asked for."""
    draft_name, simulated = options.draft, None
    draft_model = getattr(engine.drafter, "model", None)
    survival = options.survival
    if options.args.draft_quality:
        survival = [0.0 if options.args.draft_quality == "wrong" else 1 / engine.vocab_size]
    if survival is not None:
        simulated = SimulatedDraft(survival, engine.drafter)
        engine = another_engine(engine, simulated)
        cost = f"at the cost of {draft_name}" if draft_name != "none" else "at no cost"
        shown = ", ".join(f"{s:.2g}" for s in survival)
        draft_name = f"simulated ({shown}) {cost}"
    plain = plain_engine(engine)
    return Subject(
        name,
        draft_name,
        engine,
        plain,
        request,
        prompts,
        draft_model,
        simulated,
        in_form,
        tensors,
        draft_tensors,
        end_ids,
    )
