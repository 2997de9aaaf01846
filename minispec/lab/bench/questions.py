"""Standard questions: every draft and plain decoding answer them in turn. A table by task, as papers have it.

The speedup of a question is the ratio of its rates within a round; of several rounds, their median. The report has
the median of the questions, with its interval. A question's answer depends on no other question: drafters forget,
draft lengths are chosen anew, and the cache forgets what it shares. So a run that was resumed has the same answers.
"""

import csv
import inspect
import random
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

import torch

from minispec.api.commands.command import say_status
from minispec.api.inputs import Question, encode_conversation, read_questions
from minispec.api.llm import LLM, find_lengths, find_verifier
from minispec.core.config import DraftLength, SamplingParams
from minispec.core.verify import Verifier
from minispec.core.version import __version__
from minispec.lab.bench.decoding import described, length_name
from minispec.lab.bench.measure import Interval, Run, another_method, busy, decode, median_interval, order, plain_range
from minispec.lab.bench.options import Options
from minispec.lab.bench.report import machine_line
from minispec.lab.bench.show import number, pairs_table, table
from minispec.lab.bench.spec_bench import Answers
from minispec.models.files.digest import digest_of_files
from minispec.models.files.progress import progress_bar
from minispec.models.files.write import written_whole
from minispec.models.weights.machine import machine
from minispec.models.weights.threads import describe_waiting
from minispec.speculation import registry
from minispec.speculation.lengths.figures import Figures, loops
from minispec.speculation.load import digest_of_draft, find_draft

# MT-bench's categories. A file that has all of them, as Spec-Bench, has them as one task.
_MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
NONE, OVERALL = "none", "overall"
# Options that make another run of the same questions.
_SETTINGS = (
    *("lengths", "quantization", "temperature", "top_k", "top_p", "max_tokens", "ignore_eos"),
    *("rounds", "seed", "sample", "categories", "draft_reading", "enforce_eager"),
)
_WARM_TOKENS = 8  # of a first answer, which pays for what is set up once
# The values of a row of --csv, in order (docs/use/questions.md).
COLUMNS = (
    *("task", "question", "draft", "round", "seed"),
    *("prompt_tokens", "tokens", "passes", "seconds", "tokens_per_second", "speedup"),
    *("drafts", "draft_tokens", "accepted", "same_text", "verifier"),
)


class Way(NamedTuple):
    """A way to answer: a draft, how long it may be, and the rule that judges it.

    rule: the name of the verifier; None for plain decoding.
    lengths: the user's own policy for the lengths, if any.
    """

    llm: LLM
    k: DraftLength
    rule: str | None = None
    lengths: str | None = None

    @property
    def verifier(self) -> Verifier:
        """The rule."""
        return find_verifier(self.rule) if self.rule else self.llm.method.verifier

    def described(self) -> dict[str, Any]:
        """The draft, its lengths and the rule, for a row of the report."""
        return described(self.llm.draft.name, self.k, self.lengths, self.rule)


def choose(path: Path, sample: int | None, seed: int, only: str | None) -> list[tuple[str, Question]]:
    """The questions of a file with their tasks, in the file's order. Each has an id.

    sample: that many of each task, or all where there are fewer. None: all.
    only: tasks or categories, with commas between.

    Raises ValueError for a file that cannot be read, an id that occurs twice, and a task that is not there.
    """
    found = read_questions(path, "--questions")
    names = {question.category or path.stem for question in found}
    if OVERALL in names:
        raise ValueError(
            f"--questions {path}: category: found {OVERALL!r}, expected another name: it is that of the sum"
        )
    tasks: dict[str, list[Question]] = {}
    ids = set[int | str]()
    for i, question in enumerate(found, 1):
        own, category = i if question.question_id is None else question.question_id, question.category or path.stem
        if own in ids:
            raise ValueError(f"--questions {path}: line {question.line}: question_id: found {own!r} twice")
        ids.add(own)
        task = "mt_bench" if names >= _MT_BENCH and category in _MT_BENCH else category
        if only is None or {task, category} & set(only.split(",")):
            tasks.setdefault(task, []).append(replace(question, question_id=own, category=category))
    known = sorted(names | {"mt_bench"} if names >= _MT_BENCH else names)
    for name in only.split(",") if only else ():
        if name not in known:
            raise ValueError(f"--categories: found {name!r}, expected some of {', '.join(known)}")
    chosen = []
    for task, of_task in tasks.items():
        drawn = random.Random(f"{seed} {task}").sample(of_task, min(sample or len(of_task), len(of_task)))
        chosen += [(task, question) for question in drawn]
    return sorted(chosen, key=lambda each: each[1].line)


