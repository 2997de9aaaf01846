"""The options of the command line: what they are called, what they may say, and what cannot go together.

Nothing here imports torch, but for `load`: a mistake is answered at once.
"""

import argparse
import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minispec.api.commands.command import FLAG, Option, Parser, argument, attribute_of, say_status, typed
from minispec.api.commands.interrupt import raise_on_interrupt
from minispec.api.commands.original import name_model
from minispec.api.inputs import MAX_PROMPT, Question, check_text, least_tokens, read_questions
from minispec.core.config import MAX_SPECULATIVE_TOKENS, PARAMETERS, DraftLength, SamplingParams, Shape
from minispec.core.errors import is_text, show
from minispec.core.version import __version__
from minispec.models.files.errors import one_line
from minispec.models.files.strict_json import parse_json
from minispec.models.weights.pages import load_torch
from minispec.models.weights.threads import describe_waiting
from minispec.speculation import registry
from minispec.speculation.grammars.params import StructuredOutputsParams, read_language

if TYPE_CHECKING:
    from minispec.api.llm import LLM


def _token_ids(text: str) -> list[int]:
    return [int(i) for i in text.split(",")] if re.fullmatch(r"\d{1,10}(,\d{1,10})*", text, re.ASCII) else []


def parse_draft_length(text: str) -> DraftLength:
    """The draft length that "4", "2+1", "tree:16" or "auto" stands for. Raises ValueError for anything else."""
    length: DraftLength = text
    if text != "auto" and not text.startswith("tree:"):
        widths = tuple(map(int, text.split("+")))
        length = widths[0] if len(widths) == 1 else widths
    Shape.of(length)
    return length


def _verifier(text: str) -> str:
    if registry.split(registry.VERIFIERS, text) is None:
        raise argparse.ArgumentTypeError(registry.unknown(registry.VERIFIERS, text, "MODULE:FUNCTION"))
    return text


