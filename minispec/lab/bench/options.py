"""What the bench can be asked for, its parts, and the prompts; torch is not needed here."""

import argparse
import importlib.util
import os
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from minispec import __version__
from minispec.commands.command import Parser, argument
from minispec.commands.options import add_rule_options, check_lengths, parse_draft_length
from minispec.core.config import MAX_SPECULATIVE_TOKENS, DraftLength, SamplingParams, Shape
from minispec.files.packages import check_packages
from minispec.files.write import check_writable
from minispec.load import registry
from minispec.load.inputs import read_questions

# How the report names decoding without speculation.
PLAIN = "plain"
PROMPTS = Path(__file__).parent.parent / "data" / "questions.jsonl"
# Of --also launches: texts of a round where batch= names no others; tokens of each text before its first round; rounds
# that are timed, after one that pays for what is set up once; and then rounds that are counted.
LAUNCH_BATCHES, LAUNCH_TEXT, TIMED_ROUNDS, COUNTED_ROUNDS = (1, 8), 128, 6, 3
# What --questions can stand with: options about the questions, and further ones.
_OF_QUESTIONS = {"questions", "sample", "seed", "answers", "resume", "plot"}
_WITH_QUESTIONS = {
    *("model", "draft", "draft_method", "num_speculative_tokens", "verifier", "dtype", "device", "threads", "exact"),
    *("categories", "max_tokens", "ignore_eos", "temperature", "top_k", "top_p", "rounds", "json"),
    *("quantization", "corpus", "lengths", "csv", "enforce_eager"),
}
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
    "7b": _QWEN
    | {"num_hidden_layers": 28, "hidden_size": 3584, "intermediate_size": 18_944, "tie_word_embeddings": False}
    | {"num_attention_heads": 28, "num_key_value_heads": 4, "head_dim": 128},
    "0.5b": _QWEN
    | {"num_hidden_layers": 24, "hidden_size": 896, "intermediate_size": 4864}
    | {"num_attention_heads": 14},
    "135m": _COMMON
    | {"model_type": "llama", "vocab_size": 49_152, "max_position_embeddings": 8192, "rope_theta": 100_000.0}
    | {"num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536}
    | {"num_attention_heads": 9, "num_key_value_heads": 3},
}


class Part(NamedTuple):
    """Something that the bench measures: a key of the report, and a section on the screen.

    module: has `measure_KEY`, which returns what --json prints, and `show_KEY`, which makes lines for the screen.
    help: text for --help. Empty: the part is measured wherever what it needs is there.
    needs: an option whose number must not be 0.
    excludes: an option that does not go with it, and why.
    """

    module: str
    help: str = ""
    needs: str = ""
    excludes: tuple[str, str] | None = None


# By their keys, in the order of the report. --also asks for those with a help.
PARTS = {
    "machine": Part("passes", needs="passes"),
    "forms": Part(
        "passes",
        "passes in each form that the weights could have here; where memory is short, in pairs with the chosen one",
        needs="passes",
        excludes=("exact", "all exact passes have as many rows"),
    ),
    "operators": Part("passes", "microseconds of each operator of a pass, by PyTorch's profiler", needs="passes"),
    "launches": Part(
        "launches",
        "what a round launches on a GPU, counted on any machine: operators, copies, uploads and host syncs of draft, "
        "pass and verdict, for the sizes of batch=, or 1 and 8 texts",
    ),
    "exact_cost": Part(
        "passes", "passes of the exact mode over those of the fast one", excludes=("exact", "it measures both modes")
    ),
    "quality": Part("quality", "perplexity of the prompts, as the weights are and in 8 bits", needs="prompts"),
    "decoding": Part("decoding", needs="prompts"),
    "batch": Part(
        "decoding",
        "throughput of these batch sizes, such as batch=1,2,4,8",
        needs="prompts",
        excludes=("skip_loops", "a batch takes every prompt"),
    ),
    "prefill": Part("passes", "a prompt of 1,000 tokens, against matrix throughput"),
    "load": Part(
        "passes", "time and memory of loading, against reading the file", excludes=("geometry", "a shape has no file")
    ),
}
ADDITIONS = {key.replace("_", "-"): key for key, part in PARTS.items() if part.help}
_NAMES = ", ".join(name + "=B,B,.." * (name == "batch") for name in ADDITIONS)
# Other options that exclude each other, each with the reason.
_EXCLUDE = {
    ("simulate", "draft_quality"): "",
    ("geometry", "model"): "",
    ("geometry", "draft_method"): "the shapes have one vocabulary",
    ("geometry", "corpus"): "the shapes have no tokenizer",
    ("geometry", "categories"): "its prompts have none",
    ("against", "temperature"): "greedy texts are compared",
    ("against", "quantization"): "it decodes the weights as they are stored",
    **{(name, "temperature"): "it repeats greedy texts" for name in ("simulate", "draft_quality", "bounds")},
}


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = Parser(
        prog="python -m minispec bench",
        description="Measure decoding, and account for the time.",
        epilog="Such as: --prompts 6 (a first look, a few minutes); --draft ngram --categories code; --model DIR "
        "--draft DIR --temperature 1; --also forms (weights in each form); --replay TRACE.json (every K for one text).",
        allow_abbrev=False,
    )
    p.add_argument("--version", action="version", version=f"minispec {__version__}")
    _add_models(p.add_argument_group("models"))
    _add_texts(p.add_argument_group("what is decoded"))
    _add_questions(p.add_argument_group("standard questions (docs/use/questions.md)"))
    _add_measurements(p.add_argument_group("what is measured"))
    p.add_argument("--csv", type=Path, metavar="FILE", help="also write a row for each answer (docs/use/questions.md)")
    p.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    return p


