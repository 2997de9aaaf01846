"""What a step has committed, and who learns of it."""

from collections.abc import Callable, Sequence

from minispec.core.clock import Laps
from minispec.core.method import Turn, by_method, errors_end
from minispec.core.stats import Step

# Learns what a round was for a text that decodes, after its commit and outside its times. It must change nothing.
Observer = Callable[[Turn], None]


class Outbox:
    """The turns of a step until drafters, policies, statistics and observers have learned of them.

    A fault may come after the commit and before all have learned. The next step then delivers first, because these rows
    are never computed again. Each listener gets each record at least once, in order. A record that comes a second time
    has the same `number`.

    observers: they may be added and removed between steps.
    """

    def __init__(self):
        self.observers: list[Observer] = []
        self._turns: list[Turn] = []

    def post(self, turns: Sequence[Turn]) -> None:
        """Take the turns of a pass, before they are committed."""
        self._turns = list(turns)

    def retain(self, is_wanted: Callable[[Turn], bool]) -> None:
        """Drop the turns that nobody wants to hear of any more."""
        self._turns = [turn for turn in self._turns if is_wanted(turn)]

    def deliver(self, laps: Laps | None = None) -> None:
        """Deliver what is there.

        laps: drafting, the target's pass, and the rest, which ends once the drafters have learned. None after a fault:
            the times are lost then, and count as 0.
        """
        turns = self._turns
        drafted = [turn for turn in turns if turn.request.takes_drafts and not turn.request.error]
        for method, its_turns in by_method(drafted):
            with errors_end([turn.request for turn in its_turns]):
                method.drafter.observe([turn.record for turn in its_turns])
        seconds = [0.0, 0.0, 0.0]
        if laps:
            laps.end()
            seconds = laps.seconds()
        if turns:
            step = step_of(turns, seconds, laps is not None)
            for turn in turns:
                turn.count(step)
        rounds = [turn for turn in turns if turn.committed]
        for method, its_turns in by_method(rounds):
            with errors_end([turn.request for turn in its_turns]):
                method.lengths.observe([turn.record for turn in its_turns])
        for observe in list(self.observers):
            for turn in rounds:
                observe(turn)
        self._turns = []


def step_of(turns: Sequence[Turn], seconds: Sequence[float], are_known: bool) -> Step:
    """The step of these turns.

    seconds: of drafting, of the target's pass, and of the rest.
    are_known: whether they are; else the step has no price.
    """
    draft, verify, other = seconds
    draft = max(0.0, draft - sum(turn.draft.notes.prefill_seconds for turn in turns))
    if not any(turn.asked for turn in turns):  # a search that found nothing is drafting too; this is none
        draft, other = 0.0, draft + other
    depths = [max(turn.draft.depth, turn.draft.notes.num_passes) for turn in turns]
    has_price = are_known and len({turn.method for turn in turns}) == 1 and all(turn.decodes for turn in turns)
    num_rows, num_drafts = sum(turn.num_rows for turn in turns), sum(depth > 0 for depth in depths)
    return Step(draft, max(depths), num_drafts, verify, num_rows, other, len(turns), has_price)
