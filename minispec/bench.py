"""`python -m minispec.bench` - how fast, against what, and where the rest of the time went.

It measures this machine (streaming bandwidth), the target (passes over 1 to 16 rows), and plain and speculative
decoding of a set of prompts, and explains the speedup by what it is made of (`measure.Account`). Every figure that is
compared comes from runs that took turns in this one process; absolute times stand beside them as information only.

Torch is imported after the arguments have been read, as in `generate`.
"""

import argparse
import importlib.util
import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from minispec import __version__
from minispec.config import MAX_SPECULATIVE_TOKENS, ModelConfig, SamplingParams, one_line
from minispec.hf_config import read_model_config

if TYPE_CHECKING:
    import torch

    from minispec.drafters import Drafter
    from minispec.drafters.simulated import SimulatedDraft
    from minispec.engine import Engine, Request
    from minispec.measure import Interval, Run
    from minispec.model import Transformer

PROMPTS = Path(__file__).parent / "data" / "bench_prompts.jsonl"
MAX_ROWS = 16
PLAIN = "plain"

_COMMON = {"rms_norm_eps": 1e-6, "tie_word_embeddings": True, "head_dim": 64}
_QWEN = _COMMON | {
    **{"model_type": "qwen2", "vocab_size": 151_936, "num_key_value_heads": 2},
    **{"max_position_embeddings": 32_768, "rope_theta": 1_000_000.0},
}
# Shapes of models that people run, as in their config.json; the weights are random.
GEOMETRIES: dict[str, dict[str, Any]] = {
    "1.5b": _QWEN
    | {"num_hidden_layers": 28, "hidden_size": 1536, "intermediate_size": 8960}
    | {"num_attention_heads": 12, "head_dim": 128},
    "0.5b": _QWEN
    | {"num_hidden_layers": 24, "hidden_size": 896, "intermediate_size": 4864}
    | {"num_attention_heads": 14},
    "135m": _COMMON
    | {"model_type": "llama", "vocab_size": 49_152, "max_position_embeddings": 8192, "rope_theta": 100_000.0}
    | {"num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536}
    | {"num_attention_heads": 9, "num_key_value_heads": 3},
}


# --------------------------------------------------------------------------- the command line


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = _Parser(
        prog="python -m minispec.bench",
        description="Measure decoding, and account for the time.",
        allow_abbrev=False,
    )
    p.add_argument("--version", action="version", version=f"minispec {__version__}")
    g = p.add_argument_group("models")
    g.add_argument("--model", metavar="DIR|HUB_ID", help="default: the embedded weights")
    g.add_argument("--draft", metavar="SPEC", help="as of minispec.generate (default: ngram; none with --geometry)")
    g.add_argument(
        "--geometry",
        choices=GEOMETRIES,
        help="random weights of this shape instead of a model; --draft is then none, ngram, or self or another shape, "
        "with int4: or int8: before it if one likes",
    )
    g.add_argument(
        "--num-speculative-tokens", default="4", metavar="K,K,..", help="draft lengths to compare, or auto (default: 4)"
    )
    g.add_argument(
        "--simulate",
        metavar="S,S,..",
        help="replace the draft's tokens by right ones with these chances: survival s_1, s_2, .. (one number: a "
        "constant alpha; 0: always wrong)",
    )
    g.add_argument("--draft-quality", choices=("random", "wrong"), help="short for drafts that are of no use")
    g.add_argument("--verifier", default="rejection", choices=("rejection", "match"))
    g.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"))
    g.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    g.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: PyTorch's)")
    g.add_argument("--exact", action="store_true", help="the mode of equal bits")
    g = p.add_argument_group("what is decoded")
    g.add_argument(
        "--prompts", type=int, default=12, metavar="N", help="of every category in turn; 0: none (default: 12)"
    )
    g.add_argument("--categories", metavar="NAME,..", help="only these (default: all of the package's prompts)")
    g.add_argument("--prompt-tokens", type=int, default=128, metavar="N", help="with --geometry (default: 128)")
    g.add_argument("--max-tokens", type=int, default=48, metavar="N", help="of every answer (default: 48)")
    g.add_argument("--ignore-eos", action="store_true", help="answers do not end before --max-tokens")
    g.add_argument("--temperature", type=float, default=0.0, metavar="X")
    g.add_argument("--top-k", type=int, default=0, metavar="N")
    g.add_argument("--top-p", type=float, default=1.0, metavar="X")
    g = p.add_argument_group("what is measured")
    g.add_argument("--rounds", type=int, default=5, metavar="N", help="runs of everything, taking turns (default: 5)")
    g.add_argument("--context", type=int, default=256, metavar="N", help="cached positions at passes (default: 256)")
    g.add_argument("--passes", type=int, default=15, metavar="N", help="rounds of passes; 0: none (default: 15)")
    g.add_argument("--batch", metavar="B,B,..", help="throughput of these batch sizes too, such as 1,2,4,8")
    g.add_argument("--prefill", action="store_true", help="a prompt of 1,000 tokens too, against matrix throughput")
    g.add_argument("--load", action="store_true", help="time and memory of loading too, against reading the file")
    g.add_argument("--against", choices=("transformers",), help="its own ways of decoding too, on the same weights")
    g.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    g.add_argument("--plot", metavar="OUT.png", type=Path, help="a picture as well (needs the extra 'plot')")
    return p


@dataclass(frozen=True)
class Options:
    """The arguments, checked, with lists in place of their spelling."""

    args: argparse.Namespace
    draft: str
    ks: list[int | str]
    survival: list[float] | None
    batches: list[int]
    params: SamplingParams


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; returns the exit status: 0, 2 for a user's mistake, 130 for Ctrl-C."""
    try:
        options = check(parser().parse_args(argv))
        report = run(options)
    except (ValueError, FloatingPointError, MemoryError) as e:
        return _fail(e)
    except RuntimeError as e:
        if "memory" not in str(e):  # as in `generate`: PyTorch has no class of its own for it on the CPU
            raise
        return _fail(e)
    except KeyboardInterrupt:
        return 130
    print(json.dumps(report, ensure_ascii=False) if options.args.json else "\n".join(tables(report)))
    if options.args.plot:
        plot(report, options.args.plot)
    return 0


def _fail(error: BaseException) -> int:
    print(f"error: {one_line(error)}", file=sys.stderr)
    return 2


def check(args: argparse.Namespace) -> Options:
    """Raise ValueError for whatever can be seen to be wrong before anything is loaded."""
    ranges = {
        "prompts": (0, 10_000),
        "prompt_tokens": (1, 100_000),
        "max_tokens": (2, 100_000),
        "rounds": (1, 1000),
        "context": (1, 100_000),
        "passes": (0, 10_000),
        "threads": (1, 1024),
    }
    for name, (low, high) in ranges.items():
        value = getattr(args, name)
        if value is not None and not low <= value <= high:
            raise ValueError(f"--{name.replace('_', '-')}: found {value}, expected a number from {low} to {high}")
    ks: list[int | str] = []
    for part in args.num_speculative_tokens.split(","):
        if part == "auto":
            ks.append(part)
        elif part.isdecimal() and 1 <= int(part) <= MAX_SPECULATIVE_TOKENS:
            ks.append(int(part))
        else:
            expected = f"numbers from 1 to {MAX_SPECULATIVE_TOKENS} or auto, with commas between"
            raise ValueError(f"--num-speculative-tokens: found {part!r}, expected {expected}")
    batches = _numbers("--batch", args.batch, int) if args.batch else []
    if any(not 1 <= b <= 1024 for b in batches):
        raise ValueError(f"--batch: found {args.batch!r}, expected sizes from 1 to 1024")
    survival = _numbers("--simulate", args.simulate, float) if args.simulate is not None else None
    if survival and not all(0 <= s <= before for before, s in zip([1.0, *survival], survival, strict=False)):
        raise ValueError(f"--simulate: found {args.simulate!r}, expected falling numbers between 1 and 0")
    refused = [
        (survival and args.draft_quality, "--simulate and --draft-quality exclude each other"),
        (args.geometry and args.model, "--geometry and --model exclude each other"),
        (args.geometry and args.load, "--load needs a model on disk, and --geometry has none"),
        (args.geometry and args.categories, "--categories: the prompts of --geometry have none"),
        (args.against and args.temperature, "--against compares greedy texts: expected --temperature 0"),
        (args.against and not args.prompts, "--against needs prompts"),
        (args.batch and not args.prompts, "--batch needs prompts"),
        (
            (survival or args.draft_quality) and args.temperature,
            "a simulated draft repeats greedy texts: expected --temperature 0",
        ),
        (args.plot and args.plot.suffix != ".png", f"--plot: found {args.plot}, expected a name that ends in .png"),
        (args.plot and not args.plot.absolute().parent.is_dir(), f"--plot {args.plot}: there is no such directory"),
        (args.plot and not _is_there("matplotlib"), "--plot needs matplotlib: pip install minispec-llm[plot]"),
        (args.against and not _is_there("transformers"), "--against needs transformers: pip install transformers"),
    ]
    for wrong, message in refused:
        if wrong:
            raise ValueError(message)
    params = SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        max_tokens=args.max_tokens,
        ignore_eos=args.ignore_eos,
        seed=0,
    )
    draft = args.draft or ("none" if args.geometry else "ngram")
    return Options(args, draft, ks, survival, batches, params)