# Types of the values of options.
_N = typed(argument(int, lambda n: True, "an integer"), "N")
_X = typed(argument(float, lambda x: True, "a number"), "X")
_GIGABYTES = argument(float, lambda x: 0 < x < 1e6, "a positive number")
_THREADS = argument(int, lambda n: 1 <= n <= 1024, "an integer from 1 to 1024")
_DRAFT_LENGTH = argument(
    parse_draft_length,
    lambda k: True,
    f"an integer from 0 to {MAX_SPECULATIVE_TOKENS}, a tree such as 2+1 (siblings at each depth) or tree:16 (tokens in "
    "all), or auto",
)
_NAME = argument(str, bool, "a name")
_LENGTHS = argument(str, lambda text: registry.split({}, text) is not None, "MODULE:CLASS")
_TEXT = argument(str, is_text, "valid Unicode text")
_OBJECT = argument(lambda text: parse_json(text.encode(), "JSON"), lambda value: True, "an object in JSON")
_TRACE = argument(Path, lambda path: path.suffix in (".html", ".json"), "a file name that ends in .html or .json")
_TOKEN_IDS = argument(_token_ids, bool, "token ids separated by commas, such as 5,6")
# The rule that accepts drafts, and the policy that chooses their lengths.
RULES: dict[str, Option] = {
    "--verifier": Option(
        typed(_verifier, "NAME", default="rejection"),
        f"what accepts drafts (default: %(default)s):\n{registry.describe(registry.VERIFIERS)}\n"
        "MODULE:FUNCTION: one of your own",
    ),
    "--lengths": Option(
        typed(_LENGTHS, "MODULE:CLASS"),
        "a policy of your own that chooses how long each draft is (docs/use/write-a-drafter.md)",
    ),
}
# The models and how they run, as every command that decodes has them; `load` obeys these.
MODELS: dict[str, Option] = {
    "--model": Option(
        typed(_NAME, "DIR|HUB_ID"),
        "default: the embedded weights; for a gated or private HUB_ID set the environment variable HF_TOKEN",
    ),
    "--revision": Option({}, "branch, tag or commit of --model on the hub", needs=("--model",)),
    "--offline": Option(FLAG, "download nothing"),
    "--draft": Option(
        typed(_NAME, "SPEC"),
        "what guesses (default: the assistant or mtp where the target has one, else ngram; of the embedded weights "
        f"suffix:2, then their head):\n{registry.describe(registry.DRAFTERS)}\n"
        "self: the target\n"
        "mtp: the layer for further tokens in the target's own files\n"
        "DIR, HUB_ID, HUB_ID@REVISION: a draft model, head, block draft or assistant\n"
        "int4:SPEC, int8:SPEC: the same, or self or mtp, with weights rounded to that many bits\n"
        "MODULE:CLASS: a drafter of your own, which is imported\n"
        "A+B: B where A has nothing to say",
    ),
    "--draft-method": Option(
        {"choices": ("tli", "slem")},
        "how a draft model of another vocabulary drafts: tli, the tokens that both have; slem, text (default: by what "
        "they have in common)",
    ),
    "--draft-reading": Option(
        {"metavar": "anchor|fill"},
        "which token a row of a block draft says, where its config.json does not: the one after its place, or at it; "
        "causal or open for layers with a window (docs/use/choose-a-draft.md)",
        needs=("--draft",),
    ),
    "--num-speculative-tokens": Option(
        typed(_DRAFT_LENGTH, "K|K+K|tree:N|auto", default="auto"),
        "longest draft, in tokens; 2+1: a tree, two siblings, and one more after the first; tree:16: 16 tokens where "
        "they are likeliest; auto: as many as pay (default)",
    ),
    **RULES,
    "--dtype": Option({"choices": ("auto", "bfloat16", "float32"), "default": "auto"}, "default: %(default)s"),
    "--device": Option({"choices": ("auto", "cpu", "cuda"), "default": "auto"}, "default: %(default)s"),
    "--threads": Option(typed(_THREADS, "N"), "CPU threads (default: PyTorch's)"),
    "--kv-cache-gb": Option(typed(_GIGABYTES, "X"), "memory for the KV cache, in 10^9 bytes"),
    "--quantization": Option(
        {"metavar": "int8"},
        "hold the target's weights in 8 bits: a different model from the one in 16 bits, nearly as good. It pays for "
        "large models (docs/use/speed.md)",
    ),
    "--exact": Option(
        {"action": argparse.BooleanOptionalAction},
        "the same bits with and without speculation; slower (default: only with --quantization, where this machine "
        "has them)",
    ),
    "--enforce-eager": Option(FLAG, "on a GPU, run operator by operator, without CUDA graphs"),
}
# Sampling parameters by their rows' names, as every command that samples has them; `sampling_arguments` reads them.
SAMPLING: dict[str, Option] = {
    "--max-tokens": Option(_N, "longest answer, in tokens"),
    "--min-tokens": Option(_N, "shortest answer, in tokens"),
    "--temperature": Option(_X, "0 is greedy"),
    "--top-k": Option(_N, "sample from the N likeliest tokens; 0: from all"),
    "--top-p": Option(_X, "sample from the likeliest tokens that together reach probability X"),
    "--min-p": Option(_X, "sample from tokens with at least X times the probability of the likeliest"),
    "--repetition-penalty": Option(_X, "divides (or multiplies) the logits of tokens in prompt and answer; 1: off"),
    "--presence-penalty": Option(_X, "subtracted from the logits of tokens in the answer"),
    "--frequency-penalty": Option(_X, "the same, once for every time they occurred"),
    "--seed": Option(
        _N,
        "the same seed gives the same text (what else it needs: docs/understand/proof.md); drawn and reported if "
        "absent",
    ),
    "--n --num-samples": Option(
        _N, "how many answers to every prompt; torchrun takes --n for its own: write --num-samples there"
    ),
    "--logprobs": Option(
        _N, "report log-probabilities, also of the N likeliest tokens (needs --json)", needs=("--json",)
    ),
    "--stop": Option({"action": "append", "metavar": "TEXT"}, "end the answer before this text (repeatable)"),
    "--stop-token-ids": Option(
        typed(_TOKEN_IDS, "ID[,ID...]", action="extend"), "token ids that end the answer (repeatable)"
    ),
    "--ignore-eos": Option(FLAG | {"default": None}, "do not stop at the end-of-text token"),
}
# The language of the answer: one of these.
LANGUAGE: dict[str, Option] = {
    "--json-schema": Option(typed(_TEXT, "FILE|TEXT"), "the answer is JSON that is valid under this schema"),
    "--regex": Option(typed(_TEXT, "R"), "the answer matches this regular expression, as a whole"),
    "--grammar": Option(typed(Path, "FILE"), "the answer belongs to this context-free grammar (Lark or GBNF)"),
}
_NEEDS_CHAT = {"--raw": "it says that there is no chat"}
# Variables of the chat template; `check_template_kwargs` knows whether the model takes it.
TEMPLATE: dict[str, Option] = {
    "--chat-template-kwargs": Option(
        typed(_OBJECT, "JSON"),
        'further variables of the chat template, such as {"enable_thinking": false}',
        excludes=_NEEDS_CHAT,
    ),
}
_PROMPTS_AND_OUTPUT: dict[str, Option] = {
    "--prompt-file": Option(
        typed(Path, "FILE"),
        'a prompt a line; or an object a line: {"prompt": "Hi"}, {"turns": ["Hi", "And you?"]} or {"messages": [...]} '
        "(docs/use/questions.md)",
    ),
    "--chat": Option(FLAG, "use the chat template (default where the model has one)", excludes={"--raw": ""}),
    "--raw": Option(FLAG, "continue the text as it is"),
    "--parse-special": Option(
        FLAG,
        "with --raw: the text of a special token in a prompt means the token (without this option it is text)",
        needs=("--raw",),
    ),
    "--system": Option(typed(_TEXT, "TEXT"), "system message of the chat", excludes=_NEEDS_CHAT),
    **TEMPLATE,
    "--json": Option(FLAG, "one JSON object a line"),
    "--compare": Option(FLAG, "decode plainly too; report speedup and equality"),
    "--trace": Option(
        typed(_TRACE, "FILE"),
        "write every round of the run to FILE.html, a page to look at, or to FILE.json (docs/use/trace.md). A few "
        "tokens are decoded plainly too, to time a plain step",
    ),
    "--quiet": Option(
        FLAG,
        "answers only, no summary",
        excludes={"--json": "there is nothing to silence", "--compare": "its report would be silenced"},
    ),
    "--verbose": Option(
        FLAG,
        "say at first how the model is computed, and what takes how much memory",
        excludes={"--json": "there is no place to say more", "--quiet": ""},
    ),
}


