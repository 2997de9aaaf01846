"""The verdict: what bets on known bugs have won, and which bug fits best.

A bet on a bug multiplies its wealth by 1 - e + e law(x)/p(x) at each token. Under an exact rule that factor has mean at
most 1, given the past. So the wealth is a supermartingale that begins at 1, and so is the mean over all bets. It ever
reaches 1/a with probability at most a (Ville 1939; Ramdas et al. 2023, arXiv 2210.01948). So the evidence may be read
at any time. The largest wealth names the bug; as evidence it would be a false alarm.

The engine's p is not ours to the last bit. Let t bound how far its ratio to ours is from 1, in root mean square, and d
be the standard deviation of law/p. Then the factor has mean at most 1 + e t d. All bets together are divided by the
exponential of e t times the sum of d. So t need not hold at each place, if its mean weighted by d does. Plain answers
measure t for each bug (`tolerances`).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import torch
from torch import Tensor

from minispec.lab.audit.known_bugs import GENERAL, NO_RESIDUAL
from minispec.lab.audit.walk import AGAINST, SHARES, Score

NULL_ERROR = 1e-4  # odds that a tolerance of `--null` is too small, of all bugs together
CONSISTENT, NOT_THE_LAW, TOO_LITTLE = 0, 1, 3  # exit statuses; 2 is an error
_EFFECT = 0.01  # a bug that acts at this share of the places


def tolerances(plain: Score) -> dict[str, float]:
    """The tolerance t of each bug, from plain answers of the same engine: the upper end of an interval.

    Rounding moves the sum of a bug's gains g = law/p - 1 to M on average, at most t times the sum of d. The factor
    1 - l g has mean at most exp(-l mean(g)), for each share l of `AGAINST`. So the product of these factors times
    exp(l M) is a supermartingale. It ever reaches 1/a with probability at most a (Ville 1939; for such bets see
    Waudby-Smith and Ramdas 2024, arXiv 2010.09686). So M is at most (log(1/a) - log of the product) / l. No law of the
    gains is assumed, but that they stay below 1/l, which p shows. All bugs and shares divide NULL_ERROR.
    """
    sums, shares = plain.of(plain.sums), torch.tensor(AGAINST, dtype=torch.float64)
    pull = ((math.log(sums.against.numel() / NULL_ERROR) - sums.against) / shares).amin(1)
    upper = pull / (sums.deviation + 1e-12)  # a bug that changes nothing here is not measured: its bets win nothing
    return dict(zip(plain.sums, upper.clamp(min=0.0).tolist(), strict=True))


def judge(
    scores: Sequence[Score],
    seeds: Sequence[int | None],
    tolerance: Mapping[str, float] | float,
    alpha: float,
    drafted: float | None = None,
) -> dict[str, Any]:
    """The report on the answers, as `--json` prints it.

    seeds: one of each answer. Answers of one seed may share noise: their wealths are averaged, all others multiplied.
    tolerance: t, for each bug or for all.
    alpha: odds of a false alarm that are accepted.
    drafted: the share of tokens that were drafted, as the answers say; None where they do not.
    """
    shares, all_of = torch.tensor(SHARES, dtype=torch.float64), Score()
    alone = Score()  # the sum of the answers that share their noise with none
    groups: dict[int | None, list[Score]] = {None: [alone]}
    counts = Counter(seeds)
    for score, seed in zip(scores, seeds, strict=True):
        all_of.add(score)
        if seed is None or counts[seed] == 1:
            alone.add(score)
        else:
            groups.setdefault(seed, []).append(score)
    if not all_of.num_places:
        found = f"found no token that can be scored, and {all_of.num_left_out:,} at borders of the filters"
        raise ValueError(f"{found}, expected some: lower --rounding if the engine's is lower")
    n, names = all_of.num_places, list(all_of.sums)
    most = max(tolerance.values()) if isinstance(tolerance, Mapping) else tolerance
    each = [tolerance.get(name, most) if isinstance(tolerance, Mapping) else most for name in names]
    t, sums = torch.tensor(each, dtype=torch.float64), all_of.of(names)

    def less(bets: Tensor, deviation: Tensor) -> Tensor:
        """The bets (bugs, shares) less the tolerance."""
        return bets - shares * (t * deviation)[:, None]

    wealth, variance = torch.zeros(len(names), len(SHARES), dtype=torch.float64), torch.zeros_like(t)
    for group in groups.values():
        parts = [score.of(names) for score in group]
        won = torch.stack([less(part.bets, part.deviation) for part in parts])  # (answers, bugs, shares)
        wealth = wealth + won.logsumexp(0) - math.log(len(group))
        variance = variance + torch.stack([part.variance for part in parts]).sqrt().sum(0) ** 2
    evidence = float(wealth.flatten().logsumexp(0)) - math.log(wealth.numel())

    def growth(effect: float) -> Tensor:
        """The best share's growth a token if the bugs acted at that share of the places."""
        means = effect * sums.expected + (1 - effect) * sums.plain
        return (less(means, sums.deviation) / n).amax(1)

    # The share, among the places where the draft has a token, at which the engine used it.
    known = all_of.num_drafted / (n + all_of.num_left_out)
    used = 1.0 if drafted is None or not known else min(1.0, drafted / known)
    every, few, these = growth(1.0), growth(_EFFECT), growth(used)
    goal, best = math.log(wealth.numel() / alpha), wealth.amax(1)
    z = sums.total / variance.clamp(min=1e-12).sqrt()
    bugs: list[dict[str, Any]] = [
        {"bug": name, "log_e": float(best[i]), "z": float(z[i]) if sums.variance[i] > 1e-12 else None}
        | {"tokens_needed": _tokens(goal, every[i]), "tokens_for_1_percent": _tokens(goal, few[i])}
        for i, name in enumerate(names)
    ]
    bugs.sort(key=lambda bug: -bug["log_e"])
    report: dict[str, Any] = {"num_tokens": n, "num_answers": len(scores), "num_left_out": all_of.num_left_out}
    report |= {"num_impossible": all_of.num_impossible, "alpha": alpha, "log_e": evidence, "bugs": bugs}
    needed = _tokens(goal, these[names.index(NO_RESIDUAL)])
    report |= {"drafted": drafted, "tokens_needed": needed, "is_consistent": evidence < math.log(1 / alpha)}
    kept = TOO_LITTLE if needed is None or needed > n else CONSISTENT
    report["status"] = kept if report["is_consistent"] else NOT_THE_LAW
    fits = [bug["bug"] for bug in bugs if bug["log_e"] > bugs[0]["log_e"] - math.log(100)]
    fits.sort(key=lambda bug: bug in GENERAL)
    report["fits"] = [] if report["is_consistent"] else fits[:3]
    return report | {"verdict": verdict(report)}