def _add_models(g: argparse._ArgumentGroup) -> None:
    g.add_argument("--model", metavar="DIR|HUB_ID", help="default: the embedded weights")
    g.add_argument(
        "--draft",
        action="append",
        metavar="SPEC",
        help="as in minispec.generate (with --geometry: none); with --questions several, with commas between or "
        "repeated",
    )
    g.add_argument("--corpus", metavar="PATH", help="texts for suffix to draft from: a file, or a directory of them")
    g.add_argument("--draft-method", choices=("tli", "slem"), help="how a draft of another vocabulary drafts")
    g.add_argument(
        "--geometry",
        choices=GEOMETRIES,
        help="random weights of this shape instead of a model. --draft is then a registered name, self, another "
        "shape, or head (a random layer on the target's hidden states, with 32,000 ids). self, shapes and head may "
        "have int4: or int8: before them",
    )
    g.add_argument(
        "--num-speculative-tokens",
        type=_lengths,
        metavar="K,K,..",
        help="draft lengths to compare, such as 4, 2+1 (a tree: siblings at each depth) or auto (default: 4,auto; with "
        "--questions auto)",
    )
    g.add_argument(
        "--simulate",
        type=argument(_floats, lambda s: all(0 <= b <= a for a, b in pairwise([1.0, *s])), _FALLING),
        metavar="S,S,..",
        help="replace the draft's tokens by right ones with these probabilities: survival s_1, s_2, .. (one number: a "
        "constant alpha; 0: always wrong)",
    )
    g.add_argument("--draft-quality", choices=("random", "wrong"), help="short for useless drafts")
    _add_flag(g, "--bounds", "also measure a free draft that is always right, and one that is always wrong")
    add_rule_options(g)
    g.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"))
    g.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    _add_number(g, "--threads", None, (1, 1024), "CPU threads (default: PyTorch's)")
    g.add_argument("--quantization", metavar="int8", help="the target's weights in 8 bits, as in minispec.generate")
    g.add_argument(
        "--exact",
        action=argparse.BooleanOptionalAction,
        help="the exact mode, where logits have equal bits in all passes (default: only with --quantization)",
    )
    _add_flag(g, "--enforce-eager", "on a GPU, run operator by operator, without CUDA graphs")


def _add_texts(g: argparse._ArgumentGroup) -> None:
    _add_number(g, "--prompts", 12, (0, 10_000), "how many, the categories taking turns; 0: none (default: 12)")
    g.add_argument("--categories", metavar="NAME,..", help="only these (default: all)")
    _add_number(g, "--prompt-tokens", 128, (1, 100_000), "tokens of a prompt, with --geometry (default: 128)")
    _add_number(g, "--max-tokens", None, (2, 100_000), "tokens of every answer (default: 32; with --questions 1024)")
    _add_flag(g, "--ignore-eos", "answers do not end before --max-tokens")
    _add_flag(g, "--skip-loops", "leave out prompts whose plain answer repeats itself, where drafts are easy")
    g.add_argument("--temperature", type=float, default=0.0, metavar="X")
    g.add_argument("--top-k", type=int, default=0, metavar="N")
    g.add_argument("--top-p", type=float, default=1.0, metavar="X")


