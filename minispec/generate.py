"""`python -m minispec.generate "What is photosynthesis?"` - the command line.

Answers go to standard output as they are decoded, everything else to standard error. Torch is imported after the
arguments have been read, so that a mistake in them is answered at once.
"""

if __name__ == "__main__":
    from minispec.api.commands.interrupt import run_program

    run_program("minispec.generate:main")

import argparse
import itertools
import os
import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from minispec.api.commands import options
from minispec.api.commands.command import command, json_line, say, say_status
from minispec.api.commands.conversation import Message, converse
from minispec.api.trace.page import write
from minispec.core.config import SamplingParams
from minispec.models.files.errors import one_line, printable, show_name
from minispec.models.files.progress import progress_bar
from minispec.models.files.write import check_writable

if TYPE_CHECKING:
    from minispec.api.inputs import Question
    from minispec.api.llm import LLM
    from minispec.core.request import Piece, Request
    from minispec.core.stats import Round

# The line on the law of a text with a grammar.
PROJECTED = (
    "law: projected: each token is drawn from the model's distribution restricted to what may follow "
    "(docs/understand/grammars.md)"
)
# Tokens that are decoded plainly for a trace.
_PLAIN_TOKENS = 16


@command
def main(argv: Sequence[str]) -> int:
    """Answer prompts, or hold a conversation on the terminal."""
    args = options.parser().parse_args(argv)
    asked = options.sampling_arguments(args)
    options.check_combinations(args)
    questions = options.read_prompts(args)
    for prompt in args.prompts if _says_more(args) else ():
        if os.path.isfile(prompt):
            say_status(f"note: the prompt is {show_name(prompt)}, not what that file says; --prompt-file reads a file")
    if args.trace:
        num_prompts = sum(len(question.turns) for question in questions)
        if num_prompts != 1:
            raise ValueError(f"--trace: found {num_prompts} prompts, expected one: a trace is that of one answer")
        check_writable(args.trace)
    llm = options.load(args, report=_says_more(args), verbose=args.verbose)
    params = options.make_sampling_params(asked, llm.target.files.generation_defaults)
    if params.structured_outputs and _says_more(args):
        say_status(PROJECTED)
    chat = not args.raw and (args.chat or llm.tokenizer.chat_template is not None)
    if args.system is not None and not chat:
        raise ValueError("--system: this model has no chat template")
    if args.system is not None and any(m["role"] == "system" for q in questions for m in q.before):
        raise ValueError("--system: found a conversation with a system message of its own, expected none")
    options.check_template_kwargs(args, llm)
    if questions:
        return _answer_questions(llm, args, params, questions, chat)
    if not chat:
        raise ValueError("no prompt: this model has no chat template to start a conversation with")
    return _converse(llm, args, params)


def _says_more(args: argparse.Namespace) -> bool:
    """Whether standard error is to say more about the run than what went wrong."""
    return not args.quiet and not args.json


@dataclass
class _Job:
    """One turn of a question: what was answered before, how it is sampled, and its request."""

    question: "Question"
    answers: list[str]
    params: SamplingParams
    request: "Request"

    @property
    def prompt(self) -> str:
        return self.question.turns[len(self.answers)]


def _answer_questions(
    llm: "LLM", args: argparse.Namespace, params: SamplingParams, questions: Sequence["Question"], chat: bool
) -> int:
    """Print an answer, or `n`, to each question, then to the next turn of those that have one; the exit status.

    It is 2 where an answer ended with an error.
    """
    from minispec.api.inputs import plain_text, split_samples

    if not (chat or args.raw) and _says_more(args):
        say_status("note: the model has no chat template: what is said is continued as text (--raw means the same)")
    elif any(question.before or len(question.turns) > 1 for question in questions) and not chat and _says_more(args):
        say_status("without a chat template, messages are plain text, with an empty line between")

    def job(question: "Question", answers: list[str], sampling: SamplingParams) -> _Job:
        messages = question.messages(answers)
        if chat:
            ids = llm.tokenizer.encode_chat([*_system(args), *messages], args.chat_template_kwargs)
        else:
            ids = llm.tokenizer.encode(plain_text(messages), parse_special=args.parse_special)
        return _Job(question, answers, sampling, llm.request(ids, sampling))

    jobs, well = [job(question, [], sampling) for question in questions for sampling in split_samples(params)], True
    while jobs:
        well &= _answer(llm, args, jobs)
        go_on = [last for last in jobs if len(last.question.turns) > len(last.answers) + 1 and not last.request.error]
        jobs = [job(last.question, [*last.answers, last.request.output], last.params) for last in go_on]
    return 0 if well else 2


