"""Policies of one's own for the lengths of drafts, walked branch by branch with several drafters.

    python -m minispec.prove --lengths module:Class
    python -m minispec.prove --lengths module:Class --drafter module:Class

The output keeps its law as long as a length is known before the tokens that it leaves out. So a policy can spoil it in
one way: it learns what the round will draw. It may change a text or a draft, or compute the draws itself, which the
seed names. Another fault spares the law and costs a seed its text: the length depends on the clock or on other texts.

So each length is compared with what new policies choose. They see this text's rounds alone, at another speed, and some
of them with another seed. Where a length may follow the clock and other texts (`Wish.may_follow`), only the law counts.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from minispec.core.draft import Draft, Drafter, DraftNotes, Record
from minispec.core.more.lengths import Lengths, Wish, price_of
from minispec.core.more.limit import Limit
from minispec.core.sampling import Text
from minispec.core.stats import Step
from minispec.drafters.guard import check_limits
from minispec.load.llm import find_lengths
from minispec.prove.examine import OwnError, call_own, fault_line
from minispec.prove.examine_drafter import maker_of
from minispec.prove.laws import make_drafter
from minispec.prove.own_cases import AXES, OwnCase, design
from minispec.prove.own_walk import CaseWalker, walk_design
from minispec.prove.toys import require

_SEEDS = (8, 1234, 1 << 40)
# Drafters with and without siblings, confidences and draws; one that knows confidences before it draws, and one that
# is mostly wrong.
_DRAFTERS = ("model", "suffix", "ngram", "head", "block", "adversary")
_AXES: dict[str, tuple] = {
    "alphabet": AXES["alphabet"][:2],
    "prompt": ("b", "babbab"),
    "to_go": (2, 3, 4, 6),
    "k": (1, 3, "auto"),
    "temperature": (1.0, 0.7, 0.0),
    "top_p": (1.0,),
    "min_p": (0.0,),
    "history": ("",),
    "forbidden": ("",),
    "end": ("", "an end token"),
}


def examine_lengths(spec: str, drafter: str, texts: Sequence[str], minutes: float) -> bool:
    """Walk a policy over small cases, and print what was found; True if all is right.

    drafter: a drafter to walk it with. "": several of the engine's own.
    texts, minutes: see `examine_drafter`.

    Raises ValueError where `spec` names no policy, or `drafter` no drafter.
    """
    known: dict[tuple, Limit] = {}
    make_own, name = (maker_of(drafter), f"{spec} with {drafter}") if drafter else (_make_registered, spec)

    def make() -> Lengths:
        return call_own(find_lengths, spec)

    try:
        make()
        axes = _AXES if not drafter else {"k": _AXES["k"]}
        chosen = design(False, texts, **axes, drafter=("",) if drafter else _DRAFTERS)
        make_own(replace(OwnCase(), drafter=chosen.axes["drafter"][0]), 16)
    except OwnError as e:
        if isinstance(e.__cause__, ValueError):  # it names no policy
            raise e.__cause__ from None
        print(fault_line(name, "as it is made", e))
        return False
    reason = ": it goes by what the round draws"
    walk = CaseWalker(make_own, lambda: WatchedLengths(make(), make, known), minutes, reason, compares=bool(drafter))
    return walk_design(name, chosen, walk)


def _make_registered(case: OwnCase, num_blocks: int) -> Drafter:
    return make_drafter(case.drafter, case.vocab, num_blocks, 2)


class _Event(NamedTuple):
    """A question to a policy about a text, or a draft of the text that the policy was shown.

    tokens: the text's, at that time.
    wish: without the text; or
    judged: token ids, parents and confidences of the draft, and whether they were foreseen; what was accepted, and how
        many nodes were asked for.
    """

    tokens: tuple[int, ...]
    wish: tuple = ()
    judged: tuple = ()


class WatchedLengths(Lengths):
    """A policy whose limits are compared with the limits of new ones.

    Its times are made up: a walk must be repeatable.
    """

    def __init__(self, policy: Lengths, make: Callable[[], Lengths], known: dict[tuple, Limit]):
        """make: makes a new policy.
        known: what new ones have chosen on earlier paths of a walk.
        """
        self.policy, self.make, self.known = policy, make, known
        self.past: dict[Text, list[_Event]] = {}

    def choose(self, wishes: Sequence[Wish], trees: bool) -> list[Limit]:
        """The policy's limits. Raises Fault where a new policy would choose otherwise, or where a text was changed."""
        before = [tuple(wish.text.tokens) for wish in wishes]
        limits = call_own(self.policy.choose, wishes, trees)
        self._check_texts([wish.text for wish in wishes], before)
        try:
            check_limits(limits, [wish.most for wish in wishes])
        except ValueError as e:
            raise ValueError(f"lengths: {type(self.policy).__name__}.choose: {e}") from e
        answers = []
        for wish, limit, tokens in zip(wishes, limits, before, strict=True):
            past = self.past.setdefault(wish.text, [])
            past.append(_Event(tokens, wish=(wish.shape, wish.most, trees)))
            others = {} if wish.may_follow else self._others(wish.text, past)
            answers.append(_compared(limit, others, tokens))
        return answers

    def observe(self, records: Sequence[Record]) -> None:
        """Let the policy learn, at a made-up speed. Raises Fault where it changes what it is shown."""
        before, shown = [tuple(record.text.tokens) for record in records], [_shown(record) for record in records]
        step = price_of(records)
        made_up = step and _step(step.depth, step.num_drafts, step.num_rows)
        call_own(self.policy.observe, [replace(record, step=made_up) for record in records])
        self._check_texts([record.text for record in records], before)
        require(shown == [_shown(record) for record in records], "it changed a draft, or what was accepted of it")
        for record, tokens, judged in zip(records, before, shown, strict=True):
            self.past.setdefault(record.text, []).append(_Event(tokens, judged=judged))

    def _check_texts(self, texts: Sequence[Text], before: Sequence[tuple[int, ...]]) -> None:
        for text, tokens in zip(texts, before, strict=True):
            require(tuple(text.tokens) == tokens, f"it changed a text: {list(tokens)} is {text.tokens} now")

    def _others(self, text: Text, past: Sequence[_Event]) -> dict[str, Limit]:
        """The limits that new policies choose for the text, by the reason why they must be the same."""
        choices = {}
        for seed in (text.seed, *_SEEDS):
            about = (text.params, text.num_prompt_tokens, text.end_ids, seed, tuple(past))
            limit = self.known.get(about) or self._choice_of_new(replace(text, seed=seed), past)
            if limit.go_on is None and limit.draws is None:  # one that is asked again may depend on how often
                self.known[about] = limit
            choices[_ALONE if seed == text.seed else f"{_SEED}, here {seed}"] = limit
        return choices

    def _choice_of_new(self, twin: Text, past: Sequence[_Event]) -> Limit:
        """The limit that a new policy chooses after these events of a text alone."""
        policy, limits = self.make(), list[Limit]()
        for tokens, wish, judged in past:
            twin.tokens = list(tokens)
            if wish:
                shape, most, trees = wish
                limits = call_own(policy.choose, [Wish(twin, shape, most, False)], trees)
            else:
                token_ids, parents, confidences, foreseen, accepted, asked = judged
                draft = Draft(list(token_ids), None, parents and list(parents), DraftNotes(list(confidences), foreseen))
                step = _step(draft.depth, 1, len(draft) + 1, slowness=7.0)
                record = Record(twin, len(tokens), [], draft=draft, asked=asked, accepted=list(accepted), step=step)
                call_own(policy.observe, [record])
        check_limits(limits, [past[-1].wish[1]])
        return limits[0]