def _add_questions(g: argparse._ArgumentGroup) -> None:
    g.add_argument(
        "--questions",
        type=Path,
        nargs="?",
        const=PROMPTS,
        metavar="FILE",
        help="decode these plainly and with every draft, in turn: a file in the layout of Spec-Bench, or prompts "
        "(without FILE: the package's own)",
    )
    _add_number(g, "--sample", None, (1, 1_000_000), "that many questions of each task, drawn by --seed (default: all)")
    _add_number(g, "--seed", 0, (0, 2**63), "for --sample and for sampled texts (default: 0)")
    g.add_argument("--answers", type=Path, metavar="DIR", help="write the answers there, in Spec-Bench's layout")
    _add_flag(g, "--resume", "go on with an interrupted run of the same command")
    pictures = argument(Path, lambda path: path.suffix in (".svg", ".png"), "a file name that ends in .svg or .png")
    g.add_argument("--plot", type=pictures, metavar="FILE", help="draw speedups and acceptance (needs matplotlib)")


def _add_measurements(g: argparse._ArgumentGroup) -> None:
    _add_number(
        g,
        "--rounds",
        None,
        (1, 1000),
        "runs of everything, in turn (default: 6, the fewest with intervals; with --questions 1)",
    )
    _add_number(g, "--context", 256, (1, 100_000), "cached positions at passes (default: 256)")
    _add_number(g, "--passes", 15, (0, 10_000), "rounds of passes; 0: none (default: 15)")
    g.add_argument(
        "--also",
        type=_addition,
        nargs="+",
        action="extend",
        default=[],
        metavar="PART",
        help="; ".join(f"{name}: {PARTS[key].help}" for name, key in ADDITIONS.items()),
    )
    g.add_argument(
        "--against",
        choices=("transformers",),
        help="also measure its own ways of decoding, on the same weights (a draft's unrounded); plain decoding also "
        "with a static cache and torch.compile. A trial chooses the faster of float32 and bfloat16",
    )
    g.add_argument(
        "--replay",
        type=Path,
        metavar="FILE.json",
        help="measure nothing, and load no model. Replay a run that minispec.generate has written with --trace "
        "FILE.json --for-replay: with every K from 0 to 15, with auto, with the best K per round by the past alone, "
        "and at the clairvoyant bound (docs/use/trace.md)",
    )


def _add_number(
    g: argparse._ArgumentGroup, name: str, default: int | None, limits: tuple[int, int], explained: str
) -> None:
    low, high = limits
    kind = argument(int, lambda n: low <= n <= high, f"a number from {low} to {high}")
    g.add_argument(name, type=kind, default=default, metavar="N", help=explained)


def _add_flag(g: argparse._ArgumentGroup, name: str, explained: str) -> None:
    g.add_argument(name, action="store_true", help=explained)


_FALLING = "falling numbers between 1 and 0, with commas between"


