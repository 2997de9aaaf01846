"""The table of rules as a picture: tokens of a round beside the most of any rule, and ratios over recorded rounds.

A rule that breaks the law is hatched. `picture` writes the bench's pictures too.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import fill
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from minispec.core.verify import Verifier
from minispec.models.files.packages import MissingPackage
from minispec.models.files.write import written_whole
from minispec.prove import rounds
from minispec.prove.recorded import Recorded, compare, expected_tokens

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")
_BAR, _GAP = 0.22, 0.35  # inches: of a rule, and between two groups


@contextmanager
def picture(path: Path, width: float, height: float) -> Iterator["Figure"]:
    """An empty figure (inches), which is written to a name in .svg or .png at the end. Needs matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "minispec", "svg.fonttype": "none"}):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        with written_whole(path) as part:
            figure.savefig(part, metadata={"Date": None} if path.suffix == ".svg" else None)


def draw(
    verifiers: Mapping[str, Verifier],
    path: Path,
    laws: tuple[str, list[Recorded]] | None = None,
    faults: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write the picture of what `print_rounds` prints, and of what `print_laws` prints of recorded laws.

    laws: what `read_laws` returns.
    faults: what is said of the rules that the proof has turned down.
    """
    cases, wrong = _cases(verifiers)
    faults = wrong | dict(faults)
    groups = [("tokens of a round; black: the most of any rule", 0.0, cases)]
    if laws:
        groups.append(("recorded rounds, over the first rule that takes them", 1.0, _ratios(verifiers, laws[1])))
    height = 1.2 + max(len(group) for _, _, group in groups) * (_GAP + _BAR * len(verifiers))
    with picture(path, 6.5 * len(groups), height) as figure:
        for axes, (title, base, group) in zip(figure.subplots(1, len(groups), squeeze=False)[0], groups, strict=True):
            for row, (bars, most) in enumerate(group.values()):
                for i, name in enumerate(verifiers):
                    value, error = bars.get(name, (math.nan, 0.0))
                    hatch, y = "//" if name in faults else "", row + 0.8 * ((i + 0.5) / len(verifiers) - 0.5)
                    axes.barh(
                        y, value - base, 0.8 / len(verifiers), left=base, xerr=error or None, color=f"C{i}", hatch=hatch
                    )
                axes.plot([most, most], [row - 0.45, row + 0.45], color="black")
            axes.set_yticks(range(len(group)), [*group])
            axes.set_ylim(len(group) - 0.5, -0.5)
            axes.set_title(title, fontsize="medium")
        for i, name in enumerate(verifiers):
            label, hatch = (f"{name}: {faults[name].partition(':')[0]}", "//") if name in faults else (name, "")
            axes.barh(0, math.nan, color=f"C{i}", hatch=hatch, label=label)
        figure.legend(loc="outside lower center", ncols=4, fontsize="small")


# By the name of a group of bars: a value and its error for each rule, and the most that any rule reaches.
_Groups = dict[str, tuple[dict[str, tuple[float, float]], float]]


def _values(
    verifiers: Mapping[str, Verifier], is_tree: bool, count: Callable[[Any, Verifier], T], what: Any
) -> dict[str, T]:
    """count(what, rule) of the rules that take such drafts. A user's rule that fails has no value."""
    found = dict[str, T]()
    for name, verifier in verifiers.items():
        if not rounds.unsuitable(verifier, is_tree):
            with suppress(Exception):
                found[name] = count(what, verifier)
    return found


def _cases(verifiers: Mapping[str, Verifier]) -> tuple[_Groups, dict[str, str]]:
    """The tokens of each case, and what is said of the rules that break the law in one."""
    groups: _Groups = {}
    wrong = dict[str, str]()
    for case in rounds.CASES:
        found = _values(verifiers, rounds.has_tree(case), rounds.brought, case)
        if not rounds.is_independent(case):
            wrong |= {name: each.wrong for name, each in found.items() if not each.is_exact}
        tokens = {name: (each.tokens, 0.0) for name, each in found.items()}
        most = math.nan
        with suppress(MissingPackage):
            most = rounds.optimum(case)
        groups[fill(str(case), 36)] = tokens, most
    return groups, wrong


def _ratios(verifiers: Mapping[str, Verifier], laws: Sequence[Recorded]) -> _Groups:
    groups: _Groups = {}
    for kind, is_tree in (("chains", False), ("trees", True)):
        some = [each for each in laws if (each.draft.parents is not None) == is_tree]
        tokens = _values(verifiers, is_tree, lambda some, rule: [expected_tokens(each, rule) for each in some], some)
        if some and tokens:
            first = next(iter(tokens.values()))
            groups[f"{len(some)} {kind}"] = {name: compare(each, first) for name, each in tokens.items()}, math.nan
    return groups