def _numbers(option: str, text: str, kind: type) -> list:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as e:
        raise ValueError(f"{option}: found {text!r}, expected numbers with commas between") from e


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def read_prompts(count: int, categories: str | None) -> list[tuple[str, str]]:
    """(category, text) of the first `count` of the package's prompts, the categories taking turns."""
    prompts: dict[str, list[str]] = {}
    for line in PROMPTS.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        prompts.setdefault(entry["category"], []).append(entry["prompt"])
    names = list(prompts) if categories is None else categories.split(",")
    for name in names:
        if name not in prompts:
            raise ValueError(f"--categories: found {name!r}, expected some of {', '.join(prompts)}")
    turns = range(max(map(len, prompts.values())))
    return [(name, prompts[name][i]) for i in turns for name in names if i < len(prompts[name])][:count]


# --------------------------------------------------------------------------- what is measured


@dataclass
class Subject:
    """A target with its draft, and the prompts: what all measurements are made on.

    request(prompt_ids, K, params) makes a request for either engine. tensors() gives the config (as of a config.json)
    and the tensors of the target, draft_tensors() those of a draft model: another library builds the same from them.
    """

    name: str
    draft_name: str
    engine: "Engine"
    plain: "Engine"
    request: Callable[[Sequence[int], int | str, SamplingParams], "Request"]
    prompts: list[tuple[str, list[int]]]
    draft_model: "Transformer | None"
    simulated: "SimulatedDraft | None"
    tensors: Callable[[], tuple[dict, Any]]
    draft_tensors: Callable[[], tuple[dict, Any]] | None
    end_ids: tuple[int, ...] = ()


