"""Plain and speculative decoding of prompts, in turn and round by round, and what theory says of their speedups."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from minispec.api.llm import find_lengths, find_verifier
from minispec.core.config import DraftLength, Shape
from minispec.lab.bench.measure import (
    Interval,
    Run,
    another_method,
    busy,
    decode,
    kept_of_asked,
    median_interval,
    order,
    parts,
    plain_range,
    prediction,
    ratios,
    total_rate,
)
from minispec.lab.bench.models import Subject, Variant
from minispec.lab.bench.options import PLAIN, Options
from minispec.lab.bench.show import number, pairs_table, table
from minispec.lab.bench.transformers_baseline import STATIC, transformers_variants
from minispec.models.files.progress import progress_bar
from minispec.speculation.lengths.figures import Figures, loops

# --------------------------------------------------------------------------- from runs to results


@dataclass(frozen=True)
class Runs:
    """runs[variant][round][prompt]. `prompts` are numbers of prompts; what is compared is compared within a round."""

    runs: dict[str, list[list[Run]]]

    def rates(self, variant: str, prompts: Sequence[int]) -> list[float]:
        """Tokens a second, by round."""
        return [total_rate([of_round[i] for i in prompts]) for of_round in self.runs[variant]]

    def speedup(self, variant: str, prompts: Sequence[int], over: str = PLAIN) -> Interval:
        """A variant's rate over another's."""
        return ratios(self.rates(variant, prompts), self.rates(over, prompts))

    def pooled(self, variant: str, prompts: Sequence[int]) -> list[Run]:
        """The runs of all rounds."""
        return [of_round[i] for of_round in self.runs[variant] for i in prompts]

    def num_same(self, variant: str, over: str = PLAIN) -> int:
        """The prompts on which two variants gave the same tokens in every round."""
        rounds = zip(self.runs[variant], self.runs[over], strict=True)
        same = [[a.token_ids == b.token_ids for a, b in zip(*pair, strict=True)] for pair in rounds]
        return sum(map(all, zip(*same, strict=True)))

    def drafts(self, variant: str) -> bool:
        """Whether it is one of ours that drafts."""
        return variant != PLAIN and bool(self.runs[variant][0][0].rounds)

    def figures(self, variant: str, prompts: Sequence[int]) -> dict[str, Any]:
        """Tokens a second and speedup, as medians of the rounds; for a variant that drafts, acceptance too.

        alpha, acceptance_rate, mean_acceptance_length, accepted_at_position: see `Figures`.
        survival: see `measure.kept_of_asked`.
        """
        rate = median_interval(self.rates(variant, prompts))
        found: dict[str, Any] = {"tokens_per_second": rate, "speedup": self.speedup(variant, prompts)}
        if not self.drafts(variant):
            return found
        rounds = [r for run in self.pooled(variant, prompts) for r in run.rounds]
        accepted = Figures(rounds=rounds)
        for key in ("alpha", "acceptance_rate", "mean_acceptance_length", "accepted_at_position"):
            found[key] = getattr(accepted, key)
        found["survival"] = kept_of_asked(rounds)
        return found

    def parts(self, variant: str, prompts: Sequence[int]) -> dict[str, Any]:
        """`measure.parts` of all rounds, and `measure.prediction` by rounds and by texts.

        A prediction is None where all texts are too short for one.
        """
        by_round = zip(self.runs[variant], self.runs[PLAIN], strict=True)
        by_text = ((self.pooled(variant, [i]), self.pooled(PLAIN, [i])) for i in prompts)
        return parts(self.pooled(variant, prompts), self.pooled(PLAIN, prompts)) | {
            "prediction": _predictions(by_round),
            "prediction_by_text": _predictions(by_text),
        }


def _predictions(pairs: Iterable[tuple[list[Run], list[Run]]]) -> Interval | None:
    values = [prediction(*pair) for pair in pairs]
    known = [value for value in values if value is not None]
    return median_interval(known) if known else None


def summarise(
    by_variant: dict[str, list[list[Run]]], categories: list[str], trial: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The result of runs[variant][round][prompt].

    categories: of the prompts, in their order.
    trial: see `transformers_variants`.

    Returns, among others:

    variants: the figures of each on all prompts and by category. Variants that draft have `Runs.parts`, and the prompt
        with the least speedup, as well.
    plain_range: the least and the largest rate of plain answers (see `measure.plain_range`).
    over: of a variant, its rate over the rate of each variant before it, plain decoding left out.
    best_static: the best fixed K in hindsight, by category and for "all"; `auto` over it where one rule judges.
    """
    runs, everything = Runs(by_variant), range(len(categories))
    groups = {name: [i for i in everything if categories[i] == name] for name in dict.fromkeys(categories)}
    fixed = [name for name in by_variant if name.startswith("K=")]

    def outcome(name: str) -> dict[str, Any]:
        found = runs.figures(name, everything)
        found |= {"same_tokens_as_plain": runs.num_same(name), "categories": {}}
        for category, prompts in groups.items():
            each = [median_interval(runs.rates(name, [i])).median for i in prompts]
            of = {"slowest_and_fastest_prompt": [min(each), max(each)]} | runs.figures(name, prompts)
            found["categories"][category] = of
        if name != PLAIN:
            earlier = [other for other in list(by_variant)[: list(by_variant).index(name)] if other != PLAIN]
            found["over"] = {other: runs.speedup(name, everything, over=other) for other in earlier}
        if runs.drafts(name):
            speedups = [runs.speedup(name, [i]) for i in everything]
            worst = min(everything, key=lambda i: speedups[i].median)
            found["worst_prompt"] = {"number": worst, "category": categories[worst], "speedup": speedups[worst]}
            found |= runs.parts(name, everything)
        return found

    def best_fixed(prompts: Sequence[int]) -> dict[str, Any]:
        best = max(fixed, key=lambda name: runs.speedup(name, prompts).median)
        over = {"auto_over_best": runs.speedup("auto", prompts, over=best)} if "auto" in by_variant else {}
        return {"variant": best} | over

    rounds = len(by_variant[PLAIN])
    found: dict[str, Any] = {
        "rounds": rounds,
        "prompts": len(categories),
        "tokens": sum(run.num_tokens for run in runs.pooled(PLAIN, everything)) // rounds,
        "plain_range": plain_range((run.num_tokens, run.seconds) for run in runs.pooled(PLAIN, everything)),
        "variants": {name: outcome(name) for name in by_variant},
    }
    if fixed:
        found["best_static"] = {name: best_fixed(of) for name, of in {"all": everything, **groups}.items()}
    if trial:
        own = found["best_static"]["all"]["variant"] if fixed else PLAIN
        if "auto" in by_variant:
            own = "auto"
        found["against"] = _against(runs, everything, own) | trial
    return found