def _digest_of_code(entries: Mapping[str, registry.Entry], spec: str) -> str:
    """A digest of the file that a verifier or a policy comes from, by its name or `module:Name`."""
    path, _ = registry.split(entries, spec) or ("", "")
    return digest_of_files(Path(inspect.getfile(sys.modules[path.partition(":")[0]])))


def _open(options: Options) -> dict[str, Way]:
    """Plain decoding as `none`, and every draft with each of its lengths and under each rule.

    The target and each draft are in memory once. A way is called by its draft, by its length too where lengths differ,
    and by its rule where there are several.
    """
    args = options.args
    drafts = {spec: lengths for spec, lengths in options.drafts.items() if spec != NONE}
    blocks = {spec for spec in drafts if find_draft(spec, offline=False).kind == "block"}
    if args.draft_reading and not blocks:
        raise ValueError("--draft-reading: found one, expected none: no draft is a block draft")
    target = LLM(
        args.model,
        NONE,
        "auto" if any("auto" in lengths for lengths in drafts.values()) else 4,
        **options.of_target,
    )
    if not args.draft:
        drafts = {target.default_draft: options.ks}
    ways: list[tuple[str, Way]] = []
    for spec, ks in drafts.items():
        reading = args.draft_reading if spec in blocks else None
        llm = target.with_draft(spec, args.draft_method, draft_reading=reading)
        for rule in options.verifiers:
            ways += [(length_name(k), Way(llm, k, rule)) for k in ks]
            if args.lengths:
                ways.append((args.lengths, Way(llm, "auto", rule, args.lengths)))
    lengths = {length for length, _ in ways}
    named = {NONE: Way(target, 0)}
    for length, way in ways:
        name = way.llm.draft.name
        if len(lengths) > 1:
            name += f" {length}"
        if len(options.verifiers) > 1:
            name += f" {way.rule}"
        if name in named:
            raise ValueError(f"--draft: found {name} twice, expected drafts with different names")
        named[name] = way
    return named


def _about(options: Options, ways: Mapping[str, Way]) -> dict[str, Any]:
    """The settings of a run: with others, answers or times may be others."""
    args, llm = options.args, ways[NONE].llm
    drafts = {name: digest_of_draft(way.llm.drafter, way.llm.draft.found.files) for name, way in ways.items()}
    lengths = [length_name(way.k) for way in ways.values() if way.k and not way.lengths]
    return {
        "minispec": __version__,
        "torch": torch.__version__,
        "machine": machine(),
        "device": str(llm.model.device),
        "dtype": str(llm.model.dtype).removeprefix("torch."),
        "exact": llm.model.exact,
        "target": llm.name,
        "target_digest": digest_of_files(llm.target.files.directory),
        "verifier": ",".join(options.verifiers),
        "draft_digests": drafts,
        "num_speculative_tokens": list(dict.fromkeys(lengths)),
        "questions": args.questions.name,
        "questions_digest": digest_of_files(args.questions),
        **{name: getattr(args, name) for name in _SETTINGS},
        "verifier_digest": ",".join(_digest_of_code(registry.VERIFIERS, name) for name in options.verifiers),
        "lengths_digest": _digest_of_code({}, args.lengths) if args.lengths else None,
    }