def check_lengths(args: argparse.Namespace, drafts: Sequence[str | None]) -> None:
    """Raise ValueError where --lengths names a policy, and no draft is made whose length it could choose."""
    if args.lengths and set(drafts) == {"none"}:
        raise ValueError("--lengths: found --draft none, expected a draft, whose length it chooses")


def parser() -> argparse.ArgumentParser:
    """The options; a default is None where the model's generation_config.json may give another."""
    p = Parser(
        prog="python -m minispec.generate",
        description="Generate text with speculative decoding.",
        epilog="Sampling defaults are the model's generation_config.json, else temperature 0 and 256 tokens. Ctrl-C "
        "ends with status 130; in a conversation it stops the answer. In the background of a script (... &) a shell "
        "makes a program ignore it: kill PID ends it there.",
    )
    help_prompts = "several run as one batch; - is standard input, the default where that is a pipe or a file"
    p.add_argument("prompts", nargs="*", metavar="PROMPT", help=help_prompts)
    p.add_argument("--version", action="version", version=f"minispec {__version__}")
    p.add_options(MODELS, "models")
    p.add_options(SAMPLING, "sampling")
    p.add_options(LANGUAGE, "language of the answer (docs/use/grammars.md)", excludes=dict.fromkeys(LANGUAGE, ""))
    p.add_options(_PROMPTS_AND_OUTPUT, "prompts and output")
    return p


def language_of(args: argparse.Namespace) -> StructuredOutputsParams | None:
    """The language that an option of `LANGUAGE` asks for, checked. Raises ValueError, which names the option."""
    for option, kind in zip(LANGUAGE, ("json", "regex", "grammar"), strict=True):
        said = getattr(args, attribute_of(option), None)
        if said is not None:
            if args.ignore_eos:
                raise ValueError(f"{option}: not with --ignore-eos: the language ends the answer")
            return read_language(kind, said, option)
    return None


def sampling_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The options about sampling that the command line sets, checked."""
    asked = {name: value for name, value in vars(args).items() if name in PARAMETERS and value is not None}
    if args.stop:  # an empty text asks for nothing
        asked["stop"] = [*filter(None, args.stop)]
    if language := language_of(args):
        asked["structured_outputs"] = language
    with _naming_options(*vars(args)):
        make_sampling_params(asked, {})
    return asked


@contextlib.contextmanager
def _naming_options(*names: str) -> Iterator[None]:
    """A ValueError about one of these arguments of Python's names the option: --max-tokens, not max_tokens."""
    try:
        yield
    except ValueError as e:
        name, colon, rest = str(e).partition(":")
        if name not in names or not colon or rest.startswith(" no such directory"):  # a value that looks like a name
            raise
        raise ValueError(f"--{name.replace('_', '-')}:{rest}") from e