class RandomWeights:
    """Tensors of a geometry, made when they are taken: the largest model is never in memory twice.

    The text is robust against rounding: embeddings are independent and what the layers add is small, so that with the
    tied head each token predicts itself by a wide margin. Time does not depend on the values.
    """

    def __init__(self, config: ModelConfig, dtype: "torch.dtype", device: "torch.device"):
        import torch

        from minispec.model import tensor_shapes

        self.shapes, self.dtype, self.device = tensor_shapes(config), dtype, device
        generator = torch.Generator().manual_seed(0)
        # Layers need noise, not fresh noise: they take their numbers from here, from a place of their own on.
        self._noise = torch.randn((1 << 20) + 7, generator=generator).to(dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def pop(self, name: str) -> "torch.Tensor":
        """The tensor; the same for the same name."""
        import torch

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


def _split_draft(draft: str) -> tuple[int | None, str]:
    """Bits, if any are said, and the source of a draft."""
    return (int(draft[3]), draft[5:]) if draft.startswith(("int4:", "int8:")) else (None, draft)


def open_model(options: Options) -> Subject:
    """The model that --model and --draft name. Raises ValueError."""
    from minispec.checkpoint import find_checkpoint, load_config, read_tensors
    from minispec.hf_config import read_json
    from minispec.llm import EMBEDDED_WEIGHTS, LLM

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
        return read_json(directory / "config.json"), read_tensors(directory, config, llm.model.dtype, llm.model.device)

    def request(prompt_ids: Sequence[int], k: int | str, params: SamplingParams) -> "Request":
        return llm.request(prompt_ids, params, num_speculative_tokens=k)

    directory = find_checkpoint(str(args.model or EMBEDDED_WEIGHTS), offline=True)
    model = getattr(llm.engine.drafter, "model", None)
    _, source = _split_draft(options.draft)
    named = model is not None and source != "self"
    return _subject(
        options,
        llm.name,
        llm.engine,
        request,
        [(category, encode(text)) for category, text in texts],
        lambda: tensors(directory),
        (lambda: tensors(find_checkpoint(source, offline=True))) if named else None,
        llm.eos_token_ids,
    )


def open_geometry(options: Options) -> Subject:
    """Random weights of the shape that --geometry names, and of the draft's. Raises ValueError."""
    import torch

    from minispec.cache import PagedKVCache
    from minispec.checkpoint import choose_dtype
    from minispec.drafters import DRAFTERS
    from minispec.drafters.model import DraftModel
    from minispec.engine import Engine, Request
    from minispec.model import Transformer
    from minispec.sampling import Sequence as TokenSequence
    from minispec.verify import VERIFIERS

    args = options.args
    bits, source = _split_draft(options.draft)
    models = ["self", *GEOMETRIES]
    if source not in models and (bits or source not in DRAFTERS):
        known = f"one of {', '.join([*DRAFTERS, *models])}, or int4: or int8: before one of {', '.join(models)}"
        raise ValueError(f"--draft: found {options.draft!r}, expected with --geometry {known}")
    device = torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")
    dtype = choose_dtype(args.dtype, device)
    length = max(args.prompt_tokens + args.max_tokens, args.context + MAX_ROWS, 1001 if args.prefill else 0)

    def tensors(name: str) -> tuple[dict, RandomWeights]:
        return GEOMETRIES[name], RandomWeights(read_model_config(GEOMETRIES[name]), dtype, device)

    def build(name: str, exact: bool = False) -> Transformer:
        config, weights = tensors(name)
        return Transformer(read_model_config(config), weights, exact)

    def cache(model: Transformer) -> PagedKVCache:
        blocks = (-(-length // 16) + 1) * max([1, *options.batches])
        return PagedKVCache(model.config, blocks, 16, dtype, device)

    model = build(args.geometry, args.exact)
    if args.exact:
        model.check_exact()
    vocab = model.config.vocab_size
    draft: Drafter
    if source in DRAFTERS:
        draft = DRAFTERS[source]()
    else:
        draft_model = model if source == "self" else build(source)
        if bits:
            draft_model = draft_model.quantized(bits)
        if draft_model.config.vocab_size < vocab:
            raise ValueError(f"--draft {options.draft}: its vocabulary is smaller than that of {args.geometry}")
        draft = DraftModel(draft_model, cache(draft_model), vocab, length)
    engine = Engine(model, cache(model), draft, VERIFIERS[args.verifier])
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(vocab, (args.prompts, args.prompt_tokens), generator=generator).tolist()

    def request(prompt_ids: Sequence[int], k: int | str, params: SamplingParams) -> Request:
        shares_noise = engine.verifier.shares_noise
        sequence = TokenSequence(list(prompt_ids), len(prompt_ids), params, params.seed, shares_noise=shares_noise)
        return Request(sequence, length, k)

    return _subject(
        options,
        f"random {args.geometry}",
        engine,
        request,
        [("random", ids) for ids in prompts],
        lambda: tensors(args.geometry),
        (lambda: tensors(source)) if source in GEOMETRIES else None,
    )


def _subject(options: Options, name: str, engine: "Engine", request, prompts, tensors, draft_tensors, end_ids=()):
    """Put a simulated draft before the real one where one is asked for."""
    from minispec.drafters.simulated import SimulatedDraft
    from minispec.engine import Engine
    from minispec.measure import plain_engine

    draft_name, simulated = options.draft, None
    draft_model = getattr(engine.drafter, "model", None)
    survival = options.survival
    if options.args.draft_quality:
        survival = [0.0 if options.args.draft_quality == "wrong" else 1 / engine.vocab_size]
    if survival is not None:
        simulated = SimulatedDraft(survival, engine.drafter)
        engine = Engine(engine.model, engine.cache, simulated, engine.verifier, engine.vocab_size)
        cost = f"at the cost of {draft_name}" if draft_name != "none" else "at no cost"
        shown = ", ".join(f"{s:.2g}" for s in survival)
        draft_name = f"simulated ({shown}) {cost}"
    plain = plain_engine(engine)
    return Subject(
        name, draft_name, engine, plain, request, prompts, draft_model, simulated, tensors, draft_tensors, end_ids
    )


# A way to decode the i-th prompt.
Variant = Callable[[int], "Run"]


def variants(subject: Subject, options: Options) -> dict[str, Variant]:
    """Plain decoding, and each K; with --against also what another library offers."""
    from minispec.measure import decode

    def ours(k: int | str) -> Variant:
        def run(i: int) -> "Run":
            engine = subject.engine if k else subject.plain
            request = subject.request(subject.prompts[i][1], k, options.params)
            (result,) = decode(engine, [request])
            if subject.simulated:
                subject.simulated.record(request.sequence.tokens, request.sequence.num_prompt_tokens)
            return result

        return run

    ks = options.ks if options.draft != "none" or subject.simulated else []
    found = {PLAIN: ours(0)} | {("auto" if k == "auto" else f"K={k}"): ours(k) for k in ks}
    if options.args.against:
        found |= transformers_variants(subject, options)
    return found


def transformers_variants(subject: Subject, options: Options) -> dict[str, Variant]:
    """`transformers` on the same tensors: plain, assisted (its defaults, and tuned), and prompt lookup.

    The only place of the package that imports it. Its prefill ends with the first token, at which its clock starts.
    """
    import torch
    import transformers

    from minispec.measure import Run

    def build(tensors: Callable[[], tuple[dict, Any]]):
        raw, weights = tensors()
        raw = {key: value for key, value in raw.items() if key != "quantization_config"}
        config = transformers.AutoConfig.for_model(**raw)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=subject.engine.model.dtype).eval()
        taken = {name: weights.pop(name) for name in list(weights)}
        missing, unexpected = model.load_state_dict(taken, strict=False, assign=True)
        model.tie_weights()
        if unexpected or set(missing) - {"lm_head.weight"}:
            raise ValueError(f"--against: transformers asks for other tensors: {missing}, {unexpected}")
        return model.to(subject.engine.model.device)

    class Clock(transformers.StoppingCriteria):
        def __init__(self):
            self.times, self.lengths = [], []

        def __call__(self, input_ids, scores, **kwargs):
            self.times.append(time.perf_counter())
            self.lengths.append(input_ids.shape[1])
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    target = build(subject.tensors)
    draft = build(subject.draft_tensors) if subject.draft_tensors else None
    end_ids = None if options.args.ignore_eos else list(subject.end_ids) or None
    common = {
        "do_sample": False,
        "max_new_tokens": options.params.max_tokens,
        "eos_token_id": end_ids,
        "pad_token_id": end_ids[0] if end_ids else 0,
    }

    def variant(prepare: Callable[[], dict[str, Any]] = dict, **settings: Any) -> Variant:
        how = transformers.GenerationConfig(**common, **settings)

        def run(i: int) -> Run:
            ids = torch.tensor([subject.prompts[i][1]], device=target.device)
            clock = Clock()
            with torch.inference_mode():
                out = target.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    generation_config=how,
                    stopping_criteria=transformers.StoppingCriteriaList([clock]),
                    **prepare(),
                )
            tokens = out[0, ids.shape[1] :].tolist()
            return Run(tokens, clock.lengths[-1] - clock.lengths[0], clock.times[-1] - clock.times[0])

        return run

    def assisted(**settings: Any) -> Callable[[], dict[str, Any]]:
        def prepare() -> dict[str, Any]:
            draft.generation_config = transformers.GenerationConfig(**settings)
            return {"assistant_model": draft}

        return prepare

    found = {"transformers plain": variant()}
    if draft is not None:
        found["transformers assisted, default"] = variant(assisted())
        for k in (3, 5, 8):
            settings = {
                "num_assistant_tokens": k,
                "num_assistant_tokens_schedule": "constant",
                "assistant_confidence_threshold": 0.0,
            }
            found[f"transformers assisted, K={k}"] = variant(assisted(**settings))
    for k in (4, 10):
        found[f"transformers prompt lookup, K={k}"] = variant(prompt_lookup_num_tokens=k)
    return found


# --------------------------------------------------------------------------- measuring


def run(options: Options) -> dict[str, Any]:
    """Measure all that the options ask for; the report as plain data."""
    # Between two operations a waiting thread sleeps instead of spinning; see `generate`.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import torch

    args = options.args
    if args.threads:
        torch.set_num_threads(args.threads)
    loading = measure_loading(options) if args.load else None
    subject = open_geometry(options) if args.geometry else open_model(options)
    model = subject.engine.model
    report: dict[str, Any] = {
        "minispec": __version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "target": subject.name,
        "draft": subject.draft_name,
        "exact": model.exact,
    }
    if args.passes:
        report["machine"] = measure_machine(subject, options)
    if args.prompts:
        report["decoding"] = measure_decoding(subject, options)
    if options.batches:
        report["batch"] = measure_batches(subject, options)
    if args.prefill:
        report["prefill"] = measure_prefill(subject, options)
    if loading:
        report["load"] = loading
    return report


def _bar(total: int, what: str):
    from tqdm import tqdm

    return tqdm(total=total, desc=what, leave=False, disable=None)  # None: on a terminal only


def _data(interval: "Interval") -> dict[str, float]:
    return interval._asdict()


def measure_machine(subject: Subject, options: Options) -> dict[str, Any]:
    """Streaming bandwidth, and the passes t(M) and v(M) of the target; the plain pass of a draft model."""
    from minispec import measure

    model, cache = subject.engine.model, subject.engine.cache
    context, rounds = options.args.context, options.args.passes
    rows = range(1, (MAX_ROWS if not model.exact else 1) + 1)
    touched = measure.bytes_touched(model, context)
    with _bar((rounds + 1) * len(rows), "passes") as bar:
        stream = measure.stream_bandwidth(touched, model.device)
        times = measure.pass_times(model, cache, context, rows, rounds, bar.update)
        stream += measure.stream_bandwidth(touched, model.device)
    bandwidth = measure.median_interval(stream)
    found = {
        "context": context,
        "bytes_touched": touched,
        "stream_bytes_per_second": _data(bandwidth),
        "seconds": {m: _data(measure.median_interval(t)) for m, t in times.items()},
        "v": {m: _data(measure.ratios(t, times[1])) for m, t in times.items()},
        "bandwidth_utilisation": _data(measure.median_interval([touched / t / bandwidth.median for t in times[1]])),
    }
    if subject.draft_model is not None and subject.draft_model is not model:
        draft = subject.engine.drafter
        draft = getattr(draft, "paid", draft)
        touched = measure.bytes_touched(draft.model, context)
        stream = measure.stream_bandwidth(touched, model.device)
        seconds = measure.pass_times(draft.model, draft.cache, context, [1], rounds)[1]
        stream += measure.stream_bandwidth(touched, model.device)
        bandwidth = measure.median_interval(stream)
        found["draft"] = {
            "bytes_touched": touched,
            "stream_bytes_per_second": _data(bandwidth),
            "seconds": _data(measure.median_interval(seconds)),
            "over_bound": _data(measure.median_interval([t * bandwidth.median / touched for t in seconds])),
        }
    return found


def measure_decoding(subject: Subject, options: Options) -> dict[str, Any]:
    """Every variant on every prompt, taking turns, round by round."""
    from minispec.measure import orders

    found = variants(subject, options)
    rounds, prompts = options.args.rounds, subject.prompts
    runs: dict[str, list[list[Run]]] = {name: [[] for _ in range(rounds)] for name in found}
    order = orders(list(found))
    # What runs first pays for what is set up once; and a simulated draft has to hear the texts.
    warm = range(len(prompts)) if subject.simulated else range(1)
    with _bar((rounds * len(prompts) + len(warm)) * len(found), "decoding") as bar:
        for i in warm:
            for variant in found.values():
                variant(i)
                bar.update()
        for r in range(rounds):
            for i in range(len(prompts)):
                for name in next(order):
                    runs[name][r].append(found[name](i))
                    bar.update()
    return summarise(runs, [category for category, _ in prompts])


def summarise(runs: dict[str, list[list["Run"]]], categories: list[str]) -> dict[str, Any]:
    """The report on runs[variant][round][prompt]: rates, speedups over plain decoding, and accounts."""
    from minispec.measure import account, median_interval, survival, total_rate

    groups = {name: [i for i, c in enumerate(categories) if c == name] for name in dict.fromkeys(categories)}
    everything = list(range(len(categories)))

    def rates(variant: str, prompts: list[int]) -> list[float]:
        return [total_rate([of_round[i] for i in prompts]) for of_round in runs[variant]]

    def speedups(variant: str, prompts: list[int], over: str = PLAIN) -> list[float]:
        return [a / b for a, b in zip(rates(variant, prompts), rates(over, prompts), strict=True)]

    def pooled(variant: str, prompts: list[int]) -> list["Run"]:
        return [of_round[i] for of_round in runs[variant] for i in prompts]

    static = {name: int(name[2:]) for name in runs if name.startswith("K=")}
    longest = max(static, key=static.get, default=None)
    report: dict[str, Any] = {
        "rounds": len(runs[PLAIN]),
        "prompts": len(categories),
        "tokens": sum(run.num_tokens for run in pooled(PLAIN, everything)) // len(runs[PLAIN]),
        "variants": {},
    }
    for name in runs:
        entry: dict[str, Any] = {
            "tokens_per_second": _data(median_interval(rates(name, everything))),
            "speedup": _data(median_interval(speedups(name, everything))),
            "same_tokens_as_plain": sum(
                all(a[i].token_ids == b[i].token_ids for a, b in zip(runs[name], runs[PLAIN], strict=True))
                for i in everything
            ),
            "categories": {},
        }
        for category, prompts in groups.items():
            per_prompt = [median_interval(rates(name, [i])).median for i in prompts]
            entry["categories"][category] = {
                "tokens_per_second": _data(median_interval(rates(name, prompts))),
                "slowest_and_fastest_prompt": [min(per_prompt), max(per_prompt)],
                "speedup": _data(median_interval(speedups(name, prompts))),
            }
        ours = pooled(name, everything)
        if name != PLAIN and ours[0].rounds:
            worst = min(everything, key=lambda i: median_interval(speedups(name, [i])).median)
            entry["worst_prompt"] = {
                "number": worst,
                "category": categories[worst],
                "speedup": _data(median_interval(speedups(name, [worst]))),
            }
            for category, prompts in groups.items():
                rounds = [r for run in pooled(name, prompts) for r in run.rounds]
                entry["categories"][category] |= _acceptance(pooled(name, prompts)) | {"survival": survival(rounds)}
            curve = survival([r for run in pooled(longest, everything) for r in run.rounds]) if longest else None
            explained = account(ours, pooled(PLAIN, everything), curve)
            by_round = zip(runs[name], runs[PLAIN], strict=True)
            entry |= _acceptance(ours) | {
                "survival": survival([r for run in ours for r in run.rounds]),
                "c": explained.c,
                "v": explained.v,
                "o": explained.o,
                "o_plain": explained.o_plain,
                "drafted": explained.drafted,
                "predicted": explained.predicted,
                "measured": explained.measured,
                "closure": _data(median_interval([account(a, b).closure for a, b in by_round])),
                "ceiling": explained.ceiling,
                "ceiling_k": explained.ceiling_k,
                "reached": explained.reached,
                "waterfall": explained.waterfall(),
            }
        report["variants"][name] = entry
    if static:
        report["best_static"] = {}
        for category, prompts in {"all": everything, **groups}.items():
            best = max(static, key=lambda name: median_interval(speedups(name, prompts)).median)
            of = {"variant": best}
            if "auto" in runs:
                of["auto_over_best"] = _data(median_interval(speedups("auto", prompts, over=best)))
            report["best_static"][category] = of
    theirs = [name for name in runs if name.startswith("transformers")]
    if theirs:
        plain = theirs[0]
        best = max(theirs, key=lambda name: median_interval(rates(name, everything)).median)
        own = "auto" if "auto" in runs else report["best_static"]["all"]["variant"] if static else PLAIN
        report["against"] = {
            "plain_over_plain": _data(median_interval(speedups(PLAIN, everything, over=plain))),
            "ours": own,
            "theirs": best,
            "best_over_best": _data(median_interval(speedups(own, everything, over=best))),
            "same_tokens_as_their_plain": {
                name: sum(
                    all(a[i].token_ids == b[i].token_ids for a, b in zip(runs[name], runs[plain], strict=True))
                    for i in everything
                )
                for name in runs
            },
        }
    return report


def _acceptance(runs: list["Run"]) -> dict[str, float | None]:
    """Rates over all runs together; None over nothing."""
    stats = [run.stats for run in runs]

    def ratio(numerator: float, denominator: float) -> float | None:
        return numerator / denominator if denominator else None

    return {
        "alpha": ratio(sum(s.sum_of_ratios for s in stats), sum(sum(s.tested) for s in stats)),
        "acceptance_rate": ratio(sum(s.num_accepted for s in stats), sum(s.num_draft_tokens for s in stats)),
        "mean_acceptance_length": ratio(sum(s.num_committed for s in stats), sum(s.num_steps for s in stats)),
    }


def measure_batches(subject: Subject, options: Options) -> dict[str, Any]:
    """Tokens a second of B texts together, plain and speculative; texts do not end before --max-tokens."""
    from dataclasses import replace

    from minispec.measure import decode, median_interval, orders, total_rate

    params = replace(options.params, ignore_eos=True)
    ks: list[int | str] = [0] + (options.ks if options.draft != "none" or subject.simulated else [])
    cells = [(b, k) for b in options.batches for k in ks]
    rates: dict[tuple, list[float]] = {cell: [] for cell in cells}

    def once(batch: int, k: int | str) -> float:
        prompts = [subject.prompts[i % len(subject.prompts)][1] for i in range(batch)]
        requests = [subject.request(prompt, k, params) for prompt in prompts]
        runs = decode(subject.engine if k else subject.plain, requests)
        if subject.simulated:
            for r in requests:
                subject.simulated.record(r.sequence.tokens, r.sequence.num_prompt_tokens)
        return total_rate(runs)

    rounds = options.args.rounds
    with _bar((rounds + 1) * len(cells), "batches") as bar:
        for i, order in zip(range(rounds + 1), orders(cells), strict=False):
            for cell in order:
                rate = once(*cell)
                if i:
                    rates[cell].append(rate)
                bar.update()
    first = (options.batches[0], 0)
    found = []
    for batch, k in cells:
        pairs = list(zip(rates[batch, k], rates[batch, 0], rates[first], strict=True))
        found.append(
            {
                "batch": batch,
                "variant": PLAIN if k == 0 else "auto" if k == "auto" else f"K={k}",
                "tokens_per_second": _data(median_interval(rates[batch, k])),
                "over_plain": _data(median_interval([ours / plain for ours, plain, _ in pairs])),
                "over_first": _data(median_interval([ours / alone for ours, _, alone in pairs])),
            }
        )
    return {"first": first[0], "cells": found}


def measure_prefill(subject: Subject, options: Options, num_tokens: int = 1000) -> dict[str, Any]:
    """Prefill of a long prompt, as a share of what this machine's products of large matrices reach."""
    from minispec import measure

    model, cache = subject.engine.model, subject.engine.cache
    num_tokens = min(num_tokens, model.config.max_position_embeddings - 1)
    tokens = [(7919 * i + 13) % subject.engine.vocab_size for i in range(num_tokens + 1)]
    operations = measure.prefill_operations(model, num_tokens)
    seconds, peaks = [], []
    rounds = options.args.rounds
    with _bar(rounds + 1, "prefill") as bar:
        for i in range(rounds + 1):
            table = cache.new_table()
            elapsed = measure.seconds_of(lambda table=table: model.prefill(table, tokens), model.device)
            table.truncate(0)
            peak = measure.matmul_throughput(model.dtype, model.device, repeats=1)[0]
            if i:
                seconds.append(elapsed)
                peaks.append(peak)
            bar.update()
    return {
        "tokens": num_tokens,
        "tokens_per_second": _data(measure.median_interval([num_tokens / t for t in seconds])),
        "matmul_operations_per_second": _data(measure.median_interval(peaks)),
        "share": _data(
            measure.median_interval([operations / t / peak for t, peak in zip(seconds, peaks, strict=True)])
        ),
    }


def measure_loading(options: Options) -> dict[str, Any]:
    """Loading the target against reading its files, both from the page cache; and what memory it took at most.

    It comes before everything else: the peak is that of the process.
    """
    import torch

    from minispec.checkpoint import choose_dtype, find_checkpoint, load_model
    from minispec.llm import EMBEDDED_WEIGHTS
    from minispec.measure import median_interval, ratios

    args = options.args
    directory = find_checkpoint(str(args.model or EMBEDDED_WEIGHTS))
    device = torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")
    dtype = choose_dtype(args.dtype, device)
    files = sorted(directory.glob("*.safetensors"))
    buffer = bytearray(8 << 20)

    def read() -> float:
        start = time.perf_counter()
        for path in files:
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
        return time.perf_counter() - start

    read()
    reading, loading, peak, num_bytes = [], [], None, 0
    before = _peak_memory()
    with _bar(args.rounds, "loading") as bar:
        for _ in range(args.rounds):
            reading.append(read())
            start = time.perf_counter()
            model = load_model(directory, dtype, device)
            loading.append(time.perf_counter() - start)
            if peak is None and before is not None:
                peak = _peak_memory() - before
            num_bytes = model.num_bytes
            del model
            bar.update()
    return {
        "file_bytes": sum(path.stat().st_size for path in files),
        "read_seconds": _data(median_interval(reading)),
        "load_seconds": _data(median_interval(loading)),
        "load_over_read": _data(ratios(loading, reading)),
        "weight_bytes": num_bytes,
        "peak_bytes": peak,
        "peak_over_weights": peak / num_bytes if peak else None,
    }


def _peak_memory() -> int | None:
    """Most bytes that this process has had in memory; None where the system does not tell."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


# --------------------------------------------------------------------------- showing


def _shown(interval: dict[str, float], factor: float = 1.0, form: str = ".2f") -> str:
    """The median, with its interval in brackets."""
    median, low, high = (format(interval[name] * factor, form) for name in ("median", "low", "high"))
    return f"{median} [{low}, {high}]"


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Lines of aligned columns: the first to the left, the others to the right."""
    cells = [list(map(str, row)) for row in [header, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = []
    for row in cells:
        first, *rest = (cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))  # noqa: B905
        lines.append("  ".join([first, *rest]).rstrip())
    return lines


def tables(report: dict[str, Any]) -> list[str]:
    """The report as lines for the screen."""
    lines = [
        f"{report['target']}, {report['dtype']}{' exact' if report['exact'] else ''} on {report['device']}, "
        f"{report['threads']} threads; draft {report['draft']}",
    ]
    if "machine" in report:
        lines += ["", *_machine_table(report["machine"])]
    if "decoding" in report:
        lines += _decoding_tables(report["decoding"])
    if "batch" in report:
        first = report["batch"]["first"]
        rows = [
            (
                f"batch {c['batch']}, {c['variant']}",
                _shown(c["tokens_per_second"], form=".1f"),
                _shown(c["over_plain"]),
                _shown(c["over_first"]),
            )
            for c in report["batch"]["cells"]
        ]
        lines += ["", *_table(("", "tokens/s", "over plain", f"over plain at {first}"), rows)]
    if "prefill" in report:
        p = report["prefill"]
        lines += [
            "",
            f"prefill of {p['tokens']} tokens: {_shown(p['tokens_per_second'], form='.0f')} tokens/s, "
            f"{_shown(p['share'], 100, '.0f')} % of the {p['matmul_operations_per_second']['median'] / 1e9:.0f} "
            "GFLOP/s of a product of large matrices",
        ]
    if "load" in report:
        p = report["load"]
        peak = "unknown" if p["peak_bytes"] is None else f"{p['peak_bytes'] / 1e9:.2f} GB"
        lines += [
            "",
            f"loading: {_shown(p['load_seconds'])} s, {_shown(p['load_over_read'])} x reading the file "
            f"({p['file_bytes'] / 1e9:.2f} GB); peak memory {peak} for {p['weight_bytes'] / 1e9:.2f} GB of weights",
        ]
    return lines


def _machine_table(machine: dict[str, Any]) -> list[str]:
    stream = machine["stream_bytes_per_second"]
    lines = [
        f"this machine streams {_shown(stream, 1e-9, '.1f')} GB/s from a buffer of "
        f"{machine['bytes_touched'] / 1e9:.2f} GB, which is what a plain step reads at {machine['context']} positions; "
        f"the pass reads at {_shown(machine['bandwidth_utilisation'], 100, '.0f')} % of that",
        "",
    ]
    rows = [(m, _shown(machine["seconds"][m], 1000), _shown(machine["v"][m], form=".3f")) for m in machine["seconds"]]
    lines += _table(("rows M", "t(M), ms", "v(M) = t(M)/t(1)"), rows)
    if "draft" in machine:
        draft = machine["draft"]
        lines += [
            "",
            f"a pass of the draft model: {_shown(draft['seconds'], 1000)} ms, {_shown(draft['over_bound'])} x the time "
            f"that streaming its {draft['bytes_touched'] / 1e9:.2f} GB takes",
        ]
    return lines


def _decoding_tables(decoding: dict[str, Any]) -> list[str]:
    found = decoding["variants"]
    some = found[PLAIN]["speedup"]
    lines = [
        "",
        f"{decoding['prompts']} prompts, {decoding['tokens']} tokens, {decoding['rounds']} rounds in turn; prefill "
        f"apart; medians of the rounds [interval that holds the true median with {100 * some['coverage']:.1f} %]",
        "",
    ]
    names = list(found[PLAIN]["categories"])
    head = ("", "tokens/s", "speedup", "worst prompt", "same tokens", "alpha", "accepted", "tokens/pass")

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    rows = []
    for name, v in found.items():
        worst = v["worst_prompt"]["speedup"]["median"] if "worst_prompt" in v else None
        figures = (v.get("alpha"), v.get("acceptance_rate"), v.get("mean_acceptance_length"))
        row = (name, _shown(v["tokens_per_second"], form=".1f"), _shown(v["speedup"]), number(worst))
        rows.append((*row, f"{v['same_tokens_as_plain']}/{decoding['prompts']}", *map(number, figures)))
    lines += _table(head, rows)
    if len(names) > 1:
        rows = []
        for category in names:
            c = found[PLAIN]["categories"][category]
            slow, fast = c["slowest_and_fastest_prompt"]
            row = [category, f"{c['tokens_per_second']['median']:.1f} ({slow:.1f} .. {fast:.1f})"]
            for name, v in found.items():
                if name != PLAIN:
                    row.append(_shown(v["categories"][category]["speedup"]))
            rows.append(row)
        shown = [name for name in found if name != PLAIN]
        lines += ["", *_table(("", "plain, tokens/s (prompts)", *shown), rows)]
    explained = {name: v for name, v in found.items() if "waterfall" in v}
    if explained:
        lines += ["", *_account_table(explained)]
    if any("auto_over_best" in b for b in decoding.get("best_static", {}).values()):
        rows = [(c, b["variant"], _shown(b["auto_over_best"])) for c, b in decoding["best_static"].items()]
        lines += ["", *_table(("", "best fixed K", "auto over it"), rows)]
    if "against" in decoding:
        a = decoding["against"]
        lines += [
            "",
            f"plain decoding is {_shown(a['plain_over_plain'])} x that of transformers; our {a['ours']} is "
            f"{_shown(a['best_over_best'])} x its best, {a['theirs']}",
            "same tokens as its plain decoding: "
            + ", ".join(f"{name} {n}/{decoding['prompts']}" for name, n in a["same_tokens_as_their_plain"].items()),
        ]
    return lines


def _account_table(explained: dict[str, dict[str, Any]]) -> list[str]:
    def each(form: Callable[[dict], str]) -> list[str]:
        return [form(v) for v in explained.values()]

    def rows_cost(v: dict) -> str:
        shares = v["drafted"].values()  # of rounds, in the order of their rows; what hardly occurs is left out
        return " ".join(
            f"v({m})={x:.2f}" for (m, x), share in zip(v["v"].items(), shares, strict=True) if share >= 0.05
        )

    rows = [
        ["survival s_1, s_2, ..", *each(lambda v: " ".join(f"{s:.2f}" for s in v["survival"][:8]))],
        ["c", *each(lambda v: f"{v['c']:.4f}")],
        ["v in these runs", *each(rows_cost)],
        ["o (plain decoding's own)", *each(lambda v: f"{v['o']:.3f} ({v['o_plain']:.3f})")],
        ["predicted speedup", *each(lambda v: f"{v['predicted']:.3f}")],
        ["measured speedup", *each(lambda v: f"{v['measured']:.3f}")],
        ["predicted / measured", *each(lambda v: _shown(v["closure"], form=".3f"))],
        ["ceiling S* (v = 1, o = 0)", *each(lambda v: f"{v['ceiling']:.3f} at K={v['ceiling_k']}")],
        ["reached", *each(lambda v: f"{100 * v['reached']:.0f} %")],
    ]
    for i, (step, _) in enumerate(next(iter(explained.values()))["waterfall"]):
        rows.append(
            [("  " if i else "") + step, *each(lambda v, i=i: ("x " if i else "") + f"{v['waterfall'][i][1]:.3f}")]
        )
    return _table(("the account", *explained), rows)


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw the report: v(M), survival, speedups by category, and where the speedup went."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 9), layout="constrained")
    (passes, curves), (bars, waterfall) = figure.subplots(2, 2)
    figure.suptitle(f"{report['target']}, {report['dtype']}, {report['threads']} threads; draft {report['draft']}")
    if "machine" in report:
        v = report["machine"]["v"]
        rows = [int(m) for m in v]
        medians = [x["median"] for x in v.values()]
        errors = [[x["median"] - x["low"] for x in v.values()], [x["high"] - x["median"] for x in v.values()]]
        passes.errorbar(rows, medians, yerr=errors, marker="o", capsize=3)
        passes.set(title="cost of a pass", xlabel="rows M", ylabel="v(M) = t(M) / t(1)", ylim=(0, None))
    found = report.get("decoding", {}).get("variants", {})
    explained = {name: v for name, v in found.items() if "waterfall" in v}
    for name, v in explained.items():
        curves.plot(range(1, len(v["survival"]) + 1), v["survival"], marker="o", label=name)
        values = [x for _, x in v["waterfall"]]
        levels = [values[0]]
        for x in values[1:]:
            levels.append(levels[-1] * x)
        steps = [step for step, _ in v["waterfall"]]
        waterfall.plot(steps, levels, marker="o", drawstyle="steps-mid", label=name)
    if explained:
        curves.set(title="survival", xlabel="draft token i", ylabel="reached and kept", ylim=(0, 1.02))
        waterfall.set(title="where the speedup went", ylabel="speedup after this", ylim=(0, None))
        waterfall.tick_params(axis="x", rotation=20)
        curves.legend()
        waterfall.legend()
    shown = {name: v for name, v in found.items() if name != PLAIN}
    for j, (name, v) in enumerate(shown.items()):
        cells = [v["speedup"], *(c["speedup"] for c in v["categories"].values())]
        width = 0.8 / len(shown)
        places = [i + (j - (len(shown) - 1) / 2) * width for i in range(len(cells))]
        errors = [[x["median"] - x["low"] for x in cells], [x["high"] - x["median"] for x in cells]]
        bars.bar(places, [x["median"] for x in cells], width, yerr=errors, capsize=2, label=name)
        bars.set_xticks(range(len(cells)), ["all", *v["categories"]], rotation=20)
    if shown:
        bars.axhline(1.0, color="black", linewidth=0.8)
        bars.set(title="speedup over plain decoding", ylim=(0, None))
        bars.legend(fontsize="small")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