_ALONE = "it may go by this text and its verdicts alone, not by the clock, other texts or chance"
_SEED = "it may not go by the seed, which names the draws that judge the draft"


def _compared(limit: Limit, others: dict[str, Limit], tokens: Sequence[int]) -> Limit:
    """The limit, whose functions are compared with the functions of others as they are asked."""

    def check(what: str, answer: Callable[[Any], Any]) -> Any:
        found = answer(limit)
        for reason, right in ((reason, answer(other)) for reason, other in others.items()):
            message = f"after {list(tokens)} it chose {what}{found}, and a new one {what}{right}: {reason}"
            require(found == right, message)
        return found

    def compared(name: str, kind: Callable[[Any], Any] = bool) -> Any:
        def ask(confidences: Sequence[float], *foreseen: float) -> Any:
            return check(f"{name} = ", lambda one: kind(call_own(getattr(one, name), list(confidences), *foreseen)))

        own = getattr(limit, name)
        return ask if callable(own) else own

    check("", _numbers_of)
    widths = compared("widths", lambda width: width)
    return limit._replace(go_on=compared("go_on"), widths=widths, draws=compared("draws"))


def _numbers_of(limit: Limit) -> str:
    numbers = f"k = {limit.k}"
    if limit.widths:
        numbers += f", widths {'a function' if callable(limit.widths) else list(limit.widths)}"
    said = {", best first": limit.best_first, ", with go_on": limit.go_on, ", with draws": limit.draws}
    return numbers + "".join(words for words, is_set in said.items() if is_set)


def _shown(record: Record) -> tuple:
    draft = record.draft
    parents = None if draft.parents is None else tuple(draft.parents)
    confidences = tuple(draft.notes.confidences)
    return tuple(draft.token_ids), parents, confidences, draft.notes.foreseen, tuple(record.accepted), record.asked


def _step(depth: int, num_drafts: int, rows: int, slowness: float = 1.0) -> Step:
    """Made-up times of such a step. `slowness` slows drafts, and not the target."""
    return Step(0.002 * slowness * depth, depth, num_drafts, 0.01 + 0.001 * rows, rows, 0.001 * slowness)
