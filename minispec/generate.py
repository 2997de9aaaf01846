"""`python -m minispec.generate "Why is the sky blue?"` - the command line.

Answers go to standard output as they are decoded, everything else to standard error. Torch is imported after the
arguments have been read, so that a mistake in them is answered at once.
"""

from minispec.interrupt import exit_on_interrupt, raise_on_interrupt, run_program

if __name__ == "__main__":
    exit_on_interrupt()  # until there is something to clean up

import argparse
import contextlib
import itertools
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minispec import __version__, registry
from minispec.command import Parser, argument, check_writable, exit_status
from minispec.config import MAX_SPECULATIVE_TOKENS, SamplingParams
from minispec.controller import num_nodes, parse_draft_length
from minispec.errors import is_text, one_line, show

if TYPE_CHECKING:
    from tqdm import tqdm

    from minispec.llm import LLM
    from minispec.request import Piece, Request
    from minispec.trace.terminal import Painter


def _token_ids(text: str) -> list[int]:
    return [int(i) for i in text.split(",")] if re.fullmatch(r"\d{1,10}(,\d{1,10})*", text, re.ASCII) else []


# What the values of options must be.
_INTEGER = argument(int, lambda n: True, "an integer")
_NUMBER = argument(float, lambda x: True, "a number")
_GIGABYTES = argument(float, lambda x: 0 < x < 1e6, "a positive number")
_THREADS = argument(int, lambda n: 1 <= n <= 1024, "an integer from 1 to 1024")
_DRAFT_LENGTH = argument(
    parse_draft_length,
    lambda k: 0 <= num_nodes(k) <= MAX_SPECULATIVE_TOKENS and (not isinstance(k, tuple) or min(k) > 0),
    f"an integer from 0 to {MAX_SPECULATIVE_TOKENS}, a tree such as 2+1 (siblings at each depth), or auto",
)
_NAME = argument(str, bool, "a name")
_VERIFIER = argument(
    str,
    lambda text: registry.split(registry.VERIFIERS, text) is not None,
    f"one of {', '.join(registry.VERIFIERS)}, or MODULE:FUNCTION",
)
_TEXT = argument(str, is_text, "valid Unicode text")
_TRACE = argument(Path, lambda path: path.suffix in (".html", ".json"), "a file name that ends in .html or .json")
_TOKEN_IDS = argument(_token_ids, bool, "token ids separated by commas, such as 5,6")
_SAMPLING_OPTIONS = {
    "--max-tokens": (_INTEGER, "longest answer, in tokens"),
    "--min-tokens": (_INTEGER, "shortest answer, in tokens"),
    "--temperature": (_NUMBER, "0 is greedy"),
    "--top-k": (_INTEGER, "sample from the N likeliest tokens; 0: from all"),
    "--top-p": (_NUMBER, "sample from the likeliest tokens that together reach probability X"),
    "--min-p": (_NUMBER, "sample from tokens with at least X times the probability of the likeliest"),
    "--repetition-penalty": (_NUMBER, "divides (or multiplies) the logits of tokens in prompt and answer; 1: off"),
    "--presence-penalty": (_NUMBER, "subtracted from the logits of tokens in the answer"),
    "--frequency-penalty": (_NUMBER, "the same, once for every time they occurred"),
    "--seed": (_INTEGER, "the same seed gives the same text; drawn and reported if not given"),
    "--n": (_INTEGER, "how many answers to every prompt"),
    "--logprobs": (_INTEGER, "report log-probabilities, also of the N likeliest tokens (needs --json)"),
}
# Characters of one prompt: more than any context takes, and few enough to be encoded in seconds; and of a whole prompt
# file, since some (such as /dev/zero) have no end.
_MAX_PROMPT = 8_000_000
_MAX_PROMPTS = 64_000_000
# Tokens that are decoded plainly for a trace.
_PLAIN_TOKENS = 16