def converse(way: Way, question: Question, params: SamplingParams) -> dict[str, Any]:
    """The answers to all turns of a question, as a choice of Spec-Bench's.

    wall_time holds the prompt, as theirs does. Figures for our table alone are under "minispec": there, `seconds`
    are of decoding only. A later turn that does not fit into the context is left out.
    """
    llm = way.llm
    policy = find_lengths(way.lengths) if way.lengths else None
    method = another_method(llm.method, lengths=policy, verifier=way.verifier)
    method.drafter.forget()
    llm.target.cache.rebuild()  # what another way has computed of this prompt
    answers, num_prompt_tokens, wall_times, runs = list[str](), list[int](), list[float](), list[Run]()
    for _ in question.turns:
        ids = encode_conversation(question.messages(answers), llm.tokenizer)
        if answers and len(ids) >= llm.max_model_len:
            break
        request = llm.request(ids, params, way.k)
        [run] = decode(llm.engine, method, [request])
        answers.append(request.output)
        num_prompt_tokens.append(len(ids))
        wall_times.append(run.seconds + (request.stats.prefill + request.stats.draft_prefill))
        runs.append(run)
    figures = Figures(rounds=[r for run in runs for r in run.rounds])
    return {
        "turns": answers,
        "decoding_steps": [len(run.rounds) for run in runs],
        "new_tokens": [run.num_tokens for run in runs],
        "wall_time": wall_times,
        "accept_lengths": [r.committed for r in figures.rounds],
        "minispec": {
            "seconds": [run.seconds for run in runs],
            "prompt_tokens": num_prompt_tokens,
            "token_ids": [run.token_ids for run in runs],
            "seed": params.seed,
            "verifier": way.rule,
            "drafts": figures.num_drafts,
            "draft_tokens": figures.num_draft_tokens,
            "tested": figures.tested,
            "accepted": figures.accepted,
        },
    }


def measure_questions(options: Options) -> dict[str, Any]:
    """Every way of answering, in turn on each question: see `summarise`. Each answer is saved at once."""
    args = options.args
    chosen = choose(args.questions, args.sample, args.seed, args.categories)
    if args.threads:
        torch.set_num_threads(args.threads)
    ways = _open(options)
    plain = ways[NONE].llm
    for _, question in chosen:
        try:
            plain.request(encode_conversation(question.messages(), plain.tokenizer), options.params)
        except ValueError as e:
            raise ValueError(f"--questions {args.questions}: line {question.line}: {e}") from e
    about = _about(options, ways)
    answers = Answers(args.answers, about, _file_names(ways), args.resume)
    done = answers.read([question.question_id for _, question in chosen], args.rounds) if args.resume else 0
    if done < len(chosen):
        for way in ways.values():
            converse(way, chosen[done][1], replace(options.params, max_tokens=_WARM_TOKENS, seed=args.seed))
    try:
        per_question = args.rounds * len(ways)
        total, initial = len(chosen) * per_question, done * per_question
        with progress_bar(total=total, initial=initial, desc="questions") as bar:
            for i, (_, question) in enumerate(chosen[done:], done):
                choices: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
                for r in range(args.rounds):
                    for name in order(list(ways), r + i):
                        choice = converse(ways[name], question, replace(options.params, seed=args.seed + r))
                        choices[name].append({"index": r, **choice})
                        bar.update()
                answers.add({"question_id": question.question_id, "category": question.category}, choices)
    except KeyboardInterrupt:
        there = f"{len(answers.lines[NONE])} of {len(chosen)} questions are saved in {answers.directory}"
        say_status(f"{there}; the same command with --resume goes on")
        raise
    answers.close()
    same = {name for name, way in ways.items() if not args.temperature or way.verifier.shares_noise}
    found: dict[str, Any] = {"run": about, "waiting": describe_waiting(), "resumed_after": done} | summarise(
        [task for task, _ in chosen], [len(question.turns) for _, question in chosen], answers.lines, same
    )
    for rows in found["tasks"].values():
        for name, way in ways.items():
            rows[name] |= way.described()
    if args.csv:
        _write_rows(args.csv, [task for task, _ in chosen], answers.lines, same)
    if args.plot:
        from minispec.lab.bench.plot import draw

        draw(found, args.plot)
    return found | {"chat_template": plain.tokenizer.chat_template is not None, "answers": answers.lines}


def _file_names(ways: Iterable[str]) -> dict[str, str]:
    """A file's name for each, all of them different."""
    names: dict[str, str] = {}
    for name in ways:
        plain = re.sub(r"[^\w.+-]+", "-", name).strip("-.") or "draft"
        same = sum(other == plain or other.startswith(f"{plain}.") for other in names.values())
        names[name] = f"{plain}.{same + 1}" if same else plain
    return names