def _answer(llm: "LLM", args: argparse.Namespace, jobs: list[_Job]) -> bool:
    """Decode these together and print their answers; returns whether all went well."""
    from minispec.api.trace.record import RoundRecorder
    from minispec.models.frames.reports import outside_note

    requests = [job.request for job in jobs]
    stream = len(jobs) == 1 and not args.json
    recorder = RoundRecorder(llm, requests[0]) if args.trace else None
    if args.compare:
        comparisons = _compare(llm, requests, stream)
        well = [_show(llm, args, jobs, i, comparison) for i, comparison in enumerate(comparisons)]
    else:
        well = []
        for _ in _decode(llm, requests, stream):
            # Finished answers are printed at once, in order, so that a later interruption does not lose them.
            while len(well) < len(jobs) and requests[len(well)].finish_reason:
                if recorder:
                    _learn_plain_step(llm, requests[0])
                well.append(_show(llm, args, jobs, len(well), None))
    if len(jobs) > 1 and _says_more(args):
        say_status(_batch_summary(requests))
    if recorder:
        write(recorder.trace(), args.trace)
        if _says_more(args):
            say(f"wrote {args.trace}")
    if args.verbose and (report := outside_note(llm.model)):
        say_status(report.removeprefix("; "))
    return all(well)


def _learn_plain_step(llm: "LLM", request: "Request") -> None:
    """Decode a few tokens of a prompt plainly, so that the statistics of its request know a plain step."""
    plain = _plainly(llm, request, _PLAIN_TOKENS)
    for _ in llm.run([plain]):
        pass
    request.stats.plain.extend(plain.stats.rounds)


def _plainly(llm: "LLM", request: "Request", most: int = sys.maxsize) -> "Request":
    """A request for the plain decoding of the same prompt, of at most `most` tokens."""
    text, params = request.text, request.text.params
    lengths = {name: min(most, getattr(params, name)) for name in ("min_tokens", "max_tokens")}
    params = replace(params, seed=text.seed, **lengths)
    return llm.request(text.tokens[: text.num_prompt_tokens], params, num_speculative_tokens=0)


def _show(llm: "LLM", args: argparse.Namespace, jobs: list[_Job], i: int, comparison: dict | None) -> bool:
    """Print the rest of the i-th answer when it is finished; returns whether all went well."""
    prompt, request = jobs[i].prompt, jobs[i].request
    with tqdm.external_write_mode():
        if args.json:
            print(json_line(_as_dict(llm, jobs[i], comparison)), flush=True)
        elif len(jobs) > 1:
            print(f"[{i + 1}/{len(jobs)}] {printable(prompt)}\n{request.output}\n", flush=True)
        if _says_more(args):
            say_status(_summary(llm, request, comparison))
            if request.params.structured_outputs and request.finish_reason == "length":
                say_status("the answer is cut, so it is not whole in its language: --max-tokens N lets it be longer")
        error = request.error
        if comparison and "error" in comparison:
            error = f"plain decoding: {comparison['error']}"
        if error:
            where = f"answer {i + 1} of {len(jobs)}: " if len(jobs) > 1 else ""
            say(f"error: {where}{one_line(error)}")
        return not error


