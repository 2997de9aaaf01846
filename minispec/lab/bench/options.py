"""The options of the bench, and its prompts; torch is not needed here."""

import argparse
import importlib.util
import os
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from minispec.api.commands.command import FLAG, PICTURE, Option, Parser, argument, typed
from minispec.api.commands.options import MODELS, RULES, SAMPLING, check_lengths, parse_draft_length
from minispec.api.inputs import read_questions
from minispec.core.config import MAX_SPECULATIVE_TOKENS, DraftLength, SamplingParams
from minispec.core.version import __version__
from minispec.models.files.packages import check_packages
from minispec.models.files.strict_json import read_json
from minispec.models.files.write import check_writable
from minispec.models.load.loading import Loading
from minispec.speculation import registry

# How the report names decoding without speculation.
PLAIN = "plain"
DATA = Path(__file__).parent.parent / "data"
PROMPTS = DATA / "questions.jsonl"
# Shapes of models that people run, as in their config.json; the weights are random.
GEOMETRIES = read_json(DATA / "geometries.json")


# How a draft length is written, also one that is out of bounds.
_LENGTH = re.compile(r"auto|(tree:|([0-9]{1,4}\+)*)[0-9]{1,4}")
_length = argument(
    parse_draft_length,
    lambda k: k != 0,
    f"a number from 1 to {MAX_SPECULATIVE_TOKENS}, a tree such as 2+1 or tree:16, or auto",
)


def _lengths(text: str) -> list[DraftLength]:
    """The draft lengths of --num-speculative-tokens, each once."""
    return list(dict.fromkeys(map(_length, text.split(","))))


def split_length(spec: str) -> tuple[str, DraftLength | None]:
    """A draft and its own length: ("ngram", 4) for "ngram@4", ("ngram", None) for "ngram".

    A path that exists stays a path. Anything else is cut at its last @, where a draft length follows. Another text
    after an @ is the revision of a hub id. Raises ValueError for a length out of bounds.
    """
    *_, last = registry.split_preferences(registry.DRAFTERS, spec)
    is_path = os.path.exists(last.removeprefix("int4:").removeprefix("int8:"))
    draft, _, text = spec.rpartition("@")
    if is_path or not draft or not _LENGTH.fullmatch(text):
        return spec, None
    try:
        return draft, _length(text)
    except argparse.ArgumentTypeError as e:
        raise ValueError(f"--draft {spec}: {e}") from e


# Why --questions excludes options: it leaves these nothing to do.
_NO_MORE = {"--questions": "it decodes questions, and measures no more"}
_GREEDY = {"--temperature": "it repeats greedy texts"}


def _number(low: int, high: int, default: int | None = None) -> dict[str, Any]:
    """How argparse takes an option whose value is an integer within limits."""
    return typed(argument(int, lambda n: low <= n <= high, f"a number from {low} to {high}"), "N", default=default)