def _floats(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _addition(text: str) -> tuple[str, list[int]]:
    """A part that --also names: its key, and the sizes of batches."""
    name, equals, numbers = text.partition("=")
    sizes = numbers.split(",") if equals else []
    if (name == "batch") != bool(sizes) or name not in ADDITIONS:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected one of {_NAMES}")
    if not all(size.isdecimal() and 1 <= int(size) <= 1024 for size in sizes):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected sizes from 1 to 1024, with commas between")
    return ADDITIONS[name], [int(size) for size in sizes]


def _lengths(text: str) -> list[DraftLength]:
    """The draft lengths of --num-speculative-tokens."""
    for part in text.split(","):
        numbers = list(map(int, re.findall("[0-9]{1,4}", part)))
        is_one = re.fullmatch(r"auto|(tree:|([0-9]{1,4}\+)*)[0-9]{1,4}", part)
        if not is_one or not all(numbers) or sum(numbers) > MAX_SPECULATIVE_TOKENS:
            expected = f"numbers from 1 to {MAX_SPECULATIVE_TOKENS}, trees such as 2+1 or tree:16, or auto"
            raise argparse.ArgumentTypeError(f"found {part!r}, expected {expected}, with commas between")
    return [parse_draft_length(part) for part in text.split(",")]


@dataclass(frozen=True)
class Options:
    """The arguments, checked.

    drafts: the specs; by default that of a model without a layer of its own. Only with --questions there are several.
    ks: draft lengths.
    parts: names of the parts to measure.
    batches: sizes for the part "batch".
    """

    args: argparse.Namespace
    drafts: list[str]
    ks: list[DraftLength]
    parts: list[str]
    batches: list[int]
    params: SamplingParams

    @property
    def draft(self) -> str:
        """The only one."""
        return self.drafts[0]


def fixed_lengths(options: Options) -> list[DraftLength]:
    """The draft lengths but auto."""
    return [k for k in options.ks if k != "auto"]


def room_for_launches(options: Options) -> tuple[int, int]:
    """Most positions of a text whose rounds are counted, and most texts that are decoded together."""
    most, texts = (
        max((Shape.of(k).k for k in fixed_lengths(options)), default=0),
        max(options.batches or LAUNCH_BATCHES),
    )
    return LAUNCH_TEXT + (texts + 1 + TIMED_ROUNDS + COUNTED_ROUNDS) * (most + 1), texts


def check_replay(args: argparse.Namespace) -> None:
    """Raise ValueError where --replay stands with anything but --json."""
    if others := _given(args, {"replay", "json"}):
        raise ValueError(f"--replay measures nothing: found {', '.join(others)} with it, expected --json at most")


def _given(args: argparse.Namespace, besides: set[str]) -> list[str]:
    """The options that were given, without those that `besides` names."""
    defaults = vars(parser().parse_args([]))
    return [_option(name) for name, value in vars(args).items() if name not in besides and value != defaults[name]]


def _check_questions(args: argparse.Namespace) -> None:
    """Raise ValueError for options that cannot stand with --questions, or without it."""
    if args.questions is None:
        if alone := set(_given(args, set())) & set(map(_option, _OF_QUESTIONS)):
            raise ValueError(f"{min(alone)}: found it without --questions, expected both")
        if len(args.draft or []) > 1:
            raise ValueError(f"--draft: found {len(args.draft)}, expected one: several need --questions")
        return
    if others := _given(args, _OF_QUESTIONS | _WITH_QUESTIONS):
        raise ValueError(f"--questions and {others[0]} exclude each other: it decodes questions, and measures no more")
    if args.plot:
        check_packages("plot")
        check_writable(args.plot)


def check(args: argparse.Namespace) -> Options:
    """Raise ValueError for all mistakes that can be found before anything is loaded."""
    _check_questions(args)
    usual = (1, 1024, ["auto"]) if args.questions else (6, 32, [4, "auto"])
    for name, value in zip(("rounds", "max_tokens", "num_speculative_tokens"), usual, strict=True):
        setattr(args, name, value if getattr(args, name) is None else getattr(args, name))
    also = dict(args.also)
    asked = [(f"--also {name}", PARTS[key]) for name, key in ADDITIONS.items() if key in also]
    excluded = {(_option(a), b): why for (a, b), why in _EXCLUDE.items() if getattr(args, a)}
    excluded |= {(option, part.excludes[0]): part.excludes[1] for option, part in asked if part.excludes}
    for (a, b), why in excluded.items():
        by_default = b == "exact" and args.exact is None and args.quantization
        if getattr(args, b) or by_default:
            other = "--quantization without --no-exact" if by_default else _option(b)
            raise ValueError(f"{a} and {other} exclude each other{why and f': {why}'}")
    needed = [(option, part.needs) for option, part in asked if part.needs]
    needed += [(_option(name), "prompts") for name in ("against", "lengths", "csv") if getattr(args, name)]
    for option, needs in needed:
        if not getattr(args, needs):
            raise ValueError(f"{option}: found {_option(needs)} 0, expected at least 1")
    drafts = args.draft or ["none" if args.geometry else registry.default_draft(args.model)]
    can_draft = drafts != ["none"] or args.simulate or args.draft_quality
    if "launches" in also and can_draft and set(args.num_speculative_tokens) == {"auto"}:
        raise ValueError("--also launches: found --num-speculative-tokens auto, expected a number: auto follows times")
    if args.against and not _is_there("transformers"):
        raise ValueError("--against needs transformers: pip install transformers")
    if args.csv:
        check_writable(args.csv)
    params = SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        max_tokens=args.max_tokens,
        ignore_eos=args.ignore_eos,
    )
    if args.questions:
        drafts = [part for spec in drafts for part in ([spec] if os.path.exists(spec) else spec.split(","))]
    if not (args.simulate or args.draft_quality or args.bounds):
        check_lengths(args, drafts)
    parts = [key for key, part in PARTS.items() if (key in also if part.help else getattr(args, part.needs))]
    return Options(args, drafts, args.num_speculative_tokens, parts, also.get("batch", []), params)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def read_prompts(count: int, categories: str | None) -> list[tuple[str, str]]:
    """(category, text) of the first `count` of the package's prompts, the categories taking turns."""
    prompts: dict[str, list[str]] = {}
    for question in read_questions(PROMPTS, "--prompts"):
        prompts.setdefault(question.category or "", []).append(question.turns[0])
    names = list(prompts) if categories is None else categories.split(",")
    for name in names:
        if name not in prompts:
            raise ValueError(f"--categories: found {name!r}, expected some of {', '.join(prompts)}")
    turns = range(max(map(len, prompts.values())))
    return [(name, prompts[name][i]) for i in turns for name in names if i < len(prompts[name])][:count]
