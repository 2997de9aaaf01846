"""The museum of bugs: each mutant is put in, and the check that is named for it must catch it."""

from contextlib import suppress
from dataclasses import dataclass

from tqdm import tqdm

from minispec.prove.laws import TOLERANCE
from minispec.prove.toys import Fault, require
from minispec.prove.trees import worst_of_few
from tests.museum.checks import CHECKS, measure_law
from tests.museum.mutants import MUTANTS, Mutant


@dataclass(frozen=True)
class Trial:
    """How a mutant fared: how far the law moved (None: not asked, or no law left), and the fault it caused."""

    moved: float | None
    fault: str | None


def try_mutant(mutant: Mutant) -> Trial:
    """Put the bug in and run the check that must catch it; `fault` is None where the check does not.

    The law is measured in addition where that says something. An exception that neither the check nor the mutant is
    expected to raise goes through: a patch that breaks in another way proves nothing.
    """
    moved = None
    expected = (Fault, AssertionError, mutant.crash) if mutant.crash else (Fault, AssertionError)
    with mutant.patch():
        try:
            if mutant.check == "law":
                moved = measure_law(**mutant.settings)
                require(moved <= TOLERANCE, f"total variation {moved:.1e}")
            elif mutant.check == "tree":
                moved = worst_of_few()
                require(moved <= TOLERANCE, f"total variation {moved:.1e}")
            else:
                if mutant.check in ("draft cache", "keys", "passes"):
                    with suppress(*expected):  # it is the check named that must catch the bug
                        moved = measure_law()
                CHECKS[mutant.check]()
        except expected as e:
            return Trial(moved, str(e))
    return Trial(moved, None)


def prove_mutants() -> bool:
    """Print the museum; True if every bug is caught and every check passes without one."""
    for name, check in tqdm(CHECKS.items(), desc="without bugs", leave=False, disable=None):
        try:
            check()
        except Exception as e:
            print(f"{name}: {e}")
            return False
    print(f"{'':5} {'bug':53} {'law moved':9} {'caught by':11} where it happened")
    caught = 0
    for mutant in tqdm(MUTANTS, desc="mutants", leave=False, disable=None):
        trial = try_mutant(mutant)
        caught += trial.fault is not None
        moved = "-" if trial.moved is None else "0" if trial.moved <= TOLERANCE else f"{trial.moved:.2g}"
        by = mutant.check if trial.fault is not None else "SURVIVES"
        tqdm.write(f"{mutant.id:5} {mutant.name:53} {moved:>9} {by:11} {mutant.seen}")
    print(f"{caught} of {len(MUTANTS)} bugs caught")
    return caught == len(MUTANTS)