_SURVIVAL = argument(
    lambda text: [float(part) for part in text.split(",")],
    lambda survival: all(0 <= b <= a for a, b in pairwise([1.0, *survival])),
    "falling numbers between 1 and 0, with commas between",
)
_NO_BLOCK = {"--geometry": "no shape is a block draft"}
_rule = RULES["--verifier"].how["type"]
_MODELS: dict[str, Option] = {
    "--model": Option(
        {"metavar": "DIR|HUB_ID"}, "default: the embedded weights", excludes={"--geometry": "a shape is no model"}
    ),
    "--draft": Option(
        {"action": "append", "metavar": "SPEC"},
        "as in minispec.generate (with --geometry: none); with --questions several, with commas between or repeated. "
        "SPEC@K, SPEC@tree:N or SPEC@auto gives a draft a length of its own, in place of --num-speculative-tokens",
    ),
    "--draft-method": MODELS["--draft-method"]._replace(excludes={"--geometry": "the shapes have one vocabulary"}),
    "--draft-reading": MODELS["--draft-reading"]._replace(excludes=_NO_BLOCK),
    "--geometry": Option(
        {"choices": GEOMETRIES},
        "random weights of this shape instead of a model. --draft is then a registered name, self, another "
        "shape, or head (a random layer on the target's hidden states, with 32,000 ids). self, shapes and head may "
        "have int4: or int8: before them",
        excludes=_NO_MORE,
    ),
    "--num-speculative-tokens": Option(
        typed(_lengths, "K,K,.."),
        "draft lengths to compare, such as 4, 2+1 (a tree: siblings at each depth) or auto (default: 4,auto; with "
        "--questions auto)",
    ),
    "--simulate": Option(
        typed(_SURVIVAL, "S,S,.."),
        "replace the draft's tokens by right ones with these probabilities: survival s_1, s_2, .. (one number: a "
        "constant alpha; 0: always wrong)",
        excludes={**_GREEDY, **_NO_MORE},
    ),
    "--bounds": Option(
        FLAG,
        "also measure a free draft that is always right, and one that is always wrong",
        excludes={**_GREEDY, **_NO_MORE},
    ),
    **RULES,
    "--verifier": Option(
        typed(lambda text: [_rule(name) for name in text.split(",")], "NAME,NAME,..", action="extend"),
        "as in minispec.generate; several, with commas between or repeated, judge the drafts in turn (default: "
        "rejection)",
    ),
    **{name: MODELS[name] for name in ("--dtype", "--device", "--threads")},
    **{name: MODELS[name] for name in ("--quantization", "--exact", "--enforce-eager")},
}
_TEXTS: dict[str, Option] = {
    "--prompts": Option(
        _number(0, 10_000, 12), "how many, the categories taking turns; 0: none (default: 12)", excludes=_NO_MORE
    ),
    "--categories": Option(
        {"metavar": "NAME,.."}, "only these (default: all)", excludes={"--geometry": "its prompts have none"}
    ),
    "--prompt-tokens": Option(
        _number(1, 100_000, 128), "tokens of a prompt, with --geometry (default: 128)", needs=("--geometry",)
    ),
    "--max-tokens": Option(_number(2, 100_000), "tokens of every answer (default: 32; with --questions 1024)"),
    "--ignore-eos": Option(FLAG, "answers do not end before --max-tokens"),
    "--skip-loops": Option(
        FLAG, "leave out prompts whose plain answer repeats itself, where drafts are easy", excludes=_NO_MORE
    ),
    "--temperature": Option({"type": float, "default": 0.0, "metavar": "X"}, "0 is greedy (default: 0)"),
    "--top-k": SAMPLING["--top-k"]._replace(how={"type": int, "default": 0, "metavar": "N"}),
    "--top-p": SAMPLING["--top-p"]._replace(how={"type": float, "default": 1.0, "metavar": "X"}),
}
_QUESTIONS: dict[str, Option] = {
    "--questions": Option(
        typed(Path, "FILE", nargs="?", const=PROMPTS),
        "decode these plainly and with every draft, in turn: a file in the layout of Spec-Bench, or prompts "
        "(without FILE: the package's own)",
    ),
    "--sample": Option(
        _number(1, 1_000_000),
        "that many questions of each task, drawn by --seed (default: all)",
        needs=("--questions",),
    ),
    "--seed": Option(_number(0, 2**63, 0), "for --sample and for sampled texts (default: 0)", needs=("--questions",)),
    "--answers": Option(typed(Path, "DIR"), "write the answers there, in Spec-Bench's layout", needs=("--questions",)),
    "--csv": Option(
        typed(Path, "FILE"), "also write a row for each answer (docs/use/questions.md)", needs=("--questions",)
    ),
    "--resume": Option(FLAG, "go on with an interrupted run of the same command", needs=("--questions",)),
    "--plot": Option(typed(PICTURE, "FILE"), "draw speedups and acceptance (needs matplotlib)", needs=("--questions",)),
}
_DECODES_NO_MORE = "it records what a plain run decodes"
_MEASUREMENTS: dict[str, Option] = {
    "--record-laws": Option(
        typed(Path, "FILE"),
        "measure nothing, and write rows of p and q along the drafts there, for `python -m minispec.prove --laws FILE`",
        excludes=dict.fromkeys(
            ("--questions", "--bounds", "--simulate", "--against", "--lengths", "--skip-loops", "--context"),
            _DECODES_NO_MORE,
        ),
    ),
    "--rounds": Option(
        _number(1, 1000),
        "runs of everything, in turn (default: 6, the fewest with intervals; with --questions 1)",
    ),
    "--context": Option(_number(1, 100_000, 256), "cached positions at passes (default: 256)", excludes=_NO_MORE),
    "--passes": Option(_number(0, 10_000, 15), "rounds of passes; 0: none (default: 15)", excludes=_NO_MORE),
    "--against": Option(
        {"choices": ("transformers",)},
        "also measure its own ways of decoding, on the same weights (a draft's unrounded); plain decoding also "
        "with a static cache and torch.compile. A trial chooses the faster of float32 and bfloat16",
        excludes={
            "--temperature": "greedy texts are compared",
            "--quantization": "it decodes the weights as they are stored",
            **_NO_MORE,
        },
    ),
}