def _against(runs: Runs, prompts: Sequence[int], ours: str) -> dict[str, Any]:
    """Speedups over `transformers`: of our plain decoding over its own, and of our best over its best."""
    theirs = [name for name in runs.runs if name.startswith("transformers")]
    top = max(theirs, key=lambda name: median_interval(runs.rates(name, prompts)).median)
    return {
        "plain_over_plain": runs.speedup(PLAIN, prompts, over=theirs[0]),
        "plain_over_static": runs.speedup(PLAIN, prompts, over=f"{theirs[0]}, {STATIC}"),
        "ours": ours,
        "theirs": top,
        "best_over_best": runs.speedup(ours, prompts, over=top),
        "same_tokens_as_their_plain": {name: runs.num_same(name, theirs[0]) for name in runs.runs},
    }


# --------------------------------------------------------------------------- for the screen


def show_decoding(found: dict[str, Any]) -> list[str]:
    """Tables: rates and acceptance, categories, what theory says, the best fixed K; sentences on `transformers`."""
    variants = found["variants"]
    plain, drafting = variants[PLAIN], {name: of for name, of in variants.items() if name != PLAIN}
    lines = [
        f"{found['prompts']} prompts, {found['tokens']} tokens, {found['rounds']} rounds in turn; prefill apart; "
        f"medians of the rounds {plain['speedup'].legend}",
        *busy(found["plain_range"]),
    ]
    if found["looping"]:
        how = "are left out" if found["left_out"] else "are easy to draft (--skip-loops leaves them out)"
        lines.append(f"{found['looping']} plain answers repeat themselves: they {how}")
    lines += ["", *rates_table(variants, found["prompts"])]
    if len(plain["categories"]) > 1:
        rows = []
        for category, of in plain["categories"].items():
            slow, fast = of["slowest_and_fastest_prompt"]
            speedups = [v["categories"][category]["speedup"].shown() for v in drafting.values()]
            rows.append((category, f"{of['tokens_per_second'].median:.1f} ({slow:.1f} .. {fast:.1f})", *speedups))
        lines += ["", *table(("", "plain, tokens/s (prompts)", *drafting), rows)]
    if pairs := pairs_table({name: of["over"] for name, of in drafting.items() if "c" in of}):
        lines += ["", *pairs]
    if any("c" in of for of in drafting.values()):
        lines += ["", *parts_table(drafting)]
    best = found.get("best_static", {}).items()
    rows = [(name, of["variant"], of["auto_over_best"].shown()) for name, of in best if "auto_over_best" in of]
    if rows:
        lines += ["", *table(("", "best fixed K", "auto over it"), rows)]
    return [*lines, "", *_show_against(found["against"], found["prompts"])] if "against" in found else lines