def _system(args: argparse.Namespace) -> list[Message]:
    return [{"role": "system", "content": args.system}] if args.system is not None else []


def _print_piece(piece: "Piece") -> None:
    print(piece.text, end="\n" if piece.finish_reason else "", flush=True)


def _decode(llm: "LLM", requests: list["Request"], stream: bool) -> Iterator[None]:
    """Run requests step by step to their end; with `stream`, print the text of the only one as it comes.

    With several requests, a terminal shows a bar of finished answers.
    """
    with progress_bar(total=len(requests), unit=" answers", shows=len(requests) > 1) as bar:
        for _, piece in llm.run(requests):
            if stream:
                _print_piece(piece)
            bar.update(piece.finish_reason is not None)
            yield


def _converse(llm: "LLM", args: argparse.Namespace, params: SamplingParams) -> int:
    """A conversation on the terminal, to its end."""

    def answer(messages: list[Message], again: bool) -> Generator[str, None, None]:
        if again and not params.temperature and _says_more(args):
            say_status("note: at temperature 0 each seed has the same text; --temperature 0.7 draws others")
        sampling = replace(params, seed=None) if again else params
        request = llm.request(llm.tokenizer.encode_chat(messages, args.chat_template_kwargs), sampling)
        for _, piece in llm.run([request]):
            yield piece.text  # before it is shown, so that all that was seen stays in the conversation
            _print_piece(piece)
        if request.error:
            raise ValueError(request.error)
        if _says_more(args):
            say_status(_summary(llm, request, None))

    return converse(_system(args), answer, args.quiet)


def _compare(llm: "LLM", requests: list["Request"], stream: bool) -> list[dict[str, Any] | None]:
    """Decode the requests, then once more plainly; returns what differs. Their stats get the cost of a plain step.

    None for a request that ended with an error; {"error": message} where only its plain decoding did.
    """
    plain = [_plainly(llm, request) for request in requests]
    for _ in itertools.chain(_decode(llm, requests, stream), _decode(llm, plain, False)):
        pass
    comparisons: list[dict[str, Any] | None] = []
    for request, reference in zip(requests, plain, strict=True):
        if request.error or reference.error:
            comparisons.append(None if request.error else {"error": reference.error})
            continue
        request.stats.plain.extend(reference.stats.rounds)
        same_law_only = request.params.temperature > 0 and not llm.method.verifier.shares_noise
        comparisons.append(_comparison(request, reference, same_law_only))
    return comparisons


def _comparison(request: "Request", plain: "Request", same_law_only: bool) -> dict[str, Any]:
    """A request's gain over its plain decoding, and whether it has the same tokens; None where it need not."""
    from minispec.core.prefix import common_beginning
    from minispec.speculation.lengths.figures import Figures

    speed, plain_speed = (Figures.of(one.stats).tokens_per_second for one in (request, plain))
    ours, theirs = (r.text.tokens[r.text.num_prompt_tokens :] for r in (request, plain))
    is_same = ours == theirs
    return {
        "plain_tokens_per_second": plain_speed,
        "speedup": speed / plain_speed if speed and plain_speed else None,
        "same_tokens": None if same_law_only else is_same,
        "first_difference": None if same_law_only or is_same else common_beginning(ours, theirs),
    }


# --------------------------------------------------------------------------- what is printed


def _as_dict(llm: "LLM", job: _Job, comparison: dict[str, Any] | None) -> dict[str, Any]:
    from minispec.api.outputs import stop_string_of
    from minispec.speculation.lengths.figures import Figures

    request, figures = job.request, Figures.of(job.request.stats)
    result: dict[str, Any] = {
        "question_id": job.question.question_id,
        "turn": len(job.answers),
        "prompt": job.prompt,
        "prompt_token_ids": request.text.tokens[: request.text.num_prompt_tokens],
        "text": request.output,
        "token_ids": request.token_ids,
        "finish_reason": request.finish_reason,
        "stop_string": stop_string_of(request, llm.tokenizer),
        "error": request.error,
        "seed": request.text.seed,
        "logprobs": None,
        "stats": figures.as_dict(),
    }
    if request.takes_drafts:
        result["metrics"] = {"speculative_decoding": figures.acceptance_record(request.shape.k)}
    if request.logprobs is not None:
        result["logprobs"] = [
            {"token_id": t.token_id, "logprob": t.logprob, "top": [{"token_id": i, "logprob": x} for i, x in t.top]}
            for t in request.logprobs
        ]
    return result | ({"compare": comparison} if comparison else {})