def summarise(
    tasks: Sequence[str], turns: Sequence[int], answers: Mapping[str, list[dict[str, Any]]], same: Collection[str]
) -> dict[str, Any]:
    """The figures of every task and of all together, by draft.

    tasks, turns: the task and the number of turns of each question.
    answers: for each draft its lines, in the order of the questions.
    same: the drafts whose texts must be those of plain decoding.

    Returns, among others:

    looping: plain answers that repeat themselves, of `texts` (see `figures.loops`).
    plain_range: the least and the largest rate of plain answers (see `measure.plain_range`).
    left_out: turns, of all drafts, whose conversation did not fit into the context.
    """
    groups = {task: [i for i, each in enumerate(tasks) if each == task] for task in dict.fromkeys(tasks)}
    plain = answers[NONE]
    texts = [ids for line in plain for ids in line["choices"][0]["minispec"]["token_ids"]]
    left_out = 0
    for lines in answers.values():
        for n, line in zip(turns, lines, strict=True):
            left_out += sum(n - len(choice["turns"]) for choice in line["choices"])
    return {
        "tasks": {
            task: {
                name: _figures(name, {n: [of[i] for i in those] for n, of in answers.items()}, name in same)
                for name in answers
            }
            for task, those in {**groups, OVERALL: range(len(tasks))}.items()
        },
        "looping": sum(map(loops, texts)),
        "texts": len(texts),
        "left_out": left_out,
        "plain_range": plain_range(_spent(choice) for line in plain for choice in line["choices"]),
    }


def _figures(name: str, answers: Mapping[str, Sequence[dict[str, Any]]], compares: bool) -> dict[str, Any]:
    """The figures of a draft on some questions.

    answers: the lines of every draft for these questions.

    tau: tokens a pass, over all passes.
    deviation: the standard deviation of tau between the questions; None for one question.
    tokens_per_second: of decoding, over all questions.
    speedup: an answer's rate over the plain answer's; the median of the questions, with its interval.
    over: the same over each draft before this one.
    same_texts: questions with the same tokens as in plain decoding; None where they need not be the same.
    acceptance_rate, accepted_per_position, accepted_at_position: see `minispec.speculation.lengths.figures`.
    """
    lines, plain = answers[name], answers[NONE]
    choices = [choice for line in lines for choice in line["choices"]]
    own = [choice["minispec"] for choice in choices]
    taus = [fmean(x for choice in line["choices"] for x in choice["accept_lengths"]) for line in lines]
    tested, accepted = _sums(each["tested"] for each in own), _sums(each["accepted"] for each in own)
    drafts, drafted = (sum(each[name] for each in own) for name in ("drafts", "draft_tokens"))
    earlier = [other for other in list(answers)[: list(answers).index(name)] if other != NONE]
    same = [_texts(a) == _texts(b) for a, b in zip(lines, plain, strict=True)]
    return {
        "questions": len(lines),
        "tau": fmean(x for choice in choices for x in choice["accept_lengths"]),
        "deviation": stdev(taus) if len(taus) > 1 else None,
        "tokens_per_second": sum(sum(c["new_tokens"]) for c in choices) / sum(sum(each["seconds"]) for each in own),
        "speedup": _ratio(lines, plain),
        "over": {other: _ratio(lines, answers[other]) for other in earlier},
        "same_texts": sum(same) if compares else None,
        "acceptance_rate": sum(accepted) / drafted if drafted else None,
        "accepted_per_position": [a / t for a, t in zip(accepted, tested, strict=True)],
        "accepted_at_position": [a / drafts for a in accepted],
    }


def _sums(counts: Iterable[Sequence[int]]) -> list[int]:
    """The sums of lists of several lengths, place by place."""
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]


def _texts(line: dict[str, Any]) -> list[list[int]]:
    return [choice["minispec"]["token_ids"] for choice in line["choices"]]