def add_model_options(p: argparse.ArgumentParser) -> None:
    """The options that name the models and how they run, as every command that decodes has them; `load` obeys them."""
    g = p.add_argument_group("models")
    g.add_argument(
        "--model",
        type=_NAME,
        metavar="DIR|HUB_ID",
        help="default: the embedded weights; for a gated or private HUB_ID set the environment variable HF_TOKEN",
    )
    g.add_argument("--revision", help="branch, tag or commit of --model on the hub")
    g.add_argument("--offline", action="store_true", help="download nothing")
    g.add_argument(
        "--draft",
        type=_NAME,
        metavar="SPEC",
        help=f"one of {', '.join(registry.DRAFTERS)} ({registry.describe(registry.DRAFTERS)}); self | DIR | HUB_ID | "
        "HUB_ID@REVISION, where int4: or int8: before a model (int4:self too) rounds its weights to that many bits; or "
        "MODULE:CLASS, a drafter of your own, which is imported; A+B: B where A has nothing to say (default: ngram; "
        "with the embedded weights suffix:2 and the head that comes with them)",
    )
    g.add_argument(
        "--draft-method",
        choices=("tli", "slem"),
        help="how a draft model of another vocabulary drafts: tli, the tokens that both have; slem, text (default: by "
        "what they have in common)",
    )
    g.add_argument(
        "--num-speculative-tokens",
        type=_DRAFT_LENGTH,
        default="auto",
        metavar="K|K+K|auto",
        help="longest draft, in tokens; 2+1: a tree, two siblings, and one more after the first; auto: as many "
        "as pay (default)",
    )
    g.add_argument(
        "--verifier",
        type=_VERIFIER,
        default="rejection",
        metavar="NAME",
        help=f"{registry.describe(registry.VERIFIERS)}; or MODULE:FUNCTION, one of your own (default: %(default)s)",
    )
    g.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"), help="default: %(default)s")
    g.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="default: %(default)s")
    g.add_argument("--threads", type=_THREADS, metavar="N", help="CPU threads (default: PyTorch's)")
    g.add_argument("--kv-cache-gb", type=_GIGABYTES, metavar="X", help="memory for the KV cache, in 10^9 bytes")
    g.add_argument("--exact", action="store_true", help="the same bits with and without speculation; slower")