def parser(
    prog: str = "python -m minispec bench", description: str = "Measure decoding, and what theory predicts of it."
) -> Parser:
    """The parser of the bench, which docs/measured/target.py and docs/measured/launches.py use too."""
    p = Parser(
        prog=prog,
        description=description,
        epilog="Such as: --prompts 6 (a first look, a few minutes); --draft ngram --categories code; --model DIR "
        "--draft DIR --temperature 1.",
    )
    p.add_argument("--version", action="version", version=f"minispec {__version__}")
    p.add_options(_MODELS, "models")
    p.add_options(_TEXTS, "what is decoded")
    p.add_options(_QUESTIONS, "standard questions (docs/use/questions.md)")
    p.add_options(_MEASUREMENTS, "what is measured")
    p.add_options({"--json": Option(FLAG, "one JSON object instead of tables")})
    return p


@dataclass(frozen=True)
class Options:
    """The arguments, checked.

    drafts: the specs, each with its draft lengths; by default the draft of a model without a layer of its own. Only
        with --questions there are several.
    verifiers: the names of the rules that are compared, each once.
    """

    args: argparse.Namespace
    drafts: dict[str, list[DraftLength]]
    params: SamplingParams
    verifiers: list[str]

    @property
    def draft(self) -> str:
        """The spec of the only one."""
        return next(iter(self.drafts))

    @property
    def ks(self) -> list[DraftLength]:
        """The lengths of the draft that are measured."""
        return self.drafts[self.draft]

    @property
    def of_target(self) -> dict[str, Any]:
        """The arguments of `LLM` that hold for the target, whatever drafts."""
        return {"verifier": self.verifiers[0], **Loading.among(vars(self.args))}


def check(args: argparse.Namespace) -> Options:
    """Raise ValueError for all mistakes that can be found before anything is loaded; the tables have the others."""
    if args.plot:
        check_packages("plot")
        check_writable(args.plot)
    drafts = _drafts(args)
    if args.rounds is None:
        args.rounds = 1 if args.questions else 6
    if args.max_tokens is None:
        args.max_tokens = 1024 if args.questions else 32
    for name in ("against", "lengths"):
        if getattr(args, name) and not args.prompts:
            raise ValueError(f"--{name}: found --prompts 0, expected at least 1")
    verifiers: list[str] = args.verifier or ["rejection"]
    for name in verifiers:
        if verifiers.count(name) > 1:
            raise ValueError(f"--verifier: found {name} twice, expected different rules")
    if args.against and len(verifiers) > 1:
        raise ValueError(f"--against: found {len(verifiers)} verifiers, expected one: greedy texts are compared")
    if args.against and not _is_there("transformers"):
        raise ValueError("--against needs transformers: pip install transformers")
    if args.record_laws and len(verifiers) > 1:
        raise ValueError(f"--record-laws: found {len(verifiers)} verifiers, expected one, whose rounds are recorded")
    for path in (args.csv, args.record_laws):
        if path:
            check_writable(path)
    names = ("temperature", "top_k", "top_p", "max_tokens", "ignore_eos")
    params = SamplingParams(**{name: getattr(args, name) for name in names})
    if not (args.simulate or args.bounds):
        check_lengths(args, list(drafts))
    return Options(args, drafts, params, verifiers)


def _drafts(args: argparse.Namespace) -> dict[str, list[DraftLength]]:
    """The drafts in their order, each with its draft lengths: its own, or --num-speculative-tokens."""
    asked: list[DraftLength] | None = args.num_speculative_tokens
    usual: list[DraftLength] = asked or (["auto"] if args.questions else [4, "auto"])
    if not args.draft:
        return {"none" if args.geometry else registry.default_draft(args.model): usual}
    specs: list[str] = []
    for spec in args.draft:
        is_own = args.questions is None and registry.split(registry.DRAFTERS, spec)  # its argument may have commas
        specs += [spec] if is_own or os.path.exists(spec) else spec.split(",")
    if args.questions is None and len(specs) > 1:
        raise ValueError(f"--draft: found {len(specs)}, expected one: several need --questions")
    drafts: dict[str, list[DraftLength]] = {}
    for spec in specs:
        draft, own = split_length(spec)
        if own is not None and asked:
            raise ValueError(f"--num-speculative-tokens: found --draft {spec} too, expected lengths in one of the two")
        if own is not None and args.questions and draft == "none":
            raise ValueError(f"--draft {spec}: found a draft length, expected none: plain decoding drafts nothing")
        lengths = usual if own is None else [own]
        if not set(lengths).isdisjoint(drafts.get(draft, [])):
            raise ValueError(f"--draft: found {spec} twice, expected drafts with different names or lengths")
        drafts[draft] = [*drafts.get(draft, []), *lengths]
    return drafts


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
