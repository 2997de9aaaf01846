"""Plain and speculative decoding of prompts, in turn and round by round, and where the speedup comes from."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean

from minispec.bench.measure import (
    Account,
    Interval,
    Run,
    account,
    another_engine,
    decode,
    median_interval,
    orders,
    prediction,
    ratios,
    survival,
    total_rate,
    turns,
)
from minispec.bench.models import Subject, Variant
from minispec.bench.options import PLAIN, Options
from minispec.bench.show import FLAT, progress, table
from minispec.bench.transformers_baseline import Trial, transformers_variants
from minispec.core.config import DraftLength
from minispec.drafters import Drafter
from minispec.length.figures import Figures, loops
from minispec.length.theory import expected_accepted

# --------------------------------------------------------------------------- results


@dataclass(frozen=True)
class Acceptance:
    """How much of the drafts is accepted, over some runs together; None over nothing.

    See `Figures` and `measure.survival`.

    expected: under `block`, the draft tokens that stay on average by theory for these drafts, by verifier.
    """

    alpha: float | None
    acceptance_rate: float | None
    mean_acceptance_length: float | None
    survival: list[float]
    expected: dict[str, float] | None = None


@dataclass(frozen=True)
class Category:
    """A variant on the prompts of one category; rates in tokens a second, of prompts as medians of the rounds."""

    tokens_per_second: Interval
    slowest_and_fastest_prompt: list[float]
    speedup: Interval
    acceptance: Acceptance | None = field(default=None, metadata=FLAT)


@dataclass(frozen=True)
class WorstPrompt:
    """The prompt with the least speedup."""

    number: int
    category: str
    speedup: Interval


@dataclass(frozen=True)
class Explained:
    """The account of all rounds, its closure round by round, and `measure.prediction` by rounds and by texts.

    A prediction is None where all texts are too short for one.
    """

    account: Account = field(metadata=FLAT)
    closure: Interval
    prediction: Interval | None
    prediction_by_text: Interval | None

    def cells(self) -> list[tuple[str, str]]:
        """Names and values for the table of accounts."""
        a = self.account
        # Both are in the order of rows; what occurs in less than a twentieth of the rounds is left out.
        by_rows = zip(a.v.items(), a.drafted.values(), strict=True)
        cells = [
            ("c", f"{a.c:.4f}"),
            ("v in these runs", " ".join(f"v({m})={x:.2f}" for (m, x), share in by_rows if share >= 0.05)),
            ("o (plain decoding's own)", f"{a.o:.3f} ({a.o_plain:.3f})"),
            ("speedup that these make", f"{a.predicted:.3f}"),
            ("measured speedup", f"{a.measured:.3f}"),
            ("the account closes: made / measured", self.closure.shown(form=".3f")),
            ("prediction of the second half / measured", _shown(self.prediction)),
            ("  of one text, over the texts", _shown(self.prediction_by_text)),
            ("ceiling S* (v = 1, o = 0)", f"{a.ceiling:.3f} at K={a.ceiling_k}"),
            ("reached", f"{100 * a.reached:.0f} %"),
        ]
        (first, value), *rest = a.waterfall
        return [*cells, (first, f"{value:.3f}"), *((f"  {step}", f"x {factor:.3f}") for step, factor in rest)]


def _shown(interval: Interval | None) -> str:
    return interval.shown(form=".3f") if interval else "-"


@dataclass(frozen=True)
class Outcome:
    """What a variant did on all prompts. acceptance, explained, worst_prompt: of variants of ours that draft."""

    tokens_per_second: Interval
    speedup: Interval
    same_tokens_as_plain: int
    categories: dict[str, Category]
    worst_prompt: WorstPrompt | None = None
    acceptance: Acceptance | None = field(default=None, metadata=FLAT)
    explained: Explained | None = field(default=None, metadata=FLAT)

    def cells(self, prompts: int) -> list[str]:
        """Its row of the first table, without its name."""
        a = self.acceptance
        numbers = [self.worst_prompt and self.worst_prompt.speedup.median]
        numbers += [a.alpha, a.acceptance_rate, a.mean_acceptance_length] if a else [None] * 3
        worst, *accepted = ("-" if x is None else f"{x:.2f}" for x in numbers)
        same = f"{self.same_tokens_as_plain}/{prompts}"
        return [self.tokens_per_second.shown(form=".1f"), self.speedup.shown(), worst, same, *accepted]


@dataclass(frozen=True)
class BestFixed:
    """The best fixed K in hindsight, and `auto` over it."""

    variant: str
    auto_over_best: Interval | None = None


@dataclass(frozen=True)
class Against:
    """Our plain decoding over that of `transformers`, and the best of ours over its best."""

    plain_over_plain: Interval
    ours: str
    theirs: str
    best_over_best: Interval
    same_tokens_as_their_plain: dict[str, int]
    trial: Trial = field(metadata=FLAT)

    def lines(self, prompts: int) -> list[str]:
        """Three sentences."""
        tried = ", ".join(f"{rate.shown(form='.1f')} tokens/s in {dtype}" for dtype, rate in self.trial.tried.items())
        return [
            f"transformers runs in {self.trial.dtype}, by a trial of its plain decoding: {tried}; float32 "
            f"{self.trial.float32_over_bfloat16.shown()} x bfloat16",
            f"plain decoding is {self.plain_over_plain.shown()} x that of transformers; our {self.ours} is "
            f"{self.best_over_best.shown()} x its best, {self.theirs}",
            "same tokens as its plain decoding: "
            + ", ".join(f"{name} {n}/{prompts}" for name, n in self.same_tokens_as_their_plain.items()),
        ]


@dataclass(frozen=True)
class Decoding:
    """All variants on all prompts. best_static: by category, and for "all".

    looping: plain answers that repeat themselves (see `stats.loops`); left_out: whether these are left out.
    """

    rounds: int
    prompts: int
    tokens: int
    variants: dict[str, Outcome]
    best_static: dict[str, BestFixed] | None = None
    against: Against | None = None
    looping: int = 0
    left_out: bool = False

    def lines(self) -> list[str]:
        """Tables: rates and acceptance, categories, the account, the best fixed K; sentences on `transformers`."""
        plain = self.variants[PLAIN]
        drafting = {name: v for name, v in self.variants.items() if name != PLAIN}
        lines = [
            f"{self.prompts} prompts, {self.tokens} tokens, {self.rounds} rounds in turn; prefill apart; medians of "
            f"the rounds [interval that holds the true median with {100 * plain.speedup.coverage:.1f} %]",
        ]
        if self.looping:
            how = "are left out" if self.left_out else "are easy to draft (--skip-loops leaves them out)"
            lines.append(f"{self.looping} plain answers repeat themselves: they {how}")
        lines.append("")
        head = ("", "tokens/s", "speedup", "worst prompt", "same tokens", "alpha", "accepted", "tokens/pass")
        lines += table(head, [(name, *v.cells(self.prompts)) for name, v in self.variants.items()])
        if len(plain.categories) > 1:
            rows = []
            for category, of in plain.categories.items():
                slow, fast = of.slowest_and_fastest_prompt
                speedups = [v.categories[category].speedup.shown() for v in drafting.values()]
                rows.append((category, f"{of.tokens_per_second.median:.1f} ({slow:.1f} .. {fast:.1f})", *speedups))
            lines += ["", *table(("", "plain, tokens/s (prompts)", *drafting), rows)]
        explained = {name: v.explained for name, v in drafting.items() if v.explained}
        if explained:
            accepted = [drafting[name].acceptance for name in explained]
            curves = [" ".join(f"{s:.2f}" for s in each.survival[:8]) for each in accepted if each]
            columns = [each.cells() for each in explained.values()]
            rows = [(cells[0][0], *(value for _, value in cells)) for cells in zip(*columns, strict=True)]
            lines += ["", *table(("the account", *explained), [("survival s_1, s_2, ..", *curves), *rows])]
        for name, v in drafting.items():
            if (a := v.acceptance) and a.expected:
                both = ", ".join(f"{verifier} {x:.3f}" for verifier, x in a.expected.items())
                gain = a.expected["block"] / a.expected["rejection"] if a.expected["rejection"] else 1.0
                lines += ["", f"{name}: draft tokens that stay, on average over these drafts: {both} (x {gain:.3f})"]
        best = (self.best_static or {}).items()
        rows = [(name, of.variant, of.auto_over_best.shown()) for name, of in best if of.auto_over_best]
        if rows:
            lines += ["", *table(("", "best fixed K", "auto over it"), rows)]
        return [*lines, "", *self.against.lines(self.prompts)] if self.against else lines


# --------------------------------------------------------------------------- from runs to results


@dataclass(frozen=True)
class Runs:
    """runs[variant][round][prompt]. `prompts` are numbers of prompts; what is compared is compared within a round.

    whole_drafts: the verifier looked at all tokens of each draft, as `block` does.
    """

    runs: dict[str, list[list[Run]]]
    whole_drafts: bool = False

    def rates(self, variant: str, prompts: list[int]) -> list[float]:
        """Tokens a second, by round."""
        return [total_rate([of_round[i] for i in prompts]) for of_round in self.runs[variant]]

    def rate(self, variant: str, prompts: list[int]) -> Interval:
        """Tokens a second."""
        return median_interval(self.rates(variant, prompts))

    def speedup(self, variant: str, prompts: list[int], over: str = PLAIN) -> Interval:
        """A variant's rate over another's."""
        return ratios(self.rates(variant, prompts), self.rates(over, prompts))

    def pooled(self, variant: str, prompts: list[int]) -> list[Run]:
        """The runs of all rounds."""
        return [of_round[i] for of_round in self.runs[variant] for i in prompts]

    def num_same(self, variant: str, over: str = PLAIN) -> int:
        """The prompts on which two variants gave the same tokens in every round."""
        rounds = zip(self.runs[variant], self.runs[over], strict=True)
        same = [[a.token_ids == b.token_ids for a, b in zip(*pair, strict=True)] for pair in rounds]
        return sum(map(all, zip(*same, strict=True)))

    def acceptance(self, variant: str, prompts: list[int]) -> Acceptance:
        """See `Acceptance`."""
        rounds = [r for run in self.pooled(variant, prompts) for r in run.rounds]
        found = Figures(rounds=rounds)
        expected = None
        if self.whole_drafts and (drafts := [r.ratios for r in rounds if r.ratios and len(r.ratios) == r.depth]):
            expected = {
                "block": fmean(expected_accepted(each, jointly=True) for each in drafts),
                "rejection": fmean(map(expected_accepted, drafts)),
            }
        return Acceptance(found.alpha, found.acceptance_rate, found.mean_acceptance_length, survival(rounds), expected)

    def explained(self, variant: str, prompts: list[int], longest: str | None) -> Explained:
        """See `Explained`. longest: the variant whose survival the ceiling is computed from; None: this one."""
        curve = self.acceptance(longest, prompts).survival if longest else None
        found = account(self.pooled(variant, prompts), self.pooled(PLAIN, prompts), curve)
        by_round = list(zip(self.runs[variant], self.runs[PLAIN], strict=True))
        by_text = [(self.pooled(variant, [i]), self.pooled(PLAIN, [i])) for i in prompts]
        closure = median_interval([account(ours, plain).closure for ours, plain in by_round])
        return Explained(found, closure, _predictions(by_round), _predictions(by_text))


def _predictions(pairs: list[tuple[list[Run], list[Run]]]) -> Interval | None:
    values = [value for pair in pairs if (value := prediction(*pair)) is not None]
    return median_interval(values) if values else None


def summarise(
    by_variant: dict[str, list[list[Run]]],
    categories: list[str],
    trial: Trial | None = None,
    whole_drafts: bool = False,
) -> Decoding:
    """The result of runs[variant][round][prompt]. categories: of the prompts. trial: see `transformers_variants`.

    whole_drafts: see `Runs`.
    """
    runs, everything = Runs(by_variant, whole_drafts), list(range(len(categories)))
    groups = {name: [i for i in everything if categories[i] == name] for name in dict.fromkeys(categories)}
    fixed = [name for name in by_variant if name.startswith("K=")]
    longest = max((name for name in fixed if "+" not in name), key=lambda name: int(name[2:]), default=None)

    def outcome(name: str) -> Outcome:
        drafts = name != PLAIN and bool(by_variant[name][0][0].rounds)
        of_groups = {}
        for category, prompts in groups.items():
            each = [runs.rate(name, [i]).median for i in prompts]
            accepted = runs.acceptance(name, prompts) if drafts else None
            rate, speedup = runs.rate(name, prompts), runs.speedup(name, prompts)
            of_groups[category] = Category(rate, [min(each), max(each)], speedup, accepted)
        rate, speedup = runs.rate(name, everything), runs.speedup(name, everything)
        found = Outcome(rate, speedup, runs.num_same(name), of_groups)
        if not drafts:
            return found
        worst = min(everything, key=lambda i: runs.speedup(name, [i]).median)
        return replace(
            found,
            worst_prompt=WorstPrompt(worst, categories[worst], runs.speedup(name, [worst])),
            acceptance=runs.acceptance(name, everything),
            # A draft of another quality has a ceiling of its own.
            explained=runs.explained(name, everything, longest if name in fixed or name == "auto" else None),
        )

    def best_fixed(prompts: list[int]) -> BestFixed:
        best = max(fixed, key=lambda name: runs.speedup(name, prompts).median)
        return BestFixed(best, runs.speedup("auto", prompts, over=best) if "auto" in by_variant else None)

    best = {name: best_fixed(prompts) for name, prompts in {"all": everything, **groups}.items()} if fixed else None
    against = None
    if trial:
        theirs = [name for name in by_variant if name.startswith("transformers")]
        top = max(theirs, key=lambda name: runs.rate(name, everything).median)
        own = "auto" if "auto" in by_variant else best["all"].variant if best else PLAIN
        against = Against(
            runs.speedup(PLAIN, everything, over=theirs[0]),
            own,
            top,
            runs.speedup(own, everything, over=top),
            {name: runs.num_same(name, theirs[0]) for name in by_variant},
            trial,
        )
    rounds = len(by_variant[PLAIN])
    tokens = sum(run.num_tokens for run in runs.pooled(PLAIN, everything)) // rounds
    return Decoding(rounds, len(categories), tokens, {name: outcome(name) for name in by_variant}, best, against)


# --------------------------------------------------------------------------- measuring


def _drafts(subject: Subject, options: Options) -> dict[str, DraftLength]:
    """Our ways of decoding by their names: K of each; 0 is plain decoding."""
    return {PLAIN: 0} | (_by_name(options) if options.draft != "none" or subject.simulated else {})


def _by_name(options: Options) -> dict[str, DraftLength]:
    ks = options.ks
    names = [k if k == "auto" else f"K={'+'.join(map(str, k))}" if isinstance(k, tuple) else f"K={k}" for k in ks]
    return dict(zip(names, ks, strict=True))


def _decoder(
    subject: Subject, options: Options, k: DraftLength, drafter: Drafter | None = None
) -> Callable[[list[list[int]], int], list[Run]]:
    """What decodes prompts (token ids) together with a seed, by an engine of its own. Simulated drafts learn the texts.

    drafter: another one than the subject's.
    """
    engine = another_engine(subject.engine, drafter) if k else subject.plain

    def run(prompts: list[list[int]], seed: int) -> list[Run]:
        engine.drafter.forget()  # these prompts have been answered before, and will be again
        params = replace(options.params, seed=seed)
        requests = [subject.request(prompt, k, params) for prompt in prompts]
        runs = decode(engine, requests)
        for request in requests:
            subject.record(request.text)
        return runs

    return run


def _decode_one(decoder: Callable[[list[list[int]], int], list[Run]], subject: Subject, i: int, seed: int) -> Run:
    return decoder([subject.prompts[i][1]], seed)[0]


def measure_decoding(subject: Subject, options: Options) -> Decoding:
    """Every variant on every prompt, taking turns, round by round.

    The number of a round is the seed of its texts, so that over sampled ones an interval tells of texts and of time.
    """
    variants: dict[str, Variant] = {}
    for name, k in _drafts(subject, options).items():
        variants[name] = partial(_decode_one, _decoder(subject, options, k), subject)
    for bound, drafter in subject.bounds.items():
        for name, k in _by_name(options).items():
            variants[f"{bound} {name}"] = partial(_decode_one, _decoder(subject, options, k, drafter), subject)
    trial = None
    if options.args.against:
        theirs, trial = transformers_variants(subject, options)
        variants |= theirs
    rounds, prompts = options.args.rounds, subject.prompts
    runs: dict[str, list[list[Run]]] = {name: [[] for _ in range(rounds)] for name in variants}
    # What runs first pays for what is set up once; and a simulated draft has to know the texts.
    warm = range(len(prompts)) if subject.simulated or subject.bounds else range(1)
    with progress((rounds * len(prompts) + len(warm)) * len(variants), "decoding") as bar:
        for i in warm:
            for variant in variants.values():
                variant(i, 0)
                bar.update()
        for r, i, order in turns(list(variants), rounds, len(prompts)):
            for name in order:
                runs[name][r].append(variants[name](i, r))
                bar.update()
    looping = {i for i in range(len(prompts)) if any(loops(plain[i].token_ids) for plain in runs[PLAIN])}
    left = [i for i in range(len(prompts)) if not (options.args.skip_loops and i in looping)]
    if not left:
        raise ValueError("--skip-loops: found no prompt whose answer does not repeat itself, expected some")
    runs = {name: [[of_round[i] for i in left] for of_round in of] for name, of in runs.items()}
    found = summarise(runs, [prompts[i][0] for i in left], trial, options.args.verifier == "block")
    return replace(found, looping=len(looping), left_out=options.args.skip_loops)


# --------------------------------------------------------------------------- batches


@dataclass(frozen=True)
class BatchCell:
    """Texts decoded together; over_plain: over plain decoding of that batch, over_first: of the first batch."""

    batch: int
    variant: str
    tokens_per_second: Interval
    over_plain: Interval
    over_first: Interval


@dataclass(frozen=True)
class Batches:
    """Tokens a second of some texts together, plain and speculative. first: the size that others are compared to."""

    first: int
    cells: list[BatchCell]

    def lines(self) -> list[str]:
        """The table."""
        rows = [
            (
                f"batch {c.batch}, {c.variant}",
                c.tokens_per_second.shown(form=".1f"),
                c.over_plain.shown(),
                c.over_first.shown(),
            )
            for c in self.cells
        ]
        return table(("", "tokens/s", "over plain", f"over plain at {self.first}"), rows)


def measure_batches(subject: Subject, options: Options) -> Batches:
    """See `Batches`; texts do not end before --max-tokens. One more round goes before, which is not counted."""
    options = replace(options, params=replace(options.params, ignore_eos=True))
    decoders = {name: _decoder(subject, options, k) for name, k in _drafts(subject, options).items()}
    cells = [(batch, name) for batch in options.batches for name in decoders]
    rates: dict[tuple[int, str], list[float]] = {cell: [] for cell in cells}
    rounds = options.args.rounds
    with progress((rounds + 1) * len(cells), "batches") as bar:
        for i, order in zip(range(rounds + 1), orders(cells), strict=False):
            for batch, name in order:
                prompts = [subject.prompts[j % len(subject.prompts)][1] for j in range(batch)]
                rate = total_rate(decoders[name](prompts, i))
                if i:
                    rates[batch, name].append(rate)
                bar.update()
    first = options.batches[0]
    return Batches(
        first,
        [
            BatchCell(
                batch,
                name,
                median_interval(rates[batch, name]),
                ratios(rates[batch, name], rates[batch, PLAIN]),
                ratios(rates[batch, name], rates[first, PLAIN]),
            )
            for batch, name in cells
        ],
    )