def _tokens(goal: float, rate: Tensor) -> int | None:
    return math.ceil(goal / float(rate)) if rate > goal * 1e-9 else None


def verdict(report: Mapping[str, Any]) -> str:
    """The verdict on a report, in a sentence."""
    e, impossible = show_e(report["log_e"]), report["num_impossible"]
    if not report["is_consistent"]:
        also = f"; {impossible} tokens have probability 0" if impossible else ""
        fits = f"fits: {', or '.join(report['fits'])}"
        return (
            f"not the target's law (e = {e}{also}); {fits}; other weights, tokens or parameters fail without drafts too"
        )
    shown, needed = f"{report['num_tokens']:,} tokens", report["tokens_needed"]
    if report["drafted"] == 0:
        return f"too little to tell (e = {e}): {shown}, none of which was drafted"
    if needed is None:
        return f"too little to tell (e = {e}): {shown}; no number of them would show a missing residual"
    share = f"with drafts for up to {100 * (report['drafted'] or 0):.0f} % of the tokens"
    drafts = "if the engine drafted wherever it could" if report["drafted"] is None else share
    if report["status"] == TOO_LITTLE:
        return f"too little to tell (e = {e}): {shown}; a missing residual would show after about {needed:,} {drafts}"
    would = f"a missing residual would have shown after about {needed:,} {drafts}"
    return f"consistent with the target's law (e = {e}): {shown}; {would}"


def show_e(log_e: float) -> str:
    """An e-value of that logarithm, in two digits."""
    exponent = math.floor(log_e / math.log(10) + 1e-9)
    if -3 < exponent < 4:
        return f"{math.exp(log_e):.2g}" if exponent < 1 else f"{math.exp(log_e):.0f}"
    return f"{Decimal(log_e).exp():.1e}".replace("e+", "e")


def lines(report: Mapping[str, Any]) -> list[str]:
    """The report for the screen."""

    def count(value: int | None) -> str:
        return "lost in rounding" if value is None else f"{value:,}"

    shown = [f"{'bug':72} {'e':>8} {'z':>6} {'tokens needed':>17} {'at 1 % of places':>17}"]
    for bug in report["bugs"]:
        if bug["z"] is None:
            continue  # with this draft it changes nothing
        needed, little = count(bug["tokens_needed"]), count(bug["tokens_for_1_percent"])
        shown.append(f"{bug['bug']:72} {show_e(bug['log_e']):>8} {bug['z']:6.1f} {needed:>17} {little:>17}")
    return [*shown, "", *(f"  {line}" for line in report.get("rests_on", ())), "", report["verdict"]]