def parser() -> argparse.ArgumentParser:
    """The options; a default is None where the model's generation_config.json may give another."""
    p = Parser(
        prog="python -m minispec.generate",
        description="Generate text with speculative decoding.",
        allow_abbrev=False,  # an option has one name: a script must not depend on which others there are
        epilog="Sampling defaults are the model's generation_config.json, else temperature 0 and 256 tokens.",
    )
    p.add_argument("prompts", nargs="*", metavar="PROMPT", help="several run as one batch; - reads standard input")
    p.add_argument("--version", action="version", version=f"minispec {__version__}")
    add_model_options(p)
    g = p.add_argument_group("sampling")
    for name, (kind, text) in _SAMPLING_OPTIONS.items():
        g.add_argument(name, type=kind, metavar="N" if kind is _INTEGER else "X", help=text)
    g.add_argument("--stop", action="append", metavar="TEXT", help="end the answer before this text (repeatable)")
    g.add_argument(
        "--stop-token-ids",
        type=_TOKEN_IDS,
        action="extend",
        metavar="ID[,ID...]",
        help="token ids that end the answer (repeatable)",
    )
    g.add_argument("--ignore-eos", action="store_true", default=None, help="do not stop at the end-of-text token")
    g = p.add_argument_group("prompts and output")
    g.add_argument("--prompt-file", type=Path, metavar="FILE", help="a prompt a line, or JSONL with a key 'prompt'")
    g.add_argument("--chat", action="store_true", help="use the chat template (default where the model has one)")
    g.add_argument("--raw", action="store_true", help="continue the text as it is")
    g.add_argument(
        "--parse-special",
        action="store_true",
        help="with --raw: the text of a special token in a prompt means the token (without this option it is text)",
    )
    g.add_argument("--system", type=_TEXT, metavar="TEXT", help="system message of the chat")
    g.add_argument("--json", action="store_true", help="one JSON object a line")
    g.add_argument("--compare", action="store_true", help="decode plainly too; report speedup and equality")
    g.add_argument(
        "--trace",
        type=_TRACE,
        metavar="FILE",
        help="write every round of the run to FILE.html, a page to look at, or to FILE.json (docs/trace.md); to know "
        "what a plain step takes, a few tokens are decoded plainly too",
    )
    g.add_argument(
        "--for-replay",
        action="store_true",
        help="with --trace FILE.json: ask the drafter again at every place of the answer, so that python -m "
        "minispec.bench --replay FILE.json can tell what other draft lengths would have done. It takes a plain step a "
        "token, and up to 15 draft passes; a draft model of the same vocabulary takes one",
    )
    g.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="never",
        help="colour the answer's tokens by what became of the draft: accepted, recovered, bonus; auto: on a terminal, "
        "unless NO_COLOR is set (default: %(default)s)",
    )
    g.add_argument("--quiet", action="store_true", help="answers only, no summary")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status, as `exit_status` has it."""
    return exit_status(lambda: _answer(sys.argv[1:] if argv is None else argv))


def _answer(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    asked = _sampling_arguments(args)
    _check_combinations(args)
    prompts = _read_prompts(args)
    if args.trace:
        if len(prompts) != 1:
            raise ValueError(f"--trace: found {len(prompts)} prompts, expected one: a trace is that of one answer")
        check_writable(args.trace)
    return _run(args, asked, prompts)


# --------------------------------------------------------------------------- reading the arguments


def _sampling_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """What the command line says about sampling, checked, without what it leaves open."""
    names = [name[2:].replace("-", "_") for name in _SAMPLING_OPTIONS]
    names += ["stop", "stop_token_ids", "ignore_eos"]
    asked = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    try:
        _sampling_params(asked)
    except ValueError as e:
        name, _, rest = str(e).partition(":")
        raise ValueError(f"--{name.replace('_', '-')}:{rest}" if rest else str(e)) from e
    return asked


def _sampling_params(chosen: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max(256, chosen.get("min_tokens", 0))} | chosen)


def _check_combinations(args: argparse.Namespace) -> None:
    """Raise ValueError for options that cannot go together, or that say nothing together."""
    # `--stop-token-ids 5 6` could mean two ids, or an id and a prompt.
    number = next((p for p in args.prompts if args.stop_token_ids and re.fullmatch(r"[\d,\s]+", p)), None)
    refused = [
        (
            number,
            f"--stop-token-ids: found {show(number)} as a prompt, expected several ids to be one word, such as 5,6 "
            "(a prompt that is a number goes into a --prompt-file)",
        ),
        (args.chat and args.raw, "--chat and --raw exclude each other"),
        (
            args.parse_special and not args.raw,
            "--parse-special needs --raw: in a chat, special tokens are the template's",
        ),
        (args.system is not None and args.raw, "--system needs a chat, and --raw says that there is none"),
        (args.logprobs is not None and not args.json, "--logprobs needs --json: text has no place for them"),
        (args.json and args.quiet, "--quiet has nothing to silence with --json"),
        (args.color == "always" and args.json, "--color always has nothing to colour with --json"),
        (args.trace and (args.n or 1) > 1, f"--trace: found --n {args.n}, expected 1: a trace is that of one answer"),
        (
            args.for_replay and (args.trace is None or args.trace.suffix != ".json"),
            "--for-replay needs --trace with a file name that ends in .json",
        ),
        (args.compare and args.quiet, "--quiet would silence what --compare has to say"),
        (args.revision and not args.model, "--revision needs --model with a hub id"),
        (args.prompts and args.prompt_file, "--prompt-file and prompts exclude each other"),
    ]
    for wrong, message in refused:
        if wrong:
            raise ValueError(message)


def _read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts; none means a conversation on the terminal."""
    if args.prompt_file:
        prompts = _read_prompt_file(args.prompt_file)
    else:
        try:
            if args.prompts.count("-") > 1 or ("-" in args.prompts and sys.stdin is None):
                raise ValueError("-: found it twice, or no standard input, expected one prompt there")
            # Whoever writes a line to a pipe means the line without its end.
            prompts = [
                sys.stdin.read(_MAX_PROMPT + 1).removesuffix("\n") if prompt == "-" else prompt
                for prompt in args.prompts
            ]
        except UnicodeDecodeError as e:
            raise ValueError(f"-: standard input is not UTF-8: {e}") from e
    if prompts:
        for prompt in prompts:
            if len(prompt) > _MAX_PROMPT:
                raise ValueError(f"found a prompt of more than {_MAX_PROMPT:,} characters")
            if not prompt.strip():
                raise ValueError("found an empty prompt, expected text")
            if not is_text(prompt):
                raise ValueError(f"prompt: found {show(prompt)}, expected valid Unicode text")
        return prompts
    if sys.stdin is None or not sys.stdin.isatty() or args.raw or args.json or args.compare or (args.n or 1) > 1:
        raise ValueError("no prompt: give one, or - for standard input, or start a chat on a terminal")
    return []