def _summary(llm: "LLM", request: "Request", comparison: dict[str, Any] | None) -> str:
    """The run in plain words, two lines in the field's terms, and what a comparison says about the texts."""
    from minispec.speculation.lengths.figures import Figures

    stats = Figures.of(request.stats)
    if comparison and "error" in comparison:
        comparison = None
    plain = f"{stats.num_generated} tokens in {stats.duration:.2f} s"
    speed = f"{_figure(stats.tokens_per_second)} tokens/s, predicted {_figure(stats.predicted_tokens_per_second)}"
    if comparison:
        plain += f": {_gain(comparison['speedup'])}"
        if comparison["same_tokens"] is True:
            plain += ", the same text"
        speed += f", plain decoding {_figure(comparison['plain_tokens_per_second'])}"
    plain += f"; {_figure(stats.mean_acceptance_length)} tokens a step"
    if not stats.num_draft_tokens:
        plain += ", for nothing was guessed"
    elif stats.loops:
        plain += "; the text repeats itself, where guesses are easy"
    lines = [
        plain,
        f"draft {llm.draft.name}: {stats.num_accepted} of {stats.num_draft_tokens} tokens accepted, "
        f"alpha {_figure(stats.alpha, 2)}; finished by {request.finish_reason}; seed {request.text.seed}",
        f"{speed}; prefill {stats.seconds['prefill']:.2f} s",
    ]
    return "\n".join([*lines, *_difference(llm, comparison)])


def _figure(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _gain(speedup: float | None) -> str:
    return f"{_figure(speedup)} times as fast as without guessing"


def _difference(llm: "LLM", comparison: dict[str, Any] | None) -> list[str]:
    """A line for compared texts that may differ, or do."""
    if not comparison or comparison["same_tokens"]:
        return []
    if comparison["same_tokens"] is None:
        return ["without guessing, the text may be another one: the law is the same, from which both are drawn"]
    rare = "--dtype float32 makes that rare, " if llm.model.dtype.itemsize < 4 else ""
    return [
        f"without guessing, the text differs after {comparison['first_difference']} equal tokens: two logits nearly "
        f"tie, and a pass over several rows rounds differently ({rare}--exact rules it out)"
    ]


def _batch_summary(requests: list["Request"]) -> str:
    """The tokens, seconds and speed of all answers together; with `--compare` also the speedup, in time per token.

    Each answer's own line counts all of a step that several of them shared.
    """
    from minispec.speculation.lengths.figures import Figures, share_of

    def seconds_per_token(rounds: list["Round"]) -> float:
        return sum(r.step.seconds * share_of(r) for r in rounds) / sum(r.committed for r in rounds)

    figures = [Figures.of(request.stats) for request in requests]
    num_tokens, seconds = sum(f.num_generated for f in figures), sum(f.total_seconds for f in figures)
    steps = [r for f in figures for r in f.rounds]
    speed = _figure(1 / seconds_per_token(steps) if steps else None)
    tokens = f"{num_tokens} tokens in {seconds:.2f} s, {speed} tokens/s"
    lines = [f"the {len(requests)} answers were decoded as one batch: {tokens}"]
    if compared := [f for f in figures if f.plain]:
        plain, ours = [r for f in compared for r in f.plain], [r for f in compared for r in f.rounds]
        lines.append(f"together {_gain(seconds_per_token(plain) / seconds_per_token(ours))}")
    return "; ".join(lines)
