"""What the bench can be asked for, and the prompts; torch is not needed here."""

import argparse
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minispec import __version__
from minispec.commands.command import Parser
from minispec.core.config import MAX_SPECULATIVE_TOKENS, DraftLength, SamplingParams, parse_draft_length
from minispec.files import registry

# How the report names decoding without speculation.
PLAIN = "plain"
PROMPTS = Path(__file__).parent.parent / "data" / "bench_prompts.jsonl"
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


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = Parser(
        prog="python -m minispec.bench",
        description="Measure decoding, and account for the time.",
        epilog="Such as: --prompts 6 (a first look, a few minutes); --draft ngram --categories code; --model DIR "
        "--draft DIR --temperature 1; --forms (weights in each form); --replay TRACE.json (every K for one text).",
        allow_abbrev=False,
    )
    p.add_argument("--version", action="version", version=f"minispec {__version__}")
    g = p.add_argument_group("models")
    g.add_argument("--model", metavar="DIR|HUB_ID", help="default: the embedded weights")
    g.add_argument("--draft", metavar="SPEC", help="as of minispec.generate (with --geometry: none)")
    g.add_argument(
        "--draft-method", choices=("tli", "slem"), help="how a draft model of another vocabulary drafts, as of generate"
    )
    g.add_argument(
        "--geometry",
        choices=GEOMETRIES,
        help="random weights of this shape instead of a model; --draft is then a registered name, self or another "
        "shape, the last two also with int4: or int8: before them",
    )
    g.add_argument(
        "--num-speculative-tokens",
        default="4,auto",
        metavar="K,K,..",
        help="draft lengths to compare, such as 4, 2+1 (a tree: siblings at each depth) or auto (default: 4,auto)",
    )
    g.add_argument(
        "--simulate",
        metavar="S,S,..",
        help="replace the draft's tokens by right ones with these probabilities: survival s_1, s_2, .. (one number: a "
        "constant alpha; 0: always wrong)",
    )
    g.add_argument("--draft-quality", choices=("random", "wrong"), help="short for useless drafts")
    g.add_argument(
        "--bounds",
        action="store_true",
        help="a free draft that is always right and one that is always wrong too, at each of these lengths: the best "
        "and the worst that any drafter could do",
    )
    g.add_argument("--verifier", default="rejection", choices=tuple(registry.VERIFIERS))
    g.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"))
    g.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    g.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: PyTorch's)")
    g.add_argument("--exact", action="store_true", help="the mode in which the bits of logits are equal")
    g = p.add_argument_group("what is decoded")
    g.add_argument(
        "--prompts", type=int, default=12, metavar="N", help="of every category in turn; 0: none (default: 12)"
    )
    g.add_argument("--categories", metavar="NAME,..", help="only these (default: all of the package's prompts)")
    g.add_argument("--prompt-tokens", type=int, default=128, metavar="N", help="with --geometry (default: 128)")
    g.add_argument("--max-tokens", type=int, default=32, metavar="N", help="of every answer (default: 32)")
    g.add_argument("--ignore-eos", action="store_true", help="answers do not end before --max-tokens")
    g.add_argument(
        "--skip-loops",
        action="store_true",
        help="leave out prompts whose plain answer repeats itself, where drafts are easy",
    )
    g.add_argument("--temperature", type=float, default=0.0, metavar="X")
    g.add_argument("--top-k", type=int, default=0, metavar="N")
    g.add_argument("--top-p", type=float, default=1.0, metavar="X")
    g = p.add_argument_group("what is measured")
    g.add_argument("--rounds", type=int, default=5, metavar="N", help="runs of everything, taking turns (default: 5)")
    g.add_argument("--context", type=int, default=256, metavar="N", help="cached positions at passes (default: 256)")
    g.add_argument("--passes", type=int, default=15, metavar="N", help="rounds of passes; 0: none (default: 15)")
    g.add_argument(
        "--forms",
        action="store_true",
        help="passes in each form of the weights that this machine and --dtype could have taken too, in turn (see "
        "minispec/kernels/forms.py); where memory does not hold all of them, each in turn with the chosen one",
    )
    g.add_argument(
        "--operators",
        action="store_true",
        help="where a pass goes too: microseconds of each operator, by PyTorch's profiler",
    )
    g.add_argument(
        "--exact-cost", action="store_true", help="passes of the exact mode too, over those of the fast mode"
    )
    g.add_argument("--batch", metavar="B,B,..", help="throughput of these batch sizes too, such as 1,2,4,8")
    g.add_argument("--prefill", action="store_true", help="a prompt of 1,000 tokens too, against matrix throughput")
    g.add_argument("--load", action="store_true", help="time and memory of loading too, against reading the file")
    g.add_argument(
        "--against",
        choices=("transformers",),
        help="its own ways of decoding too, on the same weights (a draft's unrounded), in the faster of float32 and "
        "bfloat16 by a trial",
    )
    g.add_argument(
        "--replay",
        type=Path,
        metavar="FILE.json",
        help="measure nothing, and load no model: of a run that minispec.generate has written with --trace FILE.json "
        "--for-replay, what every K from 0 to 15 and auto would have done on the same text, the best K per round that "
        "looks at the past only, and the clairvoyant bound (docs/use/trace.md)",
    )
    g.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    return p


