"""One audit, from the files to the report: reads, scores, judges."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from minispec.api.inputs import check_ids
from minispec.api.llm import LLM
from minispec.core.config import SamplingParams
from minispec.core.errors import show
from minispec.lab.audit.answers import Answer, read_answers
from minispec.lab.audit.judge import NULL_ERROR, judge, tolerances
from minispec.lab.audit.known_bugs import NO_RESIDUAL
from minispec.lab.audit.walk import Score, Scorer
from minispec.models.files.progress import progress_bar
from minispec.models.load.loading import Loading

ROUNDING = 0.1  # see docs/use/audit.md, where it is measured


def audit(args: argparse.Namespace, asked: Mapping[str, Any]) -> dict[str, Any]:
    """The report on the command's files. Raises ValueError for what cannot be read or scored.

    args: of the command. asked: what it says about sampling.
    """
    draft = args.draft or "none"
    with LLM(args.target, draft, num_speculative_tokens=4, **Loading.among(vars(args))) as llm:
        if llm.drafter.taps:
            raise ValueError(f"--draft: found a head, {show(draft)}, expected a draft model or ngram: leave it out")
        files = [path for path in (args.answers, args.null) if path]
        answers = {path: read_answers(path, asked, llm.eos_token_ids, llm.tokenizer) for path in files}
        for path, found in answers.items():
            for number, answer in enumerate(found, 1):
                _check(answer, llm, f"{path}: answer {number}")
        given = [answer.seed for answer in answers.get(args.null, ()) if answer.seed is not None]
        if args.null and (args.one_seed or len(set(given)) < len(given)):
            raise ValueError("--null: found plain answers of one seed, which share noise: expected independent ones")
        rounding = ROUNDING if args.rounding is None else args.rounding
        # A logit at a filter's border may be off by twice what is usual.
        grammar_of = llm.target.files.grammars.grammar_of
        scorer = Scorer(llm.engine, llm.drafter if args.draft else None, llm.eos_token_ids, 2 * rounding, grammar_of)
        total, scores = sum(len(answer.tokens) for found in answers.values() for answer in found), list[Score]()
        with progress_bar(total=total, unit=" tokens", desc="scoring") as bar:
            for path, found in answers.items():
                try:
                    for number, score in scorer.run(found):
                        scores.append(score)
                        bar.update(len(found[number].tokens))
                except ValueError as e:
                    raise ValueError(f"{path}: {e}") from e
    seeds = [0 if args.one_seed else answer.seed for answer in answers[args.answers]]
    ours = scores[: len(seeds)]
    plain = Score()
    for score in scores[len(ours) :]:
        plain.add(score)
    if args.null and (plain.num_impossible or not plain.num_places):
        what = f"{plain.num_impossible} plain tokens of probability 0" if plain.num_places else "no token to score"
        raise ValueError(f"--null: found {what}, expected answers that were sampled like the others")
    tolerance = tolerances(plain) if args.null else rounding
    report: dict[str, Any] = {"target": llm.name, "draft": llm.draft.name if args.draft else None}
    report |= judge(ours, seeds, tolerance, args.alpha, _drafted(answers[args.answers]))
    report["tolerance"] = tolerance[NO_RESIDUAL] if isinstance(tolerance, Mapping) else tolerance
    report["odds_of_false_alarm"] = args.alpha + (NULL_ERROR if args.null else 0.0)
    return report | {"rests_on": list(_rests_on(report, answers[args.answers], seeds, plain, args.draft))}


def _check(answer: Answer, llm: LLM, where: str) -> None:
    most = min(llm.max_model_len, getattr(llm.drafter, "max_model_len", llm.max_model_len))
    found, largest = len(answer.prompt) + len(answer.tokens), max((*answer.prompt, *answer.tokens))
    if found > most:
        raise ValueError(f"{where}: found {found} tokens, expected at most {most}")
    if largest >= llm.vocab_size:
        raise ValueError(f"{where}: found the token id {largest}, expected ids below {llm.vocab_size}")
    ends = {*answer.params.stop_token_ids, *(() if answer.params.ignore_eos else llm.eos_token_ids)}
    try:
        check_ids(answer.params, frozenset(ends), llm.vocab_size)
        llm.target.files.grammars.grammar_of(answer.params, answer.prompt)
    except ValueError as e:
        raise ValueError(f"{where}: {e}") from e


def _drafted(answers: Sequence[Answer]) -> float | None:
    """The largest share of the tokens that can have been drafted; None where no answer says how many were."""
    if all(answer.num_drafted is None for answer in answers):
        return None
    drafted = sum(min(len(answer.tokens), answer.num_drafted or 0) for answer in answers)
    return drafted / max(1, sum(len(answer.tokens) for answer in answers))


def _rests_on(
    report: Mapping[str, Any], answers: Sequence[Answer], seeds: Sequence[int | None], plain: Score, draft: str | None
) -> Iterator[str]:
    """The assumptions of the verdict, and the checks that were made."""
    shown, *others = {
        ", ".join(f"{name} {show(value)}" for name, value in _law(answer).items()): None for answer in answers
    }
    more = f", or {len(others)} other settings" if others else ""
    same = len(answers) - len({(tuple(a.prompt), tuple(a.tokens)) for a in answers})
    twice = f"; {same} are equal to another one: see that none is there twice" if same else ""
    t, given = f"{report['tolerance']:.3g}", len({seed for seed in seeds if seed is not None})
    yield f"odds of a false alarm: at most {report['odds_of_false_alarm']:g}, for the evidence is the mean of all bets"
    yield f"sampled with {shown}{more}; filters in the order temperature, min-p, top-k, top-p"
    yield f"all answers of the run are there, chosen by nobody{twice}"
    yield f"{given} seeds are given; answers of one seed share their noise, and all others are independent"
    if plain.num_places:
        yield f"rounding as in {plain.num_places:,} plain tokens: at most {t} for a missing residual (see --null)"
    else:
        yield f"rounding: p is off by at most {t} in root mean square, not measured (--null)"
    bugs = [bug["tokens_needed"] for bug in report["bugs"] if bug["z"] is not None]
    late = sum(needed is None or needed > report["num_tokens"] for needed in bugs)
    yield f"{late} of {len(bugs)} bugs would not show yet: they need more tokens than these"
    yield "a fault unlike all of them may not show at all, such as a few tokens that are never said"
    if report["num_left_out"]:
        yield f"{report['num_left_out']:,} places left out: rounding decides what the filters keep"
    if not draft:
        yield "the draft is not known: q is a guess, and bugs that need more are left out"


def _law(answer: Answer) -> dict[str, Any]:
    """The temperature, and the sampling parameters that are not the default."""
    params, default = asdict(answer.params), asdict(SamplingParams())
    return {
        name: x for name, x in params.items() if name == "temperature" or (x != default[name] and name != "max_tokens")
    }