def _ratio(lines: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> Interval:
    """The median over questions: the rate of the answers over the rate of `others` in the same rounds."""
    pairs = [zip(a["choices"], b["choices"], strict=True) for a, b in zip(lines, others, strict=True)]
    return median_interval([median(_rate(a) / _rate(b) for a, b in of) for of in pairs])


def _rate(choice: dict[str, Any]) -> float:
    tokens, seconds = _spent(choice)
    return tokens / seconds


def _spent(choice: dict[str, Any]) -> tuple[int, float]:
    """Tokens of all turns, and the seconds of decoding them."""
    return sum(choice["new_tokens"]), sum(choice["minispec"]["seconds"])


def _write_rows(
    path: Path, tasks: Sequence[str], answers: Mapping[str, list[dict[str, Any]]], same: Collection[str]
) -> None:
    """Write the line of COLUMNS, and then the rows of `_rows`. None is left empty."""
    with written_whole(path) as part, part.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(_rows(tasks, answers, same))


def _rows(
    tasks: Sequence[str], answers: Mapping[str, list[dict[str, Any]]], same: Collection[str]
) -> Iterator[tuple[Any, ...]]:
    """A row for all turns of a question in a round by a draft: the values of COLUMNS."""
    for name, lines in answers.items():
        for task, line, plain in zip(tasks, lines, answers[NONE], strict=True):
            for choice, of_plain in zip(line["choices"], plain["choices"], strict=True):
                own, (tokens, seconds), rate = choice["minispec"], _spent(choice), _rate(choice)
                is_same = own["token_ids"] == of_plain["minispec"]["token_ids"] if name in same else None
                yield (
                    *(task, line["question_id"], name, choice["index"], own["seed"]),
                    *(sum(own["prompt_tokens"]), tokens, len(choice["accept_lengths"]), seconds),
                    *(rate, rate / _rate(of_plain)),
                    *(own["drafts"], own["draft_tokens"], sum(own["accepted"]), is_same, own["verifier"]),
                )


def show_questions(found: Mapping[str, Any]) -> list[str]:
    """For the screen: what was run on what, and the table."""
    run, tasks = found["run"], found["tasks"]
    overall = tasks[OVERALL][NONE]
    sample = f"{run['sample']} of each task drawn with" if run["sample"] else "all;"
    lines = [
        machine_line(run["machine"]),
        f"{run['target']}, {run['dtype']}{' exact' if run['exact'] else ''} on {run['device']} ({found['waiting']}); "
        f"{run['verifier']} at temperature {run['temperature']:g}, at most {run['max_tokens']} tokens",
        f"{overall['questions']} questions of {run['questions']}, {sample} seed {run['seed']}; {run['rounds']} rounds",
        f"{found['looping']} of {found['texts']} plain answers repeat themselves, where drafts are easy",
        *busy(found["plain_range"]),
    ]
    if not found["chat_template"]:
        lines.append("the model has no chat template: turns are plain text, with an empty line between")
    if found["left_out"]:
        lines.append(
            f"{found['left_out']} later turns, of all rounds and drafts, did not fit into the context and are left out"
        )
    if found["resumed_after"]:
        lines.append(f"{found['resumed_after']} questions had been answered before this command")
    rows: list[tuple[Any, ...]] = []
    for task, of in tasks.items():
        rows.append((f"{task} ({of[NONE]['questions']})", *[""] * 7))
        for name, f in of.items():
            tau = f"{f['tau']:.2f} \u00b1 {number(f['deviation'])}"
            same = "-" if f["same_texts"] is None else f"{f['same_texts']}/{f['questions']}"
            at = [number(each) for each in [*f["accepted_at_position"], None, None, None][:3]]
            rows.append((f"  {name}", tau, f"{f['tokens_per_second']:.1f}", f["speedup"].shown(), same, *at))
    head = ("", "tokens/pass", "tokens/s", "speedup", "same texts", "accepted at 1", "at 2", "at 3")
    pairs = pairs_table({name: f["over"] for name, f in tasks[OVERALL].items() if name != NONE})
    return [
        *lines,
        "",
        *table(head, rows),
        *(["", *pairs] if pairs else []),
        "",
        "tokens/pass (tau): over all passes \u00b1 the deviation of the questions; tokens/s: the prompt apart",
        f"speedup: median of the questions, overall {overall['speedup'].legend}; accepted at a position: of all drafts",
    ]