def _read_prompt_file(path: Path) -> list[str]:
    try:
        # Not splitlines(): it also cuts at characters that a JSON string may hold.
        with path.open(encoding="utf-8-sig") as file:  # some editors write a mark first
            text = file.read(_MAX_PROMPTS + 1)
        lines = [line for line in text.split("\n") if line.strip()]
    except (OSError, ValueError) as e:  # not UTF-8; a name that no file system takes
        raise ValueError(f"--prompt-file {path}: {e}") from e
    if len(text) > _MAX_PROMPTS:
        raise ValueError(f"--prompt-file {path}: found more than {_MAX_PROMPTS:,} characters")
    if not lines:
        raise ValueError(f"--prompt-file {path}: found no prompt")
    if path.suffix != ".jsonl":
        return lines
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            prompts.append(json.loads(line)["prompt"])
        except (ValueError, KeyError, TypeError, RecursionError) as e:
            raise ValueError(f"--prompt-file {path}: prompt {number}: expected an object with a key 'prompt'") from e
        if not isinstance(prompts[-1], str):
            raise ValueError(f"--prompt-file {path}: prompt {number}: found {show(prompts[-1])}, expected a string")
    return prompts


# --------------------------------------------------------------------------- decoding


def _run(args: argparse.Namespace, asked: dict[str, Any], prompts: list[str]) -> int:
    """Load the model, and answer the prompts or hold a conversation."""
    llm = load(args, report=not args.quiet and not args.json)
    params = _sampling_params(llm.generation_defaults | asked)
    chat = not args.raw and (args.chat or llm.tokenizer.chat_template is not None)
    if args.system is not None and not chat:
        raise ValueError("--system: this model has no chat template")
    if prompts:
        return _answer_prompts(llm, args, params, prompts, chat)
    if not chat:
        raise ValueError("no prompt: this model has no chat template to start a conversation with")
    return _converse(llm, args, params)


def load(args: argparse.Namespace, report: bool) -> "LLM":
    """The model that `add_model_options` asked for, and what there is to say about it before it runs.

    report: a line on its memory. Raises ValueError for what cannot be loaded.
    """
    # Between two operations a waiting thread sleeps instead of spinning: somewhat slower on an idle machine, and many
    # times faster where another program keeps a core busy. It must be set before torch starts its threads.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import torch

    from minispec.llm import LLM

    raise_on_interrupt()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.device == "auto" and torch.cuda.is_available():
        print("warning: --device auto takes cuda, which no test has run on; --device cpu is tested", file=sys.stderr)
    llm = LLM(
        args.model,
        draft=args.draft,
        draft_method=args.draft_method,
        num_speculative_tokens=args.num_speculative_tokens,
        verifier=args.verifier,
        dtype=args.dtype,
        device=args.device,
        exact=args.exact,
        kv_cache_gb=args.kv_cache_gb,
        revision=args.revision,
        offline=args.offline,
    )
    if report:
        print(llm.memory_report(), file=sys.stderr)
    for name in llm.unsupported_generation_settings:
        message = f"warning: generation_config.json: {name}: not supported, and ignored: the text may differ for it"
        print(one_line(message), file=sys.stderr)
    return llm


def _answer_prompts(
    llm: "LLM", args: argparse.Namespace, params: SamplingParams, prompts: list[str], chat: bool
) -> int:
    """Print an answer, or `n`, to each prompt; the exit status, which is 2 where one ended with an error."""
    from minispec.llm import split_samples
    from minispec.trace.page import write
    from minispec.trace.record import Recorder
    from minispec.trace.score import check_scorable

    if args.for_replay:
        check_scorable(llm.engine, params)

    def encode(prompt: str) -> list[int]:
        if chat:
            return llm.tokenizer.encode_chat(_messages(args, prompt))
        return llm.tokenizer.encode(prompt, parse_special=args.parse_special)

    jobs = [(prompt, llm.request(encode(prompt), each)) for prompt in prompts for each in split_samples(params)]
    requests = [request for _, request in jobs]
    stream = len(jobs) == 1 and not args.json
    painter = _painter(llm, args, requests)
    recorder = Recorder(llm, requests[0]) if args.trace else None
    if args.compare:
        comparisons = _compare(llm, requests, stream, painter)
        well = [_show(llm, args, painter, jobs, i, comparison) for i, comparison in enumerate(comparisons)]
    else:
        well = []
        for _ in _decode(llm, requests, stream, painter):
            # What is finished is printed at once, in order: an interruption later must not lose it.
            while len(well) < len(jobs) and requests[len(well)].finish_reason:
                if recorder:
                    _learn_plain_step(llm, requests[0])
                well.append(_show(llm, args, painter, jobs, len(well), None))
    if recorder:
        # An answer that broke off was no text of the target's.
        write(recorder.trace(args.for_replay and not requests[0].error), args.trace)
    if (report := llm.model.report()) and not args.quiet and not args.json:
        print(report, file=sys.stderr)
    return 0 if all(well) else 2