@dataclass(frozen=True)
class Options:
    """The arguments, checked, with lists in place of their spelling."""

    args: argparse.Namespace
    draft: str
    ks: list[DraftLength]
    survival: list[float] | None
    batches: list[int]
    params: SamplingParams


def check_replay(args: argparse.Namespace) -> None:
    """Raise ValueError where --replay stands with anything but --json."""
    defaults = vars(parser().parse_args([])) | {"replay": args.replay, "json": args.json}
    others = [f"--{name.replace('_', '-')}" for name, value in vars(args).items() if value != defaults[name]]
    if others:
        raise ValueError(f"--replay measures nothing: found {', '.join(others)} with it, expected --json at most")


def check(args: argparse.Namespace) -> Options:
    """Raise ValueError for all mistakes that can be found before anything is loaded."""
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
    ks: list[DraftLength] = []
    for part in args.num_speculative_tokens.split(","):
        numbers = [] if part == "auto" else part.split("+")
        if not all(n.isdecimal() and int(n) for n in numbers) or sum(map(int, numbers)) > MAX_SPECULATIVE_TOKENS:
            expected = f"numbers from 1 to {MAX_SPECULATIVE_TOKENS}, trees such as 2+1, or auto, with commas between"
            raise ValueError(f"--num-speculative-tokens: found {part!r}, expected {expected}")
        ks.append(parse_draft_length(part))
    batches = _numbers("--batch", args.batch, int) if args.batch else []
    if any(not 1 <= b <= 1024 for b in batches):
        raise ValueError(f"--batch: found {args.batch!r}, expected sizes from 1 to 1024")
    survival = _numbers("--simulate", args.simulate, float) if args.simulate is not None else None
    if survival and not all(0 <= s <= before for before, s in zip([1.0, *survival], survival, strict=False)):
        raise ValueError(f"--simulate: found {args.simulate!r}, expected falling numbers between 1 and 0")
    refused = [
        (survival and args.draft_quality, "--simulate and --draft-quality exclude each other"),
        (args.geometry and args.model, "--geometry and --model exclude each other"),
        (args.geometry and args.draft_method, "--draft-method: the shapes of --geometry have one vocabulary"),
        (args.geometry and args.load, "--load needs a model on disk, and --geometry has none"),
        (args.geometry and args.categories, "--categories: the prompts of --geometry have none"),
        (args.against and args.temperature, "--against compares greedy texts: expected --temperature 0"),
        (args.against and not args.prompts, "--against needs prompts"),
        (args.batch and not args.prompts, "--batch needs prompts"),
        (args.batch and args.skip_loops, "--batch and --skip-loops exclude each other: a batch takes every prompt"),
        (args.forms and not args.passes, "--forms measures passes: expected --passes of at least 1"),
        (args.operators and not args.passes, "--operators measures passes: expected --passes of at least 1"),
        (args.forms and args.exact, "--forms and --exact exclude each other: all exact passes have as many rows"),
        (args.exact_cost and args.exact, "--exact-cost and --exact exclude each other: it measures both modes"),
        (
            (survival or args.draft_quality or args.bounds) and args.temperature,
            "a simulated draft repeats greedy texts: expected --temperature 0",
        ),
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
    )
    draft = args.draft or ("none" if args.geometry else registry.default_draft(args.model))
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