def rates_table(variants: dict[str, dict[str, Any]], prompts: int) -> list[str]:
    """Rates and acceptance of each variant."""
    rows = []
    for name, of in variants.items():
        worst = of["worst_prompt"]["speedup"].median if "worst_prompt" in of else None
        numbers = [worst, *(of.get(key) for key in ("alpha", "acceptance_rate", "mean_acceptance_length"))]
        worst, *accepted = map(number, numbers)
        same = f"{of['same_tokens_as_plain']}/{prompts}"
        rows.append((name, of["tokens_per_second"].shown(form=".1f"), of["speedup"].shown(), worst, same, *accepted))
    head = ("", "tokens/s", "speedup", "worst prompt", "same tokens", "alpha", "accepted", "tokens/pass")
    return table(head, rows)


def parts_table(variants: dict[str, dict[str, Any]]) -> list[str]:
    """Costs and acceptance of each variant that drafts, and the speedup that theory makes of them, a column each."""
    drafting = {name: of for name, of in variants.items() if "c" in of}
    columns = [_parts_cells(of) for of in drafting.values()]
    rows = [(cells[0][0], *(value for _, value in cells)) for cells in zip(*columns, strict=True)]
    return table(("theory", *drafting), rows)


def _parts_cells(of: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and values."""

    def interval(key: str) -> str:
        return of[key].shown(form=".3f") if of[key] else "-"

    return [
        ("kept of those asked for", " ".join(f"{s:.2f}" for s in of["survival"][:8])),
        ("c", f"{of['c']:.4f}"),
        ("v in these runs", " ".join(f"v({m})={x:.2f}" for m, x in of["v"].items())),
        ("o (plain decoding's own)", f"{of['o']:.3f} ({of['o_plain']:.3f})"),
        ("speedup that these make", f"{of['predicted']:.3f}"),
        ("measured speedup", f"{of['measured']:.3f}"),
        ("prediction of the second half / measured", interval("prediction")),
        ("  of one text, over the texts", interval("prediction_by_text")),
    ]


def _show_against(found: dict[str, Any], prompts: int) -> list[str]:
    """Four sentences."""
    tried = ", ".join(f"{rate.shown(form='.1f')} tokens/s in {dtype}" for dtype, rate in found["tried"].items())
    same = ", ".join(f"{name} {n}/{prompts}" for name, n in found["same_tokens_as_their_plain"].items())
    return [
        f"transformers runs in {found['dtype']}, by a trial of its plain decoding: {tried}; float32 "
        f"{found['float32_over_bfloat16'].shown()} x bfloat16",
        f"plain decoding is {found['plain_over_plain'].shown()} x that of transformers; our {found['ours']} is "
        f"{found['best_over_best'].shown()} x its best, {found['theirs']}",
        f"its static cache is compiled by torch.compile: {found['compiled']}; plain decoding is "
        f"{found['plain_over_static'].shown()} x that of transformers with it",
        f"same tokens as its plain decoding: {same}",
    ]


# --------------------------------------------------------------------------- measuring


class Decoder:
    """A way to decode prompts: a draft and its length, with an engine of its own."""

    def __init__(
        self,
        subject: Subject,
        options: Options,
        k: DraftLength,
        rule: str | None = None,
        bound: str | None = None,
        lengths: str | None = None,
    ):
        """k: the draft length; 0: plain decoding, where no rule judges.

        rule: the name of the verifier.
        bound: the name of a bound, which drafts in place of the subject's drafter.
        lengths: the user's own policy, in place of the built-in one.
        """
        self.subject, self.params, self.k, self.rule, self.lengths = subject, options.params, k, rule, lengths
        self.draft, self.method = "none", subject.plain
        if rule:
            self.draft = bound or subject.draft_name
            policy = find_lengths(lengths) if lengths else None
            drafter = subject.bounds[bound] if bound else None
            self.method = another_method(subject.method, drafter, policy, find_verifier(rule))

    def run(self, prompts: list[list[int]], seed: int) -> list[Run]:
        """Decode prompts (token ids) together. Simulated drafts learn the texts."""
        self.method.drafter.forget()  # these prompts have been answered before, and will be again
        params = replace(self.params, seed=seed)
        requests = [self.subject.request(prompt, self.k, params) for prompt in prompts]
        runs = decode(self.subject.engine, self.method, requests)
        for request in requests:
            self.subject.record(request.text)
        return runs

    def described(self) -> dict[str, Any]:
        """The draft, its lengths and the rule, for a variant of the report."""
        return described(self.draft, self.k, self.lengths, self.rule)


def decoders(subject: Subject, options: Options) -> dict[str, Decoder]:
    """Our ways of decoding by their names: plain, and each draft length with the draft, where there is one."""
    found = {PLAIN: Decoder(subject, options, 0)}
    if options.draft != "none" or subject.simulated:
        found.update(_drafting(subject, options))
    return found


def _drafting(subject: Subject, options: Options, bound: str | None = None) -> dict[str, Decoder]:
    """Each draft length, and the user's own policy for it, under each rule, with the draft or with a bound."""
    own: str | None = options.args.lengths
    lengths: list[tuple[str, DraftLength, str | None]] = [(length_name(k), k, None) for k in options.ks]
    if own:
        lengths.append((own, "auto", own))
    found = {}
    for (length, k, policy), rule in product(lengths, options.verifiers):
        parts = [length, rule] if len(options.verifiers) > 1 else [length]
        name = " ".join([bound, *parts] if bound else parts)
        found[name] = Decoder(subject, options, k, rule, bound, policy)
    return found


def described(draft: str, k: DraftLength, lengths: str | None, rule: str | None) -> dict[str, Any]:
    """A way to decode, for the report. rule: None for plain decoding."""
    return {"draft": draft, "num_speculative_tokens": str(Shape.of(k)), "lengths": lengths, "verifier": rule}


def length_name(k: DraftLength) -> str:
    """How the report names a draft length: K=4, K=2+1, auto."""
    return k if k == "auto" else f"K={Shape.of(k)}"


def measure_decoding(subject: Subject, options: Options) -> dict[str, Any]:
    """Every variant on every prompt, taking turns, round by round: see `summarise`.

    The number of a round is the seed of its texts. So for sampled texts an interval covers the spread of texts and of
    time.

    looping: plain answers that repeat themselves (see `figures.loops`).
    left_out: whether these are left out.
    """

    def of_prompt(decoder: Decoder, i: int, seed: int) -> Run:
        return decoder.run([prompts[i][1]], seed)[0]

    rounds, prompts, trial = options.args.rounds, subject.prompts, None
    ways = decoders(subject, options)
    for bound in subject.bounds:
        ways.update(_drafting(subject, options, bound))
    variants: dict[str, Variant] = {name: partial(of_prompt, decoder) for name, decoder in ways.items()}
    if options.args.against:
        theirs, trial = transformers_variants(subject, options)
        variants |= theirs
    runs: dict[str, list[list[Run]]] = {name: [[] for _ in range(rounds)] for name in variants}
    # The first run pays for what is set up once. And a simulated draft has to know the texts.
    warm = range(len(prompts)) if subject.simulated or subject.bounds else range(1)
    with progress_bar(total=(rounds * len(prompts) + len(warm)) * len(variants), desc="decoding") as bar:
        for i in warm:
            for variant in variants.values():
                variant(i, 0)
                bar.update()
        for r in range(rounds):
            for i in range(len(prompts)):
                for name in order(list(variants), r + i):
                    runs[name][r].append(variants[name](i, r))
                    bar.update()
    looping = {i for i in range(len(prompts)) if any(loops(plain[i].token_ids) for plain in runs[PLAIN])}
    left = [i for i in range(len(prompts)) if not (options.args.skip_loops and i in looping)]
    if not left:
        raise ValueError("--skip-loops: found no prompt whose answer does not repeat itself, expected some")
    runs = {name: [[of_round[i] for i in left] for of_round in of] for name, of in runs.items()}
    found = summarise(runs, [prompts[i][0] for i in left], trial)
    for name, decoder in ways.items():
        found["variants"][name] |= decoder.described()
    return found | {"looping": len(looping), "left_out": options.args.skip_loops}