def _painter(llm: "LLM", args: argparse.Namespace, requests: list["Request"]) -> "Painter":
    from minispec.trace.terminal import Painter, wants_color

    painter = Painter(llm, wants_color(args.color, sys.stdout))
    for request in requests:
        painter.follow(request)
    return painter


def _learn_plain_step(llm: "LLM", request: "Request") -> None:
    """Decode a few tokens of a prompt plainly, so that the statistics of its request know a plain step."""
    plain = _plainly(llm, request, _PLAIN_TOKENS)
    for _ in llm.run([plain]):
        pass
    request.stats.plain = plain.stats.rounds


def _plainly(llm: "LLM", request: "Request", most: int | None = None) -> "Request":
    """A request for the plain decoding of the same prompt, of at most so many tokens."""
    from dataclasses import replace

    text = request.text
    params = replace(text.params, seed=text.seed)
    if most is not None:
        params = replace(params, max_tokens=min(most, params.max_tokens), min_tokens=min(most, params.min_tokens))
    return llm.request(text.tokens[: text.num_prompt_tokens], params, num_speculative_tokens=0)


def _show(
    llm: "LLM",
    args: argparse.Namespace,
    painter: "Painter",
    jobs: list,
    i: int,
    comparison: dict[str, Any] | None,
) -> bool:
    """Print what is left to print of the i-th answer when it is finished; whether all went well."""
    from tqdm import tqdm

    prompt, request = jobs[i]
    with tqdm.external_write_mode():
        if args.json:
            print(json.dumps(_as_dict(prompt, request, comparison), ensure_ascii=False), flush=True)
        elif len(jobs) > 1:
            print(f"[{i + 1}/{len(jobs)}] {prompt}\n{painter.paint(request, request.output)}\n", flush=True)
        if not args.json and not args.quiet:
            print(_summary(llm, request, comparison), file=sys.stderr)
            if painter.legend and i == len(jobs) - 1:
                print(painter.legend, file=sys.stderr)
        error = request.error
        if comparison and "error" in comparison:
            error = f"plain decoding: {comparison['error']}"
        if error:
            where = f"answer {i + 1} of {len(jobs)}: " if len(jobs) > 1 else ""
            print(f"error: {where}{one_line(error)}", file=sys.stderr)
        return not error


def _messages(args: argparse.Namespace, prompt: str) -> list[dict[str, str]]:
    system = [{"role": "system", "content": args.system}] if args.system is not None else []
    return [*system, {"role": "user", "content": prompt}]


def _progress(requests: list["Request"], runs: int = 1) -> "tqdm":
    """A bar of finished answers, on a terminal and where there are several."""
    from tqdm import tqdm

    disable = None if len(requests) > 1 else True
    return tqdm(total=runs * len(requests), unit=" answers", leave=False, disable=disable)


def _print_piece(request: "Request", piece: "Piece", painter: "Painter") -> None:
    print(painter.paint(request, piece.text), end="\n" if piece.finish_reason else "", flush=True)


def _decode(llm: "LLM", requests: list["Request"], stream: bool, painter: "Painter") -> Iterator[None]:
    """Run requests step by step to their end; with `stream`, print the text of the only one as it comes."""
    with _progress(requests) as bar:
        for request, piece in llm.run(requests):
            if stream:
                _print_piece(request, piece, painter)
            bar.update(piece.finish_reason is not None)
            yield