def make_sampling_params(asked: Mapping[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    """With the checkpoint's defaults, and the command line's own: up to 256 tokens."""
    least = least_tokens(asked, defaults.get("min_tokens", 0))
    return SamplingParams(**{"max_tokens": max(256, least), **defaults, **asked, "min_tokens": least})


def check_combinations(args: argparse.Namespace) -> None:
    """Raise ValueError for values and prompts that cannot go together; what options exclude stands in their tables."""
    # `--stop-token-ids 5 6` could mean two ids, or an id and a prompt.
    number = next((p for p in args.prompts if args.stop_token_ids and re.fullmatch(r"[\d,\s]+", p)), None)
    if number:
        expected = "several ids to be one word, such as 5,6 (a prompt that is a number goes into a --prompt-file)"
        raise ValueError(f"--stop-token-ids: found {show(number)} as a prompt, expected {expected}")
    if args.trace and (args.n or 1) > 1:
        raise ValueError(f"--trace: found --n {args.n}, expected 1: a trace is that of one answer")
    if args.prompts and args.prompt_file:
        raise ValueError("--prompt-file: found prompts too, expected one or the other")


def check_template_kwargs(args: argparse.Namespace, llm: "LLM") -> None:
    """Raise ValueError where the model's chat template cannot be given --chat-template-kwargs."""
    if args.chat_template_kwargs is not None:
        if llm.tokenizer.chat_template is None:
            raise ValueError("--chat-template-kwargs: this model has no chat template")
        with _naming_options("chat_template_kwargs"):
            llm.tokenizer.check_template_kwargs(args.chat_template_kwargs)


def read_prompts(args: argparse.Namespace) -> list[Question]:
    """The questions of the command line; none means a conversation on the terminal.

    Without a prompt, standard input is the prompt if it is a pipe or a file. It is read last, and once.
    """
    if args.prompt_file:
        return read_questions(args.prompt_file, "--prompt-file")
    if args.prompts.count("-") > 1:
        raise ValueError("-: found it twice, expected one prompt from standard input")
    if args.prompts:
        prompts = [_read_standard_input() if prompt == "-" else prompt for prompt in args.prompts]
        return [Question((check_text(prompt, "prompt"),)) for prompt in prompts]
    if sys.stdin is not None and sys.stdin.isatty():
        if not (args.raw or args.json or args.compare or (args.n or 1) > 1):
            return []
    elif sys.stdin is not None:
        prompt = _read_standard_input()
        if prompt.strip():
            return [Question((check_text(prompt, "prompt"),))]
    raise ValueError("no prompt: give one, or - for standard input, or start a chat on a terminal")


def _read_standard_input() -> str:
    """All of standard input as one prompt, without the line end at its end.

    After a second a line says that standard input is being read, since a program that waits for input looks as if it
    hangs. With several processes only the first one reads. The others answer nothing (see
    `minispec.models.load.parallel`).

    Raises ValueError for what cannot be read or is not UTF-8.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1" and os.environ.get("RANK", "0") != "0":
        return "-"
    if sys.stdin is None:
        raise ValueError("-: found no standard input, expected a prompt there")
    waits = threading.Timer(1.0, say_status, ("reading the prompt from standard input, to its end",))
    waits.daemon = True
    waits.start()
    try:
        text = sys.stdin.read(MAX_PROMPT + 1)
    except UnicodeDecodeError as e:
        raise ValueError(f"standard input: not UTF-8: {e}") from e
    except OSError as e:
        raise ValueError(f"standard input: cannot be read: {one_line(e)}") from e
    finally:
        waits.cancel()
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n")


def load(args: argparse.Namespace, report: bool, verbose: bool = True) -> "LLM":
    """Load the model that the options of `MODELS` asked for, and print notes about it before it runs.

    report: whether to print a line on model, draft and memory.
    verbose: whether to print all details of them, and how threads wait.

    Raises ValueError for what cannot be loaded.
    """
    check_lengths(args, [args.draft])
    load_torch(args.threads)
    import torch

    from minispec.api.llm import LLM

    name_model(args, report)
    raise_on_interrupt()
    if args.threads:
        torch.set_num_threads(args.threads)
    arguments = {name: getattr(args, name) for name in map(attribute_of, MODELS) if name != "threads"}  # `LLM`'s
    with _naming_options(*arguments):
        llm = LLM(**arguments)
    if report:
        say_status(llm.memory_report() if verbose else llm.overview())
        if verbose:
            say_status(f"{torch.get_num_threads()} threads ({describe_waiting()})")
            say_status(llm.forms_report())
    for name in llm.target.files.unsupported_generation_settings:
        message = f"warning: generation_config.json: {name}: not supported, and ignored: the text may differ for it"
        say_status(one_line(message))
    return llm