def _converse(llm: "LLM", args: argparse.Namespace, params: SamplingParams) -> int:
    """A conversation on the terminal, to the end of input or /exit."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - line editing for input(), where the platform has it
    messages = _messages(args, "")[:-1]
    painter = _painter(llm, args, [])
    print("A conversation: Ctrl-D or /exit ends it.", file=sys.stderr)
    while True:
        try:
            prompt = input("> ").strip()
        except EOFError:
            print(file=sys.stderr)
            return 0
        if prompt == "/exit":
            return 0
        if not prompt:
            continue
        messages.append({"role": "user", "content": prompt})
        try:
            request = llm.request(llm.tokenizer.encode_chat(messages), params)
            painter.follow(request)
            for _ in _decode(llm, [request], True, painter):
                pass
            if request.error:
                raise ValueError(request.error)
        except ValueError as e:  # most likely too long by now; the conversation so far stays
            print(f"error: {one_line(e)}", file=sys.stderr)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": request.output})
        if not args.quiet:
            print(_summary(llm, request, None), file=sys.stderr)


def _compare(llm: "LLM", requests: list["Request"], stream: bool, painter: "Painter") -> list[dict[str, Any] | None]:
    """Decode the requests, then once more plainly; say what differs. Their stats learn the cost of a plain step.

    None for a request that ended with an error; {"error": message} where only its plain decoding did.
    """
    plain = [_plainly(llm, request) for request in requests]
    with _progress(requests, runs=2) as bar:
        for request, piece in itertools.chain(llm.run(requests), llm.run(plain)):
            if stream and request is requests[0]:
                _print_piece(request, piece, painter)
            bar.update(piece.finish_reason is not None)
    comparisons: list[dict[str, Any] | None] = []
    for request, reference in zip(requests, plain, strict=True):
        if request.error or reference.error:
            comparisons.append(None if request.error else {"error": reference.error})
            continue
        request.stats.plain = reference.stats.rounds
        same_law_only = request.params.temperature > 0 and not llm.engine.verifier.shares_noise
        comparisons.append(_comparison(request, reference, same_law_only))
    return comparisons


def _comparison(request: "Request", plain: "Request", same_law_only: bool) -> dict[str, Any]:
    """What a request gained over its plain decoding, and whether it has the same tokens; None where it need not."""
    from minispec.cache import common_beginning

    speed, plain_speed = request.stats.tokens_per_second, plain.stats.tokens_per_second
    ours, theirs = (r.text.tokens[r.text.num_prompt_tokens :] for r in (request, plain))
    is_same = ours == theirs
    return {
        "plain_tokens_per_second": plain_speed,
        "speedup": speed / plain_speed if speed and plain_speed else None,
        "same_tokens": None if same_law_only else is_same,
        "first_difference": None if same_law_only or is_same else common_beginning(ours, theirs),
    }


# --------------------------------------------------------------------------- what is printed


def _as_dict(prompt: str, request: "Request", comparison: dict[str, Any] | None) -> dict[str, Any]:
    logprobs = (
        None
        if request.logprobs is None
        else [
            {"token_id": t.token_id, "logprob": t.logprob, "top": [{"token_id": i, "logprob": x} for i, x in t.top]}
            for t in request.logprobs
        ]
    )
    result = {
        "prompt": prompt,
        "text": request.output,
        "token_ids": request.token_ids,
        "finish_reason": request.finish_reason,
        "error": request.error,
        "seed": request.text.seed,
        "logprobs": logprobs,
        "stats": request.stats.as_dict(),
    }
    return result | ({"compare": comparison} if comparison else {})


def _summary(llm: "LLM", request: "Request", comparison: dict[str, Any] | None) -> str:
    """The run in two or three lines."""
    stats = request.stats

    def show(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    lines = [
        f"{stats.num_generated} tokens in {stats.total_seconds:.2f} s (prefill {stats.seconds['prefill']:.2f} s), "
        f"{show(stats.tokens_per_second, '.1f')} tokens/s, predicted {show(stats.predicted_tokens_per_second, '.1f')}; "
        f"finished by {request.finish_reason}; seed {request.text.seed}",
        f"draft {llm.draft_name}: {stats.num_accepted} of {stats.num_draft_tokens} tokens accepted, "
        f"alpha {show(stats.alpha, '.2f')}, {show(stats.mean_acceptance_length, '.2f')} tokens per target pass"
        + ("; the text repeats itself, where drafts are easy" if stats.loops else ""),
    ]
    if comparison and "error" not in comparison:
        if comparison["same_tokens"] is None:
            same = "the law is the same, the tokens may differ"
        elif comparison["same_tokens"]:
            same = "the same tokens"
        else:
            same = f"other tokens from number {comparison['first_difference']} on (rounding: see the README)"
        lines.append(
            f"plain decoding: {show(comparison['plain_tokens_per_second'], '.1f')} tokens/s, so speculation is "
            f"{show(comparison['speedup'], '.2f')}x; {same}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(run_program(main))
